"""Rows: which finished segments share one, and the tensors that a row becomes (section PCK of the contract). Pure.

Shapes: B sequences (1 in a packed row), T tokens, Nc supervised coordinates, Nt supervised text tokens, Nu answer
tokens without a label, R rows of position ids, D hidden width, K most likely tokens.
`targets` makes segments; `losses` scores rows.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from utils.targets import Segment

logger = logging.getLogger(__name__)

WAYS_OUT = (
    "ways out: a smaller training.per_device_train_batch_size, a larger training.packing_buffer, "
    "a larger global_max_length, or a smaller max_new_tokens (custom.extra.rollout_matching; GRPO: rlhf)"
)
# Enough segments for a mean that is worth a warning, and few enough to follow answers that grow during training.
MEAN_WINDOW = 256
MEAN_MINIMUM = 32
GROWN = 1 / 8  # of the buffer: where fewer wait, there is less to choose from, and rows are emptier than when it grows
NO_IDS = np.zeros(0, dtype=np.int64)

# (input_ids [L], `Segment.vision`) -> int64[R, L]: the text row, then the multimodal rows, where the model has such.
PositionIds = Callable[[Tensor, dict[str, Tensor]], Tensor]


def choose_row(lengths: Sequence[int], cap: int) -> list[int]:
    """The fullest set of segments that contains the oldest one and fits `cap` tokens (PCK-2).

    Args:
        lengths: positive lengths in order of arrival, tokens; the first is the oldest segment and fits `cap`.
        cap: tokens in a row.

    Returns:
        Ascending indices, 0 among them. No other such set holds more tokens. Of two equally full sets, the one without
        the newest segment in which they differ, so that the result depends on nothing but the arguments.

    Subset-sum: bit `s` of `reachable[i]` says that some of the segments 1..i add up to `s` tokens. 200 segments and a
    cap of 16k take about a millisecond.
    """
    budget = cap - lengths[0]
    assert budget >= 0, "CarryBuffer refuses segments longer than a row"
    within = (1 << (budget + 1)) - 1
    reachable = [1]
    for length in lengths[1:]:
        if reachable[-1] >> budget:  # the row is full already: newer segments cannot improve it
            break
        reachable.append((reachable[-1] | reachable[-1] << length) & within)
    row, rest = [], reachable[-1].bit_length() - 1
    for index in range(len(reachable) - 1, 0, -1):
        if not reachable[index - 1] >> rest & 1:  # not reachable without this segment
            row.append(index)
            rest -= lengths[index]
    return [0, *reversed(row)]


def fill_rows(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Rows of at most `cap` tokens for all segments, each the fullest that contains the oldest segment left.

    `lengths` (tokens, each fits `cap`) are in order of arrival. A row is given as ascending indices into them.
    """
    waiting, rows = list(range(len(lengths))), []
    while waiting:
        chosen = {waiting[index] for index in choose_row([lengths[index] for index in waiting], cap)}
        rows.append(sorted(chosen))
        waiting = [index for index in waiting if index not in chosen]
    return rows


def check_fits(segments: Sequence[Segment], cap: int) -> None:
    """Raise ValueError for a segment that is longer than `cap` tokens (PCK-3)."""
    for segment in segments:
        if len(segment) > cap:
            what = f"sample {segment.sample_id}: its segment has {len(segment)} tokens, global_max_length is {cap}"
            raise ValueError(f"{what}; {WAYS_OUT}")


class CarryBuffer:
    """One rank's segments that wait for a row (PCK-2, PCK-3, PCK-7)."""

    def __init__(self, cap: int, max_segments: int) -> None:
        self.cap = cap  # tokens in a row (`global_max_length`)
        self.max_segments = max_segments  # held back after a row has left, at most (`training.packing_buffer`)
        self._segments: list[Segment] = []
        self._lengths: deque[int] = deque(maxlen=MEAN_WINDOW)  # of the segments that arrived last
        self._arrivals: deque[int] = deque(maxlen=MEAN_WINDOW)  # segments per micro-step
        self._rows: deque[int] = deque(maxlen=MEAN_WINDOW)  # tokens of rows that left segments waiting
        self._warned = False

    def __len__(self) -> int:
        return len(self._segments)

    def extend(self, segments: Sequence[Segment]) -> None:
        """Add one micro-step's finished segments.

        Raises:
            ValueError: a segment is longer than a row (PCK-3).
        """
        check_fits(segments, self.cap)
        self._segments += segments
        self._lengths.extend(map(len, segments))
        self._arrivals.append(len(segments))

    def pop_row(self) -> list[Segment]:
        """Remove and return the segments of the next row, in order of arrival; empty if none waits.

        Raises:
            ValueError: more than `max_segments` would remain (PCK-3).
        """
        if not self._segments:
            return []
        chosen = choose_row([len(segment) for segment in self._segments], self.cap)
        row = [self._segments[index] for index in chosen]
        taken = set(chosen)
        self._segments = [segment for index, segment in enumerate(self._segments) if index not in taken]
        if len(self._segments) > self.max_segments:
            what = f"{len(self._segments)} segments wait for a row, training.packing_buffer is {self.max_segments}"
            raise ValueError(f"{what}; {WAYS_OUT}")
        if self._segments:
            self._rows.append(sum(map(len, row)))
        self._warn_of_growth()
        return row

    def _warn_of_growth(self) -> None:
        """Warn once if more tokens arrive per micro-step than rows carry and segments do pile up (PCK-7)."""
        seen, per_step = len(self._lengths), sum(self._arrivals) / len(self._arrivals)
        is_early = seen < min(MEAN_MINIMUM, self.max_segments) or len(self) < max(per_step, GROWN * self.max_segments)
        if self._warned or is_early or not self._rows:
            return
        mean_length, per_row = sum(self._lengths) / seen, sum(self._rows) / len(self._rows)
        if mean_length * per_step > per_row:
            self._warned = True
            logger.warning(
                "the packing buffer grows without end: %.1f segments of %.0f tokens on average arrive per micro-step, "
                "a row carries %.0f of global_max_length=%d; %d wait, training.packing_buffer is %d. "
                "training.per_device_train_batch_size: %d fits; or raise global_max_length to %d",
                per_step,
                mean_length,
                per_row,
                self.cap,
                len(self),
                self.max_segments,
                max(1, int(per_row / mean_length)),
                int(mean_length * per_step * self.cap / per_row) + 1,
            )

    def state_dict(self) -> dict[str, Any]:
        """The waiting segments and the means, as plain types and tensors."""
        return {
            "segments": segments_to_state(self._segments),
            "lengths": list(self._lengths),
            "arrivals": list(self._arrivals),
            "rows": list(self._rows),
            "warned": self._warned,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the content with that of a `state_dict()`.

        Raises:
            ValueError: a segment is longer than a row (PCK-3), or more wait than may.
        """
        self._segments = segments_from_state(state["segments"])
        check_fits(self._segments, self.cap)
        if (num := len(self._segments)) > self.max_segments:
            rule = f"{num} sequences of the checkpoint wait for a row; resume with at least as many"
            raise ValueError(f"training.packing_buffer={self.max_segments}: {rule}")
        for name in ("lengths", "arrivals", "rows"):
            setattr(self, f"_{name}", deque(state[name], maxlen=MEAN_WINDOW))
        self._warned = state["warned"]


def segments_to_state(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    """Segments as plain types and tensors (on the same memory), which `torch.load(weights_only=True)` accepts."""
    return [
        {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in vars(segment).items()}
        for segment in segments
    ]


def segments_from_state(state: Sequence[dict[str, Any]]) -> list[Segment]:
    """The reverse of `segments_to_state`; earlier versions saved `stats`, too."""

    def value(name: str, v: Any) -> Any:
        return v.numpy() if isinstance(v, Tensor) and name != "position_ids" else v

    return [Segment(**{name: value(name, v) for name, v in own.items() if name != "stats"}) for own in state]


@dataclass
class Movable:
    """A dataclass of tensors, or of other such dataclasses, that moves as a whole."""

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Self:
        """The same content on `device`."""

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: moved(tensor) for name, tensor in value.items()}
            return value.to(device, non_blocking=non_blocking) if isinstance(value, Tensor | Movable) else value

        return dataclasses.replace(self, **{name: moved(value) for name, value in vars(self).items()})


@dataclass
class StartStates(Movable):
    """The start policy's hidden states for a batch's unlabelled answer tokens (TGT-16)."""

    states: Tensor  # [Nu, D], final hidden states that predict them
    num_chunks: int  # of logits; the same on all ranks


@dataclass
class TeacherTop(Movable):
    """A teacher's most likely tokens at the unlabelled answer tokens (TGT-16)."""

    token_ids: Tensor  # int64[Nu, K], each once in a row
    logprobs: Tensor  # float32[Nu, K]
    num_chunks: int = 0  # of logits; the same on all ranks, 0 where none has such a token


@dataclass
class Batch(Movable):
    """One micro-step of one rank, as tensors.

    `coord_pos`, `text_pos` and `unlabelled_pos` index the flattened [B * T] hidden states: the state that PREDICTS the
    token, the one before it.
    """

    input_ids: Tensor  # int64[B, T]
    # int64[R, B, T]: text positions, restarting at 0 with each segment; then time, height, width where R is 4. None for
    # a single segment: the model makes them itself
    position_ids: Tensor | None
    attention_mask: Tensor | None  # int64[B, T], 1 = token; None in a packed row, where position_ids[0] isolates
    vision: dict[str, Tensor]  # of all images in order: the model's inputs besides tokens, joined along dimension 0
    coord_pos: Tensor  # int64[Nc]
    coord_target: Tensor  # float32[Nc], bins, may be fractional
    text_pos: Tensor  # int64[Nt]
    text_label: Tensor  # int64[Nt]
    text_weight: Tensor  # float32[Nt]
    coord_ids: Tensor  # int64[1000], vocabulary id of each bin's token; [0] where coordinates are text, and Nc 0
    cu_seqlens: Tensor  # int32[num_segments + 1]: borders of the segments if they lie end to end, tokens
    sample_ids: list[str]  # the dummy is not named
    num_tokens: int  # without dummy and padding
    unlabelled_pos: Tensor  # int64[Nu], of the answers' tokens that carry no label
    teacher: TeacherTop  # of no token without a teacher
    start: StartStates | None = None  # None without `reference_kl`

    @property
    def num_labels(self) -> int:
        return len(self.coord_pos) + len(self.text_pos)


def collate(
    segments: Sequence[Segment],
    position_ids_fn: PositionIds,
    coord_ids: np.ndarray,
    dummy: Segment,
    digit_ids: np.ndarray = NO_IDS,
    *,
    is_packed: bool,
) -> Batch:
    """Turn segments into one checked batch.

    Packed, they lie end to end in one row [1, T] in which they cannot see each other (PCK-4); otherwise the batch
    [B, T] has one per line, padded on the right (PCK-6).

    Args:
        segments: in a packed row at most `global_max_length` tokens together; may be empty.
        position_ids_fn: `utils.learner.model.position_ids_for(model)`; for segments that lack their positions.
        coord_ids: int64[1000], vocabulary id of each bin's token (`TokenTable.coord_ids`).
        dummy: a few tokens with an image and no supervision (`utils.data.encoding.dummy_segment(processor)`),
            appended if no segment has an image, so that every rank's row runs through every module (PCK-8).
        digit_ids: int64, ids of tokens that hold a digit (`TokenTable.digit_ids`).

    Raises:
        ValueError: a supervised coordinate lies outside its segment's answer or is no coordinate token, or a supervised
            digit no digit (TGT-8), or a segment's images do not fit its tokens; the message names the sample.
    """
    has_image = any(segment.vision for segment in segments)
    parts = list(segments) if has_image else [*segments, dummy]
    parts = [part if part.position_ids is not None else place(part, position_ids_fn) for part in parts]
    tokens = [torch.from_numpy(part.input_ids) for part in parts]
    positions = [part.position_ids for part in parts if part.position_ids is not None]
    attention_mask = None
    if is_packed:
        starts = np.cumsum([0, *map(len, parts[:-1])]).tolist()
        input_ids, position_ids = torch.cat(tokens)[None], torch.cat(positions, dim=1)[:, None]
    else:
        starts = [line * max(map(len, parts)) for line in range(len(parts))]
        input_ids = pad_sequence(tokens, batch_first=True)
        position_ids = pad_sequence([own.T for own in positions]).permute(2, 1, 0).contiguous()
        attention_mask = pad_sequence([torch.ones_like(own) for own in tokens], batch_first=True)

    def joined(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(part, name) for part in parts]))

    def predictors(name: str) -> Tensor:
        moved = [getattr(part, name) + start - 1 for part, start in zip(parts, starts, strict=True)]
        return torch.from_numpy(np.concatenate(moved))

    batch = Batch(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=attention_mask,
        vision=join_vision([part.vision for part in parts]),
        coord_pos=predictors("coord_index"),
        coord_target=joined("coord_target"),
        text_pos=predictors("text_index"),
        text_label=joined("text_label"),
        text_weight=joined("text_weight"),
        coord_ids=torch.from_numpy(coord_ids),
        cu_seqlens=torch.tensor([0, *map(len, parts)]).cumsum(0, dtype=torch.int32),
        sample_ids=[segment.sample_id for segment in segments],
        num_tokens=sum(map(len, segments)),
        unlabelled_pos=predictors("unlabelled_index"),
        teacher=TeacherTop(joined("teacher_ids"), joined("teacher_logprobs")),
    )
    check_row(batch, segments, starts, digit_ids)
    return batch


def join_vision(parts: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Vision tensors of several prompts, in order, as those of one; without images none."""
    found = [part for part in parts if part]
    return {name: torch.cat([part[name] for part in found]) for name in (found[0] if found else ())}


collate_packed = partial(collate, is_packed=True)
collate_padded = partial(collate, is_packed=False)


def place(segment: Segment, position_ids_fn: PositionIds) -> Segment:
    """The segment with its positions, which `collate` computes where they are missing.

    Raises:
        ValueError: its images do not fit its tokens; the message names the sample.
    """
    try:
        positions = position_ids_fn(torch.from_numpy(segment.input_ids), segment.vision)
    except ValueError as error:
        raise ValueError(f"sample {segment.sample_id}: {error}") from error
    assert positions.shape[1:] == (len(segment),), positions.shape
    return dataclasses.replace(segment, position_ids=positions)


def check_row(batch: Batch, segments: Sequence[Segment], starts: Sequence[int], digit_ids: np.ndarray = NO_IDS) -> None:
    """Check TGT-8 on the finished row: every supervised coordinate lies in its segment's answer and is a coordinate
    token; where coordinates are numbers, a supervised token that holds a digit.

    Args:
        starts: where each segment begins in the flattened batch, tokens.

    Raises:
        ValueError: names the sample and the index in its segment.
    """
    flat, supervised = batch.input_ids.flatten(), batch.coord_pos + 1
    is_coord = torch.isin(flat[supervised.clamp(max=len(flat) - 1)], batch.coord_ids)
    has_digit = torch.isin(flat, torch.from_numpy(digit_ids))
    is_text = torch.zeros_like(has_digit)
    is_text[batch.text_pos + 1] = True
    first = 0
    for segment, start in zip(segments, starts, strict=False):  # a dummy at the end has no coordinates
        mine = slice(first, first + len(segment.coord_index))
        first = mine.stop
        index = supervised[mine] - start
        _check_indices(segment, index, is_coord[mine], "coordinate token")
        digit = torch.as_tensor(segment.digit_index)
        place = (digit + start).clamp(max=len(flat) - 1)
        _check_indices(segment, digit, has_digit[place] & is_text[place], "supervised digit")
    assert first == len(supervised)


def _check_indices(segment: Segment, index: Tensor, is_right: Tensor, what: str) -> None:
    """Check that every index lies in the segment's answer and on a right token."""
    inside = (index >= max(1, segment.answer_start)) & (index < len(segment))
    wrong = (~(inside & is_right)).nonzero()
    if len(wrong):
        span = f"answer [{segment.answer_start}, {len(segment)})"
        at = int(index[wrong[0, 0]])
        raise ValueError(f"sample {segment.sample_id}: no {what} of its {span} at supervised index {at}")


def denominators(batches: Iterable[Batch]) -> dict[str, float]:
    """This rank's total weight per kind of token in an optimizer step's batches; summed over ranks they are PCK-5's."""
    totals = {"text": 0.0, "coord": 0.0, "reference_kl": 0.0}
    for batch in batches:
        totals["text"] += float(batch.text_weight.double().sum())
        totals["coord"] += float(len(batch.coord_pos))
        totals["reference_kl"] += float(len(batch.unlabelled_pos))
    return totals
