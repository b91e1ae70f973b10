"""How quick the tokenizer's room is beside the `tokenizers` library called directly, on one text in one run.

The text is the standard library's sources, which every machine has. Training is timed in turns, the best of five.
"""

import json
import sysconfig
import tempfile
from pathlib import Path

from training.core import files, process
from training.core.timing import Ratio, best_of_both
from training.tokenizer import huggingface, pretokenizers, train
from training.tokenizer.artifact import TOKENIZER, Tokenizer

_TEXT_BYTES = 12 << 20
_TURNS = 5


def run() -> tuple[Ratio, ...]:
    """Time training and encoding; of each the best of a few, and an encoder starts with nothing learned."""
    texts = _texts()
    corpus = train.Corpus("sources", "0" * 64, "train", sum(len(text.encode()) for text in texts), lambda: iter(texts))
    settings = train.Settings()
    peaks = []

    def learn() -> None:
        growth = process.Growth()
        train.learn(corpus, settings)
        peaks.append(growth.peak_bytes())

    ours, theirs = best_of_both(learn, lambda: _learn_directly(texts, settings), _TURNS)
    with tempfile.TemporaryDirectory(prefix="trainyard-") as folder:
        path = Path(folder) / TOKENIZER
        files.write_json(path, json.loads(train.learn(corpus, settings).to_str()))
        manifest = train.manifest_of(path.parent, "sources", settings)
        library = huggingface.open_library(path, frozenset(manifest["specials"]))
        encoded, bare = best_of_both(
            lambda: Tokenizer(path.parent, manifest).encode_documents(texts),
            lambda: [library.encode(text, add_special_tokens=False) for text in texts],
        )
    return (
        Ratio("tokenizer training over the library called directly", ours, theirs, corpus.text_bytes, max(peaks)),
        Ratio("text to ids over the library's encode, each on one core", encoded, bare, corpus.text_bytes),
    )


def _texts() -> list[str]:
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if size < _TEXT_BYTES and "site-packages" not in path.parts:
            texts.append(path.read_text(errors="replace"))
            size += len(texts[-1])
    return texts


def _learn_directly(texts: list[str], settings: train.Settings) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE(ignore_merges=pretokenizers.ignores_merges(settings.pre_tokenizer)))
    library.pre_tokenizer = pretokenizers.build(settings.pre_tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size, min_frequency=settings.min_frequency, show_progress=False,
        special_tokens=list(settings.specials), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    library.train_from_iterator(iter(texts), trainer)
