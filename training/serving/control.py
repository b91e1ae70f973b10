"""Start, stop, look at and put back a service: what the commands besides the evaluation do with it."""

from training.core import locks
from training.core.log import say
from training.serving import swap
from training.serving.model import check, resolve
from training.serving.service import HEALTH_BUDGET_SECONDS, Service, default_port, open_service
from training.serving.signals import Deferred


def start(
    model: str,
    *,
    service: str,
    port: int | None = None,
    ctx_size: int | None = None,
    budget_seconds: float = HEALTH_BUDGET_SECONDS,
    dry_run: bool = False,
) -> dict:
    """Put a model in service and leave it there.

    A service that serves this very file with these arguments is left alone. Another model in service is replaced, and
    put back where the new one does not come up. A manifest, where there is one, is held against the file.

    Returns `{"record", "previous", "reused", "loaded", "seconds"}`.
    """
    room = open_service(service)
    checked = check(resolve(model), manifest_required=False)
    with room.hold(f"serve-start {checked.path.name}"), Deferred() as signals:
        if not dry_run:
            finish(room)
        with signals.interruptible():
            previous = room.state(budget_seconds=budget_seconds, on_wait=swap.waiting("the service", budget_seconds))
            old = previous["record"] or {}
            record = room.new_record(checked, port=port or old.get("port") or default_port(), ctx_size=ctx_size)
            same = all(old.get(part) == record[part] for part in ("model", "sha256", "file", "port", "arguments"))
            reused = previous["healthy"] and same
            if not reused:
                swap.require_swappable(room, previous, record)
        planned = swap.Swap(previous, record)
        if not reused and not dry_run:
            swap.run(room, planned, _nothing, signals=signals, keep=True, budget_seconds=budget_seconds)
    now = room.state() if not dry_run else previous
    return {
        "record": old if reused else planned.record, "previous": previous, "reused": reused, "loaded": now["loaded"],
        "seconds": planned.seconds,
    }  # fmt: skip


def _nothing(*_: object) -> None:
    """What `start` asks of the new server beyond its health and the file it says it serves."""


def stop(service: str, *, dry_run: bool = False) -> dict:
    """End a service, and whatever an unfinished swap of it has left. Returns its state before."""
    room = open_service(service)
    with room.hold("serve-stop"), Deferred():
        before, journal = room.state(), room.journal()
        if dry_run:
            return before
        records = [
            before["record"],
            *((journal["previous"]["record"], journal["new"], journal["back"]) if journal else ()),
        ]
        for record in filter(None, records):
            room.runtime.stop(record)
        room.write_record(None)
        room.remove_journal()
    return before


def status(service: str) -> dict:
    """What runs now by the server's own word, who changes it, and whether a swap is unfinished. Changes nothing."""
    room = open_service(service)
    holder = locks.holder(room.folder / f"{service}.lock")
    return room.state() | {"unfinished": room.journal() is not None and holder is None, "holder": holder}


def restore(service: str, *, dry_run: bool = False) -> dict:
    """Finish the restore of a swap that was cut off. Returns `{"restore": ... or None, **state}`."""
    room = open_service(service)
    with room.hold("serve-restore"), Deferred():
        if dry_run:
            journal = room.journal()
            return {"restore": None, "planned": journal and journal["previous"], **room.state()}
        done = finish(room)
        return {"restore": done, **room.state()}


def finish(room: Service) -> dict | None:
    """Finish an unfinished swap's restore, if there is one; the service's lock is held by the caller."""
    if room.journal() is None:
        return None
    say("a swap before this one is unfinished; its restore comes first")
    return swap.restore(room)
