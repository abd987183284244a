"""An engine without a model: its limits, step sizes and pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from jitney.engine.common.requests import JsonDict
from jitney.engine.config import EngineSection
from jitney.engine.core.executor.memory import PoolShares, PoolSizes
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.scheduler.kv_pages import PagePool
from jitney.engine.core.scheduler.limits import SchedulerLimits
from jitney.engine.core.scheduler.page_tables import PageTables
from jitney.engine.core.scheduler.scheduler import Scheduler
from jitney.engine.core.scheduler.state_slots import StateTables
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig

#: Limits by which a server refuses requests -> the value with which it refuses none.
_NO_CAPS = {
    "max_waiting_requests": 2**31 - 1,
    "max_waiting_tokens": 2**31 - 1,
    "max_predicted_wait_s": 0.0,
}


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The scheduler's sizes of an engine, to simulate it or to start it on random weights."""

    limits: SchedulerLimits
    buckets: Buckets
    #: Pages of the KV pool, including the trash page.
    pages: int
    #: Tokens per page.
    page_size: int = 16
    #: See `EngineCore.plans_late`.
    plans_late: bool = False
    #: Attention window of the first cache group, positions (0: all); window of each other group ->
    #: its pages.
    window: int = 0
    windows: Mapping[int, int] = field(default_factory=dict[int, int])
    #: Slots of recurrent state in addition to one per seat; None: no recurrent layers.
    checkpoints: int | None = None
    #: Pages between the checkpoints of a long prompt.
    checkpoint_pages: int = 0
    #: Probability that a draft is accepted after accepted ones; see `drafting`.
    acceptance: float = 0.0

    @classmethod
    def of(
        cls,
        settings: EngineSection,
        *,
        context_length: int,
        pages: int,
        on_device: bool = False,
        padding_is_free: bool = False,
        most_segments: int = 1,
        buckets: Buckets | None = None,
    ) -> EngineShape:
        """The engine of these settings. pages: see `EngineShape`; settings may leave them to the
        machine. on_device: on a GPU or TPU. padding_is_free, most_segments: see `Buckets`. buckets:
        those of a running engine, if known.
        """
        limits = SchedulerLimits.of(settings, context_length=context_length)
        if buckets is None:
            sizes = cls.buckets_of(settings, on_device)
            buckets = replace(sizes, padding_is_free=padding_is_free, most_segments=most_segments)
        late = not on_device and settings.n_hosts == 1
        return cls(limits, buckets, pages, settings.page_size, plans_late=late)

    @staticmethod
    def buckets_of(settings: EngineSection, on_device: bool) -> Buckets:
        """The buckets that an engine of these settings compiles. on_device: on a GPU or TPU."""
        return Buckets.of(
            max_seats=settings.max_seats,
            token_budget=settings.token_budget,
            seat_sizes=settings.seat_buckets,
            token_sizes=settings.token_buckets,
            on_device=on_device,
        )

    def drafting(self, acceptance: float, most: int) -> EngineShape:
        """A copy with speculation. acceptance: see the field. most: drafts of a sequence a step."""
        return replace(
            self,
            limits=replace(self.limits, max_drafts=most),
            buckets=self.buckets.with_drafts(most),
            acceptance=acceptance,
        )

    def with_model(self, model: ModelConfig, shares: PoolShares, pools: PoolSizes) -> EngineShape:
        """A copy with the cache groups and recurrent layers of a model."""
        windows = [group.window for group in model.cache_groups]
        return replace(
            self,
            pages=pools.pages[0],
            window=windows[0],
            windows=dict(zip(windows[1:], pools.pages[1:], strict=False)),
            checkpoints=None if model.recurrent is None else pools.checkpoints,
            checkpoint_pages=shares.checkpoint_tokens // self.page_size,
        )

    def new_scheduler(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        retain: bool = False,
        tables: Callable[..., PageTables] = PageTables,
    ) -> Scheduler:
        """A scheduler of this shape. retain: with a prefix cache."""

        def pool(pages: int) -> PagePool:
            return PagePool(pages, self.page_size, retain=retain)

        state = None
        if self.checkpoints is not None:
            seats = self.limits.max_seats
            slots = seats + self.checkpoints * retain + 1
            turns = not self.limits.max_drafts
            state = StateTables(pool(slots), seats, self.checkpoint_pages, turns=turns)
        return Scheduler(
            self.limits,
            self.buckets,
            tables(
                pool(self.pages),
                self.window,
                {window: pool(pages) for window, pages in self.windows.items()},
                state,
            ),
            clock,
        )

    def under(self, policy: str, static_timeout_ms: float | None = None) -> EngineShape:
        """A copy with another policy. static_timeout_ms: None keeps the present value."""
        timeout_ms = self.limits.static_timeout_ms
        if static_timeout_ms is not None:
            timeout_ms = static_timeout_ms
        limits = replace(self.limits, policy=policy, static_timeout_ms=timeout_ms)
        return replace(self, limits=limits)

    def open_to_all(self, kept: Collection[str] = ()) -> EngineShape:
        """A copy without limits that refuse requests. kept: names of limits that stay."""
        caps = {name: none for name, none in _NO_CAPS.items() if name not in kept}
        return replace(self, limits=replace(self.limits, **caps))

    def as_json(self) -> JsonDict:
        return {
            "limits": msgspec.to_builtins(self.limits),
            "pages": self.pages,
            "page_size": self.page_size,
            "windows": dict(self.windows),
            "checkpoints": self.checkpoints,
            "buckets": [str(bucket) for bucket in self.buckets.all()],
            "acceptance": self.acceptance,
        }
