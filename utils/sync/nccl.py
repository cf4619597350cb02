"""One NCCL communicator as both ends of a weight stream use it: on a stream of its own, watched, and abortable (SYN-3).

NCCL's calls have no time limit, an aborted collective returns as if it had ended well, and a communicator must not be
touched once its abort has begun. So an abort marks first, and whoever waited for a bucket looks at the mark.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from utils.dist import capture_error

ABORT_KEY = "abort"  # who gives an update up sets it in the rendezvous store: rank 0 or a worker
CALL_S = 1.0  # a call of NCCL that has not returned for so long is blocked, and only an abort ends it

# All that both ends use of CUDA; tests without a GPU put others in their place. A stream has `wait_stream`,
# `synchronize` and `record_event`, the event `query`.
current_stream, new_stream, release_memory = torch.cuda.current_stream, torch.cuda.Stream, torch.cuda.empty_cache


def current_device() -> torch.device:
    return torch.device("cuda", torch.accelerator.current_device_index())


@dataclass(eq=False)
class Channel:
    """A communicator of rank 0 and the workers of one server; `abort` may be called from any thread at any time."""

    communicator: Any  # vLLM's `PyNcclCommunicator`; None once it is aborted
    meeting: Any  # the rendezvous group, with its `store`
    failure: Exception | None = None  # the mark
    stream: Any = field(default_factory=lambda: new_stream())
    _in_call: Any = field(default_factory=threading.Lock)
    _aborting: Any = field(default_factory=threading.Lock)

    def broadcast(self, bucket: torch.Tensor) -> "NcclWork":
        """Send (rank 0) or receive a bucket, after the current stream's work. Raises the channel's failure."""
        with self._in_call:
            self.check()
            self.stream.wait_stream(current_stream())
            self.communicator.broadcast(bucket, src=0, stream=self.stream)
            return NcclWork(self, self.stream.record_event())

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def abort(self, reason: Exception) -> None:
        """Mark, then abort; the first reason counts. Returns when the communicator is gone: at most some seconds."""
        self.failure = self.failure or reason
        with self._aborting:
            if self.communicator is None:
                return
            has_returned = self._in_call.acquire(timeout=CALL_S)
            self.communicator.destroy()
            self.communicator = None
            if has_returned:
                self._in_call.release()

    def close(self) -> None:
        """Abort, and let go of the store; on rank 0 that frees its port."""
        self.abort(RuntimeError("the communicator was closed"))
        self.meeting.store = None


@dataclass
class NcclWork:
    """A bucket on its way, with the two methods of torch's `Work` that the transports use."""

    channel: Channel
    event: Any

    def is_completed(self) -> bool:
        return self.channel.failure is not None or self.event.query()

    def wait(self) -> None:
        """Wait in Python, where signals are served. Raises the channel's failure, whatever CUDA says of the bucket."""
        poll(self.is_completed)
        self.channel.check()


def poll(is_over: Callable[[], bool], check: Callable[[], None] = lambda: None) -> None:
    """Wait until `is_over`; `check` may raise meanwhile."""
    pause_s = 1e-5
    while not is_over():
        check()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1e-3)


@contextlib.contextmanager
def watched(check: Callable[[], None], interval_s: float, on_failure: Callable[[Exception], None]) -> Iterator[None]:
    """Call `check` in a thread, since the body may be blocked in C; its first error goes to `on_failure`."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(interval_s):
            if (error := capture_error(check)) is not None:
                return on_failure(error)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()  # an abort that has begun is finished before anybody goes on
