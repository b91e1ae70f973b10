"""The manifest of a base's tokenizer, told by its own files: roles, control tokens, the pre-tokenizer's name.

A pre-tokenizer that llama.cpp is not known to have leaves the name empty: the base can be trained and not be exported.
"""

from pathlib import Path

from training.core import files
from training.core.errors import IntegrityError, UserError
from training.core.log import say
from training.tokenizer import artifact, pretokenizers

_ROLES = ("bos", "eos", "pad")


def describe(folder: Path, name: str) -> dict:
    """The keys of `tokenizer_manifest.json`; the chat template gets a file of its own. Raises UserError for no EOS."""
    import tokenizers

    content, config = files.read_json(folder / artifact.TOKENIZER), files.read_json(folder / artifact.CONFIG)
    _write_template(folder, config)
    added = {token["content"]: token for token in content.get("added_tokens", [])}
    library = tokenizers.Tokenizer.from_file(str(folder / artifact.TOKENIZER))
    roles = {role: _text(config.get(f"{role}_token")) for role in _ROLES}
    if roles["eos"] not in added:
        raise UserError(
            "the base's tokenizer has no EOS", where=folder / artifact.CONFIG, found=roles["eos"],
            expected="the text of an added token",
        )  # fmt: skip
    template = (folder / artifact.TEMPLATE).read_text() if (folder / artifact.TEMPLATE).is_file() else ""
    controls = {text for text, token in added.items() if token["special"] or text in template}
    return {
        "name": name, "hash": files.sha256_file(folder / artifact.TOKENIZER),
        "vocab_size": max(library.get_vocab(with_added_tokens=True).values()) + 1,
        "pre_tokenizer": _pre_tokenizer(content), "add_bos": _adds_bos(library, added, roles["bos"]),
        "roles": {role: text if text in added else None for role, text in roles.items()},
        "specials": {text: added[text]["id"] for text in added if text in controls},
    }  # fmt: skip


def _text(entry: object) -> str | None:
    return entry.get("content") if isinstance(entry, dict) else entry


def _write_template(folder: Path, config: dict) -> None:
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((one["template"] for one in template if one.get("name") == "default"), None)
    if template and not (folder / artifact.TEMPLATE).is_file():
        files.write_text(folder / artifact.TEMPLATE, template)


def _pre_tokenizer(content: dict) -> str | None:
    try:
        return pretokenizers.name_of(content)
    except IntegrityError as error:
        say(f"warning: the base can be trained and not be exported: {error.what}")
        return None


def _adds_bos(library, added: dict[str, dict], bos: str | None) -> bool:
    return bos in added and library.encode("a").ids[:1] == [added[bos]["id"]]
