"""What an estimate is: terms with their equations, instants of a step, and the peak among them. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """A part of the memory with the equation that gives it and where that equation comes from."""

    name: str
    num_bytes: int
    equation: str
    source: str


@dataclass(frozen=True)
class Instant:
    """A moment of the step and the terms that are alive in it."""

    name: str
    terms: tuple[Term, ...]

    @property
    def num_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms)


@dataclass(frozen=True)
class Peak:
    """The highest moment, in three counts that contain each other.

    allocated: tensors, the sum of the winning instant's terms. reserved: with what the allocator keeps beside them.
    device: with what the process needs before its first tensor (the device's context, or the interpreter on a CPU).
    """

    phase: str
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class Estimate:
    """The memory of a recipe's step on a kind of device."""

    parameters: int
    trainable: int
    instants: tuple[Instant, ...]
    overhead: tuple[Term, ...]  # the allocator's share, then what lies outside of its reach
    assumptions: tuple[str, ...]
    method: str = "formula"  # or "trace"

    @property
    def ranking(self) -> tuple[Instant, ...]:
        """The instants from the highest down."""
        return tuple(sorted(self.instants, key=lambda instant: -instant.num_bytes))

    @property
    def peak(self) -> Peak:
        winner = self.ranking[0]
        allocator, *outside = self.overhead
        reserved = winner.num_bytes + allocator.num_bytes
        device = reserved + sum(term.num_bytes for term in outside)
        return Peak(winner.name, winner.num_bytes, reserved, device)

    def to_json(self) -> dict:
        """The estimate's part of the `memfit --json` document, schema 1."""
        peak = self.peak
        return {
            "method": self.method,
            "parameters": {"total": self.parameters, "trainable": self.trainable},
            "terms": {term.name: term.num_bytes for term in self.ranking[0].terms},
            "instants": {instant.name: instant.num_bytes for instant in self.instants},
            "peak": {
                "phase": peak.phase,
                "allocated_bytes": peak.allocated_bytes,
                "reserved_bytes": peak.reserved_bytes,
                "device_bytes": peak.device_bytes,
            },
            "overhead": {term.name: term.num_bytes for term in self.overhead},
            "equations": {
                term.name: {"equation": term.equation, "source": term.source}
                for term in (*self.ranking[0].terms, *self.overhead)
            },
            "assumptions": list(self.assumptions),
        }
