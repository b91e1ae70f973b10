"""The `docker` runtime: a server of compose.yaml, changed by Compose alone and looked at through the Docker SDK.

What is in service is the engine's to say, whoever started it: the record is read off the container. `<key>.json` adds
what the engine does not know, the hash of the file, for a container that was started here. Compose finds a service's
container by labels, and so does this; a container without our labels, or of another checkout, is never touched.

The container is recreated with the variables of the one before, read off by laying compose.yaml's own text over it, but
for the model. Compose's hash of a service's configuration proves that both give the same container.
Source: Compose v2 labels `com.docker.compose.*`; Docker Engine API, `ContainerInspect`.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from training.containers import compose, engine, image
from training.core import files, paths
from training.core.errors import IntegrityError, MachineError, RunError
from training.core.report import again, utc_stamp
from training.core.units import format_seconds
from training.llamacpp.client import Client
from training.llamacpp.server import HOST, free_port, require_free_port
from training.serving import facts, records
from training.serving.composed import Composed, engine_url
from training.serving.model import ModelFile
from training.serving.runtime import OnWait
from training.serving.settings import require_in_range, service_command

_LABEL_HASH = "com.docker.compose.config-hash"
_LABEL_FOLDER = "com.docker.compose.project.working_dir"
_LABEL_ONE_OFF = "com.docker.compose.oneoff"
_STOP_SECONDS = 10
_LAST_LINES = 12
_POLL_SECONDS = 0.1


class DockerRuntime:
    """One service of compose.yaml in this checkout's project."""

    name = "docker"
    record_kinds = {
        "container": str | None, "name": str, "variables": dict, "image": str, "image_name": str,
        "config_hash": str | None, "restarts": int,
    }  # fmt: skip

    def __init__(self, service: str, folder: Path) -> None:
        self.service = service
        self.project = compose.project()
        self.key = f"{self.project}.{service}"
        self._kept_path = folder / f"{self.key}.json"
        self._composed = Composed(service)
        self._sdk: object | None = None

    def hold(self, descriptor: int) -> None:
        self._composed.lock = descriptor

    # ---- looking

    @contextlib.contextmanager
    def _ask(self) -> Iterator[object]:
        """The SDK's client; whatever it raises is told as the engine not answering, or by the engine's own words."""
        import requests

        import docker

        try:
            self._sdk = self._sdk or docker.APIClient(base_url=engine_url(), version="auto")
            yield self._sdk
        except docker.errors.NotFound as error:
            raise RunError("the container has gone", found=error.explanation, expected=f"{self.service} here") from None
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            raise MachineError(
                "the Docker engine does not answer",
                where=engine_url(),
                found=str(error).splitlines()[0][:200],
                expected="a running engine",
                next_command=f"sudo systemctl start docker && {service_command('serve-restore', self.service)}",
            ) from error

    def _containers(self) -> list[dict]:
        """Our containers of this service, inspected, the running first. Raises MachineError on another checkout's."""
        labels = [f"{compose.LABEL_PROJECT}={self.project}", f"{compose.LABEL_SERVICE}={self.service}"]
        with self._ask() as sdk:
            listed = sdk.containers(all=True, filters={"label": [*labels, f"{_LABEL_ONE_OFF}=False"]})
            for each in listed:
                place = each["Labels"].get(_LABEL_FOLDER, "")
                if Path(place).resolve() != compose.FILE.parent.resolve():
                    raise self._foreign(
                        each["Names"][0].lstrip("/"), f"of another checkout: {place}",
                        f"COMPOSE_PROJECT_NAME={self.project}-2 {again()}",
                    )  # fmt: skip
            found = [sdk.inspect_container(each["Id"]) for each in listed]
        return sorted(found, key=lambda container: not container["State"]["Running"])

    def _foreign(self, name: str, whose: str, next_command: str) -> MachineError:
        return MachineError(
            f"a container named {name} is in the way, and it is not ours to touch",
            where=f"project {self.project}",
            found=whose,
            expected=f"a container of the service {self.service} of this checkout, or none",
            next_command=next_command,
        )

    def is_there(self) -> bool:
        return bool(self._containers())

    def record(self) -> dict | None:
        containers = self._containers()
        return self._described(containers[0]) if containers else None

    def _described(self, container: dict) -> dict:
        """The record of a container, with the file's hash where it was started here."""
        state, host = container["State"], container["HostConfig"]
        served_as = facts.model_of(container)
        variables = self._composed.variables_of(container)
        kept = self._kept(container["Id"])
        port = variables.get(f"{self._composed.prefix}_PORT", "")
        model = facts.host_path(served_as, container["Mounts"])
        return {
            "schema": 1, "kind": "service", "service": self.service, "runtime": self.name, "project": self.project,
            "container": container["Id"], "name": container["Name"].lstrip("/"),
            "port": int(port) if port.isdigit() else 0,
            "model": str(model), "served_as": served_as, "sha256": kept.get("sha256"), "file": kept.get("file"),
            "memory_bytes": kept.get("memory_bytes") or (model.stat().st_size if model.is_file() else 0),
            "device": "cuda" if host.get("DeviceRequests") else "cpu",
            "arguments": facts.flags(container["Config"]["Cmd"]), "variables": variables,
            "command": container["Config"]["Cmd"], "environment": container["Config"]["Env"],
            "image": container["Image"], "image_name": container["Config"]["Image"],
            "config_hash": container["Config"]["Labels"].get(_LABEL_HASH),
            "restarts": container["RestartCount"], "started": facts.epoch(state["StartedAt"]),
            "log": f"docker logs {container['Name'].lstrip('/')}", "since": state["StartedAt"][:19] + "Z",
        }  # fmt: skip

    def _kept(self, container_id: str) -> dict:
        try:
            kept = records.read_record(self._kept_path, self.record_kinds)
        except IntegrityError:  # none, or damaged: it only ever adds to what the engine says
            return {}
        return kept if kept.get("container") == container_id else {}

    def new_record(
        self, model: ModelFile, *, port: int | None, ctx_size: int | None = None, slots: int | None = None
    ) -> dict:
        prefix, composed = self._composed.prefix, self._composed
        served_as = str(paths.container_path(model.path))
        before = self._containers()
        variables = (composed.variables_of(before[0]) if before else {}) | {f"{prefix}_MODEL": served_as}
        variables.pop("TRAINYARD_TAG", None)  # the image of this checkout, whichever the one before had
        if port is not None:
            require_in_range("port", port, 1, 65_535)
            variables[f"{prefix}_PORT"] = str(port)
        if ctx_size is not None:
            require_in_range("context size", ctx_size, 1, 1 << 24)
            variables[f"{prefix}_CTX_SIZE"] = str(ctx_size)
        if slots is not None:
            variables[f"{prefix}_SLOTS"] = str(slots)
        composed.require_settings(variables)
        settled = composed.config(variables)
        arguments = facts.flags(settled["command"])
        needs_gpu = bool(settled.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices"))
        return {
            "schema": 1, "kind": "service", "service": self.service, "runtime": self.name, "project": self.project,
            "container": None, "name": self._composed.container_name, "port": int(settled["ports"][0]["published"]),
            "model": str(model.path), "served_as": served_as, "sha256": model.sha256, "file": model.signature,
            "memory_bytes": model.memory_bytes(int(arguments.get("ctx-size", 0))),
            "device": "cuda" if needs_gpu else "cpu", "arguments": arguments, "variables": variables,
            "image": image.describe(compose.image_of(self.service))["id"], "image_name": settled["image"],
            "config_hash": composed.hash(variables), "restarts": 0, "started": time.time(),
            "log": f"docker logs {self._composed.container_name}", "since": utc_stamp(),
        }  # fmt: skip

    def again(self, record: dict) -> dict:
        return record | {"container": None, "restarts": 0}

    # ---- changing

    def start(self, record: dict) -> dict:
        self._clear_unless_whole()
        with self._named(record):
            self._composed.up(record["variables"])
        found = self._containers()
        if not found:
            raise RunError("Compose made no container", where=self.service, expected=record["name"])
        now = self._described(found[0])
        self._require_same(record, now)
        return record | {part: now[part] for part in ("container", "name", "restarts", "started", "since", "log")}

    @contextlib.contextmanager
    def _named(self, record: dict) -> Iterator[None]:
        """Let the image's name mean what it did when the record was made; it may have been built anew since."""
        name, now = record["image_name"], engine.inspect(record["image_name"])
        moved = now is None or now["Id"] != record["image"]
        if moved:
            engine.run(["tag", record["image"], name], f"finding the image of {self.service}")
        try:
            yield
        finally:
            if moved and now:
                engine.run(["tag", now["Id"], name], "giving the image's name back")

    def _clear_unless_whole(self) -> None:
        """Remove what a recreation that was cut off has left: Compose would stumble over it."""
        found = self._containers()
        if any(container["Name"].lstrip("/") != self._composed.container_name for container in found):
            self._remove(found)

    def require_as_recorded(self, record: dict) -> None:
        for container in self._mine(record):
            self._require_same(record, self._described(container))

    def _require_same(self, record: dict, now: dict) -> None:
        for part, what in (("config_hash", "configuration"), ("image", "image"), ("device", "device")):
            if record[part] != now[part]:
                raise MachineError(
                    f"the container's {what} is not the one that was asked for",
                    where=now["name"],
                    found=now[part],
                    expected=record[part],
                    next_command=f"docker inspect {now['name']}",
                )

    def _mine(self, record: dict) -> list[dict]:
        """The containers of a record: by id; by the model where its start was cut off before the id was known."""
        found = self._containers()
        if record["container"]:
            return [container for container in found if container["Id"] == record["container"]]
        return [container for container in found if facts.model_of(container) == record["served_as"]]

    def is_running(self, record: dict) -> bool:
        return any(container["State"]["Running"] for container in self._mine(record))

    def wait_healthy(self, record: dict, budget_seconds: float, on_wait: OnWait | None) -> float:
        client, started = Client(self.url(record)), time.monotonic()
        while True:
            container = next(iter(self._mine(record)), None)
            waited = time.monotonic() - started
            self._require_alive(record, container, waited)
            state = client.health()
            if state == "ok":
                return waited
            if waited >= budget_seconds:
                raise RunError(
                    f"the server was not healthy within {format_seconds(budget_seconds)}",
                    where=self.url(record),
                    found=f"{state}; its last lines:\n{self._last_lines(container['Id'])}",
                    expected="/health to answer 200",
                    next_command=record["log"],
                )
            if on_wait:
                on_wait(waited, state)
            time.sleep(_POLL_SECONDS)

    def _require_alive(self, record: dict, container: dict | None, waited_seconds: float) -> None:
        """A server that ends is started again by the engine, for ever: its first end is the answer."""
        if container is None:
            raise RunError("the container has gone", where=record["name"], expected="it running")
        state = container["State"]
        if state["Running"] and not state["Restarting"] and container["RestartCount"] <= record["restarts"]:
            return
        how = "for want of memory" if state["OOMKilled"] else f"with status {self._exit_status(record, container)}"
        raise RunError(
            f"the server ended {how} after {format_seconds(waited_seconds)}, before it was healthy",
            where=record["name"],
            found=f"its last lines:\n{state['Error'] or self._last_lines(container['Id'])}",
            expected="a server that answers",
            next_command=record["log"],
        )

    def _exit_status(self, record: dict, container: dict) -> int:
        """By the engine's events where it has been started again: the state of a container that runs has none."""
        window = {"since": str(int(record["started"])), "until": f"{time.time():.9f}"}
        with self._ask() as sdk:
            ends = sdk.events(**window, filters={"container": container["Id"], "event": "die"}, decode=True)
            codes = [int(end["Actor"]["Attributes"]["exitCode"]) for end in ends]
        return codes[0] if codes else container["State"]["ExitCode"]

    def _last_lines(self, container_id: str) -> str:
        with self._ask() as sdk:
            return sdk.logs(container_id, tail=_LAST_LINES).decode(errors="replace").strip() or "(the log is empty)"

    def stop(self, record: dict) -> None:
        with self._ask() as sdk:
            for container in self._mine(record):
                if container["State"]["Running"] or container["State"]["Restarting"]:
                    sdk.stop(container["Id"], timeout=_STOP_SECONDS)

    def remove(self) -> None:
        self._remove(self._containers())
        self._kept_path.unlink(missing_ok=True)

    def _remove(self, containers: list[dict]) -> None:
        with self._ask() as sdk:
            for container in containers:
                if container["State"]["Running"]:
                    sdk.stop(container["Id"], timeout=_STOP_SECONDS)
                sdk.remove_container(container["Id"], force=True)

    def leave(self, record: dict | None) -> None:
        if record is None:
            return self.remove()
        if not self._mine(record):  # a stopped container gave way: another one like it, not started
            self._clear_unless_whole()
            with self._named(record):
                self._composed.create(record["variables"])
            record = record | {"container": self._containers()[0]["Id"]}
        files.write_json(self._kept_path, record)
        return None

    # ---- standing in the way

    def require_startable(self, record: dict) -> None:
        if record["device"] == "cuda":
            engine.require_gpu()
        with self._ask() as sdk:
            everyone = sdk.containers(all=True)
        ours = {container["Id"] for container in self._containers()}
        for each in everyone:
            if f"/{self._composed.container_name}" in each["Names"] and each["Id"] not in ours:
                name = self._composed.container_name
                rename = f"docker rename {name} {name}-other"
                raise self._foreign(name, f"a container of the image {each['Image']}", rename)
            if record["port"] in (port.get("PublicPort") for port in each["Ports"]) and each["Id"] not in ours:
                raise self._port_taken(record["port"], each["Names"][0].lstrip("/"))
        require_free_port(record["port"])

    def _port_taken(self, port: int, name: str) -> MachineError:
        return MachineError(
            f"port {port} is in use",
            where=f"{HOST}:{port}",
            found=f"held by the container {name}",
            expected="a free port",
            next_command=f"{self._composed.prefix}_PORT={free_port()} {again()}",
        )

    def require_restorable(self, record: dict) -> None:
        """Hold what compose.yaml and the image would give now against the container that would have to come back."""
        kept = engine.inspect(record["image"]) or {}
        now = {"config_hash": self._composed.hash(record["variables"]), "image": kept.get("Id")}
        for part, what in (("config_hash", "compose.yaml"), ("image", "the server's image")):
            if now[part] != record[part]:
                stop = service_command("serve-stop", self.service)
                raise MachineError(
                    f"the container in service could not be put back as it is: {what} has changed since it was made",
                    where=record["name"],
                    found=now[part],
                    expected=record[part],
                    next_command=f"{stop} && {service_command('serve-start', self.service, MODEL=record['served_as'])}",
                )

    def by_hand(self, record: dict) -> str:
        return self._composed.by_hand(record["variables"])

    def url(self, record: dict) -> str:
        return f"http://{HOST}:{record['port']}"
