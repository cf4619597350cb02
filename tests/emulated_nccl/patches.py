"""What makes a program without GPUs use the emulated NCCL, put over its modules right after their import.

- torch: streams and events of `torch.cuda`.
- vLLM's `pynccl`: `EmulatedNCCLLibrary` below `PyNcclCommunicator`, which stays vLLM's own, on the CPU device.
- ours: the learner's and the server's choice of NCCL, which CUDA devices would bring about.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Put = Callable[[Any, str, Any], None]  # setattr, or a monkeypatch's


def patch_torch(torch: ModuleType, put: Put) -> None:
    from tests.emulated_nccl import streams

    for name in ("Stream", "Event", "current_stream", "default_stream", "set_stream", "stream", "synchronize"):
        put(torch.cuda, name, getattr(streams, name))
    put(torch.accelerator, "current_device_index", lambda: 0)
    put(torch.Tensor, "record_stream", lambda tensor, stream: None)


def patch_pynccl(pynccl: ModuleType, put: Put) -> None:
    import torch

    from tests.emulated_nccl import library, streams

    communicator = pynccl.PyNcclCommunicator
    on_device, broadcast, all_reduce = communicator._init_comm, communicator.broadcast, communicator.all_reduce

    def kept(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        library.keep(tensor)
        broadcast(self, tensor, *args, **kwargs)

    def kept_sum(self: Any, tensor: Any, out: Any = None, *args: Any, **kwargs: Any) -> Any:
        out = torch.empty_like(tensor) if out is None else out
        library.keep((tensor, out))
        return all_reduce(self, tensor, out, *args, **kwargs)

    put(pynccl, "NCCLLibrary", library.EmulatedNCCLLibrary)
    put(pynccl, "current_stream", streams.vllm_current_stream)
    put(communicator, "_init_comm", lambda self, device: on_device(self, torch.device("cpu")))
    put(communicator, "broadcast", kept)
    put(communicator, "all_reduce", kept_sum)


def patch_nccl(nccl: ModuleType, put: Put) -> None:
    import torch

    from tests.emulated_nccl import streams

    put(nccl, "current_device", lambda: torch.device("cpu"))
    put(nccl, "current_stream", streams.current_stream)
    put(nccl, "new_stream", streams.Stream)
    put(nccl, "release_memory", lambda: None)


def patch_weight_sync(weight_sync: ModuleType, put: Put) -> None:
    put(weight_sync, "GlooTransport", weight_sync.NcclTransport)


def patch_launch(launch: ModuleType, put: Put) -> None:
    engine_args = launch.engine_args

    @functools.wraps(engine_args)
    def with_nccl(*args: Any, **kwargs: Any) -> Any:
        arguments = engine_args(*args, **kwargs)
        arguments.weight_transfer_config.backend = "stream_nccl"
        return arguments

    put(launch, "engine_args", with_nccl)


PATCHES: dict[str, Callable[[ModuleType, Put], None]] = {
    "torch": patch_torch,
    "vllm.distributed.device_communicators.pynccl": patch_pynccl,
    "utils.sync.nccl": patch_nccl,
    "utils.sync.weight_sync": patch_weight_sync,
    "utils.server.launch": patch_launch,
}


class PatchAfterImport(importlib.abc.MetaPathFinder):
    """Finds the modules of `PATCHES` as Python would, and patches each once it has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def run_and_patch(module: ModuleType) -> None:
            run(module)
            PATCHES[name](module, setattr)

        spec.loader.exec_module = run_and_patch
        return spec


def install() -> None:
    sys.meta_path.insert(0, PatchAfterImport())
