"""An NCCL without GPUs that behaves as badly as the real one, for vLLM's own `PyNcclCommunicator` to stand on.

It takes the place of vLLM's `NCCLLibrary` and moves real bytes between processes over loopback. Its manners:

- `ncclCommInitRank` blocks in C until every rank has come; nothing ends it.
- Collectives run on streams. One whose peer is gone, frozen or never posts its part simply never ends: a closed
  connection is not an error, and nobody tells the peers. A broadcast ends at the sender when all have received it.
- Only `ncclCommAbort` from another thread frees what is blocked. It then ends without an error: the receiver's memory
  holds poison, or a part of the message, or all of it.
- The abort returns a while after those calls have. Any call with an aborted or destroyed communicator ends the process.
- With `EMULATED_NCCL_LAUNCH_BLOCKS=1` a collective's call blocks in C, too, as it may while NCCL connects.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.emulated_nccl import streams
from tests.emulated_nccl.gate import Gate, mark, violation

POISON = 0x4B  # four of them are the float 13323083.0
ABORT_S = 0.3  # how long an abort takes after it has freed the blocked calls
LAUNCH_BLOCKS = "EMULATED_NCCL_LAUNCH_BLOCKS"
_ITEM_BYTES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}  # of ncclDataType_t
_FLOAT = 7

_comms: dict[int, "Comm"] = {}
_handles = itertools.count(1000)
_listeners: dict[bytes, socket.socket] = {}  # by the cookie in the unique id
_group = threading.local()


def half_way(index: int) -> None:
    """For tests to replace: called when this process has received half of its communicator's `index`-th broadcast."""


class Aborted(Exception):
    """The communicator was aborted while bytes were under way."""


class Comm:
    """One rank's end. Rank 0 holds a connection to every other rank, by rank; the others one to rank 0."""

    def __init__(self, rank: int, peers: list[socket.socket]) -> None:
        self.rank, self.peers = rank, peers
        self.waker, self._alarm = socket.socketpair()
        self.in_flight = 0
        self.num_received = 0
        self.idle = threading.Condition()
        self.launching = threading.Lock()
        for peer in peers:
            peer.setblocking(False)

    def abort(self) -> None:
        self._alarm.send(b"!")

    def close(self) -> None:
        for end in (*self.peers, self.waker, self._alarm):
            end.close()

    def move(self, sends: dict[socket.socket, memoryview], receives: dict[socket.socket, memoryview]) -> None:
        """Send and receive all of these bytes. A peer that hung up is waited for like one that is slow."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.waker, selectors.EVENT_READ)
            moves = [(selectors.EVENT_WRITE, peer, view, peer.send) for peer, view in sends.items()]
            moves += [(selectors.EVENT_READ, peer, view, peer.recv_into) for peer, view in receives.items()]
            moves = [move for move in moves if len(move[2])]
            for event, peer, view, step in moves:
                selector.register(peer, event, [view, step])
            left = len(moves)
            while left:
                for key, _ in selector.select():
                    if key.data is None:
                        raise Aborted
                    view, step = key.data
                    try:
                        moved = step(view[: 1 << 20])
                    except BlockingIOError:
                        continue
                    except OSError:
                        moved = 0
                    key.data[0] = view[moved:]
                    if moved == 0:
                        selector.unregister(key.fileobj)  # gone; `left` never gets to 0
                    elif moved == len(view):
                        selector.unregister(key.fileobj)
                        left -= 1

    def broadcast(self, memory: memoryview) -> None:
        size = struct.pack("q", len(memory))
        if self.rank == 0:
            self.move({peer: memoryview(size) for peer in self.peers}, {})
            self.move({peer: memory for peer in self.peers}, {})
            self.move({}, {peer: memoryview(bytearray(1)) for peer in self.peers})
        else:
            (root,) = self.peers
            announced = bytearray(8)
            self.move({}, {root: memoryview(announced)})
            if announced != size:
                violation(
                    f"rank 0 broadcasts {struct.unpack('q', announced)[0]} bytes, here {len(memory)} are expected"
                )
            half = len(memory) // 2
            self.move({}, {root: memory[:half]})
            half_way(self.num_received)
            self.num_received += 1
            self.move({}, {root: memory[half:]})
            self.move({root: memoryview(b"k")}, {})

    def sum_floats(self, values: Any, out: Any, count: int) -> None:
        own = bytes(values)
        if self.rank == 0:
            parts = {peer: bytearray(len(own)) for peer in self.peers}
            self.move({}, {peer: memoryview(part) for peer, part in parts.items()})
            columns = zip(*(struct.unpack(f"{count}f", part) for part in (own, *parts.values())), strict=True)
            own = struct.pack(f"{count}f", *map(sum, columns))
            self.move({peer: memoryview(own) for peer in self.peers}, {})
        else:
            (root,) = self.peers
            self.move({root: memoryview(own)}, {})
            total = bytearray(len(own))
            self.move({}, {root: memoryview(total)})
            own = bytes(total)
        ctypes.memmove(out, own, len(own))


class EmulatedNCCLLibrary:
    """vLLM's `NCCLLibrary`, as far as `PyNcclCommunicator` and weight syncs use it."""

    def __init__(self, so_file: str | None = None) -> None:
        mark("used")

    def ncclGetRawVersion(self) -> int:
        return 22907

    def ncclGetVersion(self) -> str:
        return "2.29.7"

    def ncclGetUniqueId(self) -> Any:
        """The address where rank 0 waits, and a cookie, in NCCL's 128 bytes."""
        from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId

        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        cookie = secrets.token_bytes(16)
        _listeners[cookie] = listener
        return ncclUniqueId.from_buffer_copy(struct.pack("H16s110x", listener.getsockname()[1], cookie))

    def ncclCommInitRank(self, world_size: int, unique_id: Any, rank: int) -> int:
        port, cookie = struct.unpack("H16s110x", bytes(unique_id))
        peers: list[socket.socket] = []
        done = Gate()

        def meet() -> None:
            if rank == 0:
                peers.extend(_accept(_listeners.pop(cookie), cookie, world_size))
            else:
                peers.append(_join(port, cookie, rank))
            done.open()

        threading.Thread(target=meet, name="ncclCommInitRank", daemon=True).start()
        done.wait()
        handle = next(_handles)
        _comms[handle] = Comm(rank, peers)
        return handle

    def ncclBroadcast(
        self, send: Any, receive: Any, count: int, datatype: int, root: int, handle: int, stream: Any
    ) -> None:
        if root != 0:
            raise NotImplementedError("emulated NCCL broadcasts from rank 0 only")
        comm, num_bytes = _comm(handle, "ncclBroadcast"), count * _ITEM_BYTES[datatype]
        memory = memoryview((ctypes.c_char * num_bytes).from_address(receive.value)).cast("B")
        if comm.rank:
            ctypes.memset(receive.value, POISON, num_bytes)
        _launch(comm, lambda: comm.broadcast(memory), stream)

    def ncclAllReduce(
        self, send: Any, receive: Any, count: int, datatype: int, op: int, handle: int, stream: Any
    ) -> None:
        if datatype != _FLOAT or op != 0:
            raise NotImplementedError("emulated NCCL sums float32 only")
        comm = _comm(handle, "ncclAllReduce")
        values = (ctypes.c_char * (4 * count)).from_address(send.value)
        _launch(comm, lambda: comm.sum_floats(values, receive.value, count), stream)

    def ncclGroupStart(self) -> None:
        _group.depth = getattr(_group, "depth", 0) + 1

    def ncclGroupEnd(self) -> None:
        if getattr(_group, "depth", 0) == 0:
            violation("ncclGroupEnd without ncclGroupStart")
        _group.depth -= 1
        if _group.depth == 0:
            together, _group.together = getattr(_group, "together", []), []
            _start(together)

    def ncclCommAbort(self, handle: int) -> None:
        comm = _comm(handle, "ncclCommAbort")
        del _comms[handle]
        comm.abort()
        _end(comm)

    def ncclCommDestroy(self, handle: int) -> None:
        """Waits for what is under way, like the real one."""
        comm = _comm(handle, "ncclCommDestroy")
        del _comms[handle]
        _end(comm)

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"emulated NCCL has no {name}")


def keep(tensor: Any) -> None:
    """Hold the memory of this thread's next collective until its end: on a GPU, memory that a caller drops is reused in
    the order of its stream."""
    _group.tensor = tensor


def _comm(handle: Any, call: str) -> Comm:
    handle = getattr(handle, "value", handle)
    if handle not in _comms:
        violation(f"{call} with a communicator that was aborted or destroyed: use after free")
    return _comms[handle]


def _end(comm: Comm) -> None:
    done = Gate()

    def wait() -> None:
        with comm.idle:
            comm.idle.wait_for(lambda: comm.in_flight == 0)
        time.sleep(ABORT_S)
        comm.close()
        done.open()

    threading.Thread(target=wait, name="ncclCommAbort", daemon=True).start()
    done.wait()


def _launch(comm: Comm, work: Callable[[], None], stream: Any) -> None:
    if not comm.launching.acquire(blocking=False):
        violation("two threads call into one communicator")
    try:
        tensor, _group.tensor = getattr(_group, "tensor", None), None
        item = SimpleNamespace(comm=comm, work=work, stream=streams.by_handle(stream.value), tensor=tensor)
        with comm.idle:
            comm.in_flight += 1
        if getattr(_group, "depth", 0):
            _group.together = [*getattr(_group, "together", []), item]
        else:
            _start([item])
    finally:
        comm.launching.release()


def _start(items: list[SimpleNamespace]) -> None:
    """Enqueue collectives. A group leaves a stream its order: NCCL merges calls of one communicator only."""
    gates = [item.stream.enqueue(functools.partial(_run, item)) for item in items]
    if os.environ.get(LAUNCH_BLOCKS) == "1":
        for gate in gates:
            gate.wait()


def _run(item: SimpleNamespace) -> None:
    with contextlib.suppress(Aborted):
        item.work()
    with item.comm.idle:
        item.comm.in_flight -= 1
        item.comm.idle.notify_all()


def _accept(listener: socket.socket, cookie: bytes, world_size: int) -> list[socket.socket]:
    joined: dict[int, socket.socket] = {}
    while len(joined) < world_size - 1:
        peer, _ = listener.accept()
        greeting = _receive_exactly(peer, 20)
        if greeting[:16] == cookie:
            joined[struct.unpack("i", greeting[16:])[0]] = peer
    listener.close()
    for peer in joined.values():
        with contextlib.suppress(OSError):  # killed meanwhile: found out never, or by whoever watches
            peer.sendall(b"k")
    return [joined[rank] for rank in sorted(joined)]


def _join(port: int, cookie: bytes, rank: int) -> socket.socket:
    while True:
        with contextlib.suppress(OSError):
            root = socket.create_connection(("127.0.0.1", port))
            root.sendall(cookie + struct.pack("i", rank))
            if _receive_exactly(root, 1) == b"k":
                return root
        threading.Event().wait()  # rank 0 is gone: no error, no end


def _receive_exactly(peer: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        if not (part := peer.recv(num_bytes - len(received))):
            return b""
        received += part
    return received
