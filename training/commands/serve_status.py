"""`serve-status`: what the service serves, by the server's own word."""

import argparse
from pathlib import Path

from training.core.report import Report

SUMMARY = "ask the service what it serves"
EXAMPLE = "make serve-status"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_service(parser)


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.core import locks
    from training.serving import control
    from training.serving.report import hash_part
    from training.serving.settings import service_command

    state = control.status(args.service)
    record, loaded = state["record"], state["loaded"]
    service = state["service"]
    report.add("service", service)
    if record is None:
        report.add("state", "stopped")
    else:
        report.add("state", "healthy" if state["healthy"] else "NOT healthy" if state["running"] else "NOT RUNNING")
        report.add("model", f"{record['model']}{hash_part(record['sha256'])}, since {record['since']}")
        report.add("at", f"http://127.0.0.1:{record['port']}, {record['runtime']}, log {record['log']}")
    if loaded:
        add_loaded(report, loaded)
    if state["holder"]:
        report.add("busy", locks.describe(state["holder"]))
    if record is not None and not state["healthy"]:
        report.fail("NOT SERVING", 4)
        report.add("next", _way_out(service, Path(record["model"])))
    if state["unfinished"]:
        report.fail("UNFINISHED SWAP", 4)
        report.add("next", service_command("serve-restore", service))
    return {"schema": 1, **state}


def add_service(parser: argparse.ArgumentParser) -> None:
    """The option that names a service."""
    parser.add_argument("--service", metavar="NAME", help="llama-gpu, llama-cpu or a local one (default: by RUNTIME)")


def add_place(parser: argparse.ArgumentParser) -> None:
    """The options that name a service and its port."""
    add_service(parser)
    parser.add_argument(
        "--port", type=int, help="the port (default: the running service's, else TRAINYARD_PORT, else 18080)"
    )


def add_loaded(report: Report, loaded: dict) -> None:
    """The row of what a server says that it has loaded."""
    report.add("serves now", f"{loaded['path']}, {loaded['parameters']} parameters, by its word")


def _way_out(service: str, model: Path) -> str:
    """The command that mends a service whose server does not answer: one without a model of ours can only go."""
    from training.core import paths
    from training.serving.settings import service_command

    if model.is_file() and model.resolve().is_relative_to(paths.roots().models.resolve()):
        return service_command("serve-start", service, MODEL=paths.container_path(model))
    return service_command("serve-stop", service)
