"""Records that are longer than the limit, made to fit: what was asked goes first, the oldest of it before the rest.

Owns the order (R14). A conversation loses the text of its oldest observations (tool turns; where there are none, user
turns), then the end of the latest one, then what users said beside tools; `[...]` stands where text was. An answer to
what is gone stays as context and is no label. A plain prompt loses its beginning. The last answer stays whole if it
can; else its first tokens stay, 96 of them or more, and no end of turn is invented (B21). What does not fit even so is
returned as it is, too long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from training.data.conversation import OBSERVING, Conversation

if TYPE_CHECKING:
    from training.data.supervised import Encoder

KEPT_ANSWER_TOKENS = 96
CUT = "[...]"
_MOST_TRIALS = 12


def shortened(
    encoder: Encoder, conversation: Conversation | None, ids: np.ndarray, trained: np.ndarray
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Ids and labels that fit, or that do not still, and whether the last answer's end is cut off."""
    limit = encoder.settings.seq_len
    if conversation is None:
        ids, trained = _without_start(encoder, ids, trained)
    else:
        fitting = _Fitting(encoder, conversation, ids, trained)
        fitting.fit()
        ids, trained = fitting.ids, fitting.trained
    if len(ids) <= limit:
        return ids, trained, False
    answer = _last_run(trained)
    if limit - answer.start >= min(KEPT_ANSWER_TOKENS, answer.stop - answer.start):
        return ids[:limit], trained[:limit], True
    return ids, trained, False


def _last_run(trained: np.ndarray) -> slice:
    """Where the last labels in a row lie."""
    stop = len(trained) - int(np.argmax(trained[::-1]))
    before = np.flatnonzero(trained[:stop] == 0)
    return slice(int(before[-1]) + 1 if len(before) else 0, stop)


def _without_start(encoder: Encoder, ids: np.ndarray, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Take the first tokens of a prompt away, behind the BOS."""
    has_bos = int(encoder.tokenizer.add_bos)
    prompt_end = int(np.argmax(trained)) if encoder.settings.loss_on != "all" else len(ids) - KEPT_ANSWER_TOKENS
    gone = slice(has_bos, has_bos + min(len(ids) - encoder.settings.seq_len, max(0, prompt_end - has_bos)))
    return np.delete(ids, gone), np.delete(trained, gone)


class _Fitting:
    """A conversation on its way to the limit, with what it is now as ids and labels."""

    def __init__(self, encoder: Encoder, conversation: Conversation, ids: np.ndarray, trained: np.ndarray):
        self._encoder, self._conversation, self._untrained = encoder, conversation, set()
        self.ids, self.trained = ids, trained

    @property
    def over(self) -> int:
        """Tokens above the limit."""
        return max(0, len(self.ids) - self._encoder.settings.seq_len)

    def fit(self) -> None:
        """Take text away in the order of what it is worth, until the rest fits or nothing is left to take."""
        before = self._conversation.messages[: self._conversation.answers[-1]] if self._conversation.answers else ()
        turns = {role: [index for index, one in enumerate(before) if one["role"] == role] for role in OBSERVING}
        observed = turns["tool"] or turns["user"]
        self._remove(observed[:-1])
        if observed:
            self._cut_end(observed[-1])
        self._remove([index for index in turns["user"] if index not in observed])

    def _remove(self, indices: list[int]) -> None:
        """Take whole texts, the first first."""
        texts = [self._conversation.messages[index].get("content") or "" for index in indices]
        sizes = [len(ids) for ids in self._encoder.tokenizer.encode_plain(texts)]
        left = list(zip(indices, sizes, strict=True))
        while left and self.over:
            saved, over = 0, self.over
            while left and saved < over:
                index, size = left.pop(0)
                saved += size
                self._conversation = self._conversation.with_content(index, CUT)
                self._untrained |= self._answers_to(index)
            self._encode()

    def _cut_end(self, index: int) -> None:
        content = self._encoder.tokenizer.encode_plain([self._conversation.messages[index].get("content") or ""])[0]
        kept = len(content)
        for _ in range(_MOST_TRIALS):
            if not self.over or not kept:
                return
            kept = max(0, kept - self.over)
            text = self._encoder.tokenizer.decode(content[:kept].tolist()).rstrip("\ufffd") + CUT
            self._conversation = self._conversation.with_content(index, text)
            self._encode()

    def _encode(self) -> None:
        self.ids, self.trained = self._encoder.encoded_conversation(self._conversation, frozenset(self._untrained))

    def _answers_to(self, observation: int) -> set[int]:
        """The answer that follows an observation, unless it is the last of all."""
        return set([index for index in self._conversation.answers[:-1] if index > observation][:1])
