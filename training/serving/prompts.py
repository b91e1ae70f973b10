"""Smoke prompts: the file that lists them, what is asked, and when an answer passes.

A prompt passes when it returns text that is not empty, without error, within its time limit, and as its expectations
say. They are asked one by one in the file's order, greedily (`training.llamacpp.client.GREEDY`).
The file is YAML, read as strictly as a recipe; `smoke.schema.json` says what may stand in it.
"""

import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from training.core.errors import Problems, RunError, TrainyardError, UserError
from training.core.paths import REPOSITORY
from training.llamacpp.client import Client

DEFAULT_FILE = REPOSITORY / "recipes" / "smoke.yaml"
_SCHEMA = Path(__file__).with_name("smoke.schema.json")
_ANYTHING = {"type": "object"}
_SCALARS = ["null", "boolean", "integer", "number", "string"]
_STOP_REASONS = {"eos": "stop", "word": "stop", "limit": "length"}


@dataclass(frozen=True)
class Prompt:
    """One prompt: either `text`, continued as it stands, or `messages`, rendered by the server's template."""

    name: str
    text: str | None = None
    messages: tuple[dict, ...] = ()
    max_tokens: int = 32
    time_limit_seconds: float = 60.0
    expect: dict = field(default_factory=dict)


def load(path: Path) -> list[Prompt]:
    """Read a smoke file. Raises Problems with everything that is wrong in it, each with its line."""
    from training.recipe.strict_yaml import parse

    if not path.is_file():
        raise UserError("no such smoke file", where=path, expected="a YAML file", next_command="ls recipes")
    schema = json.loads(_SCHEMA.read_text())
    root, problems = parse(path.read_bytes(), path.name)
    reader = _Reader(path.name, problems)
    values = reader.value(root, schema, "the file")
    if not problems:
        reader.check(values, schema)
    if problems:
        raise Problems(
            f"{path.name} is no valid smoke file",
            problems,
            next_command=f"${{EDITOR:-vi}} {path}",
        )
    return [Prompt(**entry | {"messages": tuple(entry.get("messages", ()))}) for entry in values["prompts"]]


class _Reader:
    """Turns strict YAML nodes into values by the schema, noting problems with their lines."""

    def __init__(self, source: str, problems: list[TrainyardError]):
        self.source, self.problems = source, problems
        self.lines: list[int] = []  # of each prompt

    def value(self, node: object, schema: dict, key: str) -> object:
        from training.recipe.reading import read_scalar
        from training.recipe.strict_yaml import Items, Mapping, Scalar

        if schema == _ANYTHING:
            return _free(node)
        if isinstance(node, Mapping) and schema["type"] == "object":
            for name in node.entries.keys() - schema["properties"].keys():
                self._problem(f"unknown key {name}", node.lines[name], name, " ".join(schema["properties"]))
            known = [name for name in node.entries if name in schema["properties"]]
            return {name: self.value(node.entries[name], schema["properties"][name], name) for name in known}
        if isinstance(node, Items) and schema["type"] == "array":
            if key == "prompts":
                self.lines = [item.line for item in node.items]
            return [self.value(item, schema["items"], key) for item in node.items]
        try:
            if isinstance(node, Scalar):
                return read_scalar(node, [schema["type"]])
        except ValueError:
            pass
        found = node.text if isinstance(node, Scalar) else "nothing" if node is None else "another shape"
        self._problem(f"{key} is not what it should be", getattr(node, "line", 1), found, f"of type {schema['type']}")
        return None

    def check(self, values: dict, schema: dict) -> None:
        import jsonschema

        for error in jsonschema.Draft202012Validator(schema).iter_errors(values):
            path = list(error.absolute_path)
            line = self.lines[path[1]] if len(path) > 1 else 1
            self._problem(error.message, line)
        if self.problems:
            return
        names: set[str] = set()
        for entry, line in zip(values["prompts"], self.lines, strict=True):
            if ("text" in entry) == ("messages" in entry):
                self._problem("a prompt without text or messages, or with both", line, expected="one of the two")
            if entry["name"] in names:
                self._problem("a name that stands above already", line, entry["name"], "each name once")
            names.add(entry["name"])
            self._check_pattern(entry, line)
            self._check_schema(entry, line)

    def _check_pattern(self, entry: dict, line: int) -> None:
        try:
            re.compile(entry.get("expect", {}).get("matches", ""))
        except re.error as error:
            self._problem("matches is no regular expression", line, error)

    def _check_schema(self, entry: dict, line: int) -> None:
        import jsonschema

        try:
            jsonschema.Draft202012Validator.check_schema(entry.get("expect", {}).get("json_schema", {}))
        except jsonschema.SchemaError as error:
            self._problem("json_schema is no JSON schema", line, error.message)

    def _problem(self, what: str, line: int, found: object = None, expected: object = None) -> None:
        self.problems.append(UserError(what, where=f"{self.source}:{line}", found=found, expected=expected))


def _free(node: object) -> object:
    """A value whose shape the smoke file itself decides: what stands under `json_schema`."""
    from training.recipe.reading import read_scalar
    from training.recipe.strict_yaml import Items, Mapping

    if isinstance(node, Mapping):
        return {name: _free(value) for name, value in node.entries.items()}
    if isinstance(node, Items):
        return [_free(item) for item in node.items]
    return None if node is None else read_scalar(node, _SCALARS if node.plain else ["string"])


def ask(client: Client, prompt: Prompt) -> dict:
    """Ask one prompt and judge the answer.

    Returns `{"name", "text", "finish_reason", "prompt_tokens", "completion_tokens", "milliseconds", "passed", "why"}`;
    an error or a time out is a prompt that did not pass.
    """
    started = time.monotonic()
    try:
        answer = _completion(client, prompt)
    except RunError as error:
        answer = {
            "text": "", "finish_reason": None, "prompt_tokens": None, "completion_tokens": None, "error": str(error)
        }  # fmt: skip
    seconds = time.monotonic() - started
    why = answer.pop("error", None) or _objection(prompt, answer, seconds)
    return {"name": prompt.name, **answer, "milliseconds": round(1000 * seconds), "passed": why is None, "why": why}


def _completion(client: Client, prompt: Prompt) -> dict:
    limits = {"max_tokens": prompt.max_tokens, "timeout_seconds": prompt.time_limit_seconds}
    if prompt.messages:
        answer = client.chat(prompt.messages, **limits)
        choice, usage = answer["choices"][0], answer["usage"]
        return {
            "text": choice["message"].get("content") or "", "finish_reason": choice["finish_reason"],
            "prompt_tokens": usage["prompt_tokens"], "completion_tokens": usage["completion_tokens"],
        }  # fmt: skip
    answer = client.completion(prompt.text, **limits)
    return {
        "text": answer["content"], "finish_reason": _STOP_REASONS.get(answer["stop_type"], answer["stop_type"]),
        "prompt_tokens": answer["tokens_evaluated"], "completion_tokens": answer["tokens_predicted"],
    }  # fmt: skip


def _objection(prompt: Prompt, answer: dict, seconds: float) -> str | None:
    expect, text = prompt.expect, answer["text"]
    if not text:
        return "the text is empty"
    if seconds > prompt.time_limit_seconds:
        return f"took {seconds:.1f} s, limit {prompt.time_limit_seconds:g} s"
    if "contains" in expect and expect["contains"] not in text:
        return f"the text does not contain {expect['contains']!r}"
    if "matches" in expect and not re.search(expect["matches"], text):
        return f"the text does not match {expect['matches']!r}"
    if why := _against_schema(text, expect.get("json_schema")):
        return why
    if expect.get("finish_reason", answer["finish_reason"]) != answer["finish_reason"]:
        return f"finish reason {answer['finish_reason']}, expected {expect['finish_reason']}"
    return None


def _against_schema(text: str, schema: dict | None) -> str | None:
    import jsonschema

    if schema is None:
        return None
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except ValueError as error:
        return f"the text is not JSON: {error}"
    except jsonschema.ValidationError as error:
        return f"the JSON is not what the schema says: {error.message}"
    return None
