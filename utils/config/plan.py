"""What a run will do, derived before any device is touched: devices, sync, rounds, steps, memory (`--dry-run`, CFG-16).

Numbers that depend on files (samples, weights) are known once the files exist.
"""

import argparse
import os
import shlex
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from utils.capacity import check_capacity, chunk_size
from utils.config.deepspeed import engine_json
from utils.config.load import ConfigError, check_launch, dump_yaml, exit_with, problem
from utils.config.memory import (
    AUTO_FREE,
    DEVICE_GIB,
    GIB,
    RUNTIME_GIB,
    CacheSize,
    ModelSize,
    cache_size,
    checkpointed_layers,
    expert_adapters_problem,
    experts_problem,
    heads_problem,
    learner_memory,
    model_size,
    outside_memory,
    relative_flops,
    rollout_engine,
    rollout_memory,
    row_limit,
    sync_bytes,
)
from utils.config.rollout import ServerAddress, ServerSettings, is_loopback
from utils.config.schema import RM, RS, SCRIPTS, Config

# Of a learner's memory, what it has when the engine beside it starts, and never gives back.
KEPT = ("weights", "start policy", "gradients", "optimizer", "reduce buckets")


@dataclass(frozen=True)
class Layout:
    """`places`: (device, process) for every device; `commands`: how to start them, servers first."""

    places: list[tuple[str, str]]
    commands: list[str]


@dataclass(frozen=True)
class ServerPlan:
    """One rollout server; `settings` are None where the config does not launch servers."""

    address: ServerAddress
    settings: ServerSettings | None

    @property
    def world_size(self) -> int | None:
        """Devices, TP x DP; None if that depends on the machine the server is launched on."""
        return self.settings and self.settings.world_size

    def __str__(self) -> str:
        place = f"{self.address.base_url}, group port {self.address.group_port}"
        device, size = self.settings.device if self.settings else "auto", "all its visible"
        if self.world_size:
            tensor = self.settings.vllm_tensor_parallel_size
            size = f"TP {tensor} x DP {self.world_size // tensor} = {self.world_size}"
        return f"{place}, {size} device(s) ({device})"


@dataclass(frozen=True)
class EnginePlan:
    """Memory of a server's engines, or of the learners' own: what answers need of each device, in bytes, and what there
    is for them. None where it is not known."""

    memory: dict[str, int] | None
    cache: CacheSize | None


@dataclass(frozen=True)
class Plan:
    """Derived facts of a run; None where a fact depends on something not known yet. Memory in bytes per device."""

    world_size: int
    zero_stage: int
    servers: list[ServerPlan]
    own_rollouts: str | None  # how the learners' own devices generate, where no server does
    sync_mode: str  # in force at the start, and why it is not the one asked for
    chunk: int | None  # requests one learner sends per round
    rounds: int | None  # rounds per micro-step
    samples_per_step: int
    num_samples: int | None  # per epoch
    num_steps: int | None
    max_tokens_per_step: int
    model_size: ModelSize | None
    learner_memory: dict[str, int] | None
    engines: list[EnginePlan]  # of each server; without servers, the learners' own
    layout: Layout | None = None
    num_checkpointed: int | None = None  # language-model layers; None: all
    outside_memory: dict[str, int] | None = None  # of the servers' GPUs, beside vLLM's share
    start_policy: str | None = None  # what the loss compares the policy with
    remarks: tuple[str, ...] = ()  # on steps that the run never comes to


def make_plan(cfg: Config, world_size: int, device_gib: float = DEVICE_GIB, has_learners: bool = True) -> Plan:
    """Derive the plan for `world_size` learners. Raises `ConfigError` as `check_launch` does, for more learners than
    rollout devices can serve (DIS-2), where vLLM's share of a device leaves too little for a sync (SYN-5), and for what
    a GPU of `device_gib` cannot hold; without `has_learners` it need not hold a learner."""
    check_launch(cfg, world_size)
    engine, servers, training = engine_json(cfg, world_size), _servers(cfg), cfg.training
    chunk, num_samples = _chunk(cfg, servers, world_size), _samples_per_epoch(cfg)
    size = model_size(Path(cfg.model.path), cfg.tuner)
    has_num_steps = training.max_steps is not None or num_samples is not None
    num_steps = training.num_steps(num_samples or 0, world_size) if has_num_steps else None
    on_cpu = cfg.rs is not None and cfg.server_settings().device == "cpu"
    device_bytes = 0 if on_cpu else int(device_gib * GIB)
    num_checkpointed = checkpointed_layers(cfg, engine, size, world_size, device_bytes)
    plan = Plan(
        world_size=world_size,
        zero_stage=engine["zero_optimization"]["stage"],
        servers=servers,
        own_rollouts=_own_rollouts(cfg, world_size),
        sync_mode=_sync_mode(cfg),
        chunk=chunk,
        rounds=chunk and -(-training.per_device_train_batch_size * cfg.answers_per_sample // chunk),
        samples_per_step=engine["train_batch_size"],
        num_samples=num_samples,
        num_steps=num_steps,
        max_tokens_per_step=max_tokens_per_step(cfg, world_size),
        model_size=size,
        learner_memory=size and learner_memory(cfg, engine, size, world_size, num_checkpointed),
        engines=[
            EnginePlan(size and rollout_memory(cfg, size, index), size and cache_size(cfg, size, device_gib, index))
            for index in range(max(1, len(servers)))
        ],
        layout=plan_layout(cfg, world_size, cfg._origin.file),
        num_checkpointed=num_checkpointed,
        outside_memory=_outside(cfg, servers, size or ModelSize(0, 0), device_gib),
        start_policy=(cfg.model.reference_path or "the adapters disabled") if cfg.has_reference else None,
        remarks=() if num_steps is None else tuple(step_remarks(cfg, num_steps)),
    )
    found = _impossible(cfg, plan)
    if device_bytes and plan.learner_memory and has_learners:
        found += _learner_too_large(cfg, plan, device_gib)
    if found := found + _engines_too_large(cfg, plan, device_gib):
        raise ConfigError(found)
    return replace(plan, remarks=(*plan.remarks, *_memory_remarks(cfg, plan, device_gib)))


def _impossible(cfg: Config, plan: Plan) -> list[str]:
    """A tuner that trains nothing, or names modules that the model does not have."""
    found, size, tuner = list[str](), plan.model_size, cfg.tuner
    if rule := expert_adapters_problem(cfg):
        return [problem(cfg, "tuner.target_modules", rule)]
    for key in ("target_modules", "modules_to_save"):
        given = getattr(tuner, key)
        for name in given if size and size.words and isinstance(given, list) else []:
            if name.rpartition(".")[2] not in size.words | {"lm_head"}:  # which may be tied to the embeddings
                rule = f"no module of the model has the name {name!r}; correct it, or delete it"
                found.append(problem(cfg, f"tuner.{key}", rule))
    if found:
        return found
    # A regular expression goes by the model's own names, from which those in files may differ.
    if size and not size.trainable and cfg.tuner.adapter_path is None and isinstance(cfg.tuner.target_modules, list):
        rule = "selects no weight in the unfrozen parts, so nothing would be trained; correct the module names"
        found.append(problem(cfg, "tuner.target_modules", rule))
    return found


def _learner_too_large(cfg: Config, plan: Plan, device_gib: float) -> list[str]:
    """What a learner needs beyond its GPU, or beyond what a colocated engine leaves of it, with the ways out."""
    memory, found = plan.learner_memory or {}, []
    way_out = "use zero3_offload or more learners" if "optimizer" in memory else "use more learners"
    way_out = "use zero3" if plan.zero_stage < 3 and plan.world_size > 1 else way_out  # alone, it shares nothing
    if sum(memory.values()) > device_gib * GIB:
        needs = f"a learner needs {_format_memory(memory)}, and a GPU has {device_gib:g} GiB"
        found.append(problem(cfg, "deepspeed", f"{needs}; {way_out}, shorter rows, or train fewer weights (tuner)"))
    kept = {name: memory[name] for name in KEPT if name in memory} | {"CUDA, NCCL, graphs": RUNTIME_GIB * GIB}
    if plan.model_size:  # the engine is awake, with its cache, while weights are merged and loaded
        kept |= {"sync": sync_bytes(cfg, plan.model_size)}
    left = device_gib * (1 - cfg.rm.vllm.gpu_memory_utilization)
    if cfg.is_colocate and sum(kept.values()) > left * GIB:
        needs = f"leaves {left:.2f} of {device_gib:g} GiB, but a learner keeps {_format_memory(kept)}"
        found.append(problem(cfg, _engine_key(cfg, "gpu_memory_utilization"), f"{needs}; lower it, or {way_out}"))
    return found


def _engines_too_large(cfg: Config, plan: Plan, device_gib: float) -> list[str]:
    """Engines whose share of their GPUs cannot hold the weights or a single answer, or cannot split the model."""
    found = []
    for index, cache in enumerate(engine.cache for engine in plan.engines):
        key, share = (_engine_key(cfg, name, index) for name in ("tensor_parallel_size", "gpu_memory_utilization"))
        _, devices, _ = rollout_engine(cfg, index) or (0, None, 0.0)
        if devices and (rule := heads_problem(cfg, devices)):
            found.append(problem(cfg, key, rule))
        server = plan.servers[index] if plan.servers else None
        if server and server.world_size and (rule := experts_problem(cfg, server.settings, server.world_size)):
            found.append(problem(cfg, _engine_key(cfg, "data_parallel_size", index), rule))
        if cache and cache.num_bytes <= 0:
            rule = f"vLLM's share of {device_gib:g} GiB cannot even hold the weights; raise it, or {share}"
            found.append(problem(cfg, key, rule))
        elif cache and cache.num_tokens < cache.max_model_len:
            rule = f"leaves room for {cache.num_tokens:,} tokens of keys and values, and an answer may need "
            found.append(problem(cfg, share, f"{rule}{cache.max_model_len:,} with its prompt; raise it, or {key}"))
    return list(dict.fromkeys(found))


def _memory_remarks(cfg: Config, plan: Plan, device_gib: float) -> list[str]:
    """What may not fit, though nothing says that it does not."""
    found, needed = list[str](), sum((plan.learner_memory or {}).values())
    if needed > (1 - AUTO_FREE) * device_gib * GIB:  # less is left than what the estimate leaves out usually takes
        left_out = "the vision tower's activations, CUDA, NCCL and gaps"
        rule = f"a learner needs about {needed / GIB:.1f} of {device_gib:g} GiB, without {left_out}; it may not fit"
        found.append(f"deepspeed: {rule}: see zero3, more learners, or shorter rows")
    return found + _answer_remarks(cfg, plan, device_gib)


def _answer_remarks(cfg: Config, plan: Plan, device_gib: float) -> list[str]:
    """Answers of transformers' generate that may not fit beside what a learner keeps. No error, as few come to the
    length that is counted."""
    keys = (plan.engines[0].memory or {}).get("keys and values", 0)
    kept = sum((plan.learner_memory or {}).get(name, 0) for name in KEPT) + RUNTIME_GIB * GIB
    if cfg.rm.rollout_backend != "hf" or not cfg.generates or kept + keys <= device_gib * GIB:
        return []
    needs = f"answers up to global_max_length need {keys / GIB:.2f} GiB for keys and values"
    rule = f"{needs}, and a learner keeps {kept / GIB:.2f} of {device_gib:g}; lower one of both"
    return [f"{cfg.rollout_path('decode_batch_size')}={cfg.rm.decode_batch_size}: {rule}"]


def _engine_key(cfg: Config, name: str, index: int = 0) -> str:
    """Path of an engine's setting in the file, for messages."""
    if cfg.is_colocate:
        return f"rlhf.vllm_{name}" if cfg.is_grpo else f"{RM}.vllm.{name}"
    overrides = cfg.rs.servers[index : index + 1] if cfg.rs else []
    is_own = any(f"vllm_{name}" in override.model_fields_set for override in overrides)
    return f"{RS}.servers[{index}].vllm_{name}" if is_own else f"{RS}.vllm_{name}"


def step_remarks(cfg: Config, num_steps: int) -> list[str]:
    """Settings that are made for a longer run than one of `num_steps`, or have no effect, and what they lead to."""
    training, found, run = cfg.training, list[str](), f"the run has {num_steps} step{'s' * (num_steps > 1)}"
    if training.warmup_steps >= num_steps:
        found.append(f"training.warmup_steps={training.warmup_steps}: {run}, all of them warm-up; lower it")
    if training.save_steps > num_steps:
        rule = "only its end is saved, and a run killed before that starts over; lower it"
        found.append(f"training.save_steps={training.save_steps}: {run}; {rule}")
    if training.eval_steps > num_steps:
        when = "start and end" if training.eval_at_start else "end"
        found.append(f"training.eval_steps={training.eval_steps}: {run}; it is evaluated only at its {when}; lower it")
    if cfg.custom.val_jsonl and not training.eval_steps and not training.eval_at_start:
        found.append("training.eval_steps=0: custom.val_jsonl is never evaluated; set it, or drop custom.val_jsonl")
    return found + _patience_remarks(cfg)


def _patience_remarks(cfg: Config) -> list[str]:
    """Limits of a rank that waits for a server, beyond those of the ranks that wait for it."""
    if cfg.connection is None:
        return []
    own, rm = cfg.training.rank_timeout_s, cfg.rm
    limits = {
        "rlhf.vllm_server_timeout" if cfg.is_grpo else f"{RM}.vllm.server.timeout_s": cfg.connection.timeout_s,
        "rlhf.sync.timeout_s" if cfg.is_grpo else f"{RM}.vllm.sync.timeout_s": rm.vllm.sync.timeout_s,
    }
    rule = "is longer, and a rank gives up on another that waits for a server; raise it"
    longer = {key: limit for key, limit in limits.items() if limit > own}
    return [f"training.rank_timeout_s={own:g}: {key}={limit:g} {rule}" for key, limit in longer.items()]


def max_tokens_per_step(cfg: Config, world_size: int) -> int:
    """Tokens of an optimizer step whose rows are all full."""
    training = cfg.training
    answers = training.per_device_train_batch_size * cfg.answers_per_sample
    rows = 1 if training.packing and not cfg.is_grpo else answers  # GRPO makes as many rows as it needs
    return world_size * training.gradient_accumulation_steps * rows * row_limit(cfg)


def add_plan_arguments(parser: argparse.ArgumentParser, num_learners: int = 1) -> None:
    """Add what `--dry-run` plans for."""
    add = parser.add_argument
    learners = f"learner GPUs to plan for, as many as `make train GPUS=` names (--dry-run only; default {num_learners})"
    add("--world-size", type=at_least_one, help=learners)
    told = f"memory of one GPU to plan for (--dry-run only; default {DEVICE_GIB})"
    add("--device-gib", type=at_least_one, metavar="GIB", help=told)


def fill_plan_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace, num_learners: int = 1) -> None:
    """Put defaults where nothing is given; exit with status 2 where something is without `--dry-run`."""
    given = {"--world-size": args.world_size, "--device-gib": args.device_gib}
    if not args.dry_run and (names := [name for name, value in given.items() if value is not None]):
        parser.error(f"{names[0]} says what a --dry-run plans for; add --dry-run, or leave {names[0]} out")
    args.world_size, args.device_gib = args.world_size or num_learners, args.device_gib or DEVICE_GIB


def at_least_one(text: str) -> int:
    """Type of a count for argparse, which reports what it raises."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}; give a whole number of at least 1")
    return int(text)


def print_dry_run(cfg: Config, world_size: int, device_gib: float = DEVICE_GIB, has_learners: bool = True) -> None:
    """Print the resolved YAML and the plan as `make_plan` makes it; exit status 2 if the plan cannot work."""
    if int(os.environ.get("RANK", 0)):
        return  # under a launcher, one printout is enough
    try:
        print(dump_yaml(cfg) + format_plan(make_plan(cfg, world_size, device_gib, has_learners)), end="")
    except ConfigError as error:
        exit_with(error)


def _own_rollouts(cfg: Config, world_size: int) -> str | None:
    vllm = cfg.rm.vllm
    if not cfg.generates:
        return "none: every sample trains on its ground truth, and nothing is evaluated"
    if cfg.is_colocate:
        engines = f"{world_size // vllm.tensor_parallel_size} vLLM engine(s) of {vllm.tensor_parallel_size} device(s)"
        return f"{engines} on the learners' own, {vllm.gpu_memory_utilization:g} of the memory of each"
    return "transformers' generate on the training model" if cfg.rm.rollout_backend == "hf" else None


def _sync_mode(cfg: Config) -> str:
    if not cfg.generates:
        return "none"
    if not cfg.uses_vllm:
        return "none: the training model itself generates"
    why = cfg.adapter_obstacle()
    return f"full, as adapter sync fails: {why}" if why else cfg.sync_mode()


def _servers(cfg: Config) -> list[ServerPlan]:
    settings = cfg.server_settings if cfg.rs else lambda index: None
    return [ServerPlan(address, settings(index)) for index, address in enumerate(cfg.servers())]


def _chunk(cfg: Config, servers: list[ServerPlan], world_size: int) -> int | None:
    if not cfg.generates:
        return 0
    if _own_rollouts(cfg, world_size):
        return cfg.rm.decode_batch_size  # an engine over t devices holds t times as many, and t learners share it
    if not servers or any(server.world_size is None for server in servers):
        return None
    num_devices = sum(server.world_size for server in servers)
    key = cfg.rollout_path("decode_batch_size")
    try:
        check_capacity(cfg.rm.decode_batch_size, num_devices, world_size, key)
    except ValueError as error:
        rule = str(error).removeprefix(f"{key}={cfg.rm.decode_batch_size} ")  # the line names the key itself
        raise ConfigError([problem(cfg, key, rule)]) from None
    return chunk_size(cfg.rm.decode_batch_size, num_devices, world_size)


def _outside(cfg: Config, servers: list[ServerPlan], size: ModelSize, device_gib: float) -> dict[str, int] | None:
    """Memory of the servers' GPUs beside vLLM's share. Raises `ConfigError` for a share that leaves less."""
    parts, found = outside_memory(cfg, size), []
    on_gpu = [(i, own.settings) for i, own in enumerate(servers) if own.settings and own.settings.device != "cpu"]
    for index, settings in on_gpu:
        needed, left = sum(parts.values()) / GIB, device_gib * (1 - settings.vllm_gpu_memory_utilization)
        if left < needed:
            rule = f"leaves {left:.2f} of {device_gib:g} GiB, but outside vLLM's share lie {_format_memory(parts)}"
            lowered = int(100 - 100 * needed / device_gib) / 100
            weights = (rollout_memory(cfg, size, index) or {}).get("weights", 0)
            larger = f"raise {_engine_key(cfg, 'tensor_parallel_size', index)}, or take GPUs with more memory"
            way_out = f"lower it to {lowered:g}" if lowered * device_gib * GIB > weights else larger
            found.append(problem(cfg, _engine_key(cfg, "gpu_memory_utilization", index), f"{rule}; {way_out}"))
    if found:
        raise ConfigError(list(dict.fromkeys(found)))
    return parts if on_gpu else None


def _samples_per_epoch(cfg: Config) -> int | None:
    """Lines of the training files, each file times its weight; None if one cannot be read."""
    total = 0
    for file in cfg.custom.train_jsonl:
        try:
            with open(file.path, "rb") as lines:
                total += int(Fraction(str(file.weight)) * sum(1 for line in lines if line.strip()))
        except OSError:
            return None
    return total


def format_plan(plan: Plan) -> str:
    """Format the plan, one fact per line, each after a `#` so that the text can follow the resolved YAML."""
    lines = [("learners", f"{plan.world_size}, ZeRO-{plan.zero_stage}")]
    lines += [(f"server {index}", str(server)) for index, server in enumerate(plan.servers)]
    if plan.own_rollouts:
        lines.append(("rollouts", plan.own_rollouts))
    if plan.layout:
        lines += plan.layout.places + [("start", command) for command in plan.layout.commands]
    if plan.start_policy:
        lines.append(("start policy", f"{plan.start_policy}; one more forward per row"))
    lines += [
        ("sync mode", plan.sync_mode),
        ("requests per round and learner", _known(plan.chunk)),
        ("rounds per micro-step", _known(plan.rounds)),
        ("samples per epoch", _known(plan.num_samples, " (training files)")),
        ("samples per optimizer step", str(plan.samples_per_step)),
        ("tokens per optimizer step", f"at most {plan.max_tokens_per_step}"),
        ("optimizer steps", _known(plan.num_steps)),
        *(("remark", text) for text in plan.remarks),
    ]
    if plan.model_size:
        total, trainable = plan.model_size.total, plan.model_size.trainable
        source = f" (counted from {plan.model_size.source})" if plan.model_size.source else ""
        lines.append(("parameters", f"{total:,}, of which {trainable:,} learn ({trainable / total:.2%}){source}"))
        layers = plan.model_size.num_layers
        num = layers if plan.num_checkpointed is None else min(plan.num_checkpointed, layers)
        lines.append(("checkpointed layers", f"{num} of {layers}; {_utilisation(plan)}"))
    learner = plan.learner_memory and _format_memory(plan.learner_memory)
    lines.append(("learner memory per device", _known(learner, " (model.path)")))
    are_alike = all(engine == plan.engines[0] for engine in plan.engines)
    for index, engine in enumerate(plan.engines[:1] if are_alike else plan.engines):
        whose = "rollout" if are_alike else f"server {index}"
        missing = f" ({RS})" if plan.model_size else " (model.path)"
        lines.append((f"{whose} memory per device", _known(engine.memory and _format_memory(engine.memory), missing)))
        if engine.cache:
            lines.append((f"{whose} cache per device", str(engine.cache)))
    if plan.outside_memory:
        lines.append(("outside vLLM's share", _format_memory(plan.outside_memory)))
    return "\n".join(["# plan", *(f"# {name + ':':<34}{text}" for name, text in lines)]) + "\n"


def _utilisation(plan: Plan) -> str:
    """Useful FLOPs of a learner, compared with backward keeping everything."""
    backward, recomputed = relative_flops(plan.model_size, plan.num_checkpointed, plan.zero_stage)
    share = (1 + backward) / (1 + backward + recomputed)
    parts = f"per token: forward 1, backward {backward:.2f}, recomputed {recomputed:.2f}"
    return f"FLOP utilisation {share:.2f} of that without checkpointing ({parts})"


def _known(value: object, missing: str = "") -> str:
    return f"not known yet{missing}" if value is None else str(value)


def _format_memory(memory: dict[str, int]) -> str:
    parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in memory.items())
    return f"about {sum(memory.values()) / GIB:.2f} GiB ({parts})"


def plan_layout(cfg: Config, world_size: int, file: str) -> Layout | None:
    """Number the GPUs as for `GPUS=`: servers of this machine, then learners; each other machine counts from 0.

    Learners have GPUs unless all servers are on CPU. None if a server takes whatever devices it finds.
    """
    places: list[tuple[str, str]] = []
    commands: list[str] = []
    used: Counter[str] = Counter()  # GPUs of each machine; "" is this one
    servers, named = _servers(cfg), f"CONFIG={shlex.quote(file)}"
    if any(server.world_size is None for server in servers):
        return None
    for index, server in enumerate(servers):
        host = "" if is_loopback(server.address.host) else f"{server.address.host}: "
        gpus = _gpus(used[host], server.world_size, server.settings.device)
        used[host] += len(gpus)
        processes = [_server_process(index, rank, server) for rank in range(server.world_size)]
        places += zip([f"{host}GPU {gpu}" for gpu in gpus] or [f"{host}CPU"] * len(processes), processes, strict=True)
        arguments = f' ARGS="--server-index {index}"' if len(servers) > 1 else ""
        commands.append(f"{host}make server{_option(gpus)} {named}{arguments}")
    on_cpu = bool(servers) and all(server.settings.device == "cpu" for server in servers)
    gpus = _gpus(used[""], world_size, "cpu" if on_cpu else "cuda")
    processes = [_learner_process(cfg, rank, bool(servers)) for rank in range(world_size)]
    places += zip([f"GPU {gpu}" for gpu in gpus] or ["CPU"] * world_size, processes, strict=True)
    commands.append(f"make {'grpo' if cfg.is_grpo else 'train'}{_option(gpus) or f' RANKS={world_size}'} {named}")
    return Layout(places, commands)


def _gpus(first: int, count: int, device: str) -> list[int]:
    return [] if device == "cpu" else list(range(first, first + count))


def _option(gpus: list[int]) -> str:
    return f" GPUS={','.join(map(str, gpus))}" if gpus else ""


def _server_process(index: int, rank: int, server: ServerPlan) -> str:
    tensor = server.settings.vllm_tensor_parallel_size
    replica, part = divmod(rank, tensor)
    suffix = f", tensor-parallel rank {part}" if tensor > 1 else ""
    return f"rollout_server.py, server {index} (port {server.address.port}), replica {replica}{suffix}: generates"


def _learner_process(cfg: Config, rank: int, has_servers: bool) -> str:
    tasks = ["trains"]
    if cfg.is_colocate:
        tasks.append(f"generates (engine {rank // cfg.rm.vllm.tensor_parallel_size})")
    elif not has_servers and cfg.generates:
        tasks.append("generates")
    if rank == 0:
        tasks += ["sends weights", "writes logs"] if has_servers else ["writes logs"]
    return f"{SCRIPTS[cfg.custom.trainer_variant]}, rank {rank}: {', '.join(tasks)}"
