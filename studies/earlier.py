"""Does stage 2 beat plain supervised training? Makes the runs that docs/results_earlier.md is based on.

    python -m studies.earlier               # all runs that docs/results.json lacks, most important first; takes hours
    python -m studies.earlier --task hard   # only those of one task
    python -m studies.earlier --report      # only rewrite docs/results_earlier.md from docs/results.json

Each run is the real learner (`deepspeed --num_gpus 1 train_stage2.py`) on CPU with a real rollout server, which serves
all runs of a task. Supervised training is the same program with `RM.teacher_forced_ratio: 1`. A finished run becomes
one record in docs/results.json. Runs that have a record with the same settings are skipped, so the study can be stopped
and resumed at any time.
"""

import argparse
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from studies.earlier_report import (
    BOTH,
    EQUAL_SECONDS,
    PLAIN,
    STUDY_DUPLICATE_IOU,
    SUPERVISED,
    WARM_UP,
    quiet_step_seconds,
    text_of,
)
from studies.runs import (
    ROOT,
    RunFailed,
    Task,
    load_records,
    quiet_parts,
    revision,
    run_to_end,
    slug,
    store,
    warm_up,
    write_config,
)
from studies.tables import Record, runs_of
from tools import demo, make_demo
from tools.cached import cached
from tools.demo import ENVIRONMENT
from tools.launch import deepspeed_command
from tools.report_answers import objects_of
from tools.warmup_sft import load_warmup_config
from utils.config.load import resolve_yaml
from utils.config.schema import RM
from utils.scores import count_duplicates

REPORT = Path("docs/results_earlier.md")
HARD = ROOT / "hard"
WARMUP_CONFIG = Path("studies/configs/warmup.yaml")
SCENES = make_demo.Scenes(max_objects=12, sizes=(0.12, 0.22), max_labels=3)
NUM_TRAIN, NUM_VAL = 1000, 256  # of the hard task
SEEDS = (1, 2, 3)

TASKS = (Task("demo", "studies/configs/demo.yaml"), Task("hard", "studies/configs/hard.yaml"))

TRIMMED_AND_STRUCTURED = {f"{RM}.targets.supervise_structure": True, f"{RM}.targets.unmatched": "trim"}
FORCED = {f"{RM}.teacher_forced_ratio": 1.0}
# Variant -> its changes to the task's config. The number of steps of EQUAL_SECONDS follows from the runs of MAIN.
MAIN: dict[str, dict[str, Any]] = {
    SUPERVISED: FORCED,
    BOTH: TRIMMED_AND_STRUCTURED,
}
LONGER = {EQUAL_SECONDS: FORCED}
ABLATIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "stage 2 + structure": {f"{RM}.targets.supervise_structure": True},
    "stage 2 + trim": {f"{RM}.targets.unmatched": "trim"},
    "stage 2, label ignore": {f"{RM}.matching.label": "ignore"},
}
# Only for task "hard", whose start model makes almost no mistakes in greedy answers on its training images.
HARD_ONLY: dict[str, dict[str, Any]] = {
    "sampled, + both": TRIMMED_AND_STRUCTURED | {f"{RM}.decoding.temperature": 1.0},
    "mix: half supervised, + both": TRIMMED_AND_STRUCTURED | {f"{RM}.teacher_forced_ratio": 0.5},
}
# One seed each: is the common learning rate fair to both sides?
LEARNING_RATES: dict[str, dict[str, Any]] = {
    "supervised, lr x 0.5": FORCED | {"training.learning_rate": 1e-3, "training.embed_lr": 1e-4},
    "supervised, lr x 2": FORCED | {"training.learning_rate": 4e-3, "training.embed_lr": 4e-4},
    "stage 2 + both, lr x 0.5": TRIMMED_AND_STRUCTURED | {"training.learning_rate": 1e-3, "training.embed_lr": 1e-4},
    "stage 2 + both, lr x 2": TRIMMED_AND_STRUCTURED | {"training.learning_rate": 4e-3, "training.embed_lr": 4e-4},
}
VARIANTS = MAIN | LONGER | HARD_ONLY | ABLATIONS | LEARNING_RATES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="only rewrite docs/results_earlier.md")
    parser.add_argument("--task", choices=[task.name for task in TASKS], help="only the runs of this task")
    args = parser.parse_args()
    if not args.report:
        demo.exit_on_sigterm()
        run_all([job for job in all_jobs() if args.task in (None, job.task.name)])
    write_report()


def write_report() -> None:
    """Rewrite docs/results_earlier.md from docs/results.json."""
    REPORT.write_text(text_of(load_records(), missing(load_records())))


# ---------------------------------------------------------------------------------------------------------------------
# which runs, in which order


@dataclass(frozen=True)
class Job:
    task: Task
    variant: str
    seed: int


def all_jobs() -> list[Job]:
    """Return all runs, most important first; other learning rates are tried with one seed of the demo only."""
    jobs = []
    for variants in (MAIN, LONGER, HARD_ONLY, ABLATIONS):
        tasks = [task for task in TASKS if task.name == "hard" or variants is not HARD_ONLY]
        jobs += [Job(task, variant, seed) for seed in SEEDS for task in tasks for variant in variants]
    return jobs + [Job(TASKS[0], variant, SEEDS[0]) for variant in LEARNING_RATES]


def find(records: Sequence[Record], job: Job) -> Record | None:
    """Return the record of a run if its settings are still those of its variant."""
    for record in records:
        if (record["task"], record["variant"], record["seed"]) == (job.task.name, job.variant, job.seed):
            return record if record["overrides"] == VARIANTS[job.variant] else None
    return None


def missing(records: Sequence[Record]) -> dict[str, list[int]]:
    """Return the runs without a record: `task: variant` -> seeds."""
    result: dict[str, list[int]] = {}
    for job in all_jobs():
        if find(records, job) is None:
            result.setdefault(f"{job.task.name}: {job.variant}", []).append(job.seed)
    return result


def num_steps(job: Job, records: Sequence[Record]) -> int:
    """Number of optimizer steps: the task's, or for EQUAL_SECONDS as many as take as long as a run of BOTH."""
    common = int(resolved(job.task)["training"]["max_steps"])
    if job.variant != EQUAL_SECONDS:
        return common
    of_task = [record for record in records if record["task"] == job.task.name]
    if decided := [record["steps"] for record in of_task if record["variant"] == EQUAL_SECONDS]:
        return decided[0]
    supervised, both = (quiet_step_seconds(runs_of(records, job.task.name, name)) for name in (SUPERVISED, BOTH))
    return round(common * both / supervised)


# ---------------------------------------------------------------------------------------------------------------------
# running


def run_all(jobs: Sequence[Job]) -> None:
    """Make the missing runs, one server at a time and a new one for each task; name failed runs at the end."""
    commit = revision()
    failed = []
    server: Server | None = None
    try:
        for job in jobs:
            records = load_records()
            if find(records, job):
                continue
            if server is None or server.task != job.task or server.process.poll() is not None:
                if server is not None:
                    server.close()
                prepare(job.task)
                server = Server(job.task)
            name = f"{job.task.name}: {job.variant}, seed {job.seed}"
            demo.say(f"{time.strftime('%H:%M:%S')} {name}")
            try:
                record = run_learner(job, num_steps(job, records), server) | {"revision": commit}
            except RunFailed as error:
                print(f"FAILED {name}: {error}", flush=True)
                failed.append(name)
                server.close()  # it may be the server that failed
                server = None
                continue
            store(record)
            final = list(record["scores"].values())[-1]
            print({key: round(value, 3) for key, value in final.items()}, record["seconds"], flush=True)
    finally:
        if server is not None:
            server.close()
    if failed:
        sys.exit("failed: " + "; ".join(failed))


class Server:
    """A rollout server for all runs of a task, on ports that were free when it was started.

    Attributes:
        address: overrides with which a config uses this server.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        port, group_port = demo.free_ports(2)
        url = f"http://127.0.0.1:{port}"
        self.address = {f"{RM}.vllm.server.servers": [{"base_url": url, "group_port": group_port}]}
        folder = ROOT / task.name / "server"
        config = write_config(task, folder, self.address)
        self.process = demo.start_server(str(config), ENVIRONMENT, folder / "server.log")
        try:
            demo.wait_healthy(self.process, url, folder / "server.log")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        demo.stop(self.process)


def run_learner(job: Job, steps: int, server: Server) -> Record:
    """Train once and return the record; raise RunFailed with the end of the log."""
    folder = ROOT / job.task.name / f"{slug(job.variant)}-s{job.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    overrides = VARIANTS[job.variant]
    common = int(resolved(job.task)["training"]["max_steps"])
    every = math.ceil(int(resolved(job.task)["training"]["eval_steps"]) * steps / common)
    run = {"training.seed": job.seed, "training.max_steps": steps, "training.eval_steps": every}
    config, log = write_config(job.task, folder, overrides | run | server.address), folder / "learner.log"
    port = demo.free_ports(1)[0]
    launcher = [*deepspeed_command(), "--num_gpus", "1", "--master_port", str(port)]
    if status := run_to_end([*launcher, "train_stage2.py", "--config", str(config)], log):
        raise RunFailed(f"status {status}; the end of {log}:\n" + log.read_text()[-2000:])
    finished = json.loads((folder / "finished.json").read_text())
    return {
        "task": job.task.name,
        "variant": job.variant,
        "seed": job.seed,
        "overrides": overrides,
        "steps": finished["steps"],
        "seconds": finished["seconds"],
        **read_curves(folder),
        "scores": {
            str(int(path.stem.split("_")[1])): read_scores(path) for path in sorted((folder / "eval").glob("*.json"))
        },
    }


def read_scores(path: Path) -> dict[str, float]:
    """Scores of one evaluation (`eval/step_N.json`), with figures counted from its answers (`eval/step_N.jsonl`)."""
    kept = ("f1", "f1_no_label", "recall", "precision", "parse_rate", "truncated_rate")
    result = {key: json.loads(path.read_text())[key] for key in kept}
    answers = [objects_of(json.loads(line)["pred"]) for line in path.with_suffix(".jsonl").open()]
    result["objects"] = statistics.fmean(map(len, answers))
    result["duplicates"] = statistics.fmean(count_duplicates(objects, STUDY_DUPLICATE_IOU) for objects in answers)
    return {key: round(value, 5) for key, value in result.items()}


def read_curves(folder: Path) -> dict[str, Any]:
    """Read a record's figures from the TensorBoard curves of a run.

    `step_seconds`: see `quiet_parts`. `rollout_f1`: of rollouts on training images, mean over the run.
    """
    curves = EventAccumulator(str(folder)).Reload()
    return {
        "step_seconds": quiet_parts(curves),
        "rollout_f1": round(statistics.fmean(event.value for event in curves.Scalars("rollout/f1")), 4),
    }


def resolved(task: Task) -> dict[str, Any]:
    return resolve_yaml(task.config)[0]


# ---------------------------------------------------------------------------------------------------------------------
# data and start models, made once


def prepare(task: Task) -> None:
    """Make data and start model of the task, unless they exist."""
    make_demo.make_demo(ROOT / "demo", load_warmup_config(make_demo.WARMUP_CONFIG), 4000, new_colour=None)
    if task.name == "hard":
        make_hard()
        curve = json.loads((HARD / "model" / "curve.json").read_text())
        by_step = {str(int(point.pop("steps"))): point for point in curve}
        store({"task": "hard", "variant": WARM_UP, "seed": 0, "overrides": {}, "scores": by_step})


def make_hard() -> None:
    """Make data and start model of the hard task under runs/study/hard; its warm-up starts from the demo's model."""
    cfg = load_warmup_config(WARMUP_CONFIG)
    data = [NUM_TRAIN, NUM_VAL, repr(SCENES)]
    cached(
        HARD / "data",
        data,
        "synthetic scenes",
        lambda folder: make_demo.make_dataset(folder, NUM_TRAIN, NUM_VAL, seed=1, scenes=SCENES),
    )
    start = (Path(cfg.model) / "made_with.sha256").read_text()
    settings = [data, start, cfg.model_dump()]
    cached(
        HARD / "model",
        settings,
        "supervised warm-up in rounds",
        lambda folder: warm_up(folder, cfg, HARD / "data" / "val.jsonl"),
        can_resume=True,
    )


if __name__ == "__main__":
    main()
