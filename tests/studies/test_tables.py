"""Values from records: means, their spread and intervals."""

import math
import statistics

import pytest
from scipy.stats import t as student

from studies import tables


def test_spread_and_interval_against_welchs_formula():
    ours, theirs = [0.60, 0.62, 0.67], [0.50, 0.55, 0.51]
    assert tables.spread(ours) == "0.630 ± 0.036"
    assert tables.spread([0.5]) == "0.500"
    a, b = statistics.variance(ours) / 3, statistics.variance(theirs) / 3
    freedom = (a + b) ** 2 / (a**2 / 2 + b**2 / 2)
    half = student.ppf(0.975, freedom) * math.sqrt(a + b)
    delta = statistics.fmean(ours) - statistics.fmean(theirs)
    assert tables.interval(ours, theirs) == pytest.approx((delta - half, delta + half))
    assert tables.interval([0.5], theirs) is None


def test_the_last_step_counts_by_number_not_by_spelling():
    run = {"scores": {"0": {"f1": 0.4}, "9": {"f1": 0.45}, "80": {"f1": 0.7}}}
    assert tables.last([run], "f1") == [0.7]  # "9" sorts after "80" as text
