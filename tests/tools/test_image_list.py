"""tools.convert --only: the images that a file lists (DAT-1)."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from tools.convert import NOT_CHOSEN, UNKNOWN, convert, main
from tools.image_list import ImageList

NAMES = ("val/a.png", "b.png", "train/a.png", "c d.png")


@pytest.fixture
def folder(tmp_path) -> Path:
    """Images, and a COCO file of them, each with one object."""
    for part in ("train", "val"):
        (tmp_path / "images" / part).mkdir(parents=True)
    for name in NAMES:
        Image.new("RGB", (100, 80)).save(tmp_path / "images" / name)
    content = {
        "images": [{"id": i, "file_name": name} for i, name in enumerate(NAMES)],
        "annotations": [{"id": i, "image_id": i, "category_id": 1, "bbox": [1, 2, 30, 40]} for i in range(len(NAMES))],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (tmp_path / "coco.json").write_text(json.dumps(content))
    return tmp_path


def chosen(folder: Path, lines: str) -> list[str]:
    """Names of the images that a list of these lines leaves."""
    (folder / "list.txt").write_text(lines)
    convert(folder / "coco.json", folder / "images", folder / "d.jsonl", only=folder / "list.txt")
    found = [Path(json.loads(line)["images"][0]) for line in (folder / "d.jsonl").open()]
    return [str(path.relative_to("images")) for path in found]


@pytest.mark.parametrize(
    ("lines", "images"),
    [
        ("b\n\nc d\n", ["b.png", "c d.png"]),
        ("\ufeff  b.png\r\n", ["b.png"]),
        ("./images/train/a.png\n/data/images/b.jpg\nC:\\images\\c d.PNG\n", ["b.png", "train/a.png", "c d.png"]),
        ("train/a", ["train/a.png"]),
        ("b  1\nc -1\n", ["b.png"]),  # VOC's lists of a class
        ("b 1\nc d\n", ["c d.png"]),  # no such list: a name with a blank
    ],
)
def test_DAT_1_entries_are_paths_or_names(folder, lines, images):
    assert chosen(folder, lines) == images


def test_DAT_1_an_entry_that_may_mean_two_images_is_refused(folder):
    """DAT-1: one of them may be of another split."""
    with pytest.raises(
        ValueError, match=r"--only .*list.txt: a may be val/a.png or train/a.png; write more of its path"
    ):
        chosen(folder, "a")
    assert not (folder / "d.jsonl").exists()
    listed = ImageList(folder / "list.txt")
    assert "val/a.png" in listed and "val/a.png" in listed  # as the lines of a conversation


def test_DAT_1_only_an_image_files_ending_is_no_part_of_a_name(tmp_path):
    """DAT-1: the same picture as PNG and as JPEG is one; frames numbered behind a dot are not."""
    (tmp_path / "list.txt").write_text("b\nframe.001\n.\n")
    listed = ImageList(tmp_path / "list.txt")
    assert "b.png" in listed and "b.jpg" in listed
    assert "frame.001.png" in listed and "frame.002.png" not in listed
    assert listed.num_unknown() == 1  # the dot


def test_DAT_1_what_is_not_listed_and_what_is_not_there_is_counted(folder):
    (folder / "list.txt").write_text("b\nnothing\nnor/b\n")
    report = convert(folder / "coco.json", folder / "images", folder / "d.jsonl", only=folder / "list.txt")
    assert report.reasons == {("images left out", NOT_CHOSEN): (3, 0), ("images left out", UNKNOWN): (1, None)}
    (folder / "list.txt").write_text("nothing")
    with pytest.raises(ValueError, match="no image is left to write\n.*\n.*\n.*\nimages left out: not in the list"):
        convert(folder / "coco.json", folder / "images", folder / "d.jsonl", only=folder / "list.txt")


def test_DAT_1_lists_that_cannot_be_used(folder, monkeypatch, capsys):
    """DAT-1: by the program, too."""
    (folder / "list.txt").write_text("\n")
    (folder / "latin.txt").write_bytes(b"\xe9\n")
    args = ["--from", "coco", "--annotations", folder / "coco.json", "--images", folder / "images"]
    for only, words in [("list.txt", "lists no image"), ("latin.txt", "not UTF-8"), ("none.txt", "No such file")]:
        command = ["convert", *args, "--output", folder / "d.jsonl", "--only", folder / only]
        monkeypatch.setattr(sys, "argv", list(map(str, command)))
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2 and words in capsys.readouterr().err
    (folder / "d.jsonl").write_text("b\n")
    with pytest.raises(ValueError, match="would overwrite --only"):
        convert(folder / "coco.json", folder / "images", folder / "d.jsonl", only=folder / "d.jsonl")
