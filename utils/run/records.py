"""Seconds by part and the metrics that both trainers log for every optimizer step (LOG-3)."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from utils.learner.learner import StepResult

LOGGED_PARTS = ("rollout", "sync", "prepare", "train", "step")


class Timer:
    """Seconds by part since the run began, for any thread; threads in one part at the same time count once."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._popped: Counter[str] = Counter()
        self._num_inside: Counter[str] = Counter()  # threads in a part
        self._counted: dict[str, float] = {}  # until when a part's time is in `seconds`
        self._lock = threading.Lock()

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the time inside the context as seconds of `part`."""
        self._count(part, 1)
        try:
            yield
        finally:
            self._count(part, -1)

    def pop(self) -> dict[str, float]:
        """Seconds by part since the last call. With prefetch they include rollouts of coming steps."""
        with self._lock:  # another thread may begin a part that there was not before
            passed = {name: value - self._popped[name] for name, value in self.seconds.items()}
            self._popped.update(passed)
        return passed

    def _count(self, part: str, change: int) -> None:
        """Count a part's time until now, and the threads in it from now on."""
        with self._lock:
            now = time.monotonic()
            self.seconds[part] += (now - self._counted.get(part, now)) * (self._num_inside[part] > 0)
            self._counted[part] = now
            self._num_inside[part] += change


def step_metrics(result: StepResult, ranks: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Metrics of one optimizer step that do not depend on the method.

    Args:
        ranks: one entry per rank: `num_tokens` trained, `seconds` (`Timer.pop()`), `lengths` (new tokens of each
            response), `lags` (age in optimizer steps of the weights that made each trained response).
    """
    parts = (*LOGGED_PARTS, *(("teacher",) if any("teacher" in own for own in ranks["seconds"]) else ()))
    slowest = {part: max(own.get(part, 0.0) for own in ranks["seconds"]) for part in parts}
    lengths = np.array([length for own in ranks["lengths"] for length in own] or [0])
    lags = [lag for own in ranks["lags"] for lag in own] or [0]
    return {
        **{f"learning_rate/{name}": value for name, value in result.learning_rates.items()},
        **{f"seconds/{part}": value for part, value in slowest.items()},
        "rollout/new_tokens_mean": float(lengths.mean()),
        "rollout/new_tokens_p90": float(np.percentile(lengths, 90)),
        "rollout/new_tokens_p99": float(np.percentile(lengths, 99)),
        "train/grad_norm": result.grad_norm,
        "train/tokens_per_s": sum(ranks["num_tokens"]) / max(slowest["step"], 1e-9),
        "train/fill_ratio": sum(ranks["num_tokens"]) / max(sum(ranks["room"]), 1),
        "rollout/remade": float(sum(ranks["remade"])),
        "train/policy_lag": float(np.mean(lags)),
        "train/policy_lag_max": float(max(lags)),
    }
