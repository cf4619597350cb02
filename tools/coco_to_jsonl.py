"""Convert COCO or LVIS annotation files to the JSONL that training reads (DAT-1), one line per image.

    python -m tools.coco_to_jsonl --annotations instances_train2017.json --images train2017 --output data/coco.jsonl
    ... --geometry poly --splits train=0.95,val=0.05      (writes data/coco_train.jsonl and data/coco_val.jsonl)

The file is streamed, and its annotations are grouped by image in a temporary database on disk (in TMPDIR, about as
large as the file), so memory use does not depend on its size. Images keep the order of the file, objects that of the
annotations. Everything left out or changed is counted by reason and reported at the end, with the first case of each.

Outlines (`--geometry poly`): an object drawn as one ring keeps its points. Several rings, a ring that extends beyond
the image, and run-length masks (compressed or not) are first united and clipped to the image. The largest part is
written if it has at least `--main-part` of the area, otherwise the object's box. Holes are filled. The outline of a
mask follows its pixels' edges and is simplified by at most a pixel.

LVIS annotates some categories of an image only. Its lines therefore get `annotated` (TGT-12): the categories of their
objects and those known to be absent, without the not exhaustively annotated ones and those of which an object was left
out.
"""

import argparse
import difflib
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.coco import CocoFile, LeftOut, Options, convert_object
from utils.data.images import image_size
from utils.data.samples import map_ahead

# ---- one image -----------------------------------------------------------------------------------------------------


@dataclass
class Converted:
    """Result for one image: its line (None: left out), reasons and remarks, including those of its objects."""

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
    """Convert an image with its annotations to one line (DAT-1); its path is written relative to `root`."""
    result = Converted(image_id, None, not_exhaustive=bool(image.get("not_exhaustive_category_ids")))
    try:
        if image_id is None:
            raise LeftOut("malformed: no id")
        path = _find_image(image, folder)
        width, height = _checked_size(image, path)
        objects, incomplete = [], set(image.get("not_exhaustive_category_ids") or [])
        for item in annotations:
            try:
                converted, remarks = convert_object(item, categories, width, height, options)
            except LeftOut as reason:
                result.objects_left_out.append(str(reason))
                incomplete.add(item.get("category_id"))
                continue
            objects.append(converted)
            result.remarks.extend(remarks)
        if options.max_objects is not None and len(objects) > options.max_objects:
            raise LeftOut(f"more than {options.max_objects} objects")
        if options.skip_empty and not objects:
            raise LeftOut("no objects")
    except LeftOut as reason:
        return Converted(image_id, None, str(reason))
    shown = os.path.relpath(path.absolute(), root.absolute())
    result.row = {"id": str(image_id), "images": [shown], "width": width, "height": height, "objects": objects}
    if "neg_category_ids" in image:
        absent = {categories.get(category) for category in image["neg_category_ids"]}
        known = {item["desc"] for item in objects} | absent
        result.row["annotated"] = sorted(known - {None} - {categories.get(category) for category in incomplete})
    return result


def _find_image(image: dict[str, Any], folder: Path) -> Path:
    """Find `file_name` below the folder; for LVIS, which has none, the last one or two names of `coco_url`."""
    name, url = image.get("file_name"), image.get("coco_url")
    if isinstance(name, str) and name:
        candidates = [name]
    elif isinstance(url, str) and url:
        parts = url.split("/")
        candidates = ["/".join(parts[-2:]), parts[-1]]
    else:
        raise LeftOut("malformed: neither file_name nor coco_url")
    for candidate in candidates:
        if (folder / candidate).is_file():
            return folder / candidate
    raise LeftOut("no such image file")


def _checked_size(image: dict[str, Any], path: Path) -> tuple[int, int]:
    """Return (width, height) of the image file, which must match the size given in the annotation file."""
    try:
        height, width = image_size(path)
    except OSError:
        raise LeftOut("image file cannot be read") from None
    given = image.get("width"), image.get("height")
    if given not in ((width, height), (None, None)):
        raise LeftOut("the image file's size differs from the annotations' (rotated by EXIF, or resized?)")
    return width, height


# ---- the whole file ------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """Counts of what was written, and of what was not, by reason with the first case."""

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
    options: Options | None = None,
    splits: dict[str, float] | None = None,
    seed: int = 0,
    root: str | os.PathLike | None = None,
) -> Report:
    """Convert a whole file; outputs appear complete or not at all.

    Args:
        splits: share of each split, adding up to at most 1; None: one output.
        root: folder that image paths are relative to (default: that of the output).

    Raises:
        ValueError, OSError: an argument or a file cannot be used, or no image is left to write.
    """
    output, folder, options = Path(output), Path(images), options or Options()
    if not folder.is_dir():
        raise ValueError(f"--images {folder}: no such folder")
    targets = {name: output.with_name(f"{output.stem}_{name}{output.suffix}") for name in splits} if splits else {}
    targets = targets or {"": output}
    root = output.parent if root is None else Path(root)
    report = Report({str(target): 0 for target in targets.values()})
    with CocoFile(annotations, outlines=options.geometry == "poly") as coco, ExitStack() as stack:
        _check_categories(options.categories, coco)
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished = {name: target.with_name(target.name + ".partial") for name, target in targets.items()}
        for path in unfinished.values():
            stack.callback(path.unlink, missing_ok=True)
        files = {name: stack.enter_context(path.open("w", encoding="utf-8")) for name, path in unfinished.items()}

        def work(item: tuple[int | str | None, str, list[str]]) -> Converted:
            image, found = json.loads(item[1]), list(map(json.loads, item[2]))
            return convert_image(item[0], image, found, coco.categories, folder, root, options)

        # In threads, because most of the time goes into reading image headers, often from a network disk.
        for converted in map_ahead(work, _in_a_split(coco.images(), splits, seed, report), max_ahead=32):
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


def _in_a_split(
    images: Iterable[tuple[Any, ...]], splits: dict[str, float] | None, seed: int, report: Report
) -> Iterator[tuple[Any, ...]]:
    """Yield the images that belong to a split; count the others."""
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
    """Return the split of an image by a hash of its id, so it is the same in every file; "" without splits.

    None if the shares add up to less than 1 and the image falls into the remainder.
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


def _check_categories(chosen: frozenset[str] | None, coco: CocoFile) -> None:
    names = set(coco.categories.values())
    for name in sorted((chosen or frozenset()) - names):
        near = difflib.get_close_matches(name, names, n=3) or sorted(names)[:10]
        raise ValueError(f"--categories: {coco.path} has no {name!r}; did you mean one of {', '.join(near)}?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--annotations", required=True, metavar="FILE", help="COCO or LVIS JSON file")
    add("--images", required=True, metavar="DIR", help="folder of file_name (LVIS: of the end of coco_url)")
    add(
        "--output",
        required=True,
        metavar="FILE",
        help="JSONL file; with --splits, NAME.jsonl becomes NAME_SPLIT.jsonl",
    )
    add("--root", metavar="DIR", help="write image paths relative to this folder (default: that of --output)")
    add("--geometry", choices=["box", "poly"], default="box", help="write boxes, or outlines (see above)")
    add("--crowd", choices=["skip", "keep"], default="skip", help="annotations with iscrowd (default: skip)")
    add("--categories", metavar="A,B", help="only objects of these categories, by name")
    add("--min-size", type=float, default=0.0, metavar="PX", help="leave out objects with a shorter side below this")
    add("--max-objects", type=int, metavar="N", help="leave out images with more objects than this")
    add("--skip-empty", action="store_true", help="leave out images without any remaining object")
    add("--main-part", type=float, default=0.9, metavar="SHARE", help="see above; 0 always writes the largest part")
    add("--simplify", type=float, metavar="PX", help="drop outline points that move the line by less than this")
    add("--limit", type=int, metavar="N", help="stop after this many images, all splits together")
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
