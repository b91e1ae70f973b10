"""What decides a dataset besides its records: ratios, seed, cutoff and what stays together.

Owns the defaults and their limits; importing it costs nothing, so that the command's help can read them.
"""

from dataclasses import dataclass

from training.core.errors import UserError
from training.data import record

SPLITS = ("train", "validation", "test", "test_postcutoff")
GROUP_BY = ("group", "record")


@dataclass(frozen=True)
class Settings:
    """What decides the split besides the records. Raises UserError for values that make no split.

    Args:
        train_ratio, val_ratio: shares of the two splits; the rest is test. A split with the share 0 is not asked for.
        seed: decides each group's side.
        cutoff: `YYYY-MM-DD`; records dated after that day go to test_postcutoff, and nowhere else.
        group_by: `group` (the field `group`, else `source`, else the record itself) or `record`.
    """

    train_ratio: float = 0.8
    val_ratio: float = 0.1
    seed: int = 7
    cutoff: str | None = None
    group_by: str = "group"

    def __post_init__(self) -> None:
        if not (0 < self.train_ratio <= 1 and 0 <= self.val_ratio < 1 and self.shares[2] >= 0):
            raise UserError(
                "the ratios make no split",
                where="--train-ratio, --val-ratio",
                found=f"{self.train_ratio:g} and {self.val_ratio:g}",
                expected="train above 0, validation 0 or more, together at most 1 (the rest is test)",
            )
        if self.cutoff is not None and not (record.is_date(self.cutoff) and len(self.cutoff) == len("YYYY-MM-DD")):
            raise UserError("not a day", where="--cutoff", found=self.cutoff, expected="a day like 2026-11-29")
        if self.group_by not in GROUP_BY:
            raise UserError("not a way to group", found=self.group_by, expected=" or ".join(GROUP_BY))

    @property
    def shares(self) -> tuple[float, float, float]:
        return (self.train_ratio, self.val_ratio, round(1.0 - self.train_ratio - self.val_ratio, 9))
