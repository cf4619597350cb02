"""Two jobs on one machine: side by side they do not touch each other; what is in use is refused by name."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import Server, free_port
from tests.faults.learners import newest_step
from tests.faults.test_server_faults import config_of, learner_of
from tools.launch import ranks_of
from tools.make_demo import make_dataset
from utils.run.rollout_log import read_rollout_log
from utils.run.shutdown import STOPPED_STATUS

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
LONG_S = 300.0
ENDLESS = 10_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two_jobs")
    make_dataset(folder / "data", num_train=32, num_val=1)
    return folder


@pytest.fixture(scope="module")
def servers(folder, start_model) -> Iterator[list[Server]]:
    pair = [Server(folder, start_model) for _ in range(2)]
    try:
        yield [server.wait_ready() for server in pair]
    finally:
        for server in pair:
            server.end()


def endless(folder: Path, name: str, server: Server) -> Path:
    return config_of(folder, name, server, server.url, time_out_s=LONG_S, max_steps=ENDLESS)


def test_two_runs_side_by_side_do_not_touch_each_other_CON_4_SYN_8(folder, servers):
    """CON-4, SYN-8: on their own ports; each server has seen only its own run, verified by digests after every sync."""
    configs = [config_of(folder, f"side_{i}", server, server.url, LONG_S) for i, server in enumerate(servers)]
    with learner_of(configs[0]) as one, learner_of(configs[1]) as two:
        for learner in (one, two):
            assert learner.end() == 0, learner.output[-6000:]
    for index, server in enumerate(servers):
        run = folder / f"side_{index}"
        ledger = json.loads((run / "weights.json").read_text())
        assert server.get("/weight_version/").json()["weight_version"] == ledger["version"]
        run_id = json.loads((run / "run.json").read_text())["run_id"]
        lines = read_rollout_log(run / "rollouts.jsonl")
        assert {line["weight_version"].rpartition(":")[0] for line in lines} == {run_id}
        assert {call["server"] for line in lines for call in line["calls"]} == {0}


def test_what_a_living_run_holds_is_refused_by_name_and_the_run_goes_on_LRN_5_CON_4_SRV_3(folder, servers):
    """LRN-5, CON-4, SRV-3: its run directory, its server, its rendezvous port (`make train PORT=`). The first run keeps
    training all the while and ends normally when stopped."""
    master_port = free_port()
    with learner_of(endless(folder, "first", servers[0]), master_port=master_port) as first:
        assert first.wait_for(lambda: newest_step(folder / "first") >= 1), first.output[-6000:]
        holder = ranks_of(first.process.pid)[0].pid

        with learner_of(endless(folder, "first", servers[1])) as other:
            assert other.end() != 0
        assert f"training.output_dir={folder / 'first'}: in use by process {holder} on " in other.output
        assert "Traceback" not in other.output

        run_id = json.loads((folder / "first" / "run.json").read_text())["run_id"]
        with learner_of(endless(folder, "same_group_port", servers[0])) as other:
            assert other.end() != 0
        last = other.output[other.output.rindex("run /") :]
        assert f"{servers[0].url} belongs to run {run_id}" in last and "Address already in use" in last
        assert f"group port {servers[0].group_port} on 127.0.0.1" in last and "before the first step" in last

        config = endless(folder, "same_server", servers[0])
        group_port = str(servers[0].group_port)
        config.write_text(config.read_text().replace(group_port, str(free_port())))
        with learner_of(config) as other:
            assert other.end(LONG_S - 60) != 0  # at once, not after a timeout
        last = other.output[other.output.rindex("run /") :]
        words = f"run {run_id} holds this server and its learner is alive; end that run or use another server"
        assert words in last and servers[0].url in last and "it ended before the first step" in last

        with learner_of(endless(folder, "same_port", servers[1]), master_port=master_port) as other:
            assert other.end() != 0
        assert f"port {master_port}: Address already in use; held by process {holder}: " in other.output
        assert "Traceback" not in other.output

        step = newest_step(folder / "first")
        assert first.wait_for(lambda: newest_step(folder / "first") >= step + 2), first.output[-6000:]
        for rank in ranks_of(first.process.pid):
            os.kill(rank.pid, signal.SIGTERM)
        assert first.end() in (1, STOPPED_STATUS), first.output[-6000:]
    assert "stopped by SIGTERM after step" in first.output and "failed" not in first.output
