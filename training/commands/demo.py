"""`demo`: the whole round trip on text that every machine has."""

import argparse

from training.core.report import Report
from training.core.units import format_bytes, format_seconds

SUMMARY = "from the standard library's sources to a model that answers, with the old one put back"
EXAMPLE = "make demo ARGS='--keep-serving'"
PORT = 18431


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values that replace the demo recipe's")
    parser.add_argument("--port", type=int, default=PORT, help=f"port of the demo's own service, default {PORT}")
    parser.add_argument("--keep-serving", action="store_true", help="leave the trained model in service")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.rounds.demo import Demo

    figures = Demo(args.overrides, args.port, args.keep_serving).run()
    _add_rows(report, figures)
    return figures


def _add_rows(report: Report, figures: dict) -> None:
    before, after = figures["bits_per_byte_before"], figures["bits_per_byte_after"]
    unigram = figures["bits_per_byte_unigram"]
    report.add("bits/byte", f"{before:.3f} before, {after:.3f} after, on the test split (unigram model: {unigram:.3f})")
    report.add("trained", f"{figures['trained_tokens']:,} tokens, {figures['tokens_per_second']:,.0f} a second")
    peak, estimate = figures["peak_bytes"], figures["estimate_bytes"]
    report.add("memory", f"peak {format_bytes(peak)}, estimate {format_bytes(estimate)} ({estimate / peak - 1:+.1%})")
    report.add("chain", " -> ".join(f"{name} {digits}" for name, digits in figures["chain"].items()))
    report.add("parity", figures["parity"])
    report.add("restored", figures["restored"])
    report.add("reused", ", ".join(figures["reused"]) or "nothing")
    report.add("time", format_seconds(figures["total_seconds"]))
    report.add("run", figures["folder"])
    report.add("model", figures["gguf"])
    report.add("next", figures["next"])
