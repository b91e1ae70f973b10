"""What the loop calls out to, and what it says of a step; `training.engine.trainer` implements it, tests may."""

import contextlib
import dataclasses

from training.engine.state import TrainState
from training.objectives.contract import Score


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports."""

    score: Score
    rate: float
    grad_norm: float
    seconds: float


class Hooks:
    """Does nothing, and never asks for a stop."""

    def on_step(self, state: TrainState, result: StepResult) -> None: ...
    def on_validation(self, state: TrainState, score: Score, is_best: bool) -> None: ...
    def on_event(self, event: str, state: TrainState, **values: object) -> None: ...
    def save(self, state: TrainState) -> None: ...

    def write_seconds(self) -> float:
        """What it takes until the disk has a checkpoint, as far as that is known."""
        return 0.0

    def command(self, target: str, *overrides: str) -> str | None:
        """The command of this target for the run's own recipe, which an error may name as the next one."""

    def stop_requested(self) -> str | None:
        """`pause` or `cancel`, where somebody asked for it."""

    def beat(self, stage: str) -> None:
        """Say that a stage of many parts moves: called after each part, so that only a part's silence is a hang."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Surround `forward` and `backward` of each micro-batch, `optimizer_step`, `validation` or `saving`."""
        return contextlib.nullcontext()
