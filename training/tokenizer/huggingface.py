"""A Hugging Face tokenizer folder read as an artifact's manifest would tell it, and what llama.cpp would do otherwise.

Owns the reading of `tokenizer.json`, `tokenizer_config.json` and the chat template. Invariants: what is returned has
ids that llama.cpp gives too, or an error says why not; nothing in the folder is changed. Opening drops what would
change ids behind the caller's back: truncation and padding, a post-processor, and the normalizer NFC, which llama.cpp
does not apply (training without it is what makes trained ids the served ones).
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files
from training.core.errors import IntegrityError, UserError
from training.tokenizer import pretokenizers

if TYPE_CHECKING:
    import tokenizers

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
ROLES = ("bos", "eos", "pad")
_PROBE = "Don't 12 \u00e9\u4f60\U0001f600\r\n\t x"
_STRIPS = ("lstrip", "rstrip", "single_word")


def open_library(path: Path, plain: frozenset[str] = frozenset(), *, with_bos: bool = False) -> "tokenizers.Tokenizer":
    """Open a `tokenizer.json` so that text alone decides the ids, as llama.cpp has them.

    Args:
        plain: texts of added tokens that are encoded as any other text.
        with_bos: keep the post-processor, which puts BOS in front of a prompt where the tokenizer wants it.
    """
    document = files.read_json(path)
    if not with_bos:
        document["post_processor"] = None
    if pretokenizers.is_nfc(document.get("normalizer")):
        document["normalizer"] = None
    for token in _added_of(document, path).values():
        token["special"] = token["content"] in plain
    library = library_of(document, path)
    library.encode_special_tokens = True  # those flagged special are plain text
    return library


def library_of(document: dict, where: Path | None = None) -> "tokenizers.Tokenizer":
    """A tokenizer of the content of a `tokenizer.json`, nothing cut or padded. Raises IntegrityError for another's."""
    import tokenizers

    document = document | {"truncation": None, "padding": None}
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(document, ensure_ascii=False))
    except Exception as error:  # the library raises no narrower one
        raise _unreadable(where, error) from error


def _unreadable(where: Path | None, found: object) -> IntegrityError:
    return IntegrityError(
        "the tokenizer cannot be opened", where=where, found=found, expected=f"a {TOKENIZER} of the library tokenizers"
    )


def _added_of(document: dict, path: Path) -> dict[str, dict]:
    """The added tokens by their text."""
    tokens = document.get("added_tokens") or []
    try:
        return {token["content"]: token for token in tokens if isinstance(token["id"], int)}
    except (KeyError, TypeError) as error:
        raise _unreadable(path, f"added tokens without text or id, {error!r}") from error


def added_token(number: int, text: str, *, special: bool) -> dict:
    """An entry of `added_tokens` as llama.cpp takes it: the text alone, no blanks around it."""
    return {"id": number, "content": text, **dict.fromkeys((*_STRIPS, "normalized"), False), "special": special}


def describe(folder: Path) -> dict:
    """The manifest's keys of a folder that has none: roles, specials, the pre-tokenizer's name, whether BOS is added.

    Raises UserError where a file or EOS is missing, IntegrityError where llama.cpp would give other ids.
    """
    for name in (TOKENIZER, CONFIG):
        if not (folder / name).is_file():
            raise UserError("not a tokenizer's folder", where=folder, found=f"no {name}", expected=f"a {name}")
    document, config = files.read_json(folder / TOKENIZER), files.read_json(folder / CONFIG)
    library, added = open_library(folder / TOKENIZER), _added_of(document, folder / TOKENIZER)
    _refuse_stripping(folder, added)
    pre_tokenizer = pretokenizers.name_of(document)
    _require_own_ids(folder, library, added)
    _require_round_trip(folder, library)
    roles = _roles(folder, config, added)
    return {
        "name": folder.name,
        "hash": files.sha256_file(folder / TOKENIZER),
        "vocab_size": max(library.get_vocab(with_added_tokens=True).values()) + 1,
        "pre_tokenizer": pre_tokenizer,
        "add_bos": _adds_bos(folder, added, roles["bos"]),
        "roles": roles,
        "specials": _specials(added, template_of(folder)),
    }


def template_of(folder: Path) -> str | None:
    """The chat template: `chat_template.jinja`, else the configuration's. Raises UserError where the two differ."""
    path = folder / TEMPLATE
    try:
        beside = path.read_text(encoding="utf-8") if path.is_file() else None
    except UnicodeDecodeError as error:
        raise UserError("the chat template is no UTF-8", where=path, found=error, expected="UTF-8 text") from error
    inside = files.read_json(folder / CONFIG).get("chat_template") if (folder / CONFIG).is_file() else None
    if isinstance(inside, list):
        inside = next((entry["template"] for entry in inside if entry.get("name") == "default"), None)
    if beside is not None and inside is not None and beside != inside:
        raise UserError(
            "two different chat templates", where=path, found=f"another text than {CONFIG}'s chat_template",
            expected="one template: remove one of the two",
        )  # fmt: skip
    return inside if beside is None else beside


def _refuse_stripping(folder: Path, added: dict[str, dict]) -> None:
    for text, token in added.items():
        if on := [flag for flag in _STRIPS if token.get(flag)]:
            raise IntegrityError(
                "an added token takes the blanks around it, or counts as a whole word only; llama.cpp does neither",
                where=folder / TOKENIZER, found=f"{text!r} with {', '.join(on)}", expected="added tokens without them",
            )  # fmt: skip


def _require_own_ids(folder: Path, library: "tokenizers.Tokenizer", added: dict[str, dict]) -> None:
    for text, token in added.items():
        if library.token_to_id(text) != token["id"]:
            raise IntegrityError(
                "an added token has another id than its file says", where=folder / TOKENIZER,
                found=f"{library.token_to_id(text)} for {text!r}", expected=token["id"],
            )  # fmt: skip


def _require_round_trip(folder: Path, library: "tokenizers.Tokenizer") -> None:
    decoded = library.decode(library.encode(_PROBE, add_special_tokens=False).ids, skip_special_tokens=False)
    if decoded != _PROBE:
        raise IntegrityError(
            "the tokenizer does not give text back as it was", where=folder / TOKENIZER, found=repr(decoded),
            expected=repr(_PROBE),
        )  # fmt: skip


def _roles(folder: Path, config: dict, added: dict[str, dict]) -> dict[str, str | None]:
    roles = {}
    for role in ROLES:
        entry = config.get(f"{role}_token")
        roles[role] = text = entry.get("content") if isinstance(entry, dict) else entry
        if (text is None and role == "eos") or (text is not None and not (isinstance(text, str) and text in added)):
            raise UserError(
                f"the tokenizer has no {role.upper()}", where=f"{folder / CONFIG}: {role}_token", found=repr(text),
                expected=f"the text of an added token of {TOKENIZER}",
            )  # fmt: skip
    return roles


def _adds_bos(folder: Path, added: dict[str, dict], bos: str | None) -> bool:
    """Whether the post-processor puts BOS in front, by trying it. Raises IntegrityError where it adds anything else."""
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
    bare, whole = (library.encode("a", add_special_tokens=adding).ids for adding in (False, True))
    if whole == bare:
        return False
    if bos is not None and whole == [added[bos]["id"], *bare]:
        return True
    raise IntegrityError(
        "the tokenizer's post-processor adds other tokens than BOS in front", where=folder / TOKENIZER,
        found=f"{whole} for 'a'", expected=f"{bare}, or BOS and {bare}",
    )  # fmt: skip


def _specials(added: dict[str, dict], template: str | None) -> dict[str, int]:
    """Tokens that steer: those flagged special, and those that the template writes."""
    return {
        text: token["id"] for text, token in added.items() if token["special"] or (template and text in template)
    }  # fmt: skip
