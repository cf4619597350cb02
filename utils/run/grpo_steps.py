"""What passes between the stages of a GRPO micro-step: prompts, responses, scored answers; and what is logged of it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from utils.data.encoding import EncodedPrompt
from utils.data.samples import Sample
from utils.grpo import Group, WeightedAnswers, groups_from_state, groups_to_state
from utils.rollout.backend import RolloutResult


@dataclass
class Prompts:
    """A micro-step's samples, followed by those drawn to replace prompts without a signal.

    Attributes:
        data_position: after all of them were drawn; None while replacements may still be drawn.
    """

    samples: list[Sample]
    data_position: dict[str, Any] | None = None


@dataclass
class ResponseGroup:
    """A prompt, its responses, and their scored answers once `Grpo.score_groups` was called."""

    sample: Sample
    prompt: EncodedPrompt
    results: list[RolloutResult]
    answers: Group | None = None


@dataclass
class Responses:
    """Response groups of one micro-step."""

    groups: list[ResponseGroup]
    num_drawn: int  # prompts
    data_position: dict[str, Any]  # after they were drawn


@dataclass
class MicroStep:
    """Scored answers of one micro-step; the rest as in `Responses`."""

    groups: list[Group]
    num_drawn: int
    data_position: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        """Plain types and tensors."""
        return vars(self) | {"groups": groups_to_state(self.groups)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "MicroStep":
        return cls(**state | {"groups": groups_from_state(state["groups"])})


def reward_metrics(names: Sequence[str], weights: np.ndarray, rewards: np.ndarray) -> dict[str, float]:
    """Mean and spread of the weighted sum and of each reward; empty without answers.

    Args:
        weights: float64 `[F]`.
        rewards: float64 `[N, F]`, of the answers that did not fail.
    """
    if not len(rewards):
        return {}
    total = rewards @ weights
    columns = dict(zip(names, rewards.T, strict=True))
    return {
        "reward": float(total.mean()),
        "reward_std": float(total.std()),
        **{f"reward/{name}": float(column.mean()) for name, column in columns.items()},
        **{f"reward/{name}_std": float(column.std()) for name, column in columns.items()},
    }


def dump_answers(run_dir: Path, step: int, weighted: WeightedAnswers, names: Sequence[str], num_answers: int) -> None:
    """Write the first answers as text, one a line: `dumps/step_000040.jsonl`."""
    path = run_dir / "dumps" / f"step_{step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for answer, advantages in list(zip(weighted.answers, weighted.advantages, strict=True))[:num_answers]:
            record = {
                "id": answer.segment.sample_id,
                "response": answer.text,
                "rewards": dict(zip(names, answer.rewards.tolist(), strict=True)),
                "advantage": float(advantages.mean()) if len(advantages) else 0.0,
                "is_valid": answer.is_valid,
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
