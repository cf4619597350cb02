"""Stage 2 off-policy: `train_stage2.py` whose rollouts are of the start model or of a teacher at every step.

    deepspeed --num_gpus 1 -m studies.offline_stage2 --config FILE

The teacher is `model.reference_path`. An arm of `studies/new_class.py` and `studies/taught.py`. All else is stage 2's
own: targets, losses, reference KL, evaluation of the policy. So it tells what being on-policy is worth.
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


class ReferenceEngine(hf.HfEngine):
    """Rollouts of what the reference KL compares with, except for evaluation."""

    def __init__(self, learner: Any, ranks: Ranks, processor: Any, decode_batch_size: int) -> None:
        super().__init__(learner, ranks, processor, decode_batch_size)
        self.policy, self.reference = learner.model, learner.engine.module.reference

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: RolloutSampling, context: RolloutContext
    ) -> list[RolloutResult]:
        if context.micro_step_idx == EVAL_MICRO_STEP:
            return super().generate(requests, sampling, context)
        if self.reference is None:
            with start_policy(self.policy):
                return super().generate(requests, sampling, context)
        own = self.engine_forward
        try:
            self.engine_forward = nullcontext(self.reference)
            return super().generate(requests, sampling, context)
        finally:
            self.engine_forward = own


def main() -> None:
    hf.HfEngine = ReferenceEngine  # type: ignore[misc]
    train_stage2.main()


if __name__ == "__main__":
    main()
