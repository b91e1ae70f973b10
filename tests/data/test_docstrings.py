"""The task of the standard library: what is asked, what is left out, and that groups are modules."""

from training.data.docstrings import Docstrings, conversations

SOURCE = b'''
def shorten(text, width):
    """Collapse the text to fit in a width.

    More words.
    """

def _private():
    """Not asked for, since it is private."""

def terse():
    """Short."""

class Wrapper:
    def fill(self, text):
        """Fill one paragraph and return it."""
'''


def test_a_function_is_asked_for_by_its_description():
    first, second = conversations("textwrap/more.py", SOURCE)
    assert first == {
        "messages": [
            {"role": "user", "content": "Which function of textwrap.more is described here?\nCollapse the text to fit "
             "in a width.\nIts parameters: text, width"},
            {"role": "assistant", "content": "textwrap.more.shorten"},
        ],
        "group": "textwrap",
    }  # fmt: skip
    assert second["messages"][1]["content"] == "textwrap.more.Wrapper.fill"
    assert "method of textwrap.more.Wrapper" in second["messages"][0]["content"]


def test_a_package_is_named_without_its_file_and_some_files_are_passed_over():
    assert next(conversations("json/__init__.py", SOURCE))["messages"][1]["content"] == "json.shorten"
    for path in ("idlelib/a.py", "unittest/tests/a.py", "encodings/a.py"):
        assert list(conversations(path, SOURCE)) == []
    assert list(conversations("a.py", b"def f(:")) == []


def test_the_librarys_own_are_thousands():
    """Also of files that are longer than a record may be."""
    batches = list(Docstrings().batches(0, None, 1 << 10, lambda _: None))
    lines = batches[0].data.splitlines()
    assert len(batches) == 1 and len(lines) > 3000
    assert any(b"textwrap.shorten" in line for line in lines)
