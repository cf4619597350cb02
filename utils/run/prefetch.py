"""Micro-steps prepared while earlier ones train (LRN-8).

Threads of one rank, for a `Prefetcher` that works in the background (rollout servers):

    main       get(step) ------ waits ------------------------------> micro-steps of `step`: pack, learn, log
                 | wakes                                                ^
    prefetch     +-> draw --> ... --> generate (HTTP) --> next draw     |
                       |       ^         |                              |
    encode             +-> encode        |  of the next micro-step      |
    finish                               +-> judge ---------------------+

The `prefetch` thread generates for one micro-step after the other in dataloader order, so the engines get their next
requests as soon as the last responses are there. Other engines generate on all ranks together: there everything
happens inside `get`, in the main thread. This module knows nothing of weights, ranks or targets.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

Item = TypeVar("Item")
Key = tuple[int, int]  # optimizer step, micro-step within it


class Stages(Protocol[Item]):
    """Stages of a micro-step, in this order; `Item` is a finished one."""

    encode: Callable[[Any], Any] | None  # samples to what `generate` takes; None: `generate` takes samples

    def draw(self) -> Any:
        """Draw the samples of the next micro-step. Called once per micro-step, in order."""

    def generate(self, encoded: Any, step: int, micro_step_idx: int) -> Any:
        """Get the engine's responses; the only stage that may wait for an engine."""

    def judge(self, responses: Any, step: int) -> Item:
        """Finish the micro-step."""

    def lag(self, item: Item, step: int) -> int:
        """Age of the oldest weights that made the item, in optimizer steps at `step`."""


class Prefetcher(Generic[Item]):
    """Finished micro-steps in order. Every sample is drawn once and kept until its step was handed out.

    With `stages.encode`, the next micro-step is drawn and encoded while the current one generates.

    Args:
        num_micro_steps: per optimizer step.
        window: optimizer steps that may be prepared before their turn; with 0 only micro-steps of the current step. It
            also bounds the lag of an item: an older one is made again, from the same samples.
        queue_limit: finished micro-steps of later steps that may wait.
        background: False where `generate` is collective (all ranks take part): then all happens inside `get`.

    Attributes:
        num_remade: micro-steps that were too old and made again.
    """

    def __init__(
        self,
        stages: Stages[Item],
        num_micro_steps: int,
        *,
        window: int = 0,
        queue_limit: int = 1,
        background: bool = True,
    ) -> None:
        self._stages = stages
        self._num_micro_steps = num_micro_steps
        self._window = window
        self._queue_limit = queue_limit
        self._background = background
        self.num_remade = 0
        self._changed = threading.Condition()  # guards everything below
        self._samples: dict[Key, Sequence[Any]] = {}
        self._encoded: dict[Key, Future] = {}
        self._items: dict[Key, Future[Item]] = {}
        self._current_step = 0
        self._error: Exception | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._encoder = ThreadPoolExecutor(1, "encode")
        self._finisher = ThreadPoolExecutor(1, "finish")

    def get(self, step: int) -> list[Item]:
        """Return all micro-steps of `step`, the same ones if called again. Later steps may be prepared from here on.

        Raises:
            Exception: whatever a stage raised. The next call tries again from there.
        """
        keys = [(step, micro) for micro in range(self._num_micro_steps)]
        with self._changed:
            self._current_step = step
            for done in [key for key in self._samples if key[0] < step]:
                del self._samples[done]
                self._items.pop(done, None)
                self._encoded.pop(done, None)
            self._changed.notify_all()
        if self._background:
            self._start()
            self._wait_for(keys)
        for key in keys:
            if key not in self._items:
                self._prepare(key)
            elif self._stages.lag(self._items[key].result(), step) > self._window:
                self.num_remade += 1
                self._prepare(key)
        return [self._items[key].result() for key in keys]

    def prepared_from(self, step: int) -> tuple[list[Item], int]:
        """State for a checkpoint taken before `step`: finished micro-steps from there on, in order and without a gap,
        and how many have been drawn, these included. A failed one is left to the `get` that raises its error."""
        with self._changed:
            drawn = sorted(key for key in self._samples if key[0] >= step)
            generated = [self._items[key] for key in itertools.takewhile(lambda key: key in self._items, drawn)]
        finished = itertools.takewhile(lambda item: item.exception() is None, generated)
        return [item.result() for item in finished], len(drawn)

    def restore(self, step: int, items: Sequence[Item]) -> None:
        """Continue before `step` with the items of `prepared_from`; `draw` draws their samples again."""
        self._current_step = step
        for item in items:
            key = self._first_missing()
            self._samples[key] = self._stages.draw()
            self._items[key] = Future()
            self._items[key].set_result(item)

    def drain(self, timeout_s: float | None = None) -> None:
        """Stop issuing requests and wait for those in flight. Finished micro-steps are kept."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None

    def _start(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            return
        self._error, self._stopping = None, False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def _wait_for(self, keys: list[Key]) -> None:
        def is_over() -> bool:
            return self._error is not None or all(key in self._items for key in keys)

        with self._changed:
            self._changed.wait_for(is_over)
            if not all(key in self._items for key in keys):
                raise self._error

    def _run(self) -> None:
        """Body of the `prefetch` thread."""
        try:
            while (key := self._next_key()) is not None:
                self._prepare(key)
        except Exception as error:  # noqa: BLE001  (raised by the next `get`, on the rank's main thread)
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next_key(self) -> Key | None:
        """Wait until another micro-step may be prepared; None once draining."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._may_prepare(self._first_missing()))
            return None if self._stopping else self._first_missing()

    def _may_prepare(self, key: Key) -> bool:
        num_waiting = sum(other[0] > self._current_step for other in self._items)
        ahead = key[0] - self._current_step
        return ahead <= 0 or (ahead <= self._window and num_waiting < self._queue_limit)

    def _first_missing(self) -> Key:
        key = (self._current_step, 0)
        while key in self._items:
            key = self._after(key)
        return key

    def _after(self, key: Key) -> Key:
        step, micro = key
        return (step, micro + 1) if micro + 1 < self._num_micro_steps else (step + 1, 0)

    def _prepare(self, key: Key) -> None:
        with self._changed:
            work = self._draw_and_encode(key)
            if self._stages.encode and self._background and self._may_prepare(self._after(key)):
                self._draw_and_encode(self._after(key))
        try:
            encoded = work.result() if isinstance(work, Future) else work
        except Exception:
            self._encoded.pop(key)  # so that the next attempt encodes again
            raise
        responses = self._stages.generate(encoded, *key)
        with self._changed:
            self._encoded.pop(key, None)
            self._items[key] = self._finisher.submit(self._stages.judge, responses, key[0])
            self._changed.notify_all()

    def _draw_and_encode(self, key: Key) -> Any:
        """Return the argument of `generate` for `key`, or a future of it; draw it if it was not."""
        if key not in self._samples:
            self._samples[key] = self._stages.draw()
        if self._stages.encode is None:
            return self._samples[key]
        if key not in self._encoded:
            self._encoded[key] = self._encoder.submit(self._stages.encode, self._samples[key])
        return self._encoded[key]
