"""Rendering as transformers renders: the same text to the byte, for templates of every way, tools and thoughts."""

import pytest

from tests.data import templates
from training.core.errors import UserError
from training.tokenizer.template import Template, normalised

LOOK = {"name": "look", "description": "é <b>", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": LOOK}]
CALL = {"type": "function", "id": "call00001", "function": {"name": "look", "arguments": {"a": 'é"<'}}}
PLAIN = [
    {"role": "user", "content": " q \n"}, {"role": "assistant", "content": "<think>\nt\n</think>\n\nA"},
    {"role": "user", "content": "é👍"}, {"role": "assistant", "content": "B", "reasoning": "why", "name": None},
]  # fmt: skip
CALLING = [
    {"role": "system", "content": "be"}, {"role": "user", "content": "q"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "{\"x\": 1}"},
    {"role": "assistant", "content": "done"},
]  # fmt: skip
NAMES = (*templates.FAMILIES, "UPPER", "MARKED_WITHOUT_END")


def family(name: str) -> templates.Family:
    return templates.FAMILIES.get(name) or templates.Family(getattr(templates, name), ())


def of_transformers(source: str, messages: list[dict], **options) -> tuple[list, list]:
    from transformers.utils import chat_template_utils as theirs

    messages = theirs._normalize_chat_messages(messages)
    return theirs.render_jinja_template([messages], chat_template=source, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", [False, True], ids=["whole", "prompt"])
@pytest.mark.parametrize(("messages", "tools"), [(PLAIN, None), (CALLING, None), (CALLING, TOOLS)])
def test_the_text_is_that_of_transformers(name, prompt, messages, tools, monkeypatch):
    import datetime as real

    from transformers.utils import chat_template_utils as theirs

    monkeypatch.setattr(theirs, "datetime", type("Pinned", (), {"now": lambda: real.datetime(2026, 1, 31)}))
    found = family(name)
    ours = Template(found.source, found.specials, "2026-01-31")
    options = dict(tools=tools, add_generation_prompt=prompt, **found.specials)
    if ours.has_thinking_flag:
        options["enable_thinking"] = False
    try:
        (expected,), _ = of_transformers(found.source, messages, **options)
    except Exception:
        with pytest.raises(UserError, match="cannot render"):
            ours.render(normalised(messages), tools=tools, prompt=prompt)
    else:
        assert ours.render(normalised(messages), tools=tools, prompt=prompt) == expected


def test_thinking_is_switched_off_where_the_template_knows_the_flag():
    """R13."""
    thinking = Template(templates.SWITCHED_THINKING, {})
    assert thinking.has_thinking_flag and not Template(templates.MARKED, {}).has_thinking_flag
    assert thinking.render(PLAIN[:1], prompt=True).endswith("<think>\n\n</think>\n\n")
    assert thinking.render(PLAIN[:1], prompt=True, thinking=True).endswith("<|im_start|>assistant\n")


def test_marks_are_those_of_transformers():
    """T14."""
    (text,), (expected,) = of_transformers(templates.MARKED, PLAIN, return_assistant_tokens_mask=True)
    marked = Template(templates.MARKED, {}).marked(normalised(PLAIN), "\x01", "\x02")
    assert marked.replace("\x01", "").replace("\x02", "") == text
    assert [part.partition("\x02")[0] for part in marked.split("\x01")[1:]] == [text[s:e] for s, e in expected]
    assert Template(templates.MARKED, {}).marks_answers and not Template(templates.BRACKETS, {}).marks_answers


def test_a_clock_is_told_the_day_or_refused():
    with pytest.raises(UserError, match="reads the clock"):
        Template(templates.CLOCK, {}).render(PLAIN[:1])
    assert Template(templates.CLOCK, {}, "2026-01-31").render(PLAIN[:1]).startswith("31 Jan 2026<|user|>")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}", "{% set ns = namespace() %}{% set ns.__x = 1 %}",
        "{{ messages.append(1) }}", "{{ dict.__class__.__init__.__globals__ }}", "{{ 1 / 0 }}", "{{ none.x.y }}",
        "{% for x in range(10 ** 9) %}{% endfor %}", "{{ raise_exception('no') }}", "{% for %}", "{{ 'a' + 1 }}",
    ],
)  # fmt: skip
def test_what_a_template_may_not_do_or_cannot_is_one_clear_error(source):
    with pytest.raises(UserError, match="chat template"):
        Template(source, {}).render(PLAIN)
