"""The campaign on a GPU, and a rehearsal of its every line on the CPU."""

import json
from pathlib import Path

import pytest

from tests.gpu import campaign_row, memory_campaign
from tests.gpu.rows import ROWS, Row
from training.recipe.load import load

MIB = 1 << 20


@pytest.mark.gpu
def test_the_estimates_hold_on_this_machines_gpu(tmp_path: Path):
    results = memory_campaign.run(list(ROWS), tmp_path / "table.json", 560)
    print((tmp_path / "table.md").read_text())
    assert not [result["name"] for result in results if "error" in result]
    off = [
        f"{result['name']}: {one['name']} {one['difference']:+.1%}"
        for result in results
        for one in result["comparisons"]
        if not one["passes"]
    ]
    assert not off


@pytest.mark.slow
def test_every_kind_of_row_runs_and_one_that_fails_costs_itself_alone(tmp_path: Path):
    out = tmp_path / "table.json"
    broken = Row("broken")
    chosen = [broken, *(row for row in ROWS if row.name in ("full-chunked-loss", "hf-padded", "lora-bf16", "nf4"))]
    results = memory_campaign.run(chosen, out, 300, is_rehearsal=True)
    kept = json.loads(out.read_text())
    assert kept["rows"] == results and kept["rehearsal"]
    assert "invalid choice: 'broken'" in results[0]["error"]
    assert [result for result in results[1:] if "error" in result] == []
    steps = {"forward", "backward", "optimizer_step", "evaluation"}
    assert all(set(result["later_steps"]) == steps for result in results[1:])
    text = out.with_suffix(".md").read_text()
    assert all(f"| {row.name} |" in text for row in chosen)


def test_no_row_begins_when_the_time_is_up(tmp_path: Path):
    (result,) = memory_campaign.run([ROWS[0]], tmp_path / "t.json", -1)
    assert result["error"] == "the time was up"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_a_recipe_that_can_be_planned_and_fits_8_gb(row: Row, tmp_path: Path):
    from training.calculator.formula import estimate

    recipe = load(row.write(tmp_path, "bf16")).recipe
    peak = estimate(recipe, on_cpu=False).peak
    assert 500 * MIB < peak.device_bytes < 7900 * MIB


def test_recorded_requests_are_replayed_through_the_allocator():
    events = [
        {"action": "segment_alloc", "addr": 1, "size": 20 * MIB},
        {"action": "alloc", "addr": 1, "size": 3 * MIB},
        {"action": "alloc", "addr": 2, "size": 5 * MIB},
        {"action": "free_requested", "addr": 1, "size": 3 * MIB},
        {"action": "free_completed", "addr": 1, "size": 3 * MIB},
        {"action": "free_completed", "addr": 99, "size": 1},
        {"action": "alloc", "addr": 1, "size": 2 * MIB},
    ]
    found = campaign_row.replay(events)
    assert found == {"allocated_bytes": 8 * MIB, "reserved_bytes": 20 * MIB, "num_requests": 3}
