"""An engine of a few lines for `bench peers`: streams a fixed number of tokens a second to each
request.

    python fake_engine.py NAME LOG [--tokens-s X] [--extra-token] [--die] --host HOST --port PORT

LOG gets a line when it starts, when it is ready, and for the most requests that were open at a
time.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("log")
parser.add_argument("--tokens-s", type=float, default=400.0)
parser.add_argument("--extra-token", action="store_true")
parser.add_argument("--die", action="store_true")
parser.add_argument("--host")
parser.add_argument("--port", type=int)
args = parser.parse_args()
lock = threading.Lock()
open_now = most_open = looks = 0


def write(line: str) -> None:
    with open(args.log, "a") as log:
        log.write(f"{args.name} {line}\n")


class Handler(BaseHTTPRequestHandler):
    """Answers like a server of completions."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        global looks
        if self.path == "/health":
            looks += 1
            self.reply(200 if looks > 1 else 503, b"")
        elif self.path == "/version":
            self.reply(200, json.dumps({"version": f"{args.name}-1.0"}).encode())
        else:
            self.reply(200, b'{"data":[{"id":"fake"}]}')

    def do_POST(self) -> None:
        global open_now, most_open
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        fair = body["temperature"] == 0 and body["ignore_eos"] and body["stream"]
        if not fair or not all(isinstance(token, int) for token in body["prompt"]):
            self.reply(400, b"{}")
            return
        with lock:
            open_now += 1
            if open_now > most_open:
                most_open = open_now
                write(f"open {most_open}")
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        for _ in range(body["max_tokens"]):
            time.sleep(1 / args.tokens_s)
            self.send({"choices": [{"text": "x", "finish_reason": None}]})
        with lock:
            open_now -= 1
        count = body["max_tokens"] + args.extra_token
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        self.send({"choices": [{"text": "", "finish_reason": "length"}]})
        self.send({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def send(self, chunk: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    request_queue_size = 64


if args.die:
    write("dies")
    sys.exit("no such model, says the fake")
# A shell that starts this program in the background makes it ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
write("starts")
try:
    Server((args.host, args.port), Handler).serve_forever()
except KeyboardInterrupt:
    write("stops")
