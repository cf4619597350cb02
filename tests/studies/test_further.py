"""Scores on further test images: what their intervals cover."""

import json

import numpy as np
import pytest
from scipy.stats import sem, t, ttest_ind

from studies import further
from studies.further import PARTS


def run(counts: np.ndarray) -> dict:
    """A record with counts `[PARTS, 3]`."""
    return {"further": {"images": 10 * PARTS, "counts": counts.tolist()}}


def drawn(rng: np.random.Generator, f1: float, num_seeds: int, of_images: np.ndarray) -> list[dict]:
    """Runs with 100 objects in each part, which differ by seed, and by part as all runs do."""
    runs = []
    for _ in range(num_seeds):
        right = 100 * (f1 + of_images + rng.normal(0, 0.004) + rng.normal(0, 0.01, PARTS))
        runs.append(run(np.stack([right, np.full(PARTS, 100.0), np.full(PARTS, 100.0)], axis=1)))
    return runs


def test_f1_is_over_all_images_and_the_parts_are_the_same_for_all_runs(tmp_path):
    """By hand: the first image's object is found twice, the second's has another label, all others are right."""
    box = {"desc": "red ring", "bbox_2d": [100, 100, 300, 300]}
    answers = [[box, box], [box | {"desc": "blue ring"}], *[[box]] * 64]
    lines = [json.dumps({"id": str(at), "gt": [box], "pred": pred}) for at, pred in enumerate(answers)]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines) + "\n")
    found = further.count_parts(tmp_path / "answers.jsonl")
    assert found["images"] == 66 and len(found["counts"]) == PARTS
    assert found["counts"][0] == [2, 4, 3] and found["counts"][-1] == [2, 2, 2]  # 66 images: three in each of two parts
    assert further.f1([{"further": found}]) == [pytest.approx(2 * 65 / (67 + 66))]


def test_images_that_are_hard_for_both_sides_do_not_widen_the_interval():
    rng = np.random.default_rng(1)
    alike, hard = np.zeros(PARTS), rng.normal(0, 0.1, PARTS)
    width = []
    for of_images in (alike, hard):
        rng = np.random.default_rng(2)
        _, low, high = further.difference(drawn(rng, 0.82, 5, of_images), drawn(rng, 0.8, 5, of_images))
        width.append(high - low)
    assert width[0] == pytest.approx(width[1], rel=1e-6)


def test_the_interval_covers_seeds_and_images():
    """Of 400 studies drawn anew, seeds and images, the interval holds the true difference in 95 % at least, where each
    source alone would not do; it is not much too wide."""
    rng = np.random.default_rng(3)
    held, sides = 0, []
    for _ in range(400):
        own = rng.normal(0, 0.03, PARTS)  # what ours gain or lose on these images, whatever the seed
        ours, theirs = drawn(rng, 0.82, 5, own), drawn(rng, 0.8, 5, np.zeros(PARTS))
        value, low, high = further.difference(ours, theirs)
        held += low <= 0.02 <= high
        sides.append((value, (high - low) / 2))
    spread, half = np.std([value for value, _ in sides]), np.mean([half for _, half in sides])
    assert held >= 0.94 * 400
    assert 1.9 * spread < half < 2.6 * spread


def test_each_source_alone_has_the_field_s_own_interval():
    """Seeds alone are Welch's test; the parts alone, the jackknife with one degree of freedom less than parts."""
    right = (80.0, 82.0, 87.0), (75.0, 76.0)
    ours, theirs = ([run(np.tile([own, 100.0, 100.0], (PARTS, 1))) for own in side] for side in right)
    values = [further.f1(side) for side in (ours, theirs)]
    welch = ttest_ind(*values, equal_var=False).confidence_interval(0.95)
    assert further.difference(ours, theirs)[1:] == pytest.approx((welch.low, welch.high))
    rng = np.random.default_rng(5)
    one, other = (drawn(rng, f1, 1, np.zeros(PARTS)) for f1 in (0.82, 0.8))
    gaps = np.array(further.counts_of(one) - further.counts_of(other))[0, :, 0] / 100
    value, low, high = further.difference(one, other)
    assert (value, high) == pytest.approx((gaps.mean(), gaps.mean() + t.ppf(0.975, PARTS - 1) * sem(gaps)))


def test_a_single_model_adds_no_variance_of_seeds():
    """The start model has one run; its images still count."""
    rng = np.random.default_rng(4)
    start, ours = drawn(rng, 0.8, 1, np.zeros(PARTS)), drawn(rng, 0.82, 5, np.zeros(PARTS))
    value, low, high = further.difference(ours, start)
    assert low < value < high
    assert further.difference(start, start) == (0.0, 0.0, 0.0)
