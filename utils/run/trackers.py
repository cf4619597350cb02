"""Where curves, pictures and tables of a run go: TensorBoard, Weights & Biases, Trackio, MLflow (`training.report_to`).

Each tracker works in a thread of its own, since some of them ask a network: one that fails, or hangs, costs its own
curves and a warning, never a run. Accounts, projects and addresses come from each tracker's own environment variables.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

PROJECT = "rollout-matching"  # where the tracker's own environment variable names none
FLUSH_S = 30  # a killed run loses at most this many seconds of its TensorBoard curves
QUEUE_LIMIT = 200  # records a tracker may be behind
FLUSH_LIMIT_S, CLOSE_LIMIT_S = 10.0, 60.0

Rows = Sequence[Sequence[str | float]]


@dataclass(frozen=True)
class RunFacts:
    """What a tracker has to know of a run.

    Attributes:
        run_id: of this process; a resumed run keeps its tracker's earlier id.
        config: resolved, as in run.json.
        purge_step: a resumed run's first step, from which on an earlier process's records are dropped; None: fresh.
    """

    run_dir: Path
    run_id: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    purge_step: int | None = None

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    @property
    def has_finished(self) -> bool:
        """Whether the training came to its end, which `Session.finish` records."""
        return (self.run_dir / "finished.json").exists()


class Tracker(Protocol):
    """A tracker. Any method may raise."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record one point per name."""

    def image(self, step: int, name: str, pixels: Any) -> None:
        """Record a picture, uint8 [H, W, 3]."""

    def table(self, step: int, name: str, columns: Sequence[str], rows: Rows) -> None:
        """Record a table."""

    def flush(self) -> None:
        """Bring everything recorded so far to disk or to the service."""

    def close(self) -> None:
        """Flush and end."""


class TensorBoard:
    """Event files in the run directory. What an earlier process recorded from `purge_step` on is not shown."""

    def __init__(self, facts: RunFacts) -> None:
        _number_event_files(facts.run_dir)
        self._writer = SummaryWriter(str(facts.run_dir), purge_step=facts.purge_step, flush_secs=FLUSH_S)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def image(self, step: int, name: str, pixels: Any) -> None:
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def table(self, step: int, name: str, columns: Sequence[str], rows: Rows) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        self._writer.add_text(name, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines), step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Service:
    """What the trackers outside the run directory share: they record nothing twice when a run is resumed.

    They cannot take a record back. So `SERVICE.json` in the run directory keeps the id under which the tracker knows
    the run, and the last step of each name; steps that are trained again after a resume are left out.
    """

    package: str

    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts
        self._path = facts.run_dir / f"{self.package}.json"
        resumed = bool(facts.purge_step) and self._path.exists()
        self._state: dict[str, Any] = json.loads(self._path.read_text()) if resumed else {"id": None, "steps": {}}
        self._state["id"] = self.begin(self._state["id"])
        self._save()
        if resumed and (last := max(self._state["steps"].values(), default=0)) >= facts.purge_step:
            kept = f"keeps its records of steps {facts.purge_step} to {last}"
            logger.warning("%s %s; what is trained again is not shown there", self.package, kept)

    def begin(self, known_as: str | None) -> str:
        """Begin a run, or go on with the one `known_as`; return its id."""
        raise NotImplementedError

    def send_scalars(self, step: int, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def send_image(self, step: int, name: str, pixels: Any) -> None:
        raise NotImplementedError

    def send_table(self, step: int, name: str, columns: Sequence[str], rows: Rows) -> None:
        raise NotImplementedError

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if new := {name: float(value) for name, value in values.items() if self._is_new(step, name)}:
            self.send_scalars(step, new)
            self._record(step, new)

    def image(self, step: int, name: str, pixels: Any) -> None:
        if self._is_new(step, name):
            self.send_image(step, name, pixels)
            self._record(step, [name])

    def table(self, step: int, name: str, columns: Sequence[str], rows: Rows) -> None:
        if self._is_new(step, name):
            self.send_table(step, name, columns, rows)
            self._record(step, [name])

    def flush(self) -> None:
        """Nothing: a record is on its way as soon as it is sent."""

    def _is_new(self, step: int, name: str) -> bool:
        return step > self._state["steps"].get(name, -1)

    def _record(self, step: int, names: Any) -> None:
        self._state["steps"] |= dict.fromkeys(names, step)
        self._save()

    def _save(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._state))
        partial.replace(self._path)


class RunLogger(Service):
    """The form that Weights & Biases and Trackio share: one log of values, pictures and tables by step."""

    library: Any  # the module, with `Image` and `Table`
    run: Any

    def send_scalars(self, step: int, values: Mapping[str, Any]) -> None:
        self.run.log(dict(values), step=step)

    def send_image(self, step: int, name: str, pixels: Any) -> None:
        self.send_scalars(step, {name: self.library.Image(pixels)})

    def send_table(self, step: int, name: str, columns: Sequence[str], rows: Rows) -> None:
        table = self.library.Table(columns=list(columns), data=[list(row) for row in rows])
        self.send_scalars(step, {name: table})


class WandB(RunLogger):
    """Weights & Biases: `WANDB_API_KEY`, `WANDB_PROJECT`, `WANDB_MODE` and its other variables count."""

    package = "wandb"

    def begin(self, known_as: str | None) -> str:
        import wandb

        self.library, facts = wandb, self.facts
        run_id = known_as or facts.run_id
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", facts.name),
            id=run_id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR", str(facts.run_dir)),
            config=dict(facts.config),
            settings=wandb.Settings(console="off"),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        return run_id

    def send_scalars(self, step: int, values: Mapping[str, Any]) -> None:
        # W&B ignores what is logged with `step=` of the last step or an earlier one of a resumed run, such as an
        # evaluation that is made up for.
        self.run.log({**values, "step": step})

    def close(self) -> None:
        self.run.finish(exit_code=0 if self.facts.has_finished else 1)


class Trackio(RunLogger):
    """Trackio: `TRACKIO_PROJECT`, `TRACKIO_DIR`, `TRACKIO_SPACE_ID` and its other variables count."""

    package = "trackio"

    def begin(self, known_as: str | None) -> str:
        import trackio

        self.library, facts = trackio, self.facts
        name = known_as or f"{facts.name}-{facts.run_id}"
        self.run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=name,
            config=dict(facts.config),
            resume="must" if known_as else "never",
            embed=False,
        )
        return name

    def close(self) -> None:
        self.run.finish()


class MLflow(Service):
    """MLflow: `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME` and its other variables count."""

    package = "mlflow"

    def begin(self, known_as: str | None) -> str:
        from mlflow.tracking import MlflowClient

        self._client, facts = MlflowClient(), self.facts
        if known_as is not None:
            self._client.update_run(known_as, status="RUNNING")
            return known_as
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        run_id: str = self._client.create_run(experiment, run_name=facts.name).info.run_id
        self._client.log_dict(run_id, dict(facts.config), "config.json")  # parameters are too short for ours
        return run_id

    def send_scalars(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._state["id"], metrics=metrics)

    def send_image(self, step: int, name: str, pixels: Any) -> None:
        self._client.log_image(self._state["id"], pixels, key=name, step=step)

    def send_table(self, step: int, name: str, columns: Sequence[str], rows: Rows) -> None:
        split = {"columns": list(columns), "data": [list(row) for row in rows]}
        self._client.log_dict(self._state["id"], split, f"{name}/step_{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._state["id"], "FINISHED" if self.facts.has_finished else "FAILED")


TRACKERS: dict[str, Callable[[RunFacts], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
    "mlflow": MLflow,
}


class Background:
    """A tracker in a thread of its own. No method raises; what waits has a limit. The first failure is the last."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self.name = name
        self._jobs: Queue[Callable[[Tracker], None] | None] = Queue(QUEUE_LIMIT)
        self._ended = threading.Event()
        self._warning = threading.Lock()  # taken by the one warning
        threading.Thread(target=self._run, args=(make,), name=f"tracker-{name}", daemon=True).start()

    @property
    def was_given_up(self) -> bool:
        return self._warning.locked()

    def submit(self, job: Callable[[Tracker], None]) -> None:
        """Have the thread do `job(tracker)`, in order."""
        try:
            if not self._ended.is_set():
                self._jobs.put_nowait(job)
        except Full:
            self._give_up(f"it is {QUEUE_LIMIT} records behind")

    def flush(self) -> None:
        """Wait until all that came before is flushed."""
        flushed = threading.Event()

        def flush(tracker: Tracker) -> None:
            tracker.flush()
            flushed.set()

        self.submit(flush)
        deadline = time.monotonic() + FLUSH_LIMIT_S
        while not flushed.wait(0.05) and not self._ended.is_set():
            if time.monotonic() > deadline:
                self._give_up(f"it took longer than {FLUSH_LIMIT_S:g} s to flush")

    def close(self) -> None:
        """Wait until all is recorded and the tracker has ended."""
        try:
            self._jobs.put_nowait(None)
        except Full:
            self._give_up(f"it is {QUEUE_LIMIT} records behind at the end")
        if not self._ended.wait(CLOSE_LIMIT_S):
            self._give_up(f"it took longer than {CLOSE_LIMIT_S:g} s to end")

    def _run(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
            while (job := self._jobs.get()) is not None and not self._ended.is_set():
                job(tracker)
            if not self._ended.is_set():
                tracker.close()
        except Exception as error:  # noqa: BLE001  (a tracker never ends a run)
            self._give_up(f"{type(error).__name__}: {error}")
        finally:
            self._ended.set()

    def _give_up(self, reason: str) -> None:
        """Warn once and take no more records."""
        if self._warning.acquire(blocking=False):
            logger.warning("%s is dropped, the run continues: %s", self.name, reason)
        self._ended.set()
        while True:  # pictures need not wait for the end of a tracker that hangs
            try:
                self._jobs.get_nowait()
            except Empty:
                break


def _cell(value: str | float) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _number_event_files(run_dir: Path) -> None:
    """Rename the event files of earlier processes so that ours comes last: TensorBoard reads them by name, which begins
    with the time of their start, and a clock may have been set back since. 0, 1, ... lies before every time."""
    for number, path in enumerate(sorted(run_dir.glob("events.out.tfevents.*"))):
        events, out, kind, _, rest = path.name.split(".", 4)
        path.rename(path.with_name(f"{events}.{out}.{kind}.{number:010d}.{rest}"))
