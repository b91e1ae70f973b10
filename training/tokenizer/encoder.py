"""Text to ids, each distinct pre-token encoded once: several times the pace of encoding every occurrence.

The ids of a pre-token do not depend on what stands around it, so a splitter and a table from pre-token to ids do what
the library does; what is cut off first, as there, is the text of added tokens. The library itself takes every text of
a pre-tokenizer without a splitter, and one with a character that the splitter does not know. The table is emptied when
it has grown to its limit.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files
from training.tokenizer import huggingface, pretokenizers
from training.tokenizer.splitter import Splitter

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

_TABLE_BYTES = 128 << 20
_LEARNED_AT_ONCE = 1 << 11  # an encoding of the library takes a kilobyte and more
_ENTRY_BYTES, _BYTES_A_CHARACTER = 200, 4  # of an entry: text, ids and the table's own


class Encoder:
    """Encodes text as it stands, with nothing added.

    Args:
        path: tokenizer.json.
        dtype: of the ids, little endian.
        plain: texts of added tokens that are encoded as any other text; all others are one id each.
    """

    def __init__(self, path: Path, dtype: "np.dtype", plain: frozenset[str] = frozenset()):
        document = files.read_json(path)
        self._dtype = dtype
        self._library = huggingface.open_library(path, plain)
        self._splitter = Splitter.of(document["pre_tokenizer"])
        self._one_piece = _without_splits(document)
        added = {token["content"]: token["id"] for token in document["added_tokens"] if token["content"] not in plain}
        self._added = {text: self._to_bytes([number]) for text, number in added.items()}
        self._any_added = any_of(added) if added else None
        self._table: dict[str, bytes] = {}
        self._table_bytes = 0

    def encode(self, text: str) -> bytes:
        """The ids of a text as bytes of `dtype`."""
        if self._table_bytes > _TABLE_BYTES:
            self._table.clear()
            self._table_bytes = 0
        try:
            return b"".join(self._parts(text))
        except ValueError:  # there is no splitter, or it does not know a character
            return self._to_bytes(self._library.encode(text, add_special_tokens=False).ids)

    def _parts(self, text: str) -> Iterator[bytes]:
        if self._splitter is None:
            raise ValueError("no splitter")
        place = 0
        for found in self._any_added.finditer(text) if self._any_added else ():
            yield from self._between(text[place : found.start()])
            yield self._added[found[0]]
            place = found.end()
        yield from self._between(text[place:] if place else text)

    def _between(self, text: str) -> Iterator[bytes]:
        for pieces in self._splitter.pieces(text):
            try:
                yield b"".join(map(self._table.__getitem__, pieces))
            except KeyError:
                self._learn(set(pieces).difference(self._table))
                yield b"".join(map(self._table.__getitem__, pieces))

    def _learn(self, pieces: set[str]) -> None:
        waiting = iter(pieces)
        while some := list(islice(waiting, _LEARNED_AT_ONCE)):
            encodings = self._one_piece.encode_batch_fast(some, add_special_tokens=False)
            for piece, encoding in zip(some, encodings, strict=True):
                self._table[piece] = self._to_bytes(encoding.ids)
            self._table_bytes += _ENTRY_BYTES * len(some) + _BYTES_A_CHARACTER * sum(map(len, some))

    def _to_bytes(self, ids: list[int]) -> bytes:
        import numpy as np

        return np.array(ids, self._dtype).tobytes()


def any_of(texts: Iterable[str]) -> re.Pattern:
    """What finds any of some texts, the longest first; of none at all, nothing."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _without_splits(document: dict) -> "tokenizers.Tokenizer":
    """The same model for texts that are one pre-token each."""
    whole = pretokenizers.byte_level(use_regex=False)
    changes = {"added_tokens": [], "normalizer": None, "pre_tokenizer": whole, "post_processor": None}
    return huggingface.library_of(document | changes)
