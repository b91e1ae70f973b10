"""`memfit`: will a recipe fit, before anything is allocated."""

import argparse
from pathlib import Path

from training.core import files
from training.core.errors import UserError
from training.core.log import say
from training.core.report import Report, again
from training.core.units import format_bytes, format_count

SUMMARY = "estimate a recipe's peak memory, and hold it against a device"
EXAMPLE = 'make memfit CONFIG=recipes/reference/pretrain-1b.yaml ARGS="--vram 24GiB --solve batch"'
DOES_NOT_FIT_EXIT_CODE = 4
_BAR_CELLS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help="the recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values that replace the recipe's")
    parser.add_argument(
        "--solve", choices=("batch", "seq", "rank"), help="find the largest micro-batch, sequence or rank that fits"
    )
    parser.add_argument(
        "--sweep", action="append", nargs="+", metavar="KEY=V,V", help="estimate every combination of these values"
    )
    parser.add_argument("--csv", metavar="FILE", help="write the rows of --sweep there")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the step over time, or with --sweep the heat-map, as PNG or SVG"
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="also run the step's own code under fake tensors (takes seconds, or half a minute)",
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="estimate one of N ranks")
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), help="how the ranks share the model")
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--gpu", metavar="NAME", help='hold against a GPU by name, such as "RTX 3080 10GB"')
    device.add_argument("--vram", metavar="SIZE", help="hold against a GPU of this size, such as 10GiB")


def run(args: argparse.Namespace, report: Report) -> dict:
    _require_options(args)
    from training.calculator import fit, nvml
    from training.data.longest import of_recipe
    from training.recipe.load import load

    ranks = _ranks(args)
    if args.plot:
        from training.core import figure

        figure.require_kind(Path(args.plot))
    if args.sweep:
        return _sweep(args, report, ranks)
    resolved = load(Path(args.config), args.overrides)
    longest = of_recipe(resolved.recipe)
    result = fit.fit(
        resolved, gpu=args.gpu, vram=args.vram, solve=args.solve, longest=longest, trace=_trace, asks_trace=args.trace,
        parallel=ranks, with_record=True,
    )  # fmt: skip
    _print_table(result)
    _fill(report, result)
    if resolved.recipe.backend != "native":
        report.add("backend", f"{resolved.recipe.backend}, whose step may take more: the estimate is the native one's")
    if not (args.gpu or args.vram or (result.device and result.device.kind == "cuda")):
        report.add("gpu", f"{nvml.ask().problem}; name one with --gpu or --vram")
    if args.plot:
        _draw(resolved.recipe, result, longest, Path(args.plot), report)
    if result.fits is False:
        report.fail("DOES NOT FIT", DOES_NOT_FIT_EXIT_CODE)
    return result.to_json()


def _ranks(args: argparse.Namespace):
    """One rank's parallelism, or None. The trace and a step's picture follow one process alone."""
    from training.calculator import parallel
    from training.core.errors import UserError

    found = parallel.of_arguments(args.parallel, args.ranks)
    if found is not None and (args.trace or (args.plot and not args.sweep)):
        option = "--trace" if args.trace else "--plot"
        raise UserError("that follows one process alone", where=option, found=f"--ranks {args.ranks}",
                        expected="--ranks 1")  # fmt: skip
    return found


def _require_options(args: argparse.Namespace) -> None:
    """Raise UserError where an option would do nothing beside another, or alone."""
    apart = {"--solve": args.solve, "--trace": args.trace}
    idle = [
        (option, "beside --sweep", f"{option} or --sweep") for option, given in apart.items() if given and args.sweep
    ]
    if args.csv is not None and not args.sweep:
        idle.append(("--csv", "without --sweep", "--sweep KEY=V,V with it"))
    for option, found, expected in idle:
        raise UserError(f"{option} does nothing {found}", where=option, found=found, expected=expected)


def _trace(plan):
    """The recipe's step under fake tensors: the trainer's own, or the plain Hugging Face one."""
    say("tracing a step under fake tensors; it takes seconds, of billions of parameters half a minute")
    from training.calculator.trace import trace
    from training.engine.probe import TrainerProbe

    return trace(plan, TrainerProbe)


def _draw(recipe, result, longest, path: Path, report: Report) -> None:
    """The step that was traced, or where none was the replay of the one that was estimated."""
    from training.calculator import lengths, picture, replay
    from training.calculator.plan import Plan

    device = result.device
    on_gpu = device is not None and device.kind == "cuda"
    usable_bytes = device.usable_bytes - result.estimate.overhead[1].num_bytes if on_gpu else None
    shortened = lengths.shortened(recipe, longest)
    timeline = result.timeline or replay.timeline(Plan.of(shortened, gpu=device.name if device else None))
    title = f"{result.recipe_name}: a later step, {'traced' if result.timeline else 'replayed'}"
    picture.draw_step(timeline, path, title=title, usable_bytes=usable_bytes)
    report.add("picture", f"{path}: {picture.caption(timeline)}")


def _sweep(args: argparse.Namespace, report: Report, ranks) -> dict:
    from training.calculator import sweep

    texts = [text for group in args.sweep for text in group]
    cells = sweep.run(
        Path(args.config), args.overrides, texts, gpu=args.gpu, vram=args.vram, trace=_trace, parallel=ranks
    )
    width = max(len(cell.to_json()["overrides"]) for cell in cells)
    for cell in cells:
        row = cell.to_json()
        needed = format_bytes(row["device_bytes"])
        line = f"  {row['overrides']:<{width}}{needed:>12}  {row['verdict'] or 'unknown':<8}peak at {row['phase']}"
        say(line)
    if args.csv:
        files.write_text(Path(args.csv), sweep.to_csv(cells))
        report.add("written", args.csv)
    if args.plot:
        from training.calculator import picture

        picture.draw_sweep(cells, Path(args.plot))
        report.add("picture", args.plot)
    fitting = sum(cell.fit.fits is not False for cell in cells)
    report.add("rows", f"{len(cells)}, of which {fitting} fit" if cells[0].fit.device else len(cells))
    if fitting == 0:
        report.fail("NONE FITS", DOES_NOT_FIT_EXIT_CODE)
    return {"schema": 1, "rows": [cell.to_json() for cell in cells]}


# ---- for people


def _print_table(result) -> None:
    estimate = result.estimate
    winner, second = estimate.ranking[:2]
    say(f"{result.recipe_name}: the peak is at {winner.name}")
    peak_bytes = estimate.peak.device_bytes
    for term in (*winner.terms, *estimate.overhead):
        say(f"  {_row(term.name, term.num_bytes, peak_bytes)}  {term.equation}")
    say(f"  {_row('in all', peak_bytes, peak_bytes)}")
    say("moments of a step (tensors)")
    for instant in estimate.instants:
        mark = {winner.name: "  <- the peak", second.name: "  <- the next"}.get(instant.name, "")
        say(f"  {_row(instant.name, instant.num_bytes, peak_bytes)}{mark}")
    say("assumed")
    for line in estimate.assumptions:
        say(f"  - {line}")
    if result.levers and result.fits is not True:
        say("what would save memory")
    for lever in result.levers if result.fits is not True else ():
        fits = {True: ", fits", False: ", still too much", None: ""}[lever.fits]
        saved, then = format_bytes(lever.saved_bytes), format_bytes(lever.device_bytes)
        say(f"  {lever.override:<46} -{saved} = {then}{fits}; costs {lever.cost}")


def _row(name: str, num_bytes: int, whole_bytes: int) -> str:
    eighths = round(num_bytes / max(1, whole_bytes) * _BAR_CELLS * 8)
    bar = "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")
    return f"{name:<20}{format_bytes(num_bytes):>11}  {bar:<{_BAR_CELLS}}"


def _add_second_opinion(report: Report, result) -> None:
    from training.calculator import fit

    peak = result.other.peak
    held, device = format_bytes(peak.allocated_bytes), format_bytes(peak.device_bytes)
    report.add(
        result.other.method, f"{device} ({held} of tensors); the formula's tensors differ by {result.difference:+.2%}"
    )
    trusted = (
        "the formula: they agree"
        if abs(result.difference) <= fit.TRUSTED_DIFFERENCE
        else "the trace, which ran the code"
    )
    report.add("trusted", trusted)


def _fill(report: Report, result) -> None:
    from training.calculator import advice, history

    estimate, peak = result.estimate, result.estimate.peak
    adapters = "" if estimate.trainable == estimate.parameters else f", {format_count(estimate.trainable)} trained"
    report.add("recipe", f"{result.recipe_name}: {format_count(estimate.parameters)} parameters{adapters}")
    tensors, kept = format_bytes(peak.allocated_bytes), format_bytes(peak.reserved_bytes)
    report.add(
        "estimate", f"{format_bytes(peak.device_bytes)} ({tensors} of tensors, {kept} with the allocator's slack)"
    )
    if result.parallel:
        report.add("ranks", f"{result.parallel.ranks} under {result.parallel.kind}: the estimate is one rank's")
    if result.other is not None:
        _add_second_opinion(report, result)
    report.add("peak at", f"{peak.phase}; next {estimate.ranking[1].name}")
    if lever := advice.best(result.levers):
        saved = format_bytes(lever.saved_bytes)
        alone = "; by itself it is not enough" if result.fits is False and not lever.fits else ""
        report.add("lower it", f"{lever.override} saves {saved}; costs {lever.cost}{alone}")
    if result.device:
        usable, used = format_bytes(result.device.usable_bytes), format_bytes(result.device.used_bytes)
        total = format_bytes(result.device.total_bytes)
        name = f"{result.device.name} ({result.device.place})" if result.device.place else result.device.name
        report.add("device", f"{name}: {usable} usable of {total} ({used} in use, a margin kept)")
        if result.device.users:
            report.add("in use by", "\n".join(result.device.users))
    if result.record:
        report.add("on this machine", history.in_words(result.record))
    report.add("fits", {"fits": "yes", "tight": "yes, within the margin", "no": "no", None: "unknown"}[result.verdict])
    if result.solution:
        value = result.solution.value
        report.add("solve", f"{result.solution.to_json()['key']}={value}" if value else "nothing fits")
        report.add("because", result.solution.limit)
    if result.fits is False and lever:
        report.add("next", again(*lever.override.split()))
