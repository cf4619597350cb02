"""Convert annotations of the field's formats to the JSONL that training reads (DAT-1), one line per image.

    python -m tools.convert --from coco --annotations instances.json --images train2017 --output data/coco.jsonl
    ... --geometry poly --splits train=0.95,val=0.05      (writes data/coco_train.jsonl and data/coco_val.jsonl)
    python -m tools.convert --from voc --annotations Annotations --images JPEGImages --output data/voc.jsonl
    python -m tools.convert --from yolo --annotations labels/train --images images/train --output data/yolo.jsonl
    python -m tools.convert --from swift --annotations grounding.jsonl --images . --output data/swift.jsonl
    python -m tools.convert --from sharegpt --unit 1000 --annotations chats.json --images . --output data/chats.jsonl
    python -m tools.convert --from rex-omni --annotations annotations.json --images images --output data/rex.jsonl

A COCO or LVIS file is streamed, and its annotations are grouped by image in a temporary database on disk (in TMPDIR,
about as large as the file), so memory use does not depend on its size. Images keep the order of the file, objects that
of the annotations. Everything left out or changed is counted by reason and reported at the end, with the first case of
each. Where an object was left out that the image shows, such as a crowd, the line gets `annotated` (TGT-12): all
categories but that object's (of a conversation, those of its objects). So does that of a COCO image with
`not_exhaustive_category_ids`: all categories but these.

Outlines (`--geometry poly`): an object drawn as one ring keeps its points. Several rings, a ring that extends beyond
the image, and run-length masks (compressed or not) are first united and clipped to the image. The largest part is
written if it has at least `--main-part` of the area, otherwise the object's box. Holes are filled. The outline of a
mask follows its pixels' edges and is simplified by at most a pixel.

Images whose EXIF data say that they are shown turned or mirrored: training shows them so. `--exif shown` takes boxes as
drawn on what is shown, `--exif stored` as drawn on the stored pixels and turns them. Without it, such images are left
out, unless the annotations give a size that only one of the two has.

LVIS annotates some categories of an image only. Its lines therefore get `annotated`: the categories of their objects
and those known to be absent, without the not exhaustively annotated ones and those of which an object was left out.

A conversation (swift, sharegpt) keeps its question as the line's `messages`. One with several questions becomes a line
for each. An answer that spells no box, or some that cannot be read, is left out.
"""

import argparse
import difflib
import hashlib
import itertools
import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from PIL import Image

from tools.coco import CLIPPED, CocoFile, LeftOut, Options, convert_object, valid_id
from tools.formats import NO_LABELS, READERS, SEVERAL_LINES_PER_IMAGE, Annotations
from tools.image_list import ImageList
from utils.config.load import exit_with
from utils.data.images import EXIF_ORIENTATION, FORMATS, image_size
from utils.data.samples import SURROGATE, map_ahead
from utils.geometry import normal_label

UNLISTED = "category not in the file's list"  # of an object, as `convert_object` says
INCOMPLETE = "an object's category is not in the file's list"
NO_LABEL = "an object has no label, or one that spells a special token"
NOT_EXHAUSTIVE, NEGATIVE = "not_exhaustive_category_ids", "neg_category_ids"
NOT_LVIS = f"no {NEGATIVE}, which LVIS has for every image; --from coco if all categories are annotated"
UNKNOWN_GAP = f"{NOT_EXHAUSTIVE} has one that is not in the file's list"
MISSING = "no such image file"
NOT_CHOSEN = "not in the list (--only)"
UNKNOWN = "in the list (--only), but not in the annotations"
MAX_CORNERS = 0.1  # of the objects, without a hint
CORNERS = (
    "many boxes reach beyond their images, but would not as [x1, y1, x2, y2]; COCO's are [x, y, width, height]: "
    "look at them, or correct the file"
)
STRAY = "their image is not in the file's list"
# Why the image shows no such object, or none that the user wants; all other reasons leave a gap in the annotation.
NO_GAP = ("category not chosen", "degenerate", "outside the image", "smaller than", "listed twice")

# ---- one image -----------------------------------------------------------------------------------------------------


@dataclass
class Converted:
    """Result for one image: its line (None: left out), reasons and remarks, including those of its objects."""

    image_id: int | str | None
    row: dict[str, Any] | None
    left_out: str | None = None
    objects_left_out: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    num_corners: int = 0  # boxes beyond the image that would lie in it as [x1, y1, x2, y2]
    not_exhaustive: bool = False


def convert_image(
    image_id: int | str | None,
    image: dict[str, Any],
    annotations: Sequence[dict[str, Any]],
    categories: dict[Any, str],
    folder: Path,
    root: Path,
    options: Options,
    complete_for: frozenset[str],
) -> Converted:
    """Convert an image with its annotations to one line (DAT-1); its path is written relative to `root`.

    `complete_for`: names for which the annotation is complete, besides those of the image's objects.
    """
    result = Converted(image_id, None, not_exhaustive=bool(image.get(NOT_EXHAUSTIVE)))
    try:
        if image_id is None:
            raise LeftOut("malformed: no id")
        if "unusable" in image:
            raise LeftOut(image["unusable"])
        path = find_image(image, folder)
        width, height, orientation = _checked_size(image, path, options.exif)
        stored = (height, width) if orientation >= 5 else (width, height)
        objects, left_out = _convert_objects(annotations, categories, stored, orientation, options, result)
        if UNLISTED in result.objects_left_out and NEGATIVE not in image:
            # Its line would call the rest complete; LVIS's says what is annotated.
            raise LeftOut(INCOMPLETE if complete_for else NO_LABEL)
        annotated = _annotated(image, objects, left_out, categories, complete_for)
        if options.max_objects is not None and len(objects) > options.max_objects:
            raise LeftOut(f"more than {options.max_objects} objects")
        if options.skip_empty and not objects:
            raise LeftOut("no objects")
        shown = relative_path(path, root)
        if SURROGATE.search(shown):
            raise LeftOut("the name of its file or folder is not UTF-8; rename it")
        if SURROGATE.search(json.dumps(image.get("messages"), ensure_ascii=False)):
            raise LeftOut("its question is not UTF-8: it holds half of a surrogate pair")
    except LeftOut as reason:
        return Converted(image_id, None, str(reason))
    if "remark" in image:
        result.remarks.append(image["remark"])
    result.row = {"id": str(image_id), "images": [shown], "width": width, "height": height, "objects": objects}
    if "messages" in image:
        result.row["messages"] = image["messages"]
    if annotated is not None:
        result.row["annotated"] = annotated
    return result


def _convert_objects(
    annotations: Sequence[dict[str, Any]],
    categories: dict[Any, str],
    stored: tuple[int, int],
    orientation: int,
    options: Options,
    result: Converted,
) -> tuple[list[dict[str, Any]], list[tuple[int | str | None, str]]]:
    """Return an image's objects, and those left out: their category's id and the reason. `result` gets the rest."""
    objects, left_out = list[dict[str, Any]](), list[tuple[int | str | None, str]]()
    for item in annotations:
        try:
            converted, remarks = convert_object(_in_pixels(item, *stored), categories, *stored, options)
        except LeftOut as reason:
            left_out.append((valid_id(item.get("category_id")), str(reason)))
            result.objects_left_out.append(str(reason))
            continue
        if (found := turned(converted, orientation, *stored)) in objects:
            result.objects_left_out.append("listed twice: same label, same place")
            continue
        objects.append(found)
        result.remarks.extend(remarks)
        result.num_corners += CLIPPED in remarks and _fits_as_corners(item.get("bbox"), *stored)
    return objects, left_out


def _annotated(
    image: dict[str, Any],
    objects: Sequence[dict[str, Any]],
    left_out: Sequence[tuple[int | str | None, str]],
    categories: dict[Any, str],
    complete_for: frozenset[str],
) -> list[str] | None:
    """Return the labels for which a line is complete (TGT-12); None: for all of its file. Raises LeftOut where the
    image's lists of categories do not say it."""
    not_exhaustive, known = _category_ids(image, NOT_EXHAUSTIVE), {item["desc"] for item in objects}
    if NEGATIVE in image:
        known |= {categories[category] for category in _category_ids(image, NEGATIVE) & categories.keys()}
        incomplete = not_exhaustive.union(category for category, _ in left_out)
        return _without(known, map(categories.get, incomplete))
    if not_exhaustive - categories.keys():
        raise LeftOut(UNKNOWN_GAP)
    known |= complete_for
    gaps = {categories.get(category) for category, reason in left_out if not reason.startswith(NO_GAP)}
    gaps |= known & {categories[category] for category in not_exhaustive}  # of a category not chosen: no gap
    return _without(known, gaps) if gaps else None


def _without(names: Collection[str], left_out: Iterable[str | None]) -> list[str]:
    """Names that are none of `left_out`, as training compares labels: a gap in "Person" is one in "person", too."""
    gaps = {normal_label(name) for name in left_out if name is not None}
    return sorted(name for name in names if normal_label(name) not in gaps)


def _category_ids(image: dict[str, Any], key: str) -> set[int | str]:
    """Return the ids of one of LVIS's lists, none where the image lacks it."""
    ids = image.get(key) or []
    if not isinstance(ids, list) or not all(isinstance(own, (int, str)) for own in ids):
        raise LeftOut(f"malformed: {key} is not a list of category ids")
    return set(ids)


def relative_path(path: str | os.PathLike, folder: Path) -> str:
    """Return the path as a line of a data file in this folder names it."""
    shown = os.path.relpath(path, folder)
    if os.path.realpath(folder / shown) == os.path.realpath(path):
        return shown
    return os.path.relpath(path, folder.resolve())  # ".." leads out of what a link points to, not out of the link


def find_image(image: dict[str, Any], folder: Path) -> Path:
    """Find `file_name` below the folder; for LVIS, which has none, the last one or two names of `coco_url`."""
    name, url = image.get("file_name"), image.get("coco_url")
    if isinstance(name, str) and name:
        candidates = [name]
    elif isinstance(url, str) and url:
        parts = url.split("/")
        candidates = ["/".join(parts[-2:]), parts[-1]]
    else:
        raise LeftOut("malformed: neither file_name nor coco_url")
    try:
        for candidate in candidates:
            if (folder / candidate).is_file():
                return folder / candidate
    except OSError as error:  # a name too long, a folder that may not be read
        raise LeftOut(f"image file cannot be read: {error.strerror}") from None
    raise LeftOut(MISSING)


def _checked_size(image: dict[str, Any], path: Path, exif: str | None) -> tuple[int, int, int]:
    """Return (width, height) of the image as training shows it, and the EXIF orientation by which to turn its objects.

    The size given in the annotation file must be that of the image as stored or as shown.
    """
    try:
        height, width = image_size(path)
        with Image.open(path, formats=FORMATS) as opened:
            orientation = opened.getexif().get(EXIF_ORIENTATION, 1)
    except OSError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise LeftOut(f"image file cannot be read: {reason}") from None
    stored = (height, width) if orientation in range(5, 9) else (width, height)
    given = image.get("width"), image.get("height")
    if given not in ((width, height), stored, (None, None)):
        raise LeftOut("the image file's size differs from the annotations'")
    if orientation not in range(2, 9):
        return width, height, 1
    if exif is None and (width, height) != stored and given != (None, None):
        exif = "stored" if given == stored else "shown"
    if exif is None:
        raise LeftOut("EXIF turns it, and nothing says whether its boxes are turned: --exif shown or --exif stored")
    return width, height, orientation if exif == "stored" else 1


def _in_pixels(item: dict[str, Any], width: int, height: int) -> dict[str, Any]:
    """Return an annotation in pixels whose numbers are parts of `unit` of the image's sides. Raises LeftOut for numbers
    that are none, most likely pixels."""
    unit, rings = item.get("unit"), item.get("segmentation")
    if not unit:
        return item
    numbers = itertools.chain(*(own for own in (item.get("bbox"), *(rings or [])) if isinstance(own, list)))
    if any(abs(number) > 2 * unit for number in numbers if isinstance(number, int | float)):
        raise LeftOut(f"malformed: not in parts of {unit}; in pixels?")

    def scaled(numbers: Any) -> Any:
        sides = itertools.cycle((width, height))
        return (
            [x * side / unit for x, side in zip(numbers, sides, strict=False)] if isinstance(numbers, list) else numbers
        )

    return item | {"bbox": scaled(item.get("bbox")), "segmentation": rings and [scaled(ring) for ring in rings]}


def _fits_as_corners(bbox: Any, width: int, height: int) -> bool:
    """Whether a box, or None, lies inside the image when its numbers are read as [x1, y1, x2, y2]."""
    return bbox is not None and 0 <= bbox[0] < bbox[2] <= width and 0 <= bbox[1] < bbox[3] <= height


def turned(item: dict[str, Any], orientation: int, width: int, height: int) -> dict[str, Any]:
    """Return an object of a stored image of this size as it lies in the shown one."""
    if orientation == 1:
        return item
    kind = "poly" if "poly" in item else "bbox_2d"
    xs, ys = item[kind][0::2], item[kind][1::2]
    if orientation in (2, 3, 7, 8):
        xs = [width - x for x in xs]
    if orientation in (3, 4, 6, 7):
        ys = [height - y for y in ys]
    if orientation >= 5:
        xs, ys = ys, xs
    if kind == "bbox_2d":
        xs, ys = sorted(xs), sorted(ys)
    return item | {kind: [value for point in zip(xs, ys, strict=True) for value in point]}


# ---- the whole file ------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """Counts of what was written, and of what was not, by reason with the first case."""

    images: dict[str, int] = field(default_factory=dict)  # by output file
    objects: dict[str, int] = field(default_factory=lambda: {"bbox_2d": 0, "poly": 0})
    num_empty: int = 0
    num_not_exhaustive: int = 0
    num_corners: int = 0
    reasons: dict[tuple[str, str], tuple[int, Any]] = field(default_factory=dict)

    def note(self, what: str, reason: str, image_id: int | str | None, times: int = 1) -> None:
        if times:
            count, first = self.reasons.get((what, reason), (0, image_id))
            self.reasons[what, reason] = count + times, first

    def count(self, what: str, reason: str) -> int:
        return self.reasons.get((what, reason), (0, None))[0]

    def why_empty(self, kind: str, categories: Mapping[Any, str]) -> str:
        """What to say where no object is left; `text` has the counts."""
        num_images, why = sum(self.images.values()), ""
        if kind in ("coco", "lvis") and not categories:
            why = "; its list of categories is empty"
        elif kind in ("coco", "lvis") and {reason for _, reason in self.reasons} & {STRAY, INCOMPLETE}:
            why = '; compare the ids in the file: the text "7" is not the number 7'
        elif num_images and not any(what == "objects left out" for what, _ in self.reasons):
            why = f": none of the {num_images} images has an annotation"
        return f"no {'object' if num_images else 'image'} is left to write{why}"

    def text(self) -> str:
        lines = [f"{name}: {count} images" for name, count in self.images.items()]
        lines.append(f"objects: {self.objects['bbox_2d']} boxes, {self.objects['poly']} outlines")
        lines.append(f"images without objects: {self.num_empty}")
        if self.num_not_exhaustive:
            lines.append(f"images not exhaustively annotated for some category: {self.num_not_exhaustive}")
        for what in ("images", "images left out", "objects left out", "objects changed"):
            found = [(reason, entry) for (kind, reason), entry in self.reasons.items() if kind == what]
            for reason, (count, first) in sorted(found, key=lambda item: -item[1][0]):
                lines.append(f"{what}: {reason}: {count}" + ("" if first is None else f" (first: image {first})"))
        if self.num_corners > MAX_CORNERS * sum(self.objects.values()):
            lines.append(CORNERS)
        return "\n".join(lines)


def convert(
    annotations: str | os.PathLike,
    images: str | os.PathLike,
    output: str | os.PathLike,
    options: Options | None = None,
    *,
    splits: dict[str, float] | None = None,
    seed: int = 0,
    root: str | os.PathLike | None = None,
    kind: str = "coco",
    names: str | os.PathLike | None = None,
    unit: int | None = None,
    only: str | os.PathLike | None = None,
) -> Report:
    """Convert a whole file; outputs appear complete or not at all.

    Args:
        kind: `coco`, `lvis` (each image has `neg_category_ids`) or a key of `tools.formats.READERS`, whose class
            explains `names` and `unit`.
        splits: share of each split, adding up to at most 1; None: one output.
        root: folder that image paths are relative to (default: that of the output).
        only: file that lists the images to convert; None: all.

    Raises:
        ValueError, OSError: an argument or a file cannot be used, or no object is left to write.
    """
    output, folder, options = Path(output), Path(images), options or Options()
    if not folder.is_dir():
        raise ValueError(f"--images {folder}: no such folder")
    if output.is_dir():
        raise ValueError(f"--output {output}: is a folder; name a file in it")
    targets = {name: output.with_name(f"{output.stem}_{name}{output.suffix}") for name in splits} if splits else {}
    targets = targets or {"": output}
    check_not_inputs(targets.values(), {"--annotations": annotations, "--names": names, "--only": only})
    if unit is not None and (kind != "sharegpt" or unit < 0):
        rule = "is for --from sharegpt, and not negative; the other formats say what their numbers are"
        raise ValueError(f"--unit {unit}: {rule}")
    listed = None if only is None else ImageList(only)
    root = output.parent if root is None else Path(root)
    report = Report({str(target): 0 for target in targets.values()})
    source: CocoFile | Annotations
    if kind in ("coco", "lvis"):
        source = CocoFile(annotations, outlines=options.geometry == "poly")
    else:
        source = Annotations(kind, Path(annotations), folder, None if names is None else Path(names), unit)
    with source as coco, _written_whole(targets) as files:
        options = replace(options, categories=_chosen(options.categories, coco))
        make_line = _line_maker(kind, coco, folder, root, options)
        # In threads, because most of the time goes into reading image headers, often from a network disk.
        chosen = _in_a_split(_in_list(coco.images(), listed, report), splits, seed, report)
        for split, converted in map_ahead(make_line, chosen, max_ahead=32):
            _count(report, converted, str(targets[split]))
            if converted.row is not None:
                files[split].write(json.dumps(converted.row, ensure_ascii=False) + "\n")
            if sum(report.images.values()) == options.limit:
                break
        else:
            report.note("objects left out", STRAY, None, coco.num_strays())
            for reason, number in coco.repeated.items():
                report.note("images left out", reason, None, number)
            report.note("images left out", UNKNOWN, None, listed.num_unknown() if listed else 0)
        if not any(report.objects.values()):
            hint = _why_none_is_found(report, kind, coco, folder)
            raise ValueError(f"{annotations}: {report.why_empty(kind, coco.categories)}{hint}\n{report.text()}")
    return report


def _line_maker(
    kind: str, coco: CocoFile | Annotations, folder: Path, root: Path, options: Options
) -> Callable[[tuple[str, int | str | None, str, list[str]]], tuple[str, Converted]]:
    """Return a function that converts one image: split, id, fields and annotations (JSON)."""
    asks = kind in SEVERAL_LINES_PER_IMAGE  # each line for names of its own
    complete_for = frozenset([] if asks else options.categories or coco.categories.values())

    def make_line(item: tuple[str, int | str | None, str, list[str]]) -> tuple[str, Converted]:
        split, image_id, image, found = item
        fields = json.loads(image)
        if kind == "lvis" and NEGATIVE not in fields:  # without it the line would count as complete
            return split, Converted(image_id, None, NOT_LVIS)
        annotated = list(map(json.loads, found))
        parts = annotated, coco.categories, folder, root, options, complete_for
        return split, convert_image(image_id, fields, *parts)

    return make_line


def _why_none_is_found(report: Report, kind: str, source: CocoFile | Annotations, folder: Path) -> str:
    """What to look at where image files are missing; else nothing."""
    missing = report.count("images left out", MISSING)
    if 0 < missing == sum(count for count, _ in report.reasons.values()):
        first = json.loads(next(source.images())[1])
        name = first.get("file_name") or first.get("coco_url")
        return f"; {name} is not below {folder}: --images is the folder that these names are relative to"
    if kind == "yolo" and missing:
        return "; label files and images have the same paths below --annotations and --images"
    return ""


@contextmanager
def _written_whole(targets: Mapping[str, Path]) -> Iterator[dict[str, TextIO]]:
    """Files to write, by the keys of `targets`; they take these places when the block ends, unless by an error."""
    with ExitStack() as stack:
        unfinished = {name: target.with_name(target.name + ".partial") for name, target in targets.items()}
        for name, path in unfinished.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise ValueError(
                    f"--output {targets[name]}: {path.parent} is below a file, or one; name another"
                ) from None
            stack.callback(path.unlink, missing_ok=True)
        files = {name: stack.enter_context(path.open("w", encoding="utf-8")) for name, path in unfinished.items()}
        yield files
        for file in files.values():
            file.close()  # all of them first: the disk may be full
        for name, path in unfinished.items():
            os.replace(path, targets[name])


def check_not_inputs(outputs: Iterable[Path], inputs: Mapping[str, str | os.PathLike | None]) -> None:
    """Raise ValueError if a file to be written is one of the inputs (by option), however both are spelt."""
    for output, (option, path) in itertools.product(outputs, inputs.items()):
        if path is not None and output.exists() and os.path.exists(path) and output.samefile(path):
            raise ValueError(f"--output: {output} would overwrite {option} {path}; name another place")


def _in_list(images: Iterable[tuple[Any, ...]], listed: ImageList | None, report: Report) -> Iterator[tuple[Any, ...]]:
    """Yield the images that are listed; count the others."""
    for image in images:
        if listed is None or (_name_of(json.loads(image[1])) or image[0]) in listed:
            yield image
        else:
            report.note("images left out", NOT_CHOSEN, image[0])


def _in_a_split(
    images: Iterable[tuple[Any, ...]], splits: dict[str, float] | None, seed: int, report: Report
) -> Iterator[tuple[Any, ...]]:
    """Yield the images that belong to a split, each behind the split's name; count the others."""
    for image in images:
        fields = json.loads(image[1])
        split = split_of(_name_of(fields) or image[0], splits, seed)
        if split is None:
            report.note("images left out", "in no split", image[0])
        else:
            yield split, *image


def _name_of(image: dict[str, Any]) -> Any:
    """`file_name` of a COCO image; for LVIS, which has none, the end of `coco_url`: COCO's name of the same image."""
    url = image.get("coco_url")
    return image.get("file_name") or (url.rsplit("/", 1)[-1] if isinstance(url, str) else url)


def _count(report: Report, converted: Converted, target: str) -> None:
    if converted.row is None:
        report.note("images left out", converted.left_out, converted.image_id)
        return
    report.images[target] += 1
    report.num_empty += not converted.row["objects"]
    report.num_not_exhaustive += converted.not_exhaustive
    report.num_corners += converted.num_corners
    for item in converted.row["objects"]:
        report.objects["poly" if "poly" in item else "bbox_2d"] += 1
    for reason in converted.objects_left_out:
        report.note("objects left out", reason, converted.image_id)
    for remark in converted.remarks:
        report.note("images" if remark == NO_LABELS else "objects changed", remark, converted.image_id)


def split_of(name: int | str, splits: dict[str, float] | None, seed: int) -> str | None:
    """Return the split of an image by a hash of its name, so it is the same in every file; "" without splits.

    None if the shares add up to less than 1 and the image falls into the remainder.
    """
    if splits is None:
        return ""
    at = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode(errors="backslashreplace")).digest()[:8]) / 2**64
    for split, share in splits.items():
        if at < share:
            return split
        at -= share
    return None


def parse_splits(text: str) -> dict[str, float]:
    """Parse `train=0.9,val=0.1`."""
    entries = [part.split("=") for part in text.split(",")]
    try:
        splits = {name.strip(): float(share) for name, share in entries}
    except ValueError:
        raise ValueError(f"--splits {text}: must look like train=0.9,val=0.1") from None
    if len(splits) < len(entries) or not all(re.fullmatch(r"[\w-]+", name) for name in splits):
        raise ValueError(f"--splits {text}: names must differ and consist of letters, digits, _ and -")
    if not all(share > 0 for share in splits.values()) or sum(splits.values()) > 1 + 1e-9:
        raise ValueError(f"--splits {text}: shares must be above 0 and add up to at most 1")
    return splits


def _chosen(values: frozenset[str] | None, coco: CocoFile | Annotations) -> frozenset[str] | None:
    """Names of the chosen categories: a value that is one is taken whole, any other is a list with commas."""
    if values is None:
        return None
    names = set(coco.categories.values())
    parts = [[value.strip()] if value.strip() in names else map(str.strip, value.split(",")) for value in values]
    chosen = frozenset(itertools.chain.from_iterable(parts))
    for name in sorted(chosen - names):
        near = difflib.get_close_matches(name, names, n=3) or sorted(names)[:10]
        hint = "; a name with a comma needs a --categories of its own" if any("," in known for known in names) else ""
        one_of = "one of " if len(near) > 1 else ""
        raise ValueError(f"--categories: {coco.path} has no {name!r}; did you mean {one_of}{', '.join(near)}?{hint}")
    return chosen


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--from", dest="kind", choices=["coco", "lvis", *READERS], required=True, help="format of the annotations")
    add("--annotations", required=True, metavar="PATH", help="file; voc and yolo: folder")
    add("--images", required=True, metavar="DIR", help="folder that image names are relative to")
    add("--names", metavar="FILE", help="yolo: data.yaml or classes.txt (default: one near the labels)")
    add("--unit", type=int, metavar="N", help="sharegpt: coordinates are parts of N (1000, 1); 0: pixels")
    add("--exif", choices=["shown", "stored"], help="what boxes of turned images were drawn on (see above)")
    add(
        "--output",
        required=True,
        metavar="FILE",
        help="JSONL file; with --splits, NAME.jsonl becomes NAME_SPLIT.jsonl",
    )
    add("--root", metavar="DIR", help="write image paths relative to this folder (default: that of --output)")
    add("--geometry", choices=["box", "poly"], default="box", help="write boxes, or outlines (see above)")
    add("--crowd", choices=["skip", "keep"], default="skip", help="annotations with iscrowd (default: skip)")
    several = "only objects of these categories, by name; may be repeated; a name with a comma needs its own"
    add("--categories", action="append", metavar="A,B", help=several)
    small = "leave out objects with a shorter side below this; lines still count as complete: the model unlearns these"
    add("--min-size", type=float, default=0.0, metavar="PX", help=small)
    add("--max-objects", type=int, metavar="N", help="leave out images with more objects than this")
    add("--skip-empty", action="store_true", help="leave out images without any remaining object")
    add("--main-part", type=float, default=0.9, metavar="SHARE", help="see above; 0 always writes the largest part")
    add("--simplify", type=float, metavar="PX", help="drop outline points that move the line by less than this")
    add("--limit", type=int, metavar="N", help="stop after this many images, all splits together")
    add(
        "--splits",
        metavar="NAME=SHARE,...",
        help="e.g. train=0.9,val=0.1; disjoint, by a hash of the image's file name",
    )
    add("--seed", type=int, default=0, help="of the splits")
    lists = "only the images that it lists, one a line by path or name, as VOC's ImageSets/Main/train.txt does"
    add("--only", metavar="FILE", help=lists)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    choices = dict(
        geometry=args.geometry,
        keep_crowd=args.crowd == "keep",
        categories=frozenset(filter(None, args.categories or [])) or None,
        min_size=args.min_size,
        max_objects=args.max_objects,
        skip_empty=args.skip_empty,
        main_part=args.main_part,
        simplify=args.simplify,
        limit=args.limit,
        exif=args.exif,
    )
    try:
        options = Options(**choices)
        splits = parse_splits(args.splits) if args.splits else None
        report = convert(
            args.annotations,
            args.images,
            args.output,
            options,
            splits=splits,
            seed=args.seed,
            root=args.root,
            kind=args.kind,
            names=args.names,
            unit=args.unit,
            only=args.only,
        )
    except (ValueError, OSError) as error:
        exit_with(error)
    print(report.text())
    written = shlex.quote(next(iter(report.images)))
    print(f"look at it: python -m tools.show_jsonl --data {written} --output sheets")
    print(f"write a config: python -m tools.init --data {written} --model DIR --gpus N")


if __name__ == "__main__":
    main()
