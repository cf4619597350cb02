"""Detection scores (LRN-7), by hand."""

import copy
import itertools
import random
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import normalizers

from tests.answers import make_table, make_tokenizer, make_tokenizer_for
from utils.answer_format import QWEN3VL
from utils.data.samples import Sample
from utils.geometry import Object, normal_label
from utils.parsing import ParsedAnswer, PredObject, parse_answer
from utils.scores import (
    Overlaps,
    confidences,
    count_duplicates,
    count_evaluation,
    count_sample,
    evaluation_scores,
    is_wrong_if_unmatched,
    label_counts,
    prediction_record,
    scores,
)
from utils.targets import TargetOptions, ground_truth_target
from utils.token_table import TokenTable


def box(desc: str, *coords: int) -> Object:
    return Object(desc, "bbox_2d", coords)


def parsed(*objects: Object, closed: bool = True, dropped: dict | None = None) -> ParsedAnswer:
    span = (0, 0)
    preds = [PredObject(o, [], desc_bytes=span, byte_span=span, lead=0) for o in objects]
    return ParsedAnswer(objects=preds, closed=closed, dropped=dropped or {})


RED, BLUE, FAR = box("red", 0, 0, 100, 100), box("blue", 200, 200, 300, 300), box("red", 600, 600, 700, 700)


def test_counts_are_summed_over_objects_not_averaged_over_images_LRN_7():
    """LRN-7: One image with 1 of 1 found, one with 1 of 3: precision 2/2, recall 2/4, F1 2*2/(2+4)."""
    counts = count_sample(parsed(RED), [RED], 0.5, False)
    counts.update(count_sample(parsed(RED), [RED, BLUE, FAR], 0.5, False))
    result = scores(counts)
    assert (result["precision"], result["recall"], result["f1"]) == (1.0, 0.5, pytest.approx(2 / 3))
    assert result["num_images"] == 2 and result["mean_iou"] == 1.0


@pytest.mark.parametrize("seed", range(8))
def test_matches_of_some_objects_are_those_of_an_answer_with_these_GRP_8(seed: int, monkeypatch) -> None:
    """GRP-8, TGT-4: solved in parts, against all at once; crowds with ties, objects twice, true ones said exactly."""
    rng = random.Random(seed)
    monkeypatch.setattr("utils.scores.MIN_POOLED", 0 if seed % 2 else 100)

    def some(number: int) -> list[Object]:
        corners = [(rng.randrange(0, 60, 4), rng.randrange(0, 40, 4)) for _ in range(number)]
        return [box(rng.choice(["red", "blue"]), x, y, x + rng.choice([12, 16]), y + 16) for x, y in corners]

    predicted, truth = some(14), some(12)
    whole = Overlaps([*predicted, *predicted[:2]], truth)
    for _ in range(60):
        own = [obj for obj in whole.predicted if rng.random() < 0.8] + rng.sample(truth, rng.randrange(3))
        for threshold, by_label in itertools.product((0.3, 0.5, 0.75), (True, False)):
            expected = Overlaps(own, truth).matches(threshold, by_label)
            assert whole.of(own).matches(threshold, by_label) == expected
    assert whole.of([]).matches(0.5) == []


def test_labels_are_compared_without_case_and_outer_blanks_LRN_7():
    """LRN-7."""
    result = scores(count_sample(parsed(box(" Red ", *RED.coords)), [RED], 0.5, False))
    assert result["f1"] == 1.0


def test_labels_are_compared_in_composed_form_LRN_7():
    """LRN-7, TGT-12: Qwen's tokenizers compose what they encode (NFC), so what a model learnt of such a label differs
    from the file's."""
    tokenizer = copy.deepcopy(make_tokenizer("qwen"))
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    table = TokenTable.from_tokenizer(tokenizer)
    true = box("cafe\u0301", *RED.coords)
    answer = parse_answer(ground_truth_target([true], table, TargetOptions()).answer_ids.tolist(), table)
    assert answer.objects[0].object.desc == "caf\u00e9"
    assert scores(count_sample(answer, [true], 0.5, False))["f1"] == 1.0
    assert is_wrong_if_unmatched(answer.objects[0].object, {normal_label(true.desc)})


def test_a_wrong_label_counts_by_place_only_LRN_7():
    """LRN-7."""
    result = scores(count_sample(parsed(box("green", *RED.coords)), [RED], 0.5, False))
    assert result["f1"] == 0.0 and result["f1_no_label"] == 1.0


def test_a_neutral_prediction_takes_no_object_from_another_TGT_12():
    """TGT-12: it lies on the object more exactly than the right one. What no other one wants it may have."""
    near = box("red", 0, 0, 100, 90)
    alone = count_sample(parsed(near), [RED, BLUE], 0.5, False, {"red"})
    beside = count_sample(parsed(near, box("toy", *RED.coords)), [RED, BLUE], 0.5, False, {"red"})
    for key in ("f1", "f1_no_label", "mean_iou"):
        assert scores(beside)[key] == scores(alone)[key]
    of_no_annotated_label = count_sample(parsed(near, box("toy", *RED.coords)), [RED], 0.5, False, {"car"})
    assert of_no_annotated_label["matched"] == 1 and of_no_annotated_label["iou_sum"] == pytest.approx(0.9)
    both = count_sample(parsed(near, box("toy", *BLUE.coords)), [RED, BLUE], 0.5, False, {"red"})
    assert (both["matched_no_label"], both["neutral_no_label"], both["neutral"]) == (2, 0, 1)


def test_with_label_the_match_is_made_among_equal_labels_LRN_7():
    """LRN-7: The nearer prediction has the wrong label; the other one is right and counts."""
    near_wrong, far_right = box("blue", 0, 0, 100, 100), box("red", 0, 0, 100, 80)
    result = scores(count_sample(parsed(near_wrong, far_right), [RED], 0.5, False))
    assert result["precision"] == 0.5 and result["recall"] == 1.0


def test_predictions_that_only_touch_an_object_are_gated_LOG_3():
    """LOG-3: One found, one overlapping below the threshold, one far from everything."""
    counts = count_sample(parsed(RED, box("blue", 260, 260, 360, 360), FAR), [RED, BLUE], 0.5, False)
    assert (counts["matched"], counts["gated"]) == (1, 1)


def test_an_overlap_of_exactly_the_threshold_reaches_it_LRN_9_LOG_3():
    """LRN-9, LOG-3: as in matching, whatever rounding does to it."""
    third = box("red", 0, 0, 100, 60)
    assert count_sample(parsed(third), [RED], 0.6 + 1e-12, False)["gated"] == 0
    assert count_duplicates([RED, third], 0.6 + 1e-12) == 1


def test_parse_health_LRN_7():
    """LRN-7."""
    counts = count_sample(parsed(RED, closed=False), [RED], 0.5, True)
    counts.update(count_sample(parsed(RED, dropped={"bad_json": 2}), [RED], 0.5, False))
    counts.update(count_sample(parsed(), [], 0.5, False))
    result = scores(counts)
    assert result["parse_rate"] == pytest.approx(1 / 3) and result["truncated_rate"] == pytest.approx(1 / 3)
    assert counts["dropped/bad_json"] == 2


def test_nothing_there_and_nothing_said_is_perfect_LRN_7():
    """LRN-7: by F1; precision and recall have nothing to count."""
    found = scores(count_sample(parsed(), [], 0.5, False))
    assert (found["f1"], found["precision"], found["recall"]) == (1.0, 0.0, 0.0)


def test_duplicates_are_later_repeats_of_the_same_thing():
    again = box("red", 0, 0, 100, 99)
    assert count_duplicates([RED, again, again]) == 2
    assert count_duplicates([RED, box("blue", 0, 0, 100, 100)]) == 0
    assert count_duplicates([RED, FAR]) == 0


def test_two_true_objects_at_nearly_one_place_are_no_duplicates_LRN_9_TGT_11():
    """LRN-9, TGT-11: only what matches nothing repeats anything, also where the first of two is the worse one."""
    near = box("red", 0, 0, 100, 98)
    assert count_sample(parsed(RED, near), [RED, near], 0.5, False)["duplicates"] == 0
    assert count_sample(parsed(RED, near, RED), [RED, near], 0.5, False)["duplicates"] == 1
    assert count_sample(parsed(near, RED), [RED], 0.5, False)["duplicates"] == 1
    assert count_sample(parsed(near, RED), [], 0.5, False)["duplicates"] == 1


def test_predictions_of_labels_that_are_not_annotated_are_neutral_TGT_12():
    """TGT-12: the far blue is not held against the model, the far red is; a neutral label that matches still counts."""
    far_blue = box("Blue ", 700, 0, 800, 100)
    answer = parsed(RED, FAR, far_blue, far_blue)
    counts = count_sample(answer, [RED], 0.5, False, frozenset({"red"}))
    assert (counts["num_pred"], counts["neutral"], counts["neutral_no_label"], counts["duplicates"]) == (4, 2, 2, 0)
    assert scores(counts)["precision"] == 0.5 and scores(counts)["f1"] == pytest.approx(2 / 3)
    assert scores(count_sample(answer, [RED], 0.5, False))["precision"] == 0.25
    found = scores(count_sample(parsed(BLUE), [BLUE], 0.5, False, frozenset({"red"})))
    assert found["precision"] == found["recall"] == 1.0
    wrong_label = count_sample(parsed(box("blue", *RED.coords)), [RED], 0.5, False, frozenset({"red"}))
    assert (wrong_label["neutral"], wrong_label["neutral_no_label"], wrong_label["matched_no_label"]) == (1, 0, 1)


# ---- LRN-9 -----------------------------------------------------------------------------------------------------------


def image(*objects: Object, annotated: frozenset | None = None) -> Sample:
    return Sample("x", [], [], 100, 100, list(objects), [], "x.jsonl:1", annotated=annotated)


def evaluated(*pairs: tuple[list[Object], list[Object]], new_labels=(), annotated=None) -> dict[str, float]:
    counts: Counter = Counter()
    for pred, gt in pairs:
        counts.update(count_evaluation(parsed(*pred), image(*gt, annotated=annotated), 0.5, False))
    return evaluation_scores(counts, new_labels) | {"labels": label_counts(counts)}


def test_scores_at_each_of_cocos_thresholds_LRN_9():
    """LRN-9: IoU 0.8 (80 of 100 rows) counts up to 0.8, seven of ten thresholds; IoU 1 at all; a third is missed."""
    tall, short = box("red", 0, 0, 100, 100), box("red", 0, 0, 100, 80)
    found = evaluated(([short, BLUE], [tall, BLUE, FAR]))
    assert (found["precision_50"], found["precision_75"], found["precision_95"]) == (1.0, 1.0, 0.5)
    assert (found["recall_50"], found["recall_95"]) == pytest.approx((2 / 3, 1 / 3))
    assert found["f1_95"] == pytest.approx(2 * 1 / 5)
    assert found["f1_mean"] == pytest.approx((7 * 0.8 + 3 * 0.4) / 10)
    assert found["f1_50"] == found["f1"]


def test_giant_boxes_and_records_are_on_the_grid_of_the_image_LRN_9_FAM_4():
    """LRN-9, FAM-4: in pixels of a resized image of 64 x 32 the same box is giant that is small on a grid of 0..999."""
    sample = replace(image(RED), objects=[box("red", 0, 0, 4, 4)], grid=(64, 32))
    whole = parsed(box("red", 0, 0, 64, 32))
    assert count_evaluation(whole, sample, 0.5, False)["giant"] == 1
    assert count_evaluation(whole, image(box("red", 0, 0, 4, 4)), 0.5, False)["giant"] == 0
    record = prediction_record(sample, whole)
    assert record["pred"] == [{"desc": "red", "bbox_2d": [0, 0, 999, 999]}]
    assert record["gt"][0]["bbox_2d"] == pytest.approx([0, 0, 4 / 64 * 999, 4 / 32 * 999], abs=1e-3)


def test_records_have_the_size_of_the_first_image_DAT_2():
    """DAT-2: other tools lay the boxes over the file, whatever frame the line has for its coordinates."""
    sample = Sample("x", ["a.png", "b.png"], [(480, 640), (9, 9)], 1000, 1000, [RED], [], "x.jsonl:1")
    record = prediction_record(sample, parsed())
    assert (record["width"], record["height"]) == (640, 480)


def test_tokens_that_spell_the_one_at_the_cut_anew_have_its_probability_TGT_14():
    """TGT-14: `.)"}]` is one token, and `.`, `)`, `"}` are the prefix's."""
    labels = ("no.)", "dog", "car (left)", 'sign "A"')
    objects = [box(label, x, 1, x + 9, 9) for label in labels for x in range(100)]
    tokenizer = make_tokenizer_for([QWEN3VL.write([obj], "[") for obj in objects])
    table = TokenTable.from_tokenizer(tokenizer, QWEN3VL)
    ids = table.encode(QWEN3VL.write(objects[:1], "["))
    assert table.bytes_of[ids[-1]] == b'.)"}]' and b"no" in table.bytes_of[ids[-2]]
    answer = parse_answer(ids, table)
    assert len(answer.prefix_ids) > len(ids) and answer.objects
    logprobs = np.full(len(ids), -9.0)
    is_number = [table.bytes_of[i].isdigit() for i in ids]
    own = [*np.flatnonzero(is_number)[1:], len(ids) - 2, len(ids) - 1]  # behind the 2 of `bbox_2d`
    logprobs[own] = np.linspace(-0.1, -0.5, len(own))
    assert confidences(answer, logprobs.tolist()) == pytest.approx([np.exp(logprobs[own].mean())])


def test_counting_error_duplicates_and_giant_boxes_LRN_9():
    """LRN-9: one object too few in the first image, one too many in the second: no cancelling. A giant box counts where
    the truth has none."""
    giant, nearly = box("red", 0, 0, 999, 999), box("red", 0, 0, 999, 890)
    found = evaluated(([RED], [RED, BLUE]), ([RED, RED], [RED]), ([], []))
    assert found["counting_error"] == pytest.approx(2 / 3) and found["duplicates_per_image"] == pytest.approx(1 / 3)
    assert evaluated(([giant, nearly], [RED]))["giant_rate"] == 0.5
    assert evaluated(([giant, nearly], [giant]))["giant_rate"] == 0.0


def test_a_giant_box_matches_nothing_and_counts_as_wrong_LRN_9_TGT_12():
    """LRN-9, TGT-12: neither one that finds a truth of 0.89 of the image nor one that is not annotated; of what counts
    half is giant, whatever is neutral besides."""
    large, larger = box("red", 0, 0, 999, 890), box("red", 0, 0, 999, 920)
    assert evaluated(([larger], [large]))["giant_rate"] == 0 and evaluated(([larger], [RED]))["giant_rate"] == 1
    green, whole = box("green", 0, 0, 999, 999), box("red", 0, 0, 999, 999)
    assert evaluated(([RED, green], [RED]), annotated=frozenset({"red"}))["giant_rate"] == 0
    assert evaluated(([RED, whole, green, green], [RED]), annotated=frozenset({"red"}))["giant_rate"] == 0.5


def test_labels_apart_new_and_old_LRN_9():
    """LRN-9: labels as they are compared; f1_new of the named ones, f1_old of all others."""
    found = evaluated(([RED, box("Blue", 0, 0, 9, 9), BLUE], [RED, BLUE, FAR]), new_labels=["BLUE "])
    assert list(found["labels"]) == ["red", "blue"]
    assert found["labels"]["blue"] == {
        "num_gt": 1, "num_pred": 2, "matched": 1, "precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3)
    }  # fmt: skip
    assert (found["f1_new"], found["f1_old"]) == pytest.approx((2 / 3, 2 / 3))
    assert "f1_new" not in evaluated(([RED], [RED]))


def test_what_is_not_annotated_counts_nowhere_TGT_12_LRN_9():
    """TGT-12, LRN-9: the blue one may be there."""
    found = evaluated(([RED, BLUE], [RED]), annotated=frozenset({"red"}), new_labels=["blue"])
    assert found["f1_mean"] == found["f1_old"] == 1.0 and found["counting_error"] == 0
    assert "f1_new" not in found and list(found["labels"]) == ["red"]  # nothing is known of blue ones
    twice = evaluated(([RED, RED, *[BLUE] * 18], [RED]), annotated=frozenset({"red"}))
    assert twice["duplicate_rate"] == 0.5


# ---- TGT-14 ----------------------------------------------------------------------------------------------------------


def test_a_match_of_a_label_that_is_not_annotated_counts_everywhere_TGT_12_LRN_9():
    """TGT-12, LRN-9: the truth may list some of them; without it among the predictions, precision would exceed 1."""
    result = evaluated(([BLUE, RED], [BLUE, RED]), new_labels=["blue"], annotated=frozenset({"red"}))
    assert [result[name] for name in ("precision_50", "precision_mean", "f1_50", "f1_new", "f1_old")] == [1.0] * 5
    counts = count_evaluation(parsed(BLUE), image(BLUE, annotated=frozenset()), 0.5, False)
    assert label_counts(counts)["blue"] | {"f1": 1.0} == dict(
        num_gt=1, num_pred=1, matched=1, precision=1, recall=1, f1=1
    )


@pytest.mark.parametrize("form", ["coord_tokens", "qwen3vl"])
def test_a_confidence_is_the_geometric_mean_over_label_and_coordinates_TGT_14(form):
    """TGT-14: brackets, keys and commas do not count, however unlikely; nor do the tokens of other objects."""
    table = make_table("qwen", form)
    ids = table.encode(table.format.write([RED, BLUE]))
    answer = parse_answer(ids, table)
    # By the text, not by the parser's spans: tokens that hold a character of the label's text or of a coordinate.
    texts = [table.bytes_of[token].decode() for token in ids]
    text, ends = "".join(texts), np.cumsum([len(part) for part in texts])
    logprobs, expected = np.full(len(ids), -9.0), []
    objects = [found.span() for found in re.finditer(r"\{[^{}]*\[[^{}]*\}", text)]
    for number, (start, end) in enumerate(objects):
        values = re.compile(r"(?<=: \")(?:red|blue)|<\|coord_\d+\|>|(?<=[\[ ])\d+(?=[,\]])").finditer(text, start, end)
        held = [
            np.flatnonzero((ends > a) & (ends - [len(t) for t in texts] < b)) for a, b in (v.span() for v in values)
        ]
        own = np.unique(np.concatenate(held))
        assert len(held) == 5
        logprobs[own] = np.linspace(-0.1, -0.5 - number, len(own))
        expected.append(np.exp(logprobs[own].mean()))
    assert len(expected) == 2
    assert confidences(answer, logprobs.tolist()) == pytest.approx(expected)
    assert confidences(answer, None) is None
    assert confidences(parse_answer(ids[:2], table), [0.0, 0.0]) == []
    records = prediction_record(image(RED), answer, logprobs.tolist())
    assert [obj["score"] for obj in records["pred"]] == pytest.approx(expected, abs=1e-4)
    assert "score" not in prediction_record(image(RED), answer)["pred"][0]
