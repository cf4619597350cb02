"""What runs inside vLLM's worker processes: the receiving end of weight transfer, with digests and checks of its own.

Everything here stands on vLLM 0.32's weight-transfer interface and on its layerwise reload, both of which change with
vLLM releases; all contact with them on the engine's side is here. Naming `WorkerExtension` as vLLM's
`worker_extension_cls` imports the module in every worker, which registers two engines:

- `stream_gloo`: buckets over Gloo, laid out by `utils.sync.wire`. For CPU engines.
- `stream_nccl`: vLLM's own NCCL engine; only loading is wrapped, for digests and checks. For CUDA engines.

Both load through `model.load_weights` between layerwise `start` and `finish`: on CPU vLLM has packed the weights for
its kernels and freed the originals, so a plain `load_weights` into a live engine fails.
"""

import contextlib
import ctypes
import itertools
import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.utils import (
    stateless_destroy_torch_distributed_process_group,
    stateless_init_torch_distributed_process_group,
)
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferInitInfo,
    NCCLWeightTransferUpdateInfo,
)
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from utils.sync.rendezvous import open_nccl
from utils.sync.wire import (
    ADAPTER_ID,
    BucketLayout,
    bucket_layouts,
    is_adapter_tensor,
    loopback_if_local,
    tensor_digest,
)

logger = logging.getLogger(__name__)

NamedTensor = tuple[str, torch.Tensor]
UPDATES_PER_TRIM = 10  # how often a CPU engine gives the system back what malloc keeps in pieces
HEARING_S = 5.0  # a learner whose store has not answered for so long counts as gone


class StreamBroken(RuntimeError):
    """The weight stream ended before its last tensor."""


class UpdateSession:
    """One weight update as this worker sees it: what arrived, what the model took, and what went wrong.

    Loading never raises. A worker that left the stream at a bad tensor would leave its peers hanging in the next
    bucket, so errors are kept, the stream is read to its end, and the caller gets the first error then.
    """

    def __init__(self, model: torch.nn.Module, parameters: dict[str, set[str]], ledger: dict[str, str]) -> None:
        self.model = model
        self.parameters = parameters  # vLLM's parameters that a tensor goes into; grows, shared with the engine
        self.ledger = ledger  # digest of every tensor as it last arrived, if it was digested; shared with the engine
        self.digest = False
        self.received: list[str] = []
        self.loaded: set[str] = set()  # vLLM's parameter names
        self.adapter: dict[str, torch.Tensor] = {}  # tensors for the LoRA slot (SYN-10), by PEFT's names
        self.unexpected: list[str] = []
        self.error: str | None = None

    def load(self, weights: Iterable[NamedTensor]) -> None:
        """Hand tensors in checkpoint names to the model."""
        weights = list(weights)
        self.load_stream(weights, [name for name, _ in weights])

    def load_stream(self, weights: Iterable[NamedTensor], names: Iterable[str]) -> None:
        """Hand a stream of tensors with these names to the model.

        Tensors that the model has taken before go in one call, since each call walks the whole model. Otherwise every
        tensor gets its own, which shows the parameters that it goes into.

        Raises:
            StreamBroken: raised by the stream itself.
        """
        stream = self._noted(weights)
        if self.parameters.keys() >= set(names):
            self._attempt(stream)
        for pair in stream:  # after a bad tensor: only read
            if loaded := self._attempt([pair]):
                self.parameters[pair[0]] = loaded

    def _noted(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Enter every tensor into the ledger; yield those for the model, keep a copy of those for the LoRA slot."""
        for name, tensor in weights:
            self.received.append(name)
            self.ledger.pop(name, None)
            if self.digest:
                self.ledger[name] = tensor_digest(tensor)
            if is_adapter_tensor(name):
                self.adapter[name] = tensor.clone()
            else:
                yield name, tensor

    def _attempt(self, weights: Iterable[NamedTensor]) -> set[str]:
        """Load unless an earlier load failed; return the parameters that the model loaded something into."""
        if self.error:
            return set()
        current: list[str] = []

        def tracked() -> Iterator[NamedTensor]:
            for name, tensor in weights:
                current.append(name)
                yield name, tensor

        try:
            loaded = set(self.model.load_weights(tracked()) or ())
        except StreamBroken:
            raise
        except Exception as error:  # a model's loaders raise anything for a bad name or shape
            name = current[-1] if current else "the first tensor"
            logger.exception("weight update: loading %s failed", name)
            self.error = f"loading {name} failed: {type(error).__name__}: {error}"
            return set()
        if not loaded:
            self.unexpected += current
        self.loaded |= loaded
        return loaded


class _StreamedUpdates:
    """Mixin for vLLM weight-transfer engines: layerwise reload with checks, and a way back after a failed update."""

    model: torch.nn.Module
    model_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parameters: dict[str, set[str]] = {}
        self._ledger: dict[str, str] = {}
        self.session: UpdateSession | None = None
        self.missing: list[str] = []  # parameters that the last finished update did not touch
        self._wrappers: dict[str, BaseLayerWithLoRA] = {}

    def start_weight_update(self) -> None:
        if self.session is not None:
            self.reset_update()
        self._unwrap()
        initialize_layerwise_reload(self.model)
        self.session = UpdateSession(self.model, self._parameters, self._ledger)

    def finish_weight_update(self) -> None:
        """Put the received weights in force.

        Raises:
            RuntimeError: the update must not be used: a load failed, a tensor is unknown to the model, or a fused
                tensor (q, k, v; gate, up) came in part. vLLM would finish the last with uninitialised memory.
        """
        session = self.session
        if session is None:
            raise RuntimeError("no weight update is in progress")
        if session.error:
            raise RuntimeError(session.error)
        if session.unexpected:
            raise RuntimeError(f"the engine's model does not take these tensors: {_some(session.unexpected)}")
        if partial := self._partly_loaded_modules():
            raise RuntimeError(f"only a part of a fused tensor arrived for {_some(partial)}; send whole groups")
        with _no_warning_per_layer():
            finalize_layerwise_reload(self.model, self.model_config)
        self._process_tied_modules(session.loaded)
        self.session = None
        takes = {name for name, _ in self.model.named_parameters()}.union(*self._parameters.values())
        self.missing = sorted(takes - session.loaded)
        self._rewrap()

    def _unwrap(self) -> None:
        """Take vLLM's LoRA wrappers off while weights come in: its loaders do not know the wrapped names."""
        self._wrappers = {
            n: module for n, module in self.model.named_modules() if isinstance(module, BaseLayerWithLoRA)
        }
        for name, wrapper in self._wrappers.items():
            self.model.set_submodule(name, wrapper.base_layer)

    def _rewrap(self) -> None:
        for name, wrapper in self._wrappers.items():
            self.model.set_submodule(name, wrapper)
        self._wrappers = {}

    def _process_tied_modules(self, loaded: set[str]) -> None:
        """Process modules that share a weight with one that was sent, under whose name it did not come.

        vLLM's reload processes only modules that received something. An output layer tied to the embeddings does not,
        and on CPU it would go on with a packed copy of the old weights (vLLM 0.32; the shared tensor itself is new).
        vLLM packs the embeddings for products, too, so that the output layer can use that copy.
        """
        fresh, others = {}, []
        for name, module in self.model.named_modules():
            weight = module._parameters.get("weight")
            if weight is not None and f"{name}.weight" in loaded:
                fresh[id(weight)] = module
            elif weight is not None and hasattr(module, "quant_method"):
                others.append(module)
        for module in others:
            twin = fresh.get(id(module.weight))
            if twin is not None and _packed_alike(module, twin):
                module.cpu_linear = twin.cpu_linear
            elif twin is not None:
                module.quant_method.process_weights_after_loading(module)

    def _partly_loaded_modules(self) -> list[str]:
        """Modules that vLLM would process unfinished. A vocabulary padded to a round size is never quite full."""
        partial = []
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            if not info.can_load() or is_deferred_attention_layer(layer) or isinstance(layer, VocabParallelEmbedding):
                continue
            if 0 < info.load_numel < (info.load_numel_total or 0):
                partial.append(name)
        return partial

    def reset_update(self) -> None:
        """Leave an unfinished update: forget what is buffered and give every unfinished module its old tensors back.

        Modules that were complete before the failure keep their new values, so the weights as a whole are a mixture
        and must not be used until a full update has gone through. Does nothing when no update is in progress.
        """
        if self.session is None:
            return
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        with _no_warning_per_layer():
            finalize_layerwise_reload(self.model, self.model_config)
        self._rewrap()
        self._ledger.clear()
        self.session = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load one update. Raises RuntimeError with the first loading error after the last bucket."""
        if self.session is None:
            raise RuntimeError("start_weight_update must come before update_weights")
        info = self.parse_update_info(update_info)
        self.session.digest = info.digest
        self.receive_weights(info)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # NCCL and the copies into the model are asynchronous
        if self.session.error:
            raise RuntimeError(self.session.error)

    def hears_learner(self) -> bool:
        """Whether the learner that opened the communicator is alive: its store answers on the connection made then."""
        store = self._store()
        answers: list[bool] = []

        def ask() -> None:
            with contextlib.suppress(RuntimeError):  # the connection is gone
                store.check(["anything"])
                answers.append(True)

        if store is not None:
            asking = threading.Thread(target=ask, daemon=True)  # a machine that vanished never answers
            asking.start()
            asking.join(HEARING_S)
        return bool(answers)

    def _store(self) -> torch.distributed.Store | None:
        """The learner's store, seen from here; None without a communicator."""
        raise NotImplementedError

    def report(self) -> dict[str, Any]:
        """What the sender must know of the update in progress.

        Returns:
            `parameters`: the vLLM parameters that every tensor of this update went into, by name; tensors that meet in
            one module (q, k, v; an expert's parts) must always come together.
            `digests`: if asked for, the digest of every tensor this worker holds, received now or in an earlier update.
        """
        parameters = {name: sorted(self._parameters.get(name, ())) for name in self.session.received}
        return {"parameters": parameters, "digests": dict(self._ledger) if self.session.digest else {}}


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """The learner (rank 0) hosts the store; `timeout_s` bounds the rendezvous and every single broadcast."""

    master_address: str
    master_port: int
    world_size: int
    rank_offset: int
    bucket_bytes: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    digest: bool = False


class StreamGlooEngine(_StreamedUpdates, WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Buckets over Gloo: one uint8 broadcast from rank 0 per bucket; the next one travels while the last is loaded."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    _group: torch.distributed.ProcessGroup | None = None
    _learners_store: torch.distributed.Store | None = None
    _bucket_bytes = 0
    _num_updates = 0

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        self.shutdown()  # left over from a learner that died
        self._bucket_bytes = init_info.bucket_bytes
        with loopback_if_local(init_info.master_address):
            self._group, self._learners_store = stateless_init_torch_distributed_process_group(
                init_info.master_address,
                init_info.master_port,
                rank=_global_worker_rank(self.parallel_config) + init_info.rank_offset,
                world_size=init_info.world_size,
                backend="gloo",
                timeout=timedelta(seconds=init_info.timeout_s),
                return_store=True,
            )

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Raises RuntimeError when the sender is gone or `timeout_s` passes; the group is unusable afterwards."""
        if self._group is None:
            raise RuntimeError("no communicator: init_communicator must come first")
        tensors = list(_metadata(update_info))
        layouts = bucket_layouts([_num_bytes(dtype, shape) for _, dtype, shape in tensors], self._bucket_bytes)
        arriving = (_unpack(bucket, layout, tensors) for layout, bucket in self._buckets(layouts))
        with disable_mtp_completeness_check():
            self.session.load_stream(itertools.chain.from_iterable(arriving), update_info.names)

    def _buckets(self, layouts: list[BucketLayout]) -> Iterator[tuple[BucketLayout, torch.Tensor]]:
        """Buckets in order, the next one on its way."""
        try:
            arriving = self._receive(layouts[0])
            for index, layout in enumerate(layouts):
                bucket, work = arriving
                work.wait()
                if index + 1 < len(layouts):
                    arriving = self._receive(layouts[index + 1])
                yield layout, bucket
        except RuntimeError as error:
            self.shutdown()
            raise StreamBroken(f"the weight stream broke off: {str(error).partition('. ')[0]}") from error

    def _receive(self, layout: BucketLayout) -> tuple[torch.Tensor, torch.distributed.Work]:
        bucket = torch.empty(layout.num_bytes, dtype=torch.uint8)  # vLLM keeps views until their module is complete
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        return bucket, self._group.broadcast([bucket], options)

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        self._num_updates += 1
        if self._num_updates % UPDATES_PER_TRIM == 0:
            _trim_heap()

    def shutdown(self) -> None:
        if self._group is not None:
            with contextlib.suppress(RuntimeError, KeyError):
                stateless_destroy_torch_distributed_process_group(self._group)
            self._group = self._learners_store = None

    def _store(self) -> torch.distributed.Store | None:
        return self._learners_store


@dataclass(kw_only=True)
class NcclInitInfo(NCCLWeightTransferInitInfo):
    timeout_s: float = 300.0


@dataclass
class NcclUpdateInfo(NCCLWeightTransferUpdateInfo):
    digest: bool = False


class StreamNcclEngine(_StreamedUpdates, NCCLWeightTransferEngine):
    """vLLM's packed NCCL broadcast as it is, with our meeting, loading checks and digests, and a limit on its waiting.

    `ncclBroadcast` cannot time out: after `timeout_s` without the end of an update the communicator is aborted.
    """

    init_info_cls = NcclInitInfo
    update_info_cls = NcclUpdateInfo
    _timeout_s = 300.0

    def init_transfer_engine(self, init_info: NcclInitInfo) -> None:
        self.shutdown()  # left over from a learner that died
        self._timeout_s = init_info.timeout_s
        self.packed = init_info.packed
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        self.packed_num_buffers = init_info.packed_num_buffers
        self.model_update_group = open_nccl(
            init_info.master_address,
            init_info.master_port,
            _global_worker_rank(self.parallel_config) + init_info.rank_offset,
            init_info.world_size,
        )

    def receive_weights(self, update_info: NcclUpdateInfo) -> None:
        model, group = self.model, self.model_update_group
        watchdog = threading.Timer(self._timeout_s, group.destroy) if group is not None else None
        if watchdog is not None:
            watchdog.daemon = True
            watchdog.start()
        self.model = SimpleNamespace(load_weights=self.session.load)  # all that the base class uses of it here
        try:
            super().receive_weights(update_info)
        finally:
            self.model = model
            if watchdog is not None:
                watchdog.cancel()
        if group.disabled:
            self.model_update_group = None
            raise RuntimeError(f"weight broadcast not finished after {self._timeout_s:g} s; communicator aborted")

    def _store(self) -> torch.distributed.Store | None:
        return None if self.model_update_group is None else self.model_update_group.group.store


class WorkerExtension:
    """Mixed into vLLM's worker class. One entry point that answers instead of raising.

    A worker that raises inside a collective call leaves the replies of its tensor-parallel peers unread, and vLLM would
    take them for the answers to its next call. So every worker always answers `{"result", "error"}`.
    """

    def weight_rpc(self, step: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Run one step of a weight update: init, hears_learner, start, update, finish, abort or close."""
        try:
            return {"result": getattr(self, f"_weight_{step}")(**payload), "error": None}
        except Exception as error:
            rank = _global_worker_rank(self.vllm_config.parallel_config)
            logger.exception("weight update: %s failed on worker %d", step, rank)
            return {"result": None, "error": f"engine worker {rank}: {type(error).__name__}: {error}"}

    def _weight_init(self, **init_info: Any) -> None:
        self._weight_abort()
        self.init_weight_transfer_engine(init_info)

    def _weight_hears_learner(self) -> bool:
        return self.weight_transfer_engine.hears_learner()

    def _weight_start(self) -> None:
        self.start_weight_update()

    def _weight_update(self, **update_info: Any) -> dict[str, Any]:
        self.update_weights(update_info)
        return self.weight_transfer_engine.report()

    def _weight_finish(self) -> list[str]:
        adapter = self.weight_transfer_engine.session.adapter if self.weight_transfer_engine.session else {}
        slots = getattr(self.model_runner, "lora_manager", None)
        if adapter and slots is None:
            raise RuntimeError("the engine has no LoRA slots; start it with rollout_server.vllm_enable_lora: true")
        self.finish_weight_update()
        if adapter:
            _put_adapter(slots, adapter)
        elif slots is not None:
            slots.remove_adapter(ADAPTER_ID)  # the weights that came have it merged in
        return self.weight_transfer_engine.missing

    def _weight_abort(self) -> None:
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.reset_update()
        self._weight_update_active = False
        self._weight_close()  # a learner in the middle of a broadcast would else wait for its time-out

    def _weight_close(self) -> None:
        self.weight_transfer_engine.shutdown()

    def _weight_device_memory(self) -> dict[str, int]:
        """Bytes in use on this worker's device (CUDA) and in its process (CPU)."""
        import psutil

        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            return {"used": total - free, "total": total}
        return {"used": psutil.Process().memory_info().rss, "total": psutil.virtual_memory().total}


def _put_adapter(lora_manager: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Put the adapter into its slot, replacing the one from the last sync (SYN-10).

    vLLM's `LoRARequest` has no field for tensors, but a request whose slot is filled never looks at its path.

    Args:
        lora_manager: vLLM's `WorkerLoRAManager`.
        tensors: by PEFT's names, B scaled.

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
    takes = set(slots.modules).union(*slots.packed_modules.values())
    if homeless := sorted(set(lora.loras) - takes):  # vLLM itself would ignore them
        raise ValueError(f"no LoRA slot in the engine for {', '.join(homeless[:5])}")
    slots.remove_adapter(ADAPTER_ID)
    slots.add_adapter(lora)
    slots.activate_adapter(ADAPTER_ID)


def _packed_alike(module: torch.nn.Module, twin: torch.nn.Module) -> bool:
    """Whether what vLLM made of the twin's weight for its CPU kernels is what it would make of the module's, the same
    tensor. A bias may be changed on the way."""
    same_method = type(module.quant_method) is type(getattr(twin, "quant_method", None))
    return same_method and hasattr(twin, "cpu_linear") and getattr(module, "bias", None) is None


def _trim_heap() -> None:
    """Give free memory back. Kernels that oneDNN keeps lie scattered between blocks that come and go with every request
    and update: glibc's heap goes on growing for thousands of steps without more of it in use."""
    with contextlib.suppress(AttributeError):  # another malloc
        ctypes.CDLL(None).malloc_trim(0)


def _global_worker_rank(parallel_config: Any) -> int:
    """Rank among all workers of all replicas, counted as vLLM's NCCL engine counts."""
    return parallel_config.data_parallel_index * parallel_config.world_size + parallel_config.rank


def _metadata(info: GlooUpdateInfo) -> Iterator[tuple[str, torch.dtype, list[int]]]:
    for name, dtype_name, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name}: unknown dtype {dtype_name!r}")
        yield name, dtype, shape


def _num_bytes(dtype: torch.dtype, shape: list[int]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _unpack(bucket: torch.Tensor, layout: BucketLayout, tensors: list) -> Iterator[NamedTensor]:
    """Views into the bucket; nothing is copied."""
    for (name, dtype, shape), offset in zip(tensors[layout.first : layout.last], layout.offsets, strict=True):
        yield name, bucket[offset : offset + _num_bytes(dtype, shape)].view(dtype).view(shape)


@contextlib.contextmanager
def _no_warning_per_layer() -> Iterator[None]:
    """vLLM warns once per layer that received nothing, which is the normal case for frozen layers (SYN-6)."""
    reload_logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")

    def not_that_one(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in str(record.msg)

    reload_logger.addFilter(not_that_one)
    try:
        yield
    finally:
        reload_logger.removeFilter(not_that_one)


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


for _name, _engine in (("stream_gloo", StreamGlooEngine), ("stream_nccl", StreamNcclEngine)):
    with contextlib.suppress(ValueError):  # imported under a second name: already registered
        WeightTransferEngineFactory.register_engine(_name, _engine)
