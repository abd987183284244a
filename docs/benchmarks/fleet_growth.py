"""A fleet under Ray that grows under load and shrinks behind it: how many engines are ready, and
when that changes.

    python docs/benchmarks/fleet_growth.py [--model tiny-random] [--streams 48] [--load-s 120]

One engine of 4 seats, at most three; more streams than they have seats send one request after
another, then none. Ray Serve lets an engine go only after ten minutes without need of it.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import httpx
from fleet_throughput import KEY, get, running_fleet, stream

from jitney.engine.common.machine import cpu_name

_SEATS = 4
_RAY = "cpus = 0.1, max_replicas = 3, target_wait_s = 0.5"


class _Watch:
    """Prints how many engines are ready whenever that changes."""

    def __init__(self, url: str):
        self._url = url
        self._began = time.monotonic()
        self._seen = 0

    def ready(self) -> int:
        known = get(self._url + "/fleet/replicas").json()["models"]["m"]
        count = sum(each["state"] == "ready" for each in known)
        if count != self._seen:
            print(f"{time.monotonic() - self._began:6.0f} s: {count} ready", flush=True)
            self._seen = count
        return count

    async def watch(self, seconds: float, until: int = 0) -> None:
        """For so long, or until so many are ready."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and await asyncio.to_thread(self.ready) != until:
            await asyncio.sleep(1)


async def _grow_and_shrink(url: str, args: argparse.Namespace) -> None:
    watch = _Watch(url)
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=600, trust_env=False
    ) as http:
        running = [asyncio.create_task(stream(http, number)) for number in range(args.streams)]
        await watch.watch(args.load_s)
        lost = sum(task.done() for task in running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    print(f"the load ends; {lost} of {args.streams} streams had an error", flush=True)
    await watch.watch(args.idle_s, until=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="tiny-random")
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--load-s", type=float, default=120.0)
    parser.add_argument("--idle-s", type=float, default=1500.0)
    args = parser.parse_args()
    print(f"{cpu_name()}; {args.model}, {_SEATS} seats, {args.streams} streams")
    with running_fleet(args.model, 1, "ray", "least-wait", _SEATS, _RAY) as url:
        asyncio.run(_grow_and_shrink(url, args))


if __name__ == "__main__":
    main()
