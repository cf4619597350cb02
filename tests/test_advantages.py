"""Group advantages against values worked out by hand, and what holds for all of them (GRP-6)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from utils.advantages import EPSILON, group_advantages, reward_moments, std_of


def test_small_groups_by_hand_grp_6() -> None:
    """GRP-6: [0, 1]: mean 0.5, sample std sqrt(0.5); [1, 2, 3] / 3: mean 2/3, std 1/3."""
    found = group_advantages(np.array([[0.0, 1.0]]))
    expected = 0.5 / (np.sqrt(0.5) + EPSILON)
    np.testing.assert_allclose(found.advantages, [[-expected, expected]])
    found = group_advantages(np.array([[1, 2, 3]]) / 3)
    np.testing.assert_allclose(found.advantages, np.array([[-1, 0, 1]]) / 3 / (1 / 3 + EPSILON))
    assert found.has_signal.tolist() == [True]


def test_without_scaling_advantages_are_differences_grp_6() -> None:
    """GRP-6, Dr. GRPO."""
    rewards = np.array([[0.0, 1.0, 0.5, 0.5], [0.2, 0.2, 0.2, 0.6]])
    found = group_advantages(rewards, scale_rewards="none")
    np.testing.assert_allclose(found.advantages, [[-0.5, 0.5, 0, 0], [-0.1, -0.1, -0.1, 0.3]])


def test_batch_scaling_divides_all_groups_by_one_number_grp_6() -> None:
    """GRP-6: the sample std of all rewards of the step, put together from the moments of two ranks."""
    rewards = np.array([[0.0, 1.0], [0.4, 0.6], [0.9, 0.9]])
    std = np.std(rewards, ddof=1)
    whole = group_advantages(rewards, scale_rewards="batch")
    np.testing.assert_allclose(whole.advantages, (rewards - rewards.mean(1, keepdims=True)) / (std + EPSILON))
    moments = reward_moments(rewards[:1], np.ones((1, 2))) + reward_moments(rewards[1:], np.ones((2, 2)))
    assert std_of(moments) == pytest.approx(std)
    parts = [group_advantages(part, None, "batch", std_of(moments)) for part in (rewards[:1], rewards[1:])]
    np.testing.assert_allclose(np.concatenate([part.advantages for part in parts]), whole.advantages)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_groups_without_signal_are_flagged_grp_6(scale_rewards: str) -> None:
    """GRP-6: equal rewards, sums that differ by rounding only included, give zeros and no signal."""
    rewards = np.array([[0.1 + 0.2, 0.3, 0.3], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
    found = group_advantages(rewards, scale_rewards=scale_rewards)
    assert found.has_signal.tolist() == [False, False, True]
    assert not found.advantages[:2].any() and found.advantages[2].all()


def test_answers_left_out_count_nowhere_grp_6() -> None:
    """GRP-6: the truncated answer's reward moves neither mean nor std; one answer, or none, is no group."""
    rewards = np.array([[0.0, 1.0, 9.0], [0.5, 0.0, 9.0], [7.0, 8.0, 9.0]])
    valid = np.array([[True, True, False], [True, False, False], [False, False, False]])
    for scale_rewards in ("group", "batch", "none"):
        found = group_advantages(rewards, valid, scale_rewards)
        alone = group_advantages(rewards[:1, :2], None, scale_rewards, std_of(reward_moments(rewards, valid)))
        np.testing.assert_allclose(found.advantages[0], [*alone.advantages[0], 0.0])
        assert found.has_signal.tolist() == [True, False, False] and not found.advantages[1:].any()
    assert reward_moments(rewards, valid).tolist() == [3.0, 1.5, 1.25]


def test_an_answer_left_out_may_have_any_reward() -> None:
    found = group_advantages(np.array([[0.0, 1.0, np.nan]]), np.array([[True, True, False]]))
    assert np.isfinite(found.advantages).all() and found.has_signal.all()


def test_std_of_few() -> None:
    assert std_of(np.array([0.0, 0.0, 0.0])) == std_of(np.array([1.0, 0.3, 0.09])) == 0.0


rewards_of_groups = st.integers(2, 6).flatmap(
    lambda n: st.lists(st.lists(st.floats(0, 1), min_size=n, max_size=n), min_size=1, max_size=5)
)


@given(rewards_of_groups, st.sampled_from(["group", "batch", "none"]))
def test_advantages_sum_to_zero_and_keep_the_order_grp_6(rewards: list[list[float]], scale_rewards: str) -> None:
    """GRP-6."""
    values = np.array(rewards)
    found = group_advantages(values, scale_rewards=scale_rewards)
    assert np.abs(found.advantages.sum(axis=1)).max() < 1e-6
    for group, advantages in zip(values, found.advantages, strict=True):
        order = np.argsort(group, kind="stable")
        assert (np.diff(advantages[order]) >= -1e-9).all()
    if scale_rewards == "group":
        assert np.abs(found.advantages).max() <= np.sqrt(values.shape[1])
