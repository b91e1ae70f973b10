"""Is the served model the exported one, and does the server read a prompt as training did?

The fingerprint's tolerance is 0.1 nats: the same file on the same build and machine gives the same bits, another back
end or thread count moves a log-probability by a few hundredths (the f16 cache alone costs up to 0.02), and another
model, or the same one with a row out of place, by whole nats. The likeliest token must agree, unless the
manifest's first two lie closer together than the tolerance can tell.
"""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from training.core.errors import IntegrityError, RunError, UserError
from training.llamacpp.client import Client
from training.serving.prompts import Prompt

if TYPE_CHECKING:
    from training.tokenizer.artifact import Tokenizer

TOLERANCE_NATS = 0.1
_ASKED_TOP = 40


def require_same_model(client_says: dict, manifest: dict, path: Path, next_command: str) -> None:
    """Hold what the server says that it has loaded against the manifest. Raises IntegrityError."""
    for part in ("parameters", "vocab_size"):
        if client_says[part] != manifest[part]:
            raise IntegrityError(
                f"the server has loaded another model: its {part} is not the manifest's",
                where=path,
                found=client_says[part],
                expected=manifest[part],
                next_command=next_command,
            )


def compare_fingerprint(client: Client, fingerprint: dict, next_command: str | None = None) -> dict:
    """Hold the server's log-probabilities against the manifest's: `{"max_nats", "tolerance_nats", "top1_agree", ...}`.

    Raises IntegrityError where they differ by more than the tolerance.
    """
    largest, agree = 0.0, 0
    for number, prompt in enumerate(fingerprint["prompts"]):
        expected = prompt["top"]
        answer = client.top_logprobs(prompt["ids"], _ASKED_TOP)
        found = dict(answer)
        differences = [abs(found[token] - value) if token in found else float("inf") for token, value in expected]
        largest = max(largest, *differences)
        same_top = answer[0][0] == expected[0][0]
        agree += same_top
        near_tie = expected[0][1] - expected[1][1] <= 2 * TOLERANCE_NATS
        if max(differences) > TOLERANCE_NATS or not (same_top or near_tie):
            raise IntegrityError(
                f"the served model is not the exported one: prompt {number + 1} of its fingerprint differs",
                found=_shown(answer[: len(expected)]),
                expected=f"{_shown(expected)}, within {TOLERANCE_NATS} nats",
                next_command=next_command,
            )
    num_prompts = len(fingerprint["prompts"])
    return {
        "max_nats": largest, "tolerance_nats": TOLERANCE_NATS, "top1_agree": agree, "num_prompts": num_prompts
    }  # fmt: skip


def _shown(top: Sequence[Sequence]) -> str:
    return " ".join(f"{token}:{value:.3f}" for token, value in top)


def compare_prompt_ids(
    client: Client, prompts: Sequence[Prompt], tokenizer: "Tokenizer | None", template: str | None
) -> list[dict]:
    """The ids of each prompt as the server reads it and as training made it: `{"name", "num_tokens", "compared"}`.

    A conversation is rendered here by `template`, the one that training used; where it had none, the server's own text
    is taken. Without a tokenizer nothing is compared. Raises RunError, with the first position that differs, before any
    answer is judged: a prompt that is read differently makes a good model look bad.
    """
    results = []
    for prompt in prompts:
        text = prompt.text if prompt.text is not None else client.apply_template(prompt.messages)
        served = client.tokenize(text, add_special=True, parse_special=True)
        if tokenizer is not None:
            trained = _render(template, prompt.messages, tokenizer) if template and prompt.messages else text
            _require_same(prompt.name, served, tokenizer.encode(trained), tokenizer)
        results.append({"name": prompt.name, "num_tokens": len(served), "compared": tokenizer is not None})
    return results


def _render(source: str, messages: Sequence[dict], tokenizer: "Tokenizer") -> str:
    """A conversation up to its answer as the server renders it: on the day that it is, without a word about thinking.

    Raises IntegrityError where the template that a model brings cannot be rendered.
    """
    from training.tokenizer.template import Template, normalised, specials_of

    template = Template(source, specials_of(tokenizer), datetime.date.today().isoformat())
    try:
        return template.render(normalised(messages), prompt=True, thinking=True)
    except UserError as error:
        raise IntegrityError(
            "the chat template of training cannot be rendered", found=error.found, expected="a Jinja template",
            next_command="make export-gguf CHECKPOINT=latest ARGS=--force",
        ) from error  # fmt: skip


def _require_same(name: str, served: list[int], trained: list[int], tokenizer: "Tokenizer") -> None:
    if served == trained:
        return
    pairs = enumerate(zip(served, trained, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(served), len(trained)))
    raise RunError(
        f"the server reads the prompt {name!r} otherwise than training did, from position {position} on",
        found=_around(served, position, tokenizer),
        expected=f"{_around(trained, position, tokenizer)}, by {tokenizer.name}",
        next_command="make export-gguf CHECKPOINT=latest ARGS=--force",
    )


def _around(ids: list[int], position: int, tokenizer: "Tokenizer") -> str:
    """`ids [7, 9] of 12, 'ab'`: the next few from the position on, and their text."""
    shown = ids[position : position + 6]
    return f"ids {shown} of {len(ids)}, {tokenizer.decode(shown)!r}"
