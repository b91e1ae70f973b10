"""LoRA and QLoRA: an adapter is trained beside a frozen base, which QLoRA holds in NF4."""

from __future__ import annotations

from training.core import files, paths
from training.core.errors import UserError
from training.objectives import adapter_source
from training.objectives.tuning import Tuning
from training.recipe import bases
from training.recipe.load import Resolved
from training.recipe.reading import Origin


class Adapters(Tuning):
    """Trains an adapter on a frozen base."""

    def settled(self, resolved: Resolved) -> Resolved:
        """The recipe with the shape of the adapter that it goes on from."""
        reference = resolved.recipe.lora.from_
        if reference is None:
            return resolved
        source = adapter_source.find(reference)
        base = bases.find(resolved.recipe.model.base).require(files.read_manifest)  # its bytes are verified on loading
        if source.base_sha256 not in (None, base["weights_sha256"]):
            raise UserError(
                "the adapter was trained on another base", where="lora.from", found=files.short(source.base_sha256),
                expected=f"{base['name']}, {files.short(base['weights_sha256'])}",
            )  # fmt: skip
        where = Origin(f"the adapter in {paths.for_people(source.folder)}")
        return resolved.changed({f"lora.{name}": value for name, value in source.values.items()}, where)

    def begin(self, recipe, trainee):
        """Take the weights of the adapter that the recipe goes on from."""
        if recipe.lora.from_ is None:
            return {}
        folder = adapter_source.find(recipe.lora.from_).folder
        trainee.load(folder)
        return {"from": files.sha256_file(folder / trainee.weights_file)}

    def build(self, recipe, tokenizer, device, dtype):
        import torch

        from training.objectives import added_rows, base

        model, record = base.load(recipe, tokenizer, device, dtype)
        torch.manual_seed(recipe.seeds.train)
        added = added_rows.num_added(recipe, tokenizer)
        return self._adapted(recipe, model, record, (tokenizer.vocab_size - added, added))

    def imagine(self, recipe, device, dtype):
        from training.objectives import architecture

        model = architecture.blank(recipe, device, dtype)
        if recipe.memory.weights == "nf4":
            from training.objectives import nf4

            nf4.pack(model, device, dtype)
        return self._adapted(recipe, model, None, (0, 0))

    def _adapted(self, recipe, model, record, added: tuple[int, int]):
        from training.objectives import adapter, trained_rows

        dtype = adapter.DTYPES[recipe.memory.adapter_dtype]
        names = adapter.attach(model, recipe.lora, dtype)
        rows = trained_rows.TrainedRows(model, *added, dtype) if added[1] else None
        quantization = "nf4" if recipe.memory.weights == "nf4" else None
        return adapter.AdapterTrainee(model, record, recipe.lora, names, rows, quantization)


METHODS = {"lora": Adapters("lora"), "qlora": Adapters("qlora")}
