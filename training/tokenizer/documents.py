"""Documents to ids, each distinct pre-token encoded once: several times the pace of encoding every occurrence.

The ids of a pre-token do not depend on what stands around it, so a table from pre-token to ids and a splitter do what
the library does. The library itself takes a document that holds an added token which is no special, one with a
character that the splitter does not know, and every document of a pre-tokenizer without a splitter. The table is
emptied when it has grown to its limit.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files
from training.tokenizer import huggingface
from training.tokenizer.splitter import Splitter

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

_TABLE_BYTES = 128 << 20
_ENTRY_BYTES, _BYTES_A_CHARACTER = 200, 4  # of an entry: text, ids and the table's own


class DocumentEncoder:
    """Encodes the plain text of documents.

    Args:
        path: tokenizer.json.
        specials: texts that are never recognised as tokens.
        dtype: of the ids, little endian.
    """

    def __init__(self, path: Path, specials: frozenset[str], dtype: "np.dtype"):
        document = files.read_json(path)
        self._dtype = dtype
        self._library = huggingface.open_library(path, specials)
        self._splitter = Splitter.of(document["pre_tokenizer"])
        self._one_piece = _without_splits(document)
        added = [token["content"] for token in document["added_tokens"] if not token["special"]]
        recognised = [text for text in added if text not in specials]
        self._recognised = re.compile("|".join(map(re.escape, recognised))) if recognised else None
        self._table: dict[str, bytes] = {}
        self._table_bytes = 0

    def encode(self, text: str) -> bytes:
        """The ids of a text as bytes of `dtype`."""
        if self._splitter is None or (self._recognised and self._recognised.search(text)):
            return self._by_library(text)
        if self._table_bytes > _TABLE_BYTES:
            self._table.clear()
            self._table_bytes = 0
        try:
            return b"".join(map(self._look_up, self._splitter.pieces(text)))
        except ValueError:  # the splitter does not know a character
            return self._by_library(text)

    def _by_library(self, text: str) -> bytes:
        import numpy as np

        return np.array(self._library.encode(text, add_special_tokens=False).ids, self._dtype).tobytes()

    def _look_up(self, pieces: list[str]) -> bytes:
        try:
            return b"".join(map(self._table.__getitem__, pieces))
        except KeyError:
            self._learn(set(pieces).difference(self._table))
            return b"".join(map(self._table.__getitem__, pieces))

    def _learn(self, pieces: set[str]) -> None:
        import numpy as np

        ordered = list(pieces)
        encodings = self._one_piece.encode_batch_fast(ordered, add_special_tokens=False)
        for piece, encoding in zip(ordered, encodings, strict=True):
            self._table[piece] = np.array(encoding.ids, self._dtype).tobytes()
        self._table_bytes += _ENTRY_BYTES * len(ordered) + _BYTES_A_CHARACTER * sum(map(len, ordered))


def _without_splits(document: dict) -> "tokenizers.Tokenizer":
    """The same model for texts that are one pre-token each."""
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    changes = {"added_tokens": [], "normalizer": None, "pre_tokenizer": whole}
    return huggingface.library_of(document | changes)
