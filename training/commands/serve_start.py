"""`serve-start`: a model put into service, where it stays."""

import argparse

from training.commands.serve_status import add_loaded, add_place
from training.core.report import Report
from training.core.units import format_bytes
from training.serving.settings import DEFAULT_CTX_SIZE

SUMMARY = "put a model into service"
EXAMPLE = "make serve-start MODEL=/app/models/trained/demo/demo-Q8_0.gguf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a GGUF under $DATA_ROOT/models, or its /app/models/... name")
    add_place(parser)
    parser.add_argument(
        "--ctx-size", type=int, metavar="TOKENS", help="tokens of prompt and answer together; each takes memory "
        f"(default: the model's own, at most {DEFAULT_CTX_SIZE}; in a container LLAMA_..._CTX_SIZE)"
    )  # fmt: skip
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
    report.add("at", f"http://127.0.0.1:{record['port']}")
    report.add("context", _context(record, result))
    if result["reused"]:
        report.add("reused", "it was in service already; nothing was restarted")
    if args.dry_run:
        report.add("dry run", "nothing was stopped, started or written")
    elif result["loaded"]:
        add_loaded(report, result["loaded"])
    report.add("next", service_command("serve-status", record["service"]))
    return {"schema": 1, "dry_run": args.dry_run, **result}


def _context(record: dict, model: dict) -> str:
    """The context that is served beside the model's own, what it takes, and how to have another."""
    tokens = int(record["arguments"].get("ctx_size") or record["arguments"].get("ctx-size") or 0)
    taken = format_bytes(tokens * model["cache_bytes_per_token"])
    return (
        f"{tokens} tokens of the model's {model['context_length']}, {taken} of memory; --ctx-size takes another number"
    )
