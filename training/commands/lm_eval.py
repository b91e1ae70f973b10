"""`lm-eval`: an exam by EleutherAI's harness, which asks the served model."""

import argparse

from training.core.report import Report, make_command

SUMMARY = "an exam asked and scored by lm-eval, from an environment of its own, of a GGUF's server"
EXAMPLE = "make lm-eval MODEL=/app/models/trained/mine/mine-Q8_0.gguf EXAM=my-exam.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a GGUF under $DATA_ROOT/models, or its /app/models name")
    add("--exam", required=True, metavar="EXAM", help="a folder or JSONL of questions, or name@hash:split")
    add("--questions", type=int, metavar="N", help="draw so many of the exam (default: 150, on a GPU 500)")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.core import files, paths
    from training.core.errors import UserError
    from training.evaluation import harness, kept, record, served, subject

    model = subject.find(args.model)
    if model.form != subject.GGUF:
        raise UserError("lm-eval asks a server", where=args.model, found=f"a {model.form}", expected="a GGUF file",
                        next_command=make_command("export-gguf", CHECKPOINT=args.model))  # fmt: skip
    evaluation = record.Evaluation(model, record.Request(exam=args.exam, num_questions=args.questions))
    by_evaluate = make_command("evaluate", "--exam", args.exam, CHECKPOINT=args.model)
    harness.require_askable(evaluation.exam, by_evaluate)
    server = evaluation.planned[kept.EXAM].identity.conditions["server"]
    program = harness.environment()
    with files.scratch_folder(paths.roots().cache / "lm-eval") as folder, served.serving(model, server) as url:
        found = harness.sit(evaluation.exam, url, folder, program)
    count = f"of {found['num_questions']} questions"
    report.add("lm-eval", f"{found['version']}: exact_match {found['exact_match']:.4f} {count}")
    report.add("this exam", f"agreement {found['agreement']:.4f}, {found['num_right']} {count}, of the same answers")
    report.add("next", by_evaluate)
    return {"schema": 1, "model": model.to_json(), "exam": evaluation.exam.identity(), **found}
