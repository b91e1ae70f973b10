"""serve-eval on real servers: what it reports, what it refuses, and that the old model is back every time."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.llamacpp import tiny_gguf
from tests.serving.room import Room
from training import cli
from training.core import files, locks, paths
from training.core.errors import IntegrityError, MachineError, RestoreError, RunError, UserError
from training.llamacpp.client import Client
from training.llamacpp.server import ServerProcess
from training.serving import control, prompts
from training.serving.local import LocalRuntime
from training.serving.service import open_service
from training.serving.settings import service_command


def test_a_model_is_swapped_in_checked_and_the_old_one_put_back(room: Room):
    room.start()
    before = control.status(room.name)
    started = time.monotonic()
    evaluation = room.evaluate()
    document = evaluation.document
    assert time.monotonic() - started - document["seconds"]["health_wait"] < 5
    assert evaluation.error is None and document["verdict"] == "PASS"
    assert document == files.read_json(evaluation.path)
    assert evaluation.path.name.endswith("-new-F16.json") and evaluation.path.parent == room.reports
    assert document["model"]["quant_type"] == "F16" and document["manifest"]["sha256_matches"]
    assert document["loaded"]["path"].endswith("/new-F16.gguf")
    assert document["loaded"]["parameters"] == tiny_gguf.parameters()
    assert document["fingerprint"]["max_nats"] < 1e-4 and document["fingerprint"]["top1_agree"] == 4
    assert document["prompt_ids"]["compared"] and document["prompt_ids"]["prompts"][0]["num_tokens"] == 1 + len(
        "hello 12"
    )
    assert [(each["name"], each["passed"], each["completion_tokens"]) for each in document["smoke"]] == [
        ("text", True, 4), ("chat", True, 4),
    ]  # fmt: skip
    assert document["restore"]["proved"] and document["restore"]["loaded"]["path"].endswith("/old-F16.gguf")
    assert room.serves() == "old-F16" and control.status(room.name)["loaded"] == before["loaded"]
    assert open_service(room.name).journal() is None


def test_keep_serving_leaves_the_new_one_and_says_so(room: Room):
    room.start()
    evaluation = room.evaluate(keep_serving=True)
    assert evaluation.document["restore"]["state"] == "kept" and room.serves() == "new-F16"
    assert control.status(room.name)["record"]["model"] == str(room.model("new").resolve())


def test_what_failed_is_not_kept(room: Room):
    room.start()
    room.smoke.write_text("prompts: [{name: a, text: x, max_tokens: 3, expect: {contains: nowhere to be found}}]")
    evaluation = room.evaluate(keep_serving=True)
    assert isinstance(evaluation.error, RunError) and room.serves() == "old-F16"


def test_a_stopped_service_is_stopped_again(room: Room):
    evaluation = room.evaluate()
    assert evaluation.error is None and evaluation.document["restore"]["state"] == "stopped"
    assert room.serves() is None and control.status(room.name)["record"] is None


def test_a_dry_run_changes_nothing(room: Room):
    record = room.start()["record"]
    evaluation = room.evaluate(dry_run=True)
    assert evaluation.error is None and evaluation.path is None and not room.reports.exists()
    assert control.status(room.name)["record"] == record and room.serves() == "old-F16"


def test_changed_bytes_are_refused_before_anything_is_stopped(room: Room):
    record = room.start()["record"]
    data = bytearray(room.model("new").read_bytes())
    data[-5] ^= 1
    room.model("new").write_bytes(data)
    evaluation = room.evaluate()
    assert isinstance(evaluation.error, IntegrityError) and "sha256" in evaluation.error.what
    assert files.read_json(evaluation.path)["exit_code"] == 5
    assert control.status(room.name)["record"] == record


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ("no manifest", IntegrityError, "no manifest"),
        ("quant type", IntegrityError, "quant type"),
        ("no fingerprint", IntegrityError, "the manifest is not whole"),
        ("cut in half", IntegrityError, "not a whole GGUF"),
        ("not there", UserError, "no such model file"),
        ("a folder", UserError, "no such model file"),
        ("outside", UserError, "outside its root"),
        ("smoke", UserError, "no such smoke file"),
        ("service", UserError, "not a service's name"),
        ("port", UserError, "not a port"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(room: Room, change: str, kind: type, words: str):
    model, request = room.model("new"), {}
    manifest = model.with_suffix(".manifest.json")
    if change == "no manifest":
        manifest.unlink()
    elif change == "quant type":
        room.rewrite_manifest("new", quant_type="Q8_0")
    elif change == "no fingerprint":
        files.write_json(manifest, {key: v for key, v in files.read_json(manifest).items() if key != "fingerprint"})
    elif change == "cut in half":
        model.write_bytes(model.read_bytes()[: model.stat().st_size // 2])
        room.rewrite_manifest("new")
    elif change == "not there":
        model.unlink()
    elif change == "a folder":
        model.unlink()
        model.mkdir()
    elif change == "outside":
        moved = model.rename(room.data / "elsewhere.gguf")
        model.symlink_to(moved)
    elif change == "smoke":
        request = {"smoke": room.data / "none.yaml"}
    elif change == "service":
        request = {"service": "../x"}
    elif change == "port":
        request = {"port": 70_000}
    evaluation = room.evaluate(**request)
    assert isinstance(evaluation.error, kind) and words in evaluation.error.what
    assert files.read_json(evaluation.path)["verdict"] == "FAIL"


def test_a_server_that_dies_while_loading_is_seen_at_once_and_the_old_model_is_back(room: Room):
    room.start()
    tiny_gguf.write(room.model("new"), seed=2, leave_out="output_norm.weight")
    room.rewrite_manifest("new")
    started = time.monotonic()
    evaluation = room.evaluate(budget_seconds=60)
    assert time.monotonic() - started < 6
    assert isinstance(evaluation.error, RunError)
    assert "ended with status 1" in str(evaluation.error) and "output_norm.weight" in str(evaluation.error)
    assert room.serves() == "old-F16" and evaluation.document["restore"]["proved"]


def test_a_wrong_file_behind_the_name_is_found_by_its_fingerprint(room: Room, monkeypatch: pytest.MonkeyPatch):
    """The server is given other weights of the same shape under the right path."""
    room.start()
    start = LocalRuntime.start

    def start_the_old_bytes(self: LocalRuntime, record: dict) -> dict:
        if record["model"].endswith("new-F16.gguf"):
            before = room.model("new").stat()
            room.model("new").write_bytes(room.model("old").read_bytes())
            import os

            os.utime(room.model("new"), ns=(before.st_atime_ns, before.st_mtime_ns))
        return start(self, record)

    monkeypatch.setattr(LocalRuntime, "start", start_the_old_bytes)
    evaluation = room.evaluate()
    assert isinstance(evaluation.error, IntegrityError) and "fingerprint" in evaluation.error.what
    assert room.serves() == "old-F16"


def test_a_file_that_changes_before_it_is_loaded_is_found(room: Room, monkeypatch: pytest.MonkeyPatch):
    room.start()
    start = LocalRuntime.start

    def replace_then_start(self: LocalRuntime, record: dict) -> dict:
        if record["model"].endswith("new-F16.gguf"):
            tiny_gguf.write(room.model("new"), seed=9)
        return start(self, record)

    monkeypatch.setattr(LocalRuntime, "start", replace_then_start)
    evaluation = room.evaluate()
    assert isinstance(evaluation.error, IntegrityError) and "changed between" in evaluation.error.what
    assert room.serves() == "old-F16"


def test_b68_prompt_ids_that_differ_are_told_with_the_first_position(room: Room):
    """The file adds no BOS, training did."""
    room.start()
    data = room.model("new").read_bytes()
    key = b"tokenizer.ggml.add_bos_token" + (7).to_bytes(4, "little")
    place = data.index(key) + len(key)
    assert data[place] == 1
    room.model("new").write_bytes(data[:place] + b"\0" + data[place + 1 :])
    room.rewrite_manifest("new")
    evaluation = room.evaluate()
    assert isinstance(evaluation.error, RunError) and "'text'" in evaluation.error.what
    assert "from position 0 on" in evaluation.error.what and evaluation.document["smoke"] == []
    assert room.serves() == "old-F16"


TEMPLATE = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>answer\n"
)


@pytest.mark.parametrize(("served", "position"), [(TEMPLATE, None), (TEMPLATE.replace("\n{{", "\n\n{{"), 7)])
def test_b68_the_server_renders_a_conversation_as_training_did(room: Room, served: str, position: int | None):
    """The second server has one newline more: seven ids are equal, BOS to the first newline."""
    tiny_gguf.write(room.model("new"), seed=2, template=served)
    room.rewrite_manifest("new", chat_template=TEMPLATE)
    evaluation = room.evaluate()
    if position is None:
        assert evaluation.error is None, str(evaluation.error)
        return
    assert isinstance(evaluation.error, RunError) and f"from position {position} on" in evaluation.error.what
    assert "'chat'" in evaluation.error.what and "hi" in evaluation.error.expected
    assert evaluation.document["smoke"] == []


def test_different_quant_types_are_compared_only_if_told(room: Room):
    room.start()
    data, key = room.model("new").read_bytes(), b"general.file_type" + (4).to_bytes(4, "little")
    place = data.index(key) + len(key)
    room.model("new").write_bytes(data[:place] + (7).to_bytes(4, "little") + data[place + 4 :])
    room.rewrite_manifest("new", quant_type="Q8_0")
    evaluation = room.evaluate(compare=str(room.model("old")))
    assert isinstance(evaluation.error, UserError) and "new-F16.gguf is Q8_0" in evaluation.error.found
    assert room.serves() == "old-F16"
    evaluation = room.evaluate(compare=str(room.model("old")), any_quant=True)
    assert evaluation.error is None, str(evaluation.error)
    assert evaluation.document["other"]["model"]["quant_type"] == "F16" and room.serves() == "old-F16"
    assert isinstance(room.evaluate(compare=str(room.model("old")), keep_serving=True).error, UserError)


def test_a_tokenizer_that_is_not_here_is_said(room: Room):
    import shutil

    shutil.rmtree(room.data / "training" / "tokenizers")
    evaluation = room.evaluate()
    assert evaluation.error is None and not evaluation.document["prompt_ids"]["compared"]
    assert "not on this machine" in evaluation.document["prompt_ids"]["why"]


def test_a_prompt_that_hangs_does_not_pass_and_the_old_model_is_back(room: Room):
    room.start()
    room.smoke.write_text(
        "prompts: [{name: slow, text: x, max_tokens: 250, time_limit_seconds: 0.001}, {name: b, text: y}]"
    )
    evaluation = room.evaluate()
    assert isinstance(evaluation.error, RunError) and "1 of 2 smoke prompts" in evaluation.error.what
    assert "0.001 s" in evaluation.document["smoke"][0]["why"] and evaluation.document["smoke"][1]["passed"]
    assert room.serves() == "old-F16"


def test_a_port_in_use_is_refused_with_its_holder(room: Room):
    with ServerProcess.start(room.model("old"), port=room.port, log=room.data / "log", ctx_size=256) as other:
        other.wait_healthy(20)
        evaluation = room.evaluate()
        assert isinstance(evaluation.error, MachineError) and f"process {other.identity['pid']}" in str(
            evaluation.error
        )
        assert other.is_running()


def test_a_training_on_this_machine_is_named(room: Room):
    lock = paths.roots().cache / "locks" / "machine.lock"
    code = (
        "import sys, time; from pathlib import Path; from training.core import locks\n"
        "with locks.hold(Path(sys.argv[1]), 'train recipes/x.yaml'): print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, cwd=paths.REPOSITORY)
    try:
        assert child.stdout.readline() == b"held\n"
        evaluation = room.evaluate()
        assert isinstance(evaluation.error, MachineError) and "train recipes/x.yaml" in str(evaluation.error)
    finally:
        child.kill()
        child.wait()


def test_a_second_evaluation_waits_and_then_names_the_holder(room: Room, monkeypatch: pytest.MonkeyPatch):
    from training.serving import service

    monkeypatch.setattr(service, "_LOCK_WAIT_SECONDS", 0.3)
    with locks.hold(paths.roots().serving / "test.lock", "serve-eval other-Q8_0.gguf"):
        evaluation = room.evaluate()
    assert isinstance(evaluation.error, MachineError) and "serve-eval other-Q8_0.gguf" in str(evaluation.error)


def test_a_model_in_service_that_could_not_come_back_is_not_stopped(room: Room):
    room.start()
    tiny_gguf.write(room.model("old"), seed=77)
    evaluation = room.evaluate()
    assert isinstance(evaluation.error, IntegrityError) and "could not be put back" in evaluation.error.what
    assert room.serves() == "old-F16"


def test_a_failed_restore_names_both_failures_and_the_command(room: Room, monkeypatch: pytest.MonkeyPatch):
    """The old model's file vanishes while the new one is evaluated, which fails by itself too."""
    room.start()
    hidden = room.data / "hidden.gguf"
    monkeypatch.setattr(prompts, "ask", lambda *_: room.model("old").rename(hidden) and _refuse())
    evaluation = room.evaluate()
    assert isinstance(evaluation.error, RestoreError) and evaluation.document["exit_code"] == 6
    assert "the prompt refused" in str(evaluation.error) and "old-F16.gguf" in str(evaluation.error)
    assert evaluation.error.next_command == "make serve-restore SERVICE=test"
    assert evaluation.document["restore"] == {"state": "failed", "proved": False}
    hidden.rename(room.model("old"))
    assert control.status(room.name)["unfinished"]
    assert control.restore(room.name)["restore"]["proved"] and room.serves() == "old-F16"


def _refuse() -> dict:
    raise RunError("the prompt refused")


def test_a_defect_of_the_program_also_puts_the_old_model_back(room: Room, monkeypatch: pytest.MonkeyPatch):
    room.start()
    monkeypatch.setattr(prompts, "ask", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        room.evaluate()
    assert room.serves() == "old-F16"
    assert files.read_json(next(room.reports.iterdir()))["error"]["kind"] == "ZeroDivisionError"


def test_a_full_disk_does_not_keep_the_old_model_from_coming_back(room: Room, monkeypatch: pytest.MonkeyPatch):
    room.start()
    write, journal = files.write_json, open_service(room.name).journal_path

    def write_only_the_journal(target: Path, value: object) -> None:
        if target != journal:
            raise MachineError("the disk is full", where=target)
        write(target, value)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_json", write_only_the_journal)
        evaluation = room.evaluate()
    assert isinstance(evaluation.error, RestoreError) and evaluation.path is None
    assert room.serves() == "old-F16"
    assert control.restore(room.name)["restore"]["restarted"] is False


def test_the_command_prints_one_document_and_the_rows(room: Room, capsys: pytest.CaptureFixture):
    room.start()
    words = ["--service", room.name, "--smoke", str(room.smoke), "--json"]
    assert cli.main(["serve-eval", "/app/models/trained/new/new-F16.gguf", *words]) == 0
    out, err = capsys.readouterr()
    assert files.parse_json(out)["restore"]["proved"]
    for row in ("previous     $DATA_ROOT/models/trained/old/old-F16.gguf", "2 of 2 passed", "equal in all 2 prompts",
                "restored     yes", "verdict      PASS (exit 0)"):  # fmt: skip
        assert row in err
    (room.model("new")).with_suffix(".manifest.json").unlink()
    assert cli.main(["serve-eval", str(room.model("new")), *words]) == 5
    out, err = capsys.readouterr()
    assert files.parse_json(out)["error"]["kind"] == "IntegrityError" and "FAIL (exit 5)" in err


def test_the_fingerprint_check_can_fail(room: Room):
    from training.serving import checks

    room.start()
    client = Client(f"http://127.0.0.1:{room.port}")
    right = files.read_json(room.model("old").with_suffix(".manifest.json"))["fingerprint"]
    assert checks.compare_fingerprint(client, right)["max_nats"] < 1e-4
    right["prompts"][2]["top"][4][1] += 0.2
    with pytest.raises(IntegrityError, match="prompt 3"):
        checks.compare_fingerprint(client, right)


@pytest.mark.parametrize("service", ["llama-local", "llama-cpu"])
def test_a_printed_command_always_names_its_service(service: str):
    assert service_command("serve-restore", service) == f"make serve-restore SERVICE={service}"


def test_the_commands_printed_after_an_evaluation_name_the_service(room: Room, capsys: pytest.CaptureFixture):
    def printed(*more: str) -> str:
        words = ("--service", room.name, "--port", str(room.port), "--smoke", str(room.smoke), *more)
        assert cli.main(["serve-eval", str(room.model("new")), *words]) == 0
        return capsys.readouterr().err

    model = "/app/models/trained/new/new-F16.gguf"
    assert f"make serve-eval MODEL={model} SERVICE=test\n" in printed("--dry-run")
    kept = printed("--dry-run", "--keep-serving")
    assert f"make serve-eval MODEL={model} SERVICE=test ARGS=--keep-serving\n" in kept and "leave it" in kept
    assert f"make serve-eval MODEL={model} SERVICE=test ARGS=--keep-serving\n" in printed()
    assert "make serve-status SERVICE=test\n" in printed("--keep-serving")
