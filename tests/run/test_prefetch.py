"""Order, bounds and failures of preparing ahead (LRN-8), with asking and finishing under the test's hand."""

import threading
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.run.prefetch import Prefetcher

MICRO_STEPS = 2


@dataclass
class Engine:
    """What is asked, in order; `gate` holds the next question back, `errors` are raised by it."""

    asked: list = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    errors: list = field(default_factory=list)
    num_drawn: int = 0
    num_begun: int = 0  # questions, those at the gate included
    version: int = 0  # of the weights, which answers carry
    encode = None

    def draw(self) -> list[int]:
        self.num_drawn += 1
        return [self.num_drawn - 1]

    def generate(self, samples, step, micro_step_idx):
        self.num_begun += 1
        assert self.gate.wait(10)
        self.asked.append((step, micro_step_idx))
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        return samples, self.version

    def judge(self, answered, step):
        return *answered, step

    def lag(self, item, step):
        return 0


@pytest.fixture
def engine():
    engine = Engine()
    engine.gate.set()
    return engine


@pytest.fixture
def prefetch(engine):
    made = []

    def make(**options) -> Prefetcher:
        made.append(Prefetcher(engine, MICRO_STEPS, **options))
        return made[-1]

    yield make
    engine.gate.set()
    for prefetcher in made:
        prefetcher.drain(5)


def until(condition) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def stays(condition) -> bool:
    time.sleep(0.1)
    return condition()


@pytest.mark.parametrize("background", [True, False])
def test_with_window_0_only_the_step_taken_is_prepared_in_dataloader_order(engine, prefetch, background):
    """LRN-8, DIS-6."""
    prefetcher = prefetch(background=background)
    for step in range(3):
        samples = [item[0] for item in prefetcher.get(step)]
        assert samples == [[step * MICRO_STEPS + micro] for micro in range(MICRO_STEPS)]
        assert stays(lambda done=step + 1: engine.asked == [(s, m) for s in range(done) for m in range(MICRO_STEPS)])


def test_a_window_lets_later_steps_be_prepared_while_one_trains(engine, prefetch):
    """LRN-8: window and queue limit bound what is prepared ahead."""
    prefetcher = prefetch(window=1, queue_limit=10)
    prefetcher.get(0)
    assert until(lambda: len(engine.asked) == 4) and stays(lambda: engine.asked[-1] == (1, 1))
    narrow = prefetch(window=5, queue_limit=3)
    narrow.get(0)
    assert until(lambda: len(engine.asked) == 4 + 2 + 3) and stays(lambda: len(engine.asked) == 9)
    narrow.get(1)  # two of the three that waited are taken, so two more may wait
    assert until(lambda: len(engine.asked) == 11) and stays(lambda: len(engine.asked) == 11)


def test_a_queue_smaller_than_a_step_does_not_stop_it(engine, prefetch):
    """LRN-8."""
    prefetcher = prefetch(window=1, queue_limit=1)
    assert [len(prefetcher.get(step)) for step in range(4)] == [MICRO_STEPS] * 4


def test_what_got_too_old_is_made_again_from_the_same_samples_and_counted(engine, prefetch):
    """LRN-8."""
    engine.lag = lambda item, step: step - item[1] + 1
    prefetcher = prefetch(window=2, queue_limit=10)
    prefetcher.get(0)
    assert until(lambda: len(engine.asked) == 6)  # steps 1 and 2 too, all with weights 0
    engine.version = 2
    assert [item[:2] for item in prefetcher.get(1)] == [([2], 0), ([3], 0)] and prefetcher.num_remade == 0
    assert [item[:2] for item in prefetcher.get(2)] == [([4], 2), ([5], 2)] and prefetcher.num_remade == 2


def test_a_failure_is_raised_by_take_and_the_same_samples_are_asked_again(engine, prefetch):
    """LRN-8, CON-4: nothing is lost or drawn twice by a failure, wherever it hit."""
    engine.errors = [None, RuntimeError("server gone")]
    prefetcher = prefetch(window=1)
    with pytest.raises(RuntimeError, match="server gone"):
        prefetcher.get(0)
    assert [item[0] for item in prefetcher.get(0)] == [[0], [1]]
    assert engine.asked[:3] == [(0, 0), (0, 1), (0, 1)]
    assert [item[0] for item in prefetcher.get(1)] == [[2], [3]]


def test_a_failure_ahead_does_not_disturb_the_step_that_is_ready(engine, prefetch):
    """LRN-8."""
    engine.errors = [None, None, RuntimeError("server gone")]
    prefetcher = prefetch(window=1)
    assert [item[0] for item in prefetcher.get(0)] == [[0], [1]]
    assert until(lambda: len(engine.asked) == 3)
    assert [item[0] for item in prefetcher.get(0)] == [[0], [1]]  # asked again: a fence failed elsewhere
    assert [item[0] for item in prefetcher.get(1)] == [[2], [3]]


def test_stop_waits_for_the_call_that_runs_and_keeps_what_is_finished(engine, prefetch):
    """CON-4: after it nobody asks; the next take goes on where it was."""
    prefetcher = prefetch(window=1, queue_limit=10)
    prefetcher.get(0)
    assert until(lambda: len(engine.asked) == 4)
    engine.gate.clear()
    prefetcher.get(1)  # lets step 2 be asked for
    assert until(lambda: engine.num_begun == 5)
    stopper = threading.Thread(target=prefetcher.drain)
    stopper.start()
    assert stays(stopper.is_alive)
    engine.gate.set()
    stopper.join(5)
    assert not stopper.is_alive() and stays(lambda: len(engine.asked) == 5)
    assert [item[0] for item in prefetcher.get(2)] == [[4], [5]]
    assert engine.asked.count((2, 0)) == 1


def test_a_finishing_that_failed_ahead_is_raised_by_take_not_by_the_checkpoint(engine, prefetch):
    """LRN-8, LRN-5: the take of its step is where all ranks hear of it; a checkpoint holds what is whole before it."""

    def finish(answered, step):
        if answered[0] == [3]:
            raise ValueError("no reward")
        return answered

    engine.judge = finish
    prefetcher = prefetch(window=1, queue_limit=2)
    prefetcher.get(0)
    assert until(lambda: len(engine.asked) == 4)
    prefetcher.drain()
    assert prefetcher.prepared_from(1) == ([([2], 0)], 2)
    with pytest.raises(ValueError, match="no reward"):
        prefetcher.get(1)


def test_what_is_prepared_goes_on_in_another_process_with_the_same_samples(engine, prefetch):
    """LRN-5, LRN-8: finished work is kept, the rest is drawn and asked again; no sample is lost or doubled."""
    prefetcher = prefetch(window=2, queue_limit=3)
    prefetcher.get(0)
    assert until(lambda: len(engine.asked) == 5) and stays(lambda: len(engine.asked) == 5)
    items, num_drawn = prefetcher.prepared_from(1)
    assert [item[0] for item in items] == [[2], [3], [4]] and num_drawn == 3
    prefetcher.drain()
    engine.num_drawn -= num_drawn  # as the stream's state is taken back
    resumed = prefetch(window=0)
    resumed.restore(1, items)
    assert [item[0] for item in resumed.get(1) + resumed.get(2) + resumed.get(3)] == [[2], [3], [4], [5], [6], [7]]
    assert engine.asked[5:] == [(2, 1), (3, 0), (3, 1)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 3), st.integers(1, 5), st.integers(1, 3), st.lists(st.booleans(), max_size=12))
def test_every_sample_is_used_once_and_in_order_whatever_fails(window, queue_limit, micro_steps, failures):
    """LRN-1, LRN-8."""
    engine = Engine(errors=[RuntimeError("no") if fails else None for fails in failures])
    engine.gate.set()
    prefetcher = Prefetcher(engine, micro_steps, window=window, queue_limit=queue_limit)
    used = []
    for step in range(5):
        while True:
            try:
                used += [item[0][0] for item in prefetcher.get(step)]
                break
            except RuntimeError:
                continue
    prefetcher.drain(5)
    assert used == list(range(5 * micro_steps))
    assert all(step <= 4 + window for step, _ in engine.asked)


def test_the_next_micro_step_is_encoded_while_the_engine_answers(engine, prefetch):
    """LRN-8: within the step, and no further than may be asked."""
    encoded = []
    engine.gate.clear()
    engine.encode = lambda samples: (encoded.append(samples[0]), samples)[1]
    prefetcher = prefetch()
    taker = threading.Thread(target=prefetcher.get, args=(0,))
    taker.start()
    assert until(lambda: encoded == [0, 1]) and engine.num_begun == 1  # the first is still at the engine
    engine.gate.set()
    taker.join(5)
    time.sleep(0.05)
    assert encoded == [0, 1] and engine.num_drawn == 2  # the next step's must wait for its turn
    assert prefetcher.get(1) == [([2], 0, 1), ([3], 0, 1)] and encoded == [0, 1, 2, 3]


def test_samples_that_could_not_be_encoded_are_tried_again_and_not_drawn_again(engine, prefetch):
    """LRN-1, LRN-8."""
    errors = [None, OSError("image"), None, None]

    def encode(samples):
        if (error := errors.pop(0)) is not None:
            raise error
        return samples

    engine.encode = encode
    prefetcher = prefetch()
    with pytest.raises(OSError, match="image"):
        prefetcher.get(0)
    assert [samples for samples, *_ in prefetcher.get(0)] == [[0], [1]] and engine.num_drawn == 2
