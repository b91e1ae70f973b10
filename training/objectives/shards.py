"""Tensors of which a process may hold a part alone (torch's DTensor, under FSDP2): made whole, and filled from wholes.

Names, shapes and types are those of the whole, so that a checkpoint knows nothing of how many processes wrote it.
"""

import torch

from training.objectives.contract import Tensors


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor; every process that holds a part has to ask."""
    return tensor.full_tensor() if _is_part(tensor) else tensor


def gathered(tensors: Tensors, *, keeps: bool) -> Tensors:
    """Whole copies in host memory, made one after another; nothing where this process need not keep them."""
    found = {}
    for name, tensor in tensors.items():
        one = whole(tensor)
        if keeps:
            found[name] = one.clone() if one is tensor and one.device.type == "cpu" else one.to("cpu")
    return found


@torch.no_grad()
def fill(own: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a whole tensor into this process's own, or the part of it that is this process's."""
    if _is_part(own):
        from torch.distributed.tensor import distribute_tensor

        tensor = tensor.to(own.device, own.dtype)
        tensor = distribute_tensor(tensor, own.device_mesh, own.placements, src_data_rank=None)
    own.copy_(tensor)


def _is_part(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a run without shards need not import DTensor
