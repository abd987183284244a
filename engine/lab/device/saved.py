"""The files of `jitney bench device`: a second call goes on where the first one stopped, and no
call overwrites what another one measured.

One measurement is one JSON file and its page. A call takes a file up if it is of the same device,
programs, shape and page size; else, and with `again`, it begins a file of its own. What XLA
measured on a GPU lies beside them, and so does the table of whose kernels attend to prompts, with
this card's entry.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict
from jitney.engine.config import compilation_cache_dir
from jitney.engine.core import RESULTS
from jitney.engine.lab.device.report import DeviceReport
from jitney.engine.lab.device.rows import Floors, Row
from jitney.engine.lab.device.run import DeviceResults
from jitney.kernels.prompt_choices import PromptChoices


class _Saved(msgspec.Struct):
    """The fields of a file that are read; the rest follows from them."""

    #: What must be alike for a later call to go on with it.
    key: JsonDict
    floors: Floors | None
    #: Parts that left nothing undone.
    finished: list[str]
    rows: list[Row]
    #: Of all calls so far, and how many there were.
    seconds: float
    calls: int


#: What a call leaves in its folder, which `ResultFiles.bring` hands to another.
_LEFT = ("device_*.json", "device_*.md", "autotuned_*.tar.gz", PromptChoices.file.name)


class ResultFiles:
    """Where one call keeps its results."""

    def __init__(self, folder: Path, *, again: bool = False):
        self._folder, self._again = folder, again
        self._file: Path | None = None
        self._choices: _Choices | None = None

    def bring(self, earlier: Path) -> None:
        """Copy what a call left in the folder `earlier`, but nothing over what is there.
        ConfigError if it left nothing, or the folder cannot be written to.
        """
        found = [path for pattern in _LEFT for path in sorted(earlier.glob(pattern))]
        if not found:
            raise ConfigError(f"--from {earlier}: there are no results of an earlier call")
        try:
            for path in found:
                if not (self._folder / path.name).exists():
                    shutil.copyfile(path, self._folder / path.name)
        except OSError as error:
            raise ConfigError(f"--from {earlier}: {error.strerror or error}") from None

    def take_up(self, results: DeviceResults) -> None:
        """Choose the file, now that the device is known; what it holds already goes into
        `results`.
        """
        if results.about is not None and results.about.choices:
            name = results.about.choices
            self._choices = _Choices(self._folder, compilation_cache_dir(), name)
            self._choices.take_up()
        for file in self._candidates(results):
            if not file.exists():
                self._file = file
                return
            saved = _read(file)
            if not self._again and saved is not None and saved.key == _key_of(results):
                self._file = file
                _merge(saved, results)
                return

    def _candidates(self, results: DeviceResults) -> Iterator[Path]:
        """device_NAME_SHAPE.json, then -2, -3, ..."""
        number = 1
        while True:
            suffix = f"-{number}" if number > 1 else ""
            yield self._folder / f"{_slug(results)}{suffix}.json"
            number += 1

    def save(self, results: DeviceResults) -> tuple[Path, Path] | None:
        """Write all files, each whole or not at all; None before the device is known.

        ConfigError if the folder cannot be written to, or holds another table of that name.
        """
        if self._file is None:
            return None
        page = self._file.with_suffix(".md")
        report = DeviceReport(results)
        content = report.as_json() | {"key": _key_of(results)}
        try:
            _replace(self._file, json.dumps(content, indent=1))
            _replace(page, report.markdown())
            if self._choices is not None:
                self._choices.save()
            self._save_prompt_choice(report)
        except OSError as error:
            raise ConfigError(f"--out-dir {self._folder}: {error.strerror or error}") from None
        except ValueError as error:
            raise ConfigError(
                f"--out-dir {self._folder}: {PromptChoices.file.name}: {error}"
            ) from None
        return self._file, page

    def _save_prompt_choice(self, report: DeviceReport) -> None:
        """The table of whose kernels attend to prompts, with what this card measured."""
        choice = report.prompt_choice()
        if choice is None:
            return
        table = self._folder / PromptChoices.file.name
        choices = PromptChoices.read(table if table.exists() else PromptChoices.file)
        _replace(table, json.dumps(choices.with_choice(choice).entries, indent=1))


class _Choices:
    """XLA's measurements to choose a GPU's products by: the archive of one card and release, and
    the folder that XLA fills and reads.

    A machine that is lent takes its folders with it when it goes. The archive holds the folder that
    `engine.core.executor.autotuning` names, so unpacked into `engine/core/executor/autotuned` it is
    shipped.
    """

    def __init__(self, folder: Path, programs: Path, name: str):
        """folder: of the results; programs: of all compiled programs; name: of the card's own."""
        self._name = name
        self._measured = programs / name / RESULTS
        self._archive = folder / f"autotuned_{name}.tar.gz"
        self._packed: list[str] = []

    def take_up(self) -> None:
        """Put what an earlier call measured where XLA reads it, but nothing over what is there."""
        if not self._archive.is_file():
            return
        self._measured.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tarfile.open(self._archive) as archive:
            for member in archive:
                folder, _, file = member.name.partition("/")
                content = archive.extractfile(member)
                if content is None or folder != self._name or file != Path(file).name:
                    continue
                if not (self._measured / file).exists():
                    (self._measured / file).write_bytes(content.read())

    def save(self) -> None:
        """Write the archive, whole or not at all, if there is something new. Raises OSError."""
        if not self._measured.is_dir():
            return
        files = sorted(path.name for path in self._measured.iterdir() if path.is_file())
        if files == self._packed:
            return
        draft = self._archive.with_name(f"{self._archive.name}.part")
        with tarfile.open(draft, "w:gz") as archive:
            for file in files:
                archive.add(self._measured / file, f"{self._name}/{file}")
        draft.replace(self._archive)
        self._packed = files


#: The packages that make our programs: with another version of one, figures may be others. Peers
#: are not among them, nor is the memory of the machine at hand, which differs by some bytes.
_MAKERS = ("jitney", "jax", "jaxlib", "jax-triton", "triton", "libtpu")


def _key_of(results: DeviceResults) -> JsonDict:
    """The facts that decide figures: two calls of one measurement agree in them."""
    plan, about = results.plan, results.about
    assert about is not None  # else there is no file
    return {
        "device": about.device,
        "platform": about.platform,
        "kernels": about.kernels,
        "dtype": about.dtype,
        "versions": {name: about.versions[name] for name in _MAKERS if name in about.versions},
        "shape": results.shape,
        "page_size": results.page_size,
        "against": plan.against,
    }


def _slug(results: DeviceResults) -> str:
    name = re.sub(r"[^a-z0-9.]+", "_", results.device.lower()).strip("_")
    return f"device_{name}_{results.shape}"


def _read(file: Path) -> _Saved | None:
    """The results of a file; None if it holds something else."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Saved)
    except (OSError, msgspec.DecodeError):
        return None


def _merge(saved: _Saved, results: DeviceResults) -> None:
    results.rows = [row for row in saved.rows if row.settled]
    results.floors = saved.floors
    results.finished = list(saved.finished)
    results.seconds = results.before = saved.seconds
    results.calls = saved.calls + 1


def _replace(file: Path, text: str) -> None:
    draft = file.with_suffix(f"{file.suffix}.part")
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(file)
