"""Read annotations of the field's formats other than COCO, in COCO's terms; `tools.convert` writes them as our lines.

An item is (id, image as JSON, its annotations as JSON), as `tools.coco.CocoFile` yields them. Coordinates of an
annotation are pixels, or with `unit` N in parts of N of the image's sides.
"""

import itertools
import json
import math
import os
import re
import xml.etree.ElementTree as xml  # noqa: S405  # data files are the operator's own
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tools.coco import SHARED
from utils.data.samples import SPECIAL_TOKEN, SURROGATE, other_encoding

Item = tuple[str, dict[str, Any], list[dict[str, Any]]]
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")

_REFERENCE = re.compile(
    r"(?:<\|object_ref_start\|>|<ref>)(.*?)(?:<\|object_ref_end\|>|</ref>)"
    r"((?:\s*(?:<\|box_start\|>|<box>).*?(?:<\|box_end\|>|</box>))+)",
    re.DOTALL,
)
_BOX = re.compile(r"(?:<\|box_start\|>|<box>)(.*?)(?:<\|box_end\|>|</box>)", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_SPELT = re.compile(r'"bbox_2d"|<\|box_start\|>|<box>')  # what each box of an answer has once
_MARK = re.compile(r"<\|(?:box|quad)_start\|>|<(?:box|quad)>")
_EMPTY = re.compile(r"(```(json)?)?\s*\[\s*\]\s*(```)?|\s*")
_JSON, _OPENED = json.JSONDecoder(), re.compile(r"[\[{]")
NO_LABELS = "no label file, so that they count as images without objects"
COPY = "says what another XML file says"
SYSTEM_FOLDERS = ("__MACOSX", "lost+found")
YAML_SUFFIXES = (".yaml", ".yml")
SEVERAL_LINES_PER_IMAGE = ("swift", "sharegpt", "rex-omni")
NOT_ONE_IMAGE = {"file_name": "", "unusable": "its line has not exactly one image, as a path"}
NOT_TEXT = "a turn of its conversation is not text"


class Annotations:
    """Annotations of another format, with `CocoFile`'s attributes. A context manager.

    Args:
        kind: a key of `READERS`.
        path: file, or folder for VOC and YOLO.
        images: folder of the images.
        names: file with the class names (YOLO); None: data.yaml or classes.txt near the labels.
        unit: what coordinates in the text of an answer are parts of (sharegpt); 0: pixels.

    Raises:
        ValueError, OSError: a file cannot be used.
    """

    def __init__(self, kind: str, path: Path, images: Path, names: Path | None = None, unit: int | None = None) -> None:
        self.path = path
        if kind == "sharegpt" and unit is None:
            raise ValueError("--from sharegpt needs --unit: 1000, 1, or 0 for pixels; the text does not say which")
        classes, number = _yolo_settings(path, names) if kind == "yolo" else ({}, unit or 0)
        self._items = list(READERS[kind](path, images, number))
        self.repeated: Counter[str] = Counter()
        if kind == "voc":
            self._items, self.repeated[COPY] = _without_copies(self._items, images)
        if not self._items:
            way_out = "; --annotations names their folder, --images that of the images"
            what = {"yolo": f"holds no .txt of labels{way_out}", "voc": f"holds no .xml of annotations{way_out}"}
            raise ValueError(f"{path}: {what.get(kind, 'nothing to read')}")
        labels = {item["category_id"] for _, _, items in self._items for item in items}
        self.categories: dict[Any, str] = {label: label for label in labels if _is_description(label)}
        if kind == "yolo":
            self.categories = classes

    def __enter__(self) -> "Annotations":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def images(self) -> Iterator[tuple[str, str, list[str]]]:
        """Yield (id, image, its annotations), the latter two as JSON. What is not UTF-8 in an id is escaped."""
        for image_id, image, items in self._items:
            printable = image_id.encode(errors="backslashreplace").decode()
            yield printable, json.dumps(image), [json.dumps(item) for item in items]

    def num_strays(self) -> int:
        """Number of annotations without an image: here none."""
        return 0


def _without_copies(items: list[Item], images: Path) -> tuple[list[Item], int]:
    """Return the entries of VOC without those that repeat an earlier one, and how many those are. Entries of one image
    file that say different things become unusable."""
    by_file: dict[str, list[Item]] = {}
    for item in items:
        same_file = by_file.setdefault(item[1]["file_name"], [])
        if not any(item[1:] == other[1:] for other in same_file):
            same_file.append(item)
    for name, same_file in by_file.items():
        if len(same_file) > 1 and os.path.isfile(images / name):
            for _, image, _ in same_file:
                image["unusable"] = SHARED
    kept = [item for same_file in by_file.values() for item in same_file]
    return kept, len(items) - len(kept)


def _is_description(label: Any) -> bool:
    return (
        isinstance(label, str) and bool(label.strip()) and not (SPECIAL_TOKEN.search(label) or SURROGATE.search(label))
    )


def _voc(folder: Path, images: Path, unit: int) -> Iterator[Item]:
    """Pascal VOC: one XML file per image. Its pixels count from 1, both ends included; difficult objects are crowds."""
    for own in sorted(_names_below(folder, (".xml",))):
        path = folder / own
        try:
            root = xml.parse(path).getroot()  # noqa: S314
        except xml.ParseError as error:
            raise ValueError(f"{path}: not XML that can be read: {error}; correct or remove it") from None
        except (ValueError, LookupError) as error:  # of its encoding
            raise ValueError(f"{path}: not XML that can be read: {error}; save it as UTF-8, or remove it") from None
        try:
            size = {side: int(float(root.findtext(f"size/{side}") or 0)) or None for side in ("width", "height")}
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{path}: size: {error}; correct it, or delete it to use the image's own") from None
        if root.tag != "annotation":  # else its objects would be lost, and the line say that there are none
            raise ValueError(f"{path}: <{root.tag}> is no annotation of Pascal VOC; correct or remove it")
        items = []
        for item in root.iter("object"):
            ends = [_number(item.findtext(f"bndbox/{end}")) for end in ("xmin", "ymin", "xmax", "ymax")]
            is_whole = None not in ends
            box = [ends[0] - 1, ends[1] - 1, ends[2] - ends[0] + 1, ends[3] - ends[1] + 1] if is_whole else ends
            difficult = (item.findtext("difficult") or "0").strip() == "1"
            items.append({"category_id": (item.findtext("name") or "").strip(), "bbox": box, "iscrowd": int(difficult)})
        name = root.findtext("filename", "").strip() or own.stem
        yield str(own.with_suffix("")), {"file_name": _voc_image(name, own, images)} | size, items


def _is_own(path: Path) -> bool:
    """Whether a file is the user's: macOS writes `._a.jpg` beside `a.jpg` for what other disks cannot store."""
    return not path.name.startswith("._")


def read_utf8(path: Path) -> str:
    """Read a text file, without its byte order mark. Raises OSError, and ValueError where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}; save it as UTF-8, or remove it") from None


def _voc_image(name: str, own: Path, images: Path) -> str:
    """The file that `<filename>` of the XML file `own` means: some tools write it without its ending, or leave another
    image's there. Images may lie in the same subfolders as the XML files, or all in one."""
    endings = [ending for suffix in IMAGE_SUFFIXES for ending in (suffix, suffix.upper())]
    names = [name, *(start + ending for start in (name, own.stem) for ending in endings)]
    candidates = [*(str(own.parent / candidate) for candidate in names), *names]
    return next((candidate for candidate in candidates if os.path.isfile(images / candidate)), name)


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _yolo(folder: Path, images: Path, keypoints: int) -> Iterator[Item]:
    """YOLO: `class cx cy w h` or `class x1 y1 x2 y2 ...` per line, a file per image; without a file, no objects. Of
    pose labels, `class cx cy w h` and as many numbers as `keypoints` says, the box is read. A confidence may follow."""
    names = sorted(_names_below(images, IMAGE_SUFFIXES))
    for name in names:
        candidates = ((folder / name).with_suffix(suffix) for suffix in (".txt", ".TXT"))
        text = next((read_utf8(labels) for labels in candidates if labels.is_file()), None)
        image = {"file_name": str(name)} | ({"remark": NO_LABELS} if text is None else {})
        yield str(name.with_suffix("")), image, _yolo_objects(text or "", keypoints)
    stems = {name.with_suffix("") for name in names}
    without_image = (name for name in _names_below(folder, (".txt",)) if name.with_suffix("") not in stems)
    for name in sorted(without_image):  # to be counted, unless it is something else, such as classes.txt
        items = _yolo_objects((folder / name).read_text(encoding="utf-8", errors="replace"), keypoints)
        if any(not isinstance(item.get("bbox"), str) for item in items):
            yield str(name.with_suffix("")), {"file_name": str(name.with_suffix(""))}, items


def _names_below(folder: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    """Files with these endings, relative to a folder. Links to folders are followed last; no folder is read twice, and
    none below that is hidden or a system's own. Raises ValueError where one may not be read."""
    starts, seen = [folder], set()
    for start in starts:  # which grows
        for parent, folders, files in os.walk(start, onerror=_refuse):
            if (real := os.path.realpath(parent)) in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = [name for name in folders if not name.startswith(".") and name not in SYSTEM_FOLDERS]
            starts += [path for path in map(Path(parent).joinpath, folders) if path.is_symlink()]
            found = [path for path in map(Path(parent).joinpath, files) if path.suffix.lower() in suffixes]
            yield from (path.relative_to(folder) for path in found if _is_own(path))


def _refuse(error: OSError) -> None:
    """Raise instead of passing over a folder, as `os.walk` does: its images would be missing without a word."""
    way_out = "name a folder" if isinstance(error, NotADirectoryError) else "correct the path, or its permissions"
    raise ValueError(f"{error.filename}: {error.strerror}; {way_out}") from error


def _yolo_objects(text: str, keypoints: int) -> list[dict[str, Any]]:
    return [_yolo_object(line, keypoints) for line in text.splitlines() if line.strip()]


def _yolo_object(line: str, keypoints: int) -> dict[str, Any]:
    try:
        label, *coords = map(float, line.split())  # np.savetxt writes 1 as 1.0e+00
    except ValueError:
        label = math.nan
    if not label.is_integer():
        return {"category_id": None, "bbox": line}
    item: dict[str, Any] = {"category_id": int(label), "unit": 1}
    if len(coords) - 4 in (0, keypoints, 1, keypoints + 1):  # a model's own labels end in its confidence
        x, y, width, height = coords[:4]
        return item | {"bbox": [x - width / 2, y - height / 2, width, height]}
    # Beyond 1 are the visibilities of pose labels whose data.yaml is not there.
    is_outline = not keypoints and len(coords) >= 6 and len(coords) % 2 == 0 and max(coords) < 1.1
    return item | ({"segmentation": [coords]} if is_outline else {"bbox": line})


def _yolo_settings(labels: Path, given: Path | None) -> tuple[dict[Any, str], int]:
    """Class names, of the nearest file, and how many numbers of a line are keypoints (`kpt_shape` of data.yaml; 0: no
    pose labels)."""
    folders = [labels, *labels.resolve().parents[:2]]
    near = [folder / name for folder in folders for name in ("classes.txt", "data.yaml")]
    files = [*([given] if given else []), *(path for path in near if path.is_file())]
    if not files:
        raise ValueError(f"{labels}: no class names: neither classes.txt nor data.yaml is near it; pass --names FILE")
    path = files[0]
    described = next((file for file in files if file.suffix.lower() in YAML_SUFFIXES), None)
    settings = _yaml(described) if described else {}
    shape = settings.get("kpt_shape") or [0]
    if not isinstance(shape, list) or not all(type(number) is int for number in shape):
        raise ValueError(f"{described}: kpt_shape: must be [number of keypoints, numbers of each]; correct it")
    if path.suffix.lower() not in YAML_SUFFIXES:  # classes.txt, or obj.names of Darknet and CVAT
        return _class_names(path, enumerate(read_utf8(path).rstrip().splitlines())), math.prod(shape)
    found = settings.get("names")
    found = dict(enumerate(found)) if isinstance(found, list) else found
    if not isinstance(found, dict) or not all(str(key).isdecimal() for key in found):
        raise ValueError(f"{path}: names: must be a list, or a mapping from class number to name")
    return _class_names(path, found.items()), math.prod(shape)


def _class_names(path: Path, found: Iterable[tuple[Any, Any]]) -> dict[Any, str]:
    names = {int(key): name if isinstance(name, bool | None) else str(name).strip() for key, name in found}
    for number, name in names.items():
        if not _is_description(name):
            rule = f"{name!r} cannot be an object's description; write a name there, in YAML in quotes"
            raise ValueError(f"{path}: class {number}: {rule}")
    return names


def _yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(read_utf8(path))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {error}; correct it") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must be a mapping with names: [...]; correct it")
    return found


def _rex_omni(path: Path, images: Path, unit: int) -> Iterator[Item]:
    """Rex-Omni's JSON lines: {"image_name", "annotation": {"boxes": [{"bbox": [x0, y0, x1, y1], "phrase"}]}}."""
    for number, row in _json_lines(path):
        annotation = row.get("annotation")
        boxes = annotation.get("boxes") if isinstance(annotation, dict) else None
        if not _is_list_of_dicts(boxes):
            raise ValueError(f"{path}:{number}: no annotation.boxes of {{bbox, phrase}}; points are not supported")
        image = {"file_name": row.get("image_name")}
        if annotation.get("points"):
            image["unusable"] = "it has points, which are no boxes"
        yield str(number), image, [_object(b.get("phrase"), b.get("bbox")) for b in boxes]


def _swift(path: Path, images: Path, unit: int) -> Iterator[Item]:
    """ms-swift's lines of one image: `objects` {"ref": [...], "bbox": [...], "bbox_type"?}, `messages` or `query`."""
    for number, row in _json_lines(path):
        objects, name = row.get("objects") or {}, _only_image(row)
        if name is None:
            yield str(row.get("id", number)), NOT_ONE_IMAGE, []
            continue
        if not isinstance(objects, dict):
            rule = "objects must be {ref: [...], bbox: [...]}; a list of {desc, bbox_2d} needs no conversion"
            raise ValueError(f"{path}:{number}: {rule}")
        refs, boxes = objects.get("ref") or [], objects.get("bbox") or []
        if not isinstance(refs, list) or not isinstance(boxes, list):
            raise ValueError(f"{path}:{number}: ref and bbox of objects must be lists; correct the line")
        if len(refs) != len(boxes) and len(refs) != 1:
            raise ValueError(f"{path}:{number}: {len(refs)} ref entries for {len(boxes)} bbox entries; pair them")
        kind = objects.get("bbox_type") or "real"
        if kind not in ("real", "norm1"):
            rule = f"objects.bbox_type: {kind!r} is not 'real' (pixels) or 'norm1' (fractions)"
            raise ValueError(f"{path}:{number}: {rule}; convert its boxes to one of these")
        unit = 1 if kind == "norm1" else 0
        pairs = zip(itertools.repeat(refs[0]) if len(refs) == 1 else refs, boxes, strict=False)
        turns = _turns(row, "messages", f"{path}:{number}")
        answers = [turn for turn in turns if _role(turn) == "assistant"]
        image = {"file_name": name} | _question(turns, refs)
        if not refs and not boxes and not (_says_nothing(answers[-1]) if answers else row.get("objects") is not None):
            image["unusable"] = "it has no objects, and does not say that there are none"
        yield str(row.get("id", number)), image, [_object(ref, box, unit) for ref, box in pairs]


def _question(turns: list[dict[str, Any]], refs: list[Any]) -> dict[str, Any]:
    """`messages` before the answer, each `<ref-object>` replaced by the next name; or why they are `unusable`."""
    turns = list(turns)
    while turns and _role(turns[-1]) == "assistant":
        turns.pop()
    if not turns:
        return {}
    if not all(map(_is_text, turns)):
        return {"unusable": NOT_TEXT}
    if rule := _unknown_role(turns):
        return {"unusable": rule}
    turns = [{"role": _role(turn), "content": _text(turn)} for turn in turns]
    if any(turn["role"] == "assistant" for turn in turns):
        return {"unusable": "several questions, and nothing says which objects answer which"}
    names = iter(map(str, refs))
    for turn in turns:
        turn["content"] = re.sub("<ref-object>", lambda marker: next(names, marker[0]), turn["content"])
    if any(re.search("<ref-object>|<bbox>|<video>|<audio>", turn["content"]) for turn in turns):
        return {"unusable": "its question holds a marker that nothing replaces"}
    return {"messages": turns}


def _sharegpt(path: Path, images: Path, unit: int) -> Iterator[Item]:
    """LLaMA-Factory's and ShareGPT's conversations, whose answers hold boxes as text: JSON with `bbox_2d` and `label`,
    or the reference and box marks of Qwen-VL, Qwen2-VL, InternVL and Rex-Omni. Each question with its answer is one."""
    for number, row in _json_lines(path):
        where, row_id = f"{path}:{number}", str(row.get("id", number))
        turns = _turns(row, "conversations" if row.get("conversations") else "messages", where)
        name, system = _only_image(row), [turn for turn in turns if _role(turn) == "system"]
        if name is None:
            yield row_id, NOT_ONE_IMAGE, []
            continue
        turns = [turn for turn in turns if _role(turn) != "system"]
        ends = [at for at, turn in enumerate(turns) if _role(turn) == "assistant"]
        if not ends:
            yield row_id, {"file_name": name, "unusable": "no answer"}, []
        for begin, end in zip([0, *(at + 1 for at in ends)], ends, strict=False):
            answer, image = _text(turns[end]), {"file_name": name}
            messages = [{"role": _role(turn), "content": _text(turn)} for turn in (*system, *turns[begin:end])]
            if begin < end:
                image["messages"] = messages
            found, unread = list(_boxes_in(answer)), _MARK.search(_REFERENCE.sub("", answer))
            if not all(map(_is_text, turns[begin : end + 1])):
                image["unusable"] = NOT_TEXT
            elif rule := _unknown_role(turns[begin:end]):
                image["unusable"] = rule
            elif unread or len(found) < len(_SPELT.findall(answer)) or answer.count("[") != answer.count("]"):
                image["unusable"] = "its answer spells boxes that cannot be read"
            elif not found and not _says_nothing(turns[end]):
                image["unusable"] = "its answer spells no box"
            objects = [_object(label, box, unit) for label, box in found]
            yield row_id if len(ends) == 1 else f"{row_id}.{ends.index(end) + 1}", image, objects


def _turns(row: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    """The turns of a conversation, however it is written: a list, or ms-swift's `query`, `response` and `history`. The
    column `system` goes first unless a turn says it."""
    turns = row.get(key) or []
    if not _is_list_of_dicts(turns):
        rule = "conversations must be a list of {from, value}, or messages one of {role, content}"
        raise ValueError(f"{where}: {rule}; correct the line")
    if not turns and row.get("query"):
        pairs = row.get("history") or []
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise ValueError(f"{where}: history must be a list of [query, response]; correct the line")
        texts = [*itertools.chain.from_iterable(pairs), row["query"], row.get("response")]
        roles = itertools.cycle(("user", "assistant"))
        turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False) if text is not None]
    if row.get("system") and [_role(turn) for turn in turns if _role(turn) != "assistant"][:1] == ["user"]:
        turns = [{"role": "system", "content": row["system"]}, *turns]
    return turns


def _is_list_of_dicts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _role(turn: dict[str, Any]) -> str:
    speaker = str(turn.get("from", turn.get("role")))
    return {"human": "user", "gpt": "assistant"}.get(speaker, speaker)


def _unknown_role(turns: Sequence[dict[str, Any]]) -> str | None:
    """Why a question cannot be asked: somebody speaks in it who has no role in training."""
    known = ("system", "user", "assistant", "tool")
    other = next((role for role in map(_role, turns) if role not in known), None)
    return None if other is None else f"a turn is said by {other:.40}, which is no role in training"


def _text(turn: dict[str, Any]) -> str:
    """Text of a turn, whose content may be a list of parts."""
    content = turn.get("value", turn.get("content"))
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _is_text(turn: dict[str, Any]) -> bool:
    """Whether a turn is a text or a list of parts, not the boxes themselves, for one."""
    content = turn.get("value", turn.get("content"))
    parts = content if isinstance(content, list) else []
    return isinstance(content, str | list) and all(isinstance(p, dict) and p.keys() & {"type", "text"} for p in parts)


def _says_nothing(turn: dict[str, Any]) -> bool:
    """Whether an answer says that there are no objects: it is empty, or an empty list."""
    return _is_text(turn) and _EMPTY.fullmatch(_text(turn)) is not None


def _json_values_in(text: str) -> Iterator[Any]:
    """Each JSON list or object in a text, in fences or between words."""
    at = 0
    while found := _OPENED.search(text, at):
        try:
            value, at = _JSON.raw_decode(text, found.start())
            yield value
        except (ValueError, RecursionError):
            at = found.end()


def _boxes_in(text: str) -> Iterator[tuple[Any, Any]]:
    """(label, [x1, y1, x2, y2]) of each box that an answer spells; None for what an object of its list lacks."""
    for value in _json_values_in(text):
        rows = [row for row in (value if isinstance(value, list) else [value]) if isinstance(row, dict)]
        if any("bbox_2d" in row for row in rows):
            yield from ((row.get("label"), row.get("bbox_2d")) for row in rows)
    for label, boxes in _REFERENCE.findall(text):
        numbers = [float(number) for box in _BOX.findall(boxes) for number in _NUMBER.findall(box)]
        for start in range(0, len(numbers), 4):
            yield label, numbers[start : start + 4]


def _object(label: Any, box: Any, unit: int = 0) -> dict[str, Any]:
    """[x1, y1, x2, y2] as COCO's box; six numbers or more are a polygon. What is neither is left out by name later."""
    item: dict[str, Any] = {"category_id": label.strip() if isinstance(label, str) else None, "unit": unit}
    is_numbers = isinstance(box, list) and all(type(number) in (int, float) for number in box)
    if is_numbers and len(box) == 4:
        return item | {"bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]]}
    return item | ({"segmentation": [box]} if is_numbers and len(box) >= 6 else {"bbox": str(box)})


def _only_image(row: dict[str, Any]) -> str | None:
    images = row.get("images", row.get("image"))
    images = images if isinstance(images, list) else [images]
    name = images[0].get("path") if images and isinstance(images[0], dict) else images[0] if images else None
    return name if len(images) == 1 and isinstance(name, str) else None


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, row) of a JSON-lines file, where it is the line's, or of a file that holds one JSON list."""
    with path.open(encoding="utf-8-sig") as file:
        try:
            first = next((line for line in file if line.strip()), "")
            file.seek(0)
            if first.lstrip().startswith("["):
                rows = enumerate(json.load(file), 1)
            else:
                rows = (
                    (number, _json_line(f"{path}:{number}", line))
                    for number, line in enumerate(file, 1)
                    if line.strip()
                )
            for number, row in rows:
                if not isinstance(row, dict):
                    raise ValueError(f"{path}:{number}: must be a JSON object")
                yield number, row
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not valid JSON: {error}") from None
        except UnicodeDecodeError as error:
            hint = other_encoding(path.read_bytes()[:2]) or "; save it as UTF-8"
            raise ValueError(f"{path}: not UTF-8: {error}{hint}") from None


def _json_line(where: str, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None


# Each takes the annotations, the folder of the images, and `unit` (sharegpt) or the number of keypoint values (yolo).
READERS: dict[str, Callable[[Path, Path, int], Iterator[Item]]] = {
    "voc": _voc,
    "yolo": _yolo,
    "swift": _swift,
    "sharegpt": _sharegpt,
    "rex-omni": _rex_omni,
}
