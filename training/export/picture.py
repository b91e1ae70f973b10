"""What stands beside a GGUF of its proof: every position's figures as JSON, and a small picture of them.

Owns the two files' names and forms; the judgement is `parity`'s.
"""

from pathlib import Path

from training.core import figure, files

_FLOOR = 1e-7


def paths_of(gguf: Path) -> tuple[Path, Path]:
    """`tiny-Q8_0.parity.json` and `tiny-Q8_0.parity.svg` of `tiny-Q8_0.gguf`."""
    stem = gguf.name.removesuffix(".gguf")
    return gguf.with_name(f"{stem}.parity.json"), gguf.with_name(f"{stem}.parity.svg")


def write(gguf: Path, manifest: dict, positions: list[dict]) -> None:
    """Write both files of a proved GGUF."""
    table, picture = paths_of(gguf)
    head = {key: manifest[key] for key in ("name", "quant_type", "sha256")}
    files.write_json(table, {"schema": 1, "kind": "parity", **head, **manifest["parity"], "each": positions})
    title = f"{manifest['name']} {manifest['quant_type']}: served against PyTorch"
    with figure.drawing(picture, title, width_inches=5.0, height_inches=2.4) as drawn:
        axes = drawn.subplots()
        lengths = [one["tokens"] for one in positions]
        for key, colour, label in (
            ("max_nats", figure.BLUE, "largest gap of the five likeliest"), ("kl_nats", figure.ORANGE, "divergence"),
        ):  # fmt: skip
            axes.scatter(lengths, [max(one[key], _FLOOR) for one in positions], s=5, color=colour, label=label)
        axes.set(yscale="log", xlabel="tokens before the position", ylabel="nats", title=title)
        figure.count_steps(axes)
        axes.legend()
