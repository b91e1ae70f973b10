"""Reading answers: each scorer on answers by hand; what cannot be read is wrong, and nothing raises."""

import pytest

from training.core.errors import UserError
from training.evaluation import scorers


@pytest.mark.parametrize(
    ("name", "settings", "text", "read"),
    [
        ("exact", {}, "  a \n  b ", "a b"),
        ("exact", {}, "\uff41b\u00a0c", "ab c"),
        ("exact", {}, "Path", "Path"),
        ("exact", {}, " \n", None),
        ("field", {"field": "tool"}, 'I will. {"tool": "read", "x": 1} Done.', "read"),
        ("field", {"field": "call.n"}, '{not json} {"call": {"n": [1, 2]}}', "[1,2]"),
        ("field", {"field": "tool"}, '{"other": 1}', None),
        ("field", {"field": "tool"}, "read", None),
        ("field", {"field": "a.b"}, '{"a": "text"}', None),
        ("regex", {"pattern": r"verdict:\s*(\w+)"}, "so the verdict:  safe.", "safe"),
        ("regex", {"pattern": r"\d+"}, "about 42 of them", "42"),
        ("regex", {"pattern": r"\d+"}, "none", None),
        ("regex", {"pattern": r"(a+)+$"}, "a" * 40 + "b", None),
    ],
)
def test_an_answer_is_read_as_the_scorer_says(name: str, settings: dict, text: str, read: str | None):
    """The last one would take a backtracking engine for ever: it is given up and counts as wrong."""
    assert scorers.of(name, settings, "here").read(text) == read


def test_the_right_answer_may_be_the_bare_value_or_a_whole_answer():
    scorer = scorers.of("field", {"field": "tool"}, "here")
    assert scorer.reference("read") == scorer.reference('{"tool": "read"}') == "read"


@pytest.mark.parametrize(
    ("name", "settings"), [("best", {}), ("field", {}), ("regex", {}), ("regex", {"pattern": "("})]
)
def test_a_scorer_that_cannot_work_is_refused(name: str, settings: dict):
    with pytest.raises(UserError):
        scorers.of(name, settings, "here")
