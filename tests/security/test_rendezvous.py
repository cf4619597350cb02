"""Strangers at the port where the learner's ranks meet, and in a checkpoint (LRN-11). This file as a program is a rank,
or a process that takes a rank's place."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from tests.e2e.processes import free_port
from tests.learner.test_learner import learner_of
from utils.dist import DistributedError, Ranks

NOBODY = 65534


class Trap:
    """Unpickled, it makes the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    """Function that starts this file as one of two ranks on one node, with what the launcher of DeepSpeed sets; `given`
    is what ours adds. All of them end with the test."""
    started = []

    def start_one(role: str, rank: int, port: int, folder: Path, **given: str) -> subprocess.Popen:
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
        for name in ("GLOO_SOCKET_IFNAME", "LEARNER_SECRET", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
            environment.pop(name, None)
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), **given}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        command = [sys.executable, __file__, role, str(folder)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def output_of(process: subprocess.Popen) -> str:
    return process.communicate(timeout=150)[0]


def rank_main(folder: Path) -> None:
    ranks = Ranks(timeout_s=100)
    try:
        ranks.open()
    except DistributedError as error:
        print(error)
        sys.exit(3)
    dist.all_reduce(torch.ones(1), group=dist.new_group())  # as DeepSpeed makes them
    values = ranks.gather({"rank": ranks.rank, "nan": float("nan"), "array": np.zeros((ranks.rank, 2)), "some": (1, 2)})
    assert [value["array"].shape for value in values] == [(0, 2), (1, 2)] and values[1]["nan"] != values[1]["nan"]
    assert [value["rank"] for value in values] == [0, 1] and values[0]["some"] == [1, 2]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"  # also where the node's own name leads elsewhere
    listening = [one.laddr for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN]
    (folder / f"{ranks.rank}.json").write_text(json.dumps(listening))
    ranks.fence()
    ranks.close()


def stranger_main(folder: Path) -> None:
    """Join as rank 1 before the true one comes, as another user where possible, and tell rank 0 a pickle."""
    if os.getuid() == 0:
        os.setuid(NOBODY)
    limit = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, False, limit)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=limit)
    group = dist.new_group(backend="gloo", timeout=limit)
    print("joined", flush=True)
    dist.all_gather_object([None, None], Trap(folder / "executed"), group=group)


@pytest.mark.parametrize("given", [{"LEARNER_SECRET": "of the launcher"}, {}])
def test_a_stranger_in_a_ranks_place_gets_nothing_executed_and_is_named_LRN_11(tmp_path, start, given):
    """LRN-11: with our launcher's secret and with DeepSpeed's own launcher. Rank 1 is late, the stranger is not."""
    port = free_port()
    rank, stranger = start("rank", 0, port, tmp_path, **given), start("stranger", 1, port, tmp_path)
    output, said = output_of(rank), output_of(stranger)
    assert "joined" in said, said
    assert not (tmp_path / "executed").exists()
    assert rank.returncode == 3 and "what claims to be rank 1 of this run" in output and f"127.0.0.1:{port}" in output


def test_ranks_of_one_node_listen_on_loopback_only_LRN_11(tmp_path, start):
    """LRN-11: rank 0's store, Gloo's groups, DeepSpeed's. What they tell each other arrives as it was, but tuples."""
    port = free_port()
    processes = [start("rank", rank, port, tmp_path, LEARNER_SECRET="of the run") for rank in range(2)]
    for process in processes:
        output = output_of(process)
        assert process.returncode == 0, output[-4000:]
    listening = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert ["127.0.0.1", port] in listening[0] and listening[1]
    assert {host for own in listening for host, _ in own} == {"127.0.0.1"}


@pytest.mark.parametrize(("is_one_node", "host"), [(True, "127.0.0.1"), (False, "127.0.0.2")])
def test_rank_0_listens_where_its_ranks_meet_only_LRN_11(monkeypatch, is_one_node, host):
    """LRN-11: on one node on loopback, whatever MASTER_ADDR says; on several at MASTER_ADDR."""
    given = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2" if is_one_node else "1", "MASTER_ADDR": "127.0.0.2"}
    for name, value in (given | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    ranks = Ranks(timeout_s=30)
    waiting = threading.Thread(target=ranks._open_store)
    waiting.start()
    own, deadline = [], time.monotonic() + 20
    while not own and time.monotonic() < deadline:
        every = psutil.Process().net_connections("inet")
        own = [c.laddr.ip for c in every if c.laddr.port == int(os.environ["MASTER_PORT"]) and c.status == "LISTEN"]
    monkeypatch.setenv("RANK", "1")
    Ranks(timeout_s=30)._open_store()
    waiting.join(30)
    assert own == [host]


def test_a_rank_with_another_secret_is_named_LRN_11(tmp_path, start):
    """LRN-11: also one that knows our protocol, but not the secret."""
    port = free_port()
    processes = [start("rank", rank, port, tmp_path, LEARNER_SECRET=f"secret {rank}") for rank in range(2)]
    outputs = [output_of(process) for process in processes]
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 3 and f"claims to be rank {1 - rank} of this run does not know" in output, output


@pytest.mark.parametrize("part", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"])
def test_a_crafted_shard_executes_nothing_LRN_11(tmp_path, start_model, ranks, part):
    """LRN-11: DeepSpeed's shards load as they were written; with code in one of them nothing is loaded."""
    learner = learner_of(tmp_path / "run", start_model, ranks, {"type": "full"})
    state = tmp_path / "checkpoint" / "state"
    learner.save_state(state)
    learner.load_state(state)
    shard = torch.load(state / part, weights_only=False)
    torch.save({**shard, "more": Trap(tmp_path / "executed")}, state / part)
    with pytest.raises(ValueError, match=rf"{part}: holds what DeepSpeed does not write \(GLOBAL \S*system"):
        learner.load_state(state)
    assert not (tmp_path / "executed").exists()
    torch.load(state / part, weights_only=False)
    assert (tmp_path / "executed").exists(), "the trap is none"


if __name__ == "__main__":
    {"rank": rank_main, "stranger": stranger_main}[sys.argv[1]](Path(sys.argv[2]))
