"""Records with answers as tokens and labels: what is encoded apart, what is trained, and what cannot be used.

Owns one record's way from its fields to ids and labels; what becomes of records that are too long is `shorten`'s. A
record's text never becomes a control token: one that holds a control token's text is left out (B38). The ids of a text
up to an answer are those that the server makes of it as a prompt, since each answer is encoded apart from what is
before it (B31). Lengths are in tokens and include the BOS. All of it is a pure function of record, tokenizer and
settings, so that any number of processes gives one result.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from training.core import files
from training.core.errors import UserError
from training.data import shorten, unrendered
from training.data.chat import Rendered, Renderer, Unfollowable
from training.data.conversation import Conversation, of_record
from training.data.record import shown
from training.data.supervision import SHORTENED, TOO_LONG, Settings
from training.tokenizer.artifact import TOKENIZER, Tokenizer
from training.tokenizer.encoder import any_of
from training.tokenizer.template import Unrenderable, of_tokenizer

CONTROL, UNRENDERED, LOST, UNFOLLOWED, UNTRAINED = (
    "control_token_in_text", "not_rendered", "answer_not_rendered", "not_followed", "nothing_trained",
)  # fmt: skip
LEFT_OUT = (TOO_LONG, CONTROL, UNRENDERED, LOST, UNFOLLOWED, UNTRAINED)
LAST_ONLY, MIXES = "last_answer_only", "several_answers"
NOT_IN_TEXT = {kind: f"{kind}_not_rendered" for kind in unrendered.KINDS}
NOTED = (SHORTENED, shorten.ANSWER_CUT, shorten.QUESTION_CUT, LAST_ONLY, *NOT_IN_TEXT.values(), MIXES)
_PLACES_A_BATCH = 3


@dataclass(frozen=True)
class Sample:
    """One record as it is trained: ids and labels of one length, the bytes of text of the labels, what to count."""

    line: int
    ids: np.ndarray
    trained: np.ndarray
    text_bytes: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeftOut:
    """A record that cannot be used, why, and by which setting it can all the same."""

    line: int
    reason: str
    id: str | None
    found: str
    expected: str
    setting: tuple[str, object] = ("on_error", "drop")


@dataclass(frozen=True)
class Encoded:
    """The samples of a batch of records, one after another, and what is left out of it; texts have no `trained`."""

    lines: np.ndarray
    lengths: np.ndarray
    ids: np.ndarray
    trained: np.ndarray
    text_bytes: np.ndarray
    notes: Counter = field(default_factory=Counter)
    noted: tuple[tuple[str, int], ...] = ()
    """The first few lines of each note."""
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True)
class Piece:
    """A part of a record that is encoded apart."""

    text: str
    is_trained: bool


class TextEncoder:
    """Encodes texts, whole: BOS, the text, EOS; every token but the first is a label."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def batch(self, numbered: Sequence[tuple[int, dict]]) -> Encoded:
        """Encode records, each with its line from 0, as flat arrays without labels."""
        texts = [value["text"] for _, value in numbered]
        documents = self.tokenizer.encode_documents(texts)
        return Encoded(
            np.array([line for line, _ in numbered], "<u4"),
            np.array([len(ids) for ids in documents], np.int64),
            np.concatenate([np.empty(0, self.tokenizer.dtype), *documents]),
            np.empty(0, np.uint8),
            np.array([len(text.encode()) for text in texts], "<u8"),
        )


class Encoder:
    """Encodes records with answers."""

    def __init__(self, tokenizer: Tokenizer, settings: Settings):
        self.tokenizer, self.settings = tokenizer, settings

    # ---- records in, samples out

    def encode(self, numbered: Sequence[tuple[int, dict]]) -> list[Sample | LeftOut]:
        """Encode records, each with its line from 0; one result a record, in order."""
        results: list = [self._read(line, value) for line, value in numbered]
        usable = [(index, one) for index, one in enumerate(results) if isinstance(one, _Read)]
        encoded = self._encoded([one.pieces for _, one in usable], [one.conversation is None for _, one in usable])
        for (index, read), (ids, trained) in zip(usable, encoded, strict=True):
            results[index] = self._fitted(read, ids, trained)
        return results

    def batch(self, numbered: Sequence[tuple[int, dict]]) -> Encoded:
        """The same as `encode`, as flat arrays."""
        results = self.encode(numbered)
        samples = [one for one in results if isinstance(one, Sample)]
        empty = np.empty(0, self.tokenizer.dtype)
        return Encoded(
            np.array([sample.line for sample in samples], "<u4"),
            np.array([len(sample.ids) for sample in samples], np.int64),
            np.concatenate([empty, *(sample.ids for sample in samples)]).astype(self.tokenizer.dtype, copy=False),
            np.concatenate([np.empty(0, np.uint8), *(sample.trained for sample in samples)]),
            np.array([sample.text_bytes for sample in samples], "<u8"),
            Counter(note for sample in samples for note in sample.notes),
            tuple(_first_places(samples)),
            tuple(one for one in results if isinstance(one, LeftOut)),
        )

    def _read(self, line: int, value: dict) -> "_Read | LeftOut":
        """A record in pieces to encode, or why it cannot be."""
        conversation, identity = of_record(value), value.get("id")
        if found := self._forged(conversation, value):
            return LeftOut(line, CONTROL, identity, found, "text without the tokenizer's control tokens")
        if conversation is None:
            pieces = [Piece(value["prompt"], self.settings.loss_on == "all"), Piece(value["completion"], True)]
            return _Read(line, identity, None, pieces, ())
        failure = None
        try:
            rendered = self.renderer.render(conversation)
            text = rendered.text
        except Unrenderable as error:
            return _failure(line, identity, error)
        except Unfollowable as error:
            failure, text = error, self.renderer.text(conversation)
        missing = unrendered.left_out(self.renderer, conversation, text)
        if found := _lost(missing, conversation):
            return LeftOut(line, LOST, identity, found, "a chat template that prints all that an assistant says")
        if failure:
            return _failure(line, identity, failure)
        notes = (
            *((LAST_ONLY,) if rendered.is_last_only else ()),
            *dict.fromkeys(NOT_IN_TEXT[part.kind] for part in missing),
            *((MIXES,) if conversation.mixes else ()),
        )
        return _Read(line, identity, conversation, self.pieces(rendered, conversation), notes)

    @cached_property
    def renderer(self) -> Renderer:
        """What renders conversations. Raises UserError where the tokenizer has no template."""
        return Renderer(of_tokenizer(self.tokenizer, self.settings.template_date), list(self.tokenizer.specials))

    # ---- control tokens

    @cached_property
    def _controls(self) -> tuple[re.Pattern, re.Pattern]:
        """Texts of control tokens: all of them, and those that an assistant may not write either."""
        added = files.read_json(self.tokenizer.folder / TOKENIZER).get("added_tokens", [])
        steering = {token["content"] for token in added if token["special"]}
        every = self.tokenizer.specials
        return any_of(every), any_of(text for text in every if text in steering)

    def _forged(self, conversation: Conversation | None, value: dict) -> str | None:
        """Where a record's own text would become a control token; what a template writes, an assistant may write."""
        if conversation is None:
            texts = ((name, value[name], name == "completion") for name in ("prompt", "completion"))
        else:
            texts = conversation.texts()
        for place, text, is_answer in texts:
            if match := self._controls[is_answer].search(text):
                return f"{match[0]!r} in {place}"
        return None

    # ---- pieces, ids and labels

    def pieces(self, rendered: Rendered, conversation: Conversation, untrained: frozenset[int] = frozenset()) -> list:
        """Cut a rendered conversation where answers begin and end; behind the last label nothing is kept.

        Args:
            untrained: answers that are no labels, by the number of their message.
        """
        text = self.tokenizer.with_bos(rendered.text)
        shift, loss_on = len(text) - len(rendered.text), self.settings.loss_on
        if loss_on == "all":
            return [Piece(text, True)]
        spans = [
            (start + shift, end + shift)
            for (start, end), answer in zip(rendered.spans, rendered.answers, strict=True)
            if answer not in untrained and not 0 <= answer < conversation.num_prompt
        ]
        if loss_on == "completion" and spans:
            spans = [(spans[0][0], spans[-1][1] if conversation.ends_with_answer else len(text))]
        pieces, place = [], 0
        for start, end in spans:
            pieces += [Piece(text[place:start], False), Piece(text[start:end], True)]
            place = end
        return [piece for piece in pieces if piece.text] or [Piece(text, False)]

    def _encoded(self, all_pieces: list[list[Piece]], are_plain: list[bool]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Ids and labels of each list of pieces; a plain one gets BOS where the server adds one, and EOS."""
        texts = {plain: [] for plain in (False, True)}
        for pieces, plain in zip(all_pieces, are_plain, strict=True):
            texts[plain] += [piece.text for piece in pieces]
        ids = {
            False: iter(self.tokenizer.encode_rendered(texts[False])),
            True: iter(self.tokenizer.encode_plain(texts[True])),
        }
        for pieces, plain in zip(all_pieces, are_plain, strict=True):
            parts = [next(ids[plain]) for _ in pieces]
            self._require_bytes(pieces, parts)
            labels = [np.full(len(part), piece.is_trained, np.uint8) for piece, part in zip(pieces, parts, strict=True)]
            if plain:
                parts.append(np.array([self.tokenizer.eos_id], self.tokenizer.dtype))
                labels.append(np.ones(1, np.uint8))
                if self.tokenizer.add_bos:
                    parts.insert(0, np.array([self.tokenizer.bos_id], self.tokenizer.dtype))
                    labels.insert(0, np.zeros(1, np.uint8))
            trained = np.concatenate(labels)
            trained[:1] = 0  # nothing before it predicts it
            yield np.concatenate(parts), trained

    def _require_bytes(self, pieces: Sequence[Piece], parts: Sequence[np.ndarray]) -> None:
        given = sum(len(piece.text.encode()) for piece in pieces)
        taken = sum(int(self.tokenizer.num_bytes_V[part].sum()) for part in parts)
        if given != taken:
            raise UserError(
                "the tokenizer changes the text that it encodes", where=self.tokenizer.folder,
                found=f"{given} bytes in, {taken} out", expected="a byte-level tokenizer",
            )  # fmt: skip

    def encoded_conversation(
        self, conversation: Conversation, untrained: frozenset[int] = frozenset()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and labels of one conversation. Raises Unrenderable or Unfollowable."""
        pieces = self.pieces(self.renderer.render(conversation), conversation, untrained)
        return next(self._encoded([pieces], [False]))

    # ---- length

    def _fitted(self, read: "_Read", ids: np.ndarray, trained: np.ndarray) -> Sample | LeftOut:
        """A sample no longer than the limit, or why there is none."""
        notes, limit = read.notes, self.settings.seq_len
        size, before = len(ids), f"{len(ids)} tokens, {int(trained.sum())} of them trained"
        if len(ids) > limit and self.settings.overlong == "left":
            try:
                said = read.conversation or read.pieces[-1].text
                ids, trained, cuts = shorten.shortened(self, said, ids, trained)
            except (Unrenderable, Unfollowable) as error:
                return _failure(read.line, read.id, error)
            notes = (*notes, SHORTENED, *cuts)
        if len(ids) > limit:
            expected = f"at most data.seq_len={limit} tokens; or data.overlong=left or drop"
            return LeftOut(read.line, TOO_LONG, read.id, before, expected, ("seq_len", size))
        if not trained.any():
            return LeftOut(read.line, UNTRAINED, read.id, "no label", "an assistant's answer to train on")
        return Sample(read.line, ids, trained, int(self.tokenizer.text_bytes_V[ids][trained == 1].sum()), notes)


@dataclass(frozen=True)
class _Read:
    """A record that can be encoded; `conversation` is None where it holds plain texts."""

    line: int
    id: str | None
    conversation: Conversation | None
    pieces: list[Piece]
    notes: tuple[str, ...]


def _lost(missing: Sequence[unrendered.Part], conversation: Conversation) -> str | None:
    """What an assistant calls in an answer that would be trained, and the text has not."""
    for part in missing:
        if part.kind == "tool_calls" and part.message >= conversation.num_prompt:
            return f"the tool call of {conversation.place(part.message)}, {shown(part.text)}, is not in the text"
    return None


def _first_places(samples: Sequence[Sample]) -> Iterator[tuple[str, int]]:
    seen: Counter[str] = Counter()
    for sample in samples:
        for note in sample.notes:
            seen[note] += 1
            if seen[note] <= _PLACES_A_BATCH:
                yield note, sample.line


def _failure(line: int, identity: str | None, error: UserError) -> LeftOut:
    reason = UNRENDERED if isinstance(error, Unrenderable) else UNFOLLOWED
    return LeftOut(line, reason, identity, f"{error.what}: {error.found}", str(error.expected))
