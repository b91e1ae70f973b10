"""What a tokenizer does to text, counted; sizes of vocabulary with their cost; GGUF files and folders beside ours."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from tests.tokenizer.conftest import corpus_of, sample_texts
from training.cli import main
from training.core.errors import UserError
from training.core.paths import REPOSITORY
from training.tokenizer import measure, sweep
from training.tokenizer.train import Corpus, Settings, learn

DEMO = REPOSITORY / "recipes/demo/pretrain-stdlib.yaml"


@pytest.fixture
def records(tmp_path: Path, own_roots: Path) -> str:
    """A prepared data set of two sources; its reference."""
    path = tmp_path / "mixed.jsonl"
    rows = [
        {"text": text, "source": "ab"[number % 2], "group": f"{number}"} for number, text in enumerate(sample_texts())
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["data-prepare", str(path), "--near", "0"]) == 0
    return "mixed"


def test_every_figure_is_counted(make_tokenizer):
    tokenizer = make_tokenizer()
    measured = measure.measure(tokenizer, [("one", "return xyz"), ("two", "\u4f60"), ("one", "q"), ("none", "")])
    ids = [tokenizer.encode_plain([text])[0].tolist() for text in ("return xyz", "\u4f60", "q")]
    assert (
        measured.sources["one"] == measure.Compression(11, len(ids[0]) + len(ids[2])) and "none" not in measured.sources
    )
    assert measured.all.text_bytes == 14 and measured.all.num_tokens == sum(map(len, ids))
    used = set(ids[0] + ids[1] + ids[2])
    assert len(measured.unused_entries) == tokenizer.vocab_size - len(tokenizer.specials) - len(used)
    single = sum(5 <= number < 261 for number in ids[0] + ids[1] + ids[2])  # after the specials come the 256 bytes
    assert single > 0
    assert measured.single_byte_share == pytest.approx(single / measured.all.num_tokens)


def test_no_text_is_refused(make_tokenizer):
    with pytest.raises(UserError, match="no text"):
        measure.measure(make_tokenizer(), [("a", "")])


@pytest.mark.parametrize("size", [280, 300, 320])
def test_a_smaller_vocabulary_is_the_beginning_of_a_larger(size: int):
    corpus = corpus_of(sample_texts())
    whole = json.loads(learn(corpus, Settings(vocab_size=600)).to_str())
    assert sweep.cut(whole, size) == json.loads(learn(corpus, Settings(vocab_size=size)).to_str())


def test_a_sweep_prices_each_size(records: str):
    texts = sample_texts()
    corpus = Corpus("mixed", "0" * 64, "train", sum(map(len, texts)), lambda: iter(texts))
    points = sweep.sweep(corpus, Settings(), [320, 280, 320], [("a", text) for text in texts], DEMO)
    assert [point.vocab_size for point in points] == [280, 320]
    small, large = points
    assert large.measured.all.bytes_per_token > small.measured.all.bytes_per_token
    assert large.parameters - small.parameters == 40 * 256 == large.vocabulary_parameters - small.vocabulary_parameters
    assert large.memory_bytes > small.memory_bytes
    blocks = small.parameters - small.vocabulary_parameters - 4 * 2 * 256 - 256
    assert small.work_per_byte == pytest.approx((blocks + 280 * 256) / small.measured.all.bytes_per_token)
    assert sweep.recommended(points) is min(points, key=lambda point: point.work_per_byte)


def test_a_recipe_with_a_base_is_refused_before_anything_is_trained(tmp_path: Path):
    with pytest.raises(UserError, match="vocabulary of its own"):
        sweep.sweep(corpus_of([]), Settings(), [300], [], REPOSITORY / "recipes/reference/qlora-8b.yaml")


def test_the_command_compares(records: str, make_tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture):
    one, other = make_tokenizer(name="one"), make_tokenizer(name="other", vocab_size=300)
    capsys.readouterr()
    plot = tmp_path / "c.png"
    arguments = ["tokenizer-measure", "one", "other", "--dataset", records, "--plot", str(plot), "--json"]
    assert main(arguments) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert [entry["hash"] for entry in document["tokenizers"]] == [one.hash, other.hash]
    assert set(document["tokenizers"][0]["sources"]) == {"a", "b"}
    assert document["tokenizers"][0]["bytes_per_token"] > document["tokenizers"][1]["bytes_per_token"]
    assert plot.read_bytes().startswith(b"\x89PNG") and "bytes per token" in output.err and "\u2588" in output.err


def test_the_command_sweeps(records: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    capsys.readouterr()
    plot = tmp_path / "s.png"
    assert main(["tokenizer-measure", "--dataset", records, "--sweep", "280,300", "--plot", str(plot), "--json"]) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert [point["vocab_size"] for point in document["points"]] == [280, 300]
    assert document["recommended"] == 300 and document["further"] == [300, 600, 1200]
    assert "at the end of the sizes tried" in output.err and "--sweep 300,600,1200" in output.err
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("best", "asked", "wanted"),
    [
        (1024, [512, 1024, 2048], []), (4096, [1024, 4096], [4096, 8192, 16384]),
        (4096, [4096, 8192], [1024, 2048, 4096]), (300, [300, 400], []),
        (4096, [4096], [1024, 2048, 4096, 8192, 16384]),
        (1 << 20, [4096, 1 << 20], []),
    ],
)  # fmt: skip
def test_a_best_size_at_an_end_of_the_sweep_asks_for_sizes_beyond_it(
    best: int, asked: list[int], wanted: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sweep, "recommended", lambda points: SimpleNamespace(vocab_size=best))
    assert sweep.further([], asked) == wanted


def test_a_size_that_the_text_has_not_is_left_out_of_a_sweep(caplog: pytest.LogCaptureFixture):
    texts = sample_texts()
    given = json.loads(learn(corpus_of(texts), Settings(vocab_size=5000)).to_str())["model"]["vocab"]
    points = sweep.sweep(corpus_of(texts), Settings(), [300, 5000, 6000], [("a", text) for text in texts], DEMO)
    assert [point.vocab_size for point in points] == [300, len(given)] and len(given) < 5000
    assert f"the text gives {len(given)} entries and no more: 5000, 6000 left out" in caplog.text


def test_no_legend_covers_a_bar(records: str, make_tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Each bar of the picture lies wholly outside of the legend's box."""
    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: seen.append(self))
    for name in ("one", "other", "third"):
        make_tokenizer(name=name)
    plot = str(tmp_path / "c.png")
    assert main(["tokenizer-measure", "one", "other", "third", "--dataset", records, "--plot", plot]) == 0
    [picture] = seen
    picture.draw_without_rendering()
    [legend], [axes] = picture.legends, picture.axes
    assert len(axes.patches) == 6 and axes.get_legend() is None
    box = legend.get_window_extent()
    assert not any(box.overlaps(bar.get_window_extent()) for bar in axes.patches)


@pytest.mark.parametrize("extra", [[], ["one", "--sweep", "300"], ["--sweep", "3oo"], ["--sweep", "100"], ["nobody"]])
def test_arguments_that_make_no_sense_are_refused(extra: list[str], records: str, capsys: pytest.CaptureFixture):
    assert main(["tokenizer-measure", "--dataset", records, *extra]) == 2


@pytest.mark.parametrize("extra", [[], ["one", "--sweep", "280,300"]])
def test_neither_or_both_is_refused_with_a_sweep_of_the_same_data(extra: list[str], records: str, capsys):
    assert main(["tokenizer-measure", "--dataset", records, *extra, "--json"]) == 2
    told = json.loads(capsys.readouterr().out)["error"]["next"]
    sizes = "280,300" if extra else "1024,2048,4096"
    assert told == f"make tokenizer-measure DATASET={records} ARGS='--sweep {sizes}'"
