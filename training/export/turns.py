"""Which token ends an answer: what a chat template writes behind it, as training has learnt it.

Owns the conversations that an export is proved on, as the checkpoint's template renders them.
llama.cpp stops at EOS and at the ends of turns that it knows by their text; an end that it does not know must be
written into the file, or the served model talks on (B56).
"""

import contextlib
import datetime
from typing import TYPE_CHECKING

from training.core.errors import UserError
from training.tokenizer.template import Template, normalised

if TYPE_CHECKING:
    from training.export.checkpoint import Checkpoint

_ANSWER = "Yes, 12345."
CONVERSATIONS = (
    ({"role": "user", "content": "What is 12345 + 678?"},),
    ({"role": "user", "content": "Don't answer:\n\n  it's 1234567!\r\n\tOK?"},
     {"role": "assistant", "content": _ANSWER},
     {"role": "user", "content": "caf\u00e9 \u4f60\u597d \U0001f44d\u200d\U0001f680"}),
    ({"role": "system", "content": "You are brief.\n"}, {"role": "user", "content": " a  b   c "}),
    ({"role": "user", "content": ""}, {"role": "assistant", "content": "\n\n" + _ANSWER},
     {"role": "user", "content": "<|not_a_token|> {{ 7*7 }}"}),
)  # fmt: skip
"""What is rendered on both sides: turns, blanks, digits, no content, and text that looks like a template's."""
_DATE = "2026-01-31"


def template_of(checkpoint: "Checkpoint", date: str = _DATE) -> Template:
    """The checkpoint's own template with the texts of its special tokens."""
    specials = {f"{role}_token": checkpoint.special_text(role) for role in ("bos", "eos", "pad")}
    return Template(checkpoint.chat_template, {name: text for name, text in specials.items() if text}, date)


def rendered(checkpoint: "Checkpoint", date: str = _DATE) -> list[tuple[tuple[dict, ...], str]]:
    """Each conversation that the template takes, with its text up to where an answer begins; none without one."""
    if checkpoint.chat_template is None:
        return []
    template, found = template_of(checkpoint, date), []
    for conversation in CONVERSATIONS:
        with contextlib.suppress(UserError):  # a template may refuse a role
            found.append((conversation, template.render(normalised(conversation), prompt=True, thinking=True)))
    return found


def end_of_turn(checkpoint: "Checkpoint") -> int | None:
    """The id of the first special token behind a rendered answer; None without a template, or where there is none."""
    if checkpoint.chat_template is None:
        return None
    asked = {"role": "user", "content": "Is it so?"}
    try:
        text = template_of(checkpoint).render(normalised([asked, {"role": "assistant", "content": _ANSWER}]))
    except UserError:
        return None  # a template that takes no such conversation ends no such answer
    behind = text.rpartition(_ANSWER)[2]
    specials = set(checkpoint.encoder.get_added_tokens_decoder())
    ids = checkpoint.encoder.encode(behind, add_special_tokens=False).ids
    return next((one for one in ids if one in specials), None)


def today() -> str:
    """The day that a server would tell a template."""
    return datetime.date.today().isoformat()
