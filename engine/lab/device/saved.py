"""The files of `jitney bench device`: a second call continues where the first one stopped, and no
call overwrites another one's measurements.

One measurement is a JSON file and its page. A call continues a file of the same device, programs,
shape and page size; otherwise, and with `again`, it begins a new file. The same folder holds XLA's
measurements on a GPU, and the table of the kernels for attention of prompts with this card's entry.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from jitney.engine.common.cache_folder import compilation_cache_dir
from jitney.engine.common.errors import ConfigError
from jitney.engine.common.requests import JsonDict
from jitney.engine.core import RESULTS
from jitney.engine.lab.device.report import DeviceReport
from jitney.engine.lab.device.rows import Floors, Row
from jitney.engine.lab.device.run import DeviceResults
from jitney.kernels.prompt_choices import PromptChoices


class _Saved(msgspec.Struct):
    """The fields that are read from a file; all others follow from them."""

    #: Facts that must be equal for a later call to continue it.
    key: JsonDict
    floors: Floors | None
    #: Parts that are complete.
    finished: list[str]
    rows: list[Row]
    #: Seconds of all calls so far, and their number.
    seconds: float
    calls: int


#: Files that a call leaves in its folder, and that `ResultFiles.bring` copies to another.
_LEFT = ("device_*.json", "device_*.md", "autotuned_*.tar.gz", PromptChoices.file.name)


class ResultFiles:
    """The folder and files in which a call stores its results."""

    def __init__(self, folder: Path, *, again: bool = False):
        self._folder, self._again = folder, again
        self._file: Path | None = None
        self._choices: _Choices | None = None

    def bring(self, earlier: Path) -> None:
        """Copy a call's files from the folder `earlier`, without overwriting any. Raises
        ConfigError if there are none, or if the folder cannot be written to.
        """
        files = [path for pattern in _LEFT for path in sorted(earlier.glob(pattern))]
        if not files:
            raise ConfigError(f"--from {earlier}: there are no results of an earlier call")
        try:
            for path in files:
                if not (self._folder / path.name).exists():
                    shutil.copyfile(path, self._folder / path.name)
        except OSError as error:
            raise ConfigError(f"--from {earlier}: {error.strerror or error}") from None

    def take_up(self, results: DeviceResults) -> None:
        """Choose the file once the device is known, and add its contents to `results`."""
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
        """Write all files, each atomically; None before the device is known.

        Raises ConfigError if the folder cannot be written to, or holds a different table.
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
        """Write the table of kernels for attention of prompts, with this card's measurement."""
        choice = report.prompt_choice()
        if choice is None:
            return
        table = self._folder / PromptChoices.file.name
        choices = PromptChoices.read(table if table.exists() else PromptChoices.file)
        _replace(table, json.dumps(choices.with_choice(choice).entries, indent=1))


class _Choices:
    """XLA's measurements for choosing a GPU's products: the archive for one card and release, and
    the folder that XLA reads and writes.

    A rented machine's folders are lost with it, so the archive holds the folder that
    `engine.core.executor.autotuning` names; unpacked into `engine/core/executor/autotuned`, it
    becomes part of the package.
    """

    def __init__(self, folder: Path, programs: Path, name: str):
        """folder: of the results. programs: of all compiled programs. name: the card's folder."""
        self._name = name
        self._measured = programs / name / RESULTS
        self._archive = folder / f"autotuned_{name}.tar.gz"
        self._packed: list[str] = []

    def take_up(self) -> None:
        """Copy an earlier call's measurements to XLA's folder, without overwriting any."""
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
        """Write the archive atomically if there are new measurements. Raises OSError."""
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


#: Packages that compile our programs: another version may give other figures. Peers are not among
#: them, nor is the machine's memory, which differs by some bytes.
_MAKERS = ("jitney", "jax", "jaxlib", "jax-triton", "triton", "libtpu")


def _key_of(results: DeviceResults) -> JsonDict:
    """The facts on which figures depend; they are equal for all calls of one measurement."""
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
