"""`make demo-grpo`: GRPO from start to end on this machine's CPU, with the real server and the real learner.

Makes scenes with summaries and a model that answers in the right form but leaves most out (cached), starts
`rollout_server.py`, runs `deepspeed train_grpo.py` with two ranks against it, stops the server, and says what came out:
a table and runs/demo_grpo/summary.json. It only starts the commands that a user would type.
"""

import argparse
import inspect
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tools.demo import exit_on_sigterm, run, say, serve_and_train
from tools.make_demo import build_start_model, cached, make_dataset
from tools.warmup_sft import load_parts, load_warmup_config, save, train
from utils.config.load import load_config_or_exit
from utils.data.encoding import encode_prompt
from utils.data.samples import Sample
from utils.policy_loss import policy_segment
from utils.targets import Segment

CONFIG, WARMUP_CONFIG = "configs/demo/grpo.yaml", "configs/demo/grpo_warmup.yaml"
ROOT = Path("runs/demo_grpo")
NUM_TRAIN, NUM_VAL, NUM_WARMUP = 1500, 64, 6400
DOMAIN = "shapes"
NUM_COMPARED = 10  # steps at either end
PARTS = ("rollout", "sync", "train", "prepare", "eval", "total")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make-only", action="store_true", help="make data and start model, then end")
    args = parser.parse_args()
    exit_on_sigterm()
    start = time.monotonic()
    output = Path(load_config_or_exit(CONFIG).training.output_dir)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    say("1/3 data and start model (made once, kept under runs/demo_grpo)")
    if args.make_only:
        make(ROOT)
        return
    run(
        [sys.executable, "-m", "tools.demo_grpo", "--make-only"], environment | {"OMP_NUM_THREADS": str(os.cpu_count())}
    )
    seconds = {"make": time.monotonic() - start}
    seconds |= serve_and_train("train_grpo.py", CONFIG, environment)
    seconds["total"] = time.monotonic() - start
    report(output, ROOT / "summary.json", seconds)


# ---- data and start model ------------------------------------------------------------------------------------------


def make(root: Path) -> None:
    """Make `data`, `start` and `model` below `root`, each only if what it is made of changed."""
    warmup = load_warmup_config(WARMUP_CONFIG)
    parts = (inspect.getmodule(make_dataset), make_data, summary_of, supervised_summary)
    sources = [inspect.getsource(part) for part in parts]
    cached(root / "data", sources, "synthetic scenes with summaries", make_data)
    cached(root / "start", sources, "an untrained Qwen3-VL", build_start_model)

    def warm_up(_: Path) -> None:
        parts = load_parts(warmup)
        train(warmup, parts, partial(supervised_summary, processor=parts.processor))
        save(parts.model, parts.processor, warmup.output_dir)

    cached(root / "model", [sources, warmup.model_dump()], f"supervised warm-up, {warmup.steps} steps", warm_up)


def make_data(folder: Path, num_train: int = NUM_TRAIN, num_val: int = NUM_VAL, num_warmup: int = NUM_WARMUP) -> None:
    """The demo's scenes, each line with `domain` and `summary` of its objects (of those that are annotated)."""
    for path in make_dataset(folder, num_train, num_val, num_warmup):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [row | {"domain": DOMAIN, "summary": summary_of(row["objects"])} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def summary_of(objects: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """`{colour: {shape: how many}}`, by name."""
    counts: dict[str, dict[str, int]] = {}
    for colour, shape in sorted(item["desc"].split() for item in objects):
        own = counts.setdefault(colour, {})
        own[shape] = own.get(shape, 0) + 1
    return counts


def supervised_summary(sample: Sample, processor: Any) -> Segment:
    """The sample's prompt followed by its summary, all of which is learnt."""
    text = f"<DOMAIN={sample.extra['domain']}>, <TASK=SUMMARY>\n{json.dumps(sample.extra['summary'])}"
    answer = [*processor.tokenizer.encode(text, add_special_tokens=False), processor.tokenizer.eos_token_id]
    return policy_segment(sample.id, **vars(encode_prompt(sample, processor)), answer_ids=answer)


# ---- what came out -------------------------------------------------------------------------------------------------


def report(output: Path, summary_file: Path, seconds: dict[str, float]) -> None:
    """`summary.json`, and the same for people."""
    finished = json.loads((output / "finished.json").read_text())
    curves = EventAccumulator(str(output)).Reload()
    tags = [tag for tag in curves.Tags()["scalars"] if tag.split("/")[0] == "reward" and not tag.endswith("_std")]
    ends = {tag: first_and_last([event.value for event in curves.Scalars(tag)]) for tag in tags}
    before, after = (json.loads((output / f"eval/step_{step:06d}.json").read_text()) for step in (0, finished["steps"]))
    seconds = {**finished["seconds"], **seconds}
    summary = {
        "reward_first": ends["reward"][0],
        "reward_last": ends["reward"][1],
        "steps": finished["steps"],
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "world_size": finished["world_size"],
        "held_out": {"before": before["reward"], "after": after["reward"], "num_samples": int(after["num_samples"])},
        "rewards": {tag.removeprefix("reward/"): ends[tag] for tag in tags if tag != "reward"},
    }
    summary_file.write_text(json.dumps(summary, indent=2) + "\n")
    console = Console()
    table = Table(title=f"{finished['steps']} steps, mean over {NUM_COMPARED} steps")
    for column in ("", "first", "last", "change"):
        table.add_column(column, justify="right")
    for tag in tags:
        first, last = ends[tag]
        table.add_row(tag, f"{first:.3f}", f"{last:.3f}", f"{last - first:+.3f}")
    held_out = before["reward"], after["reward"]
    table.add_row("held out, greedy", *(f"{value:.3f}" for value in held_out), f"{held_out[1] - held_out[0]:+.3f}")
    console.print(table)
    parts = Table(title="seconds")
    for name in PARTS:
        parts.add_column(name, justify="right")
    parts.add_row(*(f"{seconds.get(name, 0.0):.1f}" for name in PARTS))
    console.print(parts)
    print(f"numbers: {summary_file}\ncurves:  .venv/bin/tensorboard --logdir runs/demo_grpo")


def first_and_last(values: list[float]) -> tuple[float, float]:
    """Means of the first and the last `NUM_COMPARED` values."""
    first, last = values[:NUM_COMPARED], values[-NUM_COMPARED:]
    return sum(first) / len(first), sum(last) / len(last)


if __name__ == "__main__":
    main()
