"""`utils.plan`: what `--dry-run` derives, against numbers worked out by hand (CFG-16)."""

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.test_config import edited
from utils.config import ConfigError, build_config, engine_json, load_config
from utils.plan import ModelSize, format_plan, learner_memory, make_plan, model_size, print_dry_run
from utils.schema import Config, Tuner


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
    ("tuner", "trainable"),
    [
        ({}, 40 + 12),  # full: language model with embeddings
        ({"freeze_vit": False}, 52 + 30),
        ({"freeze_aligner": False}, 52 + 8),
        ({"type": "lora", "rank": 2}, 2 * (8 + 4)),  # q_proj only: A is [2, 4], B is [8, 2]
        ({"type": "lora", "rank": 2, "use_dora": True}, 2 * (8 + 4) + 8),
        ({"type": "lora", "rank": 2, "modules_to_save": ["embed_tokens"]}, 2 * (8 + 4) + 12),
        ({"type": "lora", "rank": 1, "freeze_vit": False, "target_modules": ["qkv"]}, 6 + 5),
        ({"type": "lora", "rank": 1, "target_modules": r".*\.q_proj"}, 8 + 4),
    ],
)
def test_CFG_16_parameters_that_learn(tmp_path: Path, tuner: dict[str, Any], trainable: int) -> None:
    """CFG-16."""
    assert model_size(checkpoint(tmp_path), Tuner(**tuner)) == ModelSize(40 + 12 + 30 + 8, trainable)


@pytest.mark.parametrize(
    ("deepspeed", "dtype", "expected"),
    [
        # bf16: 2 bytes each for weights and gradients, 12 for the optimizer; 1000 parameters of which 400 learn
        ("zero0", "bfloat16", {"weights": 2000, "gradients": 800, "optimizer": 4800}),
        ("zero1", "bfloat16", {"weights": 2000, "gradients": 800, "optimizer": 1200}),
        ("zero2", "bfloat16", {"weights": 2000, "gradients": 200, "optimizer": 1200}),
        ("zero3", "bfloat16", {"weights": 500, "gradients": 200, "optimizer": 1200}),
        ("zero3_offload", "bfloat16", {"gradients": 200}),
        ("zero0", "float32", {"weights": 4000, "gradients": 1600, "optimizer": 3200}),
    ],
)
def test_CFG_16_learner_memory_by_zero_stage(deepspeed: str, dtype: str, expected: dict[str, int]) -> None:
    """CFG-16."""
    cfg = config(deepspeed=deepspeed, model={"path": "gone", "dtype": dtype})
    memory = learner_memory(cfg, engine_json(cfg, 4), ModelSize(1000, 400), world_size=4)
    assert memory.pop("sync buckets (rank 0)") == 2 * 256 * 1024**2
    assert memory == expected


def test_CFG_16_memory_from_a_readable_checkpoint(tmp_path: Path) -> None:
    """CFG-16: bf16. Activations checkpointed: 4096 tokens x 4 units x 2 bytes x (2 layers + 17). Cache per token:
    keys and
    values x 2 layers x 1 head x 2 x 2 bytes = 16 bytes, for 3 answers of 2048 tokens."""
    folder = str(checkpoint(tmp_path))
    plan = make_plan(config(model={"path": folder}, RS=settings(), RM__decode_batch_size=3), world_size=1)
    assert plan.learner_memory["activations"] == 4096 * 4 * 2 * 19
    assert plan.rollout_memory == {"weights": 90 * 2, "keys and values": 16 * 2048 * 3}
    assert "parameters:" in format_plan(plan) and "GiB" in format_plan(plan)


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
    from utils.plan import _tensor_shapes

    assert sum(prod(shape) for _, shape in _tensor_shapes(checkpoint(tmp_path))) == 90
