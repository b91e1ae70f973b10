"""The split: groups and duplicates on one side, whatever the order, and stable when records are added."""

import json
import random
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from training.core import paths
from training.core.errors import UserError
from training.data import ledger as ledgers
from training.data import split
from training.data.intake import Batch, Intake
from training.data.ledger import COLUMNS, Components, Ledger
from training.data.prepare import Preparation
from training.data.reading import Need, Read
from training.data.settings import SPLITS, Settings
from training.data.source import Jsonl


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def ledger(values: list[dict]) -> Ledger:
    """The columns of records, in a folder of the test's own."""
    data = "".join(json.dumps(value) + "\n" for value in values).encode()
    taken = Intake(Settings(near=0)).take(Batch(0, "test", 1, data, "text"))
    assert not taken.faults
    result = Ledger(Path(tempfile.mkdtemp()))
    result.append(taken.columns)
    result.close()
    return result


def assign(book: Ledger, settings: Settings) -> split.Assignment:
    return split.Assignment(split.grouping(book, settings), settings)


def sides(values: list[dict], settings: Settings) -> list[str | None]:
    assignment = assign(ledger(values), settings)
    return [SPLITS[side] if side < len(SPLITS) else None for side in assignment.sides]


def side_of_source(values: list[dict], settings: Settings) -> dict[str, set[str]]:
    result: dict[str, set[str]] = {}
    for value, side in zip(values, sides(values, settings), strict=True):
        if side:
            result.setdefault(value["source"], set()).add(side)
    return result


def set_1() -> list[dict]:
    """B45: 20 sources of 10 variants each; the sources s3 and s11 share one identical record."""
    values = [
        {"source": f"s{source}", "text": f"the {word} of source {source} and its words"}
        for source in range(20)
        for word in ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    ]
    return [*values, {"source": "s3", "text": "a shared record"}, {"source": "s11", "text": "a shared record"}]


def test_no_source_lies_on_both_sides_and_linked_ones_go_together():
    """B45, set 1, over many seeds."""
    values = set_1()
    validation_sources = []
    for seed in range(40):
        placed = side_of_source(values, Settings(seed=seed))
        assert all(len(found) == 1 for found in placed.values())
        assert placed["s3"] == placed["s11"]
        assert sides(values, Settings(seed=seed)).count(None) == 1
        validation_sources.append(sum(found == {"validation"} for found in placed.values()))
    assert 1.2 < sum(validation_sources) / len(validation_sources) < 2.8


def test_one_big_source_and_three_small_ones_fill_each_side_or_are_refused_with_a_seed():
    """B45, set 2."""
    values = [{"source": "big", "text": f"big {i}"} for i in range(60)]
    values += [{"source": f"small{i % 3}", "text": f"small {i}"} for i in range(40)]
    for seed in range(20):
        book, settings = ledger(values), Settings(seed=seed)
        if assign(book, settings).empty:
            way_out = split.way_out(book, settings, None)
            assert way_out.group_by == "group" and way_out.train_ratio == 0.8
            assert not assign(book, way_out).empty


def test_no_source_changes_sides_when_records_and_sources_are_added():
    """B45, set 3, and more: new sources move nobody either."""
    values, settings = set_1(), Settings(seed=5)
    before = side_of_source(values, settings)
    more = [{"source": "s7", "text": "one more"}, *({"source": f"new{i}", "text": f"new {i}"} for i in range(50))]
    after = side_of_source(values + more, settings)
    assert {source: after[source] for source in before} == before


def test_the_order_of_the_input_changes_nothing():
    values = set_1()
    values += [{"text": f"dated {i}", "date": f"2026-0{1 + i % 9}-01"} for i in range(30)]
    values += [{"text": "dated 3", "date": "2026-01-01"}, {"text": "dated 4", "split": "test"}]
    settings = Settings(seed=3, cutoff="2026-06-30")

    def placed(values: list[dict]) -> dict[str, str]:
        return {value["text"]: side for value, side in zip(values, sides(values, settings), strict=True) if side}

    expected = placed(values)
    for seed in range(5):
        shuffled = random.Random(seed).sample(values, len(values))
        assert placed(shuffled) == expected


def test_another_seed_gives_another_split():
    values = set_1()
    assert len({str(sides(values, Settings(seed=seed))) for seed in range(5)}) == 5


def test_shares_come_near_the_ratios_over_many_groups():
    values = [{"text": f"record {i}"} for i in range(20_000)]
    counts = assign(ledger(values), Settings(train_ratio=0.7, val_ratio=0.2, seed=1)).counts
    assert abs(counts["train"] - 14_000) < 300 and abs(counts["validation"] - 4_000) < 250
    assert sum(counts.values()) == 20_000


def test_an_explicit_split_is_honoured_and_a_duplicate_of_it_does_not_reach_train():
    values = [{"text": f"t{i}", "group": f"g{i}"} for i in range(100)]
    values += [{"text": "t5", "split": "train"}, {"text": "t5", "split": "test"}, {"text": "t6", "split": "validation"}]
    placed = sides(values, Settings(seed=0))
    assert placed[5] is None and placed[100] is None and placed[101] == "test"
    assert placed[6] is None and placed[102] == "validation"


def test_the_cutoff_is_exclusive():
    values = [{"text": f"old {i}", "date": "2026-06-30T23:59:59Z", "source": f"s{i}"} for i in range(60)]
    values += [{"text": "new", "date": "2026-07-01", "source": "s1"}, {"text": "undated", "source": "s2"}]
    values += [{"text": "old 1", "date": "2026-07-02", "source": "s1"}]  # it existed before: not new
    values += [{"text": "asked for", "date": "2026-07-02", "source": "s3", "split": "validation"}]
    placed = sides(values, Settings(cutoff="2026-06-30"))
    assert placed[63] == "validation"
    assert placed[60] == "test_postcutoff" and placed.count("test_postcutoff") == 1
    assert placed[62] is None and placed[1] in ("train", "validation", "test")


def test_a_group_that_the_records_part_is_counted():
    values = [{"text": f"t{i}", "source": f"s{i % 30}"} for i in range(90)]
    assert assign(ledger(values), Settings()).num_straddling == 0
    parted = [*values, {"text": "x", "source": "s1", "split": "test"}, {"text": "y", "source": "s1", "split": "train"}]
    assert assign(ledger(parted), Settings()).num_straddling == 1


@pytest.mark.parametrize(
    ("values", "settings", "change"),
    [
        ([{"text": f"t{i}", "source": "one"} for i in range(30)], Settings(), {"group_by": "record"}),
        ([{"text": f"t{i}", "date": "2025-01-01"} for i in range(30)], Settings(cutoff="2026-01-01"), {"cutoff": None}),
        ([{"text": f"t{i}", "split": "train"} for i in range(30)], Settings(), {"train_ratio": 1.0, "val_ratio": 0.0}),
        ([{"text": f"t{i}", "split": ("train", "test")[i % 2]} for i in range(9)], Settings(), {"val_ratio": 0.0}),
        ([{"text": "only"}], Settings(), {"train_ratio": 1.0}),
    ],
    ids=["one source", "nothing after the cutoff", "all train", "train and test", "one record"],
)
def test_the_way_out_of_an_empty_split_works(values: list[dict], settings: Settings, change: dict):
    book = ledger(values)
    assert assign(book, settings).empty
    way_out = split.way_out(book, settings, None)
    assert {key: getattr(way_out, key) for key in change} == change
    assert not assign(book, way_out).empty


def test_there_is_no_way_out_without_training_records():
    book = ledger([{"text": f"t{i}", "split": "test"} for i in range(5)])
    assert split.way_out(book, Settings(), None) is None


def test_the_order_decides_nothing_even_among_records_of_one_content():
    values = [{"text": f"t{i % 20}", "id": f"r{i}", "source": f"s{i % 7}"} for i in range(60)]

    def kept(values: list[dict]) -> dict[str, str]:
        placed = zip(values, sides(values, Settings(group_by="record")), strict=True)
        return {value["id"]: side for value, side in placed if side}

    expected = kept(values)
    assert len(expected) == 20
    for seed in range(5):
        assert kept(random.Random(seed).sample(values, len(values))) == expected


def test_components_are_those_of_the_links_whatever_their_order():
    numbers = np.random.default_rng(3)
    a, b = numbers.integers(0, 3000, (2, 2000))
    expected = list(range(3000))
    for _ in range(60):  # the plain way: the lowest number spreads until nothing changes
        for one, other in zip(a, b, strict=True):
            expected[one] = expected[other] = min(expected[one], expected[other])
    components = Components(3000)
    for part in np.array_split(numbers.permutation(2000), 7):
        components.link(a[part], b[part])
    roots = components.roots().tolist()
    assert roots == expected


@pytest.mark.parametrize(("options", "weight"), [({}, 1.0), ({"draw": 200_000, "draw_by": "x"}, 1.0), ({}, 2.5)])
def test_memory_is_what_is_predicted_for_each_record(tmp_path: Path, options: dict, weight: float):
    """So many bytes a record, however many there are: what is not by the record is by the part."""
    (tmp_path / "a.jsonl").write_text("{}")
    settings = Settings(train_ratio=1.0, val_ratio=0.0, near=0, **options)
    code = "from tests.data import test_split; from training.data.settings import Settings\n"
    code += f"test_split.print_peak({str(tmp_path)!r}, {_NUM_RECORDS}, {settings!r}, {weight})"
    # Of its own, since a table of the interpreter's that grows at that moment would be counted too.
    run = subprocess.run([sys.executable, "-c", code], cwd=paths.REPOSITORY, capture_output=True, text=True, check=True)
    need = Need(_NUM_RECORDS, 1, -1, 0, is_drawn=bool(options) or weight != 1)  # without any process's own
    assert need.memory_bytes / 4 < int(run.stdout) < need.memory_bytes


_NUM_RECORDS = 300_000


def print_peak(folder: str, num: int, settings: Settings, weight: float) -> None:
    """Print the most bytes that splitting so many records and taking from them takes."""
    ledgers._PART_RECORDS = ledgers._BLOCK_RECORDS = split._BLOCK_RECORDS = 1 << 12
    numbers = np.random.default_rng(0)
    columns = {name: numbers.integers(0, 2**63, num).astype(dtype) for name, dtype in COLUMNS.items()}
    columns |= {
        "group": columns["digest"][np.arange(num) // 3],
        "wish": np.full(num, split.BY_GROUP),
        "contaminated": np.zeros(num),
        "source": np.zeros(num),
        "label": columns["label"] % 20,
    }
    with Ledger(Path(folder)) as book:
        book.append(columns)
    del columns
    tracemalloc.start()
    found = assign(book, settings)
    assert sum(found.counts.values()) == num and found.largest_share < 0.001 and found.num_straddling == 0
    preparation = Preparation([Jsonl(Path(folder) / "a.jsonl", weight=weight)], name="x", settings=settings)
    preparation._draw(found, Read(book, [num], [], labels={label: str(label) for label in range(20)}))
    preparation._copies(found, book)
    print(tracemalloc.get_traced_memory()[1])


def test_sorted_parts_never_part_equal_keys(monkeypatch: pytest.MonkeyPatch):
    values = [{"text": f"t{i}", "group": f"g{i % 37}"} for i in range(400)]
    book = ledger(values)
    whole = [row for rows in book.sorted_parts("group", "digest") for row in rows.tolist()]
    monkeypatch.setattr("training.data.ledger._PART_RECORDS", 30)
    monkeypatch.setattr("training.data.ledger._BLOCK_RECORDS", 70)
    parts = [rows.tolist() for rows in book.sorted_parts("group", "digest")]
    assert len(parts) > 5 and [row for rows in parts for row in rows] == whole
    groups = [{values[row]["group"] for row in rows} for rows in parts]
    assert sum(map(len, groups)) == 37
    assert book.pick("text_bytes", np.array([399, 0, 71, 5])).tolist() == [4, 2, 3, 2]


@pytest.mark.parametrize(
    "wrong",
    [{"train_ratio": 0.0}, {"train_ratio": 0.9, "val_ratio": 0.2}, {"val_ratio": -0.1}, {"train_ratio": float("nan")},
     {"cutoff": "yesterday"}, {"cutoff": "2026-01-01T00:00:00"}, {"group_by": "source"}, {"near": 0.4}, {"near": 1.01},
     {"ngram": 1}, {"near": 0, "drop_near": True}, {"draw": 0}, {"draw": 5, "cap": 0.0}, {"draw": 5, "floor": -1},
     {"draw_by": "x"}, {"draw": 5, "prefer": "tier"}, {"on_error": "ignore"}, {"max_record_bytes": 0}],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_split_are_refused(wrong: dict):
    with pytest.raises(UserError):
        Settings(**wrong)
