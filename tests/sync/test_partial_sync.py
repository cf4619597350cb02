"""Which tensors travel together (SYN-6), and a group port that is free again once the communicator is closed."""

import contextlib
import threading
from datetime import timedelta

import psutil
import pytest
import torch
from torch import nn
from vllm.distributed.utils import stateless_init_torch_distributed_process_group as open_group

from tests.e2e.processes import free_port
from utils.sync.merged_weights import MergedWeights, whole_groups
from utils.sync.transports import GlooTransport
from utils.sync.wire import bucket_layouts

LAYER = {  # checkpoint tensor -> the engine's parameters, as a mixture-of-experts layer of vLLM reports them
    "attn.q_proj.weight": ["attn.qkv_proj.weight"],
    "attn.k_proj.weight": ["attn.qkv_proj.weight"],
    "attn.v_proj.weight": ["attn.qkv_proj.weight"],
    "attn.q_proj.bias": ["attn.qkv_proj.bias"],
    "attn.o_proj.weight": ["attn.o_proj.weight"],
    "mlp.gate.weight": ["mlp.gate.weight"],
    "mlp.experts.0.gate_proj.weight": ["mlp.experts.w13_weight"],
    "mlp.experts.0.down_proj.weight": ["mlp.experts.w2_weight"],
    "mlp.experts.1.up_proj.weight": ["mlp.experts.w13_weight"],
    "norm.weight": ["norm.weight"],
}


@pytest.mark.parametrize(
    ("changing", "also"),
    [
        ({"norm.weight"}, set()),
        ({"attn.o_proj.weight"}, set()),
        ({"attn.q_proj.weight"}, {"attn.k_proj.weight", "attn.v_proj.weight", "attn.q_proj.bias"}),
        ({"attn.q_proj.bias"}, {"attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight"}),
        (
            {"mlp.experts.0.gate_proj.weight", "norm.weight"},
            {"mlp.experts.0.down_proj.weight", "mlp.experts.1.up_proj.weight"},
        ),
        (set(), set()),
    ],
)
def test_tensors_of_one_module_travel_together_SYN_6(changing, also):
    """SYN-6: q, k, v with biases; all experts of a layer, but not their router."""
    assert whole_groups(changing, LAYER) == changing | also


def test_a_tensor_that_goes_into_two_modules_ties_both_SYN_6():
    """SYN-6: worked out by hand, two rounds of completing."""
    parameters = {"a": ["one.w"], "b": ["one.v", "two.w"], "c": ["two.v"], "d": ["three.w"]}
    assert whole_groups({"a"}, parameters) == {"a", "b", "c"}


@pytest.fixture(autouse=True)
def keep_stdout(monkeypatch):
    """Both ends of a group are threads of one process here, and vLLM's detour of stdout cannot stand that."""
    monkeypatch.setattr("vllm.distributed.utils.suppress_stdout", contextlib.nullcontext)


def receive(port: int, weights: MergedWeights, received: list[torch.Tensor], stop_before: int | None = None) -> None:
    """An engine worker's end of one update; with `stop_before` it leaves before that bucket."""
    group = open_group("127.0.0.1", port, 1, 2, backend="gloo", timeout=timedelta(seconds=20))
    options = torch.distributed.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    for index, bucket in enumerate(bucket_layouts([entry.num_bytes for entry in weights.entries], 1)):
        if index == stop_before:
            group.shutdown()
            return
        buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        group.broadcast([buffer], options).wait()
        received.append(buffer)


def stream(transport: GlooTransport, port: int, stop_before: int | None = None) -> list[torch.Tensor]:
    """Open, send one model, close."""
    weights = MergedWeights(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    received: list[torch.Tensor] = []
    worker = threading.Thread(target=receive, args=(port, weights, received, stop_before))
    worker.start()
    try:
        transport.open([("127.0.0.1", port)], [1])
        transport.send(weights, weights.entries, digest=False, check_servers=lambda: None)
    finally:
        transport.close()
        worker.join()
    for buffer, (_, tensor) in zip(received, weights.tensors(), strict=True):
        assert torch.equal(buffer.view(torch.float32), tensor.flatten())
    return received


def listens(port: int) -> bool:
    """Whether this process still hosts a store on the port."""
    return port in {address.port for address in listeners()}


def listeners() -> set:
    """Addresses on which this process accepts TCP connections."""
    connections = psutil.Process().net_connections("tcp")
    return {connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN}


def test_a_closed_communicator_opens_again_on_the_same_port_SYN_3():
    """SYN-3, SYN-6: whether it ended well, in the middle of a stream, or never opened; errors are kept alive on
    purpose, because those who report them do that too."""
    port, errors = free_port(), []
    transport = GlooTransport(1, timeout_s=20.0, open_timeout_s=20.0)
    assert len(stream(transport, port)) == 4
    assert not listens(port)
    assert len(stream(transport, port)) == 4

    with pytest.raises(RuntimeError) as lost:
        stream(transport, port, stop_before=1)
    errors.append(lost.value)
    assert not listens(port)
    assert len(stream(transport, port)) == 4

    with pytest.raises(Exception, match="(?i)time") as nobody:
        hasty = GlooTransport(1, timeout_s=20.0, open_timeout_s=1.0)
        hasty.open([("127.0.0.1", port)], [1])
    errors.append(nobody.value)
    hasty.close()
    assert not listens(port)
    assert len(stream(transport, port)) == 4


def test_the_senders_side_listens_on_loopback_only_for_a_local_server_SRV_3(monkeypatch):
    """SRV-3: Gloo knows no passwords; its ends are of this machine only."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before, port, ends = listeners(), free_port(), []
    worker = threading.Thread(
        target=lambda: ends.append(open_group("127.0.0.1", port, 1, 2, backend="gloo", timeout=timedelta(seconds=20)))
    )
    worker.start()
    transport = GlooTransport(1, timeout_s=20.0, open_timeout_s=20.0)
    transport.open([("127.0.0.1", port)], [1])
    worker.join()
    new = listeners() - before
    assert port in {address.port for address in new} and len(new) > 1
    assert {address.ip for address in new} == {"127.0.0.1"}
    transport.close()


def test_all_servers_get_a_bucket_at_the_same_time_SYN_11():
    """SYN-11: one walk over the tensors serves both servers, and none runs ahead: while one has not taken its first
    bucket, the other gets at most the two that may be under way."""
    weights = MergedWeights(nn.ModuleList(nn.Linear(1 << 11, 1 << 10, bias=False) for _ in range(6)))  # 8 MiB each
    ports, start_late, received = [free_port(), free_port()], threading.Event(), [[], []]
    merges = []
    write = weights.write
    weights.write = lambda entry, out: (merges.append(entry.name), write(entry, out))

    def take(index: int) -> None:
        group = open_group("127.0.0.1", ports[index], 1, 2, backend="gloo", timeout=timedelta(seconds=20))
        options = torch.distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        if index == 1:
            start_late.wait()
        for entry in weights.entries:
            buffer = torch.empty(entry.num_bytes, dtype=torch.uint8)
            group.broadcast([buffer], options).wait()
            received[index].append(buffer)

    workers = [threading.Thread(target=take, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    transport = GlooTransport(8 << 20, timeout_s=20.0, open_timeout_s=20.0)
    transport.open([("127.0.0.1", port) for port in ports], [1, 1])
    sender = threading.Thread(target=transport.send, args=(weights, weights.entries, False, lambda: None))
    sender.start()
    sender.join(1.0)
    assert sender.is_alive() and 1 <= len(received[0]) <= 2 and not received[1]
    start_late.set()
    for thread in (sender, *workers):
        thread.join(20)
    transport.close()
    assert merges == [entry.name for entry in weights.entries]
    for buffers in received:
        assert all(
            torch.equal(b.view(torch.float32), e.weight.flatten())
            for b, e in zip(buffers, weights.entries, strict=True)
        )
