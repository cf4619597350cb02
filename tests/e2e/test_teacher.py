"""Stage 2 with two real servers: one gets the weights in training, nobody syncs the other, a teacher (TGT-16)."""

import math
from pathlib import Path

import pytest

from tests.e2e.processes import Server, config_of, run_learner, write_yaml
from tools.make_demo import make_dataset

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def folder(tmp_path) -> Path:
    make_dataset(tmp_path / "data", num_train=16, num_val=4)
    return tmp_path


def test_two_steps_with_a_teacher_of_its_own_server_TGT_16(folder, start_model, warm_model):
    """TGT-16: the start check passes, every step logs the divergence, and the teacher's weights stay its own."""
    teacher_settings = {"vllm_max_model_len": 1025}  # a whole row, and a token more
    servers = [
        Server(folder, warm_model),
        Server(folder, start_model, **teacher_settings),
    ]  # an untrained policy writes nothing usable
    try:
        policy, teacher = [server.wait_ready() for server in servers]
        config = config_of(folder, warm_model, policy.url, policy.group_port, {})
        matching = config["custom"]["extra"]["rollout_matching"]
        matching |= {"decode_batch_size": 4, "teacher": {"base_url": teacher.url, "weight": 0.5}}
        config["training"] |= {
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "gradient_checkpointing": False,
            "learning_rate": 1e-3,
        }
        result = run_learner("train_stage2.py", write_yaml(folder / "run.yaml", config), num_ranks=2)
        assert result.returncode == 0, result.stdout[-6000:]
        assert policy.get("/weight_version/").json()["weight_version"].endswith(":1")
        assert teacher.get("/weight_version/").json()["weight_version"] is None
    finally:
        for server in servers:
            server.end()
    found = scalars(folder / "run")
    assert len(found["loss/teacher"]) == 2 and all(0 < value < math.inf for value in found["loss/teacher"])
    assert len(found["seconds/teacher"]) == 2 and min(found["seconds/teacher"]) > 0


def scalars(run_dir: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = run_dir.rglob("events.out.tfevents.*")
    log = EventAccumulator(str(events)).Reload()
    return {tag: [event.value for event in log.Scalars(tag)] for tag in log.Tags()["scalars"]}
