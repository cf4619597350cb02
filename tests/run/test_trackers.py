"""Trackers: the real ones offline, read back by their own readers, and ones that fail (LOG-3, LOG-4)."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.packages import folder_with
from utils.run import trackers
from utils.run.monitor import Monitor
from utils.run.trackers import RunFacts

PINS = dict(
    line.split("==")
    for line in (Path(__file__).parents[2] / "requirements-trackers.txt").read_text().split("\n")
    if "==" in line
)
PACKAGES = {
    "wandb": [f"wandb=={PINS['wandb']}"],
    "trackio": [f"trackio=={PINS['trackio']}"],
    "mlflow": [f"mlflow-skinny=={PINS['mlflow-skinny']}"],
}
# What each process of the run below does; `steps` and `purge_step` are its arguments.
RUN = """
import json, sys
from pathlib import Path
sys.path += json.loads(sys.argv[1])
import numpy as np
from utils.run import trackers
from utils.run.monitor import Monitor
from utils.run.trackers import RunFacts
trackers.FLUSH_LIMIT_S = 60.0  # a busy machine
folder, purge_step, steps = Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
facts = RunFacts(folder, run_id=f"id{steps[0]}", config={"training": {"seed": 7}}, purge_step=purge_step)
monitor = Monitor(facts, num_steps=4, enabled=True, report_to=["tensorboard", "wandb", "trackio", "mlflow"])
for step in steps:
    monitor.scalars(step, {"loss/total": 10 - step, "eval/f1": step / 4})
monitor.image(steps[-1], "dump/0", np.full((4, 6, 3), 200, dtype=np.uint8))
monitor.table(steps[-1], "eval/labels", ["label", "f1"], [["cat", 0.5], ["a | b", 1.0]])
monitor.flush()
if steps[-1] == 4:
    (folder / "finished.json").write_text("{}")
monitor.close()
"""
WANDB = """
import json, struct, sys
sys.path.append(sys.argv[1])
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

def records(data, position=7, record=b""):
    while position + 7 <= len(data):  # LevelDB's log: blocks of 32 KiB that hold pieces of records
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        size, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):
            yield Record.FromString(record)
            record = b""

points, facts = [], []
for path in sorted(Path(sys.argv[2]).glob("wandb/offline-run-*/*.wandb")):
    for record in records(path.read_bytes()):
        if record.HasField("history"):
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            points += [row]
        if record.HasField("run"):
            facts.append([record.run.run_id, record.run.display_name, record.run.project])
        if record.HasField("exit"):
            facts[-1].append(record.exit.exit_code)
kept = [name for row in points for name in row if name.endswith("/path")]
points = [[row["step"], row["loss/total"]] for row in points if "loss/total" in row]
print(json.dumps({"points": points, "facts": facts, "kept": sorted(kept)}))
"""
TRACKIO = """
import json, sys
sys.path.append(sys.argv[1])
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("rollout-matching")
rows = SQLiteStorage.get_logs("rollout-matching", run)
points = [[row["step"], row["loss/total"]] for row in rows if "loss/total" in row]
kept = [name for row in rows for name, value in row.items() if isinstance(value, dict)]
print(json.dumps({"points": points, "facts": run, "kept": sorted(kept)}))
"""
MLFLOW = """
import json, sys
sys.path.append(sys.argv[1])
from mlflow.tracking import MlflowClient
client = MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("rollout-matching").experiment_id])
points = [[metric.step, metric.value] for metric in client.get_metric_history(run.info.run_id, "loss/total")]
kept, folders = [], [None]
while folders:
    for file in client.list_artifacts(run.info.run_id, folders.pop()):
        (folders if file.is_dir else kept).append(file.path)
kept = [path for path in kept if not path.endswith(".webp")]  # a picture's small copy
print(json.dumps({"points": points, "facts": [run.info.run_name, run.info.status], "kept": sorted(kept)}))
"""
OFFLINE = {
    "WANDB_MODE": "offline",
    "TRACKIO_DIR": "{folder}/trackio",
    "MLFLOW_TRACKING_URI": "file:{folder}/ml",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
READERS = {"wandb": WANDB, "trackio": TRACKIO, "mlflow": MLFLOW}


def python(program: str, *arguments: object, folder) -> str:
    """Run a program with each tracker's data in `folder`, offline; return its last line."""
    environment = os.environ | {key: value.format(folder=folder) for key, value in OFFLINE.items()}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0, run.stderr
    assert "is dropped, the run continues" not in run.stderr, run.stderr
    return run.stdout.strip().rpartition("\n")[2]


def losses(folder) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars("loss/total")]


def test_a_resumed_run_is_one_run_with_each_step_once_LOG_3(tmp_path):
    """LOG-3, LOG-4, LRN-5: the first process ends after step 3 although it was not the last; its checkpoint is of step
    2. Each tracker's own reader finds four steps, two pictures and two tables of one run."""
    packages, run_dir = {name: str(folder_with(*own)) for name, own in PACKAGES.items()}, tmp_path / "my-run"
    run_dir.mkdir()
    python(RUN, json.dumps(list(packages.values())), run_dir, "null", [1, 2, 3], folder=tmp_path)
    python(RUN, json.dumps(list(packages.values())), run_dir, 3, [3, 4], folder=tmp_path)
    assert losses(run_dir) == [(1, 9), (2, 8), (3, 7), (4, 6)]
    facts = {
        "wandb": [["id1", "my-run", "rollout-matching", 1], ["id1", "my-run", "rollout-matching", 0]],
        "trackio": "my-run-id1",
        "mlflow": ["my-run", "FINISHED"],
    }
    for name, reader in READERS.items():
        found = json.loads(python(reader, packages[name], run_dir, folder=tmp_path))
        assert sorted(found["points"]) == [[1, 9], [2, 8], [3, 7], [4, 6]], name
        assert found["facts"] == facts[name]
        assert sum("dump" in kept for kept in found["kept"]) == 2, found["kept"]
        assert sum("labels" in kept for kept in found["kept"]) == 2, found["kept"]


def test_a_fresh_run_in_an_old_directory_is_another_run(tmp_path, monkeypatch):
    """A run that starts anew, whether or not something was recorded there, has an id of its own."""
    begun = []

    class Known(trackers.Service):
        package = "known"

        def begin(self, known_as):
            begun.append(known_as)
            return known_as or self.facts.run_id

    for purge_step, run_id in ((None, "a"), (5, "b"), (0, "c"), (None, "d")):
        Known(RunFacts(tmp_path, run_id, purge_step=purge_step))
    assert begun == [None, "a", None, None]


def test_wandb_takes_an_evaluation_at_a_step_that_it_has_LOG_3(tmp_path, monkeypatch):
    """LOG-3, LRN-5: a resumed run makes up for it. W&B's own steps only go forward: of what a resumed run logs with
    `step=`, those up to the last one are ignored (0.31.0)."""
    rows, axes = [], {}

    class Run:
        def __init__(self, **_):
            self.step = rows[-1][0] + 1 if rows else 0

        def log(self, values, step=None):
            if step is None or step >= self.step:
                self.step = self.step if step is None else step
                rows.append((self.step, values))
                self.step += step is None

        def define_metric(self, name, step_metric=None):
            axes[name] = step_metric

    wandb = SimpleNamespace(init=Run, Settings=dict, Image=str, Table=lambda columns, data: data)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    trackers.WandB(RunFacts(tmp_path, "a")).scalars(2, {"loss/total": 3.0})
    resumed = trackers.WandB(RunFacts(tmp_path, "b", purge_step=3))
    resumed.scalars(2, {"eval/f1": 0.5, "loss/total": 3.0})
    resumed.table(2, "eval/labels", ["label"], [["cat"]])
    resumed.image(3, "dump/0", "picture")
    assert [row for _, row in rows] == [
        {"loss/total": 3.0, "step": 2},
        {"eval/f1": 0.5, "step": 2},
        {"eval/labels": [["cat"]], "step": 2},
        {"dump/0": "picture", "step": 3},
    ]
    assert axes == {"step": None, "*": "step"}


class Broken:
    """A tracker that breaks, or hangs, in one of its methods."""

    def __init__(self, where: str, hangs: bool) -> None:
        self.where, self.hangs = where, hangs
        self.at("start")

    def at(self, method: str) -> None:
        if method == self.where:
            if self.hangs:
                threading.Event().wait(60)
            raise OSError("no route to host")

    def __getattr__(self, method: str):
        return lambda *_: self.at(method)


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("where", ["start", "scalars", "image", "table", "flush", "close"])
def test_a_tracker_that_breaks_or_hangs_costs_a_warning_LOG_3(tmp_path, monkeypatch, caplog, where, hangs):
    """LOG-3: the run goes on at once, and TensorBoard has every step."""
    monkeypatch.setitem(trackers.TRACKERS, "wandb", lambda facts: Broken(where, hangs))
    monkeypatch.setattr(trackers, "FLUSH_LIMIT_S", 2.0)
    monkeypatch.setattr(trackers, "CLOSE_LIMIT_S", 2.0)
    start = time.monotonic()
    monitor = Monitor(RunFacts(tmp_path), num_steps=9, enabled=True, report_to=["wandb", "tensorboard"])
    for step in range(1, 10):
        monitor.scalars(step, {"loss/total": step})
        monitor.image(step, "dump/0", np.zeros((2, 2, 3), dtype=np.uint8))
        monitor.table(step, "eval/labels", ["label"], [["cat"]])
        if step % 3 == 0:
            monitor.flush()
    monitor.close()
    assert time.monotonic() - start < 20
    assert losses(tmp_path) == [(step, step) for step in range(1, 10)]
    warnings = [record.getMessage() for record in caplog.records if record.name == "utils.run.trackers"]
    assert len(warnings) == 1 and warnings[0].startswith("wandb is dropped, the run continues: ")
    assert ("it took longer than" if hangs else "OSError: no route to host") in warnings[0]


ENDING = """
import atexit, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from utils.run import program, trackers
from utils.run.monitor import Monitor
from utils.run.trackers import RunFacts

class Stuck:
    def __init__(self, facts):
        atexit.register(lambda: time.sleep(900))  # as W&B waits for its service

    def close(self):
        threading.Event().wait()

trackers.TRACKERS["wandb"], trackers.CLOSE_LIMIT_S = Stuck, 1.0
monitor = Monitor(RunFacts(Path(sys.argv[2])), num_steps=9, enabled=True, report_to=["wandb"])
session = SimpleNamespace(monitor=monitor, close=monitor.close)
program.model_problems = program.data_problems = lambda cfg: []
sys.argv = ["train_stage2.py", "--config", sys.argv[1]]
train = lambda run: print("trained")
program.run_program("train_stage2.py", "rollout_matching_sft", "", lambda *_: SimpleNamespace(session=session), train)
"""


def test_a_tracker_that_hangs_does_not_hold_the_process_at_its_end_LOG_3(tmp_path):
    """LOG-3: what the program has said is out, and its status is its own."""
    command = [sys.executable, "-c", ENDING, "configs/demo/stage2.yaml", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=Path(__file__).parents[2])
    assert ended.returncode == 0 and "trained" in ended.stdout, ended.stderr
    assert "wandb is dropped, the run continues" in ended.stderr


def test_what_a_tracker_keeps_of_steps_that_are_trained_again_is_said_LOG_3(tmp_path, monkeypatch, caplog):
    """LOG-3: after a roll-back its curves are not those of the run."""

    class Kept(trackers.Service):
        package = "kept"
        begin = lambda self, known_as: "one"  # noqa: E731
        send_scalars = close = lambda *_: None

    for purge_step, first, last in ((None, 1, 10), (11, 11, 12), (6, 6, 12)):
        caplog.clear()
        tracker = Kept(RunFacts(tmp_path, purge_step=purge_step))
        for step in range(first, last + 1):
            tracker.scalars(step, {"loss/total": 1.0})
        told = [record.getMessage() for record in caplog.records]
        again = "kept keeps its records of steps 6 to 12; what is trained again is not shown there"
        assert told == ([again] if purge_step == 6 else [])


def test_a_tracker_that_falls_behind_is_dropped_not_waited_for_LOG_3(tmp_path, monkeypatch, caplog):
    """LOG-3: pictures must not pile up in memory."""
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", lambda facts: Broken("scalars", hangs=True))
    monkeypatch.setattr(trackers, "CLOSE_LIMIT_S", 0.2)
    monitor = Monitor(RunFacts(tmp_path), num_steps=9, enabled=True, report_to=["mlflow"])
    for step in range(trackers.QUEUE_LIMIT + 5):
        monitor.scalars(step, {"loss/total": step})
    (background,) = monitor._trackers
    assert background._jobs.empty()
    monitor.close()
    (warning,) = (record.getMessage() for record in caplog.records if record.name == "utils.run.trackers")
    assert "it is 200 records behind" in warning
