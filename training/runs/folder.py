"""One run, one folder: `run.json`, `events.jsonl`, `summary.json` and the checkpoints with their pointers.

Invariants: `run.json` is replaced in one step; whoever works on a run holds `lock.json`, so that a run whose worker is
gone is known; a checkpoint counts only with its manifest; a pointer is relative, is checked when it is read, and where
it is wrong the newest complete checkpoint stands in for it.
"""

import contextlib
import datetime
import logging
import re
from collections.abc import Iterator
from pathlib import Path

from training.core import files, locks, paths
from training.core.errors import IntegrityError, MachineError, UserError

RUN_FILE = "run.json"
SUMMARY_FILE = "summary.json"
STACKS_FILE = "stacks.log"
LOCK_FILE = "lock.json"
CHECKPOINTS = "checkpoints"
STATE_KIND = "checkpoint-state"
STEP_DIGITS = 6
_ENDING_SECONDS = 2.0
"""What a killed supervisor's engine may take to be gone as well."""
STATUSES = ("queued", "waiting", "running", "paused", "completed", "failed", "cancelled", "lost")
_STEP_NAME = re.compile(r"step_(\d+)")
_STAMP_LENGTH = len("20260101-000000")
_logger = logging.getLogger(__name__)


def step_name(step: int) -> str:
    """`step_000200`."""
    return f"step_{step:0{STEP_DIGITS}d}"


class RunFolder:
    """A run's folder on disk. Holds no state of its own: every read is of the files."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(cls, name: str, record: dict) -> "RunFolder":
        """Make the folder of a new run with its first `run.json`; the status is queued unless the record has another.

        Its name is `<utc>-<name>-<4 hex digits>`; the digits are the second's fraction, so that names tell which came
        first.
        """
        now = datetime.datetime.now(datetime.UTC)
        fraction = (now.microsecond << 16) // 1_000_000
        run = cls(paths.roots().runs / f"{now:%Y%m%d-%H%M%S}-{name}-{fraction:04x}")
        run.path.mkdir(parents=True)
        files.write_json(run.path / RUN_FILE, {"schema": 1, "id": run.id, "status": "queued", **record})
        return run

    @classmethod
    def open(cls, reference: str | Path) -> "RunFolder":
        """Open a run by id, by folder, or by `latest` (the newest). Raises UserError naming the runs there are."""
        candidates = [Path(reference), paths.roots().runs / str(reference)]
        if str(reference) == "latest":
            candidates = [run.path for run in all_runs()[:1]]
        for path in candidates:
            if (path / RUN_FILE).is_file():
                return cls(path)
        known = ", ".join(run.id for run in all_runs()[:5]) or "no run yet"
        raise UserError(
            "no such run", where=paths.roots().runs, found=reference, expected=known, next_command="make runs"
        )

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    # ---- the record

    def record(self) -> dict:
        """`run.json` as it stands. Raises IntegrityError where it is no record of a run."""
        record = files.read_json(self.path / RUN_FILE)
        if record.get("status") not in STATUSES:
            raise IntegrityError(
                "a run's record has no status", where=self.path / RUN_FILE, found=record.get("status"),
                expected=", ".join(STATUSES),
            )  # fmt: skip
        return record

    def summary(self) -> dict:
        """What came of a completed run. Raises IntegrityError where there is no summary."""
        return files.read_json(self.path / SUMMARY_FILE)

    def update(self, **changes: object) -> None:
        """Replace keys of `run.json` in one step."""
        files.write_json(self.path / RUN_FILE, self.record() | changes)

    def status(self) -> str:
        """The status word; a run whose process is gone without a word is `lost`, and is written down as such."""
        status = self.record()["status"]
        if status not in ("running", "waiting") or self.worker() is not None:
            return status
        status = self.record()["status"]  # it may have ended between the two looks
        if status in ("running", "waiting"):
            with contextlib.suppress(MachineError):  # a place that cannot be written can still be looked at
                self.update(status="lost")
            return "lost"
        return status

    @contextlib.contextmanager
    def work(self) -> Iterator[int]:
        """Hold the run while the block runs; a child that inherits the descriptor holds it too.

        Raises UserError where another process does, and does not end within a moment.
        """
        with contextlib.ExitStack() as held:
            lock = locks.hold(self.path / LOCK_FILE, f"run {self.id}", wait_seconds=_ENDING_SECONDS, resource="the run")
            try:
                descriptor = held.enter_context(lock)
            except MachineError as error:
                if (who := self.worker()) is None:
                    raise
                raise UserError(
                    "the run is still running", where=self.path, found=locks.describe(who),
                    expected="a run that is paused, failed or lost", next_command=f"make runs RUN={self.id}",
                ) from error  # fmt: skip
            yield descriptor

    def worker(self) -> dict | None:
        """The process that works on the run now, or None."""
        return locks.holder(self.path / LOCK_FILE)

    @property
    def begun(self) -> float:
        """When the run was made, in seconds since the epoch, by its id; of a folder with another name, by its record's
        time on disk."""
        try:
            stamp = datetime.datetime.strptime(self.id[:_STAMP_LENGTH], "%Y%m%d-%H%M%S")
            return stamp.replace(tzinfo=datetime.UTC).timestamp()
        except ValueError:
            return (self.path / RUN_FILE).stat().st_mtime

    # ---- checkpoints and pointers

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, in numeric order; names that are no step are ignored."""
        found = []
        for path in self.checkpoints.glob("step_*"):
            match = _STEP_NAME.fullmatch(path.name)
            if match and (path / files.MANIFEST).is_file():
                found.append(int(match[1]))
        return sorted(found)

    def step_folder(self, step: int) -> Path:
        return self.checkpoints / step_name(step)

    def point(self, pointer: str, step: int) -> None:
        """Let `latest` or `best` name a step, in one step."""
        files.write_json(self.checkpoints / f"{pointer}.json", {"folder": step_name(step), "step": step})

    def pointed(self, pointer: str) -> Path | None:
        """The checkpoint that a pointer names, verified; None where there is no such pointer or it is not valid."""
        path = self.checkpoints / f"{pointer}.json"
        if not path.exists():
            return None
        try:
            folder = self.step_folder(int(files.read_json(path)["step"]))
            files.verify_manifest(folder, "checkpoint")
            return folder
        except (IntegrityError, KeyError, TypeError, ValueError) as error:
            _logger.warning("the pointer %s.json of run %s is not usable (%s)", pointer, self.id, error)
            return None

    def latest(self, kind_of_state: str | None = None) -> Path | None:
        """The newest checkpoint whose bytes verify, told with a warning where it is not the one `latest` names.

        With `kind_of_state` its `state/` folder has to verify as well, as a resume needs it.
        """
        for step in reversed(self.steps()):
            folder = self.step_folder(step)
            try:
                self._require_own(files.verify_manifest(folder, "checkpoint"), step)
                if kind_of_state and files.verify_manifest(folder / "state", kind_of_state).get("step") != step:
                    raise IntegrityError("the state is of another step", where=folder / "state")
            except IntegrityError as error:
                _logger.warning("checkpoint %s is passed over: %s", step_name(step), error)
                continue
            if self._named("latest") != step:
                _logger.warning("latest.json does not name %s, the newest complete checkpoint; using that", folder.name)
            return folder
        return None

    def _require_own(self, manifest: dict, step: int) -> None:
        """Raise IntegrityError where a checkpoint is another run's, another recipe's or another step's."""
        record = self.record()
        owned = {"run": record.get("id"), "recipe_sha256": record.get("recipe_sha256"), "step": step}
        for key, expected in owned.items():
            if manifest.get(key, expected) != expected:
                raise IntegrityError(f"the checkpoint is of another {key}", found=manifest[key], expected=expected)

    def _named(self, pointer: str) -> int | None:
        try:
            return files.read_json(self.checkpoints / f"{pointer}.json").get("step")
        except (IntegrityError, AttributeError):
            return None


def all_runs() -> list[RunFolder]:
    """Every run under the data root, the newest first."""
    found = [RunFolder(path.parent) for path in paths.roots().runs.glob(f"*/{RUN_FILE}")]
    return sorted(found, key=lambda run: (run.id[:_STAMP_LENGTH], run.id[-4:]), reverse=True)


def resolve_checkpoint(reference: str) -> Path:
    """The checkpoint folder that is meant: a step folder itself, or of a run (id, folder, `latest`) the best, else
    the latest; `ID/best`, `ID/latest` and `ID/step_000100` say which. Raises UserError or IntegrityError."""
    path = Path(reference)
    if (path / files.MANIFEST).is_file():
        return path
    is_step = bool(_STEP_NAME.fullmatch(path.name))
    if path.is_dir() and is_step:
        files.read_manifest(path, "checkpoint")
    wanted = path.name if path.name != reference and (is_step or path.name in ("best", "latest")) else None
    if wanted:
        reference = str(path.parent.parent if path.parent.name == "checkpoints" else path.parent)
    run = RunFolder.open(reference)
    if wanted and is_step:
        return _step_of(run, wanted)
    folder = None if wanted == "latest" else run.pointed("best")
    if folder is None and wanted != "latest" and (run.checkpoints / "best.json").exists():
        raise IntegrityError(
            "the run's best checkpoint is damaged or gone",
            where=run.checkpoints / "best.json",
            found="see the warning above",
            expected="a checkpoint that verifies; another by its folder: "
            + ", ".join(str(run.step_folder(step)) for step in run.steps()[-3:]),
            next_command=f"make runs RUN={run.id}",
        )
    folder = folder or (None if wanted == "best" else run.latest())
    if folder is None:
        raise UserError(
            "the run has no complete checkpoint",
            where=run.checkpoints,
            found="none",
            expected="at least one step folder with a manifest",
            next_command=f"make resume RUN={run.id}",
        )
    if wanted is None and folder.name == step_name(0) and run.steps()[-1] > 0:
        _logger.warning(
            "the best checkpoint of run %s is its start; %s/latest is step %d", run.id, run.id, run.steps()[-1]
        )
    return folder


def _step_of(run: RunFolder, name: str) -> Path:
    """A run's complete checkpoint by its folder's name."""
    if not (run.checkpoints / name / files.MANIFEST).is_file():
        raise UserError(
            "the run has no such checkpoint", where=run.checkpoints, found=name,
            expected=", ".join(step_name(step) for step in run.steps()[-3:]) or "a run with a checkpoint",
            next_command=f"make runs RUN={run.id}",
        )  # fmt: skip
    return run.checkpoints / name
