"""Transports: buckets of weights from rank 0 to all rollout servers at once, over Gloo between CPUs, NCCL between GPUs.

Both have `open`, `send` and `close`. All contact with vLLM's trainer side of weight transfer is here; the receiving
side is utils/sync/vllm_worker.py.
"""

import contextlib
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from utils.sync.merged_weights import MergedWeights, WeightEntry
from utils.sync.wire import bucket_layouts, loopback_if_local, tensor_digest


class GlooTransport:
    """Buckets over Gloo, one group per server, every bucket to all servers at the same time (SYN-11); for CPU.

    A bucket is packed while the previous one is on its way. Bytes in flight, being packed and gathered together never
    exceed two buckets (SYN-5): where they would, the transport first waits for the bucket in flight.
    """

    def __init__(self, bucket_bytes: int, timeout_s: float) -> None:
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self._groups: list[torch.distributed.ProcessGroup] = []

    def open(self, addresses: list[tuple[str, int]], world_sizes: list[int]) -> None:
        """Host one store per `(address, group port)` and wait until all workers of that server have joined.

        One after the other: vLLM redirects the process's stdout meanwhile, and two threads doing that at once
        (vLLM 0.32) lose it for good. It costs nothing, since the workers of all servers are already on their way.
        """
        timeout = timedelta(seconds=self.timeout_s)
        try:
            for address, world_size in zip(addresses, world_sizes, strict=True):
                with loopback_if_local(address[0]):
                    self._groups.append(_open_group(address, world_size + 1, timeout))
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # its frames keep the store, and with it the port
            raise

    def send(
        self, weights: MergedWeights, entries: Sequence[WeightEntry], digest: bool, check_servers: Callable[[], None]
    ) -> dict[str, str]:
        """Stream `entries`; return their digests by name if requested, else nothing.

        After a failure the walk continues without sending, because other ranks take part in its gathers; the error is
        raised at its end. `check_servers` raises once a server's side of the transfer failed.
        """
        digests: dict[str, str] = {}
        budget = 2 * max(self.bucket_bytes, max(entry.num_bytes for entry in entries))
        broadcasts = _Broadcasts(self._groups, check_servers, time.monotonic() + self.timeout_s)
        is_sharded = weights.is_sharded
        for bucket in bucket_layouts([entry.num_bytes for entry in entries], self.bucket_bytes):
            broadcasts.wait(at_most_bytes=budget - bucket.num_bytes)
            buffer = broadcasts.allocate(bucket.num_bytes)
            for entry, offset in zip(entries[bucket.first : bucket.last], bucket.offsets, strict=True):
                if is_sharded:
                    broadcasts.wait(at_most_bytes=budget - bucket.num_bytes - entry.num_bytes)
                    broadcasts.spare = None  # its bytes count for the gathered tensor
                view = buffer[offset : offset + entry.num_bytes].view(entry.dtype).view(entry.shape)
                with weights.gathered(entry):
                    weights.write(entry, view)
                if digest:
                    digests[entry.name] = tensor_digest(view)
            broadcasts.start(buffer)
            del buffer, view  # or they would keep a finished bucket alive while the next one is made
        broadcasts.wait(at_most_bytes=0)
        if broadcasts.failure is not None:
            raise broadcasts.failure
        return digests

    def close(self) -> None:
        """Leave the groups; the receiving side notices and must be opened anew. Frees the ports at once: a store that
        stayed alive would serve its old keys to the next one on the same port."""
        for group in self._groups:
            with contextlib.suppress(RuntimeError):
                group.shutdown()
        self._groups.clear()


def _open_group(address: tuple[str, int], world_size: int, timeout: timedelta) -> torch.distributed.ProcessGroup:
    """Open rank 0's end of vLLM's `stateless_init_torch_distributed_process_group`.

    That function's own store listens on every interface of the machine; this one listens on `address` only.
    """
    from vllm.distributed.utils import get_tcp_uri, init_gloo_process_group

    host, port = address
    listener = socket.create_server(address, family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    store = torch.distributed.TCPStore(
        host, port, world_size, True, timeout, multi_tenant=True, master_listen_fd=listener.detach()
    )
    return init_gloo_process_group(
        torch.distributed.PrefixStore(get_tcp_uri(host, port), store), 0, world_size, timeout
    )


@dataclass(eq=False)
class _Broadcasts:
    """Broadcasts under way, oldest first. Keeps the first failure and does nothing after it."""

    groups: list[Any]
    check_servers: Callable[[], None]
    deadline: float  # on time.monotonic's clock
    failure: Exception | None = None
    # Memory of the bucket that finished last: fresh memory would cost as much as filling it (page faults).
    spare: torch.Tensor | None = None
    under_way: list[tuple[torch.Tensor, list[Any]]] = field(default_factory=list)

    def start(self, buffer: torch.Tensor) -> None:
        if self.failure is None:
            options = torch.distributed.BroadcastOptions()
            options.rootRank, options.asyncOp = 0, True
            try:
                self.under_way.append((buffer, [group.broadcast([buffer], options) for group in self.groups]))
            except RuntimeError as error:
                self._fail(error)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory for the next bucket, uint8 `[num_bytes]`: the spare one where it is large enough."""
        spare, self.spare = self.spare, None
        if spare is not None and spare.untyped_storage().nbytes() >= num_bytes:
            return torch.empty(0, dtype=torch.uint8).set_(spare.untyped_storage(), 0, (num_bytes,))
        del spare
        return torch.empty(num_bytes, dtype=torch.uint8)

    def wait(self, at_most_bytes: int) -> None:
        """Wait until at most that many bytes are under way."""
        while sum(buffer.untyped_storage().nbytes() for buffer, _ in self.under_way) > max(0, at_most_bytes):
            try:
                self._finish(self.under_way[0][1])
            except (RuntimeError, TimeoutError) as error:
                self._fail(error)
                return
            self.spare = self.under_way.pop(0)[0]

    def _finish(self, works: list[Any]) -> None:
        pause_s = 1e-5
        while not all(work.is_completed() for work in works):
            self.check_servers()
            if time.monotonic() > self.deadline:
                raise TimeoutError("a bucket was not taken by all servers before RM.vllm.sync.timeout_s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)
        for work in works:
            work.wait()  # completed: returns at once, or raises the transport's error

    def _fail(self, error: Exception) -> None:
        traceback.clear_frames(error.__traceback__)  # a caller that keeps the error must not keep the groups' ports
        self.failure = error
        self.under_way = []
        self.groups = []
        self.spare = None


class NcclTransport:
    """vLLM's own packed NCCL broadcast, fanned out to one communicator per server. For CUDA.

    Written for `vllm.distributed.weight_transfer` as it is; not run on the machines this was developed on.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self._groups: list[Any] = []

    def open(self, addresses: list[tuple[str, int]], world_sizes: list[int]) -> None:
        from utils.sync.rendezvous import open_nccl

        for (host, port), world_size in zip(addresses, world_sizes, strict=True):
            self._groups.append(open_nccl(host, port, 0, world_size + 1))

    def send(
        self, weights: MergedWeights, entries: Sequence[WeightEntry], digest: bool, check_servers: Callable[[], None]
    ) -> dict[str, str]:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        digests: dict[str, str] = {}
        walk = weights.tensors(entries=entries)

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in walk:
                check_servers()
                if digest:
                    digests[name] = tensor_digest(tensor)
                yield name, tensor

        try:
            packed_nccl_broadcast_producer(
                iterator=stream(),
                group=self,
                src=0,
                post_iter_func=lambda pair: pair[1],
                buffer_size_bytes=self.bucket_bytes,
                num_buffers=2,
            )
            torch.cuda.current_stream().synchronize()
        except Exception:
            self.close()  # ncclBroadcast cannot time out: without the abort a dead peer would hold this rank for ever
            for _ in walk:  # other ranks are in the same gathers
                pass
            raise
        return digests

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Enqueue a bucket on every server's communicator; vLLM's producer calls this."""
        for group in self._groups:
            group.broadcast(tensor, src=src, stream=stream)

    def close(self) -> None:
        for group in self._groups:
            group.destroy()
        self._groups = []
