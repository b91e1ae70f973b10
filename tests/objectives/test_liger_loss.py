"""Liger's kernel as the loss: put in where it can be, called in training alone, refused elsewhere with the reason."""

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import extra
from tests.objectives.tiny import SIZES, make_world
from training.calculator import devices, fit, nvml
from training.calculator.devices import Device
from training.core.errors import UserError
from training.engine import trainable
from training.objectives import liger_loss
from training.objectives.loss import WHOLE_LOGITS, trained_nats
from training.recipe.load import load

GPU = Device("NVIDIA GeForce RTX 3080", "cuda", 10 << 30, 0)
KERNEL = "liger_kernel.ops.fused_linear_cross_entropy"


def model_of(**more: object) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True, **more))


def step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of 35 labels of 2 rows of 20 tokens, and its gradients."""
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(0, 384, (2, 20), generator=generator)
    labels_N = torch.randint(0, 384, (35,), generator=generator)
    tensors = {"input_ids_BT": ids_BT, "trained_N": torch.arange(3, 38), "labels_N": labels_N}
    model.zero_grad()
    nats = trained_nats(model, {name: tensor.to(model.device) for name, tensor in tensors.items()})
    if torch.is_grad_enabled():
        (nats / 35).backward()
    return nats.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.gpu
def test_the_kernel_gives_the_plain_loss_and_gradient(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(extra("liger"))])
    model = model_of().to("cuda")
    nats, gradients = step(model)
    liger_loss.put_in(model)
    other, others = step(model)
    assert other.item() == pytest.approx(nats.item(), rel=1e-5)
    assert all(one.allclose(others[name], atol=1e-5 * one.abs().max()) for name, one in gradients.items())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What the kernel is given, where something stands in for it that takes its arguments by their places."""
    seen = []

    class Stand:
        @staticmethod
        def apply(hidden, weight, target, bias, ce_weight, ignored, square, smoothing, reduction, softcap, z, accum):
            seen.append((bias, ce_weight, ignored, square, smoothing, reduction, softcap, z, accum))
            logits = nn.functional.linear(hidden, weight, bias)
            return nn.functional.cross_entropy(logits, target, ignore_index=ignored, reduction=reduction), None

    module = types.ModuleType(KERNEL)
    module.LigerFusedLinearCrossEntropyFunction = Stand
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, KERNEL, module)
    return seen


def test_a_step_is_summed_by_the_kernel_and_a_validation_by_torch(calls: list[tuple]):
    model = model_of()
    nats, gradients = step(model)
    liger_loss.put_in(model)
    other, others = step(model)
    assert other.item() == pytest.approx(nats.item(), rel=1e-6)
    assert all(one.allclose(others[name], atol=1e-7) for name, one in gradients.items())
    assert calls == [(None, None, -100, 0.0, 0.0, "sum", None, False, torch.float32)]
    with torch.inference_mode():
        assert step(model)[0] == nats
    assert len(calls) == 1


@pytest.mark.parametrize("odd", ["scaled", "whole", "wrapped"])
def test_a_head_that_the_kernel_does_not_know_is_refused(odd: str):
    model = model_of(**({"logits_scaling": 8.0} if odd == "scaled" else {}))
    if odd == "whole":
        setattr(model, WHOLE_LOGITS, True)
    if odd == "wrapped":
        model.set_output_embeddings(nn.Sequential(model.get_output_embeddings()))
    with pytest.raises(UserError, match="knows a head that is one linear layer"):
        liger_loss.put_in(model)


def test_it_is_refused_where_it_cannot_be_and_memfit_says_whose_loss_is_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = make_world(tmp_path, monkeypatch) / "lora.yaml"

    def told(*overrides: str) -> str:
        resolved = load(path, ["memory.loss_kernel=liger", *overrides])
        return "\n".join(str(problem) for problem in trainable.problems(resolved))

    monkeypatch.setattr(nvml, "ask", lambda: nvml.Answer((), None, "no driver"))
    assert "Triton for CUDA GPUs" in told() and told().endswith(" memory.loss_kernel=torch")
    monkeypatch.setattr(devices, "gpus", lambda: (GPU,))
    assert "make setup EXTRA=liger" in told()
    assert "memory.loss_chunk: 64" in told("memory.loss_chunk=64")
    estimate = fit.fit(load(path, ["memory.loss_kernel=liger"])).estimate
    assert any("liger's kernel" in line for line in estimate.assumptions)
    assert estimate.peak == fit.fit(load(path)).estimate.peak
