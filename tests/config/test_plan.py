"""`utils.config.plan`: what `--dry-run` derives, against numbers worked out by hand (CFG-16)."""

import contextlib
import copy
import json
import os
import re
import shlex
import struct
import subprocess
import unittest.mock
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    Qwen3_5TextConfig,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeTextConfig,
    Qwen3VLTextConfig,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextDecoderLayer
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextDecoderLayer

from tests.config.test_load import edited
from utils.config.deepspeed import engine_json
from utils.config.load import ConfigError, build_config, load_config
from utils.config.memory import (
    ModelSize,
    _activations,
    cache_size,
    checkpointed_layers,
    learner_memory,
    model_size,
    parameter_shapes,
    relative_flops,
    rollout_memory,
)
from utils.config.plan import format_plan, make_plan, plan_layout, print_dry_run, step_remarks
from utils.config.released import MODELS, known_model
from utils.config.rollout import ServerSettings
from utils.config.schema import RM, RS, Config, Tuner
from utils.learner.attention import register
from utils.learner.model import apply_tuner, base_model, enable_gradient_checkpointing


def settings(**keys: Any) -> dict[str, Any]:
    return {"vllm_max_model_len": 2048, "device": "cpu", **keys}


def config(**changes: Any) -> Config:
    return build_config(edited(**changes))


def checkpoint(folder: Path) -> Path:
    """A checkpoint of headers only: 40 language, 12 embedding, 30 vision and 8 aligner parameters."""
    shapes = {
        "model.language_model.layers.0.self_attn.q_proj.weight": [8, 4],
        "model.language_model.layers.0.norm.weight": [8],
        "model.language_model.embed_tokens.weight": [3, 4],
        "model.visual.blocks.0.attn.qkv.weight": [6, 5],
        "model.visual.merger.linear_fc1.weight": [2, 4],
        "mtp.layers.0.self_attn.q_proj.weight": [8, 4],  # a draft model, as in Qwen3.5's files
    }
    header = json.dumps({name: {"dtype": "BF16", "shape": s, "data_offsets": [0, 0]} for name, s in shapes.items()})
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
    text = {"hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
    (folder / "config.json").write_text(json.dumps({"text_config": text}))
    return folder


def test_CFG_16_chunks_and_rounds() -> None:
    """CFG-16: DIS-3: 4 sequences on each of 6 devices for 5 learners: floor(24 / 5) = 4 per round; 10 samples need 3
    rounds."""
    plan = make_plan(
        config(
            RS=settings(vllm_tensor_parallel_size=2, vllm_data_parallel_size=3),
            RM__decode_batch_size=4,
            training__per_device_train_batch_size=10,
        ),
        world_size=5,
    )
    assert (plan.servers[0].world_size, plan.chunk, plan.rounds) == (6, 4, 3)


def test_CFG_16_unknown_devices_leave_chunks_open() -> None:
    """CFG-16."""
    plan = make_plan(config(RS=settings(device="cuda")), world_size=2)
    assert plan.servers[0].world_size is None and plan.chunk is None
    assert "not known yet" in format_plan(plan)


def test_DIS_2_too_many_learners_stop_the_dry_run_with_the_numbers() -> None:
    """DIS-2."""
    with pytest.raises(ConfigError, match=r"decode_batch_size=2: on 1 rollout device.*3 learners"):
        make_plan(config(RS=settings(), RM__decode_batch_size=2), world_size=3)


def test_CFG_16_optimizer_steps_from_the_data(tmp_path: Path) -> None:
    """CFG-16: 25 lines + 10 lines at weight 0.5 are 30 samples an epoch; 2 epochs at 2 x 2 x 3 = 12 per step are 5
    steps."""
    (tmp_path / "a.jsonl").write_text("{}\n" * 25 + "\n")
    (tmp_path / "b.jsonl").write_text("{}\n" * 10)
    files = [str(tmp_path / "a.jsonl"), {"path": str(tmp_path / "b.jsonl"), "weight": 0.5}]
    training = {
        "output_dir": "o",
        "num_train_epochs": 2.0,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
    }
    changes = {"custom__train_jsonl": files, "training": training, "RM__decode_batch_size": 2}
    plan = make_plan(config(**changes), world_size=2)
    assert (plan.num_samples, plan.samples_per_step, plan.num_steps) == (30, 12, 5)
    assert plan.max_tokens_per_step == 2 * 3 * 4096


def test_CFG_16_steps_are_open_without_data_and_given_with_max_steps() -> None:
    """CFG-16."""
    assert make_plan(config(custom__train_jsonl="gone.jsonl"), 1).num_steps is None
    assert make_plan(config(custom__train_jsonl="gone.jsonl", training__max_steps=7), 1).num_steps == 7


@pytest.mark.parametrize(
    ("training", "remarks"),
    [
        (
            {"warmup_steps": 50, "save_steps": 200, "eval_steps": 200},
            [
                "training.warmup_steps=50: the run has 31 steps, all of them warm-up; lower it",
                "training.save_steps=200: the run has 31 steps; only its end is saved, and a run killed before that "
                "starts over; lower it",
                "training.eval_steps=200: the run has 31 steps; it is evaluated only at its end; lower it",
            ],
        ),
        (
            {"warmup_steps": 31, "save_steps": 31, "eval_steps": 32, "eval_at_start": True},
            [
                "training.warmup_steps=31: the run has 31 steps, all of them warm-up; lower it",
                "training.eval_steps=32: the run has 31 steps; it is evaluated only at its start and end; lower it",
            ],
        ),
        ({"warmup_steps": 30, "save_steps": 5, "eval_steps": 31}, []),
        ({"eval_at_start": True}, []),
        ({}, ["training.eval_steps=0: custom.val_jsonl is never evaluated; set it, or drop custom.val_jsonl"]),
    ],
)
def test_CFG_16_the_plan_remarks_on_steps_that_a_short_run_never_comes_to(
    tmp_path: Path, training: dict[str, Any], remarks: list[str]
) -> None:
    """CFG-16: 1000 samples, 32 per step. Nothing where the number of steps is not known."""
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n" * 1000)
    training = {"output_dir": "o", "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4} | training
    changes: dict[str, Any] = {"custom__val_jsonl": "val.jsonl", "training": training}
    plan = make_plan(config(custom__train_jsonl=str(data), **changes), 1)
    shown = re.findall(r"^# remark: +(.+)$", format_plan(plan), re.MULTILINE)
    assert plan.num_steps == 31 and shown == remarks
    assert "# remark" not in format_plan(make_plan(config(custom__train_jsonl="gone.jsonl", **changes), 1))


@pytest.mark.parametrize("waits", [{"RM__vllm__server__timeout_s": 240.0}, {"RM__vllm__sync__timeout_s": 300.0}])
def test_CON_4_a_wait_for_a_server_that_other_ranks_do_not_sit_out_is_remarked(waits: dict[str, float]) -> None:
    """CON-4, SYN-3: they would end a run whose server comes back in time."""
    ((key, limit),) = waits.items()
    told = f": {key.replace('RM', RM).replace('__', '.')}={limit:g} is longer, and a rank gives up on another"
    shortest = {"RM__vllm__server__timeout_s": 100.0, "RM__vllm__sync__timeout_s": 100.0}
    for own, is_told in ((limit - 1, True), (limit, False)):
        cfg = config(training__rank_timeout_s=own, **shortest | waits)
        assert any(f"rank_timeout_s={own:g}{told}" in remark for remark in step_remarks(cfg, 1000)) is is_told
    colocated = config(training__rank_timeout_s=1.0, RM__vllm__mode="colocate", RM__vllm__sync__timeout_s=300.0)
    assert not any("rank_timeout_s" in remark for remark in step_remarks(colocated, 1000))


@pytest.mark.parametrize(
    ("tuner", "trainable", "can_change"),
    [
        ({}, 40 + 12, 40 + 12),  # full: language model with embeddings
        ({"freeze_vit": False}, 52 + 30, 52 + 30),
        ({"freeze_aligner": False}, 52 + 8, 52 + 8),
        ({"type": "lora", "rank": 2}, 2 * (8 + 4), 8 * 4),  # q_proj only: A is [2, 4], B is [8, 2]
        ({"type": "lora", "rank": 2, "use_dora": True}, 2 * (8 + 4) + 8, 8 * 4),
        ({"type": "lora", "rank": 2, "modules_to_save": ["embed_tokens"]}, 2 * (8 + 4) + 12, 8 * 4 + 12),
        ({"type": "lora", "rank": 2, "modules_to_save": ["lm_head"]}, 2 * (8 + 4) + 12, 8 * 4 + 12),  # tied to them
        ({"type": "lora", "rank": 2, "modules_to_save": ["merger"]}, 2 * (8 + 4) + 8, 8 * 4 + 8),  # it holds the layer
        ({"type": "lora", "rank": 1, "freeze_vit": False, "target_modules": ["qkv"]}, 6 + 5, 6 * 5),
        ({"type": "lora", "rank": 1, "target_modules": r".*\.q_proj"}, 8 + 4, 8 * 4),
    ],
)
def test_CFG_16_parameters_that_learn(tmp_path: Path, tuner: dict[str, Any], trainable: int, can_change: int) -> None:
    """CFG-16: as numbers of parameters and as merged tensors that a sync sends after the first."""
    size = model_size(checkpoint(tmp_path), Tuner(**tuner))
    assert (size.total, size.trainable, size.can_change) == (40 + 12 + 30 + 8, trainable, can_change)
    assert size.source == ""
    # q_proj is [8, 4]: an identity of 4 x 4, and B A, the same scaled, and the sum with the weight
    assert size.dora_values == (4 * 4 + 3 * 8 * 4 if tuner.get("use_dora") else 0)


@pytest.mark.parametrize(
    ("deepspeed", "dtype", "expected"),
    [
        # bf16: 2 bytes each for weights and gradients, 12 for the optimizer; 1000 parameters of which 400 learn
        ("zero0", "bfloat16", {"weights": 2000, "gradients": 800, "optimizer": 4800}),
        ("zero1", "bfloat16", {"weights": 2000, "gradients": 800, "optimizer": 1200}),
        ("zero2", "bfloat16", {"weights": 2000, "gradients": 200, "optimizer": 1200}),
        ("zero3", "bfloat16", {"weights": 500, "gradients": 200, "optimizer": 1200}),
        ("zero3_offload", "bfloat16", {}),
        ("zero0", "float32", {"weights": 4000, "gradients": 1600, "optimizer": 3200}),
    ],
)
def test_CFG_16_learner_memory_by_zero_stage(deepspeed: str, dtype: str, expected: dict[str, int]) -> None:
    """CFG-16."""
    cfg = config(deepspeed=deepspeed, model={"path": "gone", "dtype": dtype})
    memory = learner_memory(cfg, engine_json(cfg, 4), ModelSize(1000, 400), world_size=4)
    assert memory.pop("sync buckets (rank 0)") == 2 * 256 * 1024**2
    num_buckets = {"zero0": 0, "zero1": 1, "zero2": 2}.get(deepspeed, 1)  # ds_configs: 2e8 numbers each
    assert memory.pop("reduce buckets", 0) == num_buckets * 200_000_000 * 2
    assert memory.pop("gathered", 0) == (2000 if deepspeed.startswith("zero3") else 0)  # fewer than max_live_parameters
    assert memory == expected


def test_CFG_16_adapters_lie_beside_the_weights() -> None:
    """CFG-16: ZeRO-2 over 4: 1000 weights and 40 of adapters in bf16; 40 gradients and their optimizer, a quarter."""
    cfg = config(deepspeed="zero2", model={"path": "gone"}, tuner={"type": "lora", "use_dora": True})
    memory = learner_memory(cfg, engine_json(cfg, 4), ModelSize(1000, 40, 7), world_size=4)
    assert (memory["weights"], memory["gradients"], memory["optimizer"]) == (2080, 20, 120)
    assert memory["DoRA norms"] == 14


def test_CFG_16_zero_3_holds_the_experts_of_layers_that_are_not_recomputed() -> None:
    """CFG-16: 128 experts of three matrices of 768 x 2048 in bf16, in each of 48 layers (tests/learner/test_learner.py
    shows why). `auto` counts them."""
    base = load_config("configs/stage2/qwen3vl_30b_a3b_native_4v4.yaml").model_dump()
    cfg = build_config(base)
    engine, size = engine_json(cfg, 4), model_size(Path(cfg.model.path), cfg.tuner)
    layer, name = 128 * 3 * 768 * 2048 * 2, "experts until backward"
    for num_checkpointed, expected in ((0, 48), (30, 18), (48, 0), (50, 0), (None, 0)):
        assert learner_memory(cfg, engine, size, 4, num_checkpointed).get(name, 0) == expected * layer
    plan = make_plan(cfg, 4)
    assert 0 < plan.learner_memory[name] == (48 - plan.num_checkpointed) * layer
    assert sum(plan.learner_memory.values()) <= 0.8 * 80 * 2**30
    base["deepspeed"] = "zero2"
    cfg = build_config(base)
    assert name not in learner_memory(cfg, engine_json(cfg, 4), size, 4, 0)


def test_TGT_16_CFG_16_a_plan_names_the_start_policy() -> None:
    """TGT-16, CFG-16."""
    assert "start policy" not in format_plan(make_plan(config(), 1))
    changes = {"RM__losses": {"reference_kl": 1.0}}
    own = config(tuner={"type": "lora"}, **changes)
    assert "start policy:                     the adapters disabled; one more" in format_plan(make_plan(own, 1))
    named = config(model={"path": "gone", "reference_path": "start"}, **changes)
    assert "start policy:                     start; one more" in format_plan(make_plan(named, 1))


def test_TGT_16_CFG_16_a_start_policy_takes_memory(tmp_path: Path) -> None:
    """TGT-16, CFG-16: bf16, one row of 4096 tokens of 4 numbers; for each logit 20 bytes where labels take 12; the
    frozen checkpoint is partitioned under ZeRO-3."""
    (checkpoint(tmp_path) / "config.json").write_text('{"text_config": {"hidden_size": 4, "vocab_size": 3}}')
    model = {"path": str(tmp_path)}
    changes = {"model": model | {"reference_path": "start"}, "RM__losses": {"reference_kl": 1.0}}
    for deepspeed, share in (("zero2", 1), ("zero3", 4), ("zero3_offload", 0)):
        found = []
        for own in ({"model": model}, changes):
            cfg = config(deepspeed=deepspeed, **own)
            found.append(learner_memory(cfg, engine_json(cfg, 4), ModelSize(1000, 400), world_size=4))
        plain, with_start = found
        assert with_start.get("start policy", 0) == (2000 // share if share else 0)
        assert with_start["start policy's states"] == 4096 * 4 * 2
        assert with_start["logits"] * 12 == plain["logits"] * 20 > 0
        extra = sum(with_start.values()) - sum(plain.values())
        assert extra == (2000 // share if share else 0) + 4096 * 4 * 2 + plain["logits"] * 8 // 12


def test_TGT_16_CFG_16_a_teacher_takes_memory(tmp_path: Path) -> None:
    """TGT-16, CFG-16: bf16; for each logit 20 bytes where labels take 12, beside a start policy as well."""
    (checkpoint(tmp_path) / "config.json").write_text('{"text_config": {"hidden_size": 4, "vocab_size": 3}}')
    teacher = {"RM__teacher": {"base_url": "http://127.0.0.1:8100"}}
    both = teacher | {"RM__losses": {"reference_kl": 1.0}, "tuner": {"type": "lora"}}
    found = []
    for changes in ({}, teacher, both):
        cfg = config(model={"path": str(tmp_path)}, **changes)
        found.append(learner_memory(cfg, engine_json(cfg, 4), ModelSize(1000, 400), world_size=4)["logits"])
    assert found[0] * 20 == found[1] * 12 == found[2] * 12 > 0


def test_CFG_16_memory_from_a_readable_checkpoint(tmp_path: Path) -> None:
    """CFG-16: bf16. Activations checkpointed: 4096 tokens x 2 bytes x (the first layer's 4 units + all of one layer:
    8 x 4 units, 6 x 4 of queries, 5 x 2 of keys). Cache per token: keys and values x 2 layers x 1 head x 2 x 2 bytes =
    16 bytes, for 3 answers of 2048 tokens."""
    folder = str(checkpoint(tmp_path))
    plan = make_plan(config(model={"path": folder}, RS=settings(), RM__decode_batch_size=3), world_size=1)
    assert plan.learner_memory["activations"] == 4096 * 2 * (4 + 8 * 4 + 6 * 4 + 5 * 2)
    assert plan.engines[0].memory == {"weights": 90 * 2, "keys and values": 16 * 2048 * 3}
    assert "parameters:" in format_plan(plan) and "GiB" in format_plan(plan)


def test_CFG_16_servers_that_differ_have_lines_of_their_own(tmp_path: Path) -> None:
    """CFG-16: one device against two, which hold half of the weights each; and two servers that are alike."""
    model, addresses = {"path": str(checkpoint(tmp_path))}, [f"http://10.0.0.{i}:8000" for i in (1, 2)]
    connection = {"servers": [{"base_url": url, "group_port": 51216 + i} for i, url in enumerate(addresses)]}
    for sizes, shown in (([1, 2], ["server 0", "server 1"]), ([2, 2], ["rollout"])):
        own = settings(servers=[{"vllm_tensor_parallel_size": size} for size in sizes], device="cuda")
        plan = make_plan(config(model=model, RS=own, RM__vllm__server=connection), world_size=1)
        text = format_plan(plan)
        assert [plan.engines[i].memory["weights"] for i in (0, 1)] == [180 // size for size in sizes]
        assert re.findall(r"^# (.+) memory per device: ", text, re.MULTILINE) == ["learner", *shown]
        assert re.findall(r"^# (.+) cache per device: ", text, re.MULTILINE) == shown


def test_CFG_16_what_is_not_known_yet_is_named(tmp_path: Path) -> None:
    """CFG-16: without `rollout_server` nobody knows what the servers' devices hold."""
    for model, missing in ((tmp_path / "gone", "model.path"), (checkpoint(tmp_path), RS)):
        text = format_plan(make_plan(config(model={"path": str(model)}), world_size=1))
        assert re.search(rf"^# rollout memory per device: +not known yet \({re.escape(missing)}\)$", text, re.MULTILINE)


def test_CFG_16_answers_of_generate_that_may_not_fit_are_remarked_on(tmp_path: Path) -> None:
    """CFG-16: an answer of 4096 tokens has 576 MiB of keys and values: 150 need 84.38 GiB, and 100 have room."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-VL-8B"]))
    changes = {"model": {"path": str(tmp_path)}, "tuner": {"type": "lora"}, "RM__rollout_backend": "hf"}
    fits, remarked = (make_plan(config(**changes, RM__decode_batch_size=batch), 1).remarks for batch in (100, 150))
    start = "custom.extra.rollout_matching.decode_batch_size=150: answers up to global_max_length need 84.38 GiB for "
    assert not fits and len(remarked) == 1 and remarked[0].startswith(start)
    assert re.search(r"a learner keeps \d\d\.\d\d of 80; lower one of both$", remarked[0])


def test_CFG_16_padded_rows_without_a_length_are_as_long_as_the_engine_lets_them_be() -> None:
    """CFG-16: GRPO, a prompt of 8 answers on each of two learners."""
    raw = load_config("configs/grpo/summary_1024.yaml").model_dump(by_alias=True)
    raw["training"] |= {"packing": False, "packing_drop_last": False, "per_device_train_batch_size": 1}
    given = make_plan(build_config(raw | {"global_max_length": 12000}), 2)
    raw["global_max_length"] = None
    plan = make_plan(build_config(raw), 2)
    assert plan.max_tokens_per_step == given.max_tokens_per_step == 2 * 4 * 8 * 12000
    assert plan.learner_memory["activations"] == given.learner_memory["activations"]


def test_CFG_16_the_format_is_yaml_comments(tmp_path: Path) -> None:
    """CFG-16."""
    assert all(line.startswith("#") for line in format_plan(make_plan(config(), 1)).splitlines())


def test_CFG_16_dry_run_prints_what_loads_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CFG-16."""
    cfg = config(RS=settings())
    print_dry_run(cfg, world_size=1)
    (tmp_path / "again.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "again.yaml").model_dump() == cfg.model_dump()
    with pytest.raises(SystemExit, match="2"):
        print_dry_run(cfg, world_size=2)


def test_checkpoint_of_the_test_is_what_it_says(tmp_path: Path) -> None:
    from utils.config.memory import _tensor_shapes

    assert sum(prod(shape) for _, shape in _tensor_shapes(checkpoint(tmp_path))) == 90


# ---- where things run ----------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


def stage2(name: str) -> Config:
    return load_config(f"configs/stage2/qwen3vl_8b_{name}.yaml")


@pytest.mark.parametrize(("name", "num_servers", "world_size"), [("3v1", 3, 1), ("6v2", 6, 2)])
def test_CFG_16_the_shipped_8b_plans_can_be_checked_by_eye(name: str, num_servers: int, world_size: int) -> None:
    """CFG-16: device by device, in the order of the commands; 8B from its name, as no such model is here."""
    text = format_plan(make_plan(stage2(name), world_size))
    facts = re.findall(r"^# (.+?): +(.+)$", text, re.MULTILINE)
    known = dict(facts)
    assert known["server 0"].endswith(f"group port 51216, TP 1 x DP {num_servers} = {num_servers} device(s) (cuda)")
    gpus = [(key, value) for key, value in facts if key.startswith("GPU")]
    assert [key for key, _ in gpus] == [f"GPU {i}" for i in range(num_servers + world_size)]
    for i, (_, value) in enumerate(gpus):
        if i < num_servers:
            assert value == f"rollout_server.py, server 0 (port 8000), replica {i}: generates"
        else:
            assert value.startswith(f"train_stage2.py, rank {i - num_servers}: trains")
    assert known["requests per round and learner"] == "48"  # 16 x 3 / 1 and 16 x 6 / 2
    assert known["tokens per optimizer step"] == "at most 48000"  # 12000 x 4 micro-steps, or x 2 by two learners
    assert known["samples per optimizer step"] == "32"
    assert known["parameters"].startswith("8,767,123,696, of which") and "Qwen3-VL-8B as released" in text
    assert known["rollout cache per device"].endswith("an engine holds 376,249 tokens (45 of 8192)")


def test_CFG_16_memory_of_8b_with_dora_by_hand() -> None:
    """CFG-16: ZeRO-2, one and two learners. Adapters of rank 64 on q, k, v, o, gate, up, down of 36 layers."""
    hidden, kv, mlp, layers, rank = 4096, 1024, 12288, 36, 64
    shapes = [
        (hidden, hidden),
        (kv, hidden),
        (kv, hidden),
        (hidden, hidden),
        (mlp, hidden),
        (mlp, hidden),
        (hidden, mlp),
    ]
    learn = layers * sum(rank * (num_out + num_in) + num_out for num_out, num_in in shapes)
    for name, world_size in (("3v1", 1), ("6v2", 2)):
        plan = make_plan(stage2(name), world_size)
        num, whole = plan.num_checkpointed, 6 * hidden + 5 * hidden + 4 * kv + 4 * mlp
        assert plan.model_size.trainable == learn
        assert plan.learner_memory == {
            "weights": 2 * (8_767_123_696 + learn),
            "gradients": 2 * learn // world_size,
            "optimizer": 12 * learn // world_size,
            "reduce buckets": 2 * 200_000_000 * 2,
            # inputs of the checkpointed layers, all that the others keep, and twice the linear outputs of those
            "activations": 12000
            * 2
            * (num * hidden + (36 - num) * (whole + 2 * sum(num_out for num_out, _ in shapes))),
            "logits": 256 * 151936 * 2 * (2 + 4),
            "DoRA norms": 2 * (mlp * mlp + 3 * mlp * hidden),
            "sync buckets (rank 0)": 2 * 2 * 151936 * hidden,  # the head is larger than a bucket
        }
        # keys and values: 36 layers x 8 heads x 128 x 2 bytes, twice; 0.85 of 80 GiB, weights aside
        assert plan.engines[0].memory["keys and values"] == 2 * 36 * 8 * 128 * 2 * 8192 * 16
        assert plan.engines[0].cache.num_bytes == int(0.85 * 80 * 2**30) - 2 * 8_767_123_696
        assert plan.engines[0].cache.num_tokens == plan.engines[0].cache.num_bytes // (2 * 36 * 8 * 128 * 2)


# ---- gradient checkpointing ------------------------------------------------------------------------------------------


LAYER = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYER |= {"head_dim": 32, "intermediate_size": 224, "vocab_size": 128}
OF_FAMILY = {
    "qwen3_vl": (Qwen3VLTextDecoderLayer, Qwen3VLTextConfig, {}),
    "qwen3_vl_moe": (
        Qwen3VLMoeTextDecoderLayer,
        Qwen3VLMoeTextConfig,
        {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3_5": (
        Qwen3_5DecoderLayer,
        Qwen3_5TextConfig,
        {"linear_num_key_heads": 2, "layer_types": ["full_attention"]},
    ),
}


@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("tuner", [{}, {"type": "lora"}, {"type": "lora", "use_dora": True}])
@pytest.mark.parametrize("family", OF_FAMILY)
def test_CFG_16_a_layers_activations_are_those_that_its_backward_keeps(
    family: str, tuner: dict[str, Any], dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CFG-16: bytes of all tensors that transformers' layer saves in bfloat16, weights and shared positions aside.
    Dropout keeps a mask of bytes, as on GPUs; that of adapters is not underestimated."""
    make_layer, make_config, own_keys = OF_FAMILY[family]
    text = LAYER | own_keys
    torch.manual_seed(0)
    layer = make_layer(make_config(**text, attn_implementation=register()), 0).bfloat16()
    for parameter in layer.parameters():  # those of experts come without values
        nn.init.normal_(parameter, std=0.02)
    if tuner:
        options = {"r": 2, "target_modules": "all-linear", "use_dora": tuner.get("use_dora", False)}
        options["lora_dropout"] = dropout
        get_peft_model(nn.ModuleList([layer]), LoraConfig(**options), autocast_adapter_dtype=False)
    layer.train()
    # what GPUs run; on CPU torch multiplies by a mask in bfloat16
    monkeypatch.setattr(nn.functional, "dropout", lambda x, p, training, _: torch.native_dropout(x, p, training)[0])
    num_tokens = 512
    hidden = torch.randn(1, num_tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    positions = torch.randn(2, 1, num_tokens, 8 if family == "qwen3_5" else 32, dtype=torch.bfloat16)
    own = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), positions)}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(
            hidden,
            position_embeddings=tuple(positions),
            position_ids=torch.arange(256).repeat(2)[None],
            segment_lengths=[256, 256],
        )
    out.sum().backward()
    counted = sum(storage.nbytes() for storage in saved.values()) / num_tokens / 2
    cfg = config(tuner={"type": "full"} | tuner | {"dropout": dropout})
    with unittest.mock.patch("utils.config.memory._text_config", return_value=text):
        estimated = _activations(cfg, num_checkpointed=0)
    print(f"{family} {tuner}: {counted:.0f} values per token, estimated {estimated}")
    assert counted == pytest.approx(estimated, rel=0.1 if family == "qwen3_vl" else 0.15)
    assert counted <= estimated or not (tuner and dropout)


def test_CFG_16_a_recurrent_layer_has_a_state_and_no_cache(tmp_path: Path) -> None:
    """CFG-16: 40 layers, of which every fourth has attention with 2 heads of 256; the others keep 32 x 128 x 128 values
    and four inputs of a convolution 8192 wide, in float32, for each of 3 responses."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3.5-35B-A3B"]))
    cfg = config(model={"path": str(tmp_path)}, RS=settings(), RM__decode_batch_size=3)
    cache = make_plan(cfg, world_size=1).engines[0].memory["keys and values"]
    assert cache == 3 * (2 * 10 * 2 * 256 * 2 * 2048 + 4 * 30 * (32 * 128 * 128 + 4 * 8192))


@pytest.mark.parametrize("name", ["Qwen3-VL-30B-A3B", "Qwen3.5-35B-A3B"])
def test_CFG_16_a_token_uses_the_experts_it_goes_to(tmp_path: Path, name: str) -> None:
    """CFG-16: about three billion parameters of the names that end in A3B, embeddings and head left out."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    forward, backward, recomputed = model_size(tmp_path, Tuner(type="full")).flops
    assert 2.4e9 < forward < 3e9 and backward == pytest.approx(2 * forward) and recomputed < forward
    assert model_size(tmp_path, Tuner(type="lora")).flops[1] < 1.2 * forward


@pytest.mark.parametrize("name", ["stage2/qwen3vl_8b_3v1", "stage2/qwen3vl_8b_6v2", "grpo/summary_1024"])
def test_CFG_16_auto_recomputes_as_few_layers_as_leave_a_fifth_of_the_gpu(name: str) -> None:
    """CFG-16, CFG-17: the estimate falls with every layer until one is left, and the choice is the first that fits."""
    cfg, world_size = load_config(f"configs/{name}.yaml"), 2 if name != "stage2/qwen3vl_8b_3v1" else 1
    engine, size = engine_json(cfg, world_size), model_size(Path(cfg.model.path), cfg.tuner)
    needs = [sum(learner_memory(cfg, engine, size, world_size, num).values()) for num in range(37)]
    assert needs == sorted(needs, reverse=True) and len(set(needs)) == 36 and needs[35] == needs[36]
    num = checkpointed_layers(cfg, engine, size, world_size, 80 << 30)
    assert needs[num] <= 0.8 * 80 * 2**30 < needs[num - 1]
    assert 0 < num < 30
    plan = make_plan(cfg, world_size)
    assert plan.num_checkpointed == num and sum(plan.learner_memory.values()) == needs[num]
    useful = (1 + 1.025) / (1 + 1.025 + num / 36)  # adapters are 2.5 % of the layers
    assert f"checkpointed layers: {num} of 36; FLOP utilisation {useful:.2f} of" in re.sub(" +", " ", format_plan(plan))


TINY_TEXT = {"hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY_TEXT |= {"head_dim": 32, "intermediate_size": 384, "vocab_size": 256}
TINY_TEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}}
TINY_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "num_position_embeddings": 16}
TINY_VISION |= {"out_hidden_size": 128, "deepstack_visual_indexes": [0]}


@pytest.mark.parametrize(
    ("tuner", "num_checkpointed", "zero_stage"),
    [
        ({}, 1, 2),
        ({}, None, 2),
        ({}, None, 3),
        ({"rank": 8}, 1, 2),
        ({"rank": 8}, None, 2),
        ({"rank": 8, "use_dora": True}, None, 3),
        ({"rank": 8, "target_modules": ["q_proj", "v_proj"]}, None, 2),
    ],
)
def test_CFG_16_flop_utilisation_is_that_of_counted_flops(
    tmp_path: Path, tuner: dict[str, Any], num_checkpointed: int | None, zero_stage: int, monkeypatch: Any
) -> None:
    """CFG-16: by torch's counter, on a model of 8 layers in short segments; one or all of them are recomputed. For
    ZeRO-3 DeepSpeed replaces the product of linear layers in the whole process."""
    product = zero3_linear_wrap if zero_stage == 3 else torch._C._nn.linear
    monkeypatch.setattr(nn.functional, "linear", product)
    settings, architecture = Tuner(type="lora" if tuner else "full", **tuner), {"model_type": "qwen3_vl"}
    architecture |= {"text_config": TINY_TEXT, "vision_config": TINY_VISION}
    (tmp_path / "config.json").write_text(json.dumps(architecture))

    def count(num: int | None) -> tuple[int, int]:
        """FLOPs of forward and backward."""
        loaded = Qwen3VLConfig.from_dict(copy.deepcopy(architecture))
        loaded._attn_implementation = register()
        model = apply_tuner(Qwen3VLForConditionalGeneration(loaded), settings).train()
        if num != 0:
            enable_gradient_checkpointing(model, num)
        ids, positions = torch.zeros(1, 2048, dtype=torch.int64), torch.arange(32).repeat(64).expand(4, 1, -1)
        with FlopCounterMode(display=False) as counter:
            rows = base_model(model).model(ids, position_ids=positions, segment_lengths=[32] * 64, use_cache=False)
            forward = counter.get_total_flops()
            rows.last_hidden_state.sum().backward()
        return forward, counter.get_total_flops() - forward

    (forward, kept), (_, backward) = count(0), count(num_checkpointed)
    expected_backward, recomputed = relative_flops(model_size(tmp_path, settings), num_checkpointed, zero_stage)
    assert kept / forward == pytest.approx(
        expected_backward, abs=0.04
    )  # none goes into the first layer without checkpoints
    estimated = (1 + expected_backward) / (1 + expected_backward + recomputed)
    assert (forward + kept) / (forward + backward) == pytest.approx(estimated, abs=0.015)


@pytest.mark.parametrize(
    ("changes", "device_gib", "expected"),
    [
        ({"gradient_checkpointing": True}, 80, None),
        ({"gradient_checkpointing": False}, 80, 0),
        ({"gradient_checkpointing": 7}, 0, 7),
        ({}, 0, None),  # CPU
        ({}, 24, None),  # not even all of them fit
        ({}, 1000, 0),
        ({"packing": False, "packing_drop_last": False}, 80, None),  # eight padded segments of 12,000 tokens
    ],
)
def test_CFG_17_layers_that_backward_recomputes(changes: dict[str, Any], device_gib: int, expected: int | None) -> None:
    """CFG-17."""
    base = yaml_of("3v1")
    base["training"] |= changes
    cfg = build_config(base)
    size = model_size(Path(cfg.model.path), cfg.tuner)
    assert checkpointed_layers(cfg, engine_json(cfg, 1), size, 1, device_gib << 30) == expected


def test_CFG_17_auto_recomputes_all_layers_where_the_estimate_does_not_hold() -> None:
    """CFG-17: an unknown model; eager attention, whose scores are not counted. A colocated engine
    sleeps meanwhile."""
    cfg, device = stage2("3v1"), 250 << 30
    engine, size = engine_json(cfg, 1), model_size(Path(cfg.model.path), cfg.tuner)
    assert checkpointed_layers(cfg, engine, size, 1, device) == 0
    assert checkpointed_layers(cfg, engine, None, 1, device) is None
    base = yaml_of("3v1")
    base["model"]["attn_implementation"] = "eager"
    assert checkpointed_layers(build_config(base), engine, size, 1, device) is None
    colocate = {"mode": "colocate", "tensor_parallel_size": 1}
    shared = config(model={"path": cfg.model.path}, global_max_length=12000, RM__vllm=colocate)
    alone = config(model={"path": cfg.model.path}, global_max_length=12000)
    size = model_size(Path(cfg.model.path), shared.tuner)
    numbers = [checkpointed_layers(one, engine_json(one, 4), size, 4, 80 << 30) for one in (alone, shared)]
    assert 0 < numbers[0] == numbers[1]


@pytest.mark.parametrize(
    ("value", "message"), [(-1, "greater than or equal to 0"), ("most", "'auto'"), (2.5, "integer")]
)
def test_CFG_17_checkpointing_is_auto_yes_no_or_a_number(value: Any, message: str) -> None:
    """CFG-17, CFG-3."""
    with pytest.raises(ConfigError, match=f"training.gradient_checkpointing.*{message}"):
        config(training={"output_dir": "o", "gradient_checkpointing": value})


def test_CFG_16_the_plan_refuses_a_tuner_that_trains_nothing(tmp_path: Path) -> None:
    """CFG-16, CFG-3: but not where the names are those of an adapter's own file."""
    tuner: dict[str, Any] = {"type": "lora", "target_modules": ["q_proj", "v_porj"], "modules_to_save": ["embed"]}
    with pytest.raises(ConfigError, match="tuner.target_modules=.*'v_porj'; correct it.*\n.*modules_to_save=.*'embed'"):
        make_plan(config(model={"path": str(checkpoint(tmp_path))}, tuner=tuner), 1)
    tuner = {"type": "lora", "target_modules": ["norm"]}
    with pytest.raises(
        ConfigError, match=r'tuner.target_modules=\["norm"\]: .*nothing would be trained; correct the module names'
    ):
        make_plan(config(model={"path": str(checkpoint(tmp_path))}, tuner=tuner), 1)
    assert make_plan(config(model={"path": str(tmp_path)}, tuner=tuner | {"adapter_path": "a"}), 1)


@pytest.mark.parametrize("content", ["[]", "3", "null", '{"text_config": null}', "[" * 100_000])
def test_CFG_16_a_config_json_of_no_model_leaves_sizes_unknown(tmp_path: Path, content: str) -> None:
    """CFG-16."""
    (tmp_path / "config.json").write_text(content)
    assert make_plan(config(model={"path": str(tmp_path)}), 1).model_size is None


@pytest.mark.parametrize("number", ["0", "-1", "x"])
def test_CFG_16_a_plan_is_for_at_least_one_learner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    """CFG-16: in all programs."""
    import rollout_server
    import train_stage2

    for program in (train_stage2, rollout_server):
        monkeypatch.setattr("sys.argv", ["program", "--config", "gone.yaml", "--dry-run", "--world-size", number])
        with pytest.raises(SystemExit, match="2"):
            program.main()
        assert "argument --world-size: " in capsys.readouterr().err


def test_CFG_16_what_a_plan_is_for_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CFG-16: a plan's command without `--dry-run` would train, or serve."""
    import rollout_server
    import train_grpo
    import train_stage2

    for program in (train_stage2, train_grpo, rollout_server):
        for option in ("--world-size", "--device-gib"):
            monkeypatch.setattr("sys.argv", ["program", "--config", "configs/demo/stage2.yaml", option, "2"])
            with pytest.raises(SystemExit, match="2"):
                program.main()
            assert f"{option} says what a --dry-run plans for; add --dry-run, or leave" in capsys.readouterr().err


def test_CFG_16_tensor_parallel_engines_share_weights_and_cache() -> None:
    """CFG-16: two devices hold half the weights each, and the cache of the engine is twice what one has left."""
    base = yaml_of("3v1")
    base["custom"]["extra"]["rollout_server"] |= {"vllm_tensor_parallel_size": 2, "vllm_data_parallel_size": 2}
    plan = make_plan(build_config(base), 1)
    left = int(0.85 * 80 * 2**30) - 8_767_123_696
    assert (plan.engines[0].cache.num_bytes, plan.engines[0].cache.num_tokens) == (
        left,
        2 * left // (2 * 36 * 8 * 128 * 2),
    )
    assert plan.engines[0].memory["weights"] == 8_767_123_696
    text = format_plan(plan)
    assert "TP 2 x DP 2 = 4 device(s)" in text and "replica 1, tensor-parallel rank 0" in text
    base["custom"]["extra"]["rollout_server"]["vllm_gpu_memory_utilization"] = 0.1
    with pytest.raises(ConfigError, match="vllm_tensor_parallel_size=2: .*cannot even hold the weights; raise it"):
        make_plan(build_config(base), 1)


@pytest.mark.parametrize(
    ("deepspeed", "num_learners", "way_out"),
    [
        ("zero2", 8, "use zero3"),
        ("zero2", 1, "use zero3_offload or more learners"),
        ("zero3", 1, "use zero3_offload or more learners"),
        ("zero3", 8, None),
    ],
)
def test_CFG_16_the_plan_refuses_a_model_that_no_gpu_holds(
    deepspeed: str, num_learners: int, way_out: str | None
) -> None:
    """CFG-16: 33 billion frozen weights in bfloat16 are 62 GiB on every learner below ZeRO-3, or on one alone; eight
    learners of ZeRO-3 hold an eighth each."""
    base = yaml_of("3v1")
    base["model"]["path"] = "Qwen/Qwen3-VL-32B-Instruct"
    base["deepspeed"] = deepspeed
    base["custom"]["extra"]["rollout_server"] |= {"vllm_tensor_parallel_size": 2, "vllm_data_parallel_size": 4}
    if way_out is None:
        assert make_plan(build_config(base), num_learners).learner_memory["weights"] < 9 << 30
        return
    with pytest.raises(ConfigError, match=f"deepspeed=.{deepspeed}.: a learner needs .* GiB .*{way_out}, shorter rows"):
        make_plan(build_config(base), num_learners)
    base["custom"]["extra"]["rollout_server"]["device"] = "cpu"
    assert make_plan(build_config(base), num_learners)  # nobody knows what memory it has


def test_CFG_16_a_plan_is_for_gpus_of_the_size_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """CFG-16: a 32B with LoRA needs 85 GiB on one learner, too much for 80; on 24 the default share of an engine leaves
    too little for a sync. A server's plan need not hold a learner: its config may be a teacher's."""
    base = yaml_of("3v1")
    base["model"]["path"] = "Qwen/Qwen3-VL-32B-Instruct"
    base["tuner"]["use_dora"] = False
    base["custom"]["extra"]["rollout_server"] |= {"vllm_tensor_parallel_size": 2, "vllm_data_parallel_size": 4}
    with pytest.raises(ConfigError, match="and a GPU has 80 GiB"):
        make_plan(build_config(base), 1)
    plan = make_plan(build_config(base), 1, 141)
    assert sum(plan.learner_memory.values()) < 0.8 * 141 * 2**30 and "on one of 141 GiB" in format_plan(plan)
    print_dry_run(build_config(base), 1, has_learners=False)
    assert "# plan" in capsys.readouterr().out
    base["model"]["path"] = "Qwen/Qwen3-VL-2B-Instruct"
    with pytest.raises(ConfigError, match="leaves 3.60 of 24 GiB, .* lower it to 0.8"):
        make_plan(build_config(base), 1, 24)
    base["model"]["path"] = "Qwen/Qwen3-VL-8B-Instruct"  # in the share that a sync leaves its weights do not fit
    server = base["custom"]["extra"]["rollout_server"]
    way_out = "raise custom.extra.rollout_server.vllm_tensor_parallel_size, or take GPUs with more memory"
    for num_devices, gib in ((1, 22), (2, 4)):
        server["vllm_tensor_parallel_size"] = num_devices
        with pytest.raises(ConfigError, match=way_out):
            make_plan(build_config(base), 1, gib)


def test_CFG_16_programs_take_the_size_of_a_gpu(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """CFG-16: and a server leaves its learners out."""
    import rollout_server
    import train_stage2
    from utils.run import program

    given = []
    for module in (program, rollout_server):
        monkeypatch.setattr(module, "print_dry_run", lambda cfg, *args, **more: given.append((*args, more)))
    arguments = [
        "--config",
        "configs/stage2/qwen3vl_8b_3v1.yaml",
        "--dry-run",
        "--world-size",
        "3",
        "--device-gib",
        "48",
    ]
    for main in (train_stage2.main, rollout_server.main):
        monkeypatch.setattr("sys.argv", ["program", *arguments])
        with contextlib.suppress(SystemExit):
            main()
    assert given == [(3, 48, {}), (3, 48, {"has_learners": False})]


def test_CFG_16_a_colocated_engine_has_what_the_learner_leaves_it() -> None:
    """CFG-16, ROL-7: weights, gradients and optimizer stay while the engine is awake. Of 8B in full each of two
    learners keeps 62 GiB of 80; an engine wants its share of what is left, and room for one answer in it."""
    base = yaml_of("3v1")
    base["custom"]["extra"].pop("rollout_server")
    vllm = {"mode": "colocate", "tensor_parallel_size": 1, "gpu_memory_utilization": 0.45}
    base["custom"]["extra"]["rollout_matching"]["vllm"] = vllm
    make_plan(build_config(base), 2)
    base |= {"tuner": {"type": "full"}, "deepspeed": "zero3"}
    rule = "=0.45: leaves 44.00 of 80 GiB, but a learner keeps about .*; lower it, or use zero3_"
    with pytest.raises(ConfigError, match=rule):
        make_plan(build_config(base), 2)
    vllm["gpu_memory_utilization"] = 0.49
    make_plan(build_config(base), 4)
    vllm["gpu_memory_utilization"] = (
        0.54  # enough for what it keeps alone: a sync comes on top while the engine is awake
    )
    with pytest.raises(ConfigError, match="=0.54: leaves 36.80 of 80 GiB, but a learner keeps about .*sync"):
        make_plan(build_config(base), 4)
    vllm["gpu_memory_utilization"] = 0.22
    base = yaml_of("3v1") | {"custom": base["custom"]}
    rule = (
        r"vllm.gpu_memory_utilization=0.22: leaves room for [\d,]+ tokens .* may need 12,000 with its prompt; raise it"
    )
    with pytest.raises(ConfigError, match=rule):
        make_plan(build_config(base), 1)


def test_CFG_16_every_server_holds_its_weights_and_splits_the_model() -> None:
    """CFG-16: the second one is named by its own key. 32 heads cannot be divided among 3 devices."""
    base = yaml_of("3v1")
    server = base["custom"]["extra"]["rollout_server"]
    addresses = [{"base_url": f"http://127.0.0.1:80{i}0", "group_port": 51216 + i} for i in range(2)]
    base["custom"]["extra"]["rollout_matching"]["vllm"]["server"] = {"servers": addresses}
    server["servers"] = [{}, {"vllm_gpu_memory_utilization": 0.1}]
    with pytest.raises(ConfigError, match=r"servers\[1\].vllm_gpu_memory_utilization") as told:
        make_plan(build_config(base), 1)
    assert "cannot even hold the weights" in str(told.value) and "servers[0]" not in str(told.value)
    server |= {"servers": [], "vllm_tensor_parallel_size": 3, "vllm_data_parallel_size": 1}
    base["custom"]["extra"]["rollout_matching"]["vllm"]["server"] = {"servers": addresses[:1]}
    with pytest.raises(ConfigError, match="vllm_tensor_parallel_size=3: cannot divide the model's 32 attention heads"):
        make_plan(build_config(base), 1)


def test_CFG_16_experts_that_a_servers_devices_cannot_share_are_told(tmp_path: Path) -> None:
    """CFG-16: 512 values of each expert over six replicas; with whole experts spread it goes."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3.5-35B-A3B"]))
    base = yaml_of("3v1") | {"model": {"path": str(tmp_path), "dtype": "bfloat16"}, "deepspeed": "zero3"}
    server = base["custom"]["extra"]["rollout_server"]
    server |= {"vllm_tensor_parallel_size": 1, "vllm_data_parallel_size": 6, "vllm_gpu_memory_utilization": 0.85}
    with pytest.raises(
        ConfigError, match="vllm_data_parallel_size=6: cuts each expert's 512 values over all 6 devices"
    ):
        make_plan(build_config(base), 2, device_gib=141)
    server["vllm_engine_kwargs"] = {"enable_expert_parallel": True}
    make_plan(build_config(base), 2, device_gib=141)


def test_CFG_16_experts_lie_on_all_devices_of_a_server_together() -> None:
    """CFG-16: 29 of the 31 billion parameters: four replicas have a place on 40 GiB, and each alone would not."""
    base = load_config("configs/stage2/qwen3vl_30b_a3b_native_4v4.yaml").model_dump()
    server = base["custom"]["extra"]["rollout_server"]
    assert server["vllm_engine_kwargs"] == {"enable_expert_parallel": True}
    server |= {"vllm_tensor_parallel_size": 1, "vllm_data_parallel_size": 4, "vllm_gpu_memory_utilization": 0.8}
    cfg = build_config(base)
    size = make_plan(cfg, 4).model_size
    weights = rollout_memory(cfg, size)["weights"]
    assert size.experts == 48 * 128 * 3 * 2048 * 768
    assert weights == 2 * (size.total - size.experts) + 2 * size.experts // 4
    assert cache_size(cfg, size, 40).num_bytes == int(0.8 * 40 * 2**30) - weights > 2**30
    server["vllm_data_parallel_size"] = 1
    assert cache_size(build_config(base), size, 40).num_bytes < 0


def test_CFG_16_an_estimate_that_leaves_little_is_remarked() -> None:
    """CFG-16: it counts neither the vision tower's activations nor CUDA's own memory."""
    base = yaml_of("3v1")
    base["training"]["gradient_checkpointing"] = True  # `auto` goes by the GPU
    base["custom"]["extra"]["rollout_server"]["vllm_gpu_memory_utilization"] = 0.6
    needed = sum(make_plan(build_config(base), 1).learner_memory.values()) / 2**30
    for device_gib, is_told in ((needed / 0.79, False), (needed / 0.81, True)):
        remarks = make_plan(build_config(base), 1, device_gib).remarks
        told = [text for text in remarks if text.startswith(f"deepspeed: a learner needs about {needed:.1f} of ")]
        assert len(told) == is_told and all("without the vision tower's activations" in text for text in told)


def test_CFG_16_offloaded_gradients_take_no_memory_of_a_gpu() -> None:
    """CFG-16: DeepSpeed keeps them where the optimizer is; then more learners are the only way out."""
    base = yaml_of("3v1") | {"tuner": {"type": "full"}, "deepspeed": "zero3_offload"}
    assert not {"gradients", "optimizer"} & make_plan(build_config(base), 1).learner_memory.keys()
    base["global_max_length"] = 8000000
    with pytest.raises(ConfigError, match="and a GPU has 80 GiB; use more learners, shorter rows"):
        make_plan(build_config(base), 1)


def test_CFG_16_SYN_5_vllms_share_leaves_room_for_a_sync(capsys: pytest.CaptureFixture[str]) -> None:
    """CFG-16, SYN-5: two buckets as large as the head and the head once more, 3 GiB for CUDA and NCCL. A dry run ends
    with status 2 where less is left; on CPU there is no share."""
    base, head = yaml_of("3v1"), 2 * 151936 * 4096
    server = base["custom"]["extra"]["rollout_server"]
    plan = make_plan(build_config(base), 1)
    assert plan.outside_memory == {"CUDA, NCCL, graphs": 3 * 2**30, "sync buckets": 2 * head, "loading": head}
    assert re.search(r"# outside vLLM's share: +about 6.48 GiB \(.*sync buckets 2.32", format_plan(plan))
    server["vllm_gpu_memory_utilization"] = 0.91
    make_plan(build_config(base), 1)
    server["vllm_gpu_memory_utilization"] = 0.92
    with pytest.raises(SystemExit, match="2"):
        print_dry_run(build_config(base), 1)
    said = capsys.readouterr()
    rule = "leaves 6.40 of 80 GiB, but outside vLLM's share lie about 6.48 GiB (CUDA, NCCL, graphs 3.00, sync buckets"
    assert f"rollout_server.vllm_gpu_memory_utilization=0.92: {rule} 2.32" in said.err and said.out == ""
    assert "; lower it to 0.91" in said.err
    server |= {"vllm_gpu_memory_utilization": 0.85, "servers": [{"vllm_gpu_memory_utilization": 1.0}]}
    with pytest.raises(ConfigError, match=r"servers\[0\].vllm_gpu_memory_utilization=1.0: leaves 0.00"):
        make_plan(build_config(base), 1)
    server["servers"][0]["device"] = "cpu"
    assert make_plan(build_config(base), 1).outside_memory is None
    assert ServerSettings(vllm_max_model_len=1).vllm_gpu_memory_utilization == 0.85


def yaml_of(name: str) -> dict[str, Any]:
    return stage2(name).model_dump()


def test_CFG_16_several_servers_and_other_machines() -> None:
    """CFG-16: GPUs of this machine are counted through; another machine counts its own; a CPU has no number."""
    base = yaml_of("3v1")
    connection = base["custom"]["extra"]["rollout_matching"]["vllm"]["server"]
    connection |= {"base_url": ["http://127.0.0.1:8000", "http://10.0.0.2:8000", "http://localhost:8001"]}
    base["custom"]["extra"]["rollout_server"] |= {
        "vllm_data_parallel_size": 2,
        "servers": [{}, {}, {"vllm_data_parallel_size": 1}],
    }
    layout = plan_layout(build_config(base), 2, "f.yaml")
    assert [device for device, _ in layout.places] == [
        "GPU 0", "GPU 1", "10.0.0.2: GPU 0", "10.0.0.2: GPU 1", "GPU 2", "GPU 3", "GPU 4"
    ]  # fmt: skip
    assert layout.commands == [
        'make server GPUS=0,1 CONFIG=f.yaml ARGS="--server-index 0"',
        '10.0.0.2: make server GPUS=0,1 CONFIG=f.yaml ARGS="--server-index 1"',
        'make server GPUS=2 CONFIG=f.yaml ARGS="--server-index 2"',
        "make train GPUS=3,4 CONFIG=f.yaml",
    ]
    on_cpu = plan_layout(config(RS=settings()), 2, "f.yaml")
    assert [device for device, _ in on_cpu.places] == ["CPU"] * 3
    assert on_cpu.commands == ["make server CONFIG=f.yaml", "make train RANKS=2 CONFIG=f.yaml"]
    assert plan_layout(config(RS=settings(device="cuda")), 1, "f.yaml") is None


def test_CFG_16_servers_of_another_machine_share_no_gpu() -> None:
    """CFG-16: each machine counts its own GPUs through."""
    base = yaml_of("3v1")
    urls = ["http://10.0.0.2:8000", "http://10.0.0.3:8000", "http://10.0.0.2:8001"]
    base["custom"]["extra"]["rollout_matching"]["vllm"]["server"] |= {"base_url": urls}
    base["custom"]["extra"]["rollout_server"]["vllm_data_parallel_size"] = 2
    layout = plan_layout(build_config(base), 1, "f.yaml")
    assert [device for device, _ in layout.places] == [
        "10.0.0.2: GPU 0", "10.0.0.2: GPU 1", "10.0.0.3: GPU 0", "10.0.0.3: GPU 1",
        "10.0.0.2: GPU 2", "10.0.0.2: GPU 3", "GPU 0",
    ]  # fmt: skip
    assert [command.split(" CONFIG")[0] for command in layout.commands] == [
        "10.0.0.2: make server GPUS=0,1", "10.0.0.3: make server GPUS=0,1", "10.0.0.2: make server GPUS=2,3",
        "make train GPUS=0",
    ]  # fmt: skip


def test_CFG_16_GRP_3_a_grpo_plan_names_its_own_program() -> None:
    """CFG-16, GRP-3: six GPUs for the server, two for the learners, as the preset's header says."""
    layout = plan_layout(load_config("configs/grpo/summary_1024.yaml"), 2, "f.yaml")
    assert layout.commands == ["make server GPUS=0,1,2,3,4,5 CONFIG=f.yaml", "make grpo GPUS=6,7 CONFIG=f.yaml"]
    assert layout.places[-1] == ("GPU 7", "train_grpo.py, rank 1: trains")


def test_CFG_16_learners_that_generate_say_so() -> None:
    """CFG-16."""
    hf = config(RM__rollout_backend="hf", RM__vllm={})
    assert plan_layout(hf, 1, "f").places == [("GPU 0", "train_stage2.py, rank 0: trains, generates, writes logs")]
    colocate = config(RM__vllm={"mode": "colocate", "tensor_parallel_size": 2})
    processes = [process for _, process in plan_layout(colocate, 4, "f").places]
    assert [re.search(r"engine (\d)", process)[1] for process in processes] == ["0", "0", "1", "1"]


@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("models/qwen3vl_8b_coord", "Qwen3-VL-8B"),
        ("Qwen/Qwen3-VL-32B-Instruct/", "Qwen3-VL-32B"),
        ("qwen3-vl-30b-a3b", "Qwen3-VL-30B-A3B"),
        ("Qwen3-VL-30B", None),
        ("models/Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL-7B"),
        ("qwen2_5vl_7b_stage1", "Qwen2.5-VL-7B"),
        ("models/Qwen3.5-35B-A3B", "Qwen3.5-35B-A3B"),
        ("OpenGVLab/InternVL3_5-8B-HF", "InternVL3_5-8B"),
        ("qwen3vl_18b", None),
        ("models/merged", None),
    ],
)
def test_CFG_16_released_models_are_known_by_name(path: str, size: str | None) -> None:
    """CFG-16."""
    assert known_model(path) == size


RELEASED_SIZES = {  # numbers of parameters as published, but for InternVL's, whose makers say 8.5 billion
    "Qwen3-VL-2B": 2_127_532_032,
    "Qwen3-VL-4B": 4_437_815_808,
    "Qwen3-VL-8B": 8_767_123_696,
    "Qwen3-VL-32B": 33_357_390_064,
    "Qwen3-VL-30B-A3B": 31_070_754_032,
    "Qwen2.5-VL-3B": 3_754_622_976,
    "Qwen2.5-VL-7B": 8_292_166_656,
    "Qwen2.5-VL-32B": 33_452_718_336,
    "Qwen3.5-9B": 9_653_104_368,
    "Qwen3.5-35B-A3B": 35_951_822_704,
    "InternVL3_5-8B": 8_528_318_464,
}


@pytest.mark.parametrize("name", MODELS)
def test_CFG_16_released_models_have_their_numbers_of_parameters(name: str) -> None:
    """CFG-16: to the last one. Qwen3.5's files also hold a layer that predicts a second token, which no run loads."""
    shapes = parameter_shapes(MODELS[name])
    total = sum(map(prod, shapes.values()))
    if name.startswith("Qwen3.5"):  # like the last layer, behind a projection of two states, with three more norms
        text = MODELS[name]["text_config"]
        layer, width = f"language_model.layers.{text['num_hidden_layers'] - 1}.", text["hidden_size"]
        total += sum(prod(shape) for key, shape in shapes.items() if layer in key) + 2 * width**2 + 3 * width
    assert total == RELEASED_SIZES[name]


def test_CFG_16_a_config_json_without_weights_is_enough(tmp_path: Path) -> None:
    """CFG-16."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen3-VL-2B"]))
    size = model_size(tmp_path, Tuner())
    assert size.total == pytest.approx(2.13e9, rel=0.01) and size.source == "config.json"


def test_CFG_16_a_dry_run_under_a_launcher_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CFG-16: and its number of ranks is the launcher's."""
    import train_stage2

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", ["train_stage2.py", "--config", "configs/stage2/qwen3vl_8b_6v2.yaml", "--dry-run"])
    for rank, expected in ((0, True), (1, False)):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit) as ended:
            train_stage2.main()
        assert ended.value.code == 0
        assert ("GPU 7: " in capsys.readouterr().out) == expected


# ---- make ----------------------------------------------------------------------------------------------------------


def commands_of(*arguments: str) -> str:
    """What `make` would run last, in one line; the set-up in front of it is not looked at."""
    command = ["make", "-n", "DEVICE=gpu", *arguments]
    environment = {"PATH": os.environ["PATH"]}  # not what a `make test` around this has set
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return " ".join(run.stdout.replace("\\\n", " ").strip().splitlines()[-1].split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["server", "GPUS=0,1,2", "CONFIG=a.yaml"],
            "CUDA_VISIBLE_DEVICES=0,1,2 exec .venv/bin/python rollout_server.py --config a.yaml",
        ),
        (["server", "CONFIG=a.yaml"], "exec .venv/bin/python rollout_server.py --config a.yaml"),
        (
            ["server", "GPUS=2", "CONFIG=a.yaml", "ARGS=--server-index 2"],
            "CUDA_VISIBLE_DEVICES=2 exec .venv/bin/python rollout_server.py --config a.yaml --server-index 2",
        ),
        (
            ["train", "GPUS=3"],
            "exec .venv/bin/python -m tools.launch --include localhost:3 --master_port 29500 train_stage2.py "
            "--config configs/stage2/qwen3vl_8b_3v1.yaml",
        ),
        (
            ["train", "GPUS=6,7", "CONFIG=a.yaml", "PORT=29600"],
            "exec .venv/bin/python -m tools.launch --include localhost:6,7 --master_port 29600 train_stage2.py "
            "--config a.yaml",
        ),
        (
            ["train", "HOSTFILE=hosts", "CONFIG=a.yaml"],
            "exec .venv/bin/python -m tools.launch --hostfile hosts --master_port 29500 train_stage2.py "
            "--config a.yaml",
        ),
        (
            ["train", "RANKS=2", "CONFIG=a.yaml"],
            "exec .venv/bin/python -m tools.launch --num_gpus 2 --master_port 29500 train_stage2.py --config a.yaml",
        ),
    ],
)
def test_make_server_and_train_start_the_programs_on_the_gpus_given_SRV_1(arguments: list[str], expected: str) -> None:
    """SRV-1."""
    assert shlex.join(shlex.split(commands_of(*arguments))) == expected


@pytest.mark.parametrize("preset", ["stage2/qwen3vl_8b_3v1", "grpo/summary_1024"])
def test_CFG_16_commands_of_a_plan_start_a_config_of_any_name(preset: str) -> None:
    """CFG-16."""
    for command in plan_layout(load_config(f"configs/{preset}.yaml"), 1, "my a #1.yaml").commands:
        made = commands_of(*shlex.split(command)[1:])
        assert shlex.split(made)[-2:] == ["--config", "my a #1.yaml"]


def test_CFG_16_learners_that_generate_with_the_training_model_sync_nothing(tmp_path) -> None:
    """CFG-16, SYN-1."""
    checkpoint(tmp_path)
    own = {"model__path": str(tmp_path)}
    for more, is_synced in (({}, True), ({"RM__rollout_backend": "hf", "RM__vllm": {}}, False)):
        plan = make_plan(config(**own, **more), 1)
        assert plan.sync_mode.startswith("none: the training model itself") is not is_synced
        assert ("sync buckets (rank 0)" in plan.learner_memory) is is_synced
