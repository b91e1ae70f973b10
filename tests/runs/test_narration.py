"""What events say to a person: no key, no list, and something for each that the engine writes."""

import re

import pytest

from training.core.paths import REPOSITORY
from training.runs import narration


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"event": "start", "total_steps": 10**9, "rows": 29, "seed": 3},
         "begins, as many steps as the time allows, 29 rows an epoch"),
        ({"event": "trial", "lengths": [256] * 29, "peak_bytes": 2 << 20, "estimate_bytes": None},
         "the longest batch takes 2.00 MiB at its peak"),
        ({"event": "plan", "total_steps": 2500, "planned_by": "hours", "seconds_per_step": 5.6568},
         "2,500 steps planned by stop.max_hours, a step takes 5.7 s"),
        ({"event": "compile", "compiled": False, "error": "no C++ compiler"}, "not compiled: no C++ compiler"),
        ({"event": "out_of_memory", "micro_batch": 1, "checkpointing": True, "error": "RuntimeError(...)"},
         "out of memory; goes on with micro-batches of 1, layers computed again in the backward pass"),
        ({"event": "record_skipped", "lines": list(range(20)), "error": ""},
         "left out for want of memory: lines 0, 1, 2, 3, 4, 5, 6, 7 and 12 more of the train split"),
        ({"event": "skipped", "lines": [7], "loss": "nan", "grad_norm": "nan"},
         "a step was not made: loss nan, gradient norm nan, of lines 7 of the train split"),
        ({"event": "restart", "number": 1, "stage": "step", "silent_seconds": 900},
         "the engine is started again (1), after 15 min 00 s of silence (step)"),
        ({"event": "end", "reason": "patience"}, "ends, by stop.patience"),
        ({"event": "of_another_version", "x": [1, 2]}, "of another version"),
        ({"event": "plan"}, "plan"),
    ],
    ids=lambda value: value["event"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_an_event_is_told_in_words(event: dict, words: str):
    assert narration.in_words(event) == words


def test_every_event_that_the_engine_writes_has_words():
    texts = (path.read_text() for path in (REPOSITORY / "training" / "engine").rglob("*.py"))
    written = {
        name for text in texts for name in re.findall(r"(?:events\.write|log\.write|on_event)\(\s*\"(\w+)\"", text)
    }
    assert {"start", "plan", "restart", "step"} <= written <= set(narration._WORDS)
