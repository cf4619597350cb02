"""What a run will do, derived before any device is touched: devices, sync, rounds, steps, memory (`--dry-run`, CFG-16).

Numbers that depend on files (samples, weights) are known once the files exist.
"""

import argparse
import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from utils.capacity import check_capacity, chunk_size
from utils.config.load import ConfigError, check_launch, dump_yaml, engine_json, exit_with, problem
from utils.config.memory import (
    DEVICE_GIB,
    GIB,
    CacheSize,
    ModelSize,
    cache_size,
    checkpointed_layers,
    learner_memory,
    model_size,
    outside_memory,
    relative_flops,
    rollout_memory,
    row_limit,
)
from utils.config.rollout import ServerAddress, ServerSettings, is_loopback
from utils.config.schema import RM, RS, SCRIPTS, Config


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
    rollout_memory: dict[str, int] | None
    layout: Layout | None = None
    cache: CacheSize | None = None
    num_checkpointed: int | None = None  # language-model layers; None: all
    outside_memory: dict[str, int] | None = None  # of the servers' GPUs, beside vLLM's share
    start_policy: str | None = None  # what the loss compares the policy with


def make_plan(cfg: Config, world_size: int) -> Plan:
    """Derive the plan for `world_size` learners. Raises `ConfigError` as `check_launch` does, for more learners than
    rollout devices can serve (DIS-2), where vLLM's share of a device leaves too little for a sync (SYN-5), and for what
    a GPU of `DEVICE_GIB` cannot hold."""
    check_launch(cfg, world_size)
    engine, servers, training = engine_json(cfg, world_size), _servers(cfg), cfg.training
    chunk, num_samples = _chunk(cfg, servers, world_size), _samples_per_epoch(cfg)
    size = model_size(Path(cfg.model.path), cfg.tuner)
    has_num_steps = training.max_steps is not None or num_samples is not None
    device_bytes = 0 if cfg.rs is not None and cfg.server_settings().device == "cpu" else DEVICE_GIB * GIB
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
        num_steps=training.num_steps(num_samples or 0, world_size) if has_num_steps else None,
        max_tokens_per_step=max_tokens_per_step(cfg, world_size),
        model_size=size,
        learner_memory=size and learner_memory(cfg, engine, size, world_size, num_checkpointed),
        rollout_memory=size and rollout_memory(cfg, size),
        layout=plan_layout(cfg, world_size, cfg._origin.file),
        cache=size and cache_size(cfg, size),
        num_checkpointed=num_checkpointed,
        outside_memory=_outside(cfg, servers, size or ModelSize(0, 0)),
        start_policy=(cfg.model.reference_path or "the adapters disabled") if cfg.has_reference else None,
    )
    if found := _impossible(cfg, plan, device_bytes):
        raise ConfigError(found)
    return plan


def _impossible(cfg: Config, plan: Plan, device_bytes: int) -> list[str]:
    """A tuner that trains nothing, and what no GPU of `device_bytes` holds (0: there are none), with the ways out."""
    found, size = [], plan.model_size
    # A regular expression goes by the model's own names, from which those in files may differ.
    if size and not size.trainable and cfg.tuner.adapter_path is None and isinstance(cfg.tuner.target_modules, list):
        rule = "selects no weight in the unfrozen parts, so nothing would be trained; correct the module names"
        found.append(problem(cfg, "tuner.target_modules", rule))
    if device_bytes and plan.learner_memory and sum(plan.learner_memory.values()) > device_bytes:
        way_out = "use zero3" if plan.zero_stage < 3 else "use zero3_offload or more learners"
        needs = f"a learner needs {_format_memory(plan.learner_memory)}, and a GPU has {DEVICE_GIB} GiB"
        found.append(problem(cfg, "deepspeed", f"{needs}; {way_out}, shorter rows, or train fewer weights (tuner)"))
    if plan.cache and plan.cache.num_bytes <= 0:
        key = f"{RM}.vllm.tensor_parallel_size" if cfg.is_colocate else f"{RS}.vllm_tensor_parallel_size"
        found.append(problem(cfg, key, f"vLLM's share of {DEVICE_GIB} GiB cannot even hold the weights; raise it"))
    return found


def max_tokens_per_step(cfg: Config, world_size: int) -> int:
    """Tokens of an optimizer step whose rows are all full."""
    training = cfg.training
    answers = training.per_device_train_batch_size * cfg.answers_per_sample
    rows = 1 if training.packing and not cfg.is_grpo else answers  # GRPO makes as many rows as it needs
    return world_size * training.gradient_accumulation_steps * rows * row_limit(cfg)


def num_learners(text: str) -> int:
    """Type of `--world-size` for argparse, which reports what it raises."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} learners; give at least 1")
    return number


def print_dry_run(cfg: Config, world_size: int) -> None:
    """Print the resolved YAML and the plan; exit status 2 if the plan cannot work."""
    if int(os.environ.get("RANK", 0)):
        return  # under a launcher, one printout is enough
    try:
        print(dump_yaml(cfg) + format_plan(make_plan(cfg, world_size)), end="")
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


def _outside(cfg: Config, servers: list[ServerPlan], size: ModelSize) -> dict[str, int] | None:
    """Memory of the servers' GPUs beside vLLM's share. Raises `ConfigError` for a share that leaves less."""
    parts, name, found = outside_memory(cfg, size), "vllm_gpu_memory_utilization", []
    on_gpu = [(i, own.settings) for i, own in enumerate(servers) if own.settings and own.settings.device != "cpu"]
    for index, settings in on_gpu:
        needed, left = sum(parts.values()) / GIB, DEVICE_GIB * (1 - settings.vllm_gpu_memory_utilization)
        if left < needed:
            is_own = any(name in override.model_fields_set for override in cfg.rs.servers[index : index + 1])
            rule = f"leaves {left:.2f} of {DEVICE_GIB} GiB, but outside vLLM's share lie {_format_memory(parts)}"
            way_out = f"lower it to {int(100 - 100 * needed / DEVICE_GIB) / 100:g}"
            path = f"{RS}.servers[{index}].{name}" if is_own else f"{RS}.{name}"
            found.append(problem(cfg, path, f"{rule}; {way_out}"))
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
    ]
    if plan.model_size:
        total, trainable = plan.model_size.total, plan.model_size.trainable
        source = f" (counted from {plan.model_size.source})" if plan.model_size.source else ""
        lines.append(("parameters", f"{total:,}, of which {trainable:,} learn ({trainable / total:.2%}){source}"))
        layers = plan.model_size.num_layers
        num = layers if plan.num_checkpointed is None else min(plan.num_checkpointed, layers)
        lines.append(("checkpointed layers", f"{num} of {layers}; {_utilisation(plan)}"))
    for name, parts in (("learner memory", plan.learner_memory), ("rollout memory", plan.rollout_memory)):
        lines.append((f"{name} per device", _known(parts and _format_memory(parts), " (model.path)")))
    if plan.cache:
        lines.append(("rollout cache per device", str(plan.cache)))
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
    """Number the GPUs as for `GPUS=`: servers of this machine, then learners; other machines count from 0.

    Learners have GPUs unless all servers are on CPU. None if a server takes whatever devices it finds.
    """
    places: list[tuple[str, str]] = []
    commands: list[str] = []
    used = 0  # GPUs of this machine
    servers = _servers(cfg)
    if any(server.world_size is None for server in servers):
        return None
    for index, server in enumerate(servers):
        host = "" if is_loopback(server.address.host) else f"{server.address.host}: "
        gpus = _gpus(0 if host else used, server.world_size, server.settings.device)
        used += 0 if host else len(gpus)
        processes = [_server_process(index, rank, server) for rank in range(server.world_size)]
        places += zip([f"{host}GPU {gpu}" for gpu in gpus] or [f"{host}CPU"] * len(processes), processes, strict=True)
        arguments = f' ARGS="--server-index {index}"' if len(servers) > 1 else ""
        commands.append(f"{host}make server{_option(gpus)} CONFIG={file}{arguments}")
    on_cpu = bool(servers) and all(server.settings.device == "cpu" for server in servers)
    gpus = _gpus(used, world_size, "cpu" if on_cpu else "cuda")
    processes = [_learner_process(cfg, rank, bool(servers)) for rank in range(world_size)]
    places += zip([f"GPU {gpu}" for gpu in gpus] or ["CPU"] * world_size, processes, strict=True)
    commands.append(f"make {'grpo' if cfg.is_grpo else 'train'}{_option(gpus) or f' RANKS={world_size}'} CONFIG={file}")
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
