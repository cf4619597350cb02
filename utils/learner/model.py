"""The trained model: loading, choosing what trains, and the forward pass from a `Batch` to hidden states.

A model has four parts, each with its own learning rate: `llm` (language model), `embeddings` (token embeddings and
head, frozen together with the llm), `vit` (vision tower) and `aligner` (what maps its output to the language model).
`utils.families` says which parameters they hold.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from utils.config.schema import Training, Tuner
from utils.families import PARTS, family_in, family_of, part_of
from utils.packing import Batch, PositionIds
from utils.sync.merged_weights import MergedWeights

logger = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")


def load_model(path: str | os.PathLike, dtype: str = "bfloat16", attn_implementation: str = "sdpa") -> nn.Module:
    """The model of a supported family from a local checkpoint, all parameters in `dtype`.

    `dtype` is that of forward and backward; DeepSpeed keeps float32 master weights when `bf16` or `fp16` is on.

    Raises:
        ValueError: the family is not supported, or the checkpoint lacks tensors.
    """
    from transformers import AutoModelForImageTextToText

    from utils.learner import attention

    try:
        family = family_in(path)
    except ValueError as error:
        raise ValueError(f"model.path={path}: {error}") from None
    if attn_implementation == "sdpa":
        attn_implementation = attention.register()
    model, info = AutoModelForImageTextToText.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation=attn_implementation, output_loading_info=True
    )
    if family.mixer is not None:
        attention.isolate_mixers(model, family.mixer)
    if info["missing_keys"]:  # transformers would start them at random and only warn
        raise ValueError(f"model.path={path}: the checkpoint lacks {sorted(info['missing_keys'])[:5]}")
    return model


def fuse_kernels(model: nn.Module) -> None:
    """Replace transformers' norms and rotary embedding by liger's (CUDA only); call it before `apply_tuner`. A family
    without them has been refused by `load_tokenizer`.

    liger's cross-entropy is not used: it has no coordinate terms, and logits already exist at labels only (LRN-4).
    """
    fuse = getattr(import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{family_of(model).liger}")
    kernels = {"rope": True, "rms_norm": True}  # for Qwen3-VL liger 0.8.5 takes `swiglu` and ignores it
    fuse(model=model, **kernels, cross_entropy=False, fused_linear_cross_entropy=False)


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def apply_tuner(model: nn.Module, tuner: Tuner) -> nn.Module:
    """Freeze and wrap the model; return the model to train (a PEFT model for `lora`).

    Adapters go only where the part is not frozen, never on the head. `modules_to_save` are trained in frozen parts
    too, because they are named explicitly. Adapters that an existing checkpoint has in a frozen part stay active but
    are not trained.

    Raises:
        ValueError: nothing would be trained, a name matches nothing, or `adapter_path` contradicts the other settings
            or is not LoRA or DoRA that can be merged.
    """
    frozen = _frozen_parts(tuner)
    if tuner.type == "full":
        if tuner.modules_to_save or tuner.adapter_path:
            raise ValueError("tuner.modules_to_save and tuner.adapter_path need tuner.type: lora")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part_of(name) not in frozen)
    else:
        model = _load_adapter(model, tuner) if tuner.adapter_path else _new_adapter(model, tuner)
        for name, parameter in model.named_parameters():
            if ".lora_" in name and part_of(name) in frozen:
                parameter.requires_grad_(False)
    trained = {part_of(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ValueError("nothing is left to train; set one of tuner.freeze_llm, freeze_vit, freeze_aligner to false")
    for part in {"vit", "aligner"} - frozen - trained:
        if any(part_of(name) == part for name, _ in model.named_parameters()):
            source = "target_modules" if tuner.adapter_path is None else "adapter_path"
            why = f"tuner.{source} has no layer in it, so it would not be trained"
            raise ValueError(f"tuner.freeze_{part}=false: {why}; name one, or set tuner.freeze_{part}: true")
    return model


def _frozen_parts(tuner: Tuner) -> set[str]:
    flags = (tuner.freeze_llm, tuner.freeze_vit, tuner.freeze_aligner, tuner.freeze_llm)
    return {part for part, is_frozen in zip(PARTS, flags, strict=True) if is_frozen}


def adapter_targets(model: nn.Module, tuner: Tuner) -> list[str]:
    """Full names of the linear layers that get an adapter: those `target_modules` selects, minus head, frozen parts and
    what is trained in full; maybe none beside `modules_to_save`.

    Raises:
        ValueError: an entry matches nothing, or all selected layers are frozen.
    """
    head, wanted, frozen = model.get_output_embeddings(), tuner.target_modules, _frozen_parts(tuner)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    if wanted == "all-linear":
        selected = linear
    elif isinstance(wanted, str):
        selected = [name for name in linear if re.fullmatch(wanted, name)]
    else:
        if unknown := [entry for entry in wanted if not any(_ends_with(name, entry) for name in linear)]:
            raise ValueError(
                f"tuner.target_modules: no linear layer (except the head) has a name that ends in {unknown}"
            )
        selected = [name for name in linear if any(_ends_with(name, entry) for entry in wanted)]
        if any(".shared_expert." in name for name in selected):
            logger.warning(
                "tuner.target_modules: of the experts only the shared one gets adapters; others stay as they are"
            )
    whole = saved_modules(model, tuner)
    chosen = [name for name in selected if part_of(name) not in frozen and not _is_within(name, whole)]
    if not chosen and not whole:
        keys = ", ".join(f"tuner.freeze_{part}" for part in PARTS if part in frozen - {"embeddings"})
        why = f"all {len(selected)} selected layers are frozen ({keys})" if selected else "it matches no linear layer"
        raise ValueError(f"tuner.target_modules={wanted}: {why}, so nothing is left to train")
    return chosen


def saved_modules(model: nn.Module, tuner: Tuner) -> list[str]:
    """Full names of the modules that `modules_to_save` selects; not of those that another of them holds. PEFT takes any
    name that ends in an entry's letters, so that `norm` would be `q_norm`, too.

    Raises:
        ValueError: an entry matches no module.
    """
    names = [name for name, _ in model.named_modules()]
    if unknown := [entry for entry in tuner.modules_to_save if not any(_ends_with(name, entry) for name in names)]:
        raise ValueError(f"tuner.modules_to_save: no module's name ends in {unknown}")
    found = [name for name in names if any(_ends_with(name, entry) for entry in tuner.modules_to_save)]
    return [name for name in found if not _is_within(name, [other for other in found if other != name])]


def _ends_with(name: str, ending: str) -> bool:
    return name == ending or name.endswith("." + ending)


def _is_within(name: str, modules: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _new_adapter(model: nn.Module, tuner: Tuner) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from peft.utils.constants import DUMMY_TARGET_MODULES

    saved = saved_modules(model, tuner)
    saves_embeddings = any(part_of(name) == "embeddings" for name in saved)
    config = LoraConfig(
        r=tuner.rank,
        lora_alpha=tuner.alpha,
        lora_dropout=tuner.dropout,
        use_dora=tuner.use_dora,
        target_modules=adapter_targets(model, tuner) or DUMMY_TARGET_MODULES,
        modules_to_save=saved or None,
        # Otherwise PEFT trains a copy of the embeddings and leaves the head unchanged (or the other way round).
        ensure_weight_tying=saves_embeddings and _is_tied(model),
    )
    # The adapter has the model's dtype: ZeRO wants a single one, and its optimizer holds the float32 copy.
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def _load_adapter(model: nn.Module, tuner: Tuner) -> nn.Module:
    from peft import LoraConfig, PeftConfig, PeftModel

    where, was_tied = f"tuner.adapter_path={tuner.adapter_path}", _is_tied(model)
    saved = _of_peft(where, lambda: PeftConfig.from_pretrained(tuner.adapter_path))
    if not isinstance(saved, LoraConfig):
        raise ValueError(f"{where} is {saved.peft_type.value}; use LoRA or DoRA")
    pairs = {
        "rank": (saved.r, tuner.rank),
        "alpha": (saved.lora_alpha, tuner.alpha),
        "use_dora": (saved.use_dora, tuner.use_dora),
        "modules_to_save": (_taken_by_peft(model, saved.modules_to_save), _normalized(saved_modules(model, tuner))),
    }
    wrong = [f"tuner.{key}={ours} (the adapter has {its})" for key, (its, ours) in pairs.items() if its != ours]
    if wrong:
        raise ValueError(f"{where} does not fit: {'; '.join(wrong)}")
    if saved.bias != "none":  # they would train in frozen parts, too, and stay when adapters are disabled
        raise ValueError(
            f"{where} also trains biases (bias: {saved.bias}); merge it into the model, and start from that"
        )
    wanted = None if tuner.target_modules == "all-linear" else set(adapter_targets(model, tuner))
    saved.lora_dropout = tuner.dropout
    how = {"config": saved, "is_trainable": True, "autocast_adapter_dtype": False}
    with warnings.catch_warnings():  # PEFT starts what the file lacks anew, and only warns
        warnings.filterwarnings("error", "Found missing adapter keys")
        loaded = _of_peft(where, lambda: PeftModel.from_pretrained(model, tuner.adapter_path, **how))
    _of_peft(where, lambda: MergedWeights(loaded))  # here, not at the first sync or checkpoint
    if was_tied and not _is_tied(loaded):  # the merged checkpoint's config would say tied of two tensors
        raise ValueError(f"{where} unties the embeddings from the head; make it with PEFT's ensure_weight_tying=True")
    frozen, prefix = _frozen_parts(tuner), "base_model.model."
    adapted = (name.removeprefix(prefix) for name, module in loaded.named_modules() if hasattr(module, "lora_A"))
    if wanted is not None and (differ := wanted.symmetric_difference(n for n in adapted if part_of(n) not in frozen)):
        rule = f"only one of the two has {min(differ)}; name the adapter's own, or leave the key out"
        raise ValueError(f"tuner.target_modules={tuner.target_modules} does not fit {where}: {rule}")
    return loaded


def _of_peft(where: str, work: Callable[[], Loaded]) -> Loaded:
    """Return `work()`; whatever it raises is told of the folder: safetensors and torch have errors of their own."""
    try:
        return work()
    except Exception as error:
        text = str(error) if len(str(error)) < 400 else f"{str(error)[:400]}..."
        raise ValueError(f"{where}: {text}") from error


def _is_tied(model: nn.Module) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


def _taken_by_peft(model: nn.Module, entries: Sequence[str] | None) -> list[str]:
    """The modules that an adapter's `modules_to_save` are, by PEFT's own rule."""
    return _normalized([name for name, _ in model.named_modules() if name.endswith(tuple(entries or ()))])


def _normalized(names: Sequence[str]) -> list[str]:
    """Names for comparison: PEFT adds the other end of tied embeddings to the list it saves."""
    return sorted({"embeddings" if part_of(name) == "embeddings" else name for name in names})


@contextmanager
def start_policy(model: nn.Module, reference: nn.Module | None = None) -> Iterator[nn.Module]:
    """Give the policy that training started from: the frozen `reference`, or else a PEFT model with its adapters
    disabled (that is it unless the adapters were loaded from a checkpoint)."""
    if reference is not None:
        yield reference
        return
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    try:
        with model.disable_adapter():
            yield model
    finally:
        for parameter in model.parameters():  # PEFT makes all adapters trainable when it enables them again
            parameter.requires_grad_(parameter in trained)


def enable_gradient_checkpointing(model: nn.Module, num_layers: int | None = None) -> None:
    """Recompute the vision tower's layers and the language model's first `num_layers` (None: all) in backward: the
    first ones, because their turn comes when backward has freed what the others kept. Non-reentrant: it works with
    frozen inputs, and gradients arrive once (ZeRO)."""
    base_model(model).gradient_checkpointing_enable({"use_reentrant": False})
    for index, layer in enumerate(base_model(model).model.language_model.layers):
        layer.gradient_checkpointing = num_layers is None or index < num_layers


def param_groups(model: nn.Module, training: Training) -> list[dict[str, Any]]:
    """Optimizer groups of all trained parameters, `{"name", "params", "lr", "weight_decay"}`, at most two per part.

    Learning rates and decay are those of `training`; a part's rate of None means `learning_rate`. Everything
    one-dimensional (norms, biases) and DoRA's magnitudes are not decayed; their groups are named `<part>_no_decay`.
    """
    rates = {"vit": training.vit_lr, "aligner": training.aligner_lr, "embeddings": training.embed_lr}
    groups: dict[str, list[nn.Parameter]] = {f"{part}{end}": [] for part in PARTS for end in ("", "_no_decay")}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            num_dims = len(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 flattens its shards
            no_decay = num_dims < 2 or "lora_magnitude_vector" in name
            groups[part_of(name) + "_no_decay" * no_decay].append(parameter)
    found = []
    for name, params in groups.items():
        rate = rates.get(name.removesuffix("_no_decay"))
        if params:
            lr = training.learning_rate if rate is None else rate
            decay = 0.0 if name.endswith("_no_decay") else training.weight_decay
            found.append({"name": name, "params": params, "lr": lr, "weight_decay": decay})
    return found


def has_multimodal_positions(model: nn.Module) -> bool:
    """Whether tokens of an image have a time, a height and a width, instead of a place in the text alone."""
    return hasattr(base_model(model).model, "get_rope_index")


def position_ids_for(model: nn.Module) -> PositionIds:
    """Return a function `(input_ids [L], vision tensors) -> int64[R, L]` for one segment.

    The first row are text positions 0..L-1; where the model has multimodal positions of its own (time, height, width)
    they follow, and the model keeps packed segments apart only if the text row comes first.
    """
    inner = base_model(model).model
    if not has_multimodal_positions(model):
        return lambda input_ids, vision: torch.arange(len(input_ids))[None]
    image_token_id, merge = inner.config.image_token_id, inner.config.vision_config.spatial_merge_size

    def position_ids(input_ids: Tensor, vision: dict[str, Tensor]) -> Tensor:
        is_image, grid = (input_ids == image_token_id).int(), vision.get("image_grid_thw")
        num_tokens = 0 if grid is None else int(grid.prod(dim=1).sum()) // merge**2
        if int(is_image.sum()) != num_tokens:
            raise ValueError(f"{int(is_image.sum())} image tokens in a segment whose images have {num_tokens}")
        multimodal, _ = inner.get_rope_index(input_ids[None], is_image[None], image_grid_thw=grid)
        return torch.cat([torch.arange(len(input_ids))[None], multimodal[:, 0]])

    return position_ids


def partition(module: nn.Module, config: dict[str, Any], device: torch.device) -> None:
    """Leave every rank its part of each parameter, one parameter after the other (ZeRO-3; collective).

    `deepspeed.initialize` by itself would first move the whole model to every GPU. Before, the parameters are pages of
    the mapped checkpoint; DeepSpeed writes rank 0's values into what it partitions, which would make them memory of
    this process for good. So each passes through one buffer.

    Args:
        config: DeepSpeed's.
        device: the rank's. DeepSpeed puts the parts of parameters there, but takes the buffers (a vision tower's rotary
            frequencies, say) for placed already.
    """
    import deepspeed

    buffer = torch.empty(max(p.numel() for p in module.parameters()), dtype=next(module.parameters()).dtype)

    class InTurn(nn.Module):
        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            for parameter in module.parameters():
                parameter.data = buffer[: parameter.numel()].view(parameter.shape).copy_(parameter.data)
                yield parameter

    deepspeed.zero.Init(InTurn(), config_dict_or_path=config)
    for owner in module.modules():
        for name, values in owner.named_buffers(recurse=False):
            owner._buffers[name] = values.to(device)
    # DoRA reads weights of other modules. DeepSpeed notices only the first time, and only what is in parts just then.
    for layer in module.modules():
        for name, dora in getattr(layer, "lora_magnitude_vector", {}).items():
            for other in (layer.base_layer, layer.lora_A[name], layer.lora_B[name]):
                deepspeed.zero.register_external_parameter(dora, other.weight)


def _drop_reference(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Leave a frozen start policy out of checkpoints: DeepSpeed 0.19 keeps a frozen head that is tied."""
    for name in [name for name in state if name.startswith(f"{prefix}reference.")]:
        del state[name]


class RowModel(nn.Module):
    """The module that DeepSpeed wraps: hidden states of a batch, and a function of them and the head.

    Every rank runs the same modules in the same order whatever its batch holds (PCK-8). The batch always has an image
    (collation adds one of no weight), the vision tower is called once for all images, and `score` must call the head
    equally often on all ranks.

    Args:
        reference: frozen start policy; None: the model with its adapters disabled.
    """

    def __init__(self, model: nn.Module, reference: nn.Module | None = None) -> None:
        super().__init__()
        self.model = model
        self.reference = reference
        self.register_state_dict_post_hook(_drop_reference)

    @property
    def start_head(self) -> nn.Module:
        """The start policy's head: beside a copy that is trained (`modules_to_save`) PEFT keeps the original."""
        head = base_model(self.reference or self.model).lm_head
        return getattr(head, "original_module", head)

    def forward(
        self, batch: Batch, score: Callable[[Tensor, nn.Module, Batch], Any], of_start_policy: bool = False
    ) -> Any:
        """Return `score(hidden states [B * T, D], head, batch)`: an objective's loss, or log-probabilities.

        `score` runs inside forward because under ZeRO-3 only the engine's forward gathers weights that one module
        reads from another, as DoRA does. The batch is on the model's device.
        """
        policy = start_policy(self.model, self.reference) if of_start_policy else nullcontext(self.model)
        with policy as model:
            return score(self.hidden_states(batch, model).flatten(0, 1), base_model(model).lm_head, batch)

    def hidden_states(self, batch: Batch, model: nn.Module | None = None) -> Tensor:
        """Final hidden states [B, T, D] of the model in training, or of another."""
        output = base_model(model or self.model).model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids.squeeze(0) if batch.position_ids is not None else None,
            attention_mask=batch.attention_mask,
            **batch.vision,
            # Read once here, not in every layer: on CUDA the host waits for it.
            segment_lengths=None if batch.attention_mask is not None else batch.cu_seqlens.diff().tolist(),
            use_cache=False,  # with a cache transformers 5.19 does not look for packed segments
        )
        return output.last_hidden_state
