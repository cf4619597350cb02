"""InternVL's own answer form (FAM-4): `<ref>label</ref><box>[[x1, y1, x2, y2], ...]</box>` in plain text.

`tags` has the four tags as special tokens, as released tokenizers do; in `native` and `fused` they are plain text.
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
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from tests.answers import make_table, make_tokenizer
from utils.answer_format import INTERNVL, QWEN3VL
from utils.credit import close_decision, go_on_decision, object_decision, token_decisions
from utils.data.encoding import special_words
from utils.data.samples import DataError, LineReader, load_samples
from utils.detection_rewards import detection_parse
from utils.drafts import Arrangement
from utils.geometry import Object
from utils.parsing import ParsedAnswer, parse_answer
from utils.rewards import Completion
from utils.scores import count_sample
from utils.targets import TargetOptions, build_target, check_segment, ground_truth_target, make_segment
from utils.token_table import TokenTable

TOKENIZERS = ["tags", "native", "fused"]
DOG, CAT = Object("dog", "bbox_2d", (58, 9, 211, 158)), Object("black cat", "bbox_2d", (0, 99, 1000, 105))
CAR = Object("car", "bbox_2d", (500, 500, 700, 700))
PACK = Object("dog", "bbox_2d", (1, 2, 3, 4))
TWO_DOGS = "<ref>dog</ref><box>[[58, 9, 211, 158], [1, 2, 3, 4]]</box>"

tags_free = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda text: text.strip() and not any(tag in text for tag in INTERNVL.tags)
)
numbers = st.integers(0, 1000)
boxes = st.tuples(numbers, numbers, numbers, numbers).map(lambda c: (*map(min, c[:2], c[2:]), *map(max, c[:2], c[2:])))
objects = st.builds(Object, tags_free, st.just("bbox_2d"), boxes)


@functools.cache
def table_of(kind: str = "tags") -> TokenTable:
    if kind != "tags":
        return make_table(kind, "internvl")
    tokenizer = copy.deepcopy(make_tokenizer("native"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image_pad|>", *INTERNVL.tags]})
    return TokenTable.from_tokenizer(tokenizer, INTERNVL)


def parse_text(text: str, kind: str = "tags") -> ParsedAnswer:
    return parse_answer(table_of(kind).encode(text), table_of(kind))


def text_of(ids, kind: str = "tags") -> str:
    return b"".join(table_of(kind).bytes_of[token] for token in ids).decode()


def learnt(target, kind: str = "tags") -> dict[int, str]:
    """What is learnt in place of each token: index -> text."""
    return {int(i): text_of([label], kind) for i, label in zip(target.text_index, target.text_label, strict=True)}


# ---- reading --------------------------------------------------------------------------------------------------------

RELEASED = {
    TWO_DOGS: [DOG, PACK],
    "<ref>black cat</ref><box>[[0,99,1000,105]]</box>": [CAT],
    "Sure, I will detect and label all objects.\n\n<ref>dog</ref><box>[[58, 9, 211, 158]]</box>\n"
    "<ref>car</ref><box>[[500, 500, 700, 700]]</box>": [DOG, CAR],
    "In the image a <ref>car</ref><box>[[500, 500, 700, 700]]</box> passes a <ref>dog</ref> "
    "<box>[[58, 9, 211, 158], [1, 2, 3, 4]]</box>, which barks.": [CAR, DOG, PACK],
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", RELEASED)
def test_answers_as_released_models_write_them_are_read_FAM_4(kind, text):
    parsed = parse_text(text, kind)
    assert parsed.pred_objects == RELEASED[text] and parsed.closed and not parsed.dropped
    assert text_of(parsed.prefix_ids, kind) == text[: text.rindex(">") + 1]
    table = table_of(kind)
    ends = np.cumsum([len(table.bytes_of[token]) for token in parsed.prefix_ids])
    data = text.encode()
    for pred in parsed.objects:
        assert data[slice(*pred.desc_bytes)].decode() == pred.object.desc
        assert tuple(int(data[slice(*span)]) for span in pred.coord_bytes) == pred.object.coords
        for token, (start, _) in zip(pred.coord_index, pred.coord_bytes, strict=True):
            assert ends[token] > start and (token == 0 or ends[token - 1] <= start)
    spans = [pred.byte_span for pred in parsed.objects]
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))


def test_an_answer_that_came_to_its_limit_is_not_whole_GRP_9_LRN_7():
    """GRP-9, LRN-7: between two objects, and without any, tags look whole wherever they end."""
    table, nothing = table_of(), SimpleNamespace(objects=[], annotated=None)
    for text in ("a street and a street and", INTERNVL.write_object(CAR)):
        ids = table.encode(text)
        assert count_sample(parse_answer(ids, table), [], 0.5, truncated=False)["parsed"] == 1
        assert count_sample(parse_answer(ids, table), [], 0.5, truncated=True)["parsed"] == 0
        for limit, reward in ((len(ids), 0), (len(ids) + 1, 1), (None, 1)):
            assert detection_parse(Completion(text, ids, table, 0.5, limit), nothing) == reward


def test_the_tags_end_no_answer_but_other_special_tokens_do_FAM_4():
    table = table_of()
    tags = [table.encode(tag) for tag in INTERNVL.tags]
    assert all(len(ids) == 1 and ids[0] not in table.stop_ids for ids in tags)
    assert parse_text("<ref>dog</ref><box>[[1, 2, 3, 4]]</box><|im_end|>" + TWO_DOGS).pred_objects == [PACK]
    assert parse_text("<ref>dog</ref><box>[[1, 2, 3, 4]]</box><|image_pad|>" + TWO_DOGS).pred_objects == [PACK]


BAD = {
    "coord_not_number": ["<ref>a</ref><box>null</box>", "<ref>a</ref><box>[[1, 2, x, 4]]</box>"],
    "wrong_count": ["<ref>a</ref><box>[[1, 2, 3]]</box>", "<ref>a</ref><box>[[]]</box>"],
    "out_of_range": ["<ref>a</ref><box>[[1, 2, 3, 1001]]</box>"],
    "reversed_box": ["<ref>a</ref><box>[[3, 2, 1, 4]]</box>"],
    "empty_desc": ["<ref> </ref><box>[[1, 2, 3, 4]]</box>"],
    "unclosed": ["<ref>a", "<ref>a</ref> and ", "<ref>a</ref><box>[[1, 2,"],
    "stray_text": ["</ref>", "<box>", "</box>"],
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(("reason", "bad"), [(reason, bad) for reason, texts in BAD.items() for bad in texts])
def test_what_is_malformed_harms_no_other_object_FAM_4(kind, reason, bad):
    one, other = INTERNVL.write_object(DOG), INTERNVL.write_object(CAR)
    parsed = parse_text(f"{one}\n{bad}\n{other}", kind)
    assert parsed.pred_objects == [DOG, CAR] and set(parsed.dropped) <= {reason, "stray_text"} and parsed.dropped
    assert parsed.closed


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(written=st.lists(objects, max_size=5))
def test_what_is_written_is_read_FAM_4(kind, written):
    table = table_of(kind)
    target = ground_truth_target(written, table, TargetOptions())
    assert text_of(target.answer_ids, kind) == "\n".join(map(INTERNVL.write_object, written)) + "<|im_end|>"
    assert parse_answer(target.answer_ids.tolist(), table).pred_objects == written
    assert target.text_index.tolist() == list(range(len(target.answer_ids)))


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 700), max_size=60), kind=st.sampled_from(TOKENIZERS))
def test_random_tokens_never_raise_FAM_4(ids, kind):
    table = table_of(kind)
    parsed = parse_answer(ids, table)
    assert parse_answer(parsed.prefix_ids, table).pred_objects == parsed.pred_objects


# ---- cutting and continuing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_cut_at_every_token_keeps_the_whole_boxes_and_goes_on_in_the_same_form_FAM_4(kind):
    table = table_of(kind)
    text = f"I see:\n{TWO_DOGS}\n{INTERNVL.write_object(CAT)}"
    ids = table.encode(text)
    for num in range(len(ids) + 1):
        parsed = parse_answer(ids[:num], table)
        seen = text_of(ids[:num], kind)
        whole = [DOG, PACK, CAT][: len(re.findall(r"\[\d+, \d+, \d+, \d+\]", seen))]
        assert parsed.pred_objects == whole
        is_partial_tag = kind != "tags" and re.search(r"</?(?:r|re|ref|b|bo|box)?$", seen)
        if not is_partial_tag:
            assert parsed.closed == (seen.count("<ref>") == seen.count("</box>"))
        target = build_target(parsed, [*whole, CAR], [(i, i) for i in range(len(whole))], table, TargetOptions())
        assert parse_answer(target.answer_ids.tolist(), table).pred_objects == [*whole, CAR]
        if whole:
            opened = text[: text.index(str(list(whole[-1].coords))) + len(str(list(whole[-1].coords)))]
            assert text_of(target.answer_ids, kind) == f"{opened}]</box>\n{INTERNVL.write_object(CAR)}<|im_end|>"
        check_segment(make_segment("s", [1, 2], target, table), table)


ARRANGEMENTS = [
    Arrangement(unmatched=unmatched, place=place, label_context=context)
    for unmatched in ("keep", "drop_duplicates", "trim", "redirect")
    for place in ("end", "order")
    for context in ("own", "truth")
    if unmatched != "redirect" or (place, context) == ("end", "own")
]


def written_text(rng: random.Random, said: list[Object]) -> str:
    """Objects as a model may write them: neighbours of one label share their tags, anything stands between."""
    text, at = rng.choice(["", "I see ", "\n"]), 0
    while at < len(said):
        size = next((i for i in range(at, len(said)) if said[i].desc != said[at].desc), len(said)) - at
        size = rng.randint(1, size)
        lists = rng.choice([", ", ","]).join(f"[{', '.join(map(str, o.coords))}]" for o in said[at : at + size])
        text += f"<ref>{said[at].desc}</ref><box>[{lists}]</box>" + rng.choice(["\n", ", ", " and ", ""])
        at += size
    return text


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(
    said=st.lists(st.builds(Object, st.sampled_from(["dog", "猫", "a < b"]), st.just("bbox_2d"), boxes), max_size=6),
    gt=st.lists(objects, max_size=3),
    rule=st.sampled_from(ARRANGEMENTS),
    structure=st.booleans(),
    cut=st.integers(0, 60),
    seed=st.integers(0, 99),
)
def test_any_target_reads_back_as_what_it_should_hold_FAM_4(kind, said, gt, rule, structure, cut, seed):
    table, rng = table_of(kind), random.Random(seed)
    ids = table.encode(written_text(rng, said))
    parsed = parse_answer(ids[: max(0, len(ids) - cut)] if cut < 30 else ids, table)
    num_pairs = rng.randint(0, min(len(parsed.objects), len(gt)))
    chosen = sorted(rng.sample(range(len(parsed.objects)), num_pairs))
    matches = list(zip(chosen, rng.sample(range(len(gt)), num_pairs), strict=True))
    target = build_target(parsed, gt, matches, table, TargetOptions(arrangement=rule, supervise_structure=structure))
    check_segment(make_segment("s", [5, 6], target, table), table)
    again = parse_answer(target.answer_ids.tolist(), table).pred_objects
    assert len(again) == len(parsed.objects) - target.num_trimmed + target.num_appended
    missed = [obj for g, obj in enumerate(gt) if g not in {g for _, g in matches}]
    assert not {id(obj) for obj in missed if obj not in again}
    if rule == Arrangement():
        assert again == parsed.pred_objects + missed


# ---- what is learnt -------------------------------------------------------------------------------------------------


def test_labels_and_numbers_of_matched_objects_are_learnt_up_to_the_first_difference_TGT_6_TGT_9_FAM_4():
    """Two boxes share the label, which the first one's partner decides."""
    parsed = parse_text(TWO_DOGS)
    gt = [Object("cat", "bbox_2d", (59, 9, 211, 158)), Object("fox", "bbox_2d", (1, 2, 3, 4))]
    target = build_target(parsed, gt, [(0, 0), (1, 1)], table_of(), TargetOptions())
    own = [text_of([token]) for token in target.answer_ids]
    found = learnt(target)
    label = own.index("</ref>") - 1  # the first token of "dog", however it is split
    while own[label - 1] != "<ref>":
        label -= 1
    assert "cat".startswith(found[label]) and found[label] != own[label]
    assert label + 1 not in found  # behind a wrong token nothing more of this value is learnt
    digits = own.index("5")
    assert [found.get(digits + k) for k in range(3)] == ["5", "9", None]  # 58 should be 59
    assert own[-1] == "<|im_end|>" and found[len(own) - 1] == "<|im_end|>"  # closing is learnt, and nothing in between
    assert "fox" not in "".join(found.values())


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_redirect_learns_to_close_or_to_write_the_next_missed_object_TGT_11_FAM_4(kind):
    """The second dog does not exist. With an object missed, its tags are closed and another `<ref>` opened; without, an
    expert closes them and ends the answer."""
    rule = TargetOptions(arrangement=Arrangement(unmatched="redirect"))
    table = table_of(kind)
    for gt in ([DOG, CAR], [DOG]):
        target = build_target(parse_text(TWO_DOGS, kind), gt, [(0, 0)], table, rule)
        expert = table.encode(
            TWO_DOGS.replace(", [1, 2, 3, 4]", "") + ("\n" + INTERNVL.write_object(CAR)) * (len(gt) - 1)
        )
        at = next(i for i, (a, b) in enumerate(zip(expert, target.answer_ids, strict=False)) if a != b)
        assert learnt(target, kind)[at] == text_of([expert[at]], kind)
    alone = INTERNVL.write_object(DOG) + "\n" + INTERNVL.write_object(CAT)
    target = build_target(parse_text(alone, kind), [DOG], [(0, 0)], table, rule)
    at = next(i for i in range(len(target.answer_ids)) if "</box>" in text_of(target.answer_ids[: i + 1], kind)) + 1
    assert learnt(target, kind)[at] == "<|im_end|>"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_wrong_first_object_behind_prose_learns_its_own_tag_s_text_TGT_11_FAM_4(kind):
    """TGT-11: no object lies before it, so nothing parts them."""
    rule, table = TargetOptions(arrangement=Arrangement(unmatched="redirect")), table_of(kind)
    text = "I see " + INTERNVL.write_object(CAT)
    target = build_target(parse_text(text, kind), [DOG], [], table, rule)
    expert, ids = table.encode("I see " + INTERNVL.write_object(DOG)), target.answer_ids.tolist()
    at = next(i for i, (a, b) in enumerate(zip(expert, ids, strict=False)) if a != b)
    found = learnt(target, kind)
    assert min(found) == at and found[at] == text_of([expert[at]], kind)


def test_a_list_that_breaks_off_behind_a_box_lost_nothing_TGT_3_FAM_4():
    """TGT-3: no box was begun; and a malformed one does not belong to the object before it."""
    whole = INTERNVL.write_object(DOG)
    for text in (whole.removesuffix("]</box>"), whole.removesuffix("]</box>") + ", "):
        parsed = parse_text(text)
        assert parsed.pred_objects == [DOG] and parsed.dropped == {}
    parsed = parse_text(whole.replace("]]</box>", "], [9, 9]]</box>"))
    assert parsed.pred_objects == [DOG] and parsed.dropped == {"wrong_count": 1}
    assert parsed.objects[0].byte_span[1] == len(whole.removesuffix("]</box>"))
    assert parsed.prefix_bytes.endswith(b"[9, 9]]</box>")


def test_dropped_duplicates_leave_no_open_tags_TGT_13_FAM_4():
    rule = TargetOptions(arrangement=Arrangement(unmatched="drop_duplicates"))
    text = "I see <ref>dog</ref><box>[[58, 9, 211, 158], [58, 9, 211, 159], [1, 2, 3, 4]]</box>"
    target = build_target(parse_text(text), [DOG], [(0, 0)], table_of(), rule)
    written = "I see " + INTERNVL.write_object(DOG) + "\n" + INTERNVL.write_object(PACK) + "<|im_end|>"
    assert text_of(target.answer_ids) == written and target.num_trimmed == 1


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_models_own_opening_is_kept_and_not_learnt_TGT_3_FAM_4(kind):
    """Nothing usable behind it, or an answer that is written anew. It is longer in bytes than in characters."""
    table, opening = table_of(kind), "猫がいます、crème brûlée:\n"
    rule = TargetOptions(arrangement=Arrangement(unmatched="drop_duplicates"))
    repeated = INTERNVL.write_object(DOG) * 2
    for text, gt, matches in ((opening + "<ref>do", [CAR], []), (opening + repeated, [DOG, CAR], [(0, 0)])):
        target = build_target(parse_text(text, kind), gt, matches, table, rule)
        assert text_of(target.answer_ids, kind) == INTERNVL.write(gt, opening) + "<|im_end|>"
        before = text_of(target.answer_ids[: target.text_index[0]], kind)
        assert before.rstrip("<") in (opening, opening.rstrip()) or matches and before.startswith(opening)


@pytest.mark.parametrize("arrangement", [Arrangement(), Arrangement(unmatched="drop_duplicates", place="order")])
def test_an_opening_that_the_tokenizer_composes_is_as_long_as_it_is_written_TGT_6_FAM_4(arrangement):
    """Accents apart from their letters become one character (NFC), as in Qwen's tokenizers."""
    tokenizer = copy.deepcopy(make_tokenizer("native"))
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    table = TokenTable.from_tokenizer(tokenizer, INTERNVL)
    apart = unicodedata.normalize("NFD", "Caféééé: ")
    parsed = parse_answer(
        table.spell((apart + INTERNVL.write_object(CAR) + INTERNVL.write_object(CAR)).encode()), table
    )
    for prediction, gt in (
        (parsed, [DOG, CAR]),
        (parse_answer(table.spell((apart + "<ref>ca").encode()), table), [DOG]),
    ):
        matches = [(0, 1)] if prediction.objects else []
        options = TargetOptions(label="ignore", arrangement=arrangement)
        target = build_target(prediction, gt, matches, table, options)
        learnt_text = b"".join(table.bytes_of[i] for i in target.answer_ids[target.text_index]).decode()
        assert INTERNVL.write_object(DOG) in learnt_text, learnt_text


def test_a_list_whose_label_is_not_annotated_may_have_more_boxes_TGT_12_FAM_4():
    """TGT-12, `supervise_closing: complete`: nothing ends it, whoever wrote its boxes. That of an annotated label is
    ended."""
    options = TargetOptions(supervise_closing="complete")
    for label, ends_list in (("red", False), ("blue", True)):
        text = f"<ref>{label}</ref><box>[[1, 2, 3, 4], [5, 6, 7, 8], [9, 1"
        found = Object(label, "bbox_2d", (1, 2, 3, 4))
        for arrangement in (Arrangement(), Arrangement(place="order")):
            own = replace(options, arrangement=arrangement)
            target = build_target(parse_text(text, "native"), [found], [(0, 0)], table_of("native"), own, {"blue"})
            closing = text_of(target.answer_ids[target.text_index], "native").endswith("]</box>")
            assert closing == ends_list and text_of(target.answer_ids, "native").endswith("]]</box><|im_end|>")


SPELLED = "<|im_end|>"  # as a model writes it in ordinary tokens
REWRITES = [rule for rule in ARRANGEMENTS if rule != Arrangement()]


def spelled_ids(text: str, kind: str) -> list[int]:
    """The ids of an answer in which every `SPELLED` is made of ordinary tokens."""
    table = table_of(kind)
    first, *others = map(table.encode, text.split(SPELLED))
    return first + [token for ids in others for token in [*table.spell(SPELLED.encode()), *ids]]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("rule", REWRITES, ids=str)
def test_a_label_that_spells_a_special_token_is_not_written_anew_TGT_2_FAM_4(kind, rule):
    """TGT-2: written anew, it would end the answer. The model's own tokens stay, and missed objects follow."""
    table, odd = table_of(kind), Object(f"a {SPELLED}", "bbox_2d", (1, 2, 3, 4))
    text = "\n".join(map(INTERNVL.write_object, [odd, CAT, CAT, DOG]))
    ids, gt = spelled_ids(text, kind), [CAR, CAT, replace(DOG, desc="fox")]
    parsed, matches = parse_answer(ids, table), [(1, 1), (3, 2)]
    assert parsed.pred_objects == [odd, CAT, CAT, DOG]
    target = build_target(parsed, gt, matches, table, TargetOptions(arrangement=rule))
    num_exact = parsed.num_exact - 8  # some tokens at the cut are written with what follows
    assert target.answer_ids.tolist()[:num_exact] == ids[:num_exact]
    assert parse_answer(target.answer_ids.tolist(), table).pred_objects == [odd, CAT, CAT, DOG, CAR]
    assert (target.num_trimmed, target.num_matched, target.num_appended) == (0, 2, 1)
    assert "".join(learnt(target, kind).values()).endswith(f"{INTERNVL.write_object(CAR)}<|im_end|>")
    check_segment(make_segment("s", [1, 2], target, table), table)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("rule", ARRANGEMENTS, ids=str)
def test_an_opening_that_spells_a_special_token_never_becomes_one_TGT_2_FAM_4(kind, rule):
    """TGT-2: before objects it stays in the model's own tokens; where none of these are left, it goes."""
    table, opening = table_of(kind), f"I {SPELLED} see "
    two = opening + INTERNVL.write_object(DOG) * 2
    for text, gt, matches in ((opening + "<ref>do", [CAR], []), (two, [CAR], []), (two, [CAR, DOG], [(0, 1)])):
        parsed = parse_answer(spelled_ids(text, kind), table)
        target = build_target(parsed, gt, matches, table, TargetOptions(arrangement=rule))
        num_kept = len(parsed.objects) - target.num_trimmed
        assert parse_answer(target.answer_ids.tolist(), table).pred_objects == [DOG] * num_kept + [CAR]
        assert (target.answer_ids == table.eos_id).sum() == 1


@pytest.mark.parametrize("place", ["end", "order"])
def test_a_special_token_in_the_data_is_still_refused_FAM_4(place):
    """The user's text, unlike the model's, can be reworded."""
    options = TargetOptions(arrangement=Arrangement(place=place))
    with pytest.raises(ValueError, match="a desc of the ground truth spells a special token: .* reword it"):
        build_target(parse_text(TWO_DOGS), [replace(CAR, desc=SPELLED), DOG], [(0, 1)], table_of(), options)
    with pytest.raises(ValueError, match="a desc of the ground truth spells a special token: .* reword it"):
        build_target(parse_text(TWO_DOGS), [replace(DOG, desc=SPELLED)], [(0, 0)], table_of(), options)  # as a label


def test_a_malformed_label_that_is_closed_stays_before_what_is_appended_TGT_3_FAM_4():
    text = INTERNVL.write_object(DOG) + "<ref>a</ref><box>[[1, x]]</box>"
    target = build_target(parse_text(text), [DOG, CAR], [(0, 0)], table_of(), TargetOptions())
    assert text_of(target.answer_ids) == text + "\n" + INTERNVL.write_object(CAR) + "<|im_end|>"


def test_credit_of_objects_goes_to_their_own_tokens_GRP_8_FAM_4():
    """The second dog's box and the comma before it; `<ref>` of the car; what is behind the last tag closes."""
    table = table_of()
    ids = table.encode(TWO_DOGS + INTERNVL.write_object(CAR) + ".")
    decisions = token_decisions(Completion(text_of(ids), ids, table), len(ids) + 1)
    texts: dict[int, str] = {}
    for token, decision in zip(ids, decisions.tolist(), strict=False):
        texts[decision] = texts.get(decision, "") + text_of([token])
    assert [texts[go_on_decision(k)] for k in range(3)] == ["<ref>", "], [", "<ref>"]
    assert "1, 2, 3, 4" in texts[object_decision(1)] and texts[object_decision(2)].endswith("</box>")
    assert texts[close_decision(3)] == "." and decisions[-1] == close_decision(3)
    assert len(texts) == 7  # nothing is the rest


# ---- data -----------------------------------------------------------------------------------------------------------


def test_a_label_that_holds_a_tag_is_refused_with_its_line_DAT_1_FAM_4(tmp_path):
    row = {"id": "a", "images": [], "width": 10, "height": 10, "objects": [{"desc": "dog", "bbox_2d": [1, 1, 2, 2]}]}
    bad = row | {"objects": [*row["objects"], {"desc": "a <box>", "bbox_2d": [1, 1, 2, 2]}]}
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(bad) + "\n")
    with pytest.raises(DataError, match=r"train.jsonl:2: objects\[1\].desc: 'a <box>' holds one of <ref>") as error:
        load_samples([path], "Find.", reader=LineReader("Find.", form=INTERNVL))
    assert "reword it" in str(error.value)
    assert load_samples([path], "Find.")[0]
    with pytest.raises(ValueError, match="holds one of"):
        INTERNVL.write_object(Object("a </ref>", "bbox_2d", (1, 1, 2, 2)))


def test_a_label_that_spells_a_special_token_is_refused_with_its_line_DAT_3_FAM_4(tmp_path):
    """DAT-3: it would end the run when its object is written. JSON escapes `<|`, and takes these."""
    tokenizer = SimpleNamespace(added_tokens_decoder={1: AddedToken("<img>", special=True), 2: AddedToken("<s>")})
    tokenizer.added_tokens_decoder[3] = AddedToken("<box>", special=True)
    tokenizer.added_tokens_decoder[4] = AddedToken("<|im_end|>", special=True)
    special, of_json = (special_words(SimpleNamespace(tokenizer=tokenizer), form) for form in (INTERNVL, QWEN3VL))
    assert special == ("<img>", "<|im_end|>") and of_json == ("<img>", "<box>")
    row = {"images": [], "width": 10, "height": 10, "objects": [{"desc": "an <img> tag", "bbox_2d": [1, 1, 2, 2]}]}
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"train.jsonl:1: objects\[0\].desc: 'an <img> tag' spells a special token"):
        load_samples([path], reader=LineReader("Find.", form=INTERNVL, special=special))
    assert load_samples([path], reader=LineReader("Find.", form=INTERNVL))[0]
