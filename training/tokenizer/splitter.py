"""A text cut into pre-tokens by Python's own regular expressions, exactly as the `tokenizers` library cuts it.

Python's engine is several times as quick as the library's, but knows no `\\p{L}` and has another Unicode version. So
the library itself is asked, once a process, which characters each class holds, and the patterns are written out with
them: the two cannot disagree on a character. Characters beyond U+FFFF, which are rare and would make the classes slow,
are cut as one of their kind below it. A configuration with a part that is not known here has no splitter.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice

_LAST_OF_PLANE = 0xFFFF
_SURROGATES = range(0xD800, 0xE000)
_BEYOND = re.compile("[\U00010000-\U0010ffff]")
# A letter, two numbers, a mark, a symbol, punctuation, a control; no pattern names them: only their classes count.
_STAND_INS = "\u00aa\u00b2\u0660\u0300\u00a9\u00a7\u0001"
_CHUNK_CHARS, _CHUNK_PIECES = 1 << 20, 1 << 14
_BLANK = r"\s"
_DIGITS = r"\p{digits}"  # the library's `Digits` goes by a table of its own
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# An escape that is a class, the complement of blanks, what both engines read alike; anything else is not known here.
_PARTS = re.compile(r"(?P<members>\\p\{\w+\}|\\s)|(?P<solid>\\S)|\\[rn/\\\-\[\]]|\(\?[i:!]|[^\\(]|\((?!\?)", re.DOTALL)


class Splitter:
    """Cuts text by stages: each cuts what the one before has left; `of` makes one."""

    def __init__(self, patterns: list[str]):
        self._stages = [_Stage(_translated(pattern)) for pattern in patterns]
        self._classes = sorted({part["members"] for text in patterns for part in _PARTS.finditer(text)} - {None})
        self._stand_ins: dict[str, str] = {}

    @classmethod
    def of(cls, pre_tokenizer: dict) -> "Splitter | None":
        """Make one for a `pre_tokenizer` of tokenizer.json; None where a part of it is not known here."""
        patterns = _patterns(pre_tokenizer)
        return cls(patterns) if patterns and all(map(_translated, patterns)) else None

    def pieces(self, text: str) -> Iterator[list[str]]:
        """The pre-tokens in order, in lists so short that a text of any length costs little memory.

        Raises ValueError where a character is of a kind that is not known here.
        """
        plain = _BEYOND.sub(self._stand_in, text)
        place = 0
        for found in self._first(plain):
            for stage in self._stages[1:]:
                found = [part for piece in found for part in stage.cut(piece)]
            if plain is not text:
                found = list(_sliced(text, place, found))
            yield found
            place += sum(map(len, found))

    def _first(self, text: str) -> Iterator[list[str]]:
        if len(text) <= _CHUNK_CHARS:
            yield self._stages[0].cut(text)
            return
        pieces = self._stages[0].each(text)
        while found := list(islice(pieces, _CHUNK_PIECES)):
            yield found

    def _stand_in(self, match: re.Match) -> str:
        character = match[0]
        if character not in self._stand_ins:
            kind = self._kind(character)
            found = next((other for other in _STAND_INS if self._kind(other) == kind), None)
            if found is None:
                raise ValueError(f"U+{ord(character):X} is of an unknown kind")
            self._stand_ins[character] = found
        return self._stand_ins[character]

    def _kind(self, character: str) -> list[bool]:
        return [_is_member(name, character) for name in self._classes]


class _Stage:
    """One pattern: what it matches is cut off, and what lies between matches is left as it is."""

    def __init__(self, pattern: str):
        self._matches, self._parts = re.compile(pattern), re.compile(f"({pattern})")

    def cut(self, text: str) -> list[str]:
        found = self._matches.findall(text)
        if sum(map(len, found)) == len(text):  # as most patterns do
            return found
        return [part for part in self._parts.split(text) if part]

    def each(self, text: str) -> Iterator[str]:
        place = 0
        for match in self._matches.finditer(text):
            if match.start() > place:
                yield text[place : match.start()]
            yield match[0]
            place = match.end()
        if place < len(text):
            yield text[place:]


def _sliced(text: str, place: int, pieces: Iterable[str]) -> Iterator[str]:
    for piece in pieces:
        yield text[place : (place := place + len(piece))]


def _patterns(pre_tokenizer: dict) -> list[str] | None:
    """The patterns of the stages in the library's words; None where a part is not known."""
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": parts}:
            found = [_patterns(part) for part in parts]
            return None if None in found else [pattern for patterns in found for pattern in patterns]
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": uses}:
            return [_GPT_2] if uses else []
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
            return [pattern]
        case {"type": "Digits", "individual_digits": True}:
            return [rf"[{_DIGITS}]|[^{_DIGITS}]+"]
    return None


def _translated(pattern: str) -> str | None:
    """A pattern with its classes written out; None where a part of it is not known."""
    result, place, inside = "", 0, False
    while place < len(pattern):
        part = _PARTS.match(pattern, place)
        if part is None or (inside and part["solid"]):
            return None
        text = part[0]
        if part["members"]:
            text = _members(text) if inside else f"[{_members(text)}]"
        elif part["solid"]:
            text = f"[^{_members(_BLANK)}]"
        elif text in "[]":
            inside = text == "["
        result, place = result + text, part.end()
    return result


@cache
def _members(name: str) -> str:
    """The characters of a class up to U+FFFF, as ranges that stand inside square brackets."""
    points = [point for point in range(_LAST_OF_PLANE + 1) if point not in _SURROGATES]
    pieces = _runs(name).pre_tokenize_str("".join(map(chr, points)))
    runs = [place for piece, place in pieces if _is_member(name, piece[0])]
    return "".join(f"\\u{points[start]:04x}-\\u{points[end - 1]:04x}" for start, end in runs)


def _is_member(name: str, character: str) -> bool:
    # U+0000 is of no class, and cut off from a character that is of one.
    return len(_runs(name).pre_tokenize_str("\0" + character)) == 2


@cache
def _runs(name: str):
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Digits() if name == _DIGITS else pre_tokenizers.Split(Regex(f"{name}+"), "isolated")
