"""utils.credit: what each object and decision of an answer earns, by hand, and what the tokens make of it (GRP-8)."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.answers import make_table, make_tokenizer
from tests.test_grpo import Alone
from tests.test_policy_loss import settings_of
from tests.test_rewards import sample
from utils.credit import (
    BACKGROUND_IOU,
    REST,
    Credit,
    attempts,
    close_decision,
    credit_of,
    go_on_decision,
    object_decision,
)
from utils.geometry import Object, iou_matrix
from utils.grpo import EPSILON, Answer, choose_rows, decision_advantages, has_signal, weight_answers
from utils.policy_loss import policy_loss, policy_sums, policy_tokens, token_weights
from utils.rewards import Completion, load_rewards, score
from utils.scores import Overlaps
from utils.targets import format_objects, plain_segment

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


def earned(objects: list[Object], truth: list[Object], **more) -> list[float]:
    """What each object earned of the first reward."""
    return credit(format_objects(objects), truth, **more).earned[:, 0].tolist()


def test_right_and_wrong_objects_by_hand_GRP_8() -> None:
    """GRP-8: A is right, the tree is not, B is missed. F1 of both is 2/4, of A alone 2/3, of the tree alone 0."""
    assert earned([A, FAR], [A, B]) == pytest.approx([1 / 2 - 0, 1 / 2 - 2 / 3])
    assert earned([A, FAR, B], [A, B]) == pytest.approx([4 / 5 - 2 / 4, 4 / 5 - 1, 4 / 5 - 2 / 4])


@pytest.mark.parametrize("order", [(A, NEAR_A), (NEAR_A, A)])
def test_copies_do_not_blame_each_other_GRP_8(order) -> None:
    """GRP-8: the better copy is the object, wherever it stands; without the other F1 is 1, with it 2/3."""
    expected = {A: 1.0, NEAR_A: 2 / 3 - 1}
    assert earned(list(order), [A]) == pytest.approx([expected[obj] for obj in order])


def test_a_copy_that_overlaps_another_true_object_is_no_attempt_at_it_GRP_8() -> None:
    """GRP-8: it says the first cat again; the second one is missed."""
    cat = Object("cat", "bbox_2d", (100, 100, 300, 300))
    copy, missed = (replace(cat, coords=(x, 100, x + 200, 300)) for x in (140, 260))
    overlaps = Overlaps([copy], [cat, missed])
    assert overlaps.iou[0, 0] > 0.5 and overlaps.iou[0, 1] > BACKGROUND_IOU
    found = credit(format_objects([cat, copy]), [cat, missed])
    assert found.truths.tolist() == [0, -1]
    assert found.earned[:, 0].tolist() == pytest.approx([2 / 3 - 0, 2 / 4 - 2 / 3])
    assert found.possible[:, 0].tolist() == pytest.approx([2 / 3 - 0, 1 - 2 / 3])


def test_what_overlaps_a_missed_object_is_an_attempt_at_it_GRP_8() -> None:
    """GRP-8: whatever its label; but what matches comes first, even if something of another label overlaps more."""
    tree_at_a, part_of_a = replace(A, desc="tree"), replace(A, coords=(0, 0, 30, 50))  # IoU 1 and 0.15
    assert attempts(Overlaps([part_of_a, B, FAR], [A, B]), 0.5).tolist() == [0, 1, -1]
    assert attempts(Overlaps([tree_at_a, NEAR_A], [A]), 0.5).tolist() == [-1, 0]
    assert attempts(Overlaps([tree_at_a, part_of_a], [A, B]), 0.5).tolist() == [0, -1]
    assert attempts(Overlaps([], [A]), 0.5).tolist() == [] and attempts(Overlaps([A], []), 0.5).tolist() == [-1]


TWO = frozenset({"red car", "blue car"})  # no trees: they are neutral


def words_of(text: str, found: Credit) -> list[str]:
    """The text of each decision's tokens."""
    spoken = [str(make_tokenizer("qwen").decode([token])) for token in completion_of(text).token_ids] + ["<stop>"]
    return [
        "".join(word for word, own in zip(spoken, found.decisions, strict=True) if own == decision)
        for decision in range(found.num_decisions)
    ]


def going_on(words: list[str]) -> list[str]:
    return words[go_on_decision(0) :: 2]


def test_what_is_not_annotated_decides_nothing_TGT_12() -> None:
    """GRP-8, TGT-12: A, tree, B, tree, FAR_A is judged as A, B, FAR_A; going on to the first tree is going on to B,
    and so on. What follows all objects that count is the rest."""
    far_a = replace(A, coords=FAR.coords)
    found = earned([A, FAR, B, FAR, far_a, FAR], [A, B], annotated=TWO)
    assert len(found) == 3 and found == earned([A, B, far_a], [A, B], annotated=TWO)
    text = format_objects([A, FAR, B, FAR])
    words = words_of(text, credit(text, [A, B], annotated=TWO))
    assert [part.count("{") for part in going_on(words)] == [1, 2]
    assert words[REST].count("tree") == 2 and not any("tree" in part for part in words[1:])
    assert words[REST].count(", {") == 1


def test_an_object_by_place_is_not_neutral_for_rewards_of_the_place_TGT_12() -> None:
    """GRP-8, TGT-12: a tree where A is counts for `detection_mean_iou`, which ignores labels, and not for F1."""
    there = replace(A, desc="tree")
    names = ("detection_mean_iou", "detection_f1")
    assert earned([there, B], [A, B], names=names, annotated=TWO) == pytest.approx([1 / 2, 1 / 2])
    assert earned([there, B], [A, B], annotated=TWO) == pytest.approx([2 / 3])


def test_rewards_of_the_text_count_in_full_for_every_decision_GRP_8() -> None:
    """GRP-8: only functions of the objects are split."""
    names = ("detection_parse", "detection_f1", "no_overlong")
    found = credit(format_objects([A, FAR]), [A, B], names=names)
    assert found.apart.tolist() == [1.0, 0.0, 1.0] and not found.earned[:, [0, 2]].any()
    assert found.earned[:, 1] == pytest.approx([1 / 2, 1 / 2 - 2 / 3])
    group = [answer_of(text, [A, B], names) for text in (format_objects([A]), format_objects([A])[:-1])]
    closed, open_ = decision_advantages([group], np.array([1.0, 0.0, 0.0]), "none")
    assert closed == pytest.approx(np.full(4, 0.5)) and open_ == pytest.approx(np.full(4, -0.5))


BROKEN = '{"objects": [{"desc": "red car", "bbox_2d": [1]}, ' + format_objects([A, B])[len('{"objects": [') :]


LEFT_OVER = format_objects([A, B])[:-2] + ", junk junk" + "]}"


@pytest.mark.parametrize("text", [format_objects([A, B]), BROKEN, format_objects([A, B])[:-2], format_objects([])])
def test_every_token_belongs_to_its_decision_GRP_8(text: str) -> None:
    """GRP-8: object tokens hold label and coordinates of their object; separators go on; the end closes."""
    completion = completion_of(text)
    words = words_of(text, credit(text, [A, B]))
    objects = words[object_decision(0) : -1 : 2]
    for part, obj in zip(objects, [A, B][: len(objects)], strict=True):
        assert obj.desc in part and all(f"<|coord_{value}|>" in part for value in obj.coords)
    assert all("{" in part and "coord" not in part and "car" not in part for part in going_on(words))
    is_closed = completion.parsed.closed
    assert words[close_decision(len(objects))].endswith("]}<stop>" if is_closed else "")
    assert '"objects"' in words[REST] and ("bbox_2d" in words[REST]) == (text is BROKEN)
    assert ("<stop>" in words[REST]) != is_closed


def test_malformed_text_before_the_closing_is_the_rest_GRP_8():
    """GRP-8: as it is before an object; the baselines of missed objects are no matter of its own."""
    assert completion_of(LEFT_OVER).parsed.closed
    words = words_of(LEFT_OVER, credit(LEFT_OVER, [A, B]))
    assert "junk junk" in words[REST] and "junk" not in words[close_decision(2)]
    assert words[close_decision(2)].endswith("]}<stop>")


# ---------------------------------------------------------------------------------------------------------------------
# advantages


def answer_of(text: str, truth: list[Object], names=F1, annotated=None, **state) -> Answer:
    completion, image = completion_of(text), replace(sample(truth), annotated=annotated)
    segment = plain_segment("s", [1, 2], [*completion.token_ids, 0], policy_version="r:0")
    rewards = score(completion, image, load_rewards(names))
    return Answer(segment, text, rewards, [], credit=credit(text, truth, names, annotated), **state)


def group_of(*answers: list[Object], truth: list[Object], **more) -> list[Answer]:
    return [answer_of(format_objects(objects), truth, **more) for objects in answers]


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
def test_with_one_object_per_image_an_advantage_is_the_answers_GRP_8(scale_rewards: str) -> None:
    """GRP-8: of the object and of going on to it, whatever the scale; nothing follows closing."""
    small = replace(A, coords=(0, 0, 100, 30))  # a bad attempt at A
    groups = [group_of([A], [small], [NEAR_A], truth=[A]), group_of([small], [A], [A], truth=[A])]
    found = decision_advantages(groups, np.ones(1), scale_rewards)
    expected = decision_advantages(without_credit(groups), np.ones(1), scale_rewards)
    assert found == [pytest.approx(np.array([value, value, value, 0])) for (value,) in expected]
    assert any(map(np.any, found))


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("good_is_well_formed", [True, False])
def test_with_one_object_the_scale_is_that_of_all_rewards_together_GRP_8(scale_rewards, good_is_well_formed) -> None:
    """GRP-8: a reward on the text may go with that on the object, or against it."""
    names, weights = ("detection_mean_iou", "detection_parse"), np.array([1.0, 0.8])
    good, bad = format_objects([A]), format_objects([FAR])
    texts = [good, bad + "x", bad + "x"] if good_is_well_formed else [good + "x", bad, bad]
    groups = [[answer_of(text, [A], names) for text in texts]]
    found = decision_advantages(groups, weights, scale_rewards)
    expected = decision_advantages(without_credit(groups), weights, scale_rewards)
    for own, (value,) in zip(found, expected, strict=True):
        assert own[object_decision(0)] == pytest.approx(value) == own[go_on_decision(0)] != 0


def test_one_object_about_one_object_is_compared_as_without_credit_GRP_8() -> None:
    """GRP-8: wherever it lies. With a second object in some answer of the group, none is."""
    early = replace(FAR, coords=(0, 0, 20, 20), desc="tree")
    for others in ([FAR], [early], [NEAR_A]):
        group = group_of([A], others, truth=[A], names=("detection_mean_iou",))
        expected = decision_advantages(without_credit([group]), np.ones(1), "none")
        found = decision_advantages([group], np.ones(1), "none")
        assert found == [pytest.approx(np.array([value, value, value, 0])) for (value,) in expected]
    assert decision_advantages([group_of([A], [FAR], [A, FAR], truth=[A])], np.ones(1), "none")[0][1] != 1 / 3


@pytest.mark.parametrize("num_good", [1, 7])
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_with_one_object_closing_is_no_better_or_worse_than_the_answer_GRP_8(scale_rewards, num_good) -> None:
    """GRP-8: whole rewards may be equal, and their std nearly 0, where those of object and text are not."""
    names = ("detection_mean_iou", "detection_parse")
    worse = replace(A, coords=(0, 0, 100, 80))
    texts = [format_objects([worse])] * num_good + [format_objects([A]) + "x"]
    group = [answer_of(text, [A], names) for text in texts]
    gained = group[-1].rewards[0] - group[0].rewards[0]
    for equal_by in (1.0, 1.3):
        weights = np.array([1.0, gained * equal_by])
        found = decision_advantages([group], weights, scale_rewards)
        expected = decision_advantages(without_credit([group]), weights, scale_rewards)
        for own, (value,) in zip(found, expected, strict=True):
            assert abs(own[close_decision(1)]) <= abs(value) + 1e-9
        assert any(own.any() for own in found) == (equal_by != 1.0)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_about_an_image_without_objects_every_decision_has_the_answers_advantage_GRP_8(scale_rewards: str) -> None:
    """GRP-8: two invented objects are as bad as three, so without any one of them the answer would be no better."""
    groups = [group_of([A, FAR], [A, B, FAR], [], [B], truth=[]), group_of([A], [B], truth=[A])]
    found = decision_advantages(groups, np.ones(1), scale_rewards)
    expected = decision_advantages(without_credit(groups), np.ones(1), scale_rewards)
    for own, (value,) in list(zip(found, expected, strict=True))[:4]:
        assert own == pytest.approx(np.full(len(own), value))
    assert found[0].max() < 0 < found[2].min() and len(found[1]) == 8


@pytest.mark.parametrize("names", [("detection_f1",), ("detection_f1", "detection_no_giant_boxes")])
def test_one_answer_teaches_nothing_at_any_scale_GRP_8(names) -> None:
    """GRP-8, GRP-6: nothing is left to compare it with, whatever an attempt of it cost."""
    giant = replace(A, coords=(0, 0, 999, 999))
    for objects in ([A, FAR], [giant, FAR]):
        group = group_of(objects, [A, B], truth=[A, B], names=names)
        group[1].is_valid = False
        for scale_rewards in ("group", "batch", "none"):
            assert not any(own.any() for own in decision_advantages([group], np.ones(len(names)), scale_rewards))


def test_equal_rewards_in_the_batch_leave_advantages_finite_GRP_8() -> None:
    """GRP-8: all answers are as good as each other, their objects are not. FAR earns -1/3, half of which counts; the
    std is that of such credits."""
    group = group_of([A, FAR], [A, FAR], truth=[A])
    for scale_rewards in ("group", "batch"):
        (found, _) = decision_advantages([group], np.ones(1), scale_rewards)
        assert found[object_decision(1)] == pytest.approx(-1 / 6 / np.sqrt(2 / 36), rel=1e-2)


P, Q = replace(A, coords=(0, 0, 100, 70)), replace(A, coords=(0, 30, 100, 100))  # IoU 0.7 with A, 0.4 with each other
TREE_AT_A = replace(A, desc="tree")


@pytest.mark.parametrize("names", [["detection_f1"], ["detection_no_missed"], ["detection_f1", "detection_mean_iou"]])
@pytest.mark.parametrize("copies", [[P, Q], [Q, P], [A, TREE_AT_A], [TREE_AT_A, A]])
def test_copies_that_overlap_only_the_truth_do_not_blame_each_other_GRP_8(copies: list[Object], names) -> None:
    """GRP-8: with any labels. To find it twice is better than nothing, for the answer and for what went on to it."""
    group = group_of(copies, [], truth=[A], names=names)
    (answer, _), (found, nothing) = (
        decision_advantages(groups, np.ones(len(names)), "none") for groups in (without_credit([group]), [group])
    )
    assert found[go_on_decision(0)] == pytest.approx(answer.item()) and nothing[close_decision(0)] < 0
    assert max(found[[object_decision(0), object_decision(1)]]) > 0


def test_advantages_by_hand_GRP_8() -> None:
    """GRP-8: both find A. The first says a tree, which earns -1/6, 2/3 of which count, and passes over B, which would
    earn 4/5 - 1/2 there: one of three answers has it. In the second it would earn 1 - 2/3. An answer that is left out
    counts nowhere."""
    group = group_of([A, FAR], [A], [A, B], [B], truth=[A, B])
    group[3].is_valid = False
    first, second, third, left_out = (own[1:] for own in decision_advantages([group], np.ones(1), "none"))
    tree = -1 / 6 * 2 / 3 - (4 / 5 - 1 / 2) / 3  # it stands behind B
    assert first == pytest.approx(np.array([0, tree, tree, tree, 0]))  # A, to go on to it, the tree, to go on, to close
    assert second == pytest.approx(np.array([0, -1 / 9, -1 / 9]))
    assert third == pytest.approx(np.array([0, 2 / 9, 2 / 9, 2 / 9, 0]))
    assert not left_out.any()


@pytest.mark.parametrize("truth", [[A, B], [B, A]])
def test_what_is_passed_over_is_taken_from_the_decision_that_did_GRP_8(truth: list[Object]) -> None:
    """GRP-8: recall of A and B is 1/2 each, and each is found by two answers of three, 1/3 on the mean. The second
    passes over A when it says B, the third over B when it closes. A wrong object before B passes over nothing."""
    early = replace(FAR, coords=(300, 300, 400, 400))
    group = group_of([A, B], [B], [A, early], truth=truth, names=("detection_no_missed",))
    both, no_a, no_b = (own[1:] for own in decision_advantages([group], np.ones(1), "none"))
    assert both == pytest.approx(np.array([1 / 6, 1 / 3, 1 / 6, 1 / 6, 0]))  # A, to go on to it, B, to go on, to close
    assert no_a == pytest.approx(np.array([1 / 6 - 1 / 3, 1 / 6 - 1 / 3, 0]))
    assert no_b == pytest.approx(np.array([1 / 6, 1 / 6 - 1 / 3, 0, -1 / 3, -1 / 3]))


C = Object("red car", "bbox_2d", (600, 800, 700, 900))
TREE = replace(FAR, coords=(300, 300, 400, 400))
CANDIDATES = (A, TREE, B, C)  # said in this order, each or not
NUM = len(CANDIDATES)


UNSURE, SURE, SURER = [0.3, -0.6, 0.5, -0.2], [1.0] * NUM, [2.0] * NUM  # of wrong candidates, too
PRESET = {"detection_f1_mean": 1.0, "detection_no_duplicates": 0.2, "detection_count": 0.2, "detection_parse": 0.1}


@pytest.mark.parametrize(
    ("rewards_of", "given", "least"),
    [
        ({"detection_no_missed": 1.0}, UNSURE, 1 - 1e-9),
        ({"detection_f1": 1.0}, UNSURE, 0.993),
        ({"detection_f1": 1.0}, SURE, 0.975),
        ({"detection_f1": 1.0}, SURER, 0.952),
        ({"detection_mean_iou": 1.0}, SURE, 0.93),
        ({"detection_mean_iou": 1.0}, SURER, 0.876),
        (PRESET, SURE, 0.954),
        (PRESET, SURER, 0.93),
    ],
)
def test_advantages_follow_the_gradient_of_the_reward_GRP_8(
    rewards_of: dict[str, float], given: list[float], least: float
) -> None:
    """GRP-8: a policy says each candidate or not, in order. The mean over all pairs of answers, by their probability,
    against the gradient of the expected reward, computed from all answers. Objects add up in recall, and wrong ones
    cost nothing, so there it is the same; in F1 an object earns more in a worse answer. Where the policy is sure of
    several wrong objects, the first of them is reinforced a little: its tokens do not answer for what follows."""
    logits = torch.tensor(given, dtype=torch.float64, requires_grad=True)
    answers = [said for size in range(NUM + 1) for said in itertools.combinations(range(NUM), size)]

    def choices_of(said: tuple[int, ...]) -> torch.Tensor:
        """Log-probability of each choice of the next one, the last one to close: of all that are passed over."""
        picked, passed = torch.nn.functional.logsigmoid(logits), torch.nn.functional.logsigmoid(-logits)
        starts, ends = [0, *(index + 1 for index in said)], [*said, NUM]
        spans = zip(starts, ends, strict=True)
        return torch.stack([passed[start:end].sum() + picked[end : end + 1].sum() for start, end in spans])

    logprobs = [choices_of(said) for said in answers]
    probability = torch.stack([own.sum() for own in logprobs]).exp()
    assert probability.sum().item() == pytest.approx(1)
    weights = np.array(list(rewards_of.values()))
    for truth in ([], [A, B], [B], [TREE, C], [A, B, C], [A, B, C, NEAR_A]):
        made = group_of(*([CANDIDATES[i] for i in said] for said in answers), truth=truth, names=tuple(rewards_of))
        rewards = torch.tensor([answer.rewards @ weights for answer in made])
        (exact,) = torch.autograd.grad((probability * rewards).sum(), logits, retain_graph=True)
        if rewards.min() == rewards.max():
            continue  # recall, where there is nothing to miss
        surrogate = torch.zeros(())
        for pair in itertools.product(range(len(answers)), repeat=2):
            weight = probability[list(pair)].prod().detach()
            for i, own in zip(pair, decision_advantages([[made[i] for i in pair]], weights, "none"), strict=True):
                surrogate = surrogate + weight * (torch.tensor(own[object_decision(0) :: 2]) * logprobs[i]).sum()
        (estimated,) = torch.autograd.grad(surrogate, logits, retain_graph=True)
        cosine = torch.cosine_similarity(estimated, exact, dim=0)
        if truth == [B] and given != UNSURE:  # the first of several sure wrong ones: the docs say so
            assert estimated[0] > 0 > exact[0] and max(estimated[1], estimated[3]) < 0
        if len(truth) < 2:  # where both answers have one object, they are compared as without credit
            assert cosine >= min(least, 0.999)
        else:
            assert cosine >= least
            if least > 0.999:
                torch.testing.assert_close(estimated, exact)


def iou(one: Object, other: Object) -> float:
    return float(iou_matrix([one], [other])[0, 0])


def test_neutral_objects_are_not_measured_against_others_TGT_12() -> None:
    """GRP-8, TGT-12: what counts has the advantage that it has without trees."""
    more = {"truth": [A, B], "annotated": TWO}
    assert not any(
        own.any() for own in decision_advantages([group_of([A, FAR], [A, FAR], **more)], np.ones(1), "group")
    )
    bad_b, tree_at_b = replace(B, coords=(500, 500, 600, 650)), replace(FAR, coords=(490, 550, 730, 730))
    with_trees = group_of([A, FAR, FAR], [A, B, FAR], [NEAR_A, FAR], [FAR], [bad_b, tree_at_b, A], **more)
    without = group_of([A], [A, B], [NEAR_A], [], [bad_b, A], **more)
    assert iou(tree_at_b, B) > iou(bad_b, B) > 0.3  # and yet the tree is no attempt at B
    for own, expected in zip(
        *(decision_advantages([g], np.ones(1), "group") for g in (with_trees, without)), strict=True
    ):
        np.testing.assert_allclose(own, expected)


@pytest.mark.parametrize("reward", ["detection_mean_iou", "detection_f1_no_label"])
def test_a_neutral_object_that_counts_by_place_has_its_baseline_TGT_12(reward) -> None:
    """GRP-8, TGT-12: as if trees were annotated. What all find has no advantage; who passes over it pays."""
    tree = replace(A, desc="tree")
    for texts in ([[tree, B]] * 4, [[tree, B], [tree, B], [B], [B]]):
        groups = [group_of(*texts, truth=[A, B], names=(reward,), annotated=labels) for labels in (TWO, None)]
        mine, known = (decision_advantages([group], np.ones(1), "group") for group in groups)
        for own, expected in zip(mine, known, strict=True):
            np.testing.assert_allclose(own, expected)
    assert any(own.any() for own in known)


def test_the_std_of_the_batch_is_that_of_all_answers_GRP_8() -> None:
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


def test_rewards_of_the_text_widen_the_scale_GRP_8() -> None:
    """GRP-8, GRP-6: by their squares about the mean; here 1 and 0 for two answers."""
    texts = format_objects([A, B]), format_objects([A, FAR])[:-1]
    group = [answer_of(text, [A, B], ("detection_f1", "detection_parse")) for text in texts]
    squares = []
    for weights in (np.array([1.0, 0.0]), np.array([1.0, 1.0])):
        plain, scaled = (decision_advantages([group], weights, kind)[0] for kind in ("none", "group"))
        squares.append((np.abs(plain[1:]).max() / np.abs(scaled[1:]).max() - EPSILON) ** 2)
    assert squares[1] - squares[0] == pytest.approx(0.5**2 + 0.5**2)


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
