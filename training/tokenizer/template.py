"""A chat template rendered as transformers renders it: the same sandbox, extensions and globals, by its own function.

Owns what goes in: the names of BOS and EOS, thinking switched off where the template knows the flag (R13), and no
clock: a template that asks for the date gets a stated one or is refused. Marks of `{% generation %}` are kept.
"""

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from training.core.errors import UserError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CLOCK = "strftime_now"


@dataclass(frozen=True)
class Template:
    """A template with what it is rendered with.

    Args:
        source: its Jinja.
        specials: `bos_token` and `eos_token`, as text; an absent one is undefined in the template.
        date: `YYYY-MM-DD`, what a template that reads the clock is told; None refuses such a one.
    """

    source: str
    specials: Mapping[str, str]
    date: str | None = None

    @cached_property
    def _compiled(self):
        # Its public function reads the clock and takes no other; the environment is the same.
        from transformers.utils.chat_template_utils import _compile_jinja_template

        if _CLOCK in self.source and self.date is None:
            raise UserError(
                "the chat template reads the clock", where="the chat template", found=_CLOCK,
                expected="a pinned date, so that the same records give the same tokens",
                next_command="the same command with data.template_date=2026-01-31 in ARGS",
            )  # fmt: skip
        return _compile_jinja_template(self.source)

    @property
    def marks_answers(self) -> bool:
        """Whether the template says itself which text an assistant generates."""
        return re.search(r"\{%-?\s*generation\b", self.source) is not None

    def render(self, messages: Sequence[dict], *, with_prompt: bool = False, **variables: object) -> str:
        """The text of a conversation; `with_prompt` ends it where an answer begins. Raises UserError."""
        import jinja2

        try:
            return self._compiled.render(
                **self._variables | variables, messages=list(messages), add_generation_prompt=with_prompt
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise UserError(
                "the chat template cannot render a conversation", where="the chat template", found=error,
                expected="roles in the order that the template takes",
            ) from error  # fmt: skip

    def marked(self, messages: Sequence[dict]) -> list[tuple[int, int]]:
        """The spans of the text that `render` gives which the template's own marks call generated."""
        blocks: list[str] = []
        spans: list[tuple[int, int]] = []
        with self._compiled.environment.activate_tracker(blocks, spans):
            for block in self._compiled.generate(
                **self._variables, messages=list(messages), add_generation_prompt=False
            ):
                blocks.append(block)
        return spans

    @cached_property
    def _variables(self) -> dict:
        variables = {**self.specials, "tools": None, "documents": None}
        if "enable_thinking" in self.source:
            variables["enable_thinking"] = False
        if self.date is not None:
            variables[_CLOCK] = datetime.datetime.fromisoformat(self.date).strftime
        return variables


def render(template: str, messages: Sequence[dict], specials: Mapping[str, str] | None = None) -> str:
    """The text of a conversation up to the answer. Raises UserError where the template cannot be rendered."""
    from training.tokenizer.artifact import BOS, EOS

    named = {"bos_token": BOS, "eos_token": EOS} if specials is None else specials
    return Template(template, named).render(messages, with_prompt=True)
