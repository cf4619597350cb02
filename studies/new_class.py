"""The studies of new classes: can a model learn two classes from images that annotate nothing else, and forget nothing?

    python -m studies.new_class                    # all runs that docs/results.json lacks, most important first
    python -m studies.new_class --limit 1          # the next run only, for a machine that is shared
    python -m studies.new_class --task new_class   # only the runs of one study
    python -m studies.new_class --plan             # list what can be run next; train nothing
    python -m studies.new_class --limit 0          # only rewrite docs/results.md

Each run is one learner process, which makes its own rollouts; no server. Settings of each arm (learning rate and, where
it has one, weight of the KL) are chosen by the same grid with seed `TUNING_SEED` on the tuning images. Only then the
arm runs with `SEEDS`, scored on the test images. A finished run becomes a record in docs/results.json. Runs that have a
record with the same settings are skipped, so the studies can be stopped and resumed at any time.
"""

import argparse
import itertools
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from studies import new_class_data, new_class_report, study
from studies.new_class_data import MATERIALS, NEW_LABELS, SPLITS
from studies.study import RM, RunFailed, Task, load_records, quiet_parts, resolved, slug, store, write_config
from studies.study_report import Record, last, quiet_step_seconds, runs_of
from tools import demo

REPORT = Path("docs/results.md")
TASKS = {name: Task(name, f"studies/configs/{name}.yaml") for name in MATERIALS}
SEEDS = (1, 2, 3, 4, 5)
TUNING_SEED = 0
LEARNING_RATES = (1e-3, 2e-3, 4e-3)
KL_WEIGHTS = (10.0, 30.0)
EMBED_SHARE = 0.1  # embed_lr, of the learning rate
SCORES = ("f1", "f1_old", "f1_new", "precision", "recall", "duplicates_per_image", "parse_rate", "truncated_rate")
KL = RM + "losses.reference_kl"


@dataclass(frozen=True)
class Arm:
    """A way of training.

    Attributes:
        name: its variant in the records.
        data: training lines, below the study's folder.
        overrides: its changes to the task's config, by dotted key.
        has_kl: its KL weight is tuned.
        is_on_policy: its rollouts come from the policy in training.
        program: the learner; a module if it has no `.py`.
        only_annotated: the data annotate the new classes only.
    """

    name: str
    data: str = "data/train.jsonl"
    overrides: dict[str, Any] = field(default_factory=dict, hash=False)
    has_kl: bool = False
    is_on_policy: bool = False
    program: str = "train_stage2.py"
    only_annotated: bool = True


FORCED = {RM + "teacher_forced_ratio": 1.0, KL: 0.0}
SFT = Arm("SFT", overrides=FORCED)
PSEUDO = Arm("SFT + pseudo-labels", "pseudo/train.jsonl", FORCED, only_annotated=False)
REFRESHED = Arm("SFT + refreshed pseudo-labels", overrides={KL: 0.0}, program="studies.refreshed_labels")
OFFLINE = Arm("start model's answers + KL", has_kl=True, program="studies.offline_stage2")
STAGE2 = Arm("stage 2 + KL", has_kl=True, is_on_policy=True)
NO_KL = Arm("stage 2", overrides={KL: 0.0}, is_on_policy=True)
CEILING = Arm("SFT, all annotated", "data/train_all.jsonl", FORCED, only_annotated=False)
ARMS = (STAGE2, PSEUDO, REFRESHED, SFT, OFFLINE, CEILING, NO_KL)  # by how much they tell
RIVALS = (SFT, PSEUDO, REFRESHED, OFFLINE)  # what an on-policy arm has to beat, at equal steps and at equal seconds
EQUAL_SECONDS = ", equal seconds"


@dataclass(frozen=True)
class Job:
    """One run. `kl` is None for an arm without a tuned weight; `equal_seconds`: as long as the runs of `STAGE2`."""

    task: str
    arm: Arm
    seed: int
    lr: float
    kl: float | None = None
    equal_seconds: bool = False

    @property
    def is_tuning(self) -> bool:
        return self.seed == TUNING_SEED

    @property
    def variant(self) -> str:
        """Its name in the records, where (task, variant, seed) is the key."""
        if not self.is_tuning:
            return self.arm.name + (EQUAL_SECONDS if self.equal_seconds else "")
        return f"{self.arm.name}, lr {self.lr:g}" + (f", KL {self.kl:g}" if self.kl is not None else "")

    @property
    def overrides(self) -> dict[str, Any]:
        """All that is this run's own but the seed, the number of steps and the output directory."""
        root = MATERIALS[self.task].root
        data: dict[str, Any] = {"path": str(root / self.arm.data)}
        if self.arm.only_annotated:
            data["annotated"] = list(NEW_LABELS)
        own = {"training.learning_rate": self.lr, "training.embed_lr": self.lr * EMBED_SHARE}
        scored_on = str(root / "data" / ("tune.jsonl" if self.is_tuning else "test.jsonl"))
        files = {"custom.train_jsonl": [data], "custom.val_jsonl": scored_on}
        return self.arm.overrides | own | files | ({} if self.kl is None else {KL: self.kl})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), help="only the runs of this study")
    parser.add_argument("--limit", type=int, metavar="N", help="make at most N runs")
    parser.add_argument("--plan", action="store_true", help="list what is missing, without training")
    args = parser.parse_args()
    names = [args.task] if args.task else list(TASKS)
    if args.plan:
        print("\n".join(f"{job.task}: {job.variant}, seed {job.seed}" for job in missing(load_records(), names)))
        return
    demo.exit_on_sigterm()
    failed = run_all(names, args.limit)
    write_report()
    if failed:
        sys.exit("failed: " + "; ".join(failed))


def write_report() -> None:
    """Rewrite docs/results.md and its plots from docs/results.json."""
    records = load_records()
    left = {name: num_left(records, name) for name in TASKS}
    current = [record for record in records if record["task"] in TASKS and is_current(records, record)]
    REPORT.write_text(new_class_report.text_of(current, left))
    for name, svg in new_class_report.plots(current).items():
        (REPORT.parent / name).write_text(svg)


# ---------------------------------------------------------------------------------------------------------------------
# which runs, in which order


def grid(task: str, arm: Arm) -> list[Job]:
    """Return the tuning runs of an arm: the same learning rates for each, times the KL weights where it has one."""
    weights = KL_WEIGHTS if arm.has_kl else (None,)
    return [Job(task, arm, TUNING_SEED, lr, kl) for lr, kl in itertools.product(LEARNING_RATES, weights)]


def tuned(records: Sequence[Record], task: str, arm: Arm) -> Job | None:
    """Return the tuning run with the highest F1 on the tuning images; None until all of the grid have finished."""
    finished = [(find(records, job), job) for job in grid(task, arm)]
    scored = [(last([record], "f1")[0], job) for record, job in finished if record]
    return max(scored, key=lambda pair: pair[0])[1] if len(scored) == len(finished) else None


def tests(records: Sequence[Record], task: str, arm: Arm, equal_seconds: bool) -> list[Job]:
    """Return an arm's test runs with the settings it was tuned to; none before it is tuned."""
    best = tuned(records, task, arm)
    return [Job(task, arm, seed, best.lr, best.kl, equal_seconds) for seed in SEEDS] if best else []


def find(records: Sequence[Record], job: Job) -> Record | None:
    """Return the record of a run if its settings are still the same."""
    for record in records:
        if (record["task"], record["variant"], record["seed"]) == (job.task, job.variant, job.seed):
            is_same = (record["overrides"], record["material"]) == (job.overrides, MATERIALS[job.task].version)
            return record if is_same else None
    return None


def missing(records: Sequence[Record], tasks: Sequence[str]) -> Iterator[Job]:
    """Yield runs without a record that can be made now, most important first: arm by arm, its tuning, then its tests.

    What an arm's tuning decides comes with the records of it, and equal seconds with those of `STAGE2`.
    """
    for task in tasks:
        for arm in ARMS:
            yield from (job for job in planned(records, task, arm) if find(records, job) is None)


def is_current(records: Sequence[Record], record: Record) -> bool:
    """Whether a record is of a run that is planned now, with today's settings."""
    task = record["task"]
    return any(find([record], job) for arm in ARMS for job in planned(records, task, arm))


def planned(records: Sequence[Record], task: str, arm: Arm) -> list[Job]:
    """Return all runs of an arm that are known by now, in order."""
    jobs = [*grid(task, arm), *tests(records, task, arm, equal_seconds=False)]
    if arm in RIVALS and has_seconds(records, task, arm):
        jobs += tests(records, task, arm, equal_seconds=True)
    return jobs


def num_left(records: Sequence[Record], task: str) -> int:
    """Number of runs without a record, those included whose settings are not known yet."""
    total = sum(len(grid(task, arm)) + len(SEEDS) * (2 if arm in RIVALS else 1) for arm in ARMS)
    jobs = [job for arm in ARMS for job in planned(records, task, arm)]
    return total - sum(find(records, job) is not None for job in jobs)


def has_seconds(records: Sequence[Record], task: str, arm: Arm) -> bool:
    """Whether the steps of equal seconds can be fixed: all seeds of the arm and of `STAGE2` have finished."""
    done = [[find(records, job) for job in tests(records, task, one, False)] for one in (arm, STAGE2)]
    return all(runs and all(runs) for runs in done)


def num_steps(job: Job, records: Sequence[Record]) -> int:
    """Number of optimizer steps: the task's, or as many as fit into the quiet seconds of `STAGE2`.

    The start model's answers to all training images cost seconds too, once: as much as so many rollouts of `STAGE2`.
    Labels that are refreshed cost a rollout at every step. Still no arm gets fewer steps than `STAGE2`.
    """
    training = resolved(TASKS[job.task])["training"]
    common = int(training["max_steps"])
    if not job.equal_seconds:
        return common
    if decided := [record["steps"] for record in runs_of(records, job.task, job.variant)]:
        return decided[0]
    own, stage2 = (runs_of(records, job.task, arm.name) for arm in (job.arm, STAGE2))
    parts = ("prepare", "train", *(["rollout"] if job.arm is REFRESHED else []))
    seconds = {part: min(run["step_seconds"][part] for run in own) for part in parts}
    answers = 0.0
    if job.arm in (PSEUDO, OFFLINE):
        rollout = min(run["step_seconds"]["rollout"] for run in stage2)
        answers = rollout * SPLITS["train"] / training["per_device_train_batch_size"]
    return max(common, round((common * quiet_step_seconds(stage2) - answers) / sum(seconds.values())))


# ---------------------------------------------------------------------------------------------------------------------
# running


def run_all(tasks: Sequence[str], limit: int | None = None) -> list[str]:
    """Make the missing runs, at most `limit`; return the names of those that failed, each tried once."""
    failed: list[str] = []
    for _ in itertools.count() if limit is None else range(limit):
        records = load_records()
        todo = (job for job in missing(records, tasks) if name_of(job) not in failed)
        job = next(todo, None)
        if job is None:
            break
        new_class_data.prepare(MATERIALS[job.task])
        demo.say(name_of(job))
        try:
            record = run_learner(job, num_steps(job, records))
        except RunFailed as error:
            print(f"FAILED {name_of(job)}: {error}", flush=True)
            failed.append(name_of(job))
            continue
        store(record | {"revision": study.revision()})
        print(record["scores"], record["seconds"], flush=True)
    return failed


def name_of(job: Job) -> str:
    return f"{job.task}: {job.variant}, seed {job.seed}"


def run_learner(job: Job, steps: int) -> Record:
    """Train once and return the record; raise RunFailed with the end of the log."""
    folder = MATERIALS[job.task].root / f"{slug(job.variant)}-s{job.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    run = {"training.seed": job.seed, "training.max_steps": steps, "training.eval_steps": steps}
    # The start model's scores on the test images: once, in the first run of SFT.
    run["training.eval_at_start"] = (job.arm, job.seed, job.equal_seconds) == (SFT, SEEDS[0], False)
    config, log = write_config(TASKS[job.task], folder, job.overrides | run), folder / "learner.log"
    program = [job.arm.program] if job.arm.program.endswith(".py") else ["--module", job.arm.program]
    launcher = [f"{Path(sys.executable).parent}/deepspeed", "--num_gpus", "1"]
    command = [*launcher, "--master_port", str(demo.free_ports(1)[0]), *program, "--config", str(config)]
    if status := study.run_to_end(command, log):
        raise RunFailed(f"status {status}; the end of {log}:\n" + log.read_text()[-2000:])
    finished = json.loads((folder / "finished.json").read_text())
    return {
        "task": job.task,
        "variant": job.variant,
        "seed": job.seed,
        "overrides": job.overrides,
        "material": MATERIALS[job.task].version,
        "steps": finished["steps"],
        "seconds": finished["seconds"],
        "step_seconds": quiet_parts(EventAccumulator(str(folder)).Reload()),
        "scores": {
            str(int(path.stem.split("_")[1])): read_scores(path) for path in sorted((folder / "eval").glob("*.json"))
        },
    }


def read_scores(path: Path) -> dict[str, float]:
    found = json.loads(path.read_text())
    return {key: round(found[key], 5) for key in SCORES}


if __name__ == "__main__":
    main()
