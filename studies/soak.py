"""`make soak`: a long run of real server and real learner on this machine's CPU, to find leaks and slowdowns.

    python -m studies.soak --minutes 20

Two ranks train a tiny model against one server, with a checkpoint every 20 steps and every sync verified by digests.
Afterwards another learner resumes from the last checkpoint for one step. The first quarter of the time is warm-up.
After it, the soak fails if the memory of front, engines or learner (proportional set size) grows by more than 5 % and
64 MB, if file descriptors accumulate, or if steps become slower; and if the server does not have the learner's weights
at the end. All figures go to FOLDER/soak.json. Checkpoints are written throughout: page cache is not counted, mapped
files are.

Beside the run a hostile client (studies/hostile_client.py; `--no-hostile` leaves it out) sends what server and learner
must refuse. The soak also fails if an answer breaks their promises, or if `/health/` takes more than a second (p99).
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import requests
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from studies.hostile_client import judge
from tools import demo
from tools.demo import ENVIRONMENT, free_ports
from tools.launch import process_tree, ranks_of
from tools.make_demo import build_start_model, make_dataset
from utils.run.shutdown import STOPPED_STATUS

SAMPLE_S = 5.0
WARM_UP_SHARE = 0.25
PSS_GROWTH, PSS_GROWTH_BYTES = 0.05, 64e6
FD_GROWTH = 2  # a connection or two may be open by chance
STEP_GROWTH = 0.25  # of the first quartile of step times: other work on the machine slows down the slower steps
Sample = dict[str, dict[str, float]]  # role -> {"pss": bytes, "fds": number} over its processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="length of the run")
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="emptied first")
    parser.add_argument("--no-hostile", action="store_true", help="leave out the hostile client")
    args = parser.parse_args()
    demo.exit_on_sigterm()
    problems, figures = soak(args.folder, args.minutes, with_hostile=not args.no_hostile)
    (args.folder / "soak.json").write_text(json.dumps({"problems": problems, **figures}, indent=2) + "\n")
    for name, values in figures["judged"].items():
        print(f"{name}: {values['before']:.4g} -> {values['after']:.4g}")
    if figures["hostile"]:
        print(f"hostile client: /health/ {figures['hostile']['health']}")
    print(*(problems or ["no leak, no slowdown"]), sep="\n")
    sys.exit(1 if problems else 0)


def soak(folder: Path, minutes: float, with_hostile: bool) -> tuple[list[str], dict[str, Any]]:
    """Run the whole soak; return the problems and all figures."""
    shutil.rmtree(folder, ignore_errors=True)
    config = prepare(folder)
    connection = yaml.safe_load(config.read_text())["custom"]["extra"]["rollout_matching"]["vllm"]["server"]
    url, (port,) = connection["base_url"], free_ports(1)
    hostile = ["--url", url, "--rendezvous-port", str(port), "--group-port", str(connection["group_port"])]
    server = demo.start_server(str(config), ENVIRONMENT, folder / "server.log")
    try:
        demo.wait_healthy(server, url, folder / "server.log")
        learner = start_learner(config, folder / "learner.log", port)
        samples = watch(learner, server.pid, folder, 60 * minutes, hostile if with_hostile else None)
        problems = resume_once(config, folder, url)
    finally:
        demo.stop(server)
    steps = EventAccumulator(str(folder / "run"), size_guidance={"scalars": 0}).Reload().Scalars("seconds/step")
    trends, growth = find_growth(samples, [event.value for event in steps])
    refusals, more = read_hostile(folder) if with_hostile else ({}, [])
    figures = {"minutes": minutes, "steps": len(steps), "judged": trends, "hostile": refusals, "samples": samples}
    return growth + problems + more, figures


def prepare(folder: Path) -> Path:
    """Make data and an untrained model; return the config of both programs."""
    make_dataset(folder / "data", num_train=200, num_val=1)
    build_start_model(folder / "model", seed=0)
    port, group_port = free_ports(2)
    connection = {"base_url": f"http://127.0.0.1:{port}", "group_port": group_port, "servers": None}
    matching = {"max_new_tokens": 64, "vllm": {"server": connection, "sync": {"verify": "always"}}}
    config = {
        "extends": str(Path("configs/demo/stage2.yaml").resolve()),
        "model": {"path": str(folder / "model")},
        "custom": {
            "train_jsonl": str(folder / "data" / "train.jsonl"),
            "val_jsonl": str(folder / "data" / "val.jsonl"),
            "extra": {"rollout_matching": matching},
        },
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": 1_000_000,
            "gradient_accumulation_steps": 1,
            "eval_steps": 0,
            "eval_at_start": False,
            "save_steps": 20,
            "save_total_limit": 2,
            "resume_from_checkpoint": "auto",
        },
    }
    path = folder / "soak.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start_learner(config: Path, log: Path, port: int) -> subprocess.Popen:
    """Start two ranks, which meet at `port`."""
    command = [sys.executable, "-m", "tools.launch", "--num_gpus", "2", "--master_port", str(port)]
    command += ["train_stage2.py", "--config", str(config)]
    with log.open("w") as sink:
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=sink, stderr=subprocess.STDOUT)


def watch(
    learner: subprocess.Popen, server_pid: int, folder: Path, seconds: float, hostile: Sequence[str] | None
) -> list[Sample]:
    """Sample all processes for `seconds` from the first step on, then stop the learner with SIGTERM.

    Args:
        hostile: where the hostile client finds its ports, as its flags; None leaves it out.
    """
    log = folder / "learner.log"
    try:
        wait_for_a_step(learner, log)
        with hostile_client(folder, hostile, seconds):  # while a run owns the server: before, a stranger may have it
            samples = take_samples(learner, log, server_pid, seconds)
        learner.terminate()
        status = learner.wait(timeout=300)
        if status != STOPPED_STATUS:
            sys.exit(f"after SIGTERM the learner ended with status {status}, not {STOPPED_STATUS}; see {log}")
    finally:
        kill_tree(learner)
    return samples


def wait_for_a_step(learner: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 600
    while "step 1/" not in log.read_text(errors="replace"):
        check_runs(learner, log)
        if time.monotonic() > deadline:
            sys.exit(f"no step within 600 s; see {log}")
        time.sleep(1.0)


def take_samples(learner: subprocess.Popen, log: Path, server_pid: int, seconds: float) -> list[Sample]:
    samples: list[Sample] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        check_runs(learner, log)
        samples.append(sample(server_pid, learner.pid))
        time.sleep(SAMPLE_S)
    return samples


@contextmanager
def hostile_client(folder: Path, flags: Sequence[str] | None, seconds: float) -> Iterator[None]:
    """Run the hostile client meanwhile; it writes `hostile.json` when it is ended. None for `flags`: do nothing."""
    if flags is None:
        yield
        return
    command = [sys.executable, "-m", "studies.hostile_client", *flags, "--seconds", str(seconds + 60)]
    with (folder / "hostile.log").open("w") as sink:
        client = subprocess.Popen(
            [*command, "--counts", str(folder / "hostile.json")], env=ENVIRONMENT, stdout=sink, stderr=sink
        )
    try:
        yield
    finally:
        demo.stop(client)


def read_hostile(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the hostile client's figures and what is wrong with them."""
    counts = folder / "hostile.json"
    if not counts.exists():
        return {}, [f"the hostile client ended without its counts; see {folder / 'hostile.log'}"]
    figures = json.loads(counts.read_text())
    return figures, judge(figures)


def kill_tree(learner: subprocess.Popen) -> None:
    """Kill what is left of a learner, the launcher first: it would wait for the ranks."""
    for process in process_tree(learner.pid):
        process.kill()


def check_runs(learner: subprocess.Popen, log: Path) -> None:
    if learner.poll() is not None:
        sys.exit(f"the learner ended too early; the end of {log}:\n{log.read_text(errors='replace')[-3000:]}")


def sample(server_pid: int, learner_pid: int) -> Sample:
    """Measure memory and file descriptors by role."""
    found: Sample = defaultdict(lambda: {"pss": 0.0, "fds": 0.0})
    front = psutil.Process(server_pid)
    roles = [("front", front), *(("engines", child) for child in front.children(recursive=True))]
    roles += [("learner", rank) for rank in ranks_of(learner_pid)]
    for role, process in roles:
        try:
            found[role]["pss"] += process.memory_full_info().pss
            found[role]["fds"] += process.num_fds()
        except psutil.NoSuchProcess:  # a short-lived helper
            continue
    return dict(found)


def find_growth(
    samples: Sequence[Sample], step_seconds: Sequence[float]
) -> tuple[dict[str, Mapping[str, float]], list[str]]:
    """Compare the first and the last fifth after the warm-up: medians of samples, first quartiles of step times.

    Args:
        samples: at equal intervals.
        step_seconds: of every step.

    Returns:
        `{"before", "after"}` of each figure, and a message for each that grows too much.
    """
    problems: list[str] = []
    trends: dict[str, Mapping[str, float]] = {}
    warm = samples[int(len(samples) * WARM_UP_SHARE) :]
    for role in warm[0] if warm else ():
        for what in ("pss", "fds"):
            before, after = (statistics.median(s[role][what] for s in part) for part in _ends(warm))
            trends[f"{role} {what}"] = {"before": before, "after": after}
            allowed = max(PSS_GROWTH * before, PSS_GROWTH_BYTES) if what == "pss" else FD_GROWTH
            if after - before > allowed:
                problems.append(f"{role}: {what} grew from {before:.4g} to {after:.4g}, by more than {allowed:.4g}")
    steps = step_seconds[int(len(step_seconds) * WARM_UP_SHARE) :]
    before, after = (statistics.quantiles(part, n=4)[0] for part in _ends(steps))
    trends["step seconds"] = {"before": before, "after": after}
    if after > before * (1 + STEP_GROWTH):
        problems.append(f"steps took {before:.3g} s at first and {after:.3g} s at the end")
    return trends, problems


def _ends(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the first and the last fifth, at least two values each."""
    size = max(2, len(values) // 5)
    return values[:size], values[-size:]


def resume_once(config: Path, folder: Path, url: str) -> list[str]:
    """Train one more step from the last checkpoint; report a problem if the server then has other weights."""
    done = max(int(path.name.removeprefix("checkpoint-")) for path in (folder / "run").glob("checkpoint-*"))
    content = yaml.safe_load(config.read_text())
    content["training"]["max_steps"] = done + 1
    last = config.with_name("last.yaml")
    last.write_text(yaml.safe_dump(content))
    learner = start_learner(last, folder / "last.log", free_ports(1)[0])
    try:
        status = learner.wait(timeout=600)
    finally:
        kill_tree(learner)
    if status:
        return [f"the learner resumed from the last checkpoint ended with status {status}; see {folder / 'last.log'}"]
    ledger = json.loads((folder / "run" / "weights.json").read_text())
    with requests.Session() as session:
        session.trust_env = False
        version = session.get(f"{url}/weight_version/", timeout=30).json()["weight_version"]
    if version == ledger["version"]:
        return []
    return [f"the server has weight version {version}, the learner {ledger['version']}"]


if __name__ == "__main__":
    main()
