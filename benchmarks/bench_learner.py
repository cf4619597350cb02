"""The learner's loss and its packed rows (LRN-4, PCK).

Answers have log-normal lengths with a mean of 600 and at most 4,000 tokens. The real pipeline decides which tokens have
labels: 70 % of the objects are found, so their coordinates and names are labelled in the prefix; the others are
appended and labelled completely. Prompt tokens (an image of 128) have no loss.
"""

import dataclasses
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.baselines.padded_full_logits import padded_loss_sums
from benchmarks.bench_cpu_work import make_answer, text_positions
from benchmarks.demo import Demo
from benchmarks.harness import Result, at_least, at_most, cpu, reported, take_turns
from benchmarks.memory import LivePeak
from tools.make_demo import build_tokenizer
from utils.config.schema import Losses
from utils.geometry import iou_matrix
from utils.losses import loss_sums, num_chunks_for, total_loss
from utils.matching import match
from utils.packing import Batch, CarryBuffer, collate_packed, collate_padded, denominators
from utils.parsing import TokenTable, parse_answer
from utils.targets import Segment, TargetOptions, build_target, make_segment

VOCAB_SIZE = 151_936
HIDDEN_SIZE = 64
PROMPT = [1] * 128
TOKENS_PER_OBJECT = 26
MAX_PADDED = 1_400  # tokens: padded logits of longer batches, four copies at the peak, would not fit a small machine
NUM_BATCHES = 2
ROW_TOKENS = 1024
Sums = dict[str, torch.Tensor]


def run() -> list[Result]:
    return [*loss_part(), *packed_rows()]


def loss_part() -> list[Result]:
    """Forward and backward of head and losses on the same batches of two segments, packed and padded."""
    table = TokenTable.from_tokenizer(build_tokenizer())
    segments = [long_segment(length, table, seed) for seed, length in enumerate(answer_lengths(32))]
    pairs = [segments[index : index + 2] for index in range(0, len(segments), 2)]
    pairs = [pair for pair in pairs if 2 * max(map(len, pair)) <= MAX_PADDED][:NUM_BATCHES]
    layout = {"position_ids_fn": text_positions, "coord_ids": table.coord_ids, "dummy": segments[0]}
    packed = [collate_packed(pair, **layout) for pair in pairs]
    padded = [collate_padded(pair, **layout) for pair in pairs]
    torch.manual_seed(0)
    head = torch.nn.Linear(HIDDEN_SIZE, VOCAB_SIZE, bias=False)
    functions = {
        "ours": lambda: [backward(batch, packed_sums(batch, head)) for batch in packed],
        "padded": lambda: [backward(batch, padded_sums(batch, head)) for batch in padded],
    }
    seconds = take_turns({name: cpu(function) for name, function in functions.items()}, rounds=3)
    peaks = {name: peak_bytes(function) for name, function in functions.items()}
    num_labels, most = sum(batch.num_labels for batch in packed), max(batch.num_labels for batch in packed)
    time_us = [1e6 * seconds[name] / num_labels for name in functions]
    memory_mib = [peaks[name] / most / 2**20 for name in functions]
    name = f"per supervised token, vocabulary {VOCAB_SIZE:,}"
    return [
        at_least(f"learner: time of the loss {name}", "us", *time_us, 3),
        at_least(f"learner: peak memory of the loss {name}", "MiB", *memory_mib, 8),
    ]


def packed_sums(batch: Batch, head: torch.nn.Module) -> Sums:
    hidden = hidden_states(batch).flatten(0, 1)
    return loss_sums(hidden, head, batch, Losses().sigma, num_chunks_for(batch.num_labels))


def padded_sums(batch: Batch, head: torch.nn.Module) -> Sums:
    return padded_loss_sums(hidden_states(batch), head, batch, Losses().sigma)


def hidden_states(batch: Batch) -> torch.Tensor:
    """Made-up hidden states `[B, T, D]`: equal for equal tokens, so that both layouts agree."""
    table = torch.randn(len(PROMPT) + 2048, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    return table[batch.input_ids].requires_grad_()


def backward(batch: Batch, sums: Sums) -> None:
    total_loss(sums, denominators([batch]), Losses()).backward()


def answer_lengths(count: int, seed: int = 0) -> list[int]:
    """Draw log-normal lengths: mean 600, sigma 0.8, clipped to 60..4,000 tokens."""
    rng, sigma = random.Random(seed), 0.8
    lengths = [rng.lognormvariate(np.log(600) - sigma**2 / 2, sigma) for _ in range(count)]
    return [int(min(max(length, 60), 4000)) for length in lengths]


def long_segment(num_tokens: int, table: TokenTable, seed: int) -> Segment:
    """Return a segment whose answer has about `num_tokens` tokens."""
    ids, gt = make_answer(table, max(2, num_tokens // TOKENS_PER_OBJECT), "bbox_2d", seed)
    parsed = parse_answer(ids, table)
    target = build_target(parsed, gt, match(iou_matrix(parsed.pred_objects, gt), 0.5), table, TargetOptions())
    image = {"pixel_values": torch.zeros(4, 8), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    return make_segment(str(seed), PROMPT, target, table, image)


def peak_bytes(function: Callable[[], object]) -> float:
    """Return the peak bytes of live tensors made while `function` runs."""
    with LivePeak() as live:
        function()
    return float(live.peak)


def packed_rows() -> list[Result]:
    """Forward and backward of the demo's model, per real token.

    Compared are rows as the carry buffer fills them, the same rows filled to the last token, and padded batches of the
    same segments.
    """
    with tempfile.TemporaryDirectory() as folder:
        demo = Demo(Path(folder), num_samples=48)
        segments = [demo.segment(index) for index in range(len(demo.samples))]
        rows = carried_rows(segments, ROW_TOKENS)
        layouts = {
            "rows": [demo.packed(row) for row in rows],
            "ideal": [demo.packed(filled_up(row, ROW_TOKENS)) for row in rows],
            "padded": [demo.padded(segments[start : start + 6]) for start in range(0, len(segments), 6)],
        }
        seconds = take_turns(
            {
                name: cpu(lambda batches=batches: [demo.forward_backward(batch) for batch in batches])
                for name, batches in layouts.items()
            },
            rounds=5,
        )
    per_token = {
        name: 1e6 * seconds[name] / sum(batch.num_tokens for batch in batches) for name, batches in layouts.items()
    }
    return [
        at_most("learner: packed rows, over ideal rows", "us/token", per_token["rows"], per_token["ideal"], 1.1),
        reported("learner: packed rows, over padded batches", "us/token", per_token["rows"], per_token["padded"]),
    ]


def carried_rows(segments: Sequence[Segment], cap: int) -> list[list[Segment]]:
    """Return the rows of a run whose micro-steps add as many segments as fit on average."""
    buffer, rows = CarryBuffer(cap, max_segments=len(segments)), []
    per_step = int(cap * len(segments) / sum(len(segment) for segment in segments))
    for start in range(0, len(segments) - per_step + 1, per_step):
        buffer.extend(segments[start : start + per_step])
        rows.append(buffer.pop_row())
    return rows


def filled_up(row: Sequence[Segment], cap: int) -> list[Segment]:
    """Return the row with its last segment extended, so that it is exactly `cap` tokens long."""
    missing = cap - sum(len(segment) for segment in row)
    last = row[-1]
    tail = np.repeat(last.input_ids[-1:], missing)
    return [*row[:-1], dataclasses.replace(last, input_ids=np.concatenate([last.input_ids, tail]))]
