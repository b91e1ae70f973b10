"""How positions enter a model: what a configuration says of rope and windows against what a GGUF's header says.

A proof on short prompts cannot see a rope that is stretched far away, or a window that no short prompt fills, so these
are compared as numbers. Source: llama.cpp `conversion/base.py`, `set_gguf_parameters`.
"""

from collections.abc import Iterator

from training.core.errors import IntegrityError

_PLAIN = ("default", None, "none")
_BY_TENSOR = {"llama3": "rope_freqs.weight", "longrope": "rope_factors_long.weight"}


def require_equal(config: dict, values: dict, tensors: frozenset[str]) -> None:
    """Raise IntegrityError naming the first of rope's base, rope's scaling and the window that is another.

    Args:
        values: the header's.
        tensors: the names in the file.
    """
    for what, found, expected in _pairs(config, values, tensors):
        if found != expected:
            raise IntegrityError(
                "the file places tokens otherwise than the configuration does", where=what, found=found,
                expected=expected, next_command="make export-gguf with a checkpoint whose positions llama.cpp has",
            )  # fmt: skip


def _pairs(config: dict, values: dict, tensors: frozenset[str]) -> Iterator[tuple[str, object, object]]:
    architecture = values["general.architecture"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(next(iter(rope.values()), None), dict):  # one for each kind of layer
        rope = rope.get("full_attention", {})
    theta = rope.get("rope_theta", config.get("rope_theta"))
    written = values.get(f"{architecture}.rope.freq_base")
    if theta is not None and written is not None:
        yield "rope.freq_base", round(float(written), 2), round(float(theta), 2)
    kind = rope.get("rope_type", rope.get("type"))
    if kind in _BY_TENSOR:
        yield f"rope scaling {kind}", _BY_TENSOR[kind] in tensors, True
    elif kind not in _PLAIN:
        yield "rope.scaling.type", values.get(f"{architecture}.rope.scaling.type"), kind
        factor = values.get(f"{architecture}.rope.scaling.factor")
        yield "rope.scaling.factor", factor and round(factor, 4), round(float(rope.get("factor", 1)), 4)
    window = _window(config)
    if window is not None:
        yield "attention.sliding_window", values.get(f"{architecture}.attention.sliding_window"), window


def _window(config: dict) -> int | None:
    """The window that some layers have; None where none has, or the whole context fits it."""
    window, context = config.get("sliding_window"), config.get("max_position_embeddings", 0)
    layers = config.get("layer_types")
    unused = config.get("use_sliding_window") is False or (layers and "sliding_attention" not in layers)
    return None if not window or unused or window >= context else window
