"""Distillation: a student is trained towards a teacher's recorded probabilities and the data's own tokens.

Owns what the method asks of a recipe. How the student is made and trained is another method's: an adapter's where the
recipe has a `lora` section, pretraining's where the model is an architecture, else full tuning's. Validation is the
plain loss on the data's own tokens, so it compares with any other method's and needs no teacher.
"""

from __future__ import annotations

from training.core import files
from training.core.errors import TrainyardError, UserError
from training.core.report import again
from training.data import dataset as datasets
from training.data import tokens
from training.data.dataset import Dataset
from training.data.supervision import Settings
from training.objectives import registry, teaching
from training.objectives.method import Method
from training.recipe.load import Resolved
from training.recipe.model import Recipe
from training.recipe.reading import Origin
from training.tokenizer import artifact
from training.tokenizer.artifact import Tokenizer


def record_command(resolved: Resolved) -> str:
    """The command that records a teacher for a recipe: the student's own base, in place of another."""
    recipe = resolved.recipe
    who = recipe.model.base or "smollm2-135m-instruct"
    values = f"data.dataset={recipe.data.dataset} distill.top_k={recipe.sections['distill']['top_k']}"
    return f'make teacher-record CONFIG={resolved.path} TEACHER={who} ARGS="{values}"'


class Distill(Method):
    """Trains a student on a teacher's record."""

    def _student(self, recipe: Recipe) -> Method:
        if recipe.model.arch is not None:
            return registry.of("pretrain")
        if recipe.lora is None:
            return registry.of("full")
        return registry.of("qlora" if recipe.memory.weights == "nf4" else "lora")

    def settled(self, resolved: Resolved) -> Resolved:
        """The recipe with the one record that its teacher's name means."""
        recipe = resolved.recipe
        if recipe.lora is not None:
            resolved = self._student(recipe).settled(resolved)
        dataset = datasets.load(datasets.resolve(recipe.data.dataset))
        self.require_dataset(recipe, dataset)
        shards = tokens.folder_of(dataset, artifact.of_recipe(recipe), Settings.of(recipe.data))
        wanted = recipe.sections["distill"]
        folder = teaching.find(shards, wanted["teacher"], wanted["top_k"], record_command(resolved))
        named = teaching.reference(folder, files.read_manifest(folder, teaching.KIND))
        return resolved.changed({"distill.teacher": named}, Origin("the record that was found"))

    def problems(self, resolved: Resolved) -> list[TrainyardError]:
        recipe, found = resolved.recipe, []
        if recipe.data.packing:
            found.append(
                UserError(
                    "what a teacher says is kept a record at a time, so nothing is packed",
                    where=resolved.origins.get("data.packing"), found="data.packing: true",
                    expected="data.packing: false",
                    next_command=again("data.packing=false"),
                )
            )  # fmt: skip
        return found + self._student(recipe).problems(resolved)

    def require_dataset(self, recipe: Recipe, dataset: Dataset) -> None:
        if dataset.form == tokens.TEXT_FORM:
            raise UserError(
                "distillation reads records with answers, each a row of its own", where=dataset.reference,
                found="records of the form text", expected='{"messages"} or {"prompt", "completion"}',
                next_command="make data-prepare INPUT=my.jsonl",
            )  # fmt: skip

    def require_tokenizer(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self._student(recipe).require_tokenizer(recipe, tokenizer)
        if (top_k := recipe.sections["distill"]["top_k"]) > tokenizer.vocab_size:
            raise UserError(
                "there are fewer tokens than are to be recorded", where="distill.top_k", found=top_k,
                expected=f"at most {tokenizer.vocab_size}, the entries of {tokenizer.name}",
                next_command=again("distill.top_k=8"),
            )  # fmt: skip

    def rows(self, recipe, split, tokenizer):
        if split.split != teaching.SPLIT:
            return super().imagined_rows(recipe, split, tokenizer)  # the plain loss
        wanted = recipe.sections["distill"]
        folder = teaching.find(split.folder, wanted["teacher"], wanted["top_k"])
        return self._distilled(recipe, split, tokenizer, teaching.Record(folder, split))

    def imagined_rows(self, recipe, split, tokenizer):
        from training.objectives.distill_rows import MadeUp

        made_up = MadeUp(split, recipe.sections["distill"]["top_k"], len(tokenizer.text_bytes_V))
        return self._distilled(recipe, split, tokenizer, made_up)

    def _distilled(self, recipe, split, tokenizer, said):
        from training.objectives.distill_rows import DistilledRows

        wanted = recipe.sections["distill"]
        return DistilledRows(
            split, tokenizer.text_bytes_V, said, alpha=wanted["alpha"], temperature=wanted["temperature"],
            **self.row_settings(recipe, tokenizer),
        )  # fmt: skip

    def build(self, recipe, tokenizer, device, dtype):
        return self._student(recipe).build(recipe, tokenizer, device, dtype)

    def begin(self, recipe, trainee):
        return {"teacher": recipe.sections["distill"]["teacher"], **self._student(recipe).begin(recipe, trainee)}

    def imagine(self, recipe, device, dtype):
        return self._student(recipe).imagine(recipe, device, dtype)


METHODS = {"distill": Distill("distill")}
