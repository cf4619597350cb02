"""What a config comes to before any device is touched: devices, sync, rounds, steps, memory (`--dry-run`, CFG-16).

Numbers that depend on files (samples, weights) are there when the files are. Memory is an estimate from tensor shapes
and the ZeRO stage; it leaves out the vision tower's activations, CUDA's own share and fragmentation.
"""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

from utils.config import ConfigError, check_world_size, dump_yaml, engine_json, exit_with, problem
from utils.request_plan import check_capacity, chunk_size
from utils.rules import engine_problems, is_colocate
from utils.schema import RM, Config, Tuner

GIB = 1 << 30
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ServerPlan:
    """One rollout server; `world_size` (TP x DP) is None where only the machine it starts on can tell."""

    base_url: str
    group_port: int
    device: str
    world_size: int | None


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters: all, and those that learn (with adapters)."""

    total: int
    trainable: int


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
    rows = gas if training.packing and not cfg.is_grpo else gas * answers  # GRPO makes as many rows as it takes
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
        max_tokens_per_step=world_size * rows * (cfg.global_max_length or 0),
        model_size=size,
        learner_memory=size and learner_memory(cfg, engine, size, world_size),
        rollout_memory=size and _rollout_memory(cfg, size),
    )


def print_dry_run(cfg: Config, world_size: int) -> None:
    """What `--dry-run` shows: the resolved YAML and the plan; exit status 2 where the plan cannot work."""
    try:
        print(dump_yaml(cfg) + format_plan(make_plan(cfg, world_size)), end="")
    except ConfigError as error:
        exit_with(error)


def check_engines(cfg: Config, world_size: int, has_vllm: bool = True) -> None:
    """Raises `ConfigError` when `world_size` learners cannot generate as the config says (ROL-5)."""
    if found := [problem(cfg, path, rule) for path, rule in engine_problems(cfg, world_size, has_vllm)]:
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
        ServerPlan(address.base_url, address.group_port, own.device if own else "auto", own.world_size if own else None)
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


def model_size(path: Path, tuner: Tuner) -> ModelSize | None:
    """Count parameters from the headers of the checkpoint's safetensors files; None where there are none to read."""
    try:
        shapes = dict(_tensor_shapes(path))
    except (OSError, ValueError, struct.error):
        return None
    if not shapes:
        return None
    return ModelSize(sum(map(prod, shapes.values())), sum(_trainable(name, s, tuner) for name, s in shapes.items()))


def _tensor_shapes(path: Path) -> Iterator[tuple[str, list[int]]]:
    """A safetensors file opens with the length of a JSON header (8 bytes, little-endian) and that header."""
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        yield from ((name, entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _trainable(name: str, shape: list[int], tuner: Tuner) -> int:
    """Parameters that learn for this tensor: itself, its adapter (A, B and DoRA's magnitudes), or none."""
    in_aligner, in_vision = "merger" in name, "visual" in name
    frozen = tuner.freeze_aligner if in_aligner else tuner.freeze_vit if in_vision else tuner.freeze_llm
    module = name.rsplit(".", 1)[0]
    if tuner.type == "lora" and any(module.endswith(saved) for saved in tuner.modules_to_save):
        return prod(shape)
    if frozen or tuner.type == "full":
        return 0 if frozen else prod(shape)
    is_linear = len(shape) == 2 and "embed" not in name and "lm_head" not in name
    if not is_linear or not _is_target(module, tuner.target_modules):
        return 0
    return tuner.rank * sum(shape) + (shape[0] if tuner.use_dora else 0)


def _is_target(module: str, targets: str | list[str]) -> bool:
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith("." + target) for target in targets)


# ---------------------------------------------------------------------------------------------------------------------
# memory


def learner_memory(cfg: Config, engine: dict[str, Any], size: ModelSize, world_size: int) -> dict[str, int]:
    """Bytes per learner device by part. ZeRO shards the optimizer from stage 1, gradients from 2, weights from 3.

    Optimizer: AdamW's two moments in float32, and a float32 copy of what learns (ZeRO 0 in float32 needs none).
    Source of the activation terms: Korthikanti et al. 2022 (arXiv:2205.05198), table 2 without attention scores.
    """
    bytes_each, zero = _DTYPE_BYTES[cfg.model.dtype], engine.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    copies = 8 if cfg.model.dtype == "float32" and stage == 0 else 12
    memory = {
        "weights": size.total * bytes_each // (world_size if stage == 3 else 1),
        "gradients": size.trainable * bytes_each // (world_size if stage >= 2 else 1),
        "optimizer": size.trainable * copies // (world_size if stage >= 1 else 1),
        "activations": _activations(cfg, bytes_each),
        "sync buckets (rank 0)": 2 * cfg.rm.vllm.sync.bucket_mib << 20,
    }
    for part, knob in (("weights", "offload_param"), ("optimizer", "offload_optimizer")):
        if zero.get(knob, {}).get("device", "none") != "none":
            memory[part] = 0
    return {name: value for name, value in memory.items() if value}


def _activations(cfg: Config, bytes_each: int) -> int:
    """Language model only: 17 values per token, layer and hidden unit; checkpointed, one, and one layer in full."""
    text = _text_config(cfg)
    per_row = 1 if cfg.training.packing else cfg.training.per_device_train_batch_size * cfg.answers_per_sample
    tokens = (cfg.global_max_length or 0) * per_row
    per_layer = tokens * text.get("hidden_size", 0) * bytes_each
    layers = text.get("num_hidden_layers", 0)
    return per_layer * (layers + 17) if cfg.training.gradient_checkpointing else per_layer * layers * 17


def _rollout_memory(cfg: Config, size: ModelSize) -> dict[str, int] | None:
    """Bytes per rollout device (of the first server, or a learner's own): its share of an engine's weights, and the
    cache of `decode_batch_size` answers. With hf the weights are the learner's."""
    if is_colocate(cfg):
        max_model_len, parts = cfg.global_max_length or 0, cfg.rm.vllm.tensor_parallel_size
    elif cfg.rm.rollout_backend == "hf":
        max_model_len, parts = cfg.global_max_length or 0, None
    elif cfg.rs is not None:
        settings = cfg.server_settings()
        max_model_len, parts = settings.vllm_max_model_len, settings.vllm_tensor_parallel_size
    else:
        return None
    text, bytes_each = _text_config(cfg), _DTYPE_BYTES[cfg.model.dtype]
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads", 0)
    head_dim = text.get("head_dim") or text.get("hidden_size", 0) // max(text.get("num_attention_heads", 0), 1)
    per_token = 2 * text.get("num_hidden_layers", 0) * heads * head_dim * bytes_each
    return {
        "weights": size.total * bytes_each // parts if parts else 0,
        # an engine over t devices holds t times the answers (CFG-11), so the share per device does not depend on t
        "keys and values": per_token * max_model_len * cfg.rm.decode_batch_size,
    }


def _text_config(cfg: Config) -> dict[str, Any]:
    try:
        config = json.loads((Path(cfg.model.path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config.get("text_config", config)


# ---------------------------------------------------------------------------------------------------------------------
# printing


def format_plan(plan: Plan) -> str:
    """The plan as text, one fact per line, after a line of `#` so that it can follow the resolved YAML."""
    unknown = "not known yet"
    lines = [("learners", f"{plan.world_size}, ZeRO-{plan.zero_stage}")]
    for index, server in enumerate(plan.servers):
        size = "all its visible" if server.world_size is None else server.world_size
        place = f"{server.base_url}, group port {server.group_port}"
        lines.append((f"server {index}", f"{place}, {size} device(s) ({server.device})"))
    if plan.own_rollouts:
        lines.append(("rollouts", plan.own_rollouts))
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
        lines.append(("parameters", f"{total:,}, of which {trainable:,} learn ({trainable / total:.2%})"))
    for name, memory in (("learner memory", plan.learner_memory), ("rollout memory", plan.rollout_memory)):
        lines.append((f"{name} per device", _format_memory(memory) if memory else f"{unknown} (model.path)"))
    return "\n".join(["# plan", *(f"# {name + ':':<34}{text}" for name, text in lines)]) + "\n"


def _format_memory(memory: dict[str, int]) -> str:
    parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in memory.items())
    return f"about {sum(memory.values()) / GIB:.2f} GiB ({parts})"
