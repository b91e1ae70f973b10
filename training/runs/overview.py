"""What is said of a run at a glance, from its record, its summary, its events and its checkpoints.

A run whose record is damaged is told as such and hides no other one.
"""

import time
from dataclasses import dataclass

from training.core.errors import IntegrityError
from training.runs import course as courses
from training.runs.course import UNLIMITED_STEPS, Course
from training.runs.folder import RunFolder


@dataclass(frozen=True)
class Overview:
    """A run's record and summary with the course of it."""

    run: RunFolder
    status: str
    record: dict
    summary: dict
    course: Course

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.summary.get("steps") or (self.course.last["step"] if self.course.last else 0)

    @property
    def planned_steps(self) -> int | None:
        planned = self.summary.get("planned_steps") or self.course.planned_steps
        return None if planned is None or planned >= UNLIMITED_STEPS else planned

    @property
    def best_loss_nats(self) -> float | None:
        best = self.course.best
        return best["eval/loss_nats"] if best else None

    @property
    def peak_bytes(self) -> int | None:
        last = self.course.last or {}
        return self.summary.get("peak_bytes") or last.get("memory/peak_bytes")

    @property
    def tokens_per_second(self) -> float | None:
        return self.summary.get("tokens_per_second") or self.course.tokens_per_second()

    @property
    def can_go_on(self) -> bool:
        return self.status in ("paused", "failed", "lost")

    def to_json(self) -> dict:
        """The figures of a run's row in the list."""
        last, estimate = self.course.last, self.record.get("estimate_bytes")
        return {
            "id": self.run.id, "name": self.record.get("name"), "method": self.record.get("method"),
            "status": self.status, "error": self.record.get("error"), "parent": self.record.get("parent"),
            "steps": self.step, "planned_steps": self.planned_steps, "stop_reason": self.summary.get("stop_reason"),
            "last_loss_nats": last["train/loss_nats"] if last else None, "best_loss_nats": self.best_loss_nats,
            "best_step": self.course.best["step"] if self.course.best else None,
            "validations": len(self.course.validations), "tokens_per_second": self.tokens_per_second,
            "trained_tokens": last.get("train/tokens") if last else None,
            "peak_bytes": self.peak_bytes, "estimate_bytes": estimate, "begun": self.run.begun,
            "last_event": self.course.last_time, "seconds_left": self.seconds_left, "worker": self.run.worker(),
            "checkpoints": self.run.steps(),
        }  # fmt: skip

    @property
    def seconds_left(self) -> float | None:
        return self.course.seconds_left() if self.status == "running" else None

    @property
    def age_seconds(self) -> float:
        return max(0.0, time.time() - self.run.begun)

    def told_events(self, count: int = 12) -> list[dict]:
        """The newest events that are neither steps nor validations."""
        return list(self.course.others)[-count:]


def of(run: RunFolder) -> Overview:
    """Read a run. Raises IntegrityError where its record is damaged."""
    record = run.record()
    try:
        summary = run.summary() if record["status"] == "completed" else {}
    except IntegrityError:
        summary = {}
    return Overview(run, run.status(), record, summary, courses.read(run.path))


def of_any(run: RunFolder) -> Overview:
    """Read a run for the list: one that cannot be read has the status `damaged` and its error."""
    try:
        return of(run)
    except IntegrityError as error:
        return Overview(run, "damaged", {"error": str(error)}, {}, Course())
