"""What a run writes down: calls of a real client against a misbehaving server, sheets of really parsed answers."""

import json
import logging
import time
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.answers import make_table
from tests.rollout import test_client as test_rollout_client
from tests.rollout.test_client import setting
from utils.capacity import EVAL_MICRO_STEP, call_seed, request_seed
from utils.data.samples import Sample
from utils.geometry import Object, iou_matrix
from utils.matching import match
from utils.parsing import parse_answer
from utils.rollout.backend import Decoding, RolloutRequest, RolloutResult, ServerBackend
from utils.run import sample_sheets
from utils.run.monitor import Monitor, ServerWatch, server_scalars
from utils.run.rollout_log import RolloutLog, read_rollout_log
from utils.run.sample_sheets import Example, SampleDump, marked_text, safe_name, token_records
from utils.targets import TargetOptions, build_target, format_objects

RED = Object("red circle", "bbox_2d", (100, 200, 300, 400))
RED_OFF = Object("red square", "bbox_2d", (110, 200, 300, 400))
BLUE = Object("blue circle", "bbox_2d", (500, 500, 700, 700))
WRONG = Object("green square", "bbox_2d", (800, 100, 900, 200))
TRIANGLE = Object("red", "poly", (500, 500, 700, 500, 600, 700))
TRIANGLE_OFF = Object("red", "poly", (510, 500, 700, 500, 700, 690, 500, 690))
VLLM_METRICS = b"""# HELP vllm:num_requests_running of an engine
vllm:num_requests_running{engine="0",model_name="a b"} 3.0
vllm:num_requests_running{engine="1",model_name="a b"} 4.0
vllm:num_requests_waiting{engine="0"} 5.0
vllm:kv_cache_usage_perc{engine="0"} 0.2
vllm:kv_cache_usage_perc{engine="1"} 0.4
vllm:cache_config_info{engine="0",block_size="16"} 1.0
vllm:cache_config_info{engine="1",block_size="16"} 1.0
rollout_server_device_memory_bytes{worker="0"} 1.073741824e+09
rollout_server_device_memory_bytes{worker="1"} 1.073741824e+09
"""

# ---------------------------------------------------------------------------------------------------------------------
# rollouts.jsonl


class Rank:
    """`utils.dist.Ranks` of one rank that gathers what is said to come from the others."""

    def __init__(self, others=(), rank=0):
        self.others, self.is_main = list(others), rank == 0

    def gather(self, value):
        return [value, *self.others]


class Calls:
    """A client that has made these calls, for what a real one does not do on demand."""

    servers = ()

    def __init__(self, *calls):
        self.calls = list(calls)

    def pop_calls(self):
        return self.calls


def roll_out(client, num, micro_step_idx=0, step=7, run_seed=5):
    requests = [RolloutRequest(f"s{i}", [{"role": "user", "content": "x"}], [], [1]) for i in range(num)]
    place = {"global_step": step, "micro_step_idx": micro_step_idx, "run_seed": run_seed, "expect_version": "v"}
    ServerBackend(client).generate(requests, Decoding(temperature=0.5, max_new_tokens=9), **place)


def test_log_1_every_call_is_recorded_with_seed_server_and_outcome(tmp_path):
    """LOG-1: servers, sync mode with fallback, version, decoding; every call, the retried one included."""
    with setting(1, 2, decode_batch_size=2) as (client, (one, two)):
        answers = [(500, {"detail": "out of memory"})]
        one.on_infer = lambda body: answers.pop() if answers else one.answer(body)
        log = RolloutLog(tmp_path, client, Rank([[]]))
        roll_out(client, 6, micro_step_idx=0)
        roll_out(client, 2, micro_step_idx=1)
        values = log.write(8, "v:7", fallback="DoRA has no adapter sync")
        (line,) = read_rollout_log(tmp_path / "rollouts.jsonl")
        assert line["servers"] == [{"url": one.url, "group_port": 51216}, {"url": two.url, "group_port": 51217}]
        assert (line["step"], line["phase"], line["weight_version"]) == (8, "train", "v:7")
        assert line["sync"] == {"mode": "full", "fallback": "DoRA has no adapter sync"}
        assert line["decoding"]["temperature"] == 0.5 and line["decoding"]["max_new_tokens"] == 9
        found = [[call[k] for k in ("micro_step_idx", "first_request", "attempt", "server")] for call in line["calls"]]
        assert [call for call in found if call[0] == 0] == [[0, 0, 1, 0], [0, 0, 2, 0], [0, 2, 1, 1]]
        assert sum(call["num_requests"] for call in line["calls"] if call["outcome"] == "ok") == 8
        sent = sorted(call["request_config"]["seed"] for server in (one, two) for call in server.calls)
        assert sorted(call["seed"] for call in line["calls"]) == sent
        for call in line["calls"]:
            seed = request_seed(5, 7, call["micro_step_idx"], 0)
            assert call["seed"] == call_seed(seed, call["first_request"]) and call["rank"] == 0
            assert call["url"] == [one.url, two.url][call["server"]] and call["seconds"] >= 0
            assert "decoding" not in call and "group_port" not in call
        assert ["out of memory" in call["outcome"] for call in line["calls"]] == [True] + [False] * (len(sent) - 1)
        assert values["rollout/num_calls"] == len(sent) and values["rollout/retries"] == 1
        assert values["rollout/failed_calls"] == 1 and values["rollout/timeouts"] == 0
        assert values["rollout/first_seed"] == line["calls"][0]["seed"] and values["rollout/weight_version"] == 7
        assert values["rollout/decoding/temperature"] == 0.5
        assert values["server/0/retries"] == 1 and values["server/1/retries"] == 0


def test_log_6_timeouts_are_counted_by_server_and_grow(tmp_path):
    """LOG-6: counters since the start, evaluations included, though those are no points of their own."""
    with setting(1, infer_timeout_s=1.5) as (client, (server,)):
        late = [True, True]
        server.on_infer = lambda body: server.hang() if late and late.pop() else server.answer(body)
        log = RolloutLog(tmp_path, client, Rank())
        roll_out(client, 1, micro_step_idx=EVAL_MICRO_STEP)
        roll_out(client, 1, step=1)  # made ahead: belongs to the line of its own step
        values = log.write(1, "v", phase="eval")
        assert values["eval_rollout/timeouts"] == 2 and not any(name.startswith("server") for name in values)
        server.release.set()
        roll_out(client, 1, step=0)
        values = log.write(1, "v")
        assert values["rollout/timeouts"] == 0
        assert [values[f"server/0/{name}"] for name in ("calls", "retries", "timeouts")] == [4, 2, 2]
        assert [line["phase"] for line in read_rollout_log(tmp_path / "rollouts.jsonl")] == ["eval", "train"]


def call(**changes):
    decoding = {"temperature": 0.0, "top_k": -1}
    record = {"global_step": 0, "micro_step_idx": 0, "rank": 0, "decoding": decoding, "weight_version": "run:0"}
    record |= {"server": 0, "url": "http://a", "group_port": 1, "seed": 3, "first_request": 0, "num_requests": 2}
    return {**record, "outcome": "ok", "seconds": 0.5, **changes}


def test_log_1_calls_of_all_ranks_in_order_and_other_versions_by_name(tmp_path):
    """LOG-1: a call of another version or decoding than its line says so itself."""
    other = [call(weight_version="run:1", seed=2**31 - 1)]
    log = RolloutLog(tmp_path, Calls(call(micro_step_idx=1), call()), Rank([other]))
    values = log.write(1, "run:0")
    (line,) = read_rollout_log(tmp_path / "rollouts.jsonl")
    assert [(c["rank"], c["micro_step_idx"]) for c in line["calls"]] == [(0, 0), (0, 1), (1, 0)]
    assert [c.get("weight_version") for c in line["calls"]] == [None, None, "run:1"]
    assert line["calls"][2]["seed"] == 2**31 - 1 and values["rollout/call_seconds_max"] == 0.5


def test_log_1_no_calls_no_line_and_other_ranks_write_nothing(tmp_path):
    """LOG-1: steps that make rollouts, on rank 0, in server mode."""
    for client, ranks in ((Calls(call()), Rank(rank=1)), (None, Rank())):
        assert RolloutLog(tmp_path / "run", client, ranks).write(1, "run:0") == {}
        assert not (tmp_path / "run").exists()
    assert RolloutLog(tmp_path, Calls(), Rank([[]])).write(1, "run:0") == {}
    assert not (tmp_path / "rollouts.jsonl").exists()


def test_log_1_a_line_torn_by_a_kill_harms_no_other(tmp_path):
    """LOG-1, LRN-5: a reader passes over it, a resumed run does not glue its first line to it."""
    path = tmp_path / "rollouts.jsonl"
    RolloutLog(tmp_path, Calls(call()), Rank()).write(1, "run:0")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    assert [line["step"] for line in read_rollout_log(path)] == [1]
    RolloutLog(tmp_path, Calls(call()), Rank()).write(2, "run:0")
    assert [line["step"] for line in read_rollout_log(path)] == [1, 2]


# ---------------------------------------------------------------------------------------------------------------------
# sample sheets


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
    monitor = Monitor(tmp_path, num_steps=100, enabled=True)
    SampleDump(tmp_path, make_table("qwen"), every_steps, num_samples, enabled=True).write(step, examples, monitor)
    monitor.close()
    return EventAccumulator(str(tmp_path)).Reload().Tags()["images"]


def test_log_4_a_sheet_and_all_facts_of_a_sample(tmp_path):
    """LOG-4: the PNG can be read back, the JSON says who matched whom and what each token learns; TensorBoard too."""
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
    """LOG-4: context bare, learnt text in «», a corrected label with its arrow, coordinates with their targets."""
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
    """LOG-4: `every_steps` and `num_samples`; `num_samples` is 0 where nothing has to be collected."""
    shown = [example(tmp_path, [RED], [RED_OFF], sample_id=f"s{i}") for i in range(4)]
    table, monitor = make_table("qwen"), Monitor(tmp_path, 1, enabled=False)
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
    """LOG-4: neither silently nor loudly: one warning with the reason, and the other samples are dumped."""
    (tmp_path / "dumps").write_text("a file where a folder should be")
    monitor = Monitor(tmp_path, 1, enabled=False)
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


# ---------------------------------------------------------------------------------------------------------------------
# servers


def test_log_6_health_load_cache_and_memory_of_every_server(monkeypatch):
    """LOG-6: cache use is the mean over replicas, memory the sum over devices; a server that is gone hides no other."""
    monkeypatch.setattr(test_rollout_client, "METRICS", VLLM_METRICS)
    with setting(1, 1) as (client, (one, two)):
        one.on_health = lambda: (200, one.health(running=7, waiting=2))
        two.on_health = lambda: (503, {"status": "dead"})
        values = server_scalars(client)
        assert 0 < values.pop("server/0/health_latency_s") < 1
        assert values.pop("server/0/cache_usage") == pytest.approx(0.3)
        expected = {"healthy": 1, "running": 7, "waiting": 7, "device_memory_gib": 2}
        assert values == {f"server/0/{name}": value for name, value in expected.items()} | {"server/1/healthy": 0}


def test_log_6_a_server_that_says_little_or_hangs_is_no_error():
    """LOG-6: short time-out, no metrics of vLLM's."""
    with setting(1, 1) as (client, (one, two)):
        two.on_health = two.hang
        start = time.monotonic()
        values = server_scalars(client, timeout_s=0.2)
        assert time.monotonic() - start < 3
        assert values["server/0/running"] == 0 and values["server/1/healthy"] == 0
        assert "server/0/cache_usage" not in values


def test_log_6_the_watch_sees_what_runs_between_two_steps():
    """LOG-6: the largest load since last asked, though the server is idle again by then; nobody asks on other ranks."""
    with setting(1) as (client, (server,)):
        load = [3, 9, 1]
        server.on_health = lambda: (200, server.health(running=load.pop(0) if load else 0))
        watch = ServerWatch(client, enabled=True, period_s=0.02)
        deadline = time.monotonic() + 10
        while load and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.2)
        values = watch.pop_metrics()
        assert values["server/0/running"] == 9 and values["server/0/healthy"] == 1
        server.on_health = lambda: (500, {})
        time.sleep(0.3)
        assert watch.pop_metrics()["server/0/healthy"] == 0
        watch.close()
        time.sleep(0.3)
        watch.pop_metrics()
        assert watch.pop_metrics() == {}
        asked = len(server.paths)
        idle = ServerWatch(client, enabled=False)
        time.sleep(0.1)
        assert idle.pop_metrics() == ServerWatch(None, enabled=True).pop_metrics() == {} and len(server.paths) == asked
