"""Checks of a model as it is loaded, before the first step: a few short rows, whatever its size (FAM-3).

The conformance suite proves families on tiny checkpoints; these prove the checkpoint, the attention implementation and
the dtype of this run.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from utils.data.encoding import dummy_segment, encode_images, encode_prompt, num_prompt_tokens, prompt_chat
from utils.data.samples import Sample
from utils.families import PARTS, part_of
from utils.learner.learner import Learner
from utils.learner.model import base_model, has_multimodal_positions, position_ids_for
from utils.packing import NO_IDS, Batch, collate_packed
from utils.targets import Segment, plain_segment

SIZES_PX = ((77, 50), (64, 64), (30, 180))  # odd, square, tall
TEXT = "A packed row must not show one text to another, and every image has its own place: 1, 2, 3."
# Mean gap of a segment's hidden states as a share of their norm. In half precision the row's first segment, which has
# nothing before it, tells what rounding does; it is itself only wrong if its positions are. Wrong positions gave 0.4 to
# 0.5 on tiny checkpoints, segments that see each other 0.06 to 0.8, correct rows below 1e-6.
EXACT, FIRST, LEAST = 1e-3, 0.25, 0.04


def check_model(learner: Learner, processor: Any, is_packed: bool) -> None:
    """Check that every part of the model is known, and that a row gives each segment the hidden states that the model
    gives it alone, with positions of the model's own making (collective; every rank finds the same).

    Raises:
        ValueError: what is wrong, with the numbers.
    """
    if lacking := set(PARTS) - {part_of(name) for name, _ in learner.model.named_parameters()}:
        raise ValueError(f"no parameter of the model belongs to its {' or '.join(sorted(lacking))}")
    if is_packed:
        segments = make_segments(processor)
        layout = {"position_ids_fn": position_ids_for(learner.model), "coord_ids": NO_IDS}
        layout["dummy"] = dummy_segment(processor)
        row = collate_packed(segments, **layout)
        *alone, together = learner.hidden_states([*(own_batch(learner, s, layout) for s in segments), row])
        first, *others = mean_gaps([own[: len(s)] for own, s in zip(alone, segments, strict=True)], together)
        is_exact = together.dtype == torch.float32
        _check_gap(first, EXACT if is_exact else FIRST)
        _check_gap(max(others), EXACT if is_exact else max(LEAST, 3 * first))


def _check_gap(gap: float, bound: float) -> None:
    if not gap <= bound:
        raise ValueError(
            "packing changes the model's output: hidden states of a packed row differ from those of its segments by "
            f"{gap:.3g} of their norm, allowed {bound:.3g}; set training.packing: false, or another "
            "model.attn_implementation"
        )


def make_segments(processor: Any) -> list[Segment]:
    """Short sequences without supervision: an image of an odd size, text, two images."""
    text = list(processor.tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    images = [Image.effect_noise(size, 80).convert("RGB") for size in SIZES_PX]
    found = []
    for index, own in enumerate((images[:1], [], images[1:])):
        tokens, vision = encode_images(own, processor) if own else ([], {})
        ids = [*text[index:], *(token for image in tokens for token in [*image, *text[:2]]), *text]
        found.append(plain_segment(f"start check {index}", ids, [], vision))
    return found


def make_prompts(processor: Any, max_tokens: float) -> list[tuple[dict[str, Any], list[int]]]:
    """Requests with an image of an odd size and with two images, and the learner's prompt token ids of each; those that
    are longer than an engine may take are left out."""
    found = []
    for sizes in (SIZES_PX[:1], SIZES_PX[1:]):
        messages = [{"role": "user", "content": f"{TEXT}<image>" * len(sizes)}]
        heights_and_widths = [(height, width) for width, height in sizes]
        sample = Sample("", list(map(data_uri, sizes)), heights_and_widths, 0, 0, [], messages, "start check", {}, None)
        if num_prompt_tokens(sample, processor) < max_tokens:
            request = {"messages": prompt_chat(sample), "images": sample.images}
            found.append((request, encode_prompt(sample, processor).prompt_token_ids))
    return found


def data_uri(size: tuple[int, int]) -> str:
    """A noise image of that width and height."""
    file = io.BytesIO()
    Image.effect_noise(size, 80).convert("RGB").save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def own_batch(learner: Learner, segment: Segment, layout: dict[str, Any]) -> Batch:
    """The segment alone, so that the model makes its positions itself."""
    batch = collate_packed([segment], **layout)
    vision = dict(batch.vision)
    if has_multimodal_positions(learner.model):
        vision["mm_token_type_ids"] = (batch.input_ids == base_model(learner.model).config.image_token_id).int()
    return replace(batch, position_ids=None, vision=vision)


def mean_gaps(alone: Sequence[Tensor], together: Tensor) -> list[float]:
    """Mean gap of each segment's tokens, as a share of their norm.

    Args:
        alone: [L, D] of each segment.
        together: [T, D] of the row that they make.
    """
    pairs = zip(alone, together.split([len(own) for own in alone]), strict=True)
    return [float(((own - ours).double().norm(dim=1) / own.double().norm(dim=1)).mean()) for own, ours in pairs]
