"""`make demo-grpo`: GRPO from start to end on this machine's CPU, with the real server and the real learner.

Makes scenes with summaries, and a model whose summaries have the right form but leave most objects out (cached). Then
it starts `rollout_server.py`, runs `deepspeed train_grpo.py` with two ranks against it, stops the server and shows the
result: a table and runs/demo_grpo/summary.json. It only starts the commands that a user would type.
"""

import argparse
import inspect
import json
import sys
import time
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tools.cached import cached
from tools.demo import (
    ALL_CORES,
    ENVIRONMENT,
    exit_on_sigterm,
    print_changes,
    print_seconds,
    read_results,
    run,
    say,
    serve_and_train,
)
from tools.make_demo import build_start_model, make_dataset
from tools.warmup_sft import load_warmup_config, warm_up
from utils.config.load import load_config_or_exit
from utils.data.encoding import encode_prompt
from utils.data.samples import Sample
from utils.targets import Segment, plain_segment

CONFIG, WARMUP_CONFIG = "configs/demo/grpo.yaml", "configs/demo/grpo_warmup.yaml"
ROOT = Path("runs/demo_grpo")
NUM_TRAIN, NUM_VAL, NUM_WARMUP = 1500, 64, 6400
DOMAIN = "shapes"
NUM_COMPARED = 10  # steps at either end of the run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make-only", action="store_true", help="only make data and start model")
    args = parser.parse_args()
    exit_on_sigterm()
    if args.make_only:
        make(ROOT)
        return
    start = time.monotonic()
    output = Path(load_config_or_exit(CONFIG).training.output_dir)
    say("1/3 data and start model (made once, kept under runs/demo_grpo)")
    run([sys.executable, "-m", "tools.demo_grpo", "--make-only"], ALL_CORES)
    seconds = {"make": time.monotonic() - start}
    seconds |= serve_and_train("train_grpo.py", CONFIG, ENVIRONMENT)
    seconds["total"] = time.monotonic() - start
    report(output, ROOT / "summary.json", seconds)


# ---- data and start model ------------------------------------------------------------------------------------------


def make(root: Path) -> None:
    """Make `data`, `start` and `model` below `root`, each only if its sources or settings have changed."""
    warmup = load_warmup_config(WARMUP_CONFIG)
    parts = (inspect.getmodule(make_dataset), make_data, summary_of, supervised_summary)
    sources = [*map(inspect.getsource, parts), NUM_TRAIN, NUM_VAL, NUM_WARMUP, DOMAIN]
    cached(root / "data", sources, "synthetic scenes with summaries", make_data)
    cached(root / "start", sources, "an untrained Qwen3-VL", build_start_model)

    settings, what = [sources, warmup.model_dump()], f"supervised warm-up, {warmup.steps} steps"
    cached(root / "model", settings, what, lambda _: warm_up(warmup, supervised_summary))


def make_data(folder: Path, num_train: int = NUM_TRAIN, num_val: int = NUM_VAL, num_warmup: int = NUM_WARMUP) -> None:
    """Make the demo's scenes, with `domain` and a `summary` of the annotated objects in each line."""
    for path in make_dataset(folder, num_train, num_val, num_warmup):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [row | {"domain": DOMAIN, "summary": summary_of(row["objects"])} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def summary_of(objects: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Count the objects as `{colour: {shape: count}}`, sorted by name."""
    counts: dict[str, dict[str, int]] = {}
    for colour, shape in sorted(item["desc"].split() for item in objects):
        own = counts.setdefault(colour, {})
        own[shape] = own.get(shape, 0) + 1
    return counts


def supervised_summary(sample: Sample, processor: Any) -> Segment:
    """Return the sample's prompt followed by its summary, every token of which is a label."""
    text = f"<DOMAIN={sample.extra['domain']}>, <TASK=SUMMARY>\n{json.dumps(sample.extra['summary'])}"
    answer = [*processor.tokenizer.encode(text, add_special_tokens=False), processor.tokenizer.eos_token_id]
    return plain_segment(sample.id, **vars(encode_prompt(sample, processor)), answer_ids=answer)


# ---- results -------------------------------------------------------------------------------------------------------


def report(output: Path, summary_file: Path, seconds: dict[str, float]) -> None:
    """Write `summary.json` and print it as tables."""
    finished, before, after = read_results(output)
    curves = EventAccumulator(str(output)).Reload()
    tags = [tag for tag in curves.Tags()["scalars"] if tag.split("/")[0] == "reward" and not tag.endswith("_std")]
    ends = {tag: first_and_last([event.value for event in curves.Scalars(tag)]) for tag in tags}
    seconds = finished["seconds"] | seconds
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
    title = f"{finished['steps']} steps, mean over {NUM_COMPARED} steps"
    print_changes(title, ("first", "last"), ends | {"held out, greedy": (before["reward"], after["reward"])})
    print_seconds(seconds)
    print(f"numbers: {summary_file}\ncurves:  .venv/bin/tensorboard --logdir runs/demo_grpo")


def first_and_last(values: list[float]) -> tuple[float, float]:
    """Means of the first and the last `NUM_COMPARED` values."""
    first, last = values[:NUM_COMPARED], values[-NUM_COMPARED:]
    return sum(first) / len(first), sum(last) / len(last)


if __name__ == "__main__":
    main()
