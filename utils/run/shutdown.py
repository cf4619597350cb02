"""How a run ends before its last step: on request, at the end of an optimizer step and with a checkpoint; or by an
error. Either way rank 0's last lines say what happened and how to go on."""

import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

import torch

from utils.dist import DistributedError
from utils.run.resume import checkpoint_folders, problem_of_sizes

STOPPED_STATUS = 75  # EX_TEMPFAIL: whoever supervises the run may start it again with --resume auto
_IS_MAIN = os.environ.get("RANK", "0") == "0"


class Stopped(Exception):
    """The run was asked to end, and did, at a step from which it can go on."""


class StopRequest:
    """SIGTERM and SIGINT become a wish that the training loop looks at once per step; the ranks must agree on it.

    A second signal changes nothing: launchers send several. SIGQUIT and SIGKILL end the process at once.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def install(self) -> None:
        """From now on; only in a process's main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None:  # the first one counts: launchers send SIGTERM behind a Ctrl-C
            return
        self.signal_name = signal.Signals(number).name
        if _IS_MAIN:  # not by print, which the signal may have interrupted
            os.write(2, b"\nasked to end: finishing this optimizer step, then saving a checkpoint\n")


def end_with(error: Exception, run_dir: Path, config: str, step: int | None, version: str | None) -> int:
    """Rank 0's last words about what ended the run; returns the exit status.

    Rank 1 says them, too, where the error is not one that all ranks agreed on: rank 0 may have been killed.

    Args:
        config: the file as it was given.
        step: optimizer steps done; None before the first could begin.
        version: of the weights that generate.
    """
    is_stop = isinstance(error, Stopped)
    if not is_stop:
        traceback.print_exception(error)
    speaks_for_rank_0 = os.environ.get("RANK") == "1" and not isinstance(error, DistributedError | Stopped)
    if _IS_MAIN or speaks_for_rank_0:
        words = ["rank 1, should rank 0 be gone:"] if speaks_for_rank_0 else []
        words += last_words(error, run_dir, config, step, version)
        print("\n".join(words), file=sys.stderr, flush=True)
    return STOPPED_STATUS if is_stop else 1


def last_words(error: Exception, run_dir: Path, config: str, step: int | None, version: str | None) -> list[str]:
    """What happened, at which step and version, which checkpoint there is, which command goes on from it."""
    what = str(error) if isinstance(error, Stopped) else f"failed: {type(error).__name__}: {error}"
    where = "before the first step" if step is None else f"after optimizer step {step}, generating weights {version}"
    newest = newest_checkpoint(run_dir)
    lines = [f"run {run_dir}: {what}", f"  it ended {where}"]
    if newest is None:
        return [*lines, f"  no checkpoint is complete; start again with: {resume_command(config)}"]
    return [*lines, f"  newest complete checkpoint: {newest}", f"  go on from it with: {resume_command(config)}"]


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete one, as far as names and sizes tell."""
    return next((path for path in checkpoint_folders(run_dir) if problem_of_sizes(path) is None), None)


def resume_command(config: str) -> str:
    """This process's launch with `--resume auto`, as far as it can be seen from inside."""
    program = f"{Path(sys.argv[0]).name} --config {config} --resume auto"
    if "LOCAL_WORLD_SIZE" not in os.environ and "WORLD_SIZE" not in os.environ:
        return f"python {program}"
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices and torch.cuda.is_available():  # the launcher sets it on CPU, too
        return f"deepspeed --include localhost:{devices} {program}"
    return f"deepspeed --num_gpus {os.environ.get('LOCAL_WORLD_SIZE') or os.environ['WORLD_SIZE']} {program}"
