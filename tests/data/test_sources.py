"""Sources: packed files, Parquet, folders, several with weights; and the same bytes whatever reads them."""

import contextlib
import gzip
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
import zstandard

from tests.data.reading import read
from training.cli import main
from training.core import files, paths
from training.core.errors import MachineError, RunError, UserError
from training.data import blocks, dataset, intake, parquet, pool, source
from training.data.folder import TEXT_SUFFIXES, Folder
from training.data.prepare import Preparation
from training.data.settings import Settings
from training.data.source import Jsonl


def values(count: int = 60, word: str = "record") -> list[dict]:
    return [{"id": f"{word}{i}", "text": f"{word} number {i}", "group": f"g{i}"} for i in range(count)]


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def packed(kind: str, data: bytes) -> bytes:
    half = data.index(b"\n", len(data) // 2) + 1  # two members, as joined files have
    if kind == "gzip":
        return gzip.compress(data[:half]) + gzip.compress(data[half:]) + b"\0" * 512
    if kind == "zstd":
        pack = zstandard.ZstdCompressor(write_checksum=True).compress
        return pack(data[:half]) + pack(data[half:])
    return data


def prepared(*inputs: source.Source, name: str = "mine", workers: int | None = None, **settings) -> dataset.Dataset:
    return dataset.load(Preparation(inputs, name=name, settings=Settings(**settings), workers=workers).run()[0])


@pytest.mark.parametrize("text", ["Once upon a time.\n", "[1] a note\n", "a,b\n1,2\n"])
def test_a_file_of_text_is_told_to_come_by_its_folder(tmp_path: Path, text: str):
    (tmp_path / "book.txt").write_text(text)
    with pytest.raises(UserError, match="a file of text is no file of records") as refused:
        source.of(str(tmp_path / "book.txt"))
    assert refused.value.next_command == f"make data-prepare INPUT={tmp_path}"
    assert source.of(str(tmp_path)).kind == "folder"


@pytest.mark.parametrize("kind", ["plain", "gzip", "zstd"])
def test_packed_files_are_told_by_their_bytes_and_read_whole(tmp_path: Path, kind: str):
    rows = values(5000)
    path = tmp_path / "data.bin"
    path.write_bytes(packed(kind, lines(rows)))
    assert blocks.packing(path) == kind
    one = Jsonl(path)
    assert read(one, near=0).values == rows
    assert one.sha256 == one.fingerprint() == files.sha256_file(path)


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_packed_file_that_is_damaged_or_cut_short_is_refused(tmp_path: Path, kind: str):
    """One that ends early must never pass for a small one."""
    data = packed(kind, lines(values(5000))).rstrip(b"\0")
    path = tmp_path / "data.bin"
    for cut in (len(data) - 3, len(data) // 2 - 40, 40):
        path.write_bytes(data[:cut])
        with pytest.raises(UserError, match=r"packed file is (cut short|damaged)"):
            read(path)
    path.write_bytes(data[:200] + bytes(byte ^ 0x55 for byte in data[200:260]) + data[260:])
    with pytest.raises(UserError, match=r"packed file is damaged|record is refused|cut short"):
        read(path)
    path.write_bytes(data + b"garbage")
    with pytest.raises(UserError, match="packed file is damaged"):
        read(path)


def test_a_file_that_was_packed_with_a_long_window_is_not_called_damaged(tmp_path: Path):
    """As archives of whole sites are: `zstd --long=31`."""
    packer = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters(window_log=31)
    ).compressobj()
    path = tmp_path / "archive.jsonl.zst"
    path.write_bytes(packer.compress(lines(values(5))) + packer.flush())
    with pytest.raises(UserError, match="needs a window of more than 128 MiB") as caught:
        read(path)
    assert caught.value.next_command.startswith(f"zstd -d --long=31 {path}")


def test_a_bad_line_of_a_packed_file_is_shown_by_a_command_that_works(tmp_path: Path):
    path = tmp_path / "my data.jsonl.gz"
    path.write_bytes(gzip.compress(lines(values(3)) + b"{bad\n"))
    with pytest.raises(UserError) as caught:
        read(path)
    shown = subprocess.run(["bash", "-c", caught.value.next_command], capture_output=True, text=True, check=True)
    assert shown.stdout == "{bad\n"


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is an optional extra")
def test_parquet_rows_are_records_and_a_null_is_a_field_that_is_not_there(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "id": "a",
            "messages": [{"role": "user", "content": "q", "name": None}, {"role": "assistant", "content": "a"}],
        },
        {"id": None, "messages": [{"role": "user", "content": "é\n"}, {"role": "assistant", "content": "b"}]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows * 1500), tmp_path / "chat.parquet")
    found = read(tmp_path / "chat.parquet", near=0).values
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert len(found) == 3000 and found[0] == {"id": "a", "messages": turns}
    assert list(found[1]) == ["messages"]
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "chat.parquet").read_bytes()[:-20])
    with pytest.raises(UserError, match="Parquet file is damaged"):
        read(tmp_path / "cut.parquet")
    bad = pyarrow.Table.from_pylist([{"text": "a"}, {"text": " "}])
    pyarrow.parquet.write_table(bad, tmp_path / "bad.parquet")
    with pytest.raises(UserError) as caught:
        read(tmp_path / "bad.parquet")
    assert "'text' is empty" in caught.value.found and "row 2" in caught.value.where


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is an optional extra")
def test_parquet_rows_of_any_length_come_in_blocks_of_one_size(tmp_path: Path):
    """Long rows a few at a time, short ones many, in the groups of one file."""
    import pyarrow
    import pyarrow.parquet

    texts = [[f"{i} " + "x" * 100_000 for i in range(200)], [f"short {i}" for i in range(3000)]]
    path = tmp_path / "rows.parquet"
    with pyarrow.parquet.ParquetWriter(path, pyarrow.schema({"text": pyarrow.string()})) as writer:
        for group in texts:
            writer.write_table(pyarrow.table({"text": group}))
    tracemalloc.start()
    found = [(block.first, block.data.count(b"\n"), len(block.data)) for block in parquet.read(path, len)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(size for *_, size in found) < 2 << 20 and peak < 8 << 20
    assert sum(count for _, count, _ in found) == 3200 and 20 <= len(found) < 40
    assert [first for first, *_ in found[1:]] == [first + count for first, count, _ in found[:-1]]


def test_parquet_without_its_package_is_refused_with_the_way_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and more")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MachineError, match="Parquet needs a package") as caught:
        source.of(str(tmp_path / "a.parquet"))
    assert "pip install pyarrow" in caught.value.next_command


def filled(folder: Path, contents: dict[str, str | bytes]) -> Path:
    for name, held in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(held.encode() if isinstance(held, str) else held)
    return folder


def test_a_folder_of_text_gives_a_record_a_file(tmp_path: Path):
    folder = filled(tmp_path / "project", {
        "README.md": "# hello\n", "src/a.py": "x = 1\n", "src/deep/b.PY": "\ufeffy = 2\n", "src/__init__.py": "",
        ".git/config.txt": "out", "src/.hidden.py": "out", "src/__pycache__/c.py": "out", "pic.png": b"\x89PNG\0",
        "Makefile": "all:\n",
    })  # fmt: skip
    found = read(source.of(str(folder)))
    assert found.values == [
        {"id": "Makefile", "group": "Makefile", "text": "all:\n"},
        {"id": "README.md", "group": "README", "text": "# hello\n"},
        {"id": "src/a.py", "group": "src", "text": "x = 1\n"},
        {"id": "src/deep/b.PY", "group": "src", "text": "y = 2\n"},
    ]
    assert found.lines == {"empty_files": 1, "byte_order_marks": 1}
    (folder / "src" / "latin.py").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="a record is refused") as caught:
        read(source.of(str(folder)))
    assert "latin.py" in caught.value.where and "--on-error drop" in caught.value.next_command
    assert read(source.of(str(folder)), on_error="drop").rejected == {"not_utf8": 1}
    with pytest.raises(UserError, match="holds no text"):
        (tmp_path / "none").mkdir()
        Folder(tmp_path / "none")


ODD = {
    "a.txt": "one\n", "LICENSE": "Do as you like.\n", "logs/today.log": "it ran\n", "b.copyright": "mine\n",
    "notes.txt.gz": gzip.compress(b"packed\n"), "more.log.zst": zstandard.ZstdCompressor().compress(b"too\n"),
    "pic.PNG": b"\x89PNG\r\n\0\0", "all.tar.gz": gzip.compress(b"a\0b" * 9), "latin": b"caf\xe9", "cut": b"\xc3",
    "rows.jsonl": '{"text":"a"}\n', ".env": "X=1", ".git/config": "x",
}  # fmt: skip


def test_text_is_told_by_its_content_where_no_extension_tells_and_the_rest_is_counted(tmp_path: Path, caplog):
    folder = filled(tmp_path / "odd", ODD)
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    (folder / "linked").symlink_to(tmp_path, target_is_directory=True)
    one = source.of(str(folder))
    assert {row["id"]: row["text"] for row in read(one, near=0).values} == {
        "LICENSE": "Do as you like.\n", "a.txt": "one\n", "b.copyright": "mine\n", "logs/today.log": "it ran\n",
        "more.log.zst": "too\n", "notes.txt.gz": "packed\n",
    }  # fmt: skip
    assert +one.left_out == {
        "hidden": 2,
        "no extension": 2,
        ".png": 1,
        ".tar.gz": 1,
        ".jsonl": 1,
        "no plain file": 1,
        "linked folder": 1,
    }
    assert "files of records beside text are left out" in caplog.text
    assert one.is_packed and one.sha256 == one.fingerprint()


def test_what_was_left_out_is_in_the_report_and_the_stats_whatever_comes_of_the_rest(tmp_path: Path, capsys):
    folder = filled(tmp_path / "odd", ODD | {"bad.txt": b"caf\xe9"})
    assert main(["data-prepare", str(folder), "--near", "0", "--on-error", "report"]) == 2
    error = capsys.readouterr().err
    assert "1 of 7 records are bad" in error and "files    7 left out: 2 hidden, 2 no extension, 1 .jsonl" in error
    ratios = ("--train-ratio", "1", "--val-ratio", "0")
    assert main(["data-prepare", str(folder), *ratios, "--near", "0", "--on-error", "drop"]) == 0
    assert "7 left out: 2 hidden" in capsys.readouterr().err
    stats = dataset.load(dataset.resolve("odd")).stats
    assert stats["sources"][0]["left_out"] == {".jsonl": 1, ".png": 1, ".tar.gz": 1, "hidden": 2, "no extension": 2}


def test_a_packed_file_of_a_folder_is_held_to_the_rules_of_all(tmp_path: Path):
    packed = gzip.compress(b"words\n" * 4000)
    folder = filled(tmp_path / "packed", {"a.txt": "one\n", "cut.txt.gz": packed[:-9], "long.txt.gz": packed})
    assert read(source.of(str(folder)), on_error="drop", max_record_bytes=9000).rejected == {
        "damaged": 1,
        "too_long": 1,
    }
    found = read(source.of(str(folder)), on_error="drop")
    assert found.rejected == {"damaged": 1} and found.texts == ["one\n", "words\n" * 4000]
    with pytest.raises(UserError, match="a record is refused") as caught:
        read(source.of(str(folder)))
    assert "cut.txt.gz" in caught.value.where and "the packed file is cut short" in caught.value.found


def test_a_file_of_a_folder_that_is_too_long_is_measured_and_not_held(tmp_path: Path):
    """B43: of files as of lines; a forgotten dump beside the text costs no memory, and is told with its length."""
    size = 64 << 20
    folder = filled(tmp_path / "mixed", {"a.txt": "one\n", "z.txt": "two\n"})
    with open(folder / "dump.csv", "wb") as file:
        file.truncate(size)
    tracemalloc.start()
    one = source.of(str(folder))
    found = read(one, on_error="drop", max_record_bytes=1 << 20)
    assert one.sha256 == one.fingerprint()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size / 4
    assert found.texts == ["one\n", "two\n"] and found.rejected == {"too_long": 1} and not found.lines
    assert (found.faults[0]["id"], found.faults[0]["reasons"][0]["found"]) == ("dump.csv", f"{size} bytes")
    with pytest.raises(UserError, match="a record is too long") as caught:
        read(one)
    assert caught.value.next_command.endswith(f'--max-record {size}B"')


def test_the_page_lists_every_extension():
    page = (paths.REPOSITORY / "docs" / "data.md").read_text()
    listed = set(re.search(r"^Extensions of text: (.+?)\.\n\n", page, re.M | re.S)[1].replace("`", "").split())
    assert listed == TEXT_SUFFIXES


def test_a_folder_of_shards_is_one_source_in_the_order_of_names(tmp_path: Path):
    folder = tmp_path / "shards"
    folder.mkdir()
    rows = values(90)
    (folder / "b.jsonl").write_bytes(lines(rows[30:60]))
    (folder / "a.jsonl.gz").write_bytes(packed("gzip", lines(rows[:30])))
    (folder / "c.jsonl.zst").write_bytes(packed("zstd", lines(rows[60:])))
    one = source.of(str(folder))
    assert read(one).values == rows and one.sha256 == one.fingerprint()


def test_the_declared_form_holds_from_the_first_record(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(values(3)))
    with pytest.raises(UserError) as caught:
        read(Jsonl(path, form="messages"))
    assert "line 1" in caught.value.where and "'messages' is missing" in caught.value.found


def test_sources_of_two_forms_make_no_data_set(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(lines(values(3)))
    (tmp_path / "b.jsonl").write_bytes(lines([{"prompt": "a", "completion": "b"}]))
    with pytest.raises(UserError, match="records have one form"):
        read(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    (tmp_path / "bad.jsonl").write_bytes(lines([{"body": "no form at all"}]))
    with pytest.raises(UserError, match="records have one form") as caught:
        read(*(tmp_path / name for name in ("bad.jsonl", "a.jsonl", "b.jsonl")), on_error="drop")
    assert caught.value.expected == "text, as the source a.jsonl has; or two data sets"


def test_a_weight_says_how_often_each_training_record_is_seen(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(lines(values(400, "alpha")))
    (tmp_path / "b.jsonl").write_bytes(lines(values(400, "beta")))
    (tmp_path / "c.jsonl").write_bytes(lines([row | {"source": "own"} for row in values(40, "gamma")]))
    inputs = [source.of(str(tmp_path / name)) for name in ("a.jsonl=2.5", "b.jsonl=0.25", "c.jsonl")]
    data = prepared(*inputs)
    train = list(data.iter_records("train"))
    times = {name: [0, 0] for name in ("alpha", "beta", "gamma")}
    for row in train:
        times[row["text"].split()[0]][0] += 1
    for name, seen in times.items():
        seen[1] = len({row["id"] for row in train if row["text"].startswith(name)})
    assert 290 < times["alpha"][1] < 350 and times["alpha"][0] == pytest.approx(2.5 * times["alpha"][1], rel=0.08)
    assert times["beta"][0] == times["beta"][1] and 50 < times["beta"][0] < 120
    assert times["gamma"][0] == times["gamma"][1]
    assert {row["source"] for row in train} == {"a.jsonl", "b.jsonl", "own"}
    records, dropped = data.stats["records"], data.stats["dropped"]
    assert records["input"] == 840 == records["kept"] + records["dropped"] + records["rejected"]
    assert dropped["by_weight"] == records["dropped"] > 0
    assert data.stats["splits"]["train"]["records"] == len(train)
    for one in data.stats["sources"]:
        assert one["input"] == one["kept"] + one["dropped"] + one["rejected"]
    held_out = [row["id"] for split in ("validation", "test") for row in data.iter_records(split)]
    assert len(held_out) == len(set(held_out))


def test_weights_that_leave_nothing_to_train_on_are_refused(tmp_path: Path):
    """A split that was asked for is never empty."""
    (tmp_path / "a.jsonl").write_bytes(lines(values(60)))
    with pytest.raises(UserError, match="the weights leave no record in train") as caught:
        prepared(source.of(f"{tmp_path}/a.jsonl=0.001"))
    assert caught.value.found.endswith("a.jsonl=0.001") and "some of 51 records" in caught.value.expected
    assert not list(paths.roots().datasets.glob("*/*"))


@pytest.mark.parametrize("text", ["a.jsonl=0", "a.jsonl=-1", "a.jsonl=many", "a.jsonl=nan", "a.jsonl=1e9"])
def test_what_is_no_weight_is_refused(text: str):
    with pytest.raises(UserError, match=r"not a source|no such input"):
        source.of(text)


# ---- many processes, and what goes wrong in them


@pytest.fixture
def many(tmp_path: Path) -> Path:
    path = tmp_path / "many.jsonl"
    path.write_bytes(
        lines([row | {"text": f"{row['text']} {i * 7919:x} " * 20} for i, row in enumerate(values(20_000))])
    )
    return path


def test_the_number_of_workers_changes_no_byte(many: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    hashes = {}
    for workers in (0, 1, 3):
        monkeypatch.setenv("DATA_ROOT", str(tmp_path / f"root{workers}"))
        folder = prepared(Jsonl(many), workers=workers).folder
        hashes[workers] = (folder.name, {path.name: files.sha256_file(path) for path in folder.iterdir()})
    assert hashes[0] == hashes[1] == hashes[3]


def test_the_first_bad_record_is_the_first_in_the_file_whoever_reads_it(many: Path):
    data = many.read_bytes().split(b"\n")
    data[15_000] = data[9_000] = b"{bad"
    many.write_bytes(b"\n".join(data))
    with pytest.raises(UserError) as caught:
        read(many, workers=3)
    assert caught.value.where.endswith("line 9001")


def test_a_worker_that_dies_is_told_and_leaves_nothing(many: Path, monkeypatch: pytest.MonkeyPatch):
    batches = Jsonl.batches

    def with_killer(self, *arguments):
        for number, batch in enumerate(batches(self, *arguments)):
            if number == 3:
                for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                    with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # the pool ends the second one
                        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                            os.kill(int(child), signal.SIGKILL)
            yield batch

    monkeypatch.setattr(Jsonl, "batches", with_killer)
    with pytest.raises(RunError, match="a worker process died"):
        prepared(Jsonl(many), workers=2)
    assert [item.name for item in paths.roots().datasets.iterdir()] == [".mine.lock"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_workers_end_with_the_command_and_the_next_one_finds_a_clean_place(many: Path, number: int, own_roots: Path):
    data = many.read_bytes()
    many.write_bytes(data * 12)
    command = [sys.executable, "-m", "training", "data-prepare", str(many), "--workers", "2"]
    running = subprocess.Popen(command, cwd=paths.REPOSITORY, stderr=subprocess.PIPE)
    deadline, workers = time.monotonic() + 60, []
    while time.monotonic() < deadline and len(workers) < 2:
        time.sleep(0.05)
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        workers = [child for child in children if _is_worker(child)]
    time.sleep(0.5)
    running.send_signal(number)
    running.communicate(timeout=60)
    assert running.returncode == (130 if number != signal.SIGKILL else -signal.SIGKILL)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(_is_worker(child) for child in workers):
        time.sleep(0.05)
    assert len(workers) == 2 and not any(_is_worker(child) for child in workers)
    left = [item.name for item in (own_roots / "training" / "datasets").rglob("*") if item.is_file()]
    assert number == signal.SIGKILL or left == [".many.lock"]
    many.write_bytes(data[: data.index(b"\n", 100_000) + 1])
    assert main(["data-prepare", str(many)]) == 0
    folder = own_roots / "training" / "datasets" / "many"
    assert len(list(folder.iterdir())) == 1


def _is_worker(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" and b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_batches_are_whole_lines_and_only_a_few_are_waiting(many: Path):
    """Reading ahead is bounded, however slow the reader of the results is."""
    handed_out = []

    def batches():
        for number in range(40):
            handed_out.append(number)
            yield intake.Batch(0, "x", 1, b'{"text":"a"}\n', "text")

    with pool.started(2, intake.taker, Settings(near=0), None, way_out="") as work:
        results = work(batches())
        next(results)
        time.sleep(0.5)
        assert len(handed_out) <= 6
        assert sum(1 for _ in results) == 39
    data = b"".join(block.data for block in blocks.read(many, 1 << 20, len))
    assert data == many.read_bytes()
    assert all(block.data.endswith(b"\n") for block in blocks.read(many, 1 << 20, len))
