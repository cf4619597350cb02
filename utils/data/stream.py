"""Which samples a rank draws, in which order: an endless stream of shuffled epochs, shared out among the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from utils.data.samples import Sample


def epoch_size(sizes: Sequence[int], weights: Sequence[float], epoch: int = 0) -> int:
    """Samples in one epoch over files of these sizes: the sum of size x weight, each file rounded so as to add up."""
    return sum(_share(n, w, epoch)[1] - _share(n, w, epoch)[0] for n, w in zip(sizes, weights, strict=True))


def _share(size: int, weight: float, epoch: int) -> tuple[int, int]:
    """Positions [start, stop) in a file's own endless stream that this epoch uses.

    Five samples at weight 0.5 give 2, 3, 2, 3, ...: never a sample twice before all were used once.
    """
    per_epoch = Fraction(str(weight)) * size
    return math.floor(epoch * per_epoch), math.floor((epoch + 1) * per_epoch)


@dataclass
class SampleStream:
    """Endless deterministic stream of samples over all ranks (LRN-1).

    An epoch is a shuffle of all files' samples. A file of weight 1 gives each of its samples once per epoch, of weight
    2 twice, of weight 0.5 every second epoch. Epochs follow each other without a gap: rank `r` of `W` takes the global
    positions r, r + W, r + 2W, ..., so `n` draws on every rank use `n * W` consecutive positions whatever `W` is.
    """

    datasets: list[list[Sample]]
    weights: Sequence[float] | None = None
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    _taken: int = field(default=0, init=False)  # draws of this rank since _start
    _start: int = field(default=0, init=False)  # first global position of this run
    _epoch: int = field(default=0, init=False)
    _epoch_start: int = field(default=0, init=False)  # global position where _epoch begins
    _order: np.ndarray | None = field(default=None, init=False)

    def __post_init__(self):
        self.weights = [1.0] * len(self.datasets) if self.weights is None else list(self.weights)
        if len(self.weights) != len(self.datasets):
            raise ValueError(f"{len(self.weights)} weights for {len(self.datasets)} files")
        if min(self.weights, default=0) <= 0 or not all(self.datasets):
            raise ValueError("every file needs a positive weight and at least one sample")

    @property
    def position(self) -> int:
        """Global position of this rank's next sample."""
        return self._start + self._taken * self.world_size + self.rank

    @property
    def epoch(self) -> int:
        """Epoch of this rank's next sample, from 0."""
        self._seek(self.position)
        return self._epoch

    def next(self, n: int) -> list[Sample]:
        """This rank's next `n` samples."""
        return [self._draw() for _ in range(n)]

    def __iter__(self) -> Iterator[Sample]:
        while True:
            yield self._draw()

    def state_dict(self, num_undone: int = 0) -> dict[str, Any]:
        """What a resumed run needs, as if this rank had drawn `num_undone` samples less; equal on all ranks when all
        have drawn equally often."""
        return {"position": self._start + (self._taken - num_undone) * self.world_size, **self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, also with another number of ranks.

        Raises:
            ValueError: the state comes from other data, weights or another seed.
        """
        for name, value in self._fingerprint().items():
            if state[name] != value:
                raise ValueError(f"data position: {name} was {state[name]}, now {value}; resume with the same data")
        self._start, self._taken = int(state["position"]), 0

    def _fingerprint(self) -> dict[str, Any]:
        return {"sizes": [len(d) for d in self.datasets], "weights": list(self.weights), "seed": self.seed}

    def _draw(self) -> Sample:
        self._seek(self.position)
        file, index = self._order[self.position - self._epoch_start]
        self._taken += 1
        return self.datasets[file][index]

    def _seek(self, position: int) -> None:
        """Make `_order` that of the epoch which holds a global position."""
        if position < self._epoch_start:
            self._epoch, self._epoch_start, self._order = 0, 0, None
        sizes = [len(dataset) for dataset in self.datasets]
        while position >= self._epoch_start + (size := epoch_size(sizes, self.weights, self._epoch)):
            self._epoch, self._epoch_start, self._order = self._epoch + 1, self._epoch_start + size, None
        if self._order is None:
            self._order = self._epoch_order(self._epoch)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Shuffled (file, index) pairs [epoch size, 2] of one epoch."""
        pairs = []
        for file, (dataset, weight) in enumerate(zip(self.datasets, self.weights, strict=True)):
            turn, at = np.divmod(np.arange(*_share(len(dataset), weight, epoch)), len(dataset))
            index = np.empty_like(at)
            for number in np.unique(turn):  # each pass over a file has its own order
                order = np.random.default_rng([self.seed, 1, file, number]).permutation(len(dataset))
                index[turn == number] = order[at[turn == number]]
            pairs.append(np.stack([np.full_like(index, file), index], axis=1))
        return np.random.default_rng([self.seed, 0, epoch]).permutation(np.concatenate(pairs))
