"""What whole rounds need of the machine."""

from pathlib import Path

import pytest

from tests.conftest import REAL_CACHE
from training.core import paths


@pytest.fixture
def real_converter(own_roots: Path) -> Path:
    """The machine's own copy of the pinned llama.cpp in the test's cache; returns the data root."""
    source = REAL_CACHE / "llama.cpp"
    if not source.exists():
        pytest.fail("the pinned llama.cpp has not been fetched; next: make export-build")
    cache = paths.roots().cache
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "llama.cpp").symlink_to(source)
    return own_roots
