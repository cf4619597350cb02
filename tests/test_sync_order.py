"""What WeightSync does when a server misbehaves. The server is a stand-in here, because a real one does not fail on
demand; everything that works is tested against the real one in tests/e2e."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

from utils.weight_sync import GlooTransport, MergedWeights, Probe, WeightSync
from utils.wire import tensor_digest


class OneRank:
    """`utils.dist.Ranks` of a single learner, writing down when it fenced."""

    is_main, device = True, torch.device("cpu")

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def fence(self) -> None:
        self.events.append("fence")

    def raise_together(self, error, where) -> None:
        self.events.append("fence")
        if error is not None:
            raise RuntimeError(f"{where}: {error}") from error


class StandIn:
    """Server and transport in one: notes every call, and fails where told to."""

    world_sizes = [1, 2]

    def __init__(self, weights: MergedWeights, fail_at: str = "", wrong: str = "") -> None:
        self.events: list[str] = []
        self.weights, self.fail_at, self.wrong = weights, fail_at, wrong
        self.sent = threading.Event()
        self._lock = threading.Lock()

    def url(self, index: int) -> str:
        return f"http://server{index}"

    def post(self, index: int, path: str, body: dict, timeout_s: float) -> dict:
        with self._lock:
            self.events.append(f"{index} {path}")
        if path == self.fail_at and index == 1:
            raise ConnectionError(f"{self.url(index)}{path} refused")
        if path == "/update_weights/":
            assert self.sent.wait(5)
            digests = {name: tensor_digest(tensor) for name, tensor in self.weights.tensors()}
            if self.wrong:
                digests[self.wrong] = "bad"
            return {"digests": [digests] * self.world_sizes[index]}
        if path == "/probe/":
            return {"logprobs": [[None, -1.0, -2.0]] * 2}
        return {"missing": []}

    def open(self, addresses, world_sizes) -> None:
        self.events.append("open")

    def send(self, weights, digest, alive) -> dict[str, str]:
        try:
            self.events.append("send")
            if self.fail_at == "send":
                raise TimeoutError("a bucket was not taken")
            return {name: tensor_digest(tensor) for name, tensor in weights.tensors()} if digest else {}
        finally:
            self.sent.set()

    def close(self) -> None:
        self.events.append("close")


@pytest.fixture
def weights() -> MergedWeights:
    torch.manual_seed(0)
    return MergedWeights(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))


def sync_with(server: StandIn, verify: str = "first", probe: Probe | None = None) -> WeightSync:
    sync = WeightSync(
        server.weights,
        OneRank(server.events),
        server,
        [("127.0.0.1", 1), ("127.0.0.1", 2)],
        run_id="run",
        bucket_bytes=1 << 20,
        timeout_s=5,
        open_timeout_s=5,
        verify=verify,
        probe=probe,
    )
    assert isinstance(sync.transport, GlooTransport)
    sync.transport = server
    return sync


def test_a_sync_is_fence_send_fence_and_all_servers_take_part_at_once_SYN_2_SYN_11(weights):
    """SYN-2, SYN-11: every server has started before the one walk over the tensors, none is finished before its end."""
    server = StandIn(weights)
    report = sync_with(server).sync("run:0")
    kinds = [event.split()[-1] for event in server.events]
    assert kinds[0] == "fence" and kinds[-1] == "fence"
    assert kinds.count("send") == 1 and kinds.count("/update_weights/") == 2
    assert max(i for i, k in enumerate(kinds) if k == "/start_weight_update/") < kinds.index("send")
    assert kinds.index("send") < min(i for i, k in enumerate(kinds) if k == "/finish_weight_update/")
    assert report.version == "run:0" and report.num_bytes == 4 * sum(p.numel() for p in _parameters(weights))


def _parameters(weights: MergedWeights) -> list[torch.Tensor]:
    return [entry.weight for entry in weights.entries]


@pytest.mark.parametrize("fail_at", ["/start_weight_update/", "/update_weights/", "send", "/finish_weight_update/"])
def test_a_failure_anywhere_raises_with_version_and_server_SYN_3(weights, fail_at):
    """SYN-3: the fence is reached whatever failed, and the error says where."""
    server = StandIn(weights, fail_at=fail_at)
    with pytest.raises(RuntimeError, match="run:7") as raised:
        sync_with(server).sync("run:7")
    assert "server1" in str(raised.value) or fail_at == "send"
    assert {"0 /abort_weight_update/", "1 /abort_weight_update/", "close"} <= set(server.events)


def test_the_first_tensor_that_arrived_wrong_is_named_SYN_7(weights):
    """SYN-7: a digest that differs stops the run with server, worker and tensor."""
    with pytest.raises(RuntimeError, match=r"server0, worker 0, tensor 1\.weight"):
        sync_with(StandIn(weights, wrong="1.weight")).sync("run:0")


def test_verify_first_checks_the_first_sync_only_SYN_7(weights):
    """SYN-7: `first` and `off` do not ask for digests later."""
    server = StandIn(weights)
    sync = sync_with(server)
    assert sync.sync("run:0").verified
    server.wrong = "1.weight"  # would be noticed, if it were looked at
    assert not sync.sync("run:1").verified
    assert not sync_with(StandIn(weights, wrong="1.weight"), verify="off").sync("run:0").verified


def test_an_engine_that_computes_otherwise_is_found_by_the_probe_SYN_7(weights):
    """SYN-7, second step: 1e-3 in float32, per token, on every replica."""
    ours = np.array([-1.0, -2.0])
    good = Probe({}, [5, 6], lambda: ours + 5e-4)
    sync_with(StandIn(weights), probe=good).sync("run:0")
    bad = Probe({}, [5, 6], lambda: ours + np.array([0.0, 0.01]))
    with pytest.raises(RuntimeError, match="server0, replica 0: log-probabilities of the probe are off by 0.01"):
        sync_with(StandIn(weights), probe=bad).sync("run:0")


def test_a_probe_in_half_precision_is_judged_on_average_SYN_7():
    """SYN-7: the stated bound for bf16 is a mean of 0.05; not-a-number never passes."""
    probe = Probe({}, [1, 2], lambda: None)
    probe.check(np.array([-1.0, -2.0]), [-1.08, -2.0], torch.bfloat16, "here")
    for theirs in ([-1.2, -2.0], [float("nan"), -2.0]):
        with pytest.raises(RuntimeError, match="here"):
            probe.check(np.array([-1.0, -2.0]), theirs, torch.bfloat16, "here")


def test_a_closed_port_is_explained_CON_1(weights):
    """CON-1: opening says which port and what to do."""
    server = StandIn(weights, fail_at="/init_communicator/")
    with pytest.raises(RuntimeError) as raised:
        sync_with(server).open()
    for words in ("group port 2", "server1/init_communicator/ refused", "RM.rollout_backend: hf"):
        assert words in str(raised.value)
