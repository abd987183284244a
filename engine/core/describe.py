"""The description of a running engine, for the API, the page and `jitney doctor`."""

from __future__ import annotations

from importlib.metadata import version

import jax
from flax import nnx

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
from jitney.engine.common.machine import cpu_name
from jitney.engine.config import EngineSection, configuration_digest
from jitney.engine.core.executor.step_programs import StepPrograms
from jitney.engine.core.models.protocol import Model
from jitney.engine.core.setup import Setup
from jitney.engine.core.weights.describe import count_parameters, describe_weights
from jitney.kernels.interface import KernelSet


def window_pages(setup: Setup, programs: StepPrograms) -> dict[int, int]:
    """By window the pages, the trash page included, of each cache group that has its own beside
    the first.
    """
    groups = setup.source.config.cache_groups[1:]
    windows = [group.window for group in groups]
    return dict(zip(windows, programs.sizes.group_pages[1:], strict=False))


def retains_prefixes(setup: Setup, programs: StepPrograms) -> bool:
    """Whether there is a prefix cache: recurrent layers need slots for checkpoints."""
    recurrent = setup.source.config.recurrent is not None
    return setup.settings.prefix_cache and (not recurrent or programs.sizes.checkpoints > 0)


def describe_engine(
    setup: Setup,
    model: Model,
    kernels: KernelSet,
    programs: StepPrograms,
    proofs: list[KernelProof],
    defaults: dict[str, int | float],
) -> EngineInfo:
    """The description of a running engine for API, page and `doctor`."""
    identity = setup.source.identity(setup.config.model.adapter_folders)
    ours, memory = version("jitney"), programs.memory()
    return EngineInfo(
        version=ours,
        config_digest=configuration_digest(setup.config, model=identity),
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
            executables=len(programs.executables),
            compile_seconds=programs.compile_seconds,
            compilations=programs.bucket_compilations(),
            step_bytes=memory.largest.total,
            code_bytes=memory.code,
        ),
        sizes=_engine_sizes(setup, programs),
        queue=_queue_info(setup.settings),
    )


def _model_info(setup: Setup, model: Model, defaults: dict[str, int | float]) -> ModelInfo:
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


def _device_info(setup: Setup) -> DeviceInfo:
    return DeviceInfo(
        platform=setup.device.platform,
        name=_devices_in_words(setup),
        tensor_parallel=setup.settings.tensor_parallel,
        expert_parallel=setup.settings.expert_parallel,
        data_parallel=setup.settings.data_parallel,
    )


def _engine_sizes(setup: Setup, programs: StepPrograms) -> EngineSizes:
    settings, buckets = setup.settings, programs.buckets
    return EngineSizes(
        seats=settings.max_seats,
        pages=programs.sizes.group_pages[0] - 1,
        window_pages={window: pages - 1 for window, pages in window_pages(setup, programs).items()},
        checkpoints=programs.sizes.checkpoints,
        page_size=settings.page_size,
        prefix_cache=retains_prefixes(setup, programs),
        token_budget=buckets.token_budget,
        seat_buckets=tuple([bucket.seats for bucket in buckets.decode]),
        token_buckets=tuple([bucket.tokens for bucket in buckets.mixed]),
        padding_is_free=buckets.padding_is_free,
        most_segments=buckets.most_segments,
        max_logprobs=settings.max_logprobs,
    )


def _queue_info(settings: EngineSection) -> QueueInfo:
    return QueueInfo(
        policy=settings.policy,
        order=settings.order,
        max_waiting_requests=settings.max_waiting_requests,
        max_predicted_wait_s=settings.max_predicted_wait_s,
    )


def _devices_in_words(setup: Setup) -> str:
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
