"""Indexes of data files, so that a run reads a line when it draws it (DAT-6).

One process validates a file, and writes where its good lines are, what their images measure and how long their prompts
are. All ranks map that index. It lies in a folder of its own below the run directory, whose name is a digest of all
that decides what it holds: the file's content and place, how lines are read, and the code that reads them.

    lines.bin     `LINE` of each good line, in order
    images.bin    `IMAGE` of each of their images, in order
    bad.jsonl     lines that cannot be used, as `skipped.jsonl` of the run has them
    unfit.txt     `file:line: reason` where a good line lacks what a reward needs
    about.json    numbers of all these, and of objects, the labels, and the folders of images; written last
    fits.json     row length that was found to hold prompt and ground truth of each line, once a run has looked
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any, overload

import numpy as np
from tqdm import tqdm

from utils.data.images import ShardImage, find_in_shard
from utils.data.mistakes import BadLine, read_bad_lines, write_bad_line
from utils.data.samples import MAX_SHOWN, DataError, LineReader, Sample, empty_file, labels_in_both, map_ahead
from utils.data.workers import map_in_processes
from utils.geometry import normal_label
from utils.rewards import reward_key_problems

LINE = np.dtype(
    [("offset", "<i8"), ("first_image", "<i8"), ("num_images", "<i4")]
    + [("length", "<i4"), ("number", "<i8"), ("crc", "<u4"), ("tokens", "<i4"), ("answer_bytes", "<i4")]
)
IMAGE = np.dtype([("height", "<i4"), ("width", "<i4"), ("offset", "<i8"), ("num_bytes", "<i8"), ("mark", "<u4")])
NO_SHARD = -1  # offset of an image that is not in a tar shard
NO_LENGTH = np.iinfo(np.int32).max  # tokens of a prompt that cannot be encoded
MAX_LABELS = 100_000  # of a file; more are free text, in which no label is expected to return
MAX_FOLDERS = 10_000  # of a file's images; more are not kept
COORD_TOKEN = re.compile(r"<\|coord_\d+\|>")
CHUNK_BYTES = 256 << 10
SMALL_BYTES = 32 << 20  # up to this size, worker processes take longer to start than they save
MAX_PROCESSES = 16  # of a pass: each takes 300 to 500 MB, and a container may have fewer cores than it sees


@dataclass(frozen=True)
class Checks:
    """How the lines of a file are read, and what is found out about them; picklable.

    Attributes:
        count_tokens: the length of a sample's prompt; ValueError where it cannot be encoded.
        rewards: names of the rewards whose keys a line must have.
    """

    reader: LineReader
    count_tokens: Callable[[Sample], int] | None = None
    rewards: Sequence[str] = ()


@dataclass
class Scanned:
    """What is known about the lines of one part of a file. `first_image` counts from the part's first."""

    num_bytes: int
    lines: np.ndarray
    images: np.ndarray
    bad: list[BadLine] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    num_objects: int = 0
    num_polygons: int = 0
    labels: set[str] = field(default_factory=set)  # as `normal_label` gives them
    folders: dict[str, int] = field(default_factory=dict)  # of image files, links resolved, with the first line of each


# ---- the pass over a file ------------------------------------------------------------------------------------------


def scan(path: str | os.PathLike, checks: Checks, num_processes: int | None = None) -> Iterator[Scanned]:
    """Validate a file, part by part in order; large files in `num_processes` processes (default: one per core, up to
    `MAX_PROCESSES`)."""
    if num_processes is None:
        is_small = os.path.getsize(path) <= SMALL_BYTES
        num_processes = 1 if is_small else min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    work = partial(scan_part, os.path.abspath(path), os.fspath(path), checks)
    return map(work, parts(path)) if num_processes == 1 else map_in_processes(work, parts(path), num_processes)


def parts(path: str | os.PathLike) -> Iterator[tuple[int, int, int]]:
    """Yield (offset, bytes, number of the first line) of parts of whole lines, of about `CHUNK_BYTES`."""
    offset, number = 0, 1
    with open(path, "rb") as file:
        while block := file.read(CHUNK_BYTES):
            block += file.readline()
            yield offset, len(block), number
            offset += len(block)
            number += block.count(b"\n")


def scan_part(location: str, name: str, checks: Checks, part: tuple[int, int, int]) -> Scanned:
    """Validate the lines of a part. The file is opened at `location` and called `name` in messages."""
    offset, num_bytes, first = part
    with open(location, "rb") as file:
        file.seek(offset)
        block = file.read(num_bytes)
    lines: list[tuple[int, int, bytes]] = []  # offset, number, text
    for number, raw in enumerate(block.split(b"\n"), start=first):
        if raw.strip():
            lines.append((offset, number, raw.rstrip(b"\r")))
        offset += len(raw) + 1
    found = Scanned(num_bytes, np.empty(0), np.empty(0))
    rows, images = [], []
    # Threads, because images lie often on a network disk, and decoders run side by side.
    items = map_ahead(lambda line: checks.reader.read(name, *line[1:]), lines)
    for (start, number, line), item in zip(lines, items, strict=True):
        if isinstance(item, BadLine):
            found.bad.append(item)
            continue
        place = (start, len(images), len(item.image_sizes), len(line), number)
        rows.append((*place, zlib.crc32(line), _length(checks, item), _answer_bytes(checks.reader, item)))
        images += [(*size, *_place(image)) for size, image in zip(item.image_sizes, item.images, strict=True)]
        for folder in filter(None, map(_folder, item.images)):
            found.folders.setdefault(folder, number)
        found.unfit += reward_key_problems(checks.rewards, [item])
        found.num_objects += len(item.objects)
        found.num_polygons += sum(obj.kind == "poly" for obj in item.objects)
        found.labels.update(normal_label(obj.desc) for obj in item.objects)
    return replace(found, lines=np.array(rows, LINE), images=np.array(images, IMAGE))


def _place(image: str) -> tuple[int, int, int]:
    """Offset in a tar shard, size in bytes, and what marks the bytes there."""
    if image.startswith("data:"):
        return NO_SHARD, len(image) * 3 // 4, 0  # of base64
    found = find_in_shard(image)
    return (found.offset, found.num_bytes, found.read_mark()) if found else (NO_SHARD, os.path.getsize(image), 0)


def _folder(image: str) -> str | None:
    """The folder of an image file, links resolved; None for an image that is sent as bytes or is none on disk."""
    is_file = not image.startswith("data:") and find_in_shard(image) is None
    return os.path.dirname(os.path.realpath(image)) if is_file else None


def _length(checks: Checks, sample: Sample) -> int:
    try:
        return checks.count_tokens(sample) if checks.count_tokens else 0
    except ValueError:
        return NO_LENGTH


def _answer_bytes(reader: LineReader, sample: Sample) -> int:
    """Bytes of the ground truth as an answer, a coordinate token as one: it has no more tokens than that."""
    text = reader.form.write(reader.as_expressible(sample).objects)
    return len(COORD_TOKEN.sub("x", text).encode())


# ---- the index on disk ---------------------------------------------------------------------------------------------


def index_path(folder: Path, path: str | os.PathLike, digest: str, settings: Any) -> Path:
    """Where the index of a file lies in `folder`: `settings` is what `Checks` depends on, as JSON."""
    own = Path(__file__).parent
    sources = [file.read_bytes() for file in sorted([*own.glob("*.py"), *own.parent.glob("*.py")])]
    code = [hashlib.sha256(b"".join(sources)).hexdigest(), version("pillow"), version("transformers")]
    place = os.path.dirname(os.path.abspath(path))  # relative images belong to it
    key = hashlib.sha256(json.dumps([digest, os.fspath(path), place, settings, code]).encode()).hexdigest()
    return folder / f"{Path(path).stem}-{key[:16]}"


def write_index(
    target: Path, path: str | os.PathLike, checks: Checks, on_part: Callable[[], None] = lambda: None
) -> None:
    """Validate a file and put its index at `target`, all at once; what is there is replaced. `on_part` is called from
    time to time."""
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    numbers = dict.fromkeys(("lines", "images", "bad", "unfit", "objects", "polygons"), 0)
    labels: set[str] = set()
    folders: dict[str, int] = {}
    size = os.path.getsize(path)
    progress = {"total": size, "unit": "B", "unit_scale": True, "mininterval": 5, "disable": size <= SMALL_BYTES}
    with ExitStack() as stack:
        files = [stack.enter_context(open(unfinished / name, "wb")) for name in ("lines.bin", "images.bin")]
        bad = stack.enter_context(open(unfinished / "bad.jsonl", "w", encoding="utf-8"))
        unfit = stack.enter_context(open(unfinished / "unfit.txt", "w", encoding="utf-8"))
        bar = stack.enter_context(tqdm(desc=f"reading {path}", **progress))
        for part in scan(path, checks):
            part.lines["first_image"] += numbers["images"]
            files[0].write(part.lines.tobytes())
            files[1].write(part.images.tobytes())
            for line in part.bad:
                write_bad_line(line, bad)
            unfit.writelines(f"{problem}\n" for problem in part.unfit)
            counts = (len(part.lines), len(part.images), len(part.bad), len(part.unfit))
            for name, number in zip(numbers, (*counts, part.num_objects, part.num_polygons), strict=True):
                numbers[name] += number
            if len(labels) <= MAX_LABELS:
                labels |= part.labels
            if len(folders) <= MAX_FOLDERS:
                folders = part.folders | folders
            bar.update(part.num_bytes)
            on_part()
        if not numbers["lines"] + numbers["bad"]:
            numbers["bad"] = 1
            write_bad_line(empty_file(path), bad)
    about = {"labels": sorted(labels) if len(labels) <= MAX_LABELS else None}
    about["folders"] = folders if len(folders) <= MAX_FOLDERS else None
    (unfinished / "about.json").write_text(json.dumps(numbers | about))
    shutil.rmtree(target, ignore_errors=True)
    os.rename(unfinished, target)


@dataclass
class Index:
    """An index on disk. Raises OSError, ValueError or KeyError if it is not whole.

    `labels` are those of the file's objects; None if they are more than `MAX_LABELS`. `folders` are those of its image
    files, links resolved, with the number of the first line of each; none if they are more than `MAX_FOLDERS`.
    """

    folder: Path

    def __post_init__(self) -> None:
        numbers = json.loads((self.folder / "about.json").read_text())
        self.num_bad, self.num_unfit = numbers["bad"], numbers["unfit"]
        self.num_objects, self.num_polygons = numbers["objects"], numbers["polygons"]
        self.labels = None if numbers["labels"] is None else frozenset(numbers["labels"])
        self.folders: dict[str, int] = numbers["folders"] or {}
        self.lines = _mapped(self.folder / "lines.bin", LINE, numbers["lines"])
        self.images = _mapped(self.folder / "images.bin", IMAGE, numbers["images"])

    def bad_lines(self) -> Iterator[BadLine]:
        """Lines that cannot be used, in order."""
        return read_bad_lines(self.folder / "bad.jsonl")

    def forget(self) -> None:
        """Have the next start make it anew. Ranks that have opened it read on: no byte that they map is taken away."""
        (self.folder / "about.json").unlink(missing_ok=True)

    def truth_fits(self, row_length: int) -> bool:
        """Whether an earlier start has found that prompt and ground truth of each line fit such a row (PCK-3)."""
        try:
            return json.loads((self.folder / "fits.json").read_text()) <= row_length
        except (OSError, ValueError):
            return False

    def note_truth_fits(self, row_length: int) -> None:
        (self.folder / "fits.json").write_text(json.dumps(row_length))

    def problems(self, skips_bad: bool) -> Iterator[str]:
        """`file:line: reason` of all that stops a run, which may leave out bad lines if any line is good."""
        if not skips_bad or not len(self.lines):
            for i, bad in enumerate(self.bad_lines()):
                if skips_bad and not i and bad.line:
                    yield f"{bad.path}: no line of it can be used, so data.on_bad_sample: skip would leave nothing"
                yield from bad.messages()
        if self.num_unfit:
            with open(self.folder / "unfit.txt", encoding="utf-8") as file:
                yield from map(str.rstrip, file)


def _mapped(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    if path.stat().st_size != length * dtype.itemsize:
        raise ValueError(f"{path} is not whole")
    return np.memmap(path, dtype, "r") if length else np.empty(0, dtype)


def ensure_index(
    target: Path, path: str | os.PathLike, checks: Checks, on_part: Callable[[], None] = lambda: None
) -> Index:
    """The index at `target`; it is made where there is none or a broken one."""
    try:
        return Index(target)
    except (OSError, ValueError, KeyError):
        write_index(target, path, checks, on_part)
    return Index(target)


def check_indexes(indexes: Sequence[Index], folder: Path, skips_bad: bool) -> None:
    """Raise DataError if a file has anything that stops a run. `mistakes.txt` in `folder` then lists all of it, and the
    indexes are removed: missing images can be added without a change of the file. Else all other indexes are removed.
    """
    problems = chain.from_iterable(index.problems(skips_bad) for index in indexes)
    first = list(islice(problems, MAX_SHOWN))
    listed, more = folder / "mistakes.txt", 0
    listed.unlink(missing_ok=True)
    if not first:
        for other in set(filter(Path.is_dir, folder.iterdir())) - {index.folder for index in indexes}:
            shutil.rmtree(other)
        return
    with listed.open("w", encoding="utf-8") as out:
        for more, problem in enumerate(chain(first, problems), start=1 - len(first)):  # noqa: B007
            out.write(f"{problem}\n")
    for index in indexes:
        shutil.rmtree(index.folder, ignore_errors=True)
    raise DataError(first, more, f", all in {listed}")


# ---- samples when they are drawn -----------------------------------------------------------------------------------


class IndexedFile(Sequence[Sample]):
    """The samples of a data file, read when they are asked for; from any thread.

    Args:
        path: the file whose index this is.
        annotated, teacher_forced_ratio: what the file's entry in the config says of all its samples (DAT-5); of a
            line with its own `annotated`, the labels in both.
        limit: use only the first so many.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        index: Index,
        reader: LineReader,
        annotated: Sequence[str] | None = None,
        teacher_forced_ratio: float | None = None,
        limit: int | None = None,
    ) -> None:
        self.path, self._reader, self.index = os.fspath(path), reader, index
        self._lines, self._images, self._folders = index.lines[:limit], index.images, index.folders
        self._annotated = None if annotated is None else frozenset(map(normal_label, annotated))
        self._teacher_forced_ratio = teacher_forced_ratio
        self._file = open(self.path, "rb", buffering=0)

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def num_tokens(self) -> np.ndarray:
        """Length of each prompt in tokens, int32 [len]; `NO_LENGTH` where it cannot be encoded."""
        return self._lines["tokens"]

    @property
    def max_answer_tokens(self) -> np.ndarray:
        """Length that each ground truth cannot exceed in tokens, int32 [len], without the end token."""
        return self._lines["answer_bytes"]

    @property
    def num_pixels(self) -> np.ndarray:
        """Pixels of each sample's images together, int64 [len]."""
        return self._sums(self._images["height"].astype(np.int64) * self._images["width"])

    def num_larger(self, num_bytes: int) -> np.ndarray:
        """How many of each sample's images have more bytes than this, int64 [len]."""
        return self._sums(self._images["num_bytes"] > num_bytes)

    def _sums(self, values: np.ndarray) -> np.ndarray:
        """Sum up values of all images by sample."""
        ends = np.cumsum(np.append(0, values))
        first = self._lines["first_image"]
        return ends[first + self._lines["num_images"]] - ends[first]

    @property
    def folders(self) -> dict[str, int]:
        """Folders of its image files, links resolved, with the number of the first line of each; see `Index`."""
        last = int(self._lines["number"][-1]) if len(self) else 0
        return {folder: number for folder, number in self._folders.items() if number <= last}

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        """Raises DataError if the file is no longer what the index says."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = self._lines[index]
        line = os.pread(self._file.fileno(), int(row["length"]), int(row["offset"]))
        if zlib.crc32(line) != row["crc"]:
            raise DataError([f"{self.path}:{row['number']}: the file has changed since it was checked; start again"])
        images = self._images[row["first_image"] :][: row["num_images"]]
        sizes = [(int(image["height"]), int(image["width"])) for image in images]
        sample = self._reader.read(self.path, int(row["number"]), line, sizes)
        if isinstance(sample, BadLine):
            raise DataError(sample.messages())
        return replace(
            self._reader.as_expressible(sample),
            images=[_found(*pair) for pair in zip(sample.images, images, strict=True)],
            annotated=labels_in_both(sample.annotated, self._annotated),
            teacher_forced_ratio=self._teacher_forced_ratio,
        )


def _found(path: str, image: np.void) -> str:
    place = (int(image[name]) for name in ("offset", "num_bytes", "mark"))
    return path if image["offset"] == NO_SHARD else ShardImage(path, *place)
