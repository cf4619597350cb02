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
from PIL import Image

from utils.answer_format import AnswerFormat
from utils.data.images import START_AGAIN, open_image, shortened
from utils.data.prompts import render_prompt, to_chat_messages
from utils.data.samples import DataError, Sample
from utils.geometry import Grid
from utils.packing import join_vision
from utils.targets import Segment, plain_segment

DUMMY_PX = 32  # processors enlarge an image that is smaller than they allow


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as model input: ids with image placeholders expanded, and what the image processor makes of its images.

    `vision` holds the tensors that the model takes besides the ids, by name, images along dimension 0; empty without
    images. Qwen's are `pixel_values` [num_patches, dim] and `image_grid_thw` [num_images, 3].
    """

    prompt_token_ids: list[int]
    vision: dict[str, torch.Tensor]


def model_digest(path: str | Path, as_loaded: bool = False) -> str | None:
    """Digest of what learner and rollout server must share: architecture and vocabulary, but not weights, which the
    first sync brings. None where the checkpoint cannot be read.

    Args:
        as_loaded: take the config as transformers loads it: each of its versions writes another form of the same. Not
            for a server: vLLM loads some configs by classes of its own.
    """
    try:
        text = (Path(path) / "config.json").read_text()
        config = json.loads(_as_loaded(text) if as_loaded else text, object_hook=_without_volatile_keys)
        return _digest([config, *_vocabulary(path)])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def tokenizer_digest(path: str | Path) -> str | None:
    """Digest of what models must share to read each other's tokens; None where the tokenizer cannot be read."""
    try:
        return _digest(_vocabulary(path))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _vocabulary(path: str | Path) -> list[Any]:
    tokenizer = json.loads((Path(path) / "tokenizer.json").read_text())
    return [tokenizer["model"]["vocab"], tokenizer["added_tokens"]]


def _digest(parts: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _as_loaded(config_text: str) -> str:
    """A config.json with the names and defaults of the installed transformers."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**json.loads(config_text)).to_json_string(use_diff=False)


def _without_volatile_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Drop the keys that may change when a model is saved again."""
    volatile = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
    return {key: value for key, value in config.items() if key not in volatile}


def load_processor(path: str | os.PathLike, min_pixels: int | None = None, max_pixels: int | None = None) -> Any:
    """Load the model's own processor, with its pixel limits per image replaced where they are given.

    Raises:
        ValueError: it has no such limits, or the one given contradicts the other, which is its own; or no chat
            template.
        OSError: it cannot be read.
    """
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(path)
    if processor.chat_template is None:  # some folders have it in tokenizer_config.json only
        processor.chat_template = getattr(processor, "tokenizer", processor).chat_template
    if processor.chat_template is None:
        rule = "holds no chat template (chat_template.jinja or .json)"
        raise ValueError(f"{rule}; download it again, or copy it from the model it was made of")
    image_processor = getattr(processor, "image_processor", None)
    if image_processor is not None and (min_pixels or max_pixels):
        size = dict(image_processor.size)
        if size.get("longest_edge") is None:
            rule = "this model's processor has no limits in pixels; leave image_min_pixels and image_max_pixels out"
            raise ValueError(rule)
        size["shortest_edge"] = min_pixels or size["shortest_edge"]  # Qwen's names for limits in pixels
        size["longest_edge"] = max_pixels or size["longest_edge"]
        if size["shortest_edge"] > size["longest_edge"]:  # small images would be enlarged beyond the limit
            rule = f"images would have at least {size['shortest_edge']} pixels and at most {size['longest_edge']}"
            raise ValueError(f"{rule}; set both image_min_pixels and image_max_pixels")
        image_processor.size = type(image_processor.size)(**size)
    return processor


def prompt_chat(sample: Sample) -> list[dict[str, Any]]:
    """Return the sample's prompt as a chat template takes it."""
    return to_chat_messages(sample.messages, len(sample.images))


def encode_prompt(sample: Sample, processor: Any, pixel_dtype: torch.dtype = torch.float32) -> EncodedPrompt:
    """Encode exactly the prompt that vLLM's model sees for the same messages and images (ROL-3).

    Only placeholders are replaced; text is never tokenized a second time.

    Raises:
        ValueError: the prompt's text itself contains an image placeholder.
        OSError: an image cannot be read.
        DataError: an image has another size than when its line was checked.
    """
    token_ids = render_prompt(processor, prompt_chat(sample))
    if not sample.images:
        return EncodedPrompt(token_ids, {})
    tokens, vision = encode_images(_open_images(sample), processor)
    token_ids = _expand(token_ids, tokens, processor, f"{sample.source}: ")
    return EncodedPrompt(
        token_ids, {name: own.to(pixel_dtype) if own.is_floating_point() else own for name, own in vision.items()}
    )


def _open_images(sample: Sample) -> list[Image.Image]:
    """Open them. One that was resized since the check would no longer fit its objects, nor the length of its prompt."""
    images = [open_image(image) for image in sample.images]
    for index, (image, (height, width)) in enumerate(zip(images, sample.image_sizes, strict=True)):
        if image.size != (width, height):
            sizes = f"{width} x {height} then, {image.width} x {image.height} now"
            change = f"{shortened(sample.images[index])} has changed since it was checked: {sizes}"
            raise DataError([f"{sample.source}: images[{index}]: {change}; {START_AGAIN}"])
    return images


def dummy_segment(processor: Any) -> Segment:
    """A small blank image alone, without supervision; a row without an image runs the vision tower on it (PCK-8)."""
    [tokens], vision = encode_images([Image.new("RGB", (DUMMY_PX, DUMMY_PX))], processor)
    return plain_segment("", tokens, [], vision)


def encode_images(images: list[Image.Image], processor: Any) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """Return the tokens that stand for each image in a prompt, and the vision tensors of all images together.

    The image processor alone would not do: some processors have settings of their own for it, such as InternVL's tiles.
    """
    text, names = processor.image_token, processor.image_processor.model_input_names
    own = [processor(text=[text], images=[each], return_tensors="pt", add_special_tokens=False) for each in images]
    tokens = [features["input_ids"][0].tolist() for features in own]
    return tokens, join_vision({name: features[name] for name in names} for features in own)


@dataclass(frozen=True)
class ResizedSizes:
    """The size in pixels to which Qwen's image processor resizes an image of a given height and width."""

    factor: int
    min_pixels: int
    max_pixels: int

    def __call__(self, height: int, width: int) -> Grid:
        """Width and height, as a grid. Raises ValueError where the sides are too different."""
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        new_height, new_width = smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)
        return new_width, new_height


def grid_of(processor: Any, form: AnswerFormat) -> ResizedSizes | None:
    """What `LineReader` needs to know of the processor where coordinates are pixels of the resized image; else None."""
    if not form.in_pixels:
        return None
    images = processor.image_processor
    factor = images.patch_size * images.merge_size
    return ResizedSizes(factor, images.size["shortest_edge"], images.size["longest_edge"])


def special_words(processor: Any, form: AnswerFormat) -> tuple[str, ...]:
    """Special tokens that a label could spell. A form with tags writes labels as they are: all but its own tags. JSON
    escapes `<|`: only those without it (`<img>`)."""
    special = [token.content for token in processor.tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(word for word in special if word not in form.tags and (form.tags or "<|" not in word))


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
    return len(_expand(token_ids, [[]] * num_images, processor)) if num_images else len(token_ids)


def _expand(token_ids: list[int], images: Sequence[list[int]], processor: Any, where: str = "") -> list[int]:
    """Replace the i-th image placeholder by the tokens `images[i]`."""
    image_id = processor.image_token_id
    if token_ids.count(image_id) != len(images):
        raise ValueError(
            f"{where}the prompt has {token_ids.count(image_id)} image placeholders for {len(images)} images;"
            f" its text must not spell {processor.image_token}"
        )
    remaining = iter(images)
    return [i for token in token_ids for i in (next(remaining) if token == image_id else [token])]
