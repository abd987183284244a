"""Loses one node of a fleet under Ray: measures whether every request is answered, and the time
until as many engines as before are ready again.

    python docs/benchmarks/fleet_nodes.py [--model smollm2-135m] [--requests 12]

Ray runs three nodes beside the head, all on this machine: each has a raylet and one CPU, and so
runs one engine at most. Two engines are started; the node of one is killed while half of the
requests are at it, and the third node gets the engine that replaces it. Serve has a proxy on each
node that has an engine, here all at one port: clients whose connection is lost with the node send
the request again, as OpenAI's client does. The ingress is on a node that stays.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import ray
from fleet_throughput import KEY, fleet_of
from ray.cluster_utils import Cluster
from running import Server, ready_engines, wait_engines

from jitney.engine.common.machine import cpu_name

_NODES = 3
_READY_S = 300.0
#: Most attempts of a request whose connection is lost.
_TRIES = 3


def _cluster() -> Cluster:
    """A head without engines, and nodes with room for one engine each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(_NODES):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    return cluster


def _above(*words: str) -> set[int]:
    """Ancestors (process ids) of the process whose command has all these words."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if all(any(word in part for part in command) for word in words):
            return {parent.pid for parent in process.parents()}
    raise SystemExit(f"no process is called {words}")


def _node_above(cluster: Cluster, *words: str) -> Any:
    """The node of the process whose command has these words; None: the head."""
    above = _above(*words)
    for node in cluster.worker_nodes:
        raylets = node.all_processes["raylet"]
        if above & {raylet.process.pid for raylet in raylets}:
            return node
    return None


def _victim(cluster: Cluster, engines: Iterable[str]) -> tuple[str, Any]:
    """URL and node of an engine that is not on the ingress's node."""
    ingress = _node_above(cluster, "ServeReplica:jitney:ingress")
    for engine in engines:
        port = urlsplit(engine).port
        node = _node_above(cluster, f"{port}", "serve")
        if node is not ingress:
            return engine, node
    raise SystemExit("all engines are on the ingress's node")


def _body(number: int) -> dict[str, object]:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": f"Count from {number} on."}],
        "max_tokens": 48,
        "temperature": 0,
        "ignore_eos": True,
    }


async def _ask(http: httpx.AsyncClient, number: int) -> tuple[str, int]:
    """(the text of the answer or "" for an error, the number of attempts)."""
    for turn in range(1, _TRIES + 1):
        try:
            answer = await http.post("/v1/chat/completions", json=_body(number))
        except httpx.TransportError:
            continue
        if answer.status_code != 200:
            return "", turn
        return answer.json()["choices"][0]["message"]["content"], turn
    return "", _TRIES


async def _answers(
    fleet: Server, requests: int, during: asyncio.Task[None] | None
) -> list[tuple[str, int]]:
    """The answers to all requests, each as `_ask` returns it."""
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(
        base_url=fleet.url, headers=headers, timeout=600, trust_env=False
    ) as http:
        answers = await asyncio.gather(*[_ask(http, number) for number in range(requests)])
        if during is not None:
            await during
    return answers


async def _lose(cluster: Cluster, node: Any, fleet: Server, engine: str) -> None:
    """Kill the node once its engine has open requests."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        states = (await asyncio.to_thread(fleet.get, "/fleet/replicas", KEY)).json()["models"]["m"]
        if any(each["url"] == engine and each["open"] for each in states):
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(1)
    await asyncio.to_thread(cluster.remove_node, node, False)


async def _compare(cluster: Cluster, fleet: Server, requests: int) -> None:
    before = ready_engines(fleet, KEY)
    lost, node = _victim(cluster, before.values())
    quiet = await _answers(fleet, requests, None)
    losing = asyncio.create_task(_lose(cluster, node, fleet, lost))
    answers = await _answers(fleet, requests, losing)
    began = time.monotonic()
    same = sum(one == other for (one, _), (other, _) in zip(quiet, answers, strict=True))
    answered = sum(bool(text) for text, _ in answers)
    again = sum(turns > 1 for _, turns in answers)
    print(f"{answered} of {requests} answered, {same} with the text of before, {again} asked again")
    while time.monotonic() - began < _READY_S:
        now = ready_engines(fleet, KEY)
        if lost not in now.values() and len(now) == len(before):
            print(f"as many engines were ready {time.monotonic() - began:.0f} s later")
            return
        await asyncio.sleep(0.5)
    print(f"after {_READY_S:.0f} s {len(now)} of {len(before)} engines are ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=12)
    args = parser.parse_args()
    print(f"{cpu_name()}; {args.model}, two engines on {_NODES} nodes")
    cluster = _cluster()
    try:
        os.environ["RAY_ADDRESS"] = str(cluster.address)
        with (
            tempfile.TemporaryDirectory() as folder,
            fleet_of(args.model, 2, "ray", "round-robin", Path(folder), "cpus = 1") as fleet,
        ):
            wait_engines(fleet, 2, KEY)
            asyncio.run(_compare(cluster, fleet, args.requests))
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
