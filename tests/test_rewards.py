"""Reward functions against values worked out by hand, and the ways they are found and called (GRP-5)."""

import json
import pickle
import random
import re
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.answers import make_table, make_tokenizer, random_object
from utils import detection_rewards
from utils.data.samples import Sample, load_samples
from utils.geometry import Object, iou_matrix
from utils.parsing import parse_answer
from utils.rewards import NEEDS, REWARDS, Completion, FileProblem, RewardError, load_rewards, reward_key_problems, score
from utils.scores import count_sample, scores
from utils.targets import format_objects

HEADER = "<DOMAIN=street>, <TASK=SUMMARY>\n"
REFERENCE = {"car": {"colour": "red", "doors": 4}, "tree": {"height": "tall"}}
SUMMARY_REWARDS = [name for name in REWARDS if name.startswith("summary_")]


def sample(objects: list[Object] | None = None, **extra: Any) -> Sample:
    extra = {"domain": "street", "summary": REFERENCE} | extra
    return Sample("s7", [], [], 0, 0, objects or [], [{"role": "user", "content": "?"}], "d.jsonl:3", extra)


def values(text: str, **extra: Any) -> dict[str, float]:
    """Every summary reward of one answer, without the family's prefix."""
    found = score(Completion(text), sample(**extra), load_rewards(SUMMARY_REWARDS))
    return dict(zip((name.removeprefix("summary_") for name in SUMMARY_REWARDS), found.tolist(), strict=True))


def answer(summary: Any, header: str = HEADER) -> str:
    return header + (summary if isinstance(summary, str) else json.dumps(summary))


# ---------------------------------------------------------------------------------------------------------------------
# summaries


def test_the_family_is_the_contracts_grp_5() -> None:
    """GRP-5: format, header, strict JSON, no duplicate keys, three recalls, structured overlap."""
    assert [name.removeprefix("summary_") for name in SUMMARY_REWARDS] == [
        "format",
        "header",
        "strict_json",
        "no_duplicate_keys",
        "category_recall",
        "attr_key_recall",
        "attr_path_recall",
        "tversky",
    ]


def test_the_reference_itself_gets_full_marks_grp_5() -> None:
    """GRP-5: in whatever order its keys stand."""
    turned = {"tree": {"height": "tall"}, "car": {"doors": 4.0, "colour": "red"}}
    assert set(values(answer(REFERENCE)).values()) == set(values(answer(turned)).values()) == {1.0}


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_accents_count_however_they_are_spelt_grp_5(form: str) -> None:
    """GRP-5: tokenizers compose all text, so a model cannot write an `e` and an accent as a file may hold them."""
    text = unicodedata.normalize("NFD", '{"café": {"type": "café", "names": ["é"]}}')
    reference, domain = json.loads(text), unicodedata.normalize("NFD", "Zürich")
    own = unicodedata.normalize(form, f"<DOMAIN={domain}>, <TASK=SUMMARY>\n{text}")
    assert set(values(own, summary=reference, domain=domain).values()) == {1.0}


@pytest.mark.parametrize("text", ["", "\n", HEADER, "no", HEADER + "[1]", HEADER + "{", HEADER + '"car"', "{}"])
def test_an_answer_without_an_object_gets_nothing_for_it_grp_5(text: str) -> None:
    """GRP-5."""
    found = values(text)
    assert found.pop("header") == float(text.startswith(HEADER[:-1]))
    assert set(found.values()) == {0.0}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (answer({}), (1, 1, 1)),
        (answer({}, "<DOMAIN=indoor>, <TASK=SUMMARY>\n"), (1, 0, 1)),  # another domain is well formed but wrong
        (answer({}, "<DOMAIN=street>,<TASK=SUMMARY>\n"), (0, 0, 1)),
        (answer({}, "<DOMAIN=street>, <TASK=COUNT>\n"), (0, 0, 1)),
        (answer({}, "<DOMAIN=>, <TASK=SUMMARY>\n"), (0, 0, 1)),
        (answer({}, " " + HEADER), (0, 0, 1)),
        (answer({}, HEADER + "\n"), (0, 1, 1)),
        (answer("{}\n"), (0, 1, 1)),
        (answer('{"a":\n1}'), (0, 1, 1)),  # JSON, but not on one line
        (answer("{} done"), (0, 1, 0)),
        (answer("{} }"), (1, 1, 0)),
        (answer('{"a": NaN}'), (1, 1, 0)),
        (answer('{"a": -Infinity}'), (1, 1, 0)),
        (answer("{'a': 1}"), (1, 1, 0)),
        (answer('{"a": 1,}'), (1, 1, 0)),
        (answer('{"a": "\t"}'), (1, 1, 0)),
        (answer("```json\n{}\n```"), (0, 1, 0)),
    ],
)
def test_format_header_and_strict_json_by_hand_grp_5(text: str, expected: tuple[int, int, int]) -> None:
    """GRP-5."""
    found = values(text)
    assert (found["format"], found["header"], found["strict_json"]) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"a": 1, "b": 1}', 1),
        ('{"a": 1, "a": 1}', 0),
        ('{"a": {"x": 1, "x": 2}}', 0),
        ('{"a": [{"x": 1}, {"x": 2}]}', 1),
        ('{"a": [[{"x": 1, "y": 0, "x": 2}]], "b": 1}', 0),
        ('{"a": {"a": {"a": 1}}}', 1),
        ('{"a": 1', 0),
    ],
)
def test_no_duplicate_keys_by_hand_grp_5(body: str, expected: int) -> None:
    """GRP-5: at any depth; a key may come again in another object."""
    assert values(answer(body))["no_duplicate_keys"] == expected


def test_recalls_and_overlap_by_hand_grp_5() -> None:
    """GRP-5: of two categories, three attributes and three leaves the answer has 1, 2 and, by value, 1; it invents a
    leaf `car/doors: 2` and one of a dog, and leaves two out."""
    found = values(answer({"car": {"colour": "red", "doors": 2}, "dog": {"age": 3}}))
    assert found["category_recall"] == 1 / 2
    assert found["attr_key_recall"] == found["attr_path_recall"] == pytest.approx(2 / 3)
    assert found["tversky"] == pytest.approx(1 / (1 + 0.3 * 2 + 0.7 * 2))


def test_paths_go_deeper_than_keys_grp_5() -> None:
    """GRP-5: `car/size` is there, but not all of `car/size/length` and `car/size/width/front`."""
    reference = {"car": {"size": {"length": 4, "width": {"front": 1, "back": 2}}}}
    found = values(answer({"car": {"size": {"length": 5, "width": {"front": 1}}}}), summary=reference)
    assert (found["category_recall"], found["attr_key_recall"]) == (1, 1)
    assert found["attr_path_recall"] == pytest.approx(2 / 3)
    assert found["tversky"] == pytest.approx(1 / (1 + 0.3 * 1 + 0.7 * 2))
    assert values(answer({"car": {"size": 4}}), summary=reference)["attr_path_recall"] == 0


def test_lists_are_multisets_grp_5() -> None:
    """GRP-5: three cars, two of them red, in any order; a list of one value is that value."""
    reference = {"car": [{"colour": "red"}, {"colour": "blue"}, {"colour": "red"}]}
    same = {"car": [{"colour": "blue"}, {"colour": "red"}, {"colour": "red"}]}
    assert set(values(answer(same), summary=reference).values()) == {1.0}
    fewer = values(answer({"car": [{"colour": "red"}, {"colour": "blue"}]}), summary=reference)
    assert fewer["attr_path_recall"] == 1 and fewer["tversky"] == pytest.approx(2 / (2 + 0.7))
    assert values(answer({"car": {"colour": "red"}}), summary={"car": {"colour": ["red"]}})["tversky"] == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "equal"),
    [(4, 4.0, True), (4, "4", False), (1, True, False), (None, "null", False), ({}, [], False), ("a", "A", False)],
)
def test_values_are_compared_as_json_grp_5(ours: Any, theirs: Any, equal: bool) -> None:
    """GRP-5."""
    assert (values(answer({"a": {"b": ours}}), summary={"a": {"b": theirs}})["tversky"] == 1) == equal


def test_where_nothing_is_to_be_found_nothing_is_missed_grp_5() -> None:
    """GRP-5: an empty reference, and one without attributes; inventing still costs overlap."""
    found = values(answer({}), summary={})
    assert set(found.values()) == {1.0}
    found = values(answer({"car": {"colour": "red"}}), summary={})
    assert found["category_recall"] == found["attr_key_recall"] == 1 and found["tversky"] == 0
    found = values(answer({"car": {}}), summary={"car": {}, "tree": {}})
    assert (found["category_recall"], found["attr_key_recall"], found["attr_path_recall"]) == (0.5, 1, 1)


def test_names_come_from_the_data_grp_5() -> None:
    """GRP-5: any domain, any category, in any script."""
    text = '<DOMAIN=机房 A>, <TASK=SUMMARY>\n{"设备": {"品牌": "x"}}'
    assert set(values(text, domain="机房 A", summary={"设备": {"品牌": "x"}}).values()) == {1.0}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
summaries = st.dictionaries(st.text(max_size=3), json_values, max_size=4)


@settings(deadline=None)
@given(summaries, summaries)
def test_every_summary_scores_within_bounds_and_itself_in_full_grp_5(ours: dict, theirs: dict) -> None:
    """GRP-5."""
    found = values(answer(ours), summary=theirs)
    assert all(0 <= value <= 1 for value in found.values())
    assert set(values(answer(theirs), summary=theirs).values()) == {1.0}


@settings(deadline=None)
@given(st.text() | st.text(alphabet='{}[]":, \n<>=DOMAINSKUYR1e'))
def test_no_text_breaks_a_summary_reward_grp_5(text: str) -> None:
    """GRP-5."""
    for whole in (text, HEADER + text):
        assert all(0 <= value <= 1 for value in values(whole).values())


@pytest.mark.parametrize("body", ["[" * 100_000, '{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}", '{"a": 1e999}'])
def test_json_at_its_limits_grp_5(body: str) -> None:
    """GRP-5."""
    assert all(0 <= value <= 1 for value in values(answer(body)).values())


# ---------------------------------------------------------------------------------------------------------------------
# detection


RED, BLUE = Object("red car", "bbox_2d", (0, 0, 100, 100)), Object("blue car", "bbox_2d", (500, 500, 700, 700))


def detect(objects: list[Object], gt: list[Object], text: str | None = None) -> dict[str, float]:
    text = format_objects(objects) if text is None else text
    names = ["detection_parse", "detection_f1", "detection_f1_no_label", "detection_mean_iou"]
    ids = make_tokenizer("qwen").encode(text, add_special_tokens=False)
    found = score(Completion(text, ids, make_table("qwen")), sample(gt), load_rewards(names))
    return dict(zip(names, found.tolist(), strict=True))


def test_detection_by_hand_grp_5() -> None:
    """GRP-5: one object right, one with another name and IoU 0.5, one invented; three true ones, one of them missed."""
    half = Object("green car", "bbox_2d", (500, 500, 700, 600))
    far = Object("tree", "bbox_2d", (900, 900, 950, 950))
    missed = Object("sign", "bbox_2d", (0, 800, 50, 900))
    found = detect([RED, half, far], [RED, BLUE, missed])
    assert found["detection_parse"] == 1
    assert found["detection_f1"] == pytest.approx(2 * 1 / 6)
    assert found["detection_f1_no_label"] == pytest.approx(2 * 2 / 6)
    assert found["detection_mean_iou"] == pytest.approx((1 + 0.5 + 0 + 0) / 4)


def test_rewards_hold_no_label_against_the_model_that_is_not_annotated_TGT_12() -> None:
    """TGT-12: the second car may well be there."""
    names, both = ["detection_f1", "detection_mean_iou"], format_objects([RED, BLUE])
    completion = Completion(both, make_tokenizer("qwen").encode(both, add_special_tokens=False), make_table("qwen"))
    for annotated, expected in ((None, [2 / 3, 0.5]), (frozenset({"red car"}), [1, 1])):
        image = replace(sample([RED]), annotated=annotated)
        assert score(completion, image, load_rewards(names)).tolist() == pytest.approx(expected)


def test_silence_about_all_but_one_object_does_not_pay_grp_5() -> None:
    """GRP-5."""
    assert detect([RED], [RED, BLUE])["detection_mean_iou"] == 0.5


def test_nothing_where_nothing_is_is_perfect_grp_5() -> None:
    """GRP-5."""
    assert set(detect([], []).values()) == {1.0}
    assert detect([RED], [])["detection_mean_iou"] == detect([RED], [])["detection_f1"] == 0


def test_broken_answers_keep_what_is_valid_in_them_grp_5() -> None:
    """GRP-5: an unfinished second object: not parsed, but the first one counts."""
    whole = format_objects([RED, BLUE])
    found = detect([], [RED], whole[: whole.index("blue")])
    assert found["detection_parse"] == 0 and found["detection_f1"] == 1
    assert detect([], [RED], "nonsense") == dict.fromkeys(found, 0.0)


def test_what_follows_the_answer_is_malformed_grp_5() -> None:
    """GRP-5: the engine does not stop at every special token, and the parser reads none behind one (TGT-3)."""
    table, text = make_table("qwen"), format_objects([RED])
    ids = make_tokenizer("qwen").encode(text, add_special_tokens=False)
    special = int(np.flatnonzero(table.is_stop)[0])
    for more, expected in (([], 1.0), ([special, *ids[:5]], 0.0), ([special], 0.0)):
        completion = Completion(text, [*ids, *more], table)
        assert score(completion, sample([RED]), load_rewards(["detection_parse", "detection_f1"])).tolist() == [
            expected,
            1,
        ]


def test_detection_agrees_with_evaluation_grp_5() -> None:
    """GRP-5, LRN-7: the same counts and ratios, on random scenes."""
    rng = random.Random(1)
    for _ in range(20):
        objects, gt = ([random_object(rng) for _ in range(rng.randint(0, 4))] for _ in range(2))
        gt = gt + objects[:1]
        text = format_objects(objects)
        ids = make_tokenizer("qwen").encode(text, add_special_tokens=False)
        theirs = scores(count_sample(parse_answer(ids, make_table("qwen")), gt, 0.5, truncated=False))
        found = detect(objects, gt)
        assert found["detection_f1"] == theirs["f1"] and found["detection_parse"] == theirs["parse_rate"]
        assert found["detection_f1_no_label"] == theirs["f1_no_label"]


def value(name: str, objects: list[Object], gt: list[Object], annotated: Any = None, **state: Any) -> float:
    text = format_objects(objects)
    ids = make_tokenizer("qwen").encode(text, add_special_tokens=False)
    image = replace(sample(gt), annotated=annotated)
    (found,) = score(Completion(text, ids, make_table("qwen"), **state), image, load_rewards([name]))
    return float(found)


HALF = Object("red car", "bbox_2d", (0, 0, 100, 62))  # IoU with RED: 0.62
GIANT = Object("red car", "bbox_2d", (0, 0, 990, 990))
TREE = Object("tree", "bbox_2d", (900, 900, 950, 950))


def test_the_threshold_of_a_pair_is_the_completions_grp_9() -> None:
    """GRP-9: IoU 0.62 is found at 0.5 and at 0.6, not at 0.65; the mean over COCO's ten counts three of them."""
    for threshold, expected in ((0.5, 1.0), (0.6, 1.0), (0.65, 0.0)):
        assert value("detection_f1", [HALF], [RED], iou_threshold=threshold) == expected
        assert value("detection_no_missed", [HALF], [RED], iou_threshold=threshold) == expected
    assert value("detection_f1_mean", [HALF], [RED]) == pytest.approx(3 / 10)
    assert value("detection_f1_mean", [HALF, BLUE], [RED, BLUE]) == pytest.approx((3 * 1 + 7 * 1 / 2) / 10)
    assert value("detection_f1_mean", [], []) == 1 and value("detection_f1_mean", [], [RED]) == 0


def test_each_penalty_by_hand_grp_9() -> None:
    """GRP-9: 1 without any, less by the share of what it counts."""
    assert value("detection_no_missed", [RED], [RED, BLUE]) == 1 / 2 and value("detection_no_missed", [RED], []) == 1
    assert value("detection_no_duplicates", [RED, HALF, BLUE, BLUE], [RED, BLUE]) == 1 / 2
    assert value("detection_no_duplicates", [HALF, RED], [RED]) == 1 / 2  # the worse copy, although it comes first
    assert value("detection_no_duplicates", [RED, HALF], [RED, HALF]) == 1  # two objects that overlap
    assert value("detection_no_duplicates", [TREE, TREE, TREE], [RED]) == pytest.approx(1 / 3)  # two repeat a wrong one
    assert value("detection_no_duplicates", [RED, replace(RED, desc="blue car")], [RED]) == 1  # another label
    assert value("detection_no_duplicates", [], [RED]) == 1
    for objects, gt, expected in (([RED, BLUE], [RED], 0), ([RED], [RED, BLUE, TREE], 1 / 3), ([RED], [], 0)):
        assert value("detection_count", objects, gt) == pytest.approx(expected)
    assert value("detection_count", [TREE], [RED]) == 1 == value("detection_count", [], [])
    assert value("detection_no_giant_boxes", [GIANT, RED], [RED]) == 1 / 2
    assert value("detection_no_giant_boxes", [GIANT, RED], [GIANT]) == 1 == value("detection_no_giant_boxes", [], [RED])


NEAR_GIANT, GIANT_TREE = Object("red car", "bbox_2d", (0, 0, 999, 890)), Object("tree", "bbox_2d", (0, 0, 999, 999))


def test_a_giant_box_is_one_where_no_object_is_grp_9_TGT_12() -> None:
    """GRP-9, TGT-12: neither one that matches (a truth of 0.89 of the image, IoU 0.97) nor one that may be there."""
    slightly_larger = Object("red car", "bbox_2d", (0, 0, 999, 920))
    assert value("detection_no_giant_boxes", [slightly_larger], [NEAR_GIANT]) == 1
    assert value("detection_no_giant_boxes", [slightly_larger], [NEAR_GIANT], iou_threshold=0.98) == 0
    assert value("detection_no_giant_boxes", [RED, GIANT_TREE], [RED], annotated=frozenset({"red car"})) == 1
    assert value("detection_no_giant_boxes", [RED, GIANT_TREE], [RED]) == 1 / 2


@pytest.mark.parametrize(("name", "wrong"), [("detection_no_duplicates", RED), ("detection_no_giant_boxes", GIANT)])
def test_what_is_not_annotated_does_not_dilute_a_penalty_grp_9_TGT_12(name: str, wrong: Object) -> None:
    """GRP-9, TGT-12: one of two objects is wrong, whatever the number of trees."""
    trees = [Object("tree", "bbox_2d", (100 * i, 900, 100 * i + 50, 950)) for i in range(8)]
    annotated = frozenset({"red car"})
    assert value(name, [RED, wrong], [RED], annotated) == value(name, [RED, wrong, *trees], [RED], annotated) == 1 / 2
    assert value(name, trees, [RED], annotated) == 1


def test_what_matches_by_place_counts_where_labels_do_not_TGT_12() -> None:
    """TGT-12, GRP-9: a tree, of which no annotation is complete, where the red car is; the blue car is missed."""
    there, annotated = replace(RED, desc="tree"), frozenset({"red car", "blue car"})
    assert value("detection_mean_iou", [there], [RED, BLUE], annotated) == 1 / 2
    assert value("detection_f1_no_label", [there], [RED, BLUE], annotated) == pytest.approx(2 / 3)
    assert value("detection_f1", [there], [RED, BLUE], annotated) == 0


def test_a_repeat_overlaps_by_the_completions_threshold_grp_9() -> None:
    """GRP-9: of IoU 0.62 with the object it is a repeat at 0.6 and another, wrong object at 0.7."""
    for threshold, expected in ((0.5, 1 / 2), (0.6, 1 / 2), (0.7, 1)):
        assert value("detection_no_duplicates", [RED, HALF], [RED], iou_threshold=threshold) == expected
    apart = Object("red car", "bbox_2d", (0, 0, 100, 40))
    assert value("detection_no_duplicates", [RED, apart], [RED], iou_threshold=0.3) == 1 / 2


def test_every_detection_reward_names_its_source_grp_9() -> None:
    """GRP-9: a paper, by its number or its year."""
    for function in detection_rewards.ALL:
        assert re.search(r"arXiv:\d{4}\.\d{5}|\b(19|20)\d\d\b", function.__doc__), function.__name__


@pytest.mark.parametrize("name", ["detection_f1_mean", "detection_no_duplicates", "detection_count"])
def test_new_rewards_hold_no_label_against_the_model_that_is_not_annotated_TGT_12(name: str) -> None:
    """TGT-12, GRP-9: trees may well be there, and twice."""
    assert value(name, [RED, TREE, TREE], [RED], annotated=frozenset({"red car"})) == 1
    assert value(name, [RED, TREE, TREE], [RED]) < 1


def test_length_and_repetition_by_hand_grp_9() -> None:
    """GRP-9: 100 tokens of 100 are too long, 90 half so, 80 not; of six equal runs of 40 tokens five occur again."""
    overlong, repetition = load_rewards(["no_overlong"]), load_rewards(["no_repetition"])
    for length, expected in ((101, 0), (100, 0), (90, 0.5), (80, 1), (3, 1)):
        assert score(Completion("x", [1] * length, max_new_tokens=100), sample(), overlong)[0] == pytest.approx(
            expected
        )
    assert score(Completion("x", [1] * 100), sample(), overlong)[0] == 1
    for ids, expected in (([1] * 45, 1 / 6), (list(range(99)), 1), ([1] * 39, 1), ([1] * 40, 1)):
        assert score(Completion("x", ids), sample(), repetition)[0] == pytest.approx(expected)


def test_no_detection_reward_leaves_its_range_grp_9() -> None:
    """GRP-9, on random scenes; `score` raises beyond [0, 1]."""
    rng = random.Random(2)
    names = [name for name in REWARDS if not name.startswith("summary_")]
    for _ in range(30):
        objects, gt = ([random_object(rng) for _ in range(rng.randint(0, 5))] for _ in range(2))
        objects += rng.sample(objects + gt, k=min(2, len(objects + gt)))
        for name in names:
            value(name, objects, gt, iou_threshold=rng.choice([0.1, 0.5, 1.0]), max_new_tokens=rng.choice([10, 1000]))


def test_an_answer_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("utils.rewards.parse_answer", lambda ids, table: calls.append(ids) or parse_answer(ids, table))
    detect([RED], [RED])
    assert len(calls) == 1


def test_overlaps_are_computed_once_for_all_rewards_and_objects_held_grp_8_grp_9(monkeypatch) -> None:
    """GRP-8, GRP-9: and rewards of any of the answer's and the true objects are those of an answer that says them."""
    rng, calls, table = random.Random(3), [], make_table("qwen")
    rewards = {function.__name__: function for function in detection_rewards.OF_OBJECTS}

    def said(objects: list[Object]) -> Completion:
        return Completion("", make_tokenizer("qwen").encode(format_objects(objects), add_special_tokens=False), table)

    def counted(*sides: Any) -> np.ndarray:
        calls.append(sides)
        return iou_matrix(*sides)

    monkeypatch.setattr("utils.scores.iou_matrix", counted)
    monkeypatch.setattr("utils.scores.MIN_POOLED", 0)
    for annotated in [None, frozenset({"red car"})] * 10:
        objects, gt = ([random_object(rng) for _ in range(rng.randint(1, 6))] for _ in range(2))
        objects += rng.choices(objects + gt, k=3)
        image, completion = replace(sample(gt), annotated=annotated), said(objects)
        calls.clear()
        score(completion, image, rewards)
        choices = [rng.sample(objects + gt, k=rng.randint(0, 4)) for _ in range(8)]
        found = [score(completion.holding(chosen), image, rewards) for chosen in choices]
        assert len(calls) == 4  # the answer's with the truth and with itself, and the same of all objects
        choices.append([random_object(rng)])
        found.append(score(completion.holding(choices[-1]), image, rewards))
        for chosen, own in zip(choices, found, strict=True):
            assert own == pytest.approx(score(said(chosen), image, rewards), abs=1e-12)


def test_detection_without_coordinate_tokens_says_so_grp_5() -> None:
    """GRP-5."""
    with pytest.raises(RewardError, match="detection_f1 on sample s7 .*needs? a tokenizer with coordinate tokens"):
        score(Completion("x", [1]), sample(), load_rewards(["detection_f1"]))


# ---------------------------------------------------------------------------------------------------------------------
# finding and calling


def user_file(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_functions_of_a_users_file_grp_5(tmp_path: Path) -> None:
    """GRP-5: plain functions over text and sample, beside those of the project, in the order of the config."""
    path = user_file(
        tmp_path,
        "from json import dumps\n"
        "def short(completion, sample):\n    return 1 / (1 + len(completion))\n"
        "def names_domain(completion, sample):\n    return sample.extra['domain'] in completion\n",
    )
    rewards = load_rewards(["names_domain", "summary_format", "short"], [path])
    assert list(rewards) == ["names_domain", "summary_format", "short"]
    found = score(Completion("a street"), sample(), rewards)
    np.testing.assert_allclose(found, [1.0, 0.0, 1 / 9])
    assert found @ np.array([2.0, 1.0, 9.0]) == pytest.approx(3.0)  # the weighted sum


def test_what_can_be_called_like_a_function_is_one_grp_5(tmp_path: Path) -> None:
    """GRP-5: a partial one, an object with `__call__`; a class and imports are none."""
    path = user_file(
        tmp_path,
        "from functools import partial\n"
        "from json import dumps\n"
        "def _at(completion, sample, value): return value\n"
        "half = partial(_at, value=0.5)\n"
        "class Longer:\n    def __call__(self, completion, sample): return 0.9\n"
        "longer = Longer()\n",
    )
    rewards = load_rewards(["half", "longer"], [path])
    assert score(Completion("x"), sample(), rewards).tolist() == [0.5, 0.9]
    for name in ("Longer", "dumps", "partial", "_at"):
        with pytest.raises(ValueError, match=f"no reward '{name}'"):
            load_rewards([name], [path])


@pytest.mark.parametrize(
    ("names", "text", "message"),
    [
        (["summary_fromat"], "", "no reward 'summary_fromat'; did you mean summary_format"),
        (["dumps"], "from json import dumps\n", "no reward 'dumps'"),  # imported, not defined there
        (["_helper"], "def _helper(completion, sample): return 0\n", "no reward '_helper'"),
        (
            ["summary_format"],
            "def summary_format(completion, sample): return 0\n",
            "defined in utils/rewards.py and in",
        ),
        (["x"], "import nowhere_to_be_found\n", "mine.py: cannot be loaded: ModuleNotFoundError"),
        (["x"], "def x(:\n", "mine.py: cannot be loaded: SyntaxError"),
    ],
)
def test_names_and_files_that_cannot_be_used_grp_5(tmp_path: Path, names: list[str], text: str, message: str) -> None:
    """GRP-5."""
    with pytest.raises(ValueError, match=message):
        load_rewards(names, [user_file(tmp_path, text)])


def test_missing_files_are_named_grp_5(tmp_path: Path) -> None:
    """GRP-5."""
    for name in ("gone.py", "gone.txt"):
        with pytest.raises(ValueError, match=f"{name}: cannot be loaded"):
            load_rewards(["x"], [str(tmp_path / name)])


def test_a_users_file_may_hold_dataclasses(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Bounds:\n    low: float = 0.0\n"
        "def flat(completion, sample):\n    return Bounds().low\n"
    )
    rewards = load_rewards(["flat"], [user_file(tmp_path, text)])
    assert score(Completion(""), sample(), rewards).tolist() == [0.0]


@pytest.mark.parametrize("value", [1.1, -0.1, float("nan"), float("inf"), None, "1", [1.0]])
def test_a_reward_outside_its_range_stops_with_both_names_grp_5(value: Any) -> None:
    """GRP-5."""
    with pytest.raises(RewardError, match=r"reward mine on sample s7 \(d.jsonl:3\): returned .* in \[0, 1\]"):
        score(Completion(""), sample(), {"mine": lambda completion, sample: value})


def test_a_reward_that_raises_stops_with_both_names_grp_5() -> None:
    """GRP-5."""
    with pytest.raises(RewardError, match=r"reward summary_tversky on sample s7 \(d.jsonl:3\): KeyError: 'summary'"):
        bare = Sample("s7", [], [], 0, 0, [], [], "d.jsonl:3")
        score(Completion(answer(REFERENCE)), bare, load_rewards(["summary_tversky"]))


class Panic(BaseException):
    """As a Rust library raises it."""


@pytest.mark.parametrize("error", [SystemExit(0), Panic("index out of bounds")])
def test_a_reward_that_would_end_the_process_is_an_error_like_any_other_grp_5(error: BaseException) -> None:
    """GRP-5, LRN-12: `sys.exit()` in a user's function must not look like the end of a finished run."""

    def mine(completion: str, sample: Sample) -> float:
        raise error

    with pytest.raises(RewardError, match=rf"reward mine on sample s7 .*: {type(error).__name__}: "):
        score(Completion(""), sample(), {"mine": mine})


def test_a_reward_may_leave_its_range_by_rounding_grp_5() -> None:
    """GRP-5: as a cosine similarity of float32 vectors does."""
    functions = {"high": lambda c, s: np.float32(1.0000001), "low": lambda c, s: -1e-9}
    assert score(Completion(""), sample(), functions).tolist() == [1.0, 0.0]


def test_a_rewards_file_is_executed_once_as_long_as_it_is_the_same(tmp_path: Path) -> None:
    """The check of the config loads it, and then the run: it may load a model, or register something."""
    log = tmp_path / "log"
    text = f"open({str(log)!r}, 'a').write('x')\ndef mine(completion, sample):\n    return 1.0\n"
    path = user_file(tmp_path, text)
    assert load_rewards(["mine"], [path]) == load_rewards(["mine"], [path])
    assert log.read_text() == "x"


@pytest.mark.parametrize("form", ["qwen3vl", None])
def test_a_completion_can_be_sent_to_another_process(form: str | None) -> None:
    """GRP-5: rewards use pools of processes for a time limit. The answer comes along as it was parsed."""
    table = make_table("native", form) if form else None
    text = '[{"bbox_2d": [58, 9, 211, 158], "label": "man"}]'
    own = Completion(text, table.encode(text) if table else [1, 2], table, 0.75, 64)
    sent = pickle.loads(pickle.dumps(own))
    assert (sent, sent.token_ids, sent.iou_threshold, sent.max_new_tokens) == (text, own.token_ids, 0.75, 64)
    if table:
        assert [obj.desc for obj in sent.parsed.pred_objects] == ["man"]


def test_bounds_and_numpy_numbers_are_accepted() -> None:
    functions = {str(i): lambda c, s, v=v: v for i, v in enumerate([0, 1, True, np.float32(0.5), np.bool_(True)])}
    assert score(Completion(""), sample(), functions).tolist() == [0, 1, 1, 0.5, 1]


def test_a_completion_is_its_text() -> None:
    completion = Completion("abc", [1, 2], None)
    assert completion == "abc" and completion.upper() == "ABC" and completion.token_ids == [1, 2]


def test_samples_that_lack_what_a_reward_needs_grp_5(tmp_path: Path) -> None:
    """GRP-5, DAT-3: named with file and line before training; detection needs nothing beyond the format."""
    lines = [
        {"domain": "street", "summary": {}},
        {"domain": "a,b", "summary": {}},
        {"summary": ["car"]},
        {"domain": 5, "summary": {}},
    ]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"images": [], **line}) + "\n" for line in lines))
    (samples,) = load_samples([path], "Summarise.")
    names = ["summary_header", "summary_tversky", "summary_category_recall", "detection_f1"]
    found = reward_key_problems(names, samples)
    assert [line.removeprefix(f"{path}:").split(";")[0] for line in found] == [
        "2: domain: must be text without <, >, comma and line break",
        "3: domain: must be text without <, >, comma and line break",
        "3: summary: must be an object {category: {attribute: value}}",
        "4: domain: must be text without <, >, comma and line break",
    ]
    assert "required by summary_tversky, summary_category_recall" in found[2]
    assert reward_key_problems(["detection_f1", "my_own"], samples) == []
    assert NEEDS.keys() == REWARDS.keys()


@pytest.mark.parametrize(
    "definition", [f"{head}: return 1" for head in ("def mine(a)", "def mine(a, **more)", "async def mine(a, b)")]
)
def test_a_reward_that_cannot_be_called_is_refused_when_it_is_loaded(tmp_path, definition):
    """Not at the first rollouts."""
    path = tmp_path / "mine.py"
    path.write_text(definition + "\n")
    with pytest.raises(FileProblem, match="mine must be a plain function of .completion, sample."):
        load_rewards(["mine"], [str(path)])
    path.write_text("def mine(completion, sample=None, **more): return 1\n")
    assert list(load_rewards(["mine"], [str(path)])) == ["mine"]
    path.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(FileProblem, match="mine.py: cannot be loaded: SystemExit: 3"):
        load_rewards(["mine"], [str(path)])
