"""Sampled answers on their way from rewards to rows (GRP-6): which of them train, with what weight, in which row.

An answer is a finished segment with its rewards; the answers to one prompt are a group, P groups of n answers are a
rank's part of an optimizer step. Who asks and who judges is the program's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from utils.advantages import GroupAdvantages, group_advantages, reward_moments, std_of
from utils.dist import Ranks
from utils.learner.objectives import PolicyRow
from utils.packing import Batch, fill_rows, segments_from_state, segments_to_state
from utils.policy_loss import policy_tokens, token_weights
from utils.targets import Segment


@dataclass
class Answer:
    """One sampled answer.

    Attributes:
        segment: prompt and answer, with the stop token behind it that the model ended it with, if it did.
        text: what was sampled, as text.
        rewards: float64 `[F]`, one per reward function; zeros for a failed request.
        engine_logprobs: of the sampled tokens, the end token included; empty where the engine did not report them.
        is_valid: it counts in its group and in the loss.
        is_truncated, is_failed: it was cut at `max_new_tokens`; the request failed alone and there is no answer.
    """

    segment: Segment
    text: str
    rewards: np.ndarray
    engine_logprobs: list[float]
    is_valid: bool = True
    is_truncated: bool = False
    is_failed: bool = False

    @property
    def num_tokens(self) -> int:
        """Scored tokens."""
        return len(self.segment.text_index)


Group = list[Answer]


@dataclass
class Weighed:
    """A rank's answers of one optimizer step, group after group, and how they pull.

    Attributes:
        advantages, weights: float64 `[P * n]`; the weight is per token, 0 for answers that are left out.
        share: what these answers add to the step's denominator.
        has_signal: bool `[P]`.
    """

    answers: list[Answer]
    advantages: np.ndarray
    weights: np.ndarray
    share: float
    has_signal: np.ndarray


def has_signal(groups: Sequence[Group], reward_weights: np.ndarray) -> np.ndarray:
    """Which groups teach anything, bool `[P]`."""
    return _advantages(groups, reward_weights, "none", None).has_signal


def weigh(
    groups: Sequence[Group],
    reward_weights: np.ndarray,
    *,
    scale_rewards: str,
    loss_type: str,
    max_new_tokens: int,
    ranks: Ranks,
) -> Weighed:
    """Advantages and weights of a rank's answers (collective)."""
    batch_std = None
    if scale_rewards == "batch":
        batch_std = std_of(sum(ranks.gather(reward_moments(*_totals(groups, reward_weights)))))
    found = _advantages(groups, reward_weights, scale_rewards, batch_std)
    answers = [answer for group in groups for answer in group]
    lengths = np.array([answer.num_tokens * answer.is_valid for answer in answers])
    weights, shares = token_weights(lengths, loss_type, max_new_tokens)
    return Weighed(answers, found.advantages.flatten(), weights, float(shares.sum()), found.has_signal)


def _advantages(groups: Sequence[Group], weights: np.ndarray, scale: str, batch_std: float | None) -> GroupAdvantages:
    return group_advantages(*_totals(groups, weights), scale, batch_std)


def _totals(groups: Sequence[Group], reward_weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weighted sums of rewards, float64 `[P, n]`, and which answers count, bool `[P, n]`."""
    totals = [[float(answer.rewards @ reward_weights) for answer in group] for group in groups]
    return np.array(totals), np.array([[answer.is_valid for answer in group] for group in groups])


def choose_rows(weighed: Weighed, *, has_penalty: bool, cap: int | None, per_row: int, ranks: Ranks) -> list[list[int]]:
    """Which answers share a row, as indices; equally many rows on all ranks, some maybe empty (PCK-8; collective).

    All answers of a step train in that step. Without a KL penalty an answer that is no better or worse than its group
    has no gradient: it stays in the denominators, but is not computed.

    Args:
        has_penalty: `beta` is not 0.
        cap: tokens in a packed row, which every answer fits; None for padded batches of `per_row` answers.
    """
    pulls = (weighed.advantages != 0) | has_penalty
    kept = np.flatnonzero((weighed.weights > 0) & pulls).tolist()
    if cap is None:
        rows = [kept[start : start + per_row] for start in range(0, len(kept), per_row)]
    else:
        lengths = [len(weighed.answers[index].segment) for index in kept]
        rows = [[kept[position] for position in row] for row in fill_rows(lengths, cap)]
    num_rows = max(1, *ranks.gather(len(rows)))
    return rows + [[] for _ in range(num_rows - len(rows))]


def policy_row(weighed: Weighed, row: Sequence[int], collate: Callable[[list[Segment]], Batch]) -> PolicyRow:
    """The row's tensors with what is known of its tokens."""
    answers = [weighed.answers[index] for index in row]
    tokens = policy_tokens(
        [answer.num_tokens for answer in answers],
        weighed.advantages[row] if row else [],
        weighed.weights[row] if row else [],
        [answer.engine_logprobs for answer in answers],
    )
    return PolicyRow(**vars(collate([answer.segment for answer in answers])), policy=tokens)


def groups_to_state(groups: Sequence[Group]) -> list[list[dict[str, Any]]]:
    """Groups as plain types and tensors, which `torch.load(weights_only=True)` takes."""

    def plain(answer: Answer) -> dict[str, Any]:
        (segment,) = segments_to_state([answer.segment])
        return {**vars(answer), "segment": segment, "rewards": torch.from_numpy(answer.rewards)}

    return [[plain(answer) for answer in group] for group in groups]


def groups_from_state(state: Sequence[Sequence[dict[str, Any]]]) -> list[Group]:
    def revived(fields: dict[str, Any]) -> Answer:
        (segment,) = segments_from_state([fields["segment"]])
        rewards: Tensor = fields["rewards"]
        return Answer(**fields | {"segment": segment, "rewards": rewards.numpy()})

    return [[revived(fields) for fields in group] for group in state]
