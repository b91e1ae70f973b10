"""The source's cache on a small source distribution made here: fetched by pip from a folder, never from a network."""

import dataclasses
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from training.core import files, paths
from training.core.errors import IntegrityError, MachineError, UserError
from training.llamacpp import pin as pins
from training.llamacpp import source
from training.llamacpp.pin import Pin

TOP = "llama_cpp_python-0.0.1"
CONTENT = {
    "pyproject.toml": '[build-system]\nrequires = ["scikit-build-core"]\nbuild-backend = "scikit_build_core.build"\n',
    "setup.py": "raise SystemExit('code of the distribution has run')\n",
    "vendor/llama.cpp/convert_hf_to_gguf.py": "print('converter')\n",
    "vendor/llama.cpp/conversion/__init__.py": "TEXT_MODEL_MAP: dict[str, str] = {'LlamaForCausalLM': 'llama'}\n",
    "vendor/llama.cpp/gguf-py/gguf/__init__.py": "",
    "vendor/other/secret.txt": "not ours\n",
}


def make_sdist(folder: Path, extra: list[tarfile.TarInfo] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{TOP}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in CONTENT.items():
            member = tarfile.TarInfo(f"{TOP}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
        for member in extra:
            archive.addfile(member)
    return path


def make_pin(sdist: Path, tmp_path: Path) -> Pin:
    unpacked = tmp_path / "expected"
    for name, text in CONTENT.items():
        (unpacked / name).parent.mkdir(parents=True, exist_ok=True)
        (unpacked / name).write_text(text)
    return Pin(
        commit="1234567890" * 4, build="b1", licence="MIT", package="llama-cpp-python", version="0.0.1",
        sdist=sdist.name, sdist_sha256=files.sha256_file(sdist), subtree="vendor/llama.cpp",
        converter_sha256=pins.converter_hash(unpacked / "vendor/llama.cpp"),
    )  # fmt: skip


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pin:
    """A pin of its own, whose distribution is named as a local copy."""
    sdist = make_sdist(tmp_path / "index")
    monkeypatch.setenv("LLAMA_CPP_SDIST", str(sdist))
    return make_pin(sdist, tmp_path)


@pytest.fixture
def by_pip(local: Pin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pin:
    """The same, and it lies where pip looks; pip has no other place to look."""
    monkeypatch.delenv("LLAMA_CPP_SDIST")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return local


def _names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_pip_fetches_and_only_the_subtree_is_unpacked(by_pip: Pin):
    folder = source.ensure_source(by_pip)
    assert folder == paths.roots().cache / "llama.cpp" / "b1-123456789"
    inside = {name.removeprefix("vendor/llama.cpp/") for name in CONTENT if name.startswith("vendor/llama.cpp/")}
    assert _names(folder) == inside | {"manifest.json"}
    assert source.require_source(by_pip) == folder
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, "fetch.lock"}


def test_a_local_copy_needs_no_pip(local: Pin, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(source, "_download", lambda *_: pytest.fail("pip was called"))
    assert (source.ensure_source(local) / "convert_hf_to_gguf.py").is_file()


def test_without_the_source_the_machine_is_told_how_to_get_it(local: Pin):
    with pytest.raises(MachineError) as refusal:
        source.require_source(local)
    assert refusal.value.next_command == "make export-build" and refusal.value.exit_code == 3


def test_a_changed_converter_is_refused_and_heals(local: Pin):
    folder = source.ensure_source(local)
    target = folder / "conversion" / "__init__.py"
    good = target.read_bytes()
    target.write_text("import os\n")
    with pytest.raises(IntegrityError):
        source.require_source(local)
    assert (source.ensure_source(local) / "conversion" / "__init__.py").read_bytes() == good


def test_an_interrupted_unpacking_leaves_nothing_and_heals(local: Pin, monkeypatch: pytest.MonkeyPatch):
    def stop(*_: object):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(source, "_verify_converter", stop)
        with pytest.raises(KeyboardInterrupt):
            source.ensure_source(local)
    folder = source.folder_of(local)
    assert not folder.exists() and not list(folder.parent.glob("*.partial"))
    folder.mkdir()  # as a copy by hand would leave it, without the manifest
    (folder / "convert_hf_to_gguf.py").write_text("half")
    assert source.ensure_source(local) == folder
    assert (folder / "convert_hf_to_gguf.py").read_text() == "print('converter')\n"


def test_other_bytes_under_the_pinned_name_are_refused(by_pip: Pin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    other = make_sdist(tmp_path / "other", [tarfile.TarInfo(f"{TOP}/vendor/llama.cpp/extra")])
    monkeypatch.setenv("LLAMA_CPP_SDIST", str(other))
    with pytest.raises(IntegrityError, match="not the pinned"):
        source.ensure_source(by_pip)
    monkeypatch.delenv("LLAMA_CPP_SDIST")
    monkeypatch.setenv("PIP_FIND_LINKS", str(other.parent))
    with pytest.raises(IntegrityError, match="another file under the pinned name"):
        source.ensure_source(by_pip)
    assert not source.folder_of(by_pip).exists()


def test_an_index_without_it_is_the_machines_trouble(by_pip: Pin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(MachineError) as refusal:
        source.ensure_source(by_pip)
    assert "LLAMA_CPP_SDIST" in refusal.value.expected


def test_a_local_copy_that_is_not_there_is_the_users_error(local: Pin, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LLAMA_CPP_SDIST", "/nowhere/x.tar.gz")
    with pytest.raises(UserError):
        source.ensure_source(local)


def _link(name: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(f"{TOP}/vendor/llama.cpp/{name}")
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


@pytest.mark.parametrize(
    "member",
    [
        tarfile.TarInfo(f"{TOP}/vendor/llama.cpp/../../../escaped.txt"),
        tarfile.TarInfo(f"{TOP}/vendor/llama.cpp/a/../../../../../escaped.txt"),
        _link("link", "/etc/passwd"),
        _link("link", "../../../../outside"),
    ],
    ids=["parent steps", "deep parent steps", "absolute link", "link outside"],
)
def test_a_member_that_leaves_the_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member):
    sdist = make_sdist(tmp_path / "index", [member])
    monkeypatch.setenv("LLAMA_CPP_SDIST", str(sdist))
    with pytest.raises(IntegrityError, match="cannot be unpacked"):
        source.ensure_source(make_pin(sdist, tmp_path))
    assert not list(tmp_path.rglob("escaped.txt"))


def test_a_cut_distribution_is_refused(local: Pin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes((tmp_path / "index" / local.sdist).read_bytes()[:-40])
    monkeypatch.setenv("LLAMA_CPP_SDIST", str(cut))
    with pytest.raises(IntegrityError):
        source.ensure_source(local)


def test_two_at_once_fetch_once(by_pip: Pin, tmp_path: Path):
    code = (
        "import sys, json; from training.llamacpp import source; from training.llamacpp.pin import Pin\n"
        "print(source.ensure_source(Pin(**json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, json.dumps(dataclasses.asdict(by_pip))]
    both = [
        subprocess.Popen(command, cwd=paths.REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert results[0][0].splitlines()[-1] == results[1][0].splitlines()[-1] == str(source.folder_of(by_pip))
    assert sum("Saved" in error for _, error in results) == 1


# ---- which llama.cpp converts


@pytest.fixture
def pinned(local: Pin, monkeypatch: pytest.MonkeyPatch) -> Pin:
    """The pin of this file is the tool's; nothing is fetched, named or on PATH."""
    monkeypatch.setattr(pins, "load", lambda: local)
    monkeypatch.delenv("LLAMA_CPP_DIR", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return local


def _checkout(folder: Path, **changed: str) -> Path:
    """A llama.cpp of the user's own."""
    for name, text in CONTENT.items():
        path = folder / name.removeprefix("vendor/llama.cpp/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(changed.get(path.stem, text))
    (folder / "convert_hf_to_gguf.py").chmod(0o755)
    return folder


def test_the_fetched_one_comes_before_one_on_path_and_a_named_one_before_both(pinned: Pin, tmp_path: Path, monkeypatch):
    on_path, named, given = (_checkout(tmp_path / name) for name in ("on-path", "named", "given"))
    monkeypatch.setenv("PATH", f"{on_path}:/usr/bin:/bin")
    assert source.choose() == source.LlamaCpp(on_path, pinned.converter_sha256, is_pinned=True)
    fetched = source.ensure_source(pinned)
    assert source.choose().folder == fetched
    monkeypatch.setenv("LLAMA_CPP_DIR", str(named))
    assert source.choose().folder == named
    assert source.choose(str(given)).folder == given


@pytest.mark.parametrize("how", ["flag", "variable", "path"])
def test_another_converter_is_refused_until_it_is_allowed(pinned: Pin, tmp_path: Path, monkeypatch, how: str):
    other = _checkout(tmp_path / "other", convert_hf_to_gguf="print('another')\n")
    given = str(other) if how == "flag" else None
    if how == "variable":
        monkeypatch.setenv("LLAMA_CPP_DIR", str(other))
    elif how == "path":
        monkeypatch.setenv("PATH", f"{other}:/usr/bin:/bin")
    with pytest.raises(IntegrityError, match="not the pinned one") as refusal:
        source.choose(given)
    assert "--allow-unpinned" in refusal.value.expected
    taken = source.choose(given, allow_unpinned=True)
    assert taken == source.LlamaCpp(other, pins.converter_hash(other), is_pinned=False)


def test_a_folder_without_a_converter_and_a_machine_without_any_are_told(pinned: Pin, tmp_path: Path):
    with pytest.raises(UserError, match="with a converter"):
        source.choose(str(tmp_path))
    with pytest.raises(MachineError) as refusal:
        source.choose()
    assert refusal.value.next_command == "make export-build"
