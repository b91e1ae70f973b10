"""A tiny base with data, as a fixture."""

from pathlib import Path

import pytest

from tests.objectives.tiny import make_world


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `full.yaml`, `lora.yaml` and `qlora.yaml`, whose base and data are there."""
    return make_world(tmp_path, monkeypatch)
