"""Prefix + missed objects -> one training sequence and its supervision (TGT-5 to TGT-15).

The sequence is what the model itself wrote, up to a cut, followed by every ground-truth object it missed, the closing
and the end token (`drafts`). Supervision is by index: `coord_index` and `text_index` are positions of tokens to be
predicted (from the hidden state one position earlier); every other token is context. `matching` pairs the objects;
`losses` scores the supervised positions.
"""

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from utils.answer_format import COORD_BYTE, COORD_TOKENS
from utils.drafts import (
    Arrangement,
    Draft,
    arrange,
    continue_answer,
    num_kept_by_trim,
    rewrite_answer,
    trim,
    wrong_entries,
)
from utils.geometry import MAX_BIN, Object, bounding_box, regression_targets
from utils.parsing import ParsedAnswer, PredObject
from utils.scores import is_wrong_if_unmatched
from utils.token_table import TokenTable, touched

if TYPE_CHECKING:
    import torch

TEACHER_TOP_K = 20  # tokens that a teacher reports at each position; vLLM's own limit
_NUMBER = re.compile(rb"[0-9]++")
_ENDS_AND_CLOSES = re.compile(rb'(?<!\\)["\]]\}[^,]')  # one token that ends a label or a box, its object and the list
_RIGHT_CONTEXT = re.compile(rb"[\t\n\r\x20-\x7e]{0,64}")


@dataclass(frozen=True)
class TargetOptions:
    """`RM.matching.label`, `RM.targets.*`, `RM.losses.desc`, and `RM.losses.coord` where coordinates are text."""

    label: Literal["correct", "ignore"] = "correct"
    arrangement: Arrangement = Arrangement()
    supervise_structure: bool = False
    desc_weight: float = 1.0
    coord_weight: float = 1.0
    supervise_closing: Literal["always", "complete"] = "always"


@dataclass(kw_only=True)
class Supervision:
    """The supervised tokens of a sequence. Indices ascend; a token at index `i` is predicted from the state at `i - 1`.

    Weights are 1 for format text and what `redirect` changes, `desc_weight` for the text of `desc` up to its closing
    quote, and `coord_weight` for numbers that are coordinates, up to the token that ends them.
    """

    coord_index: np.ndarray  # int64 [nc], coordinate tokens
    coord_target: np.ndarray  # float32 [nc], the correct bin of each, fractional for polygons moved by transport
    text_index: np.ndarray  # int64 [nt], other tokens
    text_label: np.ndarray  # int64 [nt], the correct id of each
    text_weight: np.ndarray  # float32 [nt]
    # int64 [nd], those of `text_index` that hold a digit of such a number (qwen3vl only, where `coord_index` is empty)
    digit_index: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


@dataclass(kw_only=True)
class Target(Supervision):
    """An answer to learn. Indices count from the start of the answer."""

    answer_ids: np.ndarray  # int64 [n], prefix, missed objects, closing and end token
    num_prefix: int  # tokens before the first appended one, without one that a bare header shares with what follows
    num_matched: int  # predictions
    num_appended: int  # missed objects
    num_trimmed: int = 0  # predictions that were cut off, or left out as duplicates
    respelled: bool = False  # the cut fell inside a token


@dataclass(kw_only=True)
class Segment(Supervision):
    """One sample's finished training sequence. Indices count from the start of `input_ids`."""

    sample_id: str  # for messages
    input_ids: np.ndarray  # int64 [length], prompt (image placeholders expanded) and answer
    answer_start: int  # index of the answer's first token
    vision: "dict[str, torch.Tensor]" = field(default_factory=dict)  # `EncodedPrompt.vision`
    position_ids: "torch.Tensor | None" = None  # int64 [rows, length], None until `packing.place`
    policy_version: str | None = None  # of the weights that generated the prefix; None for a plain ground truth
    # What a teacher reports where the tokens of `unlabelled_index` are; no rows without a teacher (TGT-16)
    teacher_ids: np.ndarray = field(default_factory=lambda: np.zeros((0, TEACHER_TOP_K), dtype=np.int64))
    teacher_logprobs: np.ndarray = field(default_factory=lambda: np.zeros((0, TEACHER_TOP_K), dtype=np.float32))

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def unlabelled_index(self) -> np.ndarray:
        """int64 [nu], the tokens of the answer that carry no label (TGT-16)."""
        is_unlabelled = np.arange(len(self)) >= self.answer_start
        labelled = np.concatenate([self.coord_index, self.text_index])
        is_unlabelled[labelled[labelled < len(self)]] = False  # the checks of the row name one beyond the end
        return np.flatnonzero(is_unlabelled)


def format_objects(objects: Sequence[Object]) -> str:
    """The answer text of TGT-1. Raises ValueError for an object that could not be read back."""
    return COORD_TOKENS.write(list(objects))


def ground_truth_target(
    gt_objects: Sequence[Object],
    table: TokenTable,
    options: TargetOptions,
    annotated: Collection[str] | None = None,
) -> Target:
    """The plain ground truth with every token supervised, header included (teacher forcing, warm-up; DAT-4), but for
    what `supervise_closing: complete` leaves out."""
    return build_target(ParsedAnswer(), gt_objects, [], table, options, annotated)


def build_target(
    parsed: ParsedAnswer,
    gt_objects: Sequence[Object],
    matches: Sequence[tuple[int, int]],
    table: TokenTable,
    options: TargetOptions,
    annotated: Collection[str] | None = None,
) -> Target:
    """The training sequence of one rollout.

    Supervised are:
        - Coordinates of matched prefix objects, with the matched shape (`regression_targets`); where they are numbers,
          with the matched number, up to the first difference.
        - `desc` of matched prefix objects with `label: correct`: the ground truth's, up to the first difference.
        - With `supervise_structure`, the remaining tokens of matched objects and of the comma (or header) before them.
        - With `unmatched: redirect`, one token of each wrong object: the first at which an expert would differ.
        - All tokens of missed objects, the closing and the end token. So is the respelled token at the cut if it
          holds brackets only: it is ours, not the model's. Otherwise only closing would be learnt, not going on.
          With `supervise_closing: complete`, where `annotated` is given, nothing learns to close or to end.
        A bare `{"objects": [` (nothing usable, or everything trimmed) is tokenized together with what follows, so that
        the model sees its natural tokens. The tokens within it are supervised if the model wrote no header itself (a
        plain ground truth, an answer that begins differently); otherwise they carry no loss, but for a `[` that the
        model wrote as part of `[]`.

    Args:
        matches: `(index into parsed.objects, index into gt_objects)`, one to one.
        annotated: labels (`scores.label_of`) for which annotation is complete; None: all.

    Raises:
        ValueError: a ground-truth object cannot be written down, or its `desc` spells a special token.
    """
    num_predicted, rule = len(parsed.objects), options.arrangement
    if rule.unmatched == "trim":
        num_kept = num_kept_by_trim(parsed.pred_objects, matches, annotated)
        parsed = trim(parsed, num_kept, table)
    entries = arrange(parsed.pred_objects, gt_objects, matches, rule)
    first = [(entry.pred, entry.object) for entry in entries[: len(parsed.objects)]]
    is_unchanged = first == list(enumerate(parsed.pred_objects))
    draft = (continue_answer if is_unchanged else rewrite_answer)(parsed, entries, table)
    if draft is None:
        entries = arrange(parsed.pred_objects, gt_objects, matches, Arrangement())  # the prefix as the model wrote it
        draft = continue_answer(parsed, entries, table)
    labels = _Labels(draft.ids, table, options)
    labels.add_written(draft.is_ours)
    pairs = [
        (draft.objects[i], gt_objects[entry.gt])
        for i, entry in enumerate(entries)
        if entry.pred is not None and entry.gt is not None
    ]
    if table.format.has_coord_tokens:
        index = [i for pred, _ in pairs for i in pred.coord_index]
        labels.coord_target[index] = [value for pred, gt in pairs for value in regression_targets(pred.object, gt)]
    if options.supervise_structure:
        labels.add_structure(draft, [pred for pred, _ in pairs])
    ends = draft.ends.tolist()
    for pred, gt in pairs:
        labels.add_values(draft.data, ends, pred, gt)
    unmatched = [draft.objects[i] for i, entry in enumerate(entries) if entry.pred is not None and entry.gt is None]
    labels.forget_going_on(draft, unmatched)
    may_go_on = options.supervise_closing == "complete" and annotated is not None
    if rule.unmatched == "redirect":
        for i, better in wrong_entries(entries, gt_objects, annotated):
            if better is not None or not may_go_on:
                labels.redirect(draft, i, better)
    if may_go_on:
        labels.forget_closing(draft.opening)
        if draft.objects and not is_wrong_if_unmatched(draft.objects[-1].object, annotated):
            labels.forget_completion(draft.objects[-1])
    return labels.finish(
        num_prefix=draft.num_prefix,
        num_matched=len(matches),
        num_appended=sum(entry.pred is None for entry in entries),
        num_trimmed=num_predicted - sum(entry.pred is not None for entry in entries),
        respelled=draft.respelled,
    )


class _Labels:
    """Labels of one answer by token position, set step by step; later steps win over earlier ones."""

    def __init__(self, ids: np.ndarray, table: TokenTable, options: TargetOptions) -> None:
        self.ids = ids
        self.table = table
        self.options = options
        self.is_coord = table.coord_bin[ids] >= 0
        self.coord_target = np.full(len(ids), np.nan)  # nan where there is no label
        self.text_label = np.full(len(ids), -1, dtype=np.int64)  # -1 where there is no label
        self.text_weight = np.ones(len(ids))
        self.in_number = np.zeros(len(ids), dtype=bool)  # the label belongs to a coordinate that is a number

    def add_written(self, is_ours: np.ndarray) -> None:
        """Supervise every token of the mask `[n]` with itself."""
        start = int(np.flatnonzero(is_ours)[0])
        ids, ours = self.ids[start:], is_ours[start:]
        if self.table.is_stop[ids[:-1]].any():
            raise self._special_token_error(ids[:-1])
        data, ends = self.table.scan_text(ids)
        found = list(self.table.format.written.finditer(data))
        coords = self.is_coord[start:] & ours
        self.coord_target[start:][coords] = self.table.coord_bin[ids[coords]]
        self.text_label[start:] = np.where(ours & ~coords, ids, -1)
        if not self.table.format.has_coord_tokens:
            spans = [number.span() for obj in found for number in _NUMBER.finditer(data, *obj.span("coords"))]
            self.in_number[start:] = touched(ends, spans) & ours
            self.text_weight[start:][self.in_number[start:]] = self.options.coord_weight
        in_desc = touched(ends, [obj.span("text") for obj in found]) & ours
        self.text_weight[start:][in_desc] = self.options.desc_weight

    def add_structure(self, draft: Draft, matched: Sequence[PredObject]) -> None:
        """Supervise tokens of matched objects, and of the comma before them, that touch no coordinate and no `desc`."""
        ends = draft.own_ends
        if not len(ends):
            return
        own = [(pred.lead, pred.byte_span[1] - 1) for pred in matched]
        values = [span for pred in draft.objects for span in (pred.desc_bytes, *pred.coord_bytes)]
        chosen = np.flatnonzero(touched(ends, own) & ~touched(ends, values) & ~self.is_coord[: len(ends)])
        self.text_label[chosen] = self.ids[chosen]

    def add_values(self, data: bytes, ends: Sequence[int], pred: PredObject, gt: Object) -> None:
        """Supervise a matched object value by value: `desc` (TGT-9), and coordinates that are numbers.

        The labels of a value are the ground truth's tokens, tokenized in place, up to and including the first that
        differs, or the one that ends the value (a closing quote, a comma). Values are independent, except that tokens
        may span several: a value whose first token already has a label, or holds bytes of a wrong value, gets none.

        Args:
            data, ends: the answer as scanned and its tokens' ends, at least up to the end of `pred` and of what is
                tokenized with it.
        """
        values = self._values(pred, gt)
        if not values:
            return
        right_context = _RIGHT_CONTEXT.match(data, values[-1].end)
        assert right_context is not None, "the pattern matches the empty string"
        after = [right_context[0]]  # the text after each value, with the true values to come; last value first
        for value, following in reversed(list(pairwise(values))):
            after.append(data[value.end : following.start] + following.text.encode() + after[-1])
        _, context = _token_at(ends, pred.byte_span[0])
        wrong_end, taken = 0, -1
        for value, right in zip(values, reversed(after), strict=True):
            first, token_start = _token_at(ends, value.start - value.is_desc)
            if first > taken and token_start >= wrong_end:
                found = None
                for begin in (max(context, data.rfind(COORD_BYTE, 0, value.start) + 1), token_start):
                    before = data[begin : value.start]
                    found = found or _retokenized(before, token_start - begin, value.text, right, self.table)
                tokens, touches = found or ([], [])
                taken = max(taken, self._learn(first, tokens, touches, value.is_desc))
            if data[value.start : value.end] != value.text.encode():
                wrong_end = value.end

    def forget_going_on(self, draft: Draft, unmatched: Sequence[PredObject]) -> None:
        """Take its own label from a token that ends a value (`"},`) and goes on to an unmatched prediction, or to what
        is malformed."""
        ids, labels = self.ids[: len(draft.ends)], self.text_label[: len(draft.ends)]
        between = [(pred.lead, pred.byte_span[0]) for pred in unmatched]
        goes_on = touched(draft.ends, [*between, *((byte, byte) for byte in draft.malformed)])
        labels[goes_on & (labels == ids)] = -1

    def redirect(self, draft: Draft, wrong_index: int, better: Object | None) -> None:
        """Supervise the one token of a wrong object at which `better`, or the closing, would differ in its place
        (TGT-11)."""
        form, data, ends = self.table.format, draft.data, draft.ends.tolist()
        wrong = draft.objects[wrong_index]
        between, closing = form.layout(draft.opening)
        start = wrong.lead
        if start in (0, wrong.byte_span[0]):  # the header or stray text lies before it, not an object
            start, between = wrong.byte_span[0], ""
        text = form.completion(data[:start]) + (closing if better is None else between + form.write_object(better))
        first, token_start = _token_at(ends, start)
        if self.text_label[first] not in (-1, self.ids[first]):  # it ends the value before, which is wrong itself
            return
        _, context = _token_at(ends, draft.objects[wrong_index - 1].byte_span[0]) if wrong_index else (0, 0)
        for begin in (max(context, data.rfind(COORD_BYTE, 0, token_start) + 1), token_start):
            found = _retokenized(data[begin:start], token_start - begin, text, b"", self.table)
            if found:
                break
        else:
            return
        written = found[0] if better else [*found[0], self.table.eos_id]
        for index, token in enumerate(written, start=first):
            if token != self.ids[index]:
                is_coord = bool(self.is_coord[index]) and self.table.coord_bin[token] >= 0
                self.coord_target[index] = self.table.coord_bin[token] if is_coord else np.nan
                self.text_label[index] = -1 if is_coord else token
                self.text_weight[index], self.in_number[index] = 1.0, False
                return

    def forget_closing(self, opening: str) -> None:
        """Take the labels from the closing and the end token: what is not annotated may still be to come."""
        data, ends = self.table.scan_text(self.ids[:-1])
        _, closing = self.table.format.layout(opening)
        first = int(np.searchsorted(ends, len(data) - len(closing.encode()), side="right"))
        is_last = np.arange(len(self.ids)) >= first
        corrects = (self.text_label >= 0) & (self.text_label != self.ids)
        closes = np.zeros(len(self.ids), dtype=bool)
        for i in np.flatnonzero(corrects):  # one of the last tokens that ends a label too early learns to go on
            closes[i] = _ENDS_AND_CLOSES.search(self.table.bytes_of[self.text_label[i]]) is not None
        self.text_label[np.where(corrects, closes, is_last)] = -1

    def forget_completion(self, last: PredObject) -> None:
        """Take the labels from what ends the list of a label's boxes (internvl): it may have more."""
        data, ends = self.table.scan_text(self.ids[:-1])
        begin = last.byte_span[1]
        text = self.table.format.completion(data[:begin])
        starts = np.append(0, ends)  # of the tokens, that of the end token included
        self.text_label[(starts >= begin) & (starts < begin + len(text))] = -1

    def _values(self, pred: PredObject, gt: Object) -> list["_Value"]:
        """The supervised values of a matched object, in the order in which they were written."""
        values = []
        if self.options.label == "correct" and not pred.shares_desc:
            # Composed, as the tokenizer composes it: tokens are found by counting bytes.
            desc = unicodedata.normalize("NFC", self.table.format.spelled(gt.desc))
            values.append(_Value(*pred.desc_bytes, desc, is_desc=True))
        for (start, end), number in zip(pred.coord_bytes, bounding_box(gt) if pred.coord_bytes else (), strict=True):
            values.append(_Value(start, end, str(number), is_desc=False))
        return sorted(values, key=lambda value: value.start)

    def _learn(self, first: int, tokens: Sequence[int], touches: Sequence[bool], is_desc: bool) -> int:
        """Set labels from token `first` up to the first difference; return its index, -1 for none."""
        for index, (token, in_value) in enumerate(zip(tokens, touches, strict=True), start=first):
            differs = token != self.ids[index]
            if differs or in_value:
                if self.table.is_stop[token]:
                    raise self._special_token_error([token])
                self.text_label[index] = token
                self.text_weight[index] = self.options.desc_weight if is_desc else self.options.coord_weight
                self.in_number[index] = not is_desc
            if differs:
                return index
        return -1

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
            digit_index=text_index[self.in_number[text_index] & self.table.has_digit[self.ids[text_index]]],
            **counts,
        )

    def _special_token_error(self, ids: Sequence[int] | np.ndarray) -> ValueError:
        text = b"".join(self.table.bytes_of[token] for token in ids).decode(errors="replace")
        return ValueError(f"a desc of the ground truth spells a special token: {text!r}; reword it in the data file")


class _Value(NamedTuple):
    """`[start, end)` of a generated value in the answer's bytes, without quotes, and its correct text."""

    start: int
    end: int
    text: str
    is_desc: bool


def _token_at(ends: Sequence[int], byte: int) -> tuple[int, int]:
    """The token that holds a byte of the answer: its index, and the byte at which it begins."""
    index = bisect_right(ends, byte)
    return index, ends[index - 1] if index else 0


@lru_cache(maxsize=1 << 16)  # the same few texts occur in every answer
def _retokenized(
    before: bytes, skip: int, value: str, right: bytes, table: TokenTable
) -> tuple[list[int], list[bool]] | None:
    """Tokens of a value's correct text between the generated text `before` and the text `right` after it.

    Tokens depend on the text around them (`"red` may be one token), so `before` should begin with the object, or at the
    coordinate before. If that has no token border at `skip`, it has to begin there.

    Args:
        skip: the byte of `before` where the generated token begins that holds the value's first byte (or its quote).

    Returns:
        The ids from `skip` up to the one that ends the value, and for each, whether it holds text of the value or ends
        it. None if no token begins at `skip` or `before` is not valid Unicode.
    """
    try:
        text = before.decode() + value + right.decode()
    except UnicodeDecodeError:
        return None
    ids = table.encode(text)
    scanned, new_ends = table.scan_text(np.array(ids, dtype=np.int64))
    borders = [0, *new_ends.tolist()]
    if skip not in borders or scanned[:skip] != before[:skip]:
        return None
    skipped = borders.index(skip)
    last = int(np.searchsorted(new_ends, len(scanned) - len(right), side="right"))
    touches = [new_end > len(before) for new_end in new_ends.tolist()]
    return ids[skipped : last + 1], touches[skipped : last + 1]


def make_segment(
    sample_id: str,
    prompt_token_ids: Sequence[int],
    target: Target,
    table: TokenTable,
    vision: "dict[str, torch.Tensor] | None" = None,
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
        digit_index=target.digit_index + len(prompt),
        vision=vision or {},
        policy_version=policy_version,
    )
    check_segment(segment, table)
    return segment


def plain_segment(
    sample_id: str,
    prompt_token_ids: Sequence[int],
    answer_ids: Sequence[int],
    vision: "dict[str, torch.Tensor] | None" = None,
    policy_version: str | None = None,
) -> Segment:
    """Prompt and answer as a segment. All of the answer is scored, its end token too if the model generated one."""
    answer = np.array(answer_ids, dtype=np.int64)
    start = len(prompt_token_ids)
    return Segment(
        sample_id=sample_id,
        input_ids=np.concatenate([np.array(prompt_token_ids, dtype=np.int64), answer]),
        answer_start=start,
        coord_index=np.zeros(0, dtype=np.int64),
        coord_target=np.zeros(0, dtype=np.float32),
        text_index=start + np.arange(len(answer)),
        text_label=answer,
        text_weight=np.ones(len(answer), dtype=np.float32),
        vision=vision or {},
        policy_version=policy_version,
    )


def check_segment(segment: Segment, table: TokenTable) -> None:
    """Check TGT-8: every supervised index lies inside the answer, and every supervised coordinate is a coordinate token
    (where coordinates are numbers, a token that holds a digit).

    Raises:
        ValueError: names the sample and the first violation.
    """
    length, start = len(segment.input_ids), segment.answer_start
    problems = []
    if not 0 < start <= length:
        problems.append(f"the answer begins at {start} of {length} tokens, so its first token has no predecessor")
    for name in ("coord_index", "text_index", "digit_index"):
        index = getattr(segment, name)
        outside = index[(index < start) | (index >= length)]
        if len(outside):
            problems.append(f"{name} {outside[0]} lies outside the answer [{start}, {length})")
        if (np.diff(index) <= 0).any():
            problems.append(f"{name} does not ascend")
    if problems := problems or _label_problems(segment, table):
        raise ValueError(f"sample {segment.sample_id}: {'; '.join(problems)}")


def _label_problems(segment: Segment, table: TokenTable) -> list[str]:
    """Problems of the labels of a segment whose indices are in range."""
    problems = []
    for what, index, allowed in (
        ("coordinate", segment.coord_index, table.coord_bin >= 0),
        ("digit", segment.digit_index, table.has_digit),
    ):
        wrong = index[~allowed[segment.input_ids[index]]]
        if len(wrong):
            token = segment.input_ids[wrong[0]]
            problems.append(f"supervised {what} {wrong[0]} holds token {token}, which is no {what}")
    is_text = np.zeros(len(segment), dtype=bool)
    is_text[segment.text_index] = True
    if not is_text[segment.digit_index].all():
        problems.append("digit_index holds an index that text_index lacks")
    if not ((segment.coord_target >= 0) & (segment.coord_target <= MAX_BIN)).all():
        problems.append(f"a coordinate target lies outside 0..{MAX_BIN}")
    if ((segment.text_label < 0) | (segment.text_label >= len(table.bytes_of))).any():
        problems.append("a text label is not a token id")
    if len(segment.coord_target) != len(segment.coord_index):
        problems.append("coord_target and coord_index differ in length")
    if not len(segment.text_index) == len(segment.text_label) == len(segment.text_weight):
        problems.append("text_index, text_label and text_weight differ in length")
    return problems
