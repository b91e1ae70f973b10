"""A Hugging Face folder as a tokenizer: roles, specials, the template, and what llama.cpp would do otherwise."""

import json
from pathlib import Path

import pytest

from training.core.errors import IntegrityError, UserError
from training.tokenizer import artifact

DECOMPOSED = "cafe\u0301 A\u030angstro\u0308m"


@pytest.fixture
def make_base(make_tokenizer, tmp_path: Path):
    """A function that writes a folder as a model's maker would, with changes to either file."""

    def make(config: dict | None = None, template: str | None = None, **changes) -> Path:
        tokenizer = make_tokenizer(pre_tokenizer="qwen2")
        folder = tmp_path / "base"
        folder.mkdir(exist_ok=True)
        document = json.loads((tokenizer.folder / "tokenizer.json").read_text()) | {"post_processor": None} | changes
        (folder / "tokenizer.json").write_text(json.dumps(document))
        settings = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | (config or {})))
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return make


def added(folder: Path) -> list[dict]:
    return json.loads((folder / "tokenizer.json").read_text())["added_tokens"]


def test_a_base_without_bos(make_base):
    base = artifact.of_folder(make_base(template="{{ messages }}"))
    assert (base.bos_id, base.eos_id, base.pad_id, base.add_bos) == (None, 4, 1, False)
    assert base.pre_tokenizer == "qwen2" and base.chat_template == "{{ messages }}"
    [ids] = base.encode_documents(["hello 12"])
    assert ids.tolist() == [*base.encode("hello 12"), 4]


def test_bos_that_is_eos_stands_at_the_end_alone(make_base):
    """Else each end of a document would look like the start of another."""
    both = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    [ids] = artifact.of_folder(make_base(both)).encode_documents(["hello"])
    assert ids.tolist().count(1) == 1 and ids[-1] == 1


def test_a_base_that_adds_bos_adds_it_once(make_base, make_tokenizer):
    """B31: to a prompt, and to nothing that a template has rendered."""
    processor = json.loads((make_tokenizer(pre_tokenizer="qwen2").folder / "tokenizer.json").read_text())
    base = artifact.of_folder(make_base({"bos_token": "<|bos|>"}, post_processor=processor["post_processor"]))
    assert base.add_bos and base.encode("hi")[0] == base.bos_id == 0
    for rendered, count in (("<|bos|><|im_start|>user\nhi", 1), ("<|im_start|>user\nhi", 0)):
        [ids] = base.encode_rendered([rendered])
        assert ids.tolist().count(0) == count


def test_a_post_processor_that_adds_more_is_refused(make_base):
    token = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    special_tokens = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [1], "tokens": ["<|endoftext|>"]}}
    processor = {
        "type": "TemplateProcessing", "single": [sequence, token], "pair": [sequence, token],
        "special_tokens": special_tokens,
    }  # fmt: skip
    with pytest.raises(IntegrityError, match="adds other tokens"):
        artifact.of_folder(make_base(post_processor=processor))


def test_truncation_and_padding_of_the_file_are_not_applied(make_base):
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 2, "pad_type_id": 0,
        "pad_token": "<|pad|>",
    }  # fmt: skip
    base = artifact.of_folder(make_base(truncation=truncation, padding=padding))
    text = "one two three four five six seven"
    [ids], [rendered] = base.encode_documents([text]), base.encode_rendered([text])
    assert base.decode(ids[:-1]) == base.decode(rendered) == base.decode(base.encode(text)) == text


def test_nfc_is_not_applied(make_base):
    """Text is what it is, as at the server: what is decoded is what was encoded."""
    base = artifact.of_folder(make_base(normalizer={"type": "NFC"}))
    [ids], [rendered] = base.encode_documents([DECOMPOSED]), base.encode_rendered([DECOMPOSED])
    for found in (ids[:-1], rendered, base.encode(DECOMPOSED)):
        assert base.decode(found) == DECOMPOSED


def test_tokens_that_the_template_writes_steer(make_base, make_tokenizer):
    """B38: also those that their maker has not flagged special; in a document they stay text."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    think = make_tokenizer(pre_tokenizer="qwen2").vocab_size
    tokens = added(make_base())
    tokens += [{"id": think, "content": "<think>", **flags}, {"id": think + 1, "content": "kilowatt", **flags}]
    base = artifact.of_folder(make_base(template="{{ '<think>' }}", added_tokens=tokens))
    assert base.specials["<think>"] == think and "kilowatt" not in base.specials and base.vocab_size == think + 2
    [ids] = base.encode_documents(["a <think> kilowatt <|im_start|>"])
    assert think not in ids and 3 not in ids and think + 1 in ids
    assert think in base.encode("a <think>")
    tokens[-1]["id"] += 100
    with pytest.raises(IntegrityError, match="another id"):
        artifact.of_folder(make_base(added_tokens=tokens))


def test_a_token_that_strips_blanks_is_refused(make_base):
    tokens = added(make_base())
    tokens[0]["rstrip"] = True
    with pytest.raises(IntegrityError, match="blanks around it") as caught:
        artifact.of_folder(make_base(added_tokens=tokens))
    assert "rstrip" in caught.value.found


def test_a_base_without_eos_or_with_two_templates_is_refused(make_base):
    for eos in (None, "<nobody>"):
        with pytest.raises(UserError, match="no EOS"):
            artifact.of_folder(make_base({"eos_token": eos}))
    with pytest.raises(UserError, match="two different"):
        artifact.of_folder(make_base({"chat_template": "a"}, template="b"))
    assert artifact.of_folder(make_base({"chat_template": "b"})).chat_template == "b"


def test_a_manifest_in_the_folder_wins(make_tokenizer, tmp_path: Path):
    tokenizer = make_tokenizer()
    tokenizer.copy_to(tmp_path)
    assert artifact.of_folder(tmp_path).manifest == tokenizer.manifest
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(IntegrityError):
        artifact.of_folder(tmp_path)


def test_the_bytes_of_each_token_are_those_of_the_text(make_base):
    """Blanks belong to the token that holds them, whatever the file's post-processor trims."""
    trimming = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    base = artifact.of_folder(make_base(post_processor=trimming))
    text = "<|im_start|>user\n  don't 12 \u4f60\U0001f600e\u0301 \u00fcber<|im_end|>\n"
    [ids] = base.encode_rendered([text])
    assert base.num_bytes_V[ids].sum() == len(text.encode()) and ids[0] == base.specials["<|im_start|>"]


@pytest.mark.parametrize(
    "changes",
    [
        {"added_tokens": [{"content": "<|x|>"}]}, {"added_tokens": ["<|x|>"]}, {"added_tokens": 5}, {"model": "BPE"},
        {"model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}, {"model": None}, {"normalizer": {"type": "None"}},
        {"normalizer": {"type": "Sequence"}}, {"pre_tokenizer": 3},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_tokenizer_of_the_library_is_one_clear_error(make_base, changes: dict):
    with pytest.raises(IntegrityError) as caught:
        artifact.of_folder(make_base(**changes))
    assert caught.value.expected


def test_a_template_that_is_no_text_is_refused(make_base):
    folder = make_base()
    (folder / "chat_template.jinja").write_bytes(b"{{ '\xff' }}")
    with pytest.raises(UserError, match="no UTF-8"):
        artifact.of_folder(folder)
    for role in (5, ["a"], {"content": ["a"]}):
        with pytest.raises(UserError, match="no EOS"):
            artifact.of_folder(make_base({"eos_token": role}, template=""))
