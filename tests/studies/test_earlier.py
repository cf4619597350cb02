"""The earlier study: its runs, how it resumes, and that its report agrees with the records."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from studies import earlier, earlier_report, runs
from studies.earlier import ABLATIONS, HARD_ONLY, LEARNING_RATES, LONGER, MAIN, SEEDS, TASKS, VARIANTS, Job
from studies.earlier_report import BOTH, EQUAL_SECONDS, PLAIN, SUPERVISED
from utils.config.load import load_config
from utils.config.schema import RM

ROOT = Path(__file__).parents[2]


def record(task: str, variant: str, seed: int, f1: float, **changes) -> dict:
    scores = dict.fromkeys(earlier_report.COLUMNS, 0.5)
    return {
        "task": task,
        "variant": variant,
        "seed": seed,
        "overrides": VARIANTS.get(variant, {}),
        "steps": 80,
        "seconds": {"train": 99.0},
        "step_seconds": {"rollout": 1.5, "sync": 0.25, "prepare": 0.25, "train": 1.0},
        "rollout_f1": 0.625,
        "scores": {"0": scores | {"f1": 0.4}, "9": scores | {"f1": 0.45}, "80": scores | {"f1": f1}},
    } | changes


def records(task: str = "demo", **f1: tuple[float, ...]) -> list[dict]:
    """Records of `supervised=(0.5, 0.6)`: a value per seed."""
    names = {"supervised": SUPERVISED, "plain": PLAIN, "both": BOTH, "longer": EQUAL_SECONDS}
    return [record(task, names[key], seed, value) for key in f1 for seed, value in enumerate(f1[key], 1)]


# ---- which runs -----------------------------------------------------------------------------------------------------


def test_every_variant_is_a_valid_config_that_differs_from_the_task_only_as_it_says(tmp_path):
    for task in TASKS:
        base = load_config(task.config).model_dump()
        for number, overrides in enumerate(VARIANTS.values()):
            cfg = load_config(runs.write_config(task, tmp_path / task.name / str(number), overrides)).model_dump()
            for path, value in (overrides | {"training.output_dir": str(tmp_path / task.name / str(number))}).items():
                *parents, last = path.split(".")
                ours, theirs = cfg, base
                for key in parents:
                    ours, theirs = ours[key], theirs[key]
                assert ours[last] == value
                theirs_before, theirs[last] = theirs[last], value
                if overrides.get(path) is not None:
                    assert theirs_before != value, "the variant would change nothing"
            assert cfg == base
            base = load_config(task.config).model_dump()


def test_tgt_10_the_plain_variant_has_the_schemas_own_target_options():
    """TGT-10."""
    from utils.config.schema import RolloutMatching

    for task in TASKS:
        cfg, schema = load_config(task.config), RolloutMatching()
        assert (cfg.rm.targets, cfg.rm.matching, cfg.rm.teacher_forced_ratio) == (schema.targets, schema.matching, 0.0)
    assert VARIANTS[PLAIN] == {}


def test_all_tasks_have_the_demos_global_batch():
    demo = load_config("configs/demo/stage2.yaml").training
    batch = demo.per_device_train_batch_size * demo.gradient_accumulation_steps * 2  # two ranks
    for task in TASKS:
        training = load_config(task.config).training
        assert training.per_device_train_batch_size * training.gradient_accumulation_steps == batch


def test_the_plan_has_each_run_once_and_the_main_comparison_on_both_tasks_first():
    jobs = earlier.all_jobs()
    both_tasks = 3 * len(MAIN | LONGER | ABLATIONS)
    assert len(set(jobs)) == len(jobs) == 2 * both_tasks + 3 * len(HARD_ONLY) + len(LEARNING_RATES)
    main = jobs[: 2 * 3 * len(MAIN)]
    assert {job.variant for job in main} == set(MAIN) and {job.seed for job in main} == set(SEEDS)
    assert {job.task for job in main} == set(TASKS)
    assert {job.variant for job in jobs[len(main) : len(main) + 6]} == {EQUAL_SECONDS}  # they need the seconds of MAIN


def test_a_finished_run_is_found_unless_its_settings_have_changed():
    done = [record("demo", PLAIN, 1, 0.5), record("demo", BOTH, 1, 0.5, overrides={})]
    assert earlier.find(done, Job(TASKS[0], PLAIN, 1)) is done[0]
    assert earlier.find(done, Job(TASKS[0], PLAIN, 2)) is None
    assert earlier.find(done, Job(TASKS[1], PLAIN, 1)) is None
    assert earlier.find(done, Job(TASKS[0], BOTH, 1)) is None  # other settings by that name


def test_what_was_not_run_is_named_with_its_seeds():
    done = [record("demo", PLAIN, seed, 0.5) for seed in (1, 3)]
    missing = earlier.missing(done)
    assert missing["demo: stage 2"] == [2] and missing["hard: stage 2"] == [1, 2, 3]
    assert sum(map(len, missing.values())) == len(earlier.all_jobs()) - 2
    text = earlier_report.text_of(records(supervised=(0.5,)), {"demo: stage 2": [2, 3]})
    assert "## Not run yet" in text and "- demo: stage 2: seeds 2, 3\n" in text


def test_run_all_makes_only_what_is_missing_goes_on_after_a_failure_and_ends_its_servers(tmp_path, monkeypatch):
    """Learner and server are fakes: the test is about the order and the skipping."""
    monkeypatch.setattr(runs, "RECORDS", tmp_path / "results.json")
    first, second = TASKS
    wanted = [(first, PLAIN, 1), (first, BOTH, 1), (second, PLAIN, 1), (second, PLAIN, 2), (second, BOTH, 3)]
    jobs = [Job(*run) for run in wanted]
    monkeypatch.setattr(earlier, "prepare", lambda task: calls.append(f"prepare {task.name}"))
    calls = []

    class FakeServer:
        def __init__(self, task):
            self.task, self.process = task, subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

        def close(self):
            self.process.kill()
            self.process.wait()
            calls.append(f"close {self.task.name}")

    def run_learner(job, steps, server):
        assert server.process.poll() is None and server.task == job.task
        calls.append((job.task.name, job.seed, steps))
        if job.seed == 2:
            raise runs.RunFailed("boom")
        return record(job.task.name, job.variant, job.seed, 0.5)

    monkeypatch.setattr(earlier, "Server", FakeServer)
    monkeypatch.setattr(earlier, "run_learner", run_learner)
    runs.store(record("demo", PLAIN, 1, 0.5))
    with pytest.raises(SystemExit, match="failed: hard: stage 2, seed 2"):
        earlier.run_all(jobs)
    steps = {task.name: load_config(task.config).training.max_steps for task in TASKS}
    assert calls == [
        "prepare demo",
        ("demo", 1, steps["demo"]),
        "close demo",
        "prepare hard",
        ("hard", 1, steps["hard"]),
        ("hard", 2, steps["hard"]),
        "close hard",  # it may be the server that failed
        "prepare hard",
        ("hard", 3, steps["hard"]),
        "close hard",
    ]
    assert all("revision" in entry for entry in runs.load_records()[1:])


def test_equal_seconds_has_as_many_steps_as_fit_and_keeps_them():
    job = Job(TASKS[0], EQUAL_SECONDS, 1)
    # a supervised step takes 1.25 s (sync and rollout do not count), one of stage 2 takes 3 s
    done = records(supervised=(0.5,), both=(0.5,))
    assert earlier.num_steps(job, done) == round(80 * 3 / 1.25)
    assert earlier.num_steps(job, [*done, record("demo", EQUAL_SECONDS, 2, 0.5, steps=123)]) == 123
    assert earlier.num_steps(Job(TASKS[0], PLAIN, 1), done) == 80


def test_a_half_supervised_run_counts_its_rollouts():
    mixed = record("demo", "mix: half supervised, + both", 1, 0.5)
    assert mixed["overrides"][f"{RM}.teacher_forced_ratio"] == 0.5
    assert earlier_report.quiet_step_seconds([mixed]) == 3.0


def test_the_quickest_seed_counts_for_each_part_of_a_step():
    quick_rollout = {"rollout": 1.0, "sync": 0.25, "prepare": 0.25, "train": 9.0}
    done = [record("demo", PLAIN, 1, 0.5), record("demo", PLAIN, 2, 0.5, step_seconds=quick_rollout)]
    assert earlier_report.quiet_step_seconds(done) == 2.5


def test_scores_are_read_from_an_evaluation_and_repeats_are_counted(tmp_path):
    kept = {"f1": 0.123456, "f1_no_label": 0.5, "recall": 0.5, "precision": 0.5, "parse_rate": 1.0, "truncated_rate": 0}
    (tmp_path / "step_000080.json").write_text(json.dumps(kept | {"mean_iou": 0.9}))
    twice = [{"desc": "red ring", "bbox_2d": [0, 0, 100, 100]}, {"desc": "Red ring ", "bbox_2d": [0, 0, 100, 80]}]
    answers = [twice, [{"desc": "red ring", "bbox_2d": [0, 0, 100, 100]}]]
    lines = [json.dumps({"gt": [], "pred": answer}) + "\n" for answer in answers]
    (tmp_path / "step_000080.jsonl").write_text("".join(lines))
    expected = kept | {"f1": 0.12346, "objects": 1.5, "duplicates": 0.5}
    assert earlier.read_scores(tmp_path / "step_000080.json") == expected


def test_curves_give_the_lowest_tenth_of_seconds_and_the_mean_f1_of_rollouts(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    parts = ("rollout", "sync", "prepare", "train")
    with SummaryWriter(str(tmp_path)) as writer:
        for step, seconds in enumerate([2.0, 9.0, 3.0, 1.0, *[4.0] * 7]):
            writer.add_scalar("rollout/f1", 0.5 + 0.01 * step, step)
            for part in parts:
                writer.add_scalar(f"seconds/{part}", seconds, step)
    assert earlier.read_curves(tmp_path) == {"step_seconds": dict.fromkeys(parts, 2.0), "rollout_f1": 0.55}


# ---- what the report says -------------------------------------------------------------------------------------------


def test_the_report_says_so_when_nothing_beats_supervised_training():
    done = records(supervised=(0.60, 0.61, 0.62), plain=(0.60, 0.61, 0.61), longer=(0.7, 0.7, 0.71))
    text = earlier_report.text_of(done, {})
    assert "**Nothing here is shown to beat plain supervised training**" in text
    assert "| supervised | 3 | 80 | 100 | 0.610 ± 0.010 |" in text
    assert "| 0.500 ± 0.000 | 0.625 ± 0.000 |" in text and "| 0.500 ± 0.000 |  |" in text  # rollouts: stage 2 only
    assert "At equal seconds better than supervised: none; worse: *stage 2*" in text
    assert "hard" not in text.split("## What was found")[1]  # nothing was run there


def test_the_report_names_what_wins_and_at_what_price():
    done = records(supervised=(0.60, 0.61, 0.62), plain=(0.70, 0.71, 0.72), longer=(0.7, 0.72, 0.71))
    text = earlier_report.text_of(done, {})
    assert (
        "**What beats plain supervised training:** at equal steps *stage 2* on demo; at equal seconds nothing." in text
    )
    assert "+0.100 [+0.077, +0.123] better" in text


def test_the_report_says_so_when_training_did_not_help_at_all():
    assert "No variant improves" in earlier_report.text_of(records(supervised=(0.3, 0.31), both=(0.35, 0.34)), {})
    assert "No variant improves" not in earlier_report.text_of(records(supervised=(0.3, 0.31), both=(0.45, 0.44)), {})


def test_one_seed_proves_nothing():
    text = earlier_report.text_of(records(supervised=(0.5,), plain=(0.9,)), {})
    assert "+0.400 (one seed)" in text and "**Too few seeds" in text


@pytest.mark.parametrize(
    ("hard", "says"),
    [
        ((0.8, 0.81, 0.8), "better than without on every task"),
        ((0.5, 0.52, 0.51), "presets (`configs/base.yaml`) switch both"),
        ((0.3, 0.31, 0.3), "no clear case"),
    ],
)
def test_the_defaults_follow_the_evidence_of_both_tasks(hard, says):
    same = {"supervised": (0.5, 0.52, 0.51), "plain": (0.5, 0.52, 0.51)}
    text = earlier_report.text_of(records(**same, both=(0.8, 0.81, 0.8)) + records("hard", **same, both=hard), {})
    assert says in text


def test_warm_up_and_learning_rates_have_tables_of_their_own():
    rates = next(iter(LEARNING_RATES))
    curve = record("hard", earlier_report.WARM_UP, 0, 0.4321)
    done = [*records(supervised=(0.5,)), *records("hard", supervised=(0.5,)), record("demo", rates, 1, 0.61), curve]
    text = earlier_report.text_of(done, {})
    assert f"| demo | {rates} | 0.610 | 0.500 |" in text
    assert "| F1 | 0.400 | 0.450 | 0.432 |" in text
    assert f"| {rates} |" not in text.split("## Learning rates")[0]


def test_the_shipped_report_is_what_the_shipped_records_say():
    written = json.loads((ROOT / "docs/results.json").read_text())
    assert (ROOT / "docs/results_earlier.md").read_text() == earlier_report.text_of(written, earlier.missing(written))
