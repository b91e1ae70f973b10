"""Logging: one logger a module under `training`, plain lines on stderr, warnings of libraries kept out of the way."""

import logging
import sys


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
        print(f"{prefix}{record.getMessage()}", file=sys.stderr, flush=True)
