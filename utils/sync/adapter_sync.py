"""Adapter sync (SYN-10): only LoRA tensors, over the transport of full syncs, into vLLM's LoRA slots in memory.

The sender is `WeightSync` with another list of tensors. The receiver knows an adapter's tensors by their names
(`utils.sync.wire.is_adapter_tensor`); utils/sync/vllm_worker.py fills the slot with them.
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
    """Every LoRA tensor of the model under PEFT's name (`base_model.model.MODULE.lora_A.weight`).

    B comes multiplied by the layer's scaling, so the engine needs no alpha.

    Raises:
        ValueError: LoRA slots cannot hold the trained weights.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._scaling: dict[str, float] = {}
        merged, self.entries = self.entries, []
        for entry in merged:
            if (adapter := entry.adapter) is None:
                if entry.can_change:
                    rule = "without an adapter (tuner.modules_to_save or a full fine-tuning)"
                    raise ValueError(f"{entry.name} is trained itself, {rule}")
                continue
            if adapter.magnitude is not None:
                raise ValueError(f"{entry.name} has a DoRA adapter, and vLLM has no slots for DoRA")
            module = f"base_model.model.{entry.name.removesuffix('.weight')}"
            for side, weight, scaling in (("A", adapter.a, 1.0), ("B", adapter.b, adapter.scaling)):
                name = f"{module}.lora_{side}.weight"
                self.entries.append(WeightEntry(name, weight, None))
                self._scaling[name] = scaling
        if not self.entries:
            raise ValueError("the model has no adapters")

    def write(self, entry: WeightEntry, out: torch.Tensor) -> None:
        """Write the adapter tensor into `out` (its shape and dtype). Call inside `gathered`."""
        with torch.no_grad():
            torch.mul(entry.weight.data, self._scaling[entry.name], out=out)


class AdapterSync(WeightSync):
    """`WeightSync` for `AdapterWeights`: the engine's own weights stay what it loaded at its start."""

    mode = "adapter"


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
        self.current.open()

    def close(self) -> None:
        self.current.close()

    def sync(self, version: str) -> SyncResult:
        try:
            return self.current.sync(version)
        except RuntimeError as error:
            if not isinstance(self.current, AdapterSync):
                raise
            reason, ranks, client = str(error), self.current.ranks, self.current.client
            if any(ranks.gather(bool(ranks.is_main and (client.stop.is_set() or client.lost())))):
                raise  # not the adapter's fault: the run is to stop (LRN-12), or recovery restarts the server (CON-4)
            if ranks.is_main:
                logger.warning("adapter sync failed; full sync from now on: %s", error)
        self.current.close()
        self.use_full(reason)
        self.current.open()
        return self.current.sync(version)

    def use_full(self, reason: str) -> None:
        """Sync in full from now on. Call it before `open`, also for a resumed run that had fallen back."""
        self.current = self._make_full()
        self.current.fallback = reason


def make_sync(
    model: nn.Module, mode: str, fallback_to_full: bool, *args: Any, **options: Any
) -> WeightSync | FallbackSync:
    """Return the sync of a run in `mode` full or adapter; the rest is as `WeightSync` takes it, from `ranks` on.

    Raises:
        ValueError: adapter sync cannot work for this model, and `fallback_to_full` is false.
    """

    def make_full() -> WeightSync:
        return WeightSync(MergedWeights(model), *args, **options)

    if mode == "full":
        return make_full()
    try:
        adapter = AdapterSync(AdapterWeights(model), *args, **options)
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
