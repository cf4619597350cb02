"""Process groups of the learner and the few collectives the trainer uses by name."""

import contextlib
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist


class DistributedError(RuntimeError):
    """An error that every rank has already raised, so no further fence may be entered because of it."""


class Ranks:
    """This process's place among the learners, and a Gloo control group beside the group that DeepSpeed trains on.

    Control messages (failures, counts, denominators) never travel on the training group: they must also work while a
    CUDA stream is busy, and they must time out instead of waiting for ever.
    """

    def __init__(self, timeout_s: float = 1800.0) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.is_main = self.rank == 0
        self.device = _device(self.local_rank)
        self._timeout = timedelta(seconds=timeout_s)
        self._control: dist.ProcessGroup | None = None

    def check_port(self) -> None:
        """Raises OSError on rank 0 where the port that the launcher chose is taken. torchrun listens on its own."""
        is_given = "MASTER_PORT" in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if self.is_main and is_given and not dist.is_initialized():
            check_master_port(int(os.environ["MASTER_PORT"]))

    def open(self) -> None:
        """Open the process groups (collective). Works under `deepspeed`, `torchrun` and, alone, without a launcher."""
        import deepspeed

        for key, value in {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            os.environ.setdefault(key, value)
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = str(_free_port())
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        deepspeed.init_distributed(dist_backend=backend, timeout=self._timeout, auto_mpi_discovery=False, verbose=False)
        self._control = dist.new_group(backend="gloo", timeout=self._timeout)
        self.fence()
        _forget_shared_buffer(self.rank)

    def close(self) -> None:
        """Leave the process groups; safe to call twice."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._control = None

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Sum of dictionaries over ranks; a key that a rank lacks counts as 0."""
        totals: dict[str, float] = {}
        for part in self.gather(values):
            for key, value in part.items():
                totals[key] = totals.get(key, 0.0) + value
        return totals

    def fence(self) -> None:
        """Returns only when every rank has arrived."""
        if self.world_size > 1:
            dist.barrier(group=self._control)

    def raise_on_all_ranks(self, error: BaseException | None, where: str) -> None:
        """Fence that raises on every rank if any rank arrives with an error (SYN-3).

        Raises:
            DistributedError: names `where` and every failing rank with its message.
        """
        self.gather_or_raise(None, where, error)

    def gather_or_raise(self, value: Any, where: str, error: BaseException | None = None) -> list[Any]:
        """`value` of every rank, or the same error on every rank.

        A rank that failed on its way to this gather arrives at the fence after it; the others learn of it here and do
        not wait for its value.

        Raises:
            DistributedError: as `raise_on_all_ranks`.
        """
        if isinstance(error, DistributedError):
            raise error
        arrived = self.gather((None if error is None else f"{type(error).__name__}: {error}", value))
        failed = [f"rank {rank}: {message}" for rank, (message, _) in enumerate(arrived) if message is not None]
        if failed:
            summary = f"{where} failed on {len(failed)} of {self.world_size} ranks"
            raise DistributedError("\n".join([summary, *failed])) from error
        return [value for _, value in arrived]


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _forget_shared_buffer(rank: int) -> None:
    """DeepSpeed 0.19's CPU operator never removes the 66 MiB that each rank shares with the others: after enough runs
    the machine's memory is full. Once all ranks have opened it the name is not needed; the memory goes with them."""
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_{rank}"
    Path("/dev/shm", name).unlink(missing_ok=True)


def _free_port() -> int:

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def capture_error(function: Callable[..., Any], *args: Any) -> Exception | None:
    """Run `function`; hand its error back instead of raising, so that collectives around it stay aligned."""
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001  (raised again, on all ranks, at the next fence)
        return error
    return None


def check_master_port(port: int) -> None:
    """Whether rank 0 can listen on `port`, where the learner's ranks meet.

    Raises:
        OSError: it cannot; names the port's holder, as far as the system tells, and the way out.
    """
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        reason = os.strerror(error.errno) + port_holder(port)
        raise OSError(
            f"the learner's ranks cannot meet at port {port}: {reason}; end that process or take another port: "
            f"PORT={port + 1} behind make train or make grpo (deepspeed --master_port {port + 1})"
        ) from error


def port_holder(port: int) -> str:
    """Who listens on `port`, as far as the system tells this user; for an error message."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f"; held by process {connection.pid}: {command[:200]}"
    return ""
