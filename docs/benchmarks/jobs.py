"""Jobs whose receiver fails every third time: each end is taken exactly once by its key.

    python docs/benchmarks/jobs.py [--jobs 1000] [--model tiny-random] [--hurry 600]

Starts `jitney serve` and a receiver on this machine, sends the jobs, and waits until every end
was taken. A message that failed comes again after 5 s, 30 s, 2 minutes, 10 minutes, an hour and so
on: of 1,000 a dozen need the hour, so here the pauses are divided by --hurry.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

from faults import Server, serving

from jitney.engine.common.machine import cpu_name

#: Requests that are sent at once.
AT_ONCE = 16
#: Seconds that all of it may take.
MOST_S = 3600.0
#: `jitney serve` whose pauses between two tries of a webhook are shorter.
HURRIED = """
import sys
from jitney.engine.server.tasks import webhooks
from jitney.engine.cli import main
webhooks._PAUSES_S = tuple(pause / {hurry} for pause in webhooks._PAUSES_S)
sys.exit(main())
"""


class Receiver(BaseHTTPRequestHandler):
    """Answers every third message with a 500, and counts the others by their key."""

    protocol_version = "HTTP/1.1"
    tries = 0
    taken: ClassVar[Counter[str]] = Counter()
    job_of: ClassVar[dict[str, str]] = {}
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.lock:
            Receiver.tries += 1
            fails = Receiver.tries % 3 == 0
            if not fails:
                self.taken[self.headers["webhook-id"]] += 1
                self.job_of[self.headers["webhook-id"]] = body["data"]["id"]
        self.send_response(500 if fails else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


async def send(server: Server, number: int, url: str, places: asyncio.Semaphore) -> str:
    """Begin one job; its id."""
    body = {"prompt": [number % 400 + 10] * 8, "max_tokens": 16, "ignore_eos": True}
    job = {"endpoint": "/v1/completions", "body": body, "webhook_url": url}
    async with places:
        answer = await server.client.post(
            "/v1/jobs", json=job, headers={"idempotency-key": f"job {number}"}
        )
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


async def measure(jobs: int, model: str, hurry: float) -> None:
    receiver = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{receiver.server_port}/"
    with tempfile.TemporaryDirectory(prefix="jitney-jobs-") as name:
        folder = Path(name)
        secret = folder / "secret"
        secret.write_text("a secret of this run")
        secret.chmod(0o600)
        flags = ("--webhook-prefixes", url, "--webhook-secret-file", str(secret))
        program = (sys.executable, "-c", HURRIED.format(hurry=hurry))
        async with serving(model, folder, *flags, program=program) as server:
            began = time.monotonic()
            places = asyncio.Semaphore(AT_ONCE)
            ids = await asyncio.gather(*(send(server, n, url, places) for n in range(jobs)))
            sent_s = time.monotonic() - began
            while len(Receiver.taken) < jobs and time.monotonic() - began < MOST_S:
                await asyncio.sleep(1.0)
            seconds = time.monotonic() - began
    assert set(Receiver.job_of.values()) <= set(ids)
    twice = sum(count > 1 for count in Receiver.taken.values())
    print(
        f"{model}, {cpu_name()}; pauses divided by {hurry:g}\n\n"
        "| jobs | ends taken | taken twice | messages | all sent after, s | all told after, s |\n"
        "|---|---|---|---|---|---|\n"
        f"| {jobs:,} | {len(Receiver.taken):,} | {twice} | {Receiver.tries:,} | {sent_s:.1f} | "
        f"{seconds:.0f} |"
    )


def main() -> None:
    flags = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags.add_argument("--jobs", type=int, default=1000)
    flags.add_argument("--model", default="tiny-random")
    flags.add_argument("--hurry", type=float, default=600.0)
    args = flags.parse_args()
    asyncio.run(measure(args.jobs, args.model, args.hurry))


if __name__ == "__main__":
    main()
