"""utils.geometry against hand-worked values, pixel counting and independent solvers (DAT-2, TGT-4, TGT-6)."""

import itertools
import random

import numpy as np
import pytest
import shapely
from scipy.optimize import linprog

from utils import geometry
from utils.geometry import (
    Object,
    bins_to_pixels,
    iou_matrix,
    pixel_to_bin,
    pixels_to_bins,
    project_points,
    regression_targets,
    transport_plan,
)


def box(*coords: int) -> Object:
    return Object("a", "bbox_2d", coords)


def poly(*coords: int) -> Object:
    return Object("a", "poly", coords)


def test_dat_2_pixels_to_bins_by_hand() -> None:
    """DAT-2: round(999 * x / width), clamped; halves go to the even bin."""
    assert [pixel_to_bin(x, 128) for x in (0, 1, 64, 128)] == [0, 8, 500, 999]  # 7.8, 499.5
    assert [pixel_to_bin(x, 640) for x in (-3, 640.4, 1e6)] == [0, 999, 999]
    assert pixels_to_bins((64, 64, 128, 32), 128, 64) == (500, 999, 999, 500)


def test_dat_2_bins_and_back() -> None:
    """DAT-2: k / 999 * width, and a bin's own pixel falls into the same bin for any size."""
    assert bins_to_pixels((999, 0), 640, 1) == (640, 0)
    assert bins_to_pixels((0, 999, 333, 333), 300, 999) == pytest.approx((0, 999, 100, 333))
    for size in (1, 7, 128, 1333):
        assert [pixel_to_bin(*bins_to_pixels((k,), size, 1), size) for k in range(1000)] == list(range(1000))


def test_lrn_9_coco_boxes_have_area() -> None:
    """LRN-9: a side of length 0 gets one of a bin's length inside the image, any other stays."""
    bbox, area = geometry.coco_box(Object("a", "poly", (0, 0, 999, 0, 999, 333)), (640, 480))
    assert (bbox, area) == (pytest.approx([0, 0, 640, 160]), pytest.approx(640 * 160))
    bbox, area = geometry.coco_box(Object("a", "bbox_2d", (999, 0, 999, 999)), (640, 480))
    side = 0.49 / 999 * 640
    assert (bbox, area) == (pytest.approx([640 - side, 0, side, 480]), pytest.approx(side * 480))
    for obj in (box(500, 7, 500, 9), box(0, 7, 3, 7), box(999, 999, 999, 999)):  # and it reads back as it was
        for width, height in ((1, 1), (640, 480), (6000, 4000)):
            (x, y, w, h), _ = geometry.coco_box(obj, (width, height))
            assert geometry.pixels_to_bins((x, y, x + w, y + h), width, height) == obj.coords


def test_tgt_4_box_iou_by_hand() -> None:
    """TGT-4: a 10 x 10 box and its shift by half: 50 / 150."""
    iou = iou_matrix([box(0, 0, 10, 10), box(20, 20, 30, 30)], [box(5, 0, 15, 10), box(0, 0, 10, 10), box(0, 0, 10, 5)])
    assert iou == pytest.approx(np.array([[1 / 3, 1, 0.5], [0, 0, 0]]))
    assert iou_matrix([], [box(0, 0, 1, 1)]).shape == (0, 1)
    assert iou_matrix([box(0, 0, 1, 1)], []).shape == (1, 0)


def test_tgt_4_shapes_without_area() -> None:
    """TGT-4: a shape thinner than one bin is as wide as its bin, so one that is a bin longer overlaps; a slanted line
    overlaps with its equal alone. Without any warning."""
    line, dot, flat = box(5, 0, 5, 10), box(3, 3, 3, 3), poly(5, 0, 5, 4, 5, 10)
    slanted = poly(0, 0, 10, 10, 20, 20)
    longer, wider, square = box(5, 0, 5, 11), box(5, 0, 6, 10), box(0, 0, 10, 10)
    with np.errstate(all="raise"):
        iou = iou_matrix([line, dot, flat, slanted], [line, dot, flat, slanted, longer, wider, square])
    side = 0.98
    to_wider = 0.49 / (1 + 0.49)
    expected = [
        [1, 0, 1, 0, 10 / 11, to_wider, side / 10],
        [0, 1, 0, 0, 0, 0, side * side / 100],
        [1, 0, 1, 0, 10 / 11, to_wider, side / 10],
        [0, 0, 0, 1, 0, 0, 0],
    ]
    assert iou == pytest.approx(np.array(expected))


def test_tgt_4_polygon_iou_by_hand() -> None:
    """TGT-4: exact areas; half of a square against the square, a concave shape, a box against its own outline."""
    square = poly(0, 0, 10, 0, 10, 10, 0, 10)
    triangle = poly(0, 0, 10, 0, 0, 10)
    corner = poly(0, 0, 10, 0, 10, 5, 5, 5, 5, 10, 0, 10)  # an L of area 75
    iou = iou_matrix([square, triangle, corner, box(0, 0, 10, 10)], [square, box(5, 5, 10, 10)])
    assert iou == pytest.approx(np.array([[1, 0.25], [0.5, 0], [0.75, 0], [1, 0.25]]))


def test_tgt_4_self_crossing_polygon_keeps_both_lobes() -> None:
    """TGT-4: a bow tie in a 10 x 10 square covers two triangles of area 25."""
    assert iou_matrix([poly(0, 0, 10, 10, 10, 0, 0, 10)], [box(0, 0, 10, 10)]) == pytest.approx(np.array([[0.5]]))


def test_tgt_4_iou_against_shapely_pair_by_pair() -> None:
    """TGT-4: random boxes and star-shaped polygons, each pair computed on its own."""
    rng = random.Random(0)

    def star() -> Object:
        angles = sorted(rng.uniform(0, 2 * np.pi) for _ in range(rng.randint(3, 9)))
        cx, cy = rng.randint(200, 800), rng.randint(200, 800)
        points = [(cx + rng.uniform(50, 200) * np.cos(a), cy + rng.uniform(50, 200) * np.sin(a)) for a in angles]
        return poly(*(int(np.clip(v, 0, 999)) for point in points for v in point))

    def shape(obj: Object) -> shapely.Geometry:
        return shapely.box(*obj.coords) if obj.kind == "bbox_2d" else _ring(obj).buffer(0)

    def _ring(obj: Object) -> shapely.Geometry:
        return shapely.Polygon(list(zip(obj.coords[::2], obj.coords[1::2], strict=True)))

    objects = [star() for _ in range(12)] + [box(100, 100, 500, 600), box(300, 200, 900, 700)]
    objects = [obj for obj in objects if obj.kind == "bbox_2d" or _ring(obj).is_valid]
    assert len(objects) > 6
    expected = [
        [shape(a).intersection(shape(b)).area / shape(a).union(shape(b)).area for b in objects] for a in objects
    ]
    assert iou_matrix(objects, objects) == pytest.approx(np.array(expected), abs=1e-9)


def made_valid_iou(a: Object, b: Object) -> float:
    """IoU of outlines made valid by shapely, with its own default method."""
    shapes = [shapely.make_valid(shapely.Polygon(geometry.corner_points(obj))) for obj in (a, b)]
    union = shapes[0].union(shapes[1]).area
    return shapes[0].intersection(shapes[1]).area / union if union else 0.0


def test_tgt_4_self_crossing_polygons_by_make_valid() -> None:
    """TGT-4: wild outlines, most of which cross themselves, with each other and with boxes.

    Both of shapely's methods agree wherever no point is encircled twice; four points cannot do that.
    """
    rng = random.Random(1)
    wild = [poly(*(rng.randrange(1000) for _ in range(8))) for _ in range(40)]
    objects = [*wild, box(100, 100, 800, 700), box(0, 400, 999, 500)]
    crossing = [not shapely.Polygon(geometry.corner_points(obj)).is_valid for obj in wild]
    assert 5 < sum(crossing) < 35
    expected = [[made_valid_iou(a, b) for b in objects] for a in objects]
    assert iou_matrix(objects, objects) == pytest.approx(np.array(expected), abs=1e-9)


def test_tgt_4_a_loop_drawn_twice_counts_once() -> None:
    """TGT-4: an outline that goes round the same square twice covers that square, and no more."""
    twice = poly(0, 0, 10, 0, 10, 10, 0, 10, 0, 0, 10, 0, 10, 10, 0, 10)
    assert iou_matrix([twice], [box(0, 0, 10, 10), box(5, 0, 10, 10)]) == pytest.approx(np.array([[1.0, 0.5]]))


def test_tgt_4_a_spike_adds_no_area() -> None:
    """TGT-4: a square with an antenna (out and back on the same line) is the square."""
    spiked = poly(0, 0, 10, 0, 10, 10, 10, 500, 10, 10, 0, 10)
    assert iou_matrix([spiked], [box(0, 0, 10, 10)]) == pytest.approx(np.array([[1.0]]))


FLAT = {
    "a point": poly(5, 5, 5, 5, 5, 5),
    "collinear": poly(0, 0, 5, 5, 10, 10),
    "collinear, there and back": poly(0, 0, 10, 10, 5, 5, 2, 2),
    "on an axis": poly(0, 5, 4, 5, 10, 5, 7, 5, 1, 5),
    "a thin box": box(0, 5, 10, 5),
    "a point box": box(5, 5, 5, 5),
}


@pytest.mark.parametrize("name", FLAT)
def test_tgt_4_flat_shapes_overlap_as_their_bins_do(name: str) -> None:
    """TGT-4: zero area and collinear: what lies around them holds a bin of them, or nothing; all are numbers."""
    flat, around = FLAT[name], [box(0, 0, 10, 10), poly(0, 0, 10, 0, 10, 10, 0, 10), poly(0, 0, 10, 10, 0, 10)]
    with np.errstate(all="raise"):
        iou = iou_matrix([flat, *around], [flat, *around])
    assert iou[0].tolist() == pytest.approx(iou[:, 0].tolist()) and iou[0, 0] == 1
    width, height = {"a point": (0.98, 0.98), "a point box": (0.98, 0.98)}.get(name, (10, 0.98))
    expected = 0 if name.startswith("collinear") else width * height / 100
    assert iou[0, 1:3].tolist() == pytest.approx([expected] * 2)
    assert 0 <= iou[0, 3] <= expected


@pytest.mark.parametrize("name", FLAT)
def test_tgt_6_flat_shapes_have_targets_on_the_outline(name: str) -> None:
    """TGT-6: zero area, collinear, repeated points, as prediction and as truth: numbers, on the outline."""
    flat = FLAT[name]
    others = [
        box(0, 0, 10, 10),
        poly(0, 0, 10, 0, 10, 10, 0, 10),
        poly(3, 1, 9, 4, 2, 8),
        poly(1, 1, 10, 10, 10, 1, 1, 9, 4, 0),
    ]
    for pred, gt in [pair for other in others for pair in ((flat, other), (other, flat))] + [(flat, flat)]:
        targets = regression_targets(pred, gt)
        assert len(targets) == len(pred.coords) and np.isfinite(targets).all(), (pred, gt)
        if pred.kind == "bbox_2d":
            assert targets == geometry.bounding_box(gt)
            continue
        corners = geometry.corner_points(gt)
        ring = shapely.LineString(np.concatenate([corners, corners[:1]]))
        assert max(ring.distance(shapely.Point(point)) for point in np.reshape(targets, (-1, 2))) < 1e-9, (pred, gt)
    assert regression_targets(flat, flat) == flat.coords


def test_tgt_6_transport_between_a_polygon_and_a_box_in_both_directions() -> None:
    """TGT-6: a drawn triangle against a box: of all ways to send 3 points of mass 4 to 4 corners of mass 3 the best.

    Each point's barycentre, moved to the box's border where it lies inside. The other direction, a box for a polygon,
    is the tightest box around it.
    """
    pred, gt = poly(0, 0, 90, 0, 40, 90), box(0, 0, 90, 90)
    targets = np.reshape(regression_targets(pred, gt), (-1, 2))
    corners = geometry.corner_points(gt)
    best = None
    for mass in itertools.product(range(4), repeat=8):  # units that the first two points send to each corner
        first, second = mass[:4], mass[4:]
        third = [3 - a - b for a, b in zip(first, second, strict=True)]
        if sum(first) == sum(second) == 4 and min(third) >= 0:
            plan = np.array([first, second, third])
            cost = (plan * ((np.reshape(pred.coords, (-1, 1, 2)) - corners) ** 2).sum(axis=2)).sum()
            best = min(best, (cost, plan.tolist())) if best else (cost, plan.tolist())
    barycentres = np.array(best[1]) @ corners / 4
    ring = shapely.LinearRing(corners)
    nearest = [ring.interpolate(ring.project(shapely.Point(point))) for point in barycentres]
    assert targets == pytest.approx(np.array([(point.x, point.y) for point in nearest]))
    assert regression_targets(gt, pred) == (0, 0, 90, 90)


def test_tgt_6_box_learns_the_box() -> None:
    """TGT-6: box to box as it is; box to polygon: the tightest box around it."""
    assert regression_targets(box(1, 2, 3, 4), box(5, 6, 7, 8)) == (5, 6, 7, 8)
    assert regression_targets(box(0, 0, 9, 9), poly(5, 1, 9, 7, 2, 4)) == (2, 1, 9, 7)


def test_tgt_6_polygon_of_another_start_and_direction() -> None:
    """TGT-6: with as many points each learns one ground-truth point, whatever the order they are drawn in."""
    gt = [(100, 100), (500, 120), (480, 600), (90, 550)]
    for shift, direction in itertools.product(range(4), (1, -1)):
        drawn = [gt[(shift + direction * i) % 4] for i in range(4)]
        pred = poly(*(v + 7 for point in drawn for v in point))
        assert regression_targets(pred, poly(*itertools.chain(*gt))) == tuple(itertools.chain(*drawn))


def test_tgt_6_polygon_against_box() -> None:
    """TGT-6: a ground-truth box counts as its four corners."""
    pred = poly(12, 92, 11, 13, 88, 9, 93, 95)
    assert regression_targets(pred, box(10, 10, 90, 90)) == (10, 90, 10, 10, 90, 10, 90, 90)


def test_tgt_6_more_points_than_the_outline() -> None:
    """TGT-6: with 8 points on a square's outline each corner takes the two points nearest to it."""
    pred = np.array([(0, 2), (2, 0), (8, 0), (10, 2), (10, 8), (8, 10), (2, 10), (0, 8)], dtype=float)
    corners = np.array([(0, 0), (10, 0), (10, 10), (0, 10)], dtype=float)
    assert project_points(pred, corners).tolist() == [
        [0, 0], [0, 0], [10, 0], [10, 0], [10, 10], [10, 10], [0, 10], [0, 10]
    ]  # fmt: skip


def test_tgt_6_fewer_points_do_not_shrink_the_shape() -> None:
    """TGT-6: 4 points for a circle of 40: barycentres of arcs lie inside it, what is learnt lies on its outline."""
    angle = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    circle = 500 + 300 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    targets = project_points(500 + 250 * np.array([[1, 0], [0, 1], [-1, 0], [0, -1]]), circle)
    ring = shapely.LinearRing(circle)
    assert max(ring.distance(shapely.Point(point)) for point in targets) < 1e-9
    assert np.linalg.norm(targets - 500, axis=1) == pytest.approx(300, abs=2)


@pytest.mark.parametrize(("num_rows", "num_cols"), [(3, 3), (4, 8), (6, 4), (5, 7), (1, 4), (17, 19)])
def test_tgt_6_transport_is_optimal(num_rows: int, num_cols: int) -> None:
    """TGT-6: marginals hold and the cost equals that of a dense linear program over the same plans."""
    cost = np.random.default_rng(num_rows * num_cols).uniform(0, 100, (num_rows, num_cols))
    plan = transport_plan(cost)
    rows = np.kron(np.eye(num_rows), np.ones(num_cols))
    cols = np.kron(np.ones(num_rows), np.eye(num_cols))
    masses = [1 / num_rows] * num_rows + [1 / num_cols] * num_cols
    best = linprog(cost.ravel(), A_eq=np.concatenate([rows, cols]), b_eq=masses, method="highs-ipm").fun
    assert plan.sum(axis=1) == pytest.approx(1 / num_rows)
    assert plan.sum(axis=0) == pytest.approx(1 / num_cols)
    assert (plan >= -1e-12).all() and (plan * cost).sum() == pytest.approx(best, rel=1e-6)


def test_tgt_6_both_transport_solvers_agree() -> None:
    """TGT-6: the assignment of copies and the linear program have the same optimum."""
    rng = np.random.default_rng(5)
    for num_rows, num_cols in [(3, 5), (8, 6), (4, 4), (10, 15)]:
        cost = rng.uniform(0, 100, (num_rows, num_cols))
        plan, program = transport_plan(cost), geometry._transport_program(cost)
        assert (plan * cost).sum() == pytest.approx((program * cost).sum(), rel=1e-9)
        assert program == pytest.approx(plan, abs=1e-9)  # random costs: the optimum is unique
