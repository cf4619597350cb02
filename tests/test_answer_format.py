"""Qwen3-VL's own answer form through the one parser and the one target builder: numbers in ordinary text.

`native` splits digits one by one as Qwen does and has `"},\\n` as one token; `fused` has tokens of several digits, of
digits with commas and brackets, and of digits with keys.
"""

import copy
import functools
import json
import random
import re
import unicodedata
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.answers import make_table, make_tokenizer, random_box
from utils.answer_format import COORD_TOKENS, FORMATS, INTERNVL, QWEN2_5VL, QWEN3VL
from utils.drafts import Arrangement
from utils.geometry import Object, iou_matrix, pixels_to_bins, to_norm1000
from utils.losses import loss_sums
from utils.packing import check_row
from utils.parsing import DROP_REASONS, ParsedAnswer, parse_answer
from utils.targets import Target, TargetOptions, build_target, check_segment, ground_truth_target, make_segment
from utils.token_table import TokenTable

KINDS = ["native", "fused"]
OPENINGS = ["[", "[\n\t", "```json\n[\n\t", "```\n[\n  ", "```json\n["]
MAN = Object("man", "bbox_2d", (58, 9, 211, 158))
DOG = Object("dog", "bbox_2d", (0, 99, 1000, 105))
CAR = Object("(big) car", "bbox_2d", (500, 500, 700, 700))
GOOD = '{"bbox_2d": [58, 9, 211, 158], "label": "man"}'
PLAIN = TargetOptions()
IGNORE = TargetOptions(label="ignore")
TRIM = Arrangement(unmatched="trim")

numbers = st.integers(0, 1000)
wild_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)
boxes = st.tuples(numbers, numbers, numbers, numbers).map(lambda c: (*map(min, c[:2], c[2:]), *map(max, c[:2], c[2:])))
wild_objects = st.builds(Object, wild_text, st.just("bbox_2d"), boxes)


def table_of(kind: str = "native") -> TokenTable:
    return make_table(kind, "qwen3vl")


def parse_text(text: str, kind: str = "native") -> ParsedAnswer:
    return parse_answer(table_of(kind).encode(text), table_of(kind))


def text_of(ids, kind: str = "native") -> str:
    return independent_bytes(kind, ids).decode()


def independent_bytes(kind: str, ids) -> bytes:
    """Text of ids by GPT-2's own byte alphabet, added tokens as they are called."""
    return b"".join(map(independent_table(kind).__getitem__, ids))


@functools.cache
def independent_table(kind: str) -> list[bytes]:
    tokenizer = make_tokenizer(kind)
    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    added = set(tokenizer.get_added_vocab().values())
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    return [
        name.encode() if token in added else bytes(byte_of[char] for char in name) for token, name in enumerate(names)
    ]


def check_alignment(parsed: ParsedAnswer, kind: str) -> None:
    """Every span says what it should, by the tokens' own texts."""
    pieces = [independent_bytes(kind, [token]) for token in parsed.prefix_ids]
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    starts = [0, *ends[:-1]]
    data = b"".join(pieces)
    if parsed.objects:
        assert data == parsed.prefix_bytes
    for pred in parsed.objects:
        written = json.loads(data[slice(*pred.byte_span)])
        assert written == {"bbox_2d": list(pred.object.coords), "label": pred.object.desc}
        for value, first, (a, b) in zip(pred.object.coords, pred.coord_index, pred.coord_bytes, strict=True):
            assert data[a:b] == str(value).encode() and not data[a - 1 : a].isdigit() and not data[b : b + 1].isdigit()
            assert starts[first] <= a < ends[first]
        assert json.loads(b'"' + data[slice(*pred.desc_bytes)] + b'"') == pred.object.desc


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


def test_tgt_1_qwen3vl_needs_no_coordinate_tokens() -> None:
    """TGT-1: the released tokenizer has none; there are none to be learnt, and digits are known."""
    table = table_of()
    assert len(table.coord_ids) == 0 and (table.coord_bin < 0).all()
    assert {text_of([token]) for token in table.digit_ids} == set("0123456789")
    with pytest.raises(ValueError, match=r"lacks 1000 of 1000 .*answer_format to .*qwen3vl"):
        TokenTable.from_tokenizer(make_tokenizer("native"))
    assert any(len(text_of([token], "fused")) > 2 for token in table_of("fused").digit_ids)


def test_tgt_1_qwen3vl_spelled_coordinate_tokens_are_plain_text() -> None:
    """TGT-1: a tokenizer that has coordinate tokens may be used as well; they say nothing in this form."""
    table = make_table("qwen", "qwen3vl")
    text = '[{"bbox_2d": [<|coord_1|>, 2, 3, 4], "label": "a"}, ' + GOOD + "]"
    parsed = parse_answer(table.encode(text), table)
    assert parsed.pred_objects == [MAN] and parsed.dropped == {"bad_json": 1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opening", OPENINGS)
def test_tgt_2_qwen3vl_layouts_of_the_released_model(kind: str, opening: str) -> None:
    """TGT-2: on one line or several, in a fence or not; what was written is gone on with in the same way."""
    text = QWEN3VL.write([MAN, DOG], opening)
    assert text.startswith(opening + GOOD) and text.endswith("]\n```" if "```" in opening else "]")
    parsed = parse_text(text, kind)
    assert parsed.pred_objects == [MAN, DOG] and parsed.closed and not parsed.dropped and parsed.opening == opening
    check_alignment(parsed, kind)
    for trailing in ("\n", " \n\t"):
        assert parse_text(text + trailing, kind).closed
    assert not parse_text(text + " I hope this helps.", kind).closed
    assert not parse_text(text[:-1], kind).closed


def test_tgt_2_qwen3vl_a_fence_that_is_opened_is_closed() -> None:
    """TGT-2."""
    assert not parse_text(f"```json\n[{GOOD}]").closed and not parse_text(f"[{GOOD}]\n```").closed
    assert parse_text("```json\n[]\n```").closed and parse_text("[]").closed and parse_text("[\n]").closed
    for text in (GOOD, f"Sure:\n[{GOOD}]", f'{{"objects": [{GOOD}]}}', "", f"json\n[{GOOD}]"):
        assert parse_text(text).dropped == {"no_header": 1}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(objects=st.lists(wild_objects, max_size=4), opening=st.sampled_from(OPENINGS))
def test_tgt_1_qwen3vl_what_is_written_is_read(kind: str, objects: list[Object], opening: str) -> None:
    """TGT-1, TGT-2: random objects to text to tokens and back, every number with its tokens."""
    table = table_of(kind)
    text = QWEN3VL.write(objects, opening)
    inside = text.removeprefix("```json").removeprefix("```").removesuffix("```")
    assert [entry["label"] for entry in json.loads(inside)] == [obj.desc for obj in objects]
    parsed = parse_answer([*table.encode(text), table.eos_id, 3], table)
    assert parsed.pred_objects == objects and parsed.closed and not parsed.dropped
    check_alignment(parsed, kind)


@pytest.mark.parametrize("form", [COORD_TOKENS, QWEN3VL])
@pytest.mark.parametrize(
    "label", ["a\n\u0301b", "a\t\u0323\u0301", "\x1f\u0307", "a\\\u0301", "\\n\u0301", '"\u0301', "e\u0301"]
)
def test_an_accent_behind_an_escape_survives_a_tokenizer_that_composes(form, label) -> None:
    """TGT-6: NFC would make one letter of it and the last of the escape, which then is none."""
    text = unicodedata.normalize("NFC", form.write([Object(label, "bbox_2d", (1, 2, 3, 4))]))
    text = re.sub(r"<\|coord_(\d+)\|>", r"\1", text)
    found = json.loads(text)
    [obj] = found["objects"] if form is COORD_TOKENS else found
    assert unicodedata.normalize("NFC", obj[form.desc_key]) == unicodedata.normalize("NFC", label)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(objects=st.lists(wild_objects, min_size=1, max_size=3), data=st.data())
def test_tgt_1_qwen3vl_any_json_layout_is_read(kind: str, objects: list[Object], data: st.DataObject) -> None:
    """TGT-1: white space anywhere between JSON tokens, keys in either order, any escapes."""

    def gap() -> str:
        return data.draw(st.text(" \t\r\n", max_size=2))

    written = []
    for obj in objects:
        label = json.dumps(obj.desc).replace("<|", "\\u003c|")
        coords = f"{gap()},{gap()}".join(map(str, obj.coords))
        members = [f'"bbox_2d"{gap()}:{gap()}[{gap()}{coords}{gap()}]', f'"label"{gap()}:{gap()}{label}']
        written.append("{" + gap() + f"{gap()},{gap()}".join(data.draw(st.permutations(members))) + gap() + "}")
    parsed = parse_text(f"{gap()}[{gap()}{f'{gap()},{gap()}'.join(written)}{gap()}]{gap()}", kind)
    assert parsed.pred_objects == objects and parsed.closed and not parsed.dropped
    check_alignment(parsed, kind)


MALFORMED = {
    "duplicate_key": ['{"bbox_2d": BOX, "bbox_2d": BOX}', '{"label": "a", "label": "b", "bbox_2d": BOX}'],
    "extra_key": ['{"bbox_2d": BOX, "label": "a", "x": {"y": [1, 2]}}', '{"desc": "a", "bbox_2d": BOX}'],
    "missing_desc": ['{"bbox_2d": BOX}', "{}"],
    "empty_desc": ['{"bbox_2d": BOX, "label": " "}'],
    "bad_desc": ['{"bbox_2d": BOX, "label": 5}', r'{"bbox_2d": BOX, "label": "\ud800"}'],
    "missing_geometry": ['{"label": "a"}'],
    "coord_not_number": [
        '{"bbox_2d": [1, 2, 3, 4.5], "label": "a"}',
        '{"bbox_2d": [-1, 2, 3, 4], "label": "a"}',
        '{"bbox_2d": [1, 2, 3, 12345], "label": "a"}',
        '{"bbox_2d": ["1", 2, 3, 4], "label": "a"}',
        '{"bbox_2d": [[1, 2], [3, 4]], "label": "a"}',
        '{"bbox_2d": "1, 2, 3, 4", "label": "a"}',
    ],
    "out_of_range": ['{"bbox_2d": [0, 0, 1001, 5], "label": "a"}', '{"bbox_2d": [9999, 0, 1, 5], "label": "a"}'],
    "wrong_count": ['{"bbox_2d": [], "label": "a"}', '{"bbox_2d": [1, 2, 3], "label": "a"}'],
    "reversed_box": ['{"bbox_2d": [5, 2, 3, 4], "label": "a"}', '{"bbox_2d": [1, 9, 3, 4], "label": "a"}'],
    "bad_json": [
        '{"bbox_2d": [01, 2, 3, 4], "label": "a"}',
        '{"bbox_2d": [1 2, 3, 4], "label": "a"}',
        '{"bbox_2d": [1, 2, 3, 4, "label": "a"}',
        '{"bbox_2d": BOX "label": "a"}',
        "{'bbox_2d': BOX, 'label': 'a'}",
        '{"bbox_2d": BOX, "label": "a "big" car"}',
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("reason", "bad"), [(r, bad) for r, texts in MALFORMED.items() for bad in texts])
def test_tgt_2_qwen3vl_malformed_object_harms_no_other(kind: str, reason: str, bad: str) -> None:
    """TGT-2: before, between and behind valid objects; closed, it stays in the prefix."""
    bad = bad.replace("BOX", "[1, 2, 3, 4]")
    text = f"[{GOOD}, {bad}, {GOOD}, {bad}]"
    parsed = parse_text(text, kind)
    assert parsed.dropped == {reason: 2} and reason in DROP_REASONS
    assert parsed.pred_objects == [MAN] * 2 and parsed.closed
    assert text_of(parsed.prefix_ids, kind) == text[:-1]
    check_alignment(parsed, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", ['{"bbox_2d": [1, 2', '{"bbox_2d": [1, 2, 3, 4], "label": "a"', "{", '{"label": "a"'])
def test_tgt_2_qwen3vl_unclosed_object_harms_no_other(kind: str, bad: str) -> None:
    """TGT-2: a `, {` behind a number or directly in an object begins the next one; a last one is cut."""
    parsed = parse_text(f"[{GOOD}, {bad}, {GOOD}]", kind)
    assert parsed.pred_objects == [MAN] * 2 and parsed.dropped == {"unclosed": 1}
    last = parse_text(f"[{GOOD}, {bad}]", kind)
    assert last.pred_objects == [MAN] and last.dropped == {"unfinished": 1} and not last.closed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opening", OPENINGS[:3])
def test_tgt_3_qwen3vl_cut_at_every_token(kind: str, opening: str) -> None:
    """TGT-3: rollouts that end anywhere keep exactly the objects whose last byte is there, and all ids but one."""
    table = table_of(kind)
    rng = random.Random(4)
    for _ in range(6):
        objects = [random_box(rng) for _ in range(4)]
        between, closing = QWEN3VL.layout(opening)
        ids = table.encode(QWEN3VL.write(objects, opening))
        kept_text = [opening + between.join(map(QWEN3VL.write_object, objects[:n])) for n in range(5)]
        for length in range(len(ids) + 1):
            parsed = parse_answer(ids[:length], table)
            seen = independent_bytes(kind, ids[:length]).decode(errors="ignore")
            num_complete = max((n for n in range(1, 5) if seen.startswith(kept_text[n])), default=0)
            assert parsed.pred_objects == objects[:num_complete] and parsed.closed == (length == len(ids))
            if num_complete:
                assert text_of(parsed.prefix_ids, kind) == kept_text[num_complete]
                assert parsed.prefix_ids[: parsed.num_exact] == ids[: parsed.num_exact]
                assert len(parsed.prefix_ids) == parsed.num_exact or parsed.respelled
                check_alignment(parsed, kind)


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    ids=st.lists(st.integers(-2, 700), max_size=60),
    opening=st.sampled_from(["", *OPENINGS]),
)
def test_tgt_2_qwen3vl_random_tokens_never_raise(kind: str, ids: list[int], opening: str) -> None:
    """TGT-2."""
    parsed = parse_answer(table_of(kind).encode(opening) + ids, table_of(kind))
    check_alignment(parsed, kind)


# ---------------------------------------------------------------------------------------------------------------------
# Targets
# ---------------------------------------------------------------------------------------------------------------------


def rollout_target(pred, gt, matches, options=PLAIN, kind="native", opening="[") -> Target:
    parsed = parse_text(QWEN3VL.write(pred, opening), kind)
    assert parsed.pred_objects == pred
    return build_target(parsed, gt, matches, table_of(kind), options)


def learnt(target: Target, kind: str = "native") -> list[tuple[str, str]]:
    """(token, label) of the supervised text of the prefix."""
    pairs = zip(target.text_index.tolist(), target.text_label.tolist(), strict=True)
    return [
        (text_of([target.answer_ids[i]], kind), text_of([label], kind)) for i, label in pairs if i < target.num_prefix
    ]


def first_number(generated: int, true: int) -> list[tuple[str, str]]:
    """What is learnt of a box's first number, the others being equal and the object followed by a false positive."""
    pred, gt = Object("man", "bbox_2d", (generated, 0, 1000, 0)), Object("man", "bbox_2d", (true, 0, 1000, 0))
    pairs = learnt(rollout_target([pred, DOG], [gt], [(0, 0)], IGNORE))
    others = [("0", "0"), (",", ","), ("1", "1"), *[("0", "0")] * 3, (",", ","), ("0", "0"), ("],", "],")]
    assert pairs[-len(others) :] == others
    return pairs[: -len(others)]


def test_tgt_6_qwen3vl_numbers_by_hand() -> None:
    """TGT-6: equal; another digit; longer and shorter than the truth, digit against comma."""
    assert first_number(58, 58) == [("5", "5"), ("8", "8"), (",", ",")]
    assert first_number(58, 59) == [("5", "5"), ("8", "9")]
    assert first_number(99, 105) == [("9", "1")]
    assert first_number(10, 105) == [("1", "1"), ("0", "0"), (",", "5")]
    assert first_number(105, 10) == [("1", "1"), ("0", "0"), ("5", ",")]
    assert first_number(1000, 100) == [("1", "1"), ("0", "0"), ("0", "0"), ("0", ",")]


@settings(max_examples=300, deadline=None)
@given(generated=numbers, true=numbers)
def test_tgt_6_qwen3vl_numbers_up_to_the_first_difference(generated: int, true: int) -> None:
    """TGT-6: against the two numbers laid side by side, digit by digit, each with its comma."""
    expected = []
    for token, label in zip(f"{generated},", f"{true},", strict=False):
        expected.append((token, label))
        if token != label:
            break
    assert first_number(generated, true) == expected


def test_tgt_6_qwen3vl_each_number_starts_afresh() -> None:
    """TGT-6, TGT-9: a wrong number hides only its own rest; the label is corrected as everywhere."""
    gt = Object("woman", "bbox_2d", (5, 10, 211, 160))
    pairs = learnt(rollout_target([MAN, DOG], [gt], [(0, 0)]))
    joined = " ".join(f"{a}>{b}" for a, b in pairs)
    assert joined.startswith("5>5 8>, 9>1 2>2 1>1 1>1 ,>, 1>1 5>6 ")
    assert pairs[9][0] == "m" and pairs[9][1].startswith("w") and len(pairs) == 10


def test_tgt_7_qwen3vl_weights() -> None:
    """TGT-7: digits and what ends a number weigh `coord`, labels `desc`, all else 1; there is no coordinate label."""
    options = TargetOptions(desc_weight=2.0, coord_weight=3.0)
    target = rollout_target([MAN], [MAN, DOG], [(0, 0)], options)
    assert len(target.coord_index) == 0
    weights = [
        (text_of([target.answer_ids[i]]), w)
        for i, w in zip(target.text_index, target.text_weight.tolist(), strict=True)
    ]
    appended = weights[[text for text, _ in weights].index("bbox") :]
    assert "".join(text for text, w in weights if w == 3.0) == "58,9,211,158],0,99,1000,105],"
    heavy = "".join(text for text, w in appended if w == 2.0)
    assert heavy.startswith("do") and '"}' in heavy
    assert {w for text, w in appended if text in ("bbox", "_", " [", " ", "<|im_end|>")} == {1.0}
    digits = [text_of([target.answer_ids[i]]) for i in target.digit_index]
    assert "".join(digits) == "58921115809910001" + "05" and set("".join(digits)) <= set("0123456789")
    assert np.isin(target.digit_index, target.text_index).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opening", OPENINGS)
def test_tgt_5_qwen3vl_appended_in_the_models_own_layout(kind: str, opening: str) -> None:
    """TGT-5: missed objects follow in the layout that the model began; closing, fence and end token behind them."""
    target = rollout_target([MAN, DOG], [DOG, CAR], [(1, 0)], kind=kind, opening=opening)
    assert text_of(target.answer_ids, kind) == QWEN3VL.write([MAN, DOG, CAR], opening) + "<|im_end|>"
    assert (target.num_matched, target.num_appended) == (1, 1)


def test_tgt_5_qwen3vl_seam_has_natural_tokens() -> None:
    """TGT-5: the model closed with `"}\\n`; with an object to come the same place reads `"},\\n`, each one token."""
    table = table_of()
    for opening in OPENINGS[:3]:
        target = rollout_target([MAN], [MAN, CAR], [(0, 0)], opening=opening)
        text = QWEN3VL.write([MAN, CAR], opening) + "<|im_end|>"
        assert target.answer_ids.tolist() == make_tokenizer("native").encode(text, add_special_tokens=False)
    assert any(text_of([token]) == '"},\n' for token in target.answer_ids)
    # where the label should go on, that very token learns to go on
    longer = rollout_target([MAN], [replace(MAN, desc="man with a dot"), CAR], [(0, 0)], opening="[\n\t")
    at = [text_of([token]) for token in longer.answer_ids].index('"},\n')
    label = longer.text_label[longer.text_index.tolist().index(at)]
    assert " with".startswith(text_of([label])) and table.bytes_of[label]


@pytest.mark.parametrize("answer", ["[]", "[\n]", "[ ]", "[\n\t\n]", "```json\n[]\n```", "```json\n[\n\t\n]\n```"])
def test_tgt_5_qwen3vl_an_empty_answer_does_not_grow(answer: str) -> None:
    """TGT-5: a right empty answer is learnt without its white space, and what is learnt once is learnt again."""
    table = table_of()
    for _ in range(2):
        parsed = parse_text(answer)
        assert parsed.closed and not parsed.objects
        target = build_target(parsed, [], [], table, PLAIN)
        answer = text_of(target.answer_ids).removesuffix("<|im_end|>")
        assert answer in ("[]", "```json\n[]\n```")


@pytest.mark.parametrize("opening", OPENINGS[:3])
def test_tgt_6_qwen3vl_going_on_to_a_false_positive_is_not_learnt(opening: str) -> None:
    """TGT-6: `"},` ends the label and goes on: no loss where what follows matches nothing, unless it corrects the
    label; with `redirect` (TGT-11) the correction stays, too."""
    for options in (PLAIN, TargetOptions(arrangement=Arrangement(unmatched="redirect"))):
        right = rollout_target([MAN, DOG, CAR], [MAN, DOG], [(0, 0), (1, 1)], options, opening=opening)
        ends = [label for token, label in learnt(right) if token.startswith('"},')]
        assert len(ends) == (2 if options.arrangement.unmatched == "redirect" else 1)
        assert ends[0].startswith('"},') and not any(label.startswith('"},') for label in ends[1:])
        longer = rollout_target([MAN, CAR], [replace(MAN, desc="man with a dot")], [(0, 0)], options, opening=opening)
        assert [label for token, label in learnt(longer) if token.startswith('"},')] == [" with"]


@pytest.mark.parametrize("bad", ['{"bbox_2d": [1, 2, 3], "label": "dog"}', '{"label": 3}', "{}"])
def test_TGT_6_qwen3vl_going_on_to_a_malformed_object_is_not_learnt(bad: str) -> None:
    """TGT-6: nor to one that is closed but malformed; before another object the same token is learnt."""
    first, second = map(QWEN3VL.write_object, [MAN, DOG])
    for parts, num in (([first, bad], 0), ([first, bad, second], 0), ([first, second, bad], 1), ([first, second], 1)):
        parsed = parse_text("[\n\t" + ",\n\t".join(parts) + "\n]")
        matches = [(i, i) for i in range(len(parsed.objects))]
        pairs = learnt(build_target(parsed, [MAN, DOG], matches, table_of(), PLAIN))
        assert [token for token, label in pairs if token == label and token.startswith('"},')] == ['"},\n'] * num
        longer = [replace(MAN, desc="man with a dot"), DOG]
        pairs = learnt(build_target(parsed, longer, matches, table_of(), PLAIN))
        assert [label for token, label in pairs if token.startswith('"},')][0] == " with"  # a correction stays


def test_TGT_6_a_token_with_the_end_of_a_wrong_number_learns_nothing() -> None:
    """TGT-6: `3, 2` ends 163, which should be 170, and begins 252: as a label it would teach the wrong digit."""
    pred, gt = (Object("man", "bbox_2d", (x, 252, 549, 633)) for x in (163, 170))
    pairs = learnt(rollout_target([pred, DOG], [gt], [(0, 0)], IGNORE, "fused"), "fused")
    assert pairs[:3] == [("16", "17"), (", 5", ", 5"), ("49", "49")]  # and not `52`, which follows it


def test_TGT_6_a_token_that_ends_a_short_number_and_begins_the_next_learns_the_missing_digit() -> None:
    """TGT-6: `, 5` ends 10, which should be 105, and begins 52, which is right: it learns the digit only."""
    pred, gt = (Object("man", "bbox_2d", (x, 52, 549, 633)) for x in (10, 105))
    pairs = learnt(rollout_target([pred, DOG], [gt], [(0, 0)], IGNORE, "fused"), "fused")
    assert pairs[:3] == [("10", "10"), (", 5", "5, 5"), ("2, 5", "2, 5")]


def test_TGT_11_qwen3vl_a_redirected_token_weighs_as_structure() -> None:
    """TGT-11: `"},` ends a label, whose weight is 10, and goes on to a wrong object: what it learns is to close."""
    options = TargetOptions(arrangement=Arrangement(unmatched="redirect"), desc_weight=10.0)
    target = rollout_target([MAN, CAR], [MAN], [(0, 0)], options)
    of_prefix = target.text_weight[target.text_index < target.num_prefix].tolist()
    found = {token: (label, weight) for (token, label), weight in zip(learnt(target), of_prefix, strict=True)}
    (label, weight) = next(found[token] for token in found if token.startswith('"},'))
    assert label.startswith('"}]') and weight == 1
    assert 10 in of_prefix  # the label's own text


@pytest.mark.parametrize("structure", [False, True])
def test_TGT_15_qwen3vl_an_inserted_object_does_not_teach_to_go_on_to_a_false_positive(structure: bool) -> None:
    """TGT-15, TGT-6, TGT-10: nor does a matched one, with `supervise_structure` either."""
    options = TargetOptions(arrangement=Arrangement(place="order"), supervise_structure=structure)
    for pred, gt, num in (([MAN, CAR], [MAN, DOG], 1), ([MAN, CAR], [MAN], 0), ([MAN, DOG, CAR], [MAN, DOG], 1)):
        matches = [(i, i) for i, obj in enumerate(pred) if obj in gt]
        labels = [text_of([label]) for label in rollout_target(pred, gt, matches, options).text_label.tolist()]
        assert sum(label.startswith('"},') for label in labels) == num  # before the dog only


@pytest.mark.parametrize("kind", KINDS)
def test_tgt_3_qwen3vl_nothing_usable(kind: str) -> None:
    """TGT-3, TGT-6: the model's own opening stays as context; where it wrote none, `[` is learnt with all the rest."""
    table = table_of(kind)
    for answer in ("```json\n[\n\t", '```json\n[\n\t{"bbox_2d": [1, 2'):
        target = build_target(parse_answer(table.encode(answer), table), [MAN, DOG], [], table, PLAIN)
        natural = table.encode(QWEN3VL.write([MAN, DOG], "```json\n[\n\t"))
        assert target.answer_ids.tolist() == [*natural, table.eos_id]
        assert "```json\n[\n\t".startswith(text_of(target.answer_ids[: target.num_prefix], kind))
        assert target.text_index[0] == target.num_prefix and (target.num_prefix > 0 or kind == "fused")
    for answer in ("", "I see nothing."):
        target = build_target(parse_answer(table.encode(answer), table), [MAN, DOG], [], table, PLAIN)
        assert target.answer_ids.tolist() == [*table.encode(QWEN3VL.write([MAN, DOG])), table.eos_id]
        assert target.text_index.tolist() == list(range(len(target.answer_ids)))


@pytest.mark.parametrize("arrangement", [Arrangement(), TRIM])
def test_tgt_6_qwen3vl_going_on_is_learnt_where_an_empty_list_is_one_token(arrangement: Arrangement) -> None:
    """TGT-3, TGT-6: Qwen's `[]` is one token, `[{"` is none. `[` is ours where the model wrote `[]`: a right `[]`
    learns itself, so objects could never be found again if `[` did not. A `[` of the model's own has no label."""
    spec = json.loads(make_tokenizer("native").backend_tokenizer.to_str())
    merges, vocab = spec["model"]["merges"], spec["model"]["vocab"]
    merges[merges.index(["[", '{"'])] = ["[", "]"]
    vocab["[]"] = vocab.pop('[{"')
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(spec)), eos_token="<|im_end|>")
    table, options = TokenTable.from_tokenizer(tokenizer, QWEN3VL), TargetOptions(arrangement=arrangement)
    for answer, gt, first in [
        ("[]", [MAN], "["),
        ("```json\n[]\n```", [MAN], "["),
        ("[]", [], "[]"),
        ("[", [MAN], '{"'),
        ("[" + GOOD[:9], [MAN], '{"'),
    ]:
        target = build_target(parse_answer(table.encode(answer), table), gt, [], table, options)
        assert table.bytes_of[target.text_label[0]].decode() == first
        assert (target.text_label == target.answer_ids[target.text_index[0] :]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("desc", ["crème brûlée", "강아지", "ポット"])
def test_tgt_6_a_file_that_spells_accents_apart_teaches_the_same_labels(kind: str, desc: str) -> None:
    """TGT-6, TGT-9: Qwen's tokenizers compose all text. Coordinates are found by counting bytes up to the label."""
    tokenizer = copy.deepcopy(make_tokenizer(kind))
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    table = TokenTable.from_tokenizer(tokenizer, QWEN3VL)
    parsed = parse_answer(table.encode(table.format.write([MAN])), table)
    composed, apart = (
        build_target(parsed, [replace(DOG, desc=unicodedata.normalize(form, desc))], [(0, 0)], table, PLAIN)
        for form in ("NFC", "NFD")
    )
    assert len(composed.digit_index) and composed.answer_ids.tolist() == apart.answer_ids.tolist()
    for name in ("text_index", "text_label", "text_weight", "digit_index"):
        assert getattr(composed, name).tolist() == getattr(apart, name).tolist()


def test_dat_4_qwen3vl_ground_truth_is_learnt_whole() -> None:
    """DAT-4."""
    target = ground_truth_target([MAN, DOG], table_of(), PLAIN)
    assert text_of(target.answer_ids) == f"[{GOOD}, " + QWEN3VL.write([DOG])[1:] + "<|im_end|>"
    assert target.text_label.tolist() == target.answer_ids.tolist()
    for bad in (replace(MAN, kind="poly", coords=(1, 2, 3, 4, 5, 6)), replace(MAN, coords=(0, 0, 1001, 1))):
        with pytest.raises(ValueError, match=r"needs a label and 4 \(bbox_2d\) bins in 0..1000"):
            ground_truth_target([bad], table_of(), PLAIN)


def test_tgt_10_tgt_11_qwen3vl_structure_and_trimming() -> None:
    """TGT-10, TGT-11: format tokens around a matched object learn themselves, not what hides behind a wrong digit."""
    options = TargetOptions(label="ignore", supervise_structure=True, arrangement=TRIM)
    target = rollout_target([DOG, MAN, CAR], [replace(MAN, coords=(58, 9, 299, 158))], [(1, 0)], options)
    assert text_of(target.answer_ids) == QWEN3VL.write([DOG, MAN]) + "<|im_end|>" and target.num_trimmed == 1
    pairs = learnt(target)
    assert ("bbox", "bbox") in pairs and ("1", "9") in pairs and all(a == b for a, b in pairs if (a, b) != ("1", "9"))
    assert [a for a, _ in pairs].count(",") == 2  # behind 58 and 9; that of the wrong number is not learnt


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opening", OPENINGS)
def test_tgt_11_qwen3vl_trim_everything_keeps_the_models_own_opening(kind: str, opening: str) -> None:
    """TGT-3, TGT-6, TGT-11: the fence and the line break are the model's, so they carry no loss, and it is closed."""
    table = table_of(kind)
    parsed = parse_text(QWEN3VL.write([CAR, CAR], opening), kind)
    target = build_target(parsed, [DOG], [], table, TargetOptions(arrangement=TRIM))
    assert text_of(target.answer_ids, kind) == QWEN3VL.write([DOG], opening) + "<|im_end|>"
    assert target.text_index[0] == target.num_prefix and target.num_trimmed == 2
    first = target.num_prefix  # the first token that reaches beyond the opening
    assert opening.startswith(text_of(target.answer_ids[:first], kind))
    assert len(text_of(target.answer_ids[: first + 1], kind)) > len(opening)


all_options = st.builds(
    TargetOptions,
    st.sampled_from(["correct", "ignore"]),
    st.sampled_from([Arrangement(), TRIM]),
    st.booleans(),
    st.sampled_from([0.0, 2.0]),
    st.sampled_from([0.0, 3.0]),
)


def check_target(ids: list[int], gt: list[Object], options: TargetOptions, kind: str, seed: int) -> None:
    """Everything that must hold for the target of any answer at all, with any one-to-one matches."""
    table = table_of(kind)
    parsed = parse_answer(ids, table)
    rng = random.Random(seed)
    num_pairs = rng.randint(0, min(len(parsed.objects), len(gt)))
    chosen = sorted(rng.sample(range(len(parsed.objects)), num_pairs))
    matches = list(zip(chosen, rng.sample(range(len(gt)), num_pairs), strict=True))
    target = build_target(parsed, gt, matches, table, options)
    kept = max((p for p, _ in matches), default=-1) + 1 if (options.arrangement == TRIM) else len(parsed.objects)
    missed = [obj for g, obj in enumerate(gt) if g not in {g for _, g in matches}]
    again = parse_answer(target.answer_ids.tolist(), table)
    assert again.pred_objects == parsed.pred_objects[:kept] + missed and again.closed
    start = target.num_prefix
    behind = target.text_index >= start
    assert target.text_index[behind].tolist() == list(range(start, len(target.answer_ids)))
    if options.supervise_structure or (kept and not parsed.prefix_bytes):
        return
    # In the prefix every label goes on from what was generated to what should have been: for some value of some matched
    # object it is the beginning of that value's truth (` "` before a label may be tokenized otherwise, too). Behind the
    # prefix all learns itself, but for the seam; so do brackets at the cut that had to be spelled anew.
    truths = []
    for p, g in matches:
        pred, truth = (
            parsed.objects[p],
            {"label": json.dumps(gt[g].desc, ensure_ascii=False)[1:-1].replace("<|", "\\u003c|")},
        )
        values = [(a, b, str(n)) for (a, b), n in zip(pred.coord_bytes, gt[g].coords, strict=True)]
        values += [(*pred.desc_bytes, truth["label"])] * (options.label == "correct")
        values.sort()
        for k in range(len(values)):
            text, at = b"", 0
            for a, b, value in [(values[k][0], values[k][0], ""), *values[k:]]:
                text, at = text + parsed.prefix_bytes[at:a] + value.encode(), b
            truths.append((values[k][0], text + parsed.prefix_bytes[at:]))
    data = independent_bytes(kind, target.answer_ids).replace(b"\xff", b"\xfe")  # as `prefix_bytes` has it
    ends = np.cumsum([len(independent_bytes(kind, [token])) for token in target.answer_ids]).tolist()
    for index, label in zip(target.text_index.tolist(), target.text_label.tolist(), strict=True):
        own = label == target.answer_ids[index]
        at_cut = data[ends[index - 1] if index else 0 : ends[start - 1]] if index < start else b""
        if own and (index >= start or target.respelled and not at_cut.strip(b'"[]}, \r\n\t')):
            continue
        said = (data[: ends[index - 1]] if index else b"") + independent_bytes(kind, [label])
        fits = [text for at, text in truths if _agree(text, said) and (own or len(said) >= at - 2)]
        assert fits, (said[-40:], own)
    make_segment("s", [5, 6, 7], target, table)


def _agree(truth: bytes, said: bytes) -> bool:
    """One goes on from the other: a label at the seam may reach beyond the prefix."""
    return truth.startswith(said) or said.startswith(truth)


malformed = st.sampled_from([text.replace("BOX", "[1, 2, 3, 4]") for texts in MALFORMED.values() for text in texts])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.one_of(wild_objects, malformed), max_size=5),
    gt=st.lists(wild_objects, max_size=3),
    options=all_options,
    opening=st.sampled_from(OPENINGS),
    cut=st.integers(0, 400),
    seed=st.integers(0, 99),
)
def test_tgt_5_qwen3vl_target_reads_back(kind: str, parts, gt, options, opening, cut, seed) -> None:
    """TGT-5, TGT-6: valid and malformed objects in any order, wild labels, cut anywhere."""
    between, closing = QWEN3VL.layout(opening)
    written = [part if isinstance(part, str) else QWEN3VL.write_object(part) for part in parts]
    ids = table_of(kind).encode(opening + between.join(written) + closing)
    check_target(ids[: max(len(ids) - cut, 0)] if cut < 200 else ids, gt, options, kind, seed)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 2), st.integers(0, 600)), max_size=6),
    gt=st.lists(wild_objects, max_size=3),
    options=all_options,
    opening=st.sampled_from(OPENINGS),
    seed=st.integers(0, 99),
)
def test_tgt_5_qwen3vl_target_of_a_damaged_answer_reads_back(kind: str, edits, gt, options, opening, seed) -> None:
    """TGT-5: tokens deleted, replaced and put in at random."""
    rng = random.Random(seed)
    ids = table_of(kind).encode(QWEN3VL.write([random_box(rng) for _ in range(4)], opening))
    for place, action, token in edits:
        at = place % len(ids)
        ids[at : at + (action != 2)] = [] if action == 0 else [token % 600]
    check_target(ids, gt, options, kind, seed)


# ---------------------------------------------------------------------------------------------------------------------
# Rows and losses
# ---------------------------------------------------------------------------------------------------------------------


def test_tgt_8_qwen3vl_violations_name_the_sample() -> None:
    """TGT-8: a supervised digit lies in the answer, is learnt as text, and holds a digit."""
    table = table_of()
    segment = make_segment("img-7", [1, 2], rollout_target([MAN], [MAN, DOG], [(0, 0)]), table)
    comma = segment.text_index[[text_of([t]) == "," for t in segment.input_ids[segment.text_index]]]
    assert len(segment.digit_index) and len(comma)
    wrong = {
        "which is no digit": {"digit_index": comma},
        "digit_index 0 lies outside": {"digit_index": np.array([0])},
        "an index that text_index lacks": {
            "text_index": segment.text_index[1:],
            "text_label": segment.text_label[1:],
            "text_weight": segment.text_weight[1:],
        },
        "is no coordinate": {
            "coord_index": segment.digit_index[:1],
            "coord_target": np.zeros(1, dtype=np.float32),
        },
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=f"sample img-7: .*{message}"):
            check_segment(replace(segment, **change), table)


def test_tgt_8_qwen3vl_row_is_checked_again() -> None:
    """TGT-8: on the packed row, where a segment that moved by one token would show."""
    table = table_of()
    segment = make_segment("img-7", [1, 2], rollout_target([MAN], [MAN, DOG], [(0, 0)]), table)
    length = len(segment.input_ids)

    class Row:
        input_ids = torch.tensor(np.concatenate([segment.input_ids] * 2))[None]
        coord_pos = torch.zeros(0, dtype=torch.int64)
        coord_ids = torch.zeros(0, dtype=torch.int64)
        text_pos = torch.tensor(np.concatenate([segment.text_index - 1, segment.text_index - 1 + length]))

    check_row(Row, [segment, segment], [0, length], table.digit_ids)
    with pytest.raises(ValueError, match="sample img-7: no supervised digit"):
        check_row(Row, [segment, segment], [0, length - 1], table.digit_ids)
    moved = replace(segment, digit_index=segment.digit_index + length)
    with pytest.raises(ValueError, match="sample img-7: no supervised digit of its answer"):
        check_row(Row, [moved, segment], [0, length], table.digit_ids)


def test_tgt_7_qwen3vl_gradient_only_where_something_is_learnt() -> None:
    """TGT-7: cross-entropy on the digits; coordinate parts are exactly zero, without a coordinate vocabulary at all."""
    target = rollout_target([MAN, CAR], [replace(MAN, coords=(59, 9, 211, 158))], [(0, 0)], IGNORE)
    size = len(target.answer_ids)
    torch.manual_seed(0)
    hidden, head = torch.randn(size, 8, requires_grad=True), torch.nn.Linear(8, 2000)
    none = torch.zeros(0, dtype=torch.int64)
    position = torch.tensor(target.text_index - 1)
    labels = SimpleNamespace(
        coord_pos=none,
        coord_target=none.float(),
        text_pos=position[position >= 0],
        text_label=torch.tensor(target.text_label)[position >= 0],
        text_weight=torch.tensor(target.text_weight)[position >= 0],
        coord_ids=none,
    )
    for num_chunks in (1, 3):
        hidden.grad = None
        sums = loss_sums(hidden, head, labels, sigma=12.0, num_chunks=num_chunks)
        assert [sums[part].item() for part in ("coord", "w1", "gate")] == [0.0, 0.0, 0.0]
        logits = head(hidden)[labels.text_pos]
        expected = torch.nn.functional.cross_entropy(logits, labels.text_label, reduction="none") * labels.text_weight
        assert float(sums["text"]) == pytest.approx(float(expected.sum()), rel=1e-5)
        sums["text"].backward()
        assert hidden.grad.abs().sum(dim=1).nonzero().flatten().tolist() == labels.text_pos.tolist()


# ---------------------------------------------------------------------------------------------------------------------
# The grid
# ---------------------------------------------------------------------------------------------------------------------


def test_dat_2_qwen3vl_grid() -> None:
    """DAT-2: `round(1000 * x / width)`; overlaps are the same on either grid; records have one unit."""
    assert pixels_to_bins((0, 32, 128, 64), 128, 64, (1000, 1000)) == (0, 500, 1000, 1000)
    whole = Object("a", "bbox_2d", (0, 500, 1000, 1000))
    assert to_norm1000(whole, (1000, 1000)).coords == (0, 499.5, 999, 999)
    assert to_norm1000(whole, (999, 999)) is whole
    half, quarter = Object("a", "bbox_2d", (0, 0, 500, 1000)), Object("b", "bbox_2d", (0, 0, 500, 500))
    ours = iou_matrix([half], [quarter])
    assert ours[0, 0] == 0.5
    assert iou_matrix([to_norm1000(half, (1000, 1000))], [to_norm1000(quarter, (1000, 1000))])[0, 0] == pytest.approx(
        0.5
    )


def test_formats_by_name() -> None:
    assert FORMATS == {"coord_tokens": COORD_TOKENS, "qwen3vl": QWEN3VL, "qwen2_5vl": QWEN2_5VL, "internvl": INTERNVL}
    assert re.search("bbox_2d.*label", QWEN3VL.prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_qwen2_5vl_is_read_as_the_released_model_writes_it_FAM_4(kind: str) -> None:
    """FAM-4: an answer in the form of Qwen's own cookbook for Qwen2.5-VL: pixels above 1000, in a fence, with tabs. A
    missed object is written in the same layout and frame."""
    table = make_table(kind, "qwen2_5vl")
    opening = "```json\n[\n\t"
    text = (
        opening
        + '{"bbox_2d": [1341, 258, 2397, 1360], "label": "a cake"},\n\t{"bbox_2d": [9, 0, 27, 28], "label": "cup"}'
    )
    parsed = parse_answer(table.encode(text + "\n]\n```"), table)
    cake, cup = Object("a cake", "bbox_2d", (1341, 258, 2397, 1360)), Object("cup", "bbox_2d", (9, 0, 27, 28))
    assert parsed.pred_objects == [cake, cup] and parsed.closed and not parsed.dropped
    missed = Object("plate", "bbox_2d", (0, 700, 2408, 1371))
    target = build_target(parsed, [cake, cup, missed], [(0, 0), (1, 1)], table, TargetOptions())
    added = ',\n\t{"bbox_2d": [0, 700, 2408, 1371], "label": "plate"}\n]\n```<|im_end|>'
    assert text_of(target.answer_ids, kind) == text + added
    assert parse_answer(target.answer_ids.tolist(), table).pred_objects == [cake, cup, missed]
    assert parse_answer(table.encode('[{"bbox_2d": [1, 2, 3, 10000], "label": "a"}]'), table).dropped
