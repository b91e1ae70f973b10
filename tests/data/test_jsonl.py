"""Strict reading of JSONL: what is accepted, what is refused, and what the refusal says."""

import itertools
import json
import sys
import tracemalloc
from pathlib import Path

import pytest

from tests.data.reading import read
from training.core.errors import UserError
from training.data import blocks
from training.data.source import Jsonl


def write(folder: Path, data: bytes | str, name: str = "input.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def refusal(folder: Path, data: bytes | str, **settings) -> UserError:
    with pytest.raises(UserError) as caught:
        read(write(folder, data), **settings)
    assert caught.value.exit_code == 2
    return caught.value


@pytest.mark.parametrize("ending", [b"\r\n", b""], ids=["final newline", "no final newline"])
def test_byte_order_mark_crlf_and_blank_lines_lose_no_record(tmp_path: Path, ending: bytes):
    """B39."""
    data = b'\xef\xbb\xbf{"text":"a"}\r\n\r\n{"text":"b"}' + ending + (b"\r\n" if ending else b"")
    found = read(write(tmp_path, data))
    assert found.texts == ["a", "b"]
    assert found.lines == {"byte_order_marks": 1, "blank_lines": 2 if ending else 1, "crlf_lines": 4 if ending else 2}


def test_byte_order_mark_of_joined_files(tmp_path: Path):
    """B39: each joined file's mark is taken off, and none enters a text."""
    part = b'\xef\xbb\xbf{"text":"a"}\n'
    found = read(write(tmp_path, part + part.replace(b'"a"', b'"b"')))
    assert found.texts == ["a", "b"] and found.lines["byte_order_marks"] == 2


def test_half_a_surrogate_pair_is_refused_and_a_whole_one_is_an_emoji(tmp_path: Path):
    """B41."""
    error = refusal(tmp_path, '{"text":"ok"}\n{"text":"x\\ud83d"}\n{"text":"\\ud83d\\ude00"}\n')
    assert "line 2" in error.where and "surrogate" in error.found and "\\ud83d" in error.found
    assert read(write(tmp_path, '{"text":"ok"}\n{"text":"\\ud83d\\ude00"}\n')).texts == ["ok", "\U0001f600"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"text":"a","metadata":{"x":NaN}}', "NaN is not JSON"),
        ('{"text":"a","metadata":{"x":-Infinity}}', "-Infinity is not JSON"),
        ('{"text":"a","metadata":{"x":1e999}}', "a number that JSON cannot hold"),
        ('{"text":"a","text":"b"}', "duplicate key 'text'"),
        ('{"text":"a","metadata":{"k":1,"k":2}}', "duplicate key 'k'"),
        ('{"text":"a","metadata":{"k":"\\udc00"}}', "half a surrogate pair"),
        ('{"text":"a"}{"text":"b"}', "several objects on one line (the second begins at column 13)"),
        ('{"text":"a"} tail', "text after the object at column 14"),
        ('{"text":"a"', "not JSON: "),
        ('"text"', "the line holds text, not an object"),
        ('{"txt":"a"}', "its keys are 'txt'"),
        ('{"text":"a","messages":[]}', "none of the forms"),
        ('{"prompt":"a"}', "none of the forms"),
        ('{"text":" \\n"}', "'text' is empty"),
        ('{"text":null}', "'text' is null, not text"),
        ('{"text":"a","id":7.0}', "'id' is a number, not text"),
        ('{"text":"a","id":true}', "'id' is true, not text"),
        ('{"text":"a","id":' + "9" * 1025 + "}", "'id' has 1025 characters"),
        ('{"text":"a","source":7}', "'source' is a number, not text"),
        ('{"text":"a","date":"20261129"}', "not a date"),
        ('{"text":"a","date":"2026-02-30"}', "not a date"),
        ('{"text":"a","split":"dev"}', "not one of train, validation, test"),
        ('{"text":"a","metadata":[]}', "'metadata' is a list, not an object"),
        ('{"text":"a","url":"x"}', "unknown key 'url'"),
        ('{"messages":[]}', "'messages' is empty"),
        ('{"messages":[{"role":"bot","content":"a"}]}', "messages[0] has the role 'bot'"),
        ('{"messages":[{"role":"user","content":""}]}', "messages[0]: 'content' is empty"),
        ('{"messages":["hi"]}', "messages[0] is text, not an object"),
        ('{"prompt":"a","completion":3}', "'completion' is a number, not text"),
        ('{"text":' + "[" * 100_000, "more than 64 deep"),
        ('{"text":"a","metadata":' + '{"k":' * 1000 + "1" + "}" * 1001, "more than 64 deep"),
        ('{"text":"a","metadata":' + '{"k":' * 64 + "1" + "}" * 65, "more than 64 deep"),
        ('{"text":"a","metadata":{"x":' + "9" * 5000 + "}}", "not JSON that can be read"),
    ],
)
def test_a_bad_record_is_refused(tmp_path: Path, line: str, found: str):
    error = refusal(tmp_path, line + "\n")
    assert found in error.found
    assert "input.jsonl line 1" in error.where
    assert "sed -n 1p" in error.next_command


@pytest.mark.parametrize(
    ("line", "found", "expected"),
    [
        ('"a word"', "the line holds text, not an object ('a word')", "an object, such as"),
        ("[1, 2]", "the line holds a list, not an object ([1, 2])", "an object, such as"),
        ("null", "the line holds null, not an object", "an object, such as"),
        ('{"text":"a","url":"x"}', "unknown key 'url'", "this one breaks unknown_key"),
        ('{"text":"a', "not JSON: Unterminated string starting at column 9", "one valid JSON object a line"),
    ],
)
def test_what_was_found_is_held_against_what_should_have_stood_there(tmp_path: Path, line, found, expected):
    error = refusal(tmp_path, f'{line}\n{{"text":"b"}}\n')
    assert found in error.found and expected in error.expected
    assert ("one valid JSON object" in error.expected) == ("not JSON" in error.found)


def test_levels_up_to_the_limit_are_read(tmp_path: Path):
    deep = '{"text":"' + "[{" * 500 + '","metadata":' + '{"k":' * 63 + "1" + "}" * 64
    assert len(read(write(tmp_path, deep)).texts) == 1


def test_every_reason_and_the_id_are_named(tmp_path: Path):
    error = refusal(tmp_path, '{"text":"ok"}\n{"id":"r7","text":"","split":"dev","url":NaN,"url":"\\ud800"}\n')
    assert error.where.endswith("line 2, id 'r7'")
    for reason in ("NaN is not JSON", "duplicate key 'url'", "'text' is empty", "'dev'", "unknown key", "surrogate"):
        assert reason in error.found


def test_bytes_that_are_not_utf8_are_refused_with_their_place(tmp_path: Path):
    error = refusal(tmp_path, b'{"text":"ok"}\n{"text":"caf\xe9"}\n')
    assert "line 2" in error.where and "byte 0xe9 at position 13" in error.found


def test_the_form_of_the_first_record_holds_for_all(tmp_path: Path):
    error = refusal(tmp_path, '{"text":"ok"}\n{"prompt":"a","completion":"b"}\n')
    assert "key 'text' is missing" in error.found and "'prompt' is of another form" in error.found


@pytest.mark.parametrize("data", ['[{"text":"a"}]', '[\n{"text":"a"}\n]', '\n\ufeff [{"text":"a"}]'])
def test_a_json_array_is_refused_by_name(tmp_path: Path, data: str):
    """B43."""
    error = refusal(tmp_path, data)
    assert "JSON array" in error.what and "one object per line" in error.expected


def test_a_record_over_the_limit_is_refused_with_its_length(tmp_path: Path):
    """B43: at the limit it is read, one byte above it is refused; neighbours are whole."""
    lines = ['{"text":"before"}', json.dumps({"text": "x" * 5000}), '{"text":"after"}']
    length = len(lines[1])
    whole = read(write(tmp_path, "\r\n".join(lines)), max_record_bytes=length)
    assert [len(text) for text in whole.texts] == [6, 5000, 5]
    error = refusal(tmp_path, "\n".join(lines), max_record_bytes=length - 1)
    assert "line 2" in error.where and error.found == f"{length} bytes"
    assert error.next_command.endswith(f'--max-record {length}B"')


def test_a_long_line_takes_less_than_ten_times_its_size(tmp_path: Path):
    """B43: 64 MB between two small ones; over the limit it is measured, and not held."""
    size = 64 << 20
    path = write(tmp_path, '{"text":"a"}\n{"text":"' + "x" * size + '"}\n{"text":"b"}\n')
    tracemalloc.start()
    lengths = read(path, max_record_bytes=size + 100, near=0).text_bytes
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lengths == [1, size, 1]
    assert peak < 10 * size
    tracemalloc.start()
    dropped = read(path, on_error="drop")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert dropped.texts == ["a", "b"] and dropped.rejected == {"too_long": 1}
    assert dropped.faults[0]["line"] == 2 and dropped.faults[0]["reasons"][0]["found"] == f"{size + 11} bytes"
    assert peak < 2 * size


def test_a_long_line_behind_a_blank_one_has_its_number(tmp_path: Path):
    """A block that begins with a line's end holds a line, though nothing stands in it."""
    path = write(tmp_path, '\n{"text":"' + "x" * (3 << 20) + '"}\n{bad\n')
    found = read(path, on_error="drop")
    assert found.lines == {"blank_lines": 1} and [fault["line"] for fault in found.faults] == [3]


def test_a_long_line_is_joined_once_however_small_its_pieces(monkeypatch: pytest.MonkeyPatch):
    """A packed file comes in small pieces; joined with each of them, a line of 32 MiB would be copied 1,500 times."""
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 1000)
    line, copied = b"x" * 100_000, []

    def watch(frame: object, event: str, called: object) -> None:
        if event == "c_return" and getattr(called, "__name__", "") == "join" and called.__self__ == b"":
            copied.append(called)

    sys.setprofile(watch)
    try:
        found = list(blocks._lines(itertools.chain([b"a\n"], itertools.repeat(b"x" * 100, 1000), [b"\nb\n"]), 1 << 20))
    finally:
        sys.setprofile(None)
    assert b"".join(block.data for block in found) == b"a\n" + line + b"\nb\n" and 0 < len(copied) < 10


def test_the_files_hash_is_over_all_its_bytes(tmp_path: Path):
    source = Jsonl(write(tmp_path, b'\xef\xbb\xbf{"text":"a"}\r\n\n{"text":"b"}'))
    read(source)
    assert source.sha256 == source.fingerprint()


@pytest.mark.parametrize(("name", "what"), [("none.jsonl", "no such input"), (".", "no such input")])
def test_no_file_is_an_error_with_a_way_out(tmp_path: Path, name: str, what: str):
    with pytest.raises(UserError, match=what) as caught:
        Jsonl(tmp_path / name)
    assert caught.value.next_command == "make data-prepare INPUT=my.jsonl"


def test_an_empty_file_is_an_error(tmp_path: Path):
    with pytest.raises(UserError, match="the input is empty"):
        Jsonl(write(tmp_path, b""))
