"""The training model's weights as the rollout engine loads them: checkpoint names and shapes, adapters merged in.

Tensors are gathered, merged and written one at a time, into memory that the caller provides; the training weights are
never modified. Sending them is for `utils.sync.transports` and `utils.sync.weight_sync`.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from utils.dist import capture_error
from utils.families import transposed_in

# Float32 rows merged at once: bounds the scratch memory, whatever the tensor's size. On CPU a block stays in a core's
# cache, and in memory that malloc does not return and fetch again page by page; on CUDA a block is two launches and a
# copy, with DoRA five, so that a linear layer of an 8B model is one block.
_MERGE_BLOCK_BYTES = {"cpu": 512 << 10, "cuda": 192 << 20}


@dataclass(frozen=True)
class Adapter:
    """One LoRA or DoRA adapter of a linear layer: `W + scaling * B @ A`, for DoRA renormalised to `magnitude`."""

    a: nn.Parameter  # [r, in]
    b: nn.Parameter  # [out, r]
    scaling: float
    magnitude: nn.Parameter | None  # [out]


@dataclass(frozen=True)
class WeightEntry:
    """One tensor of the merged checkpoint: its name there, and the parameters that make it."""

    name: str
    weight: nn.Parameter
    adapter: Adapter | None
    is_transposed: bool = False  # it is [..., in, out], the parameter [..., out, in]

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(getattr(self.weight, "ds_shape", self.weight.shape))
        return (*shape[:-2], shape[-1], shape[-2]) if self.is_transposed else shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.weight.element_size()

    @property
    def parts(self) -> list[nn.Parameter]:
        """Parameters that must be whole (gathered) before the tensor can be merged."""
        adapter = self.adapter
        parts = [self.weight, adapter.a, adapter.b, adapter.magnitude] if adapter else [self.weight]
        return [part for part in parts if part is not None]

    @property
    def can_change(self) -> bool:
        """False for frozen tensors without an adapter, which training cannot change."""
        return any(part.requires_grad for part in self.parts)


class MergedWeights:
    """Every tensor of the model in checkpoint names and shapes, adapters merged in (SYN-4); only reads the model.

    The model is of transformers or PEFT, before or after `deepspeed.initialize`, at any ZeRO stage.
    """

    def __init__(self, model: nn.Module) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        entries: dict[int, WeightEntry] = {}
        for entry in _effective_entries(base, ""):
            entries.setdefault(id(entry.weight), entry)  # a tied tensor (lm_head) travels once, under its first name
        self.entries = list(entries.values())
        if swapped := transposed_in(base):
            self.entries = [replace(e, is_transposed=re.search(swapped, e.name) is not None) for e in self.entries]
        _check_complete(model, self.entries)
        self.dtype = self.entries[0].dtype  # the engine's, too

    @property
    def is_sharded(self) -> bool:
        """True where ZeRO-3 holds the parameters in shards, so that reading one is a collective."""
        return any(hasattr(entry.weight, "ds_id") for entry in self.entries)

    @contextlib.contextmanager
    def gathered(self, entry: WeightEntry) -> Iterator[None]:
        """Gather the entry's parameters inside. Under ZeRO-3 a collective: all ranks, same entries, same order."""
        if not hasattr(entry.weight, "ds_id"):
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(entry.parts):
            yield
            if entry.weight.is_cuda:  # the memory is freed when the block ends: the copy must be complete
                torch.cuda.current_stream().synchronize()

    def write(self, entry: WeightEntry, out: torch.Tensor) -> None:
        """Write the merged tensor into `out` (its shape and dtype). Call inside `gathered`."""
        with torch.no_grad():
            if entry.adapter is None:
                out.copy_(entry.weight.data.mT if entry.is_transposed else entry.weight.data)
            else:
                _merge_into(out, entry.weight.data, entry.adapter)

    def tensors(
        self, materialize: bool = True, entries: Sequence[WeightEntry] | None = None
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield `(name, merged tensor)` of `entries` (default: all) in order, one alive at a time.

        Under ZeRO-3 every rank must exhaust it; ranks that do not need the tensors pass `materialize=False` for None.
        An error while merging is raised after all gathers: the other ranks are in them.
        """
        left = iter(self.entries if entries is None else entries)
        for entry in left:
            with self.gathered(entry):
                merged: list[torch.Tensor] = []
                error = capture_error(lambda: merged.append(self._merged(entry))) if materialize else None  # noqa: B023
            if error is not None:
                for other in left:
                    with self.gathered(other):
                        pass
                raise error
            yield entry.name, merged.pop() if merged else None

    def _merged(self, entry: WeightEntry) -> torch.Tensor:
        merged = torch.empty(entry.shape, dtype=entry.dtype, device=entry.weight.device)
        self.write(entry, merged)
        return merged


def _check_complete(model: nn.Module, entries: Sequence[WeightEntry]) -> None:
    """Check that all that trains reaches a tensor that is sent: otherwise it would never reach the engine."""
    sent = {id(part) for entry in entries for part in entry.parts}
    trained = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    if lost := [name for name, parameter in trained if id(parameter) not in sent]:
        raise ValueError(f"{lost[:5]} would be trained but are in no tensor of the merged checkpoint")


def _effective_entries(module: nn.Module, prefix: str) -> Iterator[WeightEntry]:
    """Walk the model without PEFT's wrappers, with the parameters in force."""
    from peft.tuners.lora import LoraLayer, ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    if isinstance(module, ModulesToSaveWrapper):
        yield from _effective_entries(module.modules_to_save[module.active_adapters[0]], prefix)
        return
    if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper):
        for name, parameter in module.get_base_layer().named_parameters():
            yield WeightEntry(prefix + name, parameter, _adapter_of(module, prefix) if name == "weight" else None)
        return
    if isinstance(module, BaseTunerLayer):
        raise ValueError(f"{prefix}: {type(module).__name__} cannot be merged for the rollout server; use LoRA or DoRA")
    for name, parameter in module.named_parameters(recurse=False):
        yield WeightEntry(prefix + name, parameter, None)
    for name, child in module.named_children():
        yield from _effective_entries(child, f"{prefix}{name}.")


def _adapter_of(layer: nn.Module, prefix: str) -> Adapter | None:
    from peft.tuners.lora.variants import DoraLinearVariant

    active = [name for name in layer.active_adapters if name in layer.lora_A or name in layer.lora_embedding_A]
    if not active:
        return None
    if len(active) > 1 or not isinstance(layer.get_base_layer(), nn.Linear) or layer.lora_bias[active[0]]:
        raise ValueError(f"{prefix}: only one adapter, without bias, on a linear layer can be merged while streaming")
    name = active[0]
    variant = layer.lora_variant.get(name)
    if not isinstance(variant, DoraLinearVariant | None):
        raise ValueError(f"{prefix}: {type(variant).__name__} cannot be merged while streaming; use LoRA or DoRA")
    vector = layer.lora_magnitude_vector[name].weight if name in layer.lora_magnitude_vector else None
    return Adapter(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name], vector)


def _merge_into(out: torch.Tensor, weight: torch.Tensor, adapter: Adapter) -> None:
    """`out = W + s * B@A`, or DoRA's `m * (W + s * B@A) / ||W + s * B@A||`, in float32, rounded once into `out`.

    Rows are independent, so it works in blocks of rows. On CPU the order of operations is PEFT's, so that float32
    results are the same bits. On CUDA casts and scaling are part of other kernels; products of half-precision numbers
    are exact in float32. Source: Hu et al. 2021 (LoRA) eq. 3; Liu et al. 2024 (DoRA) eq. 5.
    """
    is_fused = weight.device.type != "cpu" and adapter.a.dtype != torch.float32
    a, b, magnitude = adapter.a.data if is_fused else adapter.a.data.float(), adapter.b.data, adapter.magnitude
    rows = max(1, _MERGE_BLOCK_BYTES[weight.device.type] // (4 * weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        block = slice(start, start + rows)
        if is_fused:
            merged = torch.mm(b[block], a, out_dtype=torch.float32)
            torch.add(weight[block], merged, alpha=adapter.scaling, out=merged)
        else:
            merged = (b[block].float() @ a).mul_(adapter.scaling).add_(weight[block])
        if magnitude is None:
            out[block].copy_(merged)
        else:
            scale = magnitude.data[block] / torch.linalg.norm(merged, dim=1)
            torch.mul(merged, scale.view(-1, 1), out=out[block])


def whole_groups(names: set[str], parameters: Mapping[str, Sequence[str]]) -> set[str]:
    """Return `names` with every tensor that must travel with one of them (SYN-6).

    An engine rebuilds a module from what an update brings for it, so all tensors of a module travel together: q, k, v
    and their biases; gate and up; a layer's experts.

    Args:
        parameters: the engine's parameters that each tensor goes into; a parameter's module is its name up to the last
            dot. Two checkpoint tensors: `{"q_proj.weight": ["attn.qkv_proj.weight"], "k_proj.weight": [...]}`.
    """
    modules = {name: {parameter.rpartition(".")[0] for parameter in goes} for name, goes in parameters.items()}
    whole: set[str] = set()
    while whole != names:  # a tensor that goes into two modules ties both together
        whole = names
        touched = set().union(*(modules[name] for name in names))
        names = names | {name for name, own in modules.items() if own & touched}
    return whole
