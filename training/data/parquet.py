"""Parquet as lines of JSON, a row a line, so that one set of rules serves every kind of input.

Needs the package pyarrow, which nothing else here needs. A null is a field that the row does not have; a date or time
is written in ISO 8601.
"""

import datetime
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from training.core.errors import MachineError, UserError
from training.data.blocks import Block

_MOST_ROWS, _BLOCK_BYTES = 1024, 1 << 20
_READ_BYTES = 4 << 20


def require() -> None:
    """Raise MachineError where pyarrow is missing."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise MachineError(
            "Parquet needs a package that is not installed", found="no pyarrow", expected="pyarrow, an optional extra",
            next_command=".venv/bin/pip install pyarrow",
        ) from None  # fmt: skip


def read(path: Path, on_raw: Callable[[bytes], object]) -> Iterator[Block]:
    """Yield a file's rows as lines of JSON. Raises UserError where the file is damaged.

    Args:
        on_raw: is called with each piece of the file first, for its hash and a progress bar.
    """
    import pyarrow
    import pyarrow.parquet

    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_READ_BYTES):
            on_raw(piece)
    first = 1
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for number in range(table.num_row_groups):
                for batch in table.iter_batches(_rows_at_once(table.metadata.row_group(number)), [number]):
                    lines = [json.dumps(_without_nulls(row), default=_spelled) for row in batch.to_pylist()]
                    yield Block(first, "".join(line + "\n" for line in lines).encode())
                    first += len(lines)
    except pyarrow.ArrowException as error:
        raise UserError("the Parquet file is damaged", where=path, found=error, expected="a whole file") from None


def _rows_at_once(group) -> int:
    """How many rows of a group make a block."""
    return max(1, min(_MOST_ROWS, _BLOCK_BYTES * group.num_rows // max(1, group.total_byte_size)))


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_nulls(child) for key, child in value.items() if child is not None}
    return [_without_nulls(child) for child in value] if isinstance(value, list) else value


def _spelled(value: object) -> object:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")  # what is not UTF-8 is then refused as half a pair
    return str(value)
