"""Encode the prompts of samples into token ids and pixels, with the checkpoint's own processor."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from utils.data.images import open_image
from utils.data.prompts import render_prompt, to_chat_messages
from utils.data.samples import Sample


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as model input: ids with image placeholders expanded, patches [num_patches, dim], grid [n, 3]."""

    prompt_token_ids: list[int]
    pixel_values: torch.Tensor | None
    image_grid_thw: torch.Tensor | None


def model_digest(path: str | Path) -> str | None:
    """Digest of what learner and rollout server must share: architecture and vocabulary, but not weights, which the
    first sync brings. None where the checkpoint cannot be read."""
    try:
        config = json.loads((Path(path) / "config.json").read_text(), object_hook=_without_volatile_keys)
        tokenizer = json.loads((Path(path) / "tokenizer.json").read_text())
        parts = [config, tokenizer["model"]["vocab"], tokenizer["added_tokens"]]
    except (OSError, ValueError, KeyError):
        return None
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _without_volatile_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Drop the keys that may change when a model is saved again."""
    volatile = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
    return {key: value for key, value in config.items() if key not in volatile}


def load_processor(path: str | os.PathLike, min_pixels: int | None = None, max_pixels: int | None = None) -> Any:
    """Load the model's own processor, with its pixel limits per image replaced where they are given."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(path)
    image_processor = getattr(processor, "image_processor", None)
    if image_processor is not None and (min_pixels or max_pixels):
        size = dict(image_processor.size)
        size["shortest_edge"] = min_pixels or size["shortest_edge"]  # Qwen's names for limits in pixels
        size["longest_edge"] = max_pixels or size["longest_edge"]
        image_processor.size = type(image_processor.size)(**size)
    return processor


def prompt_chat(sample: Sample) -> list[dict[str, Any]]:
    """Return the sample's prompt as a chat template takes it."""
    return to_chat_messages(sample.messages, len(sample.images))


def encode_prompt(sample: Sample, processor: Any, pixel_dtype: torch.dtype = torch.float32) -> EncodedPrompt:
    """Encode exactly the prompt that vLLM's Qwen3-VL sees for the same messages and images (ROL-3).

    Only placeholders are replaced; text is never tokenized a second time.

    Raises:
        ValueError: the prompt's text itself contains an image placeholder.
        OSError: an image cannot be read.
    """
    token_ids = render_prompt(processor, prompt_chat(sample))
    if not sample.images:
        return EncodedPrompt(token_ids, None, None)
    features = processor.image_processor(images=[open_image(image) for image in sample.images], return_tensors="pt")
    grid = features["image_grid_thw"]
    counts = (grid.prod(dim=1) // processor.image_processor.merge_size**2).tolist()
    token_ids = _expand(token_ids, counts, processor, f"{sample.source}: ")
    return EncodedPrompt(token_ids, features["pixel_values"].to(pixel_dtype), grid)


def num_prompt_tokens(sample: Sample, processor: Any) -> int:
    """Return the length of the encoded prompt in tokens, without opening an image: microseconds for a known text."""
    texts = tuple((message["role"], message["content"]) for message in sample.messages)
    num_tokens = _num_text_tokens(processor, texts, len(sample.images))
    if sample.images:
        num_tokens += sum(processor._get_num_multimodal_tokens(image_sizes=sample.image_sizes)["num_image_tokens"])
    return int(num_tokens)


@lru_cache(maxsize=4096)
def _num_text_tokens(processor: Any, texts: tuple[tuple[str, str], ...], num_images: int) -> int:
    """Length of a prompt without its images' tokens."""
    messages = [{"role": role, "content": content} for role, content in texts]
    token_ids = render_prompt(processor, to_chat_messages(messages, num_images))
    return len(_expand(token_ids, [0] * num_images, processor)) if num_images else len(token_ids)


def _expand(token_ids: list[int], counts: Sequence[int], processor: Any, where: str = "") -> list[int]:
    """Replace the i-th image placeholder by `counts[i]` of them."""
    image_id = processor.image_token_id
    if token_ids.count(image_id) != len(counts):
        raise ValueError(
            f"{where}the prompt has {token_ids.count(image_id)} image placeholders for {len(counts)} images;"
            f" its text must not spell {processor.image_token}"
        )
    remaining = iter(counts)
    return [i for token in token_ids for i in ([token] * next(remaining) if token == image_id else [token])]
