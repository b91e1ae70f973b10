"""Training a tokenizer: one result for any order and any number of threads, capped runs, specials, reuse."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from training.cli import main
from training.core import files
from training.core.errors import RunError, UserError
from training.core.paths import REPOSITORY
from training.data.stdlib import StandardLibrary
from training.tokenizer import artifact, pretokenizers
from training.tokenizer.train import Corpus, Settings, cut_long_runs, train

SPECIALS = Settings().specials
TIED = ["aaabbbccccdddd", "bbbaaaddddcccc"]

_IN_A_PROCESS = """
import json, sys
from training.tokenizer.train import Corpus, Settings, train
texts = json.load(sys.stdin)
corpus = Corpus("sample", sys.argv[1], "train", sum(map(len, texts)), lambda: iter(texts))
folder, _ = train(corpus, Settings(vocab_size=int(sys.argv[2])), name="small")
print((folder / "tokenizer.json").read_text())
"""


def corpus(texts: list[str], digest: str = "0" * 64) -> Corpus:
    return Corpus("sample", digest, "train", sum(len(text.encode()) for text in texts), lambda: iter(texts))


def trained_in_a_process(texts: list[str], vocab_size: int, threads: int, run: int) -> str:
    """The tokenizer.json that a process of its own makes, with its own hash seeds and so many threads."""
    environment = os.environ | {"RAYON_NUM_THREADS": str(threads), "PYTHONHASHSEED": str(run)}
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_PROCESS, f"{run:064x}", str(vocab_size)],
        input=json.dumps(texts), capture_output=True, text=True, cwd=REPOSITORY, env=environment, check=True,
    )  # fmt: skip
    return done.stdout


def test_tied_pairs_give_one_tokenizer_over_twenty_runs_and_both_orders(own_roots: Path):
    """B35: four merges over tied counts."""
    settings = Settings(vocab_size=256 + len(SPECIALS) + 4, min_frequency=1)
    hashes = set()
    for run in range(20):
        texts = TIED if run % 2 else TIED[::-1]
        folder, reused = train(corpus(texts, f"{run:064x}"), settings, name="tied")
        assert not reused
        hashes.add(artifact.load(folder).hash)
    assert len(hashes) == 1
    assert len(json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]) == 4


def test_order_threads_and_processes_give_one_tokenizer(own_roots: Path):
    """B35: 1 and 8 threads, texts in order and reversed, each in a process of its own."""
    texts = [f"value {i * 7919} of item_{i % 17} = {i * i} über {chr(0x4E00 + i)}\n" for i in range(400)] + TIED
    texts += [path.read_text(errors="replace") for path in StandardLibrary().paths[:25]]
    results = [
        trained_in_a_process(order, 420, threads, run)
        for run, (order, threads) in enumerate([(texts, 1), (texts[::-1], 8), (sorted(texts), 2)])
    ]
    assert results[0] == results[1] == results[2]
    assert len(json.loads(results[0])["model"]["merges"]) > 100


def test_one_line_without_blanks_ends_in_seconds(own_roots: Path):
    """B36: 200,000 letters, vocabulary 400; without the cap this takes 20 seconds and more."""
    line = "".join(chr(ord("a") + (i * i * 31 + i // 7) % 26) for i in range(200_000))
    started = time.monotonic()
    folder, _ = train(corpus([line]), Settings(vocab_size=400), name="long")
    assert time.monotonic() - started < 8
    assert artifact.load(folder).vocab_size == 400


@pytest.mark.parametrize("run", ["a" * 2500, " " * 2500, "\n" * 2500, "x" + " " * 1001 + "y" * 1001])
def test_long_runs_are_cut_and_nothing_is_lost(run: str):
    """B36: blanks too, since they are one pre-token."""
    text = f"before {run} after"
    parts = list(cut_long_runs(text, 1000))
    assert "".join(parts) == text and len(parts) >= 2
    for part in parts:
        assert all(len(word) <= 1000 for word in part.split())
        assert len(part) - len(part.lstrip()) <= 1000


def test_ordinary_text_is_one_piece():
    assert list(cut_long_runs("a b\n" * 5000, 1000)) == ["a b\n" * 5000]


def test_cutting_is_linear_in_the_text():
    started = time.monotonic()
    assert len(list(cut_long_runs(("x" * 1000 + " ") * 3000, 1000))) == 1
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("name", pretokenizers.CONFIGURATIONS)
def test_each_pre_tokenizer_trains_and_keeps_its_name(make_tokenizer, name: str):
    tokenizer = make_tokenizer(pre_tokenizer=name)
    assert tokenizer.pre_tokenizer == name
    text = "don't 12345\r\n über 你好 \U0001f468‍\U0001f469  e\u0301\t\x00"
    assert tokenizer.decode(tokenizer.encode(text)) == artifact.BOS + text


def test_all_bytes_are_in_the_vocabulary(make_tokenizer):
    tokenizer = make_tokenizer(["plain ascii only, again and again, plain ascii only"], vocab_size=280)
    text = "".join(map(chr, range(0x80, 0x800, 7))) + "\U0001f600你"
    [ids] = tokenizer.encode_documents([text])
    assert tokenizer.decode(ids[1:-1].tolist()) == text


def test_the_manifest_says_what_it_was_trained_on(make_tokenizer):
    manifest = make_tokenizer().manifest
    assert manifest["trained_on"]["split"] == "train" and manifest["trained_on"]["bytes"] > 10_000
    assert manifest["hash"] == files.sha256_file(make_tokenizer().folder / "tokenizer.json")
    assert manifest["specials"] == {text: index for index, text in enumerate(SPECIALS)}
    assert manifest["multi_digit_tokens"] > 0 and manifest["settings"]["longest_run_chars"] == 1000


def test_unchanged_inputs_are_recognised_and_changed_ones_are_not(make_tokenizer):
    """B44."""
    first = make_tokenizer()
    texts = ["one two three 123 " * 50]
    assert train(corpus(texts), Settings(vocab_size=300), name="small")[1] is False
    assert train(corpus(texts), Settings(vocab_size=300), name="small")[1] is True
    assert train(corpus(texts, "1" * 64), Settings(vocab_size=300), name="small")[1] is False
    assert train(corpus(texts), Settings(vocab_size=301), name="small")[1] is False
    assert train(corpus(texts), Settings(vocab_size=300, pre_tokenizer="qwen2"), name="small")[1] is False
    assert artifact.load(first.folder).hash == first.hash


def test_a_vocabulary_too_small_or_a_wrong_name_is_refused():
    with pytest.raises(UserError) as caught:
        Settings(vocab_size=260)
    assert "261" in caught.value.expected
    with pytest.raises(UserError, match="no such pre-tokenizer"):
        Settings(pre_tokenizer="llama3")
    with pytest.raises(UserError, match="not a number of tokens"):
        Settings(num_reserved=-1)


def test_a_text_too_small_for_its_vocabulary_says_so(make_tokenizer, caplog: pytest.LogCaptureFixture):
    made = make_tokenizer(["abab abab"], vocab_size=4000).vocab_size
    assert made < 300 and f"only {made} of 4000" in caplog.text


def test_reserved_tokens_and_templates_by_name(make_tokenizer):
    tokenizer = make_tokenizer(chat_template="llama-3", num_reserved=2)
    kept = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|reserved_0|>", "<|reserved_1|>"]
    assert list(tokenizer.specials) == [artifact.BOS, artifact.EOS, artifact.PAD, *kept]
    assert "<|eot_id|>" in tokenizer.chat_template and tokenizer.encode("<|reserved_1|>")[1:] == [7]
    plain = make_tokenizer(chat_template="none")
    assert plain.chat_template is None and len(plain.specials) == 3
    with pytest.raises(UserError, match="no such chat template"):
        Settings(chat_template="chatnl")


def test_nothing_is_kept_that_could_not_be_proved(own_roots: Path):
    def refuse(tokenizer: artifact.Tokenizer, texts) -> dict:
        assert tokenizer.encode("a") and list(texts) == TIED
        raise RunError("other ids")

    with pytest.raises(RunError):
        train(corpus(TIED), Settings(vocab_size=270), name="unproved", prove=refuse)
    assert list((own_roots / "training/tokenizers/unproved").glob("[!.]*")) == []
    folder, reused = train(corpus(TIED), Settings(vocab_size=270), name="unproved", prove=lambda *_: {"different": 0})
    assert not reused and artifact.load(folder).manifest["proved"] == {"different": 0}


def test_an_error_of_the_texts_is_the_callers(own_roots: Path):
    """The library reads in a thread; what goes wrong there is raised here."""

    def broken():
        yield "text"
        raise UserError("the file is gone")

    with pytest.raises(UserError, match="the file is gone"):
        train(replace(corpus(TIED), read=broken), Settings(vocab_size=270), name="broken")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_is_heard_while_pairs_are_merged(own_roots: Path, tmp_path: Path, number: signal.Signals):
    """On words that have little in common the merging takes far longer than the wait below."""
    draw, path = random.Random(1), tmp_path / "words.jsonl"
    rows = (" ".join("".join(draw.choices("abcdefghijklmnop", k=9)) for _ in range(1000)) for _ in range(900))
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    assert main(["data-prepare", str(path)]) == 0
    command = [sys.executable, "-m", "training", "tokenizer-train", "--dataset", "words", "--vocab-size", "500000"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    assert any("merging pairs" in line for line in process.stderr)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(number)
    process.communicate(timeout=10)
    assert process.returncode == 130
    assert list((own_roots / "training/tokenizers/words").glob("*")) == []


@pytest.mark.slow
def test_a_killed_command_leaves_nothing_that_the_next_does_not_clear(own_roots: Path, tmp_path: Path):
    """While the proof's server runs: it goes too, and the same command makes the same tokenizer."""
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": f"number {i * 37} and {i}"}) + "\n" for i in range(2000)))
    assert main(["data-prepare", str(path)]) == 0
    command = [sys.executable, "-m", "training", "tokenizer-train", "--dataset", "lines", "--vocab-size", "400"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    proofs = own_roots.parent / "cache/proofs"
    limit = time.monotonic() + 120
    while not list(proofs.glob(".work.*/log")):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    [work] = proofs.iterdir()
    [partial] = (own_roots / "training/tokenizers/lines").iterdir()
    assert partial.name.endswith(".partial") and not (partial / "manifest.json").exists()
    while any(map(_runs, children)):
        assert time.monotonic() < limit
        time.sleep(0.01)
    assert subprocess.run(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL).returncode == 0
    assert not list(proofs.iterdir()) and not work.exists()
    [folder] = (own_roots / "training/tokenizers/lines").iterdir()
    assert artifact.load(folder).manifest["proved"]["different"] == 0


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_two_commands_at_once_make_one_tokenizer(own_roots: Path, tmp_path: Path):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": f"number {i * 37} and {i}"}) + "\n" for i in range(2000)))
    assert main(["data-prepare", str(path)]) == 0
    command = [sys.executable, "-m", "training", "tokenizer-train", "--dataset", "lines", "--json", "--name", "one"]
    both = [subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    documents = [json.loads(one.communicate(timeout=120)[0]) for one in both]
    assert documents[0]["tokenizer"] == documents[1]["tokenizer"]
    assert sorted(document["reused"] for document in documents) == [False, True]


@pytest.mark.parametrize(("text", "vocab_size"), [("a0 b1 c2", 300), ("the the the", 261)])
def test_a_vocabulary_without_merges_is_refused_before_a_server_is_asked(own_roots: Path, text: str, vocab_size: int):
    corpus = Corpus("poor", "0" * 64, "train", len(text), lambda: iter([text]))
    with pytest.raises(UserError, match="no entry but single bytes"):
        train(corpus, Settings(vocab_size=vocab_size), name="poor", prove=lambda *_: {})
    assert not list(own_roots.rglob("tokenizer.json"))
