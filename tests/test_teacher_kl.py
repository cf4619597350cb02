"""The divergence from a teacher that reports its most likely tokens only, against plain distributions (TGT-16)."""

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from torch import nn

from utils.losses import teacher_kl_sum, truncated_kl
from utils.packing import TeacherTop

VOCAB = 50


def models(num_positions: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] of a teacher and of a policy."""
    generator = torch.Generator().manual_seed(7)
    return tuple(scale * torch.randn(num_positions, VOCAB, generator=generator) for _ in range(2))


def reported(teacher: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and log-probabilities, both [n, k], of the teacher's most likely tokens."""
    top = teacher.log_softmax(1).topk(k)
    return top.indices, top.values


def bucketed(logits: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Probabilities of the tokens, and of all others as one, in float64."""
    p = np.exp(logits - logits.max())
    p /= p.sum()
    return np.append(p[token_ids], np.delete(p, token_ids).sum())


@pytest.mark.parametrize("k", [1, 5, 20, VOCAB - 1, VOCAB])
def test_tokens_that_are_not_reported_count_as_one_TGT_16(k):
    """TGT-16: against scipy over k + 1 events in float64; with the whole vocabulary, the plain KL of two models."""
    teacher, policy = models(8, scale=2.0)
    token_ids, logprobs = reported(teacher, k)
    found = truncated_kl(policy, token_ids, logprobs)
    expected = [
        entropy(bucketed(t, ids), bucketed(q, ids))
        for t, q, ids in zip(teacher.double().numpy(), policy.double().numpy(), token_ids.numpy(), strict=True)
    ]
    assert np.abs(found.numpy() - expected).max() < 1e-5 and max(expected) > 0.1
    plain = entropy(teacher.double().softmax(1).numpy(), policy.double().softmax(1).numpy(), axis=1)
    if k == VOCAB:
        assert np.abs(found.numpy() - plain).max() < 1e-5
    else:
        assert (found.numpy() <= plain + 1e-5).all()


@pytest.mark.parametrize("k", [5, VOCAB])
def test_the_gradient_is_that_of_the_policy_over_the_same_events_TGT_16(k):
    """TGT-16: d KL / d logit is the policy's probability, less the teacher's share of the token's event."""
    teacher, policy = models(8)
    policy.requires_grad_()
    token_ids, logprobs = reported(teacher, k)
    truncated_kl(policy, token_ids, logprobs).sum().backward()
    q, p = policy.detach().double().softmax(1), teacher.double().softmax(1)
    is_top = torch.zeros_like(q).scatter(1, token_ids, 1.0).bool()
    rest_p, rest_q = p.masked_fill(is_top, 0).sum(1, keepdim=True), q.masked_fill(is_top, 0).sum(1, keepdim=True)
    share = torch.where(is_top, p, q / rest_q * rest_p) if k < VOCAB else p
    assert (policy.grad - (q - share)).abs().max() < 1e-6


@pytest.mark.parametrize("k", [5, 20])
def test_a_teacher_may_have_more_rows_than_the_policy_TGT_16(k):
    """TGT-16: as Qwen2.5-VL-7B beside 3B, with one tokenizer. What the policy has no logit for is among the rest."""
    own = VOCAB - 12
    teacher, policy = models(8)
    teacher[:, 0] = 4.0  # the first is one of both; of the others some are not
    policy = policy[:, :own].clone().requires_grad_()
    token_ids, logprobs = reported(teacher, k)
    assert (token_ids >= own).any(1).sum() > 4
    found = truncated_kl(policy, token_ids, logprobs)
    assert (token_ids[:, -1] >= own).any()
    assert truncated_kl(policy, token_ids.flip(1), logprobs.flip(1)).allclose(found, atol=1e-6)  # in any order
    for i, ids in enumerate(token_ids.numpy()):
        shared = ids[ids < own]
        ours, theirs = (bucketed(own_logits[i].detach().double().numpy(), shared) for own_logits in (policy, teacher))
        assert found[i].item() == pytest.approx(entropy(theirs, ours), abs=1e-5)
    found.sum().backward()
    assert policy.grad.isfinite().all() and policy.grad.sum(1).abs().max() < 1e-6


@pytest.mark.parametrize("excess", [0.0, 1e-6])
def test_a_sure_teacher_and_a_sure_policy_give_finite_numbers_TGT_16(excess):
    """TGT-16: reported probabilities may round to one or above; the policy's rest may be far below float32's steps."""
    policy = torch.zeros(1, VOCAB)
    policy[0, 3] = 60.0
    policy.requires_grad_()
    ids, logprobs = torch.tensor([[3]]), torch.tensor([[excess]])
    sure = truncated_kl(policy, ids, logprobs)
    assert sure.item() == pytest.approx(0.0, abs=1e-5)
    half = truncated_kl(policy, ids, torch.tensor([[0.5]]).log())
    expected = np.log(0.5) - 0.5 * (np.log(VOCAB - 1) - 60.0)
    assert half.item() == pytest.approx(expected, rel=1e-5)
    half.backward()
    assert policy.grad[0, 3].item() == pytest.approx(0.5, abs=1e-5) and policy.grad.isfinite().all()


@pytest.mark.parametrize("num_tokens", [0, 1, 60])
def test_the_head_runs_equally_often_on_every_rank_and_by_chunks_TGT_16_PCK_8_LRN_4(num_tokens):
    """TGT-16, PCK-8, LRN-4: sum and gradient are those of one pass; no logits are kept for backward."""
    torch.manual_seed(3)
    head, hidden = nn.Linear(16, VOCAB, bias=False), torch.randn(70, 16, requires_grad=True)
    positions = torch.randperm(70)[:num_tokens]
    token_ids, logprobs = reported(models(num_tokens)[0], 5)
    expected = truncated_kl(head(hidden[positions]), token_ids, logprobs).sum()
    expected_grads = torch.autograd.grad(expected, [hidden, head.weight])
    calls, kept = [], []
    head.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        total = teacher_kl_sum(hidden, head, positions, TeacherTop(token_ids, logprobs, num_chunks=4))
    largest = max(1, num_tokens // 4)
    assert len(calls) == 4 and max(calls) == largest and max(kept) < largest * VOCAB + 1120
    total.backward()
    assert len(calls) == 8 and min(calls) >= 1
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close((hidden.grad, head.weight.grad), expected_grads)
    if not num_tokens:
        assert total == 0 and hidden.grad.abs().max() == 0


def test_no_rank_with_such_a_token_runs_nothing_TGT_16():
    head, calls = nn.Identity(), []
    head.register_forward_hook(lambda *_: calls.append(1))
    teacher = TeacherTop(torch.zeros(0, 5, dtype=torch.long), torch.zeros(0, 5))
    assert teacher_kl_sum(torch.zeros(3, 2), head, torch.zeros(0, dtype=torch.long), teacher) == 0 and not calls
