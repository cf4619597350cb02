"""The emulated NCCL has NCCL's manners: without them, what the other tests prove would not hold on GPUs."""

import signal
import threading
import time

import pytest
import torch

pynccl = pytest.importorskip("vllm.distributed.device_communicators.pynccl")

from vllm.distributed.utils import StatelessProcessGroup  # noqa: E402

from tests.e2e.processes import free_port  # noqa: E402
from tests.emulated_nccl import emulated, library, marks  # noqa: E402
from tests.emulated_nccl.peers import Peer  # noqa: E402

SHORT_S = 0.5  # a call that has not returned by then is blocked
SIZE = 3_000_000  # more than sockets keep


@pytest.fixture(autouse=True)
def nccl(tmp_path, monkeypatch):
    emulated(monkeypatch, tmp_path)


def communicator(port: int, rank: int, world_size: int = 2) -> "pynccl.PyNcclCommunicator":
    group = StatelessProcessGroup.create("127.0.0.1", port, rank, world_size)
    return pynccl.PyNcclCommunicator(group, device=0)


@pytest.fixture
def meet():
    """Open a communicator with a process per target; this process is rank 0."""
    peers = []

    def open_with(*targets):
        port = free_port()
        for rank, target in enumerate(targets, 1):
            peers.append(Peer(target, port, rank, len(targets) + 1))
        return communicator(port, 0, len(targets) + 1), peers

    yield open_with
    for peer in peers:
        peer.end()


def receiver(connection, port, rank, world_size):
    """Receive a broadcast of each size asked for, and say what it holds."""
    torch.cuda.set_stream(torch.cuda.Stream())
    group = communicator(port, rank, world_size)
    while (size := connection.recv()[0]) is not None:
        memory = torch.zeros(size, dtype=torch.uint8)
        group.broadcast(memory, src=0)
        torch.cuda.current_stream().synchronize()
        connection.send(memory.numpy().tobytes())


def test_bytes_arrive_at_all_ranks_in_order_and_no_earlier_than_they_are_taken(meet):
    group, peers = meet(receiver, receiver)
    sent = [torch.randint(0, 255, (SIZE,), dtype=torch.uint8), torch.arange(7, dtype=torch.uint8)]
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    for tensor in sent:
        group.broadcast(tensor, src=0, stream=stream)
    event.record(stream)
    peers[0].ask(SIZE)
    assert peers[0].hear() == sent[0].numpy().tobytes()
    time.sleep(SHORT_S)
    assert not event.query() and not stream.query()  # the other peer has not taken it
    for tensor, peer in zip((*sent, sent[1]), (peers[1], peers[1], peers[0]), strict=True):
        peer.ask(tensor.numel())
        assert peer.hear() == tensor.numpy().tobytes()
    event.synchronize()
    assert event.query()
    group.destroy()


@pytest.mark.parametrize("num_streams", [1, 2])
def test_two_communicators_wait_for_each_other_on_one_stream_only(meet, num_streams):
    """SYN-11 needs two: a group does not help, since NCCL merges only calls of one communicator."""
    one, (first,) = meet(receiver)
    other, (_, second) = meet(receiver)
    tensor, streams = torch.randint(0, 255, (SIZE,), dtype=torch.uint8), [torch.cuda.Stream(), torch.cuda.Stream()]
    one.group_start()
    one.broadcast(tensor, src=0, stream=streams[0])
    other.broadcast(tensor, src=0, stream=streams[num_streams - 1])
    one.group_end()
    second.ask(SIZE)
    if num_streams == 1:
        with pytest.raises(TimeoutError):
            second.hear(SHORT_S)
        first.ask(SIZE)
        assert first.hear() == tensor.numpy().tobytes()
    assert second.hear() == tensor.numpy().tobytes()


@pytest.mark.parametrize("fate", ["never posts", "killed", "frozen"])
def test_without_its_peer_a_broadcast_blocks_until_an_abort_and_ends_without_error(meet, fate):
    group, (peer,) = meet(receiver)
    stream, freed = torch.cuda.Stream(), threading.Event()
    group.broadcast(torch.zeros(SIZE, dtype=torch.uint8), src=0, stream=stream)
    if fate != "never posts":
        peer.signal(signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
    threading.Thread(target=lambda: (stream.synchronize(), freed.set()), daemon=True).start()
    assert not freed.wait(SHORT_S)
    start = time.monotonic()
    group.destroy()
    assert freed.wait(5) and time.monotonic() - start >= library.ABORT_S  # freed while the abort is still at work


def poisoned(connection, port, rank, world_size):
    group = communicator(port, rank, world_size)
    memory, stream = torch.zeros(1000), torch.cuda.Stream()
    group.broadcast(memory, src=0, stream=stream)
    threading.Timer(SHORT_S, group.destroy).start()
    stream.synchronize()
    connection.send(memory.tolist())


def test_what_an_aborted_broadcast_leaves_is_not_the_message(meet):
    _, (peer,) = meet(poisoned)
    assert set(peer.hear()) == {13323083.0}


def signalled(connection, port, rank, world_size):
    """Block in the main thread; say when the handler ran and when the call was freed."""
    handled = []
    signal.signal(signal.SIGTERM, lambda *_: handled.append(time.monotonic()))
    group = communicator(port, rank, world_size)
    stream = torch.cuda.Stream()
    group.broadcast(torch.zeros(10), src=0, stream=stream)
    connection.send("blocks now")
    threading.Timer(3 * SHORT_S, group.destroy).start()
    stream.synchronize()
    freed = time.monotonic()
    connection.send((handled[0] - freed if handled else None, freed))


def test_a_blocked_call_runs_no_signal_handler(meet):
    _, (peer,) = meet(signalled)
    assert peer.hear() == "blocks now"
    time.sleep(SHORT_S)
    sent = time.monotonic()
    for _ in range(3):
        peer.signal(signal.SIGTERM)
        time.sleep(0.1)
    handled_after, freed = peer.hear()
    assert freed - sent > SHORT_S / 2
    assert handled_after is None or handled_after > -0.05  # not before the call was freed


def one_call_too_many(connection, port, rank, world_size, how):
    group = communicator(port, rank, world_size)
    handle = group.comm
    memory, stream = torch.zeros(10), torch.cuda.Stream()
    if how == "broadcast in an abort":
        group.broadcast(memory, src=0, stream=stream)
        threading.Timer(SHORT_S, group.nccl.ncclCommAbort, (handle,)).start()
        stream.synchronize()  # the abort goes on, and vLLM's communicator is not disabled yet
        group.broadcast(memory, src=0, stream=stream)
    elif how == "two aborts":
        group.nccl.ncclCommAbort(handle)
        group.nccl.ncclCommAbort(handle)
    else:
        group.destroy()
        group.broadcast(memory, src=0, stream=stream)  # disabled: does nothing
    connection.send("alive")


@pytest.mark.parametrize("how", ["broadcast in an abort", "two aborts", "after destroy"])
def test_use_after_free_ends_the_process_and_leaves_a_mark(tmp_path, how):
    port = free_port()
    peer = Peer(one_call_too_many, port, 1, 2, how)
    communicator(port, 0)
    if how == "after destroy":
        assert peer.hear() == "alive"
        assert not marks(tmp_path, "violation")
    else:
        with pytest.raises(EOFError):
            peer.hear()
        peer.process.join()
        assert peer.process.exitcode == -signal.SIGABRT
        (text,) = marks(tmp_path, "violation").values()
        assert "use after free" in text and "one_call_too_many" in text
    peer.end()


def opener(connection, port, rank, world_size):
    connection.send("here")
    communicator(port, rank, world_size)
    connection.send("open")


def test_opening_blocks_until_all_ranks_have_come():
    port, opened = free_port(), threading.Event()
    first = Peer(opener, port, 1, 3)
    threading.Thread(target=lambda: (communicator(port, 0, 3), opened.set()), daemon=True).start()
    assert first.hear() == "here" and not opened.wait(SHORT_S)
    second = Peer(opener, port, 2, 3)
    assert [peer.hear() for peer in (second, first, second)] == ["here", "open", "open"] and opened.wait(5)
    for peer in (first, second):
        peer.end()


def test_a_launch_blocks_too_where_told_to(meet, monkeypatch):
    freed = threading.Event()
    group, _ = meet(receiver)
    monkeypatch.setenv(library.LAUNCH_BLOCKS, "1")
    tensor = torch.zeros(SIZE, dtype=torch.uint8)
    threading.Thread(target=lambda: (group.broadcast(tensor, src=0), freed.set()), daemon=True).start()
    assert not freed.wait(SHORT_S)
    group.destroy()
    assert freed.wait(5)


def on_the_main_thread(connection, port, rank, world_size):
    if port:
        torch.cuda.set_stream(torch.cuda.current_stream())
    before = torch.cuda.current_stream()
    pynccl.current_stream()
    connection.send(torch.cuda.current_stream() is before)


@pytest.mark.parametrize("chose_a_stream", [0, 1])
def test_a_thread_that_never_chose_a_stream_is_moved_to_a_new_one_by_vllm(tmp_path, chose_a_stream):
    """As on GPUs (vLLM 0.32); the main thread leaves a mark."""
    peer = Peer(on_the_main_thread, chose_a_stream, 1, 2)
    assert peer.hear() == bool(chose_a_stream)
    peer.end()
    assert bool(marks(tmp_path, "side_stream")) != bool(chose_a_stream)
