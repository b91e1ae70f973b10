"""`tokenizer-add`: more tokens for the tokenizer of a base."""

import argparse

from training.core.report import Report

SUMMARY = "add tokens to a base's tokenizer, and write down what must be resized"
EXAMPLE = "make tokenizer-add BASE=smollm2-135m-instruct ARGS=\"--token '<|tool|>' --name smollm2-tools\""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from training.tokenizer.artifact import CALLED

    add = parser.add_argument
    add("base", metavar="BASE", help=CALLED)
    add("--token", action="append", default=[], metavar="TEXT", help="a control token, never made of plain text")
    add("--word", action="append", default=[], metavar="TEXT", help="a text that is one token wherever it stands")
    add("--name", help="the new tokenizer's name (default: the base's and -added)")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.core import store
    from training.core.errors import UserError
    from training.tokenizer import added, artifact, proof

    if not args.token and not args.word:
        raise UserError("no token to add", expected="--token TEXT or --word TEXT", next_command=EXAMPLE)
    base = added.Base.of(artifact.find(args.base))
    name = args.name or store.name_from(f"{base.tokenizer.name}-added")
    folder, reused = added.add(base, args.token, args.word, name=name, prove=proof.prove)
    tokenizer = artifact.load(folder)
    manifest = tokenizer.manifest
    report.add("tokenizer", store.reference(folder) + (" (unchanged, reused)" if reused else ""))
    report.add("sha256", tokenizer.hash[:12])
    for text, number in manifest["added"].items():
        report.add(f"id {number}", text)
    report.add("entries", f"{manifest['base_vocab_size']} before, {tokenizer.vocab_size} now")
    report.add("embedding", _rows(base.rows, manifest))
    report.add("folder", str(folder))
    keys = ("added", "base_vocab_size", "rows", "vocab_size", "hash")
    return {"tokenizer": store.reference(folder), "folder": str(folder), "reused": reused} | {
        key: manifest[key] for key in keys
    }


def _rows(model_rows: int | None, manifest: dict) -> str:
    rows = manifest["rows"]
    if model_rows is None:
        return f"{rows} rows are needed; the model is not known here"
    return f"{rows} rows, as it has" if rows == model_rows else f"from {model_rows} to {rows} rows"
