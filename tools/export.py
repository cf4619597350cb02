"""Write a model's answers for other tools: COCO files, or the JSONL that training reads.

    python -m tools.export RUN/eval/step_000100.jsonl --output exported              (exported/*.json)
    python -m tools.export CHECKPOINT/evaluation/val.jsonl --to jsonl --output data/pseudo.jsonl --min-score 0.5

Reads what an evaluation writes: in training (`eval/step_N.jsonl`), or by `tools.evaluate`. COCO form is three files.
`instances.json` is the ground truth, `results.json` the answers as COCO's evaluation and FiftyOne take them, with their
scores. `predictions.json` holds the answers in the form of a ground truth, for tools that read no results, such as
supervision. Categories are the labels as scores compare them (stripped, case-folded), those of the ground truth
first. Where annotation is not complete, images have LVIS's `neg_category_ids` and `not_exhaustive_category_ids`.

JSONL makes the answers annotation: pseudo-labels, or something to look at with `tools.show_jsonl`.
"""

import argparse
import json
import os
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, get_args

from tools.convert import relative_path
from utils.config.load import exit_with
from utils.geometry import Kind, Object, bins_to_pixels, coco_box, normal_label

Record = dict[str, Any]  # a line that an evaluation writes: `utils.scores.prediction_record`


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path, metavar="FILE.jsonl", help="written by an evaluation")
    parser.add_argument("--output", type=Path, required=True, metavar="PATH", help="folder (coco) or file (jsonl)")
    parser.add_argument("--to", choices=("coco", "jsonl"), default="coco", help="form to write (default: coco)")
    parser.add_argument("--min-score", type=float, default=0.0, metavar="S", help="leave out answers below (default 0)")
    args = parser.parse_args()
    try:
        records = read(args.answers)
    except (OSError, ValueError) as error:
        exit_with(f"{args.answers}: {error}")
    if any("score" not in found for record in records for found in record["pred"]):
        print(f"{args.answers}: answers without a score; each counts as 1.0 (the backend gave no log-probabilities)")
    for record in records:
        record["pred"] = [found for found in record["pred"] if found.get("score", 1.0) >= args.min_score]
    if args.to == "jsonl":
        args.output.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(sample_line(record, args.output.parent)) + "\n" for record in records]
        args.output.write_text("".join(lines))
        print(f"{len(lines)} images: {args.output}")
        return
    with_file = [record for record in records if record["images"] and not record["images"][0].startswith("data:")]
    if num_bare := len(records) - len(with_file):
        print(
            f"{args.answers}: {num_bare} answers to no image file are left out: COCO needs one; --to jsonl keeps them"
        )
        records = with_file
    uses = Counter(record["images"][0] for record in records)
    if num_shared := sum(number for number in uses.values() if number > 1):
        what = "to an image file that another answer has, too; supervision and FiftyOne want one entry per image"
        print(f"{args.answers}: {num_shared} answers are {what}")
    args.output.mkdir(parents=True, exist_ok=True)
    folder, files = coco_files(records)
    for name, content in files.items():
        (args.output / name).write_text(json.dumps(content) + "\n")
    names = ", ".join(str(args.output / name) for name in files)
    print(f"{len(records)} images: {names}; file names are below {folder}")


def read(path: Path) -> list[Record]:
    """Read an evaluation's answers. Raises OSError, and ValueError for another file."""
    records = [json.loads(line) for line in path.open()]
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict) or not {"id", "images", "gt", "pred"} <= record.keys():
            raise ValueError(f"line {number} is no answer of an evaluation (eval/step_N.jsonl, or of tools.evaluate)")
        if "width" not in record:
            raise ValueError(f"line {number} has no image size, as an earlier version wrote it; evaluate again")
    return records


# ---------------------------------------------------------------------------------------------------------------------
# COCO


def coco_files(records: Sequence[Record]) -> tuple[Path, dict[str, Any]]:
    """Return the folder that images are named below, and the content of each file by name."""
    folder = Path(os.path.commonpath([Path(record["images"][0]).parent for record in records] or ["."]))
    labels = [[normal_label(found["desc"]) for found in record[side]] for side in ("gt", "pred") for record in records]
    names = list(dict.fromkeys(sorted(set().union(*labels[: len(records)])) + sorted(set().union(*labels))))
    category_of = {name: number for number, name in enumerate(names, start=1)}
    images = [_image(number, record, folder, category_of) for number, record in enumerate(records, start=1)]
    common = {"images": images, "categories": [{"id": number, "name": name} for name, number in category_of.items()]}
    truth, predicted = (_annotations(records, side, category_of) for side in ("gt", "pred"))
    results = [{key: value for key, value in found.items() if key not in ("id", "iscrowd")} for found in predicted]
    return folder, {
        "instances.json": common | {"annotations": truth},
        "predictions.json": common | {"annotations": predicted},
        "results.json": [{"score": 1.0} | found for found in results],
    }


def _image(number: int, record: Record, folder: Path, category_of: dict[str, int]) -> dict[str, Any]:
    size = {"width": record["width"], "height": record["height"]}
    image = {"id": number, "file_name": os.path.relpath(record["images"][0], folder), "sample": record["id"], **size}
    if "annotated" in record:
        present = {normal_label(found["desc"]) for found in record["gt"]}
        annotated = set(record["annotated"])
        image["neg_category_ids"] = [category_of[name] for name in sorted((annotated - present) & category_of.keys())]
        image["not_exhaustive_category_ids"] = [category_of[name] for name in sorted(present - annotated)]
    return image


def _annotations(records: Sequence[Record], side: str, category_of: dict[str, int]) -> list[dict[str, Any]]:
    found = [
        {"image_id": number, "category_id": category_of[normal_label(item["desc"])], **_shape(item, record)}
        | ({"score": item["score"]} if "score" in item else {})
        for number, record in enumerate(records, start=1)
        for item in record[side]
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

    Answers in pixels may lie beyond the image, where no annotation may: they are cut off at its edges.
    """
    width, height = size = record["width"], record["height"]
    objects = []
    for item in record["pred"]:
        object_ = _object(item)
        pixels = zip(bins_to_pixels(object_.coords, *size), cycle(size), strict=False)
        coords = [round(min(max(value, 0), limit), 2) for value, limit in pixels]
        if min(max(coords[axis::2]) - min(coords[axis::2]) for axis in (0, 1)) > 0:
            objects.append({"desc": object_.desc, object_.kind: coords})
    images = [image if image.startswith("data:") else relative_path(image, folder) for image in record["images"]]
    return {"id": record["id"], "images": images, "width": width, "height": height, "objects": objects}


def _object(item: dict[str, Any]) -> Object:
    (kind,) = item.keys() & set(get_args(Kind))
    return Object(item["desc"], kind, tuple(item[kind]))


if __name__ == "__main__":
    main()
