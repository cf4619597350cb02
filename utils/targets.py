"""Prefix + missed objects -> one training sequence and its supervision (TGT-5 to TGT-10).

The sequence is what the model itself wrote, up to a cut, followed by every ground-truth object it missed, the closing
and the end token. All that is learnt is said by index: `coord_index` and `text_index` are positions of tokens to be
predicted (from the hidden state one position earlier), every other token is context. What the losses do with them is
`losses`' business; who matched whom is `matching`'s.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from utils.geometry import MAX_BIN, Object, regression_targets
from utils.parsing import CLOSING, COORD_BYTE, HEADER, ParsedAnswer, PredObject, TokenTable, cut_tokens

if TYPE_CHECKING:
    import torch

_OUR_DESC = re.compile(rb'\{"desc": "((?:[^"\\]++|\\.)*+)"', re.DOTALL)
_BRACKETS = re.compile(rb"[]} \t\r\n]")
_RIGHT_CONTEXT = re.compile(rb'"[\x20-\x7e]{0,63}')


@dataclass(frozen=True)
class TargetOptions:
    """`RM.matching.label`, `RM.targets.*`, `RM.losses.desc`."""

    label: Literal["correct", "ignore"] = "correct"
    trim_trailing_unmatched: bool = False
    supervise_structure: bool = False
    desc_weight: float = 1.0


@dataclass
class Target:
    """An answer to learn. Indices count from the start of the answer and ascend; `nc`, `nt` are the numbers of labels.

    Attributes:
        answer_ids: int64 `[n]`, prefix, missed objects, closing and end token.
        coord_index: int64 `[nc]`, supervised coordinate tokens.
        coord_target: float32 `[nc]`, the bin each should be, fractional for polygons moved by transport.
        text_index: int64 `[nt]`, supervised other tokens.
        text_label: int64 `[nt]`, the id each should be.
        text_weight: float32 `[nt]`, 1 for format text, `desc_weight` for the text of `desc` up to its closing quote.
        num_prefix: tokens before the first appended one; the token that a bare header shares with what follows is not
            one of them.
        num_matched, num_appended, num_trimmed: matched predictions, missed objects, false positives cut off.
        respelled: the cut fell inside a token.
    """

    answer_ids: np.ndarray
    coord_index: np.ndarray
    coord_target: np.ndarray
    text_index: np.ndarray
    text_label: np.ndarray
    text_weight: np.ndarray
    num_prefix: int
    num_matched: int
    num_appended: int
    num_trimmed: int = 0
    respelled: bool = False


@dataclass
class Segment:
    """One sample's finished training sequence. Indices count from the start of `input_ids`.

    A supervised token at index `i` is predicted from the hidden state at `i - 1`.

    Attributes:
        sample_id: names the sample in every message.
        input_ids: int64 `[length]`, prompt (image placeholders expanded) and answer.
        answer_start: index of the answer's first token.
        coord_index, coord_target, text_index, text_label, text_weight: as in `Target`.
        pixel_values: `[num_patches, patch_dim]`, None without images.
        image_grid_thw: int `[num_images, 3]`, None without images.
        policy_version: version of the weights that wrote the prefix, None for a plain ground truth.
        stats: numbers for the log.
    """

    sample_id: str
    input_ids: np.ndarray
    answer_start: int
    coord_index: np.ndarray
    coord_target: np.ndarray
    text_index: np.ndarray
    text_label: np.ndarray
    text_weight: np.ndarray
    pixel_values: "torch.Tensor | None" = None
    image_grid_thw: "torch.Tensor | None" = None
    policy_version: str | None = None
    stats: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.input_ids)


# ---------------------------------------------------------------------------------------------------------------------
# The answer's text
# ---------------------------------------------------------------------------------------------------------------------


def format_objects(objects: Sequence[Object]) -> str:
    """The answer text of TGT-1: `{"objects": [{"desc": "red circle", "bbox_2d": [<|coord_120|>, ...]}, ...]}`."""
    return HEADER + ", ".join(map(_format_object, objects)) + CLOSING


def _format_object(obj: Object) -> str:
    """One object. In its `desc`, `<|` is written `\\u003c|`, so that it can never spell a special or coordinate token.

    Raises:
        ValueError: the object could not be read back (blank `desc`, wrong number or range of coordinates).
    """
    num_coords = len(obj.coords)
    fits = num_coords == 4 if obj.kind == "bbox_2d" else num_coords >= 6 and num_coords % 2 == 0
    if not obj.desc.strip() or not fits or min(obj.coords) < 0 or max(obj.coords) > MAX_BIN:
        raise ValueError(f"{obj}: an object needs a desc and 4 (bbox_2d) or 6, 8, ... (poly) bins in 0..{MAX_BIN}")
    coords = ", ".join([f"<|coord_{value}|>" for value in obj.coords])
    return f'{{"desc": {_json_string(obj.desc)}, "{obj.kind}": [{coords}]}}'


def _json_string(text: str) -> str:
    """A JSON string in plain UTF-8 that spells no special token."""
    return json.dumps(text, ensure_ascii=False).replace("<|", "\\u003c|")


# ---------------------------------------------------------------------------------------------------------------------
# Building a target
# ---------------------------------------------------------------------------------------------------------------------


def ground_truth_target(gt_objects: Sequence[Object], table: TokenTable, options: TargetOptions) -> Target:
    """The plain ground truth, every token of it learnt, header included (teacher forcing, warm-up; DAT-4)."""
    return build_target(ParsedAnswer(), gt_objects, [], table, options)


def build_target(
    parsed: ParsedAnswer,
    gt_objects: Sequence[Object],
    matches: Sequence[tuple[int, int]],
    table: TokenTable,
    options: TargetOptions,
) -> Target:
    """The training sequence of one rollout.

    Args:
        parsed: what the model wrote.
        gt_objects: all objects of the sample.
        matches: `(index into parsed.objects, index into gt_objects)`, one to one.

    What is learnt:
        - Coordinates of matched prefix objects: the matched shape (`regression_targets`).
        - `desc` of matched prefix objects with `label: correct`: the ground truth's, up to the first difference.
        - With `supervise_structure`, the remaining tokens of matched objects and of the comma (or header) before them.
        - All appended tokens: missed objects in file order, closing, end token.
        A bare `{"objects": [` (nothing usable, or everything trimmed) is tokenized together with what follows, so that
        the model sees its natural tokens; those that lie within it are learnt where the model did not write a header
        itself (a plain ground truth, an answer that begins otherwise), else they carry no loss.

    Raises:
        ValueError: a ground-truth object cannot be written down, or its `desc` spells a special token.
    """
    prefix, num_trimmed = _trim(parsed, matches, table) if options.trim_trailing_unmatched else (parsed, 0)
    matched_gt = {g for _, g in matches}
    missed = [obj for g, obj in enumerate(gt_objects) if g not in matched_gt]
    if prefix.prefix_bytes:
        prefix, ids = _join(prefix, "".join(", " + _format_object(obj) for obj in missed) + CLOSING, table)
        start = len(prefix.prefix_ids)
    else:
        ids = np.array([*table.encode(format_objects(missed)), table.eos_id], dtype=np.int64)
        wrote_header = parsed.prefix_ids and not parsed.dropped.get("no_header")
        header = len(HEADER) if wrote_header else 0
        start = int(np.searchsorted(table.scan_text(ids)[1], header, side="right"))
    labels = _Labels(ids, table, options.desc_weight)
    labels.add_appended(start)
    pairs = [(prefix.objects[p], gt_objects[g]) for p, g in matches]
    for pred, gt in pairs:
        labels.coord_target[pred.coord_index] = regression_targets(pred.object, gt)
    if options.supervise_structure:
        labels.add_structure(prefix, [pred for pred, _ in pairs])
    if options.label == "correct":
        for pred, gt in pairs:
            labels.add_desc(prefix, pred, gt.desc)
    return labels.finish(
        num_prefix=start,
        num_matched=len(matches),
        num_appended=len(missed),
        num_trimmed=num_trimmed,
        respelled=prefix.respelled,
    )


def _join(prefix: ParsedAnswer, appended: str, table: TokenTable) -> tuple[ParsedAnswer, np.ndarray]:
    """Prefix + appended text + end token as ids, and the part of the prefix that has tokens of its own there.

    Where the token at the cut was respelled anyway, what was kept of it (brackets) and the appended text are tokenized
    together: `]}` + `]}` becomes the one token `]}]}` that the model wrote and will write again. Learning to spell the
    same text in two ways at this very place would teach it to break off. A token that reaches from the prefix into the
    appended text counts as appended.
    """
    kept = prefix.prefix_bytes[int(prefix.prefix_ends[prefix.num_exact - 1]) if prefix.num_exact else 0 :]
    if not prefix.respelled or _BRACKETS.sub(b"", kept):
        return prefix, np.array([*prefix.prefix_ids, *table.encode(appended), table.eos_id], dtype=np.int64)
    joined = table.encode(kept.decode() + appended)
    inside = int(np.searchsorted(table.scan_text(np.array(joined))[1], len(kept), side="right"))
    exact = prefix.prefix_ids[: prefix.num_exact]
    ids = np.array([*exact, *joined, table.eos_id], dtype=np.int64)
    return replace(
        prefix,
        prefix_ids=[*exact, *joined[:inside]],
        prefix_ends=table.scan_text(ids[: prefix.num_exact + inside])[1],
    ), ids


def _trim(parsed: ParsedAnswer, matches: Sequence[tuple[int, int]], table: TokenTable) -> tuple[ParsedAnswer, int]:
    """Cut behind the last matched object (TGT-10); returns the shorter prefix and how many valid objects went."""
    num_kept = max((p for p, _ in matches), default=-1) + 1
    num_trimmed = len(parsed.objects) - num_kept
    if not num_kept:
        return ParsedAnswer(table.encode(HEADER) if parsed.prefix_ids else []), num_trimmed
    end = parsed.objects[num_kept - 1].byte_span[1]
    ids, ends, num_exact = cut_tokens(parsed.prefix_ids, parsed.prefix_ends, end, table)
    num_exact = min(num_exact, parsed.num_exact)
    if num_exact == len(ids) and not _BRACKETS.sub(b"", table.bytes_of[ids[-1]]):
        num_exact -= 1  # where the model began to invent it learns to close, in the one token that does both
    trimmed = replace(
        parsed,
        prefix_ids=ids,
        prefix_ends=ends,
        prefix_bytes=parsed.prefix_bytes[:end],
        objects=parsed.objects[:num_kept],
        respelled=num_exact < len(ids),
        num_exact=num_exact,
    )
    return trimmed, num_trimmed


class _Labels:
    """Labels of one answer by token position, filled in step by step; later steps win over earlier ones.

    Attributes:
        coord_target: float64 `[n]`, nan where nothing is learnt.
        text_label: int64 `[n]`, -1 where nothing is learnt.
        text_weight: float64 `[n]`.
    """

    def __init__(self, ids: np.ndarray, table: TokenTable, desc_weight: float) -> None:
        self.ids, self.table, self.desc_weight = ids, table, desc_weight
        self.is_coord = table.coord_bin[ids] >= 0
        self.coord_target = np.full(len(ids), np.nan)
        self.text_label = np.full(len(ids), -1, dtype=np.int64)
        self.text_weight = np.ones(len(ids))

    def add_appended(self, start: int) -> None:
        """Everything from token `start` on learns itself."""
        ids = self.ids[start:]
        if self.table.is_stop[ids[:-1]].any():
            raise ValueError(f"a desc of the ground truth spells a special token: {self._text(ids[:-1])}")
        data, ends = self.table.scan_text(ids)
        spans = np.array([found.span(1) for found in _OUR_DESC.finditer(data)], dtype=np.int64).reshape(-1, 2)
        in_desc = _touched(ends, spans)
        coords = self.is_coord[start:]
        self.coord_target[start:][coords] = self.table.coord_bin[ids[coords]]
        self.text_label[start:] = np.where(coords, -1, ids)
        self.text_weight[start:][in_desc] = self.desc_weight

    def add_structure(self, prefix: ParsedAnswer, matched: Sequence[PredObject]) -> None:
        """Tokens of matched objects, and of the comma before them, that touch no coordinate and no `desc` at all."""
        ends = prefix.prefix_ends
        if not len(ends):
            return
        last = int(ends[-1]) - 1  # the brackets of the last object may belong to an appended token
        own = np.array([(p.lead, min(p.byte_span[1] - 1, last)) for p in matched], dtype=np.int64).reshape(-1, 2)
        descs = np.array([pred.desc_bytes for pred in prefix.objects], dtype=np.int64).reshape(-1, 2)
        chosen = np.flatnonzero(_touched(ends, own) & ~_touched(ends, descs) & ~self.is_coord[: len(ends)])
        self.text_label[chosen] = self.ids[chosen]

    def add_desc(self, prefix: ParsedAnswer, pred: PredObject, desc: str) -> None:
        """The ground truth's `desc`, tokenized in place, up to and including the first token that differs (TGT-9).

        The comparison begins at the token of the opening quote, which is context unless it differs or holds text of the
        desc as well, and ends with the token of the closing quote.
        """
        first, tokens, touches = _desc_in_place(prefix, pred, desc, self.table)
        for index, (token, in_desc) in enumerate(zip(tokens, touches, strict=True), start=first):
            differs = token != self.ids[index]
            if differs or in_desc:
                if self.table.is_stop[token]:
                    raise ValueError(f"a desc of the ground truth spells a special token: {desc!r}")
                self.text_label[index] = token
                self.text_weight[index] = self.desc_weight
            if differs:
                return

    def finish(self, **counts: Any) -> Target:
        """The labels as index lists."""
        coord_index = np.flatnonzero(~np.isnan(self.coord_target))
        text_index = np.flatnonzero(self.text_label >= 0)
        return Target(
            answer_ids=self.ids,
            coord_index=coord_index,
            coord_target=self.coord_target[coord_index].astype(np.float32),
            text_index=text_index,
            text_label=self.text_label[text_index],
            text_weight=self.text_weight[text_index].astype(np.float32),
            **counts,
        )

    def _text(self, ids: np.ndarray) -> str:
        return b"".join(self.table.bytes_of[token] for token in ids.tolist()).decode(errors="replace")


def _touched(ends: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Which tokens hold a byte of the spans `[num_spans, 2]`, here with both borders included; bool `[len(ends)]`."""
    marks = np.zeros(len(ends) + 1, dtype=np.int64)
    np.add.at(marks, np.searchsorted(ends, spans[:, 0], side="right"), 1)
    np.add.at(marks, np.searchsorted(ends, spans[:, 1], side="right") + 1, -1)
    return np.cumsum(marks)[:-1] > 0


def _desc_in_place(
    prefix: ParsedAnswer, pred: PredObject, desc: str, table: TokenTable
) -> tuple[int, list[int], list[bool]]:
    """Tokens of another `desc` where the predicted one stands.

    How text is tokenized depends on what stands around it (`"red` may be one token), so it is encoded together with
    the generated text from the beginning of the object, or the coordinate before, to a little behind the closing quote.
    Where that has no token border in front of the opening quote's generated token, the text is encoded from there on.

    Returns:
        Index of the prefix token with the opening quote; the ids from there up to the closing quote's; whether each
        holds text of the desc or its closing quote. No ids if the text before the desc is not valid Unicode.
    """
    data, ends = prefix.prefix_bytes, prefix.prefix_ends
    start, end = pred.desc_bytes
    first, object_token = np.searchsorted(ends, [start - 1, pred.byte_span[0]], side="right").tolist()
    quote_token = int(ends[first - 1]) if first else 0
    context = int(ends[object_token - 1]) if object_token else 0
    right = _RIGHT_CONTEXT.match(data, end)[0]
    for begin in (max(context, data.rfind(COORD_BYTE, 0, start) + 1), quote_token):
        try:
            text = data[begin:start].decode() + _json_string(desc)[1:-1] + right.decode()
        except UnicodeDecodeError:
            continue
        ids = table.encode(text)
        scanned, new_ends = table.scan_text(np.array(ids, dtype=np.int64))
        borders = [0, *new_ends.tolist()]
        skip = quote_token - begin
        if skip in borders and scanned[:skip] == data[begin:quote_token]:
            skipped = borders.index(skip)
            last = int(np.searchsorted(new_ends, len(scanned) - len(right), side="right"))
            touches = [new_end > start - begin for new_end in new_ends.tolist()]
            return first, ids[skipped : last + 1], touches[skipped : last + 1]
    return first, [], []


# ---------------------------------------------------------------------------------------------------------------------
# Segments
# ---------------------------------------------------------------------------------------------------------------------


def make_segment(
    sample_id: str,
    prompt_token_ids: Sequence[int],
    target: Target,
    table: TokenTable,
    pixel_values: "torch.Tensor | None" = None,
    image_grid_thw: "torch.Tensor | None" = None,
    policy_version: str | None = None,
) -> Segment:
    """Prompt + target as one checked sequence (TGT-8); the prompt carries no loss."""
    prompt = np.array(prompt_token_ids, dtype=np.int64)
    segment = Segment(
        sample_id=sample_id,
        input_ids=np.concatenate([prompt, target.answer_ids]),
        answer_start=len(prompt),
        coord_index=target.coord_index + len(prompt),
        coord_target=target.coord_target,
        text_index=target.text_index + len(prompt),
        text_label=target.text_label,
        text_weight=target.text_weight,
        pixel_values=pixel_values,
        image_grid_thw=image_grid_thw,
        policy_version=policy_version,
        stats={
            "num_matched": target.num_matched,
            "num_appended": target.num_appended,
            "num_trimmed": target.num_trimmed,
            "respelled": int(target.respelled),
        },
    )
    check_segment(segment, table)
    return segment


def check_segment(segment: Segment, table: TokenTable) -> None:
    """TGT-8: every supervised index lies inside the answer, and every supervised coordinate is a coordinate token.

    Raises:
        ValueError: names the sample and the first violation.
    """
    length, start = len(segment.input_ids), segment.answer_start
    problems = []
    if not 0 < start <= length:
        problems.append(f"the answer begins at {start} of {length} tokens, so its first token has no predecessor")
    for name in ("coord_index", "text_index"):
        index = getattr(segment, name)
        outside = index[(index < start) | (index >= length)]
        if len(outside):
            problems.append(f"{name} {outside[0]} lies outside the answer [{start}, {length})")
        if (np.diff(index) <= 0).any():
            problems.append(f"{name} does not ascend")
    if not problems:
        problems = _label_problems(segment, table)
    if problems:
        raise ValueError(f"sample {segment.sample_id}: {'; '.join(problems)}")


def _label_problems(segment: Segment, table: TokenTable) -> list[str]:
    """What is wrong with the labels of a segment whose indices are in range."""
    problems = []
    supervised = segment.input_ids[segment.coord_index]
    wrong = np.flatnonzero(~np.isin(supervised, table.coord_ids))
    if len(wrong):
        at = wrong[0]
        problems.append(f"supervised coordinate {segment.coord_index[at]} holds token {supervised[at]}, no coordinate")
    if not ((segment.coord_target >= 0) & (segment.coord_target <= MAX_BIN)).all():
        problems.append(f"a coordinate target lies outside 0..{MAX_BIN}")
    if ((segment.text_label < 0) | (segment.text_label >= len(table.bytes_of))).any():
        problems.append("a text label is no token id")
    if len(segment.coord_target) != len(segment.coord_index):
        problems.append("coord_target and coord_index differ in length")
    if not len(segment.text_index) == len(segment.text_label) == len(segment.text_weight):
        problems.append("text_index, text_label and text_weight differ in length")
    return problems
