"""An adapter in PEFT's form beside its base, and the weights that the two are together.

Owns what each tensor of an adapter's file does to which tensor of the base: a pair of factors adds to a matrix, trained
rows take the places of rows, a full copy takes a tensor's place. Every tensor is used, or opening fails. Merged weights
are computed in float32, a block of rows at a time, on the base's own weights in high precision, and cast once.
Source: Hu et al. 2021, LoRA, section 4.1; PEFT 0.21 `tuners/lora`, `utils/save_and_load.py` for the names.

Legend: R rank, I width in, O width out, M rows of a block, K trained rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files
from training.core.errors import IntegrityError, UserError
from training.export import weights
from training.export.weights import Tensor
from training.objectives.adapter_source import SETTINGS, WEIGHTS

if TYPE_CHECKING:
    import torch

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_REFUSED = ("use_dora", "alpha_pattern", "lora_bias", "fan_in_fan_out", "use_qalora", "layer_replication")
_ITEMS_AT_ONCE = 1 << 20
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(\.default)?\.weight")
_ROWS = re.compile(r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta(\.default)?")
_COPY = re.compile(r"(?P<name>.+\.(?:weight|bias))")


@dataclass(frozen=True)
class Pair:
    """The factors of one matrix: it becomes W + scale B A."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class Rows:
    """Rows of a matrix that were trained, by their ids."""

    ids: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class Adapter:
    """What stands beside a base. The keys are names of the base's tensors."""

    folder: Path
    settings: dict
    pairs: dict[str, Pair]
    rows: dict[str, Rows]
    copies: dict[str, Tensor]

    @property
    def counts(self) -> dict[str, int]:
        """How many tensors of the file were used, by what they are."""
        return {"factors": 2 * len(self.pairs), "trained rows": len(self.rows), "full copies": len(self.copies)}

    @property
    def alpha(self) -> float | None:
        """The alpha that over each pair's rank is its scale, as a server scales; None where no single one is (rsLoRA
        with factors of several ranks)."""
        found = {round(pair.scale * pair.a.shape[0], 9) for pair in self.pairs.values()}
        return found.pop() if len(found) == 1 else None


def open_adapter(folder: Path) -> Adapter:
    """Read an adapter's settings and headers. Raises UserError for another kind, IntegrityError for a damaged one."""
    settings = files.read_json(folder / SETTINGS)
    strange = [key for key in _REFUSED if settings.get(key)]
    if settings.get("peft_type") != "LORA" or strange or settings.get("bias", "none") != "none":
        raise UserError(
            "an adapter of another kind", where=folder / SETTINGS,
            found=", ".join(f"{key}: {settings[key]}" for key in strange) or settings.get("peft_type"),
            expected="LoRA by factors, trained rows and full copies; no biases, no DoRA, one alpha",
        )  # fmt: skip
    _require_settings(folder, settings)
    if not (folder / WEIGHTS).is_file():
        raise UserError("the adapter has no weights", where=folder, found=f"no {WEIGHTS}", expected=WEIGHTS)
    return _sorted(folder, settings, weights.open_file(folder / WEIGHTS).tensors)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_rank(value: object) -> bool:
    return type(value) is int and value >= 1


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


_FORMS: dict[str, tuple[Callable[[object], bool], str]] = {
    "r": (_is_rank, "a whole number above 0"),
    "lora_alpha": (_is_number, "a number"),
    "lora_dropout": (lambda value: value is None or _is_number(value), "a number"),
    "use_rslora": (lambda value: value in (None, True, False), "true or false"),
    "base_model_name_or_path": (lambda value: value is None or isinstance(value, str), "a text"),
    "target_modules": (lambda value: value is None or isinstance(value, str) or _are_texts(value), "names"),
    "modules_to_save": (lambda value: value is None or _are_texts(value), "names"),
    "rank_pattern": (
        lambda value: value is None or (isinstance(value, dict) and all(map(_is_rank, value.values()))),
        "a whole number above 0 for each pattern",
    ),
}  # fmt: skip
"""What is read of PEFT's settings, here or by who takes the adapter, and the form that it must have."""


def _require_settings(folder: Path, settings: dict) -> None:
    for key, (holds, expected) in _FORMS.items():
        if not holds(settings.get(key)):
            raise IntegrityError(
                "the adapter's settings are damaged", where=f"{folder / SETTINGS}: {key}",
                found=repr(settings[key])[:80] if key in settings else "nothing", expected=expected,
            )  # fmt: skip


def _sorted(folder: Path, settings: dict, tensors: tuple[Tensor, ...]) -> Adapter:
    factors: dict[str, dict[str, Tensor]] = {}
    rows, copies, unknown = {}, {}, []
    for tensor in tensors:
        name = tensor.name.removeprefix("base_model.model.")
        if match := _FACTOR.fullmatch(name):
            place, key, value = factors.setdefault(_plain(match["module"]), {}), match["factor"], tensor
        elif match := _ROWS.fullmatch(name):
            place, key = rows, _plain(match["module"])
            value = Rows(_ids(folder, settings, match["module"]), tensor)
        elif match := _COPY.fullmatch(name):
            key = name.replace(".modules_to_save.default", "").replace(".original_module", "")
            place, value = copies, tensor
        else:
            unknown.append(tensor.name)
            continue
        is_matrix = len(tensor.shape) == 2 and 0 not in tensor.shape
        if key in place or not tensor.is_floating or not (is_matrix or place is copies):
            unknown.append(f"{tensor.name}, {tensor.dtype} of shape {tensor.shape}")
        place[key] = value
    halves = [name for name, pair in factors.items() if len(pair) != 2]
    if unknown or halves or not (factors or rows or copies):
        raise IntegrityError(
            "the adapter holds tensors that have no meaning here", where=folder / WEIGHTS,
            found=", ".join([*unknown[:3], *(f"one factor of {name}" for name in halves[:3])]) or "no tensor",
            expected="matrices lora_A with lora_B and trainable_tokens_delta, copies of the base's tensors, each once",
        )  # fmt: skip
    pairs = {name: Pair(pair["A"], pair["B"], _scale(settings, pair["A"].shape[0])) for name, pair in factors.items()}
    return Adapter(folder, settings, pairs, rows, copies)


def _plain(module: str) -> str:
    return f"{module.replace('.base_layer', '')}.weight"


def _scale(settings: dict, rank: int) -> float:
    return float(settings["lora_alpha"]) / (rank**0.5 if settings.get("use_rslora") else rank)


def _ids(folder: Path, settings: dict, module: str) -> tuple[int, ...]:
    named = settings.get("trainable_token_indices") or {}
    ids = named.get(module.rpartition(".")[2]) if isinstance(named, dict) else named
    if not isinstance(ids, list) or not ids or not all(type(one) is int and one >= 0 for one in ids):
        raise IntegrityError(
            "trained rows without their ids", where=f"{folder / SETTINGS}: trainable_token_indices", found=ids,
            expected=f"the ids of the rows of {module}",
        )  # fmt: skip
    return tuple(ids)


class Merged(Mapping[str, "MergedTensor"]):
    """The tensors of a base with an adapter, by name, in the base's order; none of them is held.

    A tied base may hold its one matrix twice: transformers ties equal copies, and `checks` refuses others.
    Raises IntegrityError where a tensor of the adapter has no place in the base or does not fit it.
    """

    def __init__(self, base: Mapping[str, Tensor], adapter: Adapter, *, is_tied: bool):
        self.adapter, self._was_tied = adapter, bool(is_tied) and EMBEDDING in base
        self._tensors = {name: MergedTensor(name, tensor) for name, tensor in base.items()}
        if self._was_tied:
            self._tensors.pop(HEAD, None)
        self._untie(base)
        for name, pair in adapter.pairs.items():
            self._place(name, pair.a).add_pair(pair)
        for name, rows in adapter.rows.items():
            self._place(name, rows.values).set_rows(rows)
        if self._was_tied and EMBEDDING in adapter.rows and HEAD in self._tensors and HEAD not in adapter.rows:
            self._tensors[HEAD].set_rows(adapter.rows[EMBEDDING])

    def _untie(self, base: Mapping[str, Tensor]) -> None:
        """Full copies take their places; a tied pair of which a part is trained apart is two tensors (B48)."""
        copies = self.adapter.copies
        if self._was_tied and ({EMBEDDING, HEAD} & copies.keys() or HEAD in self.adapter.pairs):
            self._tensors[HEAD] = MergedTensor(HEAD, base[EMBEDDING])
        for name, copy in copies.items():
            self._place(name, copy).replace(copy)

    def _place(self, name: str, tensor: Tensor) -> MergedTensor:
        if name not in self._tensors:
            raise IntegrityError(
                "a tensor of the adapter has no place in the base", where=f"{tensor.path.name}: {tensor.name}",
                found=f"no {name}", expected=f"one of the base's {len(self._tensors)} tensors",
            )  # fmt: skip
        return self._tensors[name]

    @property
    def is_tied(self) -> bool:
        """Whether one matrix is embedding and head, as it turned out."""
        return self._was_tied and HEAD not in self._tensors

    def __getitem__(self, name: str) -> MergedTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class MergedTensor:
    """One tensor of the base with what the adapter does to it."""

    def __init__(self, name: str, base: Tensor):
        self.name, self.base = name, base
        self.pair: Pair | None = None
        self.rows: Rows | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is a file's own tensor, as it stands."""
        return self.pair is None and self.rows is None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.rows is None:
            return self.base.shape
        return (max(self.base.shape[0], max(self.rows.ids) + 1), *self.base.shape[1:])

    @property
    def dtype(self) -> str:
        """The base's type, float32 where the adapter adds to it: its sum is cast once, by who writes it."""
        return self.base.dtype if self.is_plain else "F32"

    @property
    def is_floating(self) -> bool:
        return self.base.is_floating

    def add_pair(self, pair: Pair) -> None:
        (rank, num_in), (num_out, other_rank) = pair.a.shape, pair.b.shape
        if (num_out, num_in) != self.base.shape or rank != other_rank:
            raise self._misfit(pair.a, f"factors {pair.a.shape} and {pair.b.shape}")
        self.pair = pair

    def set_rows(self, rows: Rows) -> None:
        fits = rows.values.shape == (len(rows.ids), *self.base.shape[1:]) and len(set(rows.ids)) == len(rows.ids)
        beyond = {one for one in rows.ids if one >= self.base.shape[0]}
        if not fits or beyond != set(range(self.base.shape[0], self.base.shape[0] + len(beyond))):
            raise self._misfit(rows.values, f"rows {rows.values.shape} for {len(rows.ids)} ids up to {max(rows.ids)}")
        self.rows = rows

    def replace(self, copy: Tensor) -> None:
        may_grow = self.name in (EMBEDDING, HEAD) and copy.shape[1:] == self.base.shape[1:] and len(copy.shape) == 2
        if copy.shape != self.base.shape and not may_grow:
            raise self._misfit(copy, f"a copy of shape {copy.shape}")
        self.base = copy

    def _misfit(self, tensor: Tensor, found: str) -> IntegrityError:
        return IntegrityError(
            "a tensor of the adapter does not fit the base's", where=f"{tensor.path.name}: {tensor.name}", found=found,
            expected=f"what fits {self.name}, of shape {self.base.shape}",
        )  # fmt: skip

    def blocks(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, rows): the base's own where nothing is added, else float32."""
        if self.is_plain:
            yield from self.base.blocks()
            return
        a_RI = self.pair and self.pair.a.read().double() * self.pair.scale
        b_OR = self.pair and self.pair.b.read().double()
        new_K = None if self.rows is None else self.rows.values.read().float()
        for first, block in self.base.blocks():
            block_MI = block.float()
            if self.pair is not None:
                _add_product(block_MI, b_OR[first : first + len(block)], a_RI)
            if new_K is not None:
                self._put_rows(block_MI, first, new_K)
            yield first, block_MI
        if new_K is not None and self.shape[0] > self.base.shape[0]:
            order = sorted((one, place) for place, one in enumerate(self.rows.ids) if one >= self.base.shape[0])
            yield self.base.shape[0], new_K[[place for _, place in order]]

    def _put_rows(self, block: torch.Tensor, first: int, new_K: torch.Tensor) -> None:
        for place, one in enumerate(self.rows.ids):
            if first <= one < first + len(block):
                block[one - first] = new_K[place]

    def read(self) -> torch.Tensor:
        """The whole tensor, merged."""
        import torch

        return torch.cat([block for _, block in self.blocks()]) if len(self.shape) > 1 else next(self.blocks())[1]


def _add_product(block_MI: torch.Tensor, b_MR: torch.Tensor, a_RI: torch.Tensor) -> None:
    """Add a product in float64 and round once, on one thread, so that no number of threads shows in the bytes."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        step = max(1, _ITEMS_AT_ONCE // block_MI.shape[1])
        for rows, factor in zip(block_MI.split(step), b_MR.split(step), strict=True):
            rows.copy_(torch.addmm(rows.double(), factor, a_RI))
    finally:
        torch.set_num_threads(threads)
