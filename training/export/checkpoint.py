"""What is exported: the folder of weights, the folder of the tokenizer, and where both come from.

A checkpoint of ours is verified by its manifest's hashes before anything is read from it; a plain Hugging Face folder
(config.json, safetensors, tokenizer) has no chain, and its hashes are taken here. Nothing is loaded: shapes come from
the headers of the safetensors files. Whether the parts fit each other is `checks`' business.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files
from training.core.errors import IntegrityError, UserError
from training.runs import folder as runs
from training.tokenizer import artifact, huggingface, pretokenizers

if TYPE_CHECKING:
    import tokenizers

KIND = "checkpoint"
CONFIG = "config.json"
TEMPLATE = "chat_template.jinja"
_EXAMPLE = "make export-gguf CHECKPOINT=run-id"


@dataclass(frozen=True)
class Checkpoint:
    """A verified source of an export. `origin` holds the manifest's keys, None where there is no such thing."""

    folder: Path
    tokenizer_folder: Path
    origin: dict

    @cached_property
    def config(self) -> dict:
        return files.read_json(self.folder / CONFIG)

    @cached_property
    def tokenizer_json(self) -> dict:
        return files.read_json(self.tokenizer_folder / artifact.TOKENIZER)

    @cached_property
    def tokenizer_config(self) -> dict:
        return files.read_json(self.tokenizer_folder / artifact.CONFIG)

    @cached_property
    def weight_files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor by name, in the files' order."""
        return {name: shape for path in self.weight_files for name, shape in _header(path).items()}

    @cached_property
    def chat_template(self) -> str | None:
        """The template that the converter will write: the configuration's, else the file's."""
        path = self.tokenizer_folder / TEMPLATE
        return self.tokenizer_config.get("chat_template") or (path.read_text() if path.is_file() else None)

    @cached_property
    def encoder(self) -> "tokenizers.Tokenizer":
        """The tokenizer itself, special tokens recognised, as a prompt is encoded."""
        return huggingface.open_library(self.tokenizer_folder / artifact.TOKENIZER, with_bos=True)

    def special_id(self, which: str) -> int | None:
        """The id of `bos` or `eos` as the converter finds it: by the token's text, else the configuration's number."""
        entry = self.tokenizer_config.get(f"{which}_token")
        text = entry.get("content") if isinstance(entry, dict) else entry
        added = {token["content"]: token["id"] for token in self.tokenizer_json.get("added_tokens", [])}
        number = added.get(text, self.config.get(f"{which}_token_id"))
        return number if isinstance(number, int) else None

    @cached_property
    def add_bos(self) -> bool:
        """Whether the tokenizer puts BOS in front of a prompt, by trying it."""
        return self.encoder.encode("a").ids[:1] == [self.special_id("bos")]

    @property
    def num_parameters(self) -> int:
        total = 0
        for shape in self.shapes.values():
            count = 1
            for size in shape:
                count *= size
            total += count
        return total

    def input_hashes(self) -> dict:
        """The hash of everything of the checkpoint that enters a GGUF's bytes."""
        settings = {name: files.sha256_file(self.tokenizer_folder / name) for name in self._settings_names()}
        return {"weights": self.origin["weights_sha256"], "config": files.sha256_file(self.folder / CONFIG), **settings}

    def _settings_names(self) -> list[str]:
        names = [artifact.TOKENIZER, artifact.CONFIG, TEMPLATE]
        return [name for name in names if (self.tokenizer_folder / name).is_file()]


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise IntegrityError("not a safetensors file", where=path, found=error) from error


def open_checkpoint(reference: str, tokenizer: str | None = None) -> Checkpoint:
    """Find and verify what is to be exported.

    Args:
        reference: a step folder, a run's id or folder (its best, else its latest), or a plain Hugging Face folder.
        tokenizer: an artifact's `name@hash` or a folder, for weights without a tokenizer of their own.
    """
    path = Path(reference)
    if (path / CONFIG).is_file() and not (path / files.MANIFEST).is_file():
        return _plain(path.absolute(), _tokenizer_folder(path.absolute(), tokenizer))
    folder = runs.resolve_checkpoint(reference).absolute()
    manifest = files.verify_manifest(folder, KIND)
    keys = ("run", "step", "method", "base", "recipe_sha256", "dataset", "tokenizer", "weights_sha256")
    return _with_tokenizer(folder, _tokenizer_folder(folder, tokenizer), {key: manifest.get(key) for key in keys})


def _plain(folder: Path, tokenizer_folder: Path) -> Checkpoint:
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise UserError(
            "the folder holds no weights", where=folder, found="no .safetensors file",
            expected="a checkpoint, or a Hugging Face folder with safetensors", next_command=_EXAMPLE,
        )  # fmt: skip
    hashes = {path.name: files.sha256_file(path) for path in weights}
    weights_sha256 = next(iter(hashes.values())) if len(hashes) == 1 else files.sha256_json(hashes)
    origin = dict.fromkeys(("run", "step", "method", "base", "recipe_sha256", "dataset", "tokenizer"))
    return _with_tokenizer(folder, tokenizer_folder, origin | {"weights_sha256": weights_sha256})


def _tokenizer_folder(folder: Path, tokenizer: str | None) -> Path:
    if tokenizer is not None:
        plain = (Path(tokenizer) / artifact.TOKENIZER).is_file()
        return Path(tokenizer).absolute() if plain else artifact.resolve(tokenizer).absolute()
    if (folder / artifact.TOKENIZER).is_file() and (folder / artifact.CONFIG).is_file():
        return folder
    raise UserError(
        "the checkpoint holds weights only",
        where=folder,
        found=f"no {artifact.TOKENIZER} with its {artifact.CONFIG}",
        expected="the tokenizer that it was trained with",
        next_command=f'make export-gguf CHECKPOINT={folder} ARGS="--tokenizer name@hash"',
    )


def _with_tokenizer(folder: Path, tokenizer_folder: Path, origin: dict) -> Checkpoint:
    """Complete `origin` by the tokenizer as it is in its folder, and hold it against what the manifest says."""
    tokenizer_json = files.read_json(tokenizer_folder / artifact.TOKENIZER)
    digest = files.sha256_file(tokenizer_folder / artifact.TOKENIZER)
    named = origin["tokenizer"] or {}
    if named.get("hash", digest) != digest:
        raise IntegrityError(
            "not the tokenizer that the checkpoint was trained with",
            where=tokenizer_folder / artifact.TOKENIZER,
            found=f"sha256 {files.short(digest)}",
            expected=f"{named['name']}@{files.short(named['hash'])}",
        )
    pre_tokenizer = pretokenizers.name_of(tokenizer_json)
    if named.get("pre_tokenizer", pre_tokenizer) != pre_tokenizer:
        raise IntegrityError(
            "the manifest's pre-tokenizer is not the tokenizer's own",
            where=folder / files.MANIFEST,
            found=named["pre_tokenizer"],
            expected=f"{pre_tokenizer}, the name of its configuration",
        )
    name = named.get("name", tokenizer_folder.name)
    tokenizer = {"name": name, "hash": digest, "pre_tokenizer": pre_tokenizer, "add_bos": named.get("add_bos")}
    return Checkpoint(folder, tokenizer_folder, origin | {"tokenizer": tokenizer})
