"""How many processes the kernel has ended because memory ran out.

Source: cgroups(7), `memory.events` of version 2 and `memory.oom_control` of version 1; proc(5), `/proc/vmstat`.
"""

import contextlib
import re
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def count(root: Path = _ROOT, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Processes ended for want of memory in this process's control group, else on the machine; None if unknown."""
    for path in _counters(root, membership):
        with contextlib.suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", path.read_text(), flags=re.M):
                return int(match[1])
    return None


def _counters(root: Path, membership: Path) -> list[Path]:
    """Where the count may stand; inside a container the group's own folder is often mounted as the root."""
    groups = {"": "", "memory": ""}
    with contextlib.suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            groups |= {name: group.strip("/") for name in controllers.split(",")}
    v1 = root / "memory"
    return [
        root / groups[""] / "memory.events", root / "memory.events", v1 / groups["memory"] / "memory.oom_control",
        v1 / "memory.oom_control", Path("/proc/vmstat"),
    ]  # fmt: skip
