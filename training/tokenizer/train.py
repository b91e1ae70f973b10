"""Train a byte-level BPE and write it as an artifact.

Owns the recipe of a tokenizer: its specials, its alphabet of all 256 bytes, the cap on long runs. Invariants: the
same texts in any order, on any number of threads, give the same tokenizer.json; a key over the texts' hash, the
settings and the library's version recognises what is already made. Takes iterators of text and knows no dataset.
"""

import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files, paths, process, store, version
from training.core.errors import UserError
from training.core.progress import Progress
from training.core.units import format_bytes
from training.tokenizer import artifact, chat_templates, measure, need, pretokenizers

if TYPE_CHECKING:
    import tokenizers

_logger = logging.getLogger(__name__)
_FORMAT_VERSION = 3
_NUM_BYTES = 256
MOST_ENTRIES = 1 << 20
_NO_LIMIT_TOKENS = 10**9
_LOOK_SECONDS = 0.5
_PIECE_CHARS = 1 << 13
_BETWEEN_WORDS = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")

Texts = Callable[[], Iterable[str]]  # opens them anew at each call
Prove = Callable[[artifact.Tokenizer, Iterable[str]], dict]


@dataclass(frozen=True)
class Settings:
    """What decides the vocabulary besides the texts.

    Args:
        vocab_size: entries including specials and the 256 bytes.
        pre_tokenizer: llama.cpp's name of it.
        min_frequency: how often a pair must occur to be merged.
        longest_run_chars: longer runs without whitespace (or of whitespace) are cut for training, since the time
            that a merge takes grows with the length of a pre-token.
        chat_template: its name; its tokens are among the specials.
        num_reserved: special tokens kept free for later use, so that nothing must be resized.
    """

    vocab_size: int = 4096
    pre_tokenizer: str = pretokenizers.DEFAULT
    min_frequency: int = 2
    longest_run_chars: int = 1000
    chat_template: str = chat_templates.DEFAULT
    num_reserved: int = 0

    def __post_init__(self) -> None:
        pretokenizers.check_name(self.pre_tokenizer)
        chat_templates.named(self.chat_template)
        if self.num_reserved < 0:
            raise UserError("not a number of tokens", where="--reserve", found=self.num_reserved, expected="0 or more")
        smallest = _NUM_BYTES + len(self.specials)
        if not smallest <= self.vocab_size <= MOST_ENTRIES:
            raise UserError(
                "the vocabulary is too small" if self.vocab_size < smallest else "the vocabulary is too large",
                where="--vocab-size",
                found=self.vocab_size,
                expected=f"{smallest} ({_NUM_BYTES} bytes and the specials) to {MOST_ENTRIES}",
            )

    @property
    def specials(self) -> tuple[str, ...]:
        """Every special token in the order of its id: the roles, the template's, the reserved."""
        roles = (artifact.BOS, artifact.EOS, artifact.PAD)
        reserved = tuple(f"<|reserved_{number}|>" for number in range(self.num_reserved))
        return (*roles, *chat_templates.named(self.chat_template).specials, *reserved)


@dataclass(frozen=True)
class Corpus:
    """What a tokenizer is trained on: a way to read the texts, and what the manifest says of them.

    Args:
        dataset, hash, split: the dataset's name, its whole hash, and the split.
        text_bytes: UTF-8 bytes of all texts together.
        read: the texts.
        samples: texts on which bytes per token are measured, by the name that the manifest gives the figure.
    """

    dataset: str
    hash: str
    split: str
    text_bytes: int
    read: Texts
    samples: Mapping[str, Texts] = field(default_factory=dict)

    def to_manifest(self) -> dict:
        return {"dataset": self.dataset, "hash": self.hash, "split": self.split, "bytes": self.text_bytes}


def train(corpus: Corpus, settings: Settings, *, name: str, prove: Prove | None = None) -> tuple[Path, bool]:
    """Train a tokenizer, or find what the same corpus and settings gave. Return its folder, and whether found.

    Args:
        prove: is given the tokenizer and the texts before anything is kept; what it returns stands in the manifest,
            and what it raises leaves nothing behind.
    """
    key = _key(corpus, settings)
    folder = paths.roots().tokenizers / store.check_name(name, artifact.KIND) / files.short(key)
    with store.exclusive(folder.parent, artifact.KIND):
        if store.reusable(folder, artifact.KIND):
            return folder, True
        predicted_bytes = predicted_memory_bytes(corpus, settings)
        need.require(predicted_bytes, corpus.dataset)
        library = learn(corpus, settings)
        process.give_back()
        with files.atomic_folder(folder) as temporary:
            _write(temporary, library, corpus, settings, name, key, predicted_bytes, prove)
    return folder, False


def _key(corpus: Corpus, settings: Settings) -> str:
    import tokenizers

    return files.sha256_json(
        {
            "format": _FORMAT_VERSION, "dataset": corpus.hash, "split": corpus.split, "settings": asdict(settings),
            "specials": settings.specials, "library": tokenizers.__version__,
        }
    )  # fmt: skip


def predicted_memory_bytes(corpus: Corpus, settings: Settings) -> int:
    """The most bytes by which `train` grows this process: reading, learning, measuring and the proof."""
    texts = ((sys.getsizeof(text), pieces(text, settings.longest_run_chars)) for text in corpus.read())
    return need.predict(texts, corpus.text_bytes, settings.pre_tokenizer, settings.vocab_size)


def learn(corpus: Corpus, settings: Settings) -> "tokenizers.Tokenizer":
    """Learn a vocabulary from the texts; nothing is written."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    library = Tokenizer(models.BPE(ignore_merges=pretokenizers.ignores_merges(settings.pre_tokenizer)))
    library.pre_tokenizer = pretokenizers.build(settings.pre_tokenizer)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        special_tokens=list(settings.specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _interruptible(lambda: library.train_from_iterator(_pieces(corpus, settings.longest_run_chars), trainer))
    bos = artifact.BOS
    library.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, library.token_to_id(bos))]
    )
    return library


def _interruptible(work: Callable[[], object]) -> None:
    """Run the library's work in a thread, so that a signal is heard at once; the process that ends ends the thread."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
    if errors:
        raise errors[0]


def _pieces(corpus: Corpus, longest_run_chars: int) -> Iterator[str]:
    with Progress("tokenizer", corpus.text_bytes, "B") as progress:
        for text in corpus.read():
            yield from pieces(text, longest_run_chars)
            progress.advance(len(text) if text.isascii() else len(text.encode()))
        progress.write("tokenizer: texts read, merging pairs")


def pieces(text: str, longest_run_chars: int) -> Iterator[str]:
    """Yield a text in parts of about 8 Ki characters, since each thread of the library needs 150 bytes for each.

    A cut before a blank between two words, or behind a line's end, parts no pre-token of any pre-tokenizer here.
    """
    for part in cut_long_runs(text, longest_run_chars):
        start = 0
        while len(part) - start > _PIECE_CHARS and (cut := _BETWEEN_WORDS.search(part, start + _PIECE_CHARS)):
            yield part[start : cut.start()]
            start = cut.start()
        yield part[start:] if start else part


def cut_long_runs(text: str, longest_chars: int) -> Iterator[str]:
    """Yield a text in pieces so that no run without whitespace, and none of whitespace, is longer than the limit."""
    if not _may_have_long_run(text, longest_chars):
        yield text
        return
    # The look-behinds let a run be tried at its first character only: linear in the text.
    long_run = re.compile(rf"(?<!\S)\S{{{longest_chars + 1},}}|(?<!\s)\s{{{longest_chars + 1},}}")
    start = 0
    for run in long_run.finditer(text):
        for cut in range(run.start() + longest_chars, run.end(), longest_chars):
            yield text[start:cut]
            start = cut
    yield text[start:]


def _may_have_long_run(text: str, longest_chars: int) -> bool:
    """Whether a long run is possible, seen from every so many-th character: a tenth of the time, and never a miss."""
    step = max(1, longest_chars // 100)
    num_samples = longest_chars // step  # that a longer run holds at least, one after another
    return re.search(rf"\S{{{num_samples}}}|\s{{{num_samples}}}", text[::step]) is not None


def _write(
    folder: Path, library, corpus: Corpus, settings: Settings, name: str, key: str, predicted_bytes: int,
    prove: Prove | None,
) -> None:  # fmt: skip
    files.write_text(folder / artifact.TOKENIZER, library.to_str(pretty=True))
    files.write_json(folder / artifact.CONFIG, _transformers_config())
    if source := chat_templates.named(settings.chat_template).source:
        files.write_text(folder / artifact.TEMPLATE, source)
    body = manifest_of(folder, name, settings)
    if prove is not None and body["vocab_size"] <= _NUM_BYTES + len(settings.specials):
        raise UserError(
            "the text gives no entry but single bytes, and llama.cpp reads no such vocabulary", where=corpus.dataset,
            found=f"{format_bytes(corpus.text_bytes)} of text", next_command="make tokenizer-train DATASET=stdlib",
            expected=f"pairs that come {settings.min_frequency} times, and more than {body['vocab_size']} entries",
        )  # fmt: skip
    if body["vocab_size"] < settings.vocab_size:
        _logger.warning("the text gave only %d of %d vocabulary entries", body["vocab_size"], settings.vocab_size)
    body |= {"key": key, "settings": asdict(settings), "trained_on": corpus.to_manifest()}
    body["predicted_memory_bytes"] = predicted_bytes
    figures = _measure(artifact.Tokenizer(folder, body), corpus)
    process.give_back()
    if prove is not None:  # by a tokenizer of its own: the tables of the one that measured go first
        figures["proved"] = prove(artifact.Tokenizer(folder, body), corpus.read())
    files.write_manifest(folder, artifact.KIND, {**body, **figures, "tool": version.tool()})


def manifest_of(folder: Path, name: str, settings: Settings) -> dict:
    """What a manifest says of the `tokenizer.json` in a folder that `learn` gave under these settings."""
    document = files.read_json(folder / artifact.TOKENIZER)
    ids = {token["content"]: token["id"] for token in document["added_tokens"]}
    return {
        "name": name,
        "hash": files.sha256_file(folder / artifact.TOKENIZER),
        "vocab_size": len(document["model"]["vocab"]),
        "pre_tokenizer": pretokenizers.name_of(document),
        "add_bos": True,
        "roles": {"bos": artifact.BOS, "eos": artifact.EOS, "pad": artifact.PAD},
        "specials": {special: ids[special] for special in settings.specials},
    }


def _measure(tokenizer: artifact.Tokenizer, corpus: Corpus) -> dict:
    figures, _ = measure.count(tokenizer, ((name, text) for name, read in corpus.samples.items() for text in read()))
    return {
        "bytes_per_token": {name: round(figure.bytes_per_token, 4) for name, figure in figures.items()},
        "multi_digit_tokens": len(measure.multi_digit_tokens(tokenizer)),
    }


def _transformers_config() -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": artifact.BOS,
        "eos_token": artifact.EOS,
        "pad_token": artifact.PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _NO_LIMIT_TOKENS,
    }
