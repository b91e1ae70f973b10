"""`promote`: a model becomes the champion, if it has beaten the one that is."""

import argparse

from training.commands.evaluate import add_judgement
from training.core.report import Report, make_command

SUMMARY = "put a model into service for good, after a measured win over the champion"
EXAMPLE = "make promote MODEL=/app/models/trained/mine/mine-Q8_0.gguf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="an exported GGUF under $DATA_ROOT/models, or its /app/models name"
    )
    parser.add_argument("--dry-run", action="store_true", help="judge, say what would be done, and change nothing")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.core import paths
    from training.rounds import champion, history, promotion
    from training.rounds.steps import run_step

    def measure(model, asked: list[str]) -> None:
        run_step("Measure what is served now", ["evaluate", str(model), *asked])

    done = promotion.promote(args.model, measure, dry_run=args.dry_run)
    add_judgement(report, done["judgement"])
    report.add("was champion", done["champion"]["model"])
    if args.dry_run:
        report.add("dry run", f"{args.model} would become the champion; nothing was changed")
    else:
        entry = done["entry"]
        report.add("champion", f"{entry['model']}, entry {entry['number']} of {paths.for_people(history.path())}")
        report.add("next", make_command("serve-start", MODEL=paths.CONTAINER_MODELS / champion.link().name))
    return {
        "schema": 1, "entry": done["entry"], "judgement": done["judgement"].to_json(), "first": done["first"],
        "dry_run": args.dry_run,
    }  # fmt: skip
