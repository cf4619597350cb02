"""Rows of coming micro-steps, prepared while the current ones train (LRN-8).

Per rank one thread asks for answers, micro-step after micro-step in dataloader order, a second one encodes what is
asked next, and a third one finishes what came back: the engine has its next request as soon as the last answers are
there. Knows nothing of weights, ranks or targets: how far ahead it may go is said by `take`, what is too old by
`is_fresh`.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Key = tuple[int, int]  # optimizer step, micro-step within it


class Prefetcher(Generic[Item]):
    """Finished micro-steps in order; every sample is drawn once and kept until its step was taken.

    Args:
        draw: samples of the next micro-step; called once per micro-step, in order.
        ask: `(samples or what encode made of them, step, micro_step_idx)` to whatever `finish` takes; may wait for an
            engine.
        finish: `(what ask gave, step)` to an item, without waiting for anybody.
        micro_steps: per optimizer step.
        window: optimizer steps that may be prepared before their turn; with 0 only micro-steps of the step taken.
        queue_limit: finished micro-steps of later steps that may wait.
        is_fresh: `(item, step)`: may `step` train on it? If not it is made again, from the same samples, when taken.
        encode: samples to what `ask` takes, without an engine; done while earlier ones are asked, which draws one
            micro-step further ahead. None: `ask` takes samples.
        background: False where asking is collective (all ranks take part): then all happens inside `take`.

    Attributes:
        num_remade: micro-steps that were too old and made again.
    """

    def __init__(
        self,
        draw: Callable[[], Sequence[Any]],
        ask: Callable[[Sequence[Any], int, int], Any],
        finish: Callable[[Any, int], Item],
        micro_steps: int,
        *,
        window: int = 0,
        queue_limit: int = 1,
        is_fresh: Callable[[Item, int], bool] = lambda item, step: True,
        encode: Callable[[Sequence[Any]], Any] | None = None,
        background: bool = True,
    ) -> None:
        self._draw, self._ask, self._finish, self._is_fresh = draw, ask, finish, is_fresh
        self._micro_steps, self._window, self._queue_limit = micro_steps, window, queue_limit
        self.num_remade = 0
        self._changed = threading.Condition()  # guards everything below
        self._samples: dict[Key, Sequence[Any]] = {}
        self._items: dict[Key, Future[Item]] = {}
        self._taking = 0  # the step whose turn it is
        self._error: Exception | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._background = background
        self._encode, self._encoded = encode, dict[Key, Future]()
        self._encoder = ThreadPoolExecutor(1, "encode")
        self._finisher = ThreadPoolExecutor(1, "finish")

    def take(self, step: int) -> list[Item]:
        """The items of all micro-steps of `step`; the same again if asked again. Lets later steps be prepared.

        Raises:
            Exception: whatever asking or finishing raised; the next `take` or `start` tries again from there.
        """
        keys = [(step, micro) for micro in range(self._micro_steps)]
        with self._changed:
            self._taking = step
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
                self._make(key)
            elif not self._is_fresh(self._items[key].result(), step):
                self.num_remade += 1
                self._make(key)
        return [self._items[key].result() for key in keys]

    def ahead(self, step: int) -> tuple[list[Item], int]:
        """What a checkpoint in front of `step` holds: finished micro-steps from there on, in order and without a gap,
        and how many have been drawn, these included. What failed is left to the `take` that raises it."""
        with self._changed:
            drawn = sorted(key for key in self._samples if key[0] >= step)
            asked = [self._items[key] for key in itertools.takewhile(lambda key: key in self._items, drawn)]
        finished = itertools.takewhile(lambda item: item.exception() is None, asked)
        return [item.result() for item in finished], len(drawn)

    def restore(self, step: int, items: Sequence[Item]) -> None:
        """Go on in front of `step` with what `ahead` gave; `draw` gives again what had been drawn from there on."""
        self._taking = step
        for item in items:
            key = self._first_missing()
            self._samples[key] = self._draw()
            self._items[key] = Future()
            self._items[key].set_result(item)

    def stop(self, timeout_s: float | None = None) -> None:
        """Let nobody ask any more; returns when the call that is running has ended. What is finished is kept."""
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
        """The thread: the next micro-step, whenever it may be made."""
        try:
            while (key := self._next_key()) is not None:
                self._make(key)
        except Exception as error:  # noqa: BLE001  (raised by the next `take`, on the rank's main thread)
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next_key(self) -> Key | None:
        """Waits until another micro-step may be made; None when there is to be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._may_go_on())
            return None if self._stopping else self._first_missing()

    def _may_go_on(self) -> bool:
        return self._may_make(self._first_missing()[0])

    def _may_make(self, step: int) -> bool:
        num_waiting = sum(key[0] > self._taking for key in self._items)
        return step <= self._taking or (step <= self._taking + self._window and num_waiting < self._queue_limit)

    def _first_missing(self) -> Key:
        step, micro = self._taking, 0
        while (step, micro) in self._items:
            step, micro = self._after((step, micro))
        return step, micro

    def _after(self, key: Key) -> Key:
        step, micro = key
        return (step, micro + 1) if micro + 1 < self._micro_steps else (step + 1, 0)

    def _make(self, key: Key) -> None:
        with self._changed:
            work = self._begin(key)
            if self._encode and self._background and self._may_make(self._after(key)[0]):
                self._begin(self._after(key))
        try:
            encoded = work.result() if isinstance(work, Future) else work
        except Exception:
            self._encoded.pop(key)  # for the next attempt
            raise
        asked = self._ask(encoded, *key)
        with self._changed:
            self._encoded.pop(key, None)
            self._items[key] = self._finisher.submit(self._finish, asked, key[0])
            self._changed.notify_all()

    def _begin(self, key: Key) -> Sequence[Any] | Future:
        """What `ask` takes for `key`, drawn if it was not, or a promise of it."""
        if key not in self._samples:
            self._samples[key] = self._draw()
        if self._encode is None:
            return self._samples[key]
        if key not in self._encoded:
            self._encoded[key] = self._encoder.submit(self._encode, self._samples[key])
        return self._encoded[key]
