"""A real step under fake tensors: transformers' own code runs, every storage is followed, nothing is held.

The step is the plain Hugging Face one (`memory.profile: hf`) of an architecture that `shapes` knows, whose forward pass
does not branch on data, with stand-ins for PEFT's and bitsandbytes' linears. It runs on fake CPU tensors; where CUDA's
kernels allocate otherwise (softmax, SDPA's choice of mask, cuBLAS) the CUDA way is imitated. Every allocation and every
release goes through the simulated caching allocator, in the order in which they happen.

This module imports torch, so it is imported inside functions alone. Legend in `training.calculator.plan`.
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.calculator import loading
from training.calculator.allocator import CachingAllocator
from training.calculator.plan import Plan
from training.calculator.standing import workspace_bytes
from training.core.errors import Problems, UserError

_STEPS = 2
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "nf4": torch.float16}


@dataclass(frozen=True)
class Traced:
    """The peaks of a traced step: allocated bytes by phase, and both counts over all."""

    phases: dict[str, int]
    allocated_bytes: int
    reserved_bytes: int

    def to_json(self) -> dict:
        return {"phases": self.phases, "allocated_bytes": self.allocated_bytes, "reserved_bytes": self.reserved_bytes}


def trace(plan: Plan) -> Traced:
    """Run two steps of a recipe under fake tensors. Raises Problems where its step is not the plain one."""
    _require_plain(plan)
    allocator, phases = CachingAllocator(), {}
    loading.load(allocator, plan)
    phases["load"] = allocator.peak_allocated_bytes
    with FakeTensorMode(), _cuda_ways(plan):
        model = _model(plan)
        watch = _Watch(allocator, model)
        step = _Step(plan, model, watch)
        for _ in range(_STEPS):
            step.run(phases)
    return Traced(phases, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)


def _require_plain(plan: Plan) -> None:
    recipe = plan.recipe
    plain = [
        ("memory.profile", recipe.memory.profile, ("hf",)), ("memory.autocast", recipe.memory.autocast, (False,)),
        ("memory.attention", recipe.memory.attention, ("sdpa", "eager")),
        ("memory.loss_chunk", recipe.memory.loss_chunk, ("auto", 0)), ("data.packing", recipe.data.packing, (False,)),
        ("optimizer.name", recipe.optimizer.name, ("adamw",)),
        ("optimizer.impl", recipe.optimizer.impl, ("fused", "foreach")),
    ]  # fmt: skip
    if recipe.lora is not None:
        plain.append(("lora.dropout", recipe.lora.dropout, (0,)))
    problems = [
        UserError(f"{key} is not traced", where=key, found=value, expected=" or ".join(str(one) for one in known))
        for key, value, known in plain
        if value not in known
    ]
    if problems:
        raise Problems("the trace runs the plain Hugging Face step alone", problems)


# ---- following storages


class _Watch(TorchDispatchMode):
    """Sends each new storage to the allocator, and each one that is gone back to it."""

    def __init__(self, allocator: CachingAllocator, model: nn.Module):
        super().__init__()
        self.allocator = allocator
        self._known: dict[int, object] = {}
        for tensor in (*model.parameters(), *model.buffers()):  # counted as they were loaded
            self._follow(tensor.untyped_storage(), None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._known:
                    self._follow(storage, self.allocator.new(storage.nbytes()))
        return out

    def _follow(self, storage: torch.UntypedStorage, block: object) -> None:
        key = storage._cdata
        self._known[key] = block
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.allocator.free(self._known.pop(key))


class _Step:
    """The plain training step: outputs alive through the backward pass, gradients set to none after the step."""

    def __init__(self, plan: Plan, model: nn.Module, watch: _Watch):
        self.plan, self.model, self.watch, self.allocator = plan, model, watch, watch.allocator
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.states: list | None = None
        self.workspaces = 0

    def run(self, phases: dict[str, int]) -> None:
        plan = self.plan
        for _ in range(2 if plan.accumulates else 1):
            with self.watch:
                ids = torch.zeros((plan.B, plan.S), dtype=torch.int64)
                labels = torch.zeros((plan.B, plan.S), dtype=torch.int64)
                with self.phase(phases, "forward", 1):
                    outputs = self.model(input_ids=ids, labels=labels)
                    loss = outputs.loss
                    if not plan.keeps_outputs:
                        del outputs
                with self.phase(phases, "backward", 2):
                    loss.backward()
                with self.phase(phases, "optimizer_step", 2):
                    self.update()
                loss = outputs = ids = labels = None
        for parameter in self.trained:
            parameter.grad = None

    @contextlib.contextmanager
    def phase(self, phases: dict[str, int], name: str, workspaces: int) -> Iterator[None]:
        """Take the highest count within, with one more thread's workspace where it begins to multiply."""
        while self.workspaces < workspaces:
            self.workspaces += 1
            self.allocator.new(workspace_bytes(self.plan))
        before, self.allocator.peak_allocated_bytes = self.allocator.peak_allocated_bytes, 0
        yield
        phases[name] = max(phases.get(name, 0), self.allocator.peak_allocated_bytes)
        self.allocator.peak_allocated_bytes = max(before, self.allocator.peak_allocated_bytes)

    def update(self) -> None:
        """What AdamW allocates: its moments the first time, and the foreach step's copies."""
        sizes = [parameter.numel() * parameter.element_size() for parameter in self.trained]
        if self.states is None:
            self.states = [self.allocator.new(size) for size in sizes for _ in range(2)]
        copies = [self.allocator.new(size) for size in sizes] if self.plan.recipe.optimizer.impl == "foreach" else []
        for block in copies:
            self.allocator.free(block)


# ---- the model


def _model(plan: Plan) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    from training.calculator.shapes import config_of

    config = AutoConfig.for_model(**config_of(plan.recipe.model), use_cache=False)
    dtype = _TYPES[plan.recipe.memory.weights]
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=plan.recipe.memory.attention)
    if plan.is_adapter:
        _adapt(model, plan)
    model.train()
    if plan.recipe.memory.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    return model


def _adapt(model: nn.Module, plan: Plan) -> None:
    """Freeze the base, pack its linears where they are in 4 bits, and put adapters beside the targets."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    targets, linears = {one.name for one in plan.adapted}, {one.name for one in plan.shape.linears}
    for module in list(model.modules()):
        for name, linear in list(module.named_children()):
            if name not in linears or not isinstance(linear, nn.Linear):
                continue
            base = _Packed(linear) if plan.is_nf4 else linear
            adapted = _Adapted(base, linear, plan.recipe.lora.rank, _TYPES[plan.recipe.memory.adapter_dtype])
            setattr(module, name, adapted if name in targets else base)
    if plan.lifts_to_float32:
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.float()


class _Adapted(nn.Module):
    """PEFT's lora.Linear: the input cast to the adapter's type, the sum cast back."""

    def __init__(self, base: nn.Module, linear: nn.Linear, rank: int, dtype: torch.dtype):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.empty(rank, linear.in_features, dtype=dtype))
        self.b = nn.Parameter(torch.empty(linear.out_features, rank, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        dtype = result.dtype
        low = nn.functional.linear(x.to(self.a.dtype), self.a)
        result = result + nn.functional.linear(low, self.b) * 2.0
        return result.to(dtype)


class _Packed(nn.Module):
    """bitsandbytes' Linear4bit: the input in 16 bits, the weight unpacked for one product, the answer in x's type."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.size = (linear.out_features, linear.in_features)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = _Unpacked.apply(x.to(torch.float16), self.size)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.to(x.dtype)


class _Unpacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, size):
        ctx.size = size
        weight = torch.empty(size, dtype=x.dtype)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        return grad @ torch.empty(ctx.size, dtype=grad.dtype), None


# ---- CUDA's ways


class _Softmax(torch.autograd.Function):
    """Reads 16 bits and writes float32 in one kernel; its backward keeps a float32 product beside its answer."""

    @staticmethod
    def forward(ctx, x):
        ctx.dtype = x.dtype
        out = torch.empty(x.shape, dtype=torch.float32)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        product = grad * out
        answer = torch.empty(out.shape, dtype=ctx.dtype)
        del product
        return answer


@contextlib.contextmanager
def _cuda_ways(plan: Plan) -> Iterator[None]:
    """Softmax as one kernel; no mask for SDPA, whose batch is full; keys and values expanded to the queries' heads."""
    original = nn.functional.softmax

    def softmax(x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None, **more: object) -> torch.Tensor:
        return _Softmax.apply(x) if dtype == torch.float32 else original(x, dim=dim, dtype=dtype, **more)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.functional, "softmax", softmax))
        if not plan.is_eager:
            from transformers.integrations import sdpa_attention

            stack.enter_context(mock.patch.object(sdpa_attention, "use_gqa_in_sdpa", lambda *_, **__: False))
            family = plan.shape.family
            module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, lambda *_, **__: None))
        yield
