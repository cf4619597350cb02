"""Learners that are killed, stopped and resumed: two DeepSpeed ranks on CPU, against a run that was not."""

import random
import time
from pathlib import Path

import pytest

from tests.faults.learners import (
    LearnerProcess,
    assert_same_checkpoint,
    config_of,
    curves,
    dumps,
    newest_step,
)
from tools.make_demo import make_dataset

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """24 samples: with 6 a step, epochs end within the runs."""
    folder = tmp_path_factory.mktemp("resume")
    make_dataset(folder / "data", num_train=21, num_val=3)
    return folder


def finish(config: Path, *arguments: str) -> LearnerProcess:
    learner = LearnerProcess(config, *arguments)
    assert learner.end() == 0, learner.output[-6000:]
    return learner


def kill_until_finished(config: Path, run: Path, num_kills: int, dice: random.Random, longest_s: float) -> int:
    """Start and kill `num_kills` learners at random moments, the last one may finish; how many kills hit."""
    hits = 0
    for _ in range(num_kills):
        learner = LearnerProcess(config)
        if dice.random() < 0.8:  # else somewhere in its start
            learner.wait_for(learner.steps)
        time.sleep(dice.uniform(0, longest_s))
        hits += learner.process.poll() is None
        learner.kill()
        print(f"killed after steps {learner.steps()}, newest checkpoint {newest_step(run)}")
    return hits


def assert_same_runs(killed: Path, whole: Path, num_steps: int) -> None:
    ours, theirs = curves(killed), curves(whole)
    assert [step for step, _ in theirs["loss/total"]] == list(range(1, num_steps + 1))
    assert ours == theirs
    assert dumps(killed) == dumps(whole) and len(dumps(whole)) > num_steps
    assert_same_checkpoint(killed / f"checkpoint-{num_steps}", whole / f"checkpoint-{num_steps}")
    for path in sorted((whole / "eval").iterdir()):
        assert path.read_bytes() == (killed / "eval" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("deepspeed", ["zero2", "zero3"])
def test_a_killed_run_equals_one_that_was_not_LRN_5_LRN_1(folder, start_model, deepspeed):
    """LRN-5, LRN-1, CFG-1: two kills, one in the middle of everything and one at the first sign of a checkpoint being
    written; weights, optimizer, losses, data, buffer and curves are those of the run that was left alone."""
    geometry = {"max_steps": 6, "save_steps": 2, "eval_steps": 3}
    whole, killed = folder / f"whole_{deepspeed}", folder / f"killed_{deepspeed}"
    finish(config_of(folder, start_model, whole.name, deepspeed, **geometry))
    config = config_of(folder, start_model, killed.name, deepspeed, **geometry)
    for condition in (lambda: newest_step(killed) == 2, lambda: (killed / "checkpoint-4.partial").exists()):
        learner = LearnerProcess(config)
        assert learner.wait_for(condition), learner.output[-6000:]
        learner.kill()
    assert 2 <= newest_step(killed) <= 4
    last = finish(config)
    assert "going on from" in last.output
    assert_same_runs(killed, whole, 6)


@pytest.mark.slow
def test_ten_random_kills_change_nothing_LRN_5(folder, warm_model):
    """LRN-5: SIGKILL to the whole group at ten random moments, as the dice of a fixed seed say."""
    geometry = {"max_steps": 30, "save_steps": 2, "eval_steps": 5, "save_total_limit": 2}
    whole, killed = folder / "whole", folder / "ten_kills"
    finish(config_of(folder, warm_model, whole.name, **geometry))
    config = config_of(folder, warm_model, killed.name, **geometry)
    hits = kill_until_finished(config, killed, 10, random.Random(5), longest_s=8.0)
    assert hits == 10, "the run finished too early to be killed ten times"
    finish(config)
    assert_same_runs(killed, whole, 30)
    assert sorted(path.name for path in killed.glob("checkpoint-*")) == ["checkpoint-28", "checkpoint-30"]
