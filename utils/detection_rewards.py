"""Rewards of detection answers (GRP-9): functions `(completion, sample) -> float in [0, 1]`, 1 is best.

A penalty is 1 without any of what it counts. Objects are matched at `completion.iou_threshold` among equal labels
(stripped, case-folded), and predictions whose label is not annotated for the image count nowhere unless they match, not
even in a penalty's denominator (TGT-12). The functions of `OF_OBJECTS` read nothing but the objects, so each object's
part in them is known (GRP-8).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from utils.scores import IOUS, count_giants, is_wrong_if_unmatched, repeated, scores

if TYPE_CHECKING:
    from utils.data.samples import Sample
    from utils.rewards import Completion

REPEATED_TOKENS = 40  # a phrase as long as that is not repeated by chance: it is longer than an object
LENGTH_MARGIN = 0.2  # share of `max_new_tokens` over which the reward of the length falls from 1 to 0


def detection_parse(completion: Completion, sample: Sample) -> float:
    """The answer is closed before it comes to `max_new_tokens` and nothing in it was malformed, as in `parse_rate`, and
    nothing follows it: no special token at which the engine does not stop. The format reward of DeepSeek-R1
    (arXiv:2501.12948) and of VLM-R1 (arXiv:2504.07615)."""
    was_cut = completion.max_new_tokens is not None and len(completion.token_ids) >= completion.max_new_tokens
    return float(completion.counts(sample)["parsed"] and completion.ends_as_parsed and not was_cut)


def detection_f1(completion: Completion, sample: Sample) -> float:
    """F1 of the objects at one IoU with equal label; 1 if there are none and none is found. As Rex-Omni reports it
    (arXiv:2510.12798)."""
    return scores(completion.counts(sample))["f1"]


def detection_f1_no_label(completion: Completion, sample: Sample) -> float:
    """F1 without regard to labels: class-agnostic, as COCO's evaluation is with `useCats = 0` (Lin et al. 2014,
    arXiv:1405.0312)."""
    return scores(completion.counts(sample))["f1_no_label"]


def detection_f1_mean(completion: Completion, sample: Sample) -> float:
    """Mean of F1 over the IoUs 0.5, 0.55, ..., 0.95: COCO's thresholds (Lin et al. 2014, arXiv:1405.0312)."""
    overlaps = completion.overlaps(sample)
    held = {p for p, obj in enumerate(overlaps.predicted) if is_wrong_if_unmatched(obj, sample.annotated)}
    values = []
    for threshold in IOUS:
        matched = {p for p, _ in overlaps.matches(threshold)}
        num_objects = len(matched | held) + len(sample.objects)
        values.append(2 * len(matched) / num_objects if num_objects else 1.0)
    return float(np.mean(values))


def detection_mean_iou(completion: Completion, sample: Sample) -> float:
    """Mean IoU over all objects, predicted or true: a matched pair counts its IoU, any other object 0. Labels do not
    count.

    The IoU reward of Visual-RFT (Liu et al. 2025, arXiv:2503.01785). That missed objects count as well is ours: the
    mean over predictions alone would be largest for an answer with a single certain object.
    """
    counts = completion.counts(sample)
    num_pred = counts["num_pred"] - counts["neutral_no_label"]
    num_objects = num_pred + counts["num_gt"] - counts["matched_no_label"]
    return min(counts["iou_sum"] / num_objects, 1.0) if num_objects else 1.0  # areas of polygons are rounded


def detection_no_missed(completion: Completion, sample: Sample) -> float:
    """1 less the share of true objects that were missed: recall at one IoU, as in PASCAL VOC (Everingham et al. 2010,
    "The PASCAL visual object classes challenge", IJCV 88)."""
    counts = completion.counts(sample)
    return counts["matched"] / counts["num_gt"] if counts["num_gt"] else 1.0


def detection_no_duplicates(completion: Completion, sample: Sample) -> float:
    """1 less the share of predictions that say an object again (`repeats`). Duplicates are what Rex-Omni
    (arXiv:2510.12798) finds GRPO to remove."""
    return 1 - len(repeats(completion, sample)) / max(_num_counted(completion.counts(sample)), 1)


def detection_count(completion: Completion, sample: Sample) -> float:
    """1 less the counting error (LRN-9) as a share of the true number, 0 from there on. The error is that of Lempitsky
    and Zisserman 2010, "Learning to count objects in images"; the scale is ours."""
    counts = completion.counts(sample)
    error = abs(_num_counted(counts) - counts["num_gt"])
    return max(0.0, 1 - error / max(counts["num_gt"], 1))


def detection_no_giant_boxes(completion: Completion, sample: Sample) -> float:
    """1 less the share of predictions that cover nearly the whole image where no true object does (LRN-9). Rex-Omni
    (arXiv:2510.12798) describes such boxes in place of many small ones."""
    giants = count_giants(completion.overlaps(sample), sample, completion.iou_threshold)
    return 1 - giants / max(_num_counted(completion.counts(sample)), 1)


def no_overlong(completion: Completion, sample: Sample) -> float:
    """1 up to 80 % of `max_new_tokens`, then less and less, 0 at the limit: soft overlong punishment (Yu et al. 2025,
    DAPO, arXiv:2503.14476, eq. 13, moved to [0, 1])."""
    limit = completion.max_new_tokens
    return 1.0 if limit is None else float(np.clip((limit - len(completion.token_ids)) / (LENGTH_MARGIN * limit), 0, 1))


def no_repetition(completion: Completion, sample: Sample) -> float:
    """The share of runs of 40 tokens that do not occur earlier in the answer: the n-gram repetition penalty of Yeo et
    al. 2025 (arXiv:2502.03373)."""
    ids = completion.token_ids
    runs = [tuple(ids[start : start + REPEATED_TOKENS]) for start in range(len(ids) - REPEATED_TOKENS + 1)]
    return len(set(runs)) / len(runs) if runs else 1.0


def repeats(completion: Completion, sample: Sample) -> set[int]:
    """Unmatched predictions that overlap a matched or an earlier one of the same label by `iou_threshold`."""
    overlaps = completion.overlaps(sample)
    matched = [p for p, _ in overlaps.matches(completion.iou_threshold)]
    again = repeated(overlaps.mutual, matched, completion.iou_threshold)
    return {p for p in again if is_wrong_if_unmatched(overlaps.predicted[p], sample.annotated)}


def _num_counted(counts: Counter[str]) -> int:
    """Predictions that match or count as wrong; the others are neutral (TGT-12)."""
    return counts["num_pred"] - counts["neutral"]


OF_OBJECTS = (
    detection_f1,
    detection_f1_no_label,
    detection_f1_mean,
    detection_mean_iou,
    detection_no_missed,
    detection_no_duplicates,
    detection_count,
    detection_no_giant_boxes,
)
ALL = (detection_parse, *OF_OBJECTS, no_overlong, no_repetition)
