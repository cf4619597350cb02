"""What a run writes down about its rollouts: every call (LOG-1), a few samples to look at (LOG-4), the servers (LOG-6).

Looks on only: what it is shown was decided elsewhere, and nothing is trained on what it writes. TensorBoard and the
progress line are `utils.run.monitor`'s, pictures are `utils.run.draw`'s.
"""

import json
import logging
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.capacity import EVAL_MICRO_STEP
from utils.dist import Ranks
from utils.rollout.client import RolloutClient

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------------------------------
# rollouts.jsonl (LOG-1)

_TIMED_OUT = re.compile(r"no answer within|timed out|took too long")


class RolloutLog:
    """`rollouts.jsonl` under the run directory: one line per step that makes rollouts.

    A line holds `step`, `phase` (`train` or `eval`), `time`, `servers` (url and group port), `sync` (the mode in force,
    and why it is not the configured one), `weight_version`, `decoding` and `calls`: each with rank, server, url, seed,
    first request, number of requests, `global_step` and `micro_step_idx` (which seeds are made of), `attempt` (above 1
    for a retry), `outcome` (`ok` or the error) and seconds. A call of another version or decoding says so itself.

    Args:
        run_dir: made if need be, by rank 0, which writes.
        client: None where no server generates; then nothing is written at all.
        ranks: whose calls are gathered.
    """

    def __init__(self, run_dir: Path, client: RolloutClient | None, ranks: Ranks) -> None:
        self._path, self._client, self._ranks = run_dir / "rollouts.jsonl", client, ranks
        self._totals: Counter[str] = Counter()
        self._pending: list[dict[str, Any]] = []  # calls made ahead of their step
        if client is not None and ranks.is_main:
            run_dir.mkdir(parents=True, exist_ok=True)
            _end_torn_line(self._path)

    def write(
        self,
        step: int,
        version: str | None,
        sync_mode: str = "full",
        fallback: str | None = None,
        phase: str = "train",
    ) -> dict[str, float]:
        """Append a line about all calls of all ranks for this step and phase, unless there are none (collective).

        Args:
            step: as in TensorBoard: optimizer steps done, so a `train` line is about `global_step` up to `step - 1`.
            version: of the weights that the servers have.
            sync_mode: in force, `full` or `adapter`.
            fallback: why that is not the configured mode, None if it is.

        Returns:
            Its numbers as TensorBoard scalars: `rollout/...` of this step and `server/<index>/calls`, `retries` and
            `timeouts` since this process began; of an evaluation only `eval_rollout/...`. None on other ranks.
        """
        if self._client is None:
            return {}
        self._pending += self._client.pop_calls()
        ready = [call for call in self._pending if _is_of(call, step, phase)]
        self._pending = [call for call in self._pending if not _is_of(call, step, phase)]
        calls_by_rank = self._ranks.gather(ready)
        if not self._ranks.is_main or not any(calls_by_rank):
            return {}
        calls = [
            {**call, "rank": rank, "attempt": attempt}
            for rank, part in enumerate(calls_by_rank)
            for call, attempt in _attempts(part)
        ]
        calls.sort(key=lambda call: [call[k] for k in ("rank", "global_step", "micro_step_idx", "first_request")])
        shared = {"weight_version": version, "decoding": calls[0]["decoding"]}
        line = {
            "step": step,
            "phase": phase,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "servers": [{"url": server.base_url, "group_port": server.group_port} for server in self._client.servers],
            "sync": {"mode": sync_mode, "fallback": fallback},
            **shared,
            "calls": [_without(call, shared) for call in calls],
        }
        # One write of one whole line: what a kill can leave behind is the beginning of the last line, nothing worse.
        with self._path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")
        self._totals.update(_totals(calls))
        prefix = "rollout" if phase == "train" else f"{phase}_rollout"
        return _scalars(calls, shared, prefix) | (dict(self._totals) if phase == "train" else {})


def read_rollout_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a `rollouts.jsonl`, in order; beginnings of lines that a kill left behind are passed over."""
    lines = []
    for text in path.read_bytes().split(b"\n"):
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def _is_of(call: Mapping[str, Any], step: int, phase: str) -> bool:
    if phase == "train":
        return call["micro_step_idx"] != EVAL_MICRO_STEP and call["global_step"] < step
    return call["micro_step_idx"] == EVAL_MICRO_STEP


def _end_torn_line(path: Path) -> None:
    """Where an earlier process was killed in the middle of a line, the next line must not be glued to it."""
    if path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size:
        with path.open("a") as file:
            file.write("\n")


def _attempts(calls: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int]]:
    """Calls of one rank in the order they ended, with how often the same requests have been asked for by then."""
    seen: Counter[tuple] = Counter()
    numbered = []
    for call in calls:
        key = tuple(call[k] for k in ("global_step", "micro_step_idx", "server", "first_request", "num_requests"))
        seen[key] += 1
        numbered.append((call, seen[key]))
    return numbered


def _without(call: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """The call without what its line says for all calls."""
    return {key: value for key, value in call.items() if key != "group_port" and (key, value) not in shared.items()}


def _totals(calls: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Counts per server that only ever grow."""
    totals: Counter[str] = Counter()
    for call in calls:
        prefix = f"server/{call['server']}"
        totals[f"{prefix}/calls"] += 1
        totals[f"{prefix}/retries"] += call["attempt"] > 1
        totals[f"{prefix}/timeouts"] += _timed_out(call)
    return totals


def _scalars(calls: Sequence[Mapping[str, Any]], shared: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """The numbers of one line. The exact seed is in the file: TensorBoard keeps 24 bits of it."""
    values = {
        "num_calls": len(calls),
        "retries": sum(call["attempt"] > 1 for call in calls),
        "failed_calls": sum(call["outcome"] != "ok" for call in calls),
        "timeouts": sum(map(_timed_out, calls)),
        "first_seed": calls[0]["seed"],
        "call_seconds_max": max(call.get("seconds", 0.0) for call in calls),
        **{f"decoding/{name}": value for name, value in shared["decoding"].items()},
    }
    weight_step = str(shared["weight_version"]).rpartition(":")[2]
    if weight_step.isdigit():
        values["weight_version"] = int(weight_step)
    return {f"{prefix}/{name}": float(value) for name, value in values.items()}


def _timed_out(call: Mapping[str, Any]) -> bool:
    return call["outcome"] != "ok" and _TIMED_OUT.search(call["outcome"]) is not None


# ---------------------------------------------------------------------------------------------------------------------
# sample sheets (LOG-4)


# ---------------------------------------------------------------------------------------------------------------------
# servers (LOG-6)
