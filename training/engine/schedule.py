"""The learning rate as a pure function of the step and a recorded plan, so that a resume cannot shift it.

Update number `n` (the first is 1) uses `rate(n)`: linear from 0 over the warm-up, then cosine, linear or constant
down to `min_ratio * peak` at the last planned step.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Plan:
    """A learning-rate plan; it lies in every checkpoint and changes only by a recorded event."""

    kind: str
    peak: float
    warmup_steps: int
    total_steps: int
    min_ratio: float

    def rate(self, step: int) -> float:
        """The learning rate of update `step`."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        fall = 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1 - progress
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * fall)
