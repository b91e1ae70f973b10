"""Under which conditions a model was measured, and whether two measurements may be compared.

An identity has three parts: `model` (which weights), `paper` (which records or questions, how they are read and
scored) and `conditions` (tokenizer, template, precision, and the server's arguments or PyTorch's attention). Two
measurements compare where paper and conditions are equal. What differs is refused unless it is allowed by its name, and
then stands in the comparison.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from training.core import files
from training.core.errors import UserError
from training.core.report import again

VERSION = 1
"""Of the way that scores are computed; part of every identity."""
NAMES = ("tokenizer", "template", "precision", "attention", "runtime", "quant_type", "server")
Advice = Callable[[str], str]
"""The next command where conditions differ, made of their names, `precision,server`."""


def with_allow(names: str) -> str:
    """The advice of a command that has --allow."""
    return again("--allow", names)


@dataclass(frozen=True)
class Identity:
    """What a measurement is of."""

    model: dict
    paper: dict
    conditions: dict

    @property
    def sha256(self) -> str:
        return files.sha256_json(self.to_json())

    def to_json(self) -> dict:
        return {"version": VERSION, "model": self.model, "paper": self.paper, "conditions": self.conditions}

    @classmethod
    def from_json(cls, values: dict) -> "Identity":
        return cls(values["model"], values["paper"], values["conditions"])


def pytorch(tokenizer, date: str | None, precision: str, attention: str, device: str) -> dict:
    """The conditions of a measurement in PyTorch; `date` is what a template that asks for the day is told."""
    return _of_tokenizer(tokenizer, date) | {
        "runtime": "pytorch", "precision": precision, "attention": attention, "quant_type": None,
        "server": {"device": device},
    }  # fmt: skip


def served(tokenizer, date: str | None, quant_type: str, server: dict) -> dict:
    """The conditions of a measurement through a server of a GGUF file."""
    return _of_tokenizer(tokenizer, date) | {
        "runtime": "llama.cpp", "precision": None, "attention": None, "quant_type": quant_type, "server": server
    }  # fmt: skip


def _of_tokenizer(tokenizer, date: str | None) -> dict:
    template = tokenizer.chat_template if date is None else [tokenizer.chat_template, date]
    return {"tokenizer": tokenizer.hash, "template": files.sha256_json(template)}


def differences(one: Identity, other: Identity) -> list[str]:
    """The names of what differs besides the model: `paper`, and the names of conditions."""
    found = [] if one.paper == other.paper else ["paper"]
    return found + [name for name in NAMES if one.conditions.get(name) != other.conditions.get(name)]


def require_comparable(
    one: Identity, other: Identity, allowed: Collection[str] = (), advice: Advice = with_allow
) -> list[str]:
    """Return what differs and is allowed by name. Raises UserError where anything else differs, or the paper does."""
    differing = differences(one, other)
    if "paper" in differing:
        raise UserError(
            "the two were not measured on the same records", found=_told(other.paper), expected=_told(one.paper),
            next_command="make evaluate CHECKPOINT=latest ARGS='--exam my-exam.jsonl --against smollm2-135m-instruct'",
        )  # fmt: skip
    refused = [name for name in differing if name not in allowed]
    if refused:
        raise UserError(
            "the two were measured under different conditions",
            found="; ".join(f"{name}: {_shown(other, one, name)}" for name in refused),
            expected="; ".join(f"{name}: {_shown(one, other, name)}" for name in refused),
            next_command=advice(",".join(differing)),
        )  # fmt: skip
    return differing


def _shown(identity: Identity, beside: Identity, name: str) -> str:
    """A condition for people; of one that has parts, those that are not the same beside it."""
    value, other = identity.conditions.get(name), beside.conditions.get(name)
    if isinstance(value, dict) and isinstance(other, dict):
        return ", ".join(f"{key} {value.get(key)}" for key in value | other if value.get(key) != other.get(key))
    return files.short(value) if isinstance(value, str) and len(value) == 64 else str(value)


def _told(paper: dict) -> str:
    if paper["kind"] == "exam":
        return f"exam {paper['name']} {files.short(paper['sha256'])}, {paper['num_questions']} questions"
    return f"{paper['split']} of {files.short(paper['dataset'])}"
