"""Credit of an answer's objects and decisions (GRP-8).

S is an answer's valid objects, R(S) the rewards of an answer with these objects. An object earns R(S) - R(S without
it). An object is judged as if nobody had repeated it: S without the repeats of others, else two right copies would
blame each other. A repeat is judged in S, and so earns less than 0. Only the rewards of `detection_rewards.OF_OBJECTS`
are a function of S; all others count in full for every decision.

Each scored token belongs to one decision of its answer: an object, with label and coordinates; to go on to an object,
the tokens that begin it; to close, with the stop token; or to the rest, a header or malformed text. `utils.grpo` makes
advantages of what objects earn.

A neutral object (TGT-12) decides nothing: measured against objects that found something, its 0 would count as a fault.
Its tokens are rest, or go on where they lead to a later object that counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from utils.detection_rewards import OF_OBJECTS, repeats
from utils.geometry import bounding_box
from utils.matching import TOLERANCE, match
from utils.rewards import Completion, RewardFunction, score
from utils.scores import Overlaps, is_wrong_if_unmatched
from utils.token_table import touched

if TYPE_CHECKING:
    from utils.data.samples import Sample
    from utils.geometry import Object

REST = 0  # decision of an answer's other tokens
BACKGROUND_IOU = 0.1  # from there on a prediction is an attempt at a true object; TIDE's name and value


def object_decision(k: int) -> int:
    return 2 * k + 1


def go_on_decision(k: int) -> int:
    """To go on to object k."""
    return 2 * k + 2


def close_decision(num_objects: int) -> int:
    return 2 * num_objects + 1


@dataclass
class Credit:
    """What one answer's objects earned, and might have. K objects count, T are true, F reward functions, N tokens.

    Attributes:
        earned: float64 `[K, F]`, by each object, in the order of the answer; 0 for rewards that do not read objects.
        possible: float64 `[T, F]`, what each true object, said exactly, would earn in place of this answer's attempt at
            it, or besides.
        truths: int64 `[K]`, the true object that each is an attempt at, whatever its label; -1 for none.
        corners: float64 `[K, 2]`, y and x of their upper left corners, in bins.
        true_corners: float64 `[T, 2]`, those of the true objects.
        apart: float64 `[F]`, the answer's rewards that do not read objects, 0 for the others.
        decisions: int64 `[N]`, the decision that each scored token belongs to: `REST`, `object_decision`,
            `go_on_decision` or `close_decision`.
    """

    earned: np.ndarray
    possible: np.ndarray
    truths: np.ndarray
    corners: np.ndarray
    true_corners: np.ndarray
    apart: np.ndarray
    decisions: np.ndarray

    @property
    def num_decisions(self) -> int:
        return close_decision(len(self.truths)) + 1


def credit_of(
    completion: Completion,
    sample: Sample,
    rewards: Mapping[str, RewardFunction],
    own: np.ndarray,
    num_tokens: int,
) -> Credit:
    """Split an answer's rewards among its decisions.

    Args:
        own: float64 `[F]`, the answer's rewards.
        num_tokens: scored tokens, a stop token included.

    Raises:
        RewardError: as `utils.rewards.score`.
    """
    of_objects = {name: function for name, function in rewards.items() if function in OF_OBJECTS}
    reads_objects = np.array([name in of_objects for name in rewards])
    predicted = completion.parsed.pred_objects
    truths, again = attempts_without_repeats(completion, sample)
    everything = set(range(len(predicted)))
    judged = everything - again

    def worth(indices: set[int], *more: Object) -> np.ndarray:
        made = np.zeros(len(rewards))
        held = completion.holding([*(predicted[index] for index in sorted(indices)), *more])
        made[reads_objects] = score(held, sample, of_objects)
        return made

    whole, without = worth(everything), {index: worth(judged - {index}) for index in judged}
    alone = worth(judged)
    earned = [whole - worth(everything - {i}) if i in again else alone - without[i] for i in sorted(everything)]
    attempt = {truth: index for index, truth in enumerate(truths.tolist()) if truth >= 0}
    possible = []
    for truth, obj in enumerate(sample.objects):
        index = attempt.get(truth)
        rest, base = (judged, alone) if index is None else (judged - {index}, without[index])
        possible.append(worth(rest, obj) - base)
    counted = [
        index
        for index, obj in enumerate(predicted)
        if is_wrong_if_unmatched(obj, sample.annotated) or not np.allclose(earned[index], 0)  # or some reward counts it
    ]
    return Credit(
        np.array(earned).reshape(-1, len(rewards))[counted],
        np.array(possible).reshape(-1, len(rewards)),
        truths[counted],
        _corners(predicted)[counted],
        _corners(sample.objects),
        np.where(reads_objects, 0.0, own),
        _without_neutral(len(predicted), counted)[token_decisions(completion, num_tokens)],
    )


def _corners(objects: Sequence[Object]) -> np.ndarray:
    """y and x of the upper left corners, float64 `[n, 2]`: they sort as objects are read."""
    return np.array([bounding_box(obj)[1::-1] for obj in objects], dtype=np.float64).reshape(-1, 2)


def attempts_without_repeats(completion: Completion, sample: Sample) -> tuple[np.ndarray, set[int]]:
    """`attempts`, with -1 for the predictions that say an object again, and these: the duplicates, and what lies by
    `iou_threshold` on a true object that another prediction is the attempt at, whatever the labels."""
    overlaps, threshold = completion.overlaps(sample), completion.iou_threshold
    truths = attempts(overlaps, threshold, sample.annotated)
    lies_on_one = (overlaps.iou[:, truths[truths >= 0]] >= threshold - TOLERANCE).any(axis=1)
    again = repeats(completion, sample) | set(np.flatnonzero((truths < 0) & lies_on_one).tolist())
    truths[sorted(again)] = -1
    return truths, again


def attempts(overlaps: Overlaps, iou_threshold: float, annotated: Collection[str] | None = None) -> np.ndarray:
    """The true object that each prediction is an attempt at, or -1; int64 `[num_pred]`. First come the matches, then
    what overlaps an object that is left by `BACKGROUND_IOU`, whatever its label; neutral ones last."""
    found = np.full(len(overlaps.predicted), -1)
    for index, at in overlaps.matches(iou_threshold):
        found[index] = at
    held = np.array([is_wrong_if_unmatched(obj, annotated) for obj in overlaps.predicted], dtype=bool)
    for turn in (held, ~held):
        left, missed = np.flatnonzero((found < 0) & turn), np.setdiff1d(np.arange(len(overlaps.truth)), found)
        for row, column in match(overlaps.iou[np.ix_(left, missed)], BACKGROUND_IOU):
            found[left[row]] = missed[column]
    return found


def _without_neutral(num_objects: int, counted: Sequence[int]) -> np.ndarray:
    """For each decision of all objects the one of those that count, int64 `[2 num_objects + 2]`."""
    found = np.full(close_decision(num_objects) + 1, REST)
    found[-1] = close_decision(len(counted))
    before = 0  # the first object behind the last that counts
    for k, index in enumerate(counted):
        found[object_decision(index)] = object_decision(k)
        found[[go_on_decision(i) for i in range(before, index + 1)]] = go_on_decision(k)
        before = index + 1
    return found


def token_decisions(completion: Completion, num_tokens: int) -> np.ndarray:
    """The decision of each scored token, int64 `[num_tokens]`, as if all objects counted. A token that ends an object
    and goes on, or closes, belongs to that decision."""
    parsed, table = completion.parsed, completion.table
    assert table is not None, "`parsed` needs it"
    ids = table.until_stop(completion.token_ids)
    data, ends = table.scan_text(ids)
    found = np.full(num_tokens, REST)

    def assign(decision: int, start: int, end: int) -> None:
        found[: len(ids)][touched(ends, [(start, end - 1)])] = decision

    for k, pred in enumerate(parsed.objects):
        assign(object_decision(k), *pred.byte_span)
    for k, pred in enumerate(parsed.objects):
        start = pred.byte_span[0]
        assign(go_on_decision(k), pred.lead if k else start, start + 1)
    if parsed.closed:
        header, close = table.format.header.match(data), close_decision(len(parsed.objects))
        assert header is not None, "a closed answer has a header"
        start = len(parsed.prefix_bytes) or header.end()
        endings = (end.search(data, start) for end in table.format.ends)
        if not table.format.tags and data[start : (begin := min(end.start() for end in endings if end))].strip():
            start = begin  # behind malformed text
        assign(close, start, len(data))
        found[len(ids) :] = close
    return found
