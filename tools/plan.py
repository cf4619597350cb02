"""How to split devices between learner and rollout servers, and how long a step then takes, by a small model.

    python -m tools.plan --config FILE --nodes 2 --devices-per-node 8

The config's own batch geometry and tuner are kept; learners and rollout devices are what varies. Memory is that of
`--dry-run`; seconds are predicted by tools/predict.py from what `make bench` measured. Touches no device.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tools.predict import Constants, StepTime, constants_of_run, load_constants, predict, work_of
from utils.config.load import ConfigError, build_config, check_launch, engine_json, load_config_or_exit
from utils.config.memory import DEVICE_GIB, GIB, learner_memory, model_size
from utils.config.schema import Config

NUM_SHOWN = 8


@dataclass(frozen=True)
class Split:
    """One way to use the devices. `learner_bytes`: per learner device."""

    learners: int
    rollout_devices: int
    time: StepTime
    samples_per_s: float
    learner_bytes: int
    fits: bool


def main() -> None:
    args = parse_args()
    cfg = load_config_or_exit(args.config)
    kind = "cpu" if cfg.rs is not None and cfg.server_settings().device == "cpu" else "cuda"
    try:
        constants = measure(args.run) if args.run else load_constants(kind)
        found = splits(cfg, constants, args.nodes * args.devices_per_node, args)
    except ValueError as error:
        way_out = f"; {how_to_measure(kind)}" if "not measured" in str(error) else ""
        print(f"{args.config}: no prediction for {kind} devices: {error}{way_out}", file=sys.stderr)
        sys.exit(2)
    if not found:
        print(f"{args.config}: no split of these devices works; use more of them", file=sys.stderr)
        sys.exit(2)
    show(found)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices-per-node", type=int, default=8)
    parser.add_argument("--new-tokens", type=float, help="mean length of an answer; default: the longest allowed")
    parser.add_argument("--segment-tokens", type=float, help="mean length of a sequence; default: rows are full")
    parser.add_argument("--run", type=Path, help="constants from this finished run's directory, not from benchmarks/")
    parser.add_argument("--device-gib", type=float, default=DEVICE_GIB, help="memory of one device")
    return parser.parse_args()


def how_to_measure(kind: str) -> str:
    return "run `make bench`" if kind == "cpu" else "give a finished run there: --run RUN_DIR"


def measure(run_dir: Path) -> Constants:
    """What the devices of a finished stage-2 run with servers did.

    Raises:
        ValueError: no such run, or one that cannot tell.
    """
    try:
        record = json.loads((run_dir / "run.json").read_text())
    except OSError as error:
        raise ValueError(f"{run_dir}: no finished run there ({error.strerror})") from None
    cfg = build_config(record["config"])
    size = model_size(Path(cfg.model.path), cfg.tuner)
    if size is None or not record.get("server_world_sizes"):
        raise ValueError(f"{run_dir}: its checkpoint {cfg.model.path} is gone, or it had no servers")
    return constants_of_run(run_dir, cfg, size, record["world_size"], sum(record["server_world_sizes"]))


def splits(cfg: Config, constants: Constants, num_devices: int, args: argparse.Namespace) -> list[Split]:
    """Every split that the config allows, the one with most samples per second first; those that do not fit last.

    Raises:
        ValueError: a constant or the model's size is not known.
    """
    tensor = cfg.server_settings().vllm_tensor_parallel_size if cfg.rs is not None else 1
    size = model_size(Path(cfg.model.path), cfg.tuner)
    if size is None:
        raise ValueError(f"model.path={cfg.model.path}: neither a checkpoint nor a released model; give a path")
    found = []
    for learners in range(1, num_devices):
        rollout_devices = (num_devices - learners) // tensor * tensor
        if not rollout_devices or cfg.rm.decode_batch_size * rollout_devices < learners:  # DIS-2
            continue
        try:
            check_launch(cfg, learners)
        except ConfigError:  # such as a DeepSpeed JSON with a batch size that this number of learners contradicts
            continue
        work = work_of(cfg, size, learners, args.new_tokens, args.segment_tokens)
        time = predict(work, constants, learners, rollout_devices, cfg.rm.async_.enabled)
        memory = sum(learner_memory(cfg, engine_json(cfg, learners), size, learners).values())
        samples_per_s = work.num_answers / cfg.answers_per_sample / time.step
        fits = memory <= args.device_gib * GIB
        found.append(Split(learners, rollout_devices, time, samples_per_s, memory, fits))
    return sorted(found, key=lambda split: (not split.fits, -split.samples_per_s))


def show(found: list[Split]) -> None:
    table = Table(title="splits, best first; seconds per optimizer step")
    columns = ("learners", "rollout devices", "rollout", "train", "prepare", "sync", "step", "samples/s", "GiB/learner")
    for column in columns:
        table.add_column(column, justify="right")
    for split in found[:NUM_SHOWN]:
        time = split.time
        seconds = (f"{value:.3g}" for value in (time.rollout, time.train, time.prepare, time.sync, time.step))
        memory = f"{math.ceil(10 * split.learner_bytes / GIB) / 10:.1f}{'' if split.fits else ' (too much)'}"
        row = (str(split.learners), str(split.rollout_devices), *seconds, f"{split.samples_per_s:.3g}", memory)
        table.add_row(*row)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
