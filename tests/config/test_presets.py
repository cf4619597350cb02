"""Every shipped preset on paper, with the released model's own config.json: header, plan, server arguments, the
learner's set-up, tuner targets, the tensors that sync sends (CFG-3, CFG-16, SRV-2, LRN-2, SYN-4, SYN-6, LRN-10).

Models stand on the meta device: real classes, names and shapes, no weights, no memory. What vLLM makes of it comes from
`engine_on_paper`, a process of its own.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.learner.test_model import smallest_image
from tools.plan import PRESETS, gpus_of, memory_line
from utils.config.load import Config, check_launch, load_config
from utils.config.memory import DEVICE_GIB, GIB, parameter_shapes
from utils.config.plan import make_plan, plan_layout
from utils.config.released import MODELS, known_model
from utils.families import part_of
from utils.learner import learner as learner_module
from utils.learner.learner import Learner
from utils.learner.model import base_model
from utils.run.setup import make_layout
from utils.sync.merged_weights import MergedWeights, whole_groups
from utils.targets import plain_segment

ROOT = Path(__file__).parents[2]
RELEASED = Path(__file__).with_name("qwen3vl_8b_config.json")  # Qwen/Qwen3-VL-8B-Instruct's
EIGHT = "Qwen3-VL-8B"
NAMES = [str(path.relative_to(ROOT)) for path in PRESETS]
WITH_SERVER = [name for name in NAMES if "stage1" not in name]
# vLLM builds each model for some 20 s; other families than Qwen3-VL take a run of all tests.
WITH_ENGINE = [
    pytest.param(name, marks=[] if known_model(load_config(name).model.path) == EIGHT else pytest.mark.slow)
    for name in WITH_SERVER
]
every_preset = pytest.mark.parametrize("name", NAMES)


def learners(name: str) -> int:
    return len(gpus_of(ROOT / name, "train|grpo"))


def test_the_presets_are_those_that_users_ask_for():
    """DoRA with and without the vision tower, LoRA and full fine-tuning; 3 + 1 and 6 + 2; both stages and GRPO."""
    tuners = {(name.split("/")[1], kind(load_config(name))) for name in NAMES}
    stage2 = {("stage2", "dora"), ("stage2", "dora vision"), ("stage2", "lora"), ("stage2", "full vision")}
    assert tuners == stage2 | {("stage1", "dora"), ("stage1", "full vision"), ("grpo", "lora"), ("grpo", "dora vision")}
    sizes = {(len(gpus_of(ROOT / name, "server")), learners(name)) for name in NAMES}
    assert {(3, 1), (6, 2), (0, 4), (0, 8)} <= sizes


def kind(cfg: Config) -> str:
    tuner = cfg.tuner
    assert tuner.freeze_vit == tuner.freeze_aligner and not tuner.freeze_llm
    return ("dora" if tuner.use_dora else tuner.type) + (" vision" if not tuner.freeze_vit else "")


@every_preset
def test_the_header_says_what_the_plan_says_CFG_16(name):
    """CFG-16: the commands, the GPUs and the memory per device (`python -m tools.plan --update-headers` writes it)."""
    text, cfg = (ROOT / name).read_text(), load_config(name)
    words = re.findall(r"^# (\w+): ", text.split("\n\n")[0], re.MULTILINE)
    assert words == ["Purpose", "Command", "Hardware", "Memory", "Expected"]
    commands = re.findall(r"^#.* (make .*)$", text, re.MULTILINE)
    assert commands == plan_layout(cfg, learners(name), name).commands
    assert memory_line(ROOT / name) in text.splitlines(), "run python -m tools.plan --update-headers"


@every_preset
def test_the_header_says_how_many_learners_to_plan_for_CFG_16(name):
    """CFG-16: `--world-size` is the number of GPUs that the header gives to `make train`."""
    header = (ROOT / name).read_text().split("\n\n")[0]
    hardware = re.search(r"^# Hardware: .*$", header, re.MULTILINE)[0]
    assert re.findall(r"--world-size (\d+)", hardware) == [str(learners(name))]


@pytest.mark.parametrize("page", ["README.md", "docs/training.md", "docs/runbook_grpo.md", *NAMES])
def test_dry_runs_are_for_as_many_learners_as_the_preset_has_CFG_16(page):
    """CFG-16: the command as written, without `--world-size` for one. `$CONFIG` is the preset that the page sets."""
    text = (ROOT / page).read_text()
    preset = next(iter(re.findall(r"^CONFIG=(\S+)|`CONFIG=(\S+)`", text, re.MULTILINE)), ("", ""))
    found = re.findall(r"python \S+ --config (\S+) --dry-run(?: --world-size (\d+))?", text)
    assert found or page in NAMES
    for config, number in found:
        name = "".join(preset) if config == "$CONFIG" else config
        assert int(number or 1) == learners(name), (page, config)


@every_preset
def test_the_plan_fits_its_hardware_CFG_16_DIS_2(name):
    """CFG-16, DIS-2: memory with 10 % to spare for what the estimate leaves out; a round of requests per micro-step."""
    cfg, world_size = load_config(name), learners(name)
    check_launch(cfg, world_size)
    plan = make_plan(cfg, world_size)
    assert sum(plan.learner_memory.values()) < 0.9 * DEVICE_GIB * GIB
    assert sum(server.world_size for server in plan.servers) == len(gpus_of(ROOT / name, "server"))
    assert plan.samples_per_step % world_size == 0
    if name in WITH_SERVER:
        share = cfg.server_settings().vllm_gpu_memory_utilization * DEVICE_GIB * GIB
        assert sum(plan.engines[0].memory.values()) < share and plan.rounds == 1 and plan.sync_mode == "full"
    else:
        assert (plan.servers, plan.chunk, plan.sync_mode) == ([], 0, "none")


# ---- the learner ---------------------------------------------------------------------------------------------------


def released(name: str) -> str:
    """The released model that a preset trains."""
    model = known_model(load_config(name).model.path)
    assert model is not None
    return model


def released_config(path: str) -> dict[str, Any]:
    model = known_model(path)
    return json.loads(RELEASED.read_text()) if model == EIGHT else MODELS[model]


@cache
def meta_learner(name: str) -> tuple[Learner, dict[str, Any]]:
    """The learner of a preset, set up as in training up to DeepSpeed, and what DeepSpeed was given."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    def load_model(path: str, dtype: str, attn_implementation: str) -> nn.Module:
        return AutoModelForImageTextToText.from_config(AutoConfig.for_model(**released_config(path))).bfloat16()

    given: dict[str, Any] = {}
    ranks = SimpleNamespace(rank=0, world_size=learners(name), device=torch.device("cpu"), is_main=True)
    ranks.gather = lambda value: [value] * ranks.world_size
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]), torch.device("meta"):
        patch.setattr(learner_module, "load_model", load_model)
        patch.setattr("deepspeed.initialize", lambda **values: (given.update(values), None, None))
        patch.setattr(learner_module, "partition", lambda module, config, device: given.update(partitioned=module))
        return Learner(load_config(name), ranks, num_steps=10), given


@every_preset
def test_the_learner_sets_up_and_trains_what_the_plan_counts_LRN_2(name):
    """LRN-2: every trained parameter is in one optimizer group with its part's learning rate, and no other."""
    cfg = load_config(name)
    learner, given = meta_learner(name)
    trained = {parameter for parameter in learner.model.parameters() if parameter.requires_grad}
    groups = given["optimizer"].param_groups
    assert sorted(id(p) for group in groups for p in group["params"]) == sorted(map(id, trained))
    assert sum(p.numel() for p in trained) == make_plan(cfg, learners(name)).model_size.trainable
    rates = {name.removesuffix("_no_decay"): rate for name, rate in learner._base_lrs.items()}
    parts = {"llm"} | ({"vit", "aligner"} if "vision" in kind(cfg) else set())
    parts |= {"embeddings"} if cfg.tuner.type == "full" or cfg.tuner.modules_to_save else set()
    assert set(rates) == parts and rates["llm"] == cfg.training.learning_rate
    assert rates.get("vit") == (cfg.training.vit_lr if "vit" in parts else None)
    assert base_model(learner.model).is_gradient_checkpointing == bool(cfg.training.gradient_checkpointing)
    assert given["config"]["train_batch_size"] == learners(name) * cfg.training.samples_per_rank
    assert ("partitioned" in given) == (given["config"]["zero_optimization"]["stage"] == 3)
    has_tiles = released(name).startswith("InternVL")
    dummy = plain_segment("", [1, 2], [], {}) if has_tiles else smallest_image(learner.model)
    batch = make_layout(cfg, learner, None, dummy)[1]([])
    assert batch.position_ids.shape[0] == (1 if has_tiles else 4)  # the real model's multimodal positions


# ---- what reaches the engine ----------------------------------------------------------------------------------------


def released_checkpoint() -> dict[str, tuple[int, ...]]:
    """Name -> shape of the 750 tensors in the index of Qwen3-VL-8B-Instruct, written down by hand."""
    hidden, kv, mlp, vit, vit_mlp, merged = 4096, 1024, 12288, 1152, 4304, 4608
    both = lambda name, out, *rest: {f"{name}.weight": (out, *rest), f"{name}.bias": (out,)}  # noqa: E731
    found: dict[str, tuple[int, ...]] = {"lm_head.weight": (151936, hidden)}
    text, visual = "model.language_model", "model.visual"
    found |= {f"{text}.embed_tokens.weight": (151936, hidden), f"{text}.norm.weight": (hidden,)}
    for i in range(36):
        layer = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        layer |= {"self_attn.q_norm": (128,), "self_attn.k_norm": (128,)}
        layer |= {"self_attn.q_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)}
        layer |= {"self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
        layer |= {"mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp)}
        found |= {f"{text}.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    found |= both(f"{visual}.patch_embed.proj", vit, 3, 2, 16, 16) | {f"{visual}.pos_embed.weight": (2304, vit)}
    for i in range(27):
        block = f"{visual}.blocks.{i}"
        found |= both(f"{block}.norm1", vit) | both(f"{block}.norm2", vit)
        found |= both(f"{block}.attn.qkv", 3 * vit, vit) | both(f"{block}.attn.proj", vit, vit)
        found |= both(f"{block}.mlp.linear_fc1", vit_mlp, vit) | both(f"{block}.mlp.linear_fc2", vit, vit_mlp)
    for merger, norm in [("merger", vit), *[(f"deepstack_merger_list.{i}", merged) for i in range(3)]]:
        found |= both(f"{visual}.{merger}.norm", norm)
        found |= both(f"{visual}.{merger}.linear_fc1", merged, merged)
        found |= both(f"{visual}.{merger}.linear_fc2", hidden, merged)
    return found


def test_the_released_checkpoint_is_whole():
    shapes = released_checkpoint()
    assert len(shapes) == 750 and sum(map(prod, shapes.values())) == 8_767_123_696


@every_preset
def test_sync_and_checkpoints_have_the_released_names_and_shapes_SYN_4_LRN_6(name):
    """SYN-4, LRN-6: whatever the tuner; an adapter sits exactly on the linear layers of the parts that train. Of other
    models than the 8B only the published number of parameters is known; vLLM takes their names below."""
    cfg, model = load_config(name), meta_learner(name)[0].model
    entries = MergedWeights(model).entries
    if released(name) != EIGHT:
        sizes = parameter_shapes(MODELS[released(name)])
        assert sum(prod(entry.shape) for entry in entries) == sum(map(prod, sizes.values()))
        adapted = [entry.name for entry in entries if entry.adapter]
        assert (
            adapted
            and {part_of(own) for own in adapted} == {"llm"}
            and not re.search(r"\.experts\.|\.mlp\.gate\.", str(adapted))
        )
        return
    assert {entry.name: entry.shape for entry in entries} == released_checkpoint()
    assert {entry.dtype for entry in entries} == {torch.bfloat16}
    adapted = {entry.name for entry in entries if entry.adapter}
    if cfg.tuner.type == "full":
        assert not adapted and all(entry.can_change for entry in entries)
        return
    linear = re.compile(r".*\.((q|k|v|o|gate|up|down)_proj|attn\.(qkv|proj)|linear_fc[12])\.weight")
    parts = {"llm", "vit", "aligner"} if "vision" in kind(cfg) else {"llm"}
    assert adapted == {own for own in released_checkpoint() if linear.fullmatch(own) and part_of(own) in parts}
    saved = {entry.name for entry in entries if entry.can_change} - adapted
    whole = {"model.language_model.embed_tokens.weight", "lm_head.weight"} if cfg.tuner.modules_to_save else set()
    assert saved == whole


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Callable[[str], dict[str, Any]]:
    """What vLLM says to the presets' server arguments and to the tensors of the model that a preset trains."""
    of_model = cache(lambda model: engine_of(model, tmp_path_factory.mktemp("released")))
    return lambda name: of_model(released(name))


def engine_of(model: str, folder: Path) -> dict[str, Any]:
    presets = [name for name in WITH_SERVER if released(name) == model]
    shapes = {entry.name: entry.shape for entry in MergedWeights(meta_learner(presets[0])[0].model).entries}
    if model == EIGHT:
        assert shapes == released_checkpoint()
        shutil.copy(RELEASED, folder / "config.json")
    else:
        released_model = base_model(meta_learner(presets[0])[0].model)
        config = released_model.config.to_dict()
        config |= {"architectures": [type(released_model).__name__], "dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    command = [sys.executable, "-m", "tests.config.engine_on_paper", str(folder), *presets]
    result = subprocess.run(command, input=json.dumps(shapes), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", WITH_ENGINE)
def test_vllm_takes_the_servers_arguments_SRV_2_CFG_15(engines, name):
    """SRV-2, CFG-15: its own config can be built of them, and says what the preset says."""
    cfg = load_config(name)
    settings = cfg.server_settings()
    assert engines(name)["presets"][name] == {
        "devices": len(gpus_of(ROOT / name, "server")),
        "dtype": "torch.bfloat16",
        "max_model_len": settings.vllm_max_model_len,
        "memory_share": settings.vllm_gpu_memory_utilization,
        "transfer": "stream_nccl",
        "architecture": type(base_model(meta_learner(name)[0].model)).__name__,
        "max_pixels": cfg.model.image_max_pixels,
    }


@pytest.mark.parametrize("name", WITH_ENGINE)
def test_a_sync_fills_whole_parameters_of_the_engine_SYN_6(engines, name):
    """SYN-6: the first sync every one; a later one whole groups, of which adapters on all linear layers leave out only
    biases."""
    engine = engines(name)
    parameters = {tensor: own for tensor, own in engine["parameters"].items() if tensor}
    assert engine["parameters"][""] == [] and all(parameters.values())
    changing = {entry.name for entry in MergedWeights(meta_learner(name)[0].model).entries if entry.can_change}
    sent = whole_groups(changing, parameters)
    assert all(tensor.endswith(".bias") for tensor in sent - changing)
    if released(name) == EIGHT:
        assert len(changing) == 252 + (27 * 4 + 8) * ("vision" in kind(load_config(name))) or sent == set(parameters)
