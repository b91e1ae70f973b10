"""What a service is set to where nothing is said: names, port, context and times, and the commands that name it."""

from training.core import paths
from training.core.errors import UserError
from training.core.report import make_command

DEFAULT_CTX_SIZE = 4096
HEALTH_BUDGET_SECONDS = 180.0


def default_port() -> int:
    """The port of a local service that has none yet: the setting TRAINYARD_PORT, else 18080. Raises UserError."""
    text = paths.setting("TRAINYARD_PORT", "18080")
    if not (text.isdigit() and 0 < int(text) < 65536):
        raise UserError("not a port", where="TRAINYARD_PORT", found=text, expected="a number from 1 to 65535")
    return int(text)


def require_in_range(what: str, value: int, lowest: int, highest: int) -> None:
    """Raise UserError where a number given by a person cannot be one."""
    if not lowest <= value <= highest:
        raise UserError(f"not a {what}", found=value, expected=f"{lowest} to {highest}")


def service_command(target: str, service: str, *arguments: str, **variables: object) -> str:
    """A command about a service to paste, in make's form. It names the service: without it RUNTIME would choose."""
    return make_command(target, *arguments, **variables, SERVICE=service)
