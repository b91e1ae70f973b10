"""The quantiser's place: compiled once by the machine's compiler, held against its hash, never fetched."""

import shutil
from pathlib import Path

import pytest

from training.core import files
from training.core.errors import IntegrityError, MachineError, RunError
from training.llamacpp import quantize, source


@pytest.fixture(autouse=True)
def pinned_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "require_source", lambda pin=None: tmp_path / "source")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cmake that makes a tool which copies; returns the folder on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    cmake = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/told"
if [ "$1" = "--build" ]; then
  mkdir -p "$2/bin"; printf '#!/bin/sh\\necho "$@"; cp "$1" "$2"\\n' > "$2/bin/llama-quantize"; chmod +x "$2/bin/llama-quantize"
fi
"""  # noqa: E501
    for name, text in (("cmake", cmake), ("c++", "#!/bin/sh\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(shutil, "which", lambda name: str(folder / name) if (folder / name).is_file() else None)
    return folder


def test_it_is_compiled_once(compiler: Path):
    tool = quantize.build()
    assert quantize.build() == tool == quantize.require_tool() and tool.is_file()
    told = (compiler / "told").read_text()
    assert told.count("--build") == 1 and "-DGGML_NATIVE=OFF" in told and "-DLLAMA_USE_PREBUILT_UI=OFF" in told
    assert not (tool.parent / "build").exists()


def test_without_a_compiler_it_is_the_machines_fault(compiler: Path):
    (compiler / "c++").unlink()
    with pytest.raises(MachineError, match="cannot be compiled here") as failure:
        quantize.build()
    assert "no c++" in failure.value.found and failure.value.exit_code == 3


def test_a_compiler_that_fails_leaves_nothing(compiler: Path):
    (compiler / "cmake").write_text("#!/bin/sh\necho a line of the compiler; exit 1\n")
    with pytest.raises(MachineError, match="could not be compiled") as failure:
        quantize.build()
    assert "a line of the compiler" in failure.value.found
    with pytest.raises(MachineError, match="not on this machine") as failure:
        quantize.require_tool()
    assert failure.value.next_command == quantize.BUILD_COMMAND


def test_a_changed_tool_is_refused(compiler: Path):
    tool = quantize.build()
    tool.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(IntegrityError):
        quantize.require_tool()


def test_it_runs_in_the_files_folder_by_names_alone(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tool = quantize.build()
    work = tmp_path / "work"
    work.mkdir()
    (work / "F32.gguf").write_bytes(b"whole")
    quantize.run(work / "F32.gguf", work / "Q4_K_M.gguf", "Q4_K_M", threads=2)
    assert (work / "Q4_K_M.gguf").read_bytes() == b"whole"
    assert (work / "Q4_K_M.log").read_text() == "F32.gguf Q4_K_M.gguf Q4_K_M 2\n"
    with pytest.raises(RunError, match="failed"):
        quantize.run(work / "nothing.gguf", work / "x.gguf", "Q6_K", threads=1)
    monkeypatch.setattr(files, "free_bytes", lambda path: 0)
    with pytest.raises(MachineError, match="the disk is full"):
        quantize.run(work / "nothing.gguf", work / "x.gguf", "Q6_K", threads=1)
    assert tool.is_file()


def test_another_llama_cpp_counts_by_its_hash_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    other = tmp_path / "other"
    (other / "conversion").mkdir(parents=True)
    for name in ("convert_hf_to_gguf.py", "conversion/__init__.py"):
        (other / name).write_text("")
    with pytest.raises(IntegrityError, match="not the pinned one"):
        source.choose(str(other))
    chosen = source.choose(str(other), allow_unpinned=True)
    assert chosen.folder == other and not chosen.is_pinned
    monkeypatch.setenv("LLAMA_CPP_DIR", str(other))
    with pytest.raises(IntegrityError):
        source.choose()
    monkeypatch.delenv("LLAMA_CPP_DIR")
    assert source.choose().is_pinned
