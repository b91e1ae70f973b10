"""Decontamination: what is found, what is not, and the list that says so."""

import json
import random
import tracemalloc
from pathlib import Path

import pytest

from training.core.errors import UserError
from training.data import contamination, dataset
from training.data.prepare import Preparation
from training.data.settings import Settings
from training.data.source import Jsonl

QUESTION = "Which of the seven rivers that leave the great northern lake reaches the sea first, and by how many days?"


def evaluations(folder: Path, *lines: str, ngram: int = 13) -> contamination.Evaluations:
    path = folder / "exam.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return contamination.read([path], ngram)


def test_a_run_of_words_is_found_whatever_case_and_punctuation(tmp_path: Path):
    exam = evaluations(tmp_path, "first line of the exam, of no concern here", json.dumps({"question": QUESTION}))
    found = exam.find(["Intro.\n" + QUESTION.upper().replace(",", " --") + " The end."])
    assert found.place == "exam.jsonl line 2"
    assert found.words == "which of the seven rivers that leave the great northern lake reaches the"
    assert exam.find([QUESTION.replace("great northern", "small")]) is None
    assert exam.find([" ".join(QUESTION.split()[:12])]) is None
    assert exam.find(["", "of " * 40]) is None


def test_a_short_evaluation_counts_where_all_of_it_stands_in_a_row(tmp_path: Path):
    exam = evaluations(tmp_path, "name the capital of Norway", "too short")
    assert exam.find(["Please name the capital of Norway!"]).words == "name the capital of norway"
    assert exam.find(["name the old capital of Norway", "too short"]) is None


def test_scripts_without_blanks_are_looked_up_by_character(tmp_path: Path):
    exam = evaluations(tmp_path, "请问哪一条河流最先到达大海并且需要多少天")
    assert exam.find(["他说：请问哪一条河流最先到达大海，并且需要多少天？"]) is not None
    assert exam.find(["请问哪一条铁路最先到达大海"]) is None


def test_the_system_turn_of_an_exam_is_not_looked_for(tmp_path: Path):
    turns = [{"role": "system", "content": QUESTION}, {"role": "user", "content": "what is the answer to it then"}]
    exam = evaluations(tmp_path, json.dumps({"messages": turns}))
    assert exam.find([QUESTION]) is None
    assert exam.find(["what is the answer to it then"]) is not None


@pytest.mark.parametrize("content", [b"", b"a b\n", b"caf\xe9 one two three four five\n"])
def test_a_file_with_nothing_to_look_for_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "exam.txt"
    path.write_bytes(content)
    with pytest.raises(UserError):
        contamination.read([path], 13)
    with pytest.raises(UserError, match="no such file"):
        contamination.read([tmp_path / "gone"], 13)


@pytest.mark.parametrize("ngram", [2, 5, 8, 13])
def test_what_is_found_is_what_a_plain_search_finds(tmp_path: Path, ngram: int):
    """Few words, so that runs come again and again: in whole where a line of the file has fewer than the run."""
    chance = random.Random(ngram)
    texts = [" ".join(chance.choices("abc", k=chance.randint(1, 16))) for _ in range(30)]
    exam, runs = evaluations(tmp_path, *texts, ngram=ngram), {}
    for number, text in enumerate(texts, 1):
        found = text.split()
        length = min(ngram, len(found))
        for at in range(len(found) - length + 1) if length >= min(ngram, 5) else ():
            runs.setdefault(" ".join(found[at : at + length]), f"exam.jsonl line {number}")
    shared = 0
    for _ in range(400):
        taken = chance.choice(texts).split()[chance.randint(0, 4) :] if chance.random() < 0.3 else []
        text = " ".join([*chance.choices("abcd", k=chance.randint(1, 8)), *taken, *chance.choices("abcd", k=3)])
        found = exam.find([text])
        assert (found is None) == (not any(f" {run} " in f" {text} " for run in runs)), text
        if found:
            assert runs[found.words] == found.place and f" {found.words} " in f" {text} "
            shared += 1
    assert shared > 40


def test_a_look_up_takes_as_much_as_the_record_and_a_file_as_much_as_its_words(tmp_path: Path):
    """Else a whole exam is sorted again for each record, and each process holds its runs as texts."""
    chance, num_words = random.Random(1), 120_000
    known = [f"w{number}" for number in range(5000)]
    lines = [" ".join(chance.choices(known, k=60)) for _ in range(num_words // 60)]
    tracemalloc.start()
    exam = evaluations(tmp_path, *lines)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    assert exam.find(["no word of it " * 20]) is None
    peak = tracemalloc.get_traced_memory()[1] - held
    tracemalloc.stop()
    assert exam.find([lines[-1]]).place == f"exam.jsonl line {len(lines)}"
    assert held < 60 * num_words and peak < 100_000


def test_contaminated_records_are_dropped_counted_and_listed(tmp_path: Path):
    """D11, and the report: which record, which words, where they also stand."""
    rows = [{"id": f"r{i}", "text": f"record number {i}"} for i in range(60)]
    rows[17]["text"] += ". " + QUESTION
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    exam = tmp_path / "exam.txt"
    exam.write_text(QUESTION + "\n")

    def prepared(*files: Path) -> dataset.Dataset:
        source = Jsonl(tmp_path / "a.jsonl")
        return dataset.load(Preparation([source], name="a", settings=Settings(), decontaminate=files).run()[0])

    data = prepared(exam)
    assert data.stats["records"] == {"input": 60, "kept": 59, "dropped": 1, "rejected": 0}
    assert data.stats["dropped"]["contaminated"] == 1
    listed = [json.loads(line) for line in (data.folder / "contaminated.jsonl").read_text().splitlines()]
    assert [(one["file"], one["line"], one["id"], one["also_in"]) for one in listed] == [
        ("a.jsonl", 18, "r17", "exam.txt line 1")
    ]
    assert data.manifest["evaluations"][0]["label"] == "exam.txt"
    assert "r17" not in {row["id"] for split in data.splits for row in data.iter_records(split)}
    exam.write_text(QUESTION + " \n")
    assert prepared(exam).hash != data.hash and prepared().hash not in (data.hash, prepared(exam).hash)
