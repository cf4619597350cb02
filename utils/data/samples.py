"""Read JSONL files into samples: our own format and ms-swift's (DAT-1 to DAT-3).

Every mistake in the files is found before training, and all are reported together. `utils.data.stream` orders the
samples; `utils.data.encoding` makes token ids and pixels of them.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
import re
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any, TypeVar

from utils.answer_format import COORD_TOKENS, AnswerFormat
from utils.data.images import image_size
from utils.data.mistakes import BadLine
from utils.data.prompts import IMAGE_MARKER, to_chat_messages
from utils.geometry import MAX_BIN, Grid, Object, bounding_box, normal_label, pixels_to_bins

logger = logging.getLogger(__name__)

# Annotation tools round outwards: a point at most this far outside the image is clamped, any other is a mistake.
EDGE_TOLERANCE_PX = 0.5
EDGE_TOLERANCE = 1e-3  # of fractions (norm1): rounded centres and sizes add up to a little more than 1
# A description that spells a special token would change the structure of the response.
SPECIAL_TOKEN = re.compile(r"<\|[^|>]*\|>")
# JSON escapes can spell lone surrogates, which no tokenizer accepts and no file can hold.
SURROGATE = re.compile("[\ud800-\udfff]")
MAX_SHOWN = 50  # mistakes in one error message
FROM_COCO = "python -m tools.convert --from coco"
FORMAT_KEYS = frozenset({"id", "images", "width", "height", "objects", "messages", "prompt", "annotated"})

Item, Result = TypeVar("Item"), TypeVar("Result")


class DataError(Exception):
    """Mistakes in data files; `problems` lists them as `file:line: reason`, in order.

    The text has the first `MAX_SHOWN`; `more`: how many there are besides `problems`, and where they are listed.
    """

    def __init__(self, problems: Sequence[str], more: int = 0, listed: str = ""):
        self.problems = list(problems)
        more += max(len(problems) - MAX_SHOWN, 0)
        super().__init__("\n".join(self.problems[:MAX_SHOWN] + [f"... and {more} more{listed}"] * (more > 0)))


@dataclass(frozen=True)
class Sample:
    """One image (or several) with its prompt and its ground truth.

    `images` are absolute paths or `data:` URIs, `image_sizes` their (height, width) as opened. `objects` are in bins of
    `width` x `height` on the answer format's grid. `messages` are the prompt only, as strings with `<image>` markers.
    `source` is "file:line". `extra` holds all other keys of the line unchanged, for rewards: `domain`, `summary` and
    any of the user's own. `annotated` are the labels for which annotation is complete, as `normal_label` gives them;
    None: all (TGT-12). `teacher_forced_ratio` is that of the file, if it has its own (DAT-5).
    `grid` is the largest x and y of `objects`.
    """

    id: str
    images: list[str]
    image_sizes: list[tuple[int, int]]
    width: int
    height: int
    objects: list[Object]
    messages: list[dict[str, str]]
    source: str
    extra: dict[str, Any] = field(default_factory=dict)
    annotated: frozenset[str] | None = None
    teacher_forced_ratio: float | None = None
    grid: Grid = (MAX_BIN, MAX_BIN)

    @property
    def size_px(self) -> tuple[int, int]:
        """(width, height) of the first image as opened, which `width` and `height` need not be; theirs without one."""
        if not self.image_sizes:
            return self.width, self.height
        height, width = self.image_sizes[0]
        return width, height


def load_samples(
    paths: Sequence[str | os.PathLike],
    prompt: str | None = None,
    object_order: str = "file",
    skipped: list[BadLine] | None = None,
    reader: LineReader | None = None,
) -> list[list[Sample]]:
    """Read the samples of each file, in file order.

    Args:
        prompt, object_order: of the `LineReader` where none is given.
        skipped: receives the lines that cannot be used; None makes any such line an error.
        reader: if its format has no polygons, each becomes the tightest box around it, and one warning counts them.

    Raises:
        DataError: with every problem of every file; with `skipped`, only of files that are unreadable or leave no
            sample.
    """
    reader = reader or LineReader(prompt, object_order)
    datasets, problems = [], []
    for path in paths:
        samples, bad = [], []
        for item in read_samples(path, reader=reader):
            (samples if isinstance(item, Sample) else bad).append(item)
        datasets.append(samples)
        if skipped is None or not samples or any(line.line == 0 for line in bad):
            problems.extend(message for line in bad for message in line.messages())
        else:
            skipped.extend(bad)
    if problems:
        raise DataError(problems)
    objects = [obj for samples in datasets for sample in samples for obj in sample.objects]
    warn_of_polygons(sum(obj.kind == "poly" for obj in objects), len(objects), reader.form)
    return [list(map(reader.as_expressible, samples)) for samples in datasets]


def warn_of_polygons(num_polygons: int, num_objects: int, form: AnswerFormat) -> None:
    """Warn once for all files if the answer format has no polygons."""
    if num_polygons and "poly" not in form.kinds:
        warning = (
            "%d of %d objects are polygons, which answer_format: %s cannot express; each becomes the box around it"
        )
        logger.warning(warning, num_polygons, num_objects, form.name)


@dataclass(frozen=True)
class LineReader:
    """How a line becomes a sample; picklable.

    Attributes:
        prompt: for lines with neither `prompt` nor `messages`.
        object_order: "file" or "sorted": top to bottom, then left to right, by the upper left corner.
        form: coordinates are mapped to its grid.
        grid_of: the grid of an image of a given height and width, where it depends on that; ValueError where it has
            none. See `utils.data.encoding.grid_of`.
        special: words that no label may hold. See `utils.data.encoding.special_words`.
        needs_objects: a line must have `objects`, though it has a `summary`: without them nothing would count as there.
    """

    prompt: str | None = None
    object_order: str = "file"
    form: AnswerFormat = COORD_TOKENS
    grid_of: Callable[[int, int], Grid] | None = None
    special: tuple[str, ...] = ()
    needs_objects: bool = False

    def __post_init__(self) -> None:
        if self.object_order not in ("file", "sorted"):
            raise ValueError(f"object_order={self.object_order!r}: must be 'file' or 'sorted'")
        if self.form.in_pixels and self.grid_of is None:
            raise ValueError(f"answer_format: {self.form.name} needs the processor, which knows resized sizes")

    def read(
        self, path: str | os.PathLike, number: int, line: bytes, sizes: list[tuple[int, int]] | None = None
    ) -> Sample | BadLine:
        """Read line `number` of the file at `path`, with polygons. `sizes`: its images' sizes (height, width), if they
        are known; else the images are decoded, which finds those that are cut off."""
        try:
            sample = _read_sample(_parse_line(line, number), str(path), number, self, sizes)
            self._check_labels(sample.objects)
        except _Mistake as mistake:
            return BadLine(str(path), number, mistake.problems)
        if self.object_order == "sorted":
            sample.objects.sort(key=lambda item: (bounding_box(item)[1], bounding_box(item)[0]))
        return sample

    def _check_labels(self, objects: Sequence[Object]) -> None:
        tags = ", ".join(self.form.tags)
        ours = f"holds one of {tags}, which answer_format: {self.form.name} writes around labels; reword it"
        special = "spells a special token of the model's tokenizer; reword it"
        problems = [
            ("desc", f"objects[{i}].desc: {obj.desc!r} {rule}")
            for words, rule in ((self.form.tags, ours), (self.special, special))
            for i, obj in enumerate(objects)
            if any(word in obj.desc for word in words)
        ]
        if problems:
            raise _Mistake(problems=problems)

    def as_expressible(self, sample: Sample) -> Sample:
        """The sample with a box for each polygon if the answer format has no polygons."""
        if "poly" in self.form.kinds:
            return sample
        return replace(sample, objects=[replace(o, kind="bbox_2d", coords=bounding_box(o)) for o in sample.objects])


def read_samples(
    path: str | os.PathLike,
    prompt: str | None = None,
    only: Container[int] | None = None,
    reader: LineReader | None = None,
) -> Iterator[Sample | BadLine]:
    """Yield a sample or a bad line for each line of a file that is not blank, in order, with few lines in memory.

    A file that is unreadable or has only blank lines yields one `BadLine` of line 0. `only`: the line numbers to read.
    `reader`: by default one with this `prompt`.
    """
    reader = reader or LineReader(prompt)
    is_empty = True

    def lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
        nonlocal is_empty
        for number, line in enumerate(file, start=1):
            if line.strip():
                is_empty = False
                if only is None or number in only:
                    yield number, line.rstrip(b"\r\n")

    try:
        with open(path, "rb") as file:
            # Threads, because most of the time goes into images, often on a network disk; decoders run side by side.
            yield from map_ahead(lambda item: reader.read(path, *item), lines(file))
    except OSError as error:
        yield unreadable_file(path, error)
        return
    if is_empty:
        yield empty_file(path)


def empty_file(path: str | os.PathLike) -> BadLine:
    """What is wrong with a file of blank lines."""
    return BadLine(str(path), 0, [("file", "the file is empty; it needs at least one sample")])


def unreadable_file(path: str | os.PathLike, error: OSError) -> BadLine:
    """What is wrong with a file that cannot be opened."""
    return BadLine(str(path), 0, [("file", f"cannot be read: {error.strerror or error}")])


def map_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], num_threads: int = 8, max_ahead: int = 64
) -> Iterator[Result]:
    """`map` in threads, in order, which never holds more than `max_ahead` items or results."""
    with ThreadPoolExecutor(num_threads) as pool:
        pending: deque[Future[Result]] = deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) == max_ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


# ---- one line ------------------------------------------------------------------------------------------------------


class _Mistake(Exception):
    """Why a line cannot be used: one (class of `mistakes.KINDS`, reason) pair, or several as `problems`."""

    def __init__(self, kind: str = "", reason: str = "", problems: Sequence[tuple[str, str]] = ()):
        self.problems = list(problems) or [(kind, reason)]


def other_encoding(start: bytes) -> str:
    """What to do about a file that begins so, where that is plain; for messages."""
    if start.startswith(b"\x1f\x8b"):
        return "; it is compressed, unpack it first"
    return "; it is UTF-16, save it as UTF-8" if start.startswith((b"\xff\xfe", b"\xfe\xff")) else ""


def _parse_line(line: bytes, number: int) -> dict[str, Any]:
    def no_constant(name: str) -> float:
        raise ValueError(f"{name} is not a JSON number")

    text = ""
    try:
        text = line.decode("utf-8-sig")
        row = json.loads(text, parse_constant=no_constant, object_pairs_hook=_with_unique_keys)
    except UnicodeDecodeError as error:
        raise _Mistake("json", f"not UTF-8 at byte {error.start}{other_encoding(line)}") from None
    except (ValueError, RecursionError) as error:
        is_one = number == 1 and text.strip() in ("{", "[")
        hint = f"; the file looks like one JSON text, not one sample per line. Is it COCO? convert it: {FROM_COCO}"
        raise _Mistake("json", f"not valid JSON: {error}{hint * is_one}") from None
    if not isinstance(row, dict):
        hint = "; write each object of the list on a line of its own (jq -c '.[]' does)" * isinstance(row, list)
        raise _Mistake("json", f"a sample is one JSON object, not {_json_type(row)}{hint}")
    if b"\\ud" in line.lower() and SURROGATE.search(json.dumps(row, ensure_ascii=False)):
        raise _Mistake("json", "half a character: an escape \\ud800 to \\udfff without its other half")
    return row


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # json takes the last and says nothing
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _Mistake("json", f"{twice!r} is given twice; which one counts?")
    return found


def _read_sample(
    row: dict[str, Any], path: str, number: int, reader: LineReader, sizes: list[tuple[int, int]] | None
) -> Sample:
    """Read every part even if another is wrong, so that one run reports all mistakes of a line."""
    if {"images", "annotations"} <= row.keys() and not {"objects", "summary"} & row.keys():
        raise _Mistake("file", f"looks like COCO; convert it: {FROM_COCO}")
    problems: list[tuple[str, str]] = []
    base, source = Path(path).absolute().parent, f"{path}:{number}"

    def read_part(read: Callable[..., Any], *args: Any, default: Any = None) -> Any:
        try:
            return read(*args)
        except _Mistake as mistake:
            problems.extend(mistake.problems)
            return default

    messages, inside = read_part(_read_messages, row, reader.prompt, default=(None, []))
    images = read_part(_read_images, row, inside, base)
    if sizes is None and images is not None:
        sizes = read_part(_image_sizes, images)
    size = read_part(_read_size, row, sizes)
    grid = read_part(_grid, reader, sizes, default=(MAX_BIN, MAX_BIN))
    objects = read_part(_read_objects, row, sizes, size, grid, reader.needs_objects)
    sample_id = read_part(_read_id, row, source)
    annotated = read_part(_read_annotated, row)
    if messages is not None and images is not None:
        try:
            to_chat_messages(messages, len(images))
        except ValueError as error:
            problems.append(("messages", f"messages: {error}"))
    if problems:
        raise _Mistake(problems=problems)
    extra = {key: value for key, value in row.items() if key not in FORMAT_KEYS}
    return Sample(sample_id, images, sizes, *size, objects, messages, source, extra, annotated, grid=grid)


def _grid(reader: LineReader, sizes: list[tuple[int, int]] | None) -> Grid:
    """The grid of a line's objects: by the first image's size where that decides."""
    if reader.grid_of is None or not sizes:
        return (reader.form.max_bin, reader.form.max_bin)
    try:
        grid = reader.grid_of(*sizes[0])
    except ValueError as error:
        raise _Mistake("size", f"the image cannot be resized: {error}") from None
    if max(grid) > (limit := reader.form.max_bin):
        rule = f"and {reader.form.name} writes none above {limit}; lower model.image_max_pixels"
        raise _Mistake("size", f"the model sees the image with coordinates up to {max(grid)}, {rule}")
    return grid


def _read_annotated(row: dict[str, Any]) -> frozenset[str] | None:
    value = row.get("annotated")
    if value is None:  # a misspelt one would make the line complete for all labels
        for key in difflib.get_close_matches("annotated", row.keys() - FORMAT_KEYS, 1, cutoff=0.87):
            raise _Mistake("annotated", f"{key}: unknown key; did you mean annotated? Otherwise give it another name")
        return None
    if not isinstance(value, list) or not all(isinstance(label, str) for label in value):
        raise _Mistake("annotated", "annotated: must be a list of labels; leave it out where annotation is complete")
    return frozenset(map(normal_label, value))


def labels_in_both(line_labels: frozenset[str] | None, file_labels: frozenset[str] | None) -> frozenset[str] | None:
    """Labels for which both a line and its file's entry in the config say that annotation is complete; None: all."""
    if line_labels is None or file_labels is None:
        return file_labels if line_labels is None else line_labels
    return line_labels & file_labels


def _read_id(row: dict[str, Any], source: str) -> str:
    value = row.get("id")
    if value is None:
        return source
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _Mistake("id", f"id: must be a string, not {_json_type(value)}")
    return str(value)


def _read_messages(row: dict[str, Any], prompt: str | None) -> tuple[list[dict[str, str]], list[Any]]:
    """Return the prompt's messages as strings with markers, and the images inside their content lists.

    Responses at the end, which supervised data carries, are dropped: rollouts make their own.
    """
    given, own_prompt = row.get("messages"), row.get("prompt")
    if own_prompt is not None and not isinstance(own_prompt, str):
        raise _Mistake("prompt", f"prompt: must be a string, not {_json_type(own_prompt)}")
    if given is None:
        if own_prompt is None:
            _refuse_other_prompts(row)
        text = own_prompt if own_prompt is not None else prompt
        if not text:
            raise _Mistake("prompt", "no prompt: neither the line (messages, prompt) nor data.prompt in the config")
        return [{"role": "user", "content": text}], []
    if own_prompt is not None:
        raise _Mistake("prompt", "prompt: a line has either messages or prompt, not both")
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise _Mistake("messages", "messages: must be a list of {role, content}")
    images: list[Any] = []
    messages = [{"role": message.get("role"), "content": _flat_content(message, images)} for message in given]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise _Mistake("messages", "messages: there is no user message")
    return messages, images


def _refuse_other_prompts(row: dict[str, Any]) -> None:
    """A question under another key would be left out, and the config's asked in its place."""
    for key in row.keys() - FORMAT_KEYS:
        if key in ("query", "system", "history", "conversations"):
            kind = "sharegpt" if key == "conversations" else "swift"
            way_out = f"write it as messages, as tools.convert --from {kind} does"
            raise _Mistake("prompt", f"{key}: is not read; {way_out}, or give it another name")
        for meant in difflib.get_close_matches(key.lower(), ("prompt", "messages"), 1, cutoff=0.87):
            raise _Mistake("prompt", f"{key}: unknown key; did you mean {meant}? Otherwise give it another name")


def _flat_content(message: dict[str, Any], images: list[Any]) -> str:
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "user", "assistant", "tool"):
        raise _Mistake("messages", f"messages: role {role!r} is not one of system, user, assistant, tool")
    if isinstance(content, list):
        content = "".join(_flat_part(part, images) for part in content)
    if not isinstance(content, str):
        raise _Mistake("messages", f"messages: content must be a string or a list of parts, not {_json_type(content)}")
    for marker in ("<ref-object>", "<bbox>", "<video>", "<audio>"):
        if marker in content and role != "assistant":
            reason = f"messages: the marker {marker} is not supported in a prompt; write out what it stands for"
            raise _Mistake("messages", reason)
    return content


def _flat_part(part: Any, images: list[Any]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind == "image":
        if part.get("image") is not None:
            images.append(part["image"])
        return IMAGE_MARKER
    if kind == "image_url":
        url = part.get("image_url")
        images.append(url.get("url") if isinstance(url, dict) else url)
        return IMAGE_MARKER
    raise _Mistake("messages", f"messages: the part {json.dumps(part)[:80]} is neither text nor image")


def _read_images(row: dict[str, Any], inside: list[Any], base: Path) -> list[str]:
    given = row.get("images")
    if given is None and not inside:
        raise _Mistake("images", f"images: missing (the line has {_keys(row)}); [] for a text sample")
    if given and inside:
        raise _Mistake("images", "images: given both as a list and inside the messages")
    if given is None or given == []:
        given = inside
    if not isinstance(given, list):
        raise _Mistake("images", f"images: must be a list, not {_json_type(given)}")
    return [_read_image(image, i, base) for i, image in enumerate(given)]


def _read_image(image: Any, index: int, base: Path) -> str:
    """Return an entry of `images` (path, data URI or ms-swift's {"path", "bytes"}) as an absolute path or data URI."""
    if isinstance(image, dict):
        if isinstance(image.get("bytes"), str):
            return f"data:image;base64,{image['bytes']}"
        image = image.get("path")
    if not isinstance(image, str) or not image:
        raise _Mistake("images", f"images[{index}]: must be a path, not {_json_type(image)}")
    if image.startswith("data:"):
        return image
    if re.match(r"https?://", image):
        raise _Mistake("images", f"images[{index}]: {image}: data files name local images only; download it first")
    return str((base / image.removeprefix("file://")).absolute())


def _image_sizes(images: list[str]) -> list[tuple[int, int]]:
    sizes, problems = [], []
    for i, image in enumerate(images):
        try:
            sizes.append(image_size(image, decode=True))
        except OSError as error:
            kind = "image_missing" if isinstance(error, FileNotFoundError) else "image_unreadable"
            problems.append((kind, f"images[{i}]: {error}"))
    if problems:
        raise _Mistake(problems=problems)
    return sizes


def _read_size(row: dict[str, Any], sizes: list[tuple[int, int]] | None) -> tuple[int, int] | None:
    """Return (width, height) of the line, else of its only image, else (0, 0); None if that image cannot be read.

    Coordinates are parts of the given size, whatever the image's own: it may have been resized, or 1000 x 1000 may say
    that they are thousandths. Only one of the image's form lying on its side is refused.
    """
    given = (row.get("width"), row.get("height"))
    if given == (None, None):
        if sizes is None:
            return None
        return sizes[0][::-1] if len(sizes) == 1 else (0, 0)
    pairs = zip(("width", "height"), given, strict=True)
    if wrong := [pair for pair in pairs if type(pair[1]) is not int or not 0 < pair[1] < 2**31]:
        rule = "must be a positive integer below 2**31, not"
        raise _Mistake(problems=[("size", f"{name}: {rule} {json.dumps(value)[:80]}") for name, value in wrong])
    if sizes is not None and len(sizes) == 1 and _lies_on_its_side(*given, *sizes[0]):
        found = f"{given[0]} x {given[1]}, but the image is {sizes[0][1]} x {sizes[0][0]} as training shows it"
        raise _Mistake("size", f"width, height: {found} (EXIF turned it?); write its size, and coordinates that fit it")
    return given


def _lies_on_its_side(width: int, height: int, image_height: int, image_width: int) -> bool:
    """Whether a size is an image's own with its sides swapped, or has such a form, to 1 %, where that is no square."""
    if (width, height) == (image_height, image_width):
        return width != height
    is_swapped = math.isclose(width * image_width, height * image_height, rel_tol=0.01)
    return is_swapped and not math.isclose(width * image_height, height * image_width, rel_tol=0.01)


def _read_objects(
    row: dict[str, Any], sizes: list | None, size: tuple[int, int] | None, grid: Grid, needs_objects: bool
) -> list[Object]:
    """Read all objects. `sizes` and `size` are None where their source is wrong and has been reported."""
    given = row.get("objects", [] if "summary" in row and not needs_objects else None)
    if given is None:
        keys = ", ".join(sorted(row))
        raise _Mistake("objects", f"objects: missing; write [] for an image without objects (the line has {keys:.200})")
    if isinstance(given, dict):
        items = _swift_objects(given, sizes, size)
    elif isinstance(given, list):
        items = [(item, size) for item in given]
    else:
        raise _Mistake("objects", f"objects: must be a list, not {_json_type(given)}")
    objects, problems = [], []
    for i, (item, extent) in enumerate(items):
        try:
            objects.append(_read_object(item, extent, grid))
        except _Mistake as mistake:
            problems.extend((kind, f"objects[{i}]{reason}") for kind, reason in mistake.problems)
    if problems:
        raise _Mistake(problems=problems)
    _refuse_fractions([item for item, extent in items if extent is not None and min(extent) > 2])
    return objects


def _refuse_fractions(items: Sequence[dict[str, Any]]) -> None:
    """Raise for coordinates that are meant as parts of the sides. A tiny box at the corner looks the same, but then
    others of its line do not."""
    numbers = [item.get("bbox_2d") or item["poly"] for item in items]
    if max(chain.from_iterable(numbers), default=0) > 2:
        return
    for i, (item, own) in enumerate(zip(items, numbers, strict=True)):
        if all(0 <= x <= 1 for x in own) and not all(float(x).is_integer() for x in own):
            kind = "bbox_2d" if "bbox_2d" in item else "poly"
            rule = "coordinates are pixels, or in units of the line's width and height"
            raise _Mistake("geometry", f"objects[{i}].{kind}: {own} looks like fractions of the sides; {rule}")


def _swift_objects(given: dict[str, Any], sizes: list | None, size: tuple[int, int] | None) -> list[tuple[dict, Any]]:
    """Turn ms-swift's {"ref": [...], "bbox": [[...]], "bbox_type"?, "image_id"?} into pairs (our object, its extent).

    One `ref` may name several boxes. Four numbers are a box, six or more a polygon. `bbox_type: norm1` means fractions.
    """
    refs, boxes = given.get("ref"), given.get("bbox")
    if not isinstance(refs, list) or not isinstance(boxes, list):
        raise _Mistake("objects", 'objects: must be a list, or {"ref": [...], "bbox": [[...]]}')
    if len(refs) == 1 and boxes:
        refs = refs * len(boxes)
    if len(refs) != len(boxes):
        raise _Mistake("objects", f"objects: {len(refs)} ref entries for {len(boxes)} bbox entries; pair them")
    kind = given.get("bbox_type") or "real"
    if kind not in ("real", "norm1"):
        raise _Mistake("objects", f"objects.bbox_type: {kind!r} is not 'real' (pixels) or 'norm1' (fractions)")
    image_ids = given.get("image_id") or []
    if not isinstance(image_ids, list):
        raise _Mistake("objects", f"objects.image_id: must be a list, not {_json_type(image_ids)}")
    objects = []
    for ref, box, image_id in zip(refs, boxes, chain(image_ids, repeat(0)), strict=False):
        item = {"desc": ref, "poly" if isinstance(box, list) and len(box) >= 6 else "bbox_2d": box}
        extent = size
        if kind == "norm1":
            extent = (1.0, 1.0)
        elif image_id != 0 or sizes is not None and len(sizes) > 1:
            if sizes is None or not isinstance(image_id, int) or not 0 <= image_id < len(sizes):
                raise _Mistake("objects", f"objects.image_id: there is no image {image_id!r}")
            extent = sizes[image_id][::-1]
        objects.append((item, extent))
    return objects


def _read_object(item: Any, size: tuple[int, int] | None, grid: Grid) -> Object:
    if not isinstance(item, dict):
        raise _Mistake("objects", f": must be an object, not {_json_type(item)}")
    desc = item.get("desc")
    if "desc" not in item:
        raise _Mistake("desc", f".desc: missing (the object has {_keys(item)}); it is the object's label")
    if not isinstance(desc, str) or not desc.strip():
        raise _Mistake("desc", ".desc: must be a non-empty string")
    if SPECIAL_TOKEN.search(desc):
        raise _Mistake("desc", f".desc: {desc!r} spells a special token")
    kinds = [kind for kind in ("bbox_2d", "poly") if kind in item]
    if len(kinds) != 1:
        found = " and ".join(kinds) or f"neither (the object has {_keys(item)})"
        raise _Mistake("geometry", f": needs exactly one of bbox_2d and poly, has {found}")
    kind, numbers = kinds[0], item[kinds[0]]
    if not isinstance(numbers, list) or not all(type(x) in (int, float) and abs(x) < math.inf for x in numbers):
        raise _Mistake("geometry", f".{kind}: must be a list of numbers")
    if kind == "bbox_2d" and len(numbers) != 4:
        raise _Mistake("geometry", f".bbox_2d: must have 4 numbers, has {len(numbers)}")
    if kind == "poly" and (len(numbers) < 6 or len(numbers) % 2):
        raise _Mistake("geometry", f".poly: must have an even number of numbers, at least 6, has {len(numbers)}")
    if kind == "bbox_2d" and (numbers[0] > numbers[2] or numbers[1] > numbers[3]):
        hint = f"; COCO's [x, y, width, height]? use {FROM_COCO}" * _fits_as_coco(numbers, size)
        raise _Mistake("geometry", f".bbox_2d: {numbers} is not [x1, y1, x2, y2] with x1 <= x2 and y1 <= y2{hint}")
    if size is None:
        return Object(desc, kind, ())  # never used: the line is rejected for another reason
    if size == (0, 0):
        raise _Mistake("size", ": there is no image size; the line needs width and height")
    width, height = size
    slack = EDGE_TOLERANCE if width == 1.0 else EDGE_TOLERANCE_PX
    if not all(-slack <= x <= limit + slack for x, limit in zip(numbers, cycle(size), strict=False)):
        raise _Mistake("outside", f".{kind}: {numbers} lies outside the image of {width} x {height}")
    return Object(desc, kind, pixels_to_bins(numbers, width, height, grid))


def _fits_as_coco(box: Sequence[float], size: tuple[int, int] | None) -> bool:
    """Tell whether [x, y, width, height] lies in the image. A box that is not turned but too large never does."""
    x, y, width, height = box
    return size is not None and min(x, y) >= 0 < min(width, height) and x + width <= size[0] and y + height <= size[1]


def _keys(value: dict[str, Any]) -> str:
    return ", ".join(map(repr, value)) or "nothing"


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
