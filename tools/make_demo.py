"""Make everything the demo starts from: synthetic scenes, and a small Qwen3-VL that already finds some objects.

    python -m tools.make_demo

Writes `runs/demo/data` (JSONL and PNG files in the format of real data), `runs/demo/start` (an untrained model), and
`runs/demo/model` (that model after the plain supervised training of `configs/demo/warmup.yaml`, in which nothing is
yellow). Each part is made once and kept until its settings change.

The model is small, but nothing about it is faked: the real `Qwen3VLForConditionalGeneration`, the real processor, and a
byte-level BPE tokenizer of Qwen's own class with 1000 coordinate tokens. Everything downstream (transformers, vLLM,
PEFT, DeepSpeed) treats it like the 8B model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from tools.cached import cached
from tools.warmup_sft import WarmupConfig, load_warmup_config, warm_up
from utils.config.schema import Data

WARMUP_CONFIG = Path("configs/demo/warmup.yaml")
ROOT = Path("runs/demo")
COLOURS = {"red": (214, 48, 49), "green": (39, 174, 96), "blue": (41, 98, 214), "yellow": (241, 196, 15)}
SHAPES = ("ring", "square", "triangle")
# Without a new colour the warm-up learns from cheap data: only this share of its scenes lists all objects, the others
# only the first one. So the start model can find several objects but mostly stops after one.
FULLY_ANNOTATED = 0.45
NEW_COLOUR = "yellow"  # of the classes that the demo teaches
NUM_TRAIN, NUM_VAL, NUM_WARMUP = 1600, 256, 8000
PROMPT = Data().prompt  # the config's default: demo data has no prompts of its own

NUM_COORD_TOKENS = 1000
PATCH_SIZE = 8
MERGE_SIZE = 2
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Qwen3-VL's own template without its tool calls: a message is a string or a list of {"type": "text" | "image"} parts.
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' or 'image' in part %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part.type == 'video' or 'video' in part %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- elif 'text' in part %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def build_tokenizer() -> Qwen2Tokenizer:
    """Return a byte-level BPE tokenizer of Qwen's class: about 350 text tokens, special tokens, `<|coord_k|>` tokens.

    It is trained on answers with one object, so it merges brackets as the big tokenizers do: `]}]}` is one token, and
    the last object ends inside it. `]},` stays two tokens on purpose: a prefix that is cut after `]}` and continues
    with `, {` then has the same tokens as any other answer. A model this small would confuse two spellings.
    """
    words = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
    answers = [f'{{"objects": [{{"desc": "{word}", "bbox_2d": [1, 2]}}]}}' for word in words] * 2
    chat = [f"user\n{PROMPT}\nassistant\n", "system\n", '{"objects": []}', '", "poly": [1, 2', '] {"desc']
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(pattern=Regex(PRETOKENIZE_REGEX), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(answers + chat, trainer)
    state = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=state["vocab"],
        merges=[tuple(pair) for pair in state["merges"]],
        eos_token="<|im_end|>",  # noqa: S106  (no secret)
        pad_token="<|endoftext|>",  # noqa: S106  (no secret)
        model_max_length=8192,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    # Not "special", so that decoding with skip_special_tokens keeps the coordinates.
    tokenizer.add_tokens([AddedToken(f"<|coord_{k}|>", normalized=False) for k in range(NUM_COORD_TOKENS)])
    return tokenizer


def build_processor(image_size: int) -> Qwen3VLProcessor:
    """Return the real processor with a fixed pixel budget, so that every image gets about `image_size`**2 pixels."""
    budget = {"shortest_edge": image_size**2, "longest_edge": image_size**2}
    vision = {
        "size": budget,
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": 2,
        "merge_size": MERGE_SIZE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**vision),
        tokenizer=build_tokenizer(),
        video_processor=Qwen3VLVideoProcessor(**vision),
        chat_template=CHAT_TEMPLATE,
    )


def model_config(processor: Qwen3VLProcessor, image_size: int) -> Qwen3VLConfig:
    """Return the config of the demo's Qwen3-VL: 1.6M parameters, two vision and four text layers."""
    tokenizer = processor.tokenizer
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    hidden = 128
    return Qwen3VLConfig(
        vision_config={
            "depth": 2,
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_heads": 4,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": 2,
            "out_hidden_size": hidden,
            "num_position_embeddings": (image_size // PATCH_SIZE) ** 2,
            "deepstack_visual_indexes": [0],
        },
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 8192,
            # The three sections (time, height, width) add up to half of head_dim.
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=True,
    )


def build_start_model(out_dir: str | os.PathLike, image_size: int = 128, seed: int = 0) -> Path:
    """Write an untrained Qwen3-VL with its processor to `out_dir` (float32) and return that path.

    `image_size` is in pixels per side, a multiple of 16. The same seed gives the same weights. The checkpoint loads in
    `AutoProcessor`, `AutoModelForImageTextToText` and vLLM.
    """
    if image_size % (PATCH_SIZE * MERGE_SIZE):
        raise ValueError(f"image_size={image_size}: must be a multiple of {PATCH_SIZE * MERGE_SIZE}")
    out_dir = Path(out_dir)
    processor = build_processor(image_size)
    tokenizer = processor.tokenizer
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(model_config(processor, image_size)).float()
        with torch.no_grad():
            first = tokenizer.convert_tokens_to_ids("<|coord_0|>")
            embeddings = model.get_input_embeddings().weight
            embeddings[first : first + NUM_COORD_TOKENS] = fourier_features(NUM_COORD_TOKENS, embeddings.shape[1])
            positions = model.model.visual.pos_embed.weight
            positions.copy_(sinusoid_2d(image_size // PATCH_SIZE, positions.shape[1]))
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(out_dir)
    processor.save_pretrained(out_dir)
    return out_dir


def fourier_features(num_bins: int, dim: int, std: float = 0.06) -> torch.Tensor:
    """Smooth random embeddings [num_bins, dim]: neighbouring bins start close, as the Gaussian target assumes.

    Source: Rahimi and Recht 2007, random Fourier features, with frequencies log-uniform in 0.5 to 40 cycles.
    """
    frequency = 0.5 * (40 / 0.5) ** torch.rand(dim)
    phase = 2 * math.pi * torch.rand(dim)
    bins = torch.arange(num_bins)[:, None] / (num_bins - 1)
    return std * math.sqrt(2) * torch.cos(2 * math.pi * frequency * bins + phase)


def sinusoid_2d(side: int, dim: int, std: float = 0.3) -> torch.Tensor:
    """Position embeddings [side * side, dim], row-major: half of `dim` encodes the row, the other half the column."""
    quarter = dim // 4
    frequency = (math.pi / side) * (side / 2) ** (torch.arange(quarter) / max(1, quarter - 1))
    angle = torch.arange(side)[:, None] * frequency
    wave = torch.cat([angle.sin(), angle.cos()], dim=1)
    rows, columns = wave.repeat_interleave(side, dim=0), wave.repeat(side, 1)
    return std * math.sqrt(2) * torch.cat([rows, columns], dim=1)


# ---- scenes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenes:
    """Distribution of scenes; the default is the demo's.

    Attributes:
        max_objects: a scene has 1 to this many (fewer if no room is found).
        sizes: smallest and largest width of an object, as shares of the side.
        max_labels: a scene has 1 to this many labels, which its objects repeat; None: each object draws its own.
        colours: what labels are drawn from.
    """

    max_objects: int = 4
    sizes: tuple[float, float] = (0.20, 0.42)
    max_labels: int | None = None
    colours: tuple[str, ...] = tuple(COLOURS)


def make_dataset(
    out_dir: str | os.PathLike,
    num_train: int = 4000,
    num_val: int = 256,
    num_warmup: int = 0,
    seed: int = 0,
    image_size: int = 128,
    scenes: Scenes = Scenes(),
    new_colour: str | None = None,
) -> tuple[Path, Path, Path]:
    """Write `train.jsonl`, `val.jsonl`, `warmup.jsonl` and their PNG files; return the three JSONL paths.

    The same seed gives the same files, byte for byte. No scene is in two files: each has its own number in one random
    sequence. `val.jsonl` is fully annotated.

    Args:
        new_colour: the warm-up has no object of this colour, and each of its scenes is fully annotated. Each training
            scene has one at least, and only those are annotated. None: `train.jsonl` is fully annotated, `warmup.jsonl`
            only partly (see `FULLY_ANNOTATED`).
    """
    old = replace(scenes, colours=tuple(colour for colour in scenes.colours if colour != new_colour))
    draws = {"val": scenes, "train": scenes, "warmup": old}
    numbers = itertools.count()
    paths = []
    for name, count in (("val", num_val), ("train", num_train), ("warmup", num_warmup)):
        folder = Path(out_dir) / name
        folder.mkdir(parents=True, exist_ok=True)
        rows: list[dict] = []
        while len(rows) < count:
            number = next(numbers)
            rng = random.Random(f"{seed}-{number}")
            image, objects = draw_scene(rng, image_size, draws[name])
            if name == "train" and new_colour:
                objects = [item for item in objects if item["desc"].startswith(new_colour)]
                if not objects:
                    continue
            if name == "warmup" and not new_colour and rng.random() >= FULLY_ANNOTATED:
                objects = objects[:1]
            file = folder / f"{number:06d}.png"
            image.save(file, compress_level=1)
            rows.append(
                {
                    "id": f"{name}-{number:06d}",
                    "images": [f"{name}/{file.name}"],
                    "width": image_size,
                    "height": image_size,
                    "objects": objects,
                }
            )
        path = folder.with_suffix(".jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(path)
    val, train, warmup = paths
    return train, val, warmup


def draw_scene(rng: random.Random, side: int, scenes: Scenes) -> tuple[Image.Image, list[dict]]:
    """Draw a scene: coloured shapes that do not overlap, on a slightly noisy grey background.

    Returns:
        The image, and its objects from top to bottom, then left to right; boxes are xyxy in pixels.
    """
    grey = rng.randint(100, 160)
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, 4, (side, side, 1)).repeat(3, axis=2)
    image = Image.fromarray(np.clip(grey + noise, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    objects = []
    boxes = _place_boxes(rng, side, rng.randint(1, scenes.max_objects), scenes.sizes)
    colours, most = list(scenes.colours), scenes.max_labels
    labels = [_draw_label(rng, colours) for _ in range(rng.randint(1, most))] if most else []
    for box in boxes:
        colour, shape = rng.choice(labels) if labels else _draw_label(rng, colours)
        fill = tuple(max(0, min(255, value + rng.randint(-25, 25))) for value in COLOURS[colour])
        _draw_shape(draw, shape, box, fill)
        objects.append({"desc": f"{colour} {shape}", "bbox_2d": list(box)})
    return image, sorted(objects, key=lambda item: (item["bbox_2d"][1], item["bbox_2d"][0]))


def _draw_label(rng: random.Random, colours: list[str]) -> tuple[str, str]:
    return rng.choice(colours), rng.choice(SHAPES)


def _place_boxes(
    rng: random.Random, side: int, count: int, sizes: tuple[float, float]
) -> list[tuple[int, int, int, int]]:
    """Place up to `count` boxes, 2 pixels apart: widths between `sizes` times the side, heights within 20 % of them."""
    boxes: list[tuple[int, int, int, int]] = []
    for _ in range(count):
        for _ in range(50):
            size = rng.uniform(*sizes) * side
            width, height = round(size), round(size * rng.uniform(0.8, 1.2))
            height = min(height, side - 1)
            x, y = rng.randint(0, side - width), rng.randint(0, side - height)
            box = (x, y, x + width, y + height)
            if all(
                box[0] > other[2] + 2 or other[0] > box[2] + 2 or box[1] > other[3] + 2 or other[1] > box[3] + 2
                for other in boxes
            ):
                boxes.append(box)
                break
    return boxes


def _draw_shape(draw: ImageDraw.ImageDraw, shape: str, box: tuple[int, int, int, int], fill: tuple) -> None:
    x1, y1, x2, y2 = box[0], box[1], box[2] - 1, box[3] - 1  # PIL includes the last pixel
    if shape == "ring":
        draw.ellipse((x1, y1, x2, y2), outline=fill, width=max(1, (x2 - x1) // 4))
    elif shape == "square":
        draw.rectangle((x1, y1, x2, y2), fill=fill)
    else:
        draw.polygon([((x1 + x2) / 2, y1), (x2, y2), (x1, y2)], fill=fill)


# ---- everything, made once -----------------------------------------------------------------------------------------


def make_demo(
    root: Path,
    warmup: WarmupConfig,
    num_train: int = NUM_TRAIN,
    num_val: int = NUM_VAL,
    num_warmup: int = NUM_WARMUP,
    new_colour: str | None = NEW_COLOUR,
) -> None:
    """Make `data`, `start` and `model` below `root`, each only if its settings have changed since the last time.

    `warmup` gives the training settings; its paths are replaced. `new_colour` is that of `make_dataset`.
    """
    warmup = warmup.model_copy(
        update={
            "model": str(root / "start"),
            "train_jsonl": [warmup.train_jsonl[0].model_copy(update={"path": str(root / "data" / "warmup.jsonl")})],
            "output_dir": str(root / "model"),
        }
    )
    this_file = Path(__file__).read_text()
    scenes = [num_train, num_val, num_warmup, new_colour]

    def make_scenes(folder: Path) -> None:
        make_dataset(folder, num_train, num_val, num_warmup, new_colour=new_colour)

    cached(root / "data", [this_file, scenes], "synthetic scenes", make_scenes)
    cached(root / "start", [this_file], "an untrained Qwen3-VL", build_start_model)

    settings = [this_file, scenes, warmup.model_dump()]
    cached(root / "model", settings, f"supervised warm-up, {warmup.steps} steps", lambda _: warm_up(warmup))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    make_demo(ROOT, load_warmup_config(WARMUP_CONFIG))
