"""The parts of a device's measurement, the most important first: right answers, the limits, the
goals, then the peers of one goal.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

_NOTHING: Mapping[str, str] = MappingProxyType({})
#: Without graphs, since the profiler may only see a graph as a whole.
_NO_GRAPHS = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
#: Without XLA's own Triton products; our kernels are not affected.
_NO_TRITON = {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"}


class Part(NamedTuple):
    """One part, which runs in its own process."""

    about: str
    #: MODULE:FUNCTION below this package, which makes the tasks of a job (with jax, also from the
    #: kernel sets and the dtype); "": the floors, with which all others are compared.
    tasks: str
    starts_jax: bool = True
    needs_floors: bool = True
    #: Whether it is only for NVIDIA GPUs.
    nvidia: bool = False
    #: Values that are added to environment variables of its process.
    environment: Mapping[str, str] = _NOTHING


PARTS = {
    "smoke": Part(
        "compiler, one kernel and one graph, in seconds: whether anything below can run",
        "smoke:smoke",
        needs_floors=False,
    ),
    "check": Part(
        "tokens of the engine and every kernel case, compared before anything is timed",
        "check:checks",
        needs_floors=False,
    ),
    "floors": Part("copy bandwidth, product rate, launches", ""),
    "attention": Part("decode, prompt and mixed attention", "kernels:attention"),
    "steps": Part("whole decode steps of 1 to 32 seats, short contexts", "steps:short_steps"),
    "quantised": Part("decode steps with weights in fp8, int8 and int4", "steps:quantised_steps"),
    "prefill": Part("steps of one prompt, 512 to 8,192 rows", "steps:prefill_steps"),
    "loop": Part(
        "the engine in a closed loop, its host gap, and the batch that peers are given",
        "loop:closed_loop",
    ),
    "serve": Part(
        "jitney serve on random weights: until it is ready, then streams over HTTP",
        "serving:serving",
        starts_jax=False,
        needs_floors=False,
    ),
    "kernels-of-a-step": Part(
        "each kernel of a decode step, by the profiler",
        "step_kernels:step_kernels",
        needs_floors=False,
        environment=_NO_GRAPHS,
    ),
    "graphs": Part(
        "decode steps again, without CUDA graphs",
        "steps:short_steps",
        nvidia=True,
        environment=_NO_GRAPHS,
    ),
    "cublas": Part(
        "decode steps again, in bf16 and fp8, products by cuBLASLt alone",
        "steps:library_steps",
        nvidia=True,
        environment=_NO_TRITON,
    ),
    "transformers": Part(
        "transformers' continuous batching on the same batches of requests",
        "peers:batching",
        starts_jax=False,
    ),
    "crowds": Part("the batch with 1 to 256 streams", "loop:crowds"),
    "vllm": Part("vLLM on the same batches of requests", "vllm_peer:batching", starts_jax=False),
    "contexts": Part("decode steps of up to 256 seats and 32k contexts", "steps:long_steps"),
    "products": Part("products with weights in each scheme", "products:products"),
    "write": Part("norm, rotation and write of keys and values", "kernels:writes"),
    "sampling": Part("top-p threshold over the vocabulary", "products:thresholds"),
    "flashinfer": Part(
        "prompt attention by FlashInfer's kernels, called as they would serve",
        "prompt_peers:flashinfer_prompts",
    ),
}
