"""The policy that generates: its weights brought to the engine, its rollouts, and recovery from a lost server (CON-4).

Noticing a loss is local to a rank, recovery is collective: every piece of work ends in a fence shared by all ranks, and
any loss sends all of them into the recovery together.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from utils.data.encoding import EncodedPrompt
from utils.data.samples import Sample
from utils.dist import DistributedError, Ranks, capture_error
from utils.rollout.backend import Engine, RolloutContext, RolloutResult, RolloutSampling, check_prompt, rollout_requests
from utils.rollout.client import RolloutClient
from utils.rollout.round import ServerGone
from utils.run.records import Timer
from utils.run.rollout_log import RolloutLog

logger = logging.getLogger(__name__)

MAX_RECOVERIES = 5  # of one piece of work: a server that dies that often is broken
Result = TypeVar("Result")


@dataclass
class Policy:
    """The current weights as `engine` generates with them."""

    engine: Engine
    client: RolloutClient | None  # of the rollout servers; None where there are none, so that nothing can be lost
    ranks: Ranks
    run_id: str
    run_seed: int
    decode: Callable[[list[int]], str]  # token ids to text, for messages
    rollout_log: RolloutLog
    timer: Timer
    version: str | None = None  # of the engine's weights, `run id:step`; None before the first sync
    # Stops requests in the background, so that none reaches a returned server that has no weights yet.
    drain: Callable[[], None] = lambda: None
    _sync_metrics: dict[str, float] = field(default_factory=dict)

    def with_current_weights(self, step: int, work: Callable[[], Result], where: str) -> Result:
        """Sync the weights of `step`, then return `work()`; both again after a rollout server was lost (collective).

        After a loss the ranks drain their requests, wait for all servers (`timeout_s`), open the communicators anew and
        send full weights before any request.

        Raises:
            DistributedError: on all ranks, for any other failure, or for servers that do not come back as they were, or
                not before a stop request. The model is as it was.
        """
        where = f"{where} with weights of step {step}"
        for recovery in range(MAX_RECOVERIES + 1):
            try:
                if recovery:
                    logger.warning(
                        "all rollout servers respond; opening communicators again, then sending full weights"
                    )
                    self.version = None
                    self.engine.open()
                result, error = None, None
                try:
                    self.sync(step)
                    result = work()
                except Exception as caught:  # noqa: BLE001  (raised on all ranks by the next line)
                    error = caught
                rested = capture_error(self.engine.rest)
                self.ranks.raise_on_all_ranks(error or rested, where)
                if recovery:
                    logger.warning("%s: done after recovery; nothing was lost", where)
                return result
            except DistributedError as failure:
                if recovery == MAX_RECOVERIES or not self._can_recover(failure):
                    raise
                logger.warning("%s\nwaiting for the rollout servers, then continuing", failure)
            self.drain()
            waited = capture_error(self.client.wait_ready)
            self.ranks.raise_on_all_ranks(waited, f"{where}: waiting for the rollout servers")
        raise AssertionError("unreachable: the last recovery returns or raises")

    def sync(self, step: int) -> None:
        """Bring the weights of `step` to the engine unless it has them (SYN-2; collective)."""
        version = f"{self.run_id}:{step}"
        if self.version == version:
            return
        with self.timer.timed("sync"):
            result = self.engine.sync(version)
        self.version = version
        metrics = {"bytes": result.num_bytes, "gb_per_s": result.gb_per_s, "seconds": result.seconds}
        self._sync_metrics = {f"sync/{name}": value for name, value in metrics.items()}

    def generate(
        self,
        samples: Sequence[Sample],
        prompts: Sequence[EncodedPrompt],
        sampling: RolloutSampling,
        step: int,
        micro_step_idx: int,
        allow_stale: bool = False,
    ) -> list[RolloutResult]:
        """Rollouts of the current policy, in order, each after exactly the prompt it is trained with (ROL-3).

        Args:
            allow_stale: for requests that may run during a sync: each response says which of this run's weights made it
                (SYN-8).
        """
        requests = rollout_requests(samples, prompts)
        context = RolloutContext(self.run_seed, step, micro_step_idx, self.version, allow_stale)
        results = self.engine.generate(requests, sampling, context)
        for request, result in zip(requests, results, strict=True):
            if result.error is None:
                check_prompt(request.sample_id, request.prompt_token_ids, result.prompt_token_ids, self.decode)
        return results

    def log_calls(self, step: int, phase: str) -> dict[str, float]:
        """Write all calls since the last time to rollouts.jsonl (LOG-1) and return their metrics (collective)."""
        if self.client is None:
            return {}
        return self.rollout_log.write(step, self.version, self.engine.mode, self.engine.fallback, phase)

    def pop_sync_metrics(self) -> dict[str, float]:
        """Metrics of the sync since the last call. The first user of new weights logs them under its own step, so a
        resumed run's first sync stands in the curves once."""
        metrics, self._sync_metrics = self._sync_metrics, {}
        return metrics

    def _can_recover(self, failure: DistributedError) -> bool:
        """Was a server lost, and may all ranks wait for it, since none is to stop (collective)?"""
        is_lost = may_wait = False
        if self.client is not None and (may_wait := not self.client.stop.is_set()):
            is_lost = isinstance(failure.__cause__, ServerGone) or bool(self.client.lost())
        found = self.ranks.gather((is_lost, may_wait))
        return any(is_lost for is_lost, _ in found) and all(may_wait for _, may_wait in found)
