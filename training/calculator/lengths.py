"""The length that counts: of rows that are padded and not packed, the longest record's, however late it comes.

`stats.json` of a prepared data set gives it in tokens where they were counted, else in bytes. A byte-level tokenizer
makes no more tokens than bytes, so bytes and the two special tokens around a text are a bound. The template of a
conversation adds more, so its bytes bound nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from training.recipe.model import Recipe

_SPECIAL_TOKENS = 2


@dataclass(frozen=True)
class Longest:
    """The longest record of a data set; `is_bound` where its tokens were not counted."""

    tokens: int
    is_bound: bool
    record: str | None = None

    @property
    def in_words(self) -> str:
        which = f" ({self.record})" if self.record else ""
        if self.is_bound:
            return f"the longest record{which} has at most {self.tokens} tokens, by its bytes"
        return f"the longest record{which} has {self.tokens} tokens"


def of_stats(stats: dict, split: str = "train") -> Longest | None:
    """Read the longest record of a split out of a `stats.json`; None where it tells none."""
    part = stats.get("splits", {}).get(split, {})
    tokens, text_bytes = part.get("tokens_per_record"), part.get("text_bytes_per_record")
    if tokens:
        return Longest(tokens["max"], False, tokens.get("longest"))
    if text_bytes and stats.get("form") == "text":
        return Longest(text_bytes["max"] + _SPECIAL_TOKENS, True, text_bytes.get("longest"))
    return None


def shortened(recipe: Recipe, longest: Longest | None) -> Recipe:
    """The recipe with the length that its data reaches, where that is less than data.seq_len."""
    if longest is None or recipe.data.packing or longest.tokens >= recipe.data.seq_len:
        return recipe
    return replace(recipe, data=replace(recipe.data, seq_len=max(2, longest.tokens)))
