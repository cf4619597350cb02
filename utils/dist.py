"""The learner's process groups and the few collectives that the trainer needs."""

import atexit
import contextlib
import fcntl
import hmac
import ipaddress
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

# Environment variables that tools.launch sets for the ranks of one run.
COMMAND_NAME = "LEARNER_COMMAND"
ALONE_NAME = "LEARNER_ALONE"  # the id of a process that no launcher started; its children inherit the variable
SECRET_NAME = "LEARNER_SECRET"  # noqa: S105  (the name, not the secret)
MAX_MESSAGE_BYTES = 1 << 30  # of one rank in one gather
ALIVE_S = 5.0  # between signs of life of rank 0 while others wait for its work
_SEAL_BYTES = 32


logger = logging.getLogger(__name__)


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
        self._secret, self._num_gathers = os.environ.get(SECRET_NAME, "").encode(), 0

    def check_port(self) -> None:
        """Raise OSError on rank 0 if it could not listen at the launcher's address and port. torchrun listens on its
        own, so it is skipped."""
        is_given = "MASTER_PORT" in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if self.is_main and is_given and not dist.is_initialized():
            check_master_port(int(os.environ["MASTER_PORT"]))
            if self.spans_nodes and "MASTER_ADDR" in os.environ:
                check_master_address(os.environ["MASTER_ADDR"])

    def check_interface(self) -> None:
        """Raise OSError if, on several nodes, Gloo would listen where the others cannot reach this one."""
        host, wanted = socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME")
        names = {name for _, name in socket.if_nameindex()} - {"lo"}
        with contextlib.suppress(OSError):  # the name leads nowhere, where Gloo takes loopback, too
            if not self.spans_nodes or names >= set((wanted or "lo").split(",")):
                return
            if not wanted and not socket.gethostbyname(host).startswith("127."):
                return
        reason = (
            f"GLOO_SOCKET_IFNAME={wanted} is not here" if wanted else "its host name resolves to loopback or not at all"
        )
        what_to_do = f"set GLOO_SOCKET_IFNAME to one of {', '.join(sorted(names))} (docs/scaling.md)"
        raise OSError(f"node {host} cannot be reached by the other nodes: {reason}; {what_to_do}")

    def open(self) -> None:
        """Open the process groups (collective), under `deepspeed`, `torchrun` or, for one rank, without either."""
        import deepspeed
        from torch.utils.cpp_extension import get_default_build_root

        if "WORLD_SIZE" not in os.environ:
            os.environ[ALONE_NAME] = str(os.getpid())
        for key, value in {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            os.environ.setdefault(key, value)
        if "MASTER_PORT" not in os.environ:
            with socket.socket() as probe:  # without SO_REUSEADDR, with which the system may pick a port in use
                probe.bind(("127.0.0.1", 0))
                os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
        if not self.spans_nodes and "lo" in (name for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # for DeepSpeed's later groups, too
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        if not dist.is_initialized():  # an earlier run in this process may have left them open
            place: dict[str, Any] = {"store": self._open_store(), "rank": self.rank, "world_size": self.world_size}
            if backend == "nccl" and self.world_size > 1:
                place["device_id"] = self.device  # as DeepSpeed does
            dist.init_process_group(backend, timeout=self._timeout, **place)
        self._control = dist.new_group(backend="gloo", timeout=self._timeout)
        atexit.register(self.close)  # a user's mistake ends the set-up; the threads of open groups may then abort it
        if self.local_rank == 0:
            remove_dead_locks(Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()))
        self.gather(None)  # names a stranger among the ranks before DeepSpeed would wait for it without a limit
        deepspeed.init_distributed(dist_backend=backend, timeout=self._timeout, auto_mpi_discovery=False, verbose=False)
        self.fence()
        # DeepSpeed 0.19's CPU operator never removes its 66 MiB of shared memory per rank, which would fill the
        # machine's memory after enough runs. All ranks have opened it by now: without a name it is freed at exit.
        name = f"{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_{self.rank}"
        Path("/dev/shm", f"deepspeed_allreduce_buffer_{name}").unlink(missing_ok=True)  # noqa: S108  (only unlinked)

    def _open_store(self) -> Any:
        """Where the ranks meet. torch's own would listen on every interface, as torchrun's does."""
        if self.world_size == 1:
            return dist.HashStore()  # type: ignore[attr-defined]  # nobody else comes, so nothing listens
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return next(dist.rendezvous("env://", timeout=self._timeout))[0]  # type: ignore[attr-defined]
        host = os.environ["MASTER_ADDR"] if self.spans_nodes else "127.0.0.1"
        port, timeout_s = int(os.environ["MASTER_PORT"]), self._timeout.total_seconds()
        if self.is_main:
            return host_store(host, port, self.world_size, timeout_s, "ranks")
        return dist.TCPStore(host, port, self.world_size, False, self._timeout)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Leave the process groups; safe to call twice."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._control = None

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order, on every rank; plain values and numpy arrays.

        It travels as JSON, never as a pickle: whoever takes a rank's place gets nothing executed. So tuples arrive as
        lists, and keys must be strings. Each message is sealed with the launcher's secret (docs/security.md).

        Raises:
            DistributedError: names the ranks whose message is not one of this run.
        """
        if self.world_size == 1:
            return [value]
        self._num_gathers += 1
        text = json.dumps(value, default=_array_to_json).encode()
        values, strangers = [], []
        for rank, message in enumerate(self._gather_bytes(self._seal(self.rank, text) + text)):
            try:
                if not hmac.compare_digest(message[:_SEAL_BYTES], self._seal(rank, message[_SEAL_BYTES:])):
                    raise ValueError
                values.append(json.loads(message[_SEAL_BYTES:], object_hook=_array_from_json))
            except Exception:  # noqa: BLE001  (whatever a stranger sent)
                strangers.append(rank)
        self._refuse(strangers, f"does not know this run's secret ({SECRET_NAME}) or is not in step")
        return values

    def _seal(self, rank: int, text: bytes) -> bytes:
        """Authenticates `text` as what `rank` says in this gather. Without a secret anyone can make it."""
        return hmac.digest(self._secret, b"%d %d " % (rank, self._num_gathers) + text, "sha256")

    def _gather_bytes(self, message: bytes) -> list[bytes]:
        """`message` of every rank, unchecked."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(message)]), group=self._control)
        if len(message) > MAX_MESSAGE_BYTES:
            rule = f"a message of {len(message):,} bytes, of at most {MAX_MESSAGE_BYTES:,}"
            raise DistributedError(f"this rank has {rule} for the others; name images by path, or make them smaller")
        wrong = [rank for rank, size in enumerate(sizes) if not 0 <= size <= MAX_MESSAGE_BYTES]
        self._refuse(wrong, f"announces a message that is not of 0 to {MAX_MESSAGE_BYTES} bytes")
        parts = [torch.zeros(int(max(sizes)), dtype=torch.uint8) for _ in range(self.world_size)]
        own = torch.zeros_like(parts[0])
        own[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        dist.all_gather(parts, own, group=self._control)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def _refuse(self, strangers: list[int], what: str) -> None:
        if strangers:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise DistributedError(
                f"what claims to be rank {', '.join(map(str, strangers))} of this run {what}: another program may have "
                f"joined at {where}; nothing of it was executed. Start the run again, all ranks by one launcher, and "
                "keep others from that port (docs/security.md)"
            )

    def places(self, where: bool) -> str:
        """List the ranks for which `where` holds, with their hosts (collective); empty if there are none."""
        hosts = self.gather(socket.gethostname() if where else None)
        return ", ".join(f"rank {rank} on {host}" for rank, host in enumerate(hosts) if host)

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Sums over ranks by key; a key that a rank lacks counts as 0."""
        parts = self.gather(values)
        return {key: sum((part.get(key, 0.0) for part in parts), 0.0) for part in parts for key in part}

    def first(self, value: Any) -> Any:
        """The value of the first rank that has one, on every rank; None if none has (collective)."""
        return next(filter(None, self.gather(value)), None)

    def fence(self) -> None:
        """Wait until every rank has arrived. (torch's own barrier of a Gloo group would allocate on the GPU.)"""
        self.gather(None)

    def on_main(self, work: Callable[[Callable[[], None]], Any]) -> Any:
        """`work(alive)` of rank 0, on every rank (collective). The others wait as long as it takes, if it calls
        `alive()` more often than ranks wait for each other.

        Raises:
            DistributedError: it raised.
        """
        made, error, last = None, None, time.monotonic()

        def alive() -> None:
            nonlocal last
            if time.monotonic() - last > ALIVE_S:
                last = time.monotonic()
                self.gather("at work")

        if self.is_main:
            made, error = outcome_of(work, alive)
            self.gather("done")
        else:
            while self.gather(None)[0] == "at work":
                pass
        return self.gather_or_raise(made, "rank 0's work", error)[0]

    def on_each(self, work: Callable[[], Any], where: str) -> Any:
        """This rank's `work()`, once all ranks have done theirs, however long that takes (collective).

        Each works in a thread, while the rank tells the others that it is there; a stop request does not wait for it.

        Raises:
            DistributedError: as `raise_on_all_ranks`.
        """
        outcomes: list[tuple[Any, Exception | None]] = []
        thread = threading.Thread(target=lambda: outcomes.append(outcome_of(work)), name="work", daemon=True)
        thread.start()
        while not all(self.gather(not thread.is_alive())):
            thread.join(ALIVE_S)
        made, error = outcomes[0]
        self.raise_on_all_ranks(error, where)
        return made

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
        try:
            arrived = self.gather((None if error is None else f"{type(error).__name__}: {error}", value))
        except Exception as broken:  # another rank is gone, maybe for the same reason
            if error is None:
                raise
            raise broken from error
        failed: dict[str, list[str]] = {}  # ranks by message: what all of them say is told once
        for rank, (message, _) in enumerate(arrived):
            if message is not None:
                failed.setdefault(message, []).append(str(rank))
        if failed:
            summary = f"{where} failed on {sum(map(len, failed.values()))} of {self.world_size} ranks"
            told = [f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {text}" for text, ranks in failed.items()]
            raise DistributedError("\n".join([summary, *told])) from error
        return [value for _, value in arrived]


def outcome_of(function: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """Run `function` and return what it returns and its error, one of them None, so that collectives around it stay
    aligned."""
    try:
        return function(*args), None
    except Exception as error:  # noqa: BLE001  (raised again, on all ranks, at the next fence)
        return None, error


def capture_error(function: Callable[..., Any], *args: Any) -> Exception | None:
    """The error of `outcome_of`."""
    return outcome_of(function, *args)[1]


def _array_to_json(value: Any) -> Any:
    """JSON for what `json` does not know: numpy's arrays and numbers. Raises TypeError for all else."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        raise TypeError(f"ranks cannot tell each other a {type(value).__name__}; make it plain values")
    return {"__array__": value.ravel().tolist(), "dtype": value.dtype.str, "shape": value.shape}


def _array_from_json(value: dict[str, Any]) -> Any:
    if "__array__" not in value:
        return value
    return np.array(value["__array__"], dtype=value["dtype"]).reshape(value["shape"])


def host_store(host: str, port: int, world_size: int, timeout_s: float, who: str = "workers") -> Any:
    """Host torch's TCPStore on `host:port` only; by default it listens on every interface. Return when all have come.

    Raises TimeoutError, with the address and how many of `who` came.
    """
    listener = socket.create_server((host, port), family=socket.getaddrinfo(host, port)[0][0])
    limit = timedelta(seconds=timeout_s)
    own: dict[str, Any] = {"multi_tenant": True, "master_listen_fd": listener.detach()}
    try:
        return dist.TCPStore(host, port, world_size, True, limit, **own)  # type: ignore[attr-defined]
    except dist.DistStoreError as error:
        if (joined := re.search(r"(\d+)/\d+ clients joined", str(error))) is None:
            raise
        came = f"{int(joined[1]) - 1} of {world_size - 1} {who}"  # without rank 0
        raise TimeoutError(f"timed out: {came} came to {host}:{port} in {timeout_s:g} s") from None


def check_master_address(host: str) -> None:
    """Raise OSError if rank 0 cannot listen at `host`, or only where other nodes do not reach it."""
    try:
        address = socket.getaddrinfo(host, 0)[0]
        socket.create_server(address[4][:2], family=address[0]).close()
        is_loopback = ipaddress.ip_address(address[4][0]).is_loopback
        reason = "it leads to loopback there" * (is_loopback and host != address[4][0])
    except OSError as error:
        reason = f"no address of that node ({error})"
    if reason:
        what_to_do = "give --master_addr an address of its node that the others reach (docs/scaling.md)"
        raise OSError(f"rank 0 on {socket.gethostname()} cannot listen at MASTER_ADDR={host}: {reason}; {what_to_do}")


def remove_dead_locks(folder: Path) -> None:
    """Remove what a process killed while it compiled or loaded an operator left in torch's build `folder`.

    Torch locks an operator by a file that it keeps open (`FileBaton`), and waits for ever for one that nobody deletes.
    """
    for lock in folder.rglob("lock"):
        with open(folder / ".check", "w") as guard, contextlib.suppress(FileNotFoundError):  # its holder removed it
            fcntl.flock(guard, fcntl.LOCK_EX)  # a lock made after another process has removed the dead one stays
            seen = lock.stat()
            if any(_has_open(process, lock) for process in psutil.process_iter()):
                continue
            now = lock.stat()  # of a new lock, made during the scan? It often gets the old one's inode number
            if (now.st_ino, now.st_mtime_ns) == (seen.st_ino, seen.st_mtime_ns):
                lock.unlink()
                logger.warning("removed %s: the process that held this compile lock is dead", lock)


def _has_open(process: psutil.Process, path: Path) -> bool:
    folder = Path(f"/proc/{process.pid}/fd")
    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        for fd in os.listdir(folder):
            with contextlib.suppress(OSError):  # this one was closed meanwhile; another may be the lock
                if os.path.samefile(folder / fd, path):
                    return True
    return False


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
