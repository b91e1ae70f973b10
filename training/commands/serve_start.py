"""`serve-start`: a model put into service, where it stays."""

import argparse

from training.commands.serve_status import add_loaded, add_place
from training.core.report import Report

SUMMARY = "put a model into service"
EXAMPLE = "make serve-start MODEL=/app/models/trained/demo/demo-Q8_0.gguf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a GGUF under $DATA_ROOT/models, or its /app/models/... name")
    add_place(parser)
    parser.add_argument("--ctx-size", type=int, metavar="TOKENS", help="default: the model's own, at most 4096")
    parser.add_argument("--dry-run", action="store_true", help="check and say what would be done, and do nothing")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.core import files
    from training.serving import control
    from training.serving.settings import service_command

    result = control.start(
        args.model, service=args.service, port=args.port, ctx_size=args.ctx_size, dry_run=args.dry_run
    )
    record, previous = result["record"], result["previous"]
    report.add("service", f"{record['service']}, {record['runtime']}")
    report.add("previous", previous["record"]["model"] if previous["running"] else "stopped")
    report.add("model", f"{record['model']} ({files.short(record['sha256'])})")
    report.add("at", f"http://127.0.0.1:{record['port']}, context {_context(record)} tokens")
    if result["reused"]:
        report.add("reused", "it was in service already; nothing was restarted")
    if args.dry_run:
        report.add("dry run", "nothing was stopped, started or written")
    elif result["loaded"]:
        add_loaded(report, result["loaded"])
    report.add("next", service_command("serve-status", record["service"]))
    return {"schema": 1, "dry_run": args.dry_run, **result}


def _context(record: dict) -> object:
    return record["arguments"].get("ctx_size") or record["arguments"].get("ctx-size")
