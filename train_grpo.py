"""GRPO: reinforcement learning from rewards, on the server, data, sync and learner of stage 2.

    make grpo GPUS=6,7 CONFIG=configs/grpo/summary_1024.yaml
    deepspeed --num_gpus 2 train_grpo.py --config configs/demo/grpo.yaml     (CPU; see `make demo-grpo`)

Start the rollout server first (`make server CONFIG=...`), unless the learners generate themselves (`rlhf.vllm_mode:
colocate`, or `rlhf.use_vllm: false`). Every step: the current weights go to the engine that generates; it gives several
answers to each prompt; reward functions judge them; an answer that did better than its group becomes more likely,
one that did worse less. How to run it: docs/runbook_grpo.md.
"""

import json
import logging
import os
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from utils.capacity import EVAL_MICRO_STEP
from utils.config.load import Config, exit_with, problem
from utils.data.encoding import EncodedPrompt
from utils.data.samples import Sample
from utils.grpo import (
    Answer,
    Group,
    WeightedAnswers,
    choose_rows,
    groups_from_state,
    groups_to_state,
    has_signal,
    policy_row,
    weight_answers,
)
from utils.learner.learner import StepResult
from utils.learner.objectives import PolicyObjective
from utils.packing import check_fits
from utils.policy_loss import policy_segment
from utils.rewards import REWARDS, Completion, RewardFunction, data_problems, load_rewards, score
from utils.rollout.backend import Decoding, RolloutResult, policy_lags
from utils.run.monitor import collapse_warnings
from utils.run.program import run_program
from utils.run.session import Session, make_prefetcher
from utils.run.setup import open_session

logger = logging.getLogger("train_grpo")


def main() -> None:
    run_program("train_grpo.py", "grpo", __doc__, set_up, train, check=rewards_of)


@dataclass(kw_only=True)
class Run(Session):
    """A session with what only GRPO holds."""

    rewards: dict[str, RewardFunction]
    reward_weights: np.ndarray  # float64 [F]
    data_position: dict[str, Any]  # behind the last step taken; what was drawn ahead is drawn again by who goes on
    redrawn: deque[int] = field(default_factory=deque)  # how many prompts each micro-step of a checkpoint had drawn

    def __post_init__(self) -> None:
        self.prefetcher = make_prefetcher(self, draw, ask, finish, versions_of)


def set_up(cfg: Config, resume: str | None) -> Run:
    """A run that is ready for its next step; exit status 2 with one message for a user's mistake."""
    rewards, weights = rewards_of(cfg), cfg.rlhf.reward_weights
    session = open_session(
        cfg,
        resume,
        needs_coordinates=any(REWARDS.get(name) and name.startswith("detection_") for name in rewards),
        problems_of=partial(data_problems, list(rewards)),
    )
    run = Run(
        **vars(session) | {"metric": "reward"},
        rewards=rewards,
        reward_weights=np.ones(len(rewards)) if weights is None else np.array(weights),
        data_position=session.stream.state_dict(),
    )
    run.resume(partial(restore, run))
    return run


def rewards_of(cfg: Config) -> dict[str, RewardFunction]:
    """The reward functions of the config; exit status 2 where one cannot be had."""
    try:
        return load_rewards(cfg.rlhf.reward_funcs, cfg.rlhf.reward_files)
    except ValueError as error:
        exit_with(problem(cfg, "rlhf.reward_funcs", str(error)), is_main=os.environ.get("RANK", "0") == "0")


def rank_state(run: Run, owes_evaluation: bool) -> dict[str, Any]:
    """Everything of this rank that a checkpoint holds beside model and optimizer (LRN-5)."""
    ahead, _ = run.prefetcher.ahead(run.steps_done)
    return run.state_dict(owes_evaluation) | {
        "stream": run.data_position,
        "ahead": [made.state_dict() for made in ahead],
    }


def restore(run: Run, state: dict[str, Any]) -> None:
    """Go on from `rank_state`.

    Raises:
        ValueError: other data.
    """
    run.load_state_dict(state)
    run.data_position = state["stream"]
    ahead = [MicroStep.from_state(made) for made in state["ahead"]]
    run.redrawn.extend(made.num_drawn for made in ahead)
    run.prefetcher.restore(run.steps_done, ahead)


# ---------------------------------------------------------------------------------------------------------------------
# the loop


def train(run: Run) -> None:
    """All steps to come: sync, roll out and judge, weight against the group, update, log.

    Raises:
        Stopped: a signal came; the step it came in is finished and saved.
    """
    run.begin(partial(evaluate, run))
    for step in range(run.steps_done, run.num_steps):
        with run.timed("step"):
            micro_steps = prepare(run, step)
            weighted = weight_answers(
                [group for made in micro_steps for group in made.groups],
                run.reward_weights,
                run.cfg.rlhf,
                run.ranks,
            )
            with run.timed("train"):
                result = update(run, weighted, step)
        run.steps_done = step + 1
        signal_name = log_step(run, step + 1, result, weighted, micro_steps)
        run.end_step(signal_name, partial(evaluate, run), partial(rank_state, run))
    run.finish()


@dataclass
class Drawn:
    """A micro-step's prompts, and behind them those that were drawn in place of prompts without a signal."""

    samples: list[Sample]
    behind: dict[str, Any] | None = None  # the data position once all were drawn; from then on no more are


@dataclass
class Asked:
    """A prompt and what was answered.

    Attributes:
        judged: the answers with their rewards, once `judge_group` was called.
    """

    sample: Sample
    prompt: EncodedPrompt
    results: list[RolloutResult]
    judged: Group | None = None


@dataclass
class AskedMicroStep:
    """Answers of one micro-step, on their way to `finish`."""

    groups: list[Asked]
    num_drawn: int  # prompts
    behind: dict[str, Any]  # the data position behind them


@dataclass
class MicroStep:
    """Judged answers of one micro-step."""

    groups: list[Group]
    num_drawn: int  # prompts
    behind: dict[str, Any]  # the data position behind them

    def state_dict(self) -> dict[str, Any]:
        """Plain types and tensors."""
        return vars(self) | {"groups": groups_to_state(self.groups)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "MicroStep":
        return cls(**state | {"groups": groups_from_state(state["groups"])})


def prepare(run: Run, step: int) -> list[MicroStep]:
    """Judged answers for `step`; a failure anywhere stops all ranks."""
    micro_steps = run.on_current_weights(step, lambda: run.prefetcher.take(step), f"preparing step {step}")
    run.data_position = micro_steps[-1].behind
    return micro_steps


def draw(run: Run) -> Drawn:
    """The next micro-step's prompts; of one that a checkpoint holds, all that it had drawn."""
    if not run.redrawn:
        return Drawn(run.stream.next(run.cfg.training.per_device_train_batch_size))
    return Drawn(run.stream.next(run.redrawn.popleft()), run.stream.state_dict())


def ask(run: Run, drawn: Drawn, step: int, micro_step_idx: int) -> AskedMicroStep:
    """Answers for `step`; with `dynamic_sample` a prompt without a signal makes way for another one, as long as there
    are rounds left. Only then are answers judged here, where the next request waits for it."""
    cfg, num_micro_steps = run.cfg.rlhf, run.cfg.training.gradient_accumulation_steps
    used = run.cfg.training.per_device_train_batch_size
    groups = answer_groups(run, drawn.samples[:used], step, micro_step_idx)
    for turn in range(1, cfg.max_resample_times + 1) if cfg.dynamic_sample else ():
        judged = [judge_group(run, group) for group in groups]
        dull = np.flatnonzero(~has_signal(judged, run.reward_weights)).tolist()
        if not any_rank(run, bool(dull)):
            break
        if drawn.behind is None:
            drawn.samples += run.stream.next(used + len(dull) - len(drawn.samples))
        instead = drawn.samples[used : used + len(dull)]
        used += len(instead)
        fresh = answer_groups(run, instead, step, micro_step_idx + turn * num_micro_steps)
        for place, group in zip(dull, fresh, strict=False):
            groups[place] = group
    drawn.behind = drawn.behind or run.stream.state_dict()
    return AskedMicroStep(groups, len(drawn.samples), drawn.behind)


def finish(run: Run, asked: AskedMicroStep, step: int) -> MicroStep:
    """Answers to judged answers, in the thread that holds up no request however slow a reward function is."""
    return MicroStep([judge_group(run, group) for group in asked.groups], asked.num_drawn, asked.behind)


def any_rank(run: Run, wanted: bool) -> bool:
    """Whether to go on asking: servers can be asked alone, other backends by all ranks together."""
    return wanted if run.client is not None else any(run.ranks.gather(wanted))


def answer_groups(run: Run, samples: Sequence[Sample], step: int, micro_step_idx: int) -> list[Asked]:
    """`num_generations` answers to each sample, each with a seed of its own (DIS-6)."""
    size, strict = run.cfg.rlhf.num_generations, not run.cfg.rm.async_.enabled
    with run.timed("prepare"):
        prompts = run.encode(samples)
    with run.timed("rollout"):
        repeated = [[item for item in items for _ in range(size)] for items in (samples, prompts)]
        results = run.roll_out(*repeated, decoding(run.cfg), step, micro_step_idx, strict)
    return [
        Asked(sample, prompt, results[index * size : (index + 1) * size])
        for index, (sample, prompt) in enumerate(zip(samples, prompts, strict=True))
    ]


def judge_group(run: Run, asked: Asked) -> Group:
    """The answers to one prompt with their rewards; judged once however often this is called."""
    if asked.judged is None:
        with run.timed("prepare"):
            asked.judged = [make_answer(run, asked.sample, asked.prompt, result) for result in asked.results]
    return asked.judged


def make_answer(run: Run, sample: Sample, prompt: EncodedPrompt, result: RolloutResult) -> Answer:
    """One answer, judged, as a training sequence.

    Raises:
        RewardError: a reward function failed.
        ValueError: prompt and answer are longer than a row (PCK-3).
    """
    ends = [] if result.stop_token_id is None else [result.stop_token_id]
    end_logprobs = [] if result.stop_logprob is None else [result.stop_logprob]
    segment = policy_segment(
        sample.id,
        **vars(prompt),
        answer_ids=[*result.response_token_ids, *ends],
        policy_version=result.weight_version,
    )
    if run.cfg.global_max_length is not None:
        check_fits([segment], run.cfg.global_max_length)
    is_failed, is_truncated = result.error is not None, result.finish_reason == "length"
    # A sampled image placeholder: in a row the learner would take it for a place where an image's features go.
    is_unusable = is_failed or run.processor.image_token_id in result.response_token_ids
    return Answer(
        segment,
        result.text,
        np.zeros(len(run.rewards)) if is_failed else judge(run, sample, result),
        [*(result.logprobs or []), *end_logprobs],
        is_valid=not is_unusable and not (is_truncated and run.cfg.rlhf.overlong_filter),
        is_truncated=is_truncated,
        is_failed=is_failed,
    )


def judge(run: Run, sample: Sample, result: RolloutResult) -> np.ndarray:
    """Every reward function's value, float64 `[F]`."""
    return score(Completion(result.text, result.response_token_ids, run.table), sample, run.rewards)


def update(run: Run, weighted: WeightedAnswers, step: int) -> StepResult:
    """`num_iterations` optimizer steps over the same answers; what the last of them reports."""
    cfg, training = run.cfg.rlhf, run.cfg.training
    rows = choose_rows(
        weighted,
        has_penalty=cfg.beta > 0,
        cap=run.cfg.global_max_length if training.packing else None,
        per_row=training.per_device_train_batch_size * cfg.num_generations,
        ranks=run.ranks,
    )
    batches = [policy_row(weighted, row, run.collate) for row in rows]
    if cfg.num_iterations > 1:
        for batch, logprob in zip(batches, run.learner.logprobs(batches, cfg.decoding.temperature), strict=True):
            batch.policy.old_logprob = logprob
    if cfg.beta:
        reference = run.learner.logprobs(batches, cfg.decoding.temperature, of_start_policy=True)
        for batch, logprob in zip(batches, reference, strict=True):
            batch.policy.ref_logprob = logprob
    objective = PolicyObjective(run.cfg.rlhf, weighted.denominator, cfg.decoding.temperature)
    return [run.learner.step(batches, objective, step) for _ in range(cfg.num_iterations)][-1]


def versions_of(made: MicroStep) -> list[str | None]:
    """The weights that answered, for each answer that there is."""
    return [answer.segment.policy_version for group in made.groups for answer in group if not answer.is_failed]


def evaluate(run: Run, step: int) -> None:
    """Greedy answers on the validation samples and what they are worth; a failed request is worth nothing."""

    def answer_all() -> list[dict[str, Any]]:
        with run.timed("eval"):
            samples = run.val_samples[run.ranks.rank :: run.ranks.world_size]
            results = run.roll_out(samples, run.encode(samples), greedy(run.cfg), step, EVAL_MICRO_STEP)
            return [evaluation_record(run, *pair) for pair in zip(samples, results, strict=True)]

    answers = run.on_current_weights(step, answer_all, f"evaluation at step {step}")
    sums: Counter[str] = Counter()
    for answer in answers:
        sums.update({f"reward/{name}": value for name, value in answer["rewards"].items()})
        sums.update(reward=answer["reward"], truncated_rate=answer["finish_reason"] == "length", num_samples=1)
    totals = run.ranks.sum(sums)
    number = totals.pop("num_samples")
    result = {name: value / number for name, value in totals.items()} | {"num_samples": number}
    calls = run.log_calls(step, "eval")
    run.log_evaluation(step, result, {f"eval/{name}": value for name, value in result.items()} | calls, answers)


def evaluation_record(run: Run, sample: Sample, result: RolloutResult) -> dict[str, Any]:
    """A validation answer as it is kept on disk."""
    rewards = np.zeros(len(run.rewards)) if result.error is not None else judge(run, sample, result)
    return {
        "id": sample.id,
        "images": sample.images,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "reward": float(rewards @ run.reward_weights),
        "rewards": dict(zip(run.rewards, rewards.tolist(), strict=True)),
    }


def log_step(
    run: Run, step: int, result: StepResult, weighted: WeightedAnswers, micro_steps: list[MicroStep]
) -> str | None:
    """TensorBoard and the progress line for step `step` (1-based: steps done), over all ranks (LOG-3).

    Returns:
        The signal that asks the run to end, if any rank has got one; the same on all ranks.
    """
    answered = [answer for answer in weighted.answers if not answer.is_failed]
    groups = [group for made in micro_steps for group in made.groups]
    gathered = run.ranks.gather(
        {
            "rewards": np.array([answer.rewards for answer in answered]).reshape(-1, len(run.rewards)),
            "lengths": [len(answer.segment.text_index) for answer in answered],
            "truncated": [answer.is_truncated for answer in answered],
            "failed": len(weighted.answers) - len(answered),
            "left_out": sum(not answer.is_valid for answer in weighted.answers),
            "advantages": weighted.advantages,
            "has_signal": weighted.has_signal,
            "replaced": sum(made.num_drawn for made in micro_steps) - len(groups),
            "lags": policy_lags(chain.from_iterable(map(versions_of, micro_steps)), step - 1),
            "seconds": run.pop_seconds(),
            "num_tokens": result.num_tokens,
            "signal_name": run.stop.signal_name,
        }
    )
    shown, own = {name: [part[name] for part in gathered] for name in gathered[0]}, weighted.answers
    rewards, lengths = np.concatenate(shown["rewards"]), np.array(sum(shown["lengths"], []) or [0])
    total = rewards @ run.reward_weights if len(rewards) else np.zeros(1)
    seconds = {
        name: max(part.get(name, 0.0) for part in shown["seconds"])
        for name in ("rollout", "sync", "prepare", "train", "step")
    }
    signal_share, lags = float(np.concatenate(shown["has_signal"]).mean()), sum(shown["lags"], []) or [0]
    truncated_rate = float(np.mean(sum(shown["truncated"], []) or [0]))
    tokens_per_s = sum(shown["num_tokens"]) / max(seconds["step"], 1e-9)
    values = {
        "reward": float(total.mean()),
        "reward_std": float(total.std()),
        **{f"reward/{name}": float(column.mean()) for name, column in zip(run.rewards, rewards.T, strict=True)},
        **{f"reward/{name}_std": float(column.std()) for name, column in zip(run.rewards, rewards.T, strict=True)},
        "advantage/abs_mean": float(np.abs(np.concatenate(shown["advantages"])).mean()),
        "advantage/signal_share": signal_share,
        **{f"loss/{name}": result.losses[name] for name in ("total", "policy")},
        **{f"policy/{name}": value for name, value in result.losses.items() if name not in ("total", "policy")},
        **{f"learning_rate/{name}": value for name, value in result.learning_rates.items()},
        **{f"rollout/{name}": float(sum(shown[name])) for name in ("failed", "left_out", "replaced")},
        "rollout/truncated_rate": truncated_rate,
        "rollout/new_tokens_mean": float(lengths.mean()),
        "rollout/new_tokens_p90": float(np.percentile(lengths, 90)),
        "rollout/new_tokens_p99": float(np.percentile(lengths, 99)),
        "rollout/remade": float(run.prefetcher.num_remade),
        **{f"seconds/{name}": value for name, value in seconds.items()},
        "train/grad_norm": result.grad_norm,
        "train/tokens_per_s": tokens_per_s,
        "train/fill_ratio": result.fill_ratio,
        "train/policy_lag": float(np.mean(lags)),
        "train/policy_lag_max": float(max(lags)),
    }
    values |= run.log_calls(step, "train") | run.watch.pop_metrics() | run.pop_sync_metrics()
    run.monitor.scalars(step, values)
    dump_answers(run, step, own, weighted.advantages)
    run.monitor.progress(step, reward=values["reward"], loss=result.losses["total"], tokens_per_s=tokens_per_s)
    if not signal_share:
        logger.warning("step %d: the answers to every prompt got equal rewards; nothing was learnt", step)
    bounds = run.cfg.training.collapse.model_dump()
    for warning in collapse_warnings({"truncated_rate": truncated_rate}, bounds):
        logger.warning("step %d: %s", step, warning)
    return next((name for name in shown["signal_name"] if name), None)


def dump_answers(run: Run, step: int, answers: Sequence[Answer], advantages: np.ndarray) -> None:
    """Every so often rank 0's first groups as text, `dumps/step_000040.jsonl`, one answer a line."""
    options = run.cfg.rm.monitor_dump
    if not run.ranks.is_main or not options.every_steps or step % options.every_steps:
        return
    path = Path(run.cfg.training.output_dir) / "dumps" / f"step_{step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for answer, advantage in list(zip(answers, advantages.tolist(), strict=True))[
            : options.num_samples * run.cfg.rlhf.num_generations
        ]:
            record = {
                "id": answer.segment.sample_id,
                "text": answer.text,
                "rewards": dict(zip(run.rewards, answer.rewards.tolist(), strict=True)),
                "advantage": advantage,
                "is_valid": answer.is_valid,
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# small translations from the config


def decoding(cfg: Config) -> Decoding:
    return Decoding(**cfg.rm.decoding.model_dump(), max_new_tokens=cfg.rm.max_new_tokens, logprobs=True)


def greedy(cfg: Config) -> Decoding:
    return Decoding(temperature=0.0, max_new_tokens=cfg.rm.max_new_tokens)


if __name__ == "__main__":
    main()
