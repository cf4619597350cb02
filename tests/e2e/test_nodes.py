"""Learners on two nodes and a rollout server on a third one: network namespaces of this machine, with host names of
their own and nothing but a bridge between them (docs/scaling.md)."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.e2e.processes import ENVIRONMENT, ROOT, START_S, alive, config_of, write_yaml
from tools.launch import process_tree
from tools.make_demo import make_dataset
from utils.run.rollout_log import read_rollout_log

pytestmark = pytest.mark.e2e
TOKEN, INTERFACE, SERVER_URL = "a-token-for-the-test", "eth0", "http://10.0.0.3:8000"
SET = {"GLOO_SOCKET_IFNAME": INTERFACE, "ROLLOUT_SERVER_TOKEN": TOKEN}


@dataclass
class Node:
    """A network namespace; processes started in it see its host name and its network only."""

    name: str
    address: str
    namespace: str
    processes: list[subprocess.Popen] = field(default_factory=list)

    def start(
        self, command: list[str], log: Path, environment: dict[str, str], hidden: Path | None = None
    ) -> subprocess.Popen:
        """Start a program on this node, which sees an empty folder in place of `hidden`."""
        script = f"hostname {self.name} && " + (f"mount -t tmpfs none {hidden} && " if hidden else "") + 'exec "$@"'
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "--mount", "sh", "-c", script, "sh"]
        environment = ENVIRONMENT | {"VLLM_HOST_IP": self.address} | environment
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*inside, *command], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
            )
        self.processes.append(process)
        return process

    def bytes_sent(self) -> int:
        path = f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"
        return int(run("ip", "netns", "exec", self.namespace, "cat", path))

    def end(self) -> None:
        """Kill what was started here and has not ended."""
        family: list[psutil.Process] = [one for process in self.processes for one in process_tree(process.pid)]
        for process in alive(family):
            process.kill()
        for process in self.processes:
            process.wait()


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    """Two nodes for learners and one for the server, whose interface is the bridge between all three."""
    if missing := [program for program in ("ip", "unshare", "hostname", "mount") if not shutil.which(program)]:
        pytest.skip(f"{', '.join(missing)} (iproute2, util-linux, hostname) are not installed")
    unique = time.monotonic_ns() % 10**9
    nodes = [Node(f"node-{x}", f"10.0.0.{i}", f"test-{unique}-{x}") for i, x in enumerate("abs", 1)]
    made: list[Node] = []
    try:
        for node in nodes:
            run("ip", "netns", "add", node.namespace)
            made.append(node)
        connect(*nodes)
        run("ip", "netns", "exec", nodes[0].namespace, "unshare", "--uts", "--mount", "hostname", nodes[0].name)
    except subprocess.CalledProcessError as error:
        remove(made)
        pytest.skip(f"network namespaces are not allowed here: {' '.join(error.cmd)}: {error.stderr.strip()}")
    try:
        yield nodes
    finally:
        remove(made)


def connect(first: Node, second: Node, server: Node) -> None:
    """Give every node its address on one bridge."""
    run("ip", "-n", server.namespace, "link", "add", INTERFACE, "type", "bridge")
    for node in (first, second):
        port = ["peer", "name", node.name, "netns", server.namespace]
        run("ip", "-n", node.namespace, "link", "add", INTERFACE, "type", "veth", *port)
        run("ip", "-n", server.namespace, "link", "set", node.name, "master", INTERFACE, "up")
    for node in (first, second, server):
        run("ip", "-n", node.namespace, "address", "add", f"{node.address}/24", "dev", INTERFACE)
        for name in ("lo", INTERFACE):
            run("ip", "-n", node.namespace, "link", "set", name, "up")


def remove(nodes: list[Node]) -> None:
    for node in nodes:
        node.end()
    for node in nodes:
        run("ip", "netns", "delete", node.namespace)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("nodes")
    make_dataset(folder / "data", num_train=24, num_val=1)
    return folder


def write_config(folder: Path, name: str, model: Path) -> Path:
    """A config for server and learners; the server listens on its node's address."""
    config = config_of(folder, model, SERVER_URL, 8001, {"allow_remote": True}, timeout_s=120.0)
    config["custom"]["extra"]["rollout_matching"] |= {"decode_batch_size": 4, "max_new_tokens": 16}
    config["training"] = {
        "output_dir": str(folder / name),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "gradient_checkpointing": False,
        "rank_timeout_s": 120.0,
    }
    return write_yaml(folder / f"{name}.yaml", config)


def train(
    nodes: list[Node], config: Path, environments: list[dict[str, str]], hidden: Path | None = None
) -> list[tuple[int, str]]:
    """Start one rank on each of the two learner nodes, as docs/scaling.md does without ssh, and wait for both.

    Args:
        environments: variables of each node.
        hidden: a folder that the second node does not share.

    Returns: exit status and output of each node.
    """
    hosts = config.with_suffix(".hosts")
    hosts.write_text("".join(f"{node.name} slots=1\n" for node in nodes[:2]))
    logs, processes = [config.with_suffix(f".{node.name}.log") for node in nodes[:2]], []
    for rank, (node, log, environment) in enumerate(zip(nodes[:2], logs, environments, strict=True)):
        command = [sys.executable, "-m", "tools.launch", "--hostfile", str(hosts), "--no_ssh", "--node_rank", str(rank)]
        command += ["--master_addr", nodes[0].address, "--master_port", "29500", "train_stage2.py", "--config"]
        processes.append(node.start([*command, str(config)], log, environment, hidden if rank == 1 else None))
    try:
        statuses = [process.wait(timeout=START_S) for process in processes]
    except subprocess.TimeoutExpired:
        raise AssertionError("\n".join(log.read_text()[-4000:] for log in logs)) from None
    return [(status, log.read_text()) for status, log in zip(statuses, logs, strict=True)]


def test_two_nodes_train_with_a_server_on_a_third_SRV_3(folder, start_model, nodes):
    """SRV-3: three steps, over Gloo: ranks on both nodes ask the server, which wants a token, and get its answers."""
    config, log = write_config(folder, "run", start_model), folder / "server.log"
    server = nodes[2].start([sys.executable, "rollout_server.py", "--config", str(config)], log, SET)
    deadline = time.monotonic() + START_S
    while "rollout server: ready on" not in log.read_text():
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.3)
    before = [node.bytes_sent() for node in nodes]
    ended = train(nodes, config, [SET, SET])
    assert [status for status, _ in ended] == [0, 0], [output[-4000:] for _, output in ended]
    lines = read_rollout_log(folder / "run" / "rollouts.jsonl")
    assert [(line["step"], line["weight_version"][-2:]) for line in lines] == [(1, ":0"), (2, ":1"), (3, ":2")]
    assert all({call["rank"] for call in line["calls"] if call["outcome"] == "ok"} == {0, 1} for line in lines)
    assert (folder / "run" / "run.lock").read_text().endswith(" on node-a")
    assert "node_rank=1" in ended[1][1] and (folder / "run" / "checkpoint-3" / "state" / "rank_00001.pt").exists()
    # Each node sent what only it has: weights and gradients, gradients, answers.
    sent = [node.bytes_sent() - count for node, count in zip(nodes, before, strict=True)]
    assert min(sent[:2]) > 1 << 20 and sent[2] > 1 << 12, sent
    assert not [*(folder / "run").glob(".seen*")]
    assert all(TOKEN not in output for _, output in ended) and TOKEN not in log.read_text()


def test_a_rank_without_the_token_is_named_before_the_start_SRV_3(folder, start_model, nodes):
    """SRV-3: the second node did not get it; both ranks end with one message, and no server is asked."""
    config = write_config(folder, "no-token", start_model)
    ended = train(nodes, config, [SET, {"GLOO_SOCKET_IFNAME": INTERFACE, "ROLLOUT_SERVER_TOKEN": ""}])
    assert [status for status, _ in ended] == [2, 2], [output[-4000:] for _, output in ended]
    reason = f"{SERVER_URL} is not on loopback and requires a token; "
    message = f"ROLLOUT_SERVER_TOKEN: not set for rank 1 on node-b, but {reason}"
    assert "".join(output for _, output in ended).count(message) == 1 and message in ended[0][1]
    assert not any("Traceback" in output for _, output in ended)


def test_a_run_directory_that_nodes_do_not_share_is_refused_LRN_5(folder, start_model, nodes):
    """LRN-5: each rank writes its part of a checkpoint there, and reads those of others."""
    config = write_config(folder, "not-shared", start_model)
    (folder / "not-shared").mkdir()
    ended = train(nodes, config, [SET, SET], hidden=folder / "not-shared")
    assert [status for status, _ in ended] == [2, 2], [output[-4000:] for _, output in ended]
    message = f"training.output_dir={folder / 'not-shared'}: rank 1 on node-b does not see what rank 0 writes there; "
    assert "".join(output for _, output in ended).count(message) == 1 and message in ended[0][1]
    assert [path.name for path in (folder / "not-shared").iterdir()] == ["run.lock"]


def test_a_node_that_others_cannot_reach_says_so(folder, start_model, nodes):
    """The first node's name leads nowhere, the second one's interface is not there; each tells its own."""
    config = write_config(folder, "no-interface", start_model)
    given = [SET | {"GLOO_SOCKET_IFNAME": name} for name in ("", "ib7")]
    ended = train(nodes, config, given)
    assert [status for status, _ in ended] == [2, 2], [output[-4000:] for _, output in ended]
    reasons = ("its host name resolves to loopback or not at all", "GLOO_SOCKET_IFNAME=ib7 is not here")
    for node, (_, output), reason in zip(nodes[:2], ended, reasons, strict=True):
        message = f"node {node.name} cannot be reached by the other nodes: {reason}; set GLOO_SOCKET_IFNAME to one of "
        assert output.count(f"{message}{INTERFACE} (docs/scaling.md)") == 1, output[-4000:]
