"""The trained model: loading, what of it is trained, and one forward pass from a `Batch` to hidden states.

A Qwen3-VL has four parts with their own learning rates: `llm` (language model), `embeddings` (token embeddings and
head, frozen together with the llm), `vit` (vision tower) and `aligner` (its mergers, deepstack ones too).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from utils.packing import Batch
from utils.targets import Segment

PARTS = ("llm", "vit", "aligner", "embeddings")


@dataclass(frozen=True)
class TunerOptions:
    """What is trained; the `tuner` section of the config."""

    type: str = "full"  # full | lora
    use_dora: bool = False
    rank: int = 16
    alpha: float = 32
    dropout: float = 0.0
    target_modules: str | Sequence[str] = "all-linear"  # or a regex over whole module names, or a list of name endings
    modules_to_save: Sequence[str] = field(default_factory=list)  # trained whole beside the adapter
    freeze_llm: bool = False
    freeze_vit: bool = True
    freeze_aligner: bool = True
    adapter_path: str | None = None  # an adapter in PEFT form to start from


def load_model(path: str | os.PathLike, dtype: str = "bfloat16", attn_implementation: str = "sdpa") -> nn.Module:
    """A `Qwen3VLForConditionalGeneration` from a local checkpoint or hub name, all parameters in `dtype`.

    `dtype` is what forward and backward see; float32 master weights are the optimizer's affair (DeepSpeed keeps them
    when `bf16` or `fp16` is on).

    Raises:
        ValueError: another architecture, or a checkpoint that lacks tensors.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    from utils.learner import attention

    config = AutoConfig.from_pretrained(path)
    if config.model_type != "qwen3_vl":  # packing relies on its 4-row position ids
        raise ValueError(f"model.path={path}: a {config.model_type} model; only qwen3_vl is supported")
    if attn_implementation == "sdpa":
        attn_implementation = attention.register()
    model, info = AutoModelForImageTextToText.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation=attn_implementation, output_loading_info=True
    )
    if info["missing_keys"]:  # transformers would start them at random and only warn
        raise ValueError(f"model.path={path}: the checkpoint lacks {sorted(info['missing_keys'])[:5]}")
    return model


def fuse_kernels(model: nn.Module) -> None:
    """liger's norms, rotary embedding and MLP in place of transformers' own, for CUDA; call it before `apply_tuner`.

    Its cross-entropy stays out: it has no coordinate terms, and logits exist at labels only already (LRN-4).
    """
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3_vl

    kernels = {"rope": True, "rms_norm": True, "swiglu": True}
    apply_liger_kernel_to_qwen3_vl(model=model, **kernels, cross_entropy=False, fused_linear_cross_entropy=False)


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def part_of(name: str) -> str:
    """Which of `PARTS` a parameter or module name belongs to, with or without wrappers' prefixes."""
    names = name.split(".")
    if "visual" in names:
        return "aligner" if "merger" in names or "deepstack_merger_list" in names else "vit"
    return "embeddings" if "embed_tokens" in names or "lm_head" in names else "llm"


def apply_tuner(model: nn.Module, **tuner: Any) -> nn.Module:
    """Freeze and wrap the model; returns the model to train (a PEFT model for `lora`).

    Args:
        tuner: the fields of `TunerOptions`.

    Adapters go only where the part is not frozen, never on the head. `modules_to_save` and an existing adapter's own
    modules are explicit wishes: the former are trained in frozen parts too, the latter stay in force there but frozen.

    Raises:
        ValueError: nothing would be trained, a name matches nothing, or `adapter_path` contradicts the options.
    """
    options = TunerOptions(**tuner)
    frozen = _frozen_parts(options)
    if options.type == "full":
        if options.modules_to_save or options.adapter_path:
            raise ValueError("tuner.modules_to_save and tuner.adapter_path need tuner.type: lora")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part_of(name) not in frozen)
    else:
        model = _load_adapter(model, options) if options.adapter_path else _new_adapter(model, options)
        for name, parameter in model.named_parameters():
            if ".lora_" in name and part_of(name) in frozen:
                parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "tuner: nothing is left to train; set one of tuner.freeze_llm, freeze_vit, freeze_aligner to false"
        )
    return model


def _frozen_parts(options: TunerOptions) -> set[str]:
    flags = {"llm": options.freeze_llm, "vit": options.freeze_vit, "aligner": options.freeze_aligner}
    return {part for part, frozen in flags.items() if frozen} | ({"embeddings"} if options.freeze_llm else set())


def adapter_targets(model: nn.Module, options: TunerOptions) -> list[str]:
    """Full names of the linear layers that get an adapter: those meant, minus frozen parts and the head.

    Raises:
        ValueError: an entry of `target_modules` matches no linear layer, or what is meant is frozen.
    """
    head = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    wanted, meant = options.target_modules, linear
    if isinstance(wanted, str) and wanted != "all-linear":
        meant = [name for name in linear if re.fullmatch(wanted, name)]
    elif not isinstance(wanted, str):
        unknown = [entry for entry in wanted if not any(_ends_with(name, entry) for name in linear)]
        if unknown:
            raise ValueError(f"tuner.target_modules: no linear layer (the head aside) ends in {unknown}")
        meant = [name for name in linear if any(_ends_with(name, entry) for entry in wanted)]
    chosen = [name for name in meant if part_of(name) not in _frozen_parts(options)]
    if not chosen:
        frozen = ", ".join(f"tuner.freeze_{part}" for part in PARTS[:3] if part in _frozen_parts(options))
        why = f"all {len(meant)} layers meant are frozen ({frozen})" if meant else "it matches no linear layer"
        raise ValueError(f"tuner.target_modules={wanted}: {why}, so nothing is left to train")
    return chosen


def _ends_with(name: str, ending: str) -> bool:
    return name == ending or name.endswith("." + ending)


def _new_adapter(model: nn.Module, options: TunerOptions) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    names = [name for name, _ in model.named_modules()]
    unknown = [entry for entry in options.modules_to_save if not any(_ends_with(name, entry) for name in names)]
    if unknown:
        raise ValueError(f"tuner.modules_to_save: no module's name ends in {unknown}")
    saves_embeddings = any(part_of(entry) == "embeddings" for entry in options.modules_to_save)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        use_dora=options.use_dora,
        target_modules=adapter_targets(model, options),
        modules_to_save=list(options.modules_to_save) or None,
        # PEFT would else train a copy of the embeddings beside an unchanged head (or the other way round).
        ensure_weight_tying=saves_embeddings and tied,
    )
    # The adapter in the model's own dtype: ZeRO wants one dtype, and its optimizer holds the float32 copy.
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def _load_adapter(model: nn.Module, options: TunerOptions) -> nn.Module:
    from peft import PeftConfig, PeftModel

    saved = PeftConfig.from_pretrained(options.adapter_path)
    pairs = {
        "rank": (saved.r, options.rank),
        "alpha": (saved.lora_alpha, options.alpha),
        "use_dora": (saved.use_dora, options.use_dora),
        "modules_to_save": (_saved_whole(saved.modules_to_save), _saved_whole(options.modules_to_save)),
    }
    wrong = [f"tuner.{key}={ours} (the adapter has {its})" for key, (its, ours) in pairs.items() if its != ours]
    if wrong:
        raise ValueError(f"tuner.adapter_path={options.adapter_path} does not fit: {'; '.join(wrong)}")
    saved.lora_dropout = options.dropout
    return PeftModel.from_pretrained(
        model, options.adapter_path, config=saved, is_trainable=True, autocast_adapter_dtype=False
    )


def _saved_whole(names: Sequence[str] | None) -> list[str]:
    """For comparison: PEFT adds the other end of tied embeddings to the list it saves, under its full name."""
    return sorted({"embeddings" if part_of(name) == "embeddings" else name for name in names or ()})


@contextmanager
def start_policy(model: nn.Module) -> Iterator[None]:
    """Inside, a PEFT model with adapters of its own making computes what the model it began with did: they are off."""
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    try:
        with model.disable_adapter():
            yield
    finally:
        for parameter in model.parameters():  # PEFT lets all adapters learn when it switches them on again
            parameter.requires_grad_(parameter in trained)


def enable_gradient_checkpointing(model: nn.Module) -> None:
    """Recompute each layer in backward. Non-reentrant: works with frozen inputs, and gradients arrive once (ZeRO)."""
    base_model(model).gradient_checkpointing_enable({"use_reentrant": False})


def param_groups(
    model: nn.Module,
    *,
    learning_rate: float,
    vit_lr: float | None = None,
    aligner_lr: float | None = None,
    embed_lr: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
    """Optimizer groups of all trained parameters, `{"name", "params", "lr", "weight_decay"}`, at most two per part.

    A part's learning rate of None means `learning_rate`. Norms, biases, everything else one-dimensional and DoRA's
    magnitudes are not decayed; their groups are named `<part>_no_decay`.
    """
    rates = {"llm": learning_rate, "vit": vit_lr, "aligner": aligner_lr, "embeddings": embed_lr}
    groups: dict[str, list[nn.Parameter]] = {f"{part}{end}": [] for part in PARTS for end in ("", "_no_decay")}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            num_dims = len(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 flattens its shards
            no_decay = num_dims < 2 or "lora_magnitude_vector" in name
            groups[part_of(name) + "_no_decay" * no_decay].append(parameter)
    return [
        {
            "name": name,
            "params": params,
            "lr": learning_rate if (rate := rates[name.removesuffix("_no_decay")]) is None else rate,
            "weight_decay": 0.0 if name.endswith("_no_decay") else weight_decay,
        }
        for name, params in groups.items()
        if params
    ]


def position_ids_for(model: nn.Module) -> Callable[[Tensor, Tensor | None], Tensor]:
    """A function `(input_ids [L], image_grid_thw [n, 3] or None) -> int64[4, L]`, for one segment.

    Its rows: text positions 0..L-1, then the model's own multimodal positions (time, height, width). With the text row
    in front, and only then, the model keeps packed segments apart.
    """
    inner = base_model(model).model
    image_token_id, merge = inner.config.image_token_id, inner.config.vision_config.spatial_merge_size

    def position_ids(input_ids: Tensor, image_grid_thw: Tensor | None) -> Tensor:
        is_image = (input_ids == image_token_id).int()
        wanted = 0 if image_grid_thw is None else int(image_grid_thw.prod(dim=1).sum()) // merge**2
        if int(is_image.sum()) != wanted:
            raise ValueError(f"{int(is_image.sum())} image tokens in a segment whose images have {wanted}")
        text = torch.arange(len(input_ids))
        multimodal, _ = inner.get_rope_index(input_ids[None], is_image[None], image_grid_thw=image_grid_thw)
        return torch.cat([text[None], multimodal[:, 0]])

    return position_ids


def dummy_segment(model: nn.Module) -> Segment:
    """The smallest image, without supervision: what a row without an image runs the vision tower on (PCK-8)."""
    config = base_model(model).config
    vision = config.vision_config
    merge, patch_dim = vision.spatial_merge_size, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    ids = np.array([config.vision_start_token_id, config.image_token_id, config.vision_end_token_id], dtype=np.int64)
    nothing, no_index = np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.int64)
    return Segment(
        sample_id="",
        input_ids=ids,
        answer_start=len(ids),
        coord_index=no_index,
        coord_target=nothing,
        text_index=no_index,
        text_label=no_index,
        text_weight=nothing,
        pixel_values=torch.zeros(merge**2, patch_dim),
        image_grid_thw=torch.tensor([[1, merge, merge]]),
    )


class RowModel(nn.Module):
    """What DeepSpeed wraps: a batch's hidden states, and whatever is to be made of them and the head.

    Every rank runs the same modules in the same order whatever its batch holds (PCK-8): the batch always has an image
    (collation adds one of no weight), the vision tower is called once for all of them, and `score` must call the head
    equally often.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, score: Callable[[Tensor, nn.Module, Batch], Any]) -> Any:
        """`score(hidden states [B * T, D], head, batch)`: an objective's loss, or log-probabilities.

        It is called in here because under ZeRO-3 only an engine's forward gathers weights that one module reads from
        another, as DoRA does.

        Args:
            batch: on the model's device.
        """
        return score(self.hidden_states(batch).flatten(0, 1), base_model(self.model).lm_head, batch)

    def hidden_states(self, batch: Batch) -> Tensor:
        """Final hidden states [B, T, D]."""
        # use_cache must be False: with a cache transformers 5.19 does not look for packed segments.
        return (
            base_model(self.model)
            .model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                attention_mask=batch.attention_mask,
                pixel_values=batch.pixel_values,
                image_grid_thw=batch.image_grid_thw,
                use_cache=False,
            )
            .last_hidden_state
        )
