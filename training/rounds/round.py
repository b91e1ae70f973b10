"""A round: what a night does, each step a command that a person can type. Nothing is promoted.

Baseline, training within the hours, the best checkpoint measured on the same papers, the verdict, export, a trial in
the service, the exported file's own measurement, and the report. `round.json` is written after every step, so that a
stop leaves what was reached; the same command goes on with a round that was stopped. A measurement that fails costs
the measurement: what was trained stays.
"""

import dataclasses
import secrets
from pathlib import Path

from training.core import files, locks, paths, store
from training.core.errors import IntegrityError, TrainyardError, UserError
from training.core.log import say
from training.core.report import make_command, utc_stamp
from training.data import dataset as datasets
from training.evaluation import guard, kept, lineage, page, subject, verdict
from training.evaluation.conditions import Identity
from training.objectives import adapter_source
from training.recipe import kept as kept_recipe
from training.recipe.load import Resolved
from training.recipe.reading import Origin
from training.rounds.steps import StepFailed, options, run_step
from training.runs.events import read_events

ROUND, RECIPE, PAGE = "round.json", "recipe.yaml", "report.html"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a round is asked to do; `serve` names a service and a port of its own, None takes what serve-eval takes."""

    resolved: Resolved
    hours: float
    exam: str | None
    guard: str | None
    num_questions: int | None
    quant: str
    serve: tuple[str, ...] = ()

    @property
    def asked(self) -> list[str]:
        """The arguments of `evaluate` that say on what."""
        return options(("--exam", self.exam), ("--guard", self.guard), ("--questions", self.num_questions))

    @property
    def key(self) -> str:
        """What a stopped round is known by when the same command comes again."""
        asked = [self.hours, self.exam, self.guard, self.num_questions, self.quant]
        return files.sha256_json({"recipe": self.resolved.sha256, "asked": asked})


class Round:
    """One round; `document` is what `round.json` holds."""

    def __init__(self, plan: Plan):
        self.plan = plan
        unfinished = _unfinished(plan.key)
        self.is_resumed = unfinished is not None
        if unfinished:
            self.folder, self.document = unfinished, files.read_json(unfinished / ROUND)
        else:
            resolved = _pinned(plan.resolved)
            self.folder = _new_folder(resolved.recipe.name)
            self.document = self._opening(resolved)

    def _opening(self, resolved: Resolved) -> dict:
        recipe = resolved.recipe
        kept_recipe.write(resolved, self.folder / RECIPE)
        document = {
            "schema": 1, "kind": "round", "round": self.folder.name, "key": self.plan.key, "state": "running",
            "device": None, "base": recipe.model.base, "carriedFrom": recipe.lora.from_ if recipe.lora else None,
            "drawSeed": recipe.seeds.data, "recipe": resolved.sha256, "hours": self.plan.hours,
            "steps": None, "bestValLoss": None, "bestAtTurns": None, "turnsTrained": None, "minutes": 0.0,
            "stoppedBecause": None, "meanLoss": None, "baseline": None, "result": None, "adapter": None, "beat": None,
            "verdict": None, "model": None, "served": None, "notes": [], "seconds": {},
        }  # fmt: skip
        files.write_json(self.folder / ROUND, document)
        return document

    def run(self) -> dict:
        """Go through the steps that are left; returns the document. Raises what stops the round, after writing it.

        Raises MachineError, naming the holder, where another process works on this very round.
        """
        lock = self.folder / "lock.json"
        with locks.hold(lock, f"round {self.folder.name}", wait_seconds=0, resource="the round"):
            return self._run()

    def _run(self) -> dict:
        try:
            self._steps()
            self._note(state="completed")
        except KeyboardInterrupt:
            self._note(state="stopped", stoppedBecause="interrupted")
            raise
        except TrainyardError as failure:
            self._note(state="stopped", notes=self._with(failure))
            raise
        return self.document

    def _steps(self) -> None:
        if self._begins_at_base:
            self._baseline(self.document["base"])
        self._train()
        if not self._begins_at_base:
            self._baseline(str(self.checkpoints / "step_000000"))
        self._note(result=self._evaluate("result", "Measure what was trained", str(self.best)))
        refusal = self._judged()
        self._export()
        if refusal:
            raise refusal

    @property
    def export_name(self) -> str:
        """The exported model's name, the run's own: no round replaces another's file, which may be the champion."""
        return f"{self.plan.resolved.recipe.name[:59]}-{self.document['run'].rpartition('-')[2]}"

    def _note(self, **changes: object) -> None:
        self.document |= changes
        self.document["minutes"] = round(sum(self.document["seconds"].values()) / 60, 1)
        files.write_json(self.folder / ROUND, self.document)

    def _with(self, failure: TrainyardError) -> list[str]:
        """The notes with a failure among them, once."""
        return list(dict.fromkeys([*self.document["notes"], f"{failure.what}: {failure.found}"]))

    def _step(self, key: str, title: str, arguments: list[str]) -> dict:
        document, seconds = run_step(title, arguments)
        self.document["seconds"][key] = round(self.document["seconds"].get(key, 0.0) + seconds, 1)
        return document

    def _evaluate(self, key: str, title: str, reference: str) -> dict:
        """Measure one model in a process of its own; its record."""
        plan, arguments = self.plan, ["evaluate", reference, "--config", str(self.folder / RECIPE)]
        return self._step(key, title, [*arguments, *plan.asked])["records"][0]

    # ---- the steps

    @property
    def _begins_at_base(self) -> bool:
        """Whether training starts from the bare base. Random weights and a carried adapter are the run's own step 0."""
        return self.document["base"] is not None and self.document["carriedFrom"] is None

    def _baseline(self, reference: str) -> None:
        self._note(baseline=self._evaluate("baseline", "Measure what training starts from", reference))

    def _train(self) -> None:
        overrides = [f"stop.max_hours={self.plan.hours}"]
        if not self._begins_at_base:
            overrides.append("checkpoint.initial=true")
        arguments = ["train", "--config", str(self.folder / RECIPE), *overrides, "--reuse"]
        summary = self._step("train", f"Train for at most {self.plan.hours:g} hours", arguments)
        run = Path(summary["folder"])
        losses = [one["train/loss_nats"] for one in read_events(run, "step")]
        best = summary["best_checkpoint"] or summary["last_checkpoint"]
        self.checkpoints = run / "checkpoints"
        self.best = self.checkpoints / best
        self._note(
            run=summary["run"], device=summary["device_name"], steps=summary["steps"],
            adapter=paths.for_people(self.best),
            bestValLoss=summary["best_loss_nats"], bestAtTurns=summary["best_step"],
            turnsTrained=summary["trained_tokens"], stoppedBecause=summary["stop_reason"],
            meanLoss=sum(losses) / len(losses) if losses else None,
        )  # fmt: skip

    def _judged(self) -> TrainyardError | None:
        """Judge; a refusal costs the verdict alone, so it is noted and handed on for when the export is done."""
        try:
            self._judge()
        except TrainyardError as refusal:
            say(f"no verdict: {refusal.what}: {refusal.found}")
            self._note(verdict=None, beat=None, notes=self._with(refusal))
            return refusal
        return None

    def _judge(self) -> None:
        before, after = self.document["baseline"], self.document["result"]
        judgement = verdict.judge(_measured(before), _measured(after), advice=self._comparing)
        self.judgement = judgement
        model = subject.find(str(self.best))
        page.write(self.folder / PAGE, page.Page(before, after, judgement, lineage.curves(model), lineage.chain(model)))
        self._note(verdict=judgement.to_json(), beat=judgement.is_win)
        say(f"verdict: {judgement.verdict}; {'; '.join(judgement.reasons)}")

    def _comparing(self, names: str) -> str:
        """The command that compares what a round may not, the difference allowed by its name."""
        against = self.document["base"] if self._begins_at_base else str(self.checkpoints / "step_000000")
        asked = ["--config", str(self.folder / RECIPE), *self.plan.asked, "--against", against, "--allow", names]
        return make_command("evaluate", *asked, CHECKPOINT=self.best)

    def _export(self) -> None:
        """Export, a trial in the service, the file's own measurement. What fails here is noted; the verdict stands."""
        try:
            exported = self._step(
                "export", "Export what was trained",
                ["export-gguf", str(self.best), "--name", self.export_name, "--quant", self.plan.quant],
            )  # fmt: skip
            manifest = exported["outputs"][-1]["manifest"]
            gguf = paths.roots().trained / manifest["name"] / manifest["file"]
            self._note(model=str(paths.container_path(gguf)))
            self._step("serve-eval", "Try it in the service, put the old one back",
                       ["serve-eval", str(gguf), *self.plan.serve])  # fmt: skip
            if self.plan.exam:
                self._note(served=self._evaluate("served", "Measure the exported file through its server", str(gguf)))
        except StepFailed as failure:
            say(f"the round ends here: {failure.what}: {failure.found}")
            self._note(notes=self._with(failure))


def _measured(record: dict) -> dict[str, dict]:
    """The kept measurements of a record by role. Raises IntegrityError where one is gone."""
    found = {}
    for role, values in record["identities"].items():
        document = kept.find(Identity.from_json(values))
        if document is None:
            raise IntegrityError("a measurement is gone", where=kept.folder(), found=f"none of {role}",
                                 expected=files.short(values["sha256"]))  # fmt: skip
        found[role] = document
    return found


def _pinned(resolved: Resolved) -> Resolved:
    """The recipe with the data set and the carried adapter that its names mean now.

    What is prepared while the round works changes no step of it, and `latest` never becomes the round's own run.
    """
    recipe, found = resolved.recipe, {}
    if recipe.data.dataset is not None:  # training refuses a recipe without one, and says what is wanted
        found["data.dataset"] = store.reference(datasets.resolve(recipe.data.dataset))
    if recipe.lora and recipe.lora.from_:
        found["lora.from"] = adapter_source.find(recipe.lora.from_).reference
    return resolved.changed(found, Origin("what the round found"))


def _root() -> Path:
    return paths.roots().data / "training" / "rounds"


def _unfinished(key: str) -> Path | None:
    """The newest round of this key that was not completed; `run` refuses one that another process works on."""
    for path in sorted(_root().glob(f"*/{ROUND}"), reverse=True):
        try:
            document = files.read_json(path)
        except IntegrityError:
            continue
        if document.get("key") == key and document.get("state") != "completed":
            return path.parent
    return None


def _new_folder(name: str) -> Path:
    folder = _root() / f"{utc_stamp()}-{name}-{secrets.token_hex(2)}"
    with files.disk_errors(folder):
        folder.mkdir(parents=True)
    return folder


def check(plan: Plan) -> None:
    """Raise what is wrong with the exam, the guard set or the hours before anything is measured."""
    for reference in filter(None, (plan.exam, plan.guard if plan.guard and not guard.is_drawn(plan.guard) else None)):
        guard.open_exam(reference)
    if not plan.hours > 0:
        raise UserError("no time to train", found=plan.hours, expected="more than 0 hours")
