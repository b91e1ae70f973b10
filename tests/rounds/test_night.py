"""A night and the morning after, by make alone: a round that wins is promoted, served and taken back; a bad one is not.

A tiny base, real training, the real converter, and llama.cpp's own server.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.evaluation.conftest import write_exam
from tests.objectives.tiny import make_world
from training.core import paths
from training.llamacpp.server import free_port
from training.recipe import bases
from training.rounds import champion, history


def choice(number: int) -> dict:
    """A question of the chat data as a choice between its answer and letters that no data holds, which are shorter: an
    untrained model takes one of those."""
    right = f"x * {number % 7}" + " + 1" * (number % 3)
    return {"question": f"f{number}", "answer": right, "options": ["y", right, "z"]}


def short(number: int) -> dict:
    """A question whose right answer is the short one: any model takes it whose probabilities are in order."""
    return {"prompt": f"number {number}:", "answer": " no", "options": [" no", " no more of this than that"]}


@pytest.fixture
def night(real_converter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A world with a tiny base, an exam that its data answers and a guard set that it does not."""
    world = make_world(tmp_path, monkeypatch)
    (world / "site").mkdir()
    (world / "site" / "sitecustomize.py").write_text(
        f"import pathlib\nfrom training.recipe import bases\nbases.FILE = pathlib.Path({str(bases.FILE)!r})\n"
    )
    write_exam(world / "exam.jsonl", [choice(number) for number in range(40)])
    write_exam(world / "guard.jsonl", [short(number) for number in range(20)])
    monkeypatch.setenv("PYTHONPATH", f"{world / 'site'}:{paths.REPOSITORY}")
    monkeypatch.setenv("TRAINYARD_PORT", str(free_port()))
    return world


def make(target: str, *arguments: str, **variables: object) -> tuple[int, dict]:
    """Run a target in the repository; the code of its report and its document."""
    given = [f"{name}={value}" for name, value in variables.items()]
    command = ["make", "--no-print-directory", target, *given, f"ARGS={' '.join([*arguments, '--json'])}"]
    done = subprocess.run(command, cwd=paths.REPOSITORY, env=os.environ, capture_output=True, text=True)
    assert done.stdout.strip(), done.stderr[-3000:]
    document = json.loads(done.stdout)
    print(target, document["report"]["verdict"] if "report" in document else document.keys())
    return document["report"]["exit_code"], document


@pytest.mark.slow
def test_a_round_is_promoted_and_taken_back_and_a_bad_one_is_refused(night: Path):
    assert make("export-gguf", "--name", "before", "--quant", "Q8_0", CHECKPOINT="tiny")[0] == 0
    assert make("serve-start", MODEL="/app/models/trained/before/before-Q8_0.gguf")[0] == 0
    try:
        _night(night)
    finally:
        make("serve-stop")


def _night(world: Path) -> None:
    papers = f"--guard {world / 'guard.jsonl'}"
    asked = {"CONFIG": world / "full.yaml", "HOURS": 0.1, "EXAM": world / "exam.jsonl"}
    code, good = make("round", papers, "stop.max_steps=40", "optimizer.lr=1e-2", **asked)
    assert (code, good["verdict"]["verdict"], good["beat"]) == (0, "better", True), good["verdict"]["reasons"]
    assert not champion.link().exists(), "a round promotes nothing"
    if good["served"] is None:  # so tiny a model may fail a smoke prompt, and then its file was not measured
        assert "smoke" in good["notes"][0] and make("promote", MODEL=good["model"])[0] == 4
    measured = make("evaluate", papers, f"--exam {world / 'exam.jsonl'}", CHECKPOINT=good["model"])
    assert measured[1]["records"][0]["exam"]["agreement"] > 0.9
    code, promoted = make("promote", MODEL=good["model"])
    assert (code, promoted["judgement"]["verdict"]) == (0, "better")
    assert {one["role"] for one in promoted["judgement"]["comparisons"]} == {"exam", "guard"}
    assert make("serve-start", MODEL="/app/models/champion.gguf")[0] == 0
    assert make("serve-status")[1]["record"]["sha256"] == promoted["entry"]["sha256_model"]

    code, bad = make("round", papers, "stop.max_steps=4", "optimizer.lr=10", "name=bad", **asked)
    assert code == 4 and bad["verdict"]["verdict"] != "better" and bad["beat"] is False
    make("evaluate", papers, f"--exam {world / 'exam.jsonl'}", CHECKPOINT=bad["model"])
    code, refused = make("promote", MODEL=bad["model"])
    assert code == 4 and "not a win: worse" in json.dumps(refused), refused
    assert (
        f"/{champion.link().resolve().name}" in good["model"]
        and bad["model"] != good["model"]
        and len(history.read()) == 2
    )

    assert make("rollback")[0] == 0 and champion.link().resolve().name == "before-Q8_0.gguf"
    assert [entry["kind"] for entry in history.read()] == ["first", "promote", "rollback"]
    assert make("rollback")[0] == 2, "there is nobody before the first"
