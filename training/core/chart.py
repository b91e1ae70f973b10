"""Charts of characters, for a terminal: a line as a row of blocks, bars, and curves over axes.

Owns characters alone; pictures in files are `figure`'s. Widths are in characters.
"""

import itertools
from collections.abc import Iterator, Sequence

_RISING = "▁▂▃▄▅▆▇█"
_MARKS = "•×+o*#"
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Draw values as blocks, the mean of each of `width` equal parts, from the lowest to the highest."""
    if not values:
        return ""
    parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [sum(part) / len(part) for part in parts if part]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_RISING[min(7, int(8 * (mean - low) / span))] for mean in means)


def bar(share: float, width: int = 30) -> str:
    """Draw a share of 0 to 1 as a bar, exact to an eighth of a character; what is not nothing shows."""
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8]


def bars(rows: Sequence[tuple[str, float, str]], width: int = 30) -> list[str]:
    """Lines of `label bar note`, the longest bar for the highest value; rows are (label, value, note)."""
    highest = max((value for _, value, _ in rows), default=0) or 1
    indent = max((len(label) for label, _, _ in rows), default=0)
    return [f"{label:>{indent}} {bar(value / highest, width):<{width}} {note}".rstrip() for label, value, note in rows]


def curves(
    series: Sequence[tuple[str, Sequence[float], Sequence[float]]], width: int = 72, height: int = 14
) -> list[str]:
    """Draw curves over one pair of axes, each with a mark of its own that the last lines name.

    Args:
        series: (label, x values, y values) of each; in a column stands the mean of the values that fall into it.
    """
    drawn = [(label, list(xs), list(ys)) for label, xs, ys in series if len(xs)]
    if not drawn:
        return []
    all_x, all_y = [x for _, xs, _ in drawn for x in xs], [y for _, _, ys in drawn for y in ys]
    left, right, low, high = min(all_x), max(all_x), min(all_y), max(all_y)
    grid = [[" "] * width for _ in range(height)]
    for (_, xs, ys), mark in zip(drawn, _marks(), strict=False):
        for column, y in _columns(xs, ys, left, right, width):
            grid[height - 1 - _cell(y, low, high, height)][column] = mark
    return [*_with_axes(grid, left, right, low, high), *_named(drawn, width)]


def _marks() -> Iterator[str]:
    return itertools.cycle(_MARKS)


def _named(drawn: Sequence[tuple], width: int) -> list[str]:
    """Each mark with its label, on one line where that is not too long."""
    names = [f"{mark} {label}" for (label, _, _), mark in zip(drawn, _marks(), strict=False)]
    together = "  ".join(names)
    return [together] if len(together) <= max(width, 40) else names


def _cell(value: float, low: float, high: float, cells: int) -> int:
    """Which of `cells` equal parts of low..high a value falls into."""
    return min(cells - 1, int(cells * (value - low) / ((high - low) or 1.0)))


def _columns(
    xs: Sequence[float], ys: Sequence[float], left: float, right: float, width: int
) -> Iterator[tuple[int, float]]:
    """The columns that have values, each with their mean."""
    found: dict[int, list[float]] = {}
    for x, y in zip(xs, ys, strict=True):
        found.setdefault(_cell(x, left, right, width), []).append(y)
    return ((column, sum(values) / len(values)) for column, values in found.items())


def _with_axes(grid: list[list[str]], left: float, right: float, low: float, high: float) -> list[str]:
    labels = {0: f"{high:.4g}", len(grid) // 2: f"{(low + high) / 2:.4g}", len(grid) - 1: f"{low:.4g}"}
    margin = max(len(label) for label in labels.values())
    rows = [f"{labels.get(i, ''):>{margin}} ┤{''.join(row).rstrip()}" for i, row in enumerate(grid)]
    ends = f"{left:g}", f"{right:g}"
    gap = max(1, len(grid[0]) - len(ends[0]) - len(ends[1]))
    return [*rows, f"{'':>{margin}} └{'─' * len(grid[0])}", f"{'':>{margin}}  {ends[0]}{' ' * gap}{ends[1]}"]
