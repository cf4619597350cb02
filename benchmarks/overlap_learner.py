"""The real stage-2 learner with its prefetch switched off and on in turns, so that one run measures both (LRN-8).

bench_overlap.py launches it with prefetch on in the config. `is_ahead` says which steps use it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import train_stage2
from utils.run import session
from utils.run.prefetch import Prefetcher

WARM_UP_STEPS = 3  # the first step waits for its own rollouts, and everything is cold
TURN_STEPS = 4  # the first step of a turn does not count: its rollouts were made in the other mode
NUM_TURNS = 6
NUM_STEPS = WARM_UP_STEPS + TURN_STEPS * NUM_TURNS


def is_ahead(step: int) -> bool:
    """Return whether rollouts of later steps are made while `step` (0-based) trains."""
    return step >= WARM_UP_STEPS and (step - WARM_UP_STEPS) // TURN_STEPS % 2 == 1


def counts(step: int) -> bool:
    """Return whether `step` and the one before it are in the same mode."""
    return step > WARM_UP_STEPS and (step - WARM_UP_STEPS) % TURN_STEPS != 0


class PrefetcherByTurns(Prefetcher):
    """A prefetcher whose window is open in every second turn only."""

    def get(self, step: int) -> list:
        self.full_window = getattr(self, "full_window", self._window)
        self._window = self.full_window if is_ahead(step) else 0
        return super().get(step)


if __name__ == "__main__":
    session.Prefetcher = PrefetcherByTurns
    train_stage2.main()
