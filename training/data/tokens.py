"""Token shards: each split of a dataset as one flat file of ids, for one tokenizer and, with answers, one template.

Owns `<dataset>/tokens/<hash2>/`: `<split>.tokens.bin` (little-endian uint16 or uint32, one document after another),
`<split>.offsets.bin` (uint64, num_documents + 1: where each document starts), `<split>.text_bytes.bin` (uint64 per
document: of the text that its labels stand for), manifest last. A text is `BOS document EOS`, whole, and all of it but
the first token is trained. Records with answers also give `<split>.trained.bin` (uint8 per token: 1 is a label) and
`<split>.records.bin` (uint32 per document: its line in the split's file, from 0), since some are left out, and counted.
Invariants: keyed by the dataset's hash, the tokenizer's hash, what decides the labels, and the format's version; text
never becomes a control token. Packing into batches is not done here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files, store, version
from training.core.errors import UserError
from training.core.progress import Progress
from training.core.units import format_count
from training.data import encoding
from training.data.dataset import TOKENS, Dataset
from training.data.shard import SampleShard, Shard
from training.data.supervised import Encoded
from training.data.supervision import Settings, lever
from training.data.tally import Tally
from training.tokenizer.artifact import Tokenizer

if TYPE_CHECKING:
    import numpy as np

KIND = TOKENS
TEXT_FORM = "text"
_FORMAT_VERSION = 4
_BYTES_A_TOKEN_GUESS = 2.0


@dataclass(frozen=True)
class TokenSplit:
    """One split's tokens, mapped and not read; the arrays are read-only."""

    folder: Path
    split: str
    manifest: dict

    @cached_property
    def tokens(self) -> "np.ndarray":
        """All ids, flat, of the manifest's `dtype`: BOS document EOS BOS document EOS ..."""
        return self._map("tokens", self.manifest["dtype"])

    @cached_property
    def offsets(self) -> "np.ndarray":
        """Where each document begins in `tokens`, and the end of the last: uint64, num_documents + 1."""
        return self._map("offsets", "<u8")

    @cached_property
    def text_bytes(self) -> "np.ndarray":
        """UTF-8 bytes of each document's text: uint64, num_documents."""
        return self._map("text_bytes", "<u8")

    @cached_property
    def trained(self) -> "np.ndarray | None":
        """Which tokens are labels, 0 or 1: uint8, num_tokens; None where all but each text's first are."""
        return self._map("trained", "u1") if "labels" in self.manifest else None

    @cached_property
    def records(self) -> "np.ndarray":
        """The line of the split's file, from 0, that each document is: num_documents."""
        import numpy as np

        return self._map("records", "<u4") if "labels" in self.manifest else np.arange(self.num_documents)

    @property
    def num_tokens(self) -> int:
        return self.manifest["splits"][self.split]["tokens"]

    @property
    def num_documents(self) -> int:
        return self.manifest["splits"][self.split]["documents"]

    @property
    def num_trained_tokens(self) -> int:
        """How many tokens are labels; of a text all but the first."""
        return self.manifest["splits"][self.split]["trained_tokens"]

    def _map(self, part: str, dtype: str) -> "np.ndarray":
        import numpy as np

        path = self.folder / f"{self.split}.{part}.bin"
        if path.stat().st_size == 0:  # every record was left out; an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(path, dtype=dtype, mode="r")


def open_split(folder: Path, split: str) -> TokenSplit:
    """Open a split of a complete token folder. Raises IntegrityError, or UserError where it has no such split."""
    manifest = files.read_manifest(folder, KIND)
    if split not in manifest["splits"]:
        raise UserError(
            f"there are no {split} tokens", where=folder, found=", ".join(manifest["splits"]), expected=split
        )
    return TokenSplit(folder=folder, split=split, manifest=manifest)


def tokenize(dataset: Dataset, tokenizer: Tokenizer, settings: Settings | None = None) -> Path:
    """Write a dataset's tokens, or find them, and return their folder.

    Args:
        settings: what decides labels and lengths; needed for records with answers, of no meaning for texts.

    Raises UserError for records that cannot be used, IntegrityError where the dataset's bytes have changed.
    """
    _require_form(dataset, settings)
    folder = folder_of(dataset, tokenizer, settings)
    with store.exclusive(folder.parent, KIND):
        if not store.reusable(folder, KIND):
            dataset = dataset.verified()
            _require_space(folder, dataset, tokenizer)
            with files.atomic_folder(folder) as temporary:
                _write(temporary, dataset, tokenizer, settings)
    return folder


def folder_of(dataset: Dataset, tokenizer: Tokenizer, settings: Settings | None = None) -> Path:
    """Where a dataset's tokens of a tokenizer lie, or would lie."""
    return dataset.folder / TOKENS / files.short(_key(dataset, tokenizer, settings))


def _key(dataset: Dataset, tokenizer: Tokenizer, settings: Settings | None) -> str:
    body = {"format": _FORMAT_VERSION, "dataset": dataset.hash, "tokenizer": tokenizer.hash}
    if dataset.form != TEXT_FORM:
        body["labels"] = settings.key(tokenizer.chat_template)
    return files.sha256_json(body)


def _require_form(dataset: Dataset, settings: Settings | None) -> None:
    if dataset.form != TEXT_FORM and settings is None:
        raise UserError(
            'only records of the form {"text"} can be pretrained on', where=dataset.reference,
            found=f"records of the form {dataset.form!r}", expected="a dataset of texts",
            next_command="make data-prepare INPUT=texts.jsonl",
        )  # fmt: skip
    if dataset.form == TEXT_FORM and settings is not None and settings.loss_on != "all":
        raise UserError(
            "texts hold no answers to train alone", where=dataset.reference, found=f"data.loss_on={settings.loss_on}",
            expected='data.loss_on=all, or records of the form {"messages"} or {"prompt", "completion"}',
            next_command=lever("loss_on", "all"),
        )  # fmt: skip


def _require_space(folder: Path, dataset: Dataset, tokenizer: Tokenizer) -> None:
    token_bytes = tokenizer.dtype.itemsize + (dataset.form != TEXT_FORM)  # a label is a byte
    needed_bytes = int(dataset.text_bytes / _BYTES_A_TOKEN_GUESS * token_bytes)
    files.require_space(folder, needed_bytes, "the tokens")


def _write(folder: Path, dataset: Dataset, tokenizer: Tokenizer, settings: Settings | None) -> None:
    body = {
        "hash": _key(dataset, tokenizer, settings),
        "dataset": {"name": dataset.name, "hash": dataset.hash},
        "tokenizer": {"name": tokenizer.name, "hash": tokenizer.hash, "pre_tokenizer": tokenizer.pre_tokenizer},
        "dtype": tokenizer.dtype.str,
    }
    has_answers = dataset.form != TEXT_FORM
    if has_answers:
        body["labels"] = settings.key(tokenizer.chat_template)
    with encoding.started(tokenizer, settings if has_answers else None, dataset.text_bytes) as encode:
        write = partial(_write_samples, settings=settings) if has_answers else _write_texts
        body["splits"] = {split: write(folder, dataset, split, encode) for split in dataset.splits}
    files.write_manifest(folder, KIND, {**body, "tool": version.tool()})


def _write_texts(folder: Path, dataset: Dataset, split: str, encode: encoding.Encode) -> dict:
    with Shard(folder, split) as shard:
        for encoded in _encoded(dataset, split, encode):
            shard.write(encoded)
    return shard.figures()


def _write_samples(folder: Path, dataset: Dataset, split: str, encode: encoding.Encode, settings: Settings) -> dict:
    tally = Tally(dataset.reference, split, settings)
    with SampleShard(folder, split) as shard:
        for encoded in _encoded(dataset, split, encode):
            shard.write(encoded)
            tally.add(encoded)
    figures = shard.figures()
    tally.require_labels(figures)
    return figures | tally.figures()


def _encoded(dataset: Dataset, split: str, encode: encoding.Encode) -> Iterator[Encoded]:
    """Encode a split's records batch by batch, showing how far it is."""
    num_tokens = 0
    with Progress(f"tokens {split}", dataset.manifest["splits"][split]["records"], "record") as progress:
        for encoded in encode(dataset.iter_lines(split)):
            yield encoded
            num_tokens += len(encoded.ids)
            done = len(encoded.lines) + len(encoded.left_out)
            progress.advance(done, f"{format_count(num_tokens)} tokens")
