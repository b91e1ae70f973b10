"""The rules of conversations: each has its name, and what real chat data holds passes all of them."""

import json
from pathlib import Path

import pytest

from tests.data.reading import read
from training.core.paths import REPOSITORY
from training.data import record, rules

CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": "be brief"}
ASK = {"role": "user", "content": "1+1?"}
SAY = {"role": "assistant", "content": "2"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"}


def found(*messages: object, **fields: object) -> list[str]:
    value = {"messages": list(messages), **fields}
    return [reason.rule for reason in rules.reasons(value, "messages")]


@pytest.mark.parametrize(
    "messages",
    [
        [ASK, SAY],
        [SYSTEM, ASK, SAY, ASK, SAY],
        [ASK, CALLS, RESULT, SAY],
        [ASK, CALLS, RESULT, RESULT, CALLS, RESULT, SAY],
        [ASK, CALLS],
        [ASK, {**CALLS, "content": "let me see"}, {"role": "tool", "content": ""}, SAY],
        [ASK, {k: v for k, v in CALLS.items() if k != "content"}, RESULT],
        [ASK, {**SAY, "reasoning_content": "one and one\n", "name": "calc"}],
        [ASK, {**SAY, "thinking": ""}],
        [SYSTEM, ASK],
        [ASK, {"role": "assistant", "content": "use list[int] and <b>, not < | im_start | > or [INST"}],
    ],
)
def test_conversations_of_the_hugging_face_form_are_taken(messages: list[dict]):
    assert found(*messages, tools=[TOOL]) == []


@pytest.mark.parametrize(
    ("rule", "messages"),
    [
        ("wrong_order", [SAY]),
        ("wrong_order", [SYSTEM, SAY]),
        ("wrong_order", [ASK, ASK]),
        ("wrong_order", [ASK, SAY, SAY]),
        ("wrong_order", [ASK, SYSTEM, SAY]),
        ("wrong_order", [ASK, RESULT]),
        ("wrong_order", [RESULT, SAY]),
        ("wrong_order", [ASK, CALLS, SAY]),
        ("wrong_order", [ASK, CALLS, ASK]),
        ("bad_role", [{"role": "bot", "content": "x"}]),
        ("bad_role", [{"content": "x"}]),
        ("bad_role", [{"role": ["user"], "content": "x"}]),
        ("bad_role", [{**ASK, "tool_calls": [CALL]}]),
        ("bad_role", [ASK, {**SAY, "tool_call_id": "c1"}]),
        ("bad_role", [{**ASK, "reasoning_content": "x"}]),
        ("empty_turn", [{"role": "user", "content": " \n\u00a0"}]),
        ("empty_turn", [ASK, {"role": "assistant", "content": "", "reasoning_content": "thought"}]),
        ("wrong_type", [{"role": "user", "content": None}]),
        ("wrong_type", [{"role": "user", "content": [{"type": "text", "text": "x"}]}]),
        ("wrong_type", [ASK, {**SAY, "thinking": 5}]),
        ("wrong_type", [ASK, {**CALLS, "content": 5}, RESULT]),
        ("wrong_type", [ASK, 7]),
        ("wrong_type", [ASK, SAY, {**ASK, "name": 7}]),
        ("missing_key", [{"role": "user"}]),
        ("unknown_key", [{**ASK, "weight": 0}]),
        ("bad_tool", [ASK, {**CALLS, "tool_calls": []}, RESULT]),
        ("bad_tool", [ASK, {**CALLS, "tool_calls": [{"name": "add", "arguments": {}}]}, RESULT]),
        ("bad_tool", [ASK, {**CALLS, "tool_calls": [{"function": {"name": "add"}}]}, RESULT]),
        ("bad_tool", [ASK, {**CALLS, "tool_calls": [{"function": {"name": "", "arguments": "{}"}}]}, RESULT]),
        ("bad_tool", [ASK, {**CALLS, "tool_calls": [{"function": {"name": "a", "arguments": 5}}]}, RESULT]),
        ("bad_tool", [ASK, {**CALLS, "tool_calls": [{**CALL, "id": 5}]}, RESULT]),
        ("control_string", [{"role": "user", "content": "end it <|im_end|>"}]),
        ("control_string", [ASK, {"role": "assistant", "content": "[/INST] sure"}]),
        ("control_string", [ASK, {**SAY, "reasoning_content": "<|eot_id|>"}]),
        ("control_string", [{"role": "system", "content": "<start_of_turn>user"}, ASK, SAY]),
        ("too_many_turns", [ASK, SAY] * 2049),
        ("long_name", [{**ASK, "name": "x" * 1025}]),
    ],
)
def test_each_breach_has_its_rule(rule: str, messages: list):
    names = found(*messages)
    assert set(names) == {rule}, names
    assert rule in rules.RULES


@pytest.mark.parametrize(
    "tools", [{}, [], [{}], [{"type": "function"}], [{"type": "search", "function": {"name": "a"}}],
              [{"function": {"name": "a", "parameters": "none"}}], [{"function": {"name": "a", "arguments": {}}}]]
)  # fmt: skip
def test_tools_are_held_to_their_form(tools: object):
    assert found(ASK, SAY, tools=tools) == ["bad_tool"]
    assert "other_form" in [reason.rule for reason in rules.reasons({"text": "a", "tools": [TOOL]}, "text")]


def test_every_rule_is_one_that_a_record_can_break(tmp_path: Path):
    """Each rule that a line can break, broken once under `drop`: counted under its own name, the rest kept."""
    deep = '{"text":"a","metadata":' + '{"k":' * 1000 + "1" + "}" * 1001
    lines = {
        "not_utf8": b'{"text":"caf\xe9"}', "not_json": b'{"text":', "several_objects": b'{"text":"a"}{"text":"b"}',
        "bad_number": b'{"text":"a","metadata":{"x":NaN}}', "duplicate_key": b'{"text":"a","text":"b"}',
        "half_surrogate": b'{"text":"x\\ud83d"}', "nested_too_deep": deep.encode(),
        "too_long": b'{"text":"%s"}' % (b"x" * 9000),
        "no_object": b"[1]", "missing_key": b'{"id":"x"}', "other_form": b'{"text":"a","prompt":"b"}',
        "unknown_key": b'{"text":"a","url":"b"}', "wrong_type": b'{"text":5}', "empty": b'{"text":" "}',
        "long_name": b'{"text":"a","id":"%s"}' % (b"x" * 1025), "bad_date": b'{"text":"a","date":"soon"}',
        "bad_split": b'{"text":"a","split":"dev"}',
    }  # fmt: skip
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text":"first"}\n' + b"\n".join(lines.values()) + b'\n{"text":"last"}\n')
    result = read(path, on_error="drop", max_record_bytes=8000)
    assert result.texts == ["first", "last"]
    assert result.rejected == dict.fromkeys(lines, 1)
    assert [fault["line"] for fault in result.faults] == list(range(2, 2 + len(lines)))
    of_chats = {"bad_role", "wrong_order", "empty_turn", "too_many_turns", "bad_tool", "control_string"}
    assert set(lines) | of_chats | {"no_form", "damaged"} == set(rules.RULES)


def test_a_text_may_hold_what_a_turn_may_not(tmp_path: Path):
    """Control strings in plain text are text: the tokenizer never makes control tokens of it."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "docs of <|im_start|> and [INST]"}) + "\n")
    assert read(path).texts == ["docs of <|im_start|> and [INST]"]


def test_the_page_names_every_rule():
    table = "".join(f"| `{name}` | {what} |\n" for name, what in rules.RULES.items())
    assert table in (REPOSITORY / "docs" / "data.md").read_text()


# ---- a prompt and its completion as messages


def pair(prompt: object, completion: object, **fields: object) -> list[str]:
    value = {"prompt": prompt, "completion": completion, **fields}
    return [reason.rule for reason in rules.reasons(value, "prompt-messages")]


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ([ASK], [SAY]),
        ([SYSTEM, ASK, SAY, ASK], [SAY]),
        ([ASK], "2"),
        ([ASK], [CALLS, RESULT, SAY]),
        ([ASK, CALLS, RESULT], [SAY, ASK, SAY]),
    ],
)
def test_a_prompt_of_messages_is_taken_with_its_tools(prompt: list[dict], completion: object):
    value = {"prompt": prompt, "completion": completion, "tools": [TOOL]}
    assert record.form_of(value) == "prompt-messages" and rules.reasons(value, "prompt-messages") == []


@pytest.mark.parametrize(
    ("rule", "prompt", "completion"),
    [
        ("wrong_order", [ASK], [ASK]),
        ("wrong_order", [ASK, CALLS], [RESULT, SAY]),
        ("wrong_order", [ASK, SAY], [SAY]),
        ("wrong_order", [ASK, SAY], "2"),
        ("wrong_order", [SYSTEM], "2"),
        ("wrong_order", [ASK, CALLS], "2"),
        ("wrong_order", [SAY], [SAY]),
        ("wrong_type", "1+1?", [SAY]),
        ("wrong_type", [ASK], {"role": "assistant"}),
        ("wrong_type", [ASK, "x"], [SAY]),
        ("empty", [ASK], []),
        ("empty", [ASK], " "),
        ("empty_turn", [ASK], [{"role": "assistant", "content": ""}]),
        ("control_string", [ASK], [{"role": "assistant", "content": "A<|im_end|>B"}]),
        ("bad_role", [{"role": "bot", "content": "x"}], [SAY]),
        ("too_many_turns", [ASK, SAY] * 2048, [SAY]),
    ],
)
def test_a_completion_is_held_to_what_its_prompt_leaves_to_say(rule: str, prompt: object, completion: object):
    assert rule in pair(prompt, completion)


def test_messages_and_texts_are_two_forms_and_never_one_source(tmp_path: Path):
    path = tmp_path / "mixed.jsonl"
    values = [{"prompt": [ASK], "completion": "2"}, {"prompt": "1+1?", "completion": "2"}, {"text": "x", "tools": []}]
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    found = read(path, on_error="drop")
    assert len(found.values) == 1 and found.rejected == {"wrong_type": 1, "missing_key": 1}
    reasons = [reason["found"] for reason in found.faults[0]["reasons"]]
    assert reasons == ["'prompt' is text, not a list of messages"]
    assert pair([ASK], "2", tools=[]) == ["bad_tool"]
    texts = rules.reasons({"prompt": "1", "completion": "2", "tools": [TOOL]}, "prompt-completion")
    assert [reason.rule for reason in texts] == ["other_form"]
    [reason] = rules.reasons({"prompt": "1", "completion": [SAY]}, "prompt-completion")
    assert reason.rule == "wrong_type" and "go with a prompt of messages" in reason.text


def test_the_texts_of_a_turn_are_what_it_says_thinks_and_calls():
    value = {"prompt": [SYSTEM, ASK, {**CALLS, "reasoning_content": "hm"}, RESULT], "completion": "2!"}
    assert record.texts(value) == ["be brief", "1+1?", "hm", "add", '{"a":1}', "2", "2!"]
    assert record.own_texts(value) == record.texts(value)[1:]
