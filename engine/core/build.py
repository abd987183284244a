"""Builds a running core from a configuration: weights, kernels, KV pool, compiled programs. Only
the core's process imports this.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import msgspec
from flax import nnx
from jax.sharding import Mesh

from jitney.engine.common import messages
from jitney.engine.common.engine_info import EngineInfo, KernelProof
from jitney.engine.common.records import Ledger
from jitney.engine.common.requests import pooling_of
from jitney.engine.common.step_cost import DeviceCeiling, StepCost
from jitney.engine.config import Config, EngineSection, configuration_digest
from jitney.engine.core.describe import describe_engine, retains_prefixes, window_pages
from jitney.engine.core.engine_core import EngineCore
from jitney.engine.core.executor.ceiling import ceiling_or_none, kept_ceiling
from jitney.engine.core.executor.kept_programs import KeptPrograms
from jitney.engine.core.executor.memory import PoolShares, PoolSizes, in_one_line, likely_temp_bytes
from jitney.engine.core.executor.pool_sizing import sized_programs
from jitney.engine.core.executor.proving import proofs_of, proven, served_by
from jitney.engine.core.executor.runner import Runner
from jitney.engine.core.executor.step_programs import StepPrograms
from jitney.engine.core.jax_start import keep_freed_memory, start_jax
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.kv_pages import NoPages, PagePool
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.page_tables import PageTables
from jitney.engine.core.scheduler.scheduler import Scheduler
from jitney.engine.core.scheduler.state_slots import StateTables
from jitney.engine.core.setup import Setup, kernels_for, make_buckets, served_kernels, setup_on
from jitney.engine.core.text.vocabularies import check_vocabulary
from jitney.engine.core.weights.checkpoints.sampling_defaults import sampling_defaults
from jitney.engine.core.weights.checkpoints.sources import ModelSource
from jitney.engine.core.weights.describe import count_parameters, describe_step
from jitney.engine.core.weights.load import WeightStorage, load_model, load_shapes
from jitney.engine.core.weights.quantising import load_kv_scales
from jitney.kernels.interface import Kernels, KernelSet
from jitney.kernels.proof_shapes import ServedShapes
from jitney.kernels.select import reference_of

if TYPE_CHECKING:
    from jitney.engine.core.adapter_manager import AdapterManager
    from jitney.engine.core.distributed.link import Hosts, Worker
    from jitney.engine.core.executor.draft_model import DraftModel
    from jitney.engine.core.executor.hosts import Follower
    from jitney.engine.core.weights.adapters import AdapterBank, LoadedAdapter

# Imports inside functions are for parts that most engines do not use: several hosts, adapters,
# canaries.

_log = logging.getLogger("jitney.core")


#: The largest difference of log-probabilities that the canary accepts, by dtype of activations.
_CANARY_LIMITS = {"bfloat16": 0.75, "float16": 0.75, "float32": 0.02}


#: The most tokens, prompt and answer, of a request that the canary recomputes; this limits its KV
#: memory.
_CANARY_TOKENS = 4096


#: The most rows of a step of the canary's core; more would delay the serving steps.
_CANARY_ROWS = 64


#: Smallest size of the weights, in bytes, for which the device's limits are measured.
_LEAST_MEASURED_BYTES = 16 << 20


_Report = Callable[[messages.Progress], None]


@dataclass(frozen=True)
class _Built:
    """The parts that run steps, and their description."""

    setup: Setup
    runner: Runner
    #: The canary's core; None without a canary.
    alone: EngineCore | None
    adapters: AdapterManager | None
    info: EngineInfo
    #: Columns of the adapters; None if the engine has no adapters and no room for any.
    bank: AdapterBank | None


def build_engine(
    config: Config,
    source: ModelSource,
    progress: _Report,
    hosts: Hosts | None = None,
    adapters: Mapping[str, int] | None = None,
) -> tuple[EngineCore, EngineInfo]:
    """Load, size, compile and warm up an engine; reports progress. Raises JitneyError.

    hosts: the other hosts, if any. adapters: number of each of the configuration's adapters by
    name, if an earlier core has assigned them.
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
    setup = setup_on(start_jax(config, hosts), config, source, hosts)
    draft = ModelSource.draft_of(config, setup.source.config, _staged(progress))
    setup = _with_draft(setup, draft)
    if numbers:
        setup = replace(setup, adapters=numbers)
    kernels = served_kernels(setup)
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
    programs = _make_programs(setup, model, kernels, draft)
    runner = _runner_class(setup)(programs, end_ids=tuple(setup.source.config.eos_ids))
    _compile(setup, runner, progress)
    if setup.device.platform == "cpu":
        keep_freed_memory()
    info = describe_engine(setup, model, kernels, programs, proofs, defaults)
    info = msgspec.structs.replace(info, step_cost=_step_cost(setup, model), ceiling=ceiling)
    manager = None
    follows = hosts is not None and hosts.host_id > 0 and config.engine.data_parallel == 1
    if adapters is not None and not follows:
        manager = _manage_adapters(setup, adapters, runner, kernels, alone)
    return _Built(setup, runner, alone, manager, info, None if adapters is None else adapters[0])


def _with_draft(setup: Setup, draft: ModelSource | None) -> Setup:
    """The setup with the source of drafts: for "mtp" the model's own head; for an EAGLE-3 head the
    model also returns the layer inputs that the head reads.
    """
    if setup.settings.speculative == "mtp":
        return replace(setup, draft=setup.source)
    if draft is None or draft.config.eagle3 is None:
        return replace(setup, draft=draft)
    model = replace(setup.source.config, noted_layers=draft.config.eagle3.layers)
    return replace(setup, source=replace(setup.source, config=model), draft=draft)


def _load_adapters(setup: Setup, model: Model) -> tuple[AdapterBank, list[LoadedAdapter]] | None:
    """The bank of adapters; None if the engine has no adapters and no room for any."""
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
    setup: Setup,
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

    def digest_of(identity: str) -> str:
        return configuration_digest(setup.config, model=identity)

    fixed, hosts = setup.settings.data_parallel > 1, None
    if setup.hosts is not None and not fixed:  # they change their adapters together
        from jitney.engine.core.distributed.link import Leader

        assert isinstance(setup.hosts, Leader)  # a worker has no manager
        hosts = setup.hosts
    bank, loaded = adapters
    return AdapterManager(
        bank, loaded, models, setup.source.identity, digest_of, hosts=hosts, fixed=fixed
    )


def _step_cost(setup: Setup, model: Model) -> StepCost | None:
    """The cost of steps; None for an encoder, and for engines that share experts, because their
    steps also compute rows of other engines.
    """
    if setup.is_encoder or setup.settings.data_parallel > 1:
        return None
    local = setup.local
    kv_numbers = sum(map(local.kv_width, local.attending_layers)) * len(setup.devices)
    return describe_step(model, setup.source.config, kv_numbers * setup.kv_dtype.itemsize)


def _measure_ceiling(setup: Setup, model: Model, kernels: KernelSet) -> DeviceCeiling | None:
    """The device's measured limits; None for a small model, whose step time is mostly launches."""
    n_bytes = sum(array.nbytes for array in jax.tree.leaves(nnx.state(model)))
    if n_bytes < _LEAST_MEASURED_BYTES or setup.is_encoder:
        return None
    measure = kept_ceiling if setup.settings.compilation_cache else ceiling_or_none
    ceiling = measure(kernels, setup.dtype, len(setup.devices))
    narrow = {"int8": kernels.int8, "fp8": kernels.fp8}
    if ceiling and any(narrow.get(one.packed.scheme) for one in model.linears()):
        return msgspec.structs.replace(ceiling, operations_s=None)
    return ceiling


def _lay_out(model: Model, kernels: KernelSet, mesh: Mesh | None) -> None:
    """Pack a model's matrices for the kernel set. mesh: the mesh over which they are split, if
    any.
    """
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
    setup = setup_on(devices, config, source)
    kernels = served_kernels(setup)
    whole = setup.source.config
    storage = WeightStorage.choose(config.model.weights, setup.device.platform, kernels)
    model = load_shapes(source, whole, setup.settings.tensor_parallel, setup.dtype, storage)
    _load_adapters(setup, model)
    return kernels.label, proofs_of(kernels, _served(setup, model, kernels))


def _staged(progress: _Report) -> Callable[[str, int, int, str], None]:
    """A callback for fetching and loading: (stage, done, total, detail)."""
    return lambda *report: progress(messages.Progress(*report))


def _load(setup: Setup, kernels: KernelSet, progress: _Report) -> Model:
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
            setup.hosts.same("weights", "loaded")  # the next computation runs on all hosts
        load_kv_scales(model, setup.source, setup.kv_dtype, setup.mesh)
    return model


def _load_draft(
    setup: Setup, target: Model, kernels: KernelSet, progress: _Report
) -> DraftModel | None:
    """Load and pack the draft model or head, if there is one. Its kernels need no proof: wrong
    kernels only make wrong drafts, and change no answer. Raises ConfigError for a different
    vocabulary.
    """
    source, method = setup.draft, setup.settings.speculative
    if source is None:
        return None
    if method == "mtp":
        config, weights = source.config.prediction_head, setup.config.model.weights
    else:
        config, weights = source.config, setup.settings.draft_weights
        kernels = kernels_for(setup, config, setup.dtype)
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
    if method == "draft":
        from jitney.engine.core.executor.draft_model import DraftModel

        return DraftModel(model, kernels)
    from jitney.engine.core.executor.prediction_head import HeadModel

    return HeadModel(model, kernels)


def _prove(setup: Setup, model: Model, kernels: KernelSet) -> tuple[KernelSet, list[KernelProof]]:
    """(the kernels, with those that fail the proof in the served sizes replaced; the proofs)."""
    served = _served(setup, model, kernels)
    kernels, proofs = proven(kernels, served, named=setup.settings.kernels != "auto")
    if setup.hosts is not None:
        wrong = [proof.kernel for proof in proofs if not proof.ok]
        kernel_set = f"{kernels.label} on {setup.device.device_kind}, {setup.dtype}"
        setup.hosts.same("kernels", f"{kernel_set}, without {', '.join(wrong) or 'none'}")
    return kernels, proofs


def _served(setup: Setup, model: Model, kernels: KernelSet) -> ServedShapes:
    """The sizes with which the engine calls its kernels."""
    buckets = make_buckets(setup, kernels)
    return served_by(model, setup.local, setup.sizes(), buckets, setup.dtype)


def _say_if_widened(model: Model, kernels: KernelSet) -> None:
    """Log a line if fp8 weights save memory but no time."""
    if kernels.fp8 is None and any(one.packed.scheme == "fp8" for one in model.linears()):
        _log.warning(
            "fp8 weights are widened in every product here: they save memory and bandwidth, not "
            "arithmetic; NVIDIA GPUs of compute capability 8.9 or later multiply fp8"
        )


def _padding_is_free(setup: Setup, model: Model, kernels: KernelSet) -> bool:
    """Whether the packed model multiplies no padding rows; see `Buckets.padding_is_free`."""
    if not kernels.leaves_out_padding:
        return False
    settings = setup.settings
    any_layout = settings.product_rows >= settings.token_budget
    return any_layout or all(linear.in_panels for linear in model.linears())


def _is_cut(setup: Setup) -> bool:
    """Whether steps are cut into segments. Between two segments, a page must not change whose it
    is, so each layer must keep all positions; and the engine must be the one that looks whether a
    segment is done (`plans_late`).
    """
    if not setup.runs_in_parts or setup.hosts is not None or setup.draft is not None:
        return False
    model, settings = setup.source.config, setup.settings
    keeps_all = model.recurrent is None and not any(model.windows)
    return keeps_all and not settings.most_drafts and not settings.canary_every


def _make_programs(
    setup: Setup, model: Model, kernels: KernelSet, draft: DraftModel | None
) -> StepPrograms:
    buckets = replace(
        make_buckets(setup, kernels),
        padding_is_free=_padding_is_free(setup, model, kernels),
        most_segments=min(Buckets.cpu_segments, setup.local.n_layers) if _is_cut(setup) else 1,
    )

    def make(pools: PoolSizes) -> StepPrograms:
        return StepPrograms(
            model,
            buckets,
            kernels,
            setup.sizes().with_pools(pools),
            mesh=setup.mesh,
            greedy_only_mixed=setup.runs_in_parts or setup.device.platform in ("gpu", "cuda"),
            in_parts=setup.runs_in_parts,
            pooling=pooling_of(setup.pooling),
            draft_model=draft,
            keep=_keep_own(setup),
        )

    if setup.is_encoder:
        return make(PoolSizes((NoPages().n_pages,)))
    return sized_programs(
        setup.settings,
        setup.sizes(),
        setup.own_devices,
        shares=_pool_shares(setup, kernels, draft),
        temp_bytes=likely_temp_bytes(setup.local, buckets),
        make=make,
        hosts=setup.hosts,
    )


def _keep_own(setup: Setup) -> Callable[[Iterable[object]], KeptPrograms] | None:
    """A function that opens the store of compiled programs; None for several devices or without a
    cache folder.
    """
    folder = jax.config.jax_compilation_cache_dir
    if setup.mesh is not None or not setup.settings.compilation_cache or not folder:
        return None
    writes = jax.config.jax_persistent_cache_min_compile_time_secs < math.inf
    return partial(KeptPrograms.of, Path(folder), setup.device, writes=writes)


def _pool_shares(setup: Setup, kernels: Kernels, draft: DraftModel | None) -> PoolShares:
    sizes = setup.sizes()
    page_bytes = sizes.page_bytes(setup.local, kernels)
    if draft is not None:
        first, *others = page_bytes
        page_bytes = first + draft.page_bytes(sizes), *others
    return PoolShares.of(setup.local, page_bytes, setup.settings, setup.context)


def _runner_class(setup: Setup) -> type[Runner]:
    if setup.hosts is None:
        return Runner
    from jitney.engine.core.distributed.link import Leader
    from jitney.engine.core.executor.hosts import LeaderRunner, LockstepRunner

    if setup.settings.data_parallel > 1:
        return LockstepRunner
    if isinstance(setup.hosts, Leader):
        return LeaderRunner
    return Runner


def _compile(setup: Setup, runner: Runner, progress: _Report) -> None:
    def report(done: int, total: int, what: str) -> None:
        progress(messages.Progress("compile", done, total, what))

    def meet() -> None:
        # The first program that runs connects the devices of all hosts; Gloo waits at most 30 s.
        if setup.hosts is not None:
            setup.hosts.same("programs", "compiled")

    with in_one_line("making the KV pool"):
        runner.compile(report, meet)
    memory = runner.programs.memory()
    _log.info("compiled: %s", memory)
    for line in memory.table():
        _log.debug("%s", line)


def _make_core(setup: Setup, runner: Runner, alone: EngineCore | None) -> EngineCore:
    """The engine's core; alone: the canary's core, if any."""
    scheduler = _make_scheduler(setup, runner.programs)
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


def _make_scheduler(setup: Setup, programs: StepPrograms) -> Scheduler:
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
        programs.buckets,
        PageTables(
            _make_pool(setup, programs, programs.sizes.group_pages[0]),
            model.window,
            {
                window: _make_pool(setup, programs, pages)
                for window, pages in window_pages(setup, programs).items()
            },
            _make_state(setup, programs),
        ),
        eos_ids=model.eos_ids,
        vocab_size=model.vocab_size,
    )


def _make_pool(setup: Setup, programs: StepPrograms, n_pages: int) -> PagePool:
    if setup.is_encoder:
        return NoPages()
    return PagePool(
        n_pages,
        setup.settings.page_size,
        retain=retains_prefixes(setup, programs),
        share_outputs=_shares_outputs(setup.settings),
        shares=setup.source.config.recurrent is None or programs.sizes.checkpoints > 0,
    )


def _make_state(setup: Setup, programs: StepPrograms) -> StateTables | None:
    """The slots of recurrent layers; None if there are none."""
    settings = setup.settings
    if setup.source.config.recurrent is None:
        return None
    shares = _pool_shares(setup, programs.step.kernels, programs.draft_model)
    return StateTables(
        PagePool(settings.max_seats + programs.sizes.checkpoints + 1, settings.page_size),
        settings.max_seats,
        shares.checkpoint_tokens // settings.page_size,
        turns=setup.drafting is None,
    )


def _shares_outputs(settings: EngineSection) -> bool:
    if settings.share_outputs == "auto":
        return jax.default_backend() != "cpu"
    return settings.share_outputs == "on"


def _core_alone(setup: Setup, model: Model, kernels: KernelSet) -> EngineCore:
    """The canary's core: one seat, reference kernels and the weights as loaded."""
    own = nnx.merge(*nnx.split(model))  # the arrays are shared until the model's are packed
    longest = min(setup.context, _CANARY_TOKENS)
    page_size = setup.settings.page_size
    n_pages = -(-longest // page_size) + 2  # the trash page, and one to grow into
    sizes = replace(setup.sizes(n_pages), seats=1, context_length=longest, drafting=None)
    buckets = Buckets.of(max_seats=1, token_budget=_CANARY_ROWS, token_sizes=(_CANARY_ROWS,))
    end_ids = tuple(model.config.eos_ids)
    programs = StepPrograms(
        own,
        buckets,
        reference_of(kernels),
        sizes,
        mesh=setup.mesh,
        greedy_only_mixed=setup.runs_in_parts,
        in_parts=setup.runs_in_parts,
    )
    runner = Runner(programs, end_ids=end_ids)
    runner.compile()
    scheduler = Scheduler(
        SchedulerLimits(
            max_seats=1,
            context_length=longest,
            adapters=frozenset(setup.adapters.values()),
        ),
        buckets,
        PageTables(
            PagePool(n_pages, page_size, retain=False),
            state=StateTables.without_checkpoints(1, page_size) if model.config.recurrent else None,
        ),
        eos_ids=end_ids,
        vocab_size=model.config.vocab_size,
    )
    return EngineCore(scheduler, runner, Ledger())
