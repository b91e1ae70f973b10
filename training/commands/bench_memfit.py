"""`bench-memfit`: the estimates held against what others measured."""

import argparse
from pathlib import Path

from training.core.log import say
from training.core.report import Report

SUMMARY = "hold memfit's estimates against published measurements"
EXAMPLE = "make bench-memfit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", action="store_true", help="print every row, not the table alone")
    parser.add_argument("--peers", action="store_true", help="ask other estimators about the same complete rows")
    parser.add_argument("--trace", action="store_true", help="also trace the same complete rows (takes minutes)")
    parser.add_argument("--write", metavar="PAGE", help="put the tables into this page, between their marks")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.calculator import bench

    found = bench.run()
    say(bench.table(found))
    for error in found.errors if args.rows else ():
        say(bench.line(error))
    if args.write:
        bench.write(Path(args.write), bench.MARK, bench.page_part(found))
        report.add("written", args.write)
    report.add("rows", f"{len(found.described)} estimated, {len(found.left_out)} left out with a reason")
    for name, text in bench.judgement(found):
        report.add(name, text)
    asked = _peers(args, found, report)
    return found.to_json() | ({"peers": [peer.to_json() for peer in asked]} if asked else {})


def _peers(args: argparse.Namespace, found, report: Report) -> list:
    """The other estimators that were asked for, each shown, and written where that is asked for."""
    from training.calculator import bench, peers

    groups = []
    if args.peers:
        groups.append((peers.MARK, peers.run(found)))
    if args.trace:
        groups.append((peers.TRACE_MARK, (peers.traced(),)))
    for mark, asked in groups:
        say(peers.page_part(asked))
        if args.write:
            bench.write(Path(args.write), mark, peers.page_part(asked))
        for peer in asked:
            report.add(peer.name, f"{len(peer.errors)} readings; {len(peer.left_out)} rows that it cannot describe")
    return [peer for _, asked in groups for peer in asked]
