"""Small tokenizers, trained in the test on text that holds digits, words, blanks and other scripts."""

from pathlib import Path

import pytest

from training.tokenizer import artifact
from training.tokenizer.train import Corpus, Settings, train

_WORDS = "def return value number don't we'll self.index 123 2026 1000 über naïve 你好 мир = 42"
WORDS = (*_WORDS.split(), "\n\t ", "\r\n")


def sample_texts(count: int = 200) -> list[str]:
    return [" ".join(WORDS[(i * 7 + k * k) % len(WORDS)] for k in range(30)) + f" {i * 137}" for i in range(count)]


def corpus_of(texts: list[str], digest: str = "0" * 64) -> Corpus:
    return Corpus("sample", digest, "train", sum(len(text.encode()) for text in texts), lambda: iter(texts))


@pytest.fixture
def make_tokenizer(own_roots: Path):
    """A function that trains under the test's own data root and loads what came out."""

    def make(texts: list[str] | None = None, name: str = "small", **settings) -> artifact.Tokenizer:
        chosen = Settings(**{"vocab_size": 500, **settings})
        folder, _ = train(corpus_of(texts or sample_texts()), chosen, name=name)
        return artifact.load(folder)

    return make
