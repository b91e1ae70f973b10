"""The losses of one run or several over one axis of steps: as series for a chart, and as a picture in a file."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from training.core.figure import BLUE, GREEN, ORANGE, count_steps, drawing
from training.runs.overview import Overview

_COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#56B4E9")
_STYLES = {"training": {"linewidth": 0.9}, "validation": {"marker": "o", "markersize": 4, "linestyle": "--"}}
Series = tuple[str, list[int], list[float]]


def series(shown: Sequence[Overview]) -> list[Series]:
    """Each run's training loss and validation loss in nats a token, with a label that tells the runs apart."""
    found: list[Series] = []
    for one in shown:
        name = f"{one.run.id} " if len(shown) > 1 else ""
        course = one.course
        found.append((f"{name}training", [event["step"] for event in course.steps], course.losses()))
        points = [(event["step"], event["eval/loss_nats"]) for event in course.validations]
        found.append((f"{name}validation", [step for step, _ in points], [loss for _, loss in points]))
    return [one for one in found if one[1]]


def draw(shown: Sequence[Overview], path: Path) -> None:
    """Draw the curves into a PNG or SVG; validation as points on a dashed line, the best marked."""
    title = "Loss of " + " and ".join(one.run.id for one in shown)
    with drawing(path, title, width_inches=8, height_inches=4.5) as figure:
        axes = figure.subplots()
        for one, colour in zip(shown, itertools.cycle(_COLOURS), strict=False):
            for label, steps, losses in series([one]):
                axes.plot(steps, losses, color=colour, label=f"{one.run.id} {label}", **_STYLES[label])
            if best := one.course.best:
                axes.plot(best["step"], best["eval/loss_nats"], "*", color=colour, markersize=12)
        axes.set_xlabel("step")
        count_steps(axes)
        axes.set_ylabel("loss, nats a token")
        axes.set_title(title)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
