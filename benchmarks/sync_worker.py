"""Runs inside vLLM's workers during the sync benchmark: parts of a weight update, each alone."""

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from safetensors.torch import load_file

from utils.sync.vllm_worker import WorkerExtension


class BenchExtension(WorkerExtension):
    """The server's own extension and three steps more, which return seconds."""

    _bench_tensors: list[tuple[str, torch.Tensor]] | None = None

    def _weight_bench_load(self, path: str) -> float:
        """vLLM's own reload of tensors that lie in memory already: no transfer.

        The output layer takes the embeddings' packed copy of the weight they share, as after a sync: a load that packs
        another one, as vLLM's first does, does what can be avoided.
        """
        if self._bench_tensors is None:
            self._bench_tensors = [(name, tensor.clone()) for name, tensor in load_file(path).items()]
        engine = self.weight_transfer_engine
        start = time.perf_counter()
        self.start_weight_update()
        engine.update.loaded = set(engine.model.load_weights(iter(self._bench_tensors)))
        self.finish_weight_update()
        return time.perf_counter() - start

    def _weight_bench_receive(self, sizes: list[int]) -> float:
        """Take broadcasts of `sizes` bytes from the learner, into memory that is there already, and drop them."""
        return self._receive([torch.ones(size, dtype=torch.uint8) for size in sizes])

    def _weight_bench_both(self, path: str, sizes: list[int]) -> float:
        """Load and receive at once, neither waiting for the other; into fresh memory, as an engine must that keeps
        what arrives until a layer is complete."""
        start = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(self._receive, (torch.empty(size, dtype=torch.uint8) for size in sizes))
            self._weight_bench_load(path)
            receiving.result()
        return time.perf_counter() - start

    def _receive(self, buffers: Iterable[torch.Tensor]) -> float:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        group = self.weight_transfer_engine._group
        group.barrier().wait()
        start = time.perf_counter()
        for buffer in buffers:
            group.broadcast([buffer], options).wait()
        return time.perf_counter() - start
