"""Answers for other tools: each one's own reader finds them again."""

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from faster_coco_eval import COCO, COCOeval_faster
from PIL import Image

from tests.packages import folder_with
from tools import export
from tools.evaluate import COCO_NAMES, coco_scores
from utils.data.images import EXIF_ORIENTATION
from utils.data.samples import Sample, load_samples
from utils.geometry import Object, bins_to_pixels, bounding_box, coco_box
from utils.scores import object_record

SIZES = {"a": (200, 100), "b": (640, 480), "c": (333, 77)}  # width, height
LABELS = ("cat", "Dog ", "red car")


def shape(rng: random.Random, label: str) -> Object:
    x1, y1, x2, y2 = rng.randrange(0, 500), rng.randrange(0, 500), rng.randrange(510, 1000), rng.randrange(510, 1000)
    if rng.random() < 0.2:
        return Object(label, "poly", (x1, y1, x2, y1, (x1 + x2) // 2, y2))
    return Object(label, "bbox_2d", (x1, y1, x2, y2))


@pytest.fixture
def answers(tmp_path) -> tuple[Path, list[Sample], list[list[Object]], list[list[float]]]:
    """A file of answers as an evaluation writes it, and what is in it: samples, predictions, scores."""
    rng, samples, predictions, scores, lines = random.Random(3), [], [], [], []
    for name, (width, height) in SIZES.items():
        path = tmp_path / "images" / name[0] / f"{name}.png"
        path.parent.mkdir(parents=True)
        Image.new("RGB", (width, height)).save(path)
        truth = [shape(rng, rng.choice(LABELS)) for _ in range(5)]
        found = [replace(obj, desc=rng.choice([obj.desc, "CAT", "boat"])) for obj in truth[:4]] + [shape(rng, "cat")]
        samples.append(Sample(name, [str(path)], [(height, width)], width, height, truth, [], name))
        predictions.append(found)
        scores.append([round(rng.random(), 6) for _ in found])
        pred = [object_record(obj, (999, 999)) | {"score": own} for obj, own in zip(found, scores[-1], strict=True)]
        gt, size = [object_record(obj, (999, 999)) for obj in truth], {"width": width, "height": height}
        lines.append({"id": name, "images": [str(path)], **size, "gt": gt, "pred": pred})
    file = tmp_path / "step_000100.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file, samples, predictions, scores


def run(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["export", *map(str, arguments)])
    export.main()


@pytest.mark.parametrize("partial", ["", "abc", "bc"])
def test_coco_files_have_the_scores_of_the_evaluation_TGT_12_TGT_14(tmp_path, answers, monkeypatch, partial):
    """TGT-12, TGT-14: COCO's own evaluation of the files equals `tools.evaluate`'s, in full float precision; where
    annotation is incomplete by LVIS's rules, which then hold for the complete images as well."""
    file, samples, predictions, scores = answers
    part = {"cat", "red car"}
    samples = [replace(own, annotated=frozenset(part)) if own.id in partial else own for own in samples]
    lines = [json.loads(line) for line in file.open()]
    lines = [line | ({"annotated": sorted(part)} if line["id"] in partial else {}) for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(monkeypatch, file, "--output", tmp_path / "out")
    truth = json.loads((tmp_path / "out/instances.json").read_text())
    assert all(("frequency" in category) is bool(partial) for category in truth["categories"])
    with_objects = {item["category_id"] for item in truth["annotations"]}
    truth["categories"] = [category for category in truth["categories"] if category["id"] in with_objects]
    results = json.loads((tmp_path / "out/results.json").read_text())
    coco = COCO(truth)
    found = coco.loadRes([item for item in results if item["category_id"] in with_objects])
    evaluator = COCOeval_faster(coco, found, "bbox", lvis_style=bool(partial))
    evaluator.params.maxDets = [1, 10, 100]
    evaluator.run()
    own = coco_scores(samples, predictions, scores)
    expected = [-1 if own[name] is None else own[name] for name in COCO_NAMES]
    assert list(evaluator.stats[: len(COCO_NAMES)]) == pytest.approx(expected) and max(expected) > 0.1
    assert [
        category["name"] for category in json.loads((tmp_path / "out/predictions.json").read_text())["categories"]
    ] == [
        "cat",
        "dog",
        "red car",
        "boat",
    ]


USER_IDS = {"a": 397133, "b": 37777, "c": 252219}
USER_CATEGORIES = {"Red Car": 3, "bench": 15, "cat": 17, "Dog": 18}


def users_file(path: Path, samples: list[Sample], **changes: object) -> Path:
    """The COCO file that the images came with: other ids, other spelling, another order, categories without objects."""
    images = [
        {"id": USER_IDS[own.id], "file_name": f"{own.id}/{own.id}.png", "width": own.width, "height": own.height}
        for own in reversed(samples)
    ]
    category_of = {name.lower(): id_ for name, id_ in USER_CATEGORIES.items()}
    boxes = [(own, obj, *coco_box(obj, (own.width, own.height))) for own in samples for obj in own.objects]
    annotations = [
        {"id": number, "image_id": USER_IDS[own.id], "category_id": category_of[obj.desc.strip().lower()], "iscrowd": 0}
        | {"bbox": bbox, "area": area}
        for number, (own, obj, bbox, area) in enumerate(boxes, start=900)
    ]
    categories = [{"id": id_, "name": name} for name, id_ in USER_CATEGORIES.items()]
    path.write_text(json.dumps({"images": images, "categories": categories, "annotations": annotations} | changes))
    return path


def precision(truth: Path, results: list[dict]) -> list[float]:
    coco = COCO(json.loads(truth.read_text()))
    evaluator = COCOeval_faster(coco, coco.loadRes(results), "bbox")
    evaluator.run()
    return list(evaluator.stats[: len(COCO_NAMES)])


def test_results_with_the_ids_of_the_users_file_have_its_scores_TGT_14(tmp_path, answers, monkeypatch, capsys):
    """TGT-14: against that file, whatever its ids are; without them they belong to no file but ours, which is said."""
    file, samples, predictions, scores = answers
    theirs = users_file(tmp_path / "instances_val.json", samples)
    run(monkeypatch, file, "--output", tmp_path / "out")
    assert f"ids are those of {tmp_path / 'out/instances.json'} only; to evaluate" in capsys.readouterr().out
    run(monkeypatch, file, "--output", tmp_path / "like", "--like", theirs)
    said, num_boats = capsys.readouterr().out, sum(obj.desc == "boat" for own in predictions for obj in own)
    assert "ids are those of" not in said
    assert f"{num_boats} predicted objects left out; their labels are no category there: 'boat'\n" in said
    results = json.loads((tmp_path / "like/results.json").read_text())
    assert len(results) == sum(map(len, predictions)) - num_boats and num_boats > 1
    own = coco_scores(samples, predictions, scores)
    expected = [-1 if own[name] is None else own[name] for name in COCO_NAMES]
    assert precision(theirs, results) == pytest.approx(expected) and max(expected) > 0.1
    written = json.loads((tmp_path / "like/instances.json").read_text())
    assert {item["name"]: item["id"] for item in written["categories"]} == USER_CATEGORIES
    assert [(item["id"], item["sample"]) for item in written["images"]] == [(USER_IDS[x], x) for x in SIZES]


def test_images_of_the_users_file_without_an_answer_are_counted(tmp_path, answers, monkeypatch, capsys):
    """COCO's evaluation takes all images of a file unless told otherwise."""
    file, samples, _, _ = answers
    theirs = users_file(tmp_path / "instances_val.json", samples)
    file.write_text("".join(line for line in file.open() if json.loads(line)["id"] != "b"))
    run(monkeypatch, file, "--output", tmp_path / "out", "--like", theirs)
    assert "1 of its 3 images have no answer; evaluate these images only (params.imgIds)" in capsys.readouterr().out


IMAGE = {"id": 5, "width": 200, "height": 100}
REST = [{"id": 6, "file_name": "b/b.png"}, {"id": 7, "coco_url": "http://x/val/c.png"}]  # LVIS has urls only


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": [IMAGE | {"file_name": "elsewhere/a.png"}, *REST]}, r"no image has the file name of \S+/a/a.png\n"),
        ({"images": REST[1:]}, r"no image has the file name of \S+/a/a.png \(and 1 more\)"),
        ({"images": [IMAGE | {"file_name": "a.png", "width": 100, "height": 201}, *REST]}, "200 x 100, but 100 x 201"),
        ({"images": [IMAGE | {"file_name": name} for name in ("a.png", "a/a.png")] + REST}, "do not tell images apart"),
        (
            {"categories": [{"id": 1, "name": "cat"}]},
            r"no category has the name 'dog' \(and 1 more\), which the ground",
        ),
        ({"categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "Cat"}]}, "two categories are 'cat'"),
        ({"categories": [{"id": 1}]}, "no COCO file: KeyError: 'name'"),
        ({"categories": None}, "no COCO file"),
    ],
)
def test_what_the_users_file_does_not_have_is_told(tmp_path, answers, monkeypatch, capsys, changes, message):
    theirs = users_file(tmp_path / "instances_val.json", answers[1], **changes)
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, answers[0], "--output", tmp_path / "out", "--like", theirs)
    error = capsys.readouterr().err
    assert end.value.code == 2 and re.search(message, error) and error.startswith(f"--like {theirs}: "), error
    assert not (tmp_path / "out").exists()


def test_answers_to_images_that_exif_turns_are_left_out_where_the_file_has_the_stored_size(
    tmp_path, answers, monkeypatch, capsys
):
    """Their boxes there may be of the stored image; all other answers are written."""
    images = [IMAGE | {"file_name": "a/a.png", "width": 100, "height": 200}, *REST]
    theirs = users_file(tmp_path / "instances_val.json", answers[1], images=images)
    run(monkeypatch, answers[0], "--output", tmp_path / "out", "--like", theirs)
    told = capsys.readouterr().out
    assert "2 images: " in told and "1 answers left out: EXIF turns their images" in told
    assert "1 of its 3 images have no answer" in told
    written = json.loads((tmp_path / "out/instances.json").read_text())
    assert [image["id"] for image in written["images"]] == [6, 7]
    assert {found["image_id"] for found in json.loads((tmp_path / "out/results.json").read_text())} <= {6, 7}


@pytest.mark.parametrize(
    ("orientation", "is_sized", "arguments", "is_kept"),
    [
        (3, True, (), False),
        (3, False, (), False),
        (3, True, ("--exif", "shown"), True),
        (1, True, (), True),
        (6, True, (), True),  # its size is that of the image as shown
        (6, False, (), False),
    ],
)
def test_an_answer_is_left_out_where_nothing_says_that_boxes_are_turned_as_exif_turns_the_image(
    tmp_path, answers, monkeypatch, capsys, orientation, is_sized, arguments, is_kept
):
    """A mirrored image, or one upside down, has the same size as stored."""
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    Image.new("RGB", (200, 100) if orientation < 5 else (100, 200)).save(tmp_path / "images/a/a.png", exif=exif)
    entry = {"id": 5, "file_name": "a/a.png"} | (IMAGE if is_sized else {})
    theirs = users_file(tmp_path / "instances_val.json", answers[1], images=[entry, *REST])
    run(monkeypatch, answers[0], "--output", tmp_path / "out", "--like", theirs, *arguments)
    assert ("1 answers left out: EXIF turns their images" in capsys.readouterr().out) is not is_kept
    written = json.loads((tmp_path / "out/instances.json").read_text())
    assert [image["id"] for image in written["images"]] == [5, 6, 7][not is_kept :]


def test_images_are_found_by_url_and_by_bare_names_too(tmp_path, answers, monkeypatch):
    """As in LVIS, and where all images lie in one folder."""
    theirs = users_file(tmp_path / "x.json", answers[1], images=[IMAGE | {"file_name": "a.png"}, *REST])
    run(monkeypatch, answers[0], "--output", tmp_path / "out", "--like", theirs)
    written = json.loads((tmp_path / "out/instances.json").read_text())
    assert [(item["id"], item["sample"]) for item in written["images"]] == [(5, "a"), (6, "b"), (7, "c")]


def test_the_users_file_may_be_any_that_the_conversion_reads(tmp_path, answers, monkeypatch):
    """With a byte order mark, sizes that are null, and names that lead out of the file's folder."""
    images = [{"id": USER_IDS[x], "file_name": f"../{x}/{x}.png", "width": None, "height": None} for x in SIZES]
    theirs = users_file(tmp_path / "x.json", answers[1], images=images)
    theirs.write_text("\ufeff" + theirs.read_text())
    run(monkeypatch, answers[0], "--output", tmp_path / "out", "--like", theirs)
    written = json.loads((tmp_path / "out/instances.json").read_text())
    assert [(item["id"], item["sample"]) for item in written["images"]] == [(USER_IDS[x], x) for x in SIZES]


def test_answers_without_scores_get_one_and_it_is_said_TGT_14(tmp_path, answers, monkeypatch, capsys):
    """TGT-14."""
    file = answers[0]
    run(monkeypatch, file, "--output", tmp_path / "out")
    assert "without a score" not in capsys.readouterr().out
    lines = [json.loads(line) for line in file.open()]
    del lines[0]["pred"][0]["score"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(monkeypatch, file, "--output", tmp_path / "out")
    assert "answers without a score; each counts as 1.0" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/results.json").read_text())[0]["score"] == 1.0
    with pytest.raises(SystemExit, match="2"):  # none would be left out
        run(monkeypatch, file, "--output", tmp_path / "d.jsonl", "--to", "jsonl", "--min-score", "0.5")
    assert "has answers without a score; leave it out" in capsys.readouterr().err


def test_results_without_any_object_are_told_TGT_14(tmp_path, answers, monkeypatch, capsys):
    """TGT-14."""
    run(monkeypatch, answers[0], "--output", tmp_path / "out")
    assert "no objects were predicted" not in capsys.readouterr().out
    run(monkeypatch, answers[0], "--output", tmp_path / "out", "--min-score", 1)
    assert json.loads((tmp_path / "out/results.json").read_text()) == []
    assert "no objects were predicted; COCO's tools take no results file without any" in capsys.readouterr().out


def test_jsonl_is_read_back_as_annotation_DAT_1(tmp_path, answers, monkeypatch):
    """DAT-1: by the loader of training, to half a bin; `--min-score` leaves doubtful answers out."""
    file, samples, predictions, scores = answers
    run(monkeypatch, file, "--to", "jsonl", "--output", tmp_path / "data/pseudo.jsonl", "--min-score", 0.4)
    loaded = load_samples([str(tmp_path / "data/pseudo.jsonl")], "find", "file")[0]
    assert [sample.id for sample in loaded] == list(SIZES)
    for sample, found, own in zip(loaded, predictions, scores, strict=True):
        kept = [obj for obj, score in zip(found, own, strict=True) if score >= 0.4]
        assert 0 < len(kept) and [(obj.desc, obj.kind) for obj in sample.objects] == [(o.desc, o.kind) for o in kept]
        for read, written in zip(sample.objects, kept, strict=True):
            assert read.coords == pytest.approx(written.coords, abs=0.5)


@pytest.mark.parametrize(
    "unusable",
    [
        {"pred": [], "response": "", "finish_reason": None},
        {"response": "[", "finish_reason": "length"},
        {"pred": [], "response": "I see a cat.", "finish_reason": "stop", "parsed": False},
    ],
)
def test_answers_that_failed_were_cut_off_or_do_not_parse_are_no_annotation_DAT_1(
    tmp_path, answers, monkeypatch, capsys, unusable
):
    """DAT-1: training would take their lines for complete. COCO's scores need all."""
    lines = [json.loads(line) for line in answers[0].open()]
    whole = {"response": "[]", "finish_reason": "stop"}  # without `parsed`, as earlier versions wrote it
    lines = [line | own for line, own in zip(lines, (unusable, unusable, whole), strict=True)]
    answers[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(monkeypatch, answers[0], "--to", "jsonl", "--output", tmp_path / "pseudo.jsonl")
    assert "2 answers that failed, were cut off or do not parse are left out" in capsys.readouterr().out
    assert [json.loads(line)["id"] for line in (tmp_path / "pseudo.jsonl").open()] == ["c"]
    answers[0].write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(SystemExit):
        run(monkeypatch, answers[0], "--to", "jsonl", "--output", tmp_path / "none.jsonl")
    assert "no answer is left; see parse_rate" in capsys.readouterr().err and not (tmp_path / "none.jsonl").exists()
    answers[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(monkeypatch, answers[0], "--output", tmp_path / "out")
    assert len(json.loads((tmp_path / "out/instances.json").read_text())["images"]) == 3


def test_answers_complete_a_partial_annotation_TGT_12(tmp_path, answers, monkeypatch, capsys):
    """TGT-12, DAT-1: `--complete` keeps what is annotated and adds labels that are not, unless it is there already."""
    lines = [json.loads(line) for line in answers[0].open()]
    dog, cat, again = (
        {"desc": desc, "bbox_2d": box}
        for desc, box in (("dog", [100, 500, 300, 700]), ("Cat", [600, 100, 800, 300]), ("cat", [100, 500, 300, 710]))
    )
    far_dog = {"desc": "dog", "bbox_2d": [0, 0, 50, 50]}
    lines[0] |= {"gt": [dog], "pred": [again, cat, cat, far_dog], "annotated": ["dog"]}
    lines[1] |= {"gt": [dog], "pred": [cat], "annotated": []}
    lines[2] |= {"gt": [dog], "pred": [cat]}
    lines[2].pop("annotated", None)
    answers[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(monkeypatch, answers[0], "--to", "jsonl", "--output", tmp_path / "completed.jsonl", "--complete")
    loaded = load_samples([str(tmp_path / "completed.jsonl")], "find")[0]
    assert [[obj.desc for obj in sample.objects] for sample in loaded] == [["Cat", "dog"], ["Cat", "dog"], ["dog"]]
    assert [sample.annotated for sample in loaded] == [None, None, None]
    # A line that is complete needs no answer. Objects of less than a bin are annotation as well.
    thin, corner = {"desc": "dog", "bbox_2d": [0, 500, 0, 503]}, {"desc": "dog", "bbox_2d": [999, 999, 999, 999]}
    thread = {"desc": "dog", "poly": [10, 7, 20, 7, 30, 7]}
    lines[2] |= {"gt": [thread, thin, corner], "pred": [], "response": "[", "finish_reason": "length"}
    lines[1] |= {"response": "[", "finish_reason": "length"}
    answers[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(monkeypatch, answers[0], "--to", "jsonl", "--output", tmp_path / "again.jsonl", "--complete")
    assert "1 answers that failed, were cut off" in capsys.readouterr().out
    loaded = load_samples([str(tmp_path / "again.jsonl")], "find")[0]
    assert [sample.id for sample in loaded] == ["a", "c"]
    boxes = [bounding_box(obj) for obj in loaded[1].objects]
    assert boxes == [(10, 7, 30, 8), (0, 500, 1, 503), (998, 998, 999, 999)]
    answers[0].write_text(json.dumps(lines[2]) + "\n")
    with pytest.raises(SystemExit):
        run(monkeypatch, answers[0], "--to", "jsonl", "--output", tmp_path / "none.jsonl", "--complete")
    assert "no line has `annotated`" in capsys.readouterr().err
    lines[0] |= {"response": "", "finish_reason": None}
    answers[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SystemExit):
        run(monkeypatch, answers[0], "--to", "jsonl", "--output", tmp_path / "none.jsonl", "--complete")
    told = "the 2 answers to partly annotated images failed, were cut off or do not parse; see parse_rate and "
    assert capsys.readouterr().err.startswith(f"{answers[0]}: {told}") and not (tmp_path / "none.jsonl").exists()
    with pytest.raises(SystemExit):
        run(monkeypatch, answers[0], "--output", tmp_path / "out", "--complete")


def test_answers_to_no_image_are_left_out_of_coco_DAT_1(tmp_path, answers, monkeypatch, capsys):
    """DAT-1: a line may have none."""
    lines = [json.loads(line) for line in answers[0].open()]
    lines[1]["images"], lines[2]["images"] = [], ["data:image/png;base64,AAAA"]
    answers[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(monkeypatch, answers[0], "--output", tmp_path / "out")
    assert "2 answers to no image file are left out" in capsys.readouterr().out
    assert [own["sample"] for own in json.loads((tmp_path / "out/instances.json").read_text())["images"]] == ["a"]


def test_answers_that_share_an_image_file_are_counted(tmp_path, answers, monkeypatch, capsys):
    """supervision refuses two entries of one image, and FiftyOne shows one; COCO's own evaluation takes them."""
    run(monkeypatch, answers[0], "--output", tmp_path / "out")
    assert "supervision" not in capsys.readouterr().out
    lines = [json.loads(line) for line in answers[0].open()]
    lines[1]["images"] = lines[2]["images"]
    answers[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(monkeypatch, answers[0], "--output", tmp_path / "out")
    assert "2 answers are to an image file that another answer has, too; supervision" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out/instances.json").read_text())["images"]) == 3


def test_answers_beyond_the_image_are_cut_off_at_its_edges_DAT_1(tmp_path, answers, monkeypatch):
    """DAT-1: pixels, as Qwen2.5-VL writes them, have no largest number; what lies outside alone is no annotation."""
    record = json.loads(answers[0].open().readline())
    shapes = [{"bbox_2d": [500.0, 500.0, 1023.8, 999]}, {"poly": [0, 0, 1100, 0, 500, 1100]}]
    shapes += [{"bbox_2d": [1010, 500, 1040, 900]}]
    record["pred"] = [{"desc": "cat", **own} for own in shapes]
    answers[0].write_text(json.dumps(record) + "\n")
    run(monkeypatch, answers[0], "--to", "jsonl", "--output", tmp_path / "pseudo.jsonl")
    [[sample]] = load_samples([str(tmp_path / "pseudo.jsonl")], "find")
    assert [obj.coords for obj in sample.objects] == [(500, 500, 999, 999), (0, 0, 999, 0, 500, 999)]


def test_answers_that_are_thin_in_bins_stay_annotation_DAT_1(tmp_path, answers, monkeypatch):
    """DAT-1: the line counts as complete, and would teach not to name thin objects."""
    line = json.loads(answers[0].read_text().splitlines()[0])
    line["pred"] = [{"desc": "pin", "bbox_2d": [10, 10, 10, 20], "score": 1.0}]
    answers[0].write_text(json.dumps(line))
    run(monkeypatch, answers[0], "--to", "jsonl", "--output", tmp_path / "d.jsonl")
    (pin,) = json.loads((tmp_path / "d.jsonl").read_text())["objects"]
    assert pin["desc"] == "pin" and 0 < pin["bbox_2d"][2] - pin["bbox_2d"][0] < 0.5


def test_answers_that_training_would_refuse_are_left_out_and_counted_DAT_1(tmp_path, answers, monkeypatch, capsys):
    """DAT-1: an answer's worst objects must not make its line a mistake, which stops a training."""
    line = json.loads(answers[0].read_text().splitlines()[0])
    line["pred"] = [
        {"desc": "cat", "bbox_2d": [0, 0, 0, 0], "score": 1.0},
        {"desc": "<|im_end|>", "bbox_2d": [10, 10, 90, 90], "score": 1.0},
        {"desc": "dog", "bbox_2d": [10, 10, 90, 90], "score": 1.0},
    ]
    only_bad = line | {"id": "x", "pred": line["pred"][:2]}
    answers[0].write_text(json.dumps(line) + "\n" + json.dumps(only_bad))
    run(monkeypatch, answers[0], "--to", "jsonl", "--output", tmp_path / "d.jsonl")
    assert ": 4 objects that training would not take are left out (beyond the image, " in capsys.readouterr().out
    [samples] = load_samples([str(tmp_path / "d.jsonl")], "find")
    assert [[obj.desc for obj in sample.objects] for sample in samples] == [["dog"], []]


def test_coco_files_give_thin_boxes_an_area_LRN_9(tmp_path, answers, monkeypatch):
    """LRN-9: as `tools.evaluate` does, so that COCO's evaluation finds them."""
    record = json.loads(answers[0].open().readline())
    record["gt"] = record["pred"] = [{"desc": "cat", "bbox_2d": [78, 250, 937, 250]}]
    answers[0].write_text(json.dumps(record) + "\n")
    run(monkeypatch, answers[0], "--output", tmp_path / "out")
    for name in ("instances.json", "predictions.json"):
        (item,) = json.loads((tmp_path / "out" / name).read_text())["annotations"]
        assert 0 < item["bbox"][3] < 0.1 and 0 < item["area"] == pytest.approx(item["bbox"][2] * item["bbox"][3])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"id": "a", "images": ["a.png"], "objects": []}, "line 1 is no answer of an evaluation"),
        ({"id": "a", "images": ["a.png"], "gt": [], "pred": []}, "line 1 has no image size"),
    ],
)
def test_another_file_is_refused_with_a_way_out(tmp_path, monkeypatch, capsys, line, message):
    (tmp_path / "x.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, tmp_path / "x.jsonl", "--output", tmp_path / "out")
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_inputs_are_never_overwritten(tmp_path, answers, monkeypatch, capsys):
    like = users_file(tmp_path / "instances.json", answers[1])
    before = answers[0].read_text(), like.read_text()
    for arguments, option in (
        (("--to", "jsonl", "--output", answers[0]), "the answers"),
        (("--like", like, "--output", tmp_path), "--like"),
    ):
        with pytest.raises(SystemExit) as end:
            run(monkeypatch, answers[0], *arguments)
        assert end.value.code == 2 and f"would overwrite {option} {tmp_path}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(monkeypatch, answers[0], "--output", like)
    assert f"{like} is a file; --to coco writes a folder" in capsys.readouterr().err
    assert before == (answers[0].read_text(), like.read_text())


def test_files_that_export_did_not_write_are_never_overwritten(tmp_path, answers, monkeypatch, capsys):
    """The user's COCO files often have these names. COCO files of its own, which name answers, may be written again."""
    run(monkeypatch, answers[0], "--output", tmp_path / "own")
    run(monkeypatch, answers[0], "--output", tmp_path / "own")
    theirs = users_file(tmp_path / "theirs.json", answers[1])
    wrong = {"instances.json": theirs.read_text(), "predictions.json": "{", "results.json": "[]"}
    for name, text in wrong.items():
        file = tmp_path / name.removesuffix(".json") / name
        file.parent.mkdir()
        file.write_text(text)
        with pytest.raises(SystemExit) as end:
            run(monkeypatch, answers[0], "--output", file.parent)
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.count("\n") == 1 and list(file.parent.iterdir()) == [file]
        assert error.startswith(f"{file}: exists, and this program did not write it;") and file.read_text() == text
    (data := tmp_path / "train.jsonl").write_text("{}\n")
    for output, message in ((data, "train.jsonl: exists; it would"), (tmp_path, "is a folder; --to jsonl")):
        with pytest.raises(SystemExit) as end:
            run(monkeypatch, answers[0], "--to", "jsonl", "--output", output)
        assert end.value.code == 2 and message in capsys.readouterr().err
    assert data.read_text() == "{}\n"


@pytest.mark.parametrize("form", ["coco", "jsonl"])
def test_an_output_that_cannot_be_written_is_one_message(tmp_path, answers, monkeypatch, capsys, form):
    output = answers[0] / "below a file"
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, answers[0], "--to", form, "--output", output)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1
    assert error.startswith(f"--output {output}: cannot be written") and error.endswith("; name another place\n")


SUPERVISION = """
import json, sys
sys.path.append(sys.argv[1])
import supervision as sv
found = sv.DetectionDataset.from_coco(sys.argv[2], sys.argv[3])
print(json.dumps({path: [[found.classes[c], *map(float, box)] for c, box in zip(own.class_id, own.xyxy)]
                  for path, _, own in found}))
"""


def python(program: str, *arguments: object) -> dict:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.strip().rpartition("\n")[2])


def pixels(obj: Object, sample: Sample) -> list:
    xs, ys = obj.coords[::2], obj.coords[1::2]
    box = bins_to_pixels((min(xs), min(ys), max(xs), max(ys)), sample.width, sample.height)
    return [obj.desc.strip().lower(), *(pytest.approx(value, abs=0.01) for value in box)]


def test_supervision_reads_truth_and_answers(tmp_path, answers, monkeypatch):
    """Both files are data sets to it, in pixels of each image."""
    file, samples, predictions, _ = answers
    run(monkeypatch, file, "--output", tmp_path / "out")
    package = folder_with("supervision==0.31.2")
    sides = {"instances.json": [sample.objects for sample in samples], "predictions.json": predictions}
    for name, expected in sides.items():
        found = python(SUPERVISION, package, tmp_path / "images", tmp_path / "out" / name)
        assert found == {
            sample.images[0]: [pixels(obj, sample) for obj in objects]
            for sample, objects in zip(samples, expected, strict=True)
        }


FIFTYONE = """
import json, sys
sys.path += sys.argv[3:]
from fiftyone.utils.coco import COCODetectionDatasetImporter

def read(labels):
    with COCODetectionDatasetImporter(data_path=sys.argv[1], labels_path=sys.argv[2] + labels) as importer:
        return {path: [[own.label, own.confidence, *own.bounding_box] for own in found["detections"].detections]
                for path, _, found in importer}

print(json.dumps([read("/instances.json"), read("/predictions.json")]))
"""


@pytest.mark.slow
def test_fiftyone_reads_truth_and_answers_with_scores_TGT_14(tmp_path, answers, monkeypatch):
    """TGT-14: by its own importer of COCO data sets, which needs no database. The package takes 1 GB."""
    file, samples, predictions, scores = answers
    run(monkeypatch, file, "--output", tmp_path / "out")
    packages = folder_with("fiftyone==1.22.1"), folder_with("pycocotools==2.0.11", dependencies=False)  # for outlines
    found = python(FIFTYONE, tmp_path / "images", tmp_path / "out", *packages)
    for sample, objects, own in zip(samples, predictions, scores, strict=True):
        sides = ([(obj, None) for obj in sample.objects], list(zip(objects, own, strict=True)))
        for read, side in zip(found, sides, strict=True):
            expected = []
            for obj, score in side:
                label, x1, y1, x2, y2 = (getattr(value, "expected", value) for value in pixels(obj, sample))
                box = [x1 / sample.width, y1 / sample.height, (x2 - x1) / sample.width, (y2 - y1) / sample.height]
                expected.append([label, score, *map(pytest.approx, box)])
            assert read[sample.images[0]] == expected
