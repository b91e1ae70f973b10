"""`delta-export`: an adapter as one zip, to be handed on."""

import argparse

from training.core.report import Report

SUMMARY = "write an adapter as one zip without local paths, for who has the same base"
EXAMPLE = "make delta-export CHECKPOINT=latest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a step folder, a run (its best), or an adapter in PEFT's form")
    parser.add_argument("--base", metavar="NAME", help="the adapter's base, where it names none of bases.yaml")
    parser.add_argument("--name", help="the delta's name (default: the recipe's, else the folder's)")
    parser.add_argument("--force", action="store_true", help="replace a file of the same name with other bytes")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.core import files, paths
    from training.core.units import format_bytes, format_number
    from training.evaluation import kept
    from training.export import checkpoint as checkpoints
    from training.export import delta, export

    checkpoint = checkpoints.open_checkpoint(args.checkpoint, base=args.base)
    base, name = checkpoint.origin["base"], args.name or export.default_name(checkpoint)
    scores = kept.before_and_after((base or {}).get("weights_sha256", ""), checkpoint.origin["weights_sha256"])
    path, manifest = delta.export(checkpoint, name, force=args.force, scores=scores)
    report.add("delta", f"{path}, {format_bytes(path.stat().st_size)}")
    report.add("sha256", files.short(files.sha256_file(path)))
    report.add("adapter", f"rank {manifest['rank']}, alpha {manifest['alpha']:g}")
    report.add("base", f"{base['name']}, weights {files.short(base['weights_sha256'])}")
    report.add("scores", f"{len(scores)}, before and after" if scores else "none: make evaluate would measure both")
    report.add("parity", f"of {format_number(len(manifest['parity']), 'exported file')}")
    report.add("next", f"make delta-import DELTA={path}")
    return {"path": paths.for_people(path), "manifest": manifest}
