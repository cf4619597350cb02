"""SRV-12: an attempt to open a communicator, and an abandoned update, end by themselves."""

import asyncio
import socket
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from tests.server.test_engine import INIT, START, make  # noqa: E402
from utils.server import weight_updates  # noqa: E402
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
        await asyncio.sleep(0.2)
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
