"""`recipe`: list, show, copy, check and explain recipes, and the table of all keys."""

import argparse
import json
from pathlib import Path

from training.core.log import say
from training.core.report import Report, make_command

SUMMARY = "list, show, copy, check or explain recipes"
EXAMPLE = 'make recipe ARGS="explain recipes/demo/pretrain-stdlib.yaml optimizer.lr=1e-3"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    actions.add_parser("ls", help="the recipes and the base models")
    show = actions.add_parser("show", help="a recipe's text")
    show.add_argument("name", metavar="NAME")
    copy = actions.add_parser("copy", help="copy a recipe to start from")
    copy.add_argument("name", metavar="NAME")
    copy.add_argument("target", metavar="TO", type=Path)
    for action, help_text in (("check", "is it valid"), ("explain", "each value, and where it came from")):
        one = actions.add_parser(action, help=help_text)
        one.add_argument("file", metavar="FILE", type=Path)
        one.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    actions.add_parser("schema", help="the table of all keys")
    for one in actions.choices.values():  # --json may stand behind the action too
        one.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def run(args: argparse.Namespace, report: Report) -> dict:
    actions = {"show": _show, "copy": _copy, "check": _check, "explain": _explain, "schema": _schema}
    return {"schema": 1} | actions.get(args.action, _list)(args, report)


def _list(args: argparse.Namespace, report: Report) -> dict:
    from training.recipe import bases, catalogue

    entries, known = list(catalogue.entries()), bases.load()
    for entry in entries:
        say(f"{entry.shown:<40} {entry.summary}")
    for base in known.values():
        state = f"pinned at {base.revision}" if base.pinned else "unpinned: for planning only"
        say(f"base {base.name:<35} {base.source}, {base.licence}, {state}")
    report.add("recipes", len(entries))
    report.add("bases", f"{len(known)}, {sum(base.pinned for base in known.values())} pinned")
    report.add("next", f"make memfit CONFIG={entries[0].shown}")
    return {
        "recipes": [{"name": entry.name, "path": entry.shown, "summary": entry.summary} for entry in entries],
        "bases": [{"name": base.name, "source": base.source, "pinned": base.pinned} for base in known.values()],
    }


def _show(args: argparse.Namespace, report: Report) -> dict:
    from training.recipe import catalogue

    entry = catalogue.find(args.name)
    text = entry.path.read_text(errors="replace")
    say(text)
    report.add("recipe", entry.shown)
    report.add("next", f"make memfit CONFIG={entry.shown}")
    return {"path": entry.shown, "text": text}


def _copy(args: argparse.Namespace, report: Report) -> dict:
    from training.recipe import catalogue
    from training.recipe.load import load

    target = catalogue.copy(args.name, args.target)
    stop = load(target).values["stop"]
    limits = ", ".join(f"{key} {value:g}" for key, value in stop.items() if value is not None)
    report.add("copied", target)
    report.add("stops", f"at the first of {limits}")
    report.add("next", make_command("check", CONFIG=target))
    return {"path": str(target)}


def _check(args: argparse.Namespace, report: Report) -> dict:
    from training.core.files import short
    from training.recipe.load import load

    resolved = load(args.file, args.overrides)
    report.add("recipe", f"{resolved.recipe.name}: valid, sha256 {short(resolved.sha256)}")
    report.add("next", f"make check CONFIG={args.file}")
    return {"name": resolved.recipe.name, "sha256": resolved.sha256, "values": resolved.values}


def _explain(args: argparse.Namespace, report: Report) -> dict:
    from training.core.files import short
    from training.recipe import explain
    from training.recipe.load import load

    resolved = load(args.file, args.overrides)
    rows = list(explain.rows(resolved))
    for row in rows:
        value = json.dumps(row["value"], ensure_ascii=False)
        say(f"{row['key']} = {value}  [{row['origin']}]\n    {row['description']}")
    report.add("recipe", f"{resolved.recipe.name}, sha256 {short(resolved.sha256)}")
    for kind, name in (("file", "from files"), ("command line", "command line"), ("default", "defaults")):
        report.add(name, sum(origin.kind == kind for origin in resolved.origins.values()))
    return {"name": resolved.recipe.name, "sha256": resolved.sha256, "keys": rows}


def _schema(args: argparse.Namespace, report: Report) -> dict:
    from training.recipe import explain
    from training.recipe.schema import leaves, recipe_schema

    say(explain.table())
    report.add("keys", sum(1 for _ in leaves(recipe_schema())))
    return {"keys": recipe_schema()}
