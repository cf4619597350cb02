"""From a COCO file and a model to a finished run, as a new user goes, on CPU."""

import json
import re
import subprocess
import sys

import pytest

from tests.e2e.processes import ENVIRONMENT, ROOT, free_port
from tests.tools.test_init import run_init, write_coco
from tools.demo import wait_healthy

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_three_commands_lead_from_a_coco_file_to_a_run_CFG_16(tmp_path, start_model):
    """CFG-16: `tools.init` writes the file; the two commands that it prints start a real server and two learners. Only
    the ports and the number of epochs are not as written."""
    ended = run_init(
        tmp_path, "--data", str(write_coco(tmp_path / "photos")), "--model", str(start_model), "--gpus", "0"
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-2:] == ["make server CONFIG=mine.yaml", "make train RANKS=2 CONFIG=mine.yaml"]
    file, port, group_port = tmp_path / "mine.yaml", free_port(), free_port()
    text = file.read_text().replace(":8000", f":{port}").replace("51216", str(group_port))
    text, num_epochs = re.subn(r"num_train_epochs: \d+", "num_train_epochs: 1", text)
    file.write_text(text)
    assert num_epochs == 1
    log = tmp_path / "server.log"
    command = [sys.executable, str(ROOT / "rollout_server.py"), "--config", "mine.yaml"]
    with log.open("wb") as sink:
        server = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=sink, stderr=subprocess.STDOUT)
    try:
        wait_healthy(server, f"http://127.0.0.1:{port}", log)
        command = [sys.executable, "-m", "tools.launch", "--num_gpus", "2", "--master_port", str(free_port())]
        command += [str(ROOT / "train_stage2.py"), "--config", "mine.yaml"]
        learners = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
        assert learners.returncode == 0, (learners.stdout + learners.stderr)[-6000:]
    finally:
        server.terminate()
        server.wait(timeout=60)
    finished = json.loads((tmp_path / "runs/mine/finished.json").read_text())
    assert finished["steps"] == 9 and finished["world_size"] == 2
    assert (tmp_path / "runs/mine/eval/step_000000.json").exists()
