"""The rows of the campaign: what is varied, and the recipe that says so."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

_BIG = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
"""0.23 B parameters: full fine-tuning in 16 bits takes 1.9 GB of weights, gradients and states."""
_SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 256, "max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measurement.

    Args:
        method: `pretrain` is the trainer's own step, everything else the plain Hugging Face step.
        shape: changes of the model's configuration.
        sections: changes of the recipe's sections.
        environment: what the process is started with.
    """

    name: str
    method: str = "pretrain"
    shape: dict = field(default_factory=dict)
    sections: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    is_padded: bool = False

    def write(self, folder: Path, weights: str, *, is_small: bool = False) -> Path:
        """Write the recipe, and the model's configuration where it names one; returns the recipe's path."""
        shape = _BIG | self.shape | (_SMALL if is_small else {})
        is_own = self.method == "pretrain"
        sections = {
            "data": {"seq_len": 512, "micro_batch": 4, "packing": is_own},
            "memory": {"weights": weights, "gradient_checkpointing": False, "profile": "trainyard" if is_own else "hf"},
            "stop": {"max_steps": 1},
        }  # fmt: skip
        for name, values in self.sections.items():
            sections[name] = sections.get(name, {}) | values
        if is_small:
            sections["data"] |= {"seq_len": 32, "micro_batch": 2}
        if is_own:
            model = {"arch": {"family": "llama", **shape}}
        else:
            (folder / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
            model = {"config": "config.json"}
        path = folder / "recipe.yaml"
        path.write_text(json.dumps({"name": self.name, "method": self.method, "model": model, **sections}, indent=1))
        return path


def _lora(adapter: str, **memory: object) -> dict:
    return {"memory": {"adapter_dtype": adapter, **memory}, "lora": {"rank": 16, "alpha": 32, "dropout": 0}}


_CHECKPOINTED = {"memory": {"gradient_checkpointing": True}}
_SEGMENTS = dict.fromkeys(("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True")
_VOCABULARY = {"vocab_size": 128000, "num_hidden_layers": 2}
_SHORT = {"data": {"micro_batch": 1, "seq_len": 128}}

ROWS = (
    Row("full-fused"),
    Row("full-foreach", sections=_SHORT | {"optimizer": {"impl": "foreach"}}),
    Row("full-checkpointed", sections=_CHECKPOINTED),
    Row("full-chunked-loss", sections={"memory": {"loss_chunk": 512}}),
    Row("full-eager", sections={"memory": {"attention": "eager"}}),
    Row("full-accumulated", sections={"batch": {"accumulate": 2}}),
    Row("hf-full", "full"),
    Row("hf-padded", "full", is_padded=True),
    Row("lora-fp32", "lora", sections=_lora("fp32")),
    Row("lora-bf16", "lora", sections=_lora("bf16")),
    Row("lora-eager", "lora", sections=_lora("fp32", attention="eager")),
    Row("nf4", "qlora", sections=_lora("fp32", weights="nf4", gradient_checkpointing=True)),
    Row("tied", shape=_VOCABULARY | {"tie_word_embeddings": True}, sections=_SHORT),
    Row("untied", shape=_VOCABULARY, sections=_SHORT),
    Row("expandable-segments", sections={"memory": {"expandable_segments": True}}, environment=_SEGMENTS),
)
"""Stages of the context and the workspaces of both threads stand in every row. The pairs that answer a question:
`full-fused` and `expandable-segments`; `hf-full` and `hf-padded`, with `full-fused` as the packed one; `tied`, with its
three copies of the embedding's gradient, and `untied`. `full-foreach` and `untied` are short, so that other instants
than the loss win."""
