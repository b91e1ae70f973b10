"""The states of torch's generators. Python's and NumPy's draw nothing in training: every order is seeded afresh."""

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
