"""FSDP2: a model whose blocks' weights lie in shards, one a process, and are gathered for the time of a block's passes.

Each block of the model is a unit of its own (torch's `fully_shard`); the rest, embedding, last norm and head, is one
with a root that this file puts around the model. The root's forward pass is the objective's loss: so the head, which
the loss applies by itself, runs where its weights are whole. Gradients are summed and not averaged, since a window's
loss is divided by the tokens of all processes. The model is built in host memory and goes to the device in shards, in
one process of a machine after the other, so that a machine holds one whole model at a time.
Source: torch 2.13, torch/distributed/fsdp/_fully_shard.
"""

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from training.core.errors import UserError
from training.core.report import again
from training.engine.parallel import Ranks
from training.objectives.contract import Objective, Tensors
from training.objectives.trainee import Trainee


class Root(torch.nn.Module):
    """The model with the loss as its forward pass."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, objective: Objective, tensors: Tensors) -> torch.Tensor:
        return objective.loss(self.model, tensors)


def in_turn(build: Callable[[], Trainee], ranks: Ranks, device: torch.device) -> tuple[Trainee, Root]:
    """Build a whole model when the turn is this process's, and leave it its part alone, on its device."""
    mesh = init_device_mesh(device.type, (ranks.size,))
    for turn in range(max(ranks.gathered(ranks.local_size))):
        if turn == ranks.local_rank:
            trainee = build()
            root = shard(trainee.model, mesh)
        ranks.gathered(None)
    return trainee, root


def shard(model: torch.nn.Module, mesh: DeviceMesh) -> Root:
    """Leave this process its part of a model alone; the names of the weights stay.

    Raises UserError for a model of which transformers does not say what its blocks are.
    """
    names = getattr(model, "_no_split_modules", None) or ()
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise UserError(
            "the model does not say what its blocks are, so it cannot be sharded", where="--parallel",
            found=type(model).__name__, expected="ddp", next_command=again("--parallel", "ddp"),
        )  # fmt: skip
    root = Root(model)
    for module in (*blocks, root):
        fully_shard(module, mesh=mesh)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


class ShardedRows:
    """An objective whose loss is computed through the root; all else is the objective's own."""

    def __init__(self, objective: Objective, root: Root):
        self._objective, self._root = objective, root

    def __getattr__(self, name: str) -> object:
        return getattr(self._objective, name)

    def loss(self, model: torch.nn.Module, tensors: Tensors) -> torch.Tensor:
        nats = self._root(self._objective, tensors)
        if not torch.is_grad_enabled():
            self._root.reshard()  # else the root's weights stay whole until the next backward pass
        return nats
