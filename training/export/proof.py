"""The proof of an export: ids and log-probabilities of a served file against the checkpoint it was made from.

PyTorch runs once for all files of a checkpoint; each file is served by a private server of its own.
"""

import importlib.metadata
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from training.export import checks, parity, probes, reference
from training.export.checkpoint import Checkpoint
from training.llamacpp.client import Client
from training.llamacpp.server import ServerProcess
from training.tokenizer import ids

if TYPE_CHECKING:
    import numpy as np

# Raised when what is proved changes: files proved by an older rule are proved again.
VERSION = 1
FINGERPRINT_TEXTS = ("The", "1234567 + 89 =", "import os\n\n", "Once upon a time")
_HEALTH_SECONDS = 180.0
_SPARE_CONTEXT_TOKENS = 16
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Proof:
    """What every file of one checkpoint is proved with: PyTorch runs once."""

    checkpoint: Checkpoint
    texts: probes.Texts
    prompts: list[probes.Prompt]
    reference_NV: "np.ndarray"

    @classmethod
    def prepare(cls, checkpoint: Checkpoint) -> "Proof":
        checks.check_finite(checkpoint)
        texts = probes.draw_texts(checkpoint.origin["dataset"])
        context_tokens = checkpoint.config.get("max_position_embeddings", probes.MAX_PROMPT_TOKENS)
        prompts = probes.make_prompts(checkpoint.encoder, texts.documents, context_tokens)
        return cls(checkpoint, texts, prompts, reference.logprobs(checkpoint, prompts))

    def run(self, gguf: Path, quant: str, workspace: Path) -> dict:
        """Serve the file privately and compare. Returns the manifest's `parity` and `fingerprint`."""
        encoder, tokenizer = self.checkpoint.encoder, self.checkpoint.origin["tokenizer"]
        # Half of the CPUs: on a busy machine threads that wait for each other cost more than they bring.
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        ctx_size = probes.MAX_PROMPT_TOKENS + _SPARE_CONTEXT_TOKENS
        log = workspace / f"server-{quant}.log"
        with ServerProcess.start(gguf, log=log, ctx_size=ctx_size, threads=threads) as server:
            server.wait_healthy(_HEALTH_SECONDS)
            client = Client(server.url)
            counts = ids.check(client, encoder, self.texts.lines, tokenizer["pre_tokenizer"])
            _logger.info(
                "%s: ids equal on %d nasty strings and %d lines", quant, counts["nasty_strings"], counts["lines"]
            )
            figures = parity.judge(parity.compare(client, self.prompts, self.reference_NV), quant)
            fingerprint = [_fingerprint(client, encoder.encode(text).ids) for text in FINGERPRINT_TEXTS]
        _logger.info("%s: at most %g nats off, divergence %g", quant, figures["max_nats"], figures["kl_mean_nats"])
        server_text = f"xllamacpp {importlib.metadata.version('xllamacpp')}"
        return {
            "parity": {**figures, "drawn_from": self.texts.origin, "server": server_text, "ids": counts},
            "fingerprint": {"server": server_text, "prompts": fingerprint},
        }


def _fingerprint(client: Client, prompt_ids: list[int]) -> dict:
    top = client.top_logprobs(prompt_ids, parity.TOP)
    return {"ids": prompt_ids, "top": [[token, round(logprob, 5)] for token, logprob in top]}
