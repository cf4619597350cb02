"""Weights where they arrived: a module's parameters become views of the bucket that holds them, not copies of it.

When a module is complete, vLLM's layerwise reload (0.32) allocates its parameters, copies all parts into them,
processes them (on CPU: packs them for its kernels) and drops them. Where the parts lie in a bucket as they would in the
parameter (q, k and v one behind the other, or a tensor by itself), what it allocates and copies is there already. All
else goes vLLM's way.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves
from vllm.model_executor.model_loader.reload import layerwise, meta
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from utils.wire import ALIGNMENT

Write = tuple[torch.Tensor, torch.Tensor | None]  # the part of a parameter that is written; from what, if it is a copy


@contextlib.contextmanager
def parameters_in_place() -> Iterator[None]:
    """Modules that are completed inside, by the loaders of a layerwise reload, take their parameters as they arrived.

    What arrived must stay as it is while a view of it is alive. Not thread-safe: vLLM's functions are replaced.
    """
    writes: dict[int, list[Write]] = defaultdict(list)
    allocate, counter = layerwise.materialize_layer, partial(_Recorder, writes)

    def materialize_layer(layer: torch.nn.Module, info: LayerReloadingInfo) -> None:
        placed = set()
        for name, planned in get_layer_tensors(layer).items():
            tensor = _as_it_arrived(planned, writes.pop(_memory(planned), []))
            if tensor is not None and name in layer._parameters and tensor.device == info.restore_device:
                tensor.__class__, tensor.__dict__ = planned.__class__, planned.__dict__.copy()
                setattr(layer, name, tensor)
                placed.add(name)
        info.loaded_weights[:] = [loaded for loaded in info.loaded_weights if loaded[0] not in placed]
        allocate(layer, info)

    with patch.object(layerwise, "materialize_layer", materialize_layer), patch.object(meta, "CopyCounter", counter):
        yield


class _Recorder(meta.CopyCounter):
    """vLLM's counter, under which every loader runs once on a parameter without memory, as its part arrives."""

    def __init__(self, writes: dict[int, list[Write]]) -> None:
        super().__init__()
        self.writes = writes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        is_copy = func is torch.ops.aten.copy_.default
        written = args[:1] if is_copy else tree_leaves((args, kwargs)) if func._schema.is_mutable else ()
        for tensor in written:
            if isinstance(tensor, torch.Tensor) and tensor.is_meta and tensor.numel():
                self.writes[_memory(tensor)].append((tensor, args[1] if is_copy else None))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _memory(tensor: torch.Tensor) -> int:
    """Which memory a tensor is a view of; tensors on `meta` have none, but count as if they had."""
    return tensor.untyped_storage()._cdata


def _as_it_arrived(parameter: torch.Tensor, writes: list[Write]) -> torch.Tensor | None:
    """The parameter as a view of what is copied into it, or None.

    There is one if the copies fill the parameter, none overlaps another, and their sources lie in one piece of memory
    in the order of the parameter, aligned as torch's own memory is.
    """
    writes = sorted(writes, key=lambda write: write[0].storage_offset())
    if not writes or (first := writes[0][1]) is None or not parameter.is_contiguous():
        return None
    end = 0
    for target, source in writes:
        fits = source is not None and source.dtype == parameter.dtype and source.shape == target.shape
        if not fits or not source.is_contiguous() or not target.is_contiguous():
            return None
        if target.storage_offset() != end or source.storage_offset() != first.storage_offset() + end:
            return None
        if _memory(source) != _memory(first):
            return None
        end += target.numel()
    if end != parameter.numel() or first.data_ptr() % ALIGNMENT:
        return None
    view = torch.empty(0, dtype=parameter.dtype, device=first.device)
    return view.set_(first.untyped_storage(), first.storage_offset(), parameter.shape, parameter.stride())
