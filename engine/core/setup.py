"""Decisions made before the weights of an engine are loaded: devices, dtypes, kernels, sizes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jitney.engine.common.errors import ConfigError, ModelError
from jitney.engine.common.machine import bfloat16_features
from jitney.engine.config import AUTO, Config, EngineSection, settings
from jitney.engine.core.executor.fits import context_of
from jitney.engine.core.executor.program import StateSizes
from jitney.engine.core.executor.seat_tokens import Drafting, PromptLookup
from jitney.engine.core.jax_start import start_jax
from jitney.engine.core.models.sharding import make_mesh
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.quantising import choose_kv_dtype
from jitney.kernels.interface import KernelError, KernelSet
from jitney.kernels.proof import without
from jitney.kernels.select import ServedHeads, reference, select, with_product_rows

if TYPE_CHECKING:
    from jitney.engine.core.distributed.link import Hosts

_log = logging.getLogger("jitney.core")

#: Settings that encoders do not support.
_NOT_OF_ENCODERS = (
    "weights",
    "adapters",
    "adapter_room",
    "kv_dtype",
    "policy",
    "embedding_pooling",
    "canary_every",
    "speculative",
    "tensor_parallel",
    "expert_parallel",
    "data_parallel",
    "n_hosts",
)


#: Kernels that an encoder never calls, since it has its own attention and norms, and no head.
_KERNELS_OF_DECODERS = ("attention", "norm", "head", "sampling cut")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Decisions made before the weights are loaded."""

    config: Config
    #: The model's files and shape.
    source: ModelSource
    #: jax's devices, which have no types: tensor_parallel of all hosts, or those of all engines
    #: that share experts.
    devices: list[Any]
    #: Mesh of the devices; None for a single one.
    mesh: Mesh | None
    #: Dtype of weights and activations.
    dtype: np.dtype
    #: Dtype of stored keys and values.
    kv_dtype: np.dtype
    #: Most tokens of a sequence.
    context: int
    #: The other hosts; None if there are none.
    hosts: Hosts | None
    #: The files of the draft model or head; for the model's own head, the model's files. None:
    #: neither is used.
    draft: ModelSource | None = None
    #: Numbers of the configuration's adapters, by name.
    adapters: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def settings(self) -> EngineSection:
        return self.config.engine

    @property
    def own_devices(self) -> list[Any]:
        """The devices of this host."""
        return [device for device in self.devices if device in jax.local_devices()]

    @property
    def device(self) -> Any:
        return self.own_devices[0]

    @property
    def runs_in_parts(self) -> bool:
        """Whether each step runs as several programs, see `engine.core.executor.step_parts`."""
        return self.device.platform == "cpu" and self.mesh is None and not self.is_encoder

    @property
    def local(self) -> ModelConfig:
        return self.source.config.local(self.settings.tensor_parallel)

    @property
    def is_encoder(self) -> bool:
        return self.source.config.encoder is not None

    @property
    def has_adapters(self) -> bool:
        """Whether there are adapters, or room for some."""
        return bool(self.config.model.adapters or self.config.model.adapter_room)

    @cached_property
    def pooling(self) -> str:
        """The pooling of prompts' vectors, "off" or a `Pooling`; an encoder's files set its own."""
        encoder = self.source.config.encoder
        if encoder is not None:
            return encoder.pooling
        pooling = self.settings.embedding_pooling
        if pooling != AUTO:
            return pooling
        if self.hosts is not None:
            return "off"
        try:
            return self.source.stated_pooling() or "off"
        except ModelError as error:
            _log.warning("%s: no vectors of texts are made (--embedding-pooling off)", error)
            return "off"

    @property
    def dimensions(self) -> tuple[int, ...] | None:
        """Lengths to which vectors may be truncated; empty: any length; None: no vectors are made.
        Raises ModelError.
        """
        if self.pooling in ("off", "classify"):
            return None
        return self.source.stated_dimensions()

    def sizes(self, n_pages: int = 1) -> StateSizes:
        """The sizes of the engine's arrays."""
        return StateSizes(
            seats=self.settings.max_seats,
            n_pages=n_pages,
            page_size=self.settings.page_size,
            context_length=self.context,
            kv_dtype=self.kv_dtype,
            logprobs=self.settings.max_logprobs,
            has_adapters=self.has_adapters,
            drafting=self.drafting,
        )

    @property
    def drafting(self) -> Drafting | None:
        """The method of drafting tokens; None: none."""
        settings = self.settings
        if settings.speculative == "off":
            return None
        lookup = None
        if settings.speculative == "ngram":
            lookup = PromptLookup(least=settings.prompt_lookup_min, most=settings.prompt_lookup_max)
        return Drafting(lookup, settings.speculative_tokens, settings.speculative_acceptance)


def setup_on(
    devices: list[Any], config: Config, source: ModelSource, hosts: Hosts | None = None
) -> Setup:
    engine = config.engine
    if source.config.encoder is not None:
        _check_encoder(config, source.config)
    _check_pool_dtype(engine.kv_dtype, source.config)
    if engine.speculative_acceptance:
        _log.warning(
            "speculative_acceptance %g: drafts are accepted by chance; ANSWERS ARE NOT THE MODEL'S",
            engine.speculative_acceptance,
        )
    model = source.config.in_groups(engine.expert_parallel, engine.data_parallel)
    source = replace(source, config=model)
    mesh = None
    if len(devices) > 1:
        mesh = make_mesh(devices, engine.data_parallel)
    dtype = _choose_dtype(config.model.dtype, devices[0].platform)
    context = context_of(config, source.config)
    if model.encoder is not None and context < model.context_length:
        _log.info(
            "texts of at most %d tokens are read, of the model's %d: token_budget or context "
            "bounds them",
            context,
            model.context_length,
        )
    if model.encoder is None:
        # Some rotary embeddings depend on the served context length.
        source = replace(source, config=replace(model, context_length=context))
    if config.engine.canary_every and source.config.experts is not None and dtype != jnp.float32:
        raise ConfigError(
            f"canary_every cannot judge a mixture of experts in {jnp.dtype(dtype).name}: rounding "
            "may send a token through other experts; leave it at 0, or take --dtype float32"
        )
    return Setup(
        config=config,
        source=source,
        devices=devices,
        mesh=mesh,
        dtype=dtype,
        kv_dtype=choose_kv_dtype(config.engine.kv_dtype, dtype, devices[0]),
        context=context,
        hosts=hosts,
        adapters={name: number for number, name in enumerate(config.model.adapter_folders, 1)},
    )


def _check_encoder(config: Config, model: ModelConfig) -> None:
    """Raise ConfigError for settings that encoders do not support."""
    places = settings()
    refused = []
    for name in _NOT_OF_ENCODERS:
        place = places[name]
        value = getattr(getattr(config, place.section), place.key)
        if value != place.field.get_default(call_default_factory=True):
            refused.append(f"{name} {value}")
    if refused:
        raise ConfigError(
            f"{', '.join(refused)}: not for an encoder ({model.architecture}); leave it out"
        )


def _check_pool_dtype(kv_dtype: str, model: ModelConfig) -> None:
    """Raise ConfigError for a quantised pool with latent attention, whose keys are also values."""
    if kv_dtype != "auto" and model.latent is not None:
        raise ConfigError(
            f"kv_dtype {kv_dtype}: the pool of latent attention has the model's dtype; leave it out"
        )


def served_kernels(setup: Setup) -> KernelSet:
    return kernels_for(setup, setup.source.config, setup.kv_dtype)


def kernels_for(setup: Setup, config: ModelConfig, kv_dtype: np.dtype) -> KernelSet:
    """The kernels for a model of the engine."""
    settings = setup.settings
    widths = [config.of_layer(layer).head_dim for layer in range(config.n_layers)]
    heads = ServedHeads(max(widths), setup.dtype.name, kv_dtype.name, config.attention_sinks)
    if setup.is_encoder:
        heads = None
    kernels = _choose_kernels(setup.device.platform, settings.kernels, heads)
    if setup.is_encoder:
        kernels = without(kernels, _KERNELS_OF_DECODERS)
    return with_product_rows(kernels, settings.product_rows)


def make_buckets(setup: Setup, kernels: KernelSet) -> Buckets:
    """The step sizes to compile."""
    settings = setup.settings
    buckets = Buckets.of(
        max_seats=settings.max_seats,
        token_budget=settings.token_budget,
        seat_sizes=settings.seat_buckets,
        token_sizes=settings.token_buckets,
        on_device=setup.device.platform != "cpu",
        smallest=_smallest_bucket(kernels),
    )
    return buckets.with_drafts(settings.most_drafts)


def _smallest_bucket(kernels: KernelSet) -> int:
    """Rows of the smallest bucket: 4 if one of the products is XLA:CPU's, which takes ten times as
    long for one row as for four; else 1.
    """
    plain = reference()
    for name in ("matmul", "gated", "project", "attend"):
        if getattr(kernels, name) is getattr(plain, name):
            return 4
    return 1


def start_device(config: Config, kernel_sets: Iterable[str]) -> tuple[list[KernelSet], np.dtype]:
    """Start jax without a model; (the kernel sets with these names, the dtype) for its device.
    Raises ConfigError.
    """
    platform = start_jax(config)[0].platform
    kernels = [_choose_kernels(platform, name) for name in kernel_sets]
    return kernels, _choose_dtype(config.model.dtype, platform)


def _choose_kernels(platform_name: str, name: str, heads: ServedHeads | None = None) -> KernelSet:
    """The kernel set with this name, for these heads if given. Raises ConfigError."""
    try:
        return select(platform_name, name, heads)
    except KernelError as error:
        raise ConfigError(f"kernels: {error}") from error


def _choose_dtype(name: str, platform_name: str) -> np.dtype:
    """The dtype of weights, activations and KV; auto: bfloat16 if the device multiplies it
    natively.
    """
    if name != "auto":
        return jnp.dtype(name)
    if platform_name != "cpu" or bfloat16_features():
        return jnp.dtype("bfloat16")
    return jnp.dtype("float32")
