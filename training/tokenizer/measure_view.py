"""How measurements of tokenizers look: lines for a terminal and a picture in a file. Owns no figures."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from training.core import chart, figure
from training.core.units import format_bytes, format_count
from training.tokenizer.measure import Measured
from training.tokenizer.sweep import Point

_MOST_SOURCES = 12
_NAME_CHARS = 28


def comparison_lines(measured: Sequence[Measured]) -> Iterator[str]:
    """A table of the tokenizers, and bytes per token of each source as bars."""
    yield f"{'tokenizer':<{_NAME_CHARS}} {'entries':>8} {'bytes/token':>11} {'single bytes':>12} {'unused':>14}"
    for one in measured:
        unused = len(one.unused_entries)
        yield (
            f"{_name(one):<{_NAME_CHARS}} {one.tokenizer.vocab_size:>8} {one.all.bytes_per_token:>11.3f} "
            f"{100 * one.single_byte_share:>10.1f} % {unused:>6} {100 * unused / one.tokenizer.vocab_size:>5.1f} %"
        )
    for source in list(measured[0].sources)[:_MOST_SOURCES]:
        yield ""
        yield f"{source} ({format_bytes(measured[0].sources[source].text_bytes)}), bytes per token"
        rows = [(_name(one), one.sources[source].bytes_per_token) for one in measured]
        yield from chart.bars([(name, value, f"{value:.3f}") for name, value in rows])
    if (left := len(measured[0].sources) - _MOST_SOURCES) > 0:
        yield f"and {left} smaller sources, all of them with --json"


def sweep_lines(points: Sequence[Point], best: Point) -> Iterator[str]:
    """A table of the sizes with their price, and the work for a byte of text as bars."""
    titles = {"entries": 8, "bytes/token": 11, "unused": 7, "in vocabulary": 13, "parameters": 10, "peak memory": 11}
    yield " ".join(f"{title:>{width}}" for title, width in titles.items())
    for point in points:
        yield (
            f"{point.vocab_size:>8} {point.measured.all.bytes_per_token:>11.3f} "
            f"{len(point.measured.unused_entries):>7} {format_count(point.vocabulary_parameters):>13} "
            f"{format_count(point.parameters):>10} {format_bytes(point.memory_bytes):>11}"
        )
    yield ""
    yield "multiplications for a byte of text"
    marks = [f"{format_count(point.work_per_byte)}{' (fewest)' if point is best else ''}" for point in points]
    rows = [(str(point.vocab_size), point.work_per_byte) for point in points]
    yield from chart.bars([(name, value, mark) for (name, value), mark in zip(rows, marks, strict=True)])


def draw_comparison(measured: Sequence[Measured], path: Path) -> None:
    """Bytes per token of each source as groups of bars, one bar a tokenizer."""
    sources = list(measured[0].sources)[:_MOST_SOURCES]
    described = "bytes per token by source and tokenizer"
    with figure.drawing(path, described, width_inches=2 + len(sources), height_inches=3.2) as picture:
        axes = picture.subplots()
        width = 0.8 / len(measured)
        for number, one in enumerate(measured):
            places = [place + (number - (len(measured) - 1) / 2) * width for place in range(len(sources))]
            values = [one.sources[source].bytes_per_token for source in sources]
            axes.bar(places, values, width, label=_name(one))
        axes.set_xticks(range(len(sources)), sources, rotation=30 if len(sources) > 3 else 0)
        axes.set_ylabel("bytes per token")
        picture.legend(loc="outside upper left", ncols=2)  # above the bars, which fill the axes


def draw_sweep(points: Sequence[Point], best: Point, path: Path) -> None:
    """Bytes per token, and the work for a byte, over the size of the vocabulary."""
    sizes = [point.vocab_size for point in points]
    described = "bytes per token and multiplications for a byte of text, by the size of the vocabulary"
    with figure.drawing(path, described, width_inches=6, height_inches=3.2) as picture:
        left, right = picture.subplots(1, 2)
        left.plot(sizes, [point.measured.all.bytes_per_token for point in points], "o-", color=figure.BLUE)
        left.set_ylabel("bytes per token")
        right.plot(sizes, [point.work_per_byte for point in points], "o-", color=figure.ORANGE)
        right.axvline(best.vocab_size, color=figure.GREEN, linestyle="--", label=f"fewest: {best.vocab_size}")
        right.set_ylabel("multiplications for a byte")
        picture.legend(loc="outside upper right")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.minorticks_off()
            axes.set_xlabel("entries")


def _name(one: Measured) -> str:
    name = f"{one.tokenizer.name} {one.tokenizer.hash[:6]}"
    return name if len(name) <= _NAME_CHARS else f"{name[: _NAME_CHARS - 1]}…"
