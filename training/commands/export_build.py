"""`export-build`: the pinned llama.cpp source into the machine's cache."""

import argparse

from training.core.report import Report

SUMMARY = "fetch the pinned llama.cpp source, verified, into the cache"
EXAMPLE = "make export-build"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "LLAMA_CPP_SDIST=FILE takes a local copy of the source distribution; it is verified all the same."


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.core import files, paths
    from training.llamacpp import pin, source

    pinned = pin.load()
    folder = source.ensure_source(pinned)
    report.add("llama.cpp", f"{pinned.name} ({pinned.licence})")
    report.add("source", folder)
    report.add("from", f"{pinned.sdist}, sha256 {files.short(pinned.sdist_sha256)}")
    report.add("converter", f"{files.short(pinned.converter_sha256)}, as pinned")
    report.add("next", "make export-gguf CHECKPOINT=latest")
    return {**pinned.to_json(), "converter_sha256": pinned.converter_sha256, "folder": paths.for_people(folder)}
