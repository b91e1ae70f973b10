"""The dataset on disk: counts that add up, content keys, reuse, and nothing half-written."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from training.cli import main
from training.core import files, paths
from training.core.errors import IntegrityError, MachineError, UserError
from training.data import dataset, prepare
from training.data.settings import Settings
from training.data.source import Jsonl


def write(path: Path, values: list[dict]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def records(count: int = 60) -> list[dict]:
    return [{"id": f"r{i}", "text": f"record number {i}", "group": f"g{i % 30}"} for i in range(count)]


def made(path: Path, name: str = "mine", **settings) -> tuple[Path, bool]:
    return prepare.Preparation([Jsonl(path)], name=name, settings=Settings(**settings)).run()


def test_input_is_kept_plus_duplicates_plus_rejected(tmp_path: Path):
    values = [*records(), records()[3], records()[4] | {"id": "again", "group": "g9"}]
    data = dataset.load(made(write(tmp_path / "a.jsonl", values))[0])
    assert data.stats["records"] == {"input": 62, "kept": 60, "dropped": 2, "rejected": 0}
    assert data.stats["dropped"]["duplicates"] == 2 == sum(data.stats["dropped"].values())
    groups = data.stats["groups"]
    assert (groups["all"], groups["linked"], groups["straddling"]) == (30, 1, 0)
    kept = [value["text"] for split in data.splits for value in data.iter_records(split)]
    assert sorted(kept) == sorted(value["text"] for value in records())
    assert data.manifest["splits"] == {
        split: {"records": len(list(data.iter_records(split))), "text_bytes": sum(map(len, data.iter_texts(split)))}
        for split in ("train", "validation", "test")
    }


def test_records_keep_their_fields_and_their_text(tmp_path: Path):
    text = 'é\u2028 "quoted" \\ \U0001f600\r\n\t<|im_end|>\u0000'
    odd = {"text": text, "id": "odd", "metadata": {"k": [1, 2.5]}, "split": "train"}
    data = dataset.load(made(write(tmp_path / "a.jsonl", [*records(), odd]))[0])
    assert [value for value in data.iter_records("train") if value.get("id") == "odd"] == [odd]


def test_lengths_are_in_the_stats(tmp_path: Path):
    values = [{"text": "é" * (1 + i), "split": "train"} for i in range(100)]
    data = dataset.load(made(write(tmp_path / "a.jsonl", values), train_ratio=1.0, val_ratio=0.0)[0])
    train = data.stats["splits"]["train"]
    assert train["text_bytes"] == 2 * 5050
    spread = {"p50": 102, "p90": 182, "p99": 200, "max": 200, "longest": "train.jsonl:100"}
    assert train["text_bytes_per_record"] == spread


def test_the_same_bytes_are_recognised_in_another_folder_and_a_changed_byte_is_not(tmp_path: Path):
    """B44: key over bytes and settings, not over paths, sizes or times."""
    path = write(tmp_path / "a.jsonl", records())
    stat = path.stat()
    folder, reused = made(path)
    assert not reused
    (tmp_path / "elsewhere").mkdir()
    again = write(tmp_path / "elsewhere" / "b.jsonl", records())
    assert made(again) == (folder, True)
    path.write_bytes(path.read_bytes().replace(b"number 7", b"number 8"[:7] + b"X"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    changed, reused = made(path)
    assert not reused and changed != folder
    assert not made(again, seed=8)[1]


def test_the_same_bytes_give_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "a.jsonl", records())
    hashes = []
    for root in ("one", "two"):
        monkeypatch.setenv("DATA_ROOT", str(tmp_path / root))
        folder = made(path)[0]
        hashes.append((folder.name, {item.name: files.sha256_file(item) for item in folder.iterdir()}))
    assert hashes[0] == hashes[1]


def test_a_damaged_dataset_is_made_again(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", records())
    folder, _ = made(path)
    train = folder / "train.jsonl"
    good = train.read_bytes()
    train.write_bytes(good.replace(b"record", b"rEcord", 1))
    with pytest.raises(IntegrityError, match="bytes have changed"):
        files.verify_manifest(folder, "dataset")
    assert made(path) == (folder, False)
    assert train.read_bytes() == good


def test_a_failed_preparation_leaves_nothing(tmp_path: Path, own_roots: Path):
    path = write(tmp_path / "a.jsonl", records())
    path.write_text(path.read_text() + "{bad\n")
    with pytest.raises(UserError, match="a record is refused"):
        made(path)
    assert [item.name for item in paths.roots().datasets.iterdir()] == [".mine.lock"]


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "_distribute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made(write(tmp_path / "a.jsonl", records()))
    assert [item.name for item in paths.roots().datasets.iterdir()] == [".mine.lock"]


def test_the_hash_is_of_the_bytes_that_were_read(tmp_path: Path):
    """One pass reads and hashes, so that a file that changes in between is the one or the other."""
    path = write(tmp_path / "a.jsonl", records())
    preparation = prepare.Preparation([Jsonl(path)], name="mine", settings=Settings())
    write(path, records(61))
    data = dataset.load(preparation.run()[0])
    assert data.manifest["inputs"][0]["sha256"] == files.sha256_file(path)
    assert data.stats["records"]["input"] == 61


def test_an_empty_split_is_refused_with_a_command_that_works(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = write(tmp_path / "my file.jsonl", [{"text": f"t{i}", "source": f"s{i % 4}"} for i in range(40)])
    seed = next(
        seed for seed in range(99) if main(["data-prepare", str(path), "--seed", str(seed), "--name", "few"]) == 2
    )
    with pytest.raises(UserError, match="no record in") as caught:
        made(path, "few", seed=seed)
    assert "4 groups" in caught.value.found and "train" in caught.value.found
    command = caught.value.next_command
    assert command.startswith(f"make data-prepare INPUT='{path}' ARGS=\"--name few --seed ")
    options = command.split('ARGS="')[1].rstrip('"').split()
    assert main(["data-prepare", str(path), *options]) == 0
    with pytest.raises(UserError, match="no record in") as caught:
        prepare.Preparation([Jsonl(path, "text")], name="few", settings=Settings(seed=seed)).run()
    assert caught.value.next_command == command.replace("--name few", "--name few --form text")


@pytest.mark.parametrize(("num_folders", "option"), [(2, "--group-by record"), (3, "--seed")])
def test_sub_folders_are_groups_and_the_next_command_keeps_what_is_promised(
    tmp_path: Path, capsys: pytest.CaptureFixture, num_folders: int, option: str
):
    for i in range(12 * num_folders):
        folder = tmp_path / "texts" / f"part{i % num_folders}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.txt").write_text(f"a text of its own, number {i * 7919}")
    assert main(["data-prepare", str(tmp_path / "texts"), "--near", "0", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert f"{num_folders} groups" in error["found"] and "(the first step of a file's path)" in error["expected"]
    promised = dict(re.findall(r"(train|validation|test) (\d+)", error["expected"]))
    options = error["next"].split('ARGS="')[1].rstrip('"').split()
    assert option in error["next"] and len(promised) == 3
    assert main(["data-prepare", str(tmp_path / "texts"), *options, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    splits = document["stats"]["splits"]
    assert {name: str(one["records"]) for name, one in splits.items()} == promised
    told = document["report"]["rows"].get("shares", "")
    assert ("80%, 10%, 10% were asked for; 3 groups, each in one split" in told) is (num_folders == 3), told


def test_groups_that_records_join_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Sixty groups, of which the first twenty share a record and could be parted no more."""
    rows = [{"text": f"a text of its own, number {i * 7919}", "group": f"g{i}"} for i in range(60)]
    rows += [{"text": "a text that they have in common", "group": f"g{i}"} for i in range(20)]
    write(tmp_path / "a.jsonl", rows)
    assert main(["data-prepare", str(tmp_path / "a.jsonl"), "--near", "0"]) == 0
    error = capsys.readouterr().err
    assert "60 groups are named, 19 of them joined with another" in error
    assert "41 could be split, the largest with 34% of the records" in error
    write(tmp_path / "b.jsonl", [{"text": "the same", "group": f"g{i}"} for i in range(9)])
    assert main(["data-prepare", str(tmp_path / "b.jsonl"), "--near", "0"]) == 2
    assert "1 group after 8 were joined with another by a shared record or near-duplicates" in capsys.readouterr().err
    write(tmp_path / "c.jsonl", [*rows[:40], {"text": rows[0]["text"].upper(), "group": "g0"}])
    assert main(["data-prepare", str(tmp_path / "c.jsonl"), "--near", "0.9"]) == 0
    assert "2 records in 1 cluster, 2 in the largest" in capsys.readouterr().err


def test_a_split_that_nobody_asked_for_is_absent(tmp_path: Path):
    data = dataset.load(made(write(tmp_path / "a.jsonl", records()), train_ratio=0.9, val_ratio=0.1)[0])
    assert data.splits == ["train", "validation"]
    with pytest.raises(UserError, match="no test split"):
        list(data.iter_texts("test"))


def test_chat_and_completion_records_are_prepared_too(tmp_path: Path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    chat = [{"messages": [turn | {"content": f"{turn['content']}{i}"} for turn in turns]} for i in range(60)]
    data = dataset.load(made(write(tmp_path / "a.jsonl", chat), "chat")[0])
    assert data.form == "messages" and "q7" in [t for s in data.splits for t in data.iter_texts(s)]
    pairs = [{"prompt": f"q{i}", "completion": "yes"} for i in range(60)]
    data = dataset.load(made(write(tmp_path / "b.jsonl", pairs), "pairs")[0])
    assert data.form == "prompt-completion" and data.stats["records"]["kept"] == 60


def test_references(tmp_path: Path):
    folder, _ = made(write(tmp_path / "a.jsonl", records()))
    newer, _ = made(write(tmp_path / "a.jsonl", records(61)))
    data = dataset.load(folder)
    assert dataset.resolve(data.reference) == folder
    assert dataset.resolve(f"mine@{data.hash}") == folder
    assert dataset.resolve(f"mine@{data.hash[:6]}") == folder
    assert dataset.resolve("mine") == newer
    assert dataset.resolve(str(folder)) == folder
    for wrong in ("mine@000000000000", "nobody", "../mine"):
        with pytest.raises(UserError, match="no such dataset"):
            dataset.resolve(wrong)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "x" * 65])
def test_a_name_that_is_no_folders_is_refused(tmp_path: Path, name: str):
    with pytest.raises(UserError, match="not a name"):
        made(write(tmp_path / "a.jsonl", records()), name)


def test_the_command_prints_one_document_and_says_what_is_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = write(tmp_path / "my data (1).jsonl", [*records(), records()[0]])
    assert main(["data-prepare", str(path), "--json"]) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert document["dataset"].startswith("my-data-1@") and document["reused"] is False
    assert document["stats"]["dropped"]["duplicates"] == 1
    assert "61 = 60 kept + 1 dropped + 0 rejected" in output.err
    assert f"make tokenizer-train DATASET={document['dataset']}" in output.err
    assert main(["data-prepare", str(path), "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["reused"] is True and "(unchanged, reused)" in output.err


def test_the_command_wants_an_input(capsys: pytest.CaptureFixture):
    assert main(["data-prepare"]) == 2
    assert "an input, please" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--max-record", "much"], "not a size"),
        (["--train-ratio", "2"], "the ratios make no split"),
        (["--cutoff", "2026-13-01"], "not a day"),
        (["--name", "../up"], "not a name"),
    ],
    ids=str,
)
def test_the_command_refuses_wrong_options(tmp_path: Path, arguments: list[str], what: str, capsys):
    path = write(tmp_path / "a.jsonl", records())
    assert main(["data-prepare", str(path), *arguments]) == 2
    assert what in capsys.readouterr().err


def test_an_overlong_record_names_the_command_that_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture):
    path = write(tmp_path / "a.jsonl", [*records(), {"text": "x" * 4000}])
    assert main(["data-prepare", str(path), "--max-record", "1KiB", "--seed", "3"]) == 2
    error = capsys.readouterr().err
    assert f'make data-prepare INPUT={path} ARGS="--name a --seed 3 --max-record 4012B"' in error
    assert main(["data-prepare", str(path), "--max-record", "4012B", "--seed", "3"]) == 0


def test_an_integer_is_an_id_by_its_decimal_text(tmp_path: Path):
    """As published data numbers its records: 0 too, in what is kept and in what is said of a bad one."""
    values = [value | {"id": number - 1} for number, value in enumerate(records())]
    path = write(tmp_path / "a.jsonl", [*values, {"id": 77, "text": " "}])
    data = dataset.load(made(path, on_error="drop")[0])
    kept = {value["id"]: value["text"] for split in data.splits for value in data.iter_records(split)}
    assert kept == {str(value["id"]): value["text"] for value in values} and {"-1", "0"} < kept.keys()
    assert json.loads((data.folder / "rejected.jsonl").read_text())["id"] == "77"
    assert list(next(data.iter_records("train"))) == ["id", "text", "group"]


def test_every_bad_record_is_reported_and_no_data_set_is_written(tmp_path: Path, own_roots: Path, capsys):
    path = write(tmp_path / "a.jsonl", records())
    assert main(["data-prepare", str(path), "--on-error", "report"]) == 0
    assert "60, all of them good" in capsys.readouterr().err
    path.write_text('{"text":" "}\n' + path.read_text() + '{bad\n{"text":"a","id":"r99","url":NaN}\n')
    assert main(["data-prepare", str(path), "--on-error", "report"]) == 2
    error = capsys.readouterr().err
    assert "3 of 63 records are bad" in error and "1 empty, 1 not_json, 1 bad_number" in error
    listed = [json.loads(line) for line in (paths.roots().datasets / "a.problems.jsonl").read_text().splitlines()]
    assert [(one["file"], one["line"], one["id"]) for one in listed] == [
        ("a.jsonl", 1, None), ("a.jsonl", 62, None), ("a.jsonl", 63, "r99"),
    ]  # fmt: skip
    assert [reason["rule"] for reason in listed[2]["reasons"]] == ["bad_number", "unknown_key"]
    assert not list(paths.roots().datasets.glob("a/*"))


def test_bad_records_are_dropped_counted_and_listed(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [*records(), records()[5]])
    path.write_text('{"text":" "}\n' + path.read_text() + "{bad\n")
    data = dataset.load(made(path, on_error="drop")[0])
    assert data.stats["records"] == {"input": 63, "kept": 60, "dropped": 1, "rejected": 2}
    assert data.stats["rejected"] == {"empty": 1, "not_json": 1}
    assert len((data.folder / "rejected.jsonl").read_text().splitlines()) == 2
    assert not dataset.load(made(write(path, records()), on_error="drop")[0]).stats["rejected"]
    with pytest.raises(UserError, match="holds no record"):
        path.write_text("{bad\n")
        made(path, on_error="drop")


def test_the_need_is_predicted_before_anything_large_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "a.jsonl", records())
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=100 << 20))
    with pytest.raises(MachineError, match="not enough memory") as caught:
        made(path)
    assert "100.00 MiB free" in caught.value.found and "for about 65 records" in caught.value.expected


def test_many_cores_with_little_memory_take_fewer_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """64 of them would need 10 GiB; a file of any size would be refused."""
    path = write(tmp_path / "a.jsonl", records())
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=400 << 20))
    monkeypatch.setattr("training.data.reading._ALONE_BELOW_BYTES", 0)
    preparation = prepare.Preparation([Jsonl(path)], name="mine", settings=Settings())
    assert not preparation.run()[1] and preparation.need.workers == 1


# ---- verifying


def test_a_whole_data_set_is_verified_with_its_tokens(tmp_path: Path, capsys: pytest.CaptureFixture):
    write(tmp_path / "a.jsonl", [{"text": f"def f{i}():\n    return {i}\n"} for i in range(200)])
    assert main(["data-prepare", str(tmp_path / "a.jsonl")]) == 0
    assert main(["tokenizer-train", "--dataset", "a", "--vocab-size", "300"]) == 0
    assert main(["data-peek", "a", "--tokenizer", "a"]) == 0
    capsys.readouterr()
    assert main(["data-verify", "a"]) == 0
    assert "1 set: " in capsys.readouterr().err
    folder = dataset.resolve("a")
    shard = next((folder / "tokens").iterdir()) / "train.tokens.bin"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\0\0")
    assert main(["data-verify", "a"]) == 5
    error = capsys.readouterr().err
    assert "train.tokens.bin: a file's bytes have changed" in error


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda folder: (folder / "train.jsonl").write_text("x"), "train.jsonl: a file has another size"),
        (lambda folder: (folder / "test.jsonl").unlink(), "test.jsonl: a file is missing"),
        (lambda folder: (folder / "more.jsonl").write_text("x"), "more.jsonl: a file that no manifest names"),
        (lambda folder: (folder / "tokens" / "abc").mkdir(parents=True), "tokens/abc: not a complete tokens"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "JSON file is damaged"),
    ],
    ids=["size", "gone", "more", "incomplete", "manifest"],
)
def test_what_is_wrong_with_a_data_set_is_told_with_exit_5(tmp_path: Path, damage, found: str, capsys):
    folder = made(write(tmp_path / "a.jsonl", records()))[0]
    damage(folder)
    assert main(["data-verify", str(folder)]) == 5
    assert found in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda said: (said / "train.top.bin").write_bytes(b"\1" * 9), "train.top.bin: a file has another size"),
        (lambda said: (said / "train.top.bin").write_bytes(b"\1" * 8), "train.top.bin: a file's bytes have changed"),
        (lambda said: (said / "manifest.json").unlink(), "not a complete teaching"),
        (lambda said: said.rename(said.with_name("0" * 12)), "the folder's name is another hash"),
        (lambda said: _retold(said, "b" * 64), "what a teacher said is of other tokens, bbbbbbbbbbbb"),
    ],
    ids=["size", "bytes", "incomplete", "name", "tokens"],
)
def test_what_teachers_said_is_verified_with_the_tokens_that_it_is_of(tmp_path: Path, damage, found: str, capsys):
    folder = made(write(tmp_path / "a.jsonl", records()))[0]
    digest = "c" * 64
    shard = folder / "tokens" / digest[:12]
    said = shard / dataset.TEACHERS / ("a" * 12)
    said.mkdir(parents=True)
    files.write_manifest(shard, "tokens", {"hash": digest, "dataset": {"hash": dataset.load(folder).hash}}, [])
    (said / "train.top.bin").write_bytes(b"\0" * 8)
    _retold(said, digest)
    (shard / dataset.TEACHERS / ".b.recording").mkdir()  # one that is still made
    assert main(["data-verify", str(folder)]) == 0
    assert "1 recording: best@aaaaaaaaaaaa (1 label, top 2 of each)" in capsys.readouterr().err
    damage(said)
    assert main(["data-verify", str(folder)]) == 5
    assert found in capsys.readouterr().err


def _retold(said: Path, tokens: str) -> None:
    who = {"teacher": {"name": "best"}, "top_k": 2, "train": {"rows": 1}}
    files.write_manifest(said, dataset.TEACHING, {"hash": "a" * 64, "tokens": tokens} | who)


def test_a_renamed_folder_is_not_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture):
    folder = made(write(tmp_path / "a.jsonl", records()))[0]
    other = folder.rename(folder.with_name("0" * 12))
    assert main(["data-verify", str(other)]) == 5
    assert "the folder's name is another hash" in capsys.readouterr().err


# ---- what it takes


@pytest.mark.slow
def test_the_memory_that_is_told_is_the_stages_own_and_no_more_than_was_predicted(tmp_path: Path):
    """In a process that holds half a gigabyte already, and gave back as much before."""
    path = write(tmp_path / "a.jsonl", [{"text": f"{i} " + "word " * 100, "group": str(i)} for i in range(5_000)])
    before = np.ones(600 << 17)
    del before
    held = np.ones(512 << 17)
    for workers in (0, 2):
        preparation = prepare.Preparation([Jsonl(path)], name=f"mine{workers}", settings=Settings(), workers=workers)
        preparation.run()
        assert 1 << 20 < preparation.peak_memory_bytes <= preparation.need.memory_bytes < held.nbytes


@pytest.mark.slow
def test_tiny_records_take_no_more_memory_than_was_predicted(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [{"text": f"t{i}"} for i in range(60_000)])
    preparation = prepare.Preparation([Jsonl(path)], name="tiny", settings=Settings(), workers=0)
    preparation.run()
    assert preparation.peak_memory_bytes <= preparation.need.memory_bytes * 0.7


def test_what_a_killed_command_left_goes_with_the_next_one_even_if_nothing_is_made(tmp_path: Path, own_roots: Path):
    path = write(tmp_path / "a.jsonl", records())
    folder = made(path)[0]
    left = folder.with_name(f".work.{2**22 + 1}.abcd.partial")
    left.mkdir()
    (left / "spool").write_text("x")
    assert made(path) == (folder, True) and not left.exists()
