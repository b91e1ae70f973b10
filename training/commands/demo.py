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
    bits = figures["bits_per_byte"]
    report.add(
        "bits/byte",
        f"{bits['before']:.3f} before, {bits['after']:.3f} after, on the test split; unigrams {bits['unigram']:.3f}",
    )
    report.add("trained", f"{figures['trained_tokens']:,} tokens, {figures['tokens_per_second']:,.0f} a second")
    peak, estimate = figures["peak_bytes"], figures["estimate_bytes"]
    report.add("memory", f"peak {format_bytes(peak)}, estimate {format_bytes(estimate)} ({estimate / peak - 1:+.1%})")
    report.add("chain", " -> ".join(f"{name} {digits}" for name, digits in figures["chain"].items()))
    for quant, parity in figures["parity"].items():
        report.add(
            f"parity {quant}",
            f"at most {parity['max_nats']:.4f} nats off, median {parity['median_nats']:.4f}, at {parity['positions']} "
            f"positions; divergence mean {parity['kl_mean_nats']:.2g}, 99th percentile {parity['kl_p99_nats']:.2g}",
        )
    passed = sum(prompt["passed"] for prompt in figures["smoke"])
    report.add("smoke", f"{passed} of {len(figures['smoke'])} prompts answered by the trained model")
    report.add("restored", _restored(figures))
    report.add("reused", ", ".join(figures["reused"]) or "nothing")
    report.add("time", format_seconds(sum(figures["seconds"].values())))
    report.add("run", figures["folder"])
    report.add("model", figures["model"])
    report.add("next", _next(figures))


def _restored(figures: dict) -> str:
    if figures["kept_serving"]:
        return f"no, as asked: the trained model stays on port {figures['port']}, until make serve-stop SERVICE=demo"
    return f"yes, by the server's word: {figures['serves']['path']}; then the demo's service was stopped"


def _next(figures: dict) -> str:
    if figures["kept_serving"]:
        ask = """-d '{"prompt": "def main():", "n_predict": 48}'"""
        return f"curl -s http://127.0.0.1:{figures['port']}/completion {ask}"
    return "make demo ARGS=--keep-serving"
