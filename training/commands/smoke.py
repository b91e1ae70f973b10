"""`smoke`: one step of LoRA and one of QLoRA on a tiny model, to see that what training needs is here and computes."""

import argparse

from training.core import paths
from training.core.log import say
from training.core.report import Report

SUMMARY = "one tiny LoRA and QLoRA step on the GPU, held against the processor"
EXAMPLE = 'make smoke ARGS="--cpu"'
CONTAINER = "train"
MODEL_SETTING = "TRAINYARD_SMOKE_MODEL"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cpu", action="store_true", help="on the processor; nothing is skipped there")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.calculator import nvml

    answer = nvml.ask()
    if not (args.cpu or answer.gpus):
        report.verdict = "SKIPPED"
        report.add("skipped", f"{answer.problem}; make smoke ARGS=--cpu runs it on the processor")
        return {"skipped": answer.problem}
    import torch

    from training.engine import selftest

    device = torch.device("cpu") if args.cpu else _gpu(torch)
    model = paths.setting(MODEL_SETTING, "") or None
    steps = {}
    for method in selftest.METHODS:
        found = selftest.run(method, device, model)
        steps[method] = found.to_json()
        if device.type != "cpu":
            steps[method] |= selftest.compare(method, found, selftest.run(method, torch.device("cpu"), model))
        told = "  ".join(f"{name} {value:.4g}" for name, value in steps[method].items())
        say(f"{method}: {told}")
        report.add(method, told)
    report.add("device", torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
    report.add("model", model or "a tiny one of its own")
    return {"device": str(device), "model": model, "steps": steps}


def _gpu(torch):
    """The GPU as torch sees it. Raises MachineError where the driver has one and torch cannot use it."""
    from training.core.errors import MachineError

    if not torch.cuda.is_available():
        raise MachineError(
            "there is a GPU, and PyTorch cannot use it", found=f"torch {torch.__version__}", expected="a CUDA build",
            next_command="make setup LOCK=cuda",
        )  # fmt: skip
    return torch.device("cuda")
