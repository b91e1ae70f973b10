"""Start, stop, look at and put back a service: what the commands besides the evaluation do with it."""

from training.core import locks, paths
from training.core.errors import IntegrityError, RunError, UserError
from training.core.log import say
from training.serving import swap
from training.serving.model import check
from training.serving.service import Service, open_service, port_of, unfinished
from training.serving.settings import HEALTH_BUDGET_SECONDS, service_command
from training.serving.signals import Deferred

_SAME = ("model", "sha256", "file", "port", "arguments", "image", "config_hash")


def start(
    model: str,
    *,
    service: str | None = None,
    port: int | None = None,
    ctx_size: int | None = None,
    budget_seconds: float = HEALTH_BUDGET_SECONDS,
    dry_run: bool = False,
) -> dict:
    """Put a model in service and leave it there.

    A service that serves this very file with these arguments is left alone. Another model in service is replaced, and
    put back where the new one does not come up. A manifest, where there is one, is held against the file.

    Returns `{"record", "previous", "reused", "loaded", "seconds"}`, and the model's `context_length` and
    `cache_bytes_per_token`.
    """
    room = open_service(service)
    checked = check(paths.model_file(model), manifest_required=False, service=room.name)
    with room.hold(f"serve-start {checked.path.name}"), Deferred() as signals:
        if not dry_run:
            finish(room)
        with signals.interruptible():
            previous = room.state(budget_seconds=budget_seconds, on_wait=swap.waiting("the service", budget_seconds))
            old = previous["record"] or {}
            record = room.runtime.new_record(checked, port=port_of(port, previous), ctx_size=ctx_size)
            reused = previous["healthy"] and all(old.get(part) == record.get(part) for part in _SAME)
            if not reused:
                swap.require_swappable(room, previous, record)
        trial = swap.Trial(record, _nothing)
        if not reused and not dry_run:
            swap.run(room, swap.Swap(previous, [trial]), signals=signals, keep=True, budget_seconds=budget_seconds)
    now = room.state() if not dry_run else previous
    return {
        "record": old if reused else trial.record, "previous": previous, "reused": reused, "loaded": now["loaded"],
        "seconds": trial.seconds,
        **{part: checked.header[part] for part in ("context_length", "cache_bytes_per_token")},
    }  # fmt: skip


def _nothing(*_: object) -> None:
    """What `start` asks of the new server beyond its health and the file it says it serves."""


def stop(service: str | None = None, *, dry_run: bool = False) -> dict:
    """End a service, and whatever an unfinished swap of it has left. Returns its state before.

    A damaged record, journal or compose.yaml is no hindrance: what serves under this name is found without them.
    """
    room = open_service(service, existing=True)
    with room.hold("serve-stop"), Deferred():
        try:
            before = room.state()
        except (IntegrityError, RunError) as error:
            say(f"warning: {error.what}: {error.where}")
            before = {"running": True, "healthy": False, "record": None, "loaded": None}
        if not dry_run:
            room.runtime.remove()
            room.remove_journal()
    return {"service": room.name} | before


def status(service: str | None = None) -> dict:
    """What runs now by the server's own word, who changes it, and whether a swap is unfinished. Changes nothing."""
    room = open_service(service, existing=True)
    holder = locks.holder(room.lock_path)
    unfinished = room.journal() is not None and holder is None
    return {"service": room.name} | room.state() | {"unfinished": unfinished, "holder": holder}


def restore(service: str | None = None, *, dry_run: bool = False) -> dict:
    """Finish the restore of a swap that was cut off; without a name, of the one service that has such a swap.

    Returns `{"service", "restore": ... or None, **state}`.
    """
    room = open_service(service or _only_unfinished(), existing=True)
    with room.hold("serve-restore"), Deferred():
        if dry_run:
            journal = room.journal()
            return {"service": room.name, "restore": None, "planned": journal and journal["previous"], **room.state()}
        done = finish(room)
        return {"service": room.name, "restore": done, **room.state()}


def _only_unfinished() -> str | None:
    names = unfinished()
    if len(names) > 1:
        raise UserError(
            "more than one service has an unfinished swap",
            found=", ".join(names),
            expected="one of them by its name",
            next_command=" && ".join(service_command("serve-restore", name) for name in names),
        )
    return names[0] if names else None


def finish(room: Service) -> dict | None:
    """Finish an unfinished swap's restore, if there is one; the service's lock is held by the caller."""
    if room.journal() is None:
        return None
    say("a swap before this one is unfinished; its restore comes first")
    return swap.restore(room)
