"""GRPO's program in one process: transformers generates, the real learner trains (GRP-1, GRP-6)."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import train_grpo
from tests.answers import make_table, make_tokenizer
from tools.demo_grpo import make_data
from utils.config.load import load_config
from utils.config.schema import Decoding
from utils.data.encoding import load_processor
from utils.data.samples import Sample
from utils.data.stream import SampleStream
from utils.dist import DistributedError, Ranks
from utils.geometry import Object
from utils.grpo import Answer, WeightedAnswers
from utils.learner.learner import Learner, NotFinite, StepResult
from utils.rollout.backend import RolloutResult, RolloutSampling
from utils.run.prefetch import Prefetcher
from utils.run.session import Session
from utils.targets import format_objects, plain_segment

ROOT = Path(__file__).parents[1]
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of this process, as `ranks` sets it

REWARDS = """
def odd(completion, sample):
    return sum(token % 2 for token in completion.token_ids) / max(len(completion.token_ids), 1)


def same(completion, sample):
    return 1
"""


KEEPS_A_CONNECTION = """
import functools, sqlite3

connect = functools.cache(sqlite3.connect)


def known(completion, sample):
    return connect(":memory:").execute("select 0.5").fetchone()[0]
"""


HANGS = """
import time

calls = []


def hangs(completion, sample):
    calls.append(completion)
    if len(calls) > 32:  # those of two steps
        print("hangs", flush=True)
        time.sleep(1000)
    return len(calls) % 2
"""


@pytest.fixture(scope="module", autouse=True)
def process_groups_stay(ranks):
    """Runs of this process share those of `ranks`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "close", lambda ranks: None)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    make_data(folder / "data", 24, 4, 0)
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def config_of(folder: Path, model: Path, name: str, training: dict | None = None, **rlhf) -> Path:
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "global_max_length": 1024,
        "tuner": {"type": "lora", "rank": 4, "alpha": 8},
        "custom": {
            "trainer_variant": "grpo",
            "train_jsonl": str(folder / "data" / "train.jsonl"),
            "val_jsonl": str(folder / "data" / "val.jsonl"),
            "extra": {"rollout_matching": {"monitor_dump": {"every_steps": 1, "num_samples": 2}}},
        },
        "rlhf": {
            "use_vllm": False,
            "decode_batch_size": 8,
            "max_new_tokens": 8,
            "num_generations": 4,
            "reward_funcs": ["odd", "same"],
            "reward_files": [str(folder / "rewards.py")],
            "reward_weights": [1.0, 0.5],
        }
        | rlhf,
        "training": {
            "output_dir": str(folder / name),
            "max_steps": 3,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "packing_buffer": 64,
            "learning_rate": 1e-3,
            "lr_scheduler": "constant",
            "gradient_checkpointing": False,
            "eval_steps": 3,
        }
        | (training or {}),
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def run(config: Path, resume: str | None = None) -> Path:
    """The program to its end, in this process; returns its run directory."""
    cfg = load_config(config)
    started = train_grpo.set_up(cfg, resume)
    try:
        train_grpo.train(started)
    finally:
        started.session.close()
    return Path(cfg.training.output_dir)


def curves(run_dir: Path) -> dict[str, list[float]]:
    events = EventAccumulator(str(run_dir)).Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(scope="module")
def whole(folder, start_model) -> Path:
    """Three steps, a checkpoint at the first."""
    return run(config_of(folder, start_model, "whole", {"save_steps": 1}))


def test_every_reward_is_recorded_by_name_GRP_1_LOG_3(whole):
    """GRP-1, LOG-3: mean and spread by name and of the weighted sum; what the policy did; answers as text."""
    found = curves(whole)
    for tag in ("reward", "reward_std", "reward/odd", "reward/odd_std", "advantage/signal_share", "policy/entropy"):
        assert len(found[tag]) == 3, tag
    assert found["reward/same"] == [1.0] * 3 and found["reward/same_std"] == [0.0] * 3
    np.testing.assert_allclose(found["reward"], np.array(found["reward/odd"]) + 0.5, atol=1e-6)
    assert found["eval/reward"] and found["policy/clip_fraction"] == [0.0] * 3
    assert found["train/policy_lag_max"] == found["train/policy_lag"] == [0.0] * 3, "each answer is of the last weights"
    lines = [json.loads(line) for line in (whole / "dumps" / "step_000001.jsonl").open()]
    assert len(lines) == 8 and len({line["id"] for line in lines}) == 2
    assert len({line["response"] for line in lines[:4]}) > 1  # each answer of a group has a seed of its own
    assert min(found["rollout/new_tokens_mean"]) > 0


def test_a_dump_that_fails_warns_once_and_stops_nothing_LOG_4(folder, start_model, caplog):
    """LOG-4: as in stage 2."""
    (folder / "full").mkdir()
    (folder / "full" / "dumps").write_text("in the way")
    run(config_of(folder, start_model, "full", {"max_steps": 2, "eval_steps": 0}))
    assert len(curves(folder / "full")["reward"]) == 2
    assert [record.message for record in caplog.records if "could not be dumped" in record.message] == [
        f"answers could not be dumped: [Errno 17] File exists: '{folder}/full/dumps' (logged once per run)"
    ]


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one_GRP_1_LRN_5(whole, folder, start_model):
    """GRP-1, LRN-5: float32, seeds by step; transformers generates on the weights that train."""
    part = config_of(folder, start_model, "part", {"save_steps": 1, "max_steps": 1})
    run(part)
    run(config_of(folder, start_model, "part", {"save_steps": 1}), resume="auto")
    ours, theirs = (
        load_file(folder / name / "checkpoint-3/adapter/adapter_model.safetensors") for name in ("part", "whole")
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert curves(folder / "part")["reward"] == curves(whole)["reward"]


@pytest.mark.parametrize(("num_iterations", "number", "is_saved"), [(1, 2, True), (2, 3, True), (2, 4, False)])
def test_a_loss_that_is_not_finite_costs_no_finished_step_LRN_12_LRN_5(
    whole, folder, start_model, monkeypatch, num_iterations, number, is_saved
):
    """LRN-12, LRN-5: the step before is saved, and a resumed run goes on as one that never failed; unless an update by
    the same answers has gone before."""
    name, updates, update = f"bad_{num_iterations}_{number}", itertools.count(1), Learner.step

    def step(*args) -> StepResult:
        if next(updates) == number:
            raise NotFinite("the loss is not finite")
        return update(*args)

    config = config_of(folder, start_model, name, num_iterations=num_iterations)
    with monkeypatch.context() as patch, pytest.raises(NotFinite) as raised:
        patch.setattr(Learner, "step", step)
        run(config)
    assert ("1 of 2 updates on these answers had been made, so nothing is saved" in str(raised.value)) != is_saved
    assert [path.name for path in (folder / name).glob("checkpoint-*")] == ["checkpoint-1"] * is_saved
    if num_iterations == 1:
        run(config, resume="auto")
        last = "checkpoint-3/adapter/adapter_model.safetensors"
        ours, theirs = load_file(folder / name / last), load_file(whole / last)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_equal_rewards_give_no_gradient_but_for_kl_GRP_6_LOG_3(folder, start_model, caplog):
    """GRP-6, LOG-3: nothing is computed for groups without a signal, and nothing moves; it is said once."""
    found = curves(run(config_of(folder, start_model, "equal", reward_funcs=["same"], reward_weights=[1.0])))
    assert sum("the rewards teach nothing" in text for text in caplog.messages) == 1
    assert found["train/grad_norm"] == [0.0] * 3 and found["advantage/signal_share"] == [0.0] * 3
    with_penalty = config_of(folder, start_model, "penalty", reward_funcs=["same"], reward_weights=[1.0], beta=0.5)
    found = curves(run(with_penalty))
    assert found["policy/kl"] == pytest.approx([0.0] * 3, abs=1e-9)  # at the start itself
    assert found["train/fill_ratio"][0] > 0.05


def test_the_policy_is_that_of_the_temperature_GRP_6_LOG_3(folder, start_model, caplog):
    """GRP-6, LOG-3: ratios, KL and gradient are those of the distribution that was sampled from. All answers are cut,
    and the run says so."""
    training = {"max_steps": 1, "eval_steps": 0}
    found = curves(run(config_of(folder, start_model, "cold", training, decoding={"temperature": 0.5}, beta=0.5)))
    assert found["policy/kl"] == pytest.approx([0.0], abs=1e-9) and found["policy/ratio_max"] == pytest.approx([1.0])
    assert caplog.text.count("answers run into max_new_tokens") == 1


def test_the_old_policy_of_inner_steps_is_that_of_the_temperature_GRP_6(folder, start_model):
    """GRP-6: a step that changes nothing leaves ratios of 1."""
    training = {"learning_rate": 1e-12, "max_steps": 1, "eval_steps": 0}
    changes = {"num_iterations": 2, "beta": 0.01, "decoding": {"temperature": 0.5}}
    found = curves(run(config_of(folder, start_model, "inner_cold", training, **changes)))
    assert found["policy/ratio_max"] == pytest.approx([1.0], abs=1e-4)


def test_inner_steps_leave_the_old_policy_GRP_6(folder, start_model):
    """GRP-6: with two optimizer steps over the same answers ratios of the second are off 1, and KL grows from 0."""
    found = curves(run(config_of(folder, start_model, "inner", num_iterations=2, beta=0.01)))
    assert all(value > 1 + 1e-4 for value in found["policy/ratio_max"])
    assert all(value > 0 for value in found["policy/kl"])


def test_a_reward_that_never_returns_does_not_hold_up_a_stop_LRN_12(folder, start_model):
    """LRN-12: the finished steps are saved, the reward is named, and the process ends."""
    (folder / "hangs.py").write_text(HANGS)
    own = {"reward_funcs": ["hangs"], "reward_weights": [1.0], "reward_files": [str(folder / "hangs.py")]}
    config = config_of(folder, start_model, "hangs", {"eval_steps": 0}, **own)
    environment = {name: value for name, value in os.environ.items() if name not in PLACE}
    command = [sys.executable, str(ROOT / "train_grpo.py"), "--config", str(config)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, cwd=ROOT, **pipes) as program:
        try:
            before = list(itertools.takewhile(lambda line: line != "hangs\n", program.stdout))
            program.send_signal(signal.SIGTERM)
            after, _ = program.communicate(timeout=200)
        finally:
            program.kill()
    assert program.returncode == 75, "".join(before) + after
    assert "reward hangs on sample" in after and ": has not returned 10 s after the stop request" in after
    assert (folder / "hangs" / "checkpoint-2" / "merged").exists()


def test_prompts_without_signal_make_way_for_the_next_GRP_6_LRN_1(folder, start_model):
    """GRP-6, LRN-1: every round takes the next prompts of the data; when rounds are used up the step goes on."""
    changes = {"reward_funcs": ["same"], "reward_weights": [1.0], "dynamic_sample": True, "max_resample_times": 2}
    run_dir = run(config_of(folder, start_model, "resampled", {"max_steps": 1, "eval_steps": 0}, **changes))
    assert curves(run_dir)["rollout/replaced"] == [2 * 2 * 2]  # prompts x rounds x micro-steps
    state = torch.load(run_dir / "checkpoint-1/state/rank_00000.pt", weights_only=True)
    assert state["stream"]["position"] == 12  # 2 x (2 + 4) prompts, none of them lost or doubled


def grpo_of(session, rewards: dict) -> train_grpo.Grpo:
    """A run on a session that is made up."""
    run = object.__new__(train_grpo.Grpo)
    run.session, run.rewards, run._redraw = session, rewards, deque()
    run.reward_weights = lambda step: np.ones(max(len(rewards), 1))
    return run


@pytest.mark.parametrize("replaces", [True, False])
def test_a_run_that_replaces_prompts_prepares_later_steps_one_at_a_time_GRP_6_LRN_5(replaces):
    """GRP-6, LRN-5 at the call site: else a checkpoint could not draw the same prompts again."""
    made: list[bool] = []
    session = SimpleNamespace(
        cfg=SimpleNamespace(rlhf=SimpleNamespace(dynamic_sample=replaces)),
        data=SimpleNamespace(stream=SampleStream([list(range(9))])),
        prefetch=lambda stages, draws_more: made.append(draws_more),
    )
    train_grpo.Grpo(session, {})
    assert made == [replaces]


@pytest.mark.parametrize("is_ahead", [True, False])
def test_responses_are_asked_for_as_the_config_says_GRP_6_SYN_8(is_ahead):
    """GRP-6, SYN-8: each prompt as often as a group is large; older weights only where rollouts run ahead."""
    decoding, asked = Decoding(temperature=0.7, top_k=5), []

    def generate(samples, prompts, sampling, step, micro_step_idx, allow_stale):
        asked.append((samples, prompts, sampling, step, micro_step_idx, allow_stale))
        return list(range(len(samples)))

    rm = SimpleNamespace(decoding=decoding, max_new_tokens=9, async_=SimpleNamespace(enabled=is_ahead))
    session = SimpleNamespace(
        cfg=SimpleNamespace(rlhf=SimpleNamespace(num_generations=2), rm=rm),
        data=SimpleNamespace(encode=lambda samples: [f"prompt of {sample}" for sample in samples]),
        policy=SimpleNamespace(generate=generate),
        timed=lambda part: nullcontext(),
    )
    groups = grpo_of(session, {}).generate_groups(["a", "b"], 3, 1)
    assert [(group.sample, group.results) for group in groups] == [("a", [0, 1]), ("b", [2, 3])]
    sampling = RolloutSampling(temperature=0.7, top_k=5, max_new_tokens=9, logprobs=True)
    prompts = ["prompt of a", "prompt of a", "prompt of b", "prompt of b"]
    assert asked == [(["a", "a", "b", "b"], prompts, sampling, 3, 1, is_ahead)]


@pytest.mark.parametrize(("packing", "sizes"), [(True, [3, 1]), (False, [2, 2])])
def test_answers_fill_rows_up_to_the_length_or_the_batch_of_the_config_PCK_6(monkeypatch, packing, sizes):
    """PCK-6: answers of two prompts in rows of nine tokens, or padded as many at a time as a prompt has."""
    monkeypatch.setattr(train_grpo, "policy_row", lambda weighted, row, collate: row)
    training = SimpleNamespace(packing=packing, per_device_train_batch_size=1)
    rlhf = SimpleNamespace(beta=0.0, num_generations=2)
    cfg = SimpleNamespace(training=training, rlhf=rlhf, global_max_length=9)
    session = SimpleNamespace(cfg=cfg, collate=None, ranks=SimpleNamespace(gather=lambda own: [own]))
    session.on_all_ranks = lambda work, where: work()
    answers = [Answer(plain_segment("s", [1], [2, 3]), "", np.zeros(1), []) for _ in range(4)]
    weighted = WeightedAnswers(answers, [np.ones(2)] * 4, np.ones(4), 4.0, np.ones(2, dtype=bool))
    assert [len(row) for row in grpo_of(session, {}).pack(weighted, 0)] == sizes


def answer(folder: Path, start_model: Path, result: RolloutResult, **rlhf):
    cfg = load_config(config_of(folder, start_model, "single", **rlhf))
    data = SimpleNamespace(processor=load_processor(start_model), table=None)

    def place(segment):
        assert data.processor.image_token_id not in segment.input_ids, "it has no positions without an image"
        return segment

    fake = grpo_of(SimpleNamespace(cfg=cfg, data=data, place=place), train_grpo.rewards_of(cfg))
    sample = SimpleNamespace(id="s", source="file:1", extra={})
    prompt = train_grpo.EncodedPrompt([5, 6], {})
    return fake.make_answer(sample, prompt, result, 0)


def test_truncated_and_failed_answers_GRP_6_CON_3(folder, start_model):
    """GRP-6, CON-3: the stop token is scored where the model set it, whichever of its stop tokens it is; truncated
    answers are left out when asked."""
    stop = {"stop_token_id": 9, "stop_logprob": -3.0}
    ended = answer(
        folder, start_model, RolloutResult([7, 8], [5, 6], "ab", "stop", "r:0", logprobs=[-1.0, -2.0], **stop)
    )
    assert ended.segment.text_label.tolist() == [7, 8, 9] and ended.engine_logprobs == [-1.0, -2.0, -3.0]
    assert ended.is_valid and ended.rewards.tolist() == [0.5, 1.0]
    cut = RolloutResult([7, 8], [5, 6], "ab", "length", "r:0")
    kept = answer(folder, start_model, cut)
    assert kept.segment.text_label.tolist() == [7, 8] and kept.is_valid and kept.is_truncated
    assert not answer(folder, start_model, cut, overlong_filter=True).is_valid
    failed = answer(folder, start_model, RolloutResult([], [], "", None, None, error="unreadable"))
    assert failed.is_failed and not failed.is_valid and failed.num_tokens == 0 and not failed.rewards.any()


def test_a_step_whose_requests_all_failed_has_no_rewards_GRP_1_CON_3():
    """GRP-1, CON-3: neither 0 nor nan on the curves or the progress line, since nothing was answered."""
    failed = Answer(None, "", np.zeros(2), [], is_valid=False, is_failed=True)
    weighted = WeightedAnswers([failed] * 4, [np.zeros(0)] * 4, np.zeros(0), 0.0, np.zeros(1, dtype=bool))
    result = StepResult({"total": 0.0, "policy": 0.0}, 0.0, {"llm": 1e-3}, num_tokens=0, room=100)
    found, of_step = {}, {"seconds": [{}], "num_tokens": [0], "room": [100], "remade": [0], "signal_name": None}
    session = SimpleNamespace(
        gather_step=lambda result, **own: {name: [value] for name, value in own.items()} | of_step,
        log_step=lambda step, metrics, quality, **shown: found.update(metrics=metrics, quality=quality, shown=shown),
        cfg=SimpleNamespace(rm=SimpleNamespace(monitor_dump=None), rlhf=SimpleNamespace(num_generations=4)),
        ranks=SimpleNamespace(is_main=False),
    )
    micro_steps = [train_grpo.MicroStep([[failed] * 4], 1, {})]
    train_grpo.log_step(grpo_of(session, {"odd": None, "same": None}), 1, result, weighted, micro_steps)
    assert found["quality"] == {"truncated_rate": 0.0}  # nothing to say about the rewards
    assert found["shown"] == {"loss": 0.0} and not any(name.startswith("reward") for name in found["metrics"])
    assert np.isfinite(list(found["metrics"].values())).all() and found["metrics"]["rollout/failed"] == 4


@pytest.mark.parametrize("names", [["detection_f1", "detection_parse"], ["detection_f1"]])
def test_a_step_is_judged_by_the_answers_that_parse_LOG_3(names):
    """LOG-3: where a reward tells; and by those that were cut off."""
    segment = SimpleNamespace(text_index=[0, 1], policy_version=None)
    answers = [
        Answer(segment, "", np.array([0.0, parses][: len(names)]), [], is_truncated=True) for parses in (0.0, 0.5)
    ]
    answers[1].is_valid = False
    weighted = WeightedAnswers(answers, [np.array([1.0, -3.0]), np.zeros(0)], np.zeros(2), 1.0, np.ones(1, dtype=bool))
    result = StepResult({"total": 0.0, "policy": 0.0}, 0.0, {"llm": 1e-3}, num_tokens=4, room=100)
    found, of_step = [], {"seconds": [{}], "num_tokens": [4], "room": [100], "remade": [0], "signal_name": None}
    session = SimpleNamespace(
        gather_step=lambda result, **own: {name: [value] for name, value in own.items()} | of_step,
        log_step=lambda step, metrics, quality, **shown: found.append((metrics, quality)),
        cfg=SimpleNamespace(rm=SimpleNamespace(monitor_dump=None), rlhf=SimpleNamespace(num_generations=2)),
        ranks=SimpleNamespace(is_main=False),
    )
    micro_steps = [train_grpo.MicroStep([answers], 1, {})]
    train_grpo.log_step(grpo_of(session, dict.fromkeys(names)), 1, result, weighted, micro_steps)
    parse_rate = {"parse_rate": 0.25} if "detection_parse" in names else {}
    ((metrics, quality),) = found
    assert quality == {"truncated_rate": 1.0} | parse_rate  # one answer that counts has none to differ from
    assert (metrics["rollout/left_out"], metrics["advantage/abs_mean"]) == (1.0, 1.0)  # of |1| and |-3|, and of nothing


def test_a_step_may_mix_groups_of_two_sizes_LRN_5():
    """LRN-5: those that a checkpoint holds ahead are as large as `rlhf.num_generations` was when they were made."""
    segment = SimpleNamespace(text_index=[0], policy_version=None)
    groups = [[Answer(segment, "", np.zeros(1), [], is_valid=bool(i)) for i in range(size)] for size in (2, 3)]
    answers = [*groups[0], *groups[1]]
    weighted = WeightedAnswers(answers, [np.zeros(1)] * 5, np.zeros(5), 1.0, np.zeros(2, dtype=bool))
    result = StepResult({"total": 0.0, "policy": 0.0}, 0.0, {"llm": 1e-3}, num_tokens=5, room=100)
    found, of_step = {}, {"seconds": [{}], "num_tokens": [5], "room": [100], "remade": [0], "signal_name": None}
    session = SimpleNamespace(
        gather_step=lambda result, **own: found.update(own) or {name: [value] for name, value in own.items()} | of_step,
        log_step=lambda *_, **__: None,
        cfg=SimpleNamespace(rm=SimpleNamespace(monitor_dump=None), rlhf=SimpleNamespace(num_generations=3)),
        ranks=SimpleNamespace(is_main=False),
    )
    micro_steps = [train_grpo.MicroStep([group], 1, {}) for group in groups]
    train_grpo.log_step(grpo_of(session, {"odd": None}), 1, result, weighted, micro_steps)
    assert found["has_two_to_compare"].tolist() == [False, True]


def test_an_answer_longer_than_a_row_is_refused_PCK_3(folder, start_model):
    """PCK-3."""
    with pytest.raises(ValueError, match="global_max_length"):
        answer(folder, start_model, RolloutResult([7] * 1023, [5, 6], "ab", "length", "r:0"))


def test_a_checkpoint_stands_behind_the_last_prompt_drawn_GRP_6_LRN_5():
    """GRP-6, LRN-5: an earlier micro-step may have drawn replacements last."""
    made = [SimpleNamespace(data_position={"position": at}) for at in (12, 8)]
    session = SimpleNamespace(steps_done=0, num_steps=1, timed=lambda part: nullcontext(), prepare=lambda step: made)
    for name in ("begin", "on_all_ranks", "end_step", "finish"):
        setattr(session, name, lambda *_: None)
    run = SimpleNamespace(session=session, **{name: lambda *_: None for name in ("weight", "pack", "learn")})
    train_grpo.train(run)
    assert run.data_position == {"position": 12} and session.steps_done == 1


@pytest.mark.parametrize(("reward", "needs"), [("summary_format", False), ("detection_f1", True), ("odd", False)])
def test_only_rewards_of_objects_need_coordinates_GRP_1(folder, start_model, monkeypatch, reward, needs):
    """GRP-1: with others GRPO trains any released model."""
    seen: list[dict] = []

    def open_session(*_: object, **options: object) -> None:
        seen.append(options)
        raise NotImplementedError

    monkeypatch.setattr(train_grpo, "open_session", open_session)
    with pytest.raises(NotImplementedError):
        train_grpo.set_up(
            load_config(config_of(folder, start_model, "any", reward_funcs=[reward], reward_weights=[1.0]))
        )
    assert seen[0]["needs_coordinates"] is needs


def test_an_answer_with_an_image_placeholder_is_left_out_GRP_6(folder, start_model):
    """GRP-6: sampling draws any token now and then; this one a row cannot hold beside real images."""
    image_id = load_processor(start_model).image_token_id
    drawn = answer(folder, start_model, RolloutResult([7, image_id], [5, 6], "ab", "stop", "r:0", stop_token_id=9))
    assert not drawn.is_valid and not drawn.is_failed and drawn.rewards.any()


def detection_run(folder: Path, start_model: Path, **rlhf) -> tuple[train_grpo.Grpo, Sample, RolloutResult]:
    """A run, a sample, and a response to it with an object of IoU 0.62 and a wrong one."""
    table = make_table("qwen")
    objects = [Object("cat", "bbox_2d", (0, 0, 100, 62)), Object("cat", "bbox_2d", (500, 500, 600, 600))]
    ids = make_tokenizer("qwen").encode(format_objects(objects), add_special_tokens=False)
    cfg = load_config(config_of(folder, start_model, "detection", reward_weights=None, **rlhf))
    data = SimpleNamespace(processor=SimpleNamespace(image_token_id=-1), table=table)
    session = SimpleNamespace(cfg=cfg, data=data, place=lambda segment: segment)
    run = grpo_of(session, train_grpo.rewards_of(cfg))
    truth = Sample("s", [], [], 0, 0, [Object("cat", "bbox_2d", (0, 0, 100, 100))], [], "f:1", {})
    return run, truth, RolloutResult(ids, [5, 6], "", "stop", "r:0", stop_token_id=9)


def detection_answer(folder: Path, start_model: Path, step: int, **rlhf) -> Answer:
    """The response of `detection_run`, judged in a step."""
    run, truth, result = detection_run(folder, start_model, **rlhf)
    return run.make_answer(truth, train_grpo.EncodedPrompt([5, 6], {}), result, step)


def test_objects_get_credit_where_the_config_says_so_GRP_8(folder, start_model):
    """GRP-8: decisions of every scored token, the stop token's too; without the setting none."""
    common = {"reward_funcs": ["detection_f1"], "max_new_tokens": 128}
    plain = detection_answer(folder, start_model, 0, **common)
    assert plain.credit is None and plain.rewards == pytest.approx([2 / 3])
    found = detection_answer(folder, start_model, 0, advantage="object", **common)
    assert found.credit.earned[:, 0] == pytest.approx([2 / 3, 2 / 3 - 1])
    assert len(found.credit.decisions) == found.num_tokens == len(found.segment.input_ids) - 2


def test_thresholds_and_weights_follow_the_step_GRP_9(folder, start_model):
    """GRP-9: from 0.5 to 0.7 over 100 steps: at 0.62 the pair no longer counts."""
    ramp = {"reward_iou": {"start": 0.5, "end": 0.7, "steps": 100}, "max_new_tokens": 128}
    found = [
        detection_answer(folder, start_model, step, reward_funcs=["detection_f1"], **ramp).rewards[0]
        for step in (0, 50, 70, 1000)
    ]
    assert found == pytest.approx([2 / 3, 2 / 3, 0, 0])
    for step, earned in ((50, 2 / 3), (70, 0)):
        answer = detection_answer(folder, start_model, step, reward_funcs=["detection_f1"], advantage="object", **ramp)
        assert answer.credit.earned[0, 0] == pytest.approx(earned)
    run, truth, result = detection_run(folder, start_model, reward_funcs=["detection_f1"], **ramp)
    record = run.evaluation_record(truth, result)
    assert record["rewards"] == {"detection_f1": 0.0}  # with the settings of the end
    assert record["response"] == result.text  # as stage 2 calls it
    weights = [1.0, {"start": 0.0, "end": 2.0, "steps": 4}]
    cfg = load_config(config_of(folder, start_model, "ramp", reward_weights=weights))
    run = object.__new__(train_grpo.Grpo)
    run.session, run.rewards = SimpleNamespace(cfg=cfg), {"odd": None, "same": None}
    assert [run.reward_weights(step).tolist() for step in (0, 1, 4, math.inf)] == [[1, 0], [1, 0.5], [1, 2], [1, 2]]
    run.session.ranks = SimpleNamespace(gather=lambda value: [value])
    group = [Answer(plain_segment("s", [1], [2]), "", np.array(rewards), []) for rewards in ([0.0, 0.0], [0.0, 1.0])]
    assert [run.weight([SimpleNamespace(groups=[group])], step).has_signal.tolist() for step in (0, 4)] == [
        [False],
        [True],
    ]


def test_a_reward_of_the_length_knows_the_limit_GRP_9(folder, start_model):
    """GRP-9: the response is longer than `max_new_tokens` less its margin."""
    common = {"reward_funcs": ["no_overlong"]}
    assert detection_answer(folder, start_model, 0, max_new_tokens=500, **common).rewards == [1.0]
    assert detection_answer(folder, start_model, 0, max_new_tokens=10, **common).rewards == [0.0]


def test_a_run_weighs_rewards_by_the_step_GRP_9(folder, start_model):
    """GRP-9: `same` is always 1, so the curve of the reward shows its weight; evaluation takes the last one."""
    weights = [{"start": 0.0, "end": 0.0, "steps": 1}, {"start": 1.0, "end": 2.0, "steps": 2}]
    found = curves(run(config_of(folder, start_model, "weighed", reward_weights=weights)))
    assert found["reward"] == [1.0, 1.5, 2.0] and found["eval/reward"] == [2.0]


def test_credit_of_objects_needs_a_reward_of_objects_GRP_8(folder, start_model, capsys):
    """GRP-8: one message, status 2, before anything is touched."""
    cfg = load_config(config_of(folder, start_model, "no_objects", advantage="object"))
    with pytest.raises(SystemExit) as ended:
        train_grpo.rewards_of(cfg)
    told = 'rlhf.advantage="object": object needs a reward of objects'
    assert ended.value.code == 2 and told in capsys.readouterr().err
    rewards = {"reward_funcs": ["detection_f1", "same"], "advantage": "object"}
    with pytest.raises(SystemExit):
        train_grpo.rewards_of(load_config(config_of(folder, start_model, "idle", reward_weights=[0.0, 1.0], **rewards)))
    assert told in capsys.readouterr().err
    later = [{"start": 0.0, "end": 1.0, "steps": 9}, 1.0]
    train_grpo.rewards_of(load_config(config_of(folder, start_model, "later", reward_weights=later, **rewards)))


def test_an_unknown_reward_ends_the_dry_run_GRP_5(folder, start_model, capsys, monkeypatch):
    """GRP-5: one message, status 2, before anything is touched."""
    config = config_of(folder, start_model, "unknown", reward_funcs=["od"], reward_weights=None)
    monkeypatch.setattr("sys.argv", ["train_grpo.py", "--config", str(config), "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        train_grpo.main()
    assert ended.value.code == 2 and "did you mean odd" in capsys.readouterr().err


def test_a_dry_run_takes_no_gpu_CFG_16(folder, start_model, monkeypatch):
    """CFG-16: under a launcher, a rank takes its GPU before it loads rewards, but not to print the plan."""
    config, chosen = config_of(folder, start_model, "dry"), []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr("sys.argv", ["train_grpo.py", "--config", str(config), "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        train_grpo.main()
    assert ended.value.code == 0 and chosen == []
    train_grpo.rewards_of(load_config(config))
    assert chosen == [1]


def test_a_file_of_rewards_that_is_not_there_is_told_by_its_key_GRP_5(folder, start_model, capsys):
    config = config_of(folder, start_model, "no_file", reward_files=["gone.py"])
    with pytest.raises(SystemExit) as ended:
        train_grpo.rewards_of(load_config(config))
    message = 'rlhf.reward_files=["gone.py"]: gone.py: cannot be loaded'
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_samples_that_a_reward_cannot_use_end_the_run_DAT_3(folder, start_model, capsys):
    """DAT-3, GRP-5: file, line and reason, before training."""
    rows = [json.loads(line) for line in (folder / "data" / "train.jsonl").open()]
    del rows[1]["summary"]
    broken = folder / "data" / "broken.jsonl"
    broken.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(folder, start_model, "broken", reward_funcs=["summary_tversky"], reward_weights=None)
    content = yaml.safe_load(config.read_text())
    content["custom"]["train_jsonl"] = str(broken)
    config.write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit) as ended:
        train_grpo.set_up(load_config(config), None)
    assert ended.value.code == 2 and f"{broken}:2: summary" in capsys.readouterr().err


class Engine:
    """In place of an engine: which prompts were asked in which micro-step, and groups whose rewards differ for some."""

    def __init__(self, monkeypatch, good: set[int], fails: int = 0):
        self.calls, self.good, self.fails = [], good, fails
        answers = self.answer
        monkeypatch.setattr(train_grpo.Grpo, "generate_groups", lambda run, *args: answers(*args))

    def answer(self, samples, step, micro_step_idx):
        self.calls.append((micro_step_idx, list(samples)))
        if len(self.calls) == self.fails:
            raise ConnectionError("server gone")
        segment = plain_segment("s", [1], [2])
        groups = [
            [
                Answer(segment, str(sample), np.array([float(sample in self.good)]), []),
                Answer(segment, "", np.zeros(1), []),
            ]
            for sample in samples
        ]
        return [
            train_grpo.ResponseGroup(sample, None, [], group) for sample, group in zip(samples, groups, strict=True)
        ]


def resampling_run() -> train_grpo.Grpo:
    """Two prompts per micro-step, two micro-steps, two rounds of further prompts; samples are numbers."""
    training = SimpleNamespace(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    cfg = SimpleNamespace(training=training, rlhf=SimpleNamespace(dynamic_sample=True, max_resample_times=2))
    data = SimpleNamespace(stream=SampleStream([list(range(40))], seed=3))
    policy = SimpleNamespace(client=object())
    run = grpo_of(SimpleNamespace(cfg=cfg, data=data, policy=policy, timed=lambda part: nullcontext()), {})
    run.session.prefetcher = Prefetcher(run, 2, num_threads=2, draws_more=True)
    return run


def test_a_server_lost_between_rounds_loses_no_prompt_LRN_1_CON_4(monkeypatch):
    """LRN-1, CON-4: asked again, a micro-step asks the same prompts, stand-ins too. Each round
    has seeds of its own (DIS-6)."""
    order, run = SampleStream([list(range(40))], seed=3).next(12), resampling_run()
    engine = Engine(monkeypatch, good={order[1], order[3]}, fails=2)
    drawn = run.draw()
    with pytest.raises(ConnectionError):
        run.generate(drawn, 0, 0)
    made = run.judge(run.generate(drawn, 0, 0), 0)
    assert engine.calls == [(0, order[:2]), (2, order[2:3]), (0, order[:2]), (2, order[2:3]), (4, order[3:4])]
    assert [group[0].text for group in made.groups] == [str(order[3]), str(order[1])]
    assert made.num_drawn == 4 and run.draw().samples == order[4:6]


def test_a_rank_that_fails_before_others_resample_is_not_waited_for_LRN_12(monkeypatch):
    """LRN-12: without servers the ranks agree on each round; one that failed says so instead, from its next fence."""
    run, ranks = resampling_run(), object.__new__(Ranks)
    Engine(monkeypatch, good=set())
    ranks.world_size, ranks.gather = 2, lambda value: [value, ["RewardError: no such reward", None]]
    run.session.ranks, run.session.policy.client = ranks, None
    with pytest.raises(DistributedError, match="generating failed on 1 of 2 ranks\nrank 1: RewardError"):
        run.generate(run.draw(), 0, 0)


def test_replacements_are_drawn_in_the_same_order_however_long_responses_take_GRP_6_DIS_3(monkeypatch):
    """GRP-6, DIS-3, LRN-1: both micro-steps generate at once; replacements are drawn after all prompts of the step,
    those of the first micro-step before those of the second; the next step goes on behind the last of them."""
    order = SampleStream([list(range(40))], seed=3).next(14)
    for slow in (0, 1):
        run, begun = resampling_run(), threading.Barrier(2, timeout=10)
        engine = Engine(monkeypatch, good=set())
        answer = engine.answer

        def wait(run, samples, step, micro_step_idx, answer=answer, begun=begun, slow=slow):
            if micro_step_idx < 2 and step == 0:
                begun.wait()
                time.sleep(0.1 * (micro_step_idx == slow))
            return answer(samples, step, micro_step_idx)

        monkeypatch.setattr(train_grpo.Grpo, "generate_groups", wait)
        made = run.session.prefetcher.get(0)
        asked = {micro: samples for micro, samples in engine.calls}
        assert asked == {0: order[:2], 1: order[2:4], 2: order[4:6], 4: order[6:8], 3: order[8:10], 5: order[10:12]}
        assert max(micro.data_position["position"] for micro in made) == 12
        del engine.calls[:]
        run.session.prefetcher.get(1)
        assert (0, order[12:14]) in engine.calls


def test_what_a_checkpoint_holds_ahead_is_drawn_again_as_it_was_LRN_5(monkeypatch):
    """LRN-5: the position behind the last step taken, then as many prompts as each micro-step ahead had used."""
    run = resampling_run()
    Engine(monkeypatch, good=set())
    taken, ahead = (run.generate(run.draw(), 0, micro) for micro in range(2))
    following = run.session.data.stream.next(2)
    resumed = resampling_run()
    resumed.session.data.stream.load_state_dict(taken.data_position)
    resumed._redraw.append(ahead.num_drawn)
    again = resumed.draw()
    assert len(again.samples) == ahead.num_drawn == 6 and again.data_position == ahead.data_position
    assert resumed.draw().samples == following
    assert resumed.generate(again, 1, 0).num_drawn == 6  # too old and made again: from the same prompts
    assert resumed.session.data.stream.state_dict()["position"] == 6 + 6 + 2


@pytest.mark.parametrize("window", [0, 1, 2])
def test_a_resumed_run_goes_on_with_what_was_made_ahead_and_draws_no_prompt_twice_LRN_5_LRN_1(monkeypatch, window):
    """LRN-5, LRN-1: through the real prefetcher. What was made ahead is not made again, and no prompt is lost."""
    Engine(monkeypatch, good={3, 5, 8, 13, 21, 34})

    def started(state: dict | None, step: int) -> train_grpo.Grpo:
        run = resampling_run()
        run.rewards = {"right": None}
        ahead = {"window": window, "queue_limit": 3, "num_threads": 5, "draws_more": True}
        run.session.prefetcher = Prefetcher(run, 2, **ahead)
        run.session.steps_done, run.data_position = step, run.session.data.stream.state_dict()
        run.session.cfg.training.packing = False
        run.session.cfg.rlhf.advantage = "answer"
        if state is not None:
            run.load_state_dict(state)
        return run

    drawn, run = 0, started(None, 0)
    for step in range(12):
        made = run.session.prefetcher.get(step)
        drawn += sum(micro.num_drawn for micro in made)
        texts = [{answer.text for group in micro.groups for answer in group} for micro in made]
        assert (texts[0] == {f"kept at {step - 1}"}) is bool(step and step % 3 == 0 and window)
        run.session.steps_done = step + 1
        run.data_position = max((micro.data_position for micro in made), key=lambda at: at["position"])
        assert run.data_position["position"] == drawn, step
        if step % 3 == 2:
            run.session.prefetcher.drain()
            ahead = run.session.prefetcher.prepared_from(step + 1)[0]
            for answer in itertools.chain(*(group for own in ahead for group in own.groups)):
                answer.text = f"kept at {step}"
            run = started(run.state_dict(), step + 1)


def test_a_micro_step_is_as_old_as_its_oldest_answer_LRN_8():
    """LRN-8: of those that did not fail."""

    def made_by(version: str | None) -> Answer:
        return Answer(plain_segment("s", [1], [2], policy_version=version), "", np.zeros(1), [], is_failed=not version)

    def lag(*versions: str | None) -> int:
        return grpo_of(None, {}).lag(train_grpo.MicroStep([[made_by(version) for version in versions]], 1, {}), 4)

    assert (lag("r:3", "r:1", None), lag("r:4"), lag(None)) == (3, 0, 0)


@pytest.mark.parametrize("has_names", [True, False])
def test_what_a_checkpoint_holds_ahead_must_fit_the_settings_of_now_LRN_5_PCK_3(has_names):
    """LRN-5, PCK-3: rewards of other functions, or an answer longer than a row now is, would fail on its rank alone."""

    def run_of(cap: int, *rewards: str, advantage: str = "answer") -> train_grpo.Grpo:
        rlhf = SimpleNamespace(advantage=advantage)
        cfg = SimpleNamespace(training=SimpleNamespace(packing=True), global_max_length=cap, rlhf=rlhf)
        stream = SampleStream([list(range(9))], seed=3)
        prefetcher = SimpleNamespace(prepared_from=lambda step: (ahead, 1), restore=lambda *_: None, works_ahead=True)
        session = SimpleNamespace(cfg=cfg, data=SimpleNamespace(stream=stream), prefetcher=prefetcher, steps_done=1)
        run = grpo_of(session, dict.fromkeys(rewards))
        run.data_position = stream.state_dict()
        return run

    ahead = [train_grpo.MicroStep([[Answer(plain_segment("s", [1], [2, 3]), "", np.zeros(2), [])]], 1, {})]
    state = run_of(3, "odd", "same").state_dict()
    if not has_names:
        del state["rewards"]
    run_of(3, "odd", "same").load_state_dict(state)
    rule = f"scored by {'odd, same' if has_names else '2 functions'}, now it is odd; .* new training.output_dir"
    with pytest.raises(ValueError, match=rule):
        run_of(3, "odd").load_state_dict(state)
    if has_names:
        with pytest.raises(ValueError, match="now it is same, odd;"):
            run_of(3, "same", "odd").load_state_dict(state)
    with pytest.raises(ValueError, match="segment has 3 tokens, global_max_length is 2"):
        run_of(2, "odd", "same").load_state_dict(state)
    with pytest.raises(ValueError, match="rlhf.advantage: 1 answers .* with the other setting"):
        run_of(3, "odd", "same", advantage="object").load_state_dict(state)
    run_of(2, "odd", advantage="object").load_state_dict(state | {"ahead": []})  # nothing waits, so all may change


def test_a_slow_reward_holds_up_no_request_GRP_5_LRN_8(folder, start_model):
    """GRP-5, LRN-8: the second micro-step is asked while the first one's answers are still being judged; with
    `dynamic_sample`, whose further requests follow from rewards, they are judged before, and only once. Whoever asks,
    one thread judges."""
    second_is_asked, judged, judges = threading.Event(), [], set()

    def slow(completion, sample):
        judged.append(str(completion))
        judges.add(threading.current_thread().name)
        assert second_is_asked.wait(20), "the second micro-step waits for rewards"
        return len(judged) % 2

    def generate(samples, prompts, sampling, step, micro_step_idx, allow_stale):
        if micro_step_idx:
            second_is_asked.set()
        return [RolloutResult([7], [5], f"{micro_step_idx}", "length", "r:0") for _ in samples]

    def slow_run(**rlhf) -> train_grpo.Grpo:
        cfg = load_config(config_of(folder, start_model, "slow", num_generations=2, **rlhf))
        data = SimpleNamespace(
            stream=SampleStream([[SimpleNamespace(id="s", source="file:1")]], seed=0),
            processor=SimpleNamespace(image_token_id=99),
            table=None,
            encode=lambda samples: [train_grpo.EncodedPrompt([5], {}) for _ in samples],
        )
        policy = SimpleNamespace(client=object(), generate=generate)
        ranks = SimpleNamespace(device=torch.device("cpu"))
        parts = {"cfg": cfg, "data": data, "policy": policy, "place": lambda segment: segment, "ranks": ranks}
        session = SimpleNamespace(**parts, timed=lambda part: nullcontext(), num_steps=1)
        run = grpo_of(session, {"slow": slow})
        Session.prefetch(session, run)
        return run

    run = slow_run()
    made = run.session.prefetcher.get(0)
    run.session.prefetcher.drain()
    assert judged == ["0"] * 4 + ["1"] * 4 and [len(group) for micro in made for group in micro.groups] == [2] * 4
    judged.clear()
    run = slow_run(dynamic_sample=True)
    responses = run.generate(run.draw(), 0, 0)
    assert judged == ["0"] * 4
    assert run.judge(responses, 0).groups == [group.answers for group in responses.groups] and len(judged) == 4
    assert judges == {"judge_0"}


@pytest.mark.parametrize("replaces", [True, False])
def test_answers_are_judged_for_the_step_that_trains_them_GRP_9(monkeypatch, replaces):
    """GRP-9 at the call sites: thresholds and weights of that step decide, also whether a prompt teaches anything."""
    run, steps = resampling_run(), []
    run.session.cfg.rlhf.dynamic_sample = replaces
    monkeypatch.setattr(train_grpo.Grpo, "reward_weights", lambda run, step: steps.append(step) or np.ones(1))
    del run.reward_weights
    run.generate_groups = lambda samples, *_: [train_grpo.ResponseGroup(own, None, ["r"]) for own in samples]
    run.make_answer = lambda sample, prompt, result, step: (
        steps.append(step) or Answer(plain_segment("s", [1], [2]), "", np.zeros(1), [])
    )
    run.session.prefetcher.get(5)
    assert set(steps) == {5} and len(steps) == (2 * (2 * 3 + 2) if replaces else 4)


def test_evaluation_counts_failed_requests_CON_3_LRN_7(folder, start_model):
    """CON-3, LRN-7: their reward is 0, like that of a bad answer."""
    run, truth, answer = detection_run(folder, start_model, reward_funcs=["detection_f1"], max_new_tokens=128)
    failed, found = RolloutResult([], [], "", None, None, error="unreadable image"), {}
    run.session.prefetcher = SimpleNamespace(in_judge_thread=lambda work, *args: work(*args))
    run.session.ranks = SimpleNamespace(sum=dict)
    cut = replace(answer, finish_reason="length")
    run.session.score_validation = lambda step, score: [score(truth, own) for own in (answer, cut, failed, failed)]
    run.session.log_evaluation = lambda step, result, records: found.update(
        result, errors=[r["error"] for r in records]
    )
    run.evaluate(1)
    assert (found["failed"], found["num_samples"], found["reward"]) == (2, 4, pytest.approx(4 / 12))
    assert found["errors"] == [None, None, "unreadable image", "unreadable image"] and found["truncated_rate"] == 0.25


def test_evaluation_scores_in_the_thread_that_judges_GRP_5_LRN_7(folder, start_model):
    """GRP-5, LRN-7: a reward function may keep what belongs to one thread, as a connection of sqlite3 does."""
    (folder / "kept.py").write_text(KEEPS_A_CONNECTION)
    rewards = {"reward_funcs": ["known"], "reward_weights": None, "reward_files": [str(folder / "kept.py")]}
    training = {"max_steps": 1, "eval_steps": 1, "eval_at_start": True}
    found = curves(run(config_of(folder, start_model, "kept", training, **rewards)))
    assert found["eval/reward"] == [0.5, 0.5] and found["reward"] == [0.5]
