"""rollouts.jsonl: calls of a real client to a misbehaving server, with retries and time-outs."""

import json
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

from tests.rollout.test_client import setting
from utils.capacity import EVAL_MICRO_STEP, call_seed, request_seed
from utils.rollout.backend import RolloutContext, RolloutRequest, RolloutSampling, ServerEngine
from utils.run import session
from utils.run.rollout_log import RolloutLog, read_rollout_log
from utils.run.session import Session


class Rank:
    """`utils.dist.Ranks` of one rank, with given values from the others."""

    def __init__(self, others=(), rank=0):
        self.others, self.is_main = list(others), rank == 0

    def gather(self, value):
        return [value, *self.others]


class Calls:
    """A client with these calls on record, for cases that a real one does not produce on demand."""

    servers = ()

    def __init__(self, *calls):
        self.calls = list(calls)

    def pop_calls(self):
        return self.calls


def roll_out(client, num, micro_step_idx=0, step=7, run_seed=5):
    requests = [RolloutRequest(f"s{i}", [{"role": "user", "content": "x"}], [], [1]) for i in range(num)]
    place = {"global_step": step, "micro_step_idx": micro_step_idx, "run_seed": run_seed, "policy_version": "v"}
    sampling = RolloutSampling(temperature=0.5, max_new_tokens=9)
    return ServerEngine(client, None).generate(requests, sampling, RolloutContext(**place))


def test_log_1_every_call_is_recorded_with_seed_server_and_outcome(tmp_path):
    """LOG-1: servers, sync mode with fallback, version, decoding; every call, the retried one included."""
    with setting(1, 2, decode_batch_size=2) as (client, (one, two)):
        answers = [(500, {"detail": "out of memory"})]
        one.on_infer = lambda body: answers.pop() if answers else one.answer(body)
        log = RolloutLog(tmp_path, client, Rank([[]]))
        roll_out(client, 6, micro_step_idx=0)
        roll_out(client, 2, micro_step_idx=1)
        (tmp_path / "run.json").write_text('{"run_id": "v"}')
        values = log.write(8, "v:7", fallback="first.weight has a DoRA adapter, and vLLM has no slots for DoRA")
        (line,) = read_rollout_log(tmp_path / "rollouts.jsonl")
        assert line["servers"] == [{"url": one.url, "group_port": 51216}, {"url": two.url, "group_port": 51217}]
        assert (line["step"], line["phase"], line["weight_version"]) == (8, "train", "v:7")
        assert line["sync"]["mode"] == "full" and line["sync"]["fallback"].endswith("no slots for DoRA")
        assert json.loads((tmp_path / "run.json").read_text()) == {"run_id": "v", "sync": line["sync"]}  # SYN-10
        assert (values["sync/adapter"], values["sync/fallback"]) == (0, 1)
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
        assert values["rollout/splits"] == 0
        assert values["rollout/first_seed"] == line["calls"][0]["seed"] and values["rollout/weight_version"] == 7
        assert values["rollout/decoding/temperature"] == 0.5
        assert values["server/0/retries"] == 1 and values["server/1/retries"] == 0


def test_log_6_timeouts_are_counted_by_server_and_grow(tmp_path):
    """LOG-6: counters since the start; they include evaluations, which log none of their own."""
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


def test_log_1_an_evaluation_in_parts_has_no_retries_but_the_real_ones(tmp_path, monkeypatch):
    """LOG-1, LRN-7: each part counts its requests from 0; one call fails, and is made again."""
    monkeypatch.setattr(session, "EVAL_SAMPLES", 4)
    with setting(1, decode_batch_size=2) as (client, (server,)):
        answers = [(500, "boom")]
        server.on_infer = lambda body: answers.pop() if answers else server.answer(body)
        log = RolloutLog(tmp_path, client, Rank())
        run = MagicMock(timed=lambda part: nullcontext(), finished_steps_saved=nullcontext)
        run.cfg.rm.max_new_tokens, run.cfg.uses_vllm, run.cfg.is_colocate = 9, True, False
        run.ranks = SimpleNamespace(rank=0, world_size=1)
        run.data.validation_ahead = lambda slices, keeps_pixels: [(own, own) for own in slices]
        run.data.val_samples = range(12)
        run.policy.generate = lambda samples, prompts, *place: roll_out(client, len(samples), place[2], place[1])
        run.policy.with_current_weights = lambda step, work, where: work()
        Session.score_validation(run, 7, lambda sample, result: None)
        values = log.write(7, "v", phase="eval")
    assert (values["eval_rollout/num_calls"], values["eval_rollout/retries"]) == (13, 1)
    (line,) = read_rollout_log(tmp_path / "rollouts.jsonl")
    assert sorted(made["attempt"] for made in line["calls"]) == [1] * 12 + [2]


def test_log_1_no_call_of_a_large_evaluation_is_forgotten(tmp_path):
    """LOG-1: calls are written once it is over."""
    with setting(1) as (client, _):
        roll_out(client, 1, EVAL_MICRO_STEP)
        client.calls.extend(list(client.calls) * 20_000)
        assert RolloutLog(tmp_path, client, Rank()).write(7, "v", phase="eval")["eval_rollout/num_calls"] == 20_001


def call(**changes):
    decoding = {"temperature": 0.0, "top_k": -1}
    record = {"global_step": 0, "micro_step_idx": 0, "rank": 0, "decoding": decoding, "weight_version": "run:0"}
    record |= {"server": 0, "url": "http://a", "group_port": 1, "seed": 3, "first_request": 0, "num_requests": 2}
    return {**record, "outcome": "ok", "seconds": 0.5, **changes}


def test_log_1_calls_of_all_ranks_in_order_and_other_versions_by_name(tmp_path):
    """LOG-1: a call with another version or decoding than its line records its own."""
    other = [call(weight_version="run:1", seed=2**31 - 1)]
    log = RolloutLog(tmp_path, Calls(call(micro_step_idx=1), call()), Rank([other]))
    values = log.write(1, "run:0")
    (line,) = read_rollout_log(tmp_path / "rollouts.jsonl")
    assert [(c["rank"], c["micro_step_idx"]) for c in line["calls"]] == [(0, 0), (0, 1), (1, 0)]
    assert [c.get("weight_version") for c in line["calls"]] == [None, None, "run:1"]
    assert line["calls"][2]["seed"] == 2**31 - 1 and values["rollout/call_seconds_max"] == 0.5


def test_log_1_no_calls_no_line_and_other_ranks_write_nothing(tmp_path):
    """LOG-1: only steps that make rollouts, on rank 0, in server mode."""
    for client, ranks in ((Calls(call()), Rank(rank=1)), (None, Rank())):
        assert RolloutLog(tmp_path / "run", client, ranks).write(1, "run:0") == {}
        assert not (tmp_path / "run").exists()
    assert RolloutLog(tmp_path, Calls(), Rank([[]])).write(1, "run:0") == {}
    assert not (tmp_path / "rollouts.jsonl").exists()


def test_log_1_a_checkpoint_keeps_the_calls_of_the_micro_steps_that_it_keeps(tmp_path, monkeypatch):
    """LOG-1, LRN-5: of three micro-steps ahead, two to a step, rounds of resampling included; others are made again."""
    kept = [call(global_step=3), call(global_step=3, micro_step_idx=1), call(global_step=4, micro_step_idx=2)]
    others = [call(global_step=4, micro_step_idx=1), call(global_step=5), call(global_step=4, micro_step_idx=3)]
    others += [call(global_step=3, micro_step_idx=EVAL_MICRO_STEP)]
    for name in ("random_states", "set_random_states", "save_merged", "save_adapter"):
        monkeypatch.setattr(session, name, lambda *_: None)
    monkeypatch.setattr(session, "rank_file", lambda folder, rank: folder / "rank.pt")
    monkeypatch.setattr(session, "write_checkpoint", lambda run_dir, step, ranks, write, **facts: write(tmp_path))
    run = MagicMock(steps_done=3, timed=lambda part: nullcontext())
    run.cfg.training.gradient_accumulation_steps = 2
    run._evaluates_at.return_value, run.policy.engine = False, SimpleNamespace(mode="full", fallback="no slots")
    run.policy.rollout_log = RolloutLog(tmp_path, Calls(*others, *kept), Rank())
    program = SimpleNamespace(state_dict=lambda: {"ahead": [{}] * 3}, load_state_dict=lambda state: None)
    Session._save(run, program)
    run.resumed = torch.load(tmp_path / "rank.pt", weights_only=True)
    assert run.resumed["sync"] == {"mode": "full", "fallback": "no slots"}  # SYN-10: not tried again
    run.policy.rollout_log = resumed = RolloutLog(tmp_path, Calls(), Rank())
    run.ranks.gather, run.ranks.first = lambda own: [own], lambda own: own
    Session.resume(run, program)
    assert [resumed.write(step, "run:3")["rollout/num_calls"] for step in (4, 5)] == [2, 1]
    lines = read_rollout_log(tmp_path / "rollouts.jsonl")
    assert [[made["micro_step_idx"] for made in line["calls"]] for line in lines] == [[0, 1], [2]]
    assert RolloutLog(tmp_path, None, Rank()).calls_ahead(3, 3, 2) == []


def test_log_1_a_line_torn_by_a_kill_harms_no_other(tmp_path):
    """LOG-1, LRN-5: a reader skips it, and a resumed run starts a new line after it."""
    path = tmp_path / "rollouts.jsonl"
    RolloutLog(tmp_path, Calls(call()), Rank()).write(1, "run:0")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    assert [line["step"] for line in read_rollout_log(path)] == [1]
    RolloutLog(tmp_path, Calls(call()), Rank()).write(2, "run:0")
    assert [line["step"] for line in read_rollout_log(path)] == [1, 2]


def test_torn_lines_that_are_json_still_are_skipped(tmp_path):
    """What a kill leaves of a line may read as a number, a list or an object without its keys."""
    whole = '{"step": 1, "phase": "train"}'
    (tmp_path / "rollouts.jsonl").write_text("\n".join([whole, "5", "[]", '{"step": 2}', '{"step": 2, "ph', whole, ""]))
    assert read_rollout_log(tmp_path / "rollouts.jsonl") == [json.loads(whole)] * 2


def test_log_6_con_3_a_batch_that_was_halved_is_counted(tmp_path):
    """CON-3: a body that is refused is halved until the bad request is alone."""
    with setting(1) as (client, (server,)):
        server.on_infer = lambda body: (422, {}) if len(body["infer_requests"]) > 1 else server.answer(body)
        log = RolloutLog(tmp_path, client, Rank())
        roll_out(client, 4)
        assert log.write(8, "v")["rollout/splits"] == 3  # 4 -> 2 + 2 -> 1 + 1 + 1 + 1
