"""The policy objective against a plain reference: one answer at a time, all logits, float64 (GRP-6, PCK-5, LRN-4)."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.learner.test_model import collate, make_segment, relative_difference
from utils.config.schema import Rlhf
from utils.grpo import group_advantages
from utils.learner.model import RowModel, base_model, load_model
from utils.learner.objectives import PolicyObjective
from utils.packing import Batch
from utils.policy_loss import (
    PolicyTokens,
    policy_loss,
    policy_metrics,
    policy_sums,
    policy_tokens,
    token_logprobs,
    token_weights,
)
from utils.targets import plain_segment

VOCAB, WIDTH, MAX_NEW_TOKENS = 50, 8, 20


def settings_of(**changes: Any) -> Rlhf:
    """The config section `rlhf` with its defaults and these changes."""
    return Rlhf(reward_funcs=["detection_f1"], **changes)


@dataclasses.dataclass
class Answer:
    """One sampled answer of a toy policy: a state per token, and everything else about it."""

    states: torch.Tensor  # [n, WIDTH]
    labels: torch.Tensor  # [n]
    advantage: float
    old: torch.Tensor  # [n]
    ref: torch.Tensor  # [n]
    engine: torch.Tensor  # [n]


def head_and_answers(lengths: list[int], seed: int = 0, spread: float = 0.3) -> tuple[nn.Linear, list[Answer]]:
    """Old, reference and engine differ from the present policy by noise of `spread` per token."""
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    answers = []
    for length in lengths:
        states, labels = torch.randn(length, WIDTH, generator=g), torch.randint(0, VOCAB, (length,), generator=g)
        logprob = head(states).log_softmax(1).gather(1, labels[:, None])[:, 0].detach()
        old, ref, engine = (logprob + spread * torch.randn(length, generator=g) for _ in range(3))
        answers.append(Answer(states, labels, float(torch.randn(1, generator=g)), old, ref, engine))
    return head, answers


def tokens_of(answers: list[Answer], loss_type: str = "grpo") -> tuple[PolicyTokens, float]:
    lengths = [len(answer.labels) for answer in answers]
    weights, shares = token_weights(np.array(lengths), loss_type, MAX_NEW_TOKENS)
    tokens = policy_tokens(lengths, [answer.advantage for answer in answers], weights, [a.engine for a in answers])
    tokens.old_logprob = torch.cat([answer.old for answer in answers])
    tokens.ref_logprob = torch.cat([answer.ref for answer in answers])
    return tokens, float(shares.sum())


def our_gradient(
    head: nn.Linear,
    batches: list[list[Answer]],
    options: Rlhf,
    loss_type: str = "grpo",
    num_chunks: int = 2,
    temperature: float = 1.0,
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the head over one optimizer step of these micro-steps."""
    head.zero_grad()
    prepared = [tokens_of(answers, loss_type) for answers in batches]
    denominator, total = sum(share for _, share in prepared), 0.0
    for answers, (tokens, _) in zip(batches, prepared, strict=True):
        states = torch.cat([answer.states for answer in answers])
        labels = torch.cat([answer.labels for answer in answers])
        logprob, _ = token_logprobs(states, head, torch.arange(len(labels)), labels, num_chunks, temperature)
        loss = policy_loss(policy_sums(logprob, tokens, options), denominator, options)
        loss.backward()
        total += float(loss.detach())
    return total, head.weight.grad.clone()


def reference_gradient(
    head: nn.Linear, answers: list[Answer], options: Rlhf, loss_type: str = "grpo", temperature: float = 1.0
) -> tuple[float, torch.Tensor]:
    """As the papers write it: a Python loop over answers and tokens in float64."""
    weight = head.weight.detach().double().requires_grad_()
    high = options.epsilon if options.epsilon_high is None else options.epsilon_high
    per_answer, num_tokens = [], 0
    for answer in answers:
        log_p = (answer.states.double() @ weight.T / temperature).log_softmax(1)
        losses = []
        log_ratios = [log_p[t, int(answer.labels[t])] - answer.old[t].double() for t in range(len(answer.labels))]
        for t, own in enumerate(log_ratios):
            is_sequence = options.importance_sampling_level == "sequence"
            ratio = torch.exp(sum(log_ratios) / len(log_ratios) if is_sequence else own)
            loss = -min(ratio * answer.advantage, torch.clamp(ratio, 1 - options.epsilon, 1 + high) * answer.advantage)
            if options.importance_correction_cap is not None:
                gaps = answer.old - answer.engine
                gap = gaps.mean() if is_sequence else gaps[t]
                loss = loss * min(math.exp(gap), options.importance_correction_cap)
            towards = answer.ref[t].double() - log_p[t, int(answer.labels[t])]
            losses.append(loss + options.beta * (torch.exp(towards) - towards - 1))
        per_answer.append(losses)
        num_tokens += len(losses)
    if loss_type == "dapo":
        total = sum(sum(losses) for losses in per_answer) / num_tokens
    elif loss_type == "dr_grpo":
        total = sum(sum(losses) / MAX_NEW_TOKENS for losses in per_answer) / len(answers)
    else:
        total = sum(sum(losses) / len(losses) for losses in per_answer) / len(answers)
    total.backward()
    return float(total.detach()), weight.grad


VARIANTS = [
    settings_of(),
    settings_of(epsilon_high=0.28, beta=0.04),
    settings_of(epsilon=0.05, importance_correction_cap=None),
    settings_of(epsilon=0.1, importance_correction_cap=1.1, beta=0.5),
    settings_of(importance_sampling_level="sequence", epsilon=3e-3, epsilon_high=4e-2),
    settings_of(importance_sampling_level="sequence", epsilon=0.1, importance_correction_cap=1.02, beta=0.04),
]


@pytest.mark.parametrize("options", VARIANTS, ids=range(len(VARIANTS)))
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_and_gradient_equal_the_plain_reference_grp_6(options, loss_type, temperature):
    """GRP-6."""
    head, answers = head_and_answers([7, 1, 13, 4])
    loss, gradient = our_gradient(head, [answers], options, loss_type, temperature=temperature)
    expected, expected_gradient = reference_gradient(head, answers, options, loss_type, temperature)
    assert loss == pytest.approx(expected, abs=1e-5)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=1e-5)
    assert gradient.abs().max() > 1e-2


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.data(),
    st.sampled_from(["grpo", "dapo", "dr_grpo"]),
    st.sampled_from(VARIANTS),
)
def test_rows_micro_steps_and_ranks_do_not_change_the_gradient_pck_5(lengths, data, loss_type, options):
    """PCK-5: any order of the answers, cut into any micro-steps, empty ones included, chunked differently."""
    head, answers = head_and_answers(lengths)
    order = data.draw(st.permutations(range(len(answers))))
    borders = sorted(data.draw(st.lists(st.integers(0, len(answers)), max_size=3)))
    parts = [
        [answers[i] for i in order[start:end]]
        for start, end in zip([0, *borders], [*borders, len(answers)], strict=True)
        if end > start
    ]
    loss, gradient = our_gradient(head, [answers], options, loss_type, num_chunks=1)
    other_loss, other_gradient = our_gradient(head, parts, options, loss_type, num_chunks=3)
    assert other_loss == pytest.approx(loss, abs=1e-5)
    torch.testing.assert_close(other_gradient, gradient, rtol=1e-4, atol=1e-5)


def test_sharing_the_denominator_per_micro_step_would_be_seen_pck_5():
    """PCK-5: the check above tells a mean of means from the mean."""
    head, answers = head_and_answers([2, 9, 3])
    _, whole = our_gradient(head, [answers], settings_of(), "dapo")
    wrong = sum(our_gradient(head, [part], settings_of(), "dapo")[1] / 2 for part in (answers[:1], answers[1:]))
    assert (wrong - whole).abs().max() > 1e-3


def test_on_policy_ratios_are_one_and_the_gradient_is_reinforce_grp_6():
    """GRP-6: in the first epoch no token is clipped whatever epsilon is, and the gradient is -A * grad log p."""
    head, answers = head_and_answers([5, 8])
    tokens, denominator = tokens_of(answers)
    tokens.old_logprob = tokens.engine_logprob = None
    states, labels = torch.cat([a.states for a in answers]), torch.cat([a.labels for a in answers])
    options = settings_of(epsilon=1e-6)
    logprob, entropy = token_logprobs(states, head, torch.arange(13), labels, 2)
    sums = policy_sums(logprob, tokens, options, entropy)
    metrics = policy_metrics({name: float(value) for name, value in sums.sums.items()})
    assert metrics["ratio_mean"] == float(sums.maxima["ratio_max"]) == 1.0 and metrics["clip_fraction"] == 0.0
    (ours,) = torch.autograd.grad(policy_loss(sums, denominator, options), head.weight)
    plain = torch.log_softmax(head(states), 1).gather(1, labels[:, None])[:, 0]
    (expected,) = torch.autograd.grad(-(tokens.weight * tokens.advantage * plain).sum() / denominator, head.weight)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    distribution = torch.distributions.Categorical(logits=head(states))
    assert metrics["entropy"] == pytest.approx(float(distribution.entropy().mean().detach()), rel=1e-5)
    assert policy_metrics(dict.fromkeys(sums.sums, 0.0)) == {}  # an entropy of 0 would mean that answers collapsed


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_equal_rewards_leave_nothing_but_the_kl_grp_6(beta):
    """GRP-6."""
    head, answers = head_and_answers([5, 8, 2, 6])
    advantages = group_advantages(np.full((2, 2), 0.7)).flatten()
    for answer, advantage in zip(answers, advantages, strict=True):
        answer.advantage = float(advantage)
    loss, gradient = our_gradient(head, [answers], settings_of(beta=beta))
    if not beta:
        assert loss == 0 and gradient.abs().max() == 0
        return
    assert loss > 0
    _, kl_alone = reference_gradient(head, answers, settings_of(beta=beta))
    torch.testing.assert_close(gradient.double(), kl_alone, rtol=1e-5, atol=1e-5)


def one_token(ratio: float, advantage: float, options: Rlhf, engine: float = 0.0) -> tuple[float, float, dict]:
    """Loss, gradient by the log-probability and metrics of one token whose ratio is given; old is log(1)."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    tokens = policy_tokens([1], [advantage], [1.0], [[engine]])
    tokens.old_logprob = torch.zeros(1)
    sums = policy_sums(logprob, tokens, options)
    loss = policy_loss(sums, 1.0, options)
    (gradient,) = torch.autograd.grad(loss, logprob)
    return float(loss.detach()), float(gradient), policy_metrics({k: float(v) for k, v in sums.sums.items()})


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "has_gradient", "clip"),
    [
        (1.1, 2.0, -2.2, True, None),
        (1.5, 2.0, -2.6, False, "clip_high"),  # the upper bound is 1.3
        (1.5, -2.0, 3.0, True, None),  # a bad token that became likelier is always pushed down
        (0.5, -2.0, 1.6, False, "clip_low"),
        (0.5, 2.0, -1.0, True, None),
        (1.5, 0.4, -0.52, False, "clip_high"),
        (0.5, -0.4, 0.32, False, "clip_low"),
    ],
)
def test_clipping_by_hand_grp_6(ratio, advantage, loss, has_gradient, clip):
    """GRP-6: epsilon 0.2 below, 0.3 above; clipped exactly where the objective would gain from going on."""
    found, gradient, metrics = one_token(ratio, advantage, settings_of(epsilon=0.2, epsilon_high=0.3))
    assert found == pytest.approx(loss) and (abs(gradient) > 0) == has_gradient
    clipped = {name: metrics[name] for name in ("clip_high", "clip_low")}
    assert clipped == {"clip_high": float(clip == "clip_high"), "clip_low": float(clip == "clip_low")}
    assert metrics["clip_fraction"] == float(clip is not None)


def test_symmetric_bounds_without_epsilon_high_grp_6():
    """GRP-6."""
    assert one_token(1.5, 1.0, settings_of(epsilon=0.2))[0] == pytest.approx(-1.2)


def test_kl_by_hand_grp_6():
    """GRP-6: k3 at p = 0.2, reference 0.5: 2.5 - log 2.5 - 1; its mean over the policy is the true KL."""
    logprob, tokens = torch.tensor([math.log(0.2)]), policy_tokens([1], [0.0], [1.0])
    tokens.ref_logprob = torch.tensor([math.log(0.5)])
    assert float(policy_sums(logprob, tokens, settings_of(beta=1.0)).kl) == pytest.approx(2.5 - math.log(2.5) - 1)
    p, q = torch.rand(6, generator=torch.Generator().manual_seed(0)).softmax(0), torch.full((6,), 1 / 6)
    tokens = policy_tokens([6], [0.0], [1.0])
    tokens.weight, tokens.ref_logprob = p, q.log()
    kl = policy_sums(p.log(), tokens, settings_of(beta=1.0)).kl
    assert float(kl) == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-6)


def test_importance_correction_by_hand_grp_6():
    """GRP-6: learner e^0 against engine e^-0.5 weighs e^0.5, capped at 2; what the engine did not report weighs 1."""
    options = settings_of(importance_correction_cap=2.0)
    assert one_token(1.0, 1.0, options, engine=-0.5)[0] == pytest.approx(-math.exp(0.5))
    assert one_token(1.0, 1.0, options, engine=-5.0)[0] == pytest.approx(-2.0)
    loss, _, metrics = one_token(1.0, 1.0, options.model_copy(update={"importance_correction_cap": None}), engine=-5.0)
    assert loss == pytest.approx(-1.0) and metrics["engine_gap_mean"] == 5.0
    tokens = policy_tokens([3], [1.0], [1.0], [[-1.0, -1.0]])  # two of three tokens: no stop token
    assert tokens.engine_logprob.isnan().tolist() == [False, False, True]
    sums = policy_sums(torch.full((3,), -1.0), tokens, options)
    assert float(sums.policy) == pytest.approx(-3.0) and float(sums.maxima["engine_gap_max"]) == 0.0


@pytest.mark.parametrize("advantage", ["answer", "object"])
def test_a_sequences_correction_by_hand_grp_6(advantage):
    """GRP-6: gaps of 2, -1 and 0 (not reported) have the mean 1/3: the answer weighs e^(1/3); another is capped at 2.
    With the ratio of the answer it is that of learner to engine, here e^(1/3 + 0.1)."""
    options = settings_of(importance_sampling_level="sequence", advantage=advantage, epsilon=0.5)
    tokens = policy_tokens([3, 2], [1.0, 1.0], [1.0, 1.0], [[-3.0, 0.0], [-9.0, -1.0]])
    tokens.old_logprob = torch.full((5,), -1.0)
    sums = policy_sums(torch.full((5,), -0.9), tokens, options)
    assert float(sums.policy) == pytest.approx(-3 * math.exp(1 / 3 + 0.1) - 2 * 2 * math.exp(0.1))
    assert float(sums.sums["correction_mean"]) == pytest.approx(3 * math.exp(1 / 3) + 2 * 2)


def test_token_weights_by_hand_grp_6():
    """GRP-6: two answers of 2 and 8 tokens, one left out, at most 10 new tokens."""
    lengths = np.array([2, 8, 0])
    by_type = {kind: token_weights(lengths, kind, 10) for kind in ("grpo", "dapo", "dr_grpo")}
    assert [values.tolist() for values in by_type["grpo"]] == [[0.5, 0.125, 0.0], [1.0, 1.0, 0.0]]
    assert [values.tolist() for values in by_type["dapo"]] == [[1.0, 1.0, 0.0], [2.0, 8.0, 0.0]]
    assert [values.tolist() for values in by_type["dr_grpo"]] == [[0.1, 0.1, 0.0], [1.0, 1.0, 0.0]]


@pytest.mark.parametrize("num_labels", [0, 1, 30])
def test_head_runs_equally_often_on_every_rank_pck_8(num_labels):
    """PCK-8, LRN-4: `num_chunks` times forward and backward, also without any token, and never on more than a chunk."""
    head, hidden, rows = nn.Linear(WIDTH, VOCAB, bias=False), torch.randn(100, WIDTH, requires_grad=True), []
    head.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    positions, labels = torch.arange(num_labels), torch.zeros(num_labels, dtype=torch.int64)
    logprob, entropy = token_logprobs(hidden, head, positions, labels, num_chunks=3)
    assert logprob.shape == entropy.shape == (num_labels,) and not entropy.requires_grad
    assert len(rows) == 3 and max(rows) == max(1, num_labels // 3)
    one = [1.0] if num_labels else []
    sums = policy_sums(logprob, policy_tokens([num_labels][: len(one)], one, one), settings_of())
    policy_loss(sums, float(len(one)), settings_of()).backward()
    assert len(rows) == 6
    if not num_labels:
        assert head.weight.grad.abs().max() == 0 and hidden.grad.abs().max() == 0
        assert float(sums.maxima["ratio_max"]) == 0.0


def test_no_logits_are_kept_for_backward_lrn_4():
    """LRN-4."""
    head, hidden, kept = nn.Linear(WIDTH, VOCAB, bias=False), torch.randn(100, WIDTH, requires_grad=True), []

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(hidden, head, torch.arange(90), torch.zeros(90, dtype=torch.int64), num_chunks=3)
    assert max(kept) < 30 * VOCAB


def test_tokens_move_to_a_device():
    tokens = policy_tokens([2, 3], [1.0, -1.0], [0.5, 0.5])
    assert tokens.sequence.tolist() == [0, 0, 1, 1, 1] and tokens.advantage.tolist() == [1, 1, -1, -1, -1]
    moved = tokens.to("cpu")
    assert moved.old_logprob is None and torch.equal(moved.weight, tokens.weight)


# ---------------------------------------------------------------------------------------------------------------------
# with a real model and packed rows


@pytest.fixture
def model(start_model) -> nn.Module:
    return load_model(start_model, "float32", "sdpa")


def answers_of(model: nn.Module, num: int = 4) -> list:
    """Segments with and without images, answers of 5 to 11 tokens."""
    grids = [(4, 6), None, (2, 4), None]
    raw = [make_segment(model, seed, grids[seed % 4], 5 + 2 * seed) for seed in range(num)]
    split = [(s.input_ids[: s.answer_start], s.input_ids[s.answer_start :]) for s in raw]
    return [
        plain_segment(s.sample_id, prompt, answer, s.vision) for s, (prompt, answer) in zip(raw, split, strict=True)
    ]


def model_gradient(model: nn.Module, rows: list[list], advantage: dict[str, float]) -> dict[str, torch.Tensor]:
    """One optimizer step over packed rows, as a trainer does it."""
    model.zero_grad()
    options, total = settings_of(), 0.0
    prepared = []
    for row in rows:
        lengths = [len(segment.text_index) for segment in row]
        weights, shares = token_weights(np.array(lengths), "grpo", MAX_NEW_TOKENS)
        prepared.append((collate(model, row), policy_tokens(lengths, [advantage[s.sample_id] for s in row], weights)))
        total += float(shares.sum())
    for batch, tokens in prepared:
        hidden = RowModel(model).hidden_states(batch).flatten(0, 1)
        logprob, _ = token_logprobs(hidden, base_model(model).lm_head, batch.text_pos, batch.text_label, 2)
        policy_loss(policy_sums(logprob, tokens, options), total, options).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_packed_rows_train_as_transformers_own_forward_would_grp_6_pck_5(model):
    """GRP-6, PCK-5, PCK-4: rows of several answers, images included, in two layouts, against the library's forward of
    one answer at a time with all logits."""
    segments = answers_of(model)
    advantage = {"s0": 1.0, "s1": -0.5, "s2": 0.3, "s3": -0.8}
    one_row = model_gradient(model, [segments], advantage)
    two_rows = model_gradient(model, [[segments[3], segments[0]], [segments[1], segments[2]]], advantage)
    model.zero_grad()
    for segment in segments:
        input_ids = torch.from_numpy(segment.input_ids)[None]
        logits = model(
            input_ids=input_ids,
            mm_token_type_ids=(input_ids == model.config.image_token_id).int(),
            **segment.vision,
        ).logits[0]
        log_p = logits.log_softmax(-1)[torch.arange(len(segment)) - 1, input_ids[0]][segment.answer_start :]
        (-advantage[segment.sample_id] * log_p.mean() / len(segments)).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert relative_difference(one_row, plain) < 1e-5
    assert relative_difference(two_rows, plain) < 1e-5


def test_a_row_without_answers_costs_nothing_pck_8(model):
    """PCK-8."""
    gradient = model_gradient(model, [[]], {})
    assert all(value.abs().max() == 0 for value in gradient.values())


def test_scored_tokens_are_those_of_the_answer_grp_6(model):
    """GRP-6: position and label of every token of the answer, in order, one sequence number per segment."""
    segments = answers_of(model, 2)
    batch: Batch = collate(model, segments)
    tokens = policy_tokens([len(s.text_index) for s in segments], [0.0, 0.0], [1.0, 1.0])
    assert batch.input_ids.flatten()[batch.text_pos + 1].tolist() == batch.text_label.tolist()
    starts = [0, len(segments[0])]
    expected = [starts[i] + segments[i].answer_start - 1 + t for i in range(2) for t in range(5 + 2 * i)]
    assert batch.text_pos.tolist() == expected and tokens.sequence.tolist() == [0] * 5 + [1] * 7


def test_a_step_is_the_sum_over_rows_with_its_penalty_and_the_largest_maxima_LOG_3():
    """LOG-3, GRP-6: two rows; a step whose requests all failed has no denominator."""
    rows = [
        {"policy": 2.0, "weighted_kl": 1.0, "engine_gap_max": gap, "num_tokens": 4.0, "clip_high": 1.0, "clip_low": 0.0}
        for gap in (0.25, 0.5)
    ]
    objective = PolicyObjective(settings_of(beta=0.5), denominator=4.0)
    found = objective.metrics(rows, objective.totals([]))
    assert (found["policy"], found["total"], found["engine_gap_max"]) == (1.0, 1.0 + 0.5 * 0.5, 0.5)
    assert found["clip_fraction"] == 0.25
    failed = objective.metrics([dict.fromkeys(rows[0], 0.0)], {"answers": 0.0})
    assert failed == {"total": 0.0, "policy": 0.0, "engine_gap_max": 0.0}
