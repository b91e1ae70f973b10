"""Ids held against the real llama.cpp: every pre-tokenizer, odd text, a base with NFC, and a wrong name found out."""

import errno
import json
import random
import unicodedata
from pathlib import Path

import pytest

from tests.tokenizer.conftest import corpus_of, sample_texts
from tests.tokenizer.test_encoder import odd_text
from training.core.errors import MachineError, RunError
from training.llamacpp import tiny
from training.llamacpp.client import Client
from training.llamacpp.server import ServerProcess
from training.tokenizer import artifact, pretokenizers, proof
from training.tokenizer.artifact import Tokenizer
from training.tokenizer.template import of_tokenizer
from training.tokenizer.train import Settings, train

pytestmark = pytest.mark.slow
_NOT_KNOWN = ("Cn", "Co")


def odd_lines(count: int) -> list[str]:
    """Lines of any characters that the Unicode versions of both sides know."""
    draw = random.Random(3)
    lines = []
    while len(lines) < count:
        text = "".join(c for c in odd_text(draw) if unicodedata.category(c) not in _NOT_KNOWN)
        lines += [line for line in text.split("\n") if line.strip()]
    return lines[:count]


@pytest.mark.parametrize("name", pretokenizers.CONFIGURATIONS)
def test_llama_cpp_gives_the_same_ids(make_tokenizer, name: str):
    lines = odd_lines(1000)
    tokenizer = make_tokenizer(lines + sample_texts(), pre_tokenizer=name, vocab_size=1500)
    counts = proof.prove(tokenizer, lines)
    assert counts["lines"] == 1000 and counts["different"] == 0 and counts["nasty_strings"] > 60


def test_a_base_with_nfc_has_the_same_ids_for_text_that_is_not_nfc(make_tokenizer, tmp_path: Path):
    tokenizer = make_tokenizer(pre_tokenizer="qwen2")
    tokenizer.copy_to(tmp_path)
    (tmp_path / artifact.MANIFEST_IN_CHECKPOINT).unlink()
    document = json.loads((tmp_path / "tokenizer.json").read_text()) | {"normalizer": {"type": "NFC"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    lines = ["cafe\u0301", "\u1100\u1161\u11a8", "A\u030angstro\u0308m", "\u0958 \u0915\u093c", "\u212b \u2126"]
    assert any(unicodedata.normalize("NFC", line) != line for line in lines)
    assert proof.prove(artifact.of_folder(tmp_path), lines)["different"] == 0


def test_a_wrong_name_is_found_out(make_tokenizer):
    tokenizer = make_tokenizer(pre_tokenizer="gpt-2")
    wrong = Tokenizer(tokenizer.folder, tokenizer.manifest | {"pre_tokenizer": "smollm"})
    with pytest.raises(RunError, match="splits text into other tokens"):
        proof.prove(wrong, sample_texts())


@pytest.mark.parametrize("name", ["chatml", "llama-3"])
def test_a_conversation_is_served_as_it_is_trained(make_tokenizer, tmp_path: Path, name: str):
    """B31: one text, one BOS, and the template's control tokens as one id each."""
    tokenizer = make_tokenizer(chat_template=name)
    messages = [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": " hi 12\n"},
        {"role": "assistant", "content": "yo \u4f60"}, {"role": "user", "content": "and?"},
    ]  # fmt: skip
    rendered = of_tokenizer(tokenizer).render(messages, prompt=True)
    model = tiny.write(
        tmp_path / "chat.gguf", seed=1, vocabulary=proof.vocabulary(tokenizer), template=tokenizer.chat_template
    )
    with ServerProcess.start(model, log=tmp_path / "log", ctx_size=512) as server:
        server.wait_healthy(60)
        client = Client(server.url)
        assert client.apply_template(messages) == rendered
        assert client.tokenize(rendered, add_special=True, parse_special=True) == tokenizer.encode(rendered)
        answered = client.chat(messages, max_tokens=1)
    [ids] = tokenizer.encode_rendered([rendered])
    assert answered["usage"]["prompt_tokens"] == len(ids) + 1 and tokenizer.encode(rendered)[1:] == ids.tolist()
    controls = [number for number in ids.tolist() if number in tokenizer.specials.values()]
    assert len(controls) == rendered.count("<|")


def test_a_full_disk_is_told_by_its_place_and_nothing_is_kept(own_roots: Path, monkeypatch: pytest.MonkeyPatch):
    """The proof's file lies in the cache, which may be on another disk than the tokenizers."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tiny, "write", full)
    with pytest.raises(MachineError, match="the disk is full") as caught:
        train(corpus_of(sample_texts()), Settings(vocab_size=400), name="full", prove=proof.prove)
    assert caught.value.where.endswith("cache/proofs") and "free" in caught.value.found
    assert not list(own_roots.rglob("tokenizer.json")) and not list((own_roots.parent / "cache/proofs").iterdir())
