"""Write a model's answers for other tools: COCO files, or the JSONL that training reads.

    python -m tools.export RUN/eval/step_000100.jsonl --output exported              (exported/*.json)
    python -m tools.export CHECKPOINT/evaluation/val.jsonl --to jsonl --output data/pseudo.jsonl --min-score 0.5

Reads what an evaluation writes: in training (`eval/step_N.jsonl`), or by `tools.evaluate`. COCO form is three files.
`instances.json` is the ground truth, `results.json` the answers as COCO's evaluation and FiftyOne take them, with their
scores. `predictions.json` holds the answers in the form of a ground truth, for tools that read no results, such as
supervision. Categories are the labels as scores compare them (stripped, case-folded), those of the ground truth
first. Where annotation is not complete, images have LVIS's `neg_category_ids` and `not_exhaustive_category_ids`.

The files number images and categories anew: `results.json` belongs to this `instances.json`. With `--like FILE`, your
own COCO or LVIS file, all ids are those of FILE, so that `results.json` can be evaluated against it.

JSONL makes the answers annotation: pseudo-labels, or something to look at with `tools.show_jsonl`. Answers that failed,
were cut off or do not parse are left out of it: their lines would count as complete. With `--complete` the lines keep
the annotation of partly annotated data (`annotated`), and answers only add what it does not cover.

Evaluations of GRPO hold rewards, not objects: run `tools.evaluate` on the checkpoint first.
"""

import argparse
import json
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import cycle, dropwhile
from pathlib import Path
from typing import Any, get_args

from PIL import Image

from tools.convert import check_not_inputs, relative_path
from utils.config.load import exit_with, reason_of
from utils.data.images import EXIF_ORIENTATION, FORMATS
from utils.data.samples import SPECIAL_TOKEN
from utils.geometry import MAX_BIN, Kind, Object, bins_to_pixels, bounding_box, coco_box, iou_matrix, normal_label
from utils.scores import label_of

COCO_FILES = ("instances.json", "predictions.json", "results.json")
SAME_OBJECT_IOU = 0.5  # from there on two objects of an annotation are one, whatever their labels
UNUSABLE = "failed, were cut off or do not parse"
Record = dict[str, Any]  # a line that an evaluation writes: `utils.scores.prediction_record`


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path, metavar="FILE.jsonl", help="written by an evaluation")
    parser.add_argument("--output", type=Path, required=True, metavar="PATH", help="folder (coco) or file (jsonl)")
    parser.add_argument("--to", choices=("coco", "jsonl"), default="coco", help="form to write (default: coco)")
    parser.add_argument("--min-score", type=float, default=0.0, metavar="S", help="leave out answers below (default 0)")
    parser.add_argument("--like", type=Path, metavar="FILE.json", help="COCO file to take all ids from")
    parser.add_argument("--exif", choices=("shown",), help="boxes of --like lie on images as EXIF turns them")
    parser.add_argument("--complete", action="store_true", help="jsonl: keep the annotation, add what it lacks")
    args = parser.parse_args()
    if not 0 <= args.min_score <= 1:
        parser.error("--min-score must be from 0 to 1")
    if args.like and args.to != "coco":
        parser.error("--like is for --to coco")
    if args.exif and not args.like:
        parser.error("--exif is for --like")
    if args.complete and args.to != "jsonl":
        parser.error("--complete is for --to jsonl")
    written = [args.output] if args.to == "jsonl" else [args.output / name for name in COCO_FILES]
    try:
        check_not_inputs(written, {"the answers": args.answers, "--like": args.like})
        check_output(args.output, args.to)
    except (OSError, ValueError) as error:
        exit_with(error)
    try:
        records = read(args.answers)
    except (OSError, ValueError) as error:
        exit_with(f"{args.answers}: {reason_of(error)}")
    if any("score" not in found for record in records for found in record["pred"]):
        if args.min_score:
            exit_with(f"--min-score: {args.answers} has answers without a score; leave it out")
        print(f"{args.answers}: answers without a score; each counts as 1.0 (the backend gave no log-probabilities)")
    for record in records:
        record["pred"] = [found for found in record["pred"] if found.get("score", 1.0) >= args.min_score]
    try:
        (write_jsonl if args.to == "jsonl" else write_coco)(args, records)
    except OSError as error:
        exit_with(f"--output {args.output}: cannot be written ({reason_of(error)}); name another place")


def write_jsonl(args: argparse.Namespace, records: Sequence[Record]) -> None:
    """Write the answers as annotation. Raises OSError."""
    whole = [record for record in records if is_whole(record) or args.complete and "annotated" not in record]
    if num_left_out := len(records) - len(whole):
        print(f"{args.answers}: {num_left_out} answers that {UNUSABLE} are left out: they list too little")
    if records and not whole:
        exit_with(f"{args.answers}: no answer is left; see parse_rate and truncated_rate of the evaluation")
    if args.complete:
        partial = ["annotated" in record for record in records]
        if not any(partial):
            exit_with(f"{args.answers}: no line has `annotated`, so the annotation is complete: drop --complete")
        if not any("annotated" in record for record in whole):
            what = f"the {sum(partial)} answers to partly annotated images {UNUSABLE}"
            exit_with(f"{args.answers}: {what}; see parse_rate and truncated_rate of the evaluation")
        whole = [record | {"pred": completed(record)} for record in whole]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    lines = [sample_line(record, args.output.parent) for record in whole]
    num_lost = sum(len(record["pred"]) - len(line["objects"]) for record, line in zip(whole, lines, strict=True))
    if num_lost:
        rule = "beyond the image, within a pixel of its corner, or labels that spell a special token"
        print(f"{args.answers}: {num_lost} objects that training would not take are left out ({rule})")
    args.output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{len(lines)} images: {args.output}")


def _is_file(image: str) -> bool:
    """Whether an image is a file of its own, neither embedded nor in a tar shard."""
    return not image.startswith("data:") and (".tar/" not in image or os.path.isfile(image))


def write_coco(args: argparse.Namespace, records: Sequence[Record]) -> None:
    """Write the COCO files. Raises OSError."""
    with_file = [record for record in records if record["images"] and _is_file(record["images"][0])]
    if num_bare := len(records) - len(with_file):
        print(
            f"{args.answers}: {num_bare} answers to no image file are left out: COCO needs one; --to jsonl keeps them"
        )
        records = with_file
    uses = Counter(record["images"][0] for record in records)
    if num_shared := sum(number for number in uses.values() if number > 1):
        what = "to an image file that another answer has, too; supervision and FiftyOne want one entry per image"
        print(f"{args.answers}: {num_shared} answers are {what}")
    try:
        ids = ids_like(args.like, records, args.exif) if args.like else own_ids(records)
    except (OSError, ValueError) as error:
        exit_with(f"--like {args.like}: {reason_of(error)}")
    except (AttributeError, KeyError, TypeError) as error:  # of its items
        exit_with(f"--like {args.like}: no COCO file: {type(error).__name__}: {error}")
    args.output.mkdir(parents=True, exist_ok=True)
    folder, files = coco_files(records, ids)
    for name, content in files.items():
        (args.output / name).write_text(json.dumps(content) + "\n")
    names = ", ".join(str(args.output / name) for name in files)
    if not files["results.json"]:
        print(f"{args.answers}: no objects were predicted; COCO's tools take no results file without any")
    num_written = sum(number is not None for number in ids.images)
    print(f"{num_written} images: {names}; file names are below {folder}")
    if not args.like:
        own = args.output / "instances.json"
        print(f"ids are those of {own} only; to evaluate against your own COCO file, take its ids with --like FILE")
    for remark in ids.remarks:
        print(f"--like {args.like}: {remark}")


def check_output(output: Path, form: str) -> None:
    """Raise ValueError if `output` is not what `form` writes, or holds a file that need not be this program's: any file
    of JSONL, whose lines look like those of all data, and COCO files whose images lack the `sample` of an answer."""
    if form == "jsonl":
        if output.is_dir():
            raise ValueError(f"--output: {output} is a folder; --to jsonl writes a file")
        found = [output] if output.exists() else []
    else:
        if output.exists() and not output.is_dir():
            raise ValueError(f"--output: {output} is a file; --to coco writes a folder")
        truth, predicted, results = (output / name for name in COCO_FILES)
        found = [path for path in (truth, predicted) if path.exists() and not _is_exported(path)]
        found += [results] if results.exists() and not truth.exists() else []  # results name no images
    if found:
        what = "exists" if form == "jsonl" else "exists, and this program did not write it"
        raise ValueError(f"{found[0]}: {what}; it would be overwritten: name another --output, or delete it")


def _is_exported(file: Path) -> bool:
    """Whether this program wrote a COCO file: each image names its answer. A file that cannot be read is another's."""
    try:
        return all("sample" in image for image in json.loads(file.read_text())["images"])
    except (KeyError, TypeError, ValueError):
        return False


def read(path: Path) -> list[Record]:
    """Read an evaluation's answers. Raises OSError, and ValueError for another file."""
    try:
        records = [json.loads(line) for line in path.open()]
    except ValueError as error:
        raise ValueError(f"no file of answers (eval/step_N.jsonl, or of tools.evaluate): {error}") from None
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict) or not {"id", "images", "gt", "pred"} <= record.keys():
            raise ValueError(f"line {number} is no answer of an evaluation (eval/step_N.jsonl, or of tools.evaluate)")
        if "width" not in record:
            raise ValueError(f"line {number} has no image size, as an earlier version wrote it; evaluate again")
    return records


# ---------------------------------------------------------------------------------------------------------------------
# COCO


@dataclass(frozen=True)
class Ids:
    """`images`: of each record, None to leave it out; `category_of`: by label, as labels are compared; `names`: of
    categories, as written."""

    images: list[Any]
    category_of: dict[str, Any]
    names: list[str]
    remarks: list[str] = field(default_factory=list)


def own_ids(records: Sequence[Record]) -> Ids:
    """Number images and labels from 1, the labels of the ground truth first."""
    names = [*sorted(_labels(records, "gt")), *sorted(_labels(records, "pred") - _labels(records, "gt"))]
    category_of = {name: number for number, name in enumerate(names, start=1)}
    return Ids(list(range(1, len(records) + 1)), category_of, names)


def ids_like(file: Path, records: Sequence[Record], exif: str | None = None) -> Ids:
    """Take the ids of a COCO file: of images by file name, of categories by name.

    Raises OSError, and ValueError (or what items without names or ids raise) for what is no COCO file, for a label of
    the ground truth or an image that it does not have, and where it is open which one is meant.
    """
    given = json.loads(file.read_text(encoding="utf-8-sig"))
    if not isinstance(given, dict) or not {"images", "categories"} <= given.keys():
        raise ValueError("no COCO file: it has no images and categories")
    names = [category["name"] for category in given["categories"]]
    if twice := [label for label, number in Counter(map(normal_label, names)).items() if number > 1]:
        raise ValueError(f"two categories are {twice[0]!r} as labels are compared (without case and outer blanks)")
    category_of = {normal_label(category["name"]): category["id"] for category in given["categories"]}
    if missing := sorted(_labels(records, "gt") - category_of.keys()):
        raise ValueError(f"no category has the name {missing[0]!r}{_and_more(missing)}, which the ground truth has")
    remarks = []
    labels = [normal_label(found["desc"]) for record in records for found in record["pred"]]
    if made_up := sorted(label for label in labels if label not in category_of):
        shown = f"{made_up[0]!r}{_and_more(sorted(set(made_up)))}"
        remarks.append(f"{len(made_up)} predicted objects left out; their labels are no category there: {shown}")
    images = _images_like(given["images"], records, exif)
    if num_turned := images.count(None):
        rule = "nothing says that boxes there are turned, too (where the size does not say the opposite: --exif shown)"
        remarks.append(f"{num_turned} answers left out: EXIF turns their images, and {rule}")
    if num_left := len(given["images"]) - len({*images} - {None}):
        rule = "evaluate these images only (params.imgIds), or their objects count as missed"
        remarks.append(f"{num_left} of its {len(given['images'])} images have no answer; {rule}")
    return Ids(images, category_of, names, remarks)


def _images_like(given: Sequence[dict[str, Any]], records: Sequence[Record], exif: str | None) -> list[Any]:
    """Return the id of each record's image: its path ends in that image's `file_name`, without leading "..", or in the
    last name of LVIS's `coco_url`. None for an image that EXIF turns, unless the size in the file, or `exif`, says that
    its boxes lie on what is shown."""
    by_name: dict[str, list[tuple[tuple[str, ...], dict[str, Any]]]] = {}
    for image in given:
        name = image.get("file_name") or image.get("coco_url", "").rpartition("/")[2]
        parts = tuple(dropwhile(lambda part: part == "..", Path(name).parts))
        if parts:
            by_name.setdefault(parts[-1], []).append((parts, image))
    paths = [Path(record["images"][0]) for record in records]
    found = [[image for parts, image in by_name.get(p.name, []) if p.parts[-len(parts) :] == parts] for p in paths]
    if missing := [str(path) for path, own in zip(paths, found, strict=True) if not own]:
        raise ValueError(f"no image has the file name of {missing[0]}{_and_more(missing)}")
    files: dict[Any, Path] = {}
    for path, record, own in zip(paths, records, found, strict=True):
        if len(own) > 1 or files.setdefault(own[0]["id"], path) != path:
            raise ValueError(f"its file names do not tell images apart: {own[0].get('file_name')!r}, {path}")
        size = own[0].get("width"), own[0].get("height")
        if size not in ((record["width"], record["height"]), (record["height"], record["width"]), (None, None)):
            rule = "another size there; boxes would not fit (a resized image)"
            raise ValueError(f"{path}: {record['width']} x {record['height']}, but {size[0]} x {size[1]} there: {rule}")
    fits = [_lies_on_shown(own[0], *parts, exif) for own, *parts in zip(found, paths, records, strict=True)]
    return [own[0]["id"] if is_shown else None for is_shown, own in zip(fits, found, strict=True)]


def _lies_on_shown(given: dict[str, Any], path: Path, record: Record, exif: str | None) -> bool:
    """Whether boxes of an image's entry lie on the image as EXIF turns it, which is what the model saw."""
    if given.get("width") not in (record["width"], None):
        return False
    try:
        with Image.open(path, formats=FORMATS) as opened:
            orientation = opened.getexif().get(EXIF_ORIENTATION, 1)
    except OSError:  # not there any more
        orientation = 1
    is_told = given.get("width") is not None and record["width"] != record["height"] and orientation in range(5, 9)
    return orientation not in range(2, 9) or is_told or exif == "shown"


def _labels(records: Sequence[Record], side: str) -> set[str]:
    return {normal_label(found["desc"]) for record in records for found in record[side]}


def _and_more(found: Sequence[str]) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""


def coco_files(records: Sequence[Record], ids: Ids) -> tuple[Path, dict[str, Any]]:
    """Return the folder that images are named below, and the content of each file by name."""
    folder = Path(os.path.commonpath([Path(record["images"][0]).parent for record in records] or ["."]))
    numbered = [(number, own) for number, own in zip(ids.images, records, strict=True) if number is not None]
    is_partial = any("annotated" in record for record in records)
    images = [_image(number, record, folder, ids.category_of, is_partial) for number, record in numbered]
    images = list({image["id"]: image for image in images}.values())  # several answers may be to one of `--like`
    rules = {"frequency": "f"} if is_partial else {}  # which LVIS's evaluation asks for
    named = zip(ids.category_of.values(), ids.names, strict=True)
    categories = [{"id": id_, "name": name, **rules} for id_, name in named]
    common = {"images": images, "categories": categories}
    truth, predicted = (_annotations(numbered, side, ids.category_of) for side in ("gt", "pred"))
    results = [{key: value for key, value in found.items() if key not in ("id", "iscrowd")} for found in predicted]
    scored = [{"score": 1.0} | found for found in results]
    contents = (common | {"annotations": truth}, common | {"annotations": predicted}, scored)
    return folder, dict(zip(COCO_FILES, contents, strict=True))


def _image(number: Any, record: Record, folder: Path, category_of: dict[str, Any], is_partial: bool) -> dict[str, Any]:
    """An image's entry. `is_partial`: some are annotated in part, so that LVIS's rules hold for all of them."""
    size = {"width": record["width"], "height": record["height"]}
    image = {"id": number, "file_name": os.path.relpath(record["images"][0], folder), "sample": record["id"], **size}
    if is_partial:
        present = {normal_label(found["desc"]) for found in record["gt"]}
        annotated = set(record.get("annotated", category_of))
        image["neg_category_ids"] = [category_of[name] for name in sorted((annotated - present) & category_of.keys())]
        image["not_exhaustive_category_ids"] = [category_of[name] for name in sorted(present - annotated)]
    return image


def _annotations(
    numbered: Sequence[tuple[Any, Record]], side: str, category_of: dict[str, Any]
) -> list[dict[str, Any]]:
    found = [
        {"image_id": number, "category_id": category_of[normal_label(item["desc"])], **_shape(item, record)}
        | ({"score": item["score"]} if "score" in item else {})
        for number, record in numbered
        for item in record[side]
        if normal_label(item["desc"]) in category_of
    ]
    return [{"id": number, "iscrowd": 0, **item} for number, item in enumerate(found, start=1)]


def _shape(item: dict[str, Any], record: Record) -> dict[str, Any]:
    """Return COCO's `bbox` (x, y, width, height), `area` of the box and `segmentation`, in pixels."""
    object_, size = _object(item), (record["width"], record["height"])
    bbox, area = coco_box(object_, size)
    outline = [list(bins_to_pixels(object_.coords, *size))] if object_.kind == "poly" else []
    return {"bbox": bbox, "area": area, "segmentation": outline}


# ---------------------------------------------------------------------------------------------------------------------
# JSONL


def sample_line(record: Record, folder: Path) -> dict[str, Any]:
    """Return the line (DAT-1) whose annotation are the answers; paths of images relative to `folder`.

    Answers in pixels may lie beyond the image, where no annotation may: they are cut off at its edges. Left out is what
    training refuses: nothing inside the image, a label that spells a special token, and a box within a pixel of the
    corner (models answer [0, 0, 0, 0]), whose numbers look like fractions of the sides.
    """
    width, height = size = record["width"], record["height"]
    objects = []
    for item in record["pred"]:
        object_ = _object(_with_area(item))
        pixels = zip(bins_to_pixels(object_.coords, *size), cycle(size), strict=False)
        coords = [round(min(max(value, 0), limit), 2) for value, limit in pixels]
        has_area = min(max(coords[axis::2]) - min(coords[axis::2]) for axis in (0, 1)) > 0
        if has_area and max(coords) > 1 and not SPECIAL_TOKEN.search(object_.desc):
            objects.append({"desc": object_.desc, object_.kind: coords})
    images = [image if image.startswith("data:") else relative_path(image, folder) for image in record["images"]]
    return {"id": record["id"], "images": images, "width": width, "height": height, "objects": objects}


def is_whole(record: Record) -> bool:
    """Whether an answer ended by itself, and all of it was read. Earlier versions did not write the latter."""
    return record.get("parsed", True) and ("response" not in record or record.get("finish_reason") == "stop")


def completed(record: Record) -> list[dict[str, Any]]:
    """Return the annotation of a line and the answers that complete it, top to bottom, then left to right."""
    items = list(map(_with_area, record["gt"]))
    if "annotated" in record:
        chosen = additions([_object(item) for item in items], list(map(_object, record["pred"])), record["annotated"])
        items = [*items, *({"desc": obj.desc, obj.kind: obj.coords} for obj in chosen)]
    return sorted(items, key=lambda item: bounding_box(_object(item))[1::-1])


def _with_area(item: dict[str, Any]) -> dict[str, Any]:
    """Return an annotated object with area: one that rounding to bins has made flat becomes a box of one bin there."""
    x0, y0, x1, y1 = bounding_box(_object(item))
    if x0 < x1 and y0 < y1:
        return item
    x0, y0 = (min(low, MAX_BIN - 1) if low == high else low for low, high in ((x0, x1), (y0, y1)))
    return {"desc": item["desc"], "bbox_2d": [x0, y0, max(x1, x0 + 1), max(y1, y0 + 1)]}


def additions(annotated: Sequence[Object], predictions: Sequence[Object], labels: Collection[str]) -> list[Object]:
    """Return the predictions that complete an annotation.

    A prediction of one of `labels` is left out, since their annotation is complete. So is one that overlaps an
    annotated object or an earlier prediction by `SAME_OBJECT_IOU`, and one without area.
    """
    known, added = list(annotated), []
    for prediction in predictions:
        x0, y0, x1, y1 = bounding_box(prediction)
        if label_of(prediction) in labels or x0 >= x1 or y0 >= y1:
            continue
        if iou_matrix([prediction], known).max(initial=0.0) < SAME_OBJECT_IOU:
            known.append(prediction)
            added.append(prediction)
    return added


def _object(item: dict[str, Any]) -> Object:
    (kind,) = item.keys() & set(get_args(Kind))
    return Object(item["desc"], kind, tuple(item[kind]))


if __name__ == "__main__":
    main()
