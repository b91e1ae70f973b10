"""`delta-import`: an adapter that was handed on, checked and unpacked."""

import argparse
from pathlib import Path

from training.core.report import Report

SUMMARY = "check and unpack an adapter that was handed on; its base must be here"
EXAMPLE = "make delta-import DELTA=mine.delta.zip"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("delta", type=Path, help="the zip that delta-export has written")
    parser.add_argument("--name", help="the name to keep it under (default: its own)")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.core import paths
    from training.core.errors import UserError
    from training.core.files import short
    from training.export import delta

    if not args.delta.is_file():
        raise UserError("no such delta", where=args.delta, found="nothing", expected="a zip of delta-export")
    folder, manifest = delta.load(args.delta, args.name)
    report.add("delta", folder)
    report.add("base", f"{manifest['base']['name']}, weights {short(manifest['base']['weights_sha256'])}")
    report.add("weights", short(manifest["files"]["adapter_model.safetensors"]["sha256"]))
    report.add("next", f"make export-gguf CHECKPOINT={folder}")
    return {"path": paths.for_people(folder), "manifest": manifest}
