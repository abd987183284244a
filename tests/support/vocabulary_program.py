"""Samples from logits whose columns are sharded over several devices, and from the same logits on
one device; `test_vocabulary` starts it, since the number of devices must be set before jax starts.

python vocabulary_program.py OUT: OUT is an .npz file for the results of `compared` with 4 devices.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jitney.engine.core.executor.inputs import BIASED, PENALISED, SCORED
from jitney.engine.core.executor.program import _COLUMNS
from jitney.engine.core.executor.sampling import _IN_PROMPT, Sampler, SamplingRows, SeatState
from jitney.engine.core.executor.vocabulary import SplitVocabulary, Vocabulary
from jitney.engine.core.models.sharding import WHOLE, make_mesh

#: Columns and rows of the logits. The columns of one of 4 devices are not a multiple of 128, so
#: lanes reach past their end.
VOCAB, ROWS = 3000, 48
#: Number of alternatives of each token.
WIDTH = 5
#: Sampling settings of all rows of a case, except temperature and seed.
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "top_k": {"top_k": 40},
    "top_k of most": {"top_k": 2500},
    "top_k of ties": {"top_k": 7, "ties": True},
    "top_p": {"top_p": 0.9},
    "top_p of few": {"top_p": 0.3, "sharpness": 6.0},
    "both": {"top_k": 300, "top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "penalties": {
        "parts": PENALISED,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "temperature": 0.0,
    },
    "bias": {"parts": BIASED, "top_k": 20},
    "logprobs": {"parts": SCORED, "top_p": 0.95},
    "all": {
        "parts": PENALISED | BIASED | SCORED,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "top_k": 200,
        "top_p": 0.9,
        "min_p": 0.01,
    },
    "masked": {"top_p": 0.9, "masked": True},
    "masked but for one device": {"temperature": 0.0, "masked": True, "last": 700},
    "broken": {"broken": True, "parts": SCORED},
}
#: Fields of `Sampled`, in its order.
PARTS = ("tokens", "own", "ids", "best")
FLOATS = ("temperature", "top_p", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def rows_of(case: dict[str, Any]) -> SamplingRows:
    """ROWS rows, each with a seed and a seat of its own."""
    defaults = {"temperature": 0.9, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    params = {
        name: jnp.full(ROWS, case.get(name, defaults.get(name, 0.0)), jnp.float32)
        for name in (*FLOATS, *PENALTIES)
    }
    params["top_k"] = jnp.full(ROWS, case.get("top_k", 0), jnp.int32)
    params["parts"] = jnp.full(ROWS, case.get("parts", 0), jnp.int32)
    params["seed"] = jnp.stack([jnp.arange(ROWS), jnp.arange(ROWS) * 7], 1).astype(jnp.int32)
    return SamplingRows(params, jnp.arange(ROWS) + 10, jnp.arange(ROWS))


def logits_of(case: dict[str, Any], draw: np.random.Generator) -> np.ndarray:
    """Random logits of a case, float32 [ROWS, VOCAB]."""
    logits = draw.normal(size=(ROWS, VOCAB)).astype(np.float32) * case.get("sharpness", 2.0)
    if "ties" in case:
        logits = np.round(logits)
    if "broken" in case:
        logits[::3] = np.nan
        logits[1::3, 10] = np.inf
    return logits


def state_of(draw: np.random.Generator) -> SeatState:
    """Random seats with written tokens, and with biases at both ends of every device's columns."""
    state = SeatState.empty(ROWS, VOCAB)
    counts = draw.integers(0, 3, (ROWS, VOCAB)) * draw.integers(0, 2, (ROWS, VOCAB))
    counts[:, ::5] |= _IN_PROMPT
    ids = np.asarray(state.bias_ids).copy()
    ids[:, :8] = [0, 749, 750, 1499, 1500, 2249, 2250, 2999]
    values = np.zeros(ids.shape, np.float32)
    values[:, :8] = draw.normal(size=(ROWS, 8)) * 6
    return SeatState(
        jnp.asarray(counts, jnp.int32),
        jnp.asarray(ids),
        jnp.asarray(values),
        jnp.full(ids.shape, 1 << 20, jnp.int32),
    )


def sampler(mesh: Mesh | None) -> Any:
    """`Sampler.sample` and the token counts after it, compiled for these devices."""
    vocabulary = Vocabulary() if mesh is None else SplitVocabulary(mesh.size)

    def step(logits: Any, rows: SamplingRows, state: SeatState, allowed: Any) -> Any:
        sampled = Sampler(None, WIDTH, vocabulary).sample(logits, rows, state, allowed)
        return sampled, state.count_tokens(rows, sampled.tokens)

    if mesh is not None:
        specs = _COLUMNS, WHOLE, WHOLE, WHOLE
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=WHOLE, check_vma=False)
    return jax.jit(step).lower(*arguments(CASES["all"])).compile()


def arguments(case: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of `sampler`."""
    draw = np.random.default_rng(sum(map(ord, str(case))))
    allowed = np.ones((ROWS, VOCAB), bool)
    if "masked" in case:
        allowed = draw.integers(0, 2, (ROWS, VOCAB)) > 0
        allowed[:, case.get("last", VOCAB) :] = False
    return logits_of(case, draw), rows_of(case), state_of(draw), allowed


def compared(mesh: Mesh) -> dict[str, np.ndarray]:
    """Case and part -> that part of one device's results, and of the mesh's: [2, ...].

    tokens int32 [2, ROWS], own float32 [2, ROWS], ids and best [2, ROWS, WIDTH]; counted: the
    seats' count of each token, int32 [2, VOCAB]. gather: most elements that an all-gather of the
    mesh's sampler returns.
    """
    one, several = sampler(None), sampler(mesh)
    results: dict[str, np.ndarray] = {}
    for name, case in CASES.items():
        args = arguments(case)
        (alone, seats), (split, split_seats) = one(*args), several(*args)
        for part, pair in zip(PARTS, zip(alone, split, strict=True), strict=True):
            results[f"{name} {part}"] = np.stack(pair)
        before = np.asarray(args[2].counts)
        results[f"{name} counted"] = np.stack(
            [np.sum(after.counts - before, axis=0) for after in (seats, split_seats)]
        )
    shapes = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", several.as_text())
    widest = max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)
    return results | {"gather": np.array(widest)}


if __name__ == "__main__":
    np.savez(sys.argv[1], **compared(make_mesh(jax.devices()[:4])))  # pyright: ignore[reportArgumentType]
