"""Records that hold what a model will be examined on: runs of words that they share with evaluation files.

Owns words, runs and the lookup. A record is contaminated where 13 words in a row (another number by the settings) also
stand in an evaluation record, letters lowered and punctuation apart; an evaluation record of fewer words counts where
all of it, in a row, stands in the record, if it has 5 words or more. Scripts without blanks count a character as a
word. Source: the 13-gram overlap of GPT-3 (Brown et al. 2020, appendix C).
"""

import json
import re
from collections.abc import Sequence
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

    Args:
        runs: each run of words, joined by blanks, and where it stands.
    """

    def __init__(self, runs: dict[str, str]):
        self._runs = runs
        self._numbers = {word: number for number, word in enumerate({w: 0 for run in runs for w in run.split()}, 1)}
        by_length: dict[int, list[str]] = {}
        for run in runs:
            by_length.setdefault(run.count(" ") + 1, []).append(run)
        self._hashes = {
            length: np.unique([self._hash(run.split()) for run in found]) for length, found in by_length.items()
        }

    def find(self, texts: Sequence[str]) -> Found | None:
        """The first run that any of a record's texts shares; None where there is none."""
        for text in texts:
            found = words(text)
            numbers = np.fromiter((self._numbers.get(word, 0) for word in found), np.uint64, len(found))
            for length, hashes in self._hashes.items():
                if (start := self._first(found, numbers, length, hashes)) is not None:
                    run = " ".join(found[start : start + length])
                    return Found(run, self._runs[run])
        return None

    def _first(self, found: list[str], numbers: np.ndarray, length: int, hashes: np.ndarray) -> int | None:
        """Where the first shared run of a length begins; the words themselves decide."""
        if len(numbers) < length:
            return None
        candidates = np.flatnonzero(np.isin(_rolled(numbers, length), hashes))
        return next((int(at) for at in candidates if " ".join(found[at : at + length]) in self._runs), None)

    def _hash(self, run: list[str]) -> np.uint64:
        return _rolled(np.array([self._numbers[word] for word in run], np.uint64), len(run))[0]


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
    runs: dict[str, str] = {}
    for path in paths:
        before = len(runs)
        for number, texts in enumerate(_texts(path), 1):
            for text in texts:
                for run in _runs(words(text), ngram):
                    runs.setdefault(run, f"{path.name} line {number}")
        if len(runs) == before and not _has_words(path):
            raise UserError(
                "there is nothing to decontaminate against", where=path, found=f"no {_FEWEST_WORDS} words in a row",
                expected="JSONL of evaluation records, or lines of text",
            )  # fmt: skip
    return Evaluations(runs)


def _runs(found: list[str], ngram: int) -> list[str]:
    if len(found) < ngram:
        return [" ".join(found)] if len(found) >= _FEWEST_WORDS else []
    return [" ".join(found[at : at + ngram]) for at in range(len(found) - ngram + 1)]


def _has_words(path: Path) -> bool:
    return any(len(words(text)) >= _FEWEST_WORDS for texts in _texts(path) for text in texts)


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
