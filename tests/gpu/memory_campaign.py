"""Measures, in under ten minutes on whatever NVIDIA GPU it finds (from 8 GB on), what training takes of it.

    python tests/gpu/memory_campaign.py --out table.json

Each row runs in a process of its own, since a context and an allocator begin anew only there; one that fails costs that
row alone. After each, the JSON and the Markdown table beside it are written anew. It imports no torch itself, so that
it holds nothing of the device.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, by its path

from tests.gpu.rows import ROWS, Row
from training.core import files
from training.core.paths import REPOSITORY

_MIB = 1 << 20
_ROW_SECONDS = 90
_COUNTS = ("allocated", "reserved", "device")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--seconds", type=float, default=560, help="no row is begun after this")
    parser.add_argument("--rows", nargs="*", choices=[row.name for row in ROWS], help="these rows alone")
    parser.add_argument(
        "--cpu-rehearsal", action="store_true", help="run the same lines on the CPU; figures mean nothing"
    )
    args = parser.parse_args()
    chosen = [row for row in ROWS if not args.rows or row.name in args.rows]
    results = run(chosen, args.out, args.seconds, is_rehearsal=args.cpu_rehearsal)
    print(args.out.with_suffix(".md").read_text())
    return 0 if all("error" not in result for result in results) else 4


def run(rows: list[Row], out: Path, seconds: float, *, is_rehearsal: bool = False) -> list[dict]:
    """Run the rows one after the other until the time is up; returns them as they stand in the file."""
    deadline, results = time.monotonic() + seconds, []
    for row in rows:
        left = deadline - time.monotonic()
        result = _child(row, min(_ROW_SECONDS, left), is_rehearsal) if left > 0 else {"error": "the time was up"}
        results.append({"name": row.name, "method": row.method, "sections": row.sections, **result})
        files.write_json(out, {"schema": 1, "rehearsal": is_rehearsal, "rows": results})
        files.write_text(out.with_suffix(".md"), table(results))
    return results


def _child(row: Row, seconds: float, is_rehearsal: bool) -> dict:
    """One row in its own process; where it fails, the last lines of what it said."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, "-m", "tests.gpu.campaign_row", row.name, str(out)]
        started = time.monotonic()
        try:
            done = subprocess.run(
                [*command, "--cpu-rehearsal"] if is_rehearsal else command, cwd=REPOSITORY, timeout=seconds,
                env=os.environ | row.environment | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {seconds:.0f} s"}
        if done.returncode or not out.is_file():
            return {"error": done.stderr.strip()[-1500:] or f"exit {done.returncode}"}
        return files.read_json(out) | {"seconds": round(time.monotonic() - started, 1)}


def table(results: list[dict]) -> str:
    """The rows for people: measured MiB, the estimate's signed error, and that of the real requests replayed."""
    lines = [
        "| row | allocated | error | reserved | error | NVML | error | replayed | context | workspace | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        if "error" in result:
            lines.append(f"| {result['name']} | {result['error'].splitlines()[-1][:120]} |" + " |" * 9)
            continue
        compared = {one["name"]: one for one in result["comparisons"]}
        counts = [
            f"{compared[name]['measured_bytes'] / _MIB:.0f} | {compared[name]['difference']:+.1%}" for name in _COUNTS
        ]
        replayed = result["replayed"]["reserved_bytes"] / max(1, compared["reserved"]["measured_bytes"]) - 1
        context, workspace = (result[key] / _MIB for key in ("context_bytes", "workspace_bytes"))
        rest = f"{replayed:+.1%} | {context:.0f} | {workspace:.1f} | {result['seconds']}"
        lines.append(f"| {result['name']} | {' | '.join(counts)} | {rest} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
