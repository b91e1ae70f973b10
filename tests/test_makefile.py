"""The Makefile hands on what a person gives it as it stands: nothing in it is run, nothing in it is expanded."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from training.core import paths

MAKEFILE = paths.REPOSITORY / "Makefile"
GIVEN = re.search(r"^GIVEN := (.+)$", MAKEFILE.read_text(), flags=re.M)[1].split()
ODD = "$(shell touch pwned)$HOME `touch pwned` $$x ${PATH} 'a\" b\\"


def handed_on(name: str, folder: Path, words: list[str], environment: dict[str, str]) -> str:
    """What a recipe's shell finds in the variable."""
    probe = folder / "probe.mk"
    probe.write_text(f"probe: ; @$(if $({name}),printf '%s' \"$${name}\")\n")
    command = ["make", "--no-print-directory", "-f", str(MAKEFILE), "-f", str(probe), "probe", *words]
    done = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [*GIVEN, "DATA_ROOT", "LLAMA_CPU_MODEL"])
def test_a_variable_of_the_command_line_is_handed_on_as_it_stands(name: str, tmp_path: Path):
    assert handed_on(name, tmp_path, [f"{name}={ODD}"], {}) == ODD
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("name", GIVEN)
def test_a_variable_of_the_environment_is_handed_on_as_it_stands(name: str, tmp_path: Path):
    assert handed_on(name, tmp_path, [], {name: ODD}) == ODD
    assert not (tmp_path / "pwned").exists()


def test_every_variable_that_a_recipe_reads_from_the_shell_is_handed_on():
    read = set(re.findall(r'"\$\$([A-Z_]+)"', MAKEFILE.read_text()))
    assert read and read <= set(GIVEN)


@pytest.mark.parametrize("target", re.findall(r"^([a-z-]+): setup .*\n\t\$\(call need,", MAKEFILE.read_text(), re.M))
def test_a_target_that_lacks_its_variable_ends_in_a_report_block_with_an_example(target: str, tmp_path: Path):
    words = ["make", "--no-print-directory", "-o", "setup", target]
    done = subprocess.run(words, cwd=paths.REPOSITORY, capture_output=True, text=True, env=_without(GIVEN))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"command  make {target}\n" in done.stderr and "verdict  FAIL (exit 2)" in done.stderr, done.stderr
    example = re.search(rf"next +make {target} .*(?:{'|'.join(GIVEN)})=", done.stderr)
    assert example and "--- end of report ---" in done.stderr, done.stderr


def _without(names: list[str]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in [*names, "ARGS"]}


def test_an_extra_is_installed_by_its_own_lock_file_beside_what_is_there(tmp_path: Path):
    """Its packages alone, their hashes held; what is no extra, or no whole environment, is told."""
    (tmp_path / "docker").mkdir()
    (tmp_path / "Makefile").write_bytes(MAKEFILE.read_bytes())
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("docker/cpu.lock", "docker/trl.lock"):
        (tmp_path / name).write_bytes((paths.REPOSITORY / name).read_bytes())
    (tmp_path / ".venv" / "installed.lock").write_bytes((tmp_path / "docker" / "cpu.lock").read_bytes())
    pip = tmp_path / ".venv" / "bin" / "pip"
    pip.write_text('#!/bin/sh\necho "$@" > asked\ntest -f "$(echo "$@" | sed "s/.* //")"\n')
    pip.chmod(0o755)

    def setup(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["make", "--no-print-directory", "setup", *words], cwd=tmp_path, capture_output=True, text=True
        )

    assert setup("LOCK=cpu").returncode == 0 and not (tmp_path / "asked").exists()
    assert setup("LOCK=cpu", "EXTRA=trl").returncode == 0
    asked = (tmp_path / "asked").read_text()
    assert "--no-deps --require-hashes -r docker/trl.lock" in asked
    done = setup("LOCK=cpu", "EXTRA=nothing")
    assert done.returncode != 0 and "EXTRA=nothing could not be installed" in done.stderr
    done = setup("LOCK=trl")
    assert done.returncode != 0 and "no whole environment" in done.stderr and pip.exists()
