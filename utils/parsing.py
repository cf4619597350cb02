"""Generated token ids -> objects and the usable prefix, aligned to tokens (TGT-1 to TGT-3).

Everything works on one byte string of the answer in which each coordinate token is the single byte 0xFF, which valid
UTF-8 never holds; a 0xFF that ordinary tokens spell becomes 0xFE, which is just as invalid. One regular expression
reads a whole object, and byte offsets become token indices by binary search over the tokens' ends, so the cost is
linear and there is no Python loop over tokens or characters.

What is accepted: `{"objects": [...]}` as strict JSON, any JSON whitespace, the keys of an object in either order; in
Qwen3-VL's own form a list, in a Markdown fence or not. What differs between the two is in `utils.answer_format`.

Where a malformed object ends. Brackets are matched outside of strings; a quote opens a string only if the next one is
followed by `,`, `:`, `]` or `}`, so that a forgotten quote does not turn the rest inside out. `}` closes the innermost
`{` with any `[` still open inside; a `]` that opens nothing is skipped. The object is closed where its own `{` is; it
then stays in the prefix. Otherwise it is unclosed, and does not count as complete, but ends all the same before a `, {`
that cannot stand inside it (directly in an object, or behind a coordinate), so that objects behind it survive. If
neither comes, or the answer closes with the object still open, it is the unfinished tail.

The prefix ends at the end of the last complete object: a valid one or a closed malformed one. An unclosed object or
stray text between complete objects therefore stays in the prefix, behind the last one it goes. A closed object does not
count as complete where only text behind it showed that a quote opens no string: cut off there, and followed by
something else, it would read differently.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from utils.answer_format import COORD_BYTE, COORD_TOKENS, QUOTED, AnswerFormat
from utils.geometry import NUM_BINS, Object

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

DROP_REASONS = {
    "no_header": "the answer does not begin with an object that holds the list `objects`",
    "unfinished": "the tail: an object that never ends",
    "unclosed": "another object begins before this one is closed",
    "stray_text": "something between objects that is neither an object nor a single comma",
    "bad_json": "brackets, commas, quotes or escapes are wrong",
    "duplicate_key": "a key occurs twice",
    "extra_key": "a key besides desc, bbox_2d and poly (qwen3vl: label and bbox_2d)",
    "missing_desc": "no desc (qwen3vl: no label; and so on)",
    "empty_desc": "desc is empty or blank",
    "bad_desc": "desc is not a string of valid Unicode, or holds a coordinate token",
    "missing_geometry": "neither bbox_2d nor poly",
    "two_geometries": "both bbox_2d and poly",
    "coord_not_token": "the geometry is not a flat list of coordinate tokens",
    "coord_not_number": "the geometry is not a flat list of whole numbers of up to four digits (qwen3vl)",
    "out_of_range": "a number above 1000 (qwen3vl)",
    "wrong_count": "not 4 coordinates for bbox_2d, or odd or fewer than 6 for poly",
    "reversed_box": "x1 > x2 or y1 > y2",
}

_COORD_TEXT = re.compile(r"<\|coord_(0|[1-9]\d{0,2})\|>")
_NO_TEXT = b""  # ids that the tokenizer does not know
_DIGIT = re.compile(rb"[0-9]")
_SEPARATOR = re.compile(rb"[ \t\n\r]*+(,?+)[ \t\n\r]*+")
_LOOKAHEAD = re.compile(QUOTED + rb"[ \t\n\r]*+", re.DOTALL)
_BRACE = ord("{")


class TokenTable:
    """What parsing and targets need to know about a byte-level tokenizer, computed once.

    Attributes:
        format: the form of answers; one without coordinate tokens needs none, and takes any there are for plain text.
        bytes_of: the text of each id as bytes, `b""` for ids without text. Special and added tokens are literal text.
        coord_ids: int64 `[1000]`, the id of each coordinate token; `[0]` where the form has none.
        digit_ids: int64, ids whose text holds a digit; `[0]` where coordinates are tokens.
        coord_bin: int32 `[vocab]`, the bin of each id, -1 where it is not a coordinate token.
        stop_ids: ids that end an answer: every special token besides the coordinate tokens.
        eos_id: the end token that targets are closed with.
    """

    def __init__(
        self,
        bytes_of: list[bytes],
        coord_ids: list[int],
        special_ids: set[int],
        added_ids: set[int],
        eos_id: int,
        backend: "Tokenizer",
        format: AnswerFormat = COORD_TOKENS,
    ) -> None:
        self.format = format
        self.bytes_of = bytes_of
        with_digit = [] if coord_ids else [i for i, text in enumerate(bytes_of) if _DIGIT.search(text)]
        self.digit_ids = np.array(with_digit, dtype=np.int64)
        self.coord_ids = np.array(coord_ids, dtype=np.int64)
        self.coord_bin = np.full(len(bytes_of), -1, dtype=np.int32)
        self.coord_bin[self.coord_ids] = np.arange(len(coord_ids))
        self.eos_id = int(eos_id)
        self.stop_ids = frozenset(special_ids | {self.eos_id}) - frozenset(coord_ids)
        self.is_stop = np.array([not text for text in bytes_of])
        self.is_stop[list(self.stop_ids)] = True
        scan_bytes = [text.replace(COORD_BYTE, b"\xfe") if COORD_BYTE in text else text for text in bytes_of]
        for token in coord_ids:
            scan_bytes[token] = COORD_BYTE
        self._flat = np.frombuffer(b"".join(scan_bytes), dtype=np.uint8)  # all tokens' bytes as scanned, end to end
        self._length = np.fromiter(map(len, scan_bytes), dtype=np.int64, count=len(bytes_of))
        self._offset = np.cumsum(self._length) - self._length
        ordinary = (i for i in range(len(bytes_of) - 1, -1, -1) if bytes_of[i] and i not in added_ids)
        self._id_of = {bytes_of[i]: i for i in ordinary if self.coord_bin[i] < 0}
        self._backend = backend
        self._encoded: dict[str, list[int]] = {}
        num_bytes = sum(len(text) == 1 for text in self._id_of)
        if num_bytes < 256:
            raise ValueError(f"the tokenizer has a token for only {num_bytes} of 256 bytes: it is not byte-level BPE")

    @classmethod
    def from_tokenizer(cls, tokenizer: "PreTrainedTokenizerBase", format: AnswerFormat = COORD_TOKENS) -> "TokenTable":
        """Read the table off a fast byte-level BPE tokenizer (151,936 ids: about 0.3 s).

        Raises:
            ValueError: coordinate tokens that the format needs are missing (names them), there is no end token, or the
                vocabulary is not byte-level.
        """
        backend = tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder()
        num_coords = NUM_BINS if format.has_coord_tokens else 0
        coord_ids = [backend.token_to_id(f"<|coord_{k}|>") for k in range(num_coords)]
        missing = [f"<|coord_{k}|>" for k, token in enumerate(coord_ids) if token is None]
        if missing:
            names = ", ".join(missing[:3]) + (f", ... {missing[-1]}" if len(missing) > 3 else "")
            raise ValueError(
                f"the tokenizer lacks {len(missing)} of {NUM_BINS} coordinate tokens ({names}): each must be one token "
                "of its own; add them (python -m tools.add_coord_tokens) and train the model on answers that use them, "
                "or use answer_format: qwen3vl, which needs none"
            )
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end token (eos_token): an answer could not be closed")
        bytes_of = _vocabulary_bytes(backend.get_vocab(with_added_tokens=False), added)
        special = {token for token, entry in added.items() if entry.special} | set(tokenizer.all_special_ids)
        return cls(bytes_of, coord_ids, special, set(added), tokenizer.eos_token_id, backend, format)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as the tokenizer splits it; coordinate tokens in it are single ids; nothing is added."""
        if not self.format.has_coord_tokens:
            return self._backend.encode(text, add_special_tokens=False).ids  # never the same twice: not remembered
        parts = _COORD_TEXT.split(text)  # plain, bin, plain, bin, ..., plain
        ids = list(self._encode_plain(parts[0]))
        for index, plain in zip(parts[1::2], parts[2::2], strict=True):
            ids.append(int(self.coord_ids[int(index)]))
            ids += self._encode_plain(plain)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """Ids of text without coordinate tokens. The format's own pieces recur endlessly, so they are remembered."""
        ids = self._encoded.get(text)
        if ids is None:
            ids = self._backend.encode(text, add_special_tokens=False).ids if text else []
            if len(self._encoded) < 65536:
                self._encoded[text] = ids
        return ids

    def spell(self, data: bytes) -> list[int]:
        """The fewest ordinary tokens whose bytes are `data`; of several such spellings the one that starts longest."""
        size = len(data)
        count = [0] * (size + 1)  # count[i]: tokens needed for data[i:]
        step = [0] * (size + 1)  # step[i]: end of the first of them
        for i in range(size - 1, -1, -1):
            count[i] = size + 1
            for j in range(size, i, -1):
                if count[j] + 1 < count[i] and data[i:j] in self._id_of:
                    count[i], step[i] = count[j] + 1, j
        ids, i = [], 0
        while i < size:
            ids.append(self._id_of[data[i : step[i]]])
            i = step[i]
        return ids

    def scan_text(self, ids: np.ndarray) -> tuple[bytes, np.ndarray]:
        """The answer as scanned (one 0xFF per coordinate token) and each token's end in it, int64 `[len(ids)]`."""
        length = self._length[ids]
        ends = np.cumsum(length)
        if not len(ids):
            return b"", ends
        source = np.repeat(self._offset[ids] - ends + length, length)  # where a byte lies in `_flat`, less where here
        source += np.arange(len(source))
        return self._flat[source].tobytes(), ends

    def until_stop(self, token_ids: Sequence[int]) -> np.ndarray:
        """Ids before the first one that ends the answer: a special token, or an id without text. int64."""
        ids = np.array(token_ids, dtype=np.int64).reshape(-1)
        known = (ids >= 0) & (ids < len(self.bytes_of))
        stops = np.flatnonzero(~known | self.is_stop[np.where(known, ids, 0)])
        return ids[: stops[0]] if len(stops) else ids


def _vocabulary_bytes(vocab: dict[str, int], added: dict) -> list[bytes]:
    """Bytes of every id. The vocabulary is translated in one go: each of its characters stands for one byte."""
    size = max([*vocab.values(), *added]) + 1
    bytes_of = [_NO_TEXT] * size
    try:
        text = "".join(vocab).translate(_BYTE_OF_CHAR).encode("latin-1")
    except UnicodeEncodeError as error:
        raise ValueError("the tokenizer's vocabulary is not byte-level BPE (GPT-2's byte alphabet)") from error
    ends = np.cumsum(np.fromiter(map(len, vocab), dtype=np.int64, count=len(vocab))).tolist()
    for token, (start, end) in zip(vocab.values(), pairwise([0, *ends]), strict=True):
        bytes_of[token] = text[start:end]
    for token, entry in added.items():
        bytes_of[token] = entry.content.encode()
    return bytes_of


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's map from characters of the vocabulary to bytes: printable ones stand for themselves, others are moved."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(plain)]
    return {byte: byte for byte in plain} | {256 + i: byte for i, byte in enumerate(moved)}


_BYTE_OF_CHAR = _byte_alphabet()


@dataclass(slots=True)
class PredObject:
    """One valid object of an answer. Token indices count from the start of `ParsedAnswer.prefix_ids`.

    Attributes:
        object: what it says.
        coord_index: token index of each coordinate, in the order of `object.coords`.
        desc_span: `[start, end)` of the tokens that touch the text of `desc` or the quote that closes it.
        token_span: `[start, end)` of the tokens that touch the object, braces included.
        desc_bytes: `[start, end)` of the text of `desc` in `ParsedAnswer.prefix_bytes`, escapes as written, no quotes.
        byte_span: `[start, end)` of the object there.
        lead: where the format text that belongs to the object begins there: at the end of the object before it if only
            a comma lies between, at 0 for the first object, otherwise at its own brace.
        coord_spans, coord_bytes: `[start, end)` of each coordinate's tokens, and of its digits in `prefix_bytes`, where
            coordinates are numbers in ordinary text; `coord_index` then holds the first token of each. Else empty.
    """

    object: Object
    coord_index: list[int]
    desc_span: tuple[int, int]
    token_span: tuple[int, int]
    desc_bytes: tuple[int, int]
    byte_span: tuple[int, int]
    lead: int
    coord_spans: Sequence[Sequence[int]] = ()
    coord_bytes: Sequence[Sequence[int]] = ()


@dataclass(slots=True)
class ParsedAnswer:
    """A parsed answer; `ParsedAnswer()` is what a plain ground truth starts from (nothing was generated at all).

    Attributes:
        prefix_ids: the usable prefix: generated ids, but for the respelled token at the cut. Without any complete
            object the encoding of `{"objects": [` (qwen3vl: of the model's own opening, or `[`).
        objects: the valid objects in order of appearance.
        dropped: how many objects were dropped, by reason (`DROP_REASONS`).
        closed: the answer ended as it should, in `]}` (qwen3vl: in `]` and the fence, if one was opened).
        respelled: the cut fell inside a token.
        num_exact: leading ids of the prefix that are the generated ones; those behind spell the token at the cut.
        prefix_bytes: the prefix as scanned, one 0xFF per coordinate token; empty without any complete object.
        prefix_ends: end of each prefix token in `prefix_bytes`, int64.
        opening: how the model opened its list, up to the first object; empty where the format's own opening counts.
    """

    prefix_ids: list[int] = field(default_factory=list)
    objects: list[PredObject] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    closed: bool = False
    respelled: bool = False
    num_exact: int = 0
    prefix_bytes: bytes = b""
    prefix_ends: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    opening: str = ""

    @property
    def pred_objects(self) -> list[Object]:
        """The valid objects' content, for `iou_matrix`."""
        return [pred.object for pred in self.objects]


def parse_answer(token_ids: Sequence[int], table: TokenTable) -> ParsedAnswer:
    """Read a generated answer. Accepts any ids and never raises on what was generated."""
    ids = table.until_stop(token_ids)
    data, ends = table.scan_text(ids)
    if table.format.has_coord_tokens:
        coord_index = np.flatnonzero(table.coord_bin[ids] >= 0)
        scan = _Scan(data, tuple(table.coord_bin[ids[coord_index]].tolist()), table.format)
    else:
        scan = _NumberScan(data, (), table.format)
    if not scan.end:
        prefix_ids = table.encode(scan.opening or table.format.opening)
        return ParsedAnswer(prefix_ids, dropped=dict(scan.dropped), closed=scan.closed, opening=scan.opening)
    prefix_ids, prefix_ends, num_exact = cut_tokens(ids.tolist(), ends, scan.end, table)
    if table.format.has_coord_tokens:
        objects = _align(scan, prefix_ends, coord_index.tolist())
    else:
        objects = _align_numbers(scan, prefix_ends)
    return ParsedAnswer(
        prefix_ids=prefix_ids,
        objects=objects,
        dropped=dict(scan.dropped),
        closed=scan.closed,
        respelled=num_exact < len(prefix_ids),
        num_exact=num_exact,
        prefix_bytes=data[: scan.end],
        prefix_ends=prefix_ends,
        opening=scan.opening,
    )


def cut_tokens(ids: list[int], ends: np.ndarray, cut: int, table: TokenTable) -> tuple[list[int], np.ndarray, int]:
    """The tokens of the first `cut > 0` bytes as (ids, their ends, how many of them stand before a respelled token).

    Where the cut falls inside a token, that token is replaced by the fewest tokens that spell its kept bytes (TGT-3).
    """
    last = int(np.searchsorted(ends, cut))
    if ends[last] == cut:
        return ids[: last + 1], ends[: last + 1], last + 1
    start = int(ends[last - 1]) if last else 0
    spelling = table.spell(table.bytes_of[ids[last]][: cut - start])
    spelled_ends = start + np.cumsum([len(table.bytes_of[token]) for token in spelling])
    return ids[:last] + spelling, np.concatenate([ends[:last], spelled_ends]), last


def _align(scan: "_Scan", ends: np.ndarray, coord_index: list[int]) -> list[PredObject]:
    """Turn byte offsets into token indices, for all objects at once."""
    spans = np.array(scan.spans, dtype=np.int64).reshape(-1, 4)
    tokens = np.searchsorted(ends, spans - [0, 1, 0, 0], side="right") + [0, 1, 0, 1]
    return [
        PredObject(obj, coord_index[rank : rank + len(obj.coords)], (i, j), (m, n), (a, b), (start, end), lead)
        for (obj, rank, lead), (start, end, a, b), (m, n, i, j) in zip(
            scan.found, spans.tolist(), tokens.tolist(), strict=True
        )
    ]


def _align_numbers(scan: "_NumberScan", ends: np.ndarray) -> list[PredObject]:
    """The same where coordinates are numbers, which all objects have four of; a number may span several tokens."""
    codes = np.frombuffer(scan.data, dtype=np.uint8)
    is_digit = (codes >= 0x30) & (codes <= 0x39)
    runs = np.flatnonzero(np.diff(is_digit, prepend=False, append=False)).reshape(-1, 2)
    first = np.searchsorted(runs[:, 0], np.array([start for _, start, _ in scan.found], dtype=np.int64))
    numbers = runs[first[:, None] + np.arange(4)]  # [num_objects, 4, 2], bytes
    tokens = np.searchsorted(ends, numbers - [0, 1], side="right") + [0, 1]
    scan.found = [(obj, 4 * index, lead) for index, (obj, _, lead) in enumerate(scan.found)]
    objects = _align(scan, ends, tokens[..., 0].reshape(-1).tolist())
    for pred, spans, own in zip(objects, tokens.tolist(), numbers.tolist(), strict=True):
        pred.coord_spans, pred.coord_bytes = spans, own
    return objects


class _Scan:
    """One pass over the bytes of an answer.

    Attributes:
        found: valid objects as (object, rank of its first coordinate token, lead).
        spans: start, end, start and end of desc of each of them in turn.
        dropped: malformed objects by reason.
        end: where the last complete object ends, 0 if there is none.
        closed: the answer ended as it should.
        opening: how the answer opens, where that may vary.
    """

    def __init__(self, data: bytes, bins: tuple[int, ...], form: AnswerFormat) -> None:
        self.data, self.bins, self.form = data, bins, form
        self.found: list[tuple[Object, int, int]] = []
        self.spans: list[int] = []
        self.dropped: Counter[str] = Counter()
        self.end = 0
        self.closed = False
        self.opening = ""
        self._rank = 0  # coordinate tokens before `self._pos`
        self._pos = 0  # all before it is dealt with
        self._looked_to = 0  # how far one had to look to tell that a quote opens no string
        self._complete_end = 0  # where the list's element before `self._pos` ended, -1 if not as a complete object
        header = form.header.match(data)
        if header is None:
            self.dropped["no_header"] += 1
            return
        self._pos = header.end()
        self._end_of_answer = form.ends[0]
        if not form.has_coord_tokens:
            self.opening = header[0].decode()
            self._end_of_answer = form.ends[header["fence"] is not None]
        pattern = form.first
        while True:
            found = pattern.match(data, self._pos)
            if found is not None:
                self._take(found, self._complete_end)
            elif not self._step_over(is_first=pattern is form.first):
                return
            pattern = form.next

    def _take(self, found: re.Match[bytes], lead: int) -> None:
        """Add an object that has the right form, unless its content is wrong."""
        _, desc, kind, coords, kind_first, coords_first, desc_last = found.groups()
        if desc is None:
            desc, kind, coords = desc_last, kind_first, coords_first
        start, end = found.span(1)
        made, rank = self._read(found, desc, kind, coords)
        if isinstance(made, Object):
            desc_start, desc_end = found.span(7 if desc_last is not None else 2)
            self.found.append((made, rank, start if lead < 0 else lead))
            self.spans += (start, end, desc_start, desc_end)
        else:
            self.dropped[made] += 1
        self._pos = self.end = self._complete_end = end

    def _read(self, found: re.Match[bytes], desc: bytes, kind: bytes, coords: bytes) -> tuple[Object | str, int]:
        """The object, or why it is none, and the rank of its first coordinate."""
        rank, self._rank = self._rank, self._rank + coords.count(COORD_BYTE)
        return _make_object(desc, kind, self.bins[rank : self._rank]), rank

    def _step_over(self, is_first: bool) -> bool:
        """Deal with anything but a well-formed next object; False when the list or the answer has ended."""
        data = self.data
        separator = _SEPARATOR.match(data, self._pos)
        at = separator.end()
        if at == len(data):
            return False
        if data[at] == 0x5D:  # ]
            self.closed = not separator[1] and self._end_of_answer.match(data, at) is not None
            return False
        if data[at] != _BRACE:
            self.dropped["stray_text"] += 1
            return self._move(at if data[at] == 0x2C else self._skip(at)[0], complete=False)  # a second comma
        if bool(separator[1]) == is_first and self._complete_end >= 0:
            self.dropped["stray_text"] += 1
        found = self.form.object.match(data, at)
        if found is not None:
            self._rank += data.count(COORD_BYTE, self._pos, at)
            self._take(found, -1)
            return True
        end, reason = self._skip(at)
        self.dropped[reason or _diagnose(data[at:end], self.form)] += 1
        return self._move(end, complete=not reason)

    def _move(self, end: int, complete: bool) -> bool:
        """Go on at `end`, -1 for the end of the answer."""
        if end < 0:
            return False
        complete = complete and end >= self._looked_to
        self._rank += self.data.count(COORD_BYTE, self._pos, end)
        self._pos = end
        self._complete_end = end if complete else -1
        self.end = end if complete else self.end
        return True

    def _skip(self, at: int) -> tuple[int, str]:
        """Where the malformed element that begins at `at` ends (rules: module docstring), and why it is not complete.

        Returns `(end, "")` for a closed object, `(end, reason)` for one that ends without being closed, and
        `(-1, "unfinished")` when the answer ends first. Text outside of any bracket ends before a `,`, `{` or `]`.
        """
        open_marks = bytearray()
        num_braces = 0
        for found in self.form.structure.finditer(self.data, at):
            kind = found.lastgroup
            if kind is None:
                continue
            if kind == "cut":
                return -1, "unfinished"
            if kind == "quote":
                self._looked_to = _LOOKAHEAD.match(self.data, found.start()).end() + 1
                continue
            mark, stop = self.data[found.end() - 1], found.end("coord") if found["coord"] else found.start()
            if not open_marks and stop > at and (kind == "next" or mark in b",{]"):
                return stop, "unclosed"
            if kind == "next" and (open_marks[-1] == _BRACE or found["coord"]):
                return stop, "unclosed"
            if mark in b"[{":
                open_marks.append(mark)
                num_braces += mark == _BRACE
            elif mark == 0x5D and open_marks:  # ]
                if open_marks[-1] != _BRACE:
                    open_marks.pop()
                elif self._end_of_answer.match(self.data, found.start()):
                    return -1, "unfinished"
            elif mark == 0x7D and num_braces:  # }
                while open_marks.pop() != _BRACE:
                    pass
                num_braces -= 1
                if not open_marks:
                    return found.end(), ""
        return -1, "unfinished"


class _NumberScan(_Scan):
    """The same where coordinates are numbers in ordinary text; `found` tells where the first begins, not its rank."""

    def _read(self, found: re.Match[bytes], desc: bytes, kind: bytes, coords: bytes) -> tuple[Object | str, int]:
        numbers = tuple(map(int, coords.split(b","))) if coords else ()
        if max(numbers, default=0) > self.form.max_bin:
            return "out_of_range", -1
        return _make_object(desc, kind, numbers), found.start(6 if found[4] is None else 4)


def _make_object(desc: bytes, kind: bytes, coords: tuple[int, ...]) -> Object | str:
    """The object, or the reason why it is none."""
    try:
        text = _unescape(desc) if b"\\" in desc else desc.decode()
    except UnicodeError:
        return "bad_desc"
    if not text or text.isspace():
        return "empty_desc"
    if kind == b"poly":
        return Object(text, "poly", coords) if len(coords) >= 6 and not len(coords) % 2 else "wrong_count"
    if len(coords) != 4:
        return "wrong_count"
    x1, y1, x2, y2 = coords
    return Object(text, "bbox_2d", coords) if x1 <= x2 and y1 <= y2 else "reversed_box"


def _unescape(desc: bytes) -> str:
    """The text of a JSON string with escapes; UnicodeError for bad UTF-8 or an escaped half of a surrogate pair."""
    text = json.loads(b'"%b"' % desc)
    text.encode()
    return text


class _Pairs(tuple):
    """A JSON object as its (key, value) pairs, duplicates included."""


def _diagnose(raw: bytes, form: AnswerFormat) -> str:
    """Why a closed object is malformed. Coordinate tokens are read as NaN, which JSON itself does not have."""
    try:
        text = raw.replace(COORD_BYTE, b"NaN").decode()
        pairs = json.loads(text, object_pairs_hook=_Pairs, parse_constant=lambda _: NUM_BINS)
    except (ValueError, RecursionError):
        return "bad_json"
    keys = [key for key, _ in pairs]
    values = dict(pairs)
    if len(values) < len(keys):
        return "duplicate_key"
    if values.keys() - {form.desc_key, *form.kinds}:
        return "extra_key"
    if form.desc_key not in values:
        return "missing_desc"
    if len(values) == 3:
        return "two_geometries"
    if len(values) == 1:
        return "missing_geometry"
    desc = values[form.desc_key]
    if not isinstance(desc, str) or form.has_coord_tokens and "NaN" in desc:
        return "bad_desc"
    return "coord_not_token" if form.has_coord_tokens else "coord_not_number"
