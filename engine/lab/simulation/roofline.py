"""Step times from first principles: bytes over bandwidth or operations over peak, whichever takes
longer.

This is the roofline of Williams, Waterman and Patterson (2009) for one step of a decoder: weights
and KV are read once, KV of the step's rows is written; matrix products cost two operations per
weight and row, attention four per head, key and head dimension. Two stated efficiencies reduce the
published peaks to reachable rates, and each step has a fixed overhead.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from jitney.engine.common.errors import ConfigError, ModelError
from jitney.engine.common.step_cost import StepCost, StepRows
from jitney.engine.core import (
    Bucket,
    HostTimes,
    ModelConfig,
    StepWork,
    read_hf_config,
    read_json,
    step_cost,
)
from jitney.engine.lab.simulation.devices import Accelerator
from jitney.engine.lab.simulation.shapes import SHAPES

#: Bytes per number. int4 has a 2-byte scale and a 1-byte zero point for every 128 weights; mxfp4,
#: which only experts have, has a 1-byte scale for every 32.
_BYTES = {
    "f32": 4.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5 + 3 / 128,
    "mxfp4": 0.5 + 1 / 32,
}
#: Formats that a model's weights may be planned in.
WEIGHT_FORMATS = ("bf16", "fp8", "int8", "int4", "mxfp4")
#: Host times assumed for a GPU or TPU machine: the project's budget of 0.3 ms at 64 seats and 1 ms
#: at 256, mostly per row.
_ASSUMED_HOST = HostTimes(before=6e-5, before_per_row=2.2e-6, after=2e-5, after_per_row=1.4e-6)


def _find_shape(model: str) -> ModelConfig:
    """The shape of a decoder by a built-in name, a config.json, or any value of `--model`. Weights
    are not needed, but a repository id is downloaded. Raises ModelError.
    """
    shape = _read_shape(model)
    if shape.encoder is not None:
        raise ModelError(
            f"{model} is an encoder ({shape.architecture}): plans and simulations are of models "
            "that write text"
        )
    return shape


def _read_shape(model: str) -> ModelConfig:
    if model.lower() in SHAPES:
        return SHAPES[model.lower()]
    path = Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json":
        return read_hf_config(read_json(path.parent, path.name))
    from jitney.engine.core import ModelSource

    try:
        return ModelSource.resolve(model).config
    except ModelError as error:
        raise ModelError(f"{error}; or a built-in shape: {', '.join(SHAPES)}") from None


#: Assumptions that are shares of a published value.
_SHARES = ("bandwidth", "flops", "memory")


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The roofline's assumptions."""

    #: Reached shares of the published peaks.
    bandwidth: float = 0.8
    flops: float = 0.6
    #: Fixed seconds of a step.
    overhead_s: float = 3e-4
    #: Latency of one collective between chips, seconds.
    hop_s: float = 1e-5
    #: Share of the memory that may be used.
    memory: float = 0.92

    def __post_init__(self) -> None:
        for name in _SHARES:
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"the {name} efficiency must be more than 0 and at most 1")
        if min(self.overhead_s, self.hop_s) < 0:
            raise ConfigError("the overhead of a step must not be negative")


_USUAL = Assumptions()


@dataclass(frozen=True)
class ModelCost:
    """Bytes and operations of a model in a number format. weights, kv: keys of BYTES. The
    embedding, and a head tied to it, stay bfloat16 (float32 if the weights are) when matrices are
    quantised. Results are cached, since a simulation needs them in every step."""

    config: ModelConfig
    weights: str = "bf16"
    kv: str = "bf16"
    #: Draft model or head; None without one.
    drafter: _Drafter | None = None

    def __post_init__(self) -> None:
        for name in (self.weights, self.kv):
            if name not in _BYTES:
                raise ConfigError(f"unknown number format {name!r}; known: {', '.join(_BYTES)}")
        if self.weights == "mxfp4" and self.config.experts is None:
            raise ConfigError("weights mxfp4 are of experts, and this model has none")
        if self.config.latent is not None and _BYTES[self.kv] < _BYTES["bf16"]:
            raise ConfigError(
                f"KV {self.kv}: the pool of latent attention has the model's dtype; leave it out"
            )

    @property
    def narrow(self) -> list[str]:
        """Names of weight and KV formats with fewer bits than bfloat16."""
        formats = {"weights": self.weights, "KV": self.kv}
        return [f"{kind} {name}" for name, kind in formats.items() if _BYTES[kind] < _BYTES["bf16"]]

    @cached_property
    def step(self) -> StepCost:
        return step_cost(
            self.config,
            weight_bytes=self._shared_bytes,
            head_bytes=self.head_bytes,
            kv_bytes=self._read_kv_bytes,
            expert_bytes=_BYTES[self.weights],
        )

    @property
    def _shared_bytes(self) -> float:
        """Bytes per weight of matrices outside experts."""
        return _BYTES["bf16" if self.weights == "mxfp4" else self.weights]

    @cached_property
    def layer_weights(self) -> int:
        """Numbers in the matrices of all layers."""
        return self.step.layer_weights

    @cached_property
    def table_weights(self) -> int:
        """Numbers in the embedding; a separate output head has `head_columns` columns instead."""
        return self.config.vocab_size * self.config.hidden_size

    @property
    def parameters(self) -> int:
        tables = 1 if self.config.tie_embeddings else 2
        return self.layer_weights + tables * self.table_weights + self.layer_input_weights

    @property
    def layer_input_weights(self) -> int:
        """Numbers in the table of per-layer token inputs (`ModelConfig.layer_input_size`), of which
        a step only reads those of its rows.
        """
        c = self.config
        return c.vocab_size * c.n_layers * c.layer_input_size

    @cached_property
    def table_bytes(self) -> float:
        """Bytes of the embedding."""
        return self.table_weights * max(self._shared_bytes, _BYTES["bf16"])

    @cached_property
    def head_bytes(self) -> float:
        """Bytes of the output head: the embedding, or a matrix of its own."""
        if self.config.tie_embeddings:
            return self.table_bytes
        return self.config.head_columns * self.config.hidden_size * self._shared_bytes

    @property
    def layer_bytes(self) -> float:
        """Bytes of the matrices of all layers."""
        shared = self.step.shared_weights
        return shared * self._shared_bytes + (self.layer_weights - shared) * _BYTES[self.weights]

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights on the device."""
        held = self.layer_bytes + self.table_bytes
        if self.drafter is not None:
            held += self.drafter.held_bytes
        held += self.layer_input_weights * max(self._shared_bytes, _BYTES["bf16"])
        if not self.config.tie_embeddings:
            held += self.head_bytes
        return held

    @cached_property
    def kv_bytes(self) -> float:
        """Bytes of keys and values per position, all layers."""
        own = sum(self.config.kv_numbers) * _BYTES[self.kv]
        return own if self.drafter is None else own + self.drafter.cost.kv_bytes

    @property
    def _read_kv_bytes(self) -> float:
        """Bytes of keys and values that layers read per position; layers may share a layer's KV."""
        return sum(width * count for (width, _), count in self.kv_reads.items()) * _BYTES[self.kv]

    @cached_property
    def kv_reads(self) -> Counter[tuple[int, int]]:
        """(numbers per position, KV heads) -> number of layers that read them."""
        c = self.config
        return Counter(
            (c.kv_width(layer), c.of_layer(layer).n_kv_heads) for layer in c.attending_layers
        )

    def read_bytes(self, rows: int, work: StepWork) -> tuple[float, float]:
        """(bytes of weights and state, bytes of KV read and written) of a step: see `StepCost`."""
        weights, kv = map(float, self.step.read_bytes(rows, _rows_of(work)))
        if self.drafter is not None:
            more_weights, more_kv = self.drafter.read_bytes(rows, work)
            return weights + more_weights, kv + more_kv
        return weights, kv

    def operations(self, rows: int, logit_rows: int, work: StepWork) -> tuple[float, float]:
        """(operations in the layers' products, in output head and attention) of a step: see
        `StepCost`.
        """
        layers, rest = map(float, self.step.operations(rows, logit_rows, _rows_of(work)))
        if self.drafter is not None:
            more_layers, more_rest = self.drafter.operations(rows, logit_rows, work)
            return layers + more_layers, rest + more_rest
        return layers, rest


@dataclass(frozen=True)
class _Drafter:
    """A draft model or head. It adds a pass over each step's rows, and one more for each draft of a
    sequence that the step verifies. Its keys and values have the activations' format.
    """

    #: Cost of its layers, and of the output head that it reads.
    cost: ModelCost
    #: Numbers in the matrix before a head's layer. An EAGLE-3 head needs it only in the first pass,
    #: but it is counted in all.
    joint_weights: int = 0
    #: Bytes of its own embedding and output head.
    table_bytes: float = 0.0

    @classmethod
    def named(cls, method: str, name: str, target: ModelConfig, weights: str) -> _Drafter | None:
        """The drafter for `speculative` and `draft_model`; None if drafts cost nothing (n-grams).
        weights: the model's format, also for its own prediction layer. Raises ModelError and
        ConfigError.
        """
        if method in ("off", "ngram"):
            return None
        if method == "draft":
            cost = ModelCost(_find_shape(name))
            return cls(cost, table_bytes=cost.weight_bytes - cost.layer_bytes)
        if method == "eagle3":
            return cls.of_eagle3(name, target)
        if not target.n_prediction_layers:
            raise ConfigError(
                "mtp: the model has no layer behind its last that drafts "
                "(num_nextn_predict_layers, mtp_num_hidden_layers); leave it out"
            )
        return cls(ModelCost(target.prediction_head, weights), 2 * target.hidden_size**2)

    @classmethod
    def of_eagle3(cls, name: str, target: ModelConfig) -> _Drafter:
        """The EAGLE-3 head of a folder or repository."""
        from jitney.engine.core import ModelSource

        config = ModelSource.of_eagle3(name, target, weights=False).config
        own, cost = config.eagle3, ModelCost(config)
        assert own is not None  # `of_eagle3`
        tables = cost.head_bytes + cost.table_bytes * own.embeds
        return cls(cost, own.read_size * config.hidden_size, tables)

    @property
    def joint_bytes(self) -> float:
        """Bytes of the matrix before the layer."""
        return self.joint_weights * _BYTES[self.cost.weights]

    @property
    def held_bytes(self) -> float:
        """Bytes on the device without keys and values."""
        return self.cost.layer_bytes + self.joint_bytes + self.table_bytes

    def read_bytes(self, rows: int, work: StepWork) -> tuple[float, float]:
        """`ModelCost.read_bytes` of one pass."""
        weights, kv = self.cost.read_bytes(rows, work)
        return weights + self.joint_bytes, kv

    def operations(self, rows: int, logit_rows: int, work: StepWork) -> tuple[float, float]:
        """`ModelCost.operations` of one pass."""
        layers, rest = self.cost.operations(rows, logit_rows, work)
        return layers + 2 * rows * self.joint_weights, rest


def _rows_of(work: StepWork) -> StepRows:
    return StepRows(work.decode, work.prompt, work.keys, work.pairs)


@dataclass(frozen=True, slots=True)
class Roofline:
    """`engine.core.measuring.virtual.StepTimes` of a model on `count` chips, split by tensor
    parallelism.

    Weights and heads are divided evenly; KV heads are replicated beyond their number. Each layer
    has two all-reduces of [rows, E] bfloat16 over a ring: 2 (n - 1) / n of the bytes over the link,
    and a hop. If queries and keys are normed over all heads, a third all-reduce of two numbers per
    row adds a hop.
    """

    cost: ModelCost
    #: Kind of the chips.
    device: Accelerator
    count: int = 1
    assumed: Assumptions = _USUAL
    #: Host times around each step.
    host: HostTimes = _ASSUMED_HOST
    #: See `step_table.StepTable`.
    noise: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def named(
        cls,
        model: str,
        device: str,
        *,
        weights: str = "bf16",
        kv: str = "bf16",
        count: int = 1,
        assumed: Assumptions = _USUAL,
        speculative: str = "off",
        draft_model: str = "",
    ) -> Roofline:
        """The roofline of a model (a built-in shape, a config.json or a value of `--model`) on
        chips of that name. speculative, draft_model: the drafter, as in the settings. Raises
        ModelError and ConfigError.
        """
        shape = _find_shape(model)
        drafter = _Drafter.named(speculative, draft_model, shape, weights)
        cost = ModelCost(shape, weights, kv, drafter)
        return cls(cost, Accelerator.named(device), count, assumed)

    @property
    def source(self) -> str:
        chips = f"{self.count} x {self.device.name}"
        return f"roofline of {chips}, {self.cost.weights} weights, {self.cost.kv} KV"

    def seconds(self, bucket: Bucket, work: StepWork) -> float:
        """Expected device seconds of a step."""
        return (
            max(self.memory_seconds(bucket, work), self.compute_seconds(bucket, work))
            + self.link_seconds(bucket.tokens)
            + self.assumed.overhead_s
        )

    def draft_seconds(self, work: StepWork, drafts: int) -> float:
        """Expected device seconds for the drafts after the first. drafts: most of a sequence; work:
        the last rows of the sequences.
        """
        drafter = self.cost.drafter
        if drafter is None or not drafts:
            return 0.0
        own, bucket = replace(self, cost=drafter.cost), Bucket(work.decode, work.decode)
        joint = drafter.joint_bytes / (self.count * self.device.bandwidth * self.assumed.bandwidth)
        memory = own.memory_seconds(bucket, work) + joint
        seconds = max(memory, own.compute_seconds(bucket, work))
        return drafts * (seconds + own.link_seconds(work.decode))

    def memory_seconds(self, bucket: Bucket, work: StepWork) -> float:
        """Seconds to read weights, KV and recurrent state once."""
        weights, kv = self.cost.read_bytes(bucket.tokens, work)
        per_chip = weights / self.count + kv / self.kv_split
        return per_chip / (self.device.bandwidth * self.assumed.bandwidth)

    def compute_seconds(self, bucket: Bucket, work: StepWork) -> float:
        """Seconds of the arithmetic; attention runs in bfloat16 for all weight formats."""
        layers, rest = self.cost.operations(bucket.tokens, bucket.seats, work)
        unit = self._unit
        plain = self.device.peak("f32" if unit == "f32" else "bf16")
        return (layers / self.device.peak(unit) + rest / plain) / (self.count * self.assumed.flops)

    @property
    def multiplies_fp8(self) -> bool:
        """Whether the layers' products run in fp8: on GPUs with fp8 units, but not for a mixture of
        experts, whose weights are widened.
        """
        dense = self.cost.config.experts is None
        return self.cost.weights == "fp8" and self.device.rounds_fp8 and dense

    @property
    def _unit(self) -> str:
        """The unit that multiplies the layers' weights; narrow ones are widened to bfloat16."""
        if self.multiplies_fp8:
            return "fp8"
        return "f32" if self.cost.weights == "f32" else "bf16"

    def link_seconds(self, rows: int) -> float:
        """Seconds of the all-reduces between chips."""
        if self.count == 1:
            return 0.0
        config = self.cost.config
        volume = 2 * (self.count - 1) / self.count * rows * config.hidden_size * _BYTES["bf16"]
        return config.n_layers * (self.hops * self.assumed.hop_s + 2 * volume / self.device.link)

    @property
    def hops(self) -> int:
        """All-reduces of a layer that a step waits for."""
        return 3 if self.cost.config.wide_qk_norm else 2

    def check_split(self) -> None:
        """Raise ConfigError unless the engine can divide the model over the chips."""
        self.cost.config.local(self.count)

    @property
    def kv_split(self) -> float:
        """Number of chips among which the KV is divided; a mean if layers have different heads."""
        reads = [(width * n, heads) for (width, heads), n in self.cost.kv_reads.items()]
        own = sum(width / min(self.count, heads) for width, heads in reads)
        return sum(width for width, _ in reads) / own

    def _own_kv_width(self, layer: int) -> float:
        """Numbers of a position's keys and values of a layer on one chip."""
        config = self.cost.config
        return config.kv_width(layer) / min(self.count, config.of_layer(layer).n_kv_heads)

    def page_bytes(self, page_size: int) -> tuple[float, ...]:
        """Bytes of a page of each cache group, in all its layers, on one chip."""
        number = page_size * _BYTES[self.cost.kv]
        groups = self.cost.config.cache_groups
        own = [number * sum(map(self._own_kv_width, group.layers)) for group in groups]
        if self.cost.drafter is not None:
            own[0] += sum(replace(self, cost=self.cost.drafter.cost).page_bytes(page_size))
        return tuple(own)

    @property
    def slot_bytes(self) -> float:
        """Bytes of a slot of recurrent layers' state on one chip."""
        return self.cost.config.slot_bytes / self.count

    @property
    def kv_room(self) -> float:
        """Bytes on one chip for KV and recurrent state, after the weights."""
        return self.device.memory * self.assumed.memory - self.cost.weight_bytes / self.count
