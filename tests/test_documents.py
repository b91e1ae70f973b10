"""The documents stay true: every command in them is run, every link leads somewhere, the tree is the tree."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REAL_CACHE, remove_images
from tests.engine.conftest import make_records
from training.cli import COMMANDS
from training.containers import image
from training.core.paths import REPOSITORY
from training.llamacpp.server import free_port

PAGES = sorted(
    [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "recipes").rglob("*.md")]
)
SHORT_DEMO = ["--port {port}", "stop.max_steps=12", "evaluate.every_steps=6", "evaluate.records=4"]
NOT_AGAIN = "make test"
"""Shown in a document and not run here: the test command would run itself."""


def blocks(page: Path, language: str) -> list[list[str]]:
    """The lines of each fenced block of a language (`""` for those without one)."""
    found, opened = [], None
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            if opened is None:
                opened = line[3:].strip()
                found.append((opened, []))
            else:
                opened = None
        elif opened is not None:
            found[-1][1].append(line)
    return [lines for name, lines in found if name == language]


def commands(page: Path, language: str = "sh") -> list[str]:
    """The lines of a page's `sh` blocks (`sh docker`: those that need an engine), comments apart."""
    lines = (line.strip() for block in blocks(page, language) for line in block)
    return [line for line in lines if line and not line.startswith("#")]


def makefile_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (REPOSITORY / "Makefile").read_text(), flags=re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_target_that_is_named_exists(page: Path):
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]+)", page.read_text(), flags=re.M))
    assert named <= makefile_targets()


def test_every_command_has_a_target_and_the_help_shows_it():
    text = subprocess.run(["make"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    shown = set(re.findall(r"^  make ([a-z-]+)", text, flags=re.M))
    assert {name for group in COMMANDS.values() for name in group} <= shown
    assert shown == makefile_targets() - {"venv"}


def test_the_tree_in_the_readme_names_what_exists():
    block = blocks(REPOSITORY / "README.md", "")[-1]
    folders: list[str] = []
    for line in block:
        name = line.strip().split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[:depth], name]
        assert (REPOSITORY / "/".join(part.rstrip("/") for part in folders)).exists(), line
    top = {path.name for path in (REPOSITORY / "training").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert top <= set(re.findall(r"^  ([a-z]+)/", "\n".join(block), flags=re.M))


def make_conversations(path: Path, count: int = 120) -> None:
    """Write JSONL of conversations with one answer or two, from two sources, each in a group of its own."""
    answers = [f"{number} * 7 is {number * 7}." for number in range(count)]
    records = (
        {"messages": [_said("user", f"What is {number} times 7?"), _said("assistant", answer),
                      *([_said("user", "Say it again."), _said("assistant", answer)] if number % 3 == 0 else [])],
         "source": f"sums-{number % 2}", "group": str(number)}
        for number, answer in enumerate(answers)
    )  # fmt: skip
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _said(role: str, content: str) -> dict:
    return {"role": role, "content": content}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A clone's worth of files to run in, with a data root of its own and the machine's own cache of llama.cpp."""
    root = tmp_path_factory.mktemp("documents")
    work = root / "work"
    work.mkdir()
    for name in ("Makefile", "compose.yaml", "training", "recipes", "docker", "logs", "pyproject.toml"):
        source = REPOSITORY / name
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, work / name)
    (work / ".venv").symlink_to(REPOSITORY / ".venv")
    make_records(work / "my.jsonl", 120)
    make_conversations(work / "chat.jsonl")
    (work / "exam.jsonl").write_text('{"question": "What is 3 times 7?"}\n')
    (root / "cache").mkdir()
    if (REAL_CACHE / "llama.cpp").exists():
        (root / "cache" / "llama.cpp").symlink_to(REAL_CACHE / "llama.cpp")
    port = str(free_port())
    return {
        "WORK": str(work),
        "DATA_ROOT": str(root / "data"),
        "TRAINYARD_CACHE": str(root / "cache"),
        "TRAINYARD_PORT": port,
        "TRAINYARD_TAG": f"test-documents-{image.checkout()}",
        "LLAMA_CPU_PORT": str(free_port()),
    }


def run(command: str, workplace: dict[str, str]) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    environment |= {name: workplace[name] for name in workplace if name != "WORK"}
    return subprocess.run(
        ["bash", "-c", command], cwd=workplace["WORK"], env=environment, capture_output=True, text=True, timeout=900
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_command_that_a_page_shows_runs(page: Path, workplace: dict[str, str]):
    """In the page's order, as typed; `make demo` with fewer steps."""
    shown = [command for command in commands(page) if not command.startswith(NOT_AGAIN)]
    for command in shown:
        if command.startswith("make demo"):
            command = f"make demo ARGS='{' '.join(SHORT_DEMO)}'".format(port=free_port())
        done = run(command, workplace)
        assert done.returncode == 0, f"{page.name}: {command}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page, "sh docker")], ids=lambda page: page.name)
def test_every_command_that_a_page_shows_for_an_engine_runs(page: Path, workplace: dict[str, str]):
    try:
        for command in commands(page, "sh docker"):
            done = run(command, workplace)
            assert done.returncode == 0, f"{page.name}: {command}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    finally:
        run('docker compose --project-name "$COMPOSE_PROJECT_NAME" down --timeout 5', workplace)
        remove_images(workplace["TRAINYARD_TAG"])


@pytest.mark.parametrize(
    "name", ["`touch pwned`", "$(touch pwned)", "$(shell touch pwned)", "a'b", 'a"b', "a b"], ids=repr
)
def test_a_name_is_never_read_as_a_command(name: str, workplace: dict[str, str]):
    """make hands a variable's value on as it is: what is wrong with it is told by the command."""
    environment = os.environ | {key: workplace[key] for key in ("DATA_ROOT", "TRAINYARD_CACHE")}
    make = ["make", "verify", f"MODEL={name}"]
    done = subprocess.run(make, cwd=workplace["WORK"], env=environment, capture_output=True, text=True)
    assert "--- end of report ---" in done.stderr and "exit 2" in done.stderr, done.stderr
    assert not (Path(workplace["WORK"]) / "pwned").exists()
