"""Faults in the middle of a sync over NCCL (emulated, tests/emulated_nccl), between real servers and real learners."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import yaml

from tests.e2e.processes import Server, write_yaml
from tests.emulated_nccl import emulated, environment, marks
from tests.faults.learners import assert_clean_end
from tests.faults.proxy import Proxy
from tests.faults.test_server_faults import (
    END_S,
    TIME_OUT_S,
    Strike,
    assert_each_sample_answered_once,
    config_of,
    freeze,
    learner_of,
    thaw,
)
from tools.launch import process_tree
from tools.make_demo import make_dataset
from utils.run.shutdown import STOPPED_STATUS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
READY_S = 10.0  # SYN-3: from a failed sync to a new communicator
SECOND_SYNC = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("nccl_faults")
    make_dataset(folder / "data", num_train=32, num_val=1)
    (folder / "marks").mkdir()
    return folder


@pytest.fixture(scope="module")
def nccl(folder) -> dict[str, str]:
    return environment(folder / "marks")


@pytest.fixture(scope="module")
def lasting_servers(folder, start_model, nccl) -> Iterator[list[Server]]:
    pair = [Server(folder, start_model, environment=nccl) for _ in range(2)]
    try:
        yield [server.wait_ready() for server in pair]
    finally:
        for server in pair:
            server.end()


@pytest.fixture
def servers(lasting_servers, folder) -> Iterator[list[Server]]:
    """Two servers for all tests, restarted where a test has ended them; NCCL must have been used, and used well."""
    for server in lasting_servers:
        if server.process.poll() is not None:
            server.start_again()
    yield lasting_servers
    assert marks(folder / "marks", "used")
    assert not marks(folder / "marks", "violation") and not marks(folder / "marks", "side_stream")


@pytest.fixture
def proxies(servers) -> Iterator[list[Proxy]]:
    between = [Proxy(server.url) for server in servers]
    yield between
    for proxy in between:
        proxy.close()


def config_of_both(folder: Path, name: str, servers: list[Server], proxies: list[Proxy], time_out_s: float) -> Path:
    path = config_of(folder, name, servers[0], proxies[0].url, time_out_s, max_steps=3)
    config = yaml.safe_load(path.read_text())
    places = [
        {"base_url": proxy.url, "group_port": server.group_port} for server, proxy in zip(servers, proxies, strict=True)
    ]
    config["custom"]["extra"]["rollout_matching"]["vllm"]["server"]["servers"] = places
    return write_yaml(path, config)


def assert_opens_for_the_next(server: Server, since: float, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """This process, as another learner, opens the server's communicator in time, and leaves it again."""
    from utils.sync.transports import NcclTransport

    emulated(monkeypatch, folder / "marks")
    body = {"run_id": "next", "master_address": "127.0.0.1", "master_port": server.group_port, "world_size": 2}
    body |= {"rank_offset": 1, "bucket_bytes": 1 << 20, "timeout_s": READY_S, "open_timeout_s": READY_S}
    transport = NcclTransport(1 << 20, READY_S, READY_S)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/init_communicator/", body)
        transport.open([("127.0.0.1", server.group_port)], [1])
        assert answer.result().status_code == 200, answer.result().text
    seconds = time.monotonic() - since
    print(f"open for the next learner after {seconds:.1f} s")
    assert seconds < READY_S
    server.post("/close_communicator/", {"run_id": "next"}, run_token=answer.result().json()["run_token"])
    transport.close()


def test_one_of_two_servers_killed_in_a_sync_and_started_again_costs_nothing_CON_4_SYN_3(
    folder, servers, proxies, nccl
):
    """CON-4, SYN-3, SYN-6, SYN-8: the other one waits for a bucket meanwhile; both get full weights again."""
    proxies[1].on_request = Strike(servers[1], "syncing", SECOND_SYNC, servers[1].kill)
    config = config_of_both(folder, "one_of_two", servers, proxies, time_out_s=400.0)
    with learner_of(config, environment=nccl) as learner:
        assert learner.wait_for(proxies[1].on_request.struck.is_set), learner.output[-6000:]
        servers[1].start_again()
        assert learner.end() == 0, learner.output[-6000:]
    assert learner.output.count("all rollout servers respond; opening") == 1, learner.output[-6000:]
    assert_each_sample_answered_once(folder / "one_of_two", 3)
    ledger = json.loads((folder / "one_of_two" / "weights.json").read_text())
    for server in servers:
        assert server.get("/weight_version/").json()["weight_version"] == ledger["version"]


def test_a_server_frozen_in_a_sync_ends_the_run_in_time_CON_5_SYN_3(folder, servers, proxies, nccl, monkeypatch):
    """CON-5, SYN-3, LRN-5: for longer than all timeouts. Once it thaws it is ready for the next learner in time."""
    server, proxy = servers[0], proxies[0]
    proxy.on_request = Strike(server, "syncing", SECOND_SYNC, lambda: freeze(server))
    with learner_of(config_of(folder, "frozen", server, proxy.url), environment=nccl) as learner:
        try:
            assert learner.wait_for(proxy.on_request.struck.is_set), learner.output[-6000:]
            family = process_tree(learner.process.pid)
            learner.end(END_S)
        finally:
            thaw(server)
            thawed = time.monotonic()
    assert_clean_end(learner, family, "not every rollout server could be reached", folder / "frozen", step=1)
    assert_opens_for_the_next(server, thawed, monkeypatch, folder)


def test_a_learner_killed_in_a_sync_leaves_its_server_free_SYN_3(folder, servers, proxies, nccl, monkeypatch):
    """SYN-3: its `sync.timeout_s` is minutes."""
    server, proxy = servers[0], proxies[0]
    killed = threading.Event()
    config = config_of(folder, "killed", server, proxy.url, time_out_s=300.0)
    with learner_of(config, environment=nccl) as learner:
        proxy.on_request = Strike(server, "syncing", SECOND_SYNC, lambda: (learner.kill(), killed.set()))
        assert learner.wait_for(lambda: learner.steps()), learner.output[-6000:]  # it syncs next
        family = process_tree(learner.process.pid)
        assert killed.wait(END_S), learner.output[-6000:]
        psutil.wait_procs(family, timeout=READY_S)  # a rank that is still dying holds the group port
        lost = time.monotonic()
        thaw(server)  # its workers find the learner gone when they wait for the first bucket
    assert_opens_for_the_next(server, lost, monkeypatch, folder)


def test_sigterm_in_a_sync_that_hangs_ends_the_run_with_its_last_words_SYN_3_LRN_5_LRN_12(
    folder, servers, proxies, nccl
):
    """SYN-3, LRN-5, LRN-12: the signal is served while NCCL blocks and ends the sync long before its time-out. The
    finished step, for which no checkpoint was due, is saved."""
    server, proxy, hang_s = servers[0], proxies[0], 10 * END_S
    proxy.on_request = Strike(server, "syncing", SECOND_SYNC, lambda: freeze(server))
    config = config_of(folder, "stopped", server, proxy.url, hang_s, save_steps=0)
    with learner_of(config, environment=nccl) as learner:
        try:
            assert learner.wait_for(proxy.on_request.struck.is_set), learner.output[-6000:]
            family = process_tree(learner.process.pid)
            asked = time.monotonic()
            for number in (0, 1):
                learner.rank(number).send_signal(signal.SIGTERM)
            assert learner.wait_for(lambda: "stop requested" in learner.output), learner.output[-6000:]
            assert time.monotonic() - asked < TIME_OUT_S
            assert learner.end(END_S) == STOPPED_STATUS, learner.output[-6000:]
            print(f"ended {time.monotonic() - asked:.1f} s after SIGTERM")
        finally:
            thaw(server)
    assert not [process for process in family if process.is_running() and process.status() != "zombie"]
    last = learner.output[learner.output.rindex(f"run {folder / 'stopped'}: ") :]
    assert "stopped by SIGTERM after step 1 of 4, saved; interrupted: weight sync " in last, last
    assert f"rank 0: CallFailed: {proxy.url}: no answer within 5 s after the stop request" in last, last
    assert "it ended after optimizer step 1, generating weights " in last, last
    assert f"newest complete checkpoint: {folder / 'stopped' / 'checkpoint-1'}" in last, last
