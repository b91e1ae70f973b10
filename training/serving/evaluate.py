"""The evaluation of a model in service: check, swap in, wait, ask, compare, smoke, report, restore.

The report is written also when the evaluation failed. Nothing here is judged by an exit status alone: what is served,
before, during and after, is the server's own word. Signals are put off while the service is being changed.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from training.core import locks, paths
from training.core.errors import MachineError, TrainyardError, UserError
from training.serving import control, memory, prompts, report, swap
from training.serving.candidate import Candidate
from training.serving.service import Service, open_service, port_of
from training.serving.settings import HEALTH_BUDGET_SECONDS, service_command
from training.serving.signals import Deferred

REPORTS = paths.REPOSITORY / "logs" / "eval"


@dataclass(frozen=True)
class Request:
    """What to evaluate and how; `port` None takes the service's own, else the default.

    `compare` names another model that is asked the same under the same conditions, `any_quant` allows it another quant
    type.
    """

    model: str
    service: str | None = None
    port: int | None = None
    smoke: Path = prompts.DEFAULT_FILE
    budget_seconds: float = HEALTH_BUDGET_SECONDS
    keep_serving: bool = False
    compare: str | None = None
    any_quant: bool = False
    dry_run: bool = False


@dataclass
class Evaluation:
    """The report as a document, where it was written, and what went wrong (None: it passed)."""

    document: dict
    path: Path | None = None
    error: BaseException | None = None

    def raise_failure(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.error is not None:
            raise self.error


def evaluate(request: Request, reports: Path | None = None) -> Evaluation:
    """Evaluate a model in its service and put the previous one back; the outcome is returned, not raised.

    Only a signal that comes after everything is done, and a defect of the program, are raised.
    """
    evaluation = Evaluation(report.opening(request.model, request.compare, request.dry_run, request.keep_serving))
    with Deferred() as signals:
        try:
            _Steps(request, evaluation.document, signals).run()
            signals.check()
        except (TrainyardError, KeyboardInterrupt) as error:
            evaluation.error = error
        except BaseException as error:
            evaluation.error = error
            raise
        finally:
            report.close(evaluation.document, evaluation.error)
            if not request.dry_run:
                evaluation.path = report.write(evaluation.document, reports or REPORTS, Path(request.model).stem)
    return evaluation


class _Steps:
    """The steps of one evaluation, in their order; each fills its part of the document."""

    def __init__(self, request: Request, document: dict, signals: Deferred):
        self.request, self.document, self.signals = request, document, signals

    def run(self) -> None:
        with self.signals.interruptible():
            self.service: Service = open_service(self.request.service)
            self.document["service"] = self.service.name
            self.candidates = self._candidates()
        with contextlib.ExitStack() as stack:
            with self.signals.interruptible():
                require_idle()
                if not self.request.dry_run:
                    name = self.candidates[0].model.path.name
                    stack.enter_context(self.service.hold(f"serve-eval {name}"))
            self._finish_unfinished()
            self._swap(self._prepare())

    def _candidates(self) -> list[Candidate]:
        request = self.request
        if request.compare and request.keep_serving:
            raise UserError(
                "two models cannot both be kept in service",
                found="--compare with --keep-serving",
                expected="one of them",
                next_command=service_command("serve-eval", self.service.name, "--keep-serving", MODEL=request.model),
            )
        asked = prompts.load(request.smoke)
        found = [Candidate(request.model, self.service.name, self.document, asked)]
        if request.compare:
            found.append(Candidate(request.compare, self.service.name, self.document["other"], asked))
            self._require_comparable(*found)
        return found

    def _require_comparable(self, one: Candidate, other: Candidate) -> None:
        if one.quant_type != other.quant_type and not self.request.any_quant:
            raise UserError(
                "models of different quant types are no fair comparison",
                found=f"{one.model.path.name} is {one.quant_type}, {other.model.path.name} is {other.quant_type}",
                expected="the same quant type, or --any-quant to compare them all the same",
                next_command=service_command(
                    "serve-eval",
                    self.service.name,
                    "--compare",
                    str(paths.container_path(other.model.path)),
                    "--any-quant",
                    MODEL=paths.container_path(one.model.path),
                ),
            )

    def _finish_unfinished(self) -> None:
        if not self.request.dry_run:
            self.document["restored_first"] = control.finish(self.service)
        elif self.service.journal() is not None:
            raise MachineError(
                "a swap is unfinished",
                where=self.service.journal_path,
                next_command=service_command("serve-restore", self.service.name),
            )

    def _prepare(self) -> swap.Swap:
        service, budget_seconds = self.service, self.request.budget_seconds
        with self.signals.interruptible():
            on_wait = swap.waiting("the model in service", budget_seconds)
            previous = service.state(budget_seconds=budget_seconds, on_wait=on_wait)
            port = port_of(self.request.port, previous)
            trials = []
            for candidate in self.candidates:
                record = service.runtime.new_record(candidate.model, port=port, slots=1)
                candidate.part["fit"] = memory.fit(candidate.model.served, record["device"])
                swap.require_swappable(service, previous, record)
                trials.append(swap.Trial(record, candidate.inspect, candidate.part["seconds"]))
        self.document["previous"] = report.state_part(previous)
        return swap.Swap(previous, trials)

    def _swap(self, planned: swap.Swap) -> None:
        self._describe_servers(planned)
        if self.request.dry_run:
            return
        try:
            swap.run(
                self.service, planned, signals=self.signals, keep=self.request.keep_serving,
                budget_seconds=self.request.budget_seconds,
            )  # fmt: skip
        finally:
            self._describe_servers(planned)
            self.document["restore"] = report.restore_part(planned)
            self.document["seconds"]["overhead"] = planned.overhead_seconds()

    def _describe_servers(self, planned: swap.Swap) -> None:
        for candidate, trial in zip(self.candidates, planned.trials, strict=True):
            candidate.part["server"] = report.record_part(trial.record)


def require_idle() -> None:
    """Raise MachineError where a training holds this machine."""
    who = locks.holder(locks.machine_lock())
    if who and who["pid"] != locks.identity()["pid"]:
        raise MachineError(
            "a training is running on this machine",
            found=locks.describe(who),
            expected="nobody training while a model is evaluated",
            next_command="make runs",
        )
