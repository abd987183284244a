"""The steps that are compiled for each device, and the facts of the compiled programs; each program
is compiled once and its facts are stored.

Each compiler runs in its own process (`program`), with XLA's plugin for the target on its path:
JITNEY_CUDA_PLUGIN, JITNEY_TPU_PLUGIN: folders made by `make test-compile`. JITNEY_COMPILED: folder
of stored facts as JSON, so that the tests and `docs/benchmarks/compiled_programs.py` together
compile each program once.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from places import SUPPORT

GPUS, TPUS = ("h100", "a100", "l4"), ("v5e", "v6e", "v7x")
MODELS = ("llama-3.1-8b", "qwen3-8b")
PLUGINS = {**dict.fromkeys(GPUS, "JITNEY_CUDA_PLUGIN"), **dict.fromkeys(TPUS, "JITNEY_TPU_PLUGIN")}
#: The format in which this model's weights fit in the memory of several devices: 32 GB each of a
#: v6e, 96 of a v7x, and 16 of a v5e. Four v5e hold it only in int4, where XLA copies the head in
#: each step, since its 32,064 outputs per device are not whole vectors.
LARGE_MODEL = "llama-3.1-70b"
LARGE_KEPT_AS = {
    ("v5e", 8): "int8",
    ("v6e", 4): "int8",
    ("v6e", 8): "plain",
    ("v7x", 4): "plain",
    ("v7x", 8): "plain",
}
#: A mixture of experts, and the format in which its weights fit: eight v5e hold it in bfloat16,
#: four in int8.
MIXTURE = "qwen3-30b-a3b"
MIXTURE_KEPT_AS = {("v5e", 4): "int8"}
#: A mixture whose experts are stored in MXFP4.
MXFP4 = "gpt-oss-20b"
#: Families with layers that Llama does not have -> number of first layers that include each kind.
FAMILIES = {
    MXFP4: 2,
    "qwen3.5-27b": 4,
    "qwen3.5-35b-a3b": 4,
    "glm-4.7-flash": 2,
    "gemma-4-26b-a4b": 6,
    "nemotron-3-nano-30b-a3b": 7,
    "lfm2-8b-a1b": 4,
}
#: Devices of four chips.
HOST = {"v5e": 4, "v6e": 4, "v7x": 8}
#: Number of layers that are compiled for a mixture, and for a model on 4 and 8 devices.
FEW_LAYERS = 4
#: Sequences of the decode steps, and the contexts at which the bytes of decode and of mixed steps
#: are counted.
SEQUENCES, CONTEXTS, MIXED_CONTEXTS = (1, 8, 32), (1024, 4096), (256, 1024)
SEATS, MIXED_ROWS = 64, 512
#: Rows of a decode step with more rows than the "few" of int4 products.
MANY = 128
#: More numbers of sequences, and the targets that use them: those that compile fast, and one more.
MORE_SEQUENCES, COUNTED_CLOSELY = (1, 4, 8, 16, 32), (*GPUS, "v5e")
#: Targets for which sampled steps are compiled too: for TPUs these take minutes, so only one is
#: included.
SAMPLED = (*GPUS, "v6e")


@dataclass(frozen=True)
class Spec:
    """One step. rows, seqs: its bucket. plain: all-greedy. layers 0: all layers. of_family: the
    layers are those of the model, which may differ; fewer facts of the step are reported.
    """

    target: str
    model: str
    rows: int
    seqs: int
    plain: bool = True
    weights: str = "plain"
    kv: str = "auto"
    devices: int = 1
    layers: int = 0
    of_family: bool = False

    @property
    def decodes(self) -> bool:
        return self.rows == self.seqs

    @property
    def plugin(self) -> str:
        """Folder of the target's plugin, or ""."""
        return os.environ.get(PLUGINS[self.target], "")

    @property
    def step(self) -> str:
        """decode-8, mixed-512 sampled, ..."""
        bucket = f"decode-{self.seqs}" if self.decodes else f"mixed-{self.rows}"
        return bucket + ("" if self.plain else " sampled")

    def __str__(self) -> str:
        scheme = "bf16" if self.weights == "plain" else self.weights
        parts = [
            self.target,
            self.model,
            scheme,
            *([] if self.kv == "auto" else [f"{self.kv} KV"]),
            *([f"{self.devices} devices"] if self.devices > 1 else []),
            self.step,
            *([f"{self.layers} layers"] if self.layers else []),
            *(["of its family"] if self.of_family else []),
        ]
        return " ".join(parts)


def kept_as(target: str, devices: int) -> str:
    """The weights' format: bf16 if 16 GB of weights fit beside keys and values, int8 on an L4 (24
    GB) and a v5e (16 GB).
    """
    return "int8" if target in ("l4", "v5e") and devices == 1 else "plain"


def every_spec() -> Iterator[Spec]:
    """All specs, targets that compile fast first."""
    for target in (*GPUS, *TPUS):
        for model in MODELS:
            for devices in (1, 2):
                yield from steps(
                    Spec(target, model, 1, 1, weights=kept_as(target, devices), devices=devices)
                )
        yield from quantised(target)
        if target in TPUS:
            yield from wide(target)
        yield from mixtures(target)


def wide(target: str) -> Iterator[Spec]:
    """Decode steps and a mixed step on 4 and 8 devices, with a few layers, since all are equal."""
    for devices in (4, 8):
        decode = Spec(target, "", SEQUENCES[-1], SEQUENCES[-1], devices=devices, layers=FEW_LAYERS)
        for model in MODELS:
            yield replace(decode, model=model)
        if weights := LARGE_KEPT_AS.get((target, devices)):
            yield replace(decode, model=LARGE_MODEL, weights=weights)
    yield replace(decode, model=MODELS[0], devices=HOST[target], rows=MIXED_ROWS, seqs=SEATS)


def mixtures(target: str) -> Iterator[Spec]:
    """Steps of a mixture: on an H100 all greedy steps that other models have; on 4 and 8 TPUs a
    decode step, and on a whole host also a mixed one.
    """
    if target == "h100":
        of = Spec(target, MIXTURE, 1, 1, layers=FEW_LAYERS)
        for seqs in SEQUENCES:
            yield replace(of, rows=seqs, seqs=seqs)
        yield replace(of, rows=MIXED_ROWS, seqs=SEATS)
        for weights in ("int8", "fp8"):
            yield replace(of, rows=8, seqs=8, weights=weights)
    if target in TPUS:
        for devices in (4, 8):
            weights = MIXTURE_KEPT_AS.get((target, devices), "plain")
            of = Spec(target, MIXTURE, 32, 32, weights=weights, devices=devices, layers=FEW_LAYERS)
            yield of
            if devices == HOST[target]:
                yield replace(of, rows=MIXED_ROWS, seqs=SEATS)


def families() -> Iterator[Spec]:
    """Decode steps and a mixed one of each family, for a GPU and a TPU."""
    for target in ("h100", "v6e"):
        for model, layers in FAMILIES.items():
            weights = "mxfp4" if model == MXFP4 else "plain"
            of = Spec(target, model, 1, 1, weights=weights, layers=layers, of_family=True)
            for seqs in SEQUENCES:
                yield replace(of, rows=seqs, seqs=seqs)
            yield replace(of, rows=MIXED_ROWS, seqs=SEATS)


def steps(of: Spec) -> Iterator[Spec]:
    """Decode steps; on one device also mixed and sampled steps, but only for the first model if
    compiling is slow.
    """
    first = of.model == MODELS[0]
    if of.devices > 1:
        yield replace(of, rows=SEQUENCES[-1], seqs=SEQUENCES[-1])
        if first and of.target in GPUS:
            yield replace(of, rows=SEQUENCES[-1], seqs=SEQUENCES[-1], plain=False)
        return
    few = SEQUENCES if first else SEQUENCES[::2]
    for seqs in MORE_SEQUENCES if first and of.target in COUNTED_CLOSELY else few:
        yield replace(of, rows=seqs, seqs=seqs)
    if first or of.target in GPUS:
        yield replace(of, rows=MIXED_ROWS, seqs=SEATS)
    if first and of.target in SAMPLED:
        yield replace(of, rows=SEQUENCES[-1], seqs=SEQUENCES[-1], plain=False)
        if of.target in GPUS:
            yield replace(of, rows=MANY, seqs=MANY, plain=False)
        yield replace(of, rows=MIXED_ROWS, seqs=SEATS, plain=False)


def quantised(target: str) -> Iterator[Spec]:
    """Decode steps with quantised weights and pools; fp8 if the target has fp8 pools."""
    of = Spec(target, MODELS[0], 8, 8)
    yield replace(of, weights="int8", kv="int8")
    yield replace(of, weights="int4")
    yield replace(of, rows=MANY, seqs=MANY, weights="int4")
    if target in GPUS:
        yield replace(of, rows=SEATS, seqs=SEATS, weights="int4")
    if target not in ("a100", "v5e", "v6e"):
        yield replace(of, weights="fp8", kv="fp8")
        if target in GPUS:
            yield replace(of, rows=MANY, seqs=MANY, weights="fp8", kv="fp8")
            for devices in (2, 4):
                yield replace(of, weights="fp8", kv="fp8", devices=devices)


@functools.cache
def facts(spec: Spec) -> dict[str, Any]:
    """The facts that `program` reports of a step, stored by an earlier run or compiled now. Raises
    RuntimeError if compiling fails.
    """
    before = kept(spec)
    if before is not None:
        return before
    result = {"date": datetime.date.today().isoformat(), **compiled(spec)}
    path = _kept_path(spec)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1))
    return result


def kept(spec: Spec) -> dict[str, Any] | None:
    """The facts that an earlier run stored, or None."""
    path = _kept_path(spec)
    if path is None or not path.exists():
        return None
    return json.loads(path.read_text())


def _kept_path(spec: Spec) -> Path | None:
    folder = os.environ.get("JITNEY_COMPILED")
    return Path(folder, f"{spec}.json".replace(" ", "_")) if folder else None


def compiled(spec: Spec) -> dict[str, Any]:
    """Compile a step in another process."""
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_dump_to={folder} --xla_dump_hlo_as_text" if spec.target in GPUS else ""
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(Path(spec.plugin).resolve()), *sys.path]),
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "XLA_FLAGS": dump,
        }
        command = [
            sys.executable,
            str(SUPPORT / "compiled_program.py"),
            json.dumps(asdict(spec)),
            folder,
        ]
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=1800, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{spec} does not compile:\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1])
