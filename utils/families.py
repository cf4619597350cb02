"""Model families: what a family's checkpoint, processor and model class do not state.

A family is found by the `model_type` of the checkpoint's config; nothing else in this project asks for it (FAM-1). Not
recorded, because it can be read elsewhere: the model class (transformers' own mapping), the prompt and what stands for
an image in it (the processor), the vision tensors (the image processor), position ids (the model), and the names of
tensors (the engine takes those of the model in memory). `tests/e2e/test_families.py` proves each record (FAM-3).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.answer_format import COORD_TOKENS

PARTS = ("llm", "vit", "aligner", "embeddings")
EMBEDDINGS = frozenset({"embed_tokens", "lm_head"})


@dataclass(frozen=True)
class Family:
    """One family. Modules are named by a piece of the dotted names of their parameters."""

    name: str
    vit: str  # the vision tower
    aligner: frozenset[str]  # what maps the tower's output to the language model; may lie inside the tower
    mixer: str | None = None  # a layer's recurrent mixer, which no position ids keep inside a segment
    transposed: str = ""  # regular expression: tensors that files and engine hold with the last two dimensions swapped
    answer_format: str | None = None  # name of its native form in `utils.answer_format`; None where that is not built
    liger: str | None = None  # liger's name of the family; None where its kernels are not proven here

    def form_problem(self, answer_format: str) -> str | None:
        """Why the family's models do not write answers of this form; None if they do, or can be taught to."""
        if answer_format in (COORD_TOKENS.name, self.answer_format):
            return None
        forms = f"{self.answer_format}, or {COORD_TOKENS.name} where its tokenizer has these tokens"
        return f"{self.name} was not trained to write this form; use {forms}"


_MERGERS = frozenset({"merger", "deepstack_merger_list"})
FAMILIES = {
    "qwen3_vl": Family("Qwen3-VL", "visual", _MERGERS, answer_format="qwen3vl", liger="qwen3_vl"),
    "qwen3_vl_moe": Family("Qwen3-VL-MoE", "visual", _MERGERS, transposed=r"\.experts\.", answer_format="qwen3vl"),
    "qwen2_5_vl": Family("Qwen2.5-VL", "visual", _MERGERS, answer_format="qwen2_5vl"),
    "qwen3_5": Family("Qwen3.5", "visual", _MERGERS, mixer="linear_attn", answer_format="qwen3vl"),
    "qwen3_5_moe": Family("Qwen3.5-MoE", "visual", _MERGERS, mixer="linear_attn", answer_format="qwen3vl"),
    "internvl": Family("InternVL", "vision_tower", frozenset({"multi_modal_projector"}), answer_format="internvl"),
}
REFUSED = {
    "gemma4": "packed rows have no sliding-window attention here, and its box format is not confirmed",
    "internvl_chat": "this form runs code of its own; use the same model's -HF checkpoint",
}


def family_from(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ValueError, with what would work, where it is not supported."""
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        known = ", ".join(f"{family.name} ({key})" for key, family in FAMILIES.items())
        why = f" ({REFUSED[model_type]})" if model_type in REFUSED else ""
        raise ValueError(f"a {model_type} model, which is not supported{why}; use one of {known}")
    return FAMILIES[model_type]


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The config.json in a directory. Raises OSError, or ValueError where it is no model's."""
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not isinstance(config, dict) or not isinstance(config.get("text_config", {}), dict):
        raise ValueError("config.json, and text_config in it, must be JSON objects; use the checkpoint's own file")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config. transformers saves the number of Qwen3-VL's experts by another name than
    the release has."""
    text = config.get("text_config", config)
    return {"num_experts": text["num_local_experts"]} | text if "num_local_experts" in text else text


def split_problem(text: dict[str, Any], devices: int) -> str | None:
    """Why a language model's attention heads cannot be divided among so many devices, by vLLM's rules; None if they can
    be, or are not known."""
    heads = text.get("num_attention_heads", 0)
    pairs = text.get("num_key_value_heads") or heads
    if heads % devices:
        return f"cannot divide the model's {heads} attention heads; take a divisor of {heads}"
    if pairs % devices and devices % pairs:
        return f"neither divides the model's {pairs} key-value heads nor is a multiple of them; take a size that does"
    return None


def expert_problem(text: dict[str, Any], devices: int, engine_kwargs: dict[str, Any]) -> str | None:
    """Why experts cannot lie on so many devices of an engine and its replicas, by vLLM's rules: it cuts each of them
    over all, unless whole ones are spread."""
    values = text.get("moe_intermediate_size") or 0
    if not text.get("num_experts_per_tok") or engine_kwargs.get("enable_expert_parallel") or values % devices == 0:
        return None
    rule = f"cuts each expert's {values} values over all {devices} devices, which does not go"
    return f"{rule}; spread whole experts: vllm_engine_kwargs: {{enable_expert_parallel: true}}"


def longest_sequence(config: dict[str, Any]) -> int | None:
    """Most tokens that the model of a config can hold; None where it names none, or scales them at will."""
    text = text_config(config)
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    return None if scaling.get("factor") else text.get("max_position_embeddings")


def family_in(path: str | os.PathLike[str]) -> Family:
    """The family of a checkpoint, by its config.json alone: none of its code runs.

    Raises:
        OSError: it has no readable config.json.
        ValueError: that is no model's, or the family is not supported.
    """
    config = read_config(path)
    if "model_type" not in config:
        raise OSError(f"{path} has no config.json with a model_type")
    return family_from(config)


def family_of(model: Any) -> Family:
    """The family of a transformers model."""
    return family_from({"model_type": model.config.model_type})


def transposed_in(module: Any) -> str:
    """`Family.transposed` of a transformers model; of any other module none."""
    family = FAMILIES.get(getattr(getattr(module, "config", None), "model_type", ""))
    return family.transposed if family else ""


def part_of(name: str) -> str:
    """The one of `PARTS` that a parameter or module name belongs to, with or without prefixes of wrappers. No family
    has a module of another's vision tower or aligner elsewhere, so a name alone is enough."""
    pieces = frozenset(name.split("."))
    if any(pieces & family.aligner for family in FAMILIES.values()):
        return "aligner"
    if any(family.vit in pieces for family in FAMILIES.values()):
        return "vit"
    return "embeddings" if pieces & EMBEDDINGS else "llm"
