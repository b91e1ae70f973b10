"""`round`: a night's work on one recipe, from the baseline to a tried model. Nothing is promoted."""

import argparse
from pathlib import Path

from training.commands.evaluate import add_judgement
from training.core.errors import RunError
from training.core.report import Report, make_command

SUMMARY = "baseline, training within the hours, verdict, export, a trial in the service; promotes nothing"
EXAMPLE = "make round CONFIG=recipes/lora/smollm2-135m.yaml HOURS=8 ARGS='--exam my-exam.jsonl --guard drawn'"
HOURS = 8.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="the recipe")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="values that replace the recipe's")
    add("--hours", type=float, default=HOURS, metavar="H", help="the most hours of training (default: 8)")
    add("--exam", metavar="EXAM", help="a folder or JSONL of questions, or name@hash:split of a data set with answers")
    add("--guard", metavar="EXAM", help="general questions that show what was forgotten, or `drawn`")
    add("--questions", type=int, metavar="N", help="draw so many of the exam (default: 150, on a GPU 500)")
    add("--quant", default="Q8_0", help="the exported file's quant type (default: Q8_0)")
    add("--service", metavar="NAME", help="the service of the trial (default: by RUNTIME)")
    add("--port", type=int, help="its port")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.recipe.load import load
    from training.rounds import round as rounds
    from training.rounds.steps import options

    plan = rounds.Plan(
        load(Path(args.config), args.overrides), args.hours, args.exam, args.guard, args.questions, args.quant,
        tuple(options(("--service", args.service), ("--port", args.port))),
    )  # fmt: skip
    rounds.check(plan)
    night = rounds.Round(plan)
    report.add("round", night.folder)
    if night.is_resumed:
        report.add("goes on", "with a round of the same recipe that was stopped")
    document = night.run()
    add_judgement(report, night.judgement)
    report.add(
        "stopped", f"{document['stoppedBecause']} after {document['steps']} steps, {document['minutes']} min in all"
    )
    report.add("page", f"{night.folder / rounds.PAGE}, and as text beside it")
    for note in document["notes"]:
        report.add("note", note)
    report.add("next", _next(night, args.exam))
    if not night.judgement.is_win:
        report.fail(f"NOT A WIN: {night.judgement.verdict}", RunError.exit_code)
    return document


def _next(night, exam: str | None) -> str:
    document = night.document
    if not document["beat"]:
        return "make runs"
    if document["model"] is None:
        return make_command("export-gguf", "--name", night.export_name, CHECKPOINT=document["run"])
    if document["served"] is None:
        return make_command("evaluate", "--exam", exam or "my-exam.jsonl", CHECKPOINT=document["model"])
    return make_command("promote", MODEL=document["model"])
