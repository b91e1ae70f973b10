"""One model's way through an evaluation: its check before it serves, and what is asked of it while it does.

What is found goes into its part of the report as it is found, so that a failure leaves what came before it.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence

from training.core import files, paths
from training.core.errors import IntegrityError, RunError, UserError
from training.core.log import say
from training.core.report import make_command
from training.llamacpp import pin as pins
from training.llamacpp.client import Client
from training.serving import checks, prompts
from training.serving.model import check, signature
from training.serving.settings import service_command

_FROM_MANIFEST = (
    "run", "step", "weights_sha256", "tokenizer", "dataset", "recipe_sha256", "llama_cpp", "parameters",
)  # fmt: skip


class Candidate:
    """A model under evaluation; `part` is the document that it fills (`training.serving.report.opening_part`)."""

    def __init__(self, asked: str, service: str, part: dict, questions: Sequence[prompts.Prompt]):
        self.service, self.part, self.questions = service, part, questions
        self._tokenizer: object | None = None
        with self.timed("check"):
            self.model = check(paths.model_file(asked), manifest_required=True, service=service)
        self._describe()
        self._find_tokenizer()

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.part["seconds"][name] = round(time.monotonic() - started, 3)

    @property
    def quant_type(self) -> str:
        return self.model.header["quant_type"]

    def _describe(self) -> None:
        model, manifest = self.model, self.model.manifest
        self.part["model"] |= {
            "path": str(model.path), "container_path": str(paths.container_path(model.path)), "name": manifest["name"],
            "bytes": model.signature["bytes"], "sha256": model.sha256, **model.header,
        }  # fmt: skip
        pin_matches = _of_this_pin(manifest)
        if not pin_matches:
            say(f"warning: {model.path.name} was exported under another llama.cpp than the one pinned here")
        kept = {key: manifest.get(key) for key in _FROM_MANIFEST}
        self.part["manifest"] = {"sha256_matches": True, "quant_type_matches": True, "pin_matches": pin_matches} | kept

    def _find_tokenizer(self) -> None:
        from training.tokenizer import artifact

        named = self.model.manifest["tokenizer"]
        try:
            self._tokenizer = artifact.load(artifact.resolve(f"{named['name']}@{named['hash']}"))
        except UserError:
            why = f"the tokenizer {files.short(named['hash'])} is not on this machine"
            self.part["prompt_ids"] = {"compared": False, "why": why}

    def inspect(self, client: Client, loaded: dict) -> None:
        """Ask the server that serves it. Raises IntegrityError or RunError where it is not what it should be."""
        self.part["loaded"] = loaded
        with self.timed("compare"):
            self._compare(client, loaded)
        with self.timed("smoke"):
            self._smoke(client)

    def _compare(self, client: Client, loaded: dict) -> None:
        path, manifest = self.model.path, self.model.manifest
        verify = make_command("verify", MODEL=paths.container_path(path))
        checks.require_same_model(loaded, manifest, path, verify)
        if signature(path) != self.model.signature:
            raise IntegrityError(
                "the file changed between its hash check and its loading", where=path, next_command=verify
            )
        self.part["fingerprint"] = checks.compare_fingerprint(client, manifest["fingerprint"], verify)
        results = checks.compare_prompt_ids(client, self.questions, self._tokenizer, manifest.get("chat_template"))
        self.part["prompt_ids"] = (self.part["prompt_ids"] or {"compared": True}) | {"prompts": results}

    def _smoke(self, client: Client) -> None:
        counts = {entry["name"]: entry["num_tokens"] for entry in self.part["prompt_ids"]["prompts"]}
        for prompt in self.questions:
            say(f"smoke prompt {prompt.name}, limit {prompt.time_limit_seconds:g} s")
            result = prompts.ask(client, prompt)
            self.part["smoke"].append(result)
            if result["passed"] and result["prompt_tokens"] != counts[prompt.name]:
                result |= {"passed": False, "why": f"the server read {result['prompt_tokens']} tokens of "
                           f"{counts[prompt.name]}"}  # fmt: skip
        failed = [result for result in self.part["smoke"] if not result["passed"]]
        if failed:
            raise RunError(
                f"{len(failed)} of {len(self.questions)} smoke prompts did not pass",
                found="; ".join(f"{result['name']}: {result['why']}" for result in failed),
                expected="text, in time, as the smoke file says",
                next_command=service_command("serve-start", self.service, MODEL=paths.container_path(self.model.path)),
            )


def _of_this_pin(manifest: dict) -> bool:
    commit = (manifest.get("llama_cpp") or {}).get("commit")
    return bool(commit) and pins.load().commit.startswith(commit)
