"""How an answer is read and held against the right one. An answer that cannot be read is wrong, never left out.

`exact`: the same text after normalisation. `field`: the named field of the answer's JSON object. `regex`: what the
pattern finds in the answer, its first group where it has one. `choice`: the likeliest of the options.
"""

import json
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.core import files
from training.core.errors import UserError

if TYPE_CHECKING:
    from training.evaluation.exam import Question

NAMES = ("exact", "field", "regex", "choice")
_REGEX_SECONDS = 1.0


@dataclass(frozen=True)
class Scorer:
    """One way to read an answer.

    Args:
        name: one of `NAMES`.
        setting: the field's dotted name or the pattern; None for the others.
    """

    name: str
    setting: str | None = None

    def identity(self) -> dict:
        return {"name": self.name, "setting": self.setting}

    def read(self, text: str) -> str | None:
        """What a model's answer says, normalised; None where it cannot be read. Never raises."""
        try:
            found = _READERS[self.name](text, self.setting)
        except Exception:  # whatever a model writes, the measurement goes on
            return None
        return None if found is None else (normalised(found) or None)

    def reference(self, answer: str) -> str:
        """What the right answer says: read as a model's is, or as it stands where it is the bare value."""
        return self.read(answer) or normalised(answer)

    def problem(self, question: "Question", where: str) -> UserError | None:
        """Why this question cannot be scored so, if it cannot."""
        if self.name == "choice" and not question.options:
            return UserError("a choice without options", where=where, found=f"question {question.id}")
        if self.name != "choice" and question.options:
            return UserError("options that nobody reads", where=where, found=f"question {question.id}",
                             expected="the scorer choice")  # fmt: skip
        return None


def of(name: str, settings: dict, where: str) -> Scorer:
    """The scorer of a name and an exam's settings. Raises UserError for an unknown one, or one that cannot work."""
    if name not in NAMES:
        raise UserError("no such scorer", where=where, found=name, expected=", ".join(NAMES))
    wanted = {"field": "field", "regex": "pattern"}.get(name)
    if wanted and not settings.get(wanted):
        raise UserError(f"the scorer {name} needs a setting", where=where, found="none", expected=wanted)
    if name == "regex":
        _compiled(settings["pattern"], where)
    return Scorer(name, settings[wanted] if wanted else None)


def normalised(text: str) -> str:
    """A text without what is no part of an answer: Unicode's NFKC, runs of blanks as one, none at the ends."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _whole(text: str, _: None) -> str:
    return text


def _field(text: str, name: str) -> str | None:
    """The field of the first JSON object in the answer, wherever it stands."""
    decoder, start = json.JSONDecoder(), text.find("{")
    while start >= 0:
        try:
            value, _ = decoder.raw_decode(text, start)
            break
        except ValueError:
            start = text.find("{", start + 1)
    else:
        return None
    for key in name.split("."):
        value = value[key]
    return value if isinstance(value, str) else files.canonical_json(value).decode()


def _regex(text: str, pattern: str) -> str | None:
    found = _compiled(pattern, "the exam").search(text, timeout=_REGEX_SECONDS)
    if found is None:
        return None
    return found[1] if found.re.groups else found[0]


def _compiled(pattern: str, where: str):
    import regex

    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise UserError("not a regular expression", where=where, found=f"{pattern!r}: {error}") from error


_READERS = {"exact": _whole, "field": _field, "regex": _regex, "choice": _whole}
