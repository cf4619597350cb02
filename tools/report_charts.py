"""Curves for `tools.report`: what a template needs to draw them as SVG, in the units of its view box."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 380, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 370, 10, 182  # the plot inside
MAX_POINTS = 300  # of a line; more are averaged

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """A named curve. `has_marks`: its points are few and stand for themselves, as evaluations do."""

    name: str
    points: Points
    has_marks: bool = False


@dataclass(frozen=True)
class Chart:
    """A drawn chart; positions are in the view box `WIDTH` x `HEIGHT`.

    `lines` are (name, SVG points, marks); a tick is (position, text).
    """

    title: str
    lines: list[tuple[str, str, list[tuple[float, float]]]]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


def draw(title: str, lines: Sequence[Line], is_share: bool = False, is_square: bool = False) -> Chart | None:
    """Lay out a chart, None without a finite point.

    Args:
        is_share: the y axis covers 0..1; otherwise the data and 0.
        is_square: the x axis covers 0..1, too; otherwise the data.
    """
    finite = [(line, [point for point in line.points if all(map(math.isfinite, point))]) for line in lines]
    finite = [(line, points) for line, points in finite if points]
    if not finite:
        return None
    xs, ys = zip(*(point for _, points in finite for point in points), strict=True)
    x_ticks = ticks(0.0, 1.0) if is_square else ticks(min(xs), max(xs))
    y_ticks = ticks(0.0, 1.0) if is_share else ticks(min(0.0, *ys), max(0.0, *ys))
    across = (x_ticks[0], 1.0 if is_square else max(xs))
    along = (min(y_ticks[0], *ys), max(y_ticks[-1], *ys))

    def place(x: float, y: float) -> tuple[float, float]:
        return _scaled(x, across, LEFT, RIGHT), _scaled(y, along, BOTTOM, TOP)

    drawn = []
    for line, points in finite:
        placed = [place(*point) for point in thin(points)]
        drawn.append((line.name, " ".join(f"{x},{y}" for x, y in placed), placed if line.has_marks else []))
    return Chart(
        title,
        drawn,
        [(_scaled(tick, across, LEFT, RIGHT), f"{tick:g}") for tick in x_ticks if tick <= across[1]],
        [(_scaled(tick, along, BOTTOM, TOP), f"{tick:g}") for tick in y_ticks],
    )


def _scaled(value: float, of: tuple[float, float], start: float, end: float) -> float:
    low, high = of
    return round(start + (end - start) * ((value - low) / (high - low) if high > low else 0.5), 1)


def ticks(low: float, high: float, num: int = 4) -> list[float]:
    """About `num` round numbers from at most `low` to at least `high`."""
    rough = (high - low) / num or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{step * k:.10g}") for k in range(first, max(last, first + 1) + 1)]


def thin(points: Points) -> Points:
    """At most `MAX_POINTS` points: means of equally many neighbours."""
    size = -(-len(points) // MAX_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]
