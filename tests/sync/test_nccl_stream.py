"""SYN-1, SYN-3, SYN-6, SYN-7, SYN-11: `NcclTransport` and the receiving engine between processes, over the emulated
NCCL (tests/emulated_nccl), which blocks, cannot time out and ends an aborted call without an error, like the real one.
"""

import signal
import threading
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from datetime import timedelta
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from tests.e2e.processes import free_port  # noqa: E402
from tests.emulated_nccl import emulated, library, marks  # noqa: E402
from tests.emulated_nccl.peers import Peer  # noqa: E402
from tests.sync.nccl_ends import BUCKET_BYTES, NUM_BUCKETS, POISONED, Net, receiver, sender  # noqa: E402
from utils.sync.merged_weights import MergedWeights  # noqa: E402
from utils.sync.transports import NcclTransport  # noqa: E402
from utils.sync.wire import tensor_digest  # noqa: E402

TIMEOUT_S = 3.0  # of a sync here
SLACK_S = 2.5  # two busy cores
READY_S = 10.0  # SYN-3: from a failure to a new communicator


class Receiver:
    """A worker process; `call` sends it a step and returns the answer to come, as a server's HTTP call would."""

    def __init__(self) -> None:
        self.peer = Peer(receiver)
        self.answers: list[Future] = []
        self.halves: list[tuple[int, float]] = []  # broadcasts of which half has arrived, and when
        self.said = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                kind, *what = self.peer.connection.recv()
            except (EOFError, OSError):
                for answer in self.answers:
                    answer.set_exception(ConnectionError("the server is gone"))
                return
            with self.said:
                if kind == "half":
                    self.halves.append((what[0], time.monotonic()))
                elif kind == "done":
                    self.answers.pop(0).set_result(what[1])
                else:
                    self.answers.pop(0).set_exception(RuntimeError(f"{what[0]} failed: {what[1]}"))
                self.said.notify_all()

    def call(self, step: str, **payload: Any) -> Future:
        self.answers.append(Future())
        answer = self.answers[-1]
        self.peer.connection.send((step, payload))
        return answer

    def do(self, step: str, within_s: float = 30.0, **payload: Any) -> Any:
        return self.call(step, **payload).result(within_s)

    def wait_half(self, index: int) -> float:
        """Wait until half of the broadcast is here; return the time."""
        with self.said:
            assert self.said.wait_for(lambda: any(number == index for number, _ in self.halves), 20)
            return max(moment for number, moment in self.halves if number == index)


@pytest.fixture(params=["launch returns", "launch blocks"])
def manner(request, monkeypatch):
    monkeypatch.setenv(library.LAUNCH_BLOCKS, str(int(request.param == "launch blocks")))


@pytest.fixture(autouse=True)
def nccl(tmp_path, monkeypatch):
    emulated(monkeypatch, tmp_path)
    yield
    assert not marks(tmp_path, "violation") and marks(tmp_path, "used")


@pytest.fixture
def receivers():
    both = [Receiver(), Receiver()]
    yield both
    for each in both:
        each.peer.end()


@pytest.fixture
def weights() -> MergedWeights:
    return MergedWeights(Net(seed=0))


def in_time(limit_s: float, call, *args: Any) -> Any:
    """Return what `call` returns, or raise what it raises; fail where it blocks for longer."""
    outcome = Future()

    def run() -> None:
        try:
            outcome.set_result(call(*args))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    assert wait_for([outcome], limit_s).done, f"still blocked after {limit_s} s"
    return outcome.result()


def init_info(port: int, timeout_s: float = TIMEOUT_S, world_size: int = 2) -> dict[str, Any]:
    return {
        "master_address": "127.0.0.1",
        "master_port": port,
        "world_size": world_size,
        "rank_offset": 1,
        "bucket_bytes": BUCKET_BYTES,
        "timeout_s": timeout_s,
        "open_timeout_s": timeout_s,
    }


def open_all(receivers: list[Receiver], timeout_s: float = TIMEOUT_S, port: int | None = None) -> NcclTransport:
    transport = NcclTransport(BUCKET_BYTES, timeout_s, timeout_s)
    addresses = [("127.0.0.1", port or free_port()) for _ in receivers]
    opening = [
        each.call("init", **init_info(port, timeout_s)) for each, (_, port) in zip(receivers, addresses, strict=True)
    ]
    in_time(READY_S, transport.open, addresses, [1] * len(receivers))
    for answer in opening:
        answer.result(READY_S)
    return transport


def update_info(entries) -> dict[str, Any]:
    return {
        "names": [entry.name for entry in entries],
        "dtype_names": ["float32"] * len(entries),
        "shapes": [list(entry.shape) for entry in entries],
        "digest": True,
    }


def start_update(receivers: list[Receiver], entries) -> list[Future]:
    for each in receivers:
        each.do("start")
    return [each.call("update", **update_info(entries)) for each in receivers]


def raise_early(receiving: list[Future]):
    def check() -> None:
        for answer in receiving:
            if answer.done():
                answer.result()

    return check


def sync(transport: NcclTransport, receivers: list[Receiver], weights: MergedWeights, entries=None) -> None:
    """One whole sync, as `WeightSync` drives it; both ends must agree on every digest."""
    entries = entries or weights.entries
    receiving = start_update(receivers, entries)
    digests = in_time(READY_S, transport.send, weights, entries, True, raise_early(receiving))
    assert digests == {entry.name: tensor_digest(entry.weight) for entry in entries}
    for each, answer in zip(receivers, receiving, strict=True):
        assert answer.result(READY_S)["digests"].items() >= digests.items()
        assert len(each.do("finish")) == len(weights.entries) - len(entries)


def assert_holds(receiver: Receiver, weights: MergedWeights) -> None:
    held = receiver.do("weights")
    assert held.keys() == {entry.name for entry in weights.entries}
    assert all(torch.equal(held[entry.name], entry.weight) for entry in weights.entries)


def assert_old_or_new(receiver: Receiver, old: dict[str, torch.Tensor], weights: MergedWeights) -> None:
    """SYN-3: no tensor of the failed update is in force that had not arrived."""
    for entry in weights.entries:
        held = receiver.do("weights")[entry.name]
        assert not (held == POISONED).any(), entry.name
        assert torch.equal(held, old[entry.name]) or torch.equal(held, entry.weight), entry.name


def assert_ready_again(
    receivers: list[Receiver], weights: MergedWeights, since: float, port: int | None = None
) -> None:
    """The server's abort, a new communicator and a full sync, in time."""
    for each in receivers:
        each.do("abort", READY_S)
    transport = open_all(receivers, port=port)
    took_s = time.monotonic() - since
    assert took_s < READY_S, took_s
    sync(transport, receivers, weights)
    for each in receivers:
        assert_holds(each, weights)
    transport.close()


# ---------------------------------------------------------------------------------------------------------------------
# when all goes well


def test_full_and_partial_updates_arrive_bit_for_bit_SYN_1_SYN_6_SYN_7(receivers, weights, manner):
    """SYN-1, SYN-6, SYN-7: two rounds, on one communicator."""
    transport = open_all(receivers)
    for _ in range(2):
        for entries in (weights.entries, weights.entries[3:8]):
            with torch.no_grad():
                for entry in entries:
                    entry.weight.add_(torch.randn_like(entry.weight))
            sync(transport, receivers, weights, entries)
            for each in receivers:
                assert_holds(each, weights)
    transport.close()
    assert not any(each.do("alive") for each in receivers)  # its store went with it


def test_a_slow_server_does_not_keep_a_bucket_from_the_other_SYN_11(receivers, weights):
    """SYN-11: one holds the first bucket; meanwhile the other has got it."""
    transport = open_all(receivers)
    hold_s = 2.0
    receivers[0].do("strike", at=0, number=None, hold_s=hold_s)
    receivers[1].do("strike", at=-1, number=None, hold_s=0.0)
    start = time.monotonic()
    sync(transport, receivers, weights)
    assert receivers[1].wait_half(0) - start < hold_s / 2
    assert receivers[1].wait_half(NUM_BUCKETS - 1) - start > hold_s
    transport.close()


# ---------------------------------------------------------------------------------------------------------------------
# a server that is lost


@pytest.mark.parametrize("at", [0, 2, NUM_BUCKETS - 1])
@pytest.mark.parametrize("fate", ["killed", "frozen"])
def test_a_server_lost_in_the_middle_of_a_bucket_SYN_3(receivers, weights, fate, at):
    """SYN-3: the sender raises in time, although its collective ends without an error; the other server, which waits
    for a bucket, is free again in time, as is the frozen one once it thaws; nothing half received is in force."""
    transport = open_all(receivers)
    lost, other = receivers
    old = [each.do("weights") for each in receivers]
    number = signal.SIGKILL if fate == "killed" else signal.SIGSTOP
    lost.do("strike", at=at, number=number, hold_s=0.0)
    other.do("strike", at=-1, number=None, hold_s=0.0)
    receiving = start_update(receivers, weights.entries)
    start = time.monotonic()
    with pytest.raises((ConnectionError, TimeoutError)) as raised:
        in_time(TIMEOUT_S + SLACK_S, transport.send, weights, weights.entries, True, raise_early(receiving))
    failed = time.monotonic()
    transport.close()
    if fate == "killed":
        assert "the server is gone" in str(raised.value) and failed - start < SLACK_S
    else:
        assert "sync.timeout_s" in str(raised.value) and failed - start >= TIMEOUT_S
    if at == NUM_BUCKETS - 1:
        receiving[1].result(READY_S)  # it has all buckets, but will not be told to use them
    else:
        with pytest.raises(RuntimeError, match="update failed"):
            receiving[1].result(READY_S)
    other.do("abort", READY_S)
    assert_old_or_new(other, old[1], weights)
    assert_ready_again([other], weights, failed)
    if fate == "frozen":
        lost.peer.signal(signal.SIGCONT)
        thawed = time.monotonic()
        lost.call("strike", at=-1, number=None, hold_s=0.0)
        if at == NUM_BUCKETS - 1:
            wait_for([receiving[0]], READY_S)  # the rest of the last bucket may have arrived while it was frozen
        else:
            with pytest.raises(RuntimeError, match="update failed"):
                receiving[0].result(READY_S)
        lost.do("abort", READY_S)
        assert_old_or_new(lost, old[0], weights)
        assert_ready_again([lost], weights, thawed)


@pytest.mark.parametrize("fate", ["killed", "frozen", "refuses"])
def test_a_server_lost_before_the_first_bucket_SYN_3(receivers, weights, fate, manner):
    """SYN-3: it never takes part; also where NCCL blocks the sender's call itself."""
    transport = open_all(receivers)
    lost, other = receivers
    (waiting,) = start_update([other], weights.entries)
    if fate == "refuses":
        refused = lost.call("update", **update_info(weights.entries))  # not started
    else:
        lost.peer.signal(signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
        refused = Future()
        if fate == "killed":
            refused.set_exception(ConnectionError("the server is gone"))
    start = time.monotonic()
    with pytest.raises((ConnectionError, TimeoutError, RuntimeError)):
        in_time(TIMEOUT_S + SLACK_S, transport.send, weights, weights.entries, True, raise_early([refused, waiting]))
    failed = time.monotonic()
    transport.close()
    assert fate == "frozen" or failed - start < SLACK_S
    with pytest.raises(RuntimeError, match="update failed"):
        waiting.result(READY_S)
    if fate == "frozen":
        lost.peer.signal(signal.SIGCONT)
    assert_ready_again([other] if fate == "killed" else [other, lost], weights, failed)


# ---------------------------------------------------------------------------------------------------------------------
# a learner that is lost


@pytest.fixture
def learner(receivers):
    """Start a learner process with an open communicator to both receivers; it syncs when asked."""
    learners = []

    def start(timeout_s: float = 60.0) -> Peer:
        addresses = [("127.0.0.1", free_port()) for _ in receivers]
        learners.append(Peer(sender, addresses, timeout_s))
        opening = [
            each.call("init", **init_info(port, timeout_s))
            for each, (_, port) in zip(receivers, addresses, strict=True)
        ]
        assert learners[-1].hear() == ("open",)
        for answer in opening:
            answer.result(READY_S)
        return learners[-1]

    yield start
    for each in learners:
        each.end()


@pytest.mark.parametrize("fate", ["killed", "frozen"])
def test_a_learner_lost_in_a_sync_leaves_the_servers_free_SYN_3(receivers, learner, weights, fate):
    """SYN-3: long before `sync.timeout_s`; the next learner's communicator is open in time."""
    one = learner()
    old = [each.do("weights") for each in receivers]
    receivers[0].do("strike", at=2, number=None, hold_s=1.0)
    receiving = start_update(receivers, weights.entries)
    one.ask("sync")
    receivers[0].wait_half(2)
    one.signal(signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
    lost = time.monotonic()
    for answer in receiving:
        with pytest.raises(RuntimeError, match="update failed"):
            answer.result(READY_S)
    for each, before in zip(receivers, old, strict=True):
        each.do("abort", READY_S)
        held = each.do("weights")
        assert not any((tensor == POISONED).any() for tensor in held.values())
        assert torch.equal(held["layers.11.weight"], before["layers.11.weight"])  # of the last bucket
    assert_ready_again(receivers, weights, lost)


def test_a_signal_ends_a_learner_whose_sync_hangs_SYN_3(receivers, learner, weights):
    """SYN-3: its handler runs in Python, so the main thread must not sit in NCCL."""
    one = learner()
    receivers[0].do("strike", at=1, number=signal.SIGSTOP, hold_s=0.0)
    receiving = start_update(receivers, weights.entries)
    one.ask("sync")
    receivers[0].wait_half(1)
    time.sleep(0.5)
    one.signal(signal.SIGTERM)
    assert one.hear(READY_S / 2) == ("ended", "SystemExit: terminated")
    one.process.join(READY_S)
    assert one.process.exitcode == 0 or not one.process.is_alive()
    with pytest.raises(RuntimeError, match="update failed"):
        receiving[1].result(READY_S)


# ---------------------------------------------------------------------------------------------------------------------
# opening


@pytest.mark.parametrize("who", ["a worker never comes", "a worker comes and stops there"])
def test_opening_is_bounded_and_its_port_free_again_CFG_8(receivers, weights, who):
    """CFG-8, SYN-3: `ncclCommInitRank` itself would wait for ever."""
    transport = NcclTransport(BUCKET_BYTES, 60.0, 2.0)
    address = ("127.0.0.1", free_port())
    if who == "a worker never comes":
        opening = receivers[0].call("init", **init_info(address[1], timeout_s=2.0, world_size=3))
        size = 2
    else:
        threading.Thread(target=store_at, args=(address, False), daemon=True).start()
        size = 1
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=f"127.0.0.1:{address[1]}"):
        in_time(2.0 + 2 * SLACK_S, transport.open, [address], [size])
    failed = time.monotonic()
    assert failed - start < 2.0 + SLACK_S
    transport.close()
    if who == "a worker never comes":
        with pytest.raises(RuntimeError, match="init failed"):
            opening.result(READY_S)
    assert_ready_again(receivers[:1], weights, failed, address[1])


def test_a_worker_that_no_learner_meets_is_free_again_CFG_8(receivers, weights):
    """CFG-8: the learner's store is there, but its part of NCCL never comes."""
    address = ("127.0.0.1", free_port())
    threading.Thread(target=store_at, args=(address, True), daemon=True).start()
    with pytest.raises(RuntimeError, match="init failed"):
        receivers[0].do("init", 2.0 + 2 * SLACK_S, **init_info(address[1], timeout_s=2.0))
    assert_ready_again(receivers[:1], weights, time.monotonic())


def store_at(address: tuple[str, int], is_host: bool) -> None:
    """Come to the rendezvous and do nothing there."""
    held.append(torch.distributed.TCPStore(*address, 2, is_host, timedelta(seconds=20)))


held: list[torch.distributed.TCPStore] = []
