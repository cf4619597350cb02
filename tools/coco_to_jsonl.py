"""COCO or LVIS annotation files to the JSONL that training reads (SPEC DAT-1), one line per image.

Run as
    python -m tools.coco_to_jsonl --annotations instances_train2017.json --images train2017 --output data/coco.jsonl
    ... --geometry poly --splits train=0.95,val=0.05      (writes data/coco_train.jsonl and data/coco_val.jsonl)

The file is read in a stream and its annotations are grouped by image in a temporary database on disk (in TMPDIR, about
as large as the file), so memory does not grow with it. Images keep the file's order, objects that of the annotations.
What is left out or changed is counted, with the first case of each, and reported at the end.

Outlines (`--geometry poly`): an object drawn as one ring keeps its points. Several rings, a ring that reaches beyond
the image, and run-length masks (compressed or not) are united and cut to the image first; the largest part is then
written where it holds at least `--main-part` of the area, otherwise the object's box. Holes are filled. The outline of
a mask follows its pixels' edges and is simplified by at most a pixel. LVIS's lists of absent and not exhaustively
annotated categories are not used; images of the latter kind are counted.
"""

import argparse
import difflib
import hashlib
import json
import math
import os
import re
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ijson
import numpy as np
import shapely
from faster_coco_eval.core import mask as rle_masks

from utils.data.images import image_size
from utils.data.samples import SPECIAL_TOKEN, SURROGATE, map_ahead

# A mask's outline is a staircase whose steps say nothing about the object, unless it is only a few pixels large.
MASK_SIMPLIFY_PX, MASK_SIMPLIFY_SHARE = 1.0, 0.05
_IMAGE_KEYS = ("file_name", "coco_url", "width", "height", "not_exhaustive_category_ids")
_OBJECT_KEYS = ("category_id", "bbox", "iscrowd", "segmentation")


@dataclass(frozen=True)
class Options:
    """How annotations become objects; sizes in pixels."""

    geometry: str = "box"
    keep_crowd: bool = False
    categories: frozenset[str] | None = None
    min_size: float = 0.0
    max_objects: int | None = None
    skip_empty: bool = False
    main_part: float = 0.9
    simplify: float | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.min_size < 0 or (self.simplify or 0) < 0 or not 0 <= self.main_part <= 1:
            raise ValueError("--min-size and --simplify must not be negative, --main-part lies in 0..1")
        if self.limit is not None and self.limit < 1 or self.max_objects is not None and self.max_objects < 1:
            raise ValueError("--limit and --max-objects must be at least 1")


class _LeftOut(Exception):
    """Why an image or an object is not written."""


# ---- reading the file ----------------------------------------------------------------------------------------------


class CocoFile:
    """An annotation file, its annotations grouped by image on disk. Use it in a `with`.

    Args:
        outlines: keep every outline; otherwise only those of objects without a box.

    Attributes:
        categories: name of each category id.
        num_images: images with an id of their own.
        num_repeated: further images with the id of another.

    Raises:
        ValueError: not JSON, or no COCO file.
    """

    def __init__(self, path: str | os.PathLike, outlines: bool) -> None:
        self.path = Path(path)
        self.outlines = outlines
        self._db = sqlite3.connect("")  # an unnamed file that is gone when the connection is
        try:
            self._fill()
        except (ijson.JSONError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not valid JSON: {error}") from None

    def __enter__(self) -> "CocoFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._db.close()

    def _items(self, name: str) -> Iterator[Any]:
        with self.path.open("rb") as file:
            for item in ijson.items(file, f"{name}.item", use_float=True):
                if not isinstance(item, dict):
                    raise ValueError(f"{self.path}: {name}: must be a list of objects, holds {item!r:.40}")
                yield item

    def _fill(self) -> None:
        self.categories = {_key(item.get("id")): self._name(item) for item in self._items("categories")}
        db = self._db
        db.execute("PRAGMA journal_mode = OFF")
        db.execute("CREATE TABLE images (id UNIQUE, item)")
        db.execute("CREATE TABLE annotations (image, item)")
        images = _rows(self._items("images"), "id", _IMAGE_KEYS)
        self.num_images = self.num_repeated = 0
        for row in images:
            is_new = db.execute("INSERT OR IGNORE INTO images VALUES (?, ?)", row).rowcount
            self.num_images += is_new
            self.num_repeated += not is_new
        if not self.num_images:
            raise ValueError(
                f'{self.path}: no COCO file: {{"images": [...], "annotations": [...], "categories": [...]}}'
            )
        annotations = _rows(self._objects(), "image_id", _OBJECT_KEYS)
        db.executemany("INSERT INTO annotations VALUES (?, ?)", annotations)
        db.execute("CREATE INDEX by_image ON annotations (image)")

    def _objects(self) -> Iterator[dict[str, Any]]:
        for item in self._items("annotations"):
            if not self.outlines and item.get("bbox") is not None:
                item.pop("segmentation", None)
            yield item

    def _name(self, category: dict[str, Any]) -> str:
        name = category.get("name")
        if not isinstance(name, str) or not name.strip() or SPECIAL_TOKEN.search(name) or SURROGATE.search(name):
            raise ValueError(f"{self.path}: categories: {name!r} cannot be an object's description")
        return name.strip()

    def num_strays(self) -> int:
        """Annotations of images that the file does not list."""
        known = "EXISTS (SELECT 1 FROM images WHERE images.id = annotations.image)"
        return self._db.execute(f"SELECT count(*) FROM annotations WHERE NOT {known}").fetchone()[0]

    def images(self) -> Iterator[tuple[int | str | None, str, list[str]]]:
        """(id, image, its annotations) in file order, the latter two as JSON: compact while they wait."""
        query = "SELECT item FROM annotations WHERE image = ? ORDER BY rowid"
        for image_id, item in self._db.execute("SELECT id, item FROM images ORDER BY rowid"):
            yield image_id, item, [row[0] for row in self._db.execute(query, (image_id,))]


def _key(value: Any) -> int | str | None:
    """An id as the database and a dictionary take it; None for what is none."""
    fits = isinstance(value, str) or isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return value if fits else None


def _rows(items: Iterable[dict[str, Any]], id_name: str, keys: Sequence[str]) -> Iterator[tuple[int | str | None, str]]:
    for item in items:
        yield _key(item.get(id_name)), json.dumps({key: item[key] for key in keys if key in item})


# ---- one object ----------------------------------------------------------------------------------------------------


def convert_object(
    item: dict[str, Any], categories: dict[Any, str], width: int, height: int, options: Options
) -> tuple[dict[str, Any], list[str]]:
    """An annotation as an object of DAT-1, and remarks on how its shape was changed.

    Raises:
        _LeftOut: with the reason.
    """
    name = categories.get(_key(item.get("category_id")))
    if name is None:
        raise _LeftOut("category not in the file's list")
    if options.categories is not None and name not in options.categories:
        raise _LeftOut("category not chosen")
    if item.get("iscrowd") and not options.keep_crowd:
        raise _LeftOut("crowd")
    remarks: list[str] = []
    shape = None
    if options.geometry == "poly" or item.get("bbox") is None:
        shape = _shape(item.get("segmentation"), width, height)
    ring = _ring(shape, item, width, height, options, remarks) if options.geometry == "poly" else None
    if ring is None:
        coords = _clipped_box(item.get("bbox"), shape, width, height, remarks)
        sides = coords[2] - coords[0], coords[3] - coords[1]
    else:
        coords = ring
        sides = max(ring[0::2]) - min(ring[0::2]), max(ring[1::2]) - min(ring[1::2])
    if min(sides) < options.min_size:
        raise _LeftOut(f"smaller than {options.min_size:g} px")
    return {"desc": name, "bbox_2d" if ring is None else "poly": coords}, remarks


def _clipped_box(bbox: Any, shape: shapely.Geometry | None, width: int, height: int, remarks: list[str]) -> list[float]:
    """COCO's [x, y, width, height], or the box around the outline where there is none, as [x1, y1, x2, y2]."""
    if bbox is None and shape is not None:
        x1, y1, x2, y2 = shape.bounds
    elif _is_numbers(bbox, 4):
        x1, y1, x2, y2 = bbox[0], bbox[1], bbox[0] + bbox[2], bbox[1] + bbox[3]
    else:
        raise _LeftOut("malformed: no usable bbox" if bbox is not None else "neither bbox nor outline")
    if x2 <= x1 or y2 <= y1:
        raise _LeftOut("degenerate: no area")
    inside = [max(x1, 0), max(y1, 0), min(x2, width), min(y2, height)]
    if inside[2] <= inside[0] or inside[3] <= inside[1]:
        raise _LeftOut("outside the image")
    coords = [_short(value) for value in inside]
    if coords[2] <= coords[0] or coords[3] <= coords[1]:
        raise _LeftOut("degenerate: no area")
    if inside != [x1, y1, x2, y2]:
        remarks.append("clipped to the image")
    return coords


def _ring(
    shape: shapely.Geometry | None,
    item: dict[str, Any],
    width: int,
    height: int,
    options: Options,
    remarks: list[str],
) -> list[float] | None:
    """The outline to write as [x1, y1, ...]; None where the box is to be written."""
    if shape is None:
        remarks.append("box instead of outline: no ring or mask with an area")
        return None
    drawn = item["segmentation"]
    if isinstance(drawn, list) and len(drawn) == 1 and shapely.box(0, 0, width, height).covers(shape):
        part = shapely.Polygon(np.reshape(drawn[0], (-1, 2)))
    else:
        inside = _parts(shapely.intersection(shape, shapely.box(0, 0, width, height)))
        if not inside:
            raise _LeftOut("outside the image")
        if shapely.area(inside).sum() < shape.area * (1 - 1e-9):
            remarks.append("clipped to the image")
        part = max(inside, key=shapely.area)
        if part.area < options.main_part * shapely.area(inside).sum():
            remarks.append("box instead of outline: several parts")
            return None
        if len(inside) > 1:
            remarks.append("small parts left out")
        if part.interiors:
            remarks.append("holes filled")
    simplify = options.simplify
    if simplify is None and isinstance(drawn, dict):
        simplify = min(MASK_SIMPLIFY_PX, MASK_SIMPLIFY_SHARE * math.sqrt(part.area))
    points = shapely.get_coordinates(part.exterior.simplify(simplify) if simplify else part.exterior)[:-1]
    coords = [_short(value) for value in points.reshape(-1).tolist()]
    if len(coords) < 6:
        remarks.append("box instead of outline: no ring or mask with an area")
        return None
    return coords


def _shape(segmentation: Any, width: int, height: int) -> shapely.Geometry | None:
    """Rings or a run-length mask as one valid geometry with an area, in pixels; None where there is none.

    Raises:
        _LeftOut: malformed.
    """
    if isinstance(segmentation, dict):
        shape = _mask_shape(segmentation, width, height)
    elif isinstance(segmentation, list):
        if not all(_is_numbers(ring) and len(ring) % 2 == 0 for ring in segmentation):
            raise _LeftOut("malformed: segmentation")
        rings = [shapely.Polygon(np.reshape(ring, (-1, 2))) for ring in segmentation if len(ring) >= 6]
        shape = shapely.union_all([shapely.make_valid(r, method="structure", keep_collapsed=False) for r in rings])
    elif segmentation is None:
        return None
    else:
        raise _LeftOut("malformed: segmentation")
    return shape if shape.area > 0 else None


def _mask_shape(rle: dict[str, Any], width: int, height: int) -> shapely.Geometry:
    """The area that a mask's pixels cover; pixel (column, row) covers [column, column + 1] x [row, row + 1]."""
    try:
        if [int(side) for side in rle["size"]] != [height, width]:
            raise _LeftOut("malformed: the mask has another size than the image")
        packed = rle_masks.frPyObjects(rle, height, width) if isinstance(rle["counts"], list) else rle
        mask = rle_masks.decode(packed)
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise _LeftOut("malformed: segmentation") from None
    steps = np.diff(np.pad(mask.astype(np.int8), ((1, 1), (0, 0))), axis=0).T  # +1 where a column's run begins
    column, top = np.nonzero(steps == 1)
    _, bottom = np.nonzero(steps == -1)
    return shapely.union_all(shapely.box(column, top, column + 1, bottom))


def _parts(shape: shapely.Geometry) -> list[shapely.Polygon]:
    parts = shapely.get_parts(shape)
    return [part for part in parts if part.geom_type == "Polygon" and part.area > 0]


def _is_numbers(values: Any, count: int | None = None) -> bool:
    return (
        isinstance(values, list)
        and (count is None or len(values) == count)
        and all(isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in values)
    )


def _short(value: float) -> float | int:
    """Two decimals, as COCO itself has them, and no `.0`."""
    rounded = round(float(value), 2)
    return int(rounded) if rounded.is_integer() else rounded


# ---- one image -----------------------------------------------------------------------------------------------------


@dataclass
class Converted:
    """What became of an image: its line (None: left out), and reasons and remarks, those of its objects included."""

    image_id: int | str | None
    row: dict[str, Any] | None
    left_out: str | None = None
    objects_left_out: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    not_exhaustive: bool = False


def convert_image(
    image_id: int | str | None,
    image: dict[str, Any],
    annotations: Sequence[dict[str, Any]],
    categories: dict[Any, str],
    folder: Path,
    root: Path,
    options: Options,
) -> Converted:
    """One line of DAT-1; the image's path is written relative to `root`."""
    result = Converted(image_id, None, not_exhaustive=bool(image.get("not_exhaustive_category_ids")))
    try:
        if image_id is None:
            raise _LeftOut("malformed: no id")
        path = _find_image(image, folder)
        width, height = _checked_size(image, path)
        objects = []
        for item in annotations:
            try:
                converted, remarks = convert_object(item, categories, width, height, options)
            except _LeftOut as reason:
                result.objects_left_out.append(str(reason))
                continue
            objects.append(converted)
            result.remarks.extend(remarks)
        if options.max_objects is not None and len(objects) > options.max_objects:
            raise _LeftOut(f"more than {options.max_objects} objects")
        if options.skip_empty and not objects:
            raise _LeftOut("no objects")
    except _LeftOut as reason:
        return Converted(image_id, None, str(reason))
    shown = os.path.relpath(path.absolute(), root.absolute())
    result.row = {"id": str(image_id), "images": [shown], "width": width, "height": height, "objects": objects}
    return result


def _find_image(image: dict[str, Any], folder: Path) -> Path:
    """`file_name` below the folder; for LVIS, which has none, `coco_url`'s last one or two names."""
    name, url = image.get("file_name"), image.get("coco_url")
    if isinstance(name, str) and name:
        candidates = [name]
    elif isinstance(url, str) and url:
        parts = url.split("/")
        candidates = ["/".join(parts[-2:]), parts[-1]]
    else:
        raise _LeftOut("malformed: neither file_name nor coco_url")
    for candidate in candidates:
        if (folder / candidate).is_file():
            return folder / candidate
    raise _LeftOut("no such image file")


def _checked_size(image: dict[str, Any], path: Path) -> tuple[int, int]:
    """(width, height) of the image file, which must be the one that the annotations were made on."""
    try:
        height, width = image_size(path)
    except OSError:
        raise _LeftOut("image file cannot be read") from None
    given = image.get("width"), image.get("height")
    if given not in ((width, height), (None, None)):
        raise _LeftOut("the image file has another size than the annotations say (turned by EXIF, or resized?)")
    return width, height


# ---- the whole file ------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What was written, and what was not, by reason with the first case."""

    images: dict[str, int] = field(default_factory=dict)  # by output file
    objects: dict[str, int] = field(default_factory=lambda: {"bbox_2d": 0, "poly": 0})
    num_empty: int = 0
    num_not_exhaustive: int = 0
    reasons: dict[tuple[str, str], tuple[int, Any]] = field(default_factory=dict)

    def note(self, what: str, reason: str, image_id: int | str | None, times: int = 1) -> None:
        if times:
            count, first = self.reasons.get((what, reason), (0, image_id))
            self.reasons[what, reason] = count + times, first

    def count(self, what: str, reason: str) -> int:
        return self.reasons.get((what, reason), (0, None))[0]

    def text(self) -> str:
        lines = [f"{name}: {count} images" for name, count in self.images.items()]
        lines.append(f"objects: {self.objects['bbox_2d']} boxes, {self.objects['poly']} outlines")
        lines.append(f"images without objects: {self.num_empty}")
        if self.num_not_exhaustive:
            lines.append(f"images not exhaustively annotated for some category (LVIS): {self.num_not_exhaustive}")
        for what in ("images left out", "objects left out", "objects changed"):
            found = [(reason, entry) for (kind, reason), entry in self.reasons.items() if kind == what]
            for reason, (count, first) in sorted(found, key=lambda item: -item[1][0]):
                lines.append(f"{what}: {reason}: {count}" + ("" if first is None else f" (first: image {first})"))
        return "\n".join(lines)


def convert(
    annotations: str | os.PathLike,
    images: str | os.PathLike,
    output: str | os.PathLike,
    options: Options = Options(),
    splits: dict[str, float] | None = None,
    seed: int = 0,
    root: str | os.PathLike | None = None,
) -> Report:
    """Convert a whole file; outputs appear complete or not at all. See the module's text.

    Args:
        splits: share of each split, at most 1 in sum; None: one output.
        root: folder that image paths are relative to; by default that of the output.

    Raises:
        ValueError, OSError: with what to do.
    """
    output, folder = Path(output), Path(images)
    if not folder.is_dir():
        raise ValueError(f"--images {folder}: no such folder")
    targets = {name: output.with_name(f"{output.stem}_{name}{output.suffix}") for name in splits} if splits else {}
    targets = targets or {"": output}
    root = output.parent if root is None else Path(root)
    report = Report({str(target): 0 for target in targets.values()})
    with CocoFile(annotations, outlines=options.geometry == "poly") as coco, ExitStack() as stack:
        _check_chosen(options.categories, coco)
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished = {name: target.with_name(target.name + ".partial") for name, target in targets.items()}
        for path in unfinished.values():
            stack.callback(path.unlink, missing_ok=True)
        files = {name: stack.enter_context(path.open("w", encoding="utf-8")) for name, path in unfinished.items()}

        def work(item: tuple[int | str | None, str, list[str]]) -> Converted:
            image, found = json.loads(item[1]), list(map(json.loads, item[2]))
            return convert_image(item[0], image, found, coco.categories, folder, root, options)

        # Threads, because most of the time goes into opening image headers, often on a network disk.
        for converted in map_ahead(work, _chosen(coco.images(), splits, seed, report), max_ahead=32):
            split = split_of(converted.image_id, splits, seed)
            _count(report, converted, str(targets[split]))
            if converted.row is not None:
                files[split].write(json.dumps(converted.row, ensure_ascii=False) + "\n")
            if sum(report.images.values()) == options.limit:
                break
        else:
            report.note("objects left out", "their image is not in the file's list", None, coco.num_strays())
            report.note("images left out", "id listed before", None, coco.num_repeated)
        if not any(report.images.values()):
            raise ValueError(f"{annotations}: no image is left to write\n{report.text()}")
        for file in files.values():
            file.close()
        for name, path in unfinished.items():
            os.replace(path, targets[name])
    return report


def _chosen(
    images: Iterable[tuple[Any, ...]], splits: dict[str, float] | None, seed: int, report: Report
) -> Iterator[tuple[Any, ...]]:
    for image in images:
        if split_of(image[0], splits, seed) is None:
            report.note("images left out", "in no split", image[0])
        else:
            yield image


def _count(report: Report, converted: Converted, target: str) -> None:
    if converted.row is None:
        report.note("images left out", converted.left_out, converted.image_id)
        return
    report.images[target] += 1
    report.num_empty += not converted.row["objects"]
    report.num_not_exhaustive += converted.not_exhaustive
    for item in converted.row["objects"]:
        report.objects["poly" if "poly" in item else "bbox_2d"] += 1
    for reason in converted.objects_left_out:
        report.note("objects left out", reason, converted.image_id)
    for remark in converted.remarks:
        report.note("objects changed", remark, converted.image_id)


def split_of(image_id: int | str, splits: dict[str, float] | None, seed: int) -> str | None:
    """The split an image belongs to, by a hash of its id: the same in every file that holds it. "" without splits.

    None where the shares leave a rest and the image falls into it.
    """
    if splits is None:
        return ""
    at = int.from_bytes(hashlib.sha256(f"{seed}:{image_id}".encode()).digest()[:8]) / 2**64
    for name, share in splits.items():
        if at < share:
            return name
        at -= share
    return None


def parse_splits(text: str) -> dict[str, float]:
    """`train=0.9,val=0.1`."""
    entries = [part.split("=") for part in text.split(",")]
    try:
        splits = {name.strip(): float(share) for name, share in entries}
    except ValueError:
        raise ValueError(f"--splits {text}: must look like train=0.9,val=0.1") from None
    if len(splits) < len(entries) or not all(re.fullmatch(r"[\w-]+", name) for name in splits):
        raise ValueError(f"--splits {text}: names must differ and consist of letters, digits, _ and -")
    if not all(share > 0 for share in splits.values()) or sum(splits.values()) > 1 + 1e-9:
        raise ValueError(f"--splits {text}: shares must be above 0 and at most 1 in sum")
    return splits


def _check_chosen(chosen: frozenset[str] | None, coco: CocoFile) -> None:
    names = set(coco.categories.values())
    for name in sorted((chosen or frozenset()) - names):
        near = difflib.get_close_matches(name, names, n=3) or sorted(names)[:10]
        raise ValueError(f"--categories: {coco.path} has no {name!r}; did you mean one of {', '.join(near)}?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--annotations", required=True, metavar="FILE", help="COCO or LVIS JSON file")
    add("--images", required=True, metavar="DIR", help="folder that file_name (LVIS: coco_url's end) is looked up in")
    add(
        "--output",
        required=True,
        metavar="FILE",
        help="JSONL file; with --splits FILE_NAME.jsonl becomes FILE_SPLIT.jsonl",
    )
    add("--root", metavar="DIR", help="write image paths relative to this folder (default: the output's)")
    add("--geometry", choices=["box", "poly"], default="box", help="write boxes, or outlines (see above)")
    add("--crowd", choices=["skip", "keep"], default="skip", help="annotations with iscrowd (default: skip)")
    add("--categories", metavar="A,B", help="only objects of these categories, by name")
    add("--min-size", type=float, default=0.0, metavar="PX", help="leave out objects whose shorter side is less")
    add("--max-objects", type=int, metavar="N", help="leave out images with more objects than this")
    add("--skip-empty", action="store_true", help="leave out images on which no object remains")
    add("--main-part", type=float, default=0.9, metavar="SHARE", help="see above; 0 always writes the largest part")
    add("--simplify", type=float, metavar="PX", help="drop outline points nearer than this to the line without them")
    add("--limit", type=int, metavar="N", help="stop after this many images, over all splits")
    add("--splits", metavar="NAME=SHARE,...", help="e.g. train=0.9,val=0.1; disjoint, by a hash of the image's id")
    add("--seed", type=int, default=0, help="of the splits")
    args = parser.parse_args()
    choices = dict(
        geometry=args.geometry,
        keep_crowd=args.crowd == "keep",
        categories=frozenset(name.strip() for name in args.categories.split(",")) if args.categories else None,
        min_size=args.min_size,
        max_objects=args.max_objects,
        skip_empty=args.skip_empty,
        main_part=args.main_part,
        simplify=args.simplify,
        limit=args.limit,
    )
    try:
        options = Options(**choices)
        splits = parse_splits(args.splits) if args.splits else None
        report = convert(args.annotations, args.images, args.output, options, splits, args.seed, args.root)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    print(report.text())


if __name__ == "__main__":
    main()
