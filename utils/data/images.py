"""Open the images of data files, in tar shards too. Learner and server turn pixels into RGB with `to_rgb`."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import posixpath
import tarfile
import threading
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from PIL import Image, PngImagePlugin, UnidentifiedImageError

MAX_IMAGE_BYTES = 64 << 20
PngImagePlugin.MAX_TEXT_MEMORY = 4 << 20  # unpacked, of one image (Pillow: 64 MiB); a server opens many at once
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")  # not EPS, which runs a program
EXIF_ORIENTATION = 0x0112
_TURNS = {  # by the orientation of an image as it is stored
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
HEADER_BYTES = tarfile.BLOCKSIZE  # of a shard's member, before its content
MARK_BYTES = 8 * HEADER_BYTES  # of header and content, that tell a member from any other
START_AGAIN = "remove data_index in the run directory and start again"


def shortened(source: str | os.PathLike) -> str:
    """Shorten a source for messages; a base64 payload is megabytes long."""
    name = os.fspath(source)
    is_path = len(name) <= 500 and not name.startswith("data:")
    return name if is_path else f"{name[:40]}... ({len(name)} characters)"


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB, turned as the EXIF tag says, transparency on white, without what else the file tells (profiles,
    texts). Raises ValueError for deep grey values."""
    check_depth(image)
    image.load()  # Pillow turns a TIFF here
    # ImageOps.exif_transpose also writes the other tags anew, which fails where one has an unusual type.
    turn = _TURNS.get(image.getexif().get(EXIF_ORIENTATION, 1))
    if turn is not None:  # FLIP_LEFT_RIGHT is 0
        image = image.transpose(turn)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image if image.mode == "RGBA" else image.convert("RGBA")  # one copy less
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        return white
    rgb = image.convert("RGB")
    rgb.info.clear()
    return rgb


def check_depth(image: Image.Image) -> None:
    """Raise ValueError for grey values of more than 8 bits: Pillow would cut them off at 255, to a white image."""
    if image.mode.startswith(("I", "F")):
        reason = "no rule fits all of them; save it with 8 bits per channel"
        raise ValueError(f"grey values of more than 8 bits (Pillow's mode {image.mode}): {reason}")


class ShardImage(str):
    """An image in a tar shard, as `shard.tar/member.jpg`, with the place of its bytes in the shard, and the `mark` that
    was found there; None where the shard's headers have just been read."""

    offset: int
    num_bytes: int
    mark: int | None

    def __new__(cls, path: str, offset: int, num_bytes: int, mark: int | None = None) -> ShardImage:
        image = super().__new__(cls, path)
        image.offset, image.num_bytes, image.mark = offset, num_bytes, mark
        return image

    def read(self) -> bytes:
        """Its bytes. Raises OSError, also if something else lies there by now."""
        found = self._read(HEADER_BYTES + self.num_bytes)
        if self.mark not in (None, zlib.crc32(found[:MARK_BYTES])):
            raise OSError(f"{_shard_and_member(self)[0]}: has changed since it was checked; {START_AGAIN}")
        return found[HEADER_BYTES:]

    def read_mark(self) -> int:
        """The checksum of its header, with name and size, and of its first bytes: unlike a time, the same on all nodes.
        Raises OSError."""
        return zlib.crc32(self._read(min(HEADER_BYTES + self.num_bytes, MARK_BYTES)))

    def _read(self, num_bytes: int) -> bytes:
        with open(_shard_and_member(self)[0], "rb") as shard:
            return os.pread(shard.fileno(), num_bytes, self.offset - HEADER_BYTES)


def find_in_shard(image: str) -> ShardImage | None:
    """The image in a tar shard that a path names, None if it names none. Raises OSError if the shard has no such member
    or cannot be read."""
    shard, member = _shard_and_member(image)
    if not member or not os.path.isfile(shard):
        return None
    with _reading_shards:  # threads that need the same one wait for the first
        found = _members(shard, os.stat(shard).st_mtime_ns).get(member)
    if found is None:
        raise FileNotFoundError(f"{shortened(image)}: no such image")
    return ShardImage(image, *found)


def as_sent(image: str) -> str:
    """The image as a rollout server takes it, which opens no shards: a path, or bytes in a `data:` URI."""
    found = image if isinstance(image, ShardImage) else None if image.startswith("data:") else find_in_shard(image)
    return f"data:image;base64,{base64.b64encode(found.read()).decode()}" if found else image


def as_file(image: str, folder: Path) -> str:
    """The path of an image; one that is embedded in the data (`data:`) is written below `folder`, once. Raises an
    OSError that names it as `open_image` does, or the file that cannot be written."""
    if not image.startswith("data:"):
        return image
    with _opened(image) as opened:
        kind = str(opened.format).lower()
    content = base64.b64decode(image.partition(",")[2])
    path = folder.absolute() / f"{hashlib.sha256(content).hexdigest()[:32]}.{kind}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{uuid.uuid4().hex}")  # other ranks may write the same image
        partial.write_bytes(content)
        partial.replace(path)
    return str(path)


_reading_shards = threading.Lock()


def _shard_and_member(path: str) -> tuple[str, str]:
    shard, _, member = path.partition(".tar/")
    return f"{shard}.tar", member


@lru_cache(maxsize=64)
def _members(shard: str, mtime_ns: int) -> dict[str, tuple[int, int]]:
    """Offset and size of the files in an uncompressed tar file. Only its headers are read."""
    try:
        with tarfile.open(shard, "r:") as archive:
            files = [member for member in archive if member.isreg()]
    except tarfile.TarError as error:
        raise OSError(f"{shard}: {error}") from None
    return {posixpath.normpath(member.name): (member.offset_data, member.size) for member in files}


def open_image(image: str | os.PathLike) -> Image.Image:
    """Return the image at a path, in a tar shard or in a `data:` URI as RGB. Raises an `OSError` that names it if it is
    missing (`FileNotFoundError`), unreadable or not an image."""
    with _opened(image) as opened:
        return to_rgb(opened)


def image_size(image: str | os.PathLike, decode: bool = False) -> tuple[int, int]:
    """Return (height, width) as `open_image` will give it, from the header alone; `decode`: only if all pixels can be
    decoded too. Raises as `open_image` does."""
    with _opened(image) as opened:
        check_depth(opened)
        if opened.format == "TIFF":  # Pillow turns it as it loads, by EXIF or XMP; its header tells half of that
            opened.load()
        width, height = opened.size
        turned = opened.getexif().get(EXIF_ORIENTATION, 1) in (5, 6, 7, 8)
        if decode:
            opened.draft(None, (1, 1))  # a JPEG at an eighth of its size: still all of the file, in a third of the time
            opened.load()
    return (width, height) if turned else (height, width)


@contextmanager
def _opened(image: str | os.PathLike) -> Iterator[Image.Image]:
    """Open lazily. Whatever Pillow raises inside becomes an `OSError` that names the image."""
    name = os.fspath(image)
    try:
        if name.startswith("data:"):
            source: BinaryIO = io.BytesIO(base64.b64decode(name.partition(",")[2], validate=True))
        elif found := image if isinstance(image, ShardImage) else find_in_shard(name):
            source = io.BytesIO(found.read())
        else:  # a path itself Pillow would map into memory, where a grey TIFF that EXIF turns has its sides swapped
            source = open(name, "rb")
        with source, Image.open(source, formats=FORMATS) as opened:
            yield opened
    except binascii.Error as error:
        raise OSError(f"{shortened(image)}: bad base64: {error}") from None
    except FileNotFoundError:
        raise FileNotFoundError(f"{shortened(image)}: no such image") from None
    except NotADirectoryError:
        raise OSError(f"{shortened(image)}: in something that is no folder, and no uncompressed .tar file") from None
    except UnidentifiedImageError:
        rule = f"not an image that can be read; formats: {', '.join(FORMATS)}"
        raise OSError(f"{shortened(image)}: {rule}") from None
    except Exception as error:  # Pillow's decoders raise any kind of error for broken bytes
        raise OSError(f"{shortened(image)}: {getattr(error, 'strerror', None) or error}") from None
