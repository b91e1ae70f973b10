"""The plain Hugging Face step with PEFT's and bitsandbytes' own modules, over made-up tokens and random weights.

Outputs stay alive through the backward pass, as a training script that reads `outputs.loss` keeps them.
"""

from __future__ import annotations

import torch
import transformers

from training.calculator.probe import Phase
from training.calculator.shapes import config_of
from training.recipe.model import Recipe

_HEAD = "lm_head"


class PlainStep:
    """Implements `training.calculator.probe.StepProbe`. With `is_padded` every row but the first is half padding."""

    def __init__(self, recipe: Recipe, device: torch.device, dtype: torch.dtype, *, is_padded: bool = False):
        self.recipe = recipe
        self.model = _model(recipe, device, dtype)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        impl = recipe.optimizer.impl
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=impl == "fused", foreach=impl == "foreach")
        shape = (recipe.data.micro_batch, recipe.data.seq_len)
        vocab_size = config_of(recipe.model)["vocab_size"]
        ids_BT = torch.randint(2, vocab_size, shape, generator=torch.Generator().manual_seed(0))
        self._batch = {"input_ids": ids_BT, "labels": ids_BT}
        if is_padded:
            mask_BT = torch.ones(shape, dtype=torch.int64)
            mask_BT[1:, shape[1] // 2 :] = 0
            self._batch["attention_mask"] = mask_BT
        self._device = device

    def step(self, phase: Phase) -> None:
        """Run one optimizer step."""
        for _ in range(self.recipe.batch.accumulate):
            with phase("forward"):
                outputs = self.model(**self._moved())
            with phase("backward"):
                outputs.loss.backward()
        with phase("optimizer_step"):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self, phase: Phase) -> None:
        """Run one micro-batch without gradients."""
        self.model.eval()
        with phase("evaluation"), torch.inference_mode():
            self.model(**self._moved())
        self.model.train()

    def _moved(self) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self._device) for name, tensor in self._batch.items()}


def _model(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    config = transformers.AutoConfig.for_model(**config_of(recipe.model), use_cache=False)
    build = transformers.AutoModelForCausalLM.from_config
    model = build(config, dtype=dtype, attn_implementation=recipe.memory.attention)
    if recipe.memory.weights == "nf4":
        _quantise(model, dtype, recipe.memory.double_quant)
    model.to(device)
    if recipe.lora is not None:
        model = _adapt(model, recipe)
    if recipe.memory.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def _quantise(model: torch.nn.Module, dtype: torch.dtype, double_quant: bool) -> None:
    """Put bitsandbytes' 4-bit linears in the place of the blocks'; they quantise when they are moved to a device."""
    import bitsandbytes as bnb

    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if not isinstance(linear, torch.nn.Linear) or name == _HEAD:
                continue
            packed = bnb.nn.Linear4bit(
                linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=dtype,
                quant_type="nf4", compress_statistics=double_quant,
            )  # fmt: skip
            packed.load_state_dict(linear.state_dict())
            setattr(parent, name, packed)
    model.is_loaded_in_4bit = True


def _adapt(model: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    import peft

    if recipe.memory.weights == "nf4":
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    settings = peft.LoraConfig(
        r=recipe.lora.rank, lora_alpha=recipe.lora.alpha, lora_dropout=recipe.lora.dropout, task_type="CAUSAL_LM",
        target_modules="all-linear" if recipe.lora.targets == "all-linear" else list(recipe.lora.targets),
    )  # fmt: skip
    return peft.get_peft_model(model, settings, autocast_adapter_dtype=recipe.memory.adapter_dtype == "fp32")
