"""The pinned llama.cpp's own quantiser: compiled once on this machine, and run.

Owns where it lies and that it is the pin's: the export image brings it compiled from the same source, elsewhere
`build` compiles it with the machine's compiler into the cache, and its bytes are held against a manifest at every use.
Nothing is fetched for it. Its output is the same with any number of threads.
Source: llama.cpp `tools/quantize/quantize.cpp`.
"""

import functools
import logging
import os
import shutil
import subprocess
from pathlib import Path

from training.core import files, locks, process
from training.core.errors import MachineError, RunError
from training.llamacpp import pin as pins
from training.llamacpp import source as sources
from training.llamacpp.pin import Pin

TOOL = "llama-quantize"
K_QUANTS = ("Q4_K_M", "Q5_K_M", "Q6_K")
KIND = "llama.cpp tools"
BUILD_COMMAND = "make export-build ARGS=--quantizer"
_BUILD_BYTES = 400 << 20
# As docker/export.Dockerfile has them: nothing is tuned to this processor and nothing is fetched; -O1 for what only
# moves data about, the quantising loops are C and keep -O3.
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG", "-DBUILD_SHARED_LIBS=OFF",
    "-DCMAKE_EXE_LINKER_FLAGS=-static-libstdc++", "-DGGML_NATIVE=OFF", "-DGGML_OPENMP=OFF", "-DGGML_LLAMAFILE=OFF",
    "-DGGML_CPU_REPACK=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF",
)  # fmt: skip
_logger = logging.getLogger(__name__)


def _folder(pin: Pin) -> Path:
    source = sources.folder_of(pin)
    return source.with_name(f"{source.name}-tools")


def require_tool(pin: Pin | None = None) -> Path:
    """The quantiser of the pin. Raises MachineError where it is not on this machine, IntegrityError where changed."""
    pin = pin or pins.load()
    folder = _folder(pin)
    if (folder / files.MANIFEST).is_file():
        files.verify_manifest(folder, KIND)
        return folder / TOOL
    in_image = sources.folder_of(pin).parent.parent / TOOL
    if in_image.is_file() and str(sources.folder_of(pin)).startswith("/app/"):
        return in_image
    raise MachineError(
        "llama.cpp's quantiser is not on this machine", where=folder, found=f"no {TOOL}",
        expected=f"{TOOL} of llama.cpp {pin.name}, compiled once", next_command=BUILD_COMMAND,
    )  # fmt: skip


def build(pin: Pin | None = None) -> Path:
    """Compile the quantiser from the pinned source, once, and return it. Raises MachineError without a compiler."""
    pin = pin or pins.load()
    source, folder = sources.require_source(pin), _folder(pin)
    with locks.hold(folder.parent / "fetch.lock", sources.FETCH_COMMAND, resource="the cache of llama.cpp's tools"):
        if (folder / files.MANIFEST).is_file():
            return require_tool(pin)
        if missing := [name for name in ("cmake", "c++") if shutil.which(name) is None]:
            raise MachineError(
                "llama.cpp's quantiser cannot be compiled here", where="PATH", found=f"no {', no '.join(missing)}",
                expected="cmake and a C++ compiler, or a container engine",
                next_command=f"sudo apt-get install {' '.join(missing).replace('c++', 'g++')} && {BUILD_COMMAND}",
            )  # fmt: skip
        files.require_space(folder, _BUILD_BYTES, "compiling llama.cpp's quantiser")
        with files.atomic_folder(folder) as unpacked:
            _compile(source, unpacked, pin)
            body = {**pin.to_json(), "options": list(_OPTIONS)}
            files.write_manifest(unpacked, KIND, body, [TOOL])
    return require_tool(pin)


def _compile(source: Path, folder: Path, pin: Pin) -> None:
    work, log = folder / "build", folder / "build.log"
    number, commit = pin.build.removeprefix("b"), pin.name.partition("-")[2]
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    named = [f"-DLLAMA_BUILD_NUMBER={number}", f"-DLLAMA_BUILD_COMMIT={commit}"]
    threads = str(len(os.sched_getaffinity(0)))
    _logger.info("compiling %s of llama.cpp %s; some minutes, once", TOOL, pin.name)
    for command in (
        ["cmake", "-S", str(source), "-B", str(work), *generator, *_OPTIONS, *named],
        ["cmake", "--build", str(work), "--target", TOOL, "-j", threads],
    ):
        with open(log, "ab") as output:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        if done.returncode:
            raise MachineError(
                "llama.cpp's quantiser could not be compiled", where=command[0], found=sources.last_lines(log),
                expected="a compiler for C++17", next_command=BUILD_COMMAND,
            )  # fmt: skip
    shutil.copy2(work / "bin" / TOOL, folder / TOOL)
    shutil.rmtree(work)


def run(whole: Path, output: Path, quant: str, *, threads: int, importance: Path | None = None) -> None:
    """Quantise a GGUF of high precision to another file in the same folder.

    Args:
        importance: an importance matrix in the same folder. Names are given without their folder, since the tool writes
            them into the file.

    Raises RunError with the tool's last lines where it fails, MachineError where that is for want of space.
    """
    tool, log = require_tool(), output.with_suffix(".log")
    matrix = [] if importance is None else ["--imatrix", importance.name]
    command = [str(tool), *matrix, whole.name, output.name, quant, str(threads)]
    with open(log, "wb") as lines:
        child = subprocess.Popen(
            command, cwd=whole.parent, stdin=subprocess.DEVNULL, stdout=lines, stderr=subprocess.STDOUT,
            env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8"},
            preexec_fn=functools.partial(process.end_with, os.getpid()),
        )  # fmt: skip
        try:
            status = child.wait()
        finally:
            child.kill()
            child.wait()
    if status:
        files.refuse_full_disk(output)
        raise RunError(
            f"{TOOL} failed", where=f"{whole.name} to {quant}", found=sources.last_lines(log),
            expected="a quantised file",
        )  # fmt: skip
