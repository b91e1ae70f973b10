"""`check`: the preflight of a recipe. Nothing is downloaded, allocated or changed; everything wrong is told at once."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from training.core.errors import Problems, TrainyardError
from training.core.log import say
from training.core.report import Report, make_command
from training.core.units import format_bytes

SUMMARY = "preflight of a recipe: data, tokenizer, memory, disk, machine"
EXAMPLE = "make check CONFIG=recipes/demo/pretrain-stdlib.yaml"

Row = tuple[str, str, str]  # what, "ok" | "warn" | "fail", why


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help="the recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values that replace the recipe's")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.recipe.load import load

    try:
        resolved = load(Path(args.config), args.overrides)
    except Problems as error:
        rows, exit_code = [("recipe", "fail", str(error))], error.exit_code
    else:
        rows, exit_code = _rows(resolved)
    for what, state, why in rows:
        report.add(what, f"{state}: {why}")
        say(f"{state:<5} {what:<11} {why}")
    if exit_code:
        report.fail("NOT READY", exit_code)
    else:
        report.add("next", make_command("train", *args.overrides, CONFIG=args.config))
    return {
        "schema": 1,
        "ready": not exit_code,
        "checks": [dict(zip(("name", "state", "why"), row, strict=True)) for row in rows],
    }


def _rows(resolved) -> tuple[list[Row], int]:
    """Every check's row, and the exit code of the first that failed, 0 where none did."""
    rows: list[Row] = [("recipe", "ok", f"{resolved.recipe.name}, sha256 {resolved.sha256[:12]}")]
    exit_code = 0
    for name, check in _CHECKS.items():
        try:
            rows += [(name, state, why) for state, why in check(resolved)]
        except TrainyardError as error:
            rows.append((name, "fail", str(error)))
            exit_code = exit_code or error.exit_code
    return rows, exit_code


# ---- the checks: each yields (state, why), or raises the error that training would


def _training(resolved) -> Iterator[tuple[str, str]]:
    from training.engine import trainable
    from training.objectives import registry

    trainable.require(resolved)
    registry.of(resolved.recipe.method).settled(resolved)
    yield "ok", f"method {resolved.recipe.method}, everything named"


def _model(resolved) -> Iterator[tuple[str, str]]:
    from training.calculator import shapes
    from training.core.units import format_count

    shape = shapes.of_model(resolved.recipe.model)
    yield "ok", f"{shape.family}, {format_count(shape.parameters)} parameters, {shape.num_layers} layers"


def _dataset(resolved) -> Iterator[tuple[str, str]]:
    if resolved.recipe.data.dataset is None:
        yield "warn", "none is named"
        return
    from training.core import store
    from training.data import dataset
    from training.engine import trainable

    named = resolved.recipe.data.dataset
    found = dataset.load(dataset.resolve(named))
    trainable.require_dataset(resolved.recipe, found)
    if named == found.name and (versions := len(store.complete_folders(found.folder.parent))) > 1:
        yield (
            "warn",
            f"{named} is now {found.reference}, the newest of {versions}; data.dataset={found.reference} stays",
        )
        return
    yield "ok", f"{found.reference}, complete; make data-verify DATASET={found.reference} hashes its files"


def _tokenizer(resolved) -> Iterator[tuple[str, str]]:
    from training.calculator import shapes
    from training.objectives import registry
    from training.tokenizer import artifact

    recipe = resolved.recipe
    if recipe.tokenizer.path is None and recipe.model.base is None:
        yield "warn", "none is named"
        return
    tokenizer = artifact.of_recipe(recipe)
    registry.of(recipe.method).require_tokenizer(recipe, tokenizer)
    rows = shapes.of_model(recipe.model).vocab_size
    unused = rows - tokenizer.vocab_size
    yield "warn" if unused > rows // 10 else "ok", f"{tokenizer.name}, {tokenizer.vocab_size} entries of {rows} rows"


def _records(resolved) -> Iterator[tuple[str, str]]:
    """What becomes of records with answers under these settings; nothing where another row says what is missing."""
    from training.data import dataset, forecast
    from training.tokenizer import artifact

    recipe = resolved.recipe
    if recipe.data.dataset is None:
        return
    try:
        found, tokenizer = dataset.load(dataset.resolve(recipe.data.dataset)), artifact.of_recipe(recipe)
    except TrainyardError:
        return
    for one in forecast.of_recipe(recipe, found, tokenizer):
        yield "warn" if one.words else "ok", str(one)


def _memory(resolved) -> Iterator[tuple[str, str]]:
    from training.calculator import fit
    from training.data import longest

    result = fit.require(resolved, longest.of_recipe(resolved.recipe))
    needed = format_bytes(result.estimate.peak.device_bytes)
    there = f"{format_bytes(result.device.usable_bytes)} usable of {result.device.name}"
    whose = "" if resolved.recipe.backend == "native" else " by the native step"
    yield "warn" if result.verdict == "tight" else "ok", f"{needed} needed{whose}, {there}"


def _disk(resolved) -> Iterator[tuple[str, str]]:
    from training.calculator.plan import Plan
    from training.core import files, paths

    plan, keep = Plan.of(resolved.recipe), resolved.recipe.checkpoint
    each = plan.trainable_bytes * 3  # weights and the two moments
    copies = keep.keep + 2 + keep.initial  # the best one, and the one being written
    files.require_space(paths.roots().runs, each * copies, f"{copies} checkpoints of {format_bytes(each)}")
    free = format_bytes(files.free_bytes(paths.roots().runs))
    yield "ok", f"{copies} checkpoints of {format_bytes(each)}; {free} free"


def _machine(resolved) -> Iterator[tuple[str, str]]:
    from training.core import locks

    who = locks.holder(locks.machine_lock())
    yield ("warn", f"busy: {locks.describe(who)}; training would wait") if who else ("ok", "idle")


_CHECKS = {
    "training": _training, "model": _model, "dataset": _dataset, "tokenizer": _tokenizer, "records": _records,
    "memory": _memory, "disk": _disk, "machine": _machine,
}  # fmt: skip
