"""`make demo`: stage 2 from start to end on this machine's CPU, with the real server and the real learner.

Makes data and a start model (cached), starts `rollout_server.py`, runs `deepspeed train_stage2.py` with two ranks
against it, stops the server and shows the result: a table, runs/demo/summary.json and runs/demo/before_after.png.
It only starts the commands that a user would type; nothing here takes part in training.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import requests
from PIL import Image
from rich.console import Console
from rich.table import Table

from tools.launch import process_tree
from utils.config.load import load_config_or_exit
from utils.geometry import Object
from utils.run.draw import GROUND_TRUTH, PREDICTION, draw_objects, sheet

CONFIG = "configs/demo/stage2.yaml"
WORLD_SIZE = 2
NUM_SHOWN = 6
METRICS = ("f1", "f1_no_label", "precision", "recall", "parse_rate")
PARTS = ("rollout", "sync", "train", "prepare", "eval", "total")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
ALL_CORES = {**ENVIRONMENT, "OMP_NUM_THREADS": str(os.cpu_count())}  # for steps that run alone: data, warm-up


def main() -> None:
    exit_on_sigterm()
    start = time.monotonic()
    output = Path(load_config_or_exit(CONFIG).training.output_dir)
    say("1/3 data and start model (made once, kept under runs/demo)")
    run([sys.executable, "-m", "tools.make_demo"], ALL_CORES)
    seconds = {"make_demo": time.monotonic() - start}
    seconds |= serve_and_train("train_stage2.py", CONFIG, ENVIRONMENT)
    seconds["total"] = time.monotonic() - start
    report(output, Path("runs/demo"), seconds)


def serve_and_train(script: str, config: str, environment: dict[str, str]) -> dict[str, float]:
    """Run server and learner of `config` as a user would, in a fresh run directory, until the learner ends.

    Returns:
        Seconds until the server was healthy (`server_start`) and of the learner's process (`learner`).
    """
    cfg, seconds = load_config_or_exit(config), {}
    output = Path(cfg.training.output_dir)
    say("2/3 rollout server: python rollout_server.py --config " + config)
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    began = time.monotonic()
    server = start_server(config, environment, output / "server.log")
    try:
        wait_healthy(server, cfg.servers()[0].base_url, output / "server.log")
        seconds["server_start"] = time.monotonic() - began
        command = [f"{Path(sys.executable).parent}/deepspeed", "--num_gpus", str(WORLD_SIZE), script]
        say("3/3 learner: deepspeed " + " ".join(command[1:]) + " --config " + config)
        began = time.monotonic()
        run([*command, "--config", config], environment)
        seconds["learner"] = time.monotonic() - began
    finally:
        stop(server)
    return seconds


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that are free right now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def start_server(config: str, environment: dict[str, str], log: Path) -> subprocess.Popen:
    command = [sys.executable, "rollout_server.py", "--config", config]
    with log.open("w") as sink:
        return subprocess.Popen(command, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)


def wait_healthy(server: subprocess.Popen, base_url: str, log: Path, timeout_s: float = 240.0) -> None:
    """Wait until the server is healthy. If it ends or takes too long, exit with the end of its log."""
    session = requests.Session()
    session.trust_env = False
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if session.get(base_url + "/health/", timeout=2).status_code == 200:
                return
        except (requests.ConnectionError, requests.Timeout):
            pass
        time.sleep(0.5)
    sys.exit(f"the rollout server did not start; the end of {log}:\n" + log.read_text()[-3000:])


def exit_on_sigterm() -> None:
    """Make SIGTERM unwind the stack as Ctrl-C does, so that child processes are stopped too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))


def run(command: list[str], environment: dict[str, str]) -> None:
    """Run the command to its end and exit if it fails; kill all its processes if this one is stopped first."""
    process = subprocess.Popen(command, env=environment)
    try:
        status = process.wait()
    finally:
        for left in process_tree(process.pid):
            left.kill()
    if status:
        sys.exit(f"{' '.join(command)} ended with status {status}")


def stop(server: subprocess.Popen) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(timeout=30)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def report(output: Path, demo: Path, seconds: dict[str, float]) -> None:
    """Write `summary.json` and `before_after.png`, and print tables."""
    finished, before, after = read_results(output)
    last, seconds = finished["steps"], finished["seconds"] | seconds
    keys = (*METRICS, "mean_iou", "num_images")
    summary = {
        "before": {key: before[key] for key in keys},
        "after": {key: after[key] for key in keys},
        "steps": last,
        "world_size": finished["world_size"],
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
    }
    (demo / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    picture(output, last).save(demo / "before_after.png")
    title = f"{before['num_images']:.0f} held-out images, {last} optimizer steps"
    print_changes(title, ("before", "after"), {name: (before[name], after[name]) for name in METRICS})
    print_seconds(seconds)
    print(
        "This shows that everything works together, not that stage 2 is better: plain supervised training for the\n"
        "same number of steps gains as much on this task (docs/results.md).\n"
        f"picture: {demo / 'before_after.png'}   numbers: {demo / 'summary.json'}\n"
        "curves:  .venv/bin/tensorboard --logdir runs"
    )


def read_results(output: Path) -> tuple[dict, dict, dict]:
    """Return `finished.json` of a run, and its evaluations before the first and after the last step."""
    finished = json.loads((output / "finished.json").read_text())
    before, after = (json.loads((output / f"eval/step_{step:06d}.json").read_text()) for step in (0, finished["steps"]))
    return finished, before, after


def print_changes(title: str, ends: tuple[str, str], values: dict[str, tuple[float, float]]) -> None:
    """Print each pair of values and their difference. `ends`: titles of the two columns."""
    rows = [(name, f"{first:.3f}", f"{last:.3f}", f"{last - first:+.3f}") for name, (first, last) in values.items()]
    print_table(title, ("", *ends, "change"), rows)


def print_seconds(seconds: dict[str, float]) -> None:
    print_table("seconds", PARTS, [[f"{seconds.get(name, 0.0):.1f}" for name in PARTS]])


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def picture(output: Path, last: int) -> Image.Image:
    """Validation images with the ground truth, and the predictions before and after training."""
    before, after = (
        [json.loads(line) for line in (output / f"eval/step_{step:06d}.jsonl").open()][:NUM_SHOWN] for step in (0, last)
    )
    rows = []
    for first, second in zip(before, after, strict=True):
        image = Image.open(first["images"][0])
        rows.append(
            [
                draw_objects(image, to_objects(first["gt"]), GROUND_TRUTH),
                draw_objects(image, to_objects(first["pred"]), PREDICTION),
                draw_objects(image, to_objects(second["pred"]), PREDICTION),
            ]
        )
    return sheet(rows, ("ground truth", "before stage 2", "after stage 2"))


def to_objects(records: list[dict]) -> list[Object]:
    kinds = ("bbox_2d", "poly")
    return [Object(r["desc"], kind, tuple(r[kind])) for r in records for kind in kinds if kind in r]


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    main()
