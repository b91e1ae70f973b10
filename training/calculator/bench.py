"""The estimates held against published measurements: signed errors by source, method, attention and counter."""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from training.calculator.formula import estimate
from training.calculator.published import Measurement, Row, rows
from training.core import files
from training.core.errors import UserError


@dataclass(frozen=True)
class Error:
    """An estimate beside one reading; `relative` is positive where the estimate is above it."""

    row: Row
    kind: str
    measured_bytes: int
    estimated_bytes: int

    @property
    def relative(self) -> float:
        return self.estimated_bytes / self.measured_bytes - 1

    def to_json(self) -> dict:
        return {
            "id": self.row["id"], "source": self.row.source, "method": self.row["method"],
            "attention": self.row["attn"], "kind": self.kind, "complete": self.row.is_complete,
            "measured_bytes": self.measured_bytes, "estimated_bytes": self.estimated_bytes,
            "relative_error": round(self.relative, 6),
        }  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """Every row of the file: as errors, or with the reason why not."""

    errors: tuple[Error, ...]
    left_out: tuple[Row, ...]

    @property
    def described(self) -> set[str]:
        """The ids of the rows that were estimated."""
        return {error.row["id"] for error in self.errors}

    def to_json(self) -> dict:
        return {
            "schema": 1,
            "errors": [error.to_json() for error in self.errors],
            "left_out": [{"id": row["id"], "model": row["model"], "reason": row.reason} for row in self.left_out],
            "targets": targets(self.errors),
        }


def run() -> Bench:
    """Estimate every row that a recipe describes."""
    errors, left_out = [], []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows():
            if row.reason is not None:
                left_out.append(row)
                continue
            peak = estimate(row.recipe(Path(folder)), on_cpu=False, gpu=row.gpu).peak
            errors += [_error(row, one, peak) for one in row.measured]
    return Bench(tuple(errors), tuple(left_out))


def _error(row: Row, measured: Measurement, peak: object) -> Error:
    counted = {"allocated": peak.allocated_bytes, "nvml": peak.device_bytes}.get(measured.kind, peak.reserved_bytes)
    return Error(row, measured.kind, measured.num_bytes, counted)


def targets(errors: Sequence[Error]) -> dict:
    """The figures that the complete rows are judged by."""
    complete = [error for error in errors if error.row.is_complete]
    allocated = [abs(error.relative) for error in complete if error.kind == "allocated"]
    outside = [error for error in complete if error.kind in ("reserved", "nvml")]
    small = [error.relative for error in outside if error.row["attn"] != "eager"]
    eager = [error.relative for error in outside if error.row["attn"] == "eager"]
    cut = [error.relative for error in errors if "truncated at" in error.row["notes"]]
    t4 = [abs(error.relative) for error in complete if error.kind == "allocated" and error.row.gpu.startswith("T4")]
    return {
        "allocated": {"rows": len(allocated), "median": median(allocated), "nine_in_ten": nine_in_ten(allocated)},
        "allocated_t4": {"rows": len(t4), "worst": max(t4)},
        "outside": {"rows": len(small), "lowest": min(small), "nine_in_ten": nine_in_ten(small)},
        "truncated": {"rows": len(cut), "lowest": min(cut), "nine_in_ten": nine_in_ten(cut)},
        "outside_eager": {"rows": len(eager), "lowest": min(eager), "nine_in_ten": nine_in_ten(eager)},
    }


def nine_in_ten(values: Sequence[float]) -> float:
    """The value that nine in ten do not exceed."""
    return sorted(values)[max(0, -(-9 * len(values) // 10) - 1)]


# ---- as a page shows it


def table(bench: Bench) -> str:
    """The errors by source, method, attention and counter, then what is left out and why, as Markdown."""
    groups: dict[tuple, list[Error]] = defaultdict(list)
    for error in bench.errors:
        complete = "yes" if error.row.is_complete else "no"
        groups[(error.row.source, error.row["method"], error.row["attn"], error.kind, complete)].append(error)
    lines = [
        "| source | method | attention | counter | complete | rows | lowest | median | highest |",
        "|---|---|---|---|---|---:|---:|---:|---:|",
    ]
    for key, errors in sorted(groups.items()):
        found = [error.relative for error in errors]
        figures = " | ".join(percent(one) for one in (min(found), median(found), max(found)))
        lines.append(f"| {' | '.join(key)} | {len(found)} | {figures} |")
    lines += ["", "| left out because | rows |", "|---|---:|"]
    reasons = Counter(row.reason for row in bench.left_out)
    lines += [
        f"| {reason} | {number} |" for reason, number in sorted(reasons.items(), key=lambda one: (-one[1], one[0]))
    ]
    return "\n".join(lines)


def judgement(bench: Bench) -> list[tuple[str, str]]:
    """The complete rows' figures in words."""
    found = targets(bench.errors)

    def outside(figures: dict) -> str:
        return (
            f"{figures['rows']} readings: lowest {percent(figures['lowest'])}, nine in ten over by at most "
            f"{percent(figures['nine_in_ten'])}"
        )

    allocated = found["allocated"]
    return [
        (
            "allocated",
            f"{allocated['rows']} readings: median {allocated['median'] * 100:.2f} %, nine in ten within "
            f"{allocated['nine_in_ten'] * 100:.2f} %, on the T4 the worst {found['allocated_t4']['worst'] * 100:.2f} %",
        ),
        ("outside", outside(found["outside"])),
        ("outside, eager", outside(found["outside_eager"])),
        ("truncated", outside(found["truncated"]) + "; these are not among the complete ones"),
    ]


def line(error: Error) -> str:
    """One reading as a line."""
    row = error.row
    settings = f"{row['method']} {row['micro_batch']} x {row['seq_len']} {row['attn']}"
    return f"{row['id']:<6}{row['model'][:24]:<26}{settings:<38}{error.kind:<10}{percent(error.relative):>9}"


MARK = "bench-memfit"


def page_part(bench: Bench) -> str:
    """What a page shows: the judgement of the complete rows, and the table."""
    return "\n".join([*(f"- {name}: {text}" for name, text in judgement(bench)), "", table(bench)])


def write(page: Path, mark: str, part: str) -> None:
    """Replace what stands between a page's two comments that name `mark`."""
    start, end = (f"<!-- made by {mark}: {side} here -->" for side in ("from", "to"))
    before, _, rest = page.read_text().partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise UserError("the page has no place for the table", where=page, expected=f"{start} and {end}")
    files.write_text(page, f"{before}{start}\n\n{part}\n\n{end}{after}")


def percent(value: float) -> str:
    """A signed error as a page shows it."""
    return f"{value * 100:+.1f} %"
