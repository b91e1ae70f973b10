"""What goes wrong with a service of a real engine: each with its message and exit code, and the old model served."""

import socket
import struct
import time
from pathlib import Path

import pytest

from tests.llamacpp import tiny_gguf
from tests.serving.room import Room
from tests.serving.test_docker import by_hand, containers
from training import cli
from training.containers import compose, engine, image
from training.core.errors import IntegrityError, MachineError, RunError, UserError
from training.serving import composed, control, prompts

pytestmark = pytest.mark.docker


def test_bad_files_are_refused_before_anything_is_touched(harbour: Room):
    harbour.start()
    before, model = containers(), harbour.model("new")
    manifest, whole, said = model.with_suffix(".manifest.json"), model.read_bytes(), None
    said = manifest.read_bytes()

    def refused(kind: type, words: str, code: int, **changes: object) -> None:
        evaluation = harbour.evaluate(**changes)
        assert isinstance(evaluation.error, kind) and words in str(evaluation.error), str(evaluation.error)
        assert evaluation.document["exit_code"] == code and evaluation.error.next_command
        assert containers() == before and harbour.serves() == "old-F16"
        model.unlink(missing_ok=True)
        model.write_bytes(whole)
        manifest.write_bytes(said)

    model.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(IntegrityError, "sha256", 5)
    manifest.unlink()
    refused(IntegrityError, "no manifest", 5)
    model.write_bytes(whole[: len(whole) // 2])
    harbour.rewrite_manifest("new")
    refused(IntegrityError, "not a whole GGUF", 5)
    model.write_bytes(whole[:16] + struct.pack("<Q", 1 << 40) + whole[24:])
    harbour.rewrite_manifest("new")
    refused(IntegrityError, f"claims {1 << 40} keys", 5)
    model.rename(harbour.data / "elsewhere.gguf")
    model.symlink_to(harbour.data / "elsewhere.gguf")
    refused(UserError, "outside its root", 2)


def test_a_crash_looping_server_is_seen_at_once_with_its_last_lines(harbour: Room):
    harbour.start()
    tiny_gguf.write(harbour.model("new"), seed=2, leave_out="output_norm.weight")
    harbour.rewrite_manifest("new")
    started = time.monotonic()
    evaluation = harbour.evaluate(budget_seconds=180)
    assert time.monotonic() - started < 20
    assert isinstance(evaluation.error, RunError) and evaluation.document["exit_code"] == 4
    assert "ended with status 1" in evaluation.error.what and "output_norm.weight" in evaluation.error.found
    assert evaluation.document["restore"]["proved"] and harbour.serves() == "old-F16"


def other_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A checkout's compose.yaml whose server has another entry; `$$@` are the arguments."""
    text = compose.FILE.read_text()
    entry = f"  llama-cpu:\n    entrypoint: [/bin/bash, -c, {script!r}, serve]\n"
    file = tmp_path / "checkout" / "compose.yaml"
    file.parent.mkdir()
    file.write_text(text.replace("  llama-cpu:\n", entry, 1))
    monkeypatch.setattr(compose, "FILE", file)
    return file


def test_a_server_that_never_gets_healthy(harbour: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = 'case "$$*" in *new-F16*) exec sleep 1000;; *) exec /app/serve "$$@";; esac'
    other_entry(tmp_path, monkeypatch, script)
    harbour.start()
    evaluation = harbour.evaluate(budget_seconds=2.0)
    assert isinstance(evaluation.error, RunError) and evaluation.document["exit_code"] == 4
    assert "not healthy within 2.0 s" in evaluation.error.what
    assert evaluation.document["restore"]["proved"] and harbour.serves() == "old-F16"


def test_a_server_that_answers_and_serves_the_old_file(harbour: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    other_entry(tmp_path, monkeypatch, 'exec /app/serve "$${@//new/old}"')
    harbour.start()
    evaluation = harbour.evaluate()
    assert isinstance(evaluation.error, IntegrityError) and evaluation.document["exit_code"] == 5
    assert "serves another file" in evaluation.error.what and evaluation.error.found.endswith("old-F16.gguf")
    assert evaluation.document["restore"]["proved"] and harbour.serves() == "old-F16"


def test_a_prompt_that_hangs(harbour: Room, monkeypatch: pytest.MonkeyPatch):
    """The server is frozen before the first prompt."""
    harbour.start()
    harbour.smoke.write_text("prompts: [{name: slow, text: x, time_limit_seconds: 1}]")
    ask = prompts.ask
    monkeypatch.setattr(prompts, "ask", lambda *given: engine.run(["pause", *containers()], "freezing") and ask(*given))
    evaluation = harbour.evaluate()
    assert isinstance(evaluation.error, RunError) and evaluation.document["exit_code"] == 4
    assert "nothing in 1 s" in evaluation.document["smoke"][0]["why"]
    assert evaluation.document["restore"]["proved"] and harbour.serves() == "old-F16"


def test_b64_a_container_that_is_not_ours_is_never_touched(harbour: Room):
    name = f"{compose.project()}-llama-cpu-1"
    there = engine.run(["create", "--name", name, "debian:bookworm-slim", "sleep", "9"], "making").strip()
    try:
        for refused in (harbour.start, lambda: harbour.evaluate().raise_failure()):
            with pytest.raises(MachineError, match="not ours to touch") as caught:
                refused()
            assert name in caught.value.what and f"docker rename {name}" in caught.value.next_command
        control.stop(harbour.name)
        assert engine.run(["inspect", "--format", "{{.Id}} {{.State.Status}}", name], "looking").split() == [
            there, "created",
        ]  # fmt: skip
    finally:
        engine.run(["rm", name], "clearing up")


def test_a_container_of_another_checkout_under_our_name_is_never_touched(harbour: Room):
    labels = {compose.LABEL_PROJECT: compose.project(), compose.LABEL_SERVICE: "llama-cpu"}
    labels |= {"com.docker.compose.oneoff": "False", "com.docker.compose.project.working_dir": "/elsewhere"}
    words = [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]
    there = engine.run(["create", *words, "debian:bookworm-slim", "sleep", "9"], "making").strip()
    try:
        for refused in (harbour.start, lambda: control.stop(harbour.name)):
            with pytest.raises(MachineError, match="not ours to touch") as caught:
                refused()
            assert "/elsewhere" in caught.value.found
            assert caught.value.next_command.startswith(f"COMPOSE_PROJECT_NAME={compose.project()}-2 ")
    finally:
        engine.run(["rm", there], "clearing up")


def test_a_port_in_use_is_told_with_its_holder(harbour: Room):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", harbour.port))
        holder.listen()
        evaluation = harbour.evaluate()
        assert isinstance(evaluation.error, MachineError) and evaluation.document["exit_code"] == 3
        assert f"port {harbour.port} is in use" in evaluation.error.what and "process" in evaluation.error.found
    words = ["run", "--detach", "--publish", f"127.0.0.1:{harbour.port}:80", "debian:bookworm-slim", "sleep", "99"]
    there = engine.run(words, "making").strip()
    try:
        evaluation = harbour.evaluate()
        assert "held by the container" in evaluation.error.found and evaluation.document["exit_code"] == 3
    finally:
        engine.run(["rm", "--force", there], "clearing up")
    assert containers() == []


def test_what_could_not_be_put_back_as_it_is_is_not_stopped(
    harbour: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = other_entry(tmp_path, monkeypatch, 'exec /app/serve "$$@"')
    harbour.start()
    before = containers()
    file.write_text(file.read_text().replace("stop_grace_period: 10s", "stop_grace_period: 9s"))
    evaluation = harbour.evaluate()
    assert isinstance(evaluation.error, MachineError) and evaluation.document["exit_code"] == 3
    assert "compose.yaml has changed" in evaluation.error.what and containers() == before
    assert evaluation.error.next_command.startswith("make serve-stop SERVICE=llama-cpu && make serve-start MODEL=/app")


def test_a_file_that_changed_under_a_server_started_by_hand(harbour: Room):
    model = "/app/models/trained/old/old-F16.gguf"
    by_hand("up", "-d", "llama-cpu", LLAMA_CPU_MODEL=model, LLAMA_CPU_PORT=harbour.port)
    harbour.service().state(budget_seconds=20)
    time.sleep(1.1)
    tiny_gguf.write(harbour.model("old"), seed=5)
    evaluation = harbour.evaluate()
    assert isinstance(evaluation.error, IntegrityError) and "could not be put back" in evaluation.error.what
    assert harbour.serves() == "old-F16"


def test_the_service_with_a_gpu_says_what_is_missing(harbour: Room):
    with pytest.raises(MachineError) as caught:
        control.start(str(harbour.model("old")), service="llama-gpu")
    assert caught.value.next_command


@pytest.mark.parametrize(
    ("name", "value"),
    [("PORT", "0"), ("PORT", "abc"), ("PORT", "99999"), ("MEMORY", "xyz"), ("CTX_SIZE", "much"), ("SLOTS", "0")],
)  # fmt: skip
def test_a_setting_that_the_service_cannot_have_is_named(
    harbour: Room, monkeypatch: pytest.MonkeyPatch, name: str, value: str
):
    monkeypatch.setenv(f"LLAMA_CPU_{name}", value)
    with pytest.raises(UserError) as caught:
        control.start(str(harbour.model("old")), service=harbour.name)
    assert caught.value.where == f"LLAMA_CPU_{name}" and caught.value.found == value
    assert containers() == []


@pytest.mark.parametrize("text", ["services: [", "services: {other: {image: a}}"])
def test_a_service_is_stopped_whatever_has_become_of_compose_yaml(
    harbour: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
):
    file = other_entry(tmp_path, monkeypatch, 'exec /app/serve "$$@"')
    harbour.start()
    composed._written.cache_clear()
    file.write_text(text)
    with pytest.raises(RunError) as caught:
        control.status(harbour.name)
    assert caught.value.expected and "make serve-stop SERVICE=llama-cpu" in caught.value.next_command
    control.stop(harbour.name)
    assert containers() == []


def test_a_bare_stop_ends_the_container_that_there_is_though_no_image_is_built_for_the_sources_now(
    harbour: Room, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    harbour.start()
    monkeypatch.setenv("RUNTIME", "auto")
    monkeypatch.setattr(image, "tag", lambda: "no-such-tag")
    assert control.status()["service"] == "llama-cpu" and harbour.serves() == "old-F16"
    assert control.stop()["service"] == "llama-cpu" and containers() == []
    capsys.readouterr()
    assert control.status()["service"] == "llama-local"


def test_two_services_that_there_are_are_both_named(
    harbour: Room, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    harbour.start()
    monkeypatch.setenv("RUNTIME", "auto")
    (harbour.data / "serving" / "llama-local.json").write_text("{}")
    assert control.status()["service"] == "llama-cpu"
    assert "there are llama-cpu and llama-local" in capsys.readouterr().err


def test_a_container_of_ours_that_serves_no_model_of_ours_is_told_and_can_be_stopped(
    harbour: Room, capsys: pytest.CaptureFixture
):
    labels = {compose.LABEL_PROJECT: compose.project(), compose.LABEL_SERVICE: "llama-cpu"}
    labels |= {"com.docker.compose.oneoff": "False"}
    labels |= {"com.docker.compose.project.working_dir": str(compose.FILE.parent)}
    words = [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]
    for command in (["sleep", "9"], ["sleep", "9", "--model", "/elsewhere/a.gguf"]):
        engine.run(["create", "--publish", "127.0.0.1::8080", *words, "debian:bookworm-slim", *command], "making")
        assert cli.main(["serve-status", "--service", harbour.name]) == 4
        assert "make serve-stop SERVICE=llama-cpu" in capsys.readouterr().err
        control.stop(harbour.name)
        assert containers() == []


def test_a_stopped_container_of_another_data_root_is_told(
    harbour: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    harbour.start()
    engine.run(["stop", *containers()], "stopping")
    monkeypatch.setenv("DATA_ROOT", str(tmp_path / "other"))
    assert cli.main(["serve-status", "--service", harbour.name]) == 4
    assert "make serve-stop SERVICE=llama-cpu" in capsys.readouterr().err
