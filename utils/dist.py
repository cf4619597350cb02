"""The learner's process groups and the few collectives that the trainer needs."""

import atexit
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
    """An error that every rank has raised already, so no rank may enter another fence because of it."""


class Ranks:
    """This process's place among the learners, and a Gloo control group beside the group that DeepSpeed trains on.

    Control messages (failures, counts, denominators) never use the training group: they must also work while a CUDA
    stream is busy, and they must time out instead of waiting for ever.
    """

    def __init__(self, timeout_s: float = 1800.0) -> None:
        from deepspeed.accelerator import get_accelerator

        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.is_main = self.rank == 0
        local_size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")  # torchrun's, DeepSpeed's
        self.spans_nodes = self.world_size > int(local_size or self.world_size)
        self.device = torch.device("cpu")
        if get_accelerator().device_name() == "cuda":  # DeepSpeed's choice, whatever else torch may see
            self.device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(self.device)
        self._timeout = timedelta(seconds=timeout_s)
        self._control: dist.ProcessGroup | None = None

    def check_port(self) -> None:
        """Raise OSError on rank 0 if the launcher's port is in use. torchrun listens on its own, so it is skipped."""
        is_given = "MASTER_PORT" in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if self.is_main and is_given and not dist.is_initialized():
            check_master_port(int(os.environ["MASTER_PORT"]))

    def check_interface(self) -> None:
        """Raise OSError if, on several nodes, Gloo would listen where the others cannot reach this one."""
        host, wanted = socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME")
        names = {name for _, name in socket.if_nameindex()} - {"lo"}
        with contextlib.suppress(OSError):  # the name leads nowhere, where Gloo takes loopback, too
            if not self.spans_nodes or names >= set((wanted or "lo").split(",")):
                return
            if not wanted and not socket.gethostbyname(host).startswith("127."):
                return
        reason = f"GLOO_SOCKET_IFNAME={wanted} is not here" if wanted else "its own name leads to loopback or nowhere"
        what_to_do = f"set GLOO_SOCKET_IFNAME to one of {', '.join(sorted(names))} (docs/scaling.md)"
        raise OSError(f"node {host} cannot be reached by the other nodes: {reason}; {what_to_do}")

    def open(self) -> None:
        """Open the process groups (collective), under `deepspeed`, `torchrun` or, for one rank, without either."""
        import deepspeed

        for key, value in {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            os.environ.setdefault(key, value)
        if "MASTER_PORT" not in os.environ:
            with socket.socket() as probe:  # without SO_REUSEADDR, with which the system may pick a port in use
                probe.bind(("127.0.0.1", 0))
                os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        deepspeed.init_distributed(dist_backend=backend, timeout=self._timeout, auto_mpi_discovery=False, verbose=False)
        self._control = dist.new_group(backend="gloo", timeout=self._timeout)
        atexit.register(self.close)  # a user's mistake ends the set-up; the threads of open groups may then abort it
        self.fence()
        # DeepSpeed 0.19's CPU operator never removes its 66 MiB of shared memory per rank, which would fill the
        # machine's memory after enough runs. All ranks have opened it by now: without a name it is freed at exit.
        place = f"{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_{self.rank}"
        Path("/dev/shm", f"deepspeed_allreduce_buffer_{place}").unlink(missing_ok=True)

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

    def places(self, where: bool) -> str:
        """List the ranks for which `where` holds, with their hosts (collective); empty if there are none."""
        hosts = self.gather(socket.gethostname() if where else None)
        return ", ".join(f"rank {rank} on {host}" for rank, host in enumerate(hosts) if host)

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over ranks by key; a key that a rank lacks counts as 0."""
        parts = self.gather(values)
        return {key: sum((part.get(key, 0.0) for part in parts), 0.0) for part in parts for key in part}

    def fence(self) -> None:
        """Wait until every rank has arrived."""
        if self.world_size > 1:
            dist.barrier(group=self._control)

    def raise_on_all_ranks(self, error: BaseException | None, where: str) -> None:
        """Wait for all ranks and raise on every rank if any arrives with an error (SYN-3).

        Raises:
            DistributedError: names `where` and every failing rank with its message.
        """
        self.gather_or_raise(None, where, error)

    def gather_or_raise(self, value: Any, where: str, error: BaseException | None = None) -> list[Any]:
        """`value` of every rank, or the same error on every rank.

        A rank that failed before this gather arrives at the next fence instead; the others see its error here and do
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


def capture_error(function: Callable[..., Any], *args: Any) -> Exception | None:
    """Run `function` and return its error instead of raising, so that collectives around it stay aligned."""
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001  (raised again, on all ranks, at the next fence)
        return error
    return None


def check_master_port(port: int) -> None:
    """Check that rank 0 can listen on `port`, where the learner's ranks meet.

    Raises:
        OSError: it cannot; names the process that uses the port, if the system tells, and the way out.
    """
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0) + port_holder(port)
        raise OSError(
            f"the learner's ranks cannot meet at port {port}: {reason}; end that process or choose another port: "
            f"make train PORT={port + 1}, make grpo PORT={port + 1} (deepspeed --master_port {port + 1})"
        ) from error


def port_holder(port: int) -> str:
    """The process that listens on `port`, if the system tells this user; for an error message."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f"; held by process {connection.pid}: {command[:200]}"
    return ""
