"""What an engine is to the simulators: its limits, the sizes of its steps, and its pages."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import msgspec

from jitney.engine.common.requests import JsonDict
from jitney.engine.config import EngineSection
from jitney.engine.core import Buckets, SchedulerLimits

_NO_CAP = 2**31 - 1


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The engine to simulate."""

    limits: SchedulerLimits
    buckets: Buckets
    #: Of the KV pool, the trash page included.
    pages: int
    #: Tokens of a page.
    page_size: int = 16
    #: As `EngineCore.plans_late`.
    plans_late: bool = False

    @classmethod
    def of(
        cls,
        settings: EngineSection,
        *,
        context_length: int,
        pages: int,
        on_device: bool = False,
        padding_is_free: bool = False,
        buckets: Buckets | None = None,
    ) -> EngineShape:
        """The engine that these settings describe; pages as in `EngineShape`, because settings may
        leave it to the machine. on_device: on a GPU or TPU. padding_is_free: see `Buckets`.
        buckets: those of a running engine, where they are known."""
        limits = SchedulerLimits(context_length=context_length, **_shared(settings))
        if buckets is None:
            sizes = cls.buckets_of(settings, on_device)
            buckets = replace(sizes, padding_is_free=padding_is_free)
        late = not on_device and settings.n_hosts == 1
        return cls(limits, buckets, pages, settings.page_size, plans_late=late)

    @staticmethod
    def buckets_of(settings: EngineSection, on_device: bool) -> Buckets:
        """Those that an engine of these settings compiles for; on_device: on a GPU or TPU."""
        return Buckets.of(
            max_seats=settings.max_seats,
            token_budget=settings.token_budget,
            seat_sizes=settings.seat_buckets,
            token_sizes=settings.token_buckets,
            on_device=on_device,
        )

    def under(self, policy: str, static_timeout_ms: float | None = None) -> EngineShape:
        """The same engine under another policy; static_timeout_ms: None leaves it as it is."""
        timeout_ms = self.limits.static_timeout_ms
        if static_timeout_ms is not None:
            timeout_ms = static_timeout_ms
        limits = replace(self.limits, policy=policy, static_timeout_ms=timeout_ms)
        return replace(self, limits=limits)

    def open_to_all(self) -> EngineShape:
        """The same engine, refusing nobody."""
        limits = replace(
            self.limits,
            max_waiting_requests=_NO_CAP,
            max_waiting_tokens=_NO_CAP,
            max_predicted_wait_s=0.0,
        )
        return replace(self, limits=limits)

    def as_json(self) -> JsonDict:
        """For a report."""
        return {
            "limits": msgspec.to_builtins(self.limits),
            "pages": self.pages,
            "page_size": self.page_size,
            "buckets": [str(bucket) for bucket in self.buckets.all()],
        }


def _shared(settings: EngineSection) -> JsonDict:
    """Settings that are limits of the scheduler under the same name."""
    names = [field.name for field in fields(SchedulerLimits) if hasattr(settings, field.name)]
    return {name: getattr(settings, name) for name in names}
