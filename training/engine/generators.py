"""The states of torch's generators. Python's and NumPy's draw nothing in training: every order is seeded afresh.

Of several processes each draws of its own: the first one as a process alone does, another as seed, step and rank say.
"""

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]


def states() -> Tensors:
    """The state of the CPU's generator, and of the GPU's where there is one."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore(states: Tensors) -> None:
    """Put them back; that of a GPU where there is one."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def begin(seed: int, step: int, rank: int) -> None:
    """Let a process draw on its own from a step on; the first one goes on as it stands."""
    if rank:
        torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0]))


def of_all(ranks: list[Tensors]) -> Tensors:
    """The states of every process by name; those of the first have the names that a process alone gives them."""
    return {_name(rank, name): state for rank, states in enumerate(ranks) for name, state in states.items()}


def of_rank(states: Tensors, rank: int) -> Tensors | None:
    """The states of one process; None where there were not so many."""
    found = {name: states[_name(rank, name)] for name in ("cpu", "cuda") if _name(rank, name) in states}
    return found if "cpu" in found else None


def _name(rank: int, name: str) -> str:
    return f"rank{rank}/{name}" if rank else name
