"""Builds a running core from a configuration: weights, kernels, KV pool, compiled programs. Only
the core's process imports this.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jitney.engine.common import messages
from jitney.engine.common.engine_info import (
    DeviceInfo,
    EngineInfo,
    EngineSizes,
    KernelProof,
    KernelsInfo,
    ModelInfo,
    NumberFormats,
    QueueInfo,
)
from jitney.engine.common.errors import ConfigError, ModelError
from jitney.engine.common.machine import cpu_name
from jitney.engine.common.records import Ledger
from jitney.engine.common.requests import pooling_of
from jitney.engine.common.step_cost import DeviceCeiling, StepCost
from jitney.engine.config import (
    AUTO,
    Config,
    EngineSection,
    check_devices,
    configuration_digest,
    open_compilation_cache,
    runs_on_device,
    settings,
    why_no_room,
)
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.executor.autotuning import programs_folder
from jitney.engine.core.executor.ceiling import ceiling_or_none, kept_ceiling
from jitney.engine.core.executor.draft_model import DraftModel
from jitney.engine.core.executor.fits import context_of
from jitney.engine.core.executor.kept_programs import KeptPrograms
from jitney.engine.core.executor.memory import (
    GIB,
    PoolRoom,
    PoolShares,
    PoolSizes,
    claim_memory,
    in_one_line,
    likely_temp_bytes,
)
from jitney.engine.core.executor.prediction_head import HeadModel
from jitney.engine.core.executor.program import StateSizes
from jitney.engine.core.executor.proving import proofs_of, proven, served_by
from jitney.engine.core.executor.runner import Runner
from jitney.engine.core.executor.seat_tokens import Drafting, PromptLookup
from jitney.engine.core.executor.threads import use_processors
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.models.sharding import make_mesh
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.kv_pages import NoPages, PagePool
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.scheduler import Scheduler
from jitney.engine.core.scheduler.state_slots import StateTables
from jitney.engine.core.text.vocabularies import check_vocabulary
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.checkpoints.sampling_defaults import sampling_defaults
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.describe import count_parameters, describe_step, describe_weights
from jitney.engine.core.weights.load import WeightStorage, load_model, load_shapes
from jitney.engine.core.weights.quantising import choose_kv_dtype, load_kv_scales
from jitney.kernels.interface import KernelError, Kernels, KernelSet
from jitney.kernels.proof import without
from jitney.kernels.proof_shapes import ServedShapes
from jitney.kernels.select import ServedHeads, reference, reference_of, select, with_product_rows

if TYPE_CHECKING:
    from jitney.engine.core.adapter_manager import AdapterManager
    from jitney.engine.core.distributed.adapters import LeaderAdapters
    from jitney.engine.core.distributed.link import Hosts, Worker
    from jitney.engine.core.executor.hosts import Follower
    from jitney.engine.core.weights.adapters import AdapterBank, LoadedAdapter

# Imports inside functions are of parts that most engines do without: several hosts, adapters,
# canaries.

_log = logging.getLogger("jitney.core")

#: Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
#: A pool of at least this share of what fits is accepted, without compiling the largest step again.
_ENOUGH = 0.97
#: Free disk space for a model's compiled programs; the default model's take about 10 MB on a CPU.
_PROGRAM_BYTES = 64 << 20
#: Dtype of activations -> largest difference of log-probabilities that the canary accepts.
_CANARY_LIMITS = {"bfloat16": 0.75, "float16": 0.75, "float32": 0.02}
#: Most tokens, prompt and answer, of a request that the canary computes again: its KV memory.
_CANARY_TOKENS = 4096
#: Most rows of a step of the canary's core; more would delay the steps that serve.
_CANARY_ROWS = 64
#: Smallest weights for which the device's maximum is measured.
_LEAST_MEASURED_BYTES = 16 << 20
#: Settings that only decoders support.
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
_Report = Callable[[messages.Progress], None]


@dataclass(frozen=True, kw_only=True)
class _Setup:
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
    #: The files of what drafts, the model's own for its head; None: no model does.
    draft: ModelSource | None = None
    #: Name -> number of the configuration's adapters.
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
        """Whether each step is two programs: see `engine.core.executor.step_parts`."""
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
        """off or a `Pooling`; an encoder's is set by its files."""
        encoder = self.source.config.encoder
        if encoder is not None:
            return encoder.pooling
        asked = self.settings.embedding_pooling
        if asked != AUTO:
            return asked
        if self.hosts is not None:
            return "off"
        try:
            return self.source.stated_pooling() or "off"
        except ModelError as error:
            _log.warning("%s: no vectors of texts are made (--embedding-pooling off)", error)
            return "off"

    @property
    def dimensions(self) -> tuple[int, ...] | None:
        """Lengths that vectors may be cut to; empty: any; None: none. Raises ModelError."""
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
        """How tokens are drafted; None: none are."""
        settings = self.settings
        if settings.speculative == "off":
            return None
        lookup = None
        if settings.speculative == "ngram":
            lookup = PromptLookup(least=settings.prompt_lookup_min, most=settings.prompt_lookup_max)
        return Drafting(lookup, settings.speculative_tokens, settings.speculative_acceptance)


@dataclass(frozen=True)
class _Built:
    """The parts that run steps, and their description."""

    setup: _Setup
    runner: Runner
    #: The core that checks the engine, if one does.
    alone: EngineCore | None
    adapters: AdapterManager | None
    info: EngineInfo
    #: Columns of the adapters; None if there are none and no room for any.
    bank: AdapterBank | None


def build_engine(
    config: Config,
    source: ModelSource,
    progress: _Report,
    hosts: Hosts | None = None,
    adapters: Mapping[str, int] | None = None,
) -> tuple[EngineCore, EngineInfo]:
    """Load, size, compile and warm up an engine; reports progress. Raises JitneyError.

    hosts: the other hosts, if any. adapters: name -> number of the configuration's adapters, as an
    earlier core has set them.
    """
    built = _build(config, source, progress, hosts, adapters)
    if hosts is not None:
        _join_hosts(built.runner, hosts)
    core = _make_core(built.setup, built.runner, built.alone)
    core.intake.adapters = built.adapters
    return core, built.info


def _join_hosts(runner: Runner, hosts: Hosts) -> None:
    """Have a runner on several hosts run its steps with the others."""
    from jitney.engine.core.distributed.link import Leader
    from jitney.engine.core.executor.hosts import LeaderRunner, LockstepRunner

    if isinstance(runner, LockstepRunner):
        runner.join(hosts.step_barrier())
    elif isinstance(runner, LeaderRunner):
        assert isinstance(hosts, Leader)  # _runner_class
        runner.lead(hosts)


def build_follower(
    config: Config, source: ModelSource, progress: _Report, hosts: Worker
) -> tuple[Follower, EngineInfo]:
    """Build a follower's core, as `build_engine` builds the first host's."""
    from jitney.engine.core.distributed.adapters import WorkerAdapters
    from jitney.engine.core.executor.hosts import Follower

    built = _build(config, source, progress, hosts, hosts.adapters)
    adapters = None
    if built.bank is not None:
        folders = config.model.adapter_folders
        adapters = WorkerAdapters(built.bank, built.runner, folders, source.identity, hosts.send)
    return Follower(built.runner, adapters), built.info


def _build(
    config: Config,
    source: ModelSource,
    progress: _Report,
    hosts: Hosts | None,
    numbers: Mapping[str, int] | None = None,
) -> _Built:
    defaults = sampling_defaults(config.sampling, source)
    setup = _setup_on(start_jax(config, hosts), config, source, hosts)
    draft = ModelSource.draft_of(config, setup.source.config, _staged(progress))
    setup = _with_draft(setup, draft)
    if numbers:
        setup = replace(setup, adapters=numbers)
    kernels = _choose_kernels(setup)
    model = _load(setup, kernels, progress)
    adapters = _load_adapters(setup, model)
    progress(messages.Progress("proof", 0, 1, kernels.label))
    kernels, proofs = _prove(setup, model, kernels)
    _say_if_widened(model, kernels)
    alone = None
    if config.engine.canary_every:
        alone = _core_alone(setup, model, kernels)
    _lay_out(model, kernels, setup.mesh)
    draft = _load_draft(setup, model, kernels, progress)
    ceiling = _measure_ceiling(setup, model, kernels)  # before the KV pool takes the memory
    runner = _make_runner(setup, model, kernels, draft)
    _compile(setup, runner, progress)
    if setup.device.platform == "cpu":
        _keep_freed_memory()
    info = _describe(setup, model, kernels, runner, proofs, defaults)
    info = msgspec.structs.replace(info, step_cost=_step_cost(setup, model), ceiling=ceiling)
    manager = None
    follows = hosts is not None and hosts.host_id > 0 and config.engine.data_parallel == 1
    if adapters is not None and not follows:
        manager = _manage_adapters(setup, adapters, runner, kernels, alone)
    return _Built(setup, runner, alone, manager, info, None if adapters is None else adapters[0])


def _with_draft(setup: _Setup, draft: ModelSource | None) -> _Setup:
    """With what drafts: the model itself has its own head, and notes what an EAGLE-3 head reads."""
    if setup.settings.speculative == "mtp":
        return replace(setup, draft=setup.source)
    if draft is None or draft.config.eagle3 is None:
        return replace(setup, draft=draft)
    model = replace(setup.source.config, noted_layers=draft.config.eagle3.layers)
    return replace(setup, source=replace(setup.source, config=model), draft=draft)


def _load_adapters(setup: _Setup, model: Model) -> tuple[AdapterBank, list[LoadedAdapter]] | None:
    """The bank of adapters; None if there are none and no room for any."""
    if not setup.has_adapters:
        return None
    from jitney.engine.core.weights.adapters import load_adapters

    with in_one_line("loading adapters"):
        return load_adapters(
            model,
            setup.source.config,
            setup.config.model.adapter_folders,
            setup.dtype,
            setup.mesh,
            room=setup.config.model.adapter_room,
            numbers=setup.adapters,
        )


def _manage_adapters(
    setup: _Setup,
    adapters: tuple[AdapterBank, list[LoadedAdapter]],
    runner: Runner,
    kernels: KernelSet,
    alone: EngineCore | None,
) -> AdapterManager:
    """The manager that changes adapters while the engine serves."""
    from jitney.engine.core.adapter_manager import AdapterManager, ServedModel

    models = [ServedModel(runner, kernels if setup.mesh is None else None)]
    if alone is not None:
        assert isinstance(alone.runner, Runner)  # `_core_alone`
        models.append(ServedModel(alone.runner, None))

    def digest_of(folders: Mapping[str, str]) -> str:
        identity = setup.source.identity(folders)
        return configuration_digest(setup.config, model=identity, version=version("jitney"))

    bank, loaded = adapters
    return AdapterManager(
        bank,
        loaded,
        models,
        digest_of,
        others=_others_with_adapters(setup),
        fixed=setup.settings.data_parallel > 1,
    )


def _others_with_adapters(setup: _Setup) -> LeaderAdapters | None:
    """The hosts that change their adapters with this one; None if there are none."""
    if setup.hosts is None or setup.settings.data_parallel > 1:
        return None
    from jitney.engine.core.distributed.adapters import LeaderAdapters
    from jitney.engine.core.distributed.link import Leader

    assert isinstance(setup.hosts, Leader)  # a worker has no manager
    return LeaderAdapters(setup.hosts, setup.source.identity)


def _step_cost(setup: _Setup, model: Model) -> StepCost | None:
    """The cost of steps; None for an encoder, and for engines that share experts, whose steps also
    compute rows of others.
    """
    if setup.is_encoder or setup.settings.data_parallel > 1:
        return None
    local = setup.local
    kv_numbers = sum(map(local.kv_width, local.attending_layers)) * len(setup.devices)
    return describe_step(model, setup.source.config, kv_numbers * setup.kv_dtype.itemsize)


def _measure_ceiling(setup: _Setup, model: Model, kernels: KernelSet) -> DeviceCeiling | None:
    """The device's measured maximum; None for a small model, whose steps mostly launch programs."""
    held = sum(array.nbytes for array in jax.tree.leaves(nnx.state(model)))
    if held < _LEAST_MEASURED_BYTES or setup.is_encoder:
        return None
    measure = kept_ceiling if setup.settings.compilation_cache else ceiling_or_none
    ceiling = measure(kernels, setup.dtype, len(setup.devices))
    narrow = {"int8": kernels.int8, "fp8": kernels.fp8}
    if ceiling and any(narrow.get(one.packed.scheme) for one in model.linears()):
        return msgspec.structs.replace(ceiling, operations_s=None)
    return ceiling


def _lay_out(model: Model, kernels: KernelSet, mesh: Mesh | None) -> None:
    """Pack a model's matrices for the kernel set; mesh: over which they are split, if any."""
    if mesh is None:
        model.pack(kernels)
        return
    model.pack_shares(kernels, mesh)


def prove_kernels(config: Config, source: ModelSource) -> tuple[str, list[KernelProof]]:
    """(name of an engine's kernel set, proofs of its kernels in the served shapes), without weights
    and on one device. Raises JitneyError.
    """
    one = config.engine.model_copy(update={"tensor_parallel": 1})
    devices = start_jax(config.model_copy(update={"engine": one}))
    setup = _setup_on(devices, config, source)
    kernels = _choose_kernels(setup)
    whole = setup.source.config
    storage = WeightStorage.choose(config.model.weights, setup.device.platform, kernels)
    model = load_shapes(source, whole, setup.settings.tensor_parallel, setup.dtype, storage)
    _load_adapters(setup, model)
    return kernels.label, proofs_of(kernels, _served(setup, model, kernels))


def _setup_on(
    devices: list[Any], config: Config, source: ModelSource, hosts: Hosts | None = None
) -> _Setup:
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
    dtype = choose_dtype(config.model.dtype, devices[0].platform)
    context = context_of(config, source.config)
    if model.encoder is not None and context < model.context_length:
        _log.info(
            "texts of at most %d tokens are read, of the model's %d: token_budget or context "
            "bounds them",
            context,
            model.context_length,
        )
    if model.encoder is None:
        # Some ropes depend on the context that is served.
        source = replace(source, config=replace(model, context_length=context))
    if config.engine.canary_every and source.config.experts is not None and dtype != jnp.float32:
        raise ConfigError(
            f"canary_every cannot judge a mixture of experts in {jnp.dtype(dtype).name}: rounding "
            "may send a token through other experts; leave it at 0, or take --dtype float32"
        )
    return _Setup(
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
    asked = []
    for name in _NOT_OF_ENCODERS:
        place = places[name]
        value = getattr(getattr(config, place.section), place.key)
        if value != place.field.get_default(call_default_factory=True):
            asked.append(f"{name} {value}")
    if asked:
        raise ConfigError(
            f"{', '.join(asked)}: not for an encoder ({model.architecture}); leave it out"
        )


def _check_pool_dtype(kv_dtype: str, model: ModelConfig) -> None:
    """Raise ConfigError for a narrow pool of keys that serve as values."""
    if kv_dtype != "auto" and model.latent is not None:
        raise ConfigError(
            f"kv_dtype {kv_dtype}: the pool of latent attention has the model's dtype; leave it out"
        )


def _choose_kernels(setup: _Setup) -> KernelSet:
    return _kernels_for(setup, setup.source.config, setup.kv_dtype)


def _kernels_for(setup: _Setup, config: ModelConfig, kv_dtype: np.dtype) -> KernelSet:
    """The kernels for a model of the engine."""
    settings = setup.settings
    heads = ServedHeads(
        config.largest_head, setup.dtype.name, kv_dtype.name, config.attention_sinks
    )
    if setup.is_encoder:
        heads = None
    kernels = choose_kernels(setup.device.platform, settings.kernels, heads)
    if setup.is_encoder:
        kernels = without(kernels, _KERNELS_OF_DECODERS)
    return with_product_rows(kernels, settings.product_rows)


def _staged(progress: _Report) -> Callable[[str, int, int, str], None]:
    """As fetching and loading report: (stage, done, total, detail)."""
    return lambda *report: progress(messages.Progress(*report))


def _load(setup: _Setup, kernels: KernelSet, progress: _Report) -> Model:
    weights = setup.config.model.weights
    with in_one_line("loading weights"):
        model = load_model(
            setup.source,
            setup.source.config,
            setup.dtype,
            _staged(progress),
            mesh=setup.mesh,
            storage=WeightStorage.choose(weights, setup.device.platform, kernels),
        )
    if setup.settings.kv_dtype != "auto":
        if setup.hosts is not None:
            setup.hosts.same("weights", "loaded")  # what follows runs on all of them
        load_kv_scales(model, setup.source, setup.kv_dtype, setup.mesh)
    return model


def _load_draft(
    setup: _Setup, target: Model, kernels: KernelSet, progress: _Report
) -> DraftModel | None:
    """What drafts, laid out, if anything does: a model, or a head. Its kernels need no proof: where
    they are wrong, so are the drafts, and no answer changes. Raises ConfigError for another
    vocabulary.
    """
    source, method = setup.draft, setup.settings.speculative
    if source is None:
        return None
    if method == "mtp":
        config, weights = source.config.prediction_head, setup.config.model.weights
    else:
        config, weights = source.config, setup.settings.draft_weights
        kernels = _kernels_for(setup, config, setup.dtype)
    if method == "draft":
        check_vocabulary(setup.source, source)
        config = replace(config, context_length=min(setup.context, config.context_length))
    with in_one_line("loading what drafts"):
        model = load_model(
            source,
            config,
            setup.dtype,
            _staged(progress),
            mesh=setup.mesh,
            storage=WeightStorage.choose(weights, setup.device.platform, kernels),
        )
    _lay_out(model, kernels, setup.mesh)
    _log.info(
        "drafts by %s, which reads every row: it has %.2g of the model's parameters",
        "the model's own layer for them" if method == "mtp" else source.name,
        count_parameters(model) / count_parameters(target),
    )
    kind = DraftModel if method == "draft" else HeadModel
    return kind(model, kernels)


def _prove(setup: _Setup, model: Model, kernels: KernelSet) -> tuple[KernelSet, list[KernelProof]]:
    """The kernels, with those that fail the proof in the served sizes replaced."""
    served = _served(setup, model, kernels)
    kernels, proofs = proven(kernels, served, named=setup.settings.kernels != "auto")
    if setup.hosts is not None:
        wrong = [proof.kernel for proof in proofs if not proof.ok]
        found = f"{kernels.label} on {setup.device.device_kind}, {setup.dtype}"
        setup.hosts.same("kernels", f"{found}, without {', '.join(wrong) or 'none'}")
    return kernels, proofs


def _served(setup: _Setup, model: Model, kernels: KernelSet) -> ServedShapes:
    """The sizes with which the engine calls its kernels."""
    buckets = _make_buckets(setup, kernels)
    return served_by(model, setup.local, setup.sizes(), buckets, setup.dtype)


def _say_if_widened(model: Model, kernels: KernelSet) -> None:
    """Log a line if fp8 weights save memory but no time."""
    if kernels.fp8 is None and any(one.packed.scheme == "fp8" for one in model.linears()):
        _log.warning(
            "fp8 weights are widened in every product here: they save memory and bandwidth, not "
            "arithmetic; NVIDIA GPUs of compute capability 8.9 or later multiply fp8"
        )


def _make_buckets(setup: _Setup, kernels: KernelSet) -> Buckets:
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


def _padding_is_free(setup: _Setup, model: Model, kernels: KernelSet) -> bool:
    """Whether the packed model multiplies no padding rows; see `Buckets.padding_is_free`."""
    if not kernels.leaves_out_padding:
        return False
    settings = setup.settings
    any_layout = settings.product_rows >= settings.token_budget
    return any_layout or all(linear.in_panels for linear in model.linears())


def _smallest_bucket(kernels: KernelSet) -> int:
    """The smallest bucket: XLA:CPU's products of any kind are ten times slower at one row than at
    four.
    """
    plain = reference()
    for name in ("matmul", "gated", "project", "attend"):
        if getattr(kernels, name) is getattr(plain, name):
            return 4
    return 1


def _make_runner(
    setup: _Setup, model: Model, kernels: KernelSet, draft: DraftModel | None
) -> Runner:
    buckets = replace(
        _make_buckets(setup, kernels),
        padding_is_free=_padding_is_free(setup, model, kernels),
    )
    make_runner = _runner_class(setup)

    def make(pools: PoolSizes) -> Runner:
        return make_runner(
            model,
            buckets,
            kernels,
            setup.sizes().with_pools(pools),
            end_ids=tuple(setup.source.config.eos_ids),
            mesh=setup.mesh,
            greedy_only_mixed=setup.runs_in_parts or setup.device.platform in ("gpu", "cuda"),
            in_parts=setup.runs_in_parts,
            pooling=pooling_of(setup.pooling),
            draft_model=draft,
            keep=_keep_own(setup),
        )

    if setup.is_encoder:
        return make(PoolSizes((NoPages().n_pages,)))
    return _sized_runner(
        setup.settings,
        setup.sizes(),
        setup.own_devices,
        shares=_pool_shares(setup, kernels, draft),
        temp_bytes=likely_temp_bytes(setup.local, buckets),
        make=make,
        hosts=setup.hosts,
    )


def _keep_own(setup: _Setup) -> Callable[[Iterable[object]], KeptPrograms] | None:
    """Where a runner's programs are kept by our own key: those of one device."""
    folder = jax.config.jax_compilation_cache_dir
    if setup.mesh is not None or not setup.settings.compilation_cache or not folder:
        return None
    writes = jax.config.jax_persistent_cache_min_compile_time_secs < math.inf
    return partial(KeptPrograms.of, Path(folder), setup.device, writes=writes)


def _pool_shares(setup: _Setup, kernels: Kernels, draft: DraftModel | None) -> PoolShares:
    sizes = setup.sizes()
    page_bytes = sizes.page_bytes(setup.local, kernels)
    if draft is not None:
        first, *others = page_bytes
        page_bytes = first + draft.page_bytes(sizes), *others
    return PoolShares.of(setup.local, page_bytes, setup.settings, setup.context)


def _runner_class(setup: _Setup) -> type[Runner]:
    if setup.hosts is None:
        return Runner
    from jitney.engine.core.distributed.link import Leader
    from jitney.engine.core.executor.hosts import LeaderRunner, LockstepRunner

    if setup.settings.data_parallel > 1:
        return LockstepRunner
    if isinstance(setup.hosts, Leader):
        return LeaderRunner
    return Runner


def _compile(setup: _Setup, runner: Runner, progress: _Report) -> None:
    def report(done: int, total: int, what: str) -> None:
        progress(messages.Progress("compile", done, total, what))

    def meet() -> None:
        # The first program that runs joins the devices of all hosts: Gloo waits 30 s for that.
        if setup.hosts is not None:
            setup.hosts.same("programs", "compiled")

    with in_one_line("making the KV pool"):
        runner.compile(report, meet)
    memory = runner.program_memory()
    _log.info("compiled: %s", memory)
    for line in memory.table():
        _log.debug("%s", line)


def _make_core(setup: _Setup, runner: Runner, alone: EngineCore | None) -> EngineCore:
    """The engine's core; alone: the canary's core, if any."""
    scheduler = _make_scheduler(setup, runner)
    late = setup.device.platform == "cpu" and setup.hosts is None
    if setup.settings.data_parallel > 1:
        from jitney.engine.core.distributed.lockstep import LockstepCore
        from jitney.engine.core.executor.hosts import LockstepRunner

        assert isinstance(runner, LockstepRunner)  # _runner_class
        return LockstepCore(
            scheduler, runner, Ledger(), lockstep_runner=runner, barrier=runner.barrier
        )
    if alone is None:
        return EngineCore(scheduler, runner, Ledger(), plans_late=late)
    from jitney.engine.core.canary import CanaryCore

    limit, every = _CANARY_LIMITS[jnp.dtype(setup.dtype).name], setup.settings.canary_every
    return CanaryCore(scheduler, runner, Ledger(), alone=alone, every=every, limit=limit)


def _make_scheduler(setup: _Setup, runner: Runner) -> Scheduler:
    settings, model = setup.settings, setup.source.config
    limits = SchedulerLimits.of(
        settings,
        context_length=setup.context,
        adapters=frozenset(setup.adapters.values()),
        embedding_pooling=setup.pooling,
        max_drafts=settings.most_drafts,
        late_drafts=setup.draft is not None,
        encoder=setup.is_encoder,
    )
    return Scheduler(
        limits,
        runner.buckets,
        _make_pool(setup, runner, runner.group_pages[0]),
        eos_ids=model.eos_ids,
        vocab_size=model.vocab_size,
        window=model.window,
        windows={
            window: _make_pool(setup, runner, pages)
            for window, pages in _window_pages(setup, runner).items()
        },
        state=_make_state(setup, runner),
    )


def _window_pages(setup: _Setup, runner: Runner) -> dict[int, int]:
    """By window the pages, the trash page included, of each cache group that has its own beside
    the first.
    """
    groups = setup.source.config.cache_groups[1:]
    windows = [group.window for group in groups]
    return dict(zip(windows, runner.group_pages[1:], strict=False))


def _retains_prefixes(setup: _Setup, runner: Runner) -> bool:
    """Whether there is a prefix cache: recurrent layers need slots for checkpoints."""
    recurrent = setup.source.config.recurrent is not None
    return setup.settings.prefix_cache and (not recurrent or runner.checkpoints > 0)


def _make_pool(setup: _Setup, runner: Runner, n_pages: int) -> PagePool:
    if setup.is_encoder:
        return NoPages()
    return PagePool(
        n_pages,
        setup.settings.page_size,
        retain=_retains_prefixes(setup, runner),
        share_outputs=_shares_outputs(setup.settings),
        shares=setup.source.config.recurrent is None or runner.checkpoints > 0,
    )


def _make_state(setup: _Setup, runner: Runner) -> StateTables | None:
    """The slots of recurrent layers; None if there are none."""
    settings = setup.settings
    if setup.source.config.recurrent is None:
        return None
    shares = _pool_shares(setup, runner.program.kernels, runner.draft_model)
    return StateTables(
        PagePool(settings.max_seats + runner.checkpoints + 1, settings.page_size),
        settings.max_seats,
        shares.checkpoint_tokens // settings.page_size,
        turns=setup.drafting is None,
    )


def _shares_outputs(settings: EngineSection) -> bool:
    if settings.share_outputs == "auto":
        return jax.default_backend() != "cpu"
    return settings.share_outputs == "on"


def _core_alone(setup: _Setup, model: Model, kernels: KernelSet) -> EngineCore:
    """The canary's core: one seat, reference kernels and the weights as loaded."""
    own = nnx.merge(*nnx.split(model))  # the arrays are shared until the model's are packed
    longest = min(setup.context, _CANARY_TOKENS)
    page_size = setup.settings.page_size
    n_pages = -(-longest // page_size) + 2  # the trash page, and one to grow into
    sizes = replace(setup.sizes(n_pages), seats=1, context_length=longest, drafting=None)
    buckets = Buckets.of(max_seats=1, token_budget=_CANARY_ROWS, token_sizes=(_CANARY_ROWS,))
    end_ids = tuple(model.config.eos_ids)
    runner = Runner(
        own,
        buckets,
        reference_of(kernels),
        sizes,
        end_ids=end_ids,
        mesh=setup.mesh,
        greedy_only_mixed=setup.runs_in_parts,
        in_parts=setup.runs_in_parts,
    )
    runner.compile()
    scheduler = Scheduler(
        SchedulerLimits(
            max_seats=1,
            context_length=longest,
            adapters=frozenset(setup.adapters.values()),
        ),
        buckets,
        PagePool(n_pages, page_size, retain=False),
        eos_ids=end_ids,
        vocab_size=model.config.vocab_size,
        state=StateTables.without_checkpoints(1, page_size) if model.config.recurrent else None,
    )
    return EngineCore(scheduler, runner, Ledger())


def start_jax(config: Config, hosts: Hosts | None = None) -> list[Any]:
    """Set up jax and return the `tensor_parallel` devices to run on, host by host."""
    if config.engine.threads or not runs_on_device(config.engine.platform):
        use_processors(config.engine.threads)
    claim_memory(os.environ, config.engine.memory_share)
    libc = _glibc()
    if libc:
        # With an arena per thread, each would keep freed temporaries.
        libc.mallopt(_M_ARENA_MAX, 2)
    if hosts is not None:
        _start_distributed(hosts)
    devices = devices_of(config.engine.platform)
    _keep_programs(config.engine, devices[0])
    if hosts is not None:
        return _of_each_host(devices, config.engine)
    wanted = config.engine.tensor_parallel
    if len(devices) < wanted:
        raise ConfigError(
            f"tensor_parallel {wanted} needs as many devices; jax sees {len(devices)} "
            f"({devices[0].platform})"
        )
    return devices[:wanted]


def _start_distributed(hosts: Hosts) -> None:
    """Start jax's distributed runtime, through which each host knows the devices of all."""
    # For CPUs; GPUs and TPUs have their own collectives.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        hosts.jax_address,
        hosts.n_hosts,
        hosts.host_id,
        cluster_detection_method="deactivate",
        coordinator_bind_address=hosts.jax_address,
    )


def _of_each_host(devices: list[Any], settings: EngineSection) -> list[Any]:
    """The first devices of each host, as many as its part of tensor_parallel."""
    chosen = []
    wanted = settings.devices_here
    for host_id in range(settings.n_hosts):
        own = [device for device in devices if device.process_index == host_id]
        if len(own) < wanted:
            raise ConfigError(
                f"tensor_parallel {settings.tensor_parallel} needs {wanted} devices on each of "
                f"{settings.n_hosts} hosts; jax sees {len(own)} on host {host_id} "
                f"({devices[0].platform})"
            )
        chosen += own[:wanted]
    return chosen


def _keep_programs(settings: EngineSection, device: Any) -> None:
    """Make jax keep its compiled programs and XLA's measurements in the folder, if there is one."""
    programs = open_compilation_cache(settings)
    if programs is not None:
        update = jax.config.update
        update("jax_compilation_cache_dir", str(programs_folder(programs, device)))
        reason = why_no_room(programs, _PROGRAM_BYTES)
        if reason:
            _log.warning("NEW COMPILED PROGRAMS ARE NOT KEPT: %s", reason)
        # Programs compiled in less time are read, but not written.
        update("jax_persistent_cache_min_compile_time_secs", math.inf if reason else 0.0)
        update("jax_persistent_cache_min_entry_size_bytes", 0)


def devices_of(name: str) -> list[Any]:
    """jax's devices. Raises ConfigError if they are not of platform `name` (auto: any)."""
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise ConfigError(f"platform {name}: {str(error).splitlines()[0]}") from error
    check_devices(name, devices[0].platform)
    return devices


def _keep_freed_memory() -> None:
    """Return the memory that loading and compiling freed to the system, and from then on keep what
    steps free: XLA:CPU allocates temporaries in every step, and page faults cost 5 to 7 % of it.
    """
    libc = _glibc()
    if libc:
        libc.malloc_trim(0)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _glibc() -> ctypes.CDLL | None:
    """glibc, whose allocator can be tuned; None with another C library."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        return ctypes.CDLL("libc.so.6")
    return None


def choose_kernels(platform_name: str, name: str, heads: ServedHeads | None = None) -> KernelSet:
    """The kernel set of a name, for these heads if given. Raises ConfigError."""
    try:
        return select(platform_name, name, heads)
    except KernelError as error:
        raise ConfigError(f"kernels: {error}") from error


def choose_dtype(name: str, platform_name: str) -> np.dtype:
    """The dtype of weights, activations and KV; auto: bfloat16 if the device multiplies it
    natively.
    """
    if name != "auto":
        return jnp.dtype(name)
    if platform_name != "cpu" or _cpu_multiplies_bfloat16():
        return jnp.dtype("bfloat16")
    return jnp.dtype("float32")


def _cpu_multiplies_bfloat16() -> bool:
    """True on x86 with avx512_bf16 or amx_bf16, and on Arm with bf16 (/proc/cpuinfo)."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def _sized_runner(
    settings: EngineSection,
    sizes: StateSizes,
    devices: Sequence[Any],
    *,
    shares: PoolShares,
    temp_bytes: int,
    make: Callable[[PoolSizes], Runner],
    hosts: Hosts | None = None,
) -> Runner:
    """A runner with as many KV pages as configured, or as fit in the free memory; logs the number.

    devices: of this host. shares: of the memory on one device. temp_bytes: what the temporaries of
    the largest step should take. make: from sizes of pools to a runner. hosts: the others, whose
    pools are as large.
    """
    room = PoolRoom(settings, sizes, devices, shares, hosts)
    runner = make(pools := room.pools(temp_bytes))
    if not (room.on_cpu or settings.pages or settings.memory_gib):
        # A step's temporaries are known only after compiling it for a pool of the likely size.
        fit = room.pools(runner.largest_temp_bytes())
        if not _ENOUGH * fit.pages[0] <= pools.pages[0] <= fit.pages[0]:
            runner = make(pools := fit)
    _log_pool(pools, sizes, shares, len(devices))
    if shares.slot_bytes:
        _log_state(pools, shares)
    return runner


def _log_state(pools: PoolSizes, shares: PoolShares) -> None:
    _log.info(
        "recurrent layers keep %.2f GiB on each device, %.3g MiB for each of %d seats, %d drafts "
        "of each, and %d checkpoints; long prompts have one every %d tokens",
        shares.state_bytes(pools.checkpoints) / GIB,
        shares.slot_bytes / (1 << 20),
        shares.seats,
        shares.drafts,
        pools.checkpoints,
        shares.checkpoint_tokens,
    )
    if shares.prefix_cache and not pools.checkpoints:
        _log.warning(
            "there is no prefix cache: no checkpoint of %.3g MiB fits beside the seats; give more "
            "memory or pages, or fewer seats (max_seats)",
            shares.slot_bytes / (1 << 20),
        )


def _log_pool(pools: PoolSizes, sizes: StateSizes, shares: PoolShares, n_devices: int) -> None:
    group_pages = pools.pages
    n_pages = group_pages[0]
    tokens = (n_pages - 1) * sizes.page_size
    devices = ""
    if n_devices > 1:
        devices = f" on each of {n_devices} devices"
    _log.info(
        "KV pool: %d pages of %d tokens = %d tokens in %.2f GiB%s; %.3g times the whole context "
        "(%d), or %d tokens for each of %d seats",
        n_pages - 1,
        sizes.page_size,
        tokens,
        shares.bytes_of(pools) / GIB,
        devices,
        tokens / sizes.context_length,
        sizes.context_length,
        tokens // sizes.seats,
        sizes.seats,
    )
    for window, own, page_bytes in zip(
        shares.windows[1:], group_pages[1:], shares.page_bytes[1:], strict=False
    ):
        _log.info(
            "of these, layers with a window of %d tokens have %d pages in %.2f GiB",
            window,
            own - 1,
            own * page_bytes / GIB,
        )
    if len(group_pages) < len(shares.windows):
        _log.info(
            "layers with a window keep pages of all positions: windows of %d seats would take as "
            "many; give more memory, or fewer seats (max_seats)",
            sizes.seats,
        )
    if tokens < sizes.context_length:
        _log.warning(
            "no sequence can have the whole context of %d tokens: the KV pool holds %d; give more "
            "(pages, memory_gib), or a smaller context",
            sizes.context_length,
            tokens,
        )


def _describe(
    setup: _Setup,
    model: Model,
    kernels: KernelSet,
    runner: Runner,
    proofs: list[KernelProof],
    defaults: dict[str, int | float],
) -> EngineInfo:
    """The description of a running engine for API, page and `doctor`."""
    identity = setup.source.identity(setup.config.model.adapter_folders)
    ours, memory = version("jitney"), runner.program_memory()
    return EngineInfo(
        version=ours,
        config_digest=configuration_digest(setup.config, model=identity, version=ours),
        model=_model_info(setup, model, defaults),
        formats=NumberFormats(
            dtype=str(setup.dtype),
            weights=describe_weights(model, setup.source),
            kv_dtype="" if setup.is_encoder else str(setup.kv_dtype),
        ),
        device=_device_info(setup),
        kernels=KernelsInfo(
            label=kernels.label,
            proofs=proofs,
            canary_every=setup.settings.canary_every,
            executables=len(runner.executables),
            compile_seconds=runner.compile_seconds,
            compilations=runner.bucket_compilations(),
            step_bytes=memory.largest.total,
            code_bytes=memory.code,
        ),
        sizes=_engine_sizes(setup, runner),
        queue=_queue_info(setup.settings),
    )


def _model_info(setup: _Setup, model: Model, defaults: dict[str, int | float]) -> ModelInfo:
    return ModelInfo(
        name=setup.source.name,
        context_length=setup.context,
        vocab_size=setup.source.config.vocab_size,
        architecture=setup.source.config.architecture,
        parameters=count_parameters(model),
        weight_bytes=sum(array.nbytes for array in jax.tree.leaves(nnx.state(model))),
        sampling_defaults=defaults,
        embedding_pooling=setup.pooling,
        embedding_size=1 if setup.pooling == "classify" else setup.source.config.hidden_size,
        embedding_dimensions=setup.dimensions,
        encoder=setup.is_encoder,
        adapters=dict(setup.adapters),
    )


def _device_info(setup: _Setup) -> DeviceInfo:
    return DeviceInfo(
        platform=setup.device.platform,
        name=_devices_in_words(setup),
        tensor_parallel=setup.settings.tensor_parallel,
        expert_parallel=setup.settings.expert_parallel,
        data_parallel=setup.settings.data_parallel,
    )


def _engine_sizes(setup: _Setup, runner: Runner) -> EngineSizes:
    settings, buckets = setup.settings, runner.buckets
    return EngineSizes(
        seats=settings.max_seats,
        pages=runner.group_pages[0] - 1,
        window_pages={window: pages - 1 for window, pages in _window_pages(setup, runner).items()},
        checkpoints=runner.checkpoints,
        page_size=settings.page_size,
        prefix_cache=_retains_prefixes(setup, runner),
        token_budget=buckets.token_budget,
        seat_buckets=tuple([bucket.seats for bucket in buckets.decode]),
        token_buckets=tuple([bucket.tokens for bucket in buckets.mixed]),
        padding_is_free=buckets.padding_is_free,
        max_logprobs=settings.max_logprobs,
    )


def _queue_info(settings: EngineSection) -> QueueInfo:
    return QueueInfo(
        policy=settings.policy,
        order=settings.order,
        max_waiting_requests=settings.max_waiting_requests,
        max_predicted_wait_s=settings.max_predicted_wait_s,
    )


def _devices_in_words(setup: _Setup) -> str:
    chip = setup.device.device_kind
    if setup.device.platform == "cpu":
        chip = cpu_name()
    if len(setup.devices) == 1:
        return chip
    words = f"{len(setup.devices)} x {chip}"
    if setup.hosts is not None:
        words += f" on {setup.hosts.n_hosts} hosts"
    if setup.settings.data_parallel > 1:
        words += ", an engine on each"
    return words
