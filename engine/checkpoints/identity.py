"""What a model is, whatever it is called and wherever it lies: a digest of its files; jax-free."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from jitney.engine.checkpoints.sources import ModelSource

_NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})
#: Files of a model folder that are read, or could be; others (README, images) are no part of it.
_SUFFIXES = frozenset((".safetensors", ".json", ".jinja", ".model", ".txt"))
#: Larger files are not read whole, which would take as long as loading them: their size counts, and
#: so many blocks of so many bytes, evenly spread from the first byte to the last.
_WHOLE_BYTES = 16 << 20
_BLOCKS, _BLOCK_BYTES = 64, 64 << 10


def model_identity(source: ModelSource, adapters: Mapping[str, str] = _NO_ADAPTERS) -> str:
    """SHA-256 (hexadecimal) of the files that make the model: tensors, configuration, tokenizer,
    chat template; and of those of its adapters, folders by name.

    The name and the place of a GGUF file and of a folder do not count. Some 4 MB are read of each
    large file.
    """
    own = _own_identity(source)
    if not adapters:
        return own
    total = hashlib.sha256(own.encode())
    for name, folder in adapters.items():
        total.update(f"{name}\0{_folder_digest(Path(folder).expanduser())}\n".encode())
    return total.hexdigest()


def _own_identity(source: ModelSource) -> str:
    if source.kind == "tiny":
        return hashlib.sha256(source.name.encode()).hexdigest()
    path = Path(source.path)
    if source.kind == "gguf":
        return _file_digest(path)
    return _folder_digest(path)


def _folder_digest(path: Path) -> str:
    total = hashlib.sha256()
    for file in _files_of(path):
        total.update(f"{file.name}\0{_file_digest(file)}\n".encode())
    return total.hexdigest()


def _files_of(folder: Path) -> list[Path]:
    files = [file for file in folder.iterdir() if file.suffix in _SUFFIXES and file.is_file()]
    return sorted(files, key=lambda file: file.name)


def _file_digest(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size}\n".encode())
    with path.open("rb") as file:
        for start, length in _blocks(size):
            file.seek(start)
            digest.update(file.read(length))
    return digest.hexdigest()


def _blocks(size: int) -> Iterator[tuple[int, int]]:
    """(start, length) of what is read of a file of `size` bytes."""
    if size <= _WHOLE_BYTES:
        yield 0, size
        return
    last = size - _BLOCK_BYTES
    for number in range(_BLOCKS):
        yield last * number // (_BLOCKS - 1), _BLOCK_BYTES
