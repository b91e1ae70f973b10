"""A comparison as one HTML file without network, and the same as text: figures, intervals, flips, curves, the chain.

The pictures are SVG inside the page (`training.core.figure`); everything that a model or a person wrote is escaped.
"""

from __future__ import annotations

import html
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from training.core import figure, files
from training.core.errors import UserError
from training.evaluation.verdict import Comparison, Judgement

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1.5rem; }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .6rem; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; white-space: pre-wrap; } svg { max-width: 100%; height: auto; }
.better { color: #00714d; } .worse, .forgot { color: #b34700; } .hash { font-family: monospace; }
"""
_MOST_FLIPS = 200


@dataclass(frozen=True)
class Page:
    """What a report shows.

    Args:
        before, after: the records of both models (`record.record`).
        curves: named curves of a run, each a list of (step, value).
        chain: the links of hashes from the data to the model, (name, hash).
    """

    before: dict
    after: dict
    judgement: Judgement
    curves: tuple[tuple[str, Sequence[tuple[float, float]]], ...] = ()
    chain: tuple[tuple[str, str], ...] = ()


def require_html(path: Path) -> None:
    """Raise UserError unless the file's name ends in .html."""
    if path.suffix != ".html":
        raise UserError("a page is HTML, by the file's name", where="--report", found=path.name,
                        expected="a name that ends in .html")  # fmt: skip


def write(path: Path, page: Page) -> None:
    """Write `path` as HTML and, beside it, the same as `.txt`. Raises UserError unless the name ends in .html."""
    require_html(path)
    files.write_text(path, to_html(page))
    files.write_text(path.with_suffix(".txt"), to_text(page))


# ---- what is shown, once for both forms


def _figures(page: Page) -> Iterator[tuple[str, ...]]:
    yield ("measured", "metric", "before", "after", "better by", "interval", "probability better", "p", "records")
    for one in page.judgement.comparisons:
        yield (
            one.role, one.metric, f"{one.before:.4f}", f"{one.after:.4f}", f"{one.improvement:+z.4f}",
            f"{one.low:+z.4f} to {one.high:+z.4f}", f"{one.probability_better:.3f}",
            f"{one.p_value:.4f}", str(one.num_records),
        )  # fmt: skip


def _flips(one: Comparison) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Titles and rows of the answers that flipped, both ways."""
    for title, flips in (("now right", one.gained), ("no longer right", one.lost)):
        rows = [(flip["question"], flip["reference"], flip["before"], flip["after"]) for flip in flips[:_MOST_FLIPS]]
        more = f", the first {_MOST_FLIPS}" if len(flips) > _MOST_FLIPS else ""
        yield f"{one.role}: {len(flips)} {title}{more}", rows


def _models(page: Page) -> Iterator[tuple[str, ...]]:
    yield ("", "model", "form", "weights")
    for name, record in (("before", page.before), ("after", page.after)):
        model = record["model"]
        yield (name, model["label"], model["form"], files.short(model["sha256"]))


# ---- as text


def to_text(page: Page) -> str:
    """The page as plain text."""
    judgement = page.judgement
    lines = [f"verdict: {judgement.verdict}", *(f"  {reason}" for reason in judgement.reasons)]
    if judgement.marked:
        lines.append(f"  not measured under the same conditions: {', '.join(judgement.marked)}, allowed by name")
    lines += ["", *_columns(list(_models(page))), "", *_columns(list(_figures(page)))]
    for one in judgement.comparisons:
        for title, rows in _flips(one) if one.metric == "agreement" else ():
            lines += ["", title]
            for question, reference, before, after in rows:
                lines += [f"- {_line(question)}", f"    right   {_line(reference)}", f"    before  {_line(before)}",
                          f"    after   {_line(after)}"]  # fmt: skip
    for name, points in page.curves:
        lines += ["", name, *(f"  step {step:g}: {value:.4f}" for step, value in points)]
    for name, record in (("before", page.before), ("after", page.after)):
        if found := _calibration(record):
            lines += ["", f"calibration {name}: {_calibration_text(found)}"]
    lines += ["", *(f"{name:<12}{digest}" for name, digest in page.chain)] if page.chain else []
    return "\n".join(lines) + "\n"


def _line(text: str) -> str:
    return " ".join(text.split())[:300]


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _calibration(record: dict) -> dict | None:
    return ((record["exam"] or {}).get("calibration")) or ((record["guard"] or {}).get("calibration"))


def _calibration_text(found: dict) -> str:
    at = found["at_temperature"]
    return (
        f"Brier {found['brier']:.4f}, calibration error {found['ece']:.4f}; at temperature "
        f"{found['temperature']:.3f} Brier {at['brier']:.4f}, calibration error {at['ece']:.4f}"
    )


# ---- as HTML


def to_html(page: Page) -> str:
    """The page as one HTML document."""
    judgement, escape = page.judgement, html.escape
    parts = [
        f'<h1 class="{judgement.verdict}">{escape(judgement.verdict)}</h1>',
        "<ul>" + "".join(f"<li>{escape(reason)}</li>" for reason in judgement.reasons) + "</ul>",
    ]
    if judgement.marked:
        parts.append(f"<p>Not measured under the same conditions: {escape(', '.join(judgement.marked))}.</p>")
    parts += [_table(list(_models(page))), "<h2>Before and after</h2>", _table(list(_figures(page))), _intervals(page)]
    for one in judgement.comparisons:
        for title, rows in _flips(one) if one.metric == "agreement" else ():
            parts.append(f"<h2>{escape(title)}</h2>")
            parts.append(_table([("question", "right answer", "before", "after"), *rows]) if rows else "<p>none</p>")
    if page.curves:
        parts += ["<h2>Loss</h2>", _curves(page)]
    for name, record in (("before", page.before), ("after", page.after)):
        if found := _calibration(record):
            parts += [f"<h2>Calibration {name}</h2><p>{escape(_calibration_text(found))}</p>", _reliability(found)]
    if page.chain:
        rows = [("link", "sha256"), *page.chain]
        parts += ["<h2>From the data to the model</h2>", _table(rows)]
    head = f'<meta charset="utf-8"><title>{escape(page.after["model"]["label"])}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    body = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows[1:])
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>"


def _svg(description: str, width: float, height: float, draw) -> str:
    """What `draw(axes)` draws, as the text of an SVG element."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.svg"
        with figure.drawing(path, description, width_inches=width, height_inches=height) as drawn:
            draw(drawn.add_subplot())
        return re.sub(r"^.*?(?=<svg)", "", path.read_text(), flags=re.S)


def _intervals(page: Page) -> str:
    """Each gain as a share of what there was before, with its interval."""
    found = page.judgement.comparisons

    def draw(axes) -> None:
        for place, one in enumerate(found):
            unit = abs(one.before) if one.metric != "agreement" else 1.0
            ends = [value / (unit or 1.0) for value in (one.low, one.improvement, one.high)]
            axes.plot([ends[0], ends[2]], [place, place], color=figure.BLUE, linewidth=3)
            axes.plot([ends[1]], [place], "o", color=figure.ORANGE)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(found)), [f"{one.role}, {one.metric}" for one in found])
        axes.set_xlabel("gain (agreement: absolute; losses: as a share of the first)")
        axes.margins(y=0.4)

    return _svg("gains with their intervals", 7.0, 1.0 + 0.5 * len(found), draw)


def _curves(page: Page) -> str:
    def draw(axes) -> None:
        for (name, points), colour in zip(page.curves, (figure.BLUE, figure.ORANGE, figure.GREEN), strict=False):
            axes.plot(*zip(*points, strict=True), color=colour, label=name)
        axes.set_xlabel("step")
        figure.count_steps(axes)
        axes.set_ylabel("nats a token")
        axes.legend()

    return _svg("loss by step", 7.0, 3.0, draw)


def _reliability(found: dict) -> str:
    def draw(axes) -> None:
        bins = found["bins"]
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.8)
        axes.plot([one["mean_probability"] for one in bins], [one["hit_rate"] for one in bins], "o-", color=figure.BLUE)
        axes.set_xlabel("probability of the answer")
        axes.set_ylabel("share that is right")

    return _svg("how often an answer of a probability is right", 4.0, 3.2, draw)
