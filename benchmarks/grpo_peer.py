"""GRPO here and in TRL on the same task: seconds per optimizer step, and the reward after equally many steps.

    python -m benchmarks.grpo_peer --trl-python PATH/bin/python [--steps 30] [--rounds 2]

Not part of `make bench`: TRL needs its own environment, which has to be made first (docs/performance.md). Both train
the start model of `make demo-grpo` with the settings of its config (model, data, rewards, number of prompts and
answers, LoRA, a constant learning rate), each with two learner processes of one thread. TRL generates with transformers
in the learners, its default; ours uses the rollout server, whose time counts, as it runs on the same cores.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tools.demo import ENVIRONMENT, WORLD_SIZE, exit_on_sigterm, print_table, run, serve_and_train
from tools.demo_grpo import CONFIG
from utils.config.load import Config, load_config_or_exit
from utils.learner.model import adapter_targets, load_model

FOLDER = Path("runs/grpo_peer")
NUM_WARM_UP = 3  # first steps of each run, which are not timed
Step = dict[str, float]  # time (seconds since 1970), reward, new_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="Python interpreter of an environment with TRL")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps per run (default 30)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each trainer, in turns (default 2)")
    args = parser.parse_args()
    exit_on_sigterm()
    environment = ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())}
    run([sys.executable, "-m", "tools.demo_grpo", "--make-only"], environment)
    FOLDER.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[list[Step]]] = {"ours": [], "TRL": []}
    for turn in range(args.rounds):
        runs["ours"].append(train_ours(args.steps, turn, environment))
        runs["TRL"].append(train_trl(args.trl_python, args.steps, turn, environment))
    report(runs, args.steps)


def train_ours(steps: int, turn: int, environment: dict[str, str]) -> list[Step]:
    """Run `train_grpo.py` with its own server."""
    output = FOLDER / f"ours_{turn}"
    path = FOLDER / f"ours_{turn}.yaml"
    training = {"output_dir": str(output), "max_steps": steps, "seed": turn, "eval_steps": 0, "eval_at_start": False}
    training |= {"lr_scheduler": "constant", "warmup_steps": 0}
    path.write_text(yaml.safe_dump({"extends": os.path.relpath(CONFIG, FOLDER), "training": training}))
    serve_and_train("train_grpo.py", str(path), environment)
    curves = EventAccumulator(str(output)).Reload()
    reward, length = curves.Scalars("reward"), curves.Scalars("rollout/new_tokens_mean")
    return [
        {"time": event.wall_time, "reward": event.value, "new_tokens": tokens.value}
        for event, tokens in zip(reward, length, strict=True)
    ]


def train_trl(python: str, steps: int, turn: int, environment: dict[str, str]) -> list[Step]:
    """Run TRL's trainer under its own interpreter, with the same settings."""
    output = (FOLDER / f"trl_{turn}.jsonl").absolute()
    output.unlink(missing_ok=True)
    job = output.with_suffix(".job.json")
    job.write_text(json.dumps(trl_job(load_config_or_exit(CONFIG), steps, turn) | {"output": str(output)}, indent=2))
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(WORLD_SIZE)]
    with output.with_suffix(".log").open("w") as log:
        run([*command, "-m", "benchmarks.baselines.trl_grpo", str(job)], environment, log)
    return [json.loads(line) for line in output.open()]


def trl_job(cfg: Config, steps: int, seed: int) -> dict[str, Any]:
    """Return the config's settings in the form of `benchmarks.baselines.trl_grpo`."""
    training, tuner, rlhf = cfg.training, cfg.tuner, cfg.rlhf
    targets = adapter_targets(load_model(cfg.model.path, "float32"), tuner)
    return {
        "model": cfg.model.path,
        "train_jsonl": cfg.custom.train_jsonl[0].path,
        "prompt": cfg.data.prompt,
        "steps": steps,
        "seed": seed,
        "prompts_per_step": training.per_device_train_batch_size * WORLD_SIZE,
        "num_generations": rlhf.num_generations,
        "max_new_tokens": rlhf.max_new_tokens,
        "temperature": rlhf.decoding.temperature,
        "reward_funcs": rlhf.reward_funcs,
        "reward_weights": rlhf.reward_weights,
        "loss_type": rlhf.loss_type,
        "learning_rate": training.learning_rate,
        "max_grad_norm": training.max_grad_norm,
        "rank": tuner.rank,
        "alpha": tuner.alpha,
        "target_modules": targets,
    }


def report(runs: dict[str, list[list[Step]]], num_steps: int) -> None:
    """Print a table and write `runs/grpo_peer/summary.json`."""
    end = max(1, num_steps // 3)
    rows = {
        name: {
            "seconds_per_step": statistics.median(second for steps in done for second in step_seconds(steps)),
            "new_tokens_mean": statistics.mean(step["new_tokens"] for steps in done for step in steps),
            "reward_first": statistics.mean(step["reward"] for steps in done for step in steps[:end]),
            "reward_last": statistics.mean(step["reward"] for steps in done for step in steps[-end:]),
        }
        for name, done in runs.items()
    }
    ratio = rows["TRL"]["seconds_per_step"] / rows["ours"]["seconds_per_step"]
    summary = {"steps": num_steps, "rounds": len(runs["ours"]), "averaged_over": end, **rows, "times_faster": ratio}
    (FOLDER / "summary.json").write_text(json.dumps(summary | {"date": time.strftime("%Y-%m-%d")}, indent=2) + "\n")
    title = f"{num_steps} steps, {len(runs['ours'])} runs each; rewards are means over {end} steps"
    lines = [(name, *(f"{value:.3f}" for value in values.values())) for name, values in rows.items()]
    print_table(title, ("", *rows["ours"]), lines)
    print(f"TRL takes {ratio:.2f} times as long per step; {FOLDER / 'summary.json'}")


def step_seconds(steps: list[Step]) -> list[float]:
    """Seconds from the end of a step to that of the next, without the first `NUM_WARM_UP` steps."""
    ends = [step["time"] for step in steps[NUM_WARM_UP - 1 :]]
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


if __name__ == "__main__":
    main()
