"""A tokenizer as it lies on disk: `tokenizer.json`, `tokenizer_config.json`, a chat template, and the manifest of all.

Invariants: `hash` is the sha256 of tokenizer.json, and loading checks it. Text of documents never becomes a control
token; text of prompts may. A checkpoint holds the same files, its manifest as `tokenizer_manifest.json`. What a person
calls a tokenizer is `find`'s to say, in every command; what a recipe may name, `resolve`'s.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files, paths, store
from training.core.errors import IntegrityError, UserError
from training.recipe import bases
from training.recipe.model import Recipe
from training.tokenizer import gguf_vocabulary, huggingface
from training.tokenizer.encoder import Encoder
from training.tokenizer.huggingface import CONFIG, TEMPLATE, TOKENIZER

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

KIND = "tokenizer"
CALLED = "a name, name@hash, a base's name, a Hugging Face folder or a GGUF file"
"""What a person can call a tokenizer, as commands tell it."""
MANIFEST_IN_CHECKPOINT = "tokenizer_manifest.json"
FILES = (TOKENIZER, CONFIG, TEMPLATE, MANIFEST_IN_CHECKPOINT)
"""What a tokenizer's folder can hold of it."""

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


def of_folder(folder: Path) -> Tokenizer:
    """A folder as a tokenizer: by the manifest in it, else by what its own files say.

    Raises UserError where a file or EOS is missing, IntegrityError where llama.cpp would give other ids.
    """
    own = folder / files.MANIFEST
    if (folder / MANIFEST_IN_CHECKPOINT).is_file() or (own.is_file() and files.read_json(own).get("kind") == KIND):
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


def find(reference: str) -> Tokenizer:
    """The tokenizer that a person means: whatever `resolve` finds, a Hugging Face folder, or a GGUF file.

    A path may be a container's. Raises UserError listing what there is, IntegrityError where bytes have changed or
    llama.cpp would give other ids.
    """
    path = paths.host_path(reference)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError("no such file", where=path, found="nothing", expected="a GGUF file")
        found = of_folder(gguf_vocabulary.unpacked(path))
        return replace(found, manifest=found.manifest | {"name": path.stem})
    if (path / TOKENIZER).is_file():
        return of_folder(path.absolute())
    return load(resolve(reference))


def resolve(reference: str) -> Path:
    """Return the folder of a tokenizer that a hash pins, as a recipe may name it: of an artifact by `name@hash`, `name`
    (its newest) or path, else of a fetched base by `name` or `name@hash`. Raises UserError listing what there is.
    """
    root, known = paths.roots().tokenizers, bases.load()
    folder = store.find(reference, root)
    if folder is not None and (folder / TOKENIZER).is_file():
        return folder
    name, _, digits = reference.partition("@")
    if name in known:
        known[name].require_folder()
        own = known[name].folder
        if files.read_json(own / MANIFEST_IN_CHECKPOINT)["hash"].startswith(digits.lower()):
            return own
    place = paths.host_path(reference)
    raise UserError(
        "no such tokenizer", where=place if place.exists() else root,
        found=f"no {TOKENIZER} that a manifest pins" if place.exists() else
        f"{reference!r}; {store.there(reference, root)}; bases: {', '.join(known)}",
        expected="a name or name@hash, a base's name, a folder of either; where nothing is trained, a Hugging Face "
        "folder or a GGUF file too",
        next_command="make tokenizer-train DATASET=stdlib",
    )  # fmt: skip
