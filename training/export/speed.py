"""How quick an export is beside the pinned converter by itself, on the 135 M base, and what memory it takes.

Both are processes of their own, start-up included; parity is a ratio of its own, over the same conversion. Nothing is
timed where the base is not fetched.
"""

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from training.core import paths
from training.core.log import say
from training.core.timing import Ratio, seconds
from training.export import proof
from training.export.checkpoint import Checkpoint, open_checkpoint
from training.llamacpp import convert, source
from training.recipe import bases

BASE, QUANT = "smollm2-135m-instruct", "Q8_0"
_POLL_SECONDS = 0.05
_BARE = (
    "import sys; sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[1:]; import convert_hf_to_gguf as one; "
    "from conversion.base import TextModel; TextModel.get_vocab_base_pre = lambda *_: 'smollm'; one.main()"
)
"""The converter as it stands; only the one look-up is answered that no re-made tokenizer passes."""


def run() -> tuple[Ratio, ...]:
    """Time conversions in turns, the better of two each, and a proof once."""
    if not bases.find(BASE).is_fetched:
        say(f"export is not timed: make base-fetch BASE={BASE}")
        return ()
    checkpoint = open_checkpoint(BASE)
    with tempfile.TemporaryDirectory(prefix="trainyard-", dir=paths.roots().data) as folder:
        work = Path(folder)
        rounds = [
            (*watched(lambda: _convert(checkpoint, work)), seconds(lambda: _convert_bare(checkpoint, work)))
            for _ in range(2)
        ]
        ours, peak_bytes, theirs = min(one[0] for one in rounds), rounds[0][1], min(one[2] for one in rounds)
        proving = seconds(lambda: _prove(checkpoint, work))
    size = sum(path.stat().st_size for path in checkpoint.weight_files)
    return (
        Ratio(f"export to {QUANT} over the pinned converter by itself", ours, theirs, size, peak_bytes),
        Ratio(f"proof of {QUANT} over its conversion", proving, ours),
    )


def _convert(checkpoint: Checkpoint, work: Path) -> None:
    staged = Path(tempfile.mkdtemp(dir=work))
    with convert.Conversion.start(
        checkpoint.folder, {QUANT: work / "ours.gguf"}, tokenizer=checkpoint.tokenizer_folder,
        pre_tokenizer=checkpoint.origin["tokenizer"]["pre_tokenizer"], add_bos=checkpoint.add_bos, name="bench",
        workspace=staged,
    ) as conversion:  # fmt: skip
        conversion.wait()


def _convert_bare(checkpoint: Checkpoint, work: Path) -> None:
    model = Path(tempfile.mkdtemp(dir=work))
    for path in checkpoint.folder.iterdir():
        (model / path.name).symlink_to(path)
    command = [sys.executable, "-c", _BARE, str(source.require_source()), str(model)]
    command += ["--outtype", QUANT.lower(), "--outfile", str(work / "theirs.gguf")]
    subprocess.run(command, check=True, capture_output=True)


def _prove(checkpoint: Checkpoint, work: Path) -> None:
    proof.Proof.prepare(checkpoint).run(work / "ours.gguf", QUANT, work)


def watched(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds of a call, and the most memory that its child processes held that cannot be given back at once."""
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(_POLL_SECONDS):
            peak = max(peak, sum(_private_bytes(child) for child in psutil.Process().children(recursive=True)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return seconds(work), peak
    finally:
        done.set()
        watcher.join()


def _private_bytes(process: psutil.Process) -> int:
    try:
        memory = process.memory_info()
        return memory.rss - memory.shared
    except psutil.Error:
        return 0
