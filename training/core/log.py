"""What is said to people: one logger a module under `training`, plain lines on stderr.

A terminal or pipe that has gone must not end the work: `say` never raises for it.
"""

import contextlib
import logging
import sys


def say(text: str) -> None:
    """Print a line on stderr, at once; where nobody listens any more, do nothing."""
    if sys.stderr is None:  # closed by whoever started us; print would then take stdout
        return
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def configure(*, verbose: bool = False) -> None:
    """Send the `training` loggers to stderr, once; DEBUG when verbose, else INFO."""
    root = logging.getLogger("training")
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    root.propagate = False
    if not root.handlers:
        root.addHandler(_StderrHandler())


class _StderrHandler(logging.Handler):
    """Looks `sys.stderr` up at each line, so that redirections and tests are followed."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        say(f"{prefix}{record.getMessage()}")
