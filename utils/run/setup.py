"""What both training programs do before their first step: whatever a user can get wrong fails here.

Data, tokenizer, servers, model, engine, communicators: in the order in which mistakes are cheapest to find.
"""

import logging
import socket
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from utils import targets
from utils.config.load import Config, ConfigError, check_launch, exit_with
from utils.data.encoding import encode_prompt, load_processor, model_digest, prompt_chat
from utils.data.mistakes import BadLine, report_skipped
from utils.data.samples import DataError, Sample, check_same_samples, fingerprint, load_samples
from utils.data.stream import SampleStream
from utils.dist import Ranks, capture_error
from utils.learner.learner import Learner
from utils.learner.model import dummy_segment, position_ids_for
from utils.packing import Batch, collate_packed, collate_padded
from utils.parsing import TokenTable
from utils.policy_loss import policy_segment
from utils.rollout.backend import RolloutBackend, ServerBackend
from utils.rollout.client import RolloutClient
from utils.run.monitor import Monitor, ServerWatch, evaluation_file, write_run_json
from utils.run.resume import Checkpoint, RunLock, choose_checkpoint, drop_records_after, rank_file
from utils.run.rollout_log import RolloutLog
from utils.run.session import Session
from utils.sync.adapter_sync import FallbackSync, make_sync
from utils.sync.merged_weights import MergedWeights
from utils.sync.weight_sync import Probe, WeightSync
from utils.targets import Segment, TargetOptions

PROBE_TEXT = '{"probe": ["The quick brown fox jumps over the lazy dog.", 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]}'


def open_session(
    cfg: Config,
    resume: str | None = None,
    needs_coordinates: bool = True,
    problems_of: Callable[[Sequence[Sample]], list[str]] = lambda samples: [],
) -> Session:
    """Everything both training programs need before their first step (collective).

    Args:
        resume: null, `auto` or a checkpoint to go on from. Then model and optimizer are as it left them; the program
            hands `resumed` to `load_state_dict` when all else is ready.
        needs_coordinates: the tokenizer must have coordinate tokens.
        problems_of: what the program finds wrong with samples, `file:line: reason` each.

    Raises:
        SystemExit: status 2 with one message on rank 0, for a user's mistake.
    """
    ranks = Ranks(cfg.training.rank_timeout_s)
    try:
        check_launch(
            cfg,
            ranks.world_size,
            has_vllm=find_spec("vllm") is not None,
            has_liger=find_spec("liger_kernel") is not None,
            has_cuda=ranks.device.type == "cuda",
        )
        ranks.check_port()
    except ConfigError as error:
        exit_with(error, ranks.is_main)
    except OSError as error:
        exit_with(str(error), ranks.is_main)
    logging.basicConfig(level=logging.INFO if ranks.is_main else logging.ERROR, format="%(name)s: %(message)s")
    datasets, weights, val_samples = load_data(cfg, ranks.is_main)
    if problems := problems_of([sample for part in (*datasets, val_samples) for sample in part]):
        exit_with(str(DataError(problems)), ranks.is_main)
    processor, table = load_tokenizer(cfg, ranks.is_main, needs_coordinates)
    training = cfg.training
    num_steps = training.num_steps(sum(map(len, datasets)), ranks.world_size)
    ranks.open()
    run_id = ranks.gather(uuid.uuid4().hex[:12])[0]
    check_same_samples(ranks.gather(fingerprint(datasets + [val_samples])))
    lock, checkpoint = claim_run_dir(cfg, resume, ranks)
    resumed = None
    if checkpoint is not None:
        resumed = torch.load(rank_file(checkpoint.path, ranks.rank), map_location="cpu", weights_only=True)
    client = reach_servers(cfg, ranks) if cfg.servers() else None
    learner = Learner(cfg, ranks, num_steps)
    if checkpoint is not None:
        learner.load_state(checkpoint.path / "state")
    collate = partial(
        collate_packed if training.packing else collate_padded,
        position_ids_fn=position_ids_for(learner.model),
        coord_ids=table.coord_ids if table else np.zeros(0, dtype=np.int64),
        digit_ids=table.digit_ids if table else None,
        dummy=dummy_segment(learner.model),
    )
    probe = make_probe(datasets[0][0], processor, table, learner, collate)
    fallback = resumed["sync"]["fallback"] if resumed else None
    backend, sync = open_backend(cfg, ranks, run_id, client, learner, processor, probe, fallback)
    run_dir, steps_done = Path(training.output_dir), checkpoint.step if checkpoint else 0
    owes_evaluation = ranks.gather(owes_an_evaluation(run_dir, steps_done, resumed))[0]
    purge_step = None
    if ranks.is_main:
        if checkpoint is not None or (run_dir / "run.json").exists():
            purge_step = steps_done + 1 if checkpoint else 0
            drop_records_after(run_dir, purge_step - 1, keep_evaluation=not owes_evaluation)
        server_world_sizes = client.world_sizes if client else []
        facts = {"run_id": run_id, "world_size": ranks.world_size, "server_world_sizes": server_world_sizes}
        if checkpoint is not None:
            facts["resumed_from"] = {"checkpoint": checkpoint.path, "step": steps_done, "run_id": checkpoint.run_id}
        write_run_json(run_dir, cfg.model_dump(mode="json", by_alias=True), **facts)
    return Session(
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
        monitor=Monitor(
            run_dir, num_steps, ranks.is_main, training.report_to == "tensorboard", training.logging_steps, purge_step
        ),
        rollout_log=RolloutLog(run_dir, client, ranks),
        watch=ServerWatch(client, ranks.is_main),
        num_steps=num_steps,
        metric=training.metric_for_best_model,
        lock=lock,
        steps_done=steps_done,
        resumed=resumed,
        owes_evaluation=owes_evaluation,
    )


def claim_run_dir(cfg: Config, resume: str | None, ranks: Ranks) -> tuple[RunLock | None, Checkpoint | None]:
    """The lock on the run directory (on rank 0) and the checkpoint to go on from; exit status 2 where either cannot
    be had (collective)."""
    run_dir, lock, problem = Path(cfg.training.output_dir), None, None
    if ranks.is_main:
        try:
            lock = RunLock(run_dir)
        except (ValueError, OSError) as error:
            problem = str(error)
    if problem := ranks.gather(problem)[0]:
        exit_with(problem, ranks.is_main)
    try:
        return lock, choose_checkpoint(run_dir, resume, cfg.model_dump(mode="json", by_alias=True), ranks)
    except ValueError as error:
        exit_with(str(error), ranks.is_main)


def owes_an_evaluation(run_dir: Path, step: int, resumed: dict[str, Any] | None) -> bool:
    """Whether a stop came ahead of the evaluation due at `step`, and no process has made it since."""
    return bool(resumed and resumed.get("owes_evaluation")) and not evaluation_file(run_dir, step).exists()


def load_data(cfg: Config, is_main: bool) -> tuple[list[list[Sample]], list[float], list[Sample]]:
    """Training files with their weights, and validation samples; exit status 2 with every problem listed."""
    skipped: list[BadLine] | None = [] if cfg.data.on_bad_sample == "skip" else None
    try:
        train_specs, val_specs = cfg.custom.train_files(), cfg.custom.val_files()
        paths = [spec.path for spec in train_specs + val_specs]
        loaded = load_samples(paths, cfg.data.prompt, cfg.data.object_order, skipped, cfg.rm.format)
        datasets, validation = loaded[: len(train_specs)], loaded[len(train_specs) :]
    except DataError as error:
        exit_with(str(error), is_main)
    if skipped is not None and is_main:
        print(report_skipped(skipped, cfg.training.output_dir), end="", flush=True)
    limit = cfg.training.eval_limit
    return datasets, [spec.weight for spec in train_specs], [sample for part in validation for sample in part][:limit]


def load_tokenizer(cfg: Config, is_main: bool, needs_coordinates: bool = True) -> tuple[Any, TokenTable | None]:
    """Processor and token table; without coordinate tokens exit status 2, or no table where they are not needed."""
    try:
        processor = load_processor(cfg.model.path, cfg.model.image_min_pixels, cfg.model.image_max_pixels)
    except (OSError, ValueError) as error:
        exit_with(f"model.path={cfg.model.path}: {error}", is_main)
    try:
        return processor, TokenTable.from_tokenizer(processor.tokenizer, cfg.rm.format)
    except ValueError as error:
        if needs_coordinates:
            exit_with(f"model.path={cfg.model.path}: {error}", is_main)
        return processor, None


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

    def reach() -> None:
        client.wait_ready()
        client.check_model(cfg.model.path, model_digest(cfg.model.path))

    ranks.raise_on_all_ranks(capture_error(reach), "reaching the rollout servers")
    return client


def open_backend(
    cfg: Config,
    ranks: Ranks,
    run_id: str,
    client: RolloutClient | None,
    learner: Learner,
    processor: Any,
    probe: Probe,
    fallback: str | None = None,
) -> tuple[RolloutBackend, WeightSync | FallbackSync | RolloutBackend]:
    """What generates, and what brings the current weights to it: rollout servers, an engine in this process, or the
    training model itself, which has them anyway (CFG-5). `fallback` is as for `open_sync`."""
    if client is not None:
        sync = open_sync(cfg, ranks, run_id, client, learner, probe, fallback)
        return ServerBackend(client), sync
    if cfg.rm.rollout_backend == "hf":
        from utils.rollout.hf import HfBackend

        backend = HfBackend(learner, ranks, processor.tokenizer, cfg.rm.decode_batch_size)
        return backend, backend
    from utils.rollout.colocate import ColocateBackend, EngineOptions

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
    cfg: Config,
    ranks: Ranks,
    run_id: str,
    client: RolloutClient,
    learner: Learner,
    probe: Probe,
    fallback: str | None = None,
) -> WeightSync | FallbackSync:
    """Weight sync with all servers, communicators open.

    Args:
        fallback: why a run that is resumed had fallen back to full sync; it stays so (SYN-10).
    """
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
            on_running=cfg.rm.async_.on_sync if cfg.rm.async_.enabled else "wait",
        )
    except ValueError as error:
        exit_with(str(error), ranks.is_main)
    if fallback and isinstance(sync, FallbackSync):
        sync.use_full(fallback)
    sync.open()
    client.owner = run_id
    return sync


def make_probe(
    sample: Sample,
    processor: Any,
    table: TokenTable | None,
    learner: Learner,
    collate: Callable[[list[Segment]], Batch],
) -> Probe:
    """The first training sample with its objects as the answer, or any text where there are no coordinate tokens:
    fixed, and it runs through every module."""
    prompt = encode_prompt(sample, processor)
    if table is None:
        token_ids = processor.tokenizer.encode(PROBE_TEXT, add_special_tokens=False)
    else:
        token_ids = targets.ground_truth_target(sample.objects[:8], table, TargetOptions()).answer_ids.tolist()
    segment = policy_segment(sample.id, **vars(prompt), answer_ids=token_ids)
    request = {"messages": prompt_chat(sample), "images": sample.images}
    return Probe(request, token_ids, partial(learner.last_logprobs, collate([segment]), len(token_ids)))


def learner_host(base_url: str) -> str:
    """The address under which a server reaches this learner: loopback from loopback, else that of our interface."""
    host = urlsplit(base_url).hostname
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; picks the outgoing interface
        return probe.getsockname()[0]
