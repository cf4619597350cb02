"""CUDA's streams and events on CPU tensors.

What the emulated NCCL enqueues on a stream runs in the stream's own thread, in order. torch's own work on CPU tensors
runs at once, in the caller: it is what a stream would have done by the time it becomes current or waited for.
"""

import contextlib
import itertools
import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from tests.emulated_nccl.gate import Gate, mark

_numbers = itertools.count(1)
_streams: dict[int, "Stream"] = {}
_current = threading.local()


class Stream:
    """`torch.cuda.Stream`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = next(_numbers)
        _streams[self.cuda_stream] = self
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._last = Gate()
        self._last.open()
        self._thread: threading.Thread | None = None  # starts late: processes that only import this may fork

    def _run(self) -> None:
        while True:
            self._work.get()()

    def enqueue(self, work: Callable[[], None]) -> Gate:
        """Run `work` after all that was enqueued before; the gate opens at its end."""
        done = Gate()

        def run() -> None:
            work()
            done.open()

        self._last = done
        self._work.put(run)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"stream {self.cuda_stream}", daemon=True)
            self._thread.start()
        return done

    def synchronize(self) -> None:
        self._last.wait()

    def query(self) -> bool:
        return self._last.is_open

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        self._wait(event.gate)

    def wait_stream(self, other: "Stream") -> None:
        self._wait(other._last)

    def _wait(self, gate: Gate) -> None:
        if self is current_stream():
            gate.wait()  # torch's work on this stream comes next, and runs in this thread
        self.enqueue(gate.wait)


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.gate = Gate()
        self.gate.open()

    def record(self, stream: Stream | None = None) -> None:
        self.gate = (stream or current_stream()).enqueue(lambda: None)

    def query(self) -> bool:
        return self.gate.is_open

    def synchronize(self) -> None:
        self.gate.wait()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)


DEFAULT = Stream()


def current_stream(*_: Any) -> Stream:
    return getattr(_current, "stream", DEFAULT)


def default_stream(*_: Any) -> Stream:
    return DEFAULT


def set_stream(stream: Stream) -> None:
    _current.stream = stream


def vllm_current_stream() -> Stream:
    """vLLM's own, which moves a thread that never set a stream onto a new one, for good; the main one leaves a mark."""
    if not hasattr(_current, "stream"):
        if threading.current_thread() is threading.main_thread():
            mark("side_stream", "".join(traceback.format_stack()))
        set_stream(Stream())
    return current_stream()


@contextlib.contextmanager
def stream(other: Stream) -> Iterator[None]:
    """`with torch.cuda.stream(other)`: what follows comes after the work of `other`, for torch's part at once."""
    before = current_stream()
    if other is not before:
        other.synchronize()
    set_stream(other)
    try:
        yield
    finally:
        set_stream(before)


def synchronize(*_: Any) -> None:
    for each in list(_streams.values()):
        each.synchronize()


def by_handle(handle: int | None) -> Stream:
    return _streams[handle] if handle else DEFAULT
