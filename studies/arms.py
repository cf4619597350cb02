"""A study as arms that are tuned alike: which runs it takes, in which order, and how many steps each has.

All but `Study.prepare` is a pure function of the records of finished runs, which docs/results.json holds.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from studies.tables import Record, last, runs_of
from utils.config.load import resolve_yaml
from utils.config.schema import RM

SEEDS = (1, 2, 3, 4, 5)
TUNING_SEED = 0
EMBED_SHARE = 0.1  # embed_lr, of the learning rate
UNTUNED = " (rate of equal steps)"
EQUAL_SECONDS = ", equal seconds"
KL = f"{RM}.losses.reference_kl"
OFFLINE_PROGRAM = "studies.offline_stage2"


@dataclass(frozen=True)
class Arm:
    """A way of training.

    Attributes:
        name: its variant in the records.
        data: training lines, below the study's folder.
        overrides: its changes to the study's config, by dotted key.
        config: the file that it changes; None: the study's.
        program: the learner; a module if it has no `.py`.
        has_kl: its KL weight is tuned.
        is_on_policy: its rollouts come from the policy in training.
        is_rival: an on-policy arm has to beat it, at equal steps and at equal seconds.
        labels: answers that it is trained on besides the annotation. Those of the start model or of a teacher of its
            size are made once for all training images, which costs time, too; those of a later policy at each step.
        only_annotated: the data annotate some classes only.
        scores_start: its first test run scores the start model on the test images, too.
        scored_as: added to the names of the files that it is scored on, where its prompts are its own.
    """

    name: str
    data: str = "data/train.jsonl"
    overrides: dict[str, Any] = field(default_factory=dict, hash=False)
    config: str | None = None
    program: str = "train_stage2.py"
    has_kl: bool = False
    is_on_policy: bool = False
    is_rival: bool = False
    labels: Literal["annotation", "start model", "teacher", "policy"] = "annotation"
    only_annotated: bool = True
    scores_start: bool = False
    scored_as: str = ""

    @property
    def has_labels_made_once(self) -> bool:
        return self.labels in ("start model", "teacher")

    @property
    def makes_rollouts(self) -> bool:
        """Whether each step takes answers of the policy in training."""
        return self.is_on_policy or self.labels == "policy"


@dataclass(frozen=True)
class Study:
    """Arms on one task.

    Attributes:
        name: its task in the records.
        claim: the study whose verdict it counts for; two versions of a study have one.
        config: what its runs share.
        material: version of its images and its start model; records of another one are stale.
        prepare: makes images and start model below `root`, if missing; called by `studies.portable`.
        arms: by how much they tell.
        clock: the arm whose seconds are those of "equal seconds"; a slower one cannot win.
        num_train: images of the training split.
        columns: scores in its table, by name.
        method: text of the report.
        annotated: labels that the training data of `only_annotated` arms annotate; empty: the lines say it.
        replay: fully annotated lines, below `root`, that each arm sees besides.
        tuned_on: the study whose tuning counts for this one; None: its own.
        tuned_here: arms whose learning rate at equal seconds is tuned on this study all the same, by name.
        num_evals: how often a run is scored, in equal distances.
        further: makes the folder of further test images if missing, and returns it; None: there are none.
        repeats: the version that this one was declared to confirm; that one counts for nothing if this one is lost.
        is_portable: all that `prepare` makes is the same on all processors.
    """

    name: str
    title: str
    claim: str
    config: str
    root: Path
    material: int
    prepare: Callable[[], None] = field(hash=False)
    arms: tuple[Arm, ...]
    clock: Arm
    num_train: int
    learning_rates: tuple[float, ...]
    kl_weights: tuple[float, ...]
    columns: dict[str, str] = field(hash=False)
    method: str
    annotated: tuple[str, ...] = ()
    replay: str | None = None
    tuned_on: "Study | None" = None
    num_evals: int = 1
    further: Callable[[], Path] | None = field(default=None, hash=False)
    repeats: "Study | None" = None
    is_portable: bool = False
    tuned_here: tuple[str, ...] = ()

    @cached_property
    def training(self) -> dict[str, Any]:
        return resolve_yaml(self.config)[0]["training"]

    def tunes_longer(self, arm: Arm) -> bool:
        """Whether the learning rate of equal seconds is tuned on this study."""
        return not self.tuned_on or arm.name in self.tuned_here

    @property
    def rivals(self) -> list[str]:
        """What an on-policy arm has to beat, by the names of the records."""
        return [arm.name + suffix for suffix in ("", EQUAL_SECONDS) for arm in self.arms if arm.is_rival]

    @property
    def on_policy(self) -> list[str]:
        return [arm.name for arm in self.arms if arm.is_on_policy]

    @property
    def label_maker(self) -> Arm | None:
        """The arm that generates at each step what others have made once, and so tells what that costs; if any."""
        return next((arm for arm in self.arms if arm.program == OFFLINE_PROGRAM), None)

    @property
    def untuned(self) -> list[str]:
        """Names of rivals of equal seconds with the learning rate of equal steps: shown until they are tuned."""
        return [name + UNTUNED for name in self.rivals if name.endswith(EQUAL_SECONDS)]

    @property
    def variants(self) -> list[str]:
        """All names of test runs, in the order of the report."""
        others = [arm.name for arm in self.arms if not arm.is_rival and not arm.is_on_policy]
        return [*self.rivals, *self.untuned, *reversed(self.on_policy), *others]


@dataclass(frozen=True)
class Job:
    """One run. `kl` is None for an arm without a tuned weight; `equal_seconds`: as long as a run of `Study.clock`."""

    study: Study
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
        name = self.arm.name + (EQUAL_SECONDS if self.equal_seconds else "")
        if not self.is_tuning:
            return name
        return f"{name}, lr {self.lr:g}" + (f", KL {self.kl:g}" if self.kl is not None else "")

    @property
    def name(self) -> str:
        return f"{self.study.name}: {self.variant}, seed {self.seed}"

    @property
    def overrides(self) -> dict[str, Any]:
        """All that is this run's own but the seed, the number of steps and the output directory."""
        root = self.study.root
        data: dict[str, Any] = {"path": str(root / self.arm.data)}
        if self.arm.only_annotated and self.study.annotated:
            data["annotated"] = list(self.study.annotated)
        own = {"training.learning_rate": self.lr, "training.embed_lr": self.lr * EMBED_SHARE}
        split = ("tune" if self.is_tuning else "test") + self.arm.scored_as
        scored_on = str(root / "data" / f"{split}.jsonl")
        files = {"custom.train_jsonl": [data, *self.replayed], "custom.val_jsonl": scored_on}
        return self.arm.overrides | own | files | ({} if self.kl is None else {KL: self.kl})

    @property
    def replayed(self) -> list[dict[str, Any]]:
        if self.study.replay is None:
            return []
        forced = {} if self.arm.program == "train_grpo.py" else {"teacher_forced_ratio": 1.0}
        return [{"path": str(self.study.root / self.study.replay)} | forced]


def grid(study: Study, arm: Arm) -> list[Job]:
    """Return the tuning runs of an arm: the same learning rates for each, times the KL weights where it has one.

    They are runs of `study.tuned_on`, and of its arm of that name, where there is one.
    """
    if study.tuned_on:
        return grid(study.tuned_on, next(own for own in study.tuned_on.arms if own.name == arm.name))
    weights = study.kl_weights if arm.has_kl else (None,)
    return [Job(study, arm, TUNING_SEED, lr, kl) for lr, kl in itertools.product(study.learning_rates, weights)]


def longer_grid(records: Sequence[Record], study: Study, arm: Arm) -> list[Job]:
    """Return the tuning runs of an arm at equal seconds: the same learning rates, with the KL weight of equal steps.

    A longer run may want a lower rate. None before the number of steps is known; where it is the same, `grid`.
    """
    if study.tuned_on and not study.tunes_longer(arm):
        return longer_grid(records, study.tuned_on, next(own for own in study.tuned_on.arms if own.name == arm.name))
    best = tuned(records, study, arm)
    if best is None or not has_seconds(records, study, arm):
        return []
    jobs = [replace(best, study=study, arm=arm, lr=lr, equal_seconds=True) for lr in study.learning_rates]
    return jobs if num_steps(jobs[0], records) > int(study.training["max_steps"]) else grid(study, arm)


def tuned(records: Sequence[Record], study: Study, arm: Arm, equal_seconds: bool = False) -> Job | None:
    """Return the tuning run with the highest F1 on the tuning images; None until all of the grid have finished."""
    jobs = longer_grid(records, study, arm) if equal_seconds else grid(study, arm)
    scored = [(last([record], "f1")[0], job) for job in jobs if (record := find(records, job))]
    return max(scored, key=lambda pair: pair[0])[1] if scored and len(scored) == len(jobs) else None


def tests(records: Sequence[Record], study: Study, arm: Arm, equal_seconds: bool) -> list[Job]:
    """Return an arm's test runs with the settings it was tuned to; none before it is tuned."""
    best = tuned(records, study, arm, equal_seconds)
    return [Job(study, arm, seed, best.lr, best.kl, equal_seconds) for seed in SEEDS] if best else []


def find(records: Sequence[Record], job: Job) -> Record | None:
    """Return the record of a run if its settings are still the same."""
    task, variant = job.study.name, job.variant
    for record in records:
        if record["seed"] == job.seed and record["variant"] == variant and record["task"] == task:
            is_same = (record["overrides"], record["material"]) == (job.overrides, job.study.material)
            return record if is_same else None
    return None


def starts_of(records: Sequence[Record], study: Study) -> list[str]:
    """Return the digests of the start models of a study's runs, as far as their records name them.

    Each machine trains the start model anew, and another kind of processor rounds otherwise.
    """
    own = (run for run in records if run["task"] == study.name and run["material"] == study.material)
    return sorted({run["start"] for run in own if "start" in run})


def missing(records: Sequence[Record], study: Study) -> Iterator[Job]:
    """Yield runs without a record that can be made now, most important first: arm by arm, its tuning, then its tests.

    What an arm's tuning decides comes with the records of it, and equal seconds with those of the clock.
    """
    for arm in study.arms:
        yield from (job for job in planned(records, study, arm) if find(records, job) is None)


def shown(records: Sequence[Record], study: Study, record: Record) -> Record | None:
    """Return a record as the report shows it: of a run that is planned now, with today's settings; else None.

    A run of equal seconds with the learning rate of equal steps is shown by another name until its arm is tuned.
    """
    for arm in study.arms:
        if any(find([record], job) for job in planned(records, study, arm)):
            return record
        if arm.is_rival and (best := tuned(records, study, arm)) and not tuned(records, study, arm, equal_seconds=True):
            if any(find([record], Job(study, arm, seed, best.lr, best.kl, equal_seconds=True)) for seed in SEEDS):
                return record | {"variant": record["variant"] + UNTUNED}
    return None


def planned(records: Sequence[Record], study: Study, arm: Arm) -> list[Job]:
    """Return all runs of an arm that are known by now, each once, in order."""
    jobs = [] if study.tuned_on else grid(study, arm)
    jobs += tests(records, study, arm, equal_seconds=False)
    if arm.is_rival and has_seconds(records, study, arm):
        jobs += longer_grid(records, study, arm) if study.tunes_longer(arm) else []
        jobs += tests(records, study, arm, equal_seconds=True)
    return list(dict.fromkeys(jobs))


def num_left(records: Sequence[Record], study: Study) -> int:
    """Number of runs without a record, those included whose settings are not known yet."""
    left = 0
    for arm in study.arms:
        jobs = planned(records, study, arm)
        total = len(SEEDS) * (1 + arm.is_rival) + (0 if study.tuned_on else len(grid(study, arm)))
        if arm.is_rival and study.tunes_longer(arm):
            known = longer_grid(records, study, arm)
            total += sum(job.equal_seconds for job in known) if known else len(study.learning_rates)
        left += total - sum(find(records, job) is not None for job in jobs)
    return left


def has_seconds(records: Sequence[Record], study: Study, arm: Arm) -> bool:
    """Whether the steps of equal seconds can be fixed: all seeds of the arm and of the clock have finished, and where
    one of both has labels made once, those of the arm that tells what they cost."""
    needed = [arm, study.clock]
    if study.label_maker and arm.has_labels_made_once != study.clock.has_labels_made_once:
        needed.append(study.label_maker)
    done = [[find(records, job) for job in tests(records, study, one, False)] for one in needed]
    return all(runs and all(runs) for runs in done)


def num_steps(job: Job, records: Sequence[Record]) -> int:
    """Number of optimizer steps: the study's, or as many as fit into the quiet seconds of its clock.

    The start model's answers to all training images cost seconds too, once (`seconds_of_answers`). Labels that are
    refreshed cost a rollout at every step. Still no arm gets fewer steps than the clock.
    """
    study, arm = job.study, job.arm
    common = int(study.training["max_steps"])
    if not job.equal_seconds:
        return common
    name = arm.name + EQUAL_SECONDS  # tuning runs, whose names go on, and test runs
    of_task = [run for run in records if run["task"] == study.name and run["material"] == study.material]
    if decided := [run["steps"] for run in of_task if run["variant"].startswith(name)]:
        return decided[0]
    given = common * step_seconds(records, study, study.clock)
    if charged := arm.has_labels_made_once - study.clock.has_labels_made_once:
        given -= charged * seconds_of_answers(records, study)
    return max(common, round(given / step_seconds(records, study, arm)))


def step_seconds(records: Sequence[Record], study: Study, arm: Arm) -> float:
    """Undisturbed seconds of an arm's step: each part as in the run that other work on the machine slowed least.

    All test runs count, and the tuning run with their settings: runs that follow each other are often slowed alike.
    """
    runs = tests_and_tuned(records, study, arm)
    parts = ("prepare", "train", *(["rollout"] if arm.makes_rollouts else []))
    return sum(min(run["step_seconds"][part] for run in runs) for part in parts)


def seconds_of_answers(records: Sequence[Record], study: Study) -> float:
    """Seconds of the start model's answers to all training images, by the rollouts of the arm that makes them anew.

    Those of the policy take up to twice as long, with adapters beside the weights. Where a version has no such arm,
    nothing is charged, which gives the rivals more steps.
    """
    if (maker := study.label_maker) is None:
        return 0.0
    rollout = min(run["step_seconds"]["rollout"] for run in tests_and_tuned(records, study, maker))
    return rollout * study.num_train / int(study.training["per_device_train_batch_size"])


def tests_and_tuned(records: Sequence[Record], study: Study, arm: Arm) -> list[Record]:
    """Return an arm's test runs, at equal steps and at equal seconds, and the tuning run that chose their settings."""
    best = tuned(records, study, arm)
    names = (arm.name, arm.name + EQUAL_SECONDS, *([best.variant] if best else []))
    runs = [run for name in names for run in runs_of(records, study.name, name)]
    return [run for run in runs if run["material"] == study.material]
