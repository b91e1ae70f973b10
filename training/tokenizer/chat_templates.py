"""The chat templates that a tokenizer trained here can have, by name: the Jinja source and the tokens that it writes.

None writes BOS: the server puts it in front of what a template renders, and training does the same. Every turn ends
with a token that llama.cpp knows by its text as the end of an answer.
"""

from dataclasses import dataclass

from training.core.errors import UserError

DEFAULT = "chatml"


@dataclass(frozen=True)
class ChatTemplate:
    """`specials` are the control tokens that `source` writes; an empty source means that there is no template."""

    specials: tuple[str, ...]
    source: str


_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LLAMA_3 = (
    "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' "
    "+ message['content'] + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

TEMPLATES = {
    "chatml": ChatTemplate(("<|im_start|>", "<|im_end|>"), _CHATML),
    "llama-3": ChatTemplate(("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), _LLAMA_3),
    "none": ChatTemplate((), ""),
}


def named(name: str) -> ChatTemplate:
    """Return a template. Raises UserError listing the known ones."""
    if name not in TEMPLATES:
        raise UserError(
            "no such chat template",
            where="--chat-template",
            found=repr(name),
            expected="one of " + ", ".join(TEMPLATES),
        )
    return TEMPLATES[name]
