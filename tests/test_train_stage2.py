"""What the learner program itself does: a user's mistakes end it early with one message; answers become segments."""

import json
import re
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import train_stage2
from tests.families import build_family
from tools.make_demo import make_dataset
from utils.config.load import load_config
from utils.config.schema import RolloutMatching
from utils.data.encoding import encode_prompt, load_processor
from utils.dist import Ranks
from utils.drafts import Arrangement
from utils.families import FAMILIES
from utils.geometry import Object
from utils.learner.learner import StepResult
from utils.packing import CarryBuffer, collate_packed
from utils.rollout.backend import NoEngine, RolloutResult
from utils.run import setup
from utils.run.data_files import load_data
from utils.run.inputs import check_inputs
from utils.run.program import model_problems
from utils.run.session import Session
from utils.scores import scores
from utils.targets import TargetOptions, format_objects


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stage2")
    make_dataset(folder / "data", num_train=6, num_val=2)
    return folder


def config_of(folder: Path, model: Path, train: Path, **matching):
    matching = {
        "vllm": {"mode": "server", "server": {"base_url": "http://127.0.0.1:1", "group_port": 2}},
        "max_new_tokens": 64,
    } | matching
    config = {
        "global_max_length": 1024,
        "model": {"path": str(model), "dtype": "float32"},
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": str(train),
            "extra": {"rollout_matching": matching},
        },
        "training": {"output_dir": str(folder / "run")},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return load_config(path)


def load(cfg, is_main: bool = True):
    """Training and validation files, as this rank alone reads them."""
    ranks = Ranks()
    ranks.is_main = is_main
    Path(cfg.training.output_dir).mkdir(exist_ok=True)
    processor = load_processor(cfg.model.path)
    return load_data(cfg, ranks, check_inputs(cfg, None, (), ranks)["digests"], processor)


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "data" / "train.jsonl").open()]


def broken_file(folder: Path, name: str, change) -> Path:
    """The training file with its third line changed; `change` gets the sample and returns a dict or raw text."""
    samples = rows(folder)
    lines = [json.dumps(sample) for sample in samples]
    changed = change(samples[2])
    lines[2] = changed if isinstance(changed, str) else json.dumps(changed)
    path = folder / "data" / f"{name}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


MISTAKES = {
    "missing_image": (lambda row: row | {"images": ["train/nowhere.png"]}, "nowhere.png"),
    "outside": (lambda row: row | {"objects": [{"desc": "a", "bbox_2d": [0, 0, 500, 20]}]}, "500"),
    "malformed": (lambda row: '{"images": [', "JSON"),
    "no_objects_key": (lambda row: {key: row[key] for key in row if key != "objects"}, "objects"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_data_ends_the_run_before_training_with_file_and_line_DAT_3(folder, start_model, name, capsys):
    """DAT-3."""
    change, word = MISTAKES[name]
    path = broken_file(folder, name, change)
    with pytest.raises(SystemExit) as ended:
        load(config_of(folder, start_model, path))
    message = capsys.readouterr().err
    assert ended.value.code == 2
    assert f"{path}:3" in message and word in message, message


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_samples_can_be_skipped_DAT_3(folder, start_model, name, capsys, tmp_path):
    """DAT-3: `data.on_bad_sample: skip` goes on with the other five; rank 0 says and lists what is missing."""
    change, word = MISTAKES[name]
    cfg = config_of(folder, start_model, broken_file(folder, name, change))
    cfg = cfg.model_copy(
        update={
            "data": cfg.data.model_copy(update={"on_bad_sample": "skip"}),
            "training": cfg.training.model_copy(update={"output_dir": str(tmp_path / "run")}),
        }
    )
    datasets, _ = load(cfg)
    assert len(datasets[0]) == 5
    said = capsys.readouterr().out
    assert said.startswith("1 bad sample(s) skipped (data.on_bad_sample: skip)") and "line 3: " in said, said
    assert word in said
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "skipped.jsonl").open()]
    assert row["line"] == 3 and word in row["problems"][0]["reason"]


def test_an_empty_file_ends_the_run_DAT_3(folder, start_model, capsys):
    """DAT-3."""
    path = folder / "data" / "empty.jsonl"
    path.write_text("")
    with pytest.raises(SystemExit) as ended:
        load(config_of(folder, start_model, path))
    assert ended.value.code == 2 and str(path) in capsys.readouterr().err


def test_only_rank_0_speaks_but_all_ranks_leave(folder, start_model, capsys):
    path = folder / "data" / "nowhere.jsonl"
    with pytest.raises(SystemExit) as ended:
        load(config_of(folder, start_model, path))
    message = f"custom.train_jsonl[0]={path}: cannot be read: No such file or directory; paths are relative to "
    assert ended.value.code == 2 and capsys.readouterr().err.startswith(message)
    with pytest.raises(SystemExit) as ended:
        load(config_of(folder, start_model, path), is_main=False)
    assert ended.value.code == 2 and capsys.readouterr().err == ""


def test_a_tokenizer_without_coordinate_tokens_ends_the_run_TGT_1(folder, start_model, capsys):
    """TGT-1."""
    model = folder / "no_coords"
    shutil.copytree(start_model, model, dirs_exist_ok=True)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if "coord" not in t["content"]]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(SystemExit) as ended:
        setup.load_tokenizer(config_of(folder, model, folder / "data" / "train.jsonl"))
    message = capsys.readouterr().err
    assert ended.value.code == 2
    assert "model.path" in message and "coord" in message, message


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "qwen3_5"])
def test_a_form_in_which_the_family_does_not_ground_is_a_problem_FAM_2(folder, tmp_path, family):
    """FAM-2: Qwen3-VL's numbers from 0 to 1000 are not what Qwen2.5-VL writes; Qwen3.5 does write them."""
    model, train = build_family(family, tmp_path / family), folder / "data" / "train.jsonl"
    assert model_problems(config_of(folder, model, train)) == []
    told = model_problems(config_of(folder, model, train, answer_format="qwen3vl"))
    if family == "qwen3_5":
        assert told == []
        return
    found = FAMILIES[family]
    rule = f"answer_format.*: {found.name} was not trained to write this form; use {found.answer_format}, or "
    assert len(told) == 1 and re.search(rule, told[0]), told


def test_a_start_policy_of_another_model_ends_the_run_TGT_16(folder, start_model, capsys, tmp_path):
    """TGT-16: before any weights are read; the same model with other weights is what it takes."""
    cfg = config_of(folder, start_model, folder / "data" / "train.jsonl")

    def check(path: Path | None) -> None:
        model = cfg.model.model_copy(update={"reference_path": path and str(path)})
        setup.check_reference(cfg.model_copy(update={"model": model}))

    other = tmp_path / "other"
    shutil.copytree(start_model, other)
    (other / "model.safetensors").unlink()
    check(None)
    check(other)
    found = json.loads((other / "config.json").read_text())
    rope = found["text_config"].pop("rope_parameters")
    found["text_config"] |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}  # transformers 4.57's form
    (other / "config.json").write_text(json.dumps(found))
    check(other)
    found["text_config"]["vocab_size"] += 1
    (other / "config.json").write_text(json.dumps(found))
    for path, what in (
        (other, "differs in architecture or vocabulary"),
        (tmp_path / "no", "is no readable checkpoint"),
    ):
        with pytest.raises(SystemExit) as ended:
            check(path)
        message = capsys.readouterr().err
        assert ended.value.code == 2 and f'model.reference_path="{path}": {what}; it must be one of' in message, message


def test_set_up_looks_at_the_start_policy_TGT_16(folder, start_model, capsys):
    """TGT-16: at the call site."""
    cfg = config_of(folder, start_model, folder / "data" / "train.jsonl", teacher_forced_ratio=1)
    cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"reference_path": "nowhere"})})
    with pytest.raises(SystemExit) as ended:
        train_stage2.set_up(cfg)
    assert ended.value.code == 2 and "is no readable checkpoint" in capsys.readouterr().err


def test_the_config_says_which_score_decides_the_best_step_LRN_7(folder, start_model, monkeypatch):
    """LRN-7: at the call site."""
    seen: list[str] = []

    def open_session(*_: object, metric: str) -> None:
        seen.append(metric)
        raise NotImplementedError

    monkeypatch.setattr(train_stage2, "open_session", open_session)
    cfg = config_of(folder, start_model, folder / "data" / "train.jsonl")
    training = cfg.training.model_copy(update={"metric_for_best_model": "recall"})
    with pytest.raises(NotImplementedError):
        train_stage2.set_up(cfg.model_copy(update={"training": training}))
    assert seen == ["recall"]


@pytest.fixture
def run(folder, start_model):
    return run_of(folder, start_model)


def run_of(folder: Path, start_model: Path, **matching) -> SimpleNamespace:
    """A run without processes: what `make_segment` needs."""
    cfg = config_of(folder, start_model, folder / "data" / "train.jsonl", **matching)
    datasets, _ = load(cfg)
    processor, table = setup.load_tokenizer(cfg)
    return SimpleNamespace(cfg=cfg, samples=datasets[0], processor=processor, table=table)


def segment_of(run, sample, response, rollouts):
    prompt = encode_prompt(sample, run.processor)
    return train_stage2.make_segment(sample, prompt, response, run.table, run.cfg.rm, rollouts)


def answer_of(run, text: str) -> RolloutResult:
    return RolloutResult(run.table.encode(text), [], text, "stop", "run:0")


def test_a_failed_request_becomes_an_empty_rollout_with_every_object_missed_CON_3(run):
    """CON-3."""
    sample, rollouts = run.samples[0], train_stage2.Rollouts()
    failed = RolloutResult([], [], "", None, None, error="unreadable image")
    segment = segment_of(run, sample, failed, rollouts)
    assert rollouts.counts["failed"] == 1 and rollouts.counts["appended"] == len(sample.objects)
    assert rollouts.lengths == []  # no model wrote it
    assert len(segment.coord_index) == 4 * len(sample.objects)


def test_a_teacher_forced_sample_trains_on_the_ground_truth_and_counts_no_rollout_DAT_4(run):
    """DAT-4."""
    sample, rollouts = run.samples[0], train_stage2.Rollouts()
    segment = segment_of(run, sample, None, rollouts)
    assert rollouts.counts == Counter() and segment.policy_version is None
    supervised = set(segment.coord_index.tolist()) | set(segment.text_index.tolist())
    assert supervised == set(range(segment.answer_start, len(segment.input_ids)))  # the header too


def test_teacher_forced_share_is_fixed_by_seed_and_step_DAT_4(folder, start_model):
    """DAT-4."""
    run = run_of(folder, start_model, teacher_forced_ratio=0.25)
    eight = run.samples[:1] * 8
    drawn = np.concatenate([train_stage2.teacher_forced(run.cfg, step, 0, 0, eight) for step in range(500)])
    assert abs(drawn.mean() - 0.25) < 0.03
    again = train_stage2.teacher_forced(run.cfg, 3, 1, 0, eight)
    assert (again == train_stage2.teacher_forced(run.cfg, 3, 1, 0, eight)).all()
    assert not train_stage2.teacher_forced(run_of(folder, start_model).cfg, 0, 0, 0, eight).any()


def test_teacher_forced_samples_differ_by_seed_step_micro_step_and_rank_DAT_4(folder, start_model):
    """DAT-4: ranks and micro-steps that drew alike would teacher-force the same places of each batch."""
    run = run_of(folder, start_model, teacher_forced_ratio=0.5)
    many, other = run.samples[:1] * 64, run.cfg.training.model_copy(update={"seed": run.cfg.training.seed + 1})
    places = ((3, 1, 0), (4, 1, 0), (3, 0, 0), (3, 1, 1))
    drawn = [train_stage2.teacher_forced(run.cfg, *place, many) for place in places]
    drawn.append(train_stage2.teacher_forced(run.cfg.model_copy(update={"training": other}), 3, 1, 0, many))
    assert len({tuple(own) for own in drawn}) == len(drawn)


def test_a_micro_step_draws_what_is_teacher_forced_for_its_own_place_DAT_4(folder, start_model, monkeypatch):
    """DAT-4 at the call site: step, micro-step and rank."""
    run, asked, samples = run_of(folder, start_model), [], ["a", "b"]
    monkeypatch.setattr(train_stage2, "teacher_forced", lambda *own: asked.append(own) or np.array([True, True]))
    policy, ranks = SimpleNamespace(generate=lambda *_, **__: []), SimpleNamespace(rank=2)
    parts = {"cfg": run.cfg, "ranks": ranks, "policy": policy, "timed": lambda part: nullcontext()}
    train_stage2.Stage2.generate(SimpleNamespace(session=SimpleNamespace(**parts)), (samples, [None] * 2), 5, 1)
    assert asked == [(run.cfg, 5, 1, 2, samples)]


@pytest.mark.parametrize("is_ahead", [True, False])
def test_answers_of_older_weights_are_accepted_ahead_of_training_only_SYN_8(folder, start_model, is_ahead):
    """SYN-8 at the call site."""
    ahead = {"enabled": is_ahead, "version_window": int(is_ahead)}
    run, asked = run_of(folder, start_model, **{"async": ahead}), []
    policy = SimpleNamespace(generate=lambda *_, allow_stale: asked.append(allow_stale) or [])
    parts = {"cfg": run.cfg, "ranks": Ranks(), "policy": policy, "timed": lambda part: nullcontext()}
    train_stage2.Stage2.generate(SimpleNamespace(session=SimpleNamespace(**parts)), ([], []), 0, 0)
    assert asked == [is_ahead]


def test_answers_go_to_the_samples_that_asked_DAT_4(folder, start_model, monkeypatch):
    """DAT-4: where some samples of a micro-step are teacher-forced."""
    run = run_of(folder, start_model)
    monkeypatch.setattr(train_stage2, "teacher_forced", lambda *_: np.array([True, False, True, False]))
    policy = SimpleNamespace(generate=lambda samples, *_, **__: [answer_of(run, sample.id) for sample in samples])
    parts = {"cfg": run.cfg, "ranks": Ranks(), "policy": policy, "timed": lambda part: nullcontext()}
    stage2, samples = SimpleNamespace(session=SimpleNamespace(**parts)), run.samples[:4]
    responses = train_stage2.Stage2.generate(stage2, (samples, [None] * 4), 0, 0)
    assert {index: answer.text for index, answer in responses.results.items()} == {i: samples[i].id for i in (1, 3)}


def test_a_file_has_its_own_teacher_forced_ratio_and_annotated_labels_DAT_5(folder, start_model, tmp_path):
    """DAT-5, TGT-12: of a line that has its own labels, those in both."""
    lines = rows(folder)[:3]
    lines[1]["annotated"], lines[2]["annotated"] = ["red circle", "tree"], ["tree"]
    partial = folder / "data" / "partial.jsonl"
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cfg = config_of(folder, start_model, folder / "data" / "train.jsonl")
    clean = cfg.custom.train_jsonl[0].model_copy(update={"teacher_forced_ratio": 1.0})
    own = clean.model_copy(update={"path": str(partial), "teacher_forced_ratio": None, "annotated": [" Red Circle"]})
    cfg = cfg.model_copy(update={"custom": cfg.custom.model_copy(update={"train_jsonl": [clean, own]})})
    (whole, part), _ = load(cfg)
    assert {sample.annotated for sample in whole} == {None}
    assert [sample.annotated for sample in part] == [frozenset({"red circle"}), frozenset({"red circle"}), frozenset()]
    assert train_stage2.teacher_forced(cfg, 0, 0, 0, [*whole, *part]).tolist() == [True] * 6 + [False] * 3


@pytest.mark.parametrize("order", ["file", "sorted"])
def test_objects_come_in_the_order_of_the_config_DAT_2(folder, start_model, order):
    """DAT-2 at the call site: the file names the lower object first."""
    lines = rows(folder)[:1]
    boxes = [[0, 60, 20, 80], [0, 0, 20, 20]]
    lines[0]["objects"] = [{"desc": "red circle", "bbox_2d": box} for box in boxes]
    ordered = folder / "data" / "ordered.jsonl"
    ordered.write_text(json.dumps(lines[0]) + "\n")
    cfg = config_of(folder, start_model, ordered)
    (file,), _ = load(cfg.model_copy(update={"data": cfg.data.model_copy(update={"object_order": order})}))
    tops = [obj.coords[1] for obj in file[0].objects]
    assert (tops == sorted(tops)) == (order == "sorted")


def test_what_is_not_annotated_is_neither_trimmed_nor_counted_TGT_12(folder, start_model):
    """TGT-12 at the call site: the answer also names things that the data leave open."""
    run = run_of(folder, start_model, targets={"unmatched": "trim"})
    sample = run.samples[0]
    invented = replace(sample.objects[0], desc="grey cat", coords=(1, 1, 3, 3))
    response = answer_of(run, format_objects([*sample.objects, invented]))
    lengths, precisions = [], []
    for annotated in (None, frozenset({"red circle"})):
        rollouts = train_stage2.Rollouts()
        segment = segment_of(run, replace(sample, annotated=annotated), response, rollouts)
        lengths.append(len(segment.input_ids))
        precisions.append(scores(rollouts.counts)["precision"])
    assert lengths[0] < lengths[1] and precisions[0] < precisions[1] == 1.0


def text_of(run, segment) -> str:
    return run.processor.tokenizer.decode(segment.input_ids[segment.answer_start :])


@pytest.mark.parametrize(("duplicate_iou", "num_dropped"), [(0.5, 1), (0.95, 0)])
def test_duplicates_are_dropped_by_the_overlap_of_the_config_TGT_11(folder, start_model, duplicate_iou, num_dropped):
    """TGT-11 at the call site: the second object overlaps the first by 0.9."""
    run = run_of(folder, start_model, targets={"unmatched": "drop_duplicates", "duplicate_iou": duplicate_iou})
    first, again = (Object("red circle", "bbox_2d", (0, 0, 100, y2)) for y2 in (100, 90))
    sample = replace(run.samples[0], objects=[first])
    segment = segment_of(run, sample, answer_of(run, format_objects([first, again])), train_stage2.Rollouts())
    expected = format_objects([first, again][: 2 - num_dropped])
    assert text_of(run, segment).startswith(expected)


@pytest.mark.parametrize(("threshold", "num_matched"), [(0.5, 1), (0.7, 0)])
def test_objects_match_from_the_threshold_of_the_config_on_TGT_4(folder, start_model, threshold, num_matched):
    """TGT-4 at the call site: the two overlap by 0.62."""
    run, rollouts = run_of(folder, start_model, matching={"iou_threshold": threshold}), train_stage2.Rollouts()
    true, predicted = (Object("red circle", "bbox_2d", (0, 0, 100, y2)) for y2 in (100, 62))
    sample = replace(run.samples[0], objects=[true])
    segment_of(run, sample, answer_of(run, format_objects([predicted])), rollouts)
    assert rollouts.counts["matched"] == num_matched


@pytest.mark.parametrize(
    ("section", "key", "value", "expected"),
    [
        ("matching", "label", "ignore", {"label": "ignore"}),
        ("targets", "unmatched", "trim", {"arrangement": Arrangement(unmatched="trim")}),
        ("targets", "duplicate_iou", 0.7, {"arrangement": Arrangement(duplicate_iou=0.7)}),
        ("targets", "place", "order", {"arrangement": Arrangement(place="order")}),
        ("targets", "label_context", "truth", {"arrangement": Arrangement(label_context="truth")}),
        ("targets", "supervise_structure", True, {"supervise_structure": True}),
        ("targets", "supervise_closing", "complete", {"supervise_closing": "complete"}),
        ("losses", "desc", 0.25, {"desc_weight": 0.25}),
        ("losses", "coord", 0.25, {"coord_weight": 0.25}),
    ],
)
def test_every_option_of_the_target_is_that_of_the_config_TGT_7_TGT_9(section, key, value, expected):
    """TGT-7, TGT-9, and the keys of `RM.targets`."""
    options = train_stage2.target_options(RolloutMatching(**{section: {key: value}}))
    assert options == TargetOptions(**expected) != TargetOptions()


@pytest.mark.parametrize("place", ["end", "order"])
@pytest.mark.parametrize("label_context", ["own", "truth"])
def test_place_and_label_context_are_those_of_the_config_TGT_13_TGT_15(folder, start_model, place, label_context):
    """TGT-13, TGT-15 at the call site: the first object is missed, the second has a wrong label."""
    run = run_of(folder, start_model, targets={"place": place, "label_context": label_context})
    missed, found = (Object("red circle", "bbox_2d", (x, 0, x + 99, 99)) for x in (0, 500))
    wrong = replace(found, desc="blue square")
    sample = replace(run.samples[0], objects=[missed, found])
    segment = segment_of(run, sample, answer_of(run, format_objects([wrong])), train_stage2.Rollouts())
    expected = [wrong if label_context == "own" else found, missed]
    assert text_of(run, segment).startswith(format_objects(expected[:: -1 if place == "order" else 1]))


def test_closing_is_learnt_where_annotation_is_complete_TGT_12(folder, start_model):
    """TGT-12 at the call site: what a sample says of its annotation decides whether the answer learns to end."""
    learns_to_end = {}
    for closing in ("always", "complete"):
        teacher = {"base_url": "http://127.0.0.1:3"}
        run = run_of(folder, start_model, targets={"supervise_closing": closing}, teacher=teacher)
        for annotated in (None, frozenset({"yellow ring"})):
            sample = replace(run.samples[0], annotated=annotated)
            segment = segment_of(run, sample, answer_of(run, format_objects(sample.objects)), train_stage2.Rollouts())
            learns_to_end[closing, annotated is None] = len(segment) - 1 in segment.text_index
            forced = segment_of(run, sample, None, train_stage2.Rollouts())
            assert (len(forced) - 1 in forced.text_index) == learns_to_end[closing, annotated is None]
    assert [key for key, learns in learns_to_end.items() if not learns] == [("complete", False)]


def test_a_neutral_prediction_takes_no_object_from_the_right_one_TGT_12(folder, start_model):
    """TGT-12 at the call site: it lies on the object more exactly. Alone it is what the model calls the object."""
    run = run_of(folder, start_model, monitor_dump={"every_steps": 1})
    true = Object("red circle", "bbox_2d", (100, 100, 300, 300))
    neutral, right = replace(true, desc="blue circle"), replace(true, coords=(100, 100, 300, 340))
    for annotated, predicted, matched in (
        (frozenset({"red circle"}), [neutral, right], 1),
        (frozenset({"red circle"}), [neutral], 0),
        (None, [neutral, right], 0),
    ):
        sample, rollouts = replace(run.samples[0], objects=[true], annotated=annotated), train_stage2.Rollouts()
        segment_of(run, sample, answer_of(run, format_objects(predicted)), rollouts)
        assert rollouts.examples[0].pairs == [(matched, 0)]
        without_dumps = train_stage2.Rollouts()
        segment_of(run_of(folder, start_model), sample, answer_of(run, format_objects(predicted)), without_dumps)
        assert not without_dumps.examples


def test_structure_is_supervised_where_the_config_says_so_TGT_10(folder, start_model):
    """TGT-10 at the call site: what the model wrote around matched objects."""
    found = []
    for structure in (False, True):
        run = run_of(folder, start_model, targets={"supervise_structure": structure})
        sample = run.samples[0]
        segment = segment_of(run, sample, answer_of(run, format_objects(sample.objects)), train_stage2.Rollouts())
        learnt = segment.input_ids[segment.text_index]
        assert (segment.text_label == learnt).all()
        found.append(run.processor.tokenizer.decode(learnt))
    assert "bbox_2d" in found[1] and "bbox_2d" not in found[0]


def test_a_segment_prepared_ahead_that_no_row_holds_any_more_is_refused_LRN_5(folder, start_model):
    """LRN-5: before servers and weights; it would stop each resumed run in its first step."""
    run = run_of(folder, start_model)
    segment = segment_of(run, run.samples[0], None, train_stage2.Rollouts())
    cfg = run.cfg.model_copy(update={"global_max_length": len(segment) - 1})
    state = {"buffer": CarryBuffer(8, 8).state_dict(), "stream": {}}
    state["ahead"] = [train_stage2.MicroStep([segment], train_stage2.Rollouts()).state_dict()]
    with pytest.raises(ValueError, match=f"global_max_length is {len(segment) - 1}"):
        train_stage2.Stage2.load_state_dict(SimpleNamespace(session=SimpleNamespace(cfg=cfg)), state)


@pytest.mark.parametrize("where", ["buffer", "ahead"])
def test_a_teacher_that_is_new_in_a_resumed_run_is_refused_before_it_trains_TGT_16_LRN_5(folder, start_model, where):
    """TGT-16, LRN-5: for what waits for a row, whether packed or prepared ahead, it was never asked. One that is gone
    leaves what it said unread."""
    run = run_of(folder, start_model)
    sample, rollouts = run.samples[0], train_stage2.Rollouts()
    plain = segment_of(run, sample, answer_of(run, format_objects(sample.objects)), rollouts)
    assert (num_unlabelled := len(plain.unlabelled_index))
    rows = {"teacher_ids": np.zeros((num_unlabelled, 20), dtype=np.int64)}
    taught = replace(plain, **rows, teacher_logprobs=np.zeros((num_unlabelled, 20), dtype=np.float32))
    forced = segment_of(run, sample, None, rollouts)  # learnt whole, so there is nothing to ask
    teacher = {"base_url": "http://127.0.0.1:9", "weight": 0.5}

    def resume(segments: list, **matching) -> train_stage2.Stage2:
        buffer = CarryBuffer(1024, 8)
        buffer.extend(segments if where == "buffer" else [])
        micro_steps = [] if where == "buffer" else [train_stage2.MicroStep(segments, rollouts).state_dict()]
        session = SimpleNamespace(
            cfg=config_of(folder, start_model, folder / "data" / "train.jsonl", **matching),
            run_dir=folder,
            data=SimpleNamespace(table=run.table, stream=SimpleNamespace(load_state_dict=lambda state: None)),
            ranks=SimpleNamespace(is_main=True),
            learner=SimpleNamespace(start_head=None),
            prefetch=lambda stages: None,
            prefetcher=SimpleNamespace(restore=lambda step, prepared: restored.extend(prepared)),
            steps_done=1,
        )
        restored: list = []
        resumed = train_stage2.Stage2(session)
        resumed.load_state_dict({"buffer": buffer.state_dict(), "stream": {}, "ahead": micro_steps})
        assert len(resumed.buffer) + sum(len(own.segments) for own in restored) == len(segments)
        return resumed

    with pytest.raises(ValueError, match=r"rollout_matching.teacher: 2 sequences .* new training.output_dir"):
        resume([plain, forced, plain], teacher=teacher)
    resume([taught, forced], teacher=teacher)
    resume([plain, forced])
    gone = resume([taught, plain])
    assert gone.objective.teacher_weight == 0
    # Rows of both kinds can share a batch, whose loss does not read what the teacher said.
    batch = collate_packed([taught, plain], lambda ids, _: torch.arange(len(ids))[None], run.table.coord_ids, plain)
    assert len(batch.teacher.token_ids) == num_unlabelled < len(batch.unlabelled_pos)
    hidden, head = torch.zeros(batch.input_ids.numel(), 4), torch.nn.Linear(4, len(run.table.bytes_of))
    assert gone.objective.loss(hidden, head, batch, gone.objective.totals([batch]), 1)[0].isfinite()


def test_supervised_training_opens_no_engine_and_prepares_rows_in_a_thread_LRN_10(folder, start_model):
    """LRN-10, LRN-8: unless the transformers backend evaluates, on all ranks together."""
    data = folder / "data" / "train.jsonl"
    cfg = config_of(folder, start_model, data, teacher_forced_ratio=1)
    engine = setup.open_engine(cfg, None, "run", None, None, None, None, None)  # none of which it looks at
    assert type(engine) is NoEngine and engine.generate([], None, None) == [] and engine.ledger == {}
    evaluated = cfg.model_copy(update={"training": cfg.training.model_copy(update={"eval_steps": 1})})
    for own, in_a_thread in ((cfg, True), (evaluated, False)):
        ranks = SimpleNamespace(device=torch.device("cpu"))
        session = SimpleNamespace(cfg=own, policy=SimpleNamespace(client=None), num_steps=1, ranks=ranks)
        Session.prefetch(session, None)
        assert session.prefetcher.works_ahead == in_a_thread


def test_a_segment_longer_than_the_limit_is_refused_without_packing_too_PCK_3(run):
    """PCK-3: where no buffer looks at it."""
    segment = segment_of(run, run.samples[0], None, train_stage2.Rollouts())

    def pack(limit: int) -> list:
        training = SimpleNamespace(packing=False)
        session = SimpleNamespace(cfg=SimpleNamespace(training=training, global_max_length=limit))
        micro_step = train_stage2.MicroStep([segment], train_stage2.Rollouts())
        return train_stage2.Stage2.pack(SimpleNamespace(session=session), micro_step)

    assert pack(len(segment)) == [segment]
    with pytest.raises(ValueError, match=f"{segment.sample_id}: its segment has {len(segment)} tokens"):
        pack(len(segment) - 1)


def test_what_is_left_in_the_buffers_is_counted_at_the_end_LRN_1():
    """LRN-1: over all ranks."""
    said = {}
    session = SimpleNamespace(begin=lambda run: None, steps_done=4, num_steps=4, finish=said.update)
    session.ranks = SimpleNamespace(gather=lambda own: [own, 5])
    train_stage2.train(SimpleNamespace(session=session, buffer=["a", "b"]))
    assert said == {"segments_left": 7}


def log_step(
    run, rollouts: train_stage2.Rollouts, num_tokens: int = 100, is_sparse: bool = False, **training
) -> dict | None:
    """Log a step whose rows could hold 100 tokens; returns what is said of the quality of its responses."""
    return logged(run, rollouts, num_tokens, is_sparse, set(), **training)[1]


def logged(run, rollouts, num_tokens: int, is_sparse: bool, drop_reasons: set[str], **training) -> tuple[dict, Any]:
    """Log such a step; returns its curves and quality."""
    said = []
    session = SimpleNamespace(
        cfg=SimpleNamespace(training=run.cfg.training.model_copy(update=training)),
        ranks=SimpleNamespace(gather=lambda own: [own]),
        timer=SimpleNamespace(pop=dict),
        prefetcher=SimpleNamespace(num_remade=0),
        stop=SimpleNamespace(signal_name=None),
        log_step=lambda step, metrics, quality, **shown: said.append((metrics, quality)),
        monitor=None,
    )
    session.gather_step = partial(Session.gather_step, session)
    stage2 = SimpleNamespace(session=session, buffer=[], is_sparse=is_sparse, drop_reasons=drop_reasons)
    stage2.dump = SimpleNamespace(write=lambda *_: None)
    result = StepResult(losses={"total": 1.0}, grad_norm=1.0, learning_rates={}, num_tokens=num_tokens, room=100)
    train_stage2.log_step(stage2, 3, result, [train_stage2.MicroStep([], rollouts)], [[]])
    (found,) = said
    return found


def test_a_step_is_judged_by_its_own_responses_LOG_3(run):
    """LOG-3: answers that collapse are seen; without responses nothing is said of them."""
    rollouts = train_stage2.Rollouts()
    segment_of(run, run.samples[0], answer_of(run, "the the the"), rollouts)
    assert log_step(run, rollouts)["parse_rate"] == 0.0
    assert log_step(run, train_stage2.Rollouts()) is None


def test_a_reason_for_unreadable_objects_that_is_over_is_at_zero_LOG_3(run):
    """LOG-3: else its curve keeps the last value; nothing is said where there were no responses."""
    seen, curves = set(), []
    for texts in (["the the the"], [format_objects([])], []):
        rollouts = train_stage2.Rollouts()
        for text in texts:
            segment_of(run, run.samples[0], answer_of(run, text), rollouts)
        curves.append(logged(run, rollouts, 100, False, seen)[0])
    (reason,) = seen
    assert reason.startswith("dropped/")
    assert [own.get(f"rollout/{reason}") for own in curves] == [1, 0, None]


def test_the_length_of_a_response_counts_its_end_token_LOG_3(run):
    """LOG-3: as GRPO's does; one that was cut off has none."""
    rollouts, answer = train_stage2.Rollouts(), answer_of(run, format_objects([]))
    for response in (answer, replace(answer, stop_token_id=7)):
        segment_of(run, run.samples[0], response, rollouts)
    num = len(answer.response_token_ids)
    assert rollouts.lengths == [num, num + 1]


def test_rows_that_are_filled_too_little_are_a_warning_CFG_14(run, caplog):
    """CFG-14: with packing, and once."""
    cases = ((69, True, False, 1), (69, True, True, 0), (70, True, False, 0), (69, False, False, 0))
    for num_tokens, packing, is_sparse, num_warnings in cases:
        caplog.clear()
        settings = {"packing": packing, "packing_min_fill_ratio": 0.7, "is_sparse": is_sparse}
        log_step(run, train_stage2.Rollouts(), num_tokens, **settings)
        assert [text.partition(";")[0] for text in caplog.messages] == [
            "step 3: rows are only 0.69 full"
        ] * num_warnings


def test_a_sample_without_objects_trains_to_the_empty_list_DAT_1(run):
    """DAT-1."""
    sample, rollouts = run.samples[0], train_stage2.Rollouts()
    sample = type(sample)(**{**vars(sample), "objects": []})
    answer = answer_of(run, '{"objects": []}')
    segment = segment_of(run, sample, answer, rollouts)
    text = run.processor.tokenizer.decode(segment.input_ids[segment.answer_start :])
    assert text.startswith('{"objects": []}') and len(segment.coord_index) == 0 and len(segment.text_index) > 0


def test_a_loopback_server_reaches_the_learner_on_loopback_SYN_1():
    """SYN-1."""
    assert setup.learner_host("http://127.0.0.1:8000/prefix") == "127.0.0.1"


def evaluate(run, sample, response: RolloutResult, add_up=dict) -> dict:
    """The scores of an evaluation of one sample, as `lines` what is kept of it, and what else stands in the file."""
    found = {}
    session = SimpleNamespace(
        cfg=run.cfg,
        data=SimpleNamespace(table=run.table),
        ranks=SimpleNamespace(sum=add_up),
        score_validation=lambda step, score: [score(sample, response)],
        log_evaluation=lambda step, result, predictions, more: found.update(result, **more, lines=predictions),
    )
    train_stage2.Stage2.evaluate(SimpleNamespace(session=session), 1)
    return found


def test_evaluation_counts_answers_that_were_cut_off_LRN_7(run):
    """LRN-7: at the call site."""
    whole = answer_of(run, format_objects(run.samples[0].objects))
    for response, rate in ((whole, 0.0), (replace(whole, finish_reason="length"), 1.0)):
        assert evaluate(run, run.samples[0], response)["truncated_rate"] == rate


def test_evaluation_counts_over_all_ranks_LRN_7_LRN_9(run):
    """LRN-7, LRN-9: at the call site; scores and the table of labels alike."""
    objects = run.samples[0].objects
    found = evaluate(
        run,
        run.samples[0],
        answer_of(run, format_objects(objects)),
        lambda own: {name: 2 * number for name, number in own.items()},
    )
    assert found["num_images"] == 2
    assert sum(row["num_gt"] for row in found["labels"].values()) == 2 * len(objects)


def test_evaluation_keeps_the_text_of_each_answer_LRN_7(run):
    """LRN-7: at the call site; one that does not parse can be looked at."""
    cut = replace(answer_of(run, '{"objects": [{"desc": "red'), finish_reason="length")
    (line,) = evaluate(run, run.samples[0], cut)["lines"]
    assert (line["response"], line["finish_reason"], line["pred"]) == ('{"objects": [{"desc": "red', "length", [])


def test_evaluation_counts_failed_requests_CON_3_LRN_7(run):
    """CON-3, LRN-7: to the scores they look like empty answers."""
    failed = RolloutResult([], [], "", None, None, error="unreadable image")
    for response, number in ((answer_of(run, '{"objects": []}'), 0), (failed, 1)):
        assert evaluate(run, run.samples[0], response)["failed"] == number


def test_evaluation_holds_no_label_against_the_model_that_is_not_annotated_TGT_12(folder, start_model):
    """TGT-12, LRN-7: at the call site."""
    run = run_of(folder, start_model)
    sample = run.samples[0]
    response = answer_of(run, format_objects([*sample.objects, replace(sample.objects[0], desc="grey cat")]))
    whole, in_part = (
        evaluate(run, replace(sample, annotated=annotated), response) for annotated in (None, frozenset({"red circle"}))
    )
    assert whole["precision"] < in_part["precision"] == 1.0


@pytest.mark.parametrize(("threshold", "recall"), [(0.5, 1.0), (0.7, 0.0)])
def test_evaluation_matches_from_its_own_threshold_on_LRN_7(folder, start_model, threshold, recall):
    """LRN-7 at the call site: the two overlap by 0.62."""
    run = run_of(folder, start_model, eval={"iou_threshold": threshold})
    true, predicted = (Object("red circle", "bbox_2d", (0, 0, 100, y2)) for y2 in (100, 62))
    sample = replace(run.samples[0], objects=[true])
    assert evaluate(run, sample, answer_of(run, format_objects([predicted])))["recall"] == recall


def test_evaluation_scores_new_labels_apart_LRN_9(folder, start_model):
    """LRN-9 at the call site."""
    found = []
    for settings in ({}, {"new_labels": ["grey cat"]}):
        run = run_of(folder, start_model, eval=settings)
        cat = replace(run.samples[0].objects[0], desc="grey cat")
        sample = replace(run.samples[0], objects=[*run.samples[0].objects, cat])
        response = answer_of(run, format_objects(run.samples[0].objects))
        found.append(evaluate(run, sample, response))
    assert "f1_new" not in found[0] and (found[1]["f1_new"], found[1]["f1_old"]) == (0.0, 1.0)
    assert [own["new_labels"] for own in found] == [[], ["grey cat"]]
