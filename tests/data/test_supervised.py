"""Records with answers as ids and labels: by hand, under every policy, and refused where nothing could be learned."""

import dataclasses
import json
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data import templates
from tests.data.test_tokens import make_dataset, make_tokenizer, texts
from training.core.errors import RunError, UserError
from training.data import encoding, pool, supervision, tokens
from training.data.supervised import Encoder, LeftOut, Sample
from training.data.supervision import Settings
from training.data.tally import Tally
from training.tokenizer.artifact import BOS, EOS, TEMPLATE, TOKENIZER, Tokenizer
from training.tokenizer.chat_templates import TEMPLATES
from training.tokenizer.template import Template, of_tokenizer

TURN_END, CHATML = "<|im_end|>", TEMPLATES["chatml"].source

ANSWERS = Settings(loss_on="assistant", seq_len=80)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return make_tokenizer(make_dataset(tmp_path, [{"text": text} for text in texts() if text.strip()]))


def talk(*contents: str) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}


def encode(tokenizer: Tokenizer, settings: Settings, *values: dict) -> list[Sample | LeftOut]:
    return Encoder(tokenizer, settings).encode(list(enumerate(values)))


def retemplated(tokenizer: Tokenizer, source: str) -> Tokenizer:
    (tokenizer.folder / TEMPLATE).write_text(source)
    return dataclasses.replace(tokenizer)


def trained_text(tokenizer: Tokenizer, sample) -> str:
    return tokenizer.decode(sample.ids[sample.trained == 1].tolist())


def test_only_answers_and_their_ends_are_labels(tokenizer):
    """B24, B26, B31: one BOS, which is no label; six trained tokens for three one-letter answers."""
    (sample,) = encode(tokenizer, ANSWERS, talk("q", "a", "q", "b", "q", "c"))
    assert trained_text(tokenizer, sample) == "a<|im_end|>b<|im_end|>c<|im_end|>"
    assert int(sample.trained.sum()) == 6 and sample.text_bytes == len("abc")
    assert sample.ids.tolist().count(tokenizer.bos_id) == 1 and sample.ids[0] == tokenizer.bos_id
    assert sample.ids[-1] == tokenizer.specials[TURN_END] and sample.trained[-1] == 1


def test_the_server_adds_the_header(tokenizer):
    """B26."""
    (sample,) = encode(tokenizer, ANSWERS, talk("hi", "yo"))
    assert trained_text(tokenizer, sample) == "yo<|im_end|>"


@pytest.mark.parametrize("answer", ["don't", "\n\nfour", " x", "1234", "\u0301e"])
def test_the_ids_up_to_an_answer_are_those_that_a_server_makes_of_the_prompt(tokenizer, answer):
    """B31: also where the answer begins with what would be merged with the header's end."""
    value = talk("123 four", "ok", "and\n", answer)
    (sample,) = encode(tokenizer, ANSWERS, value)
    prompt = of_tokenizer(tokenizer).render(value["messages"][:3], prompt=True)
    ids = tokenizer.encode(prompt)
    assert sample.ids[: len(ids)].tolist() == ids and sample.trained[len(ids) :].all()
    assert trained_text(tokenizer, sample) == "ok<|im_end|>" + answer + "<|im_end|>"


def test_a_template_that_prints_the_bos_gets_no_second_one(tokenizer):
    """B31."""
    anew = retemplated(tokenizer, "{{- bos_token -}}" + tokenizer.chat_template)
    (sample,) = encode(anew, ANSWERS, talk("q", "a"))
    assert sample.ids.tolist().count(anew.bos_id) == 1 and sample.trained[0] == 0
    assert sample.ids.tolist() == encode(retemplated(tokenizer, CHATML), ANSWERS, talk("q", "a"))[0].ids.tolist()


@pytest.mark.parametrize(
    ("loss_on", "expected"),
    [
        ("assistant", "a<|im_end|>b<|im_end|>"),
        ("completion", "a<|im_end|>\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"),
    ],
)
def test_what_each_choice_trains(tokenizer, loss_on, expected):
    """T13: completion trains what stands between answers too."""
    (sample,) = encode(tokenizer, dataclasses.replace(ANSWERS, loss_on=loss_on), talk("q", "a", "r", "b"))
    assert trained_text(tokenizer, sample) == expected and sample.notes == ("several_answers",)
    (whole,) = encode(tokenizer, dataclasses.replace(ANSWERS, loss_on="all"), talk("q", "a", "r", "b"))
    assert whole.trained.tolist() == [0] + [1] * (len(whole.ids) - 1)


def test_a_completion_is_encoded_apart_and_ends(tokenizer):
    value = {"prompt": "x = 1", "completion": "23"}
    (sample,) = encode(tokenizer, dataclasses.replace(ANSWERS, loss_on="completion"), value)
    prompt, completion = tokenizer.encode_plain(["x = 1", "23"])
    assert sample.ids.tolist() == [tokenizer.bos_id, *prompt, *completion, tokenizer.eos_id]
    assert sample.ids[: len(prompt) + 1].tolist() == tokenizer.encode("x = 1")
    assert trained_text(tokenizer, sample) == "23" + EOS and sample.text_bytes == 2


@pytest.mark.parametrize("completion", ["b", [{"role": "assistant", "content": "b"}]], ids=["text", "messages"])
def test_a_prompt_of_messages_is_a_conversation(tokenizer, completion):
    """Only the completion is trained: an answer in the prompt is prompt."""
    value = {"prompt": talk("q", "a", "r")["messages"], "completion": completion}
    for loss_on in ("completion", "assistant"):
        (sample,) = encode(tokenizer, dataclasses.replace(ANSWERS, loss_on=loss_on), value)
        assert trained_text(tokenizer, sample) == "b<|im_end|>"
        assert sample.ids.tolist() == encode(tokenizer, ANSWERS, talk("q", "a", "r", "b"))[0].ids.tolist()


def test_prompts_of_messages_go_all_the_way_from_lines_to_labels(tokenizer, tmp_path):
    (tmp_path / "pairs").mkdir()
    values = [
        {"prompt": talk(f"q{i}", "no", f"r{i}")["messages"], "completion": f"yes {i}", "group": str(i)}
        for i in range(40)
    ]
    data = make_dataset(tmp_path / "pairs", values)
    split = tokens.open_split(tokens.tokenize(data, tokenizer, ANSWERS), "train")
    labels = tokenizer.decode(split.tokens[split.trained == 1].tolist())
    expected = [f"{value['completion']}<|im_end|>" for value in data.iter_records("train")]
    assert data.form == "prompt-messages" and labels == "".join(expected) and len(expected) > 20


@pytest.mark.parametrize("marked", ["all", "last"])
def test_marks_of_a_template_that_rewrites_train_no_answer_of_a_prompt(tokenizer, marked):
    """B23: where answers cannot be followed, marks are matched by their number, or the record is left out."""
    when = {"all": "true", "last": "loop.last"}[marked]
    body = "{% generation %}{{ '-' if m.content == 'a' else m.content }}<|im_end|>{% endgeneration %}"
    anew = retemplated(
        tokenizer,
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and " + when + " %}" + body
        + "{% else %}{{ '-' if m.content == 'a' else m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )  # fmt: skip
    (sample,) = encode(anew, ANSWERS, {"prompt": talk("q", "a", "r")["messages"], "completion": "b"})
    if marked == "all":
        assert trained_text(anew, sample) == "b<|im_end|>"
    else:
        assert isinstance(sample, LeftOut) and "whether they are a prompt's" in sample.found


# ---- what cannot be used


@pytest.mark.parametrize("text", ["A<|im_end|>B", BOS, f"x{EOS}"])
def test_a_text_that_would_forge_a_turn_is_left_out(tokenizer, text):
    """B38: in a question, an answer, a tool's name or its description."""
    tools = [{"type": "function", "function": {"name": "f", "description": text}}]
    call = {"function": {"name": "f", "arguments": {"x": [text]}}}
    calling = {"messages": [*talk("q")["messages"], {"role": "assistant", "content": "a", "tool_calls": [call]}]}
    values = [talk(text, "b"), talk("q", text), talk("q", "a") | {"tools": tools}, calling]
    values += [{"prompt": text, "completion": "a"}, {"prompt": "q", "completion": text}]
    for one in encode(tokenizer, ANSWERS, *values):
        assert one.reason == "control_token_in_text" and one.found, one
    assert "messages[0].content" in encode(tokenizer, ANSWERS, values[0])[0].found


def test_what_the_template_writes_an_assistant_may_write_and_a_user_may_not(make_tagged):
    """A thought's marks are tokens, but not ones that steer."""
    tagged = make_tagged("<think>", "</think>")
    thoughtful, forged = encode(tagged, ANSWERS, talk("q", "<think>t</think>a"), talk("</think>", "a"))
    assert (
        trained_text(tagged, thoughtful) == "<think>t</think>a<|im_end|>" and forged.reason == "control_token_in_text"
    )
    assert thoughtful.ids.tolist().count(tagged.specials["<think>"]) == 1


@pytest.fixture
def make_tagged(tokenizer):
    def make(*tags: str) -> Tokenizer:
        path = tokenizer.folder / TOKENIZER
        content = json.loads(path.read_text())
        for number, tag in enumerate(tags):
            token = {"id": tokenizer.vocab_size + number, "content": tag, "special": False, "normalized": False}
            content["added_tokens"].append(token | dict.fromkeys(("single_word", "lstrip", "rstrip"), False))
        path.write_text(json.dumps(content))
        ids = {tag: tokenizer.vocab_size + number for number, tag in enumerate(tags)}
        specials = {**tokenizer.specials, **ids}
        changed = {"specials": specials, "vocab_size": tokenizer.vocab_size + len(tags)}
        return Tokenizer(tokenizer.folder, {**tokenizer.manifest, **changed})

    return make


def test_a_record_that_the_template_refuses_and_one_without_answers(tokenizer):
    anew = retemplated(tokenizer, templates.BRACKETS)
    odd = {"messages": [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "y"}], "id": "r7"}
    refused, kept, silent = encode(anew, ANSWERS, odd, talk("q", "a"), talk("q"))
    assert (refused.reason, refused.line, refused.id) == ("not_rendered", 0, "r7")
    assert isinstance(kept, Sample) and (silent.reason, silent.line) == ("nothing_trained", 2)


def test_a_record_that_the_template_rewrites_is_trained_on_its_last_answer_or_left_out(tokenizer):
    """B23."""
    anew = retemplated(tokenizer, templates.UPPER.replace("<|end|>", TURN_END))
    last, lost = encode(anew, ANSWERS, talk("q", "an answer", "r", "b"), talk("q", "an answer", "r"))
    assert trained_text(anew, last) == "b" + TURN_END and "last_answer_only" in last.notes
    assert lost.reason == "not_followed"


@pytest.mark.parametrize("source", ["{% for", "{{ strftime_now('%Y') }}", None], ids=["no Jinja", "clock", "none"])
def test_a_template_that_renders_nothing_is_no_records_fault(tokenizer, source):
    """Leaving records out would hide the reason."""
    if source is None:
        (tokenizer.folder / TEMPLATE).unlink()
    else:
        (tokenizer.folder / TEMPLATE).write_text(source)
    with pytest.raises(UserError, match="chat template") as caught:
        encode(dataclasses.replace(tokenizer), dataclasses.replace(ANSWERS, on_error="drop"), talk("q", "a"))
    assert "a record" not in caught.value.what


@pytest.mark.parametrize("values", [{"seq_len": 0}, {"template_date": "2026-99-99"}, {"overlong": "cut"}])
def test_settings_that_mean_nothing_are_refused(values):
    with pytest.raises(UserError):
        Settings(**values)


# ---- length


def length_of(tokenizer: Tokenizer, value: dict) -> int:
    return len(encode(tokenizer, dataclasses.replace(ANSWERS, seq_len=10**6), value)[0].ids)


def limited(seq_len: int, overlong: str = "drop", loss_on: str = "assistant") -> Settings:
    return Settings(loss_on=loss_on, seq_len=seq_len, overlong=overlong)


def test_a_record_of_exactly_the_limit_is_kept_and_one_more_is_not(tokenizer):
    """B21: what is kept ends with the token that ends the turn."""
    value = talk("some question", "answer")
    exact = length_of(tokenizer, value)
    (sample,) = encode(tokenizer, limited(exact), value)
    assert sample.ids[-1] == tokenizer.specials[TURN_END] and sample.trained[-1] == 1
    (lost,) = encode(tokenizer, limited(exact - 1), value)
    assert lost.reason == "too_long" and f"{exact} tokens" in lost.found


def test_the_trial_of_six_and_four_tokens(tokenizer):
    """B21: 6 + 4 tokens and the end are 11, so with room for 10 dropped, or the prompt cut to 5; 5 + 4 + 1 is kept."""
    bare = Tokenizer(tokenizer.folder, {**tokenizer.manifest, "add_bos": False})
    value = {"prompt": "~!@#$%", "completion": "^&*~"}
    assert [len(ids) for ids in bare.encode_plain([value["prompt"], value["completion"]])] == [6, 4]
    (lost,) = encode(bare, limited(10, loss_on="completion"), value)
    assert lost.reason == "too_long"
    (cut,) = encode(bare, limited(10, "left", "completion"), value)
    assert bare.decode(cut.ids.tolist()) == "!@#$%^&*~" + EOS and trained_text(bare, cut) == "^&*~" + EOS
    (kept,) = encode(bare, limited(10, loss_on="completion"), value | {"prompt": "!@#$%"})
    assert kept.ids[-1] == bare.eos_id and kept.trained[-1] == 1


def test_shortening_takes_the_oldest_first_and_keeps_the_answer(tokenizer):
    """R14; an answer to what is gone is context, no label."""
    value = talk("old " * 60, "a1", "new " * 12, "the answer")
    settings = limited(length_of(tokenizer, value) - 30, "left")
    (sample,) = encode(tokenizer, settings, value)
    text = tokenizer.decode(sample.ids.tolist())
    assert len(sample.ids) <= settings.seq_len and "shortened" in sample.notes
    assert "[...]" in text and "new " * 12 in text and "old" not in text and "a1" in text
    assert trained_text(tokenizer, sample) == "the answer<|im_end|>"


def test_tool_turns_go_before_the_task_and_the_latest_page_loses_its_end(tokenizer):
    """R14."""
    pages = ["first " * 40, "second " * 40]
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "the task"}]
    for page in pages:
        messages += [{"role": "assistant", "content": "look"}, {"role": "tool", "content": page}]
    value = {"messages": [*messages, {"role": "assistant", "content": "found"}]}
    (sample,) = encode(tokenizer, limited(length_of(tokenizer, value) - 60, "left"), value)
    text = tokenizer.decode(sample.ids.tolist())
    assert "first" not in text and text.count("second") == 40 and "the task" in text
    (sample,) = encode(tokenizer, limited(130, "left"), value)
    text = tokenizer.decode(sample.ids.tolist())
    assert 0 < text.count("second") < 40 and "the task" in text and 120 < len(sample.ids) <= 130
    assert "second[...]" in text.replace(" [", "[") or "[...]<|im_end|>" in text
    assert trained_text(tokenizer, sample) == "look<|im_end|>found<|im_end|>"


def test_a_question_that_is_cut_is_counted_and_told(tokenizer, tmp_path, caplog):
    """R14 cuts the end of the latest page, and there the question may have stood: whoever asked for it is told."""
    asked = talk("page " * 60 + "What is asked?", "a")
    settings = limited(length_of(tokenizer, asked) - 20, "left")
    pages = talk("old " * 99, "a", "What is asked?", "b")
    tools = [{"role": "user", "content": "task"}, {"role": "assistant", "content": "look"}]
    tools += [{"role": "tool", "content": "page " * 80}, {"role": "assistant", "content": "a"}]
    one, two, three = encode(tokenizer, settings, asked, pages, {"messages": tools})
    assert one.notes == ("shortened", "question_cut") and "asked" not in tokenizer.decode(one.ids.tolist())
    for kept in (two, three):
        assert "shortened" in kept.notes and "question_cut" not in kept.notes
    rows = [asked | {"split": "train"}, talk("q", "v") | {"split": "validation"}]
    data = make_dataset(tmp_path, rows, train_ratio=0.9, val_ratio=0.1)
    noted = tokens.open_split(tokens.tokenize(data, tokenizer, settings), "train").manifest["splits"]["train"]
    assert noted["noted"]["question_cut"] == 1 and noted["first_noted"]["question_cut"] == ["train.jsonl:1"]
    assert "what may have been asked" in caplog.text and "train.jsonl:1" in caplog.text


def test_a_long_answer_keeps_96_tokens_and_gets_no_false_end(tokenizer):
    """R14, B21."""
    value = talk("q", "z9 " * 400)
    (sample,) = encode(tokenizer, limited(200, "left"), value)
    assert len(sample.ids) == 200 and sample.trained.sum() >= 96 and sample.ids[-1] != tokenizer.specials[TURN_END]
    assert "answer_cut" in sample.notes
    (lost,) = encode(tokenizer, limited(60, "left"), value)
    assert lost.reason == "too_long"


@pytest.mark.parametrize("loss_on", ["all", "completion", "assistant"])
def test_what_has_no_room_for_its_answer_is_too_long_whatever_is_trained(tokenizer, loss_on):
    """B19, R14: of a long system's turn nothing is cut, and its beginning alone would teach no answer."""
    rules = {"messages": [{"role": "system", "content": "rule " * 80}, *talk("q", "the answer")["messages"]]}
    (lost,) = encode(tokenizer, limited(200, "left", loss_on), rules)
    assert isinstance(lost, LeftOut) and lost.reason == "too_long"
    rules["messages"][-1]["content"] = "z9 " * 400
    whole = length_of(tokenizer, rules)
    (cut,) = encode(tokenizer, limited(whole - 500, "left", loss_on), rules)
    assert "answer_cut" in cut.notes and "z9 " * 90 in tokenizer.decode(cut.ids.tolist())
    (asked,) = encode(tokenizer, limited(50, "left", loss_on), talk("question " * 40))
    assert isinstance(asked, LeftOut) and asked.reason == "too_long"


def test_a_last_answer_is_never_lost_for_an_earlier_one(tokenizer):
    """B19: the first answer goes, not the last; where there is no room even so, nothing of the first is kept."""
    (sample,) = encode(tokenizer, limited(200, "left"), talk("q", "z9 " * 100, "r", "last"))
    assert trained_text(tokenizer, sample) == "last<|im_end|>" and "z9" not in tokenizer.decode(sample.ids.tolist())
    (lost,) = encode(tokenizer, limited(20, "left"), talk("q", "z9 " * 100, "r" * 20, "last"))
    assert lost.reason == "too_long"


def test_long_answers_of_earlier_steps_go_and_the_latest_page_stays(tokenizer):
    """R14, none dropped: what is no label any more goes whole before the latest page loses anything."""
    messages = [{"role": "user", "content": "the task"}]
    for number in range(6):
        messages += [
            {"role": "assistant", "content": f"step{number} " * 30},
            {"role": "tool", "content": f"page{number} " * 9},
        ]
    value = {"messages": [*messages, {"role": "assistant", "content": "found"}]}
    (sample,) = encode(tokenizer, limited(700, "left"), value)
    text = tokenizer.decode(sample.ids.tolist())
    assert 400 < len(sample.ids) <= 700 and text.count("page5") == 9 and "the task" in text and "page0" not in text
    (sample,) = encode(tokenizer, limited(200, "left"), value)
    assert trained_text(tokenizer, sample) == "found<|im_end|>" and len(sample.ids) <= 200


def test_a_prompt_of_messages_is_shortened_as_a_conversation(tokenizer):
    """What goes from a prompt moves the place where its completion begins."""
    prompt = talk(*(text for i in range(20) for text in (f"question {i} ", f"reply {i}")), "last question")["messages"]
    (sample,) = encode(tokenizer, limited(100, "left"), {"prompt": prompt, "completion": "yes"})
    text = tokenizer.decode(sample.ids.tolist())
    assert trained_text(tokenizer, sample) == "yes<|im_end|>" and "last question" in text and len(sample.ids) <= 100


@pytest.mark.parametrize("overlong", ["drop", "left"])
def test_thousands_of_turns_are_rendered_a_few_times(tokenizer, monkeypatch, overlong):
    """The number of renders does not grow with the number of turns."""
    counts, renders = [], []
    render = Template.render
    monkeypatch.setattr(Template, "render", lambda *args, **options: renders.append(1) or render(*args, **options))
    for num_turns in (200, 800):
        value = talk(*(f"turn {number} of many" for number in range(num_turns)))
        (sample,) = encode(tokenizer, limited(10**6 if overlong == "drop" else 500, overlong), value)
        assert isinstance(sample, Sample) and "several_answers" in sample.notes
        counts.append(len(renders))
        renders.clear()
    assert counts[1] <= counts[0] + 80 and max(counts) < 600


def test_a_long_prompt_is_cut_from_the_left(tokenizer):
    """B21: the prompt is cut, the completion and its end stay."""
    value = {"prompt": "p " * 50 + "last", "completion": "done"}
    (sample,) = encode(tokenizer, limited(20, "left", "completion"), value)
    text = tokenizer.decode(sample.ids.tolist())
    assert len(sample.ids) == 20 and text.startswith(BOS) and text.endswith("last" + "done" + EOS)


@pytest.mark.parametrize("add_bos", [True, False], ids=["BOS", "no BOS"])
@pytest.mark.parametrize("loss_on", ["all", "completion"])
def test_the_prompt_goes_before_any_of_the_answer_whatever_is_trained(tokenizer, loss_on, add_bos):
    """R14: what is trained of the prompt does not make it the answer; nor is a first token a label then."""
    bare = Tokenizer(tokenizer.folder, {**tokenizer.manifest, "add_bos": add_bos})
    value = {"prompt": "12345 " * 10, "completion": "".join(f"{i} is {i * 7}\n" for i in range(40))}
    prompt, answer = (len(ids) for ids in bare.encode_plain([value["prompt"], value["completion"]]))
    for seq_len in (add_bos + prompt + answer, add_bos + answer + 1, add_bos + answer - 20, 100):
        (sample,) = encode(bare, limited(seq_len, "left", loss_on), value)
        text = bare.decode(sample.ids.tolist()).removeprefix(BOS)
        is_cut = seq_len <= add_bos + answer
        assert len(sample.ids) == seq_len and ("answer_cut" in sample.notes) == is_cut
        assert value["completion"].startswith(text) if is_cut else text.endswith(value["completion"] + EOS)
        first = 1 if loss_on == "all" else max(1, seq_len - answer - 1)
        assert not sample.trained[:first].any() and sample.trained[first:].all()


@pytest.mark.parametrize("loss_on", ["all", "completion", "assistant"])
def test_what_is_shortened_fits_and_keeps_its_labels(tokenizer, loss_on):
    """Every length from none to all: what is kept fits, ends a turn or is counted as cut, and trains something."""
    value = talk("é👍 " * 30, "a" * 9, "page\n" * 30, "done " * 5)
    for seq_len in range(8, length_of(tokenizer, value) + 2, 3):
        (one,) = encode(tokenizer, limited(seq_len, "left", loss_on), value)
        if isinstance(one, LeftOut):
            assert one.reason == "too_long" and seq_len < 100
            continue
        assert len(one.ids) == len(one.trained) <= seq_len and one.trained.any()
        if "answer_cut" not in one.notes and loss_on != "all":
            assert one.ids[-1] == tokenizer.specials[TURN_END] and one.trained[-1] == 1


# ---- shards


@pytest.fixture
def chat(tmp_path: Path) -> Callable:
    (tmp_path / "chat").mkdir()

    def make(*values: dict):
        return make_dataset(tmp_path / "chat", [value | {"group": str(i)} for i, value in enumerate(values)])

    return make


def test_shards_hold_each_sample_its_labels_and_its_line(tokenizer, chat):
    data = chat(*(talk(f"question {i}", f"answer {i}" * (1 + i % 7)) for i in range(80)))
    settings = dataclasses.replace(ANSWERS, seq_len=70)
    folder = tokens.tokenize(data, tokenizer, settings)
    split = tokens.open_split(folder, "train")
    results = encode(tokenizer, settings, *data.iter_records("train"))
    samples = [one for one in results if isinstance(one, Sample)]
    assert split.records.tolist() == [sample.line for sample in samples] and len(samples) < len(results)
    assert np.array_equal(split.tokens, np.concatenate([sample.ids for sample in samples]))
    assert np.array_equal(split.trained, np.concatenate([sample.trained for sample in samples]))
    assert split.text_bytes.tolist() == [sample.text_bytes for sample in samples]
    assert split.offsets.tolist() == [0, *np.cumsum([len(sample.ids) for sample in samples]).tolist()]
    figures = split.manifest["splits"]["train"]
    assert figures["documents"] + figures["left_out"]["too_long"] == data.manifest["splits"]["train"]["records"]
    assert split.num_trained_tokens == figures["trained_tokens"] == int(split.trained.sum())
    longest = figures["tokens_per_record"]
    line = int(longest["longest"].rpartition(":")[2]) - 1
    assert longest["max"] == max(len(sample.ids) for sample in samples)
    assert longest["max"] == next(len(sample.ids) for sample in samples if sample.line == line)


@pytest.mark.parametrize("num_workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_change_nothing(tokenizer, chat, monkeypatch, num_workers):
    """The same bytes from one process and from several, and the same refusal."""
    values = [talk(f"question {i} " * (i % 9 + 1), f"answer {i}") for i in range(400)]
    data, settings = chat(*values), limited(60)
    alone = tokens.tokenize(data, tokenizer, settings)
    expected = {path.name: path.read_bytes() for path in alone.iterdir()}
    shutil.rmtree(alone)
    monkeypatch.setattr(encoding, "count_for", lambda text_bytes: num_workers)
    monkeypatch.setattr(encoding, "_BATCH_RECORDS", 17)
    assert tokens.tokenize(data, tokenizer, settings) == alone
    assert {path.name: path.read_bytes() for path in alone.iterdir()} == expected
    with pytest.raises(UserError, match="too long") as caught:
        tokens.tokenize(data, tokenizer, limited(60, "refuse"))
    assert "train.jsonl:" in caught.value.where and "data.seq_len" in caught.value.next_command


def test_a_process_that_is_killed_is_told_and_leaves_nothing(tokenizer, chat, monkeypatch):
    data = chat(*(talk(f"question {i}", f"answer {i}") for i in range(200)))
    monkeypatch.setattr(encoding, "count_for", lambda text_bytes: 2)
    monkeypatch.setattr(encoding, "_BATCH_RECORDS", 5)
    monkeypatch.setattr(pool, "_submitted", _killing(pool._submitted))
    with pytest.raises(RunError, match="a worker process died"):
        tokens.tokenize(data, tokenizer, ANSWERS)
    assert not list(data.folder.glob("tokens/*")) and not multiprocessing.active_children()


def _killing(submitted: Callable) -> Callable:
    def killing(executor, batch):
        if batch[0] >= 20:
            for process in multiprocessing.active_children():
                process.kill()
                process.join()
        return submitted(executor, batch)

    return killing


def test_what_decides_the_tokens_decides_their_folder(tokenizer, chat):
    """B44: another template, limit, choice or day is another folder; the same is found again."""
    data = chat(*(talk(f"q{i}", f"a{i}") for i in range(30)))
    first = tokens.tokenize(data, tokenizer, ANSWERS)
    before = (first / "manifest.json").stat().st_mtime_ns
    assert tokens.tokenize(data, tokenizer, ANSWERS) == first
    assert (first / "manifest.json").stat().st_mtime_ns == before
    changes = [{"seq_len": 63}, {"loss_on": "completion"}, {"template_date": "2026-01-31"}, {"overlong": "left"}]
    others = [tokens.folder_of(data, tokenizer, dataclasses.replace(ANSWERS, **change)) for change in changes]
    assert len({first, *others}) == 5
    assert tokens.folder_of(data, retemplated(tokenizer, tokenizer.chat_template + " "), ANSWERS) != first


def test_tokens_that_would_train_nothing_are_refused(tokenizer, chat):
    """B19: a set of records that are all too long, with lengths, the reason and the lever; nothing is left behind."""
    data = chat(*(talk("q " * 40 + str(i), "a") for i in range(30)))
    with pytest.raises(UserError, match="nothing is left to train on") as caught:
        tokens.tokenize(data, tokenizer, limited(16))
    found = caught.value.found
    assert "25 too long" in found and "train.jsonl:1" in found and "2 of them trained" in found
    assert "data.seq_len=16" in caught.value.expected and "data.overlong=left" in caught.value.next_command
    assert not list(data.folder.glob("tokens/*/manifest.json"))


def test_a_split_whose_records_are_all_left_out_is_empty_and_opens(tokenizer, chat, caplog):
    long = [talk("q " * 80 + str(i), "a") | {"split": "validation"} for i in range(3)]
    rest = [talk(f"q{i}", "a") | {"split": ("train", "test")[i % 2]} for i in range(20)]
    folder = tokens.tokenize(chat(*rest, *long), tokenizer, ANSWERS)
    split = tokens.open_split(folder, "validation")
    assert split.num_documents == len(split.tokens) == len(split.trained) == len(split.records) == 0
    assert split.offsets.tolist() == [0] and split.manifest["splits"]["validation"]["left_out"]["too_long"] == 3
    assert "validation: 3 left out" in caplog.text


def test_a_record_without_room_for_its_answer_is_named_and_the_others_are_kept(tokenizer, chat, caplog):
    """B19: A is reported by its line with its lengths."""
    data = chat(*(talk(f"q{i}", "a") for i in range(30)), talk("q " * 40, "a") | {"id": "A", "split": "train"})
    split = tokens.open_split(tokens.tokenize(data, tokenizer, limited(40)), "train")
    line = next(n for n, value in enumerate(data.iter_records("train")) if value.get("id") == "A")
    assert line not in split.records and f"train.jsonl:{line + 1}, id 'A': " in caplog.text
    assert split.manifest["splits"]["train"]["left_out"]["too_long"] == 1


def test_marks_that_call_prompts_generated_are_narrowed(tokenizer):
    """B26: what the server writes is no label, whatever the template marks."""
    anew = retemplated(
        tokenizer, "{% generation %}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% endgeneration %}"
    )
    (sample,) = encode(anew, ANSWERS, talk("q", "a"))
    assert trained_text(anew, sample) == "a<|im_end|>"


def test_tokens_that_would_train_every_prompt_are_refused():
    figures = {"documents": 2, "tokens": 10, "trained_tokens": 8}
    with pytest.raises(UserError, match="every token would be trained"):
        Tally("sums@1", "train", ANSWERS).require_labels(figures)
    Tally("sums@1", "train", ANSWERS).require_labels(figures | {"trained_tokens": 7})
    Tally("sums@1", "train", Settings("all")).require_labels(figures)


@pytest.mark.parametrize(
    ("words", "setting"),
    [('["train", "--config", "x.yaml"]', "data.on_error=drop"), ('["data-peek", "x"]', "--on-error drop"),
     ('["data-peek", "x", "--config", "x.yaml"]', "data.on_error=drop")],
)  # fmt: skip
def test_a_setting_that_helps_is_named_as_the_command_takes_it(words, setting, monkeypatch):
    monkeypatch.setenv("TRAINYARD_COMMAND", words)
    assert supervision.lever("on_error", "drop").endswith(f" {setting}")


@pytest.mark.parametrize("forged", [0, 1])
def test_a_bad_record_stops_everything_or_is_counted(tokenizer, chat, forged):
    """B38: strict by default; `drop` counts, and records in are documents and those left out."""
    values = [talk(f"q{i}", f"a{i}") for i in range(40)]
    data = chat(*values, *(talk(f"<|bos|>{i}", "a") | {"id": f"r-{i}"} for i in range(40 * forged)))
    if not forged:
        tokens.tokenize(data, tokenizer, ANSWERS)
        return
    with pytest.raises(UserError, match="control token in text") as caught:
        tokens.tokenize(data, tokenizer, ANSWERS)
    assert "r-" in caught.value.where and "data.on_error=drop" in caught.value.next_command
    folder = tokens.tokenize(data, tokenizer, dataclasses.replace(ANSWERS, on_error="drop"))
    for name in data.splits:
        figures = tokens.open_split(folder, name).manifest["splits"][name]
        left_out = sum(figures["left_out"].values())
        assert figures["documents"] + left_out == data.manifest["splits"][name]["records"]


def test_several_answers_without_their_own_loss_bring_a_warning(tokenizer, chat, caplog):
    """T15."""
    data = chat(*(talk(f"q{i}", "a", "r", "b") for i in range(30)))
    tokens.tokenize(data, tokenizer, ANSWERS)
    assert "several answers" not in caplog.text
    tokens.tokenize(data, tokenizer, dataclasses.replace(ANSWERS, loss_on="completion"))
    assert "several answers" in caplog.text


def test_texts_have_no_answers_to_train_alone(tokenizer, tmp_path):
    (tmp_path / "plain").mkdir()
    data = make_dataset(tmp_path / "plain", [{"text": f"t{i}"} for i in range(30)])
    with pytest.raises(UserError, match="texts hold no answers"):
        tokens.tokenize(data, tokenizer, ANSWERS)
