"""`serve-eval`: a model swapped into its service, tried, and the previous one put back."""

import argparse
from pathlib import Path

from training.commands.serve_status import add_place
from training.core.report import Report

SUMMARY = "swap a model into the running service, check and smoke it, put the old one back"
EXAMPLE = "make serve-eval MODEL=/app/models/trained/demo/demo-Q8_0.gguf ARGS='--keep-serving'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a GGUF under $DATA_ROOT/models, or its /app/models/... name")
    parser.add_argument("--keep-serving", action="store_true", help="leave the new model in service where it passes")
    parser.add_argument("--smoke", type=Path, metavar="FILE", help="smoke prompts (default: recipes/smoke.yaml)")
    parser.add_argument("--compare", metavar="OTHER_MODEL", help="ask another model the same, in one report")
    parser.add_argument("--any-quant", action="store_true", help="compare at different quant types all the same")
    add_place(parser)
    parser.add_argument(
        "--budget-seconds", type=float, default=180.0, metavar="S", help="how long to wait for health (default: 180)"
    )
    parser.add_argument("--dry-run", action="store_true", help="check and say what would be done, and do nothing")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.serving import evaluate
    from training.serving import report as pages

    given = {"service": args.service, "smoke": args.smoke}
    request = evaluate.Request(
        args.model, port=args.port, budget_seconds=args.budget_seconds, keep_serving=args.keep_serving,
        dry_run=args.dry_run,
        compare=args.compare, any_quant=args.any_quant, **{name: value for name, value in given.items() if value},
    )  # fmt: skip
    evaluation = evaluate.evaluate(request)
    add_evaluation(report, evaluation.document, pages.rows(evaluation.document, evaluation.path))
    if evaluation.error is not None:
        report.fail(evaluation.document["verdict"], evaluation.document["exit_code"])
        report.add("error", str(evaluation.error) or evaluation.document["error"]["what"])
    return evaluation.document


def add_evaluation(report: Report, document: dict, rows: dict[str, str]) -> None:
    """The rows that say what an evaluation found, and the next command."""
    from training.serving.settings import service_command

    for name, text in rows.items():
        report.add(name, text)
    if document["dry_run"] and document["server"]:
        after = "leave it where it passes" if document["keep_serving"] else "put the previous state back"
        report.add("would", f"serve it on port {document['server']['port']}, try it, and {after}")
        report.add("dry run", "nothing was stopped, started or written")
    if document["verdict"] == "PASS" and document["keep_serving"] and not document["dry_run"]:
        report.add("next", service_command("serve-status", document["service"]))
    elif document["verdict"] == "PASS":
        options = ["--keep-serving"] if document["keep_serving"] or not document["dry_run"] else []
        model = document["model"]["container_path"]
        report.add("next", service_command("serve-eval", document["service"], *options, MODEL=model))
