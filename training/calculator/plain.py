"""The plain Hugging Face and PEFT step, as others measure it: outputs alive through backward, gradients dropped last.

The model is whatever transformers builds of a configuration; stand-ins take the place of PEFT's and bitsandbytes'
layers, which fake tensors cannot pass. Implements `training.calculator.probe.StepProbe`. This module imports torch.
"""

from __future__ import annotations

import torch
from torch import nn

from training.calculator import kernels
from training.calculator.plan import Plan
from training.calculator.probe import Phase, dtype_of
from training.calculator.wrapper import Wrapper
from training.core.errors import UserError
from training.core.report import again
from training.recipe.model import Optimizer


class PlainProbe:
    """A recipe's step as Hugging Face's trainer runs it."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.model = _model(plan)
        self.head = self.model.get_output_embeddings()
        self.base_sizes = _sizes(self.model, self.head, packs=plan.is_nf4)
        if plan.is_adapter:
            _adapt(self.model, self.head, plan)
        self.model.train()
        self.optimizer = optimizer(self.model, plan.recipe.optimizer)

    def step(self, phase: Phase) -> None:
        plan = self.plan
        for _ in range(2 if plan.accumulates else 1):  # a second micro-batch stands for all that follow the first
            ids_BS = torch.zeros((plan.B, plan.S), dtype=torch.int64)
            with phase("forward"):
                outputs = self.model(input_ids=ids_BS, labels=ids_BS.clone())
                loss = outputs.loss
                if not plan.keeps_outputs:
                    del outputs
            with phase("backward"):
                loss.backward()
        with phase("optimizer_step"):
            self.optimizer.step()
        outputs = loss = None
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self, phase: Phase) -> None:
        ids_BS = torch.zeros((self.plan.B, self.plan.S), dtype=torch.int64)
        with phase("evaluation"), torch.no_grad():
            self.model(input_ids=ids_BS, labels=ids_BS.clone())


# ---- the model


def _model(plan: Plan) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    from training.calculator.shapes import config_of

    config = config_of(plan.recipe.model)
    attention = kernels.flash_attention() if plan.is_flash else plan.recipe.memory.attention
    try:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**(config | {"use_cache": False})), dtype=dtype_of(plan.recipe.memory.weights),
            attn_implementation=attention,
        )  # fmt: skip
    except Exception as error:  # a configuration's own checks raise what they like
        other = again("memory.attention=eager") if "attention implementation" in str(error) else None
        raise UserError(
            f"transformers makes no causal language model of {config.get('model_type')}", where="model",
            found=said(error), expected="a configuration that it takes", next_command=other,
        ) from error  # fmt: skip
    if plan.recipe.memory.gradient_checkpointing:
        _checkpoint(model)
    return model


def said(error: Exception) -> str:
    """What another library's exception says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"


def _checkpoint(model: nn.Module) -> None:
    if not model.supports_gradient_checkpointing:
        raise UserError(
            "the model cannot compute its layers again", where="memory.gradient_checkpointing", found="true",
            expected=f"false, for {type(model).__name__}", next_command=again("memory.gradient_checkpointing=false"),
        )  # fmt: skip
    model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})


def _sizes(model: nn.Module, head: nn.Module | None, *, packs: bool) -> list[tuple[int, bool]]:
    """The elements of each tensor of the base in the model's order, and whether it is packed into 4 bits."""
    packed = {id(module.weight) for _, module in _linears(model) if module is not head} if packs else set()
    return [(parameter.numel(), id(parameter) in packed) for parameter in model.parameters()]


def _linears(model: nn.Module) -> list[tuple[str, nn.Module]]:
    from transformers.pytorch_utils import Conv1D

    return [(name, module) for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]


def _adapt(model: nn.Module, head: nn.Module | None, plan: Plan) -> None:
    """Freeze the base, pack its linears where they are in 4 bits, and put adapters beside the targets."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    targets = _targets(model, head, plan)
    dtype = dtype_of(plan.recipe.memory.adapter_dtype)
    inner = {name for name, module in _linears(model) if module is not head}
    for name in sorted(targets | (inner if plan.is_nf4 else set())):
        parent, _, leaf = name.rpartition(".")
        layer = model.get_submodule(name)
        base = _Packed(layer) if plan.is_nf4 and name in inner else layer
        kind = _AdaptedEmbedding if isinstance(layer, nn.Embedding) else _Adapted
        new = kind(base, _features(layer), plan.recipe.lora, dtype) if name in targets else base
        setattr(model.get_submodule(parent), leaf, new)
    if plan.lifts_to_float32:
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.float()


def _targets(model: nn.Module, head: nn.Module | None, plan: Plan) -> set[str]:
    """The layers that get an adapter, by their whole names. Raises UserError where a name matches none."""
    wanted = plan.recipe.lora.targets
    inner = {name for name, module in _linears(model) if module is not head}
    if wanted == "all-linear":
        return inner
    if wanted == "attention":
        return {
            name for name in inner if "attention" in type(model.get_submodule(name.rpartition(".")[0])).__name__.lower()
        }
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    layers |= dict(_linears(model))
    leaves = {name.rpartition(".")[2] for name in layers}
    if unknown := [name for name in wanted if name not in leaves]:
        raise UserError(
            "a LoRA target matches no layer", where="lora.targets", found=", ".join(unknown),
            expected=", ".join(sorted(leaves)),
        )  # fmt: skip
    return {name for name in layers if name.rpartition(".")[2] in wanted}


def _features(layer: nn.Module) -> tuple[int, int]:
    """Width in and out of a layer that multiplies or looks up."""
    if isinstance(layer, nn.Embedding):
        return layer.num_embeddings, layer.embedding_dim
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return tuple(layer.weight.shape)


class _Adapted(Wrapper):
    """PEFT's lora.Linear: the input cast to the adapter's type, the sum cast back."""

    def __init__(self, base: nn.Module, features: tuple[int, int], lora: object, dtype: torch.dtype):
        super().__init__(base)
        self.dropout = lora.dropout
        self.a = nn.Parameter(torch.empty(lora.rank, features[0], dtype=dtype))
        self.b = nn.Parameter(torch.empty(features[1], lora.rank, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        dtype = result.dtype
        x = nn.functional.dropout(x.to(self.a.dtype), self.dropout, self.training)
        result = result + nn.functional.linear(nn.functional.linear(x, self.a), self.b) * 2.0
        return result.to(dtype)


class _AdaptedEmbedding(_Adapted):
    """PEFT's lora.Embedding: a row of the first factor looked up, times the second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        low = nn.functional.embedding(x, self.a.T)
        return (result + (low @ self.b.T) * 2.0).to(result.dtype)


class _Packed(nn.Module):
    """bitsandbytes' Linear4bit: the input in 16 bits, the weight unpacked for one product, the answer in x's type."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.size = tuple(reversed(_features(layer)))
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = _Unpacked.apply(x.to(torch.float16), self.size)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return out.to(x.dtype)


class _Unpacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, size):
        ctx.size = size
        return nn.functional.linear(x, torch.empty(size, dtype=x.dtype))

    @staticmethod
    def backward(ctx, grad):
        return grad @ torch.empty(ctx.size, dtype=grad.dtype), None


# ---- the optimizer


def optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Make the optimizer of a recipe, or a stand-in of its size where only a GPU has it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.name != "adamw":
        return _EightBit(trained, is_paged=settings.name == "paged_adamw8bit")
    return torch.optim.AdamW(trained, fused=settings.impl == "fused", foreach=settings.impl == "foreach")


class _EightBit(torch.optim.Optimizer):
    """bitsandbytes' AdamW: two moments of a byte with a float32 scale for each 256, small tensors in float32."""

    def __init__(self, parameters: list[nn.Parameter], *, is_paged: bool):
        super().__init__(parameters, {})
        self.is_paged = is_paged

    def step(self) -> None:
        from training.calculator.replay import LEAST_EIGHT_BIT, LEAST_PAGED

        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None or self.state[parameter]:
                continue
            for name in ("state1", "state2"):
                if parameter.numel() < LEAST_EIGHT_BIT:
                    self.state[parameter][name] = torch.empty(parameter.numel(), dtype=torch.float32)
                else:
                    own = 0 if self.is_paged and parameter.numel() >= LEAST_PAGED else parameter.numel()
                    self.state[parameter][name] = torch.empty(own, dtype=torch.uint8)
                    blocks = -(-parameter.numel() // 256)
                    self.state[parameter][f"{name}_scale"] = torch.empty(blocks, dtype=torch.float32)
