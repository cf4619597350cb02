"""`utils.server.images`: which images the server opens, and that it sees the same pixels as the learner (SRV-5)."""

import base64
import errno
import http.server
import io
import os
import struct
import threading
import time
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from PIL import Image

from tests.data.test_images import DEEP_GREY, eps, png, shard
from utils.data.images import EXIF_ORIENTATION, as_sent, find_in_shard, open_image, to_rgb
from utils.data.prompts import TooLarge
from utils.server import images
from utils.server.images import ImageRefused, ImageStore


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "allowed"
    folder.mkdir()
    (folder / "a.png").write_bytes(png())
    (tmp_path / "secret.png").write_bytes(png((1, 1, 1)))
    return folder


def test_files_below_a_root_are_read(root):
    """SRV-5"""
    store = ImageStore([root])
    assert store.open_all([str(root / "a.png")])[0].getpixel((0, 0)) == (10, 20, 30)
    assert store.open_all([f"file://{root}/a.png"])[0].size == (8, 6)
    assert store.open_all([str(root / "nothing" / ".." / "a.png")])[0].size == (8, 6)


@pytest.mark.parametrize(
    "trick",
    [
        "{root}/../secret.png",
        "{root}/link.png",
        "{root}/linked/secret.png",
        "/etc/passwd",
        "file://{root}/../secret.png",
    ]
    + ["/proc/self/root{root}/../secret.png", "/proc/self/environ"],
)
def test_nothing_outside_the_roots_is_read(root, trick):
    """SRV-5: `..`, symbolic links, `file://` and /proc do not escape the roots."""
    (root / "link.png").symlink_to(root.parent / "secret.png")
    (root / "linked").symlink_to(root.parent)
    with pytest.raises(ImageRefused, match="outside the directories"):
        ImageStore([root]).open_all([trick.format(root=root)])


def test_a_root_is_no_name_prefix(root):
    """SRV-5: /data does not open /database."""
    neighbour = root.parent / "allowed2"
    neighbour.mkdir()
    (neighbour / "a.png").write_bytes(png())
    with pytest.raises(ImageRefused):
        ImageStore([root]).open_all([str(neighbour / "a.png")])


def test_a_root_that_is_itself_a_link_works(root, tmp_path):
    """SRV-5"""
    (tmp_path / "alias").symlink_to(root)
    assert ImageStore([tmp_path / "alias"]).open_all([str(tmp_path / "alias" / "a.png")])[0].size == (8, 6)


def test_no_roots_means_no_files(root):
    """SRV-5"""
    with pytest.raises(ImageRefused):
        ImageStore([]).open_all([str(root / "a.png")])


def test_missing_broken_and_odd_files_are_unreadable_not_refused(root):
    """SRV-5: the request fails alone; a named pipe does not hang the server."""
    (root / "broken.png").write_bytes(png()[:30])
    (root / "text.png").write_text("hello")
    os.mkfifo(root / "pipe.png")
    for name in ("missing.png", "broken.png", "text.png", "pipe.png", ""):
        with pytest.raises(ValueError) as error:
            ImageStore([root]).open_all([str(root / name)])
        assert not isinstance(error.value, ImageRefused), name


def test_pipes_devices_and_directories_are_not_read(root):
    """SRV-5: not a byte of them, though they lie below a root."""
    os.mkfifo(root / "pipe.png")
    store = ImageStore([root, "/dev"])
    for path, words in ((root / "pipe.png", "regular"), ("/dev/zero", "regular"), (root, "Is a directory")):
        with pytest.raises(ValueError, match=words):
            store.open_all([str(path)])


def test_too_many_open_files_are_the_servers_fault_SRV_10(root, monkeypatch):
    """SRV-10: it may pass, so the call fails and is made again; no sample is given up for it."""
    for number in (errno.EMFILE, errno.ENFILE):
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", MagicMock(side_effect=OSError(number, "too many open files")))
            with pytest.raises(OSError, match="too many open files"):
                ImageStore([root]).open_all([str(root / "a.png")])


def test_a_hard_link_in_a_root_is_a_file_of_that_root(root):
    """SRV-5: nothing tells it from its other name."""
    os.link(root.parent / "secret.png", root / "linked.png")
    assert ImageStore([root]).open_all([str(root / "linked.png")])[0].getpixel((0, 0)) == (1, 1, 1)


def test_an_image_has_a_limit_of_bytes_SRV_10(root, monkeypatch):
    """SRV-10: a file and base64; of a URL see tests/security."""
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", len(png()) - 1)
    for source in (str(root / "a.png"), base64.b64encode(png()).decode()):
        with pytest.raises(ValueError, match="is larger than"):
            ImageStore([root]).open_all([source])


def test_few_pixels_are_decoded_at_once_SRV_10(monkeypatch):
    """SRV-10: the images of calls side by side wait for each other; one that is larger than all is decoded alone."""
    monkeypatch.setattr(images, "MAX_DECODING", 100)
    at_once, most, lock = [0], [], threading.Lock()

    def decode(image):
        with lock:
            at_once[0] += image.width * image.height
            most.append(at_once[0])
        time.sleep(0.05)
        with lock:
            at_once[0] -= image.width * image.height

    monkeypatch.setattr(images, "to_rgb", decode)
    sources = [base64.b64encode(png(size=size)).decode() for size in [(8, 6)] * 6 + [(20, 20)] * 2]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ImageStore([]).open_all, [[source] for source in sources]))
    assert max(pixels for pixels in most if pixels % 400) <= 100 and most.count(400) == 2


def tiled_tiff(side: int) -> str:
    """A TIFF of 16 x 16 pixels in one tile of `side` squared, as base64."""
    content = zlib.compress(bytes(side * side))
    tags = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side)]
    tags += [(324, 8 + 2 + 12 * (len(tags) + 2) + 4), (325, len(content))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    header = struct.pack("<2sHIH", b"II", 42, 8, len(tags))
    return base64.b64encode(header + entries + struct.pack("<I", 0) + content).decode()


def test_what_decodes_to_more_than_its_size_says_counts_as_much_SRV_10(monkeypatch):
    """SRV-10: a TIFF's tile may be larger than the image; an AVIF's frame shows its size only then."""
    taken, whole = [], ImageStore._while_decoding
    monkeypatch.setattr(ImageStore, "_while_decoding", lambda *args: taken.append(args[1]) or whole(*args))
    assert ImageStore([]).open_all([tiled_tiff(64)])[0].size == (16, 16)
    buffer = io.BytesIO()
    Image.new("RGB", (32, 24)).save(buffer, "AVIF")
    ImageStore([]).open_all([base64.b64encode(buffer.getvalue()).decode(), base64.b64encode(png()).decode()])
    assert taken == [64 * 64, images.MAX_DECODING, 8 * 6]
    monkeypatch.setattr(images, "MAX_DECODING", 63 * 64)
    with pytest.raises(TooLarge, match="a tile of 4096 pixels is larger than the image; write it with smaller tiles"):
        ImageStore([]).open_all([tiled_tiff(64)])


def tiff_of_strips(number: int, order: str = "<", is_big: bool = False) -> str:
    """A grey TIFF of 8 x 8 pixels, with places of so many strips of one row."""
    entry, whole = ("HHQQ", "2sHHHQQ") if is_big else ("HHLL", "2sHLH")
    tags = [
        (256, 1, 8),
        (257, 1, 8),
        (258, 1, 8),
        (259, 1, 1),
        (262, 1, 1),
        (273, number, 300),
        (277, 1, 1),
        (278, 1, 1),
    ]
    mark = b"II" if order == "<" else b"MM"
    head = (mark, 43, 8, 0, 16, len(tags)) if is_big else (mark, 42, 8, len(tags))
    data = struct.pack(order + whole, *head)
    for tag, count, value in tags:  # kind 4 is a long; a short value stands at the beginning of its field
        field = struct.pack(order + ("L4x" if is_big and count == 1 else entry[-1]), value)
        data += struct.pack(order + entry[:-1], tag, 4, count) + field
    data += bytes(300 - len(data)) + struct.pack(order + "L", 250) * number
    return "data:image/tiff;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize(("order", "is_big"), [("<", False), (">", False), ("<", True)])
def test_a_tiff_of_too_many_strips_is_refused_before_it_is_opened_SRV_10(order, is_big, monkeypatch):
    """SRV-10: Pillow lists them all, whatever the image's size."""
    assert ImageStore([]).open_all([tiff_of_strips(8, order, is_big)])[0].size == (8, 8)
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("was opened"))
    with pytest.raises(TooLarge, match="65537 strips or tiles, more than 65536"):
        ImageStore([]).open_all([tiff_of_strips(65_537, order, is_big)])


def png_with_text(number: int) -> str:
    """A PNG of 8 x 6 pixels with so many texts of a megabyte, which take a kilobyte each."""
    packed, content = zlib.compress(bytes(1_000_000)), png()
    chunks = [b"zTXt" + b"k%d\0\0" % i + packed for i in range(number)]
    packed = b"".join(struct.pack(">L", len(own) - 4) + own + struct.pack(">L", zlib.crc32(own)) for own in chunks)
    return "data:image/png;base64," + base64.b64encode(content[:33] + packed + content[33:]).decode()


def test_what_a_file_tells_besides_pixels_is_not_kept_SRV_10():
    """SRV-10: an image waits in memory until its request is answered."""
    with pytest.raises(ValueError, match="Too much memory used in text chunks"):
        ImageStore([]).open_all([png_with_text(5)])
    kept = ImageStore([]).open_all([png_with_text(3)])[0]
    assert kept.size == (8, 6) and kept.info == {} and not getattr(kept, "text", None)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF"])
def test_nine_formats_are_read(kind):
    """SRV-5"""
    buffer = io.BytesIO()
    Image.new("RGB", (32, 24)).save(buffer, kind)
    text = base64.b64encode(buffer.getvalue()).decode()
    for source in (f"data:image/x;base64,{text}", text):
        assert ImageStore([]).open_all([source])[0].size == (32, 24)
    assert set(images.FORMATS) == {"PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF"}


def test_base64_and_data_uris(root):
    """SRV-5"""
    store = ImageStore([])
    text = base64.b64encode(png()).decode()
    assert store.open_all([text])[0].size == (8, 6)
    assert store.open_all([f"data:image/png;base64,{text}"])[0].size == (8, 6)
    jpeg = io.BytesIO()
    Image.new("RGB", (8, 6)).save(jpeg, "JPEG")
    text = base64.b64encode(jpeg.getvalue()).decode()
    assert text.startswith("/9j/")  # looks like an absolute path
    assert store.open_all([text])[0].size == (8, 6)
    for bad in ("data:image/png,xyz", "data:image/png;base64,!!!", "data:image/png;base64,aGVsbG8="):
        with pytest.raises(ValueError):
            store.open_all([bad])
    with pytest.raises(ValueError, match="broken base64 image"):
        store.open_all(["data:image/png;base64,\u00e9\u00e9\u00e9\u00e9"])
    lines = "\r\n".join(text[at : at + 76] for at in range(0, len(text), 76))
    assert store.open_all([f" {lines}\n"])[0].size == (8, 6)


@pytest.mark.parametrize("path", ["UDUK", "P5" * 40, "UDYx" * 20, "UDUK.ppm/images/0000000000000001"])
def test_paths_are_no_base64(root, path, monkeypatch):
    """SRV-5: not even those that begin as an image of few magic bytes would."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(png())
    monkeypatch.chdir(root)
    assert ImageStore([root]).open_all([path])[0].size == (8, 6)


def declared(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is so large."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [header, b"IDAT" + zlib.compress(b"\0" * 1000)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks
    )


@pytest.mark.parametrize("size", [(8192, 8193), (12_000, 12_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_decompression_bombs_are_refused_by_their_header(size):
    """SRV-5: 12,000 x 12,000 is what Pillow only warns about; nothing is unpacked."""
    tracemalloc.start()
    with pytest.raises(ValueError, match="pixels") as error:
        ImageStore([]).open_all(["data:image/png;base64," + base64.b64encode(declared(*size)).decode()])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not isinstance(error.value, ImageRefused) and peak < 4 << 20


def test_formats_whose_decoder_runs_a_program_are_no_images(monkeypatch):
    """SRV-5: Pillow hands EPS to Ghostscript."""
    monkeypatch.setattr("subprocess.check_call", lambda *_, **__: pytest.fail("a program was run"))
    with pytest.raises(ValueError, match="not a readable image"):
        ImageStore([]).open_all([eps()])


def test_a_directory_that_becomes_a_link_after_the_check_is_not_followed(root, monkeypatch):
    """SRV-5: what counts is the file that was opened in the end."""
    (root / "inside").mkdir()
    (root / "inside" / "secret.png").write_bytes(png())
    resolve = Path.resolve

    def resolve_then_swap(path):
        real = resolve(path)
        if path.name == "secret.png":
            os.rename(root / "inside", root / "before")
            (root / "inside").symlink_to(root.parent)
        return real

    store = ImageStore([root])
    monkeypatch.setattr(Path, "resolve", resolve_then_swap)
    with pytest.raises(ImageRefused):
        store.open_all([str(root / "inside" / "secret.png")])


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/a.png", "https://example.com/a.png", "ftp://x/a.png", "s3://b/a"])
def test_urls_are_refused_by_default(url):
    """SRV-5"""
    with pytest.raises(ImageRefused, match="allow_image_urls"):
        ImageStore([]).open_all([url])


def test_urls_are_fetched_when_allowed():
    """SRV-5: only http(s), even then."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):  # noqa: N802
            self.send_response(200 if self.path == "/a.png" else 404)
            self.end_headers()
            self.wfile.write(png())

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        base = f"http://127.0.0.1:{server.server_port}"
        store = ImageStore([], allow_urls=True)
        assert store.open_all([f"{base}/a.png"])[0].size == (8, 6)
        with pytest.raises(ValueError) as error:
            store.open_all([f"{base}/b.png"])
        assert not isinstance(error.value, ImageRefused)
        with pytest.raises(ImageRefused):
            store.open_all(["ftp://127.0.0.1/a.png"])
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("place", ["a b", "h:port", "127.0.0.1:99999999999999999999"])
def test_an_url_that_names_no_server_is_unreadable_SRV_10(place):
    """SRV-5, SRV-10: `http.client` has errors of its own."""
    with pytest.raises(ValueError, match="cannot fetch image"):
        ImageStore([], allow_urls=True).open_all([f"http://{place}/x.png"])


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P", "L", "1", "turned"])
def test_server_and_learner_see_the_same_pixels(root, mode):
    """ROL-3, SRV-5"""
    image = Image.effect_noise((7, 5), 60).convert("RGB")
    path = root / "x.png"
    if mode == "turned":
        exif = Image.Exif()
        exif[EXIF_ORIENTATION] = 6
        path = root / "x.jpg"
        image.save(path, exif=exif)
    else:
        if mode in ("RGBA", "LA"):
            image.putalpha(100)
        image.convert(mode).save(path)
    ours, theirs = ImageStore([root]).open_all([str(path)])[0], open_image(path)
    assert ours.size == theirs.size and ours.tobytes() == theirs.tobytes()
    assert to_rgb(Image.open(path)).mode == "RGB"


@pytest.mark.parametrize(("mode", "name"), DEEP_GREY)
def test_deep_grey_values_are_refused_SRV_5(root, mode, name):
    """SRV-5: as the learner refuses them."""
    Image.new(mode, (7, 5), 3000).save(root / name)
    with pytest.raises(ValueError, match="grey values of more than 8 bits"):
        ImageStore([root]).open_all([str(root / name)])


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
def test_messages_do_not_repeat_a_whole_payload(prefix):
    text = prefix + base64.b64encode(png() + bytes(1 << 20)).decode() + "!"
    with pytest.raises(ValueError, match="broken base64") as error:
        ImageStore([]).open_all([text])
    assert len(str(error.value)) < 300


def test_srv_5_a_server_opens_no_shards(tmp_path):
    """SRV-5, DAT-6: a member's path is no file below its roots; what a learner sends in its place needs none."""
    image = Image.effect_noise((40, 30), 90).convert("RGB")
    member = f"{shard(tmp_path / '000.tar', a=image)}/a.png"
    with pytest.raises(ValueError, match="cannot read image"):
        ImageStore([tmp_path]).open_all([member])
    for source in (member, find_in_shard(member)):
        assert ImageStore([]).open_all([as_sent(source)])[0].tobytes() == image.tobytes()
