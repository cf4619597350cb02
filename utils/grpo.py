"""From rewarded groups to rows: advantages, weights, and the number of rows of a step.

Shapes: P prompts (groups), n answers to each (`num_generations`), F reward functions. `utils.rewards` computes rewards;
`utils.policy_loss` uses advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from utils.credit import KINDS, REST, Credit
from utils.dist import Ranks
from utils.packing import Batch, fill_rows, segments_from_state, segments_to_state
from utils.policy_loss import PolicyRow, policy_tokens, token_weights
from utils.targets import Segment

if TYPE_CHECKING:
    from utils.config.rlhf import Rlhf

EPSILON = 1e-4  # keeps a group whose rewards hardly differ from being scaled up to unit variance
TOLERANCE = 1e-9  # rewards are sums of a few fractions: smaller differences are rounding


def group_advantages(
    rewards: np.ndarray,
    valid: np.ndarray | None = None,
    scale_rewards: Literal["group", "batch", "none"] = "group",
    batch_std: float | None = None,
) -> np.ndarray:
    """Rewards relative to their group, float64 `[P, n]`: `(r - mean) / (std + 1e-4)`.

    0 for excluded answers, and throughout a group without signal (fewer than two answers left, or all with the same
    reward).

    Args:
        rewards: float `[P, n]`, one row per prompt.
        valid: bool `[P, n]`, False for excluded answers (failed ones, and truncated ones if so configured): they count
            neither in mean and std nor as answers; None includes all.
        scale_rewards: the divisor of the difference: `group`, the group's own sample standard deviation (n - 1);
            `batch`, that of all answers of the optimizer step; `none`, no divisor.
        batch_std: for `batch`: `std_of(sum of reward_moments over ranks)`; None if these rewards are the whole batch.

    Source: `group`: Shao et al. 2024, DeepSeekMath (arXiv:2402.03300), section 4.1.2. `none`: Liu et al. 2025, Dr. GRPO
    (arXiv:2503.20783), which shows that the group's std favours prompts that are too easy or too hard. `batch`: Liu et
    al. 2025, Lite PPO (arXiv:2508.08221). Groups without signal and truncated answers: Yu et al. 2025, DAPO
    (arXiv:2503.14476), sections 3.2 and 3.4.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    valid = np.ones(rewards.shape, dtype=bool) if valid is None else np.asarray(valid, dtype=bool)
    assert rewards.ndim == 2 and valid.shape == rewards.shape, (rewards.shape, valid.shape)
    assert np.isfinite(rewards[valid]).all()
    rewards = np.where(valid, rewards, 0.0)
    count = valid.sum(axis=1, keepdims=True)
    mean = rewards.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    difference = np.where(valid, rewards - mean, 0.0)
    has_signal = np.abs(difference).max(axis=1, initial=0.0) > TOLERANCE
    if scale_rewards == "group":
        std = np.sqrt((difference**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1))
        difference = difference / (std + EPSILON)
    elif scale_rewards == "batch":
        std = std_of(reward_moments(rewards, valid)) if batch_std is None else batch_std
        difference = difference / (std + EPSILON)
    return np.where(has_signal[:, None], difference, 0.0)


def reward_moments(rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Number, sum and sum of squares of the valid rewards, float64 `[3]`; their sum over ranks is the batch's."""
    kept = np.asarray(rewards, dtype=np.float64)[np.asarray(valid, dtype=bool)]
    return np.array([len(kept), kept.sum(), (kept**2).sum()])


def std_of(moments: np.ndarray) -> float:
    """Sample standard deviation (n - 1) from `reward_moments`; 0 for fewer than two rewards."""
    count, total, squares = moments
    return float(np.sqrt(max(squares - total**2 / count, 0.0) / (count - 1))) if count > 1 else 0.0


@dataclass
class Answer:
    """One sampled answer."""

    segment: Segment  # prompt and answer, with the stop token if the model ended it with one
    text: str
    rewards: np.ndarray  # float64 [F], one per reward function; zeros for a failed request
    engine_logprobs: list[float]  # of the sampled tokens, end token included; empty if the engine reported none
    is_valid: bool = True  # it counts in its group and in the loss
    is_truncated: bool = False  # it stopped at `max_new_tokens`
    is_failed: bool = False  # the request failed and there is no answer
    credit: Credit | None = None  # of its objects; None unless `rlhf.advantage` is `object`

    @property
    def num_tokens(self) -> int:
        """Scored tokens."""
        return len(self.segment.text_index)

    @property
    def decisions(self) -> np.ndarray:
        """The decision of each scored token, int64 `[N]`; without a credit there is one."""
        return np.zeros(self.num_tokens, dtype=np.int64) if self.credit is None else self.credit.decisions


Group = list[Answer]


@dataclass
class WeightedAnswers:
    """A rank's answers of one optimizer step, group after group, with advantages and weights."""

    answers: list[Answer]
    advantages: list[np.ndarray]  # of each answer's tokens, float64 [N]
    weights: np.ndarray  # float64 [P * n], per token; 0 for excluded answers
    denominator: float  # these answers' contribution to the step's denominator
    has_signal: np.ndarray  # bool [P]


def has_signal(groups: Sequence[Group], reward_weights: np.ndarray) -> np.ndarray:
    """Mask of the groups that give a gradient, bool `[P]`."""
    return _with_signal(groups, decision_advantages(groups, reward_weights, "none"))


def weight_answers(
    groups: Sequence[Group], reward_weights: np.ndarray, settings: Rlhf, ranks: Ranks
) -> WeightedAnswers:
    """Compute advantages and weights of a rank's answers (collective)."""
    answers = [answer for group in groups for answer in group]
    lengths = np.array([answer.num_tokens * answer.is_valid for answer in answers])
    weights, parts = token_weights(lengths, settings.loss_type, settings.max_new_tokens)
    of_decisions = decision_advantages(groups, reward_weights, settings.scale_rewards, ranks)
    advantages = [own[answer.decisions] for answer, own in zip(answers, of_decisions, strict=True)]
    return WeightedAnswers(answers, advantages, weights, float(parts.sum()), _with_signal(groups, of_decisions))


def decision_advantages(
    groups: Sequence[Group],
    reward_weights: np.ndarray,
    scale_rewards: Literal["group", "batch", "none"],
    ranks: Ranks | None = None,
) -> list[np.ndarray]:
    """Advantages of each answer's decisions, float64 `[D]`: `group_advantages` of all decisions of one kind (GRP-8).
    Without credits an answer is one decision. Collective for `batch`, unless `ranks` is None."""
    answers = [answer for group in groups for answer in group]
    credits = [answer.credit or Credit(np.array([REST]), answer.rewards[None], np.zeros(0)) for answer in answers]
    counts = [len(credit.kinds) for credit in credits]
    kinds = np.concatenate([credit.kinds for credit in credits])
    values = np.concatenate([credit.rewards @ reward_weights for credit in credits])
    valid = np.repeat([answer.is_valid for answer in answers], counts)
    group_of = np.repeat(np.repeat(np.arange(len(groups)), [len(group) for group in groups]), counts)
    places = [_table(kinds == kind, group_of, len(groups)) for kind in range(len(KINDS))]
    exists = [(place >= 0) & valid[place] for place in places]
    stds: list[float | None] = [None] * len(KINDS)
    if scale_rewards == "batch" and ranks is not None:
        moments = np.array([reward_moments(values[place], own) for place, own in zip(places, exists, strict=True)])
        stds = [std_of(total) for total in np.sum(ranks.gather(moments), axis=0)]
    advantages = np.zeros(len(values))
    for place, own, std in zip(places, exists, stds, strict=True):
        advantages[place[own]] = group_advantages(values[place], own, scale_rewards, std)[own]
    return np.split(advantages, np.cumsum(counts)[:-1])


def _table(chosen: np.ndarray, group_of: np.ndarray, num_groups: int) -> np.ndarray:
    """Indices of the chosen decisions, a row per group, filled with -1; int64 `[P, M]`."""
    rows = [np.flatnonzero(chosen & (group_of == group)) for group in range(num_groups)]
    table = np.full((num_groups, max(1, *map(len, rows))), -1)
    for row, indices in zip(table, rows, strict=True):
        row[: len(indices)] = indices
    return table


def _with_signal(groups: Sequence[Group], advantages: Sequence[np.ndarray]) -> np.ndarray:
    found = iter(advantages)
    return np.array([any([next(found).any() for _ in group]) for group in groups], dtype=bool)


def choose_rows(
    weighted: WeightedAnswers, *, has_penalty: bool, cap: int | None, per_row: int, ranks: Ranks
) -> list[list[int]]:
    """Assign answers to rows, as indices; equally many rows on all ranks, some maybe empty (PCK-8; collective).

    All answers of a step train in that step. Without a KL penalty an answer that is no better or worse than its group
    has no gradient: it stays in the denominators, but is not computed.

    Args:
        has_penalty: `beta` is not 0.
        cap: tokens in a packed row, which every answer fits; None for padded batches of `per_row` answers.
    """
    has_gradient = np.array([bool(advantages.any()) for advantages in weighted.advantages]) | has_penalty
    kept = np.flatnonzero((weighted.weights > 0) & has_gradient).tolist()
    if cap is None:
        rows = [kept[start : start + per_row] for start in range(0, len(kept), per_row)]
    else:
        lengths = [len(weighted.answers[index].segment) for index in kept]
        rows = [[kept[position] for position in row] for row in fill_rows(lengths, cap)]
    num_rows = max(1, *ranks.gather(len(rows)))
    return rows + [[] for _ in range(num_rows - len(rows))]


def policy_row(weighted: WeightedAnswers, row: list[int], collate: Callable[[list[Segment]], Batch]) -> PolicyRow:
    """Collate a row and add the inputs of the objective."""
    answers = [weighted.answers[index] for index in row]
    tokens = policy_tokens(
        [answer.num_tokens for answer in answers],
        [weighted.advantages[index] for index in row],
        weighted.weights[row],
        [answer.engine_logprobs for answer in answers],
    )
    return PolicyRow(**vars(collate([answer.segment for answer in answers])), policy=tokens)


def groups_to_state(groups: Sequence[Group]) -> list[list[dict[str, Any]]]:
    """Groups as plain types and tensors, which `torch.load(weights_only=True)` accepts."""

    def plain(answer: Answer) -> dict[str, Any]:
        (segment,) = segments_to_state([answer.segment])
        credit = answer.credit and {name: torch.from_numpy(array) for name, array in vars(answer.credit).items()}
        return {**vars(answer), "segment": segment, "rewards": torch.from_numpy(answer.rewards), "credit": credit}

    return [[plain(answer) for answer in group] for group in groups]


def groups_from_state(state: Sequence[Sequence[dict[str, Any]]]) -> list[Group]:
    """The reverse of `groups_to_state`."""

    def revived(fields: dict[str, Any]) -> Answer:
        (segment,) = segments_from_state([fields["segment"]])
        saved = fields.get("credit")
        credit = saved and Credit(**{name: tensor.numpy() for name, tensor in saved.items()})
        return Answer(**fields | {"segment": segment, "rewards": fields["rewards"].numpy(), "credit": credit})

    return [[revived(fields) for fields in group] for group in state]
