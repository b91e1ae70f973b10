"""What decides a dataset besides its records: split, near-duplicates, draw, and what becomes of a bad record.

Owns the defaults and their limits; importing it costs nothing, so that the command's help can read them.
"""

from dataclasses import asdict, dataclass

from training.core.errors import UserError
from training.core.units import format_bytes
from training.data import rules

SPLITS = ("train", "validation", "test", "test_postcutoff")
GROUP_BY = ("group", "record")
ON_ERROR = ("stop", "report", "drop")
MAX_RECORD_BYTES = 16 << 20
_MOST_RECORD_BYTES = 2 << 30
_DRAW = ("draw", "draw_by", "floor", "cap", "prefer", "draw_seed", "draw_eval", "eval_seed")


@dataclass(frozen=True)
class Settings:
    """Raises UserError for values that make no dataset.

    Args:
        train_ratio, val_ratio: shares of the two splits; the rest is test. A split with the share 0 is not asked for.
        seed: decides each group's side.
        cutoff: `YYYY-MM-DD`; records dated after that day go to test_postcutoff, unless they name a split.
        group_by: `group` (the field `group`, else `source`, else the record itself) or `record`.
        near: the overlap of shingles from which two records are near-duplicates and lie on one side; 0 looks for none.
        drop_near: keep one record of each cluster of near-duplicates.
        ngram: words in a row that a record must not share with a file that is decontaminated against.
        draw: records of train, exactly; None for all. `draw_by`: the field that it is shared out by, each value getting
            its share, at least `floor` records and at most the share `cap` of the draw. `prefer`: `FIELD=VALUE,VALUE`,
            what is taken first. `draw_seed`: decides which.
        draw_eval: records of validation and of test, drawn alike, by a seed of their own.
        on_error: `stop` at the first bad record, `report` them all and write nothing, or `drop` and count them.
        max_record_bytes: the longest line that is read.
    """

    train_ratio: float = 0.8
    val_ratio: float = 0.1
    seed: int = 7
    cutoff: str | None = None
    group_by: str = "group"
    near: float = 0.8
    drop_near: bool = False
    ngram: int = 13
    draw: int | None = None
    draw_by: str | None = None
    floor: int = 4
    cap: float = 0.15
    prefer: str | None = None
    draw_seed: int = 7
    draw_eval: int | None = None
    eval_seed: int = 7
    on_error: str = "stop"
    max_record_bytes: int = MAX_RECORD_BYTES

    def __post_init__(self) -> None:
        if not (0 < self.train_ratio <= 1 and 0 <= self.val_ratio < 1 and self.shares[2] >= 0):
            raise UserError(
                "the ratios make no split",
                where="--train-ratio, --val-ratio",
                found=f"{self.train_ratio:g} and {self.val_ratio:g}",
                expected="train above 0, validation 0 or more, together at most 1 (the rest is test)",
            )
        if self.cutoff is not None and not rules.is_day(self.cutoff):
            raise UserError("not a day", where="--cutoff", found=self.cutoff, expected="a day like 2026-11-29")
        if self.group_by not in GROUP_BY:
            raise UserError("not a way to group", found=self.group_by, expected=" or ".join(GROUP_BY))
        if self.on_error not in ON_ERROR:
            raise UserError("not a way with bad records", found=self.on_error, expected=" or ".join(ON_ERROR))
        self._check_numbers()

    def _check_numbers(self) -> None:
        checks = [
            ("--near", self.near, self.near == 0 or 0.5 <= self.near <= 1, "0.5 to 1, or 0 to look for none"),
            ("--drop-near", "--near 0", not (self.drop_near and self.near == 0), "a threshold to drop from"),
            ("--ngram", self.ngram, self.ngram >= 2, "2 words or more"),
            ("--draw", self.draw, self.draw is None or self.draw > 0, "1 record or more"),
            ("--draw-eval", self.draw_eval, self.draw_eval is None or self.draw_eval > 0, "1 record or more"),
            ("--floor", self.floor, self.floor >= 0, "0 records or more"),
            ("--cap", self.cap, 0 < self.cap <= 1, "a share like 15%"),
            ("--prefer", self.prefer, self.prefer is None or all(self.preferred), "FIELD=VALUE,VALUE,..."),
            ("--floor, --cap", "no --draw-by", self.draw_by or not self._shares_out, "--draw-by FIELD, whose values "
             "they bound"),
            ("--draw-by", "no --draw", self.draws or not (self.prefer or self.draw_by), "--draw, --draw-eval"),
            ("--max-record", format_bytes(self.max_record_bytes), 0 < self.max_record_bytes <= _MOST_RECORD_BYTES,
             f"at most {format_bytes(_MOST_RECORD_BYTES)}"),
        ]  # fmt: skip
        for where, found, is_right, expected in checks:
            if not is_right:
                raise UserError("a setting makes no data set", where=where, found=found, expected=expected)

    @property
    def shares(self) -> tuple[float, float, float]:
        return (self.train_ratio, self.val_ratio, round(1.0 - self.train_ratio - self.val_ratio, 9))

    @property
    def draws(self) -> bool:
        """Whether anything is drawn."""
        return self.draw is not None or self.draw_eval is not None

    @property
    def _shares_out(self) -> bool:
        """Whether bounds are set for a value's share of a draw."""
        return (self.floor, self.cap) != (Settings.floor, Settings.cap)

    @property
    def preferred(self) -> tuple[str, list[str]]:
        """The field that a draw prefers by, and its values, the best first."""
        name, _, values = (self.prefer or "").partition("=")
        return name, [value for value in values.split(",") if value]

    def key(self, *, decontaminates: bool) -> dict:
        """What of the settings decides the bytes that are written."""
        body = asdict(self)
        unused = [] if self.draws else list(_DRAW)
        unused += [] if self.near else ["drop_near"]
        unused += [] if decontaminates else ["ngram"]
        unused += [] if self.on_error == "drop" else ["on_error", "max_record_bytes"]
        return {name: value for name, value in body.items() if name not in unused}
