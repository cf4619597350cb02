"""Loss parts against scipy, float64 and hand-made values; chunking against one plain pass."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance
from torch import nn

from utils.config.schema import Losses
from utils.losses import (
    PARTS,
    coordinate_losses,
    gaussian_target,
    loss_sums,
    num_chunks_for,
    text_losses,
    total_loss,
)

VOCAB = 1300
COORD_IDS = torch.arange(200, 1200)


def random_labels(num_coord: int, num_text: int, num_positions: int, seed: int = 0) -> SimpleNamespace:
    g = torch.Generator().manual_seed(seed)
    return SimpleNamespace(
        coord_pos=torch.randint(0, num_positions, (num_coord,), generator=g),
        coord_target=999 * torch.rand(num_coord, generator=g),
        text_pos=torch.randint(0, num_positions, (num_text,), generator=g),
        text_label=torch.randint(0, VOCAB, (num_text,), generator=g),
        text_weight=torch.rand(num_text, generator=g),
        coord_ids=COORD_IDS,
    )


def head_and_states(num_positions: int = 40, width: int = 16) -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(3)
    return nn.Linear(width, VOCAB, bias=False), torch.randn(num_positions, width, requires_grad=True)


def plain_sums(hidden, head, labels, sigma):
    """One pass, all logits at once: what the chunks must add up to."""
    coord = coordinate_losses(head(hidden[labels.coord_pos]), labels.coord_target, COORD_IDS, sigma)
    text = text_losses(head(hidden[labels.text_pos]), labels.text_label) * labels.text_weight
    return {"text": text.sum(), **{part: value.sum() for part, value in coord.items()}}


def test_gaussian_target_is_centred_where_the_bin_is_tgt_7():
    """TGT-7: A fractional target (from optimal transport) lies between its neighbours; at the border mass piles up
    inside."""
    probability = gaussian_target(torch.tensor([500.0, 500.25, 0.0]), sigma=2.0)
    torch.testing.assert_close(probability.sum(dim=1), torch.ones(3))
    assert probability[0].argmax() == 500
    torch.testing.assert_close(probability[0, 502] / probability[0, 500], torch.tensor(math.exp(-0.5)))
    mean = (probability[1].double() * torch.arange(1000)).sum()
    assert mean == pytest.approx(500.25, abs=1e-3)
    assert probability[2].argmax() == 0 and probability[2, 1] > probability[2, 2]


def test_coordinate_cross_entropy_by_hand_tgt_7():
    """TGT-7: A uniform guess costs log(1000) whatever the target and whatever the other tokens' logits; a perfect
    one costs
    the target's entropy, log(sigma * sqrt(2 pi e))."""
    logits = torch.zeros(1, VOCAB)
    logits[0, :200] = 5.0
    loss = coordinate_losses(logits, torch.tensor([123.0]), COORD_IDS, sigma=12.0)
    assert float(loss["coord"]) == pytest.approx(math.log(1000), rel=1e-6)
    perfect = torch.zeros(1, VOCAB)
    perfect[:, COORD_IDS] = gaussian_target(torch.tensor([500.0]), 12.0).log().clamp(min=-80)
    loss = coordinate_losses(perfect, torch.tensor([500.0]), COORD_IDS, sigma=12.0)
    assert float(loss["coord"]) == pytest.approx(math.log(12 * math.sqrt(2 * math.pi * math.e)), rel=1e-4)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.floats(0, 999), st.floats(0.1, 30))
def test_w1_is_the_wasserstein_distance_tgt_7(seed, target, scale):
    """TGT-7: Against scipy, in units of the image width (bin / 999)."""
    logits = scale * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))
    ours = coordinate_losses(logits, torch.tensor([target]), COORD_IDS, 12.0)["w1"]
    probability = logits[0, COORD_IDS].double().softmax(0).numpy()
    truth = wasserstein_distance(np.arange(1000) / 999, [target / 999], u_weights=probability)
    assert float(ours) == pytest.approx(truth, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("gap", [-200.0, -30.0, -5.0, 0.0, 5.0, 30.0, 200.0])
def test_gate_is_the_mass_outside_tgt_7(gap):
    """TGT-7: Against float64; no inf or nan and a value in [0, 1] however far apart the logits are."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[:, COORD_IDS] += gap
    logits.requires_grad_()
    gate = coordinate_losses(logits, torch.full((4,), 10.0), COORD_IDS, 12.0)["gate"]
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[COORD_IDS] = False
    truth = logits.detach().double().softmax(1)[:, outside].sum(1)
    torch.testing.assert_close(gate.detach().double(), truth, rtol=1e-4, atol=1e-6)
    assert ((gate > -1e-6) & (gate <= 1)).all()
    gate.sum().backward()
    assert logits.grad.isfinite().all()


def test_coordinate_gradient_equals_float64_tgt_7():
    """TGT-7."""
    logits = torch.randn(5, VOCAB, requires_grad=True)
    target = torch.tensor([0.0, 17.5, 333.3, 998.9, 999.0])
    sum(value.sum() for value in coordinate_losses(logits, target, COORD_IDS, 9.0).values()).backward()
    double = logits.detach().double().requires_grad_()
    p = double[:, COORD_IDS].softmax(1)
    bins = torch.arange(1000)
    q = torch.softmax(-((bins - target.double()[:, None]) ** 2) / (2 * 9.0**2), dim=1)
    w1 = (p * (bins - target.double()[:, None]).abs()).sum() / 999
    gate = (1 - double.softmax(1)[:, COORD_IDS].sum(1)).sum()
    (-(q * p.log()).sum() + w1 + gate).backward()
    torch.testing.assert_close(logits.grad.double(), double.grad, rtol=1e-4, atol=1e-6)


def test_text_loss_by_hand_tgt_7():
    """TGT-7."""
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    expected = torch.tensor([math.log(4 / 3), math.log(2.0)])
    torch.testing.assert_close(text_losses(logits, torch.tensor([1, 0])), expected)


def test_text_weights_carry_the_desc_weight_tgt_7():
    """TGT-7: Doubling a token's weight doubles its share of the sum; weight zero removes it."""
    head, hidden = head_and_states()
    labels = random_labels(0, 2, 40)
    single = text_losses(head(hidden[labels.text_pos]), labels.text_label)
    labels.text_weight = torch.tensor([2.0, 0.0])
    torch.testing.assert_close(loss_sums(hidden, head, labels, 12.0, 1)["text"], 2 * single[0])


@pytest.mark.parametrize("num_coord, num_text", [(37, 23), (0, 23), (37, 0), (1, 1), (0, 0)])
@pytest.mark.parametrize("num_chunks", [1, 3, 50])
def test_chunks_change_neither_sums_nor_gradients_lrn_4(num_coord, num_text, num_chunks):
    """LRN-4."""
    head, hidden = head_and_states()
    labels = random_labels(num_coord, num_text, 40)
    parameters = (hidden, head.weight)
    sums = loss_sums(hidden, head, labels, 12.0, num_chunks)
    ours = torch.autograd.grad(total_loss(sums, {"text": 3.0, "coord": 5.0}, Losses()), parameters)
    truth = plain_sums(hidden, head, labels, 12.0)
    theirs = torch.autograd.grad(total_loss(truth, {"text": 3.0, "coord": 5.0}, Losses()), parameters)
    for part in PARTS:
        torch.testing.assert_close(sums[part], truth[part], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_labels", [0, 1, 60])
def test_head_runs_equally_often_on_every_rank_pck_8(num_labels):
    """PCK-8: `num_chunks` times forward, as often in backward, also without any label: ZeRO-3 gathers each time."""
    head, hidden = head_and_states()
    calls = []
    head.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    sums = loss_sums(hidden, head, random_labels(num_labels, num_labels, 40), 12.0, num_chunks=4)
    assert len(calls) == 4
    sum(sums.values()).backward()
    assert len(calls) == 8 and min(calls) >= 1
    if num_labels == 0:
        assert all(float(value.detach()) == 0 for value in sums.values())
        assert head.weight.grad.abs().max() == 0 and hidden.grad.abs().max() == 0


def test_logits_exist_at_labels_only_and_chunk_by_chunk_lrn_4():
    """LRN-4: 1000 positions, 30 labels, 3 chunks: never more than ten rows of logits, and none kept for backward."""
    head, hidden = head_and_states(num_positions=1000)
    rows, kept = [], []
    head.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))

    def keep(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_sums(hidden, head, random_labels(15, 15, 1000), 12.0, num_chunks=3)
    assert rows == [10, 10, 10]
    assert max(kept) < 10 * VOCAB


def test_parts_are_float32_even_on_bfloat16_states_tgt_7():
    """TGT-7."""
    head, hidden = head_and_states()
    sums = loss_sums(hidden.bfloat16(), head.bfloat16(), random_labels(4, 4, 40), 12.0, 2)
    assert all(value.dtype == torch.float32 for value in sums.values())


def test_total_loss_by_hand_tgt_7():
    """TGT-7."""
    sums = {"text": torch.tensor(6.0), "coord": torch.tensor(8.0), "w1": torch.tensor(2.0), "gate": torch.tensor(1.0)}
    weights = Losses(text=0.5, coord=1.0, w1=3.0, gate=4.0)
    loss = total_loss(sums, {"text": 3.0, "coord": 2.0}, weights)
    assert float(loss) == 0.5 * 6 / 3 + (8 + 3 * 2 + 4 * 1) / 2
    assert float(total_loss({part: torch.tensor(0.0) for part in PARTS}, {"text": 0.0, "coord": 0.0}, weights)) == 0


def test_layout_of_micro_steps_does_not_change_the_loss_pck_5():
    """PCK-5: Five labels in one batch, or two and three in two batches, with the step's denominators: the same
    total."""
    head, hidden = head_and_states()
    whole = random_labels(5, 5, 40)

    def part(lo: int, hi: int) -> SimpleNamespace:
        return SimpleNamespace(**{k: v if k == "coord_ids" else v[lo:hi] for k, v in vars(whole).items()})

    step = {"text": float(whole.text_weight.sum()), "coord": 5.0}
    losses = [
        total_loss(loss_sums(hidden, head, labels, 12.0, 2), step, Losses())
        for labels in (whole, part(0, 2), part(2, 5))
    ]
    torch.testing.assert_close(losses[0], losses[1] + losses[2])


def test_num_chunks_for():
    assert [num_chunks_for(n, 10) for n in (0, 1, 10, 11, 100)] == [1, 1, 1, 2, 10]
