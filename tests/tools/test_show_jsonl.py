"""tools.show_jsonl: which samples it chooses, and what the pictures show."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageColor

from tests.data.test_samples import line, png, write
from tools import show_jsonl
from tools.show_jsonl import colour_of, main, pick_samples, picture, show
from utils.data.samples import DataError


@pytest.fixture
def data_file(tmp_path) -> Path:
    box, kite = {"desc": "cat", "bbox_2d": [20, 10, 80, 40]}, {"desc": "kite", "poly": [0, 0, 99, 0, 50, 49]}
    rows = [line(id=f"s{i}", objects=[box, kite][: i % 3]) for i in range(1, 21)]
    return write(tmp_path, *rows)


def test_samples_are_drawn_by_the_seed_in_file_order(data_file):
    lines = [int(sample.source.rpartition(":")[2]) for sample in pick_samples(data_file, 8, 1, "x")]
    assert lines == sorted(set(lines)) and len(lines) == 8
    assert [s.source for s in pick_samples(data_file, 8, 1, "x")] == [f"{data_file}:{number}" for number in lines]
    assert [s.source for s in pick_samples(data_file, 8, 2, "x")] != [f"{data_file}:{number}" for number in lines]
    assert len(pick_samples(data_file, 100, 0, "x")) == 20


def test_objects_are_where_they_belong_in_their_own_colours(data_file):
    """A 100 x 50 image drawn 200 wide: the box from (20, 10) to (80, 40) has its border at x = 40."""
    sample = pick_samples(data_file, 20, 0, "x")[1]
    assert [item.desc for item in sample.objects] == ["cat", "kite"]
    drawn = picture(sample, 200)
    assert drawn.getpixel((40, 60)) == ImageColor.getrgb(colour_of("cat"))
    assert drawn.getpixel((100, 1)) == ImageColor.getrgb(colour_of("kite"))
    assert drawn.getpixel((100, 60)) == (255, 0, 0)  # the image itself between them
    assert drawn.height > 100 and colour_of("cat") != colour_of("kite")


def test_a_sheet_and_single_pictures(data_file, tmp_path):
    samples = pick_samples(data_file, 5, 0, "x")
    (path,) = show(samples, tmp_path / "out" / "d", columns=2, side=100)
    assert path == tmp_path / "out" / "d.png" and Image.open(path).width == 8 + 2 * 108
    names = [path.name for path in show(samples, tmp_path / "out" / "d", side=100, separate=True)]
    assert names == [f"d_{sample.source.rpartition(':')[2]}.png" for sample in samples]
    assert all(Image.open(tmp_path / "out" / name).width == 100 for name in names)


def test_text_samples_and_several_images_say_so(tmp_path, monkeypatch):
    png(tmp_path / "b.png")
    rows = [line(images=[], objects=[]), line(images=["a.png", "b.png"], objects=[]), line(objects=[])]
    captions = []
    written = show_jsonl.text_panel
    monkeypatch.setattr(show_jsonl, "text_panel", lambda texts, *_, **__: captions.append(texts) or written(texts, 200))
    samples = pick_samples(write(tmp_path, *rows), 3, 0, "x")
    assert len(show(samples, tmp_path / "s", separate=True)) == 3
    ends = ["0 objects, no image", "0 objects, first of 2 images", "0 objects"]
    assert [text.partition(", ")[2] or text for [(text, _)] in captions] == ends


def test_a_bad_line_is_named(tmp_path):
    path = write(tmp_path, line(), line(images=["no.png"]))
    with pytest.raises(DataError, match="d.jsonl:2: .*no such image"):
        pick_samples(path, 2, 0, "x")


def test_the_program(data_file, tmp_path, monkeypatch, capsys):
    def run_tool(path: Path) -> None:
        monkeypatch.setattr(
            sys, "argv", ["show_jsonl", "--data", str(path), "--output", str(tmp_path / "o"), "--num", "3"]
        )
        main()

    run_tool(data_file)
    assert capsys.readouterr().out == f"{tmp_path}/o/d.png\n" and (tmp_path / "o" / "d.png").exists()
    (tmp_path / "bad.jsonl").write_text(json.dumps(line(images=["no.png"])))
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, words in [("bad", "no such image"), ("empty", "the file is empty"), ("absent", "cannot be read")]:
        with pytest.raises(SystemExit) as ended:
            run_tool(tmp_path / f"{name}.jsonl")
        assert ended.value.code == 2 and words in capsys.readouterr().err


def test_an_image_of_the_data_is_not_overwritten(tmp_path, monkeypatch, capsys):
    """Nor one of a line that is not drawn; a second call replaces its own pictures."""
    for name in ("d_1.png", "d_2.png"):
        png(tmp_path / name)
    data, before = write(tmp_path, *(line(images=[f"d_{i}.png"]) for i in (2, 1))), (tmp_path / "d_1.png").read_bytes()
    arguments = ["show_jsonl", "--data", str(data), "--separate", "--num", "1", "--output"]
    monkeypatch.setattr(sys, "argv", [*arguments, str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2 and "exists, and would be overwritten" in capsys.readouterr().err
    assert (tmp_path / "d_1.png").read_bytes() == (tmp_path / "d_2.png").read_bytes() == before
    monkeypatch.setattr(sys, "argv", [*arguments, str(tmp_path / "sheets")])
    main()
    main()
    assert len(list((tmp_path / "sheets").iterdir())) == 1
