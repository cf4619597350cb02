"""What the studies share: a learner's config and process, its record in docs/results.json, and start models."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from studies.tables import Record
from tools.cached import alone
from tools.demo import ENVIRONMENT
from tools.warmup_sft import Parts, WarmupConfig, load_parts, save, train
from utils.data.encoding import encode_prompt
from utils.data.samples import Sample, load_samples
from utils.parsing import parse_answer
from utils.rollout.hf import left_pad, stop_token_ids
from utils.scores import count_sample, scores

RECORDS = Path("docs/results.json")
ROOT = Path("runs/study")


@dataclass(frozen=True)
class Task:
    """A task of a study. `config` has all that its runs share: data, start model, number of steps, settings."""

    name: str
    config: str


# ---------------------------------------------------------------------------------------------------------------------
# a run


def write_config(task: Task, folder: Path, overrides: Mapping[str, Any]) -> Path:
    """Write a YAML file to `folder` that extends the task's by `overrides` (dotted keys)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"extends": os.path.relpath(task.config, folder)}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config | nested({"training.output_dir": str(folder)} | overrides), sort_keys=False))
    return path


def nested(dotted: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `{"a.b": 1, "a.c": 2}` into `{"a": {"b": 1, "c": 2}}`."""
    result: dict[str, Any] = {}
    for path, value in dotted.items():
        *parents, last = path.split(".")
        inner = result
        for key in parents:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return result


def slug(text: str) -> str:
    return "-".join("".join(char if char.isalnum() or char == "." else " " for char in text).split())


def weights_digest(model: Path) -> str:
    """Tell a checkpoint's weights apart from those of all others."""
    with (model / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def revision() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


class RunFailed(Exception):
    """A learner ended with an error."""


def run_to_end(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> int:
    """Run a command to its end and return its status; stop it if this process is stopped first.

    Args:
        environment: set for it besides the usual.
    """
    env = ENVIRONMENT | dict(environment or {})
    with log.open("w") as sink:
        process = subprocess.Popen(command, env=env, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def quiet_parts(curves: EventAccumulator) -> dict[str, float]:
    """Seconds of a step by part: of each the 10th percentile over the run, which other work disturbs least."""
    parts = ("rollout", "sync", "prepare", "train")
    values = {part: [event.value for event in curves.Scalars(f"seconds/{part}")] for part in parts}
    return {part: round(float(np.percentile(values[part], 10)), 4) for part in parts}


# ---------------------------------------------------------------------------------------------------------------------
# records


def load_records() -> list[Record]:
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else []


def same_run(record: Record, other: Record) -> bool:
    return all(record[name] == other[name] for name in ("task", "variant", "seed"))


def store(record: Record) -> None:
    """Add the record to docs/results.json, one line each; it replaces an earlier record of the same run.

    Processes that store at the same time do so one after the other.
    """
    with alone(ROOT / "records.lock"):
        kept = [old for old in load_records() if not same_run(old, record)]
        text = "[\n" + ",\n".join(json.dumps(entry) for entry in [*kept, record]) + "\n]\n"
        scratch = RECORDS.with_suffix(".tmp")
        scratch.write_text(text)
        scratch.replace(RECORDS)


# ---------------------------------------------------------------------------------------------------------------------
# start models


def warm_up(
    folder: Path,
    cfg: WarmupConfig,
    held_out: Path,
    min_gain: float = 0.01,
    max_rounds: int = 16,
    max_new_tokens: int = 352,
) -> None:
    """Train in rounds, each from the model of the last, until a round raises F1 on the held-out images by < `min_gain`.

    Leaves the model of the best round in `folder`, beside those of all rounds, and the scores after each round in
    `curve.json`. Called again with the same folder, it goes on behind the last round that was finished.
    """
    validation = load_samples([held_out], cfg.data.prompt, cfg.data.object_order)[0]
    scored = folder / "curve.json"
    curve: list[dict[str, float]] = json.loads(scored.read_text()) if scored.exists() else []
    while len(curve) < max_rounds and not has_stalled(curve, min_gain):
        number = len(curve)
        model = str(folder / f"round-{number - 1}") if number else cfg.model
        parts = load_parts(cfg := cfg.model_copy(update={"seed": number, "model": model}))
        train(cfg, parts)
        save(parts, folder / f"round-{number}")
        steps = (number + 1) * cfg.steps
        result = greedy_scores(parts, validation, max_new_tokens)
        curve.append({"steps": steps, "samples": steps * cfg.samples_per_step} | result)
        print(f"round {number + 1}: {curve[-1]}", flush=True)
        scratch = scored.with_suffix(".tmp")
        scratch.write_text(json.dumps(curve, indent=2) + "\n")
        scratch.replace(scored)
    best = max(range(len(curve)), key=lambda number: curve[number]["f1"])
    shutil.copytree(folder / f"round-{best}", folder, dirs_exist_ok=True)


def has_stalled(curve: Sequence[dict[str, float]], min_gain: float) -> bool:
    """Whether the last round has an F1 less than `min_gain` above the best one before it, or above 0 if it is alone."""
    f1 = [point["f1"] for point in curve]
    return bool(f1) and f1[-1] - max(f1[:-1], default=0.0) < min_gain


def greedy_scores(parts: Parts, samples: Sequence[Sample], max_new_tokens: int) -> dict[str, float]:
    """Score the model's greedy responses, generated in one call of transformers' `generate`."""
    model, tokenizer = parts.model.eval(), parts.processor.tokenizer
    prompts = [encode_prompt(sample, parts.processor) for sample in samples]
    rows = [(prompt.prompt_token_ids, prompt.vision) for prompt in prompts]
    stop = stop_token_ids(model, tokenizer)
    inputs = left_pad(rows, model.config.image_token_id)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=stop)
    counts: Counter[str] = Counter()
    for sample, ids in zip(samples, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
        end = next((index for index, token in enumerate(ids) if token in stop), None)
        counts.update(count_sample(parse_answer(ids[:end], parts.table), sample.objects, 0.5, end is None))
    result = scores(counts)
    return {key: round(result[key], 5) for key in ("f1", "f1_no_label", "recall", "precision", "parse_rate")}
