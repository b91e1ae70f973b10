"""`recipe`, `memfit`, `check` and `doctor` as a person calls them: documents, exit codes, speed, what is not loaded."""

import hashlib
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.calculator import nvml
from training.cli import main
from training.core import files, paths, version
from training.core.paths import REPOSITORY
from training.data import dataset, tokens
from training.llamacpp import pin, source
from training.tokenizer import artifact

DEMO = "recipes/demo/pretrain-stdlib.yaml"
REFERENCE = "recipes/reference/pretrain-1b.yaml"
STUDENT = "recipes/reference/qlora-8b.yaml"
PACKED = "recipes/lora/smollm2-135m-nf4.yaml"


@pytest.fixture
def call(capsys, monkeypatch):
    """Call a command in this process; returns (exit code, `--json` document, what people read)."""
    monkeypatch.chdir(REPOSITORY)

    def call(*arguments: str) -> tuple[int, dict, str]:
        code = main([*arguments, "--json"])
        output = capsys.readouterr()
        return code, json.loads(output.out), output.err

    return call


# ---- recipe


def test_recipe_lists_every_recipe_and_base(call):
    code, document, text = call("recipe")
    assert code == 0
    every = {str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("recipes/*/*.yaml")}
    assert {one["path"] for one in document["recipes"]} == every >= {DEMO, REFERENCE, STUDENT, PACKED}
    qwens = dict.fromkeys(("qwen3-8b", "qwen3-4b", "qwen3-1.7b", "qwen3-0.6b"), False)
    assert {one["name"]: one["pinned"] for one in document["bases"]} == {"smollm2-135m-instruct": True} | qwens
    assert DEMO in text and "unpinned" in text


def test_recipe_shows_copies_and_checks(call, tmp_path: Path):
    target = tmp_path / "mine.yaml"
    code, document, _ = call("recipe", "copy", "pretrain-stdlib", str(target))
    assert code == 0 and document["report"]["rows"]["stops"] == "at the first of max_steps 1000, max_hours 0.042"
    own = (REPOSITORY / DEMO).read_text().replace("name: pretrain-stdlib", "name: mine")
    assert DEMO in own and target.read_text() == own.replace(DEMO, str(target))
    code, document, _ = call("recipe", "copy", "pretrain-stdlib", str(target))
    assert code == 2 and "there already" in document["error"]["what"]
    assert document["error"]["next"] == f'make recipe ARGS="copy pretrain-stdlib {tmp_path / "mine-2.yaml"}"'
    assert call("recipe", "copy", "pretrain-stdlib", str(tmp_path / "mine-2.yaml"))[0] == 0
    next_command = call("recipe", "copy", "pretrain-stdlib", str(target))[1]["error"]["next"]
    assert next_command.endswith('mine-3.yaml"')
    assert call("recipe", "check", str(target), "optimizer.lr=1e-3")[1]["values"]["optimizer"]["lr"] == 1e-3
    code, document, _ = call("recipe", "check", str(target), "optimizer.lr=fast", "bogus=1")
    assert code == 2 and len(document["error"]["problems"]) == 2
    assert call("recipe", "show", "demo/pretrain-stdlib")[1]["text"] == (REPOSITORY / DEMO).read_text()
    assert "perhaps" in call("recipe", "show", "pretrain-stdlb")[1]["error"]["expected"]


def test_a_copy_finds_the_recipe_that_it_extends_and_is_called_after_its_own_file(call, tmp_path: Path):
    target = tmp_path / "deep" / "My Own (2).yaml"
    assert call("recipe", "copy", PACKED, str(target))[0] == 0
    there, here = (call("recipe", "check", str(path))[1]["values"] for path in (REPOSITORY / PACKED, target))
    assert here == there | {"name": "my-own-2"} and here["method"] == "qlora"


def test_recipe_explains_every_key_with_its_origin(call):
    _, document, text = call("recipe", "explain", DEMO, "optimizer.lr=1e-3")
    rows = {row["key"]: row for row in document["keys"]}
    line = next(n for n, text in enumerate((REPOSITORY / DEMO).read_text().splitlines(), 1) if "vocab_size" in text)
    assert rows["optimizer.lr"]["origin"] == "command line" and rows["optimizer.lr"]["value"] == 1e-3
    assert rows["model.arch.vocab_size"]["origin"] == f"{DEMO}:{line}"
    assert rows["optimizer.eps"]["origin"] == "default"
    assert all(row["description"] for row in rows.values()) and "Peak learning rate." in text


def test_the_table_of_keys_is_made_from_the_schema(call):
    _, document, text = call("recipe", "schema")
    assert "| `optimizer.lr` | number > 0, <= 10 | 0.0002 | Peak learning rate. |" in text
    assert (
        "lora.rank" in text and "Only with method lora or qlora." in text and "data" in document["keys"]["properties"]
    )


# ---- memfit


def test_memfit_gives_the_document_of_schema_1(call):
    code, document, text = call("memfit", "--config", REFERENCE, "--vram", "24GiB")
    assert code == 0 and document["schema"] == 1 and document["method"] == "formula"
    assert document["parameters"] == {"total": 1_100_048_384, "trainable": 1_100_048_384}
    assert sum(document["terms"].values()) == document["peak"]["allocated_bytes"]
    assert document["peak"]["phase"] in document["instants"] and document["assumptions"]
    assert (document["fits"], document["verdict"], document["solve"]) == (True, "fits", None)
    assert document["device"]["usable_bytes"] < document["device"]["total_bytes"] == 24 << 30
    assert "weights" in text and "█" in text and "2 * parameters" in text


def test_memfit_ends_with_4_and_advice_where_it_does_not_fit(call):
    code, document, text = call("memfit", "--config", REFERENCE, "--gpu", "RTX 3070", "data.micro_batch=16")
    assert code == 4 and document["fits"] is False and document["verdict"] == "no"
    assert document["advice"][0]["override"] in text and "DOES NOT FIT" in text


def test_what_memfit_names_next_fits(call):
    """The command as it was typed, with a lever of two values."""
    rows = call("memfit", "--config", REFERENCE, "--vram", "10GiB")[1]["report"]["rows"]
    words = shlex.split(rows["next"])
    assert words[-2:] == ["data.micro_batch=2", "batch.accumulate=32"]
    assert call(*words[words.index("memfit") :])[0] == 0


def test_an_8b_student_is_planned_on_a_10_gb_card(call):
    code, document, _ = call("memfit", "--config", STUDENT, "--gpu", "RTX 3080 10GB")
    assert code == 0 and document["verdict"] == "fits" and document["parameters"]["trainable"] == 43_646_976
    assert any("pessimistic default" in line for line in document["assumptions"])


def test_memfit_without_a_device_is_no_failure(call, monkeypatch):
    monkeypatch.setattr("training.calculator.nvml.ask", lambda: nvml.Answer((), None, "no driver"))
    code, document, _ = call("memfit", "--config", REFERENCE)
    assert (code, document["fits"], document["verdict"], document["device"]) == (0, None, None, None)
    assert document["report"]["rows"]["gpu"] == "no driver; name one with --gpu or --vram"


def test_within_the_margin_is_tight_and_fits(call):
    needed = call("memfit", "--config", REFERENCE, "--vram", "24GiB")[1]["peak"]["device_bytes"]
    verdicts = [call("memfit", "--config", REFERENCE, "--vram", f"{needed + more}B")[1]["verdict"] for more in (-1, 1)]
    assert verdicts == ["no", "tight"]


@pytest.mark.parametrize(("variable", "key"), [("batch", "data.micro_batch"), ("seq", "data.seq_len")])
def test_memfit_solves(call, variable: str, key: str):
    _, document, _ = call("memfit", "--config", REFERENCE, "--vram", "10GiB", "--solve", variable)
    value = document["solve"]["value"]
    assert document["solve"]["variable"] == variable
    for more, verdicts in ((0, {"fits"}), (1, {"tight", "no"})):
        again = call("memfit", "--config", REFERENCE, "--vram", "10GiB", f"{key}={value + more}")[1]
        assert again["verdict"] in verdicts


def test_memfit_sweeps_a_grid_as_table_json_and_csv(call, tmp_path: Path):
    axes = ["--sweep", "data.seq_len=512,2048", "data.micro_batch=1,4,64"]
    target = tmp_path / "grid.csv"
    code, document, text = call("memfit", "--config", REFERENCE, "--vram", "16GiB", *axes, "--csv", str(target))
    assert code == 0 and document["schema"] == 1
    rows = {row["overrides"]: row for row in document["rows"]}
    assert len(rows) == 6 and rows["data.seq_len=512 data.micro_batch=1"]["verdict"] == "fits"
    assert rows["data.seq_len=2048 data.micro_batch=64"]["verdict"] == "no"
    one = rows["data.seq_len=2048 data.micro_batch=4"]
    alone = call("memfit", "--config", REFERENCE, "--vram", "16GiB", *one["overrides"].split())[1]
    assert one["device_bytes"] == alone["peak"]["device_bytes"] and one["verdict"] == alone["verdict"]
    lines = target.read_text().splitlines()
    assert lines[0].startswith("data.seq_len,data.micro_batch,verdict") and len(lines) == 7
    assert one["overrides"] in text


def test_memfit_estimates_one_of_several_ranks(call):
    known = ["memfit", "--config", REFERENCE, "--vram", "24GiB"]
    alone = call(*known)[1]
    code, shared, text = call(*known, "--ranks", "4", "--parallel", "fsdp2")
    assert code == 0 and shared["parallel"] == {"kind": "fsdp2", "ranks": 4} and alone["parallel"] is None
    assert shared["terms"]["weights"] * 4 == alone["terms"]["weights"]
    assert sum(shared["terms"].values()) == shared["peak"]["allocated_bytes"] < alone["peak"]["allocated_bytes"]
    assert "4 under fsdp2" in text and "one of 4 ranks" in shared["assumptions"][0]
    rows = call(*known, "--ranks", "4", "--parallel", "fsdp2", "--sweep", "data.micro_batch=4")[1]["rows"]
    assert rows[0]["device_bytes"] == shared["peak"]["device_bytes"]
    assert call(*known, "--ranks", "4")[0] == 2
    code, document, _ = call(*known, "--ranks", "4", "--parallel", "ddp", "--trace")
    assert code == 2 and "one process" in document["error"]["what"]


def test_memfit_draws_a_step_or_a_grid(call, tmp_path: Path):
    step, grid = tmp_path / "step.svg", tmp_path / "grid.png"
    code, _, text = call("memfit", "--config", REFERENCE, "--vram", "24GiB", "--plot", str(step))
    assert code == 0 and "usable for tensors" in step.read_text() and f"picture   {step}" in text
    axes = ["--sweep", "data.seq_len=512,2048", "data.micro_batch=1,4", "--plot", str(grid)]
    assert call("memfit", "--config", REFERENCE, "--vram", "24GiB", *axes)[0] == 0 and grid.stat().st_size > 5000
    code, document, _ = call("memfit", "--config", REFERENCE, "--plot", str(tmp_path / "step.jpg"))
    assert code == 2 and "PNG or SVG" in document["error"]["what"]


@pytest.mark.parametrize("axis", ["data.seq_len", "data.seq_len=", "data.seq_len=512,,1024"])
def test_a_sweep_over_nothing_is_refused(call, axis: str):
    code, document, _ = call("memfit", "--config", REFERENCE, "--sweep", axis)
    assert code == 2 and "not an axis" in document["error"]["what"]


def test_memfit_takes_the_longest_record_of_prepared_data(call, own_roots: Path, tmp_path: Path):
    records = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": f"{number:04d} " * 10}) for number in range(300)]
    records.write_text("\n".join([*lines, json.dumps({"text": "x" * 700})]) + "\n")
    assert call("data-prepare", str(records), "--name", "texts")[0] == 0
    recipe = tmp_path / "tune.yaml"
    recipe.write_text(
        "name: tune\nmethod: full\nmodel: {base: smollm2-135m-instruct}\nstop: {max_steps: 1}\n"
        "data: {dataset: texts, seq_len: 4096}\n"
    )
    _, document, _ = call("memfit", "--config", str(recipe), "--vram", "24GiB")
    assert "by its bytes" in document["assumptions"][0]


def test_a_late_long_record_counts_by_its_tokens_once_they_are_counted(call, own_roots: Path, tmp_path: Path):
    """B71: 100 records of 50 tokens, one of 2,000 at the end, batch 4 padded: 4 x 2,000, and the record is named."""
    records, word = tmp_path / "texts.jsonl", "a b c d e f g h "
    lines = [json.dumps({"text": f"{number:03d}" + "x" * 45, "split": "train"}) for number in range(100)]
    records.write_text("\n".join([*lines, json.dumps({"text": "y" * 1998, "split": "train"})]) + "\n")
    shares = ("--train-ratio", "1", "--val-ratio", "0")
    assert call("data-prepare", str(records), "--name", "late", *shares)[0] == 0
    letters = tmp_path / "letters.jsonl"
    letters.write_text("\n".join(json.dumps({"text": word * number}) for number in range(1, 60)) + "\n")
    assert call("data-prepare", str(letters), "--name", "letters", "--near", "0")[0] == 0
    assert call("tokenizer-train", "--dataset", "letters", "--name", "letters", "--vocab-size", "280")[0] == 0
    recipe = tmp_path / "tune.yaml"
    recipe.write_text(
        "name: tune\nmethod: full\nmodel: {base: smollm2-135m-instruct}\nstop: {max_steps: 1}\n"
        "tokenizer: {path: letters}\ndata: {dataset: late, seq_len: 4096, micro_batch: 4}\n"
    )
    bound = call("memfit", "--config", str(recipe), "--vram", "80GiB")[1]["assumptions"][0]
    assert bound == "the longest record (train.jsonl:101) has at most 2000 tokens, by its bytes"
    tokens.tokenize(dataset.load(dataset.resolve("late")), artifact.load(artifact.resolve("letters")))
    _, document, _ = call("memfit", "--config", str(recipe), "--vram", "80GiB")
    assert document["assumptions"][0] == "the longest record (train.jsonl:101) has 2000 tokens"
    assert "4 x 2000 tokens a micro-batch" in document["assumptions"][1]
    code, document, text = call("memfit", "--config", str(recipe), "--vram", "4GiB")
    assert code == 4 and "train.jsonl:101" in text


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--gpu", "RTX 9999"], "unknown GPU"),
        (["--vram", "much"], "not a size"),
        (["--vram", "12"], "a size without a unit"),
        (["data.micro_batch=0"], "micro_batch"),
        (["data.seq_len=100000"], "longer than the model's positions"),
    ],
)
def test_memfit_refuses_what_is_wrong(call, arguments: list[str], part: str):
    code, document, _ = call("memfit", "--config", REFERENCE, *arguments)
    assert code == 2 and part in json.dumps(document)


def test_memfit_answers_within_half_a_second_and_without_torch():
    code = (
        "import sys, time; started = time.process_time()\n"
        "from training.cli import main\n"
        f"main(['memfit', '--config', {DEMO!r}, '--solve', 'batch', '--vram', '10GiB'])\n"
        "print(time.process_time() - started, [n for n in ('torch', 'transformers', 'numpy') if n in sys.modules])"
    )
    best = None
    for _ in range(3):  # its own time on the processor, since the machine may be busy
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
        seconds, loaded = run.stdout.split(maxsplit=1)
        assert loaded.strip() == "[]"
        best = min(best or 9.0, float(seconds))
    assert best < 0.5


def test_bench_compares_times_of_one_run(call, monkeypatch):
    for room in ("tokenizer", "data"):
        monkeypatch.setattr(f"training.{room}.speed._TEXT_BYTES", 1 << 21)
    monkeypatch.setattr("training.engine.loop_speed._STEPS", 1)
    rooms = [word for room in ("memfit", "data", "tokenizer", "loop") for word in ("--room", room)]
    code, document, text = call("bench", *rooms)
    assert code == 0
    assert [ratio["name"] for ratio in document["ratios"] if "datasets" not in ratio["name"]] == [
        "memfit over an empty interpreter", "a replay of 32 layers over 4", "solving for the batch over one estimate",
        "text to records over json.loads", "and near-duplicates too",
        "text to ids on disk over the library's encode_batch_fast",
        "tokenizer training over the library called directly",
        "text to ids over the library's encode, each on one core",
        "a window's batches over its step", "the demo's steps with checkpoints over those without",
    ]  # fmt: skip
    for ratio in document["ratios"]:
        assert ratio["ratio"] == ratio["seconds"] / ratio["base_seconds"] > 0 and ratio["name"] in text


# ---- check and doctor


def states(document: dict) -> dict[str, str]:
    return {one["name"]: one["state"] for one in document["checks"]}


def make_artifacts(data: Path, vocab_size: int = 4096, splits: tuple[str, ...] = ("train", "validation")) -> None:
    """Complete folders of a data set and a tokenizer, as far as a preflight reads them."""
    body = {"name": "stdlib", "hash": "a" * 64, "form": "text", "splits": {split: {} for split in splits}}
    files.write_manifest(data / "training" / "datasets" / "stdlib" / ("a" * 12), "dataset", body, [])
    digest = hashlib.sha256(b"{}").hexdigest()
    folder = data / "training" / "tokenizers" / "stdlib-4k" / files.short(digest)
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    body = {"name": "stdlib-4k", "hash": digest, "vocab_size": vocab_size, "add_bos": True, "pre_tokenizer": "x"}
    files.write_manifest(folder, "tokenizer", body, ["tokenizer.json"])


def test_check_passes_where_everything_is_there(call, own_roots: Path):
    make_artifacts(own_roots)
    code, document, _ = call("check", "--config", DEMO)
    assert code == 0 and document["ready"], document
    assert set(states(document).values()) == {"ok"}


def test_check_refuses_what_training_would(call, own_roots: Path):
    make_artifacts(own_roots, splits=("train",))
    code, document, text = call("check", "--config", DEMO)
    assert code == 2 and states(document)["dataset"] == "fail" and "no validation split" in text


def test_checks_next_command_keeps_the_overrides(call, own_roots: Path):
    make_artifacts(own_roots)
    _, document, _ = call("check", "--config", DEMO, "stop.max_steps=7", "optimizer.lr=1e-3")
    assert document["report"]["rows"]["next"] == f"make train CONFIG={DEMO} ARGS='stop.max_steps=7 optimizer.lr=1e-3'"


def test_check_tells_everything_that_is_wrong_at_once(call, own_roots: Path, monkeypatch):
    make_artifacts(own_roots, vocab_size=5000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1 << 20, "total": 1 << 30})())
    code, document, text = call("check", "--config", DEMO, "data.dataset=gone")
    found = states(document)
    assert code == 2 and not document["ready"]
    assert [name for name, state in found.items() if state == "fail"] == ["dataset", "tokenizer", "disk"]
    assert "5000" in text and "checkpoints" in text


def test_check_names_who_holds_the_machine(call, own_roots: Path):
    from training.core import locks

    make_artifacts(own_roots)
    with locks.hold(paths.roots().cache / "locks" / "machine.lock", "make train CONFIG=other.yaml"):
        _, document, text = call("check", "--config", DEMO)
    assert states(document)["machine"] == "warn" and "make train CONFIG=other.yaml" in text


def test_check_refuses_an_unpinned_base_and_an_invalid_recipe(call, tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_text("name: x\nmethod: full\nmodel: {base: qwen3-8b}\nstop: {max_steps: 1}\n")
    code, document, _ = call("check", "--config", str(path))
    assert code == 2 and states(document)["training"] == "fail" and states(document)["model"] == "ok"
    code, document, _ = call("check", "--config", str(path), "optimizer.lr=fast")
    assert code == 2 and states(document) == {"recipe": "fail"}


def test_doctor_tells_what_is_there_and_what_is_not(call, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("training.calculator.nvml.ask", lambda: nvml.Answer((), None, "no driver"))
    started = time.perf_counter()
    code, document, text = call("doctor")
    assert code == 0 and time.perf_counter() - started < 2
    assert document["docker"] is None and document["gpus"] == [] and "Docker is not installed" in text
    assert "no driver: training runs on the CPU" in text
    assert document["memory"]["total_bytes"] > 1 << 28 and document["packages"]["torch"].startswith("2.")
    assert document["llama_cpp"].startswith("b") and document["cpu"]["usable_cores"] >= 1
    rows = document["report"]["rows"]
    assert "its source not here yet; next: make export-build" in rows["llama.cpp"] and rows["next"] == "make demo"
    assert rows["docker"].startswith("none answers; none is needed") and text.count(rows["cpu"]) == 1
    monkeypatch.setattr(version, "missing", lambda *_, **__: ["torch"])
    folder = source.folder_of(pin.load())
    folder.mkdir(parents=True)
    files.write_json(folder / files.MANIFEST, {})
    rows = call("doctor")[1]["report"]["rows"]
    assert rows["missing"] == "torch" and rows["next"] == "make setup"
    assert "its source cannot be used" in rows["llama.cpp"] and "not here yet" not in rows["llama.cpp"]


@pytest.mark.parametrize(
    ("options", "idle"),
    [(("--solve", "batch", "--sweep", "data.seq_len=64,128"), "--solve"),
     (("--trace", "--sweep", "data.seq_len=64,128"), "--trace"), (("--csv", "cells.csv"), "--csv")],
)  # fmt: skip
def test_an_option_that_would_do_nothing_is_refused(call, options: tuple, idle: str):
    code, document, _ = call("memfit", "--config", DEMO, *options)
    assert code == 2 and document["error"]["what"].startswith(f"{idle} does nothing")


def test_a_stdout_that_is_full_ends_in_one_message():
    command = [sys.executable, "-m", "training", "memfit", "--config", DEMO, "--json"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert ended.returncode == 3 and "stdout cannot be written" in ended.stderr and "Traceback" not in ended.stderr
