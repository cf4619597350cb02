"""Open images: the learner's from data files, and the rollout server's, which may read only what it is allowed (SRV-5).

The server uses no network unless that is allowed. Both sides turn pixels into RGB with `to_rgb`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import http.client
import io
import os
import posixpath
import re
import stat
import tarfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image, ImageOps, UnidentifiedImageError

from utils.config.rollout import MAX_IMAGE_PIXELS
from utils.data.prompts import TooLarge

MAX_IMAGE_BYTES = 64 << 20
MAX_DECODING = 64 << 20  # pixels decoded at once
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")  # not EPS, which runs a program
URL_TIMEOUT_S = 20.0  # without a byte
URL_TOTAL_S = 60.0  # for the body
EXIF_ORIENTATION = 0x0112
_MAGIC = re.compile(
    rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF|BM|II\*\0|MM\0\*|P[1-6]\s|\0\0\0\x0cjP  |\xff\x4f\xff\x51|.{4}ftyp", re.DOTALL
)
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*\Z")


class ImageRefused(ValueError):
    """The server is not allowed to read this image; a retry cannot help."""


class PixelBudget:
    """Pixels that images may have together. Their headers count, before anything is decoded: a few kilobytes can unpack
    to any number of pixels."""

    def __init__(self, limit: int, whose: str) -> None:
        self._limit, self._whose, self._taken, self._lock = limit, whose, 0, threading.Lock()

    def take(self, pixels: int) -> None:
        """Raises TooLarge if it is not enough."""
        with self._lock:
            if self._taken + pixels > self._limit:
                raise TooLarge(
                    f"the images of a {self._whose} have at most {self._limit} pixels, {pixels} of this one included; "
                    "raise rollout_server.max_image_pixels or send smaller ones"
                )
            self._taken += pixels


class ImageStore:
    """Read images from data URIs, base64, http(s) URLs if `allow_urls`, and files below the directories `roots`, which
    must hold them after all `..` and symbolic links are resolved."""

    def __init__(
        self, roots: Sequence[str | os.PathLike], allow_urls: bool = False, max_pixels: int = MAX_IMAGE_PIXELS
    ) -> None:
        self.roots = [Path(root).resolve() for root in roots]
        self.allow_urls = allow_urls
        self.max_pixels = max_pixels
        self._decoding, self._fewer = 0, threading.Condition()

    def open(self, source: str) -> Image.Image:
        """Return the image as RGB, fully decoded. Blocking: call it in a thread. Raises as `open_all` does."""
        return self.open_all([source])[0]

    def open_all(self, sources: Sequence[str], budgets: Sequence[PixelBudget] = ()) -> list[Image.Image]:
        """Return the images of a request; `budgets` are further ones that they count towards.

        Raises:
            ImageRefused: path outside the roots, URL not allowed.
            ValueError: unreadable, more pixels than allowed, or not an image.
        """
        budgets = [PixelBudget(self.max_pixels, "request"), *budgets]
        return [self._open(source, budgets) for source in sources]

    def _open(self, source: str, budgets: Sequence[PixelBudget]) -> Image.Image:
        data = self._read(source)
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            pixels = image.width * image.height
            for budget in budgets:
                budget.take(pixels)
            with self._while_decoding(pixels):
                return to_rgb(image)
        except TooLarge as error:
            raise TooLarge(f"{_short(source)}: {error}") from None
        except Exception as error:  # Pillow's decoders raise any kind of error for broken bytes
            raise ValueError(f"not a readable image: {_short(source)}: {error}") from error

    @contextmanager
    def _while_decoding(self, pixels: int) -> Iterator[None]:
        """Wait until at most `MAX_DECODING` pixels are being decoded with these, or these alone."""
        with self._fewer:
            self._fewer.wait_for(lambda: not self._decoding or self._decoding + pixels <= MAX_DECODING)
            self._decoding += pixels
        try:
            yield
        finally:
            with self._fewer:
                self._decoding -= pixels
                self._fewer.notify_all()

    def _read(self, source: str) -> bytes:
        if source.startswith("data:"):
            header, _, payload = source.partition(",")
            if not header.endswith(";base64"):
                raise ValueError(f"data URI is not base64: {_short(source)}")
            return _decode(payload, source)
        if re.match(r"(?i)[a-z][a-z0-9+.-]*://", source) and not source.startswith("file://"):
            return self._fetch(source)
        if _looks_like_base64(source):
            return _decode(source, source)
        return self._read_file(source.removeprefix("file://"))

    def _read_file(self, path: str) -> bytes:
        if "\0" in path or len(path) > 4096:
            raise ValueError(f"not an image path, URL, base64 or data URI: {_short(path)}")
        try:
            real = Path(path).resolve()
        except (OSError, RuntimeError) as error:
            raise ValueError(f"cannot read image {_short(path)}: {error}") from error
        self._check_inside(real, path)
        try:
            # O_NONBLOCK: a named pipe must not hang the server. O_NOFOLLOW: the resolved path holds no links.
            with os.fdopen(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise ValueError(f"image {_short(path)} is not a regular file")
                # Check the file that was opened: a directory may have been swapped for a link since the check above.
                self._check_inside(Path(os.readlink(f"/proc/self/fd/{file.fileno()}")), path)
                return _bounded(file.read(MAX_IMAGE_BYTES + 1), path)
        except OSError as error:
            raise ValueError(f"cannot read image {_short(path)}: {error.strerror}") from error

    def _check_inside(self, real: Path, path: str) -> None:
        """Raise ImageRefused unless `real`, which holds no links, lies below a root."""
        if not any(real.is_relative_to(root) for root in self.roots):
            roots = ", ".join(map(str, self.roots)) or "(none)"
            raise ImageRefused(
                f"image {_short(path)} lies outside the directories this server may read: {roots}; "
                "add its directory to rollout_server.allowed_image_roots or send the image as base64"
            )

    def _fetch(self, url: str) -> bytes:
        if not self.allow_urls or not re.match(r"(?i)https?://", url):
            raise ImageRefused(
                f"image URL {_short(url)} refused: only http(s), and only with rollout_server.allow_image_urls: true"
            )
        try:
            with urllib.request.build_opener(_CheckedRedirects).open(url, timeout=URL_TIMEOUT_S) as response:
                return _bounded(_read_in_time(response), url)
        except (OSError, OverflowError, http.client.HTTPException) as error:  # overflow: the number of a port
            raise ValueError(f"cannot fetch image {_short(url)}: {error}") from error


class _CheckedRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects only where the first URL could have led: urllib alone would go on to ftp."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not re.match(r"(?i)https?://", newurl):
            raise ImageRefused(f"image URL {_short(req.full_url)} redirects to {_short(newurl)}: only http(s)")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _read_in_time(response: Any) -> bytes:
    """Read a body; TimeoutError after `URL_TOTAL_S`: a byte now and then would hold the thread for ever."""
    deadline, data = time.monotonic() + URL_TOTAL_S, bytearray()
    while len(data) <= MAX_IMAGE_BYTES and (part := response.read1(1 << 20)):
        data += part
        if time.monotonic() > deadline:
            raise TimeoutError(f"not whole within {URL_TOTAL_S:g} s")
    return bytes(data)


def _looks_like_base64(source: str) -> bool:
    """Tell whether the text decodes to the start of an image file. "/9j/..." is a JPEG, not a path."""
    head = source[:64].strip()
    head = head[: len(head) // 4 * 4]
    if len(source) < 24 or not _BASE64.match(head):
        return False
    try:
        return bool(_MAGIC.match(base64.b64decode(head)))
    except binascii.Error:
        return False


def _decode(payload: str, source: str) -> bytes:
    try:
        return _bounded(base64.b64decode("".join(payload.split()), validate=True), source)
    except binascii.Error as error:
        raise ValueError(f"broken base64 image {_short(source)}: {error}") from error


def _bounded(data: bytes, source: str) -> bytes:
    if len(data) > MAX_IMAGE_BYTES:
        raise ValueError(f"image {_short(source)} is larger than {MAX_IMAGE_BYTES >> 20} MiB")
    return data


def _short(source: str | os.PathLike) -> str:
    """Shorten a source for messages; a base64 payload is megabytes long."""
    name = os.fspath(source)
    is_path = len(name) <= 500 and not name.startswith("data:")
    return name if is_path else f"{name[:40]}... ({len(name)} characters)"


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB, turned as the EXIF tag says, transparency on white. Raises ValueError for deep grey values."""
    check_depth(image)
    image = ImageOps.exif_transpose(image)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def check_depth(image: Image.Image) -> None:
    """Raise ValueError for grey values of more than 8 bits: Pillow would cut them off at 255, to a white image."""
    if image.mode.startswith(("I", "F")):
        reason = "no rule fits all of them; save it with 8 bits per channel"
        raise ValueError(f"grey values of more than 8 bits (Pillow's mode {image.mode}): {reason}")


class ShardImage(str):
    """An image in a tar shard, as `shard.tar/member.jpg`, with the place of its bytes in the shard."""

    offset: int
    num_bytes: int

    def __new__(cls, path: str, offset: int, num_bytes: int) -> ShardImage:
        image = super().__new__(cls, path)
        image.offset, image.num_bytes = offset, num_bytes
        return image

    def read(self) -> bytes:
        """Its bytes. Raises OSError."""
        with open(_shard_and_member(self)[0], "rb") as shard:
            return os.pread(shard.fileno(), self.num_bytes, self.offset)


def find_in_shard(image: str) -> ShardImage | None:
    """The image in a tar shard that a path names, None if it names none. Raises OSError if the shard has no such member
    or cannot be read."""
    shard, member = _shard_and_member(image)
    if not member or not os.path.isfile(shard):
        return None
    with _reading_shards:  # threads that need the same one wait for the first
        found = _members(shard, os.stat(shard).st_mtime_ns).get(member)
    if found is None:
        raise FileNotFoundError(f"{_short(image)}: no such image")
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
        width, height = opened.size
        # Pillow gives a TIFF's size as it is shown.
        turned = opened.format != "TIFF" and opened.getexif().get(EXIF_ORIENTATION, 1) in (5, 6, 7, 8)
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
        raise OSError(f"{_short(image)}: bad base64: {error}") from None
    except FileNotFoundError:
        raise FileNotFoundError(f"{_short(image)}: no such image") from None
    except UnidentifiedImageError:
        rule = f"not an image that can be read; formats: {', '.join(FORMATS)}"
        raise OSError(f"{_short(image)}: {rule}") from None
    except Exception as error:  # Pillow's decoders raise any kind of error for broken bytes
        raise OSError(f"{_short(image)}: {getattr(error, 'strerror', None) or error}") from None
