"""How quantities are written for people, and read from them. Bytes are binary (GiB = 2^30), times are seconds."""

import re

from training.core.errors import UserError

_BINARY = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def format_bytes(count: int | float) -> str:
    """`1536` as `1.5 KiB`."""
    for unit, size in reversed(_BINARY.items()):
        if abs(count) >= size:
            return f"{count / size:.0f} B" if unit == "B" else f"{count / size:.2f} {unit}"
    return "0 B"


def parse_bytes(text: str, where: str | None = None) -> int:
    """`10GiB`, `10 GB` or `4096B` as bytes. Raises UserError naming the spellings that are known.

    `where` is the option or key that holds it. A number without a unit is refused: who writes `--vram 12` means GiB,
    and who writes 4096 may mean bytes.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    try:
        return int(float(match[1]) * (_BINARY | _DECIMAL)[match[2]])  # type: ignore[index]
    except (TypeError, KeyError, ValueError, OverflowError):
        has_no_unit = match is not None and not match[2]
        raise UserError(
            "a size without a unit" if has_no_unit else "not a size", where=where, found=text,
            expected="a number with B, KiB, MiB, GiB, kB, MB or GB, such as "
            + (f"{match[1]}GiB" if has_no_unit else "10GiB"),
        ) from None  # fmt: skip


def format_number(count: int, noun: str) -> str:
    """`1` and `cluster` as `1 cluster`, `2,000` of them as `2,000 clusters`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def format_seconds(seconds: float) -> str:
    """`3725` as `1 h 02 min`, `75` as `1 min 15 s`, `3.21` as `3.2 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"


def format_count(count: int | float) -> str:
    """`4460544` as `4.46 M`."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:g}"
