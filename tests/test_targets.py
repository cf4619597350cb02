"""utils.targets: what is written, what is learnt, and that it reads back as what it should say (TGT-5 to TGT-11)."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.answers import make_table, make_tokenizer, random_object
from tests.test_parsing import MALFORMED, wild_objects
from utils.answer_format import FORMATS
from utils.drafts import Arrangement
from utils.geometry import Object
from utils.parsing import TokenTable, parse_answer
from utils.targets import (
    Target,
    TargetOptions,
    build_target,
    check_segment,
    format_objects,
    ground_truth_target,
    make_segment,
)

KINDS = ["qwen", "whole"]
HEADER = '{"objects": ['
RED = Object("red circle", "bbox_2d", (10, 20, 30, 40))
BLUE = Object("blue circle", "bbox_2d", (500, 500, 700, 700))
GREEN = Object("green square", "bbox_2d", (800, 100, 900, 200))
PLAIN = TargetOptions()
TRIM = Arrangement(unmatched="trim")


def rollout_target(pred, gt, matches, options=PLAIN, kind="qwen", tail="]}") -> Target:
    """The target of an answer that lists `pred` and ends in `tail`."""
    table = make_table(kind)
    parsed = parse_answer(table.encode(format_objects(pred)[:-2] + tail), table)
    return build_target(parsed, gt, matches, table, options)


def text_of(ids, table: TokenTable) -> str:
    return b"".join(table.bytes_of[token] for token in ids).decode()


def learnt(target: Target, table: TokenTable, start: int = 0) -> list[tuple[str, str]]:
    """(token, label) as text of each supervised text token from `start` on."""
    pairs = zip(target.text_index.tolist(), target.text_label.tolist(), strict=True)
    return [(text_of([target.answer_ids[i]], table), text_of([label], table)) for i, label in pairs if i >= start]


def prefix_labels(target: Target, table: TokenTable) -> list[tuple[str, str]]:
    """The supervised text tokens of the prefix."""
    return learnt(target, table)[: int((target.text_index < target.num_prefix).sum())]


# ---------------------------------------------------------------------------------------------------------------------
# The sequence
# ---------------------------------------------------------------------------------------------------------------------


def test_tgt_1_format() -> None:
    """TGT-1: the answer text to the letter; an empty list; `<|` never stands in a desc as it is."""
    assert format_objects([]) == '{"objects": []}'
    two = [RED, Object('a "b" <|im_end|> é', "poly", (1, 2, 3, 4, 5, 6))]
    assert format_objects(two) == (
        '{"objects": [{"desc": "red circle", "bbox_2d": [<|coord_10|>, <|coord_20|>, <|coord_30|>, <|coord_40|>]}, '
        r'{"desc": "a \"b\" \u003c|im_end|> é", "poly": '
        "[<|coord_1|>, <|coord_2|>, <|coord_3|>, <|coord_4|>, <|coord_5|>, <|coord_6|>]}]}"
    )


@pytest.mark.parametrize(
    "bad",
    [{"desc": " "}, {"coords": (1, 2, 3)}, {"coords": (0, 0, 1000, 1)}, {"kind": "poly"}],
)
def test_tgt_1_what_could_not_be_read_back_is_refused(bad: dict) -> None:
    """TGT-1."""
    with pytest.raises(ValueError, match="needs a desc and 4"):
        format_objects([replace(RED, **bad)])


@pytest.mark.parametrize("kind", KINDS)
def test_tgt_5_prefix_missed_objects_closing_end(kind: str) -> None:
    """TGT-5: the model wrote red and green; blue, missed, follows in the same format."""
    table = make_table(kind)
    for tail in ["]}", "", ", ", ', {"desc": "bl', "\n]\n}"]:
        target = rollout_target([RED, GREEN], [GREEN, BLUE], [(1, 0)], kind=kind, tail=tail)
        assert text_of(target.answer_ids, table) == format_objects([RED, GREEN, BLUE]) + "<|im_end|>"
        assert (target.num_matched, target.num_appended, target.num_trimmed) == (1, 1, 0)
        head, prefix = format_objects([RED, GREEN])[:-2], text_of(target.answer_ids[: target.num_prefix], table)
        assert head.startswith(prefix) and head[len(prefix) :] in ("", "]}")  # brackets may be fused with what follows


def test_tgt_5_appended_text_has_natural_tokens() -> None:
    """TGT-5: where the cut falls into `]}]}`, the ids are those of the whole text, seam included."""
    target = rollout_target([RED], [BLUE, GREEN], [])
    text = format_objects([RED, BLUE, GREEN]) + "<|im_end|>"
    assert target.answer_ids.tolist() == make_tokenizer("qwen").encode(text, add_special_tokens=False)
    assert target.respelled


def test_tgt_6_going_on_is_learnt_where_closing_would_be() -> None:
    """TGT-6: `]}]}` was written too early: the `]}` kept of it is ours and learns itself, like all that follows."""
    spec = json.loads(make_tokenizer("qwen").backend_tokenizer.to_str())
    spec["model"]["merges"].remove(["]}", ","])  # with `]},` in one token nothing is left to respell
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(spec)), eos_token="<|im_end|>")
    table = TokenTable.from_tokenizer(tokenizer, FORMATS["coord_tokens"])
    parsed = parse_answer(table.encode(format_objects([RED])), table)
    assert table.bytes_of[table.encode(format_objects([RED]))[-1]] == b"]}]}"
    went_on, closed = (
        build_target(parsed, gt, [(0, 0)], table, TargetOptions(label="ignore")) for gt in ([RED, BLUE], [RED])
    )
    assert learnt(went_on, table)[:3] == [("]}", "]}"), (",", ","), (' {"', ' {"')]
    assert learnt(closed, table) == [("]}]}", "]}]}"), ("<|im_end|>", "<|im_end|>")]
    assert went_on.text_index[0] == closed.text_index[0] == went_on.num_prefix - 1


def test_tgt_5_nothing_missed() -> None:
    """TGT-5: all found: only closing and end are learnt, in the very tokens that the model wrote."""
    table = make_table("qwen")
    target = rollout_target([RED], [RED], [(0, 0)], TargetOptions(label="ignore"))
    assert learnt(target, table) == [("]}]}", "]}]}"), ("<|im_end|>", "<|im_end|>")]
    assert target.answer_ids.tolist() == [*table.encode(format_objects([RED])), table.eos_id]
    empty = rollout_target([RED], [], [])
    assert text_of(empty.answer_ids, table) == format_objects([RED]) + "<|im_end|>" and not len(empty.coord_index)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", ["", "sorry", "}"])
def test_tgt_3_a_header_the_model_did_not_write_is_learnt(kind: str, answer: str) -> None:
    """TGT-3: no opening brace: all ground truth is learnt, and the header too, or the format could never come back."""
    table = make_table(kind)
    target = build_target(parse_answer(table.encode(answer), table), [RED, BLUE], [], table, PLAIN)
    assert target.answer_ids.tolist() == [*table.encode(format_objects([RED, BLUE])), table.eos_id]
    assert target.num_prefix == 0 and target.text_index[0] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", ['{"objects": [', '{"objects": [{"desc": "re'])
def test_tgt_3_nothing_usable(kind: str, answer: str) -> None:
    """TGT-3, TGT-6: the header is context, all ground truth is learnt, in the tokens of an ordinary answer."""
    table = make_table(kind)
    target = build_target(parse_answer(table.encode(answer), table), [RED, BLUE], [], table, PLAIN)
    natural = table.encode(format_objects([RED, BLUE]))
    assert target.answer_ids.tolist() == [*natural, table.eos_id]
    context = text_of(target.answer_ids[: target.num_prefix], table)
    assert HEADER.startswith(context) and target.text_index[0] == target.num_prefix
    assert len(HEADER) < len(context) + len(table.bytes_of[target.answer_ids[target.num_prefix]])
    assert target.coord_target.tolist() == [*RED.coords, *BLUE.coords]


@pytest.mark.parametrize("kind", KINDS)
def test_dat_4_ground_truth_is_learnt_whole(kind: str) -> None:
    """DAT-4: teacher forcing learns every token, header included; desc text has its own weight."""
    table = make_table(kind)
    target = ground_truth_target([RED, BLUE], table, TargetOptions(desc_weight=0.25))
    natural = [*table.encode(format_objects([RED, BLUE])), table.eos_id]
    assert target.answer_ids.tolist() == natural
    is_coord = table.coord_bin[natural] >= 0
    assert target.coord_index.tolist() == np.flatnonzero(is_coord).tolist()
    assert target.text_index.tolist() == np.flatnonzero(~is_coord).tolist()
    assert target.text_label.tolist() == np.array(natural)[~is_coord].tolist()
    assert target.coord_target.tolist() == [*RED.coords, *BLUE.coords]
    if kind == "qwen":
        light = [text_of([natural[i]], table) for i in target.text_index[target.text_weight == 0.25]]
        assert light == ["red", " circle", '",', "blue", " circle", '",']
        assert set(target.text_weight.tolist()) == {0.25, 1.0}
    assert ground_truth_target([], table, PLAIN).answer_ids.tolist() == [*table.encode('{"objects": []}'), table.eos_id]


# ---------------------------------------------------------------------------------------------------------------------
# Supervision
# ---------------------------------------------------------------------------------------------------------------------


def test_tgt_6_coordinates_of_matched_objects_learn_the_ground_truth() -> None:
    """TGT-6: red is matched and shifted, green is a false positive: it and the structure carry no loss."""
    table = make_table("qwen")
    target = rollout_target(
        [GREEN, RED], [replace(RED, coords=(12, 22, 32, 42))], [(1, 0)], TargetOptions(label="ignore")
    )
    assert table.coord_bin[target.answer_ids[target.coord_index]].tolist() == [10, 20, 30, 40]
    assert target.coord_target.tolist() == [12, 22, 32, 42]
    assert prefix_labels(target, table) == []


def test_tgt_6_matched_polygon_learns_projected_targets() -> None:
    """TGT-6: the same square drawn from another corner and the other way round; each point keeps its place."""
    gt = Object("red", "poly", (100, 100, 300, 100, 300, 300, 100, 300))
    pred = Object("red", "poly", (310, 290, 305, 95, 90, 110, 95, 290))
    target = rollout_target([pred], [gt], [(0, 0)])
    assert target.coord_target.tolist() == [300, 300, 300, 100, 100, 100, 100, 300]
    box = Object("red", "bbox_2d", (100, 100, 300, 300))
    assert rollout_target([pred], [box], [(0, 0)]).coord_target.tolist() == [300, 300, 300, 100, 100, 100, 100, 300]
    assert rollout_target([box], [gt], [(0, 0)]).coord_target.tolist() == [100, 100, 300, 300]


FLAT = {
    "self-crossing": (100, 100, 300, 300, 300, 100, 100, 300),
    "collinear": (100, 100, 200, 200, 300, 300),
    "a point": (100, 100, 100, 100, 100, 100),
}


@pytest.mark.parametrize("name", FLAT)
def test_tgt_6_no_coordinate_of_a_matched_object_goes_without_a_target(name: str) -> None:
    """TGT-6: a target that is not a number would silently leave its token without loss; both directions."""
    edge, box = Object("red", "poly", FLAT[name]), Object("red", "bbox_2d", (100, 100, 300, 300))
    other = Object("red", "poly", (90, 110, 310, 95, 305, 290))
    for pred, gt in [(edge, box), (box, edge), (edge, other), (other, edge), (edge, edge)]:
        target = rollout_target([pred], [gt], [(0, 0)])
        assert len(target.coord_index) == len(pred.coords)
        assert ((0 <= target.coord_target) & (target.coord_target <= 999)).all()
        check_segment(make_segment("s", np.array([1, 2]), target, make_table("qwen")), make_table("qwen"))


def corrected(pred_desc: str, gt_desc: str, kind: str = "qwen", **options: object) -> list[tuple[str, str]]:
    """(token, label) of the prefix where one desc stands for another."""
    pred, gt = replace(RED, desc=pred_desc), replace(RED, desc=gt_desc)
    target = rollout_target([pred, GREEN], [gt], [(0, 0)], TargetOptions(**options), kind)
    return prefix_labels(target, make_table(kind))


def test_tgt_9_equal_desc_learns_itself_and_its_closing_token() -> None:
    """TGT-9."""
    assert corrected("red circle", "red circle") == [("red", "red"), (" circle", " circle"), ('",', '",')]


def test_tgt_9_learns_up_to_the_first_difference() -> None:
    """TGT-9: other word first, later, a longer and a shorter desc; behind the difference nothing."""
    assert corrected("red circle", "blue circle") == [("red", "blue")]
    assert corrected("red circle", "red square") == [("red", "red"), (" circle", " square")]
    assert corrected("red", "red circle") == [("red", "red"), ('",', " circle")]
    assert corrected("red circle", "red") == [("red", "red"), (" circle", '",')]


def test_tgt_9_quote_fused_with_the_desc() -> None:
    """TGT-9: `(big) car` begins with the token ` "(`; where the model wrote ` "` and `red`, the quote differs."""
    assert make_table("qwen").encode(' "(big')[0] == make_table("qwen").encode(' "(')[0]
    assert corrected("red circle", "(big) car") == [(' "', ' "(')]
    assert corrected("(big) car", "red circle") == [(' "(', ' "')]
    assert corrected("(big) car", "(big) car")[0] == (' "(', ' "(')


def test_tgt_9_tokens_that_span_whole_objects() -> None:
    """TGT-9: one token holds the end of an object, keys, quotes and the desc; it is compared as it is."""
    first = '{"objects": [{"desc": "{}", "bbox_2d": ['.replace("{}", "{0}")
    table = make_table("whole")
    token = text_of(table.encode(format_objects([RED]))[:1], table)
    assert token.startswith(first.split("{0}")[0])
    assert corrected("red circle", "red circle", "whole")[0] == (token, token)
    ((generated, label),) = corrected("red circle", "blue circle", "whole")
    assert generated == token and label != token and label.startswith(HEADER)


def test_tgt_9_a_label_in_tokens_that_no_tokenizer_makes_is_learnt_from_its_quote() -> None:
    """TGT-9: ` "` is one token, but this model wrote two."""
    table = make_table("qwen")
    ids = table.encode(format_objects([RED]))
    index = [table.bytes_of[token] for token in ids].index(b' "')
    parsed = parse_answer([*ids[:index], *table.encode(" "), *table.encode('"'), *ids[index + 1 :]], table)
    target = build_target(parsed, [replace(RED, desc="blue circle")], [(0, 0)], table, PLAIN)
    assert prefix_labels(target, table) == [("red", "blue")]
    target = build_target(parsed, [RED], [(0, 0)], table, PLAIN)
    assert prefix_labels(target, table) == [("red", "red"), (" circle", " circle"), ('",', '",')]


def test_tgt_9_ignore_and_unmatched() -> None:
    """TGT-9."""
    assert corrected("red", "blue circle", label="ignore") == []
    target = rollout_target([RED, BLUE], [RED], [])
    assert prefix_labels(target, make_table("qwen")) == []


def test_tgt_9_desc_weight() -> None:
    """TGT-9."""
    target = rollout_target([RED], [RED], [(0, 0)], TargetOptions(desc_weight=3.0))
    assert target.text_weight.tolist() == [3, 3, 3, 1, 1]


def test_tgt_9_desc_at_the_cut() -> None:
    """TGT-9: geometry first, so the desc ends in the respelled token: `"}]}` becomes `"}`."""
    table = make_table("qwen")
    answer = '{"objects": [{"bbox_2d": [<|coord_1|>, <|coord_2|>, <|coord_3|>, <|coord_4|>], "desc": "red"}]}'
    parsed = parse_answer(table.encode(answer), table)
    assert parsed.respelled
    gt = Object("red", "bbox_2d", (1, 2, 3, 4))
    assert prefix_labels(build_target(parsed, [gt], [(0, 0)], table, PLAIN), table)[0] == ("red", "red")
    labels = prefix_labels(build_target(parsed, [replace(gt, desc="red circle")], [(0, 0)], table, PLAIN), table)
    assert labels[0] == ("red", "red") and labels[1][1] == " circle" and len(labels) == 2


def test_tgt_9_special_token_in_a_desc_never_becomes_a_label() -> None:
    """TGT-9: `<|im_end|>` as text is spelled out in both places a desc can be learnt."""
    table = make_table("qwen")
    gt = replace(RED, desc="<|im_end|>")
    for target in (rollout_target([RED], [gt], [(0, 0)]), rollout_target([RED], [gt], [])):
        assert (target.text_label == table.eos_id).sum() == 1 and target.text_label[-1] == table.eos_id


def test_tgt_11_trim_cuts_behind_the_last_match() -> None:
    """TGT-11: trailing false positives and malformed objects go, those before a match stay."""
    table = make_table("qwen")
    trim = TargetOptions(label="ignore", arrangement=TRIM)
    target = rollout_target([GREEN, RED, GREEN, GREEN], [BLUE, RED], [(1, 1)], trim, tail=', {"desc": "x"}]}')
    assert text_of(target.answer_ids, table) == format_objects([GREEN, RED, BLUE]) + "<|im_end|>"
    assert (target.num_trimmed, target.num_matched, target.num_appended) == (2, 1, 1)
    none_missed = rollout_target([RED, GREEN], [RED], [(0, 0)], trim)
    assert text_of(none_missed.answer_ids, table) == format_objects([RED]) + "<|im_end|>"
    assert learnt(none_missed, table) == [("]}]}", "]}]}"), ("<|im_end|>", "<|im_end|>")]


def test_tgt_11_trim_where_a_token_ends_learns_to_close_in_the_usual_token() -> None:
    """TGT-11, TGT-3: the model ended the last matched object in a `]}` of its own and went on in another token. Closing
    is learnt as the one token `]}]}` that closes everywhere else, not as a second spelling behind `]}`."""
    table = make_table("qwen")
    kept, gone = table.encode(format_objects([RED])[:-2]), table.encode(", " + format_objects([GREEN])[len(HEADER) :])
    assert table.bytes_of[kept[-1]] == b"]}"
    parsed = parse_answer([*kept, *gone], table)
    options = TargetOptions(label="ignore", arrangement=TRIM)
    target = build_target(parsed, [RED], [(0, 0)], table, options)
    assert target.answer_ids.tolist() == [*table.encode(format_objects([RED])), table.eos_id]
    assert learnt(target, table) == [("]}]}", "]}]}"), ("<|im_end|>", "<|im_end|>")]


@pytest.mark.parametrize("kind", KINDS)
def test_tgt_11_trim_that_cuts_nothing_changes_nothing(kind: str) -> None:
    """TGT-11: the model's own tokens stay, the last one of the last object, too."""
    table = make_table(kind)
    ids = table.encode(format_objects([RED, GREEN])[:-2])  # ends in `]}`
    for tail in (ids, [*ids, *table.encode("]}")], table.encode(format_objects([RED, GREEN]))):
        parsed = parse_answer(tail, table)
        plain, trimmed = (
            build_target(parsed, [RED, GREEN, BLUE], [(0, 0), (1, 1)], table, options)
            for options in (PLAIN, replace(PLAIN, arrangement=TRIM))
        )
        for name in ("answer_ids", "text_index", "text_label", "num_prefix", "respelled"):
            assert np.array_equal(getattr(plain, name), getattr(trimmed, name)), name


def test_tgt_11_trim_everything() -> None:
    """TGT-11: only false positives: back to the bare header, which stays context."""
    table = make_table("qwen")
    target = rollout_target([GREEN, GREEN], [RED], [], TargetOptions(arrangement=TRIM))
    assert target.answer_ids.tolist() == [*table.encode(format_objects([RED])), table.eos_id]
    assert target.num_trimmed == 2 and target.text_index[0] == target.num_prefix > 0


def test_tgt_11_trim_learns_a_header_that_the_model_did_not_write() -> None:
    """TGT-6, TGT-11: as without `trim`; there is nothing to cut."""
    table = make_table("qwen")
    parsed = parse_answer(table.encode("I see a red circle."), table)
    for options in (PLAIN, TargetOptions(arrangement=TRIM)):
        target = build_target(parsed, [RED], [], table, options)
        assert len(target.text_index) + len(target.coord_index) == len(target.answer_ids)


def test_tgt_10_structure_around_matched_objects() -> None:
    """TGT-10: the comma before, keys and brackets of red learn themselves; green's do not, nor does any desc. Nor does
    the token that ends red and goes on to the second green."""
    table = make_table("qwen")
    options = TargetOptions(label="ignore", supervise_structure=True)
    target = rollout_target([GREEN, RED, GREEN], [RED], [(1, 0)], options)
    tokens = ']},| {"|desc|":| "|",| "|bbox|_|2|d|":| [|,| |,| |,| '.split("|")
    tokens.remove('",')  # the token that closes the desc belongs to the desc
    assert prefix_labels(target, table) == [(token, token) for token in tokens]
    target = rollout_target([GREEN, RED, GREEN], [RED, GREEN], [(1, 0), (2, 1)], options)
    assert prefix_labels(target, table)[len(tokens)] == ("]},", "]},")  # where it is right to go on
    first = prefix_labels(rollout_target([RED, GREEN], [RED], [(0, 0)], options), table)
    assert [label for label, _ in first[:4]] == ['{"', "objects", '":', ' [{"']


def test_tgt_10_structure_does_not_go_on_to_a_malformed_object() -> None:
    """TGT-10: as before an object that matches nothing."""
    table = make_table("qwen")
    options = TargetOptions(label="ignore", supervise_structure=True)
    good = table.format.write_object(GREEN)
    for tail, num in ((', {"desc": 3}]}', 0), (f', {{"desc": 3}}, {good}]}}', 0), (f", {good}]}}", 1)):
        parsed = parse_answer(table.encode(format_objects([RED])[:-2] + tail), table)
        matches = [(i, i) for i in range(len(parsed.objects))]
        labels = prefix_labels(build_target(parsed, [RED, GREEN], matches, table, options), table)
        ends = [token for token, _ in labels if token.startswith("]},")]
        assert len(ends) == num, (tail, ends)


def test_tgt_10_structure_and_correction_together() -> None:
    """TGT-10, TGT-9: desc labels win where a token belongs to both; what comes behind is learnt as format."""
    table = make_table("qwen")
    both = TargetOptions(supervise_structure=True)
    target = rollout_target([RED, GREEN], [replace(RED, desc="(big) car")], [(0, 0)], both)
    labels = prefix_labels(target, table)
    assert (' "', ' "(') in labels and ("red", "red") not in labels and ("bbox", "bbox") in labels


# ---------------------------------------------------------------------------------------------------------------------
# Properties
# ---------------------------------------------------------------------------------------------------------------------

all_options = st.builds(
    TargetOptions,
    st.sampled_from(["correct", "ignore"]),
    st.sampled_from([Arrangement(), TRIM]),
    st.booleans(),
    st.sampled_from([0.0, 1.0, 2.0]),
)
malformed = st.sampled_from([text for texts in MALFORMED.values() for text in texts if len(text) < 1000])
BOX = "[<|coord_1|>, <|coord_2|>, <|coord_3|>, <|coord_4|>]"


def check_target(ids: list[int], gt: list[Object], options: TargetOptions, table: TokenTable, seed: int) -> None:
    """Everything that must hold for the target of any answer at all, with any one-to-one matches."""
    parsed = parse_answer(ids, table)
    rng = random.Random(seed)
    num_pairs = rng.randint(0, min(len(parsed.objects), len(gt)))
    chosen = sorted(rng.sample(range(len(parsed.objects)), num_pairs))
    matches = list(zip(chosen, rng.sample(range(len(gt)), num_pairs), strict=True))
    target = build_target(parsed, gt, matches, table, options)
    kept = max((p for p, _ in matches), default=-1) + 1 if (options.arrangement == TRIM) else len(parsed.objects)
    missed = [obj for g, obj in enumerate(gt) if g not in {g for _, g in matches}]

    # it reads back as valid predictions and missed objects, closed
    again = parse_answer(target.answer_ids.tolist(), table)
    assert again.pred_objects == parsed.pred_objects[:kept] + missed and again.closed
    # the prefix is what was generated, but for the respelled token
    prefix = target.answer_ids[: target.num_prefix].tolist()
    if parsed.prefix_bytes and kept + len(parsed.dropped) and not ((options.arrangement == TRIM) and not kept):
        same = sum(1 for _ in _common(prefix, ids))
        rest = b"".join(table.bytes_of[token] for token in prefix[same:])
        assert not rest or (target.respelled and table.bytes_of[ids[same]].startswith(rest))
    # all behind the prefix learns itself, and within it only what belongs to a match
    start = target.num_prefix
    behind = np.concatenate(
        [target.text_index[target.text_index >= start], target.coord_index[target.coord_index >= start]]
    )
    assert sorted(behind.tolist()) == list(range(start, len(target.answer_ids)))
    late = target.text_index >= start
    assert (target.answer_ids[target.text_index[late]] == target.text_label[late]).all()
    late = target.coord_index >= start
    assert (table.coord_bin[target.answer_ids[target.coord_index[late]]] == target.coord_target[late]).all()
    own = sorted(i for p, _ in matches for i in parsed.objects[p].coord_index)
    assert target.coord_index[~late].tolist() == own
    if options.label == "ignore" and not options.supervise_structure:
        # a respelled bracket at the cut is ours: of a token that the model wrote, with nothing usable behind it
        is_ours = target.respelled and not table.bytes_of[target.answer_ids[start - 1]].strip(b'"[]}, ')
        assert (target.text_index >= start - is_ours).all()
    segment = make_segment("s", [5, 6, 7], target, table)
    assert (
        segment.input_ids[:3].tolist() == [5, 6, 7]
        and segment.coord_index.tolist() == (target.coord_index + 3).tolist()
    )


def _common(a: list[int], b: list[int]):
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=250, deadline=None)
@given(
    parts=st.lists(st.one_of(wild_objects, malformed), max_size=5),
    gt=st.lists(wild_objects, max_size=3),
    options=all_options,
    cut=st.integers(0, 400),
    seed=st.integers(0, 99),
)
@example(
    parts=['{"desc": "a", "desc": "b", "bbox_2d": BOX}'] * 3,
    gt=[],
    options=TargetOptions(label="ignore"),
    cut=61,
    seed=0,
)
def test_tgt_5_target_reads_back(kind: str, parts, gt, options, cut, seed) -> None:
    """TGT-5: valid and malformed objects in any order, wild descs, cut anywhere."""
    table = make_table(kind)
    written = [
        part.replace("BOX", BOX) if isinstance(part, str) else format_objects([part])[len(HEADER) : -2]
        for part in parts
    ]
    ids = table.encode(HEADER + ", ".join(written) + "]}")
    check_target(ids[: max(len(ids) - cut, 0)] if cut < 200 else ids, gt, options, table, seed)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=250, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 2), st.integers(0, 600)), max_size=6),
    gt=st.lists(wild_objects, max_size=2),
    options=all_options,
    seed=st.integers(0, 99),
)
@example(edits=[(1, 1, 320)], gt=[], options=TargetOptions(label="ignore"), seed=0)
def test_tgt_5_target_of_a_damaged_answer_reads_back(kind: str, edits, gt, options, seed) -> None:
    """TGT-5: an answer with tokens deleted, replaced and put in at random (any bytes, brackets and quotes)."""
    table = make_table(kind)
    rng = random.Random(seed)
    ids = table.encode(format_objects([random_object(rng) for _ in range(4)]))
    brackets = [
        token for token in range(600) if table.bytes_of[token] in (b'"', b"{", b"}", b"[", b"]", b",", b"\\", b'",')
    ]
    for place, action, token in edits:
        at = place % len(ids)
        new = brackets[token % len(brackets)] if token % 2 else token
        ids[at : at + (action != 2)] = [] if action == 0 else [new]
    check_target(ids, gt, options, table, seed)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text('"{}[],: \\ab\n', max_size=60),
    good=st.integers(0, 3),
    coords=st.lists(st.integers(0, 60), max_size=3),
    options=all_options,
    seed=st.integers(0, 9),
)
def test_tgt_5_target_of_bracket_soup_reads_back(text, good, coords, options, seed) -> None:
    """TGT-5: brackets, quotes and coordinates in any order behind a header, valid objects among them."""
    table = make_table("whole")
    for at in sorted(coords, reverse=True):
        text = text[:at] + "<|coord_5|>" + text[at:]
    middle = seed % (len(text) + 1)
    pieces = {0: [text], 1: [text, _one()], 2: [_one(), text], 3: [text[:middle], ", ", _one(), ", ", text[middle:]]}
    check_target(table.encode(HEADER + ", ".join(pieces[good])), [RED], options, table, seed)


def _one() -> str:
    return format_objects([BLUE])[len(HEADER) : -2]


# ---------------------------------------------------------------------------------------------------------------------
# Segments
# ---------------------------------------------------------------------------------------------------------------------


def test_tgt_16_tokens_without_a_label_by_hand() -> None:
    """TGT-16: of a prefix with a neutral object and a matched one the neutral object, format and choices; nothing of
    the prompt, nothing that is learnt, be it in the prefix or appended."""
    table = make_table("qwen")
    target = rollout_target([BLUE, replace(RED, coords=(11, 21, 31, 41))], [RED, GREEN], [(1, 0)])
    segment = make_segment("s", [7, 7, 7], target, table)
    spans, last = [], -2
    for index in segment.unlabelled_index.tolist():
        text = text_of([segment.input_ids[index]], table)
        spans = [*spans[:-1], spans[-1] + text] if index == last + 1 else [*spans, text]
        last = index
    coords = "<|coord_500|>, <|coord_500|>, <|coord_700|>, <|coord_700|>"
    neutral = f'{{"desc": "blue circle", "bbox_2d": [{coords}]}}, '
    assert "".join(spans) == HEADER + neutral + '{"desc": "' + ' "bbox_2d": [' + ", , , "
    assert len(segment.unlabelled_index) + len(segment.coord_index) + len(segment.text_index) + 3 == len(segment)
    whole = make_segment("s", [7, 7, 7], ground_truth_target([RED], table, PLAIN), table)
    assert whole.unlabelled_index.tolist() == []


def test_tgt_8_segment_by_hand() -> None:
    """TGT-8: the answer stands behind the prompt and its indices with it."""
    table = make_table("qwen")
    target = ground_truth_target([RED], table, PLAIN)
    segment = make_segment("img-7", [1, 2, 3, 4], target, table, policy_version="run:3")
    assert segment.answer_start == 4 and len(segment) == 4 + len(target.answer_ids)
    assert table.coord_bin[segment.input_ids[segment.coord_index]].tolist() == list(RED.coords)
    assert segment.input_ids[segment.text_index].tolist() == segment.text_label.tolist()
    assert segment.policy_version == "run:3"


def test_tgt_8_violations_name_the_sample() -> None:
    """TGT-8: an index outside the answer or on a token that is no coordinate stops the run."""
    table = make_table("qwen")
    segment = make_segment("img-7", [1, 2], ground_truth_target([RED], table, PLAIN), table)
    wrong = {
        "outside the answer": {"coord_index": segment.coord_index - segment.coord_index[0] + 1},
        "text_index 0 lies outside": {"text_index": segment.text_index - 2},
        "which is no coordinate": {"coord_index": segment.coord_index - 1},
        "does not ascend": {"coord_index": segment.coord_index[::-1].copy()},
        "outside 0..999": {"coord_target": segment.coord_target + 980},
        "not a token id": {"text_label": segment.text_label + 10_000},
        "differ in length": {"text_weight": segment.text_weight[1:]},
        "no predecessor": {"answer_start": 0},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=f"sample img-7: .*{message}"):
            check_segment(replace(segment, **change), table)
    with pytest.raises(ValueError, match="no predecessor"):
        make_segment("img-7", [], ground_truth_target([RED], table, PLAIN), table)
