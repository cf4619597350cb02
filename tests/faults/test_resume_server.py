"""A learner with a rollout server is killed; the next one takes the same server over."""

import json
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.processes import Server, write_yaml
from tests.faults.learners import LearnerProcess, newest_step
from tools.make_demo import make_dataset
from utils.run.rollout_log import read_rollout_log

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
NUM_STEPS = 6


@pytest.fixture(scope="module")
def server(tmp_path_factory, warm_model):
    folder = tmp_path_factory.mktemp("resume_server")
    make_dataset(folder / "data", num_train=24, num_val=1)
    server = Server(folder, warm_model)
    yield server.wait_ready()
    server.end()


def config_of(server: Server) -> Path:
    config = yaml.safe_load(server.config.read_text())
    matching = config["custom"]["extra"]["rollout_matching"]
    matching["decode_batch_size"] = 4
    matching["vllm"]["sync"] = {"verify": "always"}
    config["training"] |= {
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "save_steps": 1,
        "resume_from_checkpoint": "auto",
    }
    return write_yaml(server.config.with_name("learner.yaml"), config)


def test_the_first_sync_of_a_resumed_run_sends_everything_SYN_2_SYN_8_LRN_5(server):
    """SYN-2, SYN-8, LRN-5, LOG-1: under a run id of its own, to the server that the dead learner left; every step
    stands once in rollouts.jsonl, made by the weights of that step."""
    config = config_of(server)
    run = Path(yaml.safe_load(config.read_text())["training"]["output_dir"])
    killed = LearnerProcess(config)
    assert killed.wait_for(lambda: newest_step(run) >= 2), killed.output[-6000:]
    killed.kill()
    step = newest_step(run)
    last = LearnerProcess(config)
    assert last.end() == 0, last.output[-6000:]
    lines = read_rollout_log(run / "rollouts.jsonl")
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert [line["weight_version"].rpartition(":")[2] for line in lines] == [str(n) for n in range(NUM_STEPS)]
    run_ids = [line["weight_version"].rpartition(":")[0] for line in lines]
    facts = json.loads((run / "run.json").read_text())
    assert set(run_ids[step:]) == {facts["run_id"]} and set(run_ids[:step]) == {facts["resumed_from"]["run_id"]}
    sent = {event.step: event.value for event in EventAccumulator(str(run)).Reload().Scalars("sync/bytes")}
    assert list(sent) == list(range(1, NUM_STEPS + 1))
    everything = {step for step, num_bytes in sent.items() if num_bytes == max(sent.values())}
    assert everything == {1, step + 1}
    ledger = json.loads((run / "weights.json").read_text())
    assert server.get("/weight_version/").json()["weight_version"] == ledger["version"]
