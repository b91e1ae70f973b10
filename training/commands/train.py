"""`train`: a recipe becomes a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from training.core.report import Report
from training.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from training.runs.folder import RunFolder

SUMMARY = "train a recipe; Ctrl-C saves, and `resume` goes on"
EXAMPLE = "make train CONFIG=recipes/demo/pretrain-stdlib.yaml ARGS='stop.max_steps=100'"
CONTAINER = "train"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help="the recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values that replace the recipe's")
    add_parallel(parser)
    parser.add_argument(
        "--reuse", action="store_true", help="take a finished run of exactly this, or go on with an unfinished one"
    )


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.recipe.load import load

    resolved = load(Path(args.config), args.overrides)
    from training.engine import launch

    folder, summary, reused = launch.start(resolved, reuse=args.reuse, parallel=parallel_of(args))
    same = "a completed run of the same recipe, data and tokenizer" if reused else None
    return told(report, folder, summary, same)


def add_parallel(parser: argparse.ArgumentParser) -> None:
    """The options that say how many processes train."""
    parser.add_argument("--ranks", type=int, metavar="N", help="train with N processes, each with a GPU of its own")
    parser.add_argument(
        "--parallel", choices=("ddp", "fsdp2"), help="whether each holds the whole model (the default) or a shard of it"
    )


def parallel_of(args: argparse.Namespace):
    """What the options say, one process where they say so; None where they say nothing."""
    from training.calculator import parallel

    if args.ranks is None and args.parallel is None:
        return None
    ranks = 1 if args.ranks is None else args.ranks
    kind = args.parallel or ("ddp" if ranks > 1 else None)
    return parallel.of_arguments(kind, ranks) or parallel.Parallel("ddp", 1)


def told(report: Report, folder: RunFolder, summary: dict, reused: str | None) -> dict:
    """Say what a run did, and return it as the command's document.

    Args:
        summary: empty in a process that follows the run's first one.
        reused: what there was already, where nothing was trained.
    """
    if not summary:
        report.add("followed", f"{folder.id}; its first process reports")
        return {"folder": str(folder.path)}
    _add_summary(report, folder.id, summary)
    if reused:
        report.add("reused", f"{reused}; nothing was trained")
    return summary | {"reused": reused is not None, "folder": str(folder.path)}


def _add_summary(report: Report, run_id: str, summary: dict) -> None:
    """The rows that say what a run did."""
    report.add("run", run_id)
    report.add("stopped", f"{summary['stop_reason']} at step {summary['steps']} of {summary['planned_steps']}")
    seconds = format_seconds(summary["trained_seconds"])
    report.add(
        "trained", f"{summary['trained_tokens']:,} tokens in {seconds}, {summary['tokens_per_second']:,.0f} tokens/s"
    )
    if summary["best_loss_nats"] is not None:
        unchanged = " (the untrained model: training has improved nothing)" if summary["best_step"] == 0 else ""
        report.add("best", f"{summary['best_loss_nats']:.4f} nats at step {summary['best_step']}{unchanged}")
    report.add("memory", _memory(summary["peak_bytes"], summary["estimate_bytes"]))
    by = "" if summary["backend"] == "native" else f", by {summary['backend']}"
    together = f", {summary['processes']} processes" if summary.get("processes", 1) > 1 else ""
    report.add("device", f"{summary['device']}, {summary['dtype']}, {summary['attention']}{by}{together}")
    report.add("next", f"make export-gguf CHECKPOINT={run_id}")


def _memory(peak_bytes: int, estimate_bytes: int | None) -> str:
    held = f"peak {format_bytes(peak_bytes)}, "
    if estimate_bytes is None:
        return held + "of which nothing is estimated with this backend"
    return held + f"estimate {format_bytes(estimate_bytes)} ({estimate_bytes / peak_bytes - 1:+.1%})"
