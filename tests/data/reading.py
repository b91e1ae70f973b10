"""What a source gives, as a test holds it against what it should be."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from training.data.reading import REJECTED, SPOOL, Reading
from training.data.settings import Settings
from training.data.source import Jsonl, Source


@dataclass(frozen=True)
class Found:
    """Records in order, and what was counted."""

    values: list[dict]
    text_bytes: list[int]
    faults: list[dict]
    rejected: dict[str, int]
    lines: dict[str, int]

    @property
    def texts(self) -> list[str]:
        return [value["text"] for value in self.values]


def command(_: Settings, *options: str) -> str:
    return f'make data-prepare INPUT=x ARGS="{" ".join(options)}"'


def read(*sources: Path | Source, workers: int = 0, **settings) -> Found:
    """Read sources under settings; raises what the reading raises."""
    inputs = [Jsonl(one) if isinstance(one, Path) else one for one in sources]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = Reading(inputs, Settings(**settings), None, folder, command, workers).run()
        values = [json.loads(line) for line in (folder / SPOOL).read_bytes().splitlines()]
        faults = [json.loads(line) for line in (folder / REJECTED).read_text().splitlines()]
        lines = {name: count for name, count in found.lines.items() if count}
        return Found(values, found.ledger.column("text_bytes").tolist(), faults, dict(found.rejected_by_rule), lines)
