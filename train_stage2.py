"""Stage 2: on-policy rollout-matching training.

    deepspeed --num_gpus 2 train_stage2.py --config configs/demo/stage2.yaml     (CPU; see `make demo`)
    deepspeed --include localhost:3 train_stage2.py --config configs/stage2/qwen3vl_8b_3v1.yaml

Start the rollout server first (`make server CONFIG=...`), unless the learners generate themselves (`vllm.mode:
colocate`, or `rollout_backend: hf`). Every optimizer step: the current weights go to the engine that generates; the
model answers on the step's images; each answer is parsed token by token, its objects matched with the ground truth, and
one training sequence written from the model's own prefix and every object it missed; the sequences are packed into
rows; one forward and backward per row; one optimizer step.
"""

import argparse
import json
import logging
import math
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import numpy as np

from utils import targets
from utils.adapter_sync import FallbackSync, make_sync
from utils.checkpoint import save_adapter, save_merged
from utils.config import Config, ConfigError, check_world_size, engine_json, load_config_or_exit, require_variant
from utils.data import (
    DataError,
    EncodedPrompt,
    Sample,
    SampleStream,
    encode_prompt,
    load_processor,
    load_samples,
    prompt_chat,
)
from utils.dist import Ranks
from utils.evaluation import count_sample, scores
from utils.geometry import iou_matrix
from utils.learner import Learner, StepResult
from utils.losses import LossWeights
from utils.matching import match
from utils.model import dummy_segment, position_ids_for
from utils.monitor import Monitor, collapse_warnings, write_run_json
from utils.packing import Batch, CarryBuffer, check_fits, collate_packed, collate_padded
from utils.parsing import ParsedAnswer, TokenTable, parse_answer
from utils.plan import check_engines, print_dry_run
from utils.records import Example, RolloutLog, SampleDump, ServerWatch
from utils.recovery import through_restarts
from utils.rollout import Decoding, RolloutBackend, RolloutRequest, RolloutResult, ServerBackend, check_prompt
from utils.rollout_client import RolloutClient
from utils.targets import Segment, TargetOptions, build_target
from utils.weight_sync import MergedWeights, Probe, WeightSync, attempt

logger = logging.getLogger("train_stage2")
EVAL_MICRO_STEP = 1 << 20  # seeds of evaluation rollouts never meet those of training


def main() -> None:
    args = parse_args()
    cfg = load_config_or_exit(args.config)
    require_variant(cfg, "rollout_matching_sft", "train_stage2.py")
    if args.dry_run:
        print_dry_run(cfg, args.world_size)
        return
    run = set_up(cfg)
    try:
        train(run)
    finally:
        run.close()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file; everything is set there")
    parser.add_argument("--dry-run", action="store_true", help="check the config, print the plan, touch no device")
    parser.add_argument("--world-size", type=int, default=1, help="learner ranks to plan for (--dry-run only)")
    parser.add_argument("--local_rank", type=int, default=0, help="added by the launcher")
    return parser.parse_args()


@dataclass
class Run:
    """Everything a run holds. The functions below read like the life of a step; none of them hides state elsewhere."""

    cfg: Config
    ranks: Ranks
    run_id: str
    stream: SampleStream  # training samples of this rank
    val_samples: list[Sample]
    processor: Any
    table: TokenTable
    client: RolloutClient | None  # of the rollout servers, where there are any
    backend: RolloutBackend
    # What brings new weights to the backend; one in this process does so itself.
    sync: WeightSync | FallbackSync | RolloutBackend
    learner: Learner
    collate: Callable[[list[Segment]], Batch]
    buffer: CarryBuffer  # finished segments that wait for a row
    monitor: Monitor
    rollout_log: RolloutLog
    dump: SampleDump
    watch: ServerWatch
    num_steps: int
    version: str | None = None  # the policy that generates
    seconds: Counter = field(default_factory=Counter)  # of the current step, by part
    total_seconds: Counter = field(default_factory=Counter)
    best: float = -math.inf  # of training.metric_for_best_model

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[part] += time.monotonic() - start
        self.total_seconds[part] += time.monotonic() - start

    def close(self) -> None:
        self.watch.close()
        self.monitor.close()
        self.sync.close()
        self.ranks.close()


# ---------------------------------------------------------------------------------------------------------------------
# set-up: whatever a user can get wrong fails here, cheapest check first


def set_up(cfg: Config) -> Run:
    """Data, tokenizer, servers, model, engine, communicators: in the order in which mistakes are cheapest to find."""
    ranks = Ranks()
    try:
        check_world_size(cfg, ranks.world_size)
        check_engines(cfg, ranks.world_size, has_vllm=find_spec("vllm") is not None)
        engine_json(cfg, ranks.world_size)
    except ConfigError as error:
        give_up("\n".join(error.problems), ranks.is_main)
    logging.basicConfig(level=logging.INFO if ranks.is_main else logging.ERROR, format="%(name)s: %(message)s")
    datasets, weights, val_samples = load_data(cfg, ranks.is_main)
    processor, table = load_tokenizer(cfg, ranks.is_main)
    training = cfg.training
    num_steps = training.num_steps(sum(map(len, datasets)), ranks.world_size)
    ranks.open()
    run_id = ranks.gather(uuid.uuid4().hex[:12])[0]
    client = reach_servers(cfg, ranks) if cfg.servers() else None
    learner = Learner(cfg, ranks, num_steps)
    collate = partial(
        collate_packed if training.packing else collate_padded,
        position_ids_fn=position_ids_for(learner.model),
        coord_ids=table.coord_ids,
        dummy=dummy_segment(learner.model),
    )
    probe = make_probe(datasets[0][0], processor, table, learner, collate)
    backend, sync = open_backend(cfg, ranks, run_id, client, learner, processor, probe)
    run_dir = Path(training.output_dir)
    if ranks.is_main:
        server_world_sizes = client.world_sizes if client else []
        facts = {"run_id": run_id, "world_size": ranks.world_size, "server_world_sizes": server_world_sizes}
        write_run_json(run_dir, cfg.model_dump(mode="json", by_alias=True), **facts)
    return Run(
        cfg=cfg,
        ranks=ranks,
        run_id=run_id,
        stream=SampleStream(datasets, weights, training.seed, ranks.rank, ranks.world_size),
        val_samples=val_samples,
        processor=processor,
        table=table,
        client=client,
        backend=backend,
        sync=sync,
        learner=learner,
        collate=collate,
        buffer=CarryBuffer(cfg.global_max_length, training.packing_buffer),
        monitor=Monitor(run_dir, num_steps, ranks.is_main, training.report_to == "tensorboard", training.logging_steps),
        rollout_log=RolloutLog(run_dir, client, ranks),
        dump=SampleDump(run_dir, table, **cfg.rm.monitor_dump.model_dump(), enabled=ranks.is_main),
        watch=ServerWatch(client, ranks.is_main),
        num_steps=num_steps,
    )


def load_data(cfg: Config, is_main: bool) -> tuple[list[list[Sample]], list[float], list[Sample]]:
    """Training files with their weights, and validation samples; exit status 2 with every problem listed."""
    try:
        options = {"prompt": cfg.data.prompt, "object_order": cfg.data.object_order}
        train_specs, val_specs = cfg.custom.train_files(), cfg.custom.val_files()
        datasets = load_samples([spec.path for spec in train_specs], **options)
        validation = load_samples([spec.path for spec in val_specs], **options)
    except DataError as error:
        give_up(str(error), is_main)
    limit = cfg.training.eval_limit
    return datasets, [spec.weight for spec in train_specs], [sample for part in validation for sample in part][:limit]


def load_tokenizer(cfg: Config, is_main: bool) -> tuple[Any, TokenTable]:
    """Processor and token table; exit status 2 where the tokenizer lacks the coordinate tokens."""
    try:
        processor = load_processor(cfg.model.path, cfg.model.image_min_pixels, cfg.model.image_max_pixels)
        return processor, TokenTable.from_tokenizer(processor.tokenizer)
    except (OSError, ValueError) as error:
        give_up(f"model.path={cfg.model.path}: {error}", is_main)


def reach_servers(cfg: Config, ranks: Ranks) -> RolloutClient:
    """A client of all configured servers, each of which is up and has room (CON-1, DIS-2)."""
    server = cfg.rm.vllm.server
    client = RolloutClient(
        cfg.servers(),
        rank=ranks.rank,
        world_size=ranks.world_size,
        decode_batch_size=cfg.rm.decode_batch_size,
        timeout_s=server.timeout_s,
        infer_timeout_s=server.infer_timeout_s,
        max_failed_fraction=cfg.rm.max_failed_fraction,
    )
    ranks.raise_together(attempt(client.wait_ready), "reaching the rollout servers")
    return client


def open_backend(
    cfg: Config,
    ranks: Ranks,
    run_id: str,
    client: RolloutClient | None,
    learner: Learner,
    processor: Any,
    probe: Probe,
) -> tuple[RolloutBackend, WeightSync | FallbackSync | RolloutBackend]:
    """What generates, and what brings the current weights to it: rollout servers, an engine in this process, or the
    training model itself, which has them anyway (CFG-5)."""
    if client is not None:
        sync = open_sync(cfg, ranks, run_id, client, learner, probe)
        return ServerBackend(client), sync
    if cfg.rm.rollout_backend == "hf":
        from utils.rollout_hf import HfBackend

        backend = HfBackend(learner, ranks, processor.tokenizer, cfg.rm.decode_batch_size)
        return backend, backend
    from utils.rollout_colocate import ColocateBackend, EngineOptions

    options = EngineOptions(
        model_path=cfg.model.path,
        dtype=cfg.model.dtype,
        tensor_parallel_size=cfg.rm.vllm.tensor_parallel_size,
        gpu_memory_utilization=cfg.rm.vllm.gpu_memory_utilization,
        max_model_len=cfg.global_max_length,
        decode_batch_size=cfg.rm.decode_batch_size,
        seed=cfg.training.seed,
        image_min_pixels=cfg.model.image_min_pixels,
        image_max_pixels=cfg.model.image_max_pixels,
    )
    bucket_bytes, verify = cfg.rm.vllm.sync.bucket_mib << 20, cfg.rm.vllm.sync.verify
    weights = MergedWeights(learner.model)
    backend = ColocateBackend(weights, ranks, processor, options, bucket_bytes=bucket_bytes, verify=verify, probe=probe)
    return backend, backend


def open_sync(
    cfg: Config, ranks: Ranks, run_id: str, client: RolloutClient, learner: Learner, probe: Probe
) -> WeightSync | FallbackSync:
    """Weight sync with all servers, communicators open."""
    settings = cfg.rm.vllm.sync
    try:
        sync = make_sync(
            learner.model,
            cfg.sync_mode(),
            settings.fallback_to_full,
            ranks,
            client,
            [(learner_host(address.base_url), address.group_port) for address in cfg.servers()],
            run_id=run_id,
            bucket_bytes=settings.bucket_mib << 20,
            timeout_s=settings.timeout_s,
            open_timeout_s=cfg.rm.vllm.server.timeout_s,
            verify=settings.verify,
            probe=probe,
        )
    except ValueError as error:
        give_up(str(error), ranks.is_main)
    sync.open()
    client.owner = run_id
    return sync


def make_probe(
    sample: Sample, processor: Any, table: TokenTable, learner: Learner, collate: Callable[[list[Segment]], Batch]
) -> Probe:
    """The first training sample with its ground truth as the answer: fixed, and it runs through every module."""
    prompt = encode_prompt(sample, processor)
    target = targets.ground_truth_target(sample.objects[:8], table, TargetOptions())
    segment = targets.make_segment(
        sample.id, prompt.prompt_token_ids, target, table, prompt.pixel_values, prompt.image_grid_thw
    )
    token_ids = [int(token) for token in target.answer_ids]
    request = {"messages": prompt_chat(sample), "images": sample.images}
    return Probe(request, token_ids, partial(learner.last_logprobs, collate([segment]), len(token_ids)))


def give_up(message: str, is_main: bool) -> NoReturn:
    """A user's mistake: the message once, on rank 0, and exit status 2 on all ranks."""
    if is_main:
        print(message, file=sys.stderr)
    raise SystemExit(2)


def learner_host(base_url: str) -> str:
    """The address under which a server reaches this learner: loopback from loopback, else that of our interface."""
    host = urlsplit(base_url).hostname
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; picks the outgoing interface
        return probe.getsockname()[0]


# ---------------------------------------------------------------------------------------------------------------------
# the loop


def train(run: Run) -> None:
    """All optimizer steps: sync, roll out and build rows, forward and backward, log."""
    cfg = run.cfg.training
    if cfg.eval_at_start:
        evaluate(run, 0)
    for step in range(run.num_steps):
        rows, rollouts = prepare_rows(run, step)
        with run.timed("train"):
            result = run.learner.step([run.collate(row) for row in rows], loss_weights(run.cfg), step)
        log_step(run, step + 1, result, rollouts)
        is_last = step + 1 == run.num_steps
        if cfg.eval_steps and (is_last or (step + 1) % cfg.eval_steps == 0):
            evaluate(run, step + 1)
        if is_last or (cfg.save_steps and (step + 1) % cfg.save_steps == 0):
            save(run, step + 1)
    finish(run)


def on_current_weights(run: Run, step: int, work: Callable[[], Any], where: str) -> Any:
    """`work()` once the engine that generates has the weights of `step`; again from there if a server was lost."""

    def synced() -> Any:
        sync_weights(run, step)
        return work()

    def reopen() -> None:
        run.version = None  # the servers get everything anew
        run.sync.open()

    return through_restarts(synced, f"{where} with weights of step {step}", run.ranks, run.client, reopen)


def sync_weights(run: Run, step: int) -> None:
    """The engine that generates gets the weights of `step` unless it has them (SYN-2); after the first, the probe."""
    version = f"{run.run_id}:{step}"
    if run.version == version:
        return
    with run.timed("sync"):
        report = run.sync.sync(version)
    run.version = version
    values = {"sync/bytes": report.num_bytes, "sync/gb_per_s": report.gb_per_s, "sync/seconds": report.seconds}
    run.monitor.scalars(step, values)


@dataclass
class Rollouts:
    """What the answers of one step were like: summable counts, and the length of each in tokens."""

    counts: Counter = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)  # the first few, for the sample sheets
    max_examples: int = 0


def prepare_rows(run: Run, step: int) -> tuple[list[list[Segment]], Rollouts]:
    """Rollouts and finished rows of all micro-steps of optimizer step `step`; a failure anywhere stops all ranks."""
    cfg = run.cfg.training
    samples = [run.stream.next(cfg.per_device_train_batch_size) for _ in range(cfg.gradient_accumulation_steps)]

    def prepare() -> tuple[list[list[Segment]], Rollouts]:
        rollouts = Rollouts(max_examples=run.dump.num_samples)
        made = [make_segments(run, part, step, micro, rollouts) for micro, part in enumerate(samples)]
        return [next_row(run, segments) for segments in made], rollouts  # no rollout can fail any more

    return on_current_weights(run, step, prepare, f"preparing step {step}")


def next_row(run: Run, segments: list[Segment]) -> list[Segment]:
    """What a micro-step trains, given its own finished segments (PCK-2, PCK-6)."""
    if not run.cfg.training.packing:
        check_fits(segments, run.cfg.global_max_length)
        return segments
    run.buffer.extend(segments)
    return run.buffer.pop_row()


def make_segments(run: Run, samples: Sequence[Any], step: int, micro_step_idx: int, rollouts: Rollouts) -> list[Any]:
    """Samples to finished training sequences: prompt, rollout, parse, match, target."""
    with run.timed("prepare"):
        prompts = [encode_prompt(sample, run.processor) for sample in samples]
        forced = teacher_forced(run, step, micro_step_idx, len(samples))
    asked = np.flatnonzero(~forced)
    chosen = [samples[i] for i in asked], [prompts[i] for i in asked]
    with run.timed("rollout"):
        answers = roll_out(run, *chosen, decoding(run.cfg), step, micro_step_idx)
    with run.timed("prepare"):
        answer_of = dict(zip(asked, answers, strict=True))
        return [
            make_segment(run, sample, prompt, answer_of.get(index), rollouts)
            for index, (sample, prompt) in enumerate(zip(samples, prompts, strict=True))
        ]


def roll_out(
    run: Run,
    samples: Sequence[Sample],
    prompts: Sequence[EncodedPrompt],
    sampling: Decoding,
    step: int,
    micro_step_idx: int,
) -> list[RolloutResult]:
    """The current policy's answers, in order, each behind exactly the prompt that it will be trained behind (ROL-3)."""
    requests = [
        RolloutRequest(sample.id, prompt_chat(sample), sample.images, **vars(prompt))
        for sample, prompt in zip(samples, prompts, strict=True)
    ]
    answers = run.backend.generate(
        requests,
        sampling,
        global_step=step,
        micro_step_idx=micro_step_idx,
        run_seed=run.cfg.training.seed,
        expect_version=run.version,
    )
    for request, answer in zip(requests, answers, strict=True):
        if answer.error is None:
            check_prompt(
                request.sample_id, request.prompt_token_ids, answer.prompt_token_ids, run.processor.tokenizer.decode
            )
    return answers


def teacher_forced(run: Run, step: int, micro_step_idx: int, num_samples: int) -> np.ndarray:
    """Which samples train on the plain ground truth (DAT-4), `bool [num_samples]`; fixed by seed, step and rank."""
    dice = np.random.default_rng([run.cfg.training.seed, step, micro_step_idx, run.ranks.rank])
    return dice.random(num_samples) < run.cfg.rm.teacher_forced_ratio


def make_segment(
    run: Run, sample: Sample, prompt: EncodedPrompt, answer: RolloutResult | None, rollouts: Rollouts
) -> Segment:
    """One training sequence from one answer: parse, match, target. Without an answer, the plain ground truth."""
    options, threshold = target_options(run.cfg), run.cfg.rm.matching.iou_threshold
    if answer is None:
        target = targets.ground_truth_target(sample.objects, run.table, options)
    else:
        parsed = parse_answer(answer.response_token_ids, run.table)
        pairs = match(iou_matrix([pred.object for pred in parsed.objects], sample.objects), threshold)
        target = build_target(parsed, sample.objects, pairs, run.table, options)
        rollouts.counts.update(count_sample(parsed, sample.objects, threshold, answer.finish_reason == "length"))
        rollouts.counts.update(appended=target.num_appended, failed=int(answer.error is not None))
        rollouts.lengths.append(len(answer.response_token_ids))
        if len(rollouts.examples) < rollouts.max_examples:
            rollouts.examples.append(Example(sample, answer, parsed, pairs, target))
    return targets.make_segment(
        sample.id,
        prompt.prompt_token_ids,
        target,
        run.table,
        prompt.pixel_values,
        prompt.image_grid_thw,
        policy_version=None if answer is None else answer.weight_version,
    )


def evaluate(run: Run, step: int) -> None:
    """Greedy answers on the validation samples, scored as production would see them (LRN-7)."""

    def answer_all() -> tuple[Counter, list[dict[str, Any]]]:
        with run.timed("eval"):
            samples = run.val_samples[run.ranks.rank :: run.ranks.world_size]
            prompts = [encode_prompt(sample, run.processor) for sample in samples]
            answers = roll_out(run, samples, prompts, greedy(run.cfg), step, EVAL_MICRO_STEP)
            counts, records = Counter(), []
            for sample, answer in zip(samples, answers, strict=True):
                parsed = parse_answer(answer.response_token_ids, run.table)
                threshold = run.cfg.rm.eval.iou_threshold
                counts.update(count_sample(parsed, sample.objects, threshold, answer.finish_reason == "length"))
                records.append(prediction_record(sample, parsed))
            return counts, records

    counts, predictions = on_current_weights(run, step, answer_all, f"evaluation at step {step}")
    result = scores(run.ranks.sum(counts))
    calls = log_calls(run, step, "eval")
    gathered = run.ranks.gather(predictions)
    metric = run.cfg.training.metric_for_best_model
    is_best = result[metric] > run.best
    run.best = max(run.best, result[metric])
    if run.ranks.is_main:
        run.monitor.scalars(step, {f"eval/{name}": value for name, value in result.items()} | calls)
        run.monitor.flush()
        write_evaluation(run, step, result, [record for part in gathered for record in part], is_best)


def prediction_record(sample: Sample, parsed: ParsedAnswer) -> dict[str, Any]:
    """A validation answer as it is kept on disk; coordinates norm1000."""
    as_dict = {"gt": sample.objects, "pred": [pred.object for pred in parsed.objects]}
    objects = {side: [{"desc": o.desc, o.kind: list(o.coords)} for o in objects] for side, objects in as_dict.items()}
    return {"id": sample.id, "images": sample.images, **objects}


def write_evaluation(
    run: Run, step: int, result: dict[str, float], records: list[dict[str, Any]], is_best: bool
) -> None:
    """`eval/step_N.json` (scores) and `eval/step_N.jsonl` (every answer) under the run directory."""
    folder = Path(run.cfg.training.output_dir) / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    scores_file = {"step": step, "is_best": is_best, **result}
    (folder / f"step_{step:06d}.json").write_text(json.dumps(scores_file, indent=2) + "\n")
    lines = (json.dumps(record) + "\n" for record in sorted(records, key=lambda record: record["id"]))
    (folder / f"step_{step:06d}.jsonl").write_text("".join(lines))
    shown = " ".join(
        f"{name}={result[name]:.3f}" for name in ("f1", "f1_no_label", "precision", "recall", "parse_rate")
    )
    logger.info("evaluation at step %d on %d images: %s%s", step, result["num_images"], shown, " (best)" * is_best)


def log_calls(run: Run, step: int, phase: str) -> dict[str, float]:
    """A line of rollouts.jsonl about all calls since the last one (LOG-1); returns its numbers (collective)."""
    if run.client is None:
        return {}
    return run.rollout_log.write(step, run.version, run.sync.mode, run.sync.fallback, phase)


def log_step(run: Run, step: int, result: StepResult, rollouts: Rollouts) -> None:
    """TensorBoard and the progress line for optimizer step `step` (1-based: steps done), summed over ranks (LOG-3)."""
    gathered = run.ranks.gather((rollouts.counts, rollouts.lengths, dict(run.seconds), result.num_tokens))
    run.seconds.clear()
    counts: Counter = Counter()
    for part in gathered:
        counts.update(part[0])  # unlike a sum of Counters this keeps zeros, which belong into the curves
    lengths = np.array([length for part in gathered for length in part[1]] or [0])
    seconds = {
        name: max(part[2].get(name, 0.0) for part in gathered) for name in ("rollout", "sync", "prepare", "train")
    }
    quality = scores(counts)
    tokens_per_s = sum(part[3] for part in gathered) / max(sum(seconds.values()), 1e-9)
    values = {
        **{f"loss/{name}": value for name, value in result.losses.items()},
        **{f"learning_rate/{name}": value for name, value in result.learning_rates.items()},
        **{f"rollout/{name}": value for name, value in counts.items()},
        **{f"rollout/{name}": quality[name] for name in ("f1", "f1_no_label", "precision", "recall", "parse_rate")},
        **{f"seconds/{name}": value for name, value in seconds.items()},
        "rollout/new_tokens_mean": float(lengths.mean()),
        "rollout/new_tokens_p90": float(np.percentile(lengths, 90)),
        "rollout/new_tokens_p99": float(np.percentile(lengths, 99)),
        "train/grad_norm": result.grad_norm,
        "train/tokens_per_s": tokens_per_s,
        "train/fill_ratio": result.fill_ratio,
        "train/buffer_length": len(run.buffer),
        "train/policy_lag": 0.0,  # strictly on-policy: prefetch would raise it
    }
    values |= log_calls(run, step, "train") | run.watch.take()
    run.monitor.scalars(step, values)
    run.dump.write(step, rollouts.examples, run.monitor)
    run.monitor.progress(step, loss=result.losses["total"], f1=quality["f1"], tokens_per_s=tokens_per_s)
    if run.cfg.training.packing and result.fill_ratio < run.cfg.training.packing_min_fill_ratio:
        logger.warning(
            "step %d: rows are filled to %.2f only; a shorter global_max_length wastes less", step, result.fill_ratio
        )
    if counts["num_images"]:
        for warning in collapse_warnings(quality, run.cfg.training.collapse.model_dump()):
            logger.warning("step %d: %s", step, warning)


def save(run: Run, step: int) -> None:
    """The merged checkpoint and the adapter of `step` (LRN-6)."""
    folder = Path(run.cfg.training.output_dir) / f"checkpoint-{step}"
    with run.timed("save"):
        save_merged(run.learner.model, run.cfg.model.path, folder / "merged", run.ranks)
        save_adapter(run.learner.model, folder / "adapter", run.ranks)


def finish(run: Run) -> None:
    """Last words: where the time went, what was left in the buffers (LRN-1), what to look at."""
    left = sum(run.ranks.gather(len(run.buffer)))
    if not run.ranks.is_main:
        return
    output = Path(run.cfg.training.output_dir)
    seconds = {name: round(value, 3) for name, value in run.total_seconds.items()}
    record = {"steps": run.num_steps, "world_size": run.ranks.world_size, "seconds": seconds, "segments_left": left}
    (output / "finished.json").write_text(json.dumps(record, indent=2) + "\n")
    if run.sync.ledger and run.cfg.rm.vllm.sync.verify == "always":
        ledger = {"version": run.version, "digests": run.sync.ledger}
        (output / "weights.json").write_text(json.dumps(ledger, indent=2) + "\n")
    logger.info("finished %d steps; %d finished segments were left in the buffers, untrained", run.num_steps, left)
    logger.info("seconds on rank 0: %s", seconds)
    logger.info("checkpoint: %s; curves: tensorboard --logdir %s", output / f"checkpoint-{run.num_steps}", output)


# ---------------------------------------------------------------------------------------------------------------------
# small translations from the config


def loss_weights(cfg: Config) -> LossWeights:
    losses = cfg.rm.losses
    return LossWeights(text=losses.text, coord=losses.coord, w1=losses.w1, gate=losses.gate, sigma=losses.sigma)


def target_options(cfg: Config) -> TargetOptions:
    options = cfg.rm.targets
    return TargetOptions(
        label=cfg.rm.matching.label,
        trim_trailing_unmatched=options.trim_trailing_unmatched,
        supervise_structure=options.supervise_structure,
        desc_weight=cfg.rm.losses.desc,
    )


def decoding(cfg: Config) -> Decoding:
    return Decoding(**cfg.rm.decoding.model_dump(), max_new_tokens=cfg.rm.max_new_tokens)


def greedy(cfg: Config) -> Decoding:
    return Decoding(temperature=0.0, top_p=1.0, top_k=-1, repetition_penalty=1.0, max_new_tokens=cfg.rm.max_new_tokens)


if __name__ == "__main__":
    main()
