"""Prefetch (LRN-8): an optimizer step against the larger of its two parts, rollouts and learner, and against their sum.

The real server runs on one core and the real learner (one rank) on another, so that neither slows down the other. In
one run, prefetch is switched off and on in turns (overlap_learner.py). Its steps without prefetch also give the
constants of tools/plan.py; a second, short run with another batch geometry shows how well they predict.
"""

import math
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from benchmarks.harness import Result, at_most, reported
from benchmarks.overlap_learner import NUM_STEPS, WARM_UP_STEPS, counts, is_ahead
from tests.e2e.processes import Server, run_learner, write_yaml
from tools.make_demo import build_start_model, make_dataset
from tools.plan import (
    Constants,
    calibrate,
    median_step,
    predict,
    read_steps,
    time_of_step,
    work_of_step,
    write_constants,
)
from utils.config.memory import ModelSize, model_size
from utils.config.schema import Tuner

NEW_TOKENS = 40  # an untrained model never stops by itself; with 40 tokens, rollouts take about as long as training
PREFETCH = {"enabled": True, "version_window": 1, "queue_limit": 2}
OTHER, OTHER_STEPS = (6, 24), WARM_UP_STEPS + 6  # samples per micro-step and new tokens, to test the prediction
TUNER = Tuner(type="lora", use_dora=True, freeze_vit=False, freeze_aligner=False)


def run() -> list[Result]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_start_model(folder / "model")
        make_dataset(folder / "data", num_train=256, num_val=0)
        with on_core(0):
            server = Server(folder, folder / "model")
        try:
            server.wait_ready()
            steps = train(
                server, folder / "turns", "benchmarks/overlap_learner.py", NUM_STEPS, 16, NEW_TOKENS, PREFETCH
            )
            others = train(server, folder / "other", "train_stage2.py", OTHER_STEPS, *OTHER, {})[WARM_UP_STEPS:]
        finally:
            server.end()
        size = model_size(folder / "model", TUNER)
    plain = median_step([steps[i] for i in range(NUM_STEPS) if counts(i) and not is_ahead(i)])
    constants = calibrate(work_of_step(plain, size), time_of_step(plain))
    write_constants("cpu", constants)
    return [*compared(steps), prediction(median_step(others), size, constants)]


def compared(steps: list[dict[str, float]]) -> list[Result]:
    """Compare steps with and without prefetch. `steps`: seconds by part of every step of a run, in order."""
    plain, ahead = ([steps[i] for i in range(NUM_STEPS) if counts(i) and is_ahead(i) is side] for side in (False, True))
    rollout = statistics.median(step["rollout"] for step in plain)
    learner = statistics.median(step["train"] + step["sync"] + step["prepare"] for step in plain)
    step = statistics.median(step["step"] for step in ahead)
    unit = "s per optimizer step"
    return [
        at_most("prefetch: step / max(rollout, learner)", unit, step, max(rollout, learner), 1.15),
        reported("prefetch: step / (rollout + learner)", unit, step, rollout + learner),
        reported("prefetch: rollout / learner", unit, rollout, learner),
    ]


def prediction(other: dict[str, float], size: ModelSize, constants: dict[str, float]) -> Result:
    """Seconds of the demo's step in another geometry: predicted by tools/plan.py, over measured."""
    known = Constants(**constants, sync_bytes_per_s=math.inf)  # not measurable with the demo's small model
    predicted = predict(work_of_step(other, size), known, learners=1, rollout_devices=1, prefetch=False)
    return reported("plan: predicted over measured step of the demo", "s", predicted.step, time_of_step(other).step)


def train(
    server: Server, run_dir: Path, script: str, num_steps: int, batch_size: int, new_tokens: int, prefetch: dict
) -> list[dict[str, float]]:
    """Run the learner; return metrics of every step (see tools.plan.read_steps)."""
    config = yaml.safe_load(server.config.read_text())
    matching = config["custom"]["extra"]["rollout_matching"]
    matching |= {"decode_batch_size": 32, "max_new_tokens": new_tokens, "async": prefetch}
    config["tuner"] = TUNER.model_dump(include={"type", "use_dora", "freeze_vit", "freeze_aligner"})
    config["training"] = {
        "output_dir": str(run_dir),
        "max_steps": num_steps,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": 2,
        "packing_buffer": 64,
        "gradient_checkpointing": False,
        "learning_rate": 1e-5,  # so low that every step is the same work
    }
    config["global_max_length"] = 3072
    with on_core(1):
        result = run_learner(script, write_yaml(run_dir.with_suffix(".yaml"), config), num_ranks=1)
    if result.returncode:
        raise RuntimeError(f"the learner failed:\n{result.stdout[-4000:]}")
    return read_steps(run_dir)


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Pin processes started inside the context to one core, if there is more than one."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[core % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
