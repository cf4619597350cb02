"""GRPO learners that are killed and resumed: two DeepSpeed ranks on CPU, compared with an uninterrupted run."""

from pathlib import Path

import pytest
import yaml

from tests.e2e.processes import write_yaml
from tests.faults import learners
from tests.faults.learners import LearnerProcess, assert_same_checkpoint, curves, newest_step
from tools.demo_grpo import make_data

pytestmark = [pytest.mark.e2e, pytest.mark.slow]  # tests/test_train_grpo.py resumes in one process
NUM_STEPS = 5
REWARDS = """
def odd(completion, sample):
    return sum(token % 2 for token in completion.token_ids) / max(len(completion.token_ids), 1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """9 samples: with 4 per step, an epoch ends within the run and within a step."""
    folder = tmp_path_factory.mktemp("resume_grpo")
    make_data(folder / "data", 9, 3, 0)
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def config_of(folder: Path, model: Path, name: str, deepspeed: str) -> Path:
    """Write FOLDER/NAME.yaml: learners that generate by `hf`, with stage 2's adapter, checkpoints and ZeRO settings."""
    training = {
        "max_steps": NUM_STEPS,
        "save_steps": 1,
        "eval_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
    }
    config = yaml.safe_load(learners.config_of(folder, model, name, deepspeed, **training).read_text())
    config["custom"] |= {"trainer_variant": "grpo", "extra": {}}
    config["rlhf"] = {
        "use_vllm": False,
        "decode_batch_size": 8,
        "max_new_tokens": 8,
        "num_generations": 4,
        "reward_funcs": ["odd"],
        "reward_files": [str(folder / "rewards.py")],
        "beta": 0.01,
        "dynamic_sample": True,
    }
    return write_yaml(folder / f"{name}.yaml", config)


@pytest.mark.parametrize("deepspeed", ["zero2", "zero3"])
def test_a_killed_run_goes_on_exactly_GRP_1_LRN_5_LRN_2(folder, start_model, deepspeed):
    """GRP-1, LRN-5, LRN-2: SIGKILL to the group after a checkpoint. Sampled answers, weights, optimizer, data, random
    states, evaluations and curves equal those of the uninterrupted run, bit for bit."""
    whole, broken = folder / f"whole_{deepspeed}", folder / f"broken_{deepspeed}"
    left_alone = LearnerProcess(config_of(folder, start_model, whole.name, deepspeed), script="train_grpo.py")
    assert left_alone.end() == 0, left_alone.output[-6000:]
    config = config_of(folder, start_model, broken.name, deepspeed)
    killed = LearnerProcess(config, script="train_grpo.py")
    assert killed.wait_for(lambda: newest_step(broken) >= 2), killed.output[-6000:]
    killed.kill()
    step = newest_step(broken)
    last = LearnerProcess(config, script="train_grpo.py")
    assert last.end() == 0, last.output[-6000:]
    assert step < NUM_STEPS and last.steps() == list(range(step + 1, NUM_STEPS + 1))
    ours, theirs = curves(broken), curves(whole)
    assert [step for step, _ in theirs["reward"]] == list(range(1, NUM_STEPS + 1))
    assert max(value for _, value in theirs["train/grad_norm"]) > 0
    for tag in theirs.keys() | ours.keys():
        assert ours[tag] == theirs[tag], tag
    assert_same_checkpoint(broken / f"checkpoint-{NUM_STEPS}", whole / f"checkpoint-{NUM_STEPS}")
    assert {path.name for path in (broken / "eval").iterdir()} == {path.name for path in (whole / "eval").iterdir()}
    for path in (whole / "eval").iterdir():
        assert path.read_bytes() == (broken / "eval" / path.name).read_bytes(), path.name
