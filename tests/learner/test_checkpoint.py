"""Finished models on disk: what was written loads again as the same weights."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForImageTextToText

from utils.config.schema import Tuner
from utils.data.encoding import load_processor
from utils.dist import DistributedError, Ranks
from utils.learner import checkpoint
from utils.learner.checkpoint import save_adapter, save_merged
from utils.learner.model import apply_tuner, load_model
from utils.sync.merged_weights import MergedWeights

DORA = {"type": "lora", "use_dora": True, "rank": 4, "modules_to_save": ["embed_tokens"]}


@pytest.fixture
def trained(start_model) -> nn.Module:
    return trained_of(start_model, DORA)


def trained_of(start_model, tuner: dict) -> nn.Module:
    """A model whose adapter has an effect."""
    model = apply_tuner(load_model(start_model, "float32"), Tuner(**tuner))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(MergedWeights(model).tensors())


def assert_same_weights(found: nn.Module, expected: nn.Module) -> None:
    ours, theirs = weights_of(found), weights_of(expected)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_merged_model_in_several_shards_loads_as_it_is_LRN_6(tmp_path, start_model, trained, ranks, monkeypatch):
    """LRN-6: every tensor once, in the shard that the index names; side files are copied, old weights are not."""
    monkeypatch.setattr(checkpoint, "_MAX_SHARD_BYTES", 1 << 20)
    save_merged(trained, str(start_model), tmp_path / "merged", ranks)
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in (tmp_path / "merged").glob("*.safetensors"))
    assert len(shards) > 3 and sorted(set(index["weight_map"].values())) == shards
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights_of(trained).values())
    assert (tmp_path / "merged" / "config.json").exists() and not (tmp_path / "merged.partial").exists()
    assert_same_weights(load_model(tmp_path / "merged", "float32"), trained)


@pytest.mark.parametrize(("before", "trained_in"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_merged_model_loads_in_the_dtype_that_was_trained_LRN_6(tmp_path, start_model, ranks, before, trained_in):
    """LRN-6: by its config a loader would round it, or take twice the memory; older configs say `torch_dtype`."""
    source = tmp_path / "start"
    shutil.copytree(start_model, source)
    config = json.loads((source / "config.json").read_text())
    config |= {"dtype": before, "text_config": config["text_config"] | {"dtype": before}}
    config["vision_config"] = config["vision_config"] | {"torch_dtype": before}
    (source / "config.json").write_text(json.dumps(config))
    model = load_model(source, trained_in)
    save_merged(model, str(source), tmp_path / "merged", ranks)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged")
    assert {parameter.dtype for parameter in loaded.parameters()} == {getattr(torch, trained_in)}
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert written["dtype"] == written["text_config"]["dtype"] == trained_in
    assert written["vision_config"]["torch_dtype"] == trained_in
    assert written["architectures"] == config["architectures"]
    assert_same_weights(load_model(tmp_path / "merged", trained_in), model)


@pytest.mark.parametrize("released", ["nested", "of its own", "older names"])
def test_a_merged_model_resizes_images_as_the_run_did_LRN_6(tmp_path, start_model, trained, ranks, released):
    """LRN-6: the run's limits become the processor's own, in the file that released models have them in."""
    source = shutil.copytree(start_model, tmp_path / "source")
    if released != "nested":
        config = json.loads((source / "processor_config.json").read_text())
        own = config.pop("image_processor")
        if released == "older names":
            own |= {"min_pixels": own["size"]["shortest_edge"], "max_pixels": own.pop("size")["longest_edge"]}
        (source / "preprocessor_config.json").write_text(json.dumps(own))
        (source / "processor_config.json").write_text(json.dumps(config))
    for path in source.iterdir():
        path.chmod(0o444)  # a model that several users share
    before = load_processor(source).image_processor.size
    save_merged(trained, str(source), tmp_path / "as_it_was", ranks)
    save_merged(trained, str(source), tmp_path / "merged", ranks, (1024, 65536))
    save_merged(trained, str(source), tmp_path / "larger", ranks, (None, 65536))
    assert load_processor(tmp_path / "as_it_was").image_processor.size == before
    size = load_processor(tmp_path / "merged").image_processor.size
    assert (size["shortest_edge"], size["longest_edge"]) == (1024, 65536)
    assert all(path.stat().st_mode & 0o200 for path in (tmp_path / "merged").iterdir())
    size = load_processor(tmp_path / "larger").image_processor.size
    assert (size["shortest_edge"], size["longest_edge"]) == (before["shortest_edge"], 65536)


def test_an_adapter_loads_as_it_is_and_full_tuning_has_none_LRN_6(tmp_path, start_model, trained, ranks):
    """LRN-6: whole modules beside the adapter included."""
    save_adapter(trained, tmp_path / "adapter", ranks)
    again = apply_tuner(load_model(start_model, "float32"), Tuner(**DORA, adapter_path=str(tmp_path / "adapter")))
    assert_same_weights(again, trained)
    save_adapter(load_model(start_model, "float32"), tmp_path / "full", ranks)
    assert not (tmp_path / "full").exists()


def test_an_adapter_keeps_its_frozen_parts_LRN_6(tmp_path, start_model, ranks):
    """LRN-6: those of the vision tower of an earlier run, which `freeze_vit` keeps in force but does not train."""
    tuner = {"type": "lora", "use_dora": True, "rank": 4}
    save_adapter(trained_of(start_model, tuner | {"freeze_vit": False}), tmp_path / "before", ranks)
    resumed = Tuner(**tuner, adapter_path=str(tmp_path / "before"))
    model = apply_tuner(load_model(start_model, "float32"), resumed)
    save_adapter(model, tmp_path / "after", ranks)
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("before", "after"))
    assert any(".visual." in name for name in before) and not all(own.requires_grad for own in model.parameters())
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_folder_that_cannot_be_written_is_an_error_of_all_ranks_LRN_6(tmp_path, start_model, trained, ranks: Ranks):
    """LRN-6."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DistributedError, match="saving .*merged failed on 1 of 1 ranks"):
        save_merged(trained, str(start_model), tmp_path / "file" / "merged", ranks)
