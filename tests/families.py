"""Tiny random checkpoints of every supported family, with the family's real processor (FAM-3).

All parameters are random, those of norms and biases too, so that a tensor that is lost or mixed up shows.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    GotOcr2ImageProcessor,
    InternVLProcessor,
    InternVLVideoProcessor,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from tools.make_demo import CHAT_TEMPLATE, MERGE_SIZE, PATCH_SIZE, build_processor, build_tokenizer, model_config

IMAGE_PX = 64  # per side, on average


def build_family(model_type: str, path: Path, seed: int = 0) -> Path:
    """Write a checkpoint of the family as its makers release it, in float32; return `path`."""
    processor, config = BUILDERS[model_type]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(**config | {"model_type": model_type})
        model = AutoModelForImageTextToText.from_config(config).float()
        for name, parameter in model.named_parameters():
            parameter.data = random_values(name, parameter)
    tokenizer = processor.tokenizer
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(path)
    if model_type == "qwen3_vl_moe":  # transformers 5.19 reads the released layout of experts and writes its own
        tensors = load_file(path / "model.safetensors")
        turned = {name: own.mT.contiguous() if ".experts." in name else own for name, own in tensors.items()}
        save_file(turned, path / "model.safetensors", metadata={"format": "pt"})
    processor.save_pretrained(path)
    if model_type == "qwen2_5_vl":  # released before transformers nested the language model's settings
        config = json.loads((path / "config.json").read_text())
        flat = config.pop("text_config") | config
        (path / "config.json").write_text(json.dumps(flat, indent=2))
    return path


def random_values(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Values of a size at which every layer contributes."""
    noise = torch.randn_like(parameter)
    if parameter.ndim == 1:
        return parameter + noise * 0.1
    fan_in = parameter.shape[-1] if parameter.ndim == 3 else parameter[0].numel()
    # Larger embeddings, which are the head as well, make log-probabilities of -12 that bfloat16 cannot compare.
    return noise * (0.15 if "embed_tokens" in name else 1 / math.sqrt(fan_in))


def qwen3_vl() -> tuple[Any, dict[str, Any]]:
    processor = build_processor(IMAGE_PX)
    return processor, model_config(processor, IMAGE_PX).to_dict()


def qwen2_5_vl() -> tuple[Any, dict[str, Any]]:
    budget = {"shortest_edge": IMAGE_PX**2, "longest_edge": IMAGE_PX**2}
    vision = {"size": budget, "patch_size": PATCH_SIZE, "temporal_patch_size": 2, "merge_size": MERGE_SIZE}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**vision),
        tokenizer=build_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(**vision),
        chat_template=CHAT_TEMPLATE,
    )
    config = qwen3_vl()[1]
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
    config["text_config"] |= {"model_type": "qwen2_5_vl_text", "rope_parameters": sections}
    config["vision_config"] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": 2,
        "window_size": 4 * PATCH_SIZE,
        "fullatt_block_indexes": [1],
        "out_hidden_size": config["text_config"]["hidden_size"],
    }
    return processor, config


def qwen3_vl_moe() -> tuple[Any, dict[str, Any]]:
    processor, config = qwen3_vl()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
    config["text_config"] |= {"model_type": "qwen3_vl_moe_text", **experts}
    config["vision_config"] |= {"model_type": "qwen3_vl_moe"}
    return processor, config


def qwen3_5() -> tuple[Any, dict[str, Any]]:
    """The recurrent heads are as wide as released: vLLM's CPU kernels know no other width. The prompt ends as released,
    with open thinking unless the template is told otherwise."""
    processor, config = qwen3_vl()
    start = "<|im_start|>assistant\\n"
    closed = "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    opened = "{%- else %}{{- '<think>\\n' }}{%- endif %}"
    processor.chat_template = CHAT_TEMPLATE.replace(f"{{{{- '{start}' }}}}", f"{{{{- '{start}' }}}}{closed}{opened}")
    config["text_config"] |= {
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "rope_parameters": config["text_config"]["rope_parameters"] | {"partial_rotary_factor": 1.0},
    }
    config["vision_config"] |= {"model_type": "qwen3_5", "deepstack_visual_indexes": []}
    return processor, config


def qwen3_5_moe() -> tuple[Any, dict[str, Any]]:
    processor, config = qwen3_5()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    config["text_config"] |= {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 64, **experts}
    config["vision_config"] |= {"model_type": "qwen3_5_moe"}
    return processor, config


def internvl() -> tuple[Any, dict[str, Any]]:
    """Tiles of 32 px with four tokens each. The image processor would make one of each image, as in the released file;
    the processor asks for more."""
    names = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>", "video": "<video>"}
    tokenizer = build_tokenizer()
    special = [*names.values(), "<ref>", "</ref>", "<box>", "</box>"]
    tokenizer.add_special_tokens({"extra_special_tokens": special}, replace_extra_special_tokens=False)
    tokenizer._set_model_specific_special_tokens({f"{name}_token": token for name, token in names.items()})
    tile = {"height": 32, "width": 32}
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=tile, min_patches=1, max_patches=6),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=tile),
        image_seq_length=4,
        chat_template=CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\n"),
    )
    text = qwen3_vl()[1]["text_config"]
    text |= {"model_type": "qwen3", "vocab_size": len(tokenizer)}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"image_size": [32, 32], "patch_size": [PATCH_SIZE, PATCH_SIZE], "attention_bias": True}
    ids = {"image_token_id": processor.image_token_id, "image_seq_length": 4}
    return processor, {"text_config": text, "vision_config": vision, "tie_word_embeddings": True, **ids}


BUILDERS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "qwen3_vl": qwen3_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "internvl": internvl,
}
