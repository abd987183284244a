"""Measures `jitney serve` on random weights of the measured shape: the time until it is ready, and
its throughput over HTTP. This module does not import jax.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from jitney.engine.common.ports import free_port
from jitney.engine.common.trace import Arrival
from jitney.engine.lab.bench.client import RemoteEndpoint
from jitney.engine.lab.bench.online import OnlineBench
from jitney.engine.lab.bench.peer_process import Peer
from jitney.engine.lab.device.peers import hf_config, where_installed
from jitney.engine.lab.device.rows import PartJob, Row, Task, Tasks

_BY = "jitney serve"
_PACKAGES = ("httpx", "starlette", "uvicorn", "zmq", "prometheus_client", "tokenizers")
#: Requests for each stream.
_TURNS = 2
#: Context that the trial requests of a bench need: its prose with one token per letter.
_TRIAL_TOKENS = 512
#: Load clients; one is near a core's limit at a few thousand tokens a second.
_CLIENTS = 4


def serving(job: PartJob) -> Tasks:
    """Two starts, the second with the programs that the first has compiled; then the streams."""
    row = job.row("ready, first start", f"{job.shape}, {job.dtype}", _BY)
    yield from where_installed(iter([Task(row, partial(_serve_rows, job))]), *_PACKAGES)


def _serve_rows(job: PartJob, row: Row) -> Iterator[Row]:
    sizes = job.sizes
    with tempfile.TemporaryDirectory(prefix="jitney-serve-") as folder:
        _write_model(job, Path(folder))
        peer = _server_of(job, folder)
        started = time.monotonic()
        with peer.serving(free_port()):
            yield row.timed([time.monotonic() - started])
        port = free_port()
        started = time.monotonic()
        with peer.serving(port) as url:
            yield replace(row, name="ready, next start").timed([time.monotonic() - started])
            for streams in sizes.served:
                yield _load_row(job, url, streams)


def _server_of(job: PartJob, folder: str) -> Peer:
    sizes = job.sizes
    seats = max(sizes.served)
    budget = max(2 * seats, sizes.token_budget)
    # Few programs: the steps that these streams need.
    words = (
        *("--load-format", "dummy", "--max-seats", str(seats)),
        *("--seat-buckets", ",".join(map(str, sizes.served))),
        *(
            "--token-budget",
            str(budget),
            "--token-buckets",
            f"{max(2 * seats, budget // 4)},{budget}",
        ),
        *("--context", str(max(_TRIAL_TOKENS, sum(sizes.batch) + 4 * job.page_size))),
        *("--page-size", str(job.page_size), "--platform", job.platform),
    )
    return Peer.ours(folder, job.kernels, job.dtype, more=words)


def _load_row(job: PartJob, url: str, streams: int) -> Row:
    """Measure `streams` equal requests that are always open."""
    n_prompt, n_output = job.sizes.batch
    arrivals = [Arrival(0.0, n_prompt, n_output)] * (_TURNS * streams)
    clients = min(_CLIENTS, streams)
    bench = OnlineBench(RemoteEndpoint(url, ""), warmup=min(8, streams), clients=clients)
    run = asyncio.run(bench.measure(arrivals, concurrency=streams, closed=True))
    figures = run.load.figures()
    row = job.row("over HTTP", f"{streams} streams of {n_prompt} + {n_output} tokens", _BY)
    if figures["served"] < len(arrivals):
        return row.noted(f"failed: {figures['served']} of {len(arrivals)} requests were served")
    shown = {"tokens_s": figures["output_tok_s"]}
    for name in ("ttft_s", "itl_s"):
        shown |= {f"{name}_{q}": figures[name][q] for q in ("p50", "p99")}
    return replace(row.timed([run.load.seconds]), figures=shown, note=run.load.sender.trouble)


def _write_model(job: PartJob, folder: Path) -> None:
    """Write a model folder without weights: its configuration, and a tokenizer with the same
    vocabulary size, which encodes texts as single bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: id for id, text in enumerate(characters)}
    vocab |= {f"w{id}": id for id in range(len(vocab), job.config.vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    config = hf_config(job.config, job.dtype)
    (folder / "config.json").write_text(json.dumps(config))
