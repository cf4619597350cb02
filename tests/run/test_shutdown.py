"""The end of a run: what it says last, and that a signal only asks."""

import os
import signal
import subprocess
import sys

import pytest

from tests.run.test_resume import flip, ranks, save  # noqa: F401
from utils.dist import DistributedError
from utils.rollout.link import RolloutError
from utils.run.shutdown import (
    STOPPED_STATUS,
    Stopped,
    StopRequest,
    closing_report,
    end_with,
    launch_command,
    resume_command,
)


def test_last_words_name_step_version_checkpoint_and_command_LRN_5(tmp_path, ranks, capsys, monkeypatch):  # noqa: F811
    """LRN-5: behind the traceback, so that they are the last lines."""
    monkeypatch.setattr("sys.argv", ["/somewhere/train_stage2.py", "--local_rank=0"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("LEARNER_ALONE", raising=False)  # of a run earlier in this process
    save(tmp_path, 4, ranks)
    save(tmp_path, 6, ranks)
    (tmp_path / "checkpoint-6" / "model.bin").unlink()
    assert end_with(RuntimeError("server gone"), tmp_path, "a.yaml", 7, "abc:6") == 1
    words = capsys.readouterr().err
    assert words.startswith("RuntimeError: server gone") or "Traceback" in words
    assert words.endswith(
        f"run {tmp_path}: failed: RuntimeError: server gone\n"
        "  it ended after optimizer step 7, generating weights abc:6\n"
        f"  newest complete checkpoint: {tmp_path / 'checkpoint-4'}\n"
        "  resume from it with: deepspeed --num_gpus 2 train_stage2.py --config a.yaml --resume auto\n"
    )


def test_last_words_name_no_checkpoint_that_the_run_passed_over_LRN_5(tmp_path, ranks):  # noqa: F811
    """LRN-5: a later one, damaged at the same size; the run resumed before it."""
    for step in (4, 6):
        save(tmp_path, step, ranks)
    flip(tmp_path / "checkpoint-6" / "model.bin")
    words = closing_report(Stopped("stopped by SIGTERM"), tmp_path, "a.yaml", 5, "abc:5")
    assert words[2] == f"  newest complete checkpoint: {tmp_path / 'checkpoint-4'}"


def test_a_server_that_is_not_there_needs_no_traceback_CON_1(tmp_path, capsys):
    """CON-1: the message says it all, also of a port that is taken, and on the ranks that have no cause; an error of
    training, or of later, shows where it came from."""
    for cause, step, is_traced in (
        (RolloutError("no server"), None, False),
        (ConnectionError("no server"), None, False),
        (None, None, False),
        (RolloutError("no server"), 3, True),
        (ValueError("no server"), None, True),
    ):
        error = DistributedError("reaching the rollout servers failed")
        error.__cause__ = cause
        assert end_with(error, tmp_path, "a.yaml", step, None) == 1
        words = capsys.readouterr().err
        assert ("Traceback" in words or "Error: no server" in words) == is_traced and words.count(
            "failed: DistributedError"
        ) == 1


def test_rank_1_speaks_where_rank_0_may_be_gone_LRN_5(tmp_path, capsys, monkeypatch):
    """LRN-5: but not where all ranks have agreed on how the run ends; rank 2 never."""
    said = {}
    for rank, error in (("1", RuntimeError("peer")), ("1", DistributedError("bad")), ("2", RuntimeError("peer"))):
        monkeypatch.setenv("RANK", rank)
        assert end_with(error, tmp_path, "a.yaml", 7, "abc:7") == 1
        said[rank, type(error)] = f"run {tmp_path}: failed: " in capsys.readouterr().err
    assert list(said.values()) == [True, False, False]


def test_a_stop_has_a_status_of_its_own_and_no_traceback_LRN_5(tmp_path, capsys):
    """LRN-5."""
    assert end_with(Stopped("stopped by SIGTERM after step 1 of 2, saved"), tmp_path, "a.yaml", 1, None) == 75
    words = capsys.readouterr().err
    assert STOPPED_STATUS == 75 and "Traceback" not in words and "no checkpoint is complete" in words


def test_the_command_of_a_run_without_a_launcher_LRN_5(monkeypatch, tmp_path):
    """LRN-5."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LEARNER_ALONE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.argv", ["train_stage2.py"])
    assert launch_command("it's a.yaml") == """python train_stage2.py --config 'it'"'"'s a.yaml'"""
    assert resume_command(launch_command("a.yaml"), tmp_path) == "python train_stage2.py --config a.yaml --resume auto"


def test_the_command_of_a_run_without_a_launcher_stays_when_its_groups_are_open_LRN_5():
    """LRN-5: opening them sets the environment that a launcher would have set."""
    code = (
        "import sys\nfrom utils.dist import Ranks\nfrom utils.run.shutdown import launch_command\n"
        "sys.argv = ['train_stage2.py']\nranks = Ranks()\nranks.open()\nprint(launch_command('a.yaml'))\nranks.close()"
    )
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT", "LEARNER_ALONE", "LEARNER_COMMAND")
    environ = {key: value for key, value in os.environ.items() if key not in names}
    made = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
    assert "python train_stage2.py --config a.yaml" in made.stdout.splitlines(), made.stderr


@pytest.mark.parametrize("given", ["", "--resume", "--resume auto", "--resume runs/a/checkpoint-2", "--resume='a b/c'"])
def test_the_command_of_a_run_is_that_of_its_launcher_LRN_5(monkeypatch, tmp_path, ranks, given):  # noqa: F811
    """LRN-5: with hostfile and port, which the ranks cannot see. It resumes from the newest checkpoint, beside which
    the one that was given would be refused; as long as the run has written nothing, it starts from the given one."""
    command = "python -m tools.launch --hostfile hosts --master_port 29777 train_stage2.py --config 'my a.yaml'"
    launched = command.replace("--config", f"{given} --config") if "=" in given else f"{command} {given}"
    monkeypatch.setenv("LEARNER_COMMAND", launched)
    stop = Stopped("stopped by SIGTERM")
    first = closing_report(stop, tmp_path, "a.yaml", 1, None)[-1]
    assert first.endswith(f"start again with: {launched if given else f'{command} --resume auto'}")
    (tmp_path / "run.json").write_text("{}")
    assert closing_report(stop, tmp_path, "a.yaml", 1, None)[-1].endswith(f"start again with: {command} --resume auto")
    save(tmp_path, 4, ranks)
    later = closing_report(stop, tmp_path, "a.yaml", 5, None)[-1]
    assert later.endswith(f"resume from it with: {command} --resume auto")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_only_asks_however_often_it_comes_LRN_5(number):
    """LRN-5: launchers send several."""
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    request = StopRequest()
    request.is_training = True
    try:
        request.install()
        assert request.signal_name is None and not request.requested.is_set()
        for _ in range(3):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)  # what DeepSpeed's launcher sends behind a Ctrl-C
        assert request.signal_name == number.name and request.requested.is_set()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_LRN_12_before_the_first_step_a_signal_ends_the_process_at_once():
    """LRN-12: whatever it waits for, and whatever catches exceptions there; nothing is to be saved."""
    program = """
import os, signal, threading, utils.run.shutdown
request = utils.run.shutdown.StopRequest()
request.install()
try:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    threading.Event().wait(60)
except BaseException:
    pass
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == STOPPED_STATUS and "stopped by SIGTERM before the first step" in ended.stderr
