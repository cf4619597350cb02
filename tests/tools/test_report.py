"""`tools.report`: what it says about a run, against other programs' numbers, and the page in a real browser.

The runs are written with the functions that the learner writes them with.
"""

import html
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

import markupsafe
import numpy as np
import pytest
from PIL import Image

from tests.config.test_load import edited
from tests.run.test_setup import session_of
from tools.report import _read_lines, changed_keys, main, read_run, render, score_rows, write_report
from tools.report_answers import MAX_JPEG_BYTES, choose, judge, photo, precision_recall
from tools.report_charts import MAX_POINTS, Line, draw, thin, ticks
from utils.config.load import build_config, load_config
from utils.data.samples import Sample
from utils.dist import Ranks
from utils.geometry import Object
from utils.parsing import ParsedAnswer, PredObject
from utils.run.monitor import Monitor, write_evaluation, write_run_json
from utils.run.setup import open_records
from utils.run.trackers import RunFacts
from utils.scores import (
    count_evaluation,
    count_sample,
    evaluation_scores,
    label_counts,
    object_record,
    prediction_record,
)

HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">"' {{ 7 * 7 }}"""
LABELS = ["red ring", "blue square", HOSTILE]


def box(desc: str, *coords: float) -> Object:
    return Object(desc, "bbox_2d", coords)


def parsed(objects: list[Object]) -> ParsedAnswer:
    preds = [PredObject(o, [], desc_bytes=(0, 0), byte_span=(0, 0), lead=0) for o in objects]
    return ParsedAnswer(objects=preds, closed=True, dropped={})


def record(gt: list[Object], pred: list[Object], annotated: list[str] | None = None) -> dict:
    sides = {"gt": [object_record(o, (999, 999)) for o in gt], "pred": [object_record(o, (999, 999)) for o in pred]}
    return {"id": "a", "images": []} | sides | ({} if annotated is None else {"annotated": annotated})


def sample_of(name: str, images: list[str], gt: list[Object], **more) -> Sample:
    return Sample(name, images, [(120, 160)] * len(images), 160, 120, gt, [], "f:1", **more)


def scene(rng: random.Random, num: int = 4) -> list[Object]:
    """Objects on a grid of places, so that they do not touch."""
    places = rng.sample([(x, y) for x in (20, 350, 680) for y in (20, 350, 680)], num)
    return [box(rng.choice(LABELS), x, y, x + rng.randint(150, 280), y + rng.randint(150, 280)) for x, y in places]


def answer(rng: random.Random, gt: list[Object], skill: float) -> list[Object]:
    """The ground truth with mistakes of every kind, fewer with more skill."""
    said: list[Object] = []
    for obj in gt:
        kind = "right" if rng.random() < skill else rng.choice(["missed", "twice", "label", "place", "extra"])
        x1, y1, x2, y2 = obj.coords
        moved = box(obj.desc, x1 + 80, y1 + 80, x2 + 80, y2 + 80)
        other = box(LABELS[(LABELS.index(obj.desc) + 1) % 3], *obj.coords)
        said += {
            "right": [obj], "missed": [], "twice": [obj, obj], "label": [other], "place": [moved],
            "extra": [obj, box(obj.desc, 0, 0, 12, 12)],
        }[kind]  # fmt: skip
    return said


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 steps with two evaluations on 40 images; hostile text in labels, ids and the model's path."""
    root = tmp_path_factory.mktemp("report")
    run, rng = root / "run", random.Random(0)
    cfg = load_config("configs/demo/stage2.yaml").model_dump(mode="json", by_alias=True)
    cfg["model"]["path"] = HOSTILE
    facts = {"run_id": "abc", "world_size": 2, "server_world_sizes": [1], "sync": {"mode": "full", "fallback": None}}
    write_run_json(run, cfg, **facts)
    raw = json.loads((run / "run.json").read_text())
    raw["command"] = ["train_stage2.py", "--local_rank=0", "--config", "configs/mine.yaml"]
    (run / "run.json").write_text(json.dumps(raw))
    samples = []
    for i in range(40):
        path = root / f"{i}.png"
        pixels = np.random.default_rng(i).integers(0, 256, (120, 160, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
        gt = scene(rng)
        samples.append(sample_of(f"val-{i}" if i else HOSTILE, [str(path)], gt))
    for step, skill in ((0, 0.4), (60, 0.8)):
        counts: Counter = Counter()
        records = []
        for sample in samples:
            said = parsed(answer(rng, sample.objects, skill))
            counts.update(count_evaluation(said, sample, 0.5, False))
            line = prediction_record(sample, said)
            for pred in line["pred"]:
                pred["score"] = round(rng.random(), 4)
            records.append(line)
        write_evaluation(run, step, {**evaluation_scores(counts), "labels": label_counts(counts)}, records, True)
    monitor = Monitor(RunFacts(run), 60, True)
    for step in range(1, 61):
        values = {"loss/total": 5 / step, "loss/reference_kl": 1.0, "rollout/f1": step / 100, "rollout/duplicates": 8.0}
        values |= {"loss/teacher": 0.5, "seconds/teacher": 0.3}
        monitor.scalars(step, values | {"rollout/num_images": 16.0, "train/policy_lag": 0.0, "seconds/step": 2.0})
    for step, f1 in ((0, 0.5), (60, 0.8)):
        monitor.scalars(step, {"eval/f1": f1, "eval/precision": f1, "eval/recall": f1, "eval/counting_error": 1.0})
    monitor.close()
    call = {"num_requests": 16, "outcome": "ok", "attempt": 1}
    servers = [{"url": "http://127.0.0.1:8911", "group_port": 8921}]
    line = {"step": 1, "phase": "train", "servers": servers, "sync": {"mode": "full", "fallback": None}}
    lines = [line | {"calls": [call, call | {"attempt": 2}], "weight_version": "abc:0"}]
    (run / "rollouts.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    (run / "finished.json").write_text(json.dumps({"steps": 60, "world_size": 2, "seconds": {"step": 120.0}}))
    return run


# ---------------------------------------------------------------------------------------------------------------------
# what it says


def test_scores_are_named_and_drawn_by_the_settings_that_they_were_made_with_LRN_7(run_dir, tmp_path):
    """LRN-7: a resumed run may have others by now, with no evaluation of its own yet."""
    run = shutil.copytree(run_dir, tmp_path / "run")
    for path in (run / "eval").glob("*.json"):
        settings = {"metric": "f1", "iou_threshold": 0.5}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"settings": settings}))
    before = read_run(run)
    record = json.loads((run / "run.json").read_text())
    record["config"]["training"]["metric_for_best_model"] = "recall"
    record["config"]["custom"]["extra"]["rollout_matching"]["eval"]["iou_threshold"] = 0.75
    (run / "run.json").write_text(json.dumps(record))
    after = read_run(run)
    assert before["best"]["metric"] == "f1"
    assert [after[part] for part in ("best", "errors", "precision_recall")] == [
        before[part] for part in ("best", "errors", "precision_recall")
    ]


def test_every_kind_of_error_by_hand_LRN_9():
    """LRN-9, TGT-12."""
    a, b, c = box("red", 0, 0, 100, 100), box("red", 200, 200, 300, 300), box("blue", 400, 400, 500, 500)
    near = box("red", 250, 250, 350, 350)  # IoU 2500 / 17500 with b
    wrong, extra = box("green", 400, 400, 500, 500), box("red", 800, 800, 900, 900)
    far = box("blue", 600, 600, 700, 700)
    said = [a, box("red", 0, 0, 100, 90), near, wrong, extra, extra]
    judged = judge(record([a, b, c, far], said), 0.5)
    assert [verdict for _, verdict in judged.pred] == [
        "found", "duplicate", "badly placed", "wrong label", "extra", "duplicate"
    ]  # fmt: skip
    assert [verdict for _, verdict in judged.gt] == ["found", "badly placed", "wrong label", "missed"]
    assert judged.errors == {"missed": 1, "duplicate": 2, "badly placed": 1, "wrong label": 1, "extra": 1}
    partly = judge(record([a], [a, extra, box("green", 700, 0, 800, 100)], ["green"]), 0.5)
    assert [verdict for _, verdict in partly.pred] == ["found", "not judged", "extra"]
    tight, shifted = box("red", 0, 0, 100, 60), box("red", 0, 40, 100, 100)  # both lie on a, hardly on each other
    both = judge(record([a], [tight, shifted]), 0.5)
    assert [verdict for _, verdict in both.pred] == ["found", "duplicate"]


def test_verdicts_agree_with_the_scores_LRN_7():
    """LRN-7: as many are found, and as many are unmatched, as the scores count."""
    for seed in range(60):
        rng = random.Random(seed)
        gt = scene(rng)
        said = answer(rng, gt, 0.3)
        annotated = [None, ["red ring"], []][seed % 3]
        counts = count_sample(parsed(said), gt, 0.5, False, annotated)
        judged = judge(record(gt, said, annotated), 0.5)
        verdicts = Counter(verdict for _, verdict in judged.pred)
        assert verdicts["found"] == counts["matched"] == sum(v == "found" for _, v in judged.gt)
        assert verdicts["not judged"] == counts["neutral"]
        assert verdicts["duplicate"] >= counts["duplicates"] or annotated is not None


def test_evaluations_keep_for_which_labels_annotation_is_complete_TGT_12():
    """TGT-12: without it a report would call a new class's objects wrong."""
    sample = sample_of("a", [], [], annotated=frozenset({"red", "blue"}))
    assert prediction_record(sample, parsed([]))["annotated"] == ["blue", "red"]
    assert "annotated" not in prediction_record(sample_of("a", [], []), parsed([]))


def test_precision_over_recall_is_that_of_coco_LRN_9():
    """LRN-9: precision at 101 recalls against COCOeval, one label, IoU 0.5."""
    from faster_coco_eval import COCO, COCOeval_faster

    rng = random.Random(3)
    lines = []
    for _ in range(40):
        gt = [Object("x", o.kind, o.coords) for o in scene(rng)]
        said = [
            Object("x", o.kind, o.coords) for o in answer(rng, scene(rng) if rng.random() < 0.2 else gt_labels(gt), 0.4)
        ]
        line = record(gt, said)
        for pred in line["pred"]:
            pred["score"] = rng.random()
        lines.append(line)

    def entries(side: str) -> list[dict]:
        found = [
            {"image_id": i, "category_id": 1, "score": o.get("score", 1.0), "iscrowd": 0, **as_coco(o["bbox_2d"])}
            for i, line in enumerate(lines, start=1)
            for o in line[side]
        ]
        return [{"id": n, **entry} for n, entry in enumerate(found, start=1)]

    images = [{"id": i, "width": 999, "height": 999} for i in range(1, len(lines) + 1)]
    truth = COCO({"images": images, "categories": [{"id": 1, "name": "x"}], "annotations": entries("gt")})
    evaluator = COCOeval_faster(truth, truth.loadRes(entries("pred")), "bbox")
    evaluator.run()
    expected = evaluator.eval["precision"][0, :, 0, 0, -1]
    precision, recall = precision_recall(lines, 0.5)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    at = np.searchsorted(recall, np.linspace(0, 1, 101) - 1e-12)
    ours = [envelope[i] if i < len(envelope) else 0.0 for i in at]
    assert 0.2 < expected.mean() < 0.9 and ours == pytest.approx(expected, abs=1e-9)


def gt_labels(objects: list[Object]) -> list[Object]:
    return [Object(LABELS[0], o.kind, o.coords) for o in objects]


def as_coco(coords: list[float]) -> dict:
    x1, y1, x2, y2 = coords
    return {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1)}


def test_without_confidences_there_is_no_curve_and_neutral_predictions_cost_nothing_TGT_14():
    """TGT-12, TGT-14."""
    a, far = box("red", 0, 0, 100, 100), box("red", 600, 600, 700, 700)
    assert precision_recall([record([a], [a])], 0.5) is None
    line = record([a], [far, a], ["green"])
    for pred, score in zip(line["pred"], (0.9, 0.5), strict=True):
        pred["score"] = score
    assert precision_recall([line], 0.5)[0].tolist() == [1.0]
    assert precision_recall([line | {"annotated": ["red"]}], 0.5)[0].tolist() == [0.0, 0.5]
    assert precision_recall([record([a], [])], 0.5) is None


def test_answers_of_two_files_that_count_alike_are_two_LRN_7(tmp_path):
    """LRN-7: ids are the user's; here each file numbers its lines from 1."""
    red = [box("red", 0, 0, 9, 9)]
    lines = [record(red, red) | {"images": ["a/1.png"]}, record(red, []) | {"images": ["b/1.png"]}]
    path = tmp_path / "step_000001.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(_read_lines(path).values()) == lines


def test_answers_to_several_questions_on_an_image_are_all_kept_LRN_7(tmp_path):
    """LRN-7: with one id, as some converters write them; the n-th before training belongs to the n-th after it."""
    lines = [record([box(desc, 0, 0, 9, 9)], []) for desc in ("red", "blue", "green")]
    for step in (1, 2):
        file = tmp_path / f"eval/step_{step:06d}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(line | {"step": step}) + "\n" for line in lines))
    first, last = (_read_lines(tmp_path / f"eval/step_{step:06d}.jsonl") for step in (1, 2))
    assert list(first) == list(last) and [own["gt"] for own in last.values()] == [own["gt"] for own in lines]


def test_a_half_is_a_half_to_the_curve_and_the_gallery_TGT_4():
    """TGT-4: an IoU of exactly 0.5 reaches the threshold for the matcher, whatever float64 makes of it."""
    for x, width in ((x, width) for x in range(0, 500, 37) for width in range(4, 480, 44)):
        truth, half = box("red", x, 7, x + width, 340), box("red", x, 7, x + width // 2, 340)
        line = {side: [object_record(o, (1000, 1000)) | {"score": 0.5}] for side, o in (("gt", truth), ("pred", half))}
        assert judge(line, 0.5).pred[0][1] == "found" and precision_recall([line], 0.5)[1].tolist() == [1.0]
        assert judge({"gt": line["gt"], "pred": line["pred"] * 2}, 0.5).pred[1][1] == "duplicate"
        line["pred"][0]["desc"] = "blue"
        assert judge(line, 0.5).pred[0][1] == "wrong label"


def test_evaluations_of_other_settings_are_not_compared_LRN_7(tmp_path):
    """LRN-7: after a resume with another limit, say. What earlier versions wrote says nothing, and counts together."""
    write_run_json(tmp_path, load_config("configs/demo/stage2.yaml").model_dump(mode="json", by_alias=True))
    few, all_ = {"settings": {"eval_limit": 50}}, {"settings": {"eval_limit": None}}

    def shown(*settings: dict) -> tuple[list[int], str]:
        """The first and the last step, and the note."""
        for step in range(4):
            (tmp_path / f"eval/step_{step:06d}.json").unlink(missing_ok=True)
        for step, own in enumerate(settings):
            write_evaluation(tmp_path, step, {"f1": step / 10, **own}, [], True)
        view = read_run(tmp_path)
        return view["ends"], view["notes"].get("scores", "")

    ends, note = shown(few, all_, few, all_)
    assert ends == [1, 3] and note.startswith("2 of 4 evaluations are left out: they had other settings than the last")
    assert shown(few, few) == shown({}, {}) == ([0, 1], "")
    assert shown({}, {}, all_)[0] == [2, 2]


def test_scores_of_checkpoints_come_in_order_and_say_how_much_was_scored_LRN_9(tmp_path):
    """LRN-9: `tools.evaluate --limit`."""
    write_run_json(tmp_path, load_config("configs/demo/stage2.yaml").model_dump(mode="json", by_alias=True))
    for step, limit in ((1000, None), (200, 20)):
        path = tmp_path / f"checkpoint-{step}" / "merged" / "evaluation" / "val.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"coco": {"AP": 0.5}, "limit": limit}))
    found = [(own["checkpoint"], own["data"]) for own in read_run(tmp_path)["coco"]]
    assert found == [("checkpoint-200", "val, first 20 samples"), ("checkpoint-1000", "val")]


def test_less_of_what_is_bad_is_better():
    before, after = {"f1": 0.5, "counting_error": 2.0}, {"f1": 0.7, "counting_error": 1.0}
    assert [row["is_better"] for row in score_rows([(0, before), (4, after)])] == [True, True]
    assert [row["is_better"] for row in score_rows([(0, after), (4, before)])] == [False, False]
    assert [row["is_better"] for row in score_rows([(0, before), (4, before)])] == [None, None]


def test_calls_that_were_repeated_or_failed_are_counted_and_a_full_sync_has_its_reason(run_dir, tmp_path):
    run = shutil.copytree(run_dir, tmp_path / "run")
    calls = [{"num_requests": 4, "attempt": attempt, "outcome": end} for attempt, end in ((1, "timeout"), (2, "ok"))]
    line = {"step": 1, "phase": "train", "servers": [], "sync": {"fallback": "use_dora"}, "weight_version": "abc:1"}
    line["calls"] = calls
    (run / "rollouts.jsonl").write_text(2 * (json.dumps(line) + "\n"))
    found = read_run(run)["servers"]
    counts = {"calls": 4, "requests": 16, "retries": 2, "failed": 2}
    assert found == counts | {"urls": [], "fallbacks": ["use_dora"], "version": "abc:1"}
    page = write_report(run, tmp_path / "new" / "folder" / "page.html").read_text()
    assert "2 repeated, 2 failed" in page and "full sync because use_dora" in page


@pytest.mark.parametrize("named", [["grey cat"], ["grey cat", "dog"], None])
def test_scores_of_other_new_classes_are_not_compared_LRN_9(named):
    """LRN-9: `eval.new_labels` changed between the two evaluations. Earlier versions did not write it."""
    scores = {"f1": 0.5, "f1_new": 0.1, "f1_old": 0.9}
    first = scores | ({"new_labels": named} if named else {})
    rows = score_rows([(0, first), (4, scores | {"new_labels": ["grey cat"]})])
    apart = ["F1, old classes", "F1, new classes"] if named == ["grey cat"] else []
    assert [row["title"] for row in rows] == ["F1", *apart]


def test_the_gallery_takes_the_worst_of_each_kind():
    errors = [Counter(missed=5), Counter(missed=4), Counter(missed=3), Counter(extra=1), Counter(), Counter(extra=2)]
    assert set(choose(errors, 4)) == {0, 1, 5, 4}
    assert choose(errors, 100) == [0, 1, 2, 5, 3, 4], "most errors first"
    assert choose(errors, 0) == choose([], 5) == []


def test_only_keys_that_differ_from_the_schema_are_listed_CFG_17():
    """CFG-17."""
    config = load_config("configs/demo/stage2.yaml").model_dump(mode="json", by_alias=True)
    rows = {path: (value, default) for path, value, default, _ in changed_keys(config)}
    assert rows["tuner.rank" if "tuner.rank" in rows else "tuner.type"] == ('"lora"', '"full"')
    assert rows["custom.extra.rollout_matching.losses.reference_kl"] == ("30.0", "0.0")
    assert rows["custom.extra.rollout_server.cpu_kv_cache_gib"] == ("1", "4")
    assert rows["model.path"][1] == "required"
    assert "training.seed" not in rows and "training.packing" not in rows and "rlhf" not in rows
    assert all(meaning for *_, meaning in changed_keys(config))


def test_curves_stay_inside_their_frame_and_bounded():
    points = [(float(step), float(np.sin(step))) for step in range(5000)]
    chart = draw("a", [Line("b", [*points, (6.0, float("nan"))])])
    placed = [tuple(map(float, pair.split(","))) for pair in chart.lines[0][1].split()]
    assert len(placed) <= MAX_POINTS and all(46 <= x <= 370 and 10 <= y <= 182 for x, y in placed)
    assert draw("a", [Line("b", []), Line("c", [(1.0, float("inf"))])]) is None
    assert thin([(0.0, 1.0), (1.0, 3.0)]) == [(0.0, 1.0), (1.0, 3.0)]


def test_one_point_is_drawn_in_the_middle_and_evaluations_have_marks():
    [(_, points, marks)] = draw("a", [Line("b", [(0.0, 0.0)], has_marks=True)]).lines
    assert marks == [((46 + 370) / 2, 182.0)] and points == "208.0,182.0"
    assert draw("a", [Line("b", [(0.0, 0.0)])]).lines[0][2] == []


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0), (-3, 7), (0, 1234567), (1e-9, 3e-9), (0.3, 0.30001), (5, 5)])
def test_ticks_cover_what_is_drawn(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 8 and found[0] <= low and found[-1] >= high and found == sorted(set(found))


def test_pictures_are_bounded(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (320, 320, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    width, height, uri = photo(str(tmp_path / "a.png"), 320)
    assert (width, height) == (320, 320) and len(uri) < MAX_JPEG_BYTES * 4 / 3 + 100
    with pytest.raises(OSError):
        photo(str(tmp_path / "b.png"), 320)
    with pytest.raises(OSError):
        photo("http://127.0.0.1:1/a.png", 320)


# ---------------------------------------------------------------------------------------------------------------------
# the page


def test_the_page_has_every_part_and_loads_nothing(run_dir):
    page = write_report(run_dir).read_text()
    view = read_run(run_dir)
    assert view["notes"].keys() == {"coco"}
    assert {chart.title for chart in view["curves"]} == {
        "loss", "F1", "precision and recall", "duplicates per image", "counting error per image",
        "policy lag (steps)", "seconds by part",
    }  # fmt: skip
    duplicates = next(chart for chart in view["curves"] if chart.title == "duplicates per image")
    assert duplicates.y_ticks[-1][1] == "0.6", "8 of 16 images: 0.5"
    lines = {chart.title: [name for name, *_ in chart.lines] for chart in view["curves"]}
    assert lines["loss"] == ["total", "reference_kl", "teacher"] and lines["seconds by part"] == ["step", "teacher"]
    assert len(view["gallery"]) == 24 and len(re.findall("data:image/jpeg", page)) == 24
    assert view["num_answers"] == 40 and view["errors"]["missed"] > 0
    for text in (
        "configs/mine.yaml", "http://127.0.0.1:8911", "losses.reference_kl", "torch", "32 requests in 2 calls",
    ):  # fmt: skip
        assert text in page, text
    addresses = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!data:|#)([^"' >)]+)""", page)
    assert [address for address in addresses if not address.startswith("x")] == []


def test_hostile_text_stays_text(run_dir):
    page = write_report(run_dir).read_text()
    assert HOSTILE not in page and html.escape(HOSTILE)[:30] in page.replace("&#34;", "&quot;")
    assert page.count("<script") == 1 and page.count("<img") == 0 and "49" not in re.findall(r"\"' (\d+)", page)


def test_what_is_missing_is_left_out_with_its_reason(tmp_path):
    write_run_json(tmp_path, load_config("configs/demo/stage2.yaml").model_dump(mode="json", by_alias=True))
    raw = json.loads((tmp_path / "run.json").read_text()) | {"run_id": "a", "world_size": 2, "server_world_sizes": []}
    (tmp_path / "run.json").write_text(json.dumps(raw))
    view = read_run(tmp_path)
    assert view["notes"].keys() == {
        "scores", "curves", "classes", "coco", "servers", "gallery", "precision_recall"
    }  # fmt: skip
    page = render(view)
    assert all(str(markupsafe.escape(note)) in page for note in view["notes"].values())
    assert "--resume auto" in page and "Not finished" in page


def test_the_run_is_resumed_as_it_was_launched_LOG_2_LRN_5(tmp_path, monkeypatch):
    """LOG-2, LRN-5: on the same GPUs. Earlier versions kept only what a rank was called with."""
    launched = "python -m tools.launch --include localhost:3 train_stage2.py --config 'my a.yaml'"
    monkeypatch.setenv("LEARNER_COMMAND", f"{launched} --resume runs/other/checkpoint-2")
    monkeypatch.setattr(sys, "argv", ["/here/train_stage2.py", "--local_rank=0", "--config=my a.yaml"])
    cfg = build_config(edited(training__output_dir=str(tmp_path), training__report_to="none"))
    open_records(None, session_of(cfg, Ranks())).close()
    assert read_run(tmp_path)["resume"]["launch"] == f"{launched} --resume auto"
    record = json.loads((tmp_path / "run.json").read_text())
    del record["launch"]
    (tmp_path / "run.json").write_text(json.dumps(record))
    resume = read_run(tmp_path)["resume"]
    assert resume["launch"] == "deepspeed --num_gpus 1 train_stage2.py --config 'my a.yaml' --resume auto"
    assert resume["evaluate"].endswith(" --data data/train.jsonl --config 'my a.yaml'")


def test_a_grpo_run_has_rewards_and_no_gallery(tmp_path):
    config = load_config("configs/demo/grpo.yaml").model_dump(mode="json", by_alias=True)
    write_run_json(tmp_path, config, run_id="a", world_size=2, server_world_sizes=[1])
    for step, reward in ((0, 0.25), (80, 0.5)):
        line = {"id": "a", "images": [], "text": "x", "reward": reward}
        write_evaluation(tmp_path, step, {"reward": reward, "truncated_rate": 0.0}, [line], True)
    view = read_run(tmp_path)
    assert [row["title"] for row in view["scores"]] == ["reward", "truncated answers"]
    assert view["best"] == {"step": 80, "metric": "reward", "value": 0.5}
    assert "no objects" in view["notes"]["gallery"] and "0.250 → 0.500" in render(view)
    assert view["resume"]["evaluate"] is None and "Score it" not in render(view)  # nothing else can score it
    config["rlhf"]["reward_funcs"] = ["detection_f1"]
    write_run_json(tmp_path, config, run_id="a", world_size=2, server_world_sizes=[1])
    assert "tools.evaluate" in read_run(tmp_path)["resume"]["evaluate"]


def test_damaged_evaluations_are_left_out_LRN_5(tmp_path, caplog):
    """LRN-5: as in the run itself. Files of the user beside them do not count."""
    config = load_config("configs/demo/stage2.yaml").model_dump(mode="json", by_alias=True)
    write_run_json(tmp_path, config, run_id="a", world_size=2, server_world_sizes=[1])
    line = prediction_record(sample_of("a", [], []), parsed([]))
    for step in (0, 20, 40, 60):
        write_evaluation(tmp_path, step, {"f1": step / 100}, [line], False)
    (tmp_path / "eval" / "step_000020.json").write_text("")
    (tmp_path / "eval" / "step_000060.jsonl").write_text('{"id": "a", "im')
    (tmp_path / "eval" / "step_000060_test.json").write_text("{}")
    view = read_run(tmp_path)
    assert view["ends"] == [0, 60] and view["num_answers"] == 1 and render(view)
    assert "step_000020.json cannot be read" in caplog.text
    assert "step_000060.jsonl cannot be read and is left out" in caplog.text


def test_no_run_is_one_message_with_status_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "not a run directory" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{}", "[]", '{"config": {}}'])
def test_another_programs_run_json_is_no_run(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match="not a run directory: run.json is not that of a run"):
        read_run(tmp_path)


def test_only_the_first_and_the_last_answers_are_read(run_dir, tmp_path, monkeypatch):
    """A long run has hundreds of evaluations, each with every answer."""
    run = shutil.copytree(run_dir, tmp_path / "run")
    shutil.copy(run / "eval/step_000000.jsonl", run / "eval/step_000030.jsonl")
    between = json.loads((run / "eval/step_000000.json").read_text()) | {"step": 30}
    (run / "eval/step_000030.json").write_text(json.dumps(between))
    read: list[str] = []
    monkeypatch.setattr("tools.report._read_lines", lambda path: read.append(path.name) or _read_lines(path))
    view = read_run(run)
    assert read == ["step_000000.jsonl", "step_000060.jsonl"]
    assert view["gallery"] == read_run(run_dir)["gallery"] and view["num_answers"] == 40


def test_a_page_that_cannot_be_written_is_one_message_with_status_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tools.report.read_run", lambda *given: {})
    monkeypatch.setattr("tools.report.render", lambda view: "page")
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path), "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.startswith(f"{tmp_path}: cannot be written (") and error.count("\n") == 1


# ---------------------------------------------------------------------------------------------------------------------
# in a browser


class Browser:
    """A headless Chromium over its own protocol (CDP), on one page."""

    def __init__(self, page: Path, width: int, dark: bool = False) -> None:
        self.profile = tempfile.mkdtemp()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run"]
        command = ["chromium", *flags, f"--user-data-dir={self.profile}", "about:blank"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.numbers, self.events = itertools.count(1), []
        try:
            self.open(page, width, dark)
        except BaseException:
            self.close()
            raise

    def open(self, page: Path, width: int, dark: bool) -> None:
        from websockets.sync.client import connect

        port_file = Path(self.profile) / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().strip()):
            assert time.monotonic() < deadline, "Chromium did not start"
            time.sleep(0.2)
        port = port_file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=30) as answered:
            target = next(t for t in json.load(answered) if t["type"] == "page")
        self.socket = connect(target["webSocketDebuggerUrl"], max_size=None, proxy=None, legacy=True)
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.receive()

    def receive(self) -> dict:
        message = json.loads(self.socket.recv(timeout=60))
        if "method" in message:
            self.events.append(message)
        return message

    def call(self, method: str, **params) -> dict:
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (message := self.receive()).get("id") != number:
            pass
        assert "error" not in message, message
        return message["result"]

    def run(self, code: str):
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def complaints(self) -> list[dict]:
        """Errors on the console, exceptions, and what the page's policy refused."""
        bad = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [event for event in self.events if event["method"] in bad]

    def requests(self) -> list[str]:
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_the_page_in_a_browser(run_dir, width, dark):
    """Opens without a complaint or a request, pictures load, filters work, hostile text runs nothing, a phone does not
    have to scroll sideways, and dark is dark."""
    page = write_report(run_dir)
    browser = Browser(page, width, dark)
    try:
        assert browser.run("document.querySelectorAll('section').length") == 8
        decode = "i => { const p = new Image(); p.src = i.href.baseVal; return p.decode().then(() => p.naturalWidth); }"
        widths = browser.run(f"Promise.all([...document.querySelectorAll('image')].map({decode}))")
        assert len(widths) == 24 and set(widths) == {160}
        shown = "[...document.querySelectorAll('.card')].filter(c => c.offsetHeight > 0).map(c => c.dataset.errors)"
        assert len(browser.run(shown)) == 24
        for kind in ("missed", "wrong label", "all right"):
            browser.run(f"document.querySelector('button[data-kind=\"{kind}\"]').click()")
            found = [json.loads(errors) for errors in browser.run(shown)]
            assert 0 < len(found) < 24 and all(errors.get(kind) for errors in found), kind
        browser.run("document.querySelector('button[data-kind=all]').click()")
        assert len(browser.run(shown)) == 24
        browser.run("const f = document.querySelector('input'); f.value = 'RED'; f.dispatchEvent(new Event('input'))")
        rows = "[...document.querySelectorAll('#class-table tbody tr')].filter(r => r.offsetHeight > 0).length"
        assert browser.run(rows) == 1
        assert browser.run("window.hacked") is None
        assert browser.run("document.documentElement.scrollWidth") <= width
        red, green, blue = map(int, re.findall(r"\d+", browser.run("getComputedStyle(document.body).backgroundColor")))
        assert (red + green + blue < 150) == dark
        assert browser.complaints() == []
        assert [url for url in browser.requests() if not url.startswith(("data:", page.resolve().as_uri()))] == []
        # Even where escaping failed, the page's policy would stop a script in a label.
        browser.run(
            "document.body.insertAdjacentHTML('beforeend', '<img src=\"data:,\" onerror=\"window.hacked = 1\">')"
        )
        assert browser.run("new Promise(r => setTimeout(() => r(window.hacked), 200))") is None
    finally:
        browser.close()


def test_nothing_but_a_report_is_overwritten(run_dir, tmp_path):
    """Another page is none. An empty file is what a full disk left."""
    precious, other = tmp_path / "precious.jsonl", tmp_path / "index.html"
    precious.write_text("{}\n")
    other.write_text("<!doctype html><title>mine</title>")
    for path in (precious, other, run_dir / "run.json"):
        before = path.read_bytes()
        with pytest.raises(ValueError, match="exists, and is no report; it would be overwritten"):
            write_report(run_dir, path)
        assert path.read_bytes() == before
    (tmp_path / "page.html").touch()
    page = write_report(run_dir, tmp_path / "page.html").read_text()
    assert write_report(run_dir, tmp_path / "page.html").read_text() == page


def test_the_minutes_are_those_of_all_steps_also_where_the_last_process_made_none(run_dir):
    """A run resumed after its last step only evaluates: 60 steps of 2 s came before."""
    (run_dir / "finished.json").write_text(json.dumps({"steps": 60, "world_size": 2, "seconds": {"eval": 1.0}}))
    assert "<b>2.0 min</b>" in write_report(run_dir).read_text()
    for path in run_dir.glob("events*"):
        path.unlink()
    assert "min</b>" not in write_report(run_dir).read_text()
