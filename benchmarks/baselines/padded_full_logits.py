"""The usual loss: apply the head to every position of a padded batch, then mask the losses.

As in transformers' and TRL's trainers: full logits, cross-entropy with `ignore_index`, one loss value per token. The
coordinate losses are the same functions as ours, on the rows of the logits where coordinates are supervised.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from utils.losses import PARTS, coordinate_losses
from utils.packing import Batch

IGNORED = -100


def padded_loss_sums(
    hidden: Tensor, lm_head: Callable[[Tensor], Tensor], batch: Batch, sigma: float
) -> dict[str, Tensor]:
    """Return the weighted sums of the parts, like `utils.losses.loss_sums`.

    Args:
        hidden: [B, T, D] of a padded batch.
    """
    logits = lm_head(hidden).flatten(0, 1).float()  # [B * T, V]
    labels = torch.full((len(logits),), IGNORED, device=hidden.device).index_copy(0, batch.text_pos, batch.text_label)
    weights = torch.zeros(len(logits), device=hidden.device).index_copy(0, batch.text_pos, batch.text_weight)
    text = cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none") * weights
    coord = coordinate_losses(logits[batch.coord_pos], batch.coord_target, batch.coord_ids, sigma)
    return {"text": text.sum()} | {part: coord[part].sum() for part in PARTS[1:]}
