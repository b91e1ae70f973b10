"""What a run is in the middle of: everything of it that is neither weights nor the optimizer's nor a generator's.

All of it lies in a checkpoint's `state.json`, so that a resume goes on as if nothing had happened.
"""

import dataclasses

from training.engine.ladder import Rung
from training.engine.schedule import Plan
from training.engine.stop import BestSoFar


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The moment of the next look at the clock: the first of trained seconds and of a step."""

    seconds: float
    step: int


@dataclasses.dataclass
class TrainState:
    """The state of a run between two steps.

    Args:
        planned_by: what the plan's length comes from: `steps`, `epochs` or `hours`.
        rung: how a window is cut into micro-batches; it changes where memory runs out.
        row: place in the epoch's order.
        forecast: when the clock's plan is to be made again; None before the first time.
        compiled: whether the model is compiled; None until it is decided.
        loss_scale: what the loss is multiplied by before its gradient; 1 but in float16.
    """

    plan: Plan
    planned_by: str
    rung: Rung
    step: int = 0
    epoch: int = 0
    row: int = 0
    trained_tokens: int = 0
    trained_seconds: float = 0.0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    skipped_records: int = 0
    forecast: Forecast | None = None
    compiled: bool | None = None
    loss_scale: float = 1.0
    steps_at_scale: int = 0
    stop_reason: str | None = None
    best: BestSoFar = dataclasses.field(default_factory=BestSoFar)

    def plan_to_json(self) -> dict:
        """What the clock has a say in."""
        forecast = self.forecast and dataclasses.asdict(self.forecast)
        return {"plan": dataclasses.asdict(self.plan), "planned_by": self.planned_by, "forecast": forecast}

    def take_plan(self, values: dict) -> None:
        """Take over what `plan_to_json` gave."""
        self.plan, self.planned_by = Plan(**values["plan"]), values["planned_by"]
        self.forecast = Forecast(**values["forecast"]) if values["forecast"] else None

    @classmethod
    def from_json(cls, values: dict) -> "TrainState":
        """The state as `dataclasses.asdict` gave it."""
        parts = {"plan": Plan, "best": BestSoFar, "rung": Rung, "forecast": Forecast}
        return cls(**values | {name: part(**values[name]) for name, part in parts.items() if values[name]})
