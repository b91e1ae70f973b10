"""Packages by their versions, and which of them a machine lacks."""

import pytest

from training.core import version


@pytest.mark.parametrize(("on_gpu", "missing"), [(True, ["peft", "triton"]), (False, ["peft"])])
def test_a_cpu_needs_no_triton(on_gpu: bool, missing: list[str]):
    found = dict.fromkeys(version.PACKAGES, "1.0") | {"triton": None, "peft": None}
    assert version.missing(found, on_gpu=on_gpu) == missing
