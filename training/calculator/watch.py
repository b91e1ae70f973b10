"""Follows every storage that a step makes, on fake tensors or real ones: when it comes and goes, and what it is for.

A storage is known by what is live, never by its views. Each is labelled by the phase and the module that made it; a
gradient or an optimizer's state is told from the others when it has become one. Sizes go through an allocator: the
simulated caching one for a GPU, or plain counting.

This module imports torch, so it is imported inside functions alone.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.calculator.timeline import Timeline

_SCALARS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)
ACTIVATIONS = "activations"


class Allocator(Protocol):
    """Where sizes go."""

    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int

    def new(self, num_bytes: int) -> object: ...

    def free(self, block: object) -> None: ...


@dataclass
class Piece:
    """One storage: the bytes that it counts for, and what it is for."""

    num_bytes: int
    label: str
    module: str


class Log:
    """Every change of what is allocated, in order; which pieces are live at one can be told afterwards."""

    def __init__(self, allocator: Allocator):
        self.allocator = allocator
        self.pieces: list[Piece] = []
        self.changes = array("q")  # a piece's number where it comes, its complement where it goes
        self.allocated_bytes, self.reserved_bytes = array("q"), array("q")
        self.marks: list[tuple[int, str]] = []
        self._blocks: dict[int, object] = {}

    def come(self, num_bytes: int, label: str, module: str = "") -> int:
        """Allocate; returns the piece's number."""
        number, before = len(self.pieces), self.allocator.allocated_bytes
        self._blocks[number] = self.allocator.new(num_bytes)
        self.pieces.append(Piece(self.allocator.allocated_bytes - before, label, module))
        self._note(number)
        return number

    def go(self, number: int) -> None:
        """Give a piece back."""
        self.allocator.free(self._blocks.pop(number))
        self._note(~number)

    def _note(self, change: int) -> None:
        self.changes.append(change)
        self.allocated_bytes.append(self.allocator.allocated_bytes)
        self.reserved_bytes.append(self.allocator.reserved_bytes)

    def mark(self, name: str) -> None:
        """Note that a phase begins here."""
        self.marks.append((len(self.changes), name))

    def timeline(self, first: str, after: str) -> Timeline:
        """The counts from where the phase `first` begins the first time to where `after` does."""
        starts = {name: start for start, name in reversed(self.marks)}
        span = slice(starts[first], starts[after])
        kept = tuple((start - span.start, name) for start, name in self.marks if span.start <= start < span.stop)
        return Timeline(tuple(self.allocated_bytes[span]), tuple(self.reserved_bytes[span]), kept)

    def peak_at(self) -> int:
        """The change at which most is allocated."""
        return max(range(len(self.allocated_bytes)), key=self.allocated_bytes.__getitem__)

    def live_at(self, change: int) -> list[Piece]:
        """The pieces that are live after a change."""
        live: dict[int, Piece] = {}
        for number in self.changes[: change + 1]:
            if number >= 0:
                live[number] = self.pieces[number]
            else:
                del live[~number]
        return list(live.values())


class Watch(TorchDispatchMode):
    """Sends each new storage of a model's step to the log, and each one that is gone.

    Args:
        standing: whether the model's weights are counted here; otherwise they are known, and counted elsewhere.
        vocab_size: the last size of logits.
    """

    def __init__(self, log: Log, model: nn.Module, vocab_size: int | None, *, standing: bool = False):
        super().__init__()
        self.log, self.phase_name, self.vocab_size = log, "", vocab_size
        self.peaks: dict[str, int] = {}
        self.failed_in: tuple[str, str] | None = None
        self._known: dict[int, int | None] = {}
        self._names = {id(part): name for name, part in model.named_modules()}
        self._stack: list[str] = []
        for tensor in (*model.parameters(), *model.buffers()):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                number = log.come(storage.nbytes(), "weights") if standing else None
                self._follow(storage, number)

    # ---- what a step makes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in _SCALARS and not self._stack and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].dtype.is_floating_point else 1  # a number that the loop reads, not the model
        try:
            out = func(*args, **(kwargs or {}))
        except Exception:
            self.failed_in = self.failed_in or (self._stack[-1] if self._stack else "", str(func))
            raise
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._known:
                    label = self._label(leaf)
                    module = self._stack[-1] if self._stack else ""
                    self._follow(storage, self.log.come(storage.nbytes(), label, module))
        return out

    def _label(self, tensor: torch.Tensor) -> str:
        if self.vocab_size and tensor.dim() > 1 and tensor.shape[-1] == self.vocab_size:
            return "logits_and_loss"
        phase = self.phase_name.removeprefix("first_")
        if phase == "backward":
            return "recomputed_layer" if self._stack else "in_flight"
        return {"forward": ACTIVATIONS, "": "inputs"}.get(phase, "temporaries")

    def _follow(self, storage: torch.UntypedStorage, number: int | None) -> None:
        key = storage._cdata
        self._known[key] = number
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        number = self._known.pop(key)
        if number is not None:
            self.log.go(number)

    def name(self, tensor: torch.Tensor, label: str) -> None:
        """Say what a tensor has become."""
        number = self._known.get(tensor.untyped_storage()._cdata)
        if number is not None:
            self.log.pieces[number].label = label

    # ---- when

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark what is made within as this phase's, and take the highest count of it."""
        self.log.mark(name)
        self.phase_name, start = name, len(self.log.changes)
        before = self.log.allocator.allocated_bytes
        try:
            yield
        finally:
            self.phase_name = ""
        self.peaks[name] = max(self.peaks.get(name, 0), before, *self.log.allocated_bytes[start:])

    def __enter__(self):
        def enter(module: nn.Module, _args: tuple) -> None:
            self._stack.append(_without_numbers(self._names.get(id(module), type(module).__name__)))

        def leave(_module: nn.Module, _args: tuple, _out: object) -> None:
            self._stack.pop()

        self._hooks = (
            modules.register_module_forward_pre_hook(enter),
            modules.register_module_forward_hook(leave, always_call=True),
        )
        return super().__enter__()

    def __exit__(self, *exc):
        for hook in self._hooks:
            hook.remove()
        return super().__exit__(*exc)


def _without_numbers(name: str) -> str:
    """`model.layers.3.mlp` as `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
