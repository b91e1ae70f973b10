"""The demo: the main job from end to end on text that every machine has, each step a command that a person can type.

It uses a service name and a port of its own. Every step keys its work by content, so a second demo, or one after a
crash, does only what is not done.
"""

import dataclasses
from pathlib import Path

from training.core import files, locks, paths
from training.llamacpp.server import require_free_port
from training.rounds.steps import run_step

SERVICE = "demo"
RECIPE = paths.REPOSITORY / "recipes" / "demo" / "pretrain-stdlib.yaml"
NAME, START_NAME = "demo", "demo-step0"


@dataclasses.dataclass
class Demo:
    """One round trip.

    Args:
        overrides: values that replace the recipe's.
        port: the port of the demo's own service.
        keep_serving: leave the trained model in service instead of putting the untrained one back.
    """

    overrides: list[str]
    port: int
    keep_serving: bool

    def __post_init__(self) -> None:
        self.documents: dict[str, dict] = {}
        self.seconds: dict[str, float] = {}

    def run(self) -> dict:
        """Run every step; returns the figures of the report. Raises what a step raises."""
        # One demo at a time on a machine: port and service name are the same in every checkout.
        lock = paths.roots().cache / "locks" / "demo.lock"
        with locks.hold(lock, "make demo", resource="the demo"):
            return self._run()

    def _run(self) -> dict:
        self._step("stop-leftover", "Clear what an earlier demo left", ["serve-stop", "--service", SERVICE])
        require_free_port(self.port)
        self._step("converter", "The pinned llama.cpp, whose converter is used", ["export-build"])
        self._prepare()
        self._train()
        self._export()
        self._serve()
        self._step("verify", "Walk the chain back", ["verify", str(self._gguf(NAME, "Q8_0"))])
        return self._figures()

    def _step(self, key: str, title: str, arguments: list[str]) -> dict:
        number = len(self.documents) + 1
        self.documents[key], self.seconds[key] = run_step(f"{number}. {title}", arguments)
        return self.documents[key]

    # ---- the steps

    def _prepare(self) -> None:
        data = self._step("data", "Text and data set", ["data-prepare", "--stdlib", "--name", "stdlib"])
        tokenizer = self._step(
            "tokenizer", "Tokenizer", ["tokenizer-train", "--dataset", data["dataset"], "--name", "stdlib-4k"]
        )
        self.recipe = [
            "--config", str(RECIPE), f"data.dataset={data['dataset']}", f"tokenizer.path={tokenizer['tokenizer']}",
            *self.overrides,
        ]  # fmt: skip
        self._step("memfit", "Memory fit, before the model exists", ["memfit", *self.recipe])

    def _train(self) -> None:
        summary = self._step("train", "Train", ["train", *self.recipe, "--reuse"])
        checkpoints = Path(summary["folder"]) / "checkpoints"
        self.first, self.best = (
            checkpoints / "step_000000",
            checkpoints / (summary["best_checkpoint"] or summary["last_checkpoint"]),
        )
        self._step(
            "evaluate", "Before and after, on the test split",
            ["evaluate", str(self.first), str(self.best), "--split", "test"],
        )  # fmt: skip

    def _export(self) -> None:
        self._step(
            "export-before", "Export the untrained model",
            ["export-gguf", str(self.first), "--name", START_NAME, "--quant", "Q8_0", "--force"],
        )  # fmt: skip
        self._step(
            "export", "Export the trained model",
            ["export-gguf", str(self.best), "--name", NAME, "--quant", "F16,Q8_0", "--force"],
        )  # fmt: skip

    def _serve(self) -> None:
        place = ["--service", SERVICE, "--port", str(self.port)]
        self._step(
            "serve-start", "Put the untrained model into service",
            ["serve-start", str(self._gguf(START_NAME, "Q8_0")), *place],
        )  # fmt: skip
        keep = ["--keep-serving"] if self.keep_serving else []
        try:
            self._step(
                "serve-eval", "Swap the trained model in, ask it, put the old one back",
                ["serve-eval", str(self._gguf(NAME, "Q8_0")), *place, *keep],
            )  # fmt: skip
            self._step("serve-status", "Ask the server what it serves now", ["serve-status", "--service", SERVICE])
        finally:
            if not self.keep_serving:
                self._step("serve-stop", "Stop the demo's service", ["serve-stop", "--service", SERVICE])

    @staticmethod
    def _gguf(name: str, quant: str) -> Path:
        return paths.roots().trained / name / f"{name}-{quant}.gguf"

    # ---- the figures

    def _figures(self) -> dict:
        before, after = self.documents["evaluate"]["records"]
        summary, manifests = self.documents["train"], self._manifests()
        return {
            "schema": 1,
            "bits_per_byte": {
                "before": before["score"]["bits_per_byte"],
                "after": after["score"]["bits_per_byte"],
                "unigram": after["unigram"]["bits_per_byte"],
            },
            "trained_tokens": summary["trained_tokens"],
            "tokens_per_second": summary["tokens_per_second"],
            "peak_bytes": summary["peak_bytes"],
            "estimate_bytes": summary["estimate_bytes"],
            "chain": _chain(manifests["Q8_0"]),
            "parity": {quant: manifest["parity"] for quant, manifest in manifests.items()},
            "smoke": self.documents["serve-eval"]["smoke"],
            "restore": self.documents["serve-eval"]["restore"],
            "serves": self.documents["serve-status"]["loaded"],
            "reused": [key for key, document in self.documents.items() if _was_reused(document)],
            "seconds": {key: round(seconds, 1) for key, seconds in self.seconds.items()},
            "run": summary["run"],
            "folder": summary["folder"],
            "model": str(paths.container_path(self._gguf(NAME, "Q8_0"))),
            "kept_serving": self.keep_serving,
            "port": self.port,
        }

    def _manifests(self) -> dict[str, dict]:
        outputs = (output["manifest"] for output in self.documents["export"]["outputs"])
        return {manifest["quant_type"]: manifest for manifest in outputs}


def _was_reused(document: dict) -> bool:
    """Whether a step found its work done: all of it, where it has several parts."""
    parts = document.get("outputs") or document.get("records") or [document]
    return all(part.get("reused") for part in parts)


def _chain(manifest: dict) -> dict[str, str]:
    """The hashes from the data to the file that was served, 12 digits each."""
    whole = {
        "data": manifest["dataset"]["hash"],
        "tokenizer": manifest["tokenizer"]["hash"],
        "recipe": manifest["recipe_sha256"],
        "weights": manifest["weights_sha256"],
        "gguf": manifest["sha256"],
    }
    return {name: files.short(digest) for name, digest in whole.items()}
