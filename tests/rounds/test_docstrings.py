"""The two runs that docs/evaluation.md shows, by its own commands with fewer steps and questions: a base that learns a
task, and a learning rate far too high that the gate refuses.

The exam is too short here to tell, so the loss on the test split is what is looked at.
"""

import json
import os
import re
import subprocess

import pytest

from training.core import paths
from training.llamacpp.server import free_port

PAGE = paths.REPOSITORY / "docs" / "evaluation.md"
SHORTER = {
    "--draw-eval 120": "--draw-eval 12", "--questions 60": "--questions 4 evaluate.records=4",
    "--guard drawn ": "", "--docstrings": "--docstrings --draw 200",
}  # fmt: skip


def shown() -> list[str]:
    """The page's commands on docstrings, in its order."""
    return re.findall(r"^    (make (?:data-prepare|round) .*docstrings.*)$", PAGE.read_text(), flags=re.M)


def test_the_page_shows_the_data_a_good_round_and_a_bad_one():
    targets = [command.split()[1] for command in shown()]
    assert targets == ["data-prepare", "round", "round"] and "optimizer.lr=" in shown()[2]
    assert all(part in " ".join(shown()) for part in SHORTER), "what is made shorter stands in the page"


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2", "real_converter")
def test_a_base_learns_the_task_and_a_bad_run_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRAINYARD_PORT", str(free_port()))
    data, good, bad = (run(command) for command in shown())
    assert data["report"]["exit_code"] == 0
    test = next(one for one in good["verdict"]["comparisons"] if one["role"] == "test")
    assert test["improvement"] > 0 and test["p_value"] <= 0.05, test
    assert (good["report"]["exit_code"], good["verdict"]["verdict"], good["beat"]) == (4, "same", False)
    assert "exam: 4 questions are too few" in " ".join(good["verdict"]["reasons"]), "and so the round says no win"
    by_loss = run(f'make evaluate CHECKPOINT={good["adapter"]} ARGS="--against smollm2-135m-instruct"')
    assert (by_loss["report"]["exit_code"], by_loss["judgements"][0]["verdict"]) == (0, "better")
    assert by_loss["records"][0]["reused"] and by_loss["against"]["reused"], "the round's own measurements"
    assert good["state"] == bad["state"] == "completed" and (good["model"] or good["notes"])
    assert (bad["report"]["exit_code"], bad["verdict"]["verdict"], bad["beat"]) == (4, "same", False)
    assert bad["adapter"].endswith("step_000000"), "no step was better than the untrained model"


def run(command: str) -> dict:
    """Run a command of the page in its short form; its document."""
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    steps = " stop.max_steps=6" if " round " in command and "stop.max_steps" not in command else ""
    command = re.sub(r'ARGS="(.*)"', rf'ARGS="\1{steps} --json"', command)
    done = subprocess.run(["bash", "-c", command], cwd=paths.REPOSITORY, env=os.environ, capture_output=True, text=True)
    assert done.stdout.strip(), done.stderr[-3000:]
    return json.loads(done.stdout)
