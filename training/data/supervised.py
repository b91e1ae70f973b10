"""Records with answers as tokens and labels: what is rendered, what is trained, and what does not fit.

Owns one record's way from its fields to ids and labels, and the policies for records that are too long. A record's text
never becomes a control token: one that holds a control token's text is refused, or left out and counted (B38).
Lengths are in tokens and include the BOS.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from training.core.errors import UserError
from training.data import record
from training.data.chat import Renderer
from training.data.supervision import Settings, lever
from training.tokenizer.artifact import Tokenizer
from training.tokenizer.template import Template

KEPT_ANSWER_TOKENS = 96
"""A shortened record keeps this much of its answer, or the whole (R14)."""
_CUT = "[...]"
_BATCH_RECORDS = 512
_TOO_LONG, _CONTROL, _UNRENDERED, _UNTRAINED, _SHORTENED = (
    "too_long", "control_token_in_text", "not_rendered", "nothing_trained", "shortened",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One record as it is trained: ids and labels of one length, and the bytes of text that the labels stand for."""

    line: int
    ids: np.ndarray
    trained: np.ndarray
    text_bytes: int


class Encoder:
    """Encodes the records of one form; `counts` tells what became of them."""

    def __init__(self, form: str, tokenizer: Tokenizer, settings: Settings, place: str = "record"):
        self.form, self.tokenizer, self.settings, self.place = form, tokenizer, settings, place
        self.counts: Counter[str] = Counter(dict.fromkeys((_TOO_LONG, _CONTROL, _UNRENDERED, _UNTRAINED), 0))
        self.several_answers = 0

    # ---- records in, samples out

    def encode(self, values: Iterable[dict]) -> Iterator[Sample]:
        """Yield a sample a record that can be used, in order. Raises UserError as the settings have it."""
        numbered = enumerate(values)
        while batch := list(itertools.islice(numbered, _BATCH_RECORDS)):
            usable = [(line, value) for line, value in batch if self._is_usable(line, value)]
            for line, ids, trained, value in self._encoded(usable):
                if sample := self._fitted(line, ids, trained, value):
                    yield sample

    def _is_usable(self, line: int, value: dict) -> bool:
        texts = record.texts(value)
        written = next((text for text in self._control_texts if any(text in one for one in texts)), None)
        if written is None:
            return True
        self._leave_out(_CONTROL, line, value, f"the text {written!r}", "text without the tokenizer's control tokens")
        return False

    @cached_property
    def _control_texts(self) -> list[str]:
        return [text for text in self.tokenizer.specials if text]

    def _leave_out(self, reason: str, line: int, value: dict, found: str, expected: str, way_out: str = "") -> None:
        """Count a record that cannot be used. Raises UserError where the settings refuse it."""
        self.counts[reason] += 1
        policy = self.settings.overlong if reason == _TOO_LONG else self.settings.on_error
        if policy == "refuse":
            named = f", id {record.shown(value['id'])}" if "id" in value else ""
            raise UserError(
                f"a record cannot be trained on ({reason.replace('_', ' ')})",
                where=f"{self.place}:{line + 1}{named}", found=found, expected=expected,
                next_command=way_out or lever("on_error", "drop"),
            )  # fmt: skip

    def _encoded(self, batch: list[tuple[int, dict]]) -> Iterator[tuple[int, np.ndarray, np.ndarray, dict]]:
        if self.form == "messages":
            yield from self._conversations(batch)
        else:
            yield from self._completions(batch)

    # ---- conversations

    @cached_property
    def _renderer(self) -> Renderer:
        return renderer(self.tokenizer, self.settings.template_date)

    def _conversations(self, batch: list[tuple[int, dict]]) -> Iterator[tuple[int, np.ndarray, np.ndarray, dict]]:
        rendered = []
        for line, value in batch:
            try:
                rendered.append((line, value, self._renderer.render(value["messages"])))
            except UserError as error:
                self._leave_out(_UNRENDERED, line, value, f"{error.what}: {error.found}", str(error.expected))
        all_ids = self.tokenizer.encode_rendered([conversation.text for *_, conversation in rendered])
        for (line, value, conversation), ids in zip(rendered, all_ids, strict=True):
            self.several_answers += len(conversation.answers) > 1 or _has_tools(value)
            yield line, *self._labelled(ids, conversation.text, conversation.answers), value

    def _labelled(
        self, ids: np.ndarray, text: str, answers: tuple[tuple[int, int], ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Label the tokens whose last byte lies in an answer; what comes behind the last answer is left out."""
        ends = np.cumsum(self.tokenizer.num_bytes_V[ids])
        if len(ends) and ends[-1] != len(text.encode()):
            raise UserError(
                "the tokenizer changes the text that it encodes", where=self.tokenizer.folder,
                found=f"{len(text.encode())} bytes in, {ends[-1]} out", expected="a byte-level tokenizer",
            )  # fmt: skip
        trained = np.zeros(len(ids), np.uint8)
        if self.settings.loss_on == "all":
            trained[:] = 1
        elif answers:
            spans = answers if self.settings.loss_on == "assistant" else ((answers[0][0], len(text)),)
            for start, end in spans:
                first, last = (len(text[:place].encode()) for place in (start, end))
                trained[np.searchsorted(ends, first, "right") : np.searchsorted(ends, last, "right")] = 1
            ids, trained = _without_tail(ids, trained)
        return self._with_bos(ids, trained)

    def _with_bos(self, ids: np.ndarray, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Put the BOS in front where the server will, unless the text has it already (B31); it is never a label."""
        bos = self.tokenizer.bos_id
        if bos is not None and len(ids) and ids[0] == bos:
            return ids, np.concatenate([np.zeros(1, np.uint8), trained[1:]])
        if not self.tokenizer.add_bos or bos is None:
            return ids, trained
        return np.insert(ids, 0, bos).astype(self.tokenizer.dtype), np.insert(trained, 0, 0)

    # ---- prompts and completions

    def _completions(self, batch: list[tuple[int, dict]]) -> Iterator[tuple[int, np.ndarray, np.ndarray, dict]]:
        """Encode prompt and completion apart, as the server will have them, with an EOS behind."""
        prompts = self.tokenizer.encode_plain([value["prompt"] for _, value in batch])
        completions = self.tokenizer.encode_plain([value["completion"] for _, value in batch])
        for (line, value), prompt, completion in zip(batch, prompts, completions, strict=True):
            ids = np.concatenate([prompt, completion, np.array([self.tokenizer.eos_id], self.tokenizer.dtype)])
            trained = np.ones(len(ids), np.uint8)
            trained[: 0 if self.settings.loss_on == "all" else len(prompt)] = 0
            yield line, *self._with_bos(ids, trained), value

    # ---- length

    def _fitted(self, line: int, ids: np.ndarray, trained: np.ndarray, value: dict) -> Sample | None:
        """A sample no longer than the limit; None for a record that is left out."""
        if len(ids) > self.settings.seq_len and self.settings.overlong == "left":
            ids, trained = self._shortened(ids, trained, value)
        if len(ids) > self.settings.seq_len:
            found = f"{len(ids)} tokens, {int(trained.sum())} of them trained"
            expected = f"at most data.seq_len={self.settings.seq_len}; or data.overlong=left or drop"
            self._leave_out(_TOO_LONG, line, value, found, expected, lever("seq_len", len(ids)))
            return None
        if not trained.any():
            self._leave_out(_UNTRAINED, line, value, "no label", "an assistant's answer to train on")
            return None
        return Sample(line, ids, trained, int(self.tokenizer.num_bytes_V[ids][trained == 1].sum()))

    def _shortened(self, ids: np.ndarray, trained: np.ndarray, value: dict) -> tuple[np.ndarray, np.ndarray]:
        """Shorten what was asked, then, where that is not enough, the answer's end; it may be too long still."""
        self.counts[_SHORTENED] += 1
        if self.form == "messages":
            ids, trained = self._shorter_conversation(ids, trained, value["messages"])
        else:
            ids, trained = self._without_prompts_start(ids, trained)
        limit = self.settings.seq_len
        start, end = _last_answer(trained)
        if len(ids) > limit and limit - start >= min(KEPT_ANSWER_TOKENS, end - start):
            ids, trained = ids[:limit], trained[:limit]
        return ids, trained

    def _without_prompts_start(self, ids: np.ndarray, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take from the left of a prompt what is too much, behind the BOS; a prompt that is trained too stays."""
        first = int(len(ids) > 0 and ids[0] == self.tokenizer.bos_id)
        cut = slice(first, first + min(len(ids) - self.settings.seq_len, max(0, int(np.argmax(trained)) - first)))
        return np.delete(ids, cut), np.delete(trained, cut)

    def _shorter_conversation(
        self, ids: np.ndarray, trained: np.ndarray, messages: list[dict]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Take from the oldest observations first, then from the end of the latest, until the conversation fits."""
        messages = [dict(message) for message in messages]
        asked = [index for index, message in enumerate(messages) if message["role"] in ("user", "tool")]
        for index in asked:
            over = len(ids) - self.settings.seq_len
            if over <= 0:
                break
            messages[index]["content"] = self._cut(messages[index]["content"], over)
            conversation = self._renderer.render(messages)
            ids, trained = self._labelled(
                self.tokenizer.encode_rendered([conversation.text])[0], conversation.text, conversation.answers
            )
        return ids, trained

    def _cut(self, content: str, over_tokens: int) -> str:
        """A text without its last tokens, and a mark where they were."""
        ids = self.tokenizer.encode_plain([content, _CUT])
        if len(ids[0]) <= len(ids[1]):
            return content
        kept = max(0, len(ids[0]) - over_tokens - len(ids[1]) - 1)
        return self.tokenizer.decode(ids[0][:kept].tolist()).rstrip("\ufffd") + _CUT if kept else _CUT


def renderer(tokenizer: Tokenizer, template_date: str | None) -> Renderer:
    """What renders conversations for a tokenizer. Raises UserError where it has no template."""
    if tokenizer.chat_template is None:
        raise UserError(
            "the tokenizer has no chat template", where=tokenizer.folder, found="no chat_template.jinja",
            expected='a template for records of the form {"messages"}',
        )  # fmt: skip
    specials = {f"{role}_token": tokenizer.roles[role] for role in ("bos", "eos") if tokenizer.roles[role] is not None}
    return Renderer(Template(tokenizer.chat_template, specials, template_date), list(tokenizer.specials))


def _has_tools(value: dict) -> bool:
    return any(message["role"] == "tool" for message in value["messages"])


def _without_tail(ids: np.ndarray, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    end = _last_answer(trained)[1]
    return ids[:end], trained[:end]


def _last_answer(trained: np.ndarray) -> tuple[int, int]:
    """Where the last run of labels begins and ends."""
    end = len(trained) - int(np.argmax(trained[::-1]))
    before = np.flatnonzero(trained[:end] == 0)
    return (int(before[-1]) + 1 if len(before) else 0), end
