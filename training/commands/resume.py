"""`resume`: go on with a run that was stopped."""

import argparse

from training.commands.train import add_parallel, add_summary, parallel_of
from training.core.report import Report

SUMMARY = "go on with a run from its newest complete checkpoint"
EXAMPLE = "make resume RUN=latest"
CONTAINER = "train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's id or folder, or `latest`")
    add_parallel(parser)


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.runs.folder import RunFolder

    folder = RunFolder.open(args.run)
    from training.engine import launch

    was_completed = folder.status() == "completed"
    summary = launch.resume(folder, parallel_of(args))
    if not summary:
        report.add("followed", f"{folder.id}; its first process reports")
        return {"folder": str(folder.path)}
    add_summary(report, folder.id, summary)
    if was_completed:
        report.add("reused", "the run was completed already; nothing was trained")
    return summary | {"folder": str(folder.path)}
