"""Detection scores of parsed answers, as in production (LRN-7). Pure: counts per sample, sums, ratios."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.geometry import Object, iou_matrix, to_norm1000
from utils.matching import match
from utils.parsing import ParsedAnswer

if TYPE_CHECKING:
    from utils.data.samples import Sample


def count_sample(
    parsed: ParsedAnswer, gt_objects: Sequence[Object], iou_threshold: float, truncated: bool
) -> Counter[str]:
    """Counts of one answer; counts of many samples (and ranks) add up. Objects are matched one to one at the threshold,
    once by geometry alone and once among pairs with equal label. `gated` predictions overlap some object, but none by
    the threshold."""
    pred_objects = parsed.pred_objects
    iou = iou_matrix(pred_objects, gt_objects)
    same_label = np.array([[label_of(p) == label_of(g) for g in gt_objects] for p in pred_objects], dtype=bool)
    pairs = match(iou, iou_threshold)
    best = iou.max(axis=1, initial=0.0)
    labelled = match(np.where(same_label.reshape(iou.shape), iou, 0.0), iou_threshold)
    counts: Counter[str] = Counter(
        num_images=1,
        num_pred=len(pred_objects),
        num_gt=len(gt_objects),
        matched=len(labelled),
        matched_no_label=len(pairs),
        parsed=int(parsed.closed and not parsed.dropped),
        truncated=int(truncated),
        gated=int(((best > 0) & (best < iou_threshold)).sum()),
        duplicates=count_duplicates(pred_objects),
        **{f"dropped/{reason}": number for reason, number in parsed.dropped.items()},
    )
    counts["iou_sum"] = float(sum(iou[p, g] for p, g in pairs))  # type: ignore[assignment]  # Counter: int by its stub
    return counts


def count_duplicates(objects: Sequence[Object], iou_threshold: float = 0.9) -> int:
    """Number of objects that repeat an earlier one of the same answer: same label, nearly the same place."""
    iou = np.triu(iou_matrix(objects, objects), k=1)
    earlier, later = np.nonzero(iou >= iou_threshold)
    return len({int(j) for i, j in zip(earlier, later, strict=True) if label_of(objects[i]) == label_of(objects[j])})


def scores(counts: Mapping[str, float]) -> dict[str, float]:
    """Ratios of summed counts: f1, precision, recall (with label), the same without label, mean IoU, parse health."""
    count = defaultdict[str, float](int, counts)
    num_pred, num_gt, images = count["num_pred"], count["num_gt"], max(count["num_images"], 1)
    result: dict[str, float] = {"num_images": count["num_images"]}
    for suffix in ("", "_no_label"):
        matched = count[f"matched{suffix}"]
        result[f"precision{suffix}"] = matched / max(num_pred, 1)
        result[f"recall{suffix}"] = matched / max(num_gt, 1)
        # nothing predicted and nothing there: perfect, not zero
        result[f"f1{suffix}"] = 2 * matched / (num_pred + num_gt) if num_pred + num_gt else 1.0
    result["mean_iou"] = count["iou_sum"] / max(count["matched_no_label"], 1)
    result["parse_rate"] = count["parsed"] / images
    result["truncated_rate"] = count["truncated"] / images
    result["duplicate_rate"] = count["duplicates"] / max(num_pred, 1)
    return result


def prediction_record(sample: "Sample", parsed: ParsedAnswer, max_bin: int) -> dict[str, Any]:
    """A validation answer as a JSON record; coordinates norm1000 (0..999), whatever the answer's own grid is."""
    sides = {"gt": sample.objects, "pred": parsed.pred_objects}
    objects = {side: [object_record(obj, max_bin) for obj in objects] for side, objects in sides.items()}
    return {"id": sample.id, "images": sample.images, **objects}


def object_record(obj: Object, max_bin: int) -> dict[str, Any]:
    """An object on the grid `0..max_bin` as JSON values, norm1000."""
    return {"desc": obj.desc, obj.kind: list(to_norm1000(obj, max_bin).coords)}


def label_of(object_: Object) -> str:
    """The label stripped and case-folded, for comparison (LRN-7)."""
    return object_.desc.strip().casefold()
