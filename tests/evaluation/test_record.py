"""Models measured for real, tiny ones: every form, once each, compared under the same conditions or refused."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest

from tests.evaluation.conftest import write_exam, write_gguf
from tests.objectives.tiny import make_chat
from training.cli import main
from training.core import files, paths
from training.core.errors import IntegrityError, UserError
from training.data import dataset as datasets
from training.evaluation import conditions, kept, loading, loss, record, scorers, subject
from training.evaluation.answering import Answerer
from training.evaluation.conditions import Identity
from training.evaluation.rendering import Prompts
from training.llamacpp import tiny as tiny_gguf
from training.recipe import bases
from training.recipe.load import load as load_recipe
from training.rounds import trial
from training.runs.folder import RunFolder


def evaluate(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["evaluate", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def train(world: Path, name: str = "lora", *overrides: str) -> RunFolder:
    """A run of a recipe, the one that there is where it was made before."""
    capture = io.StringIO()
    with contextlib.redirect_stdout(capture):
        assert main(["train", "--config", str(world / f"{name}.yaml"), *overrides, "--reuse", "--json"]) == 0
    return RunFolder.open(json.loads(capture.getvalue())["run"])


def plain_folder(folder: Path) -> Path:
    """The tiny base as a Hugging Face folder that no manifest tells of."""
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((bases.find("tiny").folder / name).read_bytes())
    return folder


def test_every_kind_of_model_has_the_same_record(world: Path, exam_file: Path, capsys: pytest.CaptureFixture):
    """A checkpoint, the base, a plain folder: loss, bits per byte, agreement, hashes; kept by identity."""
    run, folder, plain = train(world), bases.find("tiny").folder, plain_folder(world / "plain")
    code, found = evaluate(capsys, run.id, "tiny", str(plain), str(folder), "--exam", str(exam_file))
    assert code == 0
    tuned, base, copy, by_path = found["records"]
    assert tuned["model"]["form"] == "checkpoint" and base["model"]["form"] == "base"
    assert copy["model"]["form"] == "folder" and by_path["model"]["label"] == "tiny"
    for one in found["records"]:
        assert one["score"]["perplexity"] > 1 and 0 <= one["exam"]["agreement"] <= 1
        assert set(one["identities"]) == {"test", "exam"}
    assert tuned["score"]["bits_per_byte"] < base["score"]["bits_per_byte"] == copy["score"]["bits_per_byte"]
    assert base["model"]["sha256"] == copy["model"]["sha256"] and by_path["reused"] and copy["reused"]
    assert tuned["model"]["base_sha256"] == base["model"]["sha256"]
    assert (run.path / "eval" / f"{Path(tuned['model']['path']).name}.json").is_file()
    code, again = evaluate(capsys, run.id, "--exam", str(exam_file))
    assert again["records"][0]["reused"] and again["records"][0]["exam"] == tuned["exam"]


def test_the_value_is_that_of_every_batch_size_packed_or_padded(world: Path):
    """B81: alone, by 2, by 4, by all, and packed, to 1e-6."""
    import numpy as np

    from training.engine.inputs import rows_of
    from training.objectives.contract import measure
    from training.recipe.load import load

    run = train(world)
    evaluation = record.Evaluation(subject.find(run.id), record.Request())
    alone = evaluation.run()["test"]["score"]["loss_nats"]
    model = evaluation.loaded.model
    for packing in ("false", "true"):
        recipe = load(world / "lora.yaml", [f"data.packing={packing}"]).recipe
        rows = rows_of(evaluation.inputs, "test", recipe)
        for micro_batch in (1, 2, 4, 99):
            found = measure(model, rows, np.arange(rows.num_rows), micro_batch)
            assert found.loss_nats == pytest.approx(alone, abs=1e-6)


def test_the_post_cutoff_split_is_the_headline(world: Path, capsys: pytest.CaptureFixture):
    """T27: where it holds records it is measured first, and unasked."""
    lines = [json.loads(line) for line in (world / "chat.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["date"] = "2026-02-01" if number % 4 == 0 else "2025-01-01"
    (world / "dated.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["data-prepare", str(world / "dated.jsonl"), "--name", "dated", "--cutoff", "2026-01-01"]) == 0
    run = train(world, "lora", "data.dataset=dated")
    _, found = evaluate(capsys, run.id)
    assert list(found["records"][0]["splits"]) == ["test_postcutoff"]


def test_the_headline_is_first_whatever_order_was_typed(world: Path, capsys: pytest.CaptureFixture):
    run = train(world)
    asked = [part for split in ("train", "validation", "test", "train") for part in ("--split", split)]
    code, found = evaluate(capsys, run.id, *asked, "--against", "tiny")
    assert list(found["records"][0]["splits"]) == ["test", "validation", "train"]
    assert found["judgements"][0]["headline"] == "test" and code in (0, 4)


def test_a_judgement_is_of_the_same_conditions_or_none(world: Path, exam_file: Path, capsys: pytest.CaptureFixture):
    """W32: another precision is refused, is compared by name, and is then marked so."""
    run = train(world, "qlora")
    assert evaluate(capsys, "tiny", "--exam", str(exam_file), "--precision", "fp32")[0] == 0
    assert evaluate(capsys, run.id, "--exam", str(exam_file), "--split", "test")[0] == 0
    base = next(kept.of_model(subject.find("tiny").sha256))
    tuned = next(one for one in kept.of_model(subject.find(run.id).sha256) if "exam" in one["asked"])
    one, other = (Identity.from_json(each["identity"]) for each in (base, tuned))
    assert conditions.differences(one, other) == ["precision"]
    with pytest.raises(UserError, match="different conditions") as error:
        conditions.require_comparable(one, other)
    assert "--allow precision" in str(error.value) and "nf4" in str(error.value)
    assert conditions.require_comparable(one, other, ["precision"]) == ["precision"]
    code, found = evaluate(capsys, run.id, "--exam", str(exam_file), "--against", "tiny")
    assert code in (0, 4) and found["judgements"][0]["allowed_to_differ"] == [], "the base is measured in nf4 too"


def test_one_recipe_decides_on_what_and_how_every_model_is_measured(world: Path, capsys: pytest.CaptureFixture):
    """Runs on other data, with another length, precision and attention, are measured as the first one, else as --config
    says; each is still built as it was trained."""
    assert main(["data-prepare", str(make_chat(world / "more.jsonl", 60)), "--name", "more"]) == 0
    first = train(world)
    other = train(world, "qlora", "data.dataset=more", "data.seq_len=48", "memory.attention=eager", "lora.rank=4")
    code, found = evaluate(capsys, first.id, "--against", other.id)
    assert code in (0, 4) and found["judgements"][0]["allowed_to_differ"] == []
    papers = [one["identities"]["test"]["paper"] for one in (found["records"][0], found["against"])]
    assert papers[0] == papers[1] and papers[0]["seq_len"] == 64
    recipe = (world / "lora.yaml").read_text().replace("dataset: chat,", "dataset: more,")
    (world / "more.yaml").write_text(recipe.replace("weights: fp32", "weights: fp32, attention: eager"))
    code, found = evaluate(capsys, first.id, "tiny", "--against", other.id, "--config", str(world / "more.yaml"))
    assert code in (0, 4), found
    asked = [one["identities"]["test"] for one in (*found["records"], found["against"])]
    assert {one["paper"]["dataset"] for one in asked} == {datasets.load(datasets.resolve("more")).hash}
    assert {one["conditions"]["attention"] for one in asked} == {"eager"}
    assert {one["conditions"]["precision"] for one in asked} == {"fp32"}
    again = record.Evaluation(subject.find("tiny"), record.Request(recipe=load_recipe(world / "more.yaml").recipe))
    assert again.loaded.model.config._attn_implementation == "eager", "a base too is loaded so"
    code, found = evaluate(capsys, other.id, "--against", train(world, "full").id)
    assert code in (0, 4), found
    assert {
        one["identities"]["test"]["conditions"]["precision"] for one in (found["records"][0], found["against"])
    } == {"nf4"}


def test_the_start_of_a_run_that_goes_on_from_another_scores_as_the_other(world: Path):
    """What a round takes as the baseline of a carried adapter."""
    source = train(world)
    run = train(world, "lora", f"lora.from={source.id}/latest", "checkpoint.initial=true", "stop.max_steps=2")
    found = [
        record.Evaluation(subject.find(str(folder)), record.Request()).run()["test"]["score"]["loss_nats"]
        for folder in (source.step_folder(source.steps()[-1]), run.step_folder(0))
    ]
    assert found[1] == pytest.approx(found[0], abs=1e-6)


def test_each_of_several_models_has_its_own_judgement(world: Path, exam_file: Path, capsys: pytest.CaptureFixture):
    run = train(world)
    main(["evaluate", "tiny", run.id, "--exam", str(exam_file), "--against", "tiny"])
    block = capsys.readouterr().err
    for label in ("tiny", subject.find(run.id).label):
        assert f"\n{label}: judged " in block and f"\n{label}: exam difference " in block


def test_the_day_that_a_template_is_told_is_part_of_the_identity(world: Path, exam_file: Path):
    """The same question reads otherwise on another day; where none is told, what was kept before is still found."""
    found, identities = subject.find("tiny"), []
    for date in (None, "2026-01-01", "2026-01-02"):
        recipe = load_recipe(world / "lora.yaml", [f"data.template_date={date}"] if date else []).recipe
        request = record.Request(exam=str(exam_file), recipe=recipe)
        identities.append(record.Evaluation(found, request).planned["exam"].identity)
    assert len({one.sha256 for one in identities}) == 3
    assert conditions.differences(identities[1], identities[2]) == ["template"]
    assert identities[0].conditions["template"] == files.sha256_json(found.tokenizer.chat_template)


def test_candidates_whose_scores_would_not_compare_are_refused_before_any_is_measured(
    world: Path, exam_file: Path, monkeypatch: pytest.MonkeyPatch
):
    """A file among folders, and a run whose recipe draws other questions; one that is not there is passed over."""
    gguf, run = write_gguf("bare"), train(world, "lora", "seeds.eval=9")

    def not_yet(*_: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(trial, "run_step", not_yet)
    with pytest.raises(UserError, match="different conditions") as error:
        trial.run(["tiny", "gone", str(gguf)], str(exam_file), None, "fp32")
    assert "runtime: llama.cpp" in error.value.found and error.value.next_command == (
        f"make trial EXAM={exam_file} ARGS='tiny --precision fp32'"
    )
    with pytest.raises(UserError, match="not measured on the same records"):
        trial.run(["tiny", run.id], str(exam_file), 5, "fp32")
    with pytest.raises(AssertionError, match="something was measured"):
        trial.run(["tiny", run.id], str(exam_file), None, "fp32")  # all questions, so nothing is drawn


def test_a_drawn_guard_set_leaves_out_what_a_gguf_was_trained_on(world: Path, capsys: pytest.CaptureFixture):
    """By its manifest, where no recipe is named; whoever it is compared with is asked the same, and so is the next."""
    from pydoc_data.topics import topics

    lines = [json.dumps({"text": text, "group": name, "split": "train"}) for name, text in sorted(topics.items())[:40]]
    (world / "topics.jsonl").write_text("\n".join([*lines, *(world / "records.jsonl").read_text().splitlines()]) + "\n")
    assert main(["data-prepare", str(world / "topics.jsonl"), "--name", "topics"]) == 0
    data = datasets.load(datasets.resolve("topics"))
    tuned, bare = write_gguf("tuned"), write_gguf("bare")
    manifest = {**files.file_record(tuned), "quant_type": "F32", "dataset": {"name": "topics", "hash": data.hash}}
    files.write_json(paths.gguf_manifest(tuned), manifest)

    def asked(reference: str, *models: Path) -> list:
        subjects = [subject.find(str(one)) for one in models]
        request = record.settled(record.Request(guard=reference), subjects)
        return [record.Evaluation(one, request).planned["guard"] for one in subjects]

    one, other = asked("drawn", bare, tuned)
    assert one.identity.paper == other.identity.paper and one.reference == f"drawn:{data.reference}"
    [alone] = asked("drawn", bare)
    assert alone.reference == "drawn" and alone.identity.paper != one.identity.paper
    [again] = asked(one.reference, bare)
    assert again.identity == one.identity, "the reference that is kept asks for the very same paper"


def test_two_papers_are_never_compared(world: Path, exam_file: Path):
    def identity(paper: dict) -> Identity:
        return Identity({"sha256": "a"}, paper, {})

    one = {"kind": "exam", "name": "e", "sha256": "1" * 64, "num_questions": 3, "max_answer_tokens": 5}
    with pytest.raises(UserError, match="not measured on the same records"):
        conditions.require_comparable(identity(one), identity(one | {"max_answer_tokens": 6}), conditions.NAMES)


def test_a_win_and_a_bad_run(world: Path, capsys: pytest.CaptureFixture):
    """A run that learns is better than its base, with its page; one at a far too high rate is refused with exit 4."""
    good = train(world, "lora", "stop.max_steps=16", "optimizer.lr=1e-2")
    page = world / "page.html"
    code, found = evaluate(capsys, good.id, "--against", "tiny", "--split", "train", "--report", str(page))
    assert (code, found["judgements"][0]["verdict"]) == (0, "better")
    text = page.read_text()
    assert text.count("<svg") == 2 and "validation" in text and "better" in page.with_suffix(".txt").read_text()
    bad = train(world, "lora", "stop.max_steps=8", "optimizer.lr=10")
    latest = bad.step_folder(bad.steps()[-1])
    code, found = evaluate(capsys, str(latest), "--against", good.id, "--split", "train")
    assert (code, found["judgements"][0]["verdict"]) == (4, "worse")


def test_an_interrupted_exam_goes_on_and_is_never_half_counted(
    world: Path, exam_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    asked: list[int] = []
    whole = Answerer.answers

    def cut(self, prompts):
        for number, found in whole(self, prompts):
            asked.append(number)
            if len(asked) == 5:
                raise KeyboardInterrupt
            yield number, found

    monkeypatch.setattr(Answerer, "answers", cut)
    assert evaluate(capsys, "tiny", "--exam", str(exam_file))[0] == 130
    [partial] = kept.folder().glob("*.partial.jsonl")
    assert len(partial.read_bytes().splitlines()) == 4 and not list(kept.folder().glob("*.json"))
    partial.write_bytes(partial.read_bytes() + b'{"key": "cut sho')
    code, found = evaluate(capsys, "tiny", "--exam", str(exam_file))
    assert code == 0 and found["records"][0]["exam"]["num_questions"] == 12
    assert len(asked) == 5 + 8 and not list(kept.folder().glob("*.partial.jsonl"))
    [document] = kept.folder().glob("*.json")
    document.write_text(document.read_text().replace('"num_right": ', '"num_right": 1'))
    monkeypatch.setattr(Answerer, "answers", whole)
    assert not evaluate(capsys, "tiny", "--exam", str(exam_file))[1]["records"][0]["reused"], "a damaged one is none"


def test_answers_do_not_depend_on_their_batch(world: Path):
    """Prompts of unequal length together, one by one, and by the library's own greedy generation."""
    import torch

    found = subject.find("tiny")
    loaded = loading.load(found, "fp32", "sdpa")
    prompts = Prompts(found.tokenizer)
    ids = [found.tokenizer.encode(text) for text in ("f1", "def f2(x): return", "number 17", "x * 3 + 1\n", "f9(x)")]
    answerer = Answerer(loaded, prompts.stop_ids, 10)
    together = dict(answerer.answers(ids))
    for number, one in enumerate(ids):
        [(_, alone)] = answerer.answers([one])
        own = loaded.model.generate(
            torch.tensor([one]), max_new_tokens=10, do_sample=False, eos_token_id=sorted(prompts.stop_ids),
            pad_token_id=0, attention_mask=torch.ones(1, len(one), dtype=torch.long),
        )[0, len(one) :].tolist()  # fmt: skip
        assert together[number] == alone == [token for token in own if token not in prompts.stop_ids]
    assert dict(answerer.answers([[1] * 128])) == {0: []}, "no room in the context is no answer"


def test_log_probabilities_of_options_are_those_of_the_training_loss(world: Path):
    import torch

    from training.objectives.loss import trained_nats

    found = subject.find("tiny")
    loaded = loading.load(found, "fp32", "sdpa")
    prompt, options = [5, 9, 11, 40], [[7], [8, 9, 10], [12, 13]]
    nats = Answerer(loaded, frozenset(), 1).logprobs(prompt, options)
    for option, value in zip(options, nats, strict=True):
        whole = torch.tensor([[*prompt, *option]])
        places = torch.arange(len(prompt) - 1, len(prompt) - 1 + len(option))
        tensors = {"input_ids_BT": whole[:, :-1], "trained_N": places, "labels_N": torch.tensor(option)}
        assert value == pytest.approx(-trained_nats(loaded.model, tensors).item(), abs=1e-4)


def test_what_cannot_be_measured_is_told(world: Path, tmp_path: Path, exam_file: Path, capsys: pytest.CaptureFixture):
    for arguments, code in (
        (["tiny"], 2), (["tiny", "--split", "test"], 2), (["no-such"], 2), (["tiny", "--exam", "no.jsonl"], 2),
        (["tiny", "--exam", str(exam_file), "--questions", "0"], 2),
        (["tiny", "--exam", str(exam_file), "--against", "tiny", "--allow", "colour"], 2),
        (["tiny", "--exam", str(write_exam(tmp_path / "e.jsonl", [{"question": "a", "answer": ""}]))], 2),
        (["tiny", "--exam", str(exam_file), "--against", "tiny", "--report", "page.pdf"], 2),
        (["tiny", "--exam", str(exam_file), "--report", "page.html"], 2),
        (["tiny", "tiny", "--exam", str(exam_file), "--against", "tiny", "--report", "page.html"], 2),
    ):  # fmt: skip
        assert evaluate(capsys, *arguments)[0] == code, arguments
    weights = bases.find("tiny").folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-2] + b"\x00\x01")
    with pytest.raises(IntegrityError):
        subject.find("tiny")
    weights.write_bytes(whole)


def test_everything_given_is_looked_at_before_anything_is_measured(
    world: Path, tmp_path: Path, exam_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """A wrong exam or guard set, a model that cannot be measured so, two that cannot be compared: told at once."""
    run, gguf = train(world).id, str(write_gguf("untrained"))
    wrong = str(write_exam(tmp_path / "e.jsonl", [{"question": "a", "answer": ""}]))

    def not_yet(*_: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(loading, "load", not_yet)
    monkeypatch.setattr(loss, "measured", not_yet)
    for arguments in (
        [run, "--exam", wrong], [run, "--exam", str(exam_file), "--guard", wrong],
        [run, gguf, "--split", "test", "--exam", str(exam_file)],
        [run, "--exam", str(exam_file), "--against", gguf], [run, "--split", "test_postcutoff"],
    ):  # fmt: skip
        assert evaluate(capsys, *arguments)[0] == 2, arguments
    odd = tiny_gguf.write(paths.roots().models / "odd.gguf", seed=1)  # its merge makes a token that it has not
    code, found = evaluate(capsys, str(odd), "--exam", str(exam_file))
    assert code == 5 and "tokenizer cannot be opened" in json.dumps(found)
    assert not list(kept.folder().glob("*.json"))


def test_what_goes_wrong_in_a_measurement_is_told_or_counts_as_wrong(
    world: Path, tmp_path: Path, exam_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """Weights that have diverged, a scorer that raises, a model that answers nothing."""
    from safetensors.torch import load_file, save_file

    broken = plain_folder(world / "broken")
    weights = load_file(broken / "model.safetensors")
    save_file(
        {name: one * float("nan") for name, one in weights.items()}, broken / "model.safetensors", {"format": "pt"}
    )
    choice = write_exam(tmp_path / "c.jsonl", [{"question": "f", "answer": "a", "options": ["a", "b"]}])
    split = ["--config", str(world / "lora.yaml"), "--split", "test"]
    for asked in (split, ["--exam", str(choice)], ["--exam", str(exam_file)]):
        code, found = evaluate(capsys, str(broken), *asked)
        assert code == 4 and "diverged" in json.dumps(found), found
    assert not list(kept.folder().glob("*.json"))

    def raising(text: str, _: object) -> str:
        raise RuntimeError(text)

    with monkeypatch.context() as patch:
        patch.setitem(scorers._READERS, "exact", raising)
        code, found = evaluate(capsys, "tiny", "--exam", str(exam_file))
    assert code == 0 and found["records"][0]["exam"]["num_unread"] == 12
    shutil.rmtree(kept.folder())

    assert evaluate(capsys, "tiny", "--exam", str(exam_file))[0] == 0
    monkeypatch.setattr(Answerer, "answers", lambda _, prompts: ((number, []) for number in range(len(prompts))))
    code, found = evaluate(capsys, str(plain_folder(world / "silent")), "--exam", str(exam_file))
    assert found["records"][0]["reused"], "the same weights are the same model"
    (world / "silent" / "model.safetensors").unlink()
    save_file(
        {name: one * 2 for name, one in weights.items()}, world / "silent" / "model.safetensors", {"format": "pt"}
    )
    code, found = evaluate(capsys, str(world / "silent"), "--exam", str(exam_file), "--against", "tiny")
    assert code == 4 and found["judgements"][0]["verdict"] == "worse"
    assert "collapsed: 100 % of the answers are ''" in found["judgements"][0]["reasons"]


def test_a_choice_that_does_not_fit_is_told_before_any_answer(world: Path, tmp_path: Path, capsys):
    options = ["a", "b " * 200]
    exam = write_exam(tmp_path / "c.jsonl", [{"prompt": "x", "answer": "a", "options": options}])
    code, found = evaluate(capsys, "tiny", "--exam", str(exam))
    assert code == 2 and "at most 128 tokens" in json.dumps(found)


def test_records_that_were_left_out_are_told(world: Path, capsys: pytest.CaptureFixture):
    """Of a split those that the tokens have not, of an exam those that ask nothing new or have no answer."""
    lines = [json.loads(line) for line in (world / "chat.jsonl").read_text().splitlines()]
    for line in lines:
        place = {"g1": "test", "g2": "test", "g3": "test", "g4": "validation"}
        line["split"] = place.get(line["group"], "train")
    lines[1]["messages"][1]["content"] += " + 1" * 60
    lines[3]["messages"][0]["content"] = lines[2]["messages"][0]["content"]
    (world / "odd.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["data-prepare", str(world / "odd.jsonl"), "--name", "odd", "--near", "0"]) == 0
    recipe = world / "odd.yaml"
    recipe.write_text((world / "lora.yaml").read_text().replace("dataset: chat,", "dataset: odd, overlong: drop,"))
    code, found = evaluate(capsys, "tiny", "--config", str(recipe), "--exam", "odd:test")
    assert code == 0, found
    assert found["records"][0]["left_out"] == {"test": {"too long": 1}, "exam": {"asked before": 1}}


@pytest.mark.parametrize(
    ("options", "word", "next_command"),
    [
        (["--split", "test"], "--split asks for a loss", "ARGS='--exam my-exam.jsonl'"),
        (["--split", "test", "--exam", "e.jsonl"], "no recipe, which would say", "ARGS='--exam e.jsonl'"),
        (["--split", "test", "--exam", "chat"], "--exam", "ARGS='--exam chat:test'"),
        (["--exam", "chat"], "chat:validation", " --exam chat:test"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_split_of_a_base_without_a_recipe_is_refused_with_the_exam_that_may_be_meant(
    world: Path, capsys: pytest.CaptureFixture, options: list[str], word: str, next_command: str
):
    assert main(["evaluate", "tiny", *options, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert word in str(error) and error["next"].endswith(next_command)


def test_an_empty_split_is_refused(world: Path):
    evaluation = record.Evaluation(subject.find(train(world).id), record.Request(("test_postcutoff",)))
    with pytest.raises(UserError, match="no test_postcutoff split"):
        evaluation.run()
    assert loss.total([]).nats == 0
