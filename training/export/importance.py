"""How much each input of a matrix matters: the sum of its squares over a text, which K-quants weigh their rounding by.

Owns what is counted and the form that llama.cpp reads; the text is drawn by who calls. Source: llama.cpp
`tools/imatrix/imatrix.cpp`, the GGUF form (`general.type` is `imatrix`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files
from training.export import probes
from training.llamacpp import convert

if TYPE_CHECKING:
    import torch

    from training.export.checkpoint import Checkpoint

NUM_TEXTS, MAX_TOKENS = 64, 256


class Importance:
    """Sums of squared inputs by the names that the matrices have in a GGUF.

    Args:
        architecture: llama.cpp's name of the model's architecture.

    `num_real` is set by who runs the model: tokens of each text; what pads it is not counted.
    """

    def __init__(self, architecture: str, num_layers: int):
        self._names = convert.tensor_names(architecture, num_layers)
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, int] = {}
        self.num_real: list[int] = []
        self._seen: dict[str, int] = {}

    def wants(self, full: str, owner: torch.nn.Module) -> bool:
        """Whether a parameter is a matrix that its module multiplies by."""
        return hasattr(owner, "in_features") and full.endswith(".weight") and self._name(full) is not None

    def _name(self, full: str) -> str | None:
        return self._names.get_name(full, try_suffixes=(".weight",))

    def add(self, full: str, inputs_PTI: torch.Tensor) -> None:
        """Count the inputs of a matrix for the next texts of the batch."""
        name, first = self._name(full), self._seen.get(full, 0)
        for inputs_TI, real in zip(inputs_PTI, self.num_real[first:], strict=False):
            squares_I = inputs_TI[:real].double().square().sum(0)
            self.sums[name] = self.sums.get(name, 0) + squares_I
            self.counts[name] = self.counts.get(name, 0) + real
        self._seen[full] = first + len(inputs_PTI)

    def write(self, path: Path, origin: str) -> None:
        """Write the file that `llama-quantize --imatrix` takes."""
        import gguf
        import numpy as np

        writer = gguf.GGUFWriter(str(path), arch="")
        writer.kv_data[0].clear()  # it has no architecture
        writer.add_type("imatrix")
        writer.add_array("imatrix.datasets", [origin])
        writer.add_uint32("imatrix.chunk_count", len(self.num_real))
        writer.add_uint32("imatrix.chunk_size", max(self.num_real))
        for name in sorted(self.sums):
            writer.add_tensor(f"{name}.in_sum2", self.sums[name].float().numpy()[None])
            writer.add_tensor(f"{name}.counts", np.array([[self.counts[name]]], np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _texts(checkpoint: Checkpoint) -> probes.Texts:
    return probes.draw_texts(checkpoint.origin["dataset"], "train", NUM_TEXTS)


def key(checkpoint: Checkpoint) -> str:
    """The hash of what, beside the checkpoint itself, makes the matrix: the texts, and how much of each is counted."""
    return files.sha256_json([_texts(checkpoint).documents, MAX_TOKENS])


def of_training_data(checkpoint: Checkpoint, architecture: str, path: Path) -> dict:
    """Count over texts of the train split and write the matrix; returns the record that manifests hold of it."""
    from training.export import reference

    texts = _texts(checkpoint)
    longest = min(MAX_TOKENS, checkpoint.config.get("max_position_embeddings", MAX_TOKENS))
    rows = [ids[:longest] for ids in (checkpoint.encoder.encode(text).ids for text in texts.documents) if ids]
    counted = Importance(architecture, checkpoint.num_layers)
    reference.watch(checkpoint, rows, counted)
    counted.write(path, texts.origin)
    return {
        "sha256": files.sha256_file(path), "texts": len(rows), "tokens": sum(map(len, rows)),
        "matrices": len(counted.sums), "drawn_from": texts.origin,
    }  # fmt: skip
