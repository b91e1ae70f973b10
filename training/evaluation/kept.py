"""Measurements kept by identity, `$DATA_ROOT/training/evaluations/<hash>.json`: none is made twice.

One file is one measurement of one model on one paper, with every role that it was asked for in (`asked`): an exam, or a
guard set beside another exam. A file that is damaged, or of another schema, counts as none. What an unfinished one
has so far lies in `<hash>.partial.jsonl` and is gone on with.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

from training.core import files, paths
from training.core.errors import IntegrityError
from training.evaluation.conditions import Identity

KIND, SCHEMA = "measurement", 2
EXAM, GUARD = "exam", "guard"
"""The roles of measurements that are no split's."""


def folder() -> Path:
    return paths.roots().data / "training" / "evaluations"


def path_of(identity: Identity) -> Path:
    return folder() / f"{files.short(identity.sha256)}.json"


def find(identity: Identity) -> dict | None:
    """The finished measurement of an identity, if there is one."""
    found = read(path_of(identity))
    return found if found and found["identity"] == identity.to_json() else None


def read(path: Path) -> dict | None:
    """A kept measurement; None where there is none, or its bytes are not what was written."""
    try:
        found = files.read_json(path)
    except IntegrityError:
        return None
    is_one = (found.get("kind"), found.get("schema")) == (KIND, SCHEMA)
    return found if is_one and files.is_sealed(found) else None


def write(identity: Identity, body: dict, role: str, reference: str | None = None, config: str | None = None) -> dict:
    """Keep a finished measurement, with a hash over itself, and forget its unfinished part.

    The role that it was asked for in now, and by which references, is kept beside those of before.
    """
    before = (find(identity) or {}).get("asked", {})
    now = {role: {"reference": reference, "config": config, "when_ns": time.time_ns()}}
    document = files.sealed(
        {**body, "schema": SCHEMA, "kind": KIND, "identity": identity.to_json(), "asked": before | now}
    )
    files.write_json(path_of(identity), document)
    partial_path(identity).unlink(missing_ok=True)
    return document


def of_model(sha256: str) -> Iterator[dict]:
    """Every measurement of the model whose weights have this hash, the one that was asked for last at the end."""
    found = sorted(folder().glob("*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    for path in found:
        document = read(path)
        if document and document["identity"]["model"]["sha256"] == sha256:
            yield document


def before_and_after(before_sha256: str, after_sha256: str) -> list[dict]:
    """What two models scored on the same paper under the same conditions: `{"roles", "paper", "before", "after"}`."""
    first = {_sheet(one): one for one in of_model(before_sha256)}
    return [
        {"roles": sorted(one["asked"]), "paper": one["identity"]["paper"], "before": first[_sheet(one)]["score"],
         "after": one["score"]}
        for one in sorted(of_model(after_sha256), key=_sheet) if _sheet(one) in first
    ]  # fmt: skip


def _sheet(document: dict) -> str:
    return files.sha256_json([document["identity"]["paper"], document["identity"]["conditions"]])


# ---- unfinished ones


def partial_path(identity: Identity) -> Path:
    return folder() / f"{files.short(identity.sha256)}.partial.jsonl"


class Partial:
    """The answers of a measurement so far, each appended as it is found; a line that a crash cut short is no answer."""

    def __init__(self, identity: Identity):
        self._path, self._key = partial_path(identity), identity.sha256
        self.answers: dict[str, dict] = {}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._read()

    def _read(self) -> None:
        whole = b""
        for line in self._path.read_bytes().splitlines(keepends=True):
            try:
                value = files.parse_json(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or value.get("key") != self._key:
                break
            whole += line
            self.answers[value["id"]] = {key: one for key, one in value.items() if key != "key"}
        files.write_bytes(self._path, whole)

    def add(self, answer: dict) -> None:
        """Take one answer in: `{"id", ...}`."""
        self.answers[answer["id"]] = answer
        with files.disk_errors(self._path), open(self._path, "ab") as file:
            line = json.dumps({"key": self._key, **answer}, ensure_ascii=False, allow_nan=False)
            file.write(line.encode("utf-8", "surrogatepass") + b"\n")
