"""What all reports do with records: pick them by name, and give means, their spread, intervals and tables.

A record is one finished run: `task`, `variant`, `seed`, `overrides` (the variant's settings, by dotted key), `steps`,
`seconds` (by part, as in `finished.json`), `step_seconds` (of one undisturbed step), `rollout_f1` (of rollouts on
training images, mean over the run), `scores` (by evaluated step), `further` (see `further.py`) and `revision`.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from scipy.stats import ttest_ind

Record = dict[str, Any]
CONFIDENCE = 0.95


def runs_of(records: Sequence[Record], task: str, variant: str) -> list[Record]:
    return [record for record in records if (record["task"], record["variant"]) == (task, variant)]


def last(records: Sequence[Record], metric: str) -> list[float]:
    """Return a metric after the last step of each run."""
    return [record["scores"][max(record["scores"], key=int)][metric] for record in records]


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Return `mean ± standard deviation`; of a single value, only the mean."""
    shown = f"{statistics.fmean(values):.{digits}f}"
    return shown if len(values) < 2 else f"{shown} ± {statistics.stdev(values):.{digits}f}"


def interval(
    ours: Sequence[float], theirs: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float] | None:
    """Return the confidence interval of the difference of means (Welch's t); None if a side has one value."""
    if min(len(ours), len(theirs)) < 2:
        return None
    bounds = ttest_ind(ours, theirs, equal_var=False).confidence_interval(confidence)
    return float(bounds.low), float(bounds.high)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
