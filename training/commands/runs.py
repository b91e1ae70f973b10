"""`runs`: which runs there are, and how one went."""

import argparse

from training.core.chart import sparkline
from training.core.log import say
from training.core.report import Report

SUMMARY = "list the runs, or show one with its loss curve"
EXAMPLE = "make runs RUN=latest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's id or folder, or `latest`")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.runs.folder import RunFolder, all_runs

    if args.run:
        document = _describe(RunFolder.open(args.run))
        for name in ("status", "steps", "validations", "best_checkpoint", "error"):
            report.add(name, document[name])
        report.add("loss", document["curve"])
        if document["status"] in ("paused", "failed", "lost"):
            report.add("next", f"make resume RUN={document['id']}")
        return document
    rows = [_describe_any(folder) for folder in all_runs()]
    for row in rows:
        say(f"{row['id']:<44} {row['status']:<10} {row['steps']:>7}  {row['curve']}")
    report.add("runs", len(rows))
    report.add("next", f"make runs RUN={rows[0]['id']}" if rows else "make train CONFIG=...")
    return {"schema": 1, "runs": rows}


def _describe_any(folder) -> dict:
    """A run whose record is damaged is listed as such, and hides no other one."""
    from training.core.errors import IntegrityError

    try:
        return _describe(folder)
    except IntegrityError as error:
        return {"id": folder.id, "status": "damaged", "error": str(error), "steps": 0, "curve": ""}


def _describe(folder) -> dict:
    from training.runs.events import read_events

    record = folder.record()
    # After a kill some steps are done, and told, twice.
    by_step = {event["step"]: event["train/loss_nats"] for event in read_events(folder.path, "step")}
    losses = [by_step[step] for step in sorted(by_step)]
    best = folder.checkpoints / "best.json"
    return {
        "id": folder.id,
        "name": record["name"],
        "method": record["method"],
        "status": folder.status(),
        "error": record["error"] if record.get("error") else None,
        "steps": len(losses),
        "last_loss_nats": losses[-1] if losses else None,
        "validations": sum(1 for _ in read_events(folder.path, "validation")),
        "best_checkpoint": best.read_text().split('"')[3] if best.exists() else None,
        "curve": sparkline(losses),
    }
