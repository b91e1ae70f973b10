"""The loop with TRL's SFTTrainer inside: forward pass, loss, backward pass, clipping and update are its own.

Owns how windows become its batches and its steps come back as ours. What happens between steps is the native loop's, so
that run folder, checkpoints, validation and stop rules are the same; and since nothing of a run's state is the
SFTTrainer's, which is made anew when a run goes on, a resume is bit for bit on a CPU here too.

Memory that runs out, and losses that are not finite, end the run: SFTTrainer has no lower rung, and skips no step.
"""

import math
import tempfile
import time
import warnings

import datasets
import numpy as np
import torch
import transformers
import trl
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from training.core.errors import MachineError, RunError
from training.core.report import again
from training.engine import generators
from training.engine.backends import hugging_face
from training.engine.hooks import StepResult
from training.engine.loop import Loop
from training.engine.optimizer import set_rate
from training.engine.state import TrainState
from training.objectives.contract import Score
from training.objectives.trainee import Trainee
from training.recipe import bases
from training.recipe.model import Recipe
from training.runs.course import UNLIMITED_STEPS


class SftLoop(Loop):
    """One run's training from its state on, its steps made by SFTTrainer."""

    def __init__(self, recipe: Recipe, trainee: Trainee, *parts: object):
        super().__init__(recipe, trainee.model, *parts)
        self._wrapped = trainee.wrapped
        self._collate = DataCollatorForLanguageModeling(pad_token_id=0)  # it masks what it pads

    def run(self, state: TrainState) -> str:
        _require_no_scale(state)
        self._state, self._asked = state, None
        with tempfile.TemporaryDirectory() as folder:
            drawn = generators.states()  # which a Trainer seeds anew when it is made
            self._trainer = _Trainer(self, self._wrapped, folder)
            generators.restore(drawn)
            return super().run(state)

    def _attempt(self, state: TrainState, rows: np.ndarray) -> None:
        drawn, num_tokens = generators.states(), self._on_device(self.objective.batch(rows).num_tokens)
        for batch in self._batches(rows):
            self._trainer.training_step(self._wrapped, batch, num_tokens)
        self._trainer.take_nats()
        self._gradients.forget(drawn)

    def _steps(self, state: TrainState) -> str | None:
        if state.stop_reason is None:
            self._trainer.train()
        return self._asked

    # ---- what the SFTTrainer calls

    def batches_left(self) -> int:
        """Micro-batches from the state's place to its epoch's end."""
        return math.ceil((self.objective.num_rows - self._state.row) / self.recipe.data.micro_batch)

    def window(self) -> tuple[list[dict], torch.Tensor]:
        """The micro-batches of the next window, and the number of labels in all of them; begins the step."""
        self._started = time.monotonic()
        rows = self._windows.next(self._state)
        self._state.step += 1
        self._rate = self._state.plan.rate(self._state.step)
        set_rate(self.optimizer, self._rate)
        self._whole = self.objective.batch(rows)
        return self._batches(rows), self._on_device(self._whole.num_tokens)

    def _batches(self, rows: np.ndarray) -> list[dict]:
        size = self.recipe.data.micro_batch
        examples = [hugging_face.example(self.objective.batch(rows[i : i + 1]).tensors) for i in range(len(rows))]
        return [self._collate(examples[start : start + size]) for start in range(0, len(rows), size)]

    def _on_device(self, number: int) -> torch.Tensor:
        return torch.tensor(number, device=next(self.model.parameters()).device)

    def before_update(self, loss_nats: float, grad_norm: float) -> None:
        """Take the window's figures in. Raises RunError where one is not finite, before it is in a weight."""
        if not (math.isfinite(loss_nats) and math.isfinite(grad_norm)):
            raise RunError(
                "the loss or its gradient is not finite", where=f"step {self._state.step}",
                found=f"loss {loss_nats}, gradient norm {grad_norm}", expected="finite numbers",
                next_command=self.at_half_the_rate(),
            )  # fmt: skip
        self._loss_nats, self._grad_norm = loss_nats, grad_norm

    def step_is_done(self) -> bool:
        """Report the step, and do what is due after it; returns whether it was the last one."""
        state, num_tokens = self._state, self._whole.num_tokens
        state.trained_tokens += num_tokens
        score = Score(self._loss_nats * num_tokens, num_tokens, self._whole.num_bytes)
        result = StepResult(score, self._rate, self._grad_norm, time.monotonic() - self._started)
        self._asked = self._after(state, result)
        return self._asked is not None or state.stop_reason is not None


class _Trainer(trl.SFTTrainer):
    """SFTTrainer on a loop's windows: an epoch of its is one of ours, or what is left of it."""

    loss_is_scaled_for_ga = True  # by the window's number of labels, which `get_batch_samples` gives

    def __init__(self, loop: SftLoop, model: torch.nn.Module, folder: str):
        self._loop, self._nats = loop, []
        recipe, first = loop.recipe, loop.objective.batch(np.arange(1)).tensors
        on_cpu = next(model.parameters()).device.type == "cpu"
        arguments = _arguments(recipe, folder, on_cpu)
        super().__init__(
            model, arguments, data_collator=loop._collate,
            train_dataset=datasets.Dataset.from_list([hugging_face.example(first)]),  # it looks at one row, no more
            processing_class=transformers.AutoTokenizer.from_pretrained(
                bases.find(recipe.model.base).folder, local_files_only=True
            ),
            optimizers=(loop.optimizer, torch.optim.lr_scheduler.ConstantLR(loop.optimizer, factor=1.0)),
            callbacks=[_Ends(loop)],
        )  # fmt: skip
        self.processing_class = None  # else the model's settings would be made the tokenizer's
        self.remove_callback(transformers.PrinterCallback)

    def _send_telemetry(self) -> None:
        """Tell nobody."""

    def get_train_dataloader(self) -> range:
        return range(math.ceil(self._loop.objective.num_rows / self.args.per_device_train_batch_size))

    def _run_epoch(self, **given: object) -> None:
        left = self._loop.batches_left()
        windows = math.ceil(left / self.args.gradient_accumulation_steps)
        super()._run_epoch(**given | {"steps_in_epoch": left, "num_update_steps_per_epoch": windows})

    def get_batch_samples(self, *_: object) -> tuple[list[dict], torch.Tensor]:
        return self._loop.window()

    def training_step(self, *args: object) -> torch.Tensor:
        with self._loop.hooks.phase("forward"):
            nats = super().training_step(*args)
        self._nats.append(nats)
        return nats

    def take_nats(self) -> float:
        """The mean loss of the micro-batches since the last call; what SFTTrainer has counted of them is forgotten."""
        nats, self._nats = torch.stack(self._nats).sum().item(), []
        self._metrics["train"].clear()
        return nats

    def _get_grad_norm(self, *args: object, **given: object) -> torch.Tensor:
        norm = super()._get_grad_norm(*args, **given)
        self._loop.before_update(self.take_nats(), float(norm))
        return norm


def _arguments(recipe: Recipe, folder: str, on_cpu: bool) -> trl.SFTConfig:
    """Steps without an end, which is the loop's matter; layers are computed again by the model's own setting."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the newer name would meet TRL's default of the older
        arguments = trl.SFTConfig(
            **hugging_face.arguments(recipe, folder, on_cpu=on_cpu), max_steps=UNLIMITED_STEPS, logging_strategy="no",
            gradient_checkpointing=False, max_length=None, dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
    _ = arguments.device  # which counts the GPUs
    arguments._n_gpu = 1  # the model lies on one
    return arguments


class _Ends(transformers.TrainerCallback):
    """Lets the loop do what is due when a step has ended."""

    def __init__(self, loop: SftLoop):
        self._loop = loop

    def on_step_end(self, _args: object, _state: object, control: transformers.TrainerControl, **_: object):
        control.should_training_stop = self._loop.step_is_done()
        return control


def _require_no_scale(state: TrainState) -> None:
    """Raise MachineError where the products are in float16: a GPU without bfloat16 under an NF4 base."""
    if state.loss_scale != 1:
        raise MachineError(
            "SFTTrainer is given no scale for the loss, and this GPU computes in float16", where="backend",
            found="a GPU without bfloat16", expected="backend: native",
            next_command=again("backend=native"),
        )  # fmt: skip
