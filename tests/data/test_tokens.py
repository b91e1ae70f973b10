"""Token shards: every text whole, in order, without control tokens, and keyed by data and tokenizer."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from training.core.errors import IntegrityError, MachineError, UserError
from training.data import dataset, encoding, shard, tokens
from training.data.prepare import Preparation
from training.data.settings import Settings as PreparationSettings
from training.data.source import Jsonl
from training.tokenizer import artifact
from training.tokenizer.train import Corpus, Settings, train


def make_dataset(folder: Path, values: list[dict], **settings) -> dataset.Dataset:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return dataset.load(Preparation([Jsonl(path)], name="small", settings=PreparationSettings(**settings)).run()[0])


def texts() -> list[str]:
    odd = ["A<|im_end|>B", "<|endoftext|>", "\x00 \t\r\n", "e\u0301 你好 \U0001f600", "x" * 5000]
    return [*odd, *(f"def f{i}(x):\n    return x + {i * 1009}\n" for i in range(120))]


@pytest.fixture
def small(tmp_path: Path) -> dataset.Dataset:
    return make_dataset(tmp_path, [{"text": text} for text in texts() if text.strip()])


def make_tokenizer(data: dataset.Dataset, vocab_size: int = 300) -> artifact.Tokenizer:
    corpus = Corpus(data.name, data.hash, "train", 5000, lambda: data.iter_texts("train"))
    return artifact.load(train(corpus, Settings(vocab_size=vocab_size), name="small")[0])


def test_every_document_decodes_to_its_text(small: dataset.Dataset):
    """B38, B29: nothing lost, nothing turned into a control token."""
    tokenizer = make_tokenizer(small)
    folder = tokens.tokenize(small, tokenizer)
    assert folder.parent == small.folder / "tokens"
    for name in small.splits:
        split, expected = tokens.open_split(folder, name), list(small.iter_texts(name))
        assert split.num_documents == len(expected) and split.num_tokens == len(split.tokens) == split.offsets[-1]
        assert split.text_bytes.tolist() == [len(text.encode()) for text in expected]
        for index, text in enumerate(expected):
            ids = split.tokens[int(split.offsets[index]) : int(split.offsets[index + 1])].tolist()
            assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
            assert tokenizer.decode(ids[1:-1]) == text
        assert int((split.tokens == tokenizer.eos_id).sum()) == len(expected)


def test_types_on_disk(small: dataset.Dataset):
    split = tokens.open_split(tokens.tokenize(small, make_tokenizer(small)), "train")
    assert (split.tokens.dtype, split.offsets.dtype, split.text_bytes.dtype) == ("<u2", "<u8", "<u8")
    raw = np.frombuffer((split.folder / "train.tokens.bin").read_bytes(), "<u2")
    assert np.array_equal(raw, split.tokens)
    with pytest.raises(ValueError, match="read-only"):
        split.tokens[0] = 1


def test_batches_do_not_change_the_tokens(small: dataset.Dataset, monkeypatch: pytest.MonkeyPatch):
    tokenizer = make_tokenizer(small)
    folder = tokens.tokenize(small, tokenizer)
    whole = {path.name: path.read_bytes() for path in folder.glob("*.bin")}
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    monkeypatch.setattr(encoding, "_BATCH_RECORDS", 1)
    assert tokens.tokenize(small, tokenizer) == folder
    assert {path.name: path.read_bytes() for path in folder.glob("*.bin")} == whole


def test_the_key_is_data_and_tokenizer(small: dataset.Dataset, tmp_path: Path):
    """B44."""
    tokenizer = make_tokenizer(small)
    folder = tokens.tokenize(small, tokenizer)
    before = (folder / "manifest.json").stat().st_mtime_ns
    assert tokens.tokenize(small, tokenizer) == folder
    assert (folder / "manifest.json").stat().st_mtime_ns == before
    assert tokens.tokenize(small, make_tokenizer(small, 310)) != folder
    (tmp_path / "other").mkdir()
    other = make_dataset(tmp_path / "other", [{"text": text + "!"} for text in texts()])
    assert tokens.tokenize(other, tokenizer).name != folder.name
    manifest = tokens.open_split(folder, "train").manifest
    assert manifest["tokenizer"]["hash"] == tokenizer.hash and manifest["dataset"]["hash"] == small.hash


def test_damaged_tokens_are_made_again_and_damaged_data_is_refused(small: dataset.Dataset):
    tokenizer = make_tokenizer(small)
    folder = tokens.tokenize(small, tokenizer)
    path = folder / "train.tokens.bin"
    good = path.read_bytes()
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    assert tokens.tokenize(small, tokenizer) == folder and path.read_bytes() == good
    train_split = small.path("train")
    train_split.write_bytes(train_split.read_bytes().replace(b"return", b"rEturn", 1))
    with pytest.raises(IntegrityError, match="bytes have changed"):
        tokens.tokenize(small, make_tokenizer(small, 320))


def test_chat_records_are_refused(tmp_path: Path):
    chat = make_dataset(tmp_path, [{"messages": [{"role": "user", "content": f"q{i}"}]} for i in range(60)])
    with pytest.raises(UserError, match="can be pretrained on") as caught:
        tokens.tokenize(chat, make_tokenizer(chat))
    assert "messages" in caught.value.found


def test_a_split_that_is_not_there(small: dataset.Dataset):
    with pytest.raises(UserError, match="no test_postcutoff tokens"):
        tokens.open_split(tokens.tokenize(small, make_tokenizer(small)), "test_postcutoff")


@pytest.mark.parametrize("damage", ["other", "gone", "garbage", "shorter"])
def test_a_split_with_other_bytes_is_told_by_whoever_reads_it(small: dataset.Dataset, damage: str):
    data = small
    assert len(list(data.iter_texts("train"))) > 50
    path = data.path("train")
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        changed = {"other": content.replace(b"return", b"RETURN", 1), "garbage": b"x" + content[1:], "shorter": b"x"}
        path.write_bytes(changed[damage])
    with pytest.raises(IntegrityError):
        list(data.iter_texts("train"))


def test_a_disk_that_fills_up_is_told_as_that_and_leaves_nothing(small: dataset.Dataset, monkeypatch):
    """Real writes to the one device that is always full."""
    tokenizer = make_tokenizer(small)
    monkeypatch.setattr(shard.Shard, "_open", _full)
    with pytest.raises(MachineError, match="the disk is full"):
        tokens.tokenize(small, tokenizer)
    assert not list(small.folder.glob("tokens/*")) and not list(small.folder.glob("tokens/.*.partial"))


def _full(self: shard.Shard, part: str):
    return os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb")
