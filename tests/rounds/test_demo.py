"""The round trip in small: whole, killed and done again, and done a second time."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from training.core import paths
from training.llamacpp.server import free_port
from training.rounds.steps import StepFailed, run_step

SHORT = ["stop.max_steps=12", "evaluate.every_steps=6", "evaluate.records=4"]


def demo(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "training", "demo", *SHORT, "--port", str(free_port()), "--json", *arguments]
    return subprocess.Popen(
        command, cwd=paths.REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def children_of(root: Path) -> list[psutil.Process]:
    """Processes of ours that still run in this data root."""
    found = []
    for process in psutil.process_iter(["environ", "cmdline"]):
        environment = process.info["environ"] or {}
        if environment.get("DATA_ROOT") == str(root) and process.pid != os.getpid():
            found.append(process)
    return found


def test_a_step_that_fails_ends_the_round_with_its_own_code():
    with pytest.raises(StepFailed) as failure:
        run_step("1. Nothing", ["runs", "no-such-run"])
    assert failure.value.exit_code == 2 and "no such run" in str(failure.value)


@pytest.mark.parametrize("way", ["exec sleep 30", "trap 'exit 0' INT; sleep 30 & wait"], ids=["dies", "ends well"])
def test_a_step_that_is_interrupted_is_no_failure_whatever_it_makes_of_the_signal(tmp_path, monkeypatch, way):
    """In its first moments a step dies of the signal itself; in its last ones it may still end with 0."""
    step = tmp_path / "step"
    step.write_text(f"#!/bin/sh\n{way}\n")
    step.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(step))
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt, match="run the same command again"):
        run_step("1. Interrupted", ["runs"])
    timer.join()


@pytest.mark.slow
def test_the_demo_ends_well_however_often_it_is_killed(real_converter: Path):
    """SIGINT and SIGKILL at random moments; the next demo goes on, and at the end nothing is left running."""
    chance = random.Random(11)
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
        child = demo()
        try:
            child.communicate(timeout=4 + 16 * chance.random())
        except subprocess.TimeoutExpired:
            child.send_signal(number)
            child.communicate(timeout=120)
            assert child.returncode in (-signal.SIGKILL, 130)
    child = demo()
    output, errors = child.communicate(timeout=600)
    assert child.returncode == 0, errors[-3000:].decode()
    figures = json.loads(output)
    assert figures["bits_per_byte"]["after"] < figures["bits_per_byte"]["before"]
    assert figures["restore"]["state"] == "running" and figures["restore"]["proved"]
    assert figures["serves"]["path"].endswith("demo-step0-Q8_0.gguf")
    assert figures["parity"]["F16"]["max_nats"] <= 0.05 and figures["parity"]["F16"]["positions"] >= 100
    assert all(prompt["passed"] for prompt in figures["smoke"])
    deadline = time.monotonic() + 10
    while children_of(real_converter) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert children_of(real_converter) == []

    child = demo()
    output, errors = child.communicate(timeout=600)
    assert child.returncode == 0, errors[-3000:].decode()
    again = json.loads(output)
    assert again["chain"] == figures["chain"]
    assert {"data", "tokenizer", "train", "evaluate", "export", "export-before"} <= set(again["reused"])
