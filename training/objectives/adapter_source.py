"""An adapter to go on from: a run's, a checkpoint's, or a folder in PEFT's form; what shape it has.

Owns the reading of `adapter_config.json`. It imports no torch: the shape is wanted before memory is planned.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training.core import files
from training.core.errors import UserError
from training.runs.folder import resolve_checkpoint

WEIGHTS = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"
_UNKNOWN = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias", "fan_in_fan_out",
            "layers_to_transform")  # fmt: skip
"""What PEFT may have set that would make the adapter another one than its rank, alpha and targets say."""


@dataclass(frozen=True)
class Source:
    """Where an adapter lies, and what of the recipe it decides."""

    reference: str  # what will mean the same later: `latest` is a run by its id
    folder: Path
    rank: int
    alpha: float
    targets: list[str] | str
    base_sha256: str | None  # of the base's weights, where it is known

    @property
    def values(self) -> dict[str, object]:
        """The keys of the recipe's `lora` section that count as the adapter has them."""
        return {"rank": self.rank, "alpha": self.alpha, "targets": self.targets, "from": self.reference}


def find(reference: str) -> Source:
    """Find an adapter and read its shape. Raises UserError or IntegrityError."""
    folder = Path(reference)
    if not (folder / SETTINGS).is_file():
        folder = resolve_checkpoint(reference)
        reference = folder.parents[1].name if reference == "latest" else reference
    if not (folder / SETTINGS).is_file():
        raise UserError(
            "no adapter lies there", where="lora.from", found=folder, expected=f"a folder with {SETTINGS} and {WEIGHTS}"
        )
    manifest = {}
    if (folder / files.MANIFEST).is_file():
        manifest = files.verify_manifest(folder, "checkpoint")
    settings = files.read_json(folder / SETTINGS)
    strange = [key for key in _UNKNOWN if settings.get(key)]
    if settings.get("peft_type") != "LORA" or strange or settings.get("bias", "none") != "none":
        found = ", ".join(f"{key}: {settings[key]}" for key in strange) or settings.get("peft_type")
        raise UserError(
            "an adapter of another kind", where=folder / SETTINGS, found=found,
            expected="a plain LoRA: two factors a layer, no biases, nothing else trained",
        )  # fmt: skip
    try:
        rank, alpha, wanted = int(settings["r"]), float(settings["lora_alpha"]), settings["target_modules"]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError("no shape of an adapter", where=folder / SETTINGS, found=error, expected="r, lora_alpha and "
                        "target_modules") from error  # fmt: skip
    return Source(
        reference, folder, rank, alpha, _targets(folder, wanted), (manifest.get("base") or {}).get("weights_sha256")
    )


def _targets(folder: Path, wanted: object) -> list[str] | str:
    if wanted == "all-linear":
        return wanted
    if isinstance(wanted, list) and wanted and all(isinstance(name, str) for name in wanted):
        return sorted(wanted)
    raise UserError("targets that are no list of names", where=folder / SETTINGS, found=wanted, expected="a list")
