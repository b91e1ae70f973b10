"""The trial of an image right after its build: does what it is for work inside it, as the calling user, without a root?

Everything runs hardened as in compose.yaml (`engine.as_caller`) and without a network; the server alone gets a loopback
port. The outcome is part of the image's record.
"""

import json
import tempfile
import time
from pathlib import Path

from training.containers import engine
from training.containers import image as images
from training.core import version
from training.core.errors import IntegrityError, RunError
from training.llamacpp import pin as pins
from training.llamacpp import tiny
from training.llamacpp.client import Client

_SECONDS = 180.0
_PACKAGES_FILE = "/usr/share/trainyard/distribution-packages.txt"
_CHECK_SOURCE = "from training.llamacpp import source; print(source.require_source())"


def run(image: str) -> dict:
    """Try an image of this machine: `{"passed": [sentences], ...figures}`. Raises RunError, IntegrityError."""
    return _TRIALS[image](images.describe(image))


def distribution_packages(image: str) -> list[str]:
    """`name version` of each package that the image has from its distribution."""
    command = ["run", *engine.as_caller(), "--network", "none", "--entrypoint", "sh", images.reference(image)]
    text = engine.run([*command, "-c", f"cat {_PACKAGES_FILE} 2>/dev/null || dpkg-query -W"], "listing the packages")
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def _inside(record: dict, entry: str, *arguments: str, gpu: bool = False) -> str:
    command = ["run", *engine.as_caller(), *(engine.gpu_options() if gpu else []), "--network", "none"]
    command += ["--entrypoint", entry, record["reference"], *arguments]
    return engine.run(command, f"trying {record['reference']}", seconds=_SECONDS)


def _train(record: dict) -> dict:
    said = json.loads(_inside(record, "python", "-m", "training.containers.forward", gpu=True))
    if missing := version.missing(said["packages"], on_gpu=said["device"] == "cuda"):
        raise IntegrityError("the image lacks packages", where=record["reference"], found=", ".join(missing))
    torch = said["packages"]["torch"]
    return said | {"passed": [f"torch {torch}, one step on {said['device']}, loss {said['loss_nats']:.3f}"]}


def _export(record: dict) -> dict:
    pin = pins.load()
    if record["labels"].get("llama.cpp") != pin.name:
        raise IntegrityError(
            "the export image has another llama.cpp than the pinned one", where=record["reference"],
            found=record["labels"].get("llama.cpp"), expected=pin.name, next_command="make export-build",
        )  # fmt: skip
    source = _inside(record, "python", "-c", _CHECK_SOURCE).strip()
    for word, line in (
        ("--outtype", f"PYTHONSAFEPATH= python {source}/convert_hf_to_gguf.py --help"),
        ("Q4_K_M", "/app/llama-quantize --help 2>&1 || true"),  # its status says failure where it was asked for help
    ):
        _require(word, _inside(record, "sh", "-c", line), record)
    return {"passed": [f"label and converter hash as pinned, {pin.name}", "converter and llama-quantize answer --help"]}


def _require(word: str, text: str, record: dict) -> None:
    if word not in text:
        raise RunError(
            "the image's program does not answer", where=record["reference"], found=text[-300:], expected=word
        )


def _llama(record: dict) -> dict:
    """Serve a tiny model and ask for health, the model and one completion; a start without a model must be refused."""
    with tempfile.TemporaryDirectory(prefix="trainyard-trial-") as folder:
        Path(folder).chmod(0o755)
        tiny.write(Path(folder) / "tiny.gguf", seed=1)
        refused = ["run", *engine.as_caller(), "--network", "none", "--env", "LLAMA_ARG_MODEL=", record["reference"]]
        if engine.succeeds(refused):
            raise RunError("the server image starts without a model", where=record["reference"], expected="a refusal")
        return _serve(record, folder)


def _serve(record: dict, folder: str) -> dict:
    gpu = engine.gpu_options() if record["image"] == "llama-cuda" else []
    command = ["run", "--detach", *(word for word in engine.as_caller() if word != "--rm"), *gpu]
    command += ["--publish", "127.0.0.1::8080", "--volume", f"{folder}:/app/models:ro", record["reference"]]
    command += ["--model", "/app/models/tiny.gguf", "--n-gpu-layers", "999" if gpu else "0"]
    command += ["--ctx-size", "256", "--parallel", "1", "--threads", "1", "--batch-size", "256", "--ubatch-size", "256"]
    command += ["--fit", "off", "--seed", "1", "--no-ui"]
    container = engine.run(command, f"starting {record['reference']}").strip()
    try:
        return _ask(record, container)
    finally:
        engine.run(["rm", "--force", container], "removing the trial's container")


def _ask(record: dict, container: str) -> dict:
    started = time.monotonic()
    client = Client(f"http://{engine.published(container, 8080)}")
    while client.health() != "ok" or not _healthy(container):
        _require_time(record, container, started)
        time.sleep(0.2)
    seconds, loaded = time.monotonic() - started, client.model_info()
    if loaded["parameters"] != tiny.parameters():
        raise IntegrityError(
            "the server image serves another model", found=loaded["parameters"], expected=tiny.parameters()
        )
    text = client.completion("hello", max_tokens=4)["content"]
    return {
        "health_seconds": round(seconds, 1), "build": loaded["build"], "completion": text,
        "passed": [f"healthy in {seconds:.1f} s, a completion of 4 tokens", "refuses to start without a model"],
    }  # fmt: skip


def _healthy(container: str) -> bool:
    """Whether the image's own health check passes."""
    return engine.succeeds(["exec", container, "/app/healthy"])


def _require_time(record: dict, container: str, started: float) -> None:
    if time.monotonic() - started > _SECONDS or not engine.is_running(container):
        raise RunError(
            "the server image does not get healthy", where=record["reference"],
            found=f"its last lines:\n{engine.last_lines(container)}",
        )  # fmt: skip


_TRIALS = {"train": _train, "export": _export, "llama-cpu": _llama, "llama-cuda": _llama}
