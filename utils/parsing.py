"""Generated token ids -> objects and the usable prefix, aligned to tokens (TGT-1 to TGT-3).

Everything works on one byte string of the answer in which each coordinate token is the single byte 0xFF, which valid
UTF-8 never holds; a 0xFF that ordinary tokens spell becomes 0xFE, which is just as invalid. One regular expression
reads a whole object, and byte offsets become token indices by binary search over the tokens' ends, so the cost is
linear and there is no Python loop over tokens or characters.

What is accepted: `{"objects": [...]}` as strict JSON, any JSON whitespace, the keys of an object in either order.

Where a malformed object ends. Brackets are matched outside of strings; a quote opens a string only if the next one is
followed by `,`, `:`, `]` or `}`, so that a forgotten quote does not turn the rest inside out. `}` closes the innermost
`{` with any `[` still open inside; a `]` that opens nothing is skipped. The object is closed where its own `{` is; it
then stays in the prefix. Otherwise it is unclosed, and does not count as complete, but ends all the same before a `, {`
that cannot stand inside it (directly in an object, or behind a coordinate), so that objects behind it survive. If
neither comes, or the answer ends in `]}` with the object still open, it is the unfinished tail.

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

from utils.geometry import NUM_BINS, Object

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

HEADER = '{"objects": ['
CLOSING = "]}"
DROP_REASONS = {
    "no_header": "the answer does not begin with an object that holds the list `objects`",
    "unfinished": "the tail: an object that never ends",
    "unclosed": "another object begins before this one is closed",
    "stray_text": "something between objects that is neither an object nor a single comma",
    "bad_json": "brackets, commas, quotes or escapes are wrong",
    "duplicate_key": "a key occurs twice",
    "extra_key": "a key besides desc, bbox_2d and poly",
    "missing_desc": "no desc",
    "empty_desc": "desc is empty or blank",
    "bad_desc": "desc is not a string of valid Unicode, or holds a coordinate token",
    "missing_geometry": "neither bbox_2d nor poly",
    "two_geometries": "both bbox_2d and poly",
    "coord_not_token": "the geometry is not a flat list of coordinate tokens",
    "wrong_count": "not 4 coordinates for bbox_2d, or odd or fewer than 6 for poly",
    "reversed_box": "x1 > x2 or y1 > y2",
}

COORD_BYTE = b"\xff"
_COORD_TEXT = re.compile(r"<\|coord_(0|[1-9]\d{0,2})\|>")
_NO_TEXT = b""  # ids that the tokenizer does not know

# Possessive quantifiers throughout: nothing is ever tried twice.
_WS = rb"[ \t\n\r]*+"
_STRING = rb'"((?:[^"\\\x00-\x1f\xff]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+)"'
_DESC = rb'"desc"' + _WS + rb":" + _WS + _STRING
_COORDS = rb"\[" + _WS + rb"((?:\xff(?:" + _WS + rb"," + _WS + rb"\xff)*+)?+)" + _WS + rb"\]"
_GEOMETRY = rb'"(bbox_2d|poly)"' + _WS + rb":" + _WS + _COORDS
_COMMA = _WS + rb"," + _WS
# Groups: 1 object; 2 desc, 3 kind, 4 coordinates; or, geometry first, 5 kind, 6 coordinates, 7 desc.
_OBJECT_TEXT = (
    rb"(\{" + _WS + rb"(?:" + _DESC + _COMMA + _GEOMETRY + rb"|" + _GEOMETRY + _COMMA + _DESC + rb")" + _WS + rb"\})"
)
_OBJECT = re.compile(_OBJECT_TEXT)
_FIRST = re.compile(_WS + _OBJECT_TEXT)
_NEXT = re.compile(_COMMA + _OBJECT_TEXT)
_HEADER = re.compile(_WS + rb"\{" + _WS + rb'"objects"' + _WS + rb":" + _WS + rb"\[")
_SEPARATOR = re.compile(_WS + rb"(,?+)" + _WS)
_END_OF_ANSWER = re.compile(rb"\]" + _WS + rb"\}" + _WS + rb"\Z")
# What matters inside malformed text: a string, one cut off by the end of the answer, a quote that opens none, an escape
# (an escaped quote opens none either), a `{` behind a comma (and behind a coordinate), single brackets.
_QUOTED = rb'"(?:[^"\\]++|\\.)*+"'
_STRUCTURE = re.compile(
    _QUOTED + rb"(?=" + _WS + rb"(?:[,:}\]]|\Z))"
    rb'|(?P<cut>"(?:[^"\\]++|\\.)*+\\?+\Z)'
    rb'|(?P<quote>")'
    rb"|\\."
    rb"|(?P<coord>\xff)?+" + _COMMA + rb"(?P<next>\{)"
    rb"|[ \t\n\r]++"
    rb"|(?P<mark>[\[\]{},])",
    re.DOTALL,
)
_LOOKAHEAD = re.compile(_QUOTED + _WS, re.DOTALL)
_BRACE = ord("{")


class TokenTable:
    """What parsing and targets need to know about a byte-level tokenizer, computed once.

    Attributes:
        bytes_of: the text of each id as bytes, `b""` for ids without text. Special and added tokens are literal text.
        coord_ids: int64 `[1000]`, the id of each coordinate token.
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
    ) -> None:
        self.bytes_of = bytes_of
        self.coord_ids = np.array(coord_ids, dtype=np.int64)
        self.coord_bin = np.full(len(bytes_of), -1, dtype=np.int32)
        self.coord_bin[self.coord_ids] = np.arange(NUM_BINS)
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
    def from_tokenizer(cls, tokenizer: "PreTrainedTokenizerBase") -> "TokenTable":
        """Read the table off a fast byte-level BPE tokenizer (151,936 ids: about 0.3 s).

        Raises:
            ValueError: coordinate tokens are missing (names them), there is no end token, or the vocabulary is not
                byte-level.
        """
        backend = tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder()
        coord_ids = [backend.token_to_id(f"<|coord_{k}|>") for k in range(NUM_BINS)]
        missing = [f"<|coord_{k}|>" for k, token in enumerate(coord_ids) if token is None]
        if missing:
            names = ", ".join(missing[:3]) + (f", ... {missing[-1]}" if len(missing) > 3 else "")
            raise ValueError(
                f"the tokenizer lacks {len(missing)} of {NUM_BINS} coordinate tokens ({names}): each must be one token "
                "of its own; add them (python -m tools.add_coord_tokens) and train the model on answers that use them"
            )
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end token (eos_token): an answer could not be closed")
        bytes_of = _vocabulary_bytes(backend.get_vocab(with_added_tokens=False), added)
        special = {token for token, entry in added.items() if entry.special} | set(tokenizer.all_special_ids)
        return cls(bytes_of, coord_ids, special, set(added), tokenizer.eos_token_id, backend)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as the tokenizer splits it; coordinate tokens in it are single ids; nothing is added."""
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
    """

    object: Object
    coord_index: list[int]
    desc_span: tuple[int, int]
    token_span: tuple[int, int]
    desc_bytes: tuple[int, int]
    byte_span: tuple[int, int]
    lead: int


@dataclass(slots=True)
class ParsedAnswer:
    """A parsed answer; `ParsedAnswer()` is what a plain ground truth starts from (nothing was generated at all).

    Attributes:
        prefix_ids: the usable prefix: generated ids, but for the respelled token at the cut. Without any complete
            object the encoding of `{"objects": [`.
        objects: the valid objects in order of appearance.
        dropped: how many objects were dropped, by reason (`DROP_REASONS`).
        closed: the answer ended in `]}` as it should.
        respelled: the cut fell inside a token.
        num_exact: leading ids of the prefix that are the generated ones; those behind spell the token at the cut.
        prefix_bytes: the prefix as scanned, one 0xFF per coordinate token; empty without any complete object.
        prefix_ends: end of each prefix token in `prefix_bytes`, int64.
    """

    prefix_ids: list[int] = field(default_factory=list)
    objects: list[PredObject] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    closed: bool = False
    respelled: bool = False
    num_exact: int = 0
    prefix_bytes: bytes = b""
    prefix_ends: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def pred_objects(self) -> list[Object]:
        """The valid objects' content, for `iou_matrix`."""
        return [pred.object for pred in self.objects]


def parse_answer(token_ids: Sequence[int], table: TokenTable) -> ParsedAnswer:
    """Read a generated answer. Accepts any ids and never raises on what was generated."""
    ids = table.until_stop(token_ids)
    data, ends = table.scan_text(ids)
    coord_index = np.flatnonzero(table.coord_bin[ids] >= 0)
    scan = _Scan(data, tuple(table.coord_bin[ids[coord_index]].tolist()))
    if not scan.end:
        return ParsedAnswer(table.encode(HEADER), dropped=dict(scan.dropped), closed=scan.closed)
    prefix_ids, prefix_ends, num_exact = cut_tokens(ids.tolist(), ends, scan.end, table)
    return ParsedAnswer(
        prefix_ids=prefix_ids,
        objects=_align(scan, prefix_ends, coord_index.tolist()),
        dropped=dict(scan.dropped),
        closed=scan.closed,
        respelled=num_exact < len(prefix_ids),
        num_exact=num_exact,
        prefix_bytes=data[: scan.end],
        prefix_ends=prefix_ends,
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


class _Scan:
    """One pass over the bytes of an answer.

    Attributes:
        found: valid objects as (object, rank of its first coordinate token, lead).
        spans: start, end, start and end of desc of each of them in turn.
        dropped: malformed objects by reason.
        end: where the last complete object ends, 0 if there is none.
        closed: the answer ended as it should.
    """

    def __init__(self, data: bytes, bins: tuple[int, ...]) -> None:
        self.data, self.bins = data, bins
        self.found: list[tuple[Object, int, int]] = []
        self.spans: list[int] = []
        self.dropped: Counter[str] = Counter()
        self.end = 0
        self.closed = False
        self._rank = 0  # coordinate tokens before `self._pos`
        self._pos = 0  # all before it is dealt with
        self._looked_to = 0  # how far one had to look to tell that a quote opens no string
        self._complete_end = 0  # where the list's element before `self._pos` ended, -1 if not as a complete object
        header = _HEADER.match(data)
        if header is None:
            self.dropped["no_header"] += 1
            return
        self._pos = header.end()
        pattern = _FIRST
        while True:
            found = pattern.match(data, self._pos)
            if found is not None:
                self._take(found, self._complete_end)
            elif not self._step_over(is_first=pattern is _FIRST):
                return
            pattern = _NEXT

    def _take(self, found: re.Match[bytes], lead: int) -> None:
        """Add an object that has the right form, unless its content is wrong."""
        _, desc, kind, coords, kind_first, coords_first, desc_last = found.groups()
        if desc is None:
            desc, kind, coords = desc_last, kind_first, coords_first
        start, end = found.span(1)
        rank, self._rank = self._rank, self._rank + coords.count(COORD_BYTE)
        made = _make_object(desc, kind, self.bins[rank : self._rank])
        if isinstance(made, Object):
            desc_start, desc_end = found.span(7 if desc_last is not None else 2)
            self.found.append((made, rank, start if lead < 0 else lead))
            self.spans += (start, end, desc_start, desc_end)
        else:
            self.dropped[made] += 1
        self._pos = self.end = self._complete_end = end

    def _step_over(self, is_first: bool) -> bool:
        """Deal with anything but a well-formed next object; False when the list or the answer has ended."""
        data = self.data
        separator = _SEPARATOR.match(data, self._pos)
        at = separator.end()
        if at == len(data):
            return False
        if data[at] == 0x5D:  # ]
            self.closed = not separator[1] and _END_OF_ANSWER.match(data, at) is not None
            return False
        if data[at] != _BRACE:
            self.dropped["stray_text"] += 1
            return self._move(at if data[at] == 0x2C else self._skip(at)[0], complete=False)  # a second comma
        if bool(separator[1]) == is_first and self._complete_end >= 0:
            self.dropped["stray_text"] += 1
        found = _OBJECT.match(data, at)
        if found is not None:
            self._rank += data.count(COORD_BYTE, self._pos, at)
            self._take(found, -1)
            return True
        end, reason = self._skip(at)
        self.dropped[reason or _diagnose(data[at:end])] += 1
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
        for found in _STRUCTURE.finditer(self.data, at):
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
                elif _END_OF_ANSWER.match(self.data, found.start()):
                    return -1, "unfinished"
            elif mark == 0x7D and num_braces:  # }
                while open_marks.pop() != _BRACE:
                    pass
                num_braces -= 1
                if not open_marks:
                    return found.end(), ""
        return -1, "unfinished"


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


def _diagnose(raw: bytes) -> str:
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
    if values.keys() - {"desc", "bbox_2d", "poly"}:
        return "extra_key"
    if "desc" not in values:
        return "missing_desc"
    if len(values) == 3:
        return "two_geometries"
    if len(values) == 1:
        return "missing_geometry"
    desc_is_text = isinstance(values["desc"], str) and "NaN" not in values["desc"]
    return "coord_not_token" if desc_is_text else "bad_desc"
