"""Detection scores (LRN-7), by hand."""

import pytest

from utils.geometry import Object
from utils.parsing import ParsedAnswer, PredObject
from utils.scores import count_duplicates, count_sample, scores


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


def test_labels_are_compared_without_case_and_outer_blanks_LRN_7():
    """LRN-7."""
    result = scores(count_sample(parsed(box(" Red ", *RED.coords)), [RED], 0.5, False))
    assert result["f1"] == 1.0


def test_a_wrong_label_counts_by_place_only_LRN_7():
    """LRN-7."""
    result = scores(count_sample(parsed(box("green", *RED.coords)), [RED], 0.5, False))
    assert result["f1"] == 0.0 and result["f1_no_label"] == 1.0


def test_with_label_the_match_is_made_among_equal_labels_LRN_7():
    """LRN-7: The nearer prediction has the wrong label; the other one is right and counts."""
    near_wrong, far_right = box("blue", 0, 0, 100, 100), box("red", 0, 0, 100, 80)
    result = scores(count_sample(parsed(near_wrong, far_right), [RED], 0.5, False))
    assert result["precision"] == 0.5 and result["recall"] == 1.0


def test_predictions_that_only_touch_an_object_are_gated_LOG_3():
    """LOG-3: One found, one overlapping below the threshold, one far from everything."""
    counts = count_sample(parsed(RED, box("blue", 260, 260, 360, 360), FAR), [RED, BLUE], 0.5, False)
    assert (counts["matched"], counts["gated"]) == (1, 1)


def test_parse_health_LRN_7():
    """LRN-7."""
    counts = count_sample(parsed(RED, closed=False), [RED], 0.5, True)
    counts.update(count_sample(parsed(RED, dropped={"bad_json": 2}), [RED], 0.5, False))
    counts.update(count_sample(parsed(), [], 0.5, False))
    result = scores(counts)
    assert result["parse_rate"] == pytest.approx(1 / 3) and result["truncated_rate"] == pytest.approx(1 / 3)
    assert counts["dropped/bad_json"] == 2


def test_nothing_there_and_nothing_said_is_perfect_LRN_7():
    """LRN-7."""
    assert scores(count_sample(parsed(), [], 0.5, False))["f1"] == 1.0


def test_duplicates_are_later_repeats_of_the_same_thing():
    again = box("red", 0, 0, 100, 99)
    assert count_duplicates([RED, again, again]) == 2
    assert count_duplicates([RED, box("blue", 0, 0, 100, 100)]) == 0
    assert count_duplicates([RED, FAR]) == 0
