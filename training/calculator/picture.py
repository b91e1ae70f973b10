"""Pictures: a step's memory over time, and a sweep as a heat-map (in cividis, which all people see alike)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from training.calculator.sweep import Cell
from training.calculator.timeline import Timeline
from training.core import figure
from training.core.errors import UserError
from training.core.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GIB = 1 << 30
_FAR = 4
"""A device that has more than this many times what is reserved is told, not drawn, so that the step can be seen."""
_MOST_POINTS = 400
_MOST_PANELS = 12


# ---- a step over time


def points(timeline: Timeline) -> list[tuple[int, int, int]]:
    """(event, allocated, reserved) for a line of few points: the lowest and the highest of each stretch of events."""
    events = range(len(timeline.allocated_bytes))
    stretch = max(1, -(-2 * len(events) // _MOST_POINTS))
    chosen = set()
    for start in events[::stretch]:
        window = events[start : start + stretch]
        chosen |= {pick(window, key=timeline.allocated_bytes.__getitem__) for pick in (min, max)}
    return [(event, timeline.allocated_bytes[event], timeline.reserved_bytes[event]) for event in sorted(chosen)]


def caption(timeline: Timeline) -> str:
    """What a drawn step says of itself, in the file's description too."""
    event, phase = timeline.peak
    held, kept = format_bytes(timeline.allocated_bytes[event]), format_bytes(max(timeline.reserved_bytes))
    return f"{len(timeline.allocated_bytes)} events; at most {held} allocated, in {phase}, and {kept} reserved"


def draw_step(timeline: Timeline, path: Path, *, title: str, usable_bytes: int | None = None) -> None:
    """Draw what is allocated and reserved over the events of a step, and what the device has, less its context."""
    highest = max(timeline.reserved_bytes)
    unit, name = (_GIB, "GiB") if highest >= _GIB else (1 << 20, "MiB")
    with figure.drawing(path, caption(timeline), width_inches=8.0, height_inches=3.4) as drawn:
        axes = drawn.add_subplot()
        events, allocated, reserved = zip(*points(timeline), strict=True)
        allocated, reserved = ([one / unit for one in counts] for counts in (allocated, reserved))
        axes.fill_between(events, allocated, step="post", color=figure.BLUE, alpha=0.4, linewidth=0, label="allocated")
        axes.plot(events, reserved, drawstyle="steps-post", color=figure.ORANGE, linewidth=1.4, label="reserved")
        if usable_bytes is not None:
            is_near = usable_bytes < _FAR * highest
            label = f"usable for tensors: {format_bytes(usable_bytes)}" + ("" if is_near else ", far above")
            places = [usable_bytes / unit] if is_near else []
            axes.plot([], [], color="black", linestyle="--", linewidth=1, label=label)
            axes.hlines(places, 0, events[-1], color="black", linestyle="--", linewidth=1)
            highest = max(highest, usable_bytes if is_near else 0)
        top = 1.22 * highest / unit
        axes.set(xlim=(0, events[-1]), ylim=(0, top), ylabel=name, title=title, xlabel="allocations and releases")
        figure.count_steps(axes)
        _name_phases(axes, timeline, top)
        axes.legend(loc="lower right", ncols=3)


def _name_phases(axes: Axes, timeline: Timeline, top: float) -> None:
    """A line where each phase begins and its name above, one higher and one lower, since some phases are short."""
    last = len(timeline.allocated_bytes)
    ends = [start for start, _ in timeline.marks[1:]] + [last]
    for number, ((start, phase), end) in enumerate(zip(timeline.marks, ends, strict=True)):
        axes.axvline(start, color="0.6", linewidth=0.7)
        height = top * (0.98 if number % 2 == 0 else 0.91)
        side = "right" if end == last and end - start < last / 8 else "center"
        place = end if side == "right" else (start + end) / 2
        axes.text(place, height, f" {phase.replace('_', ' ')} ", ha=side, va="top")


# ---- a sweep


def draw_sweep(cells: Sequence[Cell], path: Path) -> None:
    """Draw a sweep as a heat-map of its last two axes, one panel for each combination of the others.

    Raises UserError where there would be too many panels.
    """
    axes = [(key, list(dict.fromkeys(values))) for key, values in _axes(cells)]
    *outer, (down, rows), (across, columns) = axes if len(axes) > 1 else [("", [""]), *axes]
    panels = list(itertools.product(*(values for _, values in outer)))
    if len(panels) > _MOST_PANELS:
        raise UserError(
            "too many panels for one picture", where="--sweep", found=len(panels),
            expected=f"at most {_MOST_PANELS} combinations of the axes before the last two; --csv takes any number",
        )  # fmt: skip
    wide = min(len(panels), 3)
    high = -(-len(panels) // wide)
    size = len(rows) * len(columns)
    shares = [_share(cell, cells) for cell in cells]
    inches = {"width_inches": wide * (1.4 + 1.1 * len(columns)), "height_inches": high * (1.3 + 0.6 * len(rows))}
    with figure.drawing(path, f"{len(cells)} estimates", **inches) as drawn:
        for number, panel in enumerate(panels):
            axis = drawn.add_subplot(high, wide, number + 1)
            part = slice(number * size, (number + 1) * size)
            _heat(axis, cells[part], shares[part], len(columns))
            axis.set_xticks(range(len(columns)), columns)
            axis.set_yticks(range(len(rows)), rows)
            title = ", ".join(f"{key}={value}" for (key, _), value in zip(outer, panel, strict=True))
            axis.set(xlabel=across, ylabel=down, title=title or _device_name(cells))


def _axes(cells: Sequence[Cell]) -> list[tuple[str, list[str]]]:
    keys = [key for key, _ in cells[0].values]
    return [(key, [cell.values[place][1] for cell in cells]) for place, key in enumerate(keys)]


def _share(cell: Cell, cells: Sequence[Cell]) -> float:
    """Of the device's usable memory; without a device, of the largest estimate."""
    device = cell.fit.device
    whole = device.usable_bytes if device else max(one.fit.estimate.peak.device_bytes for one in cells)
    return cell.fit.estimate.peak.device_bytes / max(1, whole)


def _device_name(cells: Sequence[Cell]) -> str:
    device = cells[0].fit.device
    return f"share of {device.name}" if device else "share of the largest"


def _heat(axis: Axes, cells: Sequence[Cell], shares: Sequence[float], width: int) -> None:
    grid = [shares[start : start + width] for start in range(0, len(shares), width)]
    axis.imshow(grid, cmap="cividis", vmin=0, vmax=1.5, aspect="auto")
    for place, (cell, share) in enumerate(zip(cells, shares, strict=True)):
        words = f"{cell.fit.estimate.peak.device_bytes / _GIB:.2f} GiB\n{cell.fit.verdict or ''}".strip()
        colour = "black" if share > 0.8 else "white"
        axis.text(place % width, place // width, words, ha="center", va="center", color=colour)
