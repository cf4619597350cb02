"""NCCL's manners within one process: buckets pass between threads, an abort frees them without an error.

`Communicator` stands in for vLLM's `PyNcclCommunicator`, `Stream` for a CUDA stream. The rendezvous is the real one.
"""

import queue
import threading
import time
from types import SimpleNamespace

import torch
from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

from utils.sync import nccl

GARBAGE = 0xAB


class Stream:
    """Runs what is queued on it in order, while the host goes on."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._queue.get()()

    def put(self, work) -> None:
        self._queue.put(work)

    def wait_stream(self, other) -> None:
        pass

    def record_event(self) -> SimpleNamespace:
        event = threading.Event()
        self.put(event.set)
        return SimpleNamespace(query=event.is_set)


class Exchange:
    """What the ranks of one communicator share."""

    def __init__(self) -> None:
        self.moved = threading.Condition()
        self.sent: dict[int, torch.Tensor] = {}
        self.taken: dict[int, int] = {}
        self.joined = 0


class Communicator:
    """As vLLM's: opening waits for all ranks; broadcasts queue on a stream and wait there for all ranks."""

    exchanges: dict[bytes, Exchange] = {}
    made: list["Communicator"] = []
    num_ids = 0

    def __init__(self, group, device) -> None:
        self.group, self.rank, self.world_size, self.device = group, group.rank, group.world_size, device
        self.disabled, self.is_freed, self.count = False, False, 0
        self.events: list[str] = []
        unique_id = ncclUniqueId()
        if self.rank == 0:
            Communicator.num_ids += 1
            unique_id = ncclUniqueId.from_buffer_copy(Communicator.num_ids.to_bytes(128, "little"))
        key = bytes(group.broadcast_obj(unique_id, 0))
        self.exchange = Communicator.exchanges.setdefault(key, Exchange())
        with self.exchange.moved:
            self.exchange.joined += 1
            self.exchange.moved.notify_all()
            self.exchange.moved.wait_for(lambda: self.exchange.joined == self.world_size)
        Communicator.made.append(self)

    def broadcast(self, tensor, src, stream) -> None:
        assert not self.is_freed, "used after free"
        assert src == 0 and tensor.dtype == torch.uint8
        self.events.append(f"broadcast {self.count}")
        index, self.count = self.count, self.count + 1
        stream.put(lambda: self._pass(index, tensor))

    def _pass(self, index: int, tensor: torch.Tensor) -> None:
        exchange = self.exchange
        with exchange.moved:
            if self.rank == 0:
                exchange.sent[index] = tensor.clone()
                exchange.moved.notify_all()
                exchange.moved.wait_for(lambda: self.is_freed or exchange.taken.get(index) == self.world_size - 1)
                return
            tensor.fill_(GARBAGE)
            exchange.moved.wait_for(lambda: self.is_freed or index in exchange.sent)
            if not self.is_freed:
                tensor.copy_(exchange.sent[index])
                exchange.taken[index] = exchange.taken.get(index, 0) + 1
                exchange.moved.notify_all()

    def destroy(self) -> None:
        assert not self.is_freed, "freed twice"
        self.events.append("abort")
        with self.exchange.moved:
            self.is_freed = True
            self.exchange.moved.notify_all()
        time.sleep(0.05)  # the others run on before this one says that it is disabled
        self.disabled = True


def install(monkeypatch) -> list[str]:
    """Put the fakes in CUDA's place for one test; returns a list that grows whenever cached memory is released."""
    from vllm.distributed.device_communicators import pynccl

    released: list[str] = []
    Communicator.made.clear()
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", Communicator)
    monkeypatch.setattr(nccl, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(nccl, "current_stream", lambda: SimpleNamespace(synchronize=lambda: released.append("synced")))
    monkeypatch.setattr(nccl, "new_stream", Stream)
    monkeypatch.setattr(nccl, "release_memory", lambda: released.append("released"))
    return released
