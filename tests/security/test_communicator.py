"""SRV-12: an attempt to open a communicator, and an abandoned update, end by themselves."""

import asyncio
import socket
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from tests.server.test_engine import INIT, START, UPDATE, ask, make  # noqa: E402
from utils.server import weight_updates  # noqa: E402
from utils.server.app import make_app  # noqa: E402
from utils.server.protocol import RequestConfig  # noqa: E402
from utils.sync import vllm_worker  # noqa: E402


def test_a_worker_leaves_an_opening_behind_SRV_12():
    """At an address where nobody listens: the worker answers meanwhile, and the thread ends once it is called back."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    engine = object.__new__(vllm_worker.StreamGlooEngine)
    engine.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)

    class Worker(vllm_worker.WorkerExtension):
        vllm_config = SimpleNamespace(parallel_config=engine.parallel_config)
        weight_transfer_engine = engine

        def init_weight_transfer_engine(self, info):
            engine.init_transfer_engine(vllm_worker.InitInfo(**info))

        def _weight_abort(self):
            self._weight_close()

    worker = Worker()
    info = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2, "rank_offset": 1}
    limits = {"bucket_bytes": 1, "timeout_s": 600.0, "open_timeout_s": 600.0}
    start = time.monotonic()
    assert worker.weight_rpc("init", info | limits) == {"result": True, "error": None}
    assert worker.weight_rpc("opening", {}) == {"result": True, "error": None}
    assert worker.weight_rpc("close", {})["error"] is None
    worker._opening[0].join(5)
    assert time.monotonic() - start < 5 and "was given up" in worker.weight_rpc("opening", {})["error"]


def test_a_caller_that_is_gone_leaves_the_server_free_SRV_12():
    async def run():
        _, engine, updates = make()
        steps = []

        async def still_opening(step, payload=None):
            steps.append(step)
            return [step in ("init", "opening")]

        engine.on_all_workers = still_opening
        attempt = asyncio.create_task(updates.init(INIT))
        while "opening" not in steps:
            await asyncio.sleep(0.01)
        attempt.cancel()
        await asyncio.wait({attempt}, timeout=5)
        assert steps[-1] == "close" and updates.owner is None and not updates.lock.locked()

    asyncio.run(asyncio.wait_for(run(), 10))


@pytest.mark.parametrize(("is_alive", "why"), [(False, "is gone"), (True, "sent no next step")])
def test_an_abandoned_update_ends_SRV_12(is_alive, why, monkeypatch):
    monkeypatch.setattr(weight_updates, "WATCH_INTERVAL_S", 0.1)
    monkeypatch.setattr(weight_updates, "MAX_SILENCE_S", 0.3)

    async def run():
        llm, engine, updates = make()
        llm.learner_is_alive = is_alive
        await updates.init(INIT.model_copy(update={"timeout_s": 60.0}))
        await updates.start(START)
        await asyncio.sleep(2)
        assert engine.weights.state == "dirty" and why in engine.weights.reason

    asyncio.run(asyncio.wait_for(run(), 10))


@pytest.mark.parametrize(("end", "why"), [("dies", "the learner of run a is gone"), ("hangs up", "its caller hung up")])
def test_a_start_that_waits_for_others_ends_with_its_learner_SRV_12(end, why, monkeypatch):
    """SRV-12: another client's long answer is running. As long as the learner waits, the server does."""
    monkeypatch.setattr(weight_updates, "WATCH_INTERVAL_S", 0.05)

    async def run():
        llm, engine, updates = make(seconds=60.0)
        llm.learner_is_alive = True
        await updates.init(INIT)
        answer = asyncio.create_task(engine.infer(ask("x"), RequestConfig()))
        while not engine.ids_in_flight:
            await asyncio.sleep(0.01)
        start = asyncio.create_task(updates.start(START))
        await asyncio.sleep(2 * INIT.timeout_s)
        assert engine.weights.state == "updating" and not start.done()
        if end == "dies":
            llm.learner_is_alive = False
        else:
            start.cancel()
        await asyncio.wait({start}, timeout=5)
        assert start.done() and engine.weights.state == "dirty" and why in engine.weights.reason
        assert llm.aborted and llm.log[-1] == "resume" and not updates.lock.locked()
        answer.cancel()

    asyncio.run(asyncio.wait_for(run(), 20))


@pytest.mark.parametrize(("path", "call"), [("start_weight_update", START), ("update_weights", UPDATE)])
def test_a_step_whose_caller_hangs_up_ends_SRV_12(path, call):
    """SRV-12: over HTTP; the engines never answer this step."""

    async def run():
        _, engine, updates = make()
        await updates.init(INIT)
        if call is UPDATE:
            await updates.start(START)
        on_all_workers, step = engine.on_all_workers, path.partition("_")[0]
        stuck = lambda name, *args: asyncio.Event().wait() if name == step else on_all_workers(name, *args)  # noqa: E731
        engine.on_all_workers = stuck
        messages = [{"type": "http.request", "body": call.model_dump_json().encode()}]
        headers = [(b"content-type", b"application/json"), (b"run-token", updates._token.encode())]
        scope = {"type": "http", "method": "POST", "path": f"/{path}/", "headers": headers, "query_string": b""}

        async def receive():
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message):
            assert message.get("status", 503) == 503

        await make_app(engine, updates, None)(scope, receive, send)
        await asyncio.sleep(0.2)
        assert engine.weights.state == "dirty" and "its caller hung up" in engine.weights.reason
        assert not updates.lock.locked()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_caller_that_hangs_up_while_its_failure_is_cleaned_up_SRV_12():
    """SRV-12: requests that the update held end all the same."""

    async def run():
        llm, engine, updates = make(seconds=60.0)
        await updates.init(INIT)
        answer = asyncio.create_task(engine.infer(ask("x"), RequestConfig()))
        while not engine.ids_in_flight:
            await asyncio.sleep(0.01)
        await updates.start(START.model_copy(update={"pause": "keep"}))
        llm.failing_step, on_all_workers = "update", engine.on_all_workers
        is_cleaning, release = asyncio.Event(), asyncio.Event()

        async def slow(step, *args):
            if step == "abort":
                is_cleaning.set()
                await release.wait()
            return await on_all_workers(step, *args)

        engine.on_all_workers = slow
        update = asyncio.create_task(updates.update(UPDATE))
        await is_cleaning.wait()
        update.cancel()
        await asyncio.sleep(0.1)
        release.set()
        await asyncio.wait({update}, timeout=5)
        assert update.cancelled() and engine.weights.state == "dirty" and not updates.lock.locked()
        assert llm.aborted and llm.log[-1] == "resume"
        answer.cancel()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_bucket_has_a_limit_whatever_its_run_allows_SRV_12():
    """SRV-12: an update with live buckets may take as long as the run says."""

    async def run():
        _, engine, updates = make()
        payloads, on_all_workers = [], engine.on_all_workers
        engine.on_all_workers = lambda *args: (payloads.append(args), on_all_workers(*args))[1]
        for given_s, limit_s in ((86400.0, weight_updates.MAX_SILENCE_S), (0.2, 0.2)):
            await updates.init(INIT.model_copy(update={"timeout_s": given_s}))
            assert payloads[-1][1]["timeout_s"] == limit_s and engine.update_s == given_s

    asyncio.run(run())
