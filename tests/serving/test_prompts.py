"""Smoke files: read strictly, and judged as they say."""

from pathlib import Path

import pytest

from training.core.errors import Problems
from training.serving import prompts
from training.serving.prompts import Prompt


def test_the_default_file_is_valid():
    loaded = prompts.load(prompts.DEFAULT_FILE)
    assert len(loaded) >= 3 and len({prompt.name for prompt in loaded}) == len(loaded)


def test_a_file_is_read_in_its_order(tmp_path: Path):
    file = tmp_path / "smoke.yaml"
    file.write_text(
        "prompts:\n  - {name: b, text: 'no', max_tokens: 5}\n"
        "  - {name: a, messages: [{role: user, content: 12:30}], expect: {finish_reason: stop}}\n"
    )
    assert prompts.load(file) == [
        Prompt("b", "no", max_tokens=5),
        Prompt("a", messages=({"role": "user", "content": "12:30"},), expect={"finish_reason": "stop"}),
    ]


def test_a_json_schema_is_taken_as_it_stands(tmp_path: Path):
    file = tmp_path / "smoke.yaml"
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 10}}, "required": ["n"]}
    file.write_text(f"prompts: [{{name: a, text: x, expect: {{json_schema: {schema}}}}}]".replace("'", '"'))
    assert prompts.load(file)[0].expect == {"json_schema": schema}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("prompts:\n  - name: a\n    text: x\n    max_token: 3", 4, "unknown key max_token"),
        ("prompts:\n  - name: a\n    text: x\n    text: y", 4, "duplicate key"),
        ("prompts:\n  - name: a\n    text: x\n    max_tokens: many", 4, "max_tokens"),
        ("prompts:\n  - name: a\n    text: x\n    max_tokens: 0", 2, "less than the minimum"),
        ("prompts:\n  - name: a", 2, "without text or messages"),
        (
            "prompts:\n  - {name: a, text: x}\n  - {name: b, text: x, messages: [{role: user, content: c}]}",
            3,
            "with both",
        ),
        ("prompts:\n  - {name: a, text: x, expect: {matches: '['}}", 2, "no regular expression"),
        ("prompts:\n  - {name: a, text: x, expect: {json_schema: {type: 7}}}", 2, "no JSON schema"),
        ("prompts:\n  - {name: a, text: x}\n  - {name: a, text: y}", 3, "a name that stands above"),
        ("prompts:\n  - {text: x}", 2, "'name' is a required property"),
        ("prompts: []", 1, "non-empty"),
        ("", 1, "the file"),
        ("prompts: [", 1, "not YAML"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, text: str, line: int, words: str):
    file = tmp_path / "smoke.yaml"
    file.write_text(text)
    with pytest.raises(Problems) as caught:
        prompts.load(file)
    assert words in str(caught.value) and f"smoke.yaml:{line}" in str(caught.value)


class Answering:
    """A client with one canned answer."""

    def __init__(self, text: str, stop_type: str = "limit"):
        self.answer = {"content": text, "stop_type": stop_type, "tokens_evaluated": 2, "tokens_predicted": 3}

    def completion(self, *_: object, **__: object) -> dict:
        return self.answer


@pytest.mark.parametrize(
    ("text", "expect", "why"),
    [
        ("fine", {}, None),
        ("", {}, "the text is empty"),
        ("abc", {"contains": "b", "matches": "^a.c$", "finish_reason": "length"}, None),
        ("abc", {"contains": "d"}, "does not contain 'd'"),
        ("abc", {"matches": "^b"}, "does not match"),
        ("abc", {"finish_reason": "stop"}, "finish reason length, expected stop"),
        ('{"n": 3}', {"json_schema": {"type": "object", "required": ["n"]}}, None),
        ('{"n": 3}', {"json_schema": {"properties": {"n": {"maximum": 2}}}}, "3 is greater than the maximum of 2"),
        ("{", {"json_schema": {}}, "not JSON"),
    ],
)
def test_an_answer_is_judged(text: str, expect: dict, why: str | None):
    result = prompts.ask(Answering(text), Prompt("p", "x", expect=expect))
    assert result["passed"] == (why is None)
    assert result["why"] is None if why is None else why in result["why"]
