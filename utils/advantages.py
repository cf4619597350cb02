"""How much better an answer is than the others to the same prompt (GRP-6). Pure: rewards in, advantages out.

Shapes: P prompts (groups), n answers to each (`num_generations`). Who gives rewards is `utils.rewards`' business, what
an advantage does to the policy is `utils.policy_loss`'.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

# Keeps a group whose rewards hardly differ from being blown up to unit variance.
EPSILON = 1e-4
# Rewards are sums of a few fractions: what lies closer together than this differs by rounding only.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages float64 `[P, n]`, 0 where an answer is left out, and which groups teach anything, bool `[P]`.

    A group without signal (fewer than two answers left, or all with the same reward) has advantages of 0 throughout.
    """

    advantages: np.ndarray
    has_signal: np.ndarray


def group_advantages(
    rewards: np.ndarray,
    valid: np.ndarray | None = None,
    scale_rewards: Literal["group", "batch", "none"] = "group",
    batch_std: float | None = None,
) -> GroupAdvantages:
    """Rewards relative to their group: `(r - mean) / (std + 1e-4)`.

    Args:
        rewards: float `[P, n]`, one row per prompt.
        valid: bool `[P, n]`, False for answers that are left out (truncated ones, where asked, and failed ones): they
            count neither in mean and std nor as answers; None takes all.
        scale_rewards: what the difference is divided by: `group`, the group's own sample standard deviation (n - 1);
            `batch`, that of all answers of the optimizer step; `none`, nothing.
        batch_std: for `batch`: `std_of(sum of reward_moments over ranks)`; None takes these rewards as the whole batch.

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
    return GroupAdvantages(np.where(has_signal[:, None], difference, 0.0), has_signal)


def reward_moments(rewards: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Number, sum and sum of squares of the valid rewards, float64 `[3]`; added up over ranks, they are the batch's."""
    kept = np.asarray(rewards, dtype=np.float64)[np.asarray(valid, dtype=bool)]
    return np.array([len(kept), kept.sum(), (kept**2).sum()])


def std_of(moments: np.ndarray) -> float:
    """Sample standard deviation (n - 1) of what `reward_moments` counted; 0 for fewer than two rewards."""
    count, total, squares = moments
    return float(np.sqrt(max(squares - total**2 / count, 0.0) / (count - 1))) if count > 1 else 0.0
