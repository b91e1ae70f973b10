"""The tool's version and commit, as manifests and reports record them."""

import subprocess
from functools import cache

from training import __version__
from training.core.paths import REPOSITORY


@cache
def tool() -> dict:
    """`{"version", "commit"}`; the commit is None outside a git checkout, with `+` behind it where files differ."""
    try:
        run = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
        commit = subprocess.run(run, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = None
    return {"version": __version__, "commit": commit}
