"""The launcher's messages when a rank is killed, and when the port where the ranks meet is in use."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.run.test_resume import ranks, save  # noqa: F401
from tools.launch import check_port_of, killed_rank_message
from utils.dist import Ranks


def test_the_launcher_reports_the_run_of_a_killed_rank_LRN_5(tmp_path, ranks):  # noqa: F811
    """LRN-5: last logged step and version, newest complete checkpoint, command; each if there is one."""
    config, run = tmp_path / "a.yaml", tmp_path / "run"
    content = {
        "model": {"path": "m"},
        "global_max_length": 2048,
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": "t.jsonl",
            "extra": {"rollout_matching": {"rollout_backend": "hf"}},
        },
        "training": {"output_dir": str(run)},
    }
    config.write_text(yaml.safe_dump(content))
    arguments = ["--num_gpus", "2", "train_stage2.py", "--config", str(config)]
    command = f"python -m tools.launch {' '.join(arguments)} --resume auto"
    assert killed_rank_message(signal.SIGTERM, arguments) == [
        f"run {run}: a rank was ended by SIGTERM",
        "  no checkpoint is complete",
        f"  start again with: {command}",
    ]
    save(run, 4, ranks)
    with Path(run / "rollouts.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": step, "weight_version": f"r:{step - 1}"}) + "\n" for step in (4, 5))
    lines = killed_rank_message(signal.SIGKILL, [*arguments, "--resume", "auto"])
    assert lines[0].startswith(f"run {run}: a rank was ended by SIGKILL; the kernel does this when memory runs out")
    assert lines[1:] == [
        "  last logged step: 5, with weights r:4",
        f"  newest complete checkpoint: {run / 'checkpoint-4'}",
        f"  resume from it with: {command}",
    ]


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_a_rendezvous_port_that_is_taken_is_refused_before_anything_starts(address):
    """One message has the port, its owner and the way out. The missing script is never looked at."""
    with socket.create_server((address, 0)) as listener:
        port = listener.getsockname()[1]
        arguments = ["--num_gpus", "1", "--master_port", str(port), "none.py"]
        command = [sys.executable, "-m", "tools.launch", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        check_port_of([*arguments, "--dry-run"])
    (message,) = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == ""
    words = f"the learner's ranks cannot meet at port {port}: Address already in use; held by process {os.getpid()}: "
    way_out = f"make train PORT={port + 1}, make grpo PORT={port + 1} (deepspeed --master_port {port + 1})"
    assert message.startswith(words) and message.endswith(way_out)
    check_port_of(arguments)


def test_the_rendezvous_port_is_read_as_deepspeed_reads_it(monkeypatch):
    asked = []
    monkeypatch.setattr("tools.launch.check_master_port", asked.append)
    check_port_of(["--num_gpus", "1", "train_stage2.py", "--config", "a.yaml"])
    check_port_of(["--master_port=29600", "train_stage2.py"])
    check_port_of(["--include", "localhost:3", "--master_port", "29700", "train_stage2.py", "--resume", "auto"])
    assert asked == [29500, 29600, 29700]


def test_rank_0_refuses_a_rendezvous_port_that_is_taken(monkeypatch):
    """The same message without our launcher; the other ranks do not listen, and torchrun checks its own port."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)  # other tests have opened groups
    monkeypatch.setenv("RANK", "0")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(OSError, match=f"port {port}: Address already in use; held by process {os.getpid()}"):
            Ranks().check_port()
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        Ranks().check_port()
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
        monkeypatch.setenv("RANK", "1")
        Ranks().check_port()
    monkeypatch.setenv("RANK", "0")
    Ranks().check_port()
