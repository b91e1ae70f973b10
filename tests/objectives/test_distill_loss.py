"""The loss of distillation: by hand, against the whole vocabulary, its gradient, its scale, in chunks."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional

from training.objectives.distill_loss import distilled_nats, softened
from training.objectives.loss import summed_nats


def teacher_of(logits_NV: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_NV = logits_NV.log_softmax(1)
    best_NK, top_NK = logprobs_NV.topk(top_k, 1)
    others_N1 = logprobs_NV.scatter(1, top_NK, -torch.inf).logsumexp(1, keepdim=True)
    return top_NK, torch.cat([best_NK, others_N1], 1)


def nats(logits_NV: torch.Tensor, labels_N, top_NK, teacher_NC, alpha=0.5, temperature=2.0) -> torch.Tensor:
    return distilled_nats(logits_NV.clone(), labels_N, top_NK, teacher_NC, alpha=alpha, temperature=temperature)


def naive(logits_NV, labels_N, top_NK, teacher_NC, alpha, temperature) -> torch.Tensor:
    """The equation of the module, written down in float64."""
    probability_NV = logits_NV.double().softmax(1)
    best_NK = probability_NV.gather(1, top_NK)
    others_N1 = probability_NV.scatter(1, top_NK, 0.0).sum(1, keepdim=True)
    student_NC = torch.cat([best_NK, others_N1], 1) ** (1 / temperature)
    teacher_NC = teacher_NC.double().exp() ** (1 / temperature)
    q_NC, p_NC = (one / one.sum(1, keepdim=True) for one in (student_NC, teacher_NC))
    soft = -(p_NC * q_NC.log()).sum()
    gold = functional.cross_entropy(logits_NV.double(), labels_N, reduction="sum")
    return alpha * temperature**2 * soft + (1 - alpha) * gold


def test_a_position_by_hand():
    """Vocabulary of four, k of two. Student 1/2 1/4 1/8 1/8; teacher 0.64 on token 1, 0.16 on token 0, 0.2 elsewhere.

    At T = 2 the teacher's classes are 0.8, 0.4 and sqrt 0.2 over their sum, the student's 0.5, sqrt 0.5 and 0.5.
    """
    logits_NV = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    teacher_NC = torch.tensor([[0.64, 0.16, 0.2]]).log()
    p = [one / (1.2 + math.sqrt(0.2)) for one in (0.8, 0.4, math.sqrt(0.2))]
    q = [one / (1 + math.sqrt(0.5)) for one in (0.5, math.sqrt(0.5), 0.5)]
    soft = -sum(one * math.log(other) for one, other in zip(p, q, strict=True))
    known = (torch.tensor([2]), torch.tensor([[1, 0]]), teacher_NC)
    assert nats(logits_NV, *known, alpha=1.0).item() == pytest.approx(4 * soft, abs=1e-6)
    assert nats(logits_NV, *known, alpha=0.0).item() == pytest.approx(math.log(8), abs=1e-6)
    assert nats(logits_NV, *known, alpha=0.25).item() == pytest.approx(soft + 0.75 * math.log(8), abs=1e-6)


@pytest.mark.parametrize("top_k", [1, 3, 16])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_value_and_gradient_are_the_equations(top_k: int, temperature: float):
    torch.manual_seed(0)
    logits_NV = (torch.randn(5, 17) * 3).requires_grad_()
    labels_N = torch.tensor([0, 3, 16, 8, 8])
    known = (labels_N, *teacher_of(torch.randn(5, 17) * 3, top_k), 0.3, temperature)
    value, expected = nats(logits_NV, *known), naive(logits_NV, *known)
    (own,) = torch.autograd.grad(value, logits_NV)
    (theirs,) = torch.autograd.grad(expected, logits_NV)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(own, theirs.float(), atol=1e-5)


def test_with_every_token_it_is_the_divergence_of_the_whole_vocabulary():
    """k = V: torch's own divergence at the temperature, the teacher's entropy apart; nothing is left for the bucket."""
    torch.manual_seed(1)
    student_NV, teacher_NV = torch.randn(6, 11, requires_grad=True), torch.randn(6, 11)
    top_NK, teacher_NC = teacher_of(teacher_NV, 11)
    assert (teacher_NC[:, -1] == -torch.inf).all()
    value = nats(student_NV, torch.zeros(6, dtype=torch.int64), top_NK, teacher_NC, alpha=1.0, temperature=2.0)
    p_NV = (teacher_NV / 2).softmax(1)
    entropy = -(p_NV * p_NV.log()).sum()
    divergence = functional.kl_div((student_NV / 2).log_softmax(1), p_NV, reduction="sum")
    assert value.item() == pytest.approx(4 * (divergence + entropy).item(), rel=1e-5)
    own, theirs = (torch.autograd.grad(one, student_NV)[0] for one in (value, 4 * divergence))
    assert torch.allclose(own, theirs, atol=1e-5)


@pytest.mark.parametrize("top_k", [1, 4, 11])
@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_a_student_that_is_its_teacher_has_no_gradient(top_k: int, temperature: float):
    """B82: divergence 0 and a gradient under 1e-6, whatever k."""
    torch.manual_seed(2)
    logits_NV = torch.randn(4, 11, dtype=torch.float64, requires_grad=True)
    top_NK, teacher_NC = teacher_of(logits_NV.detach(), top_k)
    value = nats(logits_NV, torch.zeros(4, dtype=torch.int64), top_NK, teacher_NC, alpha=1.0, temperature=temperature)
    divergence = value / temperature**2 - softened(teacher_NC, teacher_NC, temperature)
    assert divergence.item() == pytest.approx(0.0, abs=1e-9)
    (gradient,) = torch.autograd.grad(value, logits_NV)
    assert gradient.norm() < 1e-6


def test_the_square_keeps_the_gradient_as_the_temperature_grows():
    """Hinton et al. 2015, equation 4: at a high T the gradient of T^2 CE is (z - v) / V, with all logits centred."""
    torch.manual_seed(3)
    student_NV, teacher_NV = (torch.randn(2, 8, dtype=torch.float64) for _ in range(2))
    student_NV, teacher_NV = (one - one.mean(1, keepdim=True) for one in (student_NV, teacher_NV))
    student_NV.requires_grad_()
    for temperature in (1e3, 1e4):
        known = (torch.zeros(2, dtype=torch.int64), *teacher_of(teacher_NV, 8), 1.0, temperature)
        (gradient,) = torch.autograd.grad(nats(student_NV, *known), student_NV)
        assert torch.allclose(gradient, (student_NV - teacher_NV).detach() / 8, atol=5 / temperature)


def test_a_bucket_of_a_billionth_is_exact():
    """What all other tokens have is summed over them, not what 1 leaves: in float32 that would be noise."""
    logits_NV = torch.full((1, 1000), -14.0)
    logits_NV[0, 0] = 14.0
    logits_NV.requires_grad_()
    known = (torch.tensor([0]), torch.tensor([[0]]), torch.tensor([[math.log(0.5), math.log(0.5)]]), 1.0, 1.0)
    (own,) = torch.autograd.grad(nats(logits_NV, *known), logits_NV)
    (theirs,) = torch.autograd.grad(naive(logits_NV.double(), *known), logits_NV)
    assert torch.allclose(own, theirs.float(), rtol=1e-4) and own[0, 1] < 0


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_change_nothing(chunk: int):
    torch.manual_seed(4)
    head = torch.nn.Linear(6, 13, bias=False)
    hidden_ND = torch.randn(7, 6, requires_grad=True)
    known = (torch.arange(7), *teacher_of(torch.randn(7, 13), 3))
    loss = partial(distilled_nats, alpha=0.5, temperature=2.0)
    found = []
    for size in (0, chunk):
        head.zero_grad()
        hidden_ND.grad = None
        value = summed_nats(head, hidden_ND, known, size, loss)
        value.backward()
        found.append((value.item(), head.weight.grad.clone(), hidden_ND.grad.clone()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found[0][1:], found[1][1:], strict=True))


def test_of_all_logits_one_copy_is_kept():
    """The logits' own memory; the plain loss keeps their log-softmax in its place."""
    saved = []
    logits_NV = torch.randn(8, 500, requires_grad=True)
    known = (torch.zeros(8, dtype=torch.int64), *teacher_of(torch.randn(8, 500), 4))
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        distilled_nats(logits_NV * 1.0, *known, alpha=0.5, temperature=2.0)
    wide = {one.untyped_storage().data_ptr() for one in saved if one.numel() >= 8 * 500}
    assert len(wide) == 1
