"""Promotion and rollback: only a measured win, a history that only grows, a link that no crash can lose."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from tests.export.tiny_checkpoint import train_tokenizer, write_model
from training.cli import main
from training.core import files, paths
from training.core.errors import IntegrityError, MachineError, RunError, UserError
from training.evaluation import kept
from training.evaluation.conditions import Identity
from training.llamacpp import tiny
from training.rounds import champion, history, promotion
from training.runs.folder import RunFolder

QUESTIONS = 60
PAPER = {"kind": "exam", "name": "sums", "sha256": "5" * 64, "num_questions": QUESTIONS, "max_answer_tokens": 8}
GUARD = {**PAPER, "name": "guard", "sha256": "6" * 64}
CONDITIONS = {"runtime": "llama.cpp", "quant_type": "Q8_0", "server": {"ctx_size": 256}}


def make_model(name: str, seed: int, **changes: object) -> Path:
    """A small GGUF with a manifest as an export of a plain folder writes it."""
    path = paths.roots().trained / name / f"{name}-F32.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    tiny.write(path, seed=seed)
    manifest = {
        "schema": 1, "kind": "gguf", "file": path.name, "name": name, **files.file_record(path), "run": None,
        "step": None, "weights_sha256": str(seed) * 64, "recipe_sha256": None, "dataset": None, "quant_type": "F32",
        "tokenizer": {"name": "tiny", "hash": "7" * 64}, "parity": {"max_nats": 0.01}, "fingerprint": {"prompts": []},
    }  # fmt: skip
    files.write_json(path.with_name(f"{name}-F32.manifest.json"), manifest | changes)
    return path


def measured(
    path: Path, right: int, *, role: str = "exam", paper: dict = PAPER, said: str | None = None, **under: object
) -> None:
    """Keep a measurement of a file: so many right answers, the first ones."""
    answers = [
        {"id": str(i), "question": f"{i}?", "reference": str(i), "text": said or str(i), "read": said or str(i),
         "right": i < right}
        for i in range(QUESTIONS)
    ]  # fmt: skip
    collapse = {"collapsed": said is not None, "answer": said or "", "share": 1.0, "reference_share": 0.1}
    score = {"agreement": right / QUESTIONS, "collapse": collapse}
    identity = Identity({"sha256": files.sha256_file(path), "base_sha256": None}, paper, CONDITIONS | under)
    kept.write(identity, {"score": score, "answers": answers}, role, "sums.jsonl")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model that is in service before anything was promoted."""
    path = make_model("old", 1)
    measured(path, 10)
    monkeypatch.setattr("training.serving.control.status", lambda: {"record": {"model": str(path)}})
    monkeypatch.setattr(paths, "dot_env", dict)
    return path


def not_again(*_: object) -> None:
    raise AssertionError("a baseline was measured twice")


def promote(path: Path, **options: object) -> dict:
    return promotion.promote(str(path), not_again, **options)


def test_a_win_is_promoted_and_taken_back(served: Path):
    better = make_model("better", 2)
    measured(better, 40)
    done = promote(better, dry_run=True)
    assert done["entry"] is None and not champion.link().is_symlink() and history.read() == []
    entry = promote(better)["entry"]
    assert champion.link().resolve() == better.resolve() and not os.path.isabs(os.readlink(champion.link()))
    first, second = history.read()
    assert first["kind"] == "first" and first["model"].endswith("/old-F32.gguf") and second == entry
    beaten = entry["beaten"]
    assert beaten["model"] == first["model"]
    assert beaten["by"][0]["improvement"] == pytest.approx(0.5) and beaten["by"][0]["gained"] == 30
    with pytest.raises(UserError, match="the champion already"):
        promote(better)
    best = make_model("best", 3)
    measured(best, 58)
    promote(best)
    assert promotion.rollback()["to"] == entry
    assert champion.link().resolve() == better.resolve()
    assert promotion.rollback()["to"] == first
    assert champion.link().resolve() == served.resolve()
    with pytest.raises(UserError, match="no champion to go back to"):
        promotion.rollback()
    assert [one["kind"] for one in history.read()] == ["first", "promote", "promote", "rollback", "rollback"]


def test_the_first_champion_is_measured_first(served: Path):
    for path in kept.folder().glob("*.json"):
        path.unlink()
    better = make_model("better", 2)
    measured(better, 40)
    asked = []

    def measure(*arguments: object) -> None:
        asked.append(arguments)
        measured(served, 10)

    assert promotion.promote(str(better), measure)["entry"]["number"] == 2
    assert asked == [(served, ["--exam", "sums.jsonl", "--questions", str(QUESTIONS)])]


def test_the_first_champion_is_judged_on_the_exam_and_the_guard_set_of_the_last_measurement(served: Path):
    """An exam from before that is not the contest's is not mixed in, and a guard set is never lost on the way."""
    better = make_model("better", 2)
    guard = {**GUARD, "name": "drawn"}
    for paper, right in (({**PAPER, "sha256": "9" * 64}, 1), (PAPER, 40)):
        measured(better, right, paper=paper)
        time.sleep(0.01)
    measured(better, 50, role="guard", paper=guard)
    asked = []
    with pytest.raises(RunError, match="could not be measured on the same questions"):
        promotion.promote(str(better), lambda *arguments: asked.append(arguments))
    assert asked == [(served, ["--exam", "sums.jsonl", "--questions", str(QUESTIONS), "--guard", "sums.jsonl"])]
    promotion.promote(str(better), lambda *_: measured(served, 50, role="guard", paper=guard))
    assert history.read()[0]["papers"] == {"exam": PAPER, "guard": guard}


def test_no_export_takes_the_place_of_a_champion_or_of_the_one_before_it(
    served: Path, tmp_path: Path, real_converter: Path, capsys: pytest.CaptureFixture
):
    """The link would serve other bytes, and rollback would find them: refused before anything is converted."""
    better, best = make_model("better", 2), make_model("best", 3)
    measured(better, 40)
    promote(better)
    measured(best, 58)
    promote(best)
    folder = write_model(tmp_path / "folder")
    train_tokenizer(folder)
    with pytest.raises(UserError, match="it is the champion") as error:
        champion.require_replaceable(best)
    assert error.value.next_command.endswith("--name best-2")
    for name, kept_file in (("best", best), ("better", better)):
        before = kept_file.read_bytes()
        assert main(["export-gguf", str(folder), "--name", name, "--quant", "F32", "--force"]) == 2
        assert "the file cannot be replaced" in capsys.readouterr().err
        assert kept_file.read_bytes() == before
    champion.require_replaceable(served)
    promotion.rollback()
    with pytest.raises(UserError, match="what rollback returns to"):
        champion.require_replaceable(served)


def test_everything_but_a_win_is_refused(served: Path):
    """T22, R3: unmeasured, a tie, a loss, a collapse, forgotten, other data; nothing is changed by any of them."""
    candidate = make_model("new", 2)
    with pytest.raises(RunError, match="was not measured"):
        promote(candidate)
    for right, words in ((10, "not a win: same"), (11, "not a win: same"), (2, "not a win: worse")):
        measured(candidate, right)
        with pytest.raises(RunError, match=words):
            promote(candidate)
    measured(candidate, 50, said="4")
    with pytest.raises(RunError, match="collapsed"):
        promote(candidate)
    measured(candidate, 50)
    for path, right in ((served, 50), (candidate, 20)):
        measured(path, right, role="guard", paper=GUARD)
    with pytest.raises(RunError, match="forgot"):
        promote(candidate)
    assert history.read() == [] and not champion.link().is_symlink()


def test_each_paper_is_judged_in_the_role_that_the_champion_was_judged_in(served: Path):
    """A contender's exam that was asked for as a guard set since is still an exam, and a guard set decides nothing."""
    better, other = make_model("better", 2), make_model("other", 3)
    for path, right in ((served, 50), (better, 50), (other, 10)):
        measured(path, right, role="guard", paper=GUARD)
    measured(better, 40)
    promote(better)
    measured(other, 58)
    measured(other, 58, role="guard")  # --exam GUARD --guard PAPER: each is now both
    measured(other, 10, paper=GUARD)
    [kept_one] = [one for one in kept.of_model(files.sha256_file(other)) if one["identity"]["paper"] == PAPER]
    assert set(kept_one["asked"]) == {"exam", "guard"}
    with pytest.raises(RunError, match="not a win: forgot"):
        promote(other)
    swapped = make_model("swapped", 4)
    measured(swapped, 58, role="guard")
    measured(swapped, 50, paper=GUARD)
    found = promote(swapped)["judgement"]
    assert {one.role: one.after for one in found.comparisons} == {"exam": 58 / 60, "guard": 50 / 60}


def test_the_first_champion_is_judged_on_what_was_asked_for_last(served: Path):
    """The exam of the last command, and never the same paper as both."""
    better = make_model("better", 2)
    measured(better, 40)
    measured(better, 50, paper=GUARD)
    measured(better, 40, role="guard")
    measured(served, 20, paper=GUARD)
    promote(better)
    assert history.read()[0]["papers"] == {"exam": GUARD, "guard": PAPER}


def test_other_data_than_the_champion_was_judged_on_is_refused(served: Path):
    better, other = make_model("better", 2), make_model("other", 3)
    measured(better, 40)
    promote(better)
    measured(other, 60, paper={**PAPER, "sha256": "8" * 64})
    with pytest.raises(UserError, match="other data than the champion"):
        promote(other)


@pytest.mark.parametrize(
    ("under", "words", "command"),
    [
        ({"quant_type": "Q4_K_M"}, "quant_type: Q4_K_M", "make export-gguf CHECKPOINT=latest ARGS='--quant Q8_0"),
        ({"server": {"ctx_size": 512}}, "server: ctx_size 512", "make evaluate CHECKPOINT=/app/models/trained/other/"),
    ],
)
def test_a_contender_under_other_conditions_is_refused(served: Path, under: dict, words: str, command: str):
    """However well it did; the advice is a command that brings it under the champion's conditions."""
    better, other = make_model("better", 2), make_model("other", 3)
    measured(better, 40)
    promote(better)
    measured(other, 60, **under)
    with pytest.raises(UserError, match="different conditions") as error:
        promote(other)
    assert error.value.found == words and error.value.next_command.startswith(command)
    assert "--allow" not in error.value.next_command and len(history.read()) == 2


def test_a_file_that_is_not_proved_or_not_whole_is_refused(served: Path):
    with pytest.raises(RunError, match="never proved"):
        promote(make_model("unproved", 2, parity=None))
    changed = make_model("changed", 3)
    changed.write_bytes(changed.read_bytes() + b"x")
    with pytest.raises(IntegrityError, match="chain") as error:
        promote(changed)
    assert error.value.where == "GGUF"
    run = RunFolder.create("r", {"name": "r"})
    run.update(status="queued")
    with pytest.raises(UserError, match="has not ended"):
        promote(make_model("early", 4, run=run.id, step=1))
    run.update(status="completed", id="another", recipe_sha256=None, dataset=None)
    with pytest.raises(IntegrityError, match="chain"):
        promote(make_model("broken", 5, run=run.id, step=1))
    with pytest.raises(UserError, match="no such model"):
        promote(paths.roots().trained / "none.gguf")


def test_the_contenders_bytes_are_read_once(served: Path, monkeypatch: pytest.MonkeyPatch):
    better, read, whole = make_model("better", 2), [], files.sha256_file
    measured(better, 40)
    monkeypatch.setattr(files, "sha256_file", lambda path, *more: read.append(path) or whole(path, *more))
    promote(better)
    assert read.count(better) == 1


def test_a_champion_whose_file_is_gone_is_told(served: Path):
    better, best = make_model("better", 2), make_model("best", 3)
    measured(better, 40)
    promote(better)
    measured(best, 60)
    better.rename(better.with_suffix(".away"))
    with pytest.raises(IntegrityError, match="file is gone") as error:
        promote(best)
    assert error.value.next_command == "make rollback"
    served.rename(served.with_suffix(".away"))
    with pytest.raises(IntegrityError, match="file is gone") as error:
        promotion.rollback()
    assert error.value.next_command == "make rollback" and "as a copy may have it" in error.value.expected
    assert champion.link().resolve() == better.resolve(), "nothing was changed"
    served.with_suffix(".away").rename(served)
    promotion.rollback()
    assert champion.link().resolve() == served.resolve()
    served.rename(served.with_suffix(".away"))
    with pytest.raises(IntegrityError, match="file is gone") as error:
        promote(best)
    assert error.value.next_command is None, "there is nobody to roll back to"


def test_a_variable_that_hides_the_link_is_refused_with_its_line(served: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(paths, "dot_env", lambda: {"LLAMA_GPU_MODEL": "/app/models/mine.gguf"})
    for act in (lambda: promote(make_model("better", 2)), promotion.rollback):
        with pytest.raises(UserError, match="would not serve the champion") as error:
            act()
        assert error.value.next_command == "sed -i '/^LLAMA_GPU_MODEL=/d' .env"


def test_nobody_is_promoted_against_nothing(served: Path, monkeypatch: pytest.MonkeyPatch):
    better = make_model("better", 2)
    measured(better, 40)
    monkeypatch.setattr("training.serving.control.status", lambda: {"record": {"model": str(better)}})
    with pytest.raises(UserError, match="has beaten nobody"):
        promote(better)
    monkeypatch.setattr("training.serving.control.status", lambda: {"record": None})
    with pytest.raises(UserError, match="nothing is served"):
        promote(better)


def test_a_changed_history_is_found(served: Path):
    better = make_model("better", 2)
    measured(better, 40)
    promote(better)
    whole = history.path().read_bytes()
    lines = whole.splitlines(keepends=True)
    for damaged in (whole.replace(b'"first"', b'"FIRST"'), lines[1], lines[0] + lines[0] + lines[1]):
        history.path().write_bytes(damaged)
        with pytest.raises(IntegrityError, match="history has been changed"):
            history.read()
    history.path().write_bytes(whole + b'{"number": 3, "cut')
    assert len(history.read()) == 2, "a line that a crash cut short is none"
    assert len(promotion.rollback()["entry"]) and len(history.read()) == 3


def _die_at(point: str, better: Path) -> None:
    """Promote in a process that is killed at one point."""
    whole = getattr(os if point == "replace" else history, point)
    seen = []

    def dying(*arguments: object) -> object:
        seen.append(arguments)
        if point == "replace" and not str(arguments[1]).endswith("champion.gguf"):
            return whole(*arguments)
        return os.kill(os.getpid(), signal.SIGKILL)

    setattr(os if point == "replace" else history, point, dying)
    promotion.promote(str(better), not_again)


@pytest.mark.parametrize(("point", "happened"), [("replace", False), ("append", True)])
def test_a_kill_leaves_the_old_champion_or_the_new_one(served: Path, point: str, happened: bool):
    """Before the link is moved nothing has happened; after it, the next command writes the entry that is missing."""
    better, best = make_model("better", 2), make_model("best", 3)
    measured(better, 40)
    measured(best, 60)
    promote(better)
    child = multiprocessing.get_context("fork").Process(target=_die_at, args=(point, best))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    with champion.changing("looking"):
        assert champion.current()["model"].endswith("/best-F32.gguf" if happened else "/better-F32.gguf")
    assert len(history.read()) == (3 if happened else 2)
    assert not list(paths.roots().serving.glob("*.journal.json"))


def test_two_at_once_do_not_meet(served: Path):
    better = make_model("better", 2)
    measured(better, 40)
    with champion.changing("promote another"), pytest.raises(MachineError, match="the champion is busy"):
        promote(better)


def test_the_commands_say_what_they_did(served: Path, capsys: pytest.CaptureFixture):
    better = make_model("better", 2)
    assert main(["promote", str(better)]) == 4
    measured(better, 40)
    assert main(["promote", str(better), "--dry-run"]) == 0
    assert main(["promote", str(better), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["judgement"]["verdict"] == "better" and document["entry"]["number"] == 2
    with champion.changing("promote another"):
        assert main(["promote", str(better)]) == main(["rollback"]) == 3
    better.rename(better.with_suffix(".away"))
    assert main(["promote", str(make_model("best", 3))]) == 5
    assert main(["rollback"]) == 0
    assert "/old-F32.gguf" in capsys.readouterr().err
    assert main(["rollback"]) == 2
