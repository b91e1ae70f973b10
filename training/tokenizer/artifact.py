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
from training.core.errors import IntegrityError, UserError
from training.recipe import bases
from training.recipe.model import Recipe

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

KIND = "tokenizer"
TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
MANIFEST_IN_CHECKPOINT = "tokenizer_manifest.json"

BOS, EOS, PAD, TURN_START, TURN_END = "<|bos|>", "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (BOS, EOS, PAD, TURN_START, TURN_END)
_ROLES = {"bos": BOS, "eos": EOS, "pad": PAD}


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
    def specials(self) -> dict[str, int]:
        """Its control tokens: the id of each text."""
        return self.manifest["specials"]

    @property
    def roles(self) -> dict[str, str | None]:
        """The texts of `bos`, `eos` and `pad`; None where it has none."""
        return self.manifest.get("roles", _ROLES)

    @property
    def bos_id(self) -> int | None:
        return self._id_of("bos")

    @property
    def eos_id(self) -> int | None:
        return self._id_of("eos")

    @property
    def pad_id(self) -> int | None:
        return self._id_of("pad")

    def _id_of(self, role: str) -> int | None:
        text = self.roles[role]
        return None if text is None else self.specials[text]

    @cached_property
    def chat_template(self) -> str | None:
        """Its chat template's Jinja; None where it has none."""
        path = self.folder / TEMPLATE
        return path.read_text() if path.is_file() else None

    @cached_property
    def num_bytes_V(self) -> "np.ndarray":
        """Bytes of the text that each id is written as, control tokens too; int64, shape (vocab_size,)."""
        import numpy as np

        content = files.read_json(self.folder / TOKENIZER)
        counts_V = np.zeros(self.vocab_size, np.int64)
        for entry, index in content["model"]["vocab"].items():
            counts_V[index] = len(entry)  # one character a byte in a byte-level vocabulary
        for token in content.get("added_tokens", []):
            counts_V[token["id"]] = len(token["content"].encode())
        return counts_V

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
        """Encode whole documents, on all cores: BOS where it has one, the text's ids, EOS, of type `dtype`.

        Special tokens written out in a text are encoded as plain text, never as control tokens.
        """
        first = [] if self.bos_id is None else [self.bos_id]
        return [self._framed(first, ids, [self.eos_id]) for ids in self._plain(texts)]

    def encode_plain(self, texts: list[str]) -> list["np.ndarray"]:
        """Encode texts, on all cores, with nothing added; special tokens written out are plain text."""
        return [self._framed([], ids, []) for ids in self._plain(texts)]

    def encode_rendered(self, texts: list[str]) -> list["np.ndarray"]:
        """Encode rendered conversations, on all cores: special tokens are recognised and nothing is added (B31)."""
        encodings = self._for_prompts.encode_batch_fast(texts, add_special_tokens=False)
        return [self._framed([], encoding.ids, []) for encoding in encodings]

    def _plain(self, texts: list[str]) -> list[list[int]]:
        encodings = self._for_documents.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _framed(self, first: list[int], ids: list[int], last: list[int]) -> "np.ndarray":
        import numpy as np

        framed = np.empty(len(first) + len(ids) + len(last), self.dtype)
        framed[: len(first)], framed[len(framed) - len(last) :] = first, last
        framed[len(first) : len(framed) - len(last)] = ids
        return framed

    def encode(self, text: str) -> list[int]:
        """Encode a prompt as the server does: special tokens are recognised, BOS comes first where `add_bos`."""
        return self._for_prompts.encode(text, add_special_tokens=self.add_bos).ids

    def decode(self, ids: list[int]) -> str:
        """Decode ids to text, special tokens written out."""
        return self._for_prompts.decode(list(ids), skip_special_tokens=False)

    def copy_to(self, folder: Path) -> None:
        """Write its files into a checkpoint's folder."""
        if self.chat_template is not None:
            shutil.copyfile(self.folder / TEMPLATE, folder / TEMPLATE)
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


def of_recipe(recipe: Recipe) -> Tokenizer:
    """The tokenizer that a recipe names, else its base's own. Raises UserError or IntegrityError."""
    if recipe.tokenizer.path is not None:
        return load(resolve(recipe.tokenizer.path))
    if recipe.model.base is None:
        raise UserError("no tokenizer is named", where="tokenizer.path", expected="a tokenizer, or a base's own")
    base = bases.find(recipe.model.base)
    base.require_folder()
    return load(base.folder)


def resolve(reference: str) -> Path:
    """Return the folder of `name@hash`, `name` (its newest) or a folder's path. Raises UserError."""
    return store.resolve(reference, paths.roots().tokenizers, KIND, "make tokenizer-train DATASET=name@hash")
