"""`utils.config.deepspeed`: what a DeepSpeed JSON may hold, and what the engine gets (CFG-17, LRN-2)."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.config.test_load import ROOT, edited, only_problem
from utils.config.deepspeed import deepspeed_problems, engine_json, read_deepspeed
from utils.config.load import ConfigError, build_config, check_launch
from utils.config.plan import make_plan

ZERO1 = {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("deepspeed", "dtype", "mode", "is_refused"),
    [
        ("zero3", "float16", "colocate", True),
        ("zero2", "float16", "colocate", False),
        ("zero3", "bfloat16", "colocate", False),
        ("zero3", "float16", "server", False),
    ],
)
def test_ROL_5_zero_3_in_float16_is_refused_beside_an_engine(deepspeed, dtype, mode, is_refused) -> None:
    """ROL-5: the engine's stream is not the one behind which DeepSpeed looks for overflows."""
    engine = {"RM__vllm": {"mode": mode, "tensor_parallel_size": 1}} if mode == "colocate" else {}
    cfg = build_config(edited(deepspeed=deepspeed, model__dtype=dtype, **engine))
    found = [rule for path, rule in deepspeed_problems(cfg, 1) if path == "model.dtype"]
    rule = "float16 under ZeRO-3 misses overflows beside a colocated engine; use bfloat16, or zero2"
    assert found == [rule] * is_refused


@pytest.mark.parametrize("path", sorted(ROOT.glob("ds_configs/*.json")), ids=lambda path: path.stem)
def test_LRN_2_shipped_deepspeed_files_hold_engine_knobs_only(path: Path) -> None:
    """LRN-2."""
    cfg = build_config(edited(deepspeed=path.stem, model__dtype="bfloat16"))
    raw, found = read_deepspeed(cfg)
    assert found == []
    check_launch(cfg, 1)
    assert raw["zero_optimization"]["stage"] == int(re.search(r"\d", path.stem)[0])
    owned = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"}
    assert not owned & raw.keys() and not {"optimizer", "scheduler", "bf16", "fp16"} & raw.keys()


def test_CFG_17_engine_json_writes_in_what_the_yaml_owns() -> None:
    """CFG-17."""
    changes = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 4,
        "max_grad_norm": 0.5,
        "output_dir": "o",
    }
    result = engine_json(build_config(edited(training=changes)), world_size=2)
    assert result["train_batch_size"] == 24 and result["train_micro_batch_size_per_gpu"] == 3
    assert result["gradient_accumulation_steps"] == 4 and result["gradient_clipping"] == 0.5
    assert result["bf16"] == {"enabled": True} and "fp16" not in result
    assert result["zero_optimization"]["stage"] == 2
    float32 = engine_json(build_config(edited(model__dtype="float32")), world_size=1)
    assert "bf16" not in float32 and "fp16" not in float32


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"gradient_clipping": 2.0}, "says gradient_clipping=2.0, but training.max_grad_norm=1.0"),
        ({"gradient_accumulation_steps": 2}, "training.gradient_accumulation_steps=1"),
        ({"train_micro_batch_size_per_gpu": 2}, "training.per_device_train_batch_size=1"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}},
            "optimizer.params.lr=1.0, but training.learning_rate",
        ),
        ({"optimizer": {"type": "Lamb"}}, 'says optimizer.type="Lamb"'),
        ({"scheduler": {"type": "WarmupLR"}}, "holds a scheduler, but training.lr_scheduler=cosine"),
        ({"fp16": {"enabled": True}}, 'says fp16.enabled=true, but model.dtype="bfloat16"'),
        ({"sequence_parallel_size": 2}, "sequence parallelism is not supported"),
        ([], "must hold a JSON object"),
        (None, "must hold a JSON object"),
        ({"zero_optimization": None}, "zero_optimization=null must be a JSON object"),
        ({"zero_optimization": "auto"}, 'zero_optimization="auto" must be a JSON object'),
        ({"fp16": True}, "fp16=true must be a JSON object"),
        ({"data_types": "fp32"}, 'data_types="fp32" must be a JSON object'),
        ({"zero_optimization": {"stage": 7}}, "says zero_optimization.stage=7, which must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "3"}}, 'says zero_optimization.stage="3", which must'),
        ({"zero_optimization": {"stage": "auto"}}, 'says zero_optimization.stage="auto", which must'),
        ({"zero_optimization": {"stage": True}}, "says zero_optimization.stage=true, which must"),
    ],
)
def test_CFG_17_deepspeed_json_that_disagrees_names_both(tmp_path: Path, content: Any, message: str) -> None:
    """CFG-17."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    assert message in only_problem(edited(deepspeed=str(path)))


@pytest.mark.parametrize(
    ("dtype", "content", "message"),
    [
        ("bfloat16", {"bf16": {"enabled": True, "check_grad_overflow": False}}, "bf16.check_grad_overflow is not supp"),
        ("float16", {"fp16": {"auto_cast": True}} | ZERO1, "fp16.auto_cast is not supported; delete it"),
        (
            "float16",
            {"fp16": {"loss_scale": -1}} | ZERO1,
            "fp16.loss_scale=-1: Value error, fp16.loss_scale must be >=",
        ),
        ("float16", {}, 'model.dtype="float16": float16 needs ZeRO stage 1 or higher'),
        (
            "bfloat16",
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param has no effect at stage 2; set stage: 3 or higher, or delete it",
        ),
        ("bfloat16", {"zero_optimisation": {"stage": 3}}, "supports; did you mean zero_optimization? Else delete it"),
        (
            "bfloat16",
            {"torch_autocast": {"enabled": True}},
            "torch_autocast: not a setting that this trainer supports;",
        ),
        (
            "bfloat16",
            {"zero_optimization": {"stage": 2, "cpu_offload": True}},
            "zero_optimization.cpu_offload is an old name, which plan and resume do not know; write offload_optimizer",
        ),
        (
            "bfloat16",
            {"zero_optimization": {"stage": 2, "compute_grad_norm": False}},
            "compute_grad_norm=false: without it no step is skipped whose gradient is not finite",
        ),
        (
            "bfloat16",
            {"data_types": {"grad_accum_dtype": "fp32"}},
            "data_types.grad_accum_dtype=fp32 needs ZeRO stage 1 or higher; or delete it",
        ),
        (
            "bfloat16",
            {"data_types": {"grad_accum_dtype": "fp16"}, "zero_optimization": {"stage": 2}},
            'data_types.grad_accum_dtype="fp16": only grad_accum_dtype is supported here, with fp32 or bf16; delete it',
        ),
        ("float32", {"data_types": {"param_dtype": "fp32"}}, "only grad_accum_dtype is supported here, with fp32; "),
        (
            "bfloat16",
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer has no effect at stage 0; set stage: 1 or higher, or delete it",
        ),
    ],
)
def test_CFG_17_what_a_deepspeed_json_cannot_change(tmp_path: Path, dtype: str, content: Any, message: str) -> None:
    """CFG-17, CFG-16, LRN-12: at the launch; float32 master weights, steps that are skipped, memory that is planned."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    cfg = build_config(edited(deepspeed=str(path), model__dtype=dtype))
    with pytest.raises(ConfigError) as caught:
        engine_json(cfg, 1)
    assert len(caught.value.problems) == 1 and message in caught.value.problems[0], caught.value.problems


def test_CFG_17_a_deepspeed_json_sets_the_loss_scale_of_float16(tmp_path: Path) -> None:
    """CFG-17: and in bfloat16 its section for float16, as other trainers ship it, is left alone."""
    path, scale = tmp_path / "ds.json", {"loss_scale": 0, "initial_scale_power": 8, "min_loss_scale": 2}
    path.write_text(json.dumps({"fp16": scale | {"enabled": "auto", "auto_cast": False}}))
    assert "fp16" not in engine_json(build_config(edited(deepspeed=str(path))), 1)
    path.write_text(json.dumps({"fp16": scale | {"enabled": "auto"}} | ZERO1))
    found = engine_json(build_config(edited(deepspeed=str(path), model__dtype="float16")), 1)
    assert found["fp16"] == scale | {"enabled": True}


@pytest.mark.parametrize(
    ("stage", "dtype", "kind"), [(1, "bfloat16", "fp32"), (0, "bfloat16", "bf16"), (0, "float32", "fp32")]
)
def test_CFG_17_a_deepspeed_json_sets_the_type_in_which_gradients_are_added(tmp_path, stage, dtype, kind) -> None:
    """CFG-17."""
    path, content = tmp_path / "ds.json", {"data_types": {"grad_accum_dtype": kind}}
    path.write_text(json.dumps(content | {"zero_optimization": {"stage": stage}}))
    found = engine_json(build_config(edited(deepspeed=str(path), model__dtype=dtype)), 1)
    assert found["data_types"] == content["data_types"]


@pytest.mark.parametrize("content", [{}, {"zero_optimization": {}}, {"zero_optimization": {"offload_param": None}}])
def test_CFG_17_a_deepspeed_json_without_a_stage_is_zero_0(tmp_path: Path, content: Any) -> None:
    """CFG-17, CFG-16: for the plan and for the engine."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    cfg = build_config(edited(deepspeed=str(path), model__path="Qwen3-VL-2B-Instruct"))
    assert engine_json(cfg, 1)["zero_optimization"]["stage"] == 0 == make_plan(cfg, 1).zero_stage


def test_CFG_17_a_deepspeed_json_too_deep_to_read(tmp_path: Path) -> None:
    """CFG-17."""
    path = tmp_path / "ds.json"
    path.write_text("[" * 100_000)
    assert "cannot be read as JSON: maximum recursion depth" in only_problem(edited(deepspeed=str(path)))


def test_deepspeed_json_may_repeat_the_yaml_or_say_auto(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    same = {"gradient_clipping": 1.0, "train_batch_size": 2, "bf16": {"enabled": "auto"}}
    path.write_text(json.dumps({**same, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": "auto"}}}))
    cfg = build_config(edited(deepspeed=str(path)))
    assert "optimizer" not in engine_json(cfg, world_size=2)
    for check in (engine_json, check_launch):
        with pytest.raises(ConfigError, match="train_batch_size=2, the YAML makes 3 with 3 ranks"):
            check(cfg, 3)


def test_deepspeed_json_of_hugging_face_leaves_the_rest_to_deepspeed(tmp_path: Path) -> None:
    """CFG-17: its examples say "auto" for buckets, too."""
    path = tmp_path / "ds.json"
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    path.write_text(json.dumps({"zero_optimization": zero, "train_batch_size": "auto", "steps_per_print": 7}))
    cfg = build_config(edited(deepspeed=str(path), model__path="Qwen3-VL-2B-Instruct"))
    engine = engine_json(cfg, 1)
    assert engine["zero_optimization"] == {"stage": 3} and engine["steps_per_print"] == 7
    assert make_plan(cfg, 1).learner_memory["reduce buckets"] == 5e8 * 2


@pytest.mark.parametrize(
    "key, value, rule",
    [
        (
            "reduce_bucket_size",
            "large",
            'zero_optimization.reduce_bucket_size="large": Input should be a valid',
        ),
        ("stage3_max_live_parameters", None, "zero_optimization.stage3_max_live_parameters=null: Input should be"),
        ("offload_optimizer", {"device": "gpu"}, "zero_optimization.offload_optimizer.device="),
        ("overlap_com", True, "zero_optimization.overlap_com=true: Extra inputs are not permitted"),
    ],
)
def test_deepspeed_json_with_a_value_that_deepspeed_refuses(tmp_path: Path, key: str, value: Any, rule: str) -> None:
    """CFG-3, CFG-17: at the dry run and at the launch."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, key: value}}))
    cfg = build_config(edited(deepspeed=str(path)))
    for check in (engine_json, check_launch):
        with pytest.raises(ConfigError, match=re.escape(f"{path}: {rule}")):
            check(cfg, 1)


@pytest.mark.parametrize(
    "zero, rule",
    [
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.3}}, "offload_optimizer.ratio=0.3: what stays on the GPU"),
        ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, "offload_optimizer.super_offload=true: it"),
        ({"load_from_fp32_weights": False}, "load_from_fp32_weights=false: a resumed run would begin with"),
        ({"zero_quantized_weights": True}, "zero_quantized_weights=true: quantized weights and gradients are not"),
        ({"zero_quantized_nontrainable_weights": True}, "zero_quantized_nontrainable_weights=true: quantized"),
        ({"zero_quantized_gradients": True}, "zero_quantized_gradients=true: quantized"),
        ({"zero_hpz_partition_size": 2}, "zero_hpz_partition_size=2: it was never run"),
        ({"elastic_checkpoint": True}, "elastic_checkpoint=true: it was never run"),
        ({"zenflow": {"topk_ratio": 0.1}}, 'zenflow={"topk_ratio": 0.1}: it sets gradient accumulation'),
    ],
)
def test_deepspeed_json_with_what_would_train_otherwise(tmp_path: Path, zero: dict[str, Any], rule: str) -> None:
    """CFG-17, LRN-5: DeepSpeed takes these; its own defaults, which some files write out, are no mistake."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3} | zero}))
    cfg = build_config(edited(deepspeed=str(path)))
    found = [text for _, text in deepspeed_problems(cfg, 1)]
    assert len(found) == 1 and found[0].startswith(f"{path}: zero_optimization.{rule}") and "delete it" in found[0]
    offload = {"device": "cpu", "ratio": 1.0, "super_offload": False}
    defaults = {"zero_quantized_weights": False, "zero_hpz_partition_size": 1, "zenflow": None}
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": offload} | defaults}))
    assert not list(deepspeed_problems(build_config(edited(deepspeed=str(path))), 1))


@pytest.mark.parametrize(("name", "message"), [("zero7", "zero2, zero3"), ("gone.json", "there is no gone.json")])
def test_CFG_17_missing_deepspeed_file_names_the_known_ones(name: str, message: str) -> None:
    """CFG-17."""
    assert message in only_problem(edited(deepspeed=name))
