"""The swap: other models in a service, one after the other, and the one before put back, whatever happens in between.

The journal on disk is the promise to put back. It is written before anything is stopped, and removed after the old
model has proved, by the server's own word, that it is served again (or, with `keep`, after the new one has). It names
every start that the swap may make, so whoever reads it after a crash can end leftovers that nobody has written down.
`restore` can be cut off at any point and begun again. The service's lock is held throughout.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from training.core import files
from training.core.errors import IntegrityError, MachineError, RestoreError, TrainyardError
from training.core.log import say
from training.core.paths import for_people
from training.core.process import identity
from training.core.units import format_seconds
from training.llamacpp.client import Client
from training.serving import memory
from training.serving.records import JOURNAL_SCHEMA
from training.serving.runtime import OnWait
from training.serving.service import Service, require_same_file
from training.serving.settings import HEALTH_BUDGET_SECONDS, service_command
from training.serving.signals import Deferred

_SAY_EVERY_SECONDS = 5.0
_RESTORE_ATTEMPTS = 2
_PROOF = ("path", "parameters", "size_bytes", "vocab_size")


def waiting(label: str, budget_seconds: float) -> OnWait:
    """A line every few seconds on what is waited for, for how long, and until when."""
    said = 0.0

    def on_wait(seconds: float, state: str) -> None:
        nonlocal said
        if seconds - said >= _SAY_EVERY_SECONDS:
            said = seconds
            say(f"waiting for {label}: {state}, {format_seconds(seconds)} of {format_seconds(budget_seconds)}")

    return on_wait


@dataclass
class Trial:
    """One model in its turn: what is started, what is asked of it, and the seconds that its steps took."""

    record: dict
    inspect: Callable[[Client, dict], None]
    seconds: dict = field(default_factory=dict)


@dataclass
class Swap:
    """What a swap did, filled as it goes; `restore` is None until something was put back."""

    previous: dict
    trials: list[Trial]
    begun: bool = False
    kept: bool = False
    restore: dict | None = None

    def overhead_seconds(self) -> float:
        """What the swap took beyond the models' own loading and the questions."""
        steps = ("stop_previous", "memory_wait", "start")
        parts = [trial.seconds.get(step, 0.0) for trial in self.trials for step in steps]
        back = self.restore["seconds"] - self.restore["health_wait"] if self.restore else 0.0
        return round(sum(parts) + back, 3)


def require_swappable(service: Service, previous: dict, record: dict) -> None:
    """Raise where the new record could not be started, or the old one not be put back."""
    runtime, old = service.runtime, previous["record"]
    if previous["running"]:
        require_same_file(old)
    if old:
        runtime.require_restorable(old)
    if not previous["running"] or old["port"] != record["port"]:
        runtime.require_startable(record)
    memory.require_enough(record, old if previous["running"] else None)


def run(service: Service, swap: Swap, *, signals: Deferred, keep: bool, budget_seconds: float) -> None:
    """Put each trial's model in service and inspect it, in their order, and put the old one back.

    With `keep` the last one stays where nothing has failed. Raises what failed after the restore; RestoreError, naming
    both failures, where the old one did not come back.
    """
    _write_journal(service, swap)
    swap.begun, failure = True, None
    try:
        running = swap.previous["record"] if swap.previous["running"] else None
        for trial in swap.trials:
            _swap_in(service, running, trial)
            running = trial.record
            with signals.interruptible():
                _try(service, trial, budget_seconds)
        signals.check()
    except BaseException as error:
        failure = error
    if keep and failure is None:
        service.remove_journal()
        swap.kept = True
        return
    swap.restore = restore(service, failure=failure)
    if failure is not None:
        raise failure


def _swap_in(service: Service, running: dict | None, trial: Trial) -> None:
    say(f"putting {for_people(trial.record['model'])} in service on port {trial.record['port']}")
    moments = [time.monotonic()]
    if running:
        service.runtime.stop(running)
    moments.append(time.monotonic())
    memory.wait_released(trial.record, waiting("the memory to be given back", memory.RELEASE_SECONDS))
    moments.append(time.monotonic())
    trial.record = service.runtime.start(trial.record)
    service.runtime.leave(trial.record)
    moments.append(time.monotonic())
    for step, begun, ended in zip(("stop_previous", "memory_wait", "start"), moments, moments[1:], strict=False):
        trial.seconds[step] = round(ended - begun, 3)


def _try(service: Service, trial: Trial, budget_seconds: float) -> None:
    on_wait = waiting(f"{Path(trial.record['model']).name} to be healthy", budget_seconds)
    waited = service.runtime.wait_healthy(trial.record, budget_seconds, on_wait)
    trial.seconds["health_wait"] = round(waited, 3)
    client = Client(service.runtime.url(trial.record))
    loaded = client.model_info()
    require_loaded(trial.record, loaded)
    trial.inspect(client, loaded)


def require_loaded(record: dict, loaded: dict) -> None:
    """Raise IntegrityError where the server says that it serves another file than the record's."""
    if loaded["path"] != record["served_as"]:
        raise IntegrityError(
            "the server answers as healthy and serves another file",
            found=loaded["path"],
            expected=record["served_as"],
            where=record["log"],
            next_command=service_command("serve-status", record["service"]),
        )


def _write_journal(service: Service, swap: Swap) -> None:
    old = swap.previous["record"]
    journal = {
        "schema": JOURNAL_SCHEMA,
        "kind": "swap",
        "service": service.name,
        "runtime": service.runtime.name,
        "owner": identity(),
        "previous": swap.previous,
        "new": [trial.record for trial in swap.trials],
        "back": old and service.runtime.again(old),
    }
    files.write_json(service.journal_path, journal)


def restore(service: Service, *, failure: BaseException | None = None) -> dict:
    """Put back what the journal says ran before, prove it, remove the journal, and say what serves now.

    The old model has the whole health budget, however short a time the new one was given.

    Returns `{"state": "running" | "stopped", "proved", "seconds", "health_wait", "loaded", "restarted"}`. Raises
    RestoreError, with the journal kept, where it cannot be done; `failure` is what went wrong before, for its message.
    """
    journal, started = service.journal(), time.monotonic()
    for attempt in range(1, _RESTORE_ATTEMPTS + 1):
        try:
            outcome = _put_back(service, journal)
            service.remove_journal()
            return outcome | {"seconds": round(time.monotonic() - started, 3)}
        except Exception as error:  # whatever it is, the second attempt and the message must come
            say(f"the restore did not succeed (attempt {attempt} of {_RESTORE_ATTEMPTS}): {error}")
            last = error
    raise _restore_error(service, journal, last, failure) from last


def _put_back(service: Service, journal: dict) -> dict:
    previous, runtime = journal["previous"], service.runtime
    for record in journal["new"]:
        runtime.stop(record)
    if not previous["running"]:
        runtime.leave(previous["record"])
        return {"state": "stopped", "proved": True, "restarted": False, "loaded": None, "health_wait": 0.0}
    record = next((known for known in (previous["record"], journal["back"]) if _answers(service, known)), None)
    restarted = record is None
    if restarted:
        runtime.stop(previous["record"])
        record = _start_again(service, journal["back"])
    loaded, waited = _prove(service, record, previous["loaded"]) if previous["healthy"] else (None, 0.0)
    runtime.leave(record)  # last: a full disk must not keep the old model from coming back
    return {
        "state": "running", "proved": previous["healthy"], "restarted": restarted, "loaded": loaded,
        "health_wait": round(waited, 3),
    }  # fmt: skip


def _start_again(service: Service, record: dict) -> dict:
    service.runtime.stop(record)
    try:
        memory.wait_released(record, waiting("the memory to be given back", memory.RELEASE_SECONDS))
    except MachineError as error:  # it was served on this machine before: try it all the same
        say(str(error))
    say(f"putting back {for_people(record['model'])}")
    return service.runtime.start(record)


def _answers(service: Service, record: dict) -> bool:
    """Whether what the record says is served: healthy, and made as the record says."""
    try:
        service.runtime.wait_healthy(record, 0.0, None)
        service.runtime.require_as_recorded(record)
        return True
    except TrainyardError:
        return False


def _prove(service: Service, record: dict, expected: dict) -> tuple[dict, float]:
    on_wait = waiting("the previous model", HEALTH_BUDGET_SECONDS)
    waited = service.runtime.wait_healthy(record, HEALTH_BUDGET_SECONDS, on_wait)
    loaded = Client(service.runtime.url(record)).model_info()
    for part in _PROOF:
        if loaded[part] != expected[part]:
            raise IntegrityError(
                f"the restored server serves another model: its {part} differs",
                where=service.runtime.url(record),
                found=loaded[part],
                expected=expected[part],
            )
    return loaded, waited


def _restore_error(service: Service, journal: dict, error: Exception, failure: BaseException | None) -> RestoreError:
    old = journal["previous"]["record"]
    before = f"\nbefore that: {str(failure) or type(failure).__name__}" if failure is not None else ""
    running = journal["previous"]["running"]
    by_hand = f"; by hand: {service.runtime.by_hand(old)}" if running else ""
    return RestoreError(
        f"the service {service.name} could not be put back as it was",
        where=service.journal_path,
        found=f"{error}{before}",
        expected=f"{old['model']} served on port {old['port']}{by_hand}" if running else "a stopped service",
        next_command=service_command("serve-restore", service.name),
    )
