"""What a look at a data set tells: figures by source, lengths, and where each token of an example comes from."""

import json
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tests.data.test_supervised import talk
from tests.data.test_tokens import make_dataset, make_tokenizer, texts
from training.cli import main
from training.data import dataset, peek, peek_view, tokens
from training.data.peek import Peek, histogram
from training.data.supervision import Settings
from training.tokenizer.artifact import EOS, Tokenizer


@pytest.fixture
def chat(tmp_path: Path):
    values = [talk(f"question {i}", f"answer {i}") | {"source": "ab"[i % 2], "group": str(i)} for i in range(60)]
    return make_dataset(tmp_path, values)


@pytest.fixture
def look(chat, tmp_path: Path) -> Peek:
    (tmp_path / "texts").mkdir()
    tokenizer = make_tokenizer(make_dataset(tmp_path / "texts", [{"text": text} for text in texts() if text.strip()]))
    folder = tokens.tokenize(chat, tokenizer, Settings("assistant", 64))
    return Peek(chat, "train", tokens.open_split(folder, "train"), tokenizer)


def test_sources_add_up_to_the_whole(look):
    rows = look.sources()
    figures = look.tokens.manifest["splits"]["train"]
    assert {row.name for row in rows} == {"a", "b"} and sum(row.num_records for row in rows) == figures["documents"]
    assert sum(row.num_tokens for row in rows) == figures["tokens"]
    assert sum(row.num_trained for row in rows) == figures["trained_tokens"]
    assert sum(row.text_bytes for row in rows) == look.data.manifest["splits"]["train"]["text_bytes"]


def test_each_token_says_where_it_comes_from(look):
    example = look.examples([0])[0]
    user, assistant = (message["content"] for message in example.value["messages"])
    of = {
        name: "".join(p.text for p in example.pieces if p.origin == name) for name in {p.origin for p in example.pieces}
    }
    assert of["messages[0] user"] == user and of["messages[1] assistant"] == assistant
    assert of["control"] == "<|bos|><|im_start|><|im_end|><|im_start|><|im_end|>"
    trained = [piece.text for piece in example.pieces if piece.is_trained]
    assert "".join(trained) == assistant + "<|im_end|>" and example.num_trained == len(trained)


def test_trained_text_is_marked_and_coloured(look):
    example = look.examples([0])[0]
    answer = example.value["messages"][1]["content"]
    plain = "\n".join(peek_view.example_lines(example, look.tokenizer, colour=False, with_ids=True))
    assert f"⟦{answer}<|im_end|>⟧" in plain and plain.count("⟦") == 1 and "messages[1] assistant" in plain
    coloured = "\n".join(peek_view.example_lines(example, look.tokenizer, colour=True, with_ids=False))
    assert f"\x1b[32m{answer}\x1b[0m" in coloured and "⟦" not in coloured


def test_no_record_can_write_to_the_terminal():
    assert peek_view.printable("a\x1b[2Jb\u202e\n\tc\x00") == "a\\x1b[2Jb\\u202e\n\tc\\x00"


def test_the_longest_are_named_by_their_lines(look):
    place, length = look.longest(1)[0]
    line = int(place.rpartition(":")[2]) - 1
    assert length == max(look.lengths) == len(look.examples([line])[0].pieces)


@pytest.mark.parametrize(
    ("lengths", "edges", "counts"),
    [([3, 4, 4, 15], (3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16), (1, 2, *[0] * 9, 0, 1, 0)), ([], (0,), (0,))],
)
def test_a_histogram_counts_every_record(lengths, edges, counts):
    found = histogram(np.array(lengths, np.int64))
    assert (found.edges, found.counts) == (edges, counts) and len(found.labels) == len(counts)


def test_one_giant_does_not_flatten_the_histogram():
    found = histogram(np.array([10] * 500 + [30] * 499 + [10**6]))
    assert sum(found.counts) == 1000 and found.counts[-1] == 1 and found.edges[-1] <= 40


def test_the_command_shows_records_tokens_and_a_picture(look, tmp_path, capsys):
    picture = tmp_path / "lengths.svg"
    options = ["--tokenizer", str(look.tokenizer.folder), "--loss-on", "assistant", "--seq-len", "64"]
    assert main(["data-peek", str(look.data.folder), *options, "--plot", str(picture), "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["unit"] == "tokens" and len(document["examples"]) == 3 and "⟦" in err and "█" in err
    assert sum(document["lengths"]["counts"]) == document["figures"]["documents"]
    assert "tokens of a record" in picture.read_text()
    assert re.search(r"trained", err)


def test_without_a_tokenizer_the_unit_is_the_byte(chat, capsys):
    assert main(["data-peek", str(chat.folder), "--records", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["unit"] == "bytes" and "user: question" in err


def test_a_split_that_gives_no_tokens_is_shown_as_records(look, tmp_path, capsys):
    (tmp_path / "long").mkdir()
    values = [talk("q", "a" + str(i)) | {"split": ("train", "test")[i % 2]} for i in range(6)]
    values += [talk("q " * 90, "a") | {"split": "validation"}]
    data = make_dataset(tmp_path / "long", values)
    options = ["--tokenizer", str(look.tokenizer.folder), "--split", "validation", "--seq-len", "64", "--at", "1"]
    assert main(["data-peek", str(data.folder), *options]) == 0
    assert "it gives no tokens under these settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--at", "9999"], "no such record"), (["--split", "test_postcutoff"], "no test_postcutoff split"),
     (["--plot", "x.jpg"], "PNG or SVG"), (["data.seq_len=4"], "values without a recipe"),
     (["--records", "-1"], "not a number of records")],
)  # fmt: skip
def test_bad_arguments_are_told(chat, capsys, options, words):
    assert main(["data-peek", str(chat.folder), *options]) == 2
    assert words in capsys.readouterr().err


def test_a_draw_depends_on_the_seed_alone(look):
    assert look.draw(5, 1) == look.draw(5, 1) != look.draw(5, 2)
    assert peek.NO_SOURCE not in {row.name for row in look.sources()}


# ---- any size


@pytest.mark.parametrize("options", [[], ["--longest"], ["--at", "3", "--at", "1"], ["--longest", "--tokenizer"]])
def test_a_look_reads_the_file_once(look, capsys, monkeypatch, options):
    reads, lines = [], dataset.Dataset.iter_lines
    if "--tokenizer" in options:
        options = [*options, str(look.tokenizer.folder), "--loss-on", "assistant", "--seq-len", "64"]
    monkeypatch.setattr(dataset.Dataset, "iter_lines", lambda data, split: reads.append(split) or lines(data, split))
    assert main(["data-peek", str(look.data.folder), *options, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert reads == ["train"] and len(document["examples"]) == (2 if "--at" in options else 3)
    if "--longest" in options:
        assert [one["place"] for one in document["examples"]] == [place for place, _ in document["longest"][:3]]


def test_memory_is_a_few_bytes_a_record(tmp_path):
    """Sixty bytes or less a record where the records together are far larger."""
    values = [{"text": f"{i} " + "x" * 300} for i in range(6000)]
    data = make_dataset(tmp_path, values, near=0, train_ratio=1.0, val_ratio=0.0)
    look = Peek(data, "train")
    tracemalloc.start()
    try:
        assert len(look.longest_examples(2)) == 2 and sum(row.num_records for row in look.sources()) == 6000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6000 * 60 < data.path("train").stat().st_size / 4


def test_a_giant_record_is_taken_apart_at_its_ends(look, tmp_path):
    (tmp_path / "giant").mkdir()
    values = [{"text": f"begin {i} " + "word " * 40_000 + "the end", "split": "train"} for i in range(2)]
    data = make_dataset(
        tmp_path / "giant", [*values, {"text": "v", "split": "validation"}, {"text": "t", "split": "test"}]
    )
    split = tokens.open_split(tokens.tokenize(data, look.tokenizer), "train")
    [example] = Peek(data, "train", split, look.tokenizer).examples([1])
    assert example.num_tokens == split.offsets[2] - split.offsets[1] > 40_000 and len(example.pieces) == 1024
    assert example.pieces[-1].place == example.num_tokens - 1 and example.num_trained == example.num_tokens - 1
    [_, text] = peek_view.example_lines(example, look.tokenizer, colour=False, with_ids=False)
    left_out = example.num_tokens - 1024
    assert "begin 1" in text and f"[... {left_out} tokens ...]" in text and "the end<|endoftext|>" in text
    assert len(text) < 10_000


@pytest.mark.parametrize("bos", [None, EOS], ids=["no BOS", "BOS is EOS"])
def test_of_a_text_all_tokens_but_the_first_are_shown_as_trained(look, tmp_path, bos):
    """As training takes it, whatever the first token is; the end of a text is trained too."""
    (tmp_path / "plain").mkdir()
    data = make_dataset(tmp_path / "plain", [{"text": f"text {i}"} for i in range(60)])
    roles = {"bos": bos, "eos": EOS, "pad": None}
    tokenizer = Tokenizer(look.tokenizer.folder, look.tokenizer.manifest | {"roles": roles, "add_bos": False})
    split = tokens.open_split(tokens.tokenize(data, tokenizer), "train")
    plain = Peek(data, "train", split, tokenizer)
    [example] = plain.examples([0])
    assert [piece.is_trained for piece in example.pieces] == [False, *[True] * (example.num_tokens - 1)]
    assert example.pieces[-1].text == EOS and int(plain.trained.sum()) == split.num_trained_tokens


def test_a_turn_that_calls_tools_and_a_conversation_of_many_turns_are_shown():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    lines = peek_view.example_lines(
        peek.Example("train.jsonl:1", {"messages": turns}), None, colour=False, with_ids=True
    )
    assert lines[1:] == ["user: 1+1?", 'assistant: add {"a":1}']
    many = peek.Example("train.jsonl:1", {"prompt": turns * 40, "completion": "2"})
    lines = peek_view.example_lines(many, None, colour=False, with_ids=True)
    assert len(lines) == 14 and "[... 69 turns ...]" in lines and lines[-1] == "completion: 2"


@pytest.mark.parametrize(
    "value",
    [{"text": "a line\n" * 5000}, {"text": "word " * 50_000},
     {"messages": [{"role": "user", "content": "word " * 90 + "\nlines\n" * 200}] * 60}],
    ids=["lines", "one line", "turns"],
)  # fmt: skip
def test_a_record_without_tokens_fills_no_more_than_a_screen(value):
    lines = peek_view.example_lines(peek.Example("train.jsonl:1", value), None, colour=False, with_ids=False)
    assert sum(line.count("\n") + 1 for line in lines) <= 40 and sum(map(len, lines)) < 8_000
    assert any("[... " in line for line in lines)
