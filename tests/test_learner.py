"""The learning-rate schedule, a function of the step alone."""

from types import SimpleNamespace

import pytest

from utils.learner import lr_factor


def schedule(kind: str, warmup_steps: int = 2, low: float = 0.1) -> SimpleNamespace:
    return SimpleNamespace(lr_scheduler=kind, warmup_steps=warmup_steps, min_lr_ratio=low)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_warm_up_is_linear_and_reaches_the_peak_CFG_17(kind):
    """CFG-17."""
    assert [lr_factor(step, 12, schedule(kind)) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]


def test_decay_by_hand_CFG_17():
    """CFG-17."""
    assert lr_factor(7, 12, schedule("linear")) == pytest.approx(0.1 + 0.9 * 0.5)
    assert lr_factor(7, 12, schedule("cosine")) == pytest.approx(0.1 + 0.9 * 0.5)
    assert lr_factor(12, 12, schedule("cosine")) == pytest.approx(0.1)
    assert lr_factor(11, 12, schedule("constant")) == 1.0
