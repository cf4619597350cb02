"""`utils.data.samples`: data files, and every mistake in them (DAT-1, DAT-2, DAT-3)."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.families import BUILDERS
from utils.answer_format import QWEN2_5VL, QWEN3VL
from utils.data.encoding import grid_of
from utils.data.images import EXIF_ORIENTATION, open_image
from utils.data.mistakes import KINDS, BadLine
from utils.data.samples import DataError, LineReader, Sample, load_samples, map_ahead, read_samples
from utils.geometry import Object
from utils.scores import object_record


def png(path: Path, width: int = 100, height: int = 50) -> Path:
    Image.new("RGB", (width, height), "red").save(path)
    return path


def line(**changes) -> dict:
    row = {"images": ["a.png"], "width": 100, "height": 50, "objects": [{"desc": "cat", "bbox_2d": [0, 0, 50, 25]}]}
    row.update(changes)
    return {key: value for key, value in row.items() if value is not ...}


def write(folder: Path, *rows, name: str = "d.jsonl") -> Path:
    png(folder / "a.png")
    path = folder / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def mixed(folder: Path) -> Path:
    """Nine lines: 2, 5 and 7 bad, 7 in two classes, a blank one in between."""
    far = {"desc": "cat", "bbox_2d": [0, 0, 500, 20]}
    rows = [line(), "{", line(), "", line(objects=[far]), line(), line(images=["no.png"], objects=[far, far]), line()]
    return write(folder, *rows)


def load_one(folder: Path, *, prompt="List.", object_order="file", **changes) -> Sample:
    return load_samples([write(folder, line(**changes))], prompt, object_order)[0][0]


def problems_of(*paths, prompt="List.") -> list[str]:
    with pytest.raises(DataError) as caught:
        load_samples(paths, prompt)
    return caught.value.problems


# ---- DAT-1: the format ---------------------------------------------------------------------------------------------


def test_dat_1_own_form(tmp_path):
    """DAT-1."""
    sample = load_one(tmp_path, id="s1")
    assert sample.id == "s1"
    assert sample.images == [str(tmp_path / "a.png")]
    assert sample.image_sizes == [(50, 100)]
    assert sample.messages == [{"role": "user", "content": "List."}]
    assert sample.objects == [Object("cat", "bbox_2d", (0, 0, 500, 500))]
    assert sample.source == f"{tmp_path}/d.jsonl:1"


def test_dat_1_prompt_of_the_line_wins_over_the_config(tmp_path):
    """DAT-1."""
    assert load_one(tmp_path, prompt="config's").messages[0]["content"] == "config's"
    row = line(prompt="its own")
    assert load_samples([write(tmp_path, row)], "config's")[0][0].messages[0]["content"] == "its own"


def test_dat_1_without_objects_is_valid(tmp_path):
    """DAT-1."""
    assert load_one(tmp_path, objects=[]).objects == []


def test_dat_1_grp_5_other_keys_are_kept_for_rewards(tmp_path):
    """DAT-1, GRP-5: as they are; the format's own are not among them."""
    summary = {"car": {"colour": ["red", None], "doors": 4}}
    sample = load_one(tmp_path, id="s1", domain="street", summary=summary, answer=1.5, prompt="?")
    assert sample.extra == {"domain": "street", "summary": summary, "answer": 1.5}
    assert load_one(tmp_path).extra == {}


def test_dat_1_grp_5_a_summary_needs_neither_objects_nor_an_image(tmp_path):
    """DAT-1, GRP-5: but an image that is there is read as ever."""
    assert load_one(tmp_path, objects=..., summary={}).objects == []
    text = load_one(tmp_path, images=[], width=..., height=..., objects=..., summary={})
    assert (text.images, text.image_sizes, text.width, text.objects) == ([], [], 0, [])
    (told,) = problems_of(write(tmp_path, line(objects=None, summary={})))
    rule = "objects: missing; write [] for an image without objects (the line has "
    assert told.startswith(f"{tmp_path}/d.jsonl:1: {rule}")


def test_dat_1_polygon(tmp_path):
    """DAT-1."""
    objects = [{"desc": "kite", "poly": [0, 0, 100, 0, 100, 50]}]
    assert load_one(tmp_path, objects=objects).objects == [Object("kite", "poly", (0, 0, 999, 0, 999, 999))]


def test_dat_1_relative_images_belong_to_the_file_not_the_working_directory(tmp_path, monkeypatch):
    """DAT-1."""
    (tmp_path / "sub").mkdir()
    path = write(tmp_path / "sub", line(images=["../sub/a.png"]))
    monkeypatch.chdir(tmp_path)
    sample = load_samples([Path("sub") / path.name], "x")[0][0]
    assert Path(sample.images[0]).is_absolute() and open_image(sample.images[0]).size == (100, 50)


def test_dat_1_blank_lines_and_a_byte_order_mark_do_no_harm(tmp_path):
    """DAT-1."""
    path = write(tmp_path, line())
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\n\r\n")
    assert len(load_samples([path], "x")[0]) == 1


def test_dat_1_swift_messages_with_markers_and_answer(tmp_path):
    """DAT-1."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<image>Find all."},
        {"role": "assistant", "content": "<ref-object> at <bbox>"},
    ]
    sample = load_one(tmp_path, messages=messages)
    assert sample.messages == messages[:2]


def test_dat_1_swift_content_lists_with_images_inside(tmp_path):
    """DAT-1."""
    content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "Find all."}]
    sample = load_one(tmp_path, images=..., messages=[{"role": "user", "content": content}])
    assert sample.messages == [{"role": "user", "content": "<image>Find all."}]
    assert sample.images == [str(tmp_path / "a.png")]


def test_dat_1_swift_images_as_path_or_bytes(tmp_path):
    """DAT-1."""
    raw = base64.b64encode(png(tmp_path / "b.png", 30, 20).read_bytes()).decode()
    assert load_one(tmp_path, images=[{"path": "a.png", "bytes": None}]).images == [str(tmp_path / "a.png")]
    sample = load_one(tmp_path, images=[{"bytes": raw}], width=30, height=20, objects=[])
    assert sample.image_sizes == [(20, 30)] and open_image(sample.images[0]).size == (30, 20)


def test_dat_1_swift_objects_and_size_from_the_image(tmp_path):
    """DAT-1."""
    objects = {"ref": ["cat", "kite"], "bbox": [[0, 0, 50, 25], [0, 0, 100, 0, 100, 50]]}
    sample = load_one(tmp_path, objects=objects, width=..., height=...)
    assert (sample.width, sample.height) == (100, 50)
    assert [o.kind for o in sample.objects] == ["bbox_2d", "poly"]
    assert sample.objects[0] == Object("cat", "bbox_2d", (0, 0, 500, 500))


def test_dat_1_swift_one_ref_names_several_boxes_and_fractions(tmp_path):
    """DAT-1."""
    objects = {"ref": ["cat"], "bbox": [[0, 0, 0.5, 1], [0.5, 0, 1, 1]], "bbox_type": "norm1"}
    assert [o.coords for o in load_one(tmp_path, objects=objects).objects] == [(0, 0, 500, 999), (500, 0, 999, 999)]


@pytest.mark.parametrize("excess", [5e-7, 2.2e-16, 1e-3])
def test_dat_1_fractions_that_rounding_took_over_the_edge_are_clamped(tmp_path, excess):
    """DAT-1: six digits of a YOLO line's centre and size add up to 1.0000005; and no fraction is further outside."""
    objects = {"ref": ["cat"], "bbox": [[-excess, 0.5, 1 + excess, 1]], "bbox_type": "norm1"}
    assert load_one(tmp_path, objects=objects).objects[0].coords == (0, 500, 999, 999)
    objects["bbox"] = [[0, 0.5, 1.01, 1]]
    with pytest.raises(DataError, match=r"1.01, 1\] lies outside the image"):
        load_one(tmp_path, objects=objects)


def test_dat_1_a_line_that_asks_by_itself_may_have_other_keys(tmp_path):
    """DAT-1: of its own, for rewards."""
    asked = {"query": "red", "prompts": 2}
    own = load_samples([write(tmp_path, line(prompt="Find it.", **asked))], "List.")[0][0]
    assert own.extra == asked
    assert load_one(tmp_path, messages=[{"role": "user", "content": "Find it."}], **asked).extra == asked


def test_dat_1_swift_image_id_picks_the_image_whose_size_counts(tmp_path):
    """DAT-1."""
    png(tmp_path / "b.png", 200, 200)
    objects = {"ref": ["x", "y"], "bbox": [[0, 0, 100, 50], [0, 0, 100, 100]], "image_id": [0, 1]}
    sample = load_one(tmp_path, images=["a.png", "b.png"], width=..., height=..., objects=objects)
    assert [o.coords for o in sample.objects] == [(0, 0, 999, 999), (0, 0, 500, 500)]


# ---- DAT-2: bins and order -----------------------------------------------------------------------------------------


def test_dat_2_half_a_pixel_outside_is_clamped(tmp_path):
    """DAT-2."""
    objects = [{"desc": "cat", "bbox_2d": [-0.4, 0, 100.5, 50]}]
    assert load_one(tmp_path, objects=objects).objects[0].coords == (0, 0, 999, 999)


def test_dat_3_a_tiny_box_at_the_corner_is_no_fraction_where_others_are_in_pixels(tmp_path):
    boxes = [[0.25, 0.25, 0.75, 0.75], [10, 10, 20, 20]]
    sample = load_one(tmp_path, objects=[{"desc": "c", "bbox_2d": box} for box in boxes])
    assert len(sample.objects) == 2


def test_dat_2_polygon_points_just_outside_are_clamped_and_others_refused(tmp_path):
    """DAT-2, DAT-3: each point by itself; far outside is a mistake even where the rest of the shape lies inside."""
    near = [{"desc": "kite", "poly": [-0.5, -0.5, 100.5, 0, 50, 50.4]}]
    assert load_one(tmp_path, objects=near).objects[0].coords == (0, 0, 999, 0, 500, 999)
    for x, y in [(-0.6, 0), (0, -0.6), (100.6, 0), (0, 50.6)]:
        far = [{"desc": "kite", "poly": [10, 10, 90, 10, x, y]}]
        assert "lies outside the image" in problems_of(write(tmp_path, line(objects=far)))[0]


def test_dat_2_grid_of_the_answer_format(tmp_path, caplog):
    """DAT-2: Qwen3-VL's numbers are 0..1000, and a polygon becomes its box, with one warning for all files."""
    poly = {"desc": "dog", "poly": [10, 5, 100, 5, 50, 50]}
    files = [
        write(tmp_path, line(objects=[poly, {"desc": "cat", "bbox_2d": [0, 0, 50, 25]}]), line(), name="a.jsonl"),
        write(tmp_path, line(objects=[poly]), name="b.jsonl"),
    ]
    first, second = load_samples(files, reader=LineReader("List.", form=QWEN3VL))
    dog, cat = Object("dog", "bbox_2d", (100, 100, 1000, 1000)), Object("cat", "bbox_2d", (0, 0, 500, 500))
    assert [sample.objects for sample in first + second] == [[dog, cat], [cat], [dog]]
    (record,) = caplog.records
    assert record.getMessage().startswith("2 of 4 objects are polygons, which answer_format: qwen3vl cannot express")
    assert load_samples(files, "List.")[1][0].objects == [Object("dog", "poly", (100, 100, 999, 100, 500, 999))]
    assert len(caplog.records) == 1


def test_tgt_12_annotated_labels_of_a_line(tmp_path):
    """TGT-12: compared as labels are; without the key annotation is complete; it is no key for rewards."""
    sample = load_one(tmp_path, annotated=["Cat ", "dog"])
    assert sample.annotated == frozenset({"cat", "dog"}) and sample.extra == {}
    assert load_one(tmp_path).annotated is None and load_one(tmp_path, annotated=[]).annotated == frozenset()
    for misspelt in ("anotated", "annotaded", "annotate"):  # the line would count as complete
        (problem,) = problems_of(write(tmp_path, line(**{misspelt: ["cat"]})))
        assert f"{misspelt}: unknown key; did you mean annotated?" in problem
    assert load_one(tmp_path, annotation="x", annotations=[], notes="").annotated is None
    (problem,) = problems_of(write(tmp_path, line(annotated="cat")))
    assert "annotated: must be a list of labels" in problem


def test_dat_2_order(tmp_path):
    """DAT-2."""
    boxes = {"low": [0, 30, 5, 40], "right": [50, 10, 60, 40], "left": [10, 10, 20, 12]}
    objects = [{"desc": desc, "bbox_2d": box} for desc, box in boxes.items()]
    objects.append({"desc": "roof", "poly": [50, 20, 40, 5, 60, 5]})
    assert [o.desc for o in load_one(tmp_path, objects=objects).objects] == ["low", "right", "left", "roof"]
    in_order = load_one(tmp_path, objects=objects, object_order="sorted").objects
    assert [o.desc for o in in_order] == ["roof", "left", "right", "low"]


# ---- DAT-3: mistakes -----------------------------------------------------------------------------------------------

BAD_LINES = {
    "not json": ("{", "not valid JSON"),
    "a list": ("[1]", "a sample is one JSON object, not a list"),
    "half a character": (line(objects=[{"desc": "a\ud83d", "bbox_2d": [0, 0, 1, 1]}]), "half a character"),
    "nan": ('{"width": NaN}', "NaN is not a JSON number"),
    "missing image": (line(images=["no.png"]), "images[0]: {dir}/no.png: no such image"),
    "image is a folder": (line(images=["."]), "images[0]: {dir}"),
    "image is no image": (line(images=["d.jsonl"]), "not an image that can be read"),
    "url": (line(images=["http://x/a.png"]), "images[0]: http://x/a.png: data files name local images only"),
    "images is a string": (line(images="a.png"), "images: must be a list, not a string"),
    "images is an empty string": (line(images=""), "images: must be a list, not a string"),
    "images is an empty object": (line(images={}), "images: must be a list, not an object"),
    "images is zero": (line(images=0), "images: must be a list, not a number"),
    "image is a number": (line(images=[3]), "images[0]: must be a path, not a number"),
    "no images": (
        line(images=..., image="a.png"),
        "images: missing (the line has 'width', 'height', 'objects', 'image')",
    ),
    "no objects": (line(objects=...), "objects: missing; write []"),
    "objects is a number": (line(objects=3), "objects: must be a list, not a number"),
    "width is a string": (line(width="100"), 'width: must be a positive integer below 2**31, not "100"'),
    "height is zero": (line(height=0), "height: must be a positive integer below 2**31, not 0"),
    "width is huge": (line(width=10**400), "width: must be a positive integer below 2**31, not 1000"),
    "no size": (
        line(images=[], width=..., height=...),
        "objects[0]: there is no image size; the line needs width and height",
    ),
    "height is missing": (line(height=...), "height: must be a positive integer below 2**31, not null"),
    "outside": (
        line(objects=[{"desc": "cat", "bbox_2d": [0, 0, 150, 25]}]),
        "objects[0].bbox_2d: [0, 0, 150, 25] lies outside the image of 100 x 50",
    ),
    "poly outside": (
        line(objects=[{"desc": "c", "poly": [0, 0, 9, 9, -9, 3]}]),
        "objects[0].poly: [0, 0, 9, 9, -9, 3]",
    ),
    "huge number": (line(objects=[{"desc": "c", "bbox_2d": [0, 0, 10**400, 9]}]), "lies outside the image"),
    "infinite number": (
        '{"images": [], "width": 9, "height": 9, "objects": [{"desc": "c", "bbox_2d": [0, 0, 1e999, 9]}]}',
        "must be a list of numbers",
    ),
    "fractions": (
        line(objects=[{"desc": "c", "bbox_2d": [0.1, 0.2, 0.5, 1]}]),
        "objects[0].bbox_2d: [0.1, 0.2, 0.5, 1] looks like fractions of the sides; coordinates are pixels, or in units",
    ),
    "fractions of two": (
        line(objects=[{"desc": "c", "bbox_2d": [0, 0, 1, 1]}, {"desc": "c", "poly": [0, 0, 0.5, 0, 0.25, 0.5]}]),
        "objects[1].poly: [0, 0, 0.5, 0, 0.25, 0.5] looks like fractions of the sides",
    ),
    "turned box": (line(objects=[{"desc": "c", "bbox_2d": [9, 40, 3, 39]}]), "is not [x1, y1, x2, y2]"),
    "three numbers": (line(objects=[{"desc": "c", "bbox_2d": [9, 0, 3]}]), "bbox_2d: must have 4 numbers, has 3"),
    "odd polygon": (line(objects=[{"desc": "c", "poly": [1] * 7}]), "poly: must have an even number of numbers"),
    "box of strings": (line(objects=[{"desc": "c", "bbox_2d": ["1"] * 4}]), "bbox_2d: must be a list of numbers"),
    "box of booleans": (line(objects=[{"desc": "c", "bbox_2d": [True] * 4}]), "bbox_2d: must be a list of numbers"),
    "both kinds": (
        line(objects=[{"desc": "c", "bbox_2d": [0, 0, 1, 1], "poly": [0] * 6}]),
        "objects[0]: needs exactly one of bbox_2d and poly, has bbox_2d and poly",
    ),
    "no geometry": (
        line(objects=[{"desc": "c", "bbox": [0, 0, 1, 1]}]),
        "objects[0]: needs exactly one of bbox_2d and poly, has neither (the object has 'desc', 'bbox')",
    ),
    "no desc": (
        line(objects=[{"label": "c", "bbox_2d": [0, 0, 1, 1]}]),
        "objects[0].desc: missing (the object has 'label', 'bbox_2d'); it is the object's label",
    ),
    "coco's box": (
        line(objects=[{"desc": "c", "bbox_2d": [60, 20, 40, 30]}]),
        "with x1 <= x2 and y1 <= y2; COCO's [x, y, width, height]? use python -m tools.convert --from coco",
    ),
    "coco's file": (
        {"images": [{"id": 1}], "annotations": [], "categories": []},
        "looks like COCO; convert it: python -m tools.convert --from coco",
    ),
    "given twice": ('{"images": [], "objects": [], "objects": []}', "'objects' is given twice; which one counts?"),
    "box given twice": (
        '{"images": [], "objects": [{"desc": "c", "bbox_2d": [0, 0, 9, 9], "bbox_2d": [1, 1, 2, 2]}]}',
        "'bbox_2d' is given twice; which one counts?",
    ),
    "turned size of a larger image": (
        line(width=1000, height=1995),
        "width, height: 1000 x 1995, but the image is 100 x 50 as training shows it (EXIF turned it?); write its size",
    ),
    "turned size": (
        line(width=50, height=100),
        "width, height: 50 x 100, but the image is 100 x 50 as training shows it (EXIF turned it?); write its size",
    ),
    "blank desc": (
        line(objects=[{"desc": " ", "bbox_2d": [0, 0, 1, 1]}]),
        "objects[0].desc: must be a non-empty string",
    ),
    "special desc": (line(objects=[{"desc": "<|im_end|>", "bbox_2d": [0, 0, 1, 1]}]), "spells a special token"),
    "object is a string": (line(objects=["cat"]), "objects[0]: must be an object, not a string"),
    "swift lengths": (line(objects={"ref": ["a", "b"], "bbox": [[0, 0, 1, 1]]}), "2 ref entries for 1 bbox entries"),
    "swift ref alone": (line(objects={"ref": ["a"], "bbox": []}), "1 ref entries for 0 bbox entries; pair them"),
    "query": (line(query="Find it."), "query: is not read; write it as messages, as tools.convert --from swift does"),
    "conversations": (
        line(conversations=[]),
        "conversations: is not read; write it as messages, as tools.convert --from s",
    ),
    "system": (line(system="Be brief."), "system: is not read; write it as messages"),
    "history": (line(history=[]), "history: is not read; write it as messages"),
    "misspelt prompt": (line(Prompt="Find it."), "Prompt: unknown key; did you mean prompt? Otherwise give it another"),
    "misspelt messages": (line(message=[]), "message: unknown key; did you mean messages?"),
    "swift form": (line(objects={"bbox": []}), "objects: must be a list, or"),
    "id": (line(id=[1]), "id: must be a string, not a list"),
    "prompt": (line(prompt=1), "prompt: must be a string, not a number"),
    "two prompts": (line(prompt="x", messages=[{"role": "user", "content": "x"}]), "either messages or prompt"),
    "messages": (line(messages="hi"), "messages: must be a list of {role, content}"),
    "no user": (line(messages=[{"role": "system", "content": "x"}]), "messages: there is no user message"),
    "role": (line(messages=[{"role": "robot", "content": "x"}]), "role 'robot' is not one of"),
    "content": (line(messages=[{"role": "user", "content": 1}]), "content must be a string or a list of parts"),
    "markers": (line(messages=[{"role": "user", "content": "<image><image>"}]), "2 <image> markers"),
    "bbox marker": (line(messages=[{"role": "user", "content": "at <bbox>"}]), "the marker <bbox> is not supported"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_dat_3_bad_line_is_reported_with_file_line_and_reason(tmp_path, name):
    """DAT-3."""
    bad, reason = BAD_LINES[name]
    problems = problems_of(write(tmp_path, line(), bad, line()))
    assert len(problems) == 1
    assert problems[0].startswith(f"{tmp_path}/d.jsonl:2: ")
    assert reason.replace("{dir}", str(tmp_path)) in problems[0]


@pytest.mark.parametrize("name", BAD_LINES)
def test_dat_3_every_mistake_has_a_class_and_loading_finds_the_same(tmp_path, name):
    """DAT-3: what `read_samples` yields is what `load_samples` refuses, message for message."""
    path = write(tmp_path, line(), BAD_LINES[name][0])
    bad = [item for item in read_samples(path, "x") if isinstance(item, BadLine)]
    assert len(bad) == 1 and {kind for kind, _ in bad[0].problems} <= set(KINDS)
    with pytest.raises(DataError) as caught:
        load_samples([path], "x")
    assert caught.value.problems == bad[0].messages()


def test_dat_3_a_size_on_its_side_is_refused_any_other_is_what_coordinates_count_in(tmp_path):
    """DAT-3, DAT-2: as shown, so after EXIF. With several images it is nobody's."""
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "turned.png", exif=exif)
    assert load_one(tmp_path, images=["turned.png"], width=20, height=40, objects=[]).height == 40
    (problem,) = problems_of(write(tmp_path, line(images=["turned.png"], width=40, height=20)))
    assert "width, height: 40 x 20, but the image is 20 x 40 as training shows it (EXIF turned it?)" in problem
    png(tmp_path / "small.png", 333, 187)  # 187.3
    assert load_one(tmp_path, images=["small.png"], width=1920, height=1080).objects[0].coords == (0, 0, 26, 23)
    png(tmp_path / "large.png", 1920, 1080)
    assert load_one(tmp_path, images=["large.png"], width=1000, height=1000).width == 1000
    assert load_one(tmp_path, images=["small.png", "large.png"], width=5, height=500, objects=[]).height == 500


def test_dat_2_pixels_of_a_sample_are_those_of_its_first_image(tmp_path):
    """DAT-2: `width` and `height` of the line are the frame of its coordinates only."""
    png(tmp_path / "small.png", 30, 20)
    png(tmp_path / "large.png", 1920, 1080)
    both = ["small.png", "large.png"]
    assert load_one(tmp_path, images=both, width=5, height=500, objects=[]).size_px == (30, 20)
    assert load_one(tmp_path, images=["large.png"], width=1000, height=1000, objects=[]).size_px == (1920, 1080)
    assert load_one(tmp_path, images=[], prompt="p", width=5, height=500, objects=[]).size_px == (5, 500)


@pytest.mark.parametrize("first", ["{", "\ufeff[ "])
def test_dat_3_a_file_of_one_json_text_is_named(tmp_path, first):
    """DAT-3: by its first line only; a broken line further down is just that."""
    problems = problems_of(write(tmp_path, first, "{", line()))
    assert len(problems) == 2 and "one sample per line" not in problems[1]
    assert problems[0].endswith("Is it COCO? convert it: python -m tools.convert --from coco")


def test_dat_3_classes_tell_missing_from_broken_images(tmp_path):
    """DAT-3."""
    (tmp_path / "broken.png").write_bytes(b"not a picture")
    rows = [line(images=["none.png"]), line(images=["broken.png"]), line(width=0), line(objects=[{"desc": " "}])]
    items = list(read_samples(write(tmp_path, *rows), "x"))
    assert [item.problems[0][0] for item in items] == ["image_missing", "image_unreadable", "size", "desc"]


def test_dat_3_skipping_needs_something_left(tmp_path):
    """DAT-3: a file of bad lines only, an empty and an absent one stop the run even where bad samples are skipped."""
    all_bad, empty = write(tmp_path, "{", "[1]", name="bad.jsonl"), write(tmp_path, name="empty.jsonl")
    for path, words in [(all_bad, "bad.jsonl:2"), (empty, "empty"), (tmp_path / "absent.jsonl", "cannot be read")]:
        with pytest.raises(DataError, match=words):
            load_samples([write(tmp_path, line()), path], "x", skipped=[])


def test_dat_3_all_problems_of_all_files_together(tmp_path):
    """DAT-3."""
    first = write(tmp_path, line(images=["no.png"], objects=[{"desc": "", "bbox_2d": [0, 0, 1, 1]}]), "{")
    empty = write(tmp_path, name="empty.jsonl")
    problems = problems_of(first, empty, tmp_path / "absent.jsonl")
    assert [p.split(": ")[0] for p in problems] == [
        f"{first}:1",
        f"{first}:1",
        f"{first}:2",
        f"{empty}",
        f"{tmp_path}/absent.jsonl",
    ]
    assert "the file is empty" in problems[3] and "No such file" in problems[4]


def test_dat_3_no_prompt_anywhere(tmp_path):
    """DAT-3."""
    assert "neither the line" in problems_of(write(tmp_path, line()), prompt=None)[0]


def test_dat_3_bytes_that_are_not_utf_8(tmp_path):
    """DAT-3."""
    path = write(tmp_path, line())
    path.write_bytes(path.read_bytes() + b'{"id": "\xff"}\n')
    assert problems_of(path) == [f"{path}:2: not UTF-8 at byte 8"]
    for content, told in (
        (gzip.compress(b"{}"), "it is compressed, unpack it"),
        ("{}".encode("utf-16"), "it is UTF-16"),
    ):
        path.write_bytes(content)
        assert f"{path}:1: not UTF-8 at byte" in problems_of(path)[0] and told in problems_of(path)[0]


@settings(deadline=None, max_examples=200)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    "id images width height objects messages prompt desc bbox_2d poly ref bbox role content".split()
                )
                | st.text(max_size=3),
                inner,
                max_size=5,
            )
        ),
        max_leaves=20,
    )
)
def test_dat_3_wild_json_never_escapes_as_another_error(tmp_path_factory, value):
    """DAT-3."""
    path = tmp_path_factory.getbasetemp() / "wild.jsonl"
    path.write_text(json.dumps(value) + "\n")
    try:
        load_samples([path], "x")
    except DataError as error:
        assert all(problem.startswith(f"{path}:1: ") for problem in error.problems)


def test_map_ahead_is_ordered_and_takes_no_more_than_it_may():
    taken: list[int] = []
    mapped = map_ahead(lambda x: x * x, (taken.append(i) or i for i in range(100)), num_threads=4, max_ahead=10)
    assert next(mapped) == 0 and len(taken) == 10
    assert list(mapped) == [i * i for i in range(1, 100)]


def test_only_the_lines_asked_for_are_read(tmp_path):
    items = list(read_samples(mixed(tmp_path), "x", only={1, 5}))
    assert isinstance(items[0], Sample) and items[1].line == 5 and len(items) == 2
    assert list(read_samples(mixed(tmp_path), "x", only=set())) == []


@pytest.mark.parametrize("size", [(77, 50), (300, 20), (640, 480), (28, 1200)])
def test_qwen2_5vl_objects_are_in_pixels_of_the_resized_image_FAM_4(tmp_path, size):
    """FAM-4, DAT-2: the grid is what the family's own processor makes of an image; so it goes, to half a pixel of the
    resized image, through reading, and back to bins of 0..999 in records."""
    processor = BUILDERS["qwen2_5_vl"]()[0]
    image = Image.new("RGB", size)
    image.save(tmp_path / "b.png")
    _, rows, columns = processor.image_processor(images=[image], return_tensors="pt")["image_grid_thw"][0].tolist()
    patch = processor.image_processor.patch_size
    width, height = size
    box = [0.3 * width, 0.1 * height, width, 0.7 * height]
    objects = [{"desc": "kite", "bbox_2d": box}]
    path = write(tmp_path, {"images": ["b.png"], "width": width, "height": height, "objects": objects})
    reader = LineReader("List.", form=QWEN2_5VL, grid_of=grid_of(processor, QWEN2_5VL))
    (sample,) = load_samples([path], reader=reader)[0]
    assert sample.grid == (columns * patch, rows * patch)
    (found,) = sample.objects
    for value, pixels, side, resized in zip(found.coords, box, size * 2, sample.grid * 2, strict=True):
        assert abs(value - pixels / side * resized) <= 0.5
    record = object_record(found, sample.grid)["bbox_2d"]
    for value, pixels, side, resized in zip(record, box, size * 2, sample.grid * 2, strict=True):
        assert abs(value / 999 - pixels / side) <= 0.51 / resized


def test_a_form_in_pixels_needs_the_processor_FAM_4(tmp_path):
    """FAM-4: and an image that it refuses to resize is a mistake of the line."""
    with pytest.raises(ValueError, match="qwen2_5vl needs the processor"):
        LineReader("List.", form=QWEN2_5VL)
    Image.new("RGB", (2010, 10)).save(tmp_path / "b.png")
    path = write(tmp_path, {"images": ["b.png"], "width": 2010, "height": 10, "objects": []})
    reader = LineReader("List.", form=QWEN2_5VL, grid_of=grid_of(BUILDERS["qwen2_5_vl"]()[0], QWEN2_5VL))
    with pytest.raises(DataError, match="the image cannot be resized: absolute aspect ratio"):
        load_samples([path], reader=reader)


def test_an_image_whose_coordinates_the_form_cannot_write_is_a_mistake_FAM_4_DAT_3(tmp_path):
    """FAM-4, DAT-3: named with its line; the index of lengths would have met it without one."""
    Image.new("RGB", (60, 10)).save(tmp_path / "b.png")
    objects = [{"desc": "ship", "bbox_2d": [55, 1, 59, 9]}]
    path = write(tmp_path, {"images": ["b.png"], "width": 60, "height": 10, "objects": objects})
    for factor, is_refused in ((166, False), (167, True)):  # 60 * 166 = 9960
        grid = lambda height, width, factor=factor: (factor * width, factor * height)  # noqa: E731
        reader = LineReader("List.", form=QWEN2_5VL, grid_of=grid)
        if is_refused:
            told = "d.jsonl:1: the model sees the image with coordinates up to 10020, and qwen2_5vl writes none above"
            with pytest.raises(DataError, match=told):
                load_samples([path], reader=reader)
        else:
            assert load_samples([path], reader=reader)[0][0].grid == (9960, 1660)
