"""`utils.families`: the records, and where each of their facts is used (FAM-1, FAM-2)."""

import dataclasses
import json
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.config.test_load import edited
from tests.e2e.processes import config_of
from tests.families import build_family
from tools.add_coord_tokens import add_coord_tokens
from utils.config.load import ConfigError, build_config
from utils.config.plan import make_plan
from utils.config.schema import Config
from utils.data.encoding import load_processor
from utils.families import FAMILIES, Family, family_from, family_in, part_of
from utils.learner.model import adapter_targets, load_model
from utils.run import setup
from utils.run.program import model_problems
from utils.server import launch
from utils.sync.merged_weights import MergedWeights


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Function from a `model_type` to its checkpoint directory."""
    return cache(lambda family: build_family(family, tmp_path_factory.mktemp(family)))


@pytest.mark.parametrize("model_type", [None, "glm4v", "qwen2_vl", "gemma4"])
def test_a_family_without_a_record_is_refused_by_name_FAM_2(model_type):
    """FAM-2."""
    with pytest.raises(ValueError, match=f"a {model_type} model, .* use one of Qwen3-VL .qwen3_vl., Qwen3-VL-MoE"):
        family_from({"model_type": model_type})


def test_a_family_without_a_record_is_refused_before_anything_heavy_FAM_2(checkpoint, tmp_path, monkeypatch, capsys):
    """FAM-2: before the processor is loaded, a port opened or a model read."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    monkeypatch.setattr(setup, "load_processor", lambda *_: pytest.fail("went on"))
    cfg = SimpleNamespace(model=SimpleNamespace(path=str(tmp_path)))
    with pytest.raises(SystemExit) as end:
        setup.load_tokenizer(cfg)
    message = f"model.path={tmp_path}: a llava model, which is not supported; use one of"
    assert end.value.code == 2 and capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize(("family", "reason"), [("gemma4", "sliding-window"), ("internvl_chat", "-HF checkpoint")])
def test_a_family_is_refused_with_its_reason_FAM_2(family, reason):
    with pytest.raises(ValueError, match=rf"a {family} model, which is not supported \(.*{reason}.*\); use one of"):
        family_from({"model_type": family})


def test_a_checkpoints_own_code_does_not_run_to_tell_its_family_FAM_2(tmp_path, monkeypatch):
    """FAM-2: nor does transformers ask on the terminal whether it may."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    own = {"model_type": "internvl_chat", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    with pytest.raises(ValueError, match="an? internvl_chat model, which is not supported"):
        family_in(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OSError, match="no config.json with a model_type"):
        family_in(tmp_path)
    for content in ("[]", "3", '{"model_type": "qwen3_vl", "text_config": null}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match="config.json, and text_config in it, must be JSON objects"):
            family_in(tmp_path)


def test_a_new_record_names_its_own_parts_FAM_1(monkeypatch):
    """FAM-1: whoever adds a record changes nothing else."""
    record = Family("SmolVLM", "vision_model", frozenset({"connector"}))
    monkeypatch.setitem(FAMILIES, "smolvlm", record)
    assert part_of("model.vision_model.encoder.layers.0.mlp.fc1.weight") == "vit"
    assert part_of("model.connector.modality_projection.proj.weight") == "aligner"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_parts_name_is_the_same_whoever_asks_FAM_1(family, checkpoint):
    """FAM-1: names alone give the part that the family's own record gives, in memory and in the files."""
    record = FAMILIES[family]
    for name, _ in load_model(checkpoint(family), "float32").named_parameters():
        pieces = set(name.split("."))
        expected = "aligner" if pieces & record.aligner else "vit" if record.vit in pieces else None
        assert (part_of(name) if part_of(name) in ("aligner", "vit") else None) == expected, name
        assert part_of(name.removeprefix("model.")) == part_of(f"base_model.model.{name}") == part_of(name)


def test_adapters_on_experts_are_refused_FAM_3_SYN_4(checkpoint):
    """FAM-3, SYN-4: PEFT's adapters of parameters that are no linear layer's would silently not be merged."""
    model = load_model(checkpoint("qwen3_vl_moe"), "float32")
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    with pytest.raises(ValueError, match="experts.*ParamWrapper cannot be merged"):
        MergedWeights(get_peft_model(model, config))


def test_names_of_experts_are_told_before_the_model_is_loaded_FAM_2(checkpoint, caplog):
    """FAM-2: the usual list of all projections. The shared expert of Qwen3.5 is a plain layer."""
    usual = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    rule = "gate_proj, up_proj, down_proj are experts here, which take no adapters; leave them out, or set"

    def cfg_of(family: str, targets: list[str]) -> Config:
        return build_config(
            edited(model__path=str(checkpoint(family)), tuner={"type": "lora", "target_modules": targets})
        )

    (told,) = model_problems(cfg_of("qwen3_vl_moe", usual))
    assert 'tuner.target_modules=["q_proj", ' in told and rule in told
    with pytest.raises(ConfigError, match=rule):
        make_plan(cfg_of("qwen3_vl_moe", usual), 1)
    for family, targets in (("qwen3_vl_moe", usual[:4]), ("qwen3_5_moe", usual), ("qwen3_vl", usual)):
        assert model_problems(cfg_of(family, targets)) == []
    shared = cfg_of("qwen3_5_moe", usual)
    adapter_targets(load_model(shared.model.path, "float32"), shared.tuner)
    assert "of the experts only the shared one gets adapters" in caplog.text


def test_what_trains_and_is_never_sent_is_refused_FAM_3_SYN_4():
    """FAM-3, SYN-4: here a parameter that a wrapper hides from the walk over the model."""
    model = nn.Sequential(nn.Linear(4, 3))
    assert len(MergedWeights(model).entries) == 2
    hidden = nn.Linear(3, 2)
    own = partial(nn.Module.named_parameters, model)
    model.named_parameters = lambda recurse=True: [*own(recurse=recurse), *[("hidden", hidden.weight)] * recurse]
    with pytest.raises(ValueError, match=r"\['hidden'\] would be trained but are in no tensor"):
        MergedWeights(model)
    hidden.requires_grad_(False)
    MergedWeights(model)


def test_experts_travel_as_the_release_holds_them_FAM_1_SYN_4(checkpoint):
    """FAM-1, SYN-4: 4 experts, 128 in, 2 x 96 in between; all other tensors as they are."""
    model = load_model(checkpoint("qwen3_vl_moe"), "float32")
    weights = MergedWeights(model)
    experts = {entry.name: entry.shape for entry in weights.entries if entry.is_transposed}
    assert len(experts) == 2 * model.config.text_config.num_hidden_layers
    assert set(experts.values()) == {(4, 128, 192), (4, 96, 128)}
    for name, tensor in weights.tensors():
        own = model.get_parameter(name)
        assert torch.equal(tensor, own.transpose(1, 2) if name in experts else own)


def test_what_cpu_kernels_cannot_do_is_refused_by_name_FAM_2(checkpoint):
    """FAM-2: vLLM 0.32's recurrent mixers and experts; with a GPU, or a family without them, nothing is asked for."""

    def problems(family: str, device="cpu", dtype="float32", cached=True, slots=False) -> list[str]:
        settings = SimpleNamespace(allow_remote=False, vllm_max_model_len=64, vllm_enable_lora=slots)
        settings.vllm_enable_prefix_caching, settings.vllm_engine_kwargs = cached, {}
        settings.vllm_tensor_parallel_size = 1
        model = SimpleNamespace(path=str(checkpoint(family)), dtype=dtype)
        address = SimpleNamespace(host="127.0.0.1")
        own = SimpleNamespace(settings=settings, model=model, device=device, address=address, world_size=1)
        own.data_parallel_size = 1
        return launch.problems_of(SimpleNamespace(**vars(own), num_devices=1), None)

    assert problems("qwen2_5_vl", slots=True) == []  # its settings are not nested
    assert problems("qwen3_5") == [
        "model.dtype=float32: Qwen3.5 on CPU needs bfloat16",
        "rollout_server.vllm_enable_prefix_caching: Qwen3.5 on CPU needs false",
    ]
    assert problems("qwen3_5", dtype="bfloat16", cached=False) == []
    assert problems("qwen3_5", device="cuda") == problems("qwen3_vl", slots=True) == []
    assert problems("qwen3_vl_moe", slots=True) == [
        "rollout_server.vllm_enable_lora: Qwen3-VL-MoE on CPU needs false, as experts with slots want a GPU"
    ]
    assert problems("qwen3_vl_moe", "cuda", slots=True) == problems("qwen3_vl_moe") == []


def test_replicas_with_experts_have_no_slots_SYN_10(checkpoint, tmp_path):
    """SYN-10: vLLM 0.32 removes all adapters with each dummy batch that a replica without requests runs."""

    def problems(family: str, replicas: int, has_slots: bool) -> list[str]:
        settings = {"vllm_enable_lora": has_slots, "vllm_data_parallel_size": replicas}
        config = config_of(tmp_path, checkpoint(family), "http://127.0.0.1:8080", 8081, settings)
        config["custom"]["extra"]["rollout_matching"]["vllm"]["enable_lora"] = has_slots
        config |= {"tuner": {"type": "lora"}} if has_slots else {}
        own = dataclasses.replace(launch.resolve(build_config(config), 0), device="cuda", num_devices=replicas)
        return launch.problems_of(own, None)

    assert (
        problems("qwen3_vl_moe", 1, True) == problems("qwen3_vl_moe", 2, False) == problems("qwen3_vl", 2, True) == []
    )
    assert problems("qwen3_vl_moe", 2, True) == [
        "rollout_server.vllm_data_parallel_size=2: a model with experts needs 1 where vllm_enable_lora is true; set it "
        "to 1, or vllm_enable_lora to false"
    ]


def test_pixel_limits_are_refused_where_images_are_tiled_FAM_2(checkpoint):
    """FAM-2: InternVL cuts images into tiles of one size."""
    path = checkpoint("internvl")
    assert load_processor(path)
    with pytest.raises(ValueError, match="no limits in pixels; leave image_min_pixels and image_max_pixels out"):
        load_processor(path, max_pixels=64 * 64)


@pytest.mark.parametrize("family", FAMILIES)
def test_coordinate_tokens_are_added_to_every_family_FAM_2(family, checkpoint, tmp_path, monkeypatch):
    """FAM-2: embeddings grow under whatever name the files have, and nothing else changes."""
    monkeypatch.setattr("tools.add_coord_tokens.TOKENS", [f"<|new_{k}|>" for k in range(1000)])
    before = load_model(checkpoint(family), "float32")
    after = load_model(add_coord_tokens(checkpoint(family), tmp_path / "out"), "float32")
    rows = before.config.text_config.vocab_size
    assert after.config.text_config.vocab_size >= rows + 1000
    for name, own in before.named_parameters():
        grown = after.get_parameter(name)
        assert torch.equal(grown[:rows] if part_of(name) == "embeddings" else grown, own), name
