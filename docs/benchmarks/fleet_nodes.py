"""A fleet under Ray over several nodes, one of which is lost: whether every request is answered,
and how long it takes until as many engines are ready again.

    python docs/benchmarks/fleet_nodes.py [--model smollm2-135m] [--requests 12]

The nodes are Ray's own, three beside the head's, all on this machine: each has a raylet and one CPU
to give, and so one engine at most. Two engines are started; the node of one is killed with half of
the requests at it, and the third node gets the engine that takes its place.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from urllib.parse import urlsplit

import httpx
import psutil
import ray
from fleet_throughput import KEY, get, running_fleet
from ray.cluster_utils import Cluster

from jitney.engine.machine import cpu_name

_NODES = 3
_READY_S = 300.0


def _cluster() -> Cluster:
    """A head that has no engine, and nodes that have one each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(_NODES):
        cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    return cluster


def _engines(url: str) -> dict[str, str]:
    """Name -> URL of those that are ready."""
    known = get(url + "/fleet/replicas").json()["models"]["m"]
    return {each["name"]: each["url"] for each in known if each["state"] == "ready"}


def _raylets_above(port: int) -> set[int]:
    """Processes that the engine listening to this port descends from."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(port) in words and "serve" in words:
            return {parent.pid for parent in process.parents()}
    raise SystemExit(f"no engine listens to {port}")


def _node_of(cluster: Cluster, engine: str) -> object:
    """The node that an engine is on, from its URL."""
    port = urlsplit(engine).port
    assert port is not None
    above = _raylets_above(port)
    for node in cluster.worker_nodes:
        raylets = node.all_processes["raylet"]
        if above & {raylet.process.pid for raylet in raylets}:
            return node
    raise SystemExit(f"no node has the engine of {engine}")


def _body(number: int) -> dict[str, object]:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": f"Count from {number} on."}],
        "max_tokens": 48,
        "temperature": 0,
        "ignore_eos": True,
    }


async def _answers(url: str, requests: int, during: asyncio.Task[None] | None) -> list[str]:
    """Their texts; "" for an error."""
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=600, trust_env=False
    ) as http:
        asked = [http.post("/v1/chat/completions", json=_body(n)) for n in range(requests)]
        answers = await asyncio.gather(*asked)
        if during is not None:
            await during
    return [
        answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else ""
        for answer in answers
    ]


async def _lose_a_node(cluster: Cluster, url: str, engine: str) -> None:
    """Once requests are at its engine."""
    node = _node_of(cluster, engine)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        known = (await asyncio.to_thread(get, url + "/fleet/replicas")).json()["models"]["m"]
        if any(each["url"] == engine and each["open"] for each in known):
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(1)
    await asyncio.to_thread(cluster.remove_node, node, False)


async def _compare(cluster: Cluster, url: str, requests: int) -> None:
    before = _engines(url)
    lost = next(iter(before.values()))
    quiet = await _answers(url, requests, None)
    losing = asyncio.create_task(_lose_a_node(cluster, url, lost))
    answers = await _answers(url, requests, losing)
    began = time.monotonic()
    same = sum(one == other for one, other in zip(quiet, answers, strict=True))
    print(f"{sum(map(bool, answers))} of {requests} answered, {same} with the text of before")
    while time.monotonic() - began < _READY_S:
        now = _engines(url)
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
        with running_fleet(args.model, 2, "ray", "round-robin", ray="cpus = 1") as url:
            asyncio.run(_compare(cluster, url, args.requests))
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
