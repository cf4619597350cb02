"""The policy-gradient loss of sampled answers (GRP-6), without the logits of whole rows. Pure.

Shapes: N scored tokens of a batch in the order of its rows (the tokens of one answer are adjacent), S answers, D hidden
width, V vocabulary. All parts are float32 weighted SUMS; `policy_loss` divides by a total over all ranks and
micro-steps of an optimizer step (PCK-5), so the gradient does not depend on how answers are laid out in rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.utils.checkpoint import checkpoint

from utils.packing import Batch, Movable

if TYPE_CHECKING:
    from utils.config.rlhf import Rlhf

LossType = Literal["grpo", "dapo", "dr_grpo"]


@dataclass
class PolicyTokens(Movable):
    """Inputs of the objective for the N scored tokens, known before the forward pass; float32[N] unless noted."""

    sequence: Tensor  # int64[N], the token's answer in the batch, 0..S-1; an answer is never split over batches
    advantage: Tensor  # of its answer, or of its decision in it (GRP-8)
    weight: Tensor  # `token_weights` of its answer; excluded answers have no tokens here
    # Under the weights that sampled the answers. None means the present ones, which is exact in the first optimizer
    # step after a rollout: ratios are then 1 and carry the gradient.
    old_logprob: Tensor | None = None
    ref_logprob: Tensor | None = None  # under the reference policy; required unless `beta` is 0
    engine_logprob: Tensor | None = None  # as reported when the token was sampled; nan where not, None if nowhere


@dataclass
class PolicySums:
    """Results of a micro-step: loss parts with gradient, and detached metrics; all float32 scalars."""

    policy: Tensor  # weighted sum
    kl: Tensor  # weighted sum, not yet scaled by `beta`
    sums: dict[str, Tensor]  # add up over micro-steps and ranks; `policy_metrics` turns the totals into means
    maxima: dict[str, Tensor]  # the largest over micro-steps and ranks counts


def token_weights(lengths: np.ndarray, loss_type: LossType, max_new_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The weight of each token of an answer, and the answer's contribution to the denominator, both float64[S].

    Args:
        lengths: int[S], scored tokens per answer; 0 for an excluded answer, which has no weight and adds nothing.
        loss_type: `grpo`: mean over the tokens of an answer, then over answers; `dapo`: mean over all tokens of the
            step; `dr_grpo`: sum over the tokens of an answer divided by the constant `max_new_tokens`, then mean over
            answers, so that a token's weight depends neither on its answer's length nor on other answers.

    Source: Shao et al. 2024 (arXiv:2402.03300), eq. 3; Yu et al. 2025, DAPO (arXiv:2503.14476), eq. 12; Liu et al.
    2025, Dr. GRPO (arXiv:2503.20783), section 3.2.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    counts = (lengths > 0).astype(np.float64)
    if loss_type == "dapo":
        return counts, lengths
    if loss_type == "dr_grpo":
        return counts / max_new_tokens, counts
    return counts / np.maximum(lengths, 1), counts


def policy_tokens(
    lengths: Sequence[int],
    advantages: Sequence[float | np.ndarray] | np.ndarray,
    weights: Sequence[float] | np.ndarray,
    engine_logprobs: Sequence[Sequence[float]] | None = None,
) -> PolicyTokens:
    """The scored tokens of a batch, from values per answer, `[S]` each, in the order of its segments: token `i` belongs
    to `text_pos[i]` and `text_label[i]` of the collated batch.

    Args:
        advantages: of each answer, or of each of its tokens.
        engine_logprobs: per answer and token; a shorter list is padded with nan (no correction there), and empty if the
            engine reports none.
    """
    size = torch.tensor(lengths, dtype=torch.int64)
    own = [torch.as_tensor(given).float().expand(length) for given, length in zip(advantages, lengths, strict=True)]
    engine = None
    if engine_logprobs is not None:
        engine = torch.full((int(size.sum()),), torch.nan)
        for start, given in zip((size.cumsum(0) - size).tolist(), engine_logprobs, strict=True):
            engine[start : start + len(given)] = torch.as_tensor(given, dtype=torch.float32)
    return PolicyTokens(
        sequence=torch.arange(len(size)).repeat_interleave(size),
        advantage=torch.cat([torch.zeros(0), *own]),
        weight=torch.as_tensor(weights, dtype=torch.float32).repeat_interleave(size),
        engine_logprob=engine,
    )


def token_logprobs(
    hidden: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    positions: Tensor,
    labels: Tensor,
    num_chunks: int,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy at its position (nats, without gradient), both float32[N] (LRN-4).

    The head runs exactly `num_chunks` times, forward and again in backward, whatever N is, as in
    `utils.losses.loss_sums`; `num_chunks` must be the same on all ranks. Only one chunk's logits exist at a time.

    Args:
        hidden: [R, D] final hidden states.
        lm_head: the model's head, called as a module.
        positions: int64[N], rows of `hidden` that predict the labels.
        labels: int64[N], the sampled tokens.
        temperature: of the sampling; the policy is the distribution that tokens are sampled from.
    """

    def score(states: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits = lm_head(states).float() / temperature
        with torch.no_grad():
            log_p = logits.log_softmax(dim=1)
            entropy = -(log_p.exp() * log_p).sum(dim=1)
        return -cross_entropy(logits, label, reduction="none"), entropy

    # A chunk without labels scores row 0 and drops the result, which still runs the head in forward and backward.
    filled = [pad(part, (0, int(not len(part)))) for part in positions.tensor_split(num_chunks)]
    states = torch.split(hidden[torch.cat(filled)], [len(part) for part in filled])
    scored = []
    for own, label in zip(states, labels.tensor_split(num_chunks), strict=True):
        logprob, entropy = checkpoint(
            score, own, pad(label, (0, len(own) - len(label))), use_reentrant=False, preserve_rng_state=False
        )
        scored.append((logprob[: len(label)], entropy[: len(label)]))
    return torch.cat([logprob for logprob, _ in scored]), torch.cat([entropy for _, entropy in scored])


def policy_sums(logprob: Tensor, tokens: PolicyTokens, options: Rlhf, entropy: Tensor | None = None) -> PolicySums:
    """The clipped objective and the KL penalty over one batch, as weighted sums.

    Per token: `-c * min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A)`, and the KL estimate
    `exp(ref - new) - (ref - new) - 1`. `r` is the ratio of new to old probability, of the token or, with
    `importance_sampling_level: sequence`, its geometric mean over the answer. `c = min(old / engine,
    importance_correction_cap)`, without gradient, corrects for an engine whose probabilities differ from the learner's
    under the same weights; `old / engine` is taken of the token or of the answer as `r` is, so that `c r` is the ratio
    to the engine, up to the cap.

    Args:
        logprob: float32[N] with gradient, from `token_logprobs`.
        entropy: float32[N], for metrics only.

    Source: clipping: Schulman et al. 2017, PPO (arXiv:1707.06347), eq. 7; separate upper bound: Yu et al. 2025, DAPO
    (arXiv:2503.14476), section 3.1; sequence ratio: Zheng et al. 2025, GSPO (arXiv:2507.18071), eq. 7; KL:
    Schulman 2020, "Approximating KL divergence", estimator k3; `c`: Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training" (truncated importance sampling); of an answer: ms-swift's
    `sequence_truncate`, a geometric mean. TRL's takes the product, whose spread grows with the length.
    """
    assert tokens.ref_logprob is not None or not options.beta, "a KL penalty needs the reference policy"
    old = logprob.detach() if tokens.old_logprob is None else tokens.old_logprob
    low, high = 1 - options.epsilon, 1 + (options.epsilon if options.epsilon_high is None else options.epsilon_high)
    ratio = _log_ratio(logprob - old, tokens, options).exp()
    per_token = -torch.minimum(ratio * tokens.advantage, ratio.clamp(low, high) * tokens.advantage)
    gap = torch.zeros_like(old) if tokens.engine_logprob is None else (old - tokens.engine_logprob).nan_to_num(0.0)
    cap = options.importance_correction_cap
    correction = torch.ones_like(old) if cap is None else _log_ratio(gap, tokens, options).exp().clamp(max=cap)
    ref_gap = torch.zeros_like(logprob) if tokens.ref_logprob is None else tokens.ref_logprob - logprob
    kl = torch.expm1(ref_gap) - ref_gap
    sums = {
        "num_tokens": torch.ones_like(old),
        "ratio_mean": ratio,
        "clip_high": ((ratio > high) & (tokens.advantage > 0)).float(),
        "clip_low": ((ratio < low) & (tokens.advantage < 0)).float(),
        "kl": kl,
        "entropy": torch.zeros_like(old) if entropy is None else entropy,
        "engine_gap_mean": gap.abs(),
        "correction_mean": correction,
    }
    maxima = {"ratio_max": ratio, "engine_gap_max": gap.abs()}
    return PolicySums(
        policy=(tokens.weight * correction * per_token).sum(),
        kl=(tokens.weight * kl).sum(),
        sums={name: values.detach().sum() for name, values in sums.items()},
        maxima={name: pad(values.detach(), (0, 1)).max() for name, values in maxima.items()},  # 0 for no tokens
    )


def policy_loss(sums: PolicySums, denominator: float, options: Rlhf) -> Tensor:
    """`(policy + beta * kl) / denominator`, a float32 scalar.

    Args:
        denominator: the sum of the answers' contributions (`token_weights`) over all ranks and micro-steps of the
            optimizer step. The sum over them is the step's loss; if gradients are averaged, multiply first.
    """
    # With beta 0 the KL stays out of the graph: an exploding estimate of an unused penalty would make it nan.
    penalty = options.beta * sums.kl if options.beta else 0.0
    return (sums.policy + penalty) / (denominator or 1.0)


def policy_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means per scored token, from `PolicySums.sums` added up over micro-steps and ranks; none without such tokens.

    Answers that are not computed (`grpo.choose_rows`) have none."""
    if not sums["num_tokens"]:
        return {}
    means = {name: value / sums["num_tokens"] for name, value in sums.items() if name != "num_tokens"}
    return {**means, "clip_fraction": means["clip_high"] + means["clip_low"]}


def _log_ratio(log_ratio: Tensor, tokens: PolicyTokens, options: Rlhf) -> Tensor:
    """The log ratio per token, or its mean over each answer, float32[N].

    With an advantage per decision the mean's gradient goes to the token alone: GSPO-token (arXiv:2507.18071, section
    4.3), whose value is the same, and whose gradient too where the advantages of an answer are equal.
    """
    if options.importance_sampling_level == "token" or not len(log_ratio):
        return log_ratio
    size = int(tokens.sequence.max()) + 1
    means = log_ratio.new_zeros(size).scatter_reduce(0, tokens.sequence, log_ratio, "mean", include_self=False)
    if options.advantage == "object":
        return means.detach()[tokens.sequence] + (log_ratio - log_ratio.detach())
    return means[tokens.sequence]


@dataclass
class PolicyRow(Batch):
    """A row of sampled answers; all its text labels are scored."""

    policy: PolicyTokens = field(kw_only=True)
