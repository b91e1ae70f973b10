"""Answers in rendered conversations: right values by hand, for templates that cut, trim, mark, rewrite and join."""

import random

import pytest

from tests.data import templates
from training.core.errors import UserError
from training.data import spans
from training.data.chat import Renderer, Unfollowable
from training.data.conversation import of_record
from training.tokenizer.chat_templates import TEMPLATES
from training.tokenizer.template import Template

CHATML, TURN = TEMPLATES["chatml"].source, ("<|im_start|>", "<|im_end|>")
DAY = "2026-01-31"


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def tool(text: str) -> dict:
    return {"role": "tool", "content": text}


def call(name: str, **arguments) -> dict:
    return {"type": "function", "id": "call00001", "function": {"name": name, "arguments": arguments}}


def render(source: str, messages: list[dict], controls=(), tools=None, **specials: str):
    talk = of_record({"messages": messages, "tools": tools})
    template = Template(source, specials, DAY)
    found = Renderer(template, controls).render(talk)
    assert found.text == template.render(talk.messages, tools=tools, thinking=talk.thinks)
    return found


def answers(source: str, messages: list[dict], controls=(), **specials: str) -> list[str]:
    found = render(source, messages, controls, **specials)
    return [found.text[start:end] for start, end in found.spans]


def of_family(name: str, messages: list[dict], tools=None) -> list[str]:
    family = templates.FAMILIES[name]
    found = render(family.source, messages, family.controls, tools, **family.specials)
    assert not found.is_last_only
    return [found.text[start:end] for start, end in found.spans]


THOUGHTS = [user("u1"), assistant("<think>t</think>A"), user("u2"), assistant("<think>s</think>B")]
REASONED = [user("u1"), assistant("A", reasoning_content="t"), user("u2"), assistant("B", reasoning_content="s")]
PLAIN = [user("u1"), assistant(" A\n"), user("u2"), assistant("B")]
CALLING = [user("q?"), assistant("", tool_calls=[call("look", city="X")]), tool("sun"), assistant("It is sunny.")]


@pytest.mark.parametrize("controls", [(), ("<|end|>", "<|user|>", "<|assistant|>")], ids=["plain", "control"])
def test_a_template_that_rewrites_earlier_turns_shifts_no_span(controls):
    """B23: prefixes of the render would have given the whole second user turn."""
    assert answers(templates.TOY_THINKING, THOUGHTS, controls) == ["A<|end|>", "<think>s</think>B<|end|>"]


def test_all_answers_with_the_end_of_each_turn_and_nothing_else():
    """B24, B26: three one-letter answers, without their headers."""
    messages = [turn for letter in "abc" for turn in (user("q"), assistant(letter))]
    assert answers(CHATML, messages, TURN) == ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", [" A\n<|im_end|>", "B<|im_end|>"]),
        ("smollm-2", [" A\n<|im_end|>", "B<|im_end|>"]),
        ("llama-3", ["A<|eot_id|>", "B<|eot_id|>"]),
        ("qwen-3", [" A\n<|im_end|>", "B<|im_end|>"]),
        ("mistral", [" A</s>", " B</s>"]),
        ("gemma", ["A<end_of_turn>", "B<end_of_turn>"]),
        ("deepseek", [" A\n<|eos|>", "B<|eos|>"]),
        ("harmony", ["<|channel|>final<|message|> A\n<|end|>", "<|channel|>final<|message|>B<|return|>"]),
        ("marked", [" A\n<|end|>", "B<|end|>"]),
    ],
)
def test_each_familys_answers_are_what_its_server_lets_the_model_say(name, expected):
    """The header that the server writes is prompt; the end that the family's turns have is answer."""
    assert of_family(name, PLAIN) == expected


@pytest.mark.parametrize("messages", [THOUGHTS, REASONED], ids=["inline", "field"])
def test_a_thought_is_answer_and_an_empty_one_that_the_server_writes_is_prompt(messages):
    """R13."""
    assert of_family("qwen-3", messages) == ["A<|im_end|>", "<think>\ns\n</think>\n\nB<|im_end|>"]
    plain = render(templates.SWITCHED_THINKING, PLAIN, templates.FAMILIES["qwen-3"].controls)
    assert plain.text[: plain.spans[1][0]].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_thoughts_in_channels():
    analysis = "<|channel|>analysis<|message|>s<|end|><|start|>assistant<|channel|>final<|message|>B<|return|>"
    assert of_family("harmony", REASONED) == ["<|channel|>final<|message|>A<|end|>", analysis]


def test_tool_calls_are_said_by_the_assistant_and_results_are_not():
    """T14: a call ends as the template ends it, and what the tool gives back is prompt."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    said = '<tool_call>\n{"name": "look", "arguments": {"city": "X"}}\n</tool_call><|im_end|>'
    assert of_family("qwen-3", CALLING, tools) == [said, "It is sunny.<|im_end|>"]
    said = '{"name": "look", "parameters": {"city": "X"}}<|eot_id|>'
    assert of_family("llama-3", CALLING) == [said, "It is sunny.<|eot_id|>"]
    said = ' to=functions.look<|channel|>commentary<|message|>{"city": "X"}<|call|>'
    assert of_family("harmony", CALLING) == [said, "<|channel|>final<|message|>It is sunny.<|return|>"]


def test_words_before_a_call_and_two_results_in_a_row():
    calls = [call("look", city="X"), call("see", a=1)]
    messages = [user("q"), assistant("I look.", tool_calls=calls), tool("sun"), tool("<b>"), assistant("ok")]
    said, last = of_family("qwen-3", messages)
    assert said.startswith("I look.\n<tool_call>\n") and said.count("</tool_call>") == 2
    assert said.endswith("</tool_call><|im_end|>") and last == "ok<|im_end|>"


def test_a_mark_that_leaves_the_end_of_the_turn_outside_is_completed():
    """The token that ends a turn is always trained."""
    assert answers(templates.MARKED_WITHOUT_END, PLAIN, TURN) == [" A\n<|im_end|>", "B<|im_end|>"]


def test_a_conversation_that_ends_with_a_question_keeps_its_answers():
    assert answers(CHATML, [user("q"), assistant("a"), user("r")], TURN) == ["a<|im_end|>"]


def test_answers_that_hold_what_templates_look_for():
    texts = ["</think>", "<think>x", "\U000f0000", "\U0010fffd\U000f0001", "a" * 3000, "{{ x }}", "\u2028", "<", "<|"]
    texts += ["assistant\n", "<|im_start>assistant\n", "word", "  b", "b\n\n", "<tool_response>x</tool_response>"]
    for text in texts:
        assert answers(CHATML, [user(text), assistant(text)], ["<|im_end|>"]) == [text + "<|im_end|>"], text
        said = answers(templates.BRACKETS, [user(text), assistant(text)], ["</s>"], bos_token="", eos_token="</s>")
        assert said == [" " + text.strip() + "</s>"], text


def test_answers_that_repeat_their_questions_and_headers():
    """Places are marked and never searched for by what they hold."""
    generator = random.Random(7)
    words = ["a", "assistant", "\n", " ", "<think>", "im_end", "[INST", "user\n", "a a"]
    for _ in range(60):
        text = "".join(generator.choices(words, k=4)).strip() or "a"
        messages = [turn for _ in range(3) for turn in (user(text), assistant(text))]
        assert of_family("chatml", messages) == [text + "<|im_end|>"] * 3
        assert of_family("llama-3", messages) == [text + "<|eot_id|>"] * 3


def test_a_template_that_rewrites_answers_gives_the_last_turn_alone_and_says_so():
    """B23: train the last turn, or refuse."""
    messages = [user("q"), assistant("an answer"), user("r"), assistant("b")]
    found = render(templates.UPPER, messages, ("<|end|>",))
    assert found.is_last_only and [found.text[start:end] for start, end in found.spans] == ["b<|end|>"]
    with pytest.raises(UserError, match="cannot be told from its prompt"):
        answers(templates.UPPER, messages[:3], ("<|end|>",))


def test_what_cannot_be_followed_is_refused():
    with pytest.raises(UserError, match="ends an answer with nothing"):
        answers(templates.ENDLESS, [user("q"), assistant("a")])
    with pytest.raises(UserError, match="cannot render"):
        answers(templates.BRACKETS, [tool("x"), assistant("y")], ("</s>",), bos_token="", eos_token="</s>")
    with pytest.raises(Unfollowable):
        of_family("deepseek", CALLING)


def test_each_messages_own_text_is_found():
    talk = of_record({"messages": [{"role": "system", "content": "be"}, user("q\n"), assistant("a")]})
    text, spans = Renderer(Template(CHATML, {}), TURN).contents(talk)
    assert [text[start:end] for start, end in spans] == ["be", "q", "a"]


@pytest.mark.parametrize("name", ["chatml", "qwen-3", "llama-3", "mistral"])
def test_spans_of_a_long_conversation_are_in_order_and_apart(name):
    messages = [turn for i in range(60) for turn in (user(f"q{i}"), assistant(f"a{i}"))]
    said = of_family(name, messages)
    assert [one.strip().partition("<")[0] for one in said] == [f"a{i}" for i in range(60)]


ODD = "a \n\t\r\u2028\u00a0é\u0301你👍\u200d<>|[]{}%#\"'\\/\x00\x1f\ufeff\U000f0000\U00100001_"


@pytest.mark.parametrize("name", ["chatml", "smollm-2", "llama-3", "qwen-3", "mistral", "gemma", "harmony"])
def test_before_a_last_answer_stands_the_servers_prompt(name):
    """B26, B23: for any text, also where contents are blank-edged, odd or alike; answers hold all that was said."""
    generator, family = random.Random(name), templates.FAMILIES[name]
    template = Template(family.source, family.specials, DAY)
    renderer = Renderer(template, family.controls)
    for _ in range(150):
        texts = ["".join(generator.choices(ODD, k=generator.randint(1, 9))) for _ in range(4)]
        if not all(text.strip() for text in texts):
            continue
        talk = of_record({"messages": [(user, assistant)[i % 2](text) for i, text in enumerate(texts)]})
        found = renderer.render(talk)
        assert not found.is_last_only and len(found.spans) == 2, texts
        (first, first_end), (last, last_end) = found.spans
        assert found.text[:last] == template.render(talk.messages[:3], prompt=True), texts
        assert texts[1].strip() in found.text[first:first_end] and texts[3].strip() in found.text[last:last_end]
        assert found.text[last_end:].strip() == ""


@pytest.mark.parametrize("name", templates.FAMILIES)
def test_what_the_server_writes_need_not_be_asked_for_each_answer(name, monkeypatch):
    """The same spans whether its prompt is rendered for every answer or for the first one alone."""
    family = templates.FAMILIES[name]
    texts = ["word", " two\nlines \n", "<b>", "x", "é👍"]
    messages = [(user, assistant)[i % 2](texts[i * 7 % 5] + str(i)) for i in range(40)]
    found = []
    for asked in (10**6, 1):
        monkeypatch.setattr(spans, "_ASKED_FIRST", asked)
        try:
            found.append(render(family.source, messages, family.controls, **family.specials))
        except UserError as error:
            found.append(error.found)
    assert found[0] == found[1]


def test_a_header_that_is_no_control_token_is_no_label():
    """B26: the server's prompt goes on where the text does not, and the tokenizer knows no token of the template."""
    family = templates.FAMILIES["deepseek"]
    assert answers(family.source, [user("q?"), assistant("a!")], ("<|eos|>",), **family.specials)[0].startswith("a!")
    other = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    other += "{% if add_generation_prompt %}<bot>{% endif %}"
    with pytest.raises(UserError):
        answers(other, [user("q?"), assistant("a!")])
