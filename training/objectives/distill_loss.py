"""The loss of distillation: a teacher's likeliest tokens and one bucket for all others, softened (Hinton et al. 2015).

Of one position, with l_1..l_k the teacher's log-probabilities of its k likeliest tokens and l_0 that of all others
together, and s_0..s_k the student's of the very same k + 1 classes, at temperature T:

    p = softmax(l / T)    q = softmax(s / T)    loss = alpha T^2 (- sum_i p_i log q_i) + (1 - alpha) (- log q(label))

where q(label) is the student's own probability of the label, at temperature 1. Teacher and student are parted into
classes first and softened then, so that a student that is its teacher has no gradient whatever k is; with k = V it is
the softened cross-entropy over the vocabulary. T^2 keeps the gradient's size as T grows (section 2.1 there).

Memory: the logits, and their gradient in the backward pass; no log-softmax of them is kept.

Legend: N positions, K likeliest tokens, C = K + 1 classes (the bucket last), V vocabulary.
"""

import torch


def distilled_nats(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, top_NK: torch.Tensor, teacher_NC: torch.Tensor, *,
    alpha: float, temperature: float,
) -> torch.Tensor:  # fmt: skip
    """Sum the loss over positions, in nats.

    Args:
        logits_NV: the student's, in float32; they are used up: what they hold afterwards means nothing.
        labels_N: the data's own tokens.
        top_NK: the teacher's likeliest tokens, no token twice.
        teacher_NC: their log-probabilities in nats, then that of all others together; minus infinity where none is.
    """
    label_N, best_NK, others_N = _Parted.apply(logits_NV, labels_N, top_NK)
    classes_NC = torch.cat([best_NK, others_N[:, None]], 1)
    total_N = classes_NC.logsumexp(1)
    gold = (total_N - label_N).sum()
    return alpha * temperature**2 * softened(classes_NC, teacher_NC, temperature) + (1 - alpha) * gold


def softened(student_NC: torch.Tensor, teacher_NC: torch.Tensor, temperature: float) -> torch.Tensor:
    """Sum the cross-entropy of the teacher's classes and the student's, both softened; log-probabilities or logits."""
    p_NC = torch.softmax(teacher_NC / temperature, 1)
    log_q_NC = torch.log_softmax(student_NC / temperature, 1)
    return -(p_NC * log_q_NC.masked_fill(p_NC == 0, 0)).sum()


class _Parted(torch.autograd.Function):
    """Logits as what the loss needs of them: the label's, those of given tokens, and the log-sum-exp of all others.

    The others' sum is taken over them alone, so that it is exact where it is a billionth. The logits' own memory
    holds what the backward pass needs.
    """

    @staticmethod
    def forward(ctx, logits_NV, labels_N, top_NK):
        label_N = logits_NV.gather(1, labels_N[:, None])[:, 0]
        best_NK = logits_NV.gather(1, top_NK)
        rest_NV = logits_NV.detach().scatter_(1, top_NK, -torch.inf)
        others_N = rest_NV.logsumexp(1)
        ctx.save_for_backward(rest_NV, others_N, labels_N, top_NK)
        return label_N, best_NK, others_N

    @staticmethod
    def backward(ctx, of_label_N, of_best_NK, of_others_N):
        rest_NV, others_N, labels_N, top_NK = ctx.saved_tensors
        floor_N = others_N.masked_fill(others_N == -torch.inf, 0)  # no others: every share of them is 0
        grad_NV = (rest_NV - floor_N[:, None]).exp_().mul_(of_others_N[:, None])
        grad_NV.scatter_add_(1, top_NK, of_best_NK).scatter_add_(1, labels_N[:, None], of_label_N[:, None])
        return grad_NV, None, None
