"""Train a small model on the answer format: plain supervised training in one process.

    python -m tools.warmup_sft --config configs/demo/warmup.yaml

Stage 2 learns from its own rollouts, so it needs a model whose responses mostly parse. This is the short way there,
with the JSONL format, targets, rows and losses of stage 2 (the target is the ground truth after an empty prefix). It
trains the whole model in float32 on the CPU with Muon: meant for the demos' small models. Large ones take stage 1
(`configs/stage1/`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, PrivateAttr, ValidationError
from torch import nn

from tools.lengths import prompt_lengths
from utils.answer_format import FORMATS
from utils.config.checkpoint_files import checkpoint_problems
from utils.config.load import ConfigError, Origin, exit_with, reason_of, resolve_yaml
from utils.config.schema import RM, Data, DataFiles, Losses, RolloutMatching
from utils.config.section import PositiveFloat, PositiveInt, Ratio, Section
from utils.data.encoding import dummy_segment, encode_prompt, grid_of, load_processor, special_words
from utils.data.mistakes import BadLine, report_skipped
from utils.data.samples import DataError, LineReader, Sample, load_samples
from utils.data.stream import SampleStream
from utils.learner.model import RowModel, load_model, part_of, position_ids_for
from utils.learner.objectives import MatchingObjective
from utils.losses import PARTS, num_chunks_for, total_loss
from utils.packing import Batch, CarryBuffer, collate_packed, denominators
from utils.parsing import TokenTable
from utils.targets import Segment, TargetOptions, ground_truth_target, make_segment

SegmentOf = Callable[[Sample, Any], Segment]  # of a sample, with the processor


class WarmupConfig(Section):
    """All settings; paths are relative to the working directory."""

    model: str = Field(description="checkpoint directory to start from")
    train_jsonl: DataFiles = Field(description="a file, a list of files, or a list of {path, weight}")
    output_dir: str = Field(description="directory of the trained checkpoint, in Hugging Face form with its processor")
    data: Data = Field(default_factory=Data)
    losses: Losses = Field(default_factory=Losses)
    answer_format: Literal["coord_tokens", "qwen3vl", "qwen2_5vl", "internvl"] = Field(
        "coord_tokens", description="as in stage 2"
    )
    seed: int = Field(0, ge=0)
    steps: PositiveInt = Field(description="optimizer steps")
    samples_per_step: PositiveInt = 16
    row_tokens: PositiveInt = Field(1024, description="maximum number of tokens in a packed row, and so in a segment")
    matrix_lr: PositiveFloat = Field(0.01, description="learning rate of Muon, for the matrices")
    other_lr: PositiveFloat = Field(2e-3, description="learning rate of AdamW, for embeddings, norms and biases")
    weight_decay: float = Field(0.01, ge=0)
    warmup_share: Ratio = Field(0.05, description="share of the steps in which the learning rate rises")
    min_lr_ratio: Ratio = Field(0.02, description="end of the cosine, relative to the learning rate")
    max_grad_norm: PositiveFloat = 1.0
    autocast: Literal["bfloat16", "off"] = "bfloat16"
    logging_steps: PositiveInt = 25
    _origin: Origin = PrivateAttr(default_factory=lambda: Origin("config", {}))  # which file set what


def load_warmup_config(path: str | os.PathLike) -> WarmupConfig:
    """Resolve `extends` and validate; raise `ConfigError` with all problems."""
    data, files = resolve_yaml(path)
    origin = Origin(str(path), data, files)
    try:
        cfg = WarmupConfig.model_validate(data)
    except ValidationError as error:
        problems = [origin.problem(tuple(e["loc"]), e["msg"]) for e in error.errors(include_url=False)]
        raise ConfigError(problems) from None
    found = []
    if cfg.losses.reference_kl:
        rule = "the warm-up learns every token of an answer, so nothing is left to compare; delete it"
        found.append(origin.problem(("losses", "reference_kl"), rule))
    for i, file in enumerate(cfg.train_jsonl):
        for key in sorted(file.model_fields_set - {"path", "weight"}):
            rule = "has no effect here: every sample trains on its ground truth; delete it"
            found.append(origin.problem(("train_jsonl", i, key), rule))
    if not FORMATS[cfg.answer_format].has_coord_tokens:
        for key in ("w1", "gate", "sigma"):
            if getattr(cfg.losses, key) not in (0, default := getattr(Losses(), key)):
                rule = f"applies to coordinate tokens, and answer_format: {cfg.answer_format} has none"
                found.append(origin.problem(("losses", key), f"{rule}; delete it, or set the default {default:g}"))
    if found:
        raise ConfigError(found)
    cfg._origin = Origin(str(path), {}, files)  # without the file's values, as programs put others in their place
    return cfg


@dataclass
class Parts:
    """Model, processor and data, loaded and checked."""

    model: nn.Module
    processor: Any
    table: TokenTable
    stream: SampleStream


def load_parts(cfg: WarmupConfig, segment_of: SegmentOf | None = None) -> Parts:
    """Load data, processor and model.

    Args:
        segment_of: as in `train`; of other segments than stage 2's the lengths are not checked.

    Raises:
        DataError, ValueError, OSError: the files, the tokenizer or the checkpoint cannot be used.
    """
    if found := checkpoint_problems(Path(cfg.model)):
        raise ConfigError([cfg._origin.problem("model", rule, cfg.model) for rule in found])
    skipped: list[BadLine] | None = [] if cfg.data.on_bad_sample == "skip" else None
    form = FORMATS[cfg.answer_format]
    prompt = cfg.data.prompt if "prompt" in cfg.data.model_fields_set else form.prompt
    paths = [file.path for file in cfg.train_jsonl]
    processor = load_processor(cfg.model)
    grids, special = grid_of(processor, form), special_words(processor, form)
    reader = LineReader(prompt, cfg.data.object_order, form, grids, special, needs_objects=True)
    datasets = load_samples(paths, skipped=skipped, reader=reader)
    if skipped is not None:
        print(report_skipped(skipped, cfg.output_dir), end="", flush=True)
    stream = SampleStream(datasets, [file.weight for file in cfg.train_jsonl], cfg.seed)
    table = TokenTable.from_tokenizer(processor.tokenizer, form)
    if segment_of is None:
        check_lengths(cfg, [sample for samples in datasets for sample in samples], processor, table)
    return Parts(load_model(cfg.model, "float32"), processor, table, stream)


def check_lengths(cfg: WarmupConfig, samples: Sequence[Sample], processor: Any, table: TokenTable) -> None:
    """Raise ValueError that names the samples whose prompt and ground truth fit no row, before one is drawn (PCK-3)."""
    too_long = []
    for sample, length in zip(samples, prompt_lengths(samples, processor), strict=True):
        needed = length + len(table.encode(FORMATS[cfg.answer_format].write(sample.objects))) + 1  # the end token
        if needed > cfg.row_tokens:
            too_long.append(f"{sample.source}: prompt and ground truth make {needed} tokens")
    if too_long:
        rule = f"{len(too_long)} of {len(samples)} samples do not fit; raise it, or remove them"
        raise ValueError(f"{cfg._origin.problem('row_tokens', rule, cfg.row_tokens)}\n{DataError(too_long)}")


def check_writable(cfg: WarmupConfig) -> None:
    """Raise ValueError where the trained checkpoint could not be written, or would replace another one."""
    folder = Path(cfg.output_dir)
    if (folder / "config.json").exists():  # also that of the model it starts from
        rule = "holds a checkpoint, which would be overwritten; choose another directory, or delete it"
        raise ValueError(cfg._origin.problem("output_dir", rule, cfg.output_dir))
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        if is_new:  # what else is wrong leaves nothing behind
            folder.rmdir()
    except OSError as error:
        rule = f"cannot be written ({reason_of(error)}); choose another directory"
        raise ValueError(cfg._origin.problem("output_dir", rule, cfg.output_dir)) from None


def train(cfg: WarmupConfig, parts: Parts, segment_of: SegmentOf | None = None) -> None:
    """Train all weights in place.

    Args:
        segment_of: makes a sample's segment; None: stage 2's, whose labels are the sample's objects.
    """
    model, table = parts.model, parts.table
    row_model = RowModel(model).train()
    optimizers = make_optimizers(model, cfg)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(cfg)) for optimizer in optimizers]
    objective = MatchingObjective(cfg.losses)
    options = TargetOptions(desc_weight=cfg.losses.desc, coord_weight=cfg.losses.coord)
    if segment_of is None:
        segment_of = partial(supervised_segment, table=table, options=options)
    started, dummy = time.monotonic(), dummy_segment(parts.processor)
    for step in range(cfg.steps):
        samples = parts.stream.next(cfg.samples_per_step)
        segments = [segment_of(sample, parts.processor) for sample in samples]
        rows = list(packed_rows(segments, cfg.row_tokens, model, table, dummy))
        totals = denominators(rows)
        sums = dict.fromkeys(PARTS, 0.0)
        for row in rows:
            with torch.autocast("cpu", torch.bfloat16, enabled=cfg.autocast == "bfloat16"):
                score = partial(objective.loss, totals=totals, num_chunks=num_chunks_for(row.num_labels))
                loss, row_sums = row_model(row, score)
            loss.backward()
            sums = {part: sums[part] + row_sums[part] for part in PARTS}
        nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % cfg.logging_steps == 0 or step == cfg.steps - 1:
            log(step, cfg.steps, sums, totals, cfg.losses, time.monotonic() - started)


def supervised_segment(sample: Sample, processor: Any, table: TokenTable, options: TargetOptions) -> Segment:
    """Return the sample's prompt followed by its whole ground truth, every token of which is a label."""
    prompt = encode_prompt(sample, processor)
    target = ground_truth_target(sample.objects, table, options)
    return make_segment(sample.id, prompt.prompt_token_ids, target, table, prompt.vision)


def packed_rows(
    segments: list[Segment], row_tokens: int, model: nn.Module, table: TokenTable, dummy: Segment
) -> Iterator[Batch]:
    """Yield all segments of a step as rows, each filled as far as possible."""
    buffer = CarryBuffer(row_tokens, max_segments=len(segments))
    buffer.extend(segments)
    positions = position_ids_for(model)
    while len(buffer):
        yield collate_packed(buffer.pop_row(), positions, table.coord_ids, dummy, table.digit_ids)


def make_optimizers(model: nn.Module, cfg: WarmupConfig) -> list[torch.optim.Optimizer]:
    """Return Muon for the weight matrices inside layers, AdamW for embeddings, convolutions, norms and biases.

    On the demo's model, Muon learns far faster than AdamW alone.

    Source: Jordan et al. 2024, Muon; its orthogonalised update suits hidden matrices only.
    """
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        hidden_matrix = parameter.ndim == 2 and part_of(name) != "embeddings" and "pos_embed" not in name
        (matrices if hidden_matrix else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=cfg.matrix_lr, momentum=0.95, weight_decay=cfg.weight_decay),
        torch.optim.AdamW(others, lr=cfg.other_lr, betas=(0.9, 0.98), weight_decay=cfg.weight_decay),
    ]


def lr_factor(cfg: WarmupConfig) -> Callable[[int], float]:
    """Return step -> factor on the learning rate: a linear rise, then a cosine down to `min_lr_ratio`."""
    rise = max(1, round(cfg.warmup_share * cfg.steps))

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        done = (step - rise) / max(1, cfg.steps - rise)
        return cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def log(step: int, steps: int, sums: dict, totals: dict, weights: Losses, seconds: float) -> None:
    means = {part: float(sums[part]) / (totals["text" if part == "text" else "coord"] or 1.0) for part in PARTS}
    parts = "  ".join(f"{part} {value:.4f}" for part, value in means.items())
    print(
        f"step {step + 1}/{steps}  loss {float(total_loss(sums, totals, weights)):.3f}  {parts}  {seconds:.0f} s",
        flush=True,
    )


def save(parts: Parts, output_dir: str | os.PathLike) -> None:
    """Write a checkpoint that transformers and vLLM can load."""
    parts.model.save_pretrained(output_dir)
    parts.processor.save_pretrained(output_dir)


def warm_up(cfg: WarmupConfig, segment_of: SegmentOf | None = None) -> None:
    """Load, train and save; see `train`."""
    parts = load_parts(cfg, segment_of)
    train(cfg, parts, segment_of)
    save(parts, cfg.output_dir)


def evaluation_command(cfg: WarmupConfig) -> str:
    """The command that scores the checkpoint, with what it has to be told of prompt and answer format."""
    command = f"python -m tools.evaluate --checkpoint {shlex.quote(str(cfg.output_dir))} --data FILE"
    own = {f"{RM}.answer_format": cfg.answer_format} if cfg.answer_format != RolloutMatching().answer_format else {}
    own |= {"data.prompt": cfg.data.prompt} if "prompt" in cfg.data.model_fields_set else {}
    settings = ", ".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in own.items())
    return f"{command} --config CONFIG (a training config with {settings})" if own else command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML, e.g. configs/demo/warmup.yaml")
    try:
        cfg = load_warmup_config(parser.parse_args().config)
        check_writable(cfg)
        parts = load_parts(cfg)
    except (ConfigError, DataError, ValueError, OSError) as error:
        exit_with(error)
    print(f"supervised warm-up of {cfg.model}: {cfg.steps} steps of {cfg.samples_per_step} samples", flush=True)
    train(cfg, parts)
    save(parts, cfg.output_dir)
    print(f"saved {cfg.output_dir}; score it: {evaluation_command(cfg)}")


if __name__ == "__main__":
    main()
