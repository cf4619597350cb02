"""Curves, progress lines and run.json (LOG-2 to LOG-5)."""

import base64
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.config.test_load import edited
from tests.config.test_rlhf import grpo
from tests.data.test_images import png
from tests.run.test_rollout_log import Calls, Rank, call
from utils.config.load import build_config
from utils.dist import Ranks
from utils.run.inputs import check_inputs
from utils.run.monitor import (
    Monitor,
    best_steps,
    collapse_warnings,
    comparable_scores,
    evaluation_file,
    read_evaluations,
    write_evaluation,
    write_run_json,
)
from utils.run.records import LOGGED_PARTS
from utils.run.rollout_log import RolloutLog
from utils.run.session import Session
from utils.run.trackers import RunFacts

BOUNDS = {"min_parse_rate": 0.5, "max_duplicate_rate": 0.3, "max_truncated_rate": 0.5}


def test_run_json_holds_config_versions_and_command_LOG_2(tmp_path):
    """LOG-2."""
    write_run_json(tmp_path, {"a": 1}, run_id="abc", world_size=2)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["config"] == {"a": 1} and record["run_id"] == "abc" and record["world_size"] == 2
    assert {"torch", "deepspeed", "transformers", "peft"} <= set(record["versions"])
    assert record["command"] and "git_revision" in record


def test_run_json_stays_whole_on_a_full_disk_LOG_2_LRN_5(tmp_path, monkeypatch):
    """LOG-2, LRN-5: when a resumed run replaces it, and when its sync falls back; a resume reads it."""
    write_run_json(tmp_path, {"a": 1}, run_id="abc", resumed_from={"checkpoint": "elsewhere/checkpoint-2"})
    before = (tmp_path / "run.json").read_text()

    def write_half(descriptor):
        os.truncate(descriptor, os.fstat(descriptor).st_size // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", write_half)
    log = RolloutLog(tmp_path, Calls(call()), Rank())
    for write in (
        lambda: write_run_json(tmp_path, {"a": 2}, run_id="def"),
        lambda: log.write(1, "run:0", fallback="no slots"),
    ):
        with pytest.raises(OSError, match="No space left"):
            write()
        assert (tmp_path / "run.json").read_text() == before


def test_scalars_are_written_by_rank_0_only_LOG_3(tmp_path):
    """LOG-3."""
    for enabled in (True, False):
        monitor = Monitor(RunFacts(tmp_path / str(enabled)), num_steps=2, enabled=enabled)
        monitor.scalars(1, {"loss/total": 3.0})
        monitor.close()
    events = EventAccumulator(str(tmp_path / "True")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss/total")] == [(1, 3.0)]
    assert not (tmp_path / "False").exists()


def test_progress_is_plain_lines_without_a_terminal_LOG_5(tmp_path, capsys):
    """LOG-5."""
    monitor = Monitor(RunFacts(tmp_path), num_steps=10, enabled=True, report_to=())
    monitor.progress(1, loss=2.5, f1=0.25)
    monitor.close()
    line = capsys.readouterr().out
    assert line.startswith("step 1/10 loss=2.5 f1=0.25 left=")


def test_time_left_of_more_than_a_day_and_of_a_resumed_run_LOG_5(tmp_path, capsys, monkeypatch):
    """LOG-5: from the steps of this process alone, on a line as on a terminal's bar; without the evaluation that comes
    before the first of them."""
    clock = [0.0]
    monkeypatch.setattr("utils.run.monitor.time.monotonic", lambda: clock[0])
    monitor = Monitor(RunFacts(tmp_path), num_steps=2000, enabled=True, report_to=())
    clock[0] = 1900.0
    monitor.progress(901, {"step": 100.0}, loss=2.5)
    clock[0] = 2400.0  # the second step, and an evaluation
    monitor.progress(902, {"step": 200.0}, loss=2.5)
    monitor.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("left=1 day, 6:31:40") and second.endswith("left=3 days, 19:30:00")
    monkeypatch.undo()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monitor = Monitor(RunFacts(tmp_path), num_steps=1000, enabled=True, report_to=())
    monitor.progress(901, loss=2.5)
    assert (monitor._bar.initial, monitor._bar.n) == (900, 901)
    monitor.close()


def test_progress_says_where_the_time_goes_LOG_5(tmp_path, capsys):
    """LOG-5: shares of the step, the largest first, without what is below 5 %."""
    monitor = Monitor(RunFacts(tmp_path), num_steps=10, enabled=True, report_to=())
    monitor.progress(1, {"train": 3.0, "rollout": 6.0, "sync": 0.4, "prepare": 0.0, "step": 10.0}, loss=2.5)
    monitor.progress(2, {"train": 0.0, "step": 0.0}, loss=2.5)
    monitor.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1/10 loss=2.5 rollout=60% train=30% left=") and "%" not in second


def test_a_step_shows_its_score_against_the_first_and_warns_once_LOG_3_LOG_5(tmp_path, caplog):
    """LOG-3, LOG-5: as a session logs it; a sign of collapse that returns after it was over is said again."""
    shown, tables, recorded, score = [], [], {}, {"f1": 0.5, "num_images": 1.0}
    monitor = SimpleNamespace(
        progress=lambda step, seconds, **values: shown.append((seconds, values)),
        scalars=lambda step, values: recorded.update(values),
        table=lambda *own: tables.append(own),
        flush=lambda: None,
    )
    session = SimpleNamespace(
        policy=SimpleNamespace(log_calls=lambda *_: {}, pop_sync_metrics=lambda: {}),
        watch=SimpleNamespace(pop_metrics=lambda: {"server/0/running": 3.0}),
        cfg=SimpleNamespace(training=SimpleNamespace(collapse=SimpleNamespace(model_dump=lambda: BOUNDS))),
        ranks=SimpleNamespace(gather=lambda own: [own], is_main=True),
        on_all_ranks=lambda work, where: work(),
        eval_settings=lambda: {"metric": "f1"},
        **{"monitor": monitor, "run_dir": tmp_path, "metric": "f1", "validation": {}, "collapsed": set()},
    )
    session.find_validation = partial(Session.find_validation, session)
    metrics = {f"seconds/{part}": 1.0 for part in LOGGED_PARTS} | {"train/tokens_per_s": 9.0}
    embedded = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    answers = [{"id": "a", "images": [embedded, "/b.png"]}, {"id": "b", "images": []}]
    Session.log_evaluation(session, 0, score, answers)
    lines = [json.loads(line)["images"] for line in (tmp_path / "eval/step_000000.jsonl").read_text().splitlines()]
    (kept,) = (tmp_path / "eval/images").iterdir()
    assert lines == [[str(kept), "/b.png"], []] and kept.read_bytes() == png()
    labels = {"cat": {"num_gt": 3, "f1": 0.75}, "dog": {"num_gt": 1, "f1": 0.5}}
    Session.log_evaluation(session, 5, score | {"f1": 0.75}, [], {"labels": labels})
    assert tables == [(5, "eval/labels", ["label", "num_gt", "f1"], [["cat", 3, 0.75], ["dog", 1, 0.5]])]
    for parse_rate in (0.1, 0.1, 0.9, 0.1):
        Session.log_step(session, 6, metrics, {"parse_rate": parse_rate}, loss=1.0)
    assert shown[0] == (
        dict.fromkeys(LOGGED_PARTS, 1.0),
        {"loss": 1.0, "val_f1": 0.75, "first": 0.5, "tokens_per_s": 9.0},
    )
    assert len([text for text in caplog.messages if "no longer parse" in text]) == 2
    assert recorded["server/0/running"] == 3.0 and recorded["eval/f1"] == 0.75  # LOG-6


def test_the_curves_of_an_evaluation_are_written_before_its_file_LOG_3_LRN_5(tmp_path):
    """LOG-3, LRN-5: the file says that it is finished, so no resumed run records it again. The sync that brought its
    weights stands at its step."""
    seen, run = [], MagicMock(run_dir=tmp_path, metric="f1", eval_settings=lambda: {"metric": "f1"})
    run.ranks.gather, run.on_all_ranks = lambda own: [own], lambda work, where: work()
    run.policy.log_calls.return_value, run.policy.pop_sync_metrics.return_value = {}, {"sync/seconds": 0.5}
    run.monitor.scalars = lambda step, values: seen.append((step, values))
    run.monitor.flush = lambda: seen.append(evaluation_file(tmp_path, 4).exists())
    Session.log_evaluation(run, 4, {"f1": 0.75}, [])
    assert seen == [(4, {"eval/f1": 0.75, "sync/seconds": 0.5}), False] and evaluation_file(tmp_path, 4).exists()


def test_collapse_is_warned_about_past_each_bound_LOG_3():
    """LOG-3."""
    fine = {"parse_rate": 0.9, "duplicate_rate": 0.1, "truncated_rate": 0.1}
    assert collapse_warnings(fine, BOUNDS) == {}
    for name, value in (("parse_rate", 0.4), ("duplicate_rate", 0.4), ("truncated_rate", 0.6)):
        ((sign, warning),) = collapse_warnings(fine | {name: value}, BOUNDS).items()
        assert sign == name and f"{name}={value:.3f}" in warning
    (warning,) = collapse_warnings({"truncated_rate": 0.1, "signal_share": 0.0}, BOUNDS).values()
    assert "the rewards teach nothing" in warning and not collapse_warnings({"signal_share": 0.1}, BOUNDS)


def test_a_resumed_run_does_not_draw_a_step_twice_LOG_3(tmp_path):
    """LOG-3, LRN-5: the curves no longer show what an earlier process recorded from the resumed step on."""
    for first, purge_step in ((1, None), (3, 3)):
        monitor = Monitor(RunFacts(tmp_path, purge_step=purge_step), num_steps=5, enabled=True)
        for step in range(first, 6):
            monitor.scalars(step, {"loss/total": 10.0 * first + step})
        monitor.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss/total")] == [(1, 11), (2, 12), (3, 33), (4, 34), (5, 35)]


def test_finding_9_steps_not_clocks_order_curves_LOG_3(tmp_path, monkeypatch):
    """LOG-3, LRN-5: a clock that goes back an hour, then a day, between three processes of a run; what is read is what
    TensorBoard itself reads."""
    now = time.time()
    for first, clock in ((1, now), (3, now - 3600), (5, now - 86400)):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda clock=clock: clock)
            facts = RunFacts(tmp_path, purge_step=first if first > 1 else None)
            monitor = Monitor(facts, num_steps=7, enabled=True)
            for step in range(first, 8):
                monitor.scalars(step, {"loss/total": 10.0 * first + step})
            monitor.close()
    names = sorted(path.name for path in tmp_path.glob("events.*"))
    assert len(names) == 3 and f".{int(now - 86400)}." in names[-1]
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("loss/total")
    assert [(e.step, e.value) for e in events] == [(1, 11), (2, 12), (3, 33), (4, 34), (5, 55), (6, 56), (7, 57)]


@pytest.mark.parametrize("way", ["flush", "time"])
def test_a_killed_run_keeps_its_curves_LOG_3(tmp_path, way):
    """LOG-3: after `flush`, or after the writer's own time (here 1 s instead of 30), a kill loses nothing."""
    finish = "monitor.flush()" if way == "flush" else "time.sleep(2)"
    program = f"""
import os, signal, sys, time
from pathlib import Path
from utils.run import trackers as module
from utils.run.monitor import Monitor
assert module.FLUSH_S <= 30
module.FLUSH_S = 1 if {way!r} == "time" else 1000
monitor = Monitor(module.RunFacts(Path({str(tmp_path)!r})), num_steps=5, enabled=True)
monitor.scalars(1, {{"loss/total": 3.0}})
{finish}
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == -signal.SIGKILL
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss/total")] == [(1, 3.0)]


def test_images_are_read_back_as_drawn_LOG_4(tmp_path):
    """LOG-4."""
    pixels = np.zeros((4, 6, 3), dtype=np.uint8)
    pixels[1, 2] = (255, 10, 20)
    monitor = Monitor(RunFacts(tmp_path), num_steps=1, enabled=True)
    monitor.image(7, "dump/0", pixels)
    monitor.close()
    (event,) = EventAccumulator(str(tmp_path)).Reload().Images("dump/0")
    assert event.step == 7
    assert (np.asarray(Image.open(io.BytesIO(event.encoded_image_string))) == pixels).all()


def test_progress_lines_come_every_logging_steps_and_at_the_end_LOG_5(tmp_path, capsys):
    """LOG-5: TensorBoard still has every step (LOG-3)."""
    monitor = Monitor(RunFacts(tmp_path), num_steps=7, enabled=True, logging_steps=3)
    for step in range(1, 8):
        monitor.scalars(step, {"loss/total": step})
        monitor.progress(step, loss=step)
    monitor.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["3/7", "6/7", "7/7"]
    assert len(EventAccumulator(str(tmp_path)).Reload().Scalars("loss/total")) == 7


def test_other_ranks_write_and_print_nothing_LOG_5(tmp_path, capsys):
    """LOG-5: every method may be called on every rank."""
    monitor = Monitor(RunFacts(tmp_path / "run"), num_steps=2, enabled=False)
    monitor.scalars(1, {"a": 1.0})
    monitor.image(1, "b", np.zeros((2, 2, 3), dtype=np.uint8))
    monitor.progress(1, loss=1.0)
    monitor.flush()
    monitor.close()
    assert capsys.readouterr().out == "" and not (tmp_path / "run").exists()


def test_an_evaluation_is_written_with_its_answers_by_id_LRN_7(tmp_path):
    """LRN-7: the scores come last, so that their file says that the evaluation is finished."""
    write_evaluation(tmp_path, 40, {"f1": 0.5}, [{"id": "b"}, {"id": "a"}], is_best=True)
    assert json.loads(evaluation_file(tmp_path, 40).read_text()) == {"step": 40, "is_best": True, "f1": 0.5}
    answers = evaluation_file(tmp_path, 40).with_suffix(".jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in answers] == ["a", "b"]
    assert len(list((tmp_path / "eval").iterdir())) == 2


def test_an_evaluation_is_on_disk_before_it_has_its_name_LRN_5_LRN_7(tmp_path, monkeypatch):
    """LRN-5, LRN-7: else a power cut may leave the name without the scores."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}")))
    write_evaluation(tmp_path, 20, {"f1": 0.9}, [], is_best=True)
    assert synced == [str(evaluation_file(tmp_path, 20).with_suffix(".partial"))] * 2  # answers, then scores


def test_an_evaluation_that_cannot_be_read_does_not_count_LRN_5_LRN_7(tmp_path, caplog):
    """LRN-5, LRN-7: a power cut may leave an empty file; the run goes on with the others."""
    for step, score in ((20, 0.9), (40, 0.5), (60, 0.7)):
        write_evaluation(tmp_path, step, {"f1": score, "settings": {"metric": "f1"}}, [], is_best=True)
    evaluation_file(tmp_path, 20).write_text("")
    evaluation_file(tmp_path, 40).write_bytes(b"\xff{")
    evaluation_file(tmp_path, 80).write_text('{"f1": 0.95, "settings": {"metric": "f1"}, "is_best": true}')  # no run's
    assert comparable_scores(tmp_path, {"metric": "f1"}) == {60: 0.7} and best_steps(tmp_path) == {60}
    assert f"{evaluation_file(tmp_path, 20)} cannot be read and does not count" in caplog.text
    (tmp_path / "eval" / "step_000080_test.json").write_text("{}")  # of the user
    assert [scores["step"] for scores in read_evaluations(tmp_path)] == [60]


def settings_of(metric: str = "f1", digest: str = "a", **changes: Any) -> dict[str, Any]:
    """The settings of an evaluation, in a config with these changes and validation data of this digest."""
    cfg = build_config(edited(custom__val_jsonl="val.jsonl", **changes))
    inputs = {"digests": {"data": {"val.jsonl": {"bytes": 9, "blake2b": digest}}}}
    return Session.eval_settings(SimpleNamespace(cfg=cfg, metric=metric, inputs=inputs))


def test_scores_of_another_reward_are_another_evaluation_GRP_5_LRN_7(tmp_path):
    """GRP-5, LRN-7: a file of rewards may change under the same names. No other threshold counts than the rewards'."""
    (tmp_path / "mine.py").write_text("def mine(completion, sample):\n    return 0.1\n")
    (tmp_path / "model").mkdir()

    def settings(iou_threshold: float = 0.5, **rlhf: Any) -> dict[str, Any]:
        data = grpo(reward_funcs=["mine"], reward_files=[str(tmp_path / "mine.py")], **rlhf)
        data["model"] = {"path": str(tmp_path / "model")}
        data["custom"]["train_jsonl"] = str(tmp_path / "mine.py")
        data["training"]["output_dir"] = str(tmp_path)
        data["custom"]["extra"]["rollout_matching"] = {"eval": {"iou_threshold": iou_threshold}}
        cfg = build_config(data)
        return Session.eval_settings(
            SimpleNamespace(cfg=cfg, metric="reward", inputs=check_inputs(cfg, None, (), Ranks()))
        )

    first = settings()
    assert settings(iou_threshold=0.7) == first != settings(reward_iou=0.7)
    (tmp_path / "mine.py").write_text("def mine(completion, sample):\n    return 0.9\n")
    assert settings() != first


@pytest.mark.parametrize(
    ("changes", "is_kept"),
    [
        ({}, True),
        ({"training__max_steps": 7}, True),
        ({"metric": "recall"}, False),
        ({"digest": "b"}, False),
        ({"training__eval_limit": 3}, False),
        ({"data__prompt": "Find the cats."}, False),
        ({"RM__answer_format": "qwen3vl"}, False),
        ({"RM__max_new_tokens": 9}, False),
        ({"RM__eval__iou_threshold": 0.7}, False),
        ({"model__image_max_pixels": 4096}, False),
        ({"model__image_min_pixels": 64}, False),
    ],
)
def test_the_best_score_is_one_of_the_same_evaluation_LRN_7_LRN_5(caplog, monkeypatch, tmp_path, changes, is_kept):
    """LRN-7, LRN-5: a score of another metric, of other samples or from another prompt says nothing about this one,
    whichever process of the run made it."""
    monkeypatch.setattr("utils.run.session.set_random_states", lambda *_: None)
    write_evaluation(tmp_path, 4, {"f1": 0.9, "recall": 0.9, "settings": settings_of()}, [], is_best=True)
    now = MagicMock(run_dir=tmp_path, metric="f1", eval_settings=lambda: settings_of(**changes), steps_done=4)
    now.ranks.gather, now.on_all_ranks = lambda own: [own], lambda work, where: work()
    now.ranks.first = lambda own: own
    now.policy.log_calls.return_value = now.policy.pop_sync_metrics.return_value = {}
    now.find_validation, now.validation = partial(Session.find_validation, now), {}
    Session.resume(now, SimpleNamespace(load_state_dict=lambda state: None))
    assert now.validation == ({f"val_{now.metric}": 0.9, "first": 0.9} if is_kept else {})  # before the next one
    assert ("the best score so far no longer counts" in caplog.text) is not is_kept
    for step, score, is_best in (
        (5, 0.8, not is_kept),
        (6, 0.7, False),
        (7, 0.95, True),
        (7, 0.95, True),
    ):  # 7 is made anew
        Session.log_evaluation(now, step, {"f1": score, "recall": score}, [])
        assert json.loads(evaluation_file(tmp_path, step).read_text())["is_best"] is is_best
        assert now.validation == {f"val_{now.metric}": score, "first": 0.9 if is_kept else 0.8}


def test_an_evaluation_is_due_before_the_first_step_and_after_the_last_LRN_7():
    """LRN-7: a resumed run starts with one only if it owes it: any other would overwrite that of its checkpoint."""
    for steps_done, owes, num_made in ((0, False, 1), (4, False, 0), (4, True, 1)):
        made: list[int] = []
        session = MagicMock(owes_evaluation=owes, steps_done=steps_done)
        session.policy.client = session.teacher = None
        Session.begin(session, SimpleNamespace(evaluate=made.append))
        assert made == [steps_done] * num_made
    session = MagicMock(num_steps=5)
    for every, due in ((2, [2, 4, 5]), (0, [])):
        session.cfg.training.eval_steps = every
        assert [step for step in range(1, 6) if Session._evaluates_at(session, step)] == due


def test_the_end_of_a_run_names_the_next_commands(tmp_path, caplog):
    """How to watch, look at and score what it made."""
    run_dir, val = tmp_path / "my run", [SimpleNamespace(path="val.jsonl")]
    run_dir.mkdir()
    custom, origin = SimpleNamespace(val_jsonl=val), SimpleNamespace(file="mine.yaml")
    session = SimpleNamespace(
        ranks=SimpleNamespace(is_main=True, world_size=1),
        timer=SimpleNamespace(seconds={"train": 1.0}),
        cfg=SimpleNamespace(custom=custom, _origin=origin, is_detection=True),
        policy=SimpleNamespace(engine=SimpleNamespace(ledger=None)),
        **{"num_steps": 5, "steps_done": 7, "run_dir": run_dir},  # resumed behind a `max_steps` that was lowered
    )
    with caplog.at_level("INFO"):
        Session.finish(session)
    text = "\n".join(caplog.messages)
    for command in (
        f"tensorboard --logdir '{run_dir}'",
        f"python -m tools.report '{run_dir}'",
        f"python -m tools.evaluate --checkpoint '{run_dir}/checkpoint-7/merged' --data val.jsonl --config mine.yaml",
    ):
        assert command in text
    caplog.clear()
    session.cfg.is_detection = False  # GRPO of something else, which tools.evaluate cannot score
    with caplog.at_level("INFO"):
        Session.finish(session)
    assert "tools.report" in caplog.text and "tools.evaluate" not in caplog.text
