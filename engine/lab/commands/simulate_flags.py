"""Flags of the commands that simulate an engine, and the simulations for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.trace import Arrival
from jitney.engine.config import Command, Config, EngineSection, Flag, FlagGroup
from jitney.engine.lab.commands.bench_flags import TrafficArguments

if TYPE_CHECKING:
    import numpy as np

    from jitney.engine.core import EngineShape, StepTimes
    from jitney.engine.lab.simulation.engine_run import EngineRun
    from jitney.engine.lab.simulation.roofline import Roofline

#: Fields that step records must have.
_NEEDED = {"device_s", "keys", "longest", "pairs"}


class SimulateArguments(TrafficArguments):
    """The parsed flags of a command that simulates an engine."""

    #: Policies that are compared by default.
    POLICIES: ClassVar = "static,dynamic,continuous"
    #: Settings for a real machine, which a simulation does not use.
    NOT_SIMULATED: ClassVar = (
        *Command.ONLY_SERVED,
        "revision",
        "dtype",
        "weights",
        "adapters",
        "adapter_room",
        "memory_gib",
        "kv_dtype",
        "prefix_cache",
        "share_outputs",
        "speculative_tokens",
        "draft_weights",
        "speculative_acceptance",
        "prompt_lookup_max",
        "prompt_lookup_min",
        "kernels",
        "compilation_cache",
        "platform",
        "device",
        "tensor_parallel",
        "data_parallel",
        "coordinator",
        "n_hosts",
        "host_id",
    )
    #: Flags for speculation with a probability of acceptance.
    DRAFTS: ClassVar = (
        Flag.number(
            "--acceptance",
            "chance that a draft behind right ones is accepted; 0: no drafts",
            0.0,
            least=0,
        ),
        Flag.whole(
            "--drafts", "with --acceptance: most drafts of a sequence in a step", 7, least=1
        ),
    )
    #: Flags for the speed of the traffic.
    PACE: ClassVar = FlagGroup(
        (
            Flag.number("--rate", "requests a second [1; a trace's own]", least=1e-9),
            Flag.whole(
                "--concurrency", "closed arrivals: requests open at a time; 0: all", 0, least=0
            ),
        ),
        "pace",
    )

    @property
    def learns_from_runs(self) -> bool:
        """Whether step times are fitted to measured runs."""
        return not (self.table or self.records or self.chip)

    def compared(self) -> list[str]:
        one = getattr(self, "policy", None)
        return self.words_of("policy" if one else "policies", self.POLICIES)

    def coming(self) -> list[Arrival]:
        self.check_concurrency()
        return self.draw(self.rate or (0.0 if self.trace else 1.0))

    def step_times(self, config: Config) -> StepTimes:
        from jitney.engine.lab.simulation.roofline import Roofline
        from jitney.engine.lab.simulation.step_table import StepTable

        sources = list(filter(None, [self.table, self.records, self.chip]))
        if len(sources) != 1:
            raise ConfigError(
                "say where step times come from: exactly one of --table, --records and --device"
            )
        if self.table:
            return StepTable.load(self.table)
        if self.records:
            return StepTable.from_records(self.read_records(), Path(self.records).name)
        return Roofline.named(
            config.model.id,
            self.chip,
            weights=self.weight_format,
            kv=self.kv,
            count=self.count,
            speculative=config.engine.speculative,
            draft_model=config.engine.draft_model,
        )

    def read_records(self) -> np.ndarray:
        """The step records of --records: an .npy, or all arrays of that type in an .npz."""
        import numpy as np

        fields = [(array, set(array.dtype.names or ())) for array in _arrays_in(self.records)]
        records = [array for array, names in fields if "device_s" in names]
        usable = [array for array, names in fields if names >= _NEEDED]
        if not records or len(usable) < len(records):
            raise ConfigError(f"{self.records}: holds no step records of this version")
        return np.concatenate(records)

    def shape_for(
        self, config: Config, arrivals: Sequence[Arrival], table: StepTimes, drafts: int = 0
    ) -> EngineShape:
        """The engine of the settings. Values that they leave open do not limit it: the context
        holds the longest request, pages suffice for every seat (or fill the device's memory), and
        no request is refused unless limits are given.
        """
        from jitney.engine.core import Buckets, EngineShape
        from jitney.engine.lab.simulation.roofline import Roofline
        from jitney.engine.lab.simulation.step_table import StepTable

        settings = config.engine
        if self.seats:
            budget = max(settings.token_budget, 2 * self.seats)
            sizes = {"max_seats": self.seats, "token_budget": budget}
            settings = settings.model_copy(update=sizes)
        context = config.model.context or max(a.n_prompt + max(1, a.n_output) for a in arrivals)
        shape = EngineShape.of(
            settings,
            context_length=context,
            pages=settings.pages or settings.max_seats * -(-context // settings.page_size) + 1,
            on_device=isinstance(table, Roofline),
            padding_is_free=isinstance(table, StepTable) and table.padding_is_free,
            most_segments=1 if isinstance(table, Roofline) else Buckets.cpu_segments,
        )
        if isinstance(table, Roofline):
            shape = _as_fits(shape, table, settings, context, drafts)
        return shape.open_to_all(vars(self))

    def simulate(
        self,
        policy: str,
        arrivals: Sequence[Arrival],
        shape: EngineShape,
        table: StepTimes,
        clients: int,
    ) -> EngineRun:
        """Simulate one policy; all other settings are the same for all policies. By default, static
        batching waits for a full batch.

        clients: open requests of a closed loop; 0: an open loop.
        """
        from jitney.engine.lab.simulation.simulator import simulate

        timeout_ms = None if "static_timeout_ms" in vars(self) else 0.0
        under = shape.under(policy, timeout_ms)
        return simulate(arrivals, under, table, concurrency=clients or None, seed=self.seed)


def _as_fits(
    shape: EngineShape, roofline: Roofline, settings: EngineSection, context: int, drafts: int
) -> EngineShape:
    """The engine with pools that fit the device, or with the pages of the settings. drafts: most
    per sequence and step.
    """
    from jitney.engine.core import PoolShares

    model = replace(roofline.cost.config, context_length=context)
    shares = PoolShares.of(model, roofline.page_bytes(settings.page_size), settings, context)
    shares = replace(shares, slot_bytes=roofline.slot_bytes, drafts=drafts)
    pools = shares.fit(roofline.kv_room, shape.pages)
    if settings.pages:
        pools = shares.counted(settings.pages)
    if pools.pages[0] < 2:
        chips = f"{roofline.count} x {roofline.device.name}"
        raise ConfigError(
            f"the model does not fit {chips}: use more chips (--count) or smaller --weights"
        )
    return shape.with_model(model, shares, pools)


def _arrays_in(file: str) -> list[np.ndarray]:
    import numpy as np

    try:
        loaded = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as numpy arrays: {error}") from None
    return list(loaded.values()) if isinstance(loaded, Mapping) else [loaded]
