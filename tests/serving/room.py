"""A test's data root with two models and a service of its own, in either runtime."""

from dataclasses import dataclass
from pathlib import Path

from training.core import files
from training.llamacpp.client import Client
from training.serving import control, evaluate
from training.serving.evaluate import Evaluation, Request
from training.serving.service import Service, open_service


@dataclass
class Room:
    """A test's data root with a service; `serves()` asks the server itself."""

    data: Path
    port: int
    reports: Path
    smoke: Path
    name: str = "test"

    def model(self, name: str) -> Path:
        return self.data / "models" / "trained" / name / f"{name}-F16.gguf"

    def service(self) -> Service:
        return open_service(self.name)

    def start(self, name: str = "old") -> dict:
        return control.start(str(self.model(name)), service=self.name, port=self.port)

    def request(self, name: str = "new", **changes: object) -> Request:
        settings = {"service": self.name, "port": self.port, "smoke": self.smoke, "budget_seconds": 20.0} | changes
        return Request(str(self.model(name)), **settings)

    def evaluate(self, name: str = "new", **changes: object) -> Evaluation:
        return evaluate.evaluate(self.request(name, **changes))

    def serves(self) -> str | None:
        """The stem of the file that the server on the port says it serves; None where nothing answers."""
        client = Client(f"http://127.0.0.1:{self.port}")
        if client.health() != "ok":
            return None
        return Path(client.model_info()["path"]).stem

    def rewrite_manifest(self, name: str, **changes: object) -> None:
        """Change a manifest so that it agrees with the file again, but for `changes`."""
        path = self.model(name).with_suffix(".manifest.json")
        old = files.read_json(path)
        files.write_json(path, old | files.file_record(self.model(name)) | changes)
