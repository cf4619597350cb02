"""Fences of the learner's ranks, in two real processes over Gloo (this file as a program)."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.file_baton import FileBaton

from utils import dist
from utils.dist import DistributedError, Ranks, check_master_address, remove_dead_locks

TIMEOUT_S = 12


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> list[dict]:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    run = subprocess.run([*command, str(folder)], env=environment, timeout=300, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def main(folder: str) -> None:
    ranks = Ranks(TIMEOUT_S)
    ranks.open()
    seen: dict = {"values": ranks.gather_or_raise(ranks.rank * 10, "counting")}

    def work() -> None:
        """Rank 0 fails on its way to the agreement in the middle, rank 1 waits there for it."""
        if ranks.rank == 0:
            raise ValueError("no such image")
        ranks.gather_or_raise(3, "generating")

    error = None
    try:
        work()
    except Exception as failure:
        error = failure
    try:
        ranks.raise_on_all_ranks(error, "preparing")
    except DistributedError as failure:
        seen["failure"] = str(failure)
    seen["after"] = ranks.gather(ranks.rank)  # still in step
    dist.ALIVE_S = 0.5

    def long_work(alive: Callable[[], None]) -> list[int]:
        """Takes longer than ranks wait for each other."""
        until = time.monotonic() + TIMEOUT_S + 2
        while time.monotonic() < until:
            time.sleep(0.1)
            alive()
        return [ranks.rank, 7]

    seen["work"] = ranks.on_main(long_work)
    try:
        ranks.on_main(lambda alive: [][0])
    except DistributedError as failure:
        seen["failed_work"] = str(failure)
    seen["after_work"] = ranks.gather(ranks.rank)
    seen["own_work"] = ranks.on_each(lambda: time.sleep((TIMEOUT_S + 2) * ranks.rank) or ranks.rank, "reading")
    try:
        ranks.on_each(lambda: [0, 1][ranks.rank * 2], "reading")
    except DistributedError as failure:
        seen["failed_own_work"] = str(failure)
    (Path(folder) / f"{ranks.rank}.json").write_text(json.dumps(seen))
    ranks.close()


def test_a_fence_hands_every_rank_the_values_of_all(seen):
    assert [rank["values"] for rank in seen] == [[0, 10], [0, 10]]


def test_a_rank_that_fails_on_its_way_to_an_agreement_is_not_waited_for_SYN_3(seen):
    """SYN-3: both ranks end with the error of rank 0, told once, and their collectives still match."""
    assert all("rank 0: ValueError: no such image" in rank["failure"] for rank in seen)
    assert all("failed on 1 of 2 ranks" in rank["failure"] for rank in seen)
    assert [rank["after"] for rank in seen] == [[0, 1], [0, 1]]


def test_ranks_wait_for_the_work_of_rank_0_as_long_as_it_is_alive_DAT_6(seen):
    """DAT-6: longer than for each other; result and error reach all of them, and their collectives still match."""
    assert [rank["work"] for rank in seen] == [[0, 7]] * 2
    assert all("rank 0: IndexError: list index out of range" in rank["failed_work"] for rank in seen)
    assert [rank["after_work"] for rank in seen] == [[0, 1], [0, 1]]


def test_ranks_wait_for_the_work_of_each_however_long_it_takes_DAT_6(seen):
    """DAT-6: data files are read on every node before anything else is told."""
    assert [rank["own_work"] for rank in seen] == [0, 1]
    assert all("rank 1: IndexError: list index out of range" in rank["failed_own_work"] for rank in seen)


def test_the_device_is_deepspeeds_whatever_torch_sees(monkeypatch):
    """`make demo` on a machine with GPUs: DeepSpeed trains on the CPU, though torch could use a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    assert Ranks().device == torch.device("cpu") and chosen == []
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    assert Ranks().device == torch.device("cuda", 3) == chosen[0]


def test_sums_over_ranks_know_keys_that_a_rank_lacks(monkeypatch):
    ranks = Ranks()
    monkeypatch.setattr(ranks, "gather", lambda value: [value, {"b": 2, "c": 0.5}])
    sums = ranks.sum({"a": 1.0, "b": 3})
    assert list(sums.items()) == [("a", 1.0), ("b", 5.0), ("c", 0.5)]
    assert all(isinstance(value, float) for value in sums.values())


def test_every_rank_gets_what_the_first_rank_has_that_has_any(monkeypatch):
    ranks = Ranks()
    for others, first in ([], None), ([None, "two", "three"], "two"):
        monkeypatch.setattr(ranks, "gather", lambda value, others=others: [value, *others])
        assert ranks.first(None) == first and ranks.first("own") == "own"


def test_an_address_where_other_nodes_do_not_reach_rank_0_is_refused_LRN_11(monkeypatch):
    """LRN-11: rank 0 listens at `MASTER_ADDR` only."""
    check_master_address("127.0.0.1")
    with pytest.raises(OSError, match="MASTER_ADDR=192.0.2.77: no address of that node .*--master_addr"):
        check_master_address("192.0.2.77")
    with pytest.raises(OSError, match="MASTER_ADDR=localhost: it leads to loopback there; give --master_addr"):
        check_master_address("localhost")


def test_a_message_that_is_too_large_is_refused_by_rank_before_it_is_read_LRN_11(monkeypatch):
    """LRN-11: 1 GiB; a stranger's number must not take all memory."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks, gathered = Ranks(), []

    def all_gather(parts, own, group):
        gathered.append(own)
        parts[0].copy_(own)
        parts[1].fill_((1 << 30) + 1)

    monkeypatch.setattr("utils.dist.dist.all_gather", all_gather)
    with pytest.raises(DistributedError, match=f"rank 1 of this run announces .* 0 to {1 << 30} bytes"):
        ranks.gather("x")
    monkeypatch.setattr("utils.dist.MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(DistributedError, match="this rank has a message of 2,0.. bytes, of at most 1,000 for"):
        ranks.gather("x" * 2000)
    assert len(gathered) == 2


def test_an_interface_of_your_own_overrides_loopback_LRN_11(tmp_path):
    """LRN-11: Gloo looks for the one that GLOO_SOCKET_IFNAME names."""
    assert "own-interface" in opened(tmp_path, GLOO_SOCKET_IFNAME="own-interface").stderr


def opened(folder: Path, **given: str) -> subprocess.CompletedProcess[str]:
    """A rank alone that opens its groups, with DeepSpeed's operator in `folder`."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(folder), **given}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    program = "from utils.dist import Ranks; ranks = Ranks(timeout_s=30); ranks.open(); ranks.close(); print('open')"
    return subprocess.run([sys.executable, "-c", program], env=environment, timeout=180, capture_output=True, text=True)


def test_a_compile_lock_of_a_dead_process_is_named_and_removed(tmp_path):
    """A kill in that moment would otherwise hang every later start, without a word."""
    built = Path(os.environ.get("TORCH_EXTENSIONS_DIR", ".venv/torch_extensions"))
    shutil.copytree(built, tmp_path / "built", ignore=shutil.ignore_patterns("lock"))
    lock = tmp_path / "built" / "deepspeed_shm_comm" / "lock"
    lock.touch()
    run = opened(tmp_path / "built")
    assert run.stdout.endswith("open\n") and f"removed {lock}: the process that held" in run.stderr, run.stderr[-3000:]
    assert not lock.exists()


def test_a_compile_lock_that_a_process_holds_stays(tmp_path):
    (tmp_path / "operator").mkdir()
    held, dead = FileBaton(str(tmp_path / "operator" / "lock")), tmp_path / "other" / "lock"
    assert held.try_acquire()
    dead.parent.mkdir()
    dead.touch()
    remove_dead_locks(tmp_path)
    assert Path(held.lock_file_path).exists() and not dead.exists()
    held.release()


@pytest.mark.parametrize("is_taken_again", [False, True])
def test_a_compile_lock_released_while_it_is_checked_is_no_error(tmp_path, monkeypatch, is_taken_again):
    """Another process releases it during the scan, and perhaps a third takes it, who must keep it."""
    lock = tmp_path / "lock"
    lock.touch()
    os.utime(lock, (0, 0))  # taken long before the next one

    def scan() -> list:
        lock.unlink()
        if is_taken_again:
            lock.touch()
        return []

    monkeypatch.setattr(dist.psutil, "process_iter", scan)
    remove_dead_locks(tmp_path)
    assert lock.exists() == is_taken_again


if __name__ == "__main__":
    main(*sys.argv[1:])


def test_what_several_ranks_say_is_told_once_SYN_3(monkeypatch):
    """SYN-3: with the ranks that say it; another rank's own message stands beside it."""
    arrived = [("ValueError: no server", None), (None, 5), ("ValueError: no server", None), ("KeyError: 1", None)]
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(Ranks, "gather", lambda own, value: arrived)
    with pytest.raises(DistributedError) as failure:
        Ranks().raise_on_all_ranks(None, "asking")
    told = "asking failed on 3 of 4 ranks\nranks 0, 2: ValueError: no server\nrank 3: KeyError: 1"
    assert str(failure.value) == told


def test_an_error_is_the_cause_of_a_fence_that_breaks_SYN_3(monkeypatch):
    """SYN-3: otherwise the report would only say that another rank is gone."""
    ranks, own = Ranks(), MemoryError("no room")

    def broken(value):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(ranks, "gather", broken)
    with pytest.raises(RuntimeError, match="closed by peer") as raised:
        ranks.raise_on_all_ranks(own, "merging")
    assert raised.value.__cause__ is own
    with pytest.raises(RuntimeError) as raised:
        ranks.gather_or_raise(1, "counting")
    assert raised.value.__cause__ is None
