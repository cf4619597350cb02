"""The released Qwen3-VL models by their numbers, for estimates where no checkpoint is at hand (CFG-16).

Source: `config.json` of Qwen/Qwen3-VL-{2B,4B,8B,32B}-Instruct; they come to 2.13, 4.44, 8.77 and 33.36 billion
parameters, as their cards say. Nothing here is used in training.
"""

import re
from typing import Any

# hidden size, layers, attention heads, MLP size, tied embeddings, which vision tower
_MODELS = {
    "2B": (2048, 28, 16, 6144, True, "small"),
    "4B": (2560, 36, 32, 9728, True, "small"),
    "8B": (4096, 36, 32, 12288, False, "large"),
    "32B": (5120, 64, 64, 25600, False, "large"),
}
_VISION = {
    "small": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]},
    "large": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]},
}


def known_model(path: str) -> str | None:
    """`8B` for a path whose last part names that model, such as `models/qwen3vl_8b_coord`; None for any other."""
    found = re.search(r"qwen3[-_]?vl[-_](\d+b)(?![a-z0-9])", path.rstrip("/").rsplit("/", 1)[-1].lower())
    size = found and found[1].upper()
    return size if size in _MODELS else None


def known_config(size: str) -> dict[str, Any]:
    """The part of `config.json` that decides about shapes."""
    hidden, layers, heads, mlp, tied, vision = _MODELS[size]
    text = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": mlp,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
    }
    tower = {"num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": hidden, **_VISION[vision]}
    return {"model_type": "qwen3_vl", "text_config": text, "vision_config": tower, "tie_word_embeddings": tied}


def parameter_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Name -> shape of every parameter of a Qwen3-VL, from transformers' own classes, without any memory for them."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig.from_dict(config))
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}
