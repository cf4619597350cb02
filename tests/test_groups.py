"""Answers on their way to rows: who trains, with what weight, and in how many rows on all ranks."""

import numpy as np
import pytest
import torch

from utils.groups import Answer, choose_rows, groups_from_state, groups_to_state, has_signal, policy_row, weigh
from utils.learner.model import dummy_segment, load_model, position_ids_for
from utils.packing import collate_packed
from utils.policy_loss import policy_segment


class Alone:
    """One rank's collectives, with what other ranks bring to them."""

    def __init__(self, *others):
        self.others = others

    def gather(self, value):
        return [value, *self.others]


def answer(rewards: list[float], length: int = 3, **state) -> Answer:
    segment = policy_segment(f"s{length}", [1, 2], list(range(10, 10 + length)), policy_version="r:0")
    return Answer(segment, "text", np.array(rewards), [-0.5] * length, **state)


WEIGHTS = np.array([1.0, 2.0])
OPTIONS = {"scale_rewards": "none", "loss_type": "grpo", "max_new_tokens": 8}


def test_rewards_are_weighted_and_compared_within_their_group_GRP_6():
    """GRP-6: 1, 3 and 0.5, 0.5 with weights 1 and 2: totals 3 and 1 in the first group."""
    groups = [[answer([1.0, 1.0]), answer([1.0, 0.0])], [answer([0.5, 0.0]), answer([0.5, 0.0])]]
    weighed = weigh(groups, WEIGHTS, ranks=Alone(), **OPTIONS)
    assert weighed.advantages.tolist() == [1.0, -1.0, 0.0, 0.0]
    assert weighed.has_signal.tolist() == [True, False] == has_signal(groups, WEIGHTS).tolist()
    assert weighed.weights == pytest.approx([1 / 3] * 4) and weighed.share == 4.0


def test_the_std_of_the_batch_is_that_of_all_ranks_GRP_6():
    """GRP-6: rewards 0, 2 here and 4, 6 on the other rank."""
    groups = [[answer([0.0, 0.0]), answer([0.0, 1.0])]]
    elsewhere = np.array([2.0, 10.0, 52.0])
    weighed = weigh(groups, WEIGHTS, ranks=Alone(elsewhere), **OPTIONS | {"scale_rewards": "batch"})
    assert weighed.advantages == pytest.approx(np.array([-1, 1]) / (np.std([0, 2, 4, 6], ddof=1) + 1e-4))


def test_answers_left_out_weigh_nothing_and_take_no_row_GRP_6():
    """GRP-6."""
    failed = Answer(policy_segment("f", [1, 2], []), "", np.zeros(2), [], is_valid=False, is_failed=True)
    group = [answer([0.0, 0.0]), answer([1.0, 0.0]), answer([1.0, 1.0], is_valid=False, is_truncated=True), failed]
    weighed = weigh([group], WEIGHTS, ranks=Alone(), **OPTIONS)
    assert weighed.advantages.tolist() == [-0.5, 0.5, 0.0, 0.0] and weighed.share == 2.0
    assert choose_rows(weighed, has_penalty=True, cap=100, per_row=8, ranks=Alone()) == [[0, 1]]


def test_groups_without_signal_cost_no_computation_but_for_kl_GRP_6():
    """GRP-6: they stay in the denominator, so that leaving them out changes no gradient."""
    groups = [[answer([1.0, 0.0]), answer([0.0, 0.0])], [answer([1.0, 0.0]), answer([1.0, 0.0])]]
    weighed = weigh(groups, WEIGHTS, ranks=Alone(), **OPTIONS)
    assert weighed.share == 4.0
    assert choose_rows(weighed, has_penalty=False, cap=100, per_row=8, ranks=Alone()) == [[0, 1]]
    assert choose_rows(weighed, has_penalty=True, cap=100, per_row=8, ranks=Alone()) == [[0, 1, 2, 3]]


def test_all_ranks_run_equally_many_rows_PCK_5_PCK_8():
    """PCK-5, PCK-8: all answers of a step train in it; a rank with fewer rows gets empty ones."""
    group = [answer([float(i % 2), 0.0], length) for i, length in enumerate((4, 8, 3, 2))]  # segments of 6, 10, 5, 4
    weighed = weigh([group], WEIGHTS, ranks=Alone(), **OPTIONS)
    assert choose_rows(weighed, has_penalty=False, cap=12, per_row=8, ranks=Alone(4)) == [[0, 2], [1], [3], []]
    assert choose_rows(weighed, has_penalty=False, cap=None, per_row=3, ranks=Alone(1)) == [[0, 1, 2], [3]]
    dull = weigh([[answer([1.0, 0.0])] * 2], WEIGHTS, ranks=Alone(), **OPTIONS)
    assert choose_rows(dull, has_penalty=False, cap=12, per_row=8, ranks=Alone(0)) == [[]]


def test_groups_survive_a_checkpoint_LRN_5(tmp_path):
    """LRN-5."""
    groups = [[answer([1.0, 0.25]), answer([0.0, 0.0], is_valid=False, is_truncated=True)]]
    torch.save(groups_to_state(groups), tmp_path / "state.pt")
    again = groups_from_state(torch.load(tmp_path / "state.pt", weights_only=True))
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
    weighed = weigh([group], WEIGHTS, ranks=Alone(), **OPTIONS)

    def collate(segments):
        return collate_packed(segments, position_ids_for(model), np.zeros(0, dtype=np.int64), dummy_segment(model))

    row = policy_row(weighed, [1, 0], collate).to("cpu")
    assert row.text_label.tolist() == [10, 11, 10, 11, 12]
    assert row.policy.advantage.tolist() == [0.5, 0.5, -0.5, -0.5, -0.5]
    assert row.policy.engine_logprob.tolist()[:4] == [-0.5, -0.5, -1.0, -2.0]
    assert bool(row.policy.engine_logprob[4].isnan())
    empty = policy_row(weighed, [], collate)
    assert len(empty.policy.advantage) == 0 == len(empty.text_pos) and empty.num_tokens == 0
