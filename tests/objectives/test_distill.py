"""A teacher recorded, a student trained towards it: whole runs on a tiny base, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.nursery import Nursery
from tests.engine.test_ranks import BOTH, alike, bases_here
from tests.engine.test_ranks import train as in_child
from tests.engine.test_run import losses, train
from tests.engine.test_supervisor import imported_by_launching
from tests.objectives.tiny import resume_in_the_middle, train_in_any_split
from training.cli import main
from training.core import files, paths
from training.core.errors import IntegrityError
from training.data import dataset as datasets
from training.data import tokens
from training.data.supervision import Settings
from training.objectives import base, teaching
from training.recipe import bases, schema
from training.recipe.load import load
from training.runs.events import read_events
from training.tokenizer import artifact

ARCH = """\
  arch: {vocab_size: 384, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
         num_key_value_heads: 1, max_position_embeddings: 128}
"""


@pytest.fixture
def distilling(world: Path) -> Path:
    """The tiny world with a teacher that was tuned on its data, by the name `best`, and recipes that distil it."""
    code, run = train(world / "full.yaml", "stop.max_steps=30", "evaluate.every_steps=null")
    assert code == 0
    (world / "best").symlink_to(run.step_folder(30))
    lora = (world / "lora.yaml").read_text().replace("method: lora", "method: distill")
    (world / "distill.yaml").write_text(lora + "distill: {top_k: 4}\n")
    (world / "adapter.yaml").write_text("extends: distill.yaml\nname: adapter\nlora: {rank: 8}\n")
    (world / "whole.yaml").write_text("extends: distill.yaml\nname: whole\n")
    fresh = "extends: distill.yaml\nname: fresh\nmodel:\n  base: null\n" + ARCH + "tokenizer: {path: tiny}\n"
    (world / "fresh.yaml").write_text(fresh)
    return world


def record(folder: Path, *overrides: str, teacher: str = "best", recipe: str = "whole.yaml") -> int:
    named = str(folder / teacher) if (folder / teacher).exists() else teacher
    return main(["teacher-record", "--config", str(folder / recipe), "--teacher", named, *overrides])


def shards_of(recipe: Path) -> Path:
    data = load(recipe).recipe.data
    dataset = datasets.load(datasets.resolve(data.dataset))
    return tokens.folder_of(dataset, artifact.of_recipe(load(recipe).recipe), Settings.of(data))


def records_of(folder: Path) -> list[Path]:
    return sorted(shards_of(folder / "whole.yaml").glob("teachers/[!.]*"))


def test_a_launcher_needs_no_torch_for_any_method(distilling: Path):
    """R5: every method of the schema, each way that distillation makes its student, an adapter that is gone on from."""
    assert record(distilling) == 0
    _, run = train(distilling / "lora.yaml", "stop.max_steps=2")
    on = f"lora: {{from: {run.id}}}\n"
    (distilling / "on.yaml").write_text(f"extends: lora.yaml\nname: on\n{on}")
    names = ("full", "lora", "qlora", "on", "whole", "adapter", "fresh")
    recipes = [distilling / f"{name}.yaml" for name in names]
    methods = {"pretrain", *(load(one).recipe.method for one in recipes)}
    assert methods == set(schema.plugins())
    assert imported_by_launching(*recipes) == "[]"


def test_the_record_is_what_the_model_says(distilling: Path):
    """B82: row i is about label i, given all that is before it; the label stands in the row."""
    assert record(distilling) == 0
    split = tokens.open_split(shards_of(distilling / "whole.yaml"), "train")
    (folder,) = records_of(distilling)
    said = teaching.Record(folder, split)
    model = base.opened((distilling / "best").resolve(), torch.float32, "eager").eval()
    nats, num_labels = 0.0, 0
    for document in range(split.num_documents):
        ids, places = teaching.labels_of(split, document)
        with torch.inference_mode():
            logprobs_TV = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
        top_NK, logprobs_NC = said.of_document(document)
        assert len(top_NK) == len(places) > 0
        for row, place in enumerate(places):
            expected = logprobs_TV[place - 1]
            assert np.allclose(logprobs_NC[row, :4], expected.topk(4).values, atol=1e-4)
            assert np.allclose(expected[top_NK[row].astype(np.int64)], logprobs_NC[row, :4], atol=1e-4)
            assert np.exp(logprobs_NC[row]).sum() == pytest.approx(1.0, abs=1e-5)
            nats -= expected[int(ids[place])].item()
        num_labels += len(places)
    figures = said.manifest["train"]
    assert figures["rows"] == num_labels == split.num_trained_tokens
    assert figures["loss_nats"] == pytest.approx(nats / num_labels, abs=1e-4)
    assert said.manifest["teacher"]["precision"] == "float32"
    assert (folder / "train.top.bin").stat().st_size == num_labels * 4 * 2


def test_students_learn_by_adapter_whole_and_from_nothing(distilling: Path):
    assert record(distilling) == 0
    for name in ("adapter", "whole", "fresh"):
        code, run = train(distilling / f"{name}.yaml")
        assert code == 0 and run.status() == "completed", name
        assert losses(run)[8] < losses(run)[1] - 0.2
        (start,) = read_events(run.path, "start")
        assert start["teacher"] == f"best@{records_of(distilling)[0].name}"
        step = next(read_events(run.path, "step"))
        assert step["train/bits_per_byte"] is None
        validations = list(read_events(run.path, "validation"))
        assert validations[-1]["eval/loss_nats"] < validations[0]["eval/loss_nats"]
        assert validations[-1]["eval/bits_per_byte"] is not None
        assert (run.step_folder(8) / "adapter_model.safetensors").is_file() == (name == "adapter")
        assert main(["evaluate", run.id, "--split", "validation"]) == 0


def test_without_the_teachers_share_it_is_plain_tuning(distilling: Path):
    """alpha 0 is the data's own loss: the run of method full, number by number."""
    assert record(distilling) == 0
    _, distilled = train(distilling / "whole.yaml", "distill.alpha=0", "memory.loss_chunk=3")
    _, plain = train(distilling / "full.yaml")
    assert list(losses(distilled).values()) == pytest.approx(list(losses(plain).values()), abs=1e-5)


@BOTH
def test_two_processes_distil_as_one_does(distilling: Path, together: tuple[str, ...]):
    """Whole, and by an adapter: each process reads its own rows of what the teacher said."""
    assert record(distilling) == 0
    with Nursery() as nursery:
        for name in ("whole", "adapter"):
            dropout = ("lora.dropout=0",) if name == "adapter" else ()
            arguments = (nursery, distilling / f"{name}.yaml", "batch.accumulate=3", *dropout)
            alone = in_child(*arguments, before=bases_here())
            alike(in_child(*arguments, *together, before=bases_here()), alone)


def test_any_split_into_micro_batches_gives_one_run(distilling: Path):
    assert record(distilling) == 0
    train_in_any_split(distilling / "adapter.yaml")


def test_a_resume_goes_on_bit_for_bit(distilling: Path):
    """The run's own recipe names the record, so a second teacher that comes later changes nothing."""
    assert record(distilling) == 0
    _, run = train(distilling / "adapter.yaml")
    assert record(distilling, teacher="tiny") == 4  # it guesses
    _, other = train(distilling / "full.yaml", "stop.max_steps=20")
    assert record(distilling, teacher=str(other.step_folder(20))) == 0
    resume_in_the_middle(run)


def test_a_record_is_found_again_and_a_damaged_one_made_again(distilling: Path, capsys: pytest.CaptureFixture):
    assert record(distilling) == 0
    capsys.readouterr()
    assert record(distilling) == 0
    assert "was there already" in capsys.readouterr().err
    (folder,) = records_of(distilling)
    before = files.read_json(folder / files.MANIFEST)
    data = bytearray((folder / "train.logprobs.bin").read_bytes())
    data[0] ^= 1
    (folder / "train.logprobs.bin").write_bytes(data)
    assert train(distilling / "whole.yaml")[0] == 5
    assert record(distilling) == 0
    assert files.read_json(folder / files.MANIFEST) == before


def test_shifted_rows_are_refused(distilling: Path):
    """B82: rows of the right number that are about the labels before them."""
    assert record(distilling) == 0
    split = tokens.open_split(shards_of(distilling / "whole.yaml"), "train")
    (folder,) = records_of(distilling)
    for part in ("labels", "top", "logprobs"):
        path = folder / f"train.{part}.bin"
        data = path.read_bytes()
        each = len(data) // split.num_trained_tokens
        path.write_bytes(data[each:] + data[:each])
    manifest = files.read_json(folder / files.MANIFEST)
    files.write_manifest(
        folder, teaching.KIND, {k: manifest[k] for k in manifest if k not in ("schema", "kind", "files")}
    )
    with pytest.raises(IntegrityError, match="not about these tokens"):
        teaching.Record(folder, split)


def test_what_cannot_be_distilled_is_refused(distilling: Path, capsys: pytest.CaptureFixture):
    for overrides, code, words in (
        (
            (),
            2,
            f'make teacher-record CONFIG={distilling}/whole.yaml TEACHER=tiny ARGS="data.dataset=chat distill.top_k=4"',
        ),
        (("data.packing=true",), 2, "nothing is packed"),
        (("data.dataset=texts", "data.loss_on=all"), 2, "records with answers"),
        (("distill.alpha=1.5",), 2, "distill.alpha"),
        (("distill.temperature=0",), 2, "distill.temperature"),
        (("memory.weights=nf4",), 2, "memory.weights"),
    ):
        assert train(distilling / "whole.yaml", *overrides)[0] == code, overrides
        assert words in capsys.readouterr().err
    assert record(distilling) == 0
    assert record(distilling, "distill.top_k=2") == 0
    capsys.readouterr()
    assert train(distilling / "whole.yaml", "distill.teacher=nobody")[0] == 2
    assert "top_k 2" in capsys.readouterr().err
    assert train(distilling / "whole.yaml", "distill.top_k=3")[0] == 2
    assert record(distilling, "distill.top_k=385") == 2
    assert record(distilling, recipe="full.yaml") == 2
    assert record(distilling, teacher="nobody") == 2
    assert record(distilling, teacher="nobody.gguf") == 2


def test_a_teacher_of_other_tokens_is_refused(distilling: Path, capsys: pytest.CaptureFixture):
    import shutil

    other = distilling / "other"
    shutil.copytree((distilling / "best").resolve(), other)
    content = files.read_json(other / "tokenizer.json")
    vocab = content["model"]["vocab"]
    one, two = list(vocab)[300:302]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    files.write_json(other / "tokenizer.json", content)
    (other / files.MANIFEST).unlink()
    assert record(distilling, teacher="other") == 2
    assert "do not mean the same tokens" in capsys.readouterr().err
    _, adapter = train(distilling / "lora.yaml", "stop.max_steps=2")
    assert record(distilling, teacher=str(adapter.step_folder(2))) == 2
    assert "whole weights" in capsys.readouterr().err


def test_two_teachers_are_told_apart_by_name(distilling: Path, capsys: pytest.CaptureFixture):
    _, other = train(distilling / "full.yaml", "stop.max_steps=20")
    assert record(distilling) == 0
    assert record(distilling, teacher=str(other.step_folder(20))) == 0
    capsys.readouterr()
    assert train(distilling / "whole.yaml")[0] == 2
    assert "several teachers" in capsys.readouterr().err
    for folder in records_of(distilling):
        name = files.read_json(folder / files.MANIFEST)["teacher"]["name"]
        code, run = train(distilling / "whole.yaml", f"distill.teacher={name}", "stop.max_steps=1")
        assert code == 0 and f'teacher: "{name}@{folder.name}"' in (run.path / "recipe.yaml").read_text()


@pytest.mark.parametrize("name", ["adapter", "whole", "fresh"])
def test_a_step_of_made_up_records_is_planned(distilling: Path, name: str):
    """A made-up step has the recipe's shapes; no log-softmax is kept, so it takes no more than the plain loss."""
    from training.calculator import fit, formula
    from training.engine.probe import TrainerProbe

    resolved = load(distilling / f"{name}.yaml", ["batch.accumulate=1", "data.micro_batch=4"])
    plain = load(distilling / "full.yaml", ["batch.accumulate=1", "data.micro_batch=4"])
    probe = TrainerProbe(resolved.recipe, torch.device("cpu"), torch.float32)
    batch = probe.rows.batch(np.arange(4))
    assert batch.num_tokens == 4 * 64 and batch.tensors["teacher_NC"].shape == (256, 5)
    with torch.autograd.set_detect_anomaly(True):
        assert torch.isfinite(probe.rows.loss(probe.model, batch.tensors))
    assert fit.fit(resolved, vram="10GiB", with_levers=False).verdict == "fits"
    if name == "whole":
        own, theirs = (formula.estimate(one.recipe, on_cpu=True) for one in (resolved, plain))
        assert own.peak.allocated_bytes <= theirs.peak.allocated_bytes


def test_there_is_no_record_on_a_disk_without_room(distilling: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    assert record(distilling) == 3
    assert not records_of(distilling)


@pytest.mark.slow
def test_a_record_goes_on_after_a_kill(distilling: Path):
    """kill -9 in the middle: the next one goes on from there, and the bytes are those of a record nobody stopped."""
    assert record(distilling) == 0
    (folder,) = records_of(distilling)
    wanted = {path.name: path.read_bytes() for path in folder.iterdir()}
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    code = (
        "import sys, time\n"
        "from training.objectives import teach, teacher_model, teaching\n"
        "teach._WINDOW_DOCUMENTS, teaching._JOURNAL_SECONDS = 3, 0.0\n"
        "say = teacher_model.TeacherModel.say\n"
        "teacher_model.TeacherModel.say = lambda *a: (time.sleep(0.3), say(*a))[1]\n"
        "from training.recipe import bases\n"
        f"from pathlib import Path; bases.FILE = Path({str(bases.FILE)!r})\n"
        "from training.cli import main\n"
        f"main(['teacher-record', '--teacher', {str(distilling / 'best')!r}, "
        f"'--config', {str(distilling / 'whole.yaml')!r}])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=paths.REPOSITORY, stderr=subprocess.DEVNULL)
    journal = folder.with_name(f".{folder.name}.recording") / "journal.json"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (journal.is_file() and json.loads(journal.read_text())["documents"] >= 6):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = json.loads(journal.read_text())["documents"]
    assert 6 <= done < tokens.open_split(shards_of(distilling / "whole.yaml"), "train").num_documents
    with open(journal.parent / "train.top.bin", "ab") as file:
        file.write(b"half a row")
    asked = []
    from training.objectives import teacher_model

    say = teacher_model.TeacherModel.say
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            teacher_model.TeacherModel, "say", lambda self, many, k: asked.append(len(many)) or say(self, many, k)
        )
        assert record(distilling) == 0
    assert sum(asked) == tokens.open_split(shards_of(distilling / "whole.yaml"), "train").num_documents - done
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found.keys() == wanted.keys() and found["train.labels.bin"] == wanted["train.labels.bin"]
    for name in ("train.top.bin", "train.logprobs.bin"):
        assert len(found[name]) == len(wanted[name])
    pair = [np.frombuffer(one["train.logprobs.bin"], "<f4") for one in (found, wanted)]
    assert np.allclose(*pair, atol=1e-5)
