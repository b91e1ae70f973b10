"""The export image makes the very files that the host makes, K-quants too."""

import shutil
from pathlib import Path

import pytest

from tests.export.test_export import wide
from training.cli import main
from training.core import files, paths


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.usefixtures("quantiser")
def test_the_image_exports_the_hosts_bytes(make_folder, own_roots: Path, export_image: dict, monkeypatch, capfd):
    folder = paths.roots().models / "wide"
    shutil.copytree(wide(make_folder), folder)
    made = {}
    for runtime in ("docker", "local"):
        monkeypatch.setenv("RUNTIME", runtime)
        assert main(["export-gguf", str(folder), "--quant", "F16,Q6_K"]) == 0
        told, place = capfd.readouterr().err, paths.roots().models / "trained" / "wide"
        assert (f"runtime docker: {export_image['reference']}" in told) is (runtime == "docker")
        made[runtime] = {path.name: files.sha256_file(path) for path in place.glob("*.gguf")}
        assert "positions: max" in told and len(made[runtime]) == 2
        shutil.rmtree(place)
    assert made["docker"] == made["local"]
