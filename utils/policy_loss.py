"""What the tokens of sampled answers cost under the policy gradient (GRP-6), without the logits of whole rows. Pure.

Shapes: N scored tokens of a batch in the order of its rows (those of one answer stand together), S answers, D hidden
width, V vocabulary. All parts are float32 weighted SUMS; `policy_loss` divides by a total over all ranks and
micro-steps of an optimizer step (PCK-5), so the gradient does not depend on how answers were laid out in rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.utils.checkpoint import checkpoint

from utils.packing import Batch
from utils.targets import Segment

LossType = Literal["grpo", "dapo", "dr_grpo"]


@dataclass(frozen=True)
class PolicyOptions:
    """The objective's settings, as in `rlhf` of the config.

    `epsilon_high` None means `epsilon`; `importance_correction_cap` None means no importance correction.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    importance_sampling_level: Literal["token", "sequence"] = "token"
    importance_correction_cap: float | None = 2.0


@dataclass
class PolicyTokens:
    """What is known of the N scored tokens before the forward pass, all float32[N] unless said.

    Attributes:
        sequence: int64[N], which answer of the batch a token belongs to, 0..S-1; an answer is never split over batches.
        advantage: of its answer.
        weight: `token_weights` of its answer. Answers that are left out have no tokens here.
        old_logprob: under the weights that the answers were sampled with; None takes the present ones, which is exact
            in the first optimizer step after a rollout: ratios are then 1 and carry the gradient.
        ref_logprob: under the reference policy; needed where `beta` is not 0.
        engine_logprob: as the engine reported it when it sampled the token; nan where it did not. None for none at all.
    """

    sequence: Tensor
    advantage: Tensor
    weight: Tensor
    old_logprob: Tensor | None = None
    ref_logprob: Tensor | None = None
    engine_logprob: Tensor | None = None

    def to(self, device: torch.device | str) -> PolicyTokens:
        """The same tokens on `device`."""
        moved = {k: v.to(device, non_blocking=True) if v is not None else None for k, v in vars(self).items()}
        return PolicyTokens(**moved)


@dataclass
class PolicySums:
    """What a micro-step gives: loss parts with gradient, and detached numbers for the log.

    Attributes:
        policy, kl: float32 scalars, weighted sums; `kl` is unscaled by `beta`.
        sums: float32 scalars; added up over micro-steps and ranks, `policy_metrics` turns them into means.
        maxima: float32 scalars, of which the largest counts.
    """

    policy: Tensor
    kl: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


# ---------------------------------------------------------------------------------------------------------------------
# weights and denominators


def token_weights(lengths: np.ndarray, loss_type: LossType, max_new_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The weight of each token of an answer, and what the answer adds to the denominator, both float64[S].

    Args:
        lengths: int[S], scored tokens per answer; 0 for an answer that is left out, which weighs and adds nothing.
        loss_type: `grpo`: mean over the tokens of an answer, then over answers; `dapo`: mean over all tokens of the
            step; `dr_grpo`: sum over the tokens of an answer divided by the constant `max_new_tokens`, then mean over
            answers, so that neither length nor company changes what a token weighs.

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


def policy_segment(
    sample_id: str,
    prompt_token_ids: Sequence[int],
    answer_ids: Sequence[int],
    pixel_values: Tensor | None = None,
    image_grid_thw: Tensor | None = None,
    policy_version: str | None = None,
) -> Segment:
    """A sampled answer behind its prompt as a segment for rows: every token of the answer is scored.

    Args:
        answer_ids: as generated, with the end token behind them where the model ended the answer itself.
    """
    answer = np.array(answer_ids, dtype=np.int64)
    start, nothing = len(prompt_token_ids), np.zeros(0, dtype=np.int64)
    return Segment(
        sample_id=sample_id,
        input_ids=np.concatenate([np.array(prompt_token_ids, dtype=np.int64), answer]),
        answer_start=start,
        coord_index=nothing,
        coord_target=nothing.astype(np.float32),
        text_index=start + np.arange(len(answer)),
        text_label=answer,
        text_weight=np.ones(len(answer), dtype=np.float32),
        pixel_values=pixel_values,
        image_grid_thw=image_grid_thw,
        policy_version=policy_version,
    )


def policy_tokens(
    lengths: Sequence[int],
    advantages: Sequence[float],
    weights: Sequence[float],
    engine_logprobs: Sequence[Sequence[float]] | None = None,
) -> PolicyTokens:
    """The scored tokens of a batch from what is known of its answers, `[S]` each, in the order of its segments; so
    token `i` is what `text_pos[i]` and `text_label[i]` of the collated batch score.

    Args:
        engine_logprobs: per answer and token; a shorter list is filled up with nan at its end (no correction there), an
            empty one where the engine reports none.
    """
    size = torch.tensor(lengths, dtype=torch.int64)
    engine = None
    if engine_logprobs is not None:
        engine = torch.full((int(size.sum()),), torch.nan)
        for start, given in zip((size.cumsum(0) - size).tolist(), engine_logprobs, strict=True):
            engine[start : start + len(given)] = torch.as_tensor(given, dtype=torch.float32)
    return PolicyTokens(
        sequence=torch.arange(len(size)).repeat_interleave(size),
        advantage=torch.tensor(advantages, dtype=torch.float32).repeat_interleave(size),
        weight=torch.tensor(weights, dtype=torch.float32).repeat_interleave(size),
        engine_logprob=engine,
    )


# ---------------------------------------------------------------------------------------------------------------------
# log-probabilities


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
        temperature: that of the sampling: the policy is the distribution that tokens are drawn from.
    """

    def score(states: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits = lm_head(states).float() / temperature
        with torch.no_grad():
            log_p = logits.log_softmax(dim=1)
            entropy = -(log_p.exp() * log_p).sum(dim=1)
        return -cross_entropy(logits, label, reduction="none"), entropy

    count = len(positions)
    borders = [(count * c // num_chunks, count * (c + 1) // num_chunks) for c in range(num_chunks)]
    # A chunk without labels scores row 0 and drops the result, which still runs the head in forward and backward.
    padding = [(0, int(start == end)) for start, end in borders]
    wanted = [pad(positions[start:end], extra) for (start, end), extra in zip(borders, padding, strict=True)]
    states = hidden[torch.cat(wanted)].split([len(part) for part in wanted])
    scored = []
    for own, (start, end), extra in zip(states, borders, padding, strict=True):
        label = pad(labels[start:end], extra)
        logprob, entropy = checkpoint(score, own, label, use_reentrant=False, preserve_rng_state=False)
        scored.append((logprob[: end - start], entropy[: end - start]))
    return torch.cat([logprob for logprob, _ in scored]), torch.cat([entropy for _, entropy in scored])


# ---------------------------------------------------------------------------------------------------------------------
# the objective


def policy_sums(
    logprob: Tensor, tokens: PolicyTokens, options: PolicyOptions, entropy: Tensor | None = None
) -> PolicySums:
    """The clipped objective and the KL penalty over one batch, as weighted sums.

    Per token: `-c * min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A)`, and beside it the KL estimate
    `exp(ref - new) - (ref - new) - 1`. `r` is the ratio of new to old probability, of the token or, with
    `importance_sampling_level: sequence`, the geometric mean over the answer. `c = min(old / engine,
    importance_correction_cap)`, without gradient, corrects for an engine that computes other probabilities than the
    learner from the same weights.

    Args:
        logprob: float32[N] with gradient, of `token_logprobs`.
        entropy: float32[N], for the log.

    Source: clipping: Schulman et al. 2017, PPO (arXiv:1707.06347), eq. 7; the upper bound of its own: Yu et al. 2025,
    DAPO (arXiv:2503.14476), section 3.1; sequence ratio: Zheng et al. 2025, GSPO (arXiv:2507.18071), eq. 7; KL:
    Schulman 2020, "Approximating KL divergence", estimator k3; `c`: Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training" (truncated importance sampling).
    """
    assert tokens.ref_logprob is not None or not options.beta, "a KL penalty needs the reference policy"
    old = logprob.detach() if tokens.old_logprob is None else tokens.old_logprob
    low, high = 1 - options.epsilon, 1 + (options.epsilon if options.epsilon_high is None else options.epsilon_high)
    ratio = _log_ratio(logprob - old, tokens, options).exp()
    per_token = -torch.minimum(ratio * tokens.advantage, ratio.clamp(low, high) * tokens.advantage)
    gap = torch.zeros_like(old) if tokens.engine_logprob is None else (old - tokens.engine_logprob).nan_to_num(0.0)
    cap = options.importance_correction_cap
    correction = torch.ones_like(old) if cap is None else gap.exp().clamp(max=cap)
    towards = torch.zeros_like(logprob) if tokens.ref_logprob is None else tokens.ref_logprob - logprob
    kl = torch.expm1(towards) - towards
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


def policy_loss(sums: PolicySums, denominator: float, options: PolicyOptions) -> Tensor:
    """`(policy + beta * kl) / denominator`, a float32 scalar.

    Args:
        denominator: what `token_weights` says answers add, over all ranks and micro-steps of the optimizer step. Added
            up over them, this is the step's loss; who averages gradients multiplies first.
    """
    # With beta 0 the KL stays out of the graph: an exploding estimate that nobody asked for would make it nan.
    penalty = options.beta * sums.kl if options.beta else 0.0
    return (sums.policy + penalty) / (denominator or 1.0)


def policy_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means per scored token, given `PolicySums.sums` added up over micro-steps and ranks."""
    means = {name: value / (sums["num_tokens"] or 1.0) for name, value in sums.items() if name != "num_tokens"}
    return {**means, "clip_fraction": means["clip_high"] + means["clip_low"]}


def _log_ratio(log_ratio: Tensor, tokens: PolicyTokens, options: PolicyOptions) -> Tensor:
    """Per token as it is, or its mean over each answer, float32[N]."""
    if options.importance_sampling_level == "token" or not len(log_ratio):
        return log_ratio
    size = int(tokens.sequence.max()) + 1
    total = log_ratio.new_zeros(size).index_add(0, tokens.sequence, log_ratio)
    count = log_ratio.new_zeros(size).index_add(0, tokens.sequence, torch.ones_like(log_ratio))
    return (total / count.clamp(min=1))[tokens.sequence]


@dataclass
class PolicyRow(Batch):
    """A row of sampled answers: all its text labels are scored, and `policy` says what is known of them."""

    policy: PolicyTokens = field(kw_only=True)

    def to(self, device: torch.device | str) -> PolicyRow:
        return dataclasses.replace(super().to(device), policy=self.policy.to(device))
