"""Under torchrun each process of a run is the command itself, on one machine or on several that share DATA_ROOT.

Owns what torchrun's environment says of that, without torch. The first process makes the run, or opens it, and holds
its machine; the others follow it by the run's name, which it tells them. What dies or hangs is torchrun's to end.
"""

from __future__ import annotations

import os

from training.calculator.parallel import Parallel
from training.core.errors import UserError

MEETING = "TRAINYARD_MEETING"
"""Where the supervisor's processes meet, as an address for torch; torchrun says it in variables of its own."""


def is_here() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def follows() -> bool:
    """Whether torchrun has started this process, and another one is the first."""
    return is_here() and os.environ["RANK"] != "0"


def num_here(parallel: Parallel) -> int:
    """How many of the processes this machine has."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if is_here() else parallel.ranks


def parallel(wanted: Parallel | None) -> Parallel | None:
    """As many processes as torchrun has started, of the kind that is wanted; else what is wanted.

    Raises UserError where another number is asked for.
    """
    if not is_here():
        return wanted
    ranks = int(os.environ["WORLD_SIZE"])
    if wanted and wanted.ranks != ranks:
        raise UserError(
            "torchrun has started another number of processes", where="--ranks", found=wanted.ranks,
            expected=f"{ranks}, or no --ranks",
        )  # fmt: skip
    return Parallel(wanted.kind if wanted else "ddp", ranks)
