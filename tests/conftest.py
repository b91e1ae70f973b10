"""Every test has a data root and a cache of its own, and no report of a test reaches the real logs."""

import os
from pathlib import Path

import pytest

from training.core import paths

REAL_CACHE = paths.roots().cache


@pytest.fixture(autouse=True)
def own_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point DATA_ROOT and TRAINYARD_CACHE into the test's own folder; returns the data root."""
    data = tmp_path / "data"
    monkeypatch.setenv("DATA_ROOT", str(data))
    monkeypatch.setenv("TRAINYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RUNTIME", "local")
    for name in ("MAKELEVEL", "MAKEFLAGS"):
        monkeypatch.delenv(name, raising=False)
    return data


@pytest.fixture(autouse=True)
def own_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the reports of commands that run inside the test's process in its own folder."""
    from training.core.report import Report

    keep = Report.publish
    monkeypatch.setattr(Report, "publish", lambda self, folder=tmp_path / "reports": keep(self, folder))


def pytest_configure() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
