"""Answers in rendered conversations: right values by hand, for templates that cut, trim, mark and rewrite."""

import pytest

from tests.data import templates
from training.core.errors import UserError
from training.data.chat import Renderer
from training.tokenizer.template import CHATML, Template

TURN = ("<|im_start|>", "<|im_end|>")


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def answers(source: str, messages: list[dict], controls=(), **specials: str) -> list[str]:
    found = Renderer(Template(source, specials), controls).render(messages)
    assert found.text == Template(source, specials).render(messages)
    return [found.text[start:end] for start, end in found.answers]


THOUGHTS = [user("u1"), assistant("<think>t</think>A"), user("u2"), assistant("<think>s</think>B")]


@pytest.mark.parametrize("controls", [(), ("<|end|>", "<|user|>", "<|assistant|>")], ids=["plain", "control"])
def test_a_template_that_rewrites_earlier_turns_shifts_no_span(controls):
    """B23: prefixes of the render would have given the whole second user turn."""
    assert answers(templates.TOY_THINKING, THOUGHTS, controls) == ["A<|end|>", "<think>s</think>B<|end|>"]


def test_all_answers_with_the_end_of_each_turn_and_nothing_else():
    """B24, B26: three one-letter answers, without their headers."""
    messages = [turn for letter in "abc" for turn in (user("q"), assistant(letter))]
    assert answers(CHATML, messages, TURN) == ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]


def test_an_end_of_turn_that_is_the_end_of_text():
    messages = [user("q"), assistant(" a\n"), user("r"), assistant("b")]
    controls = ("<s>", "</s>", "[INST]", "[/INST]")
    assert answers(templates.BRACKETS, messages, controls, bos_token="<s>", eos_token="</s>") == ["a</s>", "b</s>"]


def test_a_role_that_the_template_renames_and_text_that_it_trims():
    messages = [user("q"), assistant("  a "), user("r"), assistant("b")]
    controls = ("<|turn|>", "<|close|>")
    assert answers(templates.MODEL_TURNS, messages, controls, bos_token="") == ["a<|close|>", "b<|close|>"]


def test_thinking_that_is_switched_off_is_prompt_and_a_real_thought_is_answer():
    """R13: the server adds the empty thought; what a record thought by itself is trained."""
    plain = [user("u1"), assistant("A"), user("u2"), assistant("B")]
    assert answers(templates.SWITCHED_THINKING, plain, TURN) == ["A<|im_end|>", "B<|im_end|>"]
    thoughtful = answers(templates.SWITCHED_THINKING, THOUGHTS, TURN)
    assert thoughtful == ["A<|im_end|>", "<think>\ns\n</think>\n\nB<|im_end|>"]
    prompt = Renderer(Template(templates.SWITCHED_THINKING, {}), TURN).prompt([user("u1")])
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_templates_own_marks_decide():
    assert answers(templates.MARKED, [user("q"), assistant("a"), user("r"), assistant("b")]) == ["a<|end|>", "b<|end|>"]


def test_a_conversation_that_ends_with_a_question_keeps_its_answers():
    assert answers(CHATML, [user("q"), assistant("a"), user("r")], TURN) == ["a<|im_end|>"]


def test_answers_that_hold_what_templates_look_for():
    texts = ["<|im_start|>?", "</think>", "<think>x", "\U000f0000", "a" * 3000, "{{ x }}", "\u2028"]
    for text in texts:
        assert answers(CHATML, [user("q"), assistant(text)], ["<|im_end|>"]) == [text + "<|im_end|>"], text


def test_what_cannot_be_followed_is_refused():
    with pytest.raises(UserError, match="rewrites answers"):
        answers(templates.CUTTING, [user("q"), assistant("an answer")])
    with pytest.raises(UserError, match="only user and assistant"):
        answers(templates.BRACKETS, [{"role": "tool", "content": "x"}], bos_token="", eos_token="")
    with pytest.raises(UserError, match="does not end"):
        answers("{% for m in messages %}{{ m.content }}{% endfor %}", [user("q"), assistant("a")])


def test_both_private_planes_at_once_are_refused():
    with pytest.raises(UserError, match="private planes"):
        answers(CHATML, [user("q"), assistant("\U000f0001 \U0010ff00"), assistant("\U000f0002")], TURN)


def test_each_messages_own_text_is_found():
    messages = [{"role": "system", "content": "be"}, user("q\n"), assistant("a")]
    text, spans = Renderer(Template(CHATML, {}), TURN).contents(messages)
    assert [text[start:end] for start, end in spans] == ["be", "q", "a"]


def test_a_clock_is_told_the_day_or_refused():
    messages = [user("q")]
    with pytest.raises(UserError, match="reads the clock"):
        Template(templates.CLOCK, {}).render(messages)
    assert Template(templates.CLOCK, {}, "2026-01-31").render(messages).startswith("31 Jan 2026<|user|>q")
