"""Records that hold what a model will be examined on: runs of words that they share with evaluation files.

Owns words, runs and the lookup. A record is contaminated where 13 words in a row (another number by the settings) also
stand in an evaluation record, letters lowered and punctuation apart; an evaluation record of fewer words counts where
all of it, in a row, stands in the record, if it has 5 words or more. Scripts without blanks count a character as a
word. Source: the 13-gram overlap of GPT-3 (Brown et al. 2020, appendix C).
"""

import bisect
import json
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.core.errors import UserError

_WITHOUT_BLANKS = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(f"[{_WITHOUT_BLANKS}]|[^\\W{_WITHOUT_BLANKS}]+")
_FEWEST_WORDS = 5
_SEED = np.uint64(0x9E3779B97F4A7C15)


def words(text: str) -> list[str]:
    """The words of a text, letters lowered."""
    return _WORD.findall(text.lower())


@dataclass(frozen=True)
class Found:
    """A run of words of a record that an evaluation file has too, and where that stands."""

    words: str
    place: str


class Evaluations:
    """The runs of words of evaluation files, for looking records up in them.

    A word is a number, a run is found by its hash and proved by its numbers: some twenty bytes for each word of a file,
    and a search for each word of a record, however many runs there are.
    """

    def __init__(self, ngram: int):
        self._ngram = ngram
        self._number_of: dict[str, int] = {}
        self._numbers = array("I")
        self._starts, self._places = array("Q"), []
        self._runs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._waiting: dict[int, list[np.ndarray]] = {}

    def add(self, text: str, place: str) -> bool:
        """Take the runs of a text and where it stands; return whether it has any. `close` ends it."""
        found = words(text)
        length = min(len(found), self._ngram)
        if length < min(self._ngram, _FEWEST_WORDS):
            return False
        start = len(self._numbers)
        self._starts.append(start)
        self._places.append(place)
        self._numbers.extend(self._number_of.setdefault(word, len(self._number_of) + 1) for word in found)
        self._waiting.setdefault(length, []).append(np.arange(start, len(self._numbers) - length + 1))
        return True

    def close(self) -> "Evaluations":
        """Sort the runs of each length by their hashes; the first place of a run is kept."""
        numbers = np.array(self._numbers, np.uint64)
        for length, found in self._waiting.items():
            at = np.concatenate(found)
            hashes, first = np.unique(_rolled(numbers, length)[at], return_index=True)
            self._runs[length] = hashes, at[first]
        self._waiting.clear()
        return self

    def find(self, texts: Sequence[str]) -> Found | None:
        """The first run that any of a record's texts shares; None where there is none."""
        for text in texts:
            found = words(text)
            numbers = np.fromiter((self._number_of.get(word, 0) for word in found), np.uint64, len(found))
            for length in self._runs:
                for at, start in self._alike(numbers, length):
                    if self._numbers[start : start + length].tolist() == numbers[at : at + length].tolist():
                        place = self._places[bisect.bisect_right(self._starts, start) - 1]
                        return Found(" ".join(found[at : at + length]), place)
        return None

    def _alike(self, numbers: np.ndarray, length: int) -> Iterator[tuple[int, int]]:
        """Where runs of a length begin that have the hash of one of a file, and where that begins."""
        hashes, starts = self._runs[length]
        if len(numbers) < length:
            return
        rolled = _rolled(numbers, length)
        nearest = np.minimum(np.searchsorted(hashes, rolled), len(hashes) - 1)
        for at in np.flatnonzero(hashes[nearest] == rolled):
            yield int(at), int(starts[nearest[at]])


def _rolled(numbers: np.ndarray, length: int) -> np.ndarray:
    """A hash of each run of `length` numbers, shape (N - length + 1,)."""
    total = np.zeros(len(numbers) - length + 1, np.uint64)
    for step in range(length):
        total = total * _SEED + numbers[step : step + len(total)]
    return total


def read(paths: Sequence[Path], ngram: int) -> Evaluations:
    """Read evaluation files: JSONL of any objects, whose texts count each, or plain text, whose lines do.

    Raises UserError where a file holds no run of words to look for.
    """
    evaluations = Evaluations(ngram)
    for path in paths:
        has_runs = False
        for number, texts in enumerate(_texts(path), 1):
            place = f"{path.name} line {number}"
            for text in texts:
                has_runs |= evaluations.add(text, place)
        if not has_runs:
            raise UserError(
                "there is nothing to decontaminate against", where=path, found=f"no {_FEWEST_WORDS} words in a row",
                expected="JSONL of evaluation records, or lines of text",
            )  # fmt: skip
    return evaluations.close()


def _texts(path: Path):
    """The texts of each line of a file."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            for line in file:
                try:
                    value = json.loads(line) if line.lstrip().startswith(("{", "[")) else line
                except (ValueError, RecursionError):
                    value = line
                yield list(_strings(value))
    except UnicodeDecodeError as error:
        raise UserError("not a file of text", where=path, found=f"not UTF-8: {error.reason}") from None
    except FileNotFoundError:
        raise UserError("there is no such file", where=path, expected="--decontaminate FILE ...") from None


def _strings(value: object, depth: int = 0):
    """All texts of a JSON value, but the system's turn."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and {"role", "content"} <= set(value):
        if value["role"] != "system":
            yield from _strings(value["content"], depth + 1)
    elif isinstance(value, dict | list) and depth < 32:
        for child in value.values() if isinstance(value, dict) else value:
            yield from _strings(child, depth + 1)
