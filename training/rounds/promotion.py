"""Promotion and rollback: a model becomes the champion only by a measured win on the champion's own papers.

Refused: a run that is still running, a model that was not measured, a tie, a loss, a collapse, something forgotten, a
parity that failed, a broken chain, other papers than the champion was judged on. The first champion is what is served
now, measured first; nobody is promoted against nothing. A champion's papers are one exam and, where there was one, one
guard set: those that the first contender was measured on last. The history keeps them by their role, and whoever comes
after is judged in the same roles, whatever it was measured as since.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from training.core import files, paths
from training.core.errors import IntegrityError, RunError, UserError
from training.core.report import make_command, utc_stamp
from training.evaluation import kept, verdict
from training.evaluation.kept import EXAM, GUARD
from training.export import chain, manifest
from training.rounds import champion, history
from training.rounds.steps import options
from training.runs.folder import RUN_FILE, RunFolder

Papers = dict[str, dict]
"""Measurements by the hash of their paper, or by the role that they are judged in."""
Measure = Callable[[Path, list[str]], None]
"""Measures a GGUF, with the arguments of `evaluate` that say on what."""


@dataclass(frozen=True)
class Contender:
    """A GGUF file with its manifest and its measurements by the hash of their paper."""

    path: Path
    manifest: dict
    measured: Papers

    @property
    def name(self) -> str:
        return str(paths.container_path(self.path))


def promote(reference: str, measure: Measure, *, dry_run: bool = False) -> dict:
    """Make a model the champion, or raise why not. Returns `{"entry", "judgement", "first", "champion"}`.

    `measure` is called for the first champion alone.
    """
    champion.require_link_is_served()
    with champion.changing(f"promote {reference}"):
        contender = _contender(paths.model_file(reference))
        holder = champion.current()
        first = _first(contender, measure) if holder is None else None
        holder = holder or first
        if holder["sha256_model"] == contender.manifest["sha256"]:
            raise UserError("it is the champion already", where=contender.name, found=f"entry {holder['number']}",
                            expected="another model")  # fmt: skip
        judgement = _judged(holder, contender)
        entry = None
        if not dry_run:
            if first:
                champion.move(paths.model_path(first["model"]), first)
            entry = history.following(history.read(), _body(contender, judgement, holder))
            champion.move(contender.path, entry)
        return {"entry": entry, "judgement": judgement, "first": first, "champion": holder}


def rollback(*, dry_run: bool = False) -> dict:
    """Return to the champion before the last promotion; the history grows by an entry. Returns both entries."""
    champion.require_link_is_served()
    with champion.changing("rollback"):
        entries = history.read()
        before = history.before(entries)
        if before is None:
            raise UserError(
                "there is no champion to go back to", where=history.path(), found=f"{len(entries)} entries",
                expected="a promotion", next_command="make serve-status",
            )  # fmt: skip
        model = champion.require_file(before, "make rollback")
        kept_keys = ("model", "sha256_model", "papers", "weights_sha256")
        body = {"kind": history.ROLLBACK, "when": utc_stamp(), **{key: before[key] for key in kept_keys},
                "to": before["number"], "instead_of": entries[-1]["model"]}  # fmt: skip
        entry = history.following(entries, body)
        if not dry_run:
            champion.move(model, entry)
        return {"entry": entry, "from": entries[-1], "to": before}


# ---- the contender


def _contender(path: Path) -> Contender:
    """A model that may stand for promotion. Raises where its proof, its run or its chain, its bytes with it, say no."""
    made = manifest.read(path)
    if not made.get("parity") or not made.get("fingerprint"):
        raise RunError(
            "the file was never proved to be the model that was trained", where=path, found="no parity in its manifest",
            expected="what export-gguf proves", next_command="make export-gguf CHECKPOINT=latest ARGS=--force",
        )  # fmt: skip
    _require_ended(made)
    broken = [link for link in chain.walk(str(path)) if link.state == chain.BROKEN]
    if broken:
        raise IntegrityError(
            "the chain from the data to the model is broken", where=broken[0].name, found=broken[0].detail,
            expected="every link as its hash says",
            next_command=make_command("verify", MODEL=paths.container_path(path)),
        )  # fmt: skip
    return Contender(path, made, _papers(made["sha256"]))


def _require_ended(made: dict) -> None:
    if made.get("run") is None or not (paths.roots().runs / made["run"] / RUN_FILE).is_file():
        return
    status = RunFolder(paths.roots().runs / made["run"]).status()
    if status in ("running", "waiting", "queued"):
        raise UserError("its run has not ended", where=made["run"], found=status, expected="completed, or stopped",
                        next_command=f"make runs RUN={made['run']}")  # fmt: skip


def _papers(sha256: str) -> Papers:
    """The measurements of a file, by the hash of their paper; the newest of each, and the newest last."""
    found: Papers = {}
    for one in kept.of_model(sha256):
        key = files.sha256_json(one["identity"]["paper"])
        found.pop(key, None)
        found[key] = one
    return found


# ---- the champion of now


def _first(contender: Contender, measure: Measure) -> dict:
    """The entry of the first champion: what is served now, measured on the contender's papers."""
    from training.serving import control

    papers = _newest(contender.measured)
    if EXAM not in papers:
        raise _unmeasured(contender)
    record = control.status()["record"]
    if record is None:
        raise UserError(
            "there is no champion, and nothing is served that could be beaten", where=champion.link(), found="nothing",
            expected="the model that the new one is to be better than, in service",
            next_command="make serve-start MODEL=/app/models/trained/base/base-Q8_0.gguf",
        )  # fmt: skip
    served = paths.model_path(record["model"])
    sha256 = files.sha256_file(served)
    if sha256 == contender.manifest["sha256"]:
        raise UserError("the model is the one that is served now, so it has beaten nobody", where=contender.name,
                        expected="the model before it in service", next_command="make serve-status")  # fmt: skip
    held = _papers(sha256)
    if any(_key(one) not in held for one in papers.values()):
        measure(served, _asked_for(papers))
        held = _papers(sha256)
    if missing := [one for one in papers.values() if _key(one) not in held]:
        raise RunError(
            "what is served now could not be measured on the same questions", where=paths.container_path(served),
            found="no " + ", ".join(_told(one["identity"]["paper"]) for one in missing),
            expected="the exam and the guard set as they were when the model was measured",
            next_command=_measure_command(contender.name, papers),
        )  # fmt: skip
    body = {
        "kind": history.FIRST, "when": utc_stamp(), "model": str(paths.container_path(served)), "sha256_model": sha256,
        "weights_sha256": None, "papers": {role: one["identity"]["paper"] for role, one in papers.items()},
    }  # fmt: skip
    return history.following([], body)


def _newest(measured: Papers) -> Papers:
    """The measurements that were asked for last as the exam and, of another paper, as the guard set."""
    found: Papers = {}
    for role in (EXAM, GUARD):
        asked = [one for one in measured.values() if role in one["asked"] and one not in found.values()]
        if asked:
            found[role] = max(asked, key=lambda one: one["asked"][role]["when_ns"])
    return found


def _key(measurement: dict) -> str:
    return files.sha256_json(measurement["identity"]["paper"])


def _asked_for(papers: Papers) -> list[str]:
    """The arguments of `evaluate` that ask for the papers of measurements, which are given by role."""
    asked = {role: one["asked"].get(role) or next(iter(one["asked"].values())) for role, one in papers.items()}
    exam, guard = (asked[role]["reference"] if role in asked else None for role in (EXAM, GUARD))
    config = next((one["config"] for one in asked.values() if one["config"]), None)
    count = papers[EXAM]["identity"]["paper"]["num_questions"] if exam else None
    return options(("--config", config), ("--exam", exam), ("--questions", count), ("--guard", guard))


def _unmeasured(contender: Contender) -> RunError:
    return RunError(
        "the model was not measured", where=contender.name, found="no measurement of this very file",
        expected="its answers to an exam, through its server",
        next_command=make_command("evaluate", "--exam", "my-exam.jsonl", CHECKPOINT=contender.name),
    )  # fmt: skip


def _judged(holder: dict, contender: Contender) -> verdict.Judgement:
    """The judgement on the champion's papers, each in its role. Raises RunError unless it is a win."""
    if not contender.measured:
        raise _unmeasured(contender)
    wanted = {role: files.sha256_json(paper) for role, paper in holder["papers"].items()}
    held = _in_roles(_papers(holder["sha256_model"]), wanted)
    after = _in_roles(contender.measured, wanted)
    if after.keys() != wanted.keys():
        raise UserError(
            "the model was measured on other data than the champion was judged on", where=contender.name,
            found=", ".join(_told(one["identity"]["paper"]) for one in contender.measured.values()),
            expected=", ".join(_told(paper) for paper in holder["papers"].values()),
            next_command=_measure_command(contender.name, held),
        )  # fmt: skip
    if gone := [paper for role, paper in holder["papers"].items() if role not in held]:
        raise IntegrityError(
            "the champion's own measurement is gone", where=kept.folder(), found="nothing",
            expected=", ".join(_told(paper) for paper in gone),
            next_command=_measure_command(holder["model"], after),
        )  # fmt: skip
    judgement = verdict.judge(held, after, advice=lambda names: _measured_alike(names, holder, contender, held))
    if not judgement.is_win:
        raise RunError(
            f"not a win: {judgement.verdict}", where=contender.name, found="; ".join(judgement.reasons),
            expected=f"a gain whose whole interval lies above 0, and nothing forgotten; {holder['model']} stays",
            next_command="make serve-status",
        )  # fmt: skip
    return judgement


def _measured_alike(names: str, holder: dict, contender: Contender, held: Papers) -> str:
    """What brings a contender under the champion's conditions: its quant type, or both measured on this machine."""
    if "quant_type" in names.split(","):
        quant = held[EXAM]["identity"]["conditions"]["quant_type"]
        checkpoint = contender.manifest.get("run") or "latest"
        return make_command(
            "export-gguf", "--quant", quant, "--name", contender.manifest["name"], CHECKPOINT=checkpoint
        )
    return make_command("evaluate", *_asked_for(held), "--against", holder["model"], CHECKPOINT=contender.name)


def _in_roles(measured: Papers, wanted: dict[str, str]) -> Papers:
    """The measurements of papers that are wanted, `{role: hash}`, by that role."""
    return {role: measured[key] for role, key in wanted.items() if key in measured}


def _measure_command(model: str, measured: Papers) -> str:
    """The command that measures a model on the papers of measurements, which are given by role."""
    return make_command("evaluate", *_asked_for(measured), CHECKPOINT=model)


def _told(paper: dict) -> str:
    return f"{paper['name']} {files.short(paper['sha256'])} of {paper['num_questions']} questions"


def _body(contender: Contender, judgement: verdict.Judgement, holder: dict) -> dict:
    short = [
        {key: value for key, value in one.to_json().items() if key not in ("gained", "lost")}
        | {"gained": len(one.gained), "lost": len(one.lost)}
        for one in judgement.comparisons
    ]  # fmt: skip
    return {
        "kind": history.PROMOTE, "when": utc_stamp(), "model": contender.name,
        "sha256_model": contender.manifest["sha256"], "weights_sha256": contender.manifest["weights_sha256"],
        "papers": holder["papers"],
        "beaten": {"model": holder["model"], "sha256_model": holder["sha256_model"], "by": short},
    }  # fmt: skip
