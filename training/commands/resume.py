"""`resume`: go on with a run that was stopped."""

import argparse

from training.commands.train import add_parallel, parallel_of, told
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
    return told(report, folder, summary, "the run was completed already" if was_completed else None)
