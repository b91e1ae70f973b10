"""What runs on a device peaked at, beside what had been estimated for them: this machine's own record."""

from __future__ import annotations

from dataclasses import dataclass

from training.calculator.devices import Device, is_same
from training.core.errors import IntegrityError
from training.runs.folder import RunFolder, all_runs


@dataclass(frozen=True)
class Past:
    """A finished run. Both figures are of one count: tensors on a GPU, else the process's resident memory."""

    run: str
    estimate_bytes: int
    peak_bytes: int

    @property
    def difference(self) -> float:
        """The estimate over the peak, as a share of the peak."""
        return self.estimate_bytes / self.peak_bytes - 1

    def to_json(self) -> dict:
        return {
            "run": self.run, "estimate_bytes": self.estimate_bytes, "peak_bytes": self.peak_bytes,
            "difference": round(self.difference, 6),
        }  # fmt: skip


def of_device(device: Device | None) -> tuple[Past, ...]:
    """The finished runs of a device, the newest first; a run folder that is damaged or incomplete is no record."""
    found = (_past(run, device) for run in all_runs()) if device else ()
    return tuple(past for past in found if past is not None)


def in_words(record: tuple[Past, ...]) -> str:
    """`3 runs, estimate over peak +0.7 % to +4.0 %`."""
    lowest, highest = (pick(past.difference for past in record) for pick in (min, max))
    spread = f"{lowest:+.1%}" if len(record) == 1 else f"{lowest:+.1%} to {highest:+.1%}"
    return f"{len(record)} run{'s' if len(record) > 1 else ''}, estimate over peak {spread}".replace("%", " %")


def _past(run: RunFolder, device: Device) -> Past | None:
    try:
        summary = run.summary()
    except IntegrityError:
        return None
    sizes = [summary.get(key) for key in ("estimate_bytes", "peak_bytes")]
    if not all(type(size) is int and size > 0 for size in sizes) or not _ran_on(summary, device):
        return None
    return Past(run.id, *sizes)


def _ran_on(summary: dict, device: Device) -> bool:
    kind, name = str(summary.get("device")), summary.get("device_name")
    return kind == "cpu" if device.kind == "cpu" else kind.startswith("cuda") and is_same(str(name), device.name)
