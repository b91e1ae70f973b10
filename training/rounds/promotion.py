"""Promotion and rollback: a model becomes the champion only by a measured win on the champion's own papers.

Refused: a run that is still running, a model that was not measured, a tie, a loss, a collapse, something forgotten, a
parity that failed, a broken chain, other papers than the champion was judged on. The first champion is what is served
now, measured first; nobody is promoted against nothing. A champion's papers are one exam and, where there was one, one
guard set: those that the first contender was measured on last.
"""

from collections.abc import Callable, Iterable
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
Measure = Callable[[Path, list[str]], None]
"""Measures a GGUF, with the arguments of `evaluate` that say on what."""


@dataclass(frozen=True)
class Contender:
    """A GGUF file with its manifest and its measurements by role."""

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
        model = champion.require_file(before, f"{champion.PUT_BACK}, then make rollback")
        kept_keys = ("model", "sha256_model", "papers", "weights_sha256")
        body = {"kind": history.ROLLBACK, "when": utc_stamp(), **{key: before[key] for key in kept_keys},
                "to": before["number"], "instead_of": entries[-1]["model"]}  # fmt: skip
        entry = history.following(entries, body)
        if not dry_run:
            champion.move(model, entry)
        return {"entry": entry, "from": entries[-1], "to": before}


# ---- the contender


def _contender(path: Path) -> Contender:
    """A model that may stand for promotion. Raises where its bytes, its proof, its run or its chain say no."""
    made = manifest.verify(path)
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

    _require_measured(contender)
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
    papers = _newest(contender.measured)
    if papers.keys() - _papers(sha256).keys():
        measure(served, _asked_for(papers.values()))
    held = _papers(sha256)
    if missing := [paper for key, paper in papers.items() if key not in held]:
        raise RunError(
            "what is served now could not be measured on the same questions", where=paths.container_path(served),
            found="no " + ", ".join(_told(one["identity"]["paper"]) for one in missing),
            expected="the exam and the guard set as they were when the model was measured",
            next_command=_measure_command(contender.name, papers.values()),
        )  # fmt: skip
    body = {
        "kind": history.FIRST, "when": utc_stamp(), "model": str(paths.container_path(served)), "sha256_model": sha256,
        "weights_sha256": None, "papers": [one["identity"]["paper"] for one in papers.values()],
    }  # fmt: skip
    return history.following([], body)


def _newest(measured: Papers) -> Papers:
    """The newest exam and the newest guard set of measurements, which are in the order of their making."""
    by_role = {one["role"]: key for key, one in measured.items()}
    return {key: measured[key] for role, key in by_role.items() if role in (EXAM, GUARD)}


def _asked_for(papers: Iterable[dict]) -> list[str]:
    """The arguments of `evaluate` that ask for the papers of measurements."""
    asked = {one["role"]: one for one in papers}
    exam, guard = (asked[role]["reference"] if role in asked else None for role in (EXAM, GUARD))
    config = next((one["config"] for one in asked.values() if one.get("config")), None)
    count = asked[EXAM]["identity"]["paper"]["num_questions"] if exam else None
    return options(("--config", config), ("--exam", exam), ("--questions", count), ("--guard", guard))


def _require_measured(contender: Contender) -> None:
    if not any(one["role"] == EXAM for one in contender.measured.values()):
        raise RunError(
            "the model was not measured", where=contender.name, found="no measurement of this very file",
            expected="its answers to an exam, through its server",
            next_command=make_command("evaluate", "--exam", "my-exam.jsonl", CHECKPOINT=contender.name),
        )  # fmt: skip


def _judged(holder: dict, contender: Contender) -> verdict.Judgement:
    """The judgement on the champion's papers. Raises RunError unless it is a win."""
    _require_measured(contender)
    wanted = {files.sha256_json(paper): paper for paper in holder["papers"]}
    held = _papers(holder["sha256_model"])
    missing = [paper for key, paper in wanted.items() if key not in contender.measured]
    if missing or not wanted:
        raise UserError(
            "the model was measured on other data than the champion was judged on", where=contender.name,
            found=", ".join(_told(one["identity"]["paper"]) for one in contender.measured.values()),
            expected=", ".join(_told(paper) for paper in wanted.values()) or "a champion that was measured",
            next_command=_measure_command(contender.name, _of_papers(held, wanted)),
        )  # fmt: skip
    if gone := [paper for key, paper in wanted.items() if key not in held]:
        raise IntegrityError(
            "the champion's own measurement is gone", where=kept.folder(), found="nothing",
            expected=", ".join(_told(paper) for paper in gone),
            next_command=_measure_command(holder["model"], _of_papers(contender.measured, wanted)),
        )  # fmt: skip
    by_role = {contender.measured[key]["role"]: key for key in wanted}
    judgement = verdict.judge(
        {role: held[key] for role, key in by_role.items()},
        {role: contender.measured[key] for role, key in by_role.items()},
        advice=lambda names: _measured_alike(names, holder, contender, held, wanted),
    )
    if not judgement.is_win:
        raise RunError(
            f"not a win: {judgement.verdict}", where=contender.name, found="; ".join(judgement.reasons),
            expected=f"a gain whose whole interval lies above 0, and nothing forgotten; {holder['model']} stays",
            next_command="make serve-status",
        )  # fmt: skip
    return judgement


def _measured_alike(names: str, holder: dict, contender: Contender, held: Papers, wanted: Iterable[str]) -> str:
    """What brings a contender under the champion's conditions: its quant type, or both measured on this machine."""
    papers = _of_papers(held, wanted)
    if "quant_type" in names.split(","):
        quant = papers[0]["identity"]["conditions"]["quant_type"]
        checkpoint = contender.manifest.get("run") or "latest"
        return make_command(
            "export-gguf", "--quant", quant, "--name", contender.manifest["name"], CHECKPOINT=checkpoint
        )
    return make_command("evaluate", *_asked_for(papers), "--against", holder["model"], CHECKPOINT=contender.name)


def _of_papers(measured: Papers, wanted: Iterable[str]) -> list[dict]:
    return [measured[key] for key in wanted if key in measured]


def _measure_command(model: str, measured: Iterable[dict]) -> str:
    """The command that measures a model on the papers of measurements."""
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
