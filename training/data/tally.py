"""What became of a split's records with answers: kept, changed or left out, each with its count and its reason.

Owns the policies of the settings: a record that cannot be used stops everything, or is left out and counted. Tokens
that would train nothing, or the prompts too where answers were asked for, are refused (B19, B26). Records in =
documents + left out, always.
"""

import logging
from collections import Counter
from collections.abc import Iterator

from training.core.errors import UserError
from training.core.units import format_number
from training.data import record, shorten, supervised, unrendered
from training.data.supervised import Encoded, LeftOut
from training.data.supervision import SHORTENED, TOO_LONG, Settings, lever

_logger = logging.getLogger(__name__)
_SHOWN = 3


class Tally:
    """Counts one split."""

    def __init__(self, reference: str, split: str, settings: Settings):
        self._reference, self._split, self._settings = reference, split, settings
        self._left_out = dict.fromkeys(supervised.LEFT_OUT, 0)
        self._first: dict[str, list[str]] = {}
        self._noted_at: dict[str, list[str]] = {}
        self._notes: Counter[str] = Counter(dict.fromkeys(supervised.NOTED, 0))

    def add(self, encoded: Encoded) -> None:
        """Count a batch. Raises UserError at a record that the settings do not leave out."""
        self._notes.update(encoded.notes)
        for note, line in encoded.noted:
            places = self._noted_at.setdefault(note, [])
            if len(places) < _SHOWN:
                places.append(f"{self._split}.jsonl:{line + 1}")
        for one in encoded.left_out:
            self._leave_out(one)

    def _leave_out(self, one: LeftOut) -> None:
        too_long = one.reason == TOO_LONG
        self._left_out[one.reason] += 1
        if (self._settings.overlong if too_long else self._settings.on_error) == "refuse":
            raise UserError(
                f"a record cannot be trained on ({_words(one.reason)})", where=f"{self._reference} {self._place(one)}",
                found=one.found, expected=one.expected, next_command=lever(*one.setting),
            )  # fmt: skip
        first = self._first.setdefault(one.reason, [])
        if len(first) < _SHOWN:
            first.append(f"{self._place(one)}: {one.found}")

    def _place(self, one: LeftOut) -> str:
        named = "" if one.id is None else f", id {record.shown(one.id)}"
        return f"{self._split}.jsonl:{one.line + 1}{named}"

    def require_labels(self, figures: dict) -> None:
        """Refuse a split whose tokens, by its shard's figures, would teach nothing; tell what is odd."""
        if not figures["documents"]:
            if self._split == "train":
                raise self._nothing_left()
            self._tell()
            return
        answers_alone = self._settings.loss_on != "all"
        if answers_alone and figures["trained_tokens"] >= figures["tokens"] - figures["documents"]:
            raise UserError(
                "every token would be trained, the prompts too", where=f"{self._reference} {self._split}.jsonl",
                found=f"{figures['trained_tokens']} of {figures['tokens']} tokens",
                expected=f"answers alone, as data.loss_on={self._settings.loss_on} says",
                next_command=lever("loss_on", "all"),
            )  # fmt: skip
        self._tell()

    def _nothing_left(self) -> UserError:
        reasons = [f"{count} {_words(reason)}" for reason, count in self._left_out.items() if count]
        examples = [place for places in self._first.values() for place in places[:1]]
        too_long = self._left_out[TOO_LONG] > 0
        return UserError(
            "nothing is left to train on", where=f"{self._reference} {self._split}.jsonl",
            found=f"{', '.join(reasons)} ({'; '.join(examples)})",
            expected=f"records of at most data.seq_len={self._settings.seq_len} tokens with an answer",
            next_command=lever("overlong", "left") if too_long else lever("on_error", "refuse"),
        )  # fmt: skip

    def words(self, figures: dict | None = None) -> Iterator[str]:
        """What was left out or changed, each with its first places; of a manifest's figures where they are given."""
        figures = figures or self.figures()
        for reason, places in figures["first_left_out"].items():
            yield f"{figures['left_out'][reason]} left out, {_words(reason)}: {'; '.join(places)}"
        for note, meaning in _MEANING.items():
            if count := figures["noted"][note]:
                yield f"{format_number(count, 'record')} {meaning}: {', '.join(figures['first_noted'][note])}"

    def _tell(self) -> None:
        for words in self.words():
            _logger.warning("%s: %s", self._split, words)
        if self._split == "train" and self._settings.loss_on != "assistant" and self._notes[supervised.MIXES]:
            _logger.warning(
                "%d records have tool turns or several answers, and data.loss_on=%s trains what is between them too; "
                "data.loss_on=assistant trains answers alone", self._notes[supervised.MIXES], self._settings.loss_on,
            )  # fmt: skip

    def figures(self) -> dict:
        """What the manifest says of it."""
        return {
            "left_out": dict(self._left_out), "first_left_out": self._first,
            "noted": dict(self._notes), "first_noted": self._noted_at,
        }  # fmt: skip


_MEANING = {
    SHORTENED: "shortened to data.seq_len",
    shorten.ANSWER_CUT: "whose answer's end did not fit and is cut off",
    shorten.QUESTION_CUT: "whose latest user's turn is cut, and with it what may have been asked "
    "(data.overlong=drop leaves them out)",
    supervised.LAST_ONLY: "trained on their last answer alone, since the template rewrites the others",
} | {
    supervised.NOT_IN_TEXT[kind]: f"with {words} that the chat template leaves out of the text"
    for kind, words in unrendered.KINDS.items()
}


def _words(reason: str) -> str:
    return reason.replace("_", " ")
