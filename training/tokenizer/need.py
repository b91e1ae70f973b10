"""What memory the training of a tokenizer takes, told before it starts (B36).

Owns the estimate, which is of everything that `train` does: reading, learning, measuring and the proof.

- What every text needs: the libraries that are imported, the proof's server and client, two measuring encoders.
- For each thread of the library: its arena, and the part of the text that it cuts into pre-tokens.
- For each distinct pre-token of the text, which the library holds with all its pairs: 52 to 143 bytes for a byte of
  it were measured, most where one pair is in every word.
- For the longest text, which is read, parsed and encoded whole.

How many bytes of distinct pre-tokens there are is counted on parts from everywhere in the text, and grows with more
text by the power that the second half of these parts shows (Heaps' law), which is too much rather than too little.
"""

import math
import os
from collections.abc import Iterable, Iterator
from itertools import islice

import psutil

from training.core.errors import MachineError
from training.core.log import say
from training.core.units import format_bytes
from training.tokenizer import pretokenizers
from training.tokenizer.splitter import Splitter

_BASE_BYTES = 36 << 20
_BYTES_A_THREAD = 2 << 20
_BYTES_A_BYTE = 150
_BYTES_A_BYTE_OF_THE_LONGEST = 6
_BYTES_AN_ENTRY = 1 << 10
_FEWEST_SAMPLED_BYTES, _MOST_SAMPLED_BYTES, _SAMPLED_SHARE = 1 << 20, 32 << 20, 16


Parted = Iterable[tuple[int, Iterable[str]]]


def predict(texts: Parted, text_bytes: int, pre_tokenizer: str, vocab_size: int) -> int:
    """The most bytes by which training grows this process.

    Args:
        texts: of each the bytes that it takes in memory, and its parts as the library gets them.
        text_bytes: of all texts together.
        pre_tokenizer: llama.cpp's name of it.
    """
    sampled_bytes = min(_MOST_SAMPLED_BYTES, max(_FEWEST_SAMPLED_BYTES, text_bytes // _SAMPLED_SHARE))
    sample = _Sample(texts, max(1, text_bytes // sampled_bytes))
    distinct_bytes = _grown(_counts(sample, Splitter.of(pretokenizers.CONFIGURATIONS[pre_tokenizer])), text_bytes)
    return (
        _BASE_BYTES
        + _BYTES_A_THREAD * num_threads()
        + _BYTES_AN_ENTRY * vocab_size
        + _BYTES_A_BYTE * distinct_bytes
        + _BYTES_A_BYTE_OF_THE_LONGEST * sample.longest_bytes
    )


def num_threads() -> int:
    """How many threads the library starts: as RAYON_NUM_THREADS says, else one for each core that may be used."""
    named = os.environ.get("RAYON_NUM_THREADS", "")
    return int(named) if named.isdigit() and int(named) else len(os.sched_getaffinity(0))


class _Sample:
    """Every so many-th part of texts, all of which are looked at: iterate once, then ask for the longest."""

    def __init__(self, texts: Parted, every: int):
        self._texts, self._every, self.longest_bytes = texts, every, 0

    def __iter__(self) -> Iterator[str]:
        return islice(self._parts(), 0, None, self._every)

    def _parts(self) -> Iterator[str]:
        for text_bytes, parts in self._texts:
            self.longest_bytes = max(self.longest_bytes, text_bytes)
            yield from parts


def _counts(sample: Iterable[str], splitter: Splitter) -> list[tuple[int, int]]:
    """Bytes read and bytes of distinct pre-tokens among them, after each part."""
    seen: set[str] = set()
    num_read = num_distinct = 0
    counts = [(0, 0)]
    for part in sample:
        for new in _new(part, splitter, seen):
            num_distinct += len(new.encode())
        num_read += len(part.encode())
        counts.append((num_read, num_distinct))
    return counts


def _new(part: str, splitter: Splitter, seen: set[str]) -> list[str]:
    try:
        found = {piece for pieces in splitter.pieces(part) for piece in pieces}
    except ValueError:  # a character that only the library knows
        found = {part}
    new = list(found - seen)
    seen.update(new)
    return new


def _grown(counts: list[tuple[int, int]], text_bytes: int) -> int:
    """Bytes of distinct pre-tokens in all the text."""
    num_read, num_distinct = counts[-1]
    half_read, half_distinct = next(one for one in counts if one[0] >= num_read / 2)
    if num_read >= text_bytes or not 0 < half_read < num_read:
        return num_distinct * math.ceil(text_bytes / max(1, num_read))
    power = math.log(num_distinct / half_distinct) / math.log(num_read / half_read)
    return int(num_distinct * (text_bytes / num_read) ** power)


def require(predicted_bytes: int, dataset: str) -> None:
    """Say what is predicted. Raises MachineError where the machine has less."""
    say(f"tokenizer: {format_bytes(predicted_bytes)} of memory at most are predicted")
    if predicted_bytes > (free := psutil.virtual_memory().available):
        raise MachineError(
            "not enough memory to train a tokenizer on so much text", where=dataset, found=f"{format_bytes(free)} free",
            expected=f"{format_bytes(predicted_bytes)}, as predicted from a part; data-prepare's --draw takes less",
        )  # fmt: skip
