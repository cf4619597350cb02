"""GRPO: reinforcement learning from rewards, on the server, data, sync and learner of stage 2.

    make grpo GPUS=6,7 CONFIG=configs/grpo/summary_1024.yaml
    deepspeed --include localhost:6,7 train_grpo.py --config configs/grpo/summary_1024.yaml      (the same)

Start the rollout server first (`make server CONFIG=...`), unless the learners generate themselves (`rlhf.vllm_mode:
colocate`, or `rlhf.use_vllm: false`). In every step the current weights go to the engine that generates. It gives
several responses to each prompt, and reward functions score them. A response that scored better than its group becomes
more likely, one that scored worse less likely. How to run it: docs/runbook_grpo.md.
"""

import logging
import math
import os
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from utils.config.load import Config, exit_with, problem
from utils.config.rlhf import setting_at
from utils.credit import credit_of
from utils.data.encoding import EncodedPrompt
from utils.data.samples import Sample
from utils.detection_rewards import OF_OBJECTS
from utils.dist import capture_error
from utils.grpo import (
    Answer,
    Group,
    WeightedAnswers,
    choose_rows,
    has_signal,
    policy_row,
    weight_answers,
)
from utils.learner.learner import NotFinite, StepResult
from utils.learner.objectives import PolicyObjective
from utils.packing import check_fits
from utils.policy_loss import PolicyRow
from utils.rewards import Completion, FileProblem, RewardFunction, load_rewards, running, score
from utils.rollout.backend import RolloutResult, RolloutSampling, policy_lags
from utils.run.grpo_steps import MicroStep, Prompts, ResponseGroup, Responses, dump_answers, reward_metrics
from utils.run.program import run_program
from utils.run.records import step_metrics
from utils.run.session import Session
from utils.run.setup import open_session
from utils.targets import plain_segment

logger = logging.getLogger(__name__)


def main() -> None:
    run_program("train_grpo.py", "grpo", __doc__, set_up, train, check=rewards_of)


def set_up(cfg: Config, resume: str | None = None, accepted_changes: Sequence[str] = ()) -> "Grpo":
    """Build a run that is ready for its next step; exit status 2 with one message for a user's mistake."""
    rewards = rewards_of(cfg)
    session = open_session(
        cfg,
        resume,
        accepted_changes,
        metric="reward",
        needs_coordinates=cfg.is_detection,
        rewards=list(rewards),
    )
    run = Grpo(session, rewards)
    session.resume(run)
    return run


def rewards_of(cfg: Config, is_dry_run: bool = False) -> dict[str, RewardFunction]:
    """Load the reward functions of the config; exit status 2 where one cannot be loaded."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank and not is_dry_run and torch.cuda.device_count() > local_rank:
        torch.cuda.set_device(local_rank)  # a file may load a model
    try:
        rewards = load_rewards(cfg.rlhf.reward_funcs, cfg.rlhf.reward_files)
    except ValueError as error:
        key = "reward_files" if isinstance(error, FileProblem) else "reward_funcs"
        exit_with(problem(cfg, f"rlhf.{key}", str(error)))
    weights = cfg.rlhf.reward_weights or [1.0] * len(rewards)
    of_objects = [own for own, function in zip(weights, rewards.values(), strict=True) if function in OF_OBJECTS]
    if cfg.rlhf.advantage == "object" and not any(
        setting_at(own, step) for own in of_objects for step in (0, math.inf)
    ):
        rule = "object needs a reward of objects that has a weight, such as detection_f1; add one, or set answer"
        exit_with(problem(cfg, "rlhf.advantage", rule))
    return rewards


def train(run: "Grpo") -> None:
    """Train all steps to come.

    Raises:
        Stopped: a signal came; all finished steps are saved.
    """
    session = run.session
    session.begin(run)
    for step in range(session.steps_done, session.num_steps):
        with session.timed("step"):
            # Weights current; then, in threads, the methods of `Grpo` in order: draw, generate, judge.
            micro_steps = session.prepare(step)
            weighted = run.weight(micro_steps, step)
            with session.timed("train"):
                batches = run.pack(weighted, step)
                result = run.learn(batches, weighted, step)
        session.steps_done = step + 1
        run.data_position = max((made.data_position for made in micro_steps), key=lambda at: at["position"])
        record = partial(log_step, run, step + 1, result, weighted, micro_steps)
        session.end_step(run, session.on_all_ranks(record, f"recording optimizer step {step + 1}"))
    session.finish()


class Grpo:
    """A session with what only GRPO holds.

    `draw`, `generate` and `judge` make a micro-step, in this order, in the threads that utils/run/prefetch.py shows;
    `weight`, `pack` and `learn` run in the main thread.

    Attributes:
        data_position: after the last trained step; a resumed run draws again from there.
        has_warned: of a dump that could not be written.
    """

    encode = None  # `generate` may draw replacements

    def __init__(self, session: Session, rewards: dict[str, RewardFunction]) -> None:
        self.session = session
        self.rewards = rewards
        self.data_position = session.data.stream.state_dict()
        self.has_warned = False
        self._redraw: deque[int] = deque()  # numbers of prompts that a checkpoint's prepared micro-steps had drawn
        session.prefetch(self, draws_more=session.cfg.rlhf.dynamic_sample)

    def reward_weights(self, step: float) -> np.ndarray:
        """The weight of each reward in optimizer step `step`, float64 `[F]`."""
        weights = self.session.cfg.rlhf.reward_weights or [1.0] * len(self.rewards)
        return np.array([setting_at(weight, step) for weight in weights])

    # A micro-step

    def draw(self) -> Prompts:
        """Draw the next micro-step's prompts; for one restored from a checkpoint, all that it had drawn."""
        stream, cfg = self.session.data.stream, self.session.cfg
        may_draw_more = cfg.rlhf.dynamic_sample and not self._redraw
        num_drawn = self._redraw.popleft() if self._redraw else cfg.training.per_device_train_batch_size
        return Prompts(stream.next(num_drawn), None if may_draw_more else stream.state_dict())

    def generate(self, prompts: Prompts, step: int, micro_step_idx: int) -> Responses:
        """Get responses for `step`. With `dynamic_sample`, prompts without a signal are replaced by the next ones, for
        `max_resample_times` rounds; only then are responses scored here, where the next request waits for it."""
        cfg, training = self.session.cfg.rlhf, self.session.cfg.training
        num_used = training.per_device_train_batch_size
        groups = self.generate_groups(prompts.samples[:num_used], step, micro_step_idx)
        for turn in range(1, cfg.max_resample_times + 1) if cfg.dynamic_sample else ():
            answers = self.session.prefetcher.in_judge_thread(self.score_groups, groups, step)
            no_signal = np.flatnonzero(~has_signal(answers, self.reward_weights(step))).tolist()
            # Each rank uses servers by itself; other engines work on all ranks together.
            is_needed = [bool(no_signal)]
            if self.session.policy.client is None:
                is_needed = self.session.ranks.gather_or_raise(bool(no_signal), "generating")
            if not any(is_needed):
                break
            if prompts.data_position is None:
                with self.session.prefetcher.drawing(step, micro_step_idx):
                    num_missing = num_used + len(no_signal) - len(prompts.samples)
                    prompts.samples += self.session.data.stream.next(num_missing)
            replacements = prompts.samples[num_used : num_used + len(no_signal)]
            num_used += len(replacements)
            # Micro-steps count on past those of the step, so that each round has seeds of its own (DIS-6).
            own_idx = micro_step_idx + turn * training.gradient_accumulation_steps
            for index, group in zip(no_signal, self.generate_groups(replacements, step, own_idx), strict=False):
                groups[index] = group
        prompts.data_position = prompts.data_position or self.session.data.stream.state_dict()
        return Responses(groups, len(prompts.samples), prompts.data_position)

    def judge(self, responses: Responses, step: int) -> MicroStep:
        """Score responses; a slow reward function holds up no request in this thread."""
        groups = self.score_groups(responses.groups, step)
        return MicroStep(groups, responses.num_drawn, responses.data_position)

    @property
    def judging(self) -> str:
        """The reward that runs, or ran last."""
        return running[0] or "judging"

    def lag(self, micro_step: MicroStep, step: int) -> int:
        """Age in optimizer steps of the oldest weights in a micro-step that `step` would train."""
        return max(policy_lags(policy_versions([micro_step]), step), default=0)

    def generate_groups(self, samples: Sequence[Sample], step: int, micro_step_idx: int) -> list[ResponseGroup]:
        """Get `num_generations` responses to each sample, each with its own seed (DIS-6)."""
        session, cfg = self.session, self.session.cfg
        size = cfg.rlhf.num_generations
        sampling = RolloutSampling(**cfg.rm.decoding.model_dump(), max_new_tokens=cfg.rm.max_new_tokens, logprobs=True)
        with session.timed("prepare"):
            prompts = session.data.encode(samples)
        with session.timed("rollout"):
            repeated = [[item for item in items for _ in range(size)] for items in (samples, prompts)]
            allow_stale = cfg.rm.async_.enabled
            results = session.policy.generate(*repeated, sampling, step, micro_step_idx, allow_stale=allow_stale)
        return [
            ResponseGroup(sample, prompt, results[index * size : (index + 1) * size])
            for index, (sample, prompt) in enumerate(zip(samples, prompts, strict=True))
        ]

    def score_groups(self, groups: Sequence[ResponseGroup], step: int) -> list[Group]:
        """Score the responses to each prompt for `step`, once however often this is called. All reward functions run in
        one thread, the one that judges."""
        with self.session.timed("prepare"):
            for own in groups:
                if own.answers is None:
                    own.answers = [self.make_answer(own.sample, own.prompt, result, step) for result in own.results]
        return [own.answers for own in groups]

    def make_answer(self, sample: Sample, prompt: EncodedPrompt, result: RolloutResult, step: int) -> Answer:
        """Score one response and write it as a training sequence.

        Raises:
            RewardError: a reward function failed.
            ValueError: prompt and response are longer than a row (PCK-3).
        """
        cfg = self.session.cfg
        stop_ids = [] if result.stop_token_id is None else [result.stop_token_id]
        stop_logprobs = [] if result.stop_logprob is None else [result.stop_logprob]
        segment = plain_segment(
            sample.id,
            **vars(prompt),
            answer_ids=[*result.response_token_ids, *stop_ids],
            policy_version=result.weight_version,
        )
        if cfg.global_max_length is not None:
            check_fits([segment], cfg.global_max_length)
        is_failed, is_truncated = result.error is not None, result.finish_reason == "length"
        # In a row the learner would take a sampled image placeholder for a place where an image's features go.
        is_unusable = is_failed or self.session.data.processor.image_token_id in result.response_token_ids
        rewards, credit = self.score(sample, result, step), None
        if cfg.rlhf.advantage == "object" and not is_unusable:
            credit = credit_of(self.completion(result, step), sample, self.rewards, rewards, len(segment.text_index))
        return Answer(
            segment if is_unusable else self.session.place(segment),
            result.text,
            rewards,
            [*(result.logprobs or []), *stop_logprobs],
            is_valid=not is_unusable and not (is_truncated and cfg.rlhf.overlong_filter),
            is_truncated=is_truncated,
            is_failed=is_failed,
            credit=credit,
        )

    def completion(self, result: RolloutResult, step: float) -> Completion:
        """A response as reward functions get it in optimizer step `step`."""
        rlhf, table = self.session.cfg.rlhf, self.session.data.table
        iou = setting_at(rlhf.reward_iou, step)
        return Completion(result.text, result.response_token_ids, table, iou, rlhf.max_new_tokens)

    def score(self, sample: Sample, result: RolloutResult, step: float) -> np.ndarray:
        """Every reward function's value, float64 `[F]`; 0 for a failed request."""
        if result.error is not None:
            return np.zeros(len(self.rewards))
        return score(self.completion(result, step), sample, self.rewards)

    # The update

    def weight(self, micro_steps: Sequence[MicroStep], step: int) -> WeightedAnswers:
        """Compare the answers with their groups."""
        groups = [group for micro_step in micro_steps for group in micro_step.groups]
        return weight_answers(groups, self.reward_weights(step), self.session.cfg.rlhf, self.session.ranks)

    def pack(self, weighted: WeightedAnswers, step: int) -> list[PolicyRow]:
        """Lay the answers out in rows, equally many on all ranks."""
        cfg = self.session.cfg
        rows = choose_rows(
            weighted,
            has_penalty=cfg.rlhf.beta > 0,
            cap=cfg.global_max_length if cfg.training.packing else None,
            per_row=cfg.training.per_device_train_batch_size * cfg.rlhf.num_generations,
            ranks=self.session.ranks,
        )
        return self.session.on_all_ranks(
            lambda: [policy_row(weighted, row, self.session.collate) for row in rows],
            f"packing the rows of optimizer step {step + 1}",
        )

    def learn(self, batches: list[PolicyRow], weighted: WeightedAnswers, step: int) -> StepResult:
        """Run `num_iterations` optimizer steps over the same answers; returns the result of the last."""
        cfg, learner = self.session.cfg.rlhf, self.session.learner
        temperature = cfg.decoding.temperature
        if cfg.num_iterations > 1:
            for batch, logprob in zip(batches, learner.logprobs(batches, temperature), strict=True):
                batch.policy.old_logprob = logprob
        if cfg.beta:
            reference = learner.logprobs(batches, temperature, of_start_policy=True)
            for batch, logprob in zip(batches, reference, strict=True):
                batch.policy.ref_logprob = logprob
        objective = PolicyObjective(cfg, weighted.denominator, temperature)
        with self.session.finished_steps_saved(NotFinite):
            result = learner.step(batches, objective, step)
        for number in range(1, cfg.num_iterations):
            try:
                result = learner.step(batches, objective, step)
            except NotFinite as error:
                done = f"{number} of {cfg.num_iterations} updates on these answers had been made, so nothing is saved"
                raise NotFinite(f"{error}. {done}; resume from the last checkpoint") from error
        return result

    # Evaluation and checkpoints

    def evaluate(self, step: int) -> None:
        """Average rewards of greedy responses to the validation samples, with the settings of the last step."""
        score = partial(self.session.prefetcher.in_judge_thread, self.evaluation_record)
        records = self.session.score_validation(step, score)
        sums: Counter[str] = Counter()
        for record in records:
            sums.update({f"reward/{name}": value for name, value in record["rewards"].items()})
            sums.update(reward=record["reward"], truncated_rate=record["finish_reason"] == "length", num_samples=1)
            sums.update(failed=record["error"] is not None)
        totals = self.session.ranks.sum(sums)
        numbers = {name: totals.pop(name) for name in ("num_samples", "failed")}
        result = {name: value / numbers["num_samples"] for name, value in totals.items()} | numbers
        self.session.log_evaluation(step, result, records)

    def evaluation_record(self, sample: Sample, result: RolloutResult) -> dict[str, Any]:
        """A validation response as it is kept on disk."""
        rewards = self.score(sample, result, math.inf)
        return {
            "id": sample.id,
            "images": sample.images,
            "response": result.text,
            "finish_reason": result.finish_reason,
            "error": result.error,
            "reward": float(rewards @ self.reward_weights(math.inf)),
            "rewards": dict(zip(self.rewards, rewards.tolist(), strict=True)),
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's data position and prepared micro-steps (LRN-5)."""
        prepared, _ = self.session.prefetcher.prepared_from(self.session.steps_done)
        ahead = [micro_step.state_dict() for micro_step in prepared]
        return {"stream": self.data_position, "ahead": ahead, "rewards": list(self.rewards)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            ValueError: other data, or a prepared answer that was scored with other rewards or another `advantage`, or
                is longer than a row now is.
        """
        cfg, names = self.session.cfg, list(self.rewards)
        prepared = [MicroStep.from_state(saved) for saved in state["ahead"]]
        answers = [answer for micro_step in prepared for group in micro_step.groups for answer in group]
        scored_by = state.get("rewards", names)  # without names in checkpoints of earlier versions
        if answers and (scored_by != names or len(answers[0].rewards) != len(names)):
            old = ", ".join(state.get("rewards", [])) or f"{len(answers[0].rewards)} functions"
            raise ValueError(
                f"rlhf.reward_funcs: {len(answers)} answers of the checkpoint that were made ahead of their step were "
                f"scored by {old}, now it is {', '.join(names)}; resume with the old setting, or use a new "
                "training.output_dir"
            )
        advantages = {"object" if answer.credit else "answer" for answer in answers if answer.is_valid}
        if advantages - {cfg.rlhf.advantage}:
            raise ValueError(
                f"rlhf.advantage: {len(answers)} answers of the checkpoint that were made ahead of their step were "
                "scored with the other setting; resume with that, or use a new training.output_dir"
            )
        if cfg.training.packing:
            check_fits([answer.segment for answer in answers], cfg.global_max_length)
        self.session.data.stream.load_state_dict(state["stream"])
        self.data_position = state["stream"]
        if self.session.prefetcher.works_ahead:
            self._redraw.extend(micro_step.num_drawn for micro_step in prepared)
        self.session.prefetcher.restore(self.session.steps_done, prepared)


def policy_versions(micro_steps: Sequence[MicroStep]) -> list[str | None]:
    """Weight version of each successful answer."""
    answers = [answer for micro_step in micro_steps for group in micro_step.groups for answer in group]
    return [answer.segment.policy_version for answer in answers if not answer.is_failed]


def log_step(
    run: Grpo, step: int, result: StepResult, weighted: WeightedAnswers, micro_steps: list[MicroStep]
) -> str | None:
    """Log the curves and the progress line of step `step` (1-based: steps done), over all ranks (LOG-3).

    Returns:
        A signal that any rank received and that requests the end of the run; the same on all ranks.
    """
    session, size = run.session, run.session.cfg.rlhf.num_generations
    answers = [answer for answer in weighted.answers if not answer.is_failed]
    groups = [group for micro_step in micro_steps for group in micro_step.groups]
    num_valid = np.array([sum(answer.is_valid for answer in group) for group in groups])  # an old one may be smaller
    ranks = session.gather_step(
        result,
        rewards=np.array([answer.rewards for answer in answers]).reshape(-1, len(run.rewards)),
        lengths=[len(answer.segment.text_index) for answer in answers],
        truncated=[answer.is_truncated for answer in answers],
        failed=len(weighted.answers) - len(answers),
        left_out=sum(not answer.is_valid for answer in weighted.answers),
        has_two_to_compare=num_valid > 1,
        replaced=sum(micro_step.num_drawn for micro_step in micro_steps) - len(groups),
        advantages=np.array([np.abs(own).mean() if len(own) else 0.0 for own in weighted.advantages]),
        has_signal=weighted.has_signal,
        lags=policy_lags(policy_versions(micro_steps), step - 1),
    )
    metrics = reward_metrics(list(run.rewards), run.reward_weights(step - 1), np.concatenate(ranks["rewards"]))
    metrics |= step_metrics(result, ranks)
    truncated_rate = float(np.mean(sum(ranks["truncated"], []) or [0]))
    signal_share = float(np.concatenate(ranks["has_signal"]).mean())
    metrics |= {
        "advantage/abs_mean": float(np.concatenate(ranks["advantages"]).mean()),
        "advantage/signal_share": signal_share,
        **{f"loss/{name}": result.losses[name] for name in ("total", "policy")},
        **{f"policy/{name}": value for name, value in result.losses.items() if name not in ("total", "policy")},
        **{f"rollout/{name}": float(sum(ranks[name])) for name in ("failed", "left_out", "replaced")},
        "rollout/truncated_rate": truncated_rate,
    }
    reward = {"reward": metrics["reward"]} if "reward" in metrics else {}  # no answer, no reward
    quality = {"truncated_rate": truncated_rate}
    # Where no group has two answers that count, others were left out: that says nothing of the rewards.
    if np.concatenate(ranks["has_two_to_compare"]).any():
        quality["signal_share"] = signal_share
    if "reward/detection_parse" in metrics:
        quality["parse_rate"] = metrics["reward/detection_parse"]
    session.log_step(step, metrics, quality, **reward, loss=result.losses["total"])
    options = session.cfg.rm.monitor_dump
    if session.ranks.is_main and options.every_steps and step % options.every_steps == 0:
        num_answers = options.num_samples * size
        error = capture_error(dump_answers, session.run_dir, step, weighted, list(run.rewards), num_answers)
        if error is not None and not run.has_warned:
            logger.warning("answers could not be dumped: %s (logged once per run)", error)
            run.has_warned = True
    return ranks["signal_name"]


if __name__ == "__main__":
    main()
