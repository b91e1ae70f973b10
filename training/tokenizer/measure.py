"""What a tokenizer does to text: bytes per token, and what its vocabulary holds. Owns figures, changes nothing."""

from collections.abc import Iterable
from dataclasses import dataclass

from training.core import files
from training.tokenizer.artifact import TOKENIZER, Tokenizer

_BATCH_CHARS = 4 << 20


@dataclass(frozen=True)
class Compression:
    """How much text was encoded, and into how many tokens (BOS and EOS not counted)."""

    text_bytes: int
    num_tokens: int

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / self.num_tokens


def compression(tokenizer: Tokenizer, texts: Iterable[str]) -> Compression:
    """Encode texts as documents and count."""
    text_bytes = num_tokens = 0
    for batch in batches(texts):
        text_bytes += sum(len(text.encode()) for text in batch)
        num_tokens += sum(len(ids) - 2 for ids in tokenizer.encode_documents(batch))
    return Compression(text_bytes, num_tokens)


def batches(texts: Iterable[str], batch_chars: int = _BATCH_CHARS) -> Iterable[list[str]]:
    """Group texts into lists of about `batch_chars` characters, so that threads have work and memory stays small."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= batch_chars:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def multi_digit_tokens(tokenizer: Tokenizer) -> list[str]:
    """The vocabulary's entries of two or more ASCII digits; without them a wrong pre-tokenizer could pass unseen."""
    vocabulary = files.read_json(tokenizer.folder / TOKENIZER)["model"]["vocab"]
    return sorted(entry for entry in vocabulary if len(entry) > 1 and entry.isascii() and entry.isdigit())
