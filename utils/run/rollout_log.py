"""`rollouts.jsonl`: every call of every rank to the rollout servers (LOG-1), and their counters as scalars (LOG-6)."""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from utils.capacity import EVAL_MICRO_STEP
from utils.dist import Ranks
from utils.rollout.client import RolloutClient
from utils.run.monitor import write_whole

Call = Mapping[str, Any]


class RolloutLog:
    """`rollouts.jsonl` under the run directory: one line per step that makes rollouts.

    A line holds `step`, `phase` (`train` or `eval`), `time`, `servers`, `sync` (the current mode, and why it is not the
    configured one), `weight_version`, `decoding` and `calls`. A call holds rank, server, url, seed, first request,
    number of requests, `global_step` and `micro_step_idx`, `attempt` (above 1 for a retry; halves of a call, and what
    is made again after a server was lost, begin anew), `splits` (calls since the one before that were halved after a
    failure, or of which a part went again), `outcome` (`ok` or the error), `timed_out`, seconds, and its weight version
    or decoding if they are not the line's.
    Rank 0 writes, if servers generate.
    """

    def __init__(self, run_dir: Path, client: RolloutClient | None, ranks: Ranks, fallback: str | None = None) -> None:
        self._path = run_dir / "rollouts.jsonl"
        self._fallback = fallback  # as run.json has it
        self._client = client
        self._ranks = ranks
        self._totals: Counter[str] = Counter()
        self._pending: list[Call] = []  # calls made ahead of their step
        if client is not None and ranks.is_main:
            run_dir.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and self._path.stat().st_size:
                with self._path.open("r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    if file.read() != b"\n":
                        file.write(b"\n")  # ends a line in the middle of which an earlier process was killed

    def write(
        self, step: int, version: str | None, sync_mode: str = "full", fallback: str | None = None, phase: str = "train"
    ) -> dict[str, float]:
        """Append a line about all calls of all ranks for this step and phase, unless there are none (collective).

        `step` counts optimizer steps done, as in TensorBoard, so a `train` line covers `global_step` up to `step - 1`.
        `version` is that of the servers' weights; `fallback` says why `sync_mode` is not the configured one.

        Returns:
            TensorBoard scalars, on rank 0 only: `sync/adapter` and `sync/fallback` (0 or 1), `rollout/...` of this step
            and `server/<index>/calls`, `retries` and `timeouts` so far; for an evaluation `eval_rollout/...` instead.
        """
        if self._client is None:
            return {}
        self._pending += self._client.pop_calls()
        calls_by_rank = self._ranks.gather([call for call in self._pending if _belongs_to(call, step, phase)])
        self._pending = [call for call in self._pending if not _belongs_to(call, step, phase)]
        if not self._ranks.is_main or not any(calls_by_rank):
            return {}
        sync = {"mode": sync_mode, "fallback": fallback}
        if fallback != self._fallback:
            self._fallback, run_json = fallback, self._path.with_name("run.json")
            write_whole(run_json, json.dumps(json.loads(run_json.read_text()) | {"sync": sync}, indent=2) + "\n")
        calls = _in_order(calls_by_rank)
        common = {"weight_version": version, "decoding": calls[0]["decoding"]}
        line = {
            "step": step,
            "phase": phase,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "servers": [{"url": server.base_url, "group_port": server.group_port} for server in self._client.servers],
            "sync": sync,
            **common,
            "calls": [
                {
                    key: value
                    for key, value in call.items()
                    if key != "group_port" and (key, value) not in common.items()
                }
                for call in calls
            ],
        }
        # One write of a whole line: a kill can tear the last line, nothing else.
        with self._path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")
        for call in calls:
            counts = {"calls": 1, "retries": call["attempt"] > 1, "timeouts": call["timed_out"]}
            self._totals.update({f"server/{call['server']}/{name}": int(count) for name, count in counts.items()})
        values = {"sync/adapter": float(sync_mode == "adapter"), "sync/fallback": float(fallback is not None)}
        if phase == "train":
            return values | _scalars(calls, common, "rollout") | dict(self._totals)
        return values | _scalars(calls, common, f"{phase}_rollout")

    def calls_ahead(self, step: int, num_ahead: int, num_micro_steps: int) -> list[Call]:
        """This rank's calls for the first `num_ahead` micro-steps from `step` on, `num_micro_steps` in each step: what
        a checkpoint that holds these micro-steps must hold, too (LRN-5)."""
        if self._client is None:
            return []
        self._pending += self._client.pop_calls()

        def is_kept(call: Call) -> bool:
            micro_step_idx = call["micro_step_idx"] % num_micro_steps  # rounds of resampling count on
            position = (call["global_step"] - step) * num_micro_steps + micro_step_idx
            return call["micro_step_idx"] != EVAL_MICRO_STEP and 0 <= position < num_ahead

        return [call for call in self._pending if is_kept(call)]

    def restore(self, calls: Sequence[Call]) -> None:
        """Put back the `calls_ahead` of a checkpoint."""
        self._pending += calls


def read_rollout_log(path: Path) -> list[dict[str, Any]]:
    """All `rollout_lines`. Those of a long run may be gigabytes."""
    return list(rollout_lines(path))


def rollout_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a `rollouts.jsonl`, in order; lines torn by a kill are skipped, even where JSON is left of them."""
    with path.open("rb") as file:
        for text in file:
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and {"step", "phase"} <= line.keys():
                    yield line


def _belongs_to(call: Call, step: int, phase: str) -> bool:
    if call["micro_step_idx"] == EVAL_MICRO_STEP:
        return phase == "eval"
    return phase == "train" and call["global_step"] < step


def _in_order(calls_by_rank: Sequence[Sequence[Call]]) -> list[dict[str, Any]]:
    """All calls by rank, step and request. Calls in checkpoints of earlier versions lack some keys."""
    calls = [
        {"attempt": 1, "splits": 0, "timed_out": False, **call, "rank": rank}
        for rank, part in enumerate(calls_by_rank)
        for call in part
    ]
    return sorted(calls, key=itemgetter("rank", "global_step", "micro_step_idx", "first_request"))


def _scalars(calls: Sequence[Call], common: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """The numbers of one line. The exact seed is in the file: TensorBoard keeps 24 bits of it."""
    values = {
        "num_calls": len(calls),
        "retries": sum(call["attempt"] > 1 for call in calls),
        "splits": sum(call["splits"] for call in calls),
        "failed_calls": sum(call["outcome"] != "ok" for call in calls),
        "timeouts": sum(call["timed_out"] for call in calls),
        "first_seed": calls[0]["seed"],
        "call_seconds_max": max(call.get("seconds", 0.0) for call in calls),
        **{f"decoding/{name}": value for name, value in common["decoding"].items()},
    }
    weight_step = str(common["weight_version"]).rpartition(":")[2]
    if weight_step.isdigit():
        values["weight_version"] = int(weight_step)
    return {f"{prefix}/{name}": float(value) for name, value in values.items()}
