"""`make demo`: a model learns a new class, once by supervised training and once by stage 2, on this machine's CPU.

Makes data and a start model (cached), which has never seen anything yellow; the training images have only their yellow
objects annotated. Starts `rollout_server.py`, runs `deepspeed train_stage2.py` with two ranks against it once for each
way, with equal steps, stops the server and shows what each has learnt and forgotten: a table, runs/demo/summary.json,
runs/demo/comparison.png, and a report to open in a browser (tools.report). It only starts the commands that a user
would type; nothing here takes part in training.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import psutil
import requests
from PIL import Image
from rich.console import Console
from rich.table import Table

from tools.launch import deepspeed_command, process_tree
from tools.make_demo import NEW_COLOUR
from tools.report import write_report
from tools.report_answers import objects_of
from utils.config.load import load_config_or_exit
from utils.run.draw import GROUND_TRUTH, PREDICTION, draw_objects, sheet
from utils.run.resume import RunLock

CONFIGS = {"sft": "configs/demo/sft.yaml", "after": "configs/demo/stage2.yaml"}  # by their names in the summary
ARMS = {"before": "start model", "sft": "supervised", "after": "stage 2"}
ROOT = Path("runs/demo")
WORLD_SIZE = 2
NUM_SHOWN = 6
METRICS = ("f1", "f1_old", "f1_new", "precision", "recall", "duplicates_per_image", "parse_rate")
PARTS = ("rollout", "sync", "train", "prepare", "eval", "total")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
ALL_CORES = {**ENVIRONMENT, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}  # for steps run alone: data, warm-up


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    exit_on_sigterm()
    start = time.monotonic()
    say("1/4 data and start model (made once, kept under runs/demo)")
    run([sys.executable, "-m", "tools.make_demo"], ALL_CORES)
    seconds = {"make_demo": time.monotonic() - start}
    server = CONFIGS["after"]
    say("2/4 rollout server: python rollout_server.py --config " + server)
    with serving(server, ROOT / "server.log", ENVIRONMENT):
        seconds["server_start"] = time.monotonic() - start - seconds["make_demo"]
        for number, (arm, config) in enumerate(CONFIGS.items()):
            say(f"{number + 3}/4 learner, {ARMS[arm]}: {' '.join(learner_command('train_stage2.py', config))}")
            seconds[f"learner_{arm}"] = train("train_stage2.py", config, ENVIRONMENT)
    seconds["total"] = time.monotonic() - start
    report(ROOT, seconds)


@contextmanager
def serving(config: str, log: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run the rollout server of `config` as a user would, from the moment it is healthy."""
    log.parent.mkdir(parents=True, exist_ok=True)
    base_url = load_config_or_exit(config).servers()[0].base_url
    refuse_taken(base_url)
    server = start_server(config, environment, log)
    try:
        wait_healthy(server, base_url, log)
        yield
    finally:
        stop(server)


def refuse_taken(base_url: str) -> None:
    """Exit where another server listens: its answers would be taken for those of the demo's own."""
    parts = urlsplit(base_url)
    with socket.socket() as probe:
        if probe.connect_ex((parts.hostname, parts.port)) == 0:
            sys.exit(f"{base_url}: another server listens there; stop it, or wait until it has ended")


def train(script: str, config: str, environment: dict[str, str]) -> float:
    """Run the learner of `config` as a user would, in a fresh run directory; return its seconds."""
    began = time.monotonic()
    remove_earlier(run_dir_of(config))
    run(learner_command(script, config), environment)
    return time.monotonic() - began


def remove_earlier(run_dir: Path) -> None:
    """Delete a run that has ended; exit where it has not."""
    try:
        with closing(RunLock(run_dir)):
            shutil.rmtree(run_dir, ignore_errors=True)
    except ValueError as error:
        sys.exit(str(error))


def run_dir_of(config: str) -> Path:
    return Path(load_config_or_exit(config).training.output_dir)


def learner_command(script: str, config: str) -> list[str]:
    return [*deepspeed_command(), "--num_gpus", str(WORLD_SIZE), script, "--config", config]


def serve_and_train(script: str, config: str, environment: dict[str, str]) -> dict[str, float]:
    """Run server and learner of `config`; return the seconds until the server was healthy, and those of the learner."""
    say("2/3 rollout server: python rollout_server.py --config " + config)
    began = time.monotonic()
    with serving(config, run_dir_of(config).parent / "server.log", environment):
        start = time.monotonic() - began
        say("3/3 learner: " + " ".join(learner_command(script, config)))
        return {"server_start": start, "learner": train(script, config, environment)}


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


def run(command: list[str], environment: dict[str, str], log: IO[str] | None = None) -> None:
    """Run the command to its end and exit if it fails; kill all its processes if this one is stopped first.

    Args:
        log: takes its output; None: this process's own.
    """
    others = set(psutil.Process().children())
    try:
        status = subprocess.Popen(command, env=environment, stdout=log, stderr=log).wait()
    finally:  # a signal may also come while `Popen` starts it
        for own in set(psutil.Process().children()) - others:
            for left in process_tree(own.pid):
                left.kill()
    if status:
        sys.exit(f"{' '.join(command)} ended with status {status}" + (f"; see {log.name}" if log else ""))


def stop(server: subprocess.Popen) -> None:
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(timeout=30)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def report(root: Path, seconds: dict[str, float]) -> None:
    """Write `summary.json` and `comparison.png`, and print a table."""
    runs = {arm: run_dir_of(config) for arm, config in CONFIGS.items()}
    results = {arm: read_results(run_dir, has_start=arm == "after") for arm, run_dir in runs.items()}
    finished, before, _ = results["after"]
    ends = {"before": before} | {arm: after for arm, (_, _, after) in results.items()}
    summary: dict[str, Any] = {
        name: {key: scores[key] for key in METRICS} | {"duplicates": scores["duplicates_per_image"]}
        for name, scores in ends.items()
    }
    summary |= {"num_images": before["num_images"], "steps": finished["steps"], "world_size": finished["world_size"]}
    for arm, (own, _, _) in results.items():
        seconds |= {f"{arm}_{part}": value for part, value in own["seconds"].items()}
    summary["seconds"] = {name: round(value, 2) for name, value in seconds.items()}
    (root / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    picture(runs["after"], runs["sft"], finished["steps"]).save(root / "comparison.png")
    page = write_report(runs["after"])

    title = f"{before['num_images']:.0f} held-out images, all classes annotated; {finished['steps']} optimizer steps"
    rows = [[name, *(f"{scores[name]:.3f}" for scores in ends.values())] for name in METRICS]
    print_table(title, ("", *(ARMS[name] for name in ends)), rows)
    parts = (*PARTS[:-1], "step")
    times = [[ARMS[arm], *(f"{own['seconds'][part]:.1f}" for part in parts)] for arm, (own, _, _) in results.items()]
    print_table("seconds", ("", *parts), times)
    print(
        f"f1_new: {NEW_COLOUR} objects, which the training images annotate.\n"
        "f1_old: all others, which these images show, too, but do not annotate.\n"
        f"picture: {root / 'comparison.png'}   numbers: {root / 'summary.json'}\n"
        "curves:  .venv/bin/tensorboard --logdir runs\n"
        f"report:  {page}, to open in a browser"
    )


def read_results(output: Path, has_start: bool = True) -> tuple[dict, dict, dict]:
    """Return `finished.json` of a run, and its evaluations before the first step (if it has one) and after the last."""
    finished = json.loads((output / "finished.json").read_text())
    steps = (0 if has_start else finished["steps"], finished["steps"])
    before, after = (json.loads((output / f"eval/step_{step:06d}.json").read_text()) for step in steps)
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


def picture(stage2: Path, sft: Path, last: int) -> Image.Image:
    """Validation images with the ground truth, and the answers of the start model and of both arms."""
    files = (stage2 / "eval/step_000000.jsonl", *(arm / f"eval/step_{last:06d}.jsonl" for arm in (sft, stage2)))
    answers = [[json.loads(line) for line in file.open()][:NUM_SHOWN] for file in files]
    rows = []
    for same in zip(*answers, strict=True):
        image = Image.open(same[0]["images"][0])
        predicted = [draw_objects(image, objects_of(answer["pred"]), PREDICTION) for answer in same]
        rows.append([draw_objects(image, objects_of(same[0]["gt"]), GROUND_TRUTH), *predicted])
    return sheet(rows, ("ground truth", *ARMS.values()))


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


if __name__ == "__main__":
    main()
