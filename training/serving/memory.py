"""Memory for a model that is about to be served: enough of it, and given back by the server before.

A server that has ended may still hold device memory for a moment; the next one must not be started into that. The
device is asked through NVML, the machine through the kernel. Needed is the file and its context (`memory_bytes` of a
record): a lower bound, since what llama.cpp computes in comes on top.
"""

import time

from training.calculator import devices
from training.calculator.serving_fit import Served
from training.core.errors import MachineError
from training.core.units import format_bytes
from training.serving.runtime import OnWait

RELEASE_SECONDS = 30.0
_POLL_SECONDS = 0.1


def available(device: str) -> devices.Device:
    """The memory of the GPUs together (`cuda`), or of this machine (`cpu`), with who uses it."""
    if device == "cpu":
        return devices.this_machine()
    found = devices.gpus()
    users = tuple(user for gpu in found for user in gpu.users)
    total, used = sum(gpu.total_bytes for gpu in found), sum(gpu.used_bytes for gpu in found)
    return devices.Device("the GPU's memory", "cuda", total, used, users)


def fit(model: Served, device: str, slots: int = 1) -> dict:
    """What a model needs in service, and the largest context of each slot that fits an empty device of the kind."""
    found = available(device)
    largest = model.largest_context_tokens(max(0, found.total_bytes - devices.MARGIN_BYTES), slots)
    return {
        "device": found.name, "device_bytes": found.total_bytes, "slots": slots, "context_tokens": largest,
        "context_length": model.context_length, "needed_bytes": model.total_bytes(largest, slots),
        "file_bytes": model.file_bytes, "cache_bytes_per_token": model.cache_bytes_per_token,
        "batch_bytes": model.batch_bytes(largest),
    }  # fmt: skip


def fit_text(found: dict) -> str:
    """The fit in a line."""
    if not found["context_tokens"]:
        return f"no context fits {format_bytes(found['device_bytes'])} of {found['device']}"
    return (
        f"{found['context_tokens']} of {found['context_length']} tokens of context x {found['slots']} in "
        f"{format_bytes(found['needed_bytes'])}, on {found['device']} ({format_bytes(found['device_bytes'])})"
    )


def require_enough(record: dict, previous: dict | None) -> None:
    """Raise MachineError where the model would not fit, even with what the one in service gives back."""
    found = available(record["device"])
    back = min(previous["memory_bytes"], found.used_bytes) if previous else 0
    if found.available_bytes + back < record["memory_bytes"]:
        raise _not_enough(record, found, "with the model in service gone" if previous else "free")


def wait_released(record: dict, on_wait: OnWait | None = None, budget_seconds: float = RELEASE_SECONDS) -> float:
    """Wait until the memory that a record needs is there and return the seconds.

    Raises MachineError with the needed and the free amount, and who holds the rest, when the time is up.
    """
    started = time.monotonic()
    while (found := available(record["device"])).available_bytes < record["memory_bytes"]:
        waited = time.monotonic() - started
        if waited >= budget_seconds:
            raise _not_enough(record, found, f"free after {budget_seconds:g} s")
        if on_wait:
            on_wait(waited, f"{format_bytes(found.available_bytes)} of {format_bytes(record['memory_bytes'])} free")
        time.sleep(_POLL_SECONDS)
    return time.monotonic() - started


def _not_enough(record: dict, found: devices.Device, when: str) -> MachineError:
    held = f"; held by {', '.join(found.users)}" if found.users else ""
    return MachineError(
        f"not enough of {found.name} to serve the model",
        where=record["model"],
        found=f"{format_bytes(found.available_bytes)} {when}{held}",
        expected=f"at least {format_bytes(record['memory_bytes'])} for the file and its context",
        next_command="nvidia-smi" if record["device"] == "cuda" else "ps aux --sort=-rss | head",
    )
