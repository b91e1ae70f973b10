"""A chat template rendered as transformers renders it, to the byte: the same sandbox, extension, filter and globals.

Owns the environment and what a template may ask of it. The clock is no part of it: a template that asks for the date
gets a pinned one or is refused. Source: transformers `utils/chat_template_utils.py` (5.24), which the tests compare
with; its own function reads the clock, and needs the whole library.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from training.core.errors import TrainyardError, UserError
from training.core.report import again

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_FLAG = "enable_thinking"
Span = tuple[int, int]


class Unrenderable(UserError):
    """A conversation that a template does not take."""


@dataclass(frozen=True)
class Template:
    """A template with what it is rendered with.

    Args:
        source: its Jinja.
        specials: `bos_token`, `eos_token` and the like, as text; an absent one is undefined in the template.
        date: `YYYY-MM-DD`, what a template that reads the clock is told; None refuses such a one.
    """

    source: str
    specials: Mapping[str, str]
    date: str | None = None

    @cached_property
    def _environment(self):
        return _environment(self.date)

    @cached_property
    def _parsed(self):
        import jinja2

        try:
            return self._environment.parse(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            # Not Unrenderable: the fault is in no record, and leaving records out would hide it.
            raise UserError(
                "the chat template is no Jinja", where="the chat template", found=error, expected="a template"
            ) from error

    @cached_property
    def _compiled(self):
        return self._environment.from_string(self._parsed)

    @cached_property
    def has_thinking_flag(self) -> bool:
        """Whether it reads `enable_thinking`, by which thinking is switched off."""
        from jinja2 import meta

        return _FLAG in meta.find_undeclared_variables(self._parsed)

    @cached_property
    def marks_answers(self) -> bool:
        """Whether it says itself, by `{% generation %}`, which text an assistant generates."""
        return self._parsed is not None and self._environment.generation.is_used

    def render(
        self, messages: Sequence[dict], *, tools: Sequence[dict] | None = None, prompt: bool = False,
        thinking: bool = False,
    ) -> str:  # fmt: skip
        """The text of a conversation.

        Args:
            messages: as `normalised` gives them.
            prompt: end it where the server would let an answer begin.
            thinking: leave thinking as the template has it by itself; False switches it off where there is the flag.

        Raises Unrenderable where the template refuses or fails.
        """
        flags = {_FLAG: False} if self.has_thinking_flag and not thinking else {}
        try:
            return self._compiled.render(
                **self.specials, **flags, messages=list(messages), tools=tools, documents=None,
                add_generation_prompt=prompt,
            )  # fmt: skip
        except TrainyardError:
            raise
        except Exception as error:  # a template is a program: what it does with a value can fail in any way
            raise Unrenderable(
                "the chat template cannot render a conversation", where="the chat template",
                found=str(error) or type(error).__name__, expected="roles and fields as the template takes them",
            ) from error  # fmt: skip

    def marked(self, messages: Sequence[dict], opening: str, closing: str, **options: object) -> str:
        """`render`, with two texts around everything that the template's own marks call generated."""
        self._environment.generation.around = (opening, closing)
        try:
            return self.render(messages, **options)
        finally:
            self._environment.generation.around = ("", "")


def normalised(messages: Sequence[dict]) -> list[dict]:
    """Messages as transformers hands them to a template: no absent fields, and reasoning under the names in use."""
    result = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None}
        reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        result.append(message)
    return result


def of_tokenizer(tokenizer, date: str | None = None) -> Template:
    """A tokenizer's own template. Raises UserError where it has none."""
    if tokenizer.chat_template is None:
        raise UserError(
            "the tokenizer has no chat template", where=tokenizer.folder, found="no chat_template.jinja",
            expected="a template for conversations",
            next_command='make tokenizer-train DATASET=stdlib ARGS="--chat-template chatml"',
        )  # fmt: skip
    return Template(tokenizer.chat_template, specials_of(tokenizer), date)


def specials_of(tokenizer) -> dict[str, str]:
    """A tokenizer's `bos_token`, `eos_token` and `pad_token`, those that it has, as templates name them."""
    return {f"{role}_token": text for role, text in tokenizer.roles.items() if text is not None}


def _environment(date: str | None):
    """The sandbox of transformers, with a date in the place of its clock; `generation` is the extension's state."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %} ... {% endgeneration %}`: what stands between is what an assistant generates."""

        tags = {"generation"}

        def __init__(self, environment):
            super().__init__(environment)
            self.around, self.is_used = ("", ""), False
            environment.generation = self

        def parse(self, parser):
            self.is_used = True
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_wrapped"), [], [], body).set_lineno(line)

        def _wrapped(self, caller):
            opening, closing = self.around
            return opening + caller() + closing

    class Namespace(jinja2.utils.Namespace):
        """One that stores no name of the interpreter's own."""

        def __init__(*args, **kwargs):
            self, args = args[0], args[1:]
            values = dict(*args, **kwargs)
            for name in values:
                Namespace.require_plain(name)
            jinja2.utils.Namespace.__init__(self, values)

        def __setitem__(self, name, value):
            Namespace.require_plain(name)
            super().__setitem__(name, value)

        @staticmethod
        def require_plain(name):
            if isinstance(name, str) and name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a template cannot store {name!r} on a namespace")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse, "strftime_now": _clock(date), "dict": _Dict(), "namespace": Namespace
    }  # fmt: skip
    return environment


class _Dict:
    """`dict` for templates, without a class to climb from."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message):
    import jinja2

    raise jinja2.TemplateError(message)


def _clock(date: str | None):
    def strftime_now(form):
        if date is None:
            raise UserError(
                "the chat template reads the clock", where="the chat template", found="strftime_now",
                expected="a pinned date, so that the same records give the same tokens",
                next_command=again("data.template_date=2026-01-31"),
            )  # fmt: skip
        return datetime.datetime.fromisoformat(date).strftime(form)

    return strftime_now
