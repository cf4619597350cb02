"""The two forms of an answer (`RM.answer_format`): what a reader and a writer of answers must know about each. Pure.

`coord_tokens` is the contract's own (TGT-1): one bare token per coordinate, bins 0..999.
`qwen3vl` is how Qwen3-VL grounds as released: plain numbers 0..1000, `label` instead of `desc`, boxes only, and a list,
which the model often puts into a Markdown fence and spreads over lines.

Patterns are of bytes in which a coordinate token is the single byte 0xFF (`utils.parsing`). Their quantifiers are
possessive throughout: nothing is ever tried twice. Reading itself is `parsing`'s business, supervision `targets`'.
"""

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from utils.geometry import Kind, Object

COORD_BYTE = b"\xff"

_WS = rb"[ \t\n\r]*+"
_COMMA = _WS + rb"," + _WS
_STRING = rb'"((?:[^"\\\x00-\x1f\xff]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+)"'
_WRITTEN_STRING = rb'"(?P<text>(?:[^"\\]++|\\.)*+)"'
QUOTED = rb'"(?:[^"\\]++|\\.)*+"'
_FENCE = "```"
_GAP = re.compile(r"\r?\n[ \t]{0,8}")  # a line break and an indent, as layouts have it


class AnswerFormat:
    """How an answer opens, what an object in it looks like, how a coordinate is written, how it closes.

    Attributes:
        name: as in the config.
        opening: what an answer that we write begins with; a model's own may differ in white space, and by a fence.
        desc_key: the key of an object's text.
        kinds: the geometries there are.
        max_bin: coordinates are 0..max_bin of width or height.
        has_coord_tokens: a coordinate is one token of its own; otherwise it is a number in ordinary text.
        prompt: user text for samples that bring none, where the config has none either.
        header: pattern of the opening, up to the first element of the list.
        ends: patterns of the end, from the list's `]` on: without and with a fence.
        object, first, next: pattern of an object; behind white space; behind a comma. Groups: 1 object; 2 text, 3 kind,
            4 coordinates; or, geometry first, 5 kind, 6 coordinates, 7 text.
        structure: what matters inside malformed text: a string, one cut off by the end of the answer, a quote that
            opens none, an escape (an escaped quote opens none either), a `{` behind a comma (and behind a coordinate),
            single brackets.
        written: pattern of an object as `write_object` makes it. Groups: text and coordinates, by those names.
        tail: bytes that a token at the end of an object may hold if it is tokenized anew with what follows.
    """

    def __init__(
        self,
        name: str,
        *,
        opening: str,
        header: bytes,
        ends: tuple[bytes, bytes],
        desc_key: str,
        kinds: tuple["Kind", ...],
        coord: bytes,
        coord_end: bytes,
        written: bytes,
        tail: bytes,
        max_bin: int,
        prompt: str,
    ) -> None:
        self.name, self.opening, self.desc_key, self.kinds = name, opening, desc_key, kinds
        self.max_bin, self.prompt = max_bin, prompt
        self.has_coord_tokens = coord == COORD_BYTE
        text = rb'"' + desc_key.encode() + rb'"' + _WS + rb":" + _WS + _STRING
        coords = rb"\[" + _WS + rb"((?:" + coord + rb"(?:" + _COMMA + coord + rb")*+)?+)" + _WS + rb"\]"
        geometry = rb'"(' + "|".join(kinds).encode() + rb')"' + _WS + rb":" + _WS + coords
        either = text + _COMMA + geometry + rb"|" + geometry + _COMMA + text
        found = rb"(\{" + _WS + rb"(?:" + either + rb")" + _WS + rb"\})"
        self.header = re.compile(_WS + header)
        self.ends = (re.compile(ends[0]), re.compile(ends[1]))
        self.object = re.compile(found)
        self.first = re.compile(_WS + found)
        self.next = re.compile(_COMMA + found)
        self.structure = re.compile(
            QUOTED + rb"(?=" + _WS + rb"(?:[,:}\]]|\Z))"
            rb'|(?P<cut>"(?:[^"\\]++|\\.)*+\\?+\Z)'
            rb'|(?P<quote>")'
            rb"|\\."
            rb"|(?P<coord>" + coord_end + rb")?+" + _COMMA + rb"(?P<next>\{)"
            rb"|[ \t\n\r]++"
            rb"|(?P<mark>[\[\]{},])",
            re.DOTALL,
        )
        self.written = re.compile(written, re.DOTALL)
        self.tail = re.compile(tail)

    def layout(self, opening: str) -> tuple[str, str]:
        """What stands between objects and what closes the answer, for one that opens like this: a model that puts
        objects on lines of their own, or the list into a fence, is gone on with in the same way."""
        if self.has_coord_tokens:
            return ", ", "]}"
        found = self.header.fullmatch(opening.encode())
        gap = found["gap"].decode()
        between = gap if _GAP.fullmatch(gap) else " "
        return "," + between, "\n" * ("\n" in gap) + "]" + f"\n{_FENCE}" * (found["fence"] is not None)

    def write(self, objects: "list[Object]", opening: str | None = None) -> str:
        """The whole answer. Raises as `write_object`."""
        opening = opening or self.opening
        between, closing = self.layout(opening)
        return opening + between.join(map(self.write_object, objects)) + closing

    def write_object(self, obj: "Object") -> str:
        """One object. In its text `<|` is written `\\u003c|`, so that it can never spell a special or coordinate token.

        Raises:
            ValueError: the object could not be read back (blank text, wrong number or range of coordinates, or a
                geometry that this form does not have).
        """
        num_coords = len(obj.coords)
        fits = num_coords == 4 if obj.kind == "bbox_2d" else num_coords >= 6 and num_coords % 2 == 0
        in_range = fits and min(obj.coords) >= 0 and max(obj.coords) <= self.max_bin
        if not obj.desc.strip() or not in_range or obj.kind not in self.kinds:
            shapes = {"bbox_2d": "4 (bbox_2d)", "poly": "6, 8, ... (poly)"}
            counts = " or ".join(shapes[kind] for kind in self.kinds)
            raise ValueError(f"{obj}: an object needs a {self.desc_key} and {counts} bins in 0..{self.max_bin}")
        text = f'"{self.desc_key}": {json_string(obj.desc)}'
        geometry = f'"{obj.kind}": [{", ".join(map(self.write_coord, obj.coords))}]'
        return f"{{{text}, {geometry}}}" if self.has_coord_tokens else f"{{{geometry}, {text}}}"

    def write_coord(self, value: int) -> str:
        """One coordinate."""
        return f"<|coord_{value}|>" if self.has_coord_tokens else str(value)


def json_string(text: str) -> str:
    """A JSON string in plain UTF-8 that spells no special token."""
    return json.dumps(text, ensure_ascii=False).replace("<|", "\\u003c|")


COORD_TOKENS = AnswerFormat(
    "coord_tokens",
    opening='{"objects": [',
    header=rb"\{" + _WS + rb'"objects"' + _WS + rb":" + _WS + rb"\[",
    ends=(rb"\]" + _WS + rb"\}" + _WS + rb"\Z",) * 2,
    desc_key="desc",
    kinds=("bbox_2d", "poly"),
    coord=COORD_BYTE,
    coord_end=COORD_BYTE,
    written=rb'\{"desc": ' + _WRITTEN_STRING,
    tail=rb"[]} \t\r\n]",
    max_bin=999,
    prompt="Find every object in the image.",
)

QWEN3VL = AnswerFormat(
    "qwen3vl",
    opening="[",
    header=rb"(?P<fence>```(?:json)?+" + _WS + rb")?+\[(?P<gap>" + _WS + rb")",
    ends=(rb"\]" + _WS + rb"\Z", rb"\]" + _WS + rb"```" + _WS + rb"\Z"),
    desc_key="label",
    kinds=("bbox_2d",),
    coord=rb"(?:0|[1-9][0-9]{0,3}+)",  # JSON knows no leading zeros
    coord_end=rb"[0-9]",
    written=rb'\{"bbox_2d": \[(?P<coords>[0-9, ]++)\], "label": ' + _WRITTEN_STRING,
    tail=rb'["\]} \t\r\n]',  # `"},` and `"}\n` are single tokens of Qwen's
    max_bin=1000,
    prompt="Locate every object in the image and report bbox coordinates in JSON format, as a list of "
    '{"bbox_2d": [x1, y1, x2, y2], "label": "..."}.',
)

FORMATS = {form.name: form for form in (COORD_TOKENS, QWEN3VL)}
