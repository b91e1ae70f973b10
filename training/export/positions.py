"""How positions enter a model: what a configuration says of rope and windows against what a GGUF's header says.

A proof on short prompts cannot see a rope that is stretched far away, or a window that no short prompt fills, so these
are compared as numbers. Sources: llama.cpp `conversion/base.py`, `set_gguf_parameters`; transformers
`modeling_rope_utils.py`, `_compute_llama3_parameters`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from training.core.errors import IntegrityError

_PLAIN = ("default", None, "none")
_YARN = {
    "original_max_position_embeddings": "original_context_length", "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor",
}  # fmt: skip
"""What a configuration may say of yarn beyond its factor, and the header's word for it."""


def require_equal(config: dict, values: dict, factors: Mapping[str, Sequence[float]]) -> None:
    """Raise IntegrityError naming the first of rope's base, rope's scaling and the window that is another.

    Args:
        values: the header's.
        factors: the numbers of the file's tensors that stretch rope, by name.
    """
    for what, found, expected in _pairs(config, values, factors):
        if found != expected:
            raise IntegrityError(
                "the file places tokens otherwise than the configuration does", where=what, found=found,
                expected=f"{expected}, as llama.cpp may not have it",
            )  # fmt: skip


def _pairs(
    config: dict, values: dict, factors: Mapping[str, Sequence[float]]
) -> Iterator[tuple[str, object, object]]:  # fmt: skip
    architecture = values["general.architecture"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(next(iter(rope.values()), None), dict):  # one for each kind of layer
        rope = rope.get("full_attention", {})
    theta = rope.get("rope_theta", config.get("rope_theta"))
    written = values.get(f"{architecture}.rope.freq_base")
    if theta is not None and written is not None:
        yield "rope.freq_base", round(float(written), 2), round(float(theta), 2)
    kind = rope.get("rope_type", rope.get("type"))
    if kind in ("llama3", "longrope"):
        expected = {"rope_freqs.weight": _llama3(config, rope, theta)} if kind == "llama3" else {
            f"rope_factors_{length}.weight": rope.get(f"{length}_factor", ()) for length in ("long", "short")
        }  # fmt: skip
        for name, numbers in expected.items():
            yield f"rope scaling {kind}: {name}", _rounded(factors.get(name, ())), _rounded(numbers)
    elif kind not in _PLAIN:
        yield "rope.scaling.type", values.get(f"{architecture}.rope.scaling.type"), kind
        factor = values.get(f"{architecture}.rope.scaling.factor")
        yield "rope.scaling.factor", factor and round(factor, 4), round(float(rope.get("factor", 1)), 4)
    for key, word in _YARN.items() if kind == "yarn" else ():
        if rope.get(key) is not None:
            written = values.get(f"{architecture}.rope.scaling.{word}")
            yield f"rope.scaling.{word}", written and round(written, 4), round(float(rope[key]), 4)
    window = _window(config)
    if window is not None:
        yield "attention.sliding_window", values.get(f"{architecture}.attention.sliding_window"), window


def _llama3(config: dict, rope: dict, theta: float | None) -> list[float]:
    """By how much each of rope's frequencies is divided."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    factor, low, high = (rope[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    numbers = []
    for place in range(0, width, 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * float(theta or 10000.0) ** (place / width))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        numbers.append(1 / ((1 - smooth) / factor + smooth))
    return numbers


def _rounded(numbers: Sequence[float]) -> list[float]:
    """As many digits as float32 tells for certain."""
    return [float(f"{number:.5g}") for number in numbers]


def _window(config: dict) -> int | None:
    """The window that some layers have; None where none has, or the whole context fits it."""
    window, context = config.get("sliding_window"), config.get("max_position_embeddings", 0)
    layers = config.get("layer_types")
    unused = config.get("use_sliding_window") is False or (layers and "sliding_attention" not in layers)
    return None if not window or unused or window >= context else window
