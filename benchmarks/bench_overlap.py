"""Prefetch (LRN-8): one optimizer step against the larger of its two halves, rollouts and learner, and their sum.

The real server on one core and the real learner (one rank) on another, so that neither takes time from the other. One
run: its prefetch is off and on by turns (overlap_learner.py).
"""

import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.harness import Result, at_most, reported
from benchmarks.overlap_learner import NUM_STEPS, counts, is_ahead
from tests.e2e.processes import Server, run_learner, write_yaml
from tools.make_demo import build_start_model, make_dataset

NEW_TOKENS = 40  # an untrained model never stops by itself; with these rollouts take about as long as training
PREFETCH = {"enabled": True, "version_window": 1, "queue_limit": 2}


def run() -> list[Result]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_start_model(folder / "model")
        make_dataset(folder / "data", num_train=256, num_val=0)
        with on_core(0):
            server = Server(folder, folder / "model")
        try:
            server.wait_ready()
            steps = train(server, folder / "run")
        finally:
            server.end()
    return compared(steps)


def compared(steps: list[dict[str, float]]) -> list[Result]:
    """Bars from the seconds by part of every step of a run, in order."""
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


def train(server: Server, run_dir: Path) -> list[dict[str, float]]:
    """Seconds by part of every step."""
    config = yaml.safe_load(server.config.read_text())
    matching = config["custom"]["extra"]["rollout_matching"]
    matching |= {"decode_batch_size": 32, "max_new_tokens": NEW_TOKENS, "async": PREFETCH}
    config["tuner"] = {"type": "lora", "use_dora": True, "freeze_vit": False, "freeze_aligner": False}
    config["training"] = {
        "output_dir": str(run_dir),
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "packing_buffer": 64,
        "gradient_checkpointing": False,
        "learning_rate": 1e-5,  # the same work in every step
    }
    config["global_max_length"] = 3072
    with on_core(1):
        result = run_learner("benchmarks/overlap_learner.py", write_yaml(run_dir.with_suffix(".yaml"), config), 1)
    if result.returncode:
        raise RuntimeError(f"the learner failed:\n{result.stdout[-4000:]}")
    events = EventAccumulator(str(run_dir)).Reload()
    parts = ("rollout", "train", "sync", "prepare", "step")
    curves = {part: [event.value for event in events.Scalars(f"seconds/{part}")] for part in parts}
    return [{part: curves[part][step] for part in parts} for step in range(NUM_STEPS)]


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started inside runs on this core only, where there is more than one."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[core % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
