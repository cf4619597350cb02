"""Sheets of answers parsed as in a run: facts in the JSON file, colours in the picture, awkward samples."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.answers import make_table
from utils.data.samples import Sample
from utils.geometry import Object, iou_matrix
from utils.matching import match
from utils.parsing import parse_answer
from utils.rollout.backend import RolloutResult
from utils.run import sample_sheets
from utils.run.monitor import Monitor
from utils.run.sample_sheets import Example, SampleDump, marked_text, safe_name, token_records
from utils.run.trackers import RunFacts
from utils.targets import TargetOptions, build_target, format_objects

RED = Object("red circle", "bbox_2d", (100, 200, 300, 400))
RED_OFF = Object("red square", "bbox_2d", (110, 200, 300, 400))
BLUE = Object("blue circle", "bbox_2d", (500, 500, 700, 700))
WRONG = Object("green square", "bbox_2d", (800, 100, 900, 200))
TRIANGLE = Object("red", "poly", (500, 500, 700, 500, 600, 700))
TRIANGLE_OFF = Object("red", "poly", (510, 500, 700, 500, 700, 690, 500, 690))


def example(tmp_path, gt, pred, sample_id="a", size=(96, 64), tail="]}", kind="qwen", **changes) -> Example:
    """A sample whose answer lists `pred`, parsed and matched as a run does it."""
    table = make_table(kind)
    path = tmp_path / "image.png"
    Image.new("RGB", size, "white").save(path)
    ids = table.encode(format_objects(pred)[:-2] + tail)
    parsed = parse_answer(ids, table)
    pairs = match(iou_matrix([p.object for p in parsed.objects], gt), 0.3)
    target = build_target(parsed, gt, pairs, table, TargetOptions())
    sample = Sample(sample_id, [str(path)], [(size[1], size[0])], *size, gt, [{"role": "user", "content": "?"}], "f:1")
    answer = RolloutResult(ids, [1], "", "stop", "run:3")
    return Example(replace(sample, **changes), answer, parsed, pairs, target)


def dump(tmp_path, examples, step=40, num_samples=4, every_steps=20):
    monitor = Monitor(RunFacts(tmp_path), num_steps=100, enabled=True)
    SampleDump(tmp_path, make_table("qwen"), every_steps, num_samples, enabled=True).write(step, examples, monitor)
    monitor.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert len(events.Tags()["images"]) == 0 or events.Tags()["tensors"] == ["dump/answers/text_summary"]
    return events.Tags()["images"]


def test_log_4_a_sheet_and_all_facts_of_a_sample(tmp_path):
    """LOG-4: the PNG can be read back, the JSON names the pairs and what each token learns; TensorBoard too."""
    shown = example(tmp_path, [RED, BLUE], [RED_OFF, WRONG])
    assert dump(tmp_path, [shown]) == ["dump/0"]
    folder = tmp_path / "dumps" / "step_000040"
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "a.png"]
    record = json.loads((folder / "a.json").read_text())
    assert (record["step"], record["id"], record["source"]) == (40, "a", "f:1")
    assert record["gt"][0] == {"desc": "red circle", "bbox_2d": [100, 200, 300, 400]}
    assert [(pair["pred"], pair["gt"]) for pair in record["pairs"]] == [(0, 0)]
    assert record["pairs"][0]["iou"] == pytest.approx(190 / 200)
    assert record["unmatched_pred"] == [1] and record["unmatched_gt"] == [1]
    table, target = make_table("qwen"), shown.target
    assert record["rollout"]["text"] == format_objects([RED_OFF, WRONG]) and record["rollout"]["closed"]
    assert record["rollout"]["weight_version"] == "run:3"
    (rows,) = EventAccumulator(str(tmp_path)).Reload().Tensors("dump/answers/text_summary")
    assert record["rollout"]["text"].replace("|", "\\|") in rows.tensor_proto.string_val[0].decode()
    tokens = record["target"]["tokens"]
    assert [token["id"] for token in tokens] == target.answer_ids.tolist()
    assert "".join(token["token"] for token in tokens) == record["target"]["text"]
    coords = [(i, token["target"]) for i, token in enumerate(tokens) if token["kind"] == "coord"]
    assert coords == list(zip(target.coord_index.tolist(), target.coord_target.tolist(), strict=True))
    texts = [(i, t["target_id"], t["weight"]) for i, t in enumerate(tokens) if t["kind"] == "text"]
    expected = zip(target.text_index, target.text_label, target.text_weight, strict=True)
    assert texts == [(int(i), int(label), float(weight)) for i, label, weight in expected]
    assert all(t["kind"] == "none" and "target" not in t for t in tokens if t["kind"] not in ("text", "coord"))
    picture = np.asarray(Image.open(folder / "a.png").convert("RGB")).reshape(-1, 3)
    for colour in (sample_sheets.PAIR_COLOURS[0], sample_sheets.UNMATCHED, *sample_sheets.MARKS.values()):
        rgb = tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
        assert (picture == rgb).all(axis=1).any(), colour
    assert table.coord_bin[target.answer_ids[target.coord_index]].min() >= 0


def test_log_4_the_marked_text_shows_what_is_learnt(tmp_path):
    """LOG-4: plain context, learnt text in «», a corrected label with its arrow, coordinates with their targets."""
    shown = example(tmp_path, [RED, BLUE], [RED_OFF, WRONG])
    text = marked_text(shown.target, make_table("qwen"))
    assert text.startswith('{"objects": [{"desc": "')
    assert "square-> circle»" in text
    assert '"bbox_2d": [<110->100>, <200->200>, <300->300>, <400->400>]' in text
    assert '{"desc": "green square", "bbox_2d": [<800>, <100>, <900>, <200>«]}, {"desc": "blue circle", ' in text
    assert text.endswith('"bbox_2d": [»<500->500>«, »<500->500>«, »<700->700>«, »<700->700>«]}]}<|im_end|>»')


def test_log_4_the_same_facts_whatever_the_tokens_are(tmp_path):
    """LOG-4: tokens that hold half a character, or many brackets, still spell the target together."""
    cat = Object("猫", "bbox_2d", (1, 2, 3, 4))
    for kind in ("qwen", "whole"):
        shown = example(tmp_path, [cat, RED], [RED], kind=kind)
        table = make_table(kind)
        plain = marked_text(shown.target, table)
        assert "猫" in plain
        raw = b"".join(table.bytes_of[token["id"]] for token in token_records(shown.target, table))
        assert raw.decode() == b"".join(table.bytes_of[i] for i in shown.target.answer_ids).decode()


AWKWARD = {
    "no objects, no prediction": {"gt": [], "pred": []},
    "nothing predicted": {"gt": [RED, TRIANGLE], "pred": []},
    "nothing to find": {"gt": [], "pred": [WRONG, TRIANGLE]},
    "polygons": {"gt": [TRIANGLE, RED], "pred": [TRIANGLE_OFF]},
    "unfinished": {"gt": [RED], "pred": [RED_OFF], "tail": ', {"desc": "bl'},
    "wide": {"gt": [RED], "pred": [RED_OFF], "size": (900, 3)},
    "tall": {"gt": [RED], "pred": [RED_OFF], "size": (3, 900)},
    "missing image": {"gt": [RED], "pred": [RED_OFF], "images": ["/nowhere/x.png"]},
    "no image": {"gt": [RED], "pred": [RED_OFF], "images": []},
    "data uri": {"gt": [RED], "pred": [RED_OFF], "images": ["data:image/png;base64," + "A" * 5000]},
    "many objects": {"gt": [RED] * 30, "pred": [RED_OFF] * 40},
}


@pytest.mark.parametrize("case", AWKWARD)
def test_log_4_awkward_samples_are_dumped_too(tmp_path, caplog, case):
    """LOG-4."""
    dump(tmp_path, [example(tmp_path, **AWKWARD[case])])
    folder = tmp_path / "dumps" / "step_000040"
    assert not caplog.records and min(Image.open(folder / "a.png").size) > 100
    assert len((folder / "a.json").read_text()) > 100


def test_log_4_several_images_stand_below_each_other(tmp_path):
    """LOG-4."""
    one = example(tmp_path, [RED], [RED_OFF])
    two = replace(one, sample=replace(one.sample, id="b", images=one.sample.images * 2))
    dump(tmp_path, [one, two])
    heights = [Image.open(tmp_path / "dumps" / "step_000040" / f"{name}.png").height for name in "ab"]
    assert heights[1] > heights[0] + 200


def test_log_4_a_failed_rollout_is_dumped(tmp_path, caplog):
    """LOG-4, CON-3: no tokens at all; and ids that the tokenizer does not know."""
    shown = example(tmp_path, [RED], [])
    table = make_table("qwen")
    empty = parse_answer([], table)
    failed = RolloutResult([], [], "", None, "run:3", error="timed out")
    target = build_target(empty, [RED], [], table, TargetOptions())
    strange = replace(shown.answer, response_token_ids=[*shown.answer.response_token_ids, 10**9, -1])
    other = replace(shown, answer=strange, sample=replace(shown.sample, id="b"))
    dump(tmp_path, [Example(shown.sample, failed, empty, [], target), other])
    assert not caplog.records
    assert json.loads((tmp_path / "dumps/step_000040/a.json").read_text())["rollout"]["error"] == "timed out"


def test_log_4_only_so_many_samples_at_their_steps_on_rank_0(tmp_path):
    """LOG-4: `every_steps` and `num_samples`; `num_samples` is 0 if nothing has to be collected."""
    shown = [example(tmp_path, [RED], [RED_OFF], sample_id=f"s{i}") for i in range(4)]
    table, monitor = make_table("qwen"), Monitor(RunFacts(tmp_path), 1, enabled=False)
    for every_steps, enabled in ((0, True), (20, False)):
        off = SampleDump(tmp_path, table, every_steps, 2, enabled)
        off.write(40, shown, monitor)
        assert off.num_samples == 0
    on = SampleDump(tmp_path, table, 20, 2, enabled=True)
    assert on.num_samples == 2
    on.write(39, shown, monitor)
    assert not (tmp_path / "dumps").exists()
    on.write(60, shown, monitor)
    assert sorted(path.name for path in tmp_path.glob("dumps/*/*.png")) == ["s0.png", "s1.png"]


def test_log_4_the_same_sample_twice_makes_two_sheets(tmp_path):
    """LOG-4."""
    assert dump(tmp_path, [example(tmp_path, [RED], [RED_OFF])] * 2) == ["dump/0", "dump/1"]
    assert len(list(tmp_path.glob("dumps/*/*.png"))) == 2


def test_log_4_a_dump_that_fails_warns_once_and_stops_nothing(tmp_path, caplog, monkeypatch):
    """LOG-4: it logs one warning with the reason, and the other samples are dumped."""
    (tmp_path / "dumps").write_text("a file where a folder should be")
    monitor = Monitor(RunFacts(tmp_path), 1, enabled=False)
    sheets = SampleDump(tmp_path, make_table("qwen"), 1, 4, enabled=True)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            sheets.write(step, [example(tmp_path, [RED], [RED_OFF], sample_id="broken")] * 2, monitor)
    (warning,) = caplog.messages
    assert "broken" in warning and "dumps" in warning and "Error" in warning
    (tmp_path / "dumps").unlink()
    good = example(tmp_path, [RED], [RED_OFF], sample_id="good")
    sheets.write(3, [replace(good, pairs=[(7, 7)]), good], monitor)
    assert len(list(tmp_path.glob("dumps/step_000003/*.png"))) == 1


@pytest.mark.parametrize("sample_id", ["../../etc/passwd", "a/b\\c", "", ".", "..", "x" * 500, "猫", "a\0b\nc", "-rf"])
def test_log_4_no_id_leaves_its_folder(tmp_path, sample_id):
    """LOG-4: whatever an id holds, it names a file in the folder; different ids name different files."""
    name = safe_name(sample_id)
    assert (tmp_path / name).parent == tmp_path and 0 < len(name) <= 100 and not name.startswith((".", "-"))
    (tmp_path / f"{name}.png").write_text("")
    assert safe_name(sample_id + "/") != name and safe_name("train_0001.v-2") == "train_0001.v-2"
