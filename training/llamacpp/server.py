"""A local llama.cpp server as a process: start, wait until it is healthy, stop.

A private server dies with the process that started it, whatever that died of; a detached one has a session of its own
and outlives it. The port is tried before the start, so that a busy one is told with its holder. Health means that
`/health` answers 200 and that this very process is the one that listens: an answer of anybody else's is not taken.
The kernel ties a private server to the starting thread, so start it from one that stays.
"""

import errno
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from training.calculator.serving_fit import UBATCH_TOKENS
from training.core import files, process
from training.core.errors import MachineError, RunError
from training.core.paths import REPOSITORY
from training.core.report import again
from training.core.units import format_seconds
from training.llamacpp.client import Client

HOST = "127.0.0.1"
SEED = 1
BATCH_SIZE, UBATCH_SIZE = 2048, UBATCH_TOKENS  # llama.cpp's at the pin, said so that a later default changes nothing
SERVER_MODULE = "training.llamacpp.server_main"
_LAST_LINES = 12
_POLL_SECONDS = 0.05


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def port_holder(port: int) -> str | None:
    """Who listens on a port, `python -m http.server (process 4711)`; None where nobody does.

    Raises MachineError where the port cannot be had at all.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            return None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise MachineError(f"port {port} cannot be used", where=HOST, found=error.strerror) from None
    for pid in _listeners(port):
        try:
            return f"{' '.join(psutil.Process(pid).cmdline())[:160]} (process {pid})"
        except psutil.Error:
            return f"process {pid}"
    return "a process of another user"


def _listeners(port: int) -> list[int]:
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return []
    return [c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid]


def require_free_port(port: int) -> None:
    """Raise MachineError, naming the holder, where somebody listens on `port`."""
    if holder := port_holder(port):
        raise MachineError(
            f"port {port} is in use",
            where=f"{HOST}:{port}",
            found=f"held by {holder}",
            expected="a free port",
            next_command=again("--port", str(free_port())),
        )


def find(word: str) -> list[dict]:
    """The identities of the servers whose command line has `word`, a start's token or a service; normally one."""
    found = []
    for candidate in psutil.process_iter():
        try:
            words = candidate.cmdline()
            if SERVER_MODULE in words and word in words:
                found.append(process.identity(candidate.pid))
        except psutil.Error:
            continue
    return found


@dataclass
class ServerProcess:
    """A server's process; made by `start`, or by hand for one that runs already. A context manager that stops it."""

    identity: dict
    port: int
    log: Path
    log_start: int = 0
    _popen: subprocess.Popen | None = field(default=None, repr=False)

    @classmethod
    def start(
        cls,
        model: Path,
        *,
        port: int | None = None,
        log: Path,
        ctx_size: int,
        slots: int = 1,
        threads: int | None = None,
        detached: bool = False,
        token: str | None = None,
        service: str | None = None,
        lora: Path | None = None,
        exact: bool = False,
    ) -> "ServerProcess":
        """Start a server and return at once.

        Args:
            port: None takes a free one.
            log: the server's output is appended here.
            ctx_size: tokens of context of each slot (llama.cpp rounds up to a multiple of 256).
            threads: None takes the CPUs that this process may use.
            detached: outlive this process; else the server dies with it.
            token: stands in the server's command line, so that `find` can tell this very start.
            service: stands there too, so that `find` can tell whatever serves under one name.
            lora: an adapter's GGUF, served beside the model.
            exact: round in attention no more than the weights do: flash attention on a CPU sums in 16 bits, and keys
                and values are kept in 16.

        Raises MachineError where the port is in use.
        """
        port = free_port() if port is None else port
        require_free_port(port)
        arguments = {
            "model": model, "port": port, "ctx-size": ctx_size * slots, "parallel": slots, "seed": SEED,
            "batch-size": BATCH_SIZE, "ubatch-size": UBATCH_SIZE, "threads": threads or len(os.sched_getaffinity(0)),
            "token": token or secrets.token_hex(8),
        }  # fmt: skip
        if service is not None:
            arguments["service"] = service
        if lora is not None:
            arguments["lora"] = lora
        if exact:
            arguments |= {"flash-attn": "off", "cache-type-k": "f32", "cache-type-v": "f32"}
        if not detached:
            arguments["parent"] = os.getpid()
        command = [sys.executable, "-m", SERVER_MODULE]
        command += [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
        return cls._spawn(command, port, log, detached)

    @classmethod
    def _spawn(cls, command: list[str], port: int, log: Path, detached: bool) -> "ServerProcess":
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            start = output.tell()
            popen = subprocess.Popen(
                command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=detached,
            )  # fmt: skip
        return cls(process.identity(popen.pid), port, log, start, popen)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def is_running(self) -> bool:
        """Whether this very process still runs."""
        if self._popen is not None:
            self._popen.poll()  # reaps it
        return process.is_running(self.identity)

    def listens(self) -> bool:
        """Whether this very process is the one that listens on the port."""
        try:
            connections = psutil.Process(self.identity["pid"]).net_connections(kind="tcp")
        except psutil.Error:
            return False
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == self.port for c in connections)

    def last_lines(self, count: int = _LAST_LINES) -> str:
        """The last lines that this start has written to its log."""
        try:
            with open(self.log, "rb") as file:
                file.seek(self.log_start)
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return "\n".join(lines[-count:]) or "(the log is empty)"

    def wait_healthy(self, budget_seconds: float, on_wait: Callable[[float, str], object] | None = None) -> float:
        """Wait until the server answers as healthy and return the seconds it took.

        `on_wait(seconds, state)` is called at each look. Refused and 503 mean wait. Raises RunError with the last log
        lines at once when the process has gone, and at the deadline.
        """
        client, started = Client(self.url), time.monotonic()
        while True:
            state = client.health()
            waited = time.monotonic() - started
            if not self.is_running():
                files.refuse_full_disk(self.log)
                raise self._gone(waited)
            if state == "ok" and self.listens():
                return waited
            if waited >= budget_seconds:
                raise RunError(
                    f"the server was not healthy within {format_seconds(budget_seconds)}",
                    where=self.url,
                    found=f"{state}; its last lines:\n{self.last_lines()}",
                    expected="/health to answer 200",
                )
            if on_wait:
                on_wait(waited, state)
            time.sleep(_POLL_SECONDS)

    def _gone(self, waited_seconds: float) -> RunError:
        code = self._popen.wait() if self._popen else None
        status = "" if code is None else f" with status {code}" if code >= 0 else f" by signal {-code}"
        return RunError(
            f"the server ended{status} after {format_seconds(waited_seconds)}, before it was healthy",
            where=self.log,
            found=f"its last lines:\n{self.last_lines()}",
            expected="a server that answers",
        )

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """End the server and wait for it: SIGTERM, and SIGKILL after the timeout. Nothing happens where it is gone."""
        if not self.is_running():
            return
        target = psutil.Process(self.identity["pid"])
        try:
            target.terminate()
            self._wait_gone(timeout_seconds)
            if self.is_running():
                target.kill()
                self._wait_gone(timeout_seconds)
        except psutil.NoSuchProcess:
            pass
        if self.is_running():
            raise MachineError("the server does not end", found=f"process {self.identity['pid']} after SIGKILL")

    def _wait_gone(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while self.is_running() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
