"""The DeepSpeed JSON of a config: where it lies, what it may hold, and what the engine gets. The YAML owns the rest."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from utils.config.report import ConfigError, problem
from utils.config.rules import Found, reads
from utils.config.schema import Config
from utils.config.section import brief, parse_path, value_at

DS_CONFIGS = Path(__file__).parents[2] / "ds_configs"


def deepspeed_path(cfg: Config) -> Path:
    """Return the path of the DeepSpeed JSON; a bare name stands for a file in `ds_configs/`."""
    return Path(cfg.deepspeed) if cfg.deepspeed.endswith(".json") else DS_CONFIGS / f"{cfg.deepspeed}.json"


def read_deepspeed(cfg: Config) -> tuple[dict[str, Any], list[str]]:
    """Return the DeepSpeed JSON without what it leaves to the trainer ("auto"), or an empty one and why it cannot be
    used."""
    path = deepspeed_path(cfg)
    try:
        raw = _without_auto(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        known = ", ".join(sorted(file.stem for file in DS_CONFIGS.glob("*.json")))
        return {}, [f"there is no {path}; use a name from ds_configs/ ({known}) or a path to a .json"]
    except (OSError, ValueError, RecursionError) as error:
        return {}, [f"{path} cannot be read as JSON: {error}; correct it"]
    if not isinstance(raw, dict):
        return {}, [f"{path} must hold a JSON object; correct it"]
    for section in ("zero_optimization", "bf16", "fp16", "data_types"):
        if not isinstance(raw.get(section, {}), dict):
            return {}, [f"{path}: {section}={brief(raw[section])} must be a JSON object; correct it"]
    stage = raw.get("zero_optimization", {}).get("stage", 0)
    if type(stage) is not int or stage not in range(4):
        return {}, [f"{path} says zero_optimization.stage={brief(stage)}, which must be 0, 1, 2 or 3; correct it"]
    return raw, []


def _without_auto(value: Any) -> Any:
    """Drop what says "auto"; but for ZeRO and its stage, for which there is no other setting to follow."""
    if not isinstance(value, dict):
        return value
    return {k: _without_auto(v) for k, v in value.items() if v != "auto" or k in ("zero_optimization", "stage")}


def settings_on_record(cfg: Config) -> dict[str, Any]:
    """The resolved config as checkpoints keep it, and what the DeepSpeed file holds, which it only names."""
    return cfg.model_dump(mode="json", by_alias=True) | {"deepspeed_file": read_deepspeed(cfg)[0]}


def engine_json(cfg: Config, world_size: int) -> dict[str, Any]:
    """Return the argument of `deepspeed.initialize(config=...)`: the JSON's engine knobs, and batch geometry, clipping
    and dtype from the YAML. The trainer hands its own optimizer to `initialize`, which DeepSpeed is told to accept.

    Raises:
        ConfigError: the JSON is unreadable or contradicts the YAML, `train_batch_size` for `world_size` included.
    """
    if found := [problem(cfg, path, rule) for path, rule in deepspeed_problems(cfg, world_size)]:
        raise ConfigError(found)
    raw, training = read_deepspeed(cfg)[0], cfg.training
    knobs = {key: value for key, value in raw.items() if key not in ("optimizer", "scheduler", "bf16", "fp16")}
    half = {"bfloat16": "bf16", "float16": "fp16"}.get(cfg.model.dtype)
    # In float16 the JSON may set the loss scale.
    scaling = {half: raw.get(half, {}) | {"enabled": True}} if half else {}
    ours = {
        "train_batch_size": world_size * training.samples_per_rank,
        "train_micro_batch_size_per_gpu": training.per_device_train_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "gradient_clipping": training.max_grad_norm,
        "zero_optimization": {"stage": 0} | raw.get("zero_optimization", {}),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return knobs | scaling | ours


@reads("deepspeed")
def _deepspeed_is_readable(cfg: Config) -> Found:
    yield from (("deepspeed", rule) for rule in read_deepspeed(cfg)[1])


# What a DeepSpeed JSON may hold, besides what the YAML owns.
_ENGINE = {"zero_optimization", "data_types", "communication_data_type", "disable_allgather", "aio"}
_ENGINE |= {"activation_checkpointing", "prescale_gradients", "gradient_predivide_factor", "disable_python_gc"}
_ENGINE |= {"zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "sequence_parallel_size"}
_LOGGING = {"steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "timers"}
_LOGGING |= {"comms_logger", "flops_profiler", "tensorboard", "wandb", "comet", "csv_monitor"}
_OWNED = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
_OWNED |= {"optimizer", "scheduler", "bf16", "fp16"}
_SECTIONS = _ENGINE | _LOGGING | _OWNED

# In `zero_optimization`: the only value that is supported, and what another one would do.
_QUANTIZED = "quantized weights and gradients are not supported"
_FIXED = {
    "load_from_fp32_weights": (True, "a resumed run would begin with master weights rounded to model.dtype"),
    "offload_optimizer.ratio": (1.0, "what stays on the GPU would not be trained, nor saved in checkpoints"),
    "offload_optimizer.super_offload": (False, "it was never run with this trainer"),
    "zero_quantized_weights": (False, _QUANTIZED),
    "zero_quantized_nontrainable_weights": (False, _QUANTIZED),
    "zero_quantized_gradients": (False, _QUANTIZED),
    "zero_hpz_partition_size": (1, "it was never run with this trainer"),
    "elastic_checkpoint": (False, "it was never run with this trainer"),
    "zenflow": (None, "it sets gradient accumulation and learning rates by rules of its own"),
}

# In a DeepSpeed JSON, of float16.
_LOSS_SCALE = {
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
}


@reads("deepspeed", "training", "model.dtype")
def _deepspeed_agrees(cfg: Config) -> Found:
    """Find settings the YAML owns that stand in the JSON with another value; equal values are harmless."""
    raw, path = read_deepspeed(cfg)[0], deepspeed_path(cfg)
    t, dtype = cfg.training, cfg.model.dtype
    owned = [
        ("train_micro_batch_size_per_gpu", "training.per_device_train_batch_size", t.per_device_train_batch_size),
        ("gradient_accumulation_steps", "training.gradient_accumulation_steps", t.gradient_accumulation_steps),
        ("gradient_clipping", "training.max_grad_norm", t.max_grad_norm),
        ("optimizer.params.lr", "training.learning_rate", t.learning_rate),
        ("optimizer.params.betas", "training.adam_beta1, adam_beta2", [t.adam_beta1, t.adam_beta2]),
        ("optimizer.params.eps", "training.adam_epsilon", t.adam_epsilon),
        ("optimizer.params.weight_decay", "training.weight_decay", t.weight_decay),
    ]
    if str(value_at(raw, ("optimizer", "type"))).lower() not in ("adam", "adamw"):
        owned.append(("optimizer.type", "the optimizer", "AdamW"))
    for switch, name in (("bf16", "bfloat16"), ("fp16", "float16")):
        if value_at(raw, (switch, "enabled")) != (dtype == name):
            owned.append((f"{switch}.enabled", "model.dtype", dtype))
    for key, name, ours in owned:
        if (theirs := value_at(raw, parse_path(key))) not in (None, ours):
            rule = f"{path} says {key}={brief(theirs)}, but {name}={brief(ours)}; delete it from the JSON"
            yield "deepspeed", rule
    if raw.get("scheduler"):
        rule = f"{path} holds a scheduler, but training.lr_scheduler={t.lr_scheduler}; delete it from the JSON"
        yield "deepspeed", rule
    if raw.get("sequence_parallel_size", 1) != 1:
        yield "deepspeed", f"{path} sets sequence_parallel_size: sequence parallelism is not supported; delete it"


def deepspeed_problems(cfg: Config, world_size: int) -> Found:
    """Find why the DeepSpeed JSON cannot be used by `world_size` learners."""
    yield from _deepspeed_is_readable(cfg)
    yield from _deepspeed_agrees(cfg)
    raw, _ = read_deepspeed(cfg)
    yield from _unknown(raw, deepspeed_path(cfg))
    yield from _refused_by_deepspeed(raw, deepspeed_path(cfg))
    yield from _not_supported(raw, cfg)
    if cfg.is_colocate and cfg.model.dtype == "float16" and value_at(raw, ("zero_optimization", "stage")) == 3:
        # vLLM moves the process to a CUDA stream of its own; ZeRO-3 looks for overflows behind the default one.
        yield "model.dtype", "float16 under ZeRO-3 misses overflows beside a colocated engine; use bfloat16, or zero2"
    theirs, ours = raw.get("train_batch_size"), world_size * cfg.training.samples_per_rank
    if theirs not in (None, ours):
        rule = f"says train_batch_size={theirs}, the YAML makes {ours} with {world_size} ranks"
        yield "deepspeed", f"{deepspeed_path(cfg)} {rule}; delete it from the JSON"


def _unknown(raw: dict[str, Any], path: Path) -> Found:
    """Find sections that DeepSpeed would ignore as misspelt, or that this trainer was never run with."""
    for key in sorted(raw.keys() - _SECTIONS):
        near = get_close_matches(key, _SECTIONS, 1)
        way_out = f"did you mean {near[0]}? Else delete it" if near else "delete it"
        yield "deepspeed", f"{path}: {key}: not a setting that this trainer supports; {way_out}"


def _refused_by_deepspeed(raw: dict[str, Any], path: Path) -> Found:
    """Find the values that DeepSpeed refuses."""
    from deepspeed.runtime.precision_config import DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # seconds, which the server need not wait

    for section, checked in (("zero_optimization", DeepSpeedZeroConfig), ("fp16", DeepSpeedFP16Config)):
        try:
            checked(**raw.get(section, {}))
        except ValidationError as error:
            for item in error.errors(include_url=False, include_context=False):
                key = ".".join(map(str, (section, *item["loc"])))
                yield "deepspeed", f"{path}: {key}={brief(item['input'])}: {item['msg']}; correct it, or delete it"


def _not_supported(raw: dict[str, Any], cfg: Config) -> Found:
    """Find settings that this ZeRO stage ignores, and those of number formats that would break what the trainer
    promises: float32 master weights, and steps that are skipped where the gradient is not finite."""
    path, zero = deepspeed_path(cfg), raw.get("zero_optimization", {})
    for knob, lowest in (("offload_param", 3), ("offload_optimizer", 1)):
        if value_at(zero, (knob, "device"), "none") != "none" and zero.get("stage", 0) < lowest:
            rule = f"has no effect at stage {zero.get('stage', 0)}; set stage: {lowest} or higher, or delete it"
            yield "deepspeed", f"{path}: zero_optimization.{knob} {rule}"
    for key in sorted(key for key in zero if key.startswith("cpu_offload")):  # which DeepSpeed still takes
        rule = "is an old name, which plan and resume do not know; write offload_optimizer: {device: cpu}"
        yield "deepspeed", f"{path}: zero_optimization.{key} {rule}"
    for key, (only, reason) in _FIXED.items():
        if (value := value_at(zero, parse_path(key), only)) not in (only, None):
            yield "deepspeed", f"{path}: zero_optimization.{key}={brief(value)}: {reason}; delete it"
    if zero.get("compute_grad_norm") is False:
        rule = "without it no step is skipped whose gradient is not finite; delete it"
        yield "deepspeed", f"{path}: zero_optimization.compute_grad_norm=false: {rule}"
    half = {"bfloat16": "bf16", "float16": "fp16"}.get(cfg.model.dtype, "")
    if half == "fp16" and not zero.get("stage", 0):
        # DeepSpeed 0.19 divides gradients there by a loss scale that it has not multiplied the loss with.
        yield "model.dtype", "float16 needs ZeRO stage 1 or higher: at stage 0 gradients vanish; or use bfloat16"
    for key, value in raw.get("data_types", {}).items():
        if key != "grad_accum_dtype" or value not in ("fp32", half):
            rule = f"only grad_accum_dtype is supported here, with fp32{f' or {half}' if half else ''}; delete it"
            yield "deepspeed", f"{path}: data_types.{key}={brief(value)}: {rule}"
        elif half and value == "fp32" and not zero.get("stage", 0):
            yield "deepspeed", f"{path}: data_types.grad_accum_dtype=fp32 needs ZeRO stage 1 or higher; or delete it"
    for key in raw.get(half, {}).keys() - {"enabled"} - (_LOSS_SCALE if half == "fp16" else set()):
        yield "deepspeed", f"{path}: {half}.{key} is not supported; delete it"
