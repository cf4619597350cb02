"""One weight update inside a vLLM worker: load what arrives into the model, and verify that it is whole.

Stands on vLLM 0.32's layerwise reload, which changes with vLLM releases. The model loads through `load_weights` between
a layerwise start and finish: on CPU vLLM has packed the weights for its kernels and freed the originals, so a plain
`load_weights` into a live engine fails. How tensors reach the worker is utils/sync/vllm_worker.py's.
"""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from utils.sync.wire import is_adapter_tensor, tensor_digest

logger = logging.getLogger(__name__)

NamedTensor = tuple[str, torch.Tensor]


def pack_experts_at_updates() -> None:
    """Let vLLM pack experts for its CPU kernels at every update: 0.32 does so at start only, and after an update reads
    plain experts as packed ones, which have the same shape."""
    set_up = UnquantizedFusedMoEMethod._setup_kernel

    def set_up_and_pack(self: UnquantizedFusedMoEMethod, layer: torch.nn.Module, w13: Any, w2: Any) -> None:
        is_update = self.moe_kernel is not None
        set_up(self, layer, w13, w2)
        if is_update and w13.device.type == "cpu":
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = set_up_and_pack


pack_experts_at_updates()


class StreamBroken(RuntimeError):
    """The weight stream ended before its last tensor."""


class WeightUpdate:
    """One weight update as this worker sees it: what arrived, what the model loaded, and what went wrong.

    A load that fails does not raise. A worker that left the stream at a bad tensor would leave its peers hanging in the
    next bucket, so the first error is kept and the stream read to its end.
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
        """Load tensors in checkpoint names into the model."""
        weights = list(weights)
        self.load_stream(weights, [name for name, _ in weights])

    def load_stream(self, weights: Iterable[NamedTensor], names: Iterable[str]) -> None:
        """Load a stream of tensors with these names.

        Tensors that were all loaded before go in one call, since each call walks the whole model. Otherwise every
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
            try:
                if self.digest:
                    self.ledger[name] = tensor_digest(tensor)
                if is_adapter_tensor(name):
                    self.adapter[name] = tensor.clone()
            except RuntimeError as error:  # no memory left; raised here, it would end the stream
                logger.exception("weight update: receiving %s failed", name)
                self.error = self.error or f"receiving {name} failed: {type(error).__name__}: {error}"
            if not is_adapter_tensor(name):
                yield name, tensor

    def _attempt(self, weights: Iterable[NamedTensor]) -> set[str]:
        """Load unless an earlier load failed; return the parameters that the model loaded something into."""
        if self.error:
            return set()
        names: list[str] = []

        def tracked() -> Iterator[NamedTensor]:
            for name, tensor in weights:
                names.append(name)
                yield name, tensor

        try:
            loaded = set(self.model.load_weights(tracked()) or ())
        except StreamBroken:
            raise
        except Exception as error:  # a model's loaders raise anything for a bad name or shape
            current = names[-1] if names else "the first tensor"
            logger.exception("weight update: loading %s failed", current)
            self.error = f"loading {current} failed: {type(error).__name__}: {error}"
            return set()
        if not loaded:
            self.unexpected += names
        self.loaded |= loaded
        return loaded


class StreamedUpdates:
    """Mixin for vLLM weight-transfer engines: layerwise reload with checks, and a way back after a failed update."""

    model: torch.nn.Module
    model_config: Any
    learner_store: torch.distributed.Store | None  # of the rendezvous; None without a communicator

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.update: WeightUpdate | None = None  # in progress
        self.missing: list[str] = []  # parameters that the last finished update did not touch
        self._parameters: dict[str, set[str]] = {}
        self._ledger: dict[str, str] = {}
        self._wrappers: dict[str, BaseLayerWithLoRA] = {}

    def start_weight_update(self) -> None:
        if self.update is not None:
            self.reset_update()
        # Take vLLM's LoRA wrappers off while weights arrive: its loaders do not know the wrapped names.
        self._wrappers = {name: m for name, m in self.model.named_modules() if isinstance(m, BaseLayerWithLoRA)}
        for name, wrapper in self._wrappers.items():
            self.model.set_submodule(name, wrapper.base_layer)
        self.update = WeightUpdate(self.model, self._parameters, self._ledger)  # from here on a failure is undone
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load one update. Raises RuntimeError with the first loading error after the last bucket."""
        if self.update is None:
            raise RuntimeError("start_weight_update must come before update_weights")
        if self.learner_store is None:
            raise RuntimeError("no communicator: init_communicator must come first")
        info = self.parse_update_info(update_info)
        self.update.digest = info.digest
        self.receive_weights(info)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # NCCL and the copies into the model are asynchronous
        if self.update.error:
            raise RuntimeError(self.update.error)

    def summary(self) -> dict[str, Any]:
        """Return what the sender must know of the update in progress, by the tensors' names.

        `parameters`: the vLLM parameters that each tensor of this update went into. `digests`: if requested, of every
        tensor this worker holds, received now or in earlier updates.
        """
        parameters = {name: sorted(self._parameters.get(name, ())) for name in self.update.received}
        return {"parameters": parameters, "digests": dict(self._ledger) if self.update.digest else {}}

    def finish_weight_update(self) -> None:
        """Put the received weights in force.

        Raises:
            RuntimeError: the update must not be used: a load failed, a tensor is unknown to the model, or a fused
                tensor (q, k, v; gate, up) came in part. vLLM would finish the last with uninitialised memory.
        """
        if self.update is None:
            raise RuntimeError("no weight update is in progress")
        if self.update.error:
            raise RuntimeError(self.update.error)
        if unexpected := self.update.unexpected:
            raise RuntimeError(f"the engine's model does not take these tensors: {_first(unexpected)}")
        if partial := partly_loaded_modules(self.model):
            raise RuntimeError(f"only a part of a fused tensor arrived for {_first(partial)}; send whole groups")
        _finalize(self.model, self.model_config)
        loaded = self.update.loaded
        process_tied_modules(self.model, loaded)
        self.update = None
        parameters = {name for name, _ in self.model.named_parameters()}.union(*self._parameters.values())
        self.missing = sorted(parameters - loaded)
        self._rewrap()

    def reset_update(self) -> None:
        """Give up an unfinished update: drop what is buffered and restore every unfinished module's old tensors.

        Modules that were complete before the failure keep their new values, so the weights as a whole are a mixture
        and must not be used until a full update has gone through. Does nothing when no update is in progress.
        """
        if self.update is None:
            return
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            info.loaded_weights.clear()
            info.load_numel = 0
        _finalize(self.model, self.model_config)
        self._rewrap()
        self._ledger.clear()
        self.update = None

    def _rewrap(self) -> None:
        for name, wrapper in self._wrappers.items():
            self.model.set_submodule(name, wrapper)
        self._wrappers = {}


def partly_loaded_modules(model: torch.nn.Module) -> list[str]:
    """List modules that vLLM would process unfinished. A vocabulary padded to a round size is never quite full."""
    partial = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        is_excepted = is_deferred_attention_layer(layer) or isinstance(layer, VocabParallelEmbedding)
        if info.can_load() and not is_excepted and 0 < info.load_numel < (info.load_numel_total or 0):
            partial.append(name)
    return partial


def process_tied_modules(model: torch.nn.Module, loaded: set[str]) -> None:
    """Process modules that share a weight that was sent under another module's name.

    vLLM's reload processes only modules that received something. An output layer tied to the embeddings does not, and
    on CPU it would keep a packed copy of the old weights (vLLM 0.32; the shared tensor itself is new). vLLM packs the
    embeddings for products, too, so the output layer can use that copy.
    """
    fresh, others = {}, []
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and f"{name}.weight" in loaded:
            fresh[id(weight)] = module
        elif weight is not None and hasattr(module, "quant_method"):
            others.append(module)
    for module in others:
        if (twin := fresh.get(id(module.weight))) is None:
            continue
        same_method = type(module.quant_method) is type(getattr(twin, "quant_method", None))
        if same_method and hasattr(twin, "cpu_linear") and getattr(module, "bias", None) is None:
            module.cpu_linear = twin.cpu_linear  # packed alike; packing may change a bias
        else:
            module.quant_method.process_weights_after_loading(module)


def _finalize(model: torch.nn.Module, config: Any) -> None:
    """Finish vLLM's reload without its warning for each layer that received nothing, as frozen layers do (SYN-6)."""
    reload_logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")

    def is_other(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in str(record.msg)

    reload_logger.addFilter(is_other)
    try:
        finalize_layerwise_reload(model, config)
    finally:
        reload_logger.removeFilter(is_other)


def _first(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
