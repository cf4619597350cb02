"""A list of images, such as VOC's ImageSets/Main/train.txt or the train.txt of YOLO: one a line, as path or name."""

import os
import re
from pathlib import Path, PurePosixPath

from tools.formats import IMAGE_SUFFIXES, read_utf8

_OF_A_CLASS = re.compile(r"(\S+)\s+(?:-1|0|1)")  # VOC's cat_train.txt says, too, whether a cat is there


class ImageList:
    """The images that a file lists. An image is listed if its path ends with an entry, or the entry with its path; what
    kind of image file it is (`.jpg`) does not count.

    Raises:
        ValueError, OSError: the file cannot be read, or lists nothing.
    """

    def __init__(self, file: str | os.PathLike) -> None:
        self._file = file
        lines = [line for row in read_utf8(Path(file)).splitlines() if (line := row.strip())]
        of_a_class = list(map(_OF_A_CLASS.fullmatch, lines))
        entries = [match[1] for match in of_a_class if match] if all(of_a_class) else lines
        if not entries:
            raise ValueError(f"--only {file}: lists no image; write one a line")
        self._by_stem: dict[str, set[tuple[str, ...]]] = {}
        for entry in entries:
            parts = _parts(entry)
            self._by_stem.setdefault(parts[-1], set()).add(parts)
        self._image_of: dict[tuple[str, ...], str] = {}  # by entry

    def __contains__(self, image: object) -> bool:
        """Whether an image (its path below the folder of images) is listed.

        Raises:
            ValueError: the entry that lists it has listed another image, too.
        """
        name = str(image)
        parts = _parts(name)
        found = [entry for entry in self._by_stem.get(parts[-1], ()) if _is_end(entry, parts) or _is_end(parts, entry)]
        for entry in found:
            other = self._image_of.setdefault(entry, name)
            if _parts(other) != parts:
                rule = f"{'/'.join(entry)} may be {other} or {name}; write more of its path"
                raise ValueError(f"--only {self._file}: {rule}")
        return bool(found)

    def num_unknown(self) -> int:
        """Number of entries that have listed no image so far."""
        return sum(map(len, self._by_stem.values())) - len(self._image_of)


def _is_end(end: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    return parts[-len(end) :] == end


def _parts(path: str) -> tuple[str, ...]:
    parts = PurePosixPath(path.replace("\\", "/"))
    return (parts.with_suffix("") if parts.suffix.lower() in IMAGE_SUFFIXES else parts).parts or ("",)
