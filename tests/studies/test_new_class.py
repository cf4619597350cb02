"""The studies of new classes: images, pseudo-labels, what runs when, and that the report claims no more than it has."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from scipy.stats import ttest_ind
from torch import nn

import train_stage2
from studies import new_class, new_class_data, new_class_report, refreshed_labels
from studies.new_class import ARMS, LEARNING_RATES, OFFLINE, PSEUDO, REFRESHED, SEEDS, SFT, STAGE2, Job
from studies.new_class_data import MATERIALS, NEW_LABELS
from utils.config.load import load_config
from utils.data.samples import Sample
from utils.geometry import Object

ROOT = Path(__file__).parents[2]
TASK = "new_class"


def record(job: Job, f1: float, steps: int = 60) -> dict:
    scores = dict.fromkeys(new_class.SCORES, 0.5) | {"f1": f1}
    return {
        "task": job.task,
        "variant": job.variant,
        "seed": job.seed,
        "overrides": json.loads(json.dumps(job.overrides)),
        "material": MATERIALS[job.task].version,
        "steps": steps,
        "seconds": {"train": 99.0},
        "step_seconds": {"rollout": 1.5, "sync": 0.0, "prepare": 0.25, "train": 1.0},
        "scores": {str(steps): scores},
    }


def tuning(arm, best: float = 2e-3) -> list[dict]:
    return [record(job, 0.9 if job.lr == best else 0.3) for job in new_class.grid(TASK, arm)]


def finished(arm, f1: float, equal_seconds: bool = False) -> list[dict]:
    """Records of all test seeds of a tuned arm, 0.01 apart."""
    jobs = new_class.tests(tuning(arm), TASK, arm, equal_seconds)
    return [record(job, f1 + 0.01 * (job.seed - 3)) for job in jobs]


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
    merged = new_class_data.merged_objects(row, sample, answers)
    assert [(item["desc"], item["bbox_2d"]) for item in merged] == [
        ("green square", [0, 0, 50, 50]),
        ("yellow ring", [100, 500, 200, 600]),
    ]


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
    run.judge(train_stage2.Responses([sample], [], {0: SimpleNamespace(response_token_ids=[])}), 0)
    assert [obj.desc for obj in judged[0].samples[0].objects] == ["blue square", "yellow ring"]
    assert judged[0].results == {}  # so that the ground truth is the target


# ---- which runs -----------------------------------------------------------------------------------------------------


def test_every_run_is_a_valid_config_and_only_tests_see_test_images(tmp_path):
    for task, arm in ((task, arm) for task in MATERIALS for arm in ARMS):
        for seed in (new_class.TUNING_SEED, SEEDS[0]):
            job = Job(task, arm, seed, 1e-3, 10.0 if arm.has_kl else None)
            cfg = load_config(
                new_class.write_config(new_class.TASKS[task], tmp_path / f"{task}{arm.name}{seed}", job.overrides)
            )
            assert Path(cfg.custom.val_jsonl[0].path).stem == ("test" if seed else "tune")
            assert cfg.rm.teacher_forced_ratio == (0.0 if arm.is_on_policy or arm in (OFFLINE, REFRESHED) else 1.0)
            assert cfg.rm.losses.reference_kl == (10.0 if arm.has_kl else 0.0)
            (train,) = cfg.custom.train_jsonl
            assert train.annotated == (list(NEW_LABELS) if arm.only_annotated else None)
            assert cfg.rm.eval.new_labels == list(NEW_LABELS)


def test_all_arms_have_the_same_learning_rates_and_tests_wait_for_the_whole_grid():
    for arm in ARMS:
        assert {job.lr for job in new_class.grid(TASK, arm)} == set(LEARNING_RATES)
        done = tuning(arm)
        assert new_class.tuned(done[:-1], TASK, arm) is None and not new_class.tests(done[:-1], TASK, arm, False)
        assert [job.seed for job in new_class.tests(done, TASK, arm, False)] == list(SEEDS)
        assert {job.lr for job in new_class.tests(done, TASK, arm, False)} == {2e-3}
    assert new_class.TUNING_SEED not in SEEDS and len(SEEDS) >= 5


def test_records_of_other_settings_or_older_images_do_not_count():
    job = new_class.grid(TASK, SFT)[0]
    own = record(job, 0.5)
    assert new_class.find([own], job) is own
    assert new_class.find([own | {"material": 0}], job) is None
    assert new_class.find([own | {"overrides": {}}], job) is None
    assert new_class.find([own], replace(job, seed=1)) is None


def test_what_is_missing_comes_arm_by_arm_and_shrinks_to_nothing():
    done: list[dict] = []
    while (job := next(new_class.missing(done, [TASK]), None)) is not None:
        if not done:
            assert job.arm is STAGE2 and job.is_tuning
        left = new_class.num_left(done, TASK)
        done.append(record(job, 0.5))
        assert new_class.num_left(done, TASK) == left - 1
    assert new_class.num_left(done, TASK) == 0
    assert len({(r["variant"], r["seed"]) for r in done}) == len(done)
    assert {r["variant"] for r in done if r["seed"]} == set(new_class_report.ORDER)


def test_equal_seconds_charges_the_start_models_answers_once_and_never_gives_fewer_steps(monkeypatch):
    """A step of stage 2 takes 2.75 s, a supervised one 1.25 s."""
    done = [run for arm in (STAGE2, SFT, PSEUDO, REFRESHED) for run in finished(arm, 0.5)]
    assert new_class.num_steps(Job(TASK, SFT, 1, 2e-3), done) == 60
    assert new_class.num_steps(Job(TASK, SFT, 1, 2e-3, equal_seconds=True), done) == round(60 * 2.75 / 1.25)
    assert new_class.num_steps(Job(TASK, REFRESHED, 1, 2e-3, equal_seconds=True), done) == 60  # has rollouts, too
    answers = 1.5 * 1200 / 32
    expected = round((60 * 2.75 - answers) / 1.25)
    assert new_class.num_steps(Job(TASK, PSEUDO, 1, 2e-3, equal_seconds=True), done) == expected
    monkeypatch.setitem(new_class.SPLITS, "train", 10**6)
    assert new_class.num_steps(Job(TASK, PSEUDO, 1, 2e-3, equal_seconds=True), done) == 60


def test_a_failed_run_is_tried_once_and_a_limit_ends_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(new_class.study, "RECORDS", tmp_path / "results.json")
    monkeypatch.setattr(new_class_data, "prepare", lambda material: None)
    calls = []

    def run_learner(job, steps):
        calls.append(job.variant)
        if len(calls) == 1:
            raise new_class.RunFailed("boom")
        return record(job, 0.5)

    monkeypatch.setattr(new_class, "run_learner", run_learner)
    assert new_class.run_all([TASK], 3) == [f"{TASK}: {calls[0]}, seed 0"]
    assert len(calls) == len(set(calls)) == 3
    assert [r["variant"] for r in new_class.load_records()] == calls[1:]


# ---- what the report says -------------------------------------------------------------------------------------------


def all_finished(stage2: float, rival: float) -> list[dict]:
    rivals = [run for arm in new_class.RIVALS for equal in (False, True) for run in finished(arm, rival, equal)]
    return [*rivals, *finished(STAGE2, stage2), *finished(new_class.NO_KL, 0.1)]


def test_an_on_policy_arm_wins_only_above_every_rival_with_all_seeds():
    beats = new_class_report.beats_all
    done = all_finished(0.8, 0.6)
    assert beats(done, TASK, STAGE2.name) and not beats(done, TASK, new_class.NO_KL.name)
    assert not beats(all_finished(0.61, 0.6), TASK, STAGE2.name)
    for index in range(len(done) - 5):  # without any one run nothing is shown
        assert not beats(done[:index] + done[index + 1 :], TASK, STAGE2.name)
    strong = [r | {"scores": {"60": r["scores"]["60"] | {"f1": 0.9}}} for r in done if r["variant"] == PSEUDO.name]
    others = [r for r in done if r["variant"] != PSEUDO.name]
    assert not beats([*others, *strong], TASK, STAGE2.name)


def test_the_first_lines_say_what_is_shown_and_what_is_missing():
    empty = new_class_report.verdict([])
    assert empty.startswith("**The claim is not shown.**") and "So far it does in 0" in empty
    assert "Not finished, so without a verdict: New class; New class, weak" in empty
    one = all_finished(0.8, 0.6)
    both = [*one, *(run | {"task": "shifted"} for run in one)]
    assert "So far it does in 1 (New class)" in new_class_report.verdict(one)
    assert "does not in 1 (New class)" in new_class_report.verdict(all_finished(0.5, 0.6))
    assert new_class_report.verdict(both).startswith("**The claim is shown.**")


def test_differences_have_welchs_interval():
    done = all_finished(0.8, 0.6)
    ours, theirs = ([value + 0.01 * k for k in range(-2, 3)] for value in (0.8, 0.6))
    low, high = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    shown = f"{statistics.fmean(ours) - statistics.fmean(theirs):+.3f} [{low:+.3f}, {high:+.3f}]"
    assert f"| {SFT.name} | {shown} |" in new_class_report.text_of(done, {})


def test_the_plot_has_a_dot_for_each_test_run_at_its_f1():
    done = [*finished(SFT, 0.6), *tuning(SFT)]
    (svg,) = new_class_report.plots(done).values()
    dots = ElementTree.fromstring(svg).findall("{http://www.w3.org/2000/svg}circle")  # noqa: S314  (our own text)
    assert [float(dot.get("cx")) for dot in dots] == pytest.approx([230 + 480 * (0.58 + 0.01 * k) for k in range(5)])


def test_the_shipped_report_is_what_the_shipped_records_say(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(new_class, "REPORT", tmp_path / "results.md")
    new_class.write_report()
    for path in tmp_path.iterdir():
        assert path.read_text() == (ROOT / "docs" / path.name).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("arm", [OFFLINE, REFRESHED], ids=lambda arm: arm.program)
def test_a_run_from_an_untrained_model_becomes_a_record(tmp_path, monkeypatch, arm):
    """The arms with programs of their own: images, pseudo-labels, the real learner and its scores, two steps."""
    monkeypatch.chdir(ROOT)
    material = replace(MATERIALS[TASK], name=str(tmp_path / "tiny"), warmup_steps=1)
    monkeypatch.setitem(MATERIALS, TASK, material)
    monkeypatch.setattr(new_class_data, "SPLITS", {"warmup": 32, "train": 64, "tune": 8, "test": 8})
    new_class_data.prepare(material)
    assert (material.root / "pseudo/train.jsonl").exists()
    job = Job(TASK, arm, 1, 1e-3, 10.0 if arm.has_kl else None)
    paths = {"model.path": str(material.root / "model"), new_class.RM + "max_new_tokens": 16}
    monkeypatch.setattr(Job, "overrides", property(lambda self, original=Job.overrides.fget: original(self) | paths))
    result = new_class.run_learner(job, steps=2)
    assert result["steps"] == 2 and set(result["scores"]) == {"2"} and result["step_seconds"]["rollout"] > 0
