"""The images of requests: from data URIs, base64, files below allowed folders, and URLs where they are allowed (SRV-5).

The rollout server reads nothing else. It turns pixels into RGB as the learner does.
"""

from __future__ import annotations

import base64
import binascii
import errno
import http.client
import io
import os
import re
import stat
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.TiffImagePlugin import (
    PREFIXES,
    STRIPBYTECOUNTS,
    STRIPOFFSETS,
    TILEBYTECOUNTS,
    TILELENGTH,
    TILEOFFSETS,
    TILEWIDTH,
    TiffImageFile,
)

from utils.config.rollout import MAX_IMAGE_PIXELS
from utils.data.images import FORMATS, MAX_IMAGE_BYTES, shortened, to_rgb
from utils.data.prompts import TooLarge

MAX_DECODING = 64 << 20  # pixels decoded at once
MAX_PIECES = 1 << 16  # of a TIFF
_PIECES = {STRIPOFFSETS, STRIPBYTECOUNTS, TILEOFFSETS, TILEBYTECOUNTS}
URL_TIMEOUT_S = 20.0  # without a byte
URL_TOTAL_S = 60.0  # for the body
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


def _decoded_pixels(image: Image.Image) -> int:
    """Pixels that decoding an image may take, of which its size says nothing in two formats.

    Raises: TooLarge for a TIFF with a tile of more than `MAX_DECODING`: it may be far larger than the image. An AVIF's
    frame is scaled to the size that the file declares; only decoding shows its own, so it is decoded alone.
    """
    pixels = image.width * image.height
    if image.format == "AVIF":
        return max(pixels, MAX_DECODING)
    if isinstance(image, TiffImageFile):
        tile = int(image.tag_v2.get(TILEWIDTH, 0)) * int(image.tag_v2.get(TILELENGTH, 0))
        if tile > max(pixels, MAX_DECODING):
            raise TooLarge(f"a tile of {tile} pixels is larger than the image; write it with smaller tiles")
        return max(pixels, tile)
    return pixels


def _check_tags(data: bytes) -> None:
    """Raise TooLarge for a TIFF with more strips or tiles than `MAX_PIECES`: Pillow lists them all when it opens it,
    however small the image is."""
    if not data.startswith(tuple(PREFIXES)):
        return
    order, is_big = ">" if data.startswith(b"MM") else "<", data[2] == ord("+")  # as Pillow reads the header
    first, number, entry = (f"{order}{own}" for own in (("8xQ", "Q", "HHQ8x") if is_big else ("4xL", "H", "HHL4x")))
    (start,) = struct.unpack_from(first, data)
    (num_tags,) = struct.unpack_from(number, data, start)
    tags = memoryview(data)[start + struct.calcsize(number) :]
    num_tags = min(num_tags, len(tags) // struct.calcsize(entry))
    for tag, _, count in struct.iter_unpack(entry, tags[: num_tags * struct.calcsize(entry)]):
        if tag in _PIECES and count > MAX_PIECES:
            raise TooLarge(f"it has {count} strips or tiles, more than {MAX_PIECES}; write it with larger ones")


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

    def open_all(self, sources: Sequence[str], budgets: Sequence[PixelBudget] = ()) -> list[Image.Image]:
        """Return the images of a request as RGB, fully decoded. Blocking: call it in a thread.

        Args:
            budgets: further ones that the images count towards.

        Raises:
            ImageRefused: path outside the roots, URL not allowed.
            ValueError: unreadable, more pixels than allowed, or not an image.
        """
        budgets = [PixelBudget(self.max_pixels, "request"), *budgets]
        return [self._open(source, budgets) for source in sources]

    def _open(self, source: str, budgets: Sequence[PixelBudget]) -> Image.Image:
        data = self._read(source)
        try:
            _check_tags(data)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            for budget in budgets:
                budget.take(image.width * image.height)
            with self._while_decoding(_decoded_pixels(image)):
                return to_rgb(image)
        except TooLarge as error:
            raise TooLarge(f"{shortened(source)}: {error}") from None
        except Exception as error:  # Pillow's decoders raise any kind of error for broken bytes
            raise ValueError(f"not a readable image: {shortened(source)}: {error}") from error

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
                raise ValueError(f"data URI is not base64: {shortened(source)}")
            return _decode(payload, source)
        if re.match(r"(?i)[a-z][a-z0-9+.-]*://", source) and not source.startswith("file://"):
            return self._fetch(source)
        if _looks_like_base64(source):
            return _decode(source, source)
        return self._read_file(source.removeprefix("file://"))

    def _read_file(self, path: str) -> bytes:
        if "\0" in path or len(path) > 4096:
            raise ValueError(f"not an image path, URL, base64 or data URI: {shortened(path)}")
        try:
            real = Path(path).resolve()
        except (OSError, RuntimeError) as error:
            raise ValueError(f"cannot read image {shortened(path)}: {error}") from error
        self._check_inside(real, path)
        try:
            # O_NONBLOCK: a named pipe must not hang the server. O_NOFOLLOW: the resolved path holds no links.
            with os.fdopen(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise ValueError(f"image {shortened(path)} is not a regular file")
                # Check the file that was opened: a directory may have been swapped for a link since the check above.
                self._check_inside(Path(os.readlink(f"/proc/self/fd/{file.fileno()}")), path)
                return _bounded(file.read(MAX_IMAGE_BYTES + 1), path)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # this server's fault, which may pass
            raise ValueError(f"cannot read image {shortened(path)}: {error.strerror}") from error

    def _check_inside(self, real: Path, path: str) -> None:
        """Raise ImageRefused unless `real`, which holds no links, lies below a root."""
        if not any(real.is_relative_to(root) for root in self.roots):
            roots = ", ".join(map(str, self.roots)) or "(none)"
            raise ImageRefused(
                f"image {shortened(path)} lies outside the directories this server may read: {roots}; "
                "add its directory to rollout_server.allowed_image_roots or send the image as base64"
            )

    def _fetch(self, url: str) -> bytes:
        if not self.allow_urls or not re.match(r"(?i)https?://", url):
            raise ImageRefused(
                f"image URL {shortened(url)} refused: only http(s), and only with rollout_server.allow_image_urls: true"
            )
        try:
            with urllib.request.build_opener(_CheckedRedirects).open(url, timeout=URL_TIMEOUT_S) as response:
                return _bounded(_read_in_time(response), url)
        except (OSError, OverflowError, http.client.HTTPException) as error:  # overflow: the number of a port
            raise ValueError(f"cannot fetch image {shortened(url)}: {error}") from error


class _CheckedRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects only where the first URL could have led: urllib alone would go on to ftp."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not re.match(r"(?i)https?://", newurl):
            raise ImageRefused(f"image URL {shortened(req.full_url)} redirects to {shortened(newurl)}: only http(s)")
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
        packed = payload.encode("ascii").translate(None, b" \t\r\n\v\f")
        return _bounded(base64.b64decode(packed, validate=True), source)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError(f"broken base64 image {shortened(source)}: {error}") from error


def _bounded(data: bytes, source: str) -> bytes:
    if len(data) > MAX_IMAGE_BYTES:
        raise ValueError(f"image {shortened(source)} is larger than {MAX_IMAGE_BYTES >> 20} MiB")
    return data
