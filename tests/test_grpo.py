"""utils.grpo: advantages worked out by hand, and answers on their way to rows: who trains, with what weight (GRP-6)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.learner.test_model import smallest_image
from utils.config.schema import Rlhf
from utils.credit import Credit
from utils.grpo import (
    EPSILON,
    Answer,
    choose_rows,
    group_advantages,
    groups_from_state,
    groups_to_state,
    has_signal,
    policy_row,
    reward_moments,
    std_of,
    weight_answers,
)
from utils.learner.model import load_model, position_ids_for
from utils.packing import collate_packed
from utils.targets import plain_segment


def test_small_groups_by_hand_grp_6() -> None:
    """GRP-6: [0, 1]: mean 0.5, sample std sqrt(0.5); [1, 2, 3] / 3: mean 2/3, std 1/3."""
    found = group_advantages(np.array([[0.0, 1.0]]))
    expected = 0.5 / (np.sqrt(0.5) + EPSILON)
    np.testing.assert_allclose(found, [[-expected, expected]])
    found = group_advantages(np.array([[1, 2, 3]]) / 3)
    np.testing.assert_allclose(found, np.array([[-1, 0, 1]]) / 3 / (1 / 3 + EPSILON))
    assert found.any(axis=1).tolist() == [True]


def test_without_scaling_advantages_are_differences_grp_6() -> None:
    """GRP-6, Dr. GRPO."""
    rewards = np.array([[0.0, 1.0, 0.5, 0.5], [0.2, 0.2, 0.2, 0.6]])
    found = group_advantages(rewards, scale_rewards="none")
    np.testing.assert_allclose(found, [[-0.5, 0.5, 0, 0], [-0.1, -0.1, -0.1, 0.3]])


def test_batch_scaling_divides_all_groups_by_one_number_grp_6() -> None:
    """GRP-6: the sample std of all rewards of the step, put together from the moments of two ranks."""
    rewards = np.array([[0.0, 1.0], [0.4, 0.6], [0.9, 0.9]])
    std = np.std(rewards, ddof=1)
    whole = group_advantages(rewards, scale_rewards="batch")
    np.testing.assert_allclose(whole, (rewards - rewards.mean(1, keepdims=True)) / (std + EPSILON))
    moments = reward_moments(rewards[:1], np.ones((1, 2))) + reward_moments(rewards[1:], np.ones((2, 2)))
    assert std_of(moments) == pytest.approx(std)
    parts = [group_advantages(part, None, "batch", std_of(moments)) for part in (rewards[:1], rewards[1:])]
    np.testing.assert_allclose(np.concatenate(parts), whole)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_groups_without_signal_are_flagged_grp_6(scale_rewards: str) -> None:
    """GRP-6: equal rewards, sums that differ by rounding only included, give zeros and no signal."""
    rewards = np.array([[0.1 + 0.2, 0.3, 0.3], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
    found = group_advantages(rewards, scale_rewards=scale_rewards)
    assert found.any(axis=1).tolist() == [False, False, True]
    assert not found[:2].any() and found[2].all()


def test_answers_left_out_count_nowhere_grp_6() -> None:
    """GRP-6: the truncated answer's reward moves neither mean nor std; one answer, or none, is no group."""
    rewards = np.array([[0.0, 1.0, 9.0], [0.5, 0.0, 9.0], [7.0, 8.0, 9.0]])
    valid = np.array([[True, True, False], [True, False, False], [False, False, False]])
    for scale_rewards in ("group", "batch", "none"):
        found = group_advantages(rewards, valid, scale_rewards)
        alone = group_advantages(rewards[:1, :2], None, scale_rewards, std_of(reward_moments(rewards, valid)))
        np.testing.assert_allclose(found[0], [*alone[0], 0.0])
        assert found.any(axis=1).tolist() == [True, False, False] and not found[1:].any()
    assert reward_moments(rewards, valid).tolist() == [3.0, 1.5, 1.25]


def test_an_answer_left_out_may_have_any_reward() -> None:
    found = group_advantages(np.array([[0.0, 1.0, np.nan]]), np.array([[True, True, False]]))
    assert np.isfinite(found).all() and found.any(axis=1).all()


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
    assert np.abs(found.sum(axis=1)).max() < 1e-6
    for group, advantages in zip(values, found, strict=True):
        order = np.argsort(group, kind="stable")
        assert (np.diff(advantages[order]) >= -1e-9).all()
    if scale_rewards == "group":
        assert np.abs(found).max() <= np.sqrt(values.shape[1])


class Alone:
    """One rank's collectives, with what other ranks bring to them."""

    def __init__(self, *others):
        self.others = others

    def gather(self, value):
        return [value, *self.others]


def answer(rewards: list[float], length: int = 3, **state) -> Answer:
    segment = plain_segment(f"s{length}", [1, 2], list(range(10, 10 + length)), policy_version="r:0")
    return Answer(segment, "text", np.array(rewards), [-0.5] * length, **state)


WEIGHTS = np.array([1.0, 2.0])
RLHF = Rlhf(reward_funcs=["one", "two"], scale_rewards="none", loss_type="grpo", max_new_tokens=8)


def test_rewards_are_weighted_and_compared_within_their_group_GRP_6():
    """GRP-6: 1, 3 and 0.5, 0.5 with weights 1 and 2: totals 3 and 1 in the first group."""
    groups = [[answer([1.0, 1.0]), answer([1.0, 0.0])], [answer([0.5, 0.0]), answer([0.5, 0.0])]]
    weighted = weight_answers(groups, WEIGHTS, RLHF, Alone())
    assert [own.tolist() for own in weighted.advantages] == [[1.0] * 3, [-1.0] * 3, [0.0] * 3, [0.0] * 3]
    assert weighted.has_signal.tolist() == [True, False] == has_signal(groups, WEIGHTS).tolist()
    assert weighted.weights == pytest.approx([1 / 3] * 4) and weighted.denominator == 4.0


def test_the_std_of_the_batch_is_that_of_all_ranks_GRP_6():
    """GRP-6: rewards 0, 2 here and 4, 6 on the other rank."""
    groups = [[answer([0.0, 0.0]), answer([0.0, 1.0])]]
    elsewhere = np.array([2.0, 10.0, 52.0])
    weighted = weight_answers(groups, WEIGHTS, RLHF.model_copy(update={"scale_rewards": "batch"}), Alone(elsewhere))
    expected = np.array([-1, 1]) / (np.std([0, 2, 4, 6], ddof=1) + 1e-4)
    np.testing.assert_allclose(weighted.advantages, np.tile(expected[:, None], 3))


def test_answers_left_out_weigh_nothing_and_take_no_row_GRP_6():
    """GRP-6."""
    failed = Answer(plain_segment("f", [1, 2], []), "", np.zeros(2), [], is_valid=False, is_failed=True)
    group = [answer([0.0, 0.0]), answer([1.0, 0.0]), answer([1.0, 1.0], is_valid=False, is_truncated=True), failed]
    weighted = weight_answers([group], WEIGHTS, RLHF, Alone())
    assert [set(own) for own in weighted.advantages] == [{-0.5}, {0.5}, {0.0}, set()] and weighted.denominator == 2.0
    assert choose_rows(weighted, has_penalty=True, cap=100, per_row=8, ranks=Alone()) == [[0, 1]]


def test_groups_without_signal_cost_no_computation_but_for_kl_GRP_6():
    """GRP-6: they stay in the denominator, so that leaving them out changes no gradient."""
    groups = [[answer([1.0, 0.0]), answer([0.0, 0.0])], [answer([1.0, 0.0]), answer([1.0, 0.0])]]
    weighted = weight_answers(groups, WEIGHTS, RLHF, Alone())
    assert weighted.denominator == 4.0
    assert choose_rows(weighted, has_penalty=False, cap=100, per_row=8, ranks=Alone()) == [[0, 1]]
    assert choose_rows(weighted, has_penalty=True, cap=100, per_row=8, ranks=Alone()) == [[0, 1, 2, 3]]


def test_all_ranks_run_equally_many_rows_PCK_5_PCK_8():
    """PCK-5, PCK-8: all answers of a step train in it; a rank with fewer rows gets empty ones."""
    group = [answer([float(i % 2), 0.0], length) for i, length in enumerate((4, 8, 3, 2))]  # segments of 6, 10, 5, 4
    weighted = weight_answers([group], WEIGHTS, RLHF, Alone())
    assert choose_rows(weighted, has_penalty=False, cap=12, per_row=8, ranks=Alone(4)) == [[0, 2], [1], [3], []]
    assert choose_rows(weighted, has_penalty=False, cap=None, per_row=3, ranks=Alone(1)) == [[0, 1, 2], [3]]
    dull = weight_answers([[answer([1.0, 0.0])] * 2], WEIGHTS, RLHF, Alone())
    assert choose_rows(dull, has_penalty=False, cap=12, per_row=8, ranks=Alone(0)) == [[]]


def test_groups_survive_a_checkpoint_LRN_5(tmp_path):
    """LRN-5."""
    credit = Credit(
        *np.ones((2, 2, 2)), np.array([3, -1]), *np.zeros((2, 2, 2)), np.array([0.0, 1.0]), np.array([0, 1, 1])
    )
    groups = [[answer([1.0, 0.25], credit=credit), answer([0.0, 0.0], is_valid=False, is_truncated=True)]]
    torch.save(groups_to_state(groups), tmp_path / "state.pt")
    again = groups_from_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again[0][1].credit is None
    for name, array in vars(credit).items():
        np.testing.assert_array_equal(getattr(again[0][0].credit, name), array)
    for old, new in zip(groups[0], again[0], strict=True):
        assert (new.text, new.engine_logprobs, new.is_valid, new.is_truncated) == (
            *(old.text, old.engine_logprobs, old.is_valid, old.is_truncated),
        )
        assert new.rewards.tolist() == old.rewards.tolist() and new.segment.policy_version == "r:0"
        assert new.segment.input_ids.tolist() == old.segment.input_ids.tolist()


def test_a_row_knows_its_tokens_in_order_GRP_6(start_model):
    """GRP-6: advantage, weight and the engine's log-probability stand at the position that scores the token; the end
    token, which engines do not report, has none."""
    model = load_model(start_model, "float32")
    group = [answer([0.0, 0.0], 3), answer([1.0, 0.0], 2)]
    group[0].engine_logprobs = [-1.0, -2.0]
    weighted = weight_answers([group], WEIGHTS, RLHF, Alone())

    def collate(segments):
        return collate_packed(segments, position_ids_for(model), np.zeros(0, dtype=np.int64), smallest_image(model))

    row = policy_row(weighted, [1, 0], collate).to("cpu")
    assert row.text_label.tolist() == [10, 11, 10, 11, 12]
    assert row.policy.advantage.tolist() == [0.5, 0.5, -0.5, -0.5, -0.5]
    assert row.policy.engine_logprob.tolist()[:4] == [-0.5, -0.5, -1.0, -2.0]
    assert bool(row.policy.engine_logprob[4].isnan())
    empty = policy_row(weighted, [], collate)
    assert len(empty.policy.advantage) == 0 == len(empty.text_pos) and empty.num_tokens == 0
