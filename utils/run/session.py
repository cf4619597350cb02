"""What a training program holds while it runs, and the few things that stage 2 and GRPO do in the same way: bring the
current weights to the engine that generates, ask it, and write down what was asked."""

import json
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from utils.config.load import Config, exit_with
from utils.data.encoding import EncodedPrompt, encode_prompt, prompt_chat
from utils.data.samples import Sample
from utils.data.stream import SampleStream
from utils.dist import Ranks, capture_error
from utils.learner.checkpoint import save_adapter, save_merged
from utils.learner.learner import Learner
from utils.packing import Batch
from utils.parsing import TokenTable
from utils.rollout.backend import Decoding, RolloutBackend, RolloutRequest, RolloutResult, check_prompt, policy_lags
from utils.rollout.client import RolloutClient
from utils.run.monitor import Monitor, evaluation_file, write_evaluation
from utils.run.prefetch import Prefetcher
from utils.run.recovery import retry_on_server_loss
from utils.run.resume import RunLock, random_states, rank_file, set_random_states, write_checkpoint
from utils.run.rollout_log import RolloutLog
from utils.run.server_watch import ServerWatch
from utils.run.shutdown import Stopped, StopRequest
from utils.sync.adapter_sync import FallbackSync
from utils.sync.weight_sync import WeightSync
from utils.targets import Segment

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Session:
    """Everything a run holds; `utils.run.setup.open_session` makes it, and the program its `prefetcher`."""

    cfg: Config
    ranks: Ranks
    run_id: str
    stream: SampleStream  # training samples of this rank
    val_samples: list[Sample]
    processor: Any
    table: TokenTable | None  # None where the tokenizer has no coordinate tokens, which stage 2 never lets pass
    client: RolloutClient | None  # of the rollout servers, where there are any
    backend: RolloutBackend
    # What brings new weights to the backend; one in this process does so itself.
    sync: WeightSync | FallbackSync | RolloutBackend
    learner: Learner
    collate: Callable[[list[Segment]], Batch]
    monitor: Monitor
    rollout_log: RolloutLog
    watch: ServerWatch
    num_steps: int
    metric: str  # of an evaluation, that decides which step was the best
    lock: RunLock | None = None  # on the run directory, rank 0's
    steps_done: int = 0
    resumed: dict[str, Any] | None = None  # this rank's state in the checkpoint that the run goes on from
    owes_evaluation: bool = False  # a stop came ahead of the one due at `steps_done`
    stop: StopRequest = field(default_factory=StopRequest)
    prefetcher: Prefetcher = field(init=False)
    version: str | None = None  # the policy that generates
    best: float = -math.inf  # of `metric`, so far
    sync_values: dict[str, float] = field(default_factory=dict)  # of the last sync, until a step or evaluation logs it
    seconds: Counter = field(default_factory=Counter)  # by part, since the run began
    logged_seconds: Counter = field(default_factory=Counter)  # what earlier steps have logged of them
    _lock: Any = field(default_factory=threading.Lock, repr=False)
    _encoding: Any = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count what happens inside as seconds of `part`; from any thread."""
        start = time.monotonic()
        yield
        with self._lock:
            self.seconds[part] += time.monotonic() - start

    def on_current_weights(self, step: int, work: Callable[[], Any], where: str) -> Any:
        """`work()` once the engine that generates has the weights of `step`; again from there if a server was lost."""

        def synced() -> Any:
            self.sync_weights(step)
            return work()

        def reopen() -> None:
            self.version = None  # the servers get everything anew
            self.sync.open()

        where = f"{where} with weights of step {step}"
        return retry_on_server_loss(synced, where, self.ranks, self.client, self.prefetcher.stop, reopen)

    def sync_weights(self, step: int) -> None:
        """The engine that generates gets the weights of `step` unless it has them (SYN-2)."""
        version = f"{self.run_id}:{step}"
        if self.version == version:
            return
        with self.timed("sync"):
            report = self.sync.sync(version)
        self.version = version
        self.sync_values = {
            "sync/bytes": report.num_bytes,
            "sync/gb_per_s": report.gb_per_s,
            "sync/seconds": report.seconds,
        }

    def pop_sync_metrics(self) -> dict[str, float]:
        """Scalars of the sync since last taken. Whoever used the new weights logs them under its own step: a resumed
        run's first sync then belongs to its first own step, and stands in the curves once."""
        values, self.sync_values = self.sync_values, {}
        return values

    def encode(self, samples: Sequence[Sample]) -> list[EncodedPrompt]:
        """Their prompts, from any thread: a fast tokenizer cannot be used by two at once."""
        with self._encoding:
            return [encode_prompt(sample, self.processor) for sample in samples]

    def roll_out(
        self,
        samples: Sequence[Sample],
        prompts: Sequence[EncodedPrompt],
        sampling: Decoding,
        step: int,
        micro_step_idx: int,
        strict: bool = True,
    ) -> list[RolloutResult]:
        """The current policy's answers, in order, each behind exactly the prompt it will be trained behind (ROL-3).

        Not `strict`, for requests that may meet a sync: the answers say which of this run's weights made them (SYN-8).
        """
        requests = [
            RolloutRequest(sample.id, prompt_chat(sample), sample.images, **vars(prompt))
            for sample, prompt in zip(samples, prompts, strict=True)
        ]
        answers = self.backend.generate(
            requests,
            sampling,
            global_step=step,
            micro_step_idx=micro_step_idx,
            run_seed=self.cfg.training.seed,
            expect_version=self.version,
            strict=strict,
        )
        for request, answer in zip(requests, answers, strict=True):
            if answer.error is None:
                check_prompt(
                    request.sample_id,
                    request.prompt_token_ids,
                    answer.prompt_token_ids,
                    self.processor.tokenizer.decode,
                )
        return answers

    def log_calls(self, step: int, phase: str) -> dict[str, float]:
        """A line of rollouts.jsonl about all calls since the last one (LOG-1); returns its numbers (collective)."""
        if self.client is None:
            return {}
        return self.rollout_log.write(step, self.version, self.sync.mode, self.sync.fallback, phase)

    def pop_seconds(self) -> dict[str, float]:
        """Seconds by part since they were last taken: with prefetch, rollouts of coming steps are in them."""
        passed = {name: value - self.logged_seconds[name] for name, value in self.seconds.items()}
        self.logged_seconds.update(passed)
        return passed

    def log_evaluation(
        self, step: int, result: dict[str, float], scalars: dict[str, float], answers: list[dict[str, Any]]
    ) -> None:
        """An evaluation onto disk and into the curves, `answers` of all ranks together (collective)."""
        gathered = [answer for part in self.ranks.gather(answers) for answer in part]
        is_best, sync_values = result[self.metric] > self.best, self.pop_sync_metrics()
        self.best = max(self.best, result[self.metric])
        if self.ranks.is_main:
            self.monitor.scalars(step, scalars | sync_values)
            self.monitor.flush()
            write_evaluation(Path(self.cfg.training.output_dir), step, result, gathered, is_best)
            shown = " ".join(f"{name}={value:.3f}" for name, value in result.items() if not name.startswith("num_"))
            logger.info("evaluation at step %d on %d samples: %s%s", step, len(gathered), shown, " (best)" * is_best)

    def resume(self, restore: Callable[[dict[str, Any]], None]) -> None:
        """Go on from the checkpoint, where there is one; exit status 2 where any rank cannot (collective).

        Args:
            restore: takes this rank's state; raises ValueError where it does not fit.
        """
        problem = None
        if self.resumed is not None:
            try:
                restore(self.resumed)
            except ValueError as error:
                problem = str(error)
        if problem := next(filter(None, self.ranks.gather(problem)), None):  # whichever rank's
            exit_with(f"training.resume_from_checkpoint: {problem}", self.ranks.is_main)

    def begin(self, evaluate: Callable[[int], None]) -> None:
        """What precedes the first step: from here on signals are heeded; an evaluation that is due is made."""
        self.stop.install()
        if self.owes_evaluation or (self.cfg.training.eval_at_start and self.resumed is None):
            evaluate(self.steps_done)

    def end_step(
        self, signal_name: str | None, evaluate: Callable[[int], None], rank_state: Callable[[bool], dict[str, Any]]
    ) -> None:
        """What is due behind step `steps_done`: evaluation, checkpoint, and the end where a signal asks for it.

        Args:
            signal_name: of the signal, the same on all ranks.
            rank_state: the state of this rank, given whether an evaluation is left to whoever goes on.

        Raises:
            Stopped: the step that the signal came in is finished and saved.
        """
        cfg, step = self.cfg.training, self.steps_done
        is_last = step == self.num_steps
        is_due = bool(cfg.eval_steps) and (is_last or step % cfg.eval_steps == 0)
        if is_due and not signal_name:
            evaluate(step)
        if is_last or signal_name or (cfg.save_steps and step % cfg.save_steps == 0):
            self.save(rank_state(is_due and bool(signal_name)))
        if signal_name and (is_due or not is_last):
            raise Stopped(f"stopped by {signal_name} after step {step} of {self.num_steps}, saved")

    def finish(self, **facts: Any) -> None:
        """Last words: where the time went, what was left in the buffers (LRN-1), what to look at."""
        if not self.ranks.is_main:
            return
        output = Path(self.cfg.training.output_dir)
        seconds = {name: round(value, 3) for name, value in self.seconds.items()}
        record = {"steps": self.num_steps, "world_size": self.ranks.world_size, "seconds": seconds, **facts}
        (output / "finished.json").write_text(json.dumps(record, indent=2) + "\n")
        if self.sync.ledger and self.cfg.rm.vllm.sync.verify == "always":
            ledger = {"version": self.version, "digests": self.sync.ledger}
            (output / "weights.json").write_text(json.dumps(ledger, indent=2) + "\n")
        logger.info("finished %d steps%s", self.num_steps, "".join(f"; {name}: {fact}" for name, fact in facts.items()))
        logger.info("seconds on rank 0: %s", seconds)
        logger.info("checkpoint: %s; curves: tensorboard --logdir %s", output / f"checkpoint-{self.num_steps}", output)

    def state_dict(self, owes_evaluation: bool, num_undone: int = 0) -> dict[str, Any]:
        """What this rank needs to go on from here, of plain types and tensors. A program adds what is its own.

        Args:
            owes_evaluation: the one due at this step is left to whoever goes on.
            num_undone: samples drawn ahead that the run which goes on draws again.
        """
        return {
            "stream": self.stream.state_dict(num_undone),
            "random": random_states(self.ranks.device),
            "best": self.best,
            "owes_evaluation": owes_evaluation,
            "sync": {"mode": getattr(self.sync, "mode", None), "fallback": getattr(self.sync, "fallback", None)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`. The last thing before the loop: setting up draws random numbers, too. (The sync's
        part is needed earlier, when it is made.)

        Raises:
            ValueError: the data are not those of the checkpoint.
        """
        self.best = state["best"]
        if state["owes_evaluation"] and not self.owes_evaluation:  # an earlier process that went on from here made it
            made = json.loads(evaluation_file(Path(self.cfg.training.output_dir), self.steps_done).read_text())
            self.best = max(self.best, made[self.metric])
        self.stream.load_state_dict(state["stream"])
        set_random_states(state["random"], self.ranks.device)

    def save(self, rank_state: dict[str, Any]) -> Path:
        """The checkpoint of `steps_done` (LRN-5, LRN-6; collective).

        Args:
            rank_state: all of this rank's own state, for `resumed` of the run that goes on from here.

        Raises:
            DistributedError: on all ranks, where any could not write.
        """

        def write(folder: Path) -> None:
            self.learner.save_state(folder / "state")
            error = capture_error(torch.save, rank_state, rank_file(folder, self.ranks.rank))
            self.ranks.raise_on_all_ranks(error, f"saving {folder}")
            save_merged(self.learner.model, self.cfg.model.path, folder / "merged", self.ranks)
            save_adapter(self.learner.model, folder / "adapter", self.ranks)

        self.monitor.flush()  # the curves up to here must not be lost by a kill behind the checkpoint
        with self.timed("save"):
            return write_checkpoint(
                Path(self.cfg.training.output_dir),
                self.steps_done,
                self.ranks,
                write,
                run_id=self.run_id,
                config=self.cfg.model_dump(mode="json", by_alias=True),
                save_total_limit=self.cfg.training.save_total_limit,
            )

    def close(self) -> None:
        """Leave servers and process groups; the servers stay up (GRP-4)."""
        self.prefetcher.stop(timeout_s=10.0)
        self.watch.close()
        self.monitor.close()
        self.sync.close()
        self.ranks.close()
        if self.lock is not None:
            self.lock.close()


def make_prefetcher(
    run: Any,
    draw: Callable[[Any], Any],
    ask: Callable[[Any, Any, int, int], Any],
    finish: Callable[[Any, Any, int], Any],
    versions_of: Callable[[Any], list[str | None]],
    encode: Callable[[Any, Any], Any] | None = None,
) -> Prefetcher:
    """What prepares a run's micro-steps: within their step, or with `async` before it (LRN-8). Only servers can be
    asked in the background: the other backends generate on all ranks together, with the weights that train.

    Args:
        run: a `Session`, given to the functions ahead of what `Prefetcher` gives them.
        versions_of: the weights that made the answers of a finished micro-step.
    """
    prefetch = run.cfg.rm.async_
    window = prefetch.version_window if prefetch.enabled else 0
    return Prefetcher(
        draw=partial(draw, run),
        ask=partial(ask, run),
        finish=partial(finish, run),
        micro_steps=run.cfg.training.gradient_accumulation_steps,
        window=window,
        queue_limit=prefetch.queue_limit,
        is_fresh=lambda made, step: max(policy_lags(versions_of(made), step), default=0) <= window,
        encode=partial(encode, run) if encode else None,
        background=run.client is not None,
    )
