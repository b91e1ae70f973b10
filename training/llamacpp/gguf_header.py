"""The header of a GGUF file, read with every count held against the file's size.

The `gguf` package believes what a header says of itself: 2^40 entries keep it busy for days. Here a count, a length or
an extent that the file cannot hold is refused at once, so a file that is cut short, or made to do harm, costs nothing.
Source: llama.cpp `ggml/include/gguf.h`, GGUF versions 2 and 3, little endian.
"""

import struct
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import BinaryIO

from training.core.errors import IntegrityError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_KEYS, _MAX_TENSORS, _MAX_TEXTS, _MAX_KEY_BYTES, _MAX_DIMENSIONS = 1 << 16, 1 << 20, 1 << 22, 1 << 16, 4
_FIELDS_KEPT = 64  # of an array of numbers; none that is asked for is longer


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: `begin` counts from the file's start, `shape` is llama.cpp's, the row's width first."""

    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """`values` holds scalars, texts, lists of texts and the first numbers of others; `tensors` in their order there."""

    values: dict[str, object]
    tensors: tuple[Tensor, ...]

    @cached_property
    def tensor_types(self) -> dict[str, int]:
        """How many tensors have each type, by its name."""
        return dict(Counter(tensor.kind for tensor in self.tensors))

    def value(self, key: str) -> object:
        """A value of the header. Raises KeyError naming the key where it is not there."""
        if key not in self.values:
            raise KeyError(f"{key} is not in the header")
        return self.values[key]

    @property
    def quant_type(self) -> str:
        """The name of the file's type, `Q8_0`. Raises KeyError or ValueError where the header does not tell it."""
        from gguf.constants import LlamaFileType

        return LlamaFileType(self.value("general.file_type")).name.removeprefix("MOSTLY_").removeprefix("ALL_")


def read(path: Path) -> Header:
    """Read a header and hold the extents of all tensors against the file. Raises IntegrityError where they disagree."""
    try:
        with open(path, "rb") as file:
            return _Reader(file, path.stat().st_size).header()
    except (ValueError, KeyError, TypeError, OverflowError, struct.error) as error:
        raise IntegrityError(
            "not a whole GGUF file", where=path, found=str(error).strip("'"), expected="a GGUF file, all of it",
            next_command="make export-gguf CHECKPOINT=latest ARGS=--force",
        ) from error  # fmt: skip


class _Reader:
    def __init__(self, file: BinaryIO, size_bytes: int):
        self.file, self.size_bytes = file, size_bytes

    def header(self) -> Header:
        if (magic := self._bytes(4)) != _MAGIC:
            raise ValueError(f"it begins with {magic!r} and not with {_MAGIC!r}")
        if (version := self._scalar("I")) not in (2, 3):
            raise ValueError(f"GGUF version {version}")
        num_tensors = self._count("tensors", _MAX_TENSORS, 24)
        num_keys = self._count("keys", _MAX_KEYS, 13)
        values = _once("key", [self._pair() for _ in range(num_keys)])
        found = _once("tensor", [self._tensor() for _ in range(num_tensors)])
        alignment = int(values.get("general.alignment", 32))
        if alignment <= 0:
            raise ValueError(f"an alignment of {alignment}")
        start = -(-self.file.tell() // alignment) * alignment
        tensors = tuple(
            Tensor(name, kind, shape, start + offset, size) for name, (kind, shape, offset, size) in found.items()
        )
        end = max((tensor.begin + tensor.num_bytes for tensor in tensors), default=start)
        if tensors and end > self.size_bytes:  # a vocabulary alone needs no blanks behind it
            raise ValueError(f"the tensors end at byte {end}, the file at byte {self.size_bytes}")
        return Header(values, tensors)

    def _pair(self) -> tuple[str, object]:
        key = self._text(_MAX_KEY_BYTES)
        return key, self._value(self._scalar("I"))

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ValueError(f"an unknown type of value, {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list:
        kind = self._scalar("I")
        if kind == _STRING:
            return [self._text() for _ in range(self._count("texts in a list", _MAX_TEXTS, 8))]
        if kind not in _SCALARS:
            raise ValueError(f"a list of an unknown type, {kind}")
        size = struct.calcsize(f"<{_SCALARS[kind]}")
        count = self._count("numbers in a list", self.size_bytes, size)
        kept = [self._scalar(_SCALARS[kind]) for _ in range(min(count, _FIELDS_KEPT))]
        self.file.seek(size * (count - len(kept)), 1)
        return kept

    def _tensor(self) -> tuple[str, tuple[str, tuple[int, ...], int, int]]:
        """The name, and the type's name, the shape, the place from the start of the data, and the bytes."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._text(_MAX_KEY_BYTES)
        if (num_dimensions := self._scalar("I")) > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))
        kind = GGMLQuantizationType(self._scalar("I"))
        block, block_bytes = GGML_QUANT_SIZES[kind]
        return name, (kind.name, shape, self._scalar("Q"), prod(shape) // block * block_bytes)

    def _count(self, what: str, most: int, each_bytes: int) -> int:
        count = self._scalar("Q")
        if count > most or count * each_bytes > self.size_bytes - self.file.tell():
            raise ValueError(f"the header claims {count} {what}, the file has {self.size_bytes} bytes")
        return count

    def _text(self, most: int | None = None) -> str:
        length = self._scalar("Q")
        if length > (self.size_bytes - self.file.tell() if most is None else most):
            raise ValueError(f"the header claims a text of {length} bytes, the file has {self.size_bytes} bytes")
        return self._bytes(length).decode(errors="replace")

    def _scalar(self, letter: str) -> int | float | bool:
        return struct.unpack(f"<{letter}", self._bytes(struct.calcsize(f"<{letter}")))[0]

    def _bytes(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) != count:
            raise ValueError(f"the file ends at byte {self.size_bytes}, within its header")
        return data


def _once(what: str, pairs: list[tuple[str, object]]) -> dict:
    """The pairs by their names. Raises ValueError for a name that stands twice: who reads it takes the other one."""
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"the {what} {twice[0]} stands twice in the header")
    return dict(pairs)
