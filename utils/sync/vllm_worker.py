"""The receiving end of weight transfer, inside vLLM's worker processes.

Stands on vLLM 0.32's weight-transfer interface, which changes with vLLM releases. Naming `WorkerExtension` as vLLM's
`worker_extension_cls` imports the module in every worker, which registers two engines:

- `stream_gloo`: buckets over Gloo, for CPU engines.
- `stream_nccl`: buckets over NCCL, for CUDA engines, with a watchdog (`utils.sync.nccl`).

Both take buckets as `utils.sync.wire` lays them out, and load them through `utils.sync.vllm_reload`.
"""

import contextlib
import ctypes
import logging
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.utils import (
    stateless_destroy_torch_distributed_process_group,
    stateless_init_torch_distributed_process_group,
)
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

from utils.dist import capture_error
from utils.sync import nccl
from utils.sync.rendezvous import open_nccl
from utils.sync.vllm_reload import NamedTensor, StreamBroken, StreamedUpdates
from utils.sync.wire import ADAPTER_ID, BucketLayout, bucket_layouts, loopback_if_local

logger = logging.getLogger(__name__)

UPDATES_PER_TRIM = 10  # how often a CPU engine returns what malloc keeps in pieces to the system
LEARNER_TIMEOUT_S = 5.0  # a learner whose store has not answered for so long counts as dead
OPEN_SLICE_S = 0.1  # how long a worker answers nothing else while a communicator is being opened
WATCH_INTERVAL_S = 1.0  # between two questions to the learner's store during an update over NCCL


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The learner (rank 0) hosts the store; `timeout_s` bounds the wait for a bucket, `open_timeout_s` the opening."""

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int
    bucket_bytes: int
    timeout_s: float
    open_timeout_s: float


@dataclass
class UpdateInfo(NCCLWeightTransferUpdateInfo):
    digest: bool = False


class BucketStream(StreamedUpdates, WeightTransferEngine[InitInfo, UpdateInfo]):
    """One uint8 broadcast from rank 0 per bucket; the next one travels while the last is loaded."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    _bucket_bytes = 0
    _timeout_s = 300.0
    _opener: int | None = None  # the thread whose opening is wanted

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()  # left over from a learner that died
        self._bucket_bytes = init_info.bucket_bytes
        self._timeout_s = init_info.timeout_s
        rank = _global_worker_rank(self.parallel_config) + init_info.rank_offset
        self._opener = threading.get_ident()
        deadline = time.monotonic() + init_info.open_timeout_s
        self._await_learner(init_info, deadline)
        self._open(init_info, rank, max(0.1, deadline - time.monotonic()))

    def _await_learner(self, init_info: InitInfo, deadline: float) -> None:
        """Wait until the learner listens: the calls after this one block in C, which nobody could call back."""
        address = init_info.master_address, init_info.master_port
        while True:
            self._check_wanted()
            try:
                return socket.create_connection(address, timeout=1.0).close()
            except OSError as error:
                if time.monotonic() > deadline:
                    where = f"{address[0]}:{address[1]} in {init_info.open_timeout_s:g} s"
                    raise TimeoutError(f"timed out: no learner at {where}: {error}") from None
            time.sleep(0.1)

    def _check_wanted(self) -> None:
        if self._opener != threading.get_ident():
            raise RuntimeError("the opening of this communicator was given up")

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Raises StreamBroken when the sender is gone or silent for `timeout_s`; the group is unusable afterwards."""
        tensors = []
        for name, dtype_name, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            dtype = getattr(torch, dtype_name, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name}: unknown dtype {dtype_name!r}")
            tensors.append((name, dtype, shape, torch.Size(shape).numel() * dtype.itemsize))
        with disable_mtp_completeness_check():
            self.update.load_stream(self._tensors(tensors), update_info.names)

    def _tensors(self, tensors: list[tuple[str, torch.dtype, list[int], int]]) -> Iterator[NamedTensor]:
        """Yield tensors of `(name, dtype, shape, bytes)` as views into the buckets; nothing is copied."""
        layouts = bucket_layouts([num_bytes for *_, num_bytes in tensors], self._bucket_bytes)
        for layout, bucket in self._buckets(layouts):
            here = zip(tensors[layout.first : layout.last], layout.offsets, strict=True)
            for (name, dtype, shape, num_bytes), offset in here:
                yield name, bucket[offset : offset + num_bytes].view(dtype).view(shape)

    def _buckets(self, layouts: list[BucketLayout]) -> Iterator[tuple[BucketLayout, torch.Tensor]]:
        """Yield buckets in order, the next one already under way."""
        try:
            arriving = self._receive(layouts[0])
            for index, layout in enumerate(layouts):
                bucket, work = arriving
                work.wait()
                if index + 1 < len(layouts):
                    arriving = self._receive(layouts[index + 1])
                yield layout, bucket
        except RuntimeError as error:
            self._leave()
            raise StreamBroken(f"the weight stream broke off: {str(error).partition('. ')[0]}") from error

    def _leave(self) -> None:
        """Leave a stream that broke off. Over Gloo the others notice by themselves."""
        self.shutdown()


class StreamGlooEngine(BucketStream):
    """Buckets over Gloo."""

    learner_store: torch.distributed.Store | None = None
    _group: torch.distributed.ProcessGroup | None = None
    _num_updates = 0

    def _open(self, init_info: InitInfo, rank: int, timeout_s: float) -> None:
        with loopback_if_local(init_info.master_address):
            group, store = stateless_init_torch_distributed_process_group(
                init_info.master_address,
                init_info.master_port,
                rank=rank,
                world_size=init_info.world_size,
                backend="gloo",
                timeout=timedelta(seconds=timeout_s),
                return_store=True,
            )
        self._check_wanted()
        self._group, self.learner_store = group, store

    def _receive(self, layout: BucketLayout) -> tuple[torch.Tensor, torch.distributed.Work]:
        bucket = torch.empty(layout.num_bytes, dtype=torch.uint8)  # vLLM keeps views until their module is complete
        options = torch.distributed.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=self._timeout_s)
        return bucket, self._group.broadcast([bucket], options)

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._num_updates += 1
        if self._num_updates % UPDATES_PER_TRIM == 0:
            # Kernels that oneDNN keeps lie scattered between blocks that come and go with every request and update:
            # glibc's heap would grow for thousands of steps without more of it in use.
            with contextlib.suppress(AttributeError):  # another malloc
                ctypes.CDLL(None).malloc_trim(0)

    def shutdown(self) -> None:
        self._opener = None
        if self._group is not None:
            with contextlib.suppress(RuntimeError, KeyError):
                stateless_destroy_torch_distributed_process_group(self._group)
            self._group = None
            self.learner_store = None


class StreamNcclEngine(BucketStream):
    """Buckets over NCCL. A watchdog ends an update whose learner is gone, gave it up, or sends nothing for too long."""

    _channel: nccl.Channel | None = None
    _deadline = 0.0  # of the bucket that is awaited

    @property
    def learner_store(self) -> torch.distributed.Store | None:
        return None if self._channel is None else self._channel.meeting.store

    def _open(self, init_info: InitInfo, rank: int, timeout_s: float) -> None:
        address = init_info.master_address, init_info.master_port
        channel = open_nccl(*address, rank, init_info.world_size, timeout_s)
        if self._opener != threading.get_ident():
            channel.close()
        self._check_wanted()
        self._channel = channel

    def receive_weights(self, update_info: UpdateInfo) -> None:
        store, self._deadline = self.learner_store, time.monotonic() + self._timeout_s

        def check() -> None:
            was_given_up = ask_store(store, nccl.ABORT_KEY)
            if was_given_up is None:
                raise RuntimeError("the learner is gone")
            if was_given_up:
                raise RuntimeError("this update was given up, by the learner or another worker")
            if time.monotonic() > self._deadline:
                raise RuntimeError(f"no bucket within {self._timeout_s:g} s")

        with nccl.watched(check, WATCH_INTERVAL_S, self._channel.abort):
            super().receive_weights(update_info)

    def _receive(self, layout: BucketLayout) -> tuple[torch.Tensor, nccl.NcclWork]:
        self._deadline = time.monotonic() + self._timeout_s
        bucket = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self.device)
        return bucket, self._channel.broadcast(bucket)

    def _leave(self) -> None:
        """After an error of its own, tell the server's other workers: in NCCL they would wait for this one, and the
        server for them."""
        if self._channel is not None and self._channel.failure is None:
            with contextlib.suppress(RuntimeError):  # the learner is gone
                self._channel.meeting.store.set(nccl.ABORT_KEY, "")
        super()._leave()

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        if not self.missing:  # everything came: buckets were larger than they will be again
            nccl.release_memory()

    def shutdown(self) -> None:
        self._opener = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None


class WorkerExtension:
    """Mixed into vLLM's worker class. One entry point that answers instead of raising.

    A worker that raises inside a collective call leaves the replies of its tensor-parallel peers unread, and vLLM would
    take them for the answers to its next call. So every worker always answers `{"result", "error"}`.
    """

    def weight_rpc(self, step: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Run the step `_weight_STEP` below, e.g. of a weight update: init, start, update, finish, abort or close."""
        try:
            return {"result": getattr(self, f"_weight_{step}")(**payload), "error": None}
        except Exception as error:
            rank = _global_worker_rank(self.vllm_config.parallel_config)
            logger.exception("weight update: %s failed on worker %d", step, rank)
            return {"result": None, "error": f"engine worker {rank}: {type(error).__name__}: {error}"}

    def _weight_init(self, **init_info: Any) -> bool:
        """Open in a thread, which the next `abort` or `close` leaves behind; return as `_weight_opening` does."""
        self._weight_abort()
        device = getattr(self, "device", None)

        def open_it() -> None:
            if device is not None and device.type == "cuda":
                torch.cuda.set_device(device)  # of this thread
            self.init_weight_transfer_engine(init_info)

        outcome: list[Exception | None] = []
        thread = threading.Thread(target=lambda: outcome.append(capture_error(open_it)), daemon=True)
        self._opening = thread, outcome
        thread.start()
        return self._weight_opening()

    def _weight_opening(self) -> bool:
        """Return whether the communicator is still being opened. Raises what ended the attempt."""
        thread, outcome = self._opening
        thread.join(OPEN_SLICE_S)
        if not thread.is_alive() and outcome[0] is not None:
            raise outcome[0]
        return thread.is_alive()

    def _weight_learner_is_alive(self) -> bool:
        return ask_store(self.weight_transfer_engine.learner_store, nccl.ABORT_KEY) is not None

    def _weight_start(self) -> None:
        self.start_weight_update()

    def _weight_update(self, **update_info: Any) -> dict[str, Any]:
        self.update_weights(update_info)
        return self.weight_transfer_engine.summary()

    def _weight_finish(self) -> list[str]:
        update = self.weight_transfer_engine.update
        adapter = update.adapter if update else {}
        slots = getattr(self.model_runner, "lora_manager", None)
        if adapter and slots is None:
            raise RuntimeError("the engine has no LoRA slots; start it with rollout_server.vllm_enable_lora: true")
        self.finish_weight_update()  # empties the slots
        if adapter:
            _fill_slot(slots, adapter)
        elif slots is not None:
            _fill_slot_with_nothing(slots)
        return self.weight_transfer_engine.missing

    def _weight_abort(self) -> None:
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.reset_update()
        self._weight_update_active = False
        self._weight_close()  # a learner in the middle of a broadcast would otherwise wait for its time-out

    def _weight_close(self) -> None:
        self.weight_transfer_engine.shutdown()

    def _weight_device_load(self) -> dict[str, float]:
        """`memory_bytes` in use on this worker's device and its `utilization`, 0 to 1; on CPU the process's memory."""
        if not torch.cuda.is_available():
            return {"memory_bytes": psutil.Process().memory_info().rss}
        free, total = torch.cuda.mem_get_info()
        with contextlib.suppress(Exception):  # the driver does not tell, or its library is not installed
            return {"memory_bytes": total - free, "utilization": torch.cuda.utilization() / 100}
        return {"memory_bytes": total - free}


def ask_store(store: torch.distributed.Store | None, key: str) -> bool | None:
    """Return whether the learner's store has `key`; None if it does not answer on the rendezvous's connection."""
    answers: list[bool] = []

    def check() -> None:
        with contextlib.suppress(RuntimeError):  # the connection is gone
            answers.append(bool(store.check([key])))

    if store is not None:
        thread = threading.Thread(target=check, daemon=True)  # a machine that vanished never answers
        thread.start()
        thread.join(LEARNER_TIMEOUT_S)
    return answers[0] if answers else None


def _fill_slot(lora_manager: WorkerLoRAManager, tensors: dict[str, torch.Tensor]) -> None:
    """Put an adapter (PEFT's names, B scaled) into vLLM's slot in place of the one from the last sync (SYN-10).

    vLLM's `LoRARequest` has no field for tensors, but a request whose slot is filled never looks at its path.

    Raises:
        ValueError: rank too high (engine argument `max_lora_rank`), or a module that has no slot here.
    """
    slots, settings = lora_manager._adapter_manager, lora_manager.lora_config
    rank = max(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name)
    scaled_already = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
    scaled_already.validate_legal(settings)
    mapper = getattr(slots.model, "hf_to_vllm_mapper", None)
    lora = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        tensors,
        scaled_already,
        device="cpu",
        dtype=settings.lora_dtype,
        weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
    )
    with_slot = set(slots.modules).union(*slots.packed_modules.values())
    if without_slot := sorted(set(lora.loras) - with_slot):  # vLLM itself would ignore them
        raise ValueError(f"no LoRA slot in the engine for {', '.join(without_slot[:5])}")
    slots.add_adapter(lora)
    slots.activate_adapter(ADAPTER_ID)


def _fill_slot_with_nothing(lora_manager: WorkerLoRAManager) -> None:
    """Have the slot change nothing. A request that was queued over a full update may still name it; were it empty, vLLM
    would look for a file, and its engine would die of that."""
    slots = lora_manager._adapter_manager
    slots._registered_adapters[ADAPTER_ID] = LoRAModel(ADAPTER_ID, 1, {})  # `add_adapter` takes none without tensors
    slots.activate_adapter(ADAPTER_ID)


def _global_worker_rank(parallel_config: Any) -> int:
    """Rank among all workers of all replicas, counted as vLLM's NCCL engine counts."""
    return parallel_config.data_parallel_index * parallel_config.world_size + parallel_config.rank


for _name, _engine in (("stream_gloo", StreamGlooEngine), ("stream_nccl", StreamNcclEngine)):
    with contextlib.suppress(ValueError):  # imported under a second name: already registered
        WeightTransferEngineFactory.register_engine(_name, _engine)
