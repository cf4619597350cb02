"""Boxes and polygons on the norm1000 grid: pixels to bins and back, overlap, and where a matched shape should move.

Every coordinate is a bin `0..999` of the image's width (x, even positions) or height (y, odd positions). Models' own
numbers (`utils.answer_format`) have other grids: Qwen3-VL's `0..1000`, Qwen2.5-VL's the pixels of the image as it
resizes it. The shapes of one image are all on one grid (`Sample.grid`). `matching` pairs shapes;
`parsing` and `targets` read and write them as tokens.
"""

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import shapely
from scipy import sparse
from scipy.optimize import linear_sum_assignment, linprog

NUM_BINS = 1000
MAX_BIN = NUM_BINS - 1
HALF_BIN = 0.49  # a little less: what is that far off still rounds to the same bin
_MAX_COPIES = 256  # transport problems up to this common multiple are assignments, larger ones linear programs

Kind = Literal["bbox_2d", "poly"]
Grid = tuple[int, int]  # the largest x and the largest y


@dataclass(frozen=True, slots=True)
class Object:
    """One object: `desc`, and its geometry in bins: `bbox_2d` as `x1, y1, x2, y2`, `poly` as `x1, y1, x2, y2, ...`.

    Bins are whole numbers, except after `to_norm1000`.
    """

    desc: str
    kind: Kind
    coords: tuple[float, ...]


def normal_label(text: str) -> str:
    """A label as labels are compared (LRN-7): stripped, case-folded and composed."""
    return composed(text).strip().casefold()


def composed(text: str) -> str:
    """Text in Unicode's composed form (NFC).

    Qwen's tokenizers compose all text, so a model cannot write one as a file may hold it: `e` and an accent.
    """
    return unicodedata.normalize("NFC", text)


def pixel_to_bin(value: float, size: float, max_bin: int = MAX_BIN) -> int:
    """Bin of a pixel coordinate on an axis of `size` pixels: `round(999 * value / size)`, clamped to 0..999 (DAT-2).

    Halves go to the even bin, as in Python's `round`. Another `max_bin` means its grid.
    """
    return min(max(round(max_bin * value / size), 0), max_bin)


def pixels_to_bins(
    coords: Sequence[float], width: float, height: float, grid: Grid = (MAX_BIN, MAX_BIN)
) -> tuple[int, ...]:
    """`pixel_to_bin` for `x, y, x, y, ...`."""
    return tuple(pixel_to_bin(value, height if i % 2 else width, grid[i % 2]) for i, value in enumerate(coords))


def to_norm1000(obj: Object, grid: Grid) -> Object:
    """The shape converted from another grid to fractional bins 0..999, the unit of everything that is logged."""
    if grid == (MAX_BIN, MAX_BIN):
        return obj
    return replace(obj, coords=tuple(round(value * MAX_BIN / grid[i % 2], 3) for i, value in enumerate(obj.coords)))


def bins_to_pixels(coords: Sequence[float], width: float, height: float) -> tuple[float, ...]:
    """Pixel coordinates `x, y, x, y, ...` of bins on an image: `index / 999 * size` (DAT-2)."""
    return tuple(index / MAX_BIN * (height if i % 2 else width) for i, index in enumerate(coords))


def coco_box(obj: Object, size: tuple[float, float]) -> tuple[list[float], float]:
    """COCO's `bbox` (x, y, width, height in pixels) of the tightest box around a shape in bins, and the box's `area`.

    A box thinner than one bin is a `solid_box`, cut at the image's edges: COCO's IoU of two boxes without area is
    0 / 0, also if they are equal.

    Args:
        size: (width, height) of the image.
    """
    corners = (min(max(value, 0), MAX_BIN) for value in solid_box(obj))
    x1, y1, x2, y2 = bins_to_pixels(tuple(corners), *size)
    return [x1, y1, x2 - x1, y2 - y1], (x2 - x1) * (y2 - y1)


def corner_points(obj: Object) -> np.ndarray:
    """Corners of a shape, float64 `[n, 2]` as (x, y): a polygon's own points, a box's four in outline order."""
    if obj.kind == "poly":
        return np.array(obj.coords, dtype=np.float64).reshape(-1, 2)
    x1, y1, x2, y2 = obj.coords
    return np.array([(x1, y1), (x2, y1), (x2, y2), (x1, y2)], dtype=np.float64)


def bounding_box(obj: Object) -> tuple[float, float, float, float]:
    """The tightest `x1, y1, x2, y2` around a shape."""
    if obj.kind == "bbox_2d":  # most shapes, and in the hot path
        x1, y1, x2, y2 = obj.coords
        if x1 <= x2 and y1 <= y2:
            return x1, y1, x2, y2
    xs, ys = obj.coords[0::2], obj.coords[1::2]
    return min(xs), min(ys), max(xs), max(ys)


def solid_box(obj: Object) -> tuple[float, float, float, float]:
    """`bounding_box`, with sides of length 0 made almost one bin long: the shape lies somewhere in that bin."""
    x1, y1, x2, y2 = bounding_box(obj)
    x_more, y_more = HALF_BIN * (x1 == x2), HALF_BIN * (y1 == y2)
    return x1 - x_more, y1 - y_more, x2 + x_more, y2 + y_more


def iou_matrix(pred: Sequence[Object], gt: Sequence[Object]) -> np.ndarray:
    """Intersection over union of every prediction with every ground-truth object, float64 `[num_pred, num_gt]`.

    Boxes in closed form; a pair with a polygon by exact area overlap, self-crossing outlines made valid first. A shape
    thinner than one bin counts as its `solid_box`. A slanted line has no area: it overlaps fully (1.0) with its equal
    and with nothing else.
    """
    if not pred or not gt:
        return np.zeros((len(pred), len(gt)))
    pred_boxes = np.array([solid_box(obj) for obj in pred], dtype=np.float64)
    gt_boxes = np.array([solid_box(obj) for obj in gt], dtype=np.float64)
    overlap = _box_overlap(pred_boxes, gt_boxes)
    pred_area, gt_area = (np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) for boxes in (pred_boxes, gt_boxes))
    iou = _ratio(overlap, np.add.outer(pred_area, gt_area) - overlap)
    _fill_polygon_pairs(iou, overlap, pred, gt)
    equal_to: dict[tuple[str, tuple[float, ...]], list[int]] = {}
    for j, obj in enumerate(gt):
        equal_to.setdefault((obj.kind, obj.coords), []).append(j)
    for i, obj in enumerate(pred):
        iou[i, equal_to.get((obj.kind, obj.coords), [])] = 1.0  # exactly, also without area
    return iou


def _box_overlap(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Shared areas `[len(a), len(b)]` of `xyxy` boxes."""
    width, height = (
        np.minimum.outer(a[:, axis + 2], b[:, axis + 2]) - np.maximum.outer(a[:, axis], b[:, axis]) for axis in (0, 1)
    )
    return np.maximum(width, 0) * np.maximum(height, 0)


def _ratio(overlap: np.ndarray, union: np.ndarray) -> np.ndarray:
    """Overlap over union, 0 where the union is empty."""
    return np.divide(overlap, union, out=np.zeros_like(overlap), where=union > 0)


def _fill_polygon_pairs(iou: np.ndarray, box_overlap: np.ndarray, pred: Sequence[Object], gt: Sequence[Object]) -> None:
    """Overwrite the pairs that hold a polygon; where the bounding boxes share no area, the IoU is 0 already."""
    pred_poly = np.array([obj.kind == "poly" for obj in pred])
    gt_poly = np.array([obj.kind == "poly" for obj in gt])
    rows, cols = np.nonzero((pred_poly[:, None] | gt_poly[None, :]) & (box_overlap > 0))
    if not len(rows):
        return
    pred_shapes = {i: _valid_shape(pred[i]) for i in set(rows.tolist())}
    gt_shapes = {j: _valid_shape(gt[j]) for j in set(cols.tolist())}
    a = np.array([pred_shapes[i] for i in rows.tolist()])
    b = np.array([gt_shapes[j] for j in cols.tolist()])
    overlap = shapely.area(shapely.intersection(a, b))
    iou[rows, cols] = np.clip(_ratio(overlap, shapely.area(a) + shapely.area(b) - overlap), 0.0, 1.0)


def _valid_shape(obj: Object) -> shapely.Geometry:
    """A valid areal geometry: a self-crossing outline keeps the area of all its lobes, a slanted line becomes empty."""
    x1, y1, x2, y2 = bounding_box(obj)
    if x1 == x2 or y1 == y2:
        return shapely.box(*solid_box(obj))
    shape = shapely.Polygon(corner_points(obj))
    return shape if shape.is_valid else shapely.make_valid(shape, method="structure", keep_collapsed=False)


def regression_targets(pred: Object, gt: Object) -> tuple[float, ...]:
    """The correct value of each coordinate of a matched prediction, in (fractional) bins.

    A predicted box learns the ground-truth box, or the tightest box around a ground-truth polygon. A predicted polygon
    may start elsewhere, run the other way round or have another number of points, so `project_points` carries its
    points onto the ground-truth outline (a box counts as its four corners).
    """
    if pred.kind == "bbox_2d":
        return bounding_box(gt)
    return tuple(project_points(corner_points(pred), corner_points(gt)).reshape(-1).tolist())


def project_points(points: np.ndarray, outline: np.ndarray) -> np.ndarray:
    """Carry points `[n, 2]` onto a closed outline `[m, 2]` by optimal transport; return float64 `[n, 2]`.

    Both sets are uniform measures and the cost is the squared distance. Each point goes to the barycentre of the
    outline's points that receive its mass. With `n == m` this is the permutation of the outline's points of least total
    squared distance. A barycentre of several points may lie off the outline (inside a convex one, which would shrink
    every shape drawn with fewer points); it then moves to the nearest point of the outline.

    Source: Courty et al., "Optimal Transport for Domain Adaptation", 2017, eq. 14 (barycentric mapping).
    """
    plan = transport_plan(((points[:, None, :] - outline[None, :, :]) ** 2).sum(axis=2))
    projected = plan @ outline / plan.sum(axis=1, keepdims=True)
    mixed = np.count_nonzero(plan > 1e-9 * plan.max(), axis=1) > 1
    if mixed.any():
        ring = shapely.LineString(np.concatenate([outline, outline[:1]]))
        along = shapely.line_locate_point(ring, shapely.points(projected[mixed]))
        projected[mixed] = shapely.get_coordinates(shapely.line_interpolate_point(ring, along))
    return projected


def transport_plan(cost: np.ndarray) -> np.ndarray:
    """An exactly optimal plan between two uniform measures, float64 `[n, m]`; rows sum to `1/n`, columns to `1/m`.

    With `k = lcm(n, m)` unit masses it is an assignment of `k/n` copies of each row to `k/m` copies of each column; if
    that is large, a linear program (dual simplex) with the same optimum.
    """
    num_rows, num_cols = cost.shape
    copies = math.lcm(num_rows, num_cols)
    if copies > max(_MAX_COPIES, num_rows, num_cols):
        return _transport_program(cost)
    row_of = np.repeat(np.arange(num_rows), copies // num_rows)
    col_of = np.repeat(np.arange(num_cols), copies // num_cols)
    rows, cols = linear_sum_assignment(cost[row_of[:, None], col_of[None, :]])
    plan = np.zeros(cost.shape)
    np.add.at(plan, (row_of[rows], col_of[cols]), 1.0 / copies)
    return plan


def _transport_program(cost: np.ndarray) -> np.ndarray:
    """The same as a linear program over the `n * m` flows, in units in which all masses are integers."""
    num_rows, num_cols = cost.shape
    row_sums = sparse.kron(sparse.eye(num_rows), np.ones((1, num_cols)))
    col_sums = sparse.kron(np.ones((1, num_rows)), sparse.eye(num_cols))
    masses = np.concatenate([np.full(num_rows, float(num_cols)), np.full(num_cols, float(num_rows))])
    answer = linprog(cost.reshape(-1), A_eq=sparse.vstack([row_sums, col_sums]), b_eq=masses, method="highs-ds")
    assert answer.status == 0, answer.message
    return answer.x.reshape(num_rows, num_cols) / (num_rows * num_cols)
