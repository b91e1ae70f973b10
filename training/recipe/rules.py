"""What keys of a recipe ask of each other, and what training asks beyond planning.

A rule is a function of the resolved values that yields errors. It names the keys that it reads and is skipped where one
of them is already wrong, so that one slip gives one message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from training.core.errors import TrainyardError, UserError
from training.recipe import bases
from training.recipe import schema as schemas
from training.recipe.reading import Origin

Where = Callable[[str], str]
_LARGEST_CONFIG_BYTES = 1 << 20
_RULES: list[tuple[tuple[str, ...], Callable]] = []


def _rule(*keys: str) -> Callable:
    def register(function: Callable) -> Callable:
        _RULES.append((keys, function))
        return function

    return register


def broken(values: dict, origins: dict[str, Origin], where: Where, bad_keys: set[str]) -> list[TrainyardError]:
    """Every rule that the values break."""
    problems: list[TrainyardError] = []
    for keys, rule in _RULES:
        if not any(touches(key, bad) for key in keys for bad in bad_keys):
            problems += rule(values, where, origins)
    return problems


def touches(key: str, bad: str) -> bool:
    """Whether two dotted keys are one, or one lies in the other."""
    return key == bad or key.startswith(f"{bad}.") or bad.startswith(f"{key}.")


def config_path(values: dict, origins: dict[str, Origin]) -> Path | None:
    """`model.config` made absolute: from the file that names it, or from the current folder on a command line."""
    text, origin = values["model"]["config"], origins.get("model.config")
    if text is None:
        return None
    return ((origin.file.parent if origin and origin.file else Path.cwd()) / text).absolute()


def read_config(path: Path, where: str) -> dict:
    """A `config.json` as written. Raises UserError where it is missing or not one: nothing else is opened."""
    if path.exists() and not path.is_file():
        raise UserError("not a config.json", where=where, found=f"{path}, no plain file", expected="a JSON object")
    if path.exists() and path.stat().st_size > _LARGEST_CONFIG_BYTES:
        found = f"{path.stat().st_size} bytes"
        raise UserError("not a config.json", where=where, found=found, expected=f"at most {_LARGEST_CONFIG_BYTES}")
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError("no such config.json", where=where, found=path) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("not a config.json", where=where, found=str(error)[:200], expected="a JSON object") from error
    if not isinstance(config, dict):
        raise UserError("not a config.json", where=where, found=type(config).__name__, expected="a JSON object")
    return config


# ---- the rules


@_rule("method", "model")
def _one_model(values: dict, where: Where, origins: dict) -> Iterator[TrainyardError]:
    given = [key for key in ("base", "arch", "config") if values["model"][key] is not None]
    ways = [f"model.{key}" for key in schemas.begins_from(values["method"])]
    wanted = f"one of {', '.join(ways[:-1])} and {ways[-1]}" if len(ways) > 1 else f"{ways[0]} alone"
    if len(given) > 1:
        found = " and ".join(f"model.{key}" for key in given)
        yield UserError(
            "a recipe names one model",
            where=where(f"model.{given[-1]}"),
            found=found,
            expected=f"{wanted}; null takes one back",
        )
    elif not given:
        yield UserError("a recipe names a model", where=where("model"), found="none", expected=wanted)
    elif (found := f"model.{given[0]}") not in ways:
        start = "a base" if "model.base" in ways else "random weights"
        yield UserError(
            f"method {values['method']} starts from {start}", where=where(found), found=found, expected=wanted
        )


@_rule("model.base")
def _known_base(values: dict, where: Where, origins: dict) -> Iterator[TrainyardError]:
    if (name := values["model"]["base"]) is not None:
        try:
            bases.find(name, where("model.base"))
        except UserError as error:
            yield error


@_rule("model.config")
def _readable_config(values: dict, where: Where, origins: dict) -> Iterator[TrainyardError]:
    if (path := config_path(values, origins)) is not None:
        try:
            read_config(path, where("model.config"))
        except UserError as error:
            yield error


@_rule("model.arch")
def _heads_divide(values: dict, where: Where, origins: dict) -> Iterator[TrainyardError]:
    if (arch := values["model"]["arch"]) is None:
        return
    for whole, part in (("hidden_size", "num_attention_heads"), ("num_attention_heads", "num_key_value_heads")):
        if arch[whole] % arch[part]:
            yield UserError(
                f"model.arch.{whole} is not divisible by model.arch.{part}",
                where=where(f"model.arch.{whole}"), found=f"{arch[whole]} / {arch[part]}", expected="a whole number",
            )  # fmt: skip
        elif whole == "hidden_size" and arch[whole] // arch[part] % 2:
            yield UserError(
                "rotary positions need an even head dimension",
                where=where("model.arch.num_attention_heads"), found=f"{arch[whole]} / {arch[part]}",
                expected="an even number",
            )  # fmt: skip


@_rule("model", "data.seq_len")
def _positions(values: dict, where: Where, origins: dict) -> Iterator[TrainyardError]:
    try:
        longest = _shape(values, origins).get("max_position_embeddings")
    except UserError:
        return  # told by the rule of the base or of the config
    if isinstance(longest, int) and values["data"]["seq_len"] > longest:
        yield UserError(
            "data.seq_len is longer than the model's positions",
            where=where("data.seq_len"), found=values["data"]["seq_len"], expected=f"at most {longest}",
        )  # fmt: skip


def _shape(values: dict, origins: dict) -> dict:
    """The model's configuration in Hugging Face's words, whichever way the recipe names it."""
    model = values["model"]
    if model["base"] is not None:
        return bases.find(model["base"]).config
    if model["config"] is not None:
        config = read_config(config_path(values, origins), "")
        inner = config.get("text_config", config)
        return inner if isinstance(inner, dict) else config
    return model["arch"] or {}


@_rule("method")
def _method_sections(values: dict, where: Where, origins: dict) -> Iterator[TrainyardError]:
    for name, part in schemas.recipe_schema()["properties"].items():
        methods = part.get("x-methods")
        is_own = not methods or values["method"] in methods or schemas.may_have(values["method"], name)
        if not is_own and values.get(name) is not None:
            yield UserError(
                f"the section {name} does not belong to method {values['method']}",
                where=where(name), expected=f"method {' or '.join(methods)}, or no {name}",
            )  # fmt: skip


@_rule("method", "memory.weights")
def _nf4_has_adapter(values: dict, where: Where, origins: dict) -> Iterator[TrainyardError]:
    is_nf4 = values["memory"]["weights"] == "nf4"
    wanted = schemas.nf4(values["method"])
    if wanted is None:
        wanted = is_nf4 and values.get("lora") is not None
    if is_nf4 != wanted:
        expected = "fp32, bf16 or fp16 (nf4 belongs to qlora)" if is_nf4 else "nf4 for method qlora (or method: lora)"
        yield UserError(
            f"memory.weights does not fit method {values['method']}",
            where=where("memory.weights"), found=values["memory"]["weights"], expected=expected,
        )  # fmt: skip


@_rule("method", "data.packing", "data.loss_on")
def _a_stream_packs(values: dict, where: Where, origins: dict) -> Iterator[TrainyardError]:
    method = values["method"]
    if not schemas.reads_stream(method):
        return
    if not values["data"]["packing"]:
        yield UserError(
            f"method {method} packs", where=where("data.packing"), found="false", expected="data.packing: true"
        )
    if values["data"]["loss_on"] != "all":
        found = values["data"]["loss_on"]
        yield UserError(f"method {method} trains every token", where=where("data.loss_on"), found=found, expected="all")


@_rule("stop")
def _ends(values: dict, where: Where, origins: dict) -> Iterator[TrainyardError]:
    stop = values["stop"]
    if stop["max_steps"] is None and stop["max_epochs"] is None and stop["max_hours"] is None:
        expected = "stop.max_steps, stop.max_epochs or stop.max_hours"
        yield UserError("the run would never end", where=where("stop"), found="no limit", expected=expected)


# ---- training


def training_problems(resolved: object) -> list[TrainyardError]:
    """What stands between a valid recipe and training with it: an unpinned base, no data set, no tokenizer.

    `resolved` is a `training.recipe.load.Resolved`; planning asks for none of this.
    """
    recipe, problems = resolved.recipe, []
    if recipe.model.base is not None and not bases.find(recipe.model.base).pinned:
        problems.append(
            UserError(
                "an unpinned base cannot be trained", where=resolved.origins.get("model.base"), found=recipe.model.base,
                expected="a revision and the sha256 of every file in recipes/bases.yaml",
                next_command=f"make base-fetch BASE={recipe.model.base} ARGS=--pin",
            )
        )  # fmt: skip
    if recipe.model.config is not None:
        problems.append(
            UserError(
                "model.config is for planning; training needs the weights of a base",
                where=resolved.origins.get("model.config"),
                expected="model.base, or model.arch where the method begins from one",
            )
        )  # fmt: skip
    if recipe.data.dataset is None:
        problems.append(UserError("no data set is named", where=resolved.path, expected="data.dataset: NAME"))
    if recipe.model.base is None and recipe.tokenizer.path is None:
        problems.append(UserError("no tokenizer is named", where=resolved.path, expected="tokenizer.path: NAME"))
    return problems
