"""Detection scores of parsed answers, as in production (LRN-7, LRN-9). Pure: counts per sample, sums, ratios."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.geometry import Grid, Object, bounding_box, iou_matrix, normal_label, to_norm1000
from utils.matching import TOLERANCE, components, match
from utils.parsing import ParsedAnswer
from utils.token_table import touched

IOUS = [round(0.5 + 0.05 * i, 2) for i in range(10)]  # COCO's thresholds
DUPLICATE_IOU = 0.9  # from there on two predictions of a label are one and the same
MIN_POOLED = 48  # predictions from which on parts pay; with fewer, solving anew is quicker
GIANT_SHARE = 0.9  # of the image's area, above which a box is giant (LRN-9)

if TYPE_CHECKING:
    from utils.data.samples import Sample


class Overlaps:
    """IoU and matches of an answer's objects, each computed when it is first asked for, and once."""

    def __init__(self, predicted: Sequence[Object], truth: Sequence[Object]) -> None:
        self.predicted, self.truth = predicted, truth
        self._matches: dict[tuple[float, bool], list[tuple[int, int]]] = {}
        self._chosen_from: tuple[dict[bool, _Parts], np.ndarray] | None = None  # and the rows that are these

    @cached_property
    def iou(self) -> np.ndarray:
        """With the true objects, whatever the labels; float64 `[num_pred, num_gt]`."""
        return iou_matrix(self.predicted, self.truth)

    @cached_property
    def labelled(self) -> np.ndarray:
        """With the true objects, 0 where labels differ; float64 `[num_pred, num_gt]`."""
        return labelled_iou(self.predicted, self.truth, self.iou)

    @cached_property
    def mutual(self) -> np.ndarray:
        """With each other, 0 where labels differ; float64 `[num_pred, num_pred]`."""
        return labelled_iou(self.predicted, self.predicted)

    @cached_property
    def _pool(self) -> tuple["Overlaps", dict[bool, "_Parts"], dict[Object, int]]:
        objects = [*self.predicted, *self.truth]
        pool = Overlaps(objects, self.truth)
        parts = {True: _Parts(pool.labelled), False: _Parts(pool.iou)}
        return pool, parts, {obj: row for row, obj in enumerate(objects)}

    def matches(self, iou_threshold: float, by_label: bool = True) -> list[tuple[int, int]]:
        """`match`, among pairs with equal label or whatever the labels."""
        key = iou_threshold, by_label
        if key not in self._matches:
            if self._chosen_from is None:
                self._matches[key] = match(self.labelled if by_label else self.iou, iou_threshold)
            else:
                parts, rows = self._chosen_from
                self._matches[key] = parts[by_label].match(rows, iou_threshold)
        return self._matches[key]

    def of(self, objects: Sequence[Object]) -> "Overlaps":
        """Those of an answer with other objects; looked up if all are among these or the true ones."""
        found, (pool, parts, row_of) = Overlaps(objects, self.truth), self._pool
        if row_of.keys() >= set(objects):
            rows = np.array([row_of[obj] for obj in objects], dtype=np.int64)
            found.iou, found.labelled, found.mutual = pool.iou[rows], pool.labelled[rows], pool.mutual[rows][:, rows]
            if len(self.predicted) >= MIN_POOLED:
                found._chosen_from = parts, rows
        return found


class _Parts:
    """`match` of many choices among the same predictions: with or without an object, most pairs stay. Predictions that
    no chain of overlaps links do not change each other's pairs, so each part is solved once for what is chosen of it.

    Args:
        iou: float `[num_pred, num_gt]`.
    """

    def __init__(self, iou: np.ndarray) -> None:
        self._iou = iou
        self._parts: dict[float, tuple[list[int], list[np.ndarray]]] = {}  # part of each row, or -1; columns of each
        self._pairs: dict[tuple[float, tuple[int, ...]], list[tuple[int, int]]] = {}  # (place among the rows, column)

    def match(self, rows: np.ndarray, iou_threshold: float) -> list[tuple[int, int]]:
        """`match(iou[rows], iou_threshold)`."""
        part_of, columns = self._split(iou_threshold)
        chosen: dict[int, list[int]] = {}
        listed = rows.tolist()
        for place, row in enumerate(listed):
            if part_of[row] >= 0:
                chosen.setdefault(part_of[row], []).append(place)
        found = []
        for part, places in chosen.items():
            key = iou_threshold, tuple([listed[place] for place in places])
            if key not in self._pairs:
                block = self._iou[np.ix_(key[1], columns[part])]
                self._pairs[key] = [(at, int(columns[part][g])) for at, g in match(block, iou_threshold)]
            found += [(places[at], g) for at, g in self._pairs[key]]
        return sorted(found)

    def _split(self, iou_threshold: float) -> tuple[list[int], list[np.ndarray]]:
        if iou_threshold not in self._parts:
            part_of, columns = np.full(len(self._iou), -1), list[np.ndarray]()
            for rows, cols in components(self._iou >= iou_threshold - TOLERANCE):
                part_of[rows] = len(columns)
                columns.append(cols)
            self._parts[iou_threshold] = part_of.tolist(), columns
        return self._parts[iou_threshold]


def count_sample(
    parsed: ParsedAnswer,
    gt_objects: Sequence[Object],
    iou_threshold: float,
    truncated: bool,
    annotated: Collection[str] | None = None,
    overlaps: Overlaps | None = None,
) -> Counter[str]:
    """Counts of one answer; counts of many samples (and ranks) add up. Objects are matched one to one at the threshold,
    once by geometry alone and once among pairs with equal label. `gated` predictions overlap some object, but none by
    the threshold.

    Args:
        annotated: the labels for which annotation is complete, as `label_of` gives them; None: all. Unmatched
            predictions of other labels count as `neutral` (TGT-12), and are no duplicates.
        overlaps: of these objects, where they are known already.
    """
    pred_objects = parsed.pred_objects
    overlaps = overlaps or Overlaps(pred_objects, gt_objects)
    iou, labelled = overlaps.iou, overlaps.matches(iou_threshold)
    held = [p for p, obj in enumerate(pred_objects) if is_wrong_if_unmatched(obj, annotated)]
    pairs = match_by_geometry(overlaps, iou_threshold, annotated)
    best = iou.max(axis=1, initial=0.0)
    counts: Counter[str] = Counter(
        num_images=1,
        num_pred=len(pred_objects),
        num_gt=len(gt_objects),
        matched=len(labelled),
        matched_no_label=len(pairs),
        parsed=int(parsed.is_whole and not truncated),  # between two objects, tags look whole wherever they end
        truncated=int(truncated),
        gated=int(((best > 0) & (best < iou_threshold - TOLERANCE)).sum()),
        duplicates=len(repeated(overlaps.mutual, [p for p, _ in labelled], DUPLICATE_IOU).intersection(held)),
        **{f"dropped/{reason}": number for reason, number in parsed.dropped.items()},
    )
    if annotated is not None:
        neutral = set(range(len(pred_objects))) - set(held)
        counts["neutral"] = len(neutral - {p for p, _ in labelled})
        counts["neutral_no_label"] = len(neutral - {p for p, _ in pairs})
    counts["iou_sum"] = float(sum(iou[p, g] for p, g in pairs))  # type: ignore[assignment]  # Counter: int by its stub
    return counts


def match_by_geometry(
    overlaps: Overlaps, iou_threshold: float, annotated: Collection[str] | None
) -> list[tuple[int, int]]:
    """`match` by geometry, in ascending order of predictions. A neutral one (TGT-12) takes nobody's object: it gets
    what is left by those that are held against the model or have the right label."""
    right = {p for p, _ in overlaps.matches(iou_threshold)}
    goes_first = [p in right or is_wrong_if_unmatched(obj, annotated) for p, obj in enumerate(overlaps.predicted)]
    if all(goes_first):
        return overlaps.matches(iou_threshold, by_label=False)
    is_first = np.array(goes_first, dtype=bool)[:, None]
    pairs = match(np.where(is_first, overlaps.iou, 0.0), iou_threshold)
    left = np.where(is_first, 0.0, overlaps.iou)
    left[:, [g for _, g in pairs]] = 0.0
    return sorted(pairs + match(left, iou_threshold))


def count_evaluation(
    parsed: ParsedAnswer,
    sample: "Sample",
    iou_threshold: float,
    truncated: bool,
    failed: bool = False,
) -> Counter[str]:
    """`count_sample`, and what evaluations report besides (LRN-9): matches at each of COCO's thresholds, the counting
    error, giant boxes, and the counts of each label as `label/NAME/...`. `failed`: the request got no answer, which
    the scores cannot tell from an empty one."""
    predicted, truth = parsed.pred_objects, sample.objects
    overlaps = Overlaps(predicted, truth)
    counts = count_sample(parsed, truth, iou_threshold, truncated, sample.annotated, overlaps)
    pred_labels, gt_labels = list(map(label_of, predicted)), list(map(label_of, truth))
    counted = [is_wrong_if_unmatched(obj, sample.annotated) for obj in predicted]
    for threshold in IOUS:
        pairs = overlaps.matches(threshold)
        counts[f"matched@{threshold}"] = len(pairs)
        counts[f"num_pred@{threshold}"] = len({p for p, _ in pairs} | set(np.flatnonzero(counted).tolist()))
    matched = {p for p, _ in overlaps.matches(iou_threshold)}
    for p, label in enumerate(pred_labels):
        counts[f"label/{label}/num_pred"] += int(p in matched or counted[p])
        counts[f"label/{label}/matched"] += int(p in matched)
    for label in gt_labels:
        counts[f"label/{label}/num_gt"] += 1
    counts["counting_error"] = abs(counts["num_pred"] - counts["neutral"] - len(truth))
    counts["giant"] = count_giants(overlaps, sample, iou_threshold)
    counts["failed"] = int(failed)
    return counts


def labelled_iou(predicted: Sequence[Object], truth: Sequence[Object], iou: np.ndarray | None = None) -> np.ndarray:
    """IoU of each pair, 0 where labels differ; float64 `[num_pred, num_gt]`. `iou`: without regard to labels."""
    iou = iou_matrix(predicted, truth) if iou is None else iou
    ours, theirs = (np.array(list(map(label_of, objects)), dtype=object) for objects in (predicted, truth))
    return np.where(ours[:, None] == theirs[None, :], iou, 0.0)


def evaluation_scores(counts: Mapping[str, float], new_labels: Collection[str] = ()) -> dict[str, float]:
    """`scores`, and those of LRN-9: F1, precision and recall at IoU 0.5, 0.75 and 0.95 and as their mean over 0.5:0.95,
    the mean absolute counting error, duplicates per image, the share of giant boxes; and the number of failed requests.
    With `new_labels`, F1 of these (`f1_new`) and of all others (`f1_old`), where there are any."""
    count = defaultdict[str, float](int, counts)
    result, images = scores(counts), max(count["num_images"], 1)
    at = {t: _ratios(count[f"num_pred@{t}"], count["num_gt"], count[f"matched@{t}"]) for t in IOUS}
    for i, name in enumerate(("precision", "recall", "f1")):
        result |= {f"{name}_{round(100 * threshold)}": at[threshold][i] for threshold in (0.5, 0.75, 0.95)}
        result[f"{name}_mean"] = float(np.mean([ratios[i] for ratios in at.values()]))
    result["counting_error"] = count["counting_error"] / images
    result["duplicates_per_image"] = count["duplicates"] / images
    result["giant_rate"] = count["giant"] / max(count["num_pred"] - count["neutral"], 1)
    result["failed"] = count["failed"]
    if new_labels:
        wanted, table = set(map(normal_label, new_labels)), label_counts(counts)
        for name, is_new in (("f1_old", False), ("f1_new", True)):
            rows = [row for label, row in table.items() if (label in wanted) == is_new]
            sums = [sum(row[key] for row in rows) for key in ("num_pred", "num_gt", "matched")]
            result |= {name: _ratios(*sums)[2]} if rows else {}
    return result


def label_counts(counts: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Of each label `num_gt`, `num_pred`, `matched`, `precision`, `recall` and `f1`, the most frequent one first.

    Labels that neutral predictions alone have are left out.
    """
    found: Mapping[str, dict[str, float]] = defaultdict(lambda: {"num_gt": 0, "num_pred": 0, "matched": 0})
    for key, number in counts.items():
        if key.startswith("label/"):
            label, name = key.removeprefix("label/").rsplit("/", 1)
            found[label][name] = number
    found = {label: row for label, row in found.items() if row["num_gt"] or row["num_pred"]}
    for row in found.values():
        ratios = _ratios(row["num_pred"], row["num_gt"], row["matched"])
        row |= dict(zip(("precision", "recall", "f1"), ratios, strict=True))
    return dict(sorted(found.items(), key=lambda item: (-item[1]["num_gt"], item[0])))


def _ratios(num_pred: float, num_gt: float, matched: float) -> tuple[float, float, float]:
    """Precision, recall and F1. Nothing predicted and nothing there is an F1 of 1; precision and recall, which have
    nothing to count then, are 0."""
    f1 = 2 * matched / (num_pred + num_gt) if num_pred + num_gt else 1.0
    return matched / max(num_pred, 1), matched / max(num_gt, 1), f1


def count_giants(overlaps: Overlaps, sample: "Sample", iou_threshold: float) -> int:
    """Number of predictions that cover nearly the whole image where no true object does (LRN-9): neither a matched nor
    a neutral one (TGT-12), and none at all if a true object is giant."""
    if any(is_giant(obj, sample.grid) for obj in sample.objects):
        return 0
    giants = [p for p, obj in enumerate(overlaps.predicted) if is_giant(obj, sample.grid)]
    matched = {p for p, _ in overlaps.matches(iou_threshold)} if giants else set()
    return sum(p not in matched and is_wrong_if_unmatched(overlaps.predicted[p], sample.annotated) for p in giants)


def is_giant(obj: Object, grid: Grid) -> bool:
    """Whether a box covers nearly the whole image (LRN-9)."""
    x1, y1, x2, y2 = bounding_box(obj)
    return (x2 - x1) * (y2 - y1) > GIANT_SHARE * grid[0] * grid[1]


def confidences(parsed: ParsedAnswer, logprobs: Sequence[float] | None) -> list[float] | None:
    """Confidence of each predicted object in [0, 1] (TGT-14): the geometric mean of the probabilities of its label's
    and its coordinates' tokens. None where the engine reported no log-probabilities.

    Args:
        logprobs: one per generated token.
    """
    if logprobs is None:
        return None
    values = np.asarray(logprobs, dtype=np.float64)
    found = []
    for pred in parsed.objects:
        spans = [(start, end - 1) for start, end in (pred.desc_bytes, *pred.coord_bytes)]
        own = np.union1d(np.flatnonzero(touched(parsed.prefix_ends, spans)), pred.coord_index).astype(int)
        own = np.unique(np.minimum(own, parsed.num_exact))  # however many tokens spell the one at the cut anew
        found.append(min(float(np.exp(values[own].mean())), 1.0))
    return found


def count_duplicates(objects: Sequence[Object], iou_threshold: float = DUPLICATE_IOU) -> int:
    """Number of objects that repeat an earlier one of the same answer: same label, nearly the same place."""
    return len(repeated(labelled_iou(objects, objects), [], iou_threshold))


def repeated(mutual: np.ndarray, matched: Sequence[int], iou_threshold: float) -> set[int]:
    """Unmatched objects that overlap a matched or an earlier one by the threshold; `mutual` `[n, n]` as
    `Overlaps.mutual`."""
    near = mutual >= iou_threshold - TOLERANCE
    found = np.flatnonzero(np.tril(near, k=-1).any(axis=1) | near[:, list(matched)].any(axis=1))
    return set(found.tolist()).difference(matched)


def scores(counts: Mapping[str, float]) -> dict[str, float]:
    """Ratios of summed counts: f1, precision, recall (with label), the same without label, mean IoU, parse health."""
    count = defaultdict[str, float](int, counts)
    images = max(count["num_images"], 1)
    result: dict[str, float] = {"num_images": count["num_images"]}
    for suffix in ("", "_no_label"):
        ratios = _ratios(count["num_pred"] - count[f"neutral{suffix}"], count["num_gt"], count[f"matched{suffix}"])
        result |= {f"{name}{suffix}": ratio for name, ratio in zip(("precision", "recall", "f1"), ratios, strict=True)}
    result["mean_iou"] = count["iou_sum"] / max(count["matched_no_label"], 1)
    result["parse_rate"] = count["parsed"] / images
    result["truncated_rate"] = count["truncated"] / images
    result["duplicate_rate"] = count["duplicates"] / max(count["num_pred"] - count["neutral"], 1)
    return result


def prediction_record(
    sample: "Sample",
    parsed: ParsedAnswer,
    logprobs: Sequence[float] | None = None,
    response: str | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    """A validation answer as a JSON record; coordinates norm1000 (0..999), whatever the answer's own grid is. With the
    answer's `logprobs` predictions have a `score`, their confidence (TGT-14). Where annotation is not complete for all
    labels, `annotated` names those for which it is (TGT-12). `width` and `height` are those of the first image;
    `parsed` says whether all of the answer was read.

    Args:
        response: the answer's whole text, which shows why it does not parse; kept with `finish_reason` if given.
    """
    sides = {"gt": sample.objects, "pred": parsed.pred_objects}
    objects = {side: [object_record(obj, sample.grid) for obj in objects] for side, objects in sides.items()}
    for record, score in zip(objects["pred"], confidences(parsed, logprobs) or [], strict=False):
        record["score"] = round(score, 6)
    annotated = {} if sample.annotated is None else {"annotated": sorted(sample.annotated)}
    size = dict(zip(("width", "height"), sample.size_px, strict=True))
    written = {} if response is None else {"response": response, "finish_reason": finish_reason}
    return {
        "id": sample.id,
        "images": sample.images,
        **size,
        **objects,
        **annotated,
        "parsed": parsed.is_whole,
        **written,
    }


def object_record(obj: Object, grid: Grid) -> dict[str, Any]:
    """An object on its image's grid as JSON values, norm1000."""
    return {"desc": obj.desc, obj.kind: list(to_norm1000(obj, grid).coords)}


def label_of(object_: Object) -> str:
    """The label as it is compared (LRN-7)."""
    return normal_label(object_.desc)


def is_wrong_if_unmatched(prediction: Object, annotated: Collection[str] | None) -> bool:
    """Whether a prediction that matches nothing is wrong. If annotation is not complete for its label, it is neutral.

    `annotated` are labels as `label_of` gives them; None: all (TGT-12)."""
    return annotated is None or label_of(prediction) in annotated
