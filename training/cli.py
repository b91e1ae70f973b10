"""The command table: parse, dispatch, and turn every outcome into a report block, a JSON document and an exit code.

A command is a module of `training.commands` with `SUMMARY`, `EXAMPLE`, `add_arguments(parser)` and
`run(args, report) -> dict` (the `--json` document). It is imported only when it is called. One with `CONTAINER`, a
service of compose.yaml, may run there (`training.containers.runtime`).
"""

import argparse
import difflib
import importlib
import json
import os
import re
import shlex
import sys
import traceback
from types import ModuleType
from typing import NoReturn

from training.core import files, log, signals
from training.core.errors import (
    INTERRUPTED_EXIT_CODE,
    UNEXPECTED_EXIT_CODE,
    MachineError,
    TrainyardError,
    UserError,
    translated,
)
from training.core.report import PROGRAM, RUNNING, Report

COMMANDS = {
    "See": ("doctor", "smoke", "recipe", "runs", "verify"),
    "Prepare": ("base-fetch", "data-prepare", "data-peek", "data-verify", "teacher-record"),
    "Tokenize": ("tokenizer-train", "tokenizer-measure", "tokenizer-add"),
    "Plan": ("memfit", "bench-memfit", "bench", "check"),
    "Train": ("train-calibrate", "train", "resume", "evaluate", "lm-eval"),
    "Contain": ("wheelhouse", "images"),
    "Export": ("export-build", "export-gguf", "delta-export", "delta-import"),
    "Serve": ("serve-eval", "serve-start", "serve-stop", "serve-restore", "serve-status"),
    "Decide": ("round", "trial", "promote", "rollback"),
    "All of it": ("demo",),
}
# OpenMP threads spin while they wait for each other; beside another busy process two spinning threads on two cores ran
# the demo's steps at 980 tokens a second, with this limit at 1,700, and alone at 3,700 against 3,900.
_SPINS = "3000"
_PROGRAM = shlex.join(PROGRAM)
# argparse's own words, and the parts of an error that stand in them.
_FAULTS = {
    r"unrecognized arguments: (?P<found>.*)": "no such argument",
    r"the following arguments are required: (?P<expected>.*)": "an argument is missing",
    r"argument (?P<where>.*?): invalid choice: (?P<found>.*) \(choose from (?P<expected>.*)\)": "no such choice",
    r"argument (?P<where>.*?): invalid _?(?P<expected>\w+) value: (?P<found>.*)": "not such a value",
    r"argument (?P<where>.*?): expected (?P<expected>.*)": "an option without its value",
    r"argument (?P<found>.*?): not allowed with argument (?P<expected>.*)": "two options of which one is too many",
}
_TYPES = {"int": "a whole number", "float": "a number", "share": "a share, such as 15% or 0.15", "Path": "a path"}


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"training.commands.{name.replace('-', '_')}")


def _overview() -> str:
    lines = [f"example: {_PROGRAM} memfit --config recipes/reference/pretrain-1b.yaml", ""]
    for group, names in COMMANDS.items():
        lines.append(f"{group}:")
        lines += [f"  {name:<16} {_module(name).SUMMARY}" for name in names]
    lines += ["", f"{_PROGRAM} COMMAND --help shows a command's arguments.", ""]
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and exit, so that bad arguments end in a report block like all else."""

    def error(self, message: str) -> NoReturn:
        what, parts = _fault(message)
        command = f"{self.prog} --help"
        if what == "no such argument":
            near = difflib.get_close_matches(parts["found"].split()[0], self._option_string_actions, 1)
            parts["expected"] = f"did you mean {near[0]}?" if near else None
        elif what == "an argument is missing":
            command = _module(self.prog.split()[len(PROGRAM)]).EXAMPLE
        raise UserError(what, **parts, next_command=command)


def _fault(message: str) -> tuple[str, dict[str, str | None]]:
    """What is wrong with the arguments, and where, found and expected as far as argparse's message tells."""
    for pattern, what in _FAULTS.items():
        if match := re.fullmatch(pattern, message, re.DOTALL):
            parts = {name: text.replace("'", "") for name, text in match.groupdict().items()}
            if what == "not such a value":
                parts["expected"] = _TYPES.get(parts["expected"], parts["expected"])
            return what, parts
    return f"wrong arguments: {message}", {}


def _arguments(argv: list[str]) -> argparse.Namespace:
    module = _module(argv[0])
    parser = _Parser(
        prog=f"{_PROGRAM} {argv[0]}",
        description=f"example: {module.EXAMPLE}\n\n{module.SUMMARY}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    module.add_arguments(parser)
    if parser._subparsers:  # which cannot be mixed
        return parser.parse_args(argv[1:])
    return parser.parse_intermixed_args(argv[1:])  # values of a recipe may stand on both sides of an option


def main(argv: list[str]) -> int:
    """Run one command line and return its exit code."""
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    if not argv or argv[0] in ("-h", "--help", "help"):
        return 0 if _print(_overview()) else MachineError.exit_code
    log.configure()
    return _dispatch(argv)


def _dispatch(argv: list[str]) -> int:
    signals.raise_terminated()
    os.environ[RUNNING] = json.dumps(argv)
    report = Report(argv)
    try:
        _require_command(argv[0])
        args = _arguments(argv)
        if (code := _contained(argv)) is not None:
            return code
        document = _module(argv[0]).run(args, report)
    except KeyboardInterrupt as interrupt:
        document = _interrupted(report, interrupt)
    except Exception as error:
        document = _failed(report, error)
    report.publish()
    if "--json" in argv:
        whole = {"schema": 1, **document, "report": report.to_json()}
        if not _print(files.json_text(whole)):
            return MachineError.exit_code
    return report.exit_code


def _contained(argv: list[str]) -> int | None:
    """The exit code of a command that ran in a container, report block and all; None where it is to run here."""
    service = getattr(_module(argv[0]), "CONTAINER", None)
    if service is None:
        return None
    from training.containers import runtime

    return runtime.run(service, argv)


def _require_command(name: str) -> None:
    names = {name for group in COMMANDS.values() for name in group}
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        raise UserError(
            f"unknown command {name!r}",
            expected=f"did you mean {near[0]}?" if near else None,
            next_command="make",
        )


def _failed(report: Report, error: Exception) -> dict:
    """Fill the report with what went wrong; a fault of this program itself comes with its traceback."""
    known = error if isinstance(error, TrainyardError) else translated(error)
    if known is not None:
        report.fail("FAIL", known.exit_code)
        report.add("error", known)
        return {"error": known.to_json()}
    log.say(traceback.format_exc())
    report.fail("ERROR", UNEXPECTED_EXIT_CODE)
    report.add("error", f"a fault of this program, see the traceback above: {error!r}")
    return {"error": {"kind": type(error).__name__, "exit_code": UNEXPECTED_EXIT_CODE, "what": str(error)}}


def _interrupted(report: Report, interrupt: KeyboardInterrupt) -> dict:
    name = signals.name_of(interrupt)
    report.fail("INTERRUPTED", INTERRUPTED_EXIT_CODE)
    report.add("error", f"stopped by {name}{'; ' + str(interrupt) if str(interrupt) else ''}")
    return {"error": {"kind": name, "exit_code": INTERRUPTED_EXIT_CODE, "what": str(interrupt)}}


def _print(lines: str) -> bool:
    """Print whole lines on stdout; False where it takes none. A reader that has gone is nothing to tell of."""
    try:
        print(lines, end="", flush=True)
        return True
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            log.say(f"stdout cannot be written: {error.strerror}")
        return isinstance(error, BrokenPipeError)
