"""Timelines and the pictures drawn from them: what stands in them, never their pixels."""

import re
from pathlib import Path

import pytest

from training.calculator import picture, replay, sweep
from training.calculator.plan import Plan
from training.calculator.timeline import Recorder, Timeline
from training.core import figure
from training.core.errors import UserError
from training.core.paths import REPOSITORY
from training.recipe.load import load

PAGE = REPOSITORY / "docs" / "training" / "memory_fit.md"
REFERENCE = REPOSITORY / "recipes" / "reference" / "pretrain-1b.yaml"


def test_a_recorder_counts_each_event_and_names_phases():
    recorder = Recorder()
    first = recorder.new(512)
    recorder.mark("forward")
    recorder.mark("forward")
    recorder.new(0)
    second = recorder.new(1024)
    recorder.mark("backward")
    recorder.free(first)
    recorder.free(second)
    assert recorder.timeline() == Timeline(
        (512, 1536, 1024, 0), (2 << 20,) * 4, ((1, "forward"), (2, "backward"))
    )  # fmt: skip
    assert recorder.timeline().peak == (1, "forward")
    recorder.restart()
    assert recorder.timeline() == Timeline((), (), ())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_ends_where_it_began_and_peaks_where_the_replay_does(recipe, accumulate):
    plan = Plan.of(recipe(f"batch.accumulate={accumulate}"))
    timeline = replay.timeline(plan)
    replayed = replay.replay(plan)
    assert max(timeline.allocated_bytes) == replayed.allocated_bytes
    assert max(timeline.reserved_bytes) == replayed.reserved_bytes
    passes = ("forward", "head_backward", "layer_backward") * accumulate
    assert tuple(phase for _, phase in timeline.marks) == (*passes, "optimizer_step")
    ids_bytes = 8 * plan.T
    assert timeline.allocated_bytes[-1] == timeline.allocated_bytes[0] - ids_bytes
    assert len(timeline.allocated_bytes) == len(timeline.reserved_bytes)


def test_a_line_of_few_points_keeps_the_peak_and_the_floor(recipe):
    timeline = replay.timeline(Plan.of(recipe("model.arch.num_hidden_layers=24")))
    drawn = picture.points(timeline)
    assert len(timeline.allocated_bytes) > 1000 > len(drawn)
    assert max(held for _, held, _ in drawn) == max(timeline.allocated_bytes)
    assert min(held for _, held, _ in drawn) == min(timeline.allocated_bytes)
    assert all(timeline.reserved_bytes[event] == kept for event, _, kept in drawn)


def test_a_drawn_step_names_its_phases_and_is_the_same_each_time(recipe, tmp_path: Path):
    timeline = replay.timeline(Plan.of(recipe()))
    files = [tmp_path / name for name in ("one.svg", "two.svg", "one.png")]
    for path in files:
        picture.draw_step(timeline, path, title="small", usable_bytes=8 << 30)
    drawn = files[0].read_text()
    for words in ("forward", "layer backward", "optimizer step", "reserved", "usable for tensors", "small"):
        assert words in drawn
    assert picture.caption(timeline) in drawn
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_a_heat_map_says_each_figure_and_verdict(tmp_path: Path):
    texts = ["memory.gradient_checkpointing=true,false", "data.seq_len=512,2048", "data.micro_batch=1,8"]
    cells = sweep.run(REFERENCE, [], texts, vram="16GiB")
    path = tmp_path / "grid.svg"
    picture.draw_sweep(cells, path)
    words = re.findall(r">([^<>]+)</(?:text|tspan)>", path.read_text())
    for cell in cells:
        assert f"{cell.fit.estimate.peak.device_bytes / 2**30:.2f} GiB" in words
    assert sorted(word for word in words if word in ("fits", "tight", "no")) == sorted(
        cell.fit.verdict for cell in cells
    )
    assert {"no", "fits"} <= set(words)
    assert {"data.seq_len", "data.micro_batch", "memory.gradient_checkpointing=false"} <= set(words)


def test_a_heat_map_takes_one_axis_and_no_device(tmp_path: Path):
    cells = sweep.run(REPOSITORY / "recipes/reference/qlora-8b.yaml", [], ["data.seq_len=512,1024"])
    picture.draw_sweep(cells, tmp_path / "row.svg")
    words = (tmp_path / "row.svg").read_text()
    assert "share of the largest" in words or cells[0].fit.device is not None


def test_what_cannot_be_drawn_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="PNG or SVG"):
        figure.require_kind(tmp_path / "grid.jpg")
    ranks = ",".join(str(rank) for rank in range(1, 14))
    texts = [f"lora.rank={ranks}", "data.seq_len=256,512", "data.micro_batch=1,2"]
    cells = sweep.run(REPOSITORY / "recipes/reference/qlora-8b.yaml", [], texts, vram="10GiB")
    with pytest.raises(UserError, match="too many panels"):
        picture.draw_sweep(cells, tmp_path / "grid.png")
    assert not (tmp_path / "grid.png").exists()


def test_the_picture_in_the_page_is_drawn_from_what_its_command_replays():
    command = re.search(r'CONFIG=(\S+) ARGS="--gpu .RTX 4090. --plot (\S+\.svg) (\S+)"', PAGE.read_text())
    path, target, override = command.groups()
    timeline = replay.timeline(Plan.of(load(REPOSITORY / path, [override]).recipe))
    assert picture.caption(timeline) in (REPOSITORY / target).read_text()
    assert f"]({Path(target).name})" in PAGE.read_text()


@pytest.mark.slow
def test_a_traced_step_gives_the_same_kind_of_timeline(recipe):
    from training.calculator.trace import trace

    plan = Plan.of(
        recipe(
            "memory.profile=hf", "data.seq_len=128", "batch.accumulate=1", base="smollm2-135m-instruct", method="full"
        )
    )
    traced = trace(plan)
    assert max(traced.timeline.allocated_bytes) == traced.allocated_bytes
    assert max(traced.timeline.reserved_bytes) <= traced.reserved_bytes
    assert [phase for _, phase in traced.timeline.marks] == ["forward", "backward", "optimizer_step"]
    assert picture.caption(traced.timeline).startswith(f"{len(traced.timeline.allocated_bytes)} events")
