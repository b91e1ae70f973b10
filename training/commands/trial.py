"""`trial`: bare candidates on one exam."""

import argparse

from training.core.report import Report, make_command

SUMMARY = "score several models on one exam under one precision; trains nothing"
EXAMPLE = "make trial EXAM=my-exam.jsonl ARGS='smollm2-135m-instruct my-folder'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="a base's name, a Hugging Face folder, a run, or GGUF files alone")
    add("--exam", required=True, metavar="EXAM", help="a folder or JSONL of questions, or name@hash:split")
    add("--questions", type=int, metavar="N", help="draw so many of the exam (default: 150, on a GPU 500)")
    add("--precision", default="fp32", choices=("fp32", "bf16", "fp16", "nf4"), help="of all (default: fp32)")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.evaluation import guard
    from training.rounds import trial

    guard.open_exam(args.exam)
    found = trial.run(args.models, args.exam, args.questions, args.precision)
    for place, one in enumerate(found, 1):
        if one.score is None:
            report.add(one.reference, f"no score: {one.why}")
            continue
        share = f"{100 * one.score['agreement']:.1f} %"
        report.add(
            one.reference, f"{place}. agreement {share}, {one.score['num_right']} of {one.score['num_questions']}"
        )
    report.add("next", make_command("recipe"))
    return {"schema": 1, "candidates": [one.__dict__ for one in found]}
