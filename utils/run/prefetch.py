"""Micro-steps prepared side by side and while earlier ones train (LRN-8).

Threads of one rank, for a `Prefetcher` that works in the background (rollout servers):

    main                 get(step) --> draw ---- waits --------------> micro-steps of `step`: pack, learn, log
                                        |  |                             ^
    encode                              |  +-> encode                    |
                                        |         |                      |
    prefetch-<key>, side by side        +-> ... --+-> generate (HTTP) ---|--> draw the next
                                                        |                |
    judge                                               +-> judge -------+

All micro-steps that may be prepared are drawn in dataloader order and have a `prefetch` thread each; how many of their
requests are in flight is up to the engine (DIS-3). Other engines generate on all ranks together: there `generate` runs
inside `get`, one micro-step after the other. This module knows nothing of weights, ranks or targets.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from utils.dist import capture_error

Item = TypeVar("Item")
Result = TypeVar("Result")
Key = tuple[int, int]  # optimizer step, micro-step within it

logger = logging.getLogger(__name__)

REMIND_S = 60.0  # between two lines about a judge that takes so long
STOP_S = 10.0  # how long a judge is waited for after a stop request


class Stages(Protocol[Item]):
    """Stages of a micro-step, in this order; `Item` is a finished one."""

    encode: Callable[[Any], Any] | None  # samples to what `generate` takes; None: `generate` takes samples

    def draw(self) -> Any:
        """Draw the samples of the next micro-step. Called once per micro-step, in order."""

    def generate(self, encoded: Any, step: int, micro_step_idx: int) -> Any:
        """Get the engine's responses; the only stage that may wait for an engine."""

    def judge(self, responses: Any, step: int) -> Item:
        """Finish the micro-step. May run a user's code; `judging`, where there is one, says what it is at."""

    def lag(self, item: Item, step: int) -> int:
        """Age of the oldest weights that made the item, in optimizer steps at `step`."""


class Prefetcher(Generic[Item]):
    """Finished micro-steps in order. Every sample is drawn once and kept until its step was handed out.

    Args:
        num_micro_steps: per optimizer step.
        num_steps: of the run; later ones are not prepared before their turn, which may not come.
        window: optimizer steps that may be prepared before their turn; with 0 only micro-steps of the current step. It
            also bounds the lag of an item: an older one is made again, from the same samples.
        queue_limit: micro-steps of later steps that may be finished or generating.
        background: False where `generate` is collective (all ranks take part): then all happens inside `get`.
        num_threads: micro-steps that may generate at once; one more is drawn and encoded.
        draws_more: `generate` draws, too (`drawing`). Then micro-steps of later steps go one at a time: each has drawn
            without a gap, so that `restore` can draw the same again.
        begin_judging: called first in the thread that judges.

    Attributes:
        num_remade: micro-steps that were too old and made again.
        is_stuck: whether a judge was given up. Its thread may run for ever, and Python would wait for it at its end.
    """

    def __init__(
        self,
        stages: Stages[Item],
        num_micro_steps: int,
        num_steps: int | None = None,
        *,
        window: int = 0,
        queue_limit: int = 1,
        background: bool = True,
        num_threads: int = 1,
        draws_more: bool = False,
        begin_judging: Callable[[], None] | None = None,
    ) -> None:
        self._stages = stages
        self._num_micro_steps = num_micro_steps
        self._num_steps = num_steps
        self._window = window
        self._queue_limit = queue_limit
        self.works_ahead = background
        self._num_threads = num_threads
        self._draws_more = draws_more
        self.num_remade = 0
        self._changed = threading.Condition()  # guards everything below
        self._samples: dict[Key, Sequence[Any]] = {}
        self._encoded: dict[Key, Future] = {}
        self._running: set[Key] = set()  # generating
        self._items: dict[Key, Future[Item]] = {}
        self._current_step = 0
        self._error: Exception | None = None  # the first one; nothing begins after it
        self._stopping = False
        self._stop, self._stopped_at = threading.Event(), 0.0
        self.is_stuck = False
        self._encoder = ThreadPoolExecutor(1, "encode")
        self._judge_thread = ThreadPoolExecutor(1, "judge", initializer=begin_judging)

    def get(self, step: int) -> list[Item]:
        """Return all micro-steps of `step`, the same ones if called again. Later steps may be prepared from here on.

        Raises:
            Exception: whatever a stage raised first, once the others have ended. The next call tries again from there.
        """
        keys = [(step, micro) for micro in range(self._num_micro_steps)]
        with self._changed:
            self._current_step = step
            for done in [key for key in self._samples if key[0] < step]:
                del self._samples[done]
                self._items.pop(done, None)
                self._encoded.pop(done, None)
        self._make(keys)
        too_old = [key for key in keys if self._stages.lag(self._result(self._items[key]), step) > self._window]
        with self._changed:
            self.num_remade += len(too_old)
            for key in too_old:
                del self._items[key]
        if too_old:
            self._make(too_old)
        return [self._result(self._items[key]) for key in keys]

    def prepared_from(self, step: int) -> tuple[list[Item], int]:
        """State for a checkpoint taken before `step`: finished micro-steps from there on, in order and without a gap,
        and how many have been drawn, these included. A failed one is left to the `get` that raises its error. A step
        that was begun and given up contributes nothing: it is prepared again from scratch, and logged like any other.
        """
        with self._changed:
            drawn = sorted(key for key in self._samples if key[0] >= step)
            kept = drawn if self._current_step < step else []
            generated = [self._items[key] for key in itertools.takewhile(lambda key: key in self._items, kept)]
        finished = itertools.takewhile(lambda item: capture_error(self._result, item) is None, generated)
        return [item.result() for item in finished], len(drawn)

    def restore(self, step: int, items: Sequence[Item]) -> None:
        """Continue before `step` with the items of `prepared_from`; `draw` draws their samples again. A collective
        `generate` makes them anew: ranks may hold different numbers of them, and would wait for each other."""
        self._current_step = step
        if not self.works_ahead:
            return
        for item in items:
            key = self._first_missing()
            self._samples[key] = self._stages.draw()
            self._items[key] = Future()
            self._items[key].set_result(item)

    @contextmanager
    def drawing(self, step: int, micro_step_idx: int) -> Iterator[None]:
        """For a `generate` that draws, so that the order is always the same: after all earlier micro-steps, alone."""
        with self._changed:
            self._changed.wait_for(lambda: not any(key < (step, micro_step_idx) for key in self._running))
            yield

    def in_judge_thread(self, work: Callable[..., Result], *args: Any) -> Result:
        """Return `work(*args)`, done by the thread that judges, behind what waits there. Called in any other thread."""
        return self._result(self._judge_thread.submit(work, *args))

    def end_waits_at(self, stop: threading.Event) -> None:
        """Wait for no judge for longer than `STOP_S` once `stop` is set (LRN-12)."""
        self._stop = stop

    def _result(self, future: Future[Result]) -> Result:
        """What the judge returns, however long that takes; a line each minute says what it is at.

        Raises:
            RuntimeError: it has not returned in time after a stop request.
            Exception: its own.
        """
        begun, num_told = time.monotonic(), 0
        while not wait([future], timeout=0.5).done:
            now, what = time.monotonic(), getattr(self._stages, "judging", "judging")
            if self._stop.is_set():
                self._stopped_at = self._stopped_at or now
                if self.is_stuck or now - self._stopped_at > STOP_S:
                    self.is_stuck = True
                    raise RuntimeError(f"{what}: has not returned {STOP_S:g} s after the stop request")
            if now - begun > (num_told + 1) * REMIND_S:
                num_told += 1
                logger.warning("%s: has taken %.0f s so far", what, now - begun)
        return future.result()

    def drain(self, timeout_s: float | None = None) -> None:
        """Stop issuing requests and wait for those in flight. Finished micro-steps are kept."""
        with self._changed:
            self._stopping = True
            self._changed.wait_for(lambda: not self._running, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Drain, and drop what waits to be encoded or judged: Python ends only when such threads have no work left."""
        self.drain(timeout_s)
        for thread in (self._encoder, self._judge_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    def _make(self, keys: list[Key]) -> None:
        """Return when all of them are generated. Raises: what a stage raised first, once the others have ended."""
        with self._changed:
            if self._error is not None:
                self._changed.wait_for(lambda: not self._running)
            for _ in range(1 + bool(self._running)):  # what fails may have begun before this call
                self._error, self._stopping = None, False
                self._issue()
                self._changed.wait_for(lambda: not self._running or all(key in self._items for key in keys))
                if all(key in self._items for key in keys):
                    return
            raise self._error

    def _issue(self) -> None:
        """Begin all micro-steps that may be prepared now. The caller holds the lock."""
        try:
            while not self._stopping and self._error is None and self._may_prepare(key := self._first_missing()):
                self._draw_and_encode(key)
                if len(self._running) == self._num_threads:
                    break  # drawn and encoded until a thread is free
                self._running.add(key)
                if self.works_ahead:
                    threading.Thread(target=self._prepare, args=(key,), name=f"prefetch-{key}", daemon=True).start()
                else:
                    self._prepare(key)
        except Exception as error:  # noqa: BLE001  (raised by the next `get`, on the rank's main thread)
            self._error = error

    def _may_prepare(self, key: Key) -> bool:
        if key[0] <= self._current_step:
            return True
        if not self.works_ahead or (self._draws_more and self._running) or key[0] == self._num_steps:
            return False
        num_ahead = sum(other[0] > self._current_step for other in {*self._items, *self._running})
        return key[0] <= self._current_step + self._window and num_ahead < self._queue_limit

    def _first_missing(self) -> Key:
        steps, micro_steps = itertools.count(self._current_step), range(self._num_micro_steps)
        keys = ((step, micro) for step in steps for micro in micro_steps)
        return next(key for key in keys if key not in self._items and key not in self._running)

    def _prepare(self, key: Key) -> None:
        """Body of a `prefetch` thread."""
        item = error = None
        try:
            encoded = self._encoded[key].result() if self._stages.encode else self._samples[key]
            responses = self._stages.generate(encoded, *key)
            item = self._judge_thread.submit(self._stages.judge, responses, key[0])
        except Exception as caught:  # noqa: BLE001  (raised by the next `get`, on the rank's main thread)
            error = caught
        except BaseException as caught:  # noqa: BLE001  (in a thread `SystemExit` would end it without a word)
            error = RuntimeError(f"{type(caught).__name__}: {caught}")
        with self._changed:
            self._error = self._error or error
            self._encoded.pop(key, None)  # also after a failure, so that the next attempt encodes again
            self._running.remove(key)
            if item is not None:
                self._items[key] = item
            if self.works_ahead:
                self._issue()
            self._changed.notify_all()

    def _draw_and_encode(self, key: Key) -> None:
        if key not in self._samples:
            self._samples[key] = self._stages.draw()
        if self._stages.encode and key not in self._encoded and key not in self._items and key not in self._running:
            self._encoded[key] = self._encoder.submit(self._stages.encode, self._samples[key])
