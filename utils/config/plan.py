"""What a config comes to before any device is touched: devices, sync, rounds, steps, memory (`--dry-run`, CFG-16).

Numbers that depend on files (samples, weights) are there when the files are. Memory is an estimate from tensor shapes
and the ZeRO stage; it leaves out the vision tower's activations, CUDA's own share and fragmentation.
"""

import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from utils.capacity import check_capacity, chunk_size
from utils.config.load import ConfigError, check_world_size, dump_yaml, engine_json, exit_with, problem
from utils.config.memory import (
    DEVICE_GIB,
    GIB,
    CachePlan,
    ModelSize,
    _cache_plan,
    _rollout_memory,
    learner_memory,
    model_size,
)
from utils.config.rules import engine_problems, is_colocate, kernel_problems
from utils.config.schema import RM, SCRIPTS, Config, ServerAddress, ServerSettings


@dataclass(frozen=True)
class Layout:
    """`places`: (device, process) for every device; `commands`: what starts them so, servers first."""

    places: list[tuple[str, str]]
    commands: list[str]


@dataclass(frozen=True)
class ServerPlan:
    """One rollout server; `world_size` (TP x DP) is None where only the machine it starts on can tell."""

    base_url: str
    group_port: int
    device: str
    world_size: int | None
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class Plan:
    """Derived facts of a run; None where something they depend on is not known yet. Memory in bytes per device."""

    world_size: int
    zero_stage: int
    servers: list[ServerPlan]
    own_rollouts: str | None  # how the learners' own devices generate, where no server does
    sync_mode: str
    chunk: int | None  # requests one learner sends per round
    rounds: int | None  # rounds per micro-step
    samples_per_step: int
    num_samples: int | None  # per epoch
    num_steps: int | None
    max_tokens_per_step: int
    model_size: ModelSize | None
    learner_memory: dict[str, int] | None
    rollout_memory: dict[str, int] | None
    layout: Layout | None = None
    cache: CachePlan | None = None


def make_plan(cfg: Config, world_size: int) -> Plan:
    """Derive the plan for `world_size` learners.

    Raises:
        ConfigError: the learners and the rollout devices do not fit together (CFG-10, DIS-2, ROL-5), or the DeepSpeed
            JSON contradicts the YAML at this world size.
    """
    check_world_size(cfg, world_size)
    check_engines(cfg, world_size)
    engine = engine_json(cfg, world_size)
    servers, training = _server_plans(cfg), cfg.training
    chunk = _chunk(cfg, servers, world_size)
    batch, gas = training.per_device_train_batch_size, training.gradient_accumulation_steps
    answers = batch * cfg.answers_per_sample
    num_samples = _samples_per_epoch(cfg)
    size = model_size(Path(cfg.model.path), cfg.tuner)
    known = training.max_steps is not None or num_samples is not None
    return Plan(
        world_size=world_size,
        zero_stage=engine.get("zero_optimization", {}).get("stage", 0),
        servers=servers,
        own_rollouts=_own_rollouts(cfg, world_size),
        sync_mode=cfg.sync_mode(),
        chunk=chunk,
        rounds=chunk and -(-answers // chunk),
        samples_per_step=world_size * batch * gas,
        num_samples=num_samples,
        num_steps=training.num_steps(num_samples or 0, world_size) if known else None,
        max_tokens_per_step=max_tokens_per_step(cfg, world_size),
        model_size=size,
        learner_memory=size and learner_memory(cfg, engine, size, world_size),
        rollout_memory=size and _rollout_memory(cfg, size),
        layout=plan_layout(cfg, world_size, cfg._origin.file),
        cache=size and _cache_plan(cfg, size),
    )


def max_tokens_per_step(cfg: Config, world_size: int) -> int:
    """Tokens of an optimizer step whose rows are all full."""
    training = cfg.training
    answers = training.per_device_train_batch_size * cfg.answers_per_sample
    rows = 1 if training.packing and not cfg.is_grpo else answers  # GRPO makes as many rows as it takes
    return world_size * training.gradient_accumulation_steps * rows * (cfg.global_max_length or 0)


def print_dry_run(cfg: Config, world_size: int) -> None:
    """What `--dry-run` shows: the resolved YAML and the plan; exit status 2 where the plan cannot work."""
    if int(os.environ.get("RANK", 0)):
        return  # under a launcher, one is enough
    try:
        print(dump_yaml(cfg) + format_plan(make_plan(cfg, world_size)), end="")
    except ConfigError as error:
        exit_with(error)


def check_engines(cfg: Config, world_size: int, has_vllm: bool = True) -> None:
    """Raises `ConfigError` when `world_size` learners cannot generate as the config says (ROL-5)."""
    if found := [problem(cfg, path, rule) for path, rule in engine_problems(cfg, world_size, has_vllm)]:
        raise ConfigError(found)


def check_kernels(cfg: Config, has_liger: bool, has_cuda: bool) -> None:
    """Raises `ConfigError` when learners on this machine cannot use fused kernels as the config says."""
    if found := [problem(cfg, path, rule) for path, rule in kernel_problems(cfg, has_liger, has_cuda)]:
        raise ConfigError(found)


def _own_rollouts(cfg: Config, world_size: int) -> str | None:
    vllm = cfg.rm.vllm
    if is_colocate(cfg):
        engines = f"{world_size // vllm.tensor_parallel_size} vLLM engine(s) of {vllm.tensor_parallel_size} device(s)"
        return f"{engines} on the learners' own, {vllm.gpu_memory_utilization:g} of the memory of each"
    return "transformers' generate on the training model" if cfg.rm.rollout_backend == "hf" else None


def _server_plans(cfg: Config) -> list[ServerPlan]:
    settings = [cfg.server_settings(index) if cfg.rs else None for index in range(len(cfg.servers()))]
    return [
        ServerPlan(
            address.base_url,
            address.group_port,
            own.device if own else "auto",
            own.world_size if own else None,
            own.vllm_tensor_parallel_size if own else 1,
        )
        for address, own in zip(cfg.servers(), settings, strict=True)
    ]


def _chunk(cfg: Config, servers: list[ServerPlan], world_size: int) -> int | None:
    if _own_rollouts(cfg, world_size):
        return cfg.rm.decode_batch_size  # an engine over t devices holds t times as many, and t learners share it
    if not servers or any(server.world_size is None for server in servers):
        return None
    num_devices = sum(server.world_size for server in servers)
    try:
        check_capacity(cfg.rm.decode_batch_size, num_devices, world_size)
    except ValueError as error:
        key = cfg.rollout_path("decode_batch_size")
        rule = str(error).replace(f"{RM}.decode_batch_size", key)
        rule = rule.removeprefix(f"{key}={cfg.rm.decode_batch_size} ")  # the line names the key itself
        raise ConfigError([problem(cfg, key, rule)]) from None
    return chunk_size(cfg.rm.decode_batch_size, num_devices, world_size)


def _samples_per_epoch(cfg: Config) -> int | None:
    """Lines of the training files, each file times its weight; None while one cannot be read."""
    total = 0
    for file in cfg.custom.train_files():
        try:
            with open(file.path, "rb") as lines:
                total += int(Fraction(str(file.weight)) * sum(1 for line in lines if line.strip()))
        except OSError:
            return None
    return total


# ---------------------------------------------------------------------------------------------------------------------
# parameters


# ---------------------------------------------------------------------------------------------------------------------
# memory


# ---------------------------------------------------------------------------------------------------------------------
# printing


def format_plan(plan: Plan) -> str:
    """The plan as text, one fact per line, after a line of `#` so that it can follow the resolved YAML."""
    unknown = "not known yet"
    lines = [("learners", f"{plan.world_size}, ZeRO-{plan.zero_stage}")]
    for index, server in enumerate(plan.servers):
        tensor, world = server.tensor_parallel_size, server.world_size
        size = "all its visible" if world is None else f"TP {tensor} x DP {world // tensor} = {world}"
        place = f"{server.base_url}, group port {server.group_port}"
        lines.append((f"server {index}", f"{place}, {size} device(s) ({server.device})"))
    if plan.own_rollouts:
        lines.append(("rollouts", plan.own_rollouts))
    if plan.layout:
        lines += plan.layout.places + [("start", command) for command in plan.layout.commands]
    lines += [
        ("sync mode", plan.sync_mode),
        ("requests per round and learner", unknown if plan.chunk is None else str(plan.chunk)),
        ("rounds per micro-step", unknown if plan.rounds is None else str(plan.rounds)),
        ("samples per epoch", f"{unknown} (training files)" if plan.num_samples is None else str(plan.num_samples)),
        ("samples per optimizer step", str(plan.samples_per_step)),
        ("tokens per optimizer step", f"at most {plan.max_tokens_per_step}"),
        ("optimizer steps", unknown if plan.num_steps is None else str(plan.num_steps)),
    ]
    if plan.model_size:
        total, trainable = plan.model_size.total, plan.model_size.trainable
        source = f" (counted from {plan.model_size.source})" if plan.model_size.source else ""
        lines.append(("parameters", f"{total:,}, of which {trainable:,} learn ({trainable / total:.2%}){source}"))
    for name, memory in (("learner memory", plan.learner_memory), ("rollout memory", plan.rollout_memory)):
        lines.append((f"{name} per device", _format_memory(memory) if memory else f"{unknown} (model.path)"))
    if plan.cache:
        lines.append(("rollout cache per device", _format_cache(plan.cache)))
    return "\n".join(["# plan", *(f"# {name + ':':<34}{text}" for name, text in lines)]) + "\n"


def _format_memory(memory: dict[str, int]) -> str:
    parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in memory.items())
    return f"about {sum(memory.values()) / GIB:.2f} GiB ({parts})"


def _format_cache(cache: CachePlan) -> str:
    if cache.num_bytes <= 0:
        return f"none: a device of {DEVICE_GIB} GiB cannot even hold the weights; use more devices per engine"
    answers = f"{cache.num_tokens // cache.max_model_len} of {cache.max_model_len}" if cache.max_model_len else "any"
    return (
        f"at most {cache.num_bytes / GIB:.2f} GiB are left on one of {DEVICE_GIB} GiB; "
        f"an engine holds {cache.num_tokens:,} tokens ({answers})"
    )


def plan_layout(cfg: Config, world_size: int, file: str) -> Layout | None:
    """Devices in order: the servers of this machine, then the learners. Servers elsewhere count from 0 on their own.

    GPU numbers are those that `GPUS=` takes; learners are taken to have GPUs unless all servers are on CPU. None where
    a server takes whatever devices it finds.
    """
    places: list[tuple[str, str]] = []
    commands: list[str] = []
    used = 0  # GPUs of this machine
    addresses = cfg.servers()
    settings = [cfg.server_settings(index) if cfg.rs else None for index in range(len(addresses))]
    if any(own is None or own.world_size is None for own in settings):
        return None
    for index, (address, own) in enumerate(zip(addresses, settings, strict=True)):
        host = "" if _is_here(address) else f"{address.host}: "
        first = 0 if host else used
        gpus = _gpus(first, own.world_size) if own.device != "cpu" else []
        used += 0 if host else len(gpus)
        places += [
            (host + (f"GPU {gpus[rank]}" if gpus else "CPU"), _server_process(index, rank, own, address))
            for rank in range(own.world_size)
        ]
        arguments = f' ARGS="--server-index {index}"' if len(addresses) > 1 else ""
        commands.append(f"{host}make server{_option(gpus)} CONFIG={file}{arguments}")
    on_cpu = bool(settings) and all(own.device == "cpu" for own in settings)
    gpus = [] if on_cpu else _gpus(used, world_size)
    places += [
        (f"GPU {gpus[rank]}" if gpus else "CPU", _learner_process(cfg, rank, len(addresses)))
        for rank in range(world_size)
    ]
    target = "grpo" if cfg.custom.trainer_variant == "grpo" else "train"
    commands.append(f"make {target}{_option(gpus) or f' RANKS={world_size}'} CONFIG={file}")
    return Layout(places, commands)


def _is_here(address: ServerAddress) -> bool:
    return address.host in ("localhost", "::1") or address.host.startswith("127.")


def _gpus(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def _option(gpus: list[int]) -> str:
    return f" GPUS={','.join(map(str, gpus))}" if gpus else ""


def _server_process(index: int, rank: int, own: ServerSettings, address: ServerAddress) -> str:
    replica, part = divmod(rank, own.vllm_tensor_parallel_size)
    share = f", tensor-parallel rank {part}" if own.vllm_tensor_parallel_size > 1 else ""
    return f"rollout_server.py, server {index} (port {address.port}), replica {replica}{share}: generates"


def _learner_process(cfg: Config, rank: int, num_servers: int) -> str:
    tasks = ["trains"]
    if is_colocate(cfg):
        tasks.append(f"generates (engine {rank // cfg.rm.vllm.tensor_parallel_size})")
    elif not num_servers:
        tasks.append("generates")
    if rank == 0:
        tasks += ["sends weights", "writes logs"] if num_servers else ["writes logs"]
    return f"{SCRIPTS[cfg.custom.trainer_variant]}, rank {rank}: {', '.join(tasks)}"
