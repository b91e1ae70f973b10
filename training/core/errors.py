"""The one exception tree, and the exit codes that it means.

Every error says what is wrong, where, what was found against what was expected, and the next command to type.
`training.cli` turns it into the message, the JSON document and the exit code; nothing else calls `sys.exit`.
"""

import errno
from collections.abc import Sequence


class TrainyardError(Exception):
    """An error with a place and a way out; the subclass decides the exit code."""

    exit_code = 4

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        found: object = None,
        expected: object = None,
        next_command: str | None = None,
    ):
        super().__init__(what)
        self.what = what
        self.where = None if where is None else str(where)
        self.found = None if found is None else str(found)
        self.expected = None if expected is None else str(expected)
        self.next_command = next_command

    def __str__(self) -> str:
        rows = [("where", self.where), ("found", self.found), ("expected", self.expected), ("next", self.next_command)]
        return "\n".join([self.what, *(f"  {name:<9}{value}" for name, value in rows if value)])

    def to_json(self) -> dict:
        """The same parts for `--json`, `None` where a part does not apply."""
        return {
            "kind": type(self).__name__,
            "exit_code": self.exit_code,
            "what": self.what,
            "where": self.where,
            "found": self.found,
            "expected": self.expected,
            "next": self.next_command,
        }


class UserError(TrainyardError):
    """The recipe, the data or the arguments are wrong."""

    exit_code = 2


class MachineError(TrainyardError):
    """The machine cannot do it: no GPU, no engine, no disk space, busy."""

    exit_code = 3


class RunError(TrainyardError):
    """The work was tried and failed: does not fit, non-finite loss, smoke or parity failed."""

    exit_code = 4


class IntegrityError(TrainyardError):
    """Bytes are not what their hash or manifest says."""

    exit_code = 5


class RestoreError(TrainyardError):
    """The service that ran before could not be put back."""

    exit_code = 6


_TOLD = 20  # problems of a block that is to be pasted; more are of one kind, as a rule


class Problems(UserError):
    """Several errors of one input, reported at once; the exit code is theirs where they have one in common."""

    def __init__(self, what: str, problems: Sequence[TrainyardError], *, next_command: str | None = None):
        super().__init__(what, next_command=next_command)
        self.problems = list(problems)
        if len(codes := {problem.exit_code for problem in problems}) == 1:
            (self.exit_code,) = codes

    def __str__(self) -> str:
        told = self.problems[:_TOLD]
        parts = [f"{self.what} ({len(self.problems)})", *(f"- {problem}" for problem in told)]
        if more := len(self.problems) - len(told):
            parts.append(f"- and {more} more; ARGS=--json has them all")
        if self.next_command:
            parts.append(f"  {'next':<9}{self.next_command}")
        return "\n".join(parts)

    def to_json(self) -> dict:
        return super().to_json() | {"problems": [problem.to_json() for problem in self.problems]}


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP, raised where SIGINT would raise KeyboardInterrupt: one path cleans up after all of them."""

    def __init__(self, what: str = "", *, signal_name: str = "SIGTERM"):
        super().__init__(what)
        self.signal_name = signal_name


def from_json(document: dict) -> TrainyardError:
    """The error that `to_json` told of, as another process raises it."""
    parts = {"where": "where", "found": "found", "expected": "expected", "next_command": "next"}
    if "problems" in document:
        problems = [from_json(one) for one in document["problems"]]
        return Problems(document["what"], problems, next_command=document["next"])
    error = _kinds().get(document["kind"], TrainyardError)(
        document["what"], **{name: document[key] for name, key in parts.items()}
    )
    error.exit_code = document["exit_code"]
    return error


def _kinds() -> dict[str, type[TrainyardError]]:
    return {kind.__name__: kind for kind in (UserError, MachineError, RunError, IntegrityError, RestoreError)}


_NAMING_ERRORS = {
    errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOENT, errno.EEXIST, errno.EINVAL,
}  # fmt: skip


_OUT_OF_MEMORY = ("allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception of Python or torch, whose class need not be imported, means that memory ran out."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY)


def translated(error: Exception) -> TrainyardError | None:
    """What an exception of Python or torch means here; None where it is a fault of this program."""
    if isinstance(error, ModuleNotFoundError):
        return MachineError("a package is missing", found=f"no {error.name}", next_command="make setup")
    if is_out_of_memory(error):
        return RunError(
            "out of memory", found=str(error).splitlines()[0][:200] if str(error) else None,
            expected="a step that fits this machine: make memfit tells what would",
        )  # fmt: skip
    if type(error).__name__ == "SafetensorError" and "I/O error" in str(error):
        return MachineError("a file of weights could not be read or written", found=str(error))
    if isinstance(error, OSError) and error.errno is not None:
        kind = UserError if error.errno in _NAMING_ERRORS else MachineError
        place = str(error.filename or "")
        return kind(
            "a path cannot be used",
            where=f"{place[:200]} ..." if len(place) > 200 else place or None,
            found=error.strerror,
        )
    return None


INTERRUPTED_EXIT_CODE = 130
UNEXPECTED_EXIT_CODE = 1
"""A fault of this program itself, told with its traceback."""
