"""`export-build`: the pinned llama.cpp source into the machine's cache, and the export image where an engine builds."""

import argparse

from training.core.report import Report

SUMMARY = "fetch the pinned llama.cpp source, verified, and build the export image where an engine is"
EXAMPLE = "make export-build"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="REF", help="build the image on this base instead of the pin")
    parser.epilog = (
        "RUNTIME=local builds no image; RUNTIME=docker insists on it. "
        "LLAMA_CPP_SDIST=FILE takes a local copy of the source distribution; it is verified all the same."
    )


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.core import files, paths
    from training.llamacpp import pin, source

    pinned = pin.load()
    folder = source.ensure_source(pinned)
    report.add("llama.cpp", f"{pinned.name} ({pinned.licence})")
    report.add("source", folder)
    report.add("from", f"{pinned.sdist}, sha256 {files.short(pinned.sdist_sha256)}")
    report.add("converter", f"{files.short(pinned.converter_sha256)}, as pinned")
    document = {**pinned.to_json(), "converter_sha256": pinned.converter_sha256, "folder": paths.for_people(folder)}
    document["image"] = _image(args.base, report)
    report.add("next", "make export-gguf CHECKPOINT=latest")
    return document


def _image(base: str | None, report: Report) -> dict | None:
    """Build and try the export image; where nobody insists on it, what stands in the way is told and is no error."""
    from training.commands.images import add_image
    from training.containers import build, runtime
    from training.core.errors import TrainyardError

    if runtime.setting() == "local":
        return None
    try:
        order = build.order("cpu", base=base)
        build.preview(order, ["export"])
    except TrainyardError as error:
        if runtime.setting() == "docker" or base:
            raise
        report.add("image", f"not built: {error}")
        return None
    record = build.build_and_try("export", order)
    add_image(report, record)
    return record
