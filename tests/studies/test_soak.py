"""What counts as growth in `make soak`, and that the demos and soak leave no process behind."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from studies.soak import find_growth

MB = 1e6


def run_of(pss: list[float], fds: list[int], seconds: list[float]) -> list[str]:
    samples = [{"learner": {"pss": p, "fds": f}} for p, f in zip(pss, fds, strict=True)]
    return find_growth(samples, seconds)[1]


def ramp(start: float, end: float, num: int = 100) -> list[float]:
    return [start + (end - start) * index / (num - 1) for index in range(num)]


FLAT = [300 * MB] * 100, [20] * 100, [1.0] * 100


def test_a_warm_up_and_noise_are_no_growth():
    """Memory that grows in the first quarter, slow steps by chance, and less than 5 % of much memory."""
    pss = ramp(100 * MB, 2000 * MB, 25) + ramp(2000 * MB, 2080 * MB, 75)
    seconds = [1.0, 1.02, 9.0, 1.01] * 25
    assert run_of(pss, [20, 21] * 50, seconds) == []


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (0, "learner: pss grew from"),
        (1, "learner: fds grew from"),
        (2, "steps took 1.1"),
    ],
)
def test_growth_is_named(index, message):
    """More than 64 MB of little memory is too much, and so are three file descriptors, and steps a third slower."""
    run = list(FLAT)
    run[index] = [ramp(300 * MB, 420 * MB), [round(fds) for fds in ramp(20, 30)], ramp(1.0, 1.6)][index]
    (problem,) = run_of(*run)
    assert problem.startswith(message)


def test_a_demo_that_is_stopped_stops_what_it_started():
    """SRV-7: SIGTERM to the demo alone, as from `timeout`, leaves no process of the learner's."""
    code = "from tools import demo; demo.exit_on_sigterm(); demo.run(['sh', '-c', 'sleep 300 & echo up; wait'], {})"
    demo = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    children = []
    try:
        assert demo.stdout.readline() == "up\n"
        children = psutil.Process(demo.pid).children(recursive=True)
        assert len(children) == 2
        demo.terminate()
        assert demo.wait(10) == 1
        assert psutil.wait_procs(children, timeout=5)[1] == []
    finally:
        for process in (demo, *children):
            if process.pid in psutil.pids():
                process.kill()
