"""The checks of a model at start: every family passes, and each fault that they are there for is found (FAM-3)."""

import sys
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.families import build_family
from utils.data.encoding import load_processor
from utils.data.images import open_image
from utils.data.samples import Sample
from utils.families import FAMILIES
from utils.learner import attention
from utils.learner.model import RowModel, load_model
from utils.run import setup, start_checks
from utils.run.start_checks import check_model, make_prompts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Function from a `model_type` to its checkpoint directory."""
    return cache(lambda family: build_family(family, tmp_path_factory.mktemp(family)))


def learner_of(model: nn.Module) -> SimpleNamespace:
    def hidden_states(batches):
        with torch.no_grad():
            return [RowModel(model).hidden_states(batch).flatten(0, 1) for batch in batches]

    return SimpleNamespace(model=model, hidden_states=hidden_states)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family_passes_FAM_3(family, dtype, checkpoint, monkeypatch):
    """FAM-3: with more than twice as much room as it needs."""
    path = checkpoint(family)
    for bound in ("EXACT", "FIRST", "LEAST"):
        monkeypatch.setattr(start_checks, bound, getattr(start_checks, bound) / 2)
    check_model(learner_of(load_model(path, dtype)), load_processor(path), is_packed=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["the mixer's state", "the text row", "positions"])
def test_a_row_that_is_not_its_segments_is_found_FAM_3_PCK_4(fault, dtype, checkpoint, monkeypatch):
    """FAM-3, PCK-4: a recurrent state that goes on into the next segment, attention over borders, wrong positions."""
    if fault == "the mixer's state":
        monkeypatch.setattr("utils.learner.attention.isolate_mixers", lambda model, name: None)
    family = "qwen3_5" if fault == "the mixer's state" else "qwen2_5_vl"
    path = checkpoint(family)
    model = load_model(path, dtype, "eager" if fault == "the text row" else "sdpa")
    position_ids_for = start_checks.position_ids_for
    wrong = {"the text row": lambda own: own[1:], "positions": lambda own: torch.cat([own[:1], own[1:] * 2])}
    if fault in wrong:
        positions, change = position_ids_for(model), wrong[fault]
        changed = lambda ids, vision: change(positions(ids, vision))  # noqa: E731
        monkeypatch.setattr(start_checks, "position_ids_for", lambda _: changed)
    with pytest.raises(ValueError, match="packing changes the model's output: .* of their norm"):
        check_model(learner_of(model), load_processor(path), is_packed=True)


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.mixer])
def test_kernels_that_take_borders_run_once_a_row_and_are_proven_FAM_1_FAM_3(family, takes, checkpoint, monkeypatch):
    """FAM-1, FAM-3: the kernels themselves need a GPU. Here stand-ins of their signatures take the borders of segments;
    transformers' own code ignores them, which the check finds."""
    monkeypatch.setattr(attention, "kernels_take_borders", lambda: True)
    path, rows = checkpoint(family), []
    model = load_model(path, "float32")
    code = sys.modules[type(model.model.language_model).__module__]
    delta_rule, convolution = code.torch_chunk_gated_delta_rule, code.causal_conv1d_fn

    def delta_rule_with_borders(query, key, value, *, g, beta, cu_seqlens, **kwargs):
        assert cu_seqlens.dtype == torch.int32
        rows.append(lengths := cu_seqlens.diff().tolist())
        parts = zip(*(tensor.split(lengths, dim=1) for tensor in (query, key, value, g, beta)), strict=True)
        found = [delta_rule(q, k, v, g=gate, beta=b, **kwargs)[0] for q, k, v, gate, b in parts]
        return torch.cat(found, dim=1), None

    def convolution_with_borders(hidden_states, weight, bias=None, activation=None, seq_idx=None, **_):
        assert seq_idx.dtype == torch.int32 and seq_idx.shape == (1, hidden_states.shape[2])
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        parts = hidden_states.split(lengths, dim=2)
        return torch.cat([convolution(part, weight, bias, activation=activation) for part in parts], dim=2)

    if takes:
        monkeypatch.setattr(code, "torch_chunk_gated_delta_rule", delta_rule_with_borders)
        monkeypatch.setattr(code, "causal_conv1d_fn", convolution_with_borders)
        check_model(learner_of(model), load_processor(path), is_packed=True)
        assert max(map(len, rows)) > 1
    else:
        with pytest.raises(ValueError, match="packing changes the model's output: .* of their norm"):
            check_model(learner_of(model), load_processor(path), is_packed=True)


def test_a_part_without_parameters_is_found_FAM_1(checkpoint):
    """FAM-1: a model whose modules the record does not name would train its vision tower as its language model."""
    path = checkpoint("qwen3_vl")
    model = load_model(path, "float32")
    model.model.tower = model.model.visual
    del model.model.visual
    with pytest.raises(ValueError, match="no parameter of the model belongs to its vit"):
        check_model(learner_of(model), load_processor(path), is_packed=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompts_that_an_engine_must_make_are_the_processors_own_FAM_3_ROL_3(family, checkpoint):
    """FAM-3, ROL-3: one odd-sized image, and two; a run's probe brings them; those too long are left out."""
    processor = load_processor(checkpoint(family))
    cfg = SimpleNamespace(global_max_length=4096, rs=None, generates=True)
    sample = make_sample(FAMILIES[family].name)
    learner = SimpleNamespace(last_logprobs=lambda *_: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "length_limit", lambda cfg: ("", cfg.global_max_length))
        probe = setup.make_probe(cfg, sample, processor, None, learner, lambda segments: None)
    assert [len(request["images"]) for request, _ in probe.prompts] == [1, 2]
    for request, ids in probe.prompts:
        how = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        text = processor.apply_chat_template(request["messages"], **how)
        images = [open_image(image) for image in request["images"]]
        assert ids == processor(text=[text], images=images, return_tensors="pt")["input_ids"][0].tolist()
    longest = max(len(ids) for _, ids in probe.prompts)
    assert len(make_prompts(processor, longest)) == 1


def make_sample(text: str) -> Sample:
    return Sample("s", [], [], 0, 0, [], [{"role": "user", "content": text}], "here", {}, None)
