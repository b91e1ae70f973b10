"""`tokenizer-train`: a byte-level BPE from a dataset's train split."""

import argparse
import time

from training.core.report import Report, make_command
from training.core.units import format_bytes, format_seconds

SUMMARY = "train a byte-level BPE tokenizer on a dataset's train split"
EXAMPLE = "make tokenizer-train DATASET=stdlib"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from training.tokenizer.chat_templates import TEMPLATES
    from training.tokenizer.pretokenizers import CONFIGURATIONS
    from training.tokenizer.train import Settings

    known, templates, add = ", ".join(CONFIGURATIONS), ", ".join(TEMPLATES), parser.add_argument
    add("--dataset", required=True, metavar="REF", help="name@hash, a name (its newest) or a folder")
    add("--vocab-size", type=int, default=Settings.vocab_size, help="entries, specials too (default %(default)s)")
    add("--pre-tokenizer", default=Settings.pre_tokenizer, metavar="NAME", help=f"one of {known} (default %(default)s)")
    add(
        "--chat-template",
        default=Settings.chat_template,
        metavar="NAME",
        help=f"one of {templates} (default %(default)s)",
    )
    add("--reserve", type=int, default=0, metavar="N", help="special tokens kept free for later use (default 0)")
    add("--name", help="the tokenizer's name (default: the dataset's)")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.core import process, store
    from training.data import corpus, dataset
    from training.tokenizer import artifact, proof, train

    started = time.monotonic()
    settings = train.Settings(
        vocab_size=args.vocab_size, pre_tokenizer=args.pre_tokenizer, chat_template=args.chat_template,
        num_reserved=args.reserve,
    )  # fmt: skip
    data = dataset.load(dataset.resolve(args.dataset))
    growth = process.Growth()
    folder, reused = train.train(corpus.of(data), settings, name=args.name or data.name, prove=proof.prove)
    tokenizer = artifact.load(folder)
    document = {
        "tokenizer": store.reference(folder), "hash": tokenizer.hash, "folder": str(folder), "reused": reused,
        "vocab_size": tokenizer.vocab_size, "pre_tokenizer": tokenizer.pre_tokenizer,
        "multi_digit_tokens": tokenizer.manifest["multi_digit_tokens"],
        "bytes_per_token": tokenizer.manifest["bytes_per_token"], "proved": tokenizer.manifest.get("proved"),
        "trained_on": tokenizer.manifest["trained_on"],
        "seconds": round(time.monotonic() - started, 3), "peak_memory_bytes": growth.peak_bytes(),
        "predicted_memory_bytes": tokenizer.manifest["predicted_memory_bytes"],
    }  # fmt: skip
    _report(report, document, data.reference)
    return document


def _report(report: Report, document: dict, dataset_reference: str) -> None:
    report.add("tokenizer", document["tokenizer"] + (" (unchanged, reused)" if document["reused"] else ""))
    report.add("sha256", document["hash"][:12])
    report.add("vocabulary", f"{document['vocab_size']} entries, {document['multi_digit_tokens']} of several digits")
    report.add("pre-tokenizer", f"{document['pre_tokenizer']} (llama.cpp's name)")
    report.add("trained on", f"{dataset_reference}, train split, {format_bytes(document['trained_on']['bytes'])}")
    figures = [f"{value:.3f} on {split}" for split, value in document["bytes_per_token"].items()]
    report.add("bytes per token", ", ".join(figures))
    if proved := document["proved"]:
        strings = proved["nasty_strings"] + proved["lines"]
        report.add("llama.cpp", f"gives the same ids for all of {strings} strings, {proved['lines']} of them lines")
    report.add("took", format_seconds(document["seconds"]))
    if not document["reused"]:
        peak, predicted = (format_bytes(document[f"{name}_memory_bytes"]) for name in ("peak", "predicted"))
        report.add("memory", f"peak {peak}, predicted at most {predicted}")
    report.add("folder", document["folder"])
    overrides = (
        f"data.dataset={dataset_reference}",
        f"tokenizer.path={document['tokenizer']}",
        f"model.arch.vocab_size={document['vocab_size']}",
    )
    report.add("next", make_command("check", *overrides, CONFIG="recipes/demo/pretrain-stdlib.yaml"))
