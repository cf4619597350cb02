"""tools.convert with the formats of the field other than COCO (DAT-1), and images that EXIF turns."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.packages import folder_with
from tools.coco import SHARED, Options
from tools.convert import NO_LABEL, convert, main
from tools.formats import COPY, NO_LABELS
from utils.data.images import EXIF_ORIENTATION, image_size, open_image
from utils.data.samples import load_samples

NO_LABELS_OF_IMAGES = "images", NO_LABELS
UNREAD = "its answer spells boxes that cannot be read"
WIDTH, HEIGHT = 100, 80
CAT = {"desc": "cat", "bbox_2d": [10, 20, 40, 60]}
DOG = {"desc": "dog", "bbox_2d": [0, 0, 50, 40]}


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "images").mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "images" / name)
    return tmp_path


def rows_of(folder: Path, kind: str, annotations: Path, **more: Any) -> list[dict]:
    """Convert, check that training reads the result, and return objects by image name."""
    output = folder / "data.jsonl"
    report = convert(annotations, folder / "images", output, kind=kind, **more)
    (samples,) = load_samples([output], prompt="find")
    assert len(samples) == sum(report.images.values())
    rows = [json.loads(line) for line in output.open()]
    assert all((row["width"], row["height"]) == (WIDTH, HEIGHT) for row in rows)
    return {Path(row["images"][0]).name: row["objects"] for row in rows}


VOC = """<annotation><filename>a.png</filename><size><width>100</width><height>80</height><depth>3</depth></size>
<object><name>cat</name><bndbox><xmin>11</xmin><ymin>21</ymin><xmax>40</xmax><ymax>60</ymax></bndbox></object>
<object><name>dog</name><difficult>1</difficult>
<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>50</xmax><ymax>40</ymax></bndbox></object>
<object><name>owl</name><bndbox><xmin>x</xmin></bndbox></object></annotation>"""


def test_DAT_1_pascal_voc(folder):
    """Its first pixel is 1, and both ends belong to the box: pixels 11 to 40 are 30 wide."""
    (folder / "voc").mkdir()
    (folder / "voc" / "a.xml").write_text(VOC)
    assert rows_of(folder, "voc", folder / "voc") == {"a.png": [CAT]}
    assert rows_of(folder, "voc", folder / "voc", options=Options(keep_crowd=True)) == {"a.png": [CAT, DOG]}
    (folder / "voc" / "b.xml").write_text("<annotation>")
    assert json.loads((folder / "data.jsonl").read_text())["annotated"] == ["cat", "dog"]  # an owl has no box
    with pytest.raises(ValueError, match="b.xml: not XML that can be read: .*; correct or remove it"):
        rows_of(folder, "voc", folder / "voc")
    (folder / "voc" / "b.xml").write_text(VOC.replace("<width>100", "<width>x"))
    with pytest.raises(ValueError, match="b.xml: size: .*delete it to use the image's own"):
        rows_of(folder, "voc", folder / "voc")


@pytest.mark.parametrize(
    "name", ["", *(f"<filename>{name}</filename>" for name in ("a", "c.d", "no.jpg", "long" * 99))]
)
def test_DAT_1_pascal_voc_finds_images_by_the_name_of_the_xml_file_too(folder, name):
    """DAT-1: also without an ending, and with one in capitals."""
    (folder / "images" / "a.png").rename(folder / "images" / ("c.d.PNG" if "c.d" in name else "a.PNG"))
    (folder / "voc").mkdir()
    (folder / "voc" / "a.xml").write_text(VOC.replace("<filename>a.png</filename>", name))
    assert list(rows_of(folder, "voc", folder / "voc").values()) == [[CAT]]


def test_DAT_1_annotations_in_subfolders_and_with_endings_in_capitals_are_read(folder):
    """DAT-1: beside others at the top. Images of one name have the boxes of their own folder, and none of two files."""
    (folder / "images" / "sub").mkdir()
    for name in ("sub/a.png", "sub/c.png"):
        Image.new("RGB", (WIDTH, HEIGHT)).save(folder / "images" / name)
    (folder / "voc" / "sub").mkdir(parents=True)
    only = VOC[: VOC.index("<object><name>dog")] + "</annotation>"
    for name in ("a", "sub/a", "sub/c"):
        text = only.replace("a.png", f"{name[-1]}.png").replace("cat", "owl" if "sub" in name else "cat")
        (folder / "voc" / f"{name}.{'XML' if 'c' in name else 'xml'}").write_text(text)
    (folder / "voc" / "sub" / "b.XML").write_text(only.replace("a.png", "b.png"))  # its image lies at the top
    convert(folder / "voc", folder / "images", folder / "d.jsonl", kind="voc")
    rows = {row["id"]: row for row in map(json.loads, (folder / "d.jsonl").open())}
    found = {own: (row["images"][0], row["objects"][0]["desc"]) for own, row in rows.items()}
    assert found == {
        "a": ("images/a.png", "cat"),
        "sub/a": ("images/sub/a.png", "owl"),
        "sub/b": ("images/b.png", "cat"),
        "sub/c": ("images/sub/c.png", "owl"),
    }
    lost = only.replace("a.png", "lost.png")
    for name, text in (("b", only.replace("a.png", "b.png").replace("cat", "owl")), ("d", lost), ("sub/d", lost + " ")):
        (folder / "voc" / f"{name}.xml").write_text(text.replace("cat", name[0]))
    report = convert(folder / "voc", folder / "images", folder / "d.jsonl", kind="voc")
    left_out = {reason: number for (_, reason), number in report.reasons.items()}
    assert left_out == {SHARED: (2, "b"), "no such image file": (2, "d")}

    (folder / "labels" / "sub").mkdir(parents=True)
    (folder / "labels" / "classes.txt").write_text("cat\ndog")
    for name in ("sub/c.TXT", "sub/lost.TXT"):
        (folder / "labels" / name).write_text("0 0.25 0.5 0.3 0.5\n")
    assert rows_of(folder, "yolo", folder / "labels")["c.png"] == [CAT]
    report = convert(folder / "labels", folder / "images", folder / "d.jsonl", kind="yolo")
    assert report.reasons == {("images left out", "no such image file"): (1, "sub/lost"), NO_LABELS_OF_IMAGES: (3, "a")}


def test_copies_of_pascal_voc_files_do_no_harm_DAT_1(folder):
    """DAT-1: such as Jupyter keeps in hidden folders, whatever they say, and the user's own that say the same."""
    for copies in (".", ".ipynb_checkpoints", "__MACOSX", "backup"):
        (folder / "voc" / copies).mkdir(parents=True, exist_ok=True)
        is_own = copies in (".", "backup")
        (folder / "voc" / copies / f"a{'' if is_own else '-checkpoint'}.xml").write_text(
            VOC if is_own else VOC.replace("cat", "owl")
        )
    report = convert(folder / "voc", folder / "images", folder / "d.jsonl", kind="voc")
    rows = [json.loads(line) for line in (folder / "d.jsonl").open()]
    assert [(row["id"], row["objects"]) for row in rows] == [("a", [CAT])]
    assert report.reasons[("images left out", COPY)] == (1, None)


@pytest.mark.parametrize("names", ["names: [cat, dog]", "names: {0: cat, 1: dog}", "cat\ndog\n"])
def test_DAT_1_yolo(folder, names):
    labels = folder / "labels"
    labels.mkdir()
    (labels / "a.txt").write_text("0 0.25 0.5 0.3 0.5\n\n1 0 0 0.5 0 0.5 0.5 0 0.5\n1 0.5\n")
    for name, line in (("c", "7 0.5 0.5 0.1 0.1"), ("d", "x 1 2 3 4")):  # left out: no such classes
        Image.new("RGB", (WIDTH, HEIGHT)).save(folder / "images" / f"{name}.png")
        (labels / f"{name}.txt").write_text(line)
    (labels / "classes.txt" if "\n" in names else folder / "data.yaml").write_text(names)
    assert rows_of(folder, "yolo", labels) == {"a.png": [CAT, DOG], "b.png": []}
    (folder / "obj.names").write_text("cat\ndog\n")  # of Darknet and CVAT: as classes.txt
    assert rows_of(folder, "yolo", labels, names=folder / "obj.names") == {"a.png": [CAT, DOG], "b.png": []}
    outlines = rows_of(folder, "yolo", labels, options=Options(geometry="poly"))
    assert outlines["a.png"][1] == {"desc": "dog", "poly": [0, 0, 50, 0, 50, 40, 0, 40]}


def test_a_folder_too_high_for_yolos_labels_is_pointed_out(folder):
    """Neither label files nor images have their counterpart; without the hint it said that no image has a label."""
    (folder / "labels").mkdir()
    (folder / "labels" / "a.txt").write_text("0 0.25 0.5 0.3 0.5")
    (folder / "data.yaml").write_text("names: [cat]")
    with pytest.raises(ValueError, match="the same paths below --annotations and --images"):
        convert(folder / "labels", folder, folder / "d.jsonl", kind="yolo")


def test_yolo_class_numbers_may_be_written_as_floats_DAT_1(folder):
    """DAT-1: as np.savetxt does; between two classes there is none. Blank lines behind the names do no harm."""
    (folder / "labels").mkdir()
    (folder / "labels" / "classes.txt").write_text("cat\ndog\n\n \n")
    np.savetxt(folder / "labels" / "a.txt", [[0, 0.25, 0.5, 0.3, 0.5], [1, 0.25, 0.25, 0.5, 0.5]])
    (folder / "labels" / "b.txt").write_text("0.5 0.25 0.5 0.3 0.5")
    assert rows_of(folder, "yolo", folder / "labels") == {"a.png": [CAT, DOG]}


def test_yolo_files_with_a_byte_order_mark_DAT_1(folder):
    """DAT-1: as Windows' tools write. It is not part of the first name."""
    (folder / "labels").mkdir()
    (folder / "labels" / "a.txt").write_text("0 0.25 0.5 0.3 0.5\n", encoding="utf-8-sig")
    for name, text in (("classes.txt", "cat\n"), ("data.yaml", "names: [cat]\n")):
        (folder / "labels" / name).write_text(text, encoding="utf-8-sig")
        assert rows_of(folder, "yolo", folder / "labels")["a.png"] == [CAT]
        (folder / "labels" / name).unlink()


@pytest.mark.parametrize(("shape", "keypoints"), [([2, 3], "0.1 0.2 2 0 0 0"), ([1, 3], "0.1 0.2 2")])
def test_DAT_1_the_box_of_yolos_pose_labels_is_read(folder, shape, keypoints):
    """DAT-1: not an outline through its numbers, whether their count is even or odd, and whoever names the classes."""
    (folder / "labels").mkdir()
    line = f"0 0.25 0.5 0.3 0.5 {keypoints}"
    (folder / "labels" / "a.txt").write_text(f"{line}\n{line} 0.1 0.2\n")
    (folder / "data.yaml").write_text(f"names: [cat, dog]\nkpt_shape: {shape}\n")
    for _ in range(2):
        assert rows_of(folder, "yolo", folder / "labels")["a.png"] == [CAT]
        (folder / "labels" / "classes.txt").write_text("cat\ndog\n")
        (folder / "labels" / "a.txt").write_text(f"{line} 0.9\n{line} 0.1 0.2\n")  # a model's own, with its confidence
    (folder / "data.yaml").write_text("names: [cat]\nkpt_shape: 17\n")
    with pytest.raises(ValueError, match="data.yaml: kpt_shape: must be .number of keypoints"):
        rows_of(folder, "yolo", folder / "labels")


def test_DAT_1_the_confidence_of_a_yolo_box_is_not_read(folder):
    """DAT-1: the sixth number of a line, as models write their own labels."""
    (folder / "labels").mkdir()
    (folder / "labels" / "classes.txt").write_text("cat\n")
    (folder / "labels" / "a.txt").write_text("0 0.25 0.5 0.3 0.5 0.87\n")
    assert rows_of(folder, "yolo", folder / "labels")["a.png"] == [CAT]
    assert "annotated" not in json.loads((folder / "data.jsonl").read_text().splitlines()[0])


def test_DAT_1_numbers_beyond_one_make_no_outline_and_pixels_no_fractions(folder):
    """DAT-1, TGT-12: keypoints without kpt_shape, and labels in pixels: the image shows these objects, so that its line
    is not complete for their class."""
    (folder / "labels").mkdir()
    (folder / "labels" / "classes.txt").write_text("cat\ndog\n")
    for line in ("0 0.25 0.5 0.3 0.5 0.1 0.2 2 0.3 0.4 2", "0 25 40 30 40"):
        (folder / "labels" / "a.txt").write_text(f"{line}\n1 0.25 0.25 0.5 0.5\n")
        assert rows_of(folder, "yolo", folder / "labels") == {"a.png": [DOG], "b.png": []}
        assert json.loads((folder / "data.jsonl").read_text().splitlines()[0])["annotated"] == ["dog"]
    row = {"images": ["a.png"], "objects": {"ref": ["cat", "dog"], "bbox": [[10, 20, 40, 60], [0, 0, 0.5, 0.5]]}}
    row["objects"]["bbox_type"] = "norm1"
    (folder / "swift.jsonl").write_text(json.dumps(row))
    assert rows_of(folder, "swift", folder / "swift.jsonl") == {"a.png": [DOG]}
    assert json.loads((folder / "data.jsonl").read_text())["annotated"] == ["dog"]


def test_DAT_1_yolos_images_in_linked_folders_are_read_and_labels_without_image_are_counted(folder):
    """DAT-1: an image once, also where links lead in a circle; lists beside the labels are none."""
    labels, disk = folder / "labels", folder / "disk"
    for path in (labels / "more", disk):
        path.mkdir(parents=True)
    (folder / "images" / "b.png").rename(disk / "b.png")
    for link, target in (("images/more", disk), ("images/again", folder / "images"), ("disk/back", folder / "images")):
        (folder / link).symlink_to(target)
    for name in ("a", "more/b", "more/lost"):
        (labels / f"{name}.txt").write_text("0 0.25 0.5 0.3 0.5\n")
    for name, text in (("classes", b"cat\ndog"), ("train", b"0001\n0002"), ("notes", b"\xe9 0 0 0 0"), ("empty", b"")):
        (labels / f"{name}.txt").write_bytes(text)
    assert rows_of(folder, "yolo", labels) == {"a.png": [CAT], "b.png": [CAT]}
    report = convert(labels, folder / "images", folder / "d.jsonl", kind="yolo")
    assert report.reasons == {("images left out", "no such image file"): (1, "more/lost")}


@pytest.mark.parametrize("kind", ["voc", "yolo"])
def test_a_folder_that_may_not_be_read_ends_the_conversion_DAT_1(folder, kind, monkeypatch):
    """DAT-1: its images would be missing without a word; a disk's own `lost+found` never may be read."""
    labels, scandir = folder / "labels", os.scandir
    for closed in ("more", "lost+found"):
        for path in (labels / closed, folder / "images" / closed):
            path.mkdir(parents=True)
    (labels / "classes.txt").write_text("cat\ndog")
    (labels / "a.txt").write_text("0 0.25 0.5 0.3 0.5\n")
    (labels / "a.xml").write_text(VOC)

    def closed_to_us(path: str) -> Any:
        if Path(path).name in closed_folders:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed_to_us)
    closed_folders = ["lost+found"]
    assert rows_of(folder, kind, labels)["a.png"] == [CAT]
    with pytest.raises(ValueError, match="Not a directory; name a folder$"):
        rows_of(folder, kind, labels / "classes.txt")
    closed_folders = ["more"]
    with pytest.raises(ValueError, match="more: Permission denied; correct the path, or its permissions"):
        rows_of(folder, kind, labels)


def test_yolo_needs_class_names(folder):
    (folder / "labels").mkdir()
    with pytest.raises(ValueError, match="pass --names FILE"):
        rows_of(folder, "yolo", folder / "labels")


SUPERVISION = """
import json, sys
sys.path.append(sys.argv[1])
import supervision as sv
voc = sv.DetectionDataset.from_pascal_voc("images", "voc")
yolo = sv.DetectionDataset.from_yolo("images", "labels", "data.yaml")
print(json.dumps([{path.rpartition("/")[2]: [{"desc": data.classes[c], "bbox_2d": list(map(float, box))}
                  for c, box in zip(own.class_id, own.xyxy)] for path, _, own in data} for data in (voc, yolo)]))
"""


def test_voc_and_yolo_are_read_as_supervision_reads_them_DAT_1(folder):
    """DAT-1: sound files only. Difficult objects, which it does not tell from others, are kept."""
    (folder / "voc").mkdir()
    sound, _, _ = VOC.partition("<object><name>owl")
    (folder / "voc" / "a.xml").write_text(sound + "</annotation>")
    (folder / "labels").mkdir()
    (folder / "labels" / "a.txt").write_text("0 0.25 0.5 0.3 0.5\n1 0.25 0.25 0.5 0.5\n")
    (folder / "data.yaml").write_text("names: [cat, dog]")
    command = [sys.executable, "-c", SUPERVISION, str(folder_with("supervision==0.31.2"))]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    voc, yolo = json.loads(run.stdout.strip().rpartition("\n")[2])
    assert voc["a.png"] == rows_of(folder, "voc", folder / "voc", options=Options(keep_crowd=True))["a.png"]
    ours = rows_of(folder, "yolo", folder / "labels")["a.png"]
    for read, own in zip(yolo["a.png"], ours, strict=True):
        assert read["desc"] == own["desc"] and read["bbox_2d"] == pytest.approx(own["bbox_2d"], abs=0.01)


def test_DAT_1_files_that_cannot_be_read_are_named_or_left_out(folder):
    """DAT-1: those that macOS adds, images with a name from another system, and files of classes in other encodings."""
    (folder / "labels").mkdir()
    (folder / "voc").mkdir()
    for name in ("images/._a.png", "labels/._a.txt", "voc/._a.xml"):
        (folder / name).write_bytes(b"\x00\x05\x16\x07\xb0")
    (folder / "images" / os.fsdecode(b"\xc3\xa8.png")).write_bytes((folder / "images" / "a.png").read_bytes())
    (folder / "images" / os.fsdecode(b"\xb0\xa1.png")).write_bytes((folder / "images" / "a.png").read_bytes())
    (folder / "labels" / "a.txt").write_text("0 0.25 0.5 0.3 0.5\n")
    (folder / "voc" / "a.xml").write_text(VOC)
    (folder / "labels" / "classes.txt").write_text("cat")
    assert rows_of(folder, "voc", folder / "voc") == {"a.png": [CAT]}
    report = convert(folder / "labels", folder / "images", folder / "d.jsonl", splits={"train": 1}, kind="yolo")
    assert "left out: the name of its file or folder is not UTF-8; rename it: 1 (first: image \\udcb0" in report.text()
    assert sum(report.images.values()) == 3 and report.text().encode()
    (folder / "labels" / "classes.txt").unlink()
    for kind, name, content, message in (
        ("yolo", "labels/classes.txt", b"caf\xe9", "not UTF-8: .* save it as UTF-8"),
        ("yolo", "labels/classes.txt", b"cat\n\ndog", "class 1: '' cannot be an object's description; write a name"),
        ("yolo", "labels/data.yaml", b"names: [cat, no]", "class 1: False cannot be an object's .* in quotes"),
        ("yolo", "labels/data.yaml", b"names: {3: ' '}", "class 3: '' cannot be"),
        ("yolo", "labels/data.yaml", b"names: [", "not YAML: .* correct it"),
        ("yolo", "labels/data.yaml", b"- cat", "must be a mapping"),
        ("yolo", "labels/data.yaml", b"names: {cat: 0}", "names: must be a list, or a mapping from class number"),
        ("yolo", "labels/a.txt", b"\xff", "not UTF-8"),
        ("voc", "voc/a.xml", b'<?xml version="1.0" encoding="gb2312"?><annotation/>', "not XML that can be read"),
        ("voc", "voc/a.xml", b'<?xml version="1.0" encoding="ansi"?><annotation/>', "not XML that can be read"),
        ("swift", "lines.json", b'{"a": "\xe9"}', "not UTF-8: .* save it as UTF-8"),
        ("swift", "lines.json", gzip.compress(b"{}"), "not UTF-8: .* it is compressed, unpack it first"),
    ):
        (folder / "labels" / "data.yaml").write_text("names: [cat]")
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=re.compile(f"{name}: {message}", re.DOTALL)):
            rows_of(folder, kind, (folder / name).parent if kind != "swift" else folder / name)
        if "classes" in name:
            (folder / name).unlink()


def write_lines(folder: Path, *rows: dict, as_list: bool = False) -> Path:
    path = folder / "lines.json"
    path.write_text(json.dumps(rows) if as_list else "".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_DAT_1_rex_omni(folder):
    boxes = [{"bbox": [10, 20, 40, 60], "phrase": "cat"}, {"bbox": [0, 0, 50, 40], "phrase": "dog"}]
    path = write_lines(folder, {"image_name": "a.png", "annotation": {"boxes": boxes}})
    assert rows_of(folder, "rex-omni", path) == {"a.png": [CAT, DOG]}
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as Windows' tools write
    assert rows_of(folder, "rex-omni", path) == {"a.png": [CAT, DOG]}
    with pytest.raises(ValueError, match="lines.json:1: no annotation.boxes of .*points"):
        rows_of(folder, "rex-omni", write_lines(folder, {"image_name": "a.png", "annotation": {"points": []}}))


def test_DAT_1_ms_swift(folder):
    """One ref may name several boxes; norm1 is in parts of the sides."""
    both = {"ref": ["cat"], "bbox": [[10, 20, 40, 60], [0, 0, 50, 40]]}
    parts = {"ref": ["cat", "dog"], "bbox": [[0.1, 0.25, 0.4, 0.75], [0, 0, 0.5, 0.5]], "bbox_type": "norm1"}
    rows = [{"messages": [], "images": [name], "objects": given} for name, given in (("a.png", both), ("b.png", parts))]
    found = rows_of(folder, "swift", write_lines(folder, *rows))
    assert found == {"a.png": [CAT, DOG | {"desc": "cat"}], "b.png": [CAT, DOG]}
    triangle = {"images": ["a.png"], "objects": {"ref": ["cat"], "bbox": [[0, 0, 50, 0, 50, 40]]}}
    outlines = rows_of(folder, "swift", write_lines(folder, triangle), options=Options(geometry="poly"))
    assert outlines == {"a.png": [{"desc": "cat", "poly": [0, 0, 50, 0, 50, 40]}]}


@pytest.mark.parametrize("kind", ["swift", "sharegpt"])
def test_DAT_1_lines_without_one_image_are_left_out_and_counted(folder, kind):
    """DAT-1: mixed sets have lines of text only; the others are converted."""
    turns = [{"role": "user", "content": "Where?"}, {"role": "assistant"}]
    turns[1]["content"] = '[{"bbox_2d": [10, 20, 40, 60], "label": "cat"}]'
    good = {"objects": {"ref": ["cat"], "bbox": [[10, 20, 40, 60]]}, "messages": turns}
    rows = [good | {"images": images} for images in (["a.png"], [], ["a.png", "b.png"])]
    path = write_lines(folder, *rows, good)
    report = convert(path, folder / "images", folder / "d.jsonl", kind=kind, unit=0 if kind == "sharegpt" else None)
    assert sum(report.images.values()) == 1
    assert "its line has not exactly one image, as a path: 3" in report.text()


def test_DAT_1_mistakes_in_lines_are_told_with_their_number(folder):
    """DAT-1: blank lines count, as in an editor; a list may begin behind white space."""
    good = json.dumps({"images": ["a.png"], "objects": {"ref": ["cat"], "bbox": [[10, 20, 40, 60]]}})
    path = folder / "lines.json"
    for bad, told in (
        ('{"images" 3}', "lines.json:4: not valid JSON: Expecting ':' delimiter at column 11"),
        ("3", "lines.json:4: must be a JSON object"),
        ('{"images": ["a.png"], "objects": {"ref": ["a", "b"], "bbox": []}}', "lines.json:4: 2 ref entries for 0 bbox"),
    ):
        path.write_text(f"\n{good}\n\n{bad}\n")
        with pytest.raises(ValueError, match=told):
            rows_of(folder, "swift", path)
    path.write_text(f"\n [{good}]")
    assert rows_of(folder, "swift", path) == {"a.png": [CAT]}


def test_DAT_1_an_image_whose_object_has_no_label_says_so(folder):
    """DAT-1: these files have no list of categories."""
    row = {"images": ["a.png"], "objects": {"ref": ["cat", ""], "bbox": [[10, 20, 40, 60], [0, 0, 50, 40]]}}
    good = row | {"objects": {"ref": ["cat"], "bbox": [[10, 20, 40, 60]]}}
    report = convert(write_lines(folder, row, good), folder / "images", folder / "d.jsonl", kind="swift")
    assert "images left out: an object has no label, or one that spells a special token: 1" in report.text()


ANSWERS = {
    "json": '```json\n[{"bbox_2d": [100, 250, 400, 750], "label": "cat"},\n'
    ' {"bbox_2d": [0, 0, 500, 500], "label": "dog"}]\n```',
    "qwen2": "<|object_ref_start|>cat<|object_ref_end|><|box_start|>(100,250),(400,750)<|box_end|> and "
    "<|object_ref_start|>dog<|object_ref_end|><|box_start|>(0,0),(500,500)<|box_end|>",
    "internvl": "<ref>cat</ref><box>[[100, 250, 400, 750]]</box> <ref>dog</ref><box>[[0, 0, 500, 500]]</box>",
    "rex": "<|object_ref_start|>cat<|object_ref_end|><|box_start|><100><250><400><750><|box_end|>, "
    "<|object_ref_start|>dog<|object_ref_end|><|box_start|><0><0><500><500><|box_end|>",
}


@pytest.mark.parametrize("form", ANSWERS)
@pytest.mark.parametrize("is_chat", [False, True])
def test_DAT_1_answers_that_spell_boxes(folder, form, is_chat):
    """LLaMA-Factory's sharegpt lines, and chat messages; one JSON list or a line each."""
    names = ("messages", "role", "content", "assistant") if is_chat else ("conversations", "from", "value", "gpt")
    turns = [{names[1]: "human", names[2]: "<image>Find <ref>x</ref><box>[[1,2,3,4]]</box>"}]
    turns.append({names[1]: names[3], names[2]: ANSWERS[form]})
    path = write_lines(folder, {names[0]: turns, "images": ["a.png"]}, as_list=is_chat)
    assert rows_of(folder, "sharegpt", path, unit=1000) == {"a.png": [CAT, DOG]}
    with pytest.raises(ValueError, match="--unit: 1000, 1, or 0 for pixels"):
        rows_of(folder, "sharegpt", path)


def lines_of(folder: Path, kind: str, path: Path, **more: Any) -> dict[str, tuple[list, list]]:
    """Convert, and return prompt and labels as training reads them, by id."""
    convert(path, folder / "images", folder / "data.jsonl", kind=kind, **more)
    return {
        sample.id: (sample.messages, [found.desc for found in sample.objects])
        for sample in load_samples([folder / "data.jsonl"], prompt="find")[0]
    }


def test_DAT_1_a_conversation_keeps_its_questions(folder):
    """DAT-1: each with its own answer is a line."""
    system = {"from": "system", "value": "Be brief."}
    first = [{"from": "human", "value": "<image>Find cats."}, {"from": "gpt", "value": ANSWERS["json"]}]
    second = [{"from": "human", "value": "Find owls."}, {"from": "gpt", "value": "[]"}]
    path = write_lines(
        folder,
        {"id": "x", "image": "a.png", "conversations": [system, *first, *second]},
        {"id": "y", "image": "b.png", "conversations": first},
    )
    found = lines_of(folder, "sharegpt", path, unit=1000)
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>Find cats."}]
    assert found == {
        "x.1": (asked, ["cat", "dog"]),
        "x.2": ([asked[0], {"role": "user", "content": "Find owls."}], []),
        "y": (asked[1:], ["cat", "dog"]),
    }


def test_DAT_1_ms_swift_keeps_its_question(folder):
    """DAT-1: with the names that its markers stand for."""
    asked = {"role": "user", "content": "<image>Find <ref-object>."}
    answer = {"role": "assistant", "content": "<ref-object><bbox>"}
    objects = {"ref": ["cat", "cat"], "bbox": [[10, 20, 40, 60], [10, 20, 40, 61]]}
    rows = [
        {"id": name, "images": ["a.png"], "messages": turns, "objects": objects}
        for name, turns in (
            ("one", [asked, answer]),
            ("none", []),
            ("two", [asked, answer, asked, answer]),
            ("box", [{"role": "user", "content": "What is at <bbox>?"}, answer]),
            ("more", [{"role": "user", "content": 3 * "<ref-object>"}, answer]),  # than there are names
        )
    ]
    found = lines_of(folder, "swift", write_lines(folder, *rows))
    assert found == {
        "one": ([{"role": "user", "content": "<image>Find cat."}], ["cat", "cat"]),
        "none": ([{"role": "user", "content": "find"}], ["cat", "cat"]),
    }


def test_DAT_1_questions_in_columns_of_their_own_are_kept(folder):
    """DAT-1: ms-swift's `query`, `response`, `history` and `system`; LLaMA-Factory also has `system`."""
    line = {"query": "<image>Find every <ref-object> that sleeps", "response": "<ref-object><bbox>"}
    line |= {"images": ["a.png"], "objects": {"ref": ["cat", "cat"], "bbox": [BOX, [0, 0, 9, 9]]}}
    asked = {"role": "user", "content": "<image>Find every cat that sleeps"}
    told = {"role": "system", "content": "Be brief."}
    rows = [{"id": "query"}, {"id": "system", "system": "Be brief."}, {"id": "two", "history": [["Find owls", "none"]]}]
    found = lines_of(folder, "swift", write_lines(folder, *(line | row for row in rows)))
    assert found == {"query": ([asked], ["cat", "cat"]), "system": ([told, asked], ["cat", "cat"])}
    turns = [{"from": "human", "value": asked["content"]}, {"from": "gpt", "value": ANSWERS["json"]}]
    path = write_lines(folder, {"id": "x", "image": "a.png", "system": "Be brief.", "conversations": turns})
    assert lines_of(folder, "sharegpt", path, unit=1000) == {"x": ([told, asked], ["cat", "dog"])}
    turns.insert(0, {"from": "system", "value": "Be brief."})  # in both places, it is said once
    path = write_lines(folder, {"id": "x", "image": "a.png", "system": "Be long.", "conversations": turns})
    assert lines_of(folder, "sharegpt", path, unit=1000) == {"x": ([told, asked], ["cat", "dog"])}


def test_TGT_12_a_question_is_complete_for_the_names_of_its_answer_alone(folder):
    """DAT-1, TGT-12: a file of open phrases has no list of them."""
    lost, whole = (
        {"ref": ["cat", "dog"], "bbox": [[10, 20, 40, 60], [5, 5]]},
        {"ref": ["owl"], "bbox": [[1, 2, 30, 40]]},
    )
    path = write_lines(folder, *({"images": ["a.png"], "objects": objects} for objects in (lost, whole)))
    convert(path, folder / "images", folder / "d.jsonl", kind="swift")
    assert [json.loads(line).get("annotated") for line in (folder / "d.jsonl").open()] == [["cat"], None]


def test_DAT_1_splits_of_questions_keep_an_image_together(folder):
    """DAT-1."""
    rows = []
    for at in range(8):
        Image.new("RGB", (WIDTH, HEIGHT)).save(folder / "images" / f"{at}.png")
        for label in ("cat", "dog", "owl"):
            objects = {"ref": [label], "bbox": [[10, 20, 40, 60]]}
            rows.append({"id": f"{at}{label}", "images": [f"{at}.png"], "objects": objects})
    path = write_lines(folder, *rows)
    convert(path, folder / "images", folder / "d.jsonl", kind="swift", splits={"train": 0.5, "val": 0.5})
    parts = [
        [json.loads(line)["images"][0] for line in (folder / f"d_{name}.jsonl").open()] for name in ("train", "val")
    ]
    assert all(parts) and not set(parts[0]) & set(parts[1]) and sum(map(len, parts)) == 24


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('Here they are: [{"bbox_2d": [100, 250, 400, 750], "label": "cat"}]', ["cat"]),
        ('```json\n[{"bbox_2d": [0, 0, 9, 9]}]\n``` and ```\n{"bbox_2d": [0, 0, 9, 9]}\n```', NO_LABEL),
        ('```\n[{"bbox_2d": [0, 0, 9, 9], "label": "a"}]\n``` {"bbox_2d": [0, 0, 9, 9], "label": "b"}', ["a", "b"]),
        ("[]", []),
        ("```json\n[]\n```", []),
        ("", []),
        ("It is at <|box_start|>(1,2),(10,12)<|box_end|>.", UNREAD),
        ('{"found": [{"bbox_2d": [0, 0, 9, 9], "label": "cat"}]}', UNREAD),
        ('[{"bbox_2d": [0, 0, 9, 9], "label": "cat"}, {"bbox_2d"', UNREAD),
        ('[{"bbox_2d": [0, 0, 9, 9], "label": "cat"}, {"label": "d', UNREAD),
        ("<ref>cat</ref><box>[[1,2,3,4],[5,6,7,8]]</box> and <box>[[9,9,19,19]]</box>", UNREAD),
        (f"{ANSWERS['internvl']}<ref>owl</ref><quad>[[1, 2]]</quad>", UNREAD),
        ('[{"bbox_2d": [0, 0, 9, 9], "label": null}]', NO_LABEL),
        ('[{"bbox_2d": [0, 0, 9, 9], "label": ["cat", "dog"]}]', NO_LABEL),
        ([{"bbox_2d": [0, 0, 9, 9], "label": "cat"}], "a turn of its conversation is not text"),
        ({"bbox_2d": [0, 0, 9, 9], "label": "cat"}, "a turn of its conversation is not text"),
        ([{"type": "text", "text": '[{"bbox_2d": [0, 0, 9, 9], "label": "cat"}]'}], ["cat"]),
        ([{"type": "text", "text": "[]"}], []),
        ("A cat on a mat.", "its answer spells no box"),
        (None, "no answer"),
    ],
)  # fmt: skip
def test_DAT_1_no_answer_becomes_an_image_without_objects_unless_it_says_so(folder, answer, expected):
    """DAT-1: training would take the line for complete, and teach the model to say nothing."""
    sound = {"from": "gpt", "value": ANSWERS["json"]}
    turns = [{"from": "human", "value": "Find."}, *([] if answer is None else [{"from": "gpt", "value": answer}])]
    path = write_lines(folder, {"image": "a.png", "conversations": turns}, {"image": "b.png", "conversations": [sound]})
    report = convert(path, folder / "images", folder / "d.jsonl", kind="sharegpt", unit=1000)
    rows = {
        row["id"]: [item["desc"] for item in row["objects"]] for row in map(json.loads, (folder / "d.jsonl").open())
    }
    if isinstance(expected, str):
        assert list(rows) == ["2"] and report.reasons == {("images left out", expected): (1, "1")}
    else:
        assert rows["1"] == expected and not report.reasons


@pytest.mark.parametrize("kind", ["sharegpt", "swift"])
def test_DAT_1_a_question_by_somebody_without_a_role_in_training_is_left_out(folder, kind):
    """DAT-1: LLaMA-Factory's `observation` and `function_call`; training refuses the line."""
    turns, unit = [("human", "Find."), ("observation", "12 pixels"), ("gpt", ANSWERS["json"])], 1000
    row = {"image": "a.png", "conversations": [{"from": who, "value": text} for who, text in turns]}
    if kind == "swift":
        objects, unit = {"ref": ["cat"], "bbox": [BOX]}, None
        row = {"images": ["a.png"], "messages": [{"role": r, "content": c} for r, c in turns], "objects": objects}
    with pytest.raises(ValueError, match="left out: a turn is said by observation, which is no role in training: 2"):
        convert(write_lines(folder, row, row), folder / "images", folder / "d.jsonl", kind=kind, unit=unit)


BOX = [10, 20, 40, 60]


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("swift", {"image": "a.png", "objects": [CAT]}, "a list of {desc, bbox_2d} needs no conversion"),
        ("swift", {"image": "a.png", "objects": {"ref": "cat", "bbox": BOX}}, "ref and bbox of objects must be lists"),
        (
            "swift",
            {"image": "a.png", "objects": {"ref": ["cat"], "bbox": [BOX], "bbox_type": "norm1000"}},
            "objects.bbox_type: 'norm1000' is not 'real' (pixels) or 'norm1' (fractions); convert",
        ),
        ("sharegpt", {"image": "a.png", "conversations": ["Find", "a cat"]}, "conversations must be a list of {from"),
        ("sharegpt", {"image": "a.png", "messages": "a cat"}, "or messages one of {role, content}"),
        ("rex-omni", {"image_name": "a.png", "annotation": [{"bbox": BOX}]}, "no annotation.boxes of {bbox, phrase}"),
        ("rex-omni", {"image_name": "a.png", "annotation": {"boxes": [BOX]}}, "no annotation.boxes of {bbox, phrase}"),
        ("swift", {"image": "a.png", "query": "?", "history": "none"}, "history must be a list of [query, response]"),
        ("swift", "cat", "must be a JSON object"),
    ],
)
def test_a_line_of_another_form_is_named_DAT_1(folder, kind, row, message):
    """DAT-1."""
    with pytest.raises(ValueError, match="lines.json:1: .*" + re.escape(message)):
        rows_of(folder, kind, write_lines(folder, row), unit=0 if kind == "sharegpt" else None)


@pytest.mark.parametrize("splits", [None, {"train": 1}])
def test_inputs_are_never_overwritten(folder, splits):
    path = write_lines(folder, {"image": "a.png", "objects": {"ref": ["cat"], "bbox": [BOX]}})
    path = path.rename(folder / ("mine.jsonl" if splits is None else "mine_train.jsonl"))
    with pytest.raises(ValueError, match="mine.*jsonl would overwrite --annotations .*; name another place"):
        convert(path, folder / "images", folder / "images" / ".." / "mine.jsonl", kind="swift", splits=splits)
    assert "ref" in path.read_text()


@pytest.mark.parametrize("kind", ["swift", "sharegpt"])
def test_DAT_1_a_question_that_is_not_utf_8_leaves_its_line_out(folder, kind):
    """DAT-1: as a text cut in the middle of an emoji is. The other lines are converted, whole emojis too."""
    rows = []
    for question in ("Find \ud83d", "Find \U0001f600"):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": ANSWERS["json"]}]
        rows.append({"image": "a.png", "messages": turns, "objects": {"ref": ["cat"], "bbox": [BOX]}})
    path = write_lines(folder, *rows)
    report = convert(path, folder / "images", folder / "d.jsonl", kind=kind, unit=1000 if kind == "sharegpt" else None)
    reason = "its question is not UTF-8: it holds half of a surrogate pair"
    assert report.reasons == {("images left out", reason): (1, "1")}
    assert json.loads((folder / "d.jsonl").read_text())["messages"][0]["content"] == "Find \U0001f600"


def test_TGT_12_an_object_of_an_answer_without_a_box_is_a_gap(folder):
    """TGT-12, DAT-1: a point is none; the line is not complete for its label."""
    answer = '[{"bbox_2d": [0, 0, 9, 9], "label": "cat"}, {"point_2d": [5, 5], "label": "dog"}]'
    path = write_lines(folder, {"image": "a.png", "conversations": [{"from": "gpt", "value": answer}]})
    convert(path, folder / "images", folder / "d.jsonl", kind="sharegpt", unit=1000)
    (row,) = map(json.loads, (folder / "d.jsonl").open())
    assert [found["desc"] for found in row["objects"]] == row["annotated"] == ["cat"]


@pytest.mark.parametrize(
    ("row", "is_kept"),
    [
        ({"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "It is red."}]}, False),
        ({"query": "Find cats.", "response": '[{"bbox_2d": [0, 0, 9, 9], "label": "cat"}]'}, False),
        ({"query": "Find cats.", "response": "None.", "objects": {"ref": [], "bbox": []}}, False),
        ({"messages": []}, False),
        ({"query": [{"bbox_2d": [0, 0, 9, 9]}], "response": "[]"}, False),
        ({"query": "Find cats.", "response": "None.", "objects": {"ref": ["cat"], "bbox": []}}, True),
        ({"query": "Find cats.", "response": "[]"}, True),
        ({"objects": {"ref": [], "bbox": []}}, True),
    ],
)
def test_DAT_1_a_line_of_ms_swift_has_no_objects_only_if_it_says_so(folder, row, is_kept):
    """DAT-1: mixtures hold other questions, too; training would learn that their images show nothing."""
    good = {"images": ["b.png"], "objects": {"ref": ["cat"], "bbox": [BOX]}}
    found = rows_of(folder, "swift", write_lines(folder, {"images": ["a.png"]} | row, good))
    assert found == ({"a.png": []} if is_kept else {}) | {"b.png": [CAT]}


def test_yolos_class_names_are_those_of_the_nearest_file_DAT_1(folder):
    """DAT-1: a folder above may belong to other data."""
    (folder / "own" / "labels").mkdir(parents=True)
    (folder / "own" / "labels" / "a.txt").write_text("0 0.25 0.5 0.3 0.5")
    (folder / "own" / "data.yaml").write_text("names: [cat]")
    (folder / "classes.txt").write_text("owl")
    assert rows_of(folder, "yolo", folder / "own" / "labels")["a.png"] == [CAT]


def test_DAT_1_objects_of_another_form_do_not_become_an_empty_image(folder):
    """DAT-1: XML that is no annotation, or one in a namespace, and points."""
    (folder / "voc").mkdir()
    for text in ("<metadata/>", VOC.replace("<annotation>", '<annotation xmlns="http://x">')):
        (folder / "voc" / "a.xml").write_text(text)
        with pytest.raises(ValueError, match="a.xml: <.*> is no annotation of Pascal VOC; correct or remove it"):
            rows_of(folder, "voc", folder / "voc")
    points, boxes = [{"point": [1, 2], "phrase": "dog"}], [{"bbox": BOX, "phrase": "cat"}]
    rows = [
        {"image_name": "a.png", "annotation": {"boxes": boxes, "points": points}},
        {"image_name": "b.png", "annotation": {"boxes": boxes, "points": []}},
    ]
    assert rows_of(folder, "rex-omni", write_lines(folder, *rows)) == {"b.png": [CAT]}


def test_two_boxes_of_one_reference(folder):
    turns = [{"from": "gpt", "value": "<ref>cat</ref><box>[[10,20,40,60],[0,0,50,40]]</box>"}]
    path = write_lines(folder, {"conversations": turns, "image": "b.png"})
    assert rows_of(folder, "sharegpt", path, unit=0) == {"b.png": [CAT, DOG | {"desc": "cat"}]}


def test_the_program_reads_other_formats(folder, monkeypatch):
    """The options reach the reader."""
    turns = [{"from": "gpt", "value": ANSWERS["internvl"]}]
    path = write_lines(folder, {"conversations": turns, "image": "a.png"})
    args = ["--from", "sharegpt", "--unit", "1000", "--annotations", path, "--images", folder / "images"]
    monkeypatch.setattr("sys.argv", ["convert", *map(str, [*args, "--output", folder / "d.jsonl"])])
    main()
    assert json.loads((folder / "d.jsonl").read_text())["objects"] == [CAT, DOG]

    (folder / "labels").mkdir()
    (folder / "labels" / "t.txt").write_text("0 0.1 0.1 0.2 0.2")
    (folder / "names.txt").write_text("owl")
    (folder / "turned").mkdir()
    turned_image(folder / "turned", 3, (60, 60))
    args = ["--from", "yolo", "--names", folder / "names.txt", "--annotations", folder / "labels", "--exif", "stored"]
    args += ["--images", folder / "turned", "--output", folder / "d.jsonl"]
    monkeypatch.setattr("sys.argv", ["convert", *map(str, args)])
    main()
    assert json.loads((folder / "d.jsonl").read_text())["objects"] == [{"desc": "owl", "bbox_2d": [48, 48, 60, 60]}]


# ---- EXIF ----------------------------------------------------------------------------------------------------------


def turned_image(
    folder: Path, orientation: int, size: tuple[int, int], suffix: str = "png"
) -> tuple[Path, list[int], list[int]]:
    """An image with one white box: (path, the box in stored pixels, the box in the shown image as Pillow turns it)."""
    pixels = np.zeros((size[1], size[0]), dtype=np.uint8)
    pixels[5:20, 10:40] = 255
    image = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    image.save(folder / "t.png", exif=exif)
    left, top, right, bottom = ImageOps.exif_transpose(Image.open(folder / "t.png")).getbbox()
    image.save(folder / f"t.{suffix}", exif=exif)
    return folder / f"t.{suffix}", [10, 5, 40, 20], [left, top, right, bottom]


@pytest.mark.parametrize("suffix", ["png", "tiff"])
@pytest.mark.parametrize("size", [(60, 60), (80, 50)])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_of_a_turned_image_lie_where_training_shows_their_objects(tmp_path, orientation, size, suffix):
    path, stored, shown = turned_image(tmp_path, orientation, size, suffix)
    image = open_image(path)
    assert image_size(path) == image.size[::-1] and list(image.getbbox()) == shown

    def found(box: list[int], given: tuple[int, int] | None, **options: Any) -> list[dict]:
        image = {"id": 1, "file_name": path.name} | ({} if given is None else {"width": given[0], "height": given[1]})
        x1, y1, x2, y2 = box
        ring = [x1, y1, x2, y1, x2, y2, x1, y2]
        item = {"image_id": 1, "category_id": 1, "bbox": [x1, y1, x2 - x1, y2 - y1], "segmentation": [ring]}
        content = {"images": [image], "annotations": [item], "categories": [{"id": 1, "name": "cat"}]}
        (tmp_path / "coco.json").write_text(json.dumps(content))
        convert(tmp_path / "coco.json", tmp_path, tmp_path / "d.jsonl", Options(**options))
        return [json.loads(line) for line in (tmp_path / "d.jsonl").open()]

    for given in (None, size):
        (row,) = found(stored, given, exif="stored")
        assert row["objects"][0]["bbox_2d"] == shown
        ring = np.reshape(found(stored, given, exif="stored", geometry="poly")[0]["objects"][0]["poly"], (-1, 2))
        assert [*ring.min(0), *ring.max(0)] == shown
    shown_size = size[::-1] if orientation >= 5 else size
    assert (row["width"], row["height"]) == shown_size
    if orientation < 5 or size[0] == size[1]:
        assert found(shown, None, exif="shown")[0]["objects"][0]["bbox_2d"] == shown
    if orientation == 1:
        return
    if orientation >= 5 and size[0] != size[1]:  # the annotated size tells
        assert found(stored, size)[0]["objects"][0]["bbox_2d"] == shown
        assert found(shown, shown_size)[0]["objects"][0]["bbox_2d"] == shown
        assert found(shown, size, exif="shown")[0]["objects"][0]["bbox_2d"] == shown  # the user knows better
    else:
        with pytest.raises(
            ValueError, match="nothing says whether its boxes are turned: --exif shown or --exif stored"
        ):
            found(stored, size)
