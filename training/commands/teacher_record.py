"""`teacher-record`: what a teacher says of a data set's labels, kept beside its tokens, for `method: distill`."""

import argparse
from pathlib import Path

from training.core import files, queue
from training.core.errors import UserError
from training.core.report import Report
from training.core.units import format_bytes

SUMMARY = "record a teacher's probabilities for a recipe of method distill; run it again and it goes on"
EXAMPLE = "make teacher-record CONFIG=recipes/distill/smollm2-135m.yaml TEACHER=smollm2-135m-instruct"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help="the recipe")
    parser.add_argument(
        "--teacher", required=True, help="a base, a run, a checkpoint, a folder, a GGUF file, or a server's URL"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values that replace the recipe's")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.recipe.load import load

    resolved = load(Path(args.config), args.overrides)
    recipe = resolved.recipe
    if recipe.method != "distill" or recipe.data.dataset is None:
        raise UserError(
            "a teacher is recorded for a recipe that distils it", where=resolved.path,
            found=f"method: {recipe.method}, data.dataset: {recipe.data.dataset}",
            expected="method: distill, and a data set",
            next_command="make recipe",
        )  # fmt: skip
    from training.engine import device
    from training.objectives import teach, teaching

    with queue.turn(f"recording a teacher for {recipe.name}"):
        where = device.for_teacher()
        device.use_cores()
        taught = teach.teach(recipe, args.teacher, where.torch_device, where.dtype)
    who, said = taught.manifest["teacher"], taught.manifest["train"]
    report.add("teacher", f"{who['name']}, {who['form']}, {who['precision']}, {files.short(who['sha256'])}")
    report.add("labels", f"{said['rows']:,} of {said['documents']:,} records, top {taught.manifest['top_k']} of each")
    least = "at least " if who["form"] == "gguf" else ""  # a server does not tell what is outside the top
    told = f"{said['label_is_first']:.1%} of labels are its first choice"
    report.add("its loss", f"{least}{said['loss_nats']:.4f} nats; {told}")
    named = teaching.reference(taught.folder, taught.manifest)
    report.add("recording", named + (" (was there already)" if taught.reused else ""))
    report.add("on disk", format_bytes(taught.num_bytes))
    report.add("next", f"make train CONFIG={args.config}")
    return {"schema": 1, "reused": taught.reused, "folder": str(taught.folder), "manifest": taught.manifest}
