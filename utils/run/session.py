"""State of a training program, and what stage 2 and GRPO do alike around their steps: begin, evaluate, save, stop,
finish and resume."""

import json
import logging
import math
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from utils.capacity import EVAL_MICRO_STEP
from utils.config.load import Config, exit_with
from utils.data.encoding import EncodedPrompt, encode_prompt
from utils.data.images import as_file
from utils.data.samples import DataError, Sample
from utils.data.stream import SampleStream
from utils.dist import DistributedError, Ranks, capture_error, outcome_of
from utils.learner.checkpoint import save_adapter, save_merged
from utils.learner.learner import Learner, StepResult
from utils.packing import Batch
from utils.parsing import TokenTable
from utils.rollout.backend import RolloutResult, RolloutSampling
from utils.rollout.teacher import Teacher
from utils.run.monitor import (
    Monitor,
    collapse_warnings,
    comparable_scores,
    evaluation_file,
    write_evaluation,
    write_whole,
)
from utils.run.policy import Policy
from utils.run.prefetch import Prefetcher, Stages
from utils.run.records import LOGGED_PARTS, Timer
from utils.run.resume import RunLock, random_states, rank_file, set_random_states, write_checkpoint
from utils.run.server_watch import ServerWatch
from utils.run.shutdown import Stopped, StopRequest
from utils.targets import Segment

logger = logging.getLogger(__name__)

EVAL_SAMPLES = 256  # of a rank that are answered at once, while the next are encoded
_Encoded = tuple[list[Sample], list[EncodedPrompt]]
Score = TypeVar("Score")
Result = TypeVar("Result")


class Program(Protocol):
    """The training script's part of a session: its evaluation (collective) and this rank's own checkpoint state, of
    plain types and tensors, with the prepared micro-steps as `ahead`. Loading the state raises ValueError where it does
    not fit this run."""

    session: "Session"

    def evaluate(self, step: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Data:
    """Samples of this rank and what encodes them."""

    stream: SampleStream  # training samples
    val_samples: Sequence[Sample]  # of all ranks, read when asked for
    processor: Any
    table: TokenTable | None  # None where the tokenizer has no coordinate tokens; stage 2 never allows that
    pixel_dtype: torch.dtype  # the model's: it would cast them itself, in the main thread
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def encode(self, samples: Sequence[Sample], keeps_pixels: bool = True) -> list[EncodedPrompt]:
        """Encode prompts, from any thread: a fast tokenizer cannot be used by two at once."""
        with self._lock:
            prompts = (encode_prompt(sample, self.processor, self.pixel_dtype) for sample in samples)
            return [prompt if keeps_pixels else replace(prompt, vision={}) for prompt in prompts]

    def validation_ahead(self, slices: Sequence[range], keeps_pixels: bool) -> Iterator[_Encoded]:
        """Validation samples and prompts, slice by slice. The next ones are encoded while the caller has these."""

        def read(places: range) -> _Encoded:
            samples = [self.val_samples[place] for place in places]
            return samples, self.encode(samples, keeps_pixels)

        encoder = ThreadPoolExecutor(1, "encode-eval")
        begun = (encoder.submit(read, places) for places in slices)
        try:
            coming = next(begun, None)
            while coming is not None:
                ready, coming = coming.result(), next(begun, None)
                yield ready
        finally:
            encoder.shutdown(wait=False, cancel_futures=True)


@dataclass(kw_only=True)
class Session:
    """Everything a run holds; `utils.run.setup.open_session` builds it.

    Attributes:
        place: gives a finished segment its positions, in the thread that finishes it (LRN-8).
        open_monitor: changes what the run directory holds, so that `resume` calls it when nothing can refuse the run.
        metric: of an evaluation, that decides which step was the best.
        resumed: this rank's state in the checkpoint that the run continues from, until `resume` has loaded it.
        owes_evaluation: an earlier process ended before the evaluation due at `steps_done`.
    """

    cfg: Config
    ranks: Ranks
    run_id: str
    num_steps: int
    data: Data
    policy: Policy
    learner: Learner
    place: Callable[[Segment], Segment]
    collate: Callable[[list[Segment]], Batch]
    open_monitor: Callable[["Session"], Monitor]
    watch: ServerWatch
    timer: Timer
    metric: str
    inputs: dict[str, Any]  # digests of data and base checkpoint, for the manifest
    lock: RunLock | None = None  # on the run directory, rank 0's
    resumed: dict[str, Any] | None = None
    teacher: Teacher | None = None
    program: Program | None = None  # from `begin` on
    steps_done: int = 0
    steps_saved: int = 0  # those that the newest checkpoint holds
    owes_evaluation: bool = False
    validation: dict[str, float] = field(default_factory=dict)  # the newest score and the first, for the progress line
    collapsed: set[str] = field(default_factory=set)  # signs of collapse that the last step showed
    prefetcher: Prefetcher | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    settings: dict[str, Any] = field(default_factory=dict)  # resolved, for the manifest: `settings_on_record`
    monitor: Monitor = field(init=False)

    @property
    def run_dir(self) -> Path:
        return Path(self.cfg.training.output_dir)

    def timed(self, part: str) -> AbstractContextManager[None]:
        """Count the time inside the context as seconds of `part`."""
        return self.timer.timed(part)

    # Before the first step

    def prefetch(self, stages: Stages, draws_more: bool = False) -> None:
        """Prepare micro-steps by `stages`: within their step, or with `async` before it (LRN-8). Only servers, or no
        engine at all, leave that to threads: others generate on all ranks together, with the weights that train."""
        options, num_micro_steps = self.cfg.rm.async_, self.cfg.training.gradient_accumulation_steps
        device = self.ranks.device
        self.prefetcher = Prefetcher(
            stages,
            num_micro_steps,
            self.num_steps,
            window=options.version_window if options.enabled else 0,
            queue_limit=options.queue_limit,
            background=self.policy.client is not None or not self.cfg.generates,
            num_threads=num_micro_steps + options.queue_limit * options.enabled,  # requests are what is bounded (DIS-3)
            draws_more=draws_more,
            # A new thread has the first GPU, whatever its process has; reward models may run in it.
            begin_judging=partial(torch.cuda.set_device, device) if device.type == "cuda" else None,
        )
        self.policy.drain = self.prefetcher.drain

    def resume(self, program: Program) -> None:
        """Continue from the checkpoint, where there is one, and open the records; exit status 2, with the records as
        they were, where any rank cannot continue (collective).

        The last thing before the loop: setting up draws random numbers, too.
        """
        problem, states = None, None
        if self.resumed is not None:
            if calls := self.resumed.get("calls"):  # absent in checkpoints of earlier versions
                self.policy.rollout_log.restore(calls)
            try:
                program.load_state_dict(self.resumed)
            except (ValueError, DataError, OSError) as error:  # the latter two where its samples are drawn again
                problem = str(error)
            states = self.resumed["random"]
            self.resumed = None  # it holds the prepared micro-steps, pixels included
        if problem := self.ranks.first(problem):
            exit_with(f"training.resume_from_checkpoint: {problem}", self.ranks.is_main)
        self.monitor = self.open_monitor(self)
        if states is not None:
            set_random_states(states, self.ranks.device)
            if self.ranks.is_main and any(self.run_dir.glob("eval/step_*.json")) and not self.find_validation():
                logger.warning("no evaluation used the current settings; the best score so far no longer counts")

    def begin(self, program: Program) -> None:
        """Have signals ask for a checkpoint from now on, and run an evaluation that is due before the first step."""
        self.program, self.steps_saved, self.stop.is_training = program, self.steps_done, True
        self.stop.install()  # again: a library may have taken the signals
        self.prefetcher.end_waits_at(self.stop.requested)
        for client in (self.policy.client, self.teacher and self.teacher.client):
            if client is not None:
                client.end_waits_at(self.stop.requested)
        if self.owes_evaluation or (self.cfg.training.eval_at_start and not self.steps_done):
            program.evaluate(self.steps_done)

    # A step

    def prepare(self, step: int) -> list[Any]:
        """Return the micro-steps of `step`, made with its weights by the program's `Stages` (collective).

        Where no step asks for rollouts, only the first one syncs, to show at once that it works; evaluations do so by
        themselves.
        """
        get, where = partial(self.prefetcher.get, step), f"preparing step {step}"
        if not self.cfg.trains_on_rollouts and self.policy.version is not None:
            return self.on_all_ranks(get, where)
        with self.finished_steps_saved():
            return self.policy.with_current_weights(step, get, where)

    def on_all_ranks(self, work: Callable[[], Result], where: str) -> Result:
        """Return `work()`, which trains nothing; on one rank alone it may fail only after its last collective
        (collective).

        Raises:
            DistributedError: on all ranks, where it failed on any; the finished steps are saved (LRN-12).
        """
        with self.finished_steps_saved():
            made, error = outcome_of(work)
            self.ranks.raise_on_all_ranks(error, where)
        return made

    @contextmanager
    def finished_steps_saved(self, kind: type[DistributedError] = DistributedError) -> Iterator[None]:
        """Save the finished steps before an error ends the run (LRN-12). Errors of this `kind` come on all ranks and
        leave the model as those steps made it.

        Raises:
            Stopped: instead of it, where a signal came.
        """
        try:
            yield
        except kind as failure:
            signal_name = self._stop_signal()
            if (error := capture_error(self._save_unsaved)) is not None:
                logger.error("the finished steps could not be saved: %s", error)
            elif signal_name:
                raise Stopped(f"{self._stop_words(signal_name)}; interrupted: {failure}") from failure
            raise

    # After a step

    def gather_step(self, result: StepResult, **own: Any) -> dict[str, Any]:
        """This step's numbers of all ranks, one entry per rank under each name (collective).

        Args:
            own: this rank's; `lengths` (new tokens per response) and `lags` (of each trained response) among them.

        Returns:
            `own` of all ranks, `seconds`, `num_tokens`, `room`, `remade` (of this process so far), and as `signal_name`
            a signal that any rank has received.
        """
        own |= {"seconds": self.timer.pop(), "num_tokens": result.num_tokens, "room": result.room}
        own |= {"remade": self.prefetcher.num_remade, "signal_name": self.stop.signal_name}
        parts = self.ranks.gather(own)
        gathered: dict[str, Any] = {name: [part[name] for part in parts] for name in own}
        return gathered | {"signal_name": next(filter(None, gathered["signal_name"]), None)}

    def log_step(
        self, step: int, metrics: dict[str, float], quality: Mapping[str, float] | None, **shown: float
    ) -> None:
        """Log a step's curves, with those of calls, servers and sync, and its progress line (collective).

        Args:
            step: 1-based, steps done.
            quality: of the responses; warns once when it passes a bound of `training.collapse`.
            shown: on the progress line, with the tokens per second.
        """
        metrics = (
            metrics | self.policy.log_calls(step, "train") | self.watch.pop_metrics() | self.policy.pop_sync_metrics()
        )
        self.monitor.scalars(step, metrics)
        seconds = {part: metrics[f"seconds/{part}"] for part in LOGGED_PARTS}
        self.monitor.progress(step, seconds, **shown, **self.validation, tokens_per_s=metrics["train/tokens_per_s"])
        signs = collapse_warnings(quality or {}, self.cfg.training.collapse.model_dump())
        for sign in signs.keys() - self.collapsed:
            logger.warning("step %d: %s (logged once until it is over)", step, signs[sign])
        self.collapsed = set(signs)

    def end_step(self, program: Program, signal_name: str | None) -> None:
        """Do what is due after step `steps_done`: checkpoint, evaluation, and the end where a signal requests it.

        Args:
            signal_name: of the signal, the same on all ranks.

        Raises:
            Stopped: the step in which the signal came is finished and saved.
        """
        cfg, step = self.cfg.training, self.steps_done
        is_last = step == self.num_steps
        if is_last or (cfg.save_steps and step % cfg.save_steps == 0):
            self._save(program)
        if (is_due := self._evaluates_at(step)) and not signal_name:
            program.evaluate(step)
            signal_name, is_due = self._stop_signal(), False
        if signal_name and (is_due or not is_last):
            self._save_unsaved()
            raise Stopped(self._stop_words(signal_name))

    def eval_settings(self) -> dict[str, Any]:
        """What the metric of evaluations depends on besides the weights: only those with the same can be compared."""
        cfg, data = self.cfg, self.inputs["digests"]["data"]
        settings = {
            "metric": self.metric,
            "val_jsonl": [file.model_dump(mode="json") | data[file.path] for file in cfg.custom.val_jsonl or []],
            "eval_limit": cfg.training.eval_limit,
            "prompt": cfg.data.prompt,
            **cfg.model.model_dump(include={"image_min_pixels", "image_max_pixels"}),
            **cfg.rm.model_dump(include={"answer_format", "max_new_tokens"}),
        }
        if not cfg.is_grpo:
            settings["iou_threshold"] = cfg.rm.eval.iou_threshold
        elif cfg.rlhf:
            rewards = {"reward_funcs", "reward_weights", "reward_iou"}
            settings |= cfg.rlhf.model_dump(mode="json", include=rewards)
            settings["reward_files"] = self.inputs["digests"]["rewards"]
        return settings

    def _evaluates_at(self, step: int) -> bool:
        every = self.cfg.training.eval_steps
        return bool(every) and (step == self.num_steps or step % every == 0)

    def _stop_signal(self) -> str | None:
        """Name a signal that any rank has received (collective)."""
        return self.ranks.first(self.stop.signal_name)

    def _stop_words(self, signal_name: str) -> str:
        saved = ", saved" if self.steps_done else ""
        return f"stopped by {signal_name} after step {self.steps_done} of {self.num_steps}{saved}"

    # Evaluation

    def score_validation(self, step: int, score: Callable[[Sample, RolloutResult], Score]) -> list[Score]:
        """`score` of a greedy rollout for each of this rank's validation samples (LRN-7; collective)."""

        def generate_and_score() -> list[Score]:
            with self.timed("eval"):
                new_tokens, reports_logprobs = self.cfg.rm.max_new_tokens, self.cfg.uses_vllm
                greedy = RolloutSampling(max_new_tokens=new_tokens, logprobs=reports_logprobs)
                own = range(self.ranks.rank, len(self.data.val_samples), self.ranks.world_size)
                largest_share, scored = -(-len(self.data.val_samples) // self.ranks.world_size), []
                # An engine over several ranks has them exchange their samples, each with its images.
                vllm = self.cfg.rm.vllm
                piece = EVAL_SAMPLES // (4 if self.cfg.is_colocate and vllm.tensor_parallel_size > 1 else 1)
                slices = [own[at : at + piece] for at in range(0, largest_share, piece)]  # as many on each rank
                for samples, prompts in self.data.validation_ahead(slices, not self.cfg.uses_vllm):
                    results = self.policy.generate(samples, prompts, greedy, step, EVAL_MICRO_STEP)
                    scored += [score(sample, result) for sample, result in zip(samples, results, strict=True)]
                return scored

        with self.finished_steps_saved():
            return self.policy.with_current_weights(step, generate_and_score, f"evaluation at step {step}")

    def log_evaluation(
        self,
        step: int,
        result: dict[str, float],
        responses: list[dict[str, Any]],
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Write an evaluation to disk and to the curves, `responses` of all ranks together (collective). `more` stands
        in the file only. Images that are embedded in the data are written to files, which the answers name."""

        def name_images() -> list[dict[str, Any]]:
            return [own | {"images": [as_file(image, folder) for image in own["images"]]} for own in responses]

        folder = evaluation_file(self.run_dir, step).with_name("images")
        named = self.on_all_ranks(name_images, f"writing the images of the evaluation at step {step}")
        gathered = [response for part in self.ranks.gather(named) for response in part]

        def write() -> None:
            metrics = {f"eval/{name}": value for name, value in result.items()}
            metrics |= self.policy.log_calls(step, "eval") | self.policy.pop_sync_metrics()
            if not self.ranks.is_main:
                return
            self.monitor.scalars(step, metrics)
            if labels := (more or {}).get("labels"):
                columns = ["label", *next(iter(labels.values()))]
                self.monitor.table(
                    step, "eval/labels", columns, [[label, *row.values()] for label, row in labels.items()]
                )
            self.monitor.flush()
            settings = self.eval_settings()
            others = [score for at, score in comparable_scores(self.run_dir, settings).items() if at != step]
            is_best = result[self.metric] > max(others, default=-math.inf)
            record = {**result, **(more or {}), "settings": settings}
            write_evaluation(self.run_dir, step, record, gathered, is_best)
            self.find_validation()
            shown = " ".join(f"{name}={value:.3f}" for name, value in result.items() if not name.startswith("num_"))
            logger.info("evaluation at step %d on %d samples: %s%s", step, len(gathered), shown, " (best)" * is_best)

        self.on_all_ranks(write, f"writing the evaluation at step {step}")

    def find_validation(self) -> bool:
        """Take the newest and the first score for the progress line; False if no evaluation had today's settings."""
        comparable = comparable_scores(self.run_dir, self.eval_settings())
        if comparable:
            newest, first = comparable[max(comparable)], comparable[min(comparable)]
            self.validation = {f"val_{self.metric}": newest, "first": first}
        return bool(comparable)

    # Checkpoints and the end

    def _save_unsaved(self) -> None:
        """Save the finished steps unless a checkpoint holds them (collective)."""
        if self.steps_saved < self.steps_done:
            self._save(self.program)

    def _save(self, program: Program) -> None:
        """Write the checkpoint of `steps_done` (LRN-5, LRN-6; collective).

        An evaluation that is due comes after it, so a resumed run owes it unless its file is there.

        Raises:
            DistributedError: on all ranks, where any could not write.
        """
        own: dict[str, Any] = {}

        def collect() -> None:
            self.monitor.flush()  # a kill after the checkpoint must not lose the curves before it
            own.update(program.state_dict())
            num_ahead, num_micro_steps = len(own["ahead"]), self.cfg.training.gradient_accumulation_steps
            own["calls"] = self.policy.rollout_log.calls_ahead(self.steps_done, num_ahead, num_micro_steps)
            own["random"] = random_states(self.ranks.device)
            own["owes_evaluation"] = self._evaluates_at(self.steps_done)
            own["sync"] = {"mode": self.policy.engine.mode, "fallback": self.policy.engine.fallback}

        self.ranks.raise_on_all_ranks(capture_error(collect), f"saving step {self.steps_done}")

        def write(folder: Path) -> None:
            self.learner.save_state(folder / "state")
            error = capture_error(torch.save, own, rank_file(folder, self.ranks.rank))
            self.ranks.raise_on_all_ranks(error, f"saving {folder}")
            pixels = self.cfg.model.image_min_pixels, self.cfg.model.image_max_pixels
            save_merged(self.learner.model, self.cfg.model.path, folder / "merged", self.ranks, pixels)
            save_adapter(self.learner.model, folder / "adapter", self.ranks)

        limit = self.cfg.training.save_total_limit
        facts = {"run_id": self.run_id, "config": self.settings, "inputs": self.inputs}
        kept = {"save_total_limit": limit, "eval_settings": self.eval_settings()}
        with self.timed("save"):
            write_checkpoint(self.run_dir, self.steps_done, self.ranks, write, **facts, **kept)
        self.steps_saved = self.steps_done

    def finish(self, **facts: Any) -> None:
        """Write `finished.json`, with `verify: always` also `weights.json` (what servers hold), and say where the time
        went, what was left in the buffers (LRN-1), and what to look at.
        """
        if not self.ranks.is_main:
            return
        seconds = {name: round(value, 3) for name, value in self.timer.seconds.items()}
        record = {"steps": self.steps_done, "world_size": self.ranks.world_size, "seconds": seconds, **facts}
        write_whole(self.run_dir / "finished.json", json.dumps(record, indent=2) + "\n")
        ledger = self.policy.engine.ledger
        if ledger and self.cfg.rm.vllm.sync.verify == "always":
            record = {"version": self.policy.version, "digests": ledger}
            write_whole(self.run_dir / "weights.json", json.dumps(record, indent=2) + "\n")
        logger.info(
            "finished %d steps%s", self.steps_done, "".join(f"; {name}: {fact}" for name, fact in facts.items())
        )
        logger.info("seconds on rank 0: %s", seconds)
        checkpoint = self.run_dir / f"checkpoint-{self.steps_done}"
        logger.info("checkpoint: %s; curves: tensorboard --logdir %s", checkpoint, shlex.quote(str(self.run_dir)))
        logger.info("look at it: python -m tools.report %s", shlex.quote(str(self.run_dir)))
        if self.cfg.is_detection:
            scored = self.cfg.custom.val_jsonl[0].path if self.cfg.custom.val_jsonl else "FILE"
            how = ["--checkpoint", f"{checkpoint}/merged", "--data", scored, "--config", str(self.cfg._origin.file)]
            logger.info("score it: python -m tools.evaluate %s", shlex.join(how))

    def close(self) -> None:
        """Leave servers and process groups; the servers stay up (GRP-4). What fails is raised when all is done."""
        self.stop.requested.set()  # what still waits for a server, a teacher above all, gives up soon
        with ExitStack() as last_first:
            if self.lock is not None:
                last_first.callback(self.lock.close)
            last_first.callback(self.ranks.close)
            last_first.callback(self.policy.engine.close)
            last_first.callback(self.monitor.close)
            last_first.callback(self.watch.close)
            self.prefetcher.close(timeout_s=10.0)
