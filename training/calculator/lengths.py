"""The length that counts: of rows that are padded and not packed, the longest record's, however late it comes.

Where a data set was tokenized, its tokens were counted. Else `stats.json` gives bytes: a byte-level tokenizer makes no
more tokens than bytes, so bytes and the two special tokens around a text are a bound. The template of a conversation
adds more, so its bytes bound nothing.
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
    """The bound that a `stats.json` gives of a split; None where it gives none."""
    text_bytes = stats.get("splits", {}).get(split, {}).get("text_bytes_per_record")
    if text_bytes and stats.get("form") == "text":
        return Longest(text_bytes["max"] + _SPECIAL_TOKENS, True, text_bytes.get("longest"))
    return None


def of_tokens(manifest: dict, split: str = "train") -> Longest | None:
    """The longest record of a split by the manifest of its tokens; None where it does not tell."""
    tokens = manifest["splits"].get(split, {}).get("tokens_per_record")
    return Longest(tokens["max"], False, tokens["longest"]) if tokens else None


def shortened(recipe: Recipe, longest: Longest | None) -> Recipe:
    """The recipe with the length that its data reaches, where that is less than data.seq_len."""
    if longest is None or recipe.data.packing or longest.tokens >= recipe.data.seq_len:
        return recipe
    return replace(recipe, data=replace(recipe.data, seq_len=max(2, longest.tokens)))
