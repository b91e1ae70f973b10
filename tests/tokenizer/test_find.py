"""What a person calls a tokenizer: artifacts, bases, folders and GGUF files by one function, in every command."""

import json
from pathlib import Path

import gguf
import pytest

from training.cli import main
from training.core import files, paths
from training.core.errors import IntegrityError, UserError
from training.llamacpp import tiny
from training.recipe import bases
from training.tokenizer import artifact, proof

KEPT = ("hash", "vocab_size", "pre_tokenizer", "add_bos", "roles", "specials")


def write_gguf(tokenizer: artifact.Tokenizer, path: Path, **changes) -> Path:
    """A GGUF with a tokenizer's vocabulary, some of it changed."""
    vocabulary = vars(proof.vocabulary(tokenizer)) | changes
    return tiny.write(path, seed=1, vocabulary=tiny.Vocabulary(**vocabulary), template=tokenizer.chat_template)


def make_base(tokenizer: artifact.Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str = "my-base") -> bases.Base:
    """A fetched base of the test's own, with a tokenizer and a configuration, and one that is not fetched."""
    known = {one: bases.Base(one, "folder:x", "1", "MIT", {"x": "0" * 64}, {}) for one in (name, "far-away")}
    monkeypatch.setattr(bases, "load", lambda path=None: known)
    folder = known[name].folder
    folder.mkdir(parents=True)
    tokenizer.copy_to(folder)
    manifest = tokenizer.manifest | {"name": name}
    files.write_json(folder / artifact.MANIFEST_IN_CHECKPOINT, manifest)
    files.write_json(folder / "config.json", {"vocab_size": tokenizer.vocab_size + 10})
    files.write_manifest(folder, bases.KIND, {"name": name, "pinned": known[name].files, "weights_sha256": "0" * 64})
    return known[name]


@pytest.fixture
def spellings(make_tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """One tokenizer in every form that a person can name."""
    tokenizer = make_tokenizer(name="small")
    base = make_base(tokenizer, monkeypatch)
    plain = tmp_path / "plain"
    plain.mkdir()
    tokenizer.copy_to(plain)
    (plain / artifact.MANIFEST_IN_CHECKPOINT).unlink()
    write_gguf(tokenizer, paths.roots().models / "trained/x/x.gguf")
    return {
        "name": "small", "name@folder": f"small@{tokenizer.folder.name}", "name@hash": f"small@{tokenizer.hash[:12]}",
        "folder": str(tokenizer.folder), "base": "my-base", "base@hash": f"my-base@{tokenizer.hash[:12]}",
        "base's folder": str(base.folder), "base in a container": "/app/models/bases/my-base",
        "Hugging Face": str(plain), "GGUF": str(paths.roots().models / "trained/x/x.gguf"),
        "GGUF in a container": "/app/models/trained/x/x.gguf",
    }  # fmt: skip


def test_every_spelling_is_the_same_tokenizer(spellings: dict[str, str]):
    wanted = artifact.find("small")
    for spelling, reference in spellings.items():
        found = artifact.find(reference)
        kept = KEPT[1:] if "GGUF" in spelling else KEPT
        assert {key: found.manifest[key] for key in kept} == {key: wanted.manifest[key] for key in kept}, spelling
        assert found.chat_template == wanted.chat_template
        for text in ("don't 12345\r\n \u4f60", "a<|im_end|>\n"):
            assert found.encode(text) == wanted.encode(text)


def test_every_command_takes_every_spelling(
    spellings: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("training.tokenizer.proof.prove", lambda tokenizer, texts: {"different": 0})
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"number {i * 37} and {i}"}) + "\n" for i in range(300)))
    assert main(["data-prepare", str(path)]) == 0
    assert main(["tokenizer-measure", *spellings.values(), "--dataset", "texts"]) == 0
    for number, reference in enumerate(spellings.values()):
        assert main(["tokenizer-add", reference, "--token", "<|tool|>", "--name", f"more-{number}"]) == 0, reference
        assert main(["data-peek", "texts", "--tokenizer", reference, "--records", "1"]) == 0, reference
    capsys.readouterr()


def test_a_recipe_names_what_a_hash_pins(spellings: dict[str, str]):
    for spelling in ("name", "name@folder", "name@hash", "folder", "base", "base@hash", "base's folder"):
        assert artifact.load(artifact.resolve(spellings[spelling])).hash == artifact.find("small").hash
    with pytest.raises(UserError, match="no such tokenizer") as caught:
        artifact.resolve(spellings["Hugging Face"])
    assert caught.value.found == "no tokenizer.json that a manifest pins"


def test_an_artifact_goes_before_a_base_of_its_name(make_tokenizer, monkeypatch: pytest.MonkeyPatch):
    make_base(make_tokenizer(name="other"), monkeypatch, "small")
    own = make_tokenizer(name="small", vocab_size=300)
    assert artifact.find("small").hash == own.hash != artifact.find("small@" + make_tokenizer(name="other").hash).hash


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("small@ffffffffffff", "small@"), ("my-base@ffffffffffff", "my-base, far-away"), ("far-away", "nothing"),
        ("nobody", "there are: small; bases: my-base, far-away"), ("/app/models/none.gguf", "nothing"),
        ("/app/models/bases", "no tokenizer.json"), ("", "no tokenizer.json"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_told_with_what_is(spellings: dict[str, str], reference: str, words: str):
    with pytest.raises(UserError) as caught:
        artifact.find(reference)
    assert words in caught.value.found and caught.value.where and caught.value.expected


def test_a_base_that_is_not_fetched_names_the_command_that_fetches_it(spellings: dict[str, str]):
    with pytest.raises(UserError) as caught:
        artifact.find("far-away")
    assert caught.value.next_command == "make base-fetch BASE=far-away"


# ---- GGUF files


def test_a_gguf_is_unpacked_once_and_again_where_it_is_damaged(make_tokenizer, tmp_path: Path):
    path = write_gguf(make_tokenizer(), tmp_path / "x.gguf")
    first = artifact.find(str(path))
    touched = (first.folder / "tokenizer.json").stat().st_mtime_ns
    assert artifact.find(str(path)).folder == first.folder and first.name == "x"
    assert (first.folder / "tokenizer.json").stat().st_mtime_ns == touched
    (first.folder / "tokenizer.json").write_text("{}")
    assert artifact.find(str(path)).hash == first.hash
    other = write_gguf(make_tokenizer(vocab_size=300), tmp_path / "x.gguf")
    assert artifact.find(str(other)).hash != first.hash


def test_a_gguf_of_another_kind_is_refused(make_tokenizer, tmp_path: Path):
    path = write_gguf(make_tokenizer(), tmp_path / "other.gguf", pre="tekken")
    with pytest.raises(UserError, match="not known here") as caught:
        artifact.find(str(path))
    assert "tekken" in caught.value.found


def odd_tokens(tokens: list[str]) -> list[str]:
    return [*tokens[:-1], tokens[0]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": odd_tokens}, "texts"), ({"types": lambda types: types[:-1]}, "types for"),
        ({"bos": lambda _: 1 << 30}, "bos_token_id"), ({"eos": lambda _: 1 << 30}, "eos_token_id"),
        ({"bos": lambda _: None}, "without a BOS"),
        ({"merges": lambda merges: [*merges, "no such"]}, "cannot be opened"),
        ({"merges": lambda _: ["x"]}, "cannot be opened"),
        ({"tokens": lambda tokens: [*tokens[:-1], "\u4f60\u597d"]}, "cannot be opened"),
    ],
)  # fmt: skip
def test_a_gguf_that_contradicts_itself_is_refused(make_tokenizer, tmp_path: Path, changes: dict, words: str):
    tokenizer = make_tokenizer()
    before = vars(proof.vocabulary(tokenizer))
    path = write_gguf(tokenizer, tmp_path / "odd.gguf", **{key: change(before[key]) for key, change in changes.items()})
    with pytest.raises((IntegrityError, UserError)) as caught:
        artifact.find(str(path)).encode("a")
    assert words in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_gguf_without_a_vocabulary_or_without_types_is_refused(tmp_path: Path):
    for name, with_tokens in (("bare", False), ("typeless", True)):
        writer = gguf.GGUFWriter(str(tmp_path / f"{name}.gguf"), "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        if with_tokens:
            writer.add_token_list(["a", "b", "ab"])
            writer.add_token_merges(["a b"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises((UserError, IntegrityError)) as caught:
            artifact.find(str(tmp_path / f"{name}.gguf"))
        assert ("0 types for 3" if with_tokens else "without tokenizer.ggml.tokens") in caught.value.found


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])
def test_a_gguf_that_is_cut_is_refused(make_tokenizer, tmp_path: Path, share: float):
    path = write_gguf(make_tokenizer(), tmp_path / "cut.gguf")
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(IntegrityError, match="not a whole GGUF"):
        artifact.find(str(path))
