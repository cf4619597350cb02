"""Faults of rollout servers and of the connection to them, with two ranks: each ends in recovery or a clean stop."""

import json
import shutil
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from tests.e2e.processes import Server, write_yaml
from tests.faults import proxy as faults
from tests.faults.learners import LearnerProcess, assert_clean_end, curves
from tests.faults.proxy import Proxy
from tools.launch import process_tree
from tools.make_demo import make_dataset
from utils.run.rollout_log import read_rollout_log
from utils.run.shutdown import STOPPED_STATUS

pytestmark = pytest.mark.e2e
BATCH = 4  # per rank, in two rounds: four slots for two ranks
LAUNCH = (sys.executable, "-m", "tools.launch")  # what `make train` runs
PER_STEP = 4  # calls of both ranks together
TIME_OUT_S = 6.0
LONG_TIME_OUT_S = 20.0  # for tests that never wait for it
END_S = 90.0  # from the fault to the end of all processes, even on a busy machine; more than all timeouts together


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("server_faults")
    make_dataset(folder / "data", num_train=32, num_val=1)
    return folder


@pytest.fixture(scope="module")
def lasting_server(folder, start_model) -> Iterator[Server]:
    server = Server(folder, start_model)
    try:
        yield server.wait_ready()
    finally:
        server.end()


@pytest.fixture
def server(lasting_server) -> Server:
    """One server for all tests, restarted where a test has ended it."""
    if lasting_server.process.poll() is not None:
        lasting_server.start_again()
    return lasting_server


@pytest.fixture
def proxy(server) -> Iterator[Proxy]:
    between = Proxy(server.url)
    yield between
    between.close()


def config_of(
    folder: Path,
    name: str,
    server: Server,
    url: str,
    time_out_s: float = TIME_OUT_S,
    max_steps: int = 4,
    save_steps: int = 1,
    **changes,
) -> Path:
    """Full fine-tuning in many small buckets, a checkpoint per step by default; the server is at `url`."""
    config = yaml.safe_load(server.config.read_text())
    matching = config["custom"]["extra"]["rollout_matching"]
    matching |= {"decode_batch_size": 4, "max_new_tokens": 48}
    connection = {"servers": [{"base_url": url, "group_port": server.group_port}], "timeout_s": time_out_s}
    matching["vllm"] |= {
        "server": connection,
        "sync": {"bucket_mib": 1, "timeout_s": time_out_s, "verify": "always"},
    }
    matching |= changes.pop("matching", {})
    config["training"] = {
        "output_dir": str(folder / name),
        "max_steps": max_steps,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-4,
        "save_steps": save_steps,
        "save_total_limit": 5,
    }
    return write_yaml(folder / f"{name}.yaml", config | changes)


@contextmanager
def learner_of(config: Path, *arguments: str, **options) -> Iterator[LearnerProcess]:
    learner = LearnerProcess(config, *arguments, **options)
    try:
        yield learner
    finally:
        learner.kill()


def assert_each_sample_answered_once(run: Path, num_steps: int) -> None:
    """Every step must have trained on all its samples, each with a whole answer."""
    lines = [line for line in read_rollout_log(run / "rollouts.jsonl") if line["phase"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1))
    for line in lines:
        answered = Counter()
        for call in line["calls"]:
            if call["outcome"] == "ok":
                first, number = call["first_request"], call["num_requests"]
                answered.update((call["rank"], request) for request in range(first, first + number))
        assert sorted(answered) == [(rank, request) for rank in (0, 1) for request in range(BATCH)], line
    assert max(value for _, value in curves(run)["rollout/failed"]) == 0


# ---------------------------------------------------------------------------------------------------------------------
# answers


def test_spoilt_answers_are_asked_for_again_and_nothing_is_lost_CON_3(folder, server, proxy):
    """CON-3, LOG-1: not JSON, half of it, one output too few, a connection reset in the middle of a response."""
    spoilt = [faults.not_json, faults.one_output_less, faults.half_of_it, faults.cut]
    for fault in spoilt:
        proxy.faults.extend([None, fault, None])
    with learner_of(config_of(folder, "spoilt", server, proxy.url, LONG_TIME_OUT_S)) as learner:
        assert learner.end() == 0, learner.output[-6000:]
    assert not proxy.faults and "waiting for the rollout servers" not in learner.output
    assert_each_sample_answered_once(folder / "spoilt", 4)
    calls = [call for line in read_rollout_log(folder / "spoilt" / "rollouts.jsonl") for call in line["calls"]]
    outcomes = [call["outcome"] for call in calls if call["outcome"] != "ok"]
    for words in ("not JSON: <html>", "2 requests got 1 answers", "not JSON: [{", "IncompleteRead|ConnectionReset"):
        assert any(word in outcome for word in words.split("|") for outcome in outcomes), (words, outcomes)
    assert len(outcomes) == len(spoilt)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (faults.another_version, "made with weights somebody:3, requested "),
        pytest.param(faults.another_prompt, "differs from the learner's at token 0", marks=pytest.mark.slow),
    ],
)
def test_an_answer_that_must_not_be_trained_on_ends_the_run_SYN_8_ROL_3(folder, server, proxy, fault, words):
    """SYN-8, ROL-3, LRN-5: of another version, or to another prompt: both ranks end with a report; the server lives."""
    proxy.faults.extend([None] * PER_STEP + [fault])
    with learner_of(config_of(folder, fault.__name__, server, proxy.url, LONG_TIME_OUT_S)) as learner:
        assert learner.wait_for(lambda: not proxy.faults), learner.output[-6000:]
        family = process_tree(learner.process.pid)
        learner.end(END_S)
    assert_clean_end(learner, family, words, folder / fault.__name__, step=1)
    assert server.get("/health/").status_code == 200


@pytest.mark.slow
def test_a_server_that_never_answers_well_ends_the_run_CON_3(folder, server, proxy):
    """CON-3, LRN-5: retried, split, given up; more samples are given up than `max_failed_fraction` allows."""
    proxy.faults.extend([None] * PER_STEP + [faults.not_json] * 1000)
    config = config_of(folder, "never", server, proxy.url, matching={"max_failed_fraction": 0.0})
    with learner_of(config) as learner:
        assert learner.wait_for(lambda: len(proxy.faults) < 1000), learner.output[-6000:]
        family = process_tree(learner.process.pid)
        learner.end(END_S)
    assert_clean_end(learner, family, "max_failed_fraction=0 allows; last: ", folder / "never", step=1)


# ---------------------------------------------------------------------------------------------------------------------
# servers that are killed or frozen


MOMENTS = {
    "idle": "/start_weight_update/",
    "generating": "/infer/",
    "syncing": "/update_weights/",
    "streaming": "/update_weights/",
}
DELAYS_S = {"generating": 0.02, "syncing": 1.0, "streaming": 0.01}


class Strike:
    """Do something to the server once, when the learner requests `path` for the `count`-th time.

    idle: before the request arrives. generating: while it runs. syncing: with the workers stopped before the buckets
    that the learner is sending. streaming: about when they arrive; a sync here takes 20 to 50 ms.
    """

    def __init__(self, server: Server, moment: str, count: int, strike: Callable[[], None]) -> None:
        self.server, self.moment, self.left, self.strike = server, moment, count, strike
        self.struck = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, path: str) -> None:
        with self._lock:
            self.left -= path == MOMENTS[self.moment]
            if self.left > 0 or self.struck.is_set() or path != MOMENTS[self.moment]:
                return
            if self.moment == "idle":
                return self._do()
            if self.moment == "syncing":
                for child in psutil.Process(self.server.process.pid).children(recursive=True):
                    child.suspend()
            threading.Timer(DELAYS_S[self.moment], self._do).start()

    def _do(self) -> None:
        self.strike()
        self.struck.set()


def freeze(server: Server) -> None:
    for process in process_tree(server.process.pid):
        process.suspend()


def thaw(server: Server) -> None:
    for process in process_tree(server.process.pid):
        process.resume()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_server_that_is_killed_and_started_again_costs_nothing_CON_4(folder, server, proxy):
    """CON-4, SYN-6, SYN-8: killed while idle, while generating and in the middle of a sync, in one run."""
    with learner_of(config_of(folder, "thrice", server, proxy.url, time_out_s=400.0)) as learner:
        for moment, count in (("idle", 2), ("generating", 2), ("syncing", 2)):
            proxy.on_request = Strike(server, moment, count, server.kill)
            assert learner.wait_for(proxy.on_request.struck.is_set), learner.output[-6000:]
            server.start_again()
        assert learner.end() == 0, learner.output[-6000:]
    assert learner.output.count("all rollout servers respond; opening") == 3, learner.output[-6000:]
    assert_each_sample_answered_once(folder / "thrice", 4)
    ledger = json.loads((folder / "thrice" / "weights.json").read_text())
    assert server.get("/weight_version/").json()["weight_version"] == ledger["version"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", list(MOMENTS))
@pytest.mark.parametrize("what", ["killed", "frozen"])
def test_a_server_that_does_not_come_back_ends_the_run_in_time_CON_4_CON_5_SYN_3_LRN_12(
    folder, server, proxy, moment, what
):
    """CON-4, CON-5, SYN-3, LRN-5, LRN-12: killed, or frozen for longer than all timeouts; both ranks end with a report,
    and save the finished step, although no checkpoint is due. A server that thaws is ready for the next run."""
    name = f"{what}_{moment}"
    count = PER_STEP + 1 if moment == "generating" else 2
    proxy.on_request = Strike(server, moment, count, server.kill if what == "killed" else lambda: freeze(server))
    with learner_of(config_of(folder, name, server, proxy.url, save_steps=0)) as learner:
        try:
            assert learner.wait_for(proxy.on_request.struck.is_set), learner.output[-6000:]
            family, start = process_tree(learner.process.pid), time.monotonic()
            learner.end(END_S)
            print(f"{name}: ended after {time.monotonic() - start:.1f} s")
        finally:
            thaw(server)
    assert_clean_end(learner, family, "not every rollout server could be reached", folder / name, step=1)
    if moment == "streaming":
        assert proxy.seen.count("/finish_weight_update/") == 1  # it struck before the second stream ended
    assert proxy.url in learner.output[learner.output.rindex("run /") :]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_sigterm_to_server_and_learner_at_once_saves_and_goes_on_LRN_12(folder, server, proxy):
    """LRN-12, LRN-5: what a scheduler does, while the second step is generated; `timeout_s` is minutes. The next run,
    started before its server, is stopped while it waits for it; the one after that goes on."""
    run, generating = folder / "preempted", PER_STEP + 1
    proxy.on_request = Strike(server, "generating", generating, server.process.terminate)
    config = config_of(folder, run.name, server, proxy.url, time_out_s=400.0, max_steps=3, save_steps=0)
    with learner_of(config, launcher=LAUNCH) as learner:
        assert learner.wait_for(proxy.on_request.struck.is_set), learner.output[-6000:]
        learner.process.terminate()
        start = time.monotonic()
        assert learner.end(END_S) == STOPPED_STATUS, learner.output[-6000:]
        print(f"ended {time.monotonic() - start:.1f} s after SIGTERM")
    words = learner.output[learner.output.rindex(f"run {run}: ") :]
    assert "stopped by SIGTERM after step 1 of 3, saved; interrupted: preparing step 1" in words, words
    assert f"newest complete checkpoint: {run / 'checkpoint-1'}" in words, words
    with learner_of(config, "--resume", "auto", launcher=LAUNCH) as learner:
        assert learner.wait_for(lambda: "waiting for rollout server" in learner.output), learner.output[-6000:]
        learner.process.terminate()
        assert learner.end(END_S) == STOPPED_STATUS, learner.output[-6000:]
    assert "stopped by SIGTERM before the first step" in learner.output
    server.start_again()
    with learner_of(config, "--resume", "auto") as learner:
        assert learner.end() == 0, learner.output[-6000:]
    assert_each_sample_answered_once(run, 3)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["generating", "syncing"])
def test_a_server_that_thaws_while_it_is_waited_for_is_used_again_CON_4_CON_5(folder, server, proxy, moment):
    """CON-4, CON-5: frozen for longer than `timeout_s`; the same process gets full weights, and nothing is lost."""
    name, boot_id = f"thaws_{moment}", server.get("/health/").json()["boot_id"]
    count = PER_STEP + 1 if moment == "generating" else 2
    proxy.on_request = Strike(server, moment, count, lambda: freeze(server))
    with learner_of(config_of(folder, name, server, proxy.url, time_out_s=20.0)) as learner:
        try:
            assert learner.wait_for(lambda: "waiting for the rollout servers, then" in learner.output), learner.output
        finally:
            thaw(server)
        assert learner.end() == 0, learner.output[-6000:]
    assert learner.output.count("done after recovery") == 1
    assert_each_sample_answered_once(folder / name, 4)
    assert server.get("/health/").json()["boot_id"] == boot_id


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [False, True])
def test_one_of_two_engines_killed_SRV_6_CON_4(folder, start_model, comes_back):
    """SRV-6, CON-4, LRN-5: the server says that it cannot generate; the run ends with that message, or continues once
    the operator has restarted the server."""
    server = Server(folder, start_model, vllm_data_parallel_size=2)
    name = f"engine_{comes_back}"
    try:
        server.wait_ready()
        proxy = Proxy(server.url)
        config = config_of(folder, name, server, proxy.url, time_out_s=400.0 if comes_back else TIME_OUT_S)
        engines = [child for child in server.children if "EngineCore" in " ".join(child.cmdline())]
        assert len(engines) == 2
        proxy.on_request = Strike(server, "generating", 3, engines[1].kill)
        with learner_of(config) as learner:
            assert learner.wait_for(proxy.on_request.struck.is_set), learner.output[-6000:]
            family = process_tree(learner.process.pid)
            if comes_back:
                server.kill()
                server.start_again()
                assert learner.end() == 0, learner.output[-6000:]
                assert "done after recovery" in learner.output
                return
            learner.end(END_S)
        assert server.process.poll() is None
        assert_clean_end(learner, family, "an engine process died; restart the server", folder / name, step=1)
    finally:
        proxy.close()
        server.end()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["generating", "syncing"])
def test_an_engine_that_hangs_while_the_front_answers_SRV_6_CON_5_SYN_3(folder, start_model, moment):
    """SRV-6, CON-5, SYN-3, LRN-5: one of two engines is stopped. The server says so within half of its `timeout_s`,
    during a sync within the learner's `sync.timeout_s`; then the run ends. Once the engine answers again, so does the
    server."""
    server_s, name = 20.0, f"hangs_{moment}"
    stuck_s = TIME_OUT_S if moment == "syncing" else server_s / 2
    server = Server(folder, start_model, vllm_data_parallel_size=2, timeout_s=server_s)
    proxy = Proxy(server.url)
    try:
        server.wait_ready()
        engines = [child for child in server.children if "EngineCore" in " ".join(child.cmdline())]
        assert len(engines) == 2
        count = 3 if moment == "generating" else 2  # one round per rank and step: two engines have twice the slots
        proxy.on_request = Strike(server, moment, count, engines[1].suspend)
        with learner_of(config_of(folder, name, server, proxy.url)) as learner:
            assert learner.wait_for(proxy.on_request.struck.is_set), learner.output[-6000:]
            family, start = process_tree(learner.process.pid), time.monotonic()
            answer = server.get("/health/")
            while answer.status_code == 200 and time.monotonic() < start + END_S:
                time.sleep(0.2)
                answer = server.get("/health/")
            noticed_s = time.monotonic() - start
            learner.end(END_S)
            print(f"{name}: noticed after {noticed_s:.1f} s, ended after {time.monotonic() - start:.1f} s")
        hangs = "an engine process has not answered for "
        assert answer.status_code == 503 and answer.json()["status"] == "dead" and hangs in answer.json()["reason"]
        assert stuck_s - 4 < noticed_s < stuck_s + 20
        assert_clean_end(learner, family, hangs, folder / name, step=1)
        assert proxy.url in learner.output[learner.output.rindex("run /") :]
        thaw(server)
        deadline = time.monotonic() + END_S
        while (status := server.get("/health/").json()["status"]) == "dead" and time.monotonic() < deadline:
            time.sleep(0.2)
        assert status == ("ok" if moment == "generating" else "dirty")
    finally:
        proxy.close()
        server.end()


# ---------------------------------------------------------------------------------------------------------------------
# before the first step


@pytest.mark.slow
def test_a_group_port_that_is_taken_ends_the_run_CON_1(folder, server, proxy):
    """CON-1: the port is named, with the ways out; the server, which was never told to meet there, is unchanged."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = config_of(folder, "taken", server, proxy.url)
        port = listener.getsockname()[1]
        write_yaml(config, yaml.safe_load(config.read_text().replace(str(server.group_port), str(port))))
        with learner_of(config) as learner:
            assert learner.end(200) != 0
    assert f"group port {port} on 127.0.0.1" in learner.output and "free it, or change group_port in" in learner.output
    assert "it ended before the first step" in learner.output[learner.output.rindex("run /") :]
    assert "/health/" in proxy.seen and "/init_communicator/" not in proxy.seen
    with learner_of(config_of(folder, "free_again", server, server.url)) as learner:
        assert learner.end() == 0, learner.output[-6000:]


@pytest.mark.slow
def test_a_server_with_another_model_is_refused_by_name_CON_4(folder, server, start_model):
    """CON-4: before anything is sent to it."""
    other = folder / "other_model"
    shutil.copytree(start_model, other)
    config = json.loads((other / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] += 1
    (other / "config.json").write_text(json.dumps(config))
    before = server.get("/health/").json()
    with learner_of(config_of(folder, "other", server, server.url, model={"path": str(other)})) as learner:
        assert learner.end() != 0
    last = learner.output[learner.output.rindex("run /") :]
    assert f"{server.url} serves another model than this run trains: {start_model}, model.path={other}" in last
    assert server.get("/health/").json() == before
