"""`evaluate`: what models score, and whether one is better than another."""

import argparse
from pathlib import Path

from training.core.log import say
from training.core.report import Report

SUMMARY = "loss, bits per byte and exams of models; --against judges whether they are better"
EXAMPLE = "make evaluate CHECKPOINT=latest ARGS='--exam my-exam.jsonl --guard drawn --against smollm2-135m-instruct'"
CONTAINER = "train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from training.data.settings import SPLITS

    add = parser.add_argument
    add("models", nargs="+", metavar="CHECKPOINT", help="a step folder, a run (its best one), a base's name, a Hugging "
        "Face folder, or a GGUF, which is asked through its server")  # fmt: skip
    add("--split", action="append", choices=SPLITS, help="measure the loss on it; repeatable (default: the first "
        "that there is of test_postcutoff, test and validation)")  # fmt: skip
    add("--exam", metavar="EXAM", help="a folder or JSONL of questions, or name@hash:split of a data set with answers")
    add("--questions", type=int, metavar="N", help="draw so many of the exam (default: 150, on a GPU 500)")
    add("--guard", metavar="EXAM", help="general questions that show what was forgotten, or `drawn`")
    add("--against", metavar="MODEL", help="judge the models against this one, under the same conditions")
    add("--allow", default="", metavar="NAME,...", help="conditions that may differ, by name; it is then said so")
    add(
        "--config",
        metavar="FILE",
        help="the recipe whose data, precision and attention count (default: the first checkpoint's)",
    )
    add("--precision", choices=("fp32", "bf16", "fp16", "nf4"), help="of the weights (default: the recipe's)")
    add("--report", type=Path, metavar="FILE.html", help="write the comparison as a page, and as text beside it")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.evaluation import record

    _check(args)
    evaluations, against = _planned(args)
    before = record.measure(against) if against else None
    records, judgements = [], []
    if before:
        _add_figures(report, before[0])
    for evaluation in evaluations:
        document, measured = record.measure(evaluation)
        records.append(document)
        _add_figures(report, document)
        if before:
            judgements.append(_judge(args, report, before, (document, measured), evaluation.subject))
    _add_unigram(report, records[-1])
    return {
        "schema": 2, "records": records, "against": before and before[0],
        "judgements": [judgement.to_json() for judgement in judgements],
    }  # fmt: skip


def _check(args: argparse.Namespace) -> None:
    """Raise what is wrong with the arguments before anything is measured."""
    from training.core.errors import UserError
    from training.evaluation import conditions, page

    if unknown := sorted(_allowed(args) - set(conditions.NAMES)):
        raise UserError("no such condition", where="--allow", found=", ".join(unknown),
                        expected=", ".join(conditions.NAMES))  # fmt: skip
    if args.report:
        page.require_html(args.report)
        if not args.against or len(args.models) > 1:
            raise UserError("a page shows one comparison", where="--report",
                            found=f"{len(args.models)} models, {'one' if args.against else 'none'} to compare with",
                            expected="one model, and --against MODEL")  # fmt: skip


def _allowed(args: argparse.Namespace) -> set[str]:
    return {name for name in args.allow.split(",") if name}


def _planned(args: argparse.Namespace) -> tuple[list, object | None]:
    """What is to be measured of each model, and of the one to judge against; whatever is wrong with it is raised."""
    from training.evaluation import record, subject, verdict
    from training.recipe.load import load

    subjects = [subject.find(reference) for reference in [*args.models, *([args.against] if args.against else [])]]
    request = record.Request(
        tuple(args.split or ()), args.exam, args.guard, args.questions,
        load(Path(args.config)).recipe if args.config else None, args.config, args.precision,
    )  # fmt: skip
    evaluations = [record.Evaluation(one, record.settled(request, subjects)) for one in subjects]
    identities = [{role: one.identity for role, one in each.planned.items()} for each in evaluations]
    if not args.against:
        return evaluations, None
    for after in identities[:-1]:
        verdict.require_comparable(identities[-1], after, _allowed(args))
    return evaluations[:-1], evaluations[-1]


def _judge(args: argparse.Namespace, report: Report, before: tuple, after: tuple, model):
    from training.core.errors import RunError
    from training.evaluation import lineage, page, verdict

    judgement = verdict.judge(before[1], after[1], _allowed(args))
    add_judgement(report, judgement, f"{model.label}: " if len(args.models) > 1 else "")
    if args.report:
        page.write(args.report, page.Page(before[0], after[0], judgement, lineage.curves(model), lineage.chain(model)))
        report.add("page", f"{args.report} and {args.report.with_suffix('.txt').name}")
    if not judgement.is_win:
        report.fail(f"NOT A WIN: {judgement.verdict}", RunError.exit_code)
    return judgement


def add_judgement(report: Report, judgement, of: str = "") -> None:
    """The rows that say what a judgement found; `of` begins their names where there are several."""
    report.add(f"{of}judged", f"{judgement.verdict}: {'; '.join(judgement.reasons)}")
    for one in judgement.comparisons:
        flips = f"; {len(one.gained)} gained, {len(one.lost)} lost" if one.metric == "agreement" else ""
        report.add(f"{of}{one.role} difference", one.text() + flips)
    if judgement.marked:
        report.add(f"{of}not the same", f"{', '.join(judgement.marked)}, allowed by name")


def _add_figures(report: Report, document: dict) -> None:
    parts = [f"{name}: {_loss_text(score)}" for name, score in document["splits"].items()]
    parts += [f"{role}: {_exam_text(document[role])}" for role in ("exam", "guard") if document[role]]
    parts += [f"{role}: left out {_counted(found)}" for role, found in document["left_out"].items()]
    parts += [f"answers: {path}" for path in _answers(document)]
    again = " (measured before)" if document["reused"] else ""
    report.add(document["model"]["label"], "\n".join(parts) + again)
    say(f"{document['model']['label']}: {'; '.join(parts)}")


def _answers(document: dict) -> list[Path]:
    """Where every answer of an exam lies, the wrong ones among them."""
    from training.evaluation import kept
    from training.evaluation.conditions import Identity

    asked = {role: values for role, values in document["identities"].items() if role in ("exam", "guard")}
    return [kept.path_of(Identity.from_json(values)) for values in asked.values()]


def _counted(reasons: dict[str, int]) -> str:
    return ", ".join(f"{count:,} ({reason})" for reason, count in reasons.items())


def _loss_text(score: dict) -> str:
    bits = score["bits_per_byte"]
    shown = "" if bits is None else f"{bits:.4f} bits/byte, "
    return (
        f"{shown}{score['loss_nats']:.4f} nats a token, perplexity {score['perplexity']:.2f}, on "
        f"{score['num_tokens']:,} tokens, {score['num_bytes']:,} bytes"
    )


def _exam_text(score: dict) -> str:
    text = f"agreement {100 * score['agreement']:.1f} %, {score['num_right']} of {score['num_questions']}"
    if score["num_unread"]:
        text += f", {score['num_unread']} could not be read"
    if score["collapse"]["collapsed"]:
        text += f"; COLLAPSED: {100 * score['collapse']['share']:.0f} % are {score['collapse']['answer'][:40]!r}"
    if found := score.get("calibration"):
        text += (
            f"; Brier {found['brier']:.3f}, calibration error {found['ece']:.3f}, "
            f"{found['at_temperature']['ece']:.3f} at temperature {found['temperature']:.2f}"
        )
    return text


def _add_unigram(report: Report, document: dict) -> None:
    if found := document["unigram"]:
        report.add("unigram", f"{found['bits_per_byte'] or 0:.4f} bits/byte, the train split's token shares")
