"""The docker runtime on a real engine: what is swapped, and that the old model is back every time."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.serving.room import Room
from tests.serving.storm import rounds
from tests.serving.test_interrupted import cut_off
from training import cli
from training.containers import compose, engine
from training.core import files
from training.core.errors import MachineError, RestoreError, RunError
from training.serving import control, prompts

pytestmark = pytest.mark.docker
SAME = ("image", "config_hash", "command", "environment", "variables")


def containers() -> list[str]:
    """The ids of all containers of this test's project."""
    label = f"label={compose.LABEL_PROJECT}={compose.project()}"
    return engine.run(["ps", "--all", "--quiet", "--no-trunc", "--filter", label], "listing").split()


def by_hand(*words: str, **variables: object) -> None:
    """Compose as a person would call it."""
    engine.run(compose.arguments(*words), "compose", environment=compose.environment(**variables))


def test_a_model_is_swapped_in_checked_and_the_old_one_put_back(harbour: Room):
    harbour.start()
    before = control.status(harbour.name)
    evaluation = harbour.evaluate()
    document = evaluation.document
    assert evaluation.error is None, str(evaluation.error)
    assert document["loaded"]["path"] == "/app/models/trained/new/new-F16.gguf"
    assert document["fingerprint"]["top1_agree"] == 4 and document["prompt_ids"]["compared"]
    assert document["restore"]["proved"] and harbour.serves() == "old-F16"
    after = control.status(harbour.name)
    assert {part: after["record"][part] for part in SAME} == {part: before["record"][part] for part in SAME}
    assert after["record"]["sha256"] == before["record"]["sha256"] and after["loaded"] == before["loaded"]
    assert document["seconds"]["overhead"] < 5
    assert document["server"]["image"] == before["record"]["image"]


def test_a_service_started_by_hand_is_put_back_with_its_own_variables(harbour: Room):
    model = "/app/models/trained/old/old-F16.gguf"
    own = {
        "LLAMA_CPU_MODEL": model,
        "LLAMA_CPU_PORT": harbour.port,
        "LLAMA_CPU_CTX_SIZE": 512,
        "LLAMA_CPU_SLOTS": 2,
        "LLAMA_CPU_MEMORY": "2g",
    }
    by_hand("up", "-d", "llama-cpu", **own)
    before = harbour.service().state(budget_seconds=20)["record"]
    assert before["variables"]["LLAMA_CPU_CTX_SIZE"] == "512" and before["sha256"] is None
    evaluation = harbour.evaluate(port=None)
    assert evaluation.error is None, str(evaluation.error)
    arguments = evaluation.document["server"]["arguments"]
    assert (arguments["ctx-size"], arguments["parallel"]) == ("512", "1") and before["arguments"]["parallel"] == "2"
    after = control.status(harbour.name)["record"]
    assert {part: after[part] for part in SAME} == {part: before[part] for part in SAME}
    assert harbour.serves() == "old-F16"


def test_an_image_built_anew_does_not_change_what_comes_back(
    harbour: Room, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The tag moves while the old model serves, and again while the new one does; both containers keep their image."""
    harbour.start()
    before = control.status(harbour.name)["record"]
    name, first = before["image_name"], before["image"]
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "Dockerfile").write_text(f"FROM {name}\nLABEL a=b\n")
    engine.run(["build", "--quiet", "--tag", "trainyard-test-anew", str(tmp_path / "build")], "building")
    anew = engine.inspect("trainyard-test-anew")["Id"]
    ask = prompts.ask
    back = lambda *given: engine.run(["tag", "debian:bookworm-slim", name], "moving") or ask(*given)  # noqa: E731
    monkeypatch.setattr(prompts, "ask", back)
    try:
        engine.run(["tag", anew, name], "moving")
        evaluation = harbour.evaluate()
        assert evaluation.error is None, str(evaluation.error)
        assert evaluation.document["server"]["image"] == anew
        after = control.status(harbour.name)["record"]
        assert {part: after[part] for part in SAME} == {part: before[part] for part in SAME}
        assert engine.inspect(name)["Id"] == engine.inspect("debian:bookworm-slim")["Id"]
    finally:
        engine.run(["tag", first, name], "moving back")
        engine.run(["rmi", "trainyard-test-anew"], "clearing up")


def test_a_stopped_leftover_of_ours_is_replaced_and_a_stopped_service_is_stopped_again(harbour: Room):
    assert harbour.evaluate().document["restore"]["state"] == "stopped"
    assert containers() == []
    harbour.start()
    engine.run(["stop", *containers()], "stopping")
    evaluation = harbour.evaluate()
    assert evaluation.error is None and evaluation.document["restore"]["state"] == "stopped"
    assert harbour.serves() is None and len(containers()) == 1
    engine.run(["start", *containers()], "starting")
    state = harbour.service().state(budget_seconds=20)
    assert state["loaded"]["path"].endswith("old-F16.gguf")


def test_keep_serving_and_the_commands(harbour: Room, capsys: pytest.CaptureFixture):
    def call(*words: str) -> tuple[int, dict, str]:
        code = cli.main([*words, "--service", harbour.name, "--json"])
        out, err = capsys.readouterr()
        return code, files.parse_json(out), err

    code, document, err = call("serve-status")
    assert code == 0 and "runtime docker: service llama-cpu" in err.splitlines()[0]
    place = ["--port", str(harbour.port)]
    assert call("serve-start", str(harbour.model("old")), *place)[0] == 0
    assert call("serve-start", str(harbour.model("old")), *place)[1]["reused"]
    smoke = ["--smoke", str(harbour.smoke)]
    code, document, err = call("serve-eval", "/app/models/trained/new/new-F16.gguf", "--keep-serving", *smoke)
    assert code == 0 and document["restore"]["state"] == "kept" and harbour.serves() == "new-F16"
    code, document, err = call("serve-restore")
    assert code == 0 and "no swap is unfinished" in err
    code, document, err = call("serve-stop")
    assert code == 0 and containers() == [] and harbour.serves() is None


def test_two_models_are_compared_in_one_report(harbour: Room):
    harbour.start("old")
    evaluation = harbour.evaluate("new", compare=str(harbour.model("old")))
    document = evaluation.document
    assert evaluation.error is None, str(evaluation.error)
    assert [part["loaded"]["path"][-12:] for part in (document, document["other"])] == ["new-F16.gguf", "old-F16.gguf"]
    assert document["server"]["arguments"] == document["other"]["server"]["arguments"]
    assert [each["name"] for each in document["other"]["smoke"]] == ["text", "chat"]
    assert harbour.serves() == "old-F16" and len(containers()) == 1


def test_two_checkouts_side_by_side_both_work(harbour: Room, monkeypatch: pytest.MonkeyPatch):
    from training.llamacpp.server import free_port

    first, other = compose.project(), f"{compose.project()}-b"
    harbour.start("old")
    second = Room(harbour.data, free_port(), harbour.reports, harbour.smoke, harbour.name)
    monkeypatch.setenv("COMPOSE_PROJECT_NAME", other)
    try:
        second.start("new")
        assert harbour.serves() == "old-F16" and second.serves() == "new-F16"
        assert second.evaluate("old").error is None and second.serves() == "new-F16"
    finally:
        control.stop(second.name)
        engine.run(["network", "rm", f"{other}_default"], "clearing up")
    monkeypatch.setenv("COMPOSE_PROJECT_NAME", first)
    assert harbour.serves() == "old-F16" and second.serves() is None


def test_a_failed_restore_names_both_failures_and_a_command_that_works(harbour: Room, monkeypatch: pytest.MonkeyPatch):
    harbour.start()
    hidden = harbour.data / "hidden.gguf"
    monkeypatch.setattr(prompts, "ask", lambda *_: harbour.model("old").rename(hidden) and _refuse())
    evaluation = harbour.evaluate()
    error = evaluation.error
    assert isinstance(error, RestoreError) and evaluation.document["exit_code"] == 6
    assert "the prompt refused" in error.found and "before it was healthy" in error.found
    assert error.next_command == "make serve-restore SERVICE=llama-cpu"
    command = error.expected.partition("by hand: ")[2]
    hidden.rename(harbour.model("old"))
    subprocess.run(["bash", "-c", command], check=True, capture_output=True, cwd="/")
    assert harbour.service().state(budget_seconds=20)["loaded"]["path"].endswith("old-F16.gguf")
    assert control.status(harbour.name)["unfinished"]
    assert control.restore()["restore"]["proved"] and harbour.serves() == "old-F16"


def _refuse() -> dict:
    raise RunError("the prompt refused")


def test_an_engine_that_goes_away_half_way(harbour: Room, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The engine is reached through a socket that is closed while the new model is asked."""
    harbour.start()
    way = tmp_path / "engine.sock"
    relay = _relay(way)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{way}")
    with monkeypatch.context() as patch:
        patch.setattr(prompts, "ask", lambda *_: (relay.kill(), relay.wait(), way.unlink()) and _refuse())
        evaluation = harbour.evaluate()
    assert isinstance(evaluation.error, RestoreError) and evaluation.document["exit_code"] == 6
    assert "engine does not answer" in evaluation.error.found and "the prompt refused" in evaluation.error.found
    assert harbour.serves() == "new-F16"
    with pytest.raises(MachineError, match="engine does not answer"):
        control.status(harbour.name)
    monkeypatch.delenv("DOCKER_HOST")
    assert control.restore(harbour.name)["restore"]["proved"] and harbour.serves() == "old-F16"


_RELAY = """
import socket, sys, threading
server = socket.socket(socket.AF_UNIX); server.bind(sys.argv[1]); server.listen(); print("on", flush=True)
def pump(a, b):
    while data := a.recv(65536): b.sendall(data)
    b.shutdown(socket.SHUT_WR)
while True:
    near = server.accept()[0]; far = socket.socket(socket.AF_UNIX); far.connect("/var/run/docker.sock")
    for pair in ((near, far), (far, near)): threading.Thread(target=pump, args=pair, daemon=True).start()
"""


def _relay(way: Path) -> subprocess.Popen:
    import sys

    child = subprocess.Popen([sys.executable, "-c", _RELAY, str(way)], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"on\n"
    return child


def test_after_signals_at_random_moments_the_old_model_is_served(harbour: Room):
    """TRAINYARD_SWAPS=100 for the long version."""
    count = int(os.environ.get("TRAINYARD_SWAPS", "6"))
    rounds(harbour, seed=3, count=count, longest_seconds=4.0, num_servers=lambda: len(containers()))


def test_a_container_that_is_not_made_as_the_old_one_is_never_taken_for_it(
    harbour: Room, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """compose.yaml changes while a swap is unfinished: every restore fails, until it is as it was."""
    file = tmp_path / "checkout" / "compose.yaml"
    file.parent.mkdir()
    written = compose.FILE.read_text()
    file.write_text(written)
    monkeypatch.setattr(compose, "FILE", file)
    harbour.start()
    before = control.status(harbour.name)["record"]
    cut_off(harbour, monkeypatch, prompts, "ask", after=False)
    file.write_text(written.replace("pids_limit: 4096", "pids_limit: 2048"))
    for _ in range(2):
        with pytest.raises(RestoreError, match="configuration is not the one") as caught:
            control.restore(harbour.name)
        assert caught.value.exit_code == 6 and harbour.service().journal() is not None
    file.write_text(written)
    assert control.restore(harbour.name)["restore"]["proved"]
    after = control.status(harbour.name)["record"]
    assert {part: after[part] for part in SAME} == {part: before[part] for part in SAME}
