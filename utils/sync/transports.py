"""Transports: buckets of weights from rank 0 to all rollout servers at once, over Gloo between CPUs, NCCL between GPUs.

One walk over the tensors serves both; they differ in how a bucket is put on its way, and in where it lies. The
receiving side is utils/sync/vllm_worker.py.
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from utils.dist import host_store
from utils.sync import nccl
from utils.sync.merged_weights import MergedWeights, WeightEntry
from utils.sync.wire import bucket_layouts, loopback_if_local, tensor_digest

WATCH_INTERVAL_S = 0.2


class Transport:
    """Buckets to one group per server, every bucket to all servers at the same time (SYN-11).

    A bucket is packed while the previous one is on its way. Bytes in flight, being packed and gathered together never
    exceed two buckets (SYN-5): where they would, the transport first waits for the bucket in flight.
    """

    device = torch.device("cpu")  # where buckets lie

    def __init__(self, bucket_bytes: int, timeout_s: float, open_timeout_s: float) -> None:
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self.open_timeout_s = open_timeout_s
        self.groups: list[Any] = []
        self.deadline = 0.0  # of the `send` under way

    def open(self, addresses: list[tuple[str, int]], world_sizes: list[int]) -> None:
        """Host one store per `(address, group port)` and wait until all workers of that server have joined.

        One after the other, within `open_timeout_s` in all: vLLM redirects the process's stdout meanwhile, and two
        threads doing that at once (vLLM 0.32) lose it for good. It costs nothing, since the workers of all servers are
        already on their way.
        """
        deadline = time.monotonic() + self.open_timeout_s
        try:
            for address, world_size in zip(addresses, world_sizes, strict=True):
                with loopback_if_local(address[0]):
                    left_s = max(0.001, deadline - time.monotonic())
                    self.groups.append(self.open_group(address, world_size + 1, left_s))
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # its frames keep the store, and with it the port
            raise

    def send(
        self, weights: MergedWeights, entries: Sequence[WeightEntry], digest: bool, check_servers: Callable[[], None]
    ) -> dict[str, str]:
        """Stream `entries`; return their digests by name if requested, else nothing.

        `check_servers` raises once a server's side of the transfer failed. After a failure the walk continues without
        sending where other ranks take part in its gathers; the error is raised at its end.
        """
        self.deadline = deadline = time.monotonic() + self.timeout_s
        budget = 2 * max(self.bucket_bytes, max(entry.num_bytes for entry in entries))
        digests: dict[str, str] = {}

        def check() -> None:
            check_servers()
            if time.monotonic() > deadline:
                raise TimeoutError("a bucket was not taken by all servers before sync.timeout_s")

        def pack(buffer: torch.Tensor, entry: WeightEntry, offset: int) -> None:
            view = buffer[offset : offset + entry.num_bytes].view(entry.dtype).view(entry.shape)
            weights.write(entry, view)
            if digest:
                digests[entry.name] = tensor_digest(view)

        outbox, is_sharded = _Outbox(self, check), weights.is_sharded
        with nccl.watched(check, WATCH_INTERVAL_S, self.abort):
            for bucket in bucket_layouts([entry.num_bytes for entry in entries], self.bucket_bytes):
                outbox.wait(at_most_bytes=budget - bucket.num_bytes)
                buffer = outbox.attempt(outbox.allocate, bucket.num_bytes)
                for entry, offset in zip(entries[bucket.first : bucket.last], bucket.offsets, strict=True):
                    if is_sharded:
                        outbox.wait(at_most_bytes=budget - bucket.num_bytes - entry.num_bytes)
                        outbox.spare = None  # its bytes count for the gathered tensor
                    with weights.gathered(entry):
                        outbox.attempt(pack, buffer, entry, offset)
                outbox.attempt(outbox.start, buffer)
                del buffer  # or who keeps an error of this call would keep it, too
            outbox.wait(at_most_bytes=0)
        if outbox.failure is not None:
            traceback.clear_frames(outbox.failure.__traceback__)  # who keeps the error must not keep buckets and ports
            raise outbox.failure
        return digests

    def abort(self, reason: Exception) -> None:
        """End what is on its way, in whatever call another thread waits for it. Gloo's sender never blocks."""


class GlooTransport(Transport):
    """Buckets over Gloo; for CPU."""

    def open_group(self, address: tuple[str, int], world_size: int, timeout_s: float) -> torch.distributed.ProcessGroup:
        """Open rank 0's end of vLLM's `stateless_init_torch_distributed_process_group`."""
        from vllm.distributed.utils import get_tcp_uri, init_gloo_process_group

        store = torch.distributed.PrefixStore(get_tcp_uri(*address), host_store(*address, world_size, timeout_s))
        return init_gloo_process_group(store, 0, world_size, timedelta(seconds=timeout_s))

    def start(self, group: torch.distributed.ProcessGroup, buffer: torch.Tensor) -> torch.distributed.Work:
        options = torch.distributed.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, True
        left_s = max(0.0, self.deadline - time.monotonic()) + 1.0  # `send` notices the deadline first, and says more
        options.timeout = timedelta(seconds=left_s)
        return group.broadcast([buffer], options)

    def close(self) -> None:
        """Leave the groups; the receiving side notices and must be opened anew. Frees the ports at once: a store that
        stayed alive would serve its old keys to the next one on the same port."""
        for group in self.groups:
            with contextlib.suppress(RuntimeError):
                group.shutdown()
        self.groups.clear()


class NcclTransport(Transport):
    """Buckets over NCCL, a communicator and a stream per server; for CUDA (`utils.sync.nccl`).

    This thread asks for events and never waits in C, where no signal is served; a watchdog covers the calls that block
    all the same.
    """

    @property
    def device(self) -> torch.device:
        return nccl.current_device()

    def open_group(self, address: tuple[str, int], world_size: int, timeout_s: float) -> nccl.Channel:
        from utils.sync.rendezvous import open_nccl

        return open_nccl(*address, 0, world_size, timeout_s)

    def send(self, weights: MergedWeights, entries: Sequence[WeightEntry], *args: Any, **named: Any) -> dict[str, str]:
        nccl.current_stream().synchronize()  # the optimizer's step is done before its weights are merged
        digests = super().send(weights, entries, *args, **named)
        for channel in self.groups:
            channel.check()  # the watchdog may have aborted it behind the last bucket
        if len(entries) == len(weights.entries):  # the first sync's largest buckets are larger than all later ones
            nccl.release_memory()
        return digests

    def start(self, group: nccl.Channel, buffer: torch.Tensor) -> nccl.NcclWork:
        return group.broadcast(buffer)

    def abort(self, reason: Exception) -> None:
        """Mark all communicators, tell their workers, abort them all."""
        for channel in self.groups:
            channel.failure = channel.failure or reason
        for channel in self.groups:
            with contextlib.suppress(RuntimeError):
                channel.meeting.store.set(nccl.ABORT_KEY, "")
        for channel in self.groups:
            channel.abort(reason)

    def close(self) -> None:
        for channel in self.groups:
            channel.close()
        self.groups.clear()


@dataclass(eq=False)
class _Outbox:
    """Buckets under way, oldest first. Keeps the first failure and does nothing after it."""

    transport: Transport
    check: Callable[[], None]  # raises if a server failed or the time is up
    failure: Exception | None = None
    # Memory of the bucket that finished last: fresh memory would cost as much as filling it (page faults).
    spare: torch.Tensor | None = None
    under_way: list[tuple[torch.Tensor, list[Any]]] = field(default_factory=list)

    def attempt(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call the function, unless something failed before; None if it fails."""
        if self.failure is None:
            try:
                return function(*args)
            except Exception as error:
                self.failure = error
                self.transport.abort(error)  # before its memory is used for something else
                self.under_way = []
                self.spare = None
        return None

    def start(self, buffer: torch.Tensor) -> None:
        """Put a bucket on its way to all servers."""
        works = []
        for group in self.transport.groups:  # a comprehension's closure would keep the bucket in a traceback
            works.append(self.transport.start(group, buffer))
        self.under_way.append((buffer, works))

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory for the next bucket, uint8 `[num_bytes]`: the spare one where it is large enough."""
        spare, self.spare = self.spare, None
        if spare is not None and spare.untyped_storage().nbytes() >= num_bytes:
            return torch.empty(0, dtype=torch.uint8, device=spare.device).set_(spare.untyped_storage(), 0, (num_bytes,))
        del spare
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.transport.device)

    def wait(self, at_most_bytes: int) -> None:
        """Wait until at most that many bytes are under way."""
        while sum(buffer.untyped_storage().nbytes() for buffer, _ in self.under_way) > max(0, at_most_bytes):
            self.attempt(self._finish_oldest)

    def _finish_oldest(self) -> None:
        works = self.under_way[0][1]
        nccl.poll(lambda: all(work.is_completed() for work in works), self.check)
        for work in works:
            work.wait()  # completed: returns at once, or raises the transport's error
        self.spare = self.under_way.pop(0)[0]
