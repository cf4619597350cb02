"""`tools.evaluate`: the program on a small model, its counts from its own files, COCO's scores by hand."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from transformers import AutoTokenizer

from tests.answers import make_table
from tests.config.test_checkpoint_files import NOT_WHOLE
from tools import evaluate
from tools.evaluate import COCO_NAMES, coco_scores
from tools.make_demo import make_dataset
from utils.config.load import load_config
from utils.data.samples import Sample
from utils.geometry import Object
from utils.parsing import TokenTable, parse_answer
from utils.rollout.backend import RolloutResult
from utils.scores import object_record
from utils.targets import format_objects

CAT, CAT_BELOW = Object("cat", "bbox_2d", (0, 0, 300, 300)), Object("cat", "bbox_2d", (500, 500, 900, 900))
NOTHING_THERE = Object("cat", "bbox_2d", (0, 600, 200, 900))
HALF = 51 / 101  # precision 1 at recalls 0, 0.01, ..., 0.5 of COCO's 101 recalls


def image(*objects: Object, width: int = 640, height: int = 480) -> Sample:
    return Sample("x", [], [], width, height, list(objects), [], "x.jsonl:1")


def test_labels_are_shown_as_they_are(capsys) -> None:
    """They come from data and model, and would else be read as rich's markup."""
    row = {"num_gt": 1, "num_pred": 1, "precision": 1.0, "recall": 1.0, "f1": 1.0}
    labels = ("car [/b]", "[red]bus", "a[link=x]")
    evaluate.show({"f1": 0.5, "labels": dict.fromkeys(labels, row)}, title="checkpoint [/b]")
    shown = capsys.readouterr().out
    assert all(text in shown for text in (*labels, "checkpoint [/b]", "0.5000"))


# ---- COCO ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("truth", "answers", "expected"),
    [
        ([[CAT, CAT_BELOW]], [[CAT_BELOW, CAT]], 1.0),
        ([[CAT], [CAT_BELOW]], [[CAT], [CAT_BELOW]], 1.0),
        ([[CAT, CAT_BELOW]], [[CAT]], HALF),
        ([[CAT, CAT_BELOW]], [[CAT, NOTHING_THERE]], HALF),  # equal scores rank in the order of writing
        ([[CAT, CAT_BELOW]], [[NOTHING_THERE, CAT]], HALF / 2),  # so here precision is 1/2 up to recall 1/2
        ([[CAT, Object("dog", "bbox_2d", CAT_BELOW.coords)]], [[CAT]], 0.5),  # the mean over two categories
        ([[CAT]], [[Object(" Cat ", "bbox_2d", CAT.coords)]], 1.0),
        ([[CAT]], [[Object("dog", "bbox_2d", CAT.coords), CAT]], 1.0),  # "dog" is no category here
        ([[CAT]], [[Object("cat", "poly", (0, 0, 300, 0, 300, 300, 0, 300))]], 1.0),
        ([[CAT]], [[]], 0.0),
    ],
)
def test_coco_precision_by_hand(truth: list, answers: list, expected: float) -> None:
    result = coco_scores([image(*objects) for objects in truth], answers)
    assert [result[name] for name in ("AP", "AP50", "AP75")] == pytest.approx([expected] * 3)


def test_TGT_12_coco_precision_holds_no_unannotated_label_against_the_model() -> None:
    """TGT-12: the second image says nothing about cats, so a cat there costs nothing; where cats are annotated it does.
    Of a label annotated in part, a find counts and anything else costs nothing."""
    dog = Object("dog", "bbox_2d", (0, 0, 300, 300))
    answers = [[CAT], [CAT, dog]]

    def precision(first: frozenset | None, second: frozenset | None) -> float | None:
        images = [replace(image(CAT), annotated=first), replace(image(dog), annotated=second)]
        return coco_scores(images, [answers[0][::-1], answers[1]])["AP"]

    assert precision(None, None) == pytest.approx(1.0)  # the wrong cat ranks behind the right one
    wrong_first = [replace(image(dog), annotated=labels) for labels in (frozenset({"dog"}), None)]
    for sample_, expected in zip(wrong_first, (1.0, 0.75), strict=True):
        result = coco_scores([sample_, image(CAT)], [[CAT, dog], [CAT]])
        assert result["AP"] == pytest.approx(expected)
    in_part = replace(image(CAT), annotated=frozenset())
    assert coco_scores([in_part], [[NOTHING_THERE, CAT]])["AP"] == pytest.approx(1.0)
    two = replace(image(CAT, CAT_BELOW), annotated=frozenset({"cat"}))
    recalls = coco_scores([two], [[CAT, CAT_BELOW]])  # COCO's numbers of detections, not LVIS's
    assert (recalls["AR1"], recalls["AR10"]) == pytest.approx((0.5, 1.0))


def test_TGT_12_scores_hold_no_unannotated_label_against_the_model() -> None:
    """TGT-12: the F1 beside COCO's numbers."""
    table, answer = make_table("qwen"), format_objects([CAT, replace(CAT_BELOW, desc="dog")])
    response = RolloutResult(table.encode(answer), [], answer, "stop", None)
    images = [replace(image(CAT), annotated=labels) for labels in (None, frozenset({"cat"}))]
    precisions = [evaluate.score([sample], [response], table, 0.5)[0]["precision"] for sample in images]
    assert precisions == [0.5, 1.0]


def test_TGT_14_coco_ranks_by_confidence() -> None:
    """TGT-14: written first but doubted, the wrong box ranks behind the right one; without confidences it does not."""
    images, answers = [image(CAT, CAT_BELOW)], [[NOTHING_THERE, CAT]]
    assert coco_scores(images, answers)["AP"] == pytest.approx(HALF / 2)
    assert coco_scores(images, answers, [[0.2, 0.9]])["AP"] == pytest.approx(HALF)
    table = make_table("qwen")
    ids = table.encode(format_objects(answers[0]))
    middle = next(i for i, token in enumerate(ids) if b"]}," in table.bytes_of[token])
    logprobs = [-2.0] * middle + [-0.1] * (len(ids) - middle)
    with_logprobs, without = (RolloutResult(ids, [], "", "stop", None, logprobs=own) for own in (logprobs, None))
    found, (record,) = evaluate.score(images, [with_logprobs], table, 0.5)
    assert (found["coco"]["AP"], found["coco_constant"]["AP"]) == pytest.approx((HALF, HALF / 2))
    assert [obj["score"] for obj in record["pred"]] == pytest.approx([0.1353, 0.9048], abs=1e-4)
    found, _ = evaluate.score(images, [without], table, 0.5)
    assert "coco" not in found and found["coco_constant"]["AP"] == pytest.approx(HALF / 2)


def test_an_answer_that_does_not_parse_is_on_file_as_it_was_written_LRN_7() -> None:
    """LRN-7: with special tokens, and how it ended."""
    table, texts = make_table("qwen"), ("I see a cat.<|im_start|>", "", '{"objects": []}')
    ends = ("length", None, "stop")
    responses = [RolloutResult(table.encode(t), [], t, end, None) for t, end in zip(texts, ends, strict=True)]
    found, records = evaluate.score([image(CAT)] * 3, responses, table, 0.5)
    assert found["parse_rate"] == pytest.approx(1 / 3)
    assert [(record["response"], record["finish_reason"]) for record in records] == list(zip(texts, ends, strict=True))


def test_coco_thresholds_run_from_half_to_95_percent() -> None:
    """Overlap 0.75 (slightly above, by float rounding): found at 0.50 to 0.75, six of ten thresholds."""
    truth = Object("cat", "bbox_2d", (0, 0, 400, 400))
    result = coco_scores([image(truth)], [[Object("cat", "bbox_2d", (0, 0, 400, 301))]])
    assert (result["AP"], result["AP50"], result["AP75"]) == pytest.approx((0.6, 1.0, 1.0))


def test_coco_sizes_are_pixels_of_the_image() -> None:
    """A box of 100 x 100 bins is 20 x 20 pixels (small, below 32 x 32) or 200 x 200 (large, above 96 x 96)."""
    box = Object("cat", "bbox_2d", (0, 0, 100, 100))
    small, large = (coco_scores([image(box, width=side, height=side)], [[box]]) for side in (200, 2000))
    assert (small["AP_small"], small["AP_large"]) == (1.0, None)
    assert (large["AP_small"], large["AP_large"]) == (None, 1.0)


def test_coco_finds_objects_thinner_than_a_bin_LRN_9() -> None:
    """LRN-9: a box or outline without area equals itself, as in F1, and no other."""
    flat, upright = Object("cat", "bbox_2d", (78, 250, 937, 250)), Object("cat", "poly", (40, 0, 40, 500, 40, 999))
    point = Object("cat", "bbox_2d", (999, 999, 999, 999))
    truth, side = [flat, upright, point, CAT_BELOW], {"width": 64, "height": 4000}
    assert coco_scores([image(*truth, **side)], [truth])["AP"] == pytest.approx(1.0)
    assert coco_scores([image(flat)], [[replace(flat, coords=(78, 251, 937, 251))]])["AP"] == 0.0


@pytest.mark.parametrize("declared", [(640, 480), (1000, 1000), (0, 0)])
def test_coco_sizes_are_those_of_the_first_image_DAT_2_LRN_9(declared: tuple[int, int]) -> None:
    """DAT-2, LRN-9: whatever frame the line has for its coordinates, and with several images often none."""
    box = Object("cat", "bbox_2d", (100, 100, 145, 145))  # 28.8 x 21.6 pixels of 640 x 480, 45 x 45 of 1000 x 1000
    sample = Sample("x", ["a.png", "b.png"], [(480, 640), (9, 9)], *declared, [box], [], "x.jsonl:1")
    result = coco_scores([sample], [[box]])
    assert (result["AP"], result["AP_small"], result["AP_medium"]) == (pytest.approx(1.0), pytest.approx(1.0), None)


def test_coco_without_any_object_is_undefined() -> None:
    assert coco_scores([image()], [[CAT]]) == dict.fromkeys(COCO_NAMES)


# ---- the program ---------------------------------------------------------------------------------------------------


def run_files(folder: Path, model: Path, num_images: int = 6) -> tuple[Path, Path]:
    """Write images, and a config that differs from the defaults in everything the program reads from it."""
    data = make_dataset(folder / "data", num_train=num_images, num_val=1, seed=7)[0]
    config = {
        "global_max_length": 512,
        "model": {"path": "elsewhere", "dtype": "float32", "image_max_pixels": 96 * 96, "image_min_pixels": 1024},
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": "gone.jsonl",
            "extra": {
                "rollout_matching": {"rollout_backend": "hf", "max_new_tokens": 90, "eval": {"iou_threshold": 0.3}}
            },
        },
        "training": {"output_dir": "gone"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return data, folder / "run.yaml"


def call(*args: Any) -> Callable[[], None]:
    return lambda: evaluate_main([str(arg) for arg in args])


def evaluate_main(args: list[str]) -> None:
    before, sys.argv = sys.argv, ["evaluate", *args]
    try:
        evaluate.main()
    finally:
        sys.argv = before


def overlap(a: list[int], b: list[int]) -> float:
    width = max(0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0, min(a[3], b[3]) - max(a[1], b[1]))
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    return width * height / (sum(areas) - width * height)


def most_pairs(pred: list[dict], gt: list[dict], threshold: float, with_label: bool) -> int:
    """Return the size of the largest one-to-one pairing above the threshold, by brute force (few objects only)."""
    if not pred:
        return 0
    best = most_pairs(pred[1:], gt, threshold, with_label)
    for i, true in enumerate(gt):
        same = not with_label or true["desc"] == pred[0]["desc"]
        if same and overlap(pred[0]["bbox_2d"], true["bbox_2d"]) >= threshold:
            best = max(best, 1 + most_pairs(pred[1:], gt[:i] + gt[i + 1 :], threshold, with_label))
    return best


@pytest.mark.e2e
def test_scores_are_those_of_the_answers_on_file_LRN_7(warm_model, tmp_path, capsys) -> None:
    """LRN-7: F1 at the config's threshold, with and without labels, recounted from the answers by brute force."""
    data, config = run_files(tmp_path, warm_model, num_images=32)
    output = tmp_path / "out" / "scores.json"
    call("--checkpoint", warm_model, "--data", data, "--config", config, "--backend", "hf", "--output", output)()
    result = json.loads(output.read_text())
    records = [json.loads(line) for line in output.with_suffix(".jsonl").read_text().splitlines()]
    assert [record["id"] for record in records] == [json.loads(line)["id"] for line in data.open()]
    assert set(records[0]) == {"id", "images", "width", "height", "gt", "pred", "parsed", "response", "finish_reason"}
    table = TokenTable.from_tokenizer(AutoTokenizer.from_pretrained(warm_model))
    for record in records:
        parsed = parse_answer(table.encode(record["response"]), table)
        assert [object_record(obj, (999, 999)) for obj in parsed.pred_objects] == record["pred"]
    assert sum(record["parsed"] for record in records) / 32 == result["parse_rate"]
    num_objects = sum(len(record["pred"]) + len(record["gt"]) for record in records)
    for name, with_label in (("f1", True), ("f1_no_label", False)):
        matched = sum(most_pairs(record["pred"], record["gt"], 0.3, with_label) for record in records)
        assert result[name] == pytest.approx(2 * matched / num_objects)
    assert 0 < result["f1_no_label"] < 1  # the model finds something, and not everything is right
    assert (result["num_images"], result["iou_threshold"], result["dtype"]) == (32, 0.3, "float32")
    assert set(result["coco_constant"]) == set(COCO_NAMES)
    assert "f1_no_label" in (shown := capsys.readouterr().out) and "COCO AP50" in shown


@pytest.mark.e2e
@pytest.mark.slow
def test_answers_are_the_same_by_vllm_and_transformers_ROL_1(warm_model, tmp_path) -> None:
    """ROL-1: in float32, images in the config's size. vLLM changes the process it runs in, so it gets its own.
    TGT-14: vLLM's have confidences."""
    data, config = run_files(tmp_path, warm_model)
    answers = {}
    for backend in ("hf", "vllm"):
        output = tmp_path / f"{backend}.json"
        command = [sys.executable, "-m", "tools.evaluate", "--checkpoint", str(warm_model), "--data", str(data)]
        command += ["--config", str(config), "--backend", backend, "--output", str(output), "--batch-size", "3"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        run = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr[-5000:]
        answers[backend] = [json.loads(line)["pred"] for line in output.with_suffix(".jsonl").read_text().splitlines()]
    marks = [obj.pop("score") for pred in answers["vllm"] for obj in pred]
    assert answers["hf"] == answers["vllm"] and any(answers["hf"])
    assert all(0 < mark < 1 for mark in marks) and len(set(marks)) > 1


def test_images_prompt_and_length_are_the_configs_CFG_17(start_model, tmp_path) -> None:
    """CFG-17: without a config the schema's defaults, `--checkpoint` as the model in both cases."""
    _, config = run_files(tmp_path, start_model)
    model, data, rm = evaluate.settings(load_config(config), "here")
    assert (model.path, model.dtype, model.image_max_pixels, rm.max_new_tokens) == ("here", "float32", 96 * 96, 90)
    model, data, rm = evaluate.settings(None, "here")
    assert (model.path, model.dtype, rm.max_new_tokens, rm.eval.iou_threshold) == ("here", "bfloat16", 1024, 0.5)
    assert data.prompt == "Find every object in the image."


@pytest.mark.parametrize(
    ("annotated", "of_line", "precision"),
    [(None, None, 0.5), (["Red ring"], None, 1.0), (["Red ring"], ["red ring", "tree"], 1.0)],
)
def test_what_the_config_says_of_the_file_holds_here_too_DAT_5_LRN_9(
    start_model, tmp_path, monkeypatch, annotated, of_line, precision
) -> None:
    """DAT-5, TGT-12, LRN-9: the file's `annotated`, whatever else the line says is complete, and new classes apart."""
    _, config = run_files(tmp_path, start_model)
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    objects = [{"desc": "red ring", "bbox_2d": [0, 0, 32, 32]}]
    line = {"id": "a", "images": ["a.png"], "width": 64, "height": 64, "objects": objects}
    line |= {"annotated": of_line} if of_line else {}
    (tmp_path / "val.jsonl").write_text(json.dumps(line) + "\n")
    text = yaml.safe_load(config.read_text())
    text["custom"]["val_jsonl"] = [
        {"path": str(tmp_path / "val.jsonl")} | ({"annotated": annotated} if annotated else {})
    ]
    text["custom"]["extra"]["rollout_matching"]["eval"]["new_labels"] = ["red ring"]
    config.write_text(yaml.safe_dump(text))
    answer = [Object("red ring", "bbox_2d", (0, 0, 500, 500)), Object("tree", "bbox_2d", (600, 600, 900, 900))]

    def generate(model, processor, samples, sampling, batch_size):
        assert (processor.image_processor.size["longest_edge"], sampling.max_new_tokens) == (96 * 96, 90)
        text = format_objects(answer)
        ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        yield from (RolloutResult(ids, [], text, "stop", None, 0) for _ in samples)

    monkeypatch.setattr(evaluate, "generate_with_hf", generate)
    output = tmp_path / "out.json"
    where = ["--checkpoint", start_model, "--data", tmp_path / "val.jsonl", "--config", config, "--output", output]
    call(*where, "--backend", "hf")()
    found = json.loads(output.read_text())
    assert found["precision"] == precision and found["f1_new"] == 1.0
    assert ("f1_old" in found) is not bool(annotated)  # there is no other class but in neutral predictions


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Ids of the samples that the engine was asked for; it answers nothing."""
    ids: list[str] = []

    def generate(model, processor, samples, sampling, batch_size):
        ids.extend(sample.id for sample in samples)
        yield from (RolloutResult([], [], "", "stop", None) for _ in samples)

    monkeypatch.setattr(evaluate, "generate_with_hf", generate)
    return ids


def test_limit_takes_the_first_samples(start_model, tmp_path, asked) -> None:
    data, config = run_files(tmp_path, start_model)
    output = tmp_path / "out.json"
    where = ["--checkpoint", start_model, "--data", data, "--config", config, "--output", output]
    call(*where, "--backend", "hf", "--limit", 2)()
    assert asked == [json.loads(line)["id"] for line in data.open()][:2]
    found = json.loads(output.read_text())
    assert (found["num_images"], found["limit"]) == (2, 2)


def test_data_files_are_told_apart_wherever_they_are_scored_from(start_model, tmp_path, asked, capsys, monkeypatch):
    """The same relative path names another file in another folder."""
    data, config = run_files(tmp_path, start_model)
    shutil.copytree(data.parent, tmp_path / "other" / data.parent.name)
    output = tmp_path / "out.json"
    where = ["--checkpoint", start_model, "--config", config, "--output", output, "--backend", "hf", "--data"]
    monkeypatch.chdir(data.parent.parent)
    call(*where, data.relative_to(Path.cwd()))()
    monkeypatch.chdir(tmp_path / "other")
    call(*where, data)()
    with pytest.raises(SystemExit, match="2"):
        call(*where, f"{data.parent.name}/{data.name}")()
    assert f"holds the scores of {data}, all samples; delete it" in capsys.readouterr().err


def test_scores_of_other_data_or_another_limit_are_not_overwritten(start_model, tmp_path, asked, capsys) -> None:
    """Files in different folders often share a name. The same ones, however spelt, may be scored again."""
    data, config = run_files(tmp_path, start_model)
    (tmp_path / "other").mkdir()
    shutil.copy(data, tmp_path / "other" / data.name)
    output = tmp_path / "out.json"

    def score(path: Path, *more: Any) -> None:
        where = ["--checkpoint", start_model, "--config", config, "--output", output, "--backend", "hf"]
        call(*where, "--data", path, *more)()

    score(data)
    score(data.parent / "../data" / data.name)
    before, num_asked = output.read_text(), len(asked)
    assert num_asked == 12
    for arguments, held in (((data, "--limit", 2), "all samples"), ((tmp_path / "other" / data.name,), "all samples")):
        with pytest.raises(SystemExit) as caught:
            score(*arguments)
        error = capsys.readouterr().err
        assert caught.value.code == 2 and error.count("\n") == 1
        assert error.endswith(f"{held}; delete it or name another file with --output\n"), error
    assert (output.read_text(), len(asked)) == (before, num_asked)
    for text in ('{"reward": 0.5}', '{"data": "cut'):  # a run's own evaluation, which is to be replaced; a killed one's
        output.write_text(text)
        score(data)
        assert json.loads(output.read_text())["num_images"] == 6


def test_data_are_never_overwritten(start_model, tmp_path, asked, capsys) -> None:
    """The responses go to a file of the scores' name, whose ending is that of data."""
    data, _ = run_files(tmp_path, start_model)
    (tmp_path / "link.jsonl").symlink_to(data)
    for output in (data.with_suffix(".json"), tmp_path / "link.json"):
        with pytest.raises(SystemExit) as caught:
            call("--checkpoint", start_model, "--data", data, "--output", output, "--backend", "hf")()
        assert caught.value.code == 2 and f"would overwrite --data {data}; name another" in capsys.readouterr().err
    other = tmp_path / "train.jsonl"
    other.write_text(data.read_text())
    with pytest.raises(SystemExit):
        call("--checkpoint", start_model, "--data", data, "--output", other.with_suffix(".json"), "--backend", "hf")()
    assert f"{other}: exists, and would be overwritten; name another --output" in capsys.readouterr().err
    assert not asked and {path.read_text().count("\n") for path in (data, other)} == {6}


@pytest.mark.parametrize(
    "text", ['{"images": [], "annotations": []}', '\ufeff{"images": []}', "[]", '{"images": [', '{"data": "here"}']
)
def test_a_file_that_no_evaluation_wrote_is_not_overwritten(start_model, tmp_path, asked, capsys, text) -> None:
    """A COCO file, as `val.json` beside the `val.jsonl` that was converted from it."""
    data, _ = run_files(tmp_path, start_model)
    coco, converted = tmp_path / "val.json", tmp_path / "val.jsonl"
    coco.write_text(text)
    shutil.copy(data, converted)
    with pytest.raises(SystemExit) as caught:
        call("--checkpoint", start_model, "--data", data, "--output", coco, "--backend", "hf")()
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.startswith(f"{coco}: exists, and no evaluation wrote it") and not asked
    assert error.count("\n") == 1 and (coco.read_text(), converted.read_bytes()) == (text, data.read_bytes())


def test_an_output_that_cannot_be_written_ends_before_any_answer(start_model, tmp_path, asked, capsys) -> None:
    """Hours of answers would be lost. The probe leaves nothing behind."""
    data, _ = run_files(tmp_path, start_model)
    for name in ("folder.json", "answers.jsonl"):
        (tmp_path / name).mkdir()
    cases = {data / "x.json": "cannot be written", tmp_path / "folder.json": "is a folder; name a file"}
    for output, message in (cases | {tmp_path / "answers.json": "exists"}).items():
        with pytest.raises(SystemExit) as caught:
            call("--checkpoint", start_model, "--data", data, "--output", output, "--backend", "hf")()
        error = capsys.readouterr().err
        assert caught.value.code == 2 and f"{output.stem}.json" in error and message in error, error
        assert error.count("\n") == 1 and not asked
    evaluate.make_writable(tmp_path / "new/x.json")
    assert list((tmp_path / "new").iterdir()) == []


def test_embedded_images_become_files_beside_the_answers_LRN_7(start_model, tmp_path, asked) -> None:
    """LRN-7: a line of the answers names them; hundreds of kilobytes each would be there at every evaluation."""
    data, config = run_files(tmp_path, start_model, num_images=2)
    first, second = map(json.loads, data.open())
    content = (data.parent / first["images"][0]).read_bytes()
    first["images"] = ["data:image/png;base64," + base64.b64encode(content).decode()]
    data.write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    output = tmp_path / "out.json"
    where = ["--checkpoint", start_model, "--config", config, "--backend", "hf"]
    call(*where, "--data", data, "--output", output)()
    (kept,) = (tmp_path / "out_images").iterdir()
    assert kept.read_bytes() == content
    images = [json.loads(line)["images"] for line in output.with_suffix(".jsonl").open()]
    assert images == [[str(kept)], [str(data.parent / second["images"][0])]]


def test_a_full_disk_ends_with_2_behind_the_scores(start_model, tmp_path, asked, capsys, monkeypatch) -> None:
    data, config = run_files(tmp_path, start_model)
    output = tmp_path / "out.json"

    def fill(*_: Any) -> None:
        (tmp_path / "out.jsonl").symlink_to("/dev/full")

    monkeypatch.setattr(evaluate, "show", lambda result, title: (print(title), fill()))
    with pytest.raises(SystemExit) as caught:
        call("--checkpoint", start_model, "--config", config, "--backend", "hf", "--data", data, "--output", output)()
    told = capsys.readouterr()
    assert caught.value.code == 2 and " on 6 images (hf, float32, greedy)" in told.out
    assert told.err == (f"{output}: the scores or the answers cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("--limit", "0"), "argument --limit: 0; give a whole number of at least 1"),
        (("--batch-size", "many"), "argument --batch-size: many; give a whole number of at least 1"),
        (("--output", "x.txt"), "argument --output: 'x.txt' must end in .json; the answers go beside it, into .jsonl"),
    ],
)
def test_options_that_cannot_be_name_their_rule(capsys, arguments, rule) -> None:
    with pytest.raises(SystemExit) as caught:
        call("--checkpoint", "m", "--data", "d", *arguments)()
    assert caught.value.code == 2 and rule in capsys.readouterr().err


def test_bad_lines_are_left_out_where_the_config_says_so_DAT_3(start_model, tmp_path, asked, capsys) -> None:
    """DAT-3: as in training."""
    data, config = run_files(tmp_path, start_model)
    data.write_text(data.read_text() + '{"id": "gone", "images": ["gone.png"], "objects": []}\n')
    text = yaml.safe_load(config.read_text()) | {"data": {"on_bad_sample": "skip"}}
    config.write_text(yaml.safe_dump(text))
    output = tmp_path / "out.json"
    call("--checkpoint", start_model, "--data", data, "--config", config, "--output", output, "--backend", "hf")()
    said = capsys.readouterr().out
    assert "1 bad lines left out (data.on_bad_sample: skip)" in said and "gone.png: no such image" in said
    assert len(asked) == json.loads(output.read_text())["num_images"] == 6


def test_prompts_that_cannot_be_encoded_are_named_before_any_answer_DAT_3(start_model, tmp_path, asked, capsys) -> None:
    """DAT-3: Qwen's processor takes no image of sides in a ratio above 200."""
    data, config = run_files(tmp_path, start_model)
    Image.new("RGB", (2000, 8)).save(tmp_path / "data/thin.png")
    line = {"images": ["thin.png"], "width": 2000, "height": 8, "objects": []}
    data.write_text(data.read_text() + 2 * (json.dumps(line) + "\n"))
    with pytest.raises(SystemExit) as caught:
        where = ["--checkpoint", start_model, "--data", data, "--config", config, "--output", tmp_path / "out.json"]
        call(*where, "--backend", "hf")()
    error = capsys.readouterr().err
    assert caught.value.code == 2 and not asked and error.count("\n") == 2
    assert all(f"{data}:{number}: the prompt cannot be encoded (absolute aspect" in error for number in (7, 8)), error


def test_failed_requests_are_counted_CON_3(capsys) -> None:
    """CON-3: to the scores they look like empty answers."""
    failed = RolloutResult([], [], "", None, None, error="out of memory")
    empty = RolloutResult([], [], "", "stop", None)
    found, _ = evaluate.score([image(CAT)] * 3, [failed, empty, failed], make_table("qwen"), 0.5)
    assert found["failed"] == 2
    evaluate.show(found, title="")
    assert any(line.split()[1:4:2] == ["failed", "2"] for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "model" / "merged").mkdir(parents=True), "no config.json there; use"),
        (lambda folder: (folder / "model").mkdir(), "name a directory in Hugging Face form"),
    ],
)
def test_a_directory_that_is_no_checkpoint_ends_with_2_and_one_line(tmp_path, capsys, change, message) -> None:
    change(tmp_path)
    with pytest.raises(SystemExit) as caught:
        call("--checkpoint", tmp_path / "model", "--data", "gone.jsonl")()
    error = capsys.readouterr().err
    assert caught.value.code == 2 and message in error and error.count("\n") == 1


@pytest.mark.parametrize("fault", NOT_WHOLE)
def test_a_checkpoint_that_is_not_whole_ends_with_2_before_any_answer_SRV_2(
    start_model, tmp_path, asked, capsys, fault
) -> None:
    """SRV-2."""
    data, config = run_files(tmp_path, start_model)
    spoil, message = NOT_WHOLE[fault]
    spoil(shutil.copytree(start_model, tmp_path / "model"))
    with pytest.raises(SystemExit) as caught:
        call("--checkpoint", tmp_path / "model", "--data", data, "--config", config, "--backend", "hf")()
    error = capsys.readouterr().err
    assert caught.value.code == 2 and message in error and error.count("\n") == 1 and not asked
    assert error.startswith(f"--checkpoint {tmp_path}/model: ")


@pytest.mark.parametrize(
    ("model_type", "answer_format", "message"),
    [
        ("glm4v", "coord_tokens", "a glm4v model, which is not supported; use one of"),
        ("qwen3_vl", "internvl", "answer_format=internvl: Qwen3-VL was not trained to write this form; use qwen3vl"),
    ],
)
@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_another_family_or_form_is_refused_before_anything_heavy_FAM_2(
    start_model, tmp_path, monkeypatch, capsys, model_type, answer_format, message, backend
) -> None:
    """FAM-2: as training refuses them. A table of zeros would be blamed on the model."""
    data, config = run_files(tmp_path, start_model)
    text = yaml.safe_load(config.read_text())
    text["custom"]["extra"]["rollout_matching"]["answer_format"] = answer_format
    config.write_text(yaml.safe_dump(text))
    shutil.copytree(start_model, tmp_path / "model")
    settings = json.loads((tmp_path / "model/config.json").read_text()) | {"model_type": model_type}
    (tmp_path / "model/config.json").write_text(json.dumps(settings))
    for name in ("generate_with_hf", "generate_with_vllm"):
        monkeypatch.setattr(evaluate, name, lambda *args: pytest.fail("started"))
    with pytest.raises(SystemExit) as caught:
        call("--checkpoint", tmp_path / "model", "--data", data, "--config", config, "--backend", backend)()
    error = capsys.readouterr().err
    assert caught.value.code == 2 and message in error and error.count("\n") == 1


def test_mistakes_in_the_data_end_with_2_DAT_3(start_model, tmp_path, capsys) -> None:
    """DAT-3."""
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(SystemExit) as caught:
        call("--checkpoint", start_model, "--data", tmp_path / "bad.jsonl", "--backend", "hf")()
    assert caught.value.code == 2 and "bad.jsonl:1: not valid JSON" in capsys.readouterr().err
    (tmp_path / "bad.jsonl").write_text('{"images": [], "summary": {}}\n')  # every object would be wrong
    with pytest.raises(SystemExit):
        call("--checkpoint", start_model, "--data", tmp_path / "bad.jsonl", "--backend", "hf")()
    assert "bad.jsonl:1: objects: missing" in capsys.readouterr().err
