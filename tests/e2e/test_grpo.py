"""GRPO with real parts: one vLLM server and DeepSpeed with two ranks, which send it merged weights, run after run."""

import json
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.processes import Server, free_port, run_learner, write_yaml
from tools.demo_grpo import make_data
from utils.run.rollout_log import read_rollout_log

pytestmark = pytest.mark.e2e
NUM_STEPS = 4
REWARDS = """
def odd(completion, sample):
    return sum(token % 2 for token in completion.token_ids) / max(len(completion.token_ids), 1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    make_data(folder / "data", 64, 6, 0)
    (folder / "rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture(scope="module")
def server(folder, start_model):
    server = Server(folder, start_model)
    try:
        yield server.wait_ready()
    finally:
        server.end()


def grpo_config(folder: Path, server: Server, model: Path, name: str, **changes) -> Path:
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "global_max_length": 512,
        "tuner": {"type": "lora", "rank": 4, "alpha": 8},
        "custom": {
            "trainer_variant": "grpo",
            "train_jsonl": str(folder / "data" / "train.jsonl"),
            "val_jsonl": str(folder / "data" / "val.jsonl"),
            "extra": {"rollout_server": {"device": "cpu", "vllm_max_model_len": 512, "cpu_kv_cache_gib": 1}},
        },
        "rlhf": {
            "vllm_server_port": [server.port],
            "vllm_server_group_port": free_port(),
            "sync": {"bucket_mib": 1, "verify": "always"},
            "decode_batch_size": 32,
            "max_new_tokens": 12,
            "num_generations": 4,
            "reward_funcs": ["odd"],
            "reward_files": [str(folder / "rewards.py")],
        },
        "training": {
            "output_dir": str(folder / name),
            "max_steps": NUM_STEPS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "packing_buffer": 64,
            "learning_rate": 5e-3,
            "gradient_checkpointing": False,
            "eval_steps": NUM_STEPS,
        },
        "deepspeed": "zero2",
    }
    for section, values in changes.items():
        config[section] |= values
    return write_yaml(folder / f"{name}.yaml", config)


def curves(run_dir: Path) -> dict[str, list[float]]:
    events = EventAccumulator(str(run_dir)).Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(scope="module")
def first_run(folder, server, start_model) -> Path:
    config = grpo_config(folder, server, start_model, "first", rlhf={"beta": 0.01})
    result = run_learner("train_grpo.py", config, num_ranks=2)
    assert result.returncode == 0, result.stdout[-6000:]
    return folder / "first"


def test_engine_and_learner_agree_on_every_sampled_token_GRP_6_SYN_7(first_run):
    """GRP-6, SYN-7: in float32 their log-probabilities differ by less than 1e-3 after every update; on-policy ratios
    are 1."""
    found = curves(first_run)
    assert len(found["policy/engine_gap_max"]) == NUM_STEPS
    assert 0 < max(found["policy/engine_gap_max"]) < 1e-3
    assert found["policy/ratio_max"] == pytest.approx([1.0] * NUM_STEPS, abs=1e-6)
    assert found["policy/correction_mean"] == pytest.approx([1.0] * NUM_STEPS, abs=1e-3)
    assert max(found["train/grad_norm"]) > 0 and found["policy/kl"][-1] > 0


def test_the_server_holds_the_last_policy_and_groups_have_seeds_of_their_own_GRP_1_DIS_6(first_run, server):
    """GRP-1, DIS-6, LOG-1: merged weights of the last step; 2 prompts x 4 answers per call, each with its own seed."""
    ledger = json.loads((first_run / "weights.json").read_text())
    assert ledger["version"].endswith(f":{NUM_STEPS}")
    assert server.get("/weight_version/").json()["weight_version"] == ledger["version"]
    lines = [line for line in read_rollout_log(first_run / "rollouts.jsonl") if line["phase"] == "train"]
    assert [line["weight_version"].rpartition(":")[2] for line in lines] == ["0", "1", "2", "3"]
    assert {call["num_requests"] for line in lines for call in line["calls"]} == {8}
    assert len({call["seed"] for line in lines for call in line["calls"]}) == NUM_STEPS * 2 * 2
    assert min(curves(first_run)["reward/odd_std"]) > 0


def test_the_evaluation_is_the_mean_reward_of_greedy_answers_GRP_1_LRN_7(first_run):
    """GRP-1, LRN-7: every validation sample once, over both ranks; mean and parts are those of the answers on disk."""
    result = json.loads((first_run / "eval" / f"step_{NUM_STEPS:06d}.json").read_text())
    answers = [json.loads(line) for line in (first_run / "eval" / f"step_{NUM_STEPS:06d}.jsonl").open()]
    assert len({answer["id"] for answer in answers}) == len(answers) == result["num_samples"] == 6
    assert result["reward"] == pytest.approx(sum(answer["reward"] for answer in answers) / 6)
    assert result["reward"] == result["reward/odd"] > 0
    assert curves(first_run)["eval/reward"] == pytest.approx([result["reward"]])
    lines = [line for line in read_rollout_log(first_run / "rollouts.jsonl") if line["phase"] == "eval"]
    assert [line["weight_version"].rpartition(":")[2] for line in lines] == [str(NUM_STEPS)]
    assert {line["decoding"]["temperature"] for line in lines} == {0.0}


def test_a_second_learner_starts_on_the_same_server_GRP_4_LRN_8(first_run, folder, server, start_model):
    """GRP-4: the server keeps running when a learner ends, and the next learner needs nothing but its own command.
    GRP-1, LRN-8: full fine-tuning, padded batches, answers prepared up to one step ahead, and resampled prompts."""
    boot_id = server.get("/health/").json()["boot_id"]
    config = grpo_config(
        folder,
        server,
        start_model,
        "second",
        tuner={"type": "full"},
        training={"packing": False, "learning_rate": 1e-4},
        rlhf={"dynamic_sample": True, "scale_rewards": "batch", "num_iterations": 2},
    )
    content = yaml.safe_load(config.read_text())
    content["tuner"] = {"type": "full"}
    content["custom"]["extra"]["rollout_matching"] = {"async": {"enabled": True, "version_window": 1}}
    result = run_learner("train_grpo.py", write_yaml(config, content), num_ranks=2)
    assert result.returncode == 0, result.stdout[-6000:]
    assert server.get("/health/").json()["boot_id"] == boot_id
    found = curves(folder / "second")
    assert max(found["train/policy_lag_max"]) == 1  # some rows were prepared ahead, none further than that
    assert len(found["reward"]) == NUM_STEPS


def test_a_server_that_is_not_there_is_named_GRP_4_CON_1(folder, server, start_model):
    """GRP-4, CON-1: the learner waits up to the limit, then says which address it tried and what to do."""
    nobody = free_port()
    config = grpo_config(
        folder, server, start_model, "nobody", rlhf={"vllm_server_port": [nobody], "vllm_server_timeout": 3.0}
    )
    result = run_learner("train_grpo.py", config, num_ranks=2)
    assert result.returncode != 0 and f"http://127.0.0.1:{nobody}" in result.stdout
    assert "rollout_server.py" in result.stdout or "make server" in result.stdout


def test_colocate_is_two_edits_away_GRP_2_ROL_7(folder, server, start_model):
    """GRP-2, ROL-7: `vllm_mode: colocate`, otherwise the same file; the server's section is ignored."""
    config = grpo_config(
        folder, server, start_model, "colocate", rlhf={"vllm_mode": "colocate"}, training={"max_steps": 2}
    )
    result = run_learner("train_grpo.py", config, num_ranks=2)
    assert result.returncode == 0, result.stdout[-6000:]
    found = curves(folder / "colocate")
    assert 0 < max(found["policy/engine_gap_max"]) < 1e-3 and len(found["reward/odd"]) == 2


@pytest.mark.slow
def test_a_restarted_server_gets_everything_and_the_run_goes_on_CON_4_LRN_1(folder, server, start_model):
    """CON-4, LRN-1, SYN-8: the server is killed while answers are prepared ahead, and restarted with its own command.
    The run waits, sends all weights, and trains every step with each prompt once."""
    num_steps, run_dir = 10, folder / "restart"
    config = grpo_config(folder, server, start_model, "restart", training={"max_steps": num_steps, "eval_steps": 0})
    content = yaml.safe_load(config.read_text())
    content["custom"]["extra"]["rollout_matching"] = {"async": {"enabled": True, "version_window": 1}}
    write_yaml(config, content)
    results: list[subprocess.CompletedProcess] = []
    learner = threading.Thread(target=lambda: results.append(run_learner("train_grpo.py", config, num_ranks=2)))
    learner.start()
    log, deadline = run_dir / "rollouts.jsonl", time.monotonic() + 400
    while not (log.exists() and len(read_rollout_log(log)) >= 3) and learner.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    server.kill()
    server.start_again()
    learner.join()
    assert results and results[0].returncode == 0, results and results[0].stdout[-6000:]
    assert "done after recovery" in results[0].stdout
    found = curves(run_dir)
    assert len(found["reward"]) == num_steps and found["rollout/failed"] == [0.0] * num_steps
    assert max(found["train/policy_lag_max"]) <= 1
    assert found["sync/bytes"].count(max(found["sync/bytes"])) == 2  # everything at the start and after the restart
    state = torch.load(run_dir / f"checkpoint-{num_steps}" / "state" / "rank_00000.pt", weights_only=True)
    assert state["stream"]["position"] == num_steps * 8  # 2 prompts x 2 micro-steps x 2 ranks
    ledger = json.loads((run_dir / "weights.json").read_text())
    assert server.get("/weight_version/").json()["weight_version"] == ledger["version"]
