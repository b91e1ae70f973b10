"""Token shards: each split of a dataset as one flat file of ids, for one tokenizer and, with answers, one template.

Owns `<dataset>/tokens/<hash2>/`: `<split>.tokens.bin` (little-endian uint16 or uint32, one document after another),
`<split>.offsets.bin` (uint64, num_documents + 1: where each document starts), `<split>.text_bytes.bin` (uint64 per
document: of the text that its labels stand for), manifest last. A text is `BOS document EOS`, whole, and all of it but
the BOS is trained. Records with answers also give `<split>.trained.bin` (uint8 per token: 1 is a label) and
`<split>.records.bin` (uint32 per document: its line in the split's file, from 0), since some are left out, and counted.
Invariants: keyed by the dataset's hash, the tokenizer's hash, what decides the labels, and the format's version; text
never becomes a control token. Packing into batches is not done here.
"""

import itertools
import logging
from array import array
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files, store, version
from training.core.errors import UserError
from training.core.progress import Progress
from training.core.units import format_count
from training.data import supervised
from training.data.dataset import KIND as DATASET_KIND
from training.data.dataset import Dataset
from training.data.supervision import Settings, lever
from training.tokenizer.artifact import Tokenizer
from training.tokenizer.measure import batches

if TYPE_CHECKING:
    import numpy as np

KIND = "tokens"
TEXT_FORM = "text"
_logger = logging.getLogger(__name__)
_FORMAT_VERSION = 1
_BATCH_SAMPLES = 512
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
        """Which tokens are labels, 0 or 1: uint8, num_tokens; None where all but the BOS are."""
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
    with store.exclusive(folder, KIND):
        if not store.reusable(folder, KIND):
            files.verify_manifest(dataset.folder, DATASET_KIND)
            _require_space(folder, dataset, tokenizer)
            with files.atomic_folder(folder) as temporary:
                _write(temporary, dataset, tokenizer, settings)
    return folder


def folder_of(dataset: Dataset, tokenizer: Tokenizer, settings: Settings | None = None) -> Path:
    """Where a dataset's tokens of a tokenizer lie, or would lie."""
    return dataset.folder / "tokens" / files.short(_key(dataset, tokenizer, settings))


def _key(dataset: Dataset, tokenizer: Tokenizer, settings: Settings | None) -> str:
    body = {"format": _FORMAT_VERSION, "dataset": dataset.hash, "tokenizer": tokenizer.hash}
    if dataset.form != TEXT_FORM:
        body["labels"] = settings.key(tokenizer.chat_template)
    return files.sha256_json(body)


def _require_form(dataset: Dataset, settings: Settings | None) -> None:
    if dataset.form != TEXT_FORM and settings is None:
        raise UserError(
            'only records of the form {"text"} can be pretrained on',
            where=dataset.reference,
            found=f"records of the form {dataset.form!r}",
            expected="a dataset of texts",
            next_command="make data-prepare INPUT=texts.jsonl",
        )


def _require_space(folder: Path, dataset: Dataset, tokenizer: Tokenizer) -> None:
    text_bytes = sum(split["text_bytes"] for split in dataset.manifest["splits"].values())
    needed_bytes = int(text_bytes / _BYTES_A_TOKEN_GUESS * tokenizer.dtype.itemsize)
    files.require_space(folder, needed_bytes, "the tokens")


def _write(folder: Path, dataset: Dataset, tokenizer: Tokenizer, settings: Settings | None) -> None:
    body = {
        "hash": _key(dataset, tokenizer, settings),
        "dataset": {"name": dataset.name, "hash": dataset.hash},
        "tokenizer": {"name": tokenizer.name, "hash": tokenizer.hash, "pre_tokenizer": tokenizer.pre_tokenizer},
        "dtype": tokenizer.dtype.str,
    }
    if dataset.form == TEXT_FORM:
        body["splits"] = {split: _write_texts(folder, dataset, tokenizer, split) for split in dataset.splits}
    else:
        body["labels"] = settings.key(tokenizer.chat_template)
        body["splits"] = {
            split: _write_samples(folder, dataset, tokenizer, settings, split) for split in dataset.splits
        }
        _require_labels(body["splits"], dataset, settings)
    files.write_manifest(folder, KIND, {**body, "tool": version.tool()})


def _write_texts(folder: Path, dataset: Dataset, tokenizer: Tokenizer, split: str) -> dict:
    with _Shard(folder, dataset, split) as shard:
        for batch in batches(dataset.iter_texts(split)):
            documents = tokenizer.encode_documents(batch)
            shard.write(documents, [len(text.encode()) for text in batch])
    return shard.figures()


def _write_samples(folder: Path, dataset: Dataset, tokenizer: Tokenizer, settings: Settings, split: str) -> dict:
    encoder = supervised.Encoder(dataset.form, tokenizer, settings, f"{dataset.reference} {split}.jsonl")
    lines, num_trained = array("I"), 0
    with _Shard(folder, dataset, split) as shard, open(folder / f"{split}.trained.bin", "wb") as labels:
        samples = encoder.encode(dataset.iter_records(split))
        while batch := list(itertools.islice(samples, _BATCH_SAMPLES)):
            shard.write([sample.ids for sample in batch], [sample.text_bytes for sample in batch])
            for sample in batch:
                sample.trained.tofile(labels)
                num_trained += int(sample.trained.sum())
            lines.extend(sample.line for sample in batch)
    with open(folder / f"{split}.records.bin", "wb") as output:
        lines.tofile(output)
    longest = int(shard.longest)
    figures = shard.figures() | {"trained_tokens": num_trained, "left_out": dict(encoder.counts)}
    figures["several_answers"] = encoder.several_answers
    if lines:
        figures["tokens_per_record"]["longest"] = f"{split}.jsonl:{lines[longest] + 1}"
    return figures


def _require_labels(splits: dict[str, dict], dataset: Dataset, settings: Settings) -> None:
    """Refuse tokens that would train nothing, or everything where only answers were asked for (B19, B26)."""
    train = splits.get("train", {})
    if not train.get("documents"):
        why = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in train["left_out"].items() if count)
        raise UserError(
            "nothing is left to train on", where=dataset.reference, found=why or "no record in train",
            expected=f"records of at most data.seq_len={settings.seq_len} tokens with an answer",
            next_command=lever("overlong", "left"),
        )  # fmt: skip
    if settings.loss_on != "all" and train["trained_tokens"] >= train["tokens"] - train["documents"]:
        raise UserError(
            "every token would be trained, the prompts too", where=dataset.reference,
            found=f"{train['trained_tokens']} of {train['tokens']} tokens",
            expected=f"answers alone, as data.loss_on={settings.loss_on} says",
            next_command=lever("loss_on", "all"),
        )  # fmt: skip
    if settings.loss_on != "assistant" and train["several_answers"]:
        _logger.warning(
            "%d records have tool turns or several answers, and data.loss_on=%s trains what is between them too; "
            "data.loss_on=assistant trains answers alone", train["several_answers"], settings.loss_on,
        )  # fmt: skip


class _Shard:
    """One split's files while they are written."""

    def __init__(self, folder: Path, dataset: Dataset, split: str):
        self._folder, self._split = folder, split
        self._lengths, self._text_bytes, self._num_tokens = array("Q"), array("Q"), 0
        self._progress = Progress(f"tokens {split}", dataset.manifest["splits"][split]["records"], "record")

    def __enter__(self) -> "_Shard":
        self._output = open(self._folder / f"{self._split}.tokens.bin", "wb")
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        import numpy as np

        self._progress.__exit__(*error)
        self._output.close()
        offsets = np.zeros(len(self._lengths) + 1, "<u8")
        np.cumsum(self._lengths, out=offsets[1:])
        offsets.tofile(self._folder / f"{self._split}.offsets.bin")
        np.array(self._text_bytes, "<u8").tofile(self._folder / f"{self._split}.text_bytes.bin")

    def write(self, documents: list, text_bytes: list[int]) -> None:
        """Append documents, arrays of ids, and the bytes of text of each."""
        import numpy as np

        np.concatenate(documents).tofile(self._output)
        self._lengths.extend(map(len, documents))
        self._text_bytes.extend(text_bytes)
        self._num_tokens += sum(map(len, documents))
        self._progress.advance(len(documents), f"{format_count(self._num_tokens)} tokens")

    @property
    def longest(self) -> int:
        """The number of the longest document; 0 where there is none."""
        return max(range(len(self._lengths)), key=self._lengths.__getitem__, default=0)

    def figures(self) -> dict:
        """What the manifest says of the split."""
        most = self._lengths[self.longest] if self._lengths else 0
        return {
            "documents": len(self._lengths), "tokens": self._num_tokens, "text_bytes": sum(self._text_bytes),
            "tokens_per_record": {"max": most, "longest": f"{self._split}.jsonl:{self.longest + 1}"},
        }  # fmt: skip
