"""Adapter sync (SYN-10): LoRA tensors only, over the transport of full syncs, into vLLM's LoRA slots in memory.

The sending side is `WeightSync` with another list of tensors. The receiving side is the same update with tensors whose
names say that they are an adapter's (`utils.sync.wire.is_adapter_tensor`); utils/sync/vllm_worker.py fills the slot
with them.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from utils.sync.merged_weights import MergedWeights, WeightEntry
from utils.sync.weight_sync import SyncResult, WeightSync

logger = logging.getLogger(__name__)


class AdapterWeights(MergedWeights):
    """Every LoRA tensor of the model under PEFT's name (`base_model.model.MODULE.lora_A.weight`); B comes multiplied
    by the layer's scaling, so that the engine needs no alpha.

    Raises:
        ValueError: LoRA slots cannot hold what is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        if reason := _what_slots_cannot_hold(self.entries):
            raise ValueError(reason)
        self._scaling: dict[str, float] = {}
        merged, self.entries = self.entries, []
        for entry in merged:
            if entry.adapter is not None:
                module = f"base_model.model.{entry.name.removesuffix('.weight')}"
                self._add(f"{module}.lora_A.weight", entry.adapter.a, 1.0)
                self._add(f"{module}.lora_B.weight", entry.adapter.b, entry.adapter.scaling)

    def _add(self, name: str, weight: nn.Parameter, scaling: float) -> None:
        shape = tuple(getattr(weight, "ds_shape", weight.shape))
        self.entries.append(WeightEntry(name, shape, weight, None))
        self._scaling[name] = scaling

    def write(self, entry: WeightEntry, out: torch.Tensor) -> None:
        """Write the adapter tensor into `out` (its shape and dtype). Call inside `gathered`."""
        with torch.no_grad():
            torch.mul(entry.weight.data, self._scaling[entry.name], out=out)


def _what_slots_cannot_hold(entries: list[WeightEntry]) -> str | None:
    for entry in entries:
        if entry.adapter is None and entry.can_change:
            return f"{entry.name} is trained itself, without an adapter (tuner.modules_to_save or a full fine-tuning)"
        if entry.adapter is not None and entry.adapter.magnitude is not None:
            return f"{entry.name} has a DoRA adapter, and vLLM has no slots for DoRA"
    return None if any(entry.adapter for entry in entries) else "the model has no adapters"


class AdapterSync(WeightSync):
    """`WeightSync` for `AdapterWeights`: the engine's own weights stay what it loaded at its start."""

    mode = "adapter"

    def _check_missing(self, index: int, missing: list[str], entries: list[WeightEntry]) -> None:
        """An adapter's tensors are checked by the engine, which refuses one without a slot."""


class FallbackSync:
    """An adapter sync that becomes a full one for the rest of the run when it fails, with one warning (SYN-10).

    Every rank falls back at the same sync, because a failed sync raises on all of them.
    """

    def __init__(self, adapter: AdapterSync, make_full: Callable[[], WeightSync]) -> None:
        self.current: WeightSync = adapter
        self._make_full = make_full

    @property
    def mode(self) -> str:
        return self.current.mode

    @property
    def fallback(self) -> str | None:
        return self.current.fallback

    @property
    def ledger(self) -> dict[str, str]:
        return self.current.ledger

    def open(self) -> None:
        """As `WeightSync.open`."""
        self.current.open()

    def sync(self, version: str) -> SyncResult:
        """As `WeightSync.sync`."""
        if not isinstance(self.current, AdapterSync):
            return self.current.sync(version)
        try:
            return self.current.sync(version)
        except RuntimeError as error:
            reason = str(error)
            ranks, client = self.current.ranks, self.current.client
            if any(ranks.gather(bool(ranks.is_main and client.lost()))):
                raise  # not the adapter's fault: recovery brings the server back (CON-4)
            if ranks.is_main:
                logger.warning("adapter sync failed; full sync from now on: %s", error)
        self.current.close()
        self.use_full(reason)
        self.current.open()
        return self.current.sync(version)

    def use_full(self, reason: str) -> None:
        """Full sync from now on; call it before `open`. So goes on what fell back before it was resumed."""
        self.current = self._make_full()
        self.current.fallback = reason

    def close(self) -> None:
        """As `WeightSync.close`."""
        self.current.close()


def make_sync(
    model: nn.Module, mode: str, fallback_to_full: bool, *args: Any, **kwargs: Any
) -> WeightSync | FallbackSync:
    """The sync of a run.

    Args:
        mode: `full` or `adapter`.
        args, kwargs: what `WeightSync` takes after the weights.

    Raises:
        ValueError: adapter sync cannot work for this model, and `fallback_to_full` is false.
    """

    def make_full() -> WeightSync:
        return WeightSync(MergedWeights(model), *args, **kwargs)

    if mode == "full":
        return make_full()
    try:
        adapter = AdapterSync(AdapterWeights(model), *args, **kwargs)
    except ValueError as error:
        if not fallback_to_full:
            path = "custom.extra.rollout_matching.vllm.sync"
            advice = f"set {path}.mode: full, or {path}.fallback_to_full: true"
            raise ValueError(f"{path}.mode=adapter: {error}; {advice}") from error
        logger.warning("adapter sync is impossible, full sync instead: %s", error)
        sync = make_full()
        sync.fallback = str(error)
        return sync
    return FallbackSync(adapter, make_full) if fallback_to_full else adapter
