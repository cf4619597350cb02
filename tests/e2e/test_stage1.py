"""The way from a released model to stage 2 with the shipped presets, on a small Qwen3-VL: add the coordinate tokens,
stage 1 without any engine, stage 2 from its merged checkpoint with a real server (LRN-10, LRN-6, TGT-1)."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForImageTextToText

from tests.e2e import processes
from tests.e2e.processes import ROOT, Server, run_learner, write_yaml
from tests.tools.test_add_coord_tokens import build
from tools.make_demo import make_dataset
from utils.data.encoding import load_processor
from utils.token_table import TokenTable

pytestmark = pytest.mark.e2e
STAGE1_STEPS, STAGE2_STEPS = 12, 2
SMALL = {"rank": 8, "alpha": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Data, and a model as it would be released: no coordinate tokens, head and embeddings of their own, as in the 8B;
    and with the tokens added by the users' command."""
    folder = tmp_path_factory.mktemp("stage1")
    make_dataset(folder / "data", num_train=64, num_val=1, image_size=64)
    with pytest.MonkeyPatch.context() as patch:
        build(folder / "released", patch, tied=False, reserve=300)
    command = [sys.executable, "-m", "tools.add_coord_tokens", "--model", str(folder / "released")]
    subprocess.run([*command, "--output", str(folder / "coord")], check=True, timeout=120, cwd=ROOT)
    return folder


def learner_config(folder: Path, preset: str, model: Path, name: str, matching: dict, **training) -> Path:
    """A shipped preset, made small: everything that it does not name here is as users get it."""
    config = {
        "extends": str(ROOT / "configs" / preset),
        "global_max_length": 1024,
        "model": {"path": str(model), "dtype": "float32", "image_max_pixels": None},
        "tuner": SMALL,
        "custom": {
            "train_jsonl": str(folder / "data" / "train.jsonl"),
            "val_jsonl": None,
            "extra": {"rollout_matching": matching},
        },
        "training": {"output_dir": str(folder / name), "per_device_train_batch_size": 4, "warmup_steps": 1} | training,
    }
    return write_yaml(folder / f"{name}.yaml", config)


@pytest.fixture(scope="module")
def stage1(folder) -> Path:
    """Run stage 1 on two learners, which could not even import vLLM; return the run directory."""
    preset, training = "stage1/qwen3vl_8b_4gpu.yaml", {"learning_rate": 5e-3, "embed_lr": 5e-3}
    config = learner_config(folder, preset, folder / "coord", "one", {}, max_steps=STAGE1_STEPS, **training)
    (folder / "without" / "vllm").mkdir(parents=True)
    (folder / "without" / "vllm" / "__init__.py").write_text("raise RuntimeError('stage 1 imports vLLM')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(processes.ENVIRONMENT, "PYTHONPATH", f"{folder / 'without'}:{ROOT}")
        result = run_learner("train_stage2.py", config, num_ranks=2)
    assert result.returncode == 0, result.stdout[-6000:]
    return folder / "one"


@pytest.fixture(scope="module")
def stage2(folder, stage1) -> Path:
    """Run stage 2 on one learner, as in 3 + 1, from what stage 1 saved, with a real server; return its directory."""
    start = stage1 / f"checkpoint-{STAGE1_STEPS}" / "merged"
    server = Server(folder, start)
    try:
        connection = {"base_url": server.url, "group_port": server.group_port}
        vllm = {"server": connection, "sync": {"bucket_mib": 1, "verify": "always"}}
        matching = {"max_new_tokens": 48, "vllm": vllm}
        training = {"max_steps": STAGE2_STEPS, "gradient_accumulation_steps": 1, "eval_steps": 0}
        config = learner_config(folder, "stage2/qwen3vl_8b_3v1.yaml", start, "two", matching, **training)
        server.wait_ready()
        result = run_learner("train_stage2.py", config, num_ranks=1)
    finally:
        server.end()
    assert result.returncode == 0, result.stdout[-6000:]
    return folder / "two"


def curve(run: Path, tag: str) -> list[float]:
    return [event.value for event in EventAccumulator(str(run)).Reload().Scalars(tag)]


def test_stage_1_trains_without_server_or_engine_LRN_10(stage1):
    """LRN-10: supervised training that learns, and says nothing of rollouts that it never made."""
    losses = curve(stage1, "loss/total")
    assert len(losses) == STAGE1_STEPS and losses[-1] < 0.8 * losses[0]
    assert json.loads((stage1 / "run.json").read_text())["server_world_sizes"] == []
    assert sum(curve(stage1, "sync/bytes")) == sum(curve(stage1, "rollout/new_tokens_mean")) == 0
    tags = EventAccumulator(str(stage1)).Reload().Tags()["scalars"]
    assert not {"rollout/num_images", "rollout/f1", "rollout/parse_rate"} & set(tags)
    assert not (stage1 / "rollouts.jsonl").exists()


def test_its_checkpoint_is_the_model_with_trained_coordinate_tokens_LRN_10_LRN_6_TGT_1(folder, stage1):
    """LRN-10, LRN-6, TGT-1: new rows have moved, in the head all, in the embeddings those of coordinates that occur in
    images of 64 pixels; the two are still two; the tokens are there."""
    merged = stage1 / f"checkpoint-{STAGE1_STEPS}" / "merged"
    before, after = (AutoModelForImageTextToText.from_pretrained(path) for path in (folder / "coord", merged))
    table = TokenTable.from_tokenizer(load_processor(merged).tokenizer)
    for find, share in (("get_input_embeddings", 0.03), ("get_output_embeddings", 0.9)):
        old, new = (getattr(model, find)().weight[torch.from_numpy(table.coord_ids)] for model in (before, after))
        assert (old != new).any(dim=1).float().mean() > share
    assert after.lm_head.weight is not after.get_input_embeddings().weight


@pytest.mark.slow
def test_stage_2_starts_from_it_LRN_10(folder, stage1, stage2):
    """LRN-10: rollouts of that checkpoint, optimizer steps on them, new weights on the server."""
    assert json.loads((stage2 / "finished.json").read_text())["steps"] == STAGE2_STEPS
    assert all(map(math.isfinite, curve(stage2, "loss/total")))
    assert curve(stage2, "rollout/num_images") == [4] * STAGE2_STEPS and curve(stage2, "rollout/new_tokens_mean")[0] > 0
    ledger = json.loads((stage2 / "weights.json").read_text())
    assert ledger["version"].endswith(f":{STAGE2_STEPS - 1}") and "lm_head.weight" in ledger["digests"]
    # The first loss of a model that knows the format is far below that of one that does not.
    assert curve(stage2, "loss/total")[0] < curve(stage1, "loss/total")[0]
