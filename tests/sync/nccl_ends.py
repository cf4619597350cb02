"""Both ends of a weight stream over the emulated NCCL, as processes (`tests.emulated_nccl.peers`) for tests/sync."""

import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

NUM_LAYERS, WIDTH = 12, 128  # 64 KiB each
BUCKET_BYTES = 256 << 10  # buckets of 1, 1, 2, 4 and 4 layers
NUM_BUCKETS = 5
POISONED = 13323083.0  # what an emulated receive leaves where nothing arrived


class Net(nn.Module):
    """Layers of one size; `load_weights` as vLLM's models have it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))

    def load_weights(self, weights: Any) -> set[str]:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            parameters[name].weight_loader(parameters[name], tensor)
            loaded.add(name)
        return loaded


def _copy(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)


def receiver(connection: Connection) -> None:
    """A vLLM worker with one engine, whose only thread serves one call after the other and answers each.

    Calls are `(step, payload)`, with the steps of `WorkerExtension.weight_rpc` and a few for tests. `strike`: say when
    half of a bucket has arrived; in the middle of the communicator's `at`-th one, hold it for `hold_s` seconds, then
    send the signal `number`, if any, to this process.
    """
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from tests.emulated_nccl import library
    from utils.sync import vllm_worker

    model = Net(seed=int(time.monotonic_ns() % 1000))
    for parameter in model.parameters():
        parameter.weight_loader = _copy
    with torch.device("cpu"):
        record_metadata_for_reloading(model)
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(dtype=torch.float32))
    engine = vllm_worker.StreamNcclEngine(SimpleNamespace(), config, torch.device("cpu"), model)
    answering = threading.Lock()

    def say(*what: Any) -> None:
        with answering:
            connection.send(what)

    def strike(at: int, number: signal.Signals | None, hold_s: float) -> None:
        def half_way(index: int) -> None:
            say("half", index)
            if index == at:
                time.sleep(hold_s)
                if number is not None:
                    os.kill(os.getpid(), number)
                    time.sleep(0.2)  # another thread may take the signal, and this one would go on for a moment

        library.half_way = half_way

    steps = {
        "init": lambda **info: engine.init_transfer_engine(vllm_worker.InitInfo(**info)),
        "start": engine.start_weight_update,
        "update": lambda **info: (engine.update_weights(info), engine.summary())[1],
        "finish": lambda: (engine.finish_weight_update(), engine.missing)[1],
        "abort": lambda: (engine.reset_update(), engine.shutdown())[1],
        "alive": lambda: vllm_worker.ask_store(engine.learner_store, "anything") is not None,
        "weights": lambda: {name: tensor.detach().clone() for name, tensor in model.named_parameters()},
        "strike": strike,
    }
    while True:
        step, payload = connection.recv()
        try:
            say("done", step, steps[step](**payload))
        except Exception as error:
            say("failed", step, f"{type(error).__name__}: {error}")


def sender(connection: Connection, addresses: list[tuple[str, int]], timeout_s: float) -> None:
    """A learner: open, then one full sync for each message. SIGTERM is answered as the trainer does, in Python."""
    from utils.sync.merged_weights import MergedWeights
    from utils.sync.transports import NcclTransport

    def stop(*_: Any) -> None:
        raise SystemExit("terminated")

    signal.signal(signal.SIGTERM, stop)
    weights = MergedWeights(Net(seed=1))
    transport = NcclTransport(BUCKET_BYTES, timeout_s, timeout_s)
    transport.open(addresses, [1] * len(addresses))
    connection.send(("open",))
    try:
        while True:
            connection.recv()
            connection.send(("sent", transport.send(weights, weights.entries, True, lambda: None)))
    except BaseException as error:
        connection.send(("ended", f"{type(error).__name__}: {error}"))
        raise
