"""`export-build`: the pinned llama.cpp source into the cache, its quantiser compiled, the export image built."""

import argparse

from training.core.report import Report

SUMMARY = "fetch the pinned llama.cpp source, verified, compile its quantiser if asked to, build the image"
EXAMPLE = "make export-build"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quantizer",
        action="store_true",
        help="compile llama-quantize, for K-quants, with this machine's compiler",
    )
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
    document["quantizer"] = _quantizer(args.quantizer, report)
    document["image"] = _image(args.base, report)
    report.add("next", "make export-gguf CHECKPOINT=latest")
    return document


def _quantizer(wanted: bool, report: Report) -> str | None:
    """Compile the quantiser where that is asked for; its hash, None where it is not on this machine."""
    from training.core import files
    from training.core.errors import MachineError
    from training.llamacpp import quantize

    try:
        tool = quantize.build() if wanted else quantize.require_tool()
    except MachineError:
        if wanted:
            raise
        report.add("K-quants", 'make export-build ARGS="--quantizer" compiles what makes them, some minutes, once')
        return None
    digest = files.sha256_file(tool)
    report.add("K-quants", f"{tool}, sha256 {files.short(digest)}")
    return digest


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
