"""`verify`: the chain of hashes from a GGUF, a checkpoint, a base or a dataset back to the data."""

import argparse

from training.core.log import say
from training.core.report import Report

SUMMARY = "walk the hashes of a model back to its data, and name the first broken link"
EXAMPLE = "make verify MODEL=/app/models/trained/demo/demo-Q8_0.gguf"

_NEXT = {
    **dict.fromkeys(("manifest", "GGUF"), "make export-gguf CHECKPOINT=latest ARGS=--force"),
    "merged weights": "make export-gguf CHECKPOINT=latest ARGS='--format merged --force'",
}
"""What makes a broken link's file anew; a run's own files cannot be made again, only the run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a GGUF, a run, a checkpoint, a base, a data set or a tokenizer")
    parser.add_argument("--signers", metavar="FILE", help="require a signature of one of these allowed signers (GGUF)")


def _signer(model: str, signers: str) -> str:
    from pathlib import Path

    from training.core import paths
    from training.export import manifest, signature

    return signature.check(manifest.path_of(paths.model_path(model)), Path(signers).expanduser())


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.core.errors import IntegrityError
    from training.export import chain

    if args.signers:
        report.add("signed by", _signer(args.model, args.signers))
    links = []
    for link in chain.walk(args.model):
        links.append(link)
        report.add(link.name, f"{link.state:<7} {link.detail}")
        say(f"{link.name}: {link.state}")
    broken, absent = (
        next((link for link in links if link.state == state), None) for state in (chain.BROKEN, chain.ABSENT)
    )
    if broken:
        report.fail(f"FAIL: the first broken link is {broken.name}", IntegrityError.exit_code)
        report.add("next", broken.next_command or _NEXT.get(broken.name, "make runs"))
    elif absent:
        report.fail(f"INCOMPLETE: nothing is broken, but {absent.name} is not there to be checked", 0)
    return {
        "links": [{"name": link.name, "state": link.state, "detail": link.detail} for link in links],
        "first_broken": broken and broken.name, "first_absent": absent and absent.name,
    }  # fmt: skip
