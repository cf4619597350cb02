"""How much memory a sync adds on rank 0 (SYN-5), on a model with the shapes of SmolLM2-135M (weights at random)."""

import contextlib
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, LlamaConfig
from vllm.distributed.utils import stateless_init_torch_distributed_process_group as open_group

from benchmarks.memory import LivePeak
from tests.e2e.processes import free_port
from utils.sync.merged_weights import MergedWeights
from utils.sync.transports import GlooTransport, Transport
from utils.sync.wire import bucket_layouts, tensor_digest

BUCKET = 16 << 20


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return get_peft_model(
        model, LoraConfig(r=16, use_dora=True, target_modules="all-linear"), autocast_adapter_dtype=False
    )


def receive(port: int, weights: MergedWeights, digests: dict[str, str]) -> None:
    """The other end: what an engine worker does, without the engine."""
    group = open_group("127.0.0.1", port, 1, 2, backend="gloo", timeout=timedelta(seconds=60))
    options = torch.distributed.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    entries = weights.entries
    for bucket in bucket_layouts([entry.num_bytes for entry in entries], BUCKET):
        buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        group.broadcast([buffer], options).wait()
        for entry, offset in zip(entries[bucket.first : bucket.last], bucket.offsets, strict=True):
            digests[entry.name] = tensor_digest(buffer[offset : offset + entry.num_bytes])


def test_a_sync_adds_at_most_two_buckets_on_rank_0_SYN_5(model):
    """SYN-5."""
    weights = MergedWeights(model)
    assert 134e6 < sum(entry.num_bytes for entry in weights.entries) / 2 < 136e6
    port, received = free_port(), {}
    receiver = threading.Thread(target=receive, args=(port, weights, received))
    receiver.start()
    transport = GlooTransport(BUCKET, timeout_s=60, open_timeout_s=60)
    transport.open([("127.0.0.1", port)], [1])
    with LivePeak() as live:
        sent = transport.send(weights, weights.entries, digest=False, check_servers=lambda: None)
    receiver.join()
    transport.close()
    assert sent == {} and len(received) == len(weights.entries)
    largest = max(entry.num_bytes for entry in weights.entries)  # the embeddings: 54 MiB
    print(f"peak {live.peak / 2**20:.1f} MiB, bucket 16 MiB, largest tensor {largest / 2**20:.1f} MiB")
    assert BUCKET < live.peak <= 1.1 * 2 * max(BUCKET, largest)
    for name, tensor in weights.tensors():
        assert received[name] == tensor_digest(tensor), name


def test_buckets_and_a_gathered_tensor_are_at_most_two_buckets_SYN_5():
    """SYN-5: under ZeRO-3, which gathers a tensor before it is written into its bucket."""
    seen: dict[StorageWeakRef, int] = {}  # bytes of every bucket

    class Sender(Transport):
        def start(self, group, buffer):
            return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    class Sharded:
        is_sharded = True

        def gathered(self, entry):
            return contextlib.nullcontext()

        def write(self, entry, view):
            seen[StorageWeakRef(view.untyped_storage())] = view.untyped_storage().nbytes()
            live = sum(num_bytes for bucket, num_bytes in seen.items() if not bucket.expired())
            assert live + entry.num_bytes <= 2 * BUCKET, f"{live} of buckets, and {entry.name}"

    def entry_of(index: int, num_bytes: int) -> SimpleNamespace:
        return SimpleNamespace(name=f"tensor {index}", num_bytes=num_bytes, dtype=torch.uint8, shape=(num_bytes,))

    sizes = [BUCKET, BUCKET, BUCKET // 2, BUCKET // 2, BUCKET // 4, BUCKET, BUCKET // 4]
    transport = Sender(BUCKET, timeout_s=60, open_timeout_s=60)
    transport.groups = [None]
    entries = [entry_of(*numbered) for numbered in enumerate(sizes)]
    assert transport.send(Sharded(), entries, digest=False, check_servers=lambda: None) == {}
    assert len(seen) > 3


def test_who_keeps_the_error_of_a_sync_keeps_no_bucket_SYN_5():
    """SYN-5: the next attempt needs their memory."""
    buckets = []

    class Broken(Transport):
        def start(self, group, buffer):
            buckets.append(StorageWeakRef(buffer.untyped_storage()))
            raise RuntimeError("a server left")

    entry = SimpleNamespace(name="tensor", num_bytes=BUCKET, dtype=torch.uint8, shape=(BUCKET,))
    weights = SimpleNamespace(
        is_sharded=False, gathered=lambda entry: contextlib.nullcontext(), write=lambda entry, view: None
    )
    transport = Broken(BUCKET, timeout_s=60, open_timeout_s=60)
    transport.groups = [None]
    with pytest.raises(RuntimeError, match="a server left") as kept:
        transport.send(weights, [entry], digest=False, check_servers=lambda: None)
    assert kept.traceback and [bucket.expired() for bucket in buckets] == [True]
