"""A small learner without a server, to be killed and resumed, and checks that two runs are equal."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.processes import ENVIRONMENT, ROOT, START_S, alive, free_port, write_yaml
from tools.launch import process_tree, ranks_of
from utils.run.resume import checkpoint_folders, problem_of_sizes, rank_file

DORA = {"type": "lora", "use_dora": True, "rank": 4, "alpha": 8, "dropout": 0.1, "modules_to_save": ["embed_tokens"]}


def config_of(folder: Path, model: Path, name: str, deepspeed: str = "zero2", **training: Any) -> Path:
    """Write FOLDER/NAME.yaml: greedy rollouts by `hf`, dropout in the adapter, rows that leave segments behind."""
    matching = {
        "rollout_backend": "hf",
        "decode_batch_size": 3,
        "max_new_tokens": 32,
        "monitor_dump": {"every_steps": 1, "num_samples": 3},
    }
    sharded = {"stage": 3, "stage3_param_persistence_threshold": 0}  # otherwise small models are never sharded
    (folder / "zero3.json").write_text(json.dumps({"zero_optimization": sharded}))
    config = {
        "global_max_length": 400,  # fits two of the three segments that arrive: the buffer is never empty
        "model": {"path": str(model), "dtype": "float32"},
        "tuner": DORA,
        "custom": {
            "trainer_variant": "rollout_matching_sft",
            "train_jsonl": str(folder / "data" / "train.jsonl"),
            "val_jsonl": str(folder / "data" / "val.jsonl"),
            "extra": {"rollout_matching": matching},
        },
        "training": {
            "output_dir": str(folder / name),
            "per_device_train_batch_size": 3,
            "learning_rate": 5e-3,
            "resume_from_checkpoint": "auto",
        }
        | training,
        "deepspeed": str(folder / "zero3.json") if deepspeed == "zero3" else deepspeed,
    }
    return write_yaml(folder / f"{name}.yaml", config)


class LearnerProcess:
    """`deepspeed --num_gpus 2 train_stage2.py` in its own process group, or with another launcher or script."""

    def __init__(
        self,
        config: Path,
        *arguments: str,
        num_ranks: int = 2,
        launcher: tuple[str, ...] = ("deepspeed",),
        script: str | Path = "train_stage2.py",
        master_port: int | None = None,
        environment: dict[str, str] = ENVIRONMENT,
    ):
        self.log = config.with_suffix(f".{time.monotonic_ns()}.log")
        command = [*launcher, "--num_gpus", str(num_ranks), "--master_port", str(master_port or free_port())]
        command[0] = command[0] if command[0] == sys.executable else str(Path(sys.executable).parent / command[0])
        command += [str(ROOT / script), "--config", str(config), *arguments]
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def steps(self) -> list[int]:
        """Return the number of optimizer steps that this process has reported."""
        return [int(step) for step in re.findall(r"^step (\d+)/", self.output, flags=re.MULTILINE)]

    def wait_for(self, condition: Any) -> bool:
        """Wait until the condition holds; return False if the learner ends first."""
        deadline = time.monotonic() + START_S
        while not condition():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(self.output[-6000:])
            time.sleep(0.02)
        return True

    def rank(self, number: int) -> psutil.Process:
        """Return the process of one rank."""
        (process,) = [p for p in ranks_of(self.process.pid) if f"--local_rank={number}" in p.cmdline()]
        return process

    def kill(self) -> None:
        """Send SIGKILL to the launcher and all ranks at once, including those in a session of their own."""
        family = process_tree(self.process.pid)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in alive(family):
            process.kill()
        self.process.wait()

    def end(self, timeout_s: float = START_S) -> int:
        """Wait for the end and return the exit status."""
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the learner did not end in {timeout_s} s:\n{self.output[-6000:]}") from None


def assert_clean_end(learner: LearnerProcess, family: list[psutil.Process], words: str, run: Path, step: int) -> None:
    """The learner must have ended with an error on all ranks, and its last lines must say what happened, at which step
    and version, which checkpoint to resume from and with which command.

    Args:
        family: its processes while it ran.
        words: expected in the line about what happened.
        step: of the newest checkpoint; the run saved after every step, and may have been about to save.
    """
    assert learner.process.returncode not in (0, None), learner.output[-6000:]
    assert not alive(family), [process.cmdline() for process in alive(family)]
    last = learner.output[learner.output.rindex(f"run {run}: failed: ") :]
    assert words in last, last
    assert re.search(rf"it ended after optimizer step ({step}|{step + 1}), generating weights ", last), last
    assert f"newest complete checkpoint: {run / f'checkpoint-{step}'}" in last, last
    config = learner.log.with_name(learner.log.name.split(".")[0] + ".yaml")
    launcher = "(deepspeed|python -m tools.launch)"
    assert re.search(rf"resume from it with: {launcher} .*train_stage2.py --config {config} --resume auto", last), last
    assert newest_step(run) == step


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint that looks complete, 0 without one."""
    whole = [path for path in checkpoint_folders(run) if problem_of_sizes(path) is None]
    return int(whole[0].name.removeprefix("checkpoint-")) if whole else 0


def curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Return `{tag: [(step, value)]}` of every scalar that does not measure time."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    timed = ("seconds/", "sync/", "train/tokens_per_s")
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith(timed)]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def dumps(run: Path) -> dict[str, Any]:
    """Return every dumped sample by step and name, without the run's id: what was trained when, on which answers."""
    read = {}
    for path in sorted(run.glob("dumps/step_*/*.json")):
        record = json.loads(path.read_text())
        version = record["rollout"].pop("weight_version")
        read[f"{path.parent.name}/{path.name}"] = record | {"weights_of_step": version.rpartition(":")[2]}
    return read


def assert_same_checkpoint(one: Path, other: Path, num_ranks: int = 2) -> None:
    """Weights, optimizer, data position, carry buffer and random states must be equal, bit for bit."""
    files = {path.name for path in (one / "state").glob("*.pt")}
    assert files == {path.name for path in (other / "state").glob("*.pt")} and len(files) > num_ranks
    for name in sorted(files):
        is_ours = name == rank_file(one, int(name[5:10])).name if name.startswith("rank_") else False
        states = [torch.load(side / "state" / name, map_location="cpu", weights_only=is_ours) for side in (one, other)]
        if not is_ours:
            states = [{k: v for k, v in state.items() if k != "ds_config"} for state in states]
        assert_equal(*states, where=name)
    for path in (one / "merged").glob("*.safetensors"):
        assert path.read_bytes() == (other / "merged" / path.name).read_bytes(), path.name


def assert_equal(one: Any, other: Any, where: str) -> None:
    """Nested values must be equal to the last bit, and versions of weights equal apart from the run's id."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}: {key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{where}[{index}]")
    elif where.endswith("policy_version") and isinstance(one, str):
        assert one.rpartition(":")[2] == other.rpartition(":")[2], where
    elif hasattr(one, "__dict__") and not isinstance(one, type):
        assert_equal(vars(one), vars(other), where)  # DeepSpeed's loss scaler
    else:
        assert one == other, f"{where}: {one!r} != {other!r}"
