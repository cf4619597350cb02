"""The forms of an answer (`RM.answer_format`), for reading and for writing. Pure.

`coord_tokens` is the contract's own (TGT-1): one bare token per coordinate, bins 0..999.
`qwen3vl` is how the released Qwen3-VL grounds: plain numbers 0..1000, `label` instead of `desc`, boxes only, in a list
that the model often puts into a Markdown fence and spreads over lines.
`qwen2_5vl` is how the released Qwen2.5-VL grounds: the same, with pixels of the image as its processor resizes it.
`internvl` is how the released InternVL grounds: numbers 0..1000 in tags that may stand anywhere in plain text.

Patterns match bytes in which a coordinate token is the single byte 0xFF (`utils.parsing`). Their quantifiers are
possessive throughout, so nothing is tried twice. `parsing` does the reading, `targets` the supervision.
"""

import json
import re
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
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
# Tokenizers that compose characters (NFC) would make one of an accent and the letter that an escape ends with.
_ACCENTED_ESCAPE = re.compile(r"(\\(?:u[0-9a-f]{4}|[^u]))([\u0300-\u036f]+)")
_GAP = re.compile(r"\r?\n[ \t]{0,8}")  # a line break and an indent


@dataclass(eq=False)
class AnswerFormat:
    """The grammar of an answer: its opening, objects, coordinates and closing."""

    name: str  # as in the config
    opening: str  # the start of an answer that we write; a model's own may differ in white space, and by a fence
    header: re.Pattern[bytes]  # the opening, up to the first element of the list
    ends: tuple[re.Pattern[bytes], re.Pattern[bytes]]  # the end, from the list's `]` on: without and with a fence
    desc_key: str  # the key of an object's text
    kinds: tuple["Kind", ...]  # the geometries there are
    coord: bytes  # pattern of a coordinate
    coord_end: bytes  # pattern of its last byte
    written: re.Pattern[bytes]  # an object as `write_object` makes it; groups `text` and, for numbers, `coords`
    tail: re.Pattern[bytes]  # bytes a token at an object's end may hold if it is tokenized anew with what follows
    max_bin: int  # coordinates are 0..max_bin of width or height; in pixels, the largest that is read
    prompt: str  # user text where neither the sample nor the config has one
    in_pixels: bool = False  # coordinates are pixels of the resized image
    tags: tuple[str, ...] = ()  # words of the form that may be special tokens; no label holds one

    def __post_init__(self) -> None:
        """Compile the patterns of an object: alone, after white space (`first`) and after a comma (`next`).

        Groups: 1 object; 2 text, 3 kind, 4 coordinates; or, geometry first, 5 kind, 6 coordinates, 7 text.
        """
        text = rb'"' + self.desc_key.encode() + rb'"' + _WS + rb":" + _WS + _STRING
        coords = rb"\[" + _WS + rb"((?:" + self.coord + rb"(?:" + _COMMA + self.coord + rb")*+)?+)" + _WS + rb"\]"
        geometry = rb'"(' + "|".join(self.kinds).encode() + rb')"' + _WS + rb":" + _WS + coords
        either = text + _COMMA + geometry + rb"|" + geometry + _COMMA + text
        found = rb"(\{" + _WS + rb"(?:" + either + rb")" + _WS + rb"\})"
        self.object = re.compile(found)
        self.first = re.compile(_WS + found)
        self.next = re.compile(_COMMA + found)

    @cached_property
    def structure(self) -> re.Pattern[bytes]:
        """Pattern of what matters inside malformed text: a string, one cut off by the end of the answer, a quote that
        opens none, an escape (an escaped quote opens none either), a `{` after a comma (and after a coordinate), single
        brackets."""
        return re.compile(
            QUOTED + rb"(?=" + _WS + rb"(?:[,:}\]]|\Z))"
            rb'|(?P<cut>"(?:[^"\\]++|\\.)*+\\?+\Z)'
            rb'|(?P<quote>")'
            rb"|\\."
            rb"|(?P<coord>" + self.coord_end + rb")?+" + _COMMA + rb"(?P<next>\{)"
            rb"|[ \t\n\r]++"
            rb"|(?P<mark>[\[\]{},])",
            re.DOTALL,
        )

    @property
    def has_coord_tokens(self) -> bool:
        """A coordinate is one token of its own; otherwise it is a number in ordinary text."""
        return self.coord == COORD_BYTE

    def layout(self, opening: str) -> tuple[str, str]:
        """The text between objects and the text that closes an answer with this opening: a model that puts objects on
        lines of their own, or the list into a fence, is continued in the same layout."""
        if self.has_coord_tokens:
            return ", ", "]}"
        found = self.header.fullmatch(opening.encode())
        assert found is not None, f"{opening!r} opens no answer"
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
        self._check(obj)
        text = f'"{self.desc_key}": "{self.spelled(obj.desc)}"'
        coords = (f"<|coord_{value}|>" if self.has_coord_tokens else str(value) for value in obj.coords)
        geometry = f'"{obj.kind}": [{", ".join(coords)}]'
        return f"{{{text}, {geometry}}}" if self.has_coord_tokens else f"{{{geometry}, {text}}}"

    def spelled(self, desc: str) -> str:
        """A label as it stands in an answer: a JSON string without its quotes, which spells no special token."""
        return _json_text(desc)

    def completion(self, prefix: bytes) -> str:
        """What an answer that ends behind an object lacks before another one can follow, or the closing."""
        return ""

    def _check(self, obj: "Object") -> None:
        num_coords = len(obj.coords)
        fits = num_coords == 4 if obj.kind == "bbox_2d" else num_coords >= 6 and num_coords % 2 == 0
        in_range = fits and min(obj.coords) >= 0 and max(obj.coords) <= self.max_bin
        if not obj.desc.strip() or not in_range or obj.kind not in self.kinds:
            shapes = {"bbox_2d": "4 (bbox_2d)", "poly": "6, 8, ... (poly)"}
            counts = " or ".join(shapes[kind] for kind in self.kinds)
            raise ValueError(f"{obj}: an object needs a {self.desc_key} and {counts} bins in 0..{self.max_bin}")


@lru_cache(maxsize=1 << 14)  # the same few labels occur in every answer
def _json_text(text: str) -> str:
    written = json.dumps(text, ensure_ascii=False)[1:-1].replace("<|", "\\u003c|")
    return _ACCENTED_ESCAPE.sub(lambda found: found[1] + json.dumps(found[2])[1:-1], written)


class RefBoxFormat(AnswerFormat):
    """Labels and boxes in tags: `<ref>dog</ref><box>[[1, 2, 3, 4], [5, 6, 7, 8]]</box>` are two dogs.

    Text without tags may stand before, between and behind them. Nothing closes an answer: it may end behind any
    `</box>`. Objects that we write have tags of their own.
    """

    def __post_init__(self) -> None:
        pass

    def layout(self, opening: str) -> tuple[str, str]:
        return "\n", ""

    def write_object(self, obj: "Object") -> str:
        self._check(obj)
        if any(tag in obj.desc for tag in self.tags):
            raise ValueError(f"{obj}: the label holds one of {', '.join(self.tags)}")
        return f"<ref>{obj.desc}</ref><box>[[{', '.join(map(str, obj.coords))}]]</box>"

    def spelled(self, desc: str) -> str:
        return desc

    def completion(self, prefix: bytes) -> str:
        return "]</box>" if prefix.rfind(b"<box>") > prefix.rfind(b"</box>") else ""


COORD_TOKENS = AnswerFormat(
    name="coord_tokens",
    opening='{"objects": [',
    header=re.compile(_WS + rb"\{" + _WS + rb'"objects"' + _WS + rb":" + _WS + rb"\["),
    ends=(re.compile(rb"\]" + _WS + rb"\}" + _WS + rb"\Z"),) * 2,
    desc_key="desc",
    kinds=("bbox_2d", "poly"),
    coord=COORD_BYTE,
    coord_end=COORD_BYTE,
    written=re.compile(rb'\{"desc": ' + _WRITTEN_STRING, re.DOTALL),
    tail=re.compile(rb"[]} \t\r\n]"),
    max_bin=999,
    prompt="Find every object in the image.",
)

QWEN3VL = AnswerFormat(
    name="qwen3vl",
    opening="[",
    # White space before the `]` of an empty list belongs to the closing: as an opening it would be closed once more.
    header=re.compile(_WS + rb"(?P<fence>```(?:json)?+" + _WS + rb")?+\[(?P<gap>" + _WS + rb"(?!\])|)"),
    ends=(re.compile(rb"\]" + _WS + rb"\Z"), re.compile(rb"\]" + _WS + rb"```" + _WS + rb"\Z")),
    desc_key="label",
    kinds=("bbox_2d",),
    coord=rb"(?:0|[1-9][0-9]{0,3}+)",  # JSON has no leading zeros
    coord_end=rb"[0-9]",
    written=re.compile(rb'\{"bbox_2d": \[(?P<coords>[0-9, ]++)\], "label": ' + _WRITTEN_STRING, re.DOTALL),
    tail=re.compile(rb'["\]} \t\r\n]'),  # `"},` and `"}\n` are single tokens of Qwen's
    max_bin=1000,
    prompt="Locate every object in the image and report bbox coordinates in JSON format, as a list of "
    '{"bbox_2d": [x1, y1, x2, y2], "label": "..."}.',
)

QWEN2_5VL = replace(QWEN3VL, name="qwen2_5vl", max_bin=9999, in_pixels=True)

INTERNVL = RefBoxFormat(
    name="internvl",
    opening="",
    header=re.compile(rb"(?:(?!</?(?:ref|box)>).)*+", re.DOTALL),
    ends=(re.compile(rb"\Z"),) * 2,
    desc_key="label",
    kinds=("bbox_2d",),
    coord=QWEN3VL.coord,
    coord_end=QWEN3VL.coord_end,
    written=re.compile(rb"<ref>(?P<text>(?:(?!</ref>).)*+)</ref><box>\[\[(?P<coords>[0-9, ]++)\]\]</box>", re.DOTALL),
    tail=re.compile(rb"[]<>/box \t\r\n]"),  # also where the tags are plain text
    max_bin=1000,
    prompt="Please detect and label all objects in the following image and mark their positions.",
    tags=("<ref>", "</ref>", "<box>", "</box>"),
)

FORMATS = {form.name: form for form in (COORD_TOKENS, QWEN3VL, QWEN2_5VL, INTERNVL)}
