"""Pictures in files, PNG or SVG by the name. One input gives the same bytes each time.

matplotlib is imported when a picture is drawn, and draws without a screen. The colours are told apart by people who see
few of them (Okabe and Ito's set).
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import files
from training.core.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
_SUFFIXES = (".png", ".svg")
_STYLE = {"svg.hashsalt": "trainyard", "svg.fonttype": "none", "font.size": 8}


def require_kind(path: Path) -> None:
    """Raise UserError unless the file's name says what kind of picture it is to be."""
    if path.suffix not in _SUFFIXES:
        raise UserError(
            "a picture is PNG or SVG, by the file's name", where="--plot", found=path.name,
            expected=" or ".join(f"a name that ends in {suffix}" for suffix in _SUFFIXES),
        )  # fmt: skip


def count_steps(axes: Axes) -> None:
    """Let the horizontal axis, which counts whole things, have marks at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


@contextmanager
def drawing(path: Path, description: str, *, width_inches: float, height_inches: float) -> Iterator[Figure]:
    """A figure that is written at the end, without the date and the version that would differ each time."""
    import matplotlib
    from matplotlib.figure import Figure

    require_kind(path)
    stream, kind = io.BytesIO(), path.suffix[1:]
    unwanted = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(max(width_inches, 4.0), max(height_inches, 2.2)), layout="constrained")
        yield figure
        figure.savefig(stream, format=kind, dpi=120, metadata={"Description": description, **unwanted})
    files.write_bytes(path, stream.getvalue())
