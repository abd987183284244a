"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md); jax-free.

The header is parsed here: `gguf.GGUFReader` takes 2 s for 49,152 tokens and their merges, this 0.1
s, and checks counts and lengths before it allocates. The `gguf` library decodes blocks.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jitney.engine.common.errors import ModelError
from jitney.engine.core.weights.checkpoints.files import Shape

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

#: GGUF value type -> struct code; 8 is a string and 9 an array.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
#: Of a string's length.
_LENGTH = struct.Struct("<Q")
#: Numbers of an array that becomes a list. No vocabulary is longer, and a list takes ten times the
#: memory.
_LONGEST_LIST = 1 << 20
#: Names of the files of a split model: before the number, that, and of how many.
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
#: Tensors decoded at once: 4 Mi elements are 16 MiB of float32.
_DECODE_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    """The place of a tensor."""

    #: Row-major, as numpy has it; GGUF stores the reverse.
    shape: Shape
    #: `gguf.GGMLQuantizationType`.
    kind: int
    #: Bytes from the start of the file.
    start: int
    #: Bytes.
    size: int
    #: The file.
    data: mmap.mmap

    @property
    def kind_name(self) -> str:
        """Such as Q4_1."""
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(self.kind).name


def split_files(path: Path) -> list[Path]:
    """All files of a model whose name says that it is split; else the file itself. Raises
    ModelError unless it is the first one.
    """
    match = _SPLIT.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [path]
    prefix, number, count = match.groups()
    names = [f"{prefix}-{own:05}-of-{count}.gguf" for own in range(1, int(count) + 1)]
    if int(number) != 1:
        raise ModelError(f"{path.name} is a part of a model: give the first one, -00001-of-{count}")
    return [path.with_name(name) for name in names]


def model_name(path: Path) -> str:
    """The name of the model that a file, or the first of several, holds."""
    match = _SPLIT.fullmatch(path.name)
    return path.stem if match is None else match[1]


class GGUFFile:
    """An open GGUF file: `metadata` (key-values), `tensors` by name, `read` and `part`. Of a split
    model it is the first file, with the tensors of all.

    Raises ModelError when it is not GGUF version 2 or 3, is cut short or contradicts itself.
    """

    def __init__(self, path: str | Path):
        first, *others = split_files(Path(path))
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, _TensorInfo] = {}
        self._open(first)
        count = self.metadata.get("split.count", 1)
        if count not in (0, 1 + len(others)):
            raise ModelError(
                f"{self.name}: the model is split into {str(count)[:20]} files, which must be "
                "called NAME-00001-of-0000N.gguf"
            )
        for other in others:
            self._open(other)
        self.name = first.name

    def _open(self, path: Path) -> None:
        """Read the header of one file."""
        self.name = path.name
        try:
            with open(path, "rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.name}: cannot be read: {error}") from error
        self.at = 0
        try:
            self.parse()
        except (struct.error, UnicodeDecodeError, RecursionError) as error:
            raise ModelError(
                f"{self.name}: broken GGUF header near byte {self.at}: {error}"
            ) from error

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors.values())

    def read(self, name: str) -> np.ndarray:
        """One tensor, decoded: float32 of its row-major shape."""
        shape = self.tensors[name].shape
        whole = self.part(name, slice(0, math.prod(shape[:-1])), slice(0, shape[-1]))
        return whole.reshape(shape)

    def part(self, name: str, rows: slice, columns: slice) -> np.ndarray:
        """Rows and columns (with start and stop) of a tensor as float32 [rows, columns]; a tensor
        with one axis is one row. Only the blocks that hold them are decoded.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        kind = GGMLQuantizationType(self.tensors[name].kind)
        block, size = GGML_QUANT_SIZES[kind]
        first, end = columns.start // block, -(-columns.stop // block)
        stored = _as_stored(self.rows(name)[rows, first * size : end * size], kind)
        out = np.empty((len(stored), columns.stop - columns.start), np.float32)
        # The library decodes rows; a few at a time keep its float32 temporaries small.
        step = max(1, _DECODE_ELEMENTS // ((end - first) * block))
        within = slice(columns.start - first * block, columns.stop - first * block)
        for row in range(0, len(stored), step):
            out[row : row + step] = self._decoded(name, stored[row : row + step], kind)[:, within]
        return out

    def _decoded(self, name: str, rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        from gguf.quants import dequantize

        try:
            return dequantize(np.ascontiguousarray(rows), kind)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.name}: {name} has type {kind.name}, which cannot be decoded"
            ) from error

    def rows(self, name: str) -> np.ndarray:
        """One tensor as it is stored: uint8 [rows, bytes], mapped."""
        info = self.tensors[name]
        raw = np.frombuffer(info.data, np.uint8, info.size, info.start)
        return raw.reshape(math.prod(info.shape[:-1]), -1)

    def parse(self) -> None:
        """Read the header from the start; see the format's description."""
        if self.data[:4] != b"GGUF":
            raise ModelError(f"{self.name}: not a GGUF file")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise ModelError(f"{self.name}: GGUF version {version} is not supported, only 2 and 3")
        n_tensors, n_values = self.count(24), self.count(12)
        values: dict[str, Any] = {}
        for _ in range(n_values):
            key = self.string()
            values[key] = self.value(self.scalar("I"))
        stored = [
            (name := self.string(), self.shape_of(name), self.scalar("I"), self.scalar("Q"))
            for _ in range(n_tensors)
        ]
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
            raise ModelError(f"{self.name}: general.alignment is not a small positive number")
        base = -(-self.at // alignment) * alignment
        for name, shape, kind, offset in stored:
            self.tensors[name] = self.placed(name, shape, kind, base + offset)
        self.metadata = values | self.metadata

    def shape_of(self, name: str) -> Shape:
        """The next tensor's."""
        axes = self.scalar("I")
        if not 1 <= axes <= 4:
            raise ModelError(f"{self.name}: {name[:100]} has {axes} axes")
        return tuple(self.scalar("Q") for _ in range(axes))[::-1]

    def placed(self, name: str, shape: Shape, kind: int, start: int) -> _TensorInfo:
        """The tensor's place. Raises ModelError for an unknown type or a place outside the file."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if name in self.tensors:
            raise ModelError(f"{self.name}: {name[:100]} is stored twice")
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{self.name}: {name[:100]} has the unknown type {kind}") from error
        size = math.prod(shape) // block * block_bytes
        if 0 in shape or shape[-1] % block or start + size > len(self.data):
            raise ModelError(
                f"{self.name}: {name[:100]} {list(shape)} does not fit in the file; it may be cut "
                "short"
            )
        return _TensorInfo(shape, kind, start, size, self.data)

    def scalar(self, code: str) -> Any:
        """The next little-endian number."""
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def count(self, smallest: int) -> int:
        """A 64-bit count of things of at least `smallest` bytes each that fit in the file."""
        count = self.scalar("Q")
        if count * smallest > len(self.data) - self.at:
            raise ModelError(
                f"{self.name}: broken GGUF header: a count of {count} at byte {self.at - 8}"
            )
        return count

    def string(self) -> str:
        length = self.count(1)
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        """One value; arrays of numbers become lists, very long ones numpy's."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.scalar("I"))
        return self.scalar(self.code(kind))

    def array(self, kind: int) -> list[Any] | np.ndarray:
        """Elements of one type."""
        if kind == _STRING:
            return self.strings()
        if kind == _ARRAY:
            return [self.value(_ARRAY) for _ in range(self.count(12))]
        code = self.code(kind)
        length = self.count(struct.calcsize(code))
        values = np.frombuffer(self.data, "<" + code, length, self.at)
        self.at += length * struct.calcsize(code)
        if length > _LONGEST_LIST:
            return values.copy()  # a view would keep the file open
        return values.tolist()

    def strings(self) -> list[str]:
        """An array of strings: vocabularies have a hundred thousand, so names here are local."""
        count, data, at = self.count(8), self.data, self.at
        end, length_at = len(data), _LENGTH.unpack_from
        strings: list[str] = []
        for _ in range(count):
            start = at + _LENGTH.size
            at = start + length_at(data, at)[0]
            if at > end:
                raise ModelError(f"{self.name}: broken GGUF header: a string to byte {at} of {end}")
            strings.append(data[start:at].decode("utf-8"))
        self.at = at
        return strings

    def code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ModelError(
                f"{self.name}: broken GGUF header: unknown value type {kind} at byte {self.at}"
            )
        return _SCALARS[kind]


def _as_stored(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Bytes [R, bytes] as the library expects them: float16, float32, or bytes of blocks."""
    floats = {"F32": np.float32, "F16": np.float16}
    return rows.view(floats.get(kind.name, np.uint8))
