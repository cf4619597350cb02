"""Checkpoint directories: complete or ignored, found or refused with a reason, never the last good one deleted."""

import errno
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_packing import labelled_segment, plain_segment
from utils.data.samples import Sample
from utils.data.stream import SampleStream
from utils.dist import DistributedError, Ranks
from utils.packing import CarryBuffer
from utils.run import resume
from utils.run.monitor import write_evaluation
from utils.run.resume import (
    RunLock,
    checkpoint_folders,
    choose_checkpoint,
    drop_records_after,
    newest_complete,
    random_states,
    read_manifest,
    set_random_states,
    write_checkpoint,
)

CONFIG = {
    "model": {"path": "m", "dtype": "float32"},
    "tuner": {"rank": 4},
    "custom": {"trainer_variant": "rollout_matching_sft", "train_jsonl": "train.jsonl"},
    "training": {"seed": 42, "packing": True, "max_steps": 10, "output_dir": "run"},
    "deepspeed": "zero2",
}


@pytest.fixture
def ranks(monkeypatch) -> Ranks:
    """One rank, no processes."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    return Ranks()


SETTINGS = {"metric": "f1", "prompt": "find all"}


def save(run: Path, step: int, ranks: Ranks, limit: int | None = None, config: dict = CONFIG) -> Path:
    def write(folder: Path) -> None:
        (folder / "state").mkdir()
        (folder / "state" / "rank_00000.pt").write_bytes(bytes([step]) * 100)
        (folder / "model.bin").write_bytes(bytes([step]) * 1000)

    (run / "run.json").parent.mkdir(parents=True, exist_ok=True)
    (run / "run.json").write_text("{}")
    kept = {"save_total_limit": limit, "eval_settings": SETTINGS}
    return write_checkpoint(run, step, ranks, write, run_id="abc", config=config, **kept)


def names(run: Path) -> list[str]:
    return [path.name for path in checkpoint_folders(run)]


def test_a_checkpoint_says_what_it_holds_LRN_5(tmp_path, ranks):
    """LRN-5."""
    path = save(tmp_path, 7, ranks)
    found = read_manifest(path)
    assert (found.step, found.run_id, found.world_size, found.config) == (7, "abc", 1, CONFIG)
    assert found.files.keys() == {"model.bin", "state/rank_00000.pt"}
    assert found.files["model.bin"]["bytes"] == 1000
    assert newest_complete(tmp_path, ranks) == (found, {})


def flip(path: Path, at: int = 50) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a missing shard": (lambda p: (p / "state" / "rank_00000.pt").unlink(), "state/rank_00000.pt is missing"),
    "a cut file": (lambda p: os.truncate(p / "model.bin", 999), "model.bin has 999 bytes, 1000 were written"),
    "a flipped byte": (lambda p: flip(p / "model.bin"), "model.bin was changed after it was written"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json cannot be read"),
    "a cut manifest": (lambda p: os.truncate(p / "manifest.json", 40), "manifest.json was changed"),
    "a flipped byte in the manifest": (lambda p: flip(p / "manifest.json"), "manifest.json was changed"),
    "an empty manifest": (lambda p: os.truncate(p / "manifest.json", 0), "manifest.json was changed"),
    "bytes that are no text": (lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json cannot be"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_left_alone_and_passed_over_LRN_5(tmp_path, ranks, name, caplog):
    """LRN-5: the newest complete one is found."""
    damage, message = DAMAGES[name]
    for step in (2, 4, 10):
        save(tmp_path, step, ranks)
    damage(tmp_path / "checkpoint-10")
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    found = choose_checkpoint(tmp_path, "auto", CONFIG, ranks)
    assert found.path == tmp_path / "checkpoint-4"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "checkpoint-10" in warning and message in warning
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before


def test_files_are_hashed_and_verified_several_at_a_time_LRN_5(tmp_path, ranks, monkeypatch):
    """Each of the two files waits for the other: one after the other would break the barrier."""
    together, digest_of = threading.Barrier(2, timeout=20), resume._digest_of

    def wait_for_the_other(path: Path) -> str:
        together.wait()
        return digest_of(path)

    monkeypatch.setattr(resume, "_digest_of", wait_for_the_other)
    assert resume.problem_of(save(tmp_path, 3, ranks), ranks) is None


def test_a_renamed_checkpoint_is_not_taken_for_another_step_LRN_5(tmp_path, ranks):
    """LRN-5."""
    save(tmp_path, 2, ranks).rename(tmp_path / "checkpoint-3")
    assert "it holds step 2" in newest_complete(tmp_path, ranks)[1]["checkpoint-3"]


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=40, deadline=None)
def test_no_flipped_bit_goes_unnoticed_LRN_5(tmp_path_factory, at, bit):
    """LRN-5: in any file, the manifest included."""
    folder, ranks = tmp_path_factory.mktemp("flip"), Ranks()
    path = save(folder, 3, ranks)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    at %= sum(file.stat().st_size for file in files)
    for file in files:
        if at < file.stat().st_size:
            content = bytearray(file.read_bytes())
            content[at] ^= 1 << bit
            file.write_bytes(content)
            break
        at -= file.stat().st_size
    checkpoint, passed_over = newest_complete(folder, ranks)
    if content.endswith(b"\n") or file.name != "manifest.json":  # (its last newline is the one byte without meaning)
        assert checkpoint is None and "checkpoint-3" in passed_over


def test_a_kill_while_writing_leaves_what_was_there_LRN_5(tmp_path, ranks):
    """LRN-5: in a real process, killed inside `write` or between manifest and rename."""
    save(tmp_path, 2, ranks)
    for place in ("write", "rename"):
        program = f"""
import os, signal
from pathlib import Path
from utils.run import resume
from utils.dist import Ranks
kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
def write(folder):
    (folder / "a").write_text("a")
    if {place!r} == "write":
        kill()
Path.rename = kill
resume.write_checkpoint(Path({str(tmp_path)!r}), 4, Ranks(), write, run_id="r", config={{}})
"""
        assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == -9
        assert (tmp_path / "checkpoint-4.partial").exists() and names(tmp_path) == ["checkpoint-2"]
        found, passed_over = newest_complete(tmp_path, ranks)
        assert found.step == 2 and passed_over == {"checkpoint-4.partial": "it was never finished"}
    save(tmp_path, 4, ranks)  # the same step again
    assert newest_complete(tmp_path, ranks)[0].step == 4 and not (tmp_path / "checkpoint-4.partial").exists()


@pytest.mark.parametrize("limit", [None, 3])
def test_what_a_killed_save_left_goes_once_another_is_complete_LRN_5(tmp_path, ranks, limit):
    """LRN-5: a resumed run may never save that step again, and a partial checkpoint can be tens of GB; whatever was
    complete once, stays."""
    save(tmp_path, 2, ranks)
    flip(tmp_path / "checkpoint-2" / "model.bin")
    save(tmp_path, 2, ranks)
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / "checkpoint-5.partial")
    save(tmp_path, 4, ranks, limit)
    left = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert left == ["checkpoint-2", "checkpoint-2.damaged-1", "checkpoint-4"]


def test_what_a_killed_first_save_left_is_no_damaged_checkpoint_LRN_5(tmp_path, ranks):
    """LRN-5: the run starts again from the beginning."""
    save(tmp_path, 2, ranks)
    (tmp_path / "checkpoint-2").rename(tmp_path / "checkpoint-2.partial")
    assert choose_checkpoint(tmp_path, "auto", CONFIG, ranks) is None


def test_a_full_disk_ends_the_save_and_harms_nothing_LRN_5(tmp_path, ranks, monkeypatch):
    """LRN-5: the error reaches every rank, and the space is free again."""
    save(tmp_path, 2, ranks)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DistributedError, match="No space left on device"):
        save(tmp_path, 4, ranks, limit=1)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2"]
    assert newest_complete(tmp_path, ranks)[0].step == 2


def test_all_of_a_checkpoint_is_on_disk_before_it_has_its_name_LRN_5(tmp_path, ranks, monkeypatch):
    """LRN-5: else a power cut may leave the name without the content; last comes the name itself."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}")))
    save(tmp_path, 4, ranks)
    partial = tmp_path / "checkpoint-4.partial"
    content = [partial / "model.bin", partial / "state/rank_00000.pt", partial / "manifest.json"]
    assert set(synced[:-1]) >= {str(path) for path in (*content, partial / "state", partial)}
    assert synced[-1] == str(tmp_path) and (tmp_path / "checkpoint-4").exists()


def test_a_damaged_checkpoint_of_the_same_step_is_kept_aside_LRN_5(tmp_path, ranks):
    """LRN-5: each time the run comes to that step again."""
    for number in (1, 2):
        save(tmp_path, 4, ranks)
        flip(tmp_path / "checkpoint-4" / "model.bin")
        save(tmp_path, 4, ranks)
        assert newest_complete(tmp_path, ranks)[0].step == 4
        assert (tmp_path / f"checkpoint-4.damaged-{number}" / "model.bin").exists()


def test_save_total_limit_keeps_the_newest_complete_ones_LRN_5(tmp_path, ranks):
    """LRN-5: damaged ones are neither counted nor deleted, so the last good one stays."""
    for step in (2, 4, 6):
        save(tmp_path, step, ranks, limit=2)
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-4"]
    (tmp_path / "checkpoint-6" / "model.bin").unlink()
    resume.delete_old(tmp_path, 6, 1)
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-4"]
    save(tmp_path, 8, ranks, limit=1)
    assert names(tmp_path) == ["checkpoint-8", "checkpoint-6"]


def test_scores_that_cannot_be_read_cost_no_checkpoint_LRN_5(tmp_path, ranks, caplog):
    """LRN-5: a disk that fails for a while. The step may be the best, and other ranks wait for the end of the save."""
    for step in (2, 4):
        save(tmp_path, step, ranks)
    (tmp_path / "eval" / "step_000002.json").mkdir(parents=True)
    save(tmp_path, 6, ranks, limit=1)
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-2"]
    assert "step_000002.json cannot be read and does not count: [Errno 21] Is a directory" in caplog.text


def test_a_damaged_later_checkpoint_does_not_cost_the_one_just_written_LRN_5(tmp_path, ranks):
    """LRN-5: only its digest tells that it is damaged, and that is not read at each save."""
    for step in (40, 60):
        save(tmp_path, step, ranks)
    flip(tmp_path / "checkpoint-60" / "model.bin")
    assert choose_checkpoint(tmp_path, "auto", CONFIG, ranks).step == 40
    save(tmp_path, 50, ranks, limit=1)
    assert names(tmp_path) == ["checkpoint-60", "checkpoint-50"]
    assert choose_checkpoint(tmp_path, "auto", CONFIG, ranks).step == 50


def test_the_best_checkpoint_is_kept_beside_the_newest_LRN_5(tmp_path, ranks):
    """LRN-5: by the evaluations so far; an earlier best one goes. Of equal ones the first is the best."""
    for step, f1 in ((2, 0.5), (4, 0.7), (6, 0.6), (8, 0.7), (10, 0.6), (12, 0.6)):
        save(tmp_path, step, ranks, limit=2)
        write_evaluation(tmp_path, step, {"f1": f1, "settings": SETTINGS}, [], is_best=step in (2, 4))
    assert names(tmp_path) == ["checkpoint-12", "checkpoint-10", "checkpoint-4"]


def test_the_best_checkpoint_is_the_best_of_those_there_are_LRN_5_LRN_7(tmp_path, ranks):
    """LRN-5, LRN-7: where the best evaluations were made at the start and between two checkpoints; scores of other
    validation data, or of another prompt, say nothing."""
    scores = {0: 0.9, 1: 0.1, 2: 0.3, 3: 0.8, 4: 0.7, 5: 0.95, 6: 0.6, 7: 0.5, 8: 0.2, 9: 0.2, 10: 0.2}
    for step, f1 in scores.items():
        if step and step % 2 == 0:
            save(tmp_path, step, ranks, limit=1)
        settings = SETTINGS | ({"prompt": "find the cats"} if step == 6 else {})
        f1 = 0.99 if step == 6 else f1
        write_evaluation(tmp_path, step, {"f1": f1, "settings": settings}, [], is_best=step in (0, 5, 6))
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-4"]


def test_the_best_checkpoint_by_other_settings_stays_until_another_is_scored_LRN_5(tmp_path, ranks):
    """LRN-5: an earlier version wrote no settings, and a resumed run may change them."""
    for step, f1, own in ((2, 0.9, {}), (4, 0.5, {}), (6, 0.4, {}), (8, 0.1, {"settings": SETTINGS})):
        save(tmp_path, step, ranks, limit=1)
        assert step < 6 or names(tmp_path) == [f"checkpoint-{step}", "checkpoint-2"]
        write_evaluation(tmp_path, step, {"f1": f1, **own}, [], is_best=step in (2, 8))
    save(tmp_path, 10, ranks, limit=1)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-8"]


def test_a_deletion_interrupted_by_a_kill_is_finished_LRN_5(tmp_path, ranks):
    """LRN-5: and its remains never look like a checkpoint."""
    save(tmp_path, 2, ranks).rename(tmp_path / "checkpoint-2.deleting")
    (tmp_path / "checkpoint-2.deleting" / "model.bin").unlink()
    assert newest_complete(tmp_path, ranks) == (None, {})
    save(tmp_path, 4, ranks, limit=3)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]


# ---------------------------------------------------------------------------------------------------------------------
# choosing the one to resume from


def test_auto_without_a_checkpoint_starts_from_the_beginning_and_says_so_LRN_5(tmp_path, ranks, caplog):
    """LRN-5."""
    with caplog.at_level(logging.INFO):
        assert choose_checkpoint(tmp_path / "run", "auto", CONFIG, ranks) is None
    assert "no checkpoint yet, starting from the beginning" in caplog.text


def test_auto_does_not_start_over_where_all_checkpoints_are_damaged_LRN_5(tmp_path, ranks):
    """LRN-5: that would overwrite what can be repaired."""
    flip(save(tmp_path, 2, ranks) / "model.bin")
    with pytest.raises(ValueError, match=r"none of its checkpoints is complete \(checkpoint-2: model.bin was changed"):
        choose_checkpoint(tmp_path, "auto", CONFIG, ranks)


def test_a_used_directory_is_refused_without_resume_LRN_5(tmp_path, ranks):
    """LRN-5: two runs never mix."""
    assert choose_checkpoint(tmp_path, None, CONFIG, ranks) is None
    save(tmp_path, 2, ranks)
    with pytest.raises(ValueError, match="holds an earlier run; resume it .--resume auto., choose another"):
        choose_checkpoint(tmp_path, None, CONFIG, ranks)


def test_a_path_is_taken_if_it_is_complete_and_the_newest_LRN_5(tmp_path, ranks):
    """LRN-5: later checkpoints would belong to another history."""
    first, second = (save(tmp_path / "run", step, ranks) for step in (2, 4))
    assert choose_checkpoint(tmp_path / "run", str(second), CONFIG, ranks).step == 4
    with pytest.raises(ValueError, match="also holds checkpoint-4, which would no longer belong to this run"):
        choose_checkpoint(tmp_path / "run", str(first), CONFIG, ranks)
    assert choose_checkpoint(tmp_path / "new", str(first), CONFIG, ranks).step == 2  # a branch of its own
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.json").write_text(json.dumps({"resumed_from": {"checkpoint": str(first)}}))
    assert choose_checkpoint(tmp_path / "new", "auto", CONFIG, ranks).step == 2  # it ended before its own first one
    save(tmp_path / "new", 6, ranks)
    assert choose_checkpoint(tmp_path / "new", "auto", CONFIG, ranks).step == 6
    save(tmp_path / "other", 2, ranks)
    with pytest.raises(ValueError, match="lies outside training.output_dir=.*which holds another run"):
        choose_checkpoint(tmp_path / "other", str(first), CONFIG, ranks)
    flip(second / "model.bin")
    with pytest.raises(ValueError, match="not a complete checkpoint: model.bin was changed"):
        choose_checkpoint(tmp_path / "run", str(second), CONFIG, ranks)
    with pytest.raises(ValueError, match="not a complete checkpoint: manifest.json cannot be read"):
        choose_checkpoint(tmp_path / "run", str(tmp_path / "nowhere"), CONFIG, ranks)


def test_auto_names_a_run_json_that_is_torn_LRN_5(tmp_path, ranks):
    """LRN-5: without it nobody knows whether the run began with another run's checkpoint."""
    (tmp_path / "run.json").write_text('{"resumed_from": {"check')
    with pytest.raises(ValueError, match=r"run.json: is no whole JSON \(.*remove it, then start the run again as at"):
        choose_checkpoint(tmp_path, "auto", CONFIG, ranks)


def test_another_number_of_ranks_is_refused_with_both_numbers_LRN_5_LRN_1(tmp_path, ranks):
    """LRN-5, LRN-1."""
    save(tmp_path, 2, ranks)
    ranks.world_size = 4
    ranks.gather = lambda value: [value, None, None, None]
    with pytest.raises(ValueError, match="was written by 1 ranks, this run has 4; .*resume with 1 ranks"):
        choose_checkpoint(tmp_path, "auto", CONFIG, ranks)


def test_settings_that_must_stay_are_named_with_both_values_LRN_5(tmp_path, ranks):
    """LRN-5."""
    save(tmp_path, 2, ranks)
    changed = CONFIG | {"tuner": {"rank": 8}, "model": {"path": "n", "dtype": "float32"}}
    with pytest.raises(ValueError) as caught:
        choose_checkpoint(tmp_path, "auto", changed, ranks)
    assert 'model.path was "m", now "n"; tuner.rank was 4, now 8' in str(caught.value)


def test_the_answer_format_must_stay_LRN_5(tmp_path, ranks):
    """LRN-5: segments that wait are written in it."""

    def config_of(form: str) -> dict:
        return CONFIG | {"custom": CONFIG["custom"] | {"extra": {"rollout_matching": {"answer_format": form}}}}

    save(tmp_path, 2, ranks, config=config_of("coord_tokens"))
    with pytest.raises(ValueError, match='rollout_matching.answer_format was "coord_tokens", now "qwen3vl"; set them'):
        choose_checkpoint(tmp_path, "auto", config_of("qwen3vl"), ranks)


@pytest.mark.parametrize(
    ("batch", "accumulation", "is_ahead", "is_refused"),
    [(4, 3, False, False), (2, 6, False, False), (2, 3, False, True), (2, 6, True, True), (4, 3, True, False)],
)
def test_the_samples_of_a_step_must_stay_LRN_5(tmp_path, ranks, batch, accumulation, is_ahead, is_refused):
    """LRN-5: or the schedule ends early; with micro-steps prepared ahead those must keep their size, too."""

    def config_of(batch: int, accumulation: int) -> dict:
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        ahead = {"extra": {"rollout_matching": {"async": {"enabled": is_ahead}}}}
        custom = CONFIG["custom"] | ahead
        return CONFIG | {"training": CONFIG["training"] | sizes, "custom": custom}

    save(tmp_path, 2, ranks, config=config_of(4, 3))
    if not is_refused:
        assert choose_checkpoint(tmp_path, "auto", config_of(batch, accumulation), ranks).step == 2
        return
    with pytest.raises(ValueError, match="training.per_device_train_batch_size was 4, now 2"):
        choose_checkpoint(tmp_path, "auto", config_of(batch, accumulation), ranks)


def test_what_the_deepspeed_file_says_of_optimizer_shards_must_stay_LRN_5(tmp_path, ranks, caplog):
    """LRN-5: under the same name; other knobs may change. Earlier versions kept the name alone."""

    def config_of(**zero: Any) -> dict:
        return CONFIG | {"deepspeed_file": {"zero_optimization": {"stage": 2} | zero}}

    save(tmp_path, 2, ranks, config=config_of())
    for zero in ({"stage": 3}, {"offload_optimizer": {"device": "cpu"}}):
        with pytest.raises(ValueError, match=r"has other settings: deepspeed_file.zero_optimization.\w+(.device)? was"):
            choose_checkpoint(tmp_path, "auto", config_of(**zero), ranks)
    assert choose_checkpoint(tmp_path, "auto", config_of(reduce_bucket_size=5), ranks).step == 2
    assert "deepspeed_file.zero_optimization.reduce_bucket_size has changed from null to 5" in caplog.text
    save(tmp_path, 4, ranks)
    assert choose_checkpoint(tmp_path, "auto", config_of(stage=3), ranks).step == 4


def test_settings_that_may_change_are_named_in_the_log_LRN_5(tmp_path, ranks, caplog):
    """LRN-5."""
    save(tmp_path, 2, ranks)
    changed = CONFIG | {"training": CONFIG["training"] | {"max_steps": 20, "output_dir": "elsewhere"}}
    assert choose_checkpoint(tmp_path, "auto", changed, ranks).step == 2
    assert [record.getMessage() for record in caplog.records] == [
        "since the checkpoint training.max_steps has changed from 10 to 20"
    ]


# ---------------------------------------------------------------------------------------------------------------------
# the run directory


def test_a_second_live_run_is_refused_and_a_dead_one_is_no_obstacle_LRN_5(tmp_path):
    """LRN-5: the message names process and host; a SIGKILL releases the lock."""
    program = f"""
import sys, time
from pathlib import Path
from utils.run.resume import RunLock
lock = RunLock(Path({str(tmp_path)!r}))
print("locked", flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "locked\n"
        with pytest.raises(
            ValueError, match=rf"training.output_dir=.*: in use by process {owner.pid} on \S+; end that"
        ):
            RunLock(tmp_path)
    finally:
        owner.kill()
        owner.wait()
    lock = RunLock(tmp_path)
    assert f"process {os.getpid()} " in (tmp_path / "run.lock").read_text()
    lock.close()
    RunLock(tmp_path).close()


def test_records_after_the_checkpoint_are_dropped_LRN_5(tmp_path):
    """LRN-5, LOG-1: lines, evaluations, sheets and final reports of steps that will be repeated."""
    lines = [
        {"step": 0, "phase": "eval"},
        *({"step": n, "phase": "train"} for n in (1, 2)),
        {"step": 2, "phase": "eval"},
    ]
    lines += [{"step": 3, "phase": "train"}]
    torn = '{"step": 4, "ph'
    log = tmp_path / "rollouts.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    for step in (2, 4):
        for name in (f"eval/step_{step:06d}.json", f"eval/step_{step:06d}.jsonl", f"dumps/step_{step:06d}/a.json"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("{}")
    (tmp_path / "finished.json").write_text("{}")
    shutil.copytree(tmp_path, tmp_path.with_name("again"))
    drop_records_after(tmp_path, 2)
    assert [json.loads(line) for line in log.read_text().splitlines()] == lines[:4]
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    kept = {"eval/step_000002.json", "eval/step_000002.jsonl", "dumps/step_000002/a.json"}
    assert left == {"rollouts.jsonl", *kept}
    drop_records_after(tmp_path.with_name("again"), 2, keep_evaluation=False)
    log = tmp_path.with_name("again") / "rollouts.jsonl"
    assert [json.loads(line) for line in log.read_text().splitlines()] == lines[:3]


# ---------------------------------------------------------------------------------------------------------------------
# one rank's own state, through a file


def through_file(state: dict, folder: Path) -> dict:
    """As a checkpoint keeps it: reading it runs no code."""
    torch.save(state, folder / "rank.pt")
    return torch.load(folder / "rank.pt", weights_only=True)


def test_random_numbers_continue_LRN_5(tmp_path):
    """LRN-5: python's, numpy's and torch's."""

    def draw() -> tuple:
        return random.random(), float(np.random.normal()), torch.rand(3).tolist()

    draw(), np.random.normal()
    state = through_file(random_states(torch.device("cpu")), tmp_path)
    expected = draw()
    draw()
    set_random_states(state, torch.device("cpu"))
    assert draw() == expected


@given(
    lengths=st.lists(st.lists(st.integers(10, 40), min_size=2, max_size=4), min_size=2, max_size=8),
    at=st.integers(1, 7),
)
@settings(max_examples=30, deadline=None)
def test_a_carry_buffer_resumes_from_any_micro_step_LRN_5_PCK_2(tmp_path_factory, lengths, at):
    """LRN-5, PCK-2: two or more arrive where one or two leave; rows after the checkpoint are the same, sample for
    sample, and so are the counts of the warning of PCK-7."""
    folder = tmp_path_factory.mktemp("buffer")
    buffer, resumed = CarryBuffer(48, 1000), None
    for micro_step, part in enumerate(lengths):
        if micro_step == at:
            resumed = CarryBuffer(48, 1000)
            resumed.load_state_dict(through_file(buffer.state_dict(), folder))
        arrived = [plain_segment(f"{micro_step}.{index}", length) for index, length in enumerate(part)]
        arrived.append(labelled_segment(f"{micro_step}.image", coord=micro_step))
        rows, both = [], [one for one in (buffer, resumed) if one is not None]
        for one in both:
            one.extend(arrived)
            rows.append(one.pop_row())
            assert all(isinstance(segment.input_ids, np.ndarray) for segment in rows[-1])
        assert len({tuple(segment.sample_id for segment in row) for row in rows}) == 1
        states = [one.state_dict() for one in both]
        for state in states:
            state["segments"] = [segment["sample_id"] for segment in state["segments"]]
        assert states[0] == states[-1]


@given(draws=st.lists(st.integers(0, 5), min_size=1, max_size=10), at=st.integers(0, 9), world_size=st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_the_data_resume_from_any_step_LRN_1_LRN_5(tmp_path_factory, draws, at, world_size):
    """LRN-1, LRN-5: across epochs, on every rank."""
    folder = tmp_path_factory.mktemp("stream")
    samples = [Sample(str(n), [], [], 1, 1, [], [], "f:1") for n in range(7)]
    for rank in range(world_size):
        stream, resumed = (SampleStream([samples], seed=3, rank=rank, world_size=world_size) for _ in range(2))
        for index, n in enumerate(draws):
            if index == at:
                resumed.load_state_dict(through_file(stream.state_dict(), folder))
            drawn = [sample.id for sample in stream.next(n)]
            if index >= at:
                assert [sample.id for sample in resumed.next(n)] == drawn


def test_a_refused_run_directory_ends_the_program_with_status_2_LRN_5(tmp_path, ranks, capsys):
    """LRN-5: one message, no traceback, on rank 0; and the lock is held while the run lives."""
    from types import SimpleNamespace

    from utils.run.setup import claim_run_dir

    training, path = SimpleNamespace(output_dir=str(tmp_path)), tmp_path / "ds.json"
    cfg = SimpleNamespace(training=training, model_dump=lambda **_: CONFIG, deepspeed=str(path))
    lock, checkpoint = claim_run_dir(cfg, "auto", ranks)
    assert checkpoint is None
    with pytest.raises(SystemExit) as ended:
        claim_run_dir(cfg, "auto", ranks)
    assert ended.value.code == 2 and "in use by process" in capsys.readouterr().err
    lock.close()
    save(tmp_path, 2, ranks)
    with pytest.raises(SystemExit) as ended:
        claim_run_dir(cfg, None, ranks)
    assert ended.value.code == 2 and "holds an earlier run" in capsys.readouterr().err


@pytest.mark.parametrize("fallback", [None, "no slot left"])
def test_a_sync_that_had_fallen_back_stays_full_SYN_10_LRN_5(monkeypatch, ranks, fallback):
    """SYN-10, LRN-5: for the rest of the run, resumed or not; the adapter's communicator is not even opened."""
    from types import SimpleNamespace

    from utils.run import setup
    from utils.sync.adapter_sync import FallbackSync

    opened = []
    adapter = SimpleNamespace(mode="adapter", fallback=None, open=lambda: opened.append("adapter"))
    full = SimpleNamespace(mode="full", fallback=None, open=lambda: opened.append("full"))
    monkeypatch.setattr(setup, "make_sync", lambda *_, **__: FallbackSync(adapter, lambda: full))
    settings = SimpleNamespace(fallback_to_full=True, bucket_mib=1, timeout_s=1, verify="off")
    vllm = SimpleNamespace(sync=settings, server=SimpleNamespace(timeout_s=1))
    rm = SimpleNamespace(vllm=vllm, async_=SimpleNamespace(enabled=False))
    cfg = SimpleNamespace(rm=rm, servers=list, sync_mode=lambda: "adapter")
    learner, client = SimpleNamespace(model=None), SimpleNamespace()
    resumed = {"sync": {"fallback": fallback}}
    engine = setup.open_engine(cfg, ranks, "run", client, learner, None, None, resumed)
    assert (engine.mode, engine.fallback) == (("full", fallback) if fallback else ("adapter", None))
    assert opened == [engine.mode]


def test_LRN_5_an_old_checkpoint_that_cannot_be_renamed_is_warned_about(tmp_path, monkeypatch, caplog):
    for step in (1, 2, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-1.deleting").write_text("in the way")
    monkeypatch.setattr(resume, "problem_of_sizes", lambda path: None)
    resume.delete_old(tmp_path, 3, 1)
    assert (tmp_path / "checkpoint-1").is_dir()  # stays
    assert not (tmp_path / "checkpoint-2").exists()
    assert "checkpoint-1" in caplog.text


def test_LRN_5_a_folder_that_is_no_steps_record_is_left_alone_on_resume(tmp_path):
    for name in ("step_backup", "step_000003", "step_000003_test.json", "step_000003.json"):
        (tmp_path / "eval" / name).mkdir(parents=True)
    drop_records_after(tmp_path, 2)
    assert {path.name for path in (tmp_path / "eval").iterdir()} == {"step_backup", "step_000003_test.json"}
