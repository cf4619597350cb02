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

from utils.credit import REST, Credit, go_on_decision, object_decision
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
    """Advantages of each answer's decisions, float64 `[D]`, answer by answer (GRP-8). Without a credit an answer is one
    decision. For an image without objects every decision gets the answer's advantage: the first object already loses
    the reward, so each further one would look free. Collective for `batch`, unless `ranks` is None."""
    rewards = [np.array([answer.rewards for answer in group]) @ reward_weights for group in groups]
    valid = [np.array([answer.is_valid for answer in group]) for group in groups]
    credits = [
        [answer.credit for answer in group if answer.credit and answer.is_valid and len(answer.credit.true_corners)]
        for group in groups
    ]
    split = [split_advantages(own, reward_weights) for own in credits]
    std = None
    if scale_rewards == "batch":
        moments = sum(map(_moments, rewards, valid, split), np.zeros(3))
        std = std_of(moments if ranks is None else np.sum(ranks.gather(moments), axis=0))
    found: list[np.ndarray] = []
    for group, own, counts, (parts, squares) in zip(groups, rewards, valid, split, strict=True):
        whole = group_advantages(own[None], counts[None], scale_rewards, std)[0]
        group_std = np.sqrt(squares / max(len(parts) - 1, 1))
        scale = {"group": group_std + EPSILON, "batch": (std or 0.0) + EPSILON, "none": 1.0}[scale_rewards]
        scaled = (part / scale for part in parts)
        for answer, value in zip(group, whole, strict=True):
            if answer.credit is None:
                found.append(np.array([value]))
            elif answer.is_valid and len(answer.credit.true_corners):
                found.append(next(scaled))
                found[-1][REST] = value
            else:
                found.append(np.full(answer.credit.num_decisions, value))
    return found


def _moments(rewards: np.ndarray, valid: np.ndarray, split: tuple[list[np.ndarray], float]) -> np.ndarray:
    """`reward_moments` of a group, with the squares of its decisions for those within the group."""
    count, total, squares = reward_moments(rewards, valid)
    parts, of_decisions = split
    return np.array([count, total, total**2 / count + of_decisions if parts else squares])


def split_advantages(credits: Sequence[Credit], reward_weights: np.ndarray) -> tuple[list[np.ndarray], float]:
    """Advantages of the decisions of a group's n answers, not scaled, float64 `[D]` each (GRP-8), 0 for the rest; and
    the sum of squares that rewards would have about their mean, if decisions were independent: of one object, they are
    the answers' rewards.

    Each true object is a question that every answer of the group answers: by its attempt, or by passing over it. The
    baseline is what the object would earn in this answer with the success that the group has with it on the mean. It is
    taken from the attempt, or from the decision that passed over it: the one behind the last object that stands before
    it, top to bottom, then left to right. Anything else is worth what it earned, times (n - 1) / n: an answer is part
    of its baselines, which take 1 / n of all the others. The decision to go on gets the sum of everything after it. So
    no baseline depends on what was decided, which would favour one of the choices. If the image shows one object and
    every answer names one, the answers' rewards are compared, as without credit.
    """
    if len(credits) < 2:  # nothing to compare with
        return [np.zeros(credit.num_decisions) for credit in credits], 0.0
    earned = [credit.earned @ reward_weights for credit in credits]
    possible = [credit.possible @ reward_weights for credit in credits]
    apart = np.array([credit.apart @ reward_weights for credit in credits])
    has_one_object = all(len(credit.truths) == len(credit.true_corners) == 1 for credit in credits)
    if has_one_object:
        split = [np.append(own, 0.0) for own in earned - np.mean(earned)]
    else:
        expected = np.mean([_success(*parts) for parts in zip(credits, earned, possible, strict=True)], axis=0)
        split = [
            _less_expected(credit, np.where(credit.truths < 0, 1 - 1 / len(credits), 1.0) * own, could * expected)
            for credit, own, could in zip(credits, earned, possible, strict=True)
        ]
    common = apart - apart.mean()
    found, squares = [], 0.0
    for own, value in zip(split, common, strict=True):
        squares += float((own.sum() + value) ** 2 if has_one_object else (own**2).sum() + value**2)
        following = np.cumsum(own[::-1])[::-1]
        advantages = np.zeros(2 * len(own))
        advantages[object_decision(0) :: 2] = own + value  # closing is the last of them
        advantages[go_on_decision(0) :: 2] = following[:-1] + value
        if has_one_object:  # the scale is that of whole rewards, which may be equal where those of the text are not
            bound = abs(own.sum() + value)
            advantages[-1] = np.clip(value, -bound, bound)
        found.append(np.where(np.abs(advantages) > TOLERANCE, advantages, 0.0))
    return found, squares


def _success(credit: Credit, earned: np.ndarray, possible: np.ndarray) -> np.ndarray:
    """What an answer earned with each true object, as a share of what was possible, -1 to 1; float64 `[T]`."""
    found = np.zeros(len(possible))
    is_attempt = credit.truths >= 0
    found[credit.truths[is_attempt]] = earned[is_attempt]
    return np.divide(found, possible, out=np.zeros_like(found), where=np.abs(possible) > TOLERANCE).clip(-1, 1)


def _less_expected(credit: Credit, earned: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """What an answer's objects earned and closing, which earns nothing, less what was expected of each true object;
    float64 `[K + 1]`."""
    found = np.append(earned, 0.0)
    attempt = {truth: k for k, truth in enumerate(credit.truths.tolist())}
    corners = credit.corners.tolist()
    for truth, corner in enumerate(credit.true_corners.tolist()):
        before = (k for k, own_corner in enumerate(corners) if own_corner < corner)
        place = attempt[truth] if truth in attempt else max(before, default=-1) + 1
        found[place] -= expected[truth]
    return found


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
