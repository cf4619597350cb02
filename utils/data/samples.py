"""From JSONL files to samples, to an endless stream of them, to encoded prompts.

Owns the data format (DAT-1 to DAT-3) and the order of samples (LRN-1). Everything wrong with the files is found before
training and reported together. The text of the prompt is `utils.data.prompts`' work; batches are the trainer's.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import logging
import math
import os
import re
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from utils.answer_format import COORD_TOKENS, AnswerFormat
from utils.data.bad_lines import BadLine
from utils.data.images import to_rgb
from utils.data.prompts import IMAGE_MARKER, render_prompt, to_chat_messages
from utils.geometry import Object, bounding_box, pixels_to_bins

logger = logging.getLogger(__name__)

# Annotation tools round outwards; what lies at most this far outside the image is clamped, the rest is a mistake.
EDGE_TOLERANCE_PX = 0.5
# A description that spells a token of the vocabulary's own would change the answer's structure.
SPECIAL_TOKEN = re.compile(r"<\|[^|>]*\|>")
# What no tokenizer takes and no file can hold; JSON's escapes can spell it.
SURROGATE = re.compile("[\ud800-\udfff]")
EXIF_ORIENTATION = 0x0112
FORMAT_KEYS = frozenset({"id", "images", "width", "height", "objects", "messages", "prompt"})

Item, Result = TypeVar("Item"), TypeVar("Result")


class DataError(Exception):
    """Mistakes in data files; `problems` holds one `file:line: reason` each, in order."""

    def __init__(self, problems: Sequence[str], max_shown: int = 50):
        self.problems = list(problems)
        shown = self.problems[:max_shown]
        if len(self.problems) > max_shown:
            shown.append(f"... and {len(self.problems) - max_shown} more")
        super().__init__("\n".join(shown))


@dataclass(frozen=True)
class Sample:
    """One image (or several) with its prompt and its ground truth.

    `images` are absolute paths or `data:` URIs, `image_sizes` their (height, width) as opened, `objects` are in bins of
    `width` x `height` on the answer format's grid, `messages` are the prompt only, as strings with `<image>` markers,
    `source` is "file:line". `extra` holds all other keys of the line as they are, for rewards: `domain` and `summary`
    and a user's own.
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


# ---- reading files -------------------------------------------------------------------------------------------------


def load_samples(
    paths: Sequence[str | os.PathLike],
    prompt: str | None = None,
    object_order: str = "file",
    skipped: list[BadLine] | None = None,
    form: AnswerFormat = COORD_TOKENS,
) -> list[list[Sample]]:
    """Samples of each file, in file order. `prompt` is used where a line brings neither `prompt` nor `messages`.

    Args:
        object_order: "file" or "sorted": top to bottom, then left to right, by the upper left corner.
        skipped: where lines that cannot be used are added; None: any such line is an error.
        form: coordinates are read onto its grid; where it has no polygons, each becomes the tightest box around it, and
            one warning says how many did.

    Raises:
        DataError: with every problem of every file; with `skipped`, of files that cannot be read or leave no sample.
    """
    if object_order not in ("file", "sorted"):
        raise ValueError(f"object_order={object_order!r}: must be 'file' or 'sorted'")
    datasets, problems = [], []
    for path in paths:
        samples, bad = [], []
        for item in read_samples(path, prompt, object_order, max_bin=form.max_bin):
            (samples if isinstance(item, Sample) else bad).append(item)
        datasets.append(samples)
        if skipped is None or not samples or any(line.line == 0 for line in bad):
            problems.extend(message for line in bad for message in line.messages())
        else:
            skipped.extend(bad)
    if problems:
        raise DataError(problems)
    return datasets if "poly" in form.kinds else _as_boxes(datasets, form)


def _as_boxes(datasets: list[list[Sample]], form: AnswerFormat) -> list[list[Sample]]:
    """The same samples with a box for every polygon."""
    objects = [obj for samples in datasets for sample in samples for obj in sample.objects]
    num_polygons = sum(obj.kind == "poly" for obj in objects)
    if not num_polygons:
        return datasets
    logger.warning(
        "%d of %d objects are polygons, which answer_format: %s cannot say; each is used as the box around it",
        num_polygons,
        len(objects),
        form.name,
    )

    def boxed(sample: Sample) -> Sample:
        return replace(sample, objects=[replace(o, kind="bbox_2d", coords=bounding_box(o)) for o in sample.objects])

    return [[boxed(sample) for sample in samples] for samples in datasets]


def read_samples(
    path: str | os.PathLike,
    prompt: str | None = None,
    object_order: str = "file",
    only: Container[int] | None = None,
    max_bin: int = COORD_TOKENS.max_bin,
) -> Iterator[Sample | BadLine]:
    """What each line of a file gives, in file order; blank lines give nothing. Few lines are in memory at a time.

    A file that cannot be read or has blank lines only gives a `BadLine` of its own. `only`: line numbers to look at.
    """
    base = Path(path).absolute().parent

    def read(item: tuple[int, bytes]) -> Sample | BadLine:
        try:
            return _read_sample(_parse_line(item[1]), base, f"{path}:{item[0]}", prompt, object_order, max_bin)
        except _Bad as bad:
            return BadLine(str(path), item[0], bad.problems)

    num_lines = 0

    def lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
        nonlocal num_lines
        for number, line in enumerate(file, start=1):
            if line.strip():
                num_lines += 1
                if only is None or number in only:
                    yield number, line.rstrip(b"\r\n")

    try:
        with open(path, "rb") as file:
            # Threads, because most of the time goes into opening image headers, often on a network disk.
            yield from map_ahead(read, lines(file))
    except OSError as error:
        yield BadLine(str(path), 0, [("file", f"cannot be read: {error.strerror or error}")])
        return
    if not num_lines:
        yield BadLine(str(path), 0, [("file", "the file is empty; it needs at least one sample")])


def fingerprint(datasets: Sequence[Sequence[Sample]]) -> str:
    """A digest of which lines of which files are in use, and how often."""
    digest = hashlib.sha256()
    for dataset in datasets:
        digest.update(json.dumps([sample.source for sample in dataset]).encode())
    return digest.hexdigest()


def check_same_samples(fingerprints: Sequence[str]) -> None:
    """Ranks that skipped different lines (an image one of them could not read) would train on different streams.

    Raises:
        DataError: on all ranks; `fingerprints` holds one per rank.
    """
    other = [rank for rank, found in enumerate(fingerprints) if found != fingerprints[0]]
    if other:
        raise DataError([f"ranks {other} can use other samples than rank 0: not every rank reads the same files"])


def map_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], num_threads: int = 8, max_ahead: int = 64
) -> Iterator[Result]:
    """`map` by threads, in order, that never holds more than `max_ahead` items or results."""
    with ThreadPoolExecutor(num_threads) as pool:
        waiting: deque = deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) == max_ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Bad(Exception):
    """Why one line cannot be used: one (class of `bad_lines.KINDS`, reason) pair, or several as `problems`."""

    def __init__(self, kind: str = "", reason: str = "", problems: Sequence[tuple[str, str]] = ()):
        self.problems = list(problems) or [(kind, reason)]


def _parse_line(line: bytes) -> dict[str, Any]:
    def no_constant(name: str) -> float:
        raise ValueError(f"{name} is not a JSON number")

    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=no_constant)
    except UnicodeDecodeError as error:
        raise _Bad("json", f"not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise _Bad("json", f"not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise _Bad("json", f"a sample is one JSON object, not {_kind(row)}")
    if b"\\ud" in line.lower() and SURROGATE.search(json.dumps(row, ensure_ascii=False)):
        raise _Bad("json", "half a character: an escape \\ud800 to \\udfff without its other half")
    return row


def _read_sample(
    row: dict[str, Any], base: Path, source: str, prompt: str | None, object_order: str, max_bin: int
) -> Sample:
    """Read every part even if another is wrong, so that one run shows all that is wrong with a line."""
    problems: list[tuple[str, str]] = []

    def attempt(read, *args, default=None):
        try:
            return read(*args)
        except _Bad as bad:
            problems.extend(bad.problems)
            return default

    messages, inside = attempt(_read_messages, row, prompt, default=(None, []))
    images = attempt(_read_images, row, inside, base)
    sizes = None if images is None else attempt(_image_sizes, images)
    size = attempt(_read_size, row, sizes)
    objects = attempt(_read_objects, row, sizes, size, max_bin)
    sample_id = attempt(_read_id, row, source)
    if messages is not None and images is not None:
        attempt(_check_markers, messages, len(images))
    if problems:
        raise _Bad(problems=problems)
    if object_order == "sorted":
        objects = sorted(objects, key=lambda item: (bounding_box(item)[1], bounding_box(item)[0]))
    extra = {key: value for key, value in row.items() if key not in FORMAT_KEYS}
    return Sample(sample_id, images, sizes, *size, objects, messages, source, extra)


def _read_id(row: dict[str, Any], source: str) -> str:
    value = row.get("id")
    if value is None:
        return source
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _Bad("id", f"id: must be a string, not {_kind(value)}")
    return str(value)


def _read_messages(row: dict[str, Any], prompt: str | None) -> tuple[list[dict[str, str]], list[Any]]:
    """The prompt's messages as strings with markers, and the images that came inside content lists.

    Answers at the end (supervised data carries them) are left out: rollouts make their own.
    """
    given = row.get("messages")
    own_prompt = row.get("prompt")
    if own_prompt is not None and not isinstance(own_prompt, str):
        raise _Bad("prompt", f"prompt: must be a string, not {_kind(own_prompt)}")
    if given is None:
        text = own_prompt if own_prompt is not None else prompt
        if not text:
            raise _Bad("prompt", "no prompt: neither the line (messages, prompt) nor the config (data.prompt) has one")
        return [{"role": "user", "content": text}], []
    if own_prompt is not None:
        raise _Bad("prompt", "prompt: a line has either messages or prompt, not both")
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise _Bad("messages", "messages: must be a list of {role, content}")
    images: list[Any] = []
    messages = [{"role": message.get("role"), "content": _flat_content(message, images)} for message in given]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(message["role"] == "user" for message in messages):
        raise _Bad("messages", "messages: there is no user message")
    return messages, images


def _flat_content(message: dict[str, Any], images: list[Any]) -> str:
    content = message.get("content")
    if message.get("role") not in ("system", "user", "assistant", "tool"):
        raise _Bad("messages", f"messages: role {message.get('role')!r} is not one of system, user, assistant, tool")
    if isinstance(content, str):
        text = content
    elif isinstance(content, list):
        text = "".join(_flat_part(part, images) for part in content)
    else:
        raise _Bad("messages", f"messages: content must be a string or a list of parts, not {_kind(content)}")
    for marker in ("<ref-object>", "<bbox>", "<video>", "<audio>"):
        if marker in text and message["role"] != "assistant":
            raise _Bad(
                "messages",
                f"messages: the marker {marker} is not supported in a prompt; write out what it stands for",
            )
    return text


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
    raise _Bad("messages", f"messages: the part {json.dumps(part)[:80]} is neither text nor image")


def _check_markers(messages: list[dict[str, str]], num_images: int) -> None:
    try:
        to_chat_messages(messages, num_images)
    except ValueError as error:
        raise _Bad("messages", f"messages: {error}") from None


def _read_images(row: dict[str, Any], inside: list[Any], base: Path) -> list[str]:
    given = row.get("images")
    if given is None and not inside:
        raise _Bad(
            "images", f"images: missing (the line has {', '.join(map(repr, row)) or 'nothing'}); [] for a text sample"
        )
    if given and inside:
        raise _Bad("images", "images: given both as a list and inside the messages")
    given = inside if not given else given
    if not isinstance(given, list):
        raise _Bad("images", f"images: must be a list, not {_kind(given)}")
    return [_read_image(image, i, base) for i, image in enumerate(given)]


def _read_image(image: Any, index: int, base: Path) -> str:
    """One entry of `images` (path, data URI, or ms-swift's {"path", "bytes"}) as an absolute path or data URI."""
    where = f"images[{index}]"
    if isinstance(image, dict):
        if isinstance(image.get("bytes"), str):
            return f"data:image;base64,{image['bytes']}"
        image = image.get("path")
    if not isinstance(image, str) or not image:
        raise _Bad("images", f"{where}: must be a path, not {_kind(image)}")
    if image.startswith("data:"):
        return image
    if re.match(r"https?://", image):
        raise _Bad("images", f"{where}: {image}: data files name local images only; download it first")
    return str((base / image.removeprefix("file://")).absolute())


def _image_sizes(images: list[str]) -> list[tuple[int, int]]:
    sizes, problems = [], []
    for i, image in enumerate(images):
        try:
            sizes.append(image_size(image))
        except OSError as error:
            kind = "image_missing" if isinstance(error, FileNotFoundError) else "image_unreadable"
            problems.append((kind, f"images[{i}]: {error}"))
    if problems:
        raise _Bad(problems=problems)
    return sizes


def _read_size(row: dict[str, Any], sizes: list[tuple[int, int]] | None) -> tuple[int, int] | None:
    """(width, height) of the line, else of its only image, else (0, 0). None if that image cannot be read."""
    given = {name: row.get(name) for name in ("width", "height")}
    if given["width"] is None and given["height"] is None:
        if sizes is None:
            return None
        return sizes[0][::-1] if len(sizes) == 1 else (0, 0)
    bad = [
        ("size", f"{name}: must be a positive integer, not {json.dumps(value)}")
        for name, value in given.items()
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0
    ]
    if bad:
        raise _Bad(problems=bad)
    return given["width"], given["height"]


def _read_objects(row: dict[str, Any], sizes: list | None, size: tuple[int, int] | None, max_bin: int) -> list[Object]:
    """All objects; `sizes` and `size` are None where what they come from is wrong and has been reported."""
    given = row.get("objects", [] if "summary" in row else None)  # a summary needs no objects
    if given is None:
        raise _Bad("objects", "objects: missing; write [] for an image without objects")
    if isinstance(given, dict):
        items = _swift_objects(given, sizes, size)
    elif isinstance(given, list):
        items = [(item, size) for item in given]
    else:
        raise _Bad("objects", f"objects: must be a list, not {_kind(given)}")
    objects, problems = [], []
    for i, (item, extent) in enumerate(items):
        try:
            objects.append(_read_object(item, extent, max_bin))
        except _Bad as bad:
            problems.extend((kind, f"objects[{i}]{reason}") for kind, reason in bad.problems)
    if problems:
        raise _Bad(problems=problems)
    return objects


def _swift_objects(
    given: dict[str, Any], sizes: list[tuple[int, int]] | None, size: tuple[int, int] | None
) -> list[tuple[dict[str, Any], tuple[float, float] | None]]:
    """ms-swift's {"ref": [...], "bbox": [[...]], "bbox_type"?, "image_id"?} as pairs (object of our form, its extent).

    One `ref` may name several boxes. Four numbers are a box, six or more a polygon. `bbox_type: norm1` means fractions.
    """
    refs, boxes = given.get("ref"), given.get("bbox")
    if not isinstance(refs, list) or not isinstance(boxes, list):
        raise _Bad("objects", 'objects: must be a list, or {"ref": [...], "bbox": [[...]]}')
    if len(refs) == 1:
        refs = refs * len(boxes)
    if len(refs) != len(boxes):
        raise _Bad("objects", f"objects: {len(refs)} ref entries for {len(boxes)} bbox entries; each box needs its own")
    kind = given.get("bbox_type") or "real"
    if kind not in ("real", "norm1"):
        raise _Bad("objects", f"objects.bbox_type: {kind!r} is not 'real' (pixels) or 'norm1' (fractions)")
    image_ids = given.get("image_id") or []
    if not isinstance(image_ids, list):
        raise _Bad("objects", f"objects.image_id: must be a list, not {_kind(image_ids)}")
    image_ids = image_ids + [0] * (len(boxes) - len(image_ids))
    objects = []
    for ref, box, image_id in zip(refs, boxes, image_ids, strict=False):
        item = {"desc": ref, "poly" if isinstance(box, list) and len(box) >= 6 else "bbox_2d": box}
        extent = size
        if kind == "norm1":
            extent = (1.0, 1.0)
        elif image_id != 0 or sizes is not None and len(sizes) > 1:
            if sizes is None or not isinstance(image_id, int) or not 0 <= image_id < len(sizes):
                raise _Bad("objects", f"objects.image_id: there is no image {image_id!r}")
            extent = sizes[image_id][::-1]
        objects.append((item, extent))
    return objects


def _read_object(item: Any, size: tuple[int, int] | None, max_bin: int) -> Object:
    if not isinstance(item, dict):
        raise _Bad("objects", f": must be an object, not {_kind(item)}")
    desc = item.get("desc")
    if not isinstance(desc, str) or not desc.strip():
        raise _Bad("desc", ".desc: must be a non-empty string")
    if SPECIAL_TOKEN.search(desc):
        raise _Bad("desc", f".desc: {desc!r} spells a special token")
    kinds = [kind for kind in ("bbox_2d", "poly") if kind in item]
    if len(kinds) != 1:
        raise _Bad("geometry", f": needs exactly one of bbox_2d and poly, has {' and '.join(kinds) or 'neither'}")
    kind = kinds[0]
    numbers = item[kind]
    if not isinstance(numbers, list) or not all(_is_number(x) for x in numbers):
        raise _Bad("geometry", f".{kind}: must be a list of numbers")
    if kind == "bbox_2d" and len(numbers) != 4:
        raise _Bad("geometry", f".bbox_2d: must have 4 numbers, has {len(numbers)}")
    if kind == "poly" and (len(numbers) < 6 or len(numbers) % 2):
        raise _Bad("geometry", f".poly: must have an even number of numbers, at least 6, has {len(numbers)}")
    if kind == "bbox_2d" and (numbers[0] > numbers[2] or numbers[1] > numbers[3]):
        raise _Bad("geometry", f".bbox_2d: {numbers} is not [x1, y1, x2, y2] with x1 <= x2 and y1 <= y2")
    if size is None:
        return Object(desc, kind, ())  # never used: the line is refused for another reason
    if size == (0, 0):
        raise _Bad("size", ": there is no image size; the line needs width and height")
    width, height = size
    slack = 0.0 if width == 1.0 else EDGE_TOLERANCE_PX
    outside = any(not -slack <= x <= width + slack for x in numbers[0::2]) or any(
        not -slack <= y <= height + slack for y in numbers[1::2]
    )
    if outside:
        raise _Bad("outside", f".{kind}: {numbers} lies outside the image of {width} x {height}")
    return Object(desc, kind, pixels_to_bins(numbers, width, height, max_bin))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) or isinstance(value, float) and math.isfinite(value)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


# ---- images --------------------------------------------------------------------------------------------------------


def open_image(image: str | os.PathLike) -> Image.Image:
    """The image at a path or in a `data:` URI as RGB, made by the function that the server uses too.

    Raises:
        OSError: missing, unreadable or not an image; the message names it.
    """
    try:
        with _open_lazily(image) as opened:
            return to_rgb(opened)
    except Image.DecompressionBombError as error:
        raise OSError(f"{_short(image)}: {error}") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise _image_error(image, error) from None


def image_size(image: str | os.PathLike) -> tuple[int, int]:
    """(height, width) as `open_image` will give it, from the header alone.

    Raises:
        OSError: missing (`FileNotFoundError`), unreadable or not an image; the message names it.
    """
    try:
        with _open_lazily(image) as opened:
            width, height = opened.size
            turned = opened.getexif().get(EXIF_ORIENTATION, 1) in (5, 6, 7, 8)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _image_error(image, error) from None
    return (width, height) if turned else (height, width)


def _open_lazily(image: str | os.PathLike) -> Image.Image:
    name = os.fspath(image)
    if not name.startswith("data:"):
        return Image.open(name)
    try:
        return Image.open(io.BytesIO(base64.b64decode(name.partition(",")[2], validate=True)))
    except binascii.Error as error:
        raise ValueError(f"bad base64: {error}") from None


def _image_error(image: str | os.PathLike, error: Exception) -> OSError:
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"{_short(image)}: no such image")
    if isinstance(error, UnidentifiedImageError):
        return OSError(f"{_short(image)}: not an image that can be read")
    return OSError(f"{_short(image)}: {getattr(error, 'strerror', None) or error}")


def _short(image: str | os.PathLike) -> str:
    name = os.fspath(image)
    return name[:40] + "..." if name.startswith("data:") else name


# ---- the order of samples ------------------------------------------------------------------------------------------


def epoch_size(sizes: Sequence[int], weights: Sequence[float], epoch: int = 0) -> int:
    """Samples in one epoch over files of these sizes: the sum of size x weight, each file rounded so as to add up."""
    return sum(_share(n, w, epoch)[1] - _share(n, w, epoch)[0] for n, w in zip(sizes, weights, strict=True))


def _share(size: int, weight: float, epoch: int) -> tuple[int, int]:
    """Positions [start, stop) in a file's own endless stream that this epoch uses.

    Five samples at weight 0.5 give 2, 3, 2, 3, ...: never a sample twice before all were used once.
    """
    per_epoch = Fraction(str(weight)) * size
    return math.floor(epoch * per_epoch), math.floor((epoch + 1) * per_epoch)


@dataclass
class SampleStream:
    """Endless deterministic stream of samples over all ranks (LRN-1).

    An epoch is a shuffle of all files' samples. A file of weight 1 gives each of its samples once per epoch, of weight
    2 twice, of weight 0.5 every second epoch. Epochs follow each other without a gap: rank `r` of `W` takes the global
    positions r, r + W, r + 2W, ..., so `n` draws on every rank use `n * W` consecutive positions whatever `W` is.
    """

    datasets: list[list[Sample]]
    weights: Sequence[float] | None = None
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    _taken: int = field(default=0, init=False)  # draws of this rank since _start
    _start: int = field(default=0, init=False)  # first global position of this run
    _epoch: int = field(default=0, init=False)
    _epoch_start: int = field(default=0, init=False)  # global position where _epoch begins
    _order: np.ndarray | None = field(default=None, init=False)

    def __post_init__(self):
        self.weights = [1.0] * len(self.datasets) if self.weights is None else list(self.weights)
        if len(self.weights) != len(self.datasets):
            raise ValueError(f"{len(self.weights)} weights for {len(self.datasets)} files")
        if min(self.weights, default=0) <= 0 or not all(self.datasets):
            raise ValueError("every file needs a positive weight and at least one sample")

    @property
    def position(self) -> int:
        """Global position of this rank's next sample."""
        return self._start + self._taken * self.world_size + self.rank

    @property
    def epoch(self) -> int:
        """Epoch of this rank's next sample, from 0."""
        self._seek(self.position)
        return self._epoch

    def next(self, n: int) -> list[Sample]:
        """This rank's next `n` samples."""
        return [self._draw() for _ in range(n)]

    def __iter__(self) -> Iterator[Sample]:
        while True:
            yield self._draw()

    def state_dict(self, num_undone: int = 0) -> dict[str, Any]:
        """What a resumed run needs, as if this rank had drawn `num_undone` samples less; equal on all ranks when all
        have drawn equally often."""
        return {"position": self._start + (self._taken - num_undone) * self.world_size, **self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, also with another number of ranks.

        Raises:
            ValueError: the state comes from other data, weights or another seed.
        """
        for name, value in self._fingerprint().items():
            if state[name] != value:
                raise ValueError(f"data position: {name} was {state[name]}, now {value}; resume with the same data")
        self._start, self._taken = int(state["position"]), 0

    def _fingerprint(self) -> dict[str, Any]:
        return {"sizes": [len(d) for d in self.datasets], "weights": list(self.weights), "seed": self.seed}

    def _draw(self) -> Sample:
        self._seek(self.position)
        file, index = self._order[self.position - self._epoch_start]
        self._taken += 1
        return self.datasets[file][index]

    def _seek(self, position: int) -> None:
        """Make `_order` that of the epoch which holds a global position."""
        if position < self._epoch_start:
            self._epoch, self._epoch_start, self._order = 0, 0, None
        sizes = [len(dataset) for dataset in self.datasets]
        while position >= self._epoch_start + (size := epoch_size(sizes, self.weights, self._epoch)):
            self._epoch, self._epoch_start, self._order = self._epoch + 1, self._epoch_start + size, None
        if self._order is None:
            self._order = self._epoch_order(self._epoch)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        """Shuffled (file, index) pairs [epoch size, 2] of one epoch."""
        pairs = []
        for file, (dataset, weight) in enumerate(zip(self.datasets, self.weights, strict=True)):
            turn, at = np.divmod(np.arange(*_share(len(dataset), weight, epoch)), len(dataset))
            index = np.empty_like(at)
            for number in np.unique(turn):  # each pass over a file has its own order
                order = np.random.default_rng([self.seed, 1, file, number]).permutation(len(dataset))
                index[turn == number] = order[at[turn == number]]
            pairs.append(np.stack([np.full_like(index, file), index], axis=1))
        return np.random.default_rng([self.seed, 0, epoch]).permutation(np.concatenate(pairs))


# ---- prompts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model takes it: ids with image placeholders expanded, patches [num_patches, dim], grid [n, 3]."""

    prompt_token_ids: list[int]
    pixel_values: torch.Tensor | None
    image_grid_thw: torch.Tensor | None


def model_digest(path: str | Path) -> str | None:
    """Of what a learner and its rollout server must have in common: architecture and vocabulary, not weights, which
    the first sync brings. None where there is no such checkpoint to read."""
    try:
        config = json.loads((Path(path) / "config.json").read_text(), object_hook=_without_incidentals)
        tokenizer = json.loads((Path(path) / "tokenizer.json").read_text())
        parts = [config, tokenizer["model"]["vocab"], tokenizer["added_tokens"]]
    except (OSError, ValueError, KeyError):
        return None
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _without_incidentals(config: dict[str, Any]) -> dict[str, Any]:
    """What saving a model again may change is left out."""
    incidental = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
    return {key: value for key, value in config.items() if key not in incidental}


def load_processor(path: str | os.PathLike, min_pixels: int | None = None, max_pixels: int | None = None) -> Any:
    """The model's own processor, with its pixel budget per image replaced where one is given."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(path)
    image_processor = getattr(processor, "image_processor", None)
    if image_processor is not None and (min_pixels or max_pixels):
        size = dict(image_processor.size)
        size["shortest_edge"] = min_pixels or size["shortest_edge"]  # Qwen's names for budgets in pixels
        size["longest_edge"] = max_pixels or size["longest_edge"]
        image_processor.size = type(image_processor.size)(**size)
    return processor


def prompt_chat(sample: Sample) -> list[dict[str, Any]]:
    """The sample's prompt as a chat template takes it."""
    return to_chat_messages(sample.messages, len(sample.images))


def encode_prompt(sample: Sample, processor: Any) -> EncodedPrompt:
    """Exactly the prompt that vLLM's Qwen3-VL sees for the same messages and images (ROL-3).

    Only placeholders are replaced, text is never tokenized a second time.

    Raises:
        ValueError: the prompt's text holds image placeholders of its own.
        OSError: an image cannot be read.
    """
    token_ids = render_prompt(processor, prompt_chat(sample))
    if not sample.images:
        return EncodedPrompt(token_ids, None, None)
    features = processor.image_processor(images=[open_image(image) for image in sample.images], return_tensors="pt")
    grid = features["image_grid_thw"]
    counts = (grid.prod(dim=1) // processor.image_processor.merge_size**2).tolist()
    return EncodedPrompt(_expand(token_ids, counts, processor, sample), features["pixel_values"], grid)


def num_prompt_tokens(sample: Sample, processor: Any) -> int:
    """Length of the encoded prompt in tokens, without opening an image."""
    token_ids = render_prompt(processor, prompt_chat(sample))
    if not sample.images:
        return len(token_ids)
    counts = processor._get_num_multimodal_tokens(image_sizes=sample.image_sizes)["num_image_tokens"]
    return len(_expand(token_ids, [int(count) for count in counts], processor, sample))


def _expand(token_ids: list[int], counts: Sequence[int], processor: Any, sample: Sample) -> list[int]:
    """Replace the i-th image placeholder by `counts[i]` of them."""
    image_id = processor.image_token_id
    if token_ids.count(image_id) != len(counts):
        raise ValueError(
            f"{sample.source}: the prompt has {token_ids.count(image_id)} image placeholders for {len(counts)} images;"
            f" its text must not spell {processor.image_token}"
        )
    remaining = iter(counts)
    return [i for token in token_ids for i in ([token] * next(remaining) if token == image_id else [token])]
