"""A tokenizer as it lies on disk: `tokenizer.json`, `tokenizer_config.json`, a chat template, and the manifest of all.

Invariants: `hash` is the sha256 of tokenizer.json, and loading checks it. Text of documents never becomes a control
token; text of prompts may. A checkpoint holds the same files, its manifest as `tokenizer_manifest.json`. A Hugging
Face folder without a manifest is the same thing by `of_base`.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files, paths, store
from training.core.errors import IntegrityError, UserError
from training.recipe import bases
from training.recipe.model import Recipe
from training.tokenizer import huggingface
from training.tokenizer.encoder import Encoder
from training.tokenizer.huggingface import CONFIG, TEMPLATE, TOKENIZER

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

KIND = "tokenizer"
MANIFEST_IN_CHECKPOINT = "tokenizer_manifest.json"

BOS, EOS, PAD = "<|bos|>", "<|endoftext|>", "<|pad|>"
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
        """One past the highest id."""
        return self.manifest["vocab_size"]

    @property
    def add_bos(self) -> bool:
        """Whether a prompt gets BOS in front, in training as at the server."""
        return self.manifest["add_bos"]

    @property
    def specials(self) -> dict[str, int]:
        """The tokens that steer, text to id: every one flagged special, and those that the chat template writes."""
        return self.manifest["specials"]

    @property
    def roles(self) -> dict[str, str | None]:
        """The texts of `bos`, `eos` and `pad`; None where there is no such token."""
        return self.manifest.get("roles", _ROLES)

    @property
    def bos_id(self) -> int | None:
        return self._id_of("bos")

    @property
    def eos_id(self) -> int:
        return self._id_of("eos")

    @property
    def pad_id(self) -> int | None:
        return self._id_of("pad")

    def _id_of(self, role: str) -> int | None:
        text = self.roles[role]
        return None if text is None else self.specials[text]

    @cached_property
    def chat_template(self) -> str | None:
        """The chat template's Jinja source; None where the tokenizer has none."""
        return huggingface.template_of(self.folder)

    @property
    def dtype(self) -> "np.dtype":
        """The little-endian type that holds every id: uint16 up to 65,536 entries, else uint32."""
        import numpy as np

        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

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

    @cached_property
    def text_bytes_V(self) -> "np.ndarray":
        """Bytes of text that each id stands for: control tokens stand for none; int64, shape (vocab_size,)."""
        counts_V = self.num_bytes_V.copy()
        counts_V[list(self.specials.values())] = 0
        return counts_V

    @cached_property
    def _for_prompts(self) -> Encoder:
        return Encoder(self.folder / TOKENIZER, self.dtype)

    @cached_property
    def _for_documents(self) -> Encoder:
        return Encoder(self.folder / TOKENIZER, self.dtype, frozenset(self.specials))

    @cached_property
    def _decoder(self) -> "tokenizers.Tokenizer":
        return huggingface.open_library(self.folder / TOKENIZER)

    def encode_documents(self, texts: list[str]) -> list["np.ndarray"]:
        """Encode whole documents: BOS, the text's ids, EOS, of type `dtype`, read-only.

        BOS is left out where there is none or where it is the same token as EOS. Special tokens written out in a text
        are encoded as plain text, never as control tokens.
        """
        first = [] if self.bos_id in (None, self.eos_id) else [self.bos_id]
        return self._encoded(self._for_documents, texts, first, [self.eos_id])

    def encode_plain(self, texts: list[str]) -> list["np.ndarray"]:
        """Encode texts with nothing added; special tokens written out are plain text."""
        return self._encoded(self._for_documents, texts)

    def encode_rendered(self, texts: list[str]) -> list["np.ndarray"]:
        """Encode rendered conversations: special tokens are recognised and nothing is added (B31)."""
        return self._encoded(self._for_prompts, texts)

    def with_bos(self, rendered: str) -> str:
        """A rendered conversation as the server reads it: with BOS in front exactly once where `add_bos` (B31)."""
        if not self.add_bos or rendered.startswith(self.roles["bos"]):
            return rendered
        return self.roles["bos"] + rendered

    def _encoded(self, encoder: Encoder, texts: list[str], first: Sequence[int] = (), last: Sequence[int] = ()) -> list:
        import numpy as np

        start, end = (np.array(ids, self.dtype).tobytes() for ids in (first, last))
        return [np.frombuffer(b"".join((start, encoder.encode(text), end)), self.dtype) for text in texts]

    def encode(self, text: str) -> list[int]:
        """Encode a prompt as the server does: special tokens are recognised, BOS comes first where `add_bos`."""
        [ids] = self._encoded(self._for_prompts, [text], [self.bos_id] if self.add_bos else [])
        return ids.tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, special tokens written out."""
        return self._decoder.decode([int(number) for number in ids], skip_special_tokens=False)

    def copy_to(self, folder: Path) -> None:
        """Write the tokenizer's files into a checkpoint's folder."""
        for name in (TOKENIZER, CONFIG, TEMPLATE):
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)
        files.write_json(folder / MANIFEST_IN_CHECKPOINT, self.manifest)


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


def of_base(folder: Path) -> Tokenizer:
    """A base's folder as a tokenizer: by the manifest in it, else by what its own files say.

    Raises UserError where a file or EOS is missing, IntegrityError where llama.cpp would give other ids.
    """
    if (folder / MANIFEST_IN_CHECKPOINT).is_file():
        return load(folder)
    return Tokenizer(folder=folder, manifest=huggingface.describe(folder))


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
