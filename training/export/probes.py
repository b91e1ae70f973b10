"""The texts and prompts that an export is tried on: drawn by a fixed seed from the validation split.

Where the checkpoint names no dataset, or it is not on this machine, passages written here stand in, and the record
says so. Nothing here knows the model or the server.
"""

import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.core import files
from training.core.errors import TrainyardError
from training.data import dataset as datasets

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
_PASSAGES = (
    "The kettle had been singing for some minutes before anyone noticed that the window was open and that the papers "
    "on the desk, which had lain there since the spring of 1894, were gone.\n\"Who was here?\" she asked.",
    "def mean(values: list[float]) -> float:\n    \"\"\"Return the arithmetic mean.\"\"\"\n    if not values:\n"
    "        raise ValueError(\"no values\")\n    return sum(values) / len(values)\n",
    "Water boils at 100 degrees Celsius at sea level, at 93 in the mountains at 2,000 metres, and at 71 on the summit "
    "of the highest of them. The pressure there is 337 hPa, a third of that on the shore.",
    "1. Open the file.\n2. Read the first 512 bytes.\n3. Compare them with the header; if they differ, stop.\n"
    "4. Otherwise go on with the table of contents, which has 16 bytes an entry.",
    "Das Schiff lief am 3. März aus, bei starkem Wind aus Südwest. Niemand an Bord ahnte, daß die Überfahrt "
    "länger als vierzehn Tage dauern würde.",
    "{\"name\": \"pump\", \"rate\": 0.75, \"limits\": [1, 10, 100], \"active\": true, \"notes\": null}\n",
    "L'été, la rivière est si basse qu'on la traverse à pied; l'hiver, elle emporte les ponts. C'est pourquoi les "
    "maisons du village se tiennent loin du bord.",
    "SELECT name, COUNT(*) AS visits FROM guests WHERE year >= 2019 GROUP BY name ORDER BY visits DESC LIMIT 10;",
)  # fmt: skip
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
    reference = f"{dataset['name']}@{files.short(dataset['hash'])}"
    try:
        lines, documents = _draw(datasets.load(datasets.resolve(reference)).iter_texts(split), num_documents)
    except TrainyardError as error:
        return _built_in(f"{reference}: {error.what}")
    if not documents:
        return _built_in(f"{reference} has no {split} text")
    return Texts(lines, documents, f"{reference}, {split} split, seed {SEED}")


def _built_in(reason: str) -> Texts:
    _logger.warning("built-in passages stand in for the data set: %s", reason)
    lines = [line for passage in _PASSAGES for line in passage.splitlines()]
    return Texts(lines, list(_PASSAGES), f"built-in passages ({reason})")


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


def make_prompts(encoder: "tokenizers.Tokenizer", documents: list[str], context_tokens: int) -> list[Prompt]:
    """Make prompts with at least NUM_PROMPTS x POSITIONS_A_PROMPT positions; passages help where documents are short.

    Where all that a short context leaves is fewer, each of them is taken.

    The last ones are single tokens: at the first position attention sees one key only, so a difference there is none
    of rope or of the order of query and key rows.
    """
    draw = random.Random(SEED)
    limit = min(MAX_PROMPT_TOKENS, context_tokens - 1)
    encoded = _encoded(encoder, documents, limit)
    if _drawn([len(ids) - 1 for ids in encoded], POSITIONS_A_PROMPT) < NUM_PROMPTS * POSITIONS_A_PROMPT:
        encoded += _encoded(encoder, list(_PASSAGES), limit)
    each = _each([len(ids) - 1 for ids in encoded])
    prompts = [Prompt(ids, sorted(draw.sample(range(2, len(ids) + 1), min(each, len(ids) - 1)))) for ids in encoded]
    return prompts + [Prompt([ids[-1]], [1]) for ids in encoded[:NUM_SINGLE_TOKENS]]


def _each(numbers: list[int]) -> int:
    """The positions to draw of each prompt, given how many each has, so that there are enough in all."""
    wanted = NUM_PROMPTS * POSITIONS_A_PROMPT
    enough = (each for each in range(-(-wanted // len(numbers)), max(numbers)) if _drawn(numbers, each) >= wanted)
    return next(enough, max(numbers))


def _drawn(numbers: list[int], each: int) -> int:
    return sum(min(each, number) for number in numbers)


def _encoded(encoder: "tokenizers.Tokenizer", documents: list[str], limit: int) -> list[list[int]]:
    encodings = [encoding.ids[:limit] for encoding in encoder.encode_batch(documents)]
    return [ids for ids in encodings if len(ids) >= 2]
