"""utils.run.policy: recovery from a lost server (CON-4), with a client and an engine that do what they are told; how
many functions lie between the loop and the socket."""

import sys
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
from urllib3.connectionpool import HTTPConnectionPool

from tests.rollout.test_client import setting
from utils.data.encoding import EncodedPrompt, prompt_chat
from utils.data.samples import Sample
from utils.dist import DistributedError, Ranks
from utils.rollout.backend import RolloutContext, RolloutRequest, RolloutResult, RolloutSampling, ServerEngine
from utils.rollout.link import RolloutError
from utils.rollout.round import ServerGone
from utils.run.policy import MAX_RECOVERIES, Policy
from utils.run.prefetch import Prefetcher
from utils.run.records import Timer


class Engine:
    """Notes what is done to it."""

    def __init__(self, happened: list[str]):
        self.happened = happened

    def open(self) -> None:
        self.happened.append("reopen")

    def sync(self, version: str) -> SimpleNamespace:
        self.happened.append(f"sync {version}")
        return SimpleNamespace(num_bytes=1, gb_per_s=1.0, seconds=1.0)

    def rest(self) -> None:
        pass


class Client:
    """Of servers that are gone for as many looks as `gone` says, and come back or not."""

    def __init__(self, gone: int = 0, comes_back: bool = True):
        self.gone, self.comes_back, self.waits = gone, comes_back, 0
        self.stop = threading.Event()

    def lost(self) -> list[int]:
        self.gone -= 1
        return [0] if self.gone >= 0 else []

    def wait_ready(self) -> list[int]:
        self.waits += 1
        if not self.comes_back:
            raise RolloutError("http://there: no answer")
        return [0]


def run(errors: list, client: Client | None) -> tuple[str, list[str]]:
    """Work that brings one of `errors` each time, then succeeds; what it gave and what happened in order."""
    happened, errors = [], list(errors)

    def work() -> str:
        happened.append("work")
        if errors:
            raise errors.pop(0)
        return "rows"

    policy = Policy(Engine(happened), client, Ranks(), "run", 0, str, None, Timer())
    policy.drain = lambda: happened.append("drain")
    return policy.with_current_weights(3, work, "preparing"), happened


@pytest.mark.parametrize("fails", [False, True])
def test_rol_7_the_engine_rests_once_when_all_work_of_a_step_is_done(fails):
    """ROL-7: not between sync and micro-steps, and also after a failure, before any rank goes on."""
    happened = []
    engine = Engine(happened)
    engine.rest = lambda: happened.append("rest")

    def work() -> None:
        happened.append("work")
        if fails:
            raise ValueError("no")

    policy = Policy(engine, None, Ranks(), "run", 0, str, None, Timer())
    with pytest.raises(DistributedError) if fails else nullcontext():
        policy.with_current_weights(3, work, "preparing")
    assert happened == ["sync run:3", "work", "rest"]


AGAIN = ["drain", "reopen", "sync run:3", "work"]


def test_con_4_work_is_done_again_after_the_communicators_were_opened_anew():
    """CON-4."""
    client = Client()
    assert run([ServerGone("gone"), ServerGone("gone")], client) == (
        "rows",
        ["sync run:3", "work", *AGAIN, *AGAIN],
    )
    assert client.waits == 2


def test_con_4_a_sync_that_broke_because_the_server_died_is_a_loss_too():
    """CON-4: what the transport says then is any error at all; that the server is gone is seen by looking."""
    assert run([RuntimeError("connection closed by peer")], Client(gone=1))[1] == ["sync run:3", "work", *AGAIN]


@pytest.mark.parametrize("client", [None, Client()])
def test_con_4_other_failures_end_the_run_at_once(client):
    """CON-4, SYN-3."""
    with pytest.raises(
        DistributedError,
        match="preparing with weights of step 3 failed on 1 of 1 ranks\nrank 0: ValueError: a bad tensor",
    ):
        run([ValueError("a bad tensor")], client)


def test_con_4_a_server_that_does_not_come_back_ends_the_run_with_its_url():
    """CON-4."""
    with pytest.raises(DistributedError, match="http://there"):
        run([ServerGone("gone")], Client(comes_back=False))


def test_con_4_a_server_that_dies_again_and_again_ends_the_run():
    """CON-4."""
    client = Client()
    with pytest.raises(DistributedError, match="gone"):
        run([ServerGone("gone")] * (MAX_RECOVERIES + 1), client)
    assert client.waits == MAX_RECOVERIES


@pytest.mark.parametrize("is_own", [True, False])
def test_LRN_12_a_lost_server_is_not_waited_for_once_any_rank_is_to_stop(monkeypatch, is_own):
    """LRN-12: whichever rank the signal reached."""

    def gather(ranks, value):
        is_lost, may_wait = value
        return [value, (False, is_own)] if isinstance(may_wait, bool) else [value]  # otherwise of `raise_on_all_ranks`

    client = Client()
    if is_own:
        client.stop.set()
    monkeypatch.setattr(Ranks, "gather", gather)
    with pytest.raises(DistributedError, match="gone"):
        run([ServerGone("gone")], client)
    assert client.waits == 0


@pytest.mark.parametrize("allow_stale", [True, False])
def test_syn_8_the_engine_is_told_which_weights_must_answer_and_where_the_requests_belong(allow_stale):
    """SYN-8, DIS-6, ROL-3: those of the last sync; with the run's seed, the learner's own prompt and images."""
    engine, asked, sampling = Engine([]), [], RolloutSampling(max_new_tokens=3)
    engine.generate = lambda *args: asked.append(args) or [RolloutResult([], [1, 2], "", "stop", "run:3")]
    policy = Policy(engine, None, Ranks(), "run", 7, str, None, Timer())
    policy.sync(3)
    sample = Sample("s", ["a.png"], [(8, 8)], 8, 8, [], [{"role": "user", "content": "<image>x"}], "file:1")
    policy.generate([sample], [EncodedPrompt([1, 2], {"pixels": 0})], sampling, 4, 1, allow_stale)
    request = RolloutRequest("s", prompt_chat(sample), ["a.png"], [1, 2], {"pixels": 0})
    assert asked == [([request], sampling, RolloutContext(7, 4, 1, "run:3", allow_stale))]


class Steps:
    """A micro-step of one request; `train` below and it are the program's own frames."""

    encode = None

    def __init__(self, policy: Policy):
        self.policy = policy

    def draw(self) -> list[Sample]:
        return [Sample("s", [], [], 8, 8, [], [{"role": "user", "content": "x"}], "file:1")]

    def generate(self, samples: list[Sample], step: int, micro_step_idx: int) -> list:
        prompts = [EncodedPrompt([1], {})]
        return self.policy.generate(samples, prompts, RolloutSampling(), step, micro_step_idx)

    def judge(self, responses: list, step: int) -> list:
        return responses

    def lag(self, item: list, step: int) -> int:
        return 0


def train(policy: Policy, prefetcher: Prefetcher) -> list:
    return policy.with_current_weights(0, partial(prefetcher.get, 0), "preparing step 0")


def own_frames(frame: FrameType | None) -> list[str]:
    """Functions of this project on a thread's stack, innermost first."""
    names = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "utils") or (path == Path(__file__) and frame.f_code.co_name in OWN):
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


ROOT, OWN = Path(__file__).parents[2], {"train", "generate"}


def test_a_reader_follows_a_step_to_the_socket_through_at_most_15_functions(monkeypatch):
    """Frames of all threads in between that stand on the way: what only waits does not."""
    stacks: dict[str, list[str]] = {}
    of_other_tests = set(threading.enumerate()) - {threading.current_thread()}

    def note(pool, method, url, *args, **kwargs):
        if url.endswith("/infer/"):
            threads = {thread.ident: thread.name for thread in set(threading.enumerate()) - of_other_tests}
            for ident, frame in sys._current_frames().items():
                if ident in threads:
                    stacks[threads[ident]] = own_frames(frame)
        return urlopen(pool, method, url, *args, **kwargs)

    urlopen = HTTPConnectionPool.urlopen
    monkeypatch.setattr(HTTPConnectionPool, "urlopen", note)
    with setting(1) as (client, (server,)):
        output = server.output({"uuid": "s"}, 0, weight_version="run:0")
        server.on_infer = lambda body: (200, [output])
        sync = SimpleNamespace(sync=Engine([]).sync, mode="full", fallback=None, ledger={})
        policy = Policy(ServerEngine(client, sync), client, Ranks(), "run", 0, str, None, Timer())
        ((result,),) = train(policy, Prefetcher(Steps(policy), 1))
    assert result.weight_version == "run:0"
    on_the_way = [name for stack in stacks.values() for name in reversed(stack) if name != "_wait_for"]
    assert 8 < len(on_the_way) <= 15, on_the_way
