"""`jitney bench`: measure."""

from __future__ import annotations

from jitney.engine.cli.dispatch import Commands

run = Commands(
    "jitney bench",
    "Measure an engine.",
    {
        "serve": "send traffic to an OpenAI-compatible endpoint, ours or another's, and time it",
        "policies": "static, dynamic and continuous batching on the same requests, in this process",
        "sweep": "throughput and latency over concurrency, rate or load, with the knee marked",
        "peers": "this engine and others in turn on this machine, over HTTP, with one client",
        "step": "time of one step by rows, seats and context: the simulator's table",
        "sizes": "steps of growing sizes on this CPU, and the sizes that serve chooses by them",
        "device": "kernels, steps and engine on this accelerator, each beside its floor",
    },
    prefix="bench_",
).run
