"""Counts the compilations of this process, and records how long each program's took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import jax

from jitney.engine.common.engine_info import BucketCompilation

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_EVENT = "/jax/compilation_cache/cache_hits"


@dataclass(frozen=True, slots=True)
class _Compilation:
    """The compilation of one program."""

    #: Elapsed time; other programs may have been compiled at the same time.
    seconds: float
    #: Read from a folder of compiled programs, ours or jax's.
    from_cache: bool


class Compilations:
    """The compilations of the process. There is one instance, because jax never removes a listener:
    a runner's own method would keep its weights alive. jax calls listeners on the compiling thread.
    """

    def __init__(self):
        self.count = 0
        self._of: WeakKeyDictionary[jax.stages.Compiled, _Compilation] = WeakKeyDictionary()
        self._thread = threading.local()
        self._listens = False

    def _listen(self) -> None:
        """Register jax's listeners once."""
        if not self._listens:
            self._listens = True
            jax.monitoring.register_event_duration_secs_listener(self._count)
            jax.monitoring.register_event_listener(self._take_hit)

    def timed(self, compile_program: Callable[[], jax.stages.Compiled]) -> jax.stages.Compiled:
        """Compile on this thread, and record how long it took."""
        self._listen()
        self._thread.hit = self._thread.asked = False
        started = time.perf_counter()
        program = compile_program()
        seconds = time.perf_counter() - started
        self._of[program] = _Compilation(seconds, self._thread.hit)
        return program

    def of_bucket(self, bucket: str, programs: Iterable[jax.stages.Compiled]) -> BucketCompilation:
        """The compilation of a bucket's programs, which `timed` has compiled."""
        each = [self._of[program] for program in programs]
        return BucketCompilation(
            bucket=bucket,
            seconds=sum(one.seconds for one in each),
            from_cache=all(one.from_cache for one in each),
        )

    @property
    def was_made(self) -> bool:
        """Whether XLA really compiled the program that `timed` compiles on this thread: it was not
        read from a folder, and this process had not compiled or read it before.
        """
        return getattr(self._thread, "asked", False) and not self._thread.hit

    def note_read(self) -> None:
        """Note that the program that `timed` compiles on this thread was read from our store."""
        self._thread.hit = True

    def _count(self, event: str, duration_secs: float, **_: object) -> None:
        if event == _COMPILE_EVENT:
            self.count += 1
            self._thread.asked = True

    def _take_hit(self, event: str, **_: object) -> None:
        if event == _CACHE_EVENT:
            self._thread.hit = True


compilations = Compilations()
