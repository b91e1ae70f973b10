"""Near-duplicates: what counts as one, that none is claimed wrongly, and that no pair lies on two sides."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from training.data import dataset, near
from training.data.near import Bands
from training.data.prepare import Preparation
from training.data.settings import Settings
from training.data.source import Jsonl

WORDS = [f"{a}{b}{c}" for a, b, c in itertools.product("bdfgklmnprst", "aeiou", "lmnrst")]


def sentence(seed: int, num_words: int = 120) -> list[str]:
    return random.Random(seed).choices(WORDS, k=num_words)


def changed(words: list[str], num: int, seed: int) -> str:
    """The words with some of them replaced."""
    chance = random.Random(seed)
    words = list(words)
    for at in chance.sample(range(len(words)), num):
        words[at] = chance.choice(WORDS).upper() + "x"
    return " ".join(words)


def overlap(a: bytes, b: bytes) -> float:
    return near._jaccard(near._distinct(a, False), near._distinct(b, False))


def made(path: Path, values: list[dict], **settings) -> dataset.Dataset:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return dataset.load(Preparation([Jsonl(path)], name="near", settings=Settings(**settings)).run()[0])


def side_of(data: dataset.Dataset) -> dict[str, str]:
    return {value["text"]: split for split in data.splits for value in data.iter_records(split)}


def test_the_overlap_is_the_share_of_shingles_in_common():
    text = near.normal(["The  quick\tbrown fox\n" * 2, "jumps over the lazy dog, and again over the dog"])
    assert text.startswith(b"the quick brown fox the quick")
    runs = {text[at : at + 12] for at in range(len(text) - 11)}
    other = text.replace(b"lazy", b"fast")
    others = {other[at : at + 12] for at in range(len(other) - 11)}
    assert overlap(text, other) == pytest.approx(len(runs & others) / len(runs | others))
    assert overlap(text, text) == 1 and overlap(text, b"x" * 100) == 0


@pytest.mark.parametrize("size", [1000, 70_000, 300_013])
def test_a_long_text_in_parts_has_the_shingles_of_the_whole(size: int, monkeypatch: pytest.MonkeyPatch):
    data = random.Random(size).randbytes(size)
    whole = np.unique(near._runs(data))
    monkeypatch.setattr(near, "_CHUNK_BYTES", 777)
    assert np.array_equal(near._distinct(data, False), whole)


def test_short_texts_are_near_only_where_case_and_blanks_alone_differ():
    """A word in a short text makes another text: `record 1` is not `record 10`."""
    short = [near.normal([f"the answer to question {i} is {i * 7}"]) for i in range(20)]
    assert all(overlap(a, b) == 0 for a, b in itertools.combinations(short, 2))
    assert overlap(near.normal(["Yes,  sir"]), near.normal(["yes, SIR\n"])) == 1


@pytest.mark.parametrize("num_words", [25, 120])
@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9])
def test_pairs_at_the_threshold_share_a_band_almost_always(threshold: float, num_words: int):
    """The recall that is claimed is that of real pairs: up to 100 of them, of this overlap or a little more."""
    bands = Bands(threshold)
    assert bands.recall(threshold) >= 0.95
    found = tried = 0
    for seed in range(3000):
        words = sentence(seed, num_words)
        most = max(2, int(num_words * (1 - threshold) / 2.5))
        pair = [" ".join(words), changed(words, random.Random(seed).randrange(most), seed)]
        if not threshold <= overlap(*(near.normal([text]) for text in pair)) <= threshold + 0.05:
            continue
        a, b = bands.of([[text] for text in pair]).bands_NB
        tried, found = tried + 1, found + bool((a == b).any())
        if tried == 100:
            break
    assert tried > 40 and found >= 0.95 * tried


def test_no_near_duplicates_lie_on_two_sides_and_other_texts_are_not_drawn_along(tmp_path: Path):
    """B45: variants under different sources lie together; a source whose texts are its own stays alone."""
    values = []
    for family in range(60):
        words = sentence(family)
        values += [{"text": changed(words, 1, 100 * family + i), "source": f"s{family}-{i}"} for i in range(4)]
    values += [{"text": " ".join(sentence(10_000 + i)), "source": f"own{i}"} for i in range(100)]
    data = made(tmp_path / "a.jsonl", values)
    placed = side_of(data)
    assert len(placed) == 340
    for family in range(60):
        assert len({placed[value["text"]] for value in values[4 * family : 4 * family + 4]}) == 1
    assert data.stats["near"] == {"clusters": 60, "records": 240, "largest": 4}
    assert data.stats["groups"]["all"] == 340 and data.stats["groups"]["linked"] == 180
    assert len({placed[value["text"]] for value in values[:240:4]}) == 3


def test_one_of_each_cluster_is_kept_where_that_is_asked_for(tmp_path: Path):
    words = sentence(1)
    values = [{"text": changed(words, 1, i)} for i in range(6)]
    values += [{"text": changed(words, 1, 50), "split": "test"}]
    values += [{"text": " ".join(sentence(100 + i))} for i in range(60)]
    data = made(tmp_path / "a.jsonl", values, drop_near=True)
    assert data.stats["dropped"]["near_duplicates"] == 6
    assert data.stats["records"] == {"input": 67, "kept": 61, "dropped": 6, "rejected": 0}
    assert side_of(data)[values[6]["text"]] == "test"  # what the user put into a split is what stays


def test_the_order_of_the_input_changes_neither_clusters_nor_sides(tmp_path: Path):
    values = [
        {"text": changed(sentence(family), 3, 100 * family + i), "id": f"{family}-{i}"}
        for family in range(40)
        for i in range(5)
    ]
    expected = None
    for seed in range(3):
        shuffled = random.Random(seed).sample(values, len(values))
        for drop_near in (False, True):
            data = made(tmp_path / f"{seed}.jsonl", shuffled, drop_near=drop_near, train_ratio=0.6, val_ratio=0.2)
            found = (data.stats["near"], side_of(data))
            if expected is None:
                expected = {False: found}
            assert expected.setdefault(drop_near, found) == found


def test_a_system_turn_that_all_share_makes_no_near_duplicates(tmp_path: Path):
    system = {"role": "system", "content": " ".join(sentence(0, 400))}
    values = [
        {"messages": [system, {"role": "user", "content": " ".join(sentence(i, 20))},
                      {"role": "assistant", "content": " ".join(sentence(1000 + i, 20))}]}
        for i in range(60)
    ]  # fmt: skip
    data = made(tmp_path / "a.jsonl", values)
    assert data.stats["near"]["clusters"] == 0


def test_nothing_is_looked_for_where_it_is_switched_off(tmp_path: Path):
    words = sentence(1)
    data = made(tmp_path / "a.jsonl", [{"text": changed(words, 1, i)} for i in range(60)], near=0)
    assert data.stats["near"] == {"clusters": 0, "records": 0, "largest": 0} and data.manifest["near"] is None


def test_a_data_set_that_is_all_one_cluster_is_refused_with_a_way_out(tmp_path: Path):
    from training.core.errors import UserError

    words = sentence(1)
    with pytest.raises(UserError, match="no record in") as caught:
        made(tmp_path / "a.jsonl", [{"text": changed(words, 1, i)} for i in range(60)])
    assert "the largest has 100% of the records" in caught.value.found
    assert "--near 0" in caught.value.next_command
