"""A recipe as values: frozen dataclasses whose attributes are the recipe's keys.

Defaults and descriptions live in `schema.json` alone; nothing here fills a value in. `Recipe.build` expects values that
were resolved and checked (`training.recipe.load`).
"""

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Duration:
    """A share of the whole run (`5%`) or a number of steps (`5 steps`)."""

    text: str

    def steps(self, total_steps: int) -> int:
        """The duration in optimizer steps of a run of `total_steps`; never more than that, rounded up."""
        number, unit = re.fullmatch(r"([0-9.]+) ?(%|steps?)", self.text).groups()
        steps = math.ceil(float(number) * total_steps / 100) if unit == "%" else int(number)
        return min(steps, total_steps)


@dataclass(frozen=True)
class Model:
    base: str | None
    arch: dict | None
    config: Path | None  # absolute: relative ones are taken from the file that names them


@dataclass(frozen=True)
class TokenizerChoice:
    path: str | None


@dataclass(frozen=True)
class Data:
    dataset: str | None
    seq_len: int
    micro_batch: int
    packing: bool
    loss_on: str
    overlong: str
    on_error: str
    template_date: str | None


def chunk_tokens(loss_chunk: int | str, vocab_size: int) -> int:
    """Positions whose logits exist at once, 0 for all: `auto` is as many as 128 MiB hold in float32, in whole 64."""
    return max(64, (1 << 25) // vocab_size // 64 * 64) if loss_chunk == "auto" else loss_chunk


@dataclass(frozen=True)
class Memory:
    gradient_checkpointing: bool
    attention: str
    weights: str
    loss_chunk: int | str  # "auto" (`chunk_tokens`), 0 for the whole logits, or a number of tokens
    loss_kernel: str
    double_quant: bool
    kbit_upcast: bool | str  # or "auto"
    keep_outputs: bool | str  # or "auto"
    autocast: bool
    expandable_segments: bool
    cap: str | None  # a size such as 10GiB
    compile: bool | str  # or "auto"
    adapter_dtype: str
    profile: str


@dataclass(frozen=True)
class Optimizer:
    name: str
    impl: str
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    grad_clip: float


@dataclass(frozen=True)
class Schedule:
    kind: str
    warmup: Duration
    min_lr_ratio: float


@dataclass(frozen=True)
class Batch:
    accumulate: int


@dataclass(frozen=True)
class Stop:
    max_steps: int | None
    max_epochs: float | None
    max_hours: float | None
    patience: int | None


@dataclass(frozen=True)
class Lora:
    rank: int
    alpha: float
    dropout: float
    targets: str | tuple[str, ...]  # "all-linear", "attention", or names of modules
    from_: str | None  # a run, a checkpoint or an adapter's folder to go on from


@dataclass(frozen=True)
class Seeds:
    data: int
    train: int
    eval: int


@dataclass(frozen=True)
class Checkpoint:
    every_steps: int | None
    every_minutes: float | None
    keep: int
    background: bool
    initial: bool


@dataclass(frozen=True)
class Evaluate:
    every_steps: int | None
    every_minutes: float | None
    records: int

    @property
    def is_wanted(self) -> bool:
        """Whether anything is validated."""
        return bool(self.every_steps or self.every_minutes)


_SECTIONS = {
    "model": Model, "tokenizer": TokenizerChoice, "data": Data, "memory": Memory, "optimizer": Optimizer,
    "schedule": Schedule, "batch": Batch, "stop": Stop, "lora": Lora, "seeds": Seeds, "checkpoint": Checkpoint,
    "evaluate": Evaluate,
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    name: str
    method: str
    backend: str
    model: Model
    tokenizer: TokenizerChoice
    data: Data
    memory: Memory
    optimizer: Optimizer
    schedule: Schedule
    batch: Batch
    stop: Stop
    lora: Lora | None
    seeds: Seeds
    checkpoint: Checkpoint
    evaluate: Evaluate
    sections: dict[str, dict]  # the sections that methods bring themselves, as plain values

    @classmethod
    def build(cls, values: dict, config_path: Path | None = None) -> "Recipe":
        """Build a recipe from resolved values; `config_path` is `model.config` made absolute."""
        built = {key: section(key, value) for key, value in values.items() if key in _SECTIONS}
        built.setdefault("lora", None)
        built["model"] = Model(values["model"]["base"], values["model"]["arch"], config_path)
        own = {field.name for field in fields(cls)}
        others = {key: value for key, value in values.items() if key not in own and value is not None}
        plain = {name: values[name] for name in ("name", "method", "backend")}
        return cls(**plain, sections=others, **built)


def section(key: str, values: dict | None) -> object:
    """Build a section of plain values; None stays None."""
    if values is None:
        return None
    converted = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    if "warmup" in converted:
        converted["warmup"] = Duration(converted["warmup"])
    if "from" in converted:
        converted["from_"] = converted.pop("from")
    return _SECTIONS[key](**converted)
