"""The launcher's messages when a rank is killed, and when the port where the ranks meet is in use; what it hands to the
nodes of a hostfile, through DeepSpeed and a stand-in for pdsh."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.run.test_resume import ranks, save  # noqa: F401
from tools.launch import check_places_of, check_port_of, deepspeed_command, environment_for, killed_rank_message, main
from utils.dist import Ranks

ROOT = Path(__file__).parents[2]


def write_config(folder: Path) -> Path:
    """A config whose run directory is `folder/run`."""
    content = {
        "model": {"path": "m"},
        "global_max_length": 2048,
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": "t.jsonl",
            "extra": {"rollout_matching": {"rollout_backend": "hf"}},
        },
        "training": {"output_dir": str(folder / "run")},
    }
    (folder / "a.yaml").write_text(yaml.safe_dump(content))
    return folder / "a.yaml"


def test_the_launcher_reports_the_run_of_a_killed_rank_LRN_5(tmp_path, ranks):  # noqa: F811
    """LRN-5: last logged step and version, newest complete checkpoint, command; each if there is one."""
    config, run = write_config(tmp_path), tmp_path / "run"
    arguments = ["--num_gpus", "2", "train_stage2.py", "--config", str(config)]
    command = f"python -m tools.launch {' '.join(arguments)} --resume auto"
    assert killed_rank_message(signal.SIGTERM, arguments) == [
        f"run {run}: a rank was ended by SIGTERM",
        "  no checkpoint is complete",
        f"  start again with: {command}",
    ]
    save(run, 4, ranks)
    with Path(run / "rollouts.jsonl").open("w") as file:
        lines = [{"step": step, "phase": "train", "weight_version": f"r:{step - 1}"} for step in (4, 5)]
        file.writelines(json.dumps(line) + "\n" for line in lines)
    for given in (["--resume=auto"], ["--resume", str(run / "checkpoint-2")]):
        assert killed_rank_message(signal.SIGKILL, [*arguments, *given])[-1] == f"  resume from it with: {command}"
    lines = killed_rank_message(signal.SIGKILL, [*arguments, "--resume", "auto"])
    assert lines[0].startswith(f"run {run}: a rank was ended by SIGKILL; the kernel does this when memory runs out")
    assert lines[1:] == [
        "  last logged step: 5, with weights r:4",
        f"  newest complete checkpoint: {run / 'checkpoint-4'}",
        f"  resume from it with: {command}",
    ]


def test_a_node_that_ssh_does_not_reach_is_no_killed_rank_SRV_3(tmp_path, monkeypatch, capsys):
    """SRV-3: 255 is ssh's own status; without a hostfile it is what is left of SIGHUP."""
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    monkeypatch.setattr("tools.launch.run", lambda command, environment: 255)
    monkeypatch.setattr("tools.launch.check_places_of", lambda arguments: None)
    monkeypatch.setattr("tools.launch.check_port_of", lambda arguments: None)
    for given, words in ((["--hostfile", str(tmp_path / "hosts")], "could not be reached"), ([], "SIGHUP")):
        arguments = [*given, "train_stage2.py", "--config", str(write_config(tmp_path))]
        monkeypatch.setattr(sys, "argv", ["launch", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr().err
        assert ended.value.code == 255 and words in told and ("SIGHUP" in told) == (words == "SIGHUP")


def test_a_killed_rank_is_reported_even_if_the_config_is_gone_LRN_5(tmp_path):
    """LRN-5: long runs outlive edits of their config."""
    arguments = ["--num_gpus", "2", "train_stage2.py", "--config", str(tmp_path / "gone.yaml")]
    first, second = killed_rank_message(signal.SIGKILL, arguments)
    assert first.startswith("a rank was ended by SIGKILL; the kernel does this")
    assert "gone.yaml: its config has changed since:" in second


def test_deepspeed_starts_from_a_path_with_a_space(tmp_path):
    """pip writes that path into the script's first line, and the kernel ends it at the space."""
    assert deepspeed_command()[0] == sys.executable
    script = tmp_path / "a b" / "deepspeed"
    script.parent.mkdir()
    script.write_text("#!/a b/python\nprint('started')\n")
    command = [deepspeed_command()[0], str(script)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "started\n"


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


def launched(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.launch", *arguments, "none.py"]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)


def test_a_hostfile_that_is_not_there_is_refused(tmp_path):
    """DeepSpeed would train on this machine alone. Its default may be missing."""
    path = str(tmp_path / "hosts")
    for option in (["--hostfile", path], ["-H", path], [f"--hostfile={path}"]):
        with pytest.raises(ValueError, match=f"^--hostfile {path}: no such file; correct HOSTFILE=$"):
            check_places_of([*option, "train_stage2.py"])
    done = launched("--hostfile", path)
    assert (done.returncode, done.stderr) == (2, f"--hostfile {path}: no such file; correct HOSTFILE=\n")
    check_places_of(["--num_gpus", "1", "train_stage2.py"])
    with pytest.raises(ValueError, match="^--hostfile /job/hostfile: no such file"):
        check_places_of(["--hostfile", "/job/hostfile", "train_stage2.py"])
    Path(path).write_text("localhost slots=9\n")
    check_places_of(["--hostfile", path, "--include", "localhost:8", "train_stage2.py"])


def test_gpus_that_this_machine_lacks_are_refused(monkeypatch):
    """As DeepSpeed counts slots: on CPU by the variable LOCAL_SIZE, whatever CUDA_VISIBLE_DEVICES says; GPUs are those
    of the machine, of which the variable may leave the shell a few."""
    monkeypatch.setenv("LOCAL_SIZE", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    check_places_of(["--include", "localhost:1,0", "train_stage2.py"])
    check_places_of(["--include", "localhost", "train_stage2.py"])
    done = launched("--include", "localhost:1,6")
    words = "GPUS=1,6: this machine has no GPU that DeepSpeed finds; to train on CPU give RANKS=2 instead\n"
    assert (done.returncode, done.stderr) == (2, words)
    monkeypatch.setattr("tools.launch.COUNT_SLOTS", "print('a line of a library', 'cuda 4', sep=chr(10))")
    with pytest.raises(ValueError, match=r"^GPUS=3,4: this machine has 4 GPUs \(0 to 3\)$"):
        check_places_of(["-i", "localhost:3,4", "train_stage2.py"])
    with pytest.raises(ValueError, match=r"^GPUS=0,3, but CUDA_VISIBLE_DEVICES=7: .* choose among them, or unset"):
        check_places_of(["--include=localhost:0,3", "train_stage2.py"])
    for option in (["--num_gpus", "1"], ["--num_gpus=1"], ["--exclude", "localhost:2"]):  # DeepSpeed takes others
        with pytest.raises(ValueError, match=r" but CUDA_VISIBLE_DEVICES=7; give --include localhost:7, or unset"):
            check_places_of([*option, "train_stage2.py"])
    check_places_of(["train_stage2.py"])  # then it goes by the variable
    for visible in ("0, 2,3", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        check_places_of(["--include=localhost:0,3", "train_stage2.py"])
        check_places_of(["--num_gpus", "1", "train_stage2.py"])
    monkeypatch.setattr("tools.launch.COUNT_SLOTS", "raise SystemExit(1)")
    check_places_of(["--include", "localhost:9", "train_stage2.py"])  # unknown: DeepSpeed decides


@pytest.mark.parametrize("given", ["all", "0-3", "0,", "0;1"])
def test_gpus_that_are_no_numbers_are_refused(given):
    """DeepSpeed would end in a traceback."""
    with pytest.raises(ValueError, match=f"^GPUS={given}: give numbers with commas and no spaces, as in GPUS=0,1$"):
        check_places_of(["--include", f"localhost:{given}", "train_stage2.py"])


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


# Several nodes

SECRET = "ps-must-not-show-me"
# Runs the command once per host, as a stranger to the launcher's process tree and with an almost empty environment.
PDSH = """#!/bin/bash
echo "$*" >> {folder}/pdsh.log
while [[ $1 == -* ]]; do case $1 in -w) hosts=${{2//,/ }}; shift 2;; -f) shift 2;; *) shift;; esac; done
command="$*"; number=0; files=
for host in $hosts; do
  file=$(mktemp -p {folder}); files="$files $file"
  login="env -i NODE=$number HOME={folder} PATH={folder}:/usr/bin:/bin sh"
  ( ( $login -c "${{command//%n/$number}}"; echo $? > $file ) & )
  number=$((number + 1))
done
status=0
for file in $files; do
  while [[ ! -s $file ]]; do sleep 0.1; done
  [[ $(cat $file) -gt $status ]] && status=$(cat $file)
done
exit $status
"""
PKILL = """#!/bin/bash
[[ $1 == -TERM ]] || exit 2
status=1
for found in $(pgrep "${@:2}"); do  # on this node
  tr '\\0' '\\n' < /proc/$found/environ | grep -qx NODE=$NODE && kill -TERM $found && status=0
done
echo node $NODE: $status >> {folder}/pkill.log
exit $status
"""
RANK = """
import json, os, pathlib, signal, sys, time
def stop(number, frame):
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
folder = pathlib.Path(sys.argv[0]).parent
(folder / f"{os.environ['RANK']}.partial").write_text(json.dumps([os.getpid(), dict(os.environ)]))
(folder / f"{os.environ['RANK']}.partial").rename(folder / f"{os.environ['RANK']}.json")
time.sleep(100)
sys.exit(1)
"""


@pytest.mark.skipif(not shutil.which("pgrep"), reason="needs pgrep (procps)")
def test_every_node_gets_the_variables_and_sigterm_and_no_command_line_shows_a_secret(tmp_path):
    """The real DeepSpeed starts two nodes through a stand-in for pdsh. Both get what they need, the token through a
    file; SIGTERM reaches ranks that are not this process's children, and their exit status comes back."""
    programs = {"pdsh": PDSH.format(folder=tmp_path), "ssh": "#!/bin/sh\nexit 0\n"}
    programs["pkill"] = PKILL.replace("{folder}", str(tmp_path))
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "hosts").write_text("node-a slots=1\nnode-b slots=1\n")
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / ".deepspeed_env").write_text("OWN=mine\n\nGLOO_SOCKET_IFNAME=from-the-file\n")
    given = {"ROLLOUT_SERVER_TOKEN": SECRET, "GLOO_SOCKET_IFNAME": "eth7", "HF_HOME": "/data/a b", "HF_TOKEN": "x$HOME"}
    given |= {"MLFLOW_TRACKING_PASSWORD": "pw-must-not-show-me", "WANDB_PROJECT": "boxes"}
    given |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "3", "TORCH_EXTENSIONS_DIR": "/data/ext", "UNRELATED": "1"}
    given |= {"no_proxy": "10.0.0.2", "https_proxy": "http://me:pw-of-the-proxy@p:1"}
    given |= {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    without_proxies = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    command = [sys.executable, "-m", "tools.launch", "--hostfile", str(tmp_path / "hosts"), "--master_addr", "10.0.0.1"]
    shutil.copy(write_config(tmp_path), tmp_path / "8b_3+1.yaml")
    command += [str(tmp_path / "rank.py"), "--config", str(tmp_path / "8b_3+1.yaml")]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, env={**without_proxies, **given}, stdout=log, stderr=subprocess.STDOUT)
    seen: list = []
    try:
        deadline = time.monotonic() + 200
        while process.poll() is None and not all((tmp_path / f"{rank}.json").exists() for rank in range(2)):
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        assert process.poll() is None, (tmp_path / "log").read_text()
        seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
        private = [*(tmp_path / "run").glob(".launch-*")]
        assert len(private) == 5 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in private)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 75, (tmp_path / "log").read_text()
    finally:
        process.kill()
        for pid, _ in seen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for _, environment in seen:
        expected = given | {"GLOO_SOCKET_IFNAME": "from-the-file", "OWN": "mine"}
        del expected["UNRELATED"]
        assert {name: environment.get(name) for name in expected} == expected and "UNRELATED" not in environment
        assert (environment["MASTER_ADDR"], environment["WORLD_SIZE"]) == ("10.0.0.1", "2")
    assert len({environment["LEARNER_SECRET"] for _, environment in seen}) == 1  # LRN-11
    shown = (tmp_path / "pdsh.log").read_text() + (tmp_path / "log").read_text()
    assert "export ROLLOUT_SERVER_TOKEN=" in shown and SECRET not in shown and "x$HOME" not in shown
    assert "pw-of-the-proxy" not in shown
    assert seen[0][1]["LEARNER_SECRET"] not in shown
    assert "$(cat" in shown.split("export MLFLOW_TRACKING_PASSWORD=")[-1][:10]  # the last one holds
    assert not [*(tmp_path / "run").glob(".launch-*")], "a secret outlives the run"
    assert sorted((tmp_path / "pkill.log").read_text().splitlines()) == ["node 0: 0", "node 1: 0"]


def test_one_machine_needs_no_files(tmp_path, monkeypatch):
    """Without a hostfile, and where every node starts its own ranks, nothing is forwarded. The ranks of one launcher
    get a secret of their own (LRN-11)."""
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    monkeypatch.delenv("LEARNER_SECRET", raising=False)
    secrets = set()
    (tmp_path / "hosts").write_text("node-a slots=1\n")
    hosts = ["--hostfile", str(tmp_path / "hosts")]
    for arguments in (["--num_gpus", "2"], ["--hostfile", str(tmp_path / "none")], [*hosts, "--no_ssh"]):
        with environment_for([*arguments, "train_stage2.py", "--config", str(write_config(tmp_path))]) as environment:
            secrets.add(environment.pop("LEARNER_SECRET", None))
            command = environment.pop("LEARNER_COMMAND")
            assert command.startswith(f"python -m tools.launch {arguments[0]} ") and command.endswith("/a.yaml")
            assert environment == dict(os.environ) and not (tmp_path / "run").exists()
    assert len(secrets) == 3 and None in secrets  # where each node is launched by hand there is none
    with environment_for([*hosts, "train_stage2.py", "--config", str(write_config(tmp_path))]) as environment:
        file = Path(environment["DS_ENV_FILE"])
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and f"PATH={os.environ['PATH']}\n" in file.read_text()
    assert not file.exists()


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path):
    """LRN-12: `nohup make train` outlives its terminal; SIGTERM stops it still."""
    code = "import signal, sys; from tools.launch import run; "
    code += "signal.signal(signal.SIGHUP, signal.SIG_IGN); print('up', flush=True); sys.exit(-run(['sleep', '60'], {}))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    try:
        assert process.stdout.readline() == "up\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == signal.SIGTERM
    finally:
        process.kill()


def test_a_rank_that_has_just_ended_keeps_no_signal_from_the_others(tmp_path):
    code = """
import subprocess, sys, psutil, tools.launch
gone, other = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
ranks = [psutil.Process(process.pid) for process in (gone, other)]
gone.kill()
gone.wait()
tools.launch.ranks_of = lambda pid: ranks
print("up", flush=True)
tools.launch.run(["sleep", "1.5"], {})
sys.exit(-other.wait(5))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    try:
        assert process.stdout.readline() == "up\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == signal.SIGTERM
    finally:
        process.kill()


def test_a_config_that_cannot_be_used_is_refused_before_any_node_hears_of_it(tmp_path, capsys):
    (tmp_path / "hosts").write_text("node-a slots=1\n")
    arguments = ["--hostfile", str(tmp_path / "hosts"), "train_stage2.py", "--config", str(tmp_path / "none.yaml")]
    with pytest.raises(SystemExit) as end, environment_for(arguments):
        pass
    assert end.value.code == 2 and "no such file" in capsys.readouterr().err


def test_with_a_hostfile_the_port_is_rank_0s_business(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.launch.check_master_port", lambda port: pytest.fail("this may be another node"))
    (tmp_path / "hosts").write_text("node-a slots=1\n")
    check_port_of(["--hostfile", str(tmp_path / "hosts"), "train_stage2.py"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("# none\n", "hosts: names no host; write one a line"),
        ("a slots=2\nb 4\n", "hosts:2: 'b 4' must"),
        ("a slots=2\na slots=2\n", "hosts:2: a is listed before"),
    ],
)
def test_a_hostfile_that_deepspeed_would_not_read_is_refused(tmp_path, text, told):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(told)):
        check_places_of(["--hostfile", str(path), "train_stage2.py"])
