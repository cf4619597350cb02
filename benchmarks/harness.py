"""Measure side by side: functions run in turns, so that a busy machine slows down all of them; medians are compared.

A benchmark is a function that returns a list of `Result`; `benchmarks/__main__.py` runs them.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Result:
    """One line of the table.

    The meaning of `ratio` depends on `bar`: with a bar `>= x` it is baseline over ours, otherwise ours over baseline.
    `bar` and `holds` are None if a figure is only reported.
    """

    name: str
    unit: str
    ours: float
    baseline: float
    ratio: float
    bar: str | None
    holds: bool | None


def at_least(name: str, unit: str, ours: float, baseline: float, times: float) -> Result:
    """Require `ours` (a cost) to be at least `times` smaller than `baseline`."""
    ratio = baseline / ours
    return Result(name, unit, ours, baseline, ratio, f">= {times:g}", ratio >= times)


def at_most(name: str, unit: str, ours: float, baseline: float, times: float) -> Result:
    """Require `ours` to be at most `times` as large as `baseline`."""
    ratio = ours / baseline
    return Result(name, unit, ours, baseline, ratio, f"<= {times:g}", ratio <= times)


def reported(name: str, unit: str, ours: float, baseline: float) -> Result:
    """Report `ours` over `baseline` without a bar."""
    return Result(name, unit, ours, baseline, ours / baseline, None, None)


def take_turns(functions: Mapping[str, Callable[[], float]], rounds: int, warm_ups: int = 1) -> dict[str, float]:
    """Call each function once per round; return the median of its results (seconds, bytes, ...) over the rounds.

    Args:
        warm_ups: extra rounds at the start, whose results do not count.
    """
    values: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warm_ups + rounds):
        for name, function in functions.items():
            value = function()
            if turn >= warm_ups:
                values[name].append(value)
    return {name: statistics.median(each) for name, each in values.items()}


def wall(function: Callable[[], object]) -> Callable[[], float]:
    """Time `function` by the wall clock, for work that involves other processes or threads."""
    return _timed(function, time.perf_counter)


def cpu(function: Callable[[], object]) -> Callable[[], float]:
    """Time `function` by this process's processor time, for work that it does alone; other load does not matter."""
    return _timed(function, time.process_time)


def _timed(function: Callable[[], object], clock: Callable[[], float]) -> Callable[[], float]:
    def timed() -> float:
        gc.collect()
        gc.disable()  # as timeit does, since a full collection walks all of torch
        try:
            start = clock()
            function()
            return clock() - start
        finally:
            gc.enable()

    return timed


def write_results(path: Path, results: list[Result]) -> None:
    """Replace all entries of the same kind (a name up to its colon) in the list at `path`; keep the others."""
    kinds = {_kind(result.name) for result in results}
    kept = json.loads(path.read_text()) if path.exists() else []
    entries = [entry for entry in kept if _kind(entry["name"]) not in kinds]
    entries += [{**asdict(result), **_rounded(result)} for result in results]
    path.write_text(json.dumps(entries, indent=2) + "\n")


def _kind(name: str) -> str:
    return name.split(":")[0]


def _rounded(result: Result) -> dict[str, float]:
    return {key: float(f"{getattr(result, key):.4g}") for key in ("ours", "baseline", "ratio")}


def print_table(results: list[Result]) -> None:
    table = Table(title="ours against the baselines, side by side")
    for column in ("name", "unit", "ours", "baseline", "ratio", "bar", "holds"):
        table.add_column(column, justify="left" if column in ("name", "unit") else "right")
    for result in results:
        numbers = (f"{value:.4g}" for value in (result.ours, result.baseline, result.ratio))
        verdict = {None: "", True: "yes", False: "NO"}[result.holds]
        table.add_row(result.name, result.unit, *numbers, result.bar or "", verdict)
    Console(width=140).print(table)
