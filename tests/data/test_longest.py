"""The longest record of a recipe's data: known from tokens of any length that tell it, and from no others."""

from pathlib import Path

import pytest

from tests.data.test_supervised import talk
from tests.data.test_tokens import make_dataset, make_tokenizer, texts
from training.data import longest, tokens
from training.data.supervision import Settings
from training.recipe.load import load

RECIPE = """
name: tune
method: full
model: {{base: smollm2-135m-instruct}}
tokenizer: {{path: "{tokenizer}"}}
data: {{dataset: {dataset}, seq_len: {seq_len}, loss_on: {loss_on}, overlong: {overlong}}}
stop: {{max_steps: 1}}
"""


@pytest.fixture
def known(tmp_path: Path):
    """A function that says what is known for some settings, of data tokenized under others: 30 short and a long one."""
    tokenizer = make_tokenizer(make_dataset(tmp_path, [{"text": text} for text in texts() if text.strip()]))
    rows = [talk(f"question {i}", f"answer {i}") | {"split": "train", "group": f"g{i}"} for i in range(30)]
    rows += [talk("z9 " * 150, "a long one") | {"split": "train"}, talk("v", "v") | {"split": "validation"}]
    data = make_dataset(tmp_path, rows, near=0, train_ratio=0.9, val_ratio=0.1)

    def known(counted: Settings, seq_len: int, overlong: str = "drop", loss_on: str = "assistant") -> int | None:
        tokens.tokenize(data, tokenizer, counted)
        path = tmp_path / "tune.yaml"
        path.write_text(
            RECIPE.format(
                tokenizer=tokenizer.folder, dataset=data.reference, seq_len=seq_len, loss_on=loss_on, overlong=overlong
            )
        )
        found = longest.of_recipe(load(path, []).recipe)
        return found and found.tokens

    return known


def test_tokens_of_another_length_tell_the_longest_record(known):
    whole = known(Settings("assistant", 1024), 1024)
    assert whole > 300
    for seq_len in (400, 2048):
        assert known(Settings("assistant", 1024), seq_len) == whole
        assert known(Settings("assistant", 1024), seq_len, "left") == whole


def test_tokens_without_the_long_ones_do_not_tell_what_a_greater_length_would_keep(known):
    short = known(Settings("assistant", 200), 200)
    assert short < 200
    assert known(Settings("assistant", 200), 1024) is None
    assert known(Settings("assistant", 200), 150) == short  # what was too long is too long for this too
    assert known(Settings("assistant", 200), 150, "left") is None  # but here it would be shortened to 150


def test_tokens_of_other_labels_do_not_tell(known):
    assert known(Settings("all", 1024), 512) is None
