"""Model families: of each the facts that its checkpoint, its processor and its model do not tell themselves.

A family is found by the `model_type` of the checkpoint's config; nothing else in this project asks for it (FAM-1). Not
held, because it is there: the model class (transformers' own mapping), the prompt and what stands for an image in it
(the processor), the vision tensors (the image processor), position ids (the model), and the names of tensors (the
engine takes those of the model in memory). Pure; `tests/e2e/test_families.py` proves each record (FAM-3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PARTS = ("llm", "vit", "aligner", "embeddings")
EMBEDDINGS = frozenset({"embed_tokens", "lm_head"})


@dataclass(frozen=True)
class Family:
    """One family. Modules are named by a piece of the dotted names of their parameters."""

    name: str
    vit: str  # the vision tower
    aligner: frozenset[str]  # what maps the tower's output to the language model; may lie inside the tower
    liger: str  # liger's name of the family


FAMILIES = {
    "qwen3_vl": Family("Qwen3-VL", "visual", frozenset({"merger", "deepstack_merger_list"}), "qwen3_vl"),
}
_ALIGNERS = frozenset().union(*(family.aligner for family in FAMILIES.values()))
_TOWERS = frozenset(family.vit for family in FAMILIES.values())


def family_at(model_type: str | None) -> Family:
    """The family of a config's `model_type`. Raises ValueError, with what would work, where it is not supported."""
    if model_type not in FAMILIES:
        known = ", ".join(f"{family.name} ({key})" for key, family in FAMILIES.items())
        raise ValueError(f"a {model_type} model, which is not supported; use one of {known}")
    return FAMILIES[model_type]


def family_of(model: Any) -> Family:
    """The family of a transformers model."""
    return FAMILIES[model.config.model_type]


def part_of(name: str) -> str:
    """The one of `PARTS` that a parameter or module name belongs to, with or without prefixes of wrappers. No family
    has a module of another's vision tower or aligner elsewhere, so a name alone is enough."""
    pieces = frozenset(name.split("."))
    if pieces & _ALIGNERS:
        return "aligner"
    if pieces & _TOWERS:
        return "vit"
    return "embeddings" if pieces & EMBEDDINGS else "llm"
