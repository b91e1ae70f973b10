"""`images`: the container images, built from what is pinned and tried."""

import argparse

from training.core.report import Report

SUMMARY = "build the container images from what is pinned, without a network, and try each"
EXAMPLE = "make images ARGS='--only llama --backend cpu'"
_KINDS = ("train", "export", "llama")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=_KINDS, help="build this one alone (default: all)")
    parser.add_argument(
        "--backend", choices=("cpu", "cuda"), help="the server's, and the packages' (default: cuda where a GPU is)"
    )
    parser.add_argument("--base", metavar="REF", help="build on this base instead of the pin in docker/bases.env")
    parser.add_argument("--server-base", metavar="REF", help="the same for the CUDA server")
    parser.add_argument("--no-cache", action="store_true", help="build every layer anew")
    parser.add_argument("--dry-run", action="store_true", help="say what would be built on what, and do nothing")
    parser.epilog = (
        "WHEELHOUSE=DIR takes the wheels from there; EXTRA_CA=FILE lends a certificate bundle to the fetching steps."
    )


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.containers import build

    order = build.order(args.backend, base=args.base, server_base=args.server_base, fresh=args.no_cache)
    images = build.chosen(order, args.only)
    if args.dry_run:
        for image, base in build.preview(order, images).items():
            report.add(image, f"on {base.reference}, {'pinned' if base.pinned else 'NOT pinned'}")
        report.add("dry run", "nothing was built")
        return {"images": [], "dry_run": True}
    records = [build.build_and_try(image, order) for image in images]
    for record in records:
        add_image(report, record)
    report.add("next", "make doctor")
    return {"images": records}


def add_image(report: Report, record: dict) -> None:
    """The row that says what an image is, what it stands on and how its trial went."""
    from training.core import files
    from training.core.units import format_bytes

    labels, trial = record["labels"], record["trial"]
    pinned = "pinned" if labels["base-pinned"] == "yes" else "NOT pinned: taken because it was named"
    rows = [
        f"{record['reference']}, id {files.short(record['id'][7:])}, {format_bytes(record['bytes'])}",
        f"base {labels['base']} ({pinned}); {len(record['distribution_packages'])} distribution packages",
        *(f"tried: {sentence}" for sentence in trial["passed"]),
    ]
    report.add(record["image"], "\n".join(rows))
