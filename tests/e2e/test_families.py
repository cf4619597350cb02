"""One conformance suite for all model families, on tiny random checkpoints (FAM-1 to FAM-3).

The first half needs no engine: prompts, positions, rows, parts, merged weights and checkpoints, each against
transformers' or PEFT's own. The second half has a rollout server of the family.
"""

import copy
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from transformers import AutoModelForImageTextToText

from tests.e2e import processes
from tests.e2e.processes import Server, run_learner, write_yaml
from tests.e2e.test_adapter_sync import open_sync as open_adapter_sync
from tests.e2e.test_grpo import REWARDS
from tests.e2e.test_partial_sync import open_sync
from tests.e2e.test_server import assert_serves
from tests.families import build_family
from tests.rollout.test_hf import Engine
from tools.make_demo import make_dataset
from utils.config.memory import model_size
from utils.config.schema import Tuner
from utils.data.encoding import dummy_segment, encode_prompt, load_processor, num_prompt_tokens, prompt_chat
from utils.data.images import open_image
from utils.data.samples import Sample
from utils.families import FAMILIES, PARTS, part_of
from utils.learner.checkpoint import save_merged
from utils.learner.model import RowModel, apply_tuner, enable_gradient_checkpointing, load_model, position_ids_for
from utils.packing import NO_IDS, collate_packed, collate_padded
from utils.rollout.backend import RolloutContext, RolloutRequest, RolloutSampling
from utils.rollout.hf import HfEngine
from utils.sync.merged_weights import MergedWeights
from utils.sync.weight_sync import Probe
from utils.targets import plain_segment

ANSWER = [40, 41, 42, 43, 44, 45]
SIZES = {"odd": [(77, 50)], "two": [(64, 64), (30, 180)], "text": []}  # pixels of each sample's images
TRAINED = {"freeze_vit": False, "freeze_aligner": False}
TUNERS = {
    "full": {"type": "full"} | TRAINED,
    "lora": {"type": "lora", "rank": 4, "use_dora": False} | TRAINED,
    "dora": {"type": "lora", "rank": 4, "use_dora": True} | TRAINED,
}
SLOTTED = Tuner(type="lora", rank=4, target_modules=["q_proj", "v_proj", "o_proj"])
every_family = pytest.mark.parametrize("family", FAMILIES)
WITH_SLOTS = [family for family in FAMILIES if not family.endswith("_moe")]  # experts with slots want a GPU in vLLM


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Function from a `model_type` to its checkpoint directory."""
    return cache(lambda family: build_family(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> list[Sample]:
    folder = tmp_path_factory.mktemp("images")
    return [make_sample(folder, name, sizes) for name, sizes in SIZES.items()]


def make_sample(folder: Path, name: str, sizes: list[tuple[int, int]]) -> Sample:
    """A sample with a noise image of each size, one in front of the text and the others behind it."""
    torch.manual_seed(7)
    paths = []
    for index, size in enumerate(sizes):
        noise = torch.randint(256, (size[1], size[0], 3), dtype=torch.uint8).numpy()
        paths.append(str(folder / f"{name}_{index}.png"))
        Image.fromarray(noise).save(paths[-1])
    text = "<image>" * bool(sizes) + f"Find the {name} object" + "and <image>" * (len(sizes) - 1)
    heights_and_widths = [(height, width) for width, height in sizes]
    messages = [{"role": "user", "content": text}]
    return Sample(name, paths, heights_and_widths, 0, 0, [], messages, name, {}, None)


def own_inputs(sample: Sample, processor, answer: Sequence[int] = ANSWER) -> dict[str, torch.Tensor]:
    """The processor's own encoding of a sample and the answer behind it."""
    how = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    text = processor.apply_chat_template(prompt_chat(sample), **how)
    images = [open_image(image) for image in sample.images] or None
    inputs = dict(processor(text=[text], images=images, return_tensors="pt"))
    inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([list(answer)], dtype=torch.int64)], dim=1)
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = nn.functional.pad(inputs["mm_token_type_ids"], (0, len(answer)))
    del inputs["attention_mask"]
    return inputs


def logits_alone(path: Path, samples: list[Sample]) -> list[torch.Tensor]:
    """transformers' own logits [L, V] of each sample by itself, under its own attention, with its own positions."""
    model, processor = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32), load_processor(path)
    with torch.no_grad():
        return [model(**own_inputs(sample, processor), use_cache=False).logits[0] for sample in samples]


def layout(model: nn.Module, processor) -> dict:
    return {"position_ids_fn": position_ids_for(model), "coord_ids": NO_IDS, "dummy": dummy_segment(processor)}


def segments_of(samples: list[Sample], processor) -> list:
    return [plain_segment(s.id, **vars(encode_prompt(s, processor)), answer_ids=ANSWER) for s in samples]


@every_family
def test_the_prompt_is_the_processors_own_FAM_1_ROL_3(family, checkpoint, samples):
    """FAM-1, ROL-3: an odd-sized image, two images, none; the length is known without opening an image."""
    processor = load_processor(checkpoint(family))
    for sample in samples:
        encoded, own = encode_prompt(sample, processor), own_inputs(sample, processor)
        assert encoded.prompt_token_ids + ANSWER == own["input_ids"][0].tolist()
        assert all(torch.equal(tensor, own[name]) for name, tensor in encoded.vision.items())
        assert bool(encoded.vision) == bool(sample.images)
        assert num_prompt_tokens(sample, processor) == len(encoded.prompt_token_ids)


@every_family
@pytest.mark.parametrize("collate", [collate_packed, collate_padded])
def test_a_row_equals_its_segments_alone_FAM_3_PCK_4(family, checkpoint, samples, collate):
    """FAM-3, PCK-4, PCK-6: each segment of a row has the logits that transformers gives it alone, with positions of its
    own making."""
    path = checkpoint(family)
    model, processor = load_model(path, "float32"), load_processor(path)
    order = [samples[0], samples[2], samples[1], samples[0]]
    row = collate(segments_of(order, processor), **layout(model, processor))
    with torch.no_grad():
        states = RowModel(model).hidden_states(row)
    lengths = row.cu_seqlens.diff().tolist()
    found = states[0].split(lengths) if collate is collate_packed else states
    for own, length, alone in zip(found, lengths, logits_alone(path, order), strict=True):
        torch.testing.assert_close(model.lm_head(own[:length]), alone, rtol=1e-4, atol=2e-4)


@every_family
def test_a_row_runs_backward_through_every_part_FAM_3_PCK_8(family, checkpoint, samples):
    """FAM-3, PCK-8: gradients with recomputed layers equal those without; a row without an image has the dummy."""
    path, processor = checkpoint(family), load_processor(checkpoint(family))
    gradients = []
    for recomputes in (False, True):
        model = load_model(path, "float32").train()
        if recomputes:
            enable_gradient_checkpointing(model)
        row = collate_packed(segments_of(samples, processor), **layout(model, processor))
        RowModel(model).hidden_states(row).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    reached = {part_of(name) for name, grad in gradients[0].items() if grad is not None and grad.abs().max() > 0}
    assert reached == set(PARTS)
    torch.testing.assert_close(gradients[1], gradients[0])
    text = collate_packed(segments_of(samples[2:], processor), **layout(model, processor))
    assert text.vision.keys() == row.vision.keys() and len(text.cu_seqlens) == 3


@every_family
def test_each_parameter_has_its_part_FAM_1(family, checkpoint):
    """FAM-1: no part is empty; the vision tower and the aligner are exactly what is not the language model."""
    model = load_model(checkpoint(family), "float32")
    parts = {name: part_of(name) for name, _ in model.named_parameters()}
    assert set(parts.values()) == set(PARTS)
    language = {f"model.language_model.{name}" for name, _ in model.model.language_model.named_parameters()}
    language |= {"lm_head.weight"} & parts.keys()
    assert {name for name, part in parts.items() if part in ("llm", "embeddings")} == language | {
        "lm_head.weight"
    } & parts.keys()
    assert {part for name, part in parts.items() if "embed_tokens" in name} == {"embeddings"}


def train_a_little(model: nn.Module, size: float) -> None:
    move([parameter for parameter in model.parameters() if parameter.requires_grad], size)


def move(parameters: Sequence[nn.Parameter], size: float) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter) * size)


def trained_groups(model: nn.Module, family: str) -> dict[str, list[nn.Parameter]]:
    """What trains, by part; recurrent mixers and experts, which lie in the language model, also by themselves."""
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            own = {FAMILIES[family].mixer, "experts"} & set(name.split("."))
            for group in (part_of(name), *own):
                groups.setdefault(group, []).append(parameter)
    return groups


@every_family
@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_merge_as_peft_merges_them_FAM_3_SYN_4(family, checkpoint, use_dora):
    """FAM-3, SYN-4: on all linear layers, those of the vision tower too."""
    tuner = Tuner(type="lora", use_dora=use_dora, rank=4, freeze_vit=False, freeze_aligner=False)
    model = apply_tuner(load_model(checkpoint(family), "float32"), tuner)
    train_a_little(model, 0.05)
    assert {part_of(name) for name, p in model.named_parameters() if p.requires_grad} == {"llm", "vit", "aligner"}
    streamed = dict(MergedWeights(model).tensors())
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    turned = {entry.name for entry in MergedWeights(model).entries if entry.is_transposed}
    assert streamed.keys() == {name for name in merged if name != "lm_head.weight"}
    for name, tensor in streamed.items():
        expected = merged[name].mT if name in turned else merged[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5)


def shapes_of(path: Path) -> list[tuple[int, ...]]:
    """Shapes of all tensors in a checkpoint's files, sorted; the names are the family's in memory or in files."""
    tensors = [tensor for file in path.glob("*.safetensors") for tensor in load_file(file).values()]
    return sorted(tuple(tensor.shape) for tensor in tensors)


@every_family
def test_a_saved_model_is_the_model_FAM_3_LRN_6(family, checkpoint, samples, tmp_path, ranks):
    """FAM-3, LRN-6: transformers loads it and computes the same; tensors that the release holds transposed are so."""
    path = checkpoint(family)
    save_merged(load_model(path, "float32"), str(path), tmp_path / "merged", ranks)
    for own, saved in zip(logits_alone(path, samples), logits_alone(tmp_path / "merged", samples), strict=True):
        assert torch.equal(own, saved)
    if FAMILIES[family].transposed:  # transformers itself would read either
        assert shapes_of(tmp_path / "merged") == shapes_of(path)


@every_family
def test_memory_is_estimated_from_files_and_from_the_config_alike_FAM_1_CFG_16(family, checkpoint, tmp_path):
    """FAM-1, CFG-16."""
    path, tuner = checkpoint(family), Tuner(type="full", freeze_vit=True)
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    from_files, from_config = model_size(path, tuner), model_size(tmp_path, tuner)
    model = load_model(path, "float32")
    apply_tuner(model, tuner)
    assert from_files.total == from_config.total == sum(p.numel() for p in model.parameters())
    assert (
        from_files.trainable == from_config.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    )
    assert from_files.num_layers == from_config.num_layers == model.config.text_config.num_hidden_layers


# ---- with an engine --------------------------------------------------------------------------------------------------


@every_family
@pytest.mark.e2e
def test_the_hf_engine_generates_as_transformers_does_FAM_3_ROL_6(family, checkpoint, samples, ranks):
    """FAM-3, ROL-6: prompts of different lengths in one call, against transformers' own `generate` of one at a time."""
    path = checkpoint(family)
    processor, model = load_processor(path), load_model(path, "float32")
    engine = HfEngine(SimpleNamespace(model=model, engine=Engine(model)), ranks, processor, 3)
    requests = [RolloutRequest(s.id, prompt_chat(s), s.images, **vars(encode_prompt(s, processor))) for s in samples]
    context = RolloutContext(run_seed=1, global_step=0, micro_step_idx=0, policy_version=None)
    found = engine.generate(requests, RolloutSampling(max_new_tokens=12), context)
    plain = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    for sample, result in zip(samples, found, strict=True):
        prompt = own_inputs(sample, processor, [])
        with torch.no_grad():
            ids = plain.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert result.response_token_ids == [i for i in ids.tolist() if i != processor.tokenizer.eos_token_id]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    make_dataset(folder / "data", num_train=8, num_val=2)
    return folder


def server_of(path: Path, folder: Path, has_slots: bool) -> tuple[str, Server]:
    """A server that starts with a family's checkpoint, and the dtype that its engine can have on CPU."""
    plain = processes.config_of
    dtype = "float32" if FAMILIES[model_type_of(path)].mixer is None else "bfloat16"

    def config_of(*args):
        config = plain(*args)
        config["model"]["dtype"] = dtype
        config["custom"]["extra"]["rollout_server"]["vllm_enable_prefix_caching"] = dtype == "float32"
        config["custom"]["extra"]["rollout_matching"]["vllm"]["enable_lora"] = has_slots
        return config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "config_of", config_of)
        return dtype, Server(folder, path, vllm_enable_lora=has_slots)


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, checkpoint, folder):
    """A family's checkpoint, the dtype of its engine, and its server."""
    path = checkpoint(request.param)
    dtype, server = server_of(path, folder, has_slots=False)
    try:
        yield path, dtype, server.wait_ready()
    finally:
        server.end()


def asked_of(samples: list[Sample], folder: Path) -> list[dict]:
    """Requests for the samples, their images below the server's image root."""
    requests = []
    for sample in samples:
        images = [shutil.copy(image, folder / "data") for image in sample.images]
        requests.append({"messages": sample.messages, "images": list(map(str, images))})
    return requests


def tuned(path: Path, dtype: str, is_full: bool) -> nn.Module:
    """The model with all parameters trained, the experts too, or with DoRA in all parts."""
    every = {"freeze_llm": False, "freeze_vit": False, "freeze_aligner": False}
    tuner = Tuner(type="full", **every) if is_full else Tuner(type="lora", use_dora=True, rank=4, **every)
    return apply_tuner(load_model(path, dtype), tuner)


def own_logprobs(path: Path, dtype: str, sample: Sample, answer: Sequence[int]) -> np.ndarray:
    """transformers' own log-probabilities of an answer's tokens, float32 [n]."""
    plain = AutoModelForImageTextToText.from_pretrained(path, dtype=getattr(torch, dtype))
    with torch.no_grad():
        logits = plain(**own_inputs(sample, load_processor(path), answer), use_cache=False).logits[0].float()
    picked = logits[-len(answer) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(list(answer))[:, None])
    return picked[:, 0].numpy()


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("is_full", [True, False])
def test_the_engine_follows_the_learner_FAM_3_SYN_6_SYN_7(served, folder, samples, tmp_path, ranks, is_full):
    """FAM-3, SYN-6, SYN-7, ROL-3: prompt ids, greedy answers and log-probabilities of engine and transformers are equal
    after a full sync and after a second one, which is partial where a part of the model is frozen. The probe of each
    is proven, and it fails when one group of the engine's weights is stale. In bfloat16 only prompts and probe are
    compared: two correct engines choose different tokens there."""
    path, dtype, server = served
    model, processor, asked = tuned(path, dtype, is_full), load_processor(path), asked_of(samples, folder)
    token_ids, run_id = list(range(40, 52)), f"run-{is_full}"

    def save() -> Path:
        save_merged(model, str(path), tmp_path / "merged", ranks)
        return tmp_path / "merged"

    def logprobs() -> np.ndarray:
        return own_logprobs(save(), dtype, replace(samples[0], images=asked[0]["images"]), token_ids)

    torch.manual_seed(0)
    sync = open_sync(server, model, run_id, Probe(asked[0], token_ids, logprobs))
    for step in range(2):
        train_a_little(model, 0.02)
        report = sync.sync(f"{run_id}:{step}")
        assert report.verified and (step == 0 or is_full or report.num_tensors < len(sync.weights.entries))
        if dtype == "float32":
            assert_serves(server, save(), asked)
        for output, request in zip(server.infer(asked, max_tokens=2), samples, strict=True):
            assert output["response"]["prompt_token_ids"] == own_inputs(request, processor, [])["input_ids"][0].tolist()
    for stale in trained_groups(model, model_type_of(path)).values():
        in_engine = [parameter.detach().clone() for parameter in stale]
        move(stale, 0.3)
        with pytest.raises(RuntimeError, match="log-probabilities of the probe are off"):
            sync._check_probe(logprobs())
        with torch.no_grad():
            torch._foreach_copy_(stale, in_engine)
    sync._check_probe(logprobs())
    sync.close()


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "tuner", "deepspeed"),
    [("stage2", "dora", "zero3"), ("stage2", "full", "zero2"), ("grpo", "full", "zero3"), ("grpo", "lora", "zero2")],
)
def test_both_programs_take_three_steps_and_resume_FAM_3(served, folder, program, tuner, deepspeed):
    """FAM-3: in all parts on two ranks, experts too where tuning is full, every sync proven; stopped after the second
    step and continued."""
    path, dtype, server = served
    run_dir = folder / f"{path.name}_{program}_{tuner}"
    for max_steps, resume in ((2, ()), (3, ("--resume", "auto"))):
        config = program_config(run_dir, path, dtype, server, program, max_steps)
        config["tuner"], config["deepspeed"] = TUNERS[tuner], deepspeed
        written = write_yaml(folder / f"{run_dir.name}_{max_steps}.yaml", config)
        result = run_learner(f"train_{program}.py", written, num_ranks=2, arguments=resume)
        assert result.returncode == 0, result.stdout[-6000:]
    events = EventAccumulator(str(run_dir)).Reload()
    name = "loss/total" if "loss/total" in events.Tags()["scalars"] else events.Tags()["scalars"][0]
    assert [event.step for event in events.Scalars(name)] == [1, 2, 3]
    assert (run_dir / "checkpoint-3" / "merged" / "model.safetensors.index.json").exists()


def model_type_of(path: Path) -> str:
    return json.loads((path / "config.json").read_text())["model_type"]


def program_config(run_dir: Path, model: Path, dtype: str, server: Server, program: str, max_steps: int) -> dict:
    folder = run_dir.parent
    config = processes.config_of(folder, model, server.url, server.group_port, {})
    config["model"]["dtype"] = dtype
    training = {"max_steps": max_steps, "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    config["training"] |= training | {"output_dir": str(run_dir)}
    matching = config["custom"]["extra"]["rollout_matching"]
    if program == "stage2":
        matching |= {"max_new_tokens": 24, "decode_batch_size": 4}
        matching["vllm"]["sync"] = {"verify": "always"}
    else:
        (folder / "rewards.py").write_text(REWARDS)
        config["custom"]["trainer_variant"], config["global_max_length"] = "grpo", 512
        del config["custom"]["extra"]["rollout_matching"]
        config["rlhf"] = {
            "vllm_server_port": [server.port],
            "vllm_server_group_port": server.group_port,
            "sync": {"verify": "always"},
            "max_new_tokens": 12,
            "decode_batch_size": 4,
            "num_generations": 4,
            "reward_funcs": ["odd"],
            "reward_files": [str(folder / "rewards.py")],
        }
    return config


@pytest.mark.parametrize("family", WITH_SLOTS)
@pytest.mark.e2e
@pytest.mark.slow
def test_an_adapter_in_its_slot_answers_as_the_merged_model_FAM_3_SYN_10(
    family, checkpoint, folder, samples, tmp_path, ranks
):
    """FAM-3, SYN-10: only the adapter's tensors travel, to an engine that keeps the weights it loaded."""
    path = checkpoint(family)
    dtype, server = server_of(path, folder, has_slots=True)
    model = apply_tuner(load_model(path, dtype), SLOTTED)
    asked, token_ids = asked_of(samples, folder), list(range(40, 52))

    def save() -> Path:
        save_merged(model, str(path), tmp_path / "merged", ranks)
        return tmp_path / "merged"

    def logprobs() -> np.ndarray:
        return own_logprobs(save(), dtype, replace(samples[0], images=asked[0]["images"]), token_ids)

    try:
        sync = open_adapter_sync(server.wait_ready(), model, "run", False, Probe(asked[0], token_ids, logprobs))
        for step in range(2):
            train_a_little(model, 0.05)
            report = sync.sync(f"run:{step}")
            assert report.verified
            assert report.num_bytes == sum(p.nbytes for p in model.parameters() if p.requires_grad)
            if dtype == "float32":
                assert_serves(server, save(), asked)
        sync.close()
    finally:
        server.end()
