"""Which linear layers of a model get an adapter: found in the model itself, whatever its family calls them.

A wrapper that holds exactly one linear stands for it, by its own name too. Towers for images and sound are passed over,
and so is the head, unless it is named. What matches nothing is an error that lists what there is.
"""

import re

import torch
from torch import nn

from training.core.errors import UserError

ATTENTION = "attention"
ALL_LINEAR = "all-linear"
_TOWER = re.compile(r"vision|visual|audio|image|speech", re.IGNORECASE)
_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)


def inner_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer but the head, by its whole name, towers included."""
    head = model.get_output_embeddings()
    inside = set() if head is None else {id(module) for module in head.modules()}
    return {name: one for name, one in model.named_modules() if is_linear(one) and id(one) not in inside}


def is_linear(module: nn.Module) -> bool:
    """Whether a module is one matrix that multiplies: torch's, bitsandbytes', or transformers' transposed one."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def features(module: nn.Module) -> tuple[int, int]:
    """Width in and out of a layer."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return tuple(module.weight.shape)


def find(model: nn.Module, wanted: str | tuple[str, ...]) -> list[str]:
    """The whole names of the layers that get an adapter, in the model's order.

    Raises UserError where nothing matches, and for a model that has an adapter already, ours or PEFT's.
    """
    _require_bare(model)
    inner = {name: one for name, one in inner_linears(model).items() if not _TOWER.search(name)}
    if wanted == ALL_LINEAR:
        found = list(inner)
    elif wanted == ATTENTION:
        found = [name for name in inner if _is_attention(model, name)]
    else:
        head = {name: one for name, one in model.named_modules() if is_linear(one) and not _TOWER.search(name)}
        by_target = {target: _named(model, head, target) for target in wanted}
        if unknown := [target for target, names in by_target.items() if not names]:
            _refuse(", ".join(unknown), head)
        chosen = {name for names in by_target.values() for name in names}
        found = [name for name in head if name in chosen]
    if not found:
        _refuse(wanted, inner)
    return found


def _require_bare(model: nn.Module) -> None:
    """A second adapter would be put on the factors of the first, or in its place."""
    wrapped = [name for name, one in model.named_modules() if hasattr(one, "lora_A")]
    if wrapped:
        raise UserError(
            "the model has an adapter already", where="lora.targets",
            found=f"one on {wrapped[0]}, {len(wrapped)} in all",
            expected="a base without one; lora.from goes on from an adapter",
        )  # fmt: skip


def _refuse(wanted: object, there: dict[str, nn.Module]) -> None:
    leaves = sorted({_own_name(name) for name in there})
    raise UserError(
        "a LoRA target matches no layer", where="lora.targets", found=wanted,
        expected=f"all-linear, attention, or some of: {', '.join(leaves) or 'nothing: the model has no linear layer'}",
    )  # fmt: skip


def _own_name(name: str) -> str:
    return name.rpartition(".")[2]


def _named(model: nn.Module, linears: dict[str, nn.Module], target: str) -> list[str]:
    """Linears of this name, or inside a wrapper of this name that holds no other."""
    found = []
    for name, _ in model.named_modules():
        if name == target or name.endswith(f".{target}"):
            inside = [one for one in linears if one == name or one.startswith(f"{name}.")]
            found += inside if len(inside) == 1 else []
    return found


def _is_attention(model: nn.Module, name: str) -> bool:
    """Whether the block that a linear belongs to is attention: its class or its name says so."""
    owner = name.rpartition(".")[0]
    while owner and sum(map(is_linear, model.get_submodule(owner).modules())) == 1:
        owner = owner.rpartition(".")[0]
    return bool(owner) and bool(
        _ATTENTION.search(type(model.get_submodule(owner)).__name__) or _ATTENTION.search(_own_name(owner))
    )


def suffixes(model: nn.Module, names: list[str]) -> list[str]:
    """The shortest list of names that means exactly these layers: their own names, else whole ones."""
    chosen = set(names)
    short = {_own_name(name) for name in names}
    means = {name for name, _ in model.named_modules() if _own_name(name) in short}
    return sorted(short) if means == chosen else sorted(names)


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module where another was."""
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, module)


def frozen(model: nn.Module) -> None:
    """Train nothing of the model."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
