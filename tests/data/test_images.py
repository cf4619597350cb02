"""`utils.data.images`: which images the server opens, and that it sees the same pixels as the learner (SRV-5)."""

import base64
import http.server
import io
import os
import struct
import tarfile
import threading
import time
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from tests.data.test_samples import load_one
from tests.data.test_samples import png as write_png
from utils.data import images
from utils.data.images import (
    EXIF_ORIENTATION,
    ImageRefused,
    ImageStore,
    as_file,
    as_sent,
    find_in_shard,
    image_size,
    open_image,
    to_rgb,
)
from utils.data.samples import DataError


def png(colour=(10, 20, 30), size=(8, 6)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


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
    assert store.open(str(root / "a.png")).getpixel((0, 0)) == (10, 20, 30)
    assert store.open(f"file://{root}/a.png").size == (8, 6)
    assert store.open(str(root / "nothing" / ".." / "a.png")).size == (8, 6)


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
        ImageStore([root]).open(trick.format(root=root))


def test_a_root_is_no_name_prefix(root):
    """SRV-5: /data does not open /database."""
    neighbour = root.parent / "allowed2"
    neighbour.mkdir()
    (neighbour / "a.png").write_bytes(png())
    with pytest.raises(ImageRefused):
        ImageStore([root]).open(str(neighbour / "a.png"))


def test_a_root_that_is_itself_a_link_works(root, tmp_path):
    """SRV-5"""
    (tmp_path / "alias").symlink_to(root)
    assert ImageStore([tmp_path / "alias"]).open(str(tmp_path / "alias" / "a.png")).size == (8, 6)


def test_no_roots_means_no_files(root):
    """SRV-5"""
    with pytest.raises(ImageRefused):
        ImageStore([]).open(str(root / "a.png"))


def test_missing_broken_and_odd_files_are_unreadable_not_refused(root):
    """SRV-5: the request fails alone; a named pipe does not hang the server."""
    (root / "broken.png").write_bytes(png()[:30])
    (root / "text.png").write_text("hello")
    os.mkfifo(root / "pipe.png")
    for name in ("missing.png", "broken.png", "text.png", "pipe.png", ""):
        with pytest.raises(ValueError) as error:
            ImageStore([root]).open(str(root / name))
        assert not isinstance(error.value, ImageRefused), name


def test_pipes_devices_and_directories_are_not_read(root):
    """SRV-5: not a byte of them, though they lie below a root."""
    os.mkfifo(root / "pipe.png")
    store = ImageStore([root, "/dev"])
    for path, words in ((root / "pipe.png", "regular"), ("/dev/zero", "regular"), (root, "Is a directory")):
        with pytest.raises(ValueError, match=words):
            store.open(str(path))


def test_a_hard_link_in_a_root_is_a_file_of_that_root(root):
    """SRV-5: nothing tells it from its other name."""
    os.link(root.parent / "secret.png", root / "linked.png")
    assert ImageStore([root]).open(str(root / "linked.png")).getpixel((0, 0)) == (1, 1, 1)


def test_an_image_has_a_limit_of_bytes_SRV_10(root, monkeypatch):
    """SRV-10: a file and base64; of a URL see tests/security."""
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", len(png()) - 1)
    for source in (str(root / "a.png"), base64.b64encode(png()).decode()):
        with pytest.raises(ValueError, match="is larger than"):
            ImageStore([root]).open(source)


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
        list(pool.map(ImageStore([]).open, sources))
    assert max(pixels for pixels in most if pixels % 400) <= 100 and most.count(400) == 2


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF"])
def test_nine_formats_are_read(kind):
    """SRV-5"""
    buffer = io.BytesIO()
    Image.new("RGB", (32, 24)).save(buffer, kind)
    text = base64.b64encode(buffer.getvalue()).decode()
    for source in (f"data:image/x;base64,{text}", text):
        assert ImageStore([]).open(source).size == (32, 24)
    assert set(images.FORMATS) == {"PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF"}


def test_base64_and_data_uris(root):
    """SRV-5"""
    store = ImageStore([])
    text = base64.b64encode(png()).decode()
    assert store.open(text).size == (8, 6)
    assert store.open(f"data:image/png;base64,{text}").size == (8, 6)
    jpeg = io.BytesIO()
    Image.new("RGB", (8, 6)).save(jpeg, "JPEG")
    text = base64.b64encode(jpeg.getvalue()).decode()
    assert text.startswith("/9j/")  # looks like an absolute path
    assert store.open(text).size == (8, 6)
    for bad in ("data:image/png,xyz", "data:image/png;base64,!!!", "data:image/png;base64,aGVsbG8="):
        with pytest.raises(ValueError):
            store.open(bad)


@pytest.mark.parametrize("path", ["UDUK", "P5" * 40, "UDYx" * 20, "UDUK.ppm/images/0000000000000001"])
def test_paths_are_no_base64(root, path, monkeypatch):
    """SRV-5: not even those that begin as an image of few magic bytes would."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(png())
    monkeypatch.chdir(root)
    assert ImageStore([root]).open(path).size == (8, 6)


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
        ImageStore([]).open("data:image/png;base64," + base64.b64encode(declared(*size)).decode())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not isinstance(error.value, ImageRefused) and peak < 4 << 20


def test_formats_whose_decoder_runs_a_program_are_no_images(monkeypatch):
    """SRV-5: Pillow hands EPS to Ghostscript."""
    eps = io.BytesIO()
    Image.new("RGB", (8, 6)).save(eps, "EPS")
    monkeypatch.setattr("subprocess.check_call", lambda *_, **__: pytest.fail("a program was run"))
    source = "data:image/eps;base64," + base64.b64encode(eps.getvalue()).decode()
    with pytest.raises(ValueError, match="not a readable image"):
        ImageStore([]).open(source)
    for read in (open_image, image_size):  # the learner's
        with pytest.raises(OSError, match="not an image that can be read; formats: PNG, JPEG, "):
            read(source)


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
        store.open(str(root / "inside" / "secret.png"))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/a.png", "https://example.com/a.png", "ftp://x/a.png", "s3://b/a"])
def test_urls_are_refused_by_default(url):
    """SRV-5"""
    with pytest.raises(ImageRefused, match="allow_image_urls"):
        ImageStore([]).open(url)


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
        assert store.open(f"{base}/a.png").size == (8, 6)
        with pytest.raises(ValueError) as error:
            store.open(f"{base}/b.png")
        assert not isinstance(error.value, ImageRefused)
        with pytest.raises(ImageRefused):
            store.open("ftp://127.0.0.1/a.png")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("place", ["a b", "h:port", "127.0.0.1:99999999999999999999"])
def test_an_url_that_names_no_server_is_unreadable_SRV_10(place):
    """SRV-5, SRV-10: `http.client` has errors of its own."""
    with pytest.raises(ValueError, match="cannot fetch image"):
        ImageStore([], allow_urls=True).open(f"http://{place}/x.png")


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
    ours, theirs = ImageStore([root]).open(str(path)), open_image(path)
    assert ours.size == theirs.size and ours.tobytes() == theirs.tobytes()
    assert to_rgb(Image.open(path)).mode == "RGB"


@pytest.mark.parametrize(("mode", "name"), [("I;16", "x.png"), ("I;16", "x.tiff"), ("I", "x.tiff"), ("F", "x.tiff")])
def test_deep_grey_values_are_refused_DAT_3_SRV_5(root, mode, name):
    """DAT-3, SRV-5: Pillow would cut them off at 255, so that an X-ray is white, to learner and server alike."""
    Image.new(mode, (7, 5), 3000).save(root / name)
    for read in (open_image, image_size):
        with pytest.raises(OSError, match="x.*grey values of more than 8 bits .*mode I|F"):
            read(root / name)
    with pytest.raises(ValueError, match="grey values of more than 8 bits"):
        ImageStore([root]).open(str(root / name))
    with pytest.raises(DataError, match="grey values of more than 8 bits .*8 bits per channel"):
        load_one(root, images=[name], objects=[])


def test_open_image_turns_by_exif_and_puts_transparency_on_white(tmp_path):
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    Image.new("RGB", (40, 20), "blue").save(tmp_path / "turned.jpg", exif=exif)
    assert open_image(tmp_path / "turned.jpg").size == (20, 40)
    sample = load_one(tmp_path, images=["turned.jpg"], width=..., height=..., objects=[])
    assert (sample.width, sample.height) == (20, 40)
    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert open_image(tmp_path / "clear.png").getpixel((0, 0)) == (255, 255, 255)


def test_open_image_reads_a_data_uri():
    buffer = io.BytesIO()
    Image.new("RGB", (7, 5), "blue").save(buffer, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    assert open_image(uri).size == (7, 5)
    with pytest.raises(OSError, match="bad base64"):
        open_image("data:image/png;base64,@@@")


def test_dat_3_truncated_image_is_named_when_opened(tmp_path):
    """DAT-3."""
    whole = write_png(tmp_path / "t.png", 300, 300).read_bytes()
    (tmp_path / "t.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OSError, match="t.png"):
        open_image(tmp_path / "t.png")


@pytest.mark.parametrize("prefix", ["", "data:image/png;base64,"])
def test_messages_do_not_repeat_a_whole_payload(prefix):
    text = prefix + base64.b64encode(png() + bytes(1 << 20)).decode() + "!"
    with pytest.raises(ValueError, match="broken base64") as error:
        ImageStore([]).open(text)
    assert len(str(error.value)) < 300


def shard(path: Path, **members: Image.Image) -> Path:
    """A tar file of WebDataset's form: `KEY.png` beside `KEY.json`."""
    with tarfile.open(path, "w") as archive:
        for name, image in members.items():
            for suffix, content in ((".json", b"{}"), (".png", png_bytes(image))):
                info = tarfile.TarInfo(f"./{name}{suffix}" if name == "dotted" else f"{name}{suffix}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


def png_bytes(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def test_dat_6_images_in_tar_shards(tmp_path):
    """DAT-6: as files are opened, by Pillow's own reading of the bytes; what goes to a server are the bytes."""
    images = {name: Image.effect_noise((40 + i, 30), 90).convert("RGB") for i, name in enumerate(("a", "b", "dotted"))}
    path = shard(tmp_path / "000.tar", **images)
    for name, image in images.items():
        member = f"{path}/{name}.png"
        assert image_size(member) == image.size[::-1] and open_image(member).tobytes() == image.tobytes()
        found = find_in_shard(member)
        assert found == member and found.read() == png_bytes(image) and open_image(found).tobytes() == image.tobytes()
        for source in (member, found):
            sent = ImageStore([]).open(as_sent(source))  # which may read no file
            assert sent.tobytes() == image.tobytes()


def test_dat_6_what_is_not_in_a_shard(tmp_path):
    """DAT-6, DAT-3: missing members and broken shards are told; folders may have any name; other paths are as ever."""
    path = shard(tmp_path / "000.tar", a=Image.new("RGB", (4, 4)))
    link = tarfile.TarInfo("link.png")
    link.type, link.linkname = tarfile.SYMTYPE, "a.png"
    with tarfile.open(path, "a") as archive:
        archive.addfile(link)
    for missing in (f"{path}/link.png", f"{path}/b.png", f"{tmp_path}/001.tar/a.png", f"{path}/../a.png"):
        with pytest.raises(FileNotFoundError, match="no such image"):
            image_size(missing)
    with pytest.raises(OSError, match="not an image"):
        image_size(f"{path}/a.json")
    (tmp_path / "002.tar").write_bytes(b"no tar file" * 100)
    with pytest.raises(OSError, match=r"002.tar"):
        image_size(f"{tmp_path}/002.tar/a.png")
    (tmp_path / "folder.tar").mkdir()
    Image.new("RGB", (5, 6)).save(tmp_path / "folder.tar" / "a.png")
    assert image_size(tmp_path / "folder.tar" / "a.png") == (6, 5)
    plain = str(tmp_path / "folder.tar" / "a.png")
    assert as_sent(plain) == plain and as_sent("data:image;base64,AAAA") == "data:image;base64,AAAA"


def test_srv_5_a_server_opens_no_shards(tmp_path):
    """SRV-5: a member's path is no file below its roots."""
    path = shard(tmp_path / "000.tar", a=Image.new("RGB", (4, 4)))
    with pytest.raises(ValueError, match="cannot read image"):
        ImageStore([tmp_path]).open(f"{path}/a.png")


def test_an_embedded_image_becomes_one_file_LRN_7(tmp_path, root, monkeypatch):
    """LRN-7: the answers of an evaluation name a file with the same bytes, however often they are written."""
    uri = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    monkeypatch.chdir(tmp_path)
    path = Path(as_file(uri, Path("kept")))
    assert path.is_absolute() and path.suffix == ".png" and path.read_bytes() == png()
    written = path.stat().st_mtime_ns
    assert as_file(uri, tmp_path / "kept") == str(path) and path.stat().st_mtime_ns == written
    assert list(path.parent.iterdir()) == [path]
    assert as_file(str(root / "a.png"), tmp_path / "other") == str(root / "a.png") and not Path("other").exists()
    with pytest.raises(OSError, match="bad base64"):
        as_file("data:image/png;base64,@@@", tmp_path)
