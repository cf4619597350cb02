"""utils.matching against brute force over all pairings, with many exact ties (TGT-4)."""

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest

from utils.matching import match


def brute_force(iou: list[list[Fraction]], threshold: Fraction) -> list[tuple[int, int]]:
    """The lexicographically first pairing of largest sum, in exact arithmetic: unmatched sorts behind every column."""
    num_pred, num_gt = len(iou), len(iou[0])
    best_key, best = None, []
    for columns in itertools.product(range(num_gt + 1), repeat=num_pred):
        used = [g for g in columns if g < num_gt]
        if len(set(used)) < len(used) or any(iou[p][g] < threshold for p, g in enumerate(columns) if g < num_gt):
            continue
        total = sum((iou[p][g] for p, g in enumerate(columns) if g < num_gt), Fraction(0))
        key = (-total, columns)
        if best_key is None or key < best_key:
            best_key, best = key, [(p, g) for p, g in enumerate(columns) if g < num_gt]
    return best


def as_floats(iou: list[list[Fraction]]) -> np.ndarray:
    return np.array([[float(value) for value in row] for row in iou])


@pytest.mark.parametrize("levels", [2, 3, 10, 1000], ids=lambda n: f"{n}-levels")
def test_tgt_4_equals_brute_force_with_exact_ties(levels: int) -> None:
    """TGT-4: few distinct values make nearly every case a tie of several optimal pairings."""
    rng = random.Random(levels)
    for _ in range(700):
        num_pred, num_gt = rng.randint(1, 4), rng.randint(1, 4)
        iou = [[Fraction(rng.randint(0, levels), levels) for _ in range(num_gt)] for _ in range(num_pred)]
        threshold = Fraction(rng.choice([0, 3, 5]), 10)
        assert match(as_floats(iou), float(threshold)) == brute_force(iou, threshold), (iou, threshold)


def test_tgt_4_sums_that_differ_only_by_rounding_are_ties() -> None:
    """TGT-4: 0.5 + 0.7 = 0.6 + 0.6 exactly, though not in float64; the earlier prediction takes the earlier object."""
    assert 0.1 + 0.7 != 0.2 + 0.6
    for a, b, c, d in [(0.5, 0.7, 0.6, 0.6), (0.6, 0.6, 0.5, 0.7), (0.1, 0.7, 0.2, 0.6), (0.2, 0.6, 0.1, 0.7)]:
        assert match(np.array([[a, c], [d, b]]), 0.1) == [(0, 0), (1, 1)]


def test_tgt_4_rational_ties_equal_brute_force() -> None:
    """TGT-4: IoUs are fractions with odd denominators; ties between different fractions are found all the same."""
    rng = random.Random(3)
    values = [Fraction(1, 3), Fraction(2, 3), Fraction(1, 2), Fraction(5, 6), Fraction(1, 6), Fraction(1, 1)]
    for _ in range(700):
        iou = [[rng.choice(values) for _ in range(rng.choice([3, 4]))] for _ in range(3)]
        iou = [row[: min(map(len, iou))] for row in iou]
        assert match(as_floats(iou), 1 / 3) == brute_force(iou, Fraction(1, 3)), iou


def test_tgt_4_best_sum_beats_best_pair() -> None:
    """TGT-4: greedy would take 0.9 alone and leave 0.6 + 0.8 behind."""
    assert match(np.array([[0.9, 0.8], [0.6, 0.0]]), 0.5) == [(0, 1), (1, 0)]


def test_tgt_4_earlier_prediction_wins_the_only_object() -> None:
    """TGT-4."""
    assert match(np.array([[0.7], [0.7], [0.7]]), 0.5) == [(0, 0)]
    assert match(np.array([[0.7, 0.7, 0.7]]), 0.5) == [(0, 0)]
    assert match(np.array([[0.7], [0.8], [0.8]]), 0.5) == [(1, 0)]


def test_tgt_4_pairs_below_the_threshold_are_never_used() -> None:
    """TGT-4: one pair at 0.5 is used, four at 0.49 are not; exactly at the threshold counts."""
    assert match(np.array([[0.49, 0.5], [0.49, 0.49]]), 0.5) == [(0, 1)]
    assert match(np.array([[3 / 5]]), 0.6) == [(0, 0)]


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_tgt_4_empty_sides(shape: tuple[int, int]) -> None:
    """TGT-4."""
    assert match(np.zeros(shape), 0.5) == []


def test_tgt_4_large_cases_are_optimal_and_quick() -> None:
    """TGT-4: 200 identical predictions over 20 identical objects, the shape of a collapsed answer."""
    assert match(np.full((200, 20), 0.8), 0.5) == [(i, i) for i in range(20)]
    assert match(np.full((20, 200), 0.8), 0.5) == [(i, i) for i in range(20)]
    reverse = np.tile(np.linspace(0.9, 0.8, 30), (300, 1))
    assert match(reverse, 0.5) == [(i, i) for i in range(30)]
