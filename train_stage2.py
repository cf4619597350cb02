"""Stage 2: on-policy rollout-matching training.

    make train GPUS=3 CONFIG=configs/stage2/qwen3vl_8b_3v1.yaml
    deepspeed --include localhost:3 train_stage2.py --config configs/stage2/qwen3vl_8b_3v1.yaml      (the same)

Start the rollout server first (`make server CONFIG=...`), unless the learners generate themselves (`vllm.mode:
colocate`, or `rollout_backend: hf`) or nothing is generated (stage 1: `teacher_forced_ratio: 1`). In every
optimizer step the current weights go to the engine that generates. The model responds to the step's images. Each
response is parsed token by token, its objects are matched with the ground truth, and one training sequence is written
from the model's own prefix and every object it missed. The sequences are packed into rows: one forward and backward per
row, one optimizer step.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from utils import targets
from utils.config.load import Config
from utils.config.schema import RM, RolloutMatching
from utils.data.encoding import EncodedPrompt
from utils.data.samples import Sample
from utils.drafts import Arrangement
from utils.learner.learner import NotFinite, StepResult
from utils.learner.objectives import MatchingObjective
from utils.packing import Batch, CarryBuffer, check_fits, segments_from_state, segments_to_state
from utils.parsing import TokenTable, parse_answer
from utils.rollout.backend import RolloutResult, RolloutSampling, policy_lags
from utils.run.program import run_program
from utils.run.records import step_metrics
from utils.run.sample_sheets import Example, SampleDump
from utils.run.session import Session
from utils.run.setup import open_session
from utils.scores import (
    Overlaps,
    count_evaluation,
    count_sample,
    evaluation_scores,
    label_counts,
    match_by_geometry,
    prediction_record,
    scores,
)
from utils.targets import Segment, TargetOptions, build_target

logger = logging.getLogger("train_stage2")

SHOWN_SCORES = ("f1", "f1_no_label", "precision", "recall", "parse_rate")  # of a step's rollouts


def main() -> None:
    run_program("train_stage2.py", "rollout_matching_sft", __doc__, set_up, train)


def set_up(cfg: Config, resume: str | None = None, accepted_changes: Sequence[str] = ()) -> "Stage2":
    """Build a run that is ready for its next step; exit status 2 with one message for a user's mistake."""
    run = Stage2(open_session(cfg, resume, accepted_changes, metric=cfg.training.metric_for_best_model))
    run.session.resume(run)
    return run


def train(run: "Stage2") -> None:
    """Train all optimizer steps to come.

    Raises:
        Stopped: a signal came; all finished steps are saved.
    """
    session = run.session
    session.begin(run)
    for step in range(session.steps_done, session.num_steps):
        with session.timed("step"):
            # Weights current; then, in threads, the methods of `Stage2` in order: draw, encode, generate, judge.
            micro_steps = session.prepare(step)
            with session.timed("train"):
                rows, result = run.learn(micro_steps, step)
        session.steps_done, run.waiting = step + 1, run.buffer.state_dict()
        record = partial(log_step, run, step + 1, result, micro_steps, rows)
        session.end_step(run, session.on_all_ranks(record, f"recording optimizer step {step + 1}"))
    session.finish(segments_left=sum(session.ranks.gather(len(run.buffer))))


@dataclass
class Rollouts:
    """Statistics of responses: summable counts, and the length of each in tokens."""

    counts: Counter = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)  # the first few, for the sample sheets


@dataclass
class Responses:
    """One micro-step's samples with the responses, by index; a teacher-forced sample has none (DAT-4)."""

    samples: Sequence[Sample]
    prompts: list[EncodedPrompt]
    results: dict[int, RolloutResult]


@dataclass
class MicroStep:
    """Finished training sequences of one micro-step's own samples, and the statistics of their responses."""

    segments: list[Segment]
    rollouts: Rollouts

    def state_dict(self) -> dict[str, Any]:
        """Plain types and tensors; examples for the sample sheets are left out."""
        counts, lengths = dict(self.rollouts.counts), self.rollouts.lengths
        return {"segments": segments_to_state(self.segments), "counts": counts, "lengths": lengths}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "MicroStep":
        return cls(segments_from_state(state["segments"]), Rollouts(Counter(state["counts"]), state["lengths"]))


class Stage2:
    """A session with what only stage 2 holds.

    `draw`, `encode`, `generate` and `judge` make a micro-step, in this order, in the threads that utils/run/prefetch.py
    shows; `learn` runs in the main thread.

    Attributes:
        waiting: state of the carry buffer after the last trained step; a resumed run packs on from there.
        is_sparse: the last step's rows were less full than `packing_min_fill_ratio`.
        drop_reasons: counters of unreadable objects so far; in steps without such objects their curves are at 0.
    """

    is_sparse = False

    def __init__(self, session: Session) -> None:
        cfg = session.cfg
        self.session = session
        self.buffer = CarryBuffer(cfg.global_max_length, cfg.training.packing_buffer)  # finished, waiting for a row
        self.waiting = self.buffer.state_dict()
        self.drop_reasons: set[str] = set()
        dump_options = cfg.rm.monitor_dump.model_dump()
        self.dump = SampleDump(session.run_dir, session.data.table, **dump_options, enabled=session.ranks.is_main)
        weight = cfg.rm.teacher.weight if cfg.rm.teacher else 0.0
        self.objective = MatchingObjective(cfg.rm.losses, session.learner.start_head, weight)
        session.prefetch(self)

    # A micro-step

    def draw(self) -> list[Sample]:
        """Draw the next micro-step's samples (PCK-7)."""
        return self.session.data.stream.next(self.session.cfg.training.per_device_train_batch_size)

    def encode(self, samples: Sequence[Sample]) -> tuple[Sequence[Sample], list[EncodedPrompt]]:
        """Encode the prompts of a micro-step's samples."""
        with self.session.timed("prepare"):
            return samples, self.session.data.encode(samples)

    def generate(
        self, encoded: tuple[Sequence[Sample], list[EncodedPrompt]], step: int, micro_step_idx: int
    ) -> Responses:
        """Get the policy's responses to samples that `step` will train on, but for the teacher-forced ones."""
        samples, prompts = encoded
        cfg, rank = self.session.cfg, self.session.ranks.rank
        is_forced = teacher_forced(cfg, step, micro_step_idx, rank, samples)
        indices = np.flatnonzero(~is_forced).tolist()
        with self.session.timed("rollout"):
            results = self.session.policy.generate(
                [samples[i] for i in indices],
                [prompts[i] for i in indices],
                RolloutSampling(**cfg.rm.decoding.model_dump(), max_new_tokens=cfg.rm.max_new_tokens),
                step,
                micro_step_idx,
                allow_stale=cfg.rm.async_.enabled,
            )
        return Responses(samples, prompts, dict(zip(indices, results, strict=True)))

    def judge(self, responses: Responses, step: int) -> MicroStep:
        """Turn responses into training sequences: parse, match, target."""
        rm, table, rollouts = self.session.cfg.rm, self.session.data.table, Rollouts()
        with self.session.timed("prepare"):
            segments = [
                self.session.place(make_segment(sample, prompt, responses.results.get(index), table, rm, rollouts))
                for index, (sample, prompt) in enumerate(zip(responses.samples, responses.prompts, strict=True))
            ]
        if self.session.teacher is not None:
            with self.session.timed("teacher"):
                self.session.teacher.score(responses.samples, segments, step)
        return MicroStep(segments, rollouts)

    def lag(self, micro_step: MicroStep, step: int) -> int:
        """Age in optimizer steps of the oldest weights in a micro-step that `step` would train."""
        return max(policy_lags((segment.policy_version for segment in micro_step.segments), step), default=0)

    def pack(self, micro_step: MicroStep) -> list[Segment]:
        """Choose what a micro-step trains, given its own finished segments (PCK-2, PCK-6)."""
        cfg = self.session.cfg
        if not cfg.training.packing:
            check_fits(micro_step.segments, cfg.global_max_length)
            return micro_step.segments
        self.buffer.extend(micro_step.segments)
        return self.buffer.pop_row()

    def learn(self, micro_steps: Sequence[MicroStep], step: int) -> tuple[list[list[Segment]], StepResult]:
        """Take one optimizer step; returns the rows that it trained as well."""

        def lay_out() -> tuple[list[list[Segment]], list[Batch]]:
            rows = [self.pack(micro_step) for micro_step in micro_steps]  # all before the first backward (PCK-5)
            return rows, [self.session.collate(row) for row in rows]

        rows, batches = self.session.on_all_ranks(lay_out, f"packing the rows of optimizer step {step + 1}")
        return rows, self.update(batches, step)

    def update(self, batches: Sequence[Batch], step: int) -> StepResult:
        """Change the weights by a step's rows."""
        learner = self.session.learner
        if self.session.cfg.rm.losses.reference_kl:
            learner.add_start_states(batches)
        if self.objective.teacher_weight:
            learner.share_teacher_chunks(batches)
        with self.session.finished_steps_saved(NotFinite):
            return learner.step(batches, self.objective, step)

    # Evaluation and checkpoints

    def evaluate(self, step: int) -> None:
        """Score greedy responses to the validation samples as production would see them (LRN-7)."""
        table, settings = self.session.data.table, self.session.cfg.rm.eval

        def score(sample: Sample, result: RolloutResult) -> tuple[Counter, dict[str, Any]]:
            parsed = parse_answer(result.response_token_ids, table)
            truncated = result.finish_reason == "length"
            failed = result.error is not None
            counts = count_evaluation(parsed, sample, settings.iou_threshold, truncated, failed)
            return counts, prediction_record(sample, parsed, result.logprobs, result.text, result.finish_reason)

        scored = self.session.score_validation(step, score)
        counts: Counter = Counter()
        for own, _ in scored:
            counts.update(own)
        summed = self.session.ranks.sum(counts)
        result, predictions = evaluation_scores(summed, settings.new_labels), [prediction for _, prediction in scored]
        more = {"labels": label_counts(summed), "new_labels": settings.new_labels}
        self.session.log_evaluation(step, result, predictions, more)

    def state_dict(self) -> dict[str, Any]:
        """This rank's data position, carry buffer and prepared micro-steps (LRN-5)."""
        prepared, num_drawn = self.session.prefetcher.prepared_from(self.session.steps_done)
        num_undone = num_drawn * self.session.cfg.training.per_device_train_batch_size  # drawn again after a resume
        return {
            "stream": self.session.data.stream.state_dict(num_undone),
            "buffer": self.waiting,
            "ahead": [micro_step.state_dict() for micro_step in prepared],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            ValueError: other data, a waiting segment that is longer than a row now is, or one that no teacher has seen.
        """
        # Without a teacher, what an earlier one said of a segment is not read.
        waiting = segments_from_state([own for part in (state["buffer"], *state["ahead"]) for own in part["segments"]])
        unseen = [own.sample_id for own in waiting if len(own.teacher_ids) != len(own.unlabelled_index)]
        if self.session.cfg.rm.teacher and unseen:
            raise ValueError(
                f"{RM}.teacher: {len(unseen)} sequences of the checkpoint that still wait for a row (sample "
                f"{unseen[0]}, ...) were made without it; resume with the old setting, or use a new training.output_dir"
            )
        check_fits(waiting, self.session.cfg.global_max_length)
        self.buffer.load_state_dict(state["buffer"])
        self.waiting = self.buffer.state_dict()
        self.session.data.stream.load_state_dict(state["stream"])
        prepared = [MicroStep.from_state(saved) for saved in state["ahead"]]
        self.session.prefetcher.restore(self.session.steps_done, prepared)


def teacher_forced(cfg: Config, step: int, micro_step_idx: int, rank: int, samples: Sequence[Sample]) -> np.ndarray:
    """Which samples train on the plain ground truth (DAT-4, DAT-5), bool `[n]`; fixed by seed, step and rank."""
    generator = np.random.default_rng([cfg.training.seed, step, micro_step_idx, rank])
    return generator.random(len(samples)) < [cfg.forced_ratio(sample.teacher_forced_ratio) for sample in samples]


def make_segment(
    sample: Sample,
    prompt: EncodedPrompt,
    response: RolloutResult | None,
    table: TokenTable,
    rm: RolloutMatching,
    rollouts: Rollouts,
) -> Segment:
    """Write the training sequence of one response: parse, match, target. Without one, of the plain ground truth."""
    options = target_options(rm)
    if response is None:
        target = targets.ground_truth_target(sample.objects, table, options, sample.annotated)
    else:
        parsed = parse_answer(response.response_token_ids, table)
        threshold = rm.matching.iou_threshold
        overlaps = Overlaps(parsed.pred_objects, sample.objects)
        pairs = match_by_geometry(overlaps, threshold, sample.annotated)
        target = build_target(parsed, sample.objects, pairs, table, options, sample.annotated)
        truncated = response.finish_reason == "length"
        rollouts.counts.update(count_sample(parsed, sample.objects, threshold, truncated, sample.annotated, overlaps))
        rollouts.counts.update(appended=target.num_appended, failed=int(response.error is not None))
        if response.error is None:
            rollouts.lengths.append(len(response.response_token_ids) + (response.stop_token_id is not None))
        if rm.monitor_dump.every_steps and len(rollouts.examples) < rm.monitor_dump.num_samples:
            rollouts.examples.append(Example(sample, response, parsed, pairs, target))
    return targets.make_segment(
        sample.id,
        prompt.prompt_token_ids,
        target,
        table,
        prompt.vision,
        policy_version=None if response is None else response.weight_version,
    )


def target_options(rm: RolloutMatching) -> TargetOptions:
    return TargetOptions(
        label=rm.matching.label,
        arrangement=Arrangement(**rm.targets.model_dump(exclude={"supervise_structure", "supervise_closing"})),
        supervise_structure=rm.targets.supervise_structure,
        supervise_closing=rm.targets.supervise_closing,
        desc_weight=rm.losses.desc,
        coord_weight=rm.losses.coord,
    )


def log_step(
    run: Stage2, step: int, result: StepResult, micro_steps: list[MicroStep], rows: list[list[Segment]]
) -> str | None:
    """Log TensorBoard's curves and the progress line of optimizer step `step` (1-based: steps done), over all ranks
    (LOG-3).

    Returns:
        The signal that requests the end of the run, received by any rank; the same on all ranks.
    """
    session, counts = run.session, Counter()
    rollouts = [micro_step.rollouts for micro_step in micro_steps]
    for own in rollouts:
        counts.update(own.counts)  # unlike a sum of Counters this keeps zeros, which belong in the curves
    ranks = session.gather_step(
        result,
        counts=counts,
        buffer_length=len(run.buffer),
        lengths=[length for own in rollouts for length in own.lengths],
        # Of what was trained: time in the carry buffer counts.
        lags=policy_lags((segment.policy_version for row in rows for segment in row), step - 1),
    )
    counts = Counter()
    for own in ranks["counts"]:
        counts.update(own)
    if counts["num_images"]:
        run.drop_reasons |= {name for name in counts if name.startswith("dropped/")}
        counts.update(dict.fromkeys(run.drop_reasons, 0))
    quality = scores(counts)
    metrics = {
        **{f"loss/{name}": value for name, value in result.losses.items()},
        **{f"rollout/{name}": value for name, value in counts.items()},
        **{f"rollout/{name}": quality[name] for name in SHOWN_SCORES if counts["num_images"]},
        **step_metrics(result, ranks),
        "train/buffer_length": max(ranks["buffer_length"]),
    }
    shown = {"loss": result.losses["total"], **({"f1": quality["f1"]} if counts["num_images"] else {})}
    session.log_step(step, metrics, quality if counts["num_images"] else None, **shown)
    run.dump.write(step, [example for own in rollouts for example in own.examples], session.monitor)
    training, filled, was_sparse = session.cfg.training, metrics["train/fill_ratio"], run.is_sparse
    run.is_sparse = training.packing and filled < training.packing_min_fill_ratio
    if run.is_sparse and not was_sparse:
        way_out = "a shorter global_max_length wastes less (logged once until it is over)"
        logger.warning("step %d: rows are only %.2f full; %s", step, filled, way_out)
    return ranks["signal_name"]


if __name__ == "__main__":
    main()
