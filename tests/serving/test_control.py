"""serve-start, serve-stop, serve-status, serve-restore."""

import re
import shutil

import pytest

from tests.llamacpp import tiny_gguf
from tests.serving.room import Room
from training import cli
from training.core import files
from training.core.errors import IntegrityError, MachineError, RunError, UserError
from training.serving import control
from training.serving.service import open_service


def test_a_service_outlives_its_starter_and_is_written_down(room: Room):
    record = room.start()["record"]
    assert record == files.read_json(room.data / "serving" / "test.json")
    assert record["sha256"] == files.sha256_file(room.model("old")) and record["runtime"] == "local"
    assert room.serves() == "old-F16"
    control.stop(room.name)
    assert room.serves() is None and open_service(room.name).runtime.record() is None


def test_starting_the_same_again_restarts_nothing(room: Room):
    first = room.start()
    again = room.start()
    assert not first["reused"] and again["reused"] and again["record"] == first["record"]


def test_another_model_replaces_the_one_in_service(room: Room):
    room.start("old")
    result = room.start("new")
    assert room.serves() == "new-F16" and result["previous"]["record"]["model"].endswith("old-F16.gguf")
    assert open_service(room.name).journal() is None


def test_a_model_that_does_not_come_up_leaves_the_old_one_in_service(room: Room):
    room.start("old")
    tiny_gguf.write(room.model("new"), seed=2, leave_out="output_norm.weight")
    room.rewrite_manifest("new")
    with pytest.raises(RunError, match="ended with status 1"):
        room.start("new")
    assert room.serves() == "old-F16"


def test_a_first_model_that_does_not_come_up_leaves_the_service_stopped(room: Room):
    tiny_gguf.write(room.model("new"), seed=2, leave_out="output_norm.weight")
    room.rewrite_manifest("new")
    with pytest.raises(RunError):
        room.start("new")
    assert open_service(room.name).runtime.record() is None and room.serves() is None


def test_a_file_without_manifest_can_be_served_and_one_with_a_wrong_one_cannot(room: Room):
    room.model("old").with_suffix(".manifest.json").unlink()
    assert room.start("old")["loaded"]["parameters"] == tiny_gguf.parameters()
    shutil.copyfile(room.model("old"), room.model("new"))
    with pytest.raises(IntegrityError, match="sha256"):
        room.start("new")
    assert room.serves() == "old-F16"


def test_two_services_run_side_by_side(room: Room):
    from training.llamacpp.server import free_port

    room.start("old")
    other = free_port()
    try:
        control.start(str(room.model("new")), service="other", port=other)
        assert room.serves() == "old-F16" and control.status("other")["loaded"]["path"].endswith("new-F16.gguf")
    finally:
        control.stop("other")
    assert room.serves() == "old-F16"


@pytest.mark.parametrize("damage", ["", "{", "{}", None])
def test_a_server_whose_record_is_damaged_or_gone_is_stopped_all_the_same(room: Room, damage: str | None):
    room.start()
    path = room.data / "serving" / "test.json"
    path.unlink() if damage is None else path.write_text(damage)
    if damage is not None:
        with pytest.raises(IntegrityError) as caught:
            control.status(room.name)
        assert caught.value.next_command.startswith("make serve-stop SERVICE=test")
    control.stop(room.name)
    assert room.serves() is None and not path.exists()
    assert control.status(room.name)["record"] is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("log_start", None), ("log", []), ("port", "8080"), ("port", 65_536), ("port", -1),
     ("token", 1), ("sha256", 0), ("arguments", {}),
     ("since", None), ("memory_bytes", True)],
)  # fmt: skip
def test_a_record_with_a_part_missing_or_of_another_kind_is_damaged(room: Room, name: str, value: object):
    room.start()
    path = room.data / "serving" / "test.json"
    record = files.read_json(path)
    files.write_json(path, {key: part for key, part in record.items() if key != name} if value is None
                     else record | {name: value})  # fmt: skip
    for refused in (lambda: control.status(room.name), lambda: room.evaluate().raise_failure(), room.start):
        with pytest.raises(IntegrityError, match="not whole") as caught:
            refused()
        assert caught.value.found.startswith(name)
        assert caught.value.next_command.startswith("make serve-stop SERVICE=test")
    control.stop(room.name)
    assert room.serves() is None and not path.exists()


@pytest.mark.parametrize(
    "text",
    ["{", '{"schema": 1}', '{"schema": 2}',
     '{"schema": 2, "runtime": "local", "previous": {}, "new": [], "back": null}',
     '{"schema": 2, "runtime": "local", "new": [{}], "back": null, '
     '"previous": {"running": false, "healthy": false, "record": null, "loaded": null}}',
     '{"schema": 2, "runtime": "local", "new": [], "back": null, '
     '"previous": {"running": true, "healthy": false, "record": null, "loaded": null}}'],
)  # fmt: skip
def test_a_damaged_journal_is_told_and_stopping_ends_it(room: Room, text: str):
    room.start()
    journal = room.service().journal_path
    journal.write_text(text)
    for refused in (lambda: control.restore(room.name), room.start, lambda: control.status(room.name)):
        with pytest.raises(IntegrityError) as caught:
            refused()
        assert caught.value.next_command.startswith("make serve-stop SERVICE=test")
    control.stop(room.name)
    assert room.serves() is None and not journal.exists()


@pytest.mark.parametrize(
    ("runtime", "name", "words"),
    [("local", "llama-cpu", "not of the runtime local"), ("docker", "mine", "not of the runtime docker"),
     ("podman", "mine", "no such runtime")],
)  # fmt: skip
def test_a_service_and_a_runtime_that_contradict_each_other(
    monkeypatch: pytest.MonkeyPatch, runtime: str, name: str, words: str
):
    monkeypatch.setenv("RUNTIME", runtime)
    with pytest.raises(UserError, match=words):
        open_service(name)


def test_without_a_name_the_runtime_decides(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    assert open_service().name == "llama-local" and "runtime local: service llama-local" in capsys.readouterr().err
    monkeypatch.setenv("RUNTIME", "auto")
    monkeypatch.setenv("PATH", "/nowhere")
    assert open_service().name == "llama-local" and "no Docker here" in capsys.readouterr().err
    monkeypatch.setenv("RUNTIME", "docker")
    with pytest.raises(MachineError, match="Docker is not installed"):
        open_service()


def test_the_commands(room: Room, capsys: pytest.CaptureFixture):
    def call(*words: str) -> tuple[int, dict, str]:
        code = cli.main([words[0], *words[1:], "--service", room.name, "--json"])
        out, err = capsys.readouterr()
        return code, files.parse_json(out), err

    code, document, err = call("serve-status")
    assert code == 0 and not document["running"] and "state    stopped" in err
    port = ("--port", str(room.port))
    code, document, err = call("serve-start", str(room.model("old")), *port, "--dry-run")
    assert code == 0 and "nothing was stopped" in err and room.serves() is None
    code, document, err = call("serve-start", "/app/models/trained/old/old-F16.gguf", *port)
    assert code == 0 and document["loaded"]["path"].endswith("old-F16.gguf") and "by its word" in err
    assert re.search("context +256 tokens of the model's 256, .* of memory; --ctx-size takes another number", err), err
    code, document, err = call("serve-status")
    assert code == 0 and document["healthy"] and "state       healthy" in err
    code, document, err = call("serve-restore")
    assert code == 0 and document["restore"] is None and "no swap is unfinished" in err
    code, document, err = call("serve-stop", "--dry-run")
    assert code == 0 and room.serves() == "old-F16"
    code, document, err = call("serve-stop")
    assert code == 0 and "stopped" in err and room.serves() is None


def test_the_status_of_a_server_whose_model_is_not_under_the_models_root(room: Room, capsys: pytest.CaptureFixture):
    room.start()
    record = files.read_json(room.data / "serving" / "test.json")
    control.stop(room.name)
    for model in ("/elsewhere/old-F16.gguf", ".", str(room.model("gone"))):
        files.write_json(room.data / "serving" / "test.json", record | {"model": model})
        assert cli.main(["serve-status", "--service", room.name]) == 4
        assert "make serve-stop SERVICE=test" in capsys.readouterr().err
    files.write_json(room.data / "serving" / "test.json", record)
    assert cli.main(["serve-status", "--service", room.name]) == 4
    assert "make serve-start MODEL=/app/models/trained/old/old-F16.gguf SERVICE=test" in capsys.readouterr().err


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_that_cannot_be_one_is_refused(room: Room, port: int):
    with pytest.raises(UserError, match="not a port"):
        control.start(str(room.model("old")), service=room.name, port=port)
    assert room.evaluate(port=port).document["exit_code"] == 2


def test_two_unfinished_swaps_are_told_with_a_command_for_each(room: Room, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMPOSE_PROJECT_NAME", "yard")
    for key in ("llama-local", "yard.llama-cpu", "other.llama-cpu"):
        files.write_json(room.data / "serving" / f"{key}.journal.json", {})
    with pytest.raises(UserError) as caught:
        control.restore()
    assert caught.value.next_command == (
        "make serve-restore SERVICE=llama-local && make serve-restore SERVICE=llama-cpu"
    )
