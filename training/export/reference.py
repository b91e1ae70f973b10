"""The checkpoint as PyTorch computes it, in float32: what the served model is held against.

Legend: N compared positions, T tokens of a prompt, V vocabulary entries.
"""

from typing import TYPE_CHECKING

from training.core.errors import IntegrityError, UserError
from training.export.checkpoint import Checkpoint
from training.export.probes import Prompt

if TYPE_CHECKING:
    import numpy as np


def logprobs(checkpoint: Checkpoint, prompts: list[Prompt]) -> "np.ndarray":
    """Log-probabilities in nats of the next token after every prefix, `[N, V]` float32, the prompts in order."""
    import numpy as np
    import torch

    model = _load(checkpoint)
    rows = []
    with torch.inference_mode():
        for prompt in prompts:
            logits_TV = model(input_ids=torch.tensor([prompt.ids]), use_cache=False).logits[0]
            chosen_NV = logits_TV[[length - 1 for length in prompt.lengths]]
            rows.append(torch.log_softmax(chosen_NV.double(), dim=-1).float().numpy())
    return np.concatenate(rows)


def _load(checkpoint: Checkpoint):
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder, dtype=torch.float32, local_files_only=True, output_loading_info=True,
            trust_remote_code=False, use_safetensors=True,
        )  # fmt: skip
    except Exception as error:  # a foreign config.json can fail anywhere in the library; the fault is the folder's
        raise UserError(
            "the checkpoint cannot be loaded by transformers", where=checkpoint.folder,
            found=f"{type(error).__name__}: {str(error).strip()[:300]}",
            expected="a config.json and weights that fit each other, with no code of its own",
        ) from error  # fmt: skip
    wrong = sorted(str(key) for kind in ("missing_keys", "mismatched_keys", "unexpected_keys") for key in report[kind])
    if wrong:
        raise IntegrityError(
            "the weights are not those of the architecture",
            where=checkpoint.folder,
            found=f"{len(wrong)} tensors missing, extra or of another shape: {', '.join(wrong[:3])}",
            expected="every tensor of config.json's model, and no other",
        )
    return model.eval()
