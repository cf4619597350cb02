"""The merged-weight source against PEFT's own merge, and the sender's handling of failure (section SYN)."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForImageTextToText

from utils.sync.merged_weights import _MERGE_BLOCK_BYTES, Adapter, MergedWeights, _merge_into


@pytest.fixture(scope="module")
def base_model(start_model):
    return AutoModelForImageTextToText.from_pretrained(start_model, dtype=torch.float32)


def tuned(base_model, *, use_dora: bool, modules_to_save=None, dtype=torch.float32):
    """A PEFT model whose adapters are far from their start, so that a wrong merge shows."""
    torch.manual_seed(1)
    config = LoraConfig(
        r=4,
        lora_alpha=16,
        use_dora=use_dora,
        target_modules="all-linear",
        modules_to_save=modules_to_save,
        ensure_weight_tying=bool(modules_to_save),
    )
    model = get_peft_model(copy.deepcopy(base_model).to(dtype), config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def merged_by_peft(model):
    return dict(copy.deepcopy(model).merge_and_unload().state_dict())


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("modules_to_save", [None, ["embed_tokens"]])
def test_stream_equals_pefts_merge_bit_for_bit_in_float32_SYN_4(base_model, use_dora, modules_to_save):
    """SYN-4."""
    model = tuned(base_model, use_dora=use_dora, modules_to_save=modules_to_save)
    expected = merged_by_peft(model)
    streamed = dict(MergedWeights(model).tensors())
    assert set(expected) - set(streamed) == {"lm_head.weight"}  # tied: travels as the embedding
    for name, tensor in streamed.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("use_dora", [False, True])
def test_bf16_merge_is_rounded_once_SYN_4(base_model, use_dora):
    """SYN-4."""
    model = tuned(base_model, use_dora=use_dora, dtype=torch.bfloat16)
    exact = merged_by_peft(copy.deepcopy(model).float())
    for name, tensor in MergedWeights(model).tensors():
        assert torch.equal(tensor, exact[name].to(torch.bfloat16)), name


def test_names_and_shapes_are_the_checkpoints_SYN_4(base_model, start_model):
    """SYN-4."""
    with safe_open(start_model / "model.safetensors", "pt") as file:
        on_disk = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    entries = MergedWeights(tuned(base_model, use_dora=True)).entries
    assert {entry.name: entry.shape for entry in entries} == on_disk


def test_training_weights_are_never_modified_SYN_4(base_model):
    """SYN-4."""
    model = tuned(base_model, use_dora=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(20):
        for _ in MergedWeights(model).tensors():
            pass
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_merging_in_blocks_of_rows_equals_merging_at_once_SYN_5(monkeypatch):
    """SYN-5."""
    torch.manual_seed(0)
    weight, a, b, m = torch.randn(37, 24), torch.randn(4, 24), torch.randn(37, 4), torch.rand(37)
    adapter = Adapter(*(torch.nn.Parameter(t) for t in (a, b)), scaling=2.0, magnitude=torch.nn.Parameter(m))
    whole, blocks = torch.empty(37, 24), torch.empty(37, 24)
    _merge_into(whole, weight, adapter)
    monkeypatch.setitem(_MERGE_BLOCK_BYTES, "cpu", 5 * 24 * 4)
    _merge_into(blocks, weight, adapter)
    torch.testing.assert_close(blocks, whole, rtol=1e-6, atol=1e-6)


def test_frozen_tensors_without_adapter_cannot_change_SYN_6(base_model):
    """SYN-6."""
    entries = MergedWeights(tuned(base_model, use_dora=False)).entries
    can_change = {entry.name for entry in entries if entry.can_change}
    assert "model.language_model.layers.0.self_attn.q_proj.weight" in can_change
    assert "model.language_model.norm.weight" not in can_change


def test_what_cannot_be_merged_is_refused_by_name_SYN_4(base_model):
    """SYN-4."""
    model = get_peft_model(copy.deepcopy(base_model), LoraConfig(r=4, target_modules=["embed_tokens"]))
    with pytest.raises(ValueError, match="embed_tokens"):
        MergedWeights(model)
