"""The base of a recipe as a model: every byte verified, in the class that its configuration names, looked at once.

Owns how a fetched base becomes a module, and what is asked of it before it is trained: finite numbers, a head that can
be applied alone (else the model is marked for its own logits), and packed records that do not see each other.
"""

from pathlib import Path

import torch

from training.core.errors import UserError
from training.core.report import again
from training.objectives import added_rows, architecture
from training.objectives.loss import WHOLE_LOGITS, logits_of
from training.recipe import bases
from training.recipe.model import Recipe
from training.tokenizer.artifact import Tokenizer

_TOLERANCE = 1e-3
"""Of logits, relative to the largest: far above rounding in 16 bits, far below another computation."""


def load(
    recipe: Recipe, tokenizer: Tokenizer, device: torch.device, dtype: torch.dtype
) -> tuple[torch.nn.Module, dict]:  # fmt: skip
    """Load the base in a type, its linears in NF4 where the recipe says so; with the record that manifests hold of it.

    Raises UserError where it is not fetched or cannot be trained so, IntegrityError where its bytes have changed.
    """
    base = bases.find(recipe.model.base)
    manifest = base.require()
    with architecture.attention_errors(recipe):
        model = architecture.checkpointed(opened(base.folder, dtype, recipe.memory.attention), recipe)
    _require_finite(model, base)
    added_rows.grow(model, tokenizer)
    if recipe.memory.weights == "nf4":
        from training.objectives import nf4

        nf4.pack(model, device, dtype, nf4.without(recipe, dtype))
    model.to(device)
    look(model, packs=recipe.data.packing)
    return model, record(base, manifest)


def record(base: bases.Base, manifest: dict) -> dict:
    """What manifests hold of a base."""
    return {"name": base.name, "revision": manifest["revision"], "weights_sha256": manifest["weights_sha256"]}


def opened(folder: Path, dtype: torch.dtype, attention: str) -> torch.nn.Module:
    """Open a Hugging Face folder in the class that its configuration names."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    named = (getattr(transformers, name, None) for name in config.architectures or ())
    kind = next((one for one in named if one is not None), transformers.AutoModelForCausalLM)
    return kind.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation=attention, local_files_only=True, use_safetensors=True
    )


def _require_finite(model: torch.nn.Module, base: bases.Base) -> None:
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise UserError(
                "the base holds numbers that are not finite", where=base.folder, found=name,
                expected="finite weights; a smaller memory.weights type may have overflowed",
            )  # fmt: skip


def look(model: torch.nn.Module, *, packs: bool) -> None:
    """Run a few tokens: mark a model whose head cannot be applied alone, refuse to pack where records would leak."""
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        if not _head_is_enough(model):
            setattr(model, WHOLE_LOGITS, True)
        if packs and _leaks(model):
            raise UserError(
                "packed records see each other in this model", where="data.packing", found=type(model).__name__,
                expected="data.packing: false", next_command=again("data.packing=false"),
            )  # fmt: skip
    model.train(was_training)


def _ids(model: torch.nn.Module, seed: int, length: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    num_rows = model.get_input_embeddings().num_embeddings
    return torch.randint(0, num_rows, (1, length), generator=generator).to(model.device)


def _head_is_enough(model: torch.nn.Module) -> bool:
    ids_BT = _ids(model, 0)
    whole = model(input_ids=ids_BT, use_cache=False).logits
    own = logits_of(model)(model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state)
    return _same(own, whole)


def _leaks(model: torch.nn.Module) -> bool:
    """Whether the second record of a row changes with the first (B28)."""
    positions_BT = torch.arange(6, device=model.device).repeat(2)[None]
    seen = [
        model.base_model(
            input_ids=torch.cat([_ids(model, seed), _ids(model, 0)], 1), position_ids=positions_BT, use_cache=False
        ).last_hidden_state[:, 6:]
        for seed in (1, 2)
    ]  # fmt: skip
    return not _same(*seen)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= _TOLERANCE * other.abs().max())
