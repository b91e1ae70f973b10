"""The processes of one run: who they are, how a window is dealt out among them, and what they tell each other.

Every process walks through the same windows and holds the same state. A window's micro-batches are dealt out in turn;
its gradient is the sum over all processes. What a clock, a file or a signal decides is decided by the first process and
told to the others, so that none goes on alone, and the first one alone records. One process has nothing to say: for it
all of this is no work. Small values go over gloo as JSON, gradients over NCCL on GPUs and over gloo on CPUs.

The names in the environment are torchrun's, which can start the processes as the supervisor does.
"""

from __future__ import annotations

import datetime
import json
import os

import torch
import torch.distributed as dist

from training.core.errors import IntegrityError
from training.engine import torchrun

_BUCKET_BYTES = 25 << 20
_PATIENCE = datetime.timedelta(hours=24)  # who hangs is the supervisor's to find out


class Ranks:
    """A process alone."""

    rank, size, local_rank, local_size = 0, 1, 0, 1
    shards = False
    """Whether each process holds a part of the weights alone (FSDP2), so that a forward pass is everybody's work."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, parts: list) -> list:
        """This process's parts of a list that all of them hold."""
        return parts[self.rank :: self.size]

    def num_passes(self, num_parts: int) -> int:
        """How many passes each process makes over a list of so many parts: with shards all make as many."""
        return -(-num_parts // self.size) if self.shards else len(range(self.rank, num_parts, self.size))

    def gathered(self, value: object) -> list:
        """What every process has given, as JSON carries it, in the order of their ranks."""
        return [value]

    def told(self, value: object) -> object:
        """What the first process has given."""
        return self.gathered(value)[0]

    def sums(self, *values: float) -> list[float]:
        """The sum of each value over all processes, the same bits in each."""
        return list(values)

    def sum_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Sum the gradients over all processes, in place."""

    def require_same(self, parameters: list[torch.nn.Parameter], step: int) -> None:
        """Raise IntegrityError where the trained weights of two processes differ."""

    def gathered_bytes(self, tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Tensors of bytes of every process, each of the same names and lengths."""
        return [tensors]

    def leave(self) -> None:
        """Say nothing any more."""


class Joined(Ranks):
    """One of several processes that have met."""

    def __init__(self, kind: str):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank, self.local_size = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        self.shards = kind == "fsdp2"

    def _all(self, own: torch.Tensor) -> list[torch.Tensor]:
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own)
        return every

    def gathered(self, value: object) -> list:
        body = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [int(one) for one in self._all(torch.tensor(len(body)))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(body)] = body
        return [json.loads(bytes(one[:end].numpy())) for one, end in zip(self._all(padded), lengths, strict=True)]

    def sums(self, *values: float) -> list[float]:
        return torch.stack(self._all(torch.tensor(values, dtype=torch.float64))).sum(0).tolist()

    def sum_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        if self.shards:  # they are summed as each block's backward pass ends
            return
        has_one = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
        dist.all_reduce(has_one, dist.ReduceOp.MAX)
        found = [p for p, anywhere in zip(parameters, has_one.tolist(), strict=True) if anywhere]
        for parameter in found:
            if parameter.grad is None:  # a part of the model that this process's tokens have not used
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([parameter.grad for parameter in found]):
            _sum_together(bucket)

    def require_same(self, parameters: list[torch.nn.Parameter], step: int) -> None:
        if self.shards:
            return
        norms = torch._foreach_norm([parameter.detach() for parameter in parameters], dtype=torch.float64)
        every = self.gathered([norm.item() for norm in norms])
        if any(one != every[0] for one in every):
            ranks = [rank for rank, one in enumerate(every) if one != every[0]]
            raise IntegrityError(
                "the processes of the run have come apart: their weights are not the same", where=f"step {step}",
                found=f"other weights in process {', '.join(map(str, ranks))} than in the first",
                expected="the same bits in each",
            )  # fmt: skip

    def gathered_bytes(self, tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        every = {name: self._all(tensor.contiguous()) for name, tensor in tensors.items()}
        return [{name: found[rank] for name, found in every.items()} for rank in range(self.size)]

    def leave(self) -> None:
        dist.destroy_process_group()


def join(kind: str) -> Ranks:
    """Meet the other processes, where this one was started as one of several; else it is alone.

    Args:
        kind: `ddp` (every process holds the whole model) or `fsdp2` (each a part of it).
    """
    if not (torchrun.MEETING in os.environ or torchrun.is_here()):
        return Ranks()
    where = os.environ.get(torchrun.MEETING, "env://")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=size, timeout=_PATIENCE)
    return Joined(kind)


def is_of_another(error: BaseException) -> bool:
    """Whether an error means that another process of the run is gone, and nothing is wrong with this one."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def _buckets(gradients: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Gradients of one type, some 25 MiB at a time: many small sums cost more than one, and a copy costs memory."""
    found: list[list[torch.Tensor]] = []
    room = 0
    for gradient in gradients:
        if not found or gradient.dtype != found[-1][0].dtype or gradient.nbytes > room:
            found.append([])
            room = _BUCKET_BYTES
        found[-1].append(gradient)
        room -= gradient.nbytes
    return found


def _sum_together(gradients: list[torch.Tensor]) -> None:
    if len(gradients) == 1 and gradients[0].is_contiguous():
        dist.all_reduce(gradients[0])
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [part.view_as(one) for part, one in zip(parts, gradients, strict=True)])
