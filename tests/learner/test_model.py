"""The real Qwen3-VL classes at toy size, float32: isolation in a row, equal gradients, what is trained and how fast.

Run as a program (by `test_zero_ranks_...`, under torchrun) this file is one DeepSpeed rank.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import KasaConfig, MontecloraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import set_seed

from tests.families import build_family
from tools.make_demo import build_start_model
from utils.config.memory import model_size
from utils.config.schema import Losses, Training, Tuner
from utils.families import part_of
from utils.learner.model import (
    RowModel,
    apply_tuner,
    base_model,
    enable_gradient_checkpointing,
    fuse_kernels,
    load_model,
    param_groups,
    position_ids_for,
)
from utils.learner.objectives import MatchingObjective
from utils.packing import collate_packed, collate_padded, denominators
from utils.targets import Segment, plain_segment

IMPLEMENTATIONS = ["sdpa", "eager"]
WEIGHTS = Losses(text=0.7, coord=1.0, w1=2.0, gate=0.5, sigma=8.0)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Checkpoint directory of an untrained Qwen3-VL: 4 text layers, 2 vision layers, one deepstack merger."""
    return build_start_model(tmp_path_factory.mktemp("start"), image_size=64)


@pytest.fixture
def model(start):
    return load_model(start, "float32", "sdpa")


def coord_ids(model: nn.Module) -> np.ndarray:
    vocab = base_model(model).config.text_config.vocab_size
    return np.arange(vocab - 1000, vocab)  # the demo's coordinate tokens come last


def make_segment(model: nn.Module, seed: int, grid: tuple[int, int] | None, num_answer: int = 20) -> Segment:
    """Random prompt with an image of `grid` patches (None: no image) and answer, every third token a coordinate."""
    config, rng = base_model(model).config, np.random.default_rng(seed)
    prompt, images = [rng.integers(0, 300, 5)], {}
    if grid is not None:
        vision = config.vision_config
        patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pads = [config.image_token_id] * (grid[0] * grid[1] // vision.spatial_merge_size**2)
        prompt += [[config.vision_start_token_id], pads, [config.vision_end_token_id], rng.integers(0, 300, 3)]
        images["pixel_values"] = torch.from_numpy(rng.standard_normal((grid[0] * grid[1], patch_dim))).float()
        images["image_grid_thw"] = torch.tensor([[1, *grid]])
    prompt = np.concatenate(prompt).astype(np.int64)
    answer, coords = rng.integers(0, 300, num_answer), np.arange(1, num_answer - 1, 3)
    answer[coords] = rng.choice(coord_ids(model), len(coords))
    text = np.array([0, 2, num_answer - 1])
    return Segment(
        sample_id=f"s{seed}",
        input_ids=np.concatenate([prompt, answer]),
        answer_start=len(prompt),
        coord_index=len(prompt) + coords,
        coord_target=rng.uniform(0, 999, len(coords)).astype(np.float32),
        text_index=len(prompt) + text,
        text_label=answer[text],
        text_weight=np.array([1.0, 0.5, 2.0], dtype=np.float32),
        vision=images,
    )


def smallest_image(model: nn.Module) -> Segment:
    """An image of one token, without supervision: a dummy for models that come without a processor."""
    config = base_model(model).config
    vision = config.vision_config
    merge, patch_dim = vision.spatial_merge_size, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    image = {"pixel_values": torch.zeros(merge**2, patch_dim), "image_grid_thw": torch.tensor([[1, merge, merge]])}
    return plain_segment("", [config.vision_start_token_id, config.image_token_id], [], image)


def images_of_three_sizes(model: nn.Module) -> list[Segment]:
    return [make_segment(model, 0, (4, 6)), make_segment(model, 1, (8, 8), 31), make_segment(model, 2, (2, 4), 12)]


def collate(model: nn.Module, segments: list[Segment], packed: bool = True):
    make = collate_packed if packed else collate_padded
    return make(segments, position_ids_for(model), coord_ids(model), smallest_image(model))


def logits_of(model: nn.Module, batch) -> torch.Tensor:
    with torch.no_grad():
        return base_model(model).lm_head(RowModel(model).hidden_states(batch))


def scored(totals: dict[str, float], num_chunks: int):
    """The function that `RowModel` applies: stage 2's loss."""
    return partial(MatchingObjective(WEIGHTS).loss, totals=totals, num_chunks=num_chunks)


def gradients(model: nn.Module, batches: list, num_chunks: int = 2) -> dict[str, torch.Tensor]:
    """Gradients of one optimizer step over `batches`, by parameter name; parameters without a gradient are missing."""
    model.zero_grad()
    totals = denominators(batches)
    for batch in batches:
        loss, _ = RowModel(model)(batch, scored(totals, num_chunks))
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    flat_a, flat_b = (torch.cat([grads[name].flatten() for name in a]).double() for grads in (a, b))
    return float((flat_a - flat_b).norm() / flat_b.norm())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_segments_in_a_row_cannot_see_each_other_pck_4(start, implementation):
    """PCK-4: Logits of a row equal those of each segment alone, with images of different sizes and one segment
    without."""
    model = load_model(start, "float32", implementation)
    assert model.config._attn_implementation == {"sdpa": "segment_sdpa"}.get(implementation, implementation)
    segments = [*images_of_three_sizes(model), make_segment(model, 3, None)]
    row = collate(model, segments)
    logits = logits_of(model, row)
    for segment, start_at, end in zip(segments, row.cu_seqlens, row.cu_seqlens[1:], strict=False):
        alone = logits_of(model, collate(model, [segment]))[:, : len(segment)]
        torch.testing.assert_close(logits[:, start_at:end], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_the_text_row_segments_would_leak_pck_4(start, implementation):
    """PCK-4: The check above can fail: three position rows instead of four, and the second segment sees the first."""
    model = load_model(start, "float32", implementation)
    segments = images_of_three_sizes(model)
    row = collate(model, segments)
    row.position_ids = row.position_ids[1:]
    alone = logits_of(model, collate(model, segments[1:2]))
    leaked = logits_of(model, row)[:, row.cu_seqlens[1] : row.cu_seqlens[2]]
    assert float((leaked - alone).abs().max()) > 0.01


@pytest.mark.parametrize("packed", [True, False])
def test_one_segment_equals_transformers_own_forward_pck_4(model, packed):
    """PCK-4: Image features, multimodal positions and deepstack as the library computes them from the processor's
    output."""
    segment = make_segment(model, 5, (4, 6))
    input_ids = torch.from_numpy(segment.input_ids)[None]
    with torch.no_grad():
        theirs = model(
            input_ids=input_ids,
            mm_token_type_ids=(input_ids == model.config.image_token_id).int(),
            **segment.vision,
        ).logits
    torch.testing.assert_close(logits_of(model, collate(model, [segment], packed)), theirs, rtol=0, atol=1e-5)


def test_position_ids_of_a_segment_pck_4(model):
    """PCK-4: Text, one image of 2 x 3 merged patches, text: worked out by hand."""
    config = model.config
    ids = torch.tensor([7, config.vision_start_token_id, *[config.image_token_id] * 6, config.vision_end_token_id, 8])
    positions = position_ids_for(model)(ids, {"image_grid_thw": torch.tensor([[1, 4, 6]])})
    assert positions.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_image_tokens_must_fit_the_images_pck_4(model):
    """PCK-4."""
    with pytest.raises(ValueError, match="2 image tokens .* have 6"):
        position_ids_for(model)(
            torch.tensor([model.config.image_token_id] * 2), {"image_grid_thw": torch.tensor([[1, 4, 6]])}
        )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packed_and_padded_give_the_same_gradient_pck_6(start, implementation):
    """PCK-6."""
    model = apply_tuner(load_model(start, "float32", implementation), Tuner(freeze_vit=False, freeze_aligner=False))
    segments = images_of_three_sizes(model)
    packed = gradients(model, [collate(model, segments, packed=True)])
    padded = gradients(model, [collate(model, segments, packed=False)])
    assert len(packed) == len(list(model.parameters()))
    assert relative_difference(padded, packed) < 1e-5


@pytest.mark.parametrize("num_chunks", [1, 7])
def test_layout_of_rows_does_not_change_the_gradient_pck_5(model, num_chunks):
    """PCK-5: Three segments in one row; or in two rows, the second one empty; or one each. Different numbers of
    labels."""
    model = apply_tuner(model, Tuner(freeze_vit=False, freeze_aligner=False))
    a, b, c = images_of_three_sizes(model)
    whole = gradients(model, [collate(model, [a, b, c])])
    for layout in ([[a, c], [b]], [[a], [b], [c]], [[a, b, c], []]):
        split = gradients(model, [collate(model, row) for row in layout], num_chunks)
        assert relative_difference(split, whole) < 1e-5


def test_row_without_image_runs_every_module_at_no_weight_pck_8(model):
    """PCK-8: Every module is called, every parameter gets a gradient, zero in the vision tower; loss and the other
    gradients
    are those of the text alone."""
    model = apply_tuner(model, Tuner(freeze_vit=False, freeze_aligner=False))
    segment = make_segment(model, 3, None)
    called = set()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.add(name))
    ours = gradients(model, [collate(model, [segment])])
    containers = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    assert {name for name, _ in model.model.named_modules(prefix="model")} - containers <= called
    assert "lm_head" in called
    assert ours.keys() == dict(model.named_parameters()).keys()
    assert all(grad.abs().max() == 0 for name, grad in ours.items() if part_of(name) in ("vit", "aligner"))
    batch = collate(model, [segment])
    batch.input_ids, batch.position_ids = batch.input_ids[:, : len(segment)], batch.position_ids[..., : len(segment)]
    batch.vision, batch.cu_seqlens = {}, batch.cu_seqlens[:2]
    alone = gradients(model, [batch])
    assert relative_difference({name: ours[name] for name in alone}, alone) < 1e-6


@pytest.mark.parametrize("tuner", [{}, {"type": "lora", "use_dora": True}])
def test_rank_without_segment_runs_a_dummy_pck_8(model, tuner):
    """PCK-8."""
    model = apply_tuner(model, Tuner(**tuner))
    batch = collate(model, [])
    loss, sums = RowModel(model)(batch, scored({"text": 10.0, "coord": 10.0}, 3))
    loss.backward()
    assert float(loss.detach()) == 0 and all(float(value) == 0 for value in sums.values())
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None and p.grad.abs().max() == 0 for p in trained)


@pytest.mark.parametrize("tuner", [{"freeze_vit": False, "freeze_aligner": False}, {"type": "lora", "use_dora": True}])
def test_gradient_checkpointing_changes_nothing_lrn_2(model, tuner):
    """LRN-2."""
    model = apply_tuner(model, Tuner(**tuner)).train()
    batches = [collate(model, images_of_three_sizes(model))]
    plain = gradients(model, batches)
    enable_gradient_checkpointing(model)
    assert relative_difference(gradients(model, batches), plain) < 1e-6


@pytest.mark.parametrize("tuner", [{"freeze_vit": False}, {"type": "lora", "use_dora": True, "dropout": 0.1}])
@pytest.mark.parametrize("num_layers", [0, 1, 3, 4, 9])
def test_the_first_n_layers_are_recomputed_and_gradients_are_the_same_lrn_2(model, num_layers, tuner):
    """LRN-2: of 4 language-model layers `num_layers` run twice, the others once; a trained vision tower's twice."""
    model = apply_tuner(model, Tuner(**tuner)).train()
    batches, calls = [collate(model, images_of_three_sizes(model))], []
    torch.manual_seed(0)
    plain = gradients(model, batches)
    inner = base_model(model).model
    for name, layers in (("llm", inner.language_model.layers), ("vit", inner.visual.blocks)):
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, key=f"{name}{index}": calls.append(key))
    enable_gradient_checkpointing(model, num_layers)
    torch.manual_seed(0)  # dropout
    assert relative_difference(gradients(model, batches), plain) < 1e-6
    assert [calls.count(f"llm{index}") for index in range(4)] == [1 + (index < num_layers) for index in range(4)]
    if "freeze_vit" in tuner:
        assert [calls.count(f"vit{index}") for index in range(2)] == [2, 2]


def test_borders_of_segments_are_read_once_per_forward_pck_4(model, monkeypatch):
    """PCK-4: on CUDA the host waits for each such reading. One for the whole pass, not one per layer; repeating layers
    in backward reads nothing."""
    model = model.train()
    enable_gradient_checkpointing(model)
    batch = collate(model, images_of_three_sizes(model))
    read = []
    for name in ("tolist", "item", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__index__"):
        own = getattr(torch.Tensor, name)

        def counted(tensor, *args, own=own, name=name, **kwargs):
            if sys._getframe(1).f_globals["__name__"].startswith("utils."):
                read.append(name)
            return own(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    RowModel(model).hidden_states(batch).sum().backward()
    assert read == ["tolist"]


def test_logits_are_made_at_labels_only_lrn_4(model):
    """LRN-4: The head sees one state per label, in chunks of equal size, never the row."""
    batch = collate(model, images_of_three_sizes(model))
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape)))
    RowModel(model)(batch, scored(denominators([batch]), 3))
    vocab = model.config.text_config.vocab_size
    assert sum(rows for rows, _ in seen) == batch.num_labels and {width for _, width in seen} == {vocab}
    assert max(rows for rows, _ in seen) <= batch.num_labels // 3 + 2


@pytest.mark.parametrize(
    "freeze_llm, freeze_vit, freeze_aligner", [(False, True, True), (True, False, True), (True, True, False)]
)
def test_full_tuning_trains_the_parts_that_are_not_frozen_lrn_2(model, freeze_llm, freeze_vit, freeze_aligner):
    """LRN-2."""
    model = apply_tuner(
        model, Tuner(type="full", freeze_llm=freeze_llm, freeze_vit=freeze_vit, freeze_aligner=freeze_aligner)
    )
    trained = {part_of(name) for name, p in model.named_parameters() if p.requires_grad}
    frozen = {part_of(name) for name, p in model.named_parameters() if not p.requires_grad}
    expected = {"vit"} if freeze_llm and freeze_aligner else {"aligner"} if freeze_llm else {"llm", "embeddings"}
    assert trained == expected and frozen == {"llm", "vit", "aligner", "embeddings"} - expected


def test_parts_by_name_lrn_2():
    """LRN-2."""
    assert part_of("model.visual.deepstack_merger_list.0.linear_fc1.weight") == "aligner"
    assert part_of("base_model.model.model.visual.merger.norm.weight") == "aligner"
    assert part_of("model.visual.blocks.0.attn.qkv.weight") == "vit"
    assert part_of("module.model.lm_head.modules_to_save.default.weight") == "embeddings"
    assert part_of("model.language_model.embed_tokens.weight") == "embeddings"
    assert part_of("model.language_model.norm.weight") == "llm"


def adapted(model: nn.Module) -> set[str]:
    """Checkpoint names of the layers that carry an adapter."""
    return {name.split(".lora_A")[0] for name, _ in base_model(model).named_modules() if name.endswith("lora_A")}


@pytest.mark.parametrize("freeze_vit", [True, False])
@pytest.mark.parametrize("freeze_aligner", [True, False])
def test_all_linear_adapts_exactly_what_is_not_frozen_lrn_2(model, freeze_vit, freeze_aligner):
    """LRN-2."""
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    parts = {"llm"} | ({"vit"} if not freeze_vit else set()) | ({"aligner"} if not freeze_aligner else set())
    model = apply_tuner(model, Tuner(type="lora", rank=4, freeze_vit=freeze_vit, freeze_aligner=freeze_aligner))
    assert adapted(model) == {name for name in linear if part_of(name) in parts}
    assert all(".lora_" in name for name, p in model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("use_dora", [True, False])
def test_adapter_has_the_models_dtype_and_starts_without_effect_lrn_2(start, use_dora):
    """LRN-2: bfloat16 stays bfloat16, as ZeRO wants; a fresh adapter changes no logit."""
    model = load_model(start, "float32", "sdpa")
    batch = collate(model, images_of_three_sizes(model))
    before = logits_of(model, batch)
    tuned = apply_tuner(model, Tuner(type="lora", use_dora=use_dora, rank=4))
    torch.testing.assert_close(logits_of(tuned, batch), before, rtol=0, atol=1e-5)
    half = apply_tuner(load_model(start, "bfloat16", "sdpa"), Tuner(type="lora", use_dora=use_dora, rank=4))
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    magnitudes = [name for name, _ in half.named_parameters() if "magnitude" in name]
    assert bool(magnitudes) == use_dora


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], r"model\.language_model\..*\.[qv]_proj"])
def test_named_targets_lrn_2(model, targets):
    """LRN-2."""
    model = apply_tuner(model, Tuner(type="lora", target_modules=targets))
    expected = {f"model.language_model.layers.{i}.self_attn.{x}_proj" for i in range(4) for x in "qv"}
    assert adapted(model) == expected


def test_named_targets_leave_frozen_parts_alone_lrn_2(model):
    """LRN-2: `linear_fc1` is in the vision blocks and in the mergers; only the mergers are free."""
    model = apply_tuner(model, Tuner(type="lora", target_modules=["linear_fc1"], freeze_aligner=False))
    assert adapted(model) == {"model.visual.merger.linear_fc1", "model.visual.deepstack_merger_list.0.linear_fc1"}


@pytest.mark.parametrize(
    "tuner, message",
    [
        ({"freeze_llm": True}, "nothing is left to train; set one of tuner.freeze_llm"),
        ({"type": "lora", "freeze_llm": True}, "are frozen .*freeze_llm, tuner.freeze_vit, tuner.freeze_aligner"),
        ({"type": "lora", "target_modules": ["qkv"]}, "all 2 selected layers are frozen .*freeze_vit"),
        ({"type": "lora", "target_modules": ["q_proj", "w_proj"]}, r"ends in \['w_proj'\]"),
        ({"type": "lora", "target_modules": ["lm_head"]}, r"ends in \['lm_head'\]"),
        ({"type": "lora", "target_modules": ".*nowhere"}, "matches no linear layer"),
        ({"type": "lora", "modules_to_save": ["embed"]}, r"modules_to_save: no module's name ends in \['embed'\]"),
        ({"modules_to_save": ["embed_tokens"]}, "need tuner.type: lora"),
    ],
)
def test_tuner_mistakes_are_named_lrn_2(model, tuner, message):
    """LRN-2."""
    with pytest.raises(ValueError, match=message):
        apply_tuner(model, Tuner(**tuner))


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_saved_embeddings_stay_tied_to_the_head_lrn_2(model, name):
    """LRN-2: One trained tensor serves both ends, and both ends' gradients reach it."""
    model = apply_tuner(model, Tuner(type="lora", rank=4, modules_to_save=[name]))
    base = base_model(model)
    embed, head = (m.modules_to_save["default"] for m in (base.model.language_model.embed_tokens, base.lm_head))
    assert embed.weight is head.weight and embed.weight.requires_grad
    batch = collate(model, images_of_three_sizes(model))
    gradient = next(g for n, g in gradients(model, [batch]).items() if "modules_to_save" in n)
    used_as_input = batch.input_ids[0, 0]
    assert gradient[used_as_input].abs().max() > 0 and gradient.abs().sum(1).count_nonzero() == len(gradient)
    before = logits_of(model, batch)
    with torch.no_grad():
        embed.weight.mul_(2.0)
    assert float((logits_of(model, batch) - before).abs().max()) > 0.01


@pytest.mark.parametrize(
    "saved, settings",
    [
        (["norm"], {}),  # not `q_norm` or `input_layernorm`
        (["attn"], {}),  # the vision tower's, not `self_attn`
        (["proj", "attn"], {"freeze_vit": False}),  # one holds the other, and both would have adapters
        (["merger", "embed_tokens"], {"freeze_llm": True}),  # nothing else is trained: no adapter at all
    ],
)
def test_modules_to_save_are_those_that_are_named_lrn_2_lrn_6(start, tmp_path, saved, settings):
    """LRN-2, LRN-6, CFG-16: and what is saved loads with PEFT, and is what the plan counts."""
    tuner = Tuner(type="lora", rank=4, modules_to_save=saved, **settings)
    model = apply_tuner(load_model(start, "float32", "sdpa"), tuner)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    whole = {name.split(".modules_to_save.")[0] for name in trained if ".modules_to_save." in name}
    assert whole and all(f".{name}".endswith(tuple(f".{entry}" for entry in (*saved, "lm_head"))) for name in whole)
    assert not any(".modules_to_save." in name and ".lora_" in name for name in trained)
    assert any(".lora_" in name for name in trained) != settings.get("freeze_llm", False)
    assert sum(parameter.numel() for parameter in trained.values()) == model_size(start, tuner).trainable
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(0.05)
    model.save_pretrained(tmp_path)
    batch = collate(model, images_of_three_sizes(model))
    expected = logits_of(model, batch)
    by_peft = PeftModel.from_pretrained(load_model(start, "float32", "sdpa"), tmp_path)
    torch.testing.assert_close(logits_of(by_peft, batch), expected)
    again = apply_tuner(load_model(start, "float32", "sdpa"), tuner.model_copy(update={"adapter_path": str(tmp_path)}))
    torch.testing.assert_close(logits_of(again, batch), expected)
    assert {name for name, parameter in again.named_parameters() if parameter.requires_grad} == set(trained)


def test_an_existing_adapter_is_trained_further_lrn_2(start, tmp_path):
    """LRN-2."""
    tuner = {"type": "lora", "use_dora": True, "rank": 4, "alpha": 8, "modules_to_save": ["embed_tokens"]}
    first = apply_tuner(load_model(start, "float32", "sdpa"), Tuner(**tuner))
    with torch.no_grad():
        for name, parameter in first.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    first.save_pretrained(tmp_path)
    ours = Tuner(**tuner, dropout=0.25, adapter_path=str(tmp_path))  # how it is trained further may change
    again = apply_tuner(load_model(start, "float32", "sdpa"), ours)
    assert {m.p for n, m in again.named_modules() if "lora_dropout" in n and isinstance(m, nn.Dropout)} == {0.25}
    again.eval()
    batch = collate(again, images_of_three_sizes(again))
    torch.testing.assert_close(logits_of(again, batch), logits_of(first, batch))
    trained = [{n for n, p in m.named_parameters() if p.requires_grad} for m in (first, again)]
    assert trained[0] == trained[1]
    base = base_model(again)
    assert base.get_input_embeddings().weight is base.get_output_embeddings().weight
    with pytest.raises(ValueError, match=r"tuner.rank=8 \(the adapter has 4\); tuner.use_dora=False"):
        wrong = {**tuner, "rank": 8, "use_dora": False}
        apply_tuner(load_model(start, "float32", "sdpa"), Tuner(**wrong, adapter_path=str(tmp_path)))


@pytest.mark.parametrize(
    ("ours", "differ"),
    [
        ("all-linear", None),
        (["q_proj"], None),
        (["q_proj", "v_proj"], "layers.0.self_attn.v_proj"),
        (".*language.*o_proj", "self_attn.[oq]_proj"),
        (["q_proj", "k_prj"], "no linear layer"),
    ],
)
def test_an_adapter_has_the_layers_that_the_config_names_lrn_2(start, tmp_path, ours, differ):
    """LRN-2: layers that it lacks would not be trained. Where the config names none, it has its own."""
    model = load_model(start, "float32", "sdpa")
    get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).save_pretrained(tmp_path)
    tuner = Tuner(type="lora", rank=4, alpha=8, adapter_path=str(tmp_path), target_modules=ours)
    with nullcontext() if differ is None else pytest.raises(ValueError, match=f"tuner.target_modules.*{differ}"):
        trained = apply_tuner(load_model(start, "float32", "sdpa"), tuner)
        assert {n.split(".lora_")[0].rsplit(".", 1)[-1] for n, p in trained.named_parameters() if p.requires_grad} == {
            "q_proj"
        }


@pytest.mark.parametrize(
    "make, settings, message",
    [
        (LoHaConfig, {}, "is LOHA; use LoRA or DoRA"),
        (IA3Config, {"feedforward_modules": []}, "is IA3; use LoRA or DoRA"),
        (LoraConfig, {"alora_invocation_tokens": [3, 4]}, ".*ALoraLinearVariant cannot be merged .* use LoRA or DoRA"),
        (LoraConfig, {"kasa_config": KasaConfig()}, ".*KasaLinearVariant cannot be merged .* use LoRA or DoRA"),
        (LoraConfig, {"monteclora_config": MontecloraConfig()}, ".*MontecloraLinearVariant cannot be merged"),
        (LoraConfig, {"bias": "all"}, "also trains biases .bias: all.; merge it into the model"),
        (LoraConfig, {"bias": "lora_only"}, "also trains biases .bias: lora_only."),
        (LoraConfig, {"lora_bias": True}, ".*only one adapter, without bias, on a linear layer can be merged"),
        (LoraConfig, {"trainable_token_indices": {"embed_tokens": [1, 2]}}, ".*TrainableTokensLayer cannot be merged"),
        (LoraConfig, {"modules_to_save": ["embed_tokens"]}, "unties the embeddings .* ensure_weight_tying=True"),
        (LoraConfig, {"modules_to_save": ["embed_tokens", "lm_head"]}, "unties the embeddings from the head"),
    ],
)
def test_an_existing_adapter_that_cannot_be_merged_is_refused_at_start_lrn_2(start, tmp_path, make, settings, message):
    """LRN-2, SYN-4: without a first checkpoint or sync, whose merge alone would find it."""
    rank = {} if make is IA3Config else {"r": 4}
    model = get_peft_model(load_model(start, "float32", "sdpa"), make(target_modules=["q_proj"], **rank, **settings))
    model.save_pretrained(tmp_path)
    ours = Tuner(
        type="lora", rank=4, alpha=8, adapter_path=str(tmp_path), modules_to_save=settings.get("modules_to_save", [])
    )
    with pytest.raises(ValueError, match=f"tuner.adapter_path={tmp_path}:? {message}"):
        apply_tuner(load_model(start, "float32", "sdpa"), ours)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda own: {name.replace("language_model.", ""): tensor for name, tensor in own.items()}, "missing adapter"),
        (lambda own: {name: tensor for name, tensor in own.items() if ".layers.0." in name}, "missing adapter keys"),
        (lambda own: {name: tensor[:2].clone() for name, tensor in own.items()}, "size mismatch"),
        (lambda own: b"{", "[Hh]eader"),
    ],
)
def test_an_adapter_whose_weights_do_not_fit_is_refused_lrn_2(start, tmp_path, change, message):
    """LRN-2: PEFT would only warn and train on from nothing."""
    tuner, file = {"type": "lora", "rank": 4}, tmp_path / "adapter_model.safetensors"
    apply_tuner(load_model(start, "float32", "sdpa"), Tuner(**tuner)).save_pretrained(tmp_path)
    content = change(load_file(file))
    file.write_bytes(content) if isinstance(content, bytes) else save_file(content, file, {"format": "pt"})
    with pytest.raises(ValueError, match=f"(?s)tuner.adapter_path={tmp_path}: .*({message})"):
        apply_tuner(load_model(start, "float32", "sdpa"), Tuner(**tuner, adapter_path=str(tmp_path)))


def test_an_unfrozen_part_without_an_adapter_is_told_lrn_2(start, tmp_path):
    """LRN-2: names of layers elsewhere, or an adapter that has none there. Its rate would do nothing."""
    names = {"type": "lora", "rank": 4, "target_modules": ["q_proj"]}
    open_parts = {"freeze_vit": False, "freeze_aligner": False}
    with pytest.raises(ValueError, match="tuner.freeze_(vit|aligner)=false: tuner.target_modules has no layer in it"):
        apply_tuner(load_model(start, "float32", "sdpa"), Tuner(**names, **open_parts))
    apply_tuner(load_model(start, "float32", "sdpa"), Tuner(**names)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tuner.freeze_vit=false: tuner.adapter_path has no layer in it"):
        apply_tuner(load_model(start, "float32", "sdpa"), Tuner(**names, freeze_vit=False, adapter_path=str(tmp_path)))
    apply_tuner(load_model(start, "float32", "sdpa"), Tuner(type="lora", rank=4, **open_parts))


def test_an_adapter_in_a_frozen_part_stays_active_but_frozen_lrn_2(start, tmp_path):
    """LRN-2."""
    tuner = {"type": "lora", "rank": 4}
    apply_tuner(load_model(start, "float32", "sdpa"), Tuner(**tuner, freeze_vit=False)).save_pretrained(tmp_path)
    again = apply_tuner(load_model(start, "float32", "sdpa"), Tuner(**tuner, adapter_path=str(tmp_path)))
    trained = {part_of(name) for name, p in again.named_parameters() if p.requires_grad}
    assert trained == {"llm"} and any(part_of(name) == "vit" for name in adapted(again))


@pytest.mark.parametrize(
    "tuner", [{"freeze_vit": False, "freeze_aligner": False}, {"type": "lora", "use_dora": True, "freeze_vit": False}]
)
def test_param_groups_have_their_own_rates_and_decay_lrn_2(model, tuner):
    """LRN-2: Every trainable parameter once; a rate of null falls back; one-dimensional ones and magnitudes do not
    decay."""
    model = apply_tuner(model, Tuner(**tuner))
    groups = param_groups(
        model,
        Training.model_construct(learning_rate=1e-4, vit_lr=1e-5, aligner_lr=None, embed_lr=0.0, weight_decay=0.1),
    )
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    rates = {"llm": 1e-4, "vit": 1e-5, "aligner": 1e-4, "embeddings": 0.0}
    names = {id(p): name for name, p in model.named_parameters()}
    for group in groups:
        assert group["lr"] == rates[group["name"].removesuffix("_no_decay")]
        for parameter in group["params"]:
            name = names[id(parameter)]
            decays = parameter.ndim > 1 and "magnitude" not in name
            assert group["weight_decay"] == (0.1 if decays else 0.0), name
            assert part_of(name) == group["name"].removesuffix("_no_decay")
    torch.optim.AdamW(groups)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "stage, tuner, family", [(3, "dora", "qwen3_vl"), (2, "full", "qwen3_vl"), (3, "full", "qwen3_5")]
)
def test_zero_ranks_with_unlike_rows_train_as_one_process_pck_8(start, tmp_path, stage, tuner, family):
    """PCK-8: Two ranks, one with images and one without, one without any segment: ZeRO does not hang, and after four
    steps the parameters are those of a single process that saw the same rows (PCK-5, LRN-2). A recurrent mixer, too,
    runs equally often on both, however many segments they have (FAM-1)."""
    start = start if family == "qwen3_vl" else build_family(family, tmp_path / family)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"  # DeepSpeed looks for ninja there
    run = subprocess.run(
        [*command, str(start), str(stage), tuner, str(tmp_path)],
        env=environment,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["largest_difference"] < (2e-6 if family == "qwen3_vl" else 5e-5)  # its gradients are larger
    torch.testing.assert_close(result["losses"], result["expected_losses"], rtol=1e-5, atol=0)


def zero_rank(start: str, stage: int, tuner: str, folder: str) -> None:
    """One rank: four steps of a `Learner` of two micro-steps, and of plain torch on all ranks' rows, compared.

    The ranks' labels fill chunks of logits unlike in number, which the learner must level.
    """
    import deepspeed

    from utils.config.load import build_config
    from utils.dist import Ranks
    from utils.learner import learner as learner_module

    full = {"type": "full", "freeze_vit": False, "freeze_aligner": False}
    dora = {"type": "lora", "use_dora": True, "rank": 4, "freeze_vit": False, "modules_to_save": ["embed_tokens"]}
    zero = Path(folder) / f"zero{stage}.json"
    zero.write_text(json.dumps({"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}))
    training = {"learning_rate": 1e-2, "vit_lr": 2e-3, "embed_lr": 4e-3, "weight_decay": 0.1, "max_grad_norm": 0.0}
    training |= {"adam_epsilon": 1e-2}  # a small one would turn rounding errors into whole steps
    training |= {"lr_scheduler": "constant", "gradient_accumulation_steps": 2, "gradient_checkpointing": True}
    matching = {"rollout_backend": "hf", "max_new_tokens": 32}
    cfg = build_config(
        {
            "model": {"path": start, "dtype": "float32"},
            "tuner": full if tuner == "full" else dora,
            "global_max_length": 128,
            "custom": {
                "trainer_variant": "rollout_matching_sft",
                "train_jsonl": "none",
                "extra": {"rollout_matching": matching},
            },
            "training": {"output_dir": folder, **training},
            "deepspeed": str(zero),
        }
    )
    ranks = Ranks()
    ranks.open()
    learner_module.chunk_labels = lambda stage: 8
    learner = learner_module.Learner(cfg, ranks, num_steps=4)
    set_seed(cfg.training.seed)
    single = apply_tuner(load_model(start, "float32", "sdpa"), cfg.tuner)
    plain = torch.optim.AdamW(param_groups(single, cfg.training), eps=1e-2)

    image, text = [make_segment(single, seed, (4, 6), 24) for seed in range(4)], make_segment(single, 9, None)
    steps = [  # [step][rank][micro-step]
        [[image[:2], image[2:]], [[text], []]],
        [[image[2:3], []], [[], []]],
        [[[], []], [[image[3], text], image[:1]]],
        [[[text], []], [[], [text]]],
    ]
    objective, losses, expected_losses = MatchingObjective(WEIGHTS), [], []
    for step, rows in enumerate(steps):
        batches = [collate(single, row) for own in rows for row in own]
        expected = [RowModel(single)(batch, scored(denominators(batches), 3))[0] for batch in batches]
        plain.zero_grad()
        sum(expected).backward()
        plain.step()
        expected_losses.append(float(sum(expected).detach()))
        own = [collate(learner.model, row) for row in rows[ranks.rank]]
        losses.append(learner.step(own, objective, step).losses["total"])
    differences = []
    for parameter, truth in zip(learner.model.parameters(), single.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            differences.append(float((parameter - truth).detach().abs().max()))
    if ranks.is_main:
        result = {"largest_difference": max(differences), "losses": losses, "expected_losses": expected_losses}
        (Path(folder) / "result.json").write_text(json.dumps(result))
    ranks.close()


def test_load_model_dtype_and_attention_cfg_17(start):
    """CFG-17."""
    model = load_model(start, "bfloat16", "eager")
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_cudnn_attention_is_off_pck_4(model):
    """PCK-4: it would make a plan for each new length of a segment, on GPUs where torch prefers it."""
    assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()


def test_another_architecture_is_refused_cfg_17(tmp_path):
    """CFG-17."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match=f"model.path={tmp_path}: a llama model, which is not .*use .* Qwen3-VL"):
        load_model(tmp_path)


def test_incomplete_checkpoint_is_refused_cfg_17(start, tmp_path):
    """CFG-17: transformers alone would initialise the missing tensor at random and continue."""
    tensors = load_file(start / "model.safetensors")
    del tensors["model.language_model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((start / "config.json").read_text())
    with pytest.raises(ValueError, match="lacks .*layers.1.mlp.up_proj.weight"):
        load_model(tmp_path, "float32")


def test_fused_kernels_patch_this_model_and_leave_the_loss_alone(monkeypatch):
    """CFG-17: the kernels that liger is told to replace; it needs CUDA, so a stand-in records them."""
    switches = {}
    liger = ModuleType("liger_kernel.transformers")
    liger.apply_liger_kernel_to_qwen3_vl = lambda **given: switches.update(given)
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    model = torch.nn.Linear(1, 1)
    model.config = SimpleNamespace(model_type="qwen3_vl")
    fuse_kernels(model)
    assert switches.pop("model") is model
    assert {name for name, on in switches.items() if on} == {"rope", "rms_norm"}
    assert {name for name, on in switches.items() if not on} == {"cross_entropy", "fused_linear_cross_entropy"}


if __name__ == "__main__":
    zero_rank(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
