"""Questions put to a GGUF file through llama.cpp's server: the same ids, the same greedy answers, by the API.

The server is a private one that dies with this process. Before an answer is asked for, the ids that the server makes of
the question are held against those that training makes (B68): a prompt that is read differently makes a good model
look bad.
"""

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator, Sequence

from training.core import paths
from training.core.errors import RunError, UserError
from training.evaluation.rendering import Asked, Prompts
from training.evaluation.subject import Subject
from training.llamacpp.client import Client
from training.llamacpp.server import ServerProcess

HEALTH_SECONDS = 180.0
_ANSWER_SECONDS = 600.0
_ROUND = 256
_LIKELIEST = 512


def arguments(subject: Subject, longest_prompt: int, max_answer_tokens: int) -> dict:
    """The server's arguments for an exam; they are part of a score's conditions."""
    from training.llamacpp import gguf_header

    header = gguf_header.read(subject.path)
    most = int(header.values.get(f"{header.value('general.architecture')}.context_length", 4096))
    wanted = -(-(longest_prompt + max_answer_tokens + 1) // _ROUND) * _ROUND
    return {
        "ctx_size": min(wanted, most), "slots": 1, "threads": len(os.sched_getaffinity(0)),
        "version": f"xllamacpp {importlib.metadata.version('xllamacpp')}",
    }  # fmt: skip


@contextlib.contextmanager
def serving(subject: Subject, server: dict) -> Iterator[str]:
    """The address of a server of the file while the block runs. Raises RunError where it does not come up."""
    log = paths.roots().cache / "logs" / f"evaluate-{os.getpid()}.log"
    settings = {key: server[key] for key in ("ctx_size", "slots", "threads")}
    with ServerProcess.start(subject.path, log=log, **settings) as process:
        process.wait_healthy(HEALTH_SECONDS)
        yield process.url
    log.unlink(missing_ok=True)


@contextlib.contextmanager
def answering(
    subject: Subject, server: dict, prompts: Prompts, asked: Sequence[Asked], max_answer_tokens: int
) -> Iterator["ServedAnswerer"]:
    """What asks a server of the file while the block runs; every question is read as training reads it.

    Raises RunError where the server does not come up, or reads a question otherwise.
    """
    with serving(subject, server) as url:
        client = Client(url, timeout_seconds=_ANSWER_SECONDS)
        answerer = ServedAnswerer(client, prompts, max_answer_tokens, server["ctx_size"])
        for one in asked:
            answerer.require_same_ids(one)
        yield answerer


class ServedAnswerer:
    """Asks a server, question by question; as `answering.Answerer` is asked."""

    def __init__(self, client: Client, prompts: Prompts, max_answer_tokens: int, context_tokens: int):
        self.client, self.prompts = client, prompts
        self.max_answer_tokens, self.context_tokens = max_answer_tokens, context_tokens

    def require_same_ids(self, asked: Asked) -> None:
        """Raise RunError, with the first position that differs, where the server reads a question otherwise."""
        question, ids = asked.question, asked.ids
        if question.tools:
            return
        text = question.prompt
        if question.messages is not None:
            text = self.client.apply_template(question.messages)
        served = self.client.tokenize(text, add_special=True, parse_special=True)
        if served == ids:
            return
        pairs = enumerate(zip(served, ids, strict=False))
        place = next((at for at, (one, other) in pairs if one != other), min(len(served), len(ids)))
        raise RunError(
            f"the server reads a question otherwise than training did, from position {place} on",
            where=f"question {question.id}", found=f"ids {served[place : place + 6]} of {len(served)}",
            expected=f"ids {ids[place : place + 6]} of {len(ids)}, by {self.prompts.tokenizer.name}",
            next_command="make export-gguf CHECKPOINT=latest ARGS=--force",
        )  # fmt: skip

    def answers(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[int]]]:
        """Yield each prompt's number and the ids of its answer, without the one that ended it, in their order.

        A prompt that leaves no room in the context has no answer.
        """
        for number, ids in enumerate(prompts):
            if len(ids) >= self.context_tokens:
                yield number, []
                continue
            found = self.client.completion(ids, max_tokens=self.max_answer_tokens)
            yield number, [one for one in found.get("tokens", []) if one not in self.prompts.stop_ids]

    def logprobs(self, prompt: Sequence[int], options: Sequence[Sequence[int]]) -> list[float]:
        """The log-probability in nats of each option after the prompt."""
        return [sum(self.client.given_logprobs(prompt, option) or self._one_by_one(prompt, option))
                for option in options]  # fmt: skip

    def _one_by_one(self, prompt: Sequence[int], option: Sequence[int]) -> Iterator[float]:
        for place, token in enumerate(option):
            before = [*prompt, *option[:place]]
            for top in (_LIKELIEST, self.prompts.tokenizer.vocab_size):
                found = dict(self.client.top_logprobs(before, top, reuse=True))
                if token in found:
                    break
            else:
                raise UserError("the server does not know an option's token", found=token,
                                expected="one of its vocabulary")  # fmt: skip
            yield found[token]
