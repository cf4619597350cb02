"""End of a run before its last step: on request, after an optimizer step and with a checkpoint, or by an error. Either
way rank 0's last lines say what happened and how to continue."""

import argparse
import os
import shlex
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

import torch

from utils.dist import ALONE_NAME, COMMAND_NAME, DistributedError
from utils.output import tell
from utils.rollout.link import RolloutError
from utils.run.resume import checkpoint_folders, folders_up_to, problem_of_sizes

STOPPED_STATUS = 75  # EX_TEMPFAIL: a supervisor may start the run again with --resume auto


class Stopped(Exception):
    """The run ended on request, after a step from which it can be resumed."""


class StopRequest:
    """SIGTERM or SIGINT as a request that the training loop reads once per step; the ranks must agree on it.

    A second signal changes nothing: launchers send several. SIGQUIT and SIGKILL end the process at once.

    Attributes:
        requested: set by the signal, for threads that wait for a server meanwhile.
        is_training: False as long as there is nothing to save: until then a signal ends the process, status 75.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.requested = threading.Event()
        self.is_training = False

    def install(self) -> None:
        """Install the handlers; only in a process's main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name is not None:  # the first one counts: launchers send SIGTERM after a Ctrl-C
            return
        self.signal_name = signal.Signals(number).name
        words = "stop requested: finishing this optimizer step unless a server hangs, then saving a checkpoint"
        if not self.is_training:
            words = f"stopped by {self.signal_name} before the first step; start again with the same command"
        if _is_main():
            tell(f"\n{words}\n")
        if not self.is_training:
            os._exit(STOPPED_STATUS)  # an exception could be caught by whoever waits here
        self.requested.set()


def end_with(error: Exception, run_dir: Path, config: str, step: int | None, version: str | None) -> int:
    """Print rank 0's closing report on what ended the run; returns the exit status.

    Rank 1 prints it, too, where the error is not one that all ranks raised: rank 0 may have been killed.

    Args:
        config: the file as it was given.
        step: optimizer steps done; None before the first could begin.
        version: of the weights that generate.
    """
    is_stop = isinstance(error, Stopped)
    # Before the first step: a server that is not there, or a port that is taken, says it all; on the other ranks the
    # error has no cause, and rank 0 tells it.
    causes = (RolloutError, ConnectionError, *((type(None),) if isinstance(error, DistributedError) else ()))
    is_plain = step is None and isinstance(error.__cause__, causes)
    if not is_stop and not is_plain:
        traceback.print_exception(error)
    stands_in = os.environ.get("RANK") == "1" and not isinstance(error, DistributedError | Stopped)
    if _is_main() or stands_in:
        lines = ["rank 1, in case rank 0 is gone:"] if stands_in else []
        lines += closing_report(error, run_dir, config, step, version)
        print("\n".join(lines), file=sys.stderr, flush=True)
    return STOPPED_STATUS if is_stop else 1


def closing_report(error: Exception, run_dir: Path, config: str, step: int | None, version: str | None) -> list[str]:
    """What happened, at which step and version, the newest checkpoint, and the command that resumes from it."""
    what = str(error) if isinstance(error, Stopped) else f"failed: {type(error).__name__}: {error}"
    where = "before the first step" if step is None else f"after optimizer step {step}, generating weights {version}"
    newest = newest_checkpoint(run_dir, step)
    command = resume_command(launch_command(config), run_dir)
    lines = [f"run {run_dir}: {what}", f"  it ended {where}"]
    if newest is None:
        return [*lines, f"  no checkpoint is complete; start again with: {command}"]
    return [*lines, f"  newest complete checkpoint: {newest}", f"  resume from it with: {command}"]


def newest_checkpoint(run_dir: Path, step: int | None = None) -> Path | None:
    """The newest complete one, as far as names and sizes tell, of a run that has done `step` steps where known."""
    folders = checkpoint_folders(run_dir) if step is None else folders_up_to(run_dir, step)
    return next((path for path in folders if problem_of_sizes(path) is None), None)


def resume_command(command: str, run_dir: Path) -> str:
    """The command with `--resume auto`, which also replaces a checkpoint that it names: a run that has written anything
    refuses another one. A run that has written nothing keeps the named checkpoint."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", nargs="?", const="auto")
    given, others = parser.parse_known_args(shlex.split(command))
    is_new = newest_checkpoint(run_dir) is None and not (run_dir / "run.json").exists()
    return command if given.resume and is_new else shlex.join([*others, "--resume", "auto"])


def launch_command(config: str) -> str:
    """What launched this process: as `tools.launch` says, else as far as it is visible from inside."""
    if command := os.environ.get(COMMAND_NAME):
        return command
    program = f"{Path(sys.argv[0]).name} --config {shlex.quote(config)}"
    is_alone = os.environ.get(ALONE_NAME) == str(os.getpid())
    if is_alone or not {"LOCAL_WORLD_SIZE", "WORLD_SIZE"} & os.environ.keys():
        return f"python {program}"
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices and torch.cuda.is_available():  # the launcher sets it on CPU, too
        return f"deepspeed --include localhost:{devices} {program}"
    return f"deepspeed --num_gpus {os.environ.get('LOCAL_WORLD_SIZE') or os.environ['WORLD_SIZE']} {program}"


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"
