"""tools.convert with COCO and LVIS: conversion (DAT-1), against values by hand and the mask library itself."""

import gzip
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import shapely
from faster_coco_eval import COCO, COCOeval_faster
from faster_coco_eval.core import mask as rle_masks
from PIL import Image

from tools.check_jsonl import check
from tools.coco import SHARED, LeftOut, Options, convert_object
from tools.convert import INCOMPLETE, STRAY, _written_whole, convert, main, parse_splits, split_of
from tools.evaluate import coco_scores
from utils.data.images import FORMATS
from utils.data.samples import load_samples
from utils.geometry import Object, pixels_to_bins

WIDTH, HEIGHT = 100, 80
CATEGORIES = {1: "cat", 2: "traffic light"}
CHANGED, LOST, IMAGES = "objects changed", "objects left out", "images left out"


def annotation(image_id=1, category_id=1, **item) -> dict:
    return {"id": 1, "image_id": image_id, "category_id": category_id, "bbox": [10, 20, 30, 40], "iscrowd": 0} | item


def coco_file(folder: Path, annotations: list[dict], images: list[dict] | None = None, **more) -> Path:
    """Write an annotation file with its keys in LVIS's order: references to images and categories come first."""
    Image.new("RGB", (WIDTH, HEIGHT)).save(folder / "1.png")
    images = images or [{"id": 1, "file_name": "1.png", "width": WIDTH, "height": HEIGHT}]
    categories = [{"id": key, "name": name} for key, name in CATEGORIES.items()]
    content = {"info": {}, "annotations": annotations, "images": images, "categories": categories} | more
    path = folder / "annotations.json"
    path.write_text(json.dumps(content))
    return path


def converted(folder: Path, annotations: list[dict], images: list[dict] | None = None, **options):
    """(rows, report)."""
    path = coco_file(folder, annotations, images)
    report = convert(path, folder, folder / "out" / "d.jsonl", Options(**options))
    return [json.loads(row) for row in (folder / "out" / "d.jsonl").open()], report


def one_object(folder: Path, options: dict, **item) -> dict:
    rows, _ = converted(folder, [annotation(**item)], **options)
    return rows[0]["objects"][0]


# ---- boxes ---------------------------------------------------------------------------------------------------------


def test_dat_1_a_line_by_hand(tmp_path):
    """DAT-1."""
    rows, report = converted(tmp_path, [annotation(bbox=[10.123, 20, 30, 40.5]), annotation(category_id=2)])
    assert rows == [
        {
            "id": "1",
            "images": ["../1.png"],
            "width": WIDTH,
            "height": HEIGHT,
            "objects": [
                {"desc": "cat", "bbox_2d": [10.12, 20, 40.12, 60.5]},
                {"desc": "traffic light", "bbox_2d": [10, 20, 40, 60]},
            ],
        }
    ]
    assert report.objects == {"bbox_2d": 2, "poly": 0} and not report.reasons


def test_boxes_are_clipped_and_those_without_area_dropped(tmp_path):
    boxes = [[-5, -5, 10, 10], [90, 70, 50, 50], [200, 0, 9, 9], [1, 2, 3], ["1", 2, 3, 4]]
    boxes += [[5, 5, 0, 9], [5.001, 5, 0.002, 9], [5, 5.001, 9, 0.002], [5, 5, -3, 9], [5, 5, 3, -9]]
    rows, report = converted(tmp_path, [annotation(bbox=box) for box in boxes])
    assert [item["bbox_2d"] for item in rows[0]["objects"]] == [[0, 0, 5, 5], [90, 70, 100, 80]]
    assert report.reasons == {
        (CHANGED, "clipped to the image"): (2, 1),
        (LOST, "outside the image"): (1, 1),
        (LOST, "degenerate: no area"): (3, 1),
        (LOST, "malformed: negative size"): (2, 1),
        (LOST, "malformed: no usable bbox"): (2, 1),
    }


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_box_of_no_finite_number_is_left_out(number):
    """Other formats than COCO can spell them."""
    with pytest.raises(LeftOut, match="malformed"):
        convert_object(annotation(bbox=[5, 5, number, 9]), CATEGORIES, WIDTH, HEIGHT, Options())


def test_a_missing_box_comes_from_the_outline(tmp_path):
    item = annotation(segmentation=[[10, 10, 50, 10, 50, 30]])
    del item["bbox"]
    assert converted(tmp_path, [item])[0][0]["objects"] == [{"desc": "cat", "bbox_2d": [10, 10, 50, 30]}]
    del item["segmentation"]
    rows, report = converted(tmp_path, [item, annotation()])
    assert len(rows[0]["objects"]) == 1 and report.count(LOST, "neither bbox nor outline") == 1


def test_crowds_categories_sizes(tmp_path):
    items = [
        annotation(iscrowd=1),
        annotation(category_id=2),
        annotation(bbox=[0, 0, 50, 3]),
        annotation(),
    ]
    rows, report = converted(tmp_path, items, categories=frozenset({"cat"}), min_size=4)
    assert len(rows[0]["objects"]) == 1
    assert {reason: count for (_, reason), (count, _) in report.reasons.items()} == {
        "crowd": 1, "category not chosen": 1, "smaller than 4 px": 1,
    }  # fmt: skip
    rows, report = converted(tmp_path, items, keep_crowd=True)
    assert len(rows[0]["objects"]) == 3 and "annotated" not in rows[0]  # the crowd's box is the other cat's


def test_DAT_1_an_object_that_is_listed_twice_is_written_once(tmp_path):
    """DAT-1: the second one would be a missed object, which teaches the model to repeat itself."""
    rows, report = converted(tmp_path, [annotation(), annotation(id=2), annotation(category_id=2)])
    assert len(rows[0]["objects"]) == 2 and "annotated" not in rows[0]
    assert report.count("objects left out", "listed twice: same label, same place") == 1


@pytest.mark.parametrize("more", [{}, {"neg_category_ids": [3], "not_exhaustive_category_ids": []}])
def test_TGT_12_a_gap_is_one_in_all_spellings_of_a_label(tmp_path, more):
    """TGT-12: as training compares labels; a crowd of Cats may be of cats."""
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "Cat"}, {"id": 3, "name": "owl"}]
    images = [{"id": 1, "file_name": "1.png", "width": WIDTH, "height": HEIGHT} | more]
    items = [annotation(), annotation(category_id=2, iscrowd=1, bbox=[50, 0, 50, 80])]
    path = coco_file(tmp_path, items, images, categories=categories)
    convert(path, tmp_path, tmp_path / "d.jsonl")
    assert json.loads((tmp_path / "d.jsonl").read_text())["annotated"] == ["owl"]


def test_TGT_12_DAT_1_a_line_without_an_object_that_the_image_shows_is_complete_for_the_others_only(tmp_path):
    """DAT-1, TGT-12: what stands in a crowd, or where an annotation cannot be read, is no mistake of the model. What is
    no object, or none that the user wants, leaves no gap."""
    crowd = annotation(iscrowd=1, bbox=[50, 0, 50, 80])
    for lost, options, expected in (
        (crowd, {}, ["traffic light"]),
        (crowd, {"categories": frozenset({"cat"})}, []),
        (annotation(bbox="x"), {}, ["traffic light"]),
        (annotation(bbox=[40, 60, -30, 9]), {}, ["traffic light"]),
        (annotation(bbox=[0, 0, 0, 3]), {}, None),
        (annotation(bbox=[500, 0, 10, 3]), {}, None),
        (annotation(bbox=[0, 0, 50, 3]), {"min_size": 4}, None),
        (annotation(category_id=2), {"categories": frozenset({"cat"})}, None),
    ):
        (row,), _ = converted(tmp_path, [annotation(), lost], **options)
        assert row.get("annotated") == expected

    # The model finds the cat and three more in the crowd. COCO's own evaluation of the source passes over these.
    path = coco_file(tmp_path, [crowd | {"id": 1, "area": 4000}, annotation(id=2, area=1200)])
    boxes = [[10, 20, 30, 40], [52, 0, 20, 70], [70, 5, 20, 70], [60, 10, 30, 60]]
    coco = COCO(str(path))
    results = [{"image_id": 1, "category_id": 1, "bbox": box, "score": 0.9} for box in reversed(boxes)]
    evaluation = COCOeval_faster(coco, coco.loadRes(results), "bbox")
    evaluation.run()
    convert(path, tmp_path, tmp_path / "d.jsonl")
    (sample,) = load_samples([tmp_path / "d.jsonl"], prompt="find")[0]
    corners = [(x, y, x + width, y + height) for x, y, width, height in boxes]
    found = [Object("cat", "bbox_2d", pixels_to_bins(box, WIDTH, HEIGHT)) for box in corners]
    assert coco_scores([sample], [found])["AP50"] == evaluation.stats_as_dict["AP_50"] == 1.0


def test_an_image_with_an_object_of_an_unlisted_category_is_left_out(tmp_path):
    """Training would take its line for complete, and the object for a mistake of the model."""
    items = [annotation(0), annotation(1), annotation(1, category_id=9), annotation(2, category_id="1")]
    rows, report = converted(tmp_path, items, many_images(tmp_path, 3))
    assert [row["id"] for row in rows] == ["0"]
    assert report.reasons == {(IMAGES, "an object's category is not in the file's list"): (2, 1)}
    lvis = [image | {"neg_category_ids": [2]} for image in many_images(tmp_path, 2)]
    rows, report = converted(tmp_path, items[:3], lvis)  # says itself what is complete
    assert [row["annotated"] for row in rows] == [["cat", "traffic light"]] * 2
    assert report.reasons == {(LOST, "category not in the file's list"): (1, 1)}


IDS = '; compare the ids in the file: the text "7" is not the number 7'


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ([annotation("1")] * 2, f"no object is left to write{IDS}|objects left out: {STRAY}: 2"),
        ([annotation(category_id="1")], f"no image is left to write{IDS}|images left out: {INCOMPLETE}: 1"),
        ([annotation(bbox=None)], "no object is left to write|objects left out: neither bbox nor outline: 1"),
        ([], "no object is left to write: none of the 1 images has an annotation|images without objects: 1"),
    ],
)
def test_a_conversion_that_leaves_no_object_ends_with_2_and_writes_nothing(
    tmp_path, monkeypatch, capsys, annotations, words
):
    path, out = coco_file(tmp_path, annotations), tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        run_tool(monkeypatch, *"--from coco --output".split(), out / "d", "--annotations", path, "--images", tmp_path)
    assert ended.value.code == 2 and not list(out.iterdir())
    message, reason = words.split("|")
    text = capsys.readouterr()
    assert text.out == "" and text.err.startswith(f"{path}: {message}\n") and f"\n{reason}" in text.err


# ---- outlines ------------------------------------------------------------------------------------------------------


def test_one_ring_keeps_its_points(tmp_path):
    ring = [10, 10, 50.25, 10, 50, 30, 20, 30.129]
    assert one_object(tmp_path, {"geometry": "poly"}, segmentation=[ring])["poly"] == [*ring[:-1], 30.13]
    closed = one_object(tmp_path, {"geometry": "poly"}, segmentation=[[*ring, 10, 10]])
    assert closed["poly"] == [*ring[:-1], 30.13]
    crossing = [10, 10, 50, 50, 50, 10, 10, 50]
    assert one_object(tmp_path, {"geometry": "poly"}, segmentation=[crossing])["poly"] == crossing


def area(coords: list[float]) -> float:
    return shapely.Polygon(np.reshape(coords, (-1, 2))).area


def test_several_rings(tmp_path):
    """Apart: the main part or the box, by the share of the area; touching: one outline."""
    large, small = [0, 0, 40, 0, 40, 40, 0, 40], [60, 60, 70, 60, 70, 70, 60, 70]  # 1600 and 100 of area
    item = annotation(segmentation=[small, large], bbox=[0, 0, 70, 70])
    rows, report = converted(tmp_path, [item], geometry="poly")
    assert shapely.Polygon(np.reshape(rows[0]["objects"][0]["poly"], (-1, 2))).bounds == (0, 0, 40, 40)
    assert report.count(CHANGED, "small parts left out") == 1
    rows, report = converted(tmp_path, [item], geometry="poly", main_part=0.95)
    assert rows[0]["objects"] == [{"desc": "cat", "bbox_2d": [0, 0, 70, 70]}]
    assert report.count(CHANGED, "box instead of outline: several parts") == 1 and report.objects["poly"] == 0
    touching = annotation(segmentation=[large, [40, 0, 60, 0, 60, 40, 40, 40]])
    rows, report = converted(tmp_path, [touching], geometry="poly")
    assert area(rows[0]["objects"][0]["poly"]) == 60 * 40 and not report.reasons


def test_a_ring_beyond_the_image_is_cut(tmp_path):
    rows, report = converted(tmp_path, [annotation(segmentation=[[80, 10, 120, 10, 120, 30, 80, 30]])], geometry="poly")
    assert area(rows[0]["objects"][0]["poly"]) == 20 * 20 and report.count(CHANGED, "clipped to the image") == 1
    rows, report = converted(
        tmp_path, [annotation(segmentation=[[110, 0, 120, 0, 120, 9]]), annotation()], geometry="poly"
    )
    assert len(rows[0]["objects"]) == 1 and report.count(LOST, "outside the image") == 1


@pytest.mark.parametrize("segmentation", [[], None, [[1, 1, 5, 5]], [[1, 1, 5, 5, 9, 9]], [[3, 3] * 4]])
def test_no_outline_with_an_area_leaves_the_box(tmp_path, segmentation):
    rows, report = converted(tmp_path, [annotation(segmentation=segmentation)], geometry="poly")
    assert rows[0]["objects"] == [{"desc": "cat", "bbox_2d": [10, 20, 40, 60]}]
    assert report.count(CHANGED, "box instead of outline: no ring or mask with an area") == 1


BAD_MASKS = {
    "another size": ({"size": [5, 5], "counts": [0, 25]}, "malformed: the mask's size differs from the image's"),
    "too long": ({"size": [HEIGHT, WIDTH], "counts": [0, HEIGHT * WIDTH + 1]}, "malformed: segmentation"),
    "too short": ({"size": [HEIGHT, WIDTH], "counts": [5, 5]}, "malformed: segmentation"),
    "negative": ({"size": [HEIGHT, WIDTH], "counts": [5, -5, HEIGHT * WIDTH]}, "malformed: segmentation"),
    "noise": ({"size": [HEIGHT, WIDTH], "counts": "no run lengths"}, "malformed: segmentation"),
    "no counts": ({"size": [HEIGHT, WIDTH]}, "malformed: segmentation"),
    "no size": ({"counts": "abc"}, "malformed: segmentation"),
    "odd ring": ([[1, 2, 3]], "malformed: segmentation"),
    "text": ("abc", "malformed: segmentation"),
    "text in a ring": ([["1", "2", "3", "4", "5", "6"]], "malformed: segmentation"),
}


@pytest.mark.parametrize("name", BAD_MASKS)
def test_malformed_outlines_are_counted_not_met_with_a_crash(tmp_path, name):
    segmentation, reason = BAD_MASKS[name]
    rows, report = converted(tmp_path, [annotation(segmentation=segmentation), annotation()], geometry="poly")
    assert len(rows[0]["objects"]) == 1 and report.count(LOST, reason) == 1


def random_mask(seed: int) -> np.ndarray:
    """Return one blob: a disc with a bite and a rough border, uint8 [HEIGHT, WIDTH], without holes."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    angle = np.arctan2(y - 40, x - 50)
    radius = 25 + 6 * np.sin(rng.integers(2, 6) * angle + rng.uniform(0, 6)) + 2 * np.sin(11 * angle)
    return (np.hypot(y - 40, x - 50) < radius).astype(np.uint8)


def as_rle(mask: np.ndarray, compressed: bool) -> dict:
    if compressed:
        rle = rle_masks.encode(np.asfortranarray(mask))
        return {"size": [HEIGHT, WIDTH], "counts": rle["counts"].decode()}
    flat = mask.flatten(order="F")
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flat, [2]])))
    return {"size": [HEIGHT, WIDTH], "counts": np.diff(np.concatenate([[0], edges])).tolist()}


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_mask_becomes_its_outline(tmp_path, seed, compressed):
    """Unsimplified, it covers exactly the mask's pixels: by the library's area and box, and by each pixel's centre."""
    mask = random_mask(seed)
    rle = as_rle(mask, compressed)
    truth = rle_masks.encode(np.asfortranarray(mask))
    x, y, w, h = rle_masks.toBbox(truth).tolist()
    item = annotation(segmentation=rle, iscrowd=1)
    rows, report = converted(tmp_path, [item], geometry="poly", keep_crowd=True, simplify=0)
    shape = shapely.Polygon(np.reshape(rows[0]["objects"][0]["poly"], (-1, 2)))
    assert shape.area == rle_masks.area(truth) and shape.bounds == (x, y, x + w, y + h) and not report.reasons
    column, row = np.meshgrid(np.arange(WIDTH) + 0.5, np.arange(HEIGHT) + 0.5)
    assert (shapely.contains_xy(shape, column, row) == mask).all()
    rows, _ = converted(tmp_path, [item], geometry="poly", keep_crowd=True)
    simple = shapely.Polygon(np.reshape(rows[0]["objects"][0]["poly"], (-1, 2)))
    assert simple.intersection(shape).area / simple.union(shape).area > 0.96
    assert len(simple.exterior.coords) < len(shape.exterior.coords) / 3
    item.pop("bbox")
    box = converted(tmp_path, [item], keep_crowd=True)[0][0]["objects"][0]["bbox_2d"]
    assert box == [x, y, x + w, y + h]


def test_masks_in_parts_and_with_holes(tmp_path):
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[10:50, 10:50] = 1
    mask[20:30, 20:30] = 0
    rows, report = converted(tmp_path, [annotation(segmentation=as_rle(mask, True))], geometry="poly")
    assert area(rows[0]["objects"][0]["poly"]) == 40 * 40 and report.count(CHANGED, "holes filled") == 1
    mask[60:75, 60:95] = 1
    rows, report = converted(tmp_path, [annotation(segmentation=as_rle(mask, True))], geometry="poly")
    assert "bbox_2d" in rows[0]["objects"][0]
    assert report.count(CHANGED, "box instead of outline: several parts") == 1


def test_a_mask_of_one_pixel_keeps_its_size(tmp_path):
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[10, 20] = 1
    assert area(one_object(tmp_path, {"geometry": "poly"}, segmentation=as_rle(mask, True))["poly"]) == 1


def test_rings_against_the_librarys_own_rasterisation(tmp_path):
    """Two overlapping rings: the outline's area and the merged mask's differ by less than half the outline's length."""
    rings = [[10, 10, 60, 12, 55, 50, 8, 44], [40, 30, 90, 35, 85, 70, 42, 66]]
    coords = one_object(tmp_path, {"geometry": "poly"}, segmentation=rings)["poly"]
    truth = rle_masks.merge(rle_masks.frPyObjects(rings, HEIGHT, WIDTH))
    outline = shapely.Polygon(np.reshape(coords, (-1, 2)))
    assert abs(outline.area - rle_masks.area(truth)) < outline.length / 2
    x, y, w, h = rle_masks.toBbox(truth)
    assert np.abs(np.array(outline.bounds) - (x, y, x + w, y + h)).max() <= 1


# ---- images --------------------------------------------------------------------------------------------------------


def test_lvis_images_are_found_by_their_url(tmp_path):
    """LVIS has no `file_name`; its folder may be the parent of `train2017` or that folder itself."""
    (tmp_path / "train2017").mkdir()
    Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "train2017" / "7.png")
    url = "http://images.cocodataset.org/train2017/7.png"
    images = [{"id": 7, "coco_url": url, "width": WIDTH, "height": HEIGHT, "not_exhaustive_category_ids": [2]}]
    path = coco_file(tmp_path, [annotation(7)], images)
    for folder in (tmp_path, tmp_path / "train2017"):
        report = convert(path, folder, tmp_path / "d.jsonl")
        assert json.loads((tmp_path / "d.jsonl").read_text())["images"] == ["train2017/7.png"]
        assert "not exhaustively annotated for some category: 1" in report.text()


def test_TGT_12_lvis_lists_become_annotated(tmp_path):
    """TGT-12: found or known to be absent, but not those annotated in part, nor one of which an object was left out."""
    first, second = sorted(CATEGORIES)
    image, other = several_entries(tmp_path, {1: {"not_exhaustive_category_ids": []}, 2: {}})
    one = annotation() | {"category_id": first}
    for neg, partial, found, expected in (
        ([second], [], [one], {first, second}),
        ([second], [first], [one], {second}),
        ([], [], [one, one | {"iscrowd": 1}], set()),
        ([], [], [], set()),
    ):
        lists = {"neg_category_ids": neg, "not_exhaustive_category_ids": partial}
        rows, _ = converted(tmp_path, [*found, annotation(2)], [image | lists, other])
        row = rows[0]
        assert row["annotated"] == sorted(CATEGORIES[category] for category in expected)
    (row,), _ = converted(tmp_path, [one], [image])
    assert "annotated" not in row  # COCO's annotation is complete


@pytest.mark.parametrize("ids", [2, {"2": 1}, "traffic light", [[2]], [None]])
@pytest.mark.parametrize("key", ["neg_category_ids", "not_exhaustive_category_ids"])
def test_TGT_12_lists_of_categories_that_are_none_leave_the_image_out(tmp_path, key, ids):
    """TGT-12: by the name of the key; the other images are converted."""
    images = several_entries(tmp_path, {1: {key: ids}, 2: {}})
    rows, report = converted(tmp_path, [annotation(1), annotation(2)], images)
    assert [row["id"] for row in rows] == ["2"]
    assert f"malformed: {key} is not a list of category ids" in report.text()


def test_TGT_12_a_coco_file_says_of_an_image_what_it_does_not_annotate(tmp_path, monkeypatch, capsys):
    """TGT-12: by LVIS's key for it, without LVIS's other one. A category that is not chosen is no gap; an id that the
    file does not list would be lost without a word."""
    lists = {0: None, 1: [], 2: [2], 3: [1], 4: [1, 2], 5: ["traffic light"]}
    images = several_entries(tmp_path, {i: {"not_exhaustive_category_ids": ids} for i, ids in lists.items()})
    path = coco_file(tmp_path, [annotation(i) for i in lists], images)
    command = [
        "convert",
        "--from",
        "coco",
        "--annotations",
        str(path),
        "--images",
        str(tmp_path),
        "--output",
        "d.jsonl",
    ]
    monkeypatch.chdir(tmp_path)

    def lines(*more: str) -> dict[str, list[str] | None]:
        monkeypatch.setattr(sys, "argv", [*command, *more])
        main()
        return {row["id"]: row.get("annotated") for row in map(json.loads, Path("d.jsonl").open())}

    assert lines() == {"0": None, "1": None, "2": ["cat"], "3": ["traffic light"], "4": []}
    told = capsys.readouterr().out
    assert "images not exhaustively annotated for some category: 3\n" in told
    assert "not_exhaustive_category_ids has one that is not in the file's list: 1 (first: image 5)" in told
    assert lines("--categories", "cat") == {"0": None, "1": None, "2": None, "3": [], "4": []}


def test_TGT_12_an_image_of_lvis_that_does_not_say_what_is_absent_is_left_out(tmp_path):
    """TGT-12: its line would call the annotation complete. One that has the list, though empty, is written."""
    images = several_entries(tmp_path, {1: {"neg_category_ids": []}, 2: {}})
    path, output = coco_file(tmp_path, [annotation(1), annotation(2)], images), tmp_path / "out.jsonl"
    report = convert(path, tmp_path, output, kind="lvis")
    assert [json.loads(line)["id"] for line in output.open()] == ["1"]
    assert "no neg_category_ids, which LVIS has for every image; --from coco if all" in report.text()
    with pytest.raises(ValueError, match="no image is left to write\n(.|\n)*no neg_category_ids"):
        convert(coco_file(tmp_path, [annotation(2)], images[1:]), tmp_path, output, kind="lvis")


@pytest.mark.parametrize(("kind", "unit"), [("coco", 1), ("yolo", 1000), ("swift", 1000), ("sharegpt", -5)])
def test_a_unit_that_would_not_be_used_is_refused(tmp_path, kind, unit):
    """Thousandths taken for pixels would pass all checks."""
    with pytest.raises(ValueError, match=f"--unit {unit}: is for --from sharegpt, and not negative"):
        convert(tmp_path / "any", tmp_path, tmp_path / "out.jsonl", kind=kind, unit=unit)


def test_boxes_that_look_like_two_corners_are_pointed_out(tmp_path):
    """The commonest mistake of an export; one box at the border is none."""
    corners = annotation() | {"bbox": [WIDTH // 2, HEIGHT // 2, WIDTH - 1, HEIGHT - 1]}
    hint = "would not as [x1, y1, x2, y2]; COCO's are [x, y, width, height]"
    inside = [annotation() | {"bbox": [i, 0, 2, 2]} for i in range(10)]
    for items, is_told in (([corners], True), ([corners, *inside], False), (inside, False)):
        _, report = converted(tmp_path, items)
        assert (hint in report.text()) is is_told


def test_a_file_without_categories_or_content_and_a_folder_that_is_a_file_are_told(tmp_path):
    output = tmp_path / "out.jsonl"
    path = coco_file(tmp_path, [annotation()])
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"categories": []}))
    with pytest.raises(ValueError, match="no image is left to write; its list of categories is empty"):
        convert(path, tmp_path, output)
    path.write_text("")
    with pytest.raises(ValueError, match="the file is empty"):
        convert(path, tmp_path, output)
    path.write_text(json.dumps(whole)[:-9])
    with pytest.raises(ValueError, match="not valid JSON: [^\n]+$"):
        convert(path, tmp_path, output)
    (tmp_path / "file").write_text("")
    path.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=r"--output .*/file/x.jsonl: .*/file is below a file, or one; name another"):
        convert(path, tmp_path, tmp_path / "file" / "x.jsonl")


def test_images_that_do_not_fit_are_left_out(tmp_path):
    Image.new("RGB", (9, 9)).save(tmp_path / "other.png")
    Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "6.png")
    (tmp_path / "broken.png").write_text("x")
    good = {"id": 1, "file_name": "1.png", "width": WIDTH, "height": HEIGHT}
    images = [
        good,
        good,
        good | {"id": 2, "file_name": "absent.png"},
        good | {"id": 3, "file_name": "other.png"},
        good | {"id": 4, "file_name": "broken.png"},
        {"id": 5, "width": WIDTH, "height": HEIGHT},
        good | {"id": None},
        {"id": "six", "file_name": "6.png"},
    ]
    rows, report = converted(tmp_path, [annotation(), annotation(2), annotation(99), annotation(None)], images)
    assert [(row["id"], len(row["objects"]), row["width"]) for row in rows] == [("1", 1, WIDTH), ("six", 0, WIDTH)]
    reasons = {reason: entry for (what, reason), entry in report.reasons.items() if what == IMAGES}
    assert reasons == {
        "no such image file": (1, 2),
        "the image file's size differs from the annotations'": (1, 3),
        f"image file cannot be read: not an image that can be read; formats: {', '.join(FORMATS)}": (1, 4),
        "malformed: neither file_name nor coco_url": (1, 5),
        "malformed: no id": (1, None),
        "id listed before": (1, None),
    }
    assert report.count(LOST, "their image is not in the file's list") == 2
    assert report.num_empty == 1


def test_DAT_1_an_odd_entry_leaves_out_its_own_image_only(tmp_path):
    """DAT-1: a category id that is a list, a name that no file can have, one that is none."""
    images = several_entries(tmp_path, {1: {}, 2: {}, 3: {"file_name": "x" * 300}, 4: {"file_name": [1]}})
    rows, report = converted(tmp_path, [annotation(1), annotation(2, [1])], images)
    assert [row["id"] for row in rows] == ["1"]
    assert report.reasons == {
        (IMAGES, INCOMPLETE): (1, 2),
        (IMAGES, "image file cannot be read: File name too long"): (1, 3),
        (IMAGES, "malformed: neither file_name nor coco_url"): (1, 4),
    }


def test_DAT_1_an_id_that_stands_for_several_images_or_names_is_never_guessed(tmp_path):
    """DAT-1: the images of such an id are left out; a category of two names stops the conversion."""
    for name in ("2.png", "3.png"):
        Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / name)
    one, other, third = ({"id": 1, "file_name": f"{i}.png", "width": WIDTH, "height": HEIGHT} for i in (1, 2, 3))
    rows, report = converted(tmp_path, [annotation(), annotation(2)], [one, other, one, third | {"id": 2}])
    assert [row["id"] for row in rows] == ["2"]
    assert report.reasons == {(IMAGES, "its id stands for several images"): (3, 1)}
    path = coco_file(tmp_path, [annotation()], categories=[{"id": 1, "name": "dog"}, {"id": 1, "name": "car"}])
    with pytest.raises(ValueError, match="annotations.json: categories: id 1 is both 'dog' and 'car'; give each"):
        convert(path, tmp_path, tmp_path / "d.jsonl")


def test_TGT_12_images_with_several_entries_are_left_out(tmp_path):
    """TGT-12, DAT-1: as home-made files have one per annotation. Each line would call a part of the objects all."""
    first, *others, alone = many_images(tmp_path, 4)
    spelt = [f"./{first['file_name']}", first["file_name"]]
    images = [first, alone, *(other | {"file_name": name} for other, name in zip(others, spelt, strict=True))]
    rows, report = converted(tmp_path, [annotation(i) for i in range(4)], images)
    assert [row["id"] for row in rows] == ["3"] and report.reasons == {(IMAGES, SHARED): (3, 0)}


def many_images(folder: Path, num: int) -> list[dict]:
    return several_entries(folder, dict.fromkeys(range(num), {}))


def several_entries(folder: Path, entries: dict[int, dict]) -> list[dict]:
    """Image entries by id, each with a file of its own."""
    for i in entries:
        Image.new("RGB", (WIDTH, HEIGHT)).save(folder / f"many{i}.png")
    image = {"width": WIDTH, "height": HEIGHT}
    return [image | {"id": i, "file_name": f"many{i}.png"} | more for i, more in entries.items()]


def test_limits(tmp_path):
    items = [annotation(i, bbox=[0, 0, 9, k + 1]) for i in range(5) for k in range(i)]  # image i has i objects
    rows, report = converted(tmp_path, items, many_images(tmp_path, 5), max_objects=3, skip_empty=True)
    assert [row["id"] for row in rows] == ["1", "2", "3"]
    assert report.reasons == {(IMAGES, "more than 3 objects"): (1, 4), (IMAGES, "no objects"): (1, 0)}
    rows, _ = converted(tmp_path, items, many_images(tmp_path, 5), skip_empty=True, limit=2)
    assert [row["id"] for row in rows] == ["1", "2"]


def test_splits_are_disjoint_deterministic_and_of_the_right_size(tmp_path):
    path = coco_file(tmp_path, [annotation(i) for i in range(1000)], many_images(tmp_path, 1000))
    splits = parse_splits("train=0.8,val=0.1")

    def ids(seed: int) -> dict[str, list[str]]:
        report = convert(path, tmp_path, tmp_path / "d.jsonl", splits=splits, seed=seed)
        assert report.count(IMAGES, "in no split") == 1000 - sum(report.images.values())
        return {name: [json.loads(row)["id"] for row in (tmp_path / f"d_{name}.jsonl").open()] for name in splits}

    first = ids(0)
    assert not set(first["train"]) & set(first["val"]) and not (tmp_path / "d.jsonl").exists()
    assert abs(len(first["train"]) - 800) < 50 and abs(len(first["val"]) - 100) < 40
    assert ids(0) == first and ids(1) != first
    # An image stays in its split when others are added, and ids are new.
    images = [image | {"id": image["id"] + 7} for image in many_images(tmp_path, 1500)]
    grown = coco_file(tmp_path, [annotation(i) for i in range(1000)], images)
    convert(grown, tmp_path, tmp_path / "d.jsonl", splits=splits)
    found = [int(json.loads(row)["id"]) - 7 for row in (tmp_path / "d_val.jsonl").open()]
    assert found[: len(first["val"])] == list(map(int, first["val"]))
    # LVIS names the same images by their place on the web.
    lvis = [image | {"coco_url": f"http://x/train2017/{image.pop('file_name')}"} for image in images]
    convert(
        coco_file(tmp_path, [annotation(i) for i in range(1000)], lvis),
        tmp_path,
        tmp_path / "lvis.jsonl",
        splits=splits,
    )
    assert [json.loads(row)["id"] for row in (tmp_path / "lvis_val.jsonl").open()] == [str(i + 7) for i in found]
    assert Counter(split_of(i, {"a": 0.5, "b": 0.5}, 3) for i in range(4000))[None] == 0


@pytest.mark.parametrize("text", ["train", "train=x", "a=0.5,a=0.5", "a=0.9,b=0.2", "a=0", "a b=1", "=1"])
def test_splits_that_cannot_be(text):
    with pytest.raises(ValueError, match="--splits"):
        parse_splits(text)


def test_paths_relative_to_a_given_root(tmp_path):
    (tmp_path / "images").mkdir()
    path = coco_file(tmp_path / "images", [annotation()])
    convert(path, tmp_path / "images", tmp_path / "out" / "d.jsonl", root=tmp_path)
    assert json.loads((tmp_path / "out" / "d.jsonl").read_text())["images"] == ["images/1.png"]


def test_dat_1_a_folder_that_is_a_link(tmp_path):
    """DAT-1: the system goes up from where the link points to. Paths below the folder stay as they are."""
    (tmp_path / "disk" / "deep" / "data").mkdir(parents=True)
    (tmp_path / "data").symlink_to(tmp_path / "disk" / "deep" / "data")
    (tmp_path / "images").mkdir()
    (tmp_path / "data" / "images").mkdir()
    for images, output, shown in (
        ("images", "data/d.jsonl", None),
        ("data", "data/d.jsonl", "1.png"),
        ("data/images", "data/out/d.jsonl", "../images/1.png"),
    ):
        path = coco_file(tmp_path / images, [annotation()])
        convert(path, tmp_path / images, tmp_path / output)
        (sample,) = load_samples([tmp_path / output], prompt="find")[0]
        assert Path(sample.images[0]).is_file()
        assert shown in (None, json.loads((tmp_path / output).read_text())["images"][0])


# ---- the whole -----------------------------------------------------------------------------------------------------


def test_dat_1_what_is_written_passes_every_check_of_training(tmp_path):
    """DAT-1, DAT-3: all kinds of annotations at once, boxes and outlines; the bins are those of the pixels."""
    rng = np.random.default_rng(0)
    items = []
    for image_id in range(40):
        for _ in range(8):
            x, y, w, h = rng.uniform(-20, 110, 2).tolist() + rng.uniform(-2, 90, 2).tolist()
            ring = rng.uniform(-20, 120, 2 * int(rng.integers(2, 9))).tolist()
            mask = as_rle(random_mask(int(rng.integers(100))), bool(rng.integers(2)))
            segmentation = [[ring], [ring, ring[::-1]], mask, None][int(rng.integers(4))]
            items.append(annotation(image_id, int(rng.integers(1, 3)), bbox=[x, y, w, h], segmentation=segmentation))
    path = coco_file(tmp_path, items, many_images(tmp_path, 40))
    for geometry in ("box", "poly"):
        report = convert(path, tmp_path, tmp_path / "d.jsonl", Options(geometry=geometry))
        counts, text = check([str(tmp_path / "d.jsonl")], "x")
        assert counts.num_bad == 0, text
        samples = load_samples([tmp_path / "d.jsonl"], "x")[0]
        kinds = Counter(item.kind for sample in samples for item in sample.objects)
        assert dict(kinds) == {kind: count for kind, count in report.objects.items() if count}
        lost = sum(count for (what, _), (count, _) in report.reasons.items() if what == LOST)
        assert kinds.total() + lost == len(items) and kinds.total() > 100


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a COCO file"),
        ('{"images": [3]}', "images: must be a list of objects, contains 3"),
        (
            '{"images": [{"id": 1}], "categories": [{"id": 1, "name": "<|im_end|>"}]}',
            "cannot be an object's description: it is no name, or spells a special token of a model; rename it",
        ),
        ('{"images": [{"id": 1, "file_name": "no.png"}]}', "no image is left to write"),
        ("\x00\xff", "not valid JSON"),
        ('{"images": [{"id": 9223372036854775808}]}', "json: an integer of more than 64 bits; write it, and what"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, content, words):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        convert(tmp_path / "a.json", tmp_path, tmp_path / "d.jsonl")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json"}


def test_a_compressed_file_is_told_from_a_broken_one(tmp_path):
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ValueError, match="not UTF-8; it is compressed, unpack it first"):
        convert(tmp_path / "a.json.gz", tmp_path, tmp_path / "d.jsonl")


def test_a_byte_order_mark_does_no_harm(tmp_path):
    """DAT-1: Windows' tools write one."""
    path = coco_file(tmp_path, [annotation()])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert convert(path, tmp_path, tmp_path / "d.jsonl").objects["bbox_2d"] == 1


def test_a_wrong_category_name_is_met_with_the_right_one(tmp_path):
    path = coco_file(tmp_path, [])
    with pytest.raises(ValueError, match="has no 'trafic light'; did you mean traffic light"):
        convert(path, tmp_path, tmp_path / "d.jsonl", Options(categories=frozenset({"trafic light"})))


def test_a_category_whose_name_has_a_comma_is_chosen_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(CATEGORIES, 3, "bus, school")
    path, out = coco_file(tmp_path, [annotation(category_id=key) for key in CATEGORIES]), tmp_path / "d.jsonl"
    args = ["--from", "coco", "--annotations", path, "--images", tmp_path, "--output", out]
    for values, expected in (
        (["bus, school"], ["bus, school"]),
        (["cat, traffic light"], ["cat", "traffic light"]),
        (["cat,traffic light", "bus, school"], ["cat", "traffic light", "bus, school"]),
        ([" cat ", ""], ["cat"]),
        ([""], ["cat", "traffic light", "bus, school"]),
    ):
        run_tool(monkeypatch, *args, *(part for value in values for part in ("--categories", value)))
        assert [item["desc"] for item in json.loads(out.read_text())["objects"]] == expected
    with pytest.raises(SystemExit):
        run_tool(monkeypatch, *args, "--categories", "cat,bus, school")
    assert "has no 'bus'; did you mean one of bus, school, cat, traffic light?" in (told := capsys.readouterr().err)
    assert "a name with a comma needs a --categories of its own" in told


@pytest.mark.parametrize(
    "bad", [{"min_size": -1}, {"main_part": 2}, {"limit": 0}, {"max_objects": 0}, {"simplify": -1}]
)
def test_options_out_of_range(bad):
    with pytest.raises(ValueError, match="--"):
        Options(**bad)


def run_tool(monkeypatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["convert", *map(str, args)])
    main()


def test_the_program(tmp_path, monkeypatch, capsys):
    path, out = coco_file(tmp_path, [annotation(), annotation(iscrowd=1, bbox=[0, 0, 9, 9])]), tmp_path / "d.jsonl"
    args = ["--from", "coco", "--annotations", path, "--images", tmp_path, "--output", out]
    run_tool(monkeypatch, *args)
    assert capsys.readouterr().out.splitlines() == [
        f"{out}: 1 images",
        "objects: 1 boxes, 0 outlines",
        "images without objects: 0",
        "objects left out: crowd: 1 (first: image 1)",
        f"look at it: python -m tools.show_jsonl --data {out} --output sheets",
        f"write a config: python -m tools.init --data {out} --model DIR --gpus N",
    ]
    run_tool(monkeypatch, *args, "--output", f"{tmp_path}/my d.jsonl")
    assert f"tools.init --data '{tmp_path}/my d.jsonl' --model" in capsys.readouterr().out
    run_tool(monkeypatch, *args, "--crowd", "keep", "--categories", "cat,traffic light", "--splits", "a=1")
    assert f"{tmp_path}/d_a.jsonl: 1 images\nobjects: 2 boxes" in capsys.readouterr().out
    for wrong, words in [(["--limit", "0"], "--limit and"), (["--images", tmp_path / "none"], "no such folder")]:
        with pytest.raises(SystemExit) as ended:
            run_tool(monkeypatch, *args, *wrong)
        assert ended.value.code == 2 and words in capsys.readouterr().err
    absent = str(tmp_path / "absent.json")
    with pytest.raises(SystemExit):
        run_tool(monkeypatch, *args, "--annotations", absent)
    assert capsys.readouterr().err == f"{absent}: No such file or directory\n"


def test_the_program_passes_limits_and_seed_on(tmp_path, monkeypatch):
    """`convert` itself is tested above."""
    items = [annotation(i) for i in range(40)]
    path, out = (
        coco_file(tmp_path, [*items, annotation(7, bbox=[0, 0, 9, 9])], many_images(tmp_path, 40)),
        tmp_path / "d.jsonl",
    )
    splits, options = "a=0.5,b=0.5", Options(max_objects=1)
    args = ["--from", "coco", "--annotations", path, "--images", tmp_path, "--output", out]
    run_tool(monkeypatch, *args, "--max-objects", 1, "--splits", splits, "--seed", 5)
    written = [(tmp_path / f"d_{name}.jsonl").read_text() for name in "ab"]
    assert sum(text.count("\n") for text in written) == 39
    convert(path, tmp_path, out, options, splits=parse_splits(splits), seed=5)
    assert written == [(tmp_path / f"d_{name}.jsonl").read_text() for name in "ab"]


PEAK = """
import re, sys
from pathlib import Path
from tools.coco import Options
from tools.convert import convert
def peak():  # of this program alone; getrusage's starts at that of the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
options = Options(geometry="poly", limit=int(sys.argv[2]))
report = convert(sys.argv[1], Path(sys.argv[1]).parent, Path(sys.argv[1]).parent / "d.jsonl", options)
print(report.objects["poly"], (peak() - before) / 1024)
"""


def test_memory_does_not_grow_with_the_file(tmp_path):
    """A file of 60 MB, with outlines in an order in which none can be written before all are read."""
    num_images, num_objects = 300, 1800
    angle = np.linspace(0, 6, 1000)
    ring = np.stack([50 + 30 * np.cos(angle), 40 + 30 * np.sin(angle)], 1).ravel()
    item = json.dumps(annotation(0, segmentation=[ring.tolist()])).replace('"image_id": 0', '"image_id": %d')
    path = coco_file(tmp_path, [], many_images(tmp_path, num_images))
    head, _, tail = path.read_text().partition('"annotations": [')
    with path.open("w") as file:
        file.write(head + '"annotations": [')
        objects = (item.replace("[[80", f"[[{80 + i // num_images}") for i in range(num_objects))  # all differ
        file.write(", ".join(text % (i % num_images) for i, text in enumerate(objects)))
        file.write(tail)
    assert path.stat().st_size > 60e6
    done = subprocess.run([sys.executable, "-c", PEAK, str(path), "30"], capture_output=True, text=True, check=True)
    num_polygons, growth = done.stdout.split()
    assert int(num_polygons) == num_objects // 10 and float(growth) < 45, growth


def test_object_of_an_unknown_category_type():
    with pytest.raises(Exception, match="category not in the file's list"):
        convert_object(annotation(category_id=[1]), CATEGORIES, WIDTH, HEIGHT, Options())


def test_ids_that_are_whole_fractions_are_numbers(tmp_path):
    """As pandas writes them."""
    path = coco_file(tmp_path, [annotation() | {"category_id": 1.0, "image_id": 1.0}])
    assert convert(path, tmp_path, tmp_path / "d.jsonl").objects["bbox_2d"] == 1
    path = coco_file(tmp_path, [annotation(), annotation() | {"image_id": 1e19}])  # fits no database
    assert convert(path, tmp_path, tmp_path / "d.jsonl").objects["bbox_2d"] == 1


def test_images_that_are_not_found_are_named_with_the_way_out(tmp_path):
    path = coco_file(tmp_path, [annotation()])
    (tmp_path / "other").mkdir()
    told = f"is not below {tmp_path / 'other'}: --images is the folder that these names are relative to"
    with pytest.raises(ValueError, match=re.escape(told)):
        convert(path, tmp_path / "other", tmp_path / "d.jsonl")
    with pytest.raises(ValueError, match="--output .*other: is a folder; name a file in it"):
        convert(path, tmp_path, tmp_path / "other")


def test_a_disk_that_fills_up_at_the_end_replaces_no_file(tmp_path):
    """What is buffered is written when a file is closed: one that cannot be leaves all of them as they were."""
    targets = {"train": tmp_path / "train.jsonl", "val": tmp_path / "val.jsonl"}
    for path in targets.values():
        path.write_text("old")
    with pytest.raises(OSError, match="No space left"), _written_whole(targets) as files:
        files["train"].write("new")
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, files["val"].fileno())
        os.close(full)
        files["val"].write("new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"train.jsonl": "old", "val.jsonl": "old"}
