"""Unsloth's models under TRL's SFTTrainer, on a CUDA GPU. It has never run here: what it takes and how quick it is are
not measured, and nothing but its refusals is tested.

Source: github.com/unslothai/unsloth, `FastLanguageModel`, release 2026.10.9.
"""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement

from training.calculator import devices, nvml
from training.core.errors import MachineError, TrainyardError, UserError
from training.core.report import again
from training.engine.backends import contract
from training.engine.backends.trl import Trl
from training.recipe import bases


class Unsloth(Trl):
    packages = ("unsloth", "trl", "datasets")

    def problems(self, resolved):
        recipe, where = resolved.recipe, resolved.origins.get
        found = contract.foreign_problems(resolved)
        if recipe.memory.weights not in ("bf16", "nf4"):
            found.append(
                UserError(
                    "backend unsloth holds a base in 4 bits or not quantized", where=where("memory.weights"),
                    found=f"memory.weights: {recipe.memory.weights}", expected="nf4 or bf16",
                )
            )  # fmt: skip
        if not devices.gpus():
            found.append(
                MachineError(
                    "Unsloth's kernels are for CUDA GPUs, and there is none here", where=where("backend"),
                    found=nvml.ask().problem, expected="a CUDA GPU, or backend: trl or native",
                    next_command=again("backend=native"),
                )
            )  # fmt: skip
            return found
        return found + (contract.missing("unsloth", self.packages, again("backend=trl")) or _conflicts())

    def prepare(self):
        import unsloth  # noqa: F401  (it has to come before transformers, which it changes)

    def build(self, recipe, tokenizer, device, dtype):
        import unsloth

        from training.engine.backends import peft_trainee
        from training.objectives import base as opened

        base = bases.find(recipe.model.base)
        record = opened.record(base, base.require())
        is_packed, again = recipe.memory.weights == "nf4", recipe.memory.gradient_checkpointing
        model, _ = unsloth.FastLanguageModel.from_pretrained(
            str(base.folder), max_seq_length=recipe.data.seq_len + 1, dtype=None if is_packed else dtype,
            load_in_4bit=is_packed, full_finetuning=recipe.lora is None, use_gradient_checkpointing=again,
            use_exact_model_name=True, local_files_only=True,
        )  # fmt: skip
        return peft_trainee.of(model, record, recipe, _adapt)


def _adapt(model, settings: dict):
    """PEFT's model by Unsloth's own hand, which puts its kernels in."""
    import unsloth

    return unsloth.FastLanguageModel.get_peft_model(
        model, bias="none", use_gradient_checkpointing=model.is_activation_checkpointing, **settings
    )


def _conflicts() -> list[TrainyardError]:
    """What the Unsloth that is here asks of other packages, where those that are here are not it."""
    told = []
    for text in importlib.metadata.requires("unsloth") or ():
        asked = Requirement(text)
        if asked.marker is not None and not asked.marker.evaluate({"extra": ""}):
            continue
        try:
            there = importlib.metadata.version(asked.name)
        except importlib.metadata.PackageNotFoundError:
            told.append(f"{asked.name}, which is not here")
            continue
        if not asked.specifier.contains(there, prereleases=True):
            told.append(f"{asked.name} {asked.specifier}, and {there} is here")
    if not told:
        return []
    return [
        MachineError(
            f"Unsloth {importlib.metadata.version('unsloth')} does not go with the packages here", where="backend",
            found="it asks for " + "; ".join(told), expected="a release that goes with them, or backend: trl",
            next_command=again("backend=trl"),
        )
    ]  # fmt: skip


BACKEND = Unsloth()
