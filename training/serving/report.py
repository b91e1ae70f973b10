"""The report of an evaluation: its shape as a document, its place on disk, and its rows for people.

No home folder and no host name stands in it. A part that was not reached is null.
"""

from pathlib import Path

from training.core import files, paths, signals, version
from training.core.errors import INTERRUPTED_EXIT_CODE, TrainyardError
from training.core.log import say
from training.core.report import utc_stamp
from training.core.units import format_seconds
from training.llamacpp.client import GREEDY
from training.serving import memory
from training.serving.swap import Swap

_TEXT_WIDTH = 48


def opening(model: str, other: str | None, dry_run: bool, keep_serving: bool) -> dict:
    """The document with every part in its place and nothing found yet; `other` is the model compared with, if any."""
    return {
        "schema": 1, "kind": "serve-eval", "started": utc_stamp(), "service": None, "verdict": None,
        "exit_code": None, "error": None, "dry_run": dry_run, "keep_serving": keep_serving, "previous": None,
        **_opening_part(model), "other": other and _opening_part(other), "restore": None, "tool": version.tool(),
    }  # fmt: skip


def _opening_part(model: str) -> dict:
    """What is found of one model."""
    return {
        "model": {"asked": model}, "manifest": None, "fit": None, "server": None, "loaded": None,
        "fingerprint": None, "prompt_ids": None, "smoke": [], "seconds": {},
    }  # fmt: skip


def close(document: dict, error: BaseException | None) -> None:
    """Set the verdict, the exit code and the error, and take the machine's own places out of every text."""
    if error is None:
        document |= {"verdict": "PASS", "exit_code": 0}
    elif isinstance(error, KeyboardInterrupt):
        name = signals.name_of(error)
        document |= {"verdict": "INTERRUPTED", "exit_code": INTERRUPTED_EXIT_CODE}
        document["error"] = {"kind": name, "exit_code": INTERRUPTED_EXIT_CODE, "what": f"stopped by {name}"}
    else:
        known = isinstance(error, TrainyardError)
        parts = error.to_json() if known else {"kind": type(error).__name__, "exit_code": 1, "what": str(error)}
        document |= {"verdict": "FAIL", "exit_code": parts["exit_code"], "error": parts}
    _clean(document)
    if document["other"]:
        _clean(document["other"])


def _clean(part: dict) -> None:
    part |= {key: _for_people(value) for key, value in part.items() if key not in ("smoke", "other")}


def _for_people(value: object) -> object:
    """A part of the document without the home folder and the data root's place in its texts."""
    if isinstance(value, dict):
        return {key: _for_people(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_for_people(part) for part in value]
    return paths.for_people(value) if isinstance(value, str) else value


def write(document: dict, folder: Path, name: str) -> Path | None:
    """Keep the document as `<utc>-<name>.json`; a folder that cannot be written is said, not raised."""
    path, number = folder / f"{document['started']}-{name}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{document['started']}-{name}-{number}.json"
    try:
        files.write_json(path, document)
        return path
    except (TrainyardError, OSError) as error:
        say(f"warning: the report was not kept: {error}")
        return None


def record_part(record: dict) -> dict:
    """A service's record as reports show it."""
    kept = (
        "runtime", "version", "process", "project", "container", "image", "image_name", "config_hash", "port",
        "arguments", "model", "served_as", "sha256", "memory_bytes", "log", "since",
    )  # fmt: skip
    return {key: record.get(key) for key in kept} | {"request": GREEDY}


def state_part(state: dict) -> dict:
    """A service's state as reports show it."""
    server = state["record"] and record_part(state["record"])
    return {key: state[key] for key in ("running", "healthy", "loaded")} | {"server": server}


def restore_part(swap: Swap) -> dict:
    """The restore's outcome: `state` is running, stopped, kept (the new model stays), untouched or failed."""
    if swap.restore:
        return swap.restore
    state = "kept" if swap.kept else "failed" if swap.begun else "untouched"
    return {"state": state, "proved": False}


def rows(document: dict, path: Path | None) -> dict[str, str]:
    """The rows of the report block, those that were reached."""
    found = {
        "service": _service(document),
        "previous": _previous(document["previous"]),
        "new model": _new_model(document["model"]),
        "fits": document["fit"] and memory.fit_text(document["fit"]),
        "health": _health(document),
        "prompt ids": _prompt_ids(document["prompt_ids"]),
        "fingerprint": _fingerprint(document["fingerprint"]),
        "smoke": _smoke(document["smoke"]),
        "compared with": _other(document),
        "overhead": _overhead(document["seconds"]),
        "restored": _restored(document),
        "report": path and str(path),
    }
    return {name: text for name, text in found.items() if text}


def _service(document: dict) -> str | None:
    server = document["server"]
    if server is None:
        return document["service"]
    image = f", image {server['image'].removeprefix('sha256:')[:12]}" if server["image"] else ""
    return f"{document['service']}, {server['runtime']}{image}"


def _served(server: dict) -> str:
    return f"{server['model']}{hash_part(server['sha256'])} on port {server['port']}"


def hash_part(sha256: str | None) -> str:
    """` (1a2b3c4d5e6f)`, or nothing where nobody has hashed the file."""
    return f" ({files.short(sha256)})" if sha256 else ""


def _previous(previous: dict | None) -> str | None:
    if previous is None:
        return None
    if not previous["running"]:
        return "stopped"
    return _served(previous["server"]) + ("" if previous["healthy"] else ", running but not healthy")


def _new_model(model: dict) -> str:
    if "sha256" not in model:
        return model["asked"]
    return f"{model['container_path']} ({files.short(model['sha256'])}, {model['quant_type']}, as its manifest says)"


def _health(document: dict) -> str | None:
    waited, loaded = document["seconds"].get("health_wait"), document["loaded"]
    if waited is None:
        return None
    said = f"; the server says {loaded['path']}, {loaded['parameters']} parameters" if loaded else ""
    return f"after {format_seconds(waited)}{said}"


def _prompt_ids(part: dict | None) -> str | None:
    if part is None:
        return None
    if not part["compared"]:
        return f"not compared: {part['why']}"
    checked = part.get("prompts")
    return checked and f"equal in all {len(checked)} prompts ({sum(each['num_tokens'] for each in checked)} ids)"


def _fingerprint(part: dict | None) -> str | None:
    if part is None:
        return None
    return (
        f"at most {part['max_nats']:.4f} nats from the manifest's (limit {part['tolerance_nats']}), "
        f"top token {part['top1_agree']} of {part['num_prompts']}"
    )


def _smoke(results: list[dict]) -> str | None:
    if not results:
        return None
    lines = [f"{sum(result['passed'] for result in results)} of {len(results)} passed"]
    for result in results:
        failed = "" if result["passed"] else f" FAILED: {result['why']}"
        lines.append(f"{result['name']}: {_shown(result['text'])}{failed}")
    return "\n".join(lines)


def _other(document: dict) -> str | None:
    """Both models' answers side by side, prompt by prompt; the same conditions stand in the document."""
    other = document["other"]
    if not other or not other["smoke"]:
        return other and other["model"]["asked"]
    lines = [f"{other['model']['container_path']} ({files.short(other['model']['sha256'])}, same service and settings)"]
    for one, two in zip(document["smoke"], other["smoke"], strict=False):
        same = "the same text" if one["text"] == two["text"] else f"{_shown(one['text'])} / {_shown(two['text'])}"
        lines.append(f"{one['name']}: {same}, {one['milliseconds']} / {two['milliseconds']} ms")
    return "\n".join(lines)


def _shown(text: str) -> str:
    text = repr(text)
    return text if len(text) <= _TEXT_WIDTH else text[: _TEXT_WIDTH - 4] + " ..."


def _overhead(seconds: dict) -> str | None:
    taken = seconds.get("overhead")
    return taken and f"{format_seconds(taken)} of swapping beyond the servers' own loading"


def _restored(document: dict) -> str | None:
    part = document["restore"]
    if part is None:
        return None
    if part["state"] == "running":
        proof = f"the server says it serves {part['loaded']['path']}" if part["proved"] else "unhealthy as before"
        return f"yes, in {format_seconds(part['seconds'])}: {proof}"
    return {
        "stopped": "yes: stopped, as before",
        "kept": f"no, as asked: {document['model']['container_path']} stays on port {document['server']['port']}",
        "untouched": "nothing was changed",
        "failed": "NO",
    }[part["state"]]
