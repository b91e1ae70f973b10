"""The house rules that a machine can check: which room imports which, what start-up loads, how long a file is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from training.cli import COMMANDS
from training.core.paths import REPOSITORY

ROOMS = (
    "cli", "commands", "rounds", "serving", "containers", "export", "evaluation", "engine", "objectives", "data",
    "tokenizer", "llamacpp", "calculator", "runs", "recipe", "core",
)  # fmt: skip
HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "xllamacpp", "requests", "docker", "gguf")
PACKAGE = REPOSITORY / "training"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def _room(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def _imported_rooms(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "training":
            names |= {f"training.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module)
    return {name.split(".")[1] for name in names if name.startswith("training.")} - {"__version__"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_from_its_right(path: Path):
    room = _room(path)
    if room in ("__init__", "__main__"):
        return
    allowed = set(ROOMS[ROOMS.index(room) :])
    assert _imported_rooms(path) <= allowed


def test_every_room_is_in_the_order():
    rooms = {_room(path) for path in SOURCES} - {"__init__", "__main__"}
    assert rooms == set(ROOMS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_is_read_in_one_sitting(path: Path):
    assert len(path.read_text().splitlines()) <= 400
    assert path.stem not in ("utils", "helpers", "common", "misc", "manager")


@pytest.mark.parametrize("arguments", [["--help"], ["memfit", "--help"], ["runs"]], ids=" ".join)
def test_start_up_loads_nothing_heavy(arguments: list[str]):
    code = (
        "import sys; from training.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=REPOSITORY)
    assert run.stderr.strip().splitlines()[-1] == "[]"


def test_every_command_has_a_file_and_every_file_a_command():
    listed = {name.replace("-", "_") for group in COMMANDS.values() for name in group}
    assert listed == {path.stem for path in (PACKAGE / "commands").glob("*.py")} - {"__init__"}
