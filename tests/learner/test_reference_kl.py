"""The divergence from the start policy at tokens without a label, against two models loaded side by side (TGT-16)."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from torch import nn

from tests.learner.test_model import collate, make_segment
from train_stage2 import Stage2
from utils.config.load import build_config
from utils.config.schema import Losses, Tuner
from utils.dist import Ranks
from utils.learner.learner import Learner, StepResult
from utils.learner.model import apply_tuner, base_model, load_model
from utils.learner.objectives import MatchingObjective
from utils.losses import reference_kl_sum
from utils.packing import Batch, StartStates, denominators
from utils.targets import Segment

LORA = {"type": "lora", "rank": 4}
TUNERS = {
    "lora": LORA,
    "dora": LORA | {"use_dora": True, "freeze_vit": False},
    "embeddings": LORA | {"modules_to_save": ["embed_tokens"]},  # and with them the tied head
    "full": {"type": "full", "freeze_vit": False},  # beside a frozen checkpoint
}
ONLY_KL = {"text": 0.0, "coord": 0.0, "w1": 0.0, "gate": 0.0, "reference_kl": 1.0}
LAYOUT = [[3, 0], [1], [], [2, 4]]  # rows of segments; one is empty, and segment 4 has a label everywhere


def learner_of(
    folder: Path,
    model: Path,
    ranks: Ranks,
    tuner: dict,
    losses: dict,
    deepspeed: str = "zero0",
    teacher: Any = None,
    **training: Any,
) -> Learner:
    """A learner whose adapters have moved away from the start."""
    matching = {"rollout_backend": "hf", "max_new_tokens": 32, "losses": losses, "teacher": teacher}
    config = {
        "model": {"path": str(model), "dtype": "float32", **reference_of(model, tuner)},
        "global_max_length": 128,
        "tuner": tuner,
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": "none",
            "extra": {"rollout_matching": matching},
        },
        "training": {"output_dir": str(folder), "max_grad_norm": 0.0, "gradient_accumulation_steps": 4, **training},
        "deepspeed": str(sharded(folder)) if deepspeed == "zero3" else deepspeed,
    }
    learner = Learner(build_config(config), ranks, num_steps=4)
    move(learner.model)
    return learner


def sharded(folder: Path) -> Path:
    """ZeRO-3 in which every parameter is gathered; by default small ones never are sharded."""
    path = folder / "zero3.json"
    path.write_text('{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}')
    return path


def reference_of(model: Path, tuner: dict) -> dict[str, str]:
    return {"reference_path": str(model)} if tuner["type"] == "full" else {}


def move(model: nn.Module) -> None:
    """Add noise to all that trains, the same in every call."""
    generator = torch.Generator().manual_seed(5)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        with GatheredParameters([parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")), torch.no_grad():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def segments_of(model: nn.Module) -> list[Segment]:
    """Answers of 7 to 15 tokens, with images and without; the last has a label everywhere."""
    grids = [(4, 6), None, (2, 4), None, (4, 4)]
    segments = [make_segment(model, seed, grid, 7 + 2 * seed) for seed, grid in enumerate(grids)]
    whole = segments[-1]
    index = np.setdiff1d(np.arange(whole.answer_start, len(whole)), whole.coord_index)
    whole.text_index, whole.text_label = index, whole.input_ids[index]
    whole.text_weight = np.ones(len(index), dtype=np.float32)
    return segments


def rows_of(model: nn.Module, segments: list[Segment]) -> list[Batch]:
    return [collate(model, [segments[i] for i in row]) for row in LAYOUT]


def plain_logprobs(model: nn.Module, segment: Segment) -> torch.Tensor:
    """Log-probabilities over the vocabulary after each token of one segment, by transformers' own forward."""
    input_ids = torch.from_numpy(segment.input_ids)[None]
    logits = model(
        input_ids=input_ids,
        mm_token_type_ids=(input_ids == base_model(model).config.image_token_id).int(),
        **segment.vision,
    ).logits[0]
    return logits.log_softmax(-1)


def plain_kl(start: nn.Module, current: nn.Module, segments: list[Segment]) -> torch.Tensor:
    """Mean over the answers' tokens that have no label, each token by itself, in float64."""
    terms = []
    for segment in segments:
        with torch.no_grad():
            p = plain_logprobs(start, segment).double()
        q = plain_logprobs(current, segment).double()
        labelled = {*segment.coord_index.tolist(), *segment.text_index.tolist()}
        for index in range(segment.answer_start, len(segment)):
            if index not in labelled:
                terms.append((p[index - 1].exp() * (p[index - 1] - q[index - 1])).sum())
    return torch.stack(terms).mean()


def two_models(start_model: Path, tuner: dict, learner: Learner) -> tuple[nn.Module, nn.Module]:
    """The start, and a second model with the weights that the learner trains; without dropout."""
    start = load_model(start_model, "float32").eval()
    current = apply_tuner(load_model(start_model, "float32"), Tuner(**tuner)).eval()
    for ours, theirs in zip(current.parameters(), learner.model.parameters(), strict=True):
        with GatheredParameters([theirs], enabled=hasattr(theirs, "ds_id")), torch.no_grad():
            ours.copy_(theirs)
    return start, current


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", TUNERS)
def test_value_and_gradient_are_those_of_two_plain_models_TGT_16_PCK_4_PCK_5(
    tmp_path, start_model, ranks, kind, checkpointing
):
    """TGT-16, PCK-4, PCK-5: packed rows, in chunks of logits, against each segment alone with all logits of two
    models."""
    tuner = TUNERS[kind]
    learner = learner_of(tmp_path, start_model, ranks, tuner, ONLY_KL, gradient_checkpointing=checkpointing)
    start, current = two_models(start_model, tuner, learner)
    segments = segments_of(start)
    rows = rows_of(learner.model, segments)
    learner.add_start_states(rows)
    for row in rows:
        row.start.num_chunks = 3
    objective, totals = MatchingObjective(Losses(**ONLY_KL), learner.start_head), denominators(rows)
    learner.model.train()
    found = [learner.engine.module(row, lambda *args: objective.loss(*args, totals, 2)) for row in rows]
    total = sum(loss for loss, _ in found)
    total.backward()
    expected = plain_kl(start, current, segments)
    expected.backward()
    assert expected > 0.1 and total.item() == pytest.approx(expected.item(), abs=1e-5)
    numbers = [{name: float(value) for name, value in own.items()} for _, own in found]
    assert objective.metrics(numbers, totals)["reference_kl"] == pytest.approx(expected.item(), abs=1e-5)
    largest = 0.0
    pairs = zip(learner.model.named_parameters(), current.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        if theirs.grad is not None:
            assert (ours.grad - theirs.grad).abs().max() < 1e-5, name
            largest = max(largest, float(theirs.grad.abs().max()))
    assert largest > 1e-2


def stage2_of(learner: Learner, folder: Path, ranks: Ranks, **parts: Any) -> Stage2:
    session = SimpleNamespace(
        cfg=learner._cfg,
        learner=learner,
        ranks=ranks,
        run_dir=folder,
        data=SimpleNamespace(table=None),
        collate=partial(collate, learner.model),
        prefetch=lambda run: None,
        finished_steps_saved=lambda kind: nullcontext(),
        **parts,
    )
    return Stage2(session)


def learn(run: Stage2, rows: Sequence[list[Segment]], step: int) -> StepResult:
    return run.update([run.session.collate(row) for row in rows], step)


def count_forwards(learner: Learner) -> list[bool]:
    """One entry per forward pass over a row from now on: whether it was one for gradients."""
    forwards: list[bool] = []
    learner.engine.module.register_forward_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    return forwards


@pytest.mark.parametrize("kind", ["embeddings", "full"])
@pytest.mark.parametrize("deepspeed", ["zero0", "zero2", "zero3"])
def test_an_optimizer_step_holds_the_answer_to_the_start_policy_TGT_16_LRN_2(
    tmp_path, start_model, ranks, deepspeed, kind
):
    """TGT-16, LRN-2: `train_stage2.py`'s own step, by DeepSpeed; in the next step the start is still the start."""
    tuner = TUNERS[kind]
    learner = learner_of(tmp_path, start_model, ranks, tuner, ONLY_KL | {"reference_kl": 2.5}, deepspeed)
    run = stage2_of(learner, tmp_path, ranks)
    segments = segments_of(learner.model)
    rows, forwards = [[segments[i] for i in row] for row in LAYOUT], count_forwards(learner)
    for step in range(2):
        start, current = two_models(start_model, tuner, learner)
        expected = plain_kl(start, current, segments)
        expected.backward()
        norm = torch.stack([p.grad.norm() for p in current.parameters() if p.grad is not None]).norm()
        result = learn(run, rows, step)
        assert result.losses["reference_kl"] == pytest.approx(expected.item(), abs=1e-5)
        assert result.losses["total"] == pytest.approx(2.5 * expected.item(), abs=3e-5)
        assert result.grad_norm == pytest.approx(2.5 * float(norm), rel=3e-4)  # float32, in other orders
    assert forwards == 2 * [*[False] * 4, *[True] * 4]


@pytest.mark.parametrize("deepspeed", ["zero2", "zero3"])
def test_a_checkpoint_leaves_the_frozen_model_out_TGT_16_LRN_5(tmp_path, start_model, ranks, deepspeed):
    """TGT-16, LRN-5: `model.reference_path` holds it; the trained weights come back."""
    learner = learner_of(tmp_path, start_model, ranks, TUNERS["full"], ONLY_KL, deepspeed)
    run, segments = stage2_of(learner, tmp_path, ranks), segments_of(learner.model)
    rows = [[segments[i] for i in row] for row in LAYOUT]
    learn(run, rows, 0)
    learner.save_state(tmp_path / "state")
    expected = learn(run, rows, 1).losses
    (shard,) = (tmp_path / "state").glob("*_model_states.pt")
    names = torch.load(shard, weights_only=False)["module"]
    assert names and all(name.startswith("model.") for name in names)
    learner.load_state(tmp_path / "state")
    assert learn(run, rows, 1).losses == expected


@pytest.mark.parametrize("case", ["weight 0", "every token has a label"])
def test_no_forward_is_made_for_nothing_TGT_16(tmp_path, start_model, ranks, case):
    """TGT-16: neither without a weight, nor where no rank has a token to compare, as in supervised training."""
    weight = 0.0 if case == "weight 0" else 1.0
    learner = learner_of(tmp_path, start_model, ranks, LORA, {"reference_kl": weight})
    run, forwards, segments = stage2_of(learner, tmp_path, ranks), count_forwards(learner), segments_of(learner.model)
    result = learn(run, [segments[:1] if case == "weight 0" else segments[-1:]] * 4, 0)
    assert forwards == [True] * 4
    assert result.losses.get("reference_kl") == (None if case == "weight 0" else 0.0)


def test_a_rank_without_such_tokens_runs_as_often_as_the_others_TGT_16_PCK_8(tmp_path, start_model, ranks, monkeypatch):
    """TGT-16, PCK-8: forwards of the start policy, and chunks of logits; the other rank has 300 tokens in a row."""
    learner = learner_of(tmp_path, start_model, ranks, LORA, ONLY_KL)
    rows, forwards = [collate(learner.model, segments_of(learner.model)[-1:])] * 2, count_forwards(learner)
    monkeypatch.setattr(learner._ranks, "gather", lambda value: [value, 300])
    learner.add_start_states(rows)
    assert forwards == [False] * 2
    assert [(len(row.start.states), row.start.num_chunks) for row in rows] == [(0, 2)] * 2


@pytest.mark.parametrize("num_tokens", [0, 1, 60])
def test_both_heads_run_equally_often_on_every_rank_and_by_chunks_PCK_8_LRN_4(num_tokens):
    """PCK-8, LRN-4: `num_chunks` times forward, as often in backward, also without any token: ZeRO-3 gathers each time;
    no logits are kept for backward."""
    torch.manual_seed(3)
    heads = [nn.Linear(16, 1300, bias=False) for _ in range(2)]
    hidden, calls, kept = torch.randn(70, 16, requires_grad=True), [], []
    for head in heads:
        head.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    start = StartStates(torch.randn(num_tokens, 16), num_chunks=4)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        total = reference_kl_sum(hidden, heads[0], torch.arange(num_tokens), start, heads[1])
    assert len(calls) == 8 and max(calls) == max(1, num_tokens // 4) and max(kept) < 1300
    total.backward()
    assert len(calls) == 16 and min(calls) >= 1 and heads[1].weight.grad is None
    if not num_tokens:
        assert total == 0 and heads[0].weight.grad.abs().max() == 0 and hidden.grad.abs().max() == 0


def test_the_expectation_is_over_the_start_policy_TGT_16():
    """TGT-16: KL((3/4, 1/4) || (1/2, 1/2)) by hand; the other direction would be ln(4/3) / 2."""
    head = nn.Identity()
    hidden, start = torch.zeros(3, 2), StartStates(torch.tensor([[3.0, 1.0]]).log(), num_chunks=1)
    found = reference_kl_sum(hidden, head, torch.tensor([1]), start, head)
    assert float(found) == pytest.approx(0.75 * np.log(1.5) + 0.25 * np.log(0.5))
