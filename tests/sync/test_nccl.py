"""SYN-1, SYN-3, SYN-5, SYN-11, CFG-8: the NCCL path at both ends, with NCCL's manners but without NCCL.

The rendezvous and both programs' code are real; communicator and streams are tests/sync/fake_nccl.py.
"""

import contextlib
import gc
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

vllm_worker = pytest.importorskip("utils.sync.vllm_worker")

from benchmarks.memory import LivePeak  # noqa: E402
from tests.sync import fake_nccl  # noqa: E402
from tests.sync.test_vllm_worker import TinyModel, free_port, info_of, make_engine, new_weights  # noqa: E402
from utils.sync import nccl  # noqa: E402
from utils.sync.merged_weights import MergedWeights  # noqa: E402
from utils.sync.transports import NcclTransport, Transport  # noqa: E402

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def released(monkeypatch) -> list[str]:
    return fake_nccl.install(monkeypatch)


def in_thread(function, *args) -> tuple[threading.Thread, list]:
    """Run it beside the test; the list gets its result or its error."""
    outcome: list = []

    def run() -> None:
        try:
            outcome.append(function(*args))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def learner_model() -> MergedWeights:
    torch.manual_seed(0)
    model = TinyModel()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return MergedWeights(model)


def tensors_of(weights: MergedWeights) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.tensors()}


def wait_until(condition) -> None:
    """Wait for what another thread does; fail after 5 s."""
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Pair:
    """A sender and the engines of some servers, with `workers` of each, with their communicators open."""

    def __init__(
        self, bucket_bytes: int = 64, num_servers: int = 1, timeout_s: float = 20.0, workers: int = 1, **engine_limits
    ) -> None:
        self.ports = [free_port() for _ in range(num_servers)]
        places = [(port, rank) for port in self.ports for rank in range(workers)]
        self.engines = [make_engine(TinyModel(), vllm_worker.StreamNcclEngine) for _ in places]
        self.transport = NcclTransport(bucket_bytes, timeout_s, 20.0)
        limits = {"timeout_s": timeout_s, "open_timeout_s": 20.0} | engine_limits
        joins = []
        for engine, (port, rank) in zip(self.engines, places, strict=True):
            engine.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=workers, rank=rank)
            info = vllm_worker.InitInfo(HOST, port, 1 + workers, 1, bucket_bytes, **limits)
            joins.append(in_thread(engine.init_transfer_engine, info))
        self.transport.open([(HOST, port) for port in self.ports], [workers] * num_servers)
        for thread, outcome in joins:
            thread.join(20)
            assert outcome == [None]
        self.senders = [c for c in fake_nccl.Communicator.made if c.rank == 0]

    def receive(self, index: int, tensors: dict) -> tuple[threading.Thread, list]:
        self.engines[index].start_weight_update()
        return in_thread(self.engines[index].update_weights, info_of(tensors))

    def send(self, weights: MergedWeights, check_servers=lambda: None) -> dict[str, str]:
        return self.transport.send(weights, weights.entries, True, check_servers)

    def close(self) -> None:
        self.transport.close()
        for engine in self.engines:
            engine.shutdown()


@pytest.mark.parametrize("bucket_bytes", [1, 30, 64, 1 << 20])
def test_an_update_arrives_bit_for_bit_on_all_servers_SYN_1_SYN_7(bucket_bytes, released):
    """SYN-1, SYN-7: twice, whatever the buckets; the second time in one walk over the engine's model (SYN-5)."""
    pair = Pair(bucket_bytes, num_servers=2)
    walks: list[int] = []
    for engine in pair.engines:
        load = engine.model.load_weights
        engine.model.load_weights = lambda weights, load=load: (walks.append(0), load(weights))[1]
    for _ in range(2):
        weights = learner_model()
        sent, walks[:] = tensors_of(weights), []
        receivers = [pair.receive(index, sent) for index in range(2)]
        digests = pair.send(weights)
        for (thread, outcome), engine in zip(receivers, pair.engines, strict=True):
            thread.join(20)
            assert outcome == [None]
            assert engine.summary()["digests"] == digests
            engine.finish_weight_update()
            assert engine.missing == []
            for name, parameter in engine.model.named_parameters():
                assert torch.equal(parameter, sent[name]), name
    assert len(walks) == 2
    assert released.count("released") == 6  # everything was sent: here and at both servers, twice
    assert released[0] == "synced"  # the optimizer's step, before anything is merged
    pair.close()
    assert all(c.events[-1] == "abort" for c in fake_nccl.Communicator.made)


def test_a_partial_update_keeps_its_memory(released):
    """SYN-5: only a full sync has buckets that are never needed again; training's own cache is worth keeping."""
    pair = Pair()
    weights = learner_model()
    part = [entry for entry in weights.entries if entry.name == "second.weight"]
    thread, outcome = pair.receive(0, {"second.weight": part[0].weight})
    pair.transport.send(weights, part, False, lambda: None)
    thread.join(20)
    pair.engines[0].finish_weight_update()
    assert outcome == [None] and "released" not in released
    pair.close()


def test_a_peer_that_never_takes_a_bucket_ends_the_send_at_the_time_limit_SYN_3():
    """SYN-3: and the port is free at once, although the error is kept."""
    pair, start = Pair(timeout_s=1.0), time.monotonic()
    with pytest.raises(TimeoutError, match=r"not taken by all servers before sync\.timeout_s") as kept:
        pair.send(learner_model())
    assert 0.9 < time.monotonic() - start < 4
    assert pair.senders[0].events[-1] == "abort"
    pair.transport.close()
    socket.create_server((HOST, pair.ports[0])).close()
    assert kept.value is not None


def test_a_server_that_fails_ends_the_send_with_its_own_error_SYN_3():
    """SYN-3: within a moment, with two servers, one of which is healthy: its worker is told and leaves, too."""
    pair, start = Pair(num_servers=2), time.monotonic()
    healthy = pair.receive(0, new_weights() | {"one.more": torch.zeros(64)})  # a bucket that is not sent any more

    def check_servers() -> None:
        if time.monotonic() - start > 0.3:
            raise RuntimeError("server 1 died")

    with pytest.raises(RuntimeError, match="server 1 died"):
        pair.send(learner_model(), check_servers)
    assert time.monotonic() - start < 2
    healthy[0].join(5)
    assert "this update was given up" in str(healthy[1][0])
    assert time.monotonic() - start < 5
    pair.close()


def test_a_worker_that_fails_alone_takes_its_servers_others_with_it_SYN_3(monkeypatch):
    """SYN-3: of two (TP 2) one has no memory for its second bucket. The server can answer only when both have left."""
    pair, weights, start = Pair(timeout_s=30.0, workers=2), learner_model(), time.monotonic()
    begin, layouts = pair.engines[1]._receive, []

    def receive(layout):
        layouts.append(layout)
        if len(layouts) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return begin(layout)

    pair.engines[1]._receive = receive
    receivers = [pair.receive(index, tensors_of(weights)) for index in range(2)]

    def check_servers() -> None:
        if not any(thread.is_alive() for thread, _ in receivers):
            raise RuntimeError("; ".join(str(outcome[0]) for _, outcome in receivers))

    with pytest.raises(RuntimeError, match="this update was given up, by the learner or another worker.*out of memory"):
        pair.send(weights, check_servers)
    assert time.monotonic() - start < 5
    pair.close()


def test_no_memory_for_a_digest_does_not_end_the_stream_SYN_7(monkeypatch):
    """SYN-7, SYN-3: the other workers need this one in every bucket; the error is told at the end."""
    pair, weights, digests = Pair(), learner_model(), []

    def digest(tensor):
        digests.append(tensor)
        if len(digests) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "x"

    monkeypatch.setattr("utils.sync.vllm_reload.tensor_digest", digest)
    thread, outcome = pair.receive(0, tensors_of(weights))
    pair.send(weights)
    thread.join(20)
    engine = pair.engines[0]
    received = list(tensors_of(weights))
    assert engine.update.received == received
    assert f"receiving {received[1]} failed: OutOfMemoryError: CUDA out of memory" in str(outcome[0])
    pair.close()


@pytest.mark.parametrize("fails_by", ["server", "time"])
def test_a_sender_blocked_in_a_call_is_freed_by_the_watchdog_SYN_3(monkeypatch, fails_by):
    """SYN-3: NCCL connects in its first broadcast and blocks there. Nothing is called on what was freed."""
    pair, start = Pair(timeout_s=20.0 if fails_by == "server" else 1.0), time.monotonic()
    freed = threading.Event()
    destroy = pair.senders[0].destroy
    monkeypatch.setattr(pair.senders[0], "destroy", lambda: (destroy(), freed.set()))
    monkeypatch.setattr(pair.senders[0], "broadcast", lambda *args, **kwargs: freed.wait(30))

    def check_servers() -> None:
        if fails_by == "server" and time.monotonic() - start > 0.3:
            raise RuntimeError("server died")

    with pytest.raises((RuntimeError, TimeoutError), match="server died|not taken by all servers"):
        pair.send(learner_model(), check_servers)
    assert time.monotonic() - start < 5
    pair.close()


def test_an_abort_marks_before_it_aborts_SYN_3(monkeypatch):
    """SYN-3: whoever is freed by the abort must already see the mark, or it takes what it waited for as arrived."""
    pair = Pair()
    channel, seen = pair.transport.groups[0], []
    monkeypatch.setattr(pair.senders[0], "destroy", lambda: seen.append(str(channel.failure)))
    channel.abort(RuntimeError("first"))
    channel.abort(RuntimeError("second"))
    assert seen == ["first"]  # once, however many ask for it
    with pytest.raises(RuntimeError, match="first"):
        channel.broadcast(torch.zeros(1, dtype=torch.uint8))
    pair.close()


def test_no_call_begins_on_a_communicator_that_is_being_aborted_SYN_3(monkeypatch):
    """SYN-3: a call that is on its way out is let out first; it would touch freed memory."""
    pair = Pair()
    channel, communicator = pair.transport.groups[0], pair.senders[0]
    order, broadcast, destroy = [], communicator.broadcast, communicator.destroy
    begun = threading.Event()

    def slow(*args, **kwargs) -> None:
        begun.set()
        time.sleep(0.3)
        order.append("broadcast")
        broadcast(*args, **kwargs)

    monkeypatch.setattr(communicator, "broadcast", slow)
    monkeypatch.setattr(communicator, "destroy", lambda: (order.append("abort"), destroy()))
    calling = in_thread(channel.broadcast, torch.zeros(1, dtype=torch.uint8))
    assert begun.wait(5)
    channel.abort(RuntimeError("over"))
    calling[0].join(5)
    assert order == ["broadcast", "abort"] and isinstance(calling[1][0], nccl.NcclWork)
    pair.close()


def test_an_aborted_bucket_is_never_loaded_SYN_3():
    """SYN-3: the abort makes the bucket's event come true, with rubbish in the bucket."""
    pair = Pair(bucket_bytes=1)
    engine, loaded = pair.engines[0], []
    engine.model.load_weights = lambda weights: {loaded.append(tensor.clone()) or name for name, tensor in weights}
    thread, outcome = pair.receive(0, new_weights())
    time.sleep(0.2)
    assert thread.is_alive()
    channel = engine._channel
    passage = nccl.NcclWork(channel, SimpleNamespace(query=lambda: True))
    channel.abort(RuntimeError("over"))
    with pytest.raises(RuntimeError, match="over"):
        passage.wait()  # complete, as far as CUDA knows
    thread.join(5)
    assert isinstance(outcome[0], vllm_worker.StreamBroken) and "over" in str(outcome[0])
    assert loaded == []
    with pytest.raises(RuntimeError, match="no communicator"):
        engine.update_weights(info_of(new_weights()))
    pair.close()


@pytest.mark.parametrize("how", ["gone", "mark", "time"])
def test_a_receiver_hears_of_the_end_within_two_seconds_SYN_3(how):
    """SYN-3: a learner that died, that gave up (even while its store lives), and one that stopped sending."""
    pair = Pair(timeout_s=1.0 if how == "time" else 60.0)
    thread, outcome = pair.receive(0, new_weights())
    time.sleep(0.2)
    start = time.monotonic()
    if how == "gone":
        pair.transport.groups[0].meeting.store = None  # as the end of the process would
        gc.collect()
    elif how == "mark":
        pair.transport.abort(RuntimeError("given up"))
    thread.join(10)
    said = {
        "gone": "the learner is gone",
        "mark": "this update was given up",
        "time": "no bucket within 1 s",
    }
    assert f"the weight stream broke off: {said[how]}" in str(outcome[0])
    assert time.monotonic() - start < 4.0  # two seconds, and some for a busy machine
    pair.engines[0].reset_update()
    pair.transport.close()
    again = Pair()
    again.close()


def test_an_update_takes_as_long_as_buckets_come_SYN_3(monkeypatch):
    """SYN-3, SRV-12: only a sender that is silent is given up; its own limit is for the whole update."""
    monkeypatch.setattr(vllm_worker, "WATCH_INTERVAL_S", 0.05)
    pair, weights = Pair(1, timeout_s=1.0), learner_model()
    pair.transport.timeout_s = 20.0
    thread, outcome = pair.receive(0, tensors_of(weights))
    write, start = weights.write, time.monotonic()
    monkeypatch.setattr(weights, "write", lambda *args: (time.sleep(0.5), write(*args)))
    pair.send(weights)
    thread.join(20)
    assert outcome == [None] and time.monotonic() - start > 1.5
    pair.close()


def test_a_receiver_that_nobody_answers_any_more_leaves_SYN_3(monkeypatch):
    """SYN-3: a machine that vanished breaks no connection."""
    monkeypatch.setattr(vllm_worker, "LEARNER_TIMEOUT_S", 0.2)
    pair = Pair(timeout_s=60.0)
    engine = pair.engines[0]
    engine._channel.meeting = SimpleNamespace(store=SimpleNamespace(check=lambda _: threading.Event().wait(5)))
    thread, outcome = pair.receive(0, new_weights())
    thread.join(5)
    assert "the learner is gone" in str(outcome[0])
    pair.close()


def test_all_servers_get_a_bucket_before_any_is_waited_for_SYN_11():
    """SYN-11: each on its own stream; a slow server does not keep the other's bucket back."""
    pair = Pair(num_servers=3)
    weights = learner_model()
    sending = in_thread(pair.send, weights)
    wait_until(lambda: [communicator.events[:1] for communicator in pair.senders] == [["broadcast 0"]] * 3)
    assert sending[0].is_alive()
    assert len({id(channel.stream) for channel in pair.transport.groups}) == 3
    fast = pair.receive(2, tensors_of(weights))
    wait_until(lambda: pair.senders[2].exchange.taken.get(0) == 1)
    assert 0 not in pair.senders[0].exchange.taken
    others = [pair.receive(index, tensors_of(weights)) for index in range(2)]
    for thread, outcome in (fast, *others):
        thread.join(20)
        assert outcome == [None]
    sending[0].join(20)
    pair.close()


def big_model() -> MergedWeights:
    """The shapes of an 8B model, a 64th in each direction: embeddings, 36 layers, output layer."""
    shapes = [(2374, 64)]
    for _ in range(36):
        shapes += [(64, 64), (16, 64), (16, 64), (64, 64), (192, 64), (192, 64), (64, 192)]
    shapes += [(2374, 64)]
    return MergedWeights(nn.ParameterList(torch.randn(shape) for shape in shapes))


class SlowChannel:
    """Says that a bucket has arrived when it is asked the third time."""

    def broadcast(self, buffer):
        answers = iter([False, False])
        return SimpleNamespace(is_completed=lambda: next(answers, True), wait=lambda: None)

    def check(self) -> None:
        pass


def test_the_sender_holds_two_buckets_at_most_SYN_5():
    """SYN-5: every byte that is allocated during the walk counts, merging included."""
    weights, transport = big_model(), NcclTransport(64 << 10, 20.0, 20.0)
    transport.groups = [SlowChannel(), SlowChannel()]
    largest = max(entry.num_bytes for entry in weights.entries)  # the embeddings: 594 KiB
    for entries, limit in ((weights.entries, 2 * largest), (weights.entries[1:-1], 2 * (64 << 10))):
        with LivePeak() as live:
            transport.send(weights, entries, False, lambda: None)
        assert 64 << 10 < live.peak <= limit


def test_after_a_failure_the_walk_goes_on_for_the_other_ranks_SYN_3(monkeypatch):
    """SYN-3: under ZeRO-3 every gather is a collective; also where merging itself fails. Nothing is sent any more."""
    for fails_at in ("write", "server"):
        pair = Pair(bucket_bytes=1)
        weights, gathers = learner_model(), []

        @contextlib.contextmanager
        def gathered(entry, gathers=gathers):
            gathers.append(entry.name)
            yield

        def write(entry, out, weights=weights):
            if entry.name == "second.weight":
                raise ValueError("bad tensor")
            MergedWeights.write(weights, entry, out)

        def check_servers(fails_at=fails_at):
            if fails_at == "server":
                raise RuntimeError("server died")

        monkeypatch.setattr(MergedWeights, "is_sharded", True)
        weights.gathered = gathered
        if fails_at == "write":
            weights.write = write
        with pytest.raises((ValueError, RuntimeError), match="bad tensor|server died"):
            pair.send(weights, check_servers)
        assert gathers == [entry.name for entry in weights.entries]
        assert len(pair.senders[0].events) < len(gathers) and pair.senders[0].events[-1] == "abort"
        pair.close()


def test_signals_are_served_while_a_bucket_waits_SYN_3():
    """SYN-3: SIGTERM must reach Python's handler, which can only run in this thread."""
    pair, served = Pair(timeout_s=2.0), []
    before = signal.signal(signal.SIGUSR1, lambda *_: served.append(time.monotonic()))
    try:
        main = threading.main_thread().ident
        timer = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGUSR1))
        timer.start()
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            pair.send(learner_model())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert served and served[0] - start < 1.8  # the send itself ends at 2
    pair.close()


def test_a_worker_that_does_not_come_is_missed_within_the_limit_CFG_8():
    """CFG-8: the message says where and how many, not which file descriptor; the port is free afterwards."""
    port, start = free_port(), time.monotonic()
    transport = NcclTransport(64, 60.0, 1.0)
    one = in_thread(torch.distributed.TCPStore, HOST, port, 3, False)
    with pytest.raises(TimeoutError) as kept:
        transport.open([(HOST, port)], [2])
    assert f"1 of 2 workers came to {HOST}:{port}" in str(kept.value)
    assert time.monotonic() - start < 5
    transport.close()
    socket.create_server((HOST, port)).close()
    one[0].join(5)


def test_a_worker_that_comes_but_never_connects_is_given_up_CFG_8():
    """CFG-8: `ncclCommInitRank` itself has no limit. The port is free although NCCL still waits."""
    port, start = free_port(), time.monotonic()
    transport = NcclTransport(64, 60.0, 1.0)
    in_thread(torch.distributed.TCPStore, HOST, port, 2, False)  # joins the store, and stops there
    with pytest.raises(TimeoutError, match=f"a worker did not finish joining at {HOST}:{port} in") as kept:
        transport.open([(HOST, port)], [1])
    assert time.monotonic() - start < 5
    gc.collect()
    socket.create_server((HOST, port)).close()
    assert kept.value is not None


def test_a_learner_that_does_not_come_is_given_up_by_the_worker_CFG_8():
    """CFG-8: within `open_timeout_s`, whatever an update may take."""
    port, start = free_port(), time.monotonic()
    engine = make_engine(TinyModel(), vllm_worker.StreamNcclEngine)
    with pytest.raises((TimeoutError, RuntimeError), match=f"(?i)timed out.*{port}"):
        engine.init_transfer_engine(vllm_worker.InitInfo(HOST, port, 2, 1, 64, 60.0, 1.0))
    assert time.monotonic() - start < 5
    assert engine.learner_store is None


def test_opening_leaves_the_callers_stream_and_listens_on_the_given_address_only(monkeypatch):
    """SRV-3: vLLM's communicator moves the thread that makes it onto another CUDA stream for good."""
    import psutil

    streams = threading.local()
    streams.current = "default"
    make = fake_nccl.Communicator.__init__

    def moving(self, group, device):
        streams.current = "side"
        make(self, group, device)

    monkeypatch.setattr(fake_nccl.Communicator, "__init__", moving)
    pair = Pair()
    assert streams.current == "default"
    found = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN
             and c.laddr.port == pair.ports[0]]  # fmt: skip
    assert found == [HOST]
    pair.close()


def test_a_communicator_without_nccl_is_refused(monkeypatch):
    """vLLM's would send nothing, without a word."""
    make = fake_nccl.Communicator.__init__

    def disabled(self, group, device):
        make(self, group, device)
        self.disabled = True

    monkeypatch.setattr(fake_nccl.Communicator, "__init__", disabled)
    port = free_port()
    engine = make_engine(TinyModel(), vllm_worker.StreamNcclEngine)
    joining = in_thread(engine.init_transfer_engine, vllm_worker.InitInfo(HOST, port, 2, 1, 64, 20.0, 20.0))
    with pytest.raises(RuntimeError, match="NCCL library"):
        NcclTransport(64, 20.0, 20.0).open([(HOST, port)], [1])
    joining[0].join(20)
    assert "NCCL library" in str(joining[1][0])


def test_a_channel_that_was_aborted_behind_the_last_bucket_fails_the_sync_SYN_3(monkeypatch):
    """SYN-3: nothing else would tell this side that the bucket did not arrive."""

    def check() -> None:
        raise RuntimeError("aborted by the watchdog")

    monkeypatch.setattr(Transport, "send", lambda *args, **named: {})
    transport = NcclTransport(64, 20.0, 20.0)
    transport.groups = [SimpleNamespace(check=check)]
    with pytest.raises(RuntimeError, match="aborted by the watchdog"):
        transport.send(SimpleNamespace(entries=[]), [], digest=False, check_servers=lambda: None)


def test_what_an_abandoned_opening_still_opens_is_closed_SRV_12(monkeypatch):
    """SRV-12: the next one has taken its place by then."""
    engine, closed = make_engine(TinyModel(), vllm_worker.StreamNcclEngine), []

    def open_late(*args):
        engine.shutdown()  # by an abort, meanwhile
        return SimpleNamespace(close=lambda: closed.append("closed"))

    monkeypatch.setattr(vllm_worker, "open_nccl", open_late)
    engine._opener = threading.get_ident()
    with pytest.raises(RuntimeError, match="given up"):
        engine._open(vllm_worker.InitInfo(HOST, 1, 2, 1, 64, 1.0, 1.0), 1, 1.0)
    assert closed == ["closed"] and engine.learner_store is None


def test_the_fakes_stand_for_cudas_own(monkeypatch):
    """What the other tests replace."""
    monkeypatch.undo()
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert nccl.current_device() == torch.device("cuda:3")
    assert (nccl.current_stream, nccl.new_stream) == (torch.cuda.current_stream, torch.cuda.Stream)
    assert nccl.release_memory is torch.cuda.empty_cache
    assert {"wait_stream", "record_event", "synchronize"} <= set(dir(torch.cuda.Stream))
    assert "query" in dir(torch.cuda.Event)
