"""A model as a method trains it, and the files that its weights become.

Owns which tensors are a checkpoint's weights, by the names that other tools know; the state of a resume is the
engine's.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from training.core.errors import IntegrityError
from training.objectives import shards
from training.objectives.contract import Tensors


class Trainee:
    """A model all of whose weights are trained.

    Args:
        base: `{"name", "revision", "weights_sha256"}` of the base that it began as; None for random weights.
    """

    weights_file = "model.safetensors"
    settings_file = "config.json"
    quantization: str | None = None

    def __init__(self, model: torch.nn.Module, base: dict | None = None):
        self.model, self.base = model, base

    def weights(self) -> Tensors:
        """The trained tensors by their plain names, the model's own and not copies; a tied head is written once."""
        named = {name.removeprefix("_orig_mod."): tensor.detach() for name, tensor in self.model.state_dict().items()}
        if self.model.config.get_text_config().tie_word_embeddings:
            for name in getattr(self.model, "_tied_weights_keys", None) or ():
                named.pop(name, None)
        return named

    def load(self, folder: Path) -> None:
        """Load what was saved, strictly. Raises IntegrityError naming what is missing, extra or of another shape."""
        path = folder / self.weights_file
        weights, own = load_file(path), self.weights()
        if weights.keys() != own.keys():
            wrong = sorted(weights.keys() ^ own.keys())
            raise IntegrityError(
                "a checkpoint's tensors are not the model's", where=path,
                found=f"{len(wrong)} names differ: {', '.join(wrong[:3])}", expected=f"{len(own)} tensors by name",
            )  # fmt: skip
        for name, tensor in weights.items():
            if own[name].shape != tensor.shape:
                raise IntegrityError(
                    "a tensor has another shape", where=f"{folder}: {name}", found=tuple(tensor.shape),
                    expected=tuple(own[name].shape),
                )  # fmt: skip
        for name, tensor in weights.items():
            shards.fill(own[name], tensor)

    def settings(self) -> dict:
        """What of the model lies beside its weights."""
        config = self.model.config.to_dict() | {"architectures": [type(self.model).__name__]}
        config.pop("_name_or_path", None)
        return config
