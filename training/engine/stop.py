"""When a run ends: the first of steps, epochs, hours and patience. Its memory lies in the checkpoint."""

import dataclasses

IMPROVEMENT_NATS = 1e-4


@dataclasses.dataclass
class BestSoFar:
    """The best validation loss, where it was, and how many validations since then brought no gain."""

    loss_nats: float | None = None
    step: int | None = None
    validations_without_gain: int = 0

    def observe(self, loss_nats: float, step: int) -> bool:
        """Take a validation loss in; True when it beats the best by more than `IMPROVEMENT_NATS`."""
        if self.loss_nats is None or loss_nats < self.loss_nats - IMPROVEMENT_NATS:
            self.loss_nats, self.step, self.validations_without_gain = loss_nats, step, 0
            return True
        self.validations_without_gain += 1
        return False


def reason(
    *, step: int, planned_steps: int, planned_by: str, time_is_over: bool, best: BestSoFar, patience: int | None
) -> str | None:
    """Why the run ends after this step (`steps`, `epochs`, `hours`, `patience`), or None while it goes on."""
    if patience is not None and best.validations_without_gain >= patience:
        return "patience"
    if step >= planned_steps:
        return planned_by
    return "hours" if time_is_over else None
