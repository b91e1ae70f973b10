"""A question as the ids that a model reads: rendered by the tokenizer's template, as training and the server do it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from training.data.chat import Renderer
from training.data.conversation import Conversation
from training.evaluation.exam import Question
from training.tokenizer.artifact import Tokenizer
from training.tokenizer.template import normalised, of_tokenizer

_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "</s>", "<EOT>")
"""Tokens that llama.cpp takes as the end of an answer by their text (`src/llama-vocab.cpp`)."""


@dataclass(frozen=True)
class Asked:
    """A question as a model reads it: its ids, and those of each of its options."""

    question: Question
    ids: list[int]
    options: list[list[int]]

    @property
    def num_tokens(self) -> int:
        """The ids of the question with its longest option."""
        return len(self.ids) + max(map(len, self.options), default=0)


class Prompts:
    """Renders questions for one tokenizer.

    Args:
        date: what a template that asks for the day is told; None refuses such a template.
    """

    def __init__(self, tokenizer: Tokenizer, date: str | None = None):
        self.tokenizer, self._date = tokenizer, date

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(of_tokenizer(self.tokenizer, self._date), list(self.tokenizer.specials))

    def text(self, question: Question) -> str:
        """The text up to where the answer begins. Raises UserError where the template refuses it, or there is none."""
        if question.messages is None:
            return question.prompt
        messages = tuple(normalised(question.messages))
        tools = [*question.tools] if question.tools else None
        return self._renderer.prompt(Conversation(messages, tools, len(messages)))

    def asked(self, questions: Sequence[Question]) -> list[Asked]:
        """The ids of questions, BOS in front where the tokenizer wants it.

        An option is encoded apart from its question, as an answer is in training.
        """
        texts = [self.tokenizer.with_bos(self.text(question)) for question in questions]
        return [
            Asked(question, ids.tolist(), [one.tolist() for one in self.tokenizer.encode_plain([*question.options])])
            for question, ids in zip(questions, self.tokenizer.encode_rendered(texts), strict=True)
        ]

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end an answer."""
        specials = self.tokenizer.specials
        return frozenset({self.tokenizer.eos_id, *(specials[text] for text in _ENDS if text in specials)})

    def answer(self, ids: Sequence[int]) -> str:
        """The text of an answer's ids; its control tokens are no part of it."""
        controls = set(self.tokenizer.specials.values())
        return self.tokenizer.decode([one for one in ids if one not in controls]).replace(
            "\N{REPLACEMENT CHARACTER}", ""
        )
