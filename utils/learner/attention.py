"""Attention over packed rows, one segment at a time.

transformers' own `sdpa` isolates packed segments with a dense mask, so a row of T tokens costs T x T in time and memory
however short its segments are. Here each segment attends on its own and a row costs the sum of its segments, which
`flash_attention_2` achieves by its own means. Batches that are not packed use transformers' `sdpa`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_causal_conv1d_available, is_flash_linear_attention_available

SEGMENT_SDPA = "segment_sdpa"


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    segment_lengths: Sequence[int] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention in which a token sees its own segment only; returns [1, T, heads, head_dim] and None.

    Args:
        query, key, value: [1, heads, T, head_dim] for a packed row; any batch size where nothing is packed.
        attention_mask: None for a packed row.
        position_ids: int[1, T], text positions that restart at 0 with each segment; the vision tower has none.
        segment_lengths: tokens of each segment of a packed row (transformers passes on what the model is called with).
    """
    if query.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
        # The backward pass of torch 2.13's CPU kernels is about twice as slow in bfloat16 as in float32.
        with torch.autocast("cpu", enabled=False):
            states = query.float(), key.float(), value.float()
            return segment_attention(module, *states, attention_mask, position_ids, segment_lengths, **kwargs)
    if position_ids is None or segment_lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    parts = zip(*(tensor.split(segment_lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(module, *part, None, **kwargs)[0] for part in parts], dim=1), None


def _no_mask_without_padding(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Without padding and cache, attention is causal inside each segment; `segment_attention` needs no mask for it."""
    if attention_mask is None and kwargs["q_length"] == kwargs["kv_length"]:
        return None
    return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


def isolate_mixers(model: nn.Module, name: str) -> None:
    """Keep each layer's recurrent mixer, its attribute `name`, inside the segments of a packed row.

    Its state would carry over from one segment to the next. Fast kernels are told where segments begin (not run on a
    GPU yet; each run's start check proves them). transformers' own code ignores that, so with it segments are a padded
    batch. Either way the mixer runs once, so that under ZeRO-3 all ranks gather its weights equally often (PCK-8).
    """
    run = _with_borders if kernels_take_borders() else _padded
    for layer in model.modules():
        if (mixer := getattr(layer, name, None)) is not None:
            mixer.forward = partial(run, mixer.forward)


def kernels_take_borders() -> bool:
    """Whether mixers run by the kernels of flash-linear-attention and causal-conv1d, which are for CUDA."""
    return is_flash_linear_attention_available() and is_causal_conv1d_available()


def _with_borders(
    forward: Callable[..., Tensor], hidden_states: Tensor, segment_lengths: Sequence[int] | None = None, **kwargs: Any
) -> Tensor:
    """`forward` of [1, T, D] at once, with the borders of its segments; of a padded batch [B, T, D] as it is."""
    if segment_lengths is None:
        return forward(hidden_states, **kwargs)
    lengths = torch.tensor(segment_lengths, device=hidden_states.device)
    borders = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    segments = torch.repeat_interleave(lengths, output_size=hidden_states.shape[1])[None].int()
    return forward(hidden_states, cu_seq_lens_q=borders, seq_idx=segments, **kwargs)


def _padded(
    forward: Callable[..., Tensor], hidden_states: Tensor, segment_lengths: Sequence[int] | None = None, **kwargs: Any
) -> Tensor:
    """`forward` of [1, T, D] as a batch of its segments, padded behind, which a causal mixer does not see; of a padded
    batch [B, T, D] as it is. It costs as much as if all segments had the longest one's length."""
    if segment_lengths is None:
        return forward(hidden_states, **kwargs)
    parts = hidden_states[0].split(list(segment_lengths))
    found = forward(nn.utils.rnn.pad_sequence(parts, batch_first=True), **kwargs)
    return torch.cat([own[:length] for own, length in zip(found, segment_lengths, strict=True)])[None]


def register() -> str:
    """Register the implementation with transformers; return its name for `attn_implementation`.

    cuDNN's kernels, which torch prefers from Hopper on, are switched off: they make, and keep for good, a plan for each
    new length of a segment within each new length of a row, and hardly any pair comes twice. Flash kernels need none.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    ALL_ATTENTION_FUNCTIONS.register(SEGMENT_SDPA, segment_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(SEGMENT_SDPA, _no_mask_without_padding)
    return SEGMENT_SDPA
