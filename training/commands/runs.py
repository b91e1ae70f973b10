"""`runs`: which runs there are and who waits, and how one went."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from training.core import chart
from training.core.log import say
from training.core.report import Report, make_command
from training.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from training.runs.overview import Overview

SUMMARY = "list the runs and who waits, or show one with its loss curve"
EXAMPLE = "make runs RUN=latest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's id or folder, or `latest`")
    parser.add_argument("--with", dest="others", action="append", default=[], metavar="RUN", help="one more curve")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the curves into a file, PNG or SVG by its name")
    parser.add_argument("--follow", action="store_true", help="print what the run does until it stops")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.core.errors import UserError
    from training.core.figure import require_kind

    if args.plot:
        require_kind(args.plot)
    if args.run:
        return _one(args, report)
    if args.others or args.plot or args.follow:
        raise UserError("which run?", expected="a run's id or folder, or `latest`", next_command=EXAMPLE)
    return _list(report)


# ---- all of them


def _list(report: Report) -> dict:
    from training.core import queue
    from training.runs import overview
    from training.runs.folder import all_runs

    queued = queue.waiting()
    places = {one["run"]: f"{place} of {len(queued)}" for place, one in enumerate(queued, 1)}
    found = [overview.of_any(folder) for folder in all_runs()]
    rows = [one.to_json() | {"curve": chart.sparkline(one.course.losses(), 20)} for one in found]
    if rows:
        say(_HEADING)
    for one, row in zip(found, rows, strict=True):
        place = f" {places[one.run.id]}" if one.run.id in places else ""
        say(_row(one, f"{one.status}{place}", row["curve"]))
    known = {one.run.id for one in found}
    for place, one in enumerate(queued, 1):
        if one["run"] not in known:
            say(f"waiting {place} of {len(queued)}: {one['what']} (process {one['pid']})")
    report.add("runs", len(rows))
    for status in ("running", "waiting", "lost", "damaged"):
        if names := [one.run.id for one in found if one.status == status]:
            report.add(status, ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""))
    report.add("next", f"make runs RUN={rows[0]['id']}" if rows else "make recipe")
    return {"schema": 1, "runs": rows, "queue": queued}


_HEADING = (
    f"{'run':<40} {'status':<14} {'method':<8} {'steps':>11} {'loss':>7} {'best':>7} {'tokens/s':>8} {'age':>11}  curve"
)


def _row(one: Overview, status: str, curve: str) -> str:
    steps = f"{one.step}/{one.planned_steps}" if one.planned_steps else f"{one.step}"
    last = one.course.last
    loss = f"{last['train/loss_nats']:.4f}" if last else ""
    best = f"{one.best_loss_nats:.4f}" if one.best_loss_nats is not None else ""
    speed = f"{one.tokens_per_second:,.0f}" if one.tokens_per_second else ""
    method = one.record.get("method") or ""
    age = _age(one.age_seconds)
    return (
        f"{one.run.id:<40} {status:<14} {method:<8} {steps:>11} {loss:>7} {best:>7} {speed:>8} {age:>11}  {curve}"
    ).rstrip()


def _age(seconds: float) -> str:
    return format_seconds(seconds) if seconds < 86_400 else f"{seconds / 86_400:.0f} d"


# ---- one


def _one(args: argparse.Namespace, report: Report) -> dict:
    from training.runs import follow, narration, overview, picture
    from training.runs.folder import RunFolder

    folders = [RunFolder.open(name) for name in (args.run, *args.others)]
    if args.follow:
        follow.until_it_stops(folders[0], say)
    shown = [overview.of(folder) for folder in folders]
    for line in chart.curves(picture.series(shown)):
        say(line)
    for event in shown[0].told_events():
        say(f"step {event['step']}: {narration.in_words(event)}")
    if args.plot:
        picture.draw(shown, args.plot)
    _rows(shown[0], report)
    if shown[1:]:
        report.add("with", "\n".join(f"{one.run.id}: {_result(one)}" for one in shown[1:]))
    if args.plot:
        report.add("picture", args.plot)
    if shown[0].can_go_on:
        report.add("next", make_command("resume", RUN=shown[0].run.id))
    first = shown[0]
    return {
        "schema": 1, **first.to_json(), "curve": chart.sparkline(first.course.losses()),
        "course": [[one["step"], one["train/loss_nats"]] for one in first.course.steps],
        "validation_course": [[one["step"], one["eval/loss_nats"]] for one in first.course.validations],
        "events": first.told_events(), "summary": first.summary or None,
        "with": [one.to_json() for one in shown[1:]],
    }  # fmt: skip


def _result(one: Overview) -> str:
    """`completed, step 12 of 12, loss 2.1034, best 2.2011 at step 8`."""
    parts = [one.status, f"step {one.step}" + (f" of {one.planned_steps}" if one.planned_steps else "")]
    if one.course.last:
        parts.append(f"loss {one.course.last['train/loss_nats']:.4f}")
    if one.course.best:
        parts.append(f"best {one.best_loss_nats:.4f} at step {one.course.best['step']}")
    return ", ".join(parts)


def _rows(one: Overview, report: Report) -> None:
    from training.runs import narration
    from training.runs.folder import STACKS_FILE

    report.add("run", one.run.id)
    report.add("status", _result(one))
    if one.record.get("error"):
        report.add("error", one.record["error"])
    if one.summary.get("stop_reason"):
        report.add("stopped", f"by {narration.limit(one.summary['stop_reason'])}")
    if one.seconds_left is not None:
        report.add("left", format_seconds(one.seconds_left))
    if one.tokens_per_second:
        report.add("speed", f"{one.tokens_per_second:,.0f} tokens/s")
    if one.peak_bytes:
        estimate = one.record.get("estimate_bytes")
        told = f", estimate {format_bytes(estimate)} ({estimate / one.peak_bytes - 1:+.1%})" if estimate else ""
        report.add("memory", f"peak {format_bytes(one.peak_bytes)}{told}")
    steps = one.run.steps()
    report.add("checkpoints", ", ".join(str(step) for step in steps[-6:]) or "none")
    stacks = one.run.path / STACKS_FILE
    if stacks.is_file() and stacks.stat().st_size:  # it is opened empty
        report.add("stacks", stacks)
