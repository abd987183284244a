"""The configuration of a model as plain data, from any file format; jax-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from jitney.engine.common.errors import ConfigError, ModelError
from jitney.engine.core.weights.checkpoints.layer_configs import (
    CacheGroup,
    Eagle3Config,
    EncoderConfig,
    ExpertsConfig,
    FullHeads,
    LatentConfig,
    RecurrentConfig,
    RopeConfig,
)

type Activation = Literal["silu", "gelu_tanh", "clamped_silu", "gelu", "relu2"]
#: Advice for a model without experts in place of data_parallel.
_INSTEAD = "run engines of their own behind one endpoint (jitney fleet serve)"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model of any family."""

    #: Class name in `config.json`; `jitney.engine.core.models.registry` has the module for it.
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
    #: Window of each layer in positions, its own included; 0: all.
    windows: tuple[int, ...]
    #: The most tokens of prompt and output together.
    context_length: int
    #: Rotary positions of each layer, or of all; None: no rotation.
    ropes: tuple[RopeConfig | None, ...] = (RopeConfig(),)
    #: Epsilon of the norms, added to the mean square (in encoders to the variance).
    rms_eps: float = 1e-6
    #: Epsilon of the norms after attention and MLP; None: `rms_eps`.
    post_norm_eps: float | None = None
    #: Whether norms subtract the mean (LayerNorm).
    centred_norms: bool = False
    #: Whether weights of norms stay in float32, whatever the dtype of the others.
    float32_norms: bool = False
    #: Whether the embedding serves as the output head.
    tie_embeddings: bool = False
    #: Whether the products of attention (its inputs, its output) and of the MLP add a bias; of a
    #: mixture, its router's and its experts'.
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    #: Whether query and key heads are normed before rotation.
    qk_norm: bool = False
    #: Whether queries and keys are normed over all heads at once, instead of per head.
    wide_qk_norm: bool = False
    #: Whether each head has a sink: a score that joins every softmax and weighs no value.
    attention_sinks: bool = False
    #: Activation of the MLP's gate (in encoders, which have no gate, of the MLP).
    activation: Activation = "silu"
    #: None: one feed-forward for every token.
    experts: ExpertsConfig | None = None
    #: Layers without a feed-forward.
    bare_layers: frozenset[int] = frozenset()
    #: For files that store each half of a layer as a layer: the numbers of each layer's halves;
    #: empty for other files.
    stored_halves: tuple[tuple[int, int], ...] = ()
    #: The layers with a state instead of pages; None: all attend.
    recurrent: RecurrentConfig | None = None
    #: Latent attention; None: plain keys and values.
    latent: LatentConfig | None = None
    #: Whether attention's output is multiplied by the sigmoid of a gate, which is as wide as the
    #: queries and a part of their projection.
    attention_gate: bool = False
    #: Whether the gates of all heads follow all queries; else each gate follows its head's query.
    gates_apart: bool = False
    #: Projections of each layer per KV head: 2 (key and value), 1 (one that serves as both), or 0
    #: (the layer reads another layer's keys and values).
    kv_projections: int = 2
    #: KV heads of layers without a window; None: as in other layers.
    full_heads: FullHeads | None = None
    #: Number of last layers without keys and values of their own: each reads those of the last
    #: earlier layer with the same window.
    n_kv_readers: int = 0
    #: Factor of the feed-forward's columns in these last layers.
    reader_width: int = 1
    #: P: size of the per-layer embedding of a token (Gemma's per-layer inputs); 0: none.
    layer_input_size: int = 0
    #: Settings of an encoder; None: a decoder.
    encoder: EncoderConfig | None = None
    #: Attention scores are divided by the root of this; None: head_dim.
    query_scalar: float | None = None
    #: Soft caps of scores and logits, cap * tanh(x / cap); 0: none.
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    #: Factors of the embeddings, of the outputs of attention and MLP, and of logits.
    embed_factor: float = 1.0
    residual_factor: float = 1.0
    logit_factor: float = 1.0
    #: Token that begins a text; None: none does.
    bos_id: int | None = None
    #: All tokens that end a generation, from all files that name some.
    eos_ids: tuple[int, ...] = ()
    #: Number of further layers in the files, each of which predicts one more token (multi-token
    #: prediction, arXiv 2412.19437); the first one may draft, see `prediction_head`.
    n_prediction_layers: int = 0
    #: An EAGLE-3 head; and for the model that it drafts for, `Eagle3Config.layers`.
    eagle3: Eagle3Config | None = None
    noted_layers: tuple[int, ...] = ()
    #: Number of devices that the model is split over; heads and intermediate_size are then those of
    #: one device (see `local`).
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
        """For each layer the number of the layer whose keys and values it reads, usually its
        own.
        """
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
    def slot_bytes(self) -> int:
        """Bytes that recurrent layers keep in a slot."""
        if self.recurrent is None:
            return 0
        shapes = self.recurrent.state_shapes(1)
        numbers = sum(math.prod(shape) for shape in shapes if shape is not None)
        return 4 * numbers * (self.n_layers - len(self.pool_layers))

    @property
    def output_size(self) -> int:
        """Number of tokens that a step chooses from: V; 1 for an encoder, which chooses none."""
        return self.vocab_size if self.encoder is None else 1

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The layers with keys and values, grouped by window, the largest first. A window as long
        as the context counts as none.
        """
        layers: dict[int, list[int]] = {}
        for layer in self.pool_layers:
            window = self.windows[layer]
            if window >= self.context_length:
                window = 0
            layers.setdefault(window, []).append(layer)
        order = sorted(layers, key=lambda window: window or self.context_length, reverse=True)
        return tuple(CacheGroup(window, tuple(layers[window])) for window in order)

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
        """Size of a rotated vector: a head, or the rotated part of a latent head."""
        return self.head_dim if self.latent is None else self.latent.rotated_dim

    @property
    def value_dim(self) -> int:
        """Numbers of a stored key that serve as its value; 0: values are stored separately."""
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
    def attention_inputs(self) -> int:
        """Numbers of a row that the projection to queries, keys and values reads."""
        return self.hidden_size * (1 if self.eagle3 is None else 2)

    @property
    def head_columns(self) -> int:
        """Tokens that the output head, over all devices, has logits of."""
        return self.vocab_size if self.eagle3 is None else self.eagle3.vocab_size

    @property
    def is_gated(self) -> bool:
        """Whether feed-forwards have gates: half of the outputs of what opens them."""
        return self.activation != "relu2"

    @property
    def vocab_share(self) -> int:
        """Rows of the embedding, and columns of the output head, that one device holds."""
        return self.vocab_size // self.shards

    @property
    def prediction_head(self) -> ModelConfig:
        """The model that the first layer behind the last is, see
        `jitney.engine.core.models.prediction`: it attends, and is a mixture if the model is one.
        """
        assert self.n_prediction_layers  # callers check that there is one
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
            recurrent=None,
            stored_halves=((self.n_layers, self.n_layers),),
            n_prediction_layers=0,
        )

    def with_ends(self, *ids: int) -> ModelConfig:
        """The model with further end tokens."""
        return replace(self, eos_ids=tuple(dict.fromkeys((*self.eos_ids, *ids))))

    def in_groups(self, groups: int, engines: int = 1) -> ModelConfig:
        """The model with its experts dealt out to engines and groups of devices. Raises
        ConfigError.
        """
        if groups == engines == 1:
            return self
        if self.experts is None:
            setting = "data_parallel" if engines > 1 else f"expert_parallel {groups}"
            advice = _INSTEAD if engines > 1 else "leave it out"
            raise ConfigError(f"{setting} deals out experts, and this model has none: {advice}")
        return replace(self, experts=self.experts.dealt_out(groups, engines))

    def local(self, shards: int) -> ModelConfig:
        """The part of one of `shards` devices: its share of heads, feed-forward and vocabulary.

        Devices beyond the KV heads share them. Raises ConfigError naming what cannot be divided.
        """
        if shards < 1:
            raise ConfigError(f"a model cannot be divided over {shards} devices")
        experts, heads = self.experts, self.full_heads
        inner_shards = shards // (1 if experts is None else experts.groups)
        sizes = {
            "query heads": (self.n_heads, shards),
            "feed-forward columns": (self.intermediate_size, inner_shards),
            "vocabulary entries": (self.vocab_size, shards),
        }
        for kv_heads in (self.n_kv_heads, *([] if heads is None else [heads.n_kv_heads])):
            if kv_heads % shards and shards % kv_heads:
                sizes = {"key-value heads": (kv_heads, shards)}
        if self.recurrent is not None:
            sizes |= self.recurrent.uneven(shards)
        if self.eagle3 is not None:
            sizes["vocabulary entries that are drafted"] = self.eagle3.vocab_size, shards
        if experts is not None:
            sizes |= experts.uneven(shards)
        uneven = [f"{size} {name}" for name, (size, parts) in sizes.items() if size % parts]
        if uneven:
            raise ConfigError(
                f"tensor_parallel {shards} does not divide the model's {' and '.join(uneven)}"
            )
        return replace(
            self,
            recurrent=self.recurrent and self.recurrent.local(shards),
            n_heads=self.n_heads // shards,
            n_kv_heads=max(1, self.n_kv_heads // shards),
            full_heads=heads and heads.local(shards),
            intermediate_size=self.intermediate_size // inner_shards,
            experts=experts and experts.local(shards),
            shards=shards,
        )
