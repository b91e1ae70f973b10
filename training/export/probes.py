"""The texts and prompts that an export is tried on: drawn by a fixed seed from the validation split.

Where the checkpoint names no dataset, or it is not on this machine, built-in passages stand in, and where it has few
texts they fill up; the record says so. Nothing here knows the model or the server.
"""

import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.core import store
from training.core.errors import TrainyardError
from training.data import dataset as datasets
from training.export.passages import PASSAGES

if TYPE_CHECKING:
    import tokenizers

SEED = 7
NUM_LINES = 200
NUM_PROMPTS = 32
POSITIONS_A_PROMPT = 8
NUM_SINGLE_TOKENS = 4
MAX_PROMPT_TOKENS = 96
_SPLIT = "validation"
_MAX_CHARACTERS = 4000
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Texts:
    """Lines for the comparison of ids, documents for the prompts, and where they are from."""

    lines: list[str]
    documents: list[str]
    origin: str


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the lengths of the prefixes after which the next token's log-probabilities are compared."""

    ids: list[int]
    lengths: list[int]

    def prefixes(self) -> list[list[int]]:
        return [self.ids[:length] for length in self.lengths]


def draw_texts(dataset: dict | None, split: str = _SPLIT, num_documents: int = NUM_PROMPTS) -> Texts:
    """Draw lines and documents from a split of a dataset named by `{"name", "hash"}`, records of any form as text."""
    if dataset is None:
        return _built_in("the checkpoint names no dataset")
    reference = store.reference_to(dataset)
    try:
        lines, documents = _draw(datasets.load(datasets.resolve(reference)).iter_texts(split), num_documents)
    except TrainyardError as error:
        return _built_in(f"{reference}: {error.what}")
    if not documents:
        return _built_in(f"{reference} has no {split} text")
    return Texts(lines, documents, f"{reference}, {split} split, seed {SEED}")


def _built_in(reason: str) -> Texts:
    _logger.warning("built-in passages stand in for the data set: %s", reason)
    lines = [line for passage in PASSAGES for line in passage.splitlines()]
    return Texts(lines, list(PASSAGES), f"built-in passages ({reason})")


def _draw(texts: Iterable[str], num_documents: int) -> tuple[list[str], list[str]]:
    lines, documents = _Reservoir(NUM_LINES), _Reservoir(num_documents)
    for text in texts:
        documents.offer(text[:_MAX_CHARACTERS])
        for line in text.split("\n"):  # a carriage return stays: it is worth a try
            if line.strip():
                lines.offer(line[:_MAX_CHARACTERS])
    return lines.kept, documents.kept


class _Reservoir:
    """A sample of fixed size from a stream of unknown length, each item with the same chance (Vitter's algorithm R)."""

    def __init__(self, size: int):
        self.kept: list[str] = []
        self._size, self._seen, self._random = size, 0, random.Random(SEED)

    def offer(self, item: str) -> None:
        self._seen += 1
        if len(self.kept) < self._size:
            self.kept.append(item)
        elif (place := self._random.randrange(self._seen)) < self._size:
            self.kept[place] = item


def make_prompts(
    encoder: "tokenizers.Tokenizer", documents: list[str], context_tokens: int
) -> tuple[list[Prompt], int]:  # fmt: skip
    """Make NUM_PROMPTS prompts or more, with NUM_PROMPTS x POSITIONS_A_PROMPT positions or more, none of them twice.

    Returns them, and how many built-in passages fill up where documents are few, short or alike. Where all that a
    short context leaves is fewer positions, each of them is taken. Prompts that begin alike share no position: after
    some beginnings rounding is off by far, which would count as often as there are such prompts.

    The last ones are single tokens: at the first position attention sees one key only, so a difference there is none
    of rope or of the order of query and key rows.
    """
    draw, beginnings = random.Random(SEED), set()
    limit, wanted = min(MAX_PROMPT_TOKENS, context_tokens - 1), NUM_PROMPTS * POSITIONS_A_PROMPT
    texts = _encoded(encoder, documents, limit)
    encoded, own, num_passages = [], [], 0
    for place, ids in enumerate([*texts, *_encoded(encoder, list(PASSAGES), limit)]):
        is_passage = place >= len(texts)
        if is_passage and len(encoded) >= NUM_PROMPTS and _drawn(own, POSITIONS_A_PROMPT) >= wanted:
            break
        lengths = [length for length in range(2, len(ids) + 1) if tuple(ids[:length]) not in beginnings]
        beginnings |= {tuple(ids[:length]) for length in lengths}
        if lengths:
            encoded.append(ids)
            own.append(lengths)
            num_passages += is_passage
    each = _each(own, wanted)
    prompts = [
        Prompt(ids, sorted(draw.sample(lengths, min(each, len(lengths)))))
        for ids, lengths in zip(encoded, own, strict=True)
    ]
    last = list(dict.fromkeys(ids[-1] for ids in encoded))[:NUM_SINGLE_TOKENS]
    return prompts + [Prompt([token], [1]) for token in last], num_passages


def _each(own: list[list[int]], wanted: int) -> int:
    """The positions to draw of each prompt, given those that are its own, so that as many as wanted are drawn."""
    most = max(map(len, own))
    return next((each for each in range(POSITIONS_A_PROMPT, most) if _drawn(own, each) >= wanted), most)


def _drawn(own: list[list[int]], each: int) -> int:
    return sum(min(each, len(lengths)) for lengths in own)


def _encoded(encoder: "tokenizers.Tokenizer", documents: list[str], limit: int) -> list[list[int]]:
    encodings = [encoding.ids[:limit] for encoding in encoder.encode_batch(documents)]
    return [ids for ids in encodings if len(ids) >= 2]
