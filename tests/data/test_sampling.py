"""The draw: exact, proportional, between floor and cap, preferred first, and the same whatever the order."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from training.core.errors import UserError
from training.data import dataset
from training.data.prepare import Preparation
from training.data.sampling import Rule, draw, shares
from training.data.settings import Settings
from training.data.source import Jsonl


def test_labels_get_their_share_but_the_floor_at_least_and_the_cap_at_most():
    """R11: 10,000 turns of tools as unequal as real ones: the loud one capped, the rare ones kept learnable."""
    available = np.array([40_000, 20_000, 10_000, 9_000, 8_000, 7_000, 6_000, 5_000, 300, 20, 3])
    found = shares(available, 10_000, Rule(floor=4, cap=0.15))
    assert found.counts.sum() == 10_000
    assert found.counts[0] == found.counts[1] == 1500 and found.cap_records == 1500
    assert found.counts[-1] == 3  # no more than there are
    assert found.counts[-2] >= 4
    between = found.counts[2:9] / available[2:9]
    assert between.max() - between.min() < 0.01  # one proportion for all that neither floor nor cap holds
    assert (np.diff(found.counts) <= 0).all()


@pytest.mark.parametrize("seed", range(40))
def test_the_total_is_the_budget_whatever_floor_and_cap_say(seed: int):
    numbers = np.random.default_rng(seed)
    available = numbers.integers(1, numbers.integers(2, 5000), numbers.integers(1, 60))
    budget = int(numbers.integers(1, available.sum() + 10))
    rule = Rule(int(numbers.integers(0, 50)), float(numbers.uniform(0.01, 1)))
    found = shares(available, budget, rule)
    assert found.counts.sum() == min(budget, available.sum())
    assert (found.counts >= np.minimum(available, found.floor)).all()
    assert (found.counts <= np.minimum(available, found.cap_records)).all()
    assert found.floor <= rule.floor


def test_a_cap_that_cannot_be_held_gives_way_no_further_than_it_must():
    found = shares(np.array([100, 100, 100]), 90, Rule(floor=4, cap=0.15))
    assert found.counts.tolist() == [30, 30, 30] and found.cap_records == 30
    found = shares(np.array([5] * 100), 60, Rule(floor=4, cap=0.15))
    assert found.counts.sum() == 60 and found.floor == 0


def test_the_preferred_come_first_and_the_order_of_the_input_decides_nothing():
    numbers = np.random.default_rng(0)
    labels, tiers = numbers.integers(0, 5, 1000).astype(np.uint64), numbers.integers(0, 2, 1000).astype(np.uint8)
    keys = numbers.integers(0, 2**63, 1000).astype(np.uint64)
    taken = draw(labels, tiers, keys, 300, Rule(4, 0.5, seed=1))
    assert len(taken) == 300 == len(set(taken.tolist()))
    for label in range(5):
        of_label = taken[labels[taken] == label]
        gold = ((labels == label) & (tiers == 0)).sum()
        assert (tiers[of_label] == 0).sum() == min(gold, len(of_label))
    order = numbers.permutation(1000)
    again = draw(labels[order], tiers[order], keys[order], 300, Rule(4, 0.5, seed=1))
    assert set(order[again].tolist()) == set(taken.tolist())
    assert set(draw(labels, tiers, keys, 300, Rule(4, 0.5, seed=2)).tolist()) != set(taken.tolist())


def values(count: int = 1200) -> list[dict]:
    chance = random.Random(5)
    tools = chance.choices(["open", "read", "finish", "sweep"], [70, 25, 4, 1], k=count)
    return [
        {"text": f"turn {i} of {tool}", "metadata": {"tool": tool, "tier": chance.choice(["gold", "silver"])}}
        for i, tool in enumerate(tools)
    ]


def made(path: Path, rows: list[dict], **settings) -> dataset.Dataset:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return dataset.load(Preparation([Jsonl(path)], name="draw", settings=Settings(**settings)).run()[0])


def test_a_data_set_is_drawn_exactly_and_its_figures_say_how(tmp_path: Path):
    data = made(tmp_path / "a.jsonl", values(), draw=100, draw_by="tool", cap=0.4, prefer="tier=gold", draw_eval=20)
    assert {name: split["records"] for name, split in data.stats["splits"].items()} == {
        "train": 100, "validation": 20, "test": 20,
    }  # fmt: skip
    train = list(data.iter_records("train"))
    drawn = {
        tool: sum(row["metadata"]["tool"] == tool for row in train) for tool in ("open", "read", "finish", "sweep")
    }
    assert drawn["sweep"] >= 4 and drawn["finish"] >= 4 and sum(drawn.values()) == 100
    assert {tool: row["drawn"] for tool, row in data.stats["draw"]["train"]["by_label"].items()} == drawn
    assert all(row["metadata"]["tier"] == "gold" for row in train if row["metadata"]["tool"] == "open")
    assert data.stats["records"]["input"] == 1200 == 140 + data.stats["dropped"]["not_drawn"]


def test_another_draw_for_training_leaves_the_evaluation_as_it_is(tmp_path: Path):
    """R12: the training draw moves from round to round, the evaluation stays."""
    rows = values()
    one = made(tmp_path / "a.jsonl", rows, draw=100, draw_eval=20, draw_seed=1)
    two = made(tmp_path / "a.jsonl", rows, draw=100, draw_eval=20, draw_seed=2)
    read = {split: [list(data.iter_texts(split)) for data in (one, two)] for split in one.splits}
    assert read["train"][0] != read["train"][1]
    assert read["validation"][0] == read["validation"][1] and read["test"][0] == read["test"][1]


def test_a_draw_of_more_than_there_is_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="fewer records in train") as caught:
        made(tmp_path / "a.jsonl", values(100), draw=100)
    assert "100" in caught.value.expected


def tagged(count: int = 200) -> list[dict]:
    return [
        {"text": f"record number {i}", "group": f"g{i}", "metadata": {"where": "inbox" if i % 10 else "sent"}}
        for i in range(count)
    ]


@pytest.mark.parametrize("options", [{"draw_by": "metadata.where"}, {"draw_by": "tool"}, {"prefer": "tool=a"}])
def test_a_draw_by_a_field_that_no_record_has_is_refused_with_those_that_there_are(tmp_path: Path, options: dict):
    with pytest.raises(UserError, match="no record has the field") as caught:
        made(tmp_path / "a.jsonl", tagged(), draw=40, **options)
    assert caught.value.found in ("metadata.where", "tool")
    assert "'group'" in caught.value.expected and "'where'" in caught.value.expected
    assert "'text'" not in caught.value.expected


def test_a_field_of_the_metadata_goes_by_its_own_name_and_a_source_by_its_file(tmp_path: Path):
    data = made(tmp_path / "a.jsonl", tagged(), draw=40, draw_by="where", cap=0.9)
    assert set(data.stats["draw"]["train"]["by_label"]) == {"inbox", "sent"}
    for name in ("one.jsonl", "two.jsonl"):
        rows = [row | {"text": f"{name} {row['text']}", "group": name + row["group"]} for row in tagged()]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [Jsonl(tmp_path / "one.jsonl"), Jsonl(tmp_path / "two.jsonl")]
    settings = Settings(draw=40, draw_by="source", cap=0.5, near=0)
    data = dataset.load(Preparation(sources, name="two", settings=settings).run()[0])
    assert {label: one["drawn"] for label, one in data.stats["draw"]["train"]["by_label"].items()} == {
        "one.jsonl": 20, "two.jsonl": 20,
    }  # fmt: skip


def test_a_bound_that_cannot_be_kept_is_told_by_name_and_figure(tmp_path: Path, caplog):
    data = made(tmp_path / "a.jsonl", tagged(), draw=40, draw_by="where", cap=0.15, floor=1)
    assert data.stats["draw"]["train"]["not_kept"] == [
        f"--cap 0.15 (at most 6 of 40) is not kept: {told(data, 'inbox')}, {told(data, 'sent')}"
    ]
    assert "the draw of train by where: --cap 0.15" in caplog.text
    held = made(tmp_path / "b.jsonl", tagged(), draw=40, draw_by="where", cap=0.95, floor=1)
    assert held.stats["draw"]["train"]["not_kept"] == []
    many = [row | {"metadata": {"where": f"w{i % 50}"}} for i, row in enumerate(tagged(400))]
    few = made(tmp_path / "c.jsonl", many, draw=60, draw_by="where", floor=4, cap=0.5)
    assert few.stats["draw"]["train"]["not_kept"] == ["--floor 4 is not kept: at least 1 of each, 50 have less"]


def told(data: dataset.Dataset, label: str) -> str:
    drawn = data.stats["draw"]["train"]["by_label"][label]["drawn"]
    return f"'{label}' {drawn} ({drawn / 40:.0%})"


def test_bounds_without_a_field_would_do_nothing_and_are_refused():
    with pytest.raises(UserError) as caught:
        Settings(draw=10, cap=0.5)
    assert "--draw-by" in caught.value.expected
