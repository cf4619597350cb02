"""Write finished models: a merged checkpoint in Hugging Face form and the adapter in PEFT form (LRN-6)."""

import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from utils.data.encoding import load_processor
from utils.dist import Ranks, capture_error
from utils.sync.merged_weights import MergedWeights

_MAX_SHARD_BYTES = 4 << 30
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_SHARD = "model-{:05d}.safetensors"
_Tensors = Iterator[tuple[str, torch.Tensor]]


def save_merged(
    model: nn.Module,
    source_dir: str,
    target_dir: Path,
    ranks: Ranks,
    image_pixels: tuple[int | None, int | None] = (None, None),
) -> None:
    """Write the merged model so that transformers and vLLM load it as it is (collective).

    Tensors are merged and written one shard at a time; config, tokenizer and processor files are copied from
    `source_dir`, where the config gets the dtype that was trained. The directory appears complete or not at all.

    Args:
        image_pixels: the run's `image_min_pixels` and `image_max_pixels`, which the copied processor gets as its own:
            whoever loads the model resizes images as the run did.

    Raises:
        DistributedError: on all ranks, if rank 0 could not write.
    """
    weights = MergedWeights(model)
    tensors = weights.tensors(materialize=ranks.is_main)
    write = partial(_write_merged, weights, tensors, Path(source_dir), target_dir, image_pixels)
    error = capture_error(write) if ranks.is_main else None
    for _ in tensors:  # a rank that does not write, or failed to, takes part in the same gathers as the others
        pass
    ranks.raise_on_all_ranks(error, f"saving {target_dir}")


def _write_merged(
    weights: MergedWeights,
    tensors: _Tensors,
    source_dir: Path,
    target_dir: Path,
    image_pixels: tuple[int | None, int | None],
) -> None:
    partial_dir = target_dir.with_name(target_dir.name + ".partial")
    shutil.rmtree(partial_dir, ignore_errors=True)
    partial_dir.mkdir(parents=True)
    for path in source_dir.iterdir():  # config, generation config, tokenizer, processor, chat template
        if path.is_file() and path.suffix not in (".safetensors", ".bin", ".pt", ".gguf") and "index" not in path.name:
            shutil.copyfile(path, partial_dir / path.name)  # without the mode: a shared model may be read-only
    if any(image_pixels):
        _write_image_size(partial_dir, dict(load_processor(partial_dir, *image_pixels).image_processor.size))
    _write_dtype(partial_dir / "config.json", str(weights.dtype).removeprefix("torch."))
    weight_map = _write_shards(tensors, partial_dir)
    total = sum(entry.num_bytes for entry in weights.entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (partial_dir / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    shutil.rmtree(target_dir, ignore_errors=True)
    os.replace(partial_dir, target_dir)


def _write_dtype(path: Path, dtype: str) -> None:
    """Set a config's own dtype and its parts': loaders go by it, and would round the weights, or take more memory."""
    config = json.loads(path.read_text())
    for own in (config, *(part for part in config.values() if isinstance(part, dict))):
        own |= dict.fromkeys({"dtype", "torch_dtype"} & own.keys(), dtype)
    path.write_text(json.dumps(config, indent=2) + "\n")


def _write_image_size(folder: Path, size: dict[str, int | None]) -> None:
    """Set the limits of an image's pixels in a processor's files; released models have one file or the other."""
    for path in filter(Path.exists, (folder / name for name in _PROCESSOR_FILES)):
        config = json.loads(path.read_text())
        own = config.get("image_processor") if path.name == "processor_config.json" else config
        if own is None:
            continue
        own["size"] = {edge: limit for edge, limit in size.items() if limit is not None}
        for name in ("min_pixels", "max_pixels"):  # older names, which would win
            own.pop(name, None)
        path.write_text(json.dumps(config, indent=2) + "\n")


def _write_shards(tensors: _Tensors, folder: Path) -> dict[str, str]:
    """Write the tensors into files of at most `_MAX_SHARD_BYTES`; return each tensor's file name."""
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    number, num_bytes = 1, 0
    for name, tensor in tensors:
        if shard and num_bytes + tensor.nbytes > _MAX_SHARD_BYTES:
            save_file(shard, folder / _SHARD.format(number), metadata={"format": "pt"})
            shard.clear()
            number, num_bytes = number + 1, 0
        shard[name] = tensor.cpu()
        num_bytes += tensor.nbytes
        weight_map[name] = _SHARD.format(number)
    save_file(shard, folder / _SHARD.format(number), metadata={"format": "pt"})
    return weight_map


def save_adapter(model: nn.Module, target_dir: Path, ranks: Ranks) -> None:
    """Write the adapter in PEFT form, its frozen parts included (collective); does nothing for full fine-tuning.

    Raises:
        DistributedError: on all ranks, if rank 0 could not write.
    """
    import deepspeed

    if not hasattr(model, "peft_config"):
        return
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad or ".lora_" in name:
            with deepspeed.zero.GatheredParameters([parameter]):  # does nothing below ZeRO-3
                if ranks.is_main:
                    state[name] = parameter.data.detach().cpu().clone()
    save = partial(model.save_pretrained, str(target_dir), state_dict=state, save_embedding_layers=False)
    ranks.raise_on_all_ranks(capture_error(save) if ranks.is_main else None, f"saving {target_dir}")
