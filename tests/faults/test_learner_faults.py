"""Faults inside a learner of two ranks: a rank is killed, a rank is frozen, a loss is nan."""

import math
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.processes import ENVIRONMENT
from tests.faults.learners import LearnerProcess, assert_clean_end, config_of, curves, newest_step
from tools.launch import process_tree
from tools.make_demo import make_dataset

pytestmark = pytest.mark.e2e
RANK_TIMEOUT_S = 15.0
LAUNCHER_S = 35.0  # DeepSpeed's launcher checks once a second, and gives the other ranks 30 s after SIGTERM
SLACK_S = 20.0  # for a busy machine
HERE = Path(__file__).parent
POISONED = "train-000009"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("learner_faults")
    make_dataset(folder / "data", num_train=18, num_val=1)
    return folder


def stop_at_step_2(config: Path, run: Path, victim: int, number: signal.Signals) -> tuple[LearnerProcess, list, float]:
    """Start a learner as `make train` does, and send one rank a signal some time after its second checkpoint.

    Returns the learner, its processes, and the seconds until all had ended.
    """
    learner = LearnerProcess(config, launcher=(sys.executable, "-m", "tools.launch"))
    try:
        assert learner.wait_for(lambda: newest_step(run) >= 2), learner.output[-6000:]
        family = process_tree(learner.process.pid)
        learner.rank(victim).send_signal(number)
        start = time.monotonic()
        learner.end(RANK_TIMEOUT_S + LAUNCHER_S + SLACK_S)
        psutil.wait_procs(family, timeout=5)
        return learner, family, time.monotonic() - start
    finally:
        learner.kill()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_ends_the_run_on_all_LRN_5(folder, start_model, victim, number):
    """LRN-5, `training.rank_timeout_s`: killed or frozen; the other rank says how to resume, and resuming works."""
    name = f"{number.name}_{victim}"
    run, geometry = folder / name, {"max_steps": 100, "save_steps": 1, "rank_timeout_s": RANK_TIMEOUT_S}
    config = config_of(folder, start_model, name, **geometry)
    learner, family, seconds = stop_at_step_2(config, run, victim, number)
    step = newest_step(run)
    print(f"{name}: ended after {seconds:.1f} s")
    assert_clean_end(learner, family, "failed: ", run, step)
    assert ("rank 1, in case rank 0 is gone:" in learner.output) >= (victim == 0)
    assert (f"run {run}: a rank was ended by SIGKILL" in learner.output) == (number == signal.SIGKILL)
    config = config_of(folder, start_model, name, **geometry | {"max_steps": step + 1})
    again = LearnerProcess(config)
    assert again.end() == 0 and again.steps() == [step + 1], again.output[-6000:]


@pytest.mark.slow
def test_a_loss_that_is_nan_stops_the_run_with_the_samples_named_LRN_5(folder, start_model, monkeypatch):
    """LRN-5, LRN-12, `training.on_nan_loss: stop` (the default): on both ranks, with no trace of it in the checkpoint
    of the steps before it, which nothing else asked for."""
    run = folder / "stops"
    learner = poisoned(config_of(folder, start_model, "stops", max_steps=8, save_steps=0), monkeypatch)
    assert learner.wait_for(learner.steps), learner.output[-6000:]
    family = process_tree(learner.process.pid)
    learner.end(LAUNCHER_S + SLACK_S + 60)
    step = newest_step(run)
    words = f"the loss of optimizer step {step + 1} is not finite; samples: "
    assert_clean_end(learner, family, words, run, step)
    assert POISONED in learner.output[learner.output.rindex(words) :].partition("\n")[0]


@pytest.mark.slow
def test_a_loss_that_is_nan_is_skipped_where_wanted_LRN_5(folder, start_model, monkeypatch):
    """LRN-5, `training.on_nan_loss: skip`: that step changes nothing, all others train, the weights stay finite."""
    geometry = {"max_steps": 5, "save_steps": 1, "on_nan_loss": "skip"}
    learner = poisoned(config_of(folder, start_model, "skips", **geometry), monkeypatch)
    try:
        assert learner.end() == 0, learner.output[-6000:]
    finally:
        learner.kill()
    skipped = re.findall(r"the loss of optimizer step (\d+) is not finite; samples: (.*); the step is", learner.output)
    assert skipped and all(POISONED in samples.split(", ") for _, samples in skipped)
    losses = dict(curves(folder / "skips")["loss/total"])
    assert {step for step, value in losses.items() if math.isnan(value)} == {int(step) for step, _ in skipped}
    assert len(losses) == 5 > len(skipped)
    bad = int(skipped[0][0])
    if bad > 1:
        weights = [weights_of(folder / "skips" / f"checkpoint-{step}") for step in (bad - 1, bad)]
        assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    last = weights_of(folder / "skips" / "checkpoint-5")
    assert all(bool(tensor.isfinite().all()) for tensor in last.values())


def poisoned(config: Path, monkeypatch: pytest.MonkeyPatch) -> LearnerProcess:
    monkeypatch.setitem(ENVIRONMENT, "POISONED_SAMPLE", POISONED)
    return LearnerProcess(config, script=HERE / "poisoned_learner.py")


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    files = sorted((checkpoint / "merged").glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}
