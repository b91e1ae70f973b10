"""The shape of a model and its exact number of parameters, from a configuration alone, never from weights.

Owns which architectures the formula knows. One that it does not know is refused by name with what is missing; so are
configurations that nest (a vision tower beside the text), that are quantised already, or that lack a key. A test holds
the counts against transformers' own models, built on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from training.calculator.families import FAMILIES, Family, Flag
from training.core.errors import Problems, TrainyardError, UserError
from training.recipe import bases, rules
from training.recipe.model import Model


class UnknownShape(UserError):
    """The formula does not count this model; a trace may."""


_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")
_ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")
_LARGEST_SIZE = 2**31 - 1
_MOST_LAYERS = 1000


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
    """A decoder-only model: the sizes of its configuration, and the family that says what its blocks make of them."""

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
    activation: str
    parallel: bool
    rotary_dim: int
    score_cap: bool
    logit_cap: bool
    window: int | None  # of the layers that slide
    num_sliding: int
    drops_embedding: bool
    drops_residual: bool
    drops_scores: bool

    @property
    def kind(self) -> Family:
        """What sets the family's blocks apart."""
        return FAMILIES[self.family]

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of one block, in the order of the forward pass."""
        h, q, kv = self.hidden_size, self.query_size, self.num_key_value_heads * self.head_dim
        into = (q, kv, kv) if len(self.kind.qkv) == 3 else (q + 2 * kv,)
        attention = [Linear(name, h, out, self.attention_bias) for name, out in zip(self.kind.qkv, into, strict=True)]
        output = Linear(self.kind.output, q, h, self.output_bias)
        return (*attention, output, *self._feed_forward())

    def _feed_forward(self) -> list[Linear]:
        h, f, names = self.hidden_size, self.intermediate_size, self.kind.feed_forward
        wide = 2 * f if self.kind.gated and len(names) == 2 else f
        return [
            *(Linear(name, h, wide, self.mlp_bias) for name in names[:-1]), Linear(names[-1], f, h, self.mlp_bias)
        ]  # fmt: skip

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def head(self) -> Linear:
        """The linear that gives the logits; tied or not."""
        return Linear("lm_head", self.hidden_size, self.vocab_size, self.kind.head_bias)

    @property
    def embedding(self) -> Linear:
        """The embedding, as an adapter on it sees it."""
        return Linear(self.kind.embedding, self.vocab_size, self.hidden_size)

    @property
    def num_norms(self) -> int:
        """Norms of a block over its width."""
        if self.parallel and self.kind.shares_norm:
            return 1
        return 4 if self.kind.norms == "around" else 2

    @property
    def norm_sizes(self) -> list[int]:
        """Elements of each norm's gain and bias in one block."""
        return self.final_norm_sizes * self.num_norms + list(self.query_key_gains)

    @property
    def query_key_gains(self) -> tuple[int, ...]:
        """Width of the norms of queries and keys, where there are any."""
        over = {"head": (self.head_dim,) * 2, "width": (self.query_size, self.num_key_value_heads * self.head_dim)}
        return over.get(self.kind.query_key_norms, ())

    @property
    def final_norm_sizes(self) -> list[int]:
        return [self.hidden_size] * (2 if self.kind.norm == "layer" else 1)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Of a head of its own; of a tied one its bias alone."""
        return (0 if self.tied else self.embedding_parameters) + (self.vocab_size if self.head.bias else 0)

    @property
    def layer_parameters(self) -> int:
        return sum(linear.parameters for linear in self.linears) + sum(self.norm_sizes)

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
            + sum(self.final_norm_sizes)
        )

    def elements_of_tensors(self, under: int) -> int:
        """Elements of all tensors that have fewer than `under`."""
        layer = self.norm_sizes + [linear.out_features for linear in self.linears if linear.bias]
        layer += [linear.weight for linear in self.linears]
        once = [self.embedding_parameters, *self.final_norm_sizes]
        once += [] if self.tied else [self.embedding_parameters]
        once += [self.vocab_size] if self.head.bias else []
        return self.num_layers * sum(one for one in layer if one < under) + sum(one for one in once if one < under)

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
    problems = _refusals(config, source)
    if problems and all(isinstance(one, UnknownShape) for one in problems):
        raise problems[0]
    if problems:
        raise Problems(f"no estimate for {source}", problems)
    return _shape(config, config["model_type"])


def _shape(config: dict, name: str) -> Shape:
    known = FAMILIES[name]

    def told(flag: Flag | bool | None) -> bool:
        return bool(_get(config, flag.key, flag.default)) if isinstance(flag, Flag) else bool(flag)

    def capped(flag: Flag | None) -> bool:
        return flag is not None and config.get(flag.key, flag.default or None) is not None

    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or known.head_dim or config["hidden_size"] // heads
    return Shape(
        family=name,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_key_value_heads=_key_value_heads(config),
        head_dim=head_dim,
        max_positions=config.get("max_position_embeddings"),
        tied=bool(_get(config, "tie_word_embeddings", known.tied)),
        attention_bias=told(known.attention_bias),
        output_bias=told(known.output_bias),
        mlp_bias=told(known.mlp_bias),
        activation=_get(config, known.activation, known.default_activation),
        parallel=told(known.parallel),
        rotary_dim=int(head_dim * _rotary_share(config, known.partial_rotary)),
        score_cap=capped(known.score_cap),
        logit_cap=capped(known.logit_cap),
        window=config.get("sliding_window", known.window) if known.slides else None,
        num_sliding=_num_sliding(config, known),
        drops_embedding=bool(config.get(known.dropouts[0])),
        drops_residual=bool(config.get(known.dropouts[1])),
        drops_scores=bool(config.get("attention_dropout")),
    )


def _get(config: dict, key: str, default: object) -> object:
    value = config.get(key)
    return default if value is None else value


def _key_value_heads(config: dict) -> int:
    """As stated; as many as queries where that is null, or where the family knows no others."""
    stated = config.get("num_key_value_heads") if FAMILIES[config["model_type"]].has_key_value_heads else None
    return stated or config["num_attention_heads"]


def _rotary_share(config: dict, default: float | None) -> float:
    """The part of a head that is turned, by the names that it has had."""
    if default is None:
        return 1
    inner = config.get("rope_parameters")
    places = (config, inner if isinstance(inner, dict) else {})
    found = [place.get(key) for place in places for key in ("partial_rotary_factor", "rotary_pct")]
    return next((one for one in found if isinstance(one, int | float) and 0 < one <= 1), default)


def _num_sliding(config: dict, known: Family) -> int:
    """How many layers have a window: as listed, or all but each nth, or all."""
    each = known.slides
    if each is None or not config.get("sliding_window", known.window):
        return 0
    if isinstance(config.get("layer_types"), list):
        return sum(one == "sliding_attention" for one in config["layer_types"])
    num_layers = config["num_hidden_layers"]
    return num_layers if each == 1 else num_layers - num_layers // each


def _refusals(config: dict, source: str) -> list[TrainyardError]:
    family = config.get("model_type")
    if nested := [key for key, value in config.items() if isinstance(value, dict) and "hidden_size" in value]:
        return [_refusal("a configuration that nests models", source, ", ".join(nested), "one model's own config.json")]
    if not isinstance(family, str):
        return [_refusal("model_type is no name", source, family, f"such as {', '.join(FAMILIES)}")]
    if family not in FAMILIES:
        missing = "its layers, norms and attention as equations in training/calculator"
        known = f"{_one_of(FAMILIES)}; for {family!r} is missing: {missing}"
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
    if type(layers := config.get("num_hidden_layers")) is int and layers > _MOST_LAYERS:
        problems.append(_refusal("more layers than are added up", source, layers, f"at most {_MOST_LAYERS}"))
    for key in FAMILIES[family].stated:
        if key not in config:
            problems.append(_refusal(f"{key} is not stated", source, "nothing", f"{key}: its number in the model"))
    for key in FAMILIES[family].flags:
        if config.get(key):
            what = f"the formula does not count {key}"
            problems.append(UnknownShape(what, where=source, found=config[key], expected=f"{key}: false"))
    key, default = FAMILIES[family].activation, FAMILIES[family].default_activation
    if (activation := _get(config, key, default)) not in _ACTIVATIONS:
        expected = f"{key}: {_one_of(_ACTIVATIONS)}"
        what = "the formula does not know the activation"
        problems.append(UnknownShape(what, where=source, found=activation, expected=expected))
    return problems or _contradictions(config, source)


def _one_of(names: Iterable[str]) -> str:
    return f"one of {', '.join(names)}"


def _contradictions(config: dict, source: str) -> list[TrainyardError]:
    heads, kv_heads = config["num_attention_heads"], _key_value_heads(config)
    problems = []
    if heads % kv_heads:
        problems.append(
            _refusal(
                "num_attention_heads is not divisible by num_key_value_heads", source, f"{heads} / {kv_heads}", None
            )
        )
    if not (config.get("head_dim") or FAMILIES[config["model_type"]].head_dim) and config["hidden_size"] % heads:
        found = f"{config['hidden_size']} / {heads}"
        problems.append(_refusal("hidden_size is not divisible by num_attention_heads", source, found, "or a head_dim"))
    return problems


def _refusal(what: str, source: str, found: object, expected: object) -> UserError:
    return UserError(what, where=source, found=found, expected=expected)
