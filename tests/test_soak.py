"""What counts as creeping in `make soak`."""

import pytest

from tools.soak import judge

MB = 1e6


def run_of(pss: list[float], fds: list[int], seconds: list[float]) -> list[str]:
    samples = [{"learner": {"pss": p, "fds": f}} for p, f in zip(pss, fds, strict=True)]
    return judge(samples, seconds)[1]


def ramp(start: float, end: float, num: int = 100) -> list[float]:
    return [start + (end - start) * index / (num - 1) for index in range(num)]


FLAT = [300 * MB] * 100, [20] * 100, [1.0] * 100


def test_a_warm_up_and_noise_are_no_creeping():
    """Memory that grows in the first quarter, slow steps by chance, and 5 % of much memory."""
    pss = ramp(100 * MB, 2000 * MB, 25) + ramp(2000 * MB, 2080 * MB, 75)
    seconds = [1.0, 1.02, 9.0, 1.01] * 25
    assert run_of(pss, [20, 21] * 50, seconds) == []


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        (0, "learner: pss grew from"),
        (1, "learner: fds grew from"),
        (2, "steps took 1.1"),
    ],
)
def test_what_creeps_is_named(spoilt, words):
    """64 MB of little memory are too much, and so are three file descriptors, and steps a third slower."""
    run = list(FLAT)
    run[spoilt] = [ramp(300 * MB, 420 * MB), [round(fds) for fds in ramp(20, 30)], ramp(1.0, 1.6)][spoilt]
    (problem,) = run_of(*run)
    assert problem.startswith(words)
