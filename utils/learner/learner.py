"""The DeepSpeed engine around a row model, its schedule and its optimizer steps; stage 2 and GRPO share it."""

import logging
import math
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from utils.config.deepspeed import engine_json
from utils.config.load import Config
from utils.config.memory import checkpointed_layers, chunk_labels, model_size
from utils.config.schema import Training
from utils.config.section import value_at
from utils.dist import DistributedError, Ranks, capture_error
from utils.families import family_of
from utils.learner.model import (
    RowModel,
    apply_tuner,
    base_model,
    enable_gradient_checkpointing,
    fuse_kernels,
    load_model,
    param_groups,
    partition,
)
from utils.learner.objectives import Objective, last_logprobs, text_logprobs, unlabelled_states
from utils.losses import num_chunks_for
from utils.packing import Batch, StartStates

logger = logging.getLogger(__name__)

MAX_SKIPPED = 10  # bad steps in a row mean that the model itself is broken


class NotFinite(DistributedError):
    """The loss or gradient of an optimizer step is nan or infinite, which left model and optimizer as they were; raised
    on all ranks."""


@dataclass
class StepResult:
    """One optimizer step: the objective's metrics (`total` is the loss) and the norm of the gradient."""

    losses: dict[str, float]
    grad_norm: float
    learning_rates: dict[str, float]  # by parameter group
    num_tokens: int
    room: int  # tokens that the rows could hold


class _RowLoss(NamedTuple):
    """Contribution of one micro-step to the step's metrics."""

    numbers: dict[str, float]  # of `Objective.loss`
    is_finite: bool
    sample_ids: list[str]


class Learner:
    """A model, its adapters and its optimizer under DeepSpeed; knows nothing about rollouts."""

    def __init__(self, cfg: Config, ranks: Ranks, num_steps: int) -> None:
        # Imported here, because they take seconds, which a mistake in the config need not wait for.
        import deepspeed
        from transformers import set_seed

        from utils.learner.attention import kernels_take_borders

        training = cfg.training
        set_seed(training.seed)  # adapters start alike on all ranks and in every run
        model, reference = _load(cfg, cfg.model.path), None
        if cfg.model.reference_path is not None:
            reference = _load(cfg, cfg.model.reference_path).requires_grad_(False)
        self.model: nn.Module = apply_tuner(model, cfg.tuner)  # transformers' or PEFT's; sync and checkpoints read it
        config = engine_json(cfg, ranks.world_size)
        if training.gradient_checkpointing:
            on_gpu, size = ranks.device.type == "cuda", model_size(Path(cfg.model.path), cfg.tuner)
            memory = torch.cuda.get_device_properties(ranks.device).total_memory if on_gpu else 0
            num_layers = checkpointed_layers(cfg, config, size, ranks.world_size, min(ranks.gather(memory)))
            has_mixers = family_of(base_model(self.model)).mixer is not None
            if training.gradient_checkpointing == "auto" and has_mixers and not kernels_take_borders():
                num_layers = None  # transformers' own mixers keep more than the estimate, which is for fast kernels
            logger.info("gradient checkpointing: %s language-model layers", "all" if num_layers is None else num_layers)
            enable_gradient_checkpointing(self.model, num_layers)
        groups = param_groups(self.model, training)
        betas = (training.adam_beta1, training.adam_beta2)
        self._base_lrs = {group["name"]: group["lr"] for group in groups}
        optimizer = _optimizer_class(config, ranks)(groups, betas=betas, eps=training.adam_epsilon)
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # until the first step; see below
        row_model = RowModel(self.model, reference).train()  # transformers loads models for inference
        self.start_head = row_model.start_head  # of the start policy, for an objective's `loss`
        if config["zero_optimization"]["stage"] == 3:
            partition(row_model, config, ranks.device)
        self.engine, *_ = deepspeed.initialize(model=row_model, optimizer=optimizer, config=config)
        if config["zero_optimization"]["stage"] == 0:
            optimizer.state.clear()  # in half precision DeepSpeed 0.19 has taken a step on zeros, which Adam counted
        torch.manual_seed(training.seed + ranks.rank)  # dropout differs between ranks
        self._cfg = cfg
        self._ranks = ranks
        self._num_steps = num_steps
        self._num_skipped = 0  # steps in a row

    def step(self, batches: Sequence[Batch], objective: Objective, step: int) -> StepResult:
        """Take one optimizer step over this rank's batches; all ranks have the same number of them (PCK-5).

        Every loss part is divided by its total weight over all ranks and micro-steps, so the layout of tokens in rows
        does not change the gradient.

        Raises:
            NotFinite: the loss or gradient is not finite, and `training.on_nan_loss` is `stop`. Weights and optimizer
                are unchanged, as they are after a skipped step.
            DistributedError: too many steps in a row were skipped.
        """
        totals, num_chunks = self._sum_over_ranks(objective.totals(batches), batches)
        score = partial(objective.loss, totals=totals, num_chunks=num_chunks)
        learning_rates = self._set_learning_rates(step)
        rows = []
        for index, batch in enumerate(batches, start=1):
            self.engine.set_gradient_accumulation_boundary(index == len(batches))
            rows.append(self._backward(batch, score))
            if index < len(batches):
                self.engine.step()  # updates nothing before the boundary
        grad_norm = self._plain_norm()
        if grad_norm is None or math.isfinite(grad_norm):
            self.engine.step()
            grad_norm = self.engine.get_global_grad_norm() if grad_norm is None else grad_norm
        else:  # DeepSpeed's own optimizers skip such a step; torch's would write nan into all weights
            self.engine.zero_grad()
        rows = [_RowLoss(*row) for part in self._ranks.gather(rows) for row in part]
        self._check_finite(step, grad_norm is None or math.isfinite(grad_norm), rows)
        num_tokens = sum(batch.num_tokens for batch in batches)
        # Each row has room for `global_max_length`; where there is no limit, for its padded length.
        limit = self._cfg.global_max_length
        room = sum(len(batch.input_ids) * (limit or batch.input_ids.shape[1]) for batch in batches)
        return StepResult(
            losses=objective.metrics([row.numbers for row in rows], totals),
            grad_norm=float(grad_norm) if grad_norm is not None else math.nan,
            learning_rates=learning_rates,
            num_tokens=num_tokens,
            room=room,
        )

    def _set_learning_rates(self, step: int) -> dict[str, float]:
        factor = lr_factor(step, self._num_steps, self._cfg.training)
        learning_rates = {name: base_lr * factor for name, base_lr in self._base_lrs.items()}
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rates[group["name"]]
        return learning_rates

    def _backward(self, batch: Batch, score: Callable[..., Any]) -> _RowLoss:
        """Add one row's gradient; a loss that is not finite makes every gradient nan, so that the step is skipped."""
        loss, numbers = self.engine(batch.to(self._ranks.device), score)
        value = loss.detach()
        # DeepSpeed averages over ranks and over the configured number of micro-steps, however many there are; this
        # factor turns the mean back into the sum.
        scale = self._ranks.world_size * self.engine.gradient_accumulation_steps()
        self.engine.backward(loss * (scale + (value - value)))  # x - x is nan for x not finite, else 0
        row_numbers = {name: float(number) for name, number in numbers.items()}
        return _RowLoss(row_numbers, math.isfinite(value), batch.sample_ids)

    def _plain_norm(self) -> float | None:
        """Norm of the gradient where DeepSpeed computes none: with torch's own optimizer, under ZeRO-0 in float32."""
        if type(self.engine.optimizer) is not torch.optim.AdamW:
            return None
        gradients = [parameter.grad for parameter in self.engine.module.parameters() if parameter.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def _check_finite(self, step: int, is_finite: bool, rows: Sequence[_RowLoss]) -> None:
        """Raise as `step` says, or warn that the step was skipped, unless all losses and the gradient are finite.

        Args:
            is_finite: whether the gradient is. In float16 it often is not, and DeepSpeed lowers its loss scale.
            rows: of all ranks.
        """
        bad = [row for row in rows if not row.is_finite]
        if not bad and (is_finite or self._cfg.model.dtype == "float16"):
            self._num_skipped = 0
            return
        self._num_skipped += 1
        names = ", ".join(name for row in bad or rows for name in row.sample_ids) or "none, an empty row"
        message = f"the {'loss' if bad else 'gradient'} of optimizer step {step + 1} is not finite; samples: {names}"
        if self._cfg.training.on_nan_loss == "stop":
            raise NotFinite(f"{message}. This update was not made; check these samples, learning rate and dtype")
        if self._num_skipped == MAX_SKIPPED:
            what = f"{MAX_SKIPPED} steps in a row were skipped: the weights themselves are broken"
            raise DistributedError(f"{message}. {what}")
        logger.warning("%s; the step is skipped (training.on_nan_loss)", message)

    def save_state(self, folder: Path) -> None:
        """Write trained parameters, optimizer and counters into `folder`, one shard per rank (collective).

        Frozen parameters are not written: `model.path` holds them.

        Raises:
            DistributedError: on all ranks, if any could not write.
        """
        where = f"saving {folder}"
        self._ranks.raise_on_all_ranks(capture_error(partial(folder.mkdir, parents=True, exist_ok=True)), where)
        with _captured_write_errors(self.engine) as errors:
            self.engine.save_checkpoint(
                str(folder.parent), tag=folder.name, save_latest=False, exclude_frozen_parameters=True
            )
        self._ranks.raise_on_all_ranks(errors[0] if errors else None, where)

    def load_state(self, folder: Path) -> None:
        """Load the state of `save_state(folder)`, except learning rates, decay and Adam's settings (collective).

        Raises:
            ValueError: the checkpoint lacks trained parameters of this model, or a shard would execute something.
        """
        groups = self.engine.optimizer.param_groups
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self.engine.checkpoint_engine.load = _load_shard
        try:
            path, _ = self.engine.load_checkpoint(
                str(folder.parent), tag=folder.name, custom_load_fn=_load_trained, load_lr_scheduler_states=False
            )
        finally:
            del self.engine.checkpoint_engine.load
        if path is None:
            raise ValueError(f"{folder}: DeepSpeed finds no checkpoint there")
        for group, configured in zip(self.engine.optimizer.param_groups, settings, strict=True):
            group.update(configured)

    def last_logprobs(self, batch: Batch, num_tokens: int) -> np.ndarray:
        """Log-probabilities, float64 `[num_tokens]`, of the last tokens of a batch of one segment, with adapters.
        All ranks must call it with the same batch (ZeRO-3)."""
        [logprobs] = self._score([batch], partial(last_logprobs, num_tokens=num_tokens))
        return logprobs.double().numpy()

    def hidden_states(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Final hidden states [B * T, D] of each batch, on the CPU. All ranks must call it with equally many."""
        return self._score(batches, lambda states, head, batch: states)

    def logprobs(
        self, batches: Sequence[Batch], temperature: float, of_start_policy: bool = False
    ) -> list[torch.Tensor]:
        """Log-probabilities of every text label, float32 `[Nt]` per batch on the CPU, under the current weights or
        those that training started from. All ranks must call it with equally many batches (ZeRO-3)."""
        _, num_chunks = self._sum_over_ranks({}, batches)

        def score(states: torch.Tensor, head: Any, batch: Batch) -> torch.Tensor:
            return text_logprobs(states, head, batch, num_chunks, temperature)[0]

        return self._score(batches, score, of_start_policy)

    def add_start_states(self, batches: Sequence[Batch]) -> None:
        """Give each batch its `start`, unless no token of any rank lacks a label. All ranks must call it with equally
        many batches."""
        if not (num_chunks := self._unlabelled_chunks(batches)):
            return
        scores = self._score(batches, unlabelled_states, of_start_policy=True)
        for batch, states in zip(batches, scores, strict=True):
            batch.start = StartStates(states, num_chunks)

    def share_teacher_chunks(self, batches: Sequence[Batch]) -> None:
        """Let every batch's `teacher` run the head equally often. All ranks must call it with equally many batches."""
        num_chunks = self._unlabelled_chunks(batches)
        for batch in batches:
            batch.teacher.num_chunks = num_chunks

    def _unlabelled_chunks(self, batches: Sequence[Batch]) -> int:
        """Agree on one number of logits chunks of answer tokens without a label (one collective); 0 without any."""
        most = max(self._ranks.gather(max(len(batch.unlabelled_pos) for batch in batches)))
        return num_chunks_for(most, chunk_labels(self.engine.zero_optimization_stage())) if most else 0

    def _score(
        self, batches: Sequence[Batch], score: Callable[..., torch.Tensor], of_start_policy: bool = False
    ) -> list[torch.Tensor]:
        """`score` of each batch, on the CPU, without gradients or dropout; the device holds one batch's at a time."""
        self.engine.eval()
        with torch.no_grad():
            scores = [self.engine(batch.to(self._ranks.device), score, of_start_policy).cpu() for batch in batches]
        self.engine.train()
        return scores

    def _sum_over_ranks(self, totals: dict[str, float], batches: Sequence[Batch]) -> tuple[dict[str, float], int]:
        """Sum `totals` over all ranks, and agree on one number of logits chunks (one collective)."""
        gathered = self._ranks.gather((totals, max(batch.num_labels for batch in batches)))
        summed = {name: sum(part[name] for part, _ in gathered) for name in totals}
        max_labels = max(num_labels for _, num_labels in gathered)
        return summed, num_chunks_for(max_labels, chunk_labels(self.engine.zero_optimization_stage()))


def _load(cfg: Config, path: str) -> nn.Module:
    model = load_model(path, cfg.model.dtype, cfg.model.attn_implementation)
    if cfg.training.fused_kernels:
        fuse_kernels(model)
    return model


def lr_factor(step: int, num_steps: int, training: Training) -> float:
    """Learning-rate factor in [0, 1] of optimizer step `step` (0-based): linear warm-up, then decay to `min_lr_ratio`.

    It depends on the step alone, so there is no scheduler state to save.
    """
    if step < training.warmup_steps:
        return (step + 1) / training.warmup_steps
    if training.lr_scheduler == "constant":
        return 1.0
    progress = min((step - training.warmup_steps) / max(1, num_steps - training.warmup_steps), 1.0)
    remaining = 1 - progress if training.lr_scheduler == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return training.min_lr_ratio + (1 - training.min_lr_ratio) * remaining


def _load_shard(path: str, map_location: Any = None) -> Any:
    """DeepSpeed's `torch.load`, which unpickles whatever the file says. Here only tensors, plain values and DeepSpeed's
    own records are made."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    classes = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]  # in DeepSpeed 0.19's shards
    try:
        with torch.serialization.safe_globals(classes):
            return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).splitlines()[0] if "GLOBAL" not in str(error) else re.search(r"GLOBAL \S+", str(error))[0]
        raise ValueError(
            f"{path}: holds what DeepSpeed does not write ({reason}) and could execute something: nothing of it was "
            "loaded; resume from another checkpoint"
        ) from None


def _load_trained(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
    """DeepSpeed's `load_state_dict(strict=...)` for a state without the frozen parameters."""
    trained = {name for name, parameter in dst.named_parameters() if parameter.requires_grad}
    found = dst.load_state_dict(src, strict=False)
    if wrong := sorted(trained.intersection(found.missing_keys)) + sorted(found.unexpected_keys):
        raise ValueError(f"the checkpoint's parameters are not this model's: {wrong[:5]}")


@contextmanager
def _captured_write_errors(engine: Any) -> Iterator[list[Exception]]:
    """Collect errors of writing a DeepSpeed checkpoint in the list instead of raising them.

    DeepSpeed 0.19 has a barrier after its writes: a rank that left on a full disk would leave the others waiting.
    """
    errors: list[Exception] = []
    writer = engine.checkpoint_engine
    write = writer.save

    def save(state_dict: dict[str, Any], path: str) -> None:
        if (error := capture_error(write, state_dict, path)) is not None:
            errors.append(error)

    writer.save = save
    engine._copy_recovery_script = lambda save_path: None  # scripts that merge shards; `merged/` replaces them
    try:
        yield errors
    finally:
        del writer.save, engine._copy_recovery_script


def _optimizer_class(config: dict[str, Any], ranks: Ranks) -> type[torch.optim.Optimizer]:
    """torch's AdamW, or DeepSpeed's CPU Adam where optimizer states are offloaded from a GPU."""
    offload = value_at(config, ("zero_optimization", "offload_optimizer", "device"), "none")
    if offload != "none" and ranks.device.type == "cuda":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam
    return torch.optim.AdamW
