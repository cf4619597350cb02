"""utils.parsing on real token ids of two tokenizers that fuse brackets and text (TGT-1 to TGT-3)."""

import json
import random
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.answers import DESCS, make_table, make_tokenizer, random_object
from utils.geometry import Object
from utils.parsing import DROP_REASONS, ParsedAnswer, parse_answer
from utils.targets import format_objects
from utils.token_table import TokenTable

KINDS = ["qwen", "whole"]
BOX = "[<|coord_1|>, <|coord_2|>, <|coord_3|>, <|coord_4|>]"
GOOD = f'{{"desc": "red circle", "bbox_2d": {BOX}}}'
GOOD_OBJECT = Object("red circle", "bbox_2d", (1, 2, 3, 4))

wild_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)
bins = st.integers(0, 999)
boxes = st.tuples(bins, bins, bins, bins).map(lambda c: (*map(min, c[:2], c[2:]), *map(max, c[:2], c[2:])))
polygons = st.integers(3, 5).flatmap(lambda n: st.tuples(*[bins] * (2 * n)))
wild_objects = st.one_of(
    st.builds(Object, wild_text, st.just("bbox_2d"), boxes), st.builds(Object, wild_text, st.just("poly"), polygons)
)


def text_of(ids: list[int], table: TokenTable) -> bytes:
    return b"".join(table.bytes_of[token] for token in ids)


def parse_text(text: str, kind: str = "qwen") -> ParsedAnswer:
    table = make_table(kind)
    return parse_answer(table.encode(text), table)


def wrap(*objects: str) -> str:
    return '{"objects": [' + ", ".join(objects) + "]}"


def tokens_of(span: tuple[int, int], parsed: ParsedAnswer) -> tuple[int, int]:
    """`[start, end)` of the tokens that hold a byte of the span."""
    start, end = np.searchsorted(parsed.prefix_ends, [span[0], span[1] - 1], side="right").tolist()
    return start, end + 1


def check_alignment(parsed: ParsedAnswer, table: TokenTable) -> None:
    """Every index of a parsed answer says what it should."""
    ids = parsed.prefix_ids
    for pred in parsed.objects:
        assert tuple(table.coord_bin[np.array(ids)[pred.coord_index]].tolist()) == pred.object.coords
        raw = parsed.prefix_bytes[slice(*pred.desc_bytes)]
        assert json.loads(b'"' + raw + b'"') == pred.object.desc
        written = parsed.prefix_bytes[slice(*pred.byte_span)]
        coord_text = iter(f"<|coord_{c}|>".encode() for c in pred.object.coords)
        written = re.sub(rb"\xff", lambda _: next(coord_text), written)  # noqa: B023
        first, last = pred.desc_bytes
        for span, text in [((first, last + 1), raw + b'"'), (pred.byte_span, written)]:
            start, end = tokens_of(span, parsed)  # the fewest tokens that hold the text
            assert text in text_of(ids[start:end], table)
            fewer = [text_of(ids[start + 1 : end], table), text_of(ids[start : end - 1], table)]
            assert len(text) < 6 or not any(text in part for part in fewer)  # a short desc may stand elsewhere too


# ---------------------------------------------------------------------------------------------------------------------
# The token table
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_tgt_2_bytes_of_every_token(kind: str) -> None:
    """TGT-2: bytes as the tokenizer itself decodes them, coordinate tokens found by bin."""
    tokenizer, table = make_tokenizer(kind), make_table(kind)
    for token in range(len(tokenizer)):
        decoded = tokenizer.decode([token], skip_special_tokens=False)
        assert table.bytes_of[token].decode(errors="replace") == decoded
    assert table.coord_bin[table.coord_ids].tolist() == list(range(1000))
    assert (table.coord_bin >= 0).sum() == 1000
    assert table.bytes_of[table.coord_ids[7]] == b"<|coord_7|>"
    assert {table.bytes_of[token] for token in table.stop_ids} == {b"<|im_end|>", b"<|endoftext|>", b"<|image_pad|>"}
    assert table.bytes_of[table.eos_id] == b"<|im_end|>"


@pytest.mark.parametrize("kind", KINDS)
def test_tgt_5_encode_equals_the_tokenizer(kind: str) -> None:
    """TGT-5: text with coordinate tokens becomes the very ids the tokenizer gives."""
    tokenizer, table = make_tokenizer(kind), make_table(kind)
    rng = random.Random(0)
    for _ in range(50):
        text = format_objects([random_object(rng) for _ in range(rng.randint(0, 4))])
        assert table.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    assert table.encode("<|coord_1000|><|coord_07|>") == tokenizer.encode("<|coord_1000|><|coord_07|>")


def test_tgt_2_missing_coordinate_tokens_are_named() -> None:
    """TGT-2."""
    tokenizer = make_tokenizer("qwen")
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str().replace("<|coord_5|>", "<|other_5|>"))
    with pytest.raises(ValueError, match=r"lacks 1 of 1000 .*<\|coord_5\|>.*add_coord_tokens"):
        TokenTable.from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>"))


def test_tgt_2_other_vocabularies_are_refused() -> None:
    """TGT-2: a SentencePiece-like vocabulary, and one without all single bytes."""
    for vocab, message in [({"▁a": 0, "b": 1}, "byte-level"), ({"a": 0, "b": 1}, "only 2 of 256")]:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, [])), eos_token="<|im_end|>")
        tokenizer.add_tokens([f"<|coord_{k}|>" for k in range(1000)])
        with pytest.raises(ValueError, match=message):
            TokenTable.from_tokenizer(tokenizer)


def test_tgt_3_spell_uses_the_fewest_tokens() -> None:
    """TGT-3: against a breadth-first search; exact for any bytes."""
    table = make_table("whole")
    rng = random.Random(1)
    ordinary = {text for token, text in enumerate(table.bytes_of) if text in table._id_of and token < 600}
    for _ in range(300):
        text = table.bytes_of[rng.choice(table.encode(format_objects([random_object(rng)])))]
        data = text[: rng.randint(1, len(text))]
        ids = table.spell(data)
        assert text_of(ids, table) == data
        reach, steps = {0}, 0  # how far so many tokens can get
        while len(data) not in reach:
            reach = {j for i in reach for j in range(i + 1, len(data) + 1) if data[i:j] in ordinary}
            steps += 1
        assert len(ids) == steps
    assert text_of(table.spell(bytes(range(256))), table) == bytes(range(256))
    assert [table.bytes_of[token] for token in table.spell(b"]}")] == [b"]}"]


@pytest.mark.parametrize("size", [151_936])
def test_tgt_2_table_of_a_full_vocabulary_is_built_quickly(size: int) -> None:
    """TGT-2: 151,936 entries in well under a second of processor time (3 asked for, noise aside)."""
    backend = make_tokenizer("qwen").backend_tokenizer
    vocab = backend.get_vocab(with_added_tokens=False)
    alphabet = [token for token in vocab if len(token) == 1]
    rng = random.Random(0)
    while len(vocab) < size - 1100:
        vocab.setdefault("".join(rng.choices(alphabet, k=rng.randint(3, 9))), len(vocab))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, [])), eos_token="<|im_end|>")
    tokenizer.add_tokens([f"<|coord_{k}|>" for k in range(1000)])
    start = time.process_time()
    TokenTable.from_tokenizer(tokenizer)
    assert time.process_time() - start < 3.0


# ---------------------------------------------------------------------------------------------------------------------
# Well-formed answers
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(objects=st.lists(wild_objects, max_size=4))
def test_tgt_1_what_is_written_is_read(kind: str, objects: list[Object]) -> None:
    """TGT-1, TGT-2: any desc (quotes, backslashes, control characters, any script) comes back, with its tokens."""
    table = make_table(kind)
    ids = table.encode(format_objects(objects))
    parsed = parse_answer([*ids, table.eos_id, 3, 4], table)
    assert parsed.pred_objects == objects
    assert parsed.closed and not parsed.dropped
    check_alignment(parsed, table)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(objects=st.lists(wild_objects, min_size=1, max_size=3), data=st.data())
def test_tgt_1_any_json_layout_is_read(kind: str, objects: list[Object], data: st.DataObject) -> None:
    """TGT-1: white space anywhere between JSON tokens, keys in either order, any escapes."""
    table = make_table(kind)

    def gap() -> str:
        return data.draw(st.text(" \t\r\n", max_size=2))

    def member(obj: Object, key: str) -> str:
        value = json.dumps(obj.desc).replace("<|", "\\u003c|")
        if key != "desc":
            coords = (gap() + "," + gap()).join(f"<|coord_{c}|>" for c in obj.coords)
            value = f"[{gap()}{coords}{gap()}]"
        return f'"{key}"{gap()}:{gap()}{value}'

    written = []
    for obj in objects:
        keys = ["desc", obj.kind] if data.draw(st.booleans()) else [obj.kind, "desc"]
        written.append("{" + gap() + f"{gap()},{gap()}".join(member(obj, key) for key in keys) + gap() + "}")
    text = f'{gap()}{{{gap()}"objects"{gap()}:{gap()}[{gap()}{f"{gap()},{gap()}".join(written)}{gap()}]{gap()}}}{gap()}'
    parsed = parse_answer(table.encode(text), table)
    assert parsed.pred_objects == objects
    assert parsed.closed and not parsed.dropped
    check_alignment(parsed, table)


def test_tgt_2_characters_split_over_tokens() -> None:
    """TGT-2: a character of four bytes is four tokens here; the desc holds them all, then comes the closing quote."""
    table = make_table("qwen")
    parsed = parse_text(wrap(f'{{"desc": "\U0001f98a", "bbox_2d": {BOX}}}'))
    (pred,) = parsed.objects
    assert pred.object.desc == "\U0001f98a"
    first, last = pred.desc_bytes
    tokens = [table.bytes_of[token] for token in parsed.prefix_ids[slice(*tokens_of((first, last + 1), parsed))]]
    assert len(tokens) == 5 and b"".join(tokens[:4]).decode() == "\U0001f98a" and tokens[4].startswith(b'"')


def test_tgt_3_fused_closing_is_respelled() -> None:
    """TGT-3: `]}]}` is one token; the prefix keeps its `]}` as the fewest tokens and every id before it."""
    table = make_table("qwen")
    ids = table.encode(wrap(GOOD))
    assert table.bytes_of[ids[-1]] == b"]}]}"
    parsed = parse_answer(ids, table)
    assert parsed.respelled and parsed.prefix_ids[:-1] == ids[:-1]
    assert table.bytes_of[parsed.prefix_ids[-1]] == b"]}"


def test_tgt_3_no_usable_prefix() -> None:
    """TGT-3: no brace, no object, only an unfinished one: the prefix is the bare header."""
    table = make_table("qwen")
    for text in [
        "",
        "no idea",
        '{"objects": [',
        '{"objects": []}',
        wrap(GOOD)[:-20],
        f"[{GOOD}]",
        f'{{"items": [{GOOD}]}}',
    ]:
        parsed = parse_text(text)
        assert text_of(parsed.prefix_ids, table) == b'{"objects": ['
        assert parsed.objects == [] and parsed.closed == (text == '{"objects": []}')


def test_tgt_3_special_tokens_end_the_answer() -> None:
    """TGT-3: a stop token, any other special token and an id without text; coordinate and plain added tokens do not."""
    table = make_table("qwen")
    one, two = table.encode(wrap(GOOD)[:-2]), table.encode(f", {GOOD}]}}")
    for token in [*table.stop_ids, len(table.bytes_of), -1]:
        assert parse_answer([*one, token, *two], table).pred_objects == [GOOD_OBJECT]
    assert parse_answer([*one, *two], table).pred_objects == [GOOD_OBJECT] * 2
    tool = make_tokenizer("qwen").convert_tokens_to_ids("<tool_call>")
    start = table.encode('{"objects": [{"desc": "')
    end = table.encode(f'", "bbox_2d": {BOX}}}]}}')
    assert parse_answer([*start, tool, *end], table).pred_objects == [Object("<tool_call>", "bbox_2d", (1, 2, 3, 4))]


@pytest.mark.parametrize("kind", KINDS)
def test_tgt_3_cut_at_every_token(kind: str) -> None:
    """TGT-3: rollouts that end anywhere keep exactly the objects whose last byte is there, and all ids but one."""
    table = make_table(kind)
    rng = random.Random(4)
    for _ in range(6):
        objects = [random_object(rng) for _ in range(4)]
        ids = table.encode(format_objects(objects))
        for length in range(len(ids) + 1):
            parsed = parse_answer(ids[:length], table)
            seen = text_of(ids[:length], table).decode(errors="ignore")
            complete = [n for n in range(1, 5) if seen.startswith(format_objects(objects[:n])[:-2])]
            num_complete = max(complete, default=0)
            assert parsed.pred_objects == objects[:num_complete]
            assert parsed.closed == (length == len(ids))
            if not num_complete:
                continue
            assert text_of(parsed.prefix_ids, table).decode() == format_objects(objects[:num_complete])[:-2]
            same = next((i for i, (a, b) in enumerate(zip(parsed.prefix_ids, ids, strict=False)) if a != b), None)
            if parsed.respelled:
                assert same is not None
                kept = text_of(parsed.prefix_ids[same:], table)
                assert table.bytes_of[ids[same]].startswith(kept) and len(kept) < len(table.bytes_of[ids[same]])
            else:
                assert same is None and parsed.prefix_ids == ids[: len(parsed.prefix_ids)]
            check_alignment(parsed, table)


# ---------------------------------------------------------------------------------------------------------------------
# Malformed answers
# ---------------------------------------------------------------------------------------------------------------------

MALFORMED = {
    "duplicate_key": ['{"desc": "a", "desc": "b", "bbox_2d": BOX}', '{"desc": "a", "bbox_2d": BOX, "bbox_2d": BOX}'],
    "extra_key": ['{"desc": "a", "bbox_2d": BOX, "score": 1}', '{"desc": "a", "bbox_2d": BOX, "x": {"y": [{}, {}]}}'],
    "missing_desc": ['{"bbox_2d": BOX}', "{}"],
    "empty_desc": ['{"desc": "", "bbox_2d": BOX}', '{"desc": " \\n", "bbox_2d": BOX}'],
    "bad_desc": [
        '{"desc": 5, "bbox_2d": BOX}',
        '{"desc": "a <|coord_5|>", "bbox_2d": BOX}',
        r'{"desc": "\ud800", "bbox_2d": BOX}',
    ],
    "missing_geometry": ['{"desc": "a"}'],
    "two_geometries": ['{"desc": "a", "bbox_2d": BOX, "poly": BOX}'],
    "coord_not_token": [
        '{"desc": "a", "bbox_2d": [1, 2, 3, 4]}',
        '{"desc": "a", "bbox_2d": ["<|coord_1|>", "<|coord_1|>", 3, 4]}',
        '{"desc": "a", "bbox_2d": [BOX]}',
        '{"desc": "a", "bbox_2d": null}',
        '{"desc": "a", "bbox_2d": "BOX"}',
        '{"desc": "a", "poly": <|coord_1|>}',
    ],
    "wrong_count": [
        '{"desc": "a", "bbox_2d": []}',
        '{"desc": "a", "bbox_2d": [<|coord_1|>, <|coord_2|>]}',
        '{"desc": "a", "poly": BOX}',
        '{"desc": "a", "poly": [' + "<|coord_1|>, " * 6 + "<|coord_1|>]}",
    ],
    "reversed_box": [
        '{"desc": "a", "bbox_2d": [<|coord_3|>, <|coord_2|>, <|coord_1|>, <|coord_4|>]}',
        '{"desc": "a", "bbox_2d": [<|coord_1|>, <|coord_4|>, <|coord_3|>, <|coord_2|>]}',
    ],
    "escaped_key": [r'{"d\u0065sc": "a", "bbox_2d": BOX}', r'{"desc": "a", "bbox\u005f2d": BOX}'],
    "bad_json": [
        '{"desc": "a" "bbox_2d": BOX}',
        '{"desc": "a", "bbox_2d": BOX,}',
        '{"desc": "a", bbox_2d: BOX}',
        "{'desc': 'a', 'bbox_2d': BOX}",
        '{"desc": "a\\x", "bbox_2d": BOX}',
        '{"desc": "a\n", "bbox_2d": BOX}',
        '{"desc": "a", "bbox_2d": [<|coord_1|><|coord_2|>, <|coord_3|>, <|coord_4|>]}',
        '{"desc": "a", "bbox_2d": [0<|coord_1|>, <|coord_2|>, <|coord_3|>, <|coord_4|>]}',
        '{"desc": "a", "bbox_2d": [<|coord_1|>, <|coord_2|>, <|coord_3|>, <|coord_4|>}',
        '{"desc": "a", "bbox_2d": <|coord_1|>, <|coord_2|>, <|coord_3|>, <|coord_4|>]}',
        '{"desc": "a", "bbox_2d": BOX]}',
        '{"desc": "a "big" car", "bbox_2d": BOX}',
        '{"desc": "a, "bbox_2d": BOX}',
        '{"desc": a", "bbox_2d": BOX}',
        "{" + '"a": [' * 3000 + "]" * 3000 + "}",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("reason", "bad"), [(r, bad) for r, texts in MALFORMED.items() for bad in texts])
def test_tgt_2_malformed_object_is_counted_and_harms_no_other(kind: str, reason: str, bad: str) -> None:
    """TGT-2: before, between and behind valid objects; closed, it stays in the prefix, as the last one too."""
    table = make_table(kind)
    bad = bad.replace("BOX", BOX)
    parsed = parse_text(wrap(GOOD, bad, GOOD, bad), kind)
    assert parsed.dropped == {reason: 2} and reason in DROP_REASONS
    assert parsed.pred_objects == [GOOD_OBJECT] * 2 and parsed.closed
    assert text_of(parsed.prefix_ids, table).decode() == wrap(GOOD, bad, GOOD, bad)[:-2]
    check_alignment(parsed, table)
    alone = parse_text(wrap(bad), kind)
    assert alone.dropped == {reason: 1} and not alone.objects
    assert text_of(alone.prefix_ids, table).decode() == wrap(bad)[:-2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "bad",
    [
        '{"desc": "a", "bbox_2d": ' + BOX,
        '{"desc": "a, "bbox_2d": ' + BOX,
        '{"desc": "a", "bbox_2d": ' + BOX[:-1],
        '{"desc": "a", "bbox_2d": [<|coord_1|>, <|coord_2|>',
        '{"desc": "a", "bbox_2d": [<|coord_1|>, <|coord_2|>,',
        '{"desc": "a", "bbox_2d": [',
        '{"desc": "a"',
        '{"desc": "a", "more": {"x": 1}',
        "{",
    ],
)
def test_tgt_2_unclosed_object_harms_no_other(kind: str, bad: str) -> None:
    """TGT-2: a `, {` that cannot stand inside an object begins the next one; at the end, an unclosed one is cut."""
    table = make_table(kind)
    parsed = parse_text(wrap(GOOD, bad, GOOD), kind)
    assert parsed.pred_objects == [GOOD_OBJECT] * 2
    assert parsed.dropped == {"unclosed": 1}
    # where a list is open, the `]}` of the answer would close the object
    last = parse_text(wrap(GOOD, bad)[: None if "]" in bad else -2], kind)
    assert last.pred_objects == [GOOD_OBJECT] and last.dropped == {"unfinished": 1} and not last.closed
    assert text_of(last.prefix_ids, table).decode() == wrap(GOOD)[:-2]


@pytest.mark.parametrize(
    "middle", [" ", ",, ", ", and ", " and ", ', "a", ', ", 5, ", "}, ", f", [{GOOD}], ", f", {BOX}, "]
)
def test_tgt_2_stray_text_between_objects(middle: str) -> None:
    """TGT-2: what is no object is counted once; nested lists are not searched; the next object is valid."""
    parsed = parse_text('{"objects": [' + GOOD + middle + GOOD + "]}")
    assert parsed.pred_objects == [GOOD_OBJECT] * 2 and parsed.dropped == {"stray_text": 1} and parsed.closed
    check_alignment(parsed, make_table("qwen"))


def test_tgt_2_stray_text_behind_the_last_object_goes() -> None:
    """TGT-2."""
    table = make_table("qwen")
    for tail in [", and so on", "}", " ]", ", ]}", "], ", f"]}}, {GOOD}", f"], {GOOD}]}}", '], "more": 1}']:
        parsed = parse_text('{"objects": [' + GOOD + tail)
        assert parsed.pred_objects == [GOOD_OBJECT] and not parsed.closed
        assert text_of(parsed.prefix_ids, table).decode() == wrap(GOOD)[:-2]


@pytest.mark.parametrize(
    "bad", [f'{{"desc": "a", "bbox_2d": {BOX}"}}', f'{{"desc": "a", "bbox_2d": "{BOX}}}', '{"desc": "a}']
)
def test_tgt_2_forgotten_quote_harms_no_other(bad: str) -> None:
    """TGT-2: where the stray quote is only known by what follows, the object is dropped but never ends the prefix."""
    parsed = parse_text(wrap(GOOD, bad, GOOD))
    assert parsed.pred_objects == [GOOD_OBJECT] * 2 and parsed.dropped == {"bad_json": 1}
    assert text_of(parse_text(wrap(GOOD, bad)).prefix_ids, make_table("qwen")).decode() == wrap(GOOD)[:-2]


def test_tgt_3_an_object_that_only_later_text_closes_does_not_end_the_prefix() -> None:
    """TGT-3: the quote before `}` opens no string only because of the quote in the text after the object. Behind such
    an object, other text may follow in training, so it is cut off, unless a complete object comes after it."""
    table, bad = make_table("qwen"), GOOD[:-1] + '"}'
    tail = ', {"desc": "x'
    for kept, answer in (([GOOD], [GOOD, bad]), ([GOOD, bad, GOOD], [GOOD, bad, GOOD])):
        parsed = parse_text(wrap(*answer)[:-2] + tail)
        assert text_of(parsed.prefix_ids, table).decode() == wrap(*kept)[:-2]
        assert parsed.pred_objects == [GOOD_OBJECT] * kept.count(GOOD)
        assert parsed.dropped == {"bad_json": 1, "unfinished": 1}
        again = parse_answer([*parsed.prefix_ids, *table.encode(f", {GOOD}]}}")], table)  # whatever is appended
        assert again.pred_objects == [*parsed.pred_objects, GOOD_OBJECT]


def test_tgt_2_nested_objects_are_not_objects() -> None:
    """TGT-2: a well-formed object inside a malformed one does not count, in a list neither."""
    for bad in [f'{{"desc": "a", "part": {GOOD}}}', f'{{"desc": "a", "parts": [{GOOD}, {GOOD}]}}']:
        parsed = parse_text(wrap(bad, GOOD))
        assert parsed.pred_objects == [GOOD_OBJECT] and parsed.dropped == {"extra_key": 1}


@pytest.mark.parametrize(
    "list_of", ['[<|coord_5|>, {"a": 1}]', f"[<|coord_5|>, {GOOD}, {GOOD}]", '[[<|coord_5|>, {"a": []}]]']
)
def test_tgt_2_an_object_in_a_list_after_a_coordinate_is_not_an_object_if_brackets_are_balanced(list_of: str) -> None:
    """TGT-2: a balanced reading comes before the one that takes `, {` after a coordinate for the next object."""
    bad = f'{{"desc": "a", "extra": {list_of}, "bbox_2d": {BOX}}}'
    for objects, num_good in ([bad, *[GOOD] * 5], 5), ([GOOD, bad], 1), ([GOOD, bad, bad, GOOD], 2):
        parsed = parse_text(wrap(*objects))
        assert parsed.pred_objects == [GOOD_OBJECT] * num_good and parsed.closed
        assert parsed.dropped == {"extra_key": objects.count(bad)}


@pytest.mark.parametrize("end", ["", "]", "}", "]}}", '], "x": 1', "]} {", "]}x", "]},"])
def test_tgt_2_without_balance_an_object_after_a_coordinate_is_the_next_one(end: str) -> None:
    """TGT-2: nor is a reading balanced that neither another object nor the end of the answer follows."""
    parsed = parse_text(f'{{"objects": [{{"desc": "a", "bbox_2d": [<|coord_1|>, {GOOD}, {GOOD}{end}')
    assert parsed.pred_objects == [GOOD_OBJECT] * 2 and parsed.dropped["unclosed"] == 1


def test_tgt_2_spelled_coordinates_are_not_coordinate_tokens() -> None:
    """TGT-2: the text `<|coord_1|>` out of ordinary tokens, and a 0xFF byte, are no coordinates."""
    table = make_table("qwen")
    for text in (b"<|coord_1|>", b"\xff"):
        head = table.encode('{"objects": [{"desc": "a", "bbox_2d": [')
        tail = table.encode(", <|coord_2|>, <|coord_3|>, <|coord_4|>]}, " + GOOD + "]}")
        parsed = parse_answer([*head, *table.spell(text), *tail], table)
        assert parsed.pred_objects == [GOOD_OBJECT] and parsed.dropped == {"bad_json": 1}


def test_tgt_2_invalid_utf8_in_a_desc() -> None:
    """TGT-2."""
    table = make_table("qwen")
    ids = [
        *table.encode('{"objects": [{"desc": "a'),
        *table.spell(b"\xe7"),
        *table.encode(f'", "bbox_2d": {BOX}}}, {GOOD}]}}'),
    ]
    parsed = parse_answer(ids, table)
    assert parsed.pred_objects == [GOOD_OBJECT] and parsed.dropped == {"bad_desc": 1}


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(-2, 1400), max_size=60), header=st.booleans())
def test_tgt_2_random_tokens_never_raise(ids: list[int], header: bool) -> None:
    """TGT-2: any ids at all, behind a proper header or not."""
    table = make_table("qwen")
    check_alignment(parse_answer(table.encode('{"objects": [') * header + ids, table), table)


# ---------------------------------------------------------------------------------------------------------------------
# Speed
# ---------------------------------------------------------------------------------------------------------------------


def process_seconds(ids: list[int], table: TokenTable, repeats: int = 5) -> float:
    def once() -> float:
        start = time.process_time()
        parse_answer(ids, table)
        return time.process_time() - start

    return min(once() for _ in range(repeats))


def long_answer(num_tokens: int, table: TokenTable) -> list[int]:
    rng = random.Random(0)
    objects = [random_object(rng, DESCS) for _ in range(num_tokens // 20)]
    return table.encode(format_objects(objects))[:num_tokens]


@pytest.mark.parametrize(
    "text",
    [
        '{"desc": "a" x, "bbox_2d": ' + " " * 200_000,
        '{"desc": "' + '\\"' * 100_000,
        '{"desc": "' + '\\"' * 100_000 + BOX,
        "[" * 100_000 + "}" * 100_000,
        "{" * 100_000 + "]" * 100_000,
        "{" * 50_000 + "}" * 50_000 + '{"' * 50_000,
        ", " * 100_000,
        "{ " * 50_000 + ',{"' * 50_000,
        '{"desc": "a", "bbox_2d": [' + "<|coord_1|>, " * 16_000,
        '{"desc": "a", "x": ' * 20_000,
        '{" }, ' * 30_000 + BOX,
    ],
    ids=lambda text: text[:14] + "..",
)
def test_tgt_2_time_is_linear_for_any_garbage(text: str) -> None:
    """TGT-2: inputs that make backtracking or rescanning quadratic: twice the text takes about twice the time."""
    table = make_table("whole")
    ids = table.encode('{"objects": [' + text)
    assert process_seconds(ids, table, repeats=1) < 2.0


def scan_per_token(ids: list[int], kind: str) -> int:
    """What a plain scanner does at the least: decode each token and walk through its characters. Counts the objects."""
    tokenizer, is_coord = make_tokenizer(kind), set(make_table(kind).coord_ids.tolist())
    depth, in_string, escaped, num_objects = 0, False, False, 0
    for token in ids:
        text = tokenizer.decode([token])
        if token in is_coord:
            continue
        for char in text:
            if in_string:
                in_string, escaped = char != '"' or escaped, char == "\\" and not escaped
            elif char == '"':
                in_string = True
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
                num_objects += char == "}" and depth == 2
    return num_objects


def test_tgt_2_long_answers_are_parsed_many_times_faster_than_token_by_token() -> None:
    """TGT-2: 16k tokens; a scanner that decodes every token takes about 15 times as long (5 asked for, noise aside)."""
    table = make_table("qwen")
    ids = long_answer(16_000, table)
    start = time.process_time()
    num_objects = scan_per_token(ids, "qwen")
    scanner_s = time.process_time() - start
    assert num_objects == len(parse_answer(ids, table).objects) > 500
    assert process_seconds(ids, table) * 5 < scanner_s
