"""The learning-rate schedule, a function of the step alone; an optimizer step of GRPO against a plain one."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn

from tests.families import build_family
from tests.learner.test_model import coord_ids, make_segment, smallest_image
from utils.config.load import build_config
from utils.config.schema import Losses, Rlhf, Training, Tuner
from utils.dist import DistributedError, Ranks
from utils.learner import attention
from utils.learner import learner as learner_module
from utils.learner.learner import MAX_SKIPPED, Learner, NotFinite, lr_factor
from utils.learner.model import apply_tuner, base_model, load_model, param_groups, partition, position_ids_for
from utils.learner.objectives import MatchingObjective, PolicyObjective
from utils.packing import Batch, collate_packed
from utils.policy_loss import PolicyRow, policy_tokens, token_weights
from utils.sync.merged_weights import MergedWeights
from utils.targets import Segment, plain_segment

RLHF = Rlhf(reward_funcs=["detection_f1"])


def schedule(kind: str, warmup_steps: int = 2, low: float = 0.1) -> SimpleNamespace:
    return SimpleNamespace(lr_scheduler=kind, warmup_steps=warmup_steps, min_lr_ratio=low)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_warm_up_is_linear_and_reaches_the_peak_CFG_17(kind):
    """CFG-17."""
    assert [lr_factor(step, 12, schedule(kind)) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]


def test_decay_by_hand_CFG_17():
    """CFG-17."""
    assert lr_factor(7, 12, schedule("linear")) == pytest.approx(0.1 + 0.9 * 0.5)
    assert lr_factor(7, 12, schedule("cosine")) == pytest.approx(0.1 + 0.9 * 0.5)
    assert lr_factor(12, 12, schedule("cosine")) == pytest.approx(0.1)
    assert lr_factor(11, 12, schedule("constant")) == 1.0


# ---------------------------------------------------------------------------------------------------------------------
# a learner and its config


def test_every_step_trains_at_the_rate_of_the_schedule_CFG_17(tmp_path, start_model, ranks):
    """CFG-17: what is reported is what the optimizer has; the number of steps is that of the run."""
    changes = {"lr_scheduler": "linear", "warmup_steps": 2, "min_lr_ratio": 0.0}
    learner, seen = learner_of(tmp_path, start_model, ranks, {"type": "lora", "rank": 4}, **changes), []
    for step in range(4):
        result = learner.step(matching_rows(learner, is_bad=False), MatchingObjective(Losses()), step)
        seen.append({group["lr"] for group in learner.engine.optimizer.param_groups})
        assert set(result.learning_rates.values()) == seen[-1]
    assert [sorted(own) for own in seen] == [[pytest.approx(1e-2 * factor)] for factor in (0.5, 1.0, 1.0, 0.5)]


def test_the_optimizer_has_the_settings_of_the_config_CFG_17(tmp_path, start_model, ranks):
    """CFG-17."""
    settings = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3, "max_grad_norm": 0.25}
    learner = learner_of(tmp_path, start_model, ranks, {"type": "lora", "rank": 4}, **settings)
    groups = learner.engine.optimizer.param_groups
    assert {(*group["betas"], group["eps"]) for group in groups} == {(0.8, 0.9, 1e-3)}
    assert learner.engine.gradient_clipping() == 0.25


@pytest.mark.parametrize("deepspeed", ["zero0", "zero2"])
def test_the_first_step_is_adams_first_LRN_2(tmp_path, start_model, ranks, deepspeed):
    """LRN-2: in half precision under ZeRO-0 DeepSpeed itself takes a step on zeros, which decays weights, too."""
    tuner = {"freeze_vit": False, "freeze_aligner": False}
    learner = matching_learner(tmp_path, start_model, ranks, "stop", deepspeed, "bfloat16", tuner)
    optimizer = learner.engine.optimizer
    groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True) if deepspeed == "zero0" else ()
    for halves, masters in groups:
        assert all(torch.equal(half.float(), master) for half, master in zip(halves, masters, strict=True))
    learner.step(matching_rows(learner, is_bad=False), MatchingObjective(Losses()), 0)
    states = optimizer.optimizer.state.values()
    assert {float(state["step"]) for state in states} == {1.0}


def test_adapters_start_by_the_seed_and_dropout_differs_between_ranks_LRN_1_PCK_5(
    tmp_path, start_model, ranks, monkeypatch
):
    """LRN-1, PCK-5: adapters that start otherwise on another rank would never become one model."""
    starts, seeds = [], []
    for seed, rank in ((5, 0), (5, 1), (6, 0)):
        monkeypatch.setattr(ranks, "rank", rank)
        learner = learner_of(tmp_path, start_model, ranks, {"type": "lora", "rank": 4}, seed=seed)
        seeds.append(torch.initial_seed())
        starts.append(next(own for name, own in learner.model.named_parameters() if ".lora_A." in name).detach())
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize("fused", [True, False])
def test_models_are_loaded_as_the_config_says_CFG_17(tmp_path, monkeypatch, fused):
    """CFG-17: dtype, attention and kernels."""
    calls = []
    monkeypatch.setattr(learner_module, "load_model", lambda *args: calls.append(args) or "model")
    monkeypatch.setattr(learner_module, "fuse_kernels", lambda model: calls.append(model))
    model = SimpleNamespace(dtype="float16", attn_implementation="eager")
    cfg = SimpleNamespace(model=model, training=SimpleNamespace(fused_kernels=fused))
    assert learner_module._load(cfg, "path") == "model"
    assert calls == [("path", "float16", "eager"), *["model"] * fused]


# ---------------------------------------------------------------------------------------------------------------------
# one optimizer step of GRPO, DeepSpeed included


def learner_of(
    folder: Path, model: Path, ranks: Ranks, tuner: dict, deepspeed: str = "zero2", beta: float = 0.0, **training: Any
) -> Learner:
    """A learner with an epsilon large enough that rounding errors do not become whole steps."""
    reference = {"reference_path": str(model)} if beta and tuner["type"] == "full" else {}
    config = {
        "model": {"path": str(model), "dtype": "float32", **reference},
        "global_max_length": 128,
        "tuner": tuner,
        "custom": {"trainer_variant": "grpo", "train_jsonl": "none"},
        "rlhf": {"reward_funcs": ["detection_f1"], "use_vllm": False, "max_new_tokens": 32, "beta": beta},
        "training": {
            "output_dir": str(folder),
            "learning_rate": 1e-2,
            "lr_scheduler": "constant",
            "gradient_accumulation_steps": 3,  # there are four rows
            "gradient_checkpointing": False,
            "adam_epsilon": 1e-2,
            "max_grad_norm": 0.0,
            **training,
        },
        "deepspeed": deepspeed,
    }
    return Learner(build_config(config), ranks, num_steps=4)


@pytest.mark.parametrize(
    ("setting", "gpu_bytes", "expected"),
    [
        (True, 0, "1111 11"),
        (False, 0, "0000 00"),
        (3, 0, "1110 11"),
        (0, 0, "0000 00"),
        ("auto", 0, "1111 11"),  # on CPU
        ("auto", 80 << 30, "0000 11"),  # the estimate leaves out the vision tower
        ("auto", 1 << 20, "1111 11"),
    ],
)
def test_layers_that_backward_recomputes_by_setting_CFG_17(
    tmp_path, start_model, ranks, monkeypatch, setting, gpu_bytes, expected
):
    """CFG-17: language-model layers, then those of the vision tower. A GPU is pretended; the model stays on the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=gpu_bytes))
    monkeypatch.setattr(ranks, "device", torch.device("cuda" if gpu_bytes else "cpu"))
    learner = learner_of(tmp_path, start_model, ranks, {"type": "full"}, gradient_checkpointing=setting)
    inner = base_model(learner.model).model
    parts = (inner.language_model.layers, inner.visual.blocks)
    assert " ".join("".join(str(int(layer.gradient_checkpointing)) for layer in part) for part in parts) == expected


@pytest.mark.parametrize("packing", [True, False])
def test_layers_are_recomputed_however_segments_lie_LRN_10_CFG_17(tmp_path, start_model, ranks, packing):
    """LRN-10, CFG-17: also where nothing was generated or scored before the first step; transformers' models come
    ready for inference, in which they keep what backward needs."""
    options = {"gradient_checkpointing": True, "packing": packing}
    learner, forwards = learner_of(tmp_path, start_model, ranks, {"type": "lora", "rank": 4}, **options), []
    attention = base_model(learner.model).model.language_model.layers[0].self_attn
    attention.register_forward_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    learner.step(matching_rows(learner, is_bad=False), MatchingObjective(Losses()), 0)
    assert len(forwards) == 2 * 2


@pytest.mark.parametrize(("has_kernels", "expected"), [(True, 0), (False, 4)])
def test_auto_recomputes_all_layers_where_mixers_lack_fast_kernels_CFG_17(
    tmp_path, ranks, monkeypatch, has_kernels, expected
):
    """CFG-17: transformers' own recurrent mixers keep more than the estimate says. A GPU is pretended, as above."""
    gpu = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(ranks, "device", torch.device("cuda"))
    monkeypatch.setattr(attention, "kernels_take_borders", lambda: has_kernels)
    model = build_family("qwen3_5", tmp_path / "model")
    learner = learner_of(tmp_path, model, ranks, {"type": "full"}, gradient_checkpointing="auto")
    layers = base_model(learner.model).model.language_model.layers
    assert sum(layer.gradient_checkpointing for layer in layers) == expected <= len(layers) == 4


def test_zero_3_cannot_free_the_experts_of_layers_that_backward_does_not_recompute_CFG_16(tmp_path, ranks):
    """CFG-16: DeepSpeed empties the parameters; what torch keeps for backward is those, but for a view of experts."""
    model = build_family("qwen3_vl_moe", tmp_path / "model")
    learner = learner_of(tmp_path, model, ranks, {"type": "lora", "rank": 4}, "zero3", gradient_checkpointing=1)
    gathered: dict[int, tuple[str, torch.Size]] = {}
    views = set()

    def note(name: str, module: nn.Module, args: tuple) -> None:
        for own, parameter in module.named_parameters(recurse=False):
            gathered[parameter.untyped_storage().data_ptr()] = (f"{name}.{own}", parameter.shape)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        name, shape = gathered.get(tensor.untyped_storage().data_ptr(), ("", tensor.shape))
        if tensor.shape != shape:
            views.add(name)
        return tensor

    for name, module in learner.model.named_modules():
        module.register_forward_pre_hook(partial(note, name))
    learner.engine.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        learner.engine.module.hidden_states(matching_rows(learner, is_bad=False)[0])
    num_layers = len(base_model(learner.model).model.language_model.layers)
    kept = [f"layers.{i}.mlp.experts.{name}" for i in range(1, num_layers) for name in ("gate_up_proj", "down_proj")]
    assert {name[name.find("layers.") :] for name in views} == set(kept)


def answers_of(model: nn.Module, num: int = 5) -> list[Segment]:
    """Segments with and without images, answers of 5 to 13 tokens."""
    grids = [(4, 6), None, (2, 4), None]
    raw = [make_segment(model, seed, grids[seed % 4], 5 + 2 * seed) for seed in range(num)]
    split = [(s.input_ids[: s.answer_start], s.input_ids[s.answer_start :], s) for s in raw]
    return [plain_segment(s.sample_id, prompt, own, s.vision) for prompt, own, s in split]


def policy_row_of(model: nn.Module, segments: list[Segment], advantages: dict[str, float]) -> PolicyRow:
    lengths = [len(segment.text_index) for segment in segments]
    weights, _ = token_weights(np.array(lengths), "grpo", 32)
    tokens = policy_tokens(lengths, [advantages[segment.sample_id] for segment in segments], weights)
    batch = collate_packed(segments, position_ids_for(model), np.zeros(0, dtype=np.int64), smallest_image(model))
    return PolicyRow(**vars(batch), policy=tokens)


def plain_logprobs(model: nn.Module, segment: Segment, temperature: float) -> torch.Tensor:
    """Log-probabilities of one answer's tokens by transformers' own forward, with all logits."""
    input_ids = torch.from_numpy(segment.input_ids)[None]
    logits = model(
        input_ids=input_ids,
        mm_token_type_ids=(input_ids == base_model(model).config.image_token_id).int(),
        **segment.vision,
    ).logits[0]
    log_p = (logits / temperature).log_softmax(-1)
    return log_p[torch.arange(len(segment)) - 1, input_ids[0]][segment.answer_start :]


@pytest.mark.parametrize("deepspeed", ["zero0", "zero2"])
def test_a_policy_step_is_that_of_a_plain_unpacked_full_logits_one_GRP_6_PCK_5_PCK_8(
    tmp_path, start_model, ranks, deepspeed
):
    """GRP-6, PCK-5, PCK-8: loss and every updated parameter, for four rows (one of them empty) where the config says
    three micro-steps, at temperature 0.7; ratios to the policy scored before the step are 1."""
    learner = learner_of(tmp_path, start_model, ranks, {"type": "full"}, deepspeed)
    plain = apply_tuner(load_model(start_model, "float32"), Tuner(type="full"))
    segments = answers_of(plain)
    advantages = {f"s{i}": value for i, value in enumerate((1.0, -0.5, 0.3, -0.8, 0.6))}
    layout = [[segments[3], segments[0]], [segments[1]], [], [segments[2], segments[4]]]
    rows = [policy_row_of(learner.model, row, advantages) for row in layout]
    for row, logprob in zip(rows, learner.logprobs(rows, temperature=0.7), strict=True):
        row.policy.old_logprob = logprob
    result = learner.step(rows, PolicyObjective(RLHF, denominator=5.0, temperature=0.7), step=0)

    optimizer = torch.optim.AdamW(param_groups(plain, Training.model_construct(learning_rate=1e-2)), eps=1e-2)
    loss = sum(-advantages[s.sample_id] * plain_logprobs(plain, s, 0.7).mean() for s in segments) / 5
    surrogate = sum(-advantages[s.sample_id] for s in segments) / 5  # ratios of 1 carry the gradient
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    optimizer.step()
    assert result.losses["total"] == pytest.approx(surrogate, abs=1e-5)
    assert result.losses["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert result.grad_norm == pytest.approx(float(norm), rel=5e-5)
    for (name, ours), theirs in zip(learner.model.named_parameters(), plain.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-5, name


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_start_policy_is_the_model_with_adapters_disabled_or_a_frozen_one_GRP_6(tmp_path, start_model, ranks, kind):
    """GRP-6: with adapters without a second copy of the model; and without an effect on training."""
    tuner = {"type": "lora", "rank": 4, "freeze_vit": True} if kind == "lora" else {"type": "full"}
    learner = learner_of(tmp_path, start_model, ranks, tuner, beta=0.1)
    assert (learner.engine.module.reference is None) == (kind == "lora")
    base = load_model(start_model, "float32")
    segments = answers_of(base, 2)
    rows = [policy_row_of(learner.model, segments, {"s0": 1.0, "s1": -1.0})]
    trained = [parameter.requires_grad for parameter in learner.model.parameters()]
    objective = PolicyObjective(RLHF, denominator=2.0)
    for step in range(2):
        learner.step(rows, objective, step)
        (reference,) = learner.logprobs(rows, 1.0, of_start_policy=True)
        (present,) = learner.logprobs(rows, 1.0)
        with torch.no_grad():
            expected = torch.cat([plain_logprobs(base, segment, 1.0) for segment in segments])
        assert (reference - expected).abs().max() < 1e-5
        assert (present - expected).abs().max() > 1e-4 * (step + 1)
    assert [parameter.requires_grad for parameter in learner.model.parameters()] == trained


def test_what_was_scored_leaves_the_device_before_the_next_row_TGT_16():
    """TGT-16: the states of 64 micro-steps would take gigabytes there."""
    happened = []
    row = SimpleNamespace(to=lambda device: "row")
    scored = SimpleNamespace(cpu=lambda: happened.append("cpu") or "states")
    engine = MagicMock(side_effect=lambda *_: happened.append("score") or scored)
    learner = SimpleNamespace(engine=engine, _ranks=SimpleNamespace(device="cuda"))
    assert Learner._score(learner, [row, row], lambda *_: None) == ["states"] * 2
    assert happened == ["score", "cpu"] * 2


def test_scores_are_those_without_dropout_GRP_6(tmp_path, start_model, ranks):
    """GRP-6: as ratios to the policy would need them; training goes on with dropout, which stage 2 may have."""
    tuner = {"type": "lora", "rank": 4, "dropout": 0.5}
    learner = matching_learner(tmp_path, start_model, ranks, "stop", "zero0", "float32", tuner)
    for name, parameter in learner.model.named_parameters():
        if "lora_B" in name:  # zeros at the start
            nn.init.normal_(parameter, std=0.1)
    rows = [policy_row_of(learner.model, answers_of(learner.model, 2), {"s0": 1.0, "s1": -1.0})]
    (first,), (again,) = (learner.logprobs(rows, 1.0) for _ in range(2))
    assert torch.equal(first, again) and learner.engine.module.training


# ---------------------------------------------------------------------------------------------------------------------
# a loss that is not finite


def matching_learner(
    folder: Path, model: Path, ranks: Ranks, on_nan_loss: str, deepspeed: str, dtype: str, tuner: dict | None = None
) -> Learner:
    matching = {"rollout_backend": "hf", "max_new_tokens": 32}
    config = {
        "model": {"path": str(model), "dtype": dtype},
        "tuner": tuner or {},
        "global_max_length": 128,
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": "none",
            "extra": {"rollout_matching": matching},
        },
        "training": {
            "output_dir": str(folder),
            "gradient_accumulation_steps": 2,
            "on_nan_loss": on_nan_loss,
            "weight_decay": 0.1,
        },
        "deepspeed": deepspeed,
    }
    return Learner(build_config(config), ranks, num_steps=100)


def matching_rows(learner: Learner, is_bad: bool) -> list[Batch]:
    """Two rows; a bad sample is the first one of the second row."""
    batches = []
    for seeds in ((0, 1), (2, 3)):
        segments = [make_segment(learner.model, seed, (4, 4)) for seed in seeds]
        bins = np.array(coord_ids(learner.model))
        positions, dummy = position_ids_for(learner.model), smallest_image(learner.model)
        batches.append(collate_packed(segments, positions, bins, dummy))
    if is_bad:
        batches[1].vision["pixel_values"][0] = torch.nan
    return batches


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return dict(MergedWeights(learner.model).tensors())


@pytest.mark.parametrize(
    ("deepspeed", "dtype"),
    [("zero0", "float32"), ("zero2", "float32"), ("zero3", "float32"), ("zero0", "bfloat16"), ("zero2", "bfloat16")],
)
def test_a_loss_that_is_not_finite_changes_nothing_and_names_its_samples_LRN_2(
    tmp_path, start_model, ranks, caplog, deepspeed, dtype
):
    """LRN-2, `training.on_nan_loss: skip`: weights stay bit for bit, the next step is that of a run without the bad
    one; ten bad ones in a row end the run."""
    learner, other = (matching_learner(tmp_path, start_model, ranks, "skip", deepspeed, dtype) for _ in range(2))
    objective = MatchingObjective(Losses())
    for one in (learner, other):
        one.step(matching_rows(one, is_bad=False), objective, 0)
    before = weights_of(learner)
    assert np.isnan(learner.step(matching_rows(learner, is_bad=True), objective, 1).losses["total"])
    (message,) = [record.message for record in caplog.records if record.name == "utils.learner.learner"]
    assert message.startswith("the loss of optimizer step 2 is not finite; samples: s2, s3; the step is skipped")
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(learner).items())
    for one in (learner, other):
        one.step(matching_rows(one, is_bad=False), objective, 2)
    after = weights_of(other)
    assert all(torch.equal(tensor, after[name]) for name, tensor in weights_of(learner).items())
    assert not all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    for step in range(3, 2 + MAX_SKIPPED):
        learner.step(matching_rows(learner, is_bad=True), objective, step)
    with pytest.raises(DistributedError, match="10 steps in a row were skipped") as raised:
        learner.step(matching_rows(learner, is_bad=True), objective, 2 + MAX_SKIPPED)
    assert not isinstance(raised.value, NotFinite)  # which would have the broken weights saved


@pytest.mark.parametrize("deepspeed", ["zero0", "zero2"])
def test_by_default_the_run_stops_at_a_gradient_that_is_not_finite_LRN_2(tmp_path, start_model, ranks, deepspeed):
    """LRN-2, `training.on_nan_loss: stop`: even if the losses themselves are finite; then all samples are named."""
    learner = matching_learner(tmp_path, start_model, ranks, "stop", deepspeed, "float32")
    before = weights_of(learner)
    parameter = next(parameter for parameter in learner.model.parameters() if parameter.requires_grad)
    parameter.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(NotFinite, match="the gradient of optimizer step 6 is not finite; samples: s0, s1, s2, s3. T"):
        learner.step(matching_rows(learner, is_bad=False), MatchingObjective(Losses()), 5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(learner).items())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_in_float16_a_gradient_that_is_not_finite_is_for_the_loss_scale_LRN_2(dtype):
    """LRN-2: DeepSpeed lowers it until they are finite; a loss that is not finite is told all the same."""
    cfg = SimpleNamespace(model=SimpleNamespace(dtype=dtype), training=SimpleNamespace(on_nan_loss="stop"))
    learner = SimpleNamespace(_cfg=cfg, _num_skipped=3)
    bad, fine = (SimpleNamespace(is_finite=is_finite, sample_ids=["s0"]) for is_finite in (False, True))
    with nullcontext() if dtype == "float16" else pytest.raises(NotFinite, match="the gradient"):
        Learner._check_finite(learner, 0, False, [fine])
        assert learner._num_skipped == 0
    with pytest.raises(NotFinite, match="the loss"):
        Learner._check_finite(learner, 0, False, [bad])


@pytest.mark.parametrize(
    ("deepspeed", "dtype"), [("zero0", "float32"), ("zero2", "float32"), ("zero3", "float32"), ("zero2", "bfloat16")]
)
def test_what_is_saved_after_a_loss_that_is_not_finite_is_the_step_before_LRN_12(
    tmp_path, start_model, ranks, deepspeed, dtype
):
    """LRN-12: a run that resumes from there takes the next step of one that never saw the bad one."""
    parts = (tmp_path, start_model, ranks, "stop", deepspeed, dtype)
    stopped, resumed, other = (matching_learner(*parts) for _ in range(3))
    objective = MatchingObjective(Losses())
    for one in (stopped, other):
        one.step(matching_rows(one, is_bad=False), objective, 0)
    with pytest.raises(NotFinite):
        stopped.step(matching_rows(stopped, is_bad=True), objective, 1)
    stopped.save_state(tmp_path / "state")
    resumed.load_state(tmp_path / "state")
    for one in (resumed, other):
        one.step(matching_rows(one, is_bad=False), objective, 1)
    expected = weights_of(other)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(resumed).items())


@pytest.mark.parametrize("deepspeed", ["zero0", "zero2"])
def test_a_resumed_run_takes_the_optimizers_settings_of_the_config_LRN_5(tmp_path, start_model, ranks, deepspeed):
    """LRN-5: not those of the checkpoint."""
    tuner, objective = {"type": "lora", "rank": 4}, MatchingObjective(Losses())
    changed = {"weight_decay": 0.1, "adam_beta2": 0.9, "adam_epsilon": 1e-3}
    one, two = (learner_of(tmp_path, start_model, ranks, tuner, deepspeed, **own) for own in ({}, changed))
    one.step(matching_rows(one, is_bad=False), objective, 0)
    one.save_state(tmp_path / "state")
    two.load_state(tmp_path / "state")
    groups = two.engine.optimizer.param_groups
    assert max(group["weight_decay"] for group in groups) == 0.1
    assert {(group["betas"][1], group["eps"]) for group in groups} == {(0.9, 1e-3)}


def test_buffers_are_on_the_ranks_device_under_zero_3_LRN_2(tmp_path, start_model, ranks, monkeypatch):
    """LRN-2: DeepSpeed moves only parameters; rotary frequencies left behind end the first forward on a GPU."""
    asked = []

    def onto_meta(module, config, device):
        asked.append(device)
        partition(module, config, torch.device("meta"))

    monkeypatch.setattr(learner_module, "partition", onto_meta)
    tuner = {"type": "lora", "rank": 4}
    learner = matching_learner(tmp_path, start_model, ranks, "stop", "zero3", "float32", tuner)
    assert asked == [ranks.device]
    buffers = dict(learner.model.named_buffers())
    assert any("visual" in name for name in buffers) and {own.device.type for own in buffers.values()} == {"meta"}


def test_dora_in_all_parts_continues_under_zero_3_LRN_5(tmp_path, start_model, ranks):
    """LRN-5: with layers recomputed in backward, and parameters that DeepSpeed keeps whole. A resumed run first scores
    and sends its weights, as here; its next step is that of the run that was not stopped."""
    tuner = {"type": "lora", "use_dora": True, "rank": 4, "freeze_vit": False, "freeze_aligner": False}
    objective = MatchingObjective(Losses())
    one, two = (matching_learner(tmp_path, start_model, ranks, "stop", "zero3", "float32", tuner) for _ in range(2))
    one.step(matching_rows(one, is_bad=False), objective, 0)
    one.save_state(tmp_path / "state")
    two.load_state(tmp_path / "state")
    two.hidden_states(matching_rows(two, is_bad=False))
    weights_of(two)
    for learner in (one, two):
        learner.step(matching_rows(learner, is_bad=False), objective, 1)
    resumed = weights_of(two)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in weights_of(one).items())
