"""The configuration of a model as plain data, from any file format; jax-free."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from jitney.engine.common.errors import ConfigError, ModelError
from jitney.engine.common.requests import Pooling
from jitney.engine.common.step_cost import StepCost

type Activation = Literal["silu", "gelu_tanh", "clamped_silu", "gelu", "relu2"]
#: The parts of a weight of a recurrent layer, one behind the other: how many heads each has, which
#: devices share out, and how many numbers of each head.
type Parts = tuple[tuple[int, int], ...]
#: Rows of an expert's block at least, as many as the units of GPUs, TPUs and AMX multiply at once;
#: and at most, where each expert has many rows and is read once for every block.
_LEAST_BLOCK, _LARGEST_BLOCK = 16, 128


#: Advice for a model without experts in place of data_parallel.
_INSTEAD = "run engines of their own behind one endpoint (jitney fleet serve)"


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the rotary frequencies of a long-context model differ from the plain ones.

    linear: divided by `factor`. dynamic: of a larger theta in a longer context. llama3: low ones
    divided, high ones kept (Llama 3.1). yarn: blended by rotations per context (arXiv 2309.00071).
    factors: frequency j divided by factors[j]. longrope: the same, and in a context longer than the
    original one by long_factors[j] (arXiv 2402.13753). proportional: the first pairs of a head have
    the frequencies that they have where all are rotated, the others none (Gemma 4).
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "factors", "longrope", "proportional"]
    #: What frequencies are divided by.
    factor: float = 1.0
    #: All but linear and factors: tokens of the context that the model was trained with first.
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
    #: Numbers of a head that are rotated, the first ones of a checkpoint's; 0: all.
    dims: int = 0
    #: Rotated queries are multiplied by 1 + beta * log(1 + position // query_context).
    query_beta: float = 0.0
    query_context: int = 1


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A feed-forward that is a mixture: of many alike, each token goes through a few."""

    n_experts: int
    #: Of them, those that a token goes through.
    n_chosen: int
    #: The weights of the chosen ones add up to 1; else they are shares of all.
    renormalised: bool
    #: Groups that an engine's devices are in, if the model is split over several: each holds whole
    #: experts of its own, of which its devices have a share each.
    groups: int = 1
    #: Engines that the experts are dealt out to, and that run their steps together.
    engines: int = 1
    #: Experts of one group, where the configuration is one device's (`ModelConfig.local`); 0: all.
    held: int = 0
    #: Columns of one more expert, which every token goes through; 0: none.
    shared_size: int = 0
    #: That expert has a gate of its own, the sigmoid of one more column of the router.
    shared_gate: bool = True
    #: What the router's numbers become before experts are chosen: shares of 1, or each for itself
    #: a number from 0 to 1.
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    #: Experts are chosen by these plus a number of each expert's own, which no share has.
    choice_bias: bool = False
    #: Experts stand in so many equal clusters, and those of a token are of a few of them: those
    #: whose best so many experts have the greatest sum.
    clusters: int = 1
    chosen_clusters: int = 1
    cluster_best: int = 2
    #: Factor of the shares, also of those that add up to 1.
    share_factor: float = 1.0
    #: Layers with one feed-forward for every token in place of a mixture, and its columns.
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
        """Experts whose weights, or a share of them, the model has."""
        return self.held or self.n_experts

    @property
    def router_columns(self) -> int:
        """Numbers that the router makes of a row."""
        return self.n_experts + (self.shared_size > 0 and self.shared_gate)

    @property
    def all_groups(self) -> int:
        """Groups with different experts, of all engines."""
        return self.engines * self.groups

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
    #: C: numbers of the rows that queries are products of; 0: they are products of hidden rows.
    query_rank: int = 0
    #: Rows that are rotated are stored as pairs (2j, 2j + 1).
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
        kept = hidden_size * (self.rank + self.rotated_dim)
        return opening + kept + absorbed + hidden_size * heads * self.value_dim


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Layers that keep a state in a slot in place of pages, see `jitney.kernels.delta_net`."""

    #: Which layers, by number.
    layers: frozenset[int]
    #: G and H: value heads share key heads as query heads do.
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
    """Layers that keep the last inputs of a convolution in a slot in place of pages."""

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
    #: G and H: heads of a group share what writes and what reads their memory.
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


@dataclass(frozen=True, slots=True)
class FullHeads:
    """Key and value heads of the layers that see all positions, where those have others than layers
    with a window.
    """

    #: K and D.
    n_kv_heads: int
    head_dim: int
    #: See `ModelConfig.kv_projections`.
    kv_projections: int = 2


@dataclass(frozen=True, slots=True)
class _CacheGroup:
    """Layers that keep keys and values of the same positions, in pages of their own."""

    #: Positions that each of them sees, the newest; 0: all.
    window: int
    #: Their numbers.
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Parts of an encoder beside its layers; each text is computed in one step, and nothing is
    kept.
    """

    #: What becomes of a text: a vector by cls or mean, or by classify the logit of a pair of texts.
    pooling: Pooling
    #: Rows of the table of segments (BERT's token types).
    token_types: int
    #: The row of the table of positions that a text's first token reads.
    first_position: int = 0
    #: The token that ends the first text of a pair, by which the second segment is found; None:
    #: all tokens are of the first segment.
    separator_id: int | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model of any family."""

    #: Class name in `config.json`; `jitney.engine.core.models.registry` knows who serves it.
    architecture: str
    #: V, rows of the embedding.
    vocab_size: int
    #: E.
    hidden_size: int
    #: L.
    n_layers: int
    #: H, K and D: query heads, KV heads, and numbers of one head.
    n_heads: int
    n_kv_heads: int
    head_dim: int
    #: Columns of the feed-forward; of a mixture: of each expert.
    intermediate_size: int
    #: How many positions each layer sees, its own included; 0 is all of them.
    windows: tuple[int, ...]
    #: The most tokens of prompt and output together.
    context_length: int
    #: Of each layer, or one for all; None: nothing is rotated.
    ropes: tuple[RopeConfig | None, ...] = (RopeConfig(),)
    #: Added to the mean square in every norm, of an encoder's to the variance.
    rms_eps: float = 1e-6
    #: The same of norms of what a layer's halves add; None: `rms_eps`.
    post_norm_eps: float | None = None
    #: Norms take the mean away.
    centred_norms: bool = False
    #: The weights of the norms stay in float32, whatever the dtype of the others.
    float32_norms: bool = False
    #: The embedding serves as the output head.
    tie_embeddings: bool = False
    #: Whether the products of attention (its inputs, its output) and of the MLP add a bias; of a
    #: mixture, its router's and its experts'.
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    #: Query and key heads are normed before they are rotated.
    qk_norm: bool = False
    #: Queries, and keys, are normed over all heads at once, before they are parted into heads.
    wide_qk_norm: bool = False
    #: Each head has a score of its own that joins the softmax of every row, and weighs no value.
    attention_sinks: bool = False
    #: What gates the MLP; of an encoder's, which has no gate, what it bends.
    activation: Activation = "silu"
    #: None: one feed-forward for every token.
    experts: ExpertsConfig | None = None
    #: Layers that attend, or are recurrent, and have no feed-forward.
    bare_layers: frozenset[int] = frozenset()
    #: Of a file with a layer for each half: their numbers there, of each layer; empty: a layer is
    #: one there, too.
    stored_halves: tuple[tuple[int, int], ...] = ()
    #: Layers that do not attend, of one kind or the other; None: no such layers.
    delta_net: DeltaNetConfig | None = None
    short_conv: ShortConvConfig | None = None
    mamba: MambaConfig | None = None
    #: None: each token keeps keys and values of its own.
    latent: LatentConfig | None = None
    #: What attention gives is multiplied by the sigmoid of a gate, as wide as the queries and
    #: beside them in their projection.
    attention_gate: bool = False
    #: The gates of all heads stand behind all queries; else each stands behind its own.
    gates_apart: bool = False
    #: Heads that a layer projects for each KV head: its key and its value; one that becomes both;
    #: or none, where the layer reads the keys and values of another.
    kv_projections: int = 2
    #: Heads of layers that see all positions; None: they are like the others.
    full_heads: FullHeads | None = None
    #: The last so many layers keep no keys and values: each reads those of the last layer before
    #: them that sees as many positions.
    n_kv_readers: int = 0
    #: Times as many columns of feed-forward as the other layers have these have.
    reader_width: int = 1
    #: P: numbers of a token that each layer has of its own, beside those that it is told by the
    #: layer before; 0: none.
    layer_input_size: int = 0
    #: None: a decoder.
    encoder: EncoderConfig | None = None
    #: Attention scores are divided by its root; None: by that of head_dim.
    query_scalar: float | None = None
    #: Scores and logits are bent to stay within these, cap * tanh(x / cap); 0: they are not.
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    #: Factors of the embeddings, of what attention and MLP add to a row, and of logits.
    embed_factor: float = 1.0
    residual_factor: float = 1.0
    logit_factor: float = 1.0
    #: Token that begins a text; None: none does.
    bos_id: int | None = None
    #: Every token that ends a generation, from all files that name one.
    eos_ids: tuple[int, ...] = ()
    #: Layers of the files behind the last, each of which predicts one token more (multi-token
    #: prediction, arXiv 2412.19437); the first of them may draft, see `prediction_head`.
    n_prediction_layers: int = 0
    #: Among how many devices the model is split; heads and intermediate_size are then one
    #: device's (see `local`).
    shards: int = 1

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ModelError(
                f"{self.n_heads} query heads cannot share {self.n_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for rotary positions, found {self.head_dim}")
        first_reader = self.n_layers - self.n_kv_readers
        if not set(self.windows[first_reader:]) <= set(self.windows[:first_reader]):
            raise ModelError(
                f"the last {self.n_kv_readers} of {self.n_layers} layers read keys and values of "
                "earlier ones, and one of them finds none that sees as many positions"
            )
        if len(self.ropes) not in (1, self.n_layers):
            raise ModelError(f"{len(self.ropes)} rotary positions for {self.n_layers} layers")
        for token in (self.bos_id, *self.eos_ids):
            self._check_special(token)

    def _check_special(self, token: int | None) -> None:
        if token is not None and not 0 <= token < self.vocab_size:
            raise ModelError(
                f"special token id {token} lies outside the vocabulary of {self.vocab_size}"
            )

    def of_layer(self, layer: int) -> ModelConfig:
        """The configuration with the heads and the feed-forward of one layer."""
        own = self
        if self.full_heads is not None and not self.windows[layer]:
            heads = self.full_heads
            own = replace(
                own,
                full_heads=None,
                n_kv_heads=heads.n_kv_heads,
                head_dim=heads.head_dim,
                kv_projections=heads.kv_projections,
            )
        if layer >= self.n_layers - self.n_kv_readers:
            inner = self.reader_width * self.intermediate_size
            own = replace(own, kv_projections=0, intermediate_size=inner)
        if self.experts is not None and layer in self.experts.dense_layers:
            own = replace(own, experts=None, intermediate_size=self.experts.dense_size)
        return own

    @property
    def attending_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that attend."""
        others = () if self.recurrent is None else self.recurrent.layers
        return tuple(layer for layer in range(self.n_layers) if layer not in others)

    @property
    def pool_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that keep keys and values."""
        if self.encoder is not None:
            return ()
        first_reader = self.n_layers - self.n_kv_readers
        return tuple(layer for layer in self.attending_layers if layer < first_reader)

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """For each layer the one whose keys and values it reads, most often itself."""
        first_reader = self.n_layers - self.n_kv_readers
        last = {self.windows[layer]: layer for layer in range(first_reader)}
        readers = self.windows[first_reader : self.n_layers]
        return *range(first_reader), *(last[window] for window in readers)

    @property
    def kv_numbers(self) -> tuple[int, ...]:
        """Numbers of a position's keys and values in all layers of each cache group."""
        return tuple(sum(map(self.kv_width, group.layers)) for group in self.cache_groups)

    def kv_width(self, layer: int) -> int:
        """Numbers of a position's keys and values that a layer reads."""
        return self.of_layer(layer).position_size

    @property
    def _read_shares(self) -> dict[int, float]:
        """Shares of the keys and values of a position, as all layers read them: window -> the share
        that layers with this window read.
        """
        read = Counter[int]()
        for layer in self.attending_layers:
            read[self.windows[layer]] += self.kv_width(layer)
        return {window: numbers / read.total() for window, numbers in read.items()}

    @property
    def largest_head(self) -> int:
        """The most numbers of a head of any layer."""
        return max(self.of_layer(layer).head_dim for layer in range(self.n_layers))

    @property
    def recurrent(self) -> DeltaNetConfig | ShortConvConfig | MambaConfig | None:
        """The layers that keep a state in place of pages."""
        return self.delta_net or self.short_conv or self.mamba

    def by_layer(self, pool: Callable[[ModelConfig], Any], state: Any) -> list[Any]:
        """State of each layer: a pool, made of its own configuration, the state of a recurrent
        layer, or nothing.
        """
        kept: list[Any] = [state if self.recurrent is not None else None] * self.n_layers
        for layer in self.pool_layers:
            kept[layer] = pool(self.of_layer(layer))
        return kept

    @property
    def n_pools(self) -> int:
        """How many those are."""
        return len(self.pool_layers)

    @property
    def slot_bytes(self) -> int:
        """Bytes that recurrent layers keep in a slot."""
        if self.recurrent is None:
            return 0
        shapes = self.recurrent.state_shapes(1)
        numbers = sum(math.prod(shape) for shape in shapes if shape is not None)
        return 4 * numbers * (self.n_layers - self.n_pools)

    @property
    def output_size(self) -> int:
        """Tokens that a step chooses from: V; 1 of an encoder, which chooses none."""
        return self.vocab_size if self.encoder is None else 1

    @property
    def cache_groups(self) -> tuple[_CacheGroup, ...]:
        """The layers that keep keys and values, by how many positions they see, the most first. A
        window as long as the context is none.
        """
        layers: dict[int, list[int]] = {}
        for layer in self.pool_layers:
            window = self.windows[layer]
            if window >= self.context_length:
                window = 0
            layers.setdefault(window, []).append(layer)
        order = sorted(layers, key=lambda window: window or self.context_length, reverse=True)
        return tuple(_CacheGroup(window, tuple(layers[window])) for window in order)

    @property
    def layer_groups(self) -> tuple[int, ...]:
        """For each layer the number of its cache group; 0 for layers without keys and values."""
        numbers = [0] * self.n_layers
        for number, group in enumerate(self.cache_groups):
            for layer in group.layers:
                numbers[layer] = number
        return tuple(numbers[source] for source in self.kv_sources)

    @property
    def window(self) -> int:
        """Positions that the first cache group sees; 0: all."""
        return max([group.window for group in self.cache_groups[:1]], default=0)

    def rope(self, layer: int) -> RopeConfig | None:
        """Rotary positions of a layer; None: its heads are not rotated."""
        return self.ropes[layer % len(self.ropes)]

    @property
    def rope_dim(self) -> int:
        """Numbers of what is rotated: a head, or the part of one beside latents."""
        return self.head_dim if self.latent is None else self.latent.rotated_dim

    @property
    def value_dim(self) -> int:
        """Numbers of a key in the pool that serve as its value; 0: it has one of its own."""
        return 0 if self.latent is None else self.latent.rank

    @property
    def pool_rows(self) -> int:
        """Rows of a position in a layer's pool: 2K, or K where keys serve as values."""
        return self.n_kv_heads if self.value_dim else 2 * self.n_kv_heads

    @property
    def position_size(self) -> int:
        """Numbers of a position in a layer's pool."""
        return self.pool_rows * self.head_dim

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores."""
        return (self.query_scalar or self.head_dim) ** -0.5

    @property
    def qkv_size(self) -> int:
        """Columns of the fused query, key and value projection, (H + 2K) * D, or fewer, see
        `kv_projections`; H * D more with `attention_gate`; of latent attention what stands for
        queries, and a row of the pool.
        """
        if self.latent is not None:
            queries = self.latent.query_rank or self.n_heads * self.latent.query_dim
            return queries + self.head_dim
        queries = self.n_heads * (1 + self.attention_gate)
        return (queries + self.kv_projections * self.n_kv_heads) * self.head_dim

    @property
    def is_gated(self) -> bool:
        """Whether feed-forwards have gates: half of the outputs of what opens them."""
        return self.activation != "relu2"

    @property
    def vocab_share(self) -> int:
        """Rows of the embedding, and columns of the output head, that one device holds."""
        return self.vocab_size // self.shards

    def step_cost(
        self,
        *,
        weight_bytes: float,
        head_bytes: float,
        kv_bytes: float,
        expert_bytes: float | None = None,
    ) -> StepCost:
        """The cost of a decoder's steps. weight_bytes: of one number of the layers' matrices, but
        for experts, if these have others; head_bytes: of the output head; kv_bytes: of a position's
        keys and values, as all layers read them.
        """
        experts = self.experts or ExpertsConfig(1, 1, renormalised=True)
        layers = [self.of_layer(layer) for layer in range(self.n_layers)]
        attending = [layers[layer] for layer in self.attending_layers]
        outputs = sum(own.qkv_size + own.n_heads * own.head_dim for own in attending)
        width = sum(own.n_heads * own.head_dim for own in attending)
        latents = 0
        if self.latent is not None:
            outputs, width = 0, self.n_heads * (self.head_dim + self.value_dim) // 2
            width *= len(attending)
            latents = len(attending) * self.latent.weights(self.hidden_size, self.n_heads)
        outputs += self.n_layers * 3 * self.layer_input_size
        if self.recurrent is not None:
            outputs += len(self.recurrent.layers) * self.recurrent.outputs
        matrices = 2 + self.is_gated
        fed = [own for layer, own in enumerate(layers) if layer not in self.bare_layers]
        dense = [own.intermediate_size for own in fed if own.experts is None]
        inner = dense
        if self.experts is not None:  # the routers, and what all rows go through
            inner = [own.intermediate_size for own in fed if own.experts is not None]
            outputs += len(inner) * (experts.n_experts + matrices * experts.shared_size)
            outputs += matrices * sum(dense)
        return StepCost(
            n_layers=self.n_layers,
            shared_weights=latents + self.hidden_size * outputs,
            expert_weights=self.hidden_size * matrices * sum(inner),
            n_experts=experts.n_experts,
            n_chosen=experts.n_chosen,
            weight_bytes=weight_bytes,
            expert_bytes=expert_bytes,
            head_weights=self.vocab_size * self.hidden_size,
            head_bytes=head_bytes,
            attention_width=width,
            kv_bytes=kv_bytes,
            windows=self._read_shares,
            state_bytes=self.slot_bytes,
        )

    @property
    def prediction_head(self) -> ModelConfig:
        """The model that the first layer behind the last is, see
        `jitney.engine.core.models.prediction`: it attends, and is a mixture if the model is one.
        """
        assert self.n_prediction_layers  # whoever asks knows that there is one
        experts = self.experts
        if experts is not None:
            experts = replace(experts, dense_layers=frozenset(), dense_size=0)
        return replace(
            self,
            architecture=f"{self.architecture}:mtp",
            n_layers=1,
            windows=self.windows[-1:],
            ropes=self.ropes[-1:],
            experts=experts,
            delta_net=None,
            stored_halves=((self.n_layers, self.n_layers),),
            n_prediction_layers=0,
        )

    def with_ends(self, *ids: int) -> ModelConfig:
        """And these tokens end a generation, too."""
        return replace(self, eos_ids=tuple(dict.fromkeys((*self.eos_ids, *ids))))

    def in_groups(self, groups: int, engines: int = 1) -> ModelConfig:
        """The model with its experts dealt out to engines and groups of devices. Raises
        ConfigError.
        """
        if groups == engines == 1:
            return self
        if self.experts is None:
            wanted = "data_parallel" if engines > 1 else f"expert_parallel {groups}"
            advice = _INSTEAD if engines > 1 else "leave it out"
            raise ConfigError(f"{wanted} deals out experts, and this model has none: {advice}")
        if self.experts.n_experts % (engines * groups):
            dealt = f"expert_parallel {groups}"
            if engines > 1:
                dealt = f"data_parallel {engines} with {dealt}"
            raise ConfigError(
                f"{dealt} does not divide the model's {self.experts.n_experts} experts"
            )
        return replace(self, experts=replace(self.experts, groups=groups, engines=engines))

    def feed_forward_shards(self, shards: int) -> int:
        """Devices among `shards` that share a feed-forward; for an expert, those of its group."""
        if self.experts is None:
            return shards
        return shards // self.experts.groups

    def local(self, shards: int) -> ModelConfig:
        """The part of one of `shards` devices: its share of heads, feed-forward and vocabulary.

        Devices beyond the KV heads share them. Raises ConfigError naming what cannot be divided.
        """
        if shards < 1:
            raise ConfigError(f"a model cannot be divided over {shards} devices")
        inner_shards = self.feed_forward_shards(shards)
        sizes = {
            "query heads": (self.n_heads, shards),
            "feed-forward columns": (self.intermediate_size, inner_shards),
            "vocabulary entries": (self.vocab_size, shards),
        }
        heads = self.full_heads
        for kv_heads in (self.n_kv_heads, *([] if heads is None else [heads.n_kv_heads])):
            if kv_heads % shards and shards % kv_heads:
                sizes = {"key-value heads": (kv_heads, shards)}
        if self.recurrent is not None:
            sizes |= self.recurrent.uneven(shards)
        if self.experts is not None:
            sizes["columns of the shared expert"] = self.experts.shared_size, shards
            sizes["columns of layers without experts"] = self.experts.dense_size, shards
        uneven = [f"{size} {name}" for name, (size, parts) in sizes.items() if size % parts]
        if uneven:
            raise ConfigError(
                f"tensor_parallel {shards} does not divide the model's {' and '.join(uneven)}"
            )
        experts = self.experts
        if experts is not None and experts.all_groups > 1:
            experts = replace(experts, held=experts.n_experts // experts.all_groups)
        if experts is not None:
            experts = replace(
                experts,
                shared_size=experts.shared_size // shards,
                dense_size=experts.dense_size // shards,
            )
        return replace(
            self,
            delta_net=self.delta_net and self.delta_net.local(shards),
            short_conv=self.short_conv and self.short_conv.local(shards),
            mamba=self.mamba and self.mamba.local(shards),
            n_heads=self.n_heads // shards,
            n_kv_heads=max(1, self.n_kv_heads // shards),
            full_heads=heads and replace(heads, n_kv_heads=max(1, heads.n_kv_heads // shards)),
            intermediate_size=self.intermediate_size // inner_shards,
            experts=experts,
            shards=shards,
        )
