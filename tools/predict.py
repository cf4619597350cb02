"""Predicted seconds per optimizer step, from a small model whose constants `make bench` measures (docs/performance.md).

    rollout = answers of a step * new tokens * 2 * parameters / (rollout devices * rollout_flops_per_s)
    train   = tokens of a step * FLOPs per token / (learners * train_flops_per_s)
    prepare = answers per learner * prepare_s
    sync    = sync_fixed_s + bytes that can have changed / sync_bytes_per_s
    step    = rollout + train + prepare + sync, with prefetch max(rollout, train + prepare + sync)

FLOPs per token: 2 per parameter forward, 2 for the gradient of activations, 2 per trained parameter, and 2 once more
where checkpointing computes the forward again. Attention over the length, the vision tower's own tokens, prefill and
the cost of more devices (all-reduce, tensor parallel) are left out, so it is a guide to splits, not a promise.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from utils.config.memory import ModelSize
from utils.config.plan import max_tokens_per_step
from utils.config.schema import Config

CONSTANTS = Path(__file__).parents[1] / "benchmarks" / "constants.json"
SETTLING_STEPS = 3  # of a run, which do not count: the first is cold and carries the first, full sync


@dataclass(frozen=True)
class Constants:
    """What one device of a kind (`cpu`, `cuda`) does; a figure that was not measured is None."""

    train_flops_per_s: float | None = None
    rollout_flops_per_s: float | None = None
    prepare_s: float | None = None  # per answer: parse, match, target
    sync_fixed_s: float | None = None
    sync_bytes_per_s: float | None = None

    @property
    def missing(self) -> list[str]:
        return [name for name, value in asdict(self).items() if value is None]


@dataclass(frozen=True)
class Work:
    """What one optimizer step amounts to. `num_tokens`: trained on; `sync_bytes`: merged tensors that can change."""

    num_answers: int
    new_tokens: float  # per answer
    num_tokens: float
    parameters: int
    trainable: int
    sync_bytes: float
    recompute: bool = False

    @property
    def train_flops(self) -> float:
        passes = 3 if self.recompute else 2
        return self.num_tokens * 2 * (passes * self.parameters + self.trainable)

    @property
    def rollout_flops(self) -> float:
        return self.num_answers * self.new_tokens * 2 * self.parameters


@dataclass(frozen=True)
class StepTime:
    """Seconds by part. `step` is what passes with or without prefetch, as the config says."""

    rollout: float
    train: float
    prepare: float
    sync: float
    prefetch: bool

    @property
    def step(self) -> float:
        learner = self.train + self.prepare + self.sync
        return max(self.rollout, learner) if self.prefetch else self.rollout + learner


def predict(work: Work, constants: Constants, learners: int, rollout_devices: int, prefetch: bool) -> StepTime:
    """Raises ValueError when a constant has not been measured."""
    if constants.missing:
        raise ValueError(f"not measured: {', '.join(constants.missing)}")
    return StepTime(
        rollout=work.rollout_flops / (rollout_devices * constants.rollout_flops_per_s),
        train=work.train_flops / (learners * constants.train_flops_per_s),
        prepare=work.num_answers / learners * constants.prepare_s,
        sync=constants.sync_fixed_s + work.sync_bytes / constants.sync_bytes_per_s,
        prefetch=prefetch,
    )


def calibrate(work: Work, measured: StepTime, learners: int = 1, rollout_devices: int = 1) -> dict[str, float]:
    """The constants that would have predicted `measured`, but for the sync's bandwidth, which a step of a small model
    does not show."""
    return {
        "train_flops_per_s": work.train_flops / (learners * measured.train),
        "rollout_flops_per_s": work.rollout_flops / (rollout_devices * measured.rollout),
        "prepare_s": measured.prepare * learners / work.num_answers,
        "sync_fixed_s": measured.sync,
    }


def read_steps(run_dir: Path) -> list[dict[str, float]]:
    """From a run's curves, per optimizer step: seconds by part, `answers`, `new_tokens` (per answer), `tokens` (trained
    on), `sync_bytes`."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    tags = {part: f"seconds/{part}" for part in ("rollout", "train", "sync", "prepare", "step")}
    tags |= {"new_tokens": "rollout/new_tokens_mean", "tokens": "train/tokens_per_s", "answers": "rollout/num_images"}
    tags |= {"sync_bytes": "sync/bytes"}
    curves = {part: {event.step: event.value for event in events.Scalars(tag)} for part, tag in tags.items()}
    steps = [{part: curve.get(step, 0.0) for part, curve in curves.items()} for step in sorted(curves["step"])]
    return [step | {"tokens": step["tokens"] * step["step"]} for step in steps]


def median_step(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each figure's median on its own."""
    return {part: statistics.median(step[part] for step in steps) for part in steps[0]}


def work_of_step(step: Mapping[str, float], size: ModelSize, recompute: bool = False) -> Work:
    """What a measured step amounted to; its sync is all in the fixed part."""
    return Work(
        num_answers=round(step["answers"]),
        new_tokens=step["new_tokens"],
        num_tokens=step["tokens"],
        parameters=size.total,
        trainable=size.trainable,
        sync_bytes=0.0,
        recompute=recompute,
    )


def time_of_step(step: Mapping[str, float]) -> StepTime:
    return StepTime(step["rollout"], step["train"], step["prepare"], step["sync"], prefetch=False)


def constants_of_run(run_dir: Path, cfg: Config, size: ModelSize, learners: int, rollout_devices: int) -> Constants:
    """All constants from a finished run without prefetch; the sync counts as bandwidth alone there.

    Raises:
        ValueError: it had prefetch (the rollouts of a step then belong to another), or too few steps.
    """
    if cfg.rm.async_.enabled:
        raise ValueError(f"{run_dir}: with prefetch a step's seconds are not its own; measure a run without")
    steps = read_steps(run_dir)[SETTLING_STEPS:]
    if not steps:
        raise ValueError(f"{run_dir}: needs more than {SETTLING_STEPS} steps")
    step = median_step(steps)
    work = work_of_step(step, size, cfg.training.gradient_checkpointing)
    constants = calibrate(work, time_of_step(step), learners, rollout_devices)
    bandwidth = step["sync_bytes"] / step["sync"]
    return Constants(**constants | {"sync_fixed_s": 0.0, "sync_bytes_per_s": bandwidth})


def work_of(
    cfg: Config,
    size: ModelSize,
    learners: int,
    new_tokens: float | None = None,
    segment_tokens: float | None = None,
) -> Work:
    """The work of a step: full rows and the longest answers, unless told how long they are on average."""
    training = cfg.training
    num_samples = learners * training.per_device_train_batch_size * training.gradient_accumulation_steps
    num_answers = num_samples * cfg.answers_per_sample
    bytes_each = 4 if cfg.model.dtype == "float32" else 2
    return Work(
        num_answers=num_answers,
        new_tokens=new_tokens or cfg.rm.max_new_tokens,
        num_tokens=num_answers * segment_tokens if segment_tokens else max_tokens_per_step(cfg, learners),
        parameters=size.total,
        trainable=size.trainable,
        sync_bytes=size.can_change * bytes_each,
        recompute=training.gradient_checkpointing,
    )


def load_constants(kind: str, path: Path = CONSTANTS) -> Constants:
    """Those of `kind` as far as they were measured."""
    return Constants(**(json.loads(path.read_text()).get(kind, {}) if path.exists() else {}))


def write_constants(kind: str, values: dict[str, float], path: Path = CONSTANTS) -> None:
    """Replace the given figures of `kind`, keep all others."""
    known = json.loads(path.read_text()) if path.exists() else {}
    rounded = {name: float(f"{value:.4g}") for name, value in values.items()}
    known[kind] = {**known.get(kind, {}), **rounded}
    path.write_text(json.dumps(known, indent=2) + "\n")
