"""The shape of a model and its exact number of parameters, from a configuration alone, never from weights.

Owns which architectures the formula knows. One that it does not know is refused by name with what is missing; so are
configurations that nest (a vision tower beside the text), that are quantised already, or that lack a key. A test holds
the counts against transformers' own models, built on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.core.errors import Problems, TrainyardError, UserError
from training.recipe import bases, rules
from training.recipe.model import Model


class UnknownShape(UserError):
    """The formula does not count this model; a trace may."""


@dataclass(frozen=True)
class _Family:
    """What sets a family apart; `None` takes the configuration's own flag, which is False where it is absent."""

    attention_bias: bool | None = False  # on q, k and v
    output_bias: bool | None = False
    mlp_bias: bool | None = False
    query_key_norms: bool = False
    flags: tuple[str, ...] = ()  # keys that must be absent, null or False, since the formula does not count them


FAMILIES = {
    "llama": _Family(attention_bias=None, output_bias=None, mlp_bias=None),
    "mistral": _Family(),
    "qwen2": _Family(attention_bias=True, flags=("use_sliding_window",)),
    "qwen3": _Family(attention_bias=None, output_bias=None, query_key_norms=True, flags=("use_sliding_window",)),
}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings")
_LARGEST_SIZE = 2**31 - 1


@dataclass(frozen=True)
class Linear:
    """One linear layer of a block."""

    name: str
    in_features: int
    out_features: int
    bias: bool = False

    @property
    def weight(self) -> int:
        return self.in_features * self.out_features

    @property
    def parameters(self) -> int:
        return self.weight + (self.out_features if self.bias else 0)


@dataclass(frozen=True)
class Shape:
    """A decoder-only model of Llama's kind: pre-norm blocks of attention and a gated feed-forward."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    max_positions: int | None
    tied: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    query_key_norms: bool

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of one block, in the order of the forward pass."""
        h, f, d = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_heads * d, self.num_key_value_heads * d
        return (
            Linear("q_proj", h, q, self.attention_bias),
            Linear("k_proj", h, kv, self.attention_bias),
            Linear("v_proj", h, kv, self.attention_bias),
            Linear("o_proj", q, h, self.output_bias),
            Linear("gate_proj", h, f, self.mlp_bias),
            Linear("up_proj", h, f, self.mlp_bias),
            Linear("down_proj", f, h, self.mlp_bias),
        )

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Of a head of its own; a tied one has none."""
        return 0 if self.tied else self.embedding_parameters

    @property
    def layer_norm_parameters(self) -> int:
        return 2 * self.hidden_size + (2 * self.head_dim if self.query_key_norms else 0)

    @property
    def layer_parameters(self) -> int:
        return sum(linear.parameters for linear in self.linears) + self.layer_norm_parameters

    @property
    def linear_weights(self) -> int:
        """Elements of all the blocks' matrices: what NF4 quantises."""
        return self.num_layers * sum(linear.weight for linear in self.linears)

    @property
    def parameters(self) -> int:
        return (
            self.embedding_parameters
            + self.head_parameters
            + self.num_layers * self.layer_parameters
            + self.hidden_size
        )

    @property
    def small_parameters(self) -> int:
        """Of tensors under 4,096 elements, which 8-bit optimizers leave in float32."""
        vectors = [self.hidden_size] * 2 + [self.head_dim] * (2 if self.query_key_norms else 0)
        vectors += [linear.out_features for linear in self.linears if linear.bias]
        matrices = [linear.weight for linear in self.linears]
        in_layer = sum(size for size in vectors + matrices if size < 4096)
        return self.num_layers * in_layer + (self.hidden_size if self.hidden_size < 4096 else 0)

    @property
    def largest_tensor(self) -> int:
        return max(self.embedding_parameters, *(linear.weight for linear in self.linears))


def of_model(model: Model) -> Shape:
    """The shape of the model that a recipe names. Raises Problems or UserError where the formula does not know it."""
    source = "model.arch" if model.arch is not None else str(model.config)
    if model.base is not None:
        source = f"{model.base} in recipes/bases.yaml"
    return from_config(config_of(model), source)


def config_of(model: Model) -> dict:
    """The configuration of the model that a recipe names, in Hugging Face's words."""
    if model.arch is not None:
        return {name: value for name, value in model.arch.items() if name != "family"} | {
            "model_type": model.arch["family"]
        }
    if model.base is not None:
        return bases.find(model.base).config
    return rules.read_config(model.config, "model.config")


def from_config(config: dict, source: str) -> Shape:
    """The shape of a Hugging Face configuration. Raises Problems with everything that stands in the way."""
    family = config.get("model_type")
    problems = _refusals(config, source)
    if problems and all(isinstance(one, UnknownShape) for one in problems):
        raise problems[0]
    if problems:
        raise Problems(f"no estimate for {source}", problems)
    known = FAMILIES[family]

    def flag(of_family: bool | None, key: str) -> bool:
        return bool(config.get(key, False)) if of_family is None else of_family

    heads = config["num_attention_heads"]
    return Shape(
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        max_positions=config.get("max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=flag(known.attention_bias, "attention_bias"),
        output_bias=flag(known.output_bias, "attention_bias"),
        mlp_bias=flag(known.mlp_bias, "mlp_bias"),
        query_key_norms=known.query_key_norms,
    )


def _refusals(config: dict, source: str) -> list[TrainyardError]:
    family = config.get("model_type")
    if nested := [key for key, value in config.items() if isinstance(value, dict) and "hidden_size" in value]:
        return [_refusal("a configuration that nests models", source, ", ".join(nested), "one model's own config.json")]
    if not isinstance(family, str):
        return [_refusal("model_type is no name", source, family, f"such as {', '.join(FAMILIES)}")]
    if family not in FAMILIES:
        missing = "its layers, norms and attention as equations in training/calculator"
        known = f"one of {', '.join(FAMILIES)}; for {family!r} is missing: {missing}"
        what = f"the formula does not know the architecture {family!r}"
        return [UnknownShape(what, where=source, found=family, expected=known)]
    problems = []
    if config.get("quantization_config"):
        problems.append(_refusal("the configuration is quantised already", source, "quantization_config", "the base's"))
    for key in (*_REQUIRED, *_OPTIONAL):
        value = config.get(key)
        absent = value is None and key in _OPTIONAL
        if not absent and not (type(value) is int and 1 <= value <= _LARGEST_SIZE):
            expected = f"a whole number from 1 to {_LARGEST_SIZE}"
            problems.append(_refusal(f"{key} is missing or no size", source, str(value)[:80], expected))
    for key in FAMILIES[family].flags:
        if config.get(key):
            what = f"the formula does not count {key}"
            problems.append(UnknownShape(what, where=source, found=config[key], expected=f"{key}: false"))
    return problems or _contradictions(config, source)


def _contradictions(config: dict, source: str) -> list[TrainyardError]:
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    problems = []
    if heads % kv_heads:
        problems.append(
            _refusal(
                "num_attention_heads is not divisible by num_key_value_heads", source, f"{heads} / {kv_heads}", None
            )
        )
    if not config.get("head_dim") and config["hidden_size"] % heads:
        found = f"{config['hidden_size']} / {heads}"
        problems.append(_refusal("hidden_size is not divisible by num_attention_heads", source, found, "or a head_dim"))
    return problems


def _refusal(what: str, source: str, found: object, expected: object) -> UserError:
    return UserError(what, where=source, found=found, expected=expected)
