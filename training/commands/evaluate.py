"""`evaluate`: what checkpoints score on a split."""

import argparse

from training.core.log import say
from training.core.report import Report

SUMMARY = "bits per byte of one or more checkpoints on a split"
EXAMPLE = "make evaluate CHECKPOINT=latest ARGS='--split test'"
CONTAINER = "train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="a step folder, or a run (its best one)")
    parser.add_argument(
        "--split", default="test", choices=("validation", "test", "test_postcutoff"), help="default: test"
    )


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.runs.folder import resolve_checkpoint

    folders = [resolve_checkpoint(reference) for reference in args.checkpoints]
    from training.evaluation import loss

    records = [loss.evaluate(folder, args.split) for folder in folders]
    for folder, record in zip(folders, records, strict=True):
        score = record["score"]
        text = f"{score['bits_per_byte']:.4f} bits/byte, {score['loss_nats']:.4f} nats a token"
        report.add(folder.name, text + (" (measured before)" if record["reused"] else ""))
        say(f"{folder.name}: {text}")
    score = records[-1]["score"]
    report.add("unigram", f"{records[-1]['unigram']['bits_per_byte']:.4f} bits/byte, the train split's token shares")
    report.add("measured on", f"{args.split}: {score['num_tokens']:,} tokens, {score['num_bytes']:,} bytes")
    return {"schema": 1, "split": args.split, "records": records}
