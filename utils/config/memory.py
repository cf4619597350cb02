"""Estimated memory of learners and engines, from tensor shapes and the ZeRO stage (CFG-16).

A learner's leaves out the vision tower's activations, the optimizer's temporaries, CUDA's and NCCL's own memory and
fragmentation. Where there is no checkpoint, released models are recognized by name (`utils.config.released`).
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from utils.config.checkpoint_files import read_header
from utils.config.released import MODELS, known_model
from utils.config.rollout import ServerSettings
from utils.config.schema import Config, Tuner
from utils.config.section import value_at
from utils.families import expert_problem, family_from, part_of, read_config, split_problem, text_config

GIB = 1 << 30
DEVICE_GIB = 80  # memory of the GPU that a plan assumes, unless it is told
AUTO_FREE = 0.2  # fraction of it that `gradient_checkpointing: auto` leaves to what estimates leave out
# Of an engine's GPU beside vLLM's share: CUDA's context, NCCL's buffers, and graphs beyond vLLM's own estimate. A tiny
# engine with one learner took 0.7 on an H200 (docs/gpu_first_run.md); more peers want more buffers.
RUNTIME_GIB = 3
LAYER = r"(?:^|\.)layers\.(\d+)\."  # of the language model, in the name of one of its parameters
# Of a safetensors header. Qwen3.5's files hold a draft model (mtp), which is neither trained nor served.
_LEFT_OUT = ("__metadata__", "mtp.")
_PARTS_OF_EXPERTS = {"experts", "gate_proj", "up_proj", "gate_up_proj", "down_proj"}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters."""

    total: int
    trainable: int  # with adapters
    dora_values: int = 0  # numbers in DoRA's largest temporaries
    can_change: int = 0  # in tensors that training changes, adapters merged
    source: str = ""  # of the shapes, if not the files of the weights
    num_layers: int = 0  # of the language model
    largest: int = 0  # numbers in the largest tensor
    flops: tuple[int, int, int] = (1, 2, 1)  # `layer_flops`
    active: tuple[int, int] = (1, 1)  # of total and of trainable, those that a token uses
    words: frozenset[str] = frozenset()  # parts of the tensors' names
    experts: int = 0  # of total, those in experts


@dataclass(frozen=True)
class CacheSize:
    """Memory left for keys and values if each device of an engine has `device_gib`."""

    num_bytes: int  # per device
    num_tokens: int  # that the engine can hold
    max_model_len: int
    device_gib: float = DEVICE_GIB

    def __str__(self) -> str:
        responses = f"{self.num_tokens // self.max_model_len} of {self.max_model_len}" if self.max_model_len else "any"
        left = f"at most {self.num_bytes / GIB:.2f} GiB are left on one of {self.device_gib:g} GiB"
        return f"{left}; an engine holds {self.num_tokens:,} tokens ({responses})"


def model_size(path: Path, tuner: Tuner) -> ModelSize | None:
    """Count parameters from the headers of the checkpoint's safetensors files; without those, from its `config.json`
    or the name of a released model. None if neither tells."""
    try:
        shapes, source = dict(_tensor_shapes(path)), ""
        if not shapes:
            config, source = _architecture(path)
            shapes = parameter_shapes(config)
    except (OSError, ValueError):
        shapes = {}
    if not shapes:
        return None
    if not any("lm_head" in name for name in shapes):  # tied to the embeddings: who names one trains both
        saved = ["embed_tokens" if name == "lm_head" else name for name in tuner.modules_to_save]
        tuner = tuner.model_copy(update={"modules_to_save": saved})
    trainable = {name: _trainable(name, shape, tuner) for name, shape in shapes.items()}
    can_change = sum(prod(shapes[name]) for name, number in trainable.items() if number)
    adapted = [shape for name, shape in shapes.items() if tuner.use_dora and _is_adapted(name, shape, tuner)]
    # For the norms of a layer's rows PEFT 0.21 computes B A from an identity matrix, scales it and adds the weight.
    dora_values = max((num_in * num_in + 3 * num_in * num_out for num_out, num_in in adapted), default=0)
    layers = {found[1] for name in shapes if part_of(name) == "llm" and (found := re.search(LAYER, name))}
    numbers = {name: prod(shape) for name, shape in shapes.items()}
    total, learn, share = sum(numbers.values()), sum(trainable.values()), _active_share(path)
    experts = [name for name in shapes if ".experts." in name]
    idle, idle_learn = (round((1 - share) * sum(of[name] for name in experts)) for of in (numbers, trainable))
    return ModelSize(
        total=total,
        trainable=learn,
        dora_values=dora_values,
        can_change=can_change,
        source=source,
        num_layers=len(layers),
        largest=max(numbers.values()),
        flops=layer_flops(shapes, trainable, tuner, share),
        active=(total - idle, learn - idle_learn),
        words=frozenset(word for name in shapes for word in name.split(".")),
        experts=sum(numbers[name] for name in experts),
    )


def layer_flops(
    shapes: dict[str, list[int]], trainable: dict[str, int], tuner: Tuner, active: float = 1.0
) -> tuple[int, int, int]:
    """Multiplications per token in the linear layers of the language model: forward, backward, and what backward
    recomputes if it recomputes all layers. Of experts a token uses the share `active`. Attention over the length, a
    recurrent mixer's own products, vision tower, head and DoRA's norms are left out.

    A frozen weight needs no gradient of its own. torch stops recomputing a layer at the last tensor that backward
    needs: before the product of its last linear layer, unless that has an adapter, or ZeRO-3 runs its own products.
    """
    own = [name for name in shapes if part_of(name) == "llm" and re.search(LAYER, name)]
    used = {name: active if ".experts." in name else 1.0 for name in own if _is_product(name, shapes[name])}
    adapted = {name for name in used if _is_adapted(name, shapes[name], tuner)}
    forward = sum(share * prod(shapes[name]) + trainable[name] * (name in adapted) for name, share in used.items())
    last = sum(
        share * prod(shapes[name])
        for name, share in used.items()
        if re.search(r"\bdown_proj(\.weight)?$", name) and name not in adapted
    )
    backward = forward + sum(share * trainable[name] for name, share in used.items())
    return round(forward), round(backward), round(forward - last)


def _is_product(name: str, shape: list[int]) -> bool:
    """Whether a weight is multiplied with each token, or with those that an expert gets."""
    return len(shape) == 2 or ".experts." in name


def _active_share(path: Path) -> float:
    """The share of experts that a token goes to."""
    config, _ = _architecture(path)
    text = text_config(config)
    return text.get("num_experts_per_tok", 1) / text["num_experts"] if text.get("num_experts") else 1.0


def relative_flops(size: ModelSize, num_checkpointed: int | None, zero_stage: int) -> tuple[float, float]:
    """FLOPs of backward, and of what it recomputes, where forward's are 1."""
    forward, backward, recomputed = size.flops
    recomputed = forward if zero_stage == 3 else recomputed
    layers = max(size.num_layers, 1)
    num = layers if num_checkpointed is None else min(num_checkpointed, layers)
    return backward / max(forward, 1), recomputed / max(forward, 1) * num / layers


def _architecture(path: Path) -> tuple[dict[str, Any], str]:
    """Return `config.json`, or that of the released model the path names, and its source; empty without either."""
    try:
        return read_config(path), "config.json"
    except (OSError, ValueError):
        name = known_model(str(path))
        return (MODELS[name], f"{name} as released") if name else ({}, "")


def _tensor_shapes(path: Path) -> Iterator[tuple[str, list[int]]]:
    """Yield (name, shape) of the tensors that make the model."""
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(read_header(stream))
        yield from ((name, entry["shape"]) for name, entry in header.items() if not name.startswith(_LEFT_OUT))


def _trainable(name: str, shape: list[int], tuner: Tuner) -> int:
    """Number of trainable parameters for a tensor: itself, its adapter (A, B and DoRA's magnitudes), or none."""
    if _is_saved_whole(name, tuner) or tuner.type == "full" and not _is_frozen(name, tuner):
        return prod(shape)
    if not _is_adapted(name, shape, tuner):
        return 0
    return tuner.rank * sum(shape) + (shape[0] if tuner.use_dora else 0)


def _is_saved_whole(name: str, tuner: Tuner) -> bool:
    """`modules_to_save` name modules, which may hold others, as an aligner does."""
    return tuner.type == "lora" and any(f".{module}." in f".{name}" for module in tuner.modules_to_save)


def _is_frozen(name: str, tuner: Tuner) -> bool:
    return getattr(tuner, f"freeze_{part}") if (part := part_of(name)) in ("vit", "aligner") else tuner.freeze_llm


def _is_adapted(name: str, shape: list[int], tuner: Tuner) -> bool:
    # A router (`mlp.gate`) is a weight of its own, no linear layer.
    is_linear = len(shape) == 2 and not re.search(r"embed|lm_head|\.experts\.|\.mlp\.gate\.", name)
    if tuner.type != "lora" or not is_linear or _is_saved_whole(name, tuner) or _is_frozen(name, tuner):
        return False
    module, targets = name.rsplit(".", 1)[0], tuner.target_modules
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, module) is not None
    return any(f".{module}".endswith(f".{target}") for target in targets)


def chunk_labels(zero_stage: int) -> int:
    """Labels whose logits exist at once: 256 rows of 151,936 in float32 are 148 MiB, of which three copies exist at the
    peak. Under ZeRO-3 every chunk gathers the head twice, so chunks are four times as large."""
    return 1024 if zero_stage == 3 else 256


def checkpointed_layers(
    cfg: Config, engine: dict[str, Any], size: ModelSize | None, world_size: int, device_bytes: int
) -> int | None:
    """Language-model layers that backward recomputes (`training.gradient_checkpointing`); None: all.

    `auto`: as few as leave `AUTO_FREE` of a device's memory; all where the estimate does not hold: without a GPU
    (`device_bytes` 0), a known model or a limit of rows, and for the scores of `eager` attention.
    """
    wanted = cfg.training.gradient_checkpointing
    if wanted != "auto":
        return None if wanted is True else int(wanted)
    budget = device_bytes * (1 - AUTO_FREE)  # a colocated engine sleeps while rows train
    if size is not None and cfg.global_max_length and cfg.model.attn_implementation != "eager":
        for num in range(size.num_layers):
            if sum(learner_memory(cfg, engine, size, world_size, num).values()) <= budget:
                return num
    return None


def learner_memory(
    cfg: Config, engine: dict[str, Any], size: ModelSize, world_size: int, num_checkpointed: int | None = None
) -> dict[str, int]:
    """Bytes per learner device by part. ZeRO shards the optimizer from stage 1, gradients from 2, weights from 3.

    Weights are those of the model and its adapters. Optimizer: AdamW's two moments in float32, and a float32 copy of
    the trainable weights (not with ZeRO 0 in float32). Reduce buckets: DeepSpeed holds one from stage 1 on, and another
    with `overlap_comm` below stage 3. Gathered: weights of other ranks that ZeRO-3 may hold. It cannot free the experts
    of a layer that backward does not recompute: torch keeps a transposed view of them until then, where DeepSpeed's own
    linear layers keep the parameter. Logits exist for `chunk_labels` labels at once (LRN-4), in the model's dtype and
    in float32, each with its gradient; those of `reference_kl` with the start policy's log-probabilities and the
    divergence besides; those for a teacher with their log-probabilities, and a copy without the reported tokens. DoRA's
    norms are freed after each layer.
    """
    bytes_each, zero = _DTYPE_BYTES[cfg.model.dtype], engine["zero_optimization"]
    stage, text = zero["stage"], _text_config(cfg)
    copies = 8 if cfg.model.dtype == "float32" and stage == 0 else 12
    num_weights = size.total + (size.trainable if cfg.tuner.type == "lora" else 0)
    has_kl, share = cfg.rm.losses.reference_kl > 0, world_size if stage == 3 else 1
    per_logit = 2 * (bytes_each + 4) + 8 * (has_kl or cfg.rm.teacher is not None)
    num_buckets = 0 if stage == 0 else 2 if stage < 3 and zero.get("overlap_comm") else 1
    memory = {
        "weights": num_weights * bytes_each // share,
        "start policy": size.total * bytes_each // share * (cfg.model.reference_path is not None),
        "start policy's states": _row_tokens(cfg) * text.get("hidden_size", 0) * bytes_each * has_kl,
        "gradients": size.trainable * bytes_each // (world_size if stage >= 2 else 1),
        "optimizer": size.trainable * copies // (world_size if stage >= 1 else 1),
        "reduce buckets": num_buckets * int(zero.get("reduce_bucket_size", 5e8)) * bytes_each,
        "gathered": min(int(zero.get("stage3_max_live_parameters", 1e9)), num_weights) * bytes_each * (stage == 3),
        "experts until backward": _num_kept(text, num_checkpointed) * _expert_values(text) * bytes_each * (stage == 3),
        "activations": _row_tokens(cfg) * _activations(cfg, num_checkpointed) * bytes_each,
        "logits": min(chunk_labels(stage), _row_tokens(cfg)) * text.get("vocab_size", 0) * per_logit,
        "DoRA norms": size.dora_values * bytes_each,
        "sync buckets (rank 0)": _bucket_bytes(cfg, size) * cfg.uses_vllm,
    }
    for part, knob in (
        ("weights", "offload_param"),
        ("start policy", "offload_param"),
        ("optimizer", "offload_optimizer"),
        ("gradients", "offload_optimizer"),
    ):
        if value_at(zero, (knob, "device"), "none") != "none":
            memory[part] = 0
    return {name: value for name, value in memory.items() if value}


def _row_tokens(cfg: Config) -> int:
    rows = 1 if cfg.training.packing else cfg.training.per_device_train_batch_size * cfg.answers_per_sample
    return rows * row_limit(cfg)


def row_limit(cfg: Config) -> int:
    """The most tokens of a row; without a length of their own, padded rows are as long as the engine lets them be."""
    return cfg.global_max_length or (cfg.server_settings().vllm_max_model_len if cfg.rs else 0)


def _activations(cfg: Config, num_checkpointed: int | None) -> int:
    """Values per token: a checkpointed layer keeps its input; the others, and the one that backward is at, all it uses.
    Where layers differ, those that are kept whole are counted as the largest."""
    text = _text_config(cfg)
    hidden, kinds = text.get("hidden_size", 0), _layer_kinds(text)
    whole = sorted((_layer_values(cfg, text, kind) for kind in kinds), reverse=True)
    num_whole = max(1, _num_kept(text, num_checkpointed))
    return hidden * (len(kinds) - num_whole) + sum(whole[:num_whole])


def _num_kept(text: dict[str, Any], num_checkpointed: int | None) -> int:
    """Language-model layers that backward does not recompute."""
    return 0 if num_checkpointed is None else max(0, len(_layer_kinds(text)) - num_checkpointed)


def _expert_values(text: dict[str, Any]) -> int:
    """Values of all experts of a layer: each maps the hidden size to two of its own, and one back."""
    return text.get("num_experts", 0) * 3 * text.get("moe_intermediate_size", 0) * text.get("hidden_size", 0)


def _layer_kinds(text: dict[str, Any]) -> list[str]:
    """`full_attention` or `linear_attention` for each layer of the language model."""
    if kinds := text.get("layer_types"):
        return kinds
    every = text.get("full_attention_interval", 1)
    return [
        "linear_attention" if i % every else "full_attention" for i in range(1, text.get("num_hidden_layers", 0) + 1)
    ]


def _layer_values(cfg: Config, text: dict[str, Any], kind: str) -> int:
    """Values per token that a layer's backward uses.

    Norms keep their input in float32 (two values) and output, trained ones twice; attention what it takes and returns;
    a recurrent mixer what it takes, before and behind the convolution, its gate and what it returns (fla's kernels;
    transformers' own keep three times as much); an MLP four of its widths, and each expert of a token what it takes and
    returns besides. DoRA keeps two more outputs of each linear layer, which its magnitude multiplies; an adapter's
    dropout what is left of its input, and a mask of one byte per value. An MLP's product is then kept no longer."""
    full, hidden = cfg.tuner.type == "full", text.get("hidden_size", 0)
    if kind == "linear_attention":
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
        mixer, mixer_out = 3 * (2 * keys + values) + 4 * values, 2 * keys + 2 * values
        mixer_in = 4 * hidden + values
    else:
        heads, kv_heads, head_dim = _heads(text)
        gate = heads * head_dim * ("linear_num_key_heads" in text)  # Qwen3.5 gates what attention returns
        mixer = ((5 + full) * heads + (4 + full) * kv_heads) * head_dim + (2 + full) * gate
        mixer_out = (heads + 2 * kv_heads) * head_dim + gate
        mixer_in = 3 * hidden + heads * head_dim
    dense = (
        text.get("shared_expert_intermediate_size", 0) if text.get("num_experts") else text.get("intermediate_size", 0)
    )
    routed = text.get("num_experts_per_tok", 0) * (4 * text.get("moe_intermediate_size", 0) + 2 * hidden)
    size = (6 + 2 * full) * hidden + mixer + 4 * dense + routed
    if cfg.tuner.use_dora and not cfg.tuner.freeze_llm:
        size += 2 * (mixer_out + 2 * dense + hidden + hidden * (dense > 0))
    if cfg.tuner.type == "lora" and cfg.tuner.dropout and not cfg.tuner.freeze_llm:
        inputs = mixer_in + (2 + (routed > 0)) * hidden * (dense > 0) + dense  # a shared expert has a gate besides
        size += inputs + inputs // _DTYPE_BYTES[cfg.model.dtype] - dense
    return size


def _heads(text: dict[str, Any]) -> tuple[int, int, int]:
    """Attention heads, key-value heads, and the size of one."""
    heads = text.get("num_attention_heads", 0)
    head_dim = text.get("head_dim") or text.get("hidden_size", 0) // max(heads, 1)
    return heads, text.get("num_key_value_heads") or heads, head_dim


def heads_problem(cfg: Config, devices: int) -> str | None:
    """Why the language model cannot be split over so many devices, where its heads are known."""
    return split_problem(_text_config(cfg), devices)


def expert_adapters_problem(cfg: Config) -> str | None:
    """Why a local checkpoint takes no adapters on entries of `tuner.target_modules`: they select experts only."""
    targets = cfg.tuner.target_modules
    if cfg.tuner.type != "lora" or not isinstance(targets, list) or not _text_config(cfg).get("num_experts"):
        return None
    names = [name for name, _ in _tensor_shapes(Path(cfg.model.path)) if ".experts." not in name]
    modules = [f".{name.rpartition('.')[0]}" for name in names]
    wrong = [
        target
        for target in targets
        if target.rpartition(".")[2] in _PARTS_OF_EXPERTS and not any(own.endswith(f".{target}") for own in modules)
    ]
    if not wrong or not names:
        return None
    return f"{', '.join(wrong)} are experts here, which take no adapters; leave them out, or set tuner.type: full"


def experts_problem(cfg: Config, settings: ServerSettings, devices: int) -> str | None:
    """The same of a server's experts over all its devices."""
    return expert_problem(_text_config(cfg), devices, settings.vllm_engine_kwargs)


def rollout_memory(cfg: Config, size: ModelSize, index: int = 0) -> dict[str, int] | None:
    """Bytes per rollout device (of server `index`, or a learner's own): weights, and the cache of `decode_batch_size`
    responses. With hf the weights are the learner's."""
    if (engine := rollout_engine(cfg, index)) is None:
        return None
    max_model_len, num_devices, _ = engine
    weights = _engine_weights(cfg, size, num_devices, index) if num_devices else 0
    # An engine over t devices holds t times the responses (CFG-11), so the cache per device does not depend on t.
    cache = (_cache_bytes_per_token(cfg) * max_model_len + _state_bytes(cfg)) * cfg.rm.decode_batch_size
    return {"weights": weights, "keys and values": cache}


def _engine_weights(cfg: Config, size: ModelSize, num_devices: int, index: int) -> int:
    """Bytes of weights per device of an engine. Experts lie on the devices of all replicas of a server together."""
    replicas = None if cfg.is_colocate or cfg.rs is None else cfg.server_settings(index).world_size
    values = (size.total - size.experts) / num_devices + size.experts / (replicas or num_devices)
    return int(values * _DTYPE_BYTES[cfg.model.dtype])


def outside_memory(cfg: Config, size: ModelSize) -> dict[str, int]:
    """Bytes per GPU of a rollout server outside vLLM's share. A tensor that arrived is laid out anew before it replaces
    the old one."""
    loading = size.largest * _DTYPE_BYTES[cfg.model.dtype]
    runtime = RUNTIME_GIB * GIB
    return {"CUDA, NCCL, graphs": runtime, "sync buckets": _bucket_bytes(cfg, size), "loading": loading}


def sync_bytes(cfg: Config, size: ModelSize) -> int:
    """What a sync takes beside a colocated engine: a bucket of merged tensors, the largest as it is gathered, and the
    engine's copy of what it loads."""
    largest = size.largest * _DTYPE_BYTES[cfg.model.dtype]
    return _bucket_bytes(cfg, size) // 2 + 2 * largest


def _bucket_bytes(cfg: Config, size: ModelSize) -> int:
    """Two buckets of a sync, at either end; a tensor larger than a bucket travels in one of its own size (SYN-5)."""
    return 2 * max(cfg.rm.vllm.sync.bucket_mib << 20, size.largest * _DTYPE_BYTES[cfg.model.dtype])


def cache_size(cfg: Config, size: ModelSize, device_gib: float = DEVICE_GIB, index: int = 0) -> CacheSize | None:
    """Memory left beside the weights, of an engine of server `index`, vLLM's own buffers not counted. None on CPU:
    `cpu_kv_cache_gib` sets it."""
    max_model_len, num_devices, fraction = rollout_engine(cfg, index) or (0, None, 0.0)
    per_token = _cache_bytes_per_token(cfg)
    if not (num_devices and fraction and per_token):
        return None
    left = int(fraction * device_gib * GIB) - _engine_weights(cfg, size, num_devices, index)
    # With more devices than key-value heads each head is held more than once.
    copies = max(1, num_devices // max(_heads(_text_config(cfg))[1], 1))
    return CacheSize(left, max(0, left) * num_devices // (per_token * copies), max_model_len, device_gib)


def rollout_engine(cfg: Config, index: int = 0) -> tuple[int, int | None, float] | None:
    """Longest prompt + response, devices of an engine (None: the learner's), its fraction of their memory (CPU: 0)."""
    vllm = cfg.rm.vllm
    if cfg.is_colocate:
        return cfg.global_max_length or 0, vllm.tensor_parallel_size, vllm.gpu_memory_utilization
    if cfg.rm.rollout_backend == "hf" or not cfg.generates:
        return (cfg.global_max_length or 0) * cfg.generates, None, 0.0
    if cfg.rs is None:
        return None
    own = cfg.server_settings(index)
    fraction = 0.0 if own.device == "cpu" else own.vllm_gpu_memory_utilization
    return own.vllm_max_model_len, own.vllm_tensor_parallel_size, fraction


def _cache_bytes_per_token(cfg: Config) -> int:
    """Keys and values of all layers with attention, on all devices of an engine together."""
    text = _text_config(cfg)
    _, kv_heads, head_dim = _heads(text)
    num_layers = _layer_kinds(text).count("full_attention")
    return 2 * num_layers * kv_heads * head_dim * _DTYPE_BYTES[cfg.model.dtype]


def _state_bytes(cfg: Config) -> int:
    """States of the recurrent layers for one response, in float32, however long it is."""
    text = _text_config(cfg)
    if not (num_layers := _layer_kinds(text).count("linear_attention")):
        return 0
    values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
    inputs = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + values
    return 4 * num_layers * (values * text["linear_key_head_dim"] + inputs * text["linear_conv_kernel_dim"])


def _text_config(cfg: Config) -> dict[str, Any]:
    config, _ = _architecture(Path(cfg.model.path))
    return text_config(config)


def parameter_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Name -> shape of every parameter, from transformers' own classes, without allocating them.

    Raises ValueError for a family that is not supported.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    family_from(config)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config))
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}
