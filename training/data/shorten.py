"""Records that are longer than the limit, made to fit: what was asked goes first, the oldest of it before the rest.

Owns the order (R14). A conversation loses, of each as little as it needs and the oldest first: the text of its
observations (tool turns; where there are none, user turns) but the latest; the exchanges in which nothing is trained
any more, whole; the end of the latest observation; what users said beside tools; other exchanges, whole; the text of
earlier answers. `[...]` stands where text was. An answer to what is gone, or without its text, is context and no label.
The latest observation may be what was asked, with the question at its end: QUESTION_CUT says that some of it is gone.
A plain prompt loses its beginning. The last answer stays whole if it can; else its first tokens stay, 96 of them or
more, and no end of turn is invented (B21). What does not fit even so is returned as it is, too long.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from training.data.conversation import ANSWERING, OBSERVING, Conversation

if TYPE_CHECKING:
    from training.data.supervised import Encoder

ANSWER_CUT, QUESTION_CUT = "answer_cut", "question_cut"
"""What a shortened record may have lost besides what is old."""
KEPT_ANSWER_TOKENS = 96
CUT = "[...]"
_MOST_TRIALS = 12


def shortened(
    encoder: Encoder, said: Conversation | str, ids: np.ndarray, trained: np.ndarray
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Ids and labels that fit, or that do not still, and which of ANSWER_CUT and QUESTION_CUT has come of it.

    Args:
        said: the conversation; the completion alone of a record of plain texts.
    """
    limit, cuts = encoder.settings.seq_len, ()
    if isinstance(said, str):
        ids, trained = _without_start(encoder, said, ids, trained)
        start = _last_run(trained)
    else:
        fitting = _Fitting(encoder, said, ids, trained)
        fitting.fit()
        ids, trained, cuts = fitting.ids, fitting.trained, (QUESTION_CUT,) * fitting.cuts_the_question
        start = fitting.answer_start
    if len(ids) > limit and limit - start >= min(KEPT_ANSWER_TOKENS, len(ids) - start):
        return ids[:limit], trained[:limit], (*cuts, ANSWER_CUT)
    return ids, trained, cuts


def _last_run(trained: np.ndarray) -> int:
    """Where the last labels begin, behind which nothing is kept; the end where there are none."""
    before = np.flatnonzero(trained == 0)
    return int(before[-1]) + 1 if len(before) else 0


def _without_start(
    encoder: Encoder, completion: str, ids: np.ndarray, trained: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Take the first tokens of a prompt away, behind the BOS."""
    first = int(encoder.tokenizer.add_bos)
    num_answer = len(encoder.tokenizer.encode_plain([completion])[0]) + 1  # the EOS
    gone = slice(first, min(first + len(ids) - encoder.settings.seq_len, len(ids) - num_answer))
    ids, trained = np.delete(ids, gone), np.delete(trained, gone)
    trained[:1] = 0  # nothing before it predicts it any more
    return ids, trained


@dataclass(frozen=True)
class _Cuts:
    """What is taken of a conversation, by the numbers of its messages.

    Args:
        texts: what stands in the place of a message's own text.
        gone: messages that are left out.
        context: answers that are no labels.
    """

    texts: dict[int, str] = field(default_factory=dict)
    gone: frozenset[int] = frozenset()
    context: frozenset[int] = frozenset()


class _Fitting:
    """A conversation on its way to the limit, with what it is now as ids and labels."""

    def __init__(self, encoder: Encoder, conversation: Conversation, ids: np.ndarray, trained: np.ndarray):
        self._encoder, self._conversation, self._cuts = encoder, conversation, _Cuts()
        self.ids, self.trained = ids, trained

    @property
    def over(self) -> int:
        """Tokens above the limit."""
        return max(0, len(self.ids) - self._encoder.settings.seq_len)

    @property
    def cuts_the_question(self) -> bool:
        """Whether text of the latest user's turn is gone, though its answer is trained."""
        asked = [index for index in range(len(self._messages)) if self._messages[index]["role"] == "user"]
        return bool(asked) and (asked[-1] in self._cuts.texts or asked[-1] in self._cuts.gone)

    @property
    def answer_start(self) -> int:
        """Tokens before the last answer, by the text where they are labels too; all of them where nobody answers."""
        if self._encoder.settings.loss_on != "all":
            return _last_run(self.trained)
        tokenizer = self._encoder.tokenizer
        rendered = self._encoder.renderer.render(self._conversation.cut(self._cuts.texts, self._cuts.gone))
        before = rendered.text[: rendered.spans[-1][0] if rendered.spans else None]
        return len(tokenizer.encode_rendered([tokenizer.with_bos(before)])[0])

    def fit(self) -> None:
        """Take text away in the order of what it is worth, until the rest fits or nothing is left to take."""
        messages, answers = self._conversation.messages, self._conversation.answers
        before = range(answers[-1] if answers else 0)
        turns = {role: [index for index in before if messages[index]["role"] == role] for role in OBSERVING}
        observed = turns["tool"] or turns["user"]
        if not observed:
            return
        self._fewest([[index] for index in observed[:-1]], self._without_texts)
        steps = self._steps(observed[-1])
        self._fewest([step for step in steps if self._cuts.context.issuperset(self._answers_in(step))], self._without)
        self._cut_end(observed[-1])
        self._fewest([[index] for index in turns["user"] if index not in observed], self._without_texts)
        self._fewest([step for step in steps if self._cuts.gone.isdisjoint(step)], self._without)
        self._fewest([[index] for index in answers[:-1] if index not in self._cuts.gone], self._without_answers)

    def _steps(self, page: int) -> list[list[int]]:
        """What was said before anybody looked at a page, in parts that can go whole, the oldest first.

        Exchanges, each from a user's turn to the next; of the last one the steps, an answer and what tools say to it.
        """
        roles = [message["role"] for message in self._conversation.messages[: page + 1]]
        users = [index for index, role in enumerate(roles) if role == "user"]
        said = [index for index in range(max(users, default=0), page) if roles[index] == ANSWERING]
        return [list(range(*ends)) for starts in (users, said) for ends in pairwise(starts)]

    # ---- taking

    def _fewest(self, parts: list[list[int]], taken: Callable[[_Cuts, list[int]], _Cuts]) -> None:
        """Take as few parts as it needs, the first first; all of them where even that is not enough.

        The number is guessed by the texts' lengths and found by trials around the guess, each further off than the
        one before, so that a conversation of any length is rendered a few times.
        """
        if not (parts and self.over):
            return
        start, low, high, step = self._cuts, 0, len(parts) + 1, 1
        middle, states = self._guess(parts), {}
        while high - low > 1:
            self._use(taken(start, [index for part in parts[:middle] for index in part]))
            states[middle] = self._cuts, self.ids, self.trained
            low, high = (middle, high) if self.over else (low, middle)
            middle = low + step if self.over else high - step
            step *= 2
            if not low < middle < high:
                middle = (low + high) // 2
        self._cuts, self.ids, self.trained = states[min(high, len(parts))]

    def _guess(self, parts: list[list[int]]) -> int:
        saved = np.cumsum([sum(max(1, self._sizes[index] - self._sizes[-1]) for index in part) for part in parts])
        return min(len(parts), int(np.searchsorted(saved, self.over)) + 1)

    @cached_property
    def _sizes(self) -> list[int]:
        """Tokens of each message's own texts, and at the end those of what stands where text was."""
        texts = [(one.get("reasoning_content") or "") + (one.get("content") or "") for one in self._messages]
        return [len(ids) for ids in self._encoder.tokenizer.encode_plain([*texts, CUT])]

    @property
    def _messages(self) -> tuple[dict, ...]:
        return self._conversation.messages

    def _use(self, cuts: _Cuts) -> None:
        self._cuts = cuts
        kept = [index for index in range(len(self._messages)) if index not in cuts.gone]
        context = frozenset(place for place, index in enumerate(kept) if index in cuts.context)
        self.ids, self.trained = self._encoder.encoded_conversation(
            self._conversation.cut(cuts.texts, cuts.gone), context
        )

    # ---- what can be taken

    def _without_texts(self, cuts: _Cuts, indices: list[int]) -> _Cuts:
        """Without these texts, but for those that are as short as what would stand there; answers to them are context.

        The last answer of all stays a label.
        """
        longer = [index for index in indices if self._sizes[index] > self._sizes[-1]]
        answers = self._conversation.answers[:-1]
        places = (bisect.bisect_right(answers, index) for index in longer)
        context = cuts.context.union(answers[place] for place in places if place < len(answers))
        return replace(cuts, texts=cuts.texts | dict.fromkeys(longer, CUT), context=context)

    def _without_answers(self, cuts: _Cuts, indices: list[int]) -> _Cuts:
        return replace(cuts, texts=cuts.texts | dict.fromkeys(indices, CUT), context=cuts.context.union(indices))

    def _without(self, cuts: _Cuts, indices: list[int]) -> _Cuts:
        return replace(cuts, gone=cuts.gone.union(indices))

    def _answers_in(self, step: list[int]) -> list[int]:
        return [index for index in step if self._messages[index]["role"] == ANSWERING]

    def _cut_end(self, index: int) -> None:
        """Take the end of a text, as little of it as it needs."""
        [content] = self._encoder.tokenizer.encode_plain([self._messages[index].get("content") or ""])
        kept = len(content)
        for _ in range(_MOST_TRIALS):
            if not self.over or not kept:
                return
            kept = max(0, kept - self.over)
            text = self._encoder.tokenizer.decode(content[:kept].tolist()).rstrip("\ufffd") + CUT
            self._use(replace(self._cuts, texts=self._cuts.texts | {index: text}))
