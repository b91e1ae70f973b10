"""Adapters of low rank beside a frozen base (Hu et al. 2021, LoRA, section 4): y = Wx + (alpha / rank) B A dropout(x).

Owns the layers, where they stand, and the form in which they are saved: PEFT's, so that other tools read them. A is
drawn from the run's seed, B is zero, so that the untrained adapter changes nothing. Factors have a type of their own,
in which the product is computed; the sum has the base's. The base's weights are never written.

Legend: R rank, D width in, O width out.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from training.calculator.wrapper import Wrapper
from training.objectives import targets
from training.objectives.adapter_source import SETTINGS, WEIGHTS
from training.objectives.contract import Tensors
from training.objectives.trained_rows import TrainedRows
from training.objectives.trainee import Trainee
from training.recipe.model import Lora

_PREFIX = "base_model.model."


class Adapted(Wrapper):
    """A frozen linear layer with its adapter."""

    def __init__(self, base: nn.Module, lora: Lora, dtype: torch.dtype):
        super().__init__(base)
        num_in, num_out = targets.features(base)
        place = {"dtype": dtype, "device": targets.device_of(base)}
        self.dropout, self.scale = lora.dropout, lora.alpha / lora.rank
        self.lora_A = nn.Parameter(torch.empty(lora.rank, num_in, **place))
        self.lora_B = nn.Parameter(torch.zeros(num_out, lora.rank, **place))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        keep, scale = None, self.scale
        if self.training and self.dropout > 0:
            keep = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - self.dropout)
            scale /= 1 - self.dropout
        return out.add_(_LowRank.apply(x, self.lora_A, self.lora_B, keep, scale))


class _LowRank(torch.autograd.Function):
    """scale B A (keep x): of its input it keeps the tensor itself, which neighbours share, and a byte for each drop.

    What is cast and dropped is made again for the backward pass, so an adapter keeps no copy of its input.
    """

    @staticmethod
    def forward(ctx, x, a_RD, b_OR, keep, scale):
        low = nn.functional.linear(_kept(x, keep, a_RD.dtype), a_RD) * scale
        ctx.save_for_backward(x, a_RD, b_OR, keep, low)
        ctx.scale = scale
        return nn.functional.linear(low, b_OR)

    @staticmethod
    def backward(ctx, grad):
        x, a_RD, b_OR, keep, low = ctx.saved_tensors
        flat_NO, low_NR = grad.flatten(0, -2), low.flatten(0, -2)
        grad_b_OR = flat_NO.T @ low_NR
        grad_low_NR = flat_NO @ b_OR * ctx.scale
        grad_a_RD = grad_low_NR.T @ _kept(x, keep, a_RD.dtype).flatten(0, -2)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_low_NR @ a_RD).view(x.shape)
            grad_x = (grad_x if keep is None else grad_x.mul_(keep)).to(x.dtype)
        return grad_x, grad_a_RD, grad_b_OR, None, None


def _kept(x: torch.Tensor, keep: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    x = x.to(dtype)
    return x if keep is None else x * keep


def draw(a_RD: nn.Parameter) -> None:
    """Draw the first factor, on the CPU, as every machine draws it."""
    drawn_RD = torch.empty(a_RD.shape, dtype=torch.float32)
    nn.init.kaiming_uniform_(drawn_RD, a=math.sqrt(5))
    with torch.no_grad():
        a_RD.copy_(drawn_RD)


def attach(model: nn.Module, lora: Lora, dtype: torch.dtype) -> list[str]:
    """Freeze a model and put a drawn adapter beside each target, in place; returns the targets' names."""
    names = targets.find(model, lora.targets)
    targets.frozen(model)
    for name in names:
        layer = Adapted(model.get_submodule(name), lora, dtype)
        draw(layer.lora_A)
        targets.replace(model, name, layer)
    return names


class AdapterTrainee(Trainee):
    """A frozen model with trained adapters."""

    weights_file, settings_file = WEIGHTS, SETTINGS

    def __init__(
        self, model: nn.Module, base: dict | None, lora: Lora, names: list[str], rows: TrainedRows | None = None,
        quantization: str | None = None,
    ):  # fmt: skip
        super().__init__(model, base)
        self.lora, self.names, self.rows, self.quantization = lora, names, rows, quantization

    def factors(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        """Both factors of the adapter at a layer."""
        layer = self.model.get_submodule(name)
        return layer.lora_A, layer.lora_B

    def weights(self) -> Tensors:
        """Both factors of each adapter, and the rows of added tokens, by PEFT's names."""
        named = {}
        for name in self.names:
            a_RD, b_OR = self.factors(name)
            named[f"{_PREFIX}{name}.lora_A.weight"] = a_RD.detach()
            named[f"{_PREFIX}{name}.lora_B.weight"] = b_OR.detach()
        return named | (self.rows.weights() if self.rows else {})

    def settings(self) -> dict:
        """`adapter_config.json` as PEFT reads it."""
        return {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": (self.base or {}).get("name"),
            "revision": None, "r": self.lora.rank, "lora_alpha": self.lora.alpha, "lora_dropout": self.lora.dropout,
            "target_modules": targets.suffixes(self.model, self.names), "bias": "none", "fan_in_fan_out": False,
            "init_lora_weights": True, "inference_mode": True, "modules_to_save": None,
            **(self.rows.settings() if self.rows else {}),
        }  # fmt: skip
