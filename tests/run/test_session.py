"""What a session hands to those who do its work: each checkpoint's limits, each rank's share of an evaluation; what its
ranks tell each other."""

import queue
import random
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from tests.config.test_load import edited
from utils.capacity import EVAL_MICRO_STEP
from utils.config.load import build_config
from utils.data.encoding import EncodedPrompt
from utils.data.samples import DataError
from utils.dist import DistributedError
from utils.rollout.backend import RolloutSampling
from utils.run import session
from utils.run.resume import random_states
from utils.run.session import Data, Session
from utils.run.shutdown import Stopped, StopRequest


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A session that is about to save step 3; `facts` is what `write_checkpoint` is given, `state` this rank's file."""
    run = MagicMock(steps_done=3, timed=lambda part: nullcontext())
    found = SimpleNamespace(run=run, facts={}, state={})

    def write_checkpoint(run_dir: Path, step: int, ranks: Any, write: Any, **facts: Any) -> None:
        found.facts |= facts
        write(tmp_path)

    monkeypatch.setattr(session, "write_checkpoint", write_checkpoint)
    monkeypatch.setattr(session, "rank_file", lambda folder, rank: folder / "rank.pt")
    for name in ("save_merged", "save_adapter"):
        monkeypatch.setattr(session, name, lambda *args, name=name: found.facts.update({name: args}))
    run.cfg.training.gradient_accumulation_steps = 2
    run.cfg.training.save_total_limit = 2
    run.cfg.model.path = "models/start"
    run._evaluates_at.return_value = True
    run.policy.engine = SimpleNamespace(mode="full", fallback=None)
    run.policy.rollout_log.calls_ahead.return_value = []
    run.eval_settings.return_value = {"metric": "f1"}
    run.monitor.flush = lambda: found.facts.update(curves_flushed_before=not found.facts)
    run.settings = {"deepspeed_file": {}}
    run.run_id, run.inputs, run.ranks.device = "abc", {"digests": {}}, torch.device("cpu")
    Session._save(run, SimpleNamespace(state_dict=lambda: {"ahead": []}))
    found.state = torch.load(tmp_path / "rank.pt", weights_only=True)
    return found


def test_a_checkpoint_is_written_with_limit_record_and_models_LRN_5_LRN_6(saving, tmp_path):
    """LRN-5, LRN-6: how many are kept, the best of which evaluations, of which run and which files."""
    facts, run = saving.facts, saving.run
    assert (facts["save_total_limit"], facts["eval_settings"]) == (2, {"metric": "f1"})
    assert (facts["run_id"], facts["inputs"]) == ("abc", {"digests": {}})
    assert facts["config"] == {"deepspeed_file": {}}
    pixels = run.cfg.model.image_min_pixels, run.cfg.model.image_max_pixels
    assert facts["save_merged"] == (run.learner.model, "models/start", tmp_path / "merged", run.ranks, pixels)
    assert facts["save_adapter"] == (run.learner.model, tmp_path / "adapter", run.ranks)
    assert run.steps_saved == 3 and facts["curves_flushed_before"]  # a kill behind it must not lose them


def test_a_checkpoint_says_that_its_evaluation_is_still_due_LRN_5(saving):
    """LRN-5: it is written before the evaluation of its step."""
    assert saving.state["owes_evaluation"] is True


def test_a_resumed_run_draws_on_from_the_random_states_of_its_checkpoint_LRN_5(tmp_path):
    """LRN-5: setting up has drawn in between."""
    resumed = {"random": random_states(torch.device("cpu"))}
    expected = random.random(), np.random.random(), torch.rand(1).item()
    run = MagicMock(resumed=resumed, run_dir=tmp_path, open_monitor=lambda _: random.random())
    run.ranks.device, run.ranks.first = torch.device("cpu"), lambda own: own
    Session.resume(run, SimpleNamespace(load_state_dict=lambda state: None))
    assert (random.random(), np.random.random(), torch.rand(1).item()) == expected


@pytest.mark.parametrize("error", [DataError(["x.jsonl:3: changed"]), OSError("x.jsonl: a disk that fails")])
def test_samples_that_cannot_be_drawn_again_end_all_ranks_LRN_5(tmp_path, capsys, error):
    """LRN-5: the file may change while the model loads; other ranks would wait for this one."""
    run = MagicMock(resumed={"random": None}, run_dir=tmp_path)
    run.ranks.first = MagicMock(side_effect=lambda own: own)
    with pytest.raises(SystemExit) as end:
        Session.resume(run, SimpleNamespace(load_state_dict=MagicMock(side_effect=error)))
    assert end.value.code == 2 and "x.jsonl" in capsys.readouterr().err
    run.ranks.first.assert_called_once()


def test_a_resumed_run_lets_go_of_what_it_has_loaded_LRN_5(tmp_path):
    """LRN-5: a buffer and micro-steps with their pixels, which would take memory to the end. It is no fresh start for
    that, which would begin with an evaluation."""
    pixels, made = torch.zeros(3), []
    state = {"random": random_states(torch.device("cpu")), "ahead": [{"pixel_values": pixels}]}
    run = MagicMock(resumed=state, run_dir=tmp_path, owes_evaluation=False, steps_done=4, teacher=None)
    run.ranks.device, run.ranks.first, run.policy.client = torch.device("cpu"), lambda own: own, None
    held = weakref.ref(pixels)
    del state, pixels
    program = SimpleNamespace(load_state_dict=lambda state: None, evaluate=made.append)
    Session.resume(run, program)
    assert held() is None
    Session.begin(run, program)
    assert made == []


def test_a_checkpoint_that_another_rank_cannot_continue_from_ends_this_one_too_LRN_5(tmp_path, capsys):
    """LRN-5: it would wait for that rank in the first step."""
    run = MagicMock(resumed={"random": random_states(torch.device("cpu"))}, run_dir=tmp_path)
    run.ranks.device, run.ranks.first = torch.device("cpu"), lambda own: "a segment is longer than a row"
    with pytest.raises(SystemExit) as end:
        Session.resume(run, SimpleNamespace(load_state_dict=lambda state: None))
    message = "training.resume_from_checkpoint: a segment is longer than a row\n"
    assert end.value.code == 2 and capsys.readouterr().err == message
    run.open_monitor.assert_not_called()  # what is on record of the run stays as it was


def test_prompts_are_encoded_by_one_thread_at_a_time_LRN_8(monkeypatch):
    """LRN-8: a fast tokenizer cannot be used by two; an evaluation encodes while micro-steps ahead do."""
    inside, seen = [], []

    def encode_prompt(*_):
        inside.append(1)
        seen.append(len(inside))
        time.sleep(0.05)
        inside.pop()

    monkeypatch.setattr(session, "encode_prompt", encode_prompt)
    data = Data(None, [], None, None, torch.float32)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(data.encode, ["a", "b", "c"]))
    assert seen == [1, 1, 1]


@pytest.mark.parametrize("draws_more", [True, False])
def test_micro_steps_that_draw_more_are_prepared_one_at_a_time_GRP_6_LRN_5(draws_more):
    """GRP-6, LRN-5: what the program says of itself reaches what prepares them."""
    run = MagicMock()
    run.cfg.training.gradient_accumulation_steps, run.cfg.rm.async_.queue_limit = 1, 1
    run.cfg.rm.async_.enabled = False
    Session.prefetch(run, None, draws_more)
    assert run.prefetcher._draws_more is draws_more


def test_micro_steps_are_prepared_as_far_ahead_and_as_many_at_once_as_the_config_says_DIS_3_LRN_8_CON_4(monkeypatch):
    """DIS-3, LRN-8: one thread for each micro-step of a step, and for each that may be queued. CON-4: a recovery waits
    until all have ended."""
    made, run = {}, MagicMock()
    monkeypatch.setattr(session, "Prefetcher", lambda *args, **more: made.update(more) or run.made)
    run.cfg.training.gradient_accumulation_steps = 3
    run.cfg.rm.async_.queue_limit, run.cfg.rm.async_.version_window = 5, 2
    for is_ahead, expected in ((True, (2, 5, 8)), (False, (0, 5, 3))):
        run.cfg.rm.async_.enabled = is_ahead
        Session.prefetch(run, None)
        assert tuple(made[name] for name in ("window", "queue_limit", "num_threads")) == expected
        assert run.policy.drain is run.made.drain


def test_a_signal_during_an_evaluation_stops_behind_it_LRN_12():
    """LRN-12: not one step later."""
    run = MagicMock(steps_done=4, num_steps=9)
    run.cfg.training.save_steps = 0
    run._stop_signal = lambda: "SIGTERM"
    run._stop_words = str
    with pytest.raises(Stopped):
        Session.end_step(run, MagicMock(), None)
    run._save_unsaved.assert_called_once_with()


def test_what_waits_for_a_server_when_the_run_ends_gives_up_soon_LRN_12():
    """LRN-12: a teacher that hangs would keep the process, and its GPUs, for three tries of 240 s."""
    run, stopped = MagicMock(lock=None, stop=StopRequest()), []
    run.prefetcher.close = lambda **_: stopped.append(run.stop.requested.is_set())
    Session.close(run)
    assert stopped == [True]


def test_a_signal_that_another_rank_received_stops_this_one_too_LRN_12():
    """LRN-12: between steps and around an evaluation; ranks that went on would wait for that one."""
    run = MagicMock()
    run.stop.signal_name = None
    run.ranks.gather = lambda own: [own, own | {"signal_name": "SIGTERM"}]
    run.ranks.first = lambda own: own or "SIGTERM"
    assert Session.gather_step(run, MagicMock(), lengths=[], lags=[])["signal_name"] == "SIGTERM"
    assert Session._stop_signal(run) == "SIGTERM"


def test_signals_are_taken_again_before_the_first_step_LRN_12():
    """LRN-12: DeepSpeed or vLLM may have installed handlers of their own while they were set up."""
    run = MagicMock(owes_evaluation=False)
    run.cfg.training.eval_at_start, run.policy.client, run.teacher = False, None, None
    Session.begin(run, SimpleNamespace())
    run.stop.install.assert_called_once_with()
    assert run.stop.is_training is True


def test_a_resumed_run_that_fails_before_its_first_step_saves_nothing_again_LRN_12():
    """LRN-12: its checkpoint is there; written again, the good one would be put aside as damaged."""
    run = MagicMock(steps_done=3, owes_evaluation=False, teacher=None)
    run._save_unsaved = lambda: Session._save_unsaved(run)
    run._stop_signal.return_value = None
    Session.begin(run, SimpleNamespace())
    for steps_done, num_saves in ((3, 0), (4, 1)):
        run.steps_done = steps_done
        with pytest.raises(DistributedError, match="a server is lost"), Session.finished_steps_saved(run):
            raise DistributedError("a server is lost")
        assert run._save.call_count == num_saves


@pytest.mark.parametrize(("ratios", "synced"), [((1.0, 1.0), [0]), ((1.0, 0.9), [0, 1, 2])])
def test_steps_without_rollouts_sync_once_to_show_that_it_works_LRN_10(ratios, synced):
    """LRN-10: a supervised run that evaluates needs no new weights at the server for each of its steps."""
    raw = edited(custom__train_jsonl=[{"path": f"{r}.jsonl", "teacher_forced_ratio": r} for r in ratios])
    run = MagicMock(cfg=build_config(raw), finished_steps_saved=nullcontext)
    run.on_all_ranks = lambda work, where: work()
    run.policy = SimpleNamespace(version=None)
    run.prefetcher.get = lambda step: [f"micro-steps of {step}"]
    done = []

    def with_current_weights(step: int, work: Any, where: str) -> Any:
        done.append(step)
        run.policy.version = f"run:{step}"
        return work()

    run.policy.with_current_weights = with_current_weights
    assert [Session.prepare(run, step) for step in range(3)] == [[f"micro-steps of {step}"] for step in range(3)]
    assert done == synced


@pytest.mark.parametrize(
    ("uses_vllm", "size", "at_once", "num_calls"),
    [(True, 1, 256, 1), (False, 1, 256, 1), (True, 1, 2, 2), (True, 3, 8, 2)],
)
def test_ranks_share_the_validation_samples_LRN_7_TGT_14(monkeypatch, uses_vllm, size, at_once, num_calls):
    """LRN-7, TGT-14: each sample once, greedily; with log-probabilities where the engine can report them. Each rank
    makes as many calls as the others, an empty one at the end if it must: some engines answer all ranks together. Ranks
    that share an engine send each other their samples, fewer at once."""
    monkeypatch.setattr(session, "EVAL_SAMPLES", at_once)
    scored, asked = [], []
    for rank in range(3):
        run = MagicMock(timed=lambda part: nullcontext(), finished_steps_saved=nullcontext)
        run.cfg.rm.max_new_tokens, run.cfg.uses_vllm, run.cfg.rm.vllm.tensor_parallel_size = 9, uses_vllm, size
        run.ranks = SimpleNamespace(rank=rank, world_size=3)
        run.data = Data(None, list("abcdefg"), None, None, torch.float32)
        monkeypatch.setattr(Data, "encode", lambda self, own, pixels: [f"{each.upper()} {pixels}" for each in own])

        def generate(samples: list, prompts: list, *rest: Any) -> list:
            asked.append(rest)
            return prompts

        run.policy = SimpleNamespace(with_current_weights=lambda step, work, where: work(), generate=generate)
        scored += Session.score_validation(run, 4, lambda sample, result: sample + result)
        assert len(asked) == num_calls * (rank + 1)
    assert sorted(scored) == [f"{own}{own.upper()} {not uses_vllm}" for own in "abcdefg"]
    assert asked == [(RolloutSampling(max_new_tokens=9, logprobs=uses_vllm), 4, EVAL_MICRO_STEP)] * len(asked)


def test_the_next_validation_samples_are_encoded_while_the_engine_answers_LRN_7(monkeypatch):
    """LRN-7: no further; an error of theirs comes in their turn."""
    encoded, data = queue.Queue(), Data(None, list("abcde"), None, None, torch.float32)

    def encode(self, samples: list, keeps_pixels: bool) -> list:
        encoded.put(samples)
        if "e" in samples:
            raise OSError("e is gone")
        return samples

    monkeypatch.setattr(Data, "encode", encode)
    ahead = data.validation_ahead([range(0, 2), range(2, 4), range(4, 5)], True)
    for own, following in (("ab", "cd"), ("cd", "e")):
        assert next(ahead) == (list(own), list(own))
        if own == "ab":
            assert encoded.get(timeout=10) == ["a", "b"]
        assert encoded.get(timeout=10) == list(following) and encoded.empty()
    with pytest.raises(OSError, match="e is gone"):
        next(ahead)
    assert list(data.validation_ahead([], True)) == []


def test_prompts_for_an_engine_that_reads_the_images_itself_hold_no_pixels(monkeypatch):
    monkeypatch.setattr(session, "encode_prompt", lambda sample, processor, dtype: EncodedPrompt([sample], {"p": 1}))
    data = Data(None, [], None, None, torch.float32)
    assert data.encode([7, 8]) == [EncodedPrompt([7], {"p": 1}), EncodedPrompt([8], {"p": 1})]
    assert data.encode([7, 8], keeps_pixels=False) == [EncodedPrompt([7], {}), EncodedPrompt([8], {})]
