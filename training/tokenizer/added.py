"""More tokens for a tokenizer that there is: every old id stays, the new ones come behind, and the manifest says so.

Owns the artifact that results: `added` ({text: id}), `base_vocab_size` (entries before), `rows` (of embedding and head
afterwards). Rows that a model has beyond its tokenizer's entries are used up first; no id is ever below an old one.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from training.core import files, paths, store, version
from training.core.errors import UserError
from training.tokenizer import artifact, huggingface
from training.tokenizer.artifact import CONFIG, TEMPLATE, TOKENIZER, Tokenizer
from training.tokenizer.train import Prove

_FORMAT_VERSION = 1


@dataclass(frozen=True)
class Base:
    """What is extended.

    Args:
        tokenizer: the base's.
        rows: of the model's embedding; None where no model is known, and the entries count.
    """

    tokenizer: Tokenizer
    rows: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Base":
        """A tokenizer with the rows that its own manifest asks for, or that the model beside it has."""
        path = tokenizer.folder / "config.json"
        config = files.read_json(path) if path.is_file() else {}
        rows = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
        return cls(tokenizer, tokenizer.manifest.get("rows", rows))


def add(
    base: Base, specials: Sequence[str], words: Sequence[str], *, name: str, prove: Prove | None = None
) -> tuple[Path, bool]:
    """Write the base's tokenizer with more tokens, or find it. Return its folder, and whether it was found.

    Args:
        specials: control tokens, which text of documents never becomes.
        words: texts that are one token wherever they stand.
        prove: is given the new tokenizer before it is kept; what it raises leaves nothing behind.

    Raises UserError for a token that is there already, is empty, or holds another.
    """
    _require_new(base.tokenizer, [*specials, *words])
    body = {
        "format": _FORMAT_VERSION, "base": base.tokenizer.hash, "specials": list(specials), "words": list(words),
        "rows": base.rows,
    }  # fmt: skip
    key = files.sha256_json(body)
    folder = paths.roots().tokenizers / store.check_name(name, artifact.KIND) / files.short(key)
    with store.exclusive(folder.parent, artifact.KIND):
        if store.reusable(folder, artifact.KIND):
            return folder, True
        with files.atomic_folder(folder) as temporary:
            _write(temporary, base, specials, words, name, key, prove)
    return folder, False


def _require_new(tokenizer: Tokenizer, texts: list[str]) -> None:
    library = huggingface.open_library(tokenizer.folder / TOKENIZER)
    for number, text in enumerate(texts):
        if not text.strip() or text != text.strip() or _is_no_utf8(text):
            raise UserError(
                "a token without text, with blanks at its ends, or that is no UTF-8, cannot be added", found=repr(text),
                expected="text; blanks around a token stay text",
            )  # fmt: skip
        if text in texts[:number] or library.token_to_id(text) is not None:
            raise UserError(
                "the token is there already", where=tokenizer.folder, expected="a text that is no token yet",
                found=f"{text!r}, " + ("named twice" if text in texts[:number] else f"id {library.token_to_id(text)}"),
            )  # fmt: skip


def _is_no_utf8(text: str) -> bool:
    """Whether a text holds half a surrogate pair, as Python writes the bytes of an argument that is no UTF-8."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _write(
    folder: Path, base: Base, specials: Sequence[str], words: Sequence[str], name: str, key: str, prove: Prove | None
) -> None:
    old = base.tokenizer
    document = files.read_json(old.folder / TOKENIZER)
    added = {text: old.vocab_size + number for number, text in enumerate([*specials, *words])}
    document["added_tokens"] += [
        huggingface.added_token(number, text, special=text in specials) for text, number in added.items()
    ]
    files.write_text(folder / TOKENIZER, json.dumps(document, ensure_ascii=False))
    for file in (CONFIG, TEMPLATE):
        if (old.folder / file).is_file():
            shutil.copyfile(old.folder / file, folder / file)
    body = huggingface.describe(folder) | {
        "name": name, "key": key, "base": {"name": old.name, "hash": old.hash}, "added": added,
        "base_vocab_size": old.vocab_size, "rows": max(base.rows or 0, old.vocab_size + len(added)),
        "tool": version.tool(),
    }  # fmt: skip
    if prove is not None:
        body["proved"] = prove(Tokenizer(folder, body), [])
    files.write_manifest(folder, artifact.KIND, body)
