"""A grid of recipes: every combination of the values of some keys, each with its estimate and verdict."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from training.calculator.fit import Fit, Trace, fit
from training.calculator.parallel import Parallel
from training.core.errors import UserError
from training.recipe.load import load

_MOST_ROWS = 400


@dataclass(frozen=True)
class Cell:
    """One combination, as overrides, and its answer."""

    values: tuple[tuple[str, str], ...]
    fit: Fit

    def to_json(self) -> dict:
        peak = self.fit.estimate.peak
        return {
            "values": dict(self.values), "overrides": " ".join(f"{key}={value}" for key, value in self.values),
            "fits": self.fit.fits, "verdict": self.fit.verdict, "phase": peak.phase,
            "allocated_bytes": peak.allocated_bytes, "reserved_bytes": peak.reserved_bytes,
            "device_bytes": peak.device_bytes,
        }  # fmt: skip


def axes(texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The keys and values of `KEY=V,V,V` arguments. Raises UserError for what is none."""
    found = []
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not all(values.split(",")):
            raise UserError("not an axis of a sweep", where="--sweep", found=text, expected="KEY=V,V,V")
        found.append((key, values.split(",")))
    return found


def run(
    path: Path, overrides: Sequence[str], texts: Sequence[str], *, gpu: str | None = None, vram: str | None = None,
    trace: Trace | None = None, parallel: Parallel | None = None,
) -> list[Cell]:  # fmt: skip
    """Estimate every combination; the last axis changes fastest. A model that the formula does not know is traced."""
    grid = axes(texts)
    combinations = list(itertools.product(*(values for _, values in grid)))
    if len(combinations) > _MOST_ROWS:
        raise UserError(
            "too many combinations", where="--sweep", found=len(combinations), expected=f"at most {_MOST_ROWS}"
        )
    cells = []
    for combination in combinations:
        values = tuple(zip((key for key, _ in grid), combination, strict=True))
        resolved = load(path, [*overrides, *(f"{key}={value}" for key, value in values)])
        answer = fit(resolved, gpu=gpu, vram=vram, with_levers=False, trace=trace, parallel=parallel)
        cells.append(Cell(values, answer))
    return cells


def to_csv(cells: Sequence[Cell]) -> str:
    """The rows as CSV, one column a key."""
    stream = io.StringIO()
    columns = ("verdict", "phase", "allocated_bytes", "reserved_bytes", "device_bytes")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*(key for key, _ in cells[0].values), *columns])
    for cell in cells:
        row = cell.to_json()
        writer.writerow([*(value for _, value in cell.values), *(row[column] for column in columns)])
    return stream.getvalue()
