"""The loss scale of float16, whose small gradients would vanish (Micikevicius et al. 2018, section 3.2).

The loss is multiplied before its gradient is made and the gradient divided after; where that overflows, the same window
is made again at half the scale, so no step is lost. After enough steps without that the scale is doubled. A scale of 1
is none: float16 never comes down to it, so what it has lost by halving it gets back.
"""

import math

import torch

from training.engine.state import TrainState

FIRST_SCALE = 2.0**16
_LEAST_SCALE = 2.0
_STEPS_UNTIL_DOUBLED = 2000


def first(model: torch.nn.Module) -> float:
    """The scale that a run begins with: 1 for a model without float16."""
    return FIRST_SCALE if any(p.dtype == torch.float16 for p in model.parameters()) else 1.0


def lower(state: TrainState, nats: float) -> bool:
    """Halve the scale after a gradient that is not finite; False where it was not the scale's fault."""
    if state.loss_scale <= _LEAST_SCALE or not math.isfinite(nats):
        return False
    state.loss_scale, state.steps_at_scale = state.loss_scale / 2, 0
    return True


def count_step(state: TrainState) -> None:
    """Count a step that went well, and double the scale after many."""
    if state.loss_scale == 1:
        return
    state.steps_at_scale += 1
    if state.steps_at_scale >= _STEPS_UNTIL_DOUBLED:
        state.loss_scale, state.steps_at_scale = state.loss_scale * 2, 0
