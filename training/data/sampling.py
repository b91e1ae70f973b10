"""A draw for a budget: proportional by a label, with a floor and a cap, preferred tiers first, and exact.

Pure functions of counts and keys. Each label gets its share of the budget, but the floor at least and the cap at most;
what is left or missing is shared out in proportion among the labels between the two. Where the floors alone are more
than the budget, or the caps together less, they give way just as far as they must: the total is the budget, or all
there is. Which records of a label are taken depends on the seed and on each record's own key, not on the input's
order.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

_HALVINGS = 200


@dataclass(frozen=True)
class Rule:
    """How a draw is shared out.

    Args:
        floor: the least records of a label.
        cap: the largest share of the draw that a label may take, 0 to 1.
        seed: decides which of a label's records are taken.
    """

    floor: int = 4
    cap: float = 0.15
    seed: int = 7


@dataclass(frozen=True)
class Shares:
    """Records of each label, and the floor and cap that were really held."""

    counts: np.ndarray
    floor: int
    cap_records: int


def shares(available: np.ndarray, budget: int, rule: Rule) -> Shares:
    """How many records of each label are drawn, given how many there are: the budget in all, or all there are."""
    available = np.asarray(available, np.int64)
    budget = min(int(budget), int(available.sum()))
    floor = _highest(rule.floor, lambda floor: np.minimum(available, floor).sum() <= budget)
    cap = max(floor, int(budget * rule.cap))
    if np.minimum(available, cap).sum() < budget:
        most = int(available.max(initial=0))
        cap = most - _highest(most - cap, lambda less: np.minimum(available, most - less).sum() >= budget)
    low, high = np.minimum(available, floor), np.minimum(available, cap)
    return Shares(_settled(available, low, high, budget), floor, cap)


def _highest(most: int, holds) -> int:
    """The highest number up to `most` for which a condition holds that holds up to some number."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _settled(available: np.ndarray, low: np.ndarray, high: np.ndarray, budget: int) -> np.ndarray:
    """Whole numbers between low and high, as near to one common proportion as they can be, that sum to the budget."""
    least, most = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        less = np.clip(available * middle, low, high).sum() < budget
        least, most = (middle, most) if less else (least, middle)
    wanted = np.clip(available * least, low, high)
    counts = np.floor(wanted).astype(np.int64)
    order = np.lexsort((-available, -(wanted - counts)))  # the largest remainder first, then the largest label
    while (missing := budget - int(counts.sum())) > 0:
        with_room = order[counts[order] < high[order]][:missing]
        counts[with_room] += 1
    return counts


def draw(labels: np.ndarray, tiers: np.ndarray, keys: np.ndarray, budget: int, rule: Rule) -> np.ndarray:
    """Row numbers of the records that are drawn, ascending.

    Args:
        labels, tiers, keys: of each record: what the draw is shared out by, how much it is preferred (the lowest number
            first), and a 64-bit key of its own.
    """
    _, label_of, available = np.unique(labels, return_inverse=True, return_counts=True)
    wanted = shares(available, budget, rule).counts
    order = np.lexsort((spread(keys, rule.seed), tiers, label_of))
    starts = np.cumsum(available) - available
    rank = np.arange(len(order)) - np.repeat(starts, available)
    return np.sort(order[rank < np.repeat(wanted, available)])


def spread(keys: np.ndarray, seed: int) -> np.ndarray:
    """Spread 64-bit keys by a seed, with splitmix64's finalizer (Steele, Lea, Flood 2014, figure 2)."""
    mixed = keys ^ np.uint64(int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little"))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def uniform(keys: np.ndarray, seed: int) -> np.ndarray:
    """Map 64-bit keys to [0, 1) by a seed."""
    return (spread(keys, seed) >> np.uint64(11)).astype(np.float64) / 2.0**53
