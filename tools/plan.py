"""Compare ways to split devices between learner and rollout servers, by predicted seconds per optimizer step.

    python -m tools.plan --config FILE --nodes 2 --devices-per-node 8

The config's batch geometry and tuner stay as they are; only the number of learners and rollout devices varies. Memory
is the estimate that `--dry-run` prints; `python -m tools.plan --update-headers` writes it into the headers of the
shipped presets. Seconds come from a small model whose constants `make bench` measures (docs/performance.md), or a
finished run (`--run`). No device is used.

    rollout = answers of a step * new tokens * 2 * parameters / (rollout devices * rollout_flops_per_s)
    train   = tokens of a step * FLOPs per token / (learners * train_flops_per_s)
    prepare = answers per learner * prepare_s
    sync    = sync_fixed_s + bytes that can have changed / sync_bytes_per_s
    step    = rollout + train + prepare + sync, with prefetch max(rollout, train + prepare + sync)

FLOPs per token: 2 per parameter forward, 2 for the gradient of activations, 2 per trained parameter, and 2 more for the
layers that checkpointing recomputes; all that for each of GRPO's updates on the same answers (`num_iterations`). The
start policy of `reference_kl` and `beta` costs one more forward pass, and so do the old log-probabilities of several
updates. Of experts only those count that a token goes to. The model ignores attention over the length, the vision
tower's own tokens, prefill, the cost of more devices (all-reduce, tensor parallelism), and that teacher-forced samples
need no answer. A guide to splits, not a promise.
"""

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from utils.config.deepspeed import engine_json
from utils.config.load import ConfigError, Origin, build_config, check_launch, load_config, load_config_or_exit
from utils.config.memory import (
    DEVICE_GIB,
    GIB,
    ModelSize,
    cache_size,
    checkpointed_layers,
    learner_memory,
    model_size,
)
from utils.config.plan import at_least_one, make_plan, max_tokens_per_step
from utils.config.schema import Config

CONSTANTS = Path(__file__).parents[1] / "benchmarks" / "constants.json"
PRESETS = sorted(
    path
    for folder in ("stage1", "stage2", "grpo")
    for path in (Path(__file__).parents[1] / "configs" / folder).glob("*.yaml")
    if path.stem != "base"
)
SETTLING_STEPS = 3  # skipped at the start of a run: the first is cold and carries the first, full sync
NUM_SHOWN = 8


def main() -> None:
    args = parse_args()
    if args.update_headers:
        for path in PRESETS:
            path.write_text(re.sub(r"^# Memory: .*$", memory_line(path), path.read_text(), flags=re.MULTILINE))
        return
    cfg = load_config_or_exit(args.config)
    kind = kind_of(cfg)
    try:
        constants = measure(args.run, int(args.device_gib * GIB)) if args.run else load_constants(kind)
        found = splits(cfg, constants, args.nodes * args.devices_per_node, args)
    except ValueError as error:
        how_to_measure = "run `make bench`" if kind == "cpu" else "measure them with a finished run: --run RUN_DIR"
        advice = f"; {how_to_measure}" if "not measured" in str(error) else ""
        print(f"{args.config}: no prediction for {kind} devices: {error}{advice}", file=sys.stderr)
        sys.exit(2)
    if not found:
        print(f"{args.config}: no split of these devices works; use more devices", file=sys.stderr)
        sys.exit(2)
    show(found)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config")
    what.add_argument(
        "--update-headers", action="store_true", help="write the memory into the shipped presets' headers"
    )
    parser.add_argument("--nodes", type=at_least_one, default=1)
    parser.add_argument("--devices-per-node", type=at_least_one, default=8)
    parser.add_argument("--new-tokens", type=positive, help="mean length of a response (default: the maximum)")
    parser.add_argument("--segment-tokens", type=positive, help="mean length of a segment (default: rows are full)")
    parser.add_argument("--run", type=Path, help="take constants from this finished run, not from benchmarks/")
    parser.add_argument("--device-gib", type=positive, default=DEVICE_GIB, help="memory of one device")
    return parser.parse_args()


def positive(text: str) -> float:
    """Type of a measure for argparse, which reports what it raises."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text}; give a number above 0")
    return number


# ---------------------------------------------------------------------------------------------------------------------
# the headers of presets


def gpus_of(path: Path, target: str) -> list[int]:
    """GPUs that the header of a preset gives to `make TARGET` (a regex); empty without such a command."""
    found = re.search(rf"^# .*make (?:{target}) GPUS=([\d,]+) ", path.read_text(), re.MULTILINE)
    return [int(gpu) for gpu in found[1].split(",")] if found else []


def memory_line(path: Path) -> str:
    """The line `# Memory:` of a preset, from the plan for as many learners as its header starts."""
    cfg = load_config(path)
    plan = make_plan(cfg, len(gpus_of(path, "train|grpo")))
    text = f"{sum(plan.learner_memory.values()) / GIB:.1f} GiB per learner"
    if cfg.generates:
        share = cfg.server_settings().vllm_gpu_memory_utilization * DEVICE_GIB
        needed = sum(plan.engines[0].memory.values()) / GIB
        text += f"; {needed:.1f} GiB per rollout device, of the {share:.0f} GiB that vLLM takes"
    return f"# Memory:   {text} (estimates of --dry-run)"


# ---------------------------------------------------------------------------------------------------------------------
# the model


@dataclass(frozen=True)
class Constants:
    """Performance of one device of a kind (`cpu`, `cuda`); None: not measured."""

    train_flops_per_s: float | None = None
    rollout_flops_per_s: float | None = None
    prepare_s: float | None = None  # per response: parse, match, target
    sync_fixed_s: float | None = None
    sync_bytes_per_s: float | None = None

    @property
    def missing(self) -> list[str]:
        return [name for name, value in asdict(self).items() if value is None]


@dataclass(frozen=True)
class StepWork:
    """Work of one optimizer step. `num_tokens`: trained on; `sync_bytes`: merged tensors that can have changed. Of the
    parameters, those that a token uses."""

    num_answers: int
    new_tokens: float  # per answer
    num_tokens: float
    parameters: int
    trainable: int
    sync_bytes: float
    recompute: float = 0.0  # fraction of the forward pass that backward repeats
    num_updates: int = 1  # on the same tokens
    num_other_passes: int = 0  # forward passes without a gradient

    @property
    def train_flops(self) -> float:
        update = (2 + self.recompute) * self.parameters + self.trainable
        return self.num_tokens * 2 * (self.num_updates * update + self.num_other_passes * self.parameters)

    @property
    def rollout_flops(self) -> float:
        return self.num_answers * self.new_tokens * 2 * self.parameters


@dataclass(frozen=True)
class StepTime:
    """Seconds by part. `step`: wall time of the whole step, with or without prefetch."""

    rollout: float
    train: float
    prepare: float
    sync: float
    prefetch: bool

    @property
    def step(self) -> float:
        learner = self.train + self.prepare + self.sync
        return max(self.rollout, learner) if self.prefetch else self.rollout + learner


def predict(work: StepWork, constants: Constants, learners: int, rollout_devices: int, prefetch: bool) -> StepTime:
    """Raises ValueError if a constant has not been measured."""
    if constants.missing:
        raise ValueError(f"not measured: {', '.join(constants.missing)}")
    return StepTime(
        rollout=work.rollout_flops / (rollout_devices * constants.rollout_flops_per_s),
        train=work.train_flops / (learners * constants.train_flops_per_s),
        prepare=work.num_answers / learners * constants.prepare_s,
        sync=constants.sync_fixed_s + work.sync_bytes / constants.sync_bytes_per_s,
        prefetch=prefetch,
    )


# ---------------------------------------------------------------------------------------------------------------------
# its constants


def calibrate(work: StepWork, measured: StepTime, learners: int = 1, rollout_devices: int = 1) -> dict[str, float]:
    """Constants that would have predicted `measured`, all but `sync_bytes_per_s`, which a small model does not show."""
    return {
        "train_flops_per_s": work.train_flops / (learners * measured.train),
        "rollout_flops_per_s": work.rollout_flops / (rollout_devices * measured.rollout),
        "prepare_s": measured.prepare * learners / work.num_answers,
        "sync_fixed_s": measured.sync,
    }


def measure(run_dir: Path, device_bytes: int = DEVICE_GIB * GIB) -> Constants:
    """Constants of the devices of a finished stage-2 run with servers; its sync counts as bandwidth alone.

    Args:
        device_bytes: memory of a learner's GPU, which decided what `gradient_checkpointing: auto` was.

    Raises:
        ValueError: no such run, no servers or curves, too few steps, or prefetch (a step then trains on earlier
            rollouts).
    """
    path = run_dir / "run.json"
    try:
        record = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{run_dir}: no finished run there ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: is no whole JSON ({error}); name another run") from None
    if not (isinstance(record, dict) and isinstance(record.get("config"), dict) and "world_size" in record):
        raise ValueError(f"{path}: is not that of a run; name the training.output_dir of a finished one")
    cfg = build_config(record["config"], Origin(str(path), record["config"]))
    size = model_size(Path(cfg.model.path), cfg.tuner)
    if size is None or not record.get("server_world_sizes"):
        raise ValueError(f"{run_dir}: its checkpoint {cfg.model.path} no longer exists, or it had no servers")
    if cfg.rm.async_.enabled:
        raise ValueError(f"{run_dir}: with prefetch a step's seconds are not its own; measure a run without")
    steps = read_steps(run_dir)[SETTLING_STEPS:]
    if not steps:
        raise ValueError(f"{run_dir}: needs more than {SETTLING_STEPS} steps")
    step = median_step(steps)
    if not (round(step["answers"]) and step["rollout"] and step["train"] and step["sync"]):
        raise ValueError(
            f"{run_dir}: most of its steps do not generate, train or sync; measure a run whose steps all do"
        )
    recompute = recomputed(cfg, size, record["world_size"], device_bytes)[1]
    work = replace(work_of_step(step, size, recompute), num_other_passes=num_other_passes(cfg))
    constants = calibrate(work, time_of_step(step), record["world_size"], sum(record["server_world_sizes"]))
    bandwidth = step["sync_bytes"] / step["sync"]
    return Constants(**constants | {"sync_fixed_s": 0.0, "sync_bytes_per_s": bandwidth})


def read_steps(run_dir: Path) -> list[dict[str, float]]:
    """Metrics of every optimizer step of a run: seconds by part, `answers`, `new_tokens` (per answer), `tokens`
    (trained on), `sync_bytes`. Raises ValueError where the run's TensorBoard curves lack one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    tags = {part: f"seconds/{part}" for part in ("rollout", "train", "sync", "prepare", "step")}
    tags |= {"new_tokens": "rollout/new_tokens_mean", "tokens": "train/tokens_per_s", "answers": "rollout/num_images"}
    tags |= {"sync_bytes": "sync/bytes"}
    there = events.Tags()["scalars"]
    if not there:
        raise ValueError(f"{run_dir}: holds no TensorBoard curves; name a run with tensorboard in training.report_to")
    if missing := sorted(set(tags.values()) - set(there)):
        raise ValueError(f"{run_dir}: its curves lack {', '.join(missing)}; name a finished stage-2 run with servers")
    curves = {part: {event.step: event.value for event in events.Scalars(tag)} for part, tag in tags.items()}
    steps = [{part: curve.get(step, 0.0) for part, curve in curves.items()} for step in sorted(curves["step"])]
    return [step | {"tokens": step["tokens"] * step["step"]} for step in steps]


def median_step(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median of each metric on its own."""
    return {part: statistics.median(step[part] for step in steps) for part in steps[0]}


def work_of_step(step: Mapping[str, float], size: ModelSize, recompute: float = 0.0) -> StepWork:
    """Work of a measured step; its sync is all in the fixed part."""
    return StepWork(
        num_answers=round(step["answers"]),
        new_tokens=step["new_tokens"],
        num_tokens=step["tokens"],
        parameters=size.active[0],
        trainable=size.active[1],
        sync_bytes=0.0,
        recompute=recompute,
    )


def time_of_step(step: Mapping[str, float]) -> StepTime:
    return StepTime(step["rollout"], step["train"], step["prepare"], step["sync"], prefetch=False)


def load_constants(kind: str, path: Path = CONSTANTS) -> Constants:
    """Constants of `kind`, as far as they have been measured."""
    return Constants(**(json.loads(path.read_text()).get(kind, {}) if path.exists() else {}))


def write_constants(kind: str, values: dict[str, float], path: Path = CONSTANTS) -> None:
    """Replace the given constants of `kind`; keep all others."""
    known = json.loads(path.read_text()) if path.exists() else {}
    rounded = {name: float(f"{value:.4g}") for name, value in values.items()}
    known[kind] = {**known.get(kind, {}), **rounded}
    path.write_text(json.dumps(known, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# splits of the devices


@dataclass(frozen=True)
class Split:
    """One way to use the devices. `learner_bytes`: per learner device."""

    learners: int
    rollout_devices: int
    time: StepTime
    samples_per_s: float
    learner_bytes: int
    fits: bool


def splits(cfg: Config, constants: Constants, num_devices: int, args: argparse.Namespace) -> list[Split]:
    """Every split that the config allows, most samples per second first; those that do not fit into memory last.

    Raises:
        ValueError: a constant or the model's size is unknown.
    """
    if not cfg.generates:
        raise ValueError("nothing generates in this run, so every device is a learner")
    if cfg.is_colocate or cfg.rm.rollout_backend == "hf":
        raise ValueError("the learners' own devices generate in this run, so every device is a learner")
    if cfg.is_grpo and args.nodes > 1:
        raise ValueError("GRPO has its one server on the learners' own machine (GRP-2); plan for --nodes 1")
    tensor_parallel_size = cfg.server_settings().vllm_tensor_parallel_size if cfg.rs is not None else 1
    size = model_size(Path(cfg.model.path), cfg.tuner)
    if size is None:
        raise ValueError(f"model.path={cfg.model.path}: neither a checkpoint nor a released model; give a path")
    cache = cache_size(cfg, size, args.device_gib)
    has_room = cache is None or cache.num_tokens >= cache.max_model_len
    found = []
    for learners in range(1, num_devices):
        rollout_devices = (num_devices - learners) // tensor_parallel_size * tensor_parallel_size
        if not rollout_devices or cfg.rm.decode_batch_size * rollout_devices < learners:  # DIS-2
            continue
        try:
            check_launch(cfg, learners)
        except ConfigError:  # such as a DeepSpeed JSON with a batch size that this number of learners contradicts
            continue
        num_checkpointed, recompute = recomputed(cfg, size, learners, int(args.device_gib * GIB))
        work = planned_work(cfg, size, learners, args.new_tokens, args.segment_tokens, recompute)
        time = predict(work, constants, learners, rollout_devices, cfg.rm.async_.enabled)
        memory = sum(learner_memory(cfg, engine_json(cfg, learners), size, learners, num_checkpointed).values())
        samples_per_s = work.num_answers / cfg.answers_per_sample / time.step
        fits = has_room and memory <= args.device_gib * GIB
        found.append(Split(learners, rollout_devices, time, samples_per_s, memory, fits))
    return sorted(found, key=lambda split: (not split.fits, -split.samples_per_s))


def kind_of(cfg: Config) -> str:
    """The kind of device that learners and engines run on: `cpu` or `cuda`."""
    return "cpu" if cfg.rs is not None and cfg.server_settings().device == "cpu" else "cuda"


def recomputed(cfg: Config, size: ModelSize, learners: int, device_bytes: int) -> tuple[int | None, float]:
    """Layers that backward recomputes (None: all), and what fraction of the forward pass they are."""
    on_cpu = kind_of(cfg) == "cpu"
    num = checkpointed_layers(cfg, engine_json(cfg, learners), size, learners, 0 if on_cpu else device_bytes)
    return num, 1.0 if num is None else min(1.0, num / max(size.num_layers, 1))


def planned_work(
    cfg: Config,
    size: ModelSize,
    learners: int,
    new_tokens: float | None,
    segment_tokens: float | None,
    recompute: float = 0.0,
) -> StepWork:
    """Work of a step of `cfg`: the longest responses and full rows, unless their mean lengths are given."""
    training = cfg.training
    num_samples = learners * training.per_device_train_batch_size * training.gradient_accumulation_steps
    num_answers = num_samples * cfg.answers_per_sample
    bytes_each = 4 if cfg.model.dtype == "float32" else 2
    return StepWork(
        num_answers=num_answers,
        new_tokens=new_tokens or cfg.rm.max_new_tokens,
        num_tokens=num_answers * segment_tokens if segment_tokens else max_tokens_per_step(cfg, learners),
        parameters=size.active[0],
        trainable=size.active[1],
        sync_bytes=size.can_change * bytes_each,
        recompute=recompute,
        num_updates=cfg.rlhf.num_iterations if cfg.is_grpo and cfg.rlhf else 1,
        num_other_passes=num_other_passes(cfg),
    )


def num_other_passes(cfg: Config) -> int:
    """Forward passes of the start policy, and of the policy before several updates on the same answers."""
    return cfg.has_reference + bool(cfg.is_grpo and cfg.rlhf and cfg.rlhf.num_iterations > 1)


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
