"""The states of torch's generators. Python's and NumPy's draw nothing in training: every order is seeded afresh."""

import torch

Tensors = dict[str, torch.Tensor]


def states() -> Tensors:
    """The state of the CPU's generator and of each GPU's."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found |= {f"cuda{i}": value for i, value in enumerate(torch.cuda.get_rng_state_all())}
    return found


def restore(states: Tensors) -> None:
    """Put them back; those of GPUs that are not there are passed over."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda0" in states:
        num_known = min(len(states) - 1, torch.cuda.device_count())
        torch.cuda.set_rng_state_all([states[f"cuda{i}"] for i in range(num_known)])
