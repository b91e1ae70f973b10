"""The checkpoint as PyTorch computes it, in float32: what the served model is held against.

A layer's weights are read when its turn comes and dropped behind it, so memory is that of the largest layer or the
largest tensor and not of the model. An adapter stays unmerged: its factors are applied beside the base's matrix, as in
training. `nf4` rounds the base's matrices to 4 bits as QLoRA has them in training.

Legend: N compared positions, M of them, P prompts, T positions of a prompt, D width, V vocabulary entries.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from training.core.errors import IntegrityError, UserError
from training.export.adapter import EMBEDDING, HEAD, MergedTensor
from training.export.checkpoint import Checkpoint
from training.export.importance import Importance
from training.export.probes import Prompt

if TYPE_CHECKING:
    import numpy as np
    import torch

_TOKENS_AT_ONCE = 512
"""Positions that go through a layer together: what a layer computes is wider than what it is given."""
_ROWS_AT_ONCE = 8
"""Positions whose softmax is computed together, in float64."""


def logprobs(checkpoint: Checkpoint, prompts: list[Prompt], *, nf4: bool = False) -> np.ndarray:
    """Log-probabilities in nats of the next token after every prefix, `[N, V]` float32, the prompts in order.

    Args:
        nf4: the base's matrices in 4 bits, as QLoRA trains beside them.
    """
    import torch

    streamed = _Streamed(checkpoint, nf4=nf4)
    with torch.inference_mode():
        hidden_PTD = streamed.hidden(_padded([prompt.ids for prompt in prompts]))
        hidden_ND = torch.cat([
            hidden_TD[[length - 1 for length in prompt.lengths]]
            for prompt, hidden_TD in zip(prompts, hidden_PTD, strict=True)
        ])  # fmt: skip
        logits_NV = streamed.logits(hidden_ND)
        for rows_MV in logits_NV.split(_ROWS_AT_ONCE):
            rows_MV.copy_(torch.log_softmax(rows_MV.double(), dim=-1))
    return logits_NV.numpy()


def watch(checkpoint: Checkpoint, texts: list[list[int]], importance: Importance) -> None:
    """Run token ids through the model for what `importance` counts of its matrices' inputs."""
    import torch

    with torch.inference_mode():
        importance.num_real = [len(ids) for ids in texts]
        _Streamed(checkpoint, importance=importance).hidden(_padded(texts))


def _padded(texts: list[list[int]]) -> torch.Tensor:
    """Ids side by side, padded behind: a causal model's earlier positions never see what stands behind them."""
    import torch

    ids_PT = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    for row, ids in zip(ids_PT, texts, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    return ids_PT


class _Streamed:
    """A model without weights, whose layers read theirs from the files when they are called."""

    def __init__(self, checkpoint: Checkpoint, *, nf4: bool = False, importance: Importance | None = None):
        self.checkpoint, self.nf4, self.importance = checkpoint, nf4, importance
        self.model = _empty(checkpoint)
        self._place = self._places()
        self._linears = self._inner_linears() if nf4 else set()
        self._head = self.model.get_output_embeddings()
        units = self._units()
        for name, module in self.model.named_modules():
            if name in units and module is not self._head:
                module.forward = self._loading(name, module, module.forward)

    def hidden(self, ids_PT: torch.Tensor) -> torch.Tensor:
        """The last hidden states `[P, T, D]`."""
        return self.model.base_model(input_ids=ids_PT, use_cache=False).last_hidden_state

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """The logits `[N, V]` of hidden states, by the head and what its family does behind it."""
        from training.objectives.loss import logits_of

        name = next(name for name, module in self.model.named_modules() if module is self._head)
        with self._loaded(name, self._head):
            return logits_of(self.model)(hidden_ND)

    def _units(self) -> set[str]:
        """Modules that are loaded as one: each layer, and whatever has weights outside of them."""
        layers = [
            f"{name}.{number}" for name, module in self.model.named_modules()
            if type(module).__name__ == "ModuleList" and len(module) == self.model.config.num_hidden_layers
            for number in range(len(module))
        ]  # fmt: skip
        outside = [
            name for name, module in self.model.named_modules()
            if module._parameters and not any(name == one or name.startswith(f"{one}.") for one in layers)
        ]  # fmt: skip
        return {*layers, *outside}

    def _places(self) -> dict[str, MergedTensor]:
        """The tensor of every parameter. Raises IntegrityError where one is missing, of another shape, or left over."""
        tensors, own = self.checkpoint.tensors, dict(self.model.named_parameters(remove_duplicate=False))
        tied = HEAD in own and HEAD not in tensors and self.checkpoint.config.get("tie_word_embeddings", False)
        place = {name: tensors.get(EMBEDDING if name == HEAD and tied else name) for name in own}
        buffers = {name for name, _ in self.model.named_buffers()}
        wrong = [name for name, tensor in place.items() if tensor is None or tensor.shape != tuple(own[name].shape)]
        wrong += [name for name in tensors if name not in own and name not in buffers and "rotary_emb" not in name]
        if wrong:
            raise IntegrityError(
                "the weights are not those of the architecture", where=self.checkpoint.folder,
                found=f"{len(wrong)} tensors missing, extra or of another shape: {', '.join(wrong[:3])}",
                expected="every tensor of config.json's model, and no other",
            )  # fmt: skip
        return place

    def _inner_linears(self) -> set[str]:
        from training.objectives import targets

        return {f"{name}.weight" for name in targets.inner_linears(self.model)}

    # ---- weights in, weights out

    def _loading(self, name: str, module: torch.nn.Module, forward):
        def call(*args, **kwargs):
            with self._loaded(name, module):
                return _in_parts(forward, args, kwargs)

        return call

    @contextmanager
    def _loaded(self, name: str, module: torch.nn.Module) -> Iterator[None]:
        import torch

        hooks, empty = [], []
        for inner, owner in module.named_modules(prefix=name):
            for leaf, parameter in list(owner._parameters.items()):
                if parameter is None:
                    continue
                full = f"{inner}.{leaf}"
                empty.append((owner, leaf, parameter))
                owner._parameters[leaf] = torch.nn.Parameter(self._value(full), requires_grad=False)
                hooks += self._hooks(full, owner)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for owner, leaf, parameter in empty:
                owner._parameters[leaf] = parameter

    def _value(self, full: str) -> torch.Tensor:
        """A parameter in float32, trained rows in it, without what factors add: cast a block at a time."""
        import torch

        tensor = self._place[full]
        plain = MergedTensor(tensor.name, tensor.base)
        plain.rows = tensor.rows
        value = torch.empty(plain.shape)
        for first, block in plain.blocks():
            value.view(plain.shape[0], -1)[first : first + len(block)] = block.view(len(block), -1)
        return _rounded_to_nf4(value) if full in self._linears else value

    def _hooks(self, full: str, owner: torch.nn.Module) -> Iterator:
        pair = self._place[full].pair
        if pair is not None:
            a_RI, b_OR = pair.a.read().float() * pair.scale, pair.b.read().float()
            yield owner.register_forward_hook(lambda _, args, out: out + args[0] @ a_RI.T @ b_OR.T)
        if self.importance is not None and self.importance.wants(full, owner):
            yield owner.register_forward_pre_hook(lambda _, args: self.importance.add(full, args[0]))


def _in_parts(forward, args: tuple, kwargs: dict):
    """Call a layer on a few prompts at a time; whatever else has a row for each prompt is cut with them."""
    import torch

    first = args[0] if args else next(iter(kwargs.values()))
    if not (torch.is_tensor(first) and first.is_floating_point() and first.dim() == 3):
        return forward(*args, **kwargs)
    num_prompts, length = first.shape[:2]
    step = max(1, _TOKENS_AT_ONCE // length)

    def cut(value, begin: int):
        if isinstance(value, tuple | list):
            return type(value)(cut(one, begin) for one in value)
        whole = torch.is_tensor(value) and value.dim() > 1 and value.shape[0] == num_prompts
        return value[begin : begin + step] if whole else value

    parts = []
    for begin in range(0, num_prompts, step):
        out = forward(*cut(args, begin), **{key: cut(value, begin) for key, value in kwargs.items()})
        parts.append(out[0] if isinstance(out, tuple) else out)
    whole = torch.cat(parts)
    return (whole,) if isinstance(out, tuple) else whole


def _rounded_to_nf4(weight: torch.Tensor) -> torch.Tensor:
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    return functional.dequantize_4bit(packed, state).to(weight.dtype).reshape(weight.shape)


def _empty(checkpoint: Checkpoint) -> torch.nn.Module:
    """The architecture that the configuration names, no memory behind its weights."""
    import torch
    import transformers
    from accelerate import init_empty_weights
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        values = {key: value for key, value in checkpoint.config.items() if key not in ("dtype", "torch_dtype")}
        config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
        kind = getattr(transformers, checkpoint.config["architectures"][0])
        with init_empty_weights(include_buffers=False):
            model = kind._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    except Exception as error:  # a foreign config.json can fail anywhere in the library; the fault is the folder's
        raise UserError(
            "the checkpoint cannot be loaded by transformers", where=checkpoint.folder,
            found=f"{type(error).__name__}: {str(error).strip()[:300]}",
            expected="a config.json and weights that fit each other, with no code of its own",
        ) from error  # fmt: skip
    return model.eval()
