"""Published measurements of others, each as a recipe where a recipe can say what was run.

Owns `published.csv` (one measurement a row with its source; column `kind` names the counter) and the reading of its
columns. A row that no recipe describes gets a reason; none is dropped. A row is *complete* where it states what an
estimate needs: a length that is no cap, batch, attention, checkpointing and a known counter on one device.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from training.calculator.families import FAMILIES
from training.recipe.load import load
from training.recipe.model import Recipe

FILE = Path(__file__).with_suffix(".csv")
_GIB, _MIB = 1 << 30, 1 << 20

_FAMILIES = (
    ("Qwen2.5", "qwen2"), ("Qwen-", "qwen2"), ("SmolLM2", "llama"), ("TinyLlama", "llama"), ("Llama-", "llama"),
    ("LLaMA-", "llama"), ("CodeLlama", "llama"), ("yi-", "llama"), ("Mistral-7B", "mistral"), ("gemma-2b", "gemma"),
    ("gemma-2-", "gemma2"), ("phi-", "phi"), ("Phi-3-mini", "phi3"), ("stablelm-base-alpha", "gpt_neox"),
)  # fmt: skip
"""By the start of a name. Qwen's first generation has the tensors of qwen2: biases on q, k and v alone."""

_FUSED = {"gpt_neox": "query_key_value", "phi3": "qkv_proj"}
"""One linear for queries, keys and values: adapters on a part of it have no place in a recipe."""

_TARGETS = {
    "q+v": ["q_proj", "v_proj"],
    "q+k+v+o": "attention",
    "q+k+v+o+mlp": "all-linear",
    "q+k+v+o+mlp+head": "all-linear and the head",
    "q+v+o+mlp": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gate+up+down": ["gate_proj", "up_proj", "down_proj"],
    "c_attn (q,k,v fused)": ["q_proj", "k_proj", "v_proj"],
    "DEFAULT (c_attn)": ["q_proj", "k_proj", "v_proj"],
    "DEFAULT": ["q_proj", "k_proj", "v_proj"],
    "default (q,k,v)": ["q_proj", "k_proj", "v_proj"],
    "c_attn+c_proj+w1+w2": "all-linear",
    "all linear": "all-linear",
    "ALL (all linear)": "all-linear",
}
_WEIGHTS = {
    "fp16": ("fp16", False), "bf16": ("bf16", False), "fp32": ("fp32", False), "nf4(+fp32 non-linear)": ("nf4", False),
    "nf4": ("nf4", False), "nf4-dq": ("nf4", False), "nf4 (bnb)": ("nf4", False), "int4 (bnb)": ("nf4", False),
    "bf16 load; Trainer bf16 autocast": ("bf16", True), "fp32 (bf16 autocast)": ("fp32", True),
}  # fmt: skip
_OPTIMIZERS = {
    "adamw_torch": ("adamw", "foreach"), "adamw_torch_fused": ("adamw", "fused"), "adamw8bit": ("adamw8bit", "fused"),
    "adamw8bit (assumed)": ("adamw8bit", "fused"), "adamw8bit (bnb)": ("adamw8bit", "fused"),
    "paged_adamw8bit": ("paged_adamw8bit", "fused"),
}  # fmt: skip
_ATTENTION = {
    "eager": "eager", "sdpa": "sdpa", "sdpa (HF default)": "sdpa", "sdpa/flex": "sdpa", "HF": "sdpa",
    "flash_attention_2": "flash_attention_2",
}  # fmt: skip
_CHECKPOINTING = {"yes": True, "yes (repo scripts)": True, "no": False}


@dataclass(frozen=True)
class Measurement:
    """One counter's reading."""

    kind: str  # "allocated" | "reserved" | "nvml" | "unknown"
    num_bytes: int


@dataclass(frozen=True)
class Row:
    """A row of the file."""

    values: dict[str, str]

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    @property
    def source(self) -> str:
        """The project that published it."""
        text = self["source"].replace("pypi ", "")
        first = re.split(r"[ /]", text)
        return first[0] if first[0] in ("fitcheck-llm", "docs.unsloth.ai") else "/".join(first[:2])

    @property
    def gpu(self) -> str:
        return self["gpu"]

    @cached_property
    def measured(self) -> tuple[Measurement, ...]:
        """The row's own counter, and those that its notes give beside it."""
        found = [Measurement(self["kind"], round(float(self["measured_gib"]) * _GIB))]
        for name, kind in (("allocated_mib", "allocated"), ("process_mib", "nvml")):
            if match := re.search(rf"\b{name}=([\d.]+)", self["notes"]):
                found.append(Measurement(kind, round(float(match.group(1)) * _MIB)))
        return tuple(found)

    @property
    def is_cap(self) -> bool:
        """Whether its length is an upper limit that the run need not have reached."""
        notes = self["notes"]
        capped = (
            "is a cap" in notes
            or "truncated at" in notes
            or "far below" in notes
            or "INVERSE" in notes
            or "padded to the batch" in notes
        )
        return not self["seq_len"].isdigit() or ("longest sample" not in notes and capped)

    @property
    def is_complete(self) -> bool:
        known = self["kind"] in ("allocated", "reserved", "nvml") and self["attn"] in _ATTENTION
        settled = (
            self["grad_ckpt"] in _CHECKPOINTING and self["micro_batch"].isdigit() and "FAILS FLOOR" not in self["notes"]
        )
        return known and settled and not self.is_cap and self.reason is None

    @cached_property
    def reason(self) -> str | None:
        """Why no recipe says what was run; None where one does."""
        return next(_reasons(self), None)

    def recipe(self, folder: Path) -> Recipe:
        """The row as a recipe, by way of files in `folder`, so that it is read as any other."""
        (folder / "config.json").write_text(json.dumps(_config(self)))
        path = folder / "recipe.yaml"
        path.write_text(json.dumps(_values(self)))
        return load(path).recipe


def rows() -> list[Row]:
    """Every row of the file."""
    with FILE.open(newline="") as stream:
        return [Row(values) for values in csv.DictReader(stream)]


def _family(row: Row) -> str | None:
    return next((family for start, family in _FAMILIES if row["model"].startswith(start)), None)


def _reasons(row: Row):
    if row["method"] == "kernel":
        yield "one kernel, no training step"
    if re.search(r" x\d", row["gpu"]):
        yield "several devices"
    if _family(row) is None or not row["hidden"]:
        yield f"the formula does not know the architecture of {row['model']}"
    if "torch.compile" in row["notes"]:
        yield "torch.compile"
    if row["weight_dtype"] not in _WEIGHTS:
        yield f"weights in {row['weight_dtype'] or 'an unnamed type'}"
    if row["optimizer"] not in _OPTIMIZERS:
        yield f"optimizer {row['optimizer']}"
    if row["attn"] not in _ATTENTION:
        yield f"attention {row['attn'] or 'not stated'}"
    if row["grad_ckpt"] not in _CHECKPOINTING:
        yield f"checkpointing {row['grad_ckpt'] or 'not stated'}"
    if row["fused_loss"] not in ("no", "chunked lm_head+CE (128)"):
        yield f"loss {row['fused_loss'] or 'not stated'}"
    if not row["micro_batch"].isdigit():
        yield f"micro-batch {row['micro_batch'] or 'not stated'}"
    if not _length(row):
        yield "length not stated"
    if row["method"] != "full" and (row["lora_targets"] not in _TARGETS or not _rank(row)):
        yield f"adapters on {row['lora_targets']}"
    if row["lora_targets"] == "q+v" and _family(row) in _FUSED:
        yield f"adapters on q+v of {_FUSED[_family(row)]}"
    if "zero2" in row["notes"]:
        yield "DeepSpeed"


def _length(row: Row) -> int:
    match = re.search(r"\d+", row["seq_len"])
    return int(match.group()) if match else 0


def _rank(row: Row) -> int:
    match = re.match(r"\d+", row["lora_r"])
    return int(match.group()) if match else 0


def _config(row: Row) -> dict:
    columns = {
        "vocab_size": "vocab", "hidden_size": "hidden", "intermediate_size": "intermediate",
        "num_hidden_layers": "layers", "num_attention_heads": "heads", "num_key_value_heads": "kv_heads",
    }  # fmt: skip
    sizes = {key: int(row[column]) for key, column in columns.items()}
    written = {"sliding_window": None} if _family(row) == "mistral" else {}
    if _family(row) == "phi":
        written = {"hidden_act": "gelu"}  # litgpt's modules call torch's own
    return {"model_type": _family(row), **sizes, "tie_word_embeddings": row["tied"] == "yes", **written}


def _values(row: Row) -> dict:
    weights, autocast = _WEIGHTS[row["weight_dtype"]]
    name, impl = _OPTIMIZERS[row["optimizer"]]
    is_hf = row["fused_loss"] == "no"
    adapter = "fp32" if row["optim_dtype"] in ("fp32", "", "8bit") else "bf16"
    values = {
        "name": row["id"].lower(), "method": row["method"], "model": {"config": "config.json"},
        "data": {"seq_len": _length(row), "micro_batch": int(row["micro_batch"])},
        "memory": {
            "gradient_checkpointing": _CHECKPOINTING[row["grad_ckpt"]], "attention": _attention(row),
            "weights": weights, "autocast": autocast, "adapter_dtype": adapter,
            "double_quant": row["weight_dtype"] == "nf4-dq", "loss_chunk": 0 if is_hf else 128,
            "profile": "hf" if is_hf else "trainyard",
        },
        "optimizer": {"name": name, "impl": impl},
        "batch": {"accumulate": int(row["grad_accum"] or 1)}, "stop": {"max_steps": 1},
    }  # fmt: skip
    if row["method"] != "full":
        values["lora"] = {"rank": _rank(row), "targets": _targets(row), "dropout": 0}
    return values


def _attention(row: Row) -> str:
    """Soft-capped scores are written out in every library: SDPA has no cap."""
    return "eager" if _family(row) == "gemma2" else _ATTENTION[row["attn"]]


def _targets(row: Row) -> str | list[str]:
    known, names = _TARGETS[row["lora_targets"]], FAMILIES[_family(row)]
    if known != "all-linear and the head":
        return known
    return [*names.qkv, names.output, *names.feed_forward, "lm_head"]
