"""Objectives of an optimizer step: stage 2's losses on targets, GRPO's on sampled answers.

An objective holds a few settings; everything that differs from row to row is in the batch. All have these methods:
    totals: this rank's part of the denominators of an optimizer step (PCK-5).
    loss: a row's part of the step's loss, a float32 scalar, and detached numbers for `metrics`. It gets the final
        hidden states `[B * T, D]`, the model's head (called as a module exactly `num_chunks` times), the row, and the
        sum of `totals` over all ranks.
    metrics: scalars for the log from the numbers of all micro-steps of all ranks; `total` is the step's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from utils.config.rlhf import Rlhf
from utils.config.schema import Losses
from utils.losses import loss_sums, reference_kl_sum, teacher_kl_sum, total_loss
from utils.packing import Batch, denominators
from utils.policy_loss import PolicyRow, policy_loss, policy_metrics, policy_sums, token_logprobs

Head = Callable[[Tensor], Tensor]
Numbers = dict[str, Tensor]


@dataclass(frozen=True)
class MatchingObjective:
    """Stage 2: coordinates and text of targets (TGT-7), and what has no label held to the start policy or a teacher
    (TGT-16)."""

    weights: Losses
    start_head: Head | None = None  # of the start policy; needed with `reference_kl`
    teacher_weight: float = 0.0

    def totals(self, batches: Sequence[Batch]) -> dict[str, float]:
        return denominators(batches)

    def loss(
        self, hidden: Tensor, head: Head, batch: Batch, totals: Mapping[str, float], num_chunks: int
    ) -> tuple[Tensor, Numbers]:
        sums = loss_sums(hidden, head, batch, self.weights.sigma, num_chunks)
        if self.weights.reference_kl:
            kl = reference_kl_sum(hidden, head, batch.unlabelled_pos, batch.start, self.start_head)
            sums["reference_kl"] = kl
        total = total_loss(sums, totals, self.weights)
        if self.teacher_weight:
            sums["teacher"] = teacher_kl_sum(hidden, head, batch.unlabelled_pos, batch.teacher)
            total = total + self.teacher_weight * sums["teacher"] / (totals["reference_kl"] or 1.0)
        return total, {part: value.detach() for part, value in sums.items()}

    def metrics(self, numbers: Sequence[Mapping[str, float]], totals: Mapping[str, float]) -> dict[str, float]:
        summed = {part: sum(own[part] for own in numbers) for part in numbers[0]}
        totals = {**totals, "teacher": totals["reference_kl"]}  # the same tokens
        weights = {**self.weights.model_dump(), "teacher": self.teacher_weight}
        means = {part: value / (totals.get(part) or totals["coord"] or 1.0) for part, value in summed.items()}
        return means | {"total": sum(weights[part] * value for part, value in means.items())}


@dataclass(frozen=True)
class PolicyObjective:
    """GRPO: the clipped policy gradient (GRP-6)."""

    options: Rlhf
    denominator: float  # contribution of this rank's answers to that of the optimizer step (`token_weights`)
    temperature: float = 1.0

    def totals(self, batches: Sequence[Batch]) -> dict[str, float]:
        return {"answers": self.denominator}

    def loss(
        self, hidden: Tensor, head: Head, batch: PolicyRow, totals: Mapping[str, float], num_chunks: int
    ) -> tuple[Tensor, Numbers]:
        logprob, entropy = text_logprobs(hidden, head, batch, num_chunks, self.temperature)
        sums = policy_sums(logprob, batch.policy, self.options, entropy)
        numbers = {"policy": sums.policy.detach(), "weighted_kl": sums.kl.detach(), **sums.sums, **sums.maxima}
        return policy_loss(sums, totals["answers"], self.options), numbers

    def metrics(self, numbers: Sequence[Mapping[str, float]], totals: Mapping[str, float]) -> dict[str, float]:
        maxima = {name: max(own[name] for own in numbers) for name in numbers[0] if name.endswith("_max")}
        summed = {name: sum(own[name] for own in numbers) for name in numbers[0] if name not in maxima}
        denominator = totals["answers"] or 1.0
        policy, penalty = summed.pop("policy") / denominator, summed.pop("weighted_kl") / denominator
        total = policy + self.options.beta * penalty
        return {"total": total, "policy": policy, **policy_metrics(summed), **maxima}


Objective = MatchingObjective | PolicyObjective


def text_logprobs(
    hidden: Tensor, head: Head, batch: Batch, num_chunks: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every text label of a batch, both float32 `[Nt]`, in their order."""
    return token_logprobs(hidden, head, batch.text_pos, batch.text_label, num_chunks, temperature)


def unlabelled_states(hidden: Tensor, head: Head, batch: Batch) -> Tensor:
    """Final hidden states `[Nu, D]` that predict the answers' tokens without a label."""
    return hidden[batch.unlabelled_pos]


def last_logprobs(hidden: Tensor, head: Head, batch: Batch, num_tokens: int) -> Tensor:
    """Log-probabilities, float32 `[num_tokens]`, of the last tokens of a batch's first segment."""
    end = int(batch.cu_seqlens[1])
    scored = slice(end - num_tokens, end)
    logprobs = head(hidden[scored.start - 1 : end - 1]).float().log_softmax(-1)
    return logprobs.gather(1, batch.input_ids.flatten()[scored, None])[:, 0]
