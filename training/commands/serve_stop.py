"""`serve-stop`: the service ended."""

import argparse

from training.commands.serve_status import add_service
from training.core.report import Report

SUMMARY = "stop the service"
EXAMPLE = "make serve-stop"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_service(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would be stopped, and do nothing")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.serving import control

    before = control.stop(args.service, dry_run=args.dry_run)
    report.add("service", before["service"])
    report.add("previous", _previous(before))
    report.add("now", "as before: this was a dry run" if args.dry_run else "stopped")
    return {"schema": 1, "dry_run": args.dry_run, "previous": before}


def _previous(before: dict) -> str:
    if not before["running"]:
        return "stopped already"
    return before["record"]["model"] if before["record"] else "unknown: see the warning above"
