"""What a tokenizer does to text: bytes per token, and what its vocabulary holds. Owns figures, changes nothing."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.core import files
from training.core.errors import UserError
from training.tokenizer.artifact import TOKENIZER, Tokenizer

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Compression:
    """How much text was encoded, and into how many tokens (BOS and EOS not counted)."""

    text_bytes: int
    num_tokens: int

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / self.num_tokens


@dataclass(frozen=True)
class Measured:
    """What a tokenizer did to some text.

    Args:
        sources: how far each source's text was compressed, by the source's name.
        single_byte_share: which share of the tokens stands for one byte alone.
        unused_entries: the ids, but for those of special tokens, that no text used.
    """

    tokenizer: Tokenizer
    sources: dict[str, Compression]
    single_byte_share: float
    unused_entries: list[int]

    @property
    def all(self) -> Compression:
        """All sources together."""
        parts = self.sources.values()
        return Compression(sum(one.text_bytes for one in parts), sum(one.num_tokens for one in parts))

    def to_json(self) -> dict:
        return {
            "name": self.tokenizer.name, "hash": self.tokenizer.hash, "vocab_size": self.tokenizer.vocab_size,
            "pre_tokenizer": self.tokenizer.pre_tokenizer, "text_bytes": self.all.text_bytes,
            "tokens": self.all.num_tokens, "bytes_per_token": self.all.bytes_per_token,
            "single_byte_share": self.single_byte_share, "unused_entries": len(self.unused_entries),
            "sources": {
                name: {"text_bytes": one.text_bytes, "tokens": one.num_tokens, "bytes_per_token": one.bytes_per_token}
                for name, one in self.sources.items()
            },
        }  # fmt: skip


def measure(tokenizer: Tokenizer, texts: Iterable[tuple[str, str]]) -> Measured:
    """Encode texts as plain text and count; each comes as the name of its source and itself. Raises UserError
    where there is no text."""
    found, counts_V = count(tokenizer, texts)
    if not found:
        raise UserError("there is no text to measure on", expected="a data set with at least one character of text")
    sources = dict(sorted(found.items(), key=lambda one: -one[1].text_bytes))
    single_bytes = int(counts_V[tokenizer.num_bytes_V == 1].sum())
    specials = set(tokenizer.specials.values())
    unused = [int(number) for number in (counts_V == 0).nonzero()[0] if number not in specials]
    return Measured(tokenizer, sources, single_bytes / int(counts_V.sum()), unused)


def count(tokenizer: Tokenizer, texts: Iterable[tuple[str, str]]) -> tuple[dict[str, Compression], "np.ndarray"]:
    """The compression of each source that has any text, and how often each id came; int64, shape (vocab_size,)."""
    import numpy as np

    text_bytes, num_tokens = Counter(), Counter()
    counts_V = np.zeros(tokenizer.vocab_size, np.int64)
    for source, text in texts:
        [ids] = tokenizer.encode_plain([text])
        text_bytes[source] += len(text.encode())
        num_tokens[source] += len(ids)
        np.add.at(counts_V, ids, 1)
    return {name: Compression(size, num_tokens[name]) for name, size in text_bytes.items() if size}, counts_V


def multi_digit_tokens(tokenizer: Tokenizer) -> list[str]:
    """The vocabulary's entries of two or more ASCII digits; without them a wrong pre-tokenizer could pass unseen."""
    vocabulary = files.read_json(tokenizer.folder / TOKENIZER)["model"]["vocab"]
    return sorted(entry for entry in vocabulary if len(entry) > 1 and entry.isascii() and entry.isdigit())
