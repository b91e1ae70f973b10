"""The proof of an export: ids, rendered conversations, ends and log-probabilities of a served file against its source.

PyTorch runs once for all files of a checkpoint, layer by layer; each file is served by private servers of its own:
without flash attention and with keys and values in F32, so that what is off is the file's, and for the fingerprint as
llama.cpp serves it by default.
"""

import contextlib
import importlib.metadata
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from training.core.errors import RunError
from training.export import parity, probes, reference, turns
from training.export.checkpoint import Checkpoint
from training.llamacpp.client import Client
from training.llamacpp.server import ServerProcess
from training.tokenizer import ids

if TYPE_CHECKING:
    import numpy as np

# Raised when what is proved changes: files proved by an older rule are proved again.
VERSION = 6
FINGERPRINT_TEXTS = ("The", "1234567 + 89 =", "import os\n\n", "Once upon a time")
_HEALTH_SECONDS = 180.0
_SPARE_CONTEXT_TOKENS = 16
_CERTAIN = 1e5  # a bias of logits that makes a token certain
_MOST_IN_F32 = 2_000_000_000  # parameters: 8 GB on the disk, and mapped by the server
_FIGURES_OF_WHOLE = ("max_nats", "median_nats", "kl_mean_nats", "kl_p99_nats", "same_first_choice", "limits")
_logger = logging.getLogger(__name__)


def whole_type(checkpoint: Checkpoint) -> str:
    """The type that loses nothing of the weights, in which a model is proved beside types that round.

    F32, whose kernels round nothing either; of a large model whose weights have 16 bits those, half the size.
    """
    types = {tensor.dtype for tensor in checkpoint.tensors.values() if tensor.is_floating}
    is_half = len(types) == 1 and types <= {"F16", "BF16"}
    return types.pop() if is_half and checkpoint.num_parameters > _MOST_IN_F32 else "F32"


def as_whole(parity: dict, quant: str) -> dict:
    """What the manifest of a type that rounds says, under `parity.whole`, of the type that loses nothing."""
    return {"quant_type": quant} | {key: parity[key] for key in _FIGURES_OF_WHOLE}


def _context_tokens(checkpoint: Checkpoint) -> int:
    """The longest sequence that the model is made for; a server takes no prompt that fills it."""
    return checkpoint.config.get("max_position_embeddings", probes.MAX_PROMPT_TOKENS)


@dataclass(frozen=True)
class Proof:
    """What every file of one checkpoint is proved with: PyTorch runs once.

    Args:
        gap: what the base's 4 bits, on which the adapter was trained, are off the base in high precision.
    """

    checkpoint: Checkpoint
    texts: probes.Texts
    prompts: list[probes.Prompt]
    reference_NV: "np.ndarray"
    gap: dict | None = None

    @classmethod
    def prepare(cls, checkpoint: Checkpoint) -> "Proof":
        texts = probes.draw_texts(checkpoint.origin["dataset"])
        documents = [*texts.documents, *(text for _, text in turns.rendered(checkpoint))]
        prompts, num_passages = probes.make_prompts(checkpoint.encoder, documents, _context_tokens(checkpoint))
        if num_passages:
            texts = replace(texts, origin=f"{texts.origin}; {num_passages} built-in passages fill up")
        logprobs_NV = reference.logprobs(checkpoint, prompts)
        gap = None
        if checkpoint.origin["method"] == "qlora":
            gap = parity.gap(logprobs_NV, reference.logprobs(checkpoint, prompts, nf4=True))
        return cls(checkpoint, texts, prompts, logprobs_NV, gap)

    def run(self, gguf: Path, quant: str, workspace: Path, *, lora: Path | None = None) -> dict:
        """Serve the file privately, with an adapter's file beside it, and compare.

        Returns the manifest's `parity` and `fingerprint`, and `positions`, what each position was off.
        """
        told, positions = self.compare(gguf, quant, workspace, lora=lora)
        encoder = self.checkpoint.encoder
        with _serving(gguf, **self._settings(quant, workspace, lora)) as client:  # as it will be served
            room = _context_tokens(self.checkpoint) - 1
            fingerprint = [_fingerprint(client, encoder.encode(text).ids[:room]) for text in FINGERPRINT_TEXTS]
        return {
            "parity": told,
            "fingerprint": {"server": told["server"], "prompts": fingerprint},
            "positions": positions,
        }

    def compare(
        self, gguf: Path, quant: str, workspace: Path, *, lora: Path | None = None
    ) -> tuple[dict, list[dict]]:  # fmt: skip
        """Hold what the file serves against PyTorch: `parity` and `positions`. Raises RunError where it differs."""
        encoder, tokenizer = self.checkpoint.encoder, self.checkpoint.origin["tokenizer"]
        with _serving(gguf, exact=True, **self._settings(quant, workspace, lora)) as client:
            counts = ids.check(client, encoder, self.texts.lines, tokenizer["pre_tokenizer"])
            counts |= {"conversations": check_conversations(client, self.checkpoint)}
            stops = check_stops(client, self.checkpoint)
            _logger.info("%s: ids equal on %d strings and %d lines", quant, counts["nasty_strings"], counts["lines"])
            compared = parity.compare(client, self.prompts, self.reference_NV)
            figures = parity.judge(compared, quant)
        _logger.info("%s: at most %g nats off, divergence %g", quant, figures["max_nats"], figures["kl_mean_nats"])
        server_text = f"xllamacpp {importlib.metadata.version('xllamacpp')}"
        told = {
            "prompts": len(self.prompts), **figures, "drawn_from": self.texts.origin, "server": server_text,
            "ids": counts, "stops": stops,
        }  # fmt: skip
        if self.gap is not None:
            told["base_in_4_bits"] = self.gap
        return told, parity.positions(compared)

    def _settings(self, quant: str, workspace: Path, lora: Path | None) -> dict:
        # Half of the CPUs: on a busy machine threads that wait for each other cost more than they bring.
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        ctx_size = max(len(prompt.ids) for prompt in self.prompts) + _SPARE_CONTEXT_TOKENS
        return {"log": workspace / f"server-{quant}.log", "ctx_size": ctx_size, "threads": threads, "lora": lora}


@contextlib.contextmanager
def _serving(gguf: Path, **settings: object) -> Iterator[Client]:
    """A client of a private server that has loaded the file."""
    with ServerProcess.start(gguf, **settings) as server:
        server.wait_healthy(_HEALTH_SECONDS)
        yield Client(server.url)


def check_conversations(client: Client, checkpoint: Checkpoint) -> int:
    """Compare conversations as the server renders and reads them with our own; returns how many.

    Raises RunError at the first that differs: the served template is not the trained one.
    """
    conversations = turns.rendered(checkpoint, turns.today())
    bos = checkpoint.special_text("bos") if checkpoint.add_bos else None
    for conversation, own in conversations:
        served = client.apply_template(list(conversation))
        plain = [text.removeprefix(bos) if bos else text for text in (own, served)]
        expected = checkpoint.encoder.encode(plain[0]).ids
        found = client.tokenize(plain[1], add_special=True, parse_special=True)
        if plain[0] != plain[1] or expected != found:
            at = ids.first_difference(expected, found)
            raise RunError(
                "the server renders a conversation otherwise than training did",
                where=f"token {at} of {len(expected)}, {conversation[-1]['content'][:40]!r}",
                found=f"{served[-120:]!r}; likely cause: the chat template", expected=f"{own[-120:]!r}",
                next_command=ids.NAME_THE_CAUSE,
            )  # fmt: skip
    return len(conversations)


def check_stops(client: Client, checkpoint: Checkpoint) -> list[int]:
    """Make each token that ends an answer certain, and see that the server stops at it; returns their ids (B56)."""
    ends = [one for one in (checkpoint.special_id("eos"), checkpoint.turn_end_id) if one is not None]
    prompt = checkpoint.encoder.encode("The").ids[:1] or [ends[0]]  # one alone: it fits the shortest context
    for one in ends:
        answer = client.completion(prompt, max_tokens=4, logit_bias=[[one, _CERTAIN]])
        if answer.get("stop_type") != "eos":
            raise RunError(
                "the served model does not stop where an answer ends",
                where=f"token {one}, {checkpoint.encoder.id_to_token(one)!r}", found=answer.get("stop_type"),
                expected="an end of generation",
            )  # fmt: skip
    return ends


def _fingerprint(client: Client, prompt_ids: list[int]) -> dict:
    top = client.top_logprobs(prompt_ids, parity.TOP)
    return {"ids": prompt_ids, "top": [[token, round(logprob, 5)] for token, logprob in top]}
