"""The learner alone on one GPU: a Qwen3-VL of about 2B parameters with random weights in bf16; no server, no vLLM.

    python -m benchmarks.gpu_learner            # needs torch 2.11+, transformers, peft, shapely, scipy; no checkpoint
    python -m benchmarks.gpu_learner --small    # a toy model in float32, which also runs on CPU

Reports tokens/s and model-FLOP utilisation of packed rows against padded batches, the loss with and without full
logits, the bandwidth of the merge stream against plain device copies, and peak memory. Writes
benchmarks/gpu_results.json, and `train_flops_per_s` for `tools.plan`. FLOPs per token are 6 per parameter of the
language model's layers; attention over the length, the head (at labels only) and the vision tower are left out.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from benchmarks.baselines.padded_full_logits import padded_loss_sums
from benchmarks.bench_learner import answer_lengths, carried_rows
from tools.plan import write_constants
from utils.config.released import MODELS
from utils.config.schema import Losses
from utils.learner import attention
from utils.learner.model import RowModel, position_ids_for
from utils.learner.objectives import MatchingObjective
from utils.losses import loss_sums, num_chunks_for, total_loss
from utils.packing import Batch, collate_packed, collate_padded, denominators
from utils.sync.merged_weights import MergedWeights
from utils.targets import Segment, plain_segment

RESULTS = Path(__file__).parent / "gpu_results.json"
OBJECTIVE = MatchingObjective(Losses())
FIRST_COORD, PROMPT_TOKENS, LABELLED = 1000, 128, 0.5  # about half of an answer's tokens carry a label in a run
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40": 181e12, "4090": 165e12}  # dense bf16, data sheets


@dataclass(frozen=True)
class Size:
    """Size of the benchmark. `cap`: tokens of a row; `num_segments` of log-normal lengths fill the rows."""

    config: dict[str, Any]
    dtype: torch.dtype
    cap: int
    num_segments: int
    scale: float  # of answer lengths, whose mean is 600


def small_config() -> dict[str, Any]:
    """Config of a toy model of the same kind: 2 layers, vocabulary of 4,096."""
    config = copy.deepcopy(MODELS["Qwen3-VL-2B"])
    config["text_config"] |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
    config["text_config"] |= {"num_key_value_heads": 1, "intermediate_size": 128, "vocab_size": 4096}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    config["text_config"]["rope_parameters"] = rope
    config["vision_config"] |= {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    config["vision_config"] |= {"out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]}
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return config | {name: 4000 + index for index, name in enumerate(ids)}


LARGE = Size(MODELS["Qwen3-VL-2B"], torch.bfloat16, cap=12_000, num_segments=96, scale=1.0)
SMALL = Size(small_config(), torch.float32, cap=512, num_segments=16, scale=0.15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="use a toy model, to check that everything runs")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"default: {RESULTS.name} beside this file; --small: none"
    )
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.small:
        parser.error("no CUDA device here; --small runs a toy model on CPU")
    results = measure(SMALL if args.small else LARGE, device, rounds=2 if args.small else 5)
    if out := args.out or (None if args.small else RESULTS):
        out.write_text(json.dumps(results, indent=2) + "\n")
    for name, value in results.items():
        print(f"{name:<44}{value if isinstance(value, str) else 'not measured' if value is None else f'{value:.4g}'}")
    if not args.small:
        flops = 6 * results["parameters"] * results["tokens/s, packed"]  # of all weights, as tools.plan counts
        write_constants("cuda", {"train_flops_per_s": flops})


def measure(size: Size, device: torch.device, rounds: int) -> dict[str, float | str | None]:
    """Measure all figures, by name; None if the device cannot tell."""
    torch.manual_seed(0)
    model = make_model(size, device)
    segments = make_segments(size)
    layout = {
        "position_ids_fn": position_ids_for(model),
        "coord_ids": np.arange(FIRST_COORD, FIRST_COORD + 1000),
        "dummy": smallest_image(model),
    }
    rows = carried_rows(segments, size.cap)
    used = [segment for row in rows for segment in row]
    packed = [collate_packed(row, **layout).to(device) for row in rows]
    by_length = padded_batches(used, size.cap)
    padded = [collate_padded(batch, **layout).to(device) for batch in by_length]
    row_model, parameters = RowModel(model), language_parameters(model)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    total = sum(parameter.numel() for parameter in model.parameters())
    results: dict[str, float | str | None] = {"device": name, "parameters": float(total)}
    peak_flops = next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)
    for kind, batches in (("packed", packed), ("padded", padded)):
        reset_peak(device)
        seconds = median_seconds(lambda batches=batches: [train(row_model, batch) for batch in batches], device, rounds)
        tokens_per_s = sum(map(len, used)) / seconds
        results[f"tokens/s, {kind}"] = tokens_per_s
        results[f"FLOP/s, {kind}"] = 6 * parameters * tokens_per_s
        results[f"model-FLOP utilisation, {kind}"] = peak_flops and 6 * parameters * tokens_per_s / peak_flops
        results[f"peak memory, {kind}, GiB"] = peak_gib(device)
        model.zero_grad(set_to_none=True)
    longest = collate_packed(by_length[-1], **layout).to(device)  # the batch with the least padding
    results |= loss_part(model, longest, padded[-1], device, rounds)
    return results | merge_stream(model, device, rounds)


def make_model(size: Size, device: torch.device) -> Qwen3VLForConditionalGeneration:
    """Return a model with random weights, as speed does not depend on values; no gradient checkpointing."""
    config = Qwen3VLConfig.from_dict(size.config)
    default = torch.get_default_dtype()
    torch.set_default_dtype(size.dtype)
    try:
        with device:
            model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation=attention.register())
    finally:
        torch.set_default_dtype(default)
    return model.train()


def smallest_image(model: Qwen3VLForConditionalGeneration) -> Segment:
    """A segment of one image token, without labels."""
    vision = model.config.vision_config
    merge, patch_dim = vision.spatial_merge_size, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    image = {"pixel_values": torch.zeros(merge**2, patch_dim), "image_grid_thw": torch.tensor([[1, merge, merge]])}
    return plain_segment("", [model.config.image_token_id], [], image)


def make_segments(size: Size) -> list[Segment]:
    """Return segments of text only, with labels on half of the answer's tokens, a third of them coordinates."""
    generator = torch.Generator().manual_seed(0)
    prompt = max(4, int(PROMPT_TOKENS * size.scale))
    segments = []
    for index, length in enumerate(answer_lengths(size.num_segments)):
        length = max(8, int(length * size.scale))
        ids = torch.randint(3, FIRST_COORD, (prompt + length,), generator=generator)
        labelled = prompt + torch.randperm(length - 1, generator=generator)[: int(LABELLED * length)] + 1
        coord, text = labelled[::3].sort().values, torch.cat([labelled[1::3], labelled[2::3]]).sort().values
        ids[coord] = FIRST_COORD + torch.randint(1000, coord.shape, generator=generator)
        segments.append(
            Segment(
                sample_id=str(index),
                input_ids=ids.numpy(),
                answer_start=prompt,
                coord_index=coord.numpy(),
                coord_target=(ids[coord] - FIRST_COORD).float().numpy(),
                text_index=text.numpy(),
                text_label=ids[text].numpy(),
                text_weight=torch.ones(len(text)).numpy(),
            )
        )
    return segments


def padded_batches(segments: Sequence[Segment], cap: int) -> list[list[Segment]]:
    """Batch segments by length, as many as fit into `cap` tokens with their padding."""
    batches: list[list[Segment]] = [[]]
    for segment in sorted(segments, key=len):
        if batches[-1] and len(segment) * (len(batches[-1]) + 1) > cap:
            batches.append([])
        batches[-1].append(segment)
    return batches


def train(model: RowModel, batch: Batch) -> None:
    """Run forward and backward."""
    totals, num_chunks = denominators([batch]), num_chunks_for(batch.num_labels)
    loss, _ = model(batch, partial(OBJECTIVE.loss, totals=totals, num_chunks=num_chunks))
    loss.backward()


def loss_part(
    model: Qwen3VLForConditionalGeneration, packed: Batch, padded: Batch, device: torch.device, rounds: int
) -> dict[str, float | None]:
    """Measure head and losses alone, on the same segments: at labels in chunks, against the logits of every position.

    Memory is what this takes at its peak beside what exists before it.
    """
    results: dict[str, float | None] = {}
    sigma, head = Losses().sigma, model.lm_head
    for kind, batch in (("at labels", packed), ("full logits", padded)):
        shape = (*batch.input_ids.shape, model.config.text_config.hidden_size)
        hidden = torch.randn(shape, device=device, dtype=head.weight.dtype).requires_grad_()

        def step(kind: str = kind, batch: Batch = batch, hidden: torch.Tensor = hidden) -> None:
            if kind == "at labels":
                sums = loss_sums(hidden.flatten(0, 1), head, batch, sigma, num_chunks_for(batch.num_labels))
            else:
                sums = padded_loss_sums(hidden, head, batch, sigma)
            total_loss(sums, denominators([batch]), Losses()).backward()

        before = reset_peak(device)
        results[f"loss, {kind}, us per label"] = 1e6 * median_seconds(step, device, rounds) / batch.num_labels
        results[f"loss, {kind}, peak memory, GiB"] = peak_gib(device, before)
        model.zero_grad(set_to_none=True)
    return results


def merge_stream(model: Qwen3VLForConditionalGeneration, device: torch.device, rounds: int) -> dict[str, float]:
    """Measure GB/s of merged DoRA weights as a sync makes them, and of plain copies."""
    config = LoraConfig(r=16, lora_alpha=32, use_dora=True, target_modules=r".*language_model.*_proj")
    weights = MergedWeights(get_peft_model(model, config, autocast_adapter_dtype=False))
    num_bytes = sum(entry.num_bytes for entry in weights.entries)
    source = torch.ones(min(num_bytes, 1 << 28), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def walk() -> None:
        for _ in weights.tensors():
            pass

    copied = source.numel() / median_seconds(lambda: target.copy_(source), device, rounds)
    merged = num_bytes / median_seconds(walk, device, rounds)
    return {"merge stream, GB/s": merged / 1e9, "device copy, GB/s": copied / 1e9}


def median_seconds(function: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the median over `rounds` runs, each until the device has finished; one more run before is warm-up."""
    seconds = []
    for turn in range(rounds + 1):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        seconds += [time.perf_counter() - start] if turn else []
    return statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: torch.device) -> int:
    """Begin to measure the peak of memory; return the bytes in use now."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_gib(device: torch.device, before: int = 0) -> float | None:
    return (torch.cuda.max_memory_allocated() - before) / 2**30 if device.type == "cuda" else None


def language_parameters(model: Qwen3VLForConditionalGeneration) -> int:
    """Number of parameters used by every token: the language model's layers. The head is used at labels only."""
    return sum(parameter.numel() for parameter in model.model.language_model.layers.parameters())


if __name__ == "__main__":
    main()
