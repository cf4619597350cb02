"""Several real servers of different sizes, and one that is killed and restarted during a run."""

import json
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.processes import Server, run_learner, write_yaml
from tools.make_demo import make_dataset
from utils.run.rollout_log import read_rollout_log

pytestmark = pytest.mark.e2e
NUM_STEPS, KILLED_AT, AWAY_S = 10, 3, 5.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("servers")
    make_dataset(folder / "data", num_train=96, num_val=4)
    return folder


@pytest.fixture(scope="module")
def servers(folder, warm_model):
    """A small server and one with two engines."""
    pair = [Server(folder, warm_model, vllm_data_parallel_size=size) for size in (1, 2)]
    try:
        yield [server.wait_ready() for server in pair]
    finally:
        for server in pair:
            server.end()


def learner_config(folder: Path, name: str, servers: list[Server], paired: bool = False, **training) -> Path:
    """Two ranks, greedy, DoRA on the language model only, so that later syncs send less than the first."""
    config = yaml.safe_load(servers[0].config.read_text())
    matching = config["custom"]["extra"]["rollout_matching"]
    urls, ports = [server.url for server in servers], [server.group_port for server in servers]
    connection = {"servers": [{"base_url": u, "group_port": p} for u, p in zip(urls, ports, strict=True)]}
    matching["vllm"]["server"] = {"base_url": urls, "group_port": ports} if paired else connection
    matching["vllm"]["sync"] = {"verify": "always"}
    matching |= {"decode_batch_size": 4, "max_new_tokens": 96, "monitor_dump": {"every_steps": 2, "num_samples": 2}}
    config["custom"]["extra"]["rollout_server"]["servers"] = [{"vllm_data_parallel_size": n} for n in (1, 2)]
    del config["custom"]["extra"]["rollout_server"]["servers"][len(servers) :]
    config["tuner"] = {"type": "lora", "use_dora": True, "rank": 4, "alpha": 8}
    config["training"] = {
        "output_dir": str(folder / name),
        "max_steps": 2,
        "per_device_train_batch_size": 6,
        "learning_rate": 5e-3,
        "gradient_checkpointing": False,
    } | training
    return write_yaml(folder / f"{name}.yaml", config)


def losses(run_dir: Path) -> list[float]:
    return [event.value for event in EventAccumulator(str(run_dir)).Reload().Scalars("loss/total")]


def test_two_unequal_servers_share_by_capacity_and_train_like_one_DIS_4_DIS_6_SYN_11_CFG_7(folder, servers):
    """DIS-4, DIS-6, SYN-11, CFG-7, LOG-1: 4 x (1 + 2) slots, 6 per rank: rank 0 owns server 0 and two slots of server
    1, rank 1 the rest of server 1. With greedy decoding, the run equals that of the second server alone."""
    for name, used, paired in (("both", servers, True), ("one", servers[1:], False)):
        result = run_learner("train_stage2.py", learner_config(folder, name, used, paired), num_ranks=2)
        assert result.returncode == 0, result.stdout[-6000:]
    lines = {name: read_rollout_log(folder / name / "rollouts.jsonl") for name in ("both", "one")}
    for line in lines["both"]:
        shares = {(call["rank"], call["server"]): call["num_requests"] for call in line["calls"]}
        assert shares == {(0, 0): 4, (0, 1): 2, (1, 1): 6}, line
    seeds = {
        name: {
            (line["step"], call["rank"]): call["seed"] - call["first_request"]
            for line in lines[name]
            for call in line["calls"]
        }
        for name in lines
    }
    assert seeds["both"] == seeds["one"]
    assert losses(folder / "both") == pytest.approx(losses(folder / "one"), rel=1e-5)
    ledgers = {name: json.loads((folder / name / "weights.json").read_text())["digests"] for name in lines}
    versions = {server.get("/weight_version/").json()["weight_version"] for server in servers}
    assert len(ledgers["both"]) == len(ledgers["one"]) and len(versions) == 2  # server 0 has the first run's last


def test_the_run_leaves_sample_sheets_and_the_records_of_its_servers_LOG_4_LOG_6(folder, servers):
    """LOG-4, LOG-6."""
    sheets = sorted(path.suffix for path in (folder / "both" / "dumps" / "step_000002").iterdir())
    assert sheets == [".json", ".json", ".png", ".png"]
    tags = EventAccumulator(str(folder / "both")).Reload().Tags()
    assert "dump/0" in tags["images"]
    for index in (0, 1):
        assert {f"server/{index}/calls", f"server/{index}/retries", f"server/{index}/timeouts"} <= set(tags["scalars"])


def test_a_restarted_server_gets_everything_and_the_run_goes_on_CON_4(folder, servers):
    """CON-4, SYN-6, SYN-8: one of two servers gets SIGKILL in the middle of a run. The run waits, reopens the
    communicators, sends all weights, and only then uses answers. No sample is lost, and the log reports each event."""
    server = servers[1]
    config = learner_config(folder, "restart", servers, max_steps=NUM_STEPS)
    results: list[subprocess.CompletedProcess] = []
    learner = threading.Thread(target=lambda: results.append(run_learner("train_stage2.py", config, num_ranks=2)))
    learner.start()
    log = folder / "restart" / "rollouts.jsonl"
    deadline = time.monotonic() + 400
    while not (log.exists() and len(read_rollout_log(log)) >= KILLED_AT) and learner.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    server.kill()
    time.sleep(AWAY_S)
    server.start_again()
    learner.join()
    assert results and results[0].returncode == 0, results and results[0].stdout[-6000:]
    lines = read_rollout_log(log)
    assert [line["step"] for line in lines if line["phase"] == "train"] == list(range(1, NUM_STEPS + 1))
    for line in lines:  # before and after: training data was generated by the weights of that step
        assert line["weight_version"].endswith(f":{line['step'] - 1}")
        answered = Counter()
        for call in line["calls"]:
            answered[call["rank"]] += call["num_requests"] * (call["outcome"] == "ok")
        assert min(answered.values()) >= 6 and len(answered) == 2, line  # more if a step was requested again
    sent = [event.value for event in EventAccumulator(str(folder / "restart")).Reload().Scalars("sync/bytes")]
    assert sent.count(max(sent)) == 2 and min(sent) < max(sent)  # everything only at the start and after the restart
    story = [
        "failed on",  # the call or the sync during which the server died
        "waiting for the rollout servers",
        "all rollout servers respond",
        "nothing was lost",
        f"finished {NUM_STEPS}",
    ]
    told = [results[0].stdout.find(words) for words in story]
    assert told == sorted(told) and min(told) >= 0, results[0].stdout[-6000:]
    ledger = json.loads((folder / "restart" / "weights.json").read_text())
    assert server.get("/weight_version/").json()["weight_version"] == ledger["version"]
