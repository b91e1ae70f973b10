"""Rendering as transformers renders: the same text to the byte, for templates of every way."""

import pytest

from tests.data import templates
from training.core.errors import UserError
from training.tokenizer.template import CHATML, Template, render

MESSAGES = [
    {"role": "user", "content": " q \n"}, {"role": "assistant", "content": "<think>\nt\n</think>\n\nA"},
    {"role": "user", "content": "é👍"}, {"role": "assistant", "content": "B"},
]  # fmt: skip


@pytest.mark.parametrize("name", ["TOY_THINKING", "BRACKETS", "MODEL_TURNS", "SWITCHED_THINKING", "MARKED", "CHATML"])
@pytest.mark.parametrize("with_prompt", [False, True])
def test_the_text_is_that_of_transformers(name, with_prompt):
    from transformers.utils.chat_template_utils import render_jinja_template

    source = CHATML if name == "CHATML" else getattr(templates, name)
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=with_prompt, enable_thinking=False, **specials
    )
    assert Template(source, specials).render(MESSAGES, with_prompt=with_prompt) == expected


def test_marks_are_those_of_transformers():
    from transformers.utils.chat_template_utils import render_jinja_template

    _, (expected,) = render_jinja_template(
        [MESSAGES], chat_template=templates.MARKED, return_assistant_tokens_mask=True
    )
    assert Template(templates.MARKED, {}).marked(MESSAGES) == expected and len(expected) == 2


def test_a_prompt_ends_where_the_answer_begins():
    assert render(CHATML, MESSAGES[:1]) == "<|im_start|>user\n q \n<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_cannot_reach_out_of_its_sandbox():
    with pytest.raises(UserError, match="cannot render"):
        render("{{ messages.__class__.__mro__[1].__subclasses__() }}", MESSAGES)
