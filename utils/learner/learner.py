"""The training side that stage 2 and GRPO share: the DeepSpeed engine around a row model, its schedule, its steps."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from torch import nn
from transformers import set_seed

from utils.config.load import Config, engine_json
from utils.config.memory import chunk_labels
from utils.dist import DistributedError, Ranks, capture_error
from utils.learner.model import (
    RowModel,
    apply_tuner,
    enable_gradient_checkpointing,
    fuse_kernels,
    load_model,
    param_groups,
    start_policy,
)
from utils.learner.objectives import Objective, last_logprobs, text_logprobs
from utils.losses import num_chunks_for
from utils.packing import Batch

logger = logging.getLogger(__name__)

MAX_SKIPPED = 10  # steps in a row: what is wrong then is the model, and no other sample mends it


class NotFinite(DistributedError):
    """A loss or gradient of an optimizer step is nan or infinite; raised on all ranks."""


@dataclass
class StepResult:
    """One optimizer step: what the objective reports (`total` is the loss), and the gradient norm."""

    losses: dict[str, float]
    grad_norm: float
    learning_rates: dict[str, float]  # by parameter group
    num_tokens: int
    fill_ratio: float


class Learner:
    """A model, its adapters and its optimizer under DeepSpeed; knows nothing about rollouts.

    Attributes:
        model: the transformers or PEFT model (what weight sync and checkpoints read).
        engine: the DeepSpeed engine around `RowModel(model)`.
    """

    def __init__(self, cfg: Config, ranks: Ranks, num_steps: int) -> None:
        training = cfg.training
        set_seed(training.seed)  # adapters start alike on all ranks and in every run
        model = load_model(cfg.model.path, cfg.model.dtype, cfg.model.attn_implementation)
        if training.fused_kernels:
            fuse_kernels(model)
        self.model: nn.Module = apply_tuner(model, **cfg.tuner.model_dump())
        if training.gradient_checkpointing:
            enable_gradient_checkpointing(self.model)
        groups = param_groups(
            self.model,
            learning_rate=training.learning_rate,
            vit_lr=training.vit_lr,
            aligner_lr=training.aligner_lr,
            embed_lr=training.embed_lr,
            weight_decay=training.weight_decay,
        )
        config = engine_json(cfg, ranks.world_size)
        optimizer = _optimizer_class(config, ranks)(
            groups, betas=(training.adam_beta1, training.adam_beta2), eps=training.adam_epsilon
        )
        self.engine, *_ = deepspeed.initialize(model=RowModel(self.model), optimizer=optimizer, config=config)
        torch.manual_seed(training.seed + ranks.rank)  # dropout differs between ranks
        self._base_lrs = {group["name"]: group["lr"] for group in groups}
        self._cfg, self._ranks, self._num_steps = cfg, ranks, num_steps
        self._num_skipped = 0  # steps in a row

    def step(self, batches: Sequence[Batch], objective: Objective, step: int) -> StepResult:
        """One optimizer step over this rank's batches, equally many on all ranks (PCK-5).

        Every loss part is divided by its total weight over all ranks and micro-steps, so how tokens are laid out in
        rows does not change the gradient. DeepSpeed averages over ranks and micro-steps: that is multiplied out again.

        Raises:
            NotFinite: a loss or gradient is not, and `training.on_nan_loss` does not say to skip the step. Either way
                weights and optimizer stay as they were.
        """
        totals, num_chunks = self._share_totals(objective.totals(batches), batches)
        score = partial(objective.loss, totals=totals, num_chunks=num_chunks)
        factor = lr_factor(step, self._num_steps, self._cfg.training)
        learning_rates = {name: base_lr * factor for name, base_lr in self._base_lrs.items()}
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rates[group["name"]]
        # DeepSpeed divides by the configured number of micro-steps, however many there are.
        scale = self._ranks.world_size * self.engine.gradient_accumulation_steps()
        numbers: list[dict[str, float]] = []
        has_finite_loss: list[bool] = []
        for index, batch in enumerate(batches):
            self.engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            loss, own = self.engine(batch.to(self._ranks.device), score)
            value = loss.detach()
            # x - x is nan for a loss that is not finite, else 0: then every gradient is nan and the step is skipped
            self.engine.backward(loss * (scale + (value - value)))
            plain_norm = self._plain_norm() if index == len(batches) - 1 else None
            is_dropped = plain_norm is not None and not math.isfinite(plain_norm)
            if is_dropped:  # DeepSpeed's own optimizers skip such a step; torch's would write nan into all weights
                self.engine.zero_grad()
            else:
                self.engine.step()
            numbers.append({name: float(value) for name, value in own.items()})
            has_finite_loss.append(math.isfinite(value))
        rows = list(zip(numbers, has_finite_loss, [batch.sample_ids for batch in batches], strict=True))
        gathered = [row for part in self._ranks.gather(rows) for row in part]
        grad_norm = self.engine.get_global_grad_norm() if plain_norm is None else plain_norm
        is_finite = not is_dropped and (grad_norm is None or math.isfinite(grad_norm))
        self._check_finite(step, is_finite, [(good, ids) for _, good, ids in gathered])
        return StepResult(
            losses=objective.report([own for own, _, _ in gathered], totals),
            grad_norm=float(grad_norm) if grad_norm is not None else math.nan,
            learning_rates=learning_rates,
            num_tokens=sum(batch.num_tokens for batch in batches),
            fill_ratio=sum(batch.num_tokens for batch in batches) / sum(map(self._room, batches)),
        )

    def _plain_norm(self) -> float | None:
        """The gradient's norm, the same on all ranks, where DeepSpeed computes none: under torch's plain optimizer,
        which float32 has with ZeRO-0."""
        if type(self.engine.optimizer) is not torch.optim.AdamW:
            return None
        gradients = [parameter.grad for parameter in self.engine.module.parameters() if parameter.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def _check_finite(self, step: int, is_finite: bool, rows: Sequence[tuple[bool, list[str]]]) -> None:
        """Stop, or say that the step was skipped, unless all losses and the gradient are finite.

        Args:
            is_finite: the gradient. float16 overflows as a matter of course, which is its loss scale's business.
            rows: of all ranks: whether the loss is finite, and the samples.
        """
        bad = [ids for good, ids in rows if not good]
        what = "the loss" if bad else "the gradient"
        if not bad and (is_finite or self._cfg.model.dtype == "float16"):
            self._num_skipped = 0
            return
        self._num_skipped += 1
        names = ", ".join(name for ids in bad or [ids for _, ids in rows] for name in ids) or "none, an empty row"
        words = f"{what} of optimizer step {step + 1} is not finite; samples: {names}"
        if self._cfg.training.on_nan_loss == "stop":
            raise NotFinite(f"{words}. The weights are as before it; look at these samples, learning rate and dtype")
        if self._num_skipped == MAX_SKIPPED:
            raise NotFinite(f"{words}. {MAX_SKIPPED} steps in a row were skipped: the weights themselves are broken")
        logger.warning("%s; the step is skipped (training.on_nan_loss)", words)

    def save_state(self, folder: Path) -> None:
        """Trained parameters, optimizer and counters into `folder`, one shard per rank (collective).

        What is frozen is not written: it is what `model.path` holds.

        Raises:
            DistributedError: on all ranks, where any could not write.
        """
        where = f"saving {folder}"
        self._ranks.raise_on_all_ranks(capture_error(partial(folder.mkdir, parents=True, exist_ok=True)), where)
        with _errors_kept(self.engine) as errors:
            self.engine.save_checkpoint(
                str(folder.parent), tag=folder.name, save_latest=False, exclude_frozen_parameters=True
            )
        self._ranks.raise_on_all_ranks(errors[0] if errors else None, where)

    def load_state(self, folder: Path) -> None:
        """Go on from `save_state(folder)` (collective). Learning rates, decay and Adam's settings stay those of the
        config.

        Raises:
            ValueError: the checkpoint lacks trained parameters of this model.
        """
        settings = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.engine.optimizer.param_groups
        ]
        path, _ = self.engine.load_checkpoint(
            str(folder.parent), tag=folder.name, custom_load_fn=_load_trained, load_lr_scheduler_states=False
        )
        if path is None:
            raise ValueError(f"{folder}: DeepSpeed finds no checkpoint there")
        for group, own in zip(self.engine.optimizer.param_groups, settings, strict=True):
            group.update(own)

    def last_logprobs(self, batch: Batch, num_tokens: int) -> np.ndarray:
        """Log-probabilities, float64 `[num_tokens]`, of the last tokens of a batch of one segment; adapters in force.
        All ranks must call it with the same batch (ZeRO-3)."""
        self.engine.eval()
        with torch.no_grad():
            logprobs = self.engine(batch.to(self._ranks.device), partial(last_logprobs, num_tokens=num_tokens))
        self.engine.train()
        return logprobs.double().cpu().numpy()

    def logprobs(
        self, batches: Sequence[Batch], temperature: float, of_start_policy: bool = False
    ) -> list[torch.Tensor]:
        """Log-probabilities of every text label, float32 `[Nt]` per batch, under the present weights or those that
        training began with (LoRA only). All ranks must call it with equally many batches (ZeRO-3)."""
        _, num_chunks = self._share_totals({}, batches)
        score = partial(text_logprobs, num_chunks=num_chunks, temperature=temperature)
        self.engine.eval()
        with torch.no_grad(), start_policy(self.model) if of_start_policy else nullcontext():
            scored = [self.engine(batch.to(self._ranks.device), score)[0].cpu() for batch in batches]
        self.engine.train()
        return scored

    def _share_totals(self, own: dict[str, float], batches: Sequence[Batch]) -> tuple[dict[str, float], int]:
        """Sums of `own` over all ranks, and one number of logits chunks for all (one collective)."""
        shared = self._ranks.gather((own, max(batch.num_labels for batch in batches)))
        totals = {name: sum(local[name] for local, _ in shared) for name in own}
        most_labels = max(labels for _, labels in shared)
        return totals, num_chunks_for(most_labels, chunk_labels(self.engine.zero_optimization_stage()))

    def _room(self, batch: Batch) -> int:
        """Tokens that a row could hold; a padded batch without a limit holds what it does, padding included."""
        return self._cfg.global_max_length or batch.input_ids.numel()


def lr_factor(step: int, num_steps: int, training: Any) -> float:
    """Learning-rate factor in [0, 1] of optimizer step `step` (0-based): linear warm-up, then the schedule's decay to
    `min_lr_ratio`. A function of the step alone, so there is no scheduler state to save."""
    if step < training.warmup_steps:
        return (step + 1) / training.warmup_steps
    progress = (step - training.warmup_steps) / max(1, num_steps - training.warmup_steps)
    low = training.min_lr_ratio
    if training.lr_scheduler == "constant":
        return 1.0
    if training.lr_scheduler == "linear":
        return low + (1 - low) * (1 - progress)
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def _load_trained(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
    """DeepSpeed's `load_state_dict(strict=...)` for a state without the frozen parameters."""
    trained = {name for name, parameter in dst.named_parameters() if parameter.requires_grad}
    found = dst.load_state_dict(src, strict=False)
    if wrong := sorted(trained.intersection(found.missing_keys)) + sorted(found.unexpected_keys):
        raise ValueError(f"the checkpoint's parameters are not this model's: {wrong[:5]}")


@contextmanager
def _errors_kept(engine: Any) -> Iterator[list[Exception]]:
    """Inside, writing a DeepSpeed checkpoint does not raise but leaves its errors in the list.

    DeepSpeed 0.19 has a barrier behind its writes: a rank that left on a full disk would leave the others there.
    """
    errors: list[Exception] = []
    writer = engine.checkpoint_engine
    write = writer.save

    def save(state_dict: dict[str, Any], path: str) -> None:
        if (error := capture_error(write, state_dict, path)) is not None:
            errors.append(error)

    writer.save = save
    engine._copy_recovery_script = lambda save_path: None  # scripts to merge shards; `merged/` lies beside them
    try:
        yield errors
    finally:
        del writer.save, engine._copy_recovery_script


def _optimizer_class(config: dict[str, Any], ranks: Ranks) -> type[torch.optim.Optimizer]:
    """torch's AdamW, or DeepSpeed's CPU Adam where optimizer states are offloaded from a GPU."""
    offload = config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none")
    if offload != "none" and ranks.device.type == "cuda":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam
    return torch.optim.AdamW
