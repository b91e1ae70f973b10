"""An order of images: what is asked for on the command line and in settings, built, tried and written down."""

from dataclasses import dataclass
from pathlib import Path

from training.containers import bases, engine, image, trial, wheelhouse
from training.core import files, paths
from training.core.errors import UserError

RECORDS = paths.REPOSITORY / "logs" / "images"


def default_lock() -> str:
    """The lock file that `.venv` was made from, else `cpu`."""
    name = paths.REPOSITORY / ".venv" / "lock-name"
    return name.read_text().strip() if name.is_file() else "cpu"


def wheel_folder() -> Path | None:
    """The setting WHEELHOUSE; None for the machine's cache."""
    text = paths.setting("WHEELHOUSE", "")
    return Path(text).expanduser().absolute() if text else None


def _extra_ca() -> Path | None:
    text = paths.setting("EXTRA_CA", "")
    if text and not Path(text).is_file():
        raise UserError("EXTRA_CA names no file", where=text, expected="a bundle of certificates, PEM")
    return Path(text).absolute() if text else None


@dataclass(frozen=True)
class Order:
    """What to build and how; `backend` is the server's."""

    backend: str
    plan: image.Plan


def order(
    backend: str | None = None,
    *,
    base: str | None = None,
    server_base: str | None = None,
    fresh: bool = False,
) -> Order:
    """An order with what the settings add. Raises MachineError where the engine cannot build, UserError."""
    engine.require_engine()
    engine.require_plugin("buildx")
    backend = backend or ("cuda" if engine.gpu_options() else "cpu")
    plan = image.Plan(
        lock=wheelhouse.lock_path(default_lock()), wheels=wheel_folder(), base=base, server_base=server_base,
        extra_ca=_extra_ca(), fresh=fresh,
    )  # fmt: skip
    return Order(backend, plan)


def chosen(order: Order, only: str | None) -> list[str]:
    """The images of an order: all of them, or `train`, `export` or `llama` alone."""
    names = [only] if only else ["train", "export", "llama"]
    return [f"llama-{order.backend}" if name == "llama" else name for name in names]


def preview(order: Order, images: list[str]) -> dict[str, bases.Base]:
    """The base of each image. Raises UserError where one is not pinned and none is named."""
    return {name: image.base_of(name, order.plan) for name in images}


def build_and_try(name: str, order: Order) -> dict:
    """Build an image, try it, and keep the record in `logs/images/`; returns the record with its trial."""
    record = image.build(name, order.plan)
    record |= {"trial": trial.run(name), "distribution_packages": trial.distribution_packages(name)}
    files.write_json(RECORDS / f"{name}.json", {"schema": 1, "kind": "image", **record})
    return record
