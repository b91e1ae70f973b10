"""One service of compose.yaml through Compose's own command: what it would be, recreated, and its variables.

The model and all else that differs from compose.yaml's defaults is in the child's environment; `.env` is never touched.
A child is in a session of its own, so that a Ctrl-C does not cut it off, and holds the service's lock, so that nobody
else changes the service while a child whose starter was killed still does.
"""

import json
import os
import re
import shlex
import subprocess
from functools import cache

from training.containers import compose, engine
from training.core import paths
from training.core.errors import MachineError, RunError, UserError
from training.serving.settings import service_command

_UP_SECONDS = 120.0
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-?+][^}]*)?\}")
_SETTINGS = {
    "PORT": (r"[0-9]{1,5}", 65_535, "a number from 1 to 65535"),
    "CTX_SIZE": (r"[0-9]{1,8}", 1 << 24, f"a number from 1 to {1 << 24}"),
    "SLOTS": (r"[0-9]{1,4}", 1024, "a number from 1 to 1024"),
    "MEMORY": (r"(?i)[0-9]+(\.[0-9]+)?([kmgtp]i?)?b?", None, "an amount of memory, such as 16g"),
}
_PORT_WORDS = ("port is already allocated", "address already in use")


class Composed:
    """A service by name; `lock` is the descriptor that children inherit, None while nothing is changed."""

    def __init__(self, service: str):
        self.service = service
        self.prefix = compose.SERVERS[service]
        self.lock: int | None = None
        self.container_name = f"{compose.project()}-{service}-1"

    # ---- what it would be

    def config(self, variables: dict) -> dict:
        """The service as Compose resolves it with these variables."""
        return json.loads(self._compose("config", "--format", "json", variables=variables))["services"][self.service]

    def hash(self, variables: dict) -> str:
        """Compose's hash of the service's configuration, which it writes into the container's labels."""
        return self._compose("config", "--hash", self.service, variables=variables).split()[-1]

    def variables_of(self, container: dict) -> dict[str, str]:
        """The variables that give this container, read off it by the text of compose.yaml. Raises RunError."""
        host = container["HostConfig"]
        bound = next(iter((host.get("PortBindings") or {}).values()), None) or [{}]
        written = self._written()
        pairs = [
            (written["image"], container["Config"]["Image"]),
            (written["ports"][0], f"{bound[0].get('HostIp')}:{bound[0].get('HostPort')}:8080"),
            (written.get("mem_limit", ""), str(host["Memory"])),
            (written.get("user", ""), container["Config"]["User"]),
            *zip(written["command"], container["Config"]["Cmd"] or [], strict=False),
        ]
        found: dict[str, str] = {}
        for template, value in pairs:
            found |= _read_off(template, value)
        return found

    def _written(self) -> dict:
        try:
            written = _written(str(compose.FILE), self.service)
        except RunError as error:
            raise self._broken(error) from None
        if missing := {"image", "ports", "command"} - (written or {}).keys():
            raise self._broken(RunError("the service is not whole", found=f"no {', '.join(sorted(missing))}"))
        return written

    def _broken(self, error: RunError) -> RunError:
        """A fault of compose.yaml, with the way out; ending a service needs no file."""
        stop = service_command("serve-stop", self.service)
        error.where, error.expected = str(compose.FILE), "compose.yaml as it came with this checkout"
        error.next_command = f"git diff compose.yaml shows what has changed; {stop} works all the same"
        return error

    def require_settings(self, variables: dict) -> None:
        """Raise UserError, naming the variable, where one that a person gives cannot be what it is for."""
        for setting, (pattern, highest, expected) in _SETTINGS.items():
            name = f"{self.prefix}_{setting}"
            value = variables.get(name) or paths.setting(name, "")
            if value and not (re.fullmatch(pattern, value) and (highest is None or 0 < int(value) <= highest)):
                raise UserError("the service cannot have this value", where=name, found=value, expected=expected)

    # ---- changing it

    def up(self, variables: dict) -> None:
        """Recreate the service's container and start it. Raises RunError or MachineError with Compose's last lines."""
        self._compose("up", "-d", "--no-deps", "--force-recreate", self.service, variables=variables)

    def create(self, variables: dict) -> None:
        """Recreate the service's container and leave it stopped."""
        self._compose("up", "--no-start", "--no-deps", "--force-recreate", self.service, variables=variables)

    def by_hand(self, variables: dict) -> str:
        """What `up` does, for a shell in any folder."""
        given = [f"{name}={value}" for name, value in compose.environment(**variables).items()]
        words = compose.arguments("up", "-d", "--no-deps", "--force-recreate", self.service)
        return shlex.join(["env", *given, "docker", *words])

    def _compose(self, *words: str, variables: dict) -> str:
        command = ["docker", *compose.arguments("--profile", self.service, *words)]
        what = f"docker compose {words[0]} {self.service}"
        try:
            done = subprocess.run(
                command, env=_environment(variables), capture_output=True, text=True, errors="replace",
                timeout=_UP_SECONDS, stdin=subprocess.DEVNULL, start_new_session=True,
                pass_fds=() if self.lock is None else (self.lock,),
            )  # fmt: skip
        except FileNotFoundError:
            raise MachineError("Docker is not installed", found="no program named docker") from None
        except subprocess.TimeoutExpired:
            raise RunError(f"{what} took longer than {_UP_SECONDS:g} s", next_command="docker ps -a") from None
        if done.returncode == 0:
            return done.stdout
        if any(each in done.stderr for each in _PORT_WORDS):
            raise MachineError(
                "the port is in use", where=what, found=done.stderr.strip().splitlines()[-1],
                expected="a free port", next_command="docker ps --format '{{.Names}} {{.Ports}}'",
            )  # fmt: skip
        error = engine.translated(what, done, what, f"docker compose -p {compose.project()} ps -a")
        raise self._broken(error) if words[0] == "config" and isinstance(error, RunError) else error


def engine_url() -> str:
    """The engine that the docker command talks to: DOCKER_HOST, else the context's."""
    return os.environ.get("DOCKER_HOST") or _context_url()


@cache
def _context_url() -> str:
    words = ["docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() or "unix:///var/run/docker.sock"


def _environment(variables: dict) -> dict[str, str]:
    return os.environ | compose.environment(**variables)


@cache
def _written(file: str, service: str) -> dict:
    """The service as it stands in the file, variables and all."""
    words = ["compose", "--file", file, "--profile", service, "config", "--no-interpolate", "--format", "json"]
    return json.loads(engine.run(words, "reading compose.yaml"))["services"].get(service)


def _read_off(template: str, value: str) -> dict[str, str]:
    """`${A:-1}:8080` laid over `5:8080` gives `{"A": "5"}`; nothing where it does not fit."""
    names, pattern, end = [], "", 0
    for match in _VARIABLE.finditer(template):
        names.append(match[1])
        pattern += re.escape(template[end : match.start()]) + "(.*)"
        end = match.end()
    found = re.fullmatch(pattern + re.escape(template[end:]), value)
    return dict(zip(names, found.groups(), strict=True)) if found else {}
