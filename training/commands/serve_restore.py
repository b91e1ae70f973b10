"""`serve-restore`: the restore of a swap that was cut off, finished."""

import argparse

from training.commands.serve_status import add_loaded, add_service
from training.core.report import Report

SUMMARY = "finish the restore that a crash cut short"
EXAMPLE = "make serve-restore"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_service(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would be put back, and do nothing")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.serving import control

    result = control.restore(args.service, dry_run=args.dry_run)
    report.add("service", result["service"])
    report.add("restored", _outcome(result, args.dry_run))
    if result["loaded"]:
        add_loaded(report, result["loaded"])
    else:
        report.add("serves now", "nothing: the service is stopped" if not result["running"] else "not healthy")
    return {"schema": 1, "dry_run": args.dry_run, **result}


def _outcome(result: dict, dry_run: bool) -> str:
    if dry_run:
        planned = result["planned"]
        return (
            "would be nothing"
            if not planned
            else f"would be {planned['record']['model']}"
            if planned["running"]
            else "would be a stop"
        )
    if result["restore"] is None:
        return "nothing to do: no swap is unfinished"
    return "yes, restarted" if result["restore"]["restarted"] else f"yes, {result['restore']['state']}"
