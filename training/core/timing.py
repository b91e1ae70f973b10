"""Times of work, as ratios within one run: a ratio says the same on a slow machine and a fast.

Owns how a time is taken, the quickest of a few calls; a machine that is busy shows larger ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

_TIMES = 3


@dataclass(frozen=True)
class Ratio:
    """Two times and what they are of.

    Args:
        num_bytes: what both work through, where that means something.
        peak_bytes: the most memory of the first, where it was measured; `base_peak_bytes` of the other.
    """

    name: str
    seconds: float
    base_seconds: float
    num_bytes: int | None = None
    peak_bytes: int | None = None
    base_peak_bytes: int | None = None

    @property
    def value(self) -> float:
        return self.seconds / self.base_seconds

    def to_json(self) -> dict:
        """All of it, absent figures left out."""
        return {key: value for key, value in asdict(self).items() if value is not None} | {"ratio": self.value}


def best(work: Callable[[], object], times: int = _TIMES) -> float:
    """Seconds of the quickest of a few calls."""
    return min(seconds(work) for _ in range(times))


def best_of_both(ours: Callable[[], object], theirs: Callable[[], object], times: int = _TIMES) -> tuple[float, float]:
    """Seconds of the quickest call of each, called in turns, so that a busy moment does not meet one alone."""
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(times)]
    return min(one for one, _ in pairs), min(other for _, other in pairs)


def seconds(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
