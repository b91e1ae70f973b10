"""Where a measured model came from, as its report shows it: the losses of its run, and the chain of hashes."""

from training.core import files
from training.evaluation.subject import Subject
from training.runs.events import read_events

Curves = tuple[tuple[str, list[tuple[float, float]]], ...]


def curves(subject: Subject) -> Curves:
    """The training and validation losses of a checkpoint's run, in nats a token; none for what no run made."""
    if subject.run is None:
        return ()
    found = []
    for name, event, key in (("train", "step", "train/loss_nats"), ("validation", "validation", "eval/loss_nats")):
        points = {one["step"]: one[key] for one in read_events(subject.run, event) if key in one}
        if points:
            found.append((name, sorted(points.items())))
    return tuple(found)


def chain(subject: Subject) -> tuple[tuple[str, str], ...]:
    """The hashes from the data to the model's weights, those that are known."""
    origin = subject.origin
    links = {
        "data": (origin.get("dataset") or {}).get("hash"), "base": (origin.get("base") or {}).get("weights_sha256"),
        "tokenizer": subject.tokenizer.hash, "recipe": origin.get("recipe_sha256"), "model": subject.sha256,
    }  # fmt: skip
    return tuple((name, files.short(digest)) for name, digest in links.items() if digest)
