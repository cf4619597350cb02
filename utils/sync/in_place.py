"""Weights where they arrived: a module's parameters become views of the bucket that holds them, not copies of it.

When a module is complete, vLLM's layerwise reload (0.32) allocates its parameters, copies all parts into them,
processes them (on CPU: packs them for its kernels) and drops them. Where the parts lie in a bucket as they would in the
parameter (q, k and v one behind the other, or a tensor by itself), what it allocates and copies is there already. All
else goes vLLM's way.
"""

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors

from utils.sync.wire import ALIGNMENT

Write = tuple[torch.Tensor, torch.Tensor | None]  # the part of a parameter that is written; from what, if it is a copy
Place = tuple[torch.Size, tuple[int, ...], int]  # shape, strides and offset of a part


@dataclass
class _Load:
    """What one call of a loader came to: which parts of the parameter it copies, from which places of what arrived."""

    copies: list[tuple[torch.Tensor, Place]]
    numel: int
    answer: Any


_loads = WeakTensorKeyDictionary()  # for each planned parameter, `_Load`s by the form of the call


@contextlib.contextmanager
def parameters_in_place() -> Iterator[None]:
    """Modules that are completed inside, by the loaders of a layerwise reload, take their parameters as they arrived.

    What arrived must stay as it is while a view of it is alive. Not thread-safe: vLLM's functions are replaced.
    """
    writes: dict[int, list[Write]] = defaultdict(list)
    count, allocate = layerwise.get_numel_loaded, layerwise.materialize_layer

    def get_numel_loaded(loader: Callable, args: inspect.BoundArguments) -> tuple[int, Any]:
        numel, answer, written = _run_once(partial(count, loader, args), *args.arguments.values())
        for target, source in written:
            writes[_memory(target)].append((target, source))
        return numel, answer

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

    with (
        patch.object(layerwise, "get_numel_loaded", get_numel_loaded),
        patch.object(layerwise, "materialize_layer", materialize_layer),
    ):
        yield


def _run_once(
    count: Callable[[], tuple[int, Any]], planned: torch.Tensor, arrived: torch.Tensor, *how: Any
) -> tuple[int, Any, list[Write]]:
    """(numbers loaded, the loader's answer, its writes) of a loader's run on a parameter without memory.

    vLLM runs every loader so in every update, to count. One that only copies parts of what arrived would do the same
    with the next tensor of that form, and is not run again.
    """
    loads = _loads.setdefault(planned, {})
    form = (arrived.shape, arrived.stride(), arrived.dtype, repr(how))
    if (load := loads.get(form)) is None:
        with _Recorder() as recorder:
            numel, answer = count()
        if not recorder.only_copies or any(_memory(source) != _memory(arrived) for _, source in recorder.writes):
            return numel, answer, recorder.writes
        memory = planned.data  # a view of `planned` itself would keep it alive
        copies = [(_part(memory, _place(t, memory)), _place(source, arrived)) for t, source in recorder.writes]
        load = loads[form] = _Load(copies, numel, answer)
    return load.numel, load.answer, [(target, _part(arrived, place)) for target, place in load.copies]


class _Recorder(TorchDispatchMode):
    """Notes what is written to parameters without memory, and whether something else is done than to copy views."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[Write] = []
        self.only_copies = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        is_copy = func is torch.ops.aten.copy_.default
        written = args[:1] if is_copy else tree_leaves((args, kwargs)) if func._schema.is_mutable else ()
        written = [tensor for tensor in written if isinstance(tensor, torch.Tensor) and tensor.numel()]
        self.writes += [(tensor, args[1] if is_copy else None) for tensor in written if tensor.is_meta]
        copies = func._schema.is_mutable and all(is_copy and tensor.is_meta for tensor in written)
        self.only_copies &= func.is_view or copies
        return func(*args, **(kwargs or {}))


def _place(part: torch.Tensor, whole: torch.Tensor) -> Place:
    return part.shape, part.stride(), part.storage_offset() - whole.storage_offset()


def _part(whole: torch.Tensor, place: Place) -> torch.Tensor:
    shape, strides, offset = place
    return whole.as_strided(shape, strides, whole.storage_offset() + offset)


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
