"""The order in which ranks draw samples: an endless stream of shuffled epochs, dealt out to the ranks in turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from utils.data.samples import Sample


@dataclass
class SampleStream:
    """Endless deterministic stream of samples over all ranks (LRN-1).

    An epoch is a shuffle of all files' samples. A file of weight 1 gives each of its samples once per epoch, of weight
    2 twice, of weight 0.5 every second epoch. Epochs follow each other without a gap: rank `r` of `W` takes the global
    positions r, r + W, r + 2W, ..., so `n` draws on every rank use `n * W` consecutive positions whatever `W` is.
    """

    datasets: Sequence[Sequence[Sample]]
    weights: Sequence[float] | None = None
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    _num_drawn: int = field(default=0, init=False)  # draws of this rank since _start
    _start: int = field(default=0, init=False)  # first global position of this run
    _epoch: int = field(default=-1, init=False)
    _epoch_start: int = field(default=0, init=False)  # global position where _epoch begins
    _order: np.ndarray | Sequence = field(default=(), init=False)  # (file, index) pairs of _epoch

    def __post_init__(self) -> None:
        self.weights = [1.0] * len(self.datasets) if self.weights is None else list(self.weights)
        if len(self.weights) != len(self.datasets):
            raise ValueError(f"{len(self.weights)} weights for {len(self.datasets)} files")
        if min(self.weights, default=0) <= 0 or not all(map(len, self.datasets)):
            raise ValueError("every file needs a positive weight and at least one sample")

    @property
    def epoch_size(self) -> int:
        """Samples of the first epoch, over all ranks; with fractional weights others may have one more of a file."""
        weighted = zip(self.datasets, self.weights, strict=True)
        return sum(math.floor(Fraction(str(weight)) * len(dataset)) for dataset, weight in weighted)

    @property
    def position(self) -> int:
        """Global position of this rank's next sample."""
        return self._start + self._num_drawn * self.world_size + self.rank

    def next(self, n: int) -> list[Sample]:
        """This rank's next `n` samples. Where one of them cannot be read, none is drawn."""
        samples, before = [], self.state_dict()
        try:
            for _ in range(n):
                while self.position >= self._epoch_start + len(self._order):
                    self._epoch_start += len(self._order)
                    self._epoch += 1
                    self._order = self.epoch_order(self._epoch)
                file, index = self._order[self.position - self._epoch_start]
                samples.append(self.datasets[file][index])
                self._num_drawn += 1
        except BaseException:
            self.load_state_dict(before)
            raise
        return samples

    def state_dict(self, num_undone: int = 0) -> dict[str, Any]:
        """State for a resumed run, as if this rank had drawn `num_undone` samples fewer; equal on all ranks when all
        have drawn equally often."""
        return {"position": self._start + (self._num_drawn - num_undone) * self.world_size, **self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; the number of ranks may differ. Raises `ValueError` for a state of other data, weights
        or another seed."""
        for name, value in self._fingerprint().items():
            if state[name] != value:
                raise ValueError(f"data position: {name} was {state[name]}, now {value}; resume with the same data")
        self._start, self._num_drawn = int(state["position"]), 0
        self._epoch, self._epoch_start = -1, 0
        self._order = ()

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Shuffled (file, index) pairs [epoch size, 2] of one epoch."""
        pairs = []
        for file, (dataset, weight) in enumerate(zip(self.datasets, self.weights, strict=True)):
            # This epoch's part of the file's own endless stream. Five samples at weight 0.5 give 2, 3, 2, 3, ...: no
            # sample comes twice before all have come once.
            per_epoch = Fraction(str(weight)) * len(dataset)
            part = np.arange(math.floor(epoch * per_epoch), math.floor((epoch + 1) * per_epoch))
            turn, at = np.divmod(part, len(dataset))
            index = np.empty_like(at)
            for number in np.unique(turn):  # each pass over a file has its own order
                order = np.random.default_rng([self.seed, 1, file, number]).permutation(len(dataset))
                index[turn == number] = order[at[turn == number]]
            pairs.append(np.stack([np.full_like(index, file), index], axis=1))
        return np.random.default_rng([self.seed, 0, epoch]).permutation(np.concatenate(pairs))

    def _fingerprint(self) -> dict[str, Any]:
        return {"sizes": [len(d) for d in self.datasets], "weights": list(self.weights), "seed": self.seed}
