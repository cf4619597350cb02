"""Stage 2 off-policy: `train_stage2.py` whose rollouts come from the start model at every step, not from the policy.

    deepspeed --num_gpus 1 -m studies.offline_stage2 --config FILE

An arm of `studies/new_class.py`. All else is stage 2's own: targets, losses, reference KL, evaluation of the policy. So
it tells what being on-policy is worth.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import train_stage2
from utils.capacity import EVAL_MICRO_STEP
from utils.dist import Ranks
from utils.learner.model import start_policy
from utils.rollout import hf
from utils.rollout.backend import RolloutContext, RolloutRequest, RolloutResult, RolloutSampling


class StartModelEngine(hf.HfEngine):
    """Rollouts with the adapters disabled, except for evaluation."""

    def __init__(self, learner: Any, ranks: Ranks, tokenizer: Any, decode_batch_size: int) -> None:
        super().__init__(learner, ranks, tokenizer, decode_batch_size)
        self.policy = learner.model

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: RolloutSampling, context: RolloutContext
    ) -> list[RolloutResult]:
        is_evaluation = context.micro_step_idx == EVAL_MICRO_STEP
        with nullcontext() if is_evaluation else start_policy(self.policy):
            return super().generate(requests, sampling, context)


def main() -> None:
    hf.HfEngine = StartModelEngine  # type: ignore[misc]
    train_stage2.main()


if __name__ == "__main__":
    main()
