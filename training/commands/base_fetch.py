"""`base-fetch`: a pinned base model comes to this machine. The one command that may reach the network for one."""

import argparse
from pathlib import Path

from training.core import files
from training.core.report import Report, make_command

SUMMARY = "fetch a pinned base model, every file's hash checked"
EXAMPLE = "make base-fetch BASE=smollm2-135m-instruct"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="BASE", help="a name of recipes/bases.yaml")
    parser.add_argument("--from", dest="given", metavar="DIR", help="a folder with the source's files, for no network")
    parser.add_argument("--pin", action="store_true", help="write revision and hashes of what is found into bases.yaml")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.engine import base_fetch

    fetched = base_fetch.fetch(args.base, given=Path(args.given) if args.given else None, pin=args.pin)
    base, manifest = fetched.base, fetched.manifest
    report.add("base", f"{base.name}, {base.licence}" + (" (was there already)" if fetched.reused else ""))
    report.add("source", f"{base.source} at {base.revision}")
    for name, digest in list(base.files.items())[:4]:
        report.add(Path(name).name, f"sha256 {files.short(digest)}, " + ("pinned now" if args.pin else "as pinned"))
    report.add("weights", f"sha256 {files.short(manifest['weights_sha256'])}")
    report.add("folder", base.folder)
    report.add("next", _next(base.name, report))
    return {"schema": 1, "reused": fetched.reused, "folder": str(base.folder), "manifest": manifest}


def _next(name: str, report: Report) -> str:
    """What a base is fetched for: the recipes that train it, told, and the first one's preflight."""
    from training.recipe import catalogue

    recipes = [entry.shown for entry in catalogue.on_base(name)]
    if not recipes:
        report.add("recipes", f"none names it: copy one, and put model.base: {name} into it")
        return make_command("recipe", "copy", "smollm2-135m", "mine.yaml")
    report.add("recipes", "\n".join(recipes))
    return make_command("check", CONFIG=recipes[0])
