"""The loss of causal language models: the head applied to trained positions alone, all at once or in chunks, in nats.

Logits of other positions never exist, unless a model's logits are more than its head gives of its hidden states; such a
model is marked with `WHOLE_LOGITS`, and its own forward pass gives them.

Legend: B rows of a batch, T positions of a row, N trained positions (of all B*T, flat), M of a chunk, D width,
V vocabulary.
"""

from collections.abc import Callable, Iterator

import torch

from training.objectives.contract import Tensors

WHOLE_LOGITS = "gives_whole_logits"
"""Set on a model whose head cannot be applied alone."""
SUMMED = "sums_its_nats"
"""Set on a model to what sums its loss in training, given hidden states and labels (`liger_loss`)."""

Logits = Callable[[torch.Tensor], torch.Tensor]
Nats = Callable[..., torch.Tensor]
"""Sums a loss over positions: of float32 logits of shape (M, V), which are its own, and what is known of each."""


def of_labels(logits_MV: torch.Tensor, labels_M: torch.Tensor) -> torch.Tensor:
    """The cross-entropy of labels."""
    return torch.nn.functional.cross_entropy(logits_MV, labels_M, reduction="sum")


def trained_nats(
    model: torch.nn.Module, tensors: Tensors, chunk: int = 0, nats: Nats = of_labels, known: tuple = ("labels_N",)
) -> torch.Tensor:  # fmt: skip
    """Sum the loss in nats over a batch's labels.

    Args:
        tensors: `input_ids_BT`, `trained_N` and `labels_N`; `positions_BT` where records share a row.
        chunk: trained positions whose logits exist at once; 0 for all of them.
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
    return summed_nats(logits_of(model), hidden_ND, targets, chunk, nats)


def _those(states: torch.Tensor, trained_N: torch.Tensor) -> torch.Tensor:
    """The states of trained positions; where that is all of them there is nothing to copy."""
    return states if len(trained_N) == len(states) else states.index_select(0, trained_N)


def logits_of(model: torch.nn.Module) -> Logits:
    """What makes logits of the last hidden states: the head, and the scale or the soft cap that some families have."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    divisor = getattr(config, "logits_scaling", None)
    factor = getattr(config, "logit_scale", None)
    if not (cap or divisor or factor):
        return head

    def logits(hidden_ND: torch.Tensor) -> torch.Tensor:
        logits_NV = head(hidden_ND)
        logits_NV = logits_NV / divisor if divisor else logits_NV
        logits_NV = logits_NV * factor if factor else logits_NV
        return torch.tanh(logits_NV / cap) * cap if cap else logits_NV

    logits.head = head
    return logits


def summed_nats(
    logits: Logits, hidden_ND: torch.Tensor, targets: tuple[torch.Tensor, ...], chunk: int = 0, nats: Nats = of_labels
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
    parts = list(zip(*(one.split(chunk) for one in (hidden_ND, *targets)), strict=True))
    if not torch.is_grad_enabled():
        return torch.stack([of(*part) for part in parts]).sum()
    trained = [weight for weight in _parameters(logits) if weight.requires_grad]
    return _Chunked.apply(of, parts, hidden_ND, *trained)


def _parameters(logits: Logits) -> Iterator[torch.Tensor]:
    """What the logits are computed with besides the hidden states."""
    head = logits if isinstance(logits, torch.nn.Module) else logits.head
    return head.parameters()


class _Chunked(torch.autograd.Function):
    """The sum of a loss over chunks, whose gradients are made going forward, one chunk at a time."""

    @staticmethod
    def forward(ctx, of, parts, hidden_ND, *trained):
        total, wanted = [], hidden_ND.requires_grad
        hidden_grads, grads = [], [None] * len(trained)
        for hidden_MD, *targets in parts:
            with torch.enable_grad():
                hidden_MD = hidden_MD.detach().requires_grad_(wanted)
                nats = of(hidden_MD, *targets)
            into = [*([hidden_MD] if wanted else []), *trained]
            found = list(torch.autograd.grad(nats, into))
            total.append(nats.detach())
            del nats
            if wanted:
                hidden_grads.append(found.pop(0))
            for place, grad in enumerate(found):
                grads[place] = grad if grads[place] is None else grads[place].add_(grad)
            del found
        ctx.grads = [torch.cat(hidden_grads) if wanted else None, *grads]
        return torch.stack(total).sum()

    @staticmethod
    def backward(ctx, factor):
        grads, ctx.grads = ctx.grads, None
        return None, None, *(None if grad is None else grad.mul_(factor) for grad in grads)
