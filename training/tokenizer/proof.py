"""A tokenizer proved against the real llama.cpp before it is used: the same ids for nasty strings and real lines.

A GGUF with the tokenizer's vocabulary and a few random weights is served for a moment. Owns how a tokenizer becomes a
GGUF's vocabulary here; the converter's own way is proved at export.
"""

import math
import random
import re
from collections.abc import Iterable
from itertools import islice

from training.core import files, paths
from training.llamacpp import tiny
from training.llamacpp.client import Client
from training.llamacpp.server import ServerProcess
from training.tokenizer import huggingface, ids
from training.tokenizer.artifact import TOKENIZER, Tokenizer

NUM_LINES = 1000
_SEED = 7
_MAX_LINE_CHARS = 4000
_HEALTH_SECONDS = 120.0
_CTX_SIZE = 256
_LINE = re.compile(r"[^\n]+")


def prove(tokenizer: Tokenizer, texts: Iterable[str]) -> dict:
    """Compare the ids of the nasty strings and of 1,000 lines of the texts, fewer where there are fewer.

    Returns the counts. Raises RunError at the first string with other ids.
    """
    lines = _draw(texts)
    library = huggingface.open_library(tokenizer.folder / TOKENIZER, with_bos=True)
    with files.scratch_folder(paths.roots().cache / "proofs") as workspace:
        model = tiny.write(workspace / "ids.gguf", seed=1, vocabulary=vocabulary(tokenizer))
        with ServerProcess.start(model, log=workspace / "log", ctx_size=_CTX_SIZE) as server:
            server.wait_healthy(_HEALTH_SECONDS)
            return ids.check(Client(server.url), library, lines, tokenizer.pre_tokenizer)


def _draw(texts: Iterable[str]) -> list[str]:
    """Lines from everywhere in texts of any number (reservoir sampling; Li 1994, algorithm L)."""
    found = (match for text in texts for match in _LINE.finditer(text))  # one by one, as a text can be of any length
    cut = (match.string[match.start() : min(match.end(), match.start() + _MAX_LINE_CHARS)] for match in found)
    lines = (line for line in cut if line.strip())
    kept, generator, weight = list(islice(lines, NUM_LINES)), random.Random(_SEED), 1.0
    while True:
        weight *= math.exp(math.log(1 - generator.random()) / NUM_LINES)
        skipped = math.floor(math.log(1 - generator.random()) / math.log1p(-weight))
        line = next(islice(lines, skipped, None), None)
        if line is None:
            return kept
        kept[generator.randrange(NUM_LINES)] = line


def vocabulary(tokenizer: Tokenizer) -> tiny.Vocabulary:
    """What a GGUF says of the tokenizer; ids without a token are named and unused, as the converter has them."""
    document = files.read_json(tokenizer.folder / TOKENIZER)
    tokens = [f"[PAD{number}]" for number in range(tokenizer.vocab_size)]
    types = ["UNUSED"] * tokenizer.vocab_size
    for text, number in document["model"]["vocab"].items():
        tokens[number], types[number] = text, "NORMAL"
    for token in document["added_tokens"]:
        tokens[token["id"]] = token["content"]
        types[token["id"]] = "CONTROL" if token["special"] else "USER_DEFINED"
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in document["model"]["merges"]]
    return tiny.Vocabulary(
        tokens, types, merges, tokenizer.pre_tokenizer, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id,
        tokenizer.add_bos,
    )  # fmt: skip
