"""What will become of a recipe's records with answers: counted where they lie in tokens, else tried on some of them.

Owns the look before training; what becomes of a record is `supervised`'s and `tally`'s, and so is what stops training.
Nothing is written.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from training.core import files
from training.core.units import format_number
from training.data import tokens
from training.data.dataset import Dataset
from training.data.supervised import Encoder
from training.data.supervision import Settings
from training.data.tally import Tally
from training.recipe.model import Recipe
from training.tokenizer.artifact import Tokenizer

_TRIED = 512


@dataclass(frozen=True)
class Outcome:
    """What becomes of the records of one split, of which `num_seen` were looked at.

    Args:
        words: how many are left out or changed, and why; empty where all are trained as they are.
    """

    split: str
    num_seen: int
    num_records: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        seen = f"of {format_number(self.num_records, 'record')}"
        if self.num_seen < self.num_records:
            seen = f"of {self.num_seen:,} looked at, {seen}"
        return f"{self.split}, {seen}: {'; '.join(self.words) or 'each is trained as it is'}"


def of_recipe(recipe: Recipe, data: Dataset, tokenizer: Tokenizer) -> Iterator[Outcome]:
    """Yield the outcome of each split that is trained or validated on; of texts, which are all kept, nothing.

    Raises UserError at a record that would stop training.
    """
    settings = Settings.of(recipe.data)
    if data.form == tokens.TEXT_FORM:
        return
    folder = tokens.folder_of(data, tokenizer, settings)
    counted = files.read_manifest(folder, tokens.KIND)["splits"] if (folder / files.MANIFEST).is_file() else {}
    encoder = Encoder(tokenizer, settings)
    for split in (name for name in ("train", "validation") if name in data.splits):
        num_records = data.manifest["splits"][split]["records"]
        tally = Tally(data.reference, split, settings)
        num_seen = num_records
        if split not in counted:
            lines = islice(enumerate(data.iter_lines(split)), 0, None, math.ceil(num_records / _TRIED))
            encoded = encoder.batch([(number, files.parse_json(line)) for number, line in lines])
            tally.add(encoded)
            num_seen = len(encoded.lines) + len(encoded.left_out)
        yield Outcome(split, num_seen, num_records, tuple(tally.words(counted.get(split))))
