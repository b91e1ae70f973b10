"""Tokens added to a base: new ids behind the old ones, and what must be resized written down."""

import json
from pathlib import Path

import pytest

from training.cli import main
from training.core import files
from training.core.errors import UserError
from training.tokenizer import added, artifact


@pytest.fixture
def base(make_tokenizer, tmp_path: Path) -> added.Base:
    """A folder as a model's maker would write it, whose embedding has ten rows to spare."""
    tokenizer = make_tokenizer()
    folder = tmp_path / "my-base"
    folder.mkdir()
    tokenizer.copy_to(folder)
    (folder / artifact.MANIFEST_IN_CHECKPOINT).unlink()
    files.write_json(folder / "config.json", {"vocab_size": tokenizer.vocab_size + 10})
    return added.Base.of(artifact.find(str(folder)))


def test_old_ids_stay_and_new_ones_come_behind(base: added.Base):
    folder, found = added.add(base, ["<|tool|>"], ["kilowatt"], name="more")
    more, old = artifact.load(folder), base.tokenizer
    first = old.vocab_size
    assert not found and more.manifest["added"] == {"<|tool|>": first, "kilowatt": first + 1}
    assert (more.manifest["base_vocab_size"], more.vocab_size, more.manifest["rows"]) == (first, first + 2, first + 10)
    assert more.manifest["base"]["hash"] == old.hash and more.chat_template == old.chat_template
    text = "def return 123 don't \u4f60"
    assert more.encode(text) == old.encode(text)
    assert more.roles == old.roles and more.specials == old.specials | {"<|tool|>": first}
    assert added.add(base, ["<|tool|>"], ["kilowatt"], name="more") == (folder, True)


def test_a_control_token_stays_text_in_documents_and_a_word_does_not(base: added.Base):
    """B33, B38: each is one id at every position."""
    more = artifact.load(added.add(base, ["<|tool|>"], ["kilowatt"], name="more")[0])
    tool, word = more.manifest["added"].values()
    for text in ("<|tool|>", "x<|tool|>", " <|tool|>\n"):
        [ids] = more.encode_rendered([text])
        [plain] = more.encode_plain([text])
        assert ids.tolist().count(tool) == 1 and tool not in plain
        assert more.decode(ids) == more.decode(plain) == text
    for text in ("kilowatt", "akilowatthour 12", "\u4f60kilowatt"):
        [ids] = more.encode_plain([text])
        assert ids.tolist().count(word) == 1 and more.decode(ids) == text


def test_rows_grow_where_the_model_has_none_to_spare(base: added.Base):
    words = [f"word{number}" for number in range(12)]
    more = artifact.load(added.add(base, [], words, name="more")[0])
    assert more.manifest["rows"] == more.vocab_size == base.tokenizer.vocab_size + 12


def test_what_is_added_to_an_extended_tokenizer_keeps_the_models_rows(base: added.Base):
    first = artifact.load(added.add(base, [], ["kilowatt"], name="first")[0])
    second = artifact.load(added.add(added.Base.of(first), [], ["megawatt"], name="second")[0])
    assert first.manifest["rows"] == second.manifest["rows"] == base.rows > second.vocab_size


@pytest.mark.parametrize("texts", [["<|im_end|>"], ["<|a|>", "<|a|>"], [""], [" x"], ["return"], ["\udcff"]])
def test_what_is_there_or_has_no_text_is_refused(base: added.Base, texts: list[str]):
    with pytest.raises(UserError):
        added.add(base, texts, [], name="more")


def test_the_command(base: added.Base, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("training.tokenizer.proof.prove", lambda tokenizer, texts: {"different": 0})
    reference = str(base.tokenizer.folder)
    assert main(["tokenizer-add", reference, "--token", "<|tool|>", "--json"]) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert document["added"] == {"<|tool|>": base.tokenizer.vocab_size} and f"{base.rows} rows, as it has" in output.err
    assert document["tokenizer"].startswith("my-base-added@")
    assert main(["tokenizer-add", document["tokenizer"], "--token", "<|two|>", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["added"] == {"<|two|>": base.tokenizer.vocab_size + 1}
    assert main(["tokenizer-add", reference]) == 2
