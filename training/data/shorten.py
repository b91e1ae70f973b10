"""Records that are longer than the limit, made to fit: what was asked goes first, the oldest of it before the rest.

Owns the order (R14). A conversation loses the text of its oldest observations, tool turns before user turns, then the
end of the latest one; `[...]` stands where text was. An answer to what is gone stays as context and is no label. A
plain prompt loses its beginning. The last answer stays whole if it can; else its first tokens stay, 96 of them or
more, and no end of turn is invented (B21). What does not fit even so is returned as it is, too long.
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
        ids, trained = _without_observations(encoder, conversation, ids, trained)
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


def _without_observations(
    encoder: Encoder, conversation: Conversation, ids: np.ndarray, trained: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    limit, untrained = encoder.settings.seq_len, set()
    observed = _observations(conversation)
    texts = [conversation.messages[index].get("content") or "" for index in observed]
    sizes = dict(zip(observed, map(len, encoder.tokenizer.encode_plain(texts)), strict=True))
    *oldest, latest = observed or [None]
    while oldest and len(ids) > limit:
        over = len(ids) - limit
        while oldest and over > 0:
            index = oldest.pop(0)
            over -= sizes[index]
            conversation = conversation.with_content(index, CUT)
            untrained |= _answers_to(conversation, index)
        ids, trained = encoder.encoded_conversation(conversation, frozenset(untrained))
    if len(ids) <= limit or latest is None:
        return ids, trained
    content = encoder.tokenizer.encode_plain([texts[-1]])[0]
    kept = len(content)
    for _ in range(_MOST_TRIALS):
        kept = max(0, kept - max(1, len(ids) - limit))
        text = encoder.tokenizer.decode(content[:kept].tolist()).rstrip("\ufffd") + CUT
        ids, trained = encoder.encoded_conversation(conversation.with_content(latest, text), frozenset(untrained))
        if len(ids) <= limit or not kept:
            break
    return ids, trained


def _observations(conversation: Conversation) -> list[int]:
    """Tool turns, then user turns, each from the oldest on, and the latest of all before the last answer at the end."""
    last = conversation.answers[-1] if conversation.answers else len(conversation.messages)
    found = [index for index in range(last) if conversation.messages[index]["role"] in OBSERVING]
    if not found:
        return []
    *older, latest = found
    return [*sorted(older, key=lambda index: OBSERVING.index(conversation.messages[index]["role"])), latest]


def _answers_to(conversation: Conversation, observation: int) -> set[int]:
    """The answer that follows an observation, unless it is the last of all."""
    following = [index for index in conversation.answers[:-1] if index > observation]
    return set(following[:1])
