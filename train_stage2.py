"""Stage 2: on-policy rollout-matching training.

    deepspeed --num_gpus 2 train_stage2.py --config configs/demo/stage2.yaml     (CPU; see `make demo`)
    deepspeed --include localhost:3 train_stage2.py --config configs/stage2/qwen3vl_8b_3v1.yaml

Start the rollout server first (`make server CONFIG=...`), unless the learners generate themselves (`vllm.mode:
colocate`, or `rollout_backend: hf`). Every optimizer step: the current weights go to the engine that generates; the
model answers on the step's images; each answer is parsed token by token, its objects matched with the ground truth, and
one training sequence written from the model's own prefix and every object it missed; the sequences are packed into
rows; one forward and backward per row; one optimizer step.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from utils import targets
from utils.capacity import EVAL_MICRO_STEP
from utils.config.load import Config
from utils.data.encoding import EncodedPrompt
from utils.data.samples import Sample
from utils.geometry import iou_matrix
from utils.learner.learner import StepResult
from utils.learner.objectives import MatchingObjective
from utils.matching import match
from utils.packing import CarryBuffer, check_fits, segments_from_state, segments_to_state
from utils.parsing import parse_answer
from utils.rollout.backend import Decoding, RolloutResult, policy_lags
from utils.run.monitor import collapse_warnings
from utils.run.program import run_program
from utils.run.sample_sheets import Example, SampleDump
from utils.run.session import Session, make_prefetcher
from utils.run.setup import open_session
from utils.scores import count_sample, prediction_record, scores
from utils.targets import Segment, TargetOptions, build_target

logger = logging.getLogger("train_stage2")


def main() -> None:
    run_program("train_stage2.py", "rollout_matching_sft", __doc__, set_up, train)


@dataclass(kw_only=True)
class Run(Session):
    """A session with what only stage 2 holds. No function below hides state elsewhere."""

    buffer: CarryBuffer  # finished segments that wait for a row
    dump: SampleDump

    def __post_init__(self) -> None:
        self.prefetcher = make_prefetcher(self, draw, ask, finish_micro_step, versions_of, encode)


def set_up(cfg: Config, resume: str | None = None) -> Run:
    """A run that is ready for its next step; exit status 2 with one message for a user's mistake."""
    session = open_session(cfg, resume)
    buffer = CarryBuffer(cfg.global_max_length, cfg.training.packing_buffer)
    dump_options = cfg.rm.monitor_dump.model_dump()
    dump = SampleDump(Path(cfg.training.output_dir), session.table, **dump_options, enabled=session.ranks.is_main)
    run = Run(**vars(session), buffer=buffer, dump=dump)
    run.resume(partial(restore, run))
    return run


def rank_state(run: Run, owes_evaluation: bool) -> dict[str, Any]:
    """Everything of this rank that a checkpoint holds beside model and optimizer (LRN-5)."""
    ahead, num_drawn = run.prefetcher.ahead(run.steps_done)
    own = {
        "buffer": run.buffer.state_dict(),
        "ahead": [made.state_dict() for made in ahead],
    }
    return run.state_dict(owes_evaluation, num_undone=num_drawn * run.cfg.training.per_device_train_batch_size) | own


def restore(run: Run, state: dict[str, Any]) -> None:
    """Go on from `rank_state`.

    Raises:
        ValueError: other data, or a waiting segment that is longer than a row now is.
    """
    run.buffer.load_state_dict(state["buffer"])
    run.load_state_dict(state)
    run.prefetcher.restore(run.steps_done, [MicroStep.from_state(made) for made in state["ahead"]])


# ---------------------------------------------------------------------------------------------------------------------
# the loop


def train(run: Run) -> None:
    """All optimizer steps to come: sync, roll out and build rows, forward and backward, log.

    Raises:
        Stopped: a signal came; the step it came in is finished and saved.
    """
    run.begin(partial(evaluate, run))
    for step in range(run.steps_done, run.num_steps):
        with run.timed("step"):
            rows, rollouts = prepare_rows(run, step)
            with run.timed("train"):
                result = run.learner.step(
                    [run.collate(row) for row in rows], MatchingObjective(run.cfg.rm.losses), step
                )
        run.steps_done = step + 1
        lags = policy_lags((segment.policy_version for row in rows for segment in row), step)
        signal_name = log_step(run, step + 1, result, rollouts, lags)
        run.end_step(signal_name, partial(evaluate, run), partial(rank_state, run))
    run.finish(segments_left=sum(run.ranks.gather(len(run.buffer))))


@dataclass
class Rollouts:
    """What the answers of one step were like: summable counts, and the length of each in tokens."""

    counts: Counter = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)  # the first few, for the sample sheets

    def add(self, other: "Rollouts") -> None:
        self.counts.update(other.counts)
        self.lengths += other.lengths
        self.examples += other.examples


@dataclass
class Answered:
    """One micro-step's samples with the answers of those that were asked for, by index (DAT-4)."""

    samples: Sequence[Sample]
    prompts: list[EncodedPrompt]
    answers: dict[int, RolloutResult]


@dataclass
class MicroStep:
    """Finished training sequences of one micro-step's own samples, and what their answers were like."""

    segments: list[Segment]
    rollouts: Rollouts

    def state_dict(self) -> dict[str, Any]:
        """Plain types and tensors; examples for the sample sheets are left out."""
        counts, lengths = dict(self.rollouts.counts), self.rollouts.lengths
        return {"segments": segments_to_state(self.segments), "counts": counts, "lengths": lengths}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "MicroStep":
        return cls(segments_from_state(state["segments"]), Rollouts(Counter(state["counts"]), state["lengths"]))


def prepare_rows(run: Run, step: int) -> tuple[list[list[Segment]], Rollouts]:
    """Rollouts and finished rows of all micro-steps of optimizer step `step`; a failure anywhere stops all ranks."""
    micro_steps = run.on_current_weights(step, lambda: run.prefetcher.take(step), f"preparing step {step}")
    rollouts = Rollouts()
    for made in micro_steps:
        rollouts.add(made.rollouts)
    return [next_row(run, made.segments) for made in micro_steps], rollouts


def next_row(run: Run, segments: list[Segment]) -> list[Segment]:
    """What a micro-step trains, given its own finished segments (PCK-2, PCK-6)."""
    if not run.cfg.training.packing:
        check_fits(segments, run.cfg.global_max_length)
        return segments
    run.buffer.extend(segments)
    return run.buffer.pop_row()


def draw(run: Run) -> list[Sample]:
    """The next micro-step's samples (PCK-7)."""
    return run.stream.next(run.cfg.training.per_device_train_batch_size)


def encode(run: Run, samples: Sequence[Sample]) -> tuple[Sequence[Sample], list[EncodedPrompt]]:
    """A micro-step's samples and their prompts."""
    with run.timed("prepare"):
        return samples, run.encode(samples)


def ask(run: Run, encoded: tuple[Sequence[Sample], list[EncodedPrompt]], step: int, micro_step_idx: int) -> Answered:
    """The policy's answers on samples that `step` will train on; a teacher-forced sample gets none."""
    samples, prompts = encoded
    asked = np.flatnonzero(~teacher_forced(run, step, micro_step_idx, len(samples))).tolist()
    with run.timed("rollout"):
        answers = run.roll_out(
            [samples[i] for i in asked],
            [prompts[i] for i in asked],
            decoding(run.cfg),
            step,
            micro_step_idx,
            strict=not run.cfg.rm.async_.enabled,
        )
    return Answered(samples, prompts, dict(zip(asked, answers, strict=True)))


def finish_micro_step(run: Run, asked: Answered, step: int) -> MicroStep:
    """Answers to finished training sequences: parse, match, target."""
    rollouts = Rollouts()
    with run.timed("prepare"):
        segments = [
            make_segment(run, sample, prompt, asked.answers.get(index), rollouts)
            for index, (sample, prompt) in enumerate(zip(asked.samples, asked.prompts, strict=True))
        ]
    return MicroStep(segments, rollouts)


def versions_of(made: MicroStep) -> list[str | None]:
    """The weights that answered, for each segment; None for a teacher-forced one."""
    return [segment.policy_version for segment in made.segments]


def teacher_forced(run: Run, step: int, micro_step_idx: int, num_samples: int) -> np.ndarray:
    """Which samples train on the plain ground truth (DAT-4), `bool [num_samples]`; fixed by seed, step and rank."""
    dice = np.random.default_rng([run.cfg.training.seed, step, micro_step_idx, run.ranks.rank])
    return dice.random(num_samples) < run.cfg.rm.teacher_forced_ratio


def make_segment(
    run: Run, sample: Sample, prompt: EncodedPrompt, answer: RolloutResult | None, rollouts: Rollouts
) -> Segment:
    """One training sequence from one answer: parse, match, target. Without an answer, the plain ground truth."""
    options, threshold = target_options(run.cfg), run.cfg.rm.matching.iou_threshold
    if answer is None:
        target = targets.ground_truth_target(sample.objects, run.table, options)
    else:
        parsed = parse_answer(answer.response_token_ids, run.table)
        pairs = match(iou_matrix([pred.object for pred in parsed.objects], sample.objects), threshold)
        target = build_target(parsed, sample.objects, pairs, run.table, options)
        rollouts.counts.update(count_sample(parsed, sample.objects, threshold, answer.finish_reason == "length"))
        rollouts.counts.update(appended=target.num_appended, failed=int(answer.error is not None))
        rollouts.lengths.append(len(answer.response_token_ids))
        if len(rollouts.examples) < run.cfg.rm.monitor_dump.num_samples:
            rollouts.examples.append(Example(sample, answer, parsed, pairs, target))
    return targets.make_segment(
        sample.id,
        prompt.prompt_token_ids,
        target,
        run.table,
        prompt.pixel_values,
        prompt.image_grid_thw,
        policy_version=None if answer is None else answer.weight_version,
    )


def evaluate(run: Run, step: int) -> None:
    """Greedy answers on the validation samples, scored as production would see them (LRN-7)."""

    def answer_all() -> tuple[Counter, list[dict[str, Any]]]:
        with run.timed("eval"):
            samples = run.val_samples[run.ranks.rank :: run.ranks.world_size]
            prompts = run.encode(samples)
            answers = run.roll_out(samples, prompts, greedy(run.cfg), step, EVAL_MICRO_STEP)
            counts, records = Counter(), []
            for sample, answer in zip(samples, answers, strict=True):
                parsed = parse_answer(answer.response_token_ids, run.table)
                threshold = run.cfg.rm.eval.iou_threshold
                counts.update(count_sample(parsed, sample.objects, threshold, answer.finish_reason == "length"))
                records.append(prediction_record(sample, parsed, run.table.format.max_bin))
            return counts, records

    counts, predictions = run.on_current_weights(step, answer_all, f"evaluation at step {step}")
    result = scores(run.ranks.sum(counts))
    calls = run.log_calls(step, "eval")
    run.log_evaluation(step, result, {f"eval/{name}": value for name, value in result.items()} | calls, predictions)


def log_step(run: Run, step: int, result: StepResult, rollouts: Rollouts, lags: list[int]) -> str | None:
    """TensorBoard and the progress line for optimizer step `step` (1-based: steps done), summed over ranks (LOG-3).

    Seconds are those that passed since the last step was logged: with prefetch, rollouts of coming steps are in them.

    Returns:
        The signal that asks the run to end, if any rank has got one; the same on all ranks.
    """
    own = (rollouts.counts, rollouts.lengths, run.pop_seconds(), result.num_tokens, lags, run.stop.signal_name)
    gathered = run.ranks.gather(own)
    counts: Counter = Counter()
    for part in gathered:
        counts.update(part[0])  # unlike a sum of Counters this keeps zeros, which belong into the curves
    lengths = np.array([length for part in gathered for length in part[1]] or [0])
    seconds = {
        name: max(part[2].get(name, 0.0) for part in gathered)
        for name in ("rollout", "sync", "prepare", "train", "step")
    }
    lags = [lag for part in gathered for lag in part[4]] or [0]
    quality = scores(counts)
    tokens_per_s = sum(part[3] for part in gathered) / max(seconds["step"], 1e-9)
    values = {
        **{f"loss/{name}": value for name, value in result.losses.items()},
        **{f"learning_rate/{name}": value for name, value in result.learning_rates.items()},
        **{f"rollout/{name}": value for name, value in counts.items()},
        **{f"rollout/{name}": quality[name] for name in ("f1", "f1_no_label", "precision", "recall", "parse_rate")},
        **{f"seconds/{name}": value for name, value in seconds.items()},
        "rollout/new_tokens_mean": float(lengths.mean()),
        "rollout/new_tokens_p90": float(np.percentile(lengths, 90)),
        "rollout/new_tokens_p99": float(np.percentile(lengths, 99)),
        "train/grad_norm": result.grad_norm,
        "train/tokens_per_s": tokens_per_s,
        "train/fill_ratio": result.fill_ratio,
        "train/buffer_length": len(run.buffer),
        "train/policy_lag": float(np.mean(lags)),  # of what was trained: waiting in the carry buffer counts
        "train/policy_lag_max": float(max(lags)),
        "rollout/remade": float(run.prefetcher.num_remade),
    }
    values |= run.log_calls(step, "train") | run.watch.pop_metrics() | run.pop_sync_metrics()
    run.monitor.scalars(step, values)
    run.dump.write(step, rollouts.examples[: run.dump.num_samples], run.monitor)
    run.monitor.progress(step, loss=result.losses["total"], f1=quality["f1"], tokens_per_s=tokens_per_s)
    if run.cfg.training.packing and result.fill_ratio < run.cfg.training.packing_min_fill_ratio:
        logger.warning(
            "step %d: rows are filled to %.2f only; a shorter global_max_length wastes less", step, result.fill_ratio
        )
    if counts["num_images"]:
        for warning in collapse_warnings(quality, run.cfg.training.collapse.model_dump()):
            logger.warning("step %d: %s", step, warning)
    return next((part[5] for part in gathered if part[5]), None)


# ---------------------------------------------------------------------------------------------------------------------
# small translations from the config


def target_options(cfg: Config) -> TargetOptions:
    options = cfg.rm.targets
    return TargetOptions(
        label=cfg.rm.matching.label,
        trim_trailing_unmatched=options.trim_trailing_unmatched,
        supervise_structure=options.supervise_structure,
        desc_weight=cfg.rm.losses.desc,
        coord_weight=cfg.rm.losses.coord,
    )


def decoding(cfg: Config) -> Decoding:
    return Decoding(**cfg.rm.decoding.model_dump(), max_new_tokens=cfg.rm.max_new_tokens)


def greedy(cfg: Config) -> Decoding:
    return Decoding(temperature=0.0, top_p=1.0, top_k=-1, repetition_penalty=1.0, max_new_tokens=cfg.rm.max_new_tokens)


if __name__ == "__main__":
    main()
