"""`utils.data.images`: images of data files as the learner opens them, and what it sends of them (DAT-3, DAT-6)."""

import base64
import io
import struct
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from tests.data.test_samples import load_one
from tests.data.test_samples import png as write_png
from utils.data.images import EXIF_ORIENTATION, as_file, as_sent, find_in_shard, image_size, open_image
from utils.data.samples import DataError

# Pillow's modes, and files that hold them.
DEEP_GREY = [("I;16", "x.png"), ("I;16", "x.tiff"), ("I", "x.tiff"), ("F", "x.tiff")]


def png(colour=(10, 20, 30), size=(8, 6)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def eps() -> str:
    """An image that Pillow hands to Ghostscript."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6)).save(buffer, "EPS")
    return "data:image/eps;base64," + base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("read", [open_image, image_size])
def test_formats_whose_decoder_runs_a_program_are_no_images(monkeypatch, read):
    monkeypatch.setattr("subprocess.check_call", lambda *_, **__: pytest.fail("a program was run"))
    with pytest.raises(OSError, match="not an image that can be read; formats: PNG, JPEG, "):
        read(eps())


@pytest.mark.parametrize(("mode", "name"), DEEP_GREY)
def test_deep_grey_values_are_refused_DAT_3(tmp_path, mode, name):
    """DAT-3: Pillow would cut them off at 255, so that an X-ray is white."""
    Image.new(mode, (7, 5), 3000).save(tmp_path / name)
    for read in (open_image, image_size):
        with pytest.raises(OSError, match="x.*grey values of more than 8 bits .*mode I|F"):
            read(tmp_path / name)
    with pytest.raises(DataError, match="grey values of more than 8 bits .*8 bits per channel"):
        load_one(tmp_path, images=[name], objects=[])


def test_open_image_turns_by_exif_and_puts_transparency_on_white(tmp_path):
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    Image.new("RGB", (40, 20), "blue").save(tmp_path / "turned.jpg", exif=exif)
    assert open_image(tmp_path / "turned.jpg").size == (20, 40)
    sample = load_one(tmp_path, images=["turned.jpg"], width=..., height=..., objects=[])
    assert (sample.width, sample.height) == (20, 40)
    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert open_image(tmp_path / "clear.png").getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.webp", "x.tiff"])
@pytest.mark.parametrize("orientation", range(10))
def test_an_image_is_turned_as_pillow_turns_it(tmp_path, name, orientation):
    exif, path = Image.Exif(), tmp_path / name
    exif[EXIF_ORIENTATION] = orientation
    Image.effect_noise((30, 20), 80).convert("RGB").save(path, exif=exif)
    opened, expected = open_image(path), ImageOps.exif_transpose(Image.open(io.BytesIO(path.read_bytes())))
    assert (opened.size, opened.tobytes()) == (expected.size, expected.tobytes())
    assert image_size(path) == image_size(path, decode=True) == opened.size[::-1]


def test_an_exif_tag_of_an_unusual_type_does_not_stop_the_turning(tmp_path):
    tags = ImageFileDirectory_v2()
    tags[EXIF_ORIENTATION] = 6
    tags.tagtype[resolution_unit := 296] = 2  # ASCII, where the standard has a number
    tags[resolution_unit] = "inch"
    Image.new("RGB", (40, 20)).save(tmp_path / "x.jpg", exif=b"Exif\0\0II*\0\x08\0\0\0" + tags.tobytes(8))
    with pytest.raises(struct.error):  # as it writes the tags anew
        ImageOps.exif_transpose(Image.open(tmp_path / "x.jpg"))
    assert open_image(tmp_path / "x.jpg").size == (20, 40)
    assert image_size(tmp_path / "x.jpg", decode=True) == (40, 20)


def test_a_tiff_that_only_its_xmp_turns_has_one_size(tmp_path):
    xmp = (
        b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
        b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
    )
    Image.new("RGB", (40, 20)).save(tmp_path / "x.tiff", tiffinfo={700: xmp})
    assert open_image(tmp_path / "x.tiff").size == (20, 40)
    assert image_size(tmp_path / "x.tiff") == image_size(tmp_path / "x.tiff", decode=True) == (40, 20)


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
            assert open_image(as_sent(source)).tobytes() == image.tobytes()


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
    (tmp_path / "000.tar.gz").write_bytes(b"compressed")
    with pytest.raises(
        OSError, match="000.tar.gz/a.png: in something that is no folder, and no uncompressed .tar file"
    ):
        image_size(f"{tmp_path}/000.tar.gz/a.png")
    (tmp_path / "002.tar").write_bytes(b"no tar file" * 100)
    with pytest.raises(OSError, match=r"002.tar"):
        image_size(f"{tmp_path}/002.tar/a.png")
    (tmp_path / "folder.tar").mkdir()
    Image.new("RGB", (5, 6)).save(tmp_path / "folder.tar" / "a.png")
    assert image_size(tmp_path / "folder.tar" / "a.png") == (6, 5)
    plain = str(tmp_path / "folder.tar" / "a.png")
    assert as_sent(plain) == plain and as_sent("data:image;base64,AAAA") == "data:image;base64,AAAA"


def test_an_embedded_image_becomes_one_file_LRN_7(tmp_path, monkeypatch):
    """LRN-7: the answers of an evaluation name a file with the same bytes, however often they are written."""
    uri = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    monkeypatch.chdir(tmp_path)
    path = Path(as_file(uri, Path("kept")))
    assert path.is_absolute() and path.suffix == ".png" and path.read_bytes() == png()
    written = path.stat().st_mtime_ns
    assert as_file(uri, tmp_path / "kept") == str(path) and path.stat().st_mtime_ns == written
    assert list(path.parent.iterdir()) == [path]
    assert as_file("a.png", tmp_path / "other") == "a.png" and not Path("other").exists()
    with pytest.raises(OSError, match="bad base64"):
        as_file("data:image/png;base64,@@@", tmp_path)


def test_a_shard_is_indexed_once_whoever_asks_DAT_1(tmp_path, monkeypatch):
    """DAT-1: threads that need the same one wait for the first; a large one takes seconds."""
    packed, opened, tar_open = shard(tmp_path / "s.tar", a=Image.new("RGB", (4, 4))), [], tarfile.open

    def slow(*args, **settings):
        opened.append(args)
        time.sleep(0.1)
        return tar_open(*args, **settings)

    monkeypatch.setattr("utils.data.images.tarfile.open", slow)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(find_in_shard, [f"{packed}/a.png"] * 4)) and len(opened) == 1
