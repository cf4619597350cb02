"""What a config comes to before any device is touched: devices, sync, rounds, steps, memory (`--dry-run`, CFG-16).

Numbers that depend on files (samples, weights) are there when the files are. Memory is an estimate from tensor shapes
and the ZeRO stage; it leaves out the vision tower's activations, CUDA's own share and fragmentation.
"""

import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

from utils.capacity import check_capacity, chunk_size
from utils.config.known_models import known_config, known_model, parameter_shapes
from utils.config.layout import Layout, plan_layout
from utils.config.load import ConfigError, check_world_size, dump_yaml, engine_json, exit_with, problem
from utils.config.rules import engine_problems, is_colocate, kernel_problems
from utils.config.schema import RM, Config, Tuner

GIB = 1 << 30
DEVICE_GIB = 80  # memory of the GPU that cache estimates assume
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ServerPlan:
    """One rollout server; `world_size` (TP x DP) is None where only the machine it starts on can tell."""

    base_url: str
    group_port: int
    device: str
    world_size: int | None
    tensor_parallel_size: int = 1


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters: all, and those that learn (with adapters). `dora_values`: how many numbers DoRA's largest
    temporaries hold; `can_change`: of the tensors that training changes, adapters merged; `source`: where the shapes
    come from if not from the weights' own files."""

    total: int
    trainable: int
    dora_values: int = 0
    can_change: int = 0
    source: str = ""


@dataclass(frozen=True)
class CachePlan:
    """What an engine's devices have left for keys and values if each has `DEVICE_GIB`: bytes per device, and how many
    tokens the engine can hold with that."""

    num_bytes: int
    num_tokens: int
    max_model_len: int


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


def model_size(path: Path, tuner: Tuner) -> ModelSize | None:
    """Count parameters from the headers of the checkpoint's safetensors files; where there are none, from its
    `config.json`, or from the name of a released model. None where neither says anything."""
    try:
        shapes, source = dict(_tensor_shapes(path)), ""
        if not shapes:
            config, source = _architecture(path)
            shapes = parameter_shapes(config) if config.get("model_type") == "qwen3_vl" else {}
    except (OSError, ValueError, struct.error):
        return None
    if not shapes:
        return None
    learning = {name: _trainable(name, shape, tuner) for name, shape in shapes.items()}
    can_change = sum(prod(shapes[name]) for name, number in learning.items() if number)
    adapted = [shape for name, shape in shapes.items() if tuner.use_dora and _is_adapted(name, shape, tuner)]
    # For the norms of a layer's rows PEFT 0.21 computes B A from an identity matrix, scales it and adds the weight.
    dora_values = max((num_in * num_in + 3 * num_in * num_out for num_out, num_in in adapted), default=0)
    return ModelSize(sum(map(prod, shapes.values())), sum(learning.values()), dora_values, can_change, source)


def _architecture(path: Path) -> tuple[dict[str, Any], str]:
    """`config.json`, or that of the released model the path names; and in words where it is from. Empty for neither."""
    try:
        return json.loads((path / "config.json").read_text(encoding="utf-8")), "config.json"
    except (OSError, ValueError):
        size = known_model(str(path))
        return (known_config(size), f"Qwen3-VL-{size} as released") if size else ({}, "")


def _tensor_shapes(path: Path) -> Iterator[tuple[str, list[int]]]:
    """A safetensors file opens with the length of a JSON header (8 bytes, little-endian) and that header."""
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        yield from ((name, entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _trainable(name: str, shape: list[int], tuner: Tuner) -> int:
    """Parameters that learn for this tensor: itself, its adapter (A, B and DoRA's magnitudes), or none."""
    if _is_saved_whole(name, tuner):
        return prod(shape)
    if tuner.type == "full":
        return 0 if _is_frozen(name, tuner) else prod(shape)
    if not _is_adapted(name, shape, tuner):
        return 0
    return tuner.rank * sum(shape) + (shape[0] if tuner.use_dora else 0)


def _is_saved_whole(name: str, tuner: Tuner) -> bool:
    module = name.rsplit(".", 1)[0]
    return tuner.type == "lora" and any(module.endswith(saved) for saved in tuner.modules_to_save)


def _is_frozen(name: str, tuner: Tuner) -> bool:
    return tuner.freeze_aligner if "merger" in name else tuner.freeze_vit if "visual" in name else tuner.freeze_llm


def _is_adapted(name: str, shape: list[int], tuner: Tuner) -> bool:
    is_linear = len(shape) == 2 and "embed" not in name and "lm_head" not in name
    if tuner.type != "lora" or not is_linear or _is_saved_whole(name, tuner) or _is_frozen(name, tuner):
        return False
    return _is_target(name.rsplit(".", 1)[0], tuner.target_modules)


def _is_target(module: str, targets: str | list[str]) -> bool:
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith("." + target) for target in targets)


# ---------------------------------------------------------------------------------------------------------------------
# memory


def chunk_labels(zero_stage: int) -> int:
    """Labels whose logits exist at once: 256 rows of 151,936 in float32 are 148 MiB, of which three copies live at the
    peak. Under ZeRO-3 every chunk gathers the head twice, which four times as many chunks would make slow."""
    return 1024 if zero_stage == 3 else 256


def learner_memory(cfg: Config, engine: dict[str, Any], size: ModelSize, world_size: int) -> dict[str, int]:
    """Bytes per learner device by part. ZeRO shards the optimizer from stage 1, gradients from 2, weights from 3.

    Weights are those of the model and of its adapters. Optimizer: AdamW's two moments in float32, and a float32 copy of
    what learns (ZeRO 0 in float32 needs none).
    Reduce buckets: DeepSpeed holds one from stage 1 on, and a second one with `overlap_comm` below stage 3. Gathered:
    what ZeRO-3 may hold of other ranks' weights. Logits exist for `chunk_labels` labels at once (LRN-4): in the model's
    dtype and in float32, each with its gradient. DoRA's norms are thrown away after each layer.
    """
    bytes_each, zero = _DTYPE_BYTES[cfg.model.dtype], engine.get("zero_optimization", {})
    stage, text = zero.get("stage", 0), _text_config(cfg)
    copies = 8 if cfg.model.dtype == "float32" and stage == 0 else 12
    num_weights = size.total + (size.trainable if cfg.tuner.type == "lora" else 0)
    num_buckets = 0 if stage == 0 else 2 if stage < 3 and zero.get("overlap_comm") else 1
    memory = {
        "weights": num_weights * bytes_each // (world_size if stage == 3 else 1),
        "gradients": size.trainable * bytes_each // (world_size if stage >= 2 else 1),
        "optimizer": size.trainable * copies // (world_size if stage >= 1 else 1),
        "reduce buckets": num_buckets * int(zero.get("reduce_bucket_size", 5e8)) * bytes_each,
        "gathered": min(int(zero.get("stage3_max_live_parameters", 1e9)), num_weights) * bytes_each * (stage == 3),
        "activations": _activations(cfg, bytes_each),
        "logits": min(chunk_labels(stage), _row_tokens(cfg)) * text.get("vocab_size", 0) * 2 * (bytes_each + 4),
        "DoRA norms": size.dora_values * bytes_each,
        "sync buckets (rank 0)": 2 * cfg.rm.vllm.sync.bucket_mib << 20,
    }
    for part, knob in (("weights", "offload_param"), ("optimizer", "offload_optimizer")):
        if zero.get(knob, {}).get("device", "none") != "none":
            memory[part] = 0
    return {name: value for name, value in memory.items() if value}


def _row_tokens(cfg: Config) -> int:
    rows = 1 if cfg.training.packing else cfg.training.per_device_train_batch_size * cfg.answers_per_sample
    return rows * (cfg.global_max_length or 0)


def _activations(cfg: Config, bytes_each: int) -> int:
    """Language model only: 17 values per token, layer and hidden unit; checkpointed, one, and one layer in full.

    DoRA keeps two more outputs of each linear layer: what its magnitude multiplies.
    Source: Korthikanti et al. 2022 (arXiv:2205.05198), table 2 without attention scores: 34 bytes at 2 per value.
    """
    text = _text_config(cfg)
    hidden, layers = text.get("hidden_size", 0), text.get("num_hidden_layers", 0)
    per_layer = 17 * hidden + (2 * _linear_outputs(text) if cfg.tuner.use_dora and not cfg.tuner.freeze_llm else 0)
    values = hidden * layers + per_layer if cfg.training.gradient_checkpointing else per_layer * layers
    return _row_tokens(cfg) * values * bytes_each


def _linear_outputs(text: dict[str, Any]) -> int:
    """Outputs per token of the linear layers of one transformer layer: q, k, v, o; gate, up, down."""
    heads, kv_heads, head_dim = _heads(text)
    return (heads + 2 * kv_heads) * head_dim + 2 * text.get("hidden_size", 0) + 2 * text.get("intermediate_size", 0)


def _heads(text: dict[str, Any]) -> tuple[int, int, int]:
    """Attention heads, key-value heads, and the size of one."""
    heads = text.get("num_attention_heads", 0)
    return (
        heads,
        text.get("num_key_value_heads") or heads,
        text.get("head_dim") or text.get("hidden_size", 0) // max(heads, 1),
    )


def _rollout_memory(cfg: Config, size: ModelSize) -> dict[str, int] | None:
    """Bytes per rollout device (of the first server, or a learner's own): its share of an engine's weights, and the
    cache of `decode_batch_size` answers. With hf the weights are the learner's."""
    if (engine := _rollout_engine(cfg)) is None:
        return None
    max_model_len, parts, _ = engine
    return {
        "weights": size.total * _DTYPE_BYTES[cfg.model.dtype] // parts if parts else 0,
        # an engine over t devices holds t times the answers (CFG-11), so the share per device does not depend on t
        "keys and values": _cache_bytes_per_token(cfg) * max_model_len * cfg.rm.decode_batch_size,
    }


def _rollout_engine(cfg: Config) -> tuple[int, int | None, float] | None:
    """Longest prompt and answer, devices of one engine (None: the learner's model itself), its share of their memory
    (0 on CPU)."""
    vllm = cfg.rm.vllm
    if is_colocate(cfg):
        return cfg.global_max_length or 0, vllm.tensor_parallel_size, vllm.gpu_memory_utilization
    if cfg.rm.rollout_backend == "hf":
        return cfg.global_max_length or 0, None, 0.0
    if cfg.rs is None:
        return None
    own = cfg.server_settings()
    share = 0.0 if own.device == "cpu" else own.vllm_gpu_memory_utilization
    return own.vllm_max_model_len, own.vllm_tensor_parallel_size, share


def _cache_bytes_per_token(cfg: Config) -> int:
    """Keys and values of all layers, on all devices of an engine together."""
    text = _text_config(cfg)
    _, kv_heads, head_dim = _heads(text)
    return 2 * text.get("num_hidden_layers", 0) * kv_heads * head_dim * _DTYPE_BYTES[cfg.model.dtype]


def _cache_plan(cfg: Config, size: ModelSize) -> CachePlan | None:
    """What is left for the cache beside the weights; vLLM's own buffers are not counted. None on CPU, where
    `cpu_kv_cache_gib` says it."""
    max_model_len, parts, share = _rollout_engine(cfg) or (0, None, 0.0)
    per_token = _cache_bytes_per_token(cfg)
    if not (parts and share and per_token):
        return None
    left = int(share * DEVICE_GIB * GIB) - size.total * _DTYPE_BYTES[cfg.model.dtype] // parts
    # With more devices than key-value heads each head is held more than once.
    copies = max(1, parts // max(_heads(_text_config(cfg))[1], 1))
    return CachePlan(left, max(0, left) * parts // (per_token * copies), max_model_len)


def _text_config(cfg: Config) -> dict[str, Any]:
    config, _ = _architecture(Path(cfg.model.path))
    return config.get("text_config", config)


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
