"""Reading small files of an untrusted model folder; jax-free."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal, overload

from jitney.engine.common.errors import ModelError
from jitney.engine.common.requests import JsonDict, JsonValue

#: Sizes of a tensor's axes.
type Shape = tuple[int, ...]

#: config.json and its like are a few kB; an index of a very large model some MB; a tokenizer up to
#: tens of MB.
_MAX_JSON_BYTES = 32 << 20
MAX_TOKENIZER_BYTES = 100 << 20


#: Files of the Hugging Face cache that are named by the digest of their content: those of one
#: repository, and those that several share.
_BLOB = re.compile(r"/models--[^/]+/blobs/[^/]+$|/blobs/([0-9a-f]{2})/\1[0-9a-f]{62}$")


@overload
def safe_file(folder: Path, name: str, *, missing_ok: Literal[False] = False) -> Path: ...
@overload
def safe_file(folder: Path, name: str, *, missing_ok: bool) -> Path | None: ...


def safe_file(folder: Path, name: str, *, missing_ok: bool = False) -> Path | None:
    """The file `name` of the folder; None if absent and `missing_ok`.

    Raises ModelError for a name that is not plain, and for a link out of the folder, unless to a
    file that the Hugging Face cache keeps by the digest of its content.
    """
    _check_plain(name)
    path = folder / name
    if not path.is_file():
        if path.is_symlink():
            raise ModelError(
                f"{name[:100]} of the model folder is a link to {_target(path)}, where no file is"
            )
        if missing_ok:
            return None
        raise ModelError(f"the model folder lacks {name[:100]}")
    real = path.resolve()
    if not real.is_relative_to(folder.resolve()) and not _BLOB.search(real.as_posix()):
        raise ModelError(
            f"{name[:100]} is a link that leads out of the model folder, to {_target(path)}: put "
            "the file itself there, or give the folder it lies in"
        )
    return path


def safe_folder(folder: Path, name: str) -> Path:
    """The folder `name` in the folder. Raises ModelError as `safe_file` does."""
    _check_plain(name)
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ModelError(
            f"{name[:100]} is a link that leads out of the model folder, to {_target(path)}"
        )
    return path


def _check_plain(name: str) -> None:
    if not name or "\x00" in name or name in (".", "..") or "/" in name or "\\" in name:
        raise ModelError(f"unsafe file name in the model folder: {name[:100]!r}")


def _target(link: Path) -> str:
    """The target of a link, in one line."""
    return repr(str(link.readlink())[:200])


def read_json(
    folder: Path, name: str, *, missing_ok: bool = False, limit: int = _MAX_JSON_BYTES
) -> JsonDict:
    """The object in a JSON file of the folder; {} if absent and `missing_ok`. Raises ModelError."""
    path = safe_file(folder, name, missing_ok=missing_ok)
    if path is None:
        return {}
    value = _parsed(path, limit)
    if not isinstance(value, dict):
        raise ModelError(f"{name} must hold a JSON object")
    return value


def read_json_list(folder: Path, name: str) -> list[JsonValue]:
    """As `read_json`, of a file that holds a list; [] if it is absent."""
    path = safe_file(folder, name, missing_ok=True)
    if path is None:
        return []
    value = _parsed(path, _MAX_JSON_BYTES)
    if not isinstance(value, list):
        raise ModelError(f"{name} must hold a JSON list")
    return value


def _parsed(path: Path, limit: int) -> JsonValue:
    if path.stat().st_size > limit:
        raise ModelError(f"{path.name} is larger than {limit >> 20} MiB")
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not JSON: {str(error)[:100]}") from error
