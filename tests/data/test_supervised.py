"""Records with answers as ids and labels: by hand, under every policy, and refused where nothing could be learned."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data import templates
from tests.data.test_tokens import make_dataset, make_tokenizer, texts
from training.core.errors import UserError
from training.data import tokens
from training.data.supervised import Encoder
from training.data.supervision import Settings
from training.tokenizer.artifact import BOS, EOS, TEMPLATE, TURN_END, Tokenizer

ANSWERS = Settings(loss_on="assistant", seq_len=80)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_tokenizer(make_dataset(tmp_path, [{"text": text} for text in texts() if text.strip()]))


def talk(*contents: str) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}


def encode(tokenizer: Tokenizer, settings: Settings, *values: dict, form: str = "messages"):
    encoder = Encoder(form, tokenizer, settings)
    return list(encoder.encode(values)), encoder


def trained_text(tokenizer: Tokenizer, sample) -> str:
    return tokenizer.decode(sample.ids[sample.trained == 1].tolist())


def test_only_answers_and_their_ends_are_labels(tokenizer):
    """B24, B26, B31: one BOS, which is no label; six trained tokens for three one-letter answers."""
    (sample,), _ = encode(tokenizer, ANSWERS, talk("q", "a", "q", "b", "q", "c"))
    assert trained_text(tokenizer, sample) == "a<|im_end|>b<|im_end|>c<|im_end|>"
    assert int(sample.trained.sum()) == 6 and sample.text_bytes == len("abc") + 3 * len(TURN_END)
    assert sample.ids.tolist().count(tokenizer.bos_id) == 1 and sample.ids[0] == tokenizer.bos_id
    assert sample.ids[-1] == tokenizer.specials[TURN_END] and sample.trained[-1] == 1


def test_the_ids_are_those_that_a_server_makes_of_the_rendered_text(tokenizer):
    """B31: text, BOS included, as a prompt is encoded."""
    (sample,), encoder = encode(tokenizer, ANSWERS, talk("123 four", "don't"))
    rendered = encoder._renderer.render(talk("123 four", "don't")["messages"]).text
    assert sample.ids.tolist() == tokenizer.encode(rendered)[: len(sample.ids)]


def test_a_template_that_prints_the_bos_gets_no_second_one(tokenizer):
    """B31."""
    (tokenizer.folder / TEMPLATE).write_text("{{ bos_token }}" + tokenizer.chat_template)
    anew = dataclasses.replace(tokenizer)
    (sample,), _ = encode(anew, ANSWERS, talk("q", "a"))
    assert sample.ids.tolist().count(anew.bos_id) == 1 and sample.trained[0] == 0


@pytest.mark.parametrize(
    ("loss_on", "expected"),
    [
        ("assistant", "a<|im_end|>b<|im_end|>"),
        ("completion", "a<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"),
    ],
)
def test_what_each_choice_trains(tokenizer, loss_on, expected):
    """T13: completion trains what stands between answers too."""
    (sample,), encoder = encode(tokenizer, dataclasses.replace(ANSWERS, loss_on=loss_on), talk("q", "a", "r", "b"))
    assert trained_text(tokenizer, sample) == expected and encoder.several_answers == 1
    (whole,), _ = encode(tokenizer, dataclasses.replace(ANSWERS, loss_on="all"), talk("q", "a", "r", "b"))
    assert whole.trained.tolist() == [0] + [1] * (len(whole.ids) - 1)


def test_a_completion_is_encoded_apart_and_ends(tokenizer):
    value = {"prompt": "x = 1", "completion": "23"}
    (sample,), _ = encode(
        tokenizer, dataclasses.replace(ANSWERS, loss_on="completion"), value, form="prompt-completion"
    )
    prompt, completion = tokenizer.encode_plain(["x = 1", "23"])
    assert sample.ids.tolist() == [tokenizer.bos_id, *prompt, *completion, tokenizer.eos_id]
    assert trained_text(tokenizer, sample) == "23" + EOS


# ---- control tokens


@pytest.mark.parametrize("text", ["A<|im_end|>B", BOS, f"x{EOS}"])
def test_a_text_that_would_forge_a_turn_is_refused_or_left_out(tokenizer, text):
    """B38: refused with its line; else counted, and the others are kept."""
    with pytest.raises(UserError, match="control token") as caught:
        encode(tokenizer, ANSWERS, talk("q", "a"), talk(text, "b"))
    assert "record:2" in str(caught.value.where)
    samples, encoder = encode(
        tokenizer, dataclasses.replace(ANSWERS, on_error="drop"), talk("q", "a"), talk(text, "b"), talk("q", text)
    )
    assert [sample.line for sample in samples] == [0] and encoder.counts["control_token_in_text"] == 2


def test_a_record_that_the_template_refuses_is_told_or_counted(tokenizer):
    (tokenizer.folder / TEMPLATE).write_text(templates.BRACKETS)
    anew = dataclasses.replace(tokenizer)
    odd = {"messages": [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}]}
    with pytest.raises(UserError, match="not rendered"):
        encode(anew, ANSWERS, odd)
    samples, encoder = encode(anew, dataclasses.replace(ANSWERS, on_error="drop"), odd, talk("q", "a"))
    assert len(samples) == 1 and encoder.counts["not_rendered"] == 1


# ---- length


def length_of(tokenizer: Tokenizer, value: dict) -> int:
    return len(encode(tokenizer, dataclasses.replace(ANSWERS, seq_len=10**6), value)[0][0].ids)


def test_a_record_of_exactly_the_limit_is_kept_and_one_more_is_not(tokenizer):
    """B21: what is kept ends with the token that ends the turn; what is not is counted."""
    value = talk("some question", "answer")
    exact = dataclasses.replace(ANSWERS, seq_len=length_of(tokenizer, value))
    (sample,), _ = encode(tokenizer, exact, value)
    assert sample.ids[-1] == tokenizer.specials[TURN_END] and sample.trained[-1] == 1
    samples, encoder = encode(tokenizer, dataclasses.replace(exact, seq_len=exact.seq_len - 1), value)
    assert samples == [] and encoder.counts["too_long"] == 1


def test_a_refusal_names_the_record_its_lengths_and_the_lever(tokenizer):
    """B19."""
    with pytest.raises(UserError, match="too long") as caught:
        encode(tokenizer, Settings("assistant", 16, "refuse"), talk("q " * 40, "a") | {"id": "r-1"})
    assert "r-1" in caught.value.where and "tokens" in caught.value.found
    assert "data.seq_len=" in caught.value.next_command


def test_shortening_takes_the_oldest_first_and_keeps_the_answer(tokenizer):
    """R14."""
    value = talk("old " * 60, "a1", "new " * 12, "the answer")
    settings = dataclasses.replace(ANSWERS, seq_len=length_of(tokenizer, value) - 30, overlong="left")
    (sample,), encoder = encode(tokenizer, settings, value)
    text = tokenizer.decode(sample.ids.tolist())
    assert len(sample.ids) <= settings.seq_len and encoder.counts["shortened"] == 1
    assert "[...]" in text and ("new " * 12).strip() in text and text.count("old") < 60
    assert trained_text(tokenizer, sample) == "a1<|im_end|>the answer<|im_end|>"


def test_a_long_answer_keeps_96_tokens_and_gets_no_false_end(tokenizer):
    """R14, B21."""
    value = talk("q", "z9 " * 400)
    (sample,), _ = encode(tokenizer, dataclasses.replace(ANSWERS, seq_len=200, overlong="left"), value)
    assert len(sample.ids) == 200 and sample.trained.sum() >= 96 and sample.ids[-1] != tokenizer.specials[TURN_END]
    samples, encoder = encode(tokenizer, dataclasses.replace(ANSWERS, seq_len=60, overlong="left"), value)
    assert samples == [] and encoder.counts["too_long"] == 1


def test_a_last_answer_is_never_lost_for_an_earlier_one(tokenizer):
    """B19: 96 trained tokens that are all of the first answer do not keep a record."""
    value = talk("q", "z9 " * 100, "r", "last")
    samples, encoder = encode(tokenizer, dataclasses.replace(ANSWERS, seq_len=200, overlong="left"), value)
    assert samples == [] and encoder.counts["too_long"] == 1


def test_a_long_prompt_is_cut_from_the_left(tokenizer):
    """B21: the prompt is cut, the completion and its end stay."""
    value = {"prompt": "p " * 50 + "last", "completion": "done"}
    settings = Settings("completion", 20, "left")
    (sample,), _ = encode(tokenizer, settings, value, form="prompt-completion")
    text = tokenizer.decode(sample.ids.tolist())
    assert len(sample.ids) == 20 and text.startswith(BOS) and text.endswith("last" + "done" + EOS)


# ---- shards


@pytest.fixture
def chat(tmp_path: Path) -> Callable:
    (tmp_path / "chat").mkdir()

    def make(*values: dict):
        return make_dataset(tmp_path / "chat", [value | {"group": str(i)} for i, value in enumerate(values)])

    return make


def test_shards_hold_each_sample_its_labels_and_its_line(tokenizer, chat):
    data = chat(*(talk(f"question {i}", f"answer {i}" * (1 + i % 7)) for i in range(80)))
    settings = dataclasses.replace(ANSWERS, seq_len=40)
    folder = tokens.tokenize(data, tokenizer, settings)
    split = tokens.open_split(folder, "train")
    samples, encoder = encode(tokenizer, settings, *data.iter_records("train"))
    assert split.records.tolist() == [sample.line for sample in samples] and encoder.counts["too_long"] > 0
    assert np.array_equal(split.tokens, np.concatenate([sample.ids for sample in samples]))
    assert np.array_equal(split.trained, np.concatenate([sample.trained for sample in samples]))
    assert split.text_bytes.tolist() == [sample.text_bytes for sample in samples]
    figures = split.manifest["splits"]["train"]
    assert figures["documents"] + figures["left_out"]["too_long"] == data.manifest["splits"]["train"]["records"]
    assert figures["trained_tokens"] == int(split.trained.sum())
    longest = figures["tokens_per_record"]
    line = int(longest["longest"].rpartition(":")[2]) - 1
    assert longest["max"] == max(len(sample.ids) for sample in samples)
    assert longest["max"] == next(len(sample.ids) for sample in samples if sample.line == line)


def test_what_decides_the_tokens_decides_their_folder(tokenizer, chat):
    """B44: another template, limit or choice is another folder; the same is found again."""
    data = chat(*(talk(f"q{i}", f"a{i}") for i in range(30)))
    first = tokens.tokenize(data, tokenizer, ANSWERS)
    assert tokens.tokenize(data, tokenizer, ANSWERS) == first
    others = [dataclasses.replace(ANSWERS, seq_len=63), dataclasses.replace(ANSWERS, loss_on="completion")]
    assert len({first, *(tokens.folder_of(data, tokenizer, one) for one in others)}) == 3
    (tokenizer.folder / TEMPLATE).write_text(tokenizer.chat_template + " ")
    assert tokens.folder_of(data, dataclasses.replace(tokenizer), ANSWERS) != first


def test_tokens_that_would_train_nothing_are_refused(tokenizer, chat):
    """B19: a set of records that are all too long, with the reason and the lever; nothing is left behind."""
    data = chat(*(talk("q " * 40 + str(i), "a") for i in range(30)))
    with pytest.raises(UserError, match="nothing is left to train on") as caught:
        tokens.tokenize(data, tokenizer, dataclasses.replace(ANSWERS, seq_len=16))
    assert "25 too long" in caught.value.found and "data.seq_len=16" in caught.value.expected
    assert "data.overlong=left" in caught.value.next_command
    assert not list(data.folder.glob("tokens/*/manifest.json"))


def test_a_split_whose_records_are_all_left_out_is_empty_and_opens(tokenizer, chat):
    long = [talk("q " * 80 + str(i), "a") | {"split": "validation"} for i in range(3)]
    rest = [talk(f"q{i}", "a") | {"split": ("train", "test")[i % 2]} for i in range(20)]
    folder = tokens.tokenize(chat(*rest, *long), tokenizer, ANSWERS)
    split = tokens.open_split(folder, "validation")
    assert split.num_documents == len(split.tokens) == len(split.trained) == len(split.records) == 0
    assert split.offsets.tolist() == [0] and split.manifest["splits"]["validation"]["left_out"]["too_long"] == 3


def test_tokens_that_would_train_every_prompt_are_refused(tokenizer, chat):
    (tokenizer.folder / TEMPLATE).write_text(
        "{% generation %}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% endgeneration %}"
    )
    data = chat(*(talk(f"q{i}", f"a{i}") for i in range(30)))
    with pytest.raises(UserError, match="every token would be trained"):
        tokens.tokenize(data, dataclasses.replace(tokenizer), ANSWERS)


def test_several_answers_without_their_own_loss_bring_a_warning(tokenizer, chat, caplog):
    """T15."""
    data = chat(*(talk(f"q{i}", "a", "r", "b") for i in range(30)))
    tokens.tokenize(data, tokenizer, ANSWERS)
    assert "several answers" not in caplog.text
    tokens.tokenize(data, tokenizer, dataclasses.replace(ANSWERS, loss_on="completion"))
    assert "several answers" in caplog.text
