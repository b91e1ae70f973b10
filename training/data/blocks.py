"""A file's bytes as blocks of whole lines, read once, plain or packed (gzip, zstd), and hashed on the way.

Owns reading, unpacking and cutting; the hash is of the file as it lies there. The packing is told by the first bytes,
not by the name. Memory is a few blocks, whatever the file: a line that is longer than the limit is measured and not
kept.
"""

import os
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from training.core.errors import MachineError, UserError

_READ_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20
_GZIP_STEP, _ZSTD_STEP = 64 << 10, 8 << 10
"""How much is unpacked at a time, so that a file of nothing but zeros stays small in memory."""
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet"}
SHOWN_BY = {
    "plain": "sed -n {line}p {path}",
    "gzip": "zcat {path} | sed -n {line}p",
    "zstd": "zstdcat {path} | sed -n {line}p",
}
"""How a person looks at one line of a file."""


@dataclass(frozen=True)
class Block:
    """Whole lines, the first of them numbered from 1; or one line that was too long, by its length alone."""

    first: int
    data: bytes
    overlong_bytes: int = 0


def packing(path: Path) -> str:
    """`plain`, `gzip`, `zstd` or `parquet`, by the file's first bytes."""
    with open(path, "rb") as file:
        return _packing_of(file.read(4))


def _packing_of(start: bytes) -> str:
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), "plain")


def size_bytes(path: Path, example: str) -> int:
    """The size of a readable file. Raises UserError where there is none or an empty one, MachineError if unreadable."""
    if not path.is_file():
        found = "no file" if path.exists() else "nothing"
        expected = "JSONL, Parquet, or a folder of text"
        raise UserError("there is no such input", where=path, found=found, expected=expected, next_command=example)
    if not os.access(path, os.R_OK):
        raise MachineError("the input cannot be read", where=path, found="no permission", expected="a readable file")
    if (size := path.stat().st_size) == 0:
        raise UserError(
            "the input is empty", where=path, found="0 bytes", expected="one JSON object a line", next_command=example
        )
    return size


def read(path: Path, max_line_bytes: int, on_raw: Callable[[bytes], object]) -> Iterator[Block]:
    """Yield a file's lines in blocks of about 1 MiB.

    Args:
        max_line_bytes: the longest line that is kept, without its end.
        on_raw: is called with each piece of the file as it lies there: for its hash and a progress bar.

    Raises UserError where a packed file is damaged or cut short.
    """
    return _lines(unpacked(path, on_raw), max_line_bytes)


def unpacked(path: Path, on_raw: Callable[[bytes], object]) -> Iterator[bytes]:
    """Yield what a file holds in small pieces, unpacked where it is packed. `on_raw` and errors are `read`'s."""
    return _opened(packing(path), path, _raw(path, on_raw))


def content(where: object, data: bytes, most_bytes: int) -> tuple[bytes, int]:
    """What a file's bytes hold, unpacked where they are packed, and its length; nothing of what is above the most.

    Raises UserError as `read` does.
    """
    parts, size = [], 0
    for piece in _opened(_packing_of(data[:4]), where, [data]):
        size += len(piece)
        if size <= most_bytes:
            parts.append(piece)
        else:
            parts.clear()
    return b"".join(parts), size


def _opened(kind: str, where: object, pieces: Iterable[bytes]) -> Iterator[bytes]:
    if kind == "gzip":
        return _unpacked(where, pieces, lambda: zlib.decompressobj(wbits=31), _GZIP_STEP)
    if kind == "zstd":
        import zstandard

        return _unpacked(where, pieces, zstandard.ZstdDecompressor().decompressobj, _ZSTD_STEP)
    return iter(pieces)


def _raw(path: Path, on_raw: Callable[[bytes], object]) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_READ_BYTES):
            on_raw(piece)
            yield piece


def _unpacked(path: object, pieces: Iterable[bytes], new: Callable, step: int) -> Iterator[bytes]:
    """Unpack one member or frame after another."""
    unpacker = None
    try:
        for piece in pieces:
            for start in range(0, len(piece), step):
                rest = piece[start : start + step]
                while rest:
                    if unpacker is None:
                        if not rest.strip(b"\0"):
                            break  # padding behind the last member
                        unpacker = new()
                    yield unpacker.decompress(rest)
                    rest = unpacker.unused_data if unpacker.eof else b""
                    unpacker = None if unpacker.eof else unpacker
    except Exception as error:
        if not (isinstance(error, zlib.error) or type(error).__name__ == "ZstdError"):
            raise
        if "too much memory" in str(error):  # packed with --long, as archives are: whole, and no work for a few blocks
            raise UserError(
                "the packed file needs a window of more than 128 MiB", where=path, found=error,
                expected="a file that was packed without --long",
                next_command=f"zstd -d --long=31 {shlex.quote(str(path))}",
            ) from None  # fmt: skip
        raise UserError("the packed file is damaged", where=path, found=error, expected="a whole file") from None
    if unpacker is not None:
        raise UserError("the packed file is cut short", where=path, found="no end", expected="a whole file")


def _lines(pieces: Iterator[bytes], max_line_bytes: int) -> Iterator[Block]:
    most = max_line_bytes + len(b"\xef\xbb\xbf\r")
    first, waiting, num_waiting, skipped, has_end = 1, [], 0, 0, False
    for piece in pieces:
        if skipped:
            end = piece.find(b"\n")
            skipped += len(piece) if end < 0 else end
            if end < 0:
                continue
            yield Block(first, b"", skipped)
            first, skipped, piece = first + 1, 0, piece[end + 1 :]
        waiting.append(piece)
        num_waiting += len(piece)
        has_end = has_end or b"\n" in piece
        if num_waiting < _BLOCK_BYTES:
            continue
        if has_end:  # else a long line would be joined anew with each of its pieces
            whole, _, rest = b"".join(waiting).rpartition(b"\n")
            yield Block(first, whole + b"\n")
            first += whole.count(b"\n") + 1
            waiting, num_waiting, has_end = [rest], len(rest), False
        if num_waiting > most:
            waiting, num_waiting, skipped = [], 0, num_waiting
    if skipped:
        yield Block(first, b"", skipped)
    elif num_waiting:
        yield Block(first, b"".join(waiting))
