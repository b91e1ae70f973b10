"""The formula's terms against real steps of the trainer on the CPU, each within one percent."""

import pytest
import torch

from tests.calculator.counts import Counts
from training.calculator import calibrate_cpu, calibrate_gpu
from training.calculator.gpu_meter import GpuMeter
from training.core.errors import RunError
from training.engine.probe import TrainerProbe
from training.recipe.load import load

VARIANTS = (
    "", "memory.attention=eager", "model.arch.tie_word_embeddings=false", "batch.accumulate=2", "memory.loss_chunk=128",
    "memory.gradient_checkpointing=true", "memory.weights=bf16", "memory.weights=bf16 memory.attention=eager",
    "optimizer.impl=foreach", "optimizer.impl=single", "model.arch.vocab_size=512",
    "memory.weights=bf16 batch.accumulate=3",
    "memory.gradient_checkpointing=true memory.attention=eager", "memory.loss_chunk=64 memory.weights=bf16",
    "memory.gradient_checkpointing=true memory.weights=bf16 batch.accumulate=2",
    "memory.loss_chunk=128 model.arch.tie_word_embeddings=false batch.accumulate=2",
    "memory.gradient_checkpointing=true memory.loss_chunk=128", "model.arch.num_key_value_heads=4 data.micro_batch=1",
    "memory.gradient_checkpointing=true model.arch.vocab_size=512",
    "model.arch.hidden_size=512 model.arch.num_attention_heads=8",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("overrides", VARIANTS)
def test_every_figure_of_a_step_is_met_within_one_percent(recipe, tmp_path, overrides: str):
    recipe()
    resolved = load(tmp_path / "small.yaml", overrides.split())
    record, comparisons = calibrate_cpu.calibrate(resolved, TrainerProbe)
    assert {one.name for one in comparisons} == {
        "weights", "saved_tensors", "gradients", "optimizer_states", "forward", "backward", "optimizer_step",
        "evaluation", "peak",
    }  # fmt: skip
    far = [f"{one.name}: {one.difference:+.2%}" for one in comparisons if not abs(one.difference) <= 0.01]
    assert not far
    assert record["resident"]["peak_bytes"] > 0 and all(row["measured_bytes"] > 0 for row in record["comparisons"])


def test_a_step_that_does_not_fit_is_not_tried(recipe, tmp_path):
    recipe()
    with pytest.raises(RunError, match="does not fit"):
        calibrate_cpu.calibrate(load(tmp_path / "small.yaml", ["data.micro_batch=65536"]), TrainerProbe)


@pytest.mark.slow
def test_the_gpus_loop_takes_its_stages_its_first_step_and_the_later_ones(recipe):
    """The loop runs on the CPU; the counters that it reads are moved by hand, as there is no GPU to read."""
    counts = Counts()
    counts.use(30, 30)
    tiny = recipe("model.arch.hidden_size=32", "data.seq_len=16", "batch.accumulate=2")
    found = calibrate_gpu.measure(tiny, TrainerProbe, torch.device("cpu"), lambda: GpuMeter(counts, lambda: 100, 50))
    assert set(found["stages"]) == {"init", "matmul", "backward", "attention", "load"}
    steps = {"forward", "backward", "optimizer_step"}
    assert set(found["first_step"]) == steps and set(found["later_steps"]) == steps | {"evaluation"}
    assert found["peak"] == {"allocated_bytes": 30, "reserved_bytes": 30, "device_bytes": 50}
    assert (found["context_bytes"], found["workspace_bytes"]) == (20, 0)
    assert set(found["contexts"]["first_step"]) == steps and set(found["contexts"]["stages"]) == set(found["stages"])
