"""Token shards: each split of a text dataset as one flat file of ids, for one tokenizer.

Owns `<dataset>/tokens/<hash2>/`: `<split>.tokens.bin` (little-endian uint16 or uint32: BOS document EOS, one after
another), `<split>.offsets.bin` (uint64, num_documents + 1: where each document starts), `<split>.text_bytes.bin`
(uint64 per document), manifest last. Invariants: keyed by the dataset's hash, the tokenizer's hash and the format's
version; no token is dropped; text never becomes a control token. Packing into batches is not done here.
"""

from array import array
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files, store, version
from training.core.errors import UserError
from training.core.progress import Progress
from training.core.units import format_count
from training.data.dataset import KIND as DATASET_KIND
from training.data.dataset import Dataset
from training.tokenizer.artifact import Tokenizer
from training.tokenizer.measure import batches

if TYPE_CHECKING:
    import numpy as np

KIND = "tokens"
_FORMAT_VERSION = 1
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

    @property
    def num_tokens(self) -> int:
        return self.manifest["splits"][self.split]["tokens"]

    @property
    def num_documents(self) -> int:
        return self.manifest["splits"][self.split]["documents"]

    def _map(self, part: str, dtype: str) -> "np.ndarray":
        import numpy as np

        return np.memmap(self.folder / f"{self.split}.{part}.bin", dtype=dtype, mode="r")


def open_split(folder: Path, split: str) -> TokenSplit:
    """Open a split of a complete token folder. Raises IntegrityError, or UserError where it has no such split."""
    manifest = files.read_manifest(folder, KIND)
    if split not in manifest["splits"]:
        raise UserError(
            f"there are no {split} tokens", where=folder, found=", ".join(manifest["splits"]), expected=split
        )
    return TokenSplit(folder=folder, split=split, manifest=manifest)


def tokenize(dataset: Dataset, tokenizer: Tokenizer) -> Path:
    """Write a text dataset's tokens, or find them, and return their folder.

    Raises UserError for a dataset of another form, IntegrityError where the dataset's bytes have changed.
    """
    _require_text(dataset)
    folder = folder_of(dataset, tokenizer)
    with store.exclusive(folder, KIND):
        if not store.reusable(folder, KIND):
            files.verify_manifest(dataset.folder, DATASET_KIND)
            _require_space(folder, dataset, tokenizer)
            with files.atomic_folder(folder) as temporary:
                _write(temporary, dataset, tokenizer)
    return folder


def folder_of(dataset: Dataset, tokenizer: Tokenizer) -> Path:
    """Where a dataset's tokens of a tokenizer lie, or would lie."""
    return dataset.folder / "tokens" / files.short(_key(dataset, tokenizer))


def _key(dataset: Dataset, tokenizer: Tokenizer) -> str:
    return files.sha256_json({"format": _FORMAT_VERSION, "dataset": dataset.hash, "tokenizer": tokenizer.hash})


def _require_text(dataset: Dataset) -> None:
    if dataset.form != "text":
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


def _write(folder: Path, dataset: Dataset, tokenizer: Tokenizer) -> None:
    splits = {split: _write_split(folder, dataset, tokenizer, split) for split in dataset.splits}
    body = {
        "hash": _key(dataset, tokenizer),
        "dataset": {"name": dataset.name, "hash": dataset.hash},
        "tokenizer": {"name": tokenizer.name, "hash": tokenizer.hash, "pre_tokenizer": tokenizer.pre_tokenizer},
        "dtype": tokenizer.dtype.str,
        "splits": splits,
        "tool": version.tool(),
    }
    files.write_manifest(folder, KIND, body)


def _write_split(folder: Path, dataset: Dataset, tokenizer: Tokenizer, split: str) -> dict:
    import numpy as np

    total_bytes = dataset.manifest["splits"][split]["text_bytes"]
    lengths, text_bytes = array("Q"), array("Q")
    num_tokens = 0
    with (
        open(folder / f"{split}.tokens.bin", "wb") as output,
        Progress(f"tokens {split}", total_bytes, "B") as progress,
    ):
        for batch in batches(dataset.iter_texts(split)):
            documents = tokenizer.encode_documents(batch)
            np.concatenate(documents).tofile(output)
            lengths.extend(map(len, documents))
            sizes = [len(text.encode()) for text in batch]
            text_bytes.extend(sizes)
            num_tokens += sum(map(len, documents))
            progress.advance(sum(sizes), f"{format_count(num_tokens)} tokens")
    offsets = np.zeros(len(lengths) + 1, "<u8")
    np.cumsum(lengths, out=offsets[1:])
    offsets.tofile(folder / f"{split}.offsets.bin")
    np.array(text_bytes, "<u8").tofile(folder / f"{split}.text_bytes.bin")
    longest = int(np.argmax(lengths))
    return {
        "documents": len(lengths), "tokens": num_tokens, "text_bytes": sum(text_bytes),
        "tokens_per_record": {"max": lengths[longest], "longest": f"{split}.jsonl:{longest + 1}"},
    }  # fmt: skip
