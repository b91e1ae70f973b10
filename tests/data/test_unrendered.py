"""What a template leaves out of a record is noticed: counted where it is context, refused where it is the answer."""

import copy
from pathlib import Path

import pytest

from tests.data import templates
from tests.data.test_supervised import ANSWERS, encode, retemplated, talk
from tests.data.test_tokens import make_dataset, make_tokenizer, texts
from training.core.errors import UserError
from training.data import tokens, unrendered
from training.data.chat import Renderer
from training.data.conversation import of_record
from training.data.supervised import LEFT_OUT, NOTED
from training.data.supervision import Settings
from training.tokenizer.artifact import Tokenizer
from training.tokenizer.template import Template

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Tell the weather.", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_tokenizer(make_dataset(tmp_path, [{"text": text} for text in texts() if text.strip()]))


def calling(said: str = "Let me look.") -> dict:
    return {
        "tools": copy.deepcopy(TOOLS),
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Is it raining?", "name": "ada"},
            {"role": "assistant", "content": said, "tool_calls": [copy.deepcopy(CALL)]},
            {"role": "tool", "content": "rain", "name": "weather"},
            {"role": "assistant", "content": "Yes.", "reasoning_content": "It says rain."},
        ],
    }


def kinds(family: templates.Family, value: dict) -> set[str]:
    renderer = Renderer(Template(family.source, family.specials, date="2026-01-31"), family.controls)
    conversation = of_record(value)
    return {part.kind for part in unrendered.left_out(renderer, conversation, renderer.text(conversation))}


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("chatml", {"tools", "tool_calls", "names", "reasoning"}),
        ("smollm-2", {"tools", "tool_calls", "names", "reasoning"}),
        ("qwen-3", {"names"}),
        ("deepseek", {"tools", "tool_calls", "names", "reasoning", "turns"}),
        ("harmony", {"tools", "names", "turns"}),
    ],
)
def test_each_kind_of_content_that_a_template_leaves_out_is_found(family: str, missing: set[str]):
    assert kinds(templates.FAMILIES[family], calling()) == missing


@pytest.mark.parametrize("family", templates.FAMILIES)
def test_of_plain_turns_nothing_is_missing_and_nothing_is_rendered_again(family: str, monkeypatch: pytest.MonkeyPatch):
    value, calls = talk("Is it <b>raining</b>?\n", "  Yes.", 'And "now"?', "No."), []
    found, render = templates.FAMILIES[family], Template.render
    monkeypatch.setattr(Template, "render", lambda *given, **named: calls.append(1) or render(*given, **named))
    assert kinds(found, value) == set() and len(calls) == 1


def test_a_system_turn_and_a_text_that_is_cut_are_found():
    turn = "<|{{ m.role }}|>{{ m.content[:6] }}<|end|>"
    source = "{% for m in messages %}{% if m.role != 'system' %}" + turn + "{% endif %}{% endfor %}"
    value = {"messages": [{"role": "system", "content": "Be brief."}, *talk("question", "answer")["messages"]]}
    assert kinds(templates.Family(source, ("<|end|>",)), value) == {"system", "turns"}


def test_an_earlier_thought_that_a_template_drops_is_found_wherever_it_stands():
    family = templates.FAMILIES["qwen-3"]
    inside = talk("one", "<think>\nhm\n</think>\n\nfirst", "two", "<think>\nwell\n</think>\n\nsecond")
    assert kinds(family, inside) == {"reasoning"}
    beside = talk("one", "first", "two", "second")
    beside["messages"][1]["reasoning_content"] = "hm"
    assert kinds(family, beside) == {"reasoning"}


def test_a_call_that_vanishes_is_a_lost_answer(tokenizer):
    """What SmolLM2's template does with it: the words before the call stay, the call goes."""
    anew = retemplated(tokenizer, templates.WITH_DEFAULT_SYSTEM)
    said, silent = encode(anew, ANSWERS, calling(), calling(said=""))
    assert (said.reason, silent.reason) == ("answer_not_rendered", "answer_not_rendered")
    assert "tool call of messages[2], 'weather'" in said.found and said.setting == ("on_error", "drop")


def test_what_is_context_alone_is_counted_and_the_answer_is_trained(tokenizer):
    anew = retemplated(tokenizer, templates.WITH_DEFAULT_SYSTEM)
    value = talk("Is it raining?", "Yes.") | {"tools": TOOLS}
    (sample,) = encode(anew, ANSWERS, value)
    assert sample.notes == ("tools_not_rendered",)
    prompt = calling()["messages"]
    pair = {"prompt": prompt[:-1], "completion": prompt[-1:], "tools": TOOLS}
    (sample,) = encode(anew, Settings("assistant", 200), pair)
    assert {"tools_not_rendered", "tool_calls_not_rendered"} <= set(sample.notes)


def test_the_command_stops_at_a_lost_call_or_counts_it_and_names_the_records(tokenizer, tmp_path, caplog):
    anew = retemplated(tokenizer, templates.WITH_DEFAULT_SYSTEM)
    rows = [talk(f"question {i}", f"answer {i}") | {"split": "train", "tools": TOOLS} for i in range(6)]
    rows += [calling(f"looking {i}") | {"split": "train"} for i in range(3)]
    data = make_dataset(
        tmp_path, [*rows, talk("v", "v") | {"split": "validation"}], train_ratio=0.9, val_ratio=0.1, near=0
    )
    settings = Settings("assistant", 400, on_error="drop")
    with pytest.raises(UserError, match="answer not rendered") as caught:
        tokens.tokenize(data, anew, Settings("assistant", 400))
    assert "data.on_error=drop" in caught.value.next_command
    figures = tokens.open_split(tokens.tokenize(data, anew, settings), "train").manifest["splits"]["train"]
    assert figures["left_out"]["answer_not_rendered"] == 3 and figures["noted"]["tools_not_rendered"] == 6
    assert set(figures["left_out"]) == set(LEFT_OUT) and set(figures["noted"]) == set(NOTED)
    assert len(figures["first_noted"]["tools_not_rendered"]) == 3
    assert "6 records with tools that the chat template leaves out of the text: train.jsonl:" in caplog.text
