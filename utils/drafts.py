"""The answer that a target teaches, before it is labelled: which objects it holds, in which order and tokens.

Predictions stay, leave or are cut off, and missed objects enter at the end or at their place (TGT-11 to TGT-15). The
model's own tokens are kept where nothing before the missed objects changes; otherwise the whole answer is written anew.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from utils.geometry import Object, iou_matrix
from utils.parsing import ParsedAnswer, PredObject, cut_tokens, parse_answer
from utils.scores import is_wrong_if_unmatched, label_of
from utils.token_table import TokenTable, touched


@dataclass(frozen=True)
class Arrangement:
    """`RM.targets`: what becomes of unmatched predictions, where missed objects go, whose label is written."""

    unmatched: Literal["keep", "drop_duplicates", "trim", "redirect"] = "keep"
    duplicate_iou: float = 0.5
    place: Literal["end", "order"] = "end"
    label_context: Literal["own", "truth"] = "own"


@dataclass(frozen=True, slots=True)
class Entry:
    """An object of a target: a prediction that stays, matched or not, or a missed object (`pred` is None)."""

    object: Object  # as it is written
    pred: int | None  # index of the prediction
    gt: int | None  # index of the ground-truth object


def num_kept_by_trim(
    predicted: Sequence[Object], matches: Sequence[tuple[int, int]], annotated: Collection[str] | None
) -> int:
    """Number of leading predictions that `trim` keeps: up to the last that is matched or of a label without complete
    annotation."""
    matched = {p for p, _ in matches}
    kept = [p for p, obj in enumerate(predicted) if p in matched or not is_wrong_if_unmatched(obj, annotated)]
    return max(kept, default=-1) + 1


def arrange(
    predicted: Sequence[Object], gt_objects: Sequence[Object], matches: Sequence[tuple[int, int]], options: Arrangement
) -> list[Entry]:
    """The objects of a target in the order in which they stand there.

    With `place: order` a missed object stands behind the object that precedes it in the order of the data, or first.
    """
    gt_of = dict(matches)
    if options.label_context == "truth":
        predicted = [
            replace(obj, desc=gt_objects[gt_of[p]].desc) if p in gt_of else obj for p, obj in enumerate(predicted)
        ]
    gone = _repeats(predicted, gt_of, options.duplicate_iou) if options.unmatched == "drop_duplicates" else set()
    entries = [Entry(obj, p, gt_of.get(p)) for p, obj in enumerate(predicted) if p not in gone]
    missed = [Entry(obj, None, g) for g, obj in enumerate(gt_objects) if g not in gt_of.values()]
    if options.place == "end":
        return entries + missed
    for entry in missed:
        assert entry.gt is not None
        earlier = [(other.gt, i) for i, other in enumerate(entries) if other.gt is not None and other.gt < entry.gt]
        entries.insert(max(earlier)[1] + 1 if earlier else 0, entry)
    return entries


def wrong_entries(
    entries: Sequence[Entry], gt_objects: Sequence[Object], annotated: Collection[str] | None
) -> list[tuple[int, Object | None]]:
    """For each prediction that is wrong, its index in `entries` and what an expert would write in its place.

    That is the next missed object; if none is left, the next object that is found behind it; None: the expert closes.
    Where only neutral objects (TGT-12) are behind it nobody knows: closing would unlearn them.
    """
    found = []
    for i, entry in enumerate(entries):
        if entry.gt is None and is_wrong_if_unmatched(entry.object, annotated):
            behind = entries[i + 1 :]
            to_come = [other for other in behind if other.gt is not None]
            if not to_come and not all(is_wrong_if_unmatched(other.object, annotated) for other in behind):
                continue
            chosen = next((other for other in to_come if other.pred is None), to_come[0] if to_come else None)
            found.append((i, gt_objects[chosen.gt] if chosen and chosen.gt is not None else None))
    return found


def _repeats(predicted: Sequence[Object], matched: Collection[int], iou_threshold: float) -> set[int]:
    """Unmatched predictions that repeat an earlier one that stays: same label, IoU at least the threshold."""
    iou, labels = iou_matrix(predicted, predicted), [label_of(obj) for obj in predicted]
    gone: set[int] = set()
    for p in range(len(predicted)):
        earlier = (q for q in range(p) if q not in gone and labels[q] == labels[p])
        if p not in matched and any(iou[q, p] >= iou_threshold for q in earlier):
            gone.add(p)
    return gone


@dataclass
class Draft:
    """A whole answer before it is labelled."""

    ids: np.ndarray  # int64 [n], with the end token
    is_ours: np.ndarray  # bool [n], tokens that learn themselves
    num_prefix: int  # as in `Target`
    objects: list[PredObject]  # the predictions among the entries (rewritten: all entries)
    data: bytes  # the answer as scanned and its tokens' ends, at least up to what is tokenized with the last prediction
    ends: np.ndarray
    own_ends: np.ndarray  # ends of the tokens whose format text may be supervised
    opening: str
    respelled: bool = False
    malformed: list[int] = field(default_factory=list)  # bytes behind predictions that no valid object follows


def continue_answer(parsed: ParsedAnswer, entries: Sequence[Entry], table: TokenTable) -> Draft:
    """The model's own tokens, followed by the missed objects."""
    form, opening = table.format, parsed.opening or table.format.opening
    missed = [entry.object for entry in entries[len(parsed.objects) :]]
    prefix, data, ends = parsed, parsed.prefix_bytes, parsed.prefix_ends
    if parsed.prefix_bytes:
        between, closing = form.layout(opening)
        text = form.completion(prefix.prefix_bytes)
        text += "".join(between + form.write_object(obj) for obj in missed) + closing
        prefix, ids, is_joined = _join(parsed, text, table)
        start = len(prefix.prefix_ids)
        learnt_from = prefix.num_exact if is_joined else start
        data, ends = table.scan_text(ids[:-1]) if is_joined else (data, ends)
    else:
        if table.is_stop[table.encode(opening)].any():  # internvl: the model spelled a special token there
            opening = form.opening
        ids = np.array([*table.encode(form.write(missed, opening)), table.eos_id], dtype=np.int64)
        wrote_header = parsed.prefix_ids and not parsed.dropped.get("no_header")
        header = _num_bytes(opening, table) if wrote_header else 0
        own_ends = table.scan_text(ids)[1]
        start = int(np.searchsorted(own_ends, header, side="right"))
        # Where the model wrote `[]` in one token, `[` is ours. Otherwise only `[]` would be learnt, where it is right.
        cut = int(np.searchsorted(own_ends, header))
        learnt_from = cut if parsed.respelled and not table.bytes_of[ids[cut]].strip(b"[ \t\r\n") else start
    is_ours = np.arange(len(ids)) >= learnt_from
    objects, own_ends = prefix.objects, prefix.prefix_ends
    leads = [*(pred.lead for pred in objects[1:]), len(parsed.prefix_bytes)]
    own = [pred.byte_span[1] for pred in objects]
    malformed = [end for end, lead in zip(own, leads, strict=False) if lead != end]
    return Draft(ids, is_ours, start, objects, data, ends, own_ends, opening, prefix.respelled, malformed)


def rewrite_answer(parsed: ParsedAnswer, entries: Sequence[Entry], table: TokenTable) -> Draft | None:
    """All objects written anew in one tokenization, as if the model had written them so; malformed ones are left out.

    Missed objects, with the comma before them, and what closes the answer are ours. None if it does not read back: text
    that the model spelled with ordinary tokens would become a special token, which ends the answer.
    """
    opening = parsed.opening or table.format.opening
    text = table.format.write([entry.object for entry in entries], opening)
    ids = np.array([*table.encode(text), table.eos_id], dtype=np.int64)
    objects = parse_answer(ids.tolist(), table).objects
    if len(objects) != len(entries):
        return None
    data, ends = table.scan_text(ids)
    missed = [
        (obj.lead, obj.byte_span[1] - 1) for obj, entry in zip(objects, entries, strict=True) if entry.pred is None
    ]
    is_ours = touched(ends, [*missed, (objects[-1].byte_span[1], len(data))])
    is_ours[: np.searchsorted(ends, _num_bytes(opening, table), side="right")] = False
    num_prefix = int(np.flatnonzero(is_ours)[0])
    return Draft(ids, is_ours, num_prefix, objects, data, ends, ends, opening)


def _num_bytes(text: str, table: TokenTable) -> int:
    """Length of a text as it is scanned: a tokenizer may compose accents (NFC)."""
    return len(table.scan_text(np.array(table.encode(text), dtype=np.int64))[0])


def _join(prefix: ParsedAnswer, appended: str, table: TokenTable) -> tuple[ParsedAnswer, np.ndarray, bool]:
    """The prefix as far as it has tokens of its own, all ids with the end token, and whether prefix and appended text
    were tokenized together.

    If the token at the cut was respelled anyway, the bytes kept of it (brackets) and the appended text are tokenized
    together: `]}` + `]}` becomes the one token `]}]}` that the model wrote and will write again. Two spellings of the
    same text at this very place would teach it to stop early. A token that reaches from the prefix into the appended
    text counts as appended.
    """
    kept = prefix.prefix_bytes[int(prefix.prefix_ends[prefix.num_exact - 1]) if prefix.num_exact else 0 :]
    if not prefix.respelled or table.format.tail.sub(b"", kept):
        return prefix, np.array([*prefix.prefix_ids, *table.encode(appended), table.eos_id], dtype=np.int64), False
    joined = table.encode(kept.decode() + appended)
    inside = int(np.searchsorted(table.scan_text(np.array(joined))[1], len(kept), side="right"))
    exact = prefix.prefix_ids[: prefix.num_exact]
    ids = np.array([*exact, *joined, table.eos_id], dtype=np.int64)
    ends = table.scan_text(ids[: prefix.num_exact + inside])[1]
    return replace(prefix, prefix_ids=[*exact, *joined[:inside]], prefix_ends=ends), ids, True


def trim(parsed: ParsedAnswer, num_kept: int, table: TokenTable) -> ParsedAnswer:
    """Cut after the first `num_kept` objects (TGT-11)."""
    if not num_kept:
        ids = table.encode(parsed.opening or table.format.opening) if parsed.prefix_ids else []
        respelled = parsed.respelled and not parsed.prefix_bytes
        return ParsedAnswer(ids, dropped=parsed.dropped, respelled=respelled, opening=parsed.opening)
    end = parsed.objects[num_kept - 1].byte_span[1]
    if end == len(parsed.prefix_bytes):
        return parsed  # nothing is cut off: the model's own tokens stay
    ids, ends, num_exact = cut_tokens(parsed.prefix_ids, parsed.prefix_ends, end, table)
    num_exact = min(num_exact, parsed.num_exact)
    if num_exact == len(ids) and not table.format.tail.sub(b"", table.bytes_of[ids[-1]]):
        num_exact -= 1  # where the model began to invent objects it learns to close, in the one token that does both
    return replace(
        parsed,
        prefix_ids=ids,
        prefix_ends=ends,
        prefix_bytes=parsed.prefix_bytes[:end],
        objects=parsed.objects[:num_kept],
        respelled=num_exact < len(ids),
        num_exact=num_exact,
    )
