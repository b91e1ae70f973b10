"""`rollback`: the champion before the last promotion comes back."""

import argparse

from training.core.report import Report, make_command

SUMMARY = "let the champion before the last promotion be the champion again"
EXAMPLE = "make rollback"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and change nothing")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.core import paths
    from training.rounds import champion, promotion

    done = promotion.rollback(dry_run=args.dry_run)
    report.add("was champion", done["from"]["model"])
    report.add("champion", done["to"]["model"] + (" (dry run: nothing was changed)" if args.dry_run else ""))
    report.add("next", make_command("serve-start", MODEL=paths.CONTAINER_MODELS / champion.link().name))
    return {"schema": 1, **done, "dry_run": args.dry_run}
