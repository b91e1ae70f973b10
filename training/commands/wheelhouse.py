"""`wheelhouse`: the wheels of a lock file in a folder, for builds without a network."""

import argparse

from training.core.report import Report

SUMMARY = "fetch the wheels of the lock file, held against their hashes, into a folder"
EXAMPLE = "make wheelhouse WHEELHOUSE=/media/stick/wheels"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lock", help="cpu or cuda (default: the one that .venv was made from)")
    parser.epilog = "WHEELHOUSE=DIR names the folder (default: in the machine's cache)."


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.containers import build, wheelhouse
    from training.core import files, paths
    from training.core.report import make_command
    from training.core.units import format_bytes

    lock = wheelhouse.lock_path(args.lock or build.default_lock())
    folder = wheelhouse.ensure(lock, build.wheel_folder())
    wheels = sorted(folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    report.add("wheels", f"{len(wheels)} of {lock.name}, {format_bytes(size)}")
    report.add("lock", f"sha256 {files.short(files.sha256_file(lock))}; each wheel as pinned")
    report.add("folder", folder)
    report.add("next", make_command("images", WHEELHOUSE=build.wheel_folder()))
    return {"folder": paths.for_people(folder), "wheels": [wheel.name for wheel in wheels], "bytes": size}
