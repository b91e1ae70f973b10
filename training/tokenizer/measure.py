"""What a tokenizer does to text: bytes per token, and what its vocabulary holds. Owns figures, changes nothing."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from training.core import files
from training.core.errors import UserError
from training.tokenizer.artifact import TOKENIZER, Tokenizer

_HELD_TEXTS = 256


@dataclass(frozen=True)
class Compression:
    """How much text was encoded, and into how many tokens (BOS and EOS not counted)."""

    text_bytes: int
    num_tokens: int

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / self.num_tokens


def compression(tokenizer: Tokenizer, texts: Iterable[str]) -> Compression:
    """Encode texts as plain text and count."""
    text_bytes = num_tokens = 0
    for text in texts:
        [ids] = tokenizer.encode_plain([text])
        text_bytes += len(text.encode())
        num_tokens += len(ids)
    return Compression(text_bytes, num_tokens)


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
    import numpy as np

    text_bytes, num_tokens = Counter(), Counter()
    counts_V = np.zeros(tokenizer.vocab_size, np.int64)
    held: list[np.ndarray] = []
    for source, text in texts:
        [ids] = tokenizer.encode_plain([text])
        text_bytes[source] += len(text.encode())
        num_tokens[source] += len(ids)
        held.append(ids)
        if len(held) == _HELD_TEXTS:
            counts_V += np.bincount(np.concatenate(held), minlength=tokenizer.vocab_size)
            held.clear()
    if held:
        counts_V += np.bincount(np.concatenate(held), minlength=tokenizer.vocab_size)
    sources = {name: Compression(size, num_tokens[name]) for name, size in text_bytes.most_common() if size}
    if not sources:
        raise UserError("there is no text to measure on", expected="a data set with at least one character of text")
    single_bytes = int(counts_V[tokenizer.num_bytes_V == 1].sum())
    specials = set(tokenizer.specials.values())
    unused = [int(number) for number in (counts_V == 0).nonzero()[0] if number not in specials]
    return Measured(tokenizer, sources, single_bytes / int(counts_V.sum()), unused)


def multi_digit_tokens(tokenizer: Tokenizer) -> list[str]:
    """The vocabulary's entries of two or more ASCII digits; without them a wrong pre-tokenizer could pass unseen."""
    vocabulary = files.read_json(tokenizer.folder / TOKENIZER)["model"]["vocab"]
    return sorted(entry for entry in vocabulary if len(entry) > 1 and entry.isascii() and entry.isdigit())
