"""A chat template rendered as training renders it: Jinja in a sandbox, a prompt that ends where the answer begins.

Source: transformers `utils/chat_template_utils.py` (the environment's options and globals).
"""

from collections.abc import Sequence

from training.core.errors import IntegrityError
from training.tokenizer.artifact import BOS, EOS


def render(template: str, messages: Sequence[dict]) -> str:
    """The text of a conversation up to the answer. Raises IntegrityError where the template cannot be rendered."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    options = {"trim_blocks": True, "lstrip_blocks": True, "extensions": ["jinja2.ext.loopcontrols"]}
    environment = ImmutableSandboxedEnvironment(**options)
    environment.globals["raise_exception"] = refuse
    try:
        compiled = environment.from_string(template)
        return compiled.render(messages=list(messages), add_generation_prompt=True, bos_token=BOS, eos_token=EOS)
    except jinja2.TemplateError as error:
        raise IntegrityError(
            "the chat template of training cannot be rendered", found=error, expected="a Jinja template",
            next_command="make export-gguf CHECKPOINT=latest ARGS=--force",
        ) from error  # fmt: skip
