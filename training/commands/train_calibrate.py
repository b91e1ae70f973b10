"""`train-calibrate`: a recipe's estimate held against a few real steps on this machine."""

import argparse
from pathlib import Path

from training.core import files, queue
from training.core.log import say
from training.core.report import Report, make_command
from training.core.units import format_bytes

SUMMARY = "hold a recipe's estimate against a few real steps on this machine"
EXAMPLE = 'make train-calibrate CONFIG=recipes/demo/pretrain-stdlib.yaml ARGS="--out record.json"'
NOT_WITHIN_EXIT_CODE = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help="the recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values that replace the recipe's")
    parser.add_argument("--out", metavar="FILE", help="write the figures there")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.recipe.load import load

    resolved = load(Path(args.config), args.overrides)
    with queue.turn(f"calibrating {resolved.recipe.name}"):
        record, comparisons = _calibrate(resolved, report)
    if args.out:
        files.write_json(Path(args.out), record)
        report.add("written", args.out)
    for one in comparisons:
        mark = "" if one.passes else "  <- not within the limits"
        measured, estimated = format_bytes(one.measured_bytes), format_bytes(one.estimated_bytes)
        say(f"  {one.name:<18}measured {measured:>11}  estimated {estimated:>11}  {one.difference:+8.2%}{mark}")
        if one.name in ("tensors", "device", "peak") or not one.passes:
            report.add(one.name, f"measured {measured}, estimated {estimated} ({one.difference:+.2%})")
    if not all(one.passes for one in comparisons):
        report.fail("NOT WITHIN THE LIMITS", NOT_WITHIN_EXIT_CODE)
        report.add("margin", "leave at least the difference free")
        report.add("next", make_command("memfit", "--trace", *args.overrides, CONFIG=args.config))
    return record


def _calibrate(resolved, report: Report) -> tuple[dict, list]:
    """On the GPU that is found, else the tensor part on the CPU."""
    from training.calculator import calibrate_cpu, calibrate_gpu, calibration, fit, nvml

    answer = nvml.ask()  # before anything of this process is on the device
    from training.engine.probe import TrainerProbe

    if not answer.gpus:
        record, comparisons = calibrate_cpu.calibrate(resolved, TrainerProbe)
        resident = record["resident"]
        report.add("device part", f"not measured: {answer.problem}")
        held, expected = (format_bytes(resident[key]) for key in ("peak_bytes", "estimate_bytes"))
        report.add("process", f"peak {held} resident with the profiler, estimate {expected}")
        return record, comparisons
    fit.require(resolved)
    gpu = answer.gpus[0]
    record, comparisons = calibrate_gpu.calibrate(resolved, TrainerProbe, gpu, answer.driver)
    report.add("gpu", f"{gpu.name}, driver {answer.driver}, torch {record['torch']}")
    if gpu.users:
        report.add("in use by", "\n".join(gpu.users))
    context, workspace = (format_bytes(record[key]) for key in ("context_bytes", "workspace_bytes"))
    report.add("context", f"{context}, workspace {workspace} a thread")
    report.add("record", calibration.write(record))
    return record, comparisons
