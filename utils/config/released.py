"""Released models by name: the part of their `config.json` that determines shapes, for plans without a checkpoint.

Compared with public copies of the files and with published numbers of parameters (tests/config/test_plan.py); of
InternVL3.5-8B, whose file was not to be found, with its makers' converter.
"""

import re
from typing import Any

_LARGE_TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
}
_SMALL_TOWER = _LARGE_TOWER | {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}


def _text(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int = 151936) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
    }


def _model(kind: str, text: dict[str, Any], tower: dict[str, Any], is_tied: bool = False) -> dict[str, Any]:
    text = text | {"tie_word_embeddings": is_tied}
    return {"model_type": kind, "text_config": text, "vision_config": tower, "tie_word_embeddings": is_tied}


def _qwen3_vl(text: dict[str, Any], tower: dict[str, Any], taps: list[int], **more: Any) -> dict[str, Any]:
    tower = tower | {"deepstack_visual_indexes": taps, "out_hidden_size": text["hidden_size"]}
    return _model("qwen3_vl", text | {"head_dim": 128}, tower, **more)


def _qwen2_5_vl(text: dict[str, Any], vision_mlp: int = 3420, **more: Any) -> dict[str, Any]:
    tower = {"depth": 32, "hidden_size": 1280, "intermediate_size": vision_mlp, "num_heads": 16}
    return _model("qwen2_5_vl", text, tower | {"out_hidden_size": text["hidden_size"]}, **more)


_EXPERTS = {"norm_topk_prob": True, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
_RECURRENT = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_SHARED = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}

MODELS = {
    "Qwen3-VL-2B": _qwen3_vl(_text(2048, 28, 16, 8, 6144), _SMALL_TOWER, [5, 11, 17], is_tied=True),
    "Qwen3-VL-4B": _qwen3_vl(_text(2560, 36, 32, 8, 9728), _SMALL_TOWER, [5, 11, 17], is_tied=True),
    "Qwen3-VL-8B": _qwen3_vl(_text(4096, 36, 32, 8, 12288), _LARGE_TOWER, [8, 16, 24]),
    "Qwen3-VL-32B": _qwen3_vl(_text(5120, 64, 64, 8, 25600), _LARGE_TOWER, [8, 16, 24]),
    "Qwen3-VL-30B-A3B": _qwen3_vl(_text(2048, 48, 32, 4, 6144) | _EXPERTS, _LARGE_TOWER, [8, 16, 24])
    | {"model_type": "qwen3_vl_moe"},
    "Qwen2.5-VL-3B": _qwen2_5_vl(_text(2048, 36, 16, 2, 11008), is_tied=True),
    "Qwen2.5-VL-7B": _qwen2_5_vl(_text(3584, 28, 28, 4, 18944, vocab=152064)),
    "Qwen2.5-VL-32B": _qwen2_5_vl(_text(5120, 64, 40, 8, 27648, vocab=152064), vision_mlp=3456),
    "Qwen3.5-9B": _model(
        "qwen3_5", _text(4096, 32, 16, 4, 12288, vocab=248320) | _RECURRENT, _LARGE_TOWER | {"out_hidden_size": 4096}
    ),
    "Qwen3.5-35B-A3B": _model(
        "qwen3_5_moe",
        _text(2048, 40, 16, 2, 0, vocab=248320) | _RECURRENT | _SHARED,
        _LARGE_TOWER | {"out_hidden_size": 2048},
    ),
    "InternVL3_5-8B": _model(
        "internvl",
        _text(4096, 36, 32, 8, 12288) | {"head_dim": 128, "model_type": "qwen3"},
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "attention_bias": True,
        },
    ),
}


def known_model(path: str) -> str | None:
    """Return the name of the released model that the last part of a path begins with: `Qwen3-VL-8B` for
    `models/qwen3vl_8b_coord`; else None."""
    last = path.rstrip("/").rsplit("/", 1)[-1].lower()
    found = [name for name in MODELS if re.match(_pattern(name), last)]
    return found[0] if found else None


def _pattern(name: str) -> str:
    """Its letters and numbers in order, with or without a separator between them."""
    return "[-_. ]?".join(re.findall(r"[a-z]+|[0-9]", name.lower())) + "(?![a-z0-9])"
