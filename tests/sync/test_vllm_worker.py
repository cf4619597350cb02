"""SYN-1, SYN-5, SYN-7, SYN-3: the receiving end of weight transfer, over real Gloo, with models of a few numbers."""

import contextlib
import gc
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

vllm_worker = pytest.importorskip("utils.sync.vllm_worker")

from vllm.distributed.utils import stateless_init_torch_distributed_process_group as open_group  # noqa: E402
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase  # noqa: E402
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading  # noqa: E402

from tests.e2e.processes import free_port  # noqa: E402
from utils.sync.wire import bucket_layouts, loopback_if_local, tensor_digest  # noqa: E402


class TinyModel(nn.Module):
    """Two layers; `load_weights` as vLLM models have it: checkpoint name in, set of parameter names out."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3, bias=False)
        self.second = nn.Linear(3, 2, bias=False)
        self.pair = nn.Module()
        self.pair.left = nn.Parameter(torch.ones(2))
        self.pair.right = nn.Parameter(torch.ones(3))

    def load_weights(self, weights):
        loaded = set()
        for name, tensor in weights:
            if name == "rotary.inv_freq":
                continue  # known and ignored, like vLLM does
            module, _, key = name.rpartition(".")
            param = getattr(self.get_submodule(module), key)
            assert param.shape == tensor.shape, f"{name}: {tuple(tensor.shape)}"
            getattr(param, "weight_loader", _copy)(param, tensor)
            loaded.add(name)
        return loaded


def _copy(param, loaded_weight):
    param.data.copy_(loaded_weight)


def make_engine(model: nn.Module, kind: type = vllm_worker.StreamGlooEngine):
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(dtype=torch.float32))
    for param in model.parameters():
        param.weight_loader = _copy
    with torch.device("cpu"):
        record_metadata_for_reloading(model)
    return kind(SimpleNamespace(), config, torch.device("cpu"), model)


def meet(engine, bucket_bytes: int, timeout_s: float = 20.0, open_timeout_s: float = 20.0):
    """Open the communicator; returns the learner's end."""
    port, ends = free_port(), []
    learner = threading.Thread(
        target=lambda: ends.append(
            open_group("127.0.0.1", port, 0, 2, backend="gloo", timeout=timedelta(seconds=open_timeout_s))
        )
    )
    learner.start()
    limits = timeout_s, open_timeout_s
    engine.init_transfer_engine(vllm_worker.InitInfo("127.0.0.1", port, 2, 1, bucket_bytes, *limits))
    learner.join()
    return ends[0]


def send(group, tensors: dict, bucket_bytes: int, stop_before: int | None = None) -> None:
    tensors = list(tensors.values())
    options = torch.distributed.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    for index, layout in enumerate(bucket_layouts([t.numel() * t.element_size() for t in tensors], bucket_bytes)):
        if index == stop_before:
            return
        bucket = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        for tensor, offset in zip(tensors[layout.first : layout.last], layout.offsets, strict=True):
            raw = tensor.contiguous().view(-1).view(torch.uint8)
            bucket[offset : offset + raw.numel()] = raw
        group.broadcast([bucket], options).wait()


def info_of(tensors: dict, digest: bool = True) -> dict:
    return {
        "names": list(tensors),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
        "digest": digest,
    }


def new_weights() -> dict:
    shapes = {"first.weight": (3, 4), "second.weight": (2, 3), "pair.left": (2,), "pair.right": (3,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def bucket_memory(engine) -> list[StorageWeakRef]:
    """The memory of every bucket that the engine receives from now on."""
    storages, receive = [], engine._receive

    def noted(layout):
        bucket, work = receive(layout)
        storages.append(StorageWeakRef(bucket.untyped_storage()))
        return bucket, work

    engine._receive = noted
    return storages


@pytest.mark.parametrize("bucket_bytes", [1, 30, 64, 1 << 20])
def test_a_streamed_update_loads_every_tensor_bit_for_bit(bucket_bytes):
    """SYN-1, SYN-5, SYN-7: whatever the buckets; digests are of what arrived; tensors in force keep their storage."""
    model = TinyModel()
    engine = make_engine(model)
    storage = model.first.weight.data_ptr()
    group, buckets = meet(engine, bucket_bytes), bucket_memory(engine)
    for _ in range(2):
        tensors = new_weights()
        sender = threading.Thread(target=send, args=(group, tensors, bucket_bytes))
        sender.start()
        engine.start_weight_update()
        engine.update_weights(info_of(tensors))
        sender.join()
        assert engine.summary() == {
            "digests": {name: tensor_digest(tensor) for name, tensor in tensors.items()},
            "parameters": {name: [name] for name in tensors},
        }
        engine.finish_weight_update()
        assert engine.missing == []
        assert all(torch.equal(dict(model.named_parameters())[name], tensor) for name, tensor in tensors.items())
    assert model.first.weight.data_ptr() == storage
    deadline = time.monotonic() + 10
    while not all(memory.expired() for memory in buckets) and time.monotonic() < deadline:
        time.sleep(0.01)  # Gloo's thread lets go of a bucket a moment after its end
    assert buckets and all(memory.expired() for memory in buckets)  # the model holds copies only
    engine.shutdown()


def test_tensors_that_are_not_sent_keep_their_values_and_are_reported():
    """SYN-6"""
    model = TinyModel()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine = make_engine(model)
    group = meet(engine, 64)
    tensors = {"first.weight": torch.randn(3, 4)}
    engine.start_weight_update()
    sender = threading.Thread(target=send, args=(group, tensors, 64))
    sender.start()
    engine.update_weights(info_of(tensors, digest=False))
    sender.join()
    assert engine.summary() == {"digests": {}, "parameters": {"first.weight": ["first.weight"]}}
    engine.finish_weight_update()
    assert engine.missing == ["pair.left", "pair.right", "second.weight"]
    assert torch.equal(model.first.weight, tensors["first.weight"])
    assert torch.equal(model.second.weight, before["second.weight"])
    engine.shutdown()


def receive(engine, group, tensors: dict, digest: bool) -> dict:
    """One finished update; returns the worker's summary of it."""
    engine.start_weight_update()
    sender = threading.Thread(target=send, args=(group, tensors, 64))
    sender.start()
    engine.update_weights(info_of(tensors, digest))
    sender.join()
    summary = engine.summary()
    engine.finish_weight_update()
    return summary


def test_the_ledger_covers_tensors_that_are_not_sent_again():
    """SYN-7: what a worker reports is all it holds; a tensor that came without digest is no longer vouched for."""
    engine = make_engine(TinyModel())
    group = meet(engine, 64)
    everything, part = new_weights(), {"second.weight": torch.randn(2, 3)}
    receive(engine, group, everything, digest=True)
    summary = receive(engine, group, part, digest=True)
    assert summary["digests"] == {name: tensor_digest(tensor) for name, tensor in (everything | part).items()}
    assert summary["parameters"] == {"second.weight": ["second.weight"]}
    assert receive(engine, group, part, digest=False)["digests"] == {}
    left = receive(engine, group, {"first.weight": torch.randn(3, 4)}, digest=True)["digests"]
    assert set(left) == {"first.weight", "pair.left", "pair.right"}
    engine.shutdown()


class Packing(QuantizeMethodBase):
    """Packs a weight for products as vLLM does on CPU."""

    def create_weights(self, layer, *args, **kwargs):
        raise NotImplementedError

    def apply(self, layer, x, bias=None):
        return layer.cpu_linear(x)

    def process_weights_after_loading(self, layer):
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x: x @ packed.T


class OtherPacking(Packing):
    pass


@pytest.mark.parametrize(
    ("embeddings_method", "bias", "is_shared"),
    [(Packing(), False, True), (OtherPacking(), False, False), (None, False, False), (Packing(), True, False)],
)
def test_a_tied_output_layer_computes_with_the_new_weights(embeddings_method, bias, is_shared):
    """SYN-7: vLLM 0.32 leaves it with its packed copy of the old ones on CPU. Packed alike, one copy serves both."""
    model = TinyModel()
    model.head = nn.Linear(4, 3, bias=bias)
    model.head.weight = model.first.weight
    model.head.quant_method = Packing()
    if embeddings_method is not None:
        model.first.quant_method = embeddings_method
    model.head.quant_method.process_weights_after_loading(model.head)
    engine = make_engine(model)
    for _ in range(2):
        sent, x = torch.randn(3, 4), torch.randn(2, 4)
        engine.start_weight_update()
        engine.update.load([("first.weight", sent)])
        engine.finish_weight_update()
        assert model.head.weight is model.first.weight
        assert torch.equal(model.head.quant_method.apply(model.head, x), x @ sent.T)
        assert (model.head.cpu_linear is getattr(model.first, "cpu_linear", None)) == is_shared
        assert "head.weight" not in engine.missing


def test_a_fused_group_that_came_in_part_is_refused():
    """SYN-6: vLLM would finish it with uninitialised memory."""
    engine = make_engine(TinyModel())
    engine.start_weight_update()
    engine.update.load([("pair.left", torch.zeros(2))])
    with pytest.raises(RuntimeError, match="part of a fused tensor arrived for pair"):
        engine.finish_weight_update()


def test_a_tensor_that_the_model_ignores_is_refused_by_name():
    engine = make_engine(TinyModel())
    engine.start_weight_update()
    engine.update.load([("first.weight", torch.zeros(3, 4)), ("rotary.inv_freq", torch.zeros(2))])
    with pytest.raises(RuntimeError, match="does not take these tensors: rotary.inv_freq"):
        engine.finish_weight_update()


@pytest.mark.parametrize("is_known", [False, True])
def test_a_bad_tensor_is_reported_only_after_the_whole_stream_was_read(is_known):
    """SYN-3: a worker that left at the bad tensor would leave its peers hanging. Known tensors load in one call."""
    engine = make_engine(TinyModel())
    group = meet(engine, 1)
    if is_known:
        engine._parameters.update({name: {name} for name in new_weights()})
    tensors = {"first.weight": torch.zeros(3, 5), "second.weight": torch.zeros(2, 3), "pair.left": torch.zeros(2)}
    sender = threading.Thread(target=send, args=(group, tensors, 1))
    sender.start()
    engine.start_weight_update()
    with pytest.raises(RuntimeError, match="loading first.weight failed"):
        engine.update_weights(info_of(tensors))
    sender.join(5)
    assert not sender.is_alive()
    with pytest.raises(RuntimeError, match="first.weight"):
        engine.finish_weight_update()
    engine.shutdown()


def test_known_tensors_reach_the_model_in_one_call_however_many_buckets():
    """SYN-5: every call of vLLM's `load_weights` walks the whole model."""
    model = TinyModel()
    engine = make_engine(model)
    group = meet(engine, 64)
    calls, load_weights = [], model.load_weights
    model.load_weights = lambda weights: (calls.append(0), load_weights(weights))[1]
    receive(engine, group, new_weights(), digest=False)
    first, tensors = len(calls), new_weights()
    summary = receive(engine, group, tensors, digest=True)
    assert first == 4 and len(calls) == first + 1
    assert summary["digests"] == {name: tensor_digest(tensor) for name, tensor in tensors.items()}
    assert all(torch.equal(dict(model.named_parameters())[name], tensor) for name, tensor in tensors.items())
    engine.shutdown()


@pytest.mark.parametrize("is_known", [False, True])
def test_after_a_lost_sender_the_engine_takes_a_new_communicator_and_a_full_update(is_known):
    """SYN-3: an update that broke off half way leaves nothing behind."""
    model = TinyModel()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    engine = make_engine(model)
    group = meet(engine, 1, timeout_s=5.0)
    tensors = new_weights()
    if is_known:
        engine._parameters.update({name: {name} for name in tensors})
    engine.start_weight_update()

    def die(group):
        send(group, tensors, 1, stop_before=3)
        group.shutdown()

    sender = threading.Thread(target=die, args=(group,))
    sender.start()
    with pytest.raises(RuntimeError, match="the weight stream broke off"):
        engine.update_weights(info_of(tensors))
    sender.join()
    engine.reset_update()
    assert torch.equal(model.first.weight, tensors["first.weight"])  # was complete
    assert torch.equal(model.pair.left, before["pair.left"]) and torch.equal(model.pair.right, before["pair.right"])
    with pytest.raises(RuntimeError, match="no communicator"):
        engine.start_weight_update()
        engine.update_weights(info_of(tensors))

    group = meet(engine, 1)
    engine.start_weight_update()  # without a reset in between: it resets by itself
    sender = threading.Thread(target=send, args=(group, tensors, 1))
    sender.start()
    engine.update_weights(info_of(tensors))
    sender.join()
    engine.finish_weight_update()
    assert all(torch.equal(dict(model.named_parameters())[name], tensor) for name, tensor in tensors.items())
    engine.shutdown()


def test_a_worker_knows_whether_its_learner_is_alive(monkeypatch):
    """SRV-3: on the connection of the rendezvous, so that another store on the same port does not count."""
    engine = make_engine(TinyModel())

    def is_alive() -> bool:
        return vllm_worker.ask_store(engine.learner_store, "anything") is not None

    assert not is_alive()
    group = meet(engine, 64)
    assert is_alive()
    port = engine.learner_store.port
    del group  # closes its connections, as the end of the process would
    gc.collect()
    another = torch.distributed.TCPStore("127.0.0.1", port, 1, True, wait_for_workers=False)
    assert not is_alive()
    del another
    engine.shutdown()
    assert not is_alive()

    monkeypatch.setattr(vllm_worker, "LEARNER_TIMEOUT_S", 0.1)
    engine.learner_store = SimpleNamespace(check=lambda _: threading.Event().wait(5))
    assert not is_alive()  # a machine that vanished


def test_a_learner_in_the_middle_of_a_broadcast_hears_that_the_worker_left():
    """SYN-3: at once, not at its time-out, and leaving the group does not hang either."""

    class Worker(vllm_worker.WorkerExtension):
        vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, rank=0))
        weight_transfer_engine = make_engine(TinyModel())

    group = meet(Worker.weight_transfer_engine, 64, timeout_s=60)
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.asyncOp = 0, True
    work = group.broadcast([torch.zeros(1 << 24, dtype=torch.uint8)], options)
    assert not work.is_completed()
    start = time.monotonic()
    assert Worker().weight_rpc("abort", {}) == {"result": None, "error": None}
    with pytest.raises(RuntimeError):
        work.wait()
    group.shutdown()
    assert time.monotonic() - start < 10


def test_an_engine_gives_free_memory_back_now_and_then(monkeypatch):
    """SRV-8: what lies between blocks in use is the system's again."""
    monkeypatch.setattr(vllm_worker, "UPDATES_PER_TRIM", 2)
    engine, process, sizes = make_engine(TinyModel()), psutil.Process(), []
    group = meet(engine, 64)
    blocks = [torch.ones(4096) for _ in range(4096)]  # 64 MiB
    del blocks[:-1]  # the last one keeps malloc from giving back by itself
    for _ in range(2):
        receive(engine, group, new_weights(), digest=False)
        sizes.append(process.memory_info().rss)
    assert sizes[0] - sizes[1] > 32 << 20
    engine.shutdown()


def test_nobody_waits_for_ever():
    """SYN-3: a learner that never comes, and one that stops sending, end after timeout_s."""
    engine = make_engine(TinyModel())
    with pytest.raises(Exception, match="(?i)time"):
        engine.init_transfer_engine(vllm_worker.InitInfo("127.0.0.1", free_port(), 2, 1, 64, 1.0, 1.0))
    group = meet(engine, 64, timeout_s=1.0)
    engine.start_weight_update()
    with pytest.raises(RuntimeError, match="broke off"):
        engine.update_weights(info_of(new_weights()))
    del group


def test_steps_answer_instead_of_raising():
    """A worker that raised would leave its tensor-parallel peers' replies in vLLM's queues."""

    class Worker(vllm_worker.WorkerExtension):
        vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=1, world_size=2, rank=1))

        def start_weight_update(self):
            raise KeyError("x")

        def shutdown(self):
            pass

        @property
        def weight_transfer_engine(self):
            return self

    assert Worker().weight_rpc("close", {}) == {"result": None, "error": None}
    answer = Worker().weight_rpc("start", {})
    assert answer["result"] is None and answer["error"] == "engine worker 3: KeyError: 'x'"


def test_a_worker_tells_the_load_of_its_device_LOG_6(monkeypatch):
    """LOG-6: bytes in use, and on CUDA how busy it is where the driver says so; a driver that does not is no error."""
    load = vllm_worker.WorkerExtension().weight_rpc("device_load", {})
    assert load["error"] is None and load["result"].keys() == {"memory_bytes"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10, 80))
    monkeypatch.setattr(torch.cuda, "utilization", lambda: 75)
    assert vllm_worker.WorkerExtension()._weight_device_load() == {"memory_bytes": 70, "utilization": 0.75}

    def no_driver():
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "utilization", no_driver)
    assert vllm_worker.WorkerExtension()._weight_device_load() == {"memory_bytes": 70}


def test_adapter_tensors_go_past_the_model_and_need_a_slot():
    """SYN-10: an engine without slots refuses them and stays as it was; their memory is the worker's own."""
    model = TinyModel()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}

    class Worker(vllm_worker.WorkerExtension):
        vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, rank=0))
        model_runner = SimpleNamespace()
        weight_transfer_engine = make_engine(model)

    engine = Worker.weight_transfer_engine
    engine.start_weight_update()
    name, tensor = "base_model.model.first.lora_A.weight", torch.ones(2, 4)
    engine.update.load([(name, tensor)])
    tensor.zero_()  # the bucket is used again
    assert torch.equal(engine.update.adapter[name], torch.ones(2, 4)) and not engine.update.unexpected
    assert "no LoRA slots; start it with" in Worker().weight_rpc("finish", {})["error"]
    engine.reset_update()
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


def test_a_full_update_fills_the_adapter_slot_with_nothing_SYN_10(monkeypatch):
    """SYN-10: a request that was queued before may still name it."""
    filled = []
    monkeypatch.setattr(vllm_worker, "_fill_slot_with_nothing", filled.append)

    class Worker(vllm_worker.WorkerExtension):
        model_runner = SimpleNamespace(lora_manager="slots")
        weight_transfer_engine = SimpleNamespace(update=SimpleNamespace(adapter={}), missing=["w"])

        def finish_weight_update(self):
            filled.append("finished")

    assert Worker().weight_rpc("finish", {}) == {"result": ["w"], "error": None}
    assert filled == ["finished", "slots"]  # vLLM empties the slots as it finishes


def test_an_abort_and_an_opening_leave_no_update_behind_SYN_3(monkeypatch):
    """SYN-3: vLLM starts no update while it takes one to be in progress."""
    monkeypatch.setattr(vllm_worker, "set_current_vllm_config", lambda config: contextlib.nullcontext())
    calls = []

    class Worker(vllm_worker.WorkerExtension):
        vllm_config = None
        weight_transfer_engine = SimpleNamespace(
            reset_update=lambda: calls.append("reset"), shutdown=lambda: calls.append("leave")
        )

        def init_weight_transfer_engine(self, init_info):
            calls.append("open")

    worker = Worker()
    for step, expected in (("abort", ["reset", "leave"]), ("init", ["reset", "leave", "open"])):
        worker._weight_update_active = True
        assert worker.weight_rpc(step, {})["error"] is None
        assert not worker._weight_update_active and calls == expected
        calls.clear()


def test_what_an_abandoned_opening_still_opens_is_not_taken_SRV_12(monkeypatch):
    """SRV-12: the next one has taken its place by then."""
    engine = make_engine(TinyModel())

    def open_late(*args, **named):
        engine.shutdown()  # by an abort, meanwhile
        return "group", "store"

    monkeypatch.setattr(vllm_worker, "stateless_init_torch_distributed_process_group", open_late)
    engine._opener = threading.get_ident()
    with pytest.raises(RuntimeError, match="given up"):
        engine._open(vllm_worker.InitInfo("127.0.0.1", 1, 2, 1, 100, 1.0, 1.0), 1, 1.0)
    assert engine._group is None and engine.learner_store is None


def test_gloo_listens_on_loopback_only_for_a_local_learner(monkeypatch):
    """SRV-3"""
    import os

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with loopback_if_local("10.1.2.3"):
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    for address in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        with loopback_if_local(address):
            assert os.environ.get("GLOO_SOCKET_IFNAME") == "lo", address
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # as `Ranks.open` sets it: a remote server is not reached there
    with loopback_if_local("10.1.2.3"):
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_both_engines_are_registered():
    """SYN-1: NCCL between CUDA devices, Gloo on CPU, through vLLM's own registry and interface."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    assert {"stream_gloo", "stream_nccl"} <= set(WeightTransferEngineFactory._registry)
    assert issubclass(vllm_worker.StreamNcclEngine, WeightTransferEngine)


def test_the_opening_and_the_updates_have_limits_of_their_own_CFG_8():
    """CFG-8, SYN-3: a learner that never comes within `open_timeout_s`, a bucket that never comes `timeout_s`."""
    engine, start = make_engine(TinyModel()), time.monotonic()
    with pytest.raises(Exception, match="(?i)time"):
        engine.init_transfer_engine(vllm_worker.InitInfo("127.0.0.1", free_port(), 2, 1, 64, 60.0, 1.0))
    group = meet(engine, 64, timeout_s=1.0, open_timeout_s=60.0)
    engine.start_weight_update()
    with pytest.raises(RuntimeError, match="broke off"):
        engine.update_weights(info_of(new_weights()))
    assert time.monotonic() - start < 15
    del group


def test_experts_are_packed_for_cpu_kernels_at_every_update_FAM_3_SYN_4(monkeypatch):
    """FAM-3, SYN-4: vLLM 0.32 itself packs at start only. On CUDA there is nothing to pack."""
    from utils.sync import vllm_reload

    packed = []
    kernel = SimpleNamespace(fused_experts=SimpleNamespace(process_weights_after_loading=packed.append))

    class Method:
        moe_kernel = None

        def _setup_kernel(self, layer, w13, w2):
            if self.moe_kernel is None:
                self.moe_kernel = kernel
                kernel.fused_experts.process_weights_after_loading(layer)

    monkeypatch.setattr(vllm_reload, "UnquantizedFusedMoEMethod", Method)
    vllm_reload.pack_experts_at_updates()
    method = Method()
    for layer, device in (("start", "cpu"), ("first update", "cpu"), ("second update", "cpu"), ("on a GPU", "meta")):
        method._setup_kernel(layer=layer, w13=torch.zeros(1, device=device), w2=None)
    assert packed == ["start", "first update", "second update"]


def test_vllm_has_the_place_where_experts_are_packed_FAM_3():
    """FAM-3: importing the receiving end has put our function in the place of vLLM's."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    assert UnquantizedFusedMoEMethod._setup_kernel.__module__ == "utils.sync.vllm_reload"
