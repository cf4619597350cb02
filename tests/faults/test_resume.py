"""Learners that are killed, stopped and resumed: two DeepSpeed ranks on CPU, compared with an uninterrupted run."""

import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.processes import alive
from tests.faults.learners import (
    LearnerProcess,
    assert_same_checkpoint,
    config_of,
    curves,
    dumps,
    newest_step,
)
from tools.launch import process_tree, ranks_of
from tools.make_demo import make_dataset
from utils.run.shutdown import STOPPED_STATUS

pytestmark = pytest.mark.e2e
NUM_STEPS = 6
GEOMETRY = {"max_steps": NUM_STEPS, "save_steps": 2, "eval_steps": 1}
MAKE_TRAIN = (sys.executable, "-m", "tools.launch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """21 samples: with 6 per step, epochs end within the runs and within steps. 12 to evaluate: long enough for a kill
    between a checkpoint and the end of the evaluation behind it."""
    folder = tmp_path_factory.mktemp("resume")
    make_dataset(folder / "data", num_train=21, num_val=12)
    return folder


def finish(config: Path, *arguments: str) -> LearnerProcess:
    learner = LearnerProcess(config, *arguments)
    assert learner.end() == 0, learner.output[-6000:]
    return learner


def kill_when(config: Path, condition) -> LearnerProcess:
    learner = LearnerProcess(config)
    assert learner.wait_for(condition), learner.output[-6000:]
    learner.kill()
    return learner


def assert_same_runs(broken: Path, whole: Path, num_steps: int) -> None:
    ours, theirs = curves(broken), curves(whole)
    assert [step for step, _ in theirs["loss/total"]] == list(range(1, num_steps + 1))
    assert min(length for _, length in theirs["train/buffer_length"]) > 0, "no buffer is put to the test"
    for tag in theirs.keys() | ours.keys():
        assert ours[tag] == theirs[tag], tag
    assert dumps(broken) == dumps(whole) and len(dumps(whole)) == 3 * num_steps
    assert_same_checkpoint(broken / f"checkpoint-{num_steps}", whole / f"checkpoint-{num_steps}")
    assert {path.name for path in (broken / "eval").iterdir()} == {path.name for path in (whole / "eval").iterdir()}
    for path in (whole / "eval").iterdir():
        assert path.read_bytes() == (broken / "eval" / path.name).read_bytes(), path.name


def test_a_killed_run_and_a_stopped_one_go_on_exactly_zero2_LRN_5_LRN_1_CFG_1(folder, start_model):
    """LRN-5, LRN-1, CFG-1, LOG-3: SIGKILL to the group somewhere after the first checkpoint, then SIGTERM to what `make
    train` runs. Weights, optimizer, losses, data, buffer, random states, evaluations and curves equal those of the
    uninterrupted run, bit for bit. An evaluation that the kill or the stop preceded is made up for."""
    whole, broken = folder / "whole", folder / "broken"
    finish(config_of(folder, start_model, whole.name, **GEOMETRY))
    config = config_of(folder, start_model, broken.name, **GEOMETRY)
    killed = kill_when(config, lambda: newest_step(broken) == 2)
    assert "no checkpoint yet, starting from the beginning" in killed.output
    assert not (broken / "eval" / "step_000002.json").exists()  # it comes after the checkpoint (LRN-12)

    stopped = LearnerProcess(config, launcher=MAKE_TRAIN)
    assert stopped.wait_for(stopped.steps), stopped.output[-6000:]
    os.kill(stopped.process.pid, signal.SIGTERM)  # the launcher alone, as make does
    assert stopped.end() == STOPPED_STATUS, stopped.output[-6000:]
    step = newest_step(broken)
    words = f"stopped by SIGTERM after step {step} of {NUM_STEPS}, saved"
    assert words in stopped.output and stopped.steps() == list(range(3, step + 1))
    assert f"newest complete checkpoint: {broken / f'checkpoint-{step}'}" in stopped.output
    command = f"train_stage2.py --config {config} --resume auto"
    assert "resume from it with: python -m tools.launch --num_gpus 2" in stopped.output and command in stopped.output

    last = finish(config, "--resume", str(broken / f"checkpoint-{step}"))
    assert f"resuming from {broken / f'checkpoint-{step}'} (step {step})" in last.output
    assert_same_runs(broken, whole, NUM_STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("deepspeed", ["zero0", "zero1", "zero3"])
def test_every_zero_stage_goes_on_exactly_LRN_5_LRN_2(folder, start_model, deepspeed):
    """LRN-5, LRN-2: one kill at a checkpoint, one while a checkpoint is being written."""
    whole, broken = folder / f"whole_{deepspeed}", folder / f"broken_{deepspeed}"
    finish(config_of(folder, start_model, whole.name, deepspeed, **GEOMETRY))
    config = config_of(folder, start_model, broken.name, deepspeed, **GEOMETRY)
    kill_when(config, lambda: newest_step(broken) == 2)
    kill_when(config, lambda: (broken / "checkpoint-4.partial").exists())
    assert 2 <= newest_step(broken) <= 4
    finish(config)
    assert_same_runs(broken, whole, NUM_STEPS)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_ten_random_kills_change_nothing_LRN_5(folder, warm_model):
    """LRN-5: SIGKILL to the whole group at ten random moments, reproducible by seed: also while a learner starts,
    resumes, generates, trains, evaluates or saves."""
    geometry = {"max_steps": 40, "save_steps": 2, "eval_steps": 5, "save_total_limit": 2}
    whole, broken, dice = folder / "whole_warm", folder / "ten_kills", random.Random(5)
    finish(config_of(folder, warm_model, whole.name, **geometry))
    config = config_of(folder, warm_model, broken.name, **geometry)
    reached = []
    for _ in range(10):
        learner = LearnerProcess(config)
        if dice.random() < 0.8:  # otherwise somewhere in its start
            learner.wait_for(learner.steps)
        time.sleep(dice.uniform(0, 5))
        assert learner.process.poll() is None, "the run ended before ten kills; give it more steps"
        learner.kill()
        reached.append((learner.steps()[-1:], newest_step(broken)))
    print("last step reported and newest checkpoint at each kill:", reached)
    finish(config)
    assert_same_runs(broken, whole, 40)
    left = [{path.name for path in run_dir.glob("checkpoint-*")} for run_dir in (broken, whole)]
    # Beside the best of those that were evaluated, at 10, 20 and 30.
    assert left[0] == left[1] > {"checkpoint-38", "checkpoint-40"} and len(left[0]) == 3


@pytest.mark.slow
def test_a_full_disk_on_one_rank_ends_all_with_last_words_LRN_5(folder, start_model):
    """LRN-5: rank 1 may write at most 1000 bytes to a file, which looks like a full disk from inside. No rank waits for
    another, the unfinished checkpoint is removed, and the complete one is named."""
    run = folder / "full"
    learner = LearnerProcess(config_of(folder, start_model, run.name, **GEOMETRY | {"save_steps": 1}))
    assert learner.wait_for(lambda: newest_step(run) == 1), learner.output[-6000:]
    (rank_1,) = [p for p in ranks_of(learner.process.pid) if "--local_rank=1" in p.cmdline()]
    assert isinstance(rank_1, psutil.Process)
    resource.prlimit(rank_1.pid, resource.RLIMIT_FSIZE, (1000, 1000))
    assert learner.end(timeout_s=200) == 1, learner.output[-6000:]
    left = newest_step(run)
    assert left >= 1 and not list(run.glob("*.partial"))
    assert f"saving {run / f'checkpoint-{left + 1}'}" in learner.output and "rank 1: " in learner.output
    assert f"newest complete checkpoint: {run / f'checkpoint-{left}'}" in learner.output


@pytest.mark.slow
def test_ctrl_c_on_a_bare_launcher_saves_within_its_30_seconds_LRN_5(folder, start_model):
    """LRN-5: DeepSpeed's launcher exits with 1 and would kill the ranks; the checkpoint is written before that. Then
    three ranks try to resume the checkpoint of two ranks, and a run without --resume uses the directory: both are
    refused."""
    run = folder / "ctrl_c"
    config = config_of(folder, start_model, run.name, **GEOMETRY | {"max_steps": 200, "save_steps": 0})
    learner = LearnerProcess(config)
    assert learner.wait_for(learner.steps), learner.output[-6000:]
    family = process_tree(learner.process.pid)
    os.killpg(learner.process.pid, signal.SIGINT)
    psutil.wait_procs(family, timeout=60)  # the outer launcher does not wait for the ranks
    assert not alive(family)
    step = newest_step(run)
    assert step >= 1 and f"stopped by SIGINT after step {step} of 200, saved" in learner.output
    other = LearnerProcess(config, num_ranks=3)
    assert other.end() != 0 and "was written by 2 ranks, this run has 3" in other.output
    fresh = config_of(folder, start_model, run.name, **GEOMETRY, resume_from_checkpoint=None)
    other = LearnerProcess(fresh)
    assert other.end() != 0 and "holds an earlier run; resume it (--resume auto)" in other.output
    assert "Traceback" not in other.output
