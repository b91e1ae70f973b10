"""The report block: the last lines of every command, complete enough to paste back, and the same as JSON.

It goes to stderr and to `logs/reports/`. It holds no secret, no home folder and no host name.
"""

import datetime
import itertools
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from training.core import files, paths, version
from training.core.log import say

PROGRAM = (".venv/bin/python" if Path(sys.prefix) == paths.REPOSITORY / ".venv" else "python", "-m", "training")
"""The program as a person types it in the repository's folder."""
RUNNING = "TRAINYARD_COMMAND"
"""The variable in which the processes that a command starts find its words, as JSON."""
_OPENING = "--- trainyard report: paste this back ---"
_CLOSING = "--- end of report ---"


def utc_stamp() -> str:
    """The time now as file names hold it, `20261129T214358Z`."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")


def command_line(argv: list[str], *more: str) -> str:
    """The command as the person typed it: make's own words where make called it, else `PROGRAM ...`.

    Words more stand at its end, under make in ARGS; a recipe's value, or an option's, replaces the one that was given.
    """
    if not (os.environ.get("MAKELEVEL") and argv):
        return shlex.join([*PROGRAM, *_with(argv, more)])
    # make hands the variables of its own command line down in MAKEFLAGS, behind a `--`, blanks escaped, each `$` twice
    text = os.environ.get("MAKEFLAGS", "").partition("-- ")[2].replace("$$", "$")
    try:
        variables = shlex.split(text)
    except ValueError:  # a lone quotation mark in a name
        variables = text.split()
    pairs = dict(variable.split("=", 1) for variable in variables if "=" in variable)
    if more:
        pairs["ARGS"] = shlex.join(_with(shlex.split(pairs.get("ARGS", "")), more))
    return " ".join(["make", argv[0], *(f"{name}={shlex.quote(value)}" for name, value in pairs.items())])


def _with(words: Sequence[str], more: Sequence[str]) -> list[str]:
    keys = {word.partition("=")[0] for word in more if "=" in word}
    valued = {one for one, after in itertools.pairwise(more) if one.startswith("--") and not after.startswith("--")}
    before = [None, *words]
    kept = (
        word for word, left in zip(words, before, strict=False)
        if word.partition("=")[0] not in keys and word not in valued and left not in valued
    )  # fmt: skip
    return [*kept, *more]


def running() -> list[str]:
    """The words of the command that runs now, also where one of its processes asks; without its program."""
    return json.loads(os.environ.get(RUNNING, '["COMMAND"]'))


def again(*more: str) -> str:
    """The command that runs now, to paste, with these options and values of the recipe more."""
    return command_line(running(), *more)


def make_command(target: str, *arguments: str, **variables: object) -> str:
    """A command to paste, in make's form: `make train CONFIG=my.yaml ARGS='stop.max_steps=10'`; empty ones left out."""
    pairs = [f"{name}={shlex.quote(str(value))}" for name, value in variables.items() if value]
    if arguments:
        pairs.append(f"ARGS={shlex.quote(shlex.join(arguments))}")
    return " ".join(["make", target, *pairs])


class Report:
    """Rows of a report, a verdict and an exit code; a command fills it and the dispatcher prints it."""

    def __init__(self, argv: list[str]):
        self.command = command_line(argv)
        self.name = argv[0] if argv else "help"
        self.rows: dict[str, str] = {}
        self.verdict, self.exit_code = "PASS", 0

    def add(self, name: str, value: object) -> None:
        """Add a row, or a line to the row of this name; paths lose the home folder and the data root's place."""
        told = paths.for_people(value)
        self.rows[name] = f"{self.rows[name]}\n{told}" if name in self.rows else told

    def fail(self, verdict: str, exit_code: int) -> None:
        """Set the verdict of a command that ran to its end and found against the user."""
        self.verdict, self.exit_code = verdict, exit_code

    def text(self) -> str:
        """The block as people paste it."""
        rows = {"command": paths.for_people(self.command), "verdict": f"{self.verdict} (exit {self.exit_code})"}
        rows |= self.rows
        width = max(len(name) for name in rows) + 2
        indent = "\n" + " " * width
        return "\n".join(
            [_OPENING, *(f"{name:<{width}}{value.replace(chr(10), indent)}" for name, value in rows.items()), _CLOSING]
        )

    def to_json(self) -> dict:
        return {
            "schema": 1, "command": paths.for_people(self.command), "verdict": self.verdict,
            "exit_code": self.exit_code, "rows": self.rows, "tool": version.tool(),
        }  # fmt: skip

    def publish(self, folder: Path = paths.REPOSITORY / "logs" / "reports") -> None:
        """Print the block on stderr and keep it as JSON; a folder that cannot be written is said, not raised."""
        say(self.text())
        try:
            files.write_json(folder / f"{utc_stamp()}-{self.name}-{os.getpid()}.json", self.to_json())
        except Exception as error:
            say(f"warning: the report was not kept: {error}")
