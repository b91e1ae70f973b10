"""The estimates against what others measured, and the page that shows it."""

import pytest

from training.calculator import bench, published
from training.core.paths import REPOSITORY
from training.recipe.load import load

PAGE = REPOSITORY / "docs" / "training" / "memory_fit.md"


@pytest.fixture(scope="module")
def found() -> bench.Bench:
    return bench.run()


def test_every_row_is_estimated_or_left_out_with_a_reason(found):
    rows = published.rows()
    assert len(rows) == 238 and len({row["id"] for row in rows}) == 238
    assert found.described | {row["id"] for row in found.left_out} == {row["id"] for row in rows}
    assert all(row.reason for row in found.left_out)
    assert all(row["source"] and row["kind"] for row in rows)


def test_complete_rows_are_met(found):
    targets = bench.targets(found.errors)
    assert targets["allocated"]["rows"] >= 61
    assert targets["allocated"]["median"] <= 0.02 and targets["allocated"]["nine_in_ten"] <= 0.06
    assert targets["allocated_t4"]["rows"] == 59 and targets["allocated_t4"]["worst"] <= 0.01
    assert targets["outside"]["lowest"] >= -0.01 and targets["outside"]["nine_in_ten"] <= 0.12
    assert targets["outside_eager"]["lowest"] >= -0.01 and targets["outside_eager"]["nine_in_ten"] <= 0.20


def test_shapes_of_the_rows_have_the_published_numbers_of_parameters(tmp_path):
    from training.calculator.shapes import of_model

    for row in published.rows():
        if row.reason is None and row["params"]:
            recipe = row.recipe(tmp_path)
            assert of_model(recipe.model).parameters == int(row["params"]), row["id"]


def test_the_table_in_the_page_is_the_one_that_the_command_makes(found):
    assert bench.page_part(found) in PAGE.read_text(), "make bench-memfit ARGS='--write docs/training/memory_fit.md'"


def test_a_row_is_read_as_its_columns_say(tmp_path):
    row = next(row for row in published.rows() if row["id"] == "F003")
    recipe = row.recipe(tmp_path)
    assert (recipe.method, recipe.memory.weights, recipe.memory.double_quant) == ("qlora", "nf4", False)
    assert (recipe.memory.attention, recipe.memory.profile, recipe.lora.targets) == ("sdpa", "hf", "attention")
    assert (recipe.data.seq_len, recipe.data.micro_batch, recipe.optimizer.impl) == (1024, 2, "foreach")
    assert {one.kind: round(one.num_bytes / (1 << 20)) for one in row.measured} == {
        "reserved": 7400, "allocated": 6828, "nvml": 7541,
    }  # fmt: skip
    assert load(tmp_path / "recipe.yaml").recipe == recipe
