"""Whether the model is compiled (torch.compile): by the recipe's word, or by a short trial on the longest rows.

What was decided lies in the checkpoint: a resume compiles or does not as the run began. The module is compiled in its
place, so the names of its weights stay plain (B07). A compiled step computes the same in another order of rounding.
"""

import logging
from collections.abc import Callable

import torch

from training.core import timing
from training.core.errors import MachineError
from training.engine.hooks import Hooks
from training.engine.state import TrainState
from training.recipe.model import Recipe

_WORTH_COMPILING = 0.95
"""The share of the plain time that a compiled pass may take at most; compiling costs about a minute."""
_logger = logging.getLogger(__name__)


def settle(
    recipe: Recipe, model: torch.nn.Module, state: TrainState, attempt: Callable[[], object], hooks: Hooks
) -> None:
    """Decide where that is open, and compile where it is decided.

    Args:
        attempt: runs a window forward and backward and leaves no trace of it.

    Raises MachineError where the recipe wants it and this machine cannot.
    """
    if state.compiled is None and recipe.memory.compile == "auto":
        state.compiled, told = _try(model, attempt)
        hooks.on_event("compile", state, compiled=state.compiled, **told)
        return
    if state.compiled is None:
        state.compiled = recipe.memory.compile
    if state.compiled:
        _body(model).compile()
        try:
            attempt()
        except Exception as error:
            if not _is_compilers(error):
                raise
            raise MachineError(
                "torch.compile does not work here", where="memory.compile", found=str(error).partition("\n")[0][:200],
                expected="a C++ compiler (on a GPU also Triton)",
                next_command=hooks.command("train", "memory.compile=false"),
            ) from error  # fmt: skip


def _try(model: torch.nn.Module, attempt: Callable[[], object]) -> tuple[bool, dict]:
    """Time the pass plain and compiled; returns what was quicker, and the figures or the reason against it."""
    attempt()
    plain_seconds = timing.best(attempt)
    _body(model).compile()
    try:
        started = timing.seconds(attempt)
        compiled_seconds = timing.best(attempt)
    except Exception as error:
        if not _is_compilers(error):
            raise
        _plain(model)
        return False, {"error": str(error).partition("\n")[0][:200]}
    figures = {
        "plain_seconds": round(plain_seconds, 4), "compiled_seconds": round(compiled_seconds, 4),
        "compiling_seconds": round(started, 1),
    }  # fmt: skip
    if compiled_seconds > _WORTH_COMPILING * plain_seconds:
        _plain(model)
        return False, figures
    return True, figures


def _body(model: torch.nn.Module) -> torch.nn.Module:
    """The layers below the head, which is applied to trained positions alone, of ever another number."""
    return getattr(model, "base_model", model)


def _plain(model: torch.nn.Module) -> None:
    _body(model)._compiled_call_impl = None


def _is_compilers(error: Exception) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
