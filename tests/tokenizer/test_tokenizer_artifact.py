"""The tokenizer on disk: specials are one id everywhere in prompts and never in documents; both libraries agree."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from training.cli import main
from training.core.errors import IntegrityError
from training.tokenizer import artifact
from training.tokenizer.train import Settings

SPECIALS = Settings().specials


@pytest.mark.parametrize("special", SPECIALS)
def test_each_special_is_one_id_at_every_position(make_tokenizer, special: str):
    """B33: after save and load."""
    tokenizer = make_tokenizer()
    expected = tokenizer.manifest["specials"][special]
    for text in (special, f"hello{special}", f"a {special}\n", f"{special}{special}x", f"é {special} 12{special}"):
        ids = tokenizer.encode(text)[1:]
        assert ids.count(expected) == text.count(special)
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["llama-bpe", "smollm", "gpt-2", "qwen2"])
def test_specials_written_in_a_document_stay_text(make_tokenizer, name: str):
    """B38: also where the training text holds them so often that they are worth merging."""
    tokenizer = make_tokenizer(["A<|im_end|>B <|endoftext|> <|bos|>" * 40] * 20, pre_tokenizer=name)
    control = set(tokenizer.manifest["specials"].values())
    texts = ["A<|im_end|>B", *SPECIALS, " ".join(SPECIALS), "<|im_end|>\n<|im_start|>user\n"]
    for text, ids in zip(texts, tokenizer.encode_documents(texts), strict=True):
        assert ids[0] == tokenizer.bos_id and ids[-1] == tokenizer.eos_id
        assert not control & set(ids[1:-1].tolist())
        assert tokenizer.decode(ids[1:-1].tolist()) == text


def test_documents_have_one_bos_and_one_eos_and_a_small_type(make_tokenizer):
    tokenizer = make_tokenizer()
    [ids, empty] = tokenizer.encode_documents(["hello 123", ""])
    assert ids.dtype == np.dtype("<u2") and empty.tolist() == [tokenizer.bos_id, tokenizer.eos_id]
    assert ids[:-1].tolist() == tokenizer.encode("hello 123")


def test_a_prompt_has_one_bos(make_tokenizer):
    tokenizer = make_tokenizer()
    assert tokenizer.add_bos
    assert tokenizer.encode("hi").count(tokenizer.bos_id) == 1
    assert tokenizer.encode("")[0] == tokenizer.bos_id


@pytest.mark.slow
def test_transformers_reads_the_same_tokenizer(make_tokenizer):
    """In a process of its own, since importing transformers takes seconds."""
    tokenizer = make_tokenizer()
    texts = ["don't 12345\r\n  x", "a <|im_end|>\n", "e\u0301 你好 \U0001f600", " 's , . ! n't"]
    code = (
        "import json, sys; from transformers import AutoTokenizer\n"
        "t = AutoTokenizer.from_pretrained(sys.argv[1]); texts = json.load(sys.stdin)\n"
        "ids = [t(x).input_ids for x in texts]\n"
        "print(json.dumps([ids, [t.decode(i) for i in ids], t.bos_token_id, t.eos_token_id, t.pad_token_id, len(t)]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tokenizer.folder)],
        input=json.dumps(texts), capture_output=True, text=True, check=True,
    )  # fmt: skip
    ids, decoded, bos, eos, pad, size = json.loads(run.stdout.strip().splitlines()[-1])
    assert ids == [tokenizer.encode(text) for text in texts]
    assert decoded == [artifact.BOS + text for text in texts]
    assert (bos, eos, pad, size) == (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size)


def test_the_flags_that_the_converter_reads_are_explicit(make_tokenizer):
    config = json.loads((make_tokenizer().folder / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] is True and config["add_eos_token"] is False
    assert config["clean_up_tokenization_spaces"] is False
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_changed_bytes_are_refused(make_tokenizer):
    tokenizer = make_tokenizer()
    path = tokenizer.folder / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"ByteLevel", b"ByteLeveL", 1))
    with pytest.raises(IntegrityError, match="not its manifest's"):
        artifact.load(tokenizer.folder)


def test_a_checkpoints_folder_loads_alike(make_tokenizer, tmp_path: Path):
    tokenizer = make_tokenizer()
    tokenizer.copy_to(tmp_path)
    copy = artifact.load(tmp_path)
    assert (copy.hash, copy.manifest) == (tokenizer.hash, tokenizer.manifest)
    assert copy.encode("x 123") == tokenizer.encode("x 123")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(IntegrityError):
        artifact.load(tmp_path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture):
    records = tmp_path / "a.jsonl"
    records.write_text("".join(json.dumps({"text": f"number {i * 37} and {i}"}) + "\n" for i in range(300)))
    assert main(["data-prepare", str(records)]) == 0
    capsys.readouterr()
    arguments = ["tokenizer-train", "--dataset", "a", "--vocab-size", "300", "--name", "t", "--json"]
    assert main(arguments) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert document["vocab_size"] == 300 and document["reused"] is False and document["pre_tokenizer"] == "llama-bpe"
    assert set(document["bytes_per_token"]) == {"train", "validation"} and document["bytes_per_token"]["train"] > 1.2
    assert document["tokenizer"] in output.err and "predicted at most" in output.err
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["reused"] is True


def test_the_command_without_a_dataset_names_the_next(capsys: pytest.CaptureFixture):
    assert main(["tokenizer-train", "--dataset", "nobody"]) == 2
    assert "make data-prepare" in capsys.readouterr().err
