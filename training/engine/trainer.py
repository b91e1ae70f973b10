"""A run's first process, which most often is its only one: it trains, records, and leaves a true status behind.

How it is asked to stop is `requests`' matter, how checkpoints reach the disk is `saver`'s.
"""

import contextlib
import functools
import logging
import math
import shutil

import torch

from training.core import files, process, signals
from training.core.errors import IntegrityError
from training.core.progress import Progress
from training.core.report import make_command
from training.core.units import format_bytes, format_count
from training.engine import checkpoint, environment, selftest
from training.engine.assembly import Assembly, take_device
from training.engine.hooks import Hooks, StepResult
from training.engine.inputs import Inputs
from training.engine.parallel import Ranks
from training.engine.pulse import STAGES, Pulse
from training.engine.requests import CANCEL, PAUSE, Requests
from training.engine.saver import Saver
from training.engine.state import TrainState
from training.objectives.contract import Score
from training.recipe.load import Resolved
from training.runs import narration
from training.runs.course import UNLIMITED_STEPS
from training.runs.events import EventLog, read_events
from training.runs.folder import SUMMARY_FILE, RunFolder, step_name

_logger = logging.getLogger(__name__)


class Trainer(Hooks):
    """The first process's part of a run: trains, records, and leaves a true status behind."""

    def __init__(self, run: RunFolder, resolved: Resolved, inputs: Inputs, pulse: Pulse, ranks: Ranks):
        self.ranks, self.pulse = ranks, pulse
        self._step, self._has_stepped = 0, False
        self.folder, self.resolved, self.recipe, self.inputs = run, resolved, resolved.recipe, inputs
        self._requests = Requests(run.path)
        on_part = functools.partial(self.beat, "saving")
        self._saver = Saver(self._write, self.recipe.checkpoint.background, on_part)
        self._stepped_tokens, self._stepped_seconds = 0, 0.0

    def run(self) -> dict:
        """Train to an end or a stop. The status on disk is true whatever happens, a SIGKILL apart."""
        self.folder.update(status="running", error=None)
        self._requests.clear()
        self.events = EventLog(self.folder.path)
        try:
            with self._requests.listening():
                return self._train()
        except KeyboardInterrupt:
            self.folder.update(status="cancelled" if self._requests.pending() == CANCEL else "paused")
            raise
        except BaseException as error:
            self.folder.update(status="failed", error=str(error))
            raise
        finally:
            self._requests.clear()
            self.events.close()

    def _train(self) -> dict:
        self._forget_incomplete_steps()
        self.device, threads = take_device(self.recipe, self.ranks, self.folder.record().get("estimate_bytes"))
        environment.add(self.folder.path, self.device.reason, threads)
        if self.device.torch_device.type != "cpu":
            self.events.write("selftest", 0, **selftest.require(self.device))
        self.assembly = Assembly.of(self.recipe, self.inputs, self.device, self.ranks)
        self.trainee = self.assembly.trainee
        state = self._state()
        training = self.assembly.loop(self)
        try:
            with Progress("train", _shown(state), "step", line_every_seconds=0, done=state.step) as self.progress:
                reason = training.run(state)
            self._saver.wait()
        finally:
            with contextlib.suppress(Exception):  # what went wrong first is what is told
                self._saver.wait()
        if reason in ("paused", "cancelled"):
            self._stop(reason, state)
        return self._finish(state)

    def _stop(self, reason: str, state: TrainState) -> None:
        """End on request, as an interrupt does: by a signal, or by a file in the run's folder."""
        self.events.write(reason, state.step)
        what = f"saved at step {state.step}; next: make resume RUN={self.folder.id}"
        if reason == "cancelled":
            what = f"cancelled at step {state.step}; the checkpoints before it are in {self.folder.checkpoints}"
        name = self._requests.signal or f"the file {CANCEL if reason == 'cancelled' else PAUSE}"
        raise signals.interruption(name, what)

    def _state(self) -> TrainState:
        """The state of the newest checkpoint, loaded; else that of a fresh run."""
        newest = self.folder.latest(checkpoint.STATE_KIND)
        self.ranks.told(newest and newest.name)
        if newest is not None:
            state = self.assembly.go_on(newest)
            self.events.write("resume", state.step, checkpoint=newest.name)
            _logger.info("going on from step %d", state.step)
            for step in self.folder.steps():
                if step > state.step:
                    _logger.warning("removing step %d, which is newer than the checkpoint that verifies", step)
                    checkpoint.remove(self.folder.step_folder(step))
            return state
        self._require_nothing_trained()
        state, begun = self.assembly.begin()
        self.events.write("start", 0, **begun)
        return state

    def _require_nothing_trained(self) -> None:
        """A run whose checkpoints are damaged or gone must not start afresh; one stopped before its first one does."""
        trained = sum(1 for _ in read_events(self.folder.path, "step"))
        # the pointer also speaks for runs that are older than the mark, the mark for folders that are gone with it
        has_saved = self.folder.record().get("has_saved") or (self.folder.checkpoints / "latest.json").exists()
        if trained and not has_saved:
            _logger.warning("the run stopped before its first checkpoint: its %d steps are made again", trained)
        elif trained:
            raise IntegrityError(
                "no checkpoint of the run is complete",
                where=self.folder.checkpoints,
                found=f"{trained} steps trained, none of them in a checkpoint that verifies",
                expected="at least one complete checkpoint",
                next_command=self.command("train"),
            )

    def _forget_incomplete_steps(self) -> None:
        """Remove what a crash left: temporary folders, and step folders that never got (or lost) their manifest."""
        files.remove_leftovers(self.folder.path)
        files.remove_leftovers(self.folder.checkpoints, is_held=True)
        for path in self.folder.checkpoints.glob("step_*"):
            if not (path / files.MANIFEST).exists():
                shutil.rmtree(path)

    # ---- hooks of the loop

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Let the supervisor see that the loop moves, and in which stage it is."""
        self.beat(name if name in STAGES else "step" if self._has_stepped else "first step")
        return contextlib.nullcontext()

    def beat(self, stage: str) -> None:
        self.pulse.beat(stage, self._step)

    def on_step(self, state: TrainState, result: StepResult) -> None:
        self._step, self._has_stepped = state.step, True
        self._saver.check()
        self._stepped_tokens += result.score.num_tokens
        self._stepped_seconds += result.seconds
        speed = self._stepped_tokens / self._stepped_seconds
        peak = self._peak_bytes()
        self.events.write(
            "step", state.step, **{
                "train/loss_nats": result.score.loss_nats, "train/bits_per_byte": result.score.bits_per_byte,
                "train/grad_norm": result.grad_norm, "train/lr": result.rate, "train/tokens": state.trained_tokens,
                "speed/tokens_per_second": result.score.num_tokens / result.seconds, "memory/peak_bytes": peak,
            },
        )  # fmt: skip
        epochs = state.epoch + state.row / self.assembly.rows.num_rows
        loss = f"loss {result.score.text()}  lr {result.rate:.2e}"
        note = f"epoch {epochs:.2f}  {loss}  {speed:,.0f} tokens/s  {format_bytes(peak)}"
        self.progress.total = _shown(state)
        self.progress.advance(1, note)

    def on_validation(self, state: TrainState, score: Score, is_best: bool) -> None:
        self.events.write(
            "validation", state.step, best=is_best,
            **{"eval/loss_nats": score.loss_nats, "eval/bits_per_byte": score.bits_per_byte},
        )  # fmt: skip
        self.progress.write(f"step {state.step}: validation {score.text()}" + (", the best so far" if is_best else ""))

    def on_event(self, event: str, state: TrainState, **values: object) -> None:
        if event == "trial":
            values |= self._memory()
        self.events.write(event, state.step, **values)
        self.progress.write(f"step {state.step}: {narration.in_words({'event': event, **values})}")

    def _peak_bytes(self) -> int:
        return self.device.peak_bytes() or process.peak_rss_bytes()

    def _memory(self) -> dict[str, int | None]:
        """The peak so far beside what was estimated: nothing for another backend than ours."""
        return {"peak_bytes": self._peak_bytes(), "estimate_bytes": self.folder.record()["estimate_bytes"]}

    def save(self, state: TrainState) -> None:
        self._saver.wait()
        if self.ranks.told(state.step in self.folder.steps()):
            return
        snapshot = self.assembly.snapshot(state)
        checkpoint.require_space(self.folder, snapshot, self.inputs.tokenizer)
        self._saver.save(snapshot)

    def command(self, target: str, *overrides: str) -> str:
        return make_command(target, *overrides, CONFIG=self.folder.path / "recipe.yaml")

    def write_seconds(self) -> float:
        return self._saver.seconds

    def _write(self, snapshot: checkpoint.Snapshot) -> None:
        """Put a snapshot on the disk, let the pointers name it, and remove what is not kept; in the saver's thread."""
        origin = {
            "method": self.recipe.method, "base": self.trainee.base, "recipe_sha256": self.resolved.sha256,
            **self.inputs.origin(),
        }  # fmt: skip
        checkpoint.write(
            self.folder, snapshot, self.trainee.weights_file, self.trainee.settings_file, origin,
            self.inputs.tokenizer, self.resolved.values, self._saver.count_part,
        )  # fmt: skip
        if not self.folder.record().get("has_saved"):
            self.folder.update(has_saved=True)
        best = snapshot.state.best.step
        if best == snapshot.state.step:
            self.folder.point("best", best)
        keep = self.recipe.checkpoint
        checkpoint.prune(self.folder, keep.keep, keep_initial=keep.initial, best_step=best)

    def stop_requested(self) -> str | None:
        return self._requests.pending()

    # ---- ends

    def _finish(self, state: TrainState) -> dict:
        """Write `summary.json`, then the status."""
        best = self.folder.pointed("best")
        counts = _parameters(self.trainee.model)
        summary = {
            "schema": 1, "run": self.folder.id, "method": self.recipe.method, "backend": self.recipe.backend,
            "device": str(self.device.torch_device), "device_name": self.device.name,
            "dtype": str(self.device.dtype).removeprefix("torch."),
            "quantization": self.trainee.quantization, "attention": self.recipe.memory.attention, **counts,
            "stop_reason": state.stop_reason, "steps": state.step, "planned_steps": state.plan.total_steps,
            "epochs": state.epoch, "trained_tokens": state.trained_tokens,
            "skipped_steps": state.skipped_steps, "skipped_records": state.skipped_records,
            "micro_batch": state.rung.micro_batch, "gradient_checkpointing": state.rung.checkpointing,
            "compiled": state.compiled, "processes": self.ranks.size,
            "trained_seconds": round(state.trained_seconds, 2),
            "tokens_per_second": round(state.trained_tokens / max(state.trained_seconds, 1e-9), 1),
            "best_step": state.best.step, "best_loss_nats": state.best.loss_nats,
            "weights": self.trainee.weights_file,
            "best_checkpoint": best.name if best else None, "last_checkpoint": step_name(state.step),
            **self._memory(),
        }  # fmt: skip
        files.write_json(self.folder.path / SUMMARY_FILE, summary)
        self.folder.update(status="completed")
        self.events.write("end", state.step, reason=state.stop_reason)
        _logger.info(
            "run %s completed (%s): %s tokens in %d steps", self.folder.id, state.stop_reason,
            format_count(state.trained_tokens), state.step,
        )  # fmt: skip
        return summary


def _parameters(model: torch.nn.Module) -> dict[str, int]:
    """How many numbers the model holds and how many are trained; a matrix in 4 bits counts as what it stands for."""
    sizes = [
        (one, math.prod(getattr(getattr(one, "quant_state", None), "shape", one.shape))) for one in model.parameters()
    ]
    return {
        "parameters": sum(size for _, size in sizes),
        "trainable_parameters": sum(size for one, size in sizes if one.requires_grad),
    }


def _shown(state: TrainState) -> int | None:
    """The steps that a bar counts to; None while only the clock will tell."""
    return None if state.plan.total_steps == UNLIMITED_STEPS else state.plan.total_steps
