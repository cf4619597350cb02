"""What a run leaves to look at (LOG-2, LOG-3, LOG-5)."""

import json

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from utils.monitor import Monitor, collapse_warnings, write_run_json

BOUNDS = {"min_parse_rate": 0.5, "max_duplicate_rate": 0.3, "max_truncated_rate": 0.5}


def test_run_json_holds_config_versions_and_command_LOG_2(tmp_path):
    """LOG-2."""
    write_run_json(tmp_path, {"a": 1}, run_id="abc", world_size=2)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["config"] == {"a": 1} and record["run_id"] == "abc" and record["world_size"] == 2
    assert {"torch", "deepspeed", "transformers", "peft"} <= set(record["versions"])
    assert record["command"] and "git_revision" in record


def test_scalars_are_written_by_rank_0_only_LOG_3(tmp_path):
    """LOG-3."""
    for enabled in (True, False):
        monitor = Monitor(tmp_path / str(enabled), num_steps=2, enabled=enabled)
        monitor.scalars(1, {"loss/total": 3.0})
        monitor.close()
    events = EventAccumulator(str(tmp_path / "True")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss/total")] == [(1, 3.0)]
    assert not (tmp_path / "False").exists()


def test_progress_is_plain_lines_without_a_terminal_LOG_5(tmp_path, capsys):
    """LOG-5."""
    monitor = Monitor(tmp_path, num_steps=10, enabled=True, tensorboard=False)
    monitor.progress(1, loss=2.5, f1=0.25)
    monitor.close()
    line = capsys.readouterr().out
    assert line.startswith("step 1/10 loss=2.5 f1=0.25 left=")


def test_collapse_is_warned_about_past_each_bound_LOG_3():
    """LOG-3."""
    fine = {"parse_rate": 0.9, "duplicate_rate": 0.1, "truncated_rate": 0.1}
    assert collapse_warnings(fine, BOUNDS) == []
    for name, value in (("parse_rate", 0.4), ("duplicate_rate", 0.4), ("truncated_rate", 0.6)):
        (warning,) = collapse_warnings(fine | {name: value}, BOUNDS)
        assert name in warning
