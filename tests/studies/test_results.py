"""The studies: their images and labels, what runs when, and that the report claims no more than it has."""

import itertools
import json
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from scipy.stats import ttest_ind
from torch import nn

import train_stage2
from studies import (
    arms,
    crowd_data,
    dense_data,
    forgetting_data,
    further,
    new_class_data,
    partial_data,
    refreshed_labels,
    results,
    results_report,
)
from studies.arms import SEEDS, TUNING_SEED, Job
from studies.dense import AGAIN, DENSE
from studies.dense import FAINT as FAINT_CROWDS
from studies.forgetting import FORGETTING, LONG
from studies.new_class import NEW_CLASS, NO_KL, OFFLINE, PSEUDO, REFRESHED, REPLAY, SFT, SHIFTED, STAGE2
from studies.new_class_data import MATERIALS, NEW_LABELS, PORTABLE, Cast, Shift
from studies.offline_stage2 import ReferenceEngine
from studies.partial import (
    COMPLETE,
    FAINT,
    FAINTER,
    HALF,
    SHARES,
    cast_study,
    faint_study,
)
from studies.taught import DISTILLED, TAUGHT
from tools.evaluate import PlainEngine
from tools.make_demo import build_start_model, make_dataset
from utils.capacity import EVAL_MICRO_STEP
from utils.config.load import load_config
from utils.config.schema import RM
from utils.data.encoding import encode_prompt, load_processor
from utils.data.samples import Sample, load_samples
from utils.dist import Ranks
from utils.geometry import Object
from utils.learner.model import load_model
from utils.rollout.backend import RolloutContext, RolloutRequest, RolloutSampling
from utils.rollout.hf import HfEngine
from utils.scores import label_of

ROOT = Path(__file__).parents[2]
STUDIES = list(results.STUDIES.values())
NEW_CLASSES = (NEW_CLASS, REPLAY, SHIFTED, TAUGHT)
OFF_POLICY = ("studies.offline_stage2", "studies.refreshed_labels")


def record(job: Job, f1: float, steps: int = 60) -> dict:
    scores = dict.fromkeys(results.SCORES, 0.5) | {"f1": f1}
    has_further = job.study.further and not job.is_tuning
    counts = {"images": 320, "counts": [[100 * f1, 100, 100]] * further.PARTS}
    return ({"further": counts} if has_further else {}) | {
        "task": job.study.name,
        "variant": job.variant,
        "seed": job.seed,
        "overrides": json.loads(json.dumps(job.overrides)),
        "material": job.study.material,
        "steps": steps,
        "seconds": {"train": 99.0},
        "step_seconds": {"rollout": 1.5, "sync": 0.0, "prepare": 0.25, "train": 1.0},
        "scores": {str(steps): scores},
    }


def tuning(arm, study=NEW_CLASS) -> list[dict]:
    """Records of an arm's tuning; the middle learning rate is the best."""
    best = study.learning_rates[1]
    return [record(job, 0.9 if job.lr == best else 0.3) for job in arms.grid(study, arm)]


def finished(arm, f1: float, equal_seconds: bool = False, study=NEW_CLASS) -> list[dict]:
    """Records of all test seeds of a tuned arm, 0.01 apart."""
    jobs = arms.tests(tuning(arm, study), study, arm, equal_seconds=False)
    return [record(replace(job, equal_seconds=equal_seconds), f1 + 0.01 * (job.seed - 3)) for job in jobs]


def bare(run: dict) -> dict:
    """The same run, before its model is scored on further images."""
    return {key: value for key, value in run.items() if key != "further"}


def slowed(runs: list[dict], seconds: float) -> list[dict]:
    """The same runs, each of whose steps trained for so long."""
    return [run | {"step_seconds": run["step_seconds"] | {"train": seconds}} for run in runs]


def with_rollouts(runs: list[dict], seconds: float) -> list[dict]:
    """The same runs, whose rollouts took so long."""
    return [run | {"step_seconds": run["step_seconds"] | {"rollout": seconds}} for run in runs]


# ---- images and labels ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(new_class_data, "SPLITS", {"warmup": 12, "train": 10, "tune": 8, "test": 8})
        new_class_data.make_data(folder, MATERIALS["shifted"])
    return {path.stem: [json.loads(line) for line in path.open()] for path in folder.glob("*.jsonl")}


def test_new_classes_are_unseen_in_warm_up_and_alone_annotated_in_training(data):
    labels = {name: [{item["desc"] for item in row["objects"]} for row in rows] for name, rows in data.items()}
    assert not any(own & set(NEW_LABELS) for own in labels["warmup"])
    assert all(own and own <= set(NEW_LABELS) for own in labels["train"])
    assert [row["id"] for row in data["train"]] == [row["id"] for row in data["train_all"]]
    assert any(own - set(NEW_LABELS) for own in labels["train_all"])
    for row, whole in zip(data["train"], data["train_all"], strict=True):
        assert row["objects"] == [item for item in whole["objects"] if item["desc"] in NEW_LABELS]


def test_no_scene_is_in_two_splits(data):
    numbers = [row["id"].split("-")[1] for name in ("warmup", "train", "tune", "test") for row in data[name]]
    assert len(set(numbers)) == len(numbers) == 38


def test_pseudo_labels_keep_the_annotation_and_add_only_other_classes_that_stand_elsewhere():
    row = {"width": 999, "height": 999, "objects": [{"desc": "yellow ring", "bbox_2d": [100, 500, 200, 600]}]}
    sample = SimpleNamespace(objects=[Object("yellow ring", "bbox_2d", (100, 500, 200, 600))])
    answers = [
        Object("red ring", "bbox_2d", (100, 500, 200, 610)),  # the annotated object by another name
        Object("green square", "bbox_2d", (0, 0, 50, 50)),
        Object("blue square", "bbox_2d", (0, 0, 50, 55)),  # repeats the one before
        Object("Yellow Ring", "bbox_2d", (700, 700, 800, 800)),  # annotation of this class is complete
        Object("red square", "bbox_2d", (700, 5, 700, 80)),  # no area
    ]
    merged = new_class_data.merged_objects(row, sample, answers, new_class_data.NEW_LABELS)
    assert [(item["desc"], item["bbox_2d"]) for item in merged] == [
        ("green square", [0, 0, 50, 50]),
        ("yellow ring", [100, 500, 200, 600]),
    ]


def photos(folder: Path) -> dict[str, np.ndarray]:
    """Write stand-ins of the photographs, with a tree of its own colour every 50 pixels; return their pixels."""
    folder.mkdir()
    pixels = {}
    for name, (width, height) in PHOTOS.items():
        rng = np.random.default_rng(len(name))
        pixels[name] = np.zeros((height, width, 3), dtype=np.uint8)
        objects = []
        for y, x in itertools.product(range(5, height - 30, 50), range(5, width - 30, 50)):
            pixels[name][y : y + 25, x : x + 30] = rng.integers(60, 255, 3)
            corners = "".join(
                f"<{key}>{value}</{key}>"
                for key, value in zip(("xmin", "ymin", "xmax", "ymax"), (x + 1, y + 1, x + 30, y + 25), strict=True)
            )
            objects.append(f"<object><name>Tree</name><bndbox>{corners}</bndbox></object>")
        Image.fromarray(pixels[name]).save(folder / f"{name}.png")
        (folder / f"{name}.xml").write_text(f"<annotation>{''.join(objects)}</annotation>")
    return pixels


PHOTOS = {dense_data.TRAIN_SITE: (600, 1200), dense_data.TEST_SITE: (800, 500), "OSBS_029": (400, 400)}
PHOTOS |= {"SOAP_061": (400, 400)}


def test_crops_hold_whole_trees_of_their_own_ground_however_they_are_turned(tmp_path, monkeypatch):
    """Inside each box all pixels have one colour, and no pixel of a tree's colour lies outside its box. The colours in
    the crops of one split are in no other's."""
    monkeypatch.setattr(dense_data, "ROOT", tmp_path)
    monkeypatch.setattr(dense_data, "SPLITS", {name: (12, own[1]) for name, own in dense_data.SPLITS.items()})
    monkeypatch.setattr(dense_data, "SUFFIX", ".png")
    photos(tmp_path / "photos")
    (tmp_path / "data").mkdir()
    dense_data.make_data(tmp_path / "data")
    colours = {}
    for split in dense_data.SPLITS:
        colours[split] = set()
        for row in map(json.loads, (tmp_path / "data" / f"{split}.jsonl").open()):
            pixels = np.asarray(Image.open(tmp_path / "data" / row["images"][0]))
            assert pixels.shape == (dense_data.SIDE, dense_data.SIDE, 3)
            assert len(row["objects"]) in dense_data.NUM_BOXES
            for item in row["objects"]:
                x0, y0, x1, y1 = map(int, item["bbox_2d"])
                colour = pixels[y0, x0]
                assert (pixels[y0:y1, x0:x1] == colour).all() and colour.any()
                assert (pixels == colour).all(axis=2).sum() == (x1 - x0) * (y1 - y0)
                colours[split].add(tuple(colour))
    for one, other in itertools.combinations(colours, 2):
        assert not colours[one] & colours[other]


def test_refreshed_labels_come_from_the_last_multiple_of_ten_steps_and_are_learnt_as_ground_truth(monkeypatch):
    """The weights in training are back after each answer; the answers complete the annotation, in the data's order."""
    model = nn.Linear(1, 1, bias=False)
    answers, judged, answered_with = [Object("blue square", "bbox_2d", (0, 0, 50, 50))], [], []
    monkeypatch.setattr(refreshed_labels, "parse_answer", lambda ids, table: SimpleNamespace(pred_objects=answers))
    monkeypatch.setattr(train_stage2.Stage2, "generate", lambda *_: answered_with.append(model.weight.item()))
    monkeypatch.setattr(train_stage2.Stage2, "judge", lambda self, responses, step: judged.append(responses))
    run = object.__new__(refreshed_labels.RefreshedLabels)
    run.session = SimpleNamespace(learner=SimpleNamespace(model=model), data=SimpleNamespace(table=None))
    for step in range(12):
        nn.init.constant_(model.weight, step)
        for micro_step in range(2):
            run.generate(([], []), step, micro_step)
            assert model.weight.item() == step
    assert answered_with == [0] * 20 + [10] * 4
    sample = Sample("a", [], [], 999, 999, [Object("yellow ring", "bbox_2d", (100, 500, 200, 600))], [], "")
    sample = replace(sample, annotated=frozenset({"yellow ring"}))
    run.judge(train_stage2.Responses([sample, sample], [], {0: SimpleNamespace(response_token_ids=[])}), 0)
    assert [obj.desc for obj in judged[0].samples[0].objects] == ["blue square", "yellow ring"]
    assert judged[0].samples[1] is sample  # replayed, without an answer
    assert judged[0].results == {}  # so that the ground truth is the target
    all_blue = replace(sample, annotated=frozenset({"blue square"}))
    assert refreshed_labels.completed(all_blue, answers).objects == sample.objects


SCENE = {
    "id": "train-000000",
    "images": ["train/000000.png"],
    "width": 128,
    "height": 128,
    "objects": [
        {"desc": "red ring", "bbox_2d": [1, 1, 9, 9]},
        {"desc": "blue square", "bbox_2d": [20, 1, 29, 9]},
        {"desc": "red ring", "bbox_2d": [1, 20, 9, 29]},
    ],
}


def test_a_share_of_the_images_is_complete_and_the_others_annotate_one_class_that_they_show(tmp_path):
    (tmp_path / "0.25").mkdir()
    rows = [SCENE | {"id": f"train-{number:06d}"} for number in range(400)]
    for split in ("train", "tune", "test"):
        new_class_data.write_jsonl(tmp_path / f"{split}.jsonl", rows)
    annotate = partial(partial_data.annotated, share=0.25)
    partial_data.write_annotation(tmp_path, tmp_path / "0.25", annotate)
    found = {path.stem: [json.loads(line) for line in path.open()] for path in (tmp_path / "0.25").iterdir()}
    complete = [row for row in found["train"] if "annotated" not in row]
    assert 0.2 < len(complete) / 400 < 0.3 and complete == found["complete"]
    assert all(row["objects"] == SCENE["objects"] for row in complete)
    partly = [row for row in found["train"] if "annotated" in row]
    assert {row["annotated"][0] for row in partly} == {"red ring", "blue square"}
    for row in partly:
        assert row["objects"] == [item for item in SCENE["objects"] if [item["desc"]] == row["annotated"]]
    assert len(partial_data.LABELS) == 12
    for row, with_prompt in zip(found["train"], found["train_prompted"], strict=True):
        named = ", ".join(row.get("annotated", partial_data.LABELS))
        assert with_prompt == row | {"prompt": f"Find every object in the image. {named}"}
    assert all(row["prompt"].count(", ") == 11 for row in found["test_prompted"])
    assert found["test"][0] == SCENE | {"images": [str((tmp_path / "train/000000.png").resolve())]}


def test_an_image_that_is_complete_stays_so_at_larger_shares():
    rows = [SCENE | {"id": f"train-{number:06d}"} for number in range(100)]
    complete = [
        {row["id"] for row in rows if "annotated" not in partial_data.annotated(row, share)}
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    assert all(small < large for small, large in itertools.pairwise(complete))
    assert not complete[0] and len(complete[-1]) == 100


def test_pseudo_labels_of_a_share_complete_each_image_by_what_it_does_not_annotate(tmp_path, monkeypatch):
    Image.new("RGB", (128, 128)).save(tmp_path / "a.png")
    line = SCENE | {"images": [str(tmp_path / "a.png")]}
    partly = line | {"annotated": ["red ring"], "objects": [SCENE["objects"][0]]}
    new_class_data.write_jsonl(tmp_path / "train.jsonl", [line, partly])
    seen = [Object(desc, "bbox_2d", (500, 500, 800, 800)) for desc in ("red ring", "blue square")]
    asked = []
    monkeypatch.setattr(
        new_class_data, "answers", lambda *how: asked.append((how[0], how[2])) or [seen[:1], seen[:1] + seen[1:]]
    )
    (tmp_path / "pseudo").mkdir()
    new_class_data.write_pseudo_labels(
        Path("model"), tmp_path / "train.jsonl", tmp_path / "pseudo", partial_data.LABELS, max_new_tokens=192
    )
    assert asked == [(Path("model"), 192)]
    whole, completed = [json.loads(row) for row in (tmp_path / "pseudo/train.jsonl").open()]
    assert whole == line
    assert "annotated" not in completed
    assert [item["desc"] for item in completed["objects"]] == ["red ring", "blue square"]


def test_the_narrow_set_is_of_one_colour_and_the_rest_of_all_others(tmp_path, monkeypatch):
    monkeypatch.setattr(forgetting_data, "SPLITS", {"train": (6, 0), "test": (6, 6)})
    forgetting_data.make_data(tmp_path, seed=1)
    train, test = ([json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()] for name in ("train", "test"))
    is_narrow = [{item["desc"] in forgetting_data.LABELS for item in row["objects"]} for row in [*train, *test]]
    assert is_narrow == [{True}] * 12 + [{False}] * 6
    contrast = [np.asarray(Image.open(tmp_path / row["images"][0]).convert("L"))[:4].std() for row in [*train, *test]]
    assert min(contrast[:12]) > max(contrast[12:])  # the noise of the narrow set, at the edge of the image
    assert len({row["id"].split("-")[1] for row in [*train, *test]}) == 18


def test_the_further_images_of_forgetting_are_of_both_kinds_by_turns(tmp_path, monkeypatch):
    """And none of their scenes is one of the splits'."""
    assert forgetting_data.FURTHER.start >= sum(map(sum, forgetting_data.SPLITS.values()))
    monkeypatch.setattr(forgetting_data, "FURTHER", range(20_000, 20_006))
    monkeypatch.setattr(forgetting_data, "ROOT", tmp_path)
    data = FORGETTING.further() / "test.jsonl"
    rows = [json.loads(line) for line in data.open()]
    narrow = [{item["desc"] in forgetting_data.LABELS for item in row["objects"]} for row in rows]
    assert narrow == [{True}, {False}] * 3
    assert all((data.parent / row["images"][0]).exists() for row in rows)


def test_a_crowd_has_eight_objects_at_least_and_no_picture_is_in_two_splits(tmp_path):
    crowds = replace(crowd_data.CROWD, splits=dict.fromkeys(crowd_data.CROWD.splits, 5))
    crowds.make_data(tmp_path)
    rows = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.open()]
    assert len(rows) == len({json.dumps(row["objects"]) for row in rows}) == 20
    assert all(8 <= len(row["objects"]) <= 16 for row in rows)


def test_faint_shapes_are_a_version_of_their_own_with_one_annotated_class_in_each_picture(tmp_path, monkeypatch):
    """From their own start model, scored on pictures of their own; no split has a picture of the further ones."""
    monkeypatch.chdir(tmp_path)
    few = replace(partial_data.FAINT, splits=dict.fromkeys(partial_data.FAINT.splits, 6), num_further=6)
    few = replace(few, prepare_base=lambda: None)
    faint = faint_study(few, "Faint shapes", "As above.")
    monkeypatch.setattr(crowd_data, "prepare_model", lambda *_: None)
    asked = []
    monkeypatch.setattr(new_class_data, "answers", lambda *how: asked.append((how[0], how[2])) or [[]] * 6)
    faint.prepare()
    faint.prepare()
    assert asked == [(few.root / "model", 192)], "answered once"
    train, tune = (
        load_samples([str(faint.root / f"data/{name}.jsonl")], "find", "file")[0] for name in ("train", "tune")
    )
    assert all(len(sample.annotated) == 1 for sample in train) and not any(sample.annotated for sample in tune)
    assert all(3 <= len(sample.objects) <= 5 for sample in tune)
    further = faint.further()
    assert FAINT.root == partial_data.FAINT.root / "0" and FAINTER.root == partial_data.FAINTER.root / "0"
    rows = [[json.loads(line) for line in (further / f"test{name}.jsonl").open()] for name in ("", "_prompted")]
    assert [row["objects"] for row in rows[0]] == [row["objects"] for row in rows[1]] and len(rows[0]) == 6
    assert all(row["prompt"].count(", ") == 11 and Path(row["images"][0]).exists() for row in rows[1])
    drawn = [json.loads(line)["objects"] for line in (few.root / "data/test.jsonl").open()]
    assert not any(row["objects"] in drawn for row in rows[0])
    assert Path(faint.arms[0].data).parent.name == "pseudo" and (faint.root / faint.arms[0].data).exists()


def test_pictures_with_a_colour_cast_are_annotated_for_one_class_shown_or_not(tmp_path, monkeypatch):
    """Pseudo-labels come from the start model of the other versions; what is scored is annotated for all classes."""
    monkeypatch.chdir(tmp_path)
    few = replace(partial_data.CAST, splits={"train": 240, "tune": 2, "test": 6}, num_further=6)
    monkeypatch.setattr(partial_data, "prepare_start", lambda: ["start"])
    asked = []
    seen = [Object("red ring", "bbox_2d", (0, 0, 99, 99))]
    monkeypatch.setattr(
        new_class_data, "answers", lambda model, samples, room: asked.append((model, room)) or [seen] * len(samples)
    )
    cast = cast_study(few, "a colour cast", "")
    cast.prepare()
    assert asked == [(partial_data.ROOT / "model", 128)] and cast.config == "studies/configs/partial_cast.yaml"
    train, pseudo, test, further = (
        load_samples([str(path)], "find", "file")[0]
        for path in (
            *(cast.root / f"{name}.jsonl" for name in ("data/train", "pseudo/train", "data/test")),
            cast.further() / "test.jsonl",
        )
    )
    assert {label for sample in train for label in sample.annotated} == set(partial_data.LABELS)
    assert all(len(sample.annotated) == 1 for sample in train)
    assert all({label_of(obj) for obj in sample.objects} <= sample.annotated for sample in train)
    assert 0.05 < sum(bool(sample.objects) for sample in train) / 240 < 0.4
    for sample, full in zip(train, pseudo, strict=True):
        assert len(full.objects) == len(sample.objects) + ("red ring" not in sample.annotated)
    assert all(1 <= len(sample.objects) <= 4 and sample.annotated is None for sample in [*test, *further])
    by_name = {arm.name: arm for arm in cast.arms}
    assert [name for name, arm in by_name.items() if arm.is_rival] == [
        "SFT + pseudo-labels",
        "SFT + refreshed pseudo-labels",
        "SFT",
        "SFT, label set in the prompt",
    ]
    open_end = f"{RM}.targets.supervise_closing"
    assert [name for name, arm in by_name.items() if arm.overrides.get(open_end) == "complete"] == [
        "stage 2 + KL, end unlearnt",
        "start model's answers + KL, end unlearnt",
    ]


def test_with_more_steps_of_the_colour_cast_the_start_models_answers_are_a_rival():
    """It has other pictures, and its two arms with a KL differ in nothing but whose answers they train on."""
    short, long = (results.STUDIES[name] for name in ("partial_cast", "partial_cast_long"))
    assert (short.training["max_steps"], long.training["max_steps"]) == (60, 120)
    assert partial_data.CAST.seed != partial_data.CAST_LONG.seed and short.root != long.root
    ours, offline = (arm for arm in long.arms if arm.has_kl)
    assert (ours.is_on_policy, offline.is_on_policy, offline.is_rival) == (True, False, True)
    assert long.on_policy == [ours.name] == [long.clock.name]
    first = [arms.grid(long, arm) for arm in (ours, offline)]
    assert [job.overrides for job in first[0]] == [job.overrides for job in first[1]]
    assert all(str(long.root) in str(job.overrides["custom.train_jsonl"]) for job in first[0])
    assert first[1][0].arm.program == "studies.offline_stage2"


def test_a_colour_cast_turns_colours_about_the_grey_axis():
    """Three turns by 120 degrees pass each channel on; grey stays, and so does the mean of the channels."""
    pixels = np.array([[[214.0, 48.0, 49.0], [90.0, 90.0, 90.0]]])
    turned = Cast(hue=120.0).coloured(pixels)
    assert np.allclose(turned, [[[49.0, 214.0, 48.0], [90.0, 90.0, 90.0]]])
    assert np.allclose(Cast(hue=33.0).coloured(pixels).mean(axis=-1), pixels.mean(axis=-1))
    scene = new_class_data.Scenes()
    cast, plain = (np.asarray(new_class_data.draw(1, 0, shift, scene)[0], float) for shift in (Cast(hue=33.0), Shift()))
    expected = np.clip(Cast(hue=33.0).coloured(plain), 0, 255)
    assert np.abs(cast - expected).max() <= 1 and np.abs(cast - plain).max() > 20


def test_the_model_that_a_start_model_is_trained_from_is_made_first(tmp_path, monkeypatch):
    """Trees and crowds start from that of *New class*, faint crowds from that of the crowds, faint shapes from that of
    *Partial annotation*, as do those with some left out, fainter ones and lost crowds from that of the faint ones."""
    monkeypatch.chdir(tmp_path)
    made = []
    monkeypatch.setattr(new_class_data, "prepare", lambda material: made.append(material.root))
    monkeypatch.setattr(partial_data, "prepare_model", lambda root, *_: made.append(root))
    for module in (crowd_data, dense_data, partial_data):
        monkeypatch.setattr(module, "cached", lambda *_: None)
    for module in (crowd_data, dense_data):
        monkeypatch.setattr(module, "prepare_model", lambda root, *_: made.append(root))
    new_class, crowd = Path("runs/study/new_class"), crowd_data.CROWD.root
    for prepare, expected in (
        (dense_data.prepare, [new_class, dense_data.ROOT]),
        (replace(crowd_data.CROWD, prepare_base=lambda: made.append("base")).prepare, ["base", crowd]),
        (partial_data.FAINT.prepare, [partial_data.ROOT, partial_data.FAINT.root]),
        (partial_data.FAINTER.prepare, [partial_data.ROOT, partial_data.FAINT.root, partial_data.FAINTER.root]),
    ):
        made.clear()
        prepare()
        assert made == expected
    assert crowd_data.CROWD.prepare_base.args == (MATERIALS["new_class"],)
    assert crowd_data.FAINT.prepare_base == crowd_data.CROWD.prepare


def test_a_range_of_contrasts_gives_each_object_its_own():
    """Between them the background has the least; the noise is that of the same scene with one contrast."""
    one, own = Shift(contrast=1.0, noise=30.0), Shift(contrast=(0.0, 1.0), noise=30.0)
    scenes = new_class_data.Scenes(max_objects=4)
    factors = []
    for number in range(20):
        image_of = {shift: np.asarray(new_class_data.draw(1, number, shift, scenes)[0], float) for shift in (one, own)}
        objects = new_class_data.draw(1, number, own, scenes)[1]
        rng = np.random.default_rng([1, number])
        noise = rng.normal(0, 30.0, (128, 128, 3))
        plain = np.asarray(new_class_data.draw(1, number, Shift(), scenes)[0], float)
        contrast = np.zeros((128, 128, 1))
        for item in objects:
            x0, y0, x1, y1 = item["bbox_2d"]
            contrast[y0 : y1 + 1, x0 : x1 + 1] = rng.uniform(0, 1)
            factors.append(contrast[y0, x0, 0])
        expected = plain.mean() + contrast * (plain - plain.mean()) + noise
        assert np.abs(image_of[own] - np.clip(expected, 0, 255)).max() <= 1
        assert np.abs(image_of[one] - np.clip(plain + noise, 0, 255)).max() <= 1
    assert min(factors) < 0.2 and max(factors) > 0.8


# ---- which runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_every_run_is_a_valid_config_and_only_tests_see_test_images(tmp_path, study):
    for arm, seed in itertools.product(study.arms, (TUNING_SEED, SEEDS[0])):
        job = Job(study, arm, seed, 1e-3, 10.0 if arm.has_kl else None)
        task = results.Task(study.name, arm.config or study.config)
        cfg = load_config(results.write_config(task, tmp_path / f"{arm.name}{seed}", job.overrides))
        assert Path(cfg.custom.val_jsonl[0].path).stem == ("test" if seed else "tune") + arm.scored_as
        train, *replayed = cfg.custom.train_jsonl
        assert train.annotated == (list(NEW_LABELS) if arm.only_annotated and study in NEW_CLASSES else None)
        assert [(file.path, file.annotated) for file in replayed] == (
            [("runs/study/new_class_portable/replay/train.jsonl", None)] if study is REPLAY else []
        )
        assert cfg.training.max_steps == study.training["max_steps"]
        if arm.program == "train_grpo.py":
            assert cfg.rlhf.advantage == arm.name.rpartition(" ")[2]
            continue
        assert all(file.teacher_forced_ratio == 1.0 for file in replayed)
        assert cfg.rm.teacher_forced_ratio == (0.0 if arm.is_on_policy or arm.program in OFF_POLICY else 1.0)
        assert cfg.rm.losses.reference_kl == (10.0 if arm.has_kl else 0.0)
        assert cfg.model.reference_path == ("runs/study/taught/teacher" if arm.has_kl and study is TAUGHT else None)
        apart = forgetting_data.LABELS if study in (FORGETTING, LONG) else study.annotated
        assert cfg.rm.eval.new_labels == list(apart)


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_arms_of_a_study_start_from_one_model_and_train_the_same_parameters(tmp_path, study):
    jobs = [Job(study, arm, 1, 1e-3, 10.0 if arm.has_kl else None) for arm in study.arms]
    tasks = [results.Task(study.name, job.arm.config or study.config) for job in jobs]
    cfgs = [
        load_config(results.write_config(task, tmp_path / results.slug(job.arm.name), job.overrides))
        for task, job in zip(tasks, jobs, strict=True)
    ]
    for cfg in cfgs:
        assert (cfg.model.path, cfg.tuner, cfg.data) == (cfgs[0].model.path, cfgs[0].tuner, cfgs[0].data)


def test_all_arms_have_the_same_learning_rates_and_tests_wait_for_the_whole_grid():
    for arm in NEW_CLASS.arms:
        assert {job.lr for job in arms.grid(NEW_CLASS, arm)} == set(NEW_CLASS.learning_rates)
        done = tuning(arm)
        assert arms.tuned(done[:-1], NEW_CLASS, arm) is None and not arms.tests(done[:-1], NEW_CLASS, arm, False)
        assert [job.seed for job in arms.tests(done, NEW_CLASS, arm, False)] == list(SEEDS)
        assert {job.lr for job in arms.tests(done, NEW_CLASS, arm, False)} == {2e-3}
    assert TUNING_SEED not in SEEDS and len(SEEDS) >= 5


def test_a_study_that_is_tuned_on_another_has_its_settings_and_no_grid_of_its_own():
    other = next(study for study in SHARES if study is not HALF)
    arm = next(arm for arm in other.arms if arm.name == "stage 2 + KL")
    assert not arms.planned([], other, arm)
    done = tuning(arm, HALF)
    assert [job.seed for job in arms.planned(done, other, arm)] == list(SEEDS)
    (job, *_) = arms.planned(done, other, arm)
    assert (job.study, job.lr, job.kl) == (other, 2e-3, arms.tuned(done, HALF, arm).kl)
    assert arms.num_left([], replace(other, arms=(arm,))) == len(SEEDS)
    assert all({own.name for own in study.arms} <= {own.name for own in HALF.arms} for study in SHARES)
    assert COMPLETE in HALF.arms and all(COMPLETE not in SHARES[index].arms for index in (1, 4))  # 0 % and 100 %


def test_an_arm_of_such_a_study_may_be_tuned_there_at_equal_seconds():
    (quarter,) = (study for study in SHARES if study.tuned_here)
    (pseudo,) = (arm for arm in quarter.arms if arm.name in quarter.tuned_here)
    (sft,) = (arm for arm in quarter.arms if arm.name == "SFT")
    done = [
        run for arm in (quarter.clock, pseudo, sft) for run in tuning(arm, HALF) + finished(arm, 0.5, study=quarter)
    ]
    left = arms.num_left(done, quarter)
    assert not arms.longer_grid(done, quarter, sft)  # waits for the other study
    jobs = arms.longer_grid(done, quarter, pseudo)
    assert [job.lr for job in jobs] == list(quarter.learning_rates) and all(job.is_tuning for job in jobs)
    assert {job.study for job in jobs} == {quarter} and {arms.num_steps(job, done) for job in jobs} == {132}
    assert set(jobs) <= set(arms.planned(done, quarter, pseudo))
    done += [record(job, job.lr, steps=132) for job in jobs]
    assert arms.num_left(done, quarter) == left - len(jobs)
    best = arms.tests(done, quarter, pseudo, equal_seconds=True)
    assert [job.seed for job in best] == list(SEEDS)
    assert {(job.study, job.lr) for job in best} == {(quarter, max(quarter.learning_rates))}


def test_shares_with_a_portable_start_model_have_files_of_their_own():
    studies = [study for study in SHARES if study.is_portable]
    assert [study.root for study in studies] == [partial_data.PORTABLE_ROOT / name for name in ("0.75", "1")]
    assert [study.prepare.args for study in studies] == [(share, partial_data.PORTABLE_ROOT) for share in (0.75, 1.0)]
    assert {study.material for study in studies} == {partial_data.PORTABLE_VERSION}


@pytest.mark.parametrize("study", [NEW_CLASS, REPLAY, SHIFTED], ids=lambda study: study.name)
def test_new_class_is_prepared_with_a_portable_start_model(monkeypatch, study):
    made = {}
    earlier, portable = (of["shifted" if study is SHIFTED else "new_class"] for of in (MATERIALS, PORTABLE))
    monkeypatch.setattr(new_class_data, "cached", lambda folder, settings, what, make: made.update({what: make}))
    monkeypatch.setattr(new_class_data, "warm_up", lambda cfg: made.update(cfg=cfg))
    study.prepare()
    made["start model"](study.root)
    assert study.is_portable and study.root == portable.root != earlier.root
    assert study.material == portable.version > earlier.version
    assert made["cfg"].output_dir == str(portable.root / "model")
    assert (made["cfg"].autocast, made["cfg"].steps) == ("off", earlier.warmup_steps)
    assert (portable.seed, portable.shift) == (earlier.seed, earlier.shift)


def test_further_images_of_new_class_show_and_annotate_all_classes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(new_class_data, "FURTHER", range(20_000, 20_040))
    folder = NEW_CLASS.further()
    lines = [json.loads(line) for line in (folder / "test.jsonl").open()]
    assert [line["id"] for line in lines] == [f"test-{number:06d}" for number in range(20_000, 20_040)]
    seen = {item["desc"] for line in lines for item in line["objects"]}
    assert seen == set(partial_data.LABELS)
    image, objects = new_class_data.draw(PORTABLE["new_class"].seed, 20_007, Shift(), new_class_data.Scenes())
    assert lines[7]["objects"] == objects
    assert np.array_equal(np.asarray(Image.open(folder / lines[7]["images"][0])), np.asarray(image))


@pytest.mark.parametrize("study", [FORGETTING, LONG], ids=lambda study: study.name)
def test_forgetting_is_prepared_with_the_portable_start_model(monkeypatch, study):
    roots = []
    monkeypatch.setattr(forgetting_data, "prepare_start", roots.append)
    monkeypatch.setattr(forgetting_data, "cached", lambda *_: None)
    study.prepare()
    assert roots == [partial_data.PORTABLE_ROOT] and study.is_portable


@pytest.mark.parametrize("study", [study for study in STUDIES if study.is_portable], ids=lambda study: study.name)
def test_the_arms_of_a_portable_study_start_from_the_portable_model(tmp_path, study):
    root = study.root if study in NEW_CLASSES else partial_data.PORTABLE_ROOT
    for arm in study.arms:
        job = Job(study, arm, 1, 1e-3, 10.0 if arm.has_kl else None)
        task = results.Task(study.name, arm.config or study.config)
        cfg = load_config(results.write_config(task, tmp_path / results.slug(arm.name), job.overrides))
        assert cfg.model.path == str(results.start_model(study)) == str(root / "model")


def test_records_of_other_settings_or_older_images_do_not_count():
    job = arms.grid(NEW_CLASS, SFT)[0]
    own = record(job, 0.5)
    assert arms.find([own], job) is own
    assert arms.find([own | {"material": 0}], job) is None
    assert arms.find([own | {"overrides": {}}], job) is None
    assert arms.find([own], replace(job, seed=1)) is None


def test_what_is_missing_comes_arm_by_arm_and_shrinks_to_nothing():
    done: list[dict] = []
    while (job := next(arms.missing(done, NEW_CLASS), None)) is not None:
        if not done:
            assert job.arm is STAGE2 and job.is_tuning
        left = arms.num_left(done, NEW_CLASS)
        done.append(record(job, 0.5))
        assert arms.num_left(done, NEW_CLASS) < left  # by more than one where equal seconds are equal steps
    assert arms.num_left(done, NEW_CLASS) == 0
    assert len({(r["variant"], r["seed"]) for r in done}) == len(done)
    assert {r["variant"] for r in done if r["seed"]} == set(NEW_CLASS.variants) - set(NEW_CLASS.untuned)


def test_equal_seconds_has_a_learning_rate_of_its_own():
    """It is tuned when the number of steps is known; until then earlier runs have another name in the report."""
    done = tuning(SFT) + finished(SFT, 0.5) + tuning(STAGE2)
    earlier = finished(SFT, 0.6, equal_seconds=True)[0]
    assert not arms.longer_grid(done, NEW_CLASS, SFT)
    assert arms.shown(done, NEW_CLASS, earlier)["variant"] in NEW_CLASS.untuned
    done += finished(STAGE2, 0.7)
    jobs = arms.longer_grid(done, NEW_CLASS, SFT)
    assert [job.lr for job in jobs] == list(NEW_CLASS.learning_rates) and all(job.is_tuning for job in jobs)
    assert {job.variant for job in jobs} == {f"SFT, equal seconds, lr {lr:g}" for lr in NEW_CLASS.learning_rates}
    assert {arms.num_steps(job, done) for job in jobs} == {132}
    done += [record(job, job.lr, steps=132) for job in jobs]
    tests = arms.tests(done, NEW_CLASS, SFT, equal_seconds=True)
    assert {job.lr for job in tests} == {max(NEW_CLASS.learning_rates)}
    assert arms.num_steps(tests[0], done[-3:]) == 132  # once tuned it stays, whatever seconds are measured later
    assert arms.shown(done, NEW_CLASS, earlier) is None
    assert arms.shown(done, NEW_CLASS, record(tests[0], 0.6)) == record(tests[0], 0.6)
    assert {job.lr for job in arms.tests(done, NEW_CLASS, SFT, equal_seconds=False)} == {2e-3}
    same = slowed(tuning(SFT) + finished(SFT, 0.5), 99.0) + tuning(STAGE2) + finished(STAGE2, 0.7)
    assert arms.longer_grid(same, NEW_CLASS, SFT) == arms.grid(NEW_CLASS, SFT)


def test_equal_seconds_charges_the_start_models_answers_once_and_never_gives_fewer_steps():
    """A step of stage 2 takes 2.75 s, a supervised one 1.25 s. An answer of the start model costs what it takes in the
    arm that makes it anew at each step, not what the policy's takes; where there is no such arm, nothing."""
    done = [run for arm in (STAGE2, SFT, PSEUDO, REFRESHED) for run in finished(arm, 0.5)]
    assert arms.num_steps(Job(NEW_CLASS, SFT, 1, 2e-3), done) == 60
    assert arms.num_steps(Job(NEW_CLASS, SFT, 1, 2e-3, equal_seconds=True), done) == round(60 * 2.75 / 1.25)
    assert arms.num_steps(Job(NEW_CLASS, REFRESHED, 1, 2e-3, equal_seconds=True), done) == 60  # has rollouts, too
    job = Job(NEW_CLASS, PSEUDO, 1, 2e-3, equal_seconds=True)
    both = replace(NEW_CLASS, clock=replace(STAGE2, labels="start model"))  # the clock has paid for answers, too
    assert arms.num_steps(replace(job, study=both), done) == round(60 * 2.75 / 1.25)
    done += with_rollouts(finished(OFFLINE, 0.5), 0.5)
    assert arms.num_steps(job, done) == round((60 * 2.75 - 0.5 * 1200 / 32) / 1.25)
    large = replace(NEW_CLASS, num_train=10**6)
    assert arms.num_steps(replace(job, study=large), done) == 60
    assert FAINT.label_maker is None and FAINT.arms[0].labels == "start model"
    done += [run for arm in (FAINT.clock, FAINT.arms[0]) for run in finished(arm, 0.5, study=FAINT)]
    free = Job(FAINT, FAINT.arms[0], 1, 1e-3, equal_seconds=True)
    assert arms.num_steps(free, done) == round(60 * 2.75 / 1.25)


def test_the_steps_of_labels_made_once_wait_for_the_arm_that_tells_what_they_cost():
    done = [run for arm in (STAGE2, PSEUDO) for run in tuning(arm) + finished(arm, 0.5)]
    assert not arms.has_seconds(done, NEW_CLASS, PSEUDO) and not arms.longer_grid(done, NEW_CLASS, PSEUDO)
    done += tuning(OFFLINE) + with_rollouts(finished(OFFLINE, 0.5), 0.5)
    expected = round((60 * 2.75 - 0.5 * 1200 / 32) / 1.25)
    assert {arms.num_steps(job, done) for job in arms.longer_grid(done, NEW_CLASS, PSEUDO)} == {expected}
    own = [run for arm in (SHIFTED.clock, PSEUDO) for run in tuning(arm, SHIFTED) + finished(arm, 0.5, study=SHIFTED)]
    assert arms.has_seconds(own, SHIFTED, PSEUDO)  # its clock pays for them, too


def test_records_of_other_material_decide_no_steps():
    """Neither by the steps that they had nor by their seconds."""
    done = [run for arm in (STAGE2, SFT) for run in finished(arm, 0.5)]
    job = Job(NEW_CLASS, SFT, 1, 2e-3, equal_seconds=True)
    decided = record(replace(job, seed=2), 0.5, steps=99)
    assert arms.num_steps(job, [*done, decided]) == 99
    stale = [run | {"material": 0} for run in [decided, *slowed(finished(SFT, 0.5), 0.1)]]
    assert arms.num_steps(job, [*stale, *done]) == round(60 * 2.75 / 1.25)


def test_equal_seconds_are_not_those_of_a_time_at_which_all_test_runs_were_slowed():
    """The tuning run with their settings tells; those with others do not."""
    own, clock = tuning(SFT), [*tuning(STAGE2), *finished(STAGE2, 0.7)]
    job = Job(NEW_CLASS, SFT, 1, 2e-3, equal_seconds=True)
    assert arms.num_steps(job, [*own, *slowed(finished(SFT, 0.5), 2.0), *clock]) == round(60 * 2.75 / 1.25)
    best = [run for run in own if run["scores"]["60"]["f1"] == 0.9]
    others = slowed([run for run in own if run not in best], 0.5)
    done = [*others, *slowed(best, 2.0), *slowed(finished(SFT, 0.5), 2.0)]
    assert arms.num_steps(job, [*done, *clock]) == round(60 * 2.75 / 2.25)


def test_a_record_names_the_revision_that_its_run_began_with(tmp_path, monkeypatch):
    own_files(tmp_path, monkeypatch)
    revisions = ["old"]
    monkeypatch.setattr(results.runs, "revision", lambda: revisions[-1])

    def run_learner(job, steps):
        revisions.append("new")
        return record(job, 0.5)

    monkeypatch.setattr(results, "run_learner", run_learner)
    results.run_all([replace(NEW_CLASS, prepare=lambda: None, is_portable=False)], 1)
    assert [run["revision"] for run in results.load_records()] == ["old"]


def test_a_failed_run_is_tried_once_and_a_limit_ends_the_rest(tmp_path, monkeypatch):
    own_files(tmp_path, monkeypatch)
    calls = []

    def run_learner(job, steps):
        calls.append(job.variant)
        if len(calls) == 1:
            raise results.RunFailed("boom")
        return record(job, 0.5)

    monkeypatch.setattr(results, "run_learner", run_learner)
    studies = [replace(NEW_CLASS, prepare=lambda: None, is_portable=False)]
    assert results.run_all(studies, 3) == [f"new_class: {calls[0]}, seed 0"]
    assert len(calls) == len(set(calls)) == 3
    assert [r["variant"] for r in results.load_records()] == calls[1:]


def own_files(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(results.runs, "RECORDS", tmp_path / "results.json")
    monkeypatch.setattr(results.runs, "ROOT", tmp_path)
    monkeypatch.setattr(results.runs, "weights_digest", lambda model: f"weights of {model}")


def test_a_start_model_is_known_by_its_weights_and_others_are_not_mixed_with_it(tmp_path, monkeypatch):
    """On another kind of processor it is trained to another model. Earlier records do not name it."""
    for name, content in (("one", b"a"), ("two", b"b"), ("same", b"a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    one, two, same = (results.runs.weights_digest(tmp_path / name) for name in ("one", "two", "same"))
    assert one == same != two
    own_files(tmp_path, monkeypatch)
    calls = []
    monkeypatch.setattr(results, "run_learner", lambda job, steps: calls.append(job) or record(job, 0.5))
    studies = [replace(NEW_CLASS, prepare=lambda: None, is_portable=False)]
    for _ in range(2):
        assert results.run_all(studies, 1) == []
    assert {run["start"] for run in results.load_records()} == {"weights of runs/study/new_class_portable/model"}
    monkeypatch.setattr(results.runs, "weights_digest", lambda model: "other")
    [refused] = results.run_all(studies, 1)
    assert "here the start model is other; other runs have weights of runs/study/new_class_portable/model" in refused
    assert len(calls) == 2


def test_the_report_says_where_start_models_are_mixed():
    one, two = finished(SFT, 0.5), finished(STAGE2, 0.5)
    assert results_report.several_starts(one, NEW_CLASS) == ""
    named = [run | {"start": "aa"} for run in two]
    assert results_report.several_starts(named, NEW_CLASS) == ""
    expected = f"same start model: {len(two)} with `aa`, {len(one)} with one that their records do not name."
    assert expected in results_report.several_starts([*one, *named], NEW_CLASS)
    other = [run | {"start": "bb"} for run in one]
    mixed = [*named, *other]
    assert "`aa`" in results_report.several_starts(mixed, NEW_CLASS) and "`bb`" in results_report.text_of(
        [NEW_CLASS], mixed, {}
    )


def test_processes_side_by_side_make_each_run_once(tmp_path, monkeypatch):
    """Locks belong to open files, so a call inside a run stands for another process."""
    own_files(tmp_path, monkeypatch)
    calls = []

    def run_learner(job, steps):
        calls.append(job.variant)
        if len(calls) == 1:
            results.run_all(studies, 1)
        return record(job, 0.5)

    studies = [replace(NEW_CLASS, prepare=lambda: None, is_portable=False)]
    monkeypatch.setattr(results, "run_learner", run_learner)
    results.run_all(studies, 2)
    assert len(calls) == len(set(calls)) == 3
    assert sorted(r["variant"] for r in results.load_records()) == sorted(calls)


# ---- what the report says -------------------------------------------------------------------------------------------


def all_finished(study, ours: float, rival: float) -> list[dict]:
    """All test runs; the first on-policy arm ends at `ours`, the others at 0.1."""
    best = next(arm for arm in study.arms if arm.is_on_policy)
    found = []
    for arm in study.arms:
        f1 = rival if arm.is_rival else ours if arm is best else 0.1
        found += [run for equal in (False, True)[: 1 + arm.is_rival] for run in finished(arm, f1, equal, study)]
    return found


def test_an_on_policy_arm_wins_only_above_every_rival_with_all_seeds():
    beats = results_report.beats_all
    done = all_finished(NEW_CLASS, 0.8, 0.6)
    assert beats(done, NEW_CLASS, STAGE2.name) and not beats(done, NEW_CLASS, NO_KL.name)
    assert not beats(all_finished(NEW_CLASS, 0.61, 0.6), NEW_CLASS, STAGE2.name)
    for run in done:  # without any one run of a rival or of its own nothing is shown
        others = [other for other in done if other is not run]
        if run["variant"] in (*NEW_CLASS.rivals, STAGE2.name):
            assert not beats(others, NEW_CLASS, STAGE2.name)
    strong = with_further([run for run in done if run["variant"] == PSEUDO.name], 0.9)
    others = [r for r in done if r["variant"] != PSEUDO.name]
    assert not beats([*others, *strong], NEW_CLASS, STAGE2.name)


def test_an_arm_that_took_longer_than_equal_seconds_does_not_win():
    """The rivals had the seconds of the study's clock, not its own."""
    by_object = "GRPO by object"
    rivals = [run for run in with_further(all_finished(HALF, 0.8, 0.6), 0.6) if run["variant"] in HALF.rivals]
    clock = with_further(finished(HALF.clock, 0.5, study=HALF), 0.5)
    others = {
        arm.name: with_further(finished(arm, 0.8, study=HALF), 0.8)
        for arm in HALF.arms
        if arm.is_on_policy and arm is not HALF.clock
    }
    slow = {name: slowed(runs, 9.0) for name, runs in others.items()}
    assert results_report.wins([*rivals, *clock, *others[by_object]], HALF) == [by_object]
    nearly = slowed(others[by_object], 1.1)  # 171 s: up to 5 % more are as many
    assert results_report.wins([*rivals, *clock, *nearly], HALF) == [by_object]
    assert results_report.wins([*rivals, *clock, *slow[by_object]], HALF) == []
    assert results_report.is_lost([*rivals, *clock, *itertools.chain(*slow.values())], HALF)
    assert not results_report.is_lost([*rivals, *clock, *itertools.chain(*others.values())], HALF)
    text = results_report.text_of(STUDIES, [*rivals, *clock, *slow[by_object]], {})
    assert f"*{by_object}* (it took 645 s, and equal seconds are the 165 s of *{HALF.clock.name}*)" in text


def test_an_arm_that_one_rival_holds_has_lost_whatever_is_to_come():
    """And a version has a verdict once all of its on-policy arms have lost."""
    done = all_finished(NEW_CLASS, 0.8, 0.6)
    sft = [r for r in done if r["variant"] == SFT.name]
    on_policy = {name: [r for r in done if r["variant"] == name] for name in NEW_CLASS.on_policy}
    above = [*on_policy[STAGE2.name], *sft]
    assert not results_report.unbeaten(above, NEW_CLASS, STAGE2.name) and not results_report.wins(above, NEW_CLASS)
    held = [*on_policy[NO_KL.name], *sft]
    assert results_report.unbeaten(held, NEW_CLASS, NO_KL.name) == [SFT.name]
    assert not results_report.unbeaten(held[1:], NEW_CLASS, NO_KL.name)  # a seed is missing
    assert not results_report.is_lost([*held, *on_policy[STAGE2.name]], NEW_CLASS)
    assert "in 1 of these an on-policy arm has lost already" in results_report.verdict(STUDIES, held)
    assert "in 0 of these an on-policy arm has lost already" in results_report.verdict(STUDIES, above)
    losing = [run for name, runs in on_policy.items() if name != STAGE2.name for run in runs]
    weak = [r for r in all_finished(NEW_CLASS, 0.5, 0.6) if r["variant"] == STAGE2.name]
    assert results_report.is_lost([*sft, *losing, *weak], NEW_CLASS) and not results_report.is_lost(done, NEW_CLASS)
    verdict = results_report.verdict(STUDIES, [*sft, *losing, *weak])
    assert "0 show it, 1 do not" in verdict
    text = results_report.text_of(STUDIES, [*sft, *losing, *weak], {})
    lost = f"Cannot show the claim any more, whatever is still to come: *{STAGE2.name}* (not above *{SFT.name}*)"
    assert lost in text


def test_the_first_lines_say_what_is_shown_and_what_is_missing():
    empty = results_report.verdict(STUDIES, [])
    assert empty.startswith("**The claim is not shown.**") and "So far it does in 0" in empty
    unfinished = "Not finished, so without a verdict: New class; Partial annotation; Dense; Forgetting."
    assert unfinished in empty and "of 4 studies" in empty
    won = all_finished(NEW_CLASS, 0.8, 0.6)
    lost, *lost_versions = (all_finished(study, 0.5, 0.6) for study in NEW_CLASSES)
    assert "So far it does in 1 (New class: stage 2 + KL)" in results_report.verdict(STUDIES, won)
    assert "does not in 0." in results_report.verdict(STUDIES, lost)  # its other version may still win
    assert "does not in 1 (New class)" in results_report.verdict(STUDIES, sum(lost_versions, lost))
    num_lost, num_open = 1 + len(lost_versions), len(STUDIES) - 2 - len(lost_versions)
    mixed = results_report.verdict(STUDIES, sum(lost_versions, [*lost, *all_finished(DENSE, 0.8, 0.6)]))
    assert f"1 show it, {num_lost} do not, and {num_open} have not finished" in mixed
    shown = results_report.verdict(STUDIES, [*won, *all_finished(DENSE, 0.8, 0.6)])
    places = "New class: stage 2 + KL; Dense, real images: GRPO by object"
    assert shown.startswith("**The claim is shown.**") and f"does in 2 ({places}), and" in shown
    versions = results_report.verdict(STUDIES, [*won, *all_finished(SHIFTED, 0.8, 0.6)])
    assert versions.startswith("**The claim is not shown.**")  # two versions of one study count once


def test_the_table_of_versions_names_the_arm_that_came_closest_and_what_held_it():
    """The closest is the one with the highest lower bound over its strongest rival, of those that took no longer."""

    def row(records: list[dict], study=NEW_CLASS) -> list[str]:
        lines = results_report.text_of(STUDIES, records, {"new_class": 7}).splitlines()
        [line] = [line for line in lines if line.startswith(f"| [{study.title}](#")]
        return [cell.strip() for cell in line.split("|")[1:-1]]

    assert row([]) == ["[New class](#new-class)", "open", "", "", "", "7"]
    assert row([], REPLAY)[0] == "[New class, with 10 % replay](#new-class-with-10--replay)"
    done = all_finished(NEW_CLASS, 0.8, 0.6)
    strong = with_further([run for run in done if run["variant"] == PSEUDO.name], 0.9)
    others = [r for r in done if r["variant"] != PSEUDO.name]
    assert row(done)[1:3] == ["**shown**", STAGE2.name] and row(done)[4].startswith("+0.200 [+0.1")
    assert row([*others, *strong])[1:4] == ["not shown", STAGE2.name, PSEUDO.name]
    assert row([*others, *strong[1:]])[1:3] == ["open", STAGE2.name]  # a seed of the rival is missing
    assert row([*others, *strong[1:]])[3] != PSEUDO.name
    images = with_further(all_finished(HALF, 0.8, 0.6), 0.6)
    by_object = [run for run in with_further(images, 0.9) if run["variant"] == "GRPO by object"]
    rest = [run for run in images if run["variant"] != "GRPO by object"]
    assert row([*by_object, *rest], HALF)[2] == "GRPO by object" and "+0.300 [" in row([*by_object, *rest], HALF)[4]
    assert row([*slowed(by_object, 9.0), *rest], HALF)[2] == HALF.clock.name


def test_the_first_lines_say_what_is_left_if_one_corrects_for_the_number_of_versions():
    """0.03 of F1 is 3 standard errors here, 0.2 is 20."""
    sure = [*all_finished(NEW_CLASS, 0.8, 0.6), *all_finished(DENSE, 0.8, 0.6)]
    assert "(Bonferroni, over all of them) these still show it: New class; Dense, real images." in (
        results_report.verdict(STUDIES, sure)
    )
    narrow = results_report.verdict(STUDIES, [*all_finished(NEW_CLASS, 0.8, 0.6), *all_finished(DENSE, 0.63, 0.6)])
    assert narrow.startswith(
        "**The claim is shown, but not if one corrects for the number of versions that were tried.**"
    )
    assert "With 99.77% intervals (Bonferroni, over all of them) these still show it: New class.\n" in narrow
    versions = *all_finished(NEW_CLASS, 0.8, 0.6), *all_finished(SHIFTED, 0.8, 0.6), *all_finished(DENSE, 0.63, 0.6)
    assert results_report.verdict(STUDIES, versions).startswith("**The claim is shown, but not if one corrects")
    assert "(Bonferroni" not in results_report.verdict(STUDIES, [])
    images = with_further(all_finished(HALF, 0.8, 0.6), 0.6)  # where further images decide, too
    ours = [run for run in with_further(images, 0.63) if run["variant"] == "stage 2 + KL"]
    rivals = [run for run in images if run["variant"] in HALF.rivals]
    assert results_report.wins([*ours, *rivals], HALF) and not results_report.wins([*ours, *rivals], HALF, 0.998)


def test_what_was_shown_once_does_not_count_if_it_is_not_shown_again():
    """The same arms with the same settings; until the repetition has its verdict, the first one counts."""
    tuned = [run for arm in AGAIN.arms for run in tuning(arm, FAINT_CROWDS)]
    longer = [job for arm in AGAIN.arms if arm.is_rival for job in arms.grid(FAINT_CROWDS, arm)]
    tuned += [record(replace(job, equal_seconds=True), 0.5) for job in longer]

    def runs_of(study, f1: float) -> list[dict]:
        found = []
        for arm in AGAIN.arms:
            jobs = arms.tests(tuned, study, arm, equal_seconds=False)
            jobs += [replace(job, equal_seconds=True) for job in jobs if arm.is_rival]
            found += with_further([record(job, 0.5) for job in jobs], 0.6 if arm.is_rival else f1)
        return found

    first = runs_of(FAINT_CROWDS, 0.8)
    place = "Dense, faint crowds: GRPO by object"
    assert f"does in 1 ({place})" in results_report.verdict(STUDIES, first)
    again = results_report.verdict(STUDIES, [*first, *runs_of(AGAIN, 0.8)])
    assert f"does in 1 ({place}; Dense, faint crowds once more: GRPO by object)" in again and "2 show it" in again
    refuted = results_report.verdict(STUDIES, [*first, *runs_of(AGAIN, 0.6)])
    assert "does in 0" in refuted and "0 show it, 2 do not" in refuted and "(Bonferroni" not in refuted
    assert "Shown once, but not when it was repeated, so not counted: Dense, faint crowds.\n" in refuted
    assert "Shown once" not in again
    other = results_report.verdict(STUDIES, [*first, *runs_of(AGAIN, 0.6), *all_finished(NEW_CLASS, 0.8, 0.6)])
    assert "these still show it: New class.\n" in other


CAST = "partial_cast", "stage 2 + KL, end unlearnt"
LONG_CAST = "partial_cast_long", "stage 2 + KL, end unlearnt"
THEIRS = "start model's answers + KL, end unlearnt"


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (CAST, ("partial_cast", THEIRS), "+0.008 [-0.002, +0.017]"),
        (LONG_CAST, ("partial_cast_long", THEIRS), "0.011 better [+0.003, +0.019]"),
        (LONG_CAST, ("partial_cast_long", f"{THEIRS}, equal seconds"), "(218 steps) 0.022 [+0.011, +0.034]"),
        (
            LONG_CAST,
            ("partial_cast_long, answers at the policy's price", f"{THEIRS}, equal seconds"),
            "(0.007 [+0.0002, +0.0141])",
        ),
        (("faint", "GRPO by object"), ("faint", "SFT, equal seconds"), "on faint crowds +0.009 at equal seconds, and"),
        (("faint_again", "GRPO by object"), ("faint_again", "SFT, equal seconds"), "+0.014 once more, where"),
    ],
)
def test_the_figures_of_the_caveat_are_those_of_the_records(ours, theirs, words):
    records = json.loads((ROOT / "docs" / "results.json").read_text())
    runs = [
        [run for run in records if (run["task"], run["variant"]) == side and run["seed"] != TUNING_SEED]
        for side in (ours, theirs)
    ]
    found = further.difference(*runs)
    told = [word.strip("+()[],") for word in words.split() if "." in word]
    assert [f"{value:.{len(word.partition('.')[2])}f}" for value, word in zip(found, told, strict=False)] == told
    assert words in " ".join(results_report.text_of([], [], {}).split())


def with_further(runs: list[dict], f1: float) -> list[dict]:
    """The same runs with scores on further images: 100 objects in each part, F1 0.01 apart between seeds."""
    found = []
    for run in runs:
        right = 100 * (f1 + 0.01 * (run["seed"] - 3))
        found.append(run | {"further": {"images": 320, "counts": [[right, 100, 100]] * further.PARTS}})
    return found


def test_where_there_are_further_test_images_the_verdict_goes_by_them():
    """A difference on the test images alone says nothing, and one on the further images alone all."""
    runs = [bare(run) for run in all_finished(HALF, 0.8, 0.6)]
    ours = [run for run in runs if run["variant"] == "stage 2 + KL"]
    rivals = [run for run in runs if run["variant"] in HALF.rivals]
    assert not results_report.is_scored(runs, HALF, "stage 2 + KL") and not results_report.wins(runs, HALF)
    level = with_further(rivals, 0.6)
    assert not results_report.wins([*with_further(ours, 0.6), *level], HALF)
    for gain, wins in ((0.2, ["stage 2 + KL"]), (0.001, [])):
        reversed_ = all_finished(HALF, 0.6, 0.8)  # on the test images
        done = [*(r for r in with_further(reversed_, 0.6) if r["variant"] in HALF.rivals)]
        done += with_further([r for r in reversed_ if r["variant"] == "stage 2 + KL"], 0.6 + gain)
        assert results_report.wins(done, HALF) == wins
        for run in done:  # each run has to be scored
            assert not results_report.wins([*(other for other in done if other is not run), bare(run)], HALF)
    shown = results_report.text_of(STUDIES, [*with_further(ours, 0.8), *level], {})
    assert "| F1 on 320 further images | seeds | F1 | difference of stage 2 + KL |" in shown
    assert "| SFT | 5 | 0.600 ± 0.016 | +0.200 [" in shown and "| stage 2 + KL | 5 | 0.800 ± 0.016 |  |" in shown


def test_kept_models_are_scored_on_further_images_once_and_those_without_a_model_are_not(tmp_path, monkeypatch):
    """The start model's, each with the prompts of its arm; and a run that is made anew scores itself."""
    own_files(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    study = replace(HALF, prepare=lambda: None, root=tmp_path, further=lambda: tmp_path / "images", config="c.yaml")
    (tmp_path / "start").mkdir()
    (tmp_path / "c.yaml").write_text("model: {path: start}\ntraining: {max_steps: 60}\n")
    scored = []

    def evaluate(one, model, data, output):
        scored.append((str(model.relative_to(tmp_path)) if model.is_absolute() else str(model), data))
        line = {"gt": [{"desc": "a", "bbox_2d": [0, 0, 9, 9]}], "pred": []}
        output.with_suffix(".jsonl").write_text((json.dumps(line) + "\n") * further.PARTS)

    monkeypatch.setattr(results, "evaluate", evaluate)
    prompted = next(arm for arm in study.arms if arm.scored_as)
    for run in [*tuning(prompted, study), *finished(prompted, 0.5, study=study)]:
        results.store(bare(run))
    kept = [job for job in arms.tests(results.load_records(), study, prompted, False) if job.seed in (2, 4)]
    for job in kept:
        results.merged(job, 60).mkdir(parents=True)
    for _ in range(2):
        assert results.score_kept([study, TAUGHT]) == []
    plain, with_prompts = (str(tmp_path / "images" / f"test{suffix}.jsonl") for suffix in ("", "_prompted"))
    models = [str(results.merged(job, 60).relative_to(tmp_path)) for job in kept]
    assert scored == [("start", plain), *((model, with_prompts) for model in models)]
    records = [record for record in results.load_records() if "further" in record]
    assert [(record["variant"], record["seed"]) for record in records] == [
        ("start model", 0),
        *((job.variant, job.seed) for job in kept),
    ]
    assert all(record["further"]["counts"] == [[0, 0, 1]] * further.PARTS for record in records)
    results.store(records[0] | {"material": study.material - 1})  # the start model has been made anew
    assert results.score_kept([study]) == [] and scored[3:] == [("start", plain)]


def with_steps(runs: list[dict], steps: int) -> list[dict]:
    return [record | {"steps": steps, "scores": {str(steps): record["scores"]["60"]}} for record in runs]


def test_what_had_less_than_the_equal_seconds_is_a_reservation_and_the_tables_have_the_seconds():
    """A step of stage 2 or with refreshed labels takes 2.75 s, others 1.25 s; answers made once take 56.25 s."""
    done = all_finished(NEW_CLASS, 0.8, 0.6)
    shown = results_report.text_of(STUDIES, done, {})
    short = f"{PSEUDO.name} 131 s; {SFT.name} 75 s; {OFFLINE.name} 131 s."
    assert "With a reservation" in shown and "(165 s, of stage 2 + KL)" in shown and short in shown
    assert "| SFT | 5 | 60 | 75 |" in shown and "| stage 2 + KL | 5 | 60 | 165 |" in shown
    done = with_steps([run for run in done if run["variant"].endswith(arms.EQUAL_SECONDS)], 132) + [
        run for run in done if not run["variant"].endswith(arms.EQUAL_SECONDS)
    ]
    shown = results_report.text_of(STUDIES, done, {})
    assert "With a reservation" not in shown and "| SFT, equal seconds | 5 | 132 | 165 |" in shown
    lost = all_finished(NEW_CLASS, 0.5, 0.6)
    assert "With a reservation" not in results_report.text_of(STUDIES, lost, {})  # nothing rests on it


def test_the_seconds_of_answers_are_unknown_without_a_run_of_the_arm_that_makes_them_anew():
    shown = results_report.text_of(STUDIES, finished(PSEUDO, 0.6), {})
    assert f"| {PSEUDO.name} | 5 | 60 |  | 0.600" in shown
    makers = with_rollouts(finished(OFFLINE, 0.5), 0.5)
    shown = results_report.text_of(STUDIES, finished(PSEUDO, 0.6) + makers, {})
    assert f"| {PSEUDO.name} | 5 | 60 | {75 + 0.5 * 1200 / 32:.0f} | 0.600" in shown
    free = finished(FAINT.arms[0], 0.6, study=FAINT)
    assert f"| {FAINT.arms[0].name} | 5 | 60 | 75 | 0.600" in results_report.text_of(STUDIES, free, {})


def test_arms_that_were_best_at_an_end_of_the_grid_are_named():
    def ends(arm, lr: float, kl: float | None = None) -> str:
        jobs = arms.grid(NEW_CLASS, arm)
        done = [record(job, 0.9 if (job.lr, job.kl) == (lr, kl) else 0.3) for job in jobs]
        return results_report.ends_of_grid(done, NEW_CLASS, [arm.name])

    assert ends(SFT, 2e-3) == ""
    assert ends(SFT, 1e-3).endswith("the lowest rate (0.001): *SFT*.\n")
    assert ends(SFT, 4e-3).endswith("the highest rate (0.004): *SFT*.\n")
    assert ends(STAGE2, 2e-3, 10.0).endswith("the smallest KL weight (10): *stage 2 + KL*.\n")
    assert ends(STAGE2, 2e-3, 30.0).endswith("the largest KL weight (30): *stage 2 + KL*.\n")


def test_differences_have_welchs_interval():
    done = all_finished(NEW_CLASS, 0.8, 0.6)
    ours, theirs = ([value + 0.01 * k for k in range(-2, 3)] for value in (0.8, 0.6))
    low, high = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    shown = f"{statistics.fmean(ours) - statistics.fmean(theirs):+.3f} [{low:+.3f}, {high:+.3f}]"
    assert f"| {SFT.name} | {shown} |" in results_report.text_of(STUDIES, done, {})


def test_the_plot_has_a_dot_for_each_test_run_at_its_f1():
    done = [*finished(SFT, 0.6), *tuning(SFT)]
    (svg,) = results_report.plots(STUDIES, done).values()
    dots = ElementTree.fromstring(svg).findall("{http://www.w3.org/2000/svg}circle")  # noqa: S314  (our own text)
    assert [float(dot.get("cx")) for dot in dots] == pytest.approx([400 + 480 * (0.58 + 0.01 * k) for k in range(5)])


def test_the_curve_goes_from_the_start_model_through_each_evaluation():
    """Means over seeds; the rest upwards, as SVG counts downwards."""
    done = finished(next(arm for arm in FORGETTING.arms if arm.name == "SFT"), 0.6, study=FORGETTING)
    for run in done:
        run["scores"] = {
            "60": run["scores"]["60"] | {"f1_new": 0.7 + 0.01 * run["seed"], "f1_old": 0.2},
            "30": {"f1_new": 0.5, "f1_old": 0.4},
        }
    done[0]["scores"]["0"] = done[0]["scores"]["60"] | {"f1_new": 0.1, "f1_old": 0.8}
    drawn = results_report.plots(STUDIES, done)["results_forgetting_curve.svg"]
    (line,) = ElementTree.fromstring(drawn).findall("{http://www.w3.org/2000/svg}polyline")  # noqa: S314  (our own)
    points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
    expected = [(60 + 420 * new, 40 + 420 * (1 - old)) for new, old in ((0.1, 0.8), (0.5, 0.4), (0.73, 0.2))]
    assert points == [pytest.approx(point, abs=0.06) for point in expected]
    assert "results_forgetting_curve.svg" in results_report.text_of(STUDIES, done, {})


def test_the_shipped_report_is_what_the_shipped_records_say(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(results, "REPORT", tmp_path / "results.md")
    results.write_report()
    for path in tmp_path.iterdir():
        assert path.read_text() == (ROOT / "docs" / path.name).read_text()


def test_off_policy_rollouts_are_the_teachers(tmp_path):
    """Those for training: the evaluation is the policy's."""
    for name, seed in (("policy", 1), ("teacher", 2)):
        build_start_model(tmp_path / name, new_class_data.SIDE, seed=seed)
    policy, teacher = (load_model(str(tmp_path / name), "float32", "sdpa") for name in ("policy", "teacher"))
    processor = load_processor(tmp_path / "policy")
    learner = SimpleNamespace(model=policy, engine=PlainEngine(policy))
    learner.engine.module.reference = teacher
    engine = ReferenceEngine(learner, Ranks(), processor, 4)
    make_dataset(tmp_path, num_train=1, num_val=1)
    (sample,) = load_samples([tmp_path / "val.jsonl"], "Find all.")[0]
    request = RolloutRequest("a", [], [], **vars(encode_prompt(sample, processor)))

    def answer(engine: HfEngine, micro_step_idx: int = 0) -> list[int]:
        context = RolloutContext(0, 0, micro_step_idx, None)
        return engine.generate([request], RolloutSampling(max_new_tokens=8), context)[0].response_token_ids

    own, other = (
        answer(HfEngine(SimpleNamespace(model=model, engine=PlainEngine(model)), Ranks(), processor, 4))
        for model in (policy, teacher)
    )
    assert own != other
    assert answer(engine) == other and answer(engine, EVAL_MICRO_STEP) == own and answer(engine) == other


@pytest.mark.slow
@pytest.mark.parametrize(("study", "arm"), [(REPLAY, OFFLINE), (REPLAY, REFRESHED), (TAUGHT, DISTILLED)])
def test_a_run_from_an_untrained_model_becomes_a_record(tmp_path, monkeypatch, study, arm):
    """The arms with programs of their own: images, pseudo-labels, the real learner and its scores, two steps."""
    monkeypatch.chdir(ROOT)
    material = replace(MATERIALS["new_class"], name=str(tmp_path / "tiny"), warmup_steps=1)
    monkeypatch.setattr(new_class_data, "SPLITS", {"warmup": 32, "train": 64, "tune": 8, "test": 8})
    new_class_data.prepare(material)
    assert (material.root / "pseudo/train.jsonl").exists()
    teacher = {"model.reference_path": str(material.root / "model")} if study is TAUGHT else {}
    own = {f"{RM}.max_new_tokens": 16} | teacher
    result = short_run(monkeypatch, replace(study, root=material.root, further=None), arm, own)
    assert result["step_seconds"]["rollout"] > 0


@pytest.mark.slow
def test_a_grpo_run_is_scored_after_each_part_of_its_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(forgetting_data, "SPLITS", {"train": (32, 0), "test": (4, 4)})
    (tmp_path / "data").mkdir()
    forgetting_data.make_data(tmp_path / "data", seed=1)
    build_start_model(tmp_path / "model", new_class_data.SIDE)
    study = replace(FORGETTING, root=tmp_path, num_evals=2, further=None)
    (arm,) = (arm for arm in study.arms if arm.name == "GRPO by object")
    result = short_run(monkeypatch, study, arm, {"rlhf.max_new_tokens": 16}, scored_after={"1", "2"})
    assert {"f1", "f1_old", "f1_new"} <= set(result["scores"]["1"])


@pytest.mark.slow
def test_an_arm_with_prompts_of_its_own_is_scored_with_such(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(partial_data, "SPLITS", {"warmup": 4, "train": 64, "tune": 8, "test": 8})
    for name in ("all", "data"):
        (tmp_path / name).mkdir()
    partial_data.make_data(tmp_path / "all")
    annotate = partial(partial_data.annotated, share=0.5)
    partial_data.write_annotation(tmp_path / "all", tmp_path / "data", annotate)
    build_start_model(tmp_path / "model", new_class_data.SIDE)
    (arm,) = (arm for arm in HALF.arms if arm.scored_as)
    study = replace(HALF, root=tmp_path, further=lambda: tmp_path / "data")
    result = short_run(monkeypatch, study, arm, {f"{RM}.max_new_tokens": 16})
    assert result["further"]["images"] == 8
    (scores,) = tmp_path.glob("*/further.json")
    assert json.loads(scores.read_text())["data"].endswith("test_prompted.jsonl")
    (config,) = tmp_path.glob("*/config.yaml")
    assert load_config(config).custom.val_jsonl[0].path.endswith("test_prompted.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("arm", DENSE.arms, ids=lambda arm: arm.name)
def test_a_dense_run_from_an_untrained_model_becomes_a_record(tmp_path, monkeypatch, arm):
    monkeypatch.chdir(ROOT)
    photos(tmp_path / "photos")
    monkeypatch.setattr(dense_data, "ROOT", tmp_path)
    monkeypatch.setattr(dense_data, "SPLITS", {name: (32, own[1]) for name, own in dense_data.SPLITS.items()})
    (tmp_path / "data").mkdir()
    dense_data.make_data(tmp_path / "data")
    build_start_model(tmp_path / "model", dense_data.SIDE)
    limit = "rlhf.max_new_tokens" if arm.config else f"{RM}.max_new_tokens"
    result = short_run(monkeypatch, replace(DENSE, root=tmp_path), arm, {limit: 16})
    assert (result["step_seconds"]["rollout"] > 0.05) == arm.is_on_policy  # a busy machine takes some ms for nothing
    assert {"f1", "f1_mean", "counting_error", "duplicates_per_image"} <= set(result["scores"]["2"])


def short_run(monkeypatch, study, arm, overrides, scored_after=frozenset({"2"})) -> dict:
    """Two steps of a test run."""
    job = Job(study, arm, 1, 1e-3, 10.0 if arm.has_kl else None)
    own = {"model.path": str(study.root / "model")} | overrides
    monkeypatch.setattr(Job, "overrides", property(lambda self, original=Job.overrides.fget: original(self) | own))
    result = results.run_learner(job, steps=2)
    assert result["steps"] == 2 and set(result["scores"]) == scored_after | ({"0"} if arm.scores_start else set())
    return result
