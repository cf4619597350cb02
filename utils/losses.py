"""The loss of a row's supervised positions (TGT-7), and the divergence from the start policy or a teacher at the other
tokens of its answers (TGT-16), without ever holding the logits of a whole row (LRN-4). Pure.

Shapes: N positions, V vocabulary, D hidden width, Nc coordinates, Nt text tokens, Nu answer tokens without a label,
K most likely tokens.
Every part is computed in float32 and is a weighted SUM; `total_loss` divides by totals over all ranks and micro-steps
of an optimizer step (PCK-5), so the gradient does not depend on how samples are laid out in rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, pad
from torch.utils.checkpoint import checkpoint

from utils.geometry import NUM_BINS

if TYPE_CHECKING:
    from utils.config.schema import Losses
    from utils.packing import Batch, StartStates, TeacherTop

PARTS = ("text", "coord", "w1", "gate")


def gaussian_target(target: Tensor, sigma: float) -> Tensor:
    """Probabilities [Nc, 1000]: a Gaussian of `sigma` bins around each (possibly fractional) bin, summing to one."""
    bins = torch.arange(NUM_BINS, device=target.device, dtype=torch.float32)
    return torch.softmax(-((bins - target.float()[:, None]) ** 2) / (2 * sigma**2), dim=1)


def coordinate_losses(logits: Tensor, target: Tensor, coord_ids: Tensor, sigma: float) -> dict[str, Tensor]:
    """The three coordinate parts per position, each float32[Nc].

    Args:
        logits: [Nc, V].
        target: float[Nc], bins 0..999, may be fractional.
        coord_ids: int64[1000], vocabulary id of each bin's token.
        sigma: width of the Gaussian target, bins.

    Returns:
        coord: cross-entropy of the distribution over the 1000 coordinate tokens to the Gaussian target; its minimum is
            that Gaussian's entropy, not zero.
        w1: 1-Wasserstein distance of that distribution to the point mass at the target, E|k - target| / 999, in
            normalised image widths (0..1). To a point mass this equals the integral of |CDF difference|.
        gate: probability mass outside the coordinate tokens.
    """
    logits = logits.float()
    over_bins = logits[:, coord_ids]
    log_p = over_bins.log_softmax(dim=1)
    bins = torch.arange(NUM_BINS, device=logits.device, dtype=torch.float32)
    distance = (bins - target.float()[:, None]).abs() / (NUM_BINS - 1)
    inside = over_bins.logsumexp(dim=1) - logits.logsumexp(dim=1)  # log of the mass on coordinate tokens, <= 0
    return {
        "coord": -(gaussian_target(target, sigma) * log_p).sum(dim=1),
        "w1": (log_p.exp() * distance).sum(dim=1),
        "gate": -torch.expm1(inside),
    }


def text_losses(logits: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy per position, float32[Nt], of logits [Nt, V] to labels int64[Nt]."""
    return cross_entropy(logits.float(), label, reduction="none")


def num_chunks_for(num_labels: int, chunk_size: int = 256) -> int:
    """The number of chunks of about `chunk_size` rows of logits. Ranks must agree: use the largest of all ranks."""
    return max(1, -(-num_labels // chunk_size))


def loss_sums(
    hidden: Tensor, lm_head: Callable[[Tensor], Tensor], labels: Batch, sigma: float, num_chunks: int
) -> dict[str, Tensor]:
    """Weighted sums of the parts over all labels, each a float32 scalar: `{"text", "coord", "w1", "gate"}`.

    The head runs exactly `num_chunks` times, forward and again in backward, whatever the number of labels, because
    under ZeRO-3 each run gathers its weight with the other ranks; so `num_chunks` must be the same on all ranks. Only
    one chunk's logits exist at a time. A chunk without labels scores one position with weight zero.

    Args:
        hidden: [N, D] final hidden states.
        lm_head: the model's head, called as a module (so that PEFT's and ZeRO's hooks act).
        labels: read are the positions, targets, weights and `coord_ids`.
    """

    def score(states: Tensor, target: Tensor, label: Tensor, weight: Tensor) -> Tensor:
        # Split, not sliced: the backward of each slice would fill a whole gradient of its own.
        coord_logits, text_logits = torch.split(lm_head(states), [len(target), len(label)])
        text = (text_losses(text_logits, label) * weight).sum()
        if not len(target):  # with answer_format: qwen3vl there are no coordinate tokens at all
            return torch.stack([text, *text.new_zeros(len(PARTS) - 1)])
        coord = coordinate_losses(coord_logits, target, labels.coord_ids, sigma)
        return torch.stack([text, *(coord[part].sum() for part in PARTS[1:])])

    total = torch.zeros(len(PARTS), device=hidden.device)
    columns = (labels.coord_pos, labels.text_pos, labels.coord_target, labels.text_label, labels.text_weight.float())
    chunks = [_filled(*parts) for parts in zip(*(column.tensor_split(num_chunks) for column in columns), strict=True)]
    positions = [position for position, *_ in chunks]
    states = torch.split(hidden[torch.cat(positions)], [len(position) for position in positions])
    for own, (_, *rest) in zip(states, chunks, strict=True):
        total = total + checkpoint(score, own, *rest, use_reentrant=False, preserve_rng_state=False)
    return dict(zip(PARTS, total.unbind(), strict=True))


def reference_kl_sum(
    hidden: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    positions: Tensor,
    start: StartStates | None,
    start_head: Callable[[Tensor], Tensor],
) -> Tensor:
    """Sum of KL(start || current) over the vocabulary at `positions` of `hidden`, a float32 scalar.

    The expectation is over the start policy, as in distillation, so it holds whatever wrote the tokens before.

    Both heads run `start.num_chunks` times, forward and again in backward, as in `loss_sums`.

    Args:
        hidden: [N, D] final hidden states.
        positions: int64[Nu], the batch's `unlabelled_pos`.
        start: None where no rank has such a token.
        start_head: the start policy's head, called as a module.
    """

    def score(states: Tensor, start_states: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            start_logprobs = start_head(start_states).float().log_softmax(dim=1)
        logprobs = lm_head(states).float().log_softmax(dim=1)
        per_token = kl_div(logprobs, start_logprobs, reduction="none", log_target=True).sum(dim=1)
        return (per_token * weight).sum()

    if start is None:
        return torch.zeros((), device=hidden.device)
    return _weighted_sum(score, hidden, positions, (start.states,), start.num_chunks)


def teacher_kl_sum(
    hidden: Tensor, lm_head: Callable[[Tensor], Tensor], positions: Tensor, teacher: TeacherTop
) -> Tensor:
    """Sum over `positions` of `truncated_kl` from the teacher to the policy, a float32 scalar.

    The head runs `teacher.num_chunks` times, forward and again in backward, as in `loss_sums`.

    Args:
        hidden: [N, D] final hidden states.
        positions: int64[Nu], the batch's `unlabelled_pos`.
    """

    def score(states: Tensor, token_ids: Tensor, logprobs: Tensor, weight: Tensor) -> Tensor:
        return (truncated_kl(lm_head(states), token_ids, logprobs) * weight).sum()

    if not teacher.num_chunks:
        return torch.zeros((), device=hidden.device)
    return _weighted_sum(score, hidden, positions, (teacher.token_ids, teacher.logprobs), teacher.num_chunks)


def truncated_kl(logits: Tensor, token_ids: Tensor, logprobs: Tensor) -> Tensor:
    """KL(teacher || policy) per position, float32[Nu], where every token that the teacher did not report counts as one.

    It is a lower bound of the KL over the vocabulary, and equal to it where all tokens were reported.

    Args:
        logits: [Nu, V], of the policy.
        token_ids: int64[Nu, K], the teacher's most likely tokens, each once. Models with one tokenizer may have more or
            fewer rows than it has tokens: ids from V on, which the policy cannot write, count as not reported.
        logprobs: float32[Nu, K], the teacher's of these; at most one part in a million above probability one together.
    """
    is_ours = token_ids < logits.shape[1]
    first = token_ids.gather(1, is_ours.int().argmax(dim=1, keepdim=True))  # of ours: it stands for the others
    token_ids = token_ids.where(is_ours, first).clamp(max=logits.shape[1] - 1)
    logprobs = logprobs.masked_fill(~is_ours, -torch.inf)
    log_q, p = logits.float().log_softmax(dim=1), logprobs.exp()
    kl = (torch.xlogy(p, p) - p * log_q.gather(1, token_ids)).sum(dim=1)
    if token_ids.shape[1] == logits.shape[1]:
        return kl
    rest = -torch.expm1(logprobs.double().logsumexp(dim=1).clamp(max=0)).float()
    # One minus the sum would round to nothing where the policy is sure, and have no gradient there.
    log_q_rest = log_q.scatter(1, token_ids, -torch.inf).logsumexp(dim=1)
    return kl + torch.xlogy(rest, rest) - rest * log_q_rest


def total_loss(sums: Mapping[str, Tensor], denominators: Mapping[str, float], weights: Losses) -> Tensor:
    """`sum over parts of weight * sum / denominator`, a float32 scalar.

    Args:
        sums: of `loss_sums`, and with `weights.reference_kl` that of `reference_kl_sum` under this name.
        denominators: `{"text": total text weight, "coord": number of coordinates, "reference_kl": number of tokens
            without a label}` of all ranks and micro-steps of the optimizer step. The sum over them is the step's loss;
            if gradients are averaged, multiply first.
        weights: of the parts; those of `desc` are in `text_weight` already.
    """
    text = weights.text * sums["text"] / (denominators["text"] or 1.0)
    coord = weights.coord * sums["coord"] + weights.w1 * sums["w1"] + weights.gate * sums["gate"]
    loss = text + coord / (denominators["coord"] or 1.0)
    if weights.reference_kl:
        loss = loss + weights.reference_kl * sums["reference_kl"] / (denominators["reference_kl"] or 1.0)
    return loss


def _weighted_sum(
    score: Callable[..., Tensor], hidden: Tensor, positions: Tensor, columns: Sequence[Tensor], num_chunks: int
) -> Tensor:
    """Sum of `score(states, *columns, weight)` over exactly `num_chunks` chunks of the tokens at `positions`.

    Args:
        columns: each [Nu, ...].
    """
    chunks = [column.tensor_split(num_chunks) for column in (positions, *columns)]
    fills = [int(not len(chunk)) for chunk in chunks[0]]  # a chunk without tokens scores one with weight zero
    filled = [
        [pad(part, (0, 0) * (part.dim() - 1) + (0, fill)) for part, fill in zip(column, fills, strict=True)]
        for column in chunks
    ]
    states = torch.split(hidden[torch.cat(filled[0])], [len(chunk) for chunk in filled[0]])
    total = torch.zeros((), device=hidden.device)
    for own, fill, *rest in zip(states, fills, *filled[1:], strict=True):
        weight = own.new_full((len(own),), 1 - fill, dtype=torch.float32)
        total = total + checkpoint(score, own, *rest, weight, use_reentrant=False, preserve_rng_state=False)
    return total


def _filled(coord: Tensor, text: Tensor, target: Tensor, label: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """A chunk's positions (coordinates first), coord_target, text_label, weight; without any, one of weight zero."""
    fill = (0, int(not len(coord) + len(text)))
    return pad(torch.cat([coord, text]), fill), target, pad(label, fill), pad(weight, fill)
