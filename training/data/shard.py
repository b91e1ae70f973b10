"""One split's token files while they are written: ids, where each document begins, bytes, and labels.

Owns bytes on disk; what they mean is `tokens`'. Lengths of all documents are held until the end, 16 bytes a document.
"""

from array import array
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from training.data.supervised import Encoded


class Shard:
    """The files of a split of texts; `with` closes them, and writes what is known at the end."""

    def __init__(self, folder: Path, split: str):
        self._folder, self._split = folder, split
        self._lengths, self._text_bytes, self._num_tokens = array("Q"), array("Q"), 0

    def __enter__(self):
        self._output = self._open("tokens")
        return self

    def __exit__(self, *error: object) -> None:
        import numpy as np

        self._output.close()
        if error[0] is not None:
            return
        offsets = np.zeros(len(self._lengths) + 1, "<u8")
        np.cumsum(np.frombuffer(self._lengths, np.uint64), out=offsets[1:])
        self._save("offsets", offsets)
        self._save("text_bytes", np.frombuffer(self._text_bytes, np.uint64).astype("<u8"))

    def write(self, encoded: "Encoded") -> None:
        """Append a batch."""
        self._output.write(encoded.ids.data)
        self._lengths.extend(encoded.lengths.tolist())
        self._text_bytes.extend(encoded.text_bytes.tolist())
        self._num_tokens += len(encoded.ids)

    def _open(self, part: str):
        return open(self._folder / f"{self._split}.{part}.bin", "wb")

    def _save(self, part: str, values: "np.ndarray") -> None:
        with self._open(part) as output:
            output.write(values.data)  # tofile would not say that the disk is full

    def _line(self, document: int) -> int:
        """The line of the split's file, from 0, that a document is."""
        return document

    @property
    def _num_trained_tokens(self) -> int:
        """Labels: of a text every token but the first, which nothing predicts."""
        return self._num_tokens - len(self._lengths)

    def figures(self) -> dict:
        """What the manifest says of the split; the longest document by its place, `train.jsonl:1` is the first."""
        import numpy as np

        longest = int(np.argmax(self._lengths)) if self._lengths else None
        per_record = {"max": 0, "longest": None}
        if longest is not None:
            per_record = {"max": self._lengths[longest], "longest": f"{self._split}.jsonl:{self._line(longest) + 1}"}
        return {
            "documents": len(self._lengths), "tokens": self._num_tokens, "trained_tokens": self._num_trained_tokens,
            "text_bytes": sum(self._text_bytes), "tokens_per_record": per_record,
        }  # fmt: skip


class SampleShard(Shard):
    """The files of a split of records with answers: also labels, and the record that each document is."""

    def __init__(self, folder: Path, split: str):
        super().__init__(folder, split)
        self._lines, self._num_trained = array("I"), 0

    def __enter__(self):
        self._labels = self._open("trained")
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        import numpy as np

        self._labels.close()
        if error[0] is None:
            self._save("records", np.frombuffer(self._lines, np.uint32).astype("<u4"))
        super().__exit__(*error)

    def write(self, encoded: "Encoded") -> None:
        super().write(encoded)
        self._labels.write(encoded.trained.data)
        self._lines.extend(encoded.lines.tolist())
        self._num_trained += int(encoded.trained.sum())

    def _line(self, document: int) -> int:
        return self._lines[document]

    @property
    def _num_trained_tokens(self) -> int:
        return self._num_trained
