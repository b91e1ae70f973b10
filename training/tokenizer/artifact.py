"""A tokenizer as it lies on disk: `tokenizer.json`, `tokenizer_config.json`, and the manifest that names both.

Invariants: `hash` is the sha256 of tokenizer.json, and loading checks it. Text of documents never becomes a control
token; text of prompts may. A checkpoint holds the same three files, its manifest as `tokenizer_manifest.json`.
"""

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files, paths, store
from training.core.errors import IntegrityError

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

KIND = "tokenizer"
TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
MANIFEST_IN_CHECKPOINT = "tokenizer_manifest.json"

BOS, EOS, PAD, TURN_START, TURN_END = "<|bos|>", "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (BOS, EOS, PAD, TURN_START, TURN_END)


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and what its manifest says of it."""

    folder: Path
    manifest: dict

    @property
    def name(self) -> str:
        return self.manifest["name"]

    @property
    def hash(self) -> str:
        return self.manifest["hash"]

    @property
    def pre_tokenizer(self) -> str:
        """llama.cpp's name of the pre-tokenizer."""
        return self.manifest["pre_tokenizer"]

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def add_bos(self) -> bool:
        return self.manifest["add_bos"]

    @property
    def bos_id(self) -> int:
        return self.manifest["specials"][BOS]

    @property
    def eos_id(self) -> int:
        return self.manifest["specials"][EOS]

    @property
    def pad_id(self) -> int:
        return self.manifest["specials"][PAD]

    @property
    def dtype(self) -> "np.dtype":
        """The little-endian type that holds every id: uint16 up to 65,536 entries, else uint32."""
        import numpy as np

        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @cached_property
    def _for_prompts(self) -> "tokenizers.Tokenizer":
        return _open(self.folder / TOKENIZER)

    @cached_property
    def _for_documents(self) -> "tokenizers.Tokenizer":
        library = _open(self.folder / TOKENIZER)
        library.encode_special_tokens = True  # the text "<|im_end|>" is encoded as plain text
        return library

    def encode_documents(self, texts: list[str]) -> list["np.ndarray"]:
        """Encode whole documents, on all cores: BOS, the text's ids, EOS, of type `dtype`.

        Special tokens written out in a text are encoded as plain text, never as control tokens.
        """
        import numpy as np

        encodings = self._for_documents.encode_batch_fast(texts, add_special_tokens=False)
        result = []
        for encoding in encodings:
            ids = encoding.ids
            document = np.empty(len(ids) + 2, self.dtype)
            document[0], document[1:-1], document[-1] = self.bos_id, ids, self.eos_id
            result.append(document)
        return result

    def encode(self, text: str) -> list[int]:
        """Encode a prompt as the server does: special tokens are recognised, BOS comes first where `add_bos`."""
        return self._for_prompts.encode(text, add_special_tokens=self.add_bos).ids

    def decode(self, ids: list[int]) -> str:
        """Decode ids to text, special tokens written out."""
        return self._for_prompts.decode(list(ids), skip_special_tokens=False)

    def copy_to(self, folder: Path) -> None:
        """Write the three files into a checkpoint's folder."""
        shutil.copyfile(self.folder / TOKENIZER, folder / TOKENIZER)
        shutil.copyfile(self.folder / CONFIG, folder / CONFIG)
        files.write_json(folder / MANIFEST_IN_CHECKPOINT, self.manifest)


def _open(path: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(path))


def load(folder: Path) -> Tokenizer:
    """Load from an artifact's or a checkpoint's folder. Raises IntegrityError where tokenizer.json has changed."""
    if (folder / MANIFEST_IN_CHECKPOINT).is_file():
        manifest = files.read_json(folder / MANIFEST_IN_CHECKPOINT)
    else:
        manifest = files.read_manifest(folder, KIND)
    path = folder / TOKENIZER
    digest = files.sha256_file(path) if path.is_file() else None
    if digest != manifest["hash"]:
        raise IntegrityError(
            "the tokenizer's bytes are not its manifest's",
            where=path,
            found=f"sha256 {files.short(digest)}" if digest else "no such file",
            expected=f"sha256 {files.short(manifest['hash'])}",
        )
    return Tokenizer(folder=folder, manifest=manifest)


def resolve(reference: str) -> Path:
    """Return the folder of `name@hash`, `name` (its newest) or a folder's path. Raises UserError."""
    return store.resolve(reference, paths.roots().tokenizers, KIND, "make tokenizer-train DATASET=name@hash")
