"""The learning-rate schedule, a function of the step alone; an optimizer step of GRPO against a plain one."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.test_model import make_segment
from utils.config import build_config
from utils.dist import Ranks
from utils.learner import Learner, lr_factor
from utils.model import apply_tuner, base_model, dummy_segment, load_model, param_groups, position_ids_for
from utils.objectives import PolicyObjective, PolicyRow
from utils.packing import collate_packed
from utils.policy_loss import PolicyOptions, policy_segment, policy_tokens, token_weights
from utils.targets import Segment


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
# one optimizer step of GRPO, DeepSpeed included


def learner_of(folder: Path, model: Path, ranks: Ranks, tuner: dict) -> Learner:
    """With an epsilon that does not blow rounding up to whole steps."""
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "global_max_length": 128,
        "tuner": tuner,
        "custom": {"trainer_variant": "grpo", "train_jsonl": "none"},
        "rlhf": {"reward_funcs": ["detection_f1"], "use_vllm": False, "max_new_tokens": 32},
        "training": {
            "output_dir": str(folder),
            "learning_rate": 1e-2,
            "lr_scheduler": "constant",
            "gradient_accumulation_steps": 3,  # rows there are four
            "gradient_checkpointing": False,
            "adam_epsilon": 1e-2,
            "max_grad_norm": 0.0,
        },
        "deepspeed": "zero2",
    }
    return Learner(build_config(config), ranks, num_steps=4)


def answers_of(model: nn.Module, num: int = 5) -> list[Segment]:
    """Segments with and without images, answers of 5 to 13 tokens."""
    grids = [(4, 6), None, (2, 4), None]
    raw = [make_segment(model, seed, grids[seed % 4], 5 + 2 * seed) for seed in range(num)]
    split = [(s.input_ids[: s.answer_start], s.input_ids[s.answer_start :], s) for s in raw]
    return [policy_segment(s.sample_id, prompt, own, s.pixel_values, s.image_grid_thw) for prompt, own, s in split]


def policy_row_of(model: nn.Module, segments: list[Segment], advantages: dict[str, float]) -> PolicyRow:
    lengths = [len(segment.text_index) for segment in segments]
    weights, _ = token_weights(np.array(lengths), "grpo", 32)
    tokens = policy_tokens(lengths, [advantages[segment.sample_id] for segment in segments], weights)
    batch = collate_packed(segments, position_ids_for(model), np.zeros(0, dtype=np.int64), dummy_segment(model))
    return PolicyRow(**vars(batch), policy=tokens)


def plain_logprobs(model: nn.Module, segment: Segment, temperature: float) -> torch.Tensor:
    """Of one answer's tokens by transformers' own forward, with all logits."""
    input_ids = torch.from_numpy(segment.input_ids)[None]
    logits = model(
        input_ids=input_ids,
        mm_token_type_ids=(input_ids == base_model(model).config.image_token_id).int(),
        pixel_values=segment.pixel_values,
        image_grid_thw=segment.image_grid_thw,
    ).logits[0]
    log_p = (logits / temperature).log_softmax(-1)
    return log_p[torch.arange(len(segment)) - 1, input_ids[0]][segment.answer_start :]


def test_a_policy_step_is_that_of_a_plain_unpacked_full_logits_one_GRP_6_PCK_5_PCK_8(tmp_path, start_model, ranks):
    """GRP-6, PCK-5, PCK-8: loss and every updated parameter, for four rows (one of them empty) where the config says
    three micro-steps, at temperature 0.7; ratios to the policy scored beforehand are 1."""
    learner = learner_of(tmp_path, start_model, ranks, {"type": "full"})
    plain = apply_tuner(load_model(start_model, "float32"), type="full")
    segments = answers_of(plain)
    advantages = {f"s{i}": value for i, value in enumerate((1.0, -0.5, 0.3, -0.8, 0.6))}
    layout = [[segments[3], segments[0]], [segments[1]], [], [segments[2], segments[4]]]
    rows = [policy_row_of(learner.model, row, advantages) for row in layout]
    for row, logprob in zip(rows, learner.logprobs(rows, temperature=0.7), strict=True):
        row.policy.old_logprob = logprob
    result = learner.step(rows, PolicyObjective(PolicyOptions(), share=5.0, temperature=0.7), step=0)

    optimizer = torch.optim.AdamW(param_groups(plain, learning_rate=1e-2), eps=1e-2)
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


def test_the_start_policy_is_had_by_switching_adapters_off_GRP_6(tmp_path, start_model, ranks):
    """GRP-6: no second copy of the model; and training goes on as if nothing had been asked."""
    learner = learner_of(tmp_path, start_model, ranks, {"type": "lora", "rank": 4, "freeze_vit": True})
    base = load_model(start_model, "float32")
    segments = answers_of(base, 2)
    rows = [policy_row_of(learner.model, segments, {"s0": 1.0, "s1": -1.0})]
    trained = [parameter.requires_grad for parameter in learner.model.parameters()]
    objective = PolicyObjective(PolicyOptions(), share=2.0)
    for step in range(2):
        learner.step(rows, objective, step)
        (reference,) = learner.logprobs(rows, 1.0, of_start_policy=True)
        (present,) = learner.logprobs(rows, 1.0)
        with torch.no_grad():
            expected = torch.cat([plain_logprobs(base, segment, 1.0) for segment in segments])
        assert (reference - expected).abs().max() < 1e-5
        assert (present - expected).abs().max() > 1e-4 * (step + 1)
    assert [parameter.requires_grad for parameter in learner.model.parameters()] == trained
