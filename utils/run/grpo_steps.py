"""What passes between the stages of a GRPO micro-step: prompts, responses, scored answers."""

from dataclasses import dataclass
from typing import Any

from utils.data.encoding import EncodedPrompt
from utils.data.samples import Sample
from utils.grpo import Group, groups_from_state, groups_to_state
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
