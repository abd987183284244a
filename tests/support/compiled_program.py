"""Compiles one of the engine's steps, from shapes alone, for a device that need not exist here; run
as a program.

python program.py SPEC FOLDER: SPEC is the JSON of a `matrix.Spec`; FOLDER is where XLA_FLAGS makes
XLA write its dumps. Prints one JSON object of facts.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from collective_windows import sums_of
from compiled_specs import CONTEXTS, GPUS, MIXED_CONTEXTS, SEATS, Spec
from flax import nnx
from hlo import Module, parse
from jax.experimental import topologies
from kernel_costs import Kept, Load, experts_read, kernel_cost
from lowered_steps import lower_step
from memory_traffic import Account, account
from places import DATA
from shipped import shipped_options

from jitney.engine.core.executor.program import StateSizes, _compiler_options
from jitney.engine.core.models.llama import Llama
from jitney.engine.core.models.mixture import ExpertLinear, Experts, _SetApart
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.models.quantization import KV_TYPES, quantise
from jitney.engine.core.models.registry import abstract_model
from jitney.engine.core.models.sharding import make_mesh
from jitney.engine.core.scheduler.buckets import Bucket
from jitney.engine.core.scheduler.plan import StepWork
from jitney.engine.core.weights.checkpoints.hf_config import read_hf_config
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.lab.simulation import shapes
from jitney.engine.lab.simulation.devices import DEVICES, Accelerator
from jitney.engine.lab.simulation.roofline import SHAPES, ModelCost
from jitney.kernels import w8a8
from jitney.kernels.interface import KernelSet
from jitney.kernels.select import _pallas_set, _triton_for

CAPABILITIES = {"h100": 90, "a100": 80, "l4": 89}
#: Target -> topologies for up to 4 and up to 8 devices; a v7x chip is two devices.
TOPOLOGIES = {
    "v5e": ("v5e:2x2", "v5e:2x4"),
    "v6e": ("v6e:2x2", "v6e:2x4"),
    "v7x": ("tpu7x:2x2x1", "tpu7x:2x2x1"),
}
CHIPS = {"a100": "a100-80"}
#: Results with fewer elements are activations.
LARGE = 1 << 20
#: Positions of a page of the pool; most positions of a sequence.
PAGE, CONTEXT = 16, 8192


class Step:
    """A step and the target that it is compiled for."""

    def __init__(self, spec: Spec):
        self.spec = spec
        shape = SHAPES[spec.model]
        layers = spec.layers or shape.n_layers
        self.whole = replace(shape, n_layers=layers, windows=(0,) * layers)
        self.config: ModelConfig = self.whole.local(spec.devices)
        self.model = _model_for(spec, self.config)
        self.leaves = dict(_leaves(self.model))
        self.chip: Accelerator = DEVICES[CHIPS.get(spec.target, spec.target)]
        self.kv_dtype = KV_TYPES.get(spec.kv, jnp.dtype(jnp.bfloat16))

    @property
    def weights(self) -> list[Any]:
        """Matrices on one device, as shapes; without the scales of int4, which a TPU without
        float16 may copy as bits.
        """
        scales = ("scale", "zeros", "lows")
        return [
            leaf
            for path, leaf in self.leaves.items()
            if len(leaf.shape) >= 2 and path[-1] not in scales
        ]

    def _share_read(self, path: Any, load: Load) -> float:
        """Share of an array that a step reads: for an array of all experts, the share of experts
        that any row chose; else 1.
        """
        experts = self.config.experts
        if experts is None or not {"gate_up", "down"} & set(path):
            return 1.0
        return experts_read(experts, load.rows) / experts.n_experts

    @property
    def position_bytes(self) -> int:
        """Bytes of the keys and values of one position on one device."""
        c = self.config
        return c.n_layers * 2 * c.n_kv_heads * c.head_dim * self.kv_dtype.itemsize

    @property
    def pages(self) -> int:
        """Pages of the pool: enough for 32 sequences of the longest counted context, or as many as
        fit beside the weights.
        """
        memory = self.chip.memory / (
            2 if self.spec.target == "v7x" else 1
        )  # a v7x chip is two devices
        room = 0.85 * memory - sum(leaf.size * leaf.dtype.itemsize for leaf in self.leaves.values())
        return min(32 * CONTEXTS[-1] // PAGE + 1, int(room / (PAGE * self.position_bytes)))

    @property
    def kept(self) -> Kept:
        """The pools, which all have the same shape on one device."""
        return Kept({self.pages * PAGE * 2 * self.config.n_kv_heads * self.config.head_dim: 0})

    def lower(self) -> jax.stages.Lowered:
        """The step lowered for the target's devices, by the engine's own function."""
        spec = self.spec
        sizes = StateSizes(max(SEATS, spec.seqs), self.pages, PAGE, CONTEXT, self.kv_dtype)
        mesh = make_mesh(devices_of(spec)[: spec.devices])
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return lower_step(
                self.model, Bucket(spec.rows, spec.seqs), spec.plain, kernels_for(spec), sizes, mesh
            )

    def floor(self, load: Load) -> float:
        """Least bytes that a step must move: weights read once (only experts that a row uses), keys
        and values read and written once.
        """
        weights = sum(
            leaf.size * leaf.dtype.itemsize * self._share_read(path, load)
            for path, leaf in self.leaves.items()
            if path != ("embed",)
        )
        return weights + (load.keys + load.rows) * self.position_bytes

    def describe(self, compiled: jax.stages.Compiled, folder: Path) -> dict[str, Any]:
        """Facts of a compiled step; bytes are of one device."""
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None and text is not None
        module = parse(text)
        facts = {
            "aliased": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "pages": self.pages,
            "pools": self.pages * PAGE * self.position_bytes,
            "layers": self.config.n_layers,
            "sums": asdict(sums_of(module)),
            "loads": [],
        }
        for load in loads(self):
            sm = CAPABILITIES.get(self.spec.target, 0)
            costs = kernel_cost(load, self.kept, sm, self.config.experts)
            made = account(module, costs)
            facts["loads"].append(told(self, load, made))
            facts |= {
                "kernels": made.kernels,
                "copied": copies(self, made),
                "wide_gates": wide_gates(self, made),
                "fp8_products": fp8_products(module),
                "collectives": made.collectives,
            }
        return facts | (thunks(folder) if self.spec.target in GPUS else {})


class FamilyStep:
    """A step with the first layers of a family's model, which need not be the same."""

    def __init__(self, spec: Spec):
        self.spec = spec
        path = Path(shapes.__file__).with_suffix(".json")
        config = json.loads(path.read_text())[spec.model]
        config["num_hidden_layers"] = spec.layers
        for name in ("layer_types", "hybrid_override_pattern"):
            if name in config:
                config[name] = config[name][: spec.layers]
        self.whole: ModelConfig = read_hf_config(config)
        self.model = _model_for(spec, self.whole)
        self.chip: Accelerator = DEVICES[spec.target]
        self.pages = 2049
        others = len(self.whole.cache_groups) - 1
        self.sizes = StateSizes(
            SEATS,
            self.pages,
            PAGE,
            CONTEXT,
            jnp.bfloat16,
            window_pages=(1025,) * others,
            checkpoints=16 if self.whole.recurrent else 0,
        )
        self.kernels = kernels_for(spec)
        self.mesh = make_mesh(devices_of(spec)[:1])
        self.state = self.sizes.shapes(self.whole, self.kernels, self.mesh).kv

    def lower(self) -> jax.stages.Lowered:
        bucket = Bucket(self.spec.rows, self.spec.seqs)
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return lower_step(
                self.model, bucket, self.spec.plain, self.kernels, self.sizes, self.mesh
            )

    @property
    def kept(self) -> Kept:
        """Pools and recurrent state."""
        windows, slots = self.whole.windows, self.sizes.seats + self.sizes.checkpoints
        return Kept(
            {self.state[layer].size: windows[layer] for layer in self.whole.pool_layers},
            {array.size: slots for array in self._recurrent_arrays()},
        )

    def _recurrent_arrays(self) -> list[Any]:
        """The arrays that recurrent layers keep, layer by layer."""
        recurrent = self.whole.recurrent
        layers = () if recurrent is None else recurrent.layers
        return jax.tree.leaves([self.state[layer] for layer in layers])

    def floor(self, load: Load) -> float:
        """See `Step.floor`; a row's recurrent state is read and written, too."""
        config = self.whole
        width = jnp.dtype(self.sizes.kv_dtype).itemsize
        total = sum(self._least_of(path, leaf, load) for path, leaf in _leaves(self.model))
        for layer in config.attending_layers:
            keys = load.within(config.windows[layer]).keys + load.rows
            total += keys * config.of_layer(layer).position_size * width
        slots = self.sizes.seats + self.sizes.checkpoints
        state_bytes = sum(array.size * array.dtype.itemsize for array in self._recurrent_arrays())
        return total + 2 * load.decode * state_bytes / slots

    def _least_of(self, path: Any, leaf: Any, load: Load) -> float:
        """Bytes of a weight that a step reads."""
        experts, size = self.whole.experts, leaf.size * leaf.dtype.itemsize
        if path == ("embed",) and not self.whole.tie_embeddings:
            return 0.0
        if experts is None or not _is_of_experts(self.model, path):
            return size
        return size * experts_read(experts, load.rows) / experts.n_experts

    def describe(self, compiled: jax.stages.Compiled, folder: Path) -> dict[str, Any]:
        """Bytes, and on GPUs also the parts of the program."""
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None and text is not None
        facts = {
            "aliased": memory.alias_size_in_bytes,
            "state": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.state)),
            "temporaries": memory.temp_size_in_bytes,
            "head": 2 * self.whole.vocab_size * self.whole.hidden_size,  # in bfloat16
            "loads": [],
        }
        for load in loads(self) if self.spec.decodes else ():
            sm = CAPABILITIES.get(self.spec.target, 0)
            costs = kernel_cost(load, self.kept, sm, self.whole.experts, gated=self.whole.is_gated)
            made = account(parse(text), costs, load.rows)
            facts["loads"].append(told(self, load, made))
            facts["kernels"] = made.kernels
        return facts | (thunks(folder) if self.spec.target in GPUS else {})


def _leaves(model: Model) -> list[tuple[Any, Any]]:
    """(path, array as a shape) of every weight."""
    return list(nnx.to_flat_state(nnx.split(model)[1]))


def _is_of_experts(model: Any, path: Any) -> bool:
    """Whether a weight holds the matrices of all experts of a layer."""
    if path[0] != "layers" or not isinstance(model.layers[path[1]].mlp, Experts):
        return False
    return path[2:4] in (("mlp", "gate_up"), ("mlp", "down"))


def _model_for(spec: Spec, config: ModelConfig) -> Model:
    """The model as shapes, laid out for the target's kernels."""
    weights = "plain" if spec.weights == "mxfp4" else spec.weights
    model = abstract_model(config, dtype=jnp.bfloat16, weights=weights, kv=spec.kv)
    if spec.weights == "mxfp4":
        _keep_mxfp4(model)
    _lay_out(model, kernels_for(spec))
    return model


def devices_of(spec: Spec) -> Any:
    """Devices that exist only for the compiler."""
    if spec.target in GPUS:
        config = (DATA / f"{spec.target}.txtpb").read_text()
        return topologies.get_topology_desc(
            platform="cuda", topology=f"1x1x{spec.devices}", target_config=config
        ).devices
    name = TOPOLOGIES[spec.target][spec.devices > 4]
    return topologies.get_topology_desc(platform="tpu", topology_name=name).devices


def kernels_for(spec: Spec) -> KernelSet:
    """The kernel set that serves the target."""
    if spec.target in GPUS:
        return _triton_for(CAPABILITIES[spec.target])
    return _pallas_set(spec.target)


def _keep_mxfp4(model: Model) -> None:
    """Replace the experts by the shapes of a checkpoint in MXFP4."""
    for linear in model.linears():
        if isinstance(linear, ExpertLinear):
            pack = partial(quantise, scheme="mxfp4", dtype=jnp.bfloat16)
            linear.set_matrix(jax.eval_shape(pack, linear.kernel.get_value()))


def _lay_out(model: Model, kernels: KernelSet) -> None:
    """Replace fp8 matrices, and those of experts, by the shapes of their packed layout."""
    for linear in model.linears():
        kernel = linear.kernel.get_value()
        if isinstance(linear, ExpertLinear):
            assert kernels.experts is not None
            linear._set_apart_by(jax.eval_shape, _SetApart(linear.n_experts), kernels)
        elif kernels.fp8 is not None and kernel.dtype == w8a8.FP8:
            linear.kernel = nnx.Param(jax.eval_shape(kernels.fp8.pack, kernel))
    assert isinstance(model, Llama)
    if model.lm_head is not None:
        table = model.embed.get_value()
        wide = -(-table.shape[1] // kernels.table_columns) * kernels.table_columns
        padded: Any = jax.ShapeDtypeStruct((table.shape[0], wide), table.dtype)
        model.embed = nnx.Param(padded)


def loads(step: Step | FamilyStep) -> list[Load]:
    """The work of the step at every context that the pool can hold, or at the greatest power of two
    that it can.
    """
    spec = step.spec
    decode = spec.seqs if spec.decodes else spec.seqs - 1
    prompt = spec.rows - decode
    longest = ((step.pages - 1) * PAGE - prompt) // decode
    fitting = [
        context for context in (CONTEXTS if spec.decodes else MIXED_CONTEXTS) if context <= longest
    ]
    return [Load(decode, context, prompt) for context in fitting or [1 << longest.bit_length() - 1]]


def thunks(folder: Path) -> dict[str, int]:
    """Number of command buffers in the GPU's program, and of the thunks outside them."""
    lines = max(folder.glob("*thunk_sequence_after_thunk_passes.txt")).read_text().splitlines()
    outer = [line for line in lines if line[:1].isdigit()]
    buffers = sum("kCommandBuffer" in line for line in outer)
    return {
        "command_buffers": buffers,
        "outside": len(outer) - buffers,
        "slices": sum("kDynamicSliceFusion" in line for line in lines),
        "nodes": sum(line.lstrip()[:3].isdigit() for line in lines) - buffers,
    }


def copies(step: Step, made: Account) -> list[str]:
    """Instructions whose result in memory has as many elements as a pool or a weight: copied,
    transposed or widened.
    """
    sizes = {*step.kept.pools} | {int(leaf.size) for leaf in step.weights}
    if step.config.experts is not None:  # each of the experts, too
        of_experts = [leaf for leaf in step.weights if len(leaf.shape) == 3 and leaf.shape[0] > 1]
        alike = (int(leaf.size) for leaf in of_experts)
        sizes |= {size // step.config.experts.n_experts for size in alike}
    rows = _sizes_of_rows(step)
    return [
        f"{name} {array.dtype}{list(array.dims)}"
        for name, array in made.made
        if array.elements in sizes and array.elements > LARGE and array.dims not in rows
    ]


def _sizes_of_rows(step: Step) -> set[tuple[int, int]]:
    """Sizes of arrays of a step's rows, and of all places of a mixture's blocks, which on 8 devices
    may be as large as a share of a matrix.
    """
    experts, n_rows = step.config.experts, step.spec.rows
    sizes = {n_rows}
    if experts is not None:
        sizes.add(experts.block_rows(n_rows) * experts.most_blocks(n_rows))
    return {(rows, step.config.hidden_size) for rows in sizes}


def wide_gates(step: Step, made: Account) -> list[str]:
    """Instructions that write gates and ups to memory as float32. The number of elements alone does
    not identify them: four parts of a product with 6,144 outputs have as many as gates and ups of
    2 times 12,288.
    """
    width = step.config.intermediate_size
    size = step.spec.rows * 2 * width
    return [
        name
        for name, array in made.made
        if (array.dtype, array.elements) == ("f32", size)
        and len(array.dims) == 2  # not parts of another product
        and array.dims[-1] in (width, 2 * width)
    ]


def fp8_products(module: Module) -> int:
    """Number of products that take both operands in fp8, unconverted: cuBLASLt's, and XLA's
    fusions.
    """
    count = 0
    for computation in module.computations.values():
        for made in computation.instructions.values():
            if made.op == "custom-call":
                count += made.quoted("custom_call_target") == "__cublas$lt$matmul$f8"
            elif made.op == "dot":
                operand_types = {operand.arrays[0].dtype for operand in computation.inputs(made)}
                count += operand_types == {"f8e4m3fn"}
    return count


def told(step: Step | FamilyStep, load: Load, made: Account) -> dict[str, Any]:
    """Bytes and operations at one context, compared with the floor and the roofline."""
    floor, chip = step.floor(load), step.chip
    scheme = "bf16" if step.spec.weights == "plain" else step.spec.weights
    cost = ModelCost(step.whole, scheme, "bf16" if step.spec.kv == "auto" else step.spec.kv)
    work = StepWork(load.decode, load.prompt, load.decode * load.context, load.context, load.pairs)
    return {
        "context": load.context,
        "bytes": made.bytes,
        "floor": floor,
        "operations": made.operations,
        "roofline_bytes": sum(cost.read_bytes(load.rows, work)),
        "roofline_operations": sum(cost.operations(load.rows, step.spec.seqs, work)),
        "floor_us": 1e6 * floor / chip.bandwidth,
        "bytes_us": 1e6 * made.bytes / chip.bandwidth,
        "operations_us": 1e6 * made.operations / chip.peak("bf16"),
        "largest": {
            name: moved
            for name, moved in sorted(made.moved.items(), key=lambda item: -item[1])[:12]
        },
    }


def main(spec: Spec, folder: Path) -> None:
    step = FamilyStep(spec) if spec.of_family else Step(spec)
    started = time.perf_counter()
    lowered = step.lower()
    lowering = time.perf_counter() - started
    platform = "gpu" if spec.target in GPUS else "tpu"
    halves = kernels_for(spec).sums_in_halves
    options = _compiler_options(platform, spec.devices > 1, halves)
    if spec.target in GPUS:
        options |= shipped_options(spec.target, str(CAPABILITIES[spec.target] / 10))
    compiled = lowered.compile(options)
    print(
        json.dumps(
            step.describe(compiled, folder)
            | {
                "lower_s": round(lowering, 1),
                "compile_s": round(time.perf_counter() - started - lowering, 1),
            }
        )
    )


if __name__ == "__main__":
    main(Spec(**json.loads(sys.argv[1])), Path(sys.argv[2]))
