"""The swap: another model in a service, and the one before put back, whatever happens in between.

The journal on disk is the promise to put back. It is written before anything is stopped, and removed after the old
model has proved, by the server's own word, that it is served again (or, with `keep`, after the new one has). It names
by token every start that the swap may make, so whoever reads it after a crash can end leftovers that nobody has written
down. `restore` can be cut off at any point and begun again. The service's lock is held throughout.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from training.core import files
from training.core.errors import IntegrityError, RestoreError, TrainyardError
from training.core.log import say
from training.core.paths import for_people
from training.core.process import identity
from training.core.units import format_seconds
from training.llamacpp.client import Client
from training.serving.runtime import OnWait
from training.serving.service import HEALTH_BUDGET_SECONDS, Service, require_same_file, service_command
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
class Swap:
    """What a swap did, filled as it goes; `restore` is None until something was put back."""

    previous: dict
    record: dict
    begun: bool = False
    kept: bool = False
    restore: dict | None = None
    seconds: dict = field(default_factory=dict)


def require_swappable(service: Service, previous: dict, record: dict) -> None:
    """Raise where the new record could not be started, or the old one not be put back."""
    if not previous["running"]:
        return service.runtime.require_startable(record)
    require_same_file(previous["record"])
    if previous["record"]["port"] != record["port"]:
        service.runtime.require_startable(record)
    return None


def run(
    service: Service,
    swap: Swap,
    inspect: Callable[[Client, dict], None],
    *,
    signals: Deferred,
    keep: bool,
    budget_seconds: float,
) -> None:
    """Put `swap.record` in the place of `swap.previous`, call `inspect(client, loaded)`, and put the old one back.

    With `keep` the new one stays where nothing has failed. Raises what failed after the restore; RestoreError, naming
    both failures, where the old one did not come back.
    """
    _write_journal(service, swap)
    swap.begun, failure = True, None
    try:
        _swap_in(service, swap)
        with signals.interruptible():
            on_wait = waiting("the new model", budget_seconds)
            waited = service.runtime.wait_healthy(swap.record, budget_seconds, on_wait)
            swap.seconds["health_wait"] = round(waited, 3)
            client = Client(service.runtime.url(swap.record))
            loaded = client.model_info()
            require_loaded(swap.record, loaded)
            inspect(client, loaded)
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


def _swap_in(service: Service, swap: Swap) -> None:
    started = time.monotonic()
    say(f"putting {for_people(swap.record['model'])} in service on port {swap.record['port']}")
    if swap.previous["running"]:
        service.runtime.stop(swap.previous["record"])
    swap.seconds["stop_previous"] = round(time.monotonic() - started, 3)
    swap.record = service.start(swap.record)


def require_loaded(record: dict, loaded: dict) -> None:
    """Raise IntegrityError where the server says that it serves another file than the record's."""
    if loaded["path"] != record["model"]:
        raise IntegrityError(
            "the server serves another file", found=loaded["path"], expected=record["model"], where=record["log"]
        )


def _write_journal(service: Service, swap: Swap) -> None:
    old = swap.previous["record"]
    journal = {
        "schema": 1,
        "kind": "swap",
        "service": service.name,
        "runtime": service.runtime.name,
        "owner": identity(),
        "previous": swap.previous,
        "new": swap.record,
        "back": old and old | {"token": secrets.token_hex(16), "process": None},
    }
    files.write_json(service.journal_path, journal)


def restore(service: Service, *, failure: BaseException | None = None) -> dict:
    """Put back what the journal says ran before, prove it, remove the journal, and say what serves now.

    The old model has the whole health budget, however short a time the new one was given.

    Returns `{"state": "running" | "stopped", "proved", "seconds", "loaded", "restarted"}`. Raises RestoreError, with
    the journal kept, where it cannot be done; `failure` is what went wrong before, for its message.
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
    runtime.stop(journal["new"])
    if not previous["running"]:
        service.write_record(previous["record"])
        return {"state": "stopped", "proved": True, "restarted": False, "loaded": None}
    record = next((known for known in (previous["record"], journal["back"]) if _answers(service, known)), None)
    restarted = record is None
    if restarted:
        runtime.stop(previous["record"])
        runtime.stop(journal["back"])
        say(f"putting back {for_people(journal['back']['model'])}")
        record = runtime.start(journal["back"])
    loaded = _prove(service, record, previous["loaded"]) if previous["healthy"] else None
    service.write_record(record)  # last: a full disk must not keep the old model from coming back
    return {"state": "running", "proved": previous["healthy"], "restarted": restarted, "loaded": loaded}


def _answers(service: Service, record: dict) -> bool:
    try:
        service.runtime.wait_healthy(record, 0.0, None)
        return True
    except TrainyardError:
        return False


def _prove(service: Service, record: dict, expected: dict) -> dict:
    on_wait = waiting("the previous model", HEALTH_BUDGET_SECONDS)
    service.runtime.wait_healthy(record, HEALTH_BUDGET_SECONDS, on_wait)
    loaded = Client(service.runtime.url(record)).model_info()
    for part in _PROOF:
        if loaded[part] != expected[part]:
            raise IntegrityError(
                f"the restored server serves another model: its {part} differs",
                where=service.runtime.url(record),
                found=loaded[part],
                expected=expected[part],
            )
    return loaded


def restore_command(service: str) -> str:
    """The command that finishes an unfinished swap, in make's form."""
    return service_command("serve-restore", service)


def _restore_error(service: Service, journal: dict, error: Exception, failure: BaseException | None) -> RestoreError:
    old = journal["previous"]["record"]
    before = f"\nbefore that: {str(failure) or type(failure).__name__}" if failure is not None else ""
    return RestoreError(
        f"the service {service.name} could not be put back as it was",
        where=service.journal_path,
        found=f"{error}{before}",
        expected=f"{old['model']} served on port {old['port']}"
        if journal["previous"]["running"]
        else "a stopped service",
        next_command=restore_command(service.name),
    )
