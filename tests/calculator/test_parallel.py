"""One rank's figures: by hand, and against real ranks under torch's DDP and FSDP2 on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.calculator.conftest import SMALL
from training.calculator import devices, fit, parallel
from training.calculator.formula import estimate
from training.calculator.parallel import Parallel
from training.calculator.plan import Plan
from training.core.errors import UserError
from training.core.paths import REPOSITORY
from training.recipe.load import load

DEEP = ("model.arch.num_hidden_layers=12", "model.arch.vocab_size=512", "data.seq_len=32", "data.micro_batch=1")
WIDE = ("model.arch.vocab_size=16384", "data.seq_len=32", "data.micro_batch=1")
UNTIED = "model.arch.tie_word_embeddings=false"
CHECKPOINTED = "memory.gradient_checkpointing=true"


def terms(made, name: str) -> dict[str, int]:
    instant = next(one for one in made.instants if one.name == name)
    return {term.name: term.num_bytes for term in instant.terms}


def test_one_rank_changes_nothing(recipe):
    assert parallel.of_arguments(None, 1) is None
    plan = Plan.of(recipe())
    moments = estimate(recipe(), on_cpu=False).instants
    assert parallel.of_rank(plan, moments) is moments


def test_shards_and_gathered_blocks_by_hand(recipe):
    """4,196,608 parameters in float32: a root of 4096*256 + 256, and 4 blocks of 786,944."""
    root, block, whole = 4 * (4096 * 256 + 256), 4 * 786_944, 4 * 4_196_608
    assert root + 4 * block == whole
    shared = estimate(recipe(), on_cpu=False, parallel=Parallel("fsdp2", 4))
    step = terms(shared, "optimizer_step")
    assert (step["weights"], step["gradients"], step["optimizer_states"]) == (whole // 4, whole // 4, whole // 2)
    layer = terms(shared, "layer_backward")
    assert layer["gathered_parameters"] == root + 2 * block
    assert layer["unreduced_gradients"] == 2 * block + 4 * 4096 * 256
    end = terms(shared, "backward_end")
    assert end["gradients"] == block and end["gathered_parameters"] == root
    assert end["unreduced_gradients"] == block + root + 2 * 4 * 4096 * 256


def test_ddp_holds_the_gradients_twice_from_the_first_step_on(recipe):
    alone, shared = (estimate(recipe(), on_cpu=False, parallel=one) for one in (None, Parallel("ddp", 2)))
    for before, after in zip(alone.instants, shared.instants, strict=True):
        more = 0 if after.name == "load" else 4 * 4_196_608
        assert after.num_bytes - before.num_bytes == more
    context = shared.overhead[1].num_bytes - alone.overhead[1].num_bytes
    assert context == parallel.NCCL_BYTES and "assumed" in " ".join(shared.assumptions)


def test_more_ranks_never_need_more_under_fsdp2(recipe):
    needs = [
        estimate(recipe(*WIDE), on_cpu=False, parallel=Parallel("fsdp2", ranks)).peak.allocated_bytes
        for ranks in (2, 3, 4, 8, 64)
    ]
    assert needs == sorted(needs, reverse=True) and needs[0] > needs[-1]


def test_a_solution_under_fsdp2_fits_and_the_next_does_not(recipe, tmp_path: Path):
    path = REPOSITORY / "recipes" / "reference" / "pretrain-1b.yaml"
    shared = Parallel("fsdp2", 4)
    found = fit.fit(load(path, []), vram="16GiB", solve="batch", parallel=shared)
    alone = fit.fit(load(path, []), vram="16GiB", solve="batch")
    assert found.solution.value > alone.solution.value
    usable = devices.choose(load(path, []).recipe, vram="16GiB").usable_bytes
    needs = [
        fit.fit(load(path, [f"data.micro_batch={size}"]), vram="16GiB", parallel=shared).estimate.peak.device_bytes
        for size in (found.solution.value, found.solution.value + 1)
    ]
    assert needs[0] == found.solution.device_bytes and needs[0] <= usable < needs[1]
    assert found.to_json()["parallel"] == {"kind": "fsdp2", "ranks": 4} and alone.to_json()["parallel"] is None
    assert not any("nf4" in lever.override for lever in found.levers)


@pytest.mark.parametrize(
    ("kind", "ranks", "words"), [(None, 2, "how the ranks"), ("ddp", 1, "one rank"), ("ddp", 0, "no rank")]
)
def test_half_an_answer_is_refused(kind, ranks, words):
    with pytest.raises(UserError, match=words):
        parallel.of_arguments(kind, ranks)


def test_4_bit_weights_are_not_estimated_in_shards(recipe):
    quantised = recipe("memory.weights=nf4", base="smollm2-135m-instruct", method="qlora")
    with pytest.raises(UserError, match="4-bit"):
        estimate(quantised, on_cpu=False, parallel=Parallel("fsdp2", 2))
    assert estimate(quantised, on_cpu=False, parallel=Parallel("ddp", 2)).peak.allocated_bytes > 0


# ---- against real ranks


def measured(tmp_path: Path, kind: str, ranks: int, overrides: tuple[str, ...], *, is_real: bool) -> dict[str, int]:
    """What rank 0 says of itself; with `is_real` all ranks run and exchange what they have."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    store = str(tmp_path / "store") if is_real else "none"
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.calculator.ranks", kind, str(rank), str(ranks), store, str(path), *overrides],
            cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks if is_real else 1)
    ]  # fmt: skip
    (out, err), *_ = [one.communicate(timeout=300) for one in running]
    assert running[0].returncode == 0, err[-2000:]
    return json.loads(out.splitlines()[-1])


def compare(tmp_path: Path, kind: str, ranks: int, overrides: tuple[str, ...], *, is_real: bool) -> float:
    """The estimate's relative error on a rank's peak; its weights are the same to the byte."""
    found = measured(tmp_path, kind, ranks, overrides, is_real=is_real)
    shared = estimate(
        load(tmp_path / "small.yaml", overrides).recipe, on_cpu=True, parallel=Parallel(kind, ranks)
    )  # fmt: skip
    assert terms(shared, "load")["weights"] == found["weights_bytes"]
    return shared.peak.allocated_bytes / found["peak_bytes"] - 1


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), (*DEEP, UNTIED), WIDE], ids=["loss", "layers", "embedding"])
def test_a_ddp_rank_needs_what_is_estimated(tmp_path, overrides):
    assert abs(compare(tmp_path, "ddp", 2, overrides, is_real=True)) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("overrides", [(), DEEP, (*WIDE, UNTIED), WIDE], ids=["loss", "layers", "root", "tied root"])
def test_an_fsdp2_rank_needs_what_is_estimated(tmp_path, overrides, ranks):
    error = compare(tmp_path, "fsdp2", ranks, overrides, is_real=False)
    assert -0.005 < error < 0.03, error


@pytest.mark.slow
def test_a_checkpointed_fsdp2_rank_is_not_under(tmp_path):
    error = compare(tmp_path, "fsdp2", 4, (*DEEP, UNTIED, CHECKPOINTED), is_real=False)
    assert -0.005 < error < 0.06, error


@pytest.mark.slow
def test_shards_exchanged_by_two_processes_are_as_large(tmp_path):
    """Through gloo, whose copies of what it sends come on top and go when it likes: never less than without them."""
    apart = compare(tmp_path, "fsdp2", 2, DEEP, is_real=False)
    assert compare(tmp_path, "fsdp2", 2, DEEP, is_real=True) <= apart + 0.001
