"""Scores on further test images: many more than a run is scored on in training, so that the draw of images counts less.

A record's `further` are counts of matched (IoU 0.5, equal label), predicted and true objects, in parts of the images.
The parts are the same for all runs of a study, so that they tell how much a difference owes to which images were drawn.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t

from studies.tables import CONFIDENCE, Record
from tools.report_answers import objects_of
from utils.scores import Overlaps

PARTS = 32


def count_parts(answers: Path) -> dict[str, Any]:
    """Return a record's `further` from the answers that `tools.evaluate` wrote."""
    counts = []
    for line in answers.open():
        record = json.loads(line)
        predicted, true = objects_of(record["pred"]), objects_of(record["gt"])
        counts.append((len(Overlaps(predicted, true).matches(0.5)), len(predicted), len(true)))
    return {
        "images": len(counts),
        "counts": [part.sum(axis=0).tolist() for part in np.array_split(np.array(counts), PARTS)],
    }


def f1(records: Sequence[Record]) -> list[float]:
    """F1 of each run, over all its further test images."""
    return [float(_f1(counts_of([record]).sum(axis=1))[0]) for record in records]


def counts_of(records: Sequence[Record]) -> np.ndarray:
    """Counts of each run and part; float64 `[num_runs, PARTS, 3]`."""
    return np.array([record["further"]["counts"] for record in records], dtype=np.float64)


def difference(
    ours: Sequence[Record], theirs: Sequence[Record], confidence: float = CONFIDENCE
) -> tuple[float, float, float]:
    """Return the difference of mean F1 and its confidence interval, over seeds and over images.

    The variance is Welch's over the seeds of both sides, plus that over images by the jackknife, which leaves out one
    part at a time on both sides. Degrees of freedom follow Satterthwaite. The sum is a little too large, since seeds
    differ by image, too. A side with a single run adds no variance of seeds: it stands for that model only.
    """
    both = [counts_of(side) for side in (ours, theirs)]
    value, without = (_mean_difference(*(side.sum(axis=1) for side in both)), _without_each_part(*both))
    parts = [(float(np.var(without)) * (PARTS - 1), PARTS - 1)]
    parts += [(float(np.var(f1(side), ddof=1)) / len(side), len(side) - 1) for side in (ours, theirs) if len(side) > 1]
    variance = sum(own for own, _ in parts)
    freedom = variance**2 / sum(own**2 / degrees for own, degrees in parts) if variance else 1.0
    margin = float(t.ppf((1 + confidence) / 2, freedom)) * variance**0.5
    return value, value - margin, value + margin


def _without_each_part(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """The difference of mean F1 without each of the parts; float64 `[PARTS]`."""
    left = [side.sum(axis=1, keepdims=True) - side for side in (ours, theirs)]
    return np.array([_mean_difference(*(side[:, part] for side in left)) for part in range(PARTS)])


def _mean_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(_f1(ours).mean() - _f1(theirs).mean())


def _f1(counts: np.ndarray) -> np.ndarray:
    """F1 of counts `[num_runs, 3]`; float64 `[num_runs]`."""
    return 2 * counts[:, 0] / (counts[:, 1] + counts[:, 2])
