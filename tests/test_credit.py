"""utils.credit: what each object and decision of an answer earns, by hand, and what the tokens make of it (GRP-8)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.answers import make_table, make_tokenizer
from tests.test_grpo import Alone
from tests.test_policy_loss import settings_of
from tests.test_rewards import sample
from utils.credit import CLOSE, GO_ON, KINDS, OBJECT, REST, Credit, credit_of
from utils.geometry import Object
from utils.grpo import Answer, choose_rows, decision_advantages, has_signal, weight_answers
from utils.policy_loss import policy_loss, policy_segment, policy_sums, policy_tokens, token_weights
from utils.rewards import Completion, load_rewards, score
from utils.targets import format_objects

A = Object("red car", "bbox_2d", (0, 0, 100, 100))
B = Object("blue car", "bbox_2d", (500, 500, 700, 700))
FAR = Object("tree", "bbox_2d", (900, 900, 950, 950))
NEAR_A = Object("red car", "bbox_2d", (0, 0, 100, 90))
F1 = ("detection_f1",)


def completion_of(text: str) -> Completion:
    ids = make_tokenizer("qwen").encode(text, add_special_tokens=False)
    return Completion(text, ids, make_table("qwen"), max_new_tokens=400)


def credit(text: str, truth: list[Object], names=F1, annotated=None) -> Credit:
    completion, rewards = completion_of(text), load_rewards(names)
    image = replace(sample(truth), annotated=annotated)
    own = score(completion, image, rewards)
    return credit_of(completion, image, rewards, own, len(completion.token_ids) + 1)


def earned(objects: list[Object], truth: list[Object], **more) -> dict[str, list[float]]:
    """The first reward of each decision by kind, in order."""
    found = credit(format_objects(objects), truth, **more)
    return {name: found.rewards[found.kinds == kind, 0].tolist() for kind, name in enumerate(KINDS)}


def test_right_and_wrong_objects_by_hand_GRP_8() -> None:
    """GRP-8: A is right, the tree is not, B is missed. F1 of both is 2/4, of A alone 2/3, of the tree alone 0."""
    found = earned([A, FAR], [A, B])
    assert found["object"] == pytest.approx([1 / 2 - 0, 1 / 2 - 2 / 3])
    assert found["go on"] == pytest.approx([1 / 2 - 0, 1 / 2 - 2 / 3])
    assert found["close"] == found["rest"] == [1 / 2]


def test_going_on_is_worth_all_that_came_of_it_GRP_8() -> None:
    """GRP-8: the tree before B is wrong, but going on behind A led to B: F1 of A, tree, B is 4/5, of A alone 2/3."""
    found = earned([A, FAR, B], [A, B])
    assert found["go on"] == pytest.approx([4 / 5, 4 / 5 - 2 / 3, 4 / 5 - 2 / 4])
    assert found["object"] == pytest.approx([4 / 5 - 2 / 4, 4 / 5 - 1, 4 / 5 - 2 / 4])


@pytest.mark.parametrize("order", [(A, NEAR_A), (NEAR_A, A)])
def test_copies_do_not_blame_each_other_GRP_8(order) -> None:
    """GRP-8: the better copy is the object, wherever it stands; without the other F1 is 1, with it 2/3."""
    found = earned(list(order), [A])
    expected = {A: 1.0, NEAR_A: 2 / 3 - 1}
    assert found["object"] == pytest.approx([expected[obj] for obj in order])


TWO = frozenset({"red car", "blue car"})  # no trees: they are neutral


def words_of(text: str, found: Credit) -> list[str]:
    """The text of each decision's tokens."""
    spoken = [str(make_tokenizer("qwen").decode([token])) for token in completion_of(text).token_ids] + ["<stop>"]
    return [
        "".join(word for word, own in zip(spoken, found.decisions, strict=True) if own == decision)
        for decision in range(len(found.kinds))
    ]


def test_what_is_not_annotated_decides_nothing_TGT_12() -> None:
    """GRP-8, TGT-12: A, tree, B, tree, FAR_A is judged as A, B, FAR_A; going on to the first tree is going on to B,
    and so on. What follows all objects that count is the rest."""
    far_a = replace(A, coords=FAR.coords)
    found = earned([A, FAR, B, FAR, far_a, FAR], [A, B], annotated=TWO)
    assert found == earned([A, B, far_a], [A, B], annotated=TWO)
    text = format_objects([A, FAR, B, FAR])
    credit_found = credit(text, [A, B], annotated=TWO)
    words = words_of(text, credit_found)
    going_on = [words[i] for i in np.flatnonzero(credit_found.kinds == GO_ON)]
    assert [part.count("{") for part in going_on] == [1, 2]
    assert words[REST].count("tree") == 2 and not any("tree" in part for part in words[1:])
    assert words[REST].count(", {") == 1


def test_an_object_by_place_is_not_neutral_for_rewards_of_the_place_TGT_12() -> None:
    """GRP-8, TGT-12: a tree where A is counts for `detection_mean_iou`, which ignores labels, and not for F1."""
    there = replace(A, desc="tree")
    names = ("detection_mean_iou", "detection_f1")
    assert earned([there, B], [A, B], names=names, annotated=TWO)["object"] == pytest.approx([1 / 2, 1 / 2])
    assert earned([there, B], [A, B], annotated=TWO)["object"] == pytest.approx([2 / 3])


def test_rewards_of_the_text_count_in_full_for_every_decision_GRP_8() -> None:
    """GRP-8: only functions of the objects are split."""
    found = credit(format_objects([A, FAR]), [A, B], names=("detection_parse", "detection_f1", "no_overlong"))
    assert set(found.rewards[:, 0]) == {1.0} and set(found.rewards[:, 2]) == {1.0}
    assert found.rewards[found.kinds == OBJECT, 1] == pytest.approx([1 / 2, 1 / 2 - 2 / 3])


BROKEN = '{"objects": [{"desc": "red car", "bbox_2d": [1]}, ' + format_objects([A, B])[len('{"objects": [') :]


@pytest.mark.parametrize("text", [format_objects([A, B]), BROKEN, format_objects([A, B])[:-2], format_objects([])])
def test_every_token_belongs_to_its_decision_GRP_8(text: str) -> None:
    """GRP-8: object tokens hold label and coordinates of their object; separators go on; the end closes."""
    completion = completion_of(text)
    found = credit(text, [A, B])
    by_decision = words_of(text, found)
    objects = [by_decision[i] for i in np.flatnonzero(found.kinds == OBJECT)]
    for words, obj in zip(objects, [A, B][: len(objects)], strict=True):
        assert obj.desc in words and all(f"<|coord_{value}|>" in words for value in obj.coords)
    between = [by_decision[i] for i in np.flatnonzero(found.kinds == GO_ON)]
    assert all("{" in words and "coord" not in words and "car" not in words for words in between)
    (close,) = np.flatnonzero(found.kinds == CLOSE)
    is_closed = completion.parsed.closed
    assert by_decision[close].endswith("]}<stop>" if is_closed else "")
    rest = by_decision[REST]
    assert '"objects"' in rest and ("bbox_2d" in rest) == (text is BROKEN)
    assert ("<stop>" in rest) != is_closed


# ---------------------------------------------------------------------------------------------------------------------
# advantages


def answer_of(text: str, truth: list[Object], names=F1, annotated=None, **state) -> Answer:
    completion = completion_of(text)
    found = credit(text, truth, names, annotated)
    segment = policy_segment("s", [1, 2], [*completion.token_ids, 0], policy_version="r:0")
    return Answer(segment, text, found.rewards[0], [], credit=found, **state)


def without_credit(groups: list[list[Answer]]) -> list[list[Answer]]:
    return [[replace(answer, credit=None) for answer in group] for group in groups]


ALL = ("detection_f1", "detection_mean_iou", "detection_parse", "no_overlong", "detection_no_duplicates")
ONE_EACH = [
    [answer_of(format_objects([obj]), [A, B], ALL) for obj in (A, NEAR_A, FAR, B)],
    [answer_of(format_objects([FAR]), [A], ALL), answer_of(format_objects([A]) + " ", [A], ALL)],
    [answer_of(format_objects([A])[:-1], [A], ALL), answer_of(format_objects([A]), [A], ALL)],
    [answer_of(format_objects([FAR]), [], ALL), answer_of(format_objects([A]) + " ", [], ALL)],  # nothing is there
    [answer_of(format_objects([obj]), [A, B], ALL, TWO) for obj in (A, FAR, NEAR_A)],  # one is neutral
    [answer_of(format_objects([obj]), [], ALL, TWO) for obj in (A, FAR, FAR)],
]


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_with_one_object_an_advantage_is_the_answers_GRP_8(scale_rewards: str) -> None:
    """GRP-8: every token's, whatever the scale, and rewards of the text among them."""
    options = settings_of(scale_rewards=scale_rewards, max_new_tokens=64)
    weights = np.array([1.0, 0.5, 0.25, 0.1, 0.3])
    ours = weight_answers(ONE_EACH, weights, options, Alone())
    theirs = weight_answers(without_credit(ONE_EACH), weights, options, Alone())
    for own, expected in zip(ours.advantages, theirs.advantages, strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-12)
    assert any(own.any() for own in ours.advantages)
    np.testing.assert_array_equal(ours.weights, theirs.weights)
    assert ours.denominator == theirs.denominator and ours.has_signal.tolist() == theirs.has_signal.tolist()


def test_baselines_are_those_of_the_kind_in_the_group_GRP_8() -> None:
    """GRP-8: objects earn 1/2, -1/6 and 2/3, of mean 1/3; an answer that is left out counts nowhere."""
    group = [answer_of(format_objects(objects), [A, B]) for objects in ([A, FAR], [A])]
    group.append(answer_of(format_objects([B]), [A, B], is_valid=False))
    found = decision_advantages([group], np.ones(1), "none")
    first, second, left_out = (own[answer.credit.kinds == OBJECT] for own, answer in zip(found, group, strict=True))
    assert first == pytest.approx([1 / 2 - 1 / 3, -1 / 6 - 1 / 3]) and second == pytest.approx([2 / 3 - 1 / 3])
    assert not left_out.any()
    closing = [own[answer.credit.kinds == CLOSE][0] for own, answer in zip(found, group, strict=True)]
    assert closing == pytest.approx([1 / 2 - 7 / 12, 2 / 3 - 7 / 12, 0])


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_neutral_objects_are_not_measured_against_others_TGT_12(scale_rewards: str) -> None:
    """GRP-8, TGT-12: both answers are A and a tree, so neither is better. A tree beside another answer's A has the
    advantage of its answer, and A the one it has without any tree."""
    options = settings_of(scale_rewards=scale_rewards, max_new_tokens=64)

    def advantages(*answers: list[Object]) -> tuple[list[Answer], list[np.ndarray]]:
        group = [answer_of(format_objects(objects), [A, B], annotated=TWO) for objects in answers]
        return group, weight_answers([group], np.ones(1), options, Alone()).advantages

    assert not any(own.any() for own in advantages([A, FAR], [A, FAR])[1])
    group, with_trees = advantages([A, FAR, FAR], [A, B, FAR], [NEAR_A, FAR])
    plain, without = advantages([A], [A, B], [NEAR_A])
    for answer, found, other, expected in zip(group, with_trees, plain, without, strict=True):
        for kind in (REST, OBJECT, GO_ON, CLOSE):
            own = found[np.isin(answer.decisions, np.flatnonzero(answer.credit.kinds == kind))]
            other_own = expected[np.isin(other.decisions, np.flatnonzero(other.credit.kinds == kind))]
            assert np.unique(own.round(9)).tolist() == np.unique(other_own.round(9)).tolist()
    group, found = advantages([A], [FAR, FAR])  # as if the second had said one tree
    assert found[0] == pytest.approx(np.full(len(found[0]), found[0][0])) and found[0][0] > 0
    assert found[1] == pytest.approx(np.full(len(found[1]), -found[0][0]))


def test_the_std_of_the_batch_is_each_kinds_own_over_all_ranks_GRP_8() -> None:
    """GRP-8, GRP-6: what two ranks compute apart is what one computes of all groups."""
    groups = [[answer_of(format_objects(o), [A, B]) for o in ([A, FAR], [A])], ONE_EACH[0]]
    groups[1] = [answer_of(answer.text, [A, B]) for answer in groups[1]]
    options = settings_of(scale_rewards="batch", max_new_tokens=64)
    sent: list[np.ndarray] = []

    class Recording(Alone):
        def gather(self, value):
            sent.append(value)
            return super().gather(value)

    whole = weight_answers(groups, np.ones(1), options, Alone())
    weight_answers(groups[1:], np.ones(1), options, Recording())
    first = weight_answers(groups[:1], np.ones(1), options, Alone(sent[0]))
    for own, expected in zip(first.advantages, whole.advantages[:2], strict=True):
        np.testing.assert_allclose(own, expected)


def test_a_group_with_equal_answers_may_still_teach_GRP_8() -> None:
    """GRP-8, GRP-6: both answers have F1 1/2, but objects differ; equal objects alone give no signal."""
    groups = [[answer_of(format_objects([A, FAR]), [A, B])] * 2, [answer_of(format_objects([A]), [A])] * 2]
    assert has_signal(groups, np.ones(1)).tolist() == [True, False]
    assert has_signal(without_credit(groups), np.ones(1)).tolist() == [False, False]
    weighted = weight_answers(groups, np.ones(1), settings_of(max_new_tokens=64), Alone())
    assert choose_rows(weighted, has_penalty=False, cap=10_000, per_row=8, ranks=Alone()) == [[0, 1]]


# ---------------------------------------------------------------------------------------------------------------------
# the loss


def gradient(
    logprob: torch.Tensor, lengths: list[int], advantages, old: torch.Tensor, engine=None, **changes
) -> torch.Tensor:
    options = settings_of(**changes)
    weights, shares = token_weights(np.array(lengths), options.loss_type, 20)
    tokens = policy_tokens(lengths, advantages, weights)
    tokens.old_logprob, tokens.engine_logprob = old, engine
    own = logprob.clone().requires_grad_()
    policy_loss(policy_sums(own, tokens, options), float(shares.sum()), options).backward()
    return own.grad


@pytest.mark.parametrize("cap", [None, 1.05, 2.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_equal_advantages_give_the_answers_gradient_GRP_8(level: str, loss_type: str, cap: float | None) -> None:
    """GRP-8: with every clipping, correction and normalisation of GRP-6; some ratios are clipped."""
    torch.manual_seed(0)
    lengths, scalars = [5, 3, 7], [0.7, -1.2, 0.4]
    logprob = -torch.rand(15)
    old = logprob + 0.3 * torch.randn(15)
    engine = old + 0.3 * torch.randn(15)
    common = {"importance_sampling_level": level, "loss_type": loss_type, "epsilon": 0.05, "epsilon_high": 0.1}
    common |= {"importance_correction_cap": cap, "engine": engine}
    per_token = [np.full(length, value) for length, value in zip(lengths, scalars, strict=True)]
    ours = gradient(logprob, lengths, per_token, old, advantage="object", **common)
    theirs = gradient(logprob, lengths, scalars, old, **common)
    torch.testing.assert_close(ours, theirs)
    assert ours.any() and not ours.all()


def test_sequence_ratios_with_an_advantage_per_token_are_those_of_GSPO_token_GRP_8() -> None:
    """GRP-8: each token's gradient is -(its weight) x (the answer's ratio) x (its own advantage), unless clipped."""
    logprob, old = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.1, -1.9, -0.8])
    advantages = np.array([1.0, -1.0, 0.5])
    ratio = float((logprob - old).mean().exp())  # exp(0.1), clipped above 1.05 where the advantage is positive
    changes = {"advantage": "object", "importance_sampling_level": "sequence"}
    free = gradient(logprob, [3], [advantages], old, epsilon=0.5, **changes)
    np.testing.assert_allclose(free, -ratio * advantages / 3, rtol=1e-6)
    clipped = gradient(logprob, [3], [advantages], old, epsilon=0.05, **changes)
    np.testing.assert_allclose(clipped, [0, ratio / 3, 0], rtol=1e-6)
