"""Charts of characters, for a terminal: a line as a row of blocks, and bars.

Owns characters alone; pictures in files are `figure`'s. Widths are in characters.
"""

from collections.abc import Sequence

_RISING = "▁▂▃▄▅▆▇█"
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
