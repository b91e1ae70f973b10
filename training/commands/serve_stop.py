"""`serve-stop`: the service ended."""

import argparse

from training.core.report import Report

SUMMARY = "stop the service"
EXAMPLE = "make serve-stop"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--service", default="llama-local", metavar="NAME", help="default: llama-local")
    parser.add_argument("--dry-run", action="store_true", help="say what would be stopped, and do nothing")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.serving import control

    before = control.stop(args.service, dry_run=args.dry_run)
    report.add("service", args.service)
    report.add("previous", before["record"]["model"] if before["running"] else "stopped already")
    report.add("now", "as before: this was a dry run" if args.dry_run else "stopped")
    return {"schema": 1, "dry_run": args.dry_run, "previous": before}
