"""What is exported: weights, alone or an adapter with its base, the tokenizer's folder, and where all of it is from.

A checkpoint or a base of ours is verified by its manifest's hashes before anything is made of it; of a plain Hugging
Face folder (config.json, safetensors, tokenizer) or adapter the hashes are taken here. Weights are read once for both,
and for whether they are numbers; nothing is loaded. Whether the parts fit each other is `checks`' business.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files, store
from training.core.errors import IntegrityError, UserError
from training.export import adapter as adapters
from training.export import turns, weights
from training.export.adapter import Adapter, Merged, MergedTensor
from training.recipe import bases
from training.runs import folder as runs
from training.tokenizer import artifact, huggingface, pretokenizers

if TYPE_CHECKING:
    import tokenizers

KIND, DELTA = "checkpoint", "delta"
CONFIG = "config.json"
TEMPLATE = "chat_template.jinja"
_NUMBER = re.compile(r"\.(\d+)\.")
NotFinite = tuple[tuple[str, str], ...]
"""Where values are no numbers, and how many."""
_EXAMPLE = "make export-gguf CHECKPOINT=latest"
_ORIGIN = (
    "run", "step", "method", "base", "recipe_sha256", "dataset", "tokenizer", "weights_sha256", "merged_from",
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A verified source of an export.

    Args:
        folder: holds `config.json` and the weights; the base's where an adapter stands beside it.
        origin: the manifest's keys, None where there is no such thing.
        not_finite: what of the weights is no number.
    """

    folder: Path
    tokenizer_folder: Path
    origin: dict
    adapter: Adapter | None = None
    not_finite: NotFinite = ()

    @property
    def own_folder(self) -> Path:
        """The folder of what is exported itself: the adapter's where one stands beside a base."""
        return self.folder if self.adapter is None else self.adapter.folder

    @cached_property
    def config(self) -> dict:
        """The configuration of what is exported: an adapter may add rows, or untie a head."""
        config = files.read_json(self.folder / CONFIG)
        config.pop("_name_or_path", None)
        if self.adapter is None:
            return config
        rows = self.tensors[adapters.EMBEDDING].shape[0] if adapters.EMBEDDING in self.tensors else None
        return config | {
            "vocab_size": rows or config["vocab_size"],
            "tie_word_embeddings": self.tensors.is_tied,
        }

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
    def file_tensors(self) -> dict[str, weights.Tensor]:
        """Every tensor of the folder's files by name, without what an adapter does to it."""
        return {one.name: one for path in self.weight_files for one in weights.open_file(path).tensors}

    @property
    def is_configured_tied(self) -> bool:
        """Whether the folder's configuration says that embedding and head are one matrix."""
        return bool(files.read_json(self.folder / CONFIG).get("tie_word_embeddings", False))

    @cached_property
    def tensors(self) -> dict[str, MergedTensor] | Merged:
        """Every tensor of the model by name, the adapter's share in it, in the files' order."""
        if self.adapter is None:
            return {name: MergedTensor(name, tensor) for name, tensor in self.file_tensors.items()}
        return Merged(self.file_tensors, self.adapter, is_tied=self.is_configured_tied)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor by name, in the files' order."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @cached_property
    def num_layers(self) -> int:
        """How many blocks there are, by the numbers in the tensors' names; configurations have many words for it."""
        return 1 + max((int(match[1]) for name in self.shapes if (match := _NUMBER.search(name))), default=-1)

    @cached_property
    def chat_template(self) -> str | None:
        """The template that training used and the converter will write: of several in one list the `default`.

        Raises UserError where it cannot be told which one that is.
        """
        _require_template(self.tokenizer_config.get("chat_template"), self.tokenizer_folder / artifact.CONFIG)
        return huggingface.template_of(self.tokenizer_folder)

    @cached_property
    def encoder(self) -> "tokenizers.Tokenizer":
        """The tokenizer itself, special tokens recognised, as a prompt is encoded."""
        return huggingface.open_library(self.tokenizer_folder / artifact.TOKENIZER, with_bos=True)

    def special_text(self, which: str) -> str | None:
        """The text of the token that `bos`, `eos` or `pad` is."""
        entry = self.tokenizer_config.get(f"{which}_token")
        return entry.get("content") if isinstance(entry, dict) else entry

    def special_id(self, which: str) -> int | None:
        """The id of `bos` or `eos` as the converter finds it: by the token's text, else the configuration's number."""
        added = {token["content"]: token["id"] for token in self.tokenizer_json.get("added_tokens", [])}
        number = added.get(self.special_text(which), self.config.get(f"{which}_token_id"))
        return number if isinstance(number, int) else None

    @cached_property
    def bos_id(self) -> int | None:
        """The id of BOS; that of EOS where the tokenizer has none and puts none in front, lest llama.cpp take id 11."""
        own = self.special_id("bos")
        return self.special_id("eos") if own is None and not self._adds(None) else own

    @cached_property
    def add_bos(self) -> bool:
        """Whether the tokenizer puts BOS in front of a prompt, by trying it."""
        return self._adds(self.special_id("bos"))

    def _adds(self, bos_id: int | None) -> bool:
        whole, bare = (self.encoder.encode("a", add_special_tokens=adding).ids for adding in (True, False))
        return whole != bare if bos_id is None else whole[:1] == [bos_id]

    @cached_property
    def turn_end_id(self) -> int | None:
        """The id of the token that ends an answer by the chat template; None where EOS does, or there is none (B56)."""
        found = turns.end_of_turn(self)
        return None if found == self.special_id("eos") else found

    @property
    def num_parameters(self) -> int:
        return sum(map(prod, self.shapes.values()))

    def input_hashes(self) -> dict:
        """The hash of everything of the checkpoint that enters a GGUF's bytes."""
        names = [artifact.TOKENIZER, artifact.CONFIG, TEMPLATE]
        hashes = {
            name: files.sha256_file(self.tokenizer_folder / name)
            for name in names if (self.tokenizer_folder / name).is_file()
        }  # fmt: skip
        if self.adapter is not None:
            hashes["base"] = self.origin["base"]["weights_sha256"]
            hashes["adapter"] = files.sha256_json(self.adapter.settings)
        return {"weights": self.origin["weights_sha256"], "config": files.sha256_json(self.config), **hashes}


# ---- opening


def open_checkpoint(reference: str, tokenizer: str | None = None, base: str | None = None) -> Checkpoint:
    """Find and verify what is to be exported.

    Args:
        reference: a step folder, a run's id or folder (its best, else its latest; `ID/best`, `ID/latest` and
            `ID/step_000100` say which), a base's name, or a plain folder in Hugging Face's or PEFT's form.
        tokenizer: what a person calls one, for weights without a tokenizer of their own.
        base: a base's name or folder, for an adapter in PEFT's form that names none of ours.
    """
    path = Path(reference)
    if not path.exists() and reference in bases.load():
        return _of_base(reference, tokenizer)
    is_plain = path.is_dir() and not (path / files.MANIFEST).is_file()
    if is_plain and (path / adapters.SETTINGS).is_file():
        return _plain_adapter(path.absolute(), tokenizer, base)
    if is_plain and (path / CONFIG).is_file():
        return _plain(path.absolute(), tokenizer)
    folder = runs.resolve_checkpoint(reference).absolute()
    is_delta = files.read_json(folder / files.MANIFEST).get("kind") == DELTA
    manifest, wrong = verified(folder, DELTA if is_delta else KIND)
    origin = origin_of(manifest)
    if not (folder / adapters.SETTINGS).is_file():
        return _with_tokenizer(folder, _tokenizer_folder(folder, tokenizer), origin, not_finite=wrong)
    beside, more_wrong = _base_of(origin["base"], folder)
    place = _tokenizer_folder(beside if is_delta else folder, tokenizer)
    return _with_tokenizer(beside, place, origin, adapters.open_adapter(folder), wrong + more_wrong)


def origin_of(manifest: dict) -> dict:
    """Where the manifest of a checkpoint, a merged folder or a delta says that it is from; None for what it lacks."""
    origin = {key: manifest.get(key) for key in _ORIGIN}
    if manifest["kind"] == DELTA:
        origin["weights_sha256"] = manifest["files"][adapters.WEIGHTS]["sha256"]
    return origin


def verified(folder: Path, kind: str) -> tuple[dict, NotFinite]:
    """Hold every file of a folder against its manifest; returns it, with the tensors that hold no numbers."""
    manifest, wrong = files.read_manifest(folder, kind), []
    for name, record in manifest["files"].items():
        if not name.endswith(".safetensors") or not (folder / name).is_file():
            files.verify_file(folder / name, record)
            continue
        digest, problem = weights.open_file(folder / name).sweep()
        files.require_digest(folder / name, digest, record)
        wrong += [problem] if problem else []
    return manifest, tuple(wrong)


def _of_base(name: str, tokenizer: str | None) -> Checkpoint:
    found, wrong = _fetched(name)
    origin = dict.fromkeys(_ORIGIN) | {"base": found, "weights_sha256": found["weights_sha256"]}
    folder = bases.find(name).folder.absolute()
    return _with_tokenizer(folder, _tokenizer_folder(folder, tokenizer), origin, not_finite=wrong)


def _fetched(name: str) -> tuple[dict, NotFinite]:
    """A fetched base, every byte verified: the record that manifests hold of it, and what is no number."""
    wrong: list[tuple[str, str]] = []

    def verify(folder: Path, kind: str) -> dict:
        manifest, found = verified(folder, kind)
        wrong.extend(found)
        return manifest

    manifest = bases.find(name).require(verify)
    return {key: manifest[key] for key in ("name", "revision", "weights_sha256")}, tuple(wrong)


def _base_of(claimed: dict | None, folder: Path) -> tuple[Path, NotFinite]:
    """The folder of the base that an adapter's manifest names. Raises where it is not here, or is another one."""
    if not claimed:
        raise IntegrityError("an adapter that names no base", where=folder, found="nothing", expected="a base by hash")
    found, wrong = _fetched(claimed["name"])
    if found["weights_sha256"] != claimed["weights_sha256"]:
        raise IntegrityError(
            "the base is not the one that the adapter was trained on", where=bases.find(claimed["name"]).folder,
            found=f"weights {files.short(found['weights_sha256'])}", expected=files.short(claimed["weights_sha256"]),
        )  # fmt: skip
    return bases.find(claimed["name"]).folder.absolute(), wrong


def _require_template(inside: object, where: Path) -> None:
    """Raise UserError for what is neither one template nor a list of them with a default, as older folders have it."""
    alone = [{"name": "default", "template": "" if inside is None else inside}]
    entries = inside if isinstance(inside, list) else alone
    read = [one.get("name") for one in entries if isinstance(one, dict) and isinstance(one.get("template"), str)]
    if len(read) != len(entries) or read.count("default") != 1:
        raise UserError(
            "it cannot be told which chat template is meant", where=f"{where}: chat_template", found=repr(inside)[:120],
            expected="one text, or a list of {name, template} of which one is named default",
        )  # fmt: skip


def _swept(folder: Path) -> tuple[str, NotFinite]:
    """The hash of a plain folder's weights, and what of them is no number."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(
            "the folder holds no weights", where=folder, found="no .safetensors file",
            expected="a checkpoint, or a Hugging Face folder with safetensors", next_command=_EXAMPLE,
        )  # fmt: skip
    found = {path.name: weights.open_file(path).sweep() for path in paths}
    hashes = {name: digest for name, (digest, _) in found.items()}
    wrong = tuple(problem for _, problem in found.values() if problem)
    return files.sha256_together(hashes), wrong


def _plain(folder: Path, tokenizer: str | None) -> Checkpoint:
    weights_sha256, wrong = _swept(folder)
    origin = dict.fromkeys(_ORIGIN) | {"weights_sha256": weights_sha256}
    return _with_tokenizer(folder, _tokenizer_folder(folder, tokenizer), origin, not_finite=wrong)


def _plain_adapter(folder: Path, tokenizer: str | None, base: str | None) -> Checkpoint:
    beside = adapters.open_adapter(folder)
    named = base or beside.settings.get("base_model_name_or_path")
    if named in bases.load():
        record, wrong = _fetched(named)
        base_folder = bases.find(named).folder.absolute()
    elif base and (Path(base) / CONFIG).is_file():
        base_folder = Path(base).absolute()
        digest, wrong = _swept(base_folder)
        record = {"name": base_folder.name, "revision": None, "weights_sha256": digest}
    else:
        raise UserError(
            "the base of the adapter is not known", where=folder / adapters.SETTINGS, found=named,
            expected=f"by --base a name of bases.yaml ({', '.join(bases.load())}), or a base's folder",
        )  # fmt: skip
    weights_sha256, more_wrong = _swept(folder)
    place = _tokenizer_folder(folder if _has_tokenizer(folder) else base_folder, tokenizer)
    origin = dict.fromkeys(_ORIGIN) | {"method": "lora", "base": record, "weights_sha256": weights_sha256}
    return _with_tokenizer(base_folder, place, origin, beside, wrong + more_wrong)


def _has_tokenizer(folder: Path) -> bool:
    return (folder / artifact.TOKENIZER).is_file() and (folder / artifact.CONFIG).is_file()


def _tokenizer_folder(folder: Path, tokenizer: str | None) -> Path:
    if tokenizer is not None:
        return artifact.find(tokenizer).folder
    if _has_tokenizer(folder):
        return folder
    raise UserError(
        "the checkpoint holds weights only",
        where=folder,
        found=f"no {artifact.TOKENIZER} with its {artifact.CONFIG}",
        expected="the tokenizer that it was trained with, by --tokenizer name@hash",
    )


def _with_tokenizer(
    folder: Path, tokenizer_folder: Path, origin: dict, beside: Adapter | None = None, not_finite: NotFinite = ()
) -> Checkpoint:
    """Complete `origin` by the tokenizer as it is in its folder, and hold it against what the manifest says."""
    tokenizer_json = files.read_json(tokenizer_folder / artifact.TOKENIZER)
    digest = files.sha256_file(tokenizer_folder / artifact.TOKENIZER)
    named = origin["tokenizer"] or {}
    if named.get("hash", digest) != digest:
        raise IntegrityError(
            "not the tokenizer that the checkpoint was trained with",
            where=tokenizer_folder / artifact.TOKENIZER,
            found=f"sha256 {files.short(digest)}",
            expected=store.reference_to(named),
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
    return Checkpoint(folder, tokenizer_folder, origin | {"tokenizer": tokenizer}, beside, not_finite)
