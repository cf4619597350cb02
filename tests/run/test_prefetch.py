"""Order, bounds and failures of preparing ahead (LRN-8), with asking and finishing under the test's hand."""

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.test_client import setting
from utils.capacity import call_seed, request_seed
from utils.config.schema import Async
from utils.data.stream import SampleStream
from utils.rollout.backend import RolloutContext, RolloutRequest, RolloutSampling, ServerEngine
from utils.run.prefetch import Prefetcher
from utils.run.session import Session

MICRO_STEPS = 2
AHEAD = {"enabled": True, "version_window": 1, "queue_limit": 3}


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


@pytest.mark.parametrize("options", [{}, {"draws_more": True}])
def test_nothing_is_prepared_for_steps_behind_the_last_LRN_8(engine, prefetch, options):
    """LRN-8: such requests would keep the last evaluation waiting, and cost rewards that nobody trains on."""
    prefetcher = prefetch(window=2, queue_limit=10, num_steps=3, **options)
    for step in range(3):
        prefetcher.get(step)
    assert stays(lambda: engine.asked[-1] == (2, 1) and engine.num_drawn == 3 * MICRO_STEPS)
    assert len(prefetcher.get(3)) == MICRO_STEPS  # where its turn comes all the same


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


def test_what_earlier_steps_were_trained_on_is_let_go_LRN_8(engine, prefetch):
    """LRN-8: segments hold pixels, which would fill the host's memory in a long run."""
    made = []

    def judge(answered: tuple, step: int) -> set:
        item = set()
        made.append(weakref.ref(item))
        return item

    engine.judge = judge
    prefetcher = prefetch()
    for step in range(4):
        prefetcher.get(step)
    assert [item() is not None for item in made] == [False] * 3 * MICRO_STEPS + [True] * MICRO_STEPS


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


def test_a_thread_that_would_just_end_is_a_failure_like_any_other(engine, prefetch):
    """LRN-12: `get` would wait for ever, and `SystemExit` says nothing in a thread."""
    engine.errors = [SystemExit(0)]
    with pytest.raises(RuntimeError, match="SystemExit: 0"):
        prefetch().get(0)


def test_a_judge_that_never_returns_is_given_up_at_a_stop_request_LRN_12(engine, prefetch, monkeypatch, caplog):
    """LRN-12: a user's reward has no time limit. Lines tell what it is at; no checkpoint waits for it."""
    monkeypatch.setattr("utils.run.prefetch.REMIND_S", 0.3)
    monkeypatch.setattr("utils.run.prefetch.STOP_S", 0.3)
    released, stop, ahead = threading.Event(), threading.Event(), prefetch(window=1, queue_limit=2)
    monkeypatch.setattr(engine, "judge", lambda answered, step: released.wait(20))
    engine.judging = "reward slow on sample s7"
    ahead.end_waits_at(stop)
    threading.Timer(1.5, stop.set).start()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="reward slow on sample s7: has not returned 0.3 s after the stop request"):
        ahead.get(0)
    assert ahead.is_stuck and 1.5 < time.monotonic() - start < 5
    assert "reward slow on sample s7: has taken 1 s so far" in caplog.text
    assert ahead.prepared_from(1)[0] == [] and time.monotonic() - start < 6
    released.set()


def test_the_thread_that_judges_begins_with_what_it_is_told(engine, prefetch):
    begun = []
    prefetch(begin_judging=lambda: begun.append(threading.current_thread().name)).get(0)
    assert begun == ["judge_0"]


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


def test_LRN_12_of_a_step_that_was_given_up_a_checkpoint_holds_nothing(engine, prefetch):
    """LRN-12, LRN-5: its samples are drawn again, and it is made again as a whole."""
    prefetcher = prefetch(window=1, queue_limit=2)
    prefetcher.get(0)
    assert until(lambda: len(engine.asked) == 4)
    prefetcher.drain()
    items, num_drawn = prefetcher.prepared_from(1)
    assert [item[0] for item in items] == [[2], [3]] and num_drawn == 2
    prefetcher.get(1)
    prefetcher.drain()
    items, num_drawn = prefetcher.prepared_from(1)
    assert items == [] and num_drawn >= 2


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


def test_what_was_prepared_is_made_anew_where_all_ranks_generate_together_LRN_5(engine, prefetch):
    """LRN-5: ranks that kept different numbers of items would wait for each other."""
    resumed = prefetch(window=0, background=False)
    resumed.restore(1, [([0], 0, 1)])
    assert engine.num_drawn == 0
    resumed.get(1)
    assert engine.asked == [(1, 0), (1, 1)]


def test_a_process_ends_soon_after_its_prefetcher_LRN_8():
    """LRN-8, LRN-12: of a slow reward's micro-steps only the one that is being judged is waited for."""
    program = """
import time
from types import SimpleNamespace
from utils.run.prefetch import Prefetcher
def judge(responses, step):
    time.sleep(1.5)
stages = SimpleNamespace(encode=None, draw=list, generate=lambda *_: None, judge=judge, lag=lambda *_: 0)
prefetcher = Prefetcher(stages, 1, window=40, queue_limit=40)
prefetcher.get(0)
prefetcher.close(5)
print(time.time())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert time.time() - float(ended.stdout) < 10


class Unreadable(list):
    """A data file of which some reads fail."""

    failures: Sequence[bool] = ()

    def __getitem__(self, index):
        fails, *self.failures = [*self.failures, False]
        if fails:
            raise RuntimeError("no such image")
        return super().__getitem__(index)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(1, 3),
    st.lists(st.booleans(), max_size=12),
    st.lists(st.booleans(), max_size=12),
)
def test_every_sample_is_used_once_and_in_order_whatever_fails(window, queue_limit, micro_steps, failures, unreadable):
    """LRN-1, LRN-8: a request, or reading a sample of a draw, which may cross the border of an epoch."""
    engine = Engine(errors=[RuntimeError("no") if fails else None for fails in failures])
    engine.gate.set()
    data = Unreadable(range(5))
    data.failures = unreadable
    engine.draw = partial(SampleStream([data]).next, 2)
    prefetcher = Prefetcher(engine, micro_steps, window=window, queue_limit=queue_limit)
    used = []
    for step in range(5):
        while True:
            try:
                used += [sample for item in prefetcher.get(step) for sample in item[0]]
                break
            except RuntimeError:
                continue
    prefetcher.drain(5)
    assert used == SampleStream([range(5)]).next(5 * micro_steps * 2)
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


def test_micro_steps_generate_side_by_side_and_draw_in_order_DIS_3_LRN_8(engine, prefetch):
    """DIS-3, LRN-8: all of a step at once; of later steps as many as window and queue allow; drawn in order."""
    engine.gate.clear()
    prefetcher = prefetch(num_threads=9, window=1, queue_limit=1)
    taker = threading.Thread(target=prefetcher.get, args=(0,))
    taker.start()
    assert until(lambda: engine.num_begun == 3) and stays(lambda: engine.num_begun == 3 == engine.num_drawn)
    engine.gate.set()
    taker.join(5)
    assert [item[0] for item in prefetcher.get(0) + prefetcher.get(1)] == [[0], [1], [2], [3]]


def test_a_failure_lets_the_others_finish_and_keeps_them_DIS_3_CON_4(engine, prefetch):
    """CON-4, DIS-3: `get` raises once nothing runs any more; what was finished is not asked for again."""
    slow, asked = threading.Event(), []

    def generate(samples, step, micro_step_idx):
        asked.append(micro_step_idx)
        if micro_step_idx == 0 and asked.count(0) == 1:
            raise RuntimeError("server gone")
        assert slow.wait(10)
        return samples, 0

    engine.generate, errors = generate, []
    prefetcher = prefetch(num_threads=2)

    def take():
        try:
            prefetcher.get(0)
        except RuntimeError as error:
            errors.append(error)

    taker = threading.Thread(target=take)
    taker.start()
    assert until(lambda: sorted(asked) == [0, 1]) and stays(lambda: taker.is_alive() and not errors)
    slow.set()
    taker.join(5)
    assert len(errors) == 1 and [item[0] for item in prefetcher.get(0)] == [[0], [1]]
    assert sorted(asked) == [0, 0, 1] and engine.num_drawn == 2


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 9),
    st.lists(st.booleans(), max_size=12),
    st.integers(1, 3),
)
def test_side_by_side_every_sample_is_used_once_and_in_order_LRN_1_DIS_3(
    window, queue_limit, micro_steps, num_threads, failures, lag
):
    """LRN-1, DIS-3: whatever fails, finishes first, or gets too old; a checkpoint in the middle loses nothing."""
    engine = Engine(errors=[RuntimeError("no") if fails else None for fails in failures])
    engine.gate.set()
    generate = engine.generate

    def at_once(samples, step, micro_step_idx):
        time.sleep(0.002 * ((7 * samples[0]) % 3))
        return generate(samples, step, micro_step_idx)

    engine.generate = at_once
    engine.lag = lambda item, step: window + 1 if item[0][0] % lag == 1 else 0
    options = {"window": window, "queue_limit": queue_limit, "num_threads": num_threads}
    prefetcher, used = Prefetcher(engine, micro_steps, **options), []
    for step in range(5):
        if step == 3:
            prefetcher.drain(5)
            items, num_drawn = prefetcher.prepared_from(step)
            engine.num_drawn -= num_drawn
            prefetcher = Prefetcher(engine, micro_steps, **options)
            prefetcher.restore(step, items)
        while True:
            try:
                used += [item[0][0] for item in prefetcher.get(step)]
                break
            except (RuntimeError, IndexError):  # the latter of two threads that share the last of the failures
                continue
    prefetcher.drain(5)
    assert used == list(range(5 * micro_steps))
    assert all(step <= 4 + window for step, _ in engine.asked)


class Rollouts:
    """Stages whose `generate` is a real client's; `sizes` requests per micro-step, drawn in order."""

    encode = None

    def __init__(self, client, size: int):
        self.engine, self.size, self.num_drawn = ServerEngine(client, None), size, 0

    def draw(self) -> list[RolloutRequest]:
        first, self.num_drawn = self.num_drawn, self.num_drawn + self.size
        return [RolloutRequest(f"r{first + i}", [], [], [1]) for i in range(self.size)]

    def generate(self, requests, step, micro_step_idx):
        context = RolloutContext(5, step, micro_step_idx, None)
        return [
            (request, context, result) for request, result in zip(requests, self.ask(requests, context), strict=True)
        ]

    def ask(self, requests, context):
        return self.engine.generate(requests, RolloutSampling(temperature=1.0), context)

    def judge(self, responses, step):
        return responses

    def lag(self, item, step):
        return 0


def test_the_3_plus_1_preset_has_32_of_32_requests_in_flight_DIS_3_DIS_6():
    """DIS-3, DIS-6: d=16 on three servers, one learner, 4 micro-steps of 8; every request has its usual seed."""
    with setting(1, 1, 1, decode_batch_size=16, timeout_s=30.0) as (client, servers):
        at_once = threading.Event()

        def hold(server, body):
            if sum(other.running for other in servers) == 32:
                at_once.set()
            at_once.wait(10)
            return server.answer(body)

        for server in servers:
            server.on_infer = partial(hold, server)
        prefetcher = Prefetcher(Rollouts(client, 8), 4, num_threads=4)
        micro_steps = prefetcher.get(0)
        assert at_once.is_set() and [server.most_running for server in servers] == [12, 12, 8]
        for micro, responses in enumerate(micro_steps):
            seed = request_seed(5, 0, micro, 0)
            assert [result.response_token_ids for _, _, result in responses] == [[call_seed(seed, i)] for i in range(8)]


def test_a_step_takes_less_than_half_the_time_side_by_side_DIS_3():
    """DIS-3: answers of log-normal length, 350 tokens in the mean, 6.5 ms per decode step for any batch, 1/15 of that
    here; against one micro-step at a time."""
    lengths = np.random.default_rng(0).lognormal(np.log(350) - 0.32, 0.8, 3 * 32)
    seconds = {}
    for num_threads in (1, 4):
        with setting(1, 1, 1, decode_batch_size=16, timeout_s=30.0) as (client, servers):

            def decode(server, body):
                time.sleep(max(lengths[int(request["uuid"][1:])] for request in body["infer_requests"]) * 0.0065 / 15)
                return server.answer(body)

            for server in servers:
                server.on_infer = partial(decode, server)
            prefetcher = Prefetcher(Rollouts(client, 8), 4, num_threads=num_threads)
            start = time.monotonic()
            for step in range(3):
                prefetcher.get(step)
            seconds[num_threads] = time.monotonic() - start
    assert seconds[1] > 2 * seconds[4], seconds


@pytest.mark.parametrize(("options", "num_steps", "num_at_once"), [({}, 9, 4), (AHEAD, 9, 7), (AHEAD, 1, 4)])
def test_a_session_lets_all_micro_steps_that_may_be_prepared_generate_at_once_DIS_3(
    engine, options, num_steps, num_at_once
):
    """DIS-3, LRN-8: those of the step, and with `async` those of later steps that may wait in the queue."""
    training = SimpleNamespace(gradient_accumulation_steps=4)
    cfg = SimpleNamespace(rm=SimpleNamespace(async_=Async(**options)), training=training)
    ranks = SimpleNamespace(device=torch.device("cpu"))
    session = SimpleNamespace(cfg=cfg, policy=SimpleNamespace(client=object()), num_steps=num_steps, ranks=ranks)
    Session.prefetch(session, engine)
    engine.gate.clear()
    taker = threading.Thread(target=session.prefetcher.get, args=(0,))
    taker.start()
    assert until(lambda: engine.num_begun == num_at_once) and stays(lambda: engine.num_begun == num_at_once)
    engine.gate.set()
    taker.join(5)
    session.policy.drain()


def test_reward_models_get_the_gpu_of_their_rank_in_the_thread_that_judges_GRP_5(engine, monkeypatch):
    """GRP-5: a new thread has the first GPU, and all ranks' models would share it."""
    chosen = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append((device, threading.current_thread().name))
    )
    session = MagicMock(num_steps=1)
    session.cfg.rm.async_, session.cfg.training.gradient_accumulation_steps = Async(), 1
    session.ranks.device = torch.device("cuda", 1)
    Session.prefetch(session, engine)
    session.prefetcher.get(0)
    assert chosen == [(torch.device("cuda", 1), "judge_0")]


def test_the_end_of_a_session_ends_its_threads_LRN_8(engine):
    """LRN-8: so that nothing of what was prepared is judged any more."""
    session = MagicMock(lock=None, num_steps=1)
    session.cfg.rm.async_, session.cfg.training.gradient_accumulation_steps = Async(), 1
    Session.prefetch(session, engine)
    assert session.prefetcher.get(0) == [([0], 0, 0)]
    Session.close(session)
    with pytest.raises(RuntimeError, match="after shutdown"):
        session.prefetcher.in_judge_thread(print)
