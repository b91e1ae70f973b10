"""The optimizer: AdamW (Loshchilov and Hutter 2019, decoupled decay), fused where torch has it.

Weight decay applies to matrices alone: gains and biases are not pulled to zero. Parameters keep the order of
`model.named_parameters()`, which is how a checkpoint finds their states again.
"""

import torch

from training.core.errors import UserError
from training.recipe.model import Optimizer


def build(model: torch.nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Make the optimizer of the recipe over the model's trainable parameters. Raises UserError for one not built in."""
    if settings.name != "adamw":
        raise UserError(
            "this optimizer cannot be trained with yet",
            where="optimizer.name",
            found=settings.name,
            expected="adamw",
            next_command="set optimizer.name=adamw",
        )
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=tuple(settings.betas), eps=settings.eps, fused=settings.impl == "fused",
        foreach=settings.impl == "foreach",
    )  # fmt: skip


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def state_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state by `<parameter>/<state>`, for safetensors."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = torch.as_tensor(value).detach().contiguous()
    return tensors


def load_state_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]
) -> None:
    """Put a checkpoint's optimizer state back. Raises KeyError where a parameter has none."""
    remaining = dict(tensors)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        keys = [key for key in remaining if key.rsplit("/", 1)[0] == name]
        if tensors and not keys:
            raise KeyError(f"no optimizer state for {name}")
        optimizer.state[parameter] = {key.rsplit("/", 1)[1]: remaining.pop(key).to(parameter.device) for key in keys}
    if remaining:
        raise KeyError(f"optimizer state for parameters that do not exist: {', '.join(sorted(remaining)[:3])}")
