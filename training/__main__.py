"""`python -m training`."""

import os
import sys

from training.cli import main


def _open_streams() -> None:
    """Give closed standard streams to nobody, so that no file of ours gets their numbers; write what cannot be encoded
    as escapes."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    _open_streams()
    sys.exit(main(sys.argv[1:]))
