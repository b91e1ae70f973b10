"""Who teaches, and whether student and teacher mean the same tokens by the same ids.

A teacher is a base by its name, a run or a checkpoint with whole weights, a Hugging Face folder, a GGUF file, or a
llama.cpp server by its URL whose file lies on this machine. Owns what identifies it; what it says is `teacher_model`'s
or `teacher_server`'s.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from training.core import files, paths
from training.core.errors import IntegrityError, UserError
from training.core.units import format_bytes
from training.llamacpp import gguf_header
from training.llamacpp.client import Client
from training.llamacpp.server import ServerProcess
from training.objectives import adapter_source
from training.objectives.added_rows import entries_of
from training.objectives.teaching import Identity
from training.recipe import bases
from training.runs.folder import resolve_checkpoint
from training.tokenizer.artifact import TOKENIZER, Tokenizer

_TOKENS = "tokenizer.ggml.tokens"
_HEALTH_SECONDS = 180.0


@dataclass(frozen=True)
class Teacher:
    """A teacher: its weights (a Hugging Face folder or a GGUF file), and a running server of them, where there is one.

    Args:
        url: of a server that has the file loaded; None where the weights are opened here.
    """

    name: str
    weights: Path
    url: str | None = None

    @property
    def is_gguf(self) -> bool:
        return self.weights.suffix == ".gguf"

    def identity(self, precision: str) -> Identity:
        """Hash the weights. `precision` is the type that a Hugging Face folder computes in."""
        if self.is_gguf:
            return Identity(self.name, files.sha256_file(self.weights), "gguf", "as the file has it")
        parts = ["config.json", *sorted(path.name for path in self.weights.glob("*.safetensors"))]
        digest = files.sha256_json({name: files.sha256_file(self.weights / name) for name in parts})
        return Identity(self.name, digest, "huggingface", precision)

    def require_same_ids(self, student: Tokenizer) -> None:
        """Raise UserError unless every id of the student's tokenizer is the same token of the teacher's, and no more.

        A GGUF file may pad its list behind the last token.
        """
        theirs, own = self._entries(student), entries_of(student.folder)
        if self.is_gguf:
            theirs = {text: i for text, i in theirs.items() if not (text == f"[PAD{i}]" and i >= student.vocab_size)}
        wrong = sorted(theirs.items() ^ own.items(), key=lambda entry: entry[1])
        if wrong:
            text, index = wrong[0]
            raise UserError(
                "teacher and student do not mean the same tokens", where=self.weights,
                found=f"{len(wrong)} entries that one of them lacks or has elsewhere, such as {text!r} at {index}",
                expected=f"the {len(own)} entries of {student.name} at the same ids, as its own teachers have them",
            )  # fmt: skip

    def _entries(self, student: Tokenizer) -> dict[str, int]:
        if self.is_gguf:
            return {text: index for index, text in enumerate(gguf_header.read(self.weights).value(_TOKENS))}
        if not (self.weights / TOKENIZER).is_file():
            raise UserError(
                "the teacher has no tokenizer to compare", where=self.weights, found=f"no {TOKENIZER}",
                expected=f"the tokenizer.json of {student.name} beside the weights",
            )  # fmt: skip
        return entries_of(self.weights)

    @contextlib.contextmanager
    def served(self, ctx_size: int, log: Path) -> Iterator[Client]:
        """Yield a client of the server that has the file loaded: the one that runs, else a private one."""
        if self.url is not None:
            yield Client(self.url)
            return
        with ServerProcess.start(self.weights, log=log, ctx_size=ctx_size) as server:
            server.wait_healthy(_HEALTH_SECONDS)
            yield Client(server.url)


def find(text: str) -> Teacher:
    """The teacher that a word means. Raises UserError, IntegrityError where its bytes have changed."""
    if re.match(r"https?://", text):
        return _of_server(text)
    path = paths.host_path(text)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError("no such file", where=path, found="nothing", expected="a GGUF file")
        return Teacher(path.stem, path.absolute())
    if not (path / "config.json").is_file():
        if os.sep not in text and text in bases.load():
            bases.find(text).require()
            return Teacher(text, bases.find(text).folder)
        path = resolve_checkpoint(text)
        files.verify_manifest(path, "checkpoint")
    return _of_folder(path.absolute())


def _of_folder(path: Path) -> Teacher:
    if not list(path.glob("*.safetensors")) or (path / adapter_source.SETTINGS).is_file():
        raise UserError(
            "a teacher has whole weights", where=path, found="an adapter" if path.is_dir() else "nothing",
            expected="config.json and safetensors of a whole model, or a GGUF file",
        )  # fmt: skip
    is_step = path.parent.name == "checkpoints"
    return Teacher(f"{path.parents[1].name}-{path.name}" if is_step else path.name, path)


def _of_server(url: str) -> Teacher:
    """The teacher that a server has loaded, by its file. Raises where the file is not here, or is another."""
    info = Client(url).model_info()
    file = paths.host_path(str(info["path"]))
    if not file.is_file():
        raise UserError(
            "the server's file is not on this machine, so the teacher cannot be told by its hash", where=url,
            found=info["path"], expected="a file that is here, as the server names it or under /app/models",
        )  # fmt: skip
    size = info["size_bytes"]
    if size is not None and size > file.stat().st_size:
        raise IntegrityError(
            "the server has loaded another file than lies there", where=file,
            found=format_bytes(file.stat().st_size), expected=f"at least the {format_bytes(size)} of its tensors",
        )  # fmt: skip
    return Teacher(file.stem, file, url)
