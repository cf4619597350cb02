"""Set-up of both training programs, before the first step: whatever a user can get wrong fails here.

Config, data, tokenizer, run directory, servers, model, engine: in the order in which mistakes are cheapest to find.
"""

import errno
import logging
import os
import shlex
import socket
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch.utils.data import ConcatDataset

from utils import targets
from utils.config.deepspeed import settings_on_record
from utils.config.load import Config, ConfigError, check_launch, exit_with, problem
from utils.config.plan import step_remarks
from utils.config.rules import length_limit
from utils.config.schema import RM, ServerAddress
from utils.data.encoding import (
    dummy_segment,
    encode_prompt,
    load_processor,
    model_digest,
    prompt_chat,
    tokenizer_digest,
)
from utils.data.images import as_sent
from utils.data.prompts import THINKS, leaves_thinking_open
from utils.data.samples import DataError, Sample
from utils.data.stream import SampleStream
from utils.dist import Ranks, capture_error
from utils.families import family_in
from utils.learner.learner import Learner
from utils.learner.model import position_ids_for
from utils.packing import NO_IDS, Batch, collate_packed, collate_padded, place
from utils.parsing import TokenTable
from utils.rollout.backend import Engine, NoEngine, ServerEngine
from utils.rollout.client import RolloutClient
from utils.rollout.link import is_loopback_url
from utils.rollout.teacher import Teacher
from utils.run.data_files import open_data, with_generation
from utils.run.inputs import check_inputs
from utils.run.monitor import Monitor, is_evaluated, write_run_json
from utils.run.policy import Policy
from utils.run.records import Timer
from utils.run.resume import Checkpoint, RunLock, choose_checkpoint, drop_records_after, rank_file
from utils.run.rollout_log import RolloutLog
from utils.run.server_watch import ServerWatch
from utils.run.session import Data, Session
from utils.run.shutdown import launch_command
from utils.run.start_checks import check_model, make_prompts
from utils.run.trackers import TRACKERS, RunFacts
from utils.sync.adapter_sync import FallbackSync, make_sync
from utils.sync.merged_weights import MergedWeights
from utils.sync.weight_sync import Probe, WeightSync
from utils.targets import Segment, TargetOptions, plain_segment

logger = logging.getLogger(__name__)
Made = TypeVar("Made")

PROBE_TEXT = '{"probe": ["The quick brown fox jumps over the lazy dog.", 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]}'


def open_session(
    cfg: Config,
    resume: str | None = None,
    accepted_changes: Sequence[str] = (),
    *,
    metric: str,
    needs_coordinates: bool = True,
    rewards: Sequence[str] = (),
) -> Session:
    """Build everything both training programs need before their first step (collective).

    Args:
        resume: `auto` or a checkpoint to continue from; `Session.resume` loads what is not model or optimizer.
        accepted_changes: kinds of `utils.run.inputs.KINDS` that may differ from those of the checkpoint.
        metric: of an evaluation, that decides which step was the best.
        rewards: names of the rewards whose keys every line must have.

    Raises SystemExit with status 2, and one message on rank 0 (on each node, of what one alone may lack), for a user's
    mistake.
    """
    ranks = check_ranks(cfg)
    processor, table = load_tokenizer(cfg, needs_coordinates)
    check_reference(cfg)

    ranks.open()
    run_id = ranks.gather(uuid.uuid4().hex[:12])[0]
    lock, checkpoint = claim_run_dir(cfg, resume, ranks)
    inputs = check_inputs(cfg, checkpoint, accepted_changes, ranks)
    datasets, val_files = open_data(cfg, ranks, inputs["digests"], processor, table, rewards)
    val_samples: Sequence[Sample] = ConcatDataset(val_files) if val_files else []
    weights = [spec.weight for spec in cfg.custom.train_jsonl]
    stream = SampleStream(datasets, weights, cfg.training.seed, ranks.rank, ranks.world_size)
    num_steps = cfg.training.num_steps(stream.epoch_size, ranks.world_size)
    for remark in step_remarks(cfg, num_steps):
        logger.warning("%s", remark)
    resumed = checkpoint and torch.load(rank_file(checkpoint.path, ranks.rank), map_location="cpu", weights_only=True)
    client = reach_servers(cfg, ranks) if cfg.servers() else None
    teacher = reach_teacher(cfg, ranks, processor) if cfg.rm.teacher else None

    learner = open_learner(cfg, ranks, num_steps, checkpoint, processor)
    place_segment, collate = make_layout(cfg, learner, table, dummy_segment(processor))
    # Of the files that are generated for: only their images are known to be the server's to read.
    asked = [file for file, is_asked in with_generation(cfg, datasets, val_files) if is_asked and len(file)]
    sample = (asked or datasets)[0][0]
    probe = or_exit(ranks, sample.source, lambda: make_probe(cfg, sample, processor, table, learner, collate))
    engine = open_engine(cfg, ranks, run_id, client, learner, processor, probe, resumed)

    steps_done = checkpoint.step if checkpoint else 0
    owes_evaluation = ranks.gather(owes_an_evaluation(cfg, steps_done, resumed))[0]
    timer, rollout_log = Timer(), RolloutLog(Path(cfg.training.output_dir), client, ranks, engine.fallback)
    return Session(
        cfg=cfg,
        ranks=ranks,
        run_id=run_id,
        num_steps=num_steps,
        data=Data(stream, val_samples, processor, table, pixel_dtype=getattr(torch, cfg.model.dtype)),
        policy=Policy(engine, client, ranks, run_id, cfg.training.seed, processor.tokenizer.decode, rollout_log, timer),
        learner=learner,
        place=place_segment,
        collate=collate,
        open_monitor=partial(open_records, checkpoint),
        watch=ServerWatch(client, ranks.is_main),
        timer=timer,
        metric=metric,
        inputs=inputs,
        lock=lock,
        resumed=resumed,
        teacher=teacher,
        steps_done=steps_done,
        owes_evaluation=owes_evaluation,
        settings=settings_on_record(cfg),
    )


def check_ranks(cfg: Config) -> Ranks:
    """Return this process's rank, nothing opened yet. SystemExit with status 2 if it cannot be part of such a run."""
    ranks = Ranks(cfg.training.rank_timeout_s)
    try:
        missing = {name for name in ("vllm", "liger_kernel", "flash_attn", *TRACKERS) if find_spec(name) is None}
        check_launch(cfg, ranks.world_size, missing | ({"cuda"} - {ranks.device.type}))
        ranks.check_port()
        ranks.check_interface()
    except (ConfigError, OSError) as error:  # on several nodes each of them speaks
        exit_with(error if isinstance(error, ConfigError) else str(error))
    begin_logging(ranks)
    return ranks


def begin_logging(ranks: Ranks) -> None:
    """Have rank 0 tell everything, and the others their errors and the requests that failed (CON-3)."""
    own = "" if ranks.is_main else f"rank {ranks.rank}: "
    level = logging.INFO if ranks.is_main else logging.ERROR
    logging.basicConfig(level=level, format=f"{own}%(name)s: %(message)s")
    for name in ("utils.rollout.round", "utils.rollout.teacher"):
        logging.getLogger(name).setLevel(min(level, logging.WARNING))


def claim_run_dir(cfg: Config, resume: str | None, ranks: Ranks) -> tuple[RunLock | None, Checkpoint | None]:
    """Lock the run directory (on rank 0), which all nodes must share, and choose the checkpoint to continue from; exit
    status 2 where one of these fails (collective)."""
    run_dir, lock, problem = Path(cfg.training.output_dir), None, None
    nonce = run_dir / f".seen-by-all-nodes-{uuid.uuid4().hex}"
    if ranks.is_main:
        try:
            lock = RunLock(run_dir)
            nonce.touch()
        except ValueError as error:
            problem = str(error)
        except OSError as error:
            way_out = "make room there" if error.errno == errno.ENOSPC else "mend it"
            rule = f"cannot be written ({error.strerror}); {way_out}, or choose another directory"
            problem = f"training.output_dir={run_dir}: {rule}"
    problem, nonce = ranks.gather((problem, str(nonce)))[0]
    if problem:
        exit_with(problem, ranks.is_main)
    blind = ranks.places(ranks.spans_nodes and ranks.local_rank == 0 and not os.path.exists(nonce))
    if ranks.is_main:
        Path(nonce).unlink()
    if blind:
        rule = "does not see what rank 0 writes there; choose a directory that all nodes share"
        exit_with(f"training.output_dir={run_dir}: {blind} {rule}", ranks.is_main)
    try:
        return lock, choose_checkpoint(run_dir, resume, settings_on_record(cfg), ranks)
    except ValueError as error:
        exit_with(str(error), ranks.is_main)


def owes_an_evaluation(cfg: Config, step: int, resumed: dict[str, Any] | None) -> bool:
    """True if a stop came before the evaluation due at `step`, no process has made it since, and any are still made."""
    evaluates = bool(cfg.training.eval_steps or cfg.training.eval_at_start)
    if not (evaluates and resumed and resumed.get("owes_evaluation")):
        return False
    return not is_evaluated(Path(cfg.training.output_dir), step)


def open_records(checkpoint: Checkpoint | None, session: Session) -> Monitor:
    """Write run.json and open the curves, without what an earlier process recorded of steps that are still to come."""
    cfg, run_dir, policy = session.cfg, session.run_dir, session.policy
    resolved, purge_step = cfg.model_dump(mode="json", by_alias=True), None
    if session.ranks.is_main:
        if checkpoint is not None or (run_dir / "run.json").exists():
            purge_step = checkpoint.step + 1 if checkpoint else 0
            drop_records_after(run_dir, purge_step - 1, keep_evaluation=not session.owes_evaluation)
        facts: dict[str, Any] = {"launch": launch_command(cfg._origin.file), "run_id": session.run_id}
        facts["sync"] = {"mode": policy.engine.mode, "fallback": policy.engine.fallback}
        facts["world_size"] = session.ranks.world_size
        facts["server_world_sizes"] = policy.client.world_sizes if policy.client else []
        facts["deepspeed_file"] = settings_on_record(cfg)["deepspeed_file"]
        facts["accepted_changes"] = session.inputs["accepted_changes"]
        if checkpoint is not None:
            facts["resumed_from"] = dict(checkpoint=checkpoint.path, step=checkpoint.step, run_id=checkpoint.run_id)
        write_run_json(run_dir, resolved, **facts)
    run = RunFacts(run_dir, session.run_id, resolved, purge_step)
    return Monitor(run, session.num_steps, session.ranks.is_main, cfg.training.report_to, cfg.training.logging_steps)


def load_tokenizer(cfg: Config, needs_coordinates: bool = True) -> tuple[Any, TokenTable | None]:
    """Load processor and token table; exit status 2, said on each node, for what is not supported. Without coordinate
    tokens: the same, or no table if they are not needed."""
    try:
        family = family_in(cfg.model.path)
        processor = load_processor(cfg.model.path, cfg.model.image_min_pixels, cfg.model.image_max_pixels)
    except (OSError, ValueError) as error:
        exit_with(f"model.path={cfg.model.path}: {error}")
    if cfg.training.fused_kernels and family.liger is None:
        rule = f"not tested with {family.name}; set it to false"
        exit_with(problem(cfg, "training.fused_kernels", rule))
    if needs_coordinates and leaves_thinking_open(processor):
        exit_with(f"model.path={cfg.model.path}: {THINKS}")
    try:
        return processor, TokenTable.from_tokenizer(processor.tokenizer, cfg.rm.format)
    except ValueError as error:
        if needs_coordinates:
            exit_with(f"model.path={cfg.model.path}: {error}")
        return processor, None


def check_reference(cfg: Config) -> None:
    """Exit with status 2, said on each node, unless the named start policy has the model's tokens (TGT-16)."""
    path = cfg.model.reference_path
    if path is None:
        return
    own, found = (model_digest(folder, as_loaded=True) for folder in (cfg.model.path, path))
    if found == own is not None:
        return
    what = "is no readable checkpoint" if found is None else "differs in architecture or vocabulary"
    rule = f"{what}; it must be one of the same model as model.path={cfg.model.path}"
    exit_with(problem(cfg, "model.reference_path", rule))


_START = """  start the server: make server GPUS=<ids> CONFIG={file} \
(or: python rollout_server.py --config {file} --server-index <number>)
"""
WAYS_OUT = f"""{_START}  group port taken: free it, or change group_port in {RM}.vllm.server
  no server at all: {RM}.vllm.mode: colocate or {RM}.rollout_backend: hf"""
GRPO_WAYS_OUT = f"""{_START}  group port taken: free it, or change rlhf.vllm_server_group_port
  no server at all: rlhf.vllm_mode: colocate or rlhf.use_vllm: false"""
TEACHER_WAYS_OUT = f"""  start the teacher's server: make server GPUS=<ids> CONFIG=<a file with its model.path>
  it is elsewhere: change {RM}.teacher.base_url
  no teacher: delete {RM}.teacher"""


def reach_servers(cfg: Config, ranks: Ranks) -> RolloutClient:
    """Connect to all configured servers; each is up and has room (CON-1, DIS-2), all ranks have its token (SRV-3)."""
    server = cfg.rm.vllm.server
    client = RolloutClient(
        cfg.servers(),
        rank=ranks.rank,
        world_size=ranks.world_size,
        decode_batch_size=cfg.rm.decode_batch_size,
        timeout_s=server.timeout_s,
        infer_timeout_s=server.infer_timeout_s,
        max_failed_fraction=cfg.rm.max_failed_fraction,
        ways_out=(GRPO_WAYS_OUT if cfg.is_grpo else WAYS_OUT).replace("{file}", shlex.quote(cfg._origin.file)),
        capacity_key=cfg.rollout_path("decode_batch_size"),
        answers_per_sample=cfg.answers_per_sample,
    )

    remote = [address.base_url for address in cfg.servers() if not is_loopback_url(address.base_url)]
    if lacking := ranks.places(bool(remote) and not client.token):
        rule = f"{remote[0]} is not on loopback and requires a token; export it on every node (docs/scaling.md)"
        exit_with(f"ROLLOUT_SERVER_TOKEN: not set for {lacking}, but {rule}", ranks.is_main)

    def reach() -> None:
        client.wait_ready()
        client.check_model(cfg.model.path, model_digest(cfg.model.path))
        if cfg.rs is not None:
            client.check_settings(list(map(cfg.server_settings, range(len(client.servers)))))

    ranks.raise_on_all_ranks(capture_error(reach), "reaching the rollout servers")
    return client


def reach_teacher(cfg: Config, ranks: Ranks, processor: Any) -> Teacher:
    """Wait for the teacher's server, and check that its tokens are this run's (TGT-16; collective)."""
    address = ServerAddress(cfg.rm.teacher.base_url.rstrip("/"), group_port=0)  # it gets no weights
    client = RolloutClient(
        [address], ranks.rank, ranks.world_size, decode_batch_size=ranks.world_size, ways_out=TEACHER_WAYS_OUT
    )
    teacher = Teacher(client, processor.tokenizer.decode)
    prompts = make_prompts(processor, length_limit(cfg)[1])
    error = capture_error(teacher.connect, tokenizer_digest(cfg.model.path), prompts, cfg.global_max_length)
    ranks.raise_on_all_ranks(error, f"reaching the teacher ({RM}.teacher)")
    return teacher


def open_learner(cfg: Config, ranks: Ranks, num_steps: int, checkpoint: Checkpoint | None, processor: Any) -> Learner:
    """Load the model, or the checkpoint's, into its engine, and check that it is what the rest takes it for; exit
    status 2 where it is not (collective)."""
    try:
        learner = Learner(cfg, ranks, num_steps)
    except ValueError as error:  # a tuner that does not fit the model, or an incomplete checkpoint
        exit_with(str(error))
    if checkpoint is not None:
        try:
            learner.load_state(checkpoint.path / "state")
        except ValueError as error:  # maybe of this rank's shard alone, so that each rank speaks
            exit_with(f"training.resume_from_checkpoint: {error}", is_main=True)
    wrong = None
    try:
        check_model(learner, processor, cfg.training.packing)
    except ValueError as error:
        wrong = str(error)
    if wrong := ranks.first(wrong):
        exit_with(f"model.path={cfg.model.path}: {wrong}", ranks.is_main)
    return learner


def make_layout(
    cfg: Config, learner: Learner, table: TokenTable | None, dummy: Segment
) -> tuple[Callable[[Segment], Segment], Callable[[list[Segment]], Batch]]:
    """What gives a segment its positions; what makes segments a batch of one row, or padded rows without packing."""
    place_segment = partial(place, position_ids_fn=position_ids_for(learner.model))
    return place_segment, partial(
        collate_packed if cfg.training.packing else collate_padded,
        **place_segment.keywords,
        coord_ids=table.coord_ids if table else NO_IDS,
        digit_ids=table.digit_ids if table else NO_IDS,
        dummy=place_segment(dummy),
    )


def open_engine(
    cfg: Config,
    ranks: Ranks,
    run_id: str,
    client: RolloutClient | None,
    learner: Learner,
    processor: Any,
    probe: Probe,
    resumed: dict[str, Any] | None,
) -> Engine:
    """Open the engine of the config: rollout servers, vLLM in this process, the training model itself (CFG-5), or none.

    A resumed run that had fallen back to full sync stays there (SYN-10).
    """
    if client is not None:
        sync = make_weight_sync(cfg, ranks, run_id, client, learner, probe)
        if resumed and resumed["sync"]["fallback"] and isinstance(sync, FallbackSync):
            sync.use_full(resumed["sync"]["fallback"])
        sync.open()
        client.owner = run_id
        return ServerEngine(client, sync)
    if not cfg.generates:
        return NoEngine()
    if cfg.rm.rollout_backend == "hf":
        from utils.rollout.hf import HfEngine

        return HfEngine(learner, ranks, processor, cfg.rm.decode_batch_size)
    from utils.rollout.colocate import ColocateEngine

    options = {"max_model_len": cfg.global_max_length, "decode_batch_size": cfg.rm.decode_batch_size}
    options["seed"] = cfg.training.seed
    return ColocateEngine(cfg.model, cfg.rm.vllm, MergedWeights(learner.model), ranks, processor, probe, **options)


def make_weight_sync(
    cfg: Config, ranks: Ranks, run_id: str, client: RolloutClient, learner: Learner, probe: Probe
) -> WeightSync | FallbackSync:
    """Weight sync with all servers as the config wants it; exit status 2 where the model does not allow it."""
    settings, prefetch = cfg.rm.vllm.sync, cfg.rm.async_
    try:
        return make_sync(
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
            on_running=prefetch.on_sync if prefetch.enabled else "wait",
        )
    except ValueError as error:
        exit_with(str(error), ranks.is_main)


def or_exit(ranks: Ranks, source: str, work: Callable[[], Made]) -> Made:
    """`work()` on what a line of data says, or exit status 2 where any rank cannot read its image (collective)."""
    made, error = list[Made](), None
    try:
        made.append(work())
    except DataError as failure:  # it names the line, and what to do
        error = str(failure)
    except (OSError, ValueError) as failure:
        error = f"{source}: {failure}; put back what the run began with"
    if error := ranks.first(error):
        exit_with(error, ranks.is_main)
    return made[0]


def make_probe(
    cfg: Config,
    sample: Sample,
    processor: Any,
    table: TokenTable | None,
    learner: Learner,
    collate: Callable[[list[Segment]], Batch],
) -> Probe:
    """Probe with a sample and its objects as the response, as far as the engine has room, or with any text where there
    are no coordinate tokens: fixed, and it runs through every module."""
    prompt = encode_prompt(sample, processor)
    if table is None:
        token_ids = processor.tokenizer.encode(PROBE_TEXT, add_special_tokens=False)
    else:
        token_ids = targets.ground_truth_target(sample.objects[:8], table, TargetOptions()).answer_ids.tolist()
    if (room := length_limit(cfg)[1] - len(prompt.prompt_token_ids) - 1) < len(token_ids):
        token_ids = token_ids[: max(int(room), 1)]
    segment = plain_segment(sample.id, **vars(prompt), answer_ids=token_ids)
    request = {"messages": prompt_chat(sample), "images": list(map(as_sent, sample.images))}
    logprobs = partial(learner.last_logprobs, collate([segment]), len(token_ids))
    return Probe(request, token_ids, logprobs, make_prompts(processor, length_limit(cfg)[1]))


def learner_host(base_url: str) -> str:
    """Address at which a server reaches this learner: loopback from loopback, else that of our interface."""
    host = urlsplit(base_url).hostname
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing; picks the outgoing interface
        return probe.getsockname()[0]
