"""What decides the labels of records with answers, and what becomes of those that do not fit.

Owns the values and their defaults; importing it costs nothing, so that the command's help can read them.
"""

from dataclasses import asdict, dataclass

from training.core import files
from training.core.errors import UserError
from training.core.report import again, running
from training.data.rules import is_day
from training.recipe.model import Data

LOSS_ON = ("all", "completion", "assistant")
OVERLONG = ("drop", "left", "refuse")
ON_ERROR = ("refuse", "drop")
TOO_LONG, SHORTENED = "too_long", "shortened"
"""What becomes of a record over the limit, as a manifest counts it: left out, or made to fit."""
_FEWEST_TOKENS = 2


@dataclass(frozen=True)
class Settings:
    """What decides the labels and the lengths. Raises UserError for values that are none.

    Args:
        loss_on: `all` trains every token but the BOS, `completion` all from the first answer on, `assistant` answers.
        seq_len: the most tokens of a record.
        overlong: what becomes of a longer one: `drop`, `left` (shortened, its answer last) or `refuse`.
        on_error: `refuse` stops at a record that cannot be used, `drop` leaves it out; both tell.
        template_date: the date that a template which reads the clock is told.
    """

    loss_on: str = "all"
    seq_len: int = 1024
    overlong: str = "drop"
    on_error: str = "refuse"
    template_date: str | None = None

    def __post_init__(self) -> None:
        known_values = {"loss_on": LOSS_ON, "overlong": OVERLONG, "on_error": ON_ERROR}
        for name, known in known_values.items():
            if (value := getattr(self, name)) not in known:
                raise UserError(f"no such {name}", found=value, expected=", ".join(known))
        if self.seq_len < _FEWEST_TOKENS:
            raise UserError("too few tokens for a record", found=self.seq_len, expected=f"{_FEWEST_TOKENS} or more")
        if self.template_date is not None and not is_day(self.template_date):
            raise UserError("not a day", found=self.template_date, expected="a day such as 2026-01-31")

    @classmethod
    def of(cls, data: Data) -> "Settings":
        """The settings of a recipe's `data` section."""
        return cls(data.loss_on, data.seq_len, data.overlong, data.on_error, data.template_date)

    def key(self, template: str | None) -> dict:
        """What of it, with the chat template, decides the tokens."""
        return {**asdict(self), "template": files.sha256_json(template)}


def lever(name: str, value: object) -> str:
    """The command that runs now with a setting, as a recipe's key, or as the option of a look without a recipe."""
    words = running()
    if words[0] == "data-peek" and "--config" not in words:
        return again(f"--{name.replace('_', '-')}", str(value))
    return again(f"data.{name}={value}")
