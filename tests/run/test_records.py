"""utils.run.records: seconds by part."""

import itertools
import threading
import time

import pytest

from utils.run.records import Timer


def test_threads_in_one_part_at_the_same_time_count_once_LOG_3():
    """LOG-3: micro-steps generate side by side, so the seconds of rollouts never exceed those that pass."""
    timer, begun = Timer(), threading.Barrier(4)

    def generate() -> None:
        with timer.timed("rollout"):
            begun.wait(10)
            time.sleep(0.1)

    threads = [threading.Thread(target=generate) for _ in range(4)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.1 <= timer.pop()["rollout"] <= time.monotonic() - start
    assert timer.pop() == {"rollout": 0.0}


def test_a_part_that_begins_while_seconds_are_read_waits_LOG_3():
    """LOG-3: threads prepare the next step meanwhile; the error would come on one rank alone."""
    timer, over = Timer(), threading.Event()

    def begin_parts() -> None:
        for number in itertools.count():
            if over.is_set():
                return
            with timer.timed(f"part {number % 5000}"):
                pass

    thread = threading.Thread(target=begin_parts)
    thread.start()
    try:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            timer.pop()
    finally:
        over.set()
        thread.join()


def test_a_part_that_failed_is_over_LOG_3():
    timer = Timer()
    with pytest.raises(KeyError), timer.timed("rollout"):
        raise KeyError
    seconds = timer.pop()["rollout"]
    time.sleep(0.5)
    with timer.timed("rollout"):
        pass
    assert seconds < 0.4 and timer.pop()["rollout"] < 0.4
