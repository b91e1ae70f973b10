"""The figures of a preparation, as `stats.json` holds them; input = kept + dropped + rejected, in all and by source.

Owns what is counted and how it is put; nothing here decides anything.
"""

from collections.abc import Sequence

import numpy as np

from training.data import record, sampling
from training.data.reading import Read
from training.data.settings import SPLITS
from training.data.source import Source
from training.data.split import Assignment, Grouping

_PERCENTILES = (50, 90, 99)
_MAX_LABELS, _MAX_NAMED = 1000, 3


class Figures:
    """The figures of a preparation, as `stats.json` holds them."""

    def __init__(
        self, sources: Sequence[Source], read: Read, grouping: Grouping, assignment: Assignment,
        copies: np.ndarray | None,
    ):  # fmt: skip
        self._all_sources, self._read, self._grouping = sources, read, grouping
        self._assignment, self._copies = assignment, copies

    def stats(self) -> dict:
        read, assignment = self._read, self._assignment
        kept, dropped = sum(assignment.counts.values()), self._dropped()
        return {
            "schema": 2,
            "form": next(one.form for one in self._all_sources if one.form),
            "records": {
                "input": len(read.ledger) + read.num_rejected,
                "kept": kept,
                "dropped": sum(dropped.values()),
                "rejected": read.num_rejected,
            },
            "dropped": dropped,
            "rejected": dict(sorted(read.rejected_by_rule.items())),
            "lines": dict(sorted(read.lines.items())),
            "groups": {
                "all": assignment.num_groups,
                "linked": assignment.num_linked_groups,
                "straddling": assignment.num_straddling,
                "largest_share": round(assignment.largest_share, 4),
            },
            "near": self._grouping.near,
            "splits": {name: self._split(name) for name, count in assignment.counts.items() if count},
            "sources": self._sources(),
        }

    def _dropped(self) -> dict[str, int]:
        """Records that were good and are not kept, by reason; the draw and the weights come last."""
        dropped = {"duplicates": 0, "near_duplicates": 0, "contaminated": 0} | self._grouping.dropped
        gone = len(self._read.ledger) - sum(self._assignment.counts.values()) - sum(dropped.values())
        is_drawn = self._assignment.settings.draws
        return dropped | {"not_drawn": gone if is_drawn else 0, "by_weight": 0 if is_drawn else gone}

    def _split(self, name: str) -> dict:
        assignment, mask = self._assignment, self._assignment.of(name)
        text_bytes = self._read.ledger.column("text_bytes")[mask]
        if self._copies is not None:
            text_bytes = self._repeated(text_bytes, self._copies[mask])
        return {"records": len(text_bytes), "groups": assignment.num_groups_in(name)} | _lengths(name, text_bytes)

    def _repeated(self, text_bytes: np.ndarray, copies: np.ndarray) -> np.ndarray:
        """In the order in which they are written."""
        return np.concatenate([text_bytes[copies > turn] for turn in range(int(copies.max(initial=1)))])

    def _sources(self) -> list[dict]:
        ledger, read = self._read.ledger, self._read
        of_record, text_bytes = ledger.column("source"), ledger.column("text_bytes")
        kept = self._assignment.sides < len(SPLITS)
        figures = []
        for number, one in enumerate(self._all_sources):
            here = kept & (of_record == number)
            rejected, num_kept = read.rejected[number].total(), int(here.sum())
            figures.append(
                {
                    "label": one.label, "weight": one.weight, "input": read.num_good[number] + rejected,
                    "kept": num_kept, "dropped": read.num_good[number] - num_kept, "rejected": rejected,
                    "text_bytes": int(text_bytes[here].sum(dtype=np.int64)),
                    "left_out": dict(sorted((+one.left_out).items())),
                }
            )  # fmt: skip
        return figures


def _lengths(split: str, text_bytes: np.ndarray) -> dict:
    """Total and spread of the records' lengths, and the place of the longest, which the memory plan reads."""
    points = np.percentile(text_bytes, _PERCENTILES, method="higher")
    spread = {f"p{point}": int(value) for point, value in zip(_PERCENTILES, points, strict=True)}
    longest = int(text_bytes.argmax())
    spread |= {"max": int(text_bytes[longest]), "longest": f"{split}.jsonl:{longest + 1}"}
    return {"text_bytes": int(text_bytes.sum(dtype=np.int64)), "text_bytes_per_record": spread}


def of_draw(labels: np.ndarray, taken: np.ndarray, names: dict[int, str], budget: int, rule: sampling.Rule) -> dict:
    """What a draw took of each label, of those there are the most of first."""
    found, available = np.unique(labels, return_counts=True)
    settled = sampling.shares(available, budget, rule)
    rows = zip(found.tolist(), available.tolist(), settled.counts.tolist(), strict=True)
    by_label = {names[label]: {"available": there, "drawn": drawn} for label, there, drawn in rows}
    ordered = sorted(by_label.items(), key=lambda item: (-item[1]["available"], item[0]))
    return {
        "records": len(taken), "seed": rule.seed, "floor": settled.floor, "cap_records": settled.cap_records,
        "not_kept": _bounds_not_kept(by_label, settled, len(taken), rule), "by_label": dict(ordered[:_MAX_LABELS]),
    }  # fmt: skip


def _bounds_not_kept(by_label: dict, settled: sampling.Shares, num_drawn: int, rule: sampling.Rule) -> list[str]:
    """The bounds of a draw that its labels could not be held to, in words: which, for whom, and what came of it."""
    words, cap_records = [], int(num_drawn * rule.cap)
    over = {label: one["drawn"] for label, one in by_label.items() if one["drawn"] > max(1, cap_records)}
    if over:
        largest = sorted(over.items(), key=lambda item: (-item[1], item[0]))
        shown = [f"{record.shown(label)} {drawn} ({drawn / num_drawn:.0%})" for label, drawn in largest[:_MAX_NAMED]]
        more = f" and {len(over) - _MAX_NAMED} more" if len(over) > _MAX_NAMED else ""
        words.append(
            f"--cap {rule.cap:.4g} (at most {cap_records} of {num_drawn}) is not kept: {', '.join(shown)}{more}"
        )
    under = [label for label, one in by_label.items() if one["drawn"] < min(rule.floor, one["available"])]
    if under:
        words.append(f"--floor {rule.floor} is not kept: at least {settled.floor} of each, {len(under)} have less")
    return words
