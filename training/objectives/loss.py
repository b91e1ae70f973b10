"""The loss of causal language models: the head applied to trained positions alone, all at once or in chunks, in nats.

Logits of other positions never exist, unless a model's logits are more than its head gives of its hidden states; such a
model is marked with `WHOLE_LOGITS`, and its own forward pass gives them.

Legend: B rows of a batch, T positions of a row, N trained positions (of all B*T, flat), M of a chunk, D width,
V vocabulary.
"""

from collections.abc import Callable

import torch

from training.objectives.contract import Tensors
from training.recipe.model import chunk_tokens

WHOLE_LOGITS = "gives_whole_logits"
"""Set on a model whose head cannot be applied alone."""
SUMMED = "sums_its_nats"
"""Set on a model to what sums its loss in training, given hidden states and labels (`liger_loss`)."""

Nats = Callable[..., torch.Tensor]
"""Sums a loss over positions: of float32 logits of shape (M, V), which are its own, and what is known of each."""


def of_labels(logits_MV: torch.Tensor, labels_M: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of labels."""
    return torch.nn.functional.cross_entropy(logits_MV, labels_M, reduction="sum")


def trained_nats(
    model: torch.nn.Module, tensors: Tensors, chunk: int | str = 0, nats: Nats = of_labels,
    known: tuple = ("labels_N",),
) -> torch.Tensor:  # fmt: skip
    """Sum the loss in nats over a batch's labels.

    Args:
        tensors: `input_ids_BT`, `trained_N` and `labels_N`; `positions_BT` where records share a row.
        chunk: trained positions whose logits exist at once; 0 for all of them, or `auto`.
        known: the names of the tensors that `nats` is given beside the logits, one row a position.
    """
    targets = tuple(tensors[name] for name in known)
    inputs = {"input_ids": tensors["input_ids_BT"], "use_cache": False}
    if "positions_BT" in tensors:
        inputs["position_ids"] = tensors["positions_BT"]
    if getattr(model, WHOLE_LOGITS, False):
        logits_NV = model(**inputs).logits.flatten(0, 1).index_select(0, tensors["trained_N"])
        return nats(logits_NV.float(), *targets)
    # in one expression, so that the other positions' states are gone before there are logits
    hidden_ND = _those(model.base_model(**inputs).last_hidden_state.flatten(0, 1), tensors["trained_N"])
    if torch.is_grad_enabled() and (summed := getattr(model, SUMMED, None)):
        return summed(hidden_ND, *targets)
    chunk = chunk_tokens(chunk, model.config.get_text_config().vocab_size)
    return summed_nats(logits_of(model), hidden_ND, targets, chunk, nats)


def _those(states: torch.Tensor, trained_N: torch.Tensor) -> torch.Tensor:
    """The states of trained positions; where that is all of them there is nothing to copy."""
    return states if len(trained_N) == len(states) else states.index_select(0, trained_N)


def logits_of(model: torch.nn.Module) -> torch.nn.Module:
    """What makes logits of the last hidden states: the head, and the scale or the soft cap that some families have."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    changes = [getattr(config, name, None) for name in ("logits_scaling", "logit_scale", "final_logit_softcapping")]
    return _ChangedHead(head, *changes) if any(changes) else head


class _ChangedHead(torch.nn.Module):
    """A head whose logits are divided, multiplied, or capped softly."""

    def __init__(self, head: torch.nn.Module, divisor: float | None, factor: float | None, cap: float | None):
        super().__init__()
        self.head, self.divisor, self.factor, self.cap = head, divisor, factor, cap

    def forward(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        logits_NV = self.head(hidden_ND)
        logits_NV = logits_NV / self.divisor if self.divisor else logits_NV
        logits_NV = logits_NV * self.factor if self.factor else logits_NV
        return torch.tanh(logits_NV / self.cap) * self.cap if self.cap else logits_NV


def summed_nats(
    logits: torch.nn.Module, hidden_ND: torch.Tensor, targets: tuple[torch.Tensor, ...], chunk: int = 0,
    nats: Nats = of_labels,
) -> torch.Tensor:  # fmt: skip
    """Sum a loss over trained positions; with `chunk`, logits of that many exist at once.

    A chunk's gradient is made as soon as its loss is, so nothing is computed twice, and value and gradient are those of
    the whole.

    Args:
        targets: what `nats` is given beside the logits, one row a position.
    """

    def of(hidden_MD: torch.Tensor, *targets_M: torch.Tensor) -> torch.Tensor:
        return nats(logits(hidden_MD).float(), *targets_M)

    if chunk == 0 or len(hidden_ND) <= chunk:
        return of(hidden_ND, *targets)
    if not torch.is_grad_enabled():
        parts = zip(*(one.split(chunk) for one in (hidden_ND, *targets)), strict=True)
        return torch.stack([of(*part) for part in parts]).sum()
    trained = [weight for weight in logits.parameters() if weight.requires_grad]
    return _Chunked.apply(of, chunk, targets, hidden_ND, *trained)


class _Chunked(torch.autograd.Function):
    """The sum of a loss over chunks, whose gradients are made going forward, one chunk at a time."""

    @staticmethod
    def forward(ctx, of, chunk, targets, hidden_ND, *trained):
        reaches_ND = torch.empty_like(hidden_ND) if hidden_ND.requires_grad else None
        total, grads = hidden_ND.new_zeros((), dtype=torch.float32), [None] * len(trained)
        for start in range(0, len(hidden_ND), chunk):
            those = slice(start, start + chunk)
            with torch.enable_grad():
                hidden_MD = hidden_ND[those].detach().requires_grad_(reaches_ND is not None)
                nats = of(hidden_MD, *(one[those] for one in targets))
            total += nats.detach()
            found = torch.autograd.grad(nats, [*([] if reaches_ND is None else [hidden_MD]), *trained])
            if reaches_ND is not None:
                reaches_ND[those] = found[0]
            news = found[len(found) - len(trained) :]
            grads = [new if old is None else old.add_(new) for old, new in zip(grads, news, strict=True)]
            del nats, found, news
        ctx.grads = [reaches_ND, *grads]
        return total

    @staticmethod
    def backward(ctx, factor):
        grads, ctx.grads = ctx.grads, None  # a graph is walked once
        return None, None, None, *(None if grad is None else grad.mul_(factor) for grad in grads)
