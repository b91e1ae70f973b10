"""The lines of a split as tokens and labels, batch by batch, in as many processes as they are worth.

Owns batches; the processes are `pool`'s, and what becomes of a record is `supervised`'s.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from training.core import files
from training.data import pool
from training.data.supervised import Encoded, Encoder, TextEncoder
from training.data.supervision import Settings
from training.tokenizer.artifact import Tokenizer

_ALONE_BELOW_BYTES = 16 << 20  # of text: the start of processes costs more than they save
_BATCH_BYTES, _BATCH_RECORDS = 1 << 20, 1024

Batch = tuple[int, list[bytes]]
Encode = Callable[[Iterable[bytes]], Iterator[Encoded]]


def count_for(text_bytes: int) -> int:
    """How many processes beside this one an amount of text is worth."""
    return pool.count_for(text_bytes, _ALONE_BELOW_BYTES)


def batches(lines: Iterable[bytes]) -> Iterator[Batch]:
    """Group the lines of a split, each batch with the number of its first line."""
    start, batch, size = 0, [], 0
    for line in lines:
        batch.append(line)
        size += len(line)
        if size >= _BATCH_BYTES or len(batch) == _BATCH_RECORDS:
            yield start, batch
            start, batch, size = start + len(batch), [], 0
    if batch:
        yield start, batch


@contextlib.contextmanager
def started(tokenizer: Tokenizer, settings: Settings | None, text_bytes: int) -> Iterator[Encode]:
    """Give a function that turns the lines of a split into encoded batches, in order.

    Args:
        settings: of records with answers; None for texts.
        text_bytes: how much there is to encode in all, which decides the number of processes.

    The function raises what an encoder raises, and RunError where a process has died.
    """
    what = tokenizer.folder, tokenizer.manifest, settings
    way_out = "free -h"
    with pool.started(count_for(text_bytes), encoder_of, *what, way_out=way_out) as work:
        yield lambda lines: work(batches(lines))


def encoder_of(folder: Path, manifest: dict, settings: Settings | None) -> Callable[[Batch], Encoded]:
    """What encodes a batch; made where it works, since a tokenizer that was used is not handed on."""
    tokenizer = Tokenizer(folder, manifest)
    encoder = TextEncoder(tokenizer) if settings is None else Encoder(tokenizer, settings)

    def encoded(batch: Batch) -> Encoded:
        start, lines = batch
        return encoder.batch([(start + number, files.parse_json(line)) for number, line in enumerate(lines)])

    return encoded
