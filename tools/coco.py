"""Read COCO and LVIS annotation files, and convert one annotation to an object of the training format.

`tools.convert` writes whole files with it; its docstring says how outlines are treated.
"""

import json
import math
import os
import sqlite3
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ijson
import numpy as np
import shapely
from faster_coco_eval.core import mask as rle_masks

from utils.data.samples import SPECIAL_TOKEN, SURROGATE, other_encoding

# A mask's outline is a staircase; unless the object is only a few pixels large, its steps carry no information.
MASK_SIMPLIFY_PX, MASK_SIMPLIFY_SHARE = 1.0, 0.05
_IMAGE_KEYS = ("file_name", "coco_url", "width", "height", "neg_category_ids", "not_exhaustive_category_ids")
_OBJECT_KEYS = ("category_id", "bbox", "iscrowd", "segmentation")
CLIPPED = "clipped to the image"
AMBIGUOUS = "its id stands for several images"
SHARED = "its image file has several entries, each of which may list a part of the objects; merge them into one"


@dataclass(frozen=True)
class Options:
    """How to convert annotations to objects; sizes in pixels."""

    geometry: str = "box"
    keep_crowd: bool = False
    categories: frozenset[str] | None = None
    min_size: float = 0.0
    max_objects: int | None = None
    skip_empty: bool = False
    main_part: float = 0.9
    simplify: float | None = None
    limit: int | None = None
    exif: str | None = None

    def __post_init__(self) -> None:
        if self.min_size < 0 or (self.simplify or 0) < 0 or not 0 <= self.main_part <= 1:
            raise ValueError("--min-size and --simplify must not be negative, --main-part must be in 0..1")
        if self.limit is not None and self.limit < 1 or self.max_objects is not None and self.max_objects < 1:
            raise ValueError("--limit and --max-objects must be at least 1")


class LeftOut(Exception):
    """An image or an object is not written; the message is the reason."""


# ---- reading the file ----------------------------------------------------------------------------------------------


def coco_items(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """Stream one of the lists of an annotation file. Raises ValueError where it is none of objects, or not JSON."""
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty")
    with path.open("rb") as file:
        start = file.read(len(BOM_UTF8))
        if hint := other_encoding(start):
            raise ValueError(f"{path}: not UTF-8{hint}")
        file.seek(len(BOM_UTF8) if start == BOM_UTF8 else 0)
        try:
            for item in ijson.items(file, f"{name}.item", use_float=True):
                if not isinstance(item, dict):
                    raise ValueError(f"{path}: {name}: must be a list of objects, contains {item!r:.40}")
                yield item
        except (ijson.JSONError, UnicodeDecodeError) as error:
            if "integer overflow" in str(error):
                rule = "an integer of more than 64 bits; write it, and what refers to it, as text"
                raise ValueError(f"{path}: {rule}: {error}") from None
            raise ValueError(f"{path}: not valid JSON: {' '.join(str(error).split())}") from None


def no_coco_file(path: Path) -> str:
    return f'{path}: not a COCO file: {{"images": [...], "annotations": [...], "categories": [...]}}'


class CocoFile:
    """An annotation file, its annotations grouped by image on disk. A context manager.

    Args:
        outlines: keep every outline; otherwise only those of objects without a box.

    Attributes:
        categories: name of each category id.
        repeated: number of images that repeat an earlier id, by the reason to leave them out.

    Raises:
        ValueError: not JSON, not a COCO file, or one whose category ids stand for several names.
    """

    def __init__(self, path: str | os.PathLike, outlines: bool) -> None:
        self.path = Path(path)
        self.outlines = outlines
        self._db = sqlite3.connect("")  # an unnamed file, deleted when the connection closes
        self._fill()

    def __enter__(self) -> "CocoFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._db.close()

    def _fill(self) -> None:
        self.categories: dict[int | str | None, str] = {}
        for item in coco_items(self.path, "categories"):
            number, name = valid_id(item.get("id")), self._name(item)
            if (other := self.categories.setdefault(number, name)) != name:
                rule = f"id {number!r} is both {other!r} and {name!r}; give each category an id of its own"
                raise ValueError(f"{self.path}: categories: {rule}")
        db = self._db
        db.execute("PRAGMA journal_mode = OFF")
        db.execute("CREATE TABLE images (id UNIQUE, item)")
        db.execute("CREATE TABLE files (file, id)")
        db.execute("CREATE TABLE annotations (image, item)")
        images = _rows(coco_items(self.path, "images"), "id", _IMAGE_KEYS)
        num_images, self.repeated = 0, Counter[str]()
        for image_id, image in images:
            db.execute("INSERT INTO files VALUES (?, ?)", (_file_of(image), image_id))
            if db.execute("INSERT OR IGNORE INTO images VALUES (?, ?)", (image_id, image)).rowcount:
                num_images += 1
                continue
            (first,) = db.execute("SELECT item FROM images WHERE id = ?", (image_id,)).fetchone()
            is_same = _file_of(first) == _file_of(image)
            self.repeated["id listed before" if is_same else AMBIGUOUS] += 1
            if not is_same:  # nothing says which annotations are whose
                db.execute("UPDATE images SET item = ? WHERE id = ?", (json.dumps({"unusable": AMBIGUOUS}), image_id))
        db.execute(  # NULL, for no file or no id, is never IN
            "UPDATE images SET item = ? WHERE id IN (SELECT id FROM files WHERE file IN "
            "(SELECT file FROM files GROUP BY file HAVING count(DISTINCT id) > 1))",
            (json.dumps({"unusable": SHARED}),),
        )
        if not num_images:
            raise ValueError(no_coco_file(self.path))
        annotations = _rows(self._objects(), "image_id", _OBJECT_KEYS)
        db.executemany("INSERT INTO annotations VALUES (?, ?)", annotations)
        db.execute("CREATE INDEX by_image ON annotations (image)")

    def _objects(self) -> Iterator[dict[str, Any]]:
        for item in coco_items(self.path, "annotations"):
            if not self.outlines and item.get("bbox") is not None:
                item.pop("segmentation", None)
            yield item

    def _name(self, category: dict[str, Any]) -> str:
        name = category.get("name")
        if not isinstance(name, str) or not name.strip() or SPECIAL_TOKEN.search(name) or SURROGATE.search(name):
            rule = "is no name, or spells a special token of a model; rename it"
            raise ValueError(f"{self.path}: categories: {name!r} cannot be an object's description: it {rule}")
        return name.strip()

    def num_strays(self) -> int:
        """Number of annotations whose image the file does not list."""
        # A constant, so nothing can be injected.
        known = "EXISTS (SELECT 1 FROM images WHERE images.id = annotations.image)"
        return self._db.execute(f"SELECT count(*) FROM annotations WHERE NOT {known}").fetchone()[0]  # noqa: S608

    def images(self) -> Iterator[tuple[int | str | None, str, list[str]]]:
        """Yield (id, image, its annotations) in file order, the latter two as JSON, which is compact in a queue."""
        query = "SELECT item FROM annotations WHERE image = ? ORDER BY rowid"
        for image_id, item in self._db.execute("SELECT id, item FROM images ORDER BY rowid"):
            yield image_id, item, [row[0] for row in self._db.execute(query, (image_id,))]


def valid_id(value: Any) -> int | str | None:
    """Return an id that fits the database and a dictionary, 7.0 as 7; None for a value that is no id."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    fits = isinstance(value, str) or isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return value if fits else None


def _file_of(image: str) -> str | None:
    """The name of an image's file, spelt in one way, as JSON: what is no text does not fit the database."""
    fields = json.loads(image)
    name = fields.get("file_name") or fields.get("coco_url")
    return json.dumps(os.path.normpath(name) if isinstance(name, str) else name) if name else None


def _rows(items: Iterable[dict[str, Any]], id_name: str, keys: Sequence[str]) -> Iterator[tuple[int | str | None, str]]:
    for item in items:
        yield valid_id(item.get(id_name)), json.dumps({key: item[key] for key in keys if key in item})


# ---- one object ----------------------------------------------------------------------------------------------------


def convert_object(
    item: dict[str, Any], categories: dict[Any, str], width: int, height: int, options: Options
) -> tuple[dict[str, Any], list[str]]:
    """Convert an annotation to an object of the JSONL format (DAT-1), with remarks on how its shape was changed.

    Raises:
        LeftOut: the object is not to be written.
    """
    name = categories.get(valid_id(item.get("category_id")))
    if name is None:
        raise LeftOut("category not in the file's list")
    if options.categories is not None and name not in options.categories:
        raise LeftOut("category not chosen")
    if item.get("iscrowd") and not options.keep_crowd:
        raise LeftOut("crowd")
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
        raise LeftOut(f"smaller than {options.min_size:g} px")
    return {"desc": name, "bbox_2d" if ring is None else "poly": coords}, remarks


def _clipped_box(bbox: Any, shape: shapely.Geometry | None, width: int, height: int, remarks: list[str]) -> list[float]:
    """Return COCO's [x, y, width, height], or else the box around the outline, as [x1, y1, x2, y2]."""
    if bbox is None and shape is not None:
        x1, y1, x2, y2 = shape.bounds
    elif _is_numbers(bbox, 4):
        x1, y1, x2, y2 = bbox[0], bbox[1], bbox[0] + bbox[2], bbox[1] + bbox[3]
        if bbox[2] < 0 or bbox[3] < 0:
            raise LeftOut("malformed: negative size")
    else:
        raise LeftOut("malformed: no usable bbox" if bbox is not None else "neither bbox nor outline")
    if x2 <= x1 or y2 <= y1:
        raise LeftOut("degenerate: no area")
    inside = [max(x1, 0), max(y1, 0), min(x2, width), min(y2, height)]
    if inside[2] <= inside[0] or inside[3] <= inside[1]:
        raise LeftOut("outside the image")
    coords = [_rounded(value) for value in inside]
    if coords[2] <= coords[0] or coords[3] <= coords[1]:
        raise LeftOut("degenerate: no area")
    if inside != [x1, y1, x2, y2]:
        remarks.append(CLIPPED)
    return coords


def _ring(
    shape: shapely.Geometry | None,
    item: dict[str, Any],
    width: int,
    height: int,
    options: Options,
    remarks: list[str],
) -> list[float] | None:
    """Return the outline to write as [x1, y1, ...]; None if the box is to be written."""
    if shape is None:
        remarks.append("box instead of outline: no ring or mask with an area")
        return None
    drawn = item["segmentation"]
    if isinstance(drawn, list) and len(drawn) == 1 and shapely.box(0, 0, width, height).covers(shape):
        part = shapely.Polygon(np.reshape(drawn[0], (-1, 2)))
    else:
        inside = _parts(shapely.intersection(shape, shapely.box(0, 0, width, height)))
        if not inside:
            raise LeftOut("outside the image")
        if shapely.area(inside).sum() < shape.area * (1 - 1e-9):
            remarks.append(CLIPPED)
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
    return [_rounded(value) for value in points.reshape(-1).tolist()]


def _shape(segmentation: Any, width: int, height: int) -> shapely.Geometry | None:
    """Convert rings or a run-length mask to one valid geometry in pixels; None if it has no area.

    Raises:
        LeftOut: malformed.
    """
    if isinstance(segmentation, dict):
        shape = _mask_shape(segmentation, width, height)
    elif isinstance(segmentation, list):
        if not all(_is_numbers(ring) and len(ring) % 2 == 0 for ring in segmentation):
            raise LeftOut("malformed: segmentation")
        rings = [shapely.Polygon(np.reshape(ring, (-1, 2))) for ring in segmentation if len(ring) >= 6]
        shape = shapely.union_all([shapely.make_valid(r, method="structure", keep_collapsed=False) for r in rings])
    elif segmentation is None:
        return None
    else:
        raise LeftOut("malformed: segmentation")
    return shape if shape.area > 0 else None


def _mask_shape(rle: dict[str, Any], width: int, height: int) -> shapely.Geometry:
    """Return the area of a mask's pixels; pixel (column, row) covers [column, column + 1] x [row, row + 1]."""
    try:
        if [int(side) for side in rle["size"]] != [height, width]:
            raise LeftOut("malformed: the mask's size differs from the image's")
        packed = rle_masks.frPyObjects(rle, height, width) if isinstance(rle["counts"], list) else rle
        mask = rle_masks.decode(packed)
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise LeftOut("malformed: segmentation") from None
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


def _rounded(value: float) -> float | int:
    """Round to two decimals, as in COCO's own files; whole numbers lose their `.0`."""
    rounded = round(float(value), 2)
    return int(rounded) if rounded.is_integer() else rounded
