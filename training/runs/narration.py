"""What an event of a run says to a person; `events.jsonl` and `--json` keep all of it."""

from collections.abc import Callable

from training.core.units import format_bytes, format_seconds
from training.runs.course import UNLIMITED_STEPS

_MOST_LINES = 8


def in_words(event: dict) -> str:
    """An event without its step, such as `the engine is started again (1), after 15 min 00 s of silence`."""
    try:
        return _WORDS[event["event"]](event)
    except (KeyError, TypeError, ValueError):  # of another version, or damaged
        return event["event"].replace("_", " ")


def _start(event: dict) -> str:
    steps, rows = event["total_steps"], event.get("rows")
    planned = "as many steps as the time allows" if steps >= UNLIMITED_STEPS else f"{steps:,} steps planned"
    return f"begins, {planned}" + (f", {rows:,} rows an epoch" if rows else "")


def _trial(event: dict) -> str:
    estimate = event.get("estimate_bytes")
    told = f", of {format_bytes(estimate)} estimated" if estimate else ""
    return f"the longest batch takes {format_bytes(event['peak_bytes'])} at its peak{told}"


def _plan(event: dict) -> str:
    each = event.get("seconds_per_step")
    told = f", a step takes {format_seconds(each)}" if each else ""
    return f"{event['total_steps']:,} steps planned by {limit(event['planned_by'])}{told}"


def limit(reason: str) -> str:
    """The recipe's key that plans or ends a run for a reason: `steps`, `epochs`, `hours` or `patience`."""
    return "stop.patience" if reason == "patience" else f"stop.max_{reason}"


def _compile(event: dict) -> str:
    choice = "compiled" if event["compiled"] else "not compiled"
    if "error" in event:
        return f"{choice}: {event['error']}"
    return (
        f"{choice}: the longest rows take {event['compiled_seconds']:g} s compiled, {event['plain_seconds']:g} s plain"
    )


def _out_of_memory(event: dict) -> str:
    again = ", layers computed again in the backward pass" if event["checkpointing"] else ""
    return f"out of memory; goes on with micro-batches of {event['micro_batch']}{again}"


def _skipped(event: dict) -> str:
    of = f", of {_lines(event)} of the train split" if event["lines"] else ""
    return f"a step was not made: loss {event['loss']}, gradient norm {event['grad_norm']}{of}"


def _lines(event: dict) -> str:
    lines = event["lines"]
    more = f" and {len(lines) - _MOST_LINES} more" if len(lines) > _MOST_LINES else ""
    return f"lines {', '.join(map(str, lines[:_MOST_LINES]))}{more}"


_WORDS: dict[str, Callable[[dict], str]] = {
    "start": _start, "trial": _trial, "plan": _plan, "compile": _compile, "out_of_memory": _out_of_memory,
    "skipped": _skipped,
    "validation": lambda event: f"validation {event['eval/loss_nats']:.4f} nats"
    + (", the best so far" if event["best"] else ""),
    "step": lambda event: f"loss {event['train/loss_nats']:.4f} nats, "
    f"{event['speed/tokens_per_second']:,.0f} tokens/s, peak {format_bytes(event['memory/peak_bytes'])}",
    "selftest": lambda event: "the GPU computes what the processor does",
    "record_skipped": lambda event: f"left out for want of memory: {_lines(event)} of the train split",
    "resume": lambda event: f"goes on from {event['checkpoint']}",
    "restart": lambda event: f"the engine is started again ({event['number']}), after "
    f"{format_seconds(event['silent_seconds'])} of silence ({event['stage']})",
    "end": lambda event: f"ends, by {limit(event['reason'])}",
    "paused": lambda event: "stops on request, saved",
    "cancelled": lambda event: "stops on request, nothing saved",
}  # fmt: skip
