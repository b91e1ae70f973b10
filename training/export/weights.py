"""The tensors of safetensors files, read a block of rows at a time; no file is ever mapped or held whole.

Owns the reading of the format and what a header may claim: every byte after it belongs to one tensor, none is missing
and none counts twice, so a file that is cut short or lies is refused before a byte of data is read. What is read can be
hashed on the way, so a hash costs no pass of its own.
Source: safetensors, README "Format": 8 bytes of length, a JSON header, the data.

Legend: R rows of a block (all of a tensor of one dimension), ... its other dimensions.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files
from training.core.errors import IntegrityError

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 64 << 20
_MAX_HEADER_BYTES = 100 << 20
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies. `dtype` is the format's name, such as BF16; `begin` counts from the file's start."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def num_items(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_items * ITEM_BYTES[self.dtype]

    @property
    def is_floating(self) -> bool:
        return self.dtype.startswith(("F", "BF"))

    def blocks(self, digest: hashlib._Hash | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, rows) in their own type, each a buffer of its own; `digest` is fed what is read."""
        rows = self.shape[0] if len(self.shape) > 1 else 1
        row_bytes = self.num_bytes // max(rows, 1)
        step = max(1, BLOCK_BYTES // max(row_bytes, 1))
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.begin)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                yield first, self._block(_read(file, count * row_bytes, digest), count)

    def read(self) -> torch.Tensor:
        """The whole tensor in its own type."""
        import torch

        whole = torch.empty(self.shape, dtype=torch_type(self.dtype))
        for first, block in self.blocks():
            if len(self.shape) > 1:
                whole[first : first + len(block)] = block
            else:
                whole = block
        return whole

    def _block(self, data: bytearray, rows: int) -> torch.Tensor:
        import torch

        shape = (rows, *self.shape[1:]) if len(self.shape) > 1 else self.shape
        if not data:
            return torch.empty(shape, dtype=torch_type(self.dtype))
        return torch.frombuffer(data, dtype=torch_type(self.dtype)).reshape(shape)


def torch_type(name: str) -> torch.dtype:
    """The torch type of a name of the format."""
    import torch

    return {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
        "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    }[name]  # fmt: skip


def _read(file, count: int, digest: hashlib._Hash | None) -> bytearray:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        if not (got := file.readinto(view[done:])):
            raise IntegrityError("a file of weights ends too early", where=file.name, found=f"{count - done} too few")
        done += got
    if digest:
        digest.update(view)
    return data


@dataclass(frozen=True)
class WeightsFile:
    """One safetensors file; `tensors` in the order of their bytes."""

    path: Path
    tensors: tuple[Tensor, ...]
    header_bytes: int

    def sweep(self) -> tuple[str, tuple[str, str] | None]:
        """Read the file once: its sha256; where the first tensor without numbers is and how many, else None."""
        import torch

        digest, wrong = hashlib.sha256(), None
        with open(self.path, "rb") as file:
            digest.update(file.read(self.header_bytes))
        for tensor in self.tensors:
            bad = 0
            for _, block in tensor.blocks(digest):
                if tensor.is_floating and wrong is None:
                    bad += block.numel() - int(torch.isfinite(block).sum())
            if bad and wrong is None:
                found = f"{bad} of {tensor.num_items} values are NaN or infinite"
                wrong = (f"{self.path.name}: {tensor.name}", found)
        return digest.hexdigest(), wrong


def open_file(path: Path) -> WeightsFile:
    """Read and check a header. Raises IntegrityError where it claims what the file does not hold."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = files.parse_json(file.read(length))
        return WeightsFile(path, _tensors(path, header, 8 + length, size), 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise IntegrityError(
            "not a safetensors file", where=path, found=str(error)[:300] or type(error).__name__,
            expected="a header that describes every byte after it",
        ) from error  # fmt: skip


def _tensors(path: Path, header: dict, start: int, size: int) -> tuple[Tensor, ...]:
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if entry["dtype"] not in ITEM_BYTES or not all(type(one) is int and one >= 0 for one in (begin, end, *shape)):
            raise ValueError(f"{name}: {str(entry)[:120]}")
        tensor = Tensor(name, path, entry["dtype"], shape, start + begin)
        if end - begin != tensor.num_bytes:
            raise ValueError(f"{name} claims {end - begin} bytes for {tensor.num_bytes}")
        found.append(tensor)
    found.sort(key=lambda tensor: (tensor.begin, tensor.num_bytes))
    place = start
    for tensor in found:
        if tensor.begin != place:
            raise ValueError(f"{tensor.name} begins at byte {tensor.begin}, and not at {place}")
        place += tensor.num_bytes
    if place != size:
        raise ValueError(f"the tensors end at byte {place}, the file at {size}")
    return tuple(found)


class Writer:
    """Writes a safetensors file a block at a time; the layout is given first. Same layout and data, same bytes."""

    def __init__(self, path: Path, layout: dict[str, tuple[str, tuple[int, ...]]]):
        header, place = {"__metadata__": {"format": "pt"}}, 0
        for name, (dtype, shape) in layout.items():
            size = prod(shape) * ITEM_BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, place + size]}
            place += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._file = open(path, "wb")  # noqa: SIM115, closed by close()
        self._left, self._digest = place, hashlib.sha256()
        self._put(len(text).to_bytes(8, "little") + text)

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)

    def add(self, block: torch.Tensor) -> None:
        """Append a block, in the layout's type already."""
        import torch

        data = memoryview(block.contiguous().flatten().view(torch.uint8).numpy())
        self._left -= len(data)
        self._put(data)

    def close(self) -> str:
        """Finish and return the file's sha256."""
        self._file.close()
        if self._left:
            raise AssertionError(f"{self._left} bytes of the layout were not written")
        return self._digest.hexdigest()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
