"""Generated token ids -> objects and the usable prefix, aligned to tokens (TGT-1 to TGT-3).

The answer becomes one byte string in which each coordinate token is the single byte 0xFF, which valid UTF-8 never
holds; a 0xFF that ordinary tokens spell becomes 0xFE, which is just as invalid. One regular expression reads a whole
object. Binary search over the tokens' ends turns byte offsets into token indices, so the cost is linear and no Python
loop runs over tokens or characters.

Accepted: `{"objects": [...]}` as strict JSON, with any JSON white space and the keys of an object in either order; in
Qwen's own forms a list, with or without a Markdown fence. `utils.answer_format` holds what differs between them.
InternVL's tags are no JSON; `_RefBoxScan` reads them.

Where a malformed object ends. Brackets are matched outside strings; a quote opens a string only if the next quote is
followed by `,`, `:`, `]` or `}`, so that a forgotten quote does not turn the rest inside out. `}` closes the innermost
`{` and any `[` still open inside it; a `]` that closes nothing is skipped. A malformed object that its own `}` closes
stays in the prefix. Otherwise it is unclosed and not complete, but still ends before a `, {` that cannot stand inside
it, so that later objects survive: directly in an object, or in a list after a coordinate, a comma or the `[`. In a list
it can if all brackets are balanced and another object or the end of the answer follows. If there is no such place, or
the answer closes while the object is open, it is the unfinished tail.

The prefix ends with the last complete object: a valid one or a closed malformed one. An unclosed object or stray text
therefore stays in the prefix between complete objects and is cut off after the last one. A closed object is not
complete if only the text after it showed that a quote opens no string: before other text it would read differently.
"""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from utils.answer_format import COORD_BYTE, QUOTED, AnswerFormat
from utils.geometry import NUM_BINS, Object
from utils.token_table import TokenTable

DROP_REASONS = {
    "no_header": "the answer does not begin with an object that holds the list `objects`",
    "unfinished": "the tail: an object that never ends",
    "unclosed": "another object begins before this one is closed",
    "stray_text": "something between objects that is neither an object nor a single comma",
    "bad_json": "brackets, commas, quotes or escapes are wrong",
    "duplicate_key": "a key occurs twice",
    "extra_key": "a key besides desc, bbox_2d and poly (models' own forms: label and bbox_2d)",
    "missing_desc": "no desc (models' own forms: no label; and so on)",
    "empty_desc": "desc is empty or blank",
    "bad_desc": "desc is not a string of valid Unicode, or holds a coordinate token",
    "missing_geometry": "neither bbox_2d nor poly",
    "two_geometries": "both bbox_2d and poly",
    "escaped_key": "a key is spelled with escapes",
    "coord_not_token": "the geometry is not a flat list of coordinate tokens",
    "coord_not_number": "the geometry is not a flat list of whole numbers of up to four digits (models' own forms)",
    "out_of_range": "a number above the largest of the form (qwen3vl: 1000)",
    "wrong_count": "not 4 coordinates for bbox_2d, or odd or fewer than 6 for poly",
    "reversed_box": "x1 > x2 or y1 > y2",
}

_SEPARATOR = re.compile(rb"[ \t\n\r]*+(,?+)[ \t\n\r]*+")
_LOOKAHEAD = re.compile(QUOTED + rb"[ \t\n\r]*+", re.DOTALL)
_BRACE = ord("{")
_TAG = re.compile(rb"</?(?:ref|box)>")
_LABEL = re.compile(rb"<ref>((?:(?!</?(?:ref|box)>).)*+)</ref>[ \t\n\r]*+<box>[ \t\n\r]*+\[[ \t\n\r]*+", re.DOTALL)
_BOX = re.compile(rb"\[[ \t\n\r]*+((?:[0-9]{1,4}(?:[ \t\n\r]*+,[ \t\n\r]*+[0-9]{1,4})*+)?+)[ \t\n\r]*+\]")
_BREAK = re.compile(rb"<ref>|</box>")
_LIST_END = re.compile(rb"[ \t\n\r]*+\][ \t\n\r]*+</box>")


@dataclass(slots=True)
class PredObject:
    """One valid object of an answer. Byte spans are `[start, end)` in `ParsedAnswer.prefix_bytes`."""

    object: Object
    coord_index: list[int]  # (first) token of each of `object.coords`, in `ParsedAnswer.prefix_ids`
    desc_bytes: tuple[int, int]  # the text of `desc`, escapes as written, without the quotes
    byte_span: tuple[int, int]  # the object, braces included
    # Where the format text that belongs to the object begins: at the end of the object before it if only a comma lies
    # between, at 0 for the first object, otherwise (internvl: for the first one, too) at its own first byte.
    lead: int
    coord_bytes: Sequence[Sequence[int]] = ()  # digits of each coordinate that is a number in ordinary text, else empty
    shares_desc: bool = False  # its text is that of an object before it (internvl)


@dataclass(slots=True)
class ParsedAnswer:
    """A parsed answer. `ParsedAnswer()` stands for no generation at all: a plain ground truth starts from it.

    The usable prefix is the generated ids, except for a respelled token at the cut. Without any complete object it is
    the encoding of `{"objects": [` (qwen3vl: of the model's own opening, or `[`).
    """

    prefix_ids: list[int] = field(default_factory=list)
    objects: list[PredObject] = field(default_factory=list)  # the valid ones, in order of appearance
    dropped: dict[str, int] = field(default_factory=dict)  # number of dropped objects by reason (`DROP_REASONS`)
    closed: bool = False  # it ended in `]}` (qwen3vl: in `]` and the fence, if one was opened)
    respelled: bool = False  # the cut fell inside a token
    num_exact: int = 0  # leading ids of the prefix that are the generated ones; any others spell the token at the cut
    prefix_bytes: bytes = b""  # as scanned, one 0xFF per coordinate token; empty without any complete object
    prefix_ends: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # of each token, in bytes
    opening: str = ""  # as the model wrote it, up to the first object; empty where the format's own counts

    @property
    def is_whole(self) -> bool:
        """Whether the answer has its form from the first token to the last: it ended, and every object is valid."""
        return self.closed and not self.dropped

    @property
    def pred_objects(self) -> list[Object]:
        """Label and geometry of the valid objects, for `iou_matrix`."""
        return [pred.object for pred in self.objects]


def parse_answer(token_ids: Sequence[int], table: TokenTable) -> ParsedAnswer:
    """Read a generated answer. Accepts any ids and never raises because of their content."""
    ids = table.until_stop(token_ids)
    data, ends = table.scan_text(ids)
    scan: _Scan
    if table.format.has_coord_tokens:
        coord_index = np.flatnonzero(table.coord_bin[ids] >= 0)
        scan = _Scan(data, table.format, coord_index.tolist(), tuple(table.coord_bin[ids[coord_index]].tolist()))
    else:
        scan = (_RefBoxScan if table.format.tags else _NumberScan)(data, table.format)
    if not scan.end:
        return ParsedAnswer(
            prefix_ids=table.encode(scan.opening or table.format.opening),
            dropped=dict(scan.dropped),
            closed=scan.closed,
            respelled=scan.header_end > 0 and scan.header_end not in ends,
            opening=scan.opening,
        )
    prefix_ids, prefix_ends, num_exact = cut_tokens(ids.tolist(), ends, scan.end, table)
    scan.locate_coordinates(prefix_ends)
    return ParsedAnswer(
        prefix_ids=prefix_ids,
        objects=scan.objects,
        dropped=dict(scan.dropped),
        closed=scan.closed,
        respelled=num_exact < len(prefix_ids),
        num_exact=num_exact,
        prefix_bytes=data[: scan.end],
        prefix_ends=prefix_ends,
        opening=scan.opening,
    )


def cut_tokens(ids: list[int], ends: np.ndarray, cut: int, table: TokenTable) -> tuple[list[int], np.ndarray, int]:
    """The tokens of the first `cut > 0` bytes: ids, their ends, and how many of them precede a respelled token.

    A token that the cut falls into is replaced by the fewest tokens that spell the bytes kept of it (TGT-3).
    """
    last = int(np.searchsorted(ends, cut))
    if ends[last] == cut:
        return ids[: last + 1], ends[: last + 1], last + 1
    start = int(ends[last - 1]) if last else 0
    spelling = table.spell(table.bytes_of[ids[last]][: cut - start])
    spelled_ends = start + np.cumsum([len(table.bytes_of[token]) for token in spelling])
    return ids[:last] + spelling, np.concatenate([ends[:last], spelled_ends]), last


class _Scan:
    """One pass over the bytes of an answer, given the index and bin of each coordinate token.

    The public results are those of `ParsedAnswer`.
    """

    def __init__(
        self, data: bytes, form: AnswerFormat, coord_index: Sequence[int] = (), bins: tuple[int, ...] = ()
    ) -> None:
        self.data = data
        self.form = form
        self.coord_index = coord_index
        self.bins = bins
        self.objects: list[PredObject] = []
        self.dropped: Counter[str] = Counter()
        self.end = 0  # where the last complete object ends, 0 if there is none
        self.closed = False
        self.opening = ""  # as the model wrote it, where that may vary
        self.header_end = 0  # 0 without a header, and where any text is one (internvl)
        self._rank = 0  # coordinate tokens before `self._pos`
        self._pos = 0  # everything before it has been read
        self._first_digits: list[int] = []  # per object, where coordinates are numbers
        self._looked_to = 0  # the furthest byte needed to tell that a quote opens no string
        self._closed_by: dict[int, int] | None = None  # `{` -> behind its `}`, where all brackets between are balanced
        self._complete_end = 0  # where the list's element before `self._pos` ended, -1 if not as a complete object
        self._read_answer()

    def _read_answer(self) -> None:
        form = self.form
        header = form.header.match(self.data)
        if header is None:
            self.dropped["no_header"] += 1
            return
        self._pos = self.header_end = header.end()
        self._end_of_answer = form.ends[0]
        if not form.has_coord_tokens:
            self.opening = header[0].decode()
            self._end_of_answer = form.ends[header["fence"] is not None]
        self._read_list()

    def _read_list(self) -> None:
        pattern = self.form.first
        while True:
            found = pattern.match(self.data, self._pos)
            if found is not None:
                self._add(found, self._complete_end)
            elif not self._step_over(is_first=pattern is self.form.first):
                return
            pattern = self.form.next

    def _add(self, found: re.Match[bytes], lead: int) -> None:
        """Add an object of the right form, unless its content is wrong."""
        _, desc, kind, coords, kind_first, coords_first, desc_last = found.groups()
        if desc is None:
            desc, kind, coords = desc_last, kind_first, coords_first
        start, end = found.span(1)
        rank = self._rank
        made = self._read(found, desc, kind, coords)
        if isinstance(made, Object):
            desc_span = found.span(7 if desc_last is not None else 2)
            index = list(self.coord_index[rank : self._rank])
            self.objects.append(PredObject(made, index, desc_span, (start, end), start if lead < 0 else lead))
        else:
            self.dropped[made] += 1
        self._pos = self.end = self._complete_end = end

    def _read(self, found: re.Match[bytes], desc: bytes, kind: bytes, coords: bytes) -> Object | str:
        """The object, or the reason why it is none."""
        rank = self._rank
        self._rank += coords.count(COORD_BYTE)
        return _make_object(desc, kind, self.bins[rank : self._rank])

    def _step_over(self, is_first: bool) -> bool:
        """Handle anything but a well-formed next object; False when the list or the answer has ended."""
        data = self.data
        separator = _SEPARATOR.match(data, self._pos)
        assert separator is not None, "the pattern matches the empty string"
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
            self._add(found, -1)
            return True
        end, reason = self._skip(at)
        self.dropped[reason or _diagnose(data[at:end], self.form)] += 1
        return self._move(end, complete=not reason)

    def _move(self, end: int, complete: bool) -> bool:
        """Continue at `end`, -1 for the end of the answer."""
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
        `(-1, "unfinished")` when the answer ends first. Text outside any bracket ends before a `,`, `{` or `]`.
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
                quoted = _LOOKAHEAD.match(self.data, found.start())
                assert quoted is not None, "a quote without an end is a cut"
                self._looked_to = quoted.end() + 1
                continue
            mark, stop = self.data[found.end() - 1], found.end("coord") if found["coord"] else found.start()
            in_list = found["coord"] or self.data[found.start() - 1] in b"[,"  # `, {` may begin the next object
            if not open_marks and stop > at and (kind == "next" or mark in b",{]"):
                return stop, "unclosed"
            if kind == "next" and (open_marks[-1] == _BRACE or in_list and not self._is_balanced(at)):
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

    def _is_balanced(self, at: int) -> bool:
        """Whether the brackets from the `{` at `at` on are balanced, and another object or the answer's end follows."""
        if self._closed_by is None:
            self._closed_by = self._match_brackets(at)
        end = self._closed_by.get(at)
        if end is None:
            return False
        separator = _SEPARATOR.match(self.data, end)
        assert separator is not None, "the pattern matches the empty string"
        follows = self.data[separator.end() : separator.end() + 1]
        if separator[1]:
            return follows == b"{"
        return self._end_of_answer.match(self.data, separator.end()) is not None

    def _match_brackets(self, start: int) -> dict[int, int]:
        closed_by, open_at = {}, []
        for found in self.form.structure.finditer(self.data, start):
            if found["mark"] is None and found["next"] is None:
                continue
            at, mark = found.end() - 1, self.data[found.end() - 1]
            if mark in b"[{":
                open_at.append(at)
            elif mark in b"]}":
                if open_at and self.data[open_at[-1]] == mark - 2:  # in ASCII, `[` and `{` lie two before `]` and `}`
                    closed_by[open_at.pop()] = at + 1
                else:
                    open_at.clear()
        return closed_by

    def locate_coordinates(self, ends: np.ndarray) -> None:
        """Set what depends on the ends of the prefix's tokens; nothing where coordinates are tokens of their own."""


class _NumberScan(_Scan):
    """The same where coordinates are numbers in ordinary text."""

    def _read(self, found: re.Match[bytes], desc: bytes, kind: bytes, coords: bytes) -> Object | str:
        numbers = tuple(map(int, coords.split(b","))) if coords else ()
        if max(numbers, default=0) > self.form.max_bin:
            return "out_of_range"
        made = _make_object(desc, kind, numbers)
        if isinstance(made, Object):
            self._first_digits.append(found.start(6 if found[4] is None else 4))
        return made

    def locate_coordinates(self, ends: np.ndarray) -> None:
        """Find the four numbers of all objects at once; a number may span several tokens."""
        codes = np.frombuffer(self.data, dtype=np.uint8)
        is_digit = (codes >= 0x30) & (codes <= 0x39)
        runs = np.flatnonzero(np.diff(is_digit, prepend=False, append=False)).reshape(-1, 2)
        first = np.searchsorted(runs[:, 0], np.array(self._first_digits, dtype=np.int64))
        numbers = runs[first[:, None] + np.arange(4)]  # [num_objects, 4, 2], bytes
        tokens = np.searchsorted(ends, numbers[..., 0], side="right")
        for pred, spans, index in zip(self.objects, numbers.tolist(), tokens.tolist(), strict=True):
            pred.coord_bytes, pred.coord_index = spans, index


class _RefBoxScan(_NumberScan):
    """The same for labels and boxes in tags (`RefBoxFormat`), between which any text may stand.

    Each box is an object. The first holds the tags before it, and the last those behind it; a cut between two boxes of
    a label leaves it open. A label or a list that breaks off ends before the next `<ref>`.
    """

    def _read_answer(self) -> None:
        header = self.form.header.match(self.data)
        assert header is not None, "the pattern matches the empty string"
        with contextlib.suppress(UnicodeDecodeError):
            self.opening = header[0].decode() if header.end() < len(self.data) else ""
        pos = header.end()
        while pos >= 0:
            tag = _TAG.search(self.data, pos)
            if tag is None:
                self.closed = True
                return
            if tag[0] == b"<ref>":
                pos = self._read_label(tag.start())
            else:
                self.dropped["stray_text"] += 1
                pos = tag.end()

    def _read_label(self, start: int) -> int:
        """Read the label that begins at `start`, and its boxes; return where to continue, -1 for the end."""
        found = _LABEL.match(self.data, start)
        if found is None:
            return self._break_off(start + 1)
        first, pos = start, found.end()
        while box := _BOX.match(self.data, pos):
            self._add_box(box, found.span(1), first, shares_desc=first != start)
            end = _LIST_END.match(self.data, box.end())
            if end:
                if self.objects and self.objects[-1].byte_span[1] == box.end():
                    self.objects[-1].byte_span = (self.objects[-1].byte_span[0], end.end())
                self.end = end.end()
                return end.end()
            comma = _SEPARATOR.match(self.data, box.end())
            assert comma is not None, "the pattern matches the empty string"
            first = pos = comma.end()
            if not comma[1]:
                break
        return self._break_off(pos)

    def _break_off(self, pos: int) -> int:
        """Step over a label or a list that is malformed at `pos`: behind its `</box>`, or to the next `<ref>`."""
        tag = _BREAK.search(self.data, pos)
        if tag is None:
            if pos < len(self.data):
                self.dropped["unfinished"] += 1
            return -1
        if tag[0] == b"<ref>":
            self.dropped["unclosed"] += 1
            return tag.start()
        self.dropped["coord_not_number"] += 1
        self.end = tag.end()
        return tag.end()

    def _add_box(self, box: re.Match[bytes], desc: tuple[int, int], first: int, shares_desc: bool) -> None:
        """Add a box whose own text begins at `first`, unless its content is wrong."""
        numbers = tuple(map(int, box[1].split(b","))) if box[1] else ()
        made: Object | str = "out_of_range"
        if max(numbers, default=0) <= self.form.max_bin:
            made = _checked_object(lambda: self.data[desc[0] : desc[1]].decode(), b"bbox_2d", numbers)
        if isinstance(made, Object):
            is_next = self.end and not self.data[self.end : first].strip(b" \t\r\n,")
            lead = self.end if is_next else first
            self.objects.append(PredObject(made, [], desc, (first, box.end()), lead, shares_desc=shares_desc))
            self._first_digits.append(box.start(1))
        else:
            self.dropped[made] += 1
        self.end = box.end()


def _make_object(desc: bytes, kind: bytes, coords: tuple[int, ...]) -> Object | str:
    """The object, or the reason why it is none."""
    return _checked_object(lambda: json.loads(b'"%b"' % desc) if b"\\" in desc else desc.decode(), kind, coords)


def _checked_object(read_text: Callable[[], str], kind: bytes, coords: tuple[int, ...]) -> Object | str:
    try:
        text = read_text()
        text.encode()  # fails for an escaped half of a surrogate pair
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


def _diagnose(raw: bytes, form: AnswerFormat) -> str:
    """Why a closed object is malformed. Coordinate tokens are read as NaN, which JSON itself does not have."""
    try:
        text = raw.replace(COORD_BYTE, b"NaN").decode()
        pairs = json.loads(text, object_pairs_hook=list, parse_constant=lambda _: NUM_BINS)
    except (ValueError, RecursionError):
        return "bad_json"
    values = dict(pairs)
    if len(values) < len(pairs):
        return "duplicate_key"
    if values.keys() - {form.desc_key, *form.kinds}:
        return "extra_key"
    if any(b'"%b"' % key.encode() not in raw for key in values):
        return "escaped_key"
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
