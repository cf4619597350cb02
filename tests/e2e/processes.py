"""Real processes for end-to-end tests: free ports, loopback only, and no process outlives its test."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import requests
import yaml

from tools.launch import process_tree

ROOT = Path(__file__).parents[2]
START_S = 400  # for a busy two-core machine; about 30 s on an idle one
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}


SHARE = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
PORTS = iter(random.SystemRandom().sample(range(12000 + 5000 * SHARE, 17000 + 5000 * SHARE), 5000))


def free_port() -> int:
    """Return a port that nobody listens on, none twice: below those that the system gives to outgoing connections, and
    from this test process's own share, so that nothing takes it before its server has loaded a model."""
    for port in PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError("all ports have been used")


def write_yaml(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


class Server:
    """A running `rollout_server.py` and its HTTP client."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        prefix: str = "",
        token: str | None = None,
        timeout_s: float = 240.0,
        environment: dict[str, str] = ENVIRONMENT,
        **settings: Any,
    ):
        self.port, self.group_port = free_port(), free_port()
        self.url = self.base_url = f"http://127.0.0.1:{self.port}{prefix}"
        config = config_of(folder, model, self.url, self.group_port, settings, timeout_s)
        self.config = write_yaml(folder / f"server_{self.port}.yaml", config)
        self.log = folder / f"server_{self.port}.log"
        self.session = requests.Session()
        self.session.trust_env = False
        if token:
            self.session.headers["Authorization"] = f"Bearer {token}"
        self.token = token
        self.environment = environment
        self.process = launch(self.config, self.log, token, environment)
        self.children: list[psutil.Process] = []

    def wait_ready(self) -> "Server":
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self.get("/health/").status_code == 200:
                    self.children = psutil.Process(self.process.pid).children(recursive=True)
                    return self
            except requests.ConnectionError:
                pass
            time.sleep(0.3)
        raise AssertionError(f"server did not start:\n{self.log.read_text()[-4000:]}")

    def get(self, path: str) -> requests.Response:
        return self.session.get(self.url + path, timeout=30)

    def post(self, path: str, body: dict, timeout: float = 120, run_token: str | None = None) -> requests.Response:
        return self.session.post(self.url + path, json=body, timeout=timeout, headers={"Run-Token": run_token})

    def infer(self, asked: list[dict], **config: Any) -> list[dict]:
        answer = self.post("/infer/", {"infer_requests": asked, "request_config": config})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def kill(self) -> None:
        """Send SIGKILL to the front and all engines at once."""
        for process in alive(process_tree(self.process.pid)):
            process.kill()
        self.process.wait()

    def start_again(self) -> "Server":
        self.process = launch(self.config, self.log, self.token, self.environment)
        return self.wait_ready()

    def end(self) -> None:
        """Kill only what this test started, by process id."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for child in alive(self.children):
            child.kill()


def launch(
    config: Path, log: Path, token: str | None = None, environment: dict[str, str] = ENVIRONMENT
) -> subprocess.Popen:
    environment = environment | ({"ROLLOUT_SERVER_TOKEN": token} if token else {})
    command = [sys.executable, *run_through("-m"), str(ROOT / "rollout_server.py"), "--config", str(config)]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)


RUN_THROUGH: list[str] = []  # a module that starts the program, after what it has to add to the process


def run_through(option: str) -> list[str]:
    return [option, *RUN_THROUGH] if RUN_THROUGH else []


def run_learner(
    script: str,
    config: Path,
    num_ranks: int,
    timeout_s: float = 500.0,
    arguments: tuple[str, ...] = (),
    environment: dict[str, str] = ENVIRONMENT,
) -> subprocess.CompletedProcess:
    """Run `deepspeed --num_gpus N SCRIPT --config FILE` to its end; output of all ranks in `stdout`."""
    return run_program(script, num_ranks, ("--config", str(config), *arguments), timeout_s, environment)


def run_program(
    script: str,
    num_ranks: int,
    arguments: tuple[str, ...],
    timeout_s: float = 500.0,
    environment: dict[str, str] = ENVIRONMENT,
) -> subprocess.CompletedProcess:
    """Run `deepspeed --num_gpus N SCRIPT ARGUMENTS` to its end; output of all ranks in `stdout`."""
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", str(num_ranks)]
    port = free_port()
    command = [*launcher, "--master_port", str(port), *run_through("--module"), str(ROOT / script), *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the launcher and the ranks it started
        output, _ = process.communicate()
        raise AssertionError(f"{script} did not end in {timeout_s} s:\n{output[-6000:]}") from None
    except BaseException:  # Ctrl-C, for one
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert not list(Path("/dev/shm").glob(f"deepspeed_*_{port}_*")), "a run leaves shared memory behind"
    return subprocess.CompletedProcess(command, process.returncode, stdout=output)


def config_of(
    folder: Path, model: Path, url: str, group_port: int, settings: dict[str, Any], timeout_s: float = 240.0
) -> dict[str, Any]:
    """Return a config for server and learner; `settings` go into the rollout server's section."""
    connection = {"servers": [{"base_url": url, "group_port": group_port}], "timeout_s": timeout_s}
    matching = {
        "rollout_backend": "vllm",
        "max_new_tokens": 64,
        "vllm": {"mode": "server", "server": connection},
    }
    server = {"device": "cpu", "vllm_max_model_len": 512, "cpu_kv_cache_gib": 1} | settings
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "global_max_length": 1024,
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": str(folder / "data" / "train.jsonl"),
            "extra": {"rollout_matching": matching, "rollout_server": server},
        },
        "training": {"output_dir": str(folder / "run")},
        "deepspeed": "zero2",
    }


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that are still running; a zombie has ended, but its parent has not waited for it."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
