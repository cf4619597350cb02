"""Preparing rows ahead with a real server (LRN-8): window 0 changes nothing; otherwise the lag is bounded."""

import json
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.processes import Server, run_learner, write_yaml
from tools.make_demo import make_dataset
from utils.run.rollout_log import read_rollout_log

pytestmark = pytest.mark.e2e
NUM_STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prefetch")
    make_dataset(folder / "data", num_train=96, num_val=4)
    return folder


@pytest.fixture(scope="module")
def server(folder, warm_model):
    server = Server(folder, warm_model)
    try:
        yield server.wait_ready()
    finally:
        server.end()


def run(folder: Path, server: Server, name: str, prefetch: dict) -> Path:
    """Train with two ranks and two micro-steps per step; return the run directory."""
    config = yaml.safe_load(server.config.read_text())
    matching = config["custom"]["extra"]["rollout_matching"]
    matching["vllm"]["server"] = {"base_url": server.url, "group_port": server.group_port}
    matching |= {"decode_batch_size": 8, "max_new_tokens": 96, "async": prefetch}
    config["tuner"] = {"type": "lora", "use_dora": True, "rank": 4, "alpha": 8}
    config["custom"]["val_jsonl"] = str(folder / "data" / "val.jsonl")
    config["training"] = {
        "output_dir": str(folder / name),
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "gradient_checkpointing": False,
        "eval_steps": 3,
    }
    result = run_learner("train_stage2.py", write_yaml(folder / f"{name}.yaml", config), num_ranks=2)
    assert result.returncode == 0, result.stdout[-6000:]
    return folder / name


def curve(run_dir: Path, tag: str) -> list[float]:
    return [event.value for event in EventAccumulator(str(run_dir)).Reload().Scalars(tag)]


def evaluations(run_dir: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((run_dir / "eval").glob("*.json"))]


@pytest.mark.slow
def test_with_window_0_the_run_is_the_synchronous_one_sample_for_sample_LRN_8(folder, server):
    """LRN-8."""
    plain = run(folder, server, "plain", {})
    ahead = run(folder, server, "window0", {"enabled": True, "version_window": 0, "queue_limit": 1})
    assert curve(ahead, "loss/total") == curve(plain, "loss/total")
    assert curve(ahead, "rollout/new_tokens_mean") == curve(plain, "rollout/new_tokens_mean")
    assert evaluations(ahead) == evaluations(plain)


def test_rollouts_of_coming_steps_are_at_most_so_old_LRN_8_SYN_9(folder, server):
    """LRN-8, SYN-8, SYN-9: every answer has the version of its weights; none is older than the window when it is used.
    The test of the server covers what `wait` and `abort` do to running requests."""
    prefetch = {"enabled": True, "version_window": 2, "queue_limit": 4, "on_sync": "keep"}
    run_dir = run(folder, server, "ahead", prefetch)
    lines = [line for line in read_rollout_log(run_dir / "rollouts.jsonl") if line["phase"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    asked = [(line["step"] - 1, call) for line in lines for call in line["calls"]]
    ages = []
    for step, call in asked:
        version = call.get("weight_version", lines[step]["weight_version"])
        assert call["global_step"] == step  # each line is about its own step, whenever it was requested
        ages.append(step - int(version.rpartition(":")[2]))
    assert 1 <= max(ages) <= 2 and min(ages) == 0  # how far ahead it gets depends on speed
    lag, worst = curve(run_dir, "train/policy_lag"), curve(run_dir, "train/policy_lag_max")
    assert len(lag) == NUM_STEPS and worst[0] == 0 and max(worst) >= 1 and max(worst) <= 2 + 1  # + the carry buffer
    assert curve(run_dir, "rollout/remade") == [0.0] * NUM_STEPS
    assert curve(run_dir, "rollout/num_images") == [12.0] * NUM_STEPS
