"""The head and the cross-entropy in one kernel of Liger's, which never holds all logits (Hsu et al. 2024, 2410.10989).

Its gradient is made in the forward pass, chunk by chunk, and scaled in the backward pass. It is written in Triton, for
CUDA GPUs, and has not been measured here. What is only measured, as a validation is, is summed by torch.
"""

from functools import partial

import torch

from training.core.errors import UserError
from training.core.report import again
from training.objectives.contract import IGNORED_LABEL
from training.objectives.loss import SUMMED, WHOLE_LOGITS

_SCALES = ("logits_scaling", "logit_scale")


def put_in(model: torch.nn.Module) -> None:
    """Let the kernel sum a model's loss. Raises UserError where the logits are more than one linear layer's."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    is_scaled = any(getattr(config, name, None) for name in _SCALES)
    if is_scaled or getattr(model, WHOLE_LOGITS, False) or not isinstance(head, torch.nn.Linear):
        raise UserError(
            "Liger's kernel knows a head that is one linear layer, and no more", where="memory.loss_kernel",
            found=type(model).__name__ + (", whose logits are scaled" if is_scaled else ""),
            expected="memory.loss_kernel: torch", next_command=again("memory.loss_kernel=torch"),
        )  # fmt: skip
    cap = getattr(config, "final_logit_softcapping", None)
    setattr(model, SUMMED, partial(nats, head, cap))


def nats(
    head: torch.nn.Linear, cap: float | None, hidden_ND: torch.Tensor, labels_N: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    """Sum the loss of labels in nats, of hidden states of shape (N, D)."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction.apply(
        hidden_ND, head.weight, labels_N, head.bias, None, IGNORED_LABEL, 0.0, 0.0, "sum", cap, False, torch.float32
    )[0]
