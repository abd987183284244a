"""Settings of kinds of layers, as parts of a `ModelConfig`; jax-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from jitney.engine.common.errors import ConfigError, ModelError
from jitney.engine.common.requests import Pooling

#: The consecutive parts of a weight of a recurrent layer: (heads, numbers per head). Devices split
#: the heads.
type Parts = tuple[tuple[int, int], ...]
#: Least rows of an expert's block (the units of GPUs, TPUs and AMX multiply as many at once), and
#: most rows, for experts with many rows: an expert is read once per block.
_LEAST_BLOCK, _LARGEST_BLOCK = 16, 128


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The changes to the rotary frequencies of a long-context model.

    linear: divided by `factor`. dynamic: of a larger theta in a longer context. llama3: low ones
    divided, high ones kept (Llama 3.1). yarn: blended by rotations per context (arXiv 2309.00071).
    factors: frequency j divided by factors[j]. longrope: the same, and in a context longer than the
    original one by long_factors[j] (arXiv 2402.13753). proportional: the first pairs of a head have
    the frequencies that they have where all are rotated, the others none (Gemma 4).
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "factors", "longrope", "proportional"]
    #: Divisor of the frequencies.
    factor: float = 1.0
    #: Except for linear and factors: the original context in tokens.
    original_context: int = 0
    #: llama3: turns in that context under which a frequency is divided, and over which it is kept.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    #: yarn: turns in that context between which frequencies are blended.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    #: yarn: the blend begins and ends at whole pairs.
    truncate: bool = True
    #: yarn and longrope: factor of cos and sin.
    attention_factor: float = 1.0
    #: factors and longrope: a number for each rotated pair; GGUF's `rope_freqs.weight`.
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    #: proportional: pairs that are rotated.
    rotated_pairs: int = 0

    @property
    def extended_context(self) -> int:
        """Tokens of the context that yarn and dynamic lead to."""
        return int(self.original_context * self.factor)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions of a layer."""

    #: Base of the frequencies, theta ** (-2 i / dims); and how they differ from those.
    theta: float = 10000.0
    scaling: RopeScaling | None = None
    #: Rotated numbers of a head, the first ones in a checkpoint; 0: all.
    dims: int = 0
    #: Rotated queries are multiplied by 1 + beta * log(1 + position // query_context).
    query_beta: float = 0.0
    query_context: int = 1


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts: each token passes through a few of many feed-forwards."""

    n_experts: int
    #: Experts per token.
    n_chosen: int
    #: Whether the shares of the chosen experts add up to 1; else those of all experts do.
    renormalised: bool
    #: Groups of an engine's devices, if the model is split: each group holds whole experts, which
    #: its devices split.
    groups: int = 1
    #: Engines that share the experts and run their steps together.
    engines: int = 1
    #: Experts of one group, where the configuration is one device's (`ModelConfig.local`); 0: all.
    local_experts: int = 0
    #: Columns of a shared expert, which every token passes through; 0: none.
    shared_size: int = 0
    #: Whether the shared expert has a gate: the sigmoid of a further column of the router.
    shared_gate: bool = True
    #: Function of the router's numbers before experts are chosen: softmax, or sigmoid.
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    #: Whether each expert has a bias that affects the choice and not the shares.
    choice_bias: bool = False
    #: Number of equal clusters of experts; number of clusters that a token's experts are from;
    #: number of best experts whose sum ranks the clusters.
    clusters: int = 1
    chosen_clusters: int = 1
    cluster_best: int = 2
    #: Factor of the shares.
    share_factor: float = 1.0
    #: Layers with a dense feed-forward instead of a mixture, and its columns.
    dense_layers: frozenset[int] = frozenset()
    dense_size: int = 0

    def __post_init__(self) -> None:
        if self.n_chosen > self.n_experts:
            raise ModelError(
                f"a token cannot go through {self.n_chosen} of {self.n_experts} experts"
            )
        if self.n_experts % self.clusters or self.chosen_clusters > self.clusters:
            raise ModelError(
                f"{self.n_experts} experts cannot be chosen from {self.chosen_clusters} of "
                f"{self.clusters} equal groups"
            )
        if self.n_chosen > self.chosen_clusters * (self.n_experts // self.clusters):
            raise ModelError(
                f"{self.chosen_clusters} of {self.clusters} groups hold fewer than the "
                f"{self.n_chosen} experts that a token goes through"
            )

    @property
    def own(self) -> int:
        """Number of experts of which the model holds weights."""
        return self.local_experts or self.n_experts

    @property
    def router_columns(self) -> int:
        """Numbers that the router makes of a row."""
        return self.n_experts + (self.shared_size > 0 and self.shared_gate)

    @property
    def all_groups(self) -> int:
        """Groups with different experts, of all engines."""
        return self.engines * self.groups

    def dealt_out(self, groups: int, engines: int) -> ExpertsConfig:
        """Each group of each engine holds whole experts of its own. Raises ConfigError."""
        if self.n_experts % (engines * groups):
            dealt = f"expert_parallel {groups}"
            if engines > 1:
                dealt = f"data_parallel {engines} with {dealt}"
            raise ConfigError(f"{dealt} does not divide the model's {self.n_experts} experts")
        return replace(self, groups=groups, engines=engines)

    def uneven(self, shards: int) -> dict[str, tuple[int, int]]:
        """Sizes that are divided over devices: names -> (size, parts)."""
        return {
            "columns of the shared expert": (self.shared_size, shards),
            "columns of layers without experts": (self.dense_size, shards),
        }

    def local(self, shards: int) -> ExpertsConfig:
        """One device's, of `shards`: the experts of its group, and its columns of the others."""
        grouped = self.all_groups > 1
        return replace(
            self,
            local_experts=self.n_experts // self.all_groups if grouped else self.local_experts,
            shared_size=self.shared_size // shards,
            dense_size=self.dense_size // shards,
        )

    def block_rows(self, rows: int) -> int:
        """Rows multiplied with an expert at a time in a step of `rows` of all engines."""
        each = rows * self.n_chosen // self.n_experts
        return min(max(_LEAST_BLOCK, 1 << each.bit_length()), _LARGEST_BLOCK)

    def most_blocks(self, rows: int) -> int:
        """Blocks that a step of `rows` may need: each expert may leave one partly empty."""
        choices = rows * self.n_chosen
        return min(choices, choices // self.block_rows(rows) + self.own)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Attention whose keys and values are products of one row a token, see
    `jitney.engine.core.models.latent`; head_dim is then that of what the pool keeps.
    """

    #: R: numbers of a latent.
    rank: int
    #: N and P: numbers of a query that are not rotated, and that are.
    plain_dim: int
    rotated_dim: int
    #: V: numbers of a head's value.
    value_dim: int
    #: C: rank of the queries' latent; 0: queries are projections of hidden rows.
    query_rank: int = 0
    #: Whether rotated rows are stored as pairs (2j, 2j + 1).
    paired: bool = True

    @property
    def query_dim(self) -> int:
        """Numbers of a query."""
        return self.plain_dim + self.rotated_dim

    def weights(self, hidden_size: int, heads: int) -> int:
        """Numbers in all matrices of a layer's attention."""
        queries = heads * self.query_dim
        opening = hidden_size * (self.query_rank or queries) + self.query_rank * queries
        absorbed = heads * self.rank * (self.plain_dim + self.value_dim)
        latent = hidden_size * (self.rank + self.rotated_dim)
        return opening + latent + absorbed + hidden_size * heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Layers with a state per slot instead of pages, see `jitney.kernels.delta_net`."""

    #: Which layers, by number.
    layers: frozenset[int]
    #: G and H: key and value heads; value heads share key heads, like query heads in attention.
    key_heads: int
    value_heads: int
    #: D and V.
    key_dim: int
    value_dim: int
    #: W: inputs that the convolution of a channel sees, its own included.
    taps: int = 4

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ModelError(
                f"{self.value_heads} value heads of a recurrent layer cannot share "
                f"{self.key_heads} key heads evenly"
            )

    @property
    def values(self) -> int:
        """H V."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """C."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def outputs(self) -> int:
        """Columns of a layer's opening matrix, and rows of its closing one."""
        return self.channels + 2 * self.values

    def state_shapes(self, slots: int, shards: int = 1) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays that one layer keeps (`DeltaState`), over `shards` such devices."""
        return (
            (slots, self.taps, shards * self.channels),
            (slots, shards * self.value_heads, self.key_dim, self.value_dim),
            (slots,),
        )

    def parts(self, name: str) -> Parts:
        """The columns of the opening matrix (qkv) and of the weights beside the matrices."""
        keys, values = (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)
        rates = self.value_heads, 1
        match name:
            case "qkv":
                return keys, keys, values, values
            case "taps":
                return keys, keys, values
            case "rates":
                return rates, rates
        return (rates,)

    def uneven(self, shards: int) -> dict[str, tuple[int, int]]:
        """Sizes that are divided over devices: names -> (size, parts)."""
        sizes = {"value heads of recurrent layers": (self.value_heads, shards)}
        if self.key_heads % shards and shards % self.key_heads:
            sizes["key heads of recurrent layers"] = self.key_heads, shards
        return sizes

    def local(self, shards: int) -> DeltaNetConfig:
        """One device's heads, of `shards`; devices beyond the key heads share them."""
        return replace(
            self,
            key_heads=max(1, self.key_heads // shards),
            value_heads=self.value_heads // shards,
        )


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """Layers with the last inputs of a convolution per slot instead of pages."""

    #: Which layers, by number.
    layers: frozenset[int]
    #: C: each is convolved by itself, and opened by two gates.
    channels: int
    #: W: inputs that the convolution of a channel sees, its own included.
    taps: int = 3

    @property
    def outputs(self) -> int:
        """Columns of a layer's opening matrix, and rows of its closing one."""
        return 4 * self.channels

    def state_shapes(self, slots: int, shards: int = 1) -> tuple[tuple[int, ...] | None, ...]:
        """See `DeltaNetConfig.state_shapes`."""
        return (slots, self.taps, shards * self.channels), None, (slots,)

    def parts(self, name: str) -> Parts:
        """See `DeltaNetConfig.parts`."""
        return ((self.channels, 1),) * (3 if name == "qkv" else 1)

    def uneven(self, shards: int) -> dict[str, tuple[int, int]]:
        """See `DeltaNetConfig.uneven`."""
        return {"channels of convolutions": (self.channels, shards)}

    def local(self, shards: int) -> ShortConvConfig:
        """One device's channels, of `shards`."""
        return replace(self, channels=self.channels // shards)


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Layers of Mamba-2 that keep a state of each seat in place of pages, see
    `jitney.kernels.mamba`.
    """

    #: Which layers, by number.
    layers: frozenset[int]
    #: G and H: groups and heads; heads of a group share the inputs B and C of the state.
    groups: int
    heads: int
    #: V and D: numbers of a head, and of the state of each of them.
    head_dim: int
    state_size: int
    #: W: inputs that the convolution of a channel sees, its own included; whether it has a bias.
    taps: int = 4
    conv_bias: bool = True
    #: Steps are clamped to these.
    step_limits: tuple[float, float] = (0.0, math.inf)
    #: Devices that share each group, of which they have some heads each (`local`).
    sharers: int = 1

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ModelError(
                f"{self.heads} heads of a recurrent layer are not {self.groups} equal groups"
            )

    @property
    def values(self) -> int:
        """H V."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """C."""
        return self.values + 2 * self.groups * self.state_size

    @property
    def outputs(self) -> int:
        """Columns of a layer's opening matrix, and rows of its closing one."""
        return self.channels + 2 * self.values + self.heads

    def state_shapes(self, slots: int, shards: int = 1) -> tuple[tuple[int, ...], ...]:
        """See `DeltaNetConfig.state_shapes`."""
        return (
            (slots, self.taps, shards * self.channels),
            (slots, shards * self.heads, self.state_size, self.head_dim),
            (slots,),
        )

    def parts(self, name: str) -> Parts:
        """See `DeltaNetConfig.parts`."""
        group, values, steps = (
            (self.groups, self.state_size),
            (self.heads, self.head_dim),
            (self.heads, 1),
        )
        match name:
            case "qkv":
                return values, values, group, group, steps
            case "taps" | "taps_bias":
                return values, group, group
            case "value_norm":
                return (values,)
        return (steps,)

    def uneven(self, shards: int) -> dict[str, tuple[int, int]]:
        """See `DeltaNetConfig.uneven`; one group is shared by all devices."""
        sizes = {"heads of recurrent layers": (self.heads, shards)}
        if self.groups > 1:
            sizes["groups of recurrent layers"] = self.groups, shards
        return sizes

    def local(self, shards: int) -> MambaConfig:
        """One device's heads, of `shards`."""
        return replace(
            self,
            groups=max(1, self.groups // shards),
            heads=self.heads // shards,
            sharers=shards if self.groups == 1 else 1,
        )


#: Layers with a state per slot instead of pages.
type RecurrentConfig = DeltaNetConfig | ShortConvConfig | MambaConfig


@dataclass(frozen=True, slots=True)
class FullHeads:
    """Key and value heads of layers without a window, if they differ from those of layers with
    one.
    """

    #: K and D.
    n_kv_heads: int
    head_dim: int
    #: See `ModelConfig.kv_projections`.
    kv_projections: int = 2

    def local(self, shards: int) -> FullHeads:
        """One device's, of `shards`; devices beyond the heads share them."""
        return replace(self, n_kv_heads=max(1, self.n_kv_heads // shards))


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that store keys and values of the same positions, in pages of their own."""

    #: Window of these layers in positions; 0: all positions.
    window: int
    #: Their numbers.
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Parts of an EAGLE-3 head beside its layer, see `jitney.engine.core.models.eagle3`."""

    #: Tokens that it can draft.
    vocab_size: int
    #: E of the model that it drafts for.
    target_size: int
    #: Layers of that model whose inputs it reads.
    layers: tuple[int, ...]
    #: Whether attention's output is added to the normed hidden state instead of the plain one.
    adds_to_normed: bool
    #: The beginning of the names of its layer's tensors.
    prefix: str
    #: It has an embedding of its own.
    embeds: bool

    @property
    def read_size(self) -> int:
        """Numbers that it reads of each row."""
        return len(self.layers) * self.target_size


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Parts of an encoder beside its layers; each text is computed in one step, without a KV
    cache.
    """

    #: Pooling: a text's vector by cls or mean, or by classify the logit of a pair of texts.
    pooling: Pooling
    #: Rows of the table of segments (BERT's token types).
    token_types: int
    #: The row of the table of positions that a text's first token reads.
    first_position: int = 0
    #: The token that ends the first text of a pair, by which the second segment is found; None:
    #: all tokens are of the first segment.
    separator_id: int | None = None
