"""utils.drafts, by the targets made from it: worked examples of every choice of `RM.targets` (TGT-11 to TGT-15)."""

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.answers import make_table, make_tokenizer
from tests.test_parsing import MALFORMED, wild_objects
from tests.test_targets import BLUE, GREEN, HEADER, KINDS, RED, learnt, rollout_target, text_of
from utils.answer_format import FORMATS
from utils.drafts import Arrangement
from utils.parsing import parse_answer
from utils.scores import label_of
from utils.targets import TargetOptions, build_target, format_objects, make_segment
from utils.token_table import TokenTable

END = "<|im_end|>"
RED_AGAIN = replace(RED, coords=(10, 20, 30, 39))
NOT_RED = replace(RED_AGAIN, desc="blue circle")


def options_of(label: str = "ignore", supervise_structure: bool = False, **arrangement) -> TargetOptions:
    return TargetOptions(label, Arrangement(**arrangement), supervise_structure)


def written(pred, gt, matches, options, kind="qwen", **more) -> str:
    return text_of(rollout_target(pred, gt, matches, options, kind, **more).answer_ids, make_table(kind))


# ---- drop_duplicates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_TGT_11_duplicates_leave_the_prefix(kind: str) -> None:
    """TGT-11: same label and IoU 0.95 with an earlier object; another label, or less overlap, stays."""
    drop = options_of(unmatched="drop_duplicates")
    pred = [RED, GREEN, RED_AGAIN, NOT_RED]
    assert written(pred, [RED, BLUE], [(0, 0)], drop, kind) == format_objects([RED, GREEN, NOT_RED, BLUE]) + END
    equal = options_of(unmatched="drop_duplicates", duplicate_iou=0.95)
    assert written(pred, [RED, BLUE], [(0, 0)], equal, kind) == format_objects([RED, GREEN, NOT_RED, BLUE]) + END
    strict = options_of(unmatched="drop_duplicates", duplicate_iou=0.96)
    assert written(pred, [RED, BLUE], [(0, 0)], strict, kind) == format_objects([*pred, BLUE]) + END


def test_TGT_11_a_duplicate_of_a_duplicate_alone_stays() -> None:
    """TGT-11: the second red repeats the first and leaves; the third overlaps no object that stays by the threshold."""
    chain = [replace(RED, coords=(x, 0, x + 100, 100)) for x in (0, 30, 60)]  # IoU 0.54 with the next, 0.25 beyond
    kept = format_objects([chain[0], chain[2], GREEN]) + END
    assert written([*chain, GREEN], [GREEN], [(3, 0)], options_of(unmatched="drop_duplicates")) == kept


def test_TGT_11_a_match_is_never_dropped_and_what_it_repeats_stays() -> None:
    """TGT-11: the second red is the matched one; the first, said before it, repeats nothing."""
    drop = options_of(unmatched="drop_duplicates")
    target = rollout_target([RED, RED_AGAIN], [RED_AGAIN], [(1, 0)], drop)
    assert text_of(target.answer_ids, make_table("qwen")) == format_objects([RED, RED_AGAIN]) + END
    assert (target.num_trimmed, target.num_matched, target.num_appended) == (0, 1, 0)


def test_TGT_11_a_rebuilt_prefix_has_natural_tokens_and_its_own_labels() -> None:
    """TGT-11: the ids are those of the whole new text; the matched green learns at its new place, and what follows the
    prefix learns itself, the comma before it included."""
    table = make_table("qwen")
    moved = replace(GREEN, coords=(810, 110, 910, 210))
    target = rollout_target([RED, RED_AGAIN, GREEN], [moved, BLUE], [(2, 0)], options_of(unmatched="drop_duplicates"))
    assert target.answer_ids.tolist() == [*table.encode(format_objects([RED, GREEN, BLUE])), table.eos_id]
    assert target.num_trimmed == 1
    answer = parse_answer(target.answer_ids.tolist(), table)
    assert target.coord_index.tolist() == answer.objects[1].coord_index + answer.objects[2].coord_index
    assert target.coord_target.tolist() == [*moved.coords, *BLUE.coords]
    assert learnt(target, table)[0] == ("]},", "]},") and target.text_index[0] == target.num_prefix
    assert [token for token, _ in learnt(target, table)][-2:] == ["]}]}", END]


def test_TGT_11_an_answer_without_duplicates_keeps_the_models_own_tokens() -> None:
    """TGT-11: nothing to drop: spaces that the model wrote stay, so does a malformed object."""
    table = make_table("qwen")
    text = format_objects([RED])[:-2] + ' , {"desc": 3}, ' + format_objects([GREEN])[len(HEADER) :]
    target = build_target(
        parse_answer(table.encode(text), table), [RED], [(0, 0)], table, options_of(unmatched="drop_duplicates")
    )
    assert text_of(target.answer_ids, table) == text + END


# ---- trim with partial annotation ------------------------------------------------------------------------------------


def test_TGT_12_trim_keeps_predictions_of_labels_that_are_not_annotated() -> None:
    """TGT-12: only circles are annotated, so nobody knows whether the green square is there."""
    table, trim = make_table("qwen"), options_of(unmatched="trim")
    pred = [RED, BLUE, GREEN, BLUE]
    parsed = parse_answer(table.encode(format_objects(pred)), table)
    for annotated, kept in ((None, 1), ({"red circle", "blue circle"}, 3), ({"red circle"}, 4), (set(), 4)):
        target = build_target(parsed, [RED], [(0, 0)], table, trim, annotated)
        assert text_of(target.answer_ids, table) == format_objects(pred[:kept]) + END
        assert target.num_trimmed == 4 - kept


# ---- closing with partial annotation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["end", "order"])
def test_TGT_12_an_answer_does_not_learn_to_close_where_annotation_is_partial(place: str) -> None:
    """TGT-12: blue is missed, so the answer learns to go on to it; what follows it nobody knows."""
    table = make_table("qwen")
    parsed = parse_answer(table.encode(format_objects([RED, GREEN])), table)
    rule = Arrangement(unmatched="drop_duplicates", place=place)
    always, complete = TargetOptions("ignore", rule), TargetOptions("ignore", rule, supervise_closing="complete")
    learns_all = build_target(parsed, [RED, BLUE], [(0, 0)], table, always, {"red circle", "blue circle"})
    for annotated, without in ((None, 0), ({"red circle", "blue circle"}, 2), (set(), 2)):
        target = build_target(parsed, [RED, BLUE], [(0, 0)], table, complete, annotated)
        assert target.answer_ids.tolist() == learns_all.answer_ids.tolist()
        assert learnt(target, table) == learnt(learns_all, table)[: len(learns_all.text_index) - without]
        assert target.coord_index.tolist() == learns_all.coord_index.tolist()
    assert [token for token, _ in learnt(learns_all, table)][-2:] == ["]}]}", END]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_TGT_12_only_the_tokens_that_end_an_answer_lose_their_labels(kind: str, form: str) -> None:
    """TGT-12: in every format; what spells the missed object is learnt up to its last token."""
    table = make_table(kind, form)
    parsed = parse_answer(table.encode(table.format.write([RED])), table)
    rule = TargetOptions(supervise_closing="complete")
    labelled = [
        build_target(parsed, [RED, BLUE], [(0, 0)], table, rule, annotated) for annotated in (None, {"blue circle"})
    ]
    everything, without = (sorted([*target.text_index, *target.coord_index]) for target in labelled)
    gone = everything[len(without) :]
    assert without == everything[: len(without)] and gone[-1] == len(labelled[0].answer_ids) - 1
    data, ends = table.scan_text(labelled[0].answer_ids[:-1])
    closing = table.format.layout(table.format.opening)[1].encode()
    assert data.endswith(closing) and all(ends[i] > len(data) - len(closing) for i in gone[:-1])
    assert gone[0] == 0 or ends[gone[0] - 1] <= len(data) - len(closing)


def test_TGT_12_an_empty_answer_to_a_partly_annotated_image_learns_nothing() -> None:
    """TGT-12: no object of the annotated labels is there; another may be."""
    table, options = make_table("qwen"), TargetOptions(supervise_closing="complete")
    for text in ('{"objects": []}', '{"objects": ['):
        target = build_target(parse_answer(table.encode(text), table), [], [], table, options, {"red circle"})
        assert not len(target.text_index) and not len(target.coord_index)


@pytest.mark.parametrize("opening", ["[", "```json\n[\n\t"])
def test_TGT_12_a_token_that_ends_a_label_and_the_answer_is_learnt_where_it_goes_on(opening: str) -> None:
    """TGT-12: Qwen's own format ends label, object and list in one token. A label that is too short learns to go on
    there; one that is too long does not learn to end, as that would close the answer."""
    table, options = make_table("native", "qwen3vl"), TargetOptions(supervise_closing="complete")
    short, true, long = (replace(RED, desc=desc) for desc in ("red", "red circle", "red circle with a dot"))

    def learns(pred, *missed) -> list[tuple[str, str]]:
        parsed = parse_answer(table.encode(table.format.write([pred], opening)), table)
        target = build_target(parsed, [true, *missed], [(0, 0)], table, options, {"red circle"})
        return [(token, label) for token, label in learnt(target, table) if token != label]

    assert [label for _, label in learns(short)] == [" circle"]
    assert learns(long) == [] != learns(long, BLUE)


def test_TGT_12_a_token_that_ends_a_box_and_the_answer_is_not_learnt_either() -> None:
    """TGT-12: as where the model writes the label first, and the true coordinate has fewer digits."""
    tokenizer = copy.deepcopy(make_tokenizer("native"))
    tokenizer.add_tokens([AddedToken("]}]", normalized=False)])
    table = TokenTable.from_tokenizer(tokenizer, FORMATS["qwen3vl"])
    parsed = parse_answer(table.encode('[{"label": "red", "bbox_2d": [10, 20, 200, 300]}]'), table)
    truth = replace(RED, desc="red", coords=(10, 20, 200, 30))
    found = {}
    for closing in ("always", "complete"):
        target = build_target(parsed, [truth], [(0, 0)], table, TargetOptions(supervise_closing=closing), {"red"})
        found[closing] = [label for token, label in learnt(target, table) if token != label]
    assert found == {"always": ["]}]"], "complete": []}


# ---- redirect --------------------------------------------------------------------------------------------------------


def redirected(pred, gt, matches, annotated=None, **more) -> list[tuple[str, str]]:
    """(token, label) of what the prefix learns."""
    table = make_table("qwen")
    parsed = parse_answer(table.encode(format_objects(pred)), table)
    target = build_target(parsed, gt, matches, table, options_of(unmatched="redirect", **more), annotated)
    missed = [obj for g, obj in enumerate(gt) if g not in {g for _, g in matches}]
    assert text_of(target.answer_ids, table) == format_objects([*pred, *missed]) + END  # nothing is cut
    end = len(table.encode(format_objects(pred)[:-2])) - 1
    assert make_segment("s", [1], target, table)
    return [pair for i, pair in zip(target.text_index, learnt(target, table), strict=True) if i < end]


def test_TGT_11_redirect_learns_the_next_missed_object() -> None:
    """TGT-11: in place of green an expert would write blue; the two differ at the colour, and only there."""
    assert redirected([RED, GREEN], [RED, BLUE], [(0, 0)]) == [("green", "blue")]
    assert redirected([GREEN, RED], [RED, BLUE], [(1, 0)]) == [("green", "blue")]  # first in the list


def test_TGT_11_redirect_learns_to_close_where_nothing_is_left() -> None:
    """TGT-11: behind red nothing is missing, so the token that began green should have closed."""
    assert redirected([RED, GREEN], [RED], [(0, 0)]) == [("]},", "]}]}")]
    table = make_table("qwen")
    empty = [table.bytes_of[token].decode() for token in table.encode(format_objects([]))]
    assert redirected([GREEN], [], []) == [(' [{"', empty[3])] and empty[:3] == ['{"', "objects", '":']


def test_TGT_12_redirect_does_not_learn_to_close_where_annotation_is_partial() -> None:
    """TGT-11, TGT-12: the green circle is wrong, but something else may be in its place; a missed one is learnt."""
    table = make_table("qwen")
    options = TargetOptions("ignore", Arrangement(unmatched="redirect"), supervise_closing="complete")
    parsed = parse_answer(table.encode(format_objects([RED, GREEN])), table)
    circles = {"red circle", label_of(GREEN)}
    target = build_target(parsed, [RED], [(0, 0)], table, options, circles)
    assert not len(target.text_index)
    target = build_target(parsed, [RED, BLUE], [(0, 0)], table, options, circles | {"blue circle"})
    assert ("green", "blue") in learnt(target, table)


def test_TGT_12_redirect_does_not_learn_to_close_in_any_form() -> None:
    """TGT-11, TGT-12: nor to end the answer, where the form has no closing of its own."""
    table = make_table("native", "internvl")
    options = TargetOptions("ignore", Arrangement(unmatched="redirect"), supervise_closing="complete")
    parsed = parse_answer(table.encode(table.format.write([RED, GREEN])), table)
    assert len(parsed.objects) == 2
    circles = {"red circle", label_of(GREEN)}
    right = build_target(parsed, [RED], [(0, 0)], table, options, {"red circle"})
    assert (
        build_target(parsed, [RED], [(0, 0)], table, options, circles).text_label.tolist() == right.text_label.tolist()
    )


def test_TGT_12_redirect_does_not_learn_to_close_before_what_is_neutral() -> None:
    """TGT-11, TGT-12: green is wrong, and blue, of which nobody knows, follows: closing would unlearn it."""
    circles = {"red circle", label_of(GREEN)}
    assert redirected([RED, GREEN, BLUE], [RED], [(0, 0)], annotated=circles) == []
    assert redirected([GREEN, BLUE, BLUE], [], [], annotated=circles) == []  # nothing annotated is there
    assert redirected([RED, BLUE, GREEN], [RED], [(0, 0)], annotated=circles) == [("]},", "]}]}")]  # behind it, closing
    assert redirected([GREEN, BLUE], [RED], [], annotated=circles) == [("green", "red")]  # a missed one, as ever
    assert redirected([GREEN, BLUE, RED], [RED], [(2, 0)], annotated=circles) == [("green", "red")]  # found later


def test_TGT_11_redirect_to_an_object_that_comes_later() -> None:
    """TGT-11: nothing is missed, but red is still to come: it, not the closing, belongs in green's place."""
    assert redirected([GREEN, RED], [RED], [(1, 0)]) == [("green", "red")]


def test_TGT_11_redirect_where_only_a_coordinate_differs() -> None:
    """TGT-11: a red circle at a wrong place: its first coordinate learns that of the missed one, the second nothing."""
    table = make_table("qwen")
    far = replace(RED, coords=(600, 600, 700, 700))
    target = rollout_target([far, GREEN], [RED, GREEN], [(1, 1)], options_of(unmatched="redirect"))
    coords = parse_answer(target.answer_ids.tolist(), table).objects
    assert target.coord_index[0] == coords[0].coord_index[0] and target.coord_target[0] == RED.coords[0]
    assert not set(coords[0].coord_index[1:]) & set(target.coord_index.tolist())


def test_TGT_12_redirect_leaves_labels_alone_that_are_not_annotated() -> None:
    """TGT-12."""
    assert redirected([RED, GREEN], [RED, BLUE], [(0, 0)], annotated={"red circle", "blue circle"}) == []
    assert redirected([RED, GREEN], [RED, BLUE], [(0, 0)], annotated={"green square"}) == [("green", "blue")]


def test_TGT_11_redirect_in_qwens_own_form() -> None:
    """TGT-11: coordinates come first there, as digits; the first digit that differs learns."""
    table = make_table("qwen", "qwen3vl")
    form = FORMATS["qwen3vl"]
    parsed = parse_answer(table.encode(form.write([RED, GREEN])), table)
    target = build_target(parsed, [RED, BLUE], [(0, 0)], table, options_of(unmatched="redirect"))
    assert ("8", "5") in learnt(target, table)  # 800 learns the first digit of 500
    assert text_of(target.answer_ids, table) == form.write([RED, GREEN, BLUE]) + END


@pytest.mark.parametrize("at", [' "', "]},"], ids=["before", "inside"])
def test_TGT_11_redirect_behind_tokens_that_no_tokenizer_makes(at: str) -> None:
    """TGT-11: the model may spell what is one token in several; what differs is still the label's first token."""
    table, redirect = make_table("qwen"), options_of(unmatched="redirect")
    ids = table.encode(format_objects([RED, GREEN]))
    index = [table.bytes_of[token] for token in ids].index(at.encode())
    ids[index : index + 1] = [table.encode(char)[0] for char in at]
    parsed = parse_answer(ids, table)
    target = build_target(parsed, [RED, BLUE], [(0, 0)], table, redirect)
    assert learnt(target, table)[0] == ("green", "blue")


@pytest.mark.parametrize("form", ["qwen3vl", "internvl"])  # without coordinate tokens, where text begins anew
def test_TGT_11_redirect_tokenizes_no_more_than_two_objects_at_a_time(form: str, monkeypatch) -> None:
    """TGT-11: a long answer of wrong objects takes time in proportion to its length."""
    table = make_table("qwen", form)
    pred = [replace(RED, coords=(i, i, i, i)) for i in range(99)]
    parsed = parse_answer(table.encode(table.format.write(pred)), table)
    encode, sizes = table.encode, []
    monkeypatch.setattr(table, "encode", lambda text: sizes.append(len(text)) or encode(text))
    target = build_target(parsed, [BLUE], [], table, options_of(unmatched="redirect"))
    assert len(target.text_index) > 99 and len(sizes) >= 99
    assert max(sizes) < 3 * len(table.format.write([BLUE]))


# ---- place, label_context --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_TGT_15_missed_objects_stand_where_the_data_puts_them(kind: str) -> None:
    """TGT-15: each behind the object before it in the data, the first one first; unmatched ones keep their place."""
    order = options_of(place="order")
    assert written([GREEN], [RED, GREEN, BLUE], [(0, 1)], order, kind) == format_objects([RED, GREEN, BLUE]) + END
    far = replace(RED, coords=(1, 1, 2, 2))
    assert (
        written([GREEN, far, RED], [RED, BLUE, GREEN], [(0, 2), (2, 0)], order, kind)
        == format_objects([GREEN, far, RED, BLUE]) + END
    )
    assert written([far, GREEN], [RED, BLUE, GREEN], [(1, 2)], order, kind) == (
        format_objects([RED, BLUE, far, GREEN]) + END
    )
    # Green precedes `far` in the data, though red stands behind green in the answer.
    assert written([GREEN, RED], [RED, BLUE, GREEN, far], [(0, 2), (1, 0)], order, kind) == (
        format_objects([GREEN, far, RED, BLUE]) + END
    )


def test_TGT_15_labels_are_as_if_the_sequence_had_been_generated_so() -> None:
    """TGT-15: the inserted blue learns itself with the comma before it, the matched ones their coordinates."""
    table = make_table("qwen")
    target = rollout_target([RED, GREEN], [RED, BLUE, GREEN], [(0, 0), (1, 2)], options_of(place="order"))
    text = format_objects([RED, BLUE, GREEN])
    assert target.answer_ids.tolist() == [*table.encode(text), table.eos_id]
    answer = parse_answer(target.answer_ids.tolist(), table)
    assert target.coord_index.tolist() == [i for obj in answer.objects for i in obj.coord_index]
    assert target.coord_target.tolist() == [*RED.coords, *BLUE.coords, *GREEN.coords]
    ends, blue = answer.prefix_ends, answer.objects[1]
    inside = [i for i in range(len(ends)) if blue.lead < ends[i] and (ends[i - 1] < blue.byte_span[1])]
    texts = [i for i in inside if i not in blue.coord_index]
    num_closing = 2  # `]}]}` and the end token
    assert target.text_index.tolist() == [*texts, *range(len(target.answer_ids) - num_closing, len(target.answer_ids))]
    assert (target.text_label == target.answer_ids[target.text_index]).all()
    assert target.num_appended == 1 and target.num_prefix == texts[0]


def test_TGT_15_an_inserted_object_does_not_teach_to_go_on_to_a_false_positive() -> None:
    """TGT-15, TGT-6: as a matched one does not, where a token ends the object and goes on to the next."""
    order, table = options_of(place="order"), make_table("qwen")
    inserted = rollout_target([RED, GREEN], [RED, BLUE], [(0, 0)], order)
    before_a_match = rollout_target([RED, GREEN], [RED, BLUE, GREEN], [(0, 0), (1, 2)], order)
    assert inserted.num_appended == 1 and learnt(inserted, table).count(("]},", "]},")) == 1  # before blue
    assert learnt(before_a_match, table).count(("]},", "]},")) == 2


def test_TGT_15_a_missed_object_at_the_front_does_not_learn_the_models_own_header() -> None:
    """TGT-15: the header is the model's; the first token learnt is the first that is blue's alone."""
    table = make_table("qwen")
    target = rollout_target([GREEN], [BLUE, GREEN], [(0, 1)], options_of(place="order"))
    assert learnt(target, table)[0] == (' [{"', ' [{"')  # the bracket's token reaches into the object
    assert learnt(target, table)[1] == ("desc", "desc")


@pytest.mark.parametrize("kind", KINDS)
def test_TGT_13_the_true_label_is_written_and_learnt_whole(kind: str) -> None:
    """TGT-13: two tokens differ; with `own` only the first is learnt."""
    table = make_table(kind)
    gt = replace(RED, desc="blue square")
    own = rollout_target([RED, GREEN], [gt], [(0, 0)], options_of("correct"), kind)
    true = rollout_target([RED, GREEN], [gt], [(0, 0)], options_of("correct", label_context="truth"), kind)
    assert text_of(own.answer_ids, table).startswith(HEADER + '{"desc": "red circle"')
    assert text_of(true.answer_ids, table) == format_objects([gt, GREEN]) + END
    labels = [label for _, label in learnt(true, table)]
    assert "blue square" in "".join(labels) and all(a == b for a, b in learnt(true, table))
    assert true.coord_target.tolist() == list(RED.coords)


def test_TGT_13_TGT_11_what_repeats_a_true_label_leaves_the_prefix() -> None:
    """TGT-13, TGT-11: with its true label the first object is what the second one names again."""
    wrong, again = replace(RED, desc="blue circle"), RED_AGAIN
    for context, left in (("truth", 1), ("own", 2)):
        options = options_of(unmatched="drop_duplicates", label_context=context)
        target = rollout_target([wrong, again], [RED], [(0, 0)], options)
        assert target.num_trimmed == 2 - left
        assert len(parse_answer(target.answer_ids[:-1].tolist(), make_table("qwen")).objects) == left


# ---- text that cannot be written anew --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["coord_tokens", "qwen3vl"])
@pytest.mark.parametrize(
    "rule", [{"place": "order"}, {"label_context": "truth"}, {"unmatched": "drop_duplicates"}], ids=str
)
def test_TGT_2_a_label_that_spells_a_special_token_is_not_written_anew(form: str, rule: dict) -> None:
    """TGT-2: JSON escapes `<|`, but there are special tokens without it. The model's own tokens stay."""
    tokenizer = copy.deepcopy(make_tokenizer("qwen"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image_pad|>", "<img>"]})
    table = TokenTable.from_tokenizer(tokenizer, FORMATS[form])
    write, odd = table.format.write, replace(RED, desc="an <img>")
    before, after = write([odd, GREEN, GREEN]).split("<img>")
    ids = [*table.encode(before), *table.spell(b"<img>"), *table.encode(after)]
    parsed = parse_answer(ids, table)
    assert parsed.pred_objects == [odd, GREEN, GREEN] and parsed.closed
    target = build_target(parsed, [BLUE, replace(GREEN, desc="box")], [(1, 1)], table, options_of(**rule))
    assert text_of(target.answer_ids, table) == write([odd, GREEN, GREEN, BLUE]) + END
    assert target.answer_ids.tolist()[: target.num_prefix - 1] == ids[: target.num_prefix - 1]
    assert parse_answer(target.answer_ids.tolist(), table).pred_objects == [odd, GREEN, GREEN, BLUE]
    assert (target.num_trimmed, target.num_matched, target.num_appended) == (0, 1, 1)
    assert make_segment("s", [5], target, table)


# ---- properties ------------------------------------------------------------------------------------------------------

arrangements = st.builds(
    Arrangement,
    st.sampled_from(["keep", "drop_duplicates", "trim", "redirect"]),
    st.sampled_from([0.3, 0.9]),
    st.sampled_from(["end", "order"]),
    st.sampled_from(["own", "truth"]),
)
malformed = st.sampled_from([text for texts in MALFORMED.values() for text in texts if len(text) < 1000])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.one_of(wild_objects, malformed), max_size=5),
    gt=st.lists(wild_objects, max_size=3),
    arrangement=arrangements,
    structure=st.booleans(),
    repeat=st.booleans(),
    is_partial=st.booleans(),
    seed=st.integers(0, 99),
)
def test_TGT_15_any_target_reads_back(kind, parts, gt, arrangement, structure, repeat, is_partial, seed) -> None:
    """TGT-5, TGT-11 to TGT-15: what is written is what the rules say, and closed; every label lies in the answer; the
    closing learns itself; no object learns but a match, a missed one, or one that is redirected."""
    table, rng = make_table(kind), random.Random(seed)
    texts = [part if isinstance(part, str) else format_objects([part])[len(HEADER) : -2] for part in parts]
    texts += texts[:1] * repeat
    parsed = parse_answer(table.encode(HEADER + ", ".join(texts) + "]}"), table)
    pred = parsed.pred_objects
    num_pairs = rng.randint(0, min(len(pred), len(gt)))
    matches = list(
        zip(sorted(rng.sample(range(len(pred)), num_pairs)), rng.sample(range(len(gt)), num_pairs), strict=True)
    )
    annotated = {label_of(obj) for obj in pred[::2]} if is_partial else None
    options = TargetOptions("correct", arrangement, structure)
    target = build_target(parsed, gt, matches, table, options, annotated)
    assert make_segment("s", [5], target, table)
    again = parse_answer(target.answer_ids.tolist(), table)
    assert again.closed and target.answer_ids[-1] == table.eos_id

    found = again.pred_objects
    missed = [obj for g, obj in enumerate(gt) if g not in {g for _, g in matches}]
    assert len(found) == len(pred) - target.num_trimmed + len(missed)
    if arrangement.place == "end":
        assert found[len(found) - len(missed) :] == missed
    if arrangement.label_context == "own":
        left = list(found)
        for obj in [*missed, *(pred[p] for p, _ in matches)]:
            left.remove(obj)  # they are all there
    if arrangement.unmatched in ("keep", "redirect"):
        assert target.num_trimmed == 0
    # The closing and the end token always learn themselves.
    closing = {len(target.answer_ids) - 1, len(target.answer_ids) - 2}
    assert closing <= set(target.text_index.tolist())
    labelled = dict(zip(target.text_index.tolist(), target.text_label.tolist(), strict=True))
    assert all(labelled[i] == target.answer_ids[i] for i in closing)
    # One label at most for every token.
    assert not set(target.text_index.tolist()) & set(target.coord_index.tolist())
    num_learnt = len(matches) + len(missed) + (arrangement.unmatched == "redirect") * len(pred)
    per_object = [len(set(obj.coord_index) & set(target.coord_index.tolist())) for obj in again.objects]
    assert sum(count > 0 for count in per_object) <= num_learnt
    assert np.isfinite(target.coord_target).all()
