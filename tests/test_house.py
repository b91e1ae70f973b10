"""The house rules that a machine can check: which room imports which, what start-up loads, how long a file is."""

import ast
import re
import shlex
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


# ---- what an error names next


PROGRAMS = {
    "make", "docker", "sudo", ".venv/bin/pip", "python", "head", "mv", "rm", "unset", "nvidia-smi", "ps", "df", "free",
    "ls", "cp", "curl", "zstd", "ollama", "export", "sed", "${EDITOR:-vi}",
}  # fmt: skip
OF_SENTENCES = {"a", "again", "an", "and", "for", "or", "tells", "the", "then", "which", "with", "without"}
PLACEHOLDER = re.compile(r"\.\.\.|\b(DIR|FILE|NAME|name@hash)\b|=name\b|\brun-id\b")
NEXT = {"next_command", "way_out"}


def _next_commands(path: Path) -> list[tuple[int, str]]:
    """Line and text of what a source names next, as far as it stands there; what is filled in is an `X`."""
    tree = ast.parse(path.read_text())
    constants = {
        target.id: node.value for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
        if isinstance(target, ast.Name)
    }  # fmt: skip
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in NEXT:
            found += _texts(node.value, constants)
        elif isinstance(node, ast.Call) and len(node.args) == 2 and getattr(node.args[0], "value", None) == "next":
            found += _texts(node.args[1], constants)
        elif isinstance(node, ast.FunctionDef) and node.name == "_next":
            returned = (one.value for one in ast.walk(node) if isinstance(one, ast.Return))
            found += [text for value in returned for text in _texts(value, constants)]
    return found


def _texts(node: ast.expr, constants: dict[str, ast.expr]) -> list[tuple[int, str]]:
    if isinstance(node, ast.IfExp):
        return _texts(node.body, constants) + _texts(node.orelse, constants)
    if isinstance(node, ast.BoolOp):
        return [text for value in node.values for text in _texts(value, constants)]
    if isinstance(node, ast.BinOp):
        return _texts(node.left, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return _texts(constants[node.id], constants)
    if isinstance(node, ast.Constant) and node.value is not None:
        return [(node.lineno, node.value)]
    if isinstance(node, ast.JoinedStr):
        return [(node.lineno, "".join(one.value if isinstance(one, ast.Constant) else "X" for one in node.values))]
    return []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_is_named_next_is_a_command_to_paste(path: Path):
    for line, text in _next_commands(path):
        words = shlex.split(text)
        program = next(word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word))
        assert program in PROGRAMS or program.startswith("X"), f"{path}:{line}: {text}"
        assert not OF_SENTENCES & set(words) and not PLACEHOLDER.search(text), f"{path}:{line}: {text}"
        assert not any(word.endswith((",", ";", ":")) for word in words), f"{path}:{line}: {text}"
        of_make = words[words.index(program) + 2 :] if program == "make" and "&&" not in words else []
        assert all(re.match("[A-Z_]+=", word) for word in of_make), f"{path}:{line}: {text}"
