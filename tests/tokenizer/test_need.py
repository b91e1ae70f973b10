"""B36: memory of training is predicted first, told, never exceeded, and not told twice as large."""

import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from training.core.errors import MachineError
from training.core.paths import REPOSITORY
from training.data.stdlib import StandardLibrary
from training.tokenizer import need, pretokenizers, proof, train

SLACK_BYTES = 64 << 20
KINDS = {"nothing to learn": 8, "code": 8, "all code": 1, "words": 8, "runs": 1, "emoji": 1, "one text": 1, "wide": 1}
"""Each with as many threads of the library."""
TRIAL = """
import sys
from pathlib import Path
from tests.tokenizer.test_need import corpus, kept
from training.core import files, paths, process
from training.tokenizer import proof, train
made, settings = kept(corpus(sys.argv[1]), Path(sys.argv[3])), train.Settings(int(sys.argv[2]))
growth = process.Growth()
folder, _ = train.train(made, settings, name="trial", prove=proof.prove)
print(files.read_json(folder / "manifest.json")["predicted_memory_bytes"], growth.peak_bytes())
"""


def corpus(kind: str) -> train.Corpus:
    """Source code, a little and more; words that hardly ever come again; runs of a thousand letters; one pair in every
    word; one text of many megabytes, and one whose characters take four bytes each in memory."""
    letters, generator = "abcdefghijklmnopqrstuvwxyz", random.Random(5)
    if kind in ("code", "all code"):
        texts = [path.read_text(errors="replace") for path in StandardLibrary().paths[: 30 if kind == "code" else 500]]
    elif kind in ("one text", "wide"):
        words = ["".join(generator.choices(letters[:9], k=4)) for _ in range(1_000_000)]
        texts = [" ".join([*words, "\U0001f600"] if kind == "wide" else words)]
    elif kind == "emoji":
        faces = ["".join(chr(generator.randrange(0x1F300, 0x1F640)) for _ in range(3)) for _ in range(40_000)]
        texts = [" ".join(faces[at : at + 300]) for at in range(0, len(faces), 300)]
    else:
        length, count = {"nothing to learn": (1, 20_000), "words": (8, 60_000), "runs": (900, 900)}[kind]
        words = ["".join(generator.choices(letters, k=length)) for _ in range(count)]
        texts = [" ".join(words[at : at + 500]) for at in range(0, count, 500)]
    size = sum(len(text.encode()) for text in texts)
    return train.Corpus("x", "0" * 64, "train", size, lambda: iter(texts))


def kept(made: train.Corpus, path: Path) -> train.Corpus:
    """The corpus as a file of records that is read anew each time, as a data set's is."""
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in made.read()))

    def read() -> Iterator[str]:
        with open(path, "rb") as file:
            yield from (json.loads(line)["text"] for line in file)

    return replace(made, read=read, samples={"train": read})


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [280, 8192])
@pytest.mark.parametrize("kind", KINDS)
def test_training_takes_no_more_than_was_predicted_and_half_of_it_or_more(
    own_roots: Path, tmp_path: Path, kind: str, vocab_size: int
):
    """The bound that docs/tokenizer.md states, of reading, learning, measuring and the proof together."""
    command = [sys.executable, "-c", TRIAL, kind, str(vocab_size), str(tmp_path / "texts.jsonl")]
    environment = os.environ | {"RAYON_NUM_THREADS": str(KINDS[kind])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert done.returncode == 0, done.stderr
    predicted, peak = map(int, done.stdout.split())
    assert peak <= predicted <= 2 * peak + SLACK_BYTES, (predicted >> 20, peak >> 20)


def test_threads_are_those_that_the_library_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "7")
    assert need.num_threads() == 7
    for word in ("0", "", "many"):
        monkeypatch.setenv("RAYON_NUM_THREADS", word)
        assert need.num_threads() == len(os.sched_getaffinity(0))


def parted(texts: list[str]) -> need.Parted:
    return [(sys.getsizeof(text), train.pieces(text, 1000)) for text in texts]


def test_each_thread_and_the_longest_text_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    few = ["a b c " * 50_000] * 4
    alone = need.predict(parted(few), sum(map(len, few)), "gpt-2", 300)
    together = need.predict(parted(["".join(few)]), sum(map(len, few)), "gpt-2", 300)
    assert together - alone == pytest.approx(need._BYTES_A_BYTE_OF_THE_LONGEST * 3 * len(few[0]), rel=0.01)
    monkeypatch.setenv("RAYON_NUM_THREADS", "33")
    assert need.predict(parted(few), sum(map(len, few)), "gpt-2", 300) - alone == 32 * need._BYTES_A_THREAD


def test_a_part_of_the_text_tells_what_all_of_it_holds(monkeypatch: pytest.MonkeyPatch):
    """Zipf's words: a sixteenth of a text, and the prediction is not less than what the whole has, nor three times."""
    generator = random.Random(3)
    ranks = [int(generator.paretovariate(0.9)) for _ in range(1_500_000)]
    text = " ".join("".join(chr(97 + int(digit)) for digit in str(rank)) for rank in ranks)
    for name in ("_BYTES_A_BYTE_OF_THE_LONGEST", "_BYTES_A_THREAD"):
        monkeypatch.setattr(need, name, 0)
    whole = need.predict(parted([text]), len(text), "gpt-2", 300)
    known = sum(len(word) + 1 for word in set(text.split())) * need._BYTES_A_BYTE
    assert len(text) > 1.5 * need._FEWEST_SAMPLED_BYTES
    assert known <= whole - need._BASE_BYTES <= 3 * known


def test_what_the_machine_has_not_is_refused_before_anything_is_read_twice(monkeypatch: pytest.MonkeyPatch, own_roots):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8 << 20))
    texts = ["some words of text"] * 10
    made = train.Corpus("small", "0" * 64, "train", 200, lambda: iter(texts))
    with pytest.raises(MachineError, match="not enough memory") as caught:
        train.train(made, train.Settings(300), name="small")
    assert "8.00 MiB free" in caught.value.found and not list(own_roots.rglob("tokenizer.json"))


@pytest.mark.parametrize("name", pretokenizers.CONFIGURATIONS)
def test_a_text_in_parts_has_the_same_pre_tokens(name: str, monkeypatch: pytest.MonkeyPatch):
    """So that parts change no vocabulary: cut as often as can be, on code, on other scripts and on odd blanks."""
    monkeypatch.setattr(train, "_PIECE_CHARS", 16)
    cutter = pretokenizers.build(name)
    odd = ["don't  we'll\n\n  x); \r\n\ty 12 345\n6", "你好 世界 a\u0301 b\n(c)\n\n d", " é x\u00a0y\n'tis\n's 't"] * 20
    for text in [*(path.read_text(errors="replace") for path in StandardLibrary().paths[::60]), "\n".join(odd), *odd]:
        parts = list(train.pieces(text, 1000))
        pieces = [piece for part in parts for piece, _ in cutter.pre_tokenize_str(part)]
        assert "".join(parts) == text and pieces == [piece for piece, _ in cutter.pre_tokenize_str(text)]


def test_lines_for_the_proof_are_drawn_from_everywhere_and_held_a_thousand_at_a_time():
    tracemalloc.start()
    drawn = proof._draw(f"line {number} of many\n\n" for number in range(60_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    numbers = sorted(int(line.split()[1]) for line in drawn)
    assert len(set(numbers)) == proof.NUM_LINES and peak < 1 << 20
    assert abs(sum(numbers) / len(numbers) - 30_000) < 2500 and numbers[-1] > 59_000
    assert proof._draw(["a\n\nb"]) == ["a", "b"]
