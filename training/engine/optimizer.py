"""The optimizer: AdamW (Loshchilov and Hutter 2019, decoupled decay), fused where torch has it, or in 8 bits.

Weight decay applies to matrices alone: gains and biases are not pulled to zero. Parameters keep the order of
`model.named_parameters()`, which is how a checkpoint finds their states again. 8-bit states (Dettmers et al. 2022,
arXiv 2110.02861) are bitsandbytes'; paged ones, which the GPU's driver moves to the host, need CUDA.
"""

import torch

from training.core.errors import MachineError
from training.core.report import again
from training.objectives import shards
from training.recipe.model import Optimizer

Tensors = dict[str, torch.Tensor]
EIGHT_BIT = ("adamw8bit", "paged_adamw8bit")
_CONSTANT = ("qmap1", "qmap2")
"""Of bitsandbytes' states, what every parameter shares and no step changes."""


def build(model: torch.nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Make the optimizer of the recipe over the model's trainable parameters.

    Raises MachineError for 8-bit states where bitsandbytes cannot hold them.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    common = {"lr": settings.lr, "betas": tuple(settings.betas), "eps": settings.eps}
    if settings.name in EIGHT_BIT:
        return _eight_bit(settings, [group for group in groups if group["params"]], common)
    return torch.optim.AdamW(
        groups, fused=settings.impl == "fused", foreach=settings.impl == "foreach", **common
    )  # fmt: skip


def _eight_bit(settings: Optimizer, groups: list[dict], common: dict) -> torch.optim.Optimizer:
    try:
        import bitsandbytes
    except (ImportError, OSError, RuntimeError) as error:
        raise MachineError(
            "bitsandbytes cannot be used here, so there are no 8-bit states", where="optimizer.name",
            found=str(error)[:200], expected="bitsandbytes with its library for this machine, or adamw",
            next_command=again("optimizer.name=adamw"),
        ) from error  # fmt: skip
    kinds = {"adamw8bit": bitsandbytes.optim.AdamW8bit, "paged_adamw8bit": bitsandbytes.optim.PagedAdamW8bit}
    return kinds[settings.name](groups, **common)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def allocate(optimizer: torch.optim.Optimizer) -> None:
    """Make the states that the first step would make, all zero, so that what follows has the memory of a later step."""
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if optimizer.state.get(parameter):
                continue
            if isinstance(optimizer, torch.optim.AdamW):
                on = {"device": parameter.device} if group["fused"] else {}
                moments = {name: torch.zeros_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, **on), **moments}
            elif hasattr(optimizer, "init_state"):
                optimizer.init_state(group, parameter, number, place)


def state_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's state by `<parameter>/<state>`, for safetensors: its own tensors and not copies."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if key not in _CONSTANT:
                tensors[f"{name}/{key}"] = torch.as_tensor(value).detach()
    return tensors


def load_state_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """Put a checkpoint's optimizer state back. Raises KeyError where it is not that of these parameters."""
    allocate(optimizer)
    own = state_tensors(model, optimizer)
    if tensors and own.keys() != tensors.keys():
        wrong = sorted(own.keys() ^ tensors.keys())
        raise KeyError(f"the optimizer's state is not that of the parameters: {', '.join(wrong[:3])}")
    by_name = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, part = key.rpartition("/")
        state = optimizer.state[by_name[name]]
        if isinstance(state[part], torch.Tensor):
            shards.fill(state[part], value)
        else:  # bitsandbytes counts its steps in a plain number
            state[part] = type(state[part])(value.item())
