"""Finished models on disk: a merged checkpoint in Hugging Face form and the adapter in PEFT form (LRN-6)."""

import json
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from utils.dist import Ranks, capture_error
from utils.sync.merged_weights import MergedWeights

_MAX_SHARD_BYTES = 4 << 30


def save_merged(model: nn.Module, source_dir: str, target_dir: Path, ranks: Ranks) -> None:
    """Write the merged model so that transformers and vLLM load it as it is (collective).

    Tensors are merged and written one shard at a time; config, tokenizer and processor files are copied from
    `source_dir`. The directory appears complete or not at all.

    Raises:
        DistributedError: on all ranks, where rank 0 could not write.
    """
    weights = MergedWeights(model)
    walk = weights.tensors(materialize=ranks.is_main)
    error = capture_error(_write_merged, weights, walk, Path(source_dir), target_dir) if ranks.is_main else None
    for _ in walk:  # a rank that does not write, or could not, is in the same gathers as the others
        pass
    ranks.raise_on_all_ranks(error, f"saving {target_dir}")


def _write_merged(weights: MergedWeights, walk: Iterator[tuple[str, Any]], source_dir: Path, target_dir: Path) -> None:
    aside = target_dir.with_name(target_dir.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    _copy_side_files(source_dir, aside)
    index = {name: shard.name for shard, names in _write_shards(walk, aside) for name in names}
    total = sum(entry.num_bytes for entry in weights.entries)
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (aside / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")
    shutil.rmtree(target_dir, ignore_errors=True)
    os.replace(aside, target_dir)


def save_adapter(model: nn.Module, target_dir: Path, ranks: Ranks) -> None:
    """Write the adapter in PEFT form (collective); does nothing for full fine-tuning.

    Raises:
        DistributedError: on all ranks, where rank 0 could not write.
    """
    if not hasattr(model, "peft_config"):
        return
    state = _gathered_trainable_state(model, keep=ranks.is_main)
    save = partial(model.save_pretrained, str(target_dir), state_dict=state, save_embedding_layers=False)
    ranks.raise_on_all_ranks(capture_error(save) if ranks.is_main else None, f"saving {target_dir}")


def _gathered_trainable_state(model: nn.Module, keep: bool) -> dict[str, torch.Tensor]:
    """Whole copies of all trainable parameters by their in-memory names, on the CPU."""
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                if keep:
                    state[name] = parameter.data.detach().cpu().clone()
        elif keep:
            state[name] = parameter.data.detach().cpu().clone()
    return state


def _write_shards(walk: Iterator[tuple[str, torch.Tensor]], folder: Path) -> Iterator[tuple[Path, list[str]]]:
    shard: dict[str, torch.Tensor] = {}
    size, number = 0, 0
    for name, tensor in walk:
        if shard and size + tensor.nbytes > _MAX_SHARD_BYTES:
            number += 1
            yield _save_shard(shard, folder, number)
            shard, size = {}, 0
        shard[name] = tensor.cpu()
        size += tensor.nbytes
    yield _save_shard(shard, folder, number + 1)


def _save_shard(shard: dict[str, torch.Tensor], folder: Path, number: int) -> tuple[Path, list[str]]:
    path = folder / f"model-{number:05d}.safetensors"
    save_file(shard, str(path), metadata={"format": "pt"})
    return path, list(shard)


def _copy_side_files(source: Path, target: Path) -> None:
    """Everything but weights: config, generation config, tokenizer, processor, chat template."""
    for path in source.iterdir():
        if path.is_file() and path.suffix not in (".safetensors", ".bin", ".pt", ".gguf") and "index" not in path.name:
            shutil.copy2(path, target / path.name)
