"""The evaluation of a model in service: check, swap in, wait, ask, compare, smoke, report, restore.

The report is written also when the evaluation failed. Nothing here is judged by an exit status alone: what is served,
before, during and after, is the server's own word. Signals are put off while the service is being changed.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from training.core import files, locks, paths
from training.core.errors import IntegrityError, MachineError, RunError, TrainyardError, UserError
from training.core.log import say
from training.llamacpp.client import Client
from training.serving import checks, control, prompts, report, swap
from training.serving.model import ModelFile, check, resolve, signature
from training.serving.service import DEFAULT_NAME, HEALTH_BUDGET_SECONDS, Service, default_port, open_service
from training.serving.signals import Deferred

REPORTS = paths.REPOSITORY / "logs" / "eval"


@dataclass(frozen=True)
class Request:
    """What to evaluate and how; `port` None takes the service's own, else the default."""

    model: str
    service: str = DEFAULT_NAME
    port: int | None = None
    smoke: Path = prompts.DEFAULT_FILE
    budget_seconds: float = HEALTH_BUDGET_SECONDS
    keep_serving: bool = False
    dry_run: bool = False


@dataclass
class Evaluation:
    """The report as a document, where it was written, and what went wrong (None: it passed)."""

    document: dict
    path: Path | None = None
    error: BaseException | None = None

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.document["seconds"][name] = round(time.monotonic() - started, 3)

    def raise_failure(self) -> None:
        """Raise what went wrong, if anything did."""
        if self.error is not None:
            raise self.error


def evaluate(request: Request, reports: Path | None = None) -> Evaluation:
    """Evaluate a model in its service and put the previous one back; the outcome is returned, not raised.

    Only a signal that comes after everything is done, and a defect of the program, are raised.
    """
    evaluation = Evaluation(report.opening(request.model, request.service, request.dry_run, request.keep_serving))
    with Deferred() as signals:
        try:
            _Steps(request, evaluation, signals).run()
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

    def __init__(self, request: Request, evaluation: Evaluation, signals: Deferred):
        self.request, self.evaluation, self.signals = request, evaluation, signals
        self.document = evaluation.document
        self.service: Service = open_service(request.service)

    def run(self) -> None:
        with self.signals.interruptible():
            self.asked = prompts.load(self.request.smoke)
            with self.evaluation.timed("check"):
                self.model = self._check_model()
            self.tokenizer = self._tokenizer()
        with contextlib.ExitStack() as stack:
            with self.signals.interruptible():
                require_idle()
                if not self.request.dry_run:
                    stack.enter_context(self.service.hold(f"serve-eval {self.model.path.name}"))
            self._finish_unfinished()
            self._swap(self._prepare())

    def _check_model(self) -> ModelFile:
        path = resolve(self.request.model)
        model = check(path, manifest_required=True)
        manifest = model.manifest
        self.document["model"] |= {
            "path": str(path), "container_path": str(paths.container_path(path)), "name": manifest["name"],
            "bytes": model.signature["bytes"], "sha256": model.sha256, **model.header,
        }  # fmt: skip
        kept = ("run", "step", "weights_sha256", "tokenizer", "dataset", "recipe_sha256", "llama_cpp", "parameters")
        self.document["manifest"] = {"sha256_matches": True, "quant_type_matches": True} | {
            key: manifest.get(key) for key in kept
        }
        return model

    def _tokenizer(self) -> object:
        from training.tokenizer import artifact

        named = self.model.manifest["tokenizer"]
        reference = f"{named['name']}@{named['hash']}"
        try:
            return artifact.load(artifact.resolve(reference))
        except UserError:
            self.document["prompt_ids"] = {
                "compared": False, "why": f"the tokenizer {files.short(named['hash'])} is not on this machine"
            }  # fmt: skip
            return None

    def _finish_unfinished(self) -> None:
        if not self.request.dry_run:
            self.document["restored_first"] = control.finish(self.service)
        elif self.service.journal() is not None:
            raise MachineError(
                "a swap is unfinished",
                where=self.service.journal_path,
                next_command=swap.restore_command(self.service.name),
            )

    def _prepare(self) -> swap.Swap:
        service, budget_seconds = self.service, self.request.budget_seconds
        with self.signals.interruptible():
            on_wait = swap.waiting("the model in service", budget_seconds)
            previous = service.state(budget_seconds=budget_seconds, on_wait=on_wait)
            old = previous["record"] or {}
            port = self.request.port or old.get("port") or default_port()
            planned = swap.Swap(previous, service.new_record(self.model, port=port))
            swap.require_swappable(service, previous, planned.record)
        self.document["previous"] = report.state_part(previous)
        return planned

    def _swap(self, planned: swap.Swap) -> None:
        self.document["server"] = report.record_part(planned.record)
        if self.request.dry_run:
            return
        try:
            swap.run(
                self.service, planned, self._inspect, signals=self.signals, keep=self.request.keep_serving,
                budget_seconds=self.request.budget_seconds,
            )  # fmt: skip
        finally:
            self.document["server"] = report.record_part(planned.record)
            self.document["restore"] = report.restore_part(planned)
            self.document["seconds"] |= planned.seconds

    def _inspect(self, client: Client, loaded: dict) -> None:
        self.document["loaded"] = loaded
        with self.evaluation.timed("compare"):
            self._compare(client, loaded)
        with self.evaluation.timed("smoke"):
            self._smoke(client)

    def _compare(self, client: Client, loaded: dict) -> None:
        manifest = self.model.manifest
        checks.require_same_model(loaded, manifest, self.model.path)
        if signature(self.model.path) != self.model.signature:
            raise IntegrityError("the file changed between its hash check and its loading", where=self.model.path)
        self.document["fingerprint"] = checks.compare_fingerprint(client, manifest["fingerprint"])
        results = checks.compare_prompt_ids(client, self.asked, self.tokenizer)
        self.document["prompt_ids"] = (self.document["prompt_ids"] or {"compared": True}) | {"prompts": results}

    def _smoke(self, client: Client) -> None:
        counts = {entry["name"]: entry["num_tokens"] for entry in self.document["prompt_ids"]["prompts"]}
        for prompt in self.asked:
            say(f"smoke prompt {prompt.name}, limit {prompt.time_limit_seconds:g} s")
            result = prompts.ask(client, prompt)
            self.document["smoke"].append(result)
            if result["passed"] and result["prompt_tokens"] != counts[prompt.name]:
                result |= {"passed": False, "why": f"the server read {result['prompt_tokens']} tokens of "
                           f"{counts[prompt.name]}"}  # fmt: skip
        failed = [result for result in self.document["smoke"] if not result["passed"]]
        if failed:
            raise RunError(
                f"{len(failed)} of {len(self.asked)} smoke prompts did not pass",
                found="; ".join(f"{result['name']}: {result['why']}" for result in failed),
                expected="text, in time, as the smoke file says",
            )


def require_idle() -> None:
    """Raise MachineError where a training holds this machine."""
    who = locks.holder(locks.machine_lock())
    if who and who["pid"] != locks.identity()["pid"]:
        raise MachineError(
            "a training is running on this machine",
            found=locks.describe(who),
            expected="nobody training while a model is evaluated",
            next_command="wait for it to end, then run the same command again",
        )
