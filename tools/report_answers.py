"""Validation answers for `tools.report`: what went wrong in each, precision over recall, and which images to show.

A prediction that matches nothing is named as by TIDE (Bolya et al. 2020): it repeats an object (`duplicate`), lies on
one of another label (`wrong label`), lies near one of its own label (`badly placed`), or none of these (`extra`).
Matches are those of the scores (LRN-7). What annotation says nothing about is `not judged` (TGT-12).
"""

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from utils.credit import BACKGROUND_IOU
from utils.data.images import open_image
from utils.geometry import Object
from utils.matching import TOLERANCE
from utils.scores import DUPLICATE_IOU, Overlaps, is_wrong_if_unmatched

ERRORS = ("missed", "duplicate", "wrong label", "badly placed", "extra")
MAX_JPEG_BYTES = 48 << 10

Record = Mapping[str, Any]  # a line of eval/step_N.jsonl


@dataclass(frozen=True)
class Judged:
    """An answer's objects beside the ground truth's, each with its verdict: `found`, `not judged` or one of `ERRORS`.

    An object of the ground truth that a badly placed prediction or one of another label stands for has its verdict.
    """

    gt: list[tuple[Object, str]]
    pred: list[tuple[Object, str]]

    @property
    def errors(self) -> Counter[str]:
        """Number of errors of each kind."""
        missed = [verdict for _, verdict in self.gt if verdict == "missed"]
        return Counter([*missed, *(verdict for _, verdict in self.pred if verdict in ERRORS)])


def objects_of(records: Sequence[Record]) -> list[Object]:
    kinds = ("bbox_2d", "poly")
    return [Object(record["desc"], kind, tuple(record[kind])) for record in records for kind in kinds if kind in record]


def judge(record: Record, iou_threshold: float) -> Judged:
    """Name what is right and wrong in an answer."""
    gt, pred = objects_of(record["gt"]), objects_of(record["pred"])
    overlaps = Overlaps(pred, gt)
    found = dict(overlaps.matches(iou_threshold))
    repeats = np.triu(overlaps.mutual, k=1) >= DUPLICATE_IOU
    verdicts, stands_for = [], {g: "found" for g in found.values()}
    for p, obj in enumerate(pred):
        verdict, on = _verdict(overlaps.iou[p], overlaps.labelled[p], bool(repeats[:, p].any()), iou_threshold)
        if p in found:
            verdict, on = "found", None
        elif not is_wrong_if_unmatched(obj, record.get("annotated")):
            verdict, on = "not judged", None
        verdicts.append(verdict)
        if on is not None:
            stands_for.setdefault(on, verdict)
    truth = [(obj, stands_for.get(g, "missed")) for g, obj in enumerate(gt)]
    return Judged(truth, list(zip(pred, verdicts, strict=True)))


def _verdict(iou: np.ndarray, labelled: np.ndarray, repeats: bool, iou_threshold: float) -> tuple[str, int | None]:
    """The kind of error of a prediction without a match, and the object it stands for.

    `iou`: float64 `[num_gt]`, with each true object; `labelled`: the same, 0 where labels differ.
    """
    least = iou_threshold - TOLERANCE
    if repeats or (labelled >= least).any():  # its object has a match already
        return "duplicate", None
    if (iou >= least).any():
        return "wrong label", int(iou.argmax())
    return ("badly placed", int(labelled.argmax())) if (labelled >= BACKGROUND_IOU).any() else ("extra", None)


def precision_recall(records: Sequence[Record], iou_threshold: float) -> tuple[np.ndarray, np.ndarray] | None:
    """Precision and recall over falling confidence, float64 `[num_predictions]` each, all labels pooled.

    By COCO's rules: in an image the most confident prediction takes the best free object of its label first. None where
    predictions have no confidence (TGT-14) or there is nothing to find or nothing was predicted.
    """
    scores: list[float] = []
    hits: list[bool] = []
    num_gt = sum(len(record["gt"]) for record in records)
    for record in records:
        if any("score" not in pred for pred in record["pred"]):
            return None
        own = sorted(record["pred"], key=lambda pred: -pred["score"])
        gt, pred = objects_of(record["gt"]), objects_of(own)
        iou = Overlaps(pred, gt).labelled.copy()
        for p, obj in enumerate(pred):
            is_hit = bool(len(gt)) and bool(iou[p].max() >= iou_threshold - TOLERANCE)
            if is_hit:
                iou[:, iou[p].argmax()] = 0.0
            if is_hit or is_wrong_if_unmatched(obj, record.get("annotated")):
                scores.append(own[p]["score"])
                hits.append(is_hit)
    if not scores or not num_gt:
        return None
    matched = np.cumsum(np.array(hits)[np.argsort(-np.array(scores), kind="stable")])
    return matched / np.arange(1, len(matched) + 1), matched / num_gt


def choose(errors: Sequence[Counter[str]], num: int) -> list[int]:
    """Indices of up to `num` answers: in turn the worst of each kind of error and one without; worst first."""
    left = {kind: sorted(range(len(errors)), key=lambda i, k=kind: (-errors[i][k], i)) for kind in ERRORS}
    left = {kind: [i for i in order if errors[i][kind]] for kind, order in left.items()}
    left["right"] = [i for i, own in enumerate(errors) if not own.total()]
    chosen: dict[int, None] = {}
    while len(chosen) < num and any(left.values()):
        for order in left.values():
            while order and order[0] in chosen:
                order.pop(0)
            if order and len(chosen) < num:
                chosen[order.pop(0)] = None
    return sorted(chosen, key=lambda i: (-errors[i].total(), i))


def photo(source: str, side: int) -> tuple[int, int, str]:
    """Width and height to show an image in, the longer `side`, and the image as a JPEG data URI, of no more pixels and
    of the best quality within `MAX_JPEG_BYTES`. Raises OSError for an image that cannot be read."""
    image = open_image(source)
    width, height = (max(round(pixels * side / max(image.size)), 1) for pixels in image.size)
    image.thumbnail((side, side))
    for quality in (85, 60, 35, 10):
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        if buffer.tell() <= MAX_JPEG_BYTES:
            break
    return width, height, "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
