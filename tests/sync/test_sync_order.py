"""What WeightSync does when a server misbehaves. The server is a stand-in here, because a real one does not fail on
demand; everything that works is tested against the real one in tests/e2e."""

import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.e2e.processes import free_port
from utils.rollout.link import CallTimeout
from utils.sync.merged_weights import MergedWeights
from utils.sync.transports import GlooTransport
from utils.sync.weight_sync import Probe, WeightSync
from utils.sync.wire import tensor_digest

PORTS = free_port(), free_port()


class OneRank:
    """`utils.dist.Ranks` of a single learner, writing down when it fenced."""

    is_main, device = True, torch.device("cpu")

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def gather(self, value):
        self.events.append("fence")
        return [value]

    def raise_on_all_ranks(self, error, where) -> None:
        self.events.append("fence")
        if error is not None:
            raise RuntimeError(f"{where}: {error}") from error


class StandIn:
    """Server and transport in one: notes every call, and fails where told to."""

    world_sizes = [1, 2]
    ways_out = "  free the port"

    def __init__(self, weights: MergedWeights, fail_at: str = "", wrong: str = "") -> None:
        self.events: list[str] = []
        self.weights, self.fail_at, self.wrong = weights, fail_at, wrong
        self.sent = threading.Event()
        self.names: list[str] = []  # of the last update
        self._lock = threading.Lock()
        self.run_tokens: dict[int, str] = {}
        self.limits: dict[str, list[float]] = {}  # seconds that each call had
        self.start_s = 0.0  # that a start takes

    def url(self, index: int) -> str:
        return f"http://server{index}"

    def cut_posts(self, why: str) -> None:
        """No post waits here."""

    def health(self, index: int) -> dict:
        if index == 0:
            raise RuntimeError("no answer")
        return {"owner": "somebody"}

    def post(self, index: int, path: str, body: dict, timeout_s: float) -> dict:
        with self._lock:
            self.events.append(f"{index} {path}")
            self.limits.setdefault(path, []).append(timeout_s)
        if path == "/start_weight_update/":
            time.sleep(self.start_s)
        if path == self.fail_at and index == 1:
            raise ConnectionError(f"{self.url(index)}{path} refused")
        if path == "/update_weights/":
            assert self.sent.wait(5)
            self.names = body["names"]
            digests = {name: tensor_digest(tensor) for name, tensor in self.weights.tensors()}
            if self.wrong:
                digests[self.wrong] = "bad"
            digests = [digests] * self.world_sizes[index] if body["digest"] else []
            return {"digests": digests, "parameters": {name: [f"model.{name}"] for name in self.names}}
        if path == "/init_communicator/":
            return {"run_token": f"token {index}"}
        if path == "/probe/":
            return {"logprobs": [[None, -1.0, -2.0]] * 2, "prompt_token_ids": [3, 4, 4]}
        if path == "/finish_weight_update/":
            return {"missing": sorted(f"model.{e.name}" for e in self.weights.entries if e.name not in self.names)}
        return {}

    def open(self, addresses, world_sizes) -> None:
        self.events.append("open")

    def send(self, weights, entries, digest, check_servers) -> dict[str, str]:
        try:
            self.events.append("send")
            if self.fail_at == "send":
                raise TimeoutError("a bucket was not taken")
            return {n: tensor_digest(t) for n, t in weights.tensors(entries=entries)} if digest else {}
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
        [("127.0.0.1", port) for port in PORTS],
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


def test_the_calls_of_a_sync_have_its_seconds_together_SYN_3(weights):
    """SYN-3: a server that takes long to start and freezes then would hold the ranks for twice the limit."""
    server = StandIn(weights)
    server.start_s = 0.6
    sync_with(server, probe=Probe({}, [5, 6], lambda: np.array([-1.0, -2.0]))).sync("run:0")
    assert server.limits["/probe/"] == [5, 5]  # the weights are in force by then
    assert all(4.9 < limit <= 5 for limit in server.limits["/start_weight_update/"])
    for path in ("/update_weights/", "/finish_weight_update/"):
        assert len(server.limits[path]) == 2 and all(1 <= limit <= 4.4 for limit in server.limits[path]), path


@pytest.mark.parametrize(("on_running", "hints"), [("wait", True), ("abort", False)])
def test_a_start_that_takes_too_long_names_requests_that_are_waited_for_SYN_9(weights, on_running, hints):
    """SYN-9: the server is well, and the way out is in the config."""
    server = StandIn(weights)
    server.post = lambda *args: raise_timeout(args[1])
    sync = sync_with(server)
    sync.on_running = on_running
    with pytest.raises(RuntimeError, match="no answer within 5 s") as error:
        sync.sync("run:0")
    assert ("raise sync.timeout_s, or set async.on_sync: abort" in str(error.value)) is hints


def raise_timeout(path: str) -> None:
    raise CallTimeout(f"http://server{path}", "no answer within 5 s")


def test_a_sync_is_fence_send_fence_and_all_servers_take_part_at_once_SYN_2_SYN_11(weights):
    """SYN-2, SYN-11: one walk over the tensors for all servers; each has started before it receives, none is finished
    before the walk's end."""
    server = StandIn(weights)
    report = sync_with(server).sync("run:0")
    kinds = [event.split()[-1] for event in server.events]
    assert kinds[0] == "fence" and kinds[-1] == "fence"
    assert kinds.count("send") == 1 and kinds.count("/update_weights/") == 2
    for index in range(2):
        own = [event.split()[1] for event in server.events if event.startswith(f"{index} ")]
        assert own == ["/start_weight_update/", "/update_weights/", "/finish_weight_update/"]
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


def test_workers_that_wait_for_a_bucket_are_freed_when_the_walk_fails_SYN_3(weights):
    """SYN-3: their servers answer only then; the fault of this side is the one that is raised."""
    server = StandIn(weights, fail_at="send")
    server.close, server.sent.set = server.sent.set, lambda: None  # a server waits until the groups are closed
    with pytest.raises(RuntimeError, match="a bucket was not taken"):
        sync_with(server).sync("run:0")


def test_what_is_left_of_communicators_goes_before_they_are_opened_anew_SYN_3(weights):
    """Its stores have the ports that the servers are asked to come to."""
    server = StandIn(weights)
    sync_with(server).open()
    assert server.events[0] == "close" and "0 /init_communicator/" in server.events


def test_the_first_tensor_that_arrived_wrong_is_named_SYN_7(weights):
    """SYN-7: a digest that differs stops the run with server, worker and tensor."""
    with pytest.raises(RuntimeError, match=r"server0, worker 0, tensor 1\.weight"):
        sync_with(StandIn(weights, wrong="1.weight")).sync("run:0")


def test_a_worker_that_reports_no_digests_is_no_proof_SYN_7(weights, monkeypatch):
    """SYN-7."""
    server = StandIn(weights)
    post = server.post
    monkeypatch.setattr(server, "post", lambda *args: post(*args) | {"digests": []})
    with pytest.raises(RuntimeError, match="server0: 0 workers reported digests"):
        sync_with(server).sync("run:0")


def test_verify_first_checks_the_first_sync_only_SYN_7(weights):
    """SYN-7: `first` and `off` do not ask for digests later."""
    server = StandIn(weights)
    sync = sync_with(server)
    assert sync.sync("run:0").verified
    server.wrong = "1.weight"  # would be noticed, if it were looked at
    assert not sync.sync("run:1").verified
    server.wrong, sync.probe = "", Probe({}, [5, 6], lambda: np.array([-1.0, -2.0]))
    sync.probe.noise = 0.5
    sync.open()  # after servers were lost: they may have been restarted
    assert sync.probe.noise is None
    assert sync.sync("run:2").verified and not sync.sync("run:3").verified
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
    """SYN-7: in bf16 the mean gap may be 0.25 at the first sync, and then three times what it was there, at least
    0.1 and at most 0.4, which is less than a lost group of weights leaves; not-a-number never passes."""
    ours = np.array([-1.0, -2.0])
    for first, bound in ((0.05, 0.15), (0.01, 0.1), (0.2, 0.4)):
        probe = Probe({}, [1, 2], lambda: None)
        for theirs in ([-1.0, -2.52], [float("nan"), -2.0]):
            with pytest.raises(RuntimeError, match="here: .* allowed 0.25"):
                probe.check(ours, theirs, torch.bfloat16, "here")
        probe.check(ours, ours - first, torch.bfloat16, "here")
        probe.check(ours, ours + 0.99 * bound, torch.bfloat16, "here")
        with pytest.raises(RuntimeError, match=f"here: .* allowed {bound}"):
            probe.check(ours, ours + 1.01 * bound, torch.bfloat16, "here")


def test_an_engine_that_makes_another_prompt_is_found_at_the_first_sync_FAM_3_ROL_3(weights):
    """FAM-3, ROL-3: on every server, before the first rollout; later syncs do not ask again."""
    ours, server = np.array([-1.0, -2.0]), StandIn(weights)
    sync = sync_with(server, verify="always", probe=Probe({}, [5, 6], lambda: ours, [({}, [3, 4, 4])] * 2))
    counts = []
    for step in range(2):
        sync.sync(f"run:{step}")
        counts.append([server.events.count(f"{index} /probe/") for index in range(2)])
    assert counts == [[3, 3], [4, 4]]
    wrong = Probe({}, [5, 6], lambda: ours, [({}, [3, 4])])
    with pytest.raises(RuntimeError, match="server0: the engine's prompt has 3 tokens, the learner's 2; .* the end"):
        sync_with(StandIn(weights), probe=wrong).sync("run:0")


def test_a_closed_port_is_explained_CON_1(weights):
    """CON-1: opening says which port and what to do."""
    server = StandIn(weights, fail_at="/init_communicator/")
    with pytest.raises(RuntimeError) as raised:
        sync_with(server).open()
    for words in (f"group port {PORTS[1]}", "server1/init_communicator/ refused", "Ways out:\n  free the port"):
        assert words in str(raised.value)
    assert "open" not in server.events  # nobody to meet: that would take a whole time-out


def test_a_server_that_refuses_ends_the_opening_of_the_others_CON_1(weights, monkeypatch):
    """CON-1: these would wait for a learner that does not come; only the refusal is told."""
    server, cut = StandIn(weights, fail_at="/init_communicator/"), threading.Event()
    post = server.post

    def waits(index: int, *args: Any) -> dict:
        if index == 0:
            assert cut.wait(20)
            raise ConnectionError("given up")
        return post(index, *args)

    monkeypatch.setattr(server, "post", waits)
    monkeypatch.setattr(server, "cut_posts", lambda why: cut.set())
    with pytest.raises(RuntimeError, match="server1/init_communicator/ refused") as raised:
        sync_with(server).open()
    assert cut.is_set() and "given up" not in str(raised.value)


def test_opening_is_bounded_by_its_own_limit_on_both_sides_CFG_8(weights, monkeypatch):
    """CFG-8: not by that of a sync; both sides give up early enough for the servers' answers to arrive in time."""
    server, calls = StandIn(weights), []
    post = server.post
    monkeypatch.setattr(server, "post", lambda *args: (calls.append(args), post(*args))[1])
    sync = WeightSync(
        weights, OneRank([]), server, [("127.0.0.1", port) for port in PORTS], run_id="run", bucket_bytes=1,
        timeout_s=300, open_timeout_s=9,
    )  # fmt: skip
    assert (sync.transport.timeout_s, sync.transport.open_timeout_s) == (300, 7)
    sync.transport = server
    sync.open()
    for _, path, body, limit_s in calls:
        assert path == "/init_communicator/" and limit_s == 9
        assert (body["timeout_s"], body["open_timeout_s"]) == (300, 7)


def test_a_rendezvous_that_fails_names_the_servers_CFG_8(weights, monkeypatch):
    """CFG-8, CON-1: which server's group port, and who did not come to it."""
    server = StandIn(weights)
    sync = sync_with(server)
    sync.transport = GlooTransport(1, 60.0, 0.5)
    with pytest.raises(RuntimeError) as raised:
        sync.open()
    assert f"group port {PORTS[1]} on 127.0.0.1, for http://server1" in str(raised.value)
    assert f"this side: timed out: 0 of 1 workers came to 127.0.0.1:{PORTS[0]} in" in str(raised.value)
    sync.transport.close()


def test_a_failed_opening_frees_its_port_whoever_keeps_the_error_CON_1(monkeypatch):
    """CON-1: the next attempt needs the port."""

    def fail(*args):
        raise RuntimeError("a worker left")

    monkeypatch.setattr("vllm.distributed.utils.init_gloo_process_group", fail)
    port = free_port()
    with pytest.raises(RuntimeError, match="a worker left") as kept:
        GlooTransport(1, 60.0, 9.0).open([("127.0.0.1", port)], [0])
    socket.create_server(("127.0.0.1", port)).close()
    assert kept.traceback


def test_a_group_port_that_is_taken_is_found_before_any_server_is_called_CON_1(weights):
    """CON-1: a server that was called would wait at that port, for the process that has it, until its time-out."""
    server = StandIn(weights)
    with socket.create_server(("127.0.0.1", PORTS[1])), pytest.raises(RuntimeError) as raised:
        sync_with(server).open()
    for words in (f"group port {PORTS[1]} on 127.0.0.1", "in use", "http://server1 belongs to run somebody"):
        assert words in str(raised.value)
    assert not [event for event in server.events if "/init_communicator/" in event]


@pytest.fixture
def tuned() -> MergedWeights:
    """Only `1.weight` is trained; its bias lives in the same module."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).requires_grad_(False)
    model[1].weight.requires_grad_(True)
    return MergedWeights(model)


def test_after_the_first_sync_only_what_can_change_is_sent_with_its_module_SYN_6(tuned):
    """SYN-6: and the report counts what was sent."""
    server = StandIn(tuned)
    sync = sync_with(server)
    full = sync.sync("run:0")
    assert server.names == ["0.weight", "0.bias", "1.weight", "1.bias"] and full.num_tensors == 4
    partial = sync.sync("run:1")
    assert server.names == ["1.weight", "1.bias"]
    assert (partial.num_tensors, partial.num_bytes) == (2, 4 * (6 + 2))


def test_tensors_larger_than_a_bucket_travel_last(tuned):
    """Nothing can be loaded before the first bucket has arrived whole."""
    server = StandIn(tuned)
    sync = sync_with(server)
    sync.bucket_bytes = 32  # the first layer's weight has 48 bytes
    sync.sync("run:0")
    assert server.names == ["0.bias", "1.weight", "1.bias", "0.weight"]


def test_a_communicator_that_was_opened_again_gets_everything_SYN_6(tuned):
    """SYN-6: the server at its other end may be a new one."""
    server = StandIn(tuned)
    sync = sync_with(server)
    sync.open()
    assert [sync.sync(f"run:{step}").num_tensors for step in range(3)] == [4, 2, 2]
    sync.open()
    assert [sync.sync(f"run:{step}").num_tensors for step in range(2)] == [4, 2]


@pytest.mark.parametrize("fail_at", ["/start_weight_update/", "/update_weights/", "send", "/finish_weight_update/"])
def test_after_a_failed_sync_the_next_one_is_full_SYN_6(tuned, fail_at):
    """SYN-6, SYN-3: the servers may hold a mixture."""
    server = StandIn(tuned)
    sync = sync_with(server)
    sync.sync("run:0")
    server.fail_at = fail_at
    with pytest.raises(RuntimeError):
        sync.sync("run:1")
    server.fail_at = ""
    assert [sync.sync(f"run:{step}").num_tensors for step in (1, 2)] == [4, 2]


def test_a_probe_that_fails_makes_the_next_sync_full_SYN_6(tuned):
    """SYN-6, SYN-7."""
    server, ours = StandIn(tuned), np.array([-1.0, -2.0])
    sync = sync_with(server, verify="always", probe=Probe({}, [5, 6], lambda: ours))
    sync.sync("run:0")
    ours[0] = -3.0
    with pytest.raises(RuntimeError, match="probe"):
        sync.sync("run:1")
    ours[0] = -1.0
    assert sync.sync("run:1").num_tensors == 4


@pytest.mark.parametrize("change", [["model.0.bias"], ["model.0.bias", "model.0.weight", "model.1.bias"]])
def test_what_the_engine_lacks_must_be_what_was_left_out_SYN_6(tuned, change, monkeypatch):
    """SYN-6: less than was left out is as wrong as more: names are not what they were."""
    server = StandIn(tuned)
    sync = sync_with(server)
    sync.sync("run:0")
    post = server.post
    monkeypatch.setattr(server, "post", lambda i, path, *a: post(i, path, *a) | {"missing": change})
    with pytest.raises(RuntimeError, match="server0: parameters the engine did not get as sent"):
        sync.sync("run:1")


def test_a_full_sync_leaves_nothing_out_SYN_6(weights, monkeypatch):
    """SYN-6: e.g. a parameter that only the engine's model has."""
    server = StandIn(weights)
    post = server.post
    monkeypatch.setattr(server, "post", lambda i, path, *a: post(i, path, *a) | {"missing": ["model.extra"]})
    with pytest.raises(RuntimeError, match="server0: parameters the engine did not get as sent: .*model.extra"):
        sync_with(server).sync("run:0")


def test_verify_always_compares_tensors_that_were_not_sent_again_SYN_7(tuned):
    """SYN-7: the ledger of a worker is compared as a whole."""
    server = StandIn(tuned)
    sync = sync_with(server, verify="always")
    sync.sync("run:0")
    server.wrong = "0.weight"
    with pytest.raises(RuntimeError, match=r"server0, worker 0, tensor 0\.weight"):
        sync.sync("run:1")


def test_a_bucket_over_gloo_has_what_is_left_of_the_sync_SYN_11():
    """SYN-11: else the last bucket of a sync could take its whole limit once more."""
    transport, limits = GlooTransport(bucket_bytes=8, timeout_s=300.0, open_timeout_s=9.0), []
    group = SimpleNamespace(broadcast=lambda tensors, options: limits.append(options.timeout.total_seconds()))
    for left_s in (20.0, -5.0):
        transport.deadline = time.monotonic() + left_s
        transport.start(group, torch.zeros(2))
    assert limits == [pytest.approx(21.0, abs=0.5), pytest.approx(1.0, abs=0.01)]
